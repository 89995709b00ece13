#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"
#include "deterministic.glsl"
#include "reduce.glsl"

// A device's part of prompt logprobs, where devices each have the logits of a part of the vocabulary (`join_scores`): for each
// row of a prompt chunk, an entry as in `scores` with logits in place of logprobs, and the logarithm of the sum of e^logit
// over the device's tokens in the word SCORE_LOG_SUM. The logit of a token that another device has is -inf.
//
//   logits [rows][row_stride] f32 of the vocabulary's tokens, the first of which is token `first`; NaN is -inf
//   rows   [chunk rows][4] and chunk: of the prompt step; score: `state.glsl`
//   parts  [rows][SCORE_WORDS] words
//
// One workgroup processes one row; an invocation owns every THREADS-th group of four tokens. Traffic: that of `score`.

layout(local_size_x_id = 0) in;
const uint THREADS = gl_WorkGroupSize.x;

layout(push_constant) uniform Args {
    Floats4In logits;
    WordsIn rows;
    WordsIn chunk;
    WordsIn score;
    WordsOut parts;
    uint vocabulary;
    uint row_stride;
    uint first;
} args;

shared uint list_keys[LIST];
shared uint list_tokens[LIST];
#define LIST_KEYS list_keys
#define LIST_TOKENS list_tokens
#define TOP_VALUE(key, most, norm) value_of(key)
shared uint target_key;

uint thread;
uint first_quad;
uint quads;

// Returns the keys of a group of logits; 0, which is less than any key, outside the vocabulary.
uvec4 load_keys(uint quad) {
    vec4 l = args.logits.v[first_quad + min(quad, quads - 1u)];
    uint left = quad < quads ? args.vocabulary - 4u * quad : 0u;
    uvec4 k = uvec4(key_of(l.x), key_of(l.y), key_of(l.z), key_of(l.w));
    return uvec4(left > 0u ? k.x : 0u, left > 1u ? k.y : 0u, left > 2u ? k.z : 0u, left > 3u ? k.w : 0u);
}

void load_block(uint base, out uvec4 block[4]) {
    [[unroll]] for (uint j = 0u; j < 4u; j++) block[j] = load_keys(base + j * THREADS + thread);
}

#include "top.glsl"

void main() {
    thread = gl_LocalInvocationID.x;
    quads = (args.vocabulary + 3u) / 4u;
    first_quad = gl_WorkGroupID.x * (args.row_stride / 4u);
    uint row = args.score.v[SCORE_TURN] * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint count = args.chunk.v[2];
    if (row >= count) return;
    uint token = args.score.v[SCORE_NEXT];
    if (row + 1u < count) token = args.rows.v[(row + 1u) * 4u];
    // Tokens before the first wrap around.
    uint own = token - args.first;

    if (thread == 0u) target_key = KEY_MINUS_INFINITY;
    uvec2 best = reduce_best(own_best_after(uvec2(TOKEN_NONE, 0u)));
    bool none = best.x <= KEY_MINUS_INFINITY;
    float most = value_of(best.x);
    float sum = total(most);
    if (own < args.vocabulary && own / 4u % THREADS == thread) target_key = load_keys(own / 4u)[own % 4u];
    float norm = log_positive(reduce_sum(sum));
    uint wanted = none ? 0u : min(args.score.v[SCORE_TOP_N], TOP_ENTRIES);
    uint top_count = wanted > 0u ? find_top(wanted, best, norm) : 0u;
    uint entry = gl_WorkGroupID.x * SCORE_WORDS;
    for (uint i = thread; i < top_count; i += THREADS) {
        args.parts.v[entry + SCORE_TOP + 2u * i] = args.first + top_ids[i];
        args.parts.v[entry + SCORE_TOP + 2u * i + 1u] = floatBitsToUint(top_values[i]);
    }
    if (thread != 0u) return;
    args.parts.v[entry + SCORE_TOKEN] = token;
    args.parts.v[entry + SCORE_LOGPROB] = floatBitsToUint(value_of(target_key));
    args.parts.v[entry + SCORE_TOP_COUNT] = top_count;
    args.parts.v[entry + SCORE_LOG_SUM] = none ? 0xff800000u : floatBitsToUint(most + norm);
}

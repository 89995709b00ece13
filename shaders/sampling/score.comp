#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"
#include "deterministic.glsl"
#include "reduce.glsl"

// Prompt logprobs: for each row of a prompt chunk, the log softmax of the token that follows it, and the most probable
// tokens. Nothing is drawn; biases, penalties and masks apply to outputs only.
//
//   logits [rows][row_stride] f32: row r is row turn * rows + r of the chunk; row_stride is a multiple of 4; NaN is -inf
//   rows   [chunk rows][4] and chunk: of the prompt step; score, scores: `state.glsl`
//
// One workgroup processes one row; an invocation owns every THREADS-th group of four tokens. Traffic: 8·V bytes, where
// V is the vocabulary's size, plus 4·V for alternatives, from the L2 cache after the first pass. If the guessed bound
// of the list was bad (`guess_bound` in `top.glsl`), 4·V for each alternative.

layout(local_size_x_id = 0) in;
const uint THREADS = gl_WorkGroupSize.x;

layout(push_constant) uniform Args {
    Floats4In logits;
    WordsIn rows;
    WordsIn chunk;
    WordsIn score;
    WordsOut scores;
    uint vocabulary;
    uint row_stride;
} args;

shared uint list_keys[LIST];
shared uint list_tokens[LIST];
#define LIST_KEYS list_keys
#define LIST_TOKENS list_tokens
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
    // The token that follows is not known yet.
    if (token >= args.vocabulary) return;

    uvec2 best = reduce_best(own_best_after(uvec2(TOKEN_NONE, 0u)));
    bool none = best.x <= KEY_MINUS_INFINITY;
    float most = value_of(best.x);
    float sum = total(most);
    if (token / 4u % THREADS == thread) target_key = load_keys(token / 4u)[token % 4u];
    float norm = log_positive(reduce_sum(sum));
    uint wanted = none ? 0u : min(args.score.v[SCORE_TOP_N], TOP_ENTRIES);
    uint top_count = wanted > 0u ? find_top(wanted, best, norm) : 0u;
    uint entry = (args.score.v[SCORE_FIRST] + row) * SCORE_WORDS;
    for (uint i = thread; i < top_count; i += THREADS) {
        args.scores.v[entry + SCORE_TOP + 2u * i] = top_ids[i];
        args.scores.v[entry + SCORE_TOP + 2u * i + 1u] = floatBitsToUint(top_values[i]);
    }
    if (thread != 0u) return;
    float logprob = none ? uintBitsToFloat(0xff800000u) : value_of(target_key) - most - norm;
    args.scores.v[entry + SCORE_TOKEN] = token;
    args.scores.v[entry + SCORE_LOGPROB] = floatBitsToUint(logprob);
    args.scores.v[entry + SCORE_TOP_COUNT] = top_count;
}

#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"
#include "deterministic.glsl"
#include "reduce.glsl"

// Draws the token of each listed row from the shortlists of all devices (`shortlist`), each of which has the logits of a part
// of the vocabulary: the token that `sample` draws from all logits, or none if the lists do not hold all tokens that the
// filters keep. All devices get the same result, since the arithmetic is that of `deterministic.glsl`.
//
//   shortlists [rows][RANKS][HEADER + 2 · ENTRIES] words
//   best      [rows][best_stride] pairs of f32 bits and a token: the first best_count pairs of a row are the maxima of all
//             parts of the vocabulary, the next one becomes the drawn token and 1, or stays as it is
//   list      `shared_rows`: the rows
//   rows, state: `state.glsl`. Row r is for the token number r % every from the slot's next one on
//
// A list that is full holds all of the device's tokens that are better than its last one. So the tokens better than the
// greatest last one of full lists are all there.
//
// One workgroup processes one row. Traffic: 8 · RANKS · ENTRIES bytes.

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ENTRIES = 128;
layout(constant_id = 2) const uint RANKS = 2;
const uint THREADS = gl_WorkGroupSize.x;
const uint HEADER = 8u;
const uint EACH = HEADER + 2u * ENTRIES;

layout(buffer_reference, std430, buffer_reference_align = 8) buffer PairsInOut { uvec2 v[]; };

layout(push_constant) uniform Args {
    WordsIn shortlists;
    PairsInOut best;
    WordsIn list;
    Words4In rows;
    WordsIn state;
    uint whole_vocabulary;
    uint best_count;
    uint best_stride;
    uint every;
} args;

shared uint list_keys[2u * LIST];
shared uint list_tokens[LIST];
shared uint list_length;
#define LIST_KEYS list_keys
#define LIST_TOKENS list_tokens
#define DRAW_VOCABULARY args.whole_vocabulary

uint thread;
uint row;

#include "draw.glsl"

uvec2 row_mass(Draw draw) {
    uvec2 sum = uvec2(0u);
    for (uint rank = 0u; rank < RANKS; rank++) {
        uint at = (row * RANKS + rank) * EACH;
        sum = add64(sum, uvec2(args.shortlists.v[at + 2u], args.shortlists.v[at + 3u]));
    }
    return sum;
}

void main() {
    thread = gl_LocalInvocationIndex;
    if (gl_WorkGroupID.x >= args.list.v[1]) return;
    row = args.list.v[2u + gl_WorkGroupID.x];

    uvec2 best = uvec2(0u, TOKEN_NONE);
    for (uint i = thread; i < args.best_count; i += THREADS) {
        uvec2 part = args.best.v[row * args.best_stride + i];
        uint key = key_of(uintBitsToFloat(part.x));
        if (key > best.x || (key == best.x && part.y < best.y)) best = uvec2(key, part.y);
    }
    best = reduce_best(best);
    // `sample` says what is drawn if no logit is a number.
    if (best.x <= KEY_MINUS_INFINITY) return;
    Draw draw = draw_of(args.rows.v[row].z * SLOT_WORDS, best, row % args.every);

    uvec2 winner = uvec2(0u, TOKEN_NONE);
    if (draw.by_count || draw.by_mass) {
        uint bound = draw.least;
        for (uint rank = 0u; rank < RANKS; rank++) {
            uint at = (row * RANKS + rank) * EACH;
            if (args.shortlists.v[at] == ENTRIES) {
                bound = max(bound, args.shortlists.v[at + HEADER + 2u * (ENTRIES - 1u)] + 1u);
            }
        }
        if (thread == 0u) list_length = 0u;
        barrier();
        for (uint i = thread; i < RANKS * ENTRIES; i += THREADS) {
            uint at = (row * RANKS + i / ENTRIES) * EACH, entry = i % ENTRIES;
            uint key = args.shortlists.v[at + HEADER + 2u * entry];
            if (entry < args.shortlists.v[at] && key >= bound) {
                uint place = atomicAdd(list_length, 1u);
                list_keys[place] = key;
                list_tokens[place] = args.shortlists.v[at + HEADER + 2u * entry + 1u];
            }
        }
        barrier();
        uint n = list_length;
        bool complete = bound == draw.least;
        if (!complete && draw.by_count && n < draw.top_k) return;
        if (!draw_listed(draw, n, complete, winner)) return;
    } else if (thread < RANKS) {
        uint at = (row * RANKS + thread) * EACH;
        winner = uvec2(args.shortlists.v[at + 4u], args.shortlists.v[at + 5u]);
    }
    winner = reduce_best(winner);
    if (thread == 0u && winner.y != TOKEN_NONE) args.best.v[row * args.best_stride + args.best_count] = uvec2(winner.y, 1u);
}

#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"
#include "deterministic.glsl"
#include "reduce.glsl"

// A device's part of a draw, where devices each have the logits of a part of the vocabulary and draw a token together
// (`draw_shortlisted`). For each listed row, of the device's tokens with d >= ln min_p (`sample` defines d):
//   shortlist = {their number, at most ENTRIES; 0; their mass as two words, if top_p filters; the best score of those
//                without filters as a key, its token; 0; 0; the ENTRIES best of them, pairs of a key and a token}
// Better is a greater key, or an equal one and a lower token. A row in which a filter (top_k, top_p) leaves tokens out has
// the list, in the order of rank, another one has the score; words that are not named are 0.
//
//   logits    [rows][row_stride] f32 of the vocabulary's tokens, the first of which is token `first`
//   best      [rows][best_stride] pairs of f32 bits and a token: the first best_count pairs of a row are the maxima of all
//             parts of the vocabulary
//   list      `shared_rows`: the rows
//   shortlists [rows][HEADER + 2 · ENTRIES] words
//   rows, state: `state.glsl`. Row r is for the token number r % every from the slot's next one on
//
// One workgroup processes one row. Traffic: 8·V to 12·V bytes, where V is the device's part of the vocabulary.

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ENTRIES = 128;
const uint THREADS = gl_WorkGroupSize.x;
const uint HEADER = 8u;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer PairsIn { uvec2 v[]; };

layout(push_constant) uniform Args {
    Floats4In logits;
    PairsIn best;
    WordsIn list;
    Words4In rows;
    WordsIn state;
    WordsOut shortlists;
    uint vocabulary;
    uint row_stride;
    uint first;
    uint whole_vocabulary;
    uint best_count;
    uint best_stride;
    uint every;
} args;

shared uint list_keys[2u * LIST];
shared uint list_tokens[LIST];
#define LIST_KEYS list_keys
#define LIST_TOKENS list_tokens
#define DRAW_VOCABULARY args.whole_vocabulary

uint thread;
uint quads;
uint first_quad;

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
#include "draw.glsl"

uvec2 row_mass(Draw draw) {
    uvec2 sum = uvec2(0u);
    for (uint quad = thread; quad < quads; quad += THREADS) {
        uvec4 keys = load_keys(quad);
        for (uint c = 0u; c < 4u; c++) {
            if (keys[c] >= draw.least) {
                sum = add64(sum, uvec2(mass_of(distance(keys[c], draw.most, draw.temperature_inverse)), 0u));
            }
        }
    }
    return reduce_sum64(sum);
}

// Writes the row's best tokens, and returns their number.
uint write_best(Draw draw, uint at) {
    uvec2 last = reduce_best(own_best_after(uvec2(TOKEN_NONE, 0u)));
    uint bound = guess_bound(draw.least);
    gather(bound);
    uint n = list_length;
    if (n <= LIST && (bound == draw.least || n >= ENTRIES)) {
        for (uint i = thread; i < n; i += THREADS) {
            uint key = list_keys[i], token = list_tokens[i], rank = 0u;
            for (uint j = 0u; j < n; j++) {
                rank += uint(list_keys[j] > key || (list_keys[j] == key && list_tokens[j] < token));
            }
            if (rank < ENTRIES) {
                args.shortlists.v[at + HEADER + 2u * rank] = key;
                args.shortlists.v[at + HEADER + 2u * rank + 1u] = args.first + token;
            }
        }
        return min(n, ENTRIES);
    }
    uint count = 0u;
    while (count < ENTRIES && last.x >= draw.least) {
        if (thread == 0u) {
            args.shortlists.v[at + HEADER + 2u * count] = last.x;
            args.shortlists.v[at + HEADER + 2u * count + 1u] = args.first + last.y;
        }
        count++;
        if (count < ENTRIES) last = reduce_best(own_best_after(last));
    }
    return count;
}

// Returns the best score of the row's tokens, as a key, and its token. A token whose bound cannot beat the winner is skipped
// without computing a logarithm.
uvec2 best_score(Draw draw) {
    uvec2 winner = uvec2(KEY_MINUS_INFINITY, TOKEN_NONE);
    for (uint quad = thread; quad < quads; quad += THREADS) {
        uvec4 keys = load_keys(quad);
        for (uint c = 0u; c < 4u; c++) {
            if (keys[c] >= draw.least) {
                uint token = args.first + 4u * quad + c;
                precise float d = distance(keys[c], draw.most, draw.temperature_inverse);
                uint bits = token_bits(token, draw.key);
                if (d + gumbel_bound(bits) >= value_of(winner.x)) {
                    precise float score = d + gumbel(bits);
                    compete(winner, score, token);
                }
            }
        }
    }
    return reduce_best(winner);
}

void main() {
    thread = gl_LocalInvocationIndex;
    if (gl_WorkGroupID.x >= args.list.v[1]) return;
    uint row = args.list.v[2u + gl_WorkGroupID.x];
    quads = (args.vocabulary + 3u) / 4u;
    first_quad = row * (args.row_stride / 4u);
    uint at = row * (HEADER + 2u * ENTRIES);

    uvec2 best = uvec2(0u, TOKEN_NONE);
    for (uint i = thread; i < args.best_count; i += THREADS) {
        uvec2 part = args.best.v[row * args.best_stride + i];
        uint key = key_of(uintBitsToFloat(part.x));
        if (key > best.x || (key == best.x && part.y < best.y)) best = uvec2(key, part.y);
    }
    best = reduce_best(best);
    Draw draw = draw_of(args.rows.v[row].z * SLOT_WORDS, best, row % args.every);

    uint count = 0u;
    uvec2 mass = uvec2(0u), winner = uvec2(0u);
    if (best.x <= KEY_MINUS_INFINITY) {
        // No token can be drawn.
    } else if (draw.by_count || draw.by_mass) {
        count = write_best(draw, at);
        if (draw.by_mass) mass = row_mass(draw);
    } else {
        winner = best_score(draw);
    }
    for (uint i = 2u * count + thread; i < 2u * ENTRIES; i += THREADS) args.shortlists.v[at + HEADER + i] = 0u;
    if (thread != 0u) return;
    args.shortlists.v[at] = count;
    args.shortlists.v[at + 1u] = 0u;
    args.shortlists.v[at + 2u] = mass.x;
    args.shortlists.v[at + 3u] = mass.y;
    args.shortlists.v[at + 4u] = winner.x;
    args.shortlists.v[at + 5u] = winner.y;
    args.shortlists.v[at + 6u] = 0u;
    args.shortlists.v[at + 7u] = 0u;
}

#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Flash attention for prefill on devices without matrix units, optionally with split-K over the context. Formula and arguments
// are those of `flash`; all products and sums are f32:
//   o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V    over the pages of row r's prompt up to the position of row r, or to
//                                                    that of the prompt's last row
//
// One workgroup serves a tile of ROWS (row, query head) pairs of one prompt and one KV head. It iterates in blocks over all
// tokens up to the last that a row of the tile sees. Keys and values take turns in one part of shared memory: the next block's
// keys are loaded while values are accumulated, and values while scores are computed. Per block, an invocation computes the
// scores of two tokens with SCORED pairs, then the softmax of a part of one pair's scores, then SUMMED pairs by eight dimensions
// of the output. D is a multiple of 16. With 8-bit codes, scales are used as in `flash`.
// Traffic: 4·D bytes per token and tile (f16), 2·D + 8 (codes).
#define CACHE_BY_16_BYTES
#include "common.glsl"
#include "kv.glsl"
#define UNROLL [[unroll]]

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint D = 128;
layout(constant_id = 2) const uint G = 4;
layout(constant_id = 3) const uint KV_HEADS = 8;
layout(constant_id = 4) const uint LANES = 128; // the workgroup's size, at least D / 8
layout(constant_id = 5) const uint SPLITS = 1;  // maximum number of workgroups per tile
layout(constant_id = 6) const uint GATED = 0;
layout(constant_id = 7) const uint SCALE = 0;
layout(constant_id = 8) const uint WINDOW = 0;
layout(constant_id = 9) const uint SOFT_CAP = 0;
layout(constant_id = 10) const uint SINKS = 0;
layout(constant_id = 11) const uint BOTH = 0;
layout(constant_id = 12) const uint BLOCK = 32; // tokens of a block: 16 or 32
layout(constant_id = 13) const uint ROWS = 32;  // a divisor of LANES, such that LANES / ROWS divides BLOCK / 4
const uint QUERY_SCALES = 0u; // `append` has applied them

#include "scores.glsl"
#if KV == 2
#include "code_halves.glsl"
#endif

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Floats4Out { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Partials { coherent vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Counters { coherent uint v[]; };

layout(push_constant) uniform Args {
    Floats4In qkv;
    Words4In chunk;
    WordsIn pages;
    Words4In k;
    Words4In v;
    Floats4Out o;
    Partials partials;   // [kv heads][parts] of [ROWS][D] sums, then [ROWS / 2] of the m and l of two pairs
    Counters counters;   // [kv heads][parts], zero between uses
    FloatsIn sinks;      // [q heads], with SINKS 1
    uint stride;
    uint output_stride;
    uint max_pages;
    uint parts;          // maximum number of tiles times workgroups per tile
};

const float LOWEST = -3.0e38;
const float LOG2_E = 1.4426950408889634;
const uint QUADS = D / 4u;
// Strides in 16-byte words, from a token or pair to the next. The word beyond the data keeps rows in different banks.
const uint STRIDE = D / 8u + 1u;
const uint S_STRIDE = BLOCK / 4u + 1u;
const uint HALF = BLOCK / 2u;
const uint SCORED = ROWS * HALF / LANES;         // pairs of which an invocation computes scores
const uint PER = LANES / ROWS;                   // invocations of the softmax of a pair
const uint OWN_QUADS = BLOCK / 4u / PER;         // and each one's share of its scores
const uint TEAMS = LANES / (D / 8u);             // invocations with the same dimensions of the output
const uint SUMMED = (ROWS + TEAMS - 1u) / TEAMS; // pairs of which an invocation computes outputs

shared uvec4 cache_s[BLOCK * STRIDE];            // keys, then values: [token][D/8]
shared vec4 q_s[ROWS * QUADS];
shared vec4 s_s[ROWS * S_STRIDE];                // scores, then weights
shared float correction_s[ROWS];
shared vec2 state_s[LANES];                      // m and a part of l of each pair: [ROWS][PER]
#define k_s cache_s
#define v_s cache_s
#define KEY_PLACE(word, token) (((word) / EIGHTS * 16u + (token)) * STRIDE + (word) % EIGHTS)
#define VALUE_PLACE(token, eight) ((token) * STRIDE + (eight))
#include "flash.glsl"

float max4(vec4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }
float sum4(vec4 x) { return (x.x + x.y) + (x.z + x.w); }

// Returns the row of the prompt and the query head of a pair. Pairs past the end repeat the last row.
uvec2 place_of(Tile tile, uint kvh, uint pair) { return uvec2(min(pair / G, tile.in_use - 1u), kvh * G + pair % G); }

// Writes four dimensions from `dim` on of a pair's output.
void write_output(Tile tile, uint kvh, uint pair, uint dim, vec4 value) {
    if (pair >= tile.in_use * G) return;
    uvec2 place = place_of(tile, kvh, pair);
    uint row = tile.row + place.x;
    if (GATED == 1u) value /= 1.0 + exp(-qkv.v[(row * stride + (KV_HEADS * (G + 2u) + place.y) * D + dim) / 4u]);
    o.v[(row * output_stride + place.y * D + dim) / 4u] = value;
}

// Unpacks eight numbers.
void unpack_halves(uvec4 words, out vec4 a, out vec4 b) {
    a = vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
    b = vec4(unpackHalf2x16(words.z), unpackHalf2x16(words.w));
}

#if KV == 2
// Returns the scales of four tokens of a block's keys or values, which begin at `from` in `scale_s`.
vec4 scales_of(uint from, uint quad) {
    uint at = from + quad / 4u * 4u + quad % 2u * 2u;
    vec4 a = scale_s[at], b = scale_s[at + 1u];
    return quad % 4u < 2u ? vec4(a.xy, b.xy) : vec4(a.zw, b.zw);
}
#endif

void main() {
    uint kvh = gl_WorkGroupID.x, t = gl_LocalInvocationIndex;
    Tile tile;
    if (!find_tile(tile)) return;
    uint table = tile.table, last = tile.last, low = tile.low;

    uvec4 staged[STAGED];
#if KV == 2
    vec4 scales;
    float unit = LEAST_VALUE; // the largest scale of values so far: sums are in this unit
#endif
    LOAD(k, tile.block_begin)
    LOAD_SCALES(tile.block_begin)
    // The factor log2(e) is part of the scale, so that the softmax uses exp2, which the hardware provides. Scores that are
    // capped get it afterwards.
    float scale = (SOFT_CAP == 0u ? LOG2_E : 1.0) * score_scale(D);
    for (uint i = 0u; i < (ROWS * QUADS + LANES - 1u) / LANES; i++) {
        uint at = i * LANES + t;
        if (at < ROWS * QUADS) {
            uvec2 place = place_of(tile, kvh, tile.first + at / QUADS);
            q_s[at] = qkv.v[((tile.row + place.x) * stride + place.y * D) / 4u + at % QUADS] * scale;
        }
    }
    STORE_KEYS

    // The invocation's two tokens and first pair in the products of scores; its pair in the softmax, and its part of it; its
    // eight dimensions and first pair in the sums.
    uint token = t % HALF, scored = t / HALF * SCORED;
    uint pair = t / PER, part = t % PER;
    uint eight = t % EIGHTS, summed = t / EIGHTS * SUMMED;
    uvec2 place = place_of(tile, kvh, tile.first + pair);
    uint from = first_visible(tile.start + place.x), to = last_visible(tile.start + place.x, tile.end);
    float m = LOWEST, l = 0.0;
    if (SINKS == 1u && gl_WorkGroupID.z == 0u) {
        // A sink is a score without a value: the first workgroup of a tile begins with it.
        m = LOG2_E * sinks.v[place.y];
        l = part == 0u ? 1.0 : 0.0;
    }
    vec4 sums[2u * SUMMED];
    UNROLL for (uint i = 0u; i < 2u * SUMMED; i++) sums[i] = vec4(0.0);

    for (uint block = tile.block_begin; block < tile.block_end; block++) {
        uint first = block * BLOCK;
        barrier();
        LOAD(v, block)
        float score[2u * SCORED];
        UNROLL for (uint i = 0u; i < 2u * SCORED; i++) score[i] = 0.0;
        [[dont_unroll]] for (uint c = 0u; c < EIGHTS; c++) {
            vec4 a[2], b[2];
            unpack_halves(cache_s[token * STRIDE + c], a[0], b[0]);
            unpack_halves(cache_s[(token + HALF) * STRIDE + c], a[1], b[1]);
            UNROLL for (uint r = 0u; r < SCORED; r++) {
                vec4 qa = q_s[(scored + r) * QUADS + c * 2u], qb = q_s[(scored + r) * QUADS + c * 2u + 1u];
                UNROLL for (uint i = 0u; i < 2u; i++) score[r * 2u + i] += dot(qa, a[i]) + dot(qb, b[i]);
            }
        }
        UNROLL for (uint r = 0u; r < SCORED; r++) {
            UNROLL for (uint i = 0u; i < 2u; i++) {
                uint of_ = token + i * HALF;
                s_s[(scored + r) * S_STRIDE + of_ / 4u][of_ % 4u] = score[r * 2u + i];
            }
        }
        barrier();

        vec4 own[OWN_QUADS];
        float top = m;
        UNROLL for (uint i = 0u; i < OWN_QUADS; i++) {
            uint quad = i * PER + part;
            vec4 s = s_s[pair * S_STRIDE + quad];
#if KV == 2
            s *= scales_of(0u, quad);
#endif
            if (SOFT_CAP != 0u) s = LOG2_E * soft_cap(s);
            uvec4 tokens = first + quad * 4u + uvec4(0u, 1u, 2u, 3u);
            s = mix(s, vec4(LOWEST), greaterThan(tokens, uvec4(to)));
            if (WINDOW > 0u) s = mix(s, vec4(LOWEST), lessThan(tokens, uvec4(from)));
            own[i] = s;
            top = max(top, max4(s));
        }
        state_s[t].x = top;
        STORE_VALUES(first)
        barrier();
        UNROLL for (uint i = 0u; i < PER; i++) top = max(top, state_s[pair * PER + i].x);
        float correction = exp2(m - top);
        m = top;
        l *= correction;
#if KV == 2
        float largest = unit;
        for (uint i = 0u; i < BLOCK / 4u; i++) largest = max(largest, max4(scale_s[BLOCK / 4u + i]));
        correction *= unit / largest;
        unit = largest;
#endif
        UNROLL for (uint i = 0u; i < OWN_QUADS; i++) {
            uint quad = i * PER + part;
            vec4 weight = exp2(own[i] - top);
            l += sum4(weight);
#if KV == 2
            weight *= scales_of(BLOCK / 4u, quad) * (1.0 / largest);
#endif
            s_s[pair * S_STRIDE + quad] = weight;
        }
        if (part == 0u) correction_s[pair] = correction;
        barrier();
        // After the last block this loads the page of token `last` again: a branch here would make the invocation wait
        // for the load.
        LOAD(k, block + 1u)
        LOAD_SCALES(block + 1u)
        UNROLL for (uint r = 0u; r < SUMMED; r++) {
            float factor = correction_s[min(summed + r, ROWS - 1u)];
            sums[2u * r] *= factor;
            sums[2u * r + 1u] *= factor;
        }
        [[dont_unroll]] for (uint quad = 0u; quad < BLOCK / 4u; quad++) {
            vec4 weights[SUMMED];
            UNROLL for (uint r = 0u; r < SUMMED; r++) weights[r] = s_s[min(summed + r, ROWS - 1u) * S_STRIDE + quad];
            UNROLL for (uint i = 0u; i < 4u; i++) {
                vec4 a, b;
                unpack_halves(cache_s[VALUE_PLACE(quad * 4u + i, eight)], a, b);
                UNROLL for (uint r = 0u; r < SUMMED; r++) {
                    sums[2u * r] += weights[r][i] * a;
                    sums[2u * r + 1u] += weights[r][i] * b;
                }
            }
        }
        barrier();
        STORE_KEYS
    }

    state_s[t] = vec2(m, l);
    barrier();
    bool shares = SPLITS > 1u && tile.sharers > 1u;
    uint first_part = kvh * parts + tile.first_part;
    const uint OF_PART = ROWS * QUADS + ROWS / 2u;
    uint own_part = (first_part + gl_WorkGroupID.z) * OF_PART;
    UNROLL for (uint r = 0u; r < SUMMED; r++) {
        uint row = summed + r;
        if (row >= ROWS) continue;
        float total = 0.0;
        UNROLL for (uint i = 0u; i < PER; i++) total += state_s[row * PER + i].y;
        UNROLL for (uint h = 0u; h < 2u; h++) {
            vec4 value = sums[2u * r + h];
#if KV == 2
            value *= unit;
#endif
            if (shares) partials.v[own_part + row * QUADS + eight * 2u + h] = value;
            else write_output(tile, kvh, tile.first + row, eight * 8u + h * 4u, value / total);
        }
    }
    if (!shares) return;
    if (part == 0u) {
        float total = 0.0;
        UNROLL for (uint i = 0u; i < PER; i++) total += state_s[pair * PER + i].y;
        uint at = own_part + ROWS * QUADS + pair / 2u;
        if (pair % 2u == 0u) partials.v[at].xy = vec2(m, total); else partials.v[at].zw = vec2(m, total);
    }
    // The last workgroup to arrive combines all parts.
    bool is_last;
    IS_LAST(is_last, first_part, tile.sharers)
    if (!is_last) return;
    for (uint p = t; p < ROWS * QUADS; p += LANES) {
        uint of_ = p / QUADS;
        float most = LOWEST;
        for (uint s = 0u; s < tile.sharers; s++) {
            vec4 state = partials.v[(first_part + s) * OF_PART + ROWS * QUADS + of_ / 2u];
            most = max(most, of_ % 2u == 0u ? state.x : state.z);
        }
        vec4 value = vec4(0.0);
        float total = 0.0;
        for (uint s = 0u; s < tile.sharers; s++) {
            uint from_part = (first_part + s) * OF_PART;
            vec4 states = partials.v[from_part + ROWS * QUADS + of_ / 2u];
            vec2 state = of_ % 2u == 0u ? states.xy : states.zw;
            // A pair that sees none of a share's tokens has weight zero there.
            float weight = exp2(state.x - most);
            total += weight * state.y;
            value += weight * partials.v[from_part + p];
        }
        write_output(tile, kvh, tile.first + of_, p % QUADS * 4u, value / total);
    }
}

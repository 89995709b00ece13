#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Flash attention for prefill, on matrix blocks, optionally with split-K over the context:
//   o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V    over the pages of row r's prompt up to the position of row r, or to
//                                                    that of the prompt's last row
// Variants of the scores, which are all constants: `scores.glsl`.
//
// qkv    [rows][stride] f32: q heads, normalized and rotated; k and v heads, which are not read. GATED 1: then a gate
//        for each value of the output, which is multiplied by the gate's sigmoid
// chunk  descriptor of the prompt step: `kernels::embed::ChunkLayout`; the rows of a prompt are consecutive positions.
//        The rows of a prompt without a slot are not in use
// k, v   KV cache pages of f16, or with KV 2 of 8-bit codes: `kv.glsl`;  pages [slots][max_pages]
// o      [rows][output_stride] f32; rows that are not in use are left unchanged
//
// One workgroup serves a tile of ROWS (row, query head) pairs of one prompt and one KV head: pair i is row i / G of the
// prompt and head i % G of the GQA group. Each group of 32 lanes has 16 pairs. The workgroup iterates in blocks over
// all tokens up to the last that a row of the tile sees. Keys and values go through shared memory: the next block's keys
// are loaded while values are accumulated, and values while scores are computed. The online softmax's maxima and sums stay in
// registers from block to block. A lane's scores have the layout of the second product's first operand, so the softmax
// weights never leave their lane. q and the weights are rounded to f16; all sums are f32. D is a multiple of 32.
// Where tiles are few and contexts are long (the end of a prompt whose beginning was in the prefix cache), several
// workgroups share a tile's tokens: each writes the maximum, sum and output of every lane to `partials`, and the last
// to arrive combines them in the order of their numbers.
// With 8-bit codes, shared memory has the codes as f16 integers, and the scales: that of a key multiplies its score, and
// that of a value its weight. Weights are kept relative to the largest scale so far, so that their f16 parts lose no bits
// to small scales. `append` has multiplied q by the Hadamard matrix of `kv.glsl`.
// Traffic: 4·D bytes per token and tile (f16), 2·D + 8 (codes).
#define WEIGHT 1
#define CACHE_BY_16_BYTES
#include "common.glsl"
#include "kv.glsl"
#if MATRIX == 1
#extension GL_KHR_shader_subgroup_shuffle : require
#define UNROLL [[unroll]]
#else
#define UNROLL
#endif

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint D = 128;
layout(constant_id = 2) const uint G = 4;
layout(constant_id = 3) const uint KV_HEADS = 8;
layout(constant_id = 4) const uint LANES = 128; // the workgroup's size, a multiple of 32
layout(constant_id = 5) const uint SPLITS = 1;  // maximum number of workgroups per tile
layout(constant_id = 6) const uint GATED = 0;
layout(constant_id = 7) const uint SCALE = 0;
layout(constant_id = 8) const uint WINDOW = 0;
layout(constant_id = 9) const uint SOFT_CAP = 0;
layout(constant_id = 10) const uint SINKS = 0;
layout(constant_id = 11) const uint BOTH = 0;
const uint QUERY_SCALES = 0u; // `append` has applied them

#include "fragments.glsl"
#include "scores.glsl"
#if KV == 2
#include "code_halves.glsl"
#endif

layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer Floats2Out { vec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Partials { coherent vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Counters { coherent uint v[]; };

layout(push_constant) uniform Args {
    Floats4In qkv;
    Words4In chunk;
    WordsIn pages;
    Words4In k;
    Words4In v;
    Floats2Out o;
    Partials partials;   // [kv heads][parts][D / 8 + 1][LANES]: outputs of two pairs, then their m and l
    Counters counters;   // [kv heads][parts], zero between uses
    FloatsIn sinks;      // [q heads], with SINKS 1
    uint stride;
    uint output_stride;
    uint max_pages;
    uint parts;          // maximum number of tiles times workgroups per tile
};

// The number of tokens in a block: as many as shared memory holds.
#if MATRIX == 1
const uint BLOCK = D <= 128u ? 64u : 32u;
#else
const uint BLOCK = D <= 128u ? 32u : 16u;
#endif
const uint ROWS = LANES / 2u;
// Strides in 16-byte words: from eight dimensions of 16 tokens to the next eight, and from a token's values to the next
// token's. They are chosen so that addresses that are read at the same time are in different banks.
const uint K_STRIDE = 18u;
const uint V_STRIDE = D / 8u + 1u;
const float LOWEST = -3.0e38;
const float LOG2_E = 1.4426950408889634;

shared uvec4 k_s[BLOCK / 16u * (D / 8u) * K_STRIDE];   // [page][D/8][16 tokens]
shared uvec4 v_s[BLOCK * V_STRIDE];                    // [token][D/8]
#define KEY_PLACE(word, token) ((word) * K_STRIDE + (token))
#define VALUE_PLACE(token, eight) ((token) * V_STRIDE + (eight))
#include "flash.glsl"

// Loads values of 16 tokens from `token` on and 16 dimensions from `dim` on. The dimensions take the place of the rows
// of W: a lane has the sums of dimensions 2t, 2t + 1, 2t + 8 and 2t + 9.
#if MATRIX == 1
#define LOAD_VALUES(m, token, dim) \
    coopMatLoad(m, v_s, (token) * V_STRIDE + (dim) / 8u, V_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
#else
uint value_bits(uint token, uint dim) {
    uint word = v_s[token * V_STRIDE + dim / 8u][(dim % 8u) / 2u];
    return (dim & 1u) == 0u ? word & 0xffffu : word >> 16;
}
uint value_pair(uint token, uint dim) { return value_bits(token, dim) | value_bits(token + 1u, dim) << 16; }
uvec4 values(uint token, uint dim) {
    token += 2u * (LANE & 3u);
    dim += LANE >> 2;
    return uvec4(value_pair(token, dim), value_pair(token + 8u, dim),
                 value_pair(token, dim + 8u), value_pair(token + 8u, dim + 8u));
}
#define LOAD_VALUES(m, token, dim) m = values(token, dim);
#endif

// Reductions over the four lanes that share two pairs.
#if MATRIX == 1
vec2 max_of_pairs(vec2 x) {
    x = max(x, subgroupShuffleXor(x, 1u));
    return max(x, subgroupShuffleXor(x, 2u));
}
vec2 sum_of_pairs(vec2 x) {
    x += subgroupShuffleXor(x, 1u);
    return x + subgroupShuffleXor(x, 2u);
}
#else
// Call in uniform control flow, like the products.
void exchange(vec2 x, out vec2 others[4]) {
    barrier();
    exchange_tokens[gl_LocalInvocationIndex].xy = floatBitsToUint(x);
    barrier();
    for (uint i = 0u; i < 4u; i++) others[i] = uintBitsToFloat(exchange_tokens[(gl_LocalInvocationIndex & ~3u) + i].xy);
}
vec2 max_of_pairs(vec2 x) {
    vec2 of[4];
    exchange(x, of);
    return max(max(of[0], of[1]), max(of[2], of[3]));
}
vec2 sum_of_pairs(vec2 x) {
    vec2 of[4];
    exchange(x, of);
    return of[0] + of[1] + of[2] + of[3];
}
#endif

float max4(vec4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }
float sum4(vec4 x) { return (x.x + x.y) + (x.z + x.w); }
uvec2 pack4(vec4 x) { return uvec2(pack_pair(x.x, x.y), pack_pair(x.z, x.w)); }

// Returns the index of this invocation's first word in part `part` of `partials`.
uint part_at(uint part) { return part * (D / 8u + 1u) * LANES + gl_LocalInvocationIndex; }

// Returns 1 + exp(-gate), the divisor of the output, for dimensions 2t, 2t + 1, 2t + 8 and 2t + 9 of the 16 from
// `first` on of a row.
vec4 gate(uint row, uint first, uint t) {
    uint at = (row * stride + first + t * 2u) / 4u;
    vec4 a = qkv.v[at], b = qkv.v[at + 2u];
    return 1.0 + exp(-(t % 2u == 0u ? vec4(a.xy, b.xy) : vec4(a.zw, b.zw)));
}

// Writes the lane's dimensions of the 16 from 16i on, for its first and its second pair.
#define WRITE_OUTPUT(i, low_, high_) {                                                       \
        uvec2 at_ = ((tile.row + row) * output_stride + head * D) / 2u + t + (i) * 8u;       \
        vec4 a_ = (low_) / l.x, b_ = (high_) / l.y;                                          \
        if (GATED == 1u) {                                                                   \
            uvec2 gates_ = (KV_HEADS * (G + 2u) + head) * D + (i) * 16u;                     \
            a_ /= gate(tile.row + row.x, gates_.x, t);                                       \
            b_ /= gate(tile.row + row.y, gates_.y, t);                                       \
        }                                                                                    \
        if (pair.x < tile.in_use * G) { o.v[at_.x] = a_.xy; o.v[at_.x + 4u] = a_.zw; }            \
        if (pair.y < tile.in_use * G) { o.v[at_.y] = b_.xy; o.v[at_.y + 4u] = b_.zw; }            \
    }

void main() {
    uint kvh = gl_WorkGroupID.x;
    Tile tile;
    if (!find_tile(tile)) return;
    uint table = tile.table, last = tile.last, low = tile.low;
    uint g = LANE >> 2, t = LANE & 3u;
    // The lane's two pairs. Pairs past the end repeat the last row.
    uvec2 pair = tile.first + LANE_GROUP * 16u + g + uvec2(0u, 8u);
    uvec2 row = min(pair / G, uvec2(tile.in_use - 1u));
    uvec2 position = tile.start + row;
    uvec2 to = uvec2(last_visible(position.x, tile.end), last_visible(position.y, tile.end));
    uvec2 head = kvh * G + pair % G;

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
    Tokens q[D / 16u];
    UNROLL for (uint c = 0u; c < D / 32u; c++) {
        uvec2 at = ((tile.row + row) * stride + head * D + c * 32u + t * 8u) / 4u;
        uvec2 a = pack4(qkv.v[at.x] * scale), b = pack4(qkv.v[at.x + 1u] * scale);
        uvec2 e = pack4(qkv.v[at.y] * scale), f = pack4(qkv.v[at.y + 1u] * scale);
        SET_TOKENS(q[2u * c], a, e)
        SET_TOKENS(q[2u * c + 1u], b, f)
    }
    STORE_KEYS

    Sums sums[D / 16u];
    UNROLL for (uint i = 0u; i < D / 16u; i++) sums[i] = NO_SUMS;
    vec2 m = vec2(LOWEST); // maxima of the lane's two pairs
    vec2 l = vec2(0.0);    // the lane's part of their sums
    if (SINKS == 1u && gl_WorkGroupID.z == 0u) {
        // A sink is a score without a value: the first workgroup of a tile begins with it.
        m = LOG2_E * vec2(sinks.v[head.x], sinks.v[head.y]);
        l = vec2(t == 0u ? 1.0 : 0.0);
    }
    for (uint block = tile.block_begin; block < tile.block_end; block++) {
        uint first = block * BLOCK;
        barrier();
        LOAD(v, block)

        Sums scores[PARTS];
        UNROLL for (uint j = 0u; j < PARTS; j++) scores[j] = NO_SUMS;
        UNROLL_PRODUCTS for (uint c = 0u; c < D / 32u; c++) {
            UNROLL_PRODUCTS for (uint j = 0u; j < PARTS; j++) {
                uint at = (j * EIGHTS + c * 4u + t) * K_STRIDE + g;
                uvec4 a = k_s[at], b = k_s[at + 8u];
                Weights key;
                SET_WEIGHTS(key, uvec4(a.xy, b.xy))
                MULTIPLY_ADD(scores[j], q[2u * c], key)
                SET_WEIGHTS(key, uvec4(a.zw, b.zw))
                MULTIPLY_ADD(scores[j], q[2u * c + 1u], key)
            }
        }

        // The lane has tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16.
        vec4 above[PARTS], below[PARTS]; // of the lane's first and second pair
        UNROLL for (uint j = 0u; j < PARTS; j++) {
            above[j] = SUMS_LOW(scores[j]);
            below[j] = SUMS_HIGH(scores[j]);
#if KV == 2
            above[j] *= scale_s[j * 4u + t];
            below[j] *= scale_s[j * 4u + t];
#endif
            if (SOFT_CAP != 0u) {
                above[j] = LOG2_E * soft_cap(above[j]);
                below[j] = LOG2_E * soft_cap(below[j]);
            }
        }
        if (first + BLOCK > tile.open + 1u) {
            UNROLL for (uint j = 0u; j < PARTS; j++) {
                uvec4 token = first + j * 16u + 2u * t + uvec4(0u, 1u, 8u, 9u);
                above[j] = mix(above[j], vec4(LOWEST), greaterThan(token, uvec4(to.x)));
                below[j] = mix(below[j], vec4(LOWEST), greaterThan(token, uvec4(to.y)));
            }
        }
        if (WINDOW > 0u && first + WINDOW <= last) {
            uvec2 from = uvec2(first_visible(position.x), first_visible(position.y));
            UNROLL for (uint j = 0u; j < PARTS; j++) {
                uvec4 token = first + j * 16u + 2u * t + uvec4(0u, 1u, 8u, 9u);
                above[j] = mix(above[j], vec4(LOWEST), lessThan(token, uvec4(from.x)));
                below[j] = mix(below[j], vec4(LOWEST), lessThan(token, uvec4(from.y)));
            }
        }
        vec2 top = m;
        UNROLL for (uint j = 0u; j < PARTS; j++) top = max(top, vec2(max4(above[j]), max4(below[j])));
        top = max_of_pairs(top);
        vec2 correction = exp2(m - top);
        m = top;
        l *= correction;
#if KV == 2
        // The largest scale of the block's values: each of four lanes has a part of its tokens.
        float largest = unit;
        UNROLL for (uint j = 0u; j < PARTS; j++) largest = max(largest, max4(scale_s[BLOCK / 4u + j * 4u + t]));
        largest = max_of_pairs(vec2(largest)).x;
        correction *= largest > unit ? unit / largest : 1.0;
        unit = largest;
#endif
        Tokens weights[PARTS];
        UNROLL for (uint j = 0u; j < PARTS; j++) {
            above[j] = exp2(above[j] - top.x);
            below[j] = exp2(below[j] - top.y);
            l += vec2(sum4(above[j]), sum4(below[j]));
#if KV == 2
            vec4 value_scales = scale_s[BLOCK / 4u + j * 4u + t] * (1.0 / largest);
            above[j] *= value_scales;
            below[j] *= value_scales;
#endif
            uvec2 a = pack4(above[j]), b = pack4(below[j]);
            SET_TOKENS(weights[j], a, b)
        }
        UNROLL for (uint i = 0u; i < D / 16u; i++) SCALE_SUMS(sums[i], correction.x, correction.y)

        STORE_VALUES(first)
        barrier();
        // After the last block this loads the page of token `last` again: a branch here would make the invocation wait
        // for the load.
        LOAD(k, block + 1u)
        LOAD_SCALES(block + 1u)
        UNROLL_PRODUCTS for (uint j = 0u; j < PARTS; j++) {
            UNROLL_PRODUCTS for (uint i = 0u; i < D / 16u; i++) {
                Weights value;
                LOAD_VALUES(value, j * 16u, i * 16u)
                MULTIPLY_ADD(sums[i], weights[j], value)
            }
        }
        STORE_KEYS
    }

#if KV == 2
    UNROLL for (uint i = 0u; i < D / 16u; i++) SCALE_SUMS(sums[i], unit, unit)
#endif
    l = sum_of_pairs(l);
    if (SPLITS > 1u && tile.sharers > 1u) {
        uint sharers = tile.sharers, first_part = kvh * parts + tile.first_part;
        uint own = part_at(first_part + gl_WorkGroupID.z);
        UNROLL for (uint i = 0u; i < D / 16u; i++) {
            partials.v[own + 2u * i * LANES] = SUMS_LOW(sums[i]);
            partials.v[own + (2u * i + 1u) * LANES] = SUMS_HIGH(sums[i]);
        }
        partials.v[own + D / 8u * LANES] = vec4(m, l);
        bool is_last;
        IS_LAST(is_last, first_part, sharers)
        if (!is_last) return;
        vec2 top = vec2(LOWEST);
        for (uint s = 0u; s < sharers; s++) top = max(top, partials.v[part_at(first_part + s) + D / 8u * LANES].xy);
        l = vec2(0.0);
        for (uint s = 0u; s < sharers; s++) {
            vec4 state = partials.v[part_at(first_part + s) + D / 8u * LANES];
            l += exp2(state.xy - top) * state.zw;
        }
        for (uint i = 0u; i < D / 16u; i++) {
            vec4 a = vec4(0.0), b = vec4(0.0);
            for (uint s = 0u; s < sharers; s++) {
                uint at = part_at(first_part + s);
                // A pair that sees none of a share's tokens has weight zero there.
                vec2 weight = exp2(partials.v[at + D / 8u * LANES].xy - top);
                a += weight.x * partials.v[at + 2u * i * LANES];
                b += weight.y * partials.v[at + (2u * i + 1u) * LANES];
            }
            WRITE_OUTPUT(i, a, b)
        }
        return;
    }
    UNROLL for (uint i = 0u; i < D / 16u; i++) WRITE_OUTPUT(i, SUMS_LOW(sums[i]), SUMS_HIGH(sums[i]))
}

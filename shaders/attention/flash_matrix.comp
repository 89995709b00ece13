#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
#pragma use_vulkan_memory_model
// Flash attention for prefill on matrix units of any shape, of which nothing but the shape is known, optionally with
// split-K over the context. Formula, arguments and tiles are those of `flash`, which is faster where the device keeps the
// elements of matrices in a known order:
//   o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V    over the pages of row r's prompt up to the position of row r, or to
//                                                    that of the prompt's last row
//
// One workgroup serves a tile of ROWS (row, query head) pairs of one prompt and one KV head, a subgroup MATRIX_M of them.
// The workgroup iterates in blocks over all tokens up to the last that a row of the tile sees. Keys and values go through
// shared memory: the next block's keys are loaded while values are accumulated, and values while scores are computed. With ALIKE 1, both
// use the same part of it. Only the device knows which invocation has which element of a matrix. So a subgroup's scores go
// through a slab of shared memory, where its invocations compute the softmax, each a part of a row, and from where the
// weights are loaded as the first operand of the second product. Sums stay in matrices from block to block; as a row's
// maximum grows, they are multiplied by a matrix that has the row's correction in all its columns.
// q stays in matrices if HELD is 1, else in shared memory. q and the weights are rounded to f16; all sums are f32. D is a
// multiple of 16. With 8-bit codes, scales are used as in `flash`.
// Traffic: 4·D bytes per token and tile (f16), 2·D + 8 (codes).
#define WEIGHT 1
#define MATRIX 1 // `code_halves.glsl` computes in f16
#define CACHE_BY_16_BYTES
#include "common.glsl"
#include "kv.glsl"
#define UNROLL [[unroll]]

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint D = 128;
layout(constant_id = 2) const uint G = 4;
layout(constant_id = 3) const uint KV_HEADS = 8;
layout(constant_id = 4) const uint LANES = 128; // the workgroup's size
layout(constant_id = 5) const uint SPLITS = 1;  // maximum number of workgroups per tile
layout(constant_id = 6) const uint GATED = 0;
layout(constant_id = 7) const uint SCALE = 0;
layout(constant_id = 8) const uint WINDOW = 0;
layout(constant_id = 9) const uint SOFT_CAP = 0;
layout(constant_id = 10) const uint SINKS = 0;
layout(constant_id = 11) const uint BOTH = 0;
layout(constant_id = 12) const uint BLOCK = 32; // tokens of a block, a multiple of 16
layout(constant_id = 13) const uint HELD = 1;
layout(constant_id = 14) const uint ALIKE = 0;
layout(constant_id = 15) const uint MATRIX_M = 16;
layout(constant_id = 16) const uint MATRIX_N = 16;
layout(constant_id = 17) const uint MATRIX_K = 16;
layout(constant_id = 18) const uint SUBGROUP = 32; // the subgroups' size
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

const uint SUBGROUPS = LANES / SUBGROUP;
const uint ROWS = SUBGROUPS * MATRIX_M;
const float LOWEST = -3.0e38;
const float LOG2_E = 1.4426950408889634;
// Strides in 16-byte words, from a token or row to the next. The word beyond the data keeps rows in different banks.
const uint STRIDE = D / 8u + 1u;
const uint S_STRIDE = BLOCK / 4u + 1u; // of scores
const uint P_STRIDE = BLOCK / 8u + 1u; // of weights
// A subgroup's slab has scores, then weights, corrections or outputs.
const uint N_QUADS = MATRIX_N / 4u;
const uint K_EIGHTS = MATRIX_K / 8u;
const uint SLAB = MATRIX_M * (S_STRIDE > N_QUADS ? S_STRIDE : N_QUADS);
// PER invocations share a row, and an invocation has EACH rows.
const uint PER = SUBGROUP > MATRIX_M ? SUBGROUP / MATRIX_M : 1u;
const uint EACH = MATRIX_M > SUBGROUP ? MATRIX_M / SUBGROUP : 1u;
const uint QUADS = BLOCK / 4u / PER;   // of the scores of a row, per invocation
const uint V_BASE = ALIKE == 1u ? 0u : BLOCK * STRIDE;

shared uvec4 cache_s[(ALIKE == 1u ? 1u : 2u) * BLOCK * STRIDE]; // keys, then values: [token][D/8]
shared uvec4 q_s[HELD == 1u ? 1u : ROWS * STRIDE];
shared uvec4 slab_s[SUBGROUPS * SLAB];
shared float state_s[LANES * EACH];    // of parts of rows
#define k_s cache_s
#define v_s cache_s
#define KEY_PLACE(word, token) (((word) / EIGHTS * 16u + (token)) * STRIDE + (word) % EIGHTS)
#define VALUE_PLACE(token, eight) (V_BASE + (token) * STRIDE + (eight))
#include "flash.glsl"

#define Tokens coopmat<float16_t, gl_ScopeSubgroup, MATRIX_M, MATRIX_K, gl_MatrixUseA>
#define Others coopmat<float16_t, gl_ScopeSubgroup, MATRIX_K, MATRIX_N, gl_MatrixUseB>
#define Sums coopmat<float, gl_ScopeSubgroup, MATRIX_M, MATRIX_N, gl_MatrixUseAccumulator>
// Makes what a subgroup has written to shared memory visible to all of its invocations.
#define SUBGROUP_BARRIER { subgroupMemoryBarrierShared(); subgroupBarrier(); }

float max4(vec4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }
float sum4(vec4 x) { return (x.x + x.y) + (x.z + x.w); }
uvec2 pack4(vec4 x) { return uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw)); }

// A row of the subgroup's, and the invocation's part of it.
uint own_row(uint e) { return gl_SubgroupInvocationID % (SUBGROUP / PER) + e * (SUBGROUP / PER); }
uint own_part() { return gl_SubgroupInvocationID / (SUBGROUP / PER); }
uint state_at(uint row, uint part) { return (gl_SubgroupID * MATRIX_M + row) * PER + part; }

// Returns the row of the prompt and the query head of a pair. Pairs past the end repeat the last row.
uvec2 place_of(Tile tile, uint kvh, uint pair) {
    return uvec2(min(pair / G, tile.in_use - 1u), kvh * G + pair % G);
}

// Returns eight dimensions from `dim` on of a pair's query, scaled, as f16.
uvec4 query(Tile tile, uint kvh, uint pair, uint dim, float scale) {
    uvec2 place = place_of(tile, kvh, pair);
    uint at = ((tile.row + place.x) * stride + place.y * D + dim) / 4u;
    return uvec4(pack4(qkv.v[at] * scale), pack4(qkv.v[at + 1u] * scale));
}

// Writes four dimensions from `dim` on of a pair's output.
void write_output(Tile tile, uint kvh, uint pair, uint dim, vec4 value) {
    if (pair >= tile.in_use * G) return;
    uvec2 place = place_of(tile, kvh, pair);
    uint row = tile.row + place.x;
    if (GATED == 1u) value /= 1.0 + exp(-qkv.v[(row * stride + (KV_HEADS * (G + 2u) + place.y) * D + dim) / 4u]);
    o.v[(row * output_stride + place.y * D + dim) / 4u] = value;
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
    uint kvh = gl_WorkGroupID.x;
    Tile tile;
    if (!find_tile(tile)) return;
    uint table = tile.table, last = tile.last, low = tile.low;
    uint lane = gl_SubgroupInvocationID;
    uint slab = gl_SubgroupID * SLAB;
    uint first_pair = tile.first + gl_SubgroupID * MATRIX_M;
    uint part = own_part();

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
    Tokens q[HELD == 1u ? D / MATRIX_K : 1u];
    if (HELD == 1u) {
        UNROLL for (uint c = 0u; c < D / MATRIX_K; c++) {
            for (uint i = lane; i < MATRIX_M * K_EIGHTS; i += SUBGROUP)
                slab_s[slab + i] =
                    query(tile, kvh, first_pair + i / K_EIGHTS, c * MATRIX_K + i % K_EIGHTS * 8u, scale);
            SUBGROUP_BARRIER
            coopMatLoad(q[c], slab_s, slab, K_EIGHTS, gl_CooperativeMatrixLayoutRowMajor);
            SUBGROUP_BARRIER
        }
    } else {
        for (uint i = gl_LocalInvocationIndex; i < ROWS * EIGHTS; i += LANES)
            q_s[i / EIGHTS * STRIDE + i % EIGHTS] = query(tile, kvh, tile.first + i / EIGHTS, i % EIGHTS * 8u, scale);
    }
    STORE_KEYS

    Sums sums[D / MATRIX_N];
    UNROLL for (uint i = 0u; i < D / MATRIX_N; i++) sums[i] = Sums(0.0);
    // The maximum of each of the invocation's rows, and its part of their sums.
    float m[EACH], l[EACH];
    uint from[EACH], to[EACH];
    UNROLL for (uint e = 0u; e < EACH; e++) {
        uvec2 place = place_of(tile, kvh, first_pair + own_row(e));
        from[e] = first_visible(tile.start + place.x);
        to[e] = last_visible(tile.start + place.x, tile.end);
        m[e] = LOWEST;
        l[e] = 0.0;
        if (SINKS == 1u && gl_WorkGroupID.z == 0u) {
            // A sink is a score without a value: the first workgroup of a tile begins with it.
            m[e] = LOG2_E * sinks.v[place.y];
            l[e] = part == 0u ? 1.0 : 0.0;
        }
    }
    for (uint block = tile.block_begin; block < tile.block_end; block++) {
        uint first = block * BLOCK;
        barrier();
        LOAD(v, block)

        Sums scores[BLOCK / MATRIX_N];
        UNROLL for (uint j = 0u; j < BLOCK / MATRIX_N; j++) scores[j] = Sums(0.0);
        UNROLL for (uint c = 0u; c < D / MATRIX_K; c++) {
            Tokens query;
            if (HELD == 1u) query = q[c];
            else coopMatLoad(query, q_s, gl_SubgroupID * MATRIX_M * STRIDE + c * K_EIGHTS, STRIDE,
                             gl_CooperativeMatrixLayoutRowMajor);
            UNROLL for (uint j = 0u; j < BLOCK / MATRIX_N; j++) {
                Others key;
                coopMatLoad(key, cache_s, j * MATRIX_N * STRIDE + c * K_EIGHTS, STRIDE,
                            gl_CooperativeMatrixLayoutColumnMajor);
                scores[j] = coopMatMulAdd(query, key, scores[j]);
            }
        }
        UNROLL for (uint j = 0u; j < BLOCK / MATRIX_N; j++)
            coopMatStore(scores[j], slab_s, slab + j * N_QUADS, S_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
        SUBGROUP_BARRIER

        vec4 score[EACH * QUADS];
        UNROLL for (uint e = 0u; e < EACH; e++) {
            float top = m[e];
            UNROLL for (uint i = 0u; i < QUADS; i++) {
                uint quad = i * PER + part;
                vec4 s = uintBitsToFloat(slab_s[slab + own_row(e) * S_STRIDE + quad]);
#if KV == 2
                s *= scales_of(0u, quad);
#endif
                if (SOFT_CAP != 0u) s = LOG2_E * soft_cap(s);
                uvec4 token = first + quad * 4u + uvec4(0u, 1u, 2u, 3u);
                s = mix(s, vec4(LOWEST), greaterThan(token, uvec4(to[e])));
                if (WINDOW > 0u) s = mix(s, vec4(LOWEST), lessThan(token, uvec4(from[e])));
                score[e * QUADS + i] = s;
                top = max(top, max4(s));
            }
            state_s[state_at(own_row(e), part)] = top;
        }
        SUBGROUP_BARRIER
#if KV == 2
        // The largest scale of the block's values.
        float largest = unit;
        for (uint i = 0u; i < BLOCK / 4u; i++) largest = max(largest, max4(scale_s[BLOCK / 4u + i]));
#endif
        float correction[EACH];
        UNROLL for (uint e = 0u; e < EACH; e++) {
            float top = state_s[state_at(own_row(e), 0u)];
            UNROLL for (uint p = 1u; p < PER; p++) top = max(top, state_s[state_at(own_row(e), p)]);
            correction[e] = exp2(m[e] - top);
            m[e] = top;
            l[e] *= correction[e];
#if KV == 2
            if (largest > unit) correction[e] *= unit / largest;
#endif
            UNROLL for (uint i = 0u; i < QUADS; i++) {
                uint quad = i * PER + part;
                vec4 weight = exp2(score[e * QUADS + i] - top);
                l[e] += sum4(weight);
#if KV == 2
                weight *= scales_of(BLOCK / 4u, quad) * (1.0 / largest);
#endif
                uvec2 halves = pack4(weight);
                uint at = slab + own_row(e) * P_STRIDE + quad / 2u;
                if (quad % 2u == 0u) slab_s[at].xy = halves; else slab_s[at].zw = halves;
            }
        }
#if KV == 2
        unit = largest;
#endif
        SUBGROUP_BARRIER
        Tokens weights[BLOCK / MATRIX_K];
        UNROLL for (uint j = 0u; j < BLOCK / MATRIX_K; j++)
            coopMatLoad(weights[j], slab_s, slab + j * K_EIGHTS, P_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
        SUBGROUP_BARRIER
        UNROLL for (uint e = 0u; e < EACH; e++) {
            for (uint i = part; i < N_QUADS; i += PER)
                slab_s[slab + own_row(e) * N_QUADS + i] = floatBitsToUint(vec4(correction[e]));
        }
        SUBGROUP_BARRIER
        // Also where all corrections are one: lavapipe 26 computes wrong elements of matrices in a branch.
        Sums factors;
        coopMatLoad(factors, slab_s, slab, N_QUADS, gl_CooperativeMatrixLayoutRowMajor);
        UNROLL for (uint i = 0u; i < D / MATRIX_N; i++) {
            UNROLL for (uint e = 0u; e < factors.length(); e++) sums[i][e] *= factors[e];
        }

        if (ALIKE == 1u) barrier();
        STORE_VALUES(first)
        barrier();
        // After the last block this loads the page of token `last` again: a branch here would make the invocation wait
        // for the load.
        LOAD(k, block + 1u)
        LOAD_SCALES(block + 1u)
        UNROLL for (uint j = 0u; j < BLOCK / MATRIX_K; j++) {
            UNROLL for (uint i = 0u; i < D / MATRIX_N; i++) {
                Others value;
                coopMatLoad(value, cache_s, V_BASE + j * MATRIX_K * STRIDE + i * (MATRIX_N / 8u), STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
                sums[i] = coopMatMulAdd(weights[j], value, sums[i]);
            }
        }
        if (ALIKE == 1u) barrier();
        STORE_KEYS
    }

    // Sums of a row over the invocations that share it.
    SUBGROUP_BARRIER
    UNROLL for (uint e = 0u; e < EACH; e++) state_s[state_at(own_row(e), part)] = l[e];
    SUBGROUP_BARRIER
    bool shares = SPLITS > 1u && tile.sharers > 1u;
    uint first_part = kvh * parts + tile.first_part;
    const uint OF_PART = ROWS * (D / 4u) + ROWS / 2u;
    uint own = (first_part + gl_WorkGroupID.z) * OF_PART;
    UNROLL for (uint i = 0u; i < D / MATRIX_N; i++) {
        coopMatStore(sums[i], slab_s, slab, N_QUADS, gl_CooperativeMatrixLayoutRowMajor);
        SUBGROUP_BARRIER
        for (uint p = lane; p < MATRIX_M * N_QUADS; p += SUBGROUP) {
            uint row = p / N_QUADS, dim = i * MATRIX_N + p % N_QUADS * 4u;
            vec4 value = uintBitsToFloat(slab_s[slab + p]);
#if KV == 2
            value *= unit;
#endif
            if (shares) {
                partials.v[own + ((gl_SubgroupID * MATRIX_M + row) * D + dim) / 4u] = value;
            } else {
                float total = state_s[state_at(row, 0u)];
                UNROLL for (uint n = 1u; n < PER; n++) total += state_s[state_at(row, n)];
                write_output(tile, kvh, first_pair + row, dim, value / total);
            }
        }
        SUBGROUP_BARRIER
    }
    if (!shares) return;
    UNROLL for (uint e = 0u; e < EACH; e++) {
        uint row = own_row(e);
        if (part == 0u) {
            float total = state_s[state_at(row, 0u)];
            UNROLL for (uint n = 1u; n < PER; n++) total += state_s[state_at(row, n)];
            uint pair = gl_SubgroupID * MATRIX_M + row;
            uint at = own + ROWS * (D / 4u) + pair / 2u;
            if (pair % 2u == 0u) partials.v[at].xy = vec2(m[e], total); else partials.v[at].zw = vec2(m[e], total);
        }
    }
    // The last workgroup to arrive combines all parts.
    bool is_last;
    IS_LAST(is_last, first_part, tile.sharers)
    if (!is_last) return;
    for (uint p = gl_LocalInvocationIndex; p < ROWS * (D / 4u); p += LANES) {
        uint pair = p / (D / 4u);
        float top = LOWEST;
        for (uint s = 0u; s < tile.sharers; s++) {
            vec4 of = partials.v[(first_part + s) * OF_PART + ROWS * (D / 4u) + pair / 2u];
            top = max(top, pair % 2u == 0u ? of.x : of.z);
        }
        vec4 value = vec4(0.0);
        float total = 0.0;
        for (uint s = 0u; s < tile.sharers; s++) {
            uint from_part = (first_part + s) * OF_PART;
            vec4 of = partials.v[from_part + ROWS * (D / 4u) + pair / 2u];
            vec2 state = pair % 2u == 0u ? of.xy : of.zw;
            // A pair that sees none of a share's tokens has weight zero there.
            float weight = exp2(state.x - top);
            total += weight * state.y;
            value += weight * partials.v[from_part + p];
        }
        write_output(tile, kvh, tile.first + pair, p % (D / 4u) * 4u, value / total);
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Small-M GEMM for decode batches, on fragment-packed weights: y[r] = epilogue( W · x[r] ) for panels of 16 · BLOCKS
// packed rows of x. It serves the range between the few rows of `skinny` and the many rows of `tiled`.
//
// epilogue   0 store: y = Wx + b. 1 residual: y += Wx + b. 2 and more: a gated linear unit: the rows of W alternate gate and
//            up; y[n/2] = glu(gate, up); or squared ReLU: y = max(Wx + b, 0)² (`glu.glsl`)
// weight     16 × 32 blocks in fragment order (`memory::pack::Layout::Fragments`). CODED 1: codes with scales
//            (`codes.glsl`), which are dequantised in f16 and rounded to bfloat16 in registers, once for all rows of x of
//            the panel; AHEAD then counts units of columns. IN_F16 1: they stay f16, and x becomes f16, which is faster
//            for a few rows. Where that could overflow, or loses small numbers, a lane group does its part again in
//            bfloat16
// x          16 × 32 blocks as `pack_rows` writes them
// y          PACKED 0: [rows][y_stride] f32. PACKED 1 (gated only): 16-bit blocks like x, as input of the next
//            product; rows are written up to a multiple of 16, columns beyond the last are not written
// norm       RMSNorm fused into the products around it, so that it needs no dispatch of its own. FOLD 1: x is a
//            row ⊙ the norm's weight, and the product is scaled by rsqrt(mean row² + eps), computed from the partial
//            sums in `squares`. FOLD 2 (residual only): also writes y ⊙ norm, packed, to `next`, and the partial sums
//            of y² to `squares`
// experts    EXPERTS 1 (MoE): `tiles` assigns an expert to each panel, and the expert's weights are n rows. Without
//            PACKED, the panel's rows are written to rows `slots` of y; rows whose slot is NOBODY are dropped
//            (`expert_plan`). Panels of experts that are not in `weight` are left unchanged (`expert_part.glsl`)
//
// One workgroup computes TILES blocks of 16 rows of W for one panel. Its groups of 32 lanes split K, each with AHEAD
// chunks of 32 columns in flight; their sums are added through shared memory, one block after the other. A lane's sums
// are those of tokens g and g + 8 for rows 4t .. 4t + 3 of a block.
// Traffic: W once per panel; x once per workgroup, through the L1 cache.
#extension GL_KHR_shader_subgroup_shuffle : require
#ifndef CODED
#define CODED 0
#endif
#ifndef HALVES
#define HALVES 0
#endif
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the workgroup's size
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint TILES = 2;
layout(constant_id = 5) const uint AHEAD = 1;
layout(constant_id = 6) const uint BLOCKS = 1;
layout(constant_id = 7) const uint CHUNKS = 32;   // 32-column chunks of a padded row
layout(constant_id = 8) const uint PACKED = 0;
layout(constant_id = 9) const uint FOLD = 0;
layout(constant_id = 10) const uint PARTS = 1;    // partial sums of squares per row, read with FOLD 1
layout(constant_id = 11) const uint EXPERTS = 0;
layout(constant_id = 12) const uint FIRST_EXPERT = 0; // the first expert in `weight`: `expert_part.glsl`
layout(constant_id = 13) const uint PART_EXPERTS = 0; // the number of experts in `weight`; 0: all
#if CODED == 1
layout(constant_id = 14) const uint CODES = 0x5024; // the weights' format
layout(constant_id = 15) const uint IN_F16 = 0;
#endif

#include "fragments.glsl"
#include "expert_part.glsl"
#if CODED == 1
#include "codes.glsl"
const uint UNITS = (CHUNKS * 32u + UNIT_COLS - 1u) / UNIT_COLS;
#elif HALVES == 1
// Loops over units of codes serve f16 too, where a unit is a chunk.
#define UNITS CHUNKS
const uint UNIT_COLS = 32u, UNIT_WORDS = 64u, PLANE_LOADS = 2u, IN_F16 = 1u;
#endif
#if CODED == 1 || HALVES == 1
#if MATRIX == 1
#extension GL_KHR_shader_subgroup_vote : require
// f16 arithmetic keeps subnormal numbers: the codes.
#extension GL_EXT_spirv_intrinsics : require
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4464], 4459, 16);
#endif
#endif

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Words4InOut { uvec4 v[]; };

layout(push_constant) uniform Args {
    Words4In weight;
    Words4In x;
    FloatsIn bias;
    Words4InOut y;
    FloatsInOut squares; // [rows padded to 16][blocks of 16 columns]: read with FOLD 1, written with FOLD 2
    FloatsIn norm;
    Words4InOut next;
    WordsIn tiles;
    WordsIn slots;
    uint n;           // rows of W
    uint rows;        // rows of x
    uint y_stride;    // in floats, or in blocks of 32 columns if y is packed
    uint k;           // columns of x; the divisor of the mean
    float epsilon;
};

const uint NOBODY = 0xffffffffu;
const uint GROUPS = LANES / 32u;
#if CODED == 1 || HALVES == 1
const uint ROUNDS = (UNITS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);
#else
const uint ROUNDS = (CHUNKS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);
#endif
const uint ITEMS = BLOCKS * 64u;

const uint TURNS = (ITEMS + LANES - 1u) / LANES;
// The number of invocations that sum one row's squares: at most 32, or 0 if there are more rows than invocations.
const uint EACH_ROW = LANES / (BLOCKS * 16u) < 32u ? LANES / (BLOCKS * 16u) : 32u;

shared vec4 sums_s[GROUPS * ITEMS];

// Stores one 32-bit word of a buffer of 16-byte words.
#define PUT_WORD(to, at, word) { uint at_ = at; PUT_COMPONENT(to.v[at_ / 4u], at_ % 4u, word) }

// Writes the RMSNorm scale of each of the panel's rows to `sums_s`.
void read_scales(uint panel, uint row_blocks) {
    uint last = row_blocks * 16u - 1u;
#if MATRIX == 1
    // EACH_ROW neighbouring invocations share a row; each has four loads in flight.
    if (EACH_ROW * BLOCKS * 16u == LANES && (EACH_ROW & (EACH_ROW - 1u)) == 0u && PARTS % (EACH_ROW * 4u) == 0u) {
        Floats4In fours = Floats4In(squares);
        uint token = gl_LocalInvocationIndex / EACH_ROW, own = gl_LocalInvocationIndex % EACH_ROW;
        uint first = min(panel * 16u + token, last) * (PARTS / 4u) + own;
        vec4 sums = vec4(0.0);
        // Not all loads are in flight at once: the registers for that would leave no room for a second workgroup on the
        // processor.
        [[dont_unroll]] for (uint i = 0u; i < PARTS / 4u; i += EACH_ROW * 4u) {
            [[unroll]] for (uint e = 0u; e < 4u; e++)
                sums += i + e * EACH_ROW < PARTS / 4u ? fours.v[first + i + e * EACH_ROW] : vec4(0.0);
        }
        float sum = sums.x + sums.y + sums.z + sums.w;
        [[unroll]] for (uint distance = 1u; distance < EACH_ROW; distance *= 2u) sum += subgroupShuffleXor(sum, distance);
        if (own == 0u) sums_s[token].x = inversesqrt(sum / float(k) + epsilon);
        return;
    }
#endif
    // Every invocation runs the same number of iterations, repeating the last row where it has none of its own, which it
    // does not store: a CPU driver counts loop iterations between barriers (see EACH in `flash_decode.comp`).
    for (uint turn = 0u; turn < BLOCKS * 16u; turn += LANES) {
        uint token = min(turn + gl_LocalInvocationIndex, BLOCKS * 16u - 1u), row = min(panel * 16u + token, last);
        float sum = 0.0;
        for (uint i = 0u; i < PARTS; i++) sum += squares.v[row * PARTS + i];
        if (turn + gl_LocalInvocationIndex < BLOCKS * 16u) sums_s[token].x = inversesqrt(sum / float(k) + epsilon);
    }
}

#if CODED == 1 || HALVES == 1
// Without cooperative matrices the loop body is already long, so it is not unrolled.
#if MATRIX == 1
#define EACH_CHUNK [[unroll]]
#define HALVES_OF(pair) vec2(unpackFloat2x16(pair))
#else
#define EACH_CHUNK [[dont_unroll]]
#define HALVES_OF(pair) unpackHalf2x16(pair)
#endif

#if CODED == 1
#include "code_fragments.glsl"

// The scales of the loaded units, and those of a chunk.
#define UNIT_SCALES uint scales[AHEAD * TILES * SCALE_SLOTS];
#define LOAD_UNIT_SCALES(u, j, at) LOAD_SCALES(scales, ((u) * TILES + (j)) * SCALE_SLOTS, at)
#define CHUNK_SCALES(u, c) \
    uint scale[TILES], minimum[TILES]; \
    [[unroll]] for (uint j = 0u; j < TILES; j++) { \
        uint from = ((u) * TILES + j) * SCALE_SLOTS; \
        scale[j] = SCALE_OF(scales, from, c, LANE & 3u); \
        minimum[j] = STORED == 1u ? SCALE_OF(scales, from + STORED * SCALE_WORDS, c, LANE & 3u) : 0u; \
    }
// A lane's weights of half of a chunk, as pairs of f16.
#define HALF_WEIGHTS(u, j, c, h) scaled(PAIRS(w, ((u) * TILES + (j)) * PLANE_LOADS, c, h), scale[j], minimum[j])

// In bfloat16, weights are the sum of so many parts.
const uint BFLOAT_PARTS = 1u;
// Rounds a pair of f16 values to bfloat16.
uint bfloat_part(uint pair, uint part) { return bfloat_pair(HALVES_OF(pair)); }
#else
#define UNIT_SCALES
#define LOAD_UNIT_SCALES(u, j, at)
#define CHUNK_SCALES(u, c)
#define HALF_WEIGHTS(u, j, c, h) w[((u) * TILES + (j)) * PLANE_LOADS + (h)]

const uint BFLOAT_PARTS = 2u;
// Returns a part of a pair of f16 values, whose 11 bits are the first 8 and the others.
uint bfloat_part(uint pair, uint part) {
    vec2 values = HALVES_OF(pair);
    uvec2 bits = floatBitsToUint(values) & 0xffff0000u;
    if (part == 1u) bits = floatBitsToUint(values - uintBitsToFloat(bits));
    return bits.x >> 16 | (bits.y & 0xffff0000u);
}
#endif
uvec4 bfloat_parts(uvec4 pairs, uint part) {
    return uvec4(bfloat_part(pairs.x, part), bfloat_part(pairs.y, part), bfloat_part(pairs.z, part), bfloat_part(pairs.w, part));
}

// Adds the products of the lane group's columns to `sums`; `ADD` is one of the macros below, for half of a chunk.
#define ADD_PRODUCTS(ADD) \
    [[dont_unroll]] for (uint round = 0u; round < ROUNDS; round++) { \
        uvec4 w[AHEAD * TILES * PLANE_LOADS]; \
        UNIT_SCALES \
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) { \
            uint at = min((round * AHEAD + u) * GROUPS + LANE_GROUP, UNITS - 1u) * UNIT_WORDS; \
            [[unroll]] for (uint j = 0u; j < TILES; j++) { \
                [[unroll]] for (uint i = 0u; i < PLANE_LOADS; i++) \
                    w[(u * TILES + j) * PLANE_LOADS + i] = weight.v[base[j] + at + i * 32u + LANE]; \
                LOAD_UNIT_SCALES(u, j, base[j] + at + PLANE_LOADS * 32u) \
            } \
        } \
        UNROLL_PRODUCTS for (uint u = 0u; u < AHEAD; u++) { \
            uint unit = (round * AHEAD + u) * GROUPS + LANE_GROUP; \
            EACH_CHUNK for (uint c = 0u; c < UNIT_COLS / 32u; c++) { \
                /* Beyond the last chunk, weights are multiplied by zeros. */ \
                uint chunk = unit * (UNIT_COLS / 32u) + c, at = min(chunk, CHUNKS - 1u) * 64u; \
                bool there = CHUNKS % (GROUPS * AHEAD * (UNIT_COLS / 32u)) == 0u || chunk < CHUNKS; \
                uvec4 q[BLOCKS * 2u]; \
                [[unroll]] for (uint i = 0u; i < BLOCKS; i++) { \
                    q[i * 2u] = x.v[x_base[i] + at]; \
                    q[i * 2u + 1u] = x.v[x_base[i] + at + 32u]; \
                } \
                CHUNK_SCALES(u, c) \
                UNROLL_PRODUCTS for (uint h = 0u; h < 2u; h++) ADD \
            } \
        } \
    }
#define ADD_IN_BFLOAT { \
    Tokens a[BLOCKS]; \
    [[unroll]] for (uint i = 0u; i < BLOCKS; i++) { \
        uvec4 part = there ? q[i * 2u + h] : uvec4(0u); \
        SET_TOKENS(a[i], part.xz, part.yw) \
    } \
    UNROLL_PRODUCTS for (uint j = 0u; j < TILES; j++) { \
        uvec4 pairs = HALF_WEIGHTS(u, j, c, h); \
        UNROLL_PRODUCTS for (uint part_of = 0u; part_of < BFLOAT_PARTS; part_of++) { \
            Weights m; \
            SET_WEIGHTS(m, bfloat_parts(pairs, part_of)) \
            UNROLL_PRODUCTS for (uint i = 0u; i < BLOCKS; i++) MULTIPLY_ADD(sums[i * TILES + j], a[i], m) \
        } \
    } }

#if MATRIX == 1
#define HalfTokens coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define HalfWeights coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
#define SET_HALVES(m, a, b, c, d) { PUT_HALVES(m, 0, a) PUT_HALVES(m, 2, b) PUT_HALVES(m, 4, c) PUT_HALVES(m, 6, d) }
#define PUT_HALVES(m, e, word) { f16vec2 two_ = unpackFloat2x16(word); m[e] = two_.x; m[e + 1] = two_.y; }
// Of two bfloat16: exact from 2^-14 to 65,504; infinite beyond that, and multiples of 2^-24 below.
uint half_pair(uint pair) { return packHalf2x16(vec2(bf16_low(pair), bf16_high(pair))); }
#define ADD_IN_F16 { \
    HalfTokens a[BLOCKS]; \
    [[unroll]] for (uint i = 0u; i < BLOCKS; i++) { \
        uvec4 part = there ? q[i * 2u + h] : uvec4(0u); \
        part = uvec4(half_pair(part.x), half_pair(part.y), half_pair(part.z), half_pair(part.w)); \
        seen[i] |= part.xy | part.zw; \
        SET_HALVES(a[i], part.x, part.z, part.y, part.w) \
    } \
    UNROLL_PRODUCTS for (uint j = 0u; j < TILES; j++) { \
        uvec4 pairs = HALF_WEIGHTS(u, j, c, h); \
        HalfWeights m; \
        SET_HALVES(m, pairs.x, pairs.y, pairs.z, pairs.w) \
        UNROLL_PRODUCTS for (uint i = 0u; i < BLOCKS; i++) MULTIPLY_ADD(sums[i * TILES + j], a[i], m) \
    } }

// The disjunction of the words of the four lanes of a row.
uvec2 of_row(uvec2 words) {
    words |= subgroupShuffleXor(words, 1u);
    return words | subgroupShuffleXor(words, 2u);
}

// Whether some of the lane's sums are infinite or not numbers, as products with an infinite x are.
bool overflows(Sums sums) {
    uvec4 most = max(floatBitsToUint(SUMS_LOW(sums)) & 0x7fffffffu, floatBitsToUint(SUMS_HIGH(sums)) & 0x7fffffffu);
    return any(greaterThanEqual(most, uvec4(0x7f800000u)));
}

// Whether all of the lane group's columns of a row of x are so small, but not zero, that rounding them to multiples of 2^-24
// loses more than rounding to bfloat16. The rows are the lane's two of the block that begins with word `at`; only those that
// are `used` count. `seen` is the disjunction of what the lane has of them in f16.
bool underflows(uvec2 seen, uint at, bvec2 used) {
    // Every exponent from 2^-11 on has one of these bits.
    uvec2 large = of_row(seen) & 0x70007000u;
    bool low = used.x && large.x == 0u, high = used.y && large.y == 0u;
    if (!subgroupAny(low || high)) return false;
    uvec2 bits = uvec2(0u);
    [[dont_unroll]] for (uint unit = LANE_GROUP; unit < UNITS; unit += GROUPS) {
        [[dont_unroll]] for (uint chunk = unit * (UNIT_COLS / 32u); chunk < min((unit + 1u) * (UNIT_COLS / 32u), CHUNKS); chunk++) {
            uvec4 words = x.v[at + chunk * 64u] | x.v[at + chunk * 64u + 32u];
            bits |= (words.xy | words.zw) & 0x7fff7fffu;
        }
    }
    bits = of_row(bits);
    return low && bits.x != 0u || high && bits.y != 0u;
}
#endif
#endif

void main() {
    uint blocks = (n + 15u) / 16u, panel = gl_WorkGroupID.y * BLOCKS, row_blocks = (rows + 15u) / 16u;
    uint first = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * TILES;
    if (first >= blocks) return;
    uint before = 0u;
    if (EXPERTS == 1u) {
        uint expert = tiles.v[gl_WorkGroupID.y];
        if (expert == NOBODY || is_elsewhere(expert)) return;
        before = (expert - FIRST_EXPERT) * blocks;
    }

    // The biases are those of all experts.
    uint bias_row = (before + FIRST_EXPERT * blocks) * 16u;

    uint base[TILES], x_base[BLOCKS];
#if CODED == 1
    // The rows' factors.
    vec4 factor[TILES];
    [[unroll]] for (uint j = 0u; j < TILES; j++) {
        base[j] = (before + min(first + j, blocks - 1u)) * BLOCK_WORDS + BLOCK_HEADER;
        factor[j] = uintBitsToFloat(weight.v[base[j] - BLOCK_HEADER + (gl_LocalInvocationIndex & 3u)]);
    }
#elif HALVES == 1
    [[unroll]] for (uint j = 0u; j < TILES; j++) base[j] = (before + min(first + j, blocks - 1u)) * (CHUNKS * 64u);
#else
    [[unroll]] for (uint j = 0u; j < TILES; j++) base[j] = (before + min(first + j, blocks - 1u)) * (CHUNKS * 64u) + LANE;
#endif
    [[unroll]] for (uint i = 0u; i < BLOCKS; i++) x_base[i] = min(panel + i, row_blocks - 1u) * (CHUNKS * 64u) + LANE;
    Sums sums[BLOCKS * TILES];
    [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) sums[i] = NO_SUMS;

#if CODED == 1 || HALVES == 1
#if MATRIX == 1
    if (IN_F16 == 1u) {
        uvec2 seen[BLOCKS];
        bvec2 used[BLOCKS];
        [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
            uvec2 row = (panel + i) * 16u + (LANE >> 2) + uvec2(0u, 8u);
            used[i] = lessThan(row, uvec2(rows));
            if (EXPERTS == 1u) used[i] = bvec2(slots.v[row.x] != NOBODY, slots.v[row.y] != NOBODY);
            seen[i] = uvec2(0u);
        }
        ADD_PRODUCTS(ADD_IN_F16)
        bool again = false;
        [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) again = again || overflows(sums[i]);
        [[unroll]] for (uint i = 0u; i < BLOCKS; i++) again = underflows(seen[i], x_base[i], used[i]) || again;
        if (subgroupAny(again)) {
            [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) sums[i] = NO_SUMS;
            ADD_PRODUCTS(ADD_IN_BFLOAT)
        }
    } else
#endif
        ADD_PRODUCTS(ADD_IN_BFLOAT)
#else
    [[dont_unroll]] for (uint round = 0u; round < ROUNDS; round++) {
        uvec4 w[AHEAD * TILES * 2u];
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            uint at = min((round * AHEAD + u) * GROUPS + LANE_GROUP, CHUNKS - 1u) * 64u;
            [[unroll]] for (uint j = 0u; j < TILES; j++) {
                w[(u * TILES + j) * 2u] = weight.v[base[j] + at];
                w[(u * TILES + j) * 2u + 1u] = weight.v[base[j] + at + 32u];
            }
        }
        UNROLL_PRODUCTS for (uint u = 0u; u < AHEAD; u++) {
            uint chunk = (round * AHEAD + u) * GROUPS + LANE_GROUP;
            // Beyond the last chunk, the last chunk's weights are multiplied by zeros.
            bool there = CHUNKS % (GROUPS * AHEAD) == 0u || chunk < CHUNKS;
            uint at = min(chunk, CHUNKS - 1u) * 64u;
            uvec4 q[BLOCKS * 2u];
            [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
                q[i * 2u] = x.v[x_base[i] + at];
                q[i * 2u + 1u] = x.v[x_base[i] + at + 32u];
            }
            UNROLL_PRODUCTS for (uint h = 0u; h < 2u; h++) {
                Tokens a[BLOCKS];
                [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
                    uvec4 part = there ? q[i * 2u + h] : uvec4(0u);
                    SET_TOKENS(a[i], part.xz, part.yw)
                }
                UNROLL_PRODUCTS for (uint j = 0u; j < TILES; j++) {
                    Weights m;
                    SET_WEIGHTS(m, w[(u * TILES + j) * 2u + h])
                    UNROLL_PRODUCTS for (uint i = 0u; i < BLOCKS; i++) MULTIPLY_ADD(sums[i * TILES + j], a[i], m)
                }
            }
        }
    }
#endif

    // The scales reuse the shared memory of the sums: a few more bytes of shared memory would reduce the number of
    // workgroups that fit on a processor.
    float scale[TURNS];
    if (FOLD == 1u) {
        read_scales(panel, row_blocks);
        barrier();
        [[unroll]] for (uint turn = 0u; turn < TURNS; turn++) {
            uint item = min(turn * LANES + gl_LocalInvocationIndex, ITEMS - 1u);
            scale[turn] = sums_s[item / 64u * 16u + (item >> 5 & 1u) * 8u + (item >> 2 & 7u)].x;
        }
        barrier();
    }
    [[unroll]] for (uint j = 0u; j < TILES; j++) {
        if (j > 0u) barrier();
        [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
            sums_s[LANE_GROUP * ITEMS + i * 64u + LANE] = SUMS_LOW(sums[i * TILES + j]);
            sums_s[LANE_GROUP * ITEMS + i * 64u + 32u + LANE] = SUMS_HIGH(sums[i * TILES + j]);
        }
        barrier();
        for (uint item = gl_LocalInvocationIndex; item < ITEMS; item += LANES) {
            uint lane = item & 31u, second = (item >> 5) & 1u, g = lane >> 2, t = lane & 3u;
            uint block = panel + item / 64u, token = block * 16u + second * 8u + g;
            uint row = (first + j) * 16u + 4u * t;
            if (row >= n || block >= row_blocks || (PACKED == 0u && token >= rows)) continue;
            vec4 v = vec4(0.0);
            [[unroll]] for (uint s = 0u; s < GROUPS; s++) v += sums_s[s * ITEMS + item];
#if CODED == 1
            v *= factor[j];
#endif
            if (FOLD == 1u) {
                [[unroll]] for (uint turn = 0u; turn < TURNS; turn++) if (item / LANES == turn) v *= scale[turn];
            }
            if (EXPERTS == 1u && PACKED == 0u) {
                token = slots.v[token];
                if (token == NOBODY) continue;
            }
            uint left = min(n - row, 4u);
            if (BIAS == 1u) [[unroll]] for (uint e = 0u; e < 4u; e++) if (e < left) v[e] += bias.v[bias_row + row + e];
            if (IS_GATED(EPILOGUE)) {
                vec2 result = glu(EPILOGUE, v.xz, v.yw);
                uint column = row / 2u;
                if (PACKED == 1u) {
                    if (left < 4u) result.y = 0.0;
                    uint at = (((block * y_stride + column / 32u) * 2u + column % 8u / 4u) * 32u + g * 4u + column % 32u / 8u) * 4u;
                    PUT_WORD(y, at + column % 4u / 2u * 2u + second, pack_pair(result.x, result.y))
                } else {
                    uint at = token * y_stride + column;
                    if (left >= 2u) PUT_WORD(y, at, floatBitsToUint(result.x))
                    if (left == 4u) PUT_WORD(y, at + 1u, floatBitsToUint(result.y))
                }
            } else {
                uint at = (token * y_stride + row) / 4u;
                if (EPILOGUE == 1u) v += uintBitsToFloat(y.v[at]);
                v = ACTIVATED(EPILOGUE, v);
                uvec4 words = floatBitsToUint(v);
                if (left == 4u) y.v[at] = words;
                if (left < 4u) y.v[at].x = words.x;
                if (left < 4u && left > 1u) y.v[at].y = words.y;
                if (left == 3u) y.v[at].z = words.z;
                if (FOLD == 2u) {
                    // n is a multiple of 32, so the four invocations that hold a row's 16 columns all reach these
                    // shuffles.
                    float square = dot(v, v);
                    square += subgroupShuffleXor(square, 1u);
                    square += subgroupShuffleXor(square, 2u);
                    if (t == 0u) squares.v[token * (n / 16u) + first + j] = square;
                    vec4 w = vec4(norm.v[row], norm.v[row + 1u], norm.v[row + 2u], norm.v[row + 3u]) * v;
                    uint next_at = (((block * (n / 32u) + row / 32u) * 2u + row % 8u / 4u) * 32u + g * 4u + row % 32u / 8u) * 4u;
                    PUT_WORD(next, next_at + second, pack_pair(w.x, w.y))
                    PUT_WORD(next, next_at + 2u + second, pack_pair(w.z, w.w))
                }
            }
        }
    }
}

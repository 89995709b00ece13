#version 460
#extension GL_GOOGLE_include_directive : require
#if ARITHMETIC > 0
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#endif
#if ARITHMETIC == 2
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#endif
// Tiled GEMM on row-major weights for many rows of x, on every device: y[r] = epilogue( scales[r] · W · x[r] ).
//
// ARITHMETIC 0   f32: x in ORDER 0 of `block_rows`
// ARITHMETIC 1   pairs of f16: x in ORDER 1, whose rows are put together in pairs in shared memory, W rounded to f16.
//                Products are summed in f16 over the 32 columns of a stage, then in f32. The sum over a stage has a relative
//                error of about 8e-4; it overflows only if weights are larger than 1023, since elements of x are smaller
//                than 2
// ARITHMETIC 2   cooperative matrices of MATRIX_M × MATRIX_N × MATRIX_K in f16 with sums in f32, loaded from shared memory
//                with `coopMatLoad`: x in ORDER 1, W rounded to f16
// epilogue       0 store: y = v + b. 1 residual: y += v + b. From 2 on a gated linear unit: the rows of W alternate gate
//                and up; y[n/2] = glu(gate, up)
// weight         [n][chunks·8] in the variant's format (codes: `codes.glsl`);  y [rows][y_stride] f32
// experts        EXPERTS 1 (MoE): `tiles` assigns an expert to each tile of x, and the expert's weights are n rows.
//                SCATTER 1: the tile's rows are written to rows `slots` of y; rows whose slot is NOBODY are dropped
//                (`expert_plan`). Tiles of experts that are not in `weight` are left unchanged (`expert_part.glsl`)
//
// One workgroup computes a tile of TOKENS rows of x by FEATURES rows of W, or of SPLITS workgroups each a part of K: the
// last one to arrive (an atomic counter) adds their sums in the order of the parts. Per stage, 16 columns (f32) or 32 of
// both are in shared memory; the next stage's are loaded while these are multiplied. An invocation computes WORDS words
// of x (of 4 rows in f32, 8 in f16) by EACH rows of W; a subgroup computes WORDS · MATRIX_M rows of x by EACH · MATRIX_N
// rows of W with ARITHMETIC 2. Tiles whose first row is not below the number of rows in use return at once. Workgroups
// with the same tile of W are neighbours.
// Traffic: W rows/TOKENS times, x n/FEATURES times, most of them from the L2 cache.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;     // the workgroup's size
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint TOKENS = 64;     // rows of x of a tile
layout(constant_id = 5) const uint FEATURES = 64;   // rows of W of a tile
layout(constant_id = 6) const uint WORDS = 1;
layout(constant_id = 7) const uint EACH = 4;        // even
layout(constant_id = 8) const uint SPLITS = 1;
layout(constant_id = 9) const uint EXPERTS = 0;
layout(constant_id = 10) const uint SCATTER = 0;
layout(constant_id = 11) const uint FIRST_EXPERT = 0; // the first expert in `weight`: `expert_part.glsl`
layout(constant_id = 12) const uint PART_EXPERTS = 0; // the number of experts in `weight`; 0: all
#include "expert_part.glsl"
#if WEIGHT == 3
layout(constant_id = 13) const uint CODES = 0x5024; // the weights' format
#include "codes.glsl"
#endif
#if ARITHMETIC == 2
#if WEIGHT != 3
layout(constant_id = 13) const uint CODES = 0x5024;
#endif
layout(constant_id = 14) const uint MATRIX_M = 16;
layout(constant_id = 15) const uint MATRIX_N = 16;
layout(constant_id = 16) const uint MATRIX_K = 16;
layout(constant_id = 17) const uint SUBGROUP = 32;   // the subgroups' size
#endif

layout(buffer_reference, std430, buffer_reference_align = 4) buffer Counters { coherent uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Partials { coherent vec4 v[]; };

layout(push_constant) uniform Args {
    Words4In weight;
#if ARITHMETIC == 1
    WordsIn x;
#else
    Words4In x;
#endif
    FloatsIn scales;
    FloatsIn bias;
    FloatsInOut y;
    WordsIn count;     // descriptor of the prompt step; word 2 is the number of rows in use
    WordsIn tiles;
    WordsIn slots;
    Partials partials; // with SPLITS > 1: [tiles][SPLITS][TOKENS · FEATURES]
    Counters counters; // [tiles], zero between uses
    uint n;
    uint chunks;       // 8-value chunks of a padded row of W
    uint y_stride;     // in floats
    uint rows;         // of x in use; 0: `count` holds the number
};

const uint NOBODY = 0xffffffffu;
// Columns in a 16-byte word of W in shared memory.
#if ARITHMETIC == 0
const uint COLUMNS = 4u;
#else
const uint COLUMNS = 8u;
#endif
// Columns of a stage: four words of a row of W. A fifth word keeps rows in different banks.
const uint STEP = 4u * COLUMNS;
const uint W_STRIDE = 5u;
const uint W_CHUNKS = STEP / 8u;
// Chunks of eight columns that an invocation loads together, with one scale: as many as leave an item to all.
#if WEIGHT == 3
const uint SHARE = FEATURES * W_CHUNKS / LANES;
const uint PARTS = SHARE >= W_CHUNKS ? W_CHUNKS : SHARE >= 2u ? 2u : 1u;
#else
const uint PARTS = 1u;
#endif
const uint W_OF_ROW = W_CHUNKS / PARTS;
const uint W_ITEMS = FEATURES * W_OF_ROW;
const uint W_LOADS = (W_ITEMS + LANES - 1u) / LANES;
#if ARITHMETIC == 2
// x like W: rows of four words and one more.
const uint X_STRIDE = W_STRIDE;
const uint X_ITEMS = TOKENS * 4u;
#else
// x in words of adjacent rows; each row has the STEP columns of a stage. Values of f16 are loaded as pairs of columns of
// eight rows, and stored as two words.
const uint TOKENS_OF_WORD = COLUMNS;
const uint X_STRIDE = STEP + 1u;
const uint COLUMNS_OF_ITEM = ARITHMETIC + 1u;
const uint X_ITEMS = TOKENS / TOKENS_OF_WORD * (STEP / COLUMNS_OF_ITEM);
#endif
const uint X_LOADS = (X_ITEMS + LANES - 1u) / LANES;

// Blocks are loaded and stored from arrays of 16-byte elements: a block's rows must begin at multiples of 16 bytes, and an
// array begins at a multiple of its element's size only.
shared uvec4 w_s[FEATURES * W_STRIDE];
#if ARITHMETIC == 2
shared uvec4 x_s[TOKENS * X_STRIDE];
const uint SUBGROUPS = (TOKENS / (WORDS * MATRIX_M)) * (FEATURES / (EACH * MATRIX_N));
const uint SLAB = MATRIX_M * MATRIX_N / 4u;        // 16-byte words of a subgroup
shared vec4 slab_s[SUBGROUPS * SLAB];
#else
shared uvec4 x_s[TOKENS / TOKENS_OF_WORD * X_STRIDE];
#endif
shared uint last_s;

// `expert_row`: the first row of the tile's expert in `weight`. `bias_row`: among the rows of all experts.
uint used, tile_token, tile_feature, expert_row, bias_row;

// Eight weights as they are multiplied, two words in f32 and one in f16; and as they are loaded, unless they are codes.
struct Eight { uvec4 a; uvec4 b; };

uint row_of(uint item) { return expert_row + min(tile_feature + item / W_OF_ROW, n - 1u); }
// Chunks past the end of a row are multiplied with zeros of x.
uint chunk_of(uint item, uint stage) { return min(stage * W_CHUNKS + item % W_OF_ROW * PARTS, (chunks - 1u) / PARTS * PARTS); }

Eight rounded(vec4 a, vec4 b) {
#if ARITHMETIC == 0
    return Eight(floatBitsToUint(a), floatBitsToUint(b));
#else
    return Eight(uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw)), uvec4(0u));
#endif
}

#if WEIGHT == 3
// What an invocation loads of an item: its chunks, which become weights when they are stored, after the products of the stage
// before. The row's factor is the same in all stages.
struct Item { Chunk chunks[4]; };

Item load_item(uint item, uint stage) {
    Item loaded;
    load_chunks(weight, row_word(row_of(item), chunks), chunk_of(item, stage), chunks, PARTS, loaded.chunks);
    return loaded;
}
float load_factor(uint item) { return uintBitsToFloat(CODE_WORD(weight, row_word(row_of(item), chunks))); }

Eight converted(Item loaded, uint part, float factor) {
    vec4 a, b;
    weights_of(loaded.chunks[part], factor, a, b);
    return rounded(a, b);
}
#else
#define Item Eight
#define load_factor(item) 1.0

Item load_item(uint item, uint stage) {
    uint at = row_of(item) * chunks + chunk_of(item, stage);
#if WEIGHT == 2
    return Eight(weight.v[at * 2u], weight.v[at * 2u + 1u]);
#else
    return Eight(weight.v[at], uvec4(0u));
#endif
}

Eight converted(Item loaded, uint part, float factor) {
#if WEIGHT == 1 && ARITHMETIC > 0
    return loaded;
#elif WEIGHT == 2
    return rounded(uintBitsToFloat(loaded.a), uintBitsToFloat(loaded.b));
#else
    vec4 a, b;
    unpack8(loaded.a, a, b);
    return rounded(a, b);
#endif
}
#endif

// Row `row` of the tile of W is at this place in shared memory. Except for matrices, the even rows come first, so that
// invocations that have neighbouring pairs of rows read neighbouring rows.
uint place(uint row) {
#if ARITHMETIC == 2
    return row;
#else
    return row % 2u * (FEATURES / 2u) + row / 2u;
#endif
}

void store_item(uint item, Item loaded, float factor) {
    uint row = place(item / W_OF_ROW), chunk = item % W_OF_ROW * PARTS;
    [[unroll]] for (uint part = 0u; part < PARTS; part++) {
        Eight w = converted(loaded, part, factor);
#if ARITHMETIC == 0
        w_s[row * W_STRIDE + (chunk + part) * 2u] = w.a;
        w_s[row * W_STRIDE + (chunk + part) * 2u + 1u] = w.b;
#else
        w_s[row * W_STRIDE + chunk + part] = w.a;
#endif
    }
}

// What an invocation loads of x for an item: a word, with pairs of f16 two.
struct Rows { uvec4 a; uvec4 b; };

Rows load_rows(uint item, uint stage) {
    uint padded = (chunks + 3u) / 4u * 32u, last = (used + 7u) / 8u * 8u - 1u;
#if ARITHMETIC == 2
    uint row = min(tile_token + item / 4u, last);
    return Rows(x.v[row * (padded / 8u) + stage * 4u + item % 4u], uvec4(0u));
#elif ARITHMETIC == 1
    const uint PAIRS = STEP / 2u;
    uint row = tile_token + item / PAIRS * 8u, at = stage * PAIRS + item % PAIRS;
    Rows rows;
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        rows.a[i] = x.v[min(row + i, last) * (padded / 2u) + at];
        rows.b[i] = x.v[min(row + i + 4u, last) * (padded / 2u) + at];
    }
    return rows;
#else
    uint block = min(tile_token / TOKENS_OF_WORD + item / STEP, (used - 1u) / TOKENS_OF_WORD);
    return Rows(x.v[block * padded + stage * STEP + item % STEP], uvec4(0u));
#endif
}

void store_rows(uint item, Rows rows) {
#if ARITHMETIC == 2
    x_s[item / 4u * X_STRIDE + item % 4u] = rows.a;
#elif ARITHMETIC == 1
    uvec4 even = uvec4(rows.a.xz, rows.b.xz), odd = uvec4(rows.a.yw, rows.b.yw);
    uint at = item / (STEP / 2u) * X_STRIDE + item % (STEP / 2u) * 2u;
    x_s[at] = (even & 0xffffu) | odd << 16;
    x_s[at + 1u] = even >> 16 | (odd & 0xffff0000u);
#else
    x_s[item / STEP * X_STRIDE + item % STEP] = rows.a;
#endif
}

// Items that every invocation has need no test.
#define EACH_ITEM(items, loads, body)                                     \
    [[unroll]] for (uint i_ = 0u; i_ < loads; i_++) {                     \
        uint item_ = i_ * LANES + gl_LocalInvocationIndex;                \
        if (items % LANES == 0u || item_ < items) { body }                \
    }
#define LOAD(stage)                                                       \
    EACH_ITEM(W_ITEMS, W_LOADS, weights_[i_] = load_item(item_, stage);)  \
    EACH_ITEM(X_ITEMS, X_LOADS, rows_[i_] = load_rows(item_, stage);)
#define STORE                                                             \
    EACH_ITEM(W_ITEMS, W_LOADS, store_item(item_, weights_[i_], factors_[i_]);) \
    EACH_ITEM(X_ITEMS, X_LOADS, store_rows(item_, rows_[i_]);)

// Finishes the sums of one row of x with rows `feature` (even) and `feature` + 1 of W.
void finish(uint token, uint feature, vec2 v) {
    if (token >= used || feature >= n) return;
    uint row = token;
    if (SCATTER == 1u) {
        row = slots.v[token];
        if (row == NOBODY) return;
    }
    v *= scales.v[token];
    if (BIAS == 1u) v += vec2(bias.v[bias_row + feature], bias.v[bias_row + min(feature + 1u, n - 1u)]);
    uint at = row * y_stride;
    if (IS_GATED(EPILOGUE)) {
        y.v[at + feature / 2u] = glu(EPILOGUE, v.x, v.y);
        return;
    }
    at += feature;
    v = ACTIVATED(EPILOGUE, v);
    if (EPILOGUE == 1u) y.v[at] += v.x; else y.v[at] = v.x;
    if (feature + 1u >= n) return;
    if (EPILOGUE == 1u) y.v[at + 1u] += v.y; else y.v[at + 1u] = v.y;
}

// Whether this workgroup is the last one of its tile to arrive: releases its partial sums and acquires the others'.
bool is_last(uint tile) {
    memoryBarrierBuffer();
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        uint arrived = atomicAdd(counters.v[tile], 1u) + 1u;
        if (arrived == SPLITS) counters.v[tile] = 0u;
        last_s = arrived == SPLITS ? 1u : 0u;
    }
    barrier();
    memoryBarrierBuffer();
    return last_s == 1u;
}

void main() {
    used = rows != 0u ? rows : count.v[2];
    tile_token = gl_WorkGroupID.x * TOKENS;
    tile_feature = gl_WorkGroupID.y * FEATURES;
    if (tile_token >= used || tile_feature >= n) return;
    expert_row = 0u;
    if (EXPERTS == 1u) {
        uint expert = tiles.v[gl_WorkGroupID.x];
        if (expert == NOBODY || is_elsewhere(expert)) return;
        expert_row = (expert - FIRST_EXPERT) * n;
    }
    bias_row = expert_row + FIRST_EXPERT * n;
    uint t = gl_LocalInvocationIndex;
    uint tile = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x, split = gl_WorkGroupID.z;
    uint stages = (chunks + W_CHUNKS - 1u) / W_CHUNKS;
    uint share = (stages + SPLITS - 1u) / SPLITS;
    uint begin = min(split * share, stages - 1u);
    // A part past the end has no stages.
    uint end = split * share < stages ? min(begin + share, stages) : begin;

    float factors_[W_LOADS];
    EACH_ITEM(W_ITEMS, W_LOADS, factors_[i_] = load_factor(item_);)
    Item weights_[W_LOADS];
    Rows rows_[X_LOADS];
    LOAD(begin)
    STORE
    barrier();

#if ARITHMETIC == 2
    uint wide = FEATURES / (EACH * MATRIX_N);
    uint group_token = gl_SubgroupID / wide * (WORDS * MATRIX_M), group_feature = gl_SubgroupID % wide * (EACH * MATRIX_N);
    coopmat<float, gl_ScopeSubgroup, MATRIX_M, MATRIX_N, gl_MatrixUseAccumulator> sums[WORDS * EACH];
    [[unroll]] for (uint i = 0u; i < WORDS * EACH; i++)
        sums[i] = coopmat<float, gl_ScopeSubgroup, MATRIX_M, MATRIX_N, gl_MatrixUseAccumulator>(0.0);
    [[dont_unroll]] for (uint stage = begin; stage < end; stage++) {
        LOAD(min(stage + 1u, stages - 1u))
        [[unroll]] for (uint c = 0u; c < STEP / MATRIX_K; c++) {
            coopmat<float16_t, gl_ScopeSubgroup, MATRIX_M, MATRIX_K, gl_MatrixUseA> a[WORDS];
            [[unroll]] for (uint i = 0u; i < WORDS; i++)
                coopMatLoad(a[i], x_s, (group_token + i * MATRIX_M) * X_STRIDE + c * (MATRIX_K / 8u), X_STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint j = 0u; j < EACH; j++) {
                coopmat<float16_t, gl_ScopeSubgroup, MATRIX_K, MATRIX_N, gl_MatrixUseB> b;
                coopMatLoad(b, w_s, (group_feature + j * MATRIX_N) * W_STRIDE + c * (MATRIX_K / 8u), W_STRIDE,
                            gl_CooperativeMatrixLayoutColumnMajor);
                [[unroll]] for (uint i = 0u; i < WORDS; i++)
                    sums[i * EACH + j] = coopMatMulAdd(a[i], b, sums[i * EACH + j]);
            }
        }
        barrier();
        STORE
        barrier();
    }

    // The sums go through shared memory, since only the device knows which invocation has which of them.
    uint slab = gl_SubgroupID * SLAB;
    uint own = (tile * SPLITS + split) * (TOKENS * FEATURES);
    [[unroll]] for (uint i = 0u; i < WORDS * EACH; i++) {
        coopMatStore(sums[i], slab_s, slab, MATRIX_N / 4u, gl_CooperativeMatrixLayoutRowMajor);
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        uint token = group_token + i / EACH * MATRIX_M, feature = group_feature + i % EACH * MATRIX_N;
        for (uint p = gl_SubgroupInvocationID; p < SLAB; p += SUBGROUP) {
            uint row = token + p / (MATRIX_N / 4u), column = feature + p % (MATRIX_N / 4u) * 4u;
            vec4 v = slab_s[slab + p];
            if (SPLITS > 1u) {
                partials.v[(own + row * FEATURES + column) / 4u] = v;
            } else {
                finish(tile_token + row, tile_feature + column, v.xy);
                finish(tile_token + row, tile_feature + column + 2u, v.zw);
            }
        }
        subgroupMemoryBarrierShared();
        subgroupBarrier();
    }
    if (SPLITS > 1u) {
        if (!is_last(tile)) return;
        uint from = tile * SPLITS * (TOKENS * FEATURES / 4u);
        for (uint p = t; p < TOKENS * FEATURES / 4u; p += LANES) {
            vec4 v = vec4(0.0);
            for (uint s = 0u; s < SPLITS; s++) v += partials.v[from + s * (TOKENS * FEATURES / 4u) + p];
            uint token = tile_token + p / (FEATURES / 4u), feature = tile_feature + p % (FEATURES / 4u) * 4u;
            finish(token, feature, v.xy);
            finish(token, feature + 2u, v.zw);
        }
    }
    if (CODES == 1u) y.v[0] = 0.0; // no format: keeps the constant
#else
    // The invocation's words of x and pairs of rows of W.
    const uint FEATURE_GROUPS = FEATURES / EACH;
    const uint QUADS = WORDS * (TOKENS_OF_WORD / 4u);
    uint feature_group = t % FEATURE_GROUPS, word = t / FEATURE_GROUPS * WORDS;
    vec4 sums[EACH * QUADS];
    [[unroll]] for (uint i = 0u; i < EACH * QUADS; i++) sums[i] = vec4(0.0);
    [[dont_unroll]] for (uint stage = begin; stage < end; stage++) {
        LOAD(min(stage + 1u, stages - 1u))
#if ARITHMETIC == 1
        f16vec2 parts[EACH * QUADS * 2u];
        [[unroll]] for (uint i = 0u; i < EACH * QUADS * 2u; i++) parts[i] = f16vec2(0.0);
#endif
        [[unroll]] for (uint c = 0u; c < 4u; c++) {
            uvec4 w[EACH];
            [[unroll]] for (uint i = 0u; i < EACH; i++)
                w[i] = w_s[(i % 2u * (FEATURES / 2u) + i / 2u * FEATURE_GROUPS + feature_group) * W_STRIDE + c];
            [[unroll]] for (uint k = 0u; k < COLUMNS; k++) {
                [[unroll]] for (uint d = 0u; d < WORDS; d++) {
                    uvec4 xs = x_s[(word + d) * X_STRIDE + c * COLUMNS + k];
#if ARITHMETIC == 0
                    vec4 tokens = uintBitsToFloat(xs);
                    [[unroll]] for (uint i = 0u; i < EACH; i++)
                        sums[i * QUADS + d] += uintBitsToFloat(w[i][k]) * tokens;
#else
                    [[unroll]] for (uint i = 0u; i < EACH; i++) {
                        f16vec2 pair = unpackFloat2x16(w[i][k / 2u]);
                        f16vec2 one = f16vec2(pair[k & 1u]);
                        [[unroll]] for (uint e = 0u; e < 4u; e++) {
                            uint at = (i * QUADS + d * 2u) * 2u + e;
                            parts[at] = fma(unpackFloat2x16(xs[e]), one, parts[at]);
                        }
                    }
#endif
                }
            }
        }
#if ARITHMETIC == 1
        [[unroll]] for (uint i = 0u; i < EACH * QUADS; i++)
            sums[i] += vec4(vec2(parts[2u * i]), vec2(parts[2u * i + 1u]));
#endif
        barrier();
        STORE
        barrier();
    }

    if (SPLITS > 1u) {
        uint own = (tile * SPLITS + split) * (EACH * QUADS * LANES) + t;
        [[unroll]] for (uint i = 0u; i < EACH * QUADS; i++) partials.v[own + i * LANES] = sums[i];
        if (!is_last(tile)) return;
        uint from = tile * SPLITS * (EACH * QUADS * LANES) + t;
        [[unroll]] for (uint i = 0u; i < EACH * QUADS; i++) {
            sums[i] = partials.v[from + i * LANES];
            for (uint s = 1u; s < SPLITS; s++) sums[i] += partials.v[from + (s * EACH * QUADS + i) * LANES];
        }
    }
    [[unroll]] for (uint i = 0u; i < EACH; i += 2u) {
        uint feature = tile_feature + (i / 2u * FEATURE_GROUPS + feature_group) * 2u;
        [[unroll]] for (uint q = 0u; q < QUADS; q++) {
            uint token = tile_token + word * TOKENS_OF_WORD + q * 4u;
            [[unroll]] for (uint e = 0u; e < 4u; e++)
                finish(token + e, feature, vec2(sums[i * QUADS + q][e], sums[(i + 1u) * QUADS + q][e]));
        }
    }
#endif
}

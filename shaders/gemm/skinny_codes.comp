#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Small-M GEMM for decode on quantised weights in fragment order: y[r] = epilogue( W · prologue(x[r]) ) for 1 to 16 rows
// of x. The prologue, the epilogue and the tags are those of `skinny.comp`.
//
// weight     codes with scales (`codes.glsl`; fragments as `memory::pack::codes` lays them out)
// x          [rows][x_stride] f32; multiplied in f16. Each lane group scales its columns of a row by a power of two that
//            makes the largest value a large f16, and scales the products back, so that nothing overflows
// y          [rows][y_stride] f32. TAGGED 1: x is tagged (`tags.glsl`). TAGGED 3: x and y are tagged
//
// partials   [COLUMN_PARTS - 1][rows][n rounded up to 4] f32, tagged as y: see below
//
// A workgroup computes TILES blocks of 16 rows of W for all rows of x, then as many blocks further on, as long as there are
// any. Its groups of 32 lanes split K; their sums are added through shared memory. x is scaled, rounded and put into shared
// memory once. A step is AHEAD units of columns of each lane group; the codes and scales of the next two steps are in flight
// while one is multiplied, also across blocks of W. The first of them, the norm's weights and the rows' factors are loaded
// before the workgroup polls for x, and the words of BATCH rows of x are polled together: each wait in turn would cost a
// round trip to the L2 cache. Codes become f16 in registers: with bit operations the code's bits as a subnormal f16, then
// one fused multiply-add with the scale and the minimum.
// With COLUMN_PARTS above 1, whose x and y are tagged, x of all columns does not fit in shared memory: an equal share of the
// workgroups multiplies each part of the columns. Those of the last part write y; those of another store their sums in
// `partials`, and the workgroup with the same rows of the next part, which was launched later, polls for them and adds its own.
// Traffic: W once; x once per workgroup, from the L2 cache where it is tagged.
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_shuffle : require
// The fragments are of f16.
#define WEIGHT 1
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the workgroup's size
layout(constant_id = 2) const uint NORM = 0;
layout(constant_id = 3) const uint BIAS = 0;
layout(constant_id = 4) const uint EPILOGUE = 0;
layout(constant_id = 5) const uint TILES = 1;
layout(constant_id = 6) const uint AHEAD = 1;
layout(constant_id = 7) const uint ROWS = 1;      // at most 16
layout(constant_id = 8) const uint UNITS = 32;    // units of columns of a padded row of W
layout(constant_id = 9) const uint TAGGED = 0;
layout(constant_id = 10) const uint CODES = 0x5024; // the weights' format
// The product is with a part of W's columns, to which x and k belong: its first unit, and their number.
layout(constant_id = 11) const uint FIRST_UNIT = 0;
layout(constant_id = 12) const uint OWN_UNITS = 32;
// The number of parts of W's columns that workgroups multiply side by side; each has OWN_UNITS, the last one the rest.
layout(constant_id = 14) const uint COLUMN_PARTS = 1;

#include "fragments.glsl"
#include "codes.glsl"
#define DEVICES_ID 13
#include "tags.glsl"
#if MATRIX == 1
// f16 arithmetic keeps subnormal numbers: the codes.
#extension GL_EXT_spirv_intrinsics : require
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4464], 4459, 16);
#endif

layout(push_constant) uniform Args {
    Words4In weight;
    TaggedIn x;
    Floats4In norm;
    FloatsIn bias;
    TaggedInOut y;
    TaggedInOut partials;
    Fault fault;
    uint n;           // rows of W
    uint k;           // columns of the part without padding; the divisor of the mean
    uint x_stride;    // in floats
    uint y_stride;    // in floats
    float epsilon;
    uint x_tag;
    uint old_tag;     // tag of y before the residual is added
    uint y_tag;
};

#include "code_fragments.glsl"

const uint GROUPS = LANES / 32u;
const uint ROUNDS = (OWN_UNITS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD); // steps of a block of W
const uint BLOCK = ROWS < 8u ? ROWS : 8u;         // rows of x in half a fragment
const uint HALVES = ROWS > 8u ? 2u : 1u;          // of up to 8 rows of x
const uint KEPT = BLOCK * 4u;                     // items of a block of 16 rows of W for half a fragment
const uint ITEMS = TILES * HALVES * KEPT;
const uint UNIT_QUADS = UNIT_COLS / 4u;
const uint PARTS = UNIT_COLS / 128u;              // 16-byte words of a row of x for a lane, of a unit
const uint ALL_LOADS = ROUNDS * AHEAD * PARTS;    // and of all its units
const uint LOADS = ALL_LOADS < 8u ? ALL_LOADS : 8u; // of those, loaded together
const uint PASSES = (ALL_LOADS + LOADS - 1u) / LOADS;
const uint BATCH = ROWS < 8u / LOADS ? ROWS : 8u / LOADS; // rows whose words are polled together
// Independent chains of sums of a tile, which hide the latency of the matrix units.
const uint CHAINS = TILES == 1u ? 2u : 1u;

// The shared memory of a lane group: x in f16 as [half][32 columns][row of the half][t] of eight columns each, where 32
// columns take SLOT words. Sums have two places, used in turn; each item sums four rows of W.
const uint SLOT = BLOCK * 4u;
const uint SLOTS = PASSES * LOADS * 4u;
const uint X_WORDS = HALVES * SLOTS * SLOT;

shared uvec4 x_s[GROUPS * X_WORDS];
shared vec4 sums_s[2u * GROUPS * ITEMS];
shared float squares_s[GROUPS * ROWS];
// What undoes the scaling of a lane group's columns of a row of x. In registers of the lanes that have the row's sums, an NVIDIA driver
// (580.159) gave sums that are no numbers.
shared float backs_s[GROUPS * ROWS];

#include "group_max.glsl"
#if MATRIX == 1
float group_add(float x) { return subgroupAdd(x); }
#else
float group_add(float x) {
    barrier();
    exchange_s[gl_LocalInvocationIndex] = floatBitsToUint(x);
    barrier();
    float sum = 0.0;
    for (uint i = 0u; i < 32u; i++) sum += uintBitsToFloat(exchange_s[LANE_GROUP * 32u + i]);
    return sum;
}
#endif

// Store one or two results at an even index. The components are constants: some drivers implement a store to a
// dynamically indexed component as a store of the whole vector.
#if MATRIX == 1
#define PUT_TWO(at, words) TaggedOut2(y).v[(at) / 2u] = words;
#else
#define PUT_TWO(at, words) if ((at) % 4u == 0u) y.v[(at) / 4u].xy = words; else y.v[(at) / 4u].zw = words;
#endif
#define PUT_ONE(at, word) if ((at) % 4u == 0u) y.v[(at) / 4u].x = word; else y.v[(at) / 4u].z = word;

// Loads the 16-byte words of x of pass `pass` of BATCH rows from row `from` on; of columns that do not exist, others.
#define LOAD_X(words, from, pass) { \
    uint column_[LOADS]; \
    [[unroll]] for (uint i = 0u; i < LOADS; i++) column_[i] = column_of(pass, i); \
    if (TAGGED == 0u) { \
        [[unroll]] for (uint i = 0u; i < BATCH * LOADS; i++) \
            words[i] = plain_x.v[min((from) + i / LOADS, ROWS - 1u) * (x_stride / 4u) + column_[i % LOADS]]; \
    } else { \
        uint bad_; \
        do { \
            bad_ = 0u; \
            [[unroll]] for (uint i = 0u; i < BATCH * LOADS; i++) \
                words[i] = x.v[min((from) + i / LOADS, ROWS - 1u) * (x_stride / 4u) + column_[i % LOADS]]; \
            [[unroll]] for (uint i = 0u; i < BATCH * LOADS; i++) bad_ |= stale(words[i], x_tag); \
        } while (poll_again(subgroupAny(bad_ != 0u), polls, fault, x_tag)); \
    } }

// The workgroup's part of the columns: its first unit, counted from FIRST_UNIT, and the number of its units.
uint part_first = 0u, part_units = OWN_UNITS;

uint unit_of(uint load) { return load / PARTS * GROUPS + LANE_GROUP; }
uint quad_of(uint load) { return (part_first + unit_of(load)) * UNIT_QUADS + load % PARTS * 32u + LANE; }
bool exists(uint pass, uint i) {
    uint load = pass * LOADS + i;
    return load < ALL_LOADS && unit_of(load) < part_units && quad_of(load) * 4u < k;
}
uint column_of(uint pass, uint i) {
    uint load = pass * LOADS + i;
    return exists(pass, i) ? quad_of(load) : 0u;
}

// Loads the codes and scales of a step: of tile `tile_`, round `round_`. Beyond the last tile, all lanes load one word.
// Beyond the last unit, the last unit's weights are multiplied by zeros.
#define LOAD_STEP(w, scales, tile_, round_) { \
    bool more_ = tile_ < tiles; \
    uint lane_ = more_ ? LANE : 0u; \
    [[unroll]] for (uint u = 0u; u < AHEAD; u++) { \
        uint unit_ = (FIRST_UNIT + part_first + min((round_ * AHEAD + u) * GROUPS + LANE_GROUP, part_units - 1u)) * UNIT_WORDS; \
        [[unroll]] for (uint j = 0u; j < TILES; j++) { \
            uint at_of_unit = more_ ? min(tile_ * TILES + j, blocks - 1u) * BLOCK_WORDS + BLOCK_HEADER + unit_ : 0u; \
            [[unroll]] for (uint i = 0u; i < PLANE_LOADS; i++) \
                w[(u * TILES + j) * PLANE_LOADS + i] = weight.v[at_of_unit + (more_ ? i * 32u : 0u) + lane_]; \
            LOAD_SCALES(scales, (u * TILES + j) * SCALE_SLOTS, more_ ? at_of_unit + PLANE_LOADS * 32u : 0u) \
        } \
    } }

// Adds the products of a step to the sums.
#define MULTIPLY_STEP(w, scales, round_) { \
    uint step_at = take_at + round_ * (AHEAD * (UNIT_COLS / 32u) * SLOT); \
    UNROLL_PRODUCTS for (uint u = 0u; u < AHEAD; u++) { \
        UNROLL_PRODUCTS for (uint c = 0u; c < UNIT_COLS / 32u; c++) { \
            uint scale[TILES], minimum[TILES]; \
            [[unroll]] for (uint j = 0u; j < TILES; j++) { \
                uint at = (u * TILES + j) * SCALE_SLOTS; \
                scale[j] = SCALE_OF(scales, at, c, t); \
                minimum[j] = STORED == 1u ? SCALE_OF(scales, at + STORED * SCALE_WORDS, c, t) : 0u; \
            } \
            uint at = step_at + (u * (UNIT_COLS / 32u) + c) * SLOT; \
            uvec4 a_low = x_s[at], a_high = HALVES == 2u ? x_s[at + (HALVES - 1u) * SLOTS * SLOT] : uvec4(0u); \
            UNROLL_PRODUCTS for (uint h = 0u; h < 2u; h++) { \
                FewTokens a, b; \
                SET_FEW_TOKENS(a, h == 0u ? a_low.xy : a_low.zw) \
                if (HALVES == 2u) SET_FEW_TOKENS(b, h == 0u ? a_high.xy : a_high.zw) \
                UNROLL_PRODUCTS for (uint j = 0u; j < TILES; j++) { \
                    uvec4 pairs = PAIRS(w, (u * TILES + j) * PLANE_LOADS, c, h); \
                    pairs = scaled(pairs, scale[j], minimum[j]); \
                    RowWeights m; \
                    SET_WEIGHTS(m, pairs) \
                    uint of_ = (j * CHAINS + h % CHAINS) * HALVES; \
                    MULTIPLY_ADD_FEW(sums[of_], a, m) \
                    if (HALVES == 2u) MULTIPLY_ADD_FEW(sums[of_ + HALVES - 1u], b, m) \
                } \
            } \
        } \
    } }

// Returns an item's row of W in the workgroup's tile, and sets its row of x.
uint item_row_of(uint item, out uint token) {
    uint lane = item % KEPT;
    token = item / KEPT % HALVES * 8u + (lane >> 2);
    return item / (KEPT * HALVES) * 16u + (lane & 3u) * 4u;
}

void main() {
    uint blocks = (n + 15u) / 16u, tiles = (blocks + TILES - 1u) / TILES;
    uint tile = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint workgroups = gl_NumWorkGroups.x * gl_NumWorkGroups.z;
    uint part = 0u;
    if (COLUMN_PARTS > 1u) {
        workgroups /= COLUMN_PARTS;
        part = tile / workgroups;
        tile %= workgroups;
        part_first = part * OWN_UNITS;
        part_units = min(OWN_UNITS, UNITS - part_first);
    }
    if (tile >= tiles) return;
    uint g = LANE >> 2, t = LANE & 3u;
#if MATRIX == 1
    // A view of x without `volatile`, whose loads the L1 cache may serve: an untagged x is not written during this
    // dispatch.
    Words4In plain_x = Words4In(x);
#else
#define plain_x x
#endif
    uint polls = 0u;
    uint own_x = LANE_GROUP * X_WORDS;
    uint put_at = own_x + (LANE >> 3) * SLOT + (LANE >> 1 & 3u);
    uint take_at = own_x + min(g, BLOCK - 1u) * 4u + t;

    // The next step to load: two steps are in flight.
    uint next_tile = tile, next_round = 0u;
#define NEXT_STEP { next_round++; if (next_round == ROUNDS) { next_round = 0u; next_tile += workgroups; } }
    uvec4 even_w[AHEAD * TILES * PLANE_LOADS];
    uint even_scales[AHEAD * TILES * SCALE_SLOTS];
    LOAD_STEP(even_w, even_scales, next_tile, next_round)
    NEXT_STEP
#if MATRIX == 1
    uvec4 odd_w[AHEAD * TILES * PLANE_LOADS];
    uint odd_scales[AHEAD * TILES * SCALE_SLOTS];
    LOAD_STEP(odd_w, odd_scales, next_tile, next_round)
    NEXT_STEP
#endif
    // The rows' factors and the old values of y, which the residual epilogue adds to, are loaded at the start of a tile by
    // every invocation: those without an item load words of another one. If y is tagged, the epilogue checks the word and
    // polls again while it is stale.
    uint item = gl_LocalInvocationIndex, own_token;
    uint own_row = item_row_of(min(item, ITEMS - 1u), own_token);
    own_token = min(own_token, ROWS - 1u);
    uvec4 factor, old = uvec4(0u);
#define LOAD_OLD { \
    uint row_ = min(tile * (TILES * 16u) + own_row, n - 1u); \
    factor = weight.v[row_ / 16u * BLOCK_WORDS + row_ % 16u / 4u]; \
    if (EPILOGUE == 1u) old = y.v[(own_token * y_stride + row_) / 4u]; }
    LOAD_OLD

    [[unroll]] for (uint from = 0u; from < ROWS; from += BATCH) {
        uvec4 words[BATCH * LOADS];
        vec4 most[BATCH];
        float square[BATCH];
        [[unroll]] for (uint b = 0u; b < BATCH; b++) {
            most[b] = vec4(0.0);
            square[b] = 0.0;
        }
        vec4 gain[LOADS];
        [[dont_unroll]] for (uint pass = 0u; pass < PASSES; pass++) {
            [[unroll]] for (uint i = 0u; i < LOADS; i++) gain[i] = NORM == 1u ? norm.v[column_of(pass, i)] : vec4(1.0);
            LOAD_X(words, from, pass)
            [[unroll]] for (uint b = 0u; b < BATCH; b++) {
                [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                    vec4 value = uintBitsToFloat(words[b * LOADS + i]);
                    if (NORM == 1u) square[b] += exists(pass, i) ? dot(value, value) : 0.0;
                    most[b] = max(most[b], abs(value * gain[i]));
                }
            }
        }
        float scale[BATCH];
        [[unroll]] for (uint b = 0u; b < BATCH; b++) {
            // The largest exponent becomes 14.
            vec4 m = most[b];
            uint exponent = group_max(floatBitsToUint(max(max(m.x, m.y), max(m.z, m.w)))) >> 23;
            exponent = clamp(exponent, 16u, 254u);
            scale[b] = uintBitsToFloat((268u - exponent) << 23);
            uint token = from + b;
            if (LANE == 0u && token < ROWS) backs_s[LANE_GROUP * ROWS + token] = uintBitsToFloat((exponent - 14u) << 23);
            if (NORM == 1u && token < ROWS) {
                float sum = group_add(square[b]);
                if (LANE == 0u) squares_s[LANE_GROUP * ROWS + token] = sum;
            }
        }
        [[dont_unroll]] for (uint pass = 0u; pass < PASSES; pass++) {
            // With several passes, the words are those of the last one.
            if (PASSES > 1u) {
                [[unroll]] for (uint i = 0u; i < LOADS; i++) gain[i] = NORM == 1u ? norm.v[column_of(pass, i)] : vec4(1.0);
                LOAD_X(words, from, pass)
            }
            [[unroll]] for (uint b = 0u; b < BATCH; b++) {
                uint token = from + b;
                if (token < ROWS) {
                    [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                        vec4 value = uintBitsToFloat(words[b * LOADS + i]) * gain[i] * (exists(pass, i) ? scale[b] : 0.0);
                        uint put = put_at + (token / 8u * SLOTS + (pass * LOADS + i) * 4u) * SLOT + token % 8u * 4u;
                        uvec2 pairs = uvec2(packHalf2x16(value.xy), packHalf2x16(value.zw));
                        if ((LANE & 1u) == 0u) x_s[put].xy = pairs;
                        else x_s[put].zw = pairs;
                    }
                }
            }
        }
    }
    LANES_BARRIER

    FewSums sums[TILES * CHAINS * HALVES];
    [[unroll]] for (uint j = 0u; j < TILES * CHAINS * HALVES; j++) sums[j] = NO_FEW_SUMS;
    uint round = 0u, place = 0u;
    float norm_scale = 1.0;
    bool first = true;

    [[dont_unroll]] while (tile < tiles) {
#if MATRIX == 1
        [[unroll]] for (uint odd = 0u; odd < 2u; odd++) {
            if (tile >= tiles) break;
            if (odd == 0u) {
                MULTIPLY_STEP(even_w, even_scales, round)
                LOAD_STEP(even_w, even_scales, next_tile, next_round)
            } else {
                MULTIPLY_STEP(odd_w, odd_scales, round)
                LOAD_STEP(odd_w, odd_scales, next_tile, next_round)
            }
            NEXT_STEP
#else
        {
            MULTIPLY_STEP(even_w, even_scales, round)
            LOAD_STEP(even_w, even_scales, next_tile, next_round)
            NEXT_STEP
#endif
            round++;
            if (round == ROUNDS) {
                round = 0u;
                [[unroll]] for (uint j = 0u; j < TILES * HALVES; j++) {
                    uint of_ = j / HALVES * CHAINS * HALVES + j % HALVES;
                    vec4 sum = FEW_SUMS(sums[of_]);
                    if (CHAINS == 2u) sum += FEW_SUMS(sums[of_ + (CHAINS - 1u) * HALVES]);
                    // The tokens 2t and 2t + 1 of the half.
                    uint token = j % HALVES * 8u + 2u * t, of_group = LANE_GROUP * ROWS;
                    float back = backs_s[of_group + min(token, ROWS - 1u)], next = backs_s[of_group + min(token + 1u, ROWS - 1u)];
                    sum *= vec4(back, next, back, next);
                    uint at = (place * GROUPS + LANE_GROUP) * ITEMS + j * KEPT + 2u * t * 4u + (g >> 1);
                    if (2u * t < BLOCK) PUT_ROWS(sums_s[at], g, sum.xz)
                    if (2u * t + 1u < BLOCK) PUT_ROWS(sums_s[at + 4u], g, sum.yw)
                }
                [[unroll]] for (uint j = 0u; j < TILES * CHAINS * HALVES; j++) sums[j] = NO_FEW_SUMS;
                barrier();
                // All invocations take as many turns: some drivers lose count of uneven loops before a barrier.
                [[dont_unroll]] for (uint base = 0u; base < ITEMS; base += LANES) {
                    uint turn = base + item, token;
                    uint row = item_row_of(min(turn, ITEMS - 1u), token) + tile * (TILES * 16u);
                    if (turn < ITEMS && token < ROWS && row < n) {
                        uint at = (token * y_stride + row) / 4u;
                        if (turn >= LANES) {
                            factor = weight.v[row / 16u * BLOCK_WORDS + row % 16u / 4u];
                            if (EPILOGUE == 1u) old = y.v[at];
                        }
                        bool last_part = COLUMN_PARTS == 1u || part == COLUMN_PARTS - 1u;
                        if (EPILOGUE == 1u && TAGGED == 3u && last_part)
                            while (poll_again(stale(old, old_tag) != 0u, polls, fault, old_tag)) old = y.v[at];

                        vec4 v = vec4(0.0);
                        [[unroll]] for (uint i = 0u; i < GROUPS; i++) v += sums_s[(place * GROUPS + i) * ITEMS + turn];
                        if (NORM == 1u) {
                            // An invocation with one item has the same row of x in all tiles.
                            if (first || ITEMS > LANES) {
                                float sum = 0.0;
                                [[unroll]] for (uint i = 0u; i < GROUPS; i++) sum += squares_s[i * ROWS + token];
                                norm_scale = inversesqrt(sum / float(k) + epsilon);
                            }
                            v *= norm_scale;
                        }
                        v *= uintBitsToFloat(factor);
                        if (COLUMN_PARTS > 1u) {
                            uint quads = (n + 3u) / 4u, at_part = (part * ROWS + token) * quads + row / 4u;
                            if (part > 0u) {
                                uvec4 before;
                                do before = partials.v[at_part - ROWS * quads];
                                while (poll_again(stale(before, y_tag) != 0u, polls, fault, x_tag));
                                v += uintBitsToFloat(before);
                            }
                            if (!last_part) partials.v[at_part] = tagged(v, y_tag);
                        }
                        uint left = last_part ? min(n - row, 4u) : 0u;
                        if (BIAS == 1u) [[unroll]] for (uint i = 0u; i < 4u; i++) if (i < left) v[i] += bias.v[row + i];
                        if (EPILOGUE == 1u) v += uintBitsToFloat(old);
                        if (IS_GATED(EPILOGUE)) {
                            vec2 result = glu(EPILOGUE, v.xz, v.yw);
                            uint half_at = token * y_stride + row / 2u;
                            uvec2 words = TAGGED == 3u ? uvec2(tagged(result.x, y_tag), tagged(result.y, y_tag)) : floatBitsToUint(result);
                            if (left == 4u) {
                                PUT_TWO(half_at, words)
                            } else if (left >= 2u) {
                                PUT_ONE(half_at, words.x)
                            }
                        } else {
                            v = ACTIVATED(EPILOGUE, v);
                            uvec4 words = TAGGED == 3u ? tagged(v, y_tag) : floatBitsToUint(v);
                            if (left == 4u) y.v[at] = words;
                            if (left < 4u && left > 0u) y.v[at].x = words.x;
                            if (left < 4u && left > 1u) y.v[at].y = words.y;
                            if (left == 3u) y.v[at].z = words.z;
                        }
                    }
                }
                first = false;
                // Sums go to the other place next, which nobody reads any more: all invocations have left its last barrier.
                place = 1u - place;
                tile += workgroups;
                LOAD_OLD
            }
        }
    }
}

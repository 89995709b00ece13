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
// One workgroup computes TILES blocks of 16 rows of W for all rows of x. Its groups of 32 lanes split K, each with AHEAD
// units of columns in flight; their sums are added through shared memory. Everything that does not depend on x (codes,
// scales, the norm's weights, the rows' factors) is loaded before the workgroup polls for x, and the words of BATCH rows of
// x are polled together: each wait in turn would cost a round trip to the L2 cache. Codes become f16 in registers: with bit
// operations the code's bits as a subnormal f16, then one fused multiply-add with the scale and the minimum.
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
layout(constant_id = 8) const uint UNITS = 32;    // units of columns of a padded row
layout(constant_id = 9) const uint TAGGED = 0;
layout(constant_id = 10) const uint CODES = 0x5024; // the weights' format

#include "fragments.glsl"
#include "codes.glsl"
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
    Fault fault;
    uint n;           // rows of W
    uint k;           // columns without padding; the divisor of the mean
    uint x_stride;    // in floats
    uint y_stride;    // in floats
    float epsilon;
    uint x_tag;
    uint old_tag;     // tag of y before the residual is added
    uint y_tag;
};

#include "code_fragments.glsl"

// Without cooperative matrices the loop body is already long, so it is not unrolled.
#if MATRIX == 1
#define EACH_HALF [[unroll]]
#else
#define EACH_HALF [[dont_unroll]]
#endif

const uint GROUPS = LANES / 32u;
const uint ROUNDS = (UNITS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);
const uint BLOCK = ROWS < 8u ? ROWS : 8u;         // rows of x in half a fragment
const uint HALVES = ROWS > 8u ? 2u : 1u;          // of a lane's sums: rows g and g + 8 of x
const uint KEPT = BLOCK * 4u;                     // lanes of a group whose sums belong to existing rows of x
const uint ITEMS = TILES * HALVES * KEPT;
const uint UNIT_QUADS = UNIT_COLS / 4u;
const uint PARTS = UNIT_COLS / 128u;              // 16-byte words of a row of x for a lane: of a unit
const uint LOADS = AHEAD * PARTS;                 // and of a round
const uint BATCH = LOADS < 8u ? (ROWS < 8u / LOADS ? ROWS : 8u / LOADS) : 1u; // rows whose words are polled together
// Independent chains of sums of a tile, which hide the latency of the matrix units.
const uint CHAINS = TILES == 1u ? 2u : 1u;

// Of a lane group: x in f16 as [half][16 columns][row of the half][t] of four columns each, where 16 columns take SLOT words
// that spread over the banks; then the sums.
const uint SLOT = BLOCK * 4u + (BLOCK > 1u ? 4u : 0u);
const uint SLOTS = AHEAD * UNIT_COLS / 16u;
const uint X_WORDS = HALVES * SLOTS * SLOT;
const uint GROUP_WORDS = X_WORDS > ITEMS * 2u ? X_WORDS : ITEMS * 2u;

shared uvec2 group_s[GROUPS * GROUP_WORDS];
shared float squares_s[GROUPS * ROWS];

#if MATRIX == 1
uint group_max(uint x) { return subgroupMax(x); }
float group_add(float x) { return subgroupAdd(x); }
#else
shared uint exchange_s[LANES];
uint group_max(uint x) {
    barrier();
    exchange_s[gl_LocalInvocationIndex] = x;
    barrier();
    uint most = 0u;
    for (uint i = 0u; i < 32u; i++) most = max(most, exchange_s[LANE_GROUP * 32u + i]);
    return most;
}
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

uint unit_of(uint round, uint u) { return (round * AHEAD + u) * GROUPS + LANE_GROUP; }

void put_sums(uint at, vec4 sums) {
    uvec4 words = floatBitsToUint(sums);
    group_s[at] = words.xy;
    group_s[at + 1u] = words.zw;
}

void main() {
    uint blocks = (n + 15u) / 16u;
    uint first = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * TILES;
    if (first >= blocks) return;
    uint g = LANE >> 2, t = LANE & 3u;
#if MATRIX == 1
    // A view of x without `volatile`, whose loads the L1 cache may serve: an untagged x is not written during this
    // dispatch.
    Words4In plain_x = Words4In(x);
#else
#define plain_x x
#endif

    // The rows' factors and the old value of y, which the residual epilogue adds to, are loaded early, by every invocation:
    // those without an item load words of another one. If y is tagged, the epilogue checks the word and polls again while
    // it is stale.
    uint item = gl_LocalInvocationIndex;
    uint item_lane = item % KEPT, item_half = item / KEPT % HALVES, item_tile = min(item / (KEPT * HALVES), TILES - 1u);
    uint item_token = min(item_half * 8u + (item_lane >> 2), ROWS - 1u);
    uint item_block = min(first + item_tile, blocks - 1u);
    uint item_at = (item_token * y_stride + min(item_block * 16u + (item_lane & 3u) * 4u, n - 1u)) / 4u;
    uvec4 factor = weight.v[item_block * BLOCK_WORDS + (item_lane & 3u)];
    uvec4 old = uvec4(0u);
    if (EPILOGUE == 1u) old = y.v[item_at];

    uint base[TILES];
    [[unroll]] for (uint j = 0u; j < TILES; j++) base[j] = min(first + j, blocks - 1u) * BLOCK_WORDS + 4u;

    vec4 low[TILES], high[TILES];
    [[unroll]] for (uint j = 0u; j < TILES; j++) low[j] = high[j] = vec4(0.0);
    float square[ROWS];
    [[unroll]] for (uint i = 0u; i < ROWS; i++) square[i] = 0.0;
    uint polls = 0u;
    uint own_x = LANE_GROUP * GROUP_WORDS;
    uint put_at = own_x + ((LANE >> 3) * 2u + (LANE & 1u)) * SLOT + (LANE >> 1 & 3u);
    uint take_at = own_x + min(g, BLOCK - 1u) * 4u + t;

    [[dont_unroll]] for (uint round = 0u; round < ROUNDS; round++) {
        // Beyond the last unit, the last unit's weights are multiplied by zeros.
        uvec4 w[AHEAD * TILES * PLANE_LOADS];
        uint scales[AHEAD * TILES * SCALE_SLOTS];
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            uint at = min(unit_of(round, u), UNITS - 1u) * UNIT_WORDS;
            [[unroll]] for (uint j = 0u; j < TILES; j++) {
                [[unroll]] for (uint i = 0u; i < PLANE_LOADS; i++)
                    w[(u * TILES + j) * PLANE_LOADS + i] = weight.v[base[j] + at + i * 32u + LANE];
                LOAD_SCALES(scales, (u * TILES + j) * SCALE_SLOTS, base[j] + at + PLANE_LOADS * 32u)
            }
        }
        uint column[LOADS];
        bool there[LOADS];
        vec4 gain[LOADS];
        [[unroll]] for (uint i = 0u; i < LOADS; i++) {
            uint unit = unit_of(round, i / PARTS);
            column[i] = unit * UNIT_QUADS + i % PARTS * 32u + LANE;
            there[i] = unit < UNITS && column[i] * 4u < k;
            column[i] = there[i] ? column[i] : 0u;
            gain[i] = NORM == 1u ? norm.v[column[i]] : vec4(1.0);
        }
        // The factors that undo the scaling of rows g and g + 8 of x.
        float undo = 1.0, undo_other = 1.0;
        [[unroll]] for (uint from = 0u; from < ROWS; from += BATCH) {
            uvec4 words[BATCH * LOADS];
            if (TAGGED == 0u) {
                [[unroll]] for (uint i = 0u; i < BATCH * LOADS; i++)
                    words[i] = plain_x.v[min(from + i / LOADS, ROWS - 1u) * (x_stride / 4u) + column[i % LOADS]];
            } else {
                uint bad;
                do {
                    bad = 0u;
                    [[unroll]] for (uint i = 0u; i < BATCH * LOADS; i++)
                        words[i] = x.v[min(from + i / LOADS, ROWS - 1u) * (x_stride / 4u) + column[i % LOADS]];
                    [[unroll]] for (uint i = 0u; i < BATCH * LOADS; i++) bad |= stale(words[i], x_tag);
                } while (poll_again(subgroupAny(bad != 0u), polls, fault, x_tag));
            }
            [[unroll]] for (uint b = 0u; b < BATCH; b++) {
                uint token = from + b;
                if (token < ROWS) {
                    vec4 value[LOADS];
                    vec4 most = vec4(0.0);
                    [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                        value[i] = uintBitsToFloat(words[b * LOADS + i]);
                        if (NORM == 1u) {
                            square[token] += there[i] ? dot(value[i], value[i]) : 0.0;
                            value[i] *= gain[i];
                        }
                        most = max(most, abs(value[i]));
                    }
                    // The largest exponent becomes 14.
                    uint exponent = group_max(floatBitsToUint(max(max(most.x, most.y), max(most.z, most.w)))) >> 23;
                    exponent = clamp(exponent, 16u, 254u);
                    float scale = uintBitsToFloat((268u - exponent) << 23), back = uintBitsToFloat((exponent - 14u) << 23);
                    [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                        vec4 scaled_value = value[i] * (there[i] ? scale : 0.0);
                        group_s[put_at + (token / 8u * SLOTS + i * 8u) * SLOT + token % 8u * 4u] =
                            uvec2(packHalf2x16(scaled_value.xy), packHalf2x16(scaled_value.zw));
                    }
                    if (token < 8u && (BLOCK == 1u || g == token)) undo = back;
                    if (token >= 8u && g == token - 8u) undo_other = back;
                }
            }
        }
        LANES_BARRIER
        Sums sums[TILES * CHAINS];
        [[unroll]] for (uint j = 0u; j < TILES * CHAINS; j++) sums[j] = NO_SUMS;
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            EACH_HALF for (uint c = 0u; c < UNIT_COLS / 32u; c++) {
                uint scale[TILES], minimum[TILES];
                [[unroll]] for (uint j = 0u; j < TILES; j++) {
                    uint at = (u * TILES + j) * SCALE_SLOTS;
                    scale[j] = SCALE_OF(scales, at, c, t);
                    minimum[j] = STORED == 1u ? SCALE_OF(scales, at + STORED * SCALE_WORDS, c, t) : 0u;
                }
                EACH_HALF for (uint h = 0u; h < 2u; h++) {
                    uint at = take_at + (u * (UNIT_COLS / 16u) + c * 2u + h) * SLOT;
                    uvec2 a_low = group_s[at], a_high = HALVES == 2u ? group_s[at + (HALVES - 1u) * SLOTS * SLOT] : uvec2(0u);
                    Tokens a;
                    SET_TOKENS(a, a_low, a_high)
                    [[unroll]] for (uint j = 0u; j < TILES; j++) {
                        uvec4 pairs = PAIRS(w, (u * TILES + j) * PLANE_LOADS, c, h);
                        pairs = scaled(pairs, scale[j], minimum[j]);
                        Weights m;
                        SET_WEIGHTS(m, pairs)
                        MULTIPLY_ADD(sums[j * CHAINS + h % CHAINS], a, m)
                    }
                }
            }
        }
        [[unroll]] for (uint j = 0u; j < TILES; j++) {
            vec4 sum = SUMS_LOW(sums[j * CHAINS]), sum_other = SUMS_HIGH(sums[j * CHAINS]);
            if (CHAINS == 2u) {
                sum += SUMS_LOW(sums[j * CHAINS + CHAINS - 1u]);
                sum_other += SUMS_HIGH(sums[j * CHAINS + CHAINS - 1u]);
            }
            low[j] += undo * sum;
            if (HALVES == 2u) high[j] += undo_other * sum_other;
        }
        // All lanes must have read x before the next round or the sums overwrite it.
        LANES_BARRIER
    }

    if (NORM == 1u) {
        [[unroll]] for (uint i = 0u; i < ROWS; i++) {
            float sum = group_add(square[i]);
            if (LANE == 0u) squares_s[LANE_GROUP * ROWS + i] = sum;
        }
    }
    if (LANE < KEPT) {
        [[unroll]] for (uint j = 0u; j < TILES; j++) {
            uint at = own_x + (j * HALVES * KEPT + LANE) * 2u;
            put_sums(at, low[j]);
            if (HALVES == 2u) put_sums(at + KEPT * 2u, high[j]);
        }
    }
    barrier();

    for (; item < ITEMS; item += LANES) {
        item_lane = item % KEPT;
        item_half = item / KEPT % HALVES;
        item_tile = item / (KEPT * HALVES);
        item_token = item_half * 8u + (item_lane >> 2);
        uint item_row = (first + item_tile) * 16u + (item_lane & 3u) * 4u;
        if (item_token >= ROWS || item_row >= n) continue;
        item_at = (item_token * y_stride + item_row) / 4u;
        if (item >= LANES) {
            factor = weight.v[(first + item_tile) * BLOCK_WORDS + (item_lane & 3u)];
            if (EPILOGUE == 1u) old = y.v[item_at];
        }
        if (EPILOGUE == 1u && TAGGED == 3u)
            while (poll_again(stale(old, old_tag) != 0u, polls, fault, old_tag)) old = y.v[item_at];

        vec4 v = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < GROUPS; i++) {
            uint at = i * GROUP_WORDS + item * 2u;
            v += uintBitsToFloat(uvec4(group_s[at], group_s[at + 1u]));
        }
        if (NORM == 1u) {
            float sum = 0.0;
            [[unroll]] for (uint i = 0u; i < GROUPS; i++) sum += squares_s[i * ROWS + item_token];
            v *= inversesqrt(sum / float(k) + epsilon);
        }
        v *= uintBitsToFloat(factor);
        uint left = min(n - item_row, 4u);
        if (BIAS == 1u) [[unroll]] for (uint i = 0u; i < 4u; i++) if (i < left) v[i] += bias.v[item_row + i];
        if (EPILOGUE == 1u) v += uintBitsToFloat(old);
        if (EPILOGUE >= 2u) {
            vec2 result = glu(EPILOGUE, v.xz, v.yw);
            uint at = item_token * y_stride + item_row / 2u;
            uvec2 words = TAGGED == 3u ? uvec2(tagged(result.x, y_tag), tagged(result.y, y_tag)) : floatBitsToUint(result);
            if (left == 4u) {
                PUT_TWO(at, words)
            } else if (left >= 2u) {
                PUT_ONE(at, words.x)
            }
        } else {
            uvec4 words = TAGGED == 3u ? tagged(v, y_tag) : floatBitsToUint(v);
            if (left == 4u) y.v[item_at] = words;
            if (left < 4u) y.v[item_at].x = words.x;
            if (left < 4u && left > 1u) y.v[item_at].y = words.y;
            if (left == 3u) y.v[item_at].z = words.z;
        }
    }
}

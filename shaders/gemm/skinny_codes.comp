#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Small-M GEMM for decode on quantised weights in fragment order: y[r] = epilogue( W · prologue(x[r]) ) for 1 to
// 16 · BLOCKS rows of x. The prologue, the epilogue and the tags are those of `skinny.comp`.
//
// weight     codes with scales (`codes.glsl`; fragments as `memory::pack::codes` lays them out)
// x          [rows][x_stride] f32; multiplied in f16. For each token and unit of columns, x is scaled by a power of two
//            that makes its largest value a large f16, and the products are scaled back, so that nothing overflows
// y          [rows][y_stride] f32. TAGGED 1: x is tagged (`tags.glsl`). TAGGED 3: x and y are tagged
//
// One workgroup computes TILES blocks of 16 rows of W for all rows of x. Its groups of 32 lanes split K, each with AHEAD
// units of columns in flight; their sums are added through shared memory. Codes become f16 in registers: with bit
// operations the code's bits as a subnormal f16, then one fused multiply-add with the scale and the minimum. Groups of
// 128 columns of affine codes of 4 or 8 bits are scaled after the product instead (AFTER).
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
layout(constant_id = 7) const uint BLOCKS = 1;
layout(constant_id = 8) const uint ROWS = 1;
layout(constant_id = 9) const uint UNITS = 32;    // units of columns of a padded row
layout(constant_id = 10) const uint TAGGED = 0;
layout(constant_id = 11) const uint CODES = 0x5024; // the weights' format

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
const uint TOKENS = ROWS < 16u ? ROWS : 16u;      // tokens of a block
const uint HALVES = TOKENS > 8u ? 2u : 1u;        // of a lane's sums: tokens g and g + 8
const uint KEPT = (TOKENS < 8u ? TOKENS : 8u) * 4u; // lanes of a group whose sums belong to existing tokens
const uint ITEMS = TILES * BLOCKS * HALVES * KEPT;
const uint QUADS = UNIT_COLS / 4u;                // groups of four columns of a token per unit
const uint PARTS = UNIT_COLS / 128u;              // of those, loads per lane
const uint LOADS = TOKENS * AHEAD;                // tokens and units per round

shared vec4 sums_s[GROUPS * ITEMS];
shared uvec2 x_s[GROUPS * LOADS * QUADS];         // four columns in f16
shared vec2 scale_s[GROUPS * LOADS];              // the factor that undoes x's scaling, and the sum of x's unit
shared float squares_s[GROUPS * BLOCKS * TOKENS];

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

    // The old value of y, which the residual epilogue adds to, is loaded early. If y is tagged, the epilogue checks the
    // word and polls again while it is stale.
    uint item = gl_LocalInvocationIndex;
    uint item_lane = item % KEPT, item_half = item / KEPT % HALVES, item_block = item / (KEPT * HALVES) % BLOCKS;
    uint item_tile = item / (KEPT * HALVES * BLOCKS), item_place = item_half * 8u + (item_lane >> 2);
    uint item_token = item_block * 16u + item_place, item_row = (first + item_tile) * 16u + (item_lane & 3u) * 4u;
    bool has_item = item < ITEMS && item_token < ROWS && item_row < n;
    uint item_at = (item_token * y_stride + item_row) / 4u;
    uvec4 old = uvec4(0u);
    if (EPILOGUE == 1u && has_item) old = y.v[item_at];

    uint base[TILES];
    [[unroll]] for (uint j = 0u; j < TILES; j++) base[j] = min(first + j, blocks - 1u) * BLOCK_WORDS;

    vec4 low[BLOCKS * TILES], high[BLOCKS * TILES];
    [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) low[i] = high[i] = vec4(0.0);
    float square[BLOCKS * TOKENS];
    [[unroll]] for (uint i = 0u; i < BLOCKS * TOKENS; i++) square[i] = 0.0;
    uint polls = 0u;

    [[dont_unroll]] for (uint round = 0u; round < ROUNDS; round++) {
        // Beyond the last unit, the last unit's weights are multiplied by zeros.
        uvec4 w[AHEAD * TILES * PLANE_LOADS];
        uint scales[AHEAD * TILES * SCALE_SLOTS];
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            uint at = 4u + min(unit_of(round, u), UNITS - 1u) * UNIT_WORDS;
            [[unroll]] for (uint j = 0u; j < TILES; j++) {
                [[unroll]] for (uint i = 0u; i < PLANE_LOADS; i++)
                    w[(u * TILES + j) * PLANE_LOADS + i] = weight.v[base[j] + at + i * 32u + LANE];
                LOAD_SCALES(scales, (u * TILES + j) * SCALE_SLOTS, base[j] + at + PLANE_LOADS * 32u)
            }
        }
        [[unroll]] for (uint b = 0u; b < BLOCKS; b++) {
            [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                uint unit = unit_of(round, i / TOKENS), token = i % TOKENS;
                uint row = min(b * 16u + token, ROWS - 1u) * (x_stride / 4u);
                uint column[PARTS];
                bool there[PARTS];
                uvec4 words[PARTS];
                [[unroll]] for (uint part = 0u; part < PARTS; part++) {
                    column[part] = unit * QUADS + part * 32u + LANE;
                    there[part] = unit < UNITS && column[part] * 4u < k;
                    column[part] = there[part] ? column[part] : 0u;
                }
                if (TAGGED == 0u) {
                    [[unroll]] for (uint part = 0u; part < PARTS; part++) words[part] = plain_x.v[row + column[part]];
                } else {
                    uint bad;
                    do {
                        bad = 0u;
                        [[unroll]] for (uint part = 0u; part < PARTS; part++) words[part] = x.v[row + column[part]];
                        [[unroll]] for (uint part = 0u; part < PARTS; part++) bad |= stale(words[part], x_tag);
                    } while (poll_again(subgroupAny(bad != 0u), polls, fault, x_tag));
                }
                vec4 value[PARTS];
                vec4 most = vec4(0.0);
                [[unroll]] for (uint part = 0u; part < PARTS; part++) {
                    value[part] = there[part] ? uintBitsToFloat(words[part]) : vec4(0.0);
                    if (NORM == 1u) {
                        square[b * TOKENS + token] += dot(value[part], value[part]);
                        value[part] *= norm.v[column[part]];
                    }
                    most = max(most, abs(value[part]));
                }
                // The largest exponent becomes 14.
                uint exponent = group_max(floatBitsToUint(max(max(most.x, most.y), max(most.z, most.w)))) >> 23;
                exponent = clamp(exponent, 16u, 254u);
                float scale = uintBitsToFloat((268u - exponent) << 23);
                float sum = 0.0;
                [[unroll]] for (uint part = 0u; part < PARTS; part++) {
                    value[part] *= scale;
                    uvec2 rounded = uvec2(packHalf2x16(value[part].xy), packHalf2x16(value[part].zw));
                    // The sum is of the rounded values, as the product of the codes is, so that the zeros cancel.
                    if (AFTER) sum += dot(vec4(unpackHalf2x16(rounded.x), unpackHalf2x16(rounded.y)), vec4(1.0));
                    // AFTER: the second pair of codes stays shifted by 4 bits.
                    if (AFTER && BITS == 4u) rounded.y = packHalf2x16(value[part].zw * 0.0625);
                    x_s[(LANE_GROUP * LOADS + i) * QUADS + part * 32u + LANE] = rounded;
                }
                if (AFTER) sum = group_add(sum);
                if (LANE == 0u) scale_s[LANE_GROUP * LOADS + i] = vec2(uintBitsToFloat((exponent - 14u) << 23), sum);
            }
            LANES_BARRIER
            [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
                uint token = LANE_GROUP * LOADS + u * TOKENS + min(g, TOKENS - 1u);
                uint other = LANE_GROUP * LOADS + u * TOKENS + min(g + 8u, TOKENS - 1u);
                Sums sums[TILES];
                [[unroll]] for (uint j = 0u; j < TILES; j++) sums[j] = NO_SUMS;
                EACH_HALF for (uint c = 0u; c < UNIT_COLS / 32u; c++) {
                    EACH_HALF for (uint h = 0u; h < 2u; h++) {
                        uvec2 a_low = x_s[token * QUADS + c * 8u + t * 2u + h];
                        uvec2 a_high = TOKENS > 8u ? x_s[other * QUADS + c * 8u + t * 2u + h] : uvec2(0u);
                        Tokens a;
                        SET_TOKENS(a, a_low, a_high)
                        [[unroll]] for (uint j = 0u; j < TILES; j++) {
                            uint i = u * TILES + j;
                            uvec4 pairs = PAIRS(w, i * PLANE_LOADS, c, h);
                            if (!AFTER) {
                                uint group = i * SCALE_SLOTS + group_of(c, t);
                                pairs = scaled(pairs, scales[group], scales[group + UNIT_GROUPS]);
                            }
                            Weights m;
                            SET_WEIGHTS(m, pairs)
                            MULTIPLY_ADD(sums[j], a, m)
                        }
                    }
                }
                vec2 undo = scale_s[token], undo_other = scale_s[other];
                [[unroll]] for (uint j = 0u; j < TILES; j++) {
                    vec4 s = vec4(1.0), m = vec4(0.0);
                    if (AFTER) {
                        uint i = (u * TILES + j) * SCALE_SLOTS;
                        AFTER_SCALES(s, m, scales, i)
                    }
                    low[b * TILES + j] += undo.x * (s * SUMS_LOW(sums[j]) - m * undo.y);
                    if (TOKENS > 8u) high[b * TILES + j] += undo_other.x * (s * SUMS_HIGH(sums[j]) - m * undo_other.y);
                }
            }
            // All lanes must have read x before the next block overwrites it.
            if (ROUNDS * BLOCKS > 1u) LANES_BARRIER
        }
    }

    [[unroll]] for (uint b = 0u; b < BLOCKS; b++) {
        if (NORM == 1u) {
            [[unroll]] for (uint i = 0u; i < TOKENS; i++) {
                float sum = group_add(square[b * TOKENS + i]);
                if (LANE == 0u) squares_s[(LANE_GROUP * BLOCKS + b) * TOKENS + i] = sum;
            }
        }
        if (LANE < KEPT) {
            [[unroll]] for (uint j = 0u; j < TILES; j++) {
                uint at = LANE_GROUP * ITEMS + (j * BLOCKS + b) * HALVES * KEPT + LANE;
                sums_s[at] = low[b * TILES + j];
                if (HALVES == 2u) sums_s[at + KEPT] = high[b * TILES + j];
            }
        }
    }
    barrier();

    for (; item < ITEMS; item += LANES) {
        item_lane = item % KEPT;
        item_half = item / KEPT % HALVES;
        item_block = item / (KEPT * HALVES) % BLOCKS;
        item_tile = item / (KEPT * HALVES * BLOCKS);
        item_place = item_half * 8u + (item_lane >> 2);
        item_token = item_block * 16u + item_place;
        item_row = (first + item_tile) * 16u + (item_lane & 3u) * 4u;
        if (item_token >= ROWS || item_row >= n) continue;
        item_at = (item_token * y_stride + item_row) / 4u;
        if (EPILOGUE == 1u && item >= LANES) old = y.v[item_at];
        if (EPILOGUE == 1u && TAGGED == 3u)
            while (poll_again(stale(old, old_tag) != 0u, polls, fault, old_tag)) old = y.v[item_at];

        vec4 v = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < GROUPS; i++) v += sums_s[i * ITEMS + item];
        if (NORM == 1u) {
            float sum = 0.0;
            [[unroll]] for (uint i = 0u; i < GROUPS; i++) sum += squares_s[(i * BLOCKS + item_block) * TOKENS + item_place];
            v *= inversesqrt(sum / float(k) + epsilon);
        }
        v *= uintBitsToFloat(weight.v[(first + item_tile) * BLOCK_WORDS + (item_lane & 3u)]);
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

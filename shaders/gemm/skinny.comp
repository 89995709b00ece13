#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Small-M GEMM for decode, on fragment-packed weights: y[r] = epilogue( W · prologue(x[r]) ) for 1 to 8 · BLOCKS rows
// of x.
//
// prologue   NORM 0: x. NORM 1 (RMSNorm): x ⊙ norm, and the epilogue scales the product by rsqrt(mean x² + eps), so
//            that the norm needs no dispatch of its own
// epilogue   0 store: y = s·Wx + b. 1 residual: y += s·Wx + b. 2 and more: a gated linear unit: the rows of W alternate gate and
//            up; y[n/2] = glu(gate, up); or squared ReLU: y = max(s·Wx + b, 0)² (`glu.glsl`). s is the norm's scale, 1
//            without NORM
// weight     16 × 32 blocks in fragment order (`memory::pack::Layout::Fragments`), of bfloat16 or f16
// x          [rows][x_stride] f32; each value is split into two 16-bit parts, so that the sums are as accurate as with
//            16 bits of significand of x (of weights in f16 22 bits: `half_rows.glsl`)
// y          [rows][y_stride] f32. TAGGED 1: x is tagged (`tags.glsl`). TAGGED 3: x and y are tagged
//
// One workgroup computes TILES blocks of 16 rows of W for all rows of x. Its groups of 32 lanes split K, each with
// AHEAD chunks of 32 columns in flight; their sums are added through shared memory. The weights are loaded before the
// workgroup polls for x. The lanes of a group then read, scale and split the group's share of x once, four columns
// each, and exchange it through shared memory. A token's two parts are rows g and g + 8 of a 16-row fragment, so that
// adding the two halves of a lane's sums joins the parts. With a norm and several rows, AHEAD must be a power of two.
// Traffic: W once; x once per workgroup, from the L2 cache where it is tagged.
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the workgroup's size
layout(constant_id = 2) const uint NORM = 0;
layout(constant_id = 3) const uint BIAS = 0;
layout(constant_id = 4) const uint EPILOGUE = 0;
layout(constant_id = 5) const uint TILES = 1;
layout(constant_id = 6) const uint AHEAD = 2;
layout(constant_id = 7) const uint BLOCKS = 1;
layout(constant_id = 8) const uint ROWS = 1;
layout(constant_id = 9) const uint CHUNKS = 32;   // 32-column chunks of a padded row
layout(constant_id = 10) const uint TAGGED = 0;

#include "fragments.glsl"
#define DEVICES_ID 11
#include "tags.glsl"
#if WEIGHT == 1
#include "half_rows.glsl"
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

const uint GROUPS = LANES / 32u;
const uint ROUNDS = (CHUNKS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);
const uint TOKENS = ROWS < 8u ? ROWS : 8u;        // tokens of a block
const uint KEPT = TOKENS * 4u;                    // lanes of a group whose sums belong to existing tokens
const uint ITEMS = TILES * BLOCKS * KEPT;
const uint QUADS = AHEAD * 8u;                    // groups of four columns of a token per round
const uint LOADS = (TOKENS * QUADS + 31u) / 32u;  // of those, loads per lane
// JOINED: the lanes whose squares are added by shuffles before they go to shared memory. SQUARES: the partial sums of a
// token that remain.
#if MATRIX == 1
const uint JOINED = ROWS == 1u || QUADS > 32u ? 32u : QUADS;
const uint SQUARES = ROWS == 1u ? LOADS : QUADS / JOINED;
#else
const uint JOINED = 1u;
const uint SQUARES = QUADS;
#endif

shared vec4 sums_s[GROUPS * ITEMS];
shared uvec4 x_s[GROUPS * TOKENS * QUADS];        // both 16-bit parts of four columns
shared float squares_s[GROUPS * BLOCKS * TOKENS * SQUARES];

// Store one or two results at an even index. The components are constants: some drivers implement a store to a
// dynamically indexed component as a store of the whole vector.
#if MATRIX == 1
#define PUT_TWO(at, words) TaggedOut2(y).v[(at) / 2u] = words;
#else
#define PUT_TWO(at, words) if ((at) % 4u == 0u) y.v[(at) / 4u].xy = words; else y.v[(at) / 4u].zw = words;
#endif
#define PUT_ONE(at, word) if ((at) % 4u == 0u) y.v[(at) / 4u].x = word; else y.v[(at) / 4u].z = word;

uint chunk_of(uint round, uint u) { return (round * AHEAD + u) * GROUPS + LANE_GROUP; }

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
    uint item_lane = item % KEPT, item_block = item / KEPT % BLOCKS, item_tile = item / (KEPT * BLOCKS);
    uint item_token = item_block * 8u + (item_lane >> 2), item_row = (first + item_tile) * 16u + (item_lane & 3u) * 4u;
    bool has_item = item < ITEMS && item_token < ROWS && item_row < n;
    uint item_at = (item_token * y_stride + item_row) / 4u;
    uvec4 old = uvec4(0u);
    if (EPILOGUE == 1u && has_item) old = y.v[item_at];

    uint base[TILES];
    [[unroll]] for (uint j = 0u; j < TILES; j++) base[j] = min(first + j, blocks - 1u) * (CHUNKS * 64u) + LANE;

    Sums sums[BLOCKS * TILES];
    [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) sums[i] = NO_SUMS;
    float square[BLOCKS * LOADS];
    [[unroll]] for (uint i = 0u; i < BLOCKS * LOADS; i++) square[i] = 0.0;
    uint polls = 0u;
#if WEIGHT == 1
    HalfScale half_scale = NO_HALF_SCALE;
#endif

    [[dont_unroll]] for (uint round = 0u; round < ROUNDS; round++) {
        // Beyond the last chunk, the last chunk's weights are multiplied by zeros.
        uvec4 w[AHEAD * TILES * 2u];
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            uint at = min(chunk_of(round, u), CHUNKS - 1u) * 64u;
            [[unroll]] for (uint j = 0u; j < TILES; j++) {
                w[(u * TILES + j) * 2u] = weight.v[base[j] + at];
                w[(u * TILES + j) * 2u + 1u] = weight.v[base[j] + at + 32u];
            }
        }
        uint column[LOADS];
        bool there[LOADS];
        vec4 scale[LOADS];
        [[unroll]] for (uint i = 0u; i < LOADS; i++) {
            uint quad = i * 32u + LANE, chunk = chunk_of(round, quad % QUADS / 8u);
            there[i] = quad < TOKENS * QUADS && chunk < CHUNKS;
            column[i] = min(chunk, CHUNKS - 1u) * 8u + quad % 8u;
            scale[i] = NORM == 1u ? norm.v[column[i]] : vec4(1.0);
        }
        UNROLL_PRODUCTS for (uint b = 0u; b < BLOCKS; b++) {
            uvec4 words[LOADS];
            uint row[LOADS];
            [[unroll]] for (uint i = 0u; i < LOADS; i++) row[i] = min(b * 8u + (i * 32u + LANE) / QUADS, ROWS - 1u) * (x_stride / 4u);
            if (TAGGED == 0u) {
                [[unroll]] for (uint i = 0u; i < LOADS; i++) words[i] = plain_x.v[row[i] + column[i]];
            } else {
                uint bad;
                do {
                    bad = 0u;
                    [[unroll]] for (uint i = 0u; i < LOADS; i++) words[i] = x.v[row[i] + column[i]];
                    [[unroll]] for (uint i = 0u; i < LOADS; i++) bad |= stale(words[i], x_tag);
                } while (poll_again(subgroupAny(bad != 0u), polls, fault, x_tag));
            }
            [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                vec4 value = there[i] ? uintBitsToFloat(words[i]) : vec4(0.0);
                if (NORM == 1u) {
                    square[b * LOADS + i] += dot(value, value);
                    value *= scale[i];
                }
                uvec4 parts;
#if WEIGHT == 1
                parts = split_halves(value, n >> 31, half_scale);
#else
                split_pair(value.x, value.y, n >> 31, parts.x, parts.z);
                split_pair(value.z, value.w, n >> 31, parts.y, parts.w);
#endif
                if (i * 32u + LANE < TOKENS * QUADS) x_s[LANE_GROUP * (TOKENS * QUADS) + i * 32u + LANE] = parts;
            }
            LANES_BARRIER
            uint own = LANE_GROUP * (TOKENS * QUADS) + min(g, TOKENS - 1u) * QUADS + t * 2u;
            UNROLL_PRODUCTS for (uint u = 0u; u < AHEAD; u++) {
                UNROLL_PRODUCTS for (uint h = 0u; h < 2u; h++) {
                    uvec4 parts = x_s[own + u * 8u + h];
                    Tokens a;
                    SET_TOKENS(a, parts.xy, parts.zw)
                    UNROLL_PRODUCTS for (uint j = 0u; j < TILES; j++) {
                        Weights m;
                        SET_WEIGHTS(m, w[(u * TILES + j) * 2u + h])
                        MULTIPLY_ADD(sums[b * TILES + j], a, m)
                    }
                }
            }
            // All lanes must have read these parts before the next ones overwrite them.
            if (ROUNDS * BLOCKS > 1u) LANES_BARRIER
        }
#if WEIGHT == 1
        if (round + 1u == ROUNDS && half_scale.up == 0.0) {
            bool again = false;
            [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) again = again || overflows(sums[i]);
            if (any_overflows(again)) {
                set_half_scale(half_scale);
                [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) sums[i] = NO_SUMS;
                [[unroll]] for (uint i = 0u; i < BLOCKS * LOADS; i++) square[i] = 0.0;
                // The first round is next. All lanes must have read their parts before it overwrites them.
                LANES_BARRIER
                round = 0xffffffffu;
            }
        }
#endif
    }

    [[unroll]] for (uint b = 0u; b < BLOCKS; b++) {
        if (NORM == 1u) {
            [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                float sum = square[b * LOADS + i];
                [[unroll]] for (uint distance = 1u; distance < JOINED; distance *= 2u) sum += subgroupShuffleXor(sum, distance);
                uint quad = i * 32u + LANE;
                uint token = ROWS == 1u ? 0u : quad / QUADS, part = ROWS == 1u ? quad / JOINED : quad % QUADS / JOINED;
                if (quad % JOINED == 0u && token < TOKENS && part < SQUARES)
                    squares_s[((LANE_GROUP * BLOCKS + b) * TOKENS + token) * SQUARES + part] = sum;
            }
        }
        if (LANE < KEPT) {
            [[unroll]] for (uint j = 0u; j < TILES; j++)
#if WEIGHT == 1
                sums_s[LANE_GROUP * ITEMS + (j * BLOCKS + b) * KEPT + LANE] = join_halves(sums[b * TILES + j], half_scale);
#else
                sums_s[LANE_GROUP * ITEMS + (j * BLOCKS + b) * KEPT + LANE] =
                    SUMS_LOW(sums[b * TILES + j]) + SUMS_HIGH(sums[b * TILES + j]);
#endif
        }
    }
    barrier();

    for (; item < ITEMS; item += LANES) {
        item_lane = item % KEPT;
        item_block = item / KEPT % BLOCKS;
        item_tile = item / (KEPT * BLOCKS);
        item_token = item_block * 8u + (item_lane >> 2);
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
            uint at = (item_block * TOKENS + (item_lane >> 2)) * SQUARES;
            [[unroll]] for (uint i = 0u; i < GROUPS; i++)
                [[unroll]] for (uint part = 0u; part < SQUARES; part++) sum += squares_s[i * (BLOCKS * TOKENS * SQUARES) + at + part];
            v *= inversesqrt(sum / float(k) + epsilon);
        }
        uint left = min(n - item_row, 4u);
        if (BIAS == 1u) [[unroll]] for (uint i = 0u; i < 4u; i++) if (i < left) v[i] += bias.v[item_row + i];
        if (EPILOGUE == 1u) v += uintBitsToFloat(old);
        if (IS_GATED(EPILOGUE)) {
            vec2 result = glu(EPILOGUE, v.xz, v.yw);
            uint at = item_token * y_stride + item_row / 2u;
            uvec2 words = TAGGED == 3u ? uvec2(tagged(result.x, y_tag), tagged(result.y, y_tag)) : floatBitsToUint(result);
            if (left == 4u) {
                PUT_TWO(at, words)
            } else if (left >= 2u) {
                PUT_ONE(at, words.x)
            }
        } else {
            v = ACTIVATED(EPILOGUE, v);
            uvec4 words = TAGGED == 3u ? tagged(v, y_tag) : floatBitsToUint(v);
            if (left == 4u) y.v[item_at] = words;
            if (left < 4u) y.v[item_at].x = words.x;
            if (left < 4u && left > 1u) y.v[item_at].y = words.y;
            if (left == 3u) y.v[item_at].z = words.z;
        }
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// y[r] = epilogue( W · prologue(x[r]) ) for 1 to 8 · BLOCKS rows of x, on packed weights.
//
// prologue   NORM 0: x             NORM 1: x ⊙ norm, and the product is scaled by
//            rsqrt(mean x² + eps) in the epilogue, so that the norm is no stage of its own
// epilogue   0 store: y = s·Wx + b      1 residual: y += s·Wx + b
//            2 swiglu: rows of W alternate gate, up; y[n/2] = silu(gate)·up
// weight     16 × 32 blocks in fragment order (`memory::pack::Layout::Fragments`)
// x          [rows][x_stride] f32, split in two 16-bit parts: sums are as exact as with 16 bits of x
// y          [rows][y_stride] f32;  TAGGED 1: x is tagged, 3: y as well (`tags.glsl`)
//
// One workgroup computes TILES blocks of 16 rows of W for all rows of x: its groups of 32 lanes split K,
// AHEAD chunks of 32 columns in flight each, and meet in shared memory. Weights are asked for before x is
// waited for; a group's lanes then read, scale and split its share of x once, four columns each, and hand
// it to each other. A token's two parts stand in rows g and g + 8 of a 16-row fragment, so that adding a
// lane's two halves of the sums joins them. Traffic: W once, x once a workgroup from the far cache.
// With a norm and several rows AHEAD is a power of two.
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the same as the workgroup's size
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
#include "tags.glsl"

layout(push_constant) uniform Args {
    Words4In weight;
    TaggedIn x;
    Floats4In norm;
    FloatsIn bias;
    TaggedInOut y;
    Fault fault;
    uint n;           // rows of W
    uint k;           // columns, for the mean
    uint x_stride;    // floats
    uint y_stride;    // floats
    float epsilon;
    uint x_tag;
    uint old_tag;     // of y before a residual is added
    uint y_tag;
};

const uint GROUPS = LANES / 32u;
const uint ROUNDS = (CHUNKS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);
const uint TOKENS = ROWS < 8u ? ROWS : 8u;        // of a block
const uint KEPT = TOKENS * 4u;                    // lanes of a group whose sums are of tokens that exist
const uint ITEMS = TILES * BLOCKS * KEPT;
const uint QUADS = AHEAD * 8u;                    // four columns each, of a token in a round
const uint LOADS = (TOKENS * QUADS + 31u) / 32u;  // of them a lane
// Lanes whose squares are added before they go to shared memory, and what is left of a token's then.
#if MATRIX == 1
const uint JOINED = ROWS == 1u || QUADS > 32u ? 32u : QUADS;
const uint SQUARES = ROWS == 1u ? LOADS : QUADS / JOINED;
#else
const uint JOINED = 1u;
const uint SQUARES = QUADS;
#endif

shared vec4 sums_s[GROUPS * ITEMS];
shared uvec4 x_s[GROUPS * TOKENS * QUADS];        // both parts of four columns
shared float squares_s[GROUPS * BLOCKS * TOKENS * SQUARES];

// One or two results at an even place. Components are constant: some drivers store a chosen one by way of
// the whole vector.
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
    // Loads that the near cache may serve: nobody writes x meanwhile where it is not tagged.
    Words4In plain_x = Words4In(x);
#else
#define plain_x x
#endif

    // What an item of the epilogue adds to, if it is there already.
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

    [[dont_unroll]] for (uint round = 0u; round < ROUNDS; round++) {
        // Past the last chunk the last one's weights meet zeros.
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
        [[unroll]] for (uint b = 0u; b < BLOCKS; b++) {
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
                split_pair(value.x, value.y, parts.x, parts.z);
                split_pair(value.z, value.w, parts.y, parts.w);
                if (i * 32u + LANE < TOKENS * QUADS) x_s[LANE_GROUP * (TOKENS * QUADS) + i * 32u + LANE] = parts;
            }
            LANES_BARRIER
            uint own = LANE_GROUP * (TOKENS * QUADS) + min(g, TOKENS - 1u) * QUADS + t * 2u;
            [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
                [[unroll]] for (uint h = 0u; h < 2u; h++) {
                    uvec4 parts = x_s[own + u * 8u + h];
                    Tokens a;
                    SET_TOKENS(a, parts.xy, parts.zw)
                    [[unroll]] for (uint j = 0u; j < TILES; j++) {
                        Weights m;
                        SET_WEIGHTS(m, w[(u * TILES + j) * 2u + h])
                        MULTIPLY_ADD(sums[b * TILES + j], a, m)
                    }
                }
            }
            // Before the next parts overwrite these.
            if (ROUNDS * BLOCKS > 1u) LANES_BARRIER
        }
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
                sums_s[LANE_GROUP * ITEMS + (j * BLOCKS + b) * KEPT + LANE] =
                    SUMS_LOW(sums[b * TILES + j]) + SUMS_HIGH(sums[b * TILES + j]);
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
        if (EPILOGUE == 2u) {
            vec2 gate = v.xz;
            vec2 result = gate / (1.0 + exp(-gate)) * v.yw;
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

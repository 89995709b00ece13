#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// y[r] = epilogue( W · x[r] ) for panels of 16 · BLOCKS packed rows of x, on packed weights: between the few
// rows of `skinny` and the many of `tiled`.
//
// epilogue   0 store: y = Wx + b      1 residual: y += Wx + b
//            2 swiglu: rows of W alternate gate, up; y[n/2] = silu(gate)·up
// weight     16 × 32 blocks in fragment order (`memory::pack::Layout::Fragments`)
// x          16 × 32 blocks as `pack_rows` leaves them
// y          PACKED 0: [rows][y_stride] f32      1 (swiglu): 16-bit blocks like x, for the next product; rows
//            are written up to a multiple of 16, columns behind the last are left as they are
//
// One workgroup computes TILES blocks of 16 rows of W for a panel: its groups of 32 lanes split K, AHEAD chunks
// of 32 columns in flight each, and meet in shared memory one tile after the other. A lane's sums are of tokens
// g and g + 8 and rows 4t .. 4t + 3. Traffic: W once a panel, x once a workgroup through the near cache.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the same as the workgroup's size
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint TILES = 2;
layout(constant_id = 5) const uint AHEAD = 1;
layout(constant_id = 6) const uint BLOCKS = 1;
layout(constant_id = 7) const uint CHUNKS = 32;   // 32-column chunks of a padded row
layout(constant_id = 8) const uint PACKED = 0;

#include "fragments.glsl"

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Words4InOut { uvec4 v[]; };

layout(push_constant) uniform Args {
    Words4In weight;
    Words4In x;
    FloatsIn bias;
    Words4InOut y;
    uint n;           // rows of W
    uint rows;        // of x
    uint y_stride;    // floats, or blocks of 32 columns where y is packed
};

const uint GROUPS = LANES / 32u;
const uint ROUNDS = (CHUNKS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);
const uint ITEMS = BLOCKS * 64u;

shared vec4 sums_s[GROUPS * ITEMS];

// One of four words. Components are constant: some drivers store a chosen one by way of the whole vector.
#define PUT_WORD(at, word) { uint at_ = at; \
    if (at_ % 4u == 0u) y.v[at_ / 4u].x = word; else if (at_ % 4u == 1u) y.v[at_ / 4u].y = word; \
    else if (at_ % 4u == 2u) y.v[at_ / 4u].z = word; else y.v[at_ / 4u].w = word; }

void main() {
    uint blocks = (n + 15u) / 16u, panel = gl_WorkGroupID.y * BLOCKS, row_blocks = (rows + 15u) / 16u;
    uint first = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * TILES;
    if (first >= blocks) return;

    uint base[TILES], x_base[BLOCKS];
    [[unroll]] for (uint j = 0u; j < TILES; j++) base[j] = min(first + j, blocks - 1u) * (CHUNKS * 64u) + LANE;
    [[unroll]] for (uint i = 0u; i < BLOCKS; i++) x_base[i] = min(panel + i, row_blocks - 1u) * (CHUNKS * 64u) + LANE;
    Sums sums[BLOCKS * TILES];
    [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) sums[i] = NO_SUMS;

    [[dont_unroll]] for (uint round = 0u; round < ROUNDS; round++) {
        uvec4 w[AHEAD * TILES * 2u];
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            uint at = min((round * AHEAD + u) * GROUPS + LANE_GROUP, CHUNKS - 1u) * 64u;
            [[unroll]] for (uint j = 0u; j < TILES; j++) {
                w[(u * TILES + j) * 2u] = weight.v[base[j] + at];
                w[(u * TILES + j) * 2u + 1u] = weight.v[base[j] + at + 32u];
            }
        }
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            uint chunk = (round * AHEAD + u) * GROUPS + LANE_GROUP;
            // Past the last chunk the last one's weights meet zeros.
            bool there = CHUNKS % (GROUPS * AHEAD) == 0u || chunk < CHUNKS;
            uint at = min(chunk, CHUNKS - 1u) * 64u;
            uvec4 q[BLOCKS * 2u];
            [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
                q[i * 2u] = x.v[x_base[i] + at];
                q[i * 2u + 1u] = x.v[x_base[i] + at + 32u];
            }
            [[unroll]] for (uint h = 0u; h < 2u; h++) {
                Tokens a[BLOCKS];
                [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
                    uvec4 part = there ? q[i * 2u + h] : uvec4(0u);
                    SET_TOKENS(a[i], part.xz, part.yw)
                }
                [[unroll]] for (uint j = 0u; j < TILES; j++) {
                    Weights m;
                    SET_WEIGHTS(m, w[(u * TILES + j) * 2u + h])
                    [[unroll]] for (uint i = 0u; i < BLOCKS; i++) MULTIPLY_ADD(sums[i * TILES + j], a[i], m)
                }
            }
        }
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
            uint left = min(n - row, 4u);
            if (BIAS == 1u) [[unroll]] for (uint e = 0u; e < 4u; e++) if (e < left) v[e] += bias.v[row + e];
            if (EPILOGUE == 2u) {
                vec2 gate = v.xz;
                vec2 result = gate / (1.0 + exp(-gate)) * v.yw;
                uint column = row / 2u;
                if (PACKED == 1u) {
                    if (left < 4u) result.y = 0.0;
                    uint at = (((block * y_stride + column / 32u) * 2u + column % 8u / 4u) * 32u + g * 4u + column % 32u / 8u) * 4u;
                    PUT_WORD(at + column % 4u / 2u * 2u + second, pack_pair(result.x, result.y))
                } else {
                    uint at = token * y_stride + column;
                    if (left >= 2u) PUT_WORD(at, floatBitsToUint(result.x))
                    if (left == 4u) PUT_WORD(at + 1u, floatBitsToUint(result.y))
                }
            } else {
                uint at = (token * y_stride + row) / 4u;
                if (EPILOGUE == 1u) v += uintBitsToFloat(y.v[at]);
                uvec4 words = floatBitsToUint(v);
                if (left == 4u) y.v[at] = words;
                if (left < 4u) y.v[at].x = words.x;
                if (left < 4u && left > 1u) y.v[at].y = words.y;
                if (left == 3u) y.v[at].z = words.z;
            }
        }
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Where the elements of 16 × 16 blocks lie in a subgroup of 32: `found` is, for each lane, the numbers
// 16 · row + column of its eight elements of a block of each use (tokens, weights, sums). Kernels that fill
// blocks element by element (`fragments.glsl`) run only where this is what they were written for.
// found [32][3][8] f32. One workgroup; 3 KiB.
#include "common.glsl"

layout(local_size_x_id = 0) in;

#include "fragments.glsl"

layout(push_constant) uniform Args {
    FloatsOut found;
};

shared ELEMENT numbers_s[256];
shared float sums_s[256];

void main() {
    for (uint i = LANE; i < 256u; i += 32u) {
        // Up to 255: exact in eight bits.
        numbers_s[i] = ELEMENT(float(i));
        sums_s[i] = float(i);
    }
    barrier();
    Tokens a;
    Weights b;
    Sums c;
    coopMatLoad(a, numbers_s, 0u, 16u, gl_CooperativeMatrixLayoutRowMajor);
    coopMatLoad(b, numbers_s, 0u, 16u, gl_CooperativeMatrixLayoutRowMajor);
    coopMatLoad(c, sums_s, 0u, 16u, gl_CooperativeMatrixLayoutRowMajor);
    // A block with another number of elements a lane is none of ours.
    if (a.length() != 8 || b.length() != 8 || c.length() != 8) return;
    [[unroll]] for (uint e = 0u; e < 8u; e++) {
        found.v[LANE * 24u + e] = float(a[e]);
        found.v[LANE * 24u + 8u + e] = float(b[e]);
        found.v[LANE * 24u + 16u + e] = c[e];
    }
}

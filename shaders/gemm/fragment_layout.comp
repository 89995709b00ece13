#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Probe of the cooperative matrix layout: finds which element of a 16 × 16 block each lane of a subgroup of 32 holds.
// `found` receives for each lane the numbers 16 · row + column of its eight elements of a block of each use (A: tokens,
// B: weights, accumulator: sums). Kernels that fill blocks element by element (`fragments.glsl`) run only on devices
// whose layout is the one that those kernels were written for (`kernels::gemm::fragment_layout::expected`).
// found [32][3][8] f32. One workgroup; traffic 3 KiB.
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
        // Values up to 255 are exact with 8 bits of significand.
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
    // A device with another number of elements per lane does not have the expected layout.
    if (a.length() != 8 || b.length() != 8 || c.length() != 8) return;
    [[unroll]] for (uint e = 0u; e < 8u; e++) {
        found.v[LANE * 24u + e] = float(a[e]);
        found.v[LANE * 24u + 8u + e] = float(b[e]);
        found.v[LANE * 24u + 16u + e] = c[e];
    }
}

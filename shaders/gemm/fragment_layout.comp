#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Probe of the cooperative matrix layout: finds which element of a 16 × 16 block each lane of a subgroup of 32 holds.
// `found` receives for each lane the numbers 16 · row + column of its eight elements of a block of each use (A: tokens or
// weights, B: weights, accumulator: sums), and, for f16, the numbers 8 · row + column of its four elements of a 16 × 8
// block of B (tokens) and of an accumulator; for bfloat16, which has no 16 × 8 blocks here, eight zeros. Kernels that
// fill blocks element by element (`fragments.glsl`) run only on devices whose layout is the one that those kernels were
// written for (`kernels::gemm::fragment_layout::expected`).
// found [32][4][8] f32. One workgroup; traffic 4 KiB.
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
        found.v[LANE * 32u + e] = float(a[e]);
        found.v[LANE * 32u + 8u + e] = float(b[e]);
        found.v[LANE * 32u + 16u + e] = c[e];
    }
#if WEIGHT == 1
    FewTokens few;
    FewSums few_sums;
    coopMatLoad(few, numbers_s, 0u, 8u, gl_CooperativeMatrixLayoutRowMajor);
    coopMatLoad(few_sums, sums_s, 0u, 8u, gl_CooperativeMatrixLayoutRowMajor);
    if (few.length() != 4 || few_sums.length() != 4) return;
    [[unroll]] for (uint e = 0u; e < 4u; e++) {
        found.v[LANE * 32u + 24u + e] = float(few[e]);
        found.v[LANE * 32u + 28u + e] = few_sums[e];
    }
#else
    [[unroll]] for (uint e = 24u; e < 32u; e++) found.v[LANE * 32u + e] = 0.0;
#endif
}

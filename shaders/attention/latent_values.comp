#version 460
#extension GL_GOOGLE_include_directive : require
// Latent attention (MLA), after attention: each head's values of the mixed latent vector.
//   y[r][h] = W[h] · x[r][h].c
//
// x  [rows][x_stride] f32: HEADS heads of ROPE + RANK, of which the first ROPE are not used
// W  [HEADS][VALUES][RANK] f32
// y  [rows][y_stride] f32: HEADS heads of VALUES
// One workgroup computes one head of y of one row, one subgroup each of its values. Traffic: W.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROPE = 64;
layout(constant_id = 2) const uint RANK = 512;
layout(constant_id = 3) const uint VALUES = 128;

layout(push_constant) uniform Args {
    FloatsIn x;
    FloatsIn w;
    FloatsOut y;
    uint x_stride;    // in floats
    uint y_stride;
};

shared float x_s[RANK];

void main() {
    uint h = gl_WorkGroupID.x, row = gl_WorkGroupID.y;
    uint from = row * x_stride + h * (ROPE + RANK) + ROPE;
    for (uint i = gl_LocalInvocationID.x; i < RANK; i += gl_WorkGroupSize.x) x_s[i] = x.v[from + i];
    barrier();
    for (uint r = gl_SubgroupID; r < VALUES; r += gl_NumSubgroups) {
        float sum = 0.0;
        for (uint i = gl_SubgroupInvocationID; i < RANK; i += gl_SubgroupSize) sum += w.v[(h * VALUES + r) * RANK + i] * x_s[i];
        sum = subgroupAdd(sum);
        if (subgroupElect()) y.v[row * y_stride + h * VALUES + r] = sum;
    }
}

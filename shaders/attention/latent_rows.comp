#version 460
#extension GL_GOOGLE_include_directive : require
// Latent attention (MLA), before attention: each head's query meets the latent vector instead of keys of its own.
//   y[r][h]       = [ q[r][h].rope | W[h]ᵀ · q[r][h].nope ]    for each head h
//   y[r][HEADS]   = y[r][HEADS + 1] = [ k.rope | c ]           the key and the value of the row, before rotation
//
// q  [rows][q_stride] f32: HEADS queries of ROPE + NOPE;  k [rows][k_stride] f32, from float k_first: ROPE, then RANK
// W  [HEADS][NOPE][RANK] f32
// y  [rows][y_stride] f32: HEADS + 2 heads of ROPE + RANK
// One workgroup computes one head of y of one row. Traffic: W, whose rows adjacent invocations read together.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEADS = 16;
layout(constant_id = 2) const uint ROPE = 64;
layout(constant_id = 3) const uint NOPE = 128;
layout(constant_id = 4) const uint RANK = 512;

layout(push_constant) uniform Args {
    FloatsIn q;
    FloatsIn k;
    FloatsIn w;
    FloatsOut y;
    uint q_stride;    // in floats
    uint k_stride;
    uint k_first;
    uint y_stride;
};

shared float q_s[NOPE];

void main() {
    uint h = gl_WorkGroupID.x, row = gl_WorkGroupID.y, t = gl_LocalInvocationID.x;
    uint to = row * y_stride + h * (ROPE + RANK);
    if (h == HEADS) {
        for (uint i = t; i < ROPE + RANK; i += gl_WorkGroupSize.x) {
            float value = k.v[row * k_stride + k_first + i];
            y.v[to + i] = value;
            y.v[to + ROPE + RANK + i] = value;
        }
        return;
    }
    uint from = row * q_stride + h * (ROPE + NOPE);
    for (uint i = t; i < NOPE; i += gl_WorkGroupSize.x) q_s[i] = q.v[from + ROPE + i];
    for (uint i = t; i < ROPE; i += gl_WorkGroupSize.x) y.v[to + i] = q.v[from + i];
    barrier();
    for (uint j = t; j < RANK; j += gl_WorkGroupSize.x) {
        float sum = 0.0;
        for (uint i = 0u; i < NOPE; i++) sum += w.v[(h * NOPE + i) * RANK + j] * q_s[i];
        y.v[to + ROPE + j] = sum;
    }
}

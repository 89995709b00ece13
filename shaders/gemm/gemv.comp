#version 460
#extension GL_GOOGLE_include_directive : require
// y[r] = epilogue( W · prologue(x[r]) ), a few rows of x at a time.
//
// prologue   NORM 0: x             NORM 1: x ⊙ norm, and the product is scaled by
//            rsqrt(mean x² + eps) in the epilogue, so that the norm is no stage of its own
// epilogue   0 store: y = s·Wx + b      1 residual: y += s·Wx + b
//            2 swiglu: rows of W alternate gate, up; y[n/2] = silu(gate)·up
// weight     [N][chunks·8] in the variant's format;  x [rows][x_stride] f32;  y [rows][y_stride] f32
//
// One workgroup computes two rows of W for one row of x: all its threads split K, 16 bytes of each
// W row a thread and step (512 contiguous bytes a subgroup of 32); x comes straight from global
// memory. Traffic: W once (2·N·K bytes), x from the near cache.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;

layout(push_constant) uniform Args {
    Words4In weight;
    Floats4In x;
    Floats4In norm;
    FloatsIn bias;
    FloatsInOut y;
    uint n;           // rows of W
    uint k;           // columns, for the mean
    uint chunks;      // 8-value chunks of a padded row
    uint x_stride;    // floats
    uint y_stride;    // floats
    float epsilon;
};

shared vec3 partial[256];

void accumulate(uint base0, uint base1, uint xo, uint c, inout vec3 acc) {
    vec4 xa = x.v[xo + c * 2u], xb = x.v[xo + c * 2u + 1u];
    vec4 a0, b0, a1, b1;
#if WEIGHT == 2
    a0 = uintBitsToFloat(weight.v[(base0 + c) * 2u]);
    b0 = uintBitsToFloat(weight.v[(base0 + c) * 2u + 1u]);
    a1 = uintBitsToFloat(weight.v[(base1 + c) * 2u]);
    b1 = uintBitsToFloat(weight.v[(base1 + c) * 2u + 1u]);
#else
    uvec4 w0 = weight.v[base0 + c], w1 = weight.v[base1 + c];
    unpack8(w0, a0, b0);
    unpack8(w1, a1, b1);
#endif
    if (NORM == 1u) {
        acc.z += dot(xa, xa) + dot(xb, xb);
        xa *= norm.v[c * 2u];
        xb *= norm.v[c * 2u + 1u];
    }
    acc.x += dot(a0, xa) + dot(b0, xb);
    acc.y += dot(a1, xa) + dot(b1, xb);
}

void main() {
    uint row = gl_WorkGroupID.y;
    uint block = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint r0 = block * 2u;
    if (r0 >= n) return;
    uint r1 = min(r0 + 1u, n - 1u);
    uint xo = row * x_stride / 4u;
    vec3 acc = vec3(0.0);
    for (uint c = gl_LocalInvocationID.x; c < chunks; c += gl_WorkGroupSize.x)
        accumulate(r0 * chunks, r1 * chunks, xo, c, acc);
    acc = vec3(subgroupAdd(acc.x), subgroupAdd(acc.y), NORM == 1u ? subgroupAdd(acc.z) : 0.0);
    if (gl_NumSubgroups > 1u) {
        if (subgroupElect()) partial[gl_SubgroupID] = acc;
        barrier();
        if (gl_LocalInvocationID.x != 0u) return;
        acc = partial[0];
        for (uint i = 1u; i < gl_NumSubgroups; i++) acc += partial[i];
    } else if (gl_LocalInvocationID.x != 0u) {
        return;
    }
    float scale = NORM == 1u ? inversesqrt(acc.z / float(k) + epsilon) : 1.0;
    float v0 = acc.x * scale, v1 = acc.y * scale;
    if (BIAS == 1u) {
        v0 += bias.v[r0];
        v1 += bias.v[r1];
    }
    uint yo = row * y_stride;
    if (EPILOGUE == 2u) {
        y.v[yo + block] = v0 / (1.0 + exp(-v0)) * v1;
    } else if (EPILOGUE == 1u) {
        y.v[yo + r0] += v0;
        if (r0 + 1u < n) y.v[yo + r1] += v1;
    } else {
        y.v[yo + r0] = v0;
        if (r0 + 1u < n) y.v[yo + r1] = v1;
    }
}

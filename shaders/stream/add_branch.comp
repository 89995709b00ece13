#version 460
#extension GL_GOOGLE_include_directive : require
// Adds the output of a mixer or an MLP to the residual stream, for models that scale or normalize it first:
//   b = scale · y[r]                                      NORM 0
//   b = scale · y[r] · rsqrt(mean y[r]² + eps) ⊙ norm     NORM 1
//   x[r] = (x[r] + b) · factor[0]
// With ADD 0, x[r] = b · factor[0]; with FACTOR 0, there is no factor.
//
// x, y  [rows][stride] f32; padding of y is zero. norm [columns padded to 4] f32. factor [1] f32
// One workgroup processes one row. Traffic: 12 bytes per value.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 1;
layout(constant_id = 2) const uint ADD = 1;
layout(constant_id = 3) const uint FACTOR = 0;

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In y;
    Floats4In norm;
    Floats4InOut x;
    FloatsIn factor;
    uint columns;
    uint y_stride;    // in floats, a multiple of 4, like x_stride
    uint x_stride;
    float epsilon;
    float scale;
};

shared float partial[256];

void main() {
    uint row = gl_WorkGroupID.x, quads = (columns + 3u) / 4u, t = gl_LocalInvocationID.x;
    uint from = row * (y_stride / 4u), to = row * (x_stride / 4u);
    float times = scale;
    if (NORM == 1u) {
        float square = 0.0;
        for (uint i = t; i < quads; i += gl_WorkGroupSize.x) square += dot(y.v[from + i], y.v[from + i]);
        square = subgroupAdd(square);
        if (subgroupElect()) partial[gl_SubgroupID] = square;
        barrier();
        float sum = 0.0;
        for (uint i = 0u; i < gl_NumSubgroups; i++) sum += partial[i];
        times *= inversesqrt(sum / float(columns) + epsilon);
    }
    for (uint i = t; i < quads; i += gl_WorkGroupSize.x) {
        vec4 value = y.v[from + i] * times;
        if (NORM == 1u) value *= norm.v[i];
        if (ADD == 1u) value += x.v[to + i];
        if (FACTOR == 1u) value *= factor.v[0];
        x.v[to + i] = value;
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// RMS norm in place, of parts of rows:
//   x[r][first + h·width ..] = x[r][first + h·width ..] · rsqrt(mean square + eps) ⊙ norm    for each part h
// With ADD 1, then:  x[r][i] = (x[r][i] + scale · y[r][i]) · rsqrt(2)    for each i of the parts
// The mean is that of the part and of further_width more floats of the row, from float further_first on, which stay as they
// are: of the values that another device norms.
//
// x, y  [rows][stride] f32. norm [width] f32, the same for all parts; with NORM 0 there are no weights
// One workgroup processes one part of one row. Traffic: 12 bytes per value, with ADD 1 16.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 1;
layout(constant_id = 2) const uint ADD = 0;

layout(push_constant) uniform Args {
    FloatsInOut x;
    FloatsIn norm;
    FloatsIn y;
    uint first;
    uint width;
    uint stride;      // in floats
    uint y_stride;
    uint further_first;
    uint further_width; // 0: the mean is of the part alone
    float epsilon;
    float scale;
};

shared float partial[256];

void main() {
    uint base = gl_WorkGroupID.y * stride + first + gl_WorkGroupID.x * width, t = gl_LocalInvocationID.x;
    float square = 0.0;
    for (uint i = t; i < width; i += gl_WorkGroupSize.x) {
        float value = x.v[base + i];
        square += value * value;
    }
    for (uint i = t; i < further_width; i += gl_WorkGroupSize.x) {
        float value = x.v[gl_WorkGroupID.y * stride + further_first + i];
        square += value * value;
    }
    square = subgroupAdd(square);
    if (subgroupElect()) partial[gl_SubgroupID] = square;
    barrier();
    float sum = 0.0;
    for (uint i = 0u; i < gl_NumSubgroups; i++) sum += partial[i];
    float factor = inversesqrt(sum / float(width + further_width) + epsilon);
    for (uint i = t; i < width; i += gl_WorkGroupSize.x) {
        float value = x.v[base + i] * (NORM == 1u ? factor * norm.v[i] : factor);
        if (ADD == 1u) value = (value + scale * y.v[base - gl_WorkGroupID.y * stride + gl_WorkGroupID.y * y_stride + i]) * inversesqrt(2.0);
        x.v[base + i] = value;
    }
}

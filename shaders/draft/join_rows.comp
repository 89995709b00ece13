#version 460
#extension GL_GOOGLE_include_directive : require
// Speculative decoding: writes rows, normed or as they are, into some columns of wider rows: the parts of a draft head's
// inputs.
//   y[r][first + i] = x[r][i] · rsqrt(mean x[r]² + epsilon) · norm[i]   with NORM 1
//   y[r][first + i] = x[r][i]                                           with NORM 0
//
// x     [rows][x_stride] f32, of which `width` columns are read;  norm f32 [width]
// y     [rows][y_stride] f32
// One workgroup processes a row. Traffic: 8 bytes per value, 12 with NORM 1.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 1;

layout(push_constant) uniform Args {
    FloatsIn x;
    FloatsIn norm;    // with NORM 1
    FloatsOut y;
    uint width;
    uint x_stride;    // in floats
    uint y_stride;
    uint first;
    float epsilon;
};

shared float partial[256];

void main() {
    uint from = gl_WorkGroupID.x * x_stride, to = gl_WorkGroupID.x * y_stride + first, t = gl_LocalInvocationID.x;
    float factor = 1.0;
    if (NORM == 1u) {
        float square = 0.0;
        for (uint i = t; i < width; i += gl_WorkGroupSize.x) {
            float value = x.v[from + i];
            square += value * value;
        }
        square = subgroupAdd(square);
        if (subgroupElect()) partial[gl_SubgroupID] = square;
        barrier();
        float sum = 0.0;
        for (uint i = 0u; i < gl_NumSubgroups; i++) sum += partial[i];
        factor = inversesqrt(sum / float(width) + epsilon);
    }
    for (uint i = t; i < width; i += gl_WorkGroupSize.x) {
        float value = x.v[from + i];
        y.v[to + i] = NORM == 1u ? value * factor * norm.v[i] : value;
    }
}

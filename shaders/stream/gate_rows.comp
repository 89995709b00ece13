#version 460
#extension GL_GOOGLE_include_directive : require
// A gated linear unit of two buffers, in place:
//   x[r][i] = glu(x[r][i], y[r][first + i])    with the activation of GLU: `glu.glsl`
//
// x  [rows][stride] f32, y [rows][y_stride] f32
// One invocation computes one value. Traffic: 12 bytes per value.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint GLU = 2;

layout(push_constant) uniform Args {
    FloatsInOut x;
    FloatsIn y;
    uint columns;
    uint first;
    uint stride;      // in floats
    uint y_stride;
};

void main() {
    uint i = gl_GlobalInvocationID.x, row = gl_WorkGroupID.y;
    if (i >= columns) return;
    x.v[row * stride + i] = glu(GLU, x.v[row * stride + i], y.v[row * y_stride + first + i]);
}

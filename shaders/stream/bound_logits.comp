#version 460
#extension GL_GOOGLE_include_directive : require
// Scales logits, and bounds them with CAP 1:
//   z = logit · scale;   logit = z    or    cap · tanh(z / cap)
//
// logits [rows][stride] f32. An invocation processes one logit. Traffic: 8 bytes per logit.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint CAP = 0;

layout(push_constant) uniform Args {
    FloatsInOut logits;
    uint columns;
    uint stride;      // in floats
    float scale;
    float cap;
};

void main() {
    uint i = gl_GlobalInvocationID.x, at = gl_WorkGroupID.y * stride + i;
    if (i >= columns) return;
    float value = logits.v[at] * scale;
    // tanh(x) = 1 - 2 / (exp(2x) + 1); exp may overflow to infinity.
    if (CAP == 1u) value = cap * (1.0 - 2.0 / (exp(2.0 * value / cap) + 1.0));
    logits.v[at] = value;
}

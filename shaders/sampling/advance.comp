#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Step counter: step += 1, the last call of a region whose `sample` wrote the ring buffer. A scoring region uses it to
// count SCORE_TURN.
//   step_number [1] u32
// Only the first invocation of the single workgroup writes. Traffic: 8 bytes.

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    WordsInOut step_number;
} args;

void main() {
    if (gl_GlobalInvocationID.x == 0u) args.step_number.v[0] += 1u;
}

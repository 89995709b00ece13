#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// step += 1: the last call of a region whose `sample` wrote the ring.
//   step_number [1] u32
// One workgroup of one invocation; 8 bytes.

layout(local_size_x = 1) in;

layout(push_constant) uniform Args {
    WordsInOut step_number;
} args;

void main() {
    args.step_number.v[0] += 1u;
}

#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// counts[slot][*] = 0 for each slot of a list that the host filled.
//   inbox  [4 + capacity] u32: the number of slots, 3 words unused, then the slots
//   counts [slots][vocabulary] u32; slots outside are dropped
// An invocation clears one word; x runs over the vocabulary, y over the list. An
// empty list costs the launch. 4 V bytes a slot.

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    WordsIn inbox;
    WordsOut counts;
    uint slots;
    uint vocabulary;
} args;

void main() {
    uint at = gl_WorkGroupID.y;
    if (at >= args.inbox.v[0]) return;
    uint slot = args.inbox.v[4u + at];
    uint token = gl_GlobalInvocationID.x;
    if (slot < args.slots && token < args.vocabulary) args.counts.v[slot * args.vocabulary + token] = 0u;
}

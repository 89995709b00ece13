#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Buffer clear for new sequences: counts[slot][*] = 0 for each slot in a list that the host fills.
//   inbox  [4 + capacity] u32: the number of slots, 3 unused words, then the slots
//   counts [slots][vocabulary] u32; slots outside the buffer are ignored
// An invocation clears one word; x iterates over the vocabulary, y over the list. An empty list costs only the launch.
// Traffic: 4·V bytes per slot, where V is the vocabulary's size.

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

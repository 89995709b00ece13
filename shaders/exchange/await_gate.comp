#version 460
#extension GL_GOOGLE_include_directive : require
// Keeps a device busy until the host opens the gate before a step: polls word until (i32)(word - wanted) ≥ 0, at most `polls`
// times. A device that waits for another one idle lowers the clock of its processors. Nothing depends on the call, since the
// step behind it waits at the gate.
//
// word   [1]: the number up to which the host has opened the gate, which it writes before it opens the gate; in memory of the
//        device
// turns  {the number of calls so far, 0, 0, 0, TURNS numbers}: a call wants the number whose index is the number of calls before
//        it, modulo TURNS. The host writes it before it queues the call.
// One invocation does all. Traffic: 4 bytes for each poll.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint TURNS = 1;

layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Polled { volatile uint v[]; };

layout(push_constant) uniform Args {
    Polled word;
    WordsInOut turns;
    uint polls;
};

void main() {
    uint turn = turns.v[0], wanted = turns.v[4u + turn % TURNS];
    for (uint i = 0u; i < polls && int(word.v[0] - wanted) < 0; i++) {}
    turns.v[0] = turn + 1u;
}

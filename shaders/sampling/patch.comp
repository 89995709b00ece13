#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Scatter of host updates into device state: target[offset] = value for each pair of an inbox that the host fills.
//   inbox  [4 + 2 * capacity] u32: the number of pairs, 3 unused words, then pairs of (word offset, value)
//   target [words] u32; offsets outside the buffer are ignored
// The offsets are distinct: the host keeps only the last value of each (`kernels::sampling::Patch`). One workgroup
// writes all pairs. Traffic: 12 bytes per pair.

layout(local_size_x_id = 0) in;
const uint THREADS = gl_WorkGroupSize.x;

layout(push_constant) uniform Args {
    WordsIn inbox;
    WordsOut target;
    uint capacity;
    uint words;
} args;

void main() {
    uint count = min(args.inbox.v[0], args.capacity);
    for (uint i = gl_LocalInvocationIndex; i < count; i += THREADS) {
        uint offset = args.inbox.v[4u + 2u * i];
        if (offset < args.words) args.target.v[offset] = args.inbox.v[5u + 2u * i];
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// Memory bandwidth benchmark: reads a buffer once, to measure the maximum read rate of the device. total += sum of all
// words.
//
// data [groups][16][threads] uvec4; total [1] u32
// One workgroup reads one tile of `data`; each invocation has sixteen 16-byte loads in flight. Traffic: `data` once.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    Words4In data;
    WordsInOut total;
};

void main() {
    uint tile = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint base = tile * 16u * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uvec4 w[16];
    [[unroll]] for (uint i = 0u; i < 16u; i++) w[i] = data.v[base + i * gl_WorkGroupSize.x];
    uvec4 sum = uvec4(0u);
    [[unroll]] for (uint i = 0u; i < 16u; i++) sum += w[i];
    uint all = subgroupAdd(sum.x + sum.y + sum.z + sum.w);
    // The condition is never true for the benchmark's data, but the driver cannot know that and must execute all loads.
    if (all == 0x9e3779b9u) total.v[0] = all;
}

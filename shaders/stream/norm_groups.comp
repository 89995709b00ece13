#version 460
#extension GL_GOOGLE_include_directive : require
// RMS norm of groups of columns:
//   y[r][g · width ..] = x[r][g · width ..] · rsqrt(mean square + eps) ⊙ norm[g · width ..]    for each group g
//
// x, y  [rows][stride] f32. TAGGED 3: both are tagged (`tags.glsl`)
// norm  [groups · width] f32
// One workgroup processes one group of one row, of which each invocation keeps QUADS times four values in registers.
// Traffic: 8 bytes per value.
#include "common.glsl"
#define DEVICES_ID 3
#include "tags.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint QUADS = 1;
layout(constant_id = 2) const uint TAGGED = 0;

layout(push_constant) uniform Args {
    TaggedIn x;
    Floats4In norm;
    TaggedOut y;
    Fault fault;
    uint width;       // a multiple of 4
    uint x_stride;    // in floats, a multiple of 4, like y_stride
    uint y_stride;
    float epsilon;
    uint x_tag;
    uint y_tag;
};

shared float partial[256];

void main() {
    uint row = gl_WorkGroupID.y, quads = width / 4u, first = gl_WorkGroupID.x * quads, t = gl_LocalInvocationID.x;
    uint from = row * (x_stride / 4u) + first, to = row * (y_stride / 4u) + first;
    // An invocation without a value of its own loads the last one.
    uint at[QUADS];
    bool own[QUADS];
    uvec4 words[QUADS];
    vec4 weights[QUADS];
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        own[i] = i * gl_WorkGroupSize.x + t < quads;
        at[i] = min(i * gl_WorkGroupSize.x + t, quads - 1u);
        weights[i] = norm.v[first + at[i]];
    }
    uint polls = 0u, bad;
    do {
        bad = 0u;
        [[unroll]] for (uint i = 0u; i < QUADS; i++) words[i] = x.v[from + at[i]];
        if (TAGGED == 3u) [[unroll]] for (uint i = 0u; i < QUADS; i++) bad |= stale(words[i], x_tag);
    } while (poll_again(subgroupOr(bad) != 0u, polls, fault, x_tag));
    float square = 0.0;
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        vec4 value = uintBitsToFloat(words[i]);
        if (own[i]) square += dot(value, value);
    }
    square = subgroupAdd(square);
    if (subgroupElect()) partial[gl_SubgroupID] = square;
    barrier();
    float sum = 0.0;
    for (uint i = 0u; i < gl_NumSubgroups; i++) sum += partial[i];
    float factor = inversesqrt(sum / float(width) + epsilon);
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        if (!own[i]) continue;
        vec4 value = uintBitsToFloat(words[i]) * factor * weights[i];
        y.v[to + at[i]] = TAGGED == 3u ? tagged(value, y_tag) : floatBitsToUint(value);
    }
}

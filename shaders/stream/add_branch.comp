#version 460
#extension GL_GOOGLE_include_directive : require
// Adds the output of a mixer or an MLP to the residual stream, for models that scale or normalize it first:
//   b = scale · x[r]                                      NORM 0
//   b = scale · x[r] · rsqrt(mean x[r]² + eps) ⊙ norm     NORM 1
//   y[r] = (y[r] + b) · factor[0]
// With ADD 0, y[r] = b · factor[0]; with FACTOR 0, there is no factor.
//
// x, y  [rows][stride] f32; padding of x is zero. TAGGED 3: both are tagged (`tags.glsl`), and the width is a multiple of 4
// norm  [columns padded to 4] f32. factor [1] f32
// One workgroup processes one row, of which each invocation keeps QUADS times four values in registers. Traffic: 12
// bytes per value.
#extension GL_KHR_shader_subgroup_vote : require
#include "common.glsl"
#define DEVICES_ID 6
#include "tags.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 1;
layout(constant_id = 2) const uint ADD = 1;
layout(constant_id = 3) const uint FACTOR = 0;
layout(constant_id = 4) const uint QUADS = 1;
layout(constant_id = 5) const uint TAGGED = 0;

layout(push_constant) uniform Args {
    TaggedIn x;
    Floats4In norm;
    TaggedInOut y;
    FloatsIn factor;
    Fault fault;
    uint columns;
    uint x_stride;    // in floats, a multiple of 4, like y_stride
    uint y_stride;
    float epsilon;
    float scale;
    uint x_tag;
    uint old_tag;     // tag of y before the branch is added
    uint y_tag;
};

shared float partial[256];

void main() {
    uint row = gl_WorkGroupID.x, quads = (columns + 3u) / 4u, t = gl_LocalInvocationID.x;
    uint from = row * (x_stride / 4u), to = row * (y_stride / 4u);
    // An invocation without a value of its own loads the last one.
    uint at[QUADS];
    bool own[QUADS];
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        own[i] = i * gl_WorkGroupSize.x + t < quads;
        at[i] = min(i * gl_WorkGroupSize.x + t, quads - 1u);
    }
    uvec4 old[QUADS];
    vec4 scales[QUADS];
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        old[i] = ADD == 1u ? y.v[to + at[i]] : uvec4(0u);
        scales[i] = NORM == 1u ? norm.v[at[i]] : vec4(1.0);
    }
    uvec4 words[QUADS];
    uint polls = 0u, bad;
    do {
        bad = 0u;
        [[unroll]] for (uint i = 0u; i < QUADS; i++) words[i] = x.v[from + at[i]];
        if (TAGGED == 3u) {
            [[unroll]] for (uint i = 0u; i < QUADS; i++) bad |= stale(words[i], x_tag);
        }
    } while (poll_again(subgroupAny(bad != 0u), polls, fault, x_tag));
    float times = scale;
    if (NORM == 1u) {
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
        times *= inversesqrt(sum / float(columns) + epsilon);
    }
    if (TAGGED == 3u && ADD == 1u) {
        polls = 0u;
        while (true) {
            bad = 0u;
            // The last value's own invocation may have overwritten it.
            [[unroll]] for (uint i = 0u; i < QUADS; i++) bad |= own[i] ? stale(old[i], old_tag) : 0u;
            if (!poll_again(subgroupAny(bad != 0u), polls, fault, old_tag)) break;
            [[unroll]] for (uint i = 0u; i < QUADS; i++) old[i] = y.v[to + at[i]];
        }
    }
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        if (!own[i]) continue;
        vec4 value = uintBitsToFloat(words[i]) * times * scales[i] + uintBitsToFloat(old[i]);
        if (FACTOR == 1u) value *= factor.v[0];
        y.v[to + at[i]] = TAGGED == 3u ? tagged(value, y_tag) : floatBitsToUint(value);
    }
}

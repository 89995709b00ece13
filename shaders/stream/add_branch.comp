#version 460
#extension GL_GOOGLE_include_directive : require
// Adds the output of a mixer or an MLP to the residual stream, for models that scale or normalize it first:
//   b = x[r]                                    NORM 0
//   b = x[r] · rsqrt(mean x[r]² + eps) ⊙ norm   NORM 1
//   y[r] = (y[r] + scale · b) · factor[0]       FACTOR 0: without the factor
// With BESIDE 1, the outputs of two branches are normalized one by one, and then their sum:
//   b = n(n(x[r], norm) + n(beside[r], beside_norm), sum_norm)
//
// x, y, beside  [rows][stride] f32; padding of x and beside is zero. TAGGED 3: all are tagged (`tags.glsl`), and the width
//               is a multiple of 4
// norms         [columns padded to 4] f32. factor [1] f32
// One workgroup processes one row, of which each invocation keeps QUADS times four values in registers. Traffic: 12
// bytes per value, with BESIDE 1 16.
#include "common.glsl"
#define DEVICES_ID 6
#include "tags.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 1;
layout(constant_id = 2) const uint BESIDE = 0;
layout(constant_id = 3) const uint FACTOR = 0;
layout(constant_id = 4) const uint QUADS = 1;
layout(constant_id = 5) const uint TAGGED = 0;

layout(push_constant) uniform Args {
    TaggedIn x;
    TaggedIn beside;
    Floats4In norm;
    Floats4In beside_norm;
    Floats4In sum_norm;
    TaggedInOut y;
    FloatsIn factor;
    Fault fault;
    uint columns;
    uint x_stride;    // in floats, a multiple of 4, like y_stride; also the stride of beside
    uint y_stride;
    float epsilon;
    float scale;
    uint x_tag;
    uint beside_tag;
    uint old_tag;     // tag of y before the branch is added
    uint y_tag;
};

shared vec2 partial[256];

// Returns the sums of the pairs of all invocations.
vec2 sums_of(vec2 own) {
    own = subgroupAdd(own);
    if (subgroupElect()) partial[gl_SubgroupID] = own;
    barrier();
    vec2 sum = vec2(0.0);
    for (uint i = 0u; i < gl_NumSubgroups; i++) sum += partial[i];
    return sum;
}

void main() {
    uint row = gl_WorkGroupID.x, quads = (columns + 3u) / 4u, t = gl_LocalInvocationID.x;
    uint from = row * (x_stride / 4u), to = row * (y_stride / 4u);
    // An invocation without a value of its own loads the last one.
    uint at[QUADS];
    bool own[QUADS];
    uvec4 old[QUADS], words[QUADS], others[QUADS];
    vec4 weights[QUADS], other_weights[QUADS], sum_weights[QUADS];
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        own[i] = i * gl_WorkGroupSize.x + t < quads;
        at[i] = min(i * gl_WorkGroupSize.x + t, quads - 1u);
        old[i] = y.v[to + at[i]];
        weights[i] = NORM == 1u ? norm.v[at[i]] : vec4(1.0);
        other_weights[i] = BESIDE == 1u ? beside_norm.v[at[i]] : vec4(0.0);
        sum_weights[i] = BESIDE == 1u ? sum_norm.v[at[i]] : vec4(1.0);
    }
    uint polls = 0u, bad;
    do {
        bad = 0u;
        [[unroll]] for (uint i = 0u; i < QUADS; i++) words[i] = x.v[from + at[i]];
        [[unroll]] for (uint i = 0u; i < QUADS; i++) others[i] = BESIDE == 1u ? beside.v[from + at[i]] : uvec4(0u);
        if (TAGGED == 3u) {
            [[unroll]] for (uint i = 0u; i < QUADS; i++) bad |= stale(words[i], x_tag);
            if (BESIDE == 1u) [[unroll]] for (uint i = 0u; i < QUADS; i++) bad |= stale(others[i], beside_tag);
        }
    } while (poll_again(subgroupOr(bad) != 0u, polls, fault, x_tag));
    vec2 factors = vec2(1.0);
    if (NORM == 1u) {
        vec2 squares = vec2(0.0);
        [[unroll]] for (uint i = 0u; i < QUADS; i++) {
            vec4 value = uintBitsToFloat(words[i]), other = uintBitsToFloat(others[i]);
            if (own[i]) squares += vec2(dot(value, value), dot(other, other));
        }
        factors = inversesqrt(sums_of(squares) / float(columns) + epsilon);
    }
    vec4 branch[QUADS];
    float square = 0.0;
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        branch[i] = uintBitsToFloat(words[i]) * factors.x * weights[i];
        if (BESIDE == 1u) branch[i] += uintBitsToFloat(others[i]) * factors.y * other_weights[i];
        if (own[i]) square += dot(branch[i], branch[i]);
    }
    float times = scale;
    if (BESIDE == 1u) {
        // All invocations have read the first sums.
        barrier();
        times *= inversesqrt(sums_of(vec2(square, 0.0)).x / float(columns) + epsilon);
    }
    if (TAGGED == 3u) {
        polls = 0u;
        while (true) {
            bad = 0u;
            // The last value's own invocation may have overwritten it.
            [[unroll]] for (uint i = 0u; i < QUADS; i++) bad |= own[i] ? stale(old[i], old_tag) : 0u;
            if (!poll_again(subgroupOr(bad) != 0u, polls, fault, old_tag)) break;
            [[unroll]] for (uint i = 0u; i < QUADS; i++) old[i] = y.v[to + at[i]];
        }
    }
    [[unroll]] for (uint i = 0u; i < QUADS; i++) {
        if (!own[i]) continue;
        vec4 value = branch[i] * times * sum_weights[i] + uintBitsToFloat(old[i]);
        if (FACTOR == 1u) value *= factor.v[0];
        y.v[to + at[i]] = TAGGED == 3u ? tagged(value, y_tag) : floatBitsToUint(value);
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// Gated RMSNorm, part 3 of 3 of the gated delta rule for prefill (after `delta_scan`):
//   y = o · rsqrt(mean o² + ε) ⊙ norm ⊙ silu(z)    with the mean over a value head;    PLAIN 1: y = o ⊙ silu(z)
//
// o     [rows][value heads · value_dim] f32;  x [rows][stride] f32, which holds z from float Z on;  norm [value_dim]
// count the descriptor of the prompt step; word 2 is the number of rows in use
// y     [rows][y_stride] f32. PACKED 1: bfloat16 blocks as `pack_rows` writes them, `y_stride` in blocks of 32 columns;
//       PACKED 2: bfloat16 in the swizzled order of `pack_rows`, of `y_stride` rows. Packed rows beyond the last in use are
//       zero up to a multiple of 64
//
// One workgroup serves rows g and g + 8 of a block of 16 rows, and TOGETHER heads; an invocation computes a quad (four
// columns) of both rows.
// Traffic: o and z once, y once.
#include "common.glsl"
#include "delta.glsl"
// Only the rounding functions of `fragments.glsl` are used.
#define LANES 1
#include "fragments.glsl"
#include "swizzled.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint VALUE_HEADS = 32;
layout(constant_id = 2) const uint VALUE_DIM = 128;
layout(constant_id = 3) const uint TOGETHER = 8;   // heads; the workgroup has TOGETHER · VALUE_DIM / 4 invocations
layout(constant_id = 4) const uint Z = 8192;
layout(constant_id = 5) const uint PACKED = 0;
layout(constant_id = 6) const uint PLAIN = 0;

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In o;
    Floats4In x;
    Floats4In norm;
    WordsIn count;
    Words4Out y;
    uint stride;
    uint y_stride;
    float epsilon;
};

const uint QUADS = VALUE_DIM / 4u;

shared vec2 squares_s[QUADS * TOGETHER];

void main() {
    uint i0 = gl_LocalInvocationIndex, quad = i0 % QUADS, h = gl_WorkGroupID.x * TOGETHER + i0 / QUADS;
    uint low = gl_WorkGroupID.y / 8u * 16u + gl_WorkGroupID.y % 8u, high = low + 8u, used = count.v[2];
    // This returns for a workgroup as a whole. The last workgroup may have fewer heads.
    if (PACKED == 0u ? low >= used : low >= (used + 63u) / 64u * 64u) return;
    bool there = h < VALUE_HEADS;
    vec4 a = vec4(0.0), b = vec4(0.0), a_gate = vec4(0.0), b_gate = vec4(0.0);
    uint column = h * QUADS + quad;
    if (there && low < used) {
        a = o.v[low * VALUE_HEADS * QUADS + column];
        a_gate = x.v[low * (stride / 4u) + Z / 4u + column];
    }
    if (there && high < used) {
        b = o.v[high * VALUE_HEADS * QUADS + column];
        b_gate = x.v[high * (stride / 4u) + Z / 4u + column];
    }
    squares_s[i0] = vec2(dot(a, a), dot(b, b));
    barrier();
    vec2 squares = vec2(0.0);
    for (uint n = 0u; n < QUADS; n++) squares += squares_s[i0 / QUADS * QUADS + n];
    vec2 scale = inversesqrt(squares / float(VALUE_DIM) + epsilon);
    vec4 weight = vec4(1.0);
    if (PLAIN == 1u) scale = vec2(1.0);
    else weight = norm.v[quad];
    a *= scale.x * weight * silu(a_gate);
    b *= scale.y * weight * silu(b_gate);
    if (!there) return;
    if (PACKED == 0u) {
        if (low < used) y.v[low * (y_stride / 4u) + column] = floatBitsToUint(a);
        if (high < used) y.v[high * (y_stride / 4u) + column] = floatBitsToUint(b);
        return;
    }
    if (PACKED == 2u) {
        PUT_SWIZZLED(y, low, column, y_stride, uvec2(pack_pair(a.x, a.y), pack_pair(a.z, a.w)))
        PUT_SWIZZLED(y, high, column, y_stride, uvec2(pack_pair(b.x, b.y), pack_pair(b.z, b.w)))
        return;
    }
    uint word = ((low / 16u * y_stride + column / 8u) * 2u + column % 2u) * 32u + low % 8u * 4u + column % 8u / 2u;
    y.v[word] = uvec4(pack_pair(a.x, a.y), pack_pair(b.x, b.y), pack_pair(a.z, a.w), pack_pair(b.z, b.w));
}

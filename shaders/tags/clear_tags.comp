#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Buffer clear: zeroes up to ten buffers of tagged words (`tags.glsl`). It is the first call of a step whose
// activations are tagged, so that no word of an earlier step carries a tag that a reader of this step polls for.
//   a .. j  [words] uvec4; unused buffers have zero words
// The workgroup's y selects the buffer; an invocation writes 16 bytes of it. Traffic: every word is written once.

layout(local_size_x_id = 0) in;

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Words4Out a;
    Words4Out b;
    Words4Out c;
    Words4Out d;
    Words4Out e;
    Words4Out f;
    Words4Out g;
    Words4Out h;
    Words4Out i;
    Words4Out j;
    uint a_words;     // in units of 16 bytes, as all that follow
    uint b_words;
    uint c_words;
    uint d_words;
    uint e_words;
    uint f_words;
    uint g_words;
    uint h_words;
    uint i_words;
    uint j_words;
} args;

void main() {
    uint at = gl_GlobalInvocationID.x;
    switch (gl_WorkGroupID.y) {
        case 0u: if (at < args.a_words) args.a.v[at] = uvec4(0u); break;
        case 1u: if (at < args.b_words) args.b.v[at] = uvec4(0u); break;
        case 2u: if (at < args.c_words) args.c.v[at] = uvec4(0u); break;
        case 3u: if (at < args.d_words) args.d.v[at] = uvec4(0u); break;
        case 4u: if (at < args.e_words) args.e.v[at] = uvec4(0u); break;
        case 5u: if (at < args.f_words) args.f.v[at] = uvec4(0u); break;
        case 6u: if (at < args.g_words) args.g.v[at] = uvec4(0u); break;
        case 7u: if (at < args.h_words) args.h.v[at] = uvec4(0u); break;
        case 8u: if (at < args.i_words) args.i.v[at] = uvec4(0u); break;
        default: if (at < args.j_words) args.j.v[at] = uvec4(0u); break;
    }
}

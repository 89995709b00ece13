#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "deterministic.glsl"

// Partial argmax: partials[row][part] = the greatest logit of the part and the lowest token that has it.
//   logits   [rows][row_stride] f32, row_stride a multiple of 4
//   partials [rows][parts] of (f32 bits, token); NaN counts as -inf, as in `sample`
//   The first of the vocabulary's tokens is token `first`: a device may have the logits of a part of a larger one.
// One workgroup scans one part of one row, so that a greedy `sample` does not have to scan the vocabulary with a single
// workgroup. Traffic: 4·V bytes per row, where V is the vocabulary's size.

layout(local_size_x_id = 0) in;

layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer PartialsOut { uvec2 v[]; };

layout(push_constant) uniform Args {
    Floats4In logits;
    PartialsOut partials;
    uint vocabulary;
    uint row_stride;
    uint parts;
    uint first;
} args;

shared uint keys_s[256];
shared uint tokens_s[256];

const uint NO_TOKEN = 0xffffffffu;

void main() {
    uint row = gl_WorkGroupID.y, part = gl_WorkGroupID.x;
    uint quads = (args.vocabulary + 3u) / 4u;
    uint each = (quads + args.parts - 1u) / args.parts;
    uint end = min((part + 1u) * each, quads);
    uint key = 0u, token = NO_TOKEN;
    for (uint q = part * each + gl_LocalInvocationID.x; q < end; q += gl_WorkGroupSize.x) {
        vec4 l = args.logits.v[row * (args.row_stride / 4u) + q];
        [[unroll]] for (uint i = 0u; i < 4u; i++) {
            uint found = 4u * q + i < args.vocabulary ? key_of(l[i]) : 0u;
            // Tokens ascend, so that of equal keys the lowest token is kept.
            if (found > key) {
                key = found;
                token = args.first + 4u * q + i;
            }
        }
    }
    uint most = subgroupMax(key);
    token = subgroupMin(key == most ? token : NO_TOKEN);
    if (subgroupElect()) {
        keys_s[gl_SubgroupID] = most;
        tokens_s[gl_SubgroupID] = token;
    }
    barrier();
    if (gl_LocalInvocationID.x != 0u) return;
    for (uint i = 1u; i < gl_NumSubgroups; i++) {
        if (keys_s[i] > most || (keys_s[i] == most && tokens_s[i] < token)) {
            most = keys_s[i];
            token = tokens_s[i];
        }
    }
    // A part without tokens reports -inf and NO_TOKEN.
    args.partials.v[row * args.parts + part] = uvec2(most == 0u ? 0xff800000u : floatBitsToUint(value_of(most)), token);
}

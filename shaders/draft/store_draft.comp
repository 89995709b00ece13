#version 460
#extension GL_GOOGLE_include_directive : require
// slots[s].drafts[INDEX] = the token of the greatest logit of s's row, the lowest id on ties.
//
// partials  [rows][parts] of (f32 bits, token): `argmax`;  rows [rows] of token, position, slot, valid
// One thread a row; traffic 8 bytes a part.
#include "common.glsl"
#include "state.glsl"
#include "determinate.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint INDEX = 0;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer PartialsIn { uvec2 v[]; };

layout(push_constant) uniform Args {
    PartialsIn partials;
    Words4In rows;
    WordsInOut slots;
    uint row_count;
    uint parts;
};

void main() {
    uint row = gl_GlobalInvocationID.x;
    if (row >= row_count) return;
    uvec4 info = rows.v[row];
    if (info.w == 0u) return;
    uvec2 best = uvec2(0u, 0u);
    for (uint i = 0u; i < parts; i++) {
        uvec2 part = partials.v[row * parts + i];
        uint key = key_of(uintBitsToFloat(part.x));
        // Whatever a row without a number leaves, a draft is a token.
        if (part.y != TOKEN_NONE && (key > best.x || (key == best.x && part.y < best.y))) best = uvec2(key, part.y);
    }
    slots.v[info.z * SLOT_WORDS + SLOT_DRAFTS + INDEX] = best.y;
}

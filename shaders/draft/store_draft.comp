#version 460
#extension GL_GOOGLE_include_directive : require
// Speculative decoding: argmax of the draft logits. slots[s].drafts[INDEX] = the token with the greatest logit of the
// row of slot s, the lowest id on ties. With MAPPED 1, logits are of a vocabulary of their own, and the token is
// token_ids[the id with the greatest logit].
//
// partials   [rows][parts] of (f32 bits, token), from `argmax`;  rows [rows] of token, position, slot, valid
// token_ids  the tokens of that vocabulary, with MAPPED 1
// One invocation processes one row. Traffic: 8 bytes per part.
#include "common.glsl"
#include "state.glsl"
#include "deterministic.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint INDEX = 0;
layout(constant_id = 2) const uint MAPPED = 0;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer PartialsIn { uvec2 v[]; };

layout(push_constant) uniform Args {
    PartialsIn partials;
    Words4In rows;
    WordsInOut slots;
    WordsIn token_ids;
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
        // A draft is always a valid token id, even if no logit of the row is a number.
        if (part.y != TOKEN_NONE && (key > best.x || (key == best.x && part.y < best.y))) best = uvec2(key, part.y);
    }
    slots.v[info.z * SLOT_WORDS + SLOT_DRAFTS + INDEX] = MAPPED == 1u ? token_ids.v[best.y] : best.y;
}

#version 460
#extension GL_GOOGLE_include_directive : require
// Speculative decoding: writes the descriptor of a drafting pass over rows that the model has just computed. The token
// of each row is the one that follows it.
//
// rows   [ROWS] of token, position, slot, valid; the EACH rows of a sequence are consecutive
// slots  `state.glsl`: the token that follows a slot's last accepted row is the one drawn from it, which is at the
//        slot's position; the rows after it were rejected
// next   descriptor: `kernels::embed::ChunkLayout`, all but the cells; its last rows are those that a token was drawn
//        from
// STEP   0: describes all the rows. n > 0: describes one row per slot, at position SLOT_POSITION + n - 1, with the n-th
//        draft token as its token
// One workgroup writes everything. Traffic: a few hundred bytes.
#include "common.glsl"
#include "state.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1;
layout(constant_id = 2) const uint EACH = 1;
layout(constant_id = 3) const uint STEP = 0;

layout(push_constant) uniform Args {
    Words4In rows;
    WordsIn slots;
    WordsOut next;
    uint last_at;     // word offsets in the descriptor
    uint tokens_at;
};

void main() {
    for (uint row = gl_LocalInvocationID.x; row < ROWS; row += gl_WorkGroupSize.x) {
        uvec4 info = rows.v[row];
        uint index = row / EACH, at = info.w == 0u ? 0u : info.z * SLOT_WORDS;
        uint position = STEP == 0u ? info.y : slots.v[at + SLOT_POSITION] + STEP - 1u;
        if (row % EACH == 0u) {
            uint drawn = slots.v[at + SLOT_POSITION];
            // No tokens are drafted for a slot whose sequence has ended, or behind rows from which none was drawn because of a
            // fault: their hidden states may be anything.
            bool runs = info.w != 0u && slots.v[at + SLOT_ACTIVE] == ACTIVE_RUNNING && (STEP > 0u || drawn != info.y);
            next.v[4u + 4u * index] = runs ? info.z : 0xffffffffu;
            next.v[4u + 4u * index + 1u] = position;
            next.v[4u + 4u * index + 2u] = row;
            next.v[4u + 4u * index + 3u] = 0u;
            next.v[last_at + index] = row + (STEP == 0u && runs ? min(drawn - info.y, EACH) - 1u : 0u);
        }
        uint token = slots.v[at + SLOT_DRAFTS + max(STEP, 1u) - 1u];
        if (STEP == 0u) {
            token = slots.v[at + SLOT_TOKEN];
            if (position + 1u != slots.v[at + SLOT_POSITION]) token = rows.v[min(row + 1u, ROWS - 1u)].x;
        }
        next.v[tokens_at + row] = info.w == 0u ? 0u : token;
        if (row == 0u) {
            next.v[0] = ROWS / EACH;
            next.v[1] = ROWS / EACH;
            next.v[2] = ROWS;
            next.v[3] = 0u;
        }
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// Speculative decoding with a draft model: writes the descriptor of a pass of that model, whose keys and values are kept
// for all tokens up to the second last. With a slot's next token at position p:
//   STEP = 0: the tokens at p - 1 and p. The first of them was a draft of the step before, if all of its drafts were
//             accepted, and then has no keys and values yet; otherwise they are written again.
//   STEP > 0: the STEP-th draft token, at p + STEP
//
// slots         `state.glsl`: SLOT_TOKEN is the token at p, SLOT_POSITION is p
// batch         EACH = 0: [ROWS] u32, the sequences' slots
//               EACH > 0: [ROWS·EACH] of token, position, slot, valid: the first row of a sequence names its slot
// history       [slots][stride] u32: the tokens before p, from `note_tokens`
// next          descriptor: `kernels::embed::ChunkLayout`, all but the cells; its last rows are those that a token is
//               drafted from. With p = 0, the first row is that of p.
// A slot that is not running becomes a prompt without a slot.
// One workgroup writes everything. Traffic: a few hundred bytes.
#include "common.glsl"
#include "state.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1;      // sequences
layout(constant_id = 2) const uint STEP = 0;
layout(constant_id = 3) const uint EACH = 0;      // rows of a sequence, or 0

layout(push_constant) uniform Args {
    WordsIn slots;
    WordsIn batch;
    WordsIn history;
    WordsOut next;
    uint stride;      // positions of a slot
    uint last_at;     // word offsets in the descriptor
    uint tokens_at;
};

uint slot_of(uint index) {
    if (EACH == 0u) return batch.v[index];
    uint at = index * EACH * 4u;
    return batch.v[at + 3u] != 0u ? batch.v[at + 2u] : 0xffffffffu;
}

void main() {
    uint each = STEP == 0u ? 2u : 1u;
    for (uint row = gl_LocalInvocationID.x; row < ROWS * each; row += gl_WorkGroupSize.x) {
        uint index = row / each, offset = row % each, slot = slot_of(index);
        bool there = slot != 0xffffffffu;
        uint at = there ? slot * SLOT_WORDS : 0u;
        bool runs = there && slots.v[at + SLOT_ACTIVE] == ACTIVE_RUNNING;
        uint own = runs ? slots.v[at + SLOT_POSITION] : 0u;
        uint first = STEP == 0u ? max(own, 1u) - 1u : own + STEP;
        if (offset == 0u) {
            next.v[4u + 4u * index] = runs ? slot : 0xffffffffu;
            next.v[4u + 4u * index + 1u] = runs ? first : 0u;
            next.v[4u + 4u * index + 2u] = row;
            next.v[4u + 4u * index + 3u] = 0u;
            next.v[last_at + index] = row + (STEP == 0u ? own - first : 0u);
        }
        uint token = slots.v[at + (STEP == 0u ? SLOT_TOKEN : SLOT_DRAFTS + STEP - 1u)];
        if (runs && STEP == 0u && first + offset < own) token = history.v[slot * stride + first + offset];
        next.v[tokens_at + row] = runs ? token : 0u;
        if (row == 0u) {
            next.v[0] = ROWS;
            next.v[1] = ROWS;
            next.v[2] = ROWS * each;
            next.v[3] = 0u;
        }
    }
}

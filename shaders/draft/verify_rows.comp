#version 460
#extension GL_GOOGLE_include_directive : require
// Speculative decoding: writes the descriptor of a verification step. Each slot of the batch becomes a prompt of EACH
// rows: its next token and its draft tokens.
//
// slots, batch  `state.glsl`;  chunk  descriptor: `kernels::embed::ChunkLayout`, all but the cells
// A slot that is not running becomes a prompt without a slot. The descriptor has no last rows: a token may be drawn
// from every row.
// One workgroup writes everything. Traffic: a few hundred bytes.
#include "common.glsl"
#include "state.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1;      // slots of the batch
layout(constant_id = 2) const uint EACH = 2;      // rows per slot

layout(push_constant) uniform Args {
    WordsIn slots;
    WordsIn batch;
    WordsOut chunk;
    uint tokens_at;   // word offset in the descriptor
};

void main() {
    for (uint row = gl_LocalInvocationID.x; row < ROWS * EACH; row += gl_WorkGroupSize.x) {
        uint index = row / EACH, offset = row % EACH, slot = batch.v[index];
        bool there = slot != 0xffffffffu;
        uint at = there ? slot * SLOT_WORDS : 0u;
        bool runs = there && slots.v[at + SLOT_ACTIVE] == ACTIVE_RUNNING;
        if (offset == 0u) {
            chunk.v[4u + 4u * index] = runs ? slot : 0xffffffffu;
            chunk.v[4u + 4u * index + 1u] = runs ? slots.v[at + SLOT_POSITION] : 0u;
            chunk.v[4u + 4u * index + 2u] = row;
            chunk.v[4u + 4u * index + 3u] = 0u;
        }
        uint token = slots.v[at + (offset == 0u ? SLOT_TOKEN : SLOT_DRAFTS + offset - 1u)];
        chunk.v[tokens_at + row] = runs ? token : 0u;
        if (row == 0u) {
            chunk.v[0] = ROWS;
            chunk.v[1] = 0u;
            chunk.v[2] = ROWS * EACH;
            chunk.v[3] = 0u;
        }
    }
}

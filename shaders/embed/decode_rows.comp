#version 460
#extension GL_GOOGLE_include_directive : require
// Mixed steps: for each slot that decodes in a prompt step, writes start = position of the slot's next token and that token
// to the step's descriptor. A slot that is not running becomes a prompt without a slot.
//
// slots  `state.glsl`;  chunk  descriptor: `kernels::embed::ChunkLayout`, whose last prompts are those slots
// One workgroup writes everything. Traffic: a few hundred bytes.
#include "common.glsl"
#include "state.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    WordsIn slots;
    WordsInOut chunk;
    uint tokens_at;   // word offset in the descriptor
};

void main() {
    uint prompts = chunk.v[0], decoding = chunk.v[3];
    for (uint i = gl_LocalInvocationID.x; i < decoding; i += gl_WorkGroupSize.x) {
        uint prompt = 4u + 4u * (prompts - decoding + i);
        uint slot = chunk.v[prompt], row = chunk.v[prompt + 2u], at = slot * SLOT_WORDS;
        bool runs = slots.v[at + SLOT_ACTIVE] == ACTIVE_RUNNING;
        chunk.v[prompt] = runs ? slot : 0xffffffffu;
        chunk.v[prompt + 1u] = runs ? slots.v[at + SLOT_POSITION] : 0u;
        chunk.v[tokens_at + row] = runs ? slots.v[at + SLOT_TOKEN] : 0u;
    }
}

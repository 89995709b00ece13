#version 460
#extension GL_GOOGLE_include_directive : require
// Speculative decoding: writes the descriptor of a drafting pass over a prompt step. The token of each row is the one
// that follows it.
//
// chunk  descriptor of the prompt step: `kernels::embed::ChunkLayout`; the token that follows a prompt's last row is in
//        the prompt's cell words, unless it is still to be drawn
// next   the same descriptor with shifted tokens, without the cells
// One invocation writes one row. Traffic: 8 bytes per row.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    WordsIn chunk;
    WordsOut next;
    uint cells_at;    // word offsets in the descriptor
    uint last_at;
    uint tokens_at;
    uint rows;
};

void main() {
    uint row = gl_GlobalInvocationID.x, prompts = chunk.v[0], used = chunk.v[2];
    if (row < 4u) next.v[row] = chunk.v[row];
    for (uint word = row; word < 4u * prompts; word += rows) next.v[4u + word] = chunk.v[4u + word];
    for (uint last = row; last < chunk.v[1]; last += rows) next.v[last_at + last] = chunk.v[last_at + last];
    if (row >= used) return;
    uint low = 0u, high = prompts;
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        if (chunk.v[4u + 4u * middle + 2u] <= row) low = middle; else high = middle;
    }
    uint end = low + 1u < prompts ? chunk.v[4u + 4u * (low + 1u) + 2u] : used;
    next.v[tokens_at + row] = row + 1u < end ? chunk.v[tokens_at + row + 1u] : chunk.v[cells_at + 8u * low + 6u];
}

#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"

// Penalty counts of prompt tokens: enters the tokens of a prompt step in `counts`.
//   rows   [row_count][4] u32; state, counts: `state.glsl`
// For each valid row whose slot has penalties, it sets bit 31 of the token's count. Tokens at the slot's
// SLOT_PROMPT_TOKENS and later positions are outputs of a recomputed sequence: their counts are incremented instead. The
// row at the slot's SLOT_POSITION, which is 0 until a token is drawn, decodes in the step: its token has been counted.
// One invocation processes one row. Traffic: 16 bytes and one atomic operation per row.

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    Words4In rows;
    WordsIn state;
    WordsInOut counts;
    uint row_count;
    uint vocabulary;
} args;

void main() {
    uint row = gl_GlobalInvocationID.x;
    if (row >= args.row_count) return;
    uvec4 r = args.rows.v[row];
    uint at = r.z * SLOT_WORDS;
    if (r.w == 0u || r.x >= args.vocabulary) return;
    if ((args.state.v[at + SLOT_FLAGS] & FLAG_PENALTIES) == 0u) return;
    if (r.y != 0u && r.y == args.state.v[at + SLOT_POSITION]) return;
    uint where = r.z * args.vocabulary + r.x;
    if (r.y < args.state.v[at + SLOT_PROMPT_TOKENS]) atomicOr(args.counts.v[where], COUNT_PROMPT);
    else atomicAdd(args.counts.v[where], 1u);
}

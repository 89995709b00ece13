#version 460
#extension GL_GOOGLE_include_directive : require
// Prompt look-up: keeps the tokens of a step's rows by slot and position. history[slot][position] = token
//
// rows     [row_count] of token, position, slot, valid; rows that are not valid are left out
// history  [slots][stride] u32; positions behind the last one that was drawn may hold drafts that were rejected
// One invocation processes one row. Traffic: 20 bytes per row.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    Words4In rows;
    WordsOut history;
    uint row_count;
    uint stride;      // positions of a slot
};

void main() {
    uint row = gl_GlobalInvocationID.x;
    if (row >= row_count) return;
    uvec4 info = rows.v[row];
    if (info.w != 0u && info.y < stride) history.v[info.z * stride + info.y] = info.x;
}

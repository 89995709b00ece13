#version 460
#extension GL_GOOGLE_include_directive : require
// Row gather before the LM head: head_x[h] = x[last[h]] and head_rows[h] = rows[last[h]], where last[h] is the last row
// of the h-th prompt of the step from which a token is drawn. Rows beyond the number of such prompts are zero and
// belong to no slot.
//
// chunk  descriptor of the prompt step: `kernels::embed::ChunkLayout`
// x [rows][x_stride] f32; head_x [heads][x_stride] f32. An invocation copies one float of one row. Traffic: 8·H bytes
// per row, where H is x_stride.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    FloatsIn x;
    WordsIn rows;
    WordsIn chunk;
    FloatsOut head_x;
    WordsOut head_rows;
    uint x_stride;
    uint last_at;     // index of the descriptor's first last-row word
};

void main() {
    uint head = gl_WorkGroupID.y;
    bool used = head < chunk.v[1];
    uint row = used ? chunk.v[last_at + head] : 0u;
    uint i = gl_GlobalInvocationID.x;
    if (i < x_stride) head_x.v[head * x_stride + i] = used ? x.v[row * x_stride + i] : 0.0;
    if (i < 4u) head_rows.v[head * 4u + i] = used ? rows.v[row * 4u + i] : i == 2u ? 0xffffffffu : 0u;
}

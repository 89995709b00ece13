#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"
// Row gather before the LM head for prompt logprobs: head_x[h] = x[turn * heads + h], the next rows of a prompt chunk
// to be scored (`score.comp`). Rows beyond the chunk's end are zero.
//
// score  SCORE_TURN: `state.glsl`;  chunk  descriptor of the prompt step: `kernels::embed::ChunkLayout`
// x [rows][x_stride] f32; head_x [heads][x_stride] f32. An invocation copies one float of one row. Traffic: 8·H bytes
// per row, where H is x_stride.

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    FloatsIn x;
    WordsIn chunk;
    WordsIn score;
    FloatsOut head_x;
    uint x_stride;
} args;

void main() {
    uint head = gl_WorkGroupID.y;
    uint row = args.score.v[SCORE_TURN] * gl_NumWorkGroups.y + head;
    uint i = gl_GlobalInvocationID.x;
    if (i >= args.x_stride) return;
    args.head_x.v[head * args.x_stride + i] = row < args.chunk.v[2] ? args.x.v[row * args.x_stride + i] : 0.0;
}

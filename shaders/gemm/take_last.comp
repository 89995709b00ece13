#version 460
#extension GL_GOOGLE_include_directive : require
// head_x[0] = x[count - 1];  head_rows[0] = rows[count - 1]
//
// The last row of a prompt chunk goes on to the LM head.
// x [rows][x_stride] f32; head_x [x_stride] f32. Traffic 8·H bytes.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    FloatsIn x;
    WordsIn rows;
    WordsIn count;    // chunk descriptor; word 2 is the number of rows in use
    FloatsOut head_x;
    WordsOut head_rows;
    uint x_stride;
};

void main() {
    uint last = count.v[2] - 1u;
    uint i = gl_GlobalInvocationID.x;
    if (i < x_stride) head_x.v[i] = x.v[last * x_stride + i];
    if (i < 4u) head_rows.v[i] = rows.v[last * 4u + i];
}

#version 460
#extension GL_GOOGLE_include_directive : require
// MoE combine: adds the experts' outputs, weighted by their shares, to the residual.
//   x[r] += sum_j share(r, j) · parts[r][j] + gate(r) · shared[r]
//
// choices  [rows][CHOSEN + SHARED] of (expert, share as f32 bits), as `expert_choose` writes them
// parts    [rows][CHOSEN][parts_stride] f32: the output of each chosen expert for a row
// shared   [rows][shared_stride] f32: the output of the shared expert
// x        [rows][x_stride] f32, the residual
// Rows not below `count[2]` (the number of rows of the prompt step) and rows that chose NOBODY are left unchanged.
//
// One invocation computes four columns of a row. Traffic: CHOSEN + SHARED + 2 times 4 bytes per value.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint CHOSEN = 2;
layout(constant_id = 2) const uint SHARED = 0;
layout(constant_id = 3) const uint ROWS = 0;      // rows in use; 0: `count` holds the number

layout(buffer_reference, std430, buffer_reference_align = 8) readonly restrict buffer ChoicesIn { uvec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };

layout(push_constant) uniform Args {
    ChoicesIn choices;
    Floats4In parts;
    Floats4In shared_rows;
    Floats4InOut x;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    uint columns;     // a multiple of 4
    uint parts_stride; // in floats
    uint shared_stride;
    uint x_stride;
};

const uint NOBODY = 0xffffffffu;

void main() {
    uint used = ROWS != 0u ? ROWS : count.v[2];
    uint row = gl_WorkGroupID.y, quad = gl_WorkGroupID.x * gl_WorkGroupSize.x + gl_LocalInvocationIndex;
    if (row >= used || quad >= columns / 4u) return;
    uint first = row * (CHOSEN + SHARED);
    if (choices.v[first].x == NOBODY) return;
    vec4 sum = x.v[row * (x_stride / 4u) + quad];
    [[unroll]] for (uint j = 0u; j < CHOSEN; j++)
        sum += uintBitsToFloat(choices.v[first + j].y) * parts.v[(row * CHOSEN + j) * (parts_stride / 4u) + quad];
    if (SHARED == 1u) sum += uintBitsToFloat(choices.v[first + CHOSEN].y) * shared_rows.v[row * (shared_stride / 4u) + quad];
    x.v[row * (x_stride / 4u) + quad] = sum;
}

#version 460
#extension GL_GOOGLE_include_directive : require
// Sums of normed rows, from which the vectors of embedded prompts are computed:
//   pooled[first + p] = norm ⊙ Σ x[r] · scales[r]    for the rows r of run p
//
// pool    {number of runs, first output}, then {first row, number of rows} of each run: `kernels::stream::pool_words`
// x       [rows][x_stride] f32; scales [rows] f32 (`row_scales`); norm [columns] f32; pooled [outputs][pooled_stride] f32
// An invocation sums one column of one run, in the order of the rows. Traffic: 4 bytes per value of a pooled row.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    FloatsIn x;
    FloatsIn scales;
    FloatsIn norm;
    WordsIn pool;
    FloatsOut pooled;
    uint columns;
    uint x_stride;       // in floats
    uint pooled_stride;  // in floats
};

void main() {
    uint run = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (run >= pool.v[0] || i >= columns) return;
    uint from = pool.v[2u + 2u * run], count = pool.v[3u + 2u * run];
    float sum = 0.0;
    for (uint row = from; row < from + count; row++) sum += x.v[row * x_stride + i] * scales.v[row];
    pooled.v[(pool.v[1] + run) * pooled_stride + i] = sum * norm.v[i];
}

#version 460
#extension GL_GOOGLE_include_directive : require
// Factors of the RMS norm of a prompt step's rows, for `pool_rows`:
//   scales[r] = rsqrt(mean x[r]² + eps)
//
// chunk   descriptor of the prompt step: `kernels::embed::ChunkLayout`
// x       [rows][x_stride] f32; scales [rows] f32
// One workgroup processes one row; those of rows that the step does not have write nothing. Traffic: 4 bytes per value.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    FloatsIn x;
    WordsIn chunk;
    FloatsOut scales;
    uint columns;
    uint x_stride;    // in floats
    float epsilon;
};

shared float partial[256];

void main() {
    uint row = gl_WorkGroupID.x, t = gl_LocalInvocationID.x;
    if (row >= chunk.v[2]) return;
    float square = 0.0;
    for (uint i = t; i < columns; i += gl_WorkGroupSize.x) {
        float value = x.v[row * x_stride + i];
        square += value * value;
    }
    square = subgroupAdd(square);
    if (subgroupElect()) partial[gl_SubgroupID] = square;
    barrier();
    if (t != 0u) return;
    float sum = 0.0;
    for (uint i = 0u; i < gl_NumSubgroups; i++) sum += partial[i];
    scales.v[row] = inversesqrt(sum / float(columns) + epsilon);
}

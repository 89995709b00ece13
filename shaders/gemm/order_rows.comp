#version 460
#extension GL_GOOGLE_include_directive : require
// Rows in another order of columns, with an optional RMSNorm: y[r][j] = prologue(x[r])[order[j]], for weights whose groups
// are not of adjacent columns of the checkpoint (act-order).
//
// prologue   NORM 0: x. NORM 1: x ⊙ norm · rsqrt(mean x² + eps)
// x          [rows][x_stride] f32, of which k columns are real;  norm [k]
// order      [y_stride]; the places from k on are their own
// y          [rows][y_stride] f32; columns from k on are zero
//
// One workgroup produces one row. Traffic: x once (twice with NORM, the second time from a cache), the order once a row,
// y once.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 0;

layout(push_constant) uniform Args {
    FloatsIn x;
    FloatsIn norm;
    WordsIn order;
    FloatsOut y;
    uint k;           // columns without padding; the divisor of the mean
    uint x_stride;    // in floats
    uint y_stride;    // in floats
    float epsilon;
};

// The sums of squares per subgroup.
shared float partial[256];

void main() {
    uint row = gl_WorkGroupID.x, x_at = row * x_stride, y_at = row * y_stride;
    float scale = 1.0;
    if (NORM == 1u) {
        float square = 0.0;
        for (uint i = gl_LocalInvocationID.x; i < k; i += gl_WorkGroupSize.x) {
            float v = x.v[x_at + i];
            square += v * v;
        }
        square = subgroupAdd(square);
        if (gl_NumSubgroups > 1u) {
            if (subgroupElect()) partial[gl_SubgroupID] = square;
            barrier();
            square = 0.0;
            for (uint i = 0u; i < gl_NumSubgroups; i++) square += partial[i];
        }
        scale = inversesqrt(square / float(k) + epsilon);
    }
    for (uint j = gl_LocalInvocationID.x; j < y_stride; j += gl_WorkGroupSize.x) {
        uint from = order.v[j];
        float v = 0.0;
        if (j < k) {
            v = x.v[x_at + from];
            if (NORM == 1u) v *= norm.v[from] * scale;
        }
        y.v[y_at + j] = v;
    }
}

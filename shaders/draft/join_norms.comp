#version 460
#extension GL_GOOGLE_include_directive : require
// Speculative decoding: input of the draft (MTP) block's projection, the concatenation of two normalized vectors:
//   y[r] = [ rms(e[r]) ⊙ e_norm ; rms( rms(h[r]) ⊙ final_norm ) ⊙ h_norm ],  rms(x) = x / sqrt(mean x² + epsilon)
//
// e, h  [rows][stride] f32: the embeddings, and the model's hidden states before its final norm;  norms f32 [width]
// y     [rows][y_stride] f32, 2 · width columns
// One workgroup computes a row. Traffic: 24 bytes per column.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    FloatsIn e;
    FloatsIn h;
    FloatsIn e_norm;
    FloatsIn final_norm;
    FloatsIn h_norm;
    FloatsOut y;
    uint width;
    uint stride;
    uint y_stride;
    float epsilon;
};

shared vec3 partial[256];

// Returns the sums over the workgroup.
vec3 sum(vec3 own) {
    own = subgroupAdd(own);
    barrier();
    if (subgroupElect()) partial[gl_SubgroupID] = own;
    barrier();
    vec3 all = vec3(0.0);
    for (uint i = 0u; i < gl_NumSubgroups; i++) all += partial[i];
    return all;
}

void main() {
    uint row = gl_WorkGroupID.x, first = gl_LocalInvocationID.x, turns = (width + gl_WorkGroupSize.x - 1u) / gl_WorkGroupSize.x;
    vec3 squares = vec3(0.0);
    for (uint turn = 0u; turn < turns; turn++) {
        uint i = turn * gl_WorkGroupSize.x + first;
        float a = i < width ? e.v[row * stride + i] : 0.0, b = i < width ? h.v[row * stride + i] : 0.0;
        float w = i < width ? final_norm.v[i] : 0.0;
        squares += vec3(a * a, b * b, b * w * (b * w));
    }
    squares = sum(squares) / float(width);
    float e_scale = inversesqrt(squares.x + epsilon), h_scale = inversesqrt(squares.y + epsilon);
    // The mean square of the second norm's input follows from the sums of the first norm: it is mean (b·w)² · h_scale².
    h_scale *= inversesqrt(squares.z * h_scale * h_scale + epsilon);
    for (uint i = first; i < width; i += gl_WorkGroupSize.x) {
        y.v[row * y_stride + i] = e.v[row * stride + i] * e_scale * e_norm.v[i];
        y.v[row * y_stride + width + i] = h.v[row * stride + i] * final_norm.v[i] * h_scale * h_norm.v[i];
    }
}

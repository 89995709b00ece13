#version 460
#extension GL_GOOGLE_include_directive : require
// y[r] = [ rms(e[r]) ⊙ e_norm ; rms( rms(h[r]) ⊙ final_norm ) ⊙ h_norm ]: what a drafting block's projection takes.
//
// e, h  [rows][stride] f32: embeddings, and the model's rows before its final norm;  norms f32 [width]
// y     [rows][y_stride] f32, 2 · width columns; rms(x) = x / sqrt(mean x² + epsilon)
// One workgroup does a row. Traffic 24 bytes a column.
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

// Over the workgroup.
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
    // The second norm's mean square is the first's product's.
    h_scale *= inversesqrt(squares.z * h_scale * h_scale + epsilon);
    for (uint i = first; i < width; i += gl_WorkGroupSize.x) {
        y.v[row * y_stride + i] = e.v[row * stride + i] * e_scale * e_norm.v[i];
        y.v[row * y_stride + width + i] = h.v[row * stride + i] * final_norm.v[i] * h_scale * h_norm.v[i];
    }
}

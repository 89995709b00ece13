#version 460
#extension GL_GOOGLE_include_directive : require
// Tiled GEMM on row-major weights, without matrix units, for many rows (prefill): y[r] = epilogue(
// W · prologue(x[r]) ). The prologue, epilogue and formats are those of `gemv.comp`.
//
// weight [N][chunks·8] in the variant's format; x [rows][x_stride] f32; y [rows][y_stride] f32
// One workgroup of 256 invocations computes a tile of 64 rows of x by 64 rows of W. Per iteration, 16 columns of both
// are staged in shared memory; each invocation accumulates 4 × 4 sums. Tiles whose first row is not below `count[2]`
// (the number of rows of the prompt step) return at once.
// Traffic: x is read N/64 times, W rows/64 times.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 0) const uint NORM = 0;
layout(constant_id = 1) const uint BIAS = 0;
layout(constant_id = 2) const uint EPILOGUE = 0;
#if WEIGHT == 3
layout(constant_id = 3) const uint CODES = 0x5024; // the weights' format
#include "codes.glsl"
#endif

layout(push_constant) uniform Args {
    Words4In weight;
    Floats4In x;
    Floats4In norm;
    FloatsIn bias;
    FloatsInOut y;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    uint n;
    uint k;
    uint chunks;
    uint x_stride;
    uint y_stride;
    float epsilon;
};

const uint TILE = 64u;
const uint STEP = 16u;
shared float xs[STEP][TILE + 4u];
shared float ws[STEP][TILE + 4u];
shared float squares[TILE][2];

void main() {
    uint rows = count.v[2];
    uint m0 = gl_WorkGroupID.y * TILE;
    uint n0 = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * TILE;
    if (m0 >= rows || n0 >= n) return;
    uint t = gl_LocalInvocationID.x;
    // The first 128 invocations stage x, the others W: each stages one row's half of the 16 columns.
    uint stage_row = (t & 127u) >> 1u, stage_half = t & 1u;
    bool stages_x = t < 128u;
    uint xr = min(m0 + stage_row, rows - 1u), wr = min(n0 + stage_row, n - 1u);
    float square = 0.0;
    uint tm = (t & 15u) * 4u, tn = (t >> 4u) * 4u;
    vec4 acc[4];
    acc[0] = acc[1] = acc[2] = acc[3] = vec4(0.0);
    for (uint c0 = 0u; c0 < chunks; c0 += 2u) {
        uint c = c0 + stage_half;
        vec4 a = vec4(0.0), b = vec4(0.0);
        if (c < chunks) {
            if (stages_x) {
                a = x.v[xr * x_stride / 4u + c * 2u];
                b = x.v[xr * x_stride / 4u + c * 2u + 1u];
                if (NORM == 1u) {
                    square += dot(a, a) + dot(b, b);
                    a *= norm.v[c * 2u];
                    b *= norm.v[c * 2u + 1u];
                }
            } else {
#if WEIGHT == 3
                load_codes8(weight, wr, c, chunks, a, b);
#elif WEIGHT == 2
                a = uintBitsToFloat(weight.v[(wr * chunks + c) * 2u]);
                b = uintBitsToFloat(weight.v[(wr * chunks + c) * 2u + 1u]);
#else
                unpack8(weight.v[wr * chunks + c], a, b);
#endif
            }
        }
        barrier();
        uint s = stage_half * 8u;
        if (stages_x) {
            [[unroll]] for (uint i = 0u; i < 4u; i++) {
                xs[s + i][stage_row] = a[i];
                xs[s + 4u + i][stage_row] = b[i];
            }
        } else {
            [[unroll]] for (uint i = 0u; i < 4u; i++) {
                ws[s + i][stage_row] = a[i];
                ws[s + 4u + i][stage_row] = b[i];
            }
        }
        barrier();
        [[unroll]] for (uint i = 0u; i < STEP; i++) {
            vec4 wv = vec4(ws[i][tn], ws[i][tn + 1u], ws[i][tn + 2u], ws[i][tn + 3u]);
            [[unroll]] for (uint j = 0u; j < 4u; j++) acc[j] += xs[i][tm + j] * wv;
        }
    }
    if (NORM == 1u) {
        if (stages_x) squares[stage_row][stage_half] = square;
        barrier();
    }
    for (uint j = 0u; j < 4u; j++) {
        uint row = m0 + tm + j;
        if (row >= rows) continue;
        float scale = 1.0;
        if (NORM == 1u) scale = inversesqrt((squares[tm + j][0] + squares[tm + j][1]) / float(k) + epsilon);
        vec4 v = acc[j] * scale;
        uint yo = row * y_stride;
        if (BIAS == 1u) {
            for (uint i = 0u; i < 4u; i++)
                if (n0 + tn + i < n) v[i] += bias.v[n0 + tn + i];
        }
        if (EPILOGUE >= 2u) {
            for (uint i = 0u; i < 4u; i += 2u)
                if (n0 + tn + i < n) y.v[yo + (n0 + tn + i) / 2u] = glu(EPILOGUE, v[i], v[i + 1u]);
        } else {
            for (uint i = 0u; i < 4u; i++) {
                if (n0 + tn + i >= n) continue;
                if (EPILOGUE == 1u) y.v[yo + n0 + tn + i] += v[i];
                else y.v[yo + n0 + tn + i] = v[i];
            }
        }
    }
}

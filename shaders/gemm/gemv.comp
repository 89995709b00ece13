#version 460
#extension GL_GOOGLE_include_directive : require
// GEMV on row-major weights, for one or a few rows of x: y[r] = epilogue( W · prologue(x[r]) ).
//
// prologue   NORM 0: x. NORM 1 (RMSNorm): x ⊙ norm, and the epilogue scales the product by rsqrt(mean x² + eps), so
//            that the norm needs no dispatch of its own
// epilogue   0 store: y = s·Wx + b. 1 residual: y += s·Wx + b. 2 SwiGLU: the rows of W alternate gate and up;
//            y[n/2] = glu(gate, up). s is the norm's scale, 1 without NORM
// weight     [N][chunks·8] in the variant's format (codes: `codes.glsl`);  x [rows][x_stride] f32;  y [rows][y_stride] f32
//
// One workgroup computes ROWS rows of W (2 or 4) for one row of x. All its invocations split K: per iteration, an
// invocation loads 16 bytes of each W row (512 contiguous bytes per subgroup of 32; twice as much in f32). x is read
// directly from global memory, through the L1 cache. The values that the epilogue adds to are loaded before the product
// is summed.
// Traffic: W once per row of x (2·N·K bytes in a 16-bit format); x from the L1 cache.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint ROWS = 2;
#if WEIGHT == 3
layout(constant_id = 5) const uint CODES = 0x5024; // the weights' format
#include "codes.glsl"
#endif

layout(push_constant) uniform Args {
    Words4In weight;
    Floats4In x;
    Floats4In norm;
    FloatsIn bias;
    FloatsInOut y;
    uint n;           // rows of W
    uint k;           // columns of W and x without padding; the divisor of the mean
    uint chunks;      // 8-value chunks of a padded row of W
    uint x_stride;    // in floats
    uint y_stride;    // in floats
    float epsilon;
};

// The sums of each subgroup: ROWS products, then the squares of x.
shared float partial[256u * (ROWS + 1u)];

void main() {
    uint row = gl_WorkGroupID.y;
    uint block = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint first = block * ROWS;
    if (first >= n) return;
    uint t = gl_LocalInvocationID.x;
    uint xo = row * x_stride / 4u;
    uint yo = row * y_stride;

    uint base[ROWS];
    float acc[ROWS], added[ROWS];
    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        uint weight_row = min(first + r, n - 1u);
        base[r] = weight_row * chunks;
        acc[r] = 0.0;
        added[r] = EPILOGUE == 1u ? y.v[yo + weight_row] : 0.0;
        if (BIAS == 1u) added[r] += bias.v[weight_row];
    }
    float square = 0.0;
    for (uint c = t; c < chunks; c += gl_WorkGroupSize.x) {
        vec4 xa = x.v[xo + c * 2u], xb = x.v[xo + c * 2u + 1u];
#if WEIGHT < 2
        uvec4 w[ROWS];
        [[unroll]] for (uint r = 0u; r < ROWS; r++) w[r] = weight.v[base[r] + c];
#endif
        if (NORM == 1u) {
            square += dot(xa, xa) + dot(xb, xb);
            xa *= norm.v[c * 2u];
            xb *= norm.v[c * 2u + 1u];
        }
        [[unroll]] for (uint r = 0u; r < ROWS; r++) {
            vec4 a, b;
#if WEIGHT == 3
            load_codes8(weight, min(first + r, n - 1u), c, chunks, a, b);
#elif WEIGHT == 2
            a = uintBitsToFloat(weight.v[(base[r] + c) * 2u]);
            b = uintBitsToFloat(weight.v[(base[r] + c) * 2u + 1u]);
#else
            unpack8(w[r], a, b);
#endif
            acc[r] += dot(a, xa) + dot(b, xb);
        }
    }

    [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[r] = subgroupAdd(acc[r]);
    if (NORM == 1u) square = subgroupAdd(square);
    if (gl_NumSubgroups > 1u) {
        if (subgroupElect()) {
            [[unroll]] for (uint r = 0u; r < ROWS; r++) partial[gl_SubgroupID * (ROWS + 1u) + r] = acc[r];
            partial[gl_SubgroupID * (ROWS + 1u) + ROWS] = square;
        }
        barrier();
        if (t != 0u) return;
        for (uint i = 1u; i < gl_NumSubgroups; i++) {
            [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[r] += partial[i * (ROWS + 1u) + r];
            square += partial[i * (ROWS + 1u) + ROWS];
        }
    } else if (t != 0u) {
        return;
    }
    float scale = NORM == 1u ? inversesqrt(square / float(k) + epsilon) : 1.0;
    [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[r] = acc[r] * scale + added[r];
    if (EPILOGUE >= 2u) {
        [[unroll]] for (uint r = 0u; r < ROWS; r += 2u)
            if (first + r < n) y.v[yo + (first + r) / 2u] = glu(EPILOGUE, acc[r], acc[r + 1u]);
    } else {
        [[unroll]] for (uint r = 0u; r < ROWS; r++)
            if (first + r < n) y.v[yo + first + r] = acc[r];
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// GEMV on row-major weights, for one or a few rows of x, which share each load of W: y[r] = epilogue( W · prologue(x[r]) ).
//
// prologue   NORM 0: x. NORM 1 (RMSNorm): x ⊙ norm, and the epilogue scales the product by rsqrt(mean x² + eps), so
//            that the norm needs no dispatch of its own
// epilogue   0 store: y = s·Wx + b. 1 residual: y += s·Wx + b. 2 and more: a gated linear unit: the rows of W alternate gate and
//            up; y[n/2] = glu(gate, up); or squared ReLU: y = max(s·Wx + b, 0)² (`glu.glsl`). s is the norm's scale, 1
//            without NORM
// weight     [N][chunks·8] in the variant's format (codes: `codes.glsl`);  x [rows][x_stride] f32;  y [rows][y_stride] f32
//
// One workgroup computes ROWS rows of W (an even number) for BATCH rows of x. All its invocations split K: per iteration,
// an invocation loads 16 bytes of each W row (512 contiguous bytes per subgroup of 32; twice as much in f32) and
// multiplies them with all BATCH rows. x is read directly from global memory, through the L1 cache. Of codes, an invocation
// loads eight columns of each W row at a time, for one row of x those of AHEAD iterations. The values that the epilogue adds to
// are loaded before the product is summed. A row's sums do not depend on BATCH. Workgroups with the same
// rows of W are neighbours.
// Traffic: W once per BATCH rows of x (2·N·K bytes in a 16-bit format; the next BATCH rows find it in the L2 cache);
// x from the L1 cache, N/ROWS times.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint ROWS = 2;
layout(constant_id = 5) const uint BATCH = 1;
layout(constant_id = 6) const uint LANES = 64;  // the workgroup's size, at least BATCH · ROWS / 2
#if WEIGHT == 3
layout(constant_id = 7) const uint CODES = 0x5024; // the weights' format
#include "codes.glsl"
// Iterations whose codes are loaded at a time.
const uint AHEAD = BATCH == 1u ? 2u : 1u;
#endif

#include "gemv_args.glsl"

// The sums of each subgroup, which has at least four invocations: for each row of x its ROWS products and its squares.
const uint SUMS = BATCH * (ROWS + 1u);
const uint PAIRS = BATCH * (ROWS / 2u);
shared float partial[(LANES + 3u) / 4u * SUMS];

void main() {
    uint batches = (rows + BATCH - 1u) / BATCH;
    uint group = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint first = group / batches * ROWS, from = group % batches * BATCH;
    if (first >= n) return;
    uint t = gl_LocalInvocationID.x;

    // The first invocations finish two neighbouring rows of W for one row of x each.
    uint own_row = from + t / (ROWS / 2u), own_first = first + t % (ROWS / 2u) * 2u;
    bool finishes = t < PAIRS && own_row < rows && own_first < n;
    uint own_y = min(own_row, rows - 1u) * y_stride;
    vec2 added = vec2(0.0);
    [[unroll]] for (uint i = 0u; i < 2u; i++) {
        uint weight_row = min(own_first + i, n - 1u);
        if (EPILOGUE == 1u) added[i] = y.v[own_y + weight_row];
        if (BIAS == 1u) added[i] += bias.v[weight_row];
    }

    uint base[ROWS], xo[BATCH];
    float acc[BATCH * ROWS], square[BATCH];
    [[unroll]] for (uint r = 0u; r < ROWS; r++) base[r] = min(first + r, n - 1u) * chunks;
    [[unroll]] for (uint b = 0u; b < BATCH; b++) {
        xo[b] = min(from + b, rows - 1u) * (x_stride / 4u);
        square[b] = 0.0;
        [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[b * ROWS + r] = 0.0;
    }
#if WEIGHT == 3
    uint word[ROWS];
    [[unroll]] for (uint r = 0u; r < ROWS; r++) word[r] = row_word(min(first + r, n - 1u), chunks);
    for (uint begin = t; begin < chunks; begin += AHEAD * LANES) {
        Chunk w[AHEAD * ROWS];
        [[unroll]] for (uint i = 0u; i < AHEAD; i++) {
            uint c = min(begin + i * LANES, chunks - 1u);
            [[unroll]] for (uint r = 0u; r < ROWS; r++) w[i * ROWS + r] = load_chunk(weight, word[r], c, chunks);
        }
        [[unroll]] for (uint i = 0u; i < AHEAD; i++) {
            uint c = begin + i * LANES;
            if (c >= chunks) break;
            vec4 wa[ROWS], wb[ROWS];
            [[unroll]] for (uint r = 0u; r < ROWS; r++) numbers_of(w[i * ROWS + r], wa[r], wb[r]);
            vec4 norm_a = NORM == 1u ? norm.v[c * 2u] : vec4(1.0), norm_b = NORM == 1u ? norm.v[c * 2u + 1u] : vec4(1.0);
            [[unroll]] for (uint b = 0u; b < BATCH; b++) {
                vec4 xa = x.v[xo[b] + c * 2u], xb = x.v[xo[b] + c * 2u + 1u];
                if (NORM == 1u) {
                    square[b] += dot(xa, xa) + dot(xb, xb);
                    xa *= norm_a;
                    xb *= norm_b;
                }
                float of_ones = dot(xa + xb, vec4(1.0));
                [[unroll]] for (uint r = 0u; r < ROWS; r++)
                    acc[b * ROWS + r] += scaled(w[i * ROWS + r], dot(wa[r], xa) + dot(wb[r], xb), of_ones);
            }
        }
    }
    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        float factor = uintBitsToFloat(CODE_WORD(weight, word[r]));
        [[unroll]] for (uint b = 0u; b < BATCH; b++) acc[b * ROWS + r] *= factor;
    }
#else
    for (uint c = t; c < chunks; c += LANES) {
#if WEIGHT < 2
        uvec4 w[ROWS];
        [[unroll]] for (uint r = 0u; r < ROWS; r++) w[r] = weight.v[base[r] + c];
#endif
        vec4 norm_a = vec4(1.0), norm_b = vec4(1.0);
        if (NORM == 1u) {
            norm_a = norm.v[c * 2u];
            norm_b = norm.v[c * 2u + 1u];
        }
        vec4 wa[ROWS], wb[ROWS];
        [[unroll]] for (uint r = 0u; r < ROWS; r++) {
#if WEIGHT == 2
            wa[r] = uintBitsToFloat(weight.v[(base[r] + c) * 2u]);
            wb[r] = uintBitsToFloat(weight.v[(base[r] + c) * 2u + 1u]);
#else
            unpack8(w[r], wa[r], wb[r]);
#endif
        }
        [[unroll]] for (uint b = 0u; b < BATCH; b++) {
            vec4 xa = x.v[xo[b] + c * 2u], xb = x.v[xo[b] + c * 2u + 1u];
            if (NORM == 1u) {
                square[b] += dot(xa, xa) + dot(xb, xb);
                xa *= norm_a;
                xb *= norm_b;
            }
            [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[b * ROWS + r] += dot(wa[r], xa) + dot(wb[r], xb);
        }
    }
#endif

    [[unroll]] for (uint b = 0u; b < BATCH; b++) {
        [[unroll]] for (uint r = 0u; r < ROWS; r++) {
            float sum = subgroupAdd(acc[b * ROWS + r]);
            if (subgroupElect()) partial[gl_SubgroupID * SUMS + b * (ROWS + 1u) + r] = sum;
        }
        if (NORM == 1u) {
            float sum = subgroupAdd(square[b]);
            if (subgroupElect()) partial[gl_SubgroupID * SUMS + b * (ROWS + 1u) + ROWS] = sum;
        }
    }
    barrier();
    if (!finishes) return;
    uint at = t / (ROWS / 2u) * (ROWS + 1u), pair = t % (ROWS / 2u) * 2u;
    vec2 v = vec2(0.0);
    float squares = 0.0;
    for (uint i = 0u; i < gl_NumSubgroups; i++) {
        v += vec2(partial[i * SUMS + at + pair], partial[i * SUMS + at + pair + 1u]);
        if (NORM == 1u) squares += partial[i * SUMS + at + ROWS];
    }
    float scale = NORM == 1u ? inversesqrt(squares / float(k) + epsilon) : 1.0;
    v = v * scale + added;
    if (IS_GATED(EPILOGUE)) {
        y.v[own_y + own_first / 2u] = glu(EPILOGUE, v.x, v.y);
    } else {
        v = ACTIVATED(EPILOGUE, v);
        y.v[own_y + own_first] = v.x;
        if (own_first + 1u < n) y.v[own_y + own_first + 1u] = v.y;
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// GEMV on row-major weights of affine codes by integer dot products: y[r] = epilogue( W · prologue(x[r]) ), for devices with
// instructions for dot products of four 8-bit integers.
//
// prologue   NORM 0: x. NORM 1 (RMSNorm): x ⊙ norm, and the epilogue scales the product by rsqrt(mean x² + eps). Then x is
//            rounded to integers of 16 bits with a factor for each 32 columns (`code_dots.glsl`)
// epilogue   that of `gemv`
// weight     [N][chunks·8] codes (`codes.glsl`);  x [rows][x_stride] f32;  y [rows][y_stride] f32
//
// A workgroup has LANES / SPANS groups of invocations, each of which computes ROWS rows of W for one row of x. It takes the
// columns in parts of SPANS times 32. For each part, an invocation loads 32 columns of its group's rows of W; the first group
// writes x as integers to shared memory, which all groups multiply then. Workgroups with the same rows of W are neighbours.
// Traffic: W once per row of x; x from the caches, N / (ROWS · LANES / SPANS) times.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint ROWS = 2;     // an even number
layout(constant_id = 5) const uint LANES = 256;  // the workgroup's size, a multiple of SPANS
layout(constant_id = 6) const uint SPANS = 64;   // invocations of a group, a multiple of the subgroups' size
layout(constant_id = 7) const uint CODES = 0x5024;
#include "codes.glsl"

#include "gemv_args.glsl"

#include "code_dots.glsl"

const uint GROUPS = LANES / SPANS;
const uint PAIRS = GROUPS * ROWS / 2u;
// The sums of each subgroup, which has at least four invocations: its group's products, and the squares of x.
const uint SUMS = ROWS + 1u;
shared float partial_s[(LANES + 3u) / 4u * SUMS];

void main() {
    uint workgroup = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint first = workgroup / rows * (GROUPS * ROWS), own = workgroup % rows;
    if (first >= n) return;
    uint t = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID, lane = t % SPANS, group = t / SPANS;

    uint word[ROWS];
    float acc[ROWS], square = 0.0;
    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        word[r] = row_word(min(first + group * ROWS + r, n - 1u), chunks);
        acc[r] = 0.0;
    }

    uint spans = (chunks + 3u) / 4u;
    for (uint begin = 0u; begin < spans; begin += SPANS) {
        uint s = min(begin + lane, spans - 1u);
        Span w[ROWS];
        [[unroll]] for (uint r = 0u; r < ROWS; r++) w[r] = load_span(weight, word[r], s, chunks);
        if (group == 0u) {
            vec4 xs[8];
            [[unroll]] for (uint i = 0u; i < 8u; i++) {
                // Columns past the end of a row are zero.
                bool within = (begin + lane) * 4u + i / 2u < chunks;
                uint c = s * 8u + i;
                xs[i] = within ? x.v[own * (x_stride / 4u) + c] : vec4(0.0);
                if (NORM == 1u) {
                    square += dot(xs[i], xs[i]);
                    if (within) xs[i] *= norm.v[c];
                }
            }
            store_columns(xs, lane * X_WORDS);
        }
        barrier();
        [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[r] += span_product(w[r], lane * X_WORDS);
        barrier();
    }

    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        float sum = subgroupAdd(acc[r]);
        if (subgroupElect()) partial_s[gl_SubgroupID * SUMS + r] = sum;
    }
    if (NORM == 1u) {
        float sum = subgroupAdd(square);
        if (subgroupElect()) partial_s[gl_SubgroupID * SUMS + ROWS] = sum;
    }
    barrier();
    // An invocation finishes two neighbouring rows of W at a time.
    uint subgroups = gl_NumSubgroups / GROUPS;
    for (uint pair = t; pair < PAIRS; pair += LANES) {
        uint own_first = first + pair * 2u;
        if (own_first >= n) continue;
        uint of_group = pair / (ROWS / 2u), r = pair % (ROWS / 2u) * 2u;
        vec2 v = vec2(0.0);
        float squares = 0.0;
        for (uint i = 0u; i < subgroups; i++) {
            uint at = (of_group * subgroups + i) * SUMS + r;
            v += vec2(partial_s[at], partial_s[at + 1u]);
            // The first group has the squares.
            if (NORM == 1u) squares += partial_s[i * SUMS + ROWS];
        }
        vec2 factor = vec2(0.0), added = vec2(0.0);
        uint own_y = own * y_stride;
        [[unroll]] for (uint i = 0u; i < 2u; i++) {
            uint weight_row = min(own_first + i, n - 1u);
            factor[i] = uintBitsToFloat(CODE_WORD(weight, row_word(weight_row, chunks)));
            if (EPILOGUE == 1u) added[i] = y.v[own_y + weight_row];
            if (BIAS == 1u) added[i] += bias.v[weight_row];
        }
        float scale = NORM == 1u ? inversesqrt(squares / float(k) + epsilon) : 1.0;
        v = v * factor * scale + added;
        if (EPILOGUE >= 2u) {
            y.v[own_y + own_first / 2u] = glu(EPILOGUE, v.x, v.y);
        } else {
            y.v[own_y + own_first] = v.x;
            if (own_first + 1u < n) y.v[own_y + own_first + 1u] = v.y;
        }
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// GEMV on row-major weights of affine codes by integer dot products, for one or a few rows of x, which share each load of W:
// y[r] = epilogue( W · prologue(x[r]) ), for devices with instructions for dot products of four 8-bit integers.
//
// prologue   NORM 0: x. NORM 1 (RMSNorm): x ⊙ norm, and the epilogue scales the product by rsqrt(mean x² + eps). Then x is
//            rounded to integers of 16 bits with a factor for each 32 columns (`code_dots.glsl`)
// epilogue   that of `gemv`
// weight     [N][chunks·8] codes (`codes.glsl`);  x [rows][x_stride] f32;  y [rows][y_stride] f32
//
// A workgroup has LANES / SPANS groups of invocations, each of which computes ROWS rows of W at a time, and BLOCKS times as
// many in turn, for BATCH rows of x. It takes the columns in parts of PART times 32: all invocations write a part of x as
// integers to shared memory, then each group multiplies its rows of W with it, without barriers. An invocation multiplies 32
// columns of ROWS rows of W in a step; the codes and scales of the next step are in flight meanwhile. The sums of a subgroup
// are added up in shared memory from part to part. The code is short, so that the code of all products of a step, which follow
// each other, stays in the instruction cache.
// Traffic: W once per BATCH rows of x (the next BATCH rows find it in the L2 cache); x from the caches,
// N / (ROWS · BLOCKS · LANES / SPANS) times.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 0;
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint ROWS = 2;      // an even number
layout(constant_id = 5) const uint LANES = 256;   // the workgroup's size, a multiple of SPANS
layout(constant_id = 6) const uint SPANS = 64;    // invocations of a group, a multiple of the subgroups' size
layout(constant_id = 7) const uint CODES = 0x5024;
layout(constant_id = 8) const uint BATCH = 1;     // rows of x
layout(constant_id = 9) const uint BLOCKS = 1;
layout(constant_id = 10) const uint PART = 64;    // a multiple of SPANS
layout(constant_id = 11) const uint SUBGROUPS = 64; // the maximum number of a workgroup's subgroups
#include "codes.glsl"

#include "gemv_args.glsl"

#include "code_dots.glsl"

const uint GROUPS = LANES / SPANS;
const uint BLOCK = GROUPS * ROWS;                 // rows of W that the workgroup computes at a time
const uint SUMS = BATCH * ROWS;                   // of a subgroup
const uint PAIRS = BLOCKS * BATCH * BLOCK / 2u;
shared float partial_s[BLOCKS * SUBGROUPS * SUMS];
shared float squares_s[SUBGROUPS * BATCH];

uint own_first, spans, lane, group;

// Loads 32 columns of the group's rows of W of a block: those of an invocation in turn `turn` of the part that begins at span
// `begin`. Beyond the last column, others are loaded, which are multiplied by zeros.
#define LOAD_STEP(w, block_, turn_) { \
    uint s_ = min(begin + (turn_) * SPANS + lane, spans - 1u); \
    uint row_ = own_first + (block_) * BLOCK + group * ROWS; \
    [[unroll]] for (uint r = 0u; r < ROWS; r++) w[r] = load_span(weight, row_word(min(row_ + r, n - 1u), chunks), s_, chunks); }

// Writes spans from `begin` on of a row of x to shared memory, as many as `count` says; returns the sum of the squares of those
// that this invocation writes. All invocations take as many turns: some drivers lose count of uneven loops before a barrier.
float write_row(uint row, uint begin, uint count, uint to, uint t) {
    float square = 0.0;
    [[dont_unroll]] for (uint base = 0u; base < count; base += LANES) {
        uint own = base + t, s = begin + own;
        if (own < count) {
            vec4 xs[8];
            [[unroll]] for (uint i = 0u; i < 8u; i++) {
                // Columns past the end of a row are zero.
                bool within = s * 4u + i / 2u < chunks;
                uint c = min(s, spans - 1u) * 8u + i;
                xs[i] = within ? x.v[row * (x_stride / 4u) + c] : vec4(0.0);
                if (NORM == 1u) {
                    square += dot(xs[i], xs[i]);
                    if (within) xs[i] *= norm.v[c];
                }
            }
            store_columns(xs, (to + own) * X_WORDS);
        }
    }
    return square;
}

void main() {
    uint batches = (rows + BATCH - 1u) / BATCH;
    uint workgroup = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint from = workgroup % batches * BATCH;
    own_first = workgroup / batches * (BLOCKS * BLOCK);
    if (own_first >= n) return;
    uint t = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    lane = t % SPANS;
    group = t / SPANS;
    spans = (chunks + 3u) / 4u;
    uint blocks = min(BLOCKS, (n - own_first + BLOCK - 1u) / BLOCK);

    [[dont_unroll]] for (uint begin = 0u; begin < spans; begin += PART) {
        uint turns = min(PART, spans - begin + SPANS - 1u) / SPANS, steps = blocks * turns;
        Span w[ROWS];
        LOAD_STEP(w, 0u, 0u)
        if (begin > 0u) barrier();
        [[dont_unroll]] for (uint b = 0u; b < BATCH; b++) {
            float square = write_row(min(from + b, rows - 1u), begin, turns * SPANS, b * PART, t);
            if (NORM == 1u) {
                square = subgroupAdd(square);
                uint at = gl_SubgroupID * BATCH + b;
                if (subgroupElect()) squares_s[at] = begin == 0u ? square : squares_s[at] + square;
            }
        }
        barrier();

        float acc[SUMS];
        [[unroll]] for (uint i = 0u; i < SUMS; i++) acc[i] = 0.0;
        uint block = 0u, turn = 0u;
        [[dont_unroll]] for (uint step_ = 0u; step_ < steps; step_++) {
            // Behind the last step, its columns are loaded again.
            bool ends = turn + 1u == turns;
            uint next_block = min(block + uint(ends), blocks - 1u), next_turn = ends ? 0u : turn + 1u;
            Span next[ROWS];
            LOAD_STEP(next, next_block, next_turn)
            [[unroll]] for (uint b = 0u; b < BATCH; b++) {
                uint at = (b * PART + turn * SPANS + lane) * X_WORDS;
                [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[b * ROWS + r] += span_product(w[r], at);
            }
            if (ends) {
                uint at = (block * SUBGROUPS + gl_SubgroupID) * SUMS;
                [[unroll]] for (uint i = 0u; i < SUMS; i++) {
                    float sum = subgroupAdd(acc[i]);
                    if (subgroupElect()) partial_s[at + i] = begin == 0u ? sum : partial_s[at + i] + sum;
                    acc[i] = 0.0;
                }
            }
            block += uint(ends);
            turn = next_turn;
            [[unroll]] for (uint r = 0u; r < ROWS; r++) w[r] = next[r];
        }
    }
    barrier();
    // An invocation finishes two neighbouring rows of W for a row of x at a time.
    uint subgroups = gl_NumSubgroups / GROUPS;
    for (uint pair = t; pair < PAIRS; pair += LANES) {
        uint of_block = pair % (BLOCK / 2u), b = pair / (BLOCK / 2u) % BATCH, block = pair / (BLOCK / 2u * BATCH);
        uint row = own_first + block * BLOCK + of_block * 2u;
        if (row >= n || from + b >= rows) continue;
        uint of_group = of_block / (ROWS / 2u), r = of_block % (ROWS / 2u) * 2u;
        vec2 v = vec2(0.0);
        for (uint i = 0u; i < subgroups; i++) {
            uint at = (block * SUBGROUPS + of_group * subgroups + i) * SUMS + b * ROWS + r;
            v += vec2(partial_s[at], partial_s[at + 1u]);
        }
        float scale = 1.0;
        if (NORM == 1u) {
            float squares = 0.0;
            for (uint i = 0u; i < gl_NumSubgroups; i++) squares += squares_s[i * BATCH + b];
            scale = inversesqrt(squares / float(k) + epsilon);
        }
        vec2 factor = vec2(0.0), added = vec2(0.0);
        uint own_y = (from + b) * y_stride;
        [[unroll]] for (uint i = 0u; i < 2u; i++) {
            uint weight_row = min(row + i, n - 1u);
            factor[i] = uintBitsToFloat(CODE_WORD(weight, row_word(weight_row, chunks)));
            if (EPILOGUE == 1u) added[i] = y.v[own_y + weight_row];
            if (BIAS == 1u) added[i] += bias.v[weight_row];
        }
        v = v * factor * scale + added;
        if (IS_GATED(EPILOGUE)) {
            y.v[own_y + row / 2u] = glu(EPILOGUE, v.x, v.y);
        } else {
            v = ACTIVATED(EPILOGUE, v);
            y.v[own_y + row] = v.x;
            if (row + 1u < n) y.v[own_y + row + 1u] = v.y;
        }
    }
}

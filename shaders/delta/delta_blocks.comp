#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Chunked gated delta rule for prefill, part 1 of 3: everything that does not depend on the state, for all blocks of
// 64 rows and all value heads of a step in parallel. With G_t = Σ_{s≤t} ln α_s inside the block and
// D_ij = exp(G_i - G_j) for i ≥ j, else 0:
//
//   q̂, k̂, v of each row: convolution, silu and norms as in `delta_step`
//   T = ( I + strictlower(β_i (k̂_i·k̂_j) D_ij) )^-1,   E = (lower(q̂_i·k̂_j) ⊙ D) T
// From these, and from the state S before the block, `delta_scan` computes
//   R = β v - β e^G (K̂ S),   V' = T R,   O = e^G (Q̂ S) + E R,   S ← e^{G_64} S + K̂ᵀ (e^{G_64 - G} V')
//
// x      [rows][stride] f32: q | k | v | z | b | a
// chunk  descriptor of the prompt step (`embed_rows`): {prompts, lasts, rows, decoding}, then {slot, start, first row, _}
//        per prompt
// cells  8 words per prompt: {from, keep0_at, keep0, keep1_at}, {keep1, first block, _, _}
// window [cells][8][channels]: the convolution's inputs at positions before the chunk, read from cell `from`
// Rows beyond a prompt's end have k = v = β = 0 and ln α = 0, which leaves the state unchanged.
//
// PLAIN 1 (see `delta_step`): T = diag(β), E = (lower(q_i·k_j) ⊙ D) T + skip, and v and 0 in place of β v and β e^G.
//
// MATRIX 1: cooperative matrices, one subgroup for each 16 rows. q̂, k̂, T and E are stored as pairs of bfloat16 whose
// sum has a relative error of at most 2^-17, in blocks of 16 × 16 of 2 × 512 bytes, in the order in which `delta_scan`
// loads them: [most, rest][32 lanes][16 bytes]; lane 4g + t holds rows g and g + 8 (n), columns 2t, 2t + 1, 2t + 8 and
// 2t + 9 (k).
//   mixed  [blocks][key heads]{ q̂ [4 of 16 rows][key_dim / 16], k̂ likewise, k̂ᵀ [key_dim / 16][4 of 16 rows] }
//   solved [blocks][value heads]{ T, E [10 blocks on and below the diagonal] }
//   values [blocks][value heads][value_dim / 16][4 of 16 rows][columns g, g + 8][32 lanes]: β v of four rows, f32
// MATRIX 0: everything is f32 and row-major, with q̂ and k̂ stored for each value head. An invocation has one row.
//   mixed  [blocks][value heads][2][64][key_dim]: q̂, k̂;     solved [blocks][value heads][2][64][64]: T, E
//   values [blocks][value heads][64][value_dim]: β v
// Both variants:
//   gates  [blocks][value heads][4][64]: e^G, β e^G, e^{G_64 - G}, unused
// One workgroup computes one block of one value head. Traffic: the head's channels once, the block's part of the
// outputs once.
#include "common.glsl"
#include "delta.glsl"

#if MATRIX == 1
#extension GL_KHR_shader_subgroup_shuffle : require
#define WEIGHT 0
#include "fragments.glsl"
layout(local_size_x = 128) in;
#else
layout(local_size_x = 64) in;
#endif
layout(constant_id = 0) const uint KEY_HEADS = 16;
layout(constant_id = 1) const uint VALUE_HEADS = 32;
layout(constant_id = 2) const uint KEY_DIM = 128;
layout(constant_id = 3) const uint VALUE_DIM = 128;
layout(constant_id = 4) const uint TILED = 0;      // order of the value heads, see delta.glsl
layout(constant_id = 5) const uint PLAIN = 0;
layout(constant_id = 6) const uint CONV_BIAS = 0;  // as in `delta_step`

#if MATRIX == 1
layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Mixed { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Solved { uvec4 v[]; };
#else
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Mixed { coherent vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly restrict buffer Solved { float v[]; };
#endif
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Floats4Out { vec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Words4In chunk;
    Words4In cells;
    Floats4In conv;
    FloatsIn a_log;
    FloatsIn dt_bias;
    Floats4In window;
    Mixed mixed;
    Solved solved;
    Floats4Out values;
    FloatsOut gates;
    uint stride;
    FloatsIn skip;    // [value heads]; read if PLAIN
};

const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint GATES = CHANNEL_QUADS * 4u + VALUE_HEADS * VALUE_DIM;
const uint DECAYS = GATES + (PLAIN == 1u ? 0u : VALUE_HEADS);

#include "delta_inputs.glsl"

vec4 convolved(uint index, uint quad) {
    if (index >= in_use) return vec4(0.0);
    vec4 t0 = raw(int(index) - 3, quad), t1 = raw(int(index) - 2, quad), t2 = raw(int(index) - 1, quad), u = raw(int(index), quad);
    vec4 mixed = vec4(
        dot(conv.v[quad * 4u], vec4(t0.x, t1.x, t2.x, u.x)), dot(conv.v[quad * 4u + 1u], vec4(t0.y, t1.y, t2.y, u.y)),
        dot(conv.v[quad * 4u + 2u], vec4(t0.z, t1.z, t2.z, u.z)), dot(conv.v[quad * 4u + 3u], vec4(t0.w, t1.w, t2.w, u.w)));
    if (CONV_BIAS == 1u) mixed += conv.v[CHANNEL_QUADS * 4u + quad];
    return silu(mixed);
}

#if MATRIX == 1
#include "pairs.glsl"

const uint PAIRS = KEY_DIM / 2u + 4u;             // words per row, a stride that spreads over the banks
const uint V_STEP = VALUE_DIM + 4u;
const uint STEP = BLOCK_ROWS + 4u;
const uint KEY_BLOCKS = KEY_DIM / 16u;
const uint HALF_WORDS = BLOCK_ROWS * PAIRS;
const uint V_WORDS = BLOCK_ROWS * V_STEP;
const uint ROWS_WORDS = 2u * HALF_WORDS > V_WORDS ? 2u * HALF_WORDS : V_WORDS;
const uint SHARED = ROWS_WORDS > BLOCK_ROWS * STEP ? ROWS_WORDS : BLOCK_ROWS * STEP;

shared uint words_s[SHARED];                      // v; then q, then k, as parts; then L of I + L, which becomes T
shared vec2 sums_s[BLOCK_ROWS];                   // sums of ln α: whole parts, then remainders
shared float beta_s[BLOCK_ROWS];

#define MATRIX_AT(row, column) words_s[(row) * STEP + (column)]
float matrix_at(uint row, uint column) { return uintBitsToFloat(MATRIX_AT(row, column)); }

// Returns four words of a block: rows g and g + 8 from `row` on, columns 2t.. and 2t + 8.. from `block` · 16 on.
uvec4 pairs_at(uint part, uint row, uint block, uint g, uint t) {
    uint at = part * HALF_WORDS + (row + g) * PAIRS + block * 8u + t;
    return uvec4(words_s[at], words_s[at + 4u], words_s[at + 8u * PAIRS], words_s[at + 8u * PAIRS + 4u]);
}

// Returns the same of the transposed matrix, whose rows are columns of k̂.
uvec4 turned_at(uint part, uint row, uint block, uint g, uint t) {
    uint at = part * HALF_WORDS + (row + 2u * t) * PAIRS + block * 8u + g / 2u, shift = g % 2u * 16u;
#define TURNED_PAIR(at_) (((words_s[at_] >> shift) & 0xffffu) | ((words_s[(at_) + PAIRS] >> shift) << 16))
    return uvec4(TURNED_PAIR(at), TURNED_PAIR(at + 8u * PAIRS), TURNED_PAIR(at + 4u), TURNED_PAIR(at + 8u * PAIRS + 4u));
}

// Executes `body` for each of the subgroup's 16 rows, which are the chunk's rows from `index` on, with the row's number
// `n` and a quad of its channels after convolution and silu, `mixed_row`. The loop processes few rows per iteration:
// all 16 rows unrolled are more instructions than the processor's instruction cache holds, so that it would wait for
// each of them.
#define EACH_ROW(quad_, body) {                                                                                \
        uint quad = quad_, row_quads = stride / 4u, last_row = in_use - 1u;                                    \
        vec4 w0 = conv.v[quad * 4u], w1 = conv.v[quad * 4u + 1u], w2 = conv.v[quad * 4u + 2u], w3 = conv.v[quad * 4u + 3u]; \
        vec4 bias_ = CONV_BIAS == 1u ? conv.v[CHANNEL_QUADS * 4u + quad] : vec4(0.0);                          \
        vec4 t0, t1, t2, next[4];                                                                              \
        /* Rows beyond the prompt's end are masked, but read a clamped address. */                             \
        [[unroll]] for (uint e_ = 0u; e_ < 4u; e_++)                                                           \
            next[e_] = x.v[(first_row + min(index + e_, last_row)) * row_quads + quad];                        \
        if (index == 0u) {                                                                                     \
            t0 = raw(-3, quad); t1 = raw(-2, quad); t2 = raw(-1, quad);                                        \
        } else {                                                                                               \
            t0 = x.v[(first_row + min(index - 3u, last_row)) * row_quads + quad];                              \
            t1 = x.v[(first_row + min(index - 2u, last_row)) * row_quads + quad];                              \
            t2 = x.v[(first_row + min(index - 1u, last_row)) * row_quads + quad];                              \
        }                                                                                                      \
        [[dont_unroll]] for (uint turn_ = 0u; turn_ < 16u; turn_ += 4u) {                                      \
            vec4 now[4];                                                                                       \
            [[unroll]] for (uint e_ = 0u; e_ < 4u; e_++) {                                                     \
                now[e_] = next[e_];                                                                            \
                next[e_] = x.v[(first_row + min(index + turn_ + 4u + e_, last_row)) * row_quads + quad];       \
            }                                                                                                  \
            [[unroll]] for (uint e_ = 0u; e_ < 4u; e_++) {                                                     \
                uint n = turn_ + e_;                                                                           \
                vec4 u = now[e_];                                                                              \
                vec4 sums_ = vec4(dot(w0, vec4(t0.x, t1.x, t2.x, u.x)), dot(w1, vec4(t0.y, t1.y, t2.y, u.y)),  \
                                  dot(w2, vec4(t0.z, t1.z, t2.z, u.z)), dot(w3, vec4(t0.w, t1.w, t2.w, u.w))); \
                if (CONV_BIAS == 1u) sums_ += bias_;                                                           \
                vec4 mixed_row = index + n < in_use ? silu(sums_) : vec4(0.0);                                 \
                body                                                                                           \
                t0 = t1; t1 = t2; t2 = u;                                                                      \
            }                                                                                                  \
        }                                                                                                      \
    }

// Normalizes the rows of q or k to length `length_` and stores the subgroup's 16 rows as bfloat16 parts.
#define STORE_ROWS(quad_, length_) {                                                                           \
        EACH_ROW(kh * KEY_QUADS + (quad_),                                                                     \
            float square = LANE < KEY_QUADS ? dot(mixed_row, mixed_row) : 0.0;                                 \
            float scale_ = inversesqrt(subgroupAdd(square) + L2_EPSILON) * (length_);                          \
            vec4 unit = PLAIN == 1u ? mixed_row : mixed_row * scale_;                                          \
            uvec2 most; uvec2 rest;                                                                            \
            split_four(unit, most, rest);                                                                      \
            if (LANE < KEY_QUADS) {                                                                            \
                uint at = (own_row + n) * PAIRS + LANE * 2u;                                                   \
                words_s[at] = most.x;                                                                          \
                words_s[at + 1u] = most.y;                                                                     \
                words_s[at + HALF_WORDS] = rest.x;                                                             \
                words_s[at + HALF_WORDS + 1u] = rest.y;                                                        \
            })                                                                                                 \
        LANES_BARRIER                                                                                          \
    }

float decay_between(vec2 after, vec2 before) {
    vec2 d = after - before;
    return exp(min(d.x + d.y, 0.0));
}

void main() {
    uint h = gl_WorkGroupID.x, block = gl_WorkGroupID.y, i0 = gl_LocalInvocationIndex;
    uint first = find_prompt(block);
    if (first >= in_use) return;
    uint kh = KEY_HEAD(h), own = block * VALUE_HEADS + h;
    uint group = LANE_GROUP, g = LANE >> 2, t = LANE & 3u, own_row = group * 16u, index = first + own_row;

    if (i0 < BLOCK_ROWS) {
        // The integer parts and the remainders of ln α are summed separately, so that the sums are accurate to the last
        // bits, however strong the decay.
        uint row = first + i0;
        uint at = (first_row + min(row, in_use - 1u)) * stride + h;
        float b = FloatsIn(x).v[at + GATES], a = FloatsIn(x).v[at + DECAYS];
        float l = log_decay(a, a_log.v[h], dt_bias.v[h]), beta = PLAIN == 1u ? softplus(a + dt_bias.v[h]) : sigmoid(b);
        beta_s[i0] = row < in_use ? beta : 0.0;
        sums_s[i0] = row < in_use ? vec2(ceil(l), l - ceil(l)) : vec2(0.0);
    }
    barrier();
    vec2 sum_low = subgroupInclusiveAdd(sums_s[LANE]), sum_high = subgroupInclusiveAdd(sums_s[LANE + 32u]);
    sum_high += subgroupShuffle(sum_low, 31u);
    vec2 total = subgroupShuffle(sum_high, 31u);
    barrier();
    if (group == 0u) {
        sums_s[LANE] = sum_low;
        sums_s[LANE + 32u] = sum_high;
    } else if (group < 3u) {
        // Groups 1 and 2 write the gates of one half of the rows each.
        uint row = (group - 1u) * 32u + LANE;
        vec2 sum = group == 1u ? sum_low : sum_high;
        float grown = exp(sum.x + sum.y);
        uint at = own * 4u * BLOCK_ROWS + row;
        gates.v[at] = grown;
        gates.v[at + BLOCK_ROWS] = PLAIN == 1u ? 0.0 : beta_s[row] * grown;
        gates.v[at + 2u * BLOCK_ROWS] = decay_between(total, sum);
    }

    {
        // β v or v, reordered through the subgroup's own part of `words_s`.
        uint base = own_row * V_STEP;
        EACH_ROW(2u * KEY_HEADS * KEY_QUADS + h * QUADS + min(LANE, QUADS - 1u),
            vec4 v = PLAIN == 1u ? mixed_row : beta_s[own_row + n] * mixed_row;
            if (LANE < QUADS) {
                uint at = base + n * V_STEP + LANE * 4u;
                words_s[at] = floatBitsToUint(v.x);
                words_s[at + 1u] = floatBitsToUint(v.y);
                words_s[at + 2u] = floatBitsToUint(v.z);
                words_s[at + 3u] = floatBitsToUint(v.w);
            })
        LANES_BARRIER
        uint to = (own * (VALUE_DIM / 16u) * 4u + group) * 64u + LANE;
        [[unroll]] for (uint n = 0u; n < VALUE_DIM / 16u; n++) {
            [[unroll]] for (uint e = 0u; e < 2u; e++) {
                uint at = base + 2u * t * V_STEP + n * 16u + e * 8u + g;
                values.v[to + n * 256u + e * 32u] = uintBitsToFloat(uvec4(words_s[at], words_s[at + V_STEP],
                    words_s[at + 8u * V_STEP], words_s[at + 9u * V_STEP]));
            }
        }
    }
    // The parts of q and k overwrite other places than the subgroup's own rows of v, so all subgroups must have read
    // theirs.
    barrier();

    bool keeps = FIRST_OF_KEY_HEAD(h);
    uint mixed_at = (block * KEY_HEADS + kh) * 3u * 4u * KEY_BLOCKS * 64u + LANE;
    STORE_ROWS(min(LANE, KEY_QUADS - 1u), inversesqrt(float(KEY_DIM)))
    uvec4 q_most[KEY_BLOCKS], q_rest[KEY_BLOCKS];
    [[unroll]] for (uint n = 0u; n < KEY_BLOCKS; n++) {
        q_most[n] = pairs_at(0u, own_row, n, g, t);
        q_rest[n] = pairs_at(1u, own_row, n, g, t);
        if (keeps) {
            uint at = mixed_at + (group * KEY_BLOCKS + n) * 64u;
            mixed.v[at] = q_most[n];
            mixed.v[at + 32u] = q_rest[n];
        }
    }
    LANES_BARRIER
    STORE_ROWS(KEY_HEADS * KEY_QUADS + min(LANE, KEY_QUADS - 1u), 1.0)
    if (keeps) {
        [[unroll]] for (uint n = 0u; n < KEY_BLOCKS; n++) {
            uint at = mixed_at + (4u * KEY_BLOCKS + group * KEY_BLOCKS + n) * 64u;
            mixed.v[at] = pairs_at(0u, own_row, n, g, t);
            mixed.v[at + 32u] = pairs_at(1u, own_row, n, g, t);
            at = mixed_at + (8u * KEY_BLOCKS + n * 4u + group) * 64u;
            mixed.v[at] = turned_at(0u, own_row, n, g, t);
            mixed.v[at + 32u] = turned_at(1u, own_row, n, g, t);
        }
    }
    barrier();

    Sums keys[4], queries[4];
    [[unroll]] for (uint j = 0u; j < 4u; j++) keys[j] = queries[j] = NO_SUMS;
    [[unroll]] for (uint n = 0u; n < KEY_BLOCKS; n++) {
        Tokens k_most, k_rest, query_most, query_rest;
        SET_WEIGHTS(k_most, pairs_at(0u, own_row, n, g, t))
        SET_WEIGHTS(k_rest, pairs_at(1u, own_row, n, g, t))
        SET_WEIGHTS(query_most, q_most[n])
        SET_WEIGHTS(query_rest, q_rest[n])
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            if (j <= group) {
                Weights other_most, other_rest;
                SET_WEIGHTS(other_most, pairs_at(0u, j * 16u, n, g, t))
                SET_WEIGHTS(other_rest, pairs_at(1u, j * 16u, n, g, t))
                MULTIPLY_ADD_PARTS(keys[j], k_most, k_rest, other_most, other_rest)
                MULTIPLY_ADD_PARTS(queries[j], query_most, query_rest, other_most, other_rest)
            }
        }
    }
    barrier();

    // A lane keeps rows g and g + 8 of its subgroup's rows of E's left factor in registers; L goes to shared memory for
    // the other subgroups.
    uvec4 left_most[4], left_rest[4];
    vec2 sum_g = sums_s[own_row + g], sum_g8 = sums_s[own_row + g + 8u];
    float beta_g = beta_s[own_row + g], beta_g8 = beta_s[own_row + g + 8u];
    [[unroll]] for (uint j = 0u; j < 4u; j++) {
        // The components are constants: a dynamically indexed one would go through memory.
        uvec4 column = j * 16u + 2u * t + uvec4(0u, 1u, 8u, 9u);
        uint row = own_row + g;
        vec2 before_x = sums_s[column.x], before_y = sums_s[column.y], before_z = sums_s[column.z], before_w = sums_s[column.w];
        vec4 d = vec4(decay_between(sum_g, before_x), decay_between(sum_g, before_y), decay_between(sum_g, before_z), decay_between(sum_g, before_w));
        vec4 d8 = vec4(decay_between(sum_g8, before_x), decay_between(sum_g8, before_y), decay_between(sum_g8, before_z), decay_between(sum_g8, before_w));
        vec4 k_low = mix(vec4(0.0), beta_g * d * SUMS_LOW(keys[j]), lessThan(column, uvec4(row)));
        vec4 k_high = mix(vec4(0.0), beta_g8 * d8 * SUMS_HIGH(keys[j]), lessThan(column, uvec4(row + 8u)));
        if (PLAIN == 1u) {
            k_low = mix(vec4(0.0), vec4(beta_g), equal(column, uvec4(row)));
            k_high = mix(vec4(0.0), vec4(beta_g8), equal(column, uvec4(row + 8u)));
        }
        MATRIX_AT(row, column.x) = floatBitsToUint(k_low.x);
        MATRIX_AT(row, column.y) = floatBitsToUint(k_low.y);
        MATRIX_AT(row, column.z) = floatBitsToUint(k_low.z);
        MATRIX_AT(row, column.w) = floatBitsToUint(k_low.w);
        MATRIX_AT(row + 8u, column.x) = floatBitsToUint(k_high.x);
        MATRIX_AT(row + 8u, column.y) = floatBitsToUint(k_high.y);
        MATRIX_AT(row + 8u, column.z) = floatBitsToUint(k_high.z);
        MATRIX_AT(row + 8u, column.w) = floatBitsToUint(k_high.w);
        vec4 q_low = mix(vec4(0.0), d * SUMS_LOW(queries[j]), lessThanEqual(column, uvec4(row)));
        vec4 q_high = mix(vec4(0.0), d8 * SUMS_HIGH(queries[j]), lessThanEqual(column, uvec4(row + 8u)));
        split_block(q_low, q_high, left_most[j], left_rest[j]);
    }
    LANES_BARRIER
    // Each 16 × 16 block on the diagonal is inverted by its subgroup, one column per lane.
    if (PLAIN == 0u) {
        float line[16];
        uint column = LANE & 15u;
        [[unroll]] for (uint r = 0u; r < 16u; r++) {
            line[r] = r == column ? 1.0 : 0.0;
            [[unroll]] for (uint c = 0u; c < r; c++) line[r] -= matrix_at(own_row + r, own_row + c) * line[c];
        }
        LANES_BARRIER
        [[unroll]] for (uint r = 0u; r < 16u; r++) MATRIX_AT(own_row + r, own_row + column) = floatBitsToUint(line[r]);
    }
    barrier();
    // Then the rows of the blocks below, one after the other: T_i = -T_ii (Σ_j L_ij T_j).
    if (PLAIN == 0u) [[unroll]] for (uint b = 1u; b < 4u; b++) {
        uint r = i0 / 8u, c = i0 % 8u;
        float product[6];
        [[unroll]] for (uint n = 0u; n < 2u * b; n++) product[n] = 0.0;
        for (uint k = 0u; k < 16u * b; k++) {
            float l = matrix_at(16u * b + r, k);
            [[unroll]] for (uint n = 0u; n < 2u * b; n++) product[n] += l * matrix_at(k, c + 8u * n);
        }
        barrier();
        [[unroll]] for (uint n = 0u; n < 2u * b; n++) {
            MATRIX_AT(16u * b + r, c + 8u * n) = floatBitsToUint(product[n]);
            product[n] = 0.0;
        }
        barrier();
        for (uint k = 0u; k < 16u; k++) {
            float l = matrix_at(16u * b + r, 16u * b + k);
            [[unroll]] for (uint n = 0u; n < 2u * b; n++) product[n] -= l * matrix_at(16u * b + k, c + 8u * n);
        }
        barrier();
        [[unroll]] for (uint n = 0u; n < 2u * b; n++) MATRIX_AT(16u * b + r, c + 8u * n) = floatBitsToUint(product[n]);
        barrier();
    }
    uint solved_at = own * 2u * 10u * 64u + group * (group + 1u) / 2u * 64u + LANE;
    [[unroll]] for (uint j = 0u; j < 4u; j++) {
        if (j <= group) {
            Sums sums = NO_SUMS;
            [[unroll]] for (uint k = j; k < 4u; k++) {
                if (k <= group) {
                    uint row = k * 16u + 2u * t, column = j * 16u + g;
                    vec4 a = vec4(matrix_at(row, column), matrix_at(row + 1u, column), matrix_at(row + 8u, column), matrix_at(row + 9u, column));
                    column += 8u;
                    vec4 b = vec4(matrix_at(row, column), matrix_at(row + 1u, column), matrix_at(row + 8u, column), matrix_at(row + 9u, column));
                    uvec4 most, rest;
                    split_block(a, b, most, rest);
                    Tokens tokens_most, tokens_rest;
                    Weights weights_most, weights_rest;
                    SET_WEIGHTS(tokens_most, left_most[k])
                    SET_WEIGHTS(tokens_rest, left_rest[k])
                    SET_WEIGHTS(weights_most, most)
                    SET_WEIGHTS(weights_rest, rest)
                    MULTIPLY_ADD_PARTS(sums, tokens_most, tokens_rest, weights_most, weights_rest)
                }
            }
            uvec4 most, rest;
            vec4 low = SUMS_LOW(sums), high = SUMS_HIGH(sums);
            if (PLAIN == 1u) {
                uvec4 own_column = j * 16u + 2u * t + uvec4(0u, 1u, 8u, 9u);
                low += mix(vec4(0.0), vec4(skip.v[h]), equal(own_column, uvec4(own_row + g)));
                high += mix(vec4(0.0), vec4(skip.v[h]), equal(own_column, uvec4(own_row + g + 8u)));
            }
            split_block(low, high, most, rest);
            solved.v[solved_at + (10u + j) * 64u] = most;
            solved.v[solved_at + (10u + j) * 64u + 32u] = rest;
            uint row = own_row + g, column = j * 16u + 2u * t;
            vec4 a = vec4(matrix_at(row, column), matrix_at(row, column + 1u), matrix_at(row, column + 8u), matrix_at(row, column + 9u));
            row += 8u;
            vec4 b = vec4(matrix_at(row, column), matrix_at(row, column + 1u), matrix_at(row, column + 8u), matrix_at(row, column + 9u));
            split_block(a, b, most, rest);
            solved.v[solved_at + j * 64u] = most;
            solved.v[solved_at + j * 64u + 32u] = rest;
        }
    }
}
#else
const uint STEP = BLOCK_ROWS + 1u;
shared vec2 sums_s[BLOCK_ROWS];                   // sums of ln α: whole parts, then remainders
shared float beta_s[BLOCK_ROWS];
shared float matrix_s[BLOCK_ROWS * STEP];         // L of I + L, then T

void main() {
    uint h = gl_WorkGroupID.x, block = gl_WorkGroupID.y, i = gl_LocalInvocationIndex;
    uint index = find_prompt(block) + i;
    if (index - i >= in_use) return;
    uint kh = KEY_HEAD(h), own = block * VALUE_HEADS + h;

    // The integer parts and the remainders of ln α are summed separately, so that the sums are accurate to the last
    // bits, however strong the decay.
    vec2 decay = vec2(0.0);
    float beta = 0.0;
    if (index < in_use) {
        uint at = (first_row + index) * stride + h, b_at = at + GATES, a_at = at + DECAYS;
        vec4 b = x.v[b_at / 4u], a = x.v[a_at / 4u];
        uint b_in = b_at % 4u, a_in = a_at % 4u;
        float own_a = a_in < 2u ? (a_in == 0u ? a.x : a.y) : (a_in == 2u ? a.z : a.w);
        beta = sigmoid(b_in < 2u ? (b_in == 0u ? b.x : b.y) : (b_in == 2u ? b.z : b.w));
        if (PLAIN == 1u) beta = softplus(own_a + dt_bias.v[h]);
        float l = log_decay(own_a, a_log.v[h], dt_bias.v[h]);
        decay = vec2(ceil(l), l - ceil(l));
    }
    sums_s[i] = decay;
    beta_s[i] = beta;
    barrier();
    vec2 sum = vec2(0.0), total = vec2(0.0);
    for (uint j = 0u; j < BLOCK_ROWS; j++) {
        total += sums_s[j];
        if (j == i) sum = total;
    }
    barrier();
    sums_s[i] = sum;

    // The row's q and k; each is scaled once its sum of squares is known.
    vec2 squares = vec2(0.0);
    uint q_at = (own * 2u * BLOCK_ROWS + i) * KEY_QUADS, k_at = q_at + BLOCK_ROWS * KEY_QUADS;
    for (uint c = 0u; c < KEY_QUADS; c++) {
        vec4 q = convolved(index, kh * KEY_QUADS + c), k = convolved(index, (KEY_HEADS + kh) * KEY_QUADS + c);
        squares += vec2(dot(q, q), dot(k, k));
        mixed.v[q_at + c] = q;
        mixed.v[k_at + c] = k;
    }
    vec2 scales = inversesqrt(squares + L2_EPSILON) * vec2(inversesqrt(float(KEY_DIM)), 1.0);
    if (PLAIN == 1u) scales = vec2(1.0);
    for (uint c = 0u; c < KEY_QUADS; c++) {
        mixed.v[q_at + c] = mixed.v[q_at + c] * scales.x;
        mixed.v[k_at + c] = mixed.v[k_at + c] * scales.y;
    }
    for (uint c = 0u; c < QUADS; c++)
        values.v[(own * BLOCK_ROWS + i) * QUADS + c] = (PLAIN == 1u ? 1.0 : beta) * convolved(index, 2u * KEY_HEADS * KEY_QUADS + h * QUADS + c);
    float grown = exp(sum.x + sum.y);
    uint gates_at = own * 4u * BLOCK_ROWS + i;
    gates.v[gates_at] = grown;
    gates.v[gates_at + BLOCK_ROWS] = PLAIN == 1u ? 0.0 : beta * grown;
    gates.v[gates_at + 2u * BLOCK_ROWS] = exp((total.x - sum.x) + (total.y - sum.y));
    memoryBarrierBuffer();
    barrier();
    memoryBarrierBuffer();

    for (uint j = 0u; j < BLOCK_ROWS; j++) {
        float dots = 0.0;
        uint other = ((own * 2u + 1u) * BLOCK_ROWS + j) * KEY_QUADS;
        for (uint c = 0u; c < KEY_QUADS; c++) dots += dot(mixed.v[k_at + c], mixed.v[other + c]);
        vec2 between = sum - sums_s[j];
        matrix_s[i * STEP + j] = PLAIN == 0u && j < i ? beta * dots * exp(min(between.x + between.y, 0.0)) : 0.0;
    }
    barrier();
    // An invocation computes a column of T, then a row of E.
    float line[BLOCK_ROWS];
    for (uint r = 0u; r < BLOCK_ROWS; r++) {
        float value = r == i ? (PLAIN == 1u ? beta : 1.0) : 0.0;
        for (uint c = 0u; c < r; c++) value -= matrix_s[r * STEP + c] * line[c];
        line[r] = value;
    }
    barrier();
    for (uint r = 0u; r < BLOCK_ROWS; r++) matrix_s[r * STEP + i] = line[r];
    barrier();
    for (uint c = 0u; c < BLOCK_ROWS; c++) line[c] = 0.0;
    for (uint j = 0u; j < BLOCK_ROWS; j++) {
        float dots = 0.0;
        uint other = ((own * 2u + 1u) * BLOCK_ROWS + j) * KEY_QUADS;
        for (uint c = 0u; c < KEY_QUADS; c++) dots += dot(mixed.v[q_at + c], mixed.v[other + c]);
        vec2 between = sum - sums_s[j];
        float factor = j <= i ? dots * exp(min(between.x + between.y, 0.0)) : 0.0;
        for (uint c = 0u; c < BLOCK_ROWS; c++) line[c] += factor * matrix_s[j * STEP + c];
    }
    for (uint c = 0u; c < BLOCK_ROWS; c++) {
        uint at = (own * 2u * BLOCK_ROWS + i) * BLOCK_ROWS + c;
        solved.v[at] = matrix_s[i * STEP + c];
        solved.v[at + BLOCK_ROWS * BLOCK_ROWS] = line[c] + (PLAIN == 1u && c == i ? skip.v[h] : 0.0);
    }
}
#endif

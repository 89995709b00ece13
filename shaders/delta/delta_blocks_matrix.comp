#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
#pragma use_vulkan_memory_model
// Chunked gated delta rule for prefill, part 1 of 3, on matrix units of any shape, of which nothing but the shape is known:
// everything that does not depend on the state, for all blocks of 64 rows and all value heads of a step in parallel. With
// G_t = Σ_{s≤t} ln α_s inside the block and D_ij = exp(G_i - G_j) for i ≥ j, else 0:
//
//   q̂, k̂, v of each row: convolution, silu and norms as in `delta_step`
//   T = ( I + strictlower(β_i (k̂_i·k̂_j) D_ij) )^-1,   E = (lower(q̂_i·k̂_j) ⊙ D) T
//
// x, chunk, cells, window: as in `delta_blocks`. Rows beyond a prompt's end have k = v = β = 0 and ln α = 0, which leaves the
// state unchanged.
// Operands of products are f16, times 2^14, in two parts whose sum has a relative error of 2^-22 (`half_pairs.glsl`). None is
// larger than 1: rows of q̂ and k̂ have lengths up to 1; an element of T is what a row writes to a state that an earlier row has
// set to its k̂, and one of E is what it reads from there, and neither decay nor writing makes such a state longer. That needs
// β and α up to 1.
//   mixed  [blocks][value heads][q̂ most, q̂ rest, k̂ most, k̂ rest][64][key_dim]
//   turned [blocks][key heads][k̂ᵀ most, k̂ᵀ rest][key_dim][64]
//   solved [blocks][value heads][T most, T rest, E most, E rest][64][64], with zeros above the diagonal
//   values [blocks][value heads][64][value_dim] f32: β v
//   gates  [blocks][value heads][4][64] f32: e^G, β e^G, e^{G_64 - G}, unused
// One workgroup computes one block of one value head, a subgroup MATRIX_M rows of a product. q̂ and k̂ are loaded from where
// they have been stored, as they do not fit in shared memory. T is computed in f32: the blocks of 16 × 16 on the diagonal by an
// invocation for each column, then the rows of the blocks below, one after the other. What is multiplied by T for E
// takes the place of T in shared memory.
// Traffic: the head's channels twice, the block's part of the outputs once; q̂ and k̂ once more, most of them from the caches.
#include "common.glsl"
#include "delta.glsl"

layout(constant_id = 0) const uint KEY_HEADS = 16;
layout(constant_id = 1) const uint VALUE_HEADS = 32;
layout(constant_id = 2) const uint KEY_DIM = 128;
layout(constant_id = 3) const uint VALUE_DIM = 128;
layout(constant_id = 4) const uint TILED = 0;      // order of the value heads, see delta.glsl
layout(local_size_x_id = 5) in;
layout(constant_id = 6) const uint MATRIX_M = 16;
layout(constant_id = 7) const uint MATRIX_N = 16;
layout(constant_id = 8) const uint MATRIX_K = 16;
layout(constant_id = 9) const uint SUBGROUP = 32;  // the subgroups' size

#include "half_pairs.glsl"

layout(buffer_reference, std430, buffer_reference_align = 16) buffer Operands { workgroupcoherent uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Floats4Out { vec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Words4In chunk;
    Words4In cells;
    Floats4In conv;
    FloatsIn a_log;
    FloatsIn dt_bias;
    Floats4In window;
    Operands mixed;
    Operands solved;
    Floats4Out values;
    FloatsOut gates;
    uint stride;
    WordsOut turned;
};

const uint THREADS = BLOCK_ROWS / MATRIX_M * SUBGROUP;
const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint GATES = CHANNEL_QUADS * 4u + VALUE_HEADS * VALUE_DIM;
// Words of 16 bytes of a row of q̂ or k̂ and of a row of T or E, and of a part of each.
const uint KEY_EIGHTS = KEY_DIM / 8u;
const uint ROW_EIGHTS = BLOCK_ROWS / 8u;
const uint MIXED_PART = BLOCK_ROWS * KEY_EIGHTS;
const uint SOLVED_PART = BLOCK_ROWS * ROW_EIGHTS;
const uint ROW_PAIRS = BLOCK_ROWS / 2u;
const uint TILES = BLOCK_ROWS / MATRIX_N;
// The quads of a row of a matrix in shared memory. One more keeps rows in different banks.
const uint ROW_QUADS = BLOCK_ROWS / 4u;
const uint STEP = ROW_QUADS + 1u;
// What an invocation has of its subgroup's rows: quads, and runs of eight columns.
const uint OWN_QUADS = MATRIX_M * ROW_QUADS / SUBGROUP;
const uint OWN_EIGHTS = MATRIX_M * ROW_EIGHTS / SUBGROUP;

// Sums of squares; then L of I + L, which becomes T; then the left factor of E, in f32 and then as two parts; then E. Matrices
// are loaded and stored from arrays of 16-byte elements, as rows of a matrix must begin at multiples of 16 bytes.
shared uvec4 words_s[BLOCK_ROWS * STEP];
shared vec2 logs_s[BLOCK_ROWS];                    // ln α: whole parts, then remainders
shared vec2 sums_s[BLOCK_ROWS];                    // their sums
shared float beta_s[BLOCK_ROWS];

#include "delta_inputs.glsl"

vec4 quad_of(uint row, uint quad) { return uintBitsToFloat(words_s[row * STEP + quad]); }
void put_quad(uint row, uint quad, vec4 value) { words_s[row * STEP + quad] = floatBitsToUint(value); }
float element_of(uint row, uint column) { return uintBitsToFloat(words_s[row * STEP + column / 4u][column % 4u]); }

// Returns four channels of rows `index` and `index` + 1 after convolution and silu. Rows beyond the prompt's end are masked, but
// read a clamped address.
void convolved_pair(uint index, uint quad, out vec4 even, out vec4 odd) {
    int at = int(index), last = int(in_use) - 1;
    vec4 w0 = conv.v[quad * 4u], w1 = conv.v[quad * 4u + 1u], w2 = conv.v[quad * 4u + 2u], w3 = conv.v[quad * 4u + 3u];
    vec4 t0 = raw(min(at - 3, last), quad), t1 = raw(min(at - 2, last), quad), t2 = raw(min(at - 1, last), quad);
    vec4 t3 = raw(min(at, last), quad), t4 = raw(min(at + 1, last), quad);
    even = index < in_use ? silu(vec4(dot(w0, vec4(t0.x, t1.x, t2.x, t3.x)), dot(w1, vec4(t0.y, t1.y, t2.y, t3.y)),
                                      dot(w2, vec4(t0.z, t1.z, t2.z, t3.z)), dot(w3, vec4(t0.w, t1.w, t2.w, t3.w))))
                          : vec4(0.0);
    odd = index + 1u < in_use ? silu(vec4(dot(w0, vec4(t1.x, t2.x, t3.x, t4.x)), dot(w1, vec4(t1.y, t2.y, t3.y, t4.y)),
                                          dot(w2, vec4(t1.z, t2.z, t3.z, t4.z)), dot(w3, vec4(t1.w, t2.w, t3.w, t4.w))))
                              : vec4(0.0);
}

float decay_between(vec2 after, vec2 before) {
    vec2 d = after - before;
    return exp(min(d.x + d.y, 0.0));
}

// Returns D of a row and four columns from `column` on.
vec4 decays(uint row, uint column) {
    vec2 sum = sums_s[row];
    return vec4(decay_between(sum, sums_s[column]), decay_between(sum, sums_s[column + 1u]),
                decay_between(sum, sums_s[column + 2u]), decay_between(sum, sums_s[column + 3u]));
}

// Stores eight elements of two rows of q̂ or k̂, whose parts begin at `at`.
void put_rows(uint at, uint row, uint eight, uvec4 most[2], uvec4 rest[2]) {
    at += row * KEY_EIGHTS + eight;
    mixed.v[at] = most[0];
    mixed.v[at + MIXED_PART] = rest[0];
    mixed.v[at + KEY_EIGHTS] = most[1];
    mixed.v[at + KEY_EIGHTS + MIXED_PART] = rest[1];
}

// Stores eight columns of two rows, as two elements of eight rows.
void put_turned(uint at, uint pair, uint eight, uvec4 words[2]) {
    at += eight * 8u * ROW_PAIRS + pair;
    UNROLL for (uint n = 0u; n < 4u; n++) {
        turned.v[at + 2u * n * ROW_PAIRS] = (words[0][n] & 0xffffu) | words[1][n] << 16;
        turned.v[at + (2u * n + 1u) * ROW_PAIRS] = words[0][n] >> 16 | (words[1][n] & 0xffff0000u);
    }
}

// Computes the subgroup's rows of q̂ or k̂, which begin at word `left` of `mixed`, times k̂ᵀ, and stores them in shared memory;
// on subgroups of 8 or 16, which have few registers, a few columns at a time.
const uint WIDTH = SUBGROUP < 32u ? 2u : TILES;
#define TIMES_KEYS(left_)                                                                                     \
    [[dont_unroll]] for (uint tile = 0u; tile < TILES; tile += WIDTH) {                                       \
        Sums sums[WIDTH];                                                                                     \
        UNROLL for (uint t = 0u; t < WIDTH; t++) sums[t] = Sums(0.0);                                         \
        [[dont_unroll]] for (uint k = 0u; k < KEY_EIGHTS; k += MATRIX_K / 8u) {                               \
            Left left_most, left_rest;                                                                        \
            LOAD_LEFT(left_most, left_rest, mixed.v, (left_) + own_row * KEY_EIGHTS + k, KEY_EIGHTS, MIXED_PART) \
            UNROLL for (uint t = 0u; t < WIDTH; t++) {                                                        \
                Right most, rest;                                                                             \
                LOAD_RIGHT(most, rest, mixed.v, keys_at + (tile + t) * MATRIX_N * KEY_EIGHTS + k,             \
                           KEY_EIGHTS, MIXED_PART)                                                            \
                MULTIPLY_ADD_PARTS(sums[t], left_most, left_rest, most, rest)                                 \
            }                                                                                                 \
        }                                                                                                     \
        STORE_SUMS(sums, tile, WIDTH)                                                                         \
    }
#define STORE_SUMS(sums, tile, width)                                                                         \
    UNROLL for (uint t = 0u; t < width; t++)                                                                  \
        coopMatStore(sums[t], words_s, own_row * STEP + (tile + t) * (MATRIX_N / 4u), STEP,                   \
                     gl_CooperativeMatrixLayoutRowMajor);                                                     \
    SUBGROUP_BARRIER

void main() {
    uint h = gl_WorkGroupID.x, block = gl_WorkGroupID.y, i = gl_LocalInvocationIndex;
    uint first = find_prompt(block);
    if (first >= in_use) return;
    uint kh = KEY_HEAD(h), own = block * VALUE_HEADS + h;
    uint own_row = gl_SubgroupID * MATRIX_M;

    // The integer parts and the remainders of ln α are summed separately, so that the sums are accurate to the last
    // bits, however strong the decay.
    for (uint row = i; row < BLOCK_ROWS; row += THREADS) {
        vec2 decay = vec2(0.0);
        float beta = 0.0;
        if (first + row < in_use) {
            uint at = (first_row + first + row) * stride + GATES + h;
            vec4 b = x.v[at / 4u], a = x.v[(at + VALUE_HEADS) / 4u];
            beta = sigmoid(b[at % 4u]);
            float l = log_decay(a[(at + VALUE_HEADS) % 4u], a_log.v[h], dt_bias.v[h]);
            decay = vec2(ceil(l), l - ceil(l));
        }
        logs_s[row] = decay;
        beta_s[row] = beta;
    }
    // Sums of squares of q and k of two rows: eight invocations share the rows, each with every eighth run of eight dimensions.
    for (uint pair = i / 8u; pair < ROW_PAIRS; pair += THREADS / 8u) {
        vec4 squares = vec4(0.0);
        for (uint quad = i % 8u; quad < KEY_QUADS; quad += 8u) {
            [[dont_unroll]] for (uint keys = 0u; keys < 2u; keys++) {
                vec4 even, odd;
                convolved_pair(first + 2u * pair, (keys * KEY_HEADS + kh) * KEY_QUADS + quad, even, odd);
                vec2 square = vec2(dot(even, even), dot(odd, odd));
                squares += keys == 0u ? vec4(square, 0.0, 0.0) : vec4(0.0, 0.0, square);
            }
        }
        words_s[pair * 8u + i % 8u] = floatBitsToUint(squares);
    }
    barrier();
    for (uint row = i; row < BLOCK_ROWS; row += THREADS) {
        vec2 sum = vec2(0.0), total = vec2(0.0);
        for (uint j = 0u; j < BLOCK_ROWS; j++) {
            total += logs_s[j];
            if (j == row) sum = total;
        }
        sums_s[row] = sum;
        float grown = exp(sum.x + sum.y);
        uint at = own * 4u * BLOCK_ROWS + row;
        gates.v[at] = grown;
        gates.v[at + BLOCK_ROWS] = beta_s[row] * grown;
        gates.v[at + 2u * BLOCK_ROWS] = decay_between(total, sum);
    }
    uint queries_at = own * 4u * MIXED_PART, keys_at = queries_at + 2u * MIXED_PART;
    uint turned_at = (block * KEY_HEADS + kh) * 2u * KEY_DIM * ROW_PAIRS;
    bool keeps = FIRST_OF_KEY_HEAD(h);
    for (uint pair = i / 8u; pair < ROW_PAIRS; pair += THREADS / 8u) {
        vec4 squares = vec4(0.0);
        for (uint n = 0u; n < 8u; n++) squares += uintBitsToFloat(words_s[pair * 8u + n]);
        vec4 scales = UNIT_SCALE * inversesqrt(squares + L2_EPSILON);
        scales.xy *= inversesqrt(float(KEY_DIM));
        for (uint eight = i % 8u; eight < KEY_EIGHTS; eight += 8u) {
            // One quad of q or of k at a time: more would take too many registers.
            uvec4 even_low = uvec4(0u), odd_low = uvec4(0u);
            [[dont_unroll]] for (uint n = 0u; n < 4u; n++) {
                bool keys = n >= 2u;
                vec2 scale = keys ? scales.zw : scales.xy;
                vec4 even, odd;
                convolved_pair(first + 2u * pair, ((keys ? KEY_HEADS : 0u) + kh) * KEY_QUADS + 2u * eight + n % 2u, even, odd);
                uvec2 most[2], rest[2];
                split_four(even * scale.x, stride >> 31, most[0], rest[0]);
                split_four(odd * scale.y, stride >> 31, most[1], rest[1]);
                if (n % 2u == 0u) {
                    even_low = uvec4(most[0], rest[0]);
                    odd_low = uvec4(most[1], rest[1]);
                    continue;
                }
                uvec4 all_most[2] = uvec4[](uvec4(even_low.xy, most[0]), uvec4(odd_low.xy, most[1]));
                uvec4 all_rest[2] = uvec4[](uvec4(even_low.zw, rest[0]), uvec4(odd_low.zw, rest[1]));
                put_rows(keys ? keys_at : queries_at, 2u * pair, eight, all_most, all_rest);
                if (keys && keeps) {
                    put_turned(turned_at, pair, eight, all_most);
                    put_turned(turned_at + KEY_DIM * ROW_PAIRS, pair, eight, all_rest);
                }
            }
        }
    }
    for (uint item = i; item < ROW_PAIRS * QUADS; item += THREADS) {
        uint row = item / QUADS * 2u, quad = item % QUADS;
        vec4 even, odd;
        convolved_pair(first + row, 2u * KEY_HEADS * KEY_QUADS + h * QUADS + quad, even, odd);
        uint at = (own * BLOCK_ROWS + row) * QUADS + quad;
        values.v[at] = beta_s[row] * even;
        values.v[at + QUADS] = beta_s[row + 1u] * odd;
    }
    memoryBarrierBuffer();
    barrier();
    memoryBarrierBuffer();

    TIMES_KEYS(keys_at)
    [[dont_unroll]] for (uint n = 0u; n < OWN_QUADS; n++) {
        uint item = n * SUBGROUP + gl_SubgroupInvocationID, row = own_row + item / ROW_QUADS, quad = item % ROW_QUADS;
        uvec4 column = quad * 4u + uvec4(0u, 1u, 2u, 3u);
        vec4 value = (beta_s[row] * UNIT_BACK * UNIT_BACK) * quad_of(row, quad) * decays(row, quad * 4u);
        put_quad(row, quad, mix(vec4(0.0), value, lessThan(column, uvec4(row))));
    }
    barrier();
    // The blocks of 16 × 16 on the diagonal.
    for (uint from_item = 0u; from_item < BLOCK_ROWS; from_item += THREADS) {
        uint item = from_item + i, corner = item / 16u * 16u, column = item % 16u;
        float line[16];
        if (item < BLOCK_ROWS) {
            UNROLL for (uint r = 0u; r < 16u; r++) {
                line[r] = r == column ? 1.0 : 0.0;
                UNROLL for (uint c = 0u; c < r; c++) line[r] -= element_of(corner + r, corner + c) * line[c];
                // Loads of all rows before the first product would take too many registers.
                if (r % 4u == 3u) subgroupMemoryBarrierShared();
            }
        }
        barrier();
        // Invocations share quads: a component that is chosen dynamically could be stored with the others.
#define PUT_LINE(which) UNROLL for (uint r = 0u; r < 16u; r++) words_s[(corner + r) * STEP + item / 4u].which = floatBitsToUint(line[r]);
        if (item < BLOCK_ROWS) {
            if (item % 4u == 0u) {
                PUT_LINE(x)
            } else if (item % 4u == 1u) {
                PUT_LINE(y)
            } else if (item % 4u == 2u) {
                PUT_LINE(z)
            } else {
                PUT_LINE(w)
            }
        }
        barrier();
    }
    // Then the rows of the blocks below, one after the other: T_i = -T_ii (Σ_j L_ij T_j).
    const uint MOST = (64u * 3u + THREADS - 1u) / THREADS;
    [[dont_unroll]] for (uint b = 1u; b < 4u; b++) {
        vec4 product[MOST];
        UNROLL for (uint n = 0u; n < MOST; n++) {
            uint item = n * THREADS + i, row = 16u * b + item / (4u * b), quad = item % (4u * b);
            product[n] = vec4(0.0);
            if (item < 64u * b) {
                for (uint k = 0u; k < 16u * b; k++) product[n] += element_of(row, k) * quad_of(k, quad);
            }
        }
        barrier();
        UNROLL for (uint n = 0u; n < MOST; n++) {
            uint item = n * THREADS + i;
            if (item < 64u * b) put_quad(16u * b + item / (4u * b), item % (4u * b), product[n]);
        }
        barrier();
        UNROLL for (uint n = 0u; n < MOST; n++) {
            uint item = n * THREADS + i, row = 16u * b + item / (4u * b), quad = item % (4u * b);
            product[n] = vec4(0.0);
            if (item < 64u * b) {
                for (uint k = 0u; k < 16u; k++) product[n] -= element_of(row, 16u * b + k) * quad_of(16u * b + k, quad);
            }
        }
        barrier();
        UNROLL for (uint n = 0u; n < MOST; n++) {
            uint item = n * THREADS + i;
            if (item < 64u * b) put_quad(16u * b + item / (4u * b), item % (4u * b), product[n]);
        }
        barrier();
    }
    uint solved_at = own * 4u * SOLVED_PART;
    for (uint item = i; item < SOLVED_PART; item += THREADS) {
        uint row = item / ROW_EIGHTS, quad = item % ROW_EIGHTS * 2u;
        uvec4 most, rest;
        split_eight(UNIT_SCALE * quad_of(row, quad), UNIT_SCALE * quad_of(row, quad + 1u), stride >> 31, most, rest);
        solved.v[solved_at + item] = most;
        solved.v[solved_at + SOLVED_PART + item] = rest;
    }
    memoryBarrierBuffer();
    barrier();
    memoryBarrierBuffer();

    // The left factor of E, whose parts take the place of its values in f32, a few rows at a time: the rest behind the most.
    TIMES_KEYS(queries_at)
    [[dont_unroll]] for (uint n = 0u; n < OWN_EIGHTS; n++) {
        uint item = n * SUBGROUP + gl_SubgroupInvocationID, row = own_row + item / ROW_EIGHTS, eight = item % ROW_EIGHTS;
        uvec4 column = eight * 8u + uvec4(0u, 1u, 2u, 3u);
        vec4 low = UNIT_BACK * quad_of(row, 2u * eight) * decays(row, column.x);
        vec4 high = UNIT_BACK * quad_of(row, 2u * eight + 1u) * decays(row, column.x + 4u);
        low = mix(vec4(0.0), low, lessThanEqual(column, uvec4(row)));
        high = mix(vec4(0.0), high, lessThanEqual(column + 4u, uvec4(row)));
        uvec4 most, rest;
        split_eight(low, high, stride >> 31, most, rest);
        SUBGROUP_BARRIER
        words_s[row * STEP + eight] = most;
        words_s[row * STEP + ROW_EIGHTS + eight] = rest;
    }
    SUBGROUP_BARRIER
    {
        Sums sums[TILES];
        UNROLL for (uint t = 0u; t < TILES; t++) sums[t] = Sums(0.0);
        [[dont_unroll]] for (uint k = 0u; k < BLOCK_ROWS / MATRIX_K; k++) {
            Left left_most, left_rest;
            LOAD_LEFT(left_most, left_rest, words_s, own_row * STEP + k * (MATRIX_K / 8u), STEP, ROW_EIGHTS)
            UNROLL for (uint t = 0u; t < TILES; t++) {
                Right most, rest;
                LOAD_RIGHT_ACROSS(most, rest, solved.v, solved_at + k * MATRIX_K * ROW_EIGHTS + t * (MATRIX_N / 8u),
                                  ROW_EIGHTS, SOLVED_PART)
                MULTIPLY_ADD_PARTS(sums[t], left_most, left_rest, most, rest)
            }
        }
        SUBGROUP_BARRIER
        STORE_SUMS(sums, 0u, TILES)
    }
    [[dont_unroll]] for (uint n = 0u; n < OWN_EIGHTS; n++) {
        uint item = n * SUBGROUP + gl_SubgroupInvocationID, row = own_row + item / ROW_EIGHTS, eight = item % ROW_EIGHTS;
        uvec4 most, rest;
        split_eight(UNIT_BACK * quad_of(row, 2u * eight), UNIT_BACK * quad_of(row, 2u * eight + 1u), stride >> 31, most, rest);
        uint at = solved_at + 2u * SOLVED_PART + row * ROW_EIGHTS + eight;
        solved.v[at] = most;
        solved.v[at + SOLVED_PART] = rest;
    }
}

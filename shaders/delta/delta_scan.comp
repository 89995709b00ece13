#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Chunked gated delta rule for prefill, part 2 of 3: the sequential scan over each prompt's blocks of 64 rows, on the
// matrices that `delta_blocks` has computed. With S the state before a block:
//
//   R = β v - β e^G (K̂ S),   V' = T R,   O = e^G (Q̂ S) + E R,   S ← e^{G_64} S + K̂ᵀ (e^{G_64 - G} V')
//
// mixed, solved, values, gates, chunk, cells: as in `delta_blocks`; a prompt's blocks are consecutive, from its `first
//        block` on
// x      [rows][stride] f32: q | k | v are u, the inputs of the convolution
// state  [cells][value heads][key_dim][value_dim] f32: starts as the state of cell `from`, or as zero without one
//        or the prompt starts at position 0. The final state is stored in cell `slot`; the state after keepN_at rows is
//        stored in cell keepN as well (a snapshot for the prefix cache)
// window [cells][8][channels]: u of the last three positions is stored in the same cells, at position % 8
// output [rows][value heads · value_dim] f32: O
//
// Slots that decode in the step, the last of its prompts, are left to `delta_step`.
// One workgroup computes 16 · TOGETHER value columns of one value head of one prompt. A head's first workgroup also
// writes the windows: those of v, and those of q and k if the value head is the first of its key head.
// MATRIX 1: cooperative matrices, four subgroups for each 16 columns. All products are transposed, so that a lane's
// elements of one product's result are those that it needs as an operand of the next: Sᵀ K̂ᵀ, Rᵀ Tᵀ, Sᵀ Q̂ᵀ + Rᵀ Eᵀ,
// V'ᵀ K̂. Each of the four subgroups computes a quarter of the block's rows in all products but the last, and in the
// last a quarter of the key dimension, which is its part of the state. They exchange Sᵀ, Rᵀ and V'ᵀ through shared
// memory, as pairs of bfloat16.
// MATRIX 0: everything is f32, computed by 64 invocations.
// Traffic: a block's part of the scratch buffers once per workgroup, outputs once, states once per prompt.
#include "common.glsl"
#include "delta.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KEY_HEADS = 16;
layout(constant_id = 2) const uint VALUE_HEADS = 32;
layout(constant_id = 3) const uint KEY_DIM = 128;
layout(constant_id = 4) const uint VALUE_DIM = 128;
layout(constant_id = 5) const uint TOGETHER = 1;  // multiples of 16 columns per workgroup
layout(constant_id = 6) const uint TILED = 0;     // order of the value heads, see delta.glsl

#if MATRIX == 1
#define WEIGHT 0
#include "fragments.glsl"
const uint THREADS = 128u * TOGETHER;
#else
const uint THREADS = 64u;
#endif

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };
#if MATRIX == 1
#define Mixed Words4In
#define Parts Words4In
#define State FloatsInOut
#define Output FloatsOut
#else
#define Mixed Floats4In
#define Parts FloatsIn
#define State Floats4InOut
#define Output Floats4Out
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Floats4Out { vec4 v[]; };
#endif

layout(push_constant) uniform Args {
    Floats4In x;
    Words4In chunk;
    Words4In cells;
    Mixed mixed;
    Parts solved;
    Floats4In values;
    FloatsIn gates;
    State state;
    Floats4InOut window;
    Output o;
    uint stride;
};

const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint SLICES = VALUE_DIM / (16u * TOGETHER);

#include "delta_windows.glsl"

#if MATRIX == 1
#include "pairs.glsl"

const uint KEY_BLOCKS = KEY_DIM / 16u;
const uint OWN = (KEY_BLOCKS + 3u) / 4u;           // key blocks per subgroup, every fourth

shared uvec4 state_s[TOGETHER * KEY_BLOCKS * 64u]; // [columns][key_dim / 16][most, rest][32 lanes]
shared uvec4 r_s[TOGETHER * 4u * 64u];             // [columns][quarter of rows][most, rest][32 lanes]
shared uvec4 made_s[TOGETHER * 4u * 64u];

#define SHARE(words, at, sums) {                                    \
        uvec4 most_, rest_;                                         \
        split_block(SUMS_LOW(sums), SUMS_HIGH(sums), most_, rest_); \
        words[at] = most_;                                          \
        words[(at) + 32u] = rest_;                                  \
    }

// Accumulate the four products of the parts in three sums, so that the products do not depend on one another.
#define THREE_SUMS(n_) Sums n_[3]; n_[0] = n_[1] = n_[2] = NO_SUMS;
#define PRODUCT(a_, b_, n_, most_, rest_) {                                          \
        Tokens x_most, x_rest;                                                      \
        Weights y_most, y_rest;                                                     \
        SET_WEIGHTS(x_most, a_)                                                     \
        SET_WEIGHTS(x_rest, b_)                                                     \
        SET_WEIGHTS(y_most, most_)                                                  \
        SET_WEIGHTS(y_rest, rest_)                                                  \
        MULTIPLY_ADD(n_[0], x_most, y_most)                                         \
        MULTIPLY_ADD(n_[1], x_most, y_rest)                                         \
        MULTIPLY_ADD(n_[1], x_rest, y_rest)                                         \
        MULTIPLY_ADD(n_[2], x_rest, y_most)                                         \
    }

#define LOAD_ROWS(to, part) {                                                                            \
        uint at_ = mixed_at + ((part) * 4u + quarter) * KEY_BLOCKS * 64u;                                \
        [[unroll]] for (uint n = 0u; n < KEY_BLOCKS; n++) {                                              \
            to[2u * n] = mixed.v[at_ + n * 64u];                                                         \
            to[2u * n + 1u] = mixed.v[at_ + n * 64u + 32u];                                              \
        }                                                                                                \
    }

void main() {
    uint h = gl_WorkGroupID.x / SLICES, slice = gl_WorkGroupID.x % SLICES, number = gl_WorkGroupID.y;
    uint prompts = chunk.v[0].x;
    if (number >= prompts - chunk.v[0].w) return;
    uvec4 prompt = chunk.v[1u + number], first = cells.v[2u * number], rest = cells.v[2u * number + 1u];
    uint slot = prompt.x;
    start = prompt.y;
    first_row = prompt.z;
    from = first.x;
    in_use = (number + 1u < prompts ? chunk.v[2u + number].z : chunk.v[0].z) - first_row;
    uvec4 keeps = uvec4(first.y, first.z, first.w, rest.x);

    uint columns = LANE_GROUP / 4u, quarter = LANE_GROUP % 4u, g = LANE >> 2, t = LANE & 3u;
    uint kh = KEY_HEAD(h), column = (slice * TOGETHER + columns) * 16u + g;
    uint blocks = (in_use + BLOCK_ROWS - 1u) / BLOCK_ROWS;

    // Start of a block's data: in `mixed` the three sets of key blocks of its key head, in the other buffers its value
    // head's.
    uint mixed_at = (rest.y * KEY_HEADS + kh) * 12u * KEY_BLOCKS * 64u + LANE;
    uint own = rest.y * VALUE_HEADS + h;
    uvec4 key_rows[2u * KEY_BLOCKS];
    LOAD_ROWS(key_rows, 1u)

    // Sᵀ: a lane has value columns g and g + 8, and of each block the key dimensions 2t, 2t + 1, 2t + 8 and 2t + 9.
    Sums s[OWN];
    bool begins = from == NO_CELL || start == 0u;
    uint head_at = h * KEY_DIM * VALUE_DIM + 2u * t * VALUE_DIM + column, cell_floats = VALUE_HEADS * KEY_DIM * VALUE_DIM;
#define STATE_AT(cell, n, e) ((cell) * cell_floats + head_at + ((quarter + 4u * (n)) * 16u + ((e) & 1) + (((e) >> 1) & 1) * 8u) * VALUE_DIM + ((e) >> 2) * 8u)
// Element numbers are constants: a dynamically indexed element would go through memory.
#define EIGHT(what) what(0) what(1) what(2) what(3) what(4) what(5) what(6) what(7)
#define LOAD_ONE(e) s[n][e] = state.v[STATE_AT(from, n, e)];
#define STORE_ONE(e) state.v[STATE_AT(cell, n, e)] = s[n][e];
    [[unroll]] for (uint n = 0u; n < OWN; n++) {
        s[n] = NO_SUMS;
        if (quarter + 4u * n < KEY_BLOCKS) {
            if (!begins) {
                EIGHT(LOAD_ONE)
            }
            SHARE(state_s, (columns * KEY_BLOCKS + quarter + 4u * n) * 64u + LANE, s[n])
        }
    }
    if (slice == 0u) write_windows(h, slot, keeps);
    barrier();

    for (uint block = 0u; block < blocks; block++) {
        uvec4 query_rows[2u * KEY_BLOCKS];
        LOAD_ROWS(query_rows, 0u)
        uint values_at = (own * (VALUE_DIM / 16u) * 4u + (slice * TOGETHER + columns) * 4u + quarter) * 64u + LANE;
        vec4 v_low = values.v[values_at], v_high = values.v[values_at + 32u];
        uint gates_at = own * 4u * BLOCK_ROWS + quarter * 16u + 2u * t;
#define GATE(n) vec4(gates.v[gates_at + (n) * 64u], gates.v[gates_at + (n) * 64u + 1u], gates.v[gates_at + (n) * 64u + 8u], gates.v[gates_at + (n) * 64u + 9u])
        vec4 grown = GATE(0u), written = GATE(1u), left = GATE(2u);
        float decay = gates.v[own * 4u * BLOCK_ROWS + BLOCK_ROWS - 1u];

        THREE_SUMS(from_key)
        [[unroll]] for (uint n = 0u; n < KEY_BLOCKS; n++) {
            uint at = (columns * KEY_BLOCKS + n) * 64u + LANE;
            PRODUCT(state_s[at], state_s[at + 32u], from_key, key_rows[2u * n], key_rows[2u * n + 1u])
        }
        // Blocks to the right of the diagonal are zero: the diagonal block is loaded in their place and not used.
        uvec4 t_words[8], e_words[8];
        uint solved_at = own * 20u * 64u + quarter * (quarter + 1u) / 2u * 64u + LANE;
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            uint at = solved_at + min(j, quarter) * 64u;
            t_words[2u * j] = solved.v[at];
            t_words[2u * j + 1u] = solved.v[at + 32u];
            e_words[2u * j] = solved.v[at + 640u];
            e_words[2u * j + 1u] = solved.v[at + 672u];
        }
        {
            vec4 r_low = v_low - written * (SUMS_LOW(from_key[0]) + (SUMS_LOW(from_key[1]) + SUMS_LOW(from_key[2])));
            vec4 r_high = v_high - written * (SUMS_HIGH(from_key[0]) + (SUMS_HIGH(from_key[1]) + SUMS_HIGH(from_key[2])));
            uvec4 most, rest_words;
            split_block(r_low, r_high, most, rest_words);
            uint at = (columns * 4u + quarter) * 64u + LANE;
            r_s[at] = most;
            r_s[at + 32u] = rest_words;
        }
        THREE_SUMS(from_query)
        [[unroll]] for (uint n = 0u; n < KEY_BLOCKS; n++) {
            uint at = (columns * KEY_BLOCKS + n) * 64u + LANE;
            PRODUCT(state_s[at], state_s[at + 32u], from_query, query_rows[2u * n], query_rows[2u * n + 1u])
        }
        vec4 o_low = grown * (SUMS_LOW(from_query[0]) + (SUMS_LOW(from_query[1]) + SUMS_LOW(from_query[2])));
        vec4 o_high = grown * (SUMS_HIGH(from_query[0]) + (SUMS_HIGH(from_query[1]) + SUMS_HIGH(from_query[2])));
        barrier();

        uvec4 turned[OWN * 8u];
        [[unroll]] for (uint n = 0u; n < OWN; n++) {
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                uint at = mixed_at + (8u * KEY_BLOCKS + min(quarter + 4u * n, KEY_BLOCKS - 1u) * 4u + j) * 64u;
                turned[n * 8u + 2u * j] = mixed.v[at];
                turned[n * 8u + 2u * j + 1u] = mixed.v[at + 32u];
            }
        }
        THREE_SUMS(made)
        THREE_SUMS(seen)
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            if (j <= quarter) {
                uint at = (columns * 4u + j) * 64u + LANE;
                PRODUCT(r_s[at], r_s[at + 32u], made, t_words[2u * j], t_words[2u * j + 1u])
                PRODUCT(r_s[at], r_s[at + 32u], seen, e_words[2u * j], e_words[2u * j + 1u])
            }
        }
        {
            vec4 low = left * (SUMS_LOW(made[0]) + (SUMS_LOW(made[1]) + SUMS_LOW(made[2])));
            vec4 high = left * (SUMS_HIGH(made[0]) + (SUMS_HIGH(made[1]) + SUMS_HIGH(made[2])));
            uvec4 most, rest_words;
            split_block(low, high, most, rest_words);
            uint at = (columns * 4u + quarter) * 64u + LANE;
            made_s[at] = most;
            made_s[at + 32u] = rest_words;
        }
        barrier();

        // The next block's keys; after the last block, its own keys are loaded again.
        uint more = block + 1u < blocks ? 1u : 0u;
        mixed_at += more * KEY_HEADS * 12u * KEY_BLOCKS * 64u;
        own += more * VALUE_HEADS;
        LOAD_ROWS(key_rows, 1u)
        o_low += SUMS_LOW(seen[0]) + (SUMS_LOW(seen[1]) + SUMS_LOW(seen[2]));
        o_high += SUMS_HIGH(seen[0]) + (SUMS_HIGH(seen[1]) + SUMS_HIGH(seen[2]));
        uint row = block * BLOCK_ROWS + quarter * 16u + 2u * t;
#define WRITE_ROW(index_, low_, high_)                                                \
        if (index_ < in_use) {                                                        \
            uint at = ((first_row + index_) * VALUE_HEADS + h) * VALUE_DIM + column;  \
            o.v[at] = low_;                                                           \
            o.v[at + 8u] = high_;                                                     \
        }
        WRITE_ROW(row, o_low.x, o_high.x)
        WRITE_ROW(row + 1u, o_low.y, o_high.y)
        WRITE_ROW(row + 8u, o_low.z, o_high.z)
        WRITE_ROW(row + 9u, o_low.w, o_high.w)
        uint end = min((block + 1u) * BLOCK_ROWS, in_use);
        [[unroll]] for (uint n = 0u; n < OWN; n++) {
            if (quarter + 4u * n < KEY_BLOCKS) {
                THREE_SUMS(added)
                [[unroll]] for (uint j = 0u; j < 4u; j++) {
                    uint at = (columns * 4u + j) * 64u + LANE;
                    PRODUCT(made_s[at], made_s[at + 32u], added, turned[n * 8u + 2u * j], turned[n * 8u + 2u * j + 1u])
                }
                // The products are not accumulated in the state itself: the matrix units truncate the values that they
                // add to an accumulator.
                s[n] = s[n] * decay + (added[0] + (added[1] + added[2]));
                SHARE(state_s, (columns * KEY_BLOCKS + quarter + 4u * n) * 64u + LANE, s[n])
                uint cell;
                if (end == in_use) {
                    cell = slot; EIGHT(STORE_ONE)
                }
                if (end == keeps.x) {
                    cell = keeps.y; EIGHT(STORE_ONE)
                }
                if (end == keeps.z) {
                    cell = keeps.w; EIGHT(STORE_ONE)
                }
            }
        }
        barrier();
    }
}
#else
shared vec4 state_s[KEY_DIM * 4u];
shared vec4 r_s[BLOCK_ROWS * 4u];
shared vec4 made_s[BLOCK_ROWS * 4u];

void main() {
    uint h = gl_WorkGroupID.x / SLICES, slice = gl_WorkGroupID.x % SLICES, number = gl_WorkGroupID.y;
    uint i = gl_LocalInvocationIndex, prompts = chunk.v[0].x;
    if (number >= prompts - chunk.v[0].w) return;
    uvec4 prompt = chunk.v[1u + number], first = cells.v[2u * number], rest = cells.v[2u * number + 1u];
    uint slot = prompt.x;
    start = prompt.y;
    first_row = prompt.z;
    from = first.x;
    in_use = (number + 1u < prompts ? chunk.v[2u + number].z : chunk.v[0].z) - first_row;
    uvec4 keeps = uvec4(first.y, first.z, first.w, rest.x);
    if (slice == 0u) write_windows(h, slot, keeps);

    // An invocation has every 64th row of the state: per key dimension, four quads of columns.
    const uint ROWS = (KEY_DIM + THREADS - 1u) / THREADS;
    bool begins = from == NO_CELL || start == 0u;
    for (uint n = 0u; n < ROWS; n++) {
        uint d = n * THREADS + i;
        uint at = ((from * VALUE_HEADS + h) * KEY_DIM + d) * QUADS + slice * 4u;
        if (d < KEY_DIM) {
            [[unroll]] for (uint c = 0u; c < 4u; c++) state_s[d * 4u + c] = begins ? vec4(0.0) : state.v[at + c];
        }
    }
    barrier();
    for (uint block = 0u; block * BLOCK_ROWS < in_use; block++) {
        uint own = (rest.y + block) * VALUE_HEADS + h, gates_at = own * 4u * BLOCK_ROWS + i;
        uint q_at = (own * 2u * BLOCK_ROWS + i) * KEY_QUADS, k_at = q_at + BLOCK_ROWS * KEY_QUADS;
        vec4 r[4], w[4], made[4];
        [[unroll]] for (uint c = 0u; c < 4u; c++) r[c] = w[c] = made[c] = vec4(0.0);
        for (uint d = 0u; d < KEY_QUADS; d++) {
            vec4 q = mixed.v[q_at + d], k = mixed.v[k_at + d];
            [[unroll]] for (uint c = 0u; c < 4u; c++) {
                mat4 s = mat4(state_s[d * 16u + c], state_s[d * 16u + 4u + c], state_s[d * 16u + 8u + c], state_s[d * 16u + 12u + c]);
                r[c] += s * k;
                w[c] += s * q;
            }
        }
        [[unroll]] for (uint c = 0u; c < 4u; c++) {
            w[c] *= gates.v[gates_at];
            r_s[i * 4u + c] = values.v[(own * BLOCK_ROWS + i) * QUADS + slice * 4u + c] - gates.v[gates_at + BLOCK_ROWS] * r[c];
        }
        barrier();
        for (uint j = 0u; j < BLOCK_ROWS; j++) {
            uint at = (own * 2u * BLOCK_ROWS + i) * BLOCK_ROWS + j;
            float t = solved.v[at], e = solved.v[at + BLOCK_ROWS * BLOCK_ROWS];
            [[unroll]] for (uint c = 0u; c < 4u; c++) {
                made[c] += t * r_s[j * 4u + c];
                w[c] += e * r_s[j * 4u + c];
            }
        }
        bool there = block * BLOCK_ROWS + i < in_use;
        [[unroll]] for (uint c = 0u; c < 4u; c++) {
            made_s[i * 4u + c] = gates.v[gates_at + 2u * BLOCK_ROWS] * made[c];
            if (there) o.v[((first_row + block * BLOCK_ROWS + i) * VALUE_HEADS + h) * QUADS + slice * 4u + c] = w[c];
        }
        barrier();
        float decay = gates.v[own * 4u * BLOCK_ROWS + BLOCK_ROWS - 1u];
        uint end = min((block + 1u) * BLOCK_ROWS, in_use);
        for (uint n = 0u; n < ROWS; n++) {
            // An invocation without a row does not read the last one's, which is written below.
            bool has = n * THREADS + i < KEY_DIM;
            uint d = min(n * THREADS + i, KEY_DIM - 1u);
            vec4 next[4];
            [[unroll]] for (uint c = 0u; c < 4u; c++) {
                next[c] = vec4(0.0);
                if (has) next[c] = decay * state_s[d * 4u + c];
            }
            for (uint j = 0u; j < BLOCK_ROWS; j++) {
                vec4 quad = mixed.v[((own * 2u + 1u) * BLOCK_ROWS + j) * KEY_QUADS + d / 4u];
                float k = (d & 2u) == 0u ? ((d & 1u) == 0u ? quad.x : quad.y) : ((d & 1u) == 0u ? quad.z : quad.w);
                [[unroll]] for (uint c = 0u; c < 4u; c++) next[c] += k * made_s[j * 4u + c];
            }
            if (has) {
                uint inside = (h * KEY_DIM + d) * QUADS + slice * 4u, cell = VALUE_HEADS * KEY_DIM * QUADS;
                [[unroll]] for (uint c = 0u; c < 4u; c++) {
                    state_s[d * 4u + c] = next[c];
                    if (end == in_use) state.v[slot * cell + inside + c] = next[c];
                    if (end == keeps.x) state.v[keeps.y * cell + inside + c] = next[c];
                    if (end == keeps.z) state.v[keeps.w * cell + inside + c] = next[c];
                }
            }
        }
        barrier();
    }
}
#endif

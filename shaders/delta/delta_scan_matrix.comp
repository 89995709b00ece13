#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
#pragma use_vulkan_memory_model
// Chunked gated delta rule for prefill, part 2 of 3, on matrix units of any shape, of which nothing but the shape is known:
// the sequential scan over each prompt's blocks of 64 rows, on what `delta_blocks_matrix` has computed. With S the state
// before a block:
//
//   R = β v - β e^G (K̂ S),   V' = T R,   O = e^G (Q̂ S) + E R,   S ← e^{G_64} S + K̂ᵀ (e^{G_64 - G} V')
//
// mixed, turned, solved, values, gates: as in `delta_blocks_matrix`
// x, chunk, cells, state, window, output: as in `delta_scan`
//
// One workgroup computes 16 · TOGETHER value columns of one value head of one prompt, in four or eight subgroups. In all
// products but the last, a subgroup computes MATRIX_M of the block's rows; in the last, a part of the key dimensions, whose
// part of S stays in its matrices, in f32. A head's first workgroup also writes the windows.
// Only the device knows which invocation has which element of a matrix. So sums go through a slab of shared memory to the
// invocations of a subgroup, which apply the gates and split the values of S, R and V' for the next product, each
// subgroup with one factor for all of its values; the next product multiplies the sums over such a part by what undoes the
// factor. A matrix wider in K than in M has the rows of two subgroups, which then have one factor.
// The left operands come from device memory, the right ones from shared memory, where they are transposed:
// [most, rest][columns][key_dim or 64 rows], f16 (`half_pairs.glsl`). Matrices are in no branch: lavapipe 26 computes wrong
// elements there.
// Traffic: a block's part of the scratch buffers once per workgroup, outputs once, states once per prompt.
#include "common.glsl"
#include "delta.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KEY_HEADS = 16;
layout(constant_id = 2) const uint VALUE_HEADS = 32;
layout(constant_id = 3) const uint KEY_DIM = 128;
layout(constant_id = 4) const uint VALUE_DIM = 128;
layout(constant_id = 5) const uint TOGETHER = 1;   // multiples of 16 columns per workgroup
layout(constant_id = 6) const uint TILED = 0;      // order of the value heads, see delta.glsl
layout(constant_id = 7) const uint MATRIX_M = 16;
layout(constant_id = 8) const uint MATRIX_N = 16;
layout(constant_id = 9) const uint MATRIX_K = 16;
layout(constant_id = 10) const uint SUBGROUP = 32; // the subgroups' size

#include "half_pairs.glsl"

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Words4In chunk;
    Words4In cells;
    Words4In mixed;
    Words4In solved;
    FloatsIn values;
    Floats4In gates;
    FloatsInOut state;
    Floats4InOut window;
    FloatsOut o;
    uint stride;
    Words4In turned;
};

const uint SUBGROUPS = BLOCK_ROWS / MATRIX_M;
const uint THREADS = SUBGROUPS * SUBGROUP;
const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint COLUMNS = 16u * TOGETHER;
const uint SLICES = VALUE_DIM / COLUMNS;
const uint TILES = COLUMNS / MATRIX_N;
// Words of 16 bytes in device memory: of a row of q̂ or k̂, of a row of T, E or k̂ᵀ, and of a part of each.
const uint KEY_EIGHTS = KEY_DIM / 8u;
const uint ROW_EIGHTS = BLOCK_ROWS / 8u;
const uint MIXED_PART = BLOCK_ROWS * KEY_EIGHTS;
const uint SOLVED_PART = BLOCK_ROWS * ROW_EIGHTS;
// Rows of R and V' with one factor, and the number of such groups.
const uint GROUP = MATRIX_M > MATRIX_K ? MATRIX_M : MATRIX_K;
const uint GROUPS = BLOCK_ROWS / GROUP;
// Key dimensions of a subgroup's part of S, the number of parts that exist, and a part's matrices of MATRIX_M rows.
const uint PART = (KEY_DIM + SUBGROUPS * GROUP - 1u) / (SUBGROUPS * GROUP) * GROUP;
const uint PARTS = (KEY_DIM + PART - 1u) / PART;
const uint OWN = PART / MATRIX_M;
// Iterations of the loops over parts and groups that are unrolled, so that loads are on their way early. Subgroups of 8 or 16
// are Intel's, whose registers do not suffice for that, and lavapipe's, which would compile for minutes.
const uint PARTS_AHEAD = SUBGROUP >= 32u ? PARTS : 1u;
const uint GROUPS_AHEAD = SUBGROUP >= 32u ? GROUPS : 1u;

// Strides in 16-byte words, from a column to the next. The word beyond the data keeps columns in different banks.
const uint S_STRIDE = KEY_EIGHTS + 1u;
const uint R_STRIDE = ROW_EIGHTS + 1u;
const uint SLAB_STRIDE = MATRIX_M / 4u + 1u;
const uint S_PART = COLUMNS * S_STRIDE;
const uint R_PART = COLUMNS * R_STRIDE;
const uint SLAB = COLUMNS * SLAB_STRIDE;

// Matrices are loaded and stored from arrays of 16-byte elements, as rows of a matrix must begin at multiples of 16 bytes.
shared uvec4 state_s[2u * S_PART];
shared uvec4 r_s[2u * R_PART];
shared uvec4 made_s[2u * R_PART];
shared uvec4 slab_s[SUBGROUPS * SLAB];        // [subgroups][columns][MATRIX_M] f32
// What undoes the factors of the parts of S, and of the groups of rows of R and V'; the largest magnitude of each subgroup.
shared float state_back_s[SUBGROUPS];
shared float r_back_s[SUBGROUPS];
shared float made_back_s[SUBGROUPS];
shared float largest_s[SUBGROUPS];

#include "delta_windows.glsl"

// An invocation has quads of four rows of a column of its subgroup's slab: `e`-th of LOADS, in column `c`, from row
// `4 * quad` on.
const uint ITEMS = COLUMNS * (MATRIX_M / 4u);
const uint LOADS = (ITEMS + SUBGROUP - 1u) / SUBGROUP;
#define EACH_QUAD(body)                                                    \
    UNROLL for (uint e = 0u; e < LOADS; e++) {                             \
        uint item_ = e * SUBGROUP + gl_SubgroupInvocationID;               \
        if (ITEMS % SUBGROUP == 0u || item_ < ITEMS) {                     \
            uint c = item_ % COLUMNS, quad = item_ / COLUMNS;              \
            body                                                           \
        }                                                                  \
    }
#define TO_SLAB(sums) {                                                                                       \
        SUBGROUP_BARRIER                                                                                      \
        UNROLL for (uint t = 0u; t < TILES; t++)                                                              \
            coopMatStore((sums)[t], slab_s, slab + t * MATRIX_N * SLAB_STRIDE, SLAB_STRIDE,                   \
                         gl_CooperativeMatrixLayoutColumnMajor);                                              \
        SUBGROUP_BARRIER                                                                                      \
    }
#define OF_SLAB uintBitsToFloat(slab_s[slab + c * SLAB_STRIDE + quad])
// Stores four values of a transposed right operand, which begin at word `at` and half `quad_` % 2 of it.
#define PUT_QUAD(words, at, part, quad_, scaled) {                         \
        uvec2 most_;                                                       \
        uvec2 rest_;                                                       \
        split_four(scaled, stride >> 31, most_, rest_);                    \
        if (((quad_) & 1u) == 0u) {                                        \
            words[at].xy = most_;                                          \
            words[(at) + (part)].xy = rest_;                               \
        } else {                                                           \
            words[at].zw = most_;                                          \
            words[(at) + (part)].zw = rest_;                               \
        }                                                                  \
    }
// Computes the product of a left operand in device memory, whose parts begin at word `at`, and a right one in shared memory, of
// `size` elements, which are `parts` parts of `of_part` with a factor each. The last part may be smaller than the others, but
// not in loops that are not unrolled: then there are eight parts.
#define MULTIPLY(sums, left, at, left_stride, left_apart, right, right_stride, right_apart, size, parts, of_part, ahead, backs) \
    UNROLL for (uint t = 0u; t < TILES; t++) sums[t] = Sums(0.0);                                             \
    [[dont_unroll]] for (uint from_part = 0u; from_part < parts; from_part += ahead) {                        \
        UNROLL for (uint p = from_part; p < from_part + ahead; p++) {                                         \
            Sums part_sums[TILES];                                                                            \
            UNROLL for (uint t = 0u; t < TILES; t++) part_sums[t] = Sums(0.0);                                \
            UNROLL for (uint k = 0u; k < of_part; k += MATRIX_K) {                                            \
                if (size % of_part == 0u || p * of_part + k < size) {                                         \
                    Left left_most;                                                                           \
                    Left left_rest;                                                                           \
                    LOAD_LEFT(left_most, left_rest, left, (at) + (p * of_part + k) / 8u, left_stride, left_apart) \
                    UNROLL for (uint t = 0u; t < TILES; t++) {                                                \
                        Right right_most;                                                                     \
                        Right right_rest;                                                                     \
                        LOAD_RIGHT(right_most, right_rest, right,                                             \
                                   t * MATRIX_N * right_stride + (p * of_part + k) / 8u, right_stride, right_apart) \
                        MULTIPLY_ADD_PARTS(part_sums[t], left_most, left_rest, right_most, right_rest)        \
                    }                                                                                         \
                }                                                                                             \
            }                                                                                                 \
            float back = backs[p];                                                                            \
            UNROLL for (uint t = 0u; t < TILES; t++) sums[t] = sums[t] + part_sums[t] * back;                 \
        }                                                                                                     \
    }
#define TIMES_STATE(sums, at) \
    MULTIPLY(sums, mixed.v, at, KEY_EIGHTS, MIXED_PART, state_s, S_STRIDE, S_PART, KEY_DIM, PARTS, PART, PARTS_AHEAD, state_back_s)
#define TIMES_ROWS(sums, left, at, apart, right, backs) \
    MULTIPLY(sums, left, at, ROW_EIGHTS, apart, right, R_STRIDE, R_PART, BLOCK_ROWS, GROUPS, GROUP, GROUPS_AHEAD, backs)

// Stores the invocation's quads of R or V', with one factor for the group of rows.
#define SHARE_ROWS(words, backs, quads) {                                                                     \
        float largest_ = 0.0;                                                                                 \
        EACH_QUAD(largest_ = max(largest_, largest_of(quads[e]));)                                            \
        largest_ = subgroupMax(largest_);                                                                     \
        if (GROUP > MATRIX_M) {                                                                               \
            if (gl_SubgroupInvocationID == 0u) largest_s[gl_SubgroupID] = largest_;                           \
            barrier();                                                                                        \
            UNROLL for (uint n = 0u; n < GROUP / MATRIX_M; n++)                                               \
                largest_ = max(largest_, largest_s[group * (GROUP / MATRIX_M) + n]);                          \
        }                                                                                                     \
        if (gl_SubgroupInvocationID == 0u && own_row % GROUP == 0u) backs[group] = back_of(largest_);         \
        float scale_ = scale_of(largest_);                                                                    \
        EACH_QUAD(                                                                                            \
            uint quad_ = own_row / 4u + quad;                                                                 \
            uint at_ = c * R_STRIDE + quad_ / 2u;                                                             \
            PUT_QUAD(words, at_, R_PART, quad_, quads[e] * scale_)                                            \
        )                                                                                                     \
    }

// Stores four rows of a column of the state in a cell.
#define STORE_STATE(cell, value) {                                                                            \
        uint at_ = (cell) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + head_at + (dim + quad * 4u) * VALUE_DIM + c; \
        UNROLL for (uint n_ = 0u; n_ < 4u; n_++) state.v[at_ + n_ * VALUE_DIM] = value[n_];                   \
    }
// Executes `body` for each of the subgroup's quads of S, with its first key dimension `dim + 4 * quad` and its value `now`.
#define EACH_OF_STATE(body) {                                                                                 \
        UNROLL for (uint n = 0u; n < OWN; n++) {                                                              \
            uint dim = gl_SubgroupID * PART + n * MATRIX_M;                                                   \
            SUBGROUP_BARRIER                                                                                  \
            UNROLL for (uint t = 0u; t < TILES; t++)                                                          \
                coopMatStore(s[n * TILES + t], slab_s, slab + t * MATRIX_N * SLAB_STRIDE, SLAB_STRIDE,        \
                             gl_CooperativeMatrixLayoutColumnMajor);                                          \
            SUBGROUP_BARRIER                                                                                  \
            if (dim < KEY_DIM) {                                                                              \
                EACH_QUAD(                                                                                    \
                    vec4 now = OF_SLAB;                                                                       \
                    body                                                                                      \
                )                                                                                             \
            }                                                                                                 \
        }                                                                                                     \
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
    uint blocks = (in_use + BLOCK_ROWS - 1u) / BLOCK_ROWS;

    uint kh = KEY_HEAD(h), column = slice * COLUMNS;
    uint slab = gl_SubgroupID * SLAB;
    // The subgroup's first row of a block, and the group of rows that has its factor.
    uint own_row = gl_SubgroupID * MATRIX_M, group = own_row / GROUP;
    // q̂ and k̂ are those of the first value head that uses the key head.
    uint key_h = TILED == 1u ? kh : kh * (VALUE_HEADS / KEY_HEADS);
    if (slice == 0u) write_windows(h, slot, keeps);

    // A subgroup's part of S. Parts past the end, and matrices past the end of the last part, repeat the last rows.
    Sums s[OWN * TILES];
    bool begins = from == NO_CELL || start == 0u;
    uint head_at = h * KEY_DIM * VALUE_DIM + column;
    UNROLL for (uint n = 0u; n < OWN; n++) {
        uint dim = min(gl_SubgroupID * PART + n * MATRIX_M, KEY_DIM - MATRIX_M);
        EACH_QUAD(
            vec4 now = vec4(0.0);
            if (!begins) {
                uint at = from * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + head_at + (dim + quad * 4u) * VALUE_DIM + c;
                now = vec4(state.v[at], state.v[at + VALUE_DIM], state.v[at + 2u * VALUE_DIM], state.v[at + 3u * VALUE_DIM]);
            }
            slab_s[slab + c * SLAB_STRIDE + quad] = floatBitsToUint(now);
        )
        SUBGROUP_BARRIER
        UNROLL for (uint t = 0u; t < TILES; t++)
            coopMatLoad(s[n * TILES + t], slab_s, slab + t * MATRIX_N * SLAB_STRIDE, SLAB_STRIDE,
                        gl_CooperativeMatrixLayoutColumnMajor);
        SUBGROUP_BARRIER
    }

    for (uint block = 0u; block < blocks; block++) {
        // Share S with the other subgroups.
        {
            float largest = 0.0;
            UNROLL for (uint i = 0u; i < OWN * TILES; i++) {
                UNROLL for (uint e = 0u; e < s[i].length(); e++) largest = max(largest, abs(s[i][e]));
            }
            largest = subgroupMax(largest);
            if (gl_SubgroupInvocationID == 0u) state_back_s[gl_SubgroupID] = back_of(largest);
            float scale = scale_of(largest);
            uint end = block * BLOCK_ROWS;
            EACH_OF_STATE(
                uint quad_at = dim / 4u + quad;
                uint at = c * S_STRIDE + quad_at / 2u;
                PUT_QUAD(state_s, at, S_PART, quad_at, now * scale)
                if (end > 0u && end == keeps.x) STORE_STATE(keeps.y, now)
                if (end > 0u && end == keeps.z) STORE_STATE(keeps.w, now)
            )
        }
        uint of_block = rest.y + block, own = of_block * VALUE_HEADS + h, gates_at = own * BLOCK_ROWS + own_row / 4u;
        vec4 v[LOADS];
        EACH_QUAD(
            uint at = (own * BLOCK_ROWS + own_row + quad * 4u) * VALUE_DIM + column + c;
            v[e] = vec4(values.v[at], values.v[at + VALUE_DIM], values.v[at + 2u * VALUE_DIM], values.v[at + 3u * VALUE_DIM]);
        )
        float decay = gates.v[own * BLOCK_ROWS + BLOCK_ROWS / 4u - 1u].w;
        barrier();

        Sums sums[TILES];
        uint query_at = (of_block * VALUE_HEADS + key_h) * 4u * MIXED_PART + own_row * KEY_EIGHTS;
        TIMES_STATE(sums, query_at + 2u * MIXED_PART)
        TO_SLAB(sums)
        EACH_QUAD(v[e] -= gates.v[gates_at + BLOCK_ROWS / 4u + quad] * OF_SLAB;)
        SHARE_ROWS(r_s, r_back_s, v)
        TIMES_STATE(sums, query_at)
        TO_SLAB(sums)
        vec4 output_[LOADS];
        EACH_QUAD(output_[e] = gates.v[gates_at + quad] * OF_SLAB;)
        barrier();

        uint solved_at = own * 4u * SOLVED_PART + own_row * ROW_EIGHTS;
        TIMES_ROWS(sums, solved.v, solved_at, SOLVED_PART, r_s, r_back_s)
        TO_SLAB(sums)
        EACH_QUAD(v[e] = gates.v[gates_at + BLOCK_ROWS / 2u + quad] * OF_SLAB;)
        SHARE_ROWS(made_s, made_back_s, v)
        TIMES_ROWS(sums, solved.v, solved_at + 2u * SOLVED_PART, SOLVED_PART, r_s, r_back_s)
        TO_SLAB(sums)
        EACH_QUAD(
            vec4 value = output_[e] + OF_SLAB;
            uint row = block * BLOCK_ROWS + own_row + quad * 4u;
            uint at = ((first_row + row) * VALUE_HEADS + h) * VALUE_DIM + column + c;
            UNROLL for (uint n = 0u; n < 4u; n++) {
                if (row + n < in_use) o.v[at + n * (VALUE_HEADS * VALUE_DIM)] = value[n];
            }
        )
        barrier();

        uint turned_at = (of_block * KEY_HEADS + kh) * 2u * MIXED_PART;
        UNROLL for (uint n = 0u; n < OWN; n++) {
            uint dim = min(gl_SubgroupID * PART + n * MATRIX_M, KEY_DIM - MATRIX_M);
            TIMES_ROWS(sums, turned.v, turned_at + dim * ROW_EIGHTS, MIXED_PART, made_s, made_back_s)
            UNROLL for (uint t = 0u; t < TILES; t++) s[n * TILES + t] = s[n * TILES + t] * decay + sums[t];
        }
    }
    EACH_OF_STATE(
        STORE_STATE(slot, now)
        if (in_use == keeps.x) STORE_STATE(keeps.y, now)
        if (in_use == keeps.z) STORE_STATE(keeps.w, now)
    )
}

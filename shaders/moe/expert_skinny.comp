#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// MoE expert MLP for decode: small-M GEMM on fragment-packed weights for 1 to 16 rows (codes: 1 to 4), in two dispatches
// (stages). With TAGGED 1 there is no barrier between the stages: the second one polls the words of the first.
//
// STAGE 0   for each expert e that row r chooses as its j-th: y[r][j] = share(r, j) · f(
//           Wgu[e] · (x[r] ⊙ norm) · rsqrt(mean x[r]² + eps) ), and for the shared expert
//           y[r][CHOSEN] = sigmoid(logits[r][COUNT]) · f( Ws · (x[r] ⊙ norm) · rsqrt(mean x[r]² + eps) )
//           (GATED 0: without the sigmoid)
// STAGE 1   y[r] += sum_j Wd[e(r, j)] · x[r][j] + Wsd · x[r][CHOSEN], as one sum over all columns of all experts; with
//           ADD 0, y[r] is replaced. SHARED 2: instead of Wsd · x[r][CHOSEN], sigmoid(logits[r][COUNT]) · shared_output[r], which
//           products of its own have computed
// With BIAS 1, an expert's bias is added to the products of STAGE 0, and times its share to those of STAGE 1.
//
// logits     [rows][logits_stride] f32: COUNT router logits, then the shared expert's gate if there is one.
//            `choose.glsl` defines the selection and the shares; each workgroup computes them for itself, for all rows
// weight     [COUNT][n rows] in fragment order (`memory::pack::Layout::Fragments`), of bfloat16 or f16 (`half_rows.glsl`); in
//            STAGE 0 the rows of gate and up alternate. CODED 1: codes with scales (`codes.glsl`), which become f16 in
//            registers; SHARED is 0 or 2 then. Experts that are not in `weight` (`expert_part.glsl`) are left out: of y in STAGE 0, and of the
//            sum in STAGE 1
// shared     [shared_n rows], likewise. SHARED 2: `shared_output`, [rows][y_stride] f32
// x          STAGE 0: [rows][x_stride] f32, the residual. STAGE 1: the output of STAGE 0
// y          STAGE 0: [rows][CHOSEN · INNER and SHARED_INNER, each padded to 32] f32; the padding is not written.
//            STAGE 1: [rows][y_stride] f32, the residual
// TAGGED 1   x, logits, y and shared_output are tagged (`tags.glsl`)
//
// One workgroup computes TILES blocks of 16 rows of W: in STAGE 0 of one expert, for all rows that chose it; in STAGE 1
// of all experts that any row chose. Its groups of 32 lanes split K as in `skinny`, and a row's values are split into
// two parts of a fragment as there. For a row that did not choose the expert, x is replaced by zeros. There are
// workgroups for the maximum number of distinct experts; surplus ones return after the selection.
// CODED 1: the weights and the values of x of the next round are in flight while a round is multiplied. In each round, a
// lane group scales a row's values by a power of two that makes the largest a large f16, and scales the products back.
// Traffic: each chosen expert's weights once; x once per workgroup, from the L2 cache where it is tagged.
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_shuffle : require
#ifndef CODED
#define CODED 0
#endif
#include "common.glsl"
#include "glu.glsl"
#include "deterministic.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the workgroup's size, at least ROWS · CHOSEN
layout(constant_id = 2) const uint STAGE = 0;
layout(constant_id = 3) const uint COUNT = 8;
layout(constant_id = 4) const uint CHOSEN = 2;    // at most 16
layout(constant_id = 5) const uint NORMALISE = 0;
layout(constant_id = 6) const uint SHARED = 0;
layout(constant_id = 7) const uint TILES = 1;
layout(constant_id = 8) const uint AHEAD = 2;     // a power of two; with codes, whole units of columns
layout(constant_id = 9) const uint ROWS = 1;      // at most 16
layout(constant_id = 10) const uint COLUMNS = 32; // columns of an expert's matrix
layout(constant_id = 11) const uint SHARED_COLUMNS = 32;
layout(constant_id = 12) const uint TAGGED = 0;
layout(constant_id = 13) const uint GLU = 2;      // f: a gated linear unit, or an activation without a gate: `glu.glsl`
layout(constant_id = 14) const uint BIAS = 0;
layout(constant_id = 15) const uint ADD = 1;
layout(constant_id = 16) const uint ROUTED = 0;
layout(constant_id = 17) const uint CHOICE_BIAS = 0;
layout(constant_id = 18) const uint EXPERT_SCALES = 0;
layout(constant_id = 19) const uint GATED = 1;    // the shared expert has a gate
layout(constant_id = 21) const uint FIRST_EXPERT = 0; // the first expert in `weight`: `expert_part.glsl`
layout(constant_id = 22) const uint PART_EXPERTS = 0; // the number of experts in `weight`; 0: all
layout(constant_id = 23) const uint SUM_OFFSET = 0x1e3ce508; // the bits of an f32: `choose.glsl`
layout(constant_id = 24) const uint LOGIT_SCALE = 0x3f800000; // likewise
#if CODED == 1
layout(constant_id = 25) const uint CODES = 0x5024; // the weights' format
#endif

#include "fragments.glsl"
#include "expert_part.glsl"
#if CODED == 1
#include "codes.glsl"
const uint UNITS = (COLUMNS + UNIT_COLS - 1u) / UNIT_COLS;
#endif
#define DEVICES_ID 20
#include "tags.glsl"
#define HALVES (WEIGHT == 1 && CODED == 0)
#if HALVES
#include "half_rows.glsl"
#endif
#if CODED == 1 && MATRIX == 1
// f16 arithmetic keeps subnormal numbers: the codes.
#extension GL_EXT_spirv_intrinsics : require
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4464], 4459, 16);
#endif

layout(push_constant) uniform Args {
    Words4In weight;
#if CODED == 1
    TaggedIn shared_weight; // SHARED 2: shared_output
#else
    Words4In shared_weight;
#endif
    TaggedIn x;
    Floats4In norm;
    TaggedIn logits;
    TaggedInOut y;
    Fault fault;
    FloatsIn bias;    // [COUNT][n]; the shared expert has none
    FloatsIn choice_bias;   // [COUNT]
    FloatsIn expert_scales; // [COUNT]
    uint n;           // rows of an expert's matrix, a multiple of 16
    uint shared_n;    // rows of the shared expert's matrix
    uint x_stride;    // in floats, as the strides below
    uint logits_stride;
    uint y_stride;
    float epsilon;
    float factor;
    uint shared_tag;  // SHARED 2: the tag of shared_output
    uint x_tag;
    uint logits_tag;
    uint old_tag;     // tag of y before the residual is added
    uint y_tag;
};

const uint GROUPS = LANES / 32u;
const uint BLOCKS = (ROWS + 7u) / 8u;
const uint TOKENS = ROWS < 8u ? ROWS : 8u;        // tokens of a block
const uint KEPT = TOKENS * 4u;                    // lanes of a group whose sums belong to existing tokens
const uint ITEMS = TILES * BLOCKS * KEPT;
const uint QUADS = AHEAD * 8u;                    // groups of four columns of a token per round
const uint LOADS = (TOKENS * QUADS + 31u) / 32u;  // of those, loads per lane
const uint CHUNKS = (COLUMNS + 31u) / 32u;        // chunks of 32 columns, of one expert's matrix
// The chunks of a row of W with its padding, and those that a lane group takes one after the other.
#if CODED == 1
const uint RUN = UNIT_COLS / 32u;
const uint PADDED = UNITS * RUN;
#else
const uint RUN = 1u;
const uint PADDED = CHUNKS;
#endif
// Whether columns may not exist.
const bool PARTLY = COLUMNS % 32u != 0u || PADDED != CHUNKS;
const uint SHARED_CHUNKS = SHARED == 1u ? (SHARED_COLUMNS + 31u) / 32u : 0u;
const uint PAIRS = ROWS * CHOSEN;
// JOINED: the lanes whose squares are added by shuffles before they go to shared memory. SQUARES: the partial sums of a
// token that remain.
#if MATRIX == 1
const uint JOINED = ROWS == 1u || QUADS > 32u ? 32u : QUADS;
const uint SQUARES = ROWS == 1u ? LOADS : QUADS / JOINED;
#else
const uint JOINED = 1u;
const uint SQUARES = QUADS;
#endif

#if CODED == 1
// Both 16-bit parts of x, as [part][token][32 columns][t] of eight columns each, and the sums of each part, as
// [tile][part][token][four rows].
shared uvec4 x_s[GROUPS * 2u * TOKENS * AHEAD * 4u];
shared vec4 sums_s[GROUPS * TILES * 2u * TOKENS * 4u];
#else
shared vec4 sums_s[GROUPS * ITEMS];
shared uvec4 x_s[GROUPS * TOKENS * QUADS];        // both 16-bit parts of four columns
#endif
shared float squares_s[STAGE == 0u ? GROUPS * BLOCKS * TOKENS * SQUARES : 1u];
shared uint ids_s[PAIRS];
shared float shares_s[PAIRS];
shared float gates_s[ROWS];
shared uint first_s[PAIRS];                       // 1 if no earlier pair chose the same expert
// The distinct experts: id, the rows that chose it (one bit per row), which of each row's choices it is (four bits per
// row).
shared uvec4 list_s[PAIRS];
shared uint distinct_s;

#if MATRIX == 1
#define PUT_TWO(at, words) TaggedOut2(y).v[(at) / 2u] = words;
#else
// The components are constants: some drivers implement a store to a dynamically indexed component as a store of the
// whole vector.
#define PUT_TWO(at, words) if ((at) % 4u == 0u) y.v[(at) / 4u].xy = words; else y.v[(at) / 4u].zw = words;
#endif

// Load words of the shared expert's weights or of the other experts'. Not every driver supports a buffer address that
// is selected at run time, hence the branch without cooperative matrices; on the other drivers a branch would make each
// word a separate load.
#if MATRIX == 1
#define WEIGHTS_OF(other) Words4In from_ = SHARED == 1u && (other) ? shared_weight : weight;
#define LOAD_WEIGHT(other, at) from_.v[at]
#else
#define WEIGHTS_OF(other)
#define LOAD_WEIGHT(other, at) load_weight(other, at)
uvec4 load_weight(bool other, uint at) {
    uvec4 word;
    if (SHARED == 1u && other) word = shared_weight.v[at];
    else word = weight.v[at];
    return word;
}
#endif

// Returns the index of an expert (an entry of `list_s`) among a row's choices.
uint choice_of(uvec4 entry, uint row) { return ((row < 8u ? entry.z : entry.w) >> (row % 8u * 4u)) & 15u; }

// STAGE 1 needs the shares only for the biases.
const bool SHARES = STAGE == 0u || BIAS == 1u;
#include "choose.glsl"

// Selects the experts of all rows and lists the distinct ones that are in `weight`, for the whole workgroup.
void choose(inout uint polls) {
    choose_for_rows(polls);
    barrier();
    uint p = min(gl_LocalInvocationIndex, PAIRS - 1u);
    if (ROWS == 1u && PART_EXPERTS == 0u) {
        if (gl_LocalInvocationIndex < CHOSEN) list_s[p] = uvec4(ids_s[p], 1u, p, 0u);
        if (gl_LocalInvocationIndex == 0u) distinct_s = CHOSEN;
    } else {
        uvec4 entry = uvec4(ids_s[p], 0u, 0u, 0u);
        bool first = !is_elsewhere(entry.x);
        for (uint q = 0u; q < PAIRS; q++) {
            if (ids_s[q] != entry.x) continue;
            uint row = q / CHOSEN, nibble = q % CHOSEN << (row % 8u * 4u);
            entry.y |= 1u << row;
            if (row < 8u) entry.z |= nibble;
            else entry.w |= nibble;
            if (q < p) first = false;
        }
        if (gl_LocalInvocationIndex < PAIRS) first_s[p] = first ? 1u : 0u;
        barrier();
        uint before = 0u;
        for (uint q = 0u; q < PAIRS; q++) before += q < p ? first_s[q] : 0u;
        if (gl_LocalInvocationIndex < PAIRS && first) list_s[before] = entry;
        if (gl_LocalInvocationIndex == PAIRS - 1u) distinct_s = before + (first ? 1u : 0u);
    }
    barrier();
}

#if CODED == 1
#include "code_fragments.glsl"
#include "group_max.glsl"
#if MATRIX == 1
#define EACH_RUN [[unroll]]
#else
// The loop body is already long.
#define EACH_RUN [[dont_unroll]]
#endif
const uint AHEAD_UNITS = AHEAD / RUN;
const uint PARTS = QUADS / 32u;                   // 16-byte words of a token for a lane, of a round
#endif

uint chunk_of(uint round, uint u) {
    return ((round * (AHEAD / RUN) + u / RUN) * GROUPS + LANE_GROUP) * RUN + u % RUN;
}

void main() {
#if MATRIX == 1
    // A view of x without `volatile`, whose loads the L1 cache may serve: an untagged x is not written during this
    // dispatch.
    Words4In plain_x = Words4In(x);
#else
#define plain_x x
#endif
    uint polls = 0u;
    uint group_number = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint g = LANE >> 2, t = LANE & 3u;

    // `blocks`: blocks of 16 rows of this matrix. `first`: this workgroup's first block. `number`: the index of its
    // expert in the list of distinct experts (STAGE 0).
    uint blocks = n / 16u, first = group_number * TILES, number = 0u;
    bool of_shared = false;
    if (STAGE == 0u) {
        uint shared_tiles = SHARED == 1u ? (shared_n / 16u + TILES - 1u) / TILES : 0u, tiles = (blocks + TILES - 1u) / TILES;
        of_shared = group_number < shared_tiles;
        if (of_shared) {
            blocks = shared_n / 16u;
        } else {
            number = (group_number - shared_tiles) / tiles;
            first = (group_number - shared_tiles) % tiles * TILES;
        }
    }
    if (number >= PAIRS || first >= blocks) return;

    uint item = gl_LocalInvocationIndex;
    uint item_lane = item % KEPT, item_block = item / KEPT % BLOCKS, item_tile = item / (KEPT * BLOCKS);
    uint item_token = item_block * 8u + (item_lane >> 2), item_row = (first + item_tile) * 16u + (item_lane & 3u) * 4u;
    uint item_at = (item_token * y_stride + item_row) / 4u;
    // The old value of y, which the residual is added to, is loaded early. If y is tagged, the epilogue checks the word
    // and polls again while it is stale.
    uvec4 old = uvec4(0u);
    if (STAGE == 1u && ADD == 1u && item < ITEMS && item_token < ROWS && first + item_tile < blocks) old = y.v[item_at];

    choose(polls);
    if (STAGE == 0u && !of_shared && number >= distinct_s) return;

    // The rows that this expert is multiplied with.
    uvec4 entry = list_s[number];
    float own_scale = 1.0;
    if (STAGE == 0u && EXPERT_SCALES == 1u && !of_shared) own_scale = expert_scales.v[entry.x];
    if (of_shared) entry = uvec4(0u, 0xffffu, 0u, 0u);
    uint chunks = STAGE == 0u ? PADDED : distinct_s * PADDED + SHARED_CHUNKS;
    uint rounds = (chunks + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);

#if CODED == 1
    vec4 totals[TILES];
    [[unroll]] for (uint i = 0u; i < TILES; i++) totals[i] = vec4(0.0);
    float square[BLOCKS * LOADS];
    [[unroll]] for (uint i = 0u; i < BLOCKS * LOADS; i++) square[i] = 0.0;

    uvec4 next_w[AHEAD_UNITS * TILES * PLANE_LOADS], next_words[LOADS];
    uint next_scales[AHEAD_UNITS * TILES * SCALE_SLOTS], next_at[LOADS];
    vec2 next_factor[AHEAD_UNITS * TILES];
    vec4 next_gain[PARTS];
    bool next_there[LOADS];
// Loads the weights and the words of x of a round; beyond the last chunk, the last chunk's weights, which are multiplied by
// zeros.
#define BEGIN_ROUND(round_) { \
    [[unroll]] for (uint u = 0u; u < AHEAD_UNITS; u++) { \
        uint unit = min(chunk_of(round_, u * RUN), chunks - 1u) / RUN, matrix = entry.x - FIRST_EXPERT; \
        if (STAGE == 1u) { \
            uint d = unit / UNITS; \
            unit -= d * UNITS; \
            matrix = list_s[d].x - FIRST_EXPERT; \
        } \
        [[unroll]] for (uint j = 0u; j < TILES; j++) { \
            uint base = (matrix * blocks + min(first + j, blocks - 1u)) * BLOCK_WORDS, from = base + BLOCK_HEADER + unit * UNIT_WORDS; \
            [[unroll]] for (uint i = 0u; i < PLANE_LOADS; i++) \
                next_w[(u * TILES + j) * PLANE_LOADS + i] = weight.v[from + i * 32u + LANE]; \
            LOAD_SCALES(next_scales, (u * TILES + j) * SCALE_SLOTS, from + PLANE_LOADS * 32u) \
            uint of_row = base * 4u + FIRST_ROW(g); \
            if (STAGE == 1u) next_factor[u * TILES + j] = uintBitsToFloat(uvec2(CODE_WORD(weight, of_row), CODE_WORD(weight, of_row + 2u))); \
        } \
    } \
    [[unroll]] for (uint i = 0u; i < LOADS; i++) { \
        uint part = i % PARTS, chunk = chunk_of(round_, part * 4u + LANE / 8u), row = i / PARTS; \
        next_there[i] = chunk < chunks; \
        chunk = min(chunk, chunks - 1u); \
        uint column = chunk * 8u + LANE % 8u; \
        if (STAGE == 0u) { \
            next_there[i] = next_there[i] && (entry.y >> row & 1u) != 0u && (!PARTLY || column * 4u < COLUMNS); \
            if (PARTLY) column = min(column, COLUMNS / 4u - 1u); \
            if (row == 0u) next_gain[part] = norm.v[column]; \
        } else { \
            uvec4 of = list_s[chunk / PADDED]; \
            uint inside = (chunk % PADDED) * 32u + LANE % 8u * 4u; \
            next_there[i] = next_there[i] && (of.y >> row & 1u) != 0u && inside < COLUMNS; \
            column = choice_of(of, row) * CHUNKS * 8u + min(inside, COLUMNS - 4u) / 4u; \
        } \
        next_at[i] = row * (x_stride / 4u) + column; \
        next_words[i] = TAGGED == 0u ? plain_x.v[next_at[i]] : x.v[next_at[i]]; \
    } }
    // No row may have chosen an expert of a part.
    if (PART_EXPERTS == 0u || rounds > 0u) BEGIN_ROUND(0u)

    [[dont_unroll]] for (uint round = 0u; round < rounds; round++) {
        uvec4 w[AHEAD_UNITS * TILES * PLANE_LOADS], words[LOADS];
        uint scales[AHEAD_UNITS * TILES * SCALE_SLOTS], at[LOADS];
        vec2 factor[AHEAD_UNITS * TILES];
        vec4 gain[PARTS];
        bool there[LOADS];
        [[unroll]] for (uint i = 0u; i < AHEAD_UNITS * TILES * PLANE_LOADS; i++) w[i] = next_w[i];
        [[unroll]] for (uint i = 0u; i < AHEAD_UNITS * TILES * SCALE_SLOTS; i++) scales[i] = next_scales[i];
        [[unroll]] for (uint i = 0u; i < AHEAD_UNITS * TILES; i++) factor[i] = next_factor[i];
        [[unroll]] for (uint i = 0u; i < PARTS; i++) gain[i] = next_gain[i];
        [[unroll]] for (uint i = 0u; i < LOADS; i++) {
            words[i] = next_words[i];
            at[i] = next_at[i];
            there[i] = next_there[i];
        }
        if (round + 1u < rounds) BEGIN_ROUND(round + 1u)
        if (TAGGED == 1u) {
            uint bad = 0u;
            [[unroll]] for (uint i = 0u; i < LOADS; i++) bad |= there[i] ? stale(words[i], x_tag) : 0u;
            while (poll_again(subgroupAny(bad != 0u), polls, fault, x_tag)) {
                [[unroll]] for (uint i = 0u; i < LOADS; i++) words[i] = x.v[at[i]];
                bad = 0u;
                [[unroll]] for (uint i = 0u; i < LOADS; i++) bad |= there[i] ? stale(words[i], x_tag) : 0u;
            }
        }
        // Each row's values are scaled so that the largest exponent is 14. A lane has the sums of the rows 2t and 2t + 1,
        // counted modulo 4: of the first part for t < 2, and of the rest.
        vec2 undo = vec2(1.0);
        [[unroll]] for (uint row = 0u; row < TOKENS; row++) {
            vec4 value[PARTS], most = vec4(0.0);
            [[unroll]] for (uint part = 0u; part < PARTS; part++) {
                uint i = row * PARTS + part;
                value[part] = there[i] ? uintBitsToFloat(words[i]) : vec4(0.0);
                if (STAGE == 0u) {
                    square[i] += dot(value[part], value[part]);
                    value[part] = there[i] ? value[part] * gain[part] : vec4(0.0);
                }
                most = max(most, abs(value[part]));
            }
            uint exponent = group_max(floatBitsToUint(max(max(most.x, most.y), max(most.z, most.w)))) >> 23;
            exponent = clamp(exponent, 16u, 254u);
            float scale = uintBitsToFloat((268u - exponent) << 23), back = uintBitsToFloat((exponent - 14u) << 23);
            if ((2u * t & 3u) == row) undo.x = back;
            if ((2u * t + 1u & 3u) == row) undo.y = back;
            [[unroll]] for (uint part = 0u; part < PARTS; part++) {
                uvec2 first_part, rest;
                vec4 scaled_value = value[part] * scale;
                split_pair(scaled_value.x, scaled_value.y, n >> 31, first_part.x, rest.x);
                split_pair(scaled_value.z, scaled_value.w, n >> 31, first_part.y, rest.y);
                uint to = ((LANE_GROUP * 2u * TOKENS + row) * AHEAD + part * 4u + LANE / 8u) * 4u + LANE / 2u % 4u;
                if (LANE % 2u == 0u) {
                    x_s[to].xy = first_part;
                    x_s[to + TOKENS * AHEAD * 4u].xy = rest;
                } else {
                    x_s[to].zw = first_part;
                    x_s[to + TOKENS * AHEAD * 4u].zw = rest;
                }
            }
        }
        LANES_BARRIER
        uint own = ((LANE_GROUP * 2u + (g >> 2)) * TOKENS + min(g & 3u, TOKENS - 1u)) * AHEAD * 4u + t;
        FewSums sums[TILES];
        UNROLL_PRODUCTS for (uint u = 0u; u < AHEAD_UNITS; u++) {
            if (STAGE == 1u || u == 0u) {
                [[unroll]] for (uint j = 0u; j < TILES; j++) sums[j] = NO_FEW_SUMS;
            }
            EACH_RUN for (uint c = 0u; c < RUN; c++) {
                uint scale_[TILES], minimum_[TILES];
                [[unroll]] for (uint j = 0u; j < TILES; j++) {
                    uint from = (u * TILES + j) * SCALE_SLOTS;
                    scale_[j] = SCALE_OF(scales, from, c, t);
                    minimum_[j] = STORED == 1u ? SCALE_OF(scales, from + STORED * SCALE_WORDS, c, t) : 0u;
                }
                uvec4 eight = x_s[own + (u * RUN + c) * 4u];
                UNROLL_PRODUCTS for (uint h = 0u; h < 2u; h++) {
                    FewTokens a;
                    SET_FEW_TOKENS(a, h == 0u ? eight.xy : eight.zw)
                    UNROLL_PRODUCTS for (uint j = 0u; j < TILES; j++) {
                        uvec4 pairs = PAIRS(w, (u * TILES + j) * PLANE_LOADS, c, h);
                        pairs = scaled(pairs, scale_[j], minimum_[j]);
                        RowWeights m;
                        SET_WEIGHTS(m, pairs)
                        MULTIPLY_ADD_FEW(sums[j], a, m)
                    }
                }
            }
            if (STAGE == 1u || u + 1u == AHEAD_UNITS) {
                [[unroll]] for (uint j = 0u; j < TILES; j++)
                    totals[j] += undo.xyxy * (STAGE == 1u ? factor[u * TILES + j].xxyy : vec4(1.0)) * FEW_SUMS(sums[j]);
            }
        }
        // All lanes must have read these parts before the next ones overwrite them.
        LANES_BARRIER
    }

#else
    Sums sums[BLOCKS * TILES];
    [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) sums[i] = NO_SUMS;
    float square[BLOCKS * LOADS];
    [[unroll]] for (uint i = 0u; i < BLOCKS * LOADS; i++) square[i] = 0.0;
#if HALVES
    HalfScale half_scale = NO_HALF_SCALE;
#endif

    [[dont_unroll]] for (uint round = 0u; round < rounds; round++) {
        // Beyond the last chunk, the last chunk's weights are multiplied by zeros.
        uvec4 w[AHEAD * TILES * 2u];
        [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
            uint chunk = min(chunk_of(round, u), chunks - 1u);
            uint matrix = entry.x - FIRST_EXPERT, each = CHUNKS;
            bool other = STAGE == 0u && of_shared;
            if (STAGE == 1u) {
                uint d = chunk / CHUNKS;
                other = SHARED == 1u && d >= distinct_s;
                if (other) {
                    d = distinct_s;
                    each = SHARED_CHUNKS;
                }
                chunk -= d * CHUNKS;
                matrix = other ? 0u : list_s[d].x - FIRST_EXPERT;
            }
            WEIGHTS_OF(other)
            [[unroll]] for (uint j = 0u; j < TILES; j++) {
                uint at = ((matrix * blocks + min(first + j, blocks - 1u)) * each + chunk) * 64u + LANE;
                w[(u * TILES + j) * 2u] = LOAD_WEIGHT(other, at);
                w[(u * TILES + j) * 2u + 1u] = LOAD_WEIGHT(other, at + 32u);
            }
        }
        UNROLL_PRODUCTS for (uint b = 0u; b < BLOCKS; b++) {
            uvec4 words[LOADS];
            uint at[LOADS];
            bool there[LOADS], any[LOADS];
            vec4 scale[LOADS];
            [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                uint quad = i * 32u + LANE, chunk = chunk_of(round, quad % QUADS / 8u), row = b * 8u + quad / QUADS;
                there[i] = quad < TOKENS * QUADS && chunk < chunks && row < ROWS;
                row = min(row, ROWS - 1u);
                chunk = min(chunk, chunks - 1u);
                uint column = chunk * 8u + quad % 8u;
                scale[i] = vec4(1.0);
                if (STAGE == 0u) {
                    there[i] = there[i] && (entry.y >> row & 1u) != 0u && (!PARTLY || column * 4u < COLUMNS);
                    if (PARTLY) column = min(column, COLUMNS / 4u - 1u);
                    scale[i] = norm.v[column];
                } else {
                    uint d = chunk / PADDED, inside = (chunk % PADDED) * 32u + quad % 8u * 4u;
                    if (SHARED == 1u && d >= distinct_s) {
                        uint behind = (chunk - distinct_s * CHUNKS) * 8u + quad % 8u;
                        there[i] = there[i] && behind * 4u < SHARED_COLUMNS;
                        column = CHOSEN * CHUNKS * 8u + min(behind, SHARED_COLUMNS / 4u - 1u);
                    } else {
                        uvec4 of = list_s[d];
                        there[i] = there[i] && (of.y >> row & 1u) != 0u && inside < COLUMNS;
                        column = choice_of(of, row) * CHUNKS * 8u + min(inside, COLUMNS - 4u) / 4u;
                    }
                }
                at[i] = row * (x_stride / 4u) + column;
#if MATRIX == 1
                any[i] = ROWS == 1u || subgroupAny(there[i]);
#else
                any[i] = true;
#endif
                words[i] = uvec4(0u);
            }
            if (TAGGED == 0u) {
                [[unroll]] for (uint i = 0u; i < LOADS; i++) if (any[i]) words[i] = plain_x.v[at[i]];
            } else {
                uint bad;
                do {
                    bad = 0u;
                    [[unroll]] for (uint i = 0u; i < LOADS; i++) if (any[i]) words[i] = x.v[at[i]];
                    [[unroll]] for (uint i = 0u; i < LOADS; i++) bad |= there[i] ? stale(words[i], x_tag) : 0u;
                } while (poll_again(subgroupAny(bad != 0u), polls, fault, x_tag));
            }
            [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                vec4 value = there[i] ? uintBitsToFloat(words[i]) : vec4(0.0);
                if (STAGE == 0u) {
                    square[b * LOADS + i] += dot(value, value);
                    if (!PARTLY) value *= scale[i];
                    else value = there[i] ? value * scale[i] : vec4(0.0);
                }
                uvec4 parts;
#if HALVES
                parts = split_halves(value, n >> 31, half_scale);
#else
                split_pair(value.x, value.y, n >> 31, parts.x, parts.z);
                split_pair(value.z, value.w, n >> 31, parts.y, parts.w);
#endif
                if (i * 32u + LANE < TOKENS * QUADS) x_s[LANE_GROUP * (TOKENS * QUADS) + i * 32u + LANE] = parts;
            }
            LANES_BARRIER
            uint own = LANE_GROUP * (TOKENS * QUADS) + min(g, TOKENS - 1u) * QUADS + t * 2u;
            UNROLL_PRODUCTS for (uint u = 0u; u < AHEAD; u++) {
                UNROLL_PRODUCTS for (uint h = 0u; h < 2u; h++) {
                    uvec4 parts = x_s[own + u * 8u + h];
                    Tokens a;
                    SET_TOKENS(a, parts.xy, parts.zw)
                    UNROLL_PRODUCTS for (uint j = 0u; j < TILES; j++) {
                        Weights m;
                        SET_WEIGHTS(m, w[(u * TILES + j) * 2u + h])
                        MULTIPLY_ADD(sums[b * TILES + j], a, m)
                    }
                }
            }
            // All lanes must have read these parts before the next ones overwrite them.
            LANES_BARRIER
        }
#if HALVES
        if (round + 1u == rounds && half_scale.up == 0.0) {
            bool again = false;
            [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) again = again || overflows(sums[i]);
            if (any_overflows(again)) {
                set_half_scale(half_scale);
                [[unroll]] for (uint i = 0u; i < BLOCKS * TILES; i++) sums[i] = NO_SUMS;
                [[unroll]] for (uint i = 0u; i < BLOCKS * LOADS; i++) square[i] = 0.0;
                // The first round is next. All lanes must have read their parts before it overwrites them.
                LANES_BARRIER
                round = 0xffffffffu;
            }
        }
#endif
    }

#endif
    [[unroll]] for (uint b = 0u; b < BLOCKS; b++) {
        if (STAGE == 0u) {
            [[unroll]] for (uint i = 0u; i < LOADS; i++) {
                float sum = square[b * LOADS + i];
                [[unroll]] for (uint distance = 1u; distance < JOINED; distance *= 2u) sum += subgroupShuffleXor(sum, distance);
                uint quad = i * 32u + LANE;
                uint token = ROWS == 1u ? 0u : quad / QUADS, part = ROWS == 1u ? quad / JOINED : quad % QUADS / JOINED;
                if (quad % JOINED == 0u && token < TOKENS && part < SQUARES)
                    squares_s[((LANE_GROUP * BLOCKS + b) * TOKENS + token) * SQUARES + part] = sum;
            }
        }
#if CODED == 1
        [[unroll]] for (uint j = 0u; j < TILES; j++) {
            uint token = 2u * t & 3u;
            uint to = (((LANE_GROUP * TILES + j) * 2u + t / 2u) * TOKENS + token) * 4u + (g >> 1);
            if (token < TOKENS) PUT_ROWS(sums_s[to], g, totals[j].xz)
            if (token + 1u < TOKENS) PUT_ROWS(sums_s[to + 4u], g, totals[j].yw)
        }
#else
        if (LANE < KEPT) {
            [[unroll]] for (uint j = 0u; j < TILES; j++)
#if HALVES
                sums_s[LANE_GROUP * ITEMS + (j * BLOCKS + b) * KEPT + LANE] = join_halves(sums[b * TILES + j], half_scale);
#else
                sums_s[LANE_GROUP * ITEMS + (j * BLOCKS + b) * KEPT + LANE] =
                    SUMS_LOW(sums[b * TILES + j]) + SUMS_HIGH(sums[b * TILES + j]);
#endif
        }
#endif
    }
    barrier();

    for (; item < ITEMS; item += LANES) {
        item_lane = item % KEPT;
        item_block = item / KEPT % BLOCKS;
        item_tile = item / (KEPT * BLOCKS);
        item_token = item_block * 8u + (item_lane >> 2);
        item_row = (first + item_tile) * 16u + (item_lane & 3u) * 4u;
        if (item_token >= ROWS || first + item_tile >= blocks) continue;
        if (STAGE == 0u && (entry.y >> item_token & 1u) == 0u) continue;
        item_at = (item_token * y_stride + item_row) / 4u;
        if (STAGE == 1u && ADD == 1u && item >= LANES) old = y.v[item_at];
        if (STAGE == 1u && ADD == 1u && TAGGED == 1u)
            while (poll_again(stale(old, old_tag) != 0u, polls, fault, old_tag)) old = y.v[item_at];

        vec4 v = vec4(0.0);
#if CODED == 1
        [[unroll]] for (uint i = 0u; i < GROUPS * 2u; i++) {
            v += sums_s[((i / 2u * TILES + item_tile) * 2u + i % 2u) * KEPT + item_lane];
        }
#else
        [[unroll]] for (uint i = 0u; i < GROUPS; i++) v += sums_s[i * ITEMS + item];
#endif
        if (STAGE == 0u) {
#if CODED == 1
            v *= uintBitsToFloat(weight.v[((entry.x - FIRST_EXPERT) * blocks + first + item_tile) * BLOCK_WORDS + (item_lane & 3u)]);
#endif
            float sum = 0.0;
            uint at = (item_block * TOKENS + (item_lane >> 2)) * SQUARES;
            [[unroll]] for (uint i = 0u; i < GROUPS; i++)
                [[unroll]] for (uint part = 0u; part < SQUARES; part++) sum += squares_s[i * (BLOCKS * TOKENS * SQUARES) + at + part];
            v *= inversesqrt(sum / float(COLUMNS) + epsilon);
            uint choice = of_shared ? CHOSEN : choice_of(entry, item_token);
            float share = of_shared ? gates_s[item_token] : share_of(item_token, min(choice, CHOSEN - 1u)) * own_scale;
            if (BIAS == 1u && !of_shared) {
                uint at_ = entry.x * n + item_row;
                v += vec4(bias.v[at_], bias.v[at_ + 1u], bias.v[at_ + 2u], bias.v[at_ + 3u]);
            }
            if (!IS_GATED(GLU)) {
                v = ACTIVATED(GLU, v) * share;
                y.v[(item_token * y_stride + choice * ((n + 31u) / 32u * 32u) + item_row) / 4u] = TAGGED == 1u ? tagged(v, y_tag) : floatBitsToUint(v);
                continue;
            }
            vec2 result = glu(GLU, v.xz, v.yw) * share;
            uint to = item_token * y_stride + choice * ((n / 2u + 31u) / 32u * 32u) + item_row / 2u;
            uvec2 words = TAGGED == 1u ? uvec2(tagged(result.x, y_tag), tagged(result.y, y_tag)) : floatBitsToUint(result);
            PUT_TWO(to, words)
        } else {
            if (ADD == 1u) v += uintBitsToFloat(old);
#if CODED == 1
            if (SHARED == 2u) {
                uvec4 words = shared_weight.v[item_at];
                while (TAGGED == 1u && poll_again(stale(words, shared_tag) != 0u, polls, fault, shared_tag))
                    words = shared_weight.v[item_at];
                v += gates_s[item_token] * uintBitsToFloat(words);
            }
#endif
            if (BIAS == 1u) {
                for (uint j = 0u; j < CHOSEN; j++) {
                    if (is_elsewhere(ids_s[item_token * CHOSEN + j])) continue;
                    uint at_ = ids_s[item_token * CHOSEN + j] * n + item_row;
                    vec4 b = vec4(bias.v[at_], bias.v[at_ + 1u], bias.v[at_ + 2u], bias.v[at_ + 3u]);
                    float scale = EXPERT_SCALES == 1u ? expert_scales.v[ids_s[item_token * CHOSEN + j]] : 1.0;
                    v += share_of(item_token, j) * scale * b;
                }
            }
            y.v[item_at] = TAGGED == 1u ? tagged(v, y_tag) : floatBitsToUint(v);
        }
    }
}

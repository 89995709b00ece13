#version 460
#extension GL_GOOGLE_include_directive : require
// Tiled GEMM for prefill, on fragment-packed weights and activations: y[r] = epilogue( W · x[r] ) for the rows of
// prompts.
//
// epilogue   0 store: y = Wx + b. 1 residual: y += Wx + b. 2 and more: a gated linear unit: the rows of W alternate gate and
//            up; y[N/2] = glu(gate, up); or squared ReLU: y = max(Wx + b, 0)² (`glu.glsl`)
// weight     [N padded to 16][K], `memory::pack::Layout::Fragments`
// x          [rows padded to 64][K], as `pack_rows` writes it; in f16 with `scales`, by which a row's products are multiplied
// y          PACKED 0: [rows][y_stride] f32. PACKED 1 (gated only): packed as `pack_rows` would pack it, as x of the
//            next product
// experts    EXPERTS 1 (MoE): `tiles` assigns an expert to each tile of x, and the expert's weights are N rows. Without
//            PACKED, the tile's rows are written to rows `slots` of y; rows whose slot is NOBODY are dropped
//            (`expert_plan`). Tiles of experts that are not in `weight` are left unchanged (`expert_part.glsl`)
//
// One workgroup computes a tile of TILE_TOKENS rows of x by TILE_ROWS rows of W; each group of 32 lanes computes
// GROUP_TOKENS by GROUP_ROWS of it. W goes from global memory to registers: the next 16 columns are loaded while the
// current ones are multiplied. x goes through shared memory, STAGE steps of 16 columns at a time, double-buffered, with
// one barrier per stage; each step loads one word of the next stage and stores the previously loaded one. All loads are
// unconditional, with clamped addresses. Workgroups are ordered so that ORDER consecutive tiles of x use the same tile
// of W.
// Traffic: x is read N/TILE_ROWS times and W rows/TILE_TOKENS/ORDER times; the caches serve the remaining reads.
#include "common.glsl"
#include "glu.glsl"

#define LANES ((TILE_TOKENS / GROUP_TOKENS) * (TILE_ROWS / GROUP_ROWS) * 32u)
#include "fragments.glsl"

layout(local_size_x = LANES) in;
layout(constant_id = 0) const uint N = 16;        // rows of W
layout(constant_id = 1) const uint K = 32;        // columns, padded to 32
layout(constant_id = 2) const uint BIAS = 0;
layout(constant_id = 3) const uint EPILOGUE = 0;
layout(constant_id = 4) const uint PACKED = 0;
layout(constant_id = 5) const uint ORDER = 8;
layout(constant_id = 6) const uint ROWS = 0;      // rows of x in use; 0: `count` holds the number
layout(constant_id = 7) const uint EXPERTS = 0;
layout(constant_id = 8) const uint FIRST_EXPERT = 0; // the first expert in `weight`: `expert_part.glsl`
layout(constant_id = 9) const uint PART_EXPERTS = 0; // the number of experts in `weight`; 0: all
#include "expert_part.glsl"

#if MATRIX == 1
layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer Floats2Out { vec2 v[]; };
#endif

// Without cooperative matrices the loop body is already long, so it is not unrolled.
#if MATRIX == 1
#define EACH_STEP [[unroll]]
#else
#define EACH_STEP [[dont_unroll]]
#endif

layout(push_constant) uniform Args {
    Words4In weight;
    Words4In x;
    FloatsIn bias;
    FloatsInOut y;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    WordsIn tiles;
    WordsIn slots;
    FloatsIn scales;  // of the rows of x, in f16
    uint y_stride;    // in floats, a multiple of 4
};

const uint NOBODY = 0xffffffffu;
// The first 16-byte word of the tile's expert's weights.
uint expert_words = 0u;
// The first row of the tile's expert among all experts' rows.
uint expert_row = 0u;

// Blocks of 16 rows of x and of W per lane group.
const uint TOKEN_BLOCKS = GROUP_TOKENS / 16u;
const uint ROW_BLOCKS = GROUP_ROWS / 16u;
// A step is 16 columns: 32 words of 16 bytes per block. A lane loads LOADS words of a stage, at most STAGE; LANES
// divides STAGE_WORDS.
const uint STEPS = K / 16u;
const uint STAGES = (STEPS + STAGE - 1u) / STAGE;
const uint STAGE_WORDS = STAGE * 32u;
const uint BLOCK_WORDS = STEPS * 32u;
const uint BUFFER_WORDS = STAGE_WORDS * (TILE_TOKENS / 16u);
const uint LOADS = BUFFER_WORDS / LANES;
const uint WEIGHT_BLOCKS = (N + 15u) / 16u;
const uint OUTPUT_CHUNKS = (N / 2u + 31u) / 32u;

shared uvec4 staged[2u * BUFFER_WORDS];

// Returns the i-th of this invocation's words of stage `stage`; `base` is its first word of the tile.
uvec4 load_tokens(uint base, uint stage, uint i) {
    uint block = i * LANES / STAGE_WORDS * BLOCK_WORDS, at = i * LANES % STAGE_WORDS;
    if (STEPS % STAGE == 0u) return x.v[base + stage * STAGE_WORDS + (block + at)];
    // Steps beyond the last read zeros, so that they add nothing, whatever W they are multiplied with.
    uint word = stage * STAGE_WORDS + at + gl_LocalInvocationIndex;
    uvec4 q = x.v[base - gl_LocalInvocationIndex + block + min(word, BLOCK_WORDS - 1u)];
    return word < BLOCK_WORDS ? q : uvec4(0u);
}

// Returns this lane's word of block `block + j` of W at a step; `base` is its first word of block `block`.
uvec4 load_weights(uint base, uint block, uint j, uint step_) {
    if (N % TILE_ROWS == 0u) return weight.v[base + step_ * 32u + j * BLOCK_WORDS];
    return weight.v[expert_words + min(block + j, WEIGHT_BLOCKS - 1u) * BLOCK_WORDS + step_ * 32u + LANE];
}

vec2 gated(vec4 v) { return glu(EPILOGUE, v.xz, v.yw); }

// Stores rows row .. + 4 of W for one token.
void store(uint token, uint row, vec4 v) {
    v = ACTIVATED(EPILOGUE, v);
    uint at = token * y_stride + (IS_GATED(EPILOGUE) ? row / 2u : row);
#if MATRIX == 1
    // Only here: not every driver without cooperative matrices supports access to y through a second reference type.
    if (row + 4u <= N) {
        if (IS_GATED(EPILOGUE)) Floats2Out(y).v[at / 2u] = gated(v);
        else if (EPILOGUE == 1u) Floats4InOut(y).v[at / 4u] += v;
        else Floats4InOut(y).v[at / 4u] = v;
        return;
    }
#endif
    vec2 s = gated(v);
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        if (row + i >= N) return;
        if (IS_GATED(EPILOGUE)) {
            if ((i & 1u) == 0u) y.v[at + i / 2u] = s[i / 2u];
        } else if (EPILOGUE == 1u) {
            y.v[at + i] += v[i];
        } else {
            y.v[at + i] = v[i];
        }
    }
}

// Stores two outputs each of tokens g and g + 8 of a block, which is half of a 16-byte word.
void store_packed(uint token, uint row, vec2 low, vec2 high, uint used) {
    uint column = row / 2u;
    if (column >= OUTPUT_CHUNKS * 32u) return;
    if (token >= used || row >= N) low.x = 0.0;
    if (token >= used || row + 2u >= N) low.y = 0.0;
    if (token + 8u >= used || row >= N) high.x = 0.0;
    if (token + 8u >= used || row + 2u >= N) high.y = 0.0;
    uint word = ((token / 16u * OUTPUT_CHUNKS + column / 32u) * 2u + (column >> 2 & 1u)) * 32u + (token & 7u) * 4u
        + (column >> 3 & 3u);
    uint pair = word * 2u + (column >> 1 & 1u);
    vec2 bits = uintBitsToFloat(uvec2(pack_pair(low.x, low.y), pack_pair(high.x, high.y)));
#if MATRIX == 1
    Floats2Out(y).v[pair] = bits;
#else
    y.v[pair * 2u] = bits.x;
    y.v[pair * 2u + 1u] = bits.y;
#endif
}

void main() {
    uint used = ROWS != 0u ? ROWS : count.v[2];
    uint token_tiles = (used + TILE_TOKENS - 1u) / TILE_TOKENS;
    uint row_tiles = (N + TILE_ROWS - 1u) / TILE_ROWS;
    uint tile = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (tile >= token_tiles * row_tiles) return;
    uint ordered = tile / (ORDER * row_tiles) * ORDER, rest = tile % (ORDER * row_tiles);
    uint together = min(token_tiles - ordered, ORDER);
    uint tile_block = (ordered + rest % together) * (TILE_TOKENS / 16u);
    uint group_token = LANE_GROUP / (TILE_ROWS / GROUP_ROWS) * TOKEN_BLOCKS;
    uint row_block = rest / together * (TILE_ROWS / 16u) + LANE_GROUP % (TILE_ROWS / GROUP_ROWS) * ROW_BLOCKS;
    uint lane = gl_LocalInvocationIndex;
    if (EXPERTS == 1u) {
        uint expert = tiles.v[ordered + rest % together];
        if (expert == NOBODY || is_elsewhere(expert)) return;
        expert_words = (expert - FIRST_EXPERT) * (WEIGHT_BLOCKS * BLOCK_WORDS);
        expert_row = expert * N;
    }
    uint x_base = tile_block * BLOCK_WORDS + lane, w_base = expert_words + row_block * BLOCK_WORDS + LANE;

    Sums sums[TOKEN_BLOCKS][ROW_BLOCKS];
    [[unroll]] for (uint i = 0u; i < TOKEN_BLOCKS; i++)
        [[unroll]] for (uint j = 0u; j < ROW_BLOCKS; j++) sums[i][j] = NO_SUMS;
    // Two register sets: the weights of the current step and of the next.
    uvec4 w[2][ROW_BLOCKS], passing[2];
    [[unroll]] for (uint i = 0u; i < LOADS; i++) staged[i * LANES + lane] = load_tokens(x_base, 0u, i);
    [[unroll]] for (uint j = 0u; j < ROW_BLOCKS; j++) w[0][j] = load_weights(w_base, row_block, j, 0u);
    barrier();

    uint from = 0u;
    [[dont_unroll]] for (uint stage = 0u; stage < STAGES; stage++) {
        uint next = min(stage + 1u, STAGES - 1u);
        uint here = from + group_token * STAGE_WORDS + LANE, there = (BUFFER_WORDS - from) + lane;
        EACH_STEP for (uint s = 0u; s < STAGE; s++) {
            if (s < LOADS) passing[s & 1u] = load_tokens(x_base, next, s);
            uint ahead = min(stage * STAGE + s + 1u, STEPS - 1u);
            [[unroll]] for (uint j = 0u; j < ROW_BLOCKS; j++)
                w[(s + 1u) & 1u][j] = load_weights(w_base, row_block, j, ahead);
            Tokens tokens[TOKEN_BLOCKS];
            [[unroll]] for (uint i = 0u; i < TOKEN_BLOCKS; i++) {
                uvec4 q = staged[here + i * STAGE_WORDS + s * 32u];
                SET_TOKENS(tokens[i], q.xz, q.yw)
            }
            UNROLL_PRODUCTS for (uint j = 0u; j < ROW_BLOCKS; j++) {
                Weights rows;
                SET_WEIGHTS(rows, w[s & 1u][j])
                UNROLL_PRODUCTS for (uint i = 0u; i < TOKEN_BLOCKS; i++) MULTIPLY_ADD(sums[i][j], tokens[i], rows)
            }
            if (s >= 1u && s - 1u < LOADS) staged[there + (s - 1u) * LANES] = passing[(s - 1u) & 1u];
        }
        if (LOADS == STAGE) staged[there + (STAGE - 1u) * LANES] = passing[(STAGE - 1u) & 1u];
        barrier();
        from = BUFFER_WORDS - from;
    }

    uint g = LANE >> 2, t = LANE & 3u;
    [[unroll]] for (uint j = 0u; j < ROW_BLOCKS; j++) {
        uint row = (row_block + j) * 16u + t * 4u;
        vec4 b = vec4(0.0);
        if (BIAS == 1u) {
            [[unroll]] for (uint i = 0u; i < 4u; i++) b[i] = bias.v[expert_row + min(row + i, N - 1u)];
        }
        [[unroll]] for (uint i = 0u; i < TOKEN_BLOCKS; i++) {
            uint token = (tile_block + group_token + i) * 16u + g;
#if WEIGHT == 1
            vec4 low = SUMS_LOW(sums[i][j]) * scales.v[token] + b, high = SUMS_HIGH(sums[i][j]) * scales.v[token + 8u] + b;
#else
            vec4 low = SUMS_LOW(sums[i][j]) + b, high = SUMS_HIGH(sums[i][j]) + b;
#endif
            if (PACKED == 1u) {
                store_packed(token, row, gated(low), gated(high), used);
            } else {
                if (EXPERTS == 1u) {
                    uint low_row = slots.v[token], high_row = slots.v[token + 8u];
                    if (low_row != NOBODY) store(low_row, row, low);
                    if (high_row != NOBODY) store(high_row, row, high);
                } else {
                    if (token < used) store(token, row, low);
                    if (token + 8u < used) store(token + 8u, row, high);
                }
            }
        }
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// What the scan of the gated delta rule needs of 64 rows of a prompt and a value head, for all such blocks of
// a step side by side. With G_t = Σ_{s≤t} ln α_s inside the block and D_ij = exp(G_i - G_j) for i ≥ j, else 0:
//
//   q̂, k̂, v of each row: the convolution, silu and norms of `delta_step`
//   T = ( I + strictlower(β_i (k̂_i·k̂_j) D_ij) )^-1,   E = (lower(q̂_i·k̂_j) ⊙ D) T
// so that `delta_scan` has, from the state S before the block,
//   R = β v - β e^G (K̂ S),   V' = T R,   O = e^G (Q̂ S) + E R,   S ← e^{G_64} S + K̂ᵀ (e^{G_64 - G} V')
//
// x      [rows][stride] f32: q | k | v | z | b | a
// chunk  the step's descriptor (`embed_rows`): {prompts, lasts, rows, tiles}, then {slot, start, first row, _} a prompt
// cells  8 words a prompt: {from, keep0_at, keep0, keep1_at}, {keep1, first block, _, _}
// window [cells][8][channels]: of positions before the chunk, read from cell `from`
// Rows behind a prompt's end are k = v = β = 0, ln α = 0, which leave the state as it is.
//
// MATRIX 0: everything f32, row after row, q̂ and k̂ of each value head. A thread has one row.
//   mixed  [blocks][value heads][2][64][key_dim]: q̂, k̂;     solved [blocks][value heads][2][64][64]: T, E
//   values [blocks][value heads][64][value_dim]: β v
//   gates  [blocks][value heads][4][64]: e^G, β e^G, e^{G_64 - G}, unused
// Traffic: the head's channels once, a block's share of these once.
#include "common.glsl"
#include "delta.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KEY_HEADS = 16;
layout(constant_id = 1) const uint VALUE_HEADS = 32;
layout(constant_id = 2) const uint KEY_DIM = 128;
layout(constant_id = 3) const uint VALUE_DIM = 128;

layout(buffer_reference, std430, buffer_reference_align = 16) buffer Mixed { coherent vec4 v[]; };
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
    FloatsOut solved;
    Floats4Out values;
    FloatsOut gates;
    uint stride;
};

const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint GATES = CHANNEL_QUADS * 4u + VALUE_HEADS * VALUE_DIM;

// The prompt's rows, and where what comes before them is.
uint first_row, start, from, in_use;

// u of row `index` of the prompt's chunk, which may lie before it.
vec4 raw(int index, uint quad) {
    if (index >= 0) return x.v[(first_row + uint(index)) * (stride / 4u) + quad];
    if (from == NO_CELL || int(start) + index < 0) return vec4(0.0);
    return window.v[(from * RING + uint(int(start) + index) % RING) * CHANNEL_QUADS + quad];
}

vec4 convolved(uint index, uint quad) {
    if (index >= in_use) return vec4(0.0);
    vec4 t0 = raw(int(index) - 3, quad), t1 = raw(int(index) - 2, quad), t2 = raw(int(index) - 1, quad), u = raw(int(index), quad);
    vec4 mixed = vec4(
        dot(conv.v[quad * 4u], vec4(t0.x, t1.x, t2.x, u.x)), dot(conv.v[quad * 4u + 1u], vec4(t0.y, t1.y, t2.y, u.y)),
        dot(conv.v[quad * 4u + 2u], vec4(t0.z, t1.z, t2.z, u.z)), dot(conv.v[quad * 4u + 3u], vec4(t0.w, t1.w, t2.w, u.w)));
    return silu(mixed);
}

const uint STEP = BLOCK_ROWS + 1u;
shared vec2 sums_s[BLOCK_ROWS];                   // of ln α: whole numbers, then what is left
shared float beta_s[BLOCK_ROWS];
shared float matrix_s[BLOCK_ROWS * STEP];         // what is added to I, then T

void main() {
    uint h = gl_WorkGroupID.x, block = gl_WorkGroupID.y, i = gl_LocalInvocationIndex;
    uint prompts = chunk.v[0].x, low = 0u, high = prompts;
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        if (cells.v[2u * middle + 1u].y <= block) low = middle; else high = middle;
    }
    uvec4 prompt = chunk.v[1u + low];
    start = prompt.y;
    first_row = prompt.z;
    from = cells.v[2u * low].x;
    in_use = (low + 1u < prompts ? chunk.v[2u + low].z : chunk.v[0].z) - first_row;
    uint index = (block - cells.v[2u * low + 1u].y) * BLOCK_ROWS + i;
    if (index - i >= in_use) return;
    uint kh = h / (VALUE_HEADS / KEY_HEADS), own = block * VALUE_HEADS + h;

    // Sums of whole numbers and of what is left of each are right to the last bits, however strong the decay.
    vec2 decay = vec2(0.0);
    float beta = 0.0;
    if (index < in_use) {
        uint at = (first_row + index) * stride + GATES + h;
        vec4 b = x.v[at / 4u], a = x.v[(at + VALUE_HEADS) / 4u];
        uint b_in = at % 4u, a_in = (at + VALUE_HEADS) % 4u;
        beta = sigmoid(b_in < 2u ? (b_in == 0u ? b.x : b.y) : (b_in == 2u ? b.z : b.w));
        float l = log_decay(a_in < 2u ? (a_in == 0u ? a.x : a.y) : (a_in == 2u ? a.z : a.w), a_log.v[h], dt_bias.v[h]);
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

    // The row's q and k, each scaled once its squares are known.
    vec2 squares = vec2(0.0);
    uint q_at = (own * 2u * BLOCK_ROWS + i) * KEY_QUADS, k_at = q_at + BLOCK_ROWS * KEY_QUADS;
    for (uint c = 0u; c < KEY_QUADS; c++) {
        vec4 q = convolved(index, kh * KEY_QUADS + c), k = convolved(index, (KEY_HEADS + kh) * KEY_QUADS + c);
        squares += vec2(dot(q, q), dot(k, k));
        mixed.v[q_at + c] = q;
        mixed.v[k_at + c] = k;
    }
    vec2 scales = inversesqrt(squares + L2_EPSILON) * vec2(inversesqrt(float(KEY_DIM)), 1.0);
    for (uint c = 0u; c < KEY_QUADS; c++) {
        mixed.v[q_at + c] = mixed.v[q_at + c] * scales.x;
        mixed.v[k_at + c] = mixed.v[k_at + c] * scales.y;
    }
    for (uint c = 0u; c < QUADS; c++)
        values.v[(own * BLOCK_ROWS + i) * QUADS + c] = beta * convolved(index, 2u * KEY_HEADS * KEY_QUADS + h * QUADS + c);
    float grown = exp(sum.x + sum.y);
    uint gates_at = own * 4u * BLOCK_ROWS + i;
    gates.v[gates_at] = grown;
    gates.v[gates_at + BLOCK_ROWS] = beta * grown;
    gates.v[gates_at + 2u * BLOCK_ROWS] = exp((total.x - sum.x) + (total.y - sum.y));
    memoryBarrierBuffer();
    barrier();
    memoryBarrierBuffer();

    for (uint j = 0u; j < BLOCK_ROWS; j++) {
        float dots = 0.0;
        uint other = ((own * 2u + 1u) * BLOCK_ROWS + j) * KEY_QUADS;
        for (uint c = 0u; c < KEY_QUADS; c++) dots += dot(mixed.v[k_at + c], mixed.v[other + c]);
        vec2 between = sum - sums_s[j];
        matrix_s[i * STEP + j] = j < i ? beta * dots * exp(min(between.x + between.y, 0.0)) : 0.0;
    }
    barrier();
    // A thread has a column of T, then a row of E.
    float line[BLOCK_ROWS];
    for (uint r = 0u; r < BLOCK_ROWS; r++) {
        float value = r == i ? 1.0 : 0.0;
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
        solved.v[at + BLOCK_ROWS * BLOCK_ROWS] = line[c];
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
// MoE expert MLP as GEMV, on row-major weights, in two dispatches (stages) for the experts that `choices` names:
//
// STAGE 0   y[r][j] = share(r, j) · f( W[e(r, j)] · (x[r] ⊙ norm) · rsqrt(mean x[r]² + eps) + bias[e(r, j)] ); the
//           shared expert's result follows the others
// STAGE 1   y[r] += sum_j ( W[e(r, j)] · x[r][j] + share(r, j) · bias[e(r, j)] ) + Ws · x[r][CHOSEN]
//
// choices    [rows][CHOSEN + SHARED] of (expert, share as f32 bits), as `expert_choose` writes them
// weight     [experts][n][chunks·8] in the variant's format; in STAGE 0 the rows of gate and up alternate. Experts that are
//            not in it (`expert_part.glsl`) are left out: of y in STAGE 0, and of the sum in STAGE 1
// shared     [shared_n][shared_chunks·8], likewise; beside codes, of any format. Without rows and chunks, another call
//            computes the shared expert
// x          STAGE 0: [rows][x_stride] f32, the residual. STAGE 1: the output of STAGE 0
// y          STAGE 0: [rows][y_stride] f32: CHOSEN parts of `part` floats each, then the shared expert's part. STAGE 1:
//            [rows][y_stride] f32, the residual
//
// One workgroup computes ROWS rows of W for one row of x, and in STAGE 0 for one choice. Its invocations split K: per
// iteration, an invocation loads 16 bytes of each W row (32 bytes in f32). Rows not below `count[2]` (the number of
// rows of the prompt step) and rows that chose NOBODY are left unchanged.
// Traffic: the weights once per choice; x from the L1 cache.
#include "common.glsl"
#include "glu.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint STAGE = 0;
layout(constant_id = 2) const uint CHOSEN = 2;
layout(constant_id = 3) const uint SHARED = 0;
layout(constant_id = 4) const uint USED = 0;      // rows of x in use; 0: `count` holds the number
layout(constant_id = 5) const uint ROWS = 2;      // rows of W, even
layout(constant_id = 6) const uint GLU = 2;       // f: a gated linear unit, or an activation without a gate: `glu.glsl`
layout(constant_id = 7) const uint BIAS = 0;
layout(constant_id = 8) const uint FIRST_EXPERT = 0; // the first expert in `weight`: `expert_part.glsl`
layout(constant_id = 9) const uint PART_EXPERTS = 0; // the number of experts in `weight`; 0: all
#include "expert_part.glsl"
#if WEIGHT == 3
layout(constant_id = 10) const uint CODES = 0x5024; // the format of the experts' W
layout(constant_id = 11) const uint SHARED_CODES = 0x5024; // of the shared expert's W, or numbers (`kernels::shared_word`)
#include "codes.glsl"
#endif

layout(buffer_reference, std430, buffer_reference_align = 8) readonly restrict buffer ChoicesIn { uvec2 v[]; };

layout(push_constant) uniform Args {
    Words4In weight;
    Words4In shared_weight;
    Floats4In x;
    Floats4In norm;
    ChoicesIn choices;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    FloatsInOut y;
    FloatsIn bias;    // [experts][n]; the shared expert has none
    uint n;           // rows of an expert's W, a multiple of ROWS
    uint shared_n;
    uint k;           // columns without padding; the divisor of the mean
    uint chunks;      // 8-value chunks of a padded row of an expert's W
    uint shared_chunks;
    uint part;        // floats per choice in a row of STAGE 0's output, a multiple of 8
    uint x_stride;    // in floats
    uint y_stride;    // in floats
    float epsilon;
};

const uint NOBODY = 0xffffffffu;

// The sums of each subgroup: ROWS products, then the squares of x.
shared float partial[256u * (ROWS + 1u)];

// Returns word `at` of the shared expert's W or of the other experts' W. It branches because some drivers do not
// support a buffer address that is selected at run time.
uvec4 load(bool of_shared, uint at) {
    uvec4 word;
    if (SHARED == 1u && of_shared) word = shared_weight.v[at];
    else word = weight.v[at];
    return word;
}

#if WEIGHT == 3
// Loads the eight numbers of chunk `at` of a matrix of bfloat16 (kind 0), float16 (1) or float32 (2).
void load_numbers8(uint kind, Words4In buffer_, uint at, out vec4 a, out vec4 b) {
    if (kind == 2u) {
        a = uintBitsToFloat(buffer_.v[at * 2u]);
        b = uintBitsToFloat(buffer_.v[at * 2u + 1u]);
        return;
    }
    uvec4 words = buffer_.v[at];
    if (kind == 1u) {
        a = vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
        b = vec4(unpackHalf2x16(words.z), unpackHalf2x16(words.w));
    } else {
        a = vec4(bf16_low(words.x), bf16_high(words.x), bf16_low(words.y), bf16_high(words.y));
        b = vec4(bf16_low(words.z), bf16_high(words.z), bf16_low(words.w), bf16_high(words.w));
    }
}
#endif

// Loads eight values of row `row` of W, whose rows have `each` chunks, from chunk `c` on.
void load8(bool of_shared, uint row, uint c, uint each, out vec4 a, out vec4 b) {
    uint at = row * each + c;
#if WEIGHT == 3
    if (SHARED == 1u && of_shared && (SHARED_CODES & 15u) == 0u) load_numbers8(SHARED_CODES >> 4, shared_weight, at, a, b);
    else if (SHARED == 1u && of_shared) load_codes8_of(SHARED_CODES, shared_weight, row, c, each, a, b);
    else load_codes8(weight, row, c, each, a, b);
#elif WEIGHT == 2
    a = uintBitsToFloat(load(of_shared, at * 2u));
    b = uintBitsToFloat(load(of_shared, at * 2u + 1u));
#else
    unpack8(load(of_shared, at), a, b);
#endif
}

void main() {
    uint used = USED != 0u ? USED : count.v[2];
    uint row = STAGE == 0u ? gl_WorkGroupID.y / (CHOSEN + SHARED) : gl_WorkGroupID.y;
    uint choice = STAGE == 0u ? gl_WorkGroupID.y % (CHOSEN + SHARED) : 0u;
    uint first = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * ROWS;
    bool of_shared = SHARED == 1u && choice == CHOSEN;
    if (row >= used || first >= (of_shared ? shared_n : n)) return;
    uvec2 chosen = choices.v[row * (CHOSEN + SHARED) + choice];
    if (chosen.x == NOBODY || (STAGE == 0u && !of_shared && is_elsewhere(chosen.x))) return;
    uint t = gl_LocalInvocationID.x;

    float acc[ROWS];
    [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[r] = 0.0;
    float square = 0.0;
    uint xo = row * x_stride / 4u, yo = row * y_stride;
    uint all = STAGE == 0u ? (of_shared ? shared_chunks : chunks) : CHOSEN * chunks + SHARED * shared_chunks;
    for (uint i = t; i < all; i += gl_WorkGroupSize.x) {
        uint c = i, base = 0u, each = of_shared ? shared_chunks : chunks, column = i;
        bool other = of_shared;
        if (STAGE == 0u) {
            base = of_shared ? 0u : (chosen.x - FIRST_EXPERT) * n;
        } else {
            uint j = i / chunks;
            other = SHARED == 1u && j >= CHOSEN;
            j = min(j, CHOSEN);
            c = i - j * chunks;
            if (other) each = shared_chunks;
            uint expert = other ? FIRST_EXPERT : choices.v[row * (CHOSEN + SHARED) + j].x;
            if (is_elsewhere(expert)) continue;
            base = (expert - FIRST_EXPERT) * n;
            column = j * (part / 8u) + c;
        }
        vec4 xa = x.v[xo + column * 2u], xb = x.v[xo + column * 2u + 1u];
        if (STAGE == 0u) {
            square += dot(xa, xa) + dot(xb, xb);
            xa *= norm.v[c * 2u];
            xb *= norm.v[c * 2u + 1u];
        }
        [[unroll]] for (uint r = 0u; r < ROWS; r++) {
            vec4 a, b;
            load8(other, base + first + r, c, each, a, b);
            acc[r] += dot(a, xa) + dot(b, xb);
        }
    }

    [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[r] = subgroupAdd(acc[r]);
    if (STAGE == 0u) square = subgroupAdd(square);
    if (gl_NumSubgroups > 1u) {
        if (subgroupElect()) {
            [[unroll]] for (uint r = 0u; r < ROWS; r++) partial[gl_SubgroupID * (ROWS + 1u) + r] = acc[r];
            partial[gl_SubgroupID * (ROWS + 1u) + ROWS] = square;
        }
        barrier();
        if (t != 0u) return;
        for (uint i = 1u; i < gl_NumSubgroups; i++) {
            [[unroll]] for (uint r = 0u; r < ROWS; r++) acc[r] += partial[i * (ROWS + 1u) + r];
            square += partial[i * (ROWS + 1u) + ROWS];
        }
    } else if (t != 0u) {
        return;
    }
    if (STAGE == 0u) {
        float scale = inversesqrt(square / float(k) + epsilon), share = uintBitsToFloat(chosen.y);
        [[unroll]] for (uint r = 0u; r < ROWS; r += 2u) {
            float gate = acc[r] * scale, up = acc[r + 1u] * scale;
            if (BIAS == 1u && !of_shared) {
                gate += bias.v[chosen.x * n + first + r];
                up += bias.v[chosen.x * n + first + r + 1u];
            }
            if (IS_GATED(GLU)) {
                y.v[yo + choice * part + (first + r) / 2u] = glu(GLU, gate, up) * share;
            } else {
                y.v[yo + choice * part + first + r] = ACTIVATED(GLU, gate) * share;
                y.v[yo + choice * part + first + r + 1u] = ACTIVATED(GLU, up) * share;
            }
        }
    } else {
        if (BIAS == 1u) {
            for (uint j = 0u; j < CHOSEN; j++) {
                uvec2 other = choices.v[row * (CHOSEN + SHARED) + j];
                if (is_elsewhere(other.x)) continue;
                [[unroll]] for (uint r = 0u; r < ROWS; r++)
                    acc[r] += uintBitsToFloat(other.y) * bias.v[other.x * n + first + r];
            }
        }
        [[unroll]] for (uint r = 0u; r < ROWS; r++) y.v[yo + first + r] += acc[r];
    }
}

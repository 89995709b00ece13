#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Gated delta rule (linear attention), decode step: one token for each row, or up to TOKENS consecutive tokens for each
// sequence. The recurrent state is read once and written once.
//
//   c = silu( Σ_j conv[channel][j] · u_{p-3+j} )                   q, k of the value head's key head; v
//   q̂ = q · rsqrt(Σq² + 1e-6) / sqrt(key_dim),  k̂ = k · rsqrt(Σk² + 1e-6)
//   α = exp(-exp(a_log) · softplus(a + dt_bias)),  β = σ(b)
//   r = Sᵀk̂,  w = Sᵀq̂,  δ = β (v - α r),  o = α w + (q̂·k̂) δ,  S ← α S + k̂ δᵀ
//   y = o · rsqrt(mean o² + ε) ⊙ norm ⊙ silu(z)
//
// PLAIN 1: the state space of Mamba-2, whose update does not depend on the state. q (C) and k (B) keep their lengths, and
//   β = softplus(a + dt_bias),  α = exp(-exp(a_log) · β),  δ = β v,  o = α w + (q·k) δ + skip v,  y = o ⊙ silu(z)
//
// x      [rows][stride] f32: q | k | v | z | b | a, without b if PLAIN;  rows [rows][4]: token, position, slot (the cell), valid
// conv   [channels][4], and with CONV_BIAS 1 then [channels], which are added before silu; a_log, dt_bias [value heads]
// norm   [value_dim]; with PLAIN 1 [value heads]: skip
// state  [cells][value heads][key_dim][value_dim] f32; at position 0 it counts as zero
// window [cells][8][channels]: u of position p at p % 8; positions below 0 count as zero
// y      [rows][y_stride] f32, or packed for the next product (`output_rows.glsl`)
// TAGGED 1: x is tagged (`tags.glsl`). TAGGED 3: y is tagged too, and zeros are written for rows without a sequence.
//
// Pending tokens. A step does not add its own tokens to the state in memory, because a step may be run again (rejected
// draft tokens, a fault of tagged words). It writes what they would add to
//   pending [cells][value heads][PENDING][key_dim + value_dim + 4] f32: k̂, δ, α, tokens in the state, 0, 0
// and a later step adds it. Before a step the state contains SLOT_SETTLED tokens (slots: `state.glsl`); the tokens from
// there to the first row's position are the first entries of `pending`. The step adds them and writes the new number of
// tokens in the state to the first entry. A repeated step finds that number and adds nothing twice: it reads the state
// that the first run wrote, and computes the same bits. With TOKENS > 1, each group of TOKENS consecutive rows belongs
// to one sequence at consecutive positions, and rows without a token come last.
//
// BESIDE_PROMPTS 1: the rows are the last `decoding` rows of a prompt step (`kernels::embed::ChunkLayout`), whose slots decode
// in it. Such a step is not run again, so the token is added to the state and not left pending; and y is o, of which
// `delta_gate` makes the output of all rows of the step.
//
// One workgroup computes one value head of one row, or of TOKENS rows. A thread has four columns of the values and
// KEY_DIM / GROUPS rows of the state, whose loads it issues before it polls x. The workgroup of the first value head of
// each key head writes that head's u to the window. The state is updated after x has arrived, so that its loads overlap with
// the previous dispatch. Traffic: 8 bytes per number of the state.
#include "common.glsl"
#define DEVICES_ID 11
#include "tags.glsl"
#include "delta.glsl"
#include "state.glsl"
// Only the rounding functions of the fragments are used.
#define LANES 1
#include "fragments.glsl"
#include "swizzled.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KEY_HEADS = 16;
layout(constant_id = 2) const uint VALUE_HEADS = 32;
layout(constant_id = 3) const uint KEY_DIM = 128;
layout(constant_id = 4) const uint VALUE_DIM = 128;
layout(constant_id = 5) const uint GROUPS = 8;     // groups of state rows; the workgroup has GROUPS * VALUE_DIM / 4 threads
layout(constant_id = 6) const uint TAGGED = 0;
layout(constant_id = 7) const uint PACKED = 0;
layout(constant_id = 8) const uint TOKENS = 1;     // at most 4
layout(constant_id = 9) const uint PENDING = 1;    // at least TOKENS, at most 4
layout(constant_id = 10) const uint TILED = 0;     // order of the value heads, see delta.glsl
layout(constant_id = 12) const uint BESIDE_PROMPTS = 0;
layout(constant_id = 13) const uint PLAIN = 0;
layout(constant_id = 14) const uint CONV_BIAS = 0;

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };

layout(push_constant) uniform Args {
    TaggedIn x;
    Words4In rows;
    Floats4In conv;
    FloatsIn a_log;
    FloatsIn dt_bias;
    Floats4In norm;
    Floats4InOut state;
    Floats4InOut window;
    Floats4InOut pending;
    WordsIn slots;
    TaggedOut y;
    Fault fault;
    WordsIn chunk;    // the descriptor of the prompt step; not read otherwise
    uint stride;
    uint y_stride;
    float epsilon;
    uint x_tag;
    uint y_tag;
};

const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint THREADS = QUADS * GROUPS;
const uint EACH_ROWS = KEY_DIM / GROUPS;
const uint ITEMS = 2u * KEY_QUADS + QUADS;        // quads of q, k and v
const uint LOADS = (ITEMS + THREADS - 1u) / THREADS;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint GATES = CHANNEL_QUADS * 4u + VALUE_HEADS * VALUE_DIM; // b, then a
const uint DECAYS = GATES + (PLAIN == 1u ? 0u : VALUE_HEADS);    // a

const uint PENDING_QUADS = KEY_QUADS + QUADS + 1u;

// Whether the state is written before the output is computed: the compiler then needs 128 registers instead of 218. With
// tags the output comes first, because the next call polls for it.
const bool EARLY = TAGGED == 0u && BESIDE_PROMPTS == 0u;
#define WRITE_STATE { [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) state.v[state_at + n * QUADS] = s[n]; }
// Adds a token of the step, whose channels begin at `own_`, to the state.
#define ADD_TOKEN(own_) {                                                                            \
        [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) {                                           \
            uint d = group * EACH_ROWS + n;                                                          \
            s[n] = alpha * s[n] + k_scale * mixed_s[(own_) + KEY_QUADS + d / 4u][d % 4u] * delta;    \
        }                                                                                            \
    }

shared vec4 mixed_s[TOKENS * ITEMS];
shared vec4 r_s[THREADS];
shared vec4 w_s[THREADS];
shared float gates_s[TOKENS * 2u];                 // β, α
shared vec4 last_key_s[KEY_QUADS];                 // k̂ of the last pending token
shared float squares_s[QUADS];

float component(vec4 quad, uint at) {
    return (at & 2u) == 0u ? ((at & 1u) == 0u ? quad.x : quad.y) : ((at & 1u) == 0u ? quad.z : quad.w);
}

// The channels of an item, in quads.
uint channel_quad(uint h, uint item) {
    uint kh = KEY_HEAD(h);
    if (item < KEY_QUADS) return kh * KEY_QUADS + item;
    if (item < 2u * KEY_QUADS) return (KEY_HEADS + kh - 1u) * KEY_QUADS + item;
    return (2u * KEY_HEADS - 2u) * KEY_QUADS + h * QUADS + item;
}

void wait_for(uint at, uint row_base, inout uvec4 words, inout uint polls) {
    words = x.v[row_base + at];
    if (TAGGED != 0u) while (poll_again(stale(words, x_tag) != 0u, polls, fault, x_tag)) words = x.v[row_base + at];
}

// Polls one word of the row.
uint wait_for_one(uint at, uint row_base, inout uint polls) {
    uint word;
    do {
        uvec4 words = x.v[row_base + at / 4u];
        uint low = (at & 1u) == 0u ? words.x : words.y, high = (at & 1u) == 0u ? words.z : words.w;
        word = (at & 2u) == 0u ? low : high;
    } while (TAGGED != 0u && poll_again(stale(word, x_tag) != 0u, polls, fault, x_tag));
    return word;
}

#include "output_rows.glsl"

void write_output(uint row, uint h, uint quad, vec4 value) {
    write_quad(row, h * QUADS + quad, value, TAGGED == 3u ? tagged(value, y_tag) : floatBitsToUint(value));
}

void main() {
    uint h = gl_WorkGroupID.x, first_row = gl_WorkGroupID.y * TOKENS, i0 = gl_LocalInvocationIndex;
    if (BESIDE_PROMPTS == 1u) {
        uint decoding = chunk.v[3];
        if (gl_WorkGroupID.y >= decoding) return;
        first_row += chunk.v[2] - decoding;
    }
    uint column = i0 % QUADS, group = i0 / QUADS;
    uvec4 info = rows.v[first_row];
    uint position = info.y, polls = 0u;
    // The threads that write the output also load z; one thread loads both gates.
    bool writes = group == GROUPS - 1u, gates = i0 == THREADS / 2u;
    uint z_at = CHANNEL_QUADS + h * QUADS + column;
    uvec4 words;
    // Rows with a sequence come first.
    uint valid = min(info.w, 1u);
    [[unroll]] for (uint n = 1u; n < TOKENS; n++) valid += valid == n ? min(rows.v[first_row + n].w, 1u) : 0u;
    if (TAGGED != 0u && valid < TOKENS) {
        // A consumer that polls the output assumes that the inputs were polled before.
        [[unroll]] for (uint token = 0u; token < TOKENS; token++) {
            uint row_base = (first_row + token) * (stride / 4u);
            if (token >= valid) {
                [[unroll]] for (uint n = 0u; n < LOADS; n++)
                    wait_for(channel_quad(h, min(i0 + n * THREADS, ITEMS - 1u)), row_base, words, polls);
                if (writes) wait_for(z_at, row_base, words, polls);
                if (gates) {
                    wait_for_one(GATES + h, row_base, polls);
                    if (PLAIN == 0u) wait_for_one(DECAYS + h, row_base, polls);
                }
            }
        }
        barrier();
        [[unroll]] for (uint token = 0u; token < TOKENS; token++) {
            if (writes && token >= valid) write_output(first_row + token, h, column, vec4(0.0));
        }
    }
    if (valid == 0u) return;

    uint state_at = ((info.z * VALUE_HEADS + h) * KEY_DIM + group * EACH_ROWS) * QUADS + column;
    vec4 s[EACH_ROWS];
    [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) s[n] = state.v[state_at + n * QUADS];
    vec4 past[LOADS][3], weight[LOADS][4], bias[LOADS];
    uint window_at = info.z * RING * CHANNEL_QUADS;
    [[unroll]] for (uint n = 0u; n < LOADS; n++) {
        uint at = channel_quad(h, min(i0 + n * THREADS, ITEMS - 1u));
        [[unroll]] for (uint j = 0u; j < 3u; j++)
            past[n][j] = window.v[window_at + (position + RING - 3u + j) % RING * CHANNEL_QUADS + at];
        [[unroll]] for (uint e = 0u; e < 4u; e++) weight[n][e] = conv.v[at * 4u + e];
        bias[n] = CONV_BIAS == 1u ? conv.v[CHANNEL_QUADS * 4u + at] : vec4(0.0);
    }
    vec4 scale = writes ? norm.v[PLAIN == 1u ? h / 4u : column] : vec4(0.0);
    float a_log_h = gates ? a_log.v[h] : 0.0, dt_bias_h = gates ? dt_bias.v[h] : 0.0;
    uint pending_at = (info.z * VALUE_HEADS + h) * PENDING * PENDING_QUADS;
    uint settled = slots.v[info.z * SLOT_WORDS + SLOT_SETTLED];
    // The number of tokens to add. Memory may contain anything where there is no pending token.
    float included = pending.v[pending_at + KEY_QUADS + QUADS].y;
    uint count = position > 0u && included != float(position) ? min(position - settled, PENDING) : 0u;
    // All but the last token are added here, which is rare: after a step with accepted draft tokens.
    if (PENDING > 1u && count > 1u) {
        for (uint token = 0u; token + 1u < count; token++) {
            vec4 delta = pending.v[pending_at + KEY_QUADS + column];
            float alpha = pending.v[pending_at + KEY_QUADS + QUADS].x;
            [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) {
                uint d = group * EACH_ROWS + n;
                s[n] = alpha * s[n] + component(pending.v[pending_at + d / 4u], d) * delta;
            }
            pending_at += PENDING_QUADS;
        }
    }
    vec4 last_key = pending.v[pending_at + min(i0, KEY_QUADS - 1u)];
    vec4 last_delta = pending.v[pending_at + KEY_QUADS + column];
    float last_alpha = pending.v[pending_at + KEY_QUADS + QUADS].x;
    pending_at = (info.z * VALUE_HEADS + h) * PENDING * PENDING_QUADS;

    bool first = FIRST_OF_KEY_HEAD(h);
    vec4 z[TOKENS];
    [[unroll]] for (uint token = 0u; token < TOKENS; token++) {
        uint row_base = (first_row + token) * (stride / 4u);
        z[token] = vec4(0.0);
        if (token < valid) {
            [[unroll]] for (uint n = 0u; n < LOADS; n++) {
                uint item = min(i0 + n * THREADS, ITEMS - 1u), at = channel_quad(h, item);
                if (i0 + n * THREADS < ITEMS) {
                    wait_for(at, row_base, words, polls);
                    vec4 u = uintBitsToFloat(words);
                    // Inputs before the first token are zero, whatever memory contains.
                    vec4 t0 = position + token >= 3u ? past[n][0] : vec4(0.0);
                    vec4 t1 = position + token >= 2u ? past[n][1] : vec4(0.0);
                    vec4 t2 = position + token >= 1u ? past[n][2] : vec4(0.0);
                    vec4 mixed = vec4(
                        dot(weight[n][0], vec4(t0.x, t1.x, t2.x, u.x)), dot(weight[n][1], vec4(t0.y, t1.y, t2.y, u.y)),
                        dot(weight[n][2], vec4(t0.z, t1.z, t2.z, u.z)), dot(weight[n][3], vec4(t0.w, t1.w, t2.w, u.w)));
                    if (CONV_BIAS == 1u) mixed += bias[n];
                    mixed_s[token * ITEMS + item] = silu(mixed);
                    if (first || item >= 2u * KEY_QUADS)
                        window.v[window_at + (position + token) % RING * CHANNEL_QUADS + at] = u;
                    past[n][0] = t1;
                    past[n][1] = t2;
                    past[n][2] = u;
                }
            }
            if (writes) {
                wait_for(z_at, row_base, words, polls);
                z[token] = uintBitsToFloat(words);
            }
            if (gates) {
                float b = uintBitsToFloat(wait_for_one(GATES + h, row_base, polls)), a = b;
                if (PLAIN == 0u) a = uintBitsToFloat(wait_for_one(DECAYS + h, row_base, polls));
                gates_s[token * 2u] = PLAIN == 1u ? softplus(a + dt_bias_h) : sigmoid(b);
                gates_s[token * 2u + 1u] = exp(log_decay(a, a_log_h, dt_bias_h));
            }
        }
    }
    if (count == 0u) {
        last_key = last_delta = vec4(0.0);
        last_alpha = 1.0;
    }
    if (i0 < KEY_QUADS) last_key_s[i0] = last_key;
    barrier();
    // Not before the poll of x, which would have to wait for the loads of the state.
    if (position == 0u) {
        [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) s[n] = vec4(0.0);
    }
    // Without a branch on `count`, which is slower: if no token is pending, S · 1 + 0.
    [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) {
        uint d = group * EACH_ROWS + n;
        s[n] = last_alpha * s[n] + last_key_s[d / 4u][d % 4u] * last_delta;
    }
    if (EARLY) WRITE_STATE

    [[unroll]] for (uint token = 0u; token < TOKENS; token++) {
        if (token < valid) {
            uint own = token * ITEMS;
            // Every subgroup computes the sums itself.
            vec3 sums = vec3(0.0);
            for (uint n = 0u; n < (KEY_QUADS + gl_SubgroupSize - 1u) / gl_SubgroupSize; n++) {
                uint quad = n * gl_SubgroupSize + gl_SubgroupInvocationID;
                vec4 q = mixed_s[own + min(quad, KEY_QUADS - 1u)], k = mixed_s[own + KEY_QUADS + min(quad, KEY_QUADS - 1u)];
                sums += quad < KEY_QUADS ? vec3(dot(q, q), dot(k, k), dot(q, k)) : vec3(0.0);
            }
            sums = subgroupAdd(sums);
            float q_scale = inversesqrt(sums.x + L2_EPSILON) * inversesqrt(float(KEY_DIM)), k_scale = inversesqrt(sums.y + L2_EPSILON);
            if (PLAIN == 1u) q_scale = k_scale = 1.0;
            float beta = gates_s[token * 2u], alpha = gates_s[token * 2u + 1u];

            vec4 r = vec4(0.0), w = vec4(0.0);
            [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) {
                uint at = group * EACH_ROWS + n;
                r += mixed_s[own + KEY_QUADS + at / 4u][at % 4u] * s[n];
                w += mixed_s[own + at / 4u][at % 4u] * s[n];
            }
            r_s[i0] = r;
            w_s[i0] = w;
            barrier();
            r = vec4(0.0);
            [[unroll]] for (uint n = 0u; n < GROUPS; n++) r += r_s[n * QUADS + column];
            vec4 v = mixed_s[own + 2u * KEY_QUADS + column];
            vec4 delta = PLAIN == 1u ? beta * v : beta * (v - alpha * k_scale * r);

            vec4 o = vec4(0.0);
            if (writes) {
                w = vec4(0.0);
                [[unroll]] for (uint n = 0u; n < GROUPS; n++) w += w_s[n * QUADS + column];
                o = alpha * q_scale * w + q_scale * k_scale * sums.z * delta;
                if (PLAIN == 1u) o += component(scale, h) * v;
            }
            if (BESIDE_PROMPTS == 1u) {
                if (writes) write_output(first_row, h, column, o);
                ADD_TOKEN(own)
                WRITE_STATE
                return;
            }
            float square;
            if (PLAIN == 1u) {
                square = 0.0;
            } else if (gl_SubgroupSize == QUADS) {
                square = subgroupAdd(dot(o, o));
            } else {
                if (writes) squares_s[column] = dot(o, o);
                barrier();
                square = 0.0;
                for (uint n = 0u; n < QUADS; n++) square += squares_s[n];
            }
            if (writes && PLAIN == 1u) write_output(first_row + token, h, column, o * silu(z[token]));
            else if (writes)
                write_output(first_row + token, h, column, o * inversesqrt(square / float(VALUE_DIM) + epsilon) * scale * silu(z[token]));
            if (!EARLY && token == 0u) WRITE_STATE
            // All reads of pending tokens are before the barriers above.
            uint at = pending_at + token * PENDING_QUADS;
            if (i0 < KEY_QUADS) pending.v[at + i0] = k_scale * mixed_s[own + KEY_QUADS + i0];
            if (writes) pending.v[at + KEY_QUADS + column] = delta;
            if (gates) pending.v[at + KEY_QUADS + QUADS] = vec4(alpha, float(position), 0.0, 0.0);
            if (token + 1u < TOKENS) {
                ADD_TOKEN(own)
                // The next token's partial sums overwrite the ones read here.
                barrier();
            }
        }
    }
}

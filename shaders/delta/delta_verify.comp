#version 460
#extension GL_GOOGLE_include_directive : require
// The gated delta rule over EACH consecutive tokens of a sequence that may be rejected again: what `delta_step`
// computes, one token after the other, but the state in memory stays behind them.
//
// First the tokens that the step before left and that were accepted are taken in and the state is written; then the
// rows are computed from there in registers. What they would do to the state is left in `pending`.
//
// x, conv, a_log, dt_bias, norm, state, window: as of `delta_step`;  rows [sequences · EACH][4]: token, position, slot, valid
// slots    `state.glsl`: SLOT_SETTLED tokens are in the state; as many more as the position are pending
// pending  [cells][value heads][4][key_dim + value_dim + 4] f32 (`delta.glsl`)
// y        [rows][y_stride] f32; PACKED 1: bfloat16 blocks as `pack_rows` leaves them, `y_stride` of 32 columns
//
// One workgroup serves a value head of a sequence; a thread has four values' columns and KEY_DIM / GROUPS rows of
// the state. Traffic: 8 bytes a number of state.
#include "common.glsl"
#include "delta.glsl"
#include "state.glsl"
// Of the fragments only the rounding is used.
#define LANES 1
#include "fragments.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KEY_HEADS = 16;
layout(constant_id = 2) const uint VALUE_HEADS = 32;
layout(constant_id = 3) const uint KEY_DIM = 128;
layout(constant_id = 4) const uint VALUE_DIM = 128;
layout(constant_id = 5) const uint GROUPS = 8;
layout(constant_id = 6) const uint EACH = 2;
layout(constant_id = 7) const uint PACKED = 0;

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Words4In rows;
    WordsIn slots;
    Floats4In conv;
    FloatsIn a_log;
    FloatsIn dt_bias;
    Floats4In norm;
    Floats4InOut state;
    Floats4InOut window;
    Floats4InOut pending;
    Words4Out y;
    uint stride;
    uint y_stride;
    float epsilon;
};

const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint THREADS = QUADS * GROUPS;
const uint EACH_ROWS = KEY_DIM / GROUPS;
const uint ITEMS = 2u * KEY_QUADS + QUADS;
const uint TURNS = (ITEMS + THREADS - 1u) / THREADS;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint GATES = CHANNEL_QUADS * 4u + VALUE_HEADS * VALUE_DIM; // b, then a
const uint PENDING_QUADS = KEY_QUADS + QUADS + 1u;

shared vec4 mixed_s[ITEMS];
shared vec4 r_s[THREADS];
shared vec4 w_s[THREADS];
shared vec2 gates_s;                              // β, α
shared float squares_s[QUADS];

uint channel_quad(uint h, uint item) {
    uint kh = h / (VALUE_HEADS / KEY_HEADS);
    if (item < KEY_QUADS) return kh * KEY_QUADS + item;
    if (item < 2u * KEY_QUADS) return (KEY_HEADS + kh - 1u) * KEY_QUADS + item;
    return (2u * KEY_HEADS - 2u) * KEY_QUADS + h * QUADS + item;
}

float one(uint row, uint at) { return x.v[row * (stride / 4u) + at / 4u][at % 4u]; }

void write_output(uint row, uint h, uint quad, vec4 value) {
    if (PACKED == 0u) {
        y.v[row * y_stride / 4u + h * QUADS + quad] = floatBitsToUint(value);
        return;
    }
    uint column = h * QUADS + quad;
    uint word = (((row / 16u * y_stride + column / 8u) * 2u + column % 2u) * 32u + row % 8u * 4u + column % 8u / 2u);
    uvec2 pairs = uvec2(pack_pair(value.x, value.y), pack_pair(value.z, value.w));
    // Constant components: some drivers store a chosen one by way of the whole vector.
    if (row % 16u < 8u) {
        y.v[word].x = pairs.x;
        y.v[word].z = pairs.y;
    } else {
        y.v[word].y = pairs.x;
        y.v[word].w = pairs.y;
    }
}

void main() {
    uint h = gl_WorkGroupID.x, first_row = gl_WorkGroupID.y * EACH, i0 = gl_LocalInvocationIndex;
    uint column = i0 % QUADS, group = i0 / QUADS;
    uvec4 info = rows.v[first_row];
    if (info.w == 0u) return;
    uint position = info.y, cell = info.z;
    uint settled = slots.v[cell * SLOT_WORDS + SLOT_SETTLED];
    uint accepted = min(position - settled, MOST_PENDING);
    bool writes = group == GROUPS - 1u;

    uint state_at = ((cell * VALUE_HEADS + h) * KEY_DIM + group * EACH_ROWS) * QUADS + column;
    uint pending_at = (cell * VALUE_HEADS + h) * MOST_PENDING * PENDING_QUADS;
    vec4 s[EACH_ROWS];
    [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) s[n] = settled == 0u ? vec4(0.0) : state.v[state_at + n * QUADS];
    for (uint i = 0u; i < accepted; i++) {
        uint at = pending_at + i * PENDING_QUADS;
        vec4 delta = pending.v[at + KEY_QUADS + column];
        float alpha = pending.v[at + KEY_QUADS + QUADS].x;
        [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) {
            uint d = group * EACH_ROWS + n;
            s[n] = alpha * s[n] + pending.v[at + d / 4u][d % 4u] * delta;
        }
    }
    if (accepted > 0u) {
        [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) state.v[state_at + n * QUADS] = s[n];
    }
    float a_log_h = a_log.v[h], dt_bias_h = dt_bias.v[h];
    vec4 scale = norm.v[column];
    uint window_at = cell * RING * CHANNEL_QUADS;
    bool first = h % (VALUE_HEADS / KEY_HEADS) == 0u;

    for (uint t = 0u; t < EACH; t++) {
        uint row = first_row + t, now = position + t, row_base = row * (stride / 4u);
        // Whoever reads what this overwrites has done so, of `pending` too.
        barrier();
        for (uint turn = 0u; turn < TURNS; turn++) {
            uint item = min(turn * THREADS + i0, ITEMS - 1u), at = channel_quad(h, item);
            vec4 taps[4];
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                uint back = 3u - j;
                taps[j] = vec4(0.0);
                if (back <= t) taps[j] = x.v[row_base - back * (stride / 4u) + at];
                else if (back <= now) taps[j] = window.v[window_at + (now - back) % RING * CHANNEL_QUADS + at];
            }
            vec4 c0 = conv.v[at * 4u], c1 = conv.v[at * 4u + 1u], c2 = conv.v[at * 4u + 2u], c3 = conv.v[at * 4u + 3u];
            mixed_s[item] = silu(vec4(
                dot(c0, vec4(taps[0].x, taps[1].x, taps[2].x, taps[3].x)), dot(c1, vec4(taps[0].y, taps[1].y, taps[2].y, taps[3].y)),
                dot(c2, vec4(taps[0].z, taps[1].z, taps[2].z, taps[3].z)), dot(c3, vec4(taps[0].w, taps[1].w, taps[2].w, taps[3].w))));
            // Positions that the ring holds for these rows' convolutions are others.
            if (turn * THREADS + i0 < ITEMS && (first || item >= 2u * KEY_QUADS))
                window.v[window_at + now % RING * CHANNEL_QUADS + at] = taps[3];
        }
        if (i0 == 0u)
            gates_s = vec2(sigmoid(one(row, GATES + h)), exp(log_decay(one(row, GATES + VALUE_HEADS + h), a_log_h, dt_bias_h)));
        barrier();

        vec3 sums = vec3(0.0);
        for (uint quad = 0u; quad < KEY_QUADS; quad++) {
            vec4 q = mixed_s[quad], k = mixed_s[KEY_QUADS + quad];
            sums += vec3(dot(q, q), dot(k, k), dot(q, k));
        }
        float q_scale = inversesqrt(sums.x + L2_EPSILON) * inversesqrt(float(KEY_DIM)), k_scale = inversesqrt(sums.y + L2_EPSILON);
        float beta = gates_s.x, alpha = gates_s.y;
        vec4 r = vec4(0.0), w = vec4(0.0);
        float key[EACH_ROWS];
        [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) {
            uint d = group * EACH_ROWS + n;
            key[n] = mixed_s[KEY_QUADS + d / 4u][d % 4u];
            r += key[n] * s[n];
            w += mixed_s[d / 4u][d % 4u] * s[n];
        }
        r_s[i0] = r;
        w_s[i0] = w;
        barrier();
        r = w = vec4(0.0);
        [[unroll]] for (uint n = 0u; n < GROUPS; n++) {
            r += r_s[n * QUADS + column];
            w += w_s[n * QUADS + column];
        }
        vec4 delta = beta * (mixed_s[2u * KEY_QUADS + column] - alpha * k_scale * r);
        vec4 o = alpha * q_scale * w + q_scale * k_scale * sums.z * delta;
        if (writes) squares_s[column] = dot(o, o);
        barrier();
        float square = 0.0;
        for (uint n = 0u; n < QUADS; n++) square += squares_s[n];
        uint at = pending_at + t * PENDING_QUADS;
        if (writes) {
            vec4 z = x.v[row_base + CHANNEL_QUADS + h * QUADS + column];
            write_output(row, h, column, o * inversesqrt(square / float(VALUE_DIM) + epsilon) * scale * silu(z));
            pending.v[at + KEY_QUADS + column] = delta;
        }
        // There are at least as many threads.
        if (i0 < KEY_QUADS) pending.v[at + i0] = mixed_s[KEY_QUADS + i0] * k_scale;
        if (i0 == 0u) pending.v[at + KEY_QUADS + QUADS] = vec4(alpha, 0.0, 0.0, 0.0);
        delta *= k_scale;
        [[unroll]] for (uint n = 0u; n < EACH_ROWS; n++) s[n] = alpha * s[n] + key[n] * delta;
    }
}

#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// The gated delta rule over each prompt's blocks of 64 rows, one after the other, from what `delta_blocks`
// made of them. From the state S before a block:
//
//   R = β v - β e^G (K̂ S),   V' = T R,   O = e^G (Q̂ S) + E R,   S ← e^{G_64} S + K̂ᵀ (e^{G_64 - G} V')
//
// mixed, solved, values, gates: of `delta_blocks`, blocks of a prompt from `first block` on;  chunk, cells: likewise
// x      [rows][stride] f32: q | k | v are u
// state  [cells][value heads][key_dim][value_dim] f32: begins as cell `from`'s, or zero where there is none or
//        the prompt starts at position 0; left in cell `slot`, and after keepN_at rows in cell keepN
// window [cells][8][channels]: u of the last three positions is left in the same cells, at position % 8
// output [rows][value heads · value_dim] f32: O
//
// One workgroup has 16 columns of values of a value head of a prompt. The first of them also writes windows:
// of v, and of q and k if the head is the first of its key head. MATRIX 0: everything f32, by 64 threads.
// Traffic: a block's share of the scratch once a workgroup, outputs once, states once a prompt.
#include "common.glsl"
#include "delta.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KEY_HEADS = 16;
layout(constant_id = 1) const uint VALUE_HEADS = 32;
layout(constant_id = 2) const uint KEY_DIM = 128;
layout(constant_id = 3) const uint VALUE_DIM = 128;

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Floats4Out { vec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Words4In chunk;
    Words4In cells;
    Floats4In mixed;
    FloatsIn solved;
    Floats4In values;
    FloatsIn gates;
    Floats4InOut state;
    Floats4InOut window;
    Floats4Out o;
    uint stride;
};

const uint THREADS = 64u;
const uint KEY_QUADS = KEY_DIM / 4u;
const uint QUADS = VALUE_DIM / 4u;
const uint CHANNEL_QUADS = 2u * KEY_HEADS * KEY_QUADS + VALUE_HEADS * QUADS;
const uint SLICES = VALUE_DIM / 16u;

uint first_row, start, from, in_use;

// Leaves the window as it is after `end` rows of the prompt's chunk in a cell: `count` quads of channels.
void write_window(uint cell, uint end, uint first_quad, uint count) {
    for (uint n = 0u; n < (3u * count + THREADS - 1u) / THREADS; n++) {
        uint item = n * THREADS + gl_LocalInvocationIndex;
        int index = int(end) - 1 - int(item / count), position = int(start) + index;
        if (item >= 3u * count || position < 0) continue;
        uint quad = first_quad + item % count, in_ring = uint(position) % RING;
        vec4 u = vec4(0.0);
        if (index >= 0) {
            u = x.v[(first_row + uint(index)) * (stride / 4u) + quad];
        } else if (from == cell || from == NO_CELL) {
            continue;
        } else {
            u = window.v[(from * RING + in_ring) * CHANNEL_QUADS + quad];
        }
        window.v[(cell * RING + in_ring) * CHANNEL_QUADS + quad] = u;
    }
}

void write_windows(uint h, uint slot, uvec4 keeps) {
    uint ends[3] = uint[](in_use, keeps.x, keeps.z), to[3] = uint[](slot, keeps.y, keeps.w);
    uint kh = h / (VALUE_HEADS / KEY_HEADS);
    for (uint n = 0u; n < 3u; n++) {
        if (ends[n] == 0u) continue;
        write_window(to[n], ends[n], 2u * KEY_HEADS * KEY_QUADS + h * QUADS, QUADS);
        if (h % (VALUE_HEADS / KEY_HEADS) == 0u) {
            write_window(to[n], ends[n], kh * KEY_QUADS, KEY_QUADS);
            write_window(to[n], ends[n], (KEY_HEADS + kh) * KEY_QUADS, KEY_QUADS);
        }
    }
}

shared vec4 state_s[KEY_DIM * 4u];
shared vec4 r_s[BLOCK_ROWS * 4u];
shared vec4 made_s[BLOCK_ROWS * 4u];

void main() {
    uint h = gl_WorkGroupID.x / SLICES, slice = gl_WorkGroupID.x % SLICES, number = gl_WorkGroupID.y;
    uint i = gl_LocalInvocationIndex, prompts = chunk.v[0].x;
    if (number >= prompts) return;
    uvec4 prompt = chunk.v[1u + number], first = cells.v[2u * number], rest = cells.v[2u * number + 1u];
    uint slot = prompt.x;
    start = prompt.y;
    first_row = prompt.z;
    from = first.x;
    in_use = (number + 1u < prompts ? chunk.v[2u + number].z : chunk.v[0].z) - first_row;
    uvec4 keeps = uvec4(first.y, first.z, first.w, rest.x);
    if (slice == 0u) write_windows(h, slot, keeps);

    // A thread has every 64th row of the state; by key dimension, four quads of columns.
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
            uint d = min(n * THREADS + i, KEY_DIM - 1u);
            vec4 next[4];
            [[unroll]] for (uint c = 0u; c < 4u; c++) next[c] = decay * state_s[d * 4u + c];
            for (uint j = 0u; j < BLOCK_ROWS; j++) {
                vec4 quad = mixed.v[((own * 2u + 1u) * BLOCK_ROWS + j) * KEY_QUADS + d / 4u];
                float k = (d & 2u) == 0u ? ((d & 1u) == 0u ? quad.x : quad.y) : ((d & 1u) == 0u ? quad.z : quad.w);
                [[unroll]] for (uint c = 0u; c < 4u; c++) next[c] += k * made_s[j * 4u + c];
            }
            if (n * THREADS + i < KEY_DIM) {
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

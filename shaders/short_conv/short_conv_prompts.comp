#version 460
#extension GL_GOOGLE_include_directive : require
// Gated short convolution, prompt step: the rows of all prompts of the step, and of the slots that decode in it.
//
//   u = B ⊙ x
//   y = C ⊙ ( Σ_j conv[channel][j] · u_{p-TAPS+1+j} + bias )       ⊙: products of single values
//
// x      [rows][stride] f32: B | C | x, of CHANNELS columns each
// chunk  the descriptor of the step (`kernels::embed::ChunkLayout`), cells its words about cells
// conv   [CHANNELS][TAPS];  bias [CHANNELS], with BIAS 1
// window [cells][8][CHANNELS]: u of position p at p % 8. A prompt continues the window of a cell, and the windows after its
//        rows, and after the rows that end a snapshot, are stored
// y      [rows][y_stride] f32, or packed for the next product (`output_rows.glsl`); packed rows beyond the last in use are
//        zero up to a multiple of 64
//
// One invocation computes four channels of ROWS rows, one after the other. The first TAPS - 1 rows of a prompt belong to the
// block in which the prompt begins, whose invocations alone read the window that the prompt continues, and then write those
// of its ends: the windows need no barrier.
// Traffic: 16 bytes per value, and 8 · (TAPS - 1) / ROWS for inputs that the block before has too.
#include "common.glsl"
#include "windows.glsl"
// Only the rounding functions of the fragments are used.
#define LANES 1
#include "fragments.glsl"
#include "swizzled.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint CHANNELS = 1024; // a multiple of 4
layout(constant_id = 2) const uint TAPS = 3;        // from 2 to 5
layout(constant_id = 3) const uint BIAS = 0;
layout(constant_id = 4) const uint PACKED = 0;
layout(constant_id = 5) const uint ROWS = 16;       // at least TAPS; divides 64

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Words4In chunk;
    Words4In cells;
    Floats4In conv;
    Floats4In bias;
    Floats4InOut window;
    Words4Out y;
    uint stride;
    uint y_stride;
};

const uint QUADS = CHANNELS / 4u;

#include "short_conv.glsl"
#include "output_rows.glsl"

// The prompt: its slot, the position of its first row, that row, the first row behind it, the cell that it continues.
uint slot, start, first_row, end_row, from;

void read_prompt(uint index) {
    uvec4 step = chunk.v[0], prompt = chunk.v[1u + index];
    slot = prompt.x;
    start = prompt.y;
    first_row = prompt.z;
    end_row = index + 1u < step.x ? chunk.v[2u + index].z : step.z;
    // The words about cells say nothing of slots that decode.
    from = index + step.w >= step.x ? slot : cells.v[2u * index].x;
}

// Returns the prompt of a row in use.
uint prompt_of(uint row) {
    uint low = 0u, high = chunk.v[0].x;
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        if (chunk.v[1u + middle].z <= row) low = middle; else high = middle;
    }
    return low;
}

// Returns the first row that belongs to a block beginning at `row`.
uint first_of_block(uint row, uint used) {
    if (row >= used) return row;
    read_prompt(prompt_of(row));
    uint index = row - first_row;
    return index == 0u || index >= TAPS - 1u ? row : min(first_row + TAPS - 1u, end_row);
}

// Returns u of row `index` of the prompt; a negative index is a position before its rows.
vec4 input_of(int index, uint quad) {
    if (index >= 0) {
        uint at = (first_row + uint(index)) * (stride / 4u) + quad;
        return x.v[at] * x.v[at + 2u * QUADS];
    }
    if (from == NO_CELL || int(start) + index < 0) return vec4(0.0);
    return window.v[(from * RING + uint(int(start) + index) % RING) * QUADS + quad];
}

// Stores the window in a cell as it is after `end` rows of the prompt.
void write_window(uint cell, uint end, uint quad) {
    [[unroll]] for (uint n = 1u; n < TAPS; n++) {
        int index = int(end) - int(n), position = int(start) + index;
        // What precedes the rows is in the prompt's own cell already.
        if (position < 0 || index < 0 && from == cell) continue;
        window.v[(cell * RING + uint(position) % RING) * QUADS + quad] = input_of(index, quad);
    }
}

void write_windows(uint index, uint quad) {
    // A slot that does not run has no cell.
    if (slot == NO_CELL) return;
    write_window(slot, end_row - first_row, quad);
    if (index + chunk.v[0].w >= chunk.v[0].x) return;
    uvec4 words = cells.v[2u * index];
    if (words.y > 0u) write_window(words.z, words.y, quad);
    if (words.w > 0u) write_window(cells.v[2u * index + 1u].x, words.w, quad);
}

void main() {
    uint quad = gl_GlobalInvocationID.x, block = gl_WorkGroupID.y * ROWS, used = chunk.v[0].z;
    if (quad >= QUADS || (PACKED == 0u ? block >= used : block >= (used + 63u) / 64u * 64u)) return;
    uint end = first_of_block(block + ROWS, used), row = first_of_block(block, used), last = min(end, used);
    load_weights(quad);
    uint index = prompt_of(min(row, used - 1u));
    bool begins = true;
    for (; row < last; row++) {
        if (begins || row == end_row) {
            index += begins ? 0u : 1u;
            read_prompt(index);
            [[unroll]] for (uint j = 0u; j < TAPS - 1u; j++)
                past[j] = input_of(int(row - first_row + j) - int(TAPS - 1u), quad);
            begins = false;
            if (row == first_row) write_windows(index, quad);
        }
        uint at = row * (stride / 4u) + quad;
        vec4 value = x.v[at + QUADS] * convolve(x.v[at] * x.v[at + 2u * QUADS]);
        write_quad(row, quad, value, floatBitsToUint(value));
    }
    if (PACKED != 0u)
        for (; row < block + ROWS; row++) write_quad(row, quad, vec4(0.0), uvec4(0u));
}

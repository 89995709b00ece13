#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Gated short convolution, decode step: one token for each row, or up to TOKENS consecutive tokens for each sequence.
//
//   u = B ⊙ x
//   y = C ⊙ ( Σ_j conv[channel][j] · u_{p-TAPS+1+j} + bias )       ⊙: products of single values
//
// x      [rows][stride] f32: B | C | x, of CHANNELS columns each;  rows [rows][4]: token, position, slot (the cell), valid
// conv   [CHANNELS][TAPS];  bias [CHANNELS], with BIAS 1
// window [cells][8][CHANNELS]: u of position p at p % 8; positions below 0 count as zero
// y      [rows][y_stride] f32, or packed for the next product (`output_rows.glsl`)
// TAGGED 1: x is tagged (`tags.glsl`). TAGGED 3: y is tagged too, and zeros are written for rows without a sequence.
//
// With TOKENS > 1, each group of TOKENS consecutive rows belongs to one sequence at consecutive positions, and rows without
// a token come last. A step may be run again (rejected draft tokens, a fault of tagged words): the window holds the TAPS - 1
// tokens before the step and the step's own, so that a step overwrites nothing that it or its repetition reads.
//
// One invocation computes four channels of a row, or of TOKENS rows. It loads the window before it polls x.
// Traffic: per channel 16 bytes a token, and 4 · (2 · TAPS - 1) of the window and the weights.
#include "common.glsl"
#define DEVICES_ID 7
#include "tags.glsl"
#include "windows.glsl"
// Only the rounding functions of the fragments are used.
#define LANES 1
#include "fragments.glsl"
#include "swizzled.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint CHANNELS = 1024; // a multiple of 4
layout(constant_id = 2) const uint TAPS = 3;        // from 2 to 5
layout(constant_id = 3) const uint BIAS = 0;
layout(constant_id = 4) const uint TAGGED = 0;
layout(constant_id = 5) const uint PACKED = 0;
layout(constant_id = 6) const uint TOKENS = 1;      // at most 4

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer Floats4InOut { vec4 v[]; };

layout(push_constant) uniform Args {
    TaggedIn x;
    Words4In rows;
    Floats4In conv;
    Floats4In bias;
    Floats4InOut window;
    TaggedOut y;
    Fault fault;
    uint stride;
    uint y_stride;
    uint x_tag;
    uint y_tag;
};

const uint QUADS = CHANNELS / 4u;

#include "short_conv.glsl"
#include "output_rows.glsl"

void main() {
    uint quad = gl_GlobalInvocationID.x, first_row = gl_WorkGroupID.y * TOKENS, polls = 0u;
    if (quad >= QUADS) return;
    uvec4 info = rows.v[first_row];
    uint position = info.y;
    // Rows with a sequence come first.
    uint valid = min(info.w, 1u);
    [[unroll]] for (uint n = 1u; n < TOKENS; n++) valid += valid == n ? min(rows.v[first_row + n].w, 1u) : 0u;
    if (TAGGED == 0u && valid == 0u) return;

    // Without a sequence there is no cell, and cell 0 is read in vain.
    uint window_at = (valid > 0u ? info.z : 0u) * RING * QUADS + quad;
    load_weights(quad);
    [[unroll]] for (uint j = 0u; j < TAPS - 1u; j++) {
        past[j] = window.v[window_at + (position + RING - TAPS + 1u + j) % RING * QUADS];
        // Inputs before the first token are zero, whatever memory contains.
        if (position + j + 1u < TAPS) past[j] = vec4(0.0);
    }
    [[unroll]] for (uint token = 0u; token < TOKENS; token++) {
        if (TAGGED == 0u && token >= valid) return;
        uint row = first_row + token, at = row * (stride / 4u) + quad;
        uvec4 words[3];
        bool waiting;
        do {
            [[unroll]] for (uint n = 0u; n < 3u; n++) words[n] = x.v[at + n * QUADS];
            waiting = TAGGED != 0u && (stale(words[0], x_tag) | stale(words[1], x_tag) | stale(words[2], x_tag)) != 0u;
        } while (TAGGED != 0u && poll_again(waiting, polls, fault, x_tag));
        vec4 value = vec4(0.0);
        if (token < valid) {
            vec4 u = uintBitsToFloat(words[0]) * uintBitsToFloat(words[2]);
            value = uintBitsToFloat(words[1]) * convolve(u);
            window.v[window_at + (position + token) % RING * QUADS] = u;
        }
        write_quad(row, quad, value, TAGGED == 3u ? tagged(value, y_tag) : floatBitsToUint(value));
    }
}

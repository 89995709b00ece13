#version 460
#extension GL_GOOGLE_include_directive : require
// Embedding lookup at the start of a step: rows[r] = {token, position, slot, valid}; x[r] = embedding[token] · scale.
// `valid` is 0 for a row without a sequence, else the number of rows from this one to its prompt's last one in the step.
//
// embedding  weights of vocabulary rows part_first .. part_first + part_rows, [part_rows][chunks·8], or with LAYOUT 1
//            in fragment order (`memory::pack::Layout::Fragments`)
// x          [rows][x_stride] f32, tagged with TAGGED 3 (`tags.glsl`)
// rows       [rows] uvec4
// PREFILL 0 (decode): row r is slot batch[r], whose state holds the token and the position
// PREFILL 1: row r is token r of the prompt step (`kernels::embed::ChunkLayout`); it belongs to the last prompt whose
// first row is not above r
// One workgroup copies 8 values per invocation of one row. Traffic: 2·H + 4·H bytes per row (16-bit weights), where H
// is the number of values of a row.
#include "common.glsl"
#include "state.glsl"
#include "tags.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint PREFILL = 0;
layout(constant_id = 2) const uint TAGGED = 0;
#if WEIGHT == 3
layout(constant_id = 3) const uint CODES = 0x5024; // the weights' format
#include "codes.glsl"
#endif

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer RowsOut { uvec4 v[]; };

layout(push_constant) uniform Args {
    Words4In embedding;
    WordsIn slots;
    WordsIn batch;
    WordsIn chunk;
    TaggedOut x;
    RowsOut rows;
    uint chunks;      // 8-value chunks of a row
    uint x_stride;    // in floats
    uint part_first;
    uint part_rows;
    uint x_tag;
    uint tokens_at;   // index of the descriptor's first token word
    float scale;
};

void main() {
    uint row = gl_WorkGroupID.y;
    uint token, position, slot, valid;
    if (PREFILL == 1u) {
        uint low = 0u, high = chunk.v[0];
        while (high - low > 1u) {
            uint middle = (low + high) / 2u;
            if (chunk.v[4u + 4u * middle + 2u] <= row) low = middle; else high = middle;
        }
        slot = chunk.v[4u + 4u * low];
        position = chunk.v[4u + 4u * low + 1u] + row - chunk.v[4u + 4u * low + 2u];
        // A prompt may have no slot; its rows are not valid.
        uint end = low + 1u < chunk.v[0] ? chunk.v[4u + 4u * (low + 1u) + 2u] : chunk.v[2];
        valid = row < chunk.v[2] && slot != 0xffffffffu ? end - row : 0u;
        token = chunk.v[tokens_at + row];
    } else {
        slot = batch.v[row];
        valid = 0u;
        token = 0u;
        position = 0u;
        if (slot != 0xffffffffu) {
            valid = slots.v[slot * SLOT_WORDS + SLOT_ACTIVE] == 1u ? 1u : 0u;
            token = slots.v[slot * SLOT_WORDS + SLOT_TOKEN];
            position = slots.v[slot * SLOT_WORDS + SLOT_POSITION];
        }
    }
    if (valid == 0u) token = 0u;
    if (gl_WorkGroupID.x == 0u && gl_LocalInvocationID.x == 0u)
        rows.v[row] = uvec4(token, position, slot, valid);
    uint c = gl_GlobalInvocationID.x;
    if (c >= chunks || token < part_first || token - part_first >= part_rows) return;
    vec4 a, b;
#if LAYOUT == 1 && WEIGHT == 3
    load_fragment_codes8(embedding, token - part_first, c, chunks, a, b);
#elif LAYOUT == 1
    uint r = (token - part_first) % 16u, g = 2u * (r / 4u) + r % 2u;
    uint block = (token - part_first) / 16u * ((chunks + 3u) / 4u) + c / 4u;
    uvec4 low = embedding.v[block * 64u + g * 4u + c % 4u], high = embedding.v[block * 64u + 32u + g * 4u + c % 4u];
    bool second = (r / 2u) % 2u == 1u;
    unpack8(uvec4(second ? low.zw : low.xy, second ? high.zw : high.xy), a, b);
#elif WEIGHT == 3
    load_codes8(embedding, token - part_first, c, chunks, a, b);
#elif WEIGHT == 2
    uint base = ((token - part_first) * chunks + c) * 2u;
    a = uintBitsToFloat(embedding.v[base]);
    b = uintBitsToFloat(embedding.v[base + 1u]);
#else
    unpack8(embedding.v[(token - part_first) * chunks + c], a, b);
#endif
    a *= scale;
    b *= scale;
    uint o = (row * x_stride) / 4u + c * 2u;
    x.v[o] = TAGGED == 3u ? tagged(a, x_tag) : floatBitsToUint(a);
    x.v[o + 1u] = TAGGED == 3u ? tagged(b, x_tag) : floatBitsToUint(b);
}

#version 460
#extension GL_GOOGLE_include_directive : require
// Expands quantised weights in fragment order to bfloat16 in fragment order, for products with many rows of x, which read
// each weight several times.
//
// weight     codes with scales (`codes.glsl`; fragments as `memory::pack::codes` lays them out), of `row_blocks` blocks of
//            16 rows
// y          16 × 32 blocks of bfloat16 in fragment order (`memory::pack::Layout::Fragments`), `chunks` per block of rows
//
// A group of 32 lanes expands one unit of columns of a block of rows. A lane's weights are the same in both layouts.
// Traffic: the codes once, 2 bytes for each weight.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 128;   // the workgroup's size
layout(constant_id = 2) const uint UNITS = 32;    // units of columns of a padded row
layout(constant_id = 3) const uint CODES = 0x5024; // the weights' format

#include "fragments.glsl"
#include "codes.glsl"

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Words4In weight;
    Words4Out y;
    uint row_blocks;
    uint chunks;
};

#include "code_fragments.glsl"

// Returns the weights of a half's pairs of codes in bfloat16.
uvec4 expanded(uvec4 pairs, uint scale, uint minimum, vec2 factor) {
    pairs = value_pairs(pairs);
    vec2 s = unpackHalf2x16(value_scales(scale)), m = unpackHalf2x16(minimum);
    if (STORED == 0u) m = s * ZERO_VALUE;
    s *= factor;
    m *= factor;
    if (HIGH_V) s.y *= 0.0625;
    vec2 a = unpackHalf2x16(pairs.x) * s.x - m.x, b = unpackHalf2x16(pairs.y) * s.x - m.x;
    vec2 c = unpackHalf2x16(pairs.z) * s.y - m.y, d = unpackHalf2x16(pairs.w) * s.y - m.y;
    return uvec4(pack_pair(a.x, a.y), pack_pair(b.x, b.y), pack_pair(c.x, c.y), pack_pair(d.x, d.y));
}

void main() {
    uint group = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * (LANES / 32u) + LANE_GROUP;
    uint block = group / UNITS, unit = group % UNITS;
    if (block >= row_blocks) return;
    uint base = block * BLOCK_WORDS, at = base + BLOCK_HEADER + unit * UNIT_WORDS;
    uint g = LANE >> 2, t = LANE & 3u, u = 4u * (g >> 1) + (g & 1u);
    vec2 factor = uintBitsToFloat(uvec2(CODE_WORD(weight, base * 4u + u), CODE_WORD(weight, base * 4u + u + 2u)));
    uvec4 w[PLANE_LOADS];
    [[unroll]] for (uint i = 0u; i < PLANE_LOADS; i++) w[i] = weight.v[at + i * 32u + LANE];
    uint scales = (at + PLANE_LOADS * 32u) * 4u + g * UNIT_GROUPS;
    [[unroll]] for (uint c = 0u; c < UNIT_COLS / 32u; c++) {
        uint chunk = unit * (UNIT_COLS / 32u) + c;
        if (chunk < chunks) {
            uint scale = CODE_WORD(weight, scales + group_of(c, t));
            uint minimum = STORED == 1u ? CODE_WORD(weight, scales + 8u * UNIT_GROUPS + group_of(c, t)) : 0u;
            [[unroll]] for (uint h = 0u; h < 2u; h++)
                y.v[(block * chunks + chunk) * 64u + h * 32u + LANE] = expanded(PAIRS(w, 0u, c, h), scale, minimum, factor);
        }
    }
}

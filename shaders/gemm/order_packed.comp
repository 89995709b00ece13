#version 460
#extension GL_GOOGLE_include_directive : require
// Packed rows in another order of columns: y[r][j] = x[r][order[j]], for weights whose groups are not of adjacent columns
// of the checkpoint (act-order).
//
// x, y    rows of 16-bit numbers in the order of `pack_rows.comp`
// order   [32·chunks]; the places beyond the last real column are their own
//
// An invocation produces one 32-bit word, two adjacent columns of a row, from two words of x. Traffic: 2 bytes read
// (mostly from a cache) and written per value, and the order once a row.
#include "common.glsl"

layout(local_size_x_id = 0) in;

layout(push_constant) uniform Args {
    WordsIn x;
    WordsIn order;
    WordsOut y;
    uint chunks;      // blocks of 32 columns
    uint words;       // 32-bit words of y
};

// Returns the number in a column of row g (second 0) or g + 8 (second 1) of a block.
uint number(uint block, uint g, uint second, uint column) {
    uint c = column / 32u, t = column % 32u / 8u, h = column % 8u / 4u, e = column % 4u;
    uint word = x.v[(((block * chunks + c) * 2u + h) * 32u + g * 4u + t) * 4u + e / 2u * 2u + second];
    return (word >> (16u * (e & 1u))) & 0xffffu;
}

void main() {
    uint group = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint w = group * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (w >= words) return;
    uint p = w & 3u, lane = w / 4u & 31u, h = w / 128u & 1u, q = w / 256u;
    uint block = q / chunks, c = q % chunks;
    uint g = lane / 4u, second = p & 1u;
    uint column = c * 32u + (lane & 3u) * 8u + h * 4u + p / 2u * 2u;
    y.v[w] = number(block, g, second, order.v[column]) | number(block, g, second, order.v[column + 1u]) << 16;
}

// Stores of a row's columns as the next product reads them. The shader must declare the constant PACKED and the arguments
// `y`, of 16-byte words, and `y_stride`, and include `swizzled.glsl` and, for the rounding functions, `fragments.glsl`.
//
// PACKED 0: rows of floats, `y_stride` apart. PACKED 1: bfloat16 blocks in the layout of `pack_rows`, `y_stride` blocks of 32
// columns. PACKED 2: bfloat16 in the swizzled order of `pack_rows`, of `y_stride` rows.

// Stores columns 4 * quad to 4 * quad + 3. `words` are the four of a row that is not packed.
void write_quad(uint row, uint quad, vec4 value, uvec4 words) {
    if (PACKED == 0u) {
        y.v[row * y_stride / 4u + quad] = words;
        return;
    }
    uvec2 pairs = uvec2(pack_pair(value.x, value.y), pack_pair(value.z, value.w));
    if (PACKED == 2u) {
        PUT_SWIZZLED(y, row, quad, y_stride, pairs)
        return;
    }
    uint word = (((row / 16u * y_stride + quad / 8u) * 2u + quad % 2u) * 32u + row % 8u * 4u + quad % 8u / 2u);
    // Constant components, because some drivers store a dynamic component by rewriting the whole vector.
    if (row % 16u < 8u) {
        y.v[word].x = pairs.x;
        y.v[word].z = pairs.y;
    } else {
        y.v[word].y = pairs.x;
        y.v[word].w = pairs.y;
    }
}

// Stores of packed rows in the swizzled order (`swizzled_index` of kernels/gemm/tiled.rs), which `wgmma` reads.

// Stores columns 4 * quad to 4 * quad + 3 of a row as two words of 16-bit pairs. `rows` is the number of rows that the
// buffer has, a multiple of 64.
#define PUT_SWIZZLED(buffer, row, quad, rows, pairs) { \
    uint first_ = (quad) % 16u / 8u * 4u + (quad) % 2u * 2u, at_ = ((quad) / 16u * (rows) + (row)) * 8u; \
    PUT_COMPONENT(buffer.v[at_ + (first_ ^ (row) & 7u)], (quad) % 8u / 2u, (pairs).x) \
    PUT_COMPONENT(buffer.v[at_ + (first_ + 1u ^ (row) & 7u)], (quad) % 8u / 2u, (pairs).y) }

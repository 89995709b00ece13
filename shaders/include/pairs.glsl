// Split-bfloat16 arithmetic: an f32 value is held as the sum of two bfloat16 values, its nearest bfloat16 ("most") and
// the bfloat16 nearest to the remainder ("rest"). The sum of the four partial products is accurate to a relative error
// of 2^-17. For kernels on cooperative matrices (`fragments.glsl` with MATRIX 1 and WEIGHT 0).

uint bits_of(bfloat16_t a, bfloat16_t b) { return pack32(u16vec2(bfloat16BitsToUintEXT(a), bfloat16BitsToUintEXT(b))); }

void split_two(float a, float b, out uint most, out uint rest) {
    most = bits_of(bfloat16_t(a), bfloat16_t(b));
    // Widened as bits: a compiler could take a float that is rounded and converted back for the float itself.
    rest = bits_of(bfloat16_t(a - bf16_low(most)), bfloat16_t(b - bf16_high(most)));
}

void split_four(vec4 x, out uvec2 most, out uvec2 rest) {
    split_two(x.x, x.y, most.x, rest.x);
    split_two(x.z, x.w, most.y, rest.y);
}

// Splits a lane's eight values of a 16 × 16 block.
void split_block(vec4 low, vec4 high, out uvec4 most, out uvec4 rest) {
    split_two(low.x, low.y, most.x, rest.x);
    split_two(low.z, low.w, most.y, rest.y);
    split_two(high.x, high.y, most.z, rest.z);
    split_two(high.z, high.w, most.w, rest.w);
}

#define MULTIPLY_ADD_PARTS(sums, a_most, a_rest, b_most, b_rest) { \
        MULTIPLY_ADD(sums, a_rest, b_rest)                         \
        MULTIPLY_ADD(sums, a_rest, b_most)                         \
        MULTIPLY_ADD(sums, a_most, b_rest)                         \
        MULTIPLY_ADD(sums, a_most, b_most)                         \
    }

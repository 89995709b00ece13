// Split-f16 arithmetic on cooperative matrices of MATRIX_M × MATRIX_N × MATRIX_K of which nothing but the shape is known: an
// f32 value times a power of two is held as the sum of two f16 values, its nearest f16 ("most") and the f16 nearest to the
// remainder ("rest"). Of the four partial products, that of both rests is left out: it is below 2^-22 of the product.
//
// The factor brings the largest magnitude of a matrix, or of a part of it, to 2^14 or between 2^14 and 2^15, so a most does not
// overflow. An element's error is at most 2^-22 of its value (2^-20 if the conversion to f16 truncates) or, if that is more,
// 2^-39 of the largest; 2^-28 of the largest on a device that takes numbers of f16 below 2^-14 for zero.

// The factor of operands whose magnitude is at most 1.
const float UNIT_SCALE = 16384.0;
const float UNIT_BACK = 1.0 / UNIT_SCALE;

// The exponent, with its bias, of the largest magnitude. One below 2^-84 counts as 2^-84, and one that is not finite as the
// largest finite one, so that all factors are finite and not zero.
uint exponent_of(float largest) { return clamp(floatBitsToUint(largest) >> 23, 43u, 254u); }
// Returns the factor for values up to `largest`.
float scale_of(float largest) { return uintBitsToFloat((268u - exponent_of(largest)) << 23); }
// Returns the factor by which products of such values with operands up to 1 become what they are.
float back_of(float largest) { return uintBitsToFloat((exponent_of(largest) - 28u) << 23); }

float largest_of(vec4 x) { return max(max(abs(x.x), abs(x.y)), max(abs(x.z), abs(x.w))); }

// Splits four values that have been multiplied by their factor. `zero`: `widened`.
void split_four(vec4 x, uint zero, out uvec2 most, out uvec2 rest) {
    most = uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw));
    x -= vec4(widened(most.x, zero), widened(most.y, zero));
    rest = uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw));
}

// Splits eight values that have been multiplied by their factor into 16-byte words.
void split_eight(vec4 low, vec4 high, uint zero, out uvec4 most, out uvec4 rest) {
    uvec2 low_most, low_rest, high_most, high_rest;
    split_four(low, zero, low_most, low_rest);
    split_four(high, zero, high_most, high_rest);
    most = uvec4(low_most, high_most);
    rest = uvec4(low_rest, high_rest);
}

#define Left coopmat<float16_t, gl_ScopeSubgroup, MATRIX_M, MATRIX_K, gl_MatrixUseA>
#define Right coopmat<float16_t, gl_ScopeSubgroup, MATRIX_K, MATRIX_N, gl_MatrixUseB>
#define Sums coopmat<float, gl_ScopeSubgroup, MATRIX_M, MATRIX_N, gl_MatrixUseAccumulator>
// Load the parts of an operand, of which `rest` lies `apart` 16-byte words behind `most`. Both operands have their K
// elements in consecutive places, or (ACROSS) the right one has its N elements.
#define LOAD_LEFT(most, rest, words, at, stride_, apart) {                                            \
        coopMatLoad(most, words, at, stride_, gl_CooperativeMatrixLayoutRowMajor);                    \
        coopMatLoad(rest, words, (at) + (apart), stride_, gl_CooperativeMatrixLayoutRowMajor);        \
    }
#define LOAD_RIGHT(most, rest, words, at, stride_, apart) {                                           \
        coopMatLoad(most, words, at, stride_, gl_CooperativeMatrixLayoutColumnMajor);                 \
        coopMatLoad(rest, words, (at) + (apart), stride_, gl_CooperativeMatrixLayoutColumnMajor);     \
    }
#define LOAD_RIGHT_ACROSS LOAD_LEFT
#define MULTIPLY_ADD_PARTS(sums, left_most, left_rest, right_most, right_rest) {                      \
        sums = coopMatMulAdd(left_rest, right_most, sums);                                            \
        sums = coopMatMulAdd(left_most, right_rest, sums);                                            \
        sums = coopMatMulAdd(left_most, right_most, sums);                                            \
    }

// Makes what a subgroup has written to shared memory visible to all of its invocations.
#define SUBGROUP_BARRIER { subgroupMemoryBarrierShared(); subgroupBarrier(); }
#define UNROLL [[unroll]]

// Products of 16 × 16 matrix blocks by a group of 32 lanes, on weights packed as `memory::pack::Layout::Fragments`.
//
// A lane is `LANE` = 4g + t of lane group `LANE_GROUP`. One 16-byte load per lane fetches 16 rows of W × 16 columns:
// half `half_` (0 or 1) of block (row / 16, column / 32) lies at 16-byte word (block * 2 + half_) * 32 + LANE. Together
// the 32 lanes hold the 16 rows; a lane holds columns 8t + 4·half_ .. + 4 of the block's 32 columns for two of the rows
// (`memory::pack::fragment_index`). Tokens (rows of x) are given as the same columns: token g in the first two words,
// token g + 8 in the last two. After the product a lane holds the sums of token g (elements 0..3) and of token g + 8
// (elements 4..7) for rows 4t .. 4t + 3 of W.
//
// MATRIX 1 uses cooperative matrices, whose element order in the lanes is probed at start (`fragment_layout.comp`). MATRIX 0 is
// the scalar fallback: it computes the same product through shared memory, with barriers, so that every call must be in
// uniform control flow of the whole workgroup. The shader must define `LANES`, the workgroup's size, as a constant.
#ifndef MATRIX
#define MATRIX 0
#endif

#if MATRIX == 1
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
#if WEIGHT == 1
#define ELEMENT float16_t
#define ELEMENT_OF(bits) uint16BitsToFloat16(bits)
#else
#extension GL_EXT_bfloat16 : require
#define ELEMENT bfloat16_t
#define ELEMENT_OF(bits) uintBitsToBFloat16EXT(bits)
#endif

// Makes what a lane group has written to shared memory visible to all lanes of the group.
#define LANES_BARRIER { subgroupMemoryBarrierShared(); subgroupBarrier(); }
#define LANE gl_SubgroupInvocationID
#define LANE_GROUP gl_SubgroupID
#define Tokens coopmat<ELEMENT, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define Weights coopmat<ELEMENT, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
#define Sums coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>

#define PUT_PAIR(m, e, word) { u16vec2 pair_ = unpack16(word); m[e] = ELEMENT_OF(pair_.x); m[e + 1] = ELEMENT_OF(pair_.y); }
#define SET_TOKENS(m, low, high) { PUT_PAIR(m, 0, (low).x) PUT_PAIR(m, 2, (low).y) PUT_PAIR(m, 4, (high).x) PUT_PAIR(m, 6, (high).y) }
#define SET_WEIGHTS(m, q) { PUT_PAIR(m, 0, (q).x) PUT_PAIR(m, 2, (q).y) PUT_PAIR(m, 4, (q).z) PUT_PAIR(m, 6, (q).w) }
#define NO_SUMS Sums(0.0)
#define MULTIPLY_ADD(sums, tokens, weights) sums = coopMatMulAdd(tokens, weights, sums);
#define SCALE_SUMS(s, a, b) { s[0] *= a; s[1] *= a; s[2] *= a; s[3] *= a; s[4] *= b; s[5] *= b; s[6] *= b; s[7] *= b; }
#define SUMS_LOW(s) vec4(s[0], s[1], s[2], s[3])
#define SUMS_HIGH(s) vec4(s[4], s[5], s[6], s[7])

// Products of a block of 16 rows of W with up to 8 tokens, by half the multiplications. A lane's weights are as above. It
// gives its columns of token g, and receives the sums of tokens 2t and 2t + 1 for the block's rows
// FIRST_ROW (elements 0 and 1) and FIRST_ROW + 2 (elements 2 and 3).
#define FewTokens coopmat<ELEMENT, gl_ScopeSubgroup, 16, 8, gl_MatrixUseB>
#define RowWeights coopmat<ELEMENT, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define FewSums coopmat<float, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>
#define SET_FEW_TOKENS(m, words) { PUT_PAIR(m, 0, (words).x) PUT_PAIR(m, 2, (words).y) }
#define NO_FEW_SUMS FewSums(0.0)
#define MULTIPLY_ADD_FEW(sums, tokens, weights) sums = coopMatMulAdd(weights, tokens, sums);
#define FEW_SUMS(s) vec4(s[0], s[1], s[2], s[3])
// Multiplies the sums of tokens 2t and 2t + 1.
#define SCALE_FEW_SUMS(s, a, b) { s[0] *= a; s[1] *= b; s[2] *= a; s[3] *= b; }
// Adds the products with tokens that are the sums of two parts.
#define MULTIPLY_ADD_FEW_PARTS(sums, most, rest, weights) { MULTIPLY_ADD_FEW(sums, most, weights) MULTIPLY_ADD_FEW(sums, rest, weights) }
// Before a loop around products.
#define UNROLL_PRODUCTS [[unroll]]

#else
// Each product has two barriers, and a CPU driver takes seconds to compile a step with a hundred.
#define UNROLL_PRODUCTS [[dont_unroll]]
#define LANES_BARRIER barrier();
#define LANE (gl_LocalInvocationIndex & 31u)
#define LANE_GROUP (gl_LocalInvocationIndex >> 5)
#define Tokens uvec4
#define Weights uvec4
struct Sums { vec4 low; vec4 high; };

shared uvec4 exchange_tokens[LANES];
shared uvec4 exchange_weights[LANES];

#define SET_TOKENS(m, low_, high_) m = uvec4((low_).xy, (high_).xy);
#define SET_WEIGHTS(m, q) m = (q);
#define NO_SUMS Sums(vec4(0.0), vec4(0.0))
#define SCALE_SUMS(s, a, b) { (s).low *= a; (s).high *= b; }
#define SUMS_LOW(s) (s).low
#define SUMS_HIGH(s) (s).high

vec4 four_of(uvec2 words) {
#if WEIGHT == 1
    return vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
#else
    return vec4(bf16_low(words.x), bf16_high(words.x), bf16_low(words.y), bf16_high(words.y));
#endif
}

void multiply_add(inout Sums sums, uvec4 tokens, uvec4 weights) {
    barrier();
    exchange_tokens[gl_LocalInvocationIndex] = tokens;
    exchange_weights[gl_LocalInvocationIndex] = weights;
    barrier();
    uint group = LANE_GROUP * 32u, g = LANE >> 2, t = LANE & 3u;
    for (uint i = 0u; i < 4u; i++) {
        uvec4 x = exchange_tokens[group + g * 4u + i];
        vec4 low = four_of(x.xy), high = four_of(x.zw);
        // Rows 4t and 4t + 1 of W are the first two words of the lanes with g = 2t and g = 2t + 1; rows 4t + 2 and
        // 4t + 3 are the last two words of the same lanes.
        uvec4 a = exchange_weights[group + 2u * t * 4u + i], b = exchange_weights[group + (2u * t + 1u) * 4u + i];
        mat4 w = mat4(four_of(a.xy), four_of(b.xy), four_of(a.zw), four_of(b.zw));
        sums.low += low * w;
        sums.high += high * w;
    }
}
#define MULTIPLY_ADD(sums, tokens, weights) multiply_add(sums, tokens, weights);

#define FewTokens uvec2
#define RowWeights uvec4
#define FewSums vec4
#define SET_FEW_TOKENS(m, words) m = (words);
#define NO_FEW_SUMS vec4(0.0)
#define FEW_SUMS(s) (s)
#define SCALE_FEW_SUMS(s, a, b) s *= vec4(a, b, a, b);

// A lane's columns of a token are the first two words of `tokens`; with `parts` 2 the last two words are added to them.
void multiply_add_few(inout vec4 sums, uvec4 tokens, uvec4 weights, const uint parts) {
    barrier();
    exchange_tokens[gl_LocalInvocationIndex] = tokens;
    exchange_weights[gl_LocalInvocationIndex] = weights;
    barrier();
    uint group = LANE_GROUP * 32u, g = LANE >> 2, t = LANE & 3u;
    for (uint i = 0u; i < 4u; i++) {
        uvec4 w = exchange_weights[group + g * 4u + i];
        uvec4 a = exchange_tokens[group + 2u * t * 4u + i], b = exchange_tokens[group + (2u * t + 1u) * 4u + i];
        vec4 first = four_of(a.xy), second = four_of(b.xy);
        if (parts == 2u) {
            first += four_of(a.zw);
            second += four_of(b.zw);
        }
        vec4 low = four_of(w.xy), high = four_of(w.zw);
        sums += vec4(dot(first, low), dot(second, low), dot(first, high), dot(second, high));
    }
}
#define MULTIPLY_ADD_FEW(sums, tokens, weights) multiply_add_few(sums, uvec4(tokens, 0u, 0u), weights, 1u);
#define MULTIPLY_ADD_FEW_PARTS(sums, most, rest, weights) multiply_add_few(sums, uvec4(most, rest), weights, 2u);
#endif
// A lane's first row of W in a block, for FewSums; and a store of its sums of one token, `of_rows`, to that token's sums of
// the block's rows 4 (g / 2) and on. The components are constants: some drivers implement a store to a dynamically indexed
// component as a store of the whole vector.
#define FIRST_ROW(g) (4u * ((g) >> 1) + ((g) & 1u))
#define PUT_ROWS(four, g, of_rows) { \
    if (((g) & 1u) == 0u) { \
        four.x = of_rows.x; \
        four.z = of_rows.y; \
    } else { \
        four.y = of_rows.x; \
        four.w = of_rows.y; \
    } }

// Returns the nearest bfloat16 (ties to even) in the upper 16 bits. A NaN stays a NaN: adding the rounding term to some
// NaNs would carry into the sign bit.
uint round_bfloat(uint x) { return (x & 0x7fffffffu) > 0x7f800000u ? x | 0x00400000u : x + 0x7fffu + ((x >> 16) & 1u); }

// Rounds two values to the fragments' 16-bit format and packs them into one word.
uint pack_pair(float a, float b) {
#if WEIGHT == 1
    return packHalf2x16(vec2(a, b));
#else
    uint x = round_bfloat(floatBitsToUint(a)), y = round_bfloat(floatBitsToUint(b));
    return (x >> 16) | (y & 0xffff0000u);
#endif
}

// Splits two values into pairs of 16-bit values, most + rest, which together carry about twice the mantissa bits. `zero`:
// `widened`.
void split_pair(float a, float b, uint zero, out uint most, out uint rest) {
#if WEIGHT == 1
    most = packHalf2x16(vec2(a, b));
    rest = packHalf2x16(vec2(a, b) - widened(most, zero));
#else
    // The parts are truncated, not rounded: the difference is then exact before it is truncated in turn.
    most = (floatBitsToUint(a) >> 16) | (floatBitsToUint(b) & 0xffff0000u);
    float x = a - bf16_low(most), y = b - bf16_high(most);
    rest = (floatBitsToUint(x) >> 16) | (floatBitsToUint(y) & 0xffff0000u);
#endif
}

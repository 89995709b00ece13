// Loads of quantised weights in fragment order into the 16-bit pairs of matrix fragments (`fragments.glsl`). A lane has
// rows u and v of a block of 16; `memory::pack::codes` gives the places of the bits. The shader includes `codes.glsl` and
// `fragments.glsl` first; its weights are `weight`, of 16-byte words.

// Words with scales in a lane, for a unit, and as many with minimums. With cooperative matrices the four lanes of a pair of
// rows share the unit's groups, so that each word is loaded once, and take them from each other by shuffles.
#if MATRIX == 1
const uint SCALE_WORDS = UNIT_GROUPS > 4u ? UNIT_GROUPS / 4u : 1u;
const uint SCALE_STEP = UNIT_GROUPS < 4u ? UNIT_GROUPS : 4u;
#define SCALE_FIRST (LANE & (SCALE_STEP - 1u))
#else
const uint SCALE_WORDS = UNIT_GROUPS;
const uint SCALE_STEP = 1u;
#define SCALE_FIRST 0u
#endif
const uint SCALE_SLOTS = SCALE_WORDS * (1u + STORED);

// Loads a unit's scales and minimums to `to[first]` and on; `at` is the 16-byte word where the scales begin. Each word has
// two f16, those of rows u and v.
#define LOAD_SCALES(to, first, at) { \
    uint at_ = (at) * 4u + (LANE >> 2) * UNIT_GROUPS + SCALE_FIRST, first_ = first; \
    [[unroll]] for (uint e_ = 0u; e_ < SCALE_WORDS; e_++) { \
        to[first_ + e_] = CODE_WORD(weight, at_ + e_ * SCALE_STEP); \
        if (STORED == 1u) to[first_ + SCALE_WORDS + e_] = CODE_WORD(weight, at_ + 8u * UNIT_GROUPS + e_ * SCALE_STEP); \
    } }

// The group of a unit that columns 32c + 8t .. + 8 belong to.
uint group_of(uint c, uint t) { return GROUP == 16u ? c * 2u + t / 2u : c * 32u / GROUP; }

// The word with the scales (`first` as in LOAD_SCALES) or minimums (SCALE_WORDS after it) of the group of columns
// 32c + 8t .. + 8 of the unit.
#if MATRIX == 1
#define SCALE_OF(words, first, c, t) (UNIT_GROUPS == 1u ? words[first] \
    : subgroupShuffle(words[(first) + (GROUP == 16u ? (c) / 2u : (c) * 32u / GROUP / 4u)], (LANE & 28u) | (group_of(c, t) & 3u)))
#else
#define SCALE_OF(words, first, c, t) words[(first) + group_of(c, t)]
#endif

// Whether row v's codes are left 4 bits higher, as numbers 16 times as large: two shifts less.
#define HIGH_V (BITS == 4u && NUMBER == 0u)

// Returns a half's four pairs of codes, each as two small integers: (u0, u1), (u2, u3), (v0, v1), (v2, v3); those of e4m3
// and e2m1 as the f16 that they stand for. `a` and `b` are the words of the plane of 8 bits (u, v) or 4 bits (`a` only); `two` and `one` are those of the planes of 2 bits and
// 1 bit. `c` is the block of 32 columns in the unit.
uvec4 code_pairs(uint a, uint b, uint two, uint one, uint c, uint h) {
    if (NUMBER == 1u) {
        uvec4 high = uvec4(a << 8, a, b << 8, b);
        return (high & 0x7f007f00u) >> 1 | (high & 0x80008000u);
    }
    if (NUMBER == 2u) {
        uvec4 high = uvec4(a << 12, a << 4, a << 8, a);
        return (high & 0x70007000u) >> 3 | (high & 0x80008000u);
    }
    if (BITS == 8u) return uvec4(a, a >> 8, b, b >> 8) & 0x00ff00ffu;
    uvec4 pairs = uvec4(0u);
    if (HIGH_V) {
        uint second = a >> 8;
        pairs = uvec4(a & 0x000f000fu, second & 0x000f000fu, a & 0x00f000f0u, second & 0x00f000f0u);
    } else if ((BITS & 4u) != 0u) {
        pairs = uvec4(a, a >> 8, a >> 4, a >> 12) & 0x000f000fu;
    }
    if (BITS == 6u) {
        two >>= 4u * h;
        pairs |= uvec4(two << 4, two >> 4, two << 2, two >> 6) & 0x00300030u;
    } else if ((BITS & 2u) != 0u) {
        two >>= 4u * h;
        pairs |= uvec4(two, two >> 8, two >> 2, two >> 10) & 0x00030003u;
    }
    if ((BITS & 1u) != 0u) {
        one >>= 4u * (c & 1u) + 2u * h;
        pairs |= (uvec4(one, one >> 8, one >> 1, one >> 9) & 0x00010001u) << (BITS & 6u);
    }
    return pairs;
}

// The pairs of half `h` of block `c` of the unit whose loads begin at `w[first]`.
const uint FOUR_LOADS = (BITS & 4u) != 0u ? UNIT_COLS / 64u : 0u;
const uint TWO_LOADS = (BITS & 2u) != 0u ? UNIT_COLS / 128u : 0u;
#define PAIRS(w, first, c, h) (BITS == 8u \
    ? code_pairs(w[(first) + (c)][(h) * 2u], w[(first) + (c)][(h) * 2u + 1u], 0u, 0u, c, h) \
    : code_pairs((BITS & 4u) != 0u ? w[(first) + (c) / 2u][((c) & 1u) * 2u + (h)] : 0u, 0u, \
        (BITS & 2u) != 0u ? w[(first) + FOUR_LOADS + (c) / 4u][(c) & 3u] : 0u, \
        (BITS & 1u) != 0u ? w[(first) + FOUR_LOADS + TWO_LOADS + (c) / 8u][(c) / 2u & 3u] : 0u, c, h))

// Returns the f16 values of pairs of codes; codes of formats with a zero point between two of them are doubled.
uvec4 value_pairs(uvec4 pairs) { return NUMBER == 3u ? pairs << 8 : pairs << between_codes(CODES); }

// Returns a word of scales for these values: doubled codes take half the scale. A compiler would join a multiplication by 0.5
// with that by the zero point, which is then no f16 number again, so the exponents are reduced; the smallest scales become 0.
uint value_scales(uint scales) {
    if (between_codes(CODES) == 0u) return scales;
    uint low = (scales & 0x7800u) != 0u ? scales - 0x0400u & 0xffffu : 0u;
    uint high = (scales & 0x78000000u) != 0u ? scales - 0x04000000u & 0xffff0000u : 0u;
    return low | high;
}
// The zero point of these values.
#define ZERO_VALUE (ZERO * float(1u + between_codes(CODES)) * 5.9604644775390625e-8)

// Returns two values as bfloat16, rounded to the nearest, halves away from zero. The products of MXFP4, of two bits with a power
// of two, need no rounding.
const bool EXACT = NUMBER == 2u && GROUP == 32u;
uint bfloat_pair(vec2 values) {
    uvec2 bits = floatBitsToUint(values) + (EXACT ? 0u : 0x8000u);
    return bits.x >> 16 | (bits.y & 0xffff0000u);
}

// Returns the weights of pairs of codes in f16, without the rows' factors. `scale` and `minimum` have the f16 of u and v.
#if MATRIX == 1
uint scaled_pair(uint pair, f16vec2 scale, f16vec2 minimum) {
    return packFloat2x16(fma(unpackFloat2x16(pair), scale, -minimum));
}
uvec4 scaled(uvec4 pairs, uint scale, uint minimum) {
    pairs = value_pairs(pairs);
    f16vec2 s = unpackFloat2x16(value_scales(scale)), m = unpackFloat2x16(minimum);
    if (STORED == 0u) m = s * float16_t(ZERO_VALUE);
    if (HIGH_V) s.y *= float16_t(0.0625);
    return uvec4(scaled_pair(pairs.x, s.xx, m.xx), scaled_pair(pairs.y, s.xx, m.xx),
        scaled_pair(pairs.z, s.yy, m.yy), scaled_pair(pairs.w, s.yy, m.yy));
}
#else
uint scaled_pair(uint pair, float scale, float minimum) { return packHalf2x16(unpackHalf2x16(pair) * scale - minimum); }
uvec4 scaled(uvec4 pairs, uint scale, uint minimum) {
    pairs = value_pairs(pairs);
    vec2 s = unpackHalf2x16(value_scales(scale)), m = unpackHalf2x16(minimum);
    if (STORED == 0u) m = s * ZERO_VALUE;
    if (HIGH_V) s.y *= 0.0625;
    return uvec4(scaled_pair(pairs.x, s.x, m.x), scaled_pair(pairs.y, s.x, m.x),
        scaled_pair(pairs.z, s.y, m.y), scaled_pair(pairs.w, s.y, m.y));
}
#endif

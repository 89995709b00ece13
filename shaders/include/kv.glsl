// The KV cache's element formats and layout, accessed eight dimensions at a time: KV 0 stores f16, KV 1 stores f32, KV 2
// stores signed 8-bit codes with one f32 scale for each token and KV head: value = code · scale.
//   KV 0, 1  keys   [pages][kv_heads][D/8][16 tokens][8]     values [pages][kv_heads][16 tokens][D/8][8]
//   KV 2     keys   [pages] of [kv_heads][D/8][8][2][8] codes and [kv_heads][16] scales
//            values [pages] of [kv_heads][8][D/8][2][8] codes and [kv_heads][16] scales
//            Tokens n and n + 8 of a page are side by side: [8] is token % 8, [2] is token / 8. The scales of a head are
//            in the order of tokens 0, 1, 8, 9, 2, 3, 10, 11, …, as lanes of a matrix product hold them. The four bytes of
//            a word are dimensions 0, 2, 1, 3 of its four, so that even and odd bytes are pairs of neighbours.
// With KV 2, keys are multiplied by a Hadamard matrix before they are stored, and queries by the same matrix: this leaves
// the products unchanged and spreads dimensions of large values over all others, which then need no large scale. The
// matrix is block diagonal, with orthonormal blocks of HADAMARD dimensions: entry (i, j) of a block is
// (-1)^popcount(i & j) / sqrt(HADAMARD).
//
// The macros use the kernel's constants D (dimensions of a head) and KV_HEADS.
#ifndef KV
#define KV 0
#endif

#if KV == 2
#define HADAMARD ((D & (~D + 1u)) < 128u ? D & (~D + 1u) : 128u)
#define CODE_LIMIT 127.0
// A head with no larger value is stored as zeros: the inverse of a smaller scale might be infinite.
#define LEAST_VALUE 1.0e-30
#define PAGE_WORDS (KV_HEADS * (D + 4u)) /* of 16 bytes */
#define PAGE_UNITS (2u * PAGE_WORDS)
// Indices of eight dimensions, in units of 8 bytes. From eight dimensions of a key to the next eight it is 16 units.
#define KEY_AT(page, kvh, eight, token) \
    ((page) * PAGE_UNITS + (kvh) * 2u * D + (eight) * 16u + (token) % 8u * 2u + (token) / 8u)
#define VALUE_AT(page, kvh, token, eight) \
    ((page) * PAGE_UNITS + (kvh) * 2u * D + ((token) % 8u * (D / 8u) + (eight)) * 2u + (token) / 8u)
// Index of a token's scale, in words.
#define SCALE_AT(page, kvh, token) \
    ((page) * PAGE_UNITS * 2u + KV_HEADS * D * 4u + (kvh) * 16u + (token) % 8u / 2u * 4u + (token) / 8u * 2u + (token) % 2u)

// Returns the four codes of a word.
vec4 codes_of(uint word) {
    int w = int(word);
    return vec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 16, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 24, 8));
}

// Returns the largest magnitude as bits, whose order is that of magnitudes, with NaN above infinity.
uint top_bits(vec4 x) {
    uvec4 bits = floatBitsToUint(x) & 0x7fffffffu;
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// Returns the scale of a head with a largest magnitude. Infinity and NaN are kept.
float scale_of(uint top) {
    float most = uintBitsToFloat(top);
    return most < LEAST_VALUE ? 0.0 : most / CODE_LIMIT;
}

// Returns the codes of four dimensions of a head with a scale.
uint to_codes(vec4 x, float scale) {
    float inverse = scale > 0.0 ? 1.0 / scale : 0.0;
    uvec4 c = uvec4(ivec4(clamp(roundEven(x * inverse), -CODE_LIMIT, CODE_LIMIT))) & 0xffu;
    return c.x | c.z << 8 | c.y << 16 | c.w << 24;
}

// Multiplies the four dimensions of a quad by the Hadamard matrix of four, without its factor 1/2.
vec4 hadamard_four(vec4 x) {
    x = vec4(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    return vec4(x.xy + x.zw, x.xy - x.zw);
}

// One stage of the multiplication of an array's `count` elements, a multiple of HADAMARD dimensions, by `workers`
// invocations, of which this is number `t`: pairs of elements at a distance become their sum and their difference. Each
// stage is followed by a barrier. Every invocation runs the same number of iterations, which lavapipe needs.
#define HADAMARD_STAGE(Element, values, count, distance, t, workers)                                \
    for (uint turn_ = 0u; turn_ < ((count) / 2u + (workers) - 1u) / (workers); turn_++) {           \
        uint pair_ = (t) + turn_ * (workers);                                                       \
        if (pair_ < (count) / 2u) {                                                                 \
            uint first_ = pair_ / (distance) * (distance) * 2u + pair_ % (distance);                \
            Element a_ = values[first_], b_ = values[first_ + (distance)];                          \
            values[first_] = a_ + b_;                                                               \
            values[first_ + (distance)] = a_ - b_;                                                  \
        }                                                                                           \
    }
#endif

#if KV == 2
#ifndef CACHE_BY_16_BYTES
layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer CacheInOut { uvec2 v[]; };
struct Eight { uvec2 codes; };
#define LOAD_EIGHT(cache, at) Eight(cache.v[at])
// Returns eight codes.
void unpack_eight(Eight e, out vec4 a, out vec4 b) {
    a = codes_of(e.codes.x);
    b = codes_of(e.codes.y);
}
Eight pack_eight(vec4 a, vec4 b, float scale) { return Eight(uvec2(to_codes(a, scale), to_codes(b, scale))); }
#define STORE_EIGHT(cache, at, e) cache.v[at] = (e).codes
#define LOAD_SCALE(cache, at) uintBitsToFloat((at) % 2u == 0u ? cache.v[(at) / 2u].x : cache.v[(at) / 2u].y)
#define STORE_SCALE(cache, at, scale) \
    { if ((at) % 2u == 0u) cache.v[(at) / 2u].x = floatBitsToUint(scale); else cache.v[(at) / 2u].y = floatBitsToUint(scale); }
#else
layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer CacheInOut { uvec4 v[]; };
#endif
#else
layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer CacheInOut { uvec4 v[]; };
#define KEY_AT(page, kvh, eight, token) (((page) * KV_HEADS + (kvh)) * 2u * D + (eight) * 16u + (token))
#define VALUE_AT(page, kvh, token, eight) ((((page) * KV_HEADS + (kvh)) * 16u + (token)) * (D / 8u) + (eight))

#if KV == 1
#define CACHE_WORDS 2u
struct Eight { uvec4 low; uvec4 high; };
#define LOAD_EIGHT(cache, at) Eight(cache.v[(at) * 2u], cache.v[(at) * 2u + 1u])
void unpack_eight(Eight e, out vec4 a, out vec4 b) {
    a = uintBitsToFloat(e.low);
    b = uintBitsToFloat(e.high);
}
Eight pack_eight(vec4 a, vec4 b, float scale) { return Eight(floatBitsToUint(a), floatBitsToUint(b)); }
#define STORE_EIGHT(cache, at, e) { cache.v[(at) * 2u] = (e).low; cache.v[(at) * 2u + 1u] = (e).high; }
#else
struct Eight { uvec4 all; };
#define LOAD_EIGHT(cache, at) Eight(cache.v[at])
void unpack_eight(Eight e, out vec4 a, out vec4 b) {
    a = vec4(unpackHalf2x16(e.all.x), unpackHalf2x16(e.all.y));
    b = vec4(unpackHalf2x16(e.all.z), unpackHalf2x16(e.all.w));
}
Eight pack_eight(vec4 a, vec4 b, float scale) {
    return Eight(uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw)));
}
#define STORE_EIGHT(cache, at, e) cache.v[at] = (e).all
#endif
#endif

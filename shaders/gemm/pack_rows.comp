#version 460
#extension GL_GOOGLE_include_directive : require
// Activation packing, with an optional RMSNorm: packed = fragments( round( prologue(x) ) ), rows of x rounded to
// 16 bits and reordered into the matrix fragments that `tiled` and `panel` read; or to 8 or 16 bits in an order of `wgmma`.
// Rows in f16 (WEIGHT 1) have scales.
//
// prologue   NORM 0: x. NORM 1: x ⊙ norm · rsqrt(mean x² + eps)
// x          [rows][x_stride] f32, of which k columns are real;  norm [k]
// packed     blocks of 16 rows × 32 columns, 1,024 bytes each: 16-byte word
//            ((row / 16 · chunks + column / 32)·2 + h)·32 + 4g + t holds columns 8t + 4h .. + 4 of rows g and g + 8 of
//            the block, a pair of columns at a time: {g: 0, 1}, {g + 8: 0, 1}, {g: 2, 3}, {g + 8: 2, 3}. Rows not below
//            `count[2]` (the number of rows of the prompt step) and columns from k on are zero.
//            SWIZZLED: [k / 64][pairs·2][64], where the 128 bytes of a row are as `swizzled_index` orders them: 16-byte word
//            4c + u holds columns 32c + 8t + 2u and + 1 for t = 0 .. 3, and lies at place (4c + u) ^ (row % 8)
//            E4M3: [k / 128][pairs·2][128] numbers in e4m3, where the 128 bytes of a row are as `e4m3_index` orders them, and
//            behind them [pairs·2] f32, the scale of each row: the smallest power of two (`e4m3_scale`) with which all of the
//            row's numbers, divided by it, are at most 448
//            WEIGHT 1: numbers in f16, and behind them [pairs·2] f32, the scale of each row: the power of two (`half_scale`) by
//            which the row's largest number is divided to an exponent of 14
// slots      with EACH n > 0 (MoE): row i of the result is row slots[i] / n of x, or zeros if slots[i] is NOBODY.
//            Nothing is written for tiles of TILE rows to which `tiles` assigns no expert (`expert_plan`)
//
// One workgroup produces rows g and g + 8 of a block, all columns; per iteration, an invocation produces one 16-byte
// word from 16 bytes of each of the two rows.
// Traffic: x once (again with NORM and with scales, from the L1 cache); 2 bytes written per value, with E4M3 one.
#include "common.glsl"
#ifndef SWIZZLED
#define SWIZZLED 0
#endif
#ifndef E4M3
#define E4M3 0
#endif
// Only the rounding functions of `fragments.glsl` are used.
#define LANES 1
#include "fragments.glsl"
#define SCALED (E4M3 || WEIGHT == 1)
#if SCALED
#include "swizzled.glsl"
#endif

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint NORM = 0;
layout(constant_id = 2) const uint ROWS = 0;      // rows in use; 0: `count` holds the number
layout(constant_id = 3) const uint EACH = 0;      // slots per row of x; 0: rows are packed in their own order
layout(constant_id = 4) const uint TILE = 16;

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Floats4In norm;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    WordsIn slots;
    WordsIn tiles;
    Words4Out packed;
    uint k;           // columns without padding; the divisor of the mean
    uint chunks;      // blocks of 32 columns
    uint pairs;       // pairs of rows, padding rows included
    uint x_stride;    // in floats
    float epsilon;
};

const uint NOBODY = 0xffffffffu;

// The sums of squares of both rows, or their largest numbers, per subgroup.
shared vec2 partial[256];

// Returns columns column .. + 4 of a row; columns from k on and unused rows are zero.
vec4 four(uint row, uint column, bool used) {
    if (!used || column >= k) return vec4(0.0);
    vec4 v = x.v[(row * x_stride + column) / 4u];
    return mix(vec4(0.0), v, lessThan(uvec4(column, column + 1u, column + 2u, column + 3u), uvec4(k)));
}

#if SWIZZLED
// Returns columns column and column + 1 of a row, or zeros if it is unused.
vec2 two(uint row, uint column, bool used) {
    if (!used) return vec2(0.0);
    vec4 v = x.v[(row * x_stride + column) / 4u];
    return (column & 2u) == 0u ? v.xy : v.zw;
}
#endif

#if SCALED
// Returns the exponent of a row's scale.
int exponent_of(float largest) {
#if E4M3
    // That of the smallest power of two, of at least 2^-100, with which `largest` fits: 448 is 1.75 * 2^8, and a mantissa above
    // 1.75 needs the next power.
    return int(max((floatBitsToUint(largest) + 0x1fffffu) >> 23, 127u + 8u - 100u)) - 127 - 8;
#else
    return int(clamp(floatBitsToUint(largest) >> 23, 16u, 254u)) - 127 - 14;
#endif
}

float power_of_two(int exponent) { return uintBitsToFloat(uint(exponent + 127) << 23); }
#endif

#if E4M3
// Returns the code of the number of e4m3 that is nearest to v, of absolute values of at most 448; ties go to the even code.
// What is infinite or no number has the code of no number.
uint e4m3(float v) {
    uint bits = floatBitsToUint(v), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (size >= 0x7f800000u) return 0x7fu;
    // Below 2^-6 codes are 2^-9 apart, as are f32 numbers from 2^14 on.
    if (size < 0x3c800000u) return sign | floatBitsToUint(uintBitsToFloat(size) + 16384.0) - floatBitsToUint(16384.0);
    size = min(size, floatBitsToUint(448.0));
    return sign | (size + 0x7ffffu + (size >> 20 & 1u) >> 20) - (120u << 3);
}

// Returns four numbers' codes in the order of a word: the first and the third, then the second and the fourth.
uint codes_of(vec4 v) { return e4m3(v.x) | e4m3(v.z) << 8 | e4m3(v.y) << 16 | e4m3(v.w) << 24; }
#endif

void main() {
    uint pair = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (pair >= pairs) return;
    uint block = pair / 8u, g = pair & 7u;
    uint low = block * 16u + g, high = low + 8u;
    bool low_used, high_used;
    if (EACH == 0u) {
        uint rows = ROWS != 0u ? ROWS : count.v[2];
        low_used = low < rows;
        high_used = high < rows;
    } else {
        if (tiles.v[low / TILE] == NOBODY) return;
        low = slots.v[low];
        high = slots.v[high];
        low_used = low != NOBODY;
        high_used = high != NOBODY;
        low = low_used ? low / EACH : 0u;
        high = high_used ? high / EACH : 0u;
    }
    uint words = chunks * 8u;

    vec2 scale = vec2(1.0);
    if (NORM == 1u && low_used) {
        vec2 square = vec2(0.0);
        for (uint i = gl_LocalInvocationID.x; i < words; i += gl_WorkGroupSize.x) {
            vec4 a = four(low, i * 4u, low_used), b = four(high, i * 4u, high_used);
            square += vec2(dot(a, a), dot(b, b));
        }
        square = subgroupAdd(square);
        if (gl_NumSubgroups > 1u) {
            if (subgroupElect()) partial[gl_SubgroupID] = square;
            barrier();
            square = vec2(0.0);
            for (uint i = 0u; i < gl_NumSubgroups; i++) square += partial[i];
        }
        scale = inversesqrt(square / float(k) + epsilon);
    }

#if SCALED
    vec2 largest = vec2(0.0);
    for (uint i = gl_LocalInvocationID.x; i < words; i += gl_WorkGroupSize.x) {
        vec4 a = four(low, i * 4u, low_used), b = four(high, i * 4u, high_used);
        if (NORM == 1u && i * 4u < k) {
            // See below.
            vec4 w = mix(vec4(0.0), norm.v[i], lessThan(i * 4u + uvec4(0u, 1u, 2u, 3u), uvec4(k)));
            a *= w * scale.x;
            b *= w * scale.y;
        }
        a = abs(a);
        b = abs(b);
        largest = max(largest, vec2(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w))));
    }
    largest = subgroupMax(largest);
    if (gl_NumSubgroups > 1u) {
        barrier();
        if (subgroupElect()) partial[gl_SubgroupID] = largest;
        barrier();
        for (uint i = 0u; i < gl_NumSubgroups; i++) largest = max(largest, partial[i]);
    }
    int low_exponent = exponent_of(largest.x), high_exponent = exponent_of(largest.y);
    vec2 down = vec2(power_of_two(-low_exponent), power_of_two(-high_exponent));
    if (gl_LocalInvocationID.x == 0u) {
        uint row_words = E4M3 == 1 ? chunks * 2u : chunks * 4u;
        uint behind = pairs * 2u * row_words + block * 4u + g / 4u;
        PUT_COMPONENT(packed.v[behind], g % 4u, floatBitsToUint(power_of_two(low_exponent)))
        PUT_COMPONENT(packed.v[behind + 2u], g % 4u, floatBitsToUint(power_of_two(high_exponent)))
    }
#endif
#if E4M3
    // A word of each row from four times four columns; k is a multiple of 128.
    for (uint i = gl_LocalInvocationID.x; i < chunks * 2u; i += gl_WorkGroupSize.x) {
        uvec4 words_low, words_high;
        [[unroll]] for (uint t = 0u; t < 4u; t++) {
            uint column = (i >> 1) * 32u + t * 8u + (i & 1u) * 4u;
            vec4 a = four(low, column, low_used), b = four(high, column, high_used);
            if (NORM == 1u) {
                vec4 w = norm.v[column / 4u];
                a *= w * scale.x;
                b *= w * scale.y;
            }
            // A product with a negative weight of the norm is a negative zero.
            words_low[t] = low_used ? codes_of(a * down.x) : 0u;
            words_high[t] = high_used ? codes_of(b * down.y) : 0u;
        }
        uint at = (i >> 3) * pairs * 2u + block * 16u + g, place = (i & 7u) ^ g;
        packed.v[at * 8u + place] = words_low;
        packed.v[(at + 8u) * 8u + place] = words_high;
    }
#elif SWIZZLED
    // A word of each row from four pairs of columns; k is a multiple of 64.
    for (uint i = gl_LocalInvocationID.x; i < chunks * 4u; i += gl_WorkGroupSize.x) {
        uint c = i >> 2, u = i & 3u;
        uvec4 words_low, words_high;
        [[unroll]] for (uint t = 0u; t < 4u; t++) {
            uint column = c * 32u + t * 8u + u * 2u;
            vec2 a = two(low, column, low_used), b = two(high, column, high_used);
            if (NORM == 1u) {
                vec4 four = norm.v[column / 4u];
                vec2 w = (u & 1u) == 0u ? four.xy : four.zw;
                a *= w * scale.x;
                b *= w * scale.y;
            }
#if SCALED
            a *= down.x;
            b *= down.y;
#endif
            words_low[t] = pack_pair(a.x, a.y);
            words_high[t] = pack_pair(b.x, b.y);
        }
        uint at = (i >> 3) * pairs * 2u + block * 16u + g, place = (i & 7u) ^ g;
        packed.v[at * 8u + place] = words_low;
        packed.v[(at + 8u) * 8u + place] = words_high;
    }
#else
    for (uint i = gl_LocalInvocationID.x; i < words; i += gl_WorkGroupSize.x) {
        uint column = i * 4u;
        vec4 a = four(low, column, low_used), b = four(high, column, high_used);
        if (NORM == 1u && column < k) {
            // The norm's words beyond its last real column may hold anything, so they are masked.
            vec4 w = mix(vec4(0.0), norm.v[i],
                lessThan(uvec4(column, column + 1u, column + 2u, column + 3u), uvec4(k)));
            a *= w * scale.x;
            b *= w * scale.y;
        }
#if SCALED
        a *= down.x;
        b *= down.y;
#endif
        uint c = i >> 3, t = (i >> 1) & 3u, h = i & 1u;
        packed.v[((block * chunks + c) * 2u + h) * 32u + g * 4u + t] =
            uvec4(pack_pair(a.x, a.y), pack_pair(b.x, b.y), pack_pair(a.z, a.w), pack_pair(b.z, b.w));
    }
#endif
}

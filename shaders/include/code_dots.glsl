// Products of row-major quantised weights with a row of x by dot products of four 8-bit integers, for formats of affine codes.
// Include after `codes.glsl`. The shader must declare the constants BATCH, the number of rows of x in shared memory, and PART,
// the number of 32 columns of each.
//
// 32 columns of x are integers of 16 bits with a common factor: x = factor · q, q = 256 · high + low, where high is signed and
// low is not. A product of codes and q is exact: two dot products for each four codes of a plane. Rounding changes an element
// of x by about 2^-16 of the largest of the 32 at most.
#extension GL_EXT_integer_dot_product : require

const int MOST_Q = 32639;
// Groups of 32 columns with scales of their own.
const uint SCALES = GROUP == 16u ? 2u : 1u;
// Words of 32 columns of x: for each plane of codes, eight words of low bytes and eight of high bytes, each of the four columns
// whose codes are in the same bits of the bytes of a word of the plane; then the factor, and for both halves the sums of q and
// of the high bytes. An odd number, so that invocations use different banks.
const uint PLANES = (BITS >> 3 & 1u) + (BITS >> 2 & 1u) + (BITS >> 1 & 1u) + (BITS & 1u);
const uint X_WORDS = PLANES * 16u + 5u;
shared uint x_s[BATCH * PART * X_WORDS];

// 32 columns of a row of W, as they are loaded: the words of each plane; in a word of scales or minimums the first is in the
// lower half.
struct Span { uvec4 eights_a; uvec4 eights_b; uvec4 four; uvec2 two; uint one; uint scales; uint minimums; };

// Loads columns 32 · s to 32 · s + 31 of the row that begins at word `first`.
Span load_span(Words4In weight, uint first, uint s, uint chunks) {
    uint cols = (chunks * 8u + UNIT_COLS - 1u) / UNIT_COLS * UNIT_COLS, at = first + 4u;
    Span w = Span(uvec4(0u), uvec4(0u), uvec4(0u), uvec2(0u), 0u, 0u, 0u);
    if ((BITS & 8u) != 0u) {
        w.eights_a = weight.v[at / 4u + s * 2u];
        w.eights_b = weight.v[at / 4u + s * 2u + 1u];
        at += cols / 4u;
    }
    if ((BITS & 4u) != 0u) {
        w.four = weight.v[at / 4u + s];
        at += cols / 8u;
    }
    if ((BITS & 2u) != 0u) {
        w.two = uvec2(CODE_WORD(weight, at + s * 2u), CODE_WORD(weight, at + s * 2u + 1u));
        at += cols / 16u;
    }
    if ((BITS & 1u) != 0u) {
        w.one = CODE_WORD(weight, at + s);
        at += cols / 32u;
    }
    load_scale(weight, at, s * 32u, cols, w.scales, w.minimums);
    return w;
}

// Puts four columns of x, integers of 16 bits, in a word of low bytes and one of high bytes, eight words later.
void store_four(uint at, uint a, uint b, uint c, uint d) {
    uint even = (a & 0xffffu) | c << 16, odd = (b & 0xffffu) | d << 16;
    x_s[at] = (even & 0x00ff00ffu) | (odd & 0x00ff00ffu) << 8;
    x_s[at + 8u] = (even >> 8 & 0x00ff00ffu) | (odd & 0xff00ff00u);
}

// Writes 32 columns of x to shared memory. Their factor is NaN if one is not finite.
void store_columns(vec4 x[8], uint at) {
    vec4 largest = abs(x[0]);
    [[unroll]] for (uint i = 1u; i < 8u; i++) largest = max(largest, abs(x[i]));
    float most = max(max(largest.x, largest.y), max(largest.z, largest.w));
    // Below 1e-30 the inverse could overflow.
    float inverse = most < 1e-30 ? 0.0 : float(MOST_Q) / most;
    float factor = most < 1e-30 ? 0.0 : most * (1.0 / float(MOST_Q));
    // An integer is in the lowest bits of the fraction of 1.5 · 2^23 plus it.
    uint v[32], bits = 0u, sums[2] = uint[2](0u, 0u), highs[2] = uint[2](0u, 0u);
    [[unroll]] for (uint i = 0u; i < 32u; i++) {
        v[i] = floatBitsToUint(fma(x[i / 4u][i % 4u], inverse, 12582912.0));
        bits |= v[i];
        sums[i / 16u] += v[i];
        if ((BITS & 8u) != 0u) highs[i / 16u] += uint(int(v[i] << 16) >> 24);
    }
    // All of them have the exponent of 2^23.
    if (bits >> 24 != 0x4bu) factor = uintBitsToFloat(0x7fc00000u);
    [[unroll]] for (uint i = 0u; i < 8u; i++) {
        uint plane = at + i;
        if ((BITS & 8u) != 0u) {
            store_four(plane, v[4u * i], v[4u * i + 1u], v[4u * i + 2u], v[4u * i + 3u]);
            plane += 16u;
        }
        if ((BITS & 4u) != 0u) {
            uint f = i / 2u * 8u + i % 2u;
            store_four(plane, v[f], v[f + 2u], v[f + 4u], v[f + 6u]);
            plane += 16u;
        }
        if ((BITS & 2u) != 0u) {
            uint f = i / 4u * 16u + i % 4u;
            store_four(plane, v[f], v[f + 4u], v[f + 8u], v[f + 12u]);
            plane += 16u;
        }
        if ((BITS & 1u) != 0u) store_four(plane, v[i], v[i + 8u], v[i + 16u], v[i + 24u]);
    }
    uint last = at + PLANES * 16u;
    x_s[last] = floatBitsToUint(factor);
    [[unroll]] for (uint h = 0u; h < 2u; h++) {
        x_s[last + 1u + h] = sums[h] - 0x4b400000u * 16u;
        x_s[last + 3u + h] = highs[h];
    }
}

// Adds the products of four codes of a plane by the low and the high bytes of their columns of x, whose words are at `at`.
void add_products(uint codes, uint at, inout int low, inout int high) {
    low += int(dotPacked4x8EXT(codes, x_s[at]));
    high += dotPacked4x8EXT(int(codes), int(x_s[at + 8u]));
}

// Returns the product of 32 columns of W by those of x at `at`, without the row's factor.
float span_product(Span w, uint at) {
    // For each half: the sums of the plane of 8 or 4 bits, of 2 bits and of 1 bit.
    int low[6], high[6];
    [[unroll]] for (uint i = 0u; i < 6u; i++) low[i] = high[i] = 0;
    [[unroll]] for (uint i = 0u; i < 8u; i++) {
        uint plane = at + i, half_ = SCALES == 2u ? i / 4u : 0u;
        if ((BITS & 8u) != 0u) {
            // With high bytes, the codes minus 128 are multiplied, which are signed.
            uint word = i < 4u ? w.eights_a[i % 4u] : w.eights_b[i % 4u];
            low[half_] += int(dotPacked4x8EXT(word, x_s[plane]));
            high[half_] += dotPacked4x8EXT(int(word ^ 0x80808080u), int(x_s[plane + 8u]));
            plane += 16u;
        }
        if ((BITS & 4u) != 0u) {
            add_products(w.four[i / 2u] >> i % 2u * 4u & 0x0f0f0f0fu, plane, low[half_], high[half_]);
            plane += 16u;
        }
        if ((BITS & 2u) != 0u) {
            add_products(w.two[i / 4u] >> i % 4u * 2u & 0x03030303u, plane, low[2u + half_], high[2u + half_]);
            plane += 16u;
        }
        if ((BITS & 1u) != 0u) {
            // A word has columns of both halves.
            uint ones = w.one >> i & 0x01010101u;
            add_products(SCALES == 2u ? ones & 0x0101u : ones, plane, low[4], high[4]);
            if (SCALES == 2u) add_products(ones & 0x01010000u, plane, low[5], high[5]);
        }
    }
    ivec2 sums;
    [[unroll]] for (uint h = 0u; h < 2u; h++)
        sums[h] = high[h] * 256 + low[h] + (high[2u + h] * 256 + low[2u + h] << (BITS & 4u))
            + (high[4u + h] * 256 + low[4u + h] << (BITS & 6u));
    uint last = at + PLANES * 16u;
    ivec2 q = ivec2(x_s[last + 1u], x_s[last + 2u]), highs = ivec2(x_s[last + 3u], x_s[last + 4u]);
    if (SCALES == 1u) {
        q.x += q.y;
        highs.x += highs.y;
    }
    if ((BITS & 8u) != 0u) sums += highs * 32768;
    vec2 scale = unpackHalf2x16(w.scales), minimum = unpackHalf2x16(w.minimums);
    float result = 0.0;
    [[unroll]] for (uint g = 0u; g < SCALES; g++) {
        // 2^-24 is the value of code 1; ZERO is half of an integer.
        if (STORED == 1u) {
            result += float(sums[g]) * scale[g] * 5.9604644775390625e-8 - float(q[g]) * minimum[g];
        } else {
            result += float(2 * sums[g] - int(CODES >> 16) * q[g]) * scale[g] * 2.98023223876953125e-8;
        }
    }
    return result * uintBitsToFloat(x_s[last]);
}

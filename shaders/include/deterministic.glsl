// Deterministic arithmetic: it gives the same bits on every device, so that one seed gives the same text everywhere. It
// uses only + and * of f32 (for which Vulkan requires correct rounding), `precise` to prevent contraction to FMA, and
// integers. `kernels::deterministic` implements the same functions in Rust, and tests compare the bits.

const uint KEY_MINUS_INFINITY = 0x007fffffu;

// Returns an order-preserving integer ("key") of a logit. NaN counts as -inf, +inf as the largest float, -0 as 0.
uint key_of(float value) {
    uint bits = floatBitsToUint(value);
    uint magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return KEY_MINUS_INFINITY;
    if (bits == 0x7f800000u) bits = 0x7f7fffffu;
    if (magnitude == 0u) bits = 0u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// Returns the logit of a key.
float value_of(uint key) {
    return uintBitsToFloat((key & 0x80000000u) != 0u ? key ^ 0x80000000u : ~key);
}

// Returns e^x for x <= 0, and 0 for x < -86. The error is at most 2 ulp; the result is exactly 1 at 0.
float exp_negative(float x) {
    if (!(x >= -86.0)) return 0.0;
    precise float n = floor(x * 1.44269504 + 0.5);
    precise float r = x - n * 0.693359375;
    precise float f = r - n * -2.12194440e-4;
    precise float p = 1.9875691500e-4;
    p = p * f + 1.3981999507e-3;
    p = p * f + 8.3334519073e-3;
    p = p * f + 4.1665795894e-2;
    p = p * f + 1.6666665459e-1;
    p = p * f + 5.0000001201e-1;
    precise float y = p * (f * f) + f + 1.0;
    precise float scaled = y * uintBitsToFloat(uint(int(n) + 127) << 23);
    return scaled;
}

// Returns ln x for normal x > 0.
float log_positive(float x) {
    uint bits = floatBitsToUint(x);
    int e = int(bits >> 23) - 126;
    precise float m = uintBitsToFloat((bits & 0x007fffffu) | 0x3f000000u);
    if (m < 0.70710678) {
        e -= 1;
        m = m + m;
    }
    precise float f = m - 1.0;
    precise float z = f * f;
    precise float p = 7.0376836292e-2;
    p = p * f + -1.1514610310e-1;
    p = p * f + 1.1676998740e-1;
    p = p * f + -1.2420140846e-1;
    p = p * f + 1.4249322787e-1;
    p = p * f + -1.6668057665e-1;
    p = p * f + 2.0000714765e-1;
    p = p * f + -2.4999993993e-1;
    p = p * f + 3.3333331174e-1;
    precise float y = p * f * z;
    precise float k = float(e);
    y = y + -2.12194440e-4 * k;
    y = y + -0.5 * z;
    precise float result = f + y;
    result = result + 0.693359375 * k;
    return result;
}

// Returns a token's probability relative to the most probable token's, in units of 2^-31; x is the token's scaled logit
// distance from the maximum, at most 0.
uint mass_of(float x) {
    precise float scaled = exp_negative(x) * 2147483648.0 + 0.5;
    return uint(scaled);
}

// Returns two words of Philox4x32-10 for the counter (draw, 0, 0, 0) and the key `seed`.
uvec2 philox(uint draw, uvec2 seed) {
    uvec4 c = uvec4(draw, 0u, 0u, 0u);
    uvec2 k = seed;
    for (uint i = 0u; i < 10u; i++) {
        uint high0, low0, high1, low1;
        umulExtended(0xd2511f53u, c.x, high0, low0);
        umulExtended(0xcd9e8d57u, c.z, high1, low1);
        c = uvec4(high1 ^ c.y ^ k.x, low1, high0 ^ c.w ^ k.y, low0);
        k += uvec2(0x9e3779b9u, 0xbb67ae85u);
    }
    return c.xy;
}

uint scramble(uint x) {
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x *= 0xd35a2d97u;
    x ^= x >> 15;
    return x;
}

// Returns 32 random bits for a token within a draw.
uint token_bits(uint token, uvec2 draw_key) {
    return scramble(scramble(token ^ draw_key.x) + draw_key.y);
}

// Returns a standard Gumbel variate from 32 random bits: -ln E, where E = -ln(1 - v) and v is in (0, 1).
float gumbel(uint bits) {
    bits |= 1u;
    int top = findMSB(bits);
    int shift = max(top - 23, 0);
    // Both factors are exact.
    precise float v = float(bits >> shift) * uintBitsToFloat(uint(127 - 32 + shift) << 23);
    precise float e;
    if (v < 0.03125) {
        e = 0.2;
        e = e * v + 0.25;
        e = e * v + 0.33333334;
        e = e * v + 0.5;
        e = e * v + 1.0;
        e = e * v;
    } else {
        precise float u = 1.0 - v;
        e = -log_positive(u);
    }
    return -log_positive(e);
}

// Returns an upper bound of `gumbel(bits)` without a logarithm: E > v >= 2^(top bit - 32), so the variate is less than
// (32 - top bit) · ln 2.
float gumbel_bound(uint bits) {
    return float(32 - findMSB(bits | 1u)) * 0.6931472 + 0.001;
}

//! Deterministic arithmetic that gives the same bits on every device: `shaders/include/deterministic.glsl` in Rust. It
//! uses only + and * of f32, and integers. Not here: faster functions without this guarantee.

/// The key of -inf (and NaN); every finite logit has a greater key.
pub const KEY_MINUS_INFINITY: u32 = 0x007f_ffff;

/// Returns an order-preserving integer ("key") of a logit. NaN counts as -inf, +inf as the largest float, -0 as 0.
pub fn key_of(value: f32) -> u32 {
    if value.is_nan() {
        return KEY_MINUS_INFINITY;
    }
    let value = if value == 0.0 { 0.0 } else { value.min(f32::MAX) };
    let bits = value.to_bits();
    if bits >> 31 != 0 { !bits } else { bits | 0x8000_0000 }
}

/// Returns the logit of a key.
pub fn value_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 != 0 { key ^ 0x8000_0000 } else { !key })
}

// The decimals are those of the shader; both sides round them to f32.
#[allow(clippy::excessive_precision, clippy::approx_constant)]
/// Returns e^x for x <= 0, and 0 for x < -86. The error is at most 2 ulp; the result is exactly 1 at 0.
pub fn exp_negative(x: f32) -> f32 {
    if x.is_nan() || x < -86.0 {
        return 0.0;
    }
    let n = (x * 1.44269504 + 0.5).floor();
    let r = x - n * 0.693359375;
    let f = r - n * -2.12194440e-4;
    let mut p = 1.9875691500e-4f32;
    for c in [1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1] {
        p = p * f + c;
    }
    let y = p * (f * f) + f + 1.0;
    y * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

#[allow(clippy::excessive_precision, clippy::approx_constant)]
/// Returns ln x for normal x > 0.
pub fn log_positive(x: f32) -> f32 {
    let bits = x.to_bits();
    let mut e = (bits >> 23) as i32 - 126;
    let mut m = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000);
    if m < 0.70710678 {
        e -= 1;
        m += m;
    }
    let f = m - 1.0;
    let z = f * f;
    let mut p = 7.0376836292e-2f32;
    for c in [
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ] {
        p = p * f + c;
    }
    let mut y = p * f * z;
    let k = e as f32;
    y += -2.12194440e-4 * k;
    y += -0.5 * z;
    f + y + 0.693359375 * k
}

/// Returns a token's probability relative to the most probable token's, in units of 2^-31; `x` is the token's scaled
/// logit distance from the maximum, at most 0.
pub fn mass_of(x: f32) -> u32 {
    (exp_negative(x) * 2_147_483_648.0 + 0.5) as u32
}

/// Returns two words of Philox4x32-10 for the counter (draw, 0, 0, 0) and the key `seed`.
pub fn philox(draw: u32, seed: [u32; 2]) -> [u32; 2] {
    let mut c = [draw, 0, 0, 0];
    let mut k = seed;
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xd251_1f53;
        let b = u64::from(c[2]) * 0xcd9e_8d57;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9e37_79b9), k[1].wrapping_add(0xbb67_ae85)];
    }
    [c[0], c[1]]
}

fn scramble(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x21f0_aaad);
    x ^= x >> 15;
    x = x.wrapping_mul(0xd35a_2d97);
    x ^ (x >> 15)
}

/// Returns 32 random bits for a token within a draw.
pub fn token_bits(token: u32, draw_key: [u32; 2]) -> u32 {
    scramble(scramble(token ^ draw_key[0]).wrapping_add(draw_key[1]))
}

#[allow(clippy::excessive_precision)]
/// Returns a standard Gumbel variate from 32 random bits: -ln E, where E = -ln(1 - v) and v is in (0, 1).
pub fn gumbel(bits: u32) -> f32 {
    let bits = bits | 1;
    let shift = (31 - bits.leading_zeros()).saturating_sub(23);
    let v = (bits >> shift) as f32 * f32::from_bits((127 - 32 + shift) << 23);
    let e = if v < 0.03125 {
        let mut e = 0.2f32;
        for c in [0.25, 0.33333334, 0.5, 1.0] {
            e = e * v + c;
        }
        e * v
    } else {
        -log_positive(1.0 - v)
    };
    -log_positive(e)
}

/// Returns an upper bound of [`gumbel`] of the same bits. A token that cannot win with it needs no logarithm.
pub fn gumbel_bound(bits: u32) -> f32 {
    ((bits | 1).leading_zeros() + 1) as f32 * std::f32::consts::LN_2 + 0.001
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_the_order_of_logits() {
        let values = [f32::NEG_INFINITY, f32::MIN, -1.0, -1e-40, 0.0, 1e-40, 1.0, 1.0000001, f32::MAX];
        for pair in values.windows(2) {
            assert!(key_of(pair[0]) < key_of(pair[1]), "{pair:?}");
            assert_eq!(value_of(key_of(pair[1])), pair[1]);
        }
        assert_eq!(key_of(-0.0), key_of(0.0));
        assert_eq!(key_of(f32::INFINITY), key_of(f32::MAX));
        assert_eq!(key_of(f32::NAN), KEY_MINUS_INFINITY);
        assert_eq!(key_of(-f32::NAN), KEY_MINUS_INFINITY);
        assert_eq!(key_of(f32::NEG_INFINITY), KEY_MINUS_INFINITY);
    }

    #[test]
    fn exp_and_log_are_close_to_the_library() {
        assert_eq!(exp_negative(0.0), 1.0);
        assert_eq!(exp_negative(f32::NEG_INFINITY), 0.0);
        for i in 0..20_000 {
            let x = -(i as f32) * 0.0043;
            let (got, want) = (f64::from(exp_negative(x)), f64::from(x).exp());
            assert!((got - want).abs() <= 3e-7 * want, "exp({x}) = {got}, not {want}");
            let x = exp_negative(x) * 37.0;
            let (got, want) = (f64::from(log_positive(x)), f64::from(x).ln());
            assert!((got - want).abs() <= 1.5e-7 * want.abs().max(1.0), "ln({x}) = {got}, not {want}");
        }
    }

    #[test]
    fn philox_gives_the_published_numbers() {
        // Random123's known answers have all four counter words; this test checks the two returned words.
        assert_eq!(philox(0, [0, 0]), [0x6627_e8d5, 0xe169_c58d]);
    }

    #[test]
    fn gumbel_is_below_its_bound_and_follows_its_law() {
        assert!(gumbel(0) < gumbel_bound(0) && gumbel(0) > 22.0);
        assert!(gumbel(u32::MAX) > -3.0 && gumbel(u32::MAX) < -2.0);
        // The distribution function exp(-exp(-g)) of the Gumbel law at g(v) is 1 - v.
        for i in 0..4096u32 {
            let bits = i.wrapping_mul(0x9e37_79b9) >> (i % 29);
            assert!(gumbel(bits) < gumbel_bound(bits), "{bits:#x}");
            let v = f64::from(bits | 1) / 4_294_967_296.0;
            let back = -(-(-f64::from(gumbel(bits))).exp()).exp_m1();
            assert!((back - v).abs() <= 2e-5 * v.min(1.0 - v) + 1.2e-7 * v, "{bits:#x}: {back} for {v}");
        }
    }
}

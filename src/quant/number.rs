//! The small floating-point formats of quantised checkpoints: e4m3, e5m2, e2m1, the exponent e8m0, and f16. Widening
//! is exact. Not here: rounding to f16 and bfloat16, which the crate `half` provides.

/// The number that a code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    /// The code itself, 0 to 255.
    Affine,
    /// A sign, 4 bits of exponent and 3 of mantissa: up to ±448, no infinity. 0x7f and 0xff are not numbers.
    E4m3,
    /// A sign, 5 bits of exponent and 2 of mantissa: the high byte of an f16, up to ±57,344. 0x7c to 0x7f and 0xfc to
    /// 0xff are infinite or not numbers.
    E5m2,
    /// A sign, 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, in 4 bits.
    E2m1,
}

impl Number {
    /// The numbers of all 256 codes. Codes that the format does not have stand for the number of their low bits.
    pub fn table(self) -> &'static [f32; 256] {
        match self {
            Number::Affine => &AFFINE,
            Number::E4m3 => &E4M3,
            Number::E5m2 => &E5M2,
            Number::E2m1 => &E2M1,
        }
    }

    /// The largest absolute value of a finite number with a code of `bits` bits.
    pub fn largest(self, bits: u32) -> f32 {
        match self {
            Number::Affine => ((1u32 << bits) - 1) as f32,
            Number::E4m3 => 448.0,
            Number::E5m2 => 57_344.0,
            Number::E2m1 => 6.0,
        }
    }

    /// Whether a code stands for a finite number.
    #[inline]
    pub fn is_finite(self, code: u8) -> bool {
        match self {
            Number::Affine | Number::E2m1 => true,
            Number::E4m3 => code & 0x7f != 0x7f,
            Number::E5m2 => code & 0x7f < 0x7c,
        }
    }
}

static AFFINE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = code as f32;
        code += 1;
    }
    table
};

static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3(code as u8);
        code += 1;
    }
    table
};

static E5M2: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e5m2(code as u8);
        code += 1;
    }
    table
};

static E2M1: [f32; 256] = {
    const POSITIVE: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = if code & 8 == 0 { POSITIVE[code & 7] } else { -POSITIVE[code & 7] };
        code += 1;
    }
    table
};

/// The number of an e4m3 code.
pub const fn e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    if code & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        sign * (mantissa as f32) / 512.0
    } else {
        sign * f32::from_bits((exponent + 120) << 23 | mantissa << 20)
    }
}

/// The number of an e5m2 code.
pub const fn e5m2(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = ((code >> 2 & 31) as u32, (code & 3) as u32);
    if exponent == 31 {
        if mantissa == 0 { sign * f32::INFINITY } else { f32::NAN }
    } else if exponent == 0 {
        sign * (mantissa as f32) / 65_536.0
    } else {
        sign * f32::from_bits((exponent + 112) << 23 | mantissa << 21)
    }
}

/// The number of an e8m0 code, 2 to the power of `code - 127`; 0xff is not a number.
#[inline]
pub const fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// Widens the f16 with these bits exactly, without a branch: the exponent is corrected by a product, which also makes
/// subnormal numbers right.
#[inline(always)]
pub fn f16(bits: u16) -> f32 {
    let size = u32::from(bits & 0x7fff) << 13;
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    // 2^112 is the difference between the two formats' exponents.
    let number = (f32::from_bits(size) * f32::from_bits((127 + 112) << 23)).to_bits() | special;
    f32::from_bits(number | u32::from(bits & 0x8000) << 16)
}

/// The e4m3 code nearest to a number, ties to even. Numbers beyond ±448 become ±448; one that is not a number becomes
/// 0x7f.
pub fn to_e4m3(number: f32) -> u8 {
    let sign = (number.to_bits() >> 24 & 0x80) as u8;
    let size = number.abs();
    if size.is_nan() {
        return 0x7f;
    }
    // Below the smallest normal number the codes are 2^-9 apart.
    if size < 0.015_625 {
        return sign | (size * 512.0).round_ties_even() as u8;
    }
    let bits = size.min(448.0).to_bits();
    let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
    sign | ((rounded >> 20) - (120 << 3)).min(0x7e) as u8
}

/// The e2m1 code nearest to a number; a tie goes to the larger absolute value. Numbers beyond ±6 become ±6; one that is
/// not a number becomes 0.
#[inline]
pub fn to_e2m1(number: f32) -> u8 {
    // Every boundary between two codes is a multiple of a quarter.
    const NEAREST: [u8; 21] = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7];
    let sign = (number.to_bits() >> 28 & 8) as u8;
    sign | NEAREST[((number.abs() * 4.0) as usize).min(20)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn every_e4m3_number_has_its_code() {
        for code in 0..=255u8 {
            if Number::E4m3.is_finite(code) {
                assert_eq!(to_e4m3(e4m3(code)), code, "{code:#x}");
            } else {
                assert!(e4m3(code).is_nan());
            }
        }
        assert_eq!((e4m3(0x7e), e4m3(0x01), e4m3(0x38)), (448.0, 1.0 / 512.0, 1.0));
        assert_eq!((to_e4m3(1e9), to_e4m3(-1e9), to_e4m3(f32::INFINITY)), (0x7e, 0xfe, 0x7e));
    }

    #[test]
    fn rounding_to_e4m3_chooses_the_nearest_number() {
        for i in 0..200_000u32 {
            let x = f32::from_bits(0x3a00_0000 + i * 640);
            let best = (0..0x7f).map(|c| (e4m3(c) - x).abs()).fold(f32::MAX, f32::min);
            assert_eq!((e4m3(to_e4m3(x)) - x).abs(), best, "{x}");
        }
    }

    #[test]
    fn every_f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (super::f16(bits), f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn e5m2_is_the_high_byte_of_an_f16() {
        for code in 0..=255u8 {
            let half = f16::from_bits(u16::from(code) << 8).to_f32();
            assert!(half.to_bits() == e5m2(code).to_bits() || half.is_nan() && e5m2(code).is_nan(), "{code:#x}");
            assert_eq!(Number::E5m2.is_finite(code), half.is_finite());
        }
    }

    #[test]
    fn rounding_to_e2m1_chooses_the_nearest_number() {
        for i in -900..=900 {
            let x = i as f32 / 100.0;
            let best = (0..16).map(|c| (Number::E2m1.table()[c] - x).abs()).fold(f32::MAX, f32::min);
            assert_eq!((Number::E2m1.table()[usize::from(to_e2m1(x))] - x).abs(), best, "{x}");
        }
        assert_eq!(to_e2m1(f32::NAN) & 7, 0);
    }

    #[test]
    fn e8m0_is_a_power_of_two() {
        for code in 0..255u8 {
            assert_eq!(f64::from(e8m0(code)), 2f64.powi(i32::from(code) - 127));
        }
        assert!(e8m0(255).is_nan());
    }
}

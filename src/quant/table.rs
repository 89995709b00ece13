//! The 4-bit types of bitsandbytes: tables of 16 numbers between -1 and 1, which the largest absolute value of a block
//! multiplies. A table's numbers become 8-bit codes that kernels have. Not here: the tensors of a weight.

use super::number::Number;

/// A table of 16 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TableType {
    /// Quantiles of the normal distribution. As codes they are integers in parts of 112: no number is off by more than
    /// 0.0039, and a normally distributed weight by 0.0019 (r.m.s.) of its block's largest absolute value, a 19th of what
    /// the type itself is off.
    Nf4,
    /// Floats with 2 bits of exponent and 1 of mantissa, of which the smallest is a 192th. As codes in e4m3 they are exact.
    Fp4,
}

/// The numbers of NF4 as bitsandbytes has them.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The numbers of FP4 as bitsandbytes has them.
const FP4: [f32; 16] = {
    const SIZES: [f32; 8] = [0.0, 1.0, 128.0, 192.0, 64.0, 96.0, 32.0, 48.0];
    let mut numbers = [0.0; 16];
    let mut code = 0;
    while code < 8 {
        numbers[code] = SIZES[code] / 192.0;
        numbers[code + 8] = -numbers[code];
        code += 1;
    }
    numbers
};

/// NF4's numbers in parts of 112, plus 128. Of all divisors up to 127, this one has the smallest mean error that keeps the
/// numbers 1 and -1.
const NF4_CODES: [u8; 16] = [16, 50, 69, 84, 96, 107, 118, 128, 137, 146, 156, 166, 177, 191, 209, 240];
/// FP4's numbers in parts of 192, in e4m3.
const FP4_CODES: [u8; 16] =
    [0x00, 0x38, 0x70, 0x74, 0x68, 0x6c, 0x60, 0x64, 0x80, 0xb8, 0xf0, 0xf4, 0xe8, 0xec, 0xe0, 0xe4];

impl TableType {
    /// All types.
    pub const ALL: [TableType; 2] = [TableType::Nf4, TableType::Fp4];

    /// The type's name in bitsandbytes.
    pub const fn name(self) -> &'static str {
        match self {
            TableType::Nf4 => "nf4",
            TableType::Fp4 => "fp4",
        }
    }

    /// The number that each value of 4 bits stands for.
    pub const fn numbers(self) -> &'static [f32; 16] {
        match self {
            TableType::Nf4 => &NF4,
            TableType::Fp4 => &FP4,
        }
    }

    /// The 8-bit code for each value of 4 bits.
    pub const fn codes(self) -> &'static [u8; 16] {
        match self {
            TableType::Nf4 => &NF4_CODES,
            TableType::Fp4 => &FP4_CODES,
        }
    }

    /// What the codes stand for, and twice the code for zero.
    pub const fn meaning(self) -> (Number, u16) {
        match self {
            TableType::Nf4 => (Number::Affine, 256),
            TableType::Fp4 => (Number::E4m3, 0),
        }
    }

    /// The parts of a block's largest absolute value that codes count.
    pub const fn parts(self) -> f32 {
        match self {
            TableType::Nf4 => 112.0,
            TableType::Fp4 => 192.0,
        }
    }

    /// The value of 4 bits whose number is the nearest to `number`, a part of the largest absolute value.
    pub fn nearest(self, number: f32) -> u8 {
        let apart = |code: &u8| (self.numbers()[usize::from(*code)] - number).abs();
        (0..16).min_by(|a, b| apart(a).total_cmp(&apart(b))).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that a type's code stands for.
    fn decoded(of: TableType, code: usize) -> f32 {
        let (number, halves) = of.meaning();
        (number.table()[usize::from(of.codes()[code])] - f32::from(halves) * 0.5) / of.parts()
    }

    /// Normally distributed numbers in parts of the largest of each 64.
    fn normal() -> Vec<f32> {
        let mut state = 5u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        let mut numbers: Vec<f32> = (0..64 * 1000)
            .map(|_| (-2.0 * (1.0 - next()).ln()).sqrt() * (next() * std::f32::consts::TAU).cos())
            .collect();
        for block in numbers.chunks_mut(64) {
            let most = super::super::largest(block);
            block.iter_mut().for_each(|number| *number /= most);
        }
        numbers
    }

    fn mean(errors: impl ExactSizeIterator<Item = f32>) -> f64 {
        let count = errors.len() as f64;
        (errors.map(|error| f64::from(error).powi(2)).sum::<f64>() / count).sqrt()
    }

    /// Goal: storing NF4 in 8 bits costs far less than NF4 itself does. Method: normally distributed blocks are rounded to
    /// NF4, and the errors of that are compared with those of the codes.
    #[test]
    fn codes_of_nf4_are_off_by_a_fraction_of_what_nf4_is_off() {
        let of = TableType::Nf4;
        for code in 0..16 {
            let apart = (decoded(of, code) - of.numbers()[code]).abs();
            assert!(apart < 0.0039, "{code}: {apart}");
        }
        // The numbers that carry a block's size and its zeros.
        for code in [0, 7, 15] {
            assert_eq!(decoded(of, code), of.numbers()[code], "{code}");
        }
        let numbers = normal();
        let codes: Vec<usize> = numbers.iter().map(|number| usize::from(of.nearest(*number))).collect();
        let own = mean(numbers.iter().zip(&codes).map(|(number, code)| number - of.numbers()[*code]));
        let ours = mean(codes.iter().map(|code| decoded(of, *code) - of.numbers()[*code]));
        assert!((0.033..0.039).contains(&own) && (0.0017..0.0020).contains(&ours), "{own} and {ours}");
        assert!(ours * 18.0 < own, "{ours} of {own}");
    }

    /// No other divisor that keeps 1 and -1 has a smaller mean error.
    #[test]
    fn nf4_is_rounded_to_the_best_parts() {
        let of = TableType::Nf4;
        let error = |parts: f32| mean(of.numbers().iter().map(|number| (number * parts).round() / parts - number));
        let best = (1..=127).map(|parts| parts as f32).min_by(|a, b| error(*a).total_cmp(&error(*b)));
        assert_eq!(best, Some(of.parts()));
        let codes = of.numbers().map(|number| (number * of.parts()).round() as i32 + 128);
        assert_eq!(codes.map(|code| code as u8), *of.codes());
    }

    #[test]
    fn codes_of_fp4_are_exact() {
        for code in 0..16 {
            assert_eq!(decoded(TableType::Fp4, code), TableType::Fp4.numbers()[code], "{code}");
        }
    }

    #[test]
    fn every_number_is_nearest_to_itself() {
        for of in TableType::ALL {
            for (code, number) in (0..).zip(of.numbers()) {
                let found = of.nearest(*number);
                assert!(found == code || *number == 0.0, "{of:?} {code}: {found}");
            }
        }
    }
}

//! Quantised weights as plain data. Every format of a checkpoint is turned into one canonical form, and pure functions
//! convert to and from it. The canonical form of a row is one unsigned code per column and, for each group of adjacent
//! columns, a scale and a minimum in f32:
//!
//! ```text
//! value = scale * number(code) - minimum
//! ```
//!
//! Not here: files, threads, devices, and the order of codes in device memory.

pub mod blocks;
mod grids;
pub mod number;
pub mod quantize;
pub mod safetensors;
pub mod store;
pub mod table;
pub mod wide;

use number::Number;
use std::fmt;
use wide::wide;

/// The format of a canonical row: the meaning of codes, scales and minimums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Codes {
    /// The number of bits of a code: 2, 3, 4, 5, 6 or 8. Every code occupies one byte of a canonical row and is less
    /// than 2 to the power of `bits`.
    pub bits: u32,
    /// The number of adjacent columns with a common scale and minimum: 16, 32, 64 or 128.
    pub group: u32,
    /// The number that a code stands for.
    pub number: Number,
    /// The source of the minimums.
    pub minimum: Minimum,
}

/// The source of the minimums of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Minimum {
    /// Each group has its own minimum.
    Stored,
    /// Every group's minimum is its scale × a constant, and does not have to be stored.
    Zero {
        /// The constant in halves of a code.
        halves: u16,
    },
}

/// Writes a short name such as `integers of 4 bits in groups of 128 with minimums`.
impl fmt::Display for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Codes { bits, group, number, minimum } = self;
        match number {
            Number::Affine => write!(f, "integers of {bits} bits")?,
            Number::E4m3 => write!(f, "e4m3")?,
            Number::E5m2 => write!(f, "e5m2")?,
            Number::E2m1 => write!(f, "e2m1")?,
        }
        write!(f, " in groups of {group}")?;
        if *minimum == Minimum::Stored { write!(f, " with minimums") } else { Ok(()) }
    }
}

impl Codes {
    /// The code for the number zero, if it is the same for all groups.
    pub const fn zero(&self) -> Option<f32> {
        match self.minimum {
            Minimum::Stored => None,
            Minimum::Zero { halves } => Some(halves as f32 * 0.5),
        }
    }

    /// Returns the size in bytes of a row of `cols` columns without any layout's padding: codes, and scales and stored
    /// minimums in 16 bits.
    pub fn row_bytes(&self, cols: u32) -> u64 {
        let numbers = if self.minimum == Minimum::Stored { 2 } else { 1 };
        (u64::from(cols) * u64::from(self.bits)).div_ceil(8) + self.groups(cols as usize) as u64 * 2 * numbers
    }

    /// The size of a canonical row in bytes: its codes, two of 4 bits in a byte, the first one in the low bits, and a byte
    /// for each of other bits; then in f32, little endian, the scales, the minimums if they are stored, and the unit.
    pub fn canonical_bytes(&self, cols: usize) -> usize {
        let numbers = if self.minimum == Minimum::Stored { 2 } else { 1 };
        self.code_bytes(cols) + 4 * (self.groups(cols) * numbers + 1)
    }

    /// The size of the codes of a canonical row in bytes.
    pub fn code_bytes(&self, cols: usize) -> usize {
        if self.bits == 4 { cols.div_ceil(2) } else { cols }
    }

    /// Writes a canonical row; `codes` has a byte for each. `minimums` is empty if the codes have a constant zero. All
    /// scales are multiples of `unit` by numbers of few bits; 1 if that says nothing.
    ///
    /// # Panics
    /// If `out` has another length than the row: a bug of the caller.
    pub fn write_canonical(&self, codes: &[u8], scales: &[f32], minimums: &[f32], unit: f32, out: &mut [u8]) {
        assert_eq!(out.len(), self.canonical_bytes(codes.len()), "bytes of a canonical row");
        let (to, numbers) = out.split_at_mut(self.code_bytes(codes.len()));
        self.join(codes, to);
        for (to, x) in numbers.as_chunks_mut::<4>().0.iter_mut().zip(scales.iter().chain(minimums).chain([&unit])) {
            *to = x.to_le_bytes();
        }
    }

    /// Writes codes of a byte each as a canonical row has them.
    fn join(&self, codes: &[u8], out: &mut [u8]) {
        if self.bits != 4 {
            return out.copy_from_slice(codes);
        }
        for (byte, codes) in out.iter_mut().zip(codes.chunks(2)) {
            *byte = codes[0] | codes.get(1).unwrap_or(&0) << 4;
        }
    }

    /// Turns codes of a canonical row into a byte each.
    pub fn split(&self, bytes: &[u8], codes: &mut [u8]) {
        if self.bits != 4 {
            return codes.copy_from_slice(bytes);
        }
        let (pairs, last) = codes.as_chunks_mut::<2>();
        wide(
            #[inline(always)]
            || {
                for (pair, byte) in pairs.iter_mut().zip(bytes) {
                    *pair = [byte & 15, byte >> 4];
                }
            },
        );
        last.iter_mut().zip(bytes.last()).for_each(|(code, byte)| *code = byte & 15);
    }

    /// Returns codes that represent everything that these and `other` represent, with the same codes as numbers; `None`
    /// if there are none.
    pub fn common(self, other: Codes) -> Option<Codes> {
        if self == other {
            return Some(self);
        }
        let affine = self.number == Number::Affine && other.number == Number::Affine;
        affine.then(|| Codes {
            bits: self.bits.max(other.bits),
            group: self.group.min(other.group),
            number: Number::Affine,
            minimum: if self.minimum == other.minimum { self.minimum } else { Minimum::Stored },
        })
    }

    /// The number of groups in a row of `cols` columns; the last one may be shorter than the others.
    pub fn groups(&self, cols: usize) -> usize {
        cols.div_ceil(self.group as usize)
    }

    /// The largest absolute value of `scale * number(code) - minimum` over all codes is at most this; not finite if
    /// any value may overflow in f32.
    fn bound(&self, scale: f32, minimum: f32) -> f32 {
        scale.abs() * self.number.largest(self.bits) + minimum.abs()
    }

    /// Writes the values of a row, `out.len()` columns, in f32.
    ///
    /// With a constant zero the value is `scale * (number - zero)`, which is the same number with one rounding less;
    /// `minimums` may then be empty.
    ///
    /// # Panics
    /// If a slice has another length than `out` requires: a bug of the caller.
    pub fn dequantize(&self, codes: &[u8], scales: &[f32], minimums: &[f32], out: &mut [f32]) {
        let group = self.group as usize;
        let groups = self.groups(out.len());
        assert_eq!((codes.len(), scales.len()), (out.len(), groups), "codes and scales of a row");
        assert!(minimums.len() == groups || self.zero().is_some() && minimums.is_empty(), "minimums of a row");
        let numbers = self.number.table();
        for (g, (codes, out)) in codes.chunks(group).zip(out.chunks_mut(group)).enumerate() {
            let scale = scales[g];
            match self.zero() {
                Some(zero) => codes.iter().zip(out).for_each(|(c, x)| *x = scale * (numbers[usize::from(*c)] - zero)),
                None => {
                    let minimum = minimums[g];
                    codes.iter().zip(out).for_each(|(c, x)| *x = scale * numbers[usize::from(*c)] - minimum);
                }
            }
        }
    }

    /// Returns the first group whose scale or minimum is infinite or not a number, or so large that a value may
    /// overflow. `minimums` is empty if the minimums are implied by `zero`.
    pub fn finite(&self, scales: &[f32], minimums: &[f32]) -> Result<(), BadGroup> {
        let zero = self.zero().unwrap_or(0.0);
        // The bound of the largest numbers is the largest bound.
        let (scale, minimum) = wide(
            #[inline(always)]
            || (largest(scales), largest(minimums)),
        );
        let minimum = if minimums.is_empty() { scale * zero } else { minimum };
        if self.bound(scale, minimum).is_finite() {
            return Ok(());
        }
        for (group, scale) in scales.iter().copied().enumerate() {
            let minimum = minimums.get(group).copied().unwrap_or(scale * zero);
            if !self.bound(scale, minimum).is_finite() {
                return Err(BadGroup { group, scale, minimum });
            }
        }
        Ok(())
    }
}

/// The largest absolute value; not a number if one is not.
#[inline(always)]
pub fn largest(numbers: &[f32]) -> f32 {
    // As integers, sizes have the same order, below those that are not numbers.
    let sizes = numbers.iter().map(|x| (x.to_bits() & 0x7fff_ffff) as i32);
    f32::from_bits(sizes.fold(0, |most, size| most.max(size)) as u32)
}

/// A group that does not have finite values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BadGroup {
    /// The group's index.
    pub group: usize,
    /// The group's scale.
    pub scale: f32,
    /// The group's minimum.
    pub minimum: f32,
}

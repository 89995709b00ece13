//! Quantising numbers: to the block formats of GGUF files, for synthetic checkpoints and tests, and directly to
//! canonical codes, for models that are quantised when they are loaded. Scales are searched a little, without any
//! knowledge of activations. Not here: calibration, and anything about tensors.

use super::blocks::{BlockType, IQ4_TABLE, eight_signs};
use super::grids;
use super::number::{Number, e4m3, e8m0, to_e2m1, to_e4m3};
use super::{Codes, Minimum};
use half::f16;

impl BlockType {
    /// Quantises numbers, a whole number of blocks, to `blocks`. Numbers must be finite; others give valid blocks with
    /// arbitrary values. Numbers beyond the range of the scales' f16 are clamped to it.
    ///
    /// NVFP4 has scales of 2^-9 to 448 (e4m3): divide the numbers of a tensor by a common factor so that the largest
    /// becomes 2,688 (448 × 6), and store that factor beside the blocks.
    ///
    /// # Panics
    /// If `numbers` is not whole blocks or `blocks` has not the length of their bytes: bugs of the caller.
    pub fn quantize(self, numbers: &[f32], blocks: &mut [u8]) {
        use BlockType::*;
        assert!(
            numbers.len().is_multiple_of(self.elements()),
            "{} numbers are no whole blocks of {self}",
            numbers.len()
        );
        assert_eq!(blocks.len(), numbers.len() / self.elements() * self.bytes(), "bytes of {self} blocks");
        match self {
            Q4_0 => each::<32, 18>(numbers, blocks, |x, block| plain_symmetric::<8>(x, block)),
            Q5_0 => each::<32, 22>(numbers, blocks, |x, block| plain_symmetric::<16>(x, block)),
            Q4_1 => each::<32, 20>(numbers, blocks, |x, block| plain_with_minimum::<15>(x, block)),
            Q5_1 => each::<32, 24>(numbers, blocks, |x, block| plain_with_minimum::<31>(x, block)),
            Q8_0 => each(numbers, blocks, q8_0),
            Q2_K => each(numbers, blocks, q2_k),
            Q3_K => each(numbers, blocks, q3_k),
            Q4_K => each::<256, 144>(numbers, blocks, |x, block| q45_k::<15>(x, block)),
            Q5_K => each::<256, 176>(numbers, blocks, |x, block| q45_k::<31>(x, block)),
            Q6_K => each(numbers, blocks, q6_k),
            IQ4_NL => each(numbers, blocks, iq4_nl),
            IQ4_XS => each(numbers, blocks, iq4_xs),
            MXFP4 => each(numbers, blocks, mxfp4),
            NVFP4 => each(numbers, blocks, nvfp4),
            IQ2_XXS => each(numbers, blocks, iq2_xxs),
            IQ2_XS => each(numbers, blocks, iq2_xs),
            IQ2_S => each(numbers, blocks, iq2_s),
            IQ3_XXS => each(numbers, blocks, iq3_xxs),
            IQ3_S => each(numbers, blocks, iq3_s),
        }
    }
}

/// The canonical codes of [`int8`].
pub const INT8: Codes = Codes { bits: 8, group: 128, number: Number::Affine, minimum: Minimum::Zero { halves: 256 } };

/// The canonical codes of [`int4`].
pub const INT4: Codes = Codes { bits: 4, group: 32, number: Number::Affine, minimum: Minimum::Stored };

/// Quantises a row to 8 bits with a scale for each 128 columns; see [`INT8`]. Numbers must be finite. Scales have 11
/// significant bits, so that an f16 holds them exactly up to a power of two.
///
/// # Panics
/// If a slice has another length than the row requires: a bug of the caller.
pub fn int8(row: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    const GROUP: usize = INT8.group as usize;
    assert_eq!((codes.len(), scales.len()), (row.len(), INT8.groups(row.len())), "codes and scales of a row");
    for ((x, codes), scale) in row.chunks(GROUP).zip(codes.chunks_mut(GROUP)).zip(scales) {
        *scale = eleven_bits(largest(x) / 127.0);
        let inverse = inverse(*scale);
        for (x, code) in x.iter().zip(codes) {
            *code = nearest(x * inverse, -127.0, 127.0).wrapping_add(128) as u8;
        }
    }
}

/// Quantises a row to 4 bits with a scale and a minimum for each 32 columns; see [`INT4`]. Numbers must be finite.
/// Scales and minimums have 11 significant bits, so that an f16 holds them exactly up to a power of two.
///
/// # Panics
/// If a slice has another length than the row requires: a bug of the caller.
pub fn int4(row: &[f32], codes: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
    const GROUP: usize = INT4.group as usize;
    let groups = INT4.groups(row.len());
    assert_eq!((codes.len(), scales.len()), (row.len(), groups), "codes and scales of a row");
    assert_eq!(minimums.len(), groups, "minimums of a row");
    for (g, (x, codes)) in row.chunks(GROUP).zip(codes.chunks_mut(GROUP)).enumerate() {
        let (scale, minimum) = match x.first_chunk::<GROUP>() {
            Some(x) => with_minimum(x, 15.0, f32::MIN, SOME_SCALES),
            None => range(x, 15.0),
        };
        (scales[g], minimums[g]) = (eleven_bits(scale), eleven_bits(minimum));
        let (inverse, minimum) = (inverse(scales[g]), minimums[g]);
        for (x, code) in x.iter().zip(codes) {
            *code = nearest((x + minimum) * inverse, 0.0, 15.0) as u8;
        }
    }
}

/// Calls `quantize` for each block.
#[inline(always)]
fn each<const ELEMENTS: usize, const BYTES: usize>(
    numbers: &[f32],
    blocks: &mut [u8],
    quantize: impl Fn(&[f32; ELEMENTS], &mut [u8; BYTES]),
) {
    for (numbers, block) in numbers.as_chunks().0.iter().zip(blocks.as_chunks_mut().0) {
        quantize(numbers, block);
    }
}

// ---- Numbers ----

/// The integer nearest to a number, ties to even, clamped to a range within ±2^22.
#[inline(always)]
fn nearest(x: f32, low: f32, high: f32) -> i32 {
    // Adding 1.5 · 2^23 leaves the integer in the low bits. This order of comparisons turns NaN into `low`.
    const MAGIC: f32 = 12_582_912.0;
    let x = if x > low { x } else { low };
    let x = if x < high { x } else { high };
    (x + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32
}

/// 1 / x, or 0 if that is not finite.
#[inline(always)]
fn inverse(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Rounds a number to 11 significant bits, as many as a normal f16 has.
#[inline(always)]
fn eleven_bits(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff)
}

/// Writes a number as f16 at byte `at`, clamped to the finite range, and returns what was written.
#[inline(always)]
fn put_half(block: &mut [u8], at: usize, x: f32) -> f32 {
    let half = f16::from_f32(x.clamp(-65_504.0, 65_504.0));
    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// The largest absolute value; 0 for no numbers.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let (lanes, rest) = x.as_chunks::<8>();
    let mut most = [0f32; 8];
    for x in lanes {
        for i in 0..8 {
            most[i] = if x[i].abs() > most[i] { x[i].abs() } else { most[i] };
        }
    }
    rest.iter().chain(&most).fold(0.0, |most, x| if x.abs() > most { x.abs() } else { most })
}

/// The least and the largest number.
#[inline(always)]
fn bounds(x: &[f32]) -> (f32, f32) {
    let (lanes, rest) = x.as_chunks::<8>();
    let (mut least, mut most) = ([f32::MAX; 8], [f32::MIN; 8]);
    for x in lanes {
        for i in 0..8 {
            least[i] = if x[i] < least[i] { x[i] } else { least[i] };
            most[i] = if x[i] > most[i] { x[i] } else { most[i] };
        }
    }
    let low = rest.iter().chain(&least).fold(f32::MAX, |low, x| if *x < low { *x } else { low });
    let high = rest.iter().chain(&most).fold(f32::MIN, |high, x| if *x > high { *x } else { high });
    (low, high)
}

/// The sum over a group, in 8 lanes, of a function of each index.
#[inline(always)]
fn sum<const N: usize>(term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; 8];
    for at in (0..N).step_by(8) {
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane += term(at + i);
        }
    }
    lanes.iter().sum()
}

// ---- Scales of a group ----

/// Factors on the scale that just covers a group, to choose from.
const SOME_SCALES: &[f32] = &[1.0, 0.94, 0.88];
/// More candidate factors of a scale, for formats with few levels.
const MORE_SCALES: &[f32] = &[1.06, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6];

/// The scale and minimum (value = scale · code − minimum) that cover all numbers with codes 0 to `high`.
#[inline(always)]
fn range(x: &[f32], high: f32) -> (f32, f32) {
    let (low, most) = bounds(x);
    ((most - low) / high, -low)
}

/// A scale and a minimum of at least `least` (value = scale · code − minimum) with a small squared error for codes 0 to
/// `high`. For each factor the range is shortened at both ends alike, the numbers are rounded, and the line of least
/// squares through numbers and codes is one more candidate.
#[inline(always)]
fn with_minimum<const N: usize>(x: &[f32; N], high: f32, least: f32, factors: &[f32]) -> (f32, f32) {
    let (low, most) = bounds(x);
    let low = if low < -least { low } else { -least };
    let width = most - low;
    // Not for a constant group, nor for numbers that are not finite or nearly overflow.
    if width.is_nan() || width <= 0.0 || width > 1e18 {
        return if low < 0.0 && width >= 0.0 { ((width / high).min(1e30), -low) } else { (0.0, (-low).max(least)) };
    }
    let mut best = (width / high, -low);
    let mut best_error = f32::MAX;
    let mut codes = [0f32; N];
    for factor in factors {
        let scale = width * factor / high;
        let minimum = -(low + 0.5 * width * (1.0 - factor)).min(-least);
        let inverse = inverse(scale);
        for i in 0..N {
            codes[i] = nearest((x[i] + minimum) * inverse, 0.0, high) as f32;
        }
        let (count, sum_x, sum_c) = (N as f32, sum::<N>(|i| x[i]), sum::<N>(|i| codes[i]));
        let (sum_cc, sum_cx) = (sum::<N>(|i| codes[i] * codes[i]), sum::<N>(|i| codes[i] * x[i]));
        let determinant = count * sum_cc - sum_c * sum_c;
        let mut fit = (scale, minimum);
        if determinant > 0.0 {
            fit = ((count * sum_cx - sum_c * sum_x) / determinant, (sum_c * sum_cx - sum_cc * sum_x) / determinant);
            if fit.1 < least {
                fit = (sum_cx / sum_cc, least);
            }
        }
        let error = sum::<N>(|i| {
            let difference = fit.0 * codes[i] - fit.1 - x[i];
            difference * difference
        });
        if error < best_error && fit.0 > 0.0 {
            (best, best_error) = (fit, error);
        }
    }
    best
}

/// A scale (value = scale · code) with a small squared error for codes `low` to `high`, `low` being the one of larger
/// size: the number of largest size becomes `low`, so that the scale may be negative.
#[inline(always)]
fn symmetric<const N: usize>(x: &[f32; N], low: f32, high: f32, factors: &[f32]) -> f32 {
    let size = largest(x);
    if size == 0.0 || size.is_nan() || size > 1e18 {
        return (size / high).min(1e30);
    }
    let extreme = if x.contains(&size) { size } else { -size };
    let (mut best, mut best_gain) = (extreme / low, f32::MIN);
    for factor in factors {
        let inverse = low / (extreme * factor);
        let mut codes = [0f32; N];
        for i in 0..N {
            codes[i] = nearest(x[i] * inverse, low, high) as f32;
        }
        let (sum_cc, sum_cx) = (sum::<N>(|i| codes[i] * codes[i]), sum::<N>(|i| codes[i] * x[i]));
        // The squared error with the scale of least squares is the sum of squares less this.
        let gain = sum_cx * sum_cx / sum_cc;
        if gain > best_gain {
            (best, best_gain) = (sum_cx / sum_cc, gain);
        }
    }
    best
}

// ---- Blocks of 32 ----

/// Writes 32 codes: their low nibbles as 16 bytes, and the fifth bits as a word before them if the block has 4 bytes
/// more.
#[inline(always)]
fn put_nibbles(codes: &[i32; 32], out: &mut [u8]) {
    let out = if let Some((word, rest)) = out.split_first_chunk_mut::<4>()
        && rest.len() == 16
    {
        let bits = (0..32).fold(0u32, |bits, e| bits | (codes[e] as u32 >> 4 & 1) << e);
        *word = bits.to_le_bytes();
        rest
    } else {
        out
    };
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = (codes[i] & 15 | (codes[i + 16] & 15) << 4) as u8;
    }
}

/// Q4_0 and Q5_0, with a zero of `ZERO`.
#[inline(always)]
fn plain_symmetric<const ZERO: i32>(x: &[f32; 32], block: &mut [u8]) {
    let zero = ZERO as f32;
    let scale = symmetric(x, -zero, zero - 1.0, SOME_SCALES);
    let inverse = inverse(put_half(block, 0, scale));
    put_nibbles(&x.map(|x| nearest(x * inverse, -zero, zero - 1.0) + ZERO), &mut block[2..]);
}

/// Q4_1 and Q5_1, with codes up to `HIGH`.
#[inline(always)]
fn plain_with_minimum<const HIGH: i32>(x: &[f32; 32], block: &mut [u8]) {
    let (scale, minimum) = with_minimum(x, HIGH as f32, f32::MIN, SOME_SCALES);
    let inverse = inverse(put_half(block, 0, scale));
    let low = put_half(block, 2, -minimum);
    put_nibbles(&x.map(|x| nearest((x - low) * inverse, 0.0, HIGH as f32)), &mut block[4..]);
}

fn q8_0(x: &[f32; 32], block: &mut [u8; 34]) {
    let inverse = inverse(put_half(block, 0, largest(x) / 127.0));
    for (x, byte) in x.iter().zip(&mut block[2..]) {
        *byte = nearest(x * inverse, -127.0, 127.0) as u8;
    }
}

// ---- K types ----

/// Quantises scales of at least 0 to codes up to `high` with a common f16 factor at byte `at`; returns the codes and
/// the scales as stored.
#[inline(always)]
fn unsigned_scales<const N: usize>(s: &[f32; N], high: f32, block: &mut [u8], at: usize) -> ([u8; N], [f32; N]) {
    let factor = put_half(block, at, largest(s) / high);
    let inverse = inverse(factor);
    let codes = s.map(|s| nearest(s * inverse, 0.0, high) as u8);
    (codes, codes.map(|c| factor * f32::from(c)))
}

/// Quantises scales of both signs and stores their f16 factor at byte `at` of the block; the scale of largest size gets
/// the code `low`.
#[inline(always)]
fn signed_scales<const N: usize>(s: &[f32; N], low: f32, block: &mut [u8], at: usize) -> ([i32; N], [f32; N]) {
    let size = largest(s);
    let extreme = if s.contains(&size) { size } else { -size };
    let factor = put_half(block, at, extreme / low);
    let inverse = inverse(factor);
    let codes = s.map(|s| nearest(s * inverse, low, -low - 1.0));
    (codes, codes.map(|c| factor * c as f32))
}

/// The groups of a block.
#[inline(always)]
fn groups<const N: usize>(x: &[f32; 256]) -> &[[f32; N]] {
    x.as_chunks().0
}

/// Writes 2 bits of each of 128 codes in 32 bytes: code 32j + l at bits 2j of byte l.
fn put_two_bits(codes: &[u8], out: &mut [u8]) {
    for (l, byte) in out.iter_mut().enumerate() {
        *byte = (0..4).fold(0, |byte, j| byte | (codes[32 * j + l] & 3) << (2 * j));
    }
}

fn q2_k(x: &[f32; 256], block: &mut [u8; 84]) {
    let (mut s, mut m) = ([0f32; 16], [0f32; 16]);
    for (g, x) in groups::<16>(x).iter().enumerate() {
        (s[g], m[g]) = with_minimum(x, 3.0, 0.0, MORE_SCALES);
    }
    let (s_codes, s) = unsigned_scales(&s, 15.0, block, 80);
    let (m_codes, m) = unsigned_scales(&m, 15.0, block, 82);
    let mut codes = [0; 256];
    for (g, x) in groups::<16>(x).iter().enumerate() {
        block[g] = s_codes[g] | m_codes[g] << 4;
        let inverse = inverse(s[g]);
        for (x, code) in x.iter().zip(&mut codes[16 * g..]) {
            *code = nearest((x + m[g]) * inverse, 0.0, 3.0) as u8;
        }
    }
    for n in 0..2 {
        put_two_bits(&codes[128 * n..], &mut block[16 + 32 * n..][..32]);
    }
}

fn q3_k(x: &[f32; 256], block: &mut [u8; 110]) {
    let mut s = [0f32; 16];
    for (s, x) in s.iter_mut().zip(groups::<16>(x)) {
        *s = symmetric(x, -4.0, 3.0, MORE_SCALES);
    }
    let (s_codes, s) = signed_scales(&s, -32.0, block, 108);
    block[..32].fill(0);
    block[96..108].fill(0);
    for (k, code) in s_codes.iter().map(|c| (c + 32) as u8).enumerate() {
        block[96 + k % 8] |= (code & 15) << (4 * (k / 8));
        block[104 + k % 4] |= (code >> 4) << (2 * (k / 4));
    }
    let mut codes = [0; 256];
    for (g, x) in groups::<16>(x).iter().enumerate() {
        let inverse = inverse(s[g]);
        for (x, code) in x.iter().zip(&mut codes[16 * g..]) {
            *code = (nearest(x * inverse, -4.0, 3.0) + 4) as u8;
        }
    }
    for n in 0..2 {
        put_two_bits(&codes[128 * n..], &mut block[32 + 32 * n..][..32]);
    }
    for (e, code) in codes.iter().enumerate() {
        block[e % 32] |= (code >> 2) << (e / 32);
    }
}

/// Q4_K and Q5_K, with codes up to `HIGH`.
#[inline(always)]
fn q45_k<const HIGH: i32>(x: &[f32; 256], block: &mut [u8]) {
    let (mut s, mut m) = ([0f32; 8], [0f32; 8]);
    for (g, x) in groups::<32>(x).iter().enumerate() {
        (s[g], m[g]) = with_minimum(x, HIGH as f32, 0.0, SOME_SCALES);
    }
    let (s_codes, s) = unsigned_scales(&s, 63.0, block, 0);
    let (m_codes, m) = unsigned_scales(&m, 63.0, block, 2);
    for i in 0..4 {
        block[4 + i] = s_codes[i] | s_codes[i + 4] >> 4 << 6;
        block[8 + i] = m_codes[i] | m_codes[i + 4] >> 4 << 6;
        block[12 + i] = s_codes[i + 4] & 15 | m_codes[i + 4] << 4;
    }
    let mut codes = [0; 256];
    for (g, x) in groups::<32>(x).iter().enumerate() {
        let inverse = inverse(s[g]);
        for (x, code) in x.iter().zip(&mut codes[32 * g..]) {
            *code = nearest((x + m[g]) * inverse, 0.0, HIGH as f32) as u8;
        }
    }
    let low = if HIGH > 15 { 48 } else { 16 };
    if HIGH > 15 {
        for (l, byte) in block[16..48].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |byte, k| byte | (codes[32 * k + l] >> 4) << k);
        }
    }
    for c in 0..4 {
        for l in 0..32 {
            block[low + 32 * c + l] = codes[64 * c + l] & 15 | codes[64 * c + 32 + l] << 4;
        }
    }
}

fn q6_k(x: &[f32; 256], block: &mut [u8; 210]) {
    let mut s = [0f32; 16];
    for (s, x) in s.iter_mut().zip(groups::<16>(x)) {
        *s = symmetric(x, -32.0, 31.0, &[1.0, 0.97]);
    }
    let (s_codes, s) = signed_scales(&s, -128.0, block, 208);
    let mut codes = [0; 256];
    for (g, x) in groups::<16>(x).iter().enumerate() {
        block[192 + g] = s_codes[g] as u8;
        let inverse = inverse(s[g]);
        for (x, code) in x.iter().zip(&mut codes[16 * g..]) {
            *code = (nearest(x * inverse, -32.0, 31.0) + 32) as u8;
        }
    }
    for n in 0..2 {
        let codes = &codes[128 * n..][..128];
        for l in 0..64 {
            block[64 * n + l] = codes[l] & 15 | codes[l + 64] << 4;
        }
        for l in 0..32 {
            block[128 + 32 * n + l] = (0..4).fold(0, |byte, k| byte | (codes[32 * k + l] >> 4) << (2 * k));
        }
    }
}

// ---- Tables: IQ4, MXFP4, NVFP4 ----

/// The index of the table's integer nearest to -128 + i / 2, for i of 0 to 511.
static IQ4_NEAREST: [u8; 512] = {
    let mut nearest = [0; 512];
    let mut i = 0;
    while i < 512 {
        let mut best = 0;
        while best < 15 && (IQ4_TABLE[best] as i32 + IQ4_TABLE[best + 1] as i32) < i as i32 - 256 {
            best += 1;
        }
        // A number between two halves is compared by its middle.
        if best < 15 && (IQ4_TABLE[best] as i32 + IQ4_TABLE[best + 1] as i32) == i as i32 - 256 {
            best += 1;
        }
        nearest[i] = best as u8;
        i += 1;
    }
    nearest
};

/// The index of the table's integer nearest to a number.
#[inline(always)]
fn iq4_index(x: f32) -> u8 {
    IQ4_NEAREST[(((x + 128.0) * 2.0) as usize).min(511)]
}

/// A scale with a small squared error for the integers of IQ4_NL.
fn iq4_scale(x: &[f32; 32]) -> f32 {
    let size = largest(x);
    if size == 0.0 || size.is_nan() || size > 1e18 {
        return (size / 127.0).min(1e30);
    }
    let extreme = if x.contains(&size) { size } else { -size };
    let (mut best, mut best_gain) = (extreme / -127.0, f32::MIN);
    for factor in [1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8] {
        for sign in [-127.0, 127.0] {
            let inverse = sign / (extreme * factor);
            let integers = x.map(|x| f32::from(IQ4_TABLE[usize::from(iq4_index(x * inverse))]));
            let (sum_cc, sum_cx) = (sum::<32>(|i| integers[i] * integers[i]), sum::<32>(|i| integers[i] * x[i]));
            let gain = sum_cx * sum_cx / sum_cc;
            if gain > best_gain {
                (best, best_gain) = (sum_cx / sum_cc, gain);
            }
        }
    }
    best
}

fn iq4_nl(x: &[f32; 32], block: &mut [u8; 18]) {
    let inverse = inverse(put_half(block, 0, iq4_scale(x)));
    put_nibbles(&x.map(|x| i32::from(iq4_index(x * inverse))), &mut block[2..]);
}

fn iq4_xs(x: &[f32; 256], block: &mut [u8; 136]) {
    let mut s = [0f32; 8];
    for (s, x) in s.iter_mut().zip(groups::<32>(x)) {
        *s = iq4_scale(x);
    }
    let (s_codes, s) = signed_scales(&s, -32.0, block, 0);
    block[2..8].fill(0);
    for (b, x) in groups::<32>(x).iter().enumerate() {
        let code = (s_codes[b] + 32) as u8;
        block[4 + b / 2] |= (code & 15) << (4 * (b & 1));
        block[2 + b / 4] |= (code >> 4) << (2 * (b % 4));
        let inverse = inverse(s[b]);
        put_nibbles(&x.map(|x| i32::from(iq4_index(x * inverse))), &mut block[8 + 16 * b..][..16]);
    }
}

/// The squared error of e2m1 codes with a scale.
fn e2m1_error<const N: usize>(x: &[f32; N], scale: f32) -> f32 {
    let (table, inverse) = (Number::E2m1.table(), inverse(scale));
    sum::<N>(|i| {
        let difference = scale * table[usize::from(to_e2m1(x[i] * inverse))] - x[i];
        difference * difference
    })
}

fn mxfp4(x: &[f32; 32], block: &mut [u8; 17]) {
    let size = largest(x);
    // The exponent for which the largest number lies between 4 and 8, or the next.
    let exponent = ((size.to_bits() >> 23) as i32 - 2).clamp(0, 251) as u8;
    let next = exponent + 1;
    block[0] = if e2m1_error(x, e8m0(next)) < e2m1_error(x, e8m0(exponent)) { next } else { exponent };
    let inverse = inverse(e8m0(block[0]));
    put_nibbles(&x.map(|x| i32::from(to_e2m1(x * inverse))), &mut block[1..]);
}

fn nvfp4(x: &[f32; 64], block: &mut [u8; 36]) {
    for (g, x) in x.as_chunks::<16>().0.iter().enumerate() {
        let middle = i32::from(to_e4m3(largest(x) / 6.0) & 0x7f);
        let mut best = (f32::MAX, 0);
        for code in middle - 2..=middle + 4 {
            let code = code.clamp(0, 0x7e) as u8;
            let error = e2m1_error(x, e4m3(code));
            if error < best.0 {
                best = (error, code);
            }
        }
        block[g] = best.1;
        let inverse = inverse(e4m3(best.1));
        let codes = x.map(|x| to_e2m1(x * inverse));
        for i in 0..8 {
            block[4 + 8 * g + i] = codes[i] | codes[i + 8] << 4;
        }
    }
}

// ---- Grids ----

/// Factors on the scale that maps a group's largest number to the largest magnitude of a grid.
const GRID_SCALES: &[f32] = &[1.05, 0.95, 0.85, 0.75, 0.65];

/// A grid of `N` points of `W` magnitudes, by value for a fast search.
struct Grid<const N: usize, const W: usize> {
    /// The magnitudes of each point's value, by value.
    values: [[f32; N]; W],
    /// Half the sum of squares of each point.
    halves: [f32; N],
}

impl<const N: usize, const W: usize> Grid<N, W> {
    /// Spreads the points' bytes.
    fn new(magnitude: impl Fn(usize, usize) -> f32) -> Box<Grid<N, W>> {
        let mut grid = Box::new(Grid { values: [[0.0; N]; W], halves: [0.0; N] });
        for point in 0..N {
            for i in 0..W {
                let value = magnitude(point, i);
                grid.values[i][point] = value;
                grid.halves[point] += 0.5 * value * value;
            }
        }
        grid
    }

    /// The point nearest to `x`.
    fn nearest(&self, x: &[f32; W]) -> usize {
        let mut scores = self.halves.map(|half| -half);
        for (x, values) in x.iter().zip(&self.values) {
            scores.iter_mut().zip(values).for_each(|(score, value)| *score += x * value);
        }
        let most = bounds(&scores).1;
        scores.iter().position(|score| *score == most).unwrap_or(0)
    }
}

/// A group of numbers on a grid: `C` points with their signs.
struct Points<const C: usize> {
    /// The points.
    points: [usize; C],
    /// The signs, 8 numbers a byte.
    signs: [u8; 4],
    /// Sum of squares of the magnitudes.
    squares: f32,
    /// Sum of the products with the absolute numbers, less where a sign had to be changed.
    products: f32,
}

/// The grid points nearest to a group's numbers divided by `scale`. If `even`, each 8 numbers have an even number of
/// negative signs.
fn on_grid<const N: usize, const W: usize, const C: usize>(
    grid: &Grid<N, W>,
    x: &[f32],
    even: bool,
    scale: f32,
) -> Points<C> {
    let mut found = Points { points: [0; C], signs: [0; 4], squares: 0.0, products: 0.0 };
    let mut sizes = [0f32; 32];
    for (k, (x, sizes)) in x.as_chunks::<8>().0.iter().zip(sizes.as_chunks_mut::<8>().0).enumerate() {
        let mut signs = 0u8;
        for i in 0..8 {
            signs |= u8::from(x[i] < 0.0) << i;
            sizes[i] = x[i].abs();
        }
        if even && signs.count_ones() % 2 == 1 {
            // The number that loses least.
            let least = (0..8).fold(0, |least, i| if sizes[i] < sizes[least] { i } else { least });
            signs ^= 1 << least;
            sizes[least] = -sizes[least];
        }
        found.signs[k] = signs;
    }
    let inverse = inverse(scale);
    for (k, sizes) in sizes[..x.len()].as_chunks::<W>().0.iter().enumerate() {
        let point = grid.nearest(&sizes.map(|x| x * inverse));
        found.points[k] = point;
        found.squares += 2.0 * grid.halves[point];
        found.products += (0..W).map(|i| sizes[i] * grid.values[i][point]).sum::<f32>();
    }
    found
}

/// A scale with a small squared error on a grid whose largest magnitude is `top`.
fn grid_scale<const N: usize, const W: usize, const C: usize>(
    grid: &Grid<N, W>,
    x: &[f32],
    even: bool,
    top: f32,
) -> f32 {
    let size = largest(x);
    if size == 0.0 || size.is_nan() || size > 1e18 {
        return (size / top).min(1e30);
    }
    let (mut best, mut best_gain) = (size / top, 0.0);
    for factor in GRID_SCALES {
        let found: Points<C> = on_grid(grid, x, even, size * factor / top);
        let gain = found.products * found.products / found.squares;
        if gain > best_gain && found.products > 0.0 {
            (best, best_gain) = (found.products / found.squares, gain);
        }
    }
    best
}

/// The scales and points of a block in groups of `G` numbers, whose scales are `factor · (code + ½)` with codes of 4
/// bits; the f16 in front is `factor · unit`.
fn grid_block<const N: usize, const W: usize, const C: usize, const G: usize>(
    grid: &Grid<N, W>,
    x: &[f32; 256],
    even: bool,
    top: f32,
    unit: f32,
    block: &mut [u8],
) -> Vec<(u8, Points<C>)> {
    let scales: Vec<f32> = groups::<G>(x).iter().map(|x| grid_scale::<N, W, C>(grid, x, even, top)).collect();
    let factor = put_half(block, 0, largest(&scales) / 15.5 * unit) / unit;
    let inverse = inverse(factor);
    let quantised = scales.iter().zip(groups::<G>(x)).map(|(scale, x)| {
        let code = nearest(scale * inverse - 0.5, 0.0, 15.0) as u8;
        (code, on_grid(grid, x, even, factor * (f32::from(code) + 0.5)))
    });
    quantised.collect()
}

/// Creates a grid once.
macro_rules! grid {
    ($points:literal, $width:literal, $magnitude:expr) => {{
        static GRID: std::sync::LazyLock<Box<Grid<$points, $width>>> =
            std::sync::LazyLock::new(|| Grid::new($magnitude));
        &**GRID
    }};
}

/// The 7-bit index of 8 signs of which an even number is negative.
fn sign_index(signs: u8) -> u32 {
    let index = u32::from(signs & 0x7f);
    debug_assert_eq!(eight_signs(index), signs);
    index
}

fn iq2_xxs(x: &[f32; 256], block: &mut [u8; 66]) {
    let grid = grid!(256, 8, |point, i| f32::from(grids::IQ2_XXS[point].to_le_bytes()[i]));
    for (b, (code, found)) in grid_block::<256, 8, 4, 32>(grid, x, true, 43.0, 4.0, block).iter().enumerate() {
        let mut word = u32::from(*code) << 28;
        for l in 0..4 {
            block[2 + 8 * b + l] = found.points[l] as u8;
            word |= sign_index(found.signs[l]) << (7 * l);
        }
        block[6 + 8 * b..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

fn iq2_xs(x: &[f32; 256], block: &mut [u8; 74]) {
    let grid = grid!(512, 8, |point, i| f32::from(grids::IQ2_XS[point].to_le_bytes()[i]));
    block[66..].fill(0);
    for (b, (code, found)) in grid_block::<512, 8, 2, 16>(grid, x, true, 43.0, 4.0, block).iter().enumerate() {
        block[66 + b / 2] |= code << (4 * (b & 1));
        for l in 0..2 {
            let q = found.points[l] as u16 | (sign_index(found.signs[l]) as u16) << 9;
            block[2 + 4 * b + 2 * l..][..2].copy_from_slice(&q.to_le_bytes());
        }
    }
}

fn iq2_s(x: &[f32; 256], block: &mut [u8; 82]) {
    let grid = grid!(1024, 8, |point, i| f32::from(grids::IQ2_S[point].to_le_bytes()[i]));
    block[66..].fill(0);
    for (b, (code, found)) in grid_block::<1024, 8, 2, 16>(grid, x, false, 43.0, 4.0, block).iter().enumerate() {
        block[74 + b / 2] |= code << (4 * (b & 1));
        for l in 0..2 {
            let i = 2 * b + l;
            block[2 + i] = found.points[l] as u8;
            block[34 + i] = found.signs[l];
            block[66 + i / 4] |= ((found.points[l] >> 8) as u8) << (2 * (i % 4));
        }
    }
}

fn iq3_xxs(x: &[f32; 256], block: &mut [u8; 98]) {
    let grid = grid!(256, 4, |point, i| f32::from(grids::IQ3_XXS[point].to_le_bytes()[i]));
    for (b, (code, found)) in grid_block::<256, 4, 8, 32>(grid, x, true, 62.0, 2.0, block).iter().enumerate() {
        let mut word = u32::from(*code) << 28;
        for (l, signs) in found.signs.iter().enumerate() {
            word |= sign_index(*signs) << (7 * l);
        }
        for (i, point) in found.points.iter().enumerate() {
            block[2 + 8 * b + i] = *point as u8;
        }
        block[66 + 4 * b..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

fn iq3_s(x: &[f32; 256], block: &mut [u8; 110]) {
    // Code c of a positive number is the magnitude 2c - 15. The scale is d (1 + 2 code) = 2d (code + ½).
    let grid = grid!(512, 4, |point, i| f32::from(2 * grids::IQ3_S[point].to_le_bytes()[i]) - 15.0);
    block[66..].fill(0);
    for (b, (code, found)) in grid_block::<512, 4, 8, 32>(grid, x, false, 15.0, 0.5, block).iter().enumerate() {
        block[106 + b / 2] |= code << (4 * (b & 1));
        for (i, point) in found.points.iter().enumerate() {
            block[2 + 8 * b + i] = *point as u8;
            block[66 + b] |= ((point >> 8) as u8) << i;
        }
        block[74 + 4 * b..][..4].copy_from_slice(&found.signs);
    }
}

//! The quantised block formats of GGUF files: their sizes, and pure functions that turn blocks into canonical codes,
//! scales and minimums. Not here: the plain formats (F32, F16, BF16), the container, the 1-bit and ternary formats, and
//! quantising, which is in `quantize.rs`.

use super::grids;
use super::number::{Number, e4m3, e8m0, f16};
use super::wide::wide;
use super::{BadGroup, Codes, Minimum};
use std::fmt;

/// A quantised block format, named as in GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum BlockType {
    /// 4 bits by 32, a scale.
    Q4_0,
    /// 4 bits by 32, a scale and a minimum.
    Q4_1,
    /// 5 bits by 32, a scale.
    Q5_0,
    /// 5 bits by 32, a scale and a minimum.
    Q5_1,
    /// 8 bits by 32, a scale.
    Q8_0,
    /// 2 bits by 16, 4-bit scales and minimums.
    Q2_K,
    /// 3 bits by 16, 6-bit scales.
    Q3_K,
    /// 4 bits by 32, 6-bit scales and minimums.
    Q4_K,
    /// 5 bits by 32, 6-bit scales and minimums.
    Q5_K,
    /// 6 bits by 16, 8-bit scales.
    Q6_K,
    /// Points of a grid of 256 × 8 magnitudes, 4-bit scales by 32.
    IQ2_XXS,
    /// Points of a grid of 512 × 8 magnitudes, 4-bit scales by 16.
    IQ2_XS,
    /// Points of a grid of 1,024 × 8 magnitudes, 4-bit scales by 16.
    IQ2_S,
    /// Points of a grid of 256 × 4 magnitudes, 4-bit scales by 32.
    IQ3_XXS,
    /// Points of a grid of 512 × 4 magnitudes, 4-bit scales by 32.
    IQ3_S,
    /// Indices into a table of 16 integers by 32, a scale.
    IQ4_NL,
    /// Indices into the table of IQ4_NL by 32, 6-bit scales.
    IQ4_XS,
    /// e2m1 by 32, a power of two.
    MXFP4,
    /// e2m1 by 16, e4m3 scales. A tensor has a further f32 scale beside its blocks, which the caller applies.
    NVFP4,
}

use BlockType::*;

impl BlockType {
    /// Every type, in the order of [`BlockType::id`].
    pub const ALL: [BlockType; 19] = [
        Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ3_XXS, IQ4_NL, IQ3_S, IQ2_S,
        IQ4_XS, MXFP4, NVFP4,
    ];

    /// The type's name as GGUF tools write it.
    pub const fn name(self) -> &'static str {
        self.layout().0
    }

    /// The type's number in the tensor table of a GGUF file.
    pub const fn id(self) -> u32 {
        self.layout().1
    }

    /// The number of elements in a block. A row is a whole number of blocks.
    pub const fn elements(self) -> usize {
        self.layout().2
    }

    /// The size of a block in bytes.
    pub const fn bytes(self) -> usize {
        self.layout().3
    }

    /// The type with this number in the tensor table of a GGUF file; `None` if it is not one of these types.
    pub fn from_id(id: u32) -> Option<BlockType> {
        BlockType::ALL.into_iter().find(|t| t.id() == id)
    }

    /// The type with this name, in any case.
    pub fn from_name(name: &str) -> Option<BlockType> {
        BlockType::ALL.into_iter().find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// Name, id, elements and bytes.
    const fn layout(self) -> (&'static str, u32, usize, usize) {
        match self {
            Q4_0 => ("Q4_0", 2, 32, 18),
            Q4_1 => ("Q4_1", 3, 32, 20),
            Q5_0 => ("Q5_0", 6, 32, 22),
            Q5_1 => ("Q5_1", 7, 32, 24),
            Q8_0 => ("Q8_0", 8, 32, 34),
            Q2_K => ("Q2_K", 10, 256, 84),
            Q3_K => ("Q3_K", 11, 256, 110),
            Q4_K => ("Q4_K", 12, 256, 144),
            Q5_K => ("Q5_K", 13, 256, 176),
            Q6_K => ("Q6_K", 14, 256, 210),
            IQ2_XXS => ("IQ2_XXS", 16, 256, 66),
            IQ2_XS => ("IQ2_XS", 17, 256, 74),
            IQ3_XXS => ("IQ3_XXS", 18, 256, 98),
            IQ4_NL => ("IQ4_NL", 20, 32, 18),
            IQ3_S => ("IQ3_S", 21, 256, 110),
            IQ2_S => ("IQ2_S", 22, 256, 82),
            IQ4_XS => ("IQ4_XS", 23, 256, 136),
            MXFP4 => ("MXFP4", 39, 32, 17),
            NVFP4 => ("NVFP4", 40, 64, 36),
        }
    }

    /// The format of rows from [`BlockType::decode`]: the meaning of codes, scales and minimums.
    pub const fn codes(self) -> Codes {
        const fn affine(bits: u32, group: u32, minimum: Minimum) -> Codes {
            Codes { bits, group, number: Number::Affine, minimum }
        }
        const fn zero(halves: u16) -> Minimum {
            Minimum::Zero { halves }
        }
        match self {
            Q4_0 => affine(4, 32, zero(16)),
            Q5_0 => affine(5, 32, zero(32)),
            Q8_0 | IQ4_NL | IQ4_XS | IQ3_XXS | IQ2_XXS => affine(8, 32, zero(256)),
            IQ2_XS | IQ2_S => affine(8, 16, zero(256)),
            Q4_1 | Q4_K => affine(4, 32, Minimum::Stored),
            Q5_1 | Q5_K => affine(5, 32, Minimum::Stored),
            Q2_K => affine(2, 16, Minimum::Stored),
            Q3_K => affine(3, 16, zero(8)),
            Q6_K => affine(6, 16, zero(64)),
            IQ3_S => affine(4, 32, zero(15)),
            MXFP4 => Codes { bits: 4, group: 32, number: Number::E2m1, minimum: zero(0) },
            NVFP4 => Codes { bits: 4, group: 16, number: Number::E2m1, minimum: zero(0) },
        }
    }

    /// Turns whole blocks into codes (one per element) and scales and minimums (one per group of
    /// [`BlockType::codes`]). `minimums` may be empty if the type's minimums are implied by a constant zero. Any bytes
    /// can be decoded; see [`BlockType::finite`].
    ///
    /// # Panics
    /// If `blocks` is not whole blocks, or another slice does not have the length that they require: bugs of the
    /// caller.
    pub fn decode(self, blocks: &[u8], codes: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        let meaning = self.codes();
        let elements = blocks.len() / self.bytes() * self.elements();
        let groups = elements / meaning.group as usize;
        assert!(blocks.len().is_multiple_of(self.bytes()), "{} bytes are not whole {self} blocks", blocks.len());
        assert_eq!((codes.len(), scales.len()), (elements, groups), "codes and scales of {elements} elements");
        assert!(
            minimums.len() == groups || meaning.zero().is_some() && minimums.is_empty(),
            "{} minimums for {groups} groups of {self}",
            minimums.len()
        );
        wide(
            #[inline(always)]
            || self.decode_blocks(blocks, codes, scales, minimums),
        );
        if let Some(zero) = meaning.zero() {
            minimums.iter_mut().zip(scales).for_each(|(m, s)| *m = *s * zero);
        }
    }

    /// Writes codes, scales and stored minimums.
    #[inline(always)]
    fn decode_blocks(self, blocks: &[u8], codes: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        // Not functions that take another one: it would not be inlined where the compiler finds it large.
        macro_rules! symmetric {
            ($decode:ident) => {{
                let outputs = codes.as_chunks_mut().0.iter_mut().zip(scales.as_chunks_mut().0);
                for (block, (codes, scales)) in blocks.as_chunks().0.iter().zip(outputs) {
                    $decode(&{ *block }, codes, scales);
                }
            }};
        }
        macro_rules! with_minimum {
            ($decode:ident) => {{
                let outputs = codes.as_chunks_mut().0.iter_mut().zip(scales.as_chunks_mut().0);
                let outputs = outputs.zip(minimums.as_chunks_mut().0);
                for (block, ((codes, scales), minimums)) in blocks.as_chunks().0.iter().zip(outputs) {
                    $decode(&{ *block }, codes, scales, minimums);
                }
            }};
        }
        match self {
            Q4_0 => symmetric!(q4_0),
            Q5_0 => symmetric!(q5_0),
            Q8_0 => symmetric!(q8_0),
            Q3_K => symmetric!(q3_k),
            Q6_K => symmetric!(q6_k),
            IQ2_XXS => symmetric!(iq2_xxs),
            IQ2_XS => symmetric!(iq2_xs),
            IQ2_S => symmetric!(iq2_s),
            IQ3_XXS => symmetric!(iq3_xxs),
            IQ3_S => symmetric!(iq3_s),
            IQ4_NL => symmetric!(iq4_nl),
            IQ4_XS => symmetric!(iq4_xs),
            MXFP4 => symmetric!(mxfp4),
            NVFP4 => symmetric!(nvfp4),
            Q4_1 => with_minimum!(q4_1),
            Q5_1 => with_minimum!(q5_1),
            Q2_K => with_minimum!(q2_k),
            Q4_K => with_minimum!(q4_k),
            Q5_K => with_minimum!(q5_k),
        }
    }

    /// Writes the values of whole blocks in f32, from the result of [`BlockType::decode`].
    ///
    /// # Panics
    /// If `blocks` is not whole blocks or `out` has not the length of their elements: bugs of the caller.
    pub fn dequantize(self, blocks: &[u8], out: &mut [f32]) {
        const MOST: usize = 256;
        let meaning = self.codes();
        let (mut codes, mut scales, mut minimums) = ([0; MOST], [0.0; MOST / 16], [0.0; MOST / 16]);
        let groups = self.elements() / meaning.group as usize;
        assert!(blocks.len().is_multiple_of(self.bytes()), "{} bytes are not whole {self} blocks", blocks.len());
        assert_eq!(out.len(), blocks.len() / self.bytes() * self.elements(), "elements of {self} blocks");
        for (block, out) in blocks.chunks_exact(self.bytes()).zip(out.chunks_exact_mut(self.elements())) {
            let codes = &mut codes[..self.elements()];
            let (scales, minimums) = (&mut scales[..groups], &mut minimums[..groups]);
            self.decode(block, codes, scales, minimums);
            meaning.dequantize(codes, scales, minimums, out);
        }
    }

    /// Returns the first group of decoded blocks whose scale or minimum is infinite or not a number, or so large that
    /// a value may overflow. `scales` and `minimums` are the results of [`BlockType::decode`].
    pub fn finite(self, scales: &[f32], minimums: &[f32]) -> Result<(), BadBlock> {
        let groups = self.elements() / self.codes().group as usize;
        self.codes().finite(scales, minimums).map_err(|BadGroup { group, scale, minimum }| BadBlock {
            block: group / groups,
            group: group % groups,
            scale,
            minimum,
        })
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A block that does not have finite values.
#[derive(Clone, Copy, Debug)]
pub struct BadBlock {
    /// The block's index.
    pub block: usize,
    /// The group's index in the block.
    pub group: usize,
    /// The group's scale.
    pub scale: f32,
    /// The group's minimum.
    pub minimum: f32,
}

impl fmt::Display for BadBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadBlock { block, group, scale, minimum } = self;
        write!(f, "group {group} of block {block} has scale {scale} and minimum {minimum}, not finite values")
    }
}

impl std::error::Error for BadBlock {}

/// The f16 at byte `at`, in f32.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    f16(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// A byte in each byte of a word. Codes are made eight at a time: the compiler joins such words to vectors where it can.
const fn each(byte: u8) -> u64 {
    byte as u64 * 0x0101_0101_0101_0101
}

/// Eight bytes from `at` on.
#[inline(always)]
fn eight(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*part(bytes, at))
}

/// Writes eight codes from `at` on.
#[inline(always)]
fn put(codes: &mut [u8], at: usize, eight: u64) {
    *part_mut(codes, at) = eight.to_le_bytes();
}

/// Adds bits to eight codes from `at` on.
#[inline(always)]
fn add(codes: &mut [u8], at: usize, bits: u64) {
    let with = eight(codes, at) | bits;
    put(codes, at, with);
}

/// The low nibbles of 16 bytes, then the high ones.
#[inline(always)]
fn nibbles(bytes: &[u8; 16], codes: &mut [u8; 32]) {
    for i in [0, 8] {
        let x = eight(bytes, i);
        put(codes, i, x & each(15));
        put(codes, i + 16, x >> 4 & each(15));
    }
}

/// Adds bit `e` of a word as bit 4 of code `e`.
#[inline(always)]
fn fifth_bits(word: &[u8; 4], codes: &mut [u8; 32]) {
    for (i, byte) in word.iter().enumerate() {
        add(codes, 8 * i, sign_mask(*byte) & each(16));
    }
}

/// A fixed part of a block.
#[inline(always)]
fn part<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("a part of the block")
}

/// A fixed part of the codes.
#[inline(always)]
fn part_mut<const N: usize>(codes: &mut [u8], at: usize) -> &mut [u8; N] {
    codes[at..].first_chunk_mut().expect("a part of the codes")
}

#[inline(always)]
fn q4_0(block: &[u8; 18], codes: &mut [u8; 32], scale: &mut [f32; 1]) {
    scale[0] = half(block, 0);
    nibbles(part(block, 2), codes);
}

#[inline(always)]
fn q4_1(block: &[u8; 20], codes: &mut [u8; 32], scale: &mut [f32; 1], minimum: &mut [f32; 1]) {
    (scale[0], minimum[0]) = (half(block, 0), -half(block, 2));
    nibbles(part(block, 4), codes);
}

#[inline(always)]
fn q5_0(block: &[u8; 22], codes: &mut [u8; 32], scale: &mut [f32; 1]) {
    scale[0] = half(block, 0);
    nibbles(part(block, 6), codes);
    fifth_bits(part(block, 2), codes);
}

#[inline(always)]
fn q5_1(block: &[u8; 24], codes: &mut [u8; 32], scale: &mut [f32; 1], minimum: &mut [f32; 1]) {
    (scale[0], minimum[0]) = (half(block, 0), -half(block, 2));
    nibbles(part(block, 8), codes);
    fifth_bits(part(block, 4), codes);
}

#[inline(always)]
fn q8_0(block: &[u8; 34], codes: &mut [u8; 32], scale: &mut [f32; 1]) {
    scale[0] = half(block, 0);
    for i in (0..32).step_by(8) {
        put(codes, i, eight(block, 2 + i) ^ each(0x80));
    }
}

/// Writes the 2-bit numbers of 32 bytes: bits 2j of byte l become code 32j + l.
#[inline(always)]
fn two_bits(bytes: &[u8; 32], codes: &mut [u8; 128]) {
    for i in (0..32).step_by(8) {
        let x = eight(bytes, i);
        for j in 0..4 {
            put(codes, 32 * j + i, x >> (2 * j) & each(3));
        }
    }
}

#[inline(always)]
fn q2_k(block: &[u8; 84], codes: &mut [u8; 256], scales: &mut [f32; 16], minimums: &mut [f32; 16]) {
    let (d, least) = (half(block, 80), half(block, 82));
    for (i, byte) in block[..16].iter().enumerate() {
        scales[i] = d * f32::from(byte & 15);
        minimums[i] = least * f32::from(byte >> 4);
    }
    for n in 0..2 {
        two_bits(part(block, 16 + 32 * n), part_mut(codes, 128 * n));
    }
}

#[inline(always)]
fn q3_k(block: &[u8; 110], codes: &mut [u8; 256], scales: &mut [f32; 16]) {
    let d = half(block, 108);
    let packed: &[u8; 12] = part(block, 96);
    for (i, scale) in scales.iter_mut().enumerate() {
        let low = packed[i % 8] >> (4 * (i / 8)) & 15;
        let high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
        *scale = d * f32::from((low | high << 4) as i8 - 32);
    }
    let high: &[u8; 32] = part(block, 0);
    for n in 0..2 {
        let codes: &mut [u8; 128] = part_mut(codes, 128 * n);
        two_bits(part(block, 32 + 32 * n), codes);
        for i in (0..32).step_by(8) {
            let third = eight(high, i) >> (4 * n);
            for j in 0..4 {
                add(codes, 32 * j + i, (third >> j & each(1)) << 2);
            }
        }
    }
}

/// The 6-bit scales and minimums of Q4_K and Q5_K as bytes.
#[inline(always)]
fn six_bits(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let word = |at: usize| u32::from_le_bytes(*part(packed, at));
    let (s, m, both) = (word(0), word(4), word(8));
    let join = |low: u32, high: u32| {
        let first = u64::from(high & 0x3f3f_3f3f);
        let second = u64::from(low & 0x0f0f_0f0f | (high >> 2) & 0x3030_3030);
        (first | second << 32).to_le_bytes()
    };
    (join(both, s), join(both >> 4, m))
}

/// Writes the scales and minimums of a Q4_K or Q5_K block.
#[inline(always)]
fn k_scales(block: &[u8; 16], scales: &mut [f32; 8], minimums: &mut [f32; 8]) {
    let (d, least) = (half(block, 0), half(block, 2));
    let (s, m) = six_bits(part(block, 4));
    for i in 0..8 {
        scales[i] = d * f32::from(s[i]);
        minimums[i] = least * f32::from(m[i]);
    }
}

#[inline(always)]
fn q4_k(block: &[u8; 144], codes: &mut [u8; 256], scales: &mut [f32; 8], minimums: &mut [f32; 8]) {
    k_scales(part(block, 0), scales, minimums);
    for c in 0..4 {
        let bytes: &[u8; 32] = part(block, 16 + 32 * c);
        let codes: &mut [u8; 64] = part_mut(codes, 64 * c);
        for l in 0..32 {
            codes[l] = bytes[l] & 15;
            codes[l + 32] = bytes[l] >> 4;
        }
    }
}

#[inline(always)]
fn q5_k(block: &[u8; 176], codes: &mut [u8; 256], scales: &mut [f32; 8], minimums: &mut [f32; 8]) {
    k_scales(part(block, 0), scales, minimums);
    let high: &[u8; 32] = part(block, 16);
    for c in 0..4 {
        let bytes: &[u8; 32] = part(block, 48 + 32 * c);
        let codes: &mut [u8; 64] = part_mut(codes, 64 * c);
        for l in 0..32 {
            codes[l] = bytes[l] & 15 | (high[l] >> (2 * c) & 1) << 4;
            codes[l + 32] = bytes[l] >> 4 | (high[l] >> (2 * c + 1) & 1) << 4;
        }
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], codes: &mut [u8; 256], scales: &mut [f32; 16]) {
    let d = half(block, 208);
    for (scale, byte) in scales.iter_mut().zip(&block[192..208]) {
        *scale = d * f32::from(*byte as i8);
    }
    for n in 0..2 {
        let low: &[u8; 64] = part(block, 64 * n);
        let high: &[u8; 32] = part(block, 128 + 32 * n);
        let codes: &mut [u8; 128] = part_mut(codes, 128 * n);
        for l in 0..32 {
            codes[l] = low[l] & 15 | (high[l] & 3) << 4;
            codes[l + 32] = low[l + 32] & 15 | (high[l] >> 2 & 3) << 4;
            codes[l + 64] = low[l] >> 4 | (high[l] >> 4 & 3) << 4;
            codes[l + 96] = low[l + 32] >> 4 | (high[l] >> 6) << 4;
        }
    }
}

/// The integers of IQ4_NL and IQ4_XS.
pub const IQ4_TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The integers of IQ4_NL and IQ4_XS as codes.
const IQ4_CODES: [u8; 16] = {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = IQ4_TABLE[i] as u8 ^ 0x80;
        i += 1;
    }
    codes
};

/// The codes of two neighbouring elements' indices, the first one in the low nibble and in the low byte.
static IQ4_PAIRS: [u16; 256] = {
    let mut pairs = [0; 256];
    let mut i = 0;
    while i < 256 {
        pairs[i] = IQ4_CODES[i & 15] as u16 | (IQ4_CODES[i >> 4] as u16) << 8;
        i += 1;
    }
    pairs
};

/// Like [`nibbles`], but the integers of the table. Two elements at a time: the indices of neighbours are brought into
/// one byte.
#[inline(always)]
fn iq4(bytes: &[u8; 16], codes: &mut [u8; 32]) {
    let (low, high) = codes.split_at_mut(16);
    let outputs = low.as_chunks_mut::<8>().0.iter_mut().zip(high.as_chunks_mut::<8>().0);
    for (word, (low, high)) in bytes.as_chunks::<8>().0.iter().zip(outputs) {
        let word = u64::from_le_bytes(*word);
        let (first, second) = (word & 0x0f0f_0f0f_0f0f_0f0f, word >> 4 & 0x0f0f_0f0f_0f0f_0f0f);
        for (indices, codes) in [(first | first >> 4, low), (second | second >> 4, high)] {
            let pair = |i: u32| u64::from(IQ4_PAIRS[(indices >> (16 * i) & 0xff) as usize]) << (16 * i);
            *codes = (pair(0) | pair(1) | pair(2) | pair(3)).to_le_bytes();
        }
    }
}

#[inline(always)]
fn iq4_nl(block: &[u8; 18], codes: &mut [u8; 32], scale: &mut [f32; 1]) {
    scale[0] = half(block, 0);
    iq4(part(block, 2), codes);
}

#[inline(always)]
fn iq4_xs(block: &[u8; 136], codes: &mut [u8; 256], scales: &mut [f32; 8]) {
    let d = half(block, 0);
    let high = u16::from_le_bytes(*part(block, 2));
    for (b, scale) in scales.iter_mut().enumerate() {
        let low = block[4 + b / 2] >> (4 * (b & 1)) & 15;
        let high = (high >> (2 * b) & 3) as u8;
        *scale = d * f32::from((low | high << 4) as i8 - 32);
        iq4(part(block, 8 + 16 * b), part_mut(codes, 32 * b));
    }
}

#[inline(always)]
fn mxfp4(block: &[u8; 17], codes: &mut [u8; 32], scale: &mut [f32; 1]) {
    scale[0] = e8m0(block[0]);
    nibbles(part(block, 1), codes);
}

#[inline(always)]
fn nvfp4(block: &[u8; 36], codes: &mut [u8; 64], scales: &mut [f32; 4]) {
    for g in 0..4 {
        // The scales are unsigned: the sign bit has no meaning.
        scales[g] = e4m3(block[g] & 0x7f);
        let x = eight(block, 4 + 8 * g);
        put(codes, 16 * g, x & each(15));
        put(codes, 16 * g + 8, x >> 4 & each(15));
    }
}

/// For each byte of signs, a mask with byte i set where bit i is.
static SIGN_MASKS: [u64; 256] = {
    let mut masks = [0; 256];
    let mut signs = 0;
    while signs < 256 {
        let mut i = 0;
        while i < 8 {
            masks[signs] |= ((signs as u64 >> i & 1) * 0xff) << (8 * i);
            i += 1;
        }
        signs += 1;
    }
    masks
};

/// A mask with byte i set where bit i of `signs` is.
#[inline(always)]
fn sign_mask(signs: u8) -> u64 {
    SIGN_MASKS[usize::from(signs)]
}

/// The 8 signs of a 7-bit index: the eighth makes the number of negative signs even.
#[inline(always)]
pub fn eight_signs(index: u32) -> u8 {
    let index = (index & 0x7f) as u8;
    index | (index.count_ones() as u8 & 1) << 7
}

/// Writes 8 magnitudes, 1 to 127, with their signs as codes with a zero of 128.
#[inline(always)]
fn signed(magnitudes: u64, signs: u8, codes: &mut [u8]) {
    let mask = sign_mask(signs);
    // The negative of a byte is its inverse plus 1, which does not carry into the next byte.
    let code = ((magnitudes ^ mask) + (mask & 0x0101_0101_0101_0101)) ^ 0x8080_8080_8080_8080;
    codes.copy_from_slice(&code.to_le_bytes());
}

#[inline(always)]
fn iq2_xxs(block: &[u8; 66], codes: &mut [u8; 256], scales: &mut [f32; 8]) {
    let d = half(block, 0);
    for b in 0..8 {
        let points: &[u8; 4] = part(block, 2 + 8 * b);
        let word = u32::from_le_bytes(*part(block, 6 + 8 * b));
        scales[b] = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (l, point) in points.iter().enumerate() {
            let signs = eight_signs(word >> (7 * l));
            signed(grids::IQ2_XXS[usize::from(*point)], signs, &mut codes[32 * b + 8 * l..][..8]);
        }
    }
}

/// Writes the scales of IQ2_XS and IQ2_S.
#[inline(always)]
fn iq2_scales(d: f32, packed: &[u8; 8], scales: &mut [f32; 16]) {
    for (i, scale) in scales.iter_mut().enumerate() {
        *scale = d * (0.5 + f32::from(packed[i / 2] >> (4 * (i & 1)) & 15)) * 0.25;
    }
}

#[inline(always)]
fn iq2_xs(block: &[u8; 74], codes: &mut [u8; 256], scales: &mut [f32; 16]) {
    iq2_scales(half(block, 0), part(block, 66), scales);
    for i in 0..32 {
        let q = u16::from_le_bytes(*part(block, 2 + 2 * i));
        let point = grids::IQ2_XS[usize::from(q & 511)];
        signed(point, eight_signs(u32::from(q >> 9)), &mut codes[8 * i..][..8]);
    }
}

#[inline(always)]
fn iq2_s(block: &[u8; 82], codes: &mut [u8; 256], scales: &mut [f32; 16]) {
    iq2_scales(half(block, 0), part(block, 74), scales);
    for i in 0..32 {
        let high = block[66 + i / 4] >> (2 * (i % 4)) & 3;
        let point = usize::from(block[2 + i]) | usize::from(high) << 8;
        signed(grids::IQ2_S[point], block[34 + i], &mut codes[8 * i..][..8]);
    }
}

#[inline(always)]
fn iq3_xxs(block: &[u8; 98], codes: &mut [u8; 256], scales: &mut [f32; 8]) {
    let d = half(block, 0);
    for b in 0..8 {
        let points: &[u8; 8] = part(block, 2 + 8 * b);
        let word = u32::from_le_bytes(*part(block, 66 + 4 * b));
        scales[b] = d * (0.5 + (word >> 28) as f32) * 0.5;
        for (l, pair) in points.as_chunks::<2>().0.iter().enumerate() {
            let [low, high] = pair.map(|point| u64::from(grids::IQ3_XXS[usize::from(point)]));
            signed(low | high << 32, eight_signs(word >> (7 * l)), &mut codes[32 * b + 8 * l..][..8]);
        }
    }
}

#[inline(always)]
fn iq3_s(block: &[u8; 110], codes: &mut [u8; 256], scales: &mut [f32; 8]) {
    let d = half(block, 0);
    for b in 0..8 {
        // The values are scale · (2c - 15) / 2.
        scales[b] = 2.0 * (d * f32::from(1 + 2 * (block[106 + b / 2] >> (4 * (b & 1)) & 15)));
        let points: &[u8; 8] = part(block, 2 + 8 * b);
        let high = usize::from(block[66 + b]);
        for l in 0..4 {
            let point = |i: usize| u64::from(grids::IQ3_S[usize::from(points[i]) | (high >> i & 1) << 8]);
            let codes = &mut codes[32 * b + 8 * l..][..8];
            let mask = sign_mask(block[74 + 4 * b + l]) & 0x0f0f_0f0f_0f0f_0f0f;
            codes.copy_from_slice(&((point(2 * l) | point(2 * l + 1) << 32) ^ mask).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_are_found_again() {
        for kind in BlockType::ALL {
            assert_eq!(BlockType::from_id(kind.id()), Some(kind));
            assert_eq!(BlockType::from_name(&kind.name().to_lowercase()), Some(kind));
            assert_eq!(kind.elements() % kind.codes().group as usize, 0);
        }
        assert!(BlockType::ALL.is_sorted_by_key(|kind| kind.id()));
        assert_eq!(BlockType::from_id(1), None);
    }

    /// What is compiled for some processors decodes as the plain code does.
    #[test]
    fn all_processors_decode_alike() {
        let mut state = 1u64;
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        for kind in BlockType::ALL {
            let blocks: Vec<u8> = (0..9 * kind.bytes()).map(|_| byte()).collect();
            let elements = 9 * kind.elements();
            let groups = kind.codes().groups(elements);
            let decode = |plain: bool| {
                let (mut codes, mut scales, mut minimums) = (vec![0; elements], vec![0.0; groups], vec![0.0; groups]);
                match plain {
                    true => kind.decode_blocks(&blocks, &mut codes, &mut scales, &mut minimums),
                    false => kind.decode(&blocks, &mut codes, &mut scales, &mut minimums),
                }
                let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                let minimums = if kind.codes().zero().is_none() { bits(minimums) } else { Vec::new() };
                (codes, bits(scales), minimums)
            };
            assert_eq!(decode(true), decode(false), "{kind}");
        }
    }
}

//! The layouts of quantised weights in device memory. A weight is an unsigned code of 2 to 8 bits; a group of adjacent
//! columns has a scale and, if the format stores one, a minimum, both f16; a row has an f32 factor:
//!
//! ```text
//! weight = factor * (value(code) * scale - minimum)
//! ```
//!
//! `value` is the f16 number that a kernel gets from a code with bit operations: code · 2⁻²⁴ for affine codes (the code's
//! bits as a subnormal f16), the number · 2⁻⁸ for e4m3, the number · 2⁻¹⁴ for e2m1 and the number for e5m2. The factor
//! makes a row's largest scale a large f16, so that neither scales nor products of a row overflow or lose bits. It is a
//! power of two; in a row whose groups all have the same scale (scales by row or tensor) or are multiples of a scale of the
//! tensor, it contains that scale, and the groups' scales are exact.
//!
//! The bits of codes are in planes, each with 8, 4, 2 or 1 bits of every code: 8 bits are one plane, 6 bits are 4 + 2,
//! 5 bits 4 + 1, 3 bits 2 + 1; the plane with more bits holds the low ones.
//!
//! Row-major: for each row, 16 bytes (the factor, then zeros), the planes, the scales and the minimums; columns are in
//! order, the lowest bits first. Fragments: for each block of 16 rows, 16 factors and as many zeros, then units of 128
//! columns (256 for formats with a plane of 1 bit); a unit has its planes in the order in which 32 lanes load them, 16 bytes
//! a lane at a time, then the scales and the minimums of its groups (see [`fragment_place`] and [`pair_place`]).
//!
//! Not here: the formats of files (`quant`), and layouts of other numbers.

use super::{BadRow, FRAGMENT_ROWS, Layout, Line, Packing, Rows, SourceFormat};
use crate::quant::number::Number;
use crate::quant::quantize::{self, INT4, INT8};
use crate::quant::wide::wide;
use crate::quant::{self, BadGroup, Codes, Minimum};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// The bytes before a row's planes in a row-major tensor.
const ROW_HEADER: u64 = 16;
/// The bytes before the units of a block of 16 rows in fragments: one f32 for each row, then zeros. Units of formats with groups
/// of at most 32 columns have multiples of 128 bytes, and begin at such: bulk copies of them are faster then.
pub const BLOCK_HEADER: u64 = 128;

/// The columns of a divisible row that are decoded at a time: whole units, and whole blocks of every type.
const CHUNK: usize = 2048;

/// Returns the number of columns of a unit, to whose multiple rows are padded.
pub fn unit_cols(codes: Codes) -> u32 {
    if codes.bits.is_multiple_of(2) { 128 } else { 256 }
}

/// Returns the number of f16 numbers that a group has: a scale, and a minimum if the format stores one.
fn halves(codes: Codes) -> u64 {
    if codes.minimum == Minimum::Stored { 2 } else { 1 }
}

/// Returns the size of a row of `padded_cols` columns in bytes; in fragments, a sixteenth of a block of 16 rows.
pub(super) fn row_bytes(codes: Codes, layout: Layout, padded_cols: u32) -> u64 {
    let (cols, groups) = (u64::from(padded_cols), u64::from(padded_cols / codes.group));
    let planes = cols * u64::from(codes.bits) / 8;
    match layout {
        Layout::RowMajor { .. } => ROW_HEADER + planes + (groups * 2 * halves(codes)).next_multiple_of(16),
        Layout::Fragments => BLOCK_HEADER / 16 + planes + groups * 2 * halves(codes),
    }
}

/// Returns the size in bytes of a unit of columns of 16 rows in fragments.
pub fn fragment_unit_bytes(codes: Codes) -> u32 {
    let unit = unit_cols(codes);
    FRAGMENT_ROWS * (unit * codes.bits / 8 + unit / codes.group * 2 * halves(codes) as u32)
}

/// The planes of codes of some bits: the number of bits in the plane, and the position of its lowest bit in a code.
fn planes(bits: u32) -> impl Iterator<Item = (u32, u32)> {
    [(8, 0), (4, 0), (2, bits & 4), (1, bits & 6)].into_iter().filter(move |(plane, _)| bits & plane != 0)
}

/// Returns the exponent of two by which codes' numbers differ from the f16 numbers that their bits are.
fn value_exponent(number: Number) -> i32 {
    match number {
        Number::Affine => 24,
        Number::E4m3 => 8,
        Number::E2m1 => 14,
        Number::E5m2 => 0,
    }
}

/// Returns the exponent that factors give the largest scale of a row, with which no product of a scale and a value
/// overflows: 14 stands for a scale of at least 2¹⁴ and less than 2¹⁵.
fn scale_exponent(number: Number) -> i32 {
    if number == Number::E5m2 { -1 } else { 14 }
}

/// Returns the place of four adjacent columns' bits in a fragment unit's plane of `plane` bits, for one of 16 rows.
/// `quad` is the index of the four columns in the unit. Returns the index of the 32-bit word in the plane, and the
/// positions of the four codes' lowest bits in it.
///
/// Lane `4g + t` has rows `u = 4(g >> 1) + (g & 1)` and `v = u + 2`, and in each block of 32 columns the columns
/// `8t .. 8t + 8`, of which half `h` is four. The four codes of a row's half are at the same bits of the bytes 0, 2, 1 and 3
/// of a word: the bytes are four codes of a row for products of integers, and the halves of the word have adjacent columns
/// at the same bits, for pairs of f16.
pub fn fragment_place(plane: u32, row: u32, quad: u32) -> (u32, [u32; 4]) {
    let (block, t, h) = (quad / 8, quad % 8 / 2, quad % 2);
    let g = 2 * (row / 4) + row % 2;
    let second = row / 2 % 2;
    let lane = 4 * g + t;
    let (word, first) = match plane {
        8 => ((block * 32 + lane) * 4 + 2 * h + second, 0),
        4 => ((block / 2 * 32 + lane) * 4 + block % 2 * 2 + h, 4 * second),
        2 => ((block / 4 * 32 + lane) * 4 + block % 4, 4 * h + 2 * second),
        _ => ((block / 8 * 32 + lane) * 4 + block / 2 % 4, 4 * (block % 2) + 2 * h + second),
    };
    (word, [first, first + 16, first + 8, first + 24])
}

/// Returns the index of a row's f16 in a fragment unit's scales or minimums: for each of 8 pairs of rows (u, v), the
/// unit's `groups` groups, and of each group the numbers of u and v.
pub fn pair_place(row: u32, group: u32, groups: u32) -> u32 {
    let g = 2 * (row / 4) + row % 2;
    (g * groups + group) * 2 + row / 2 % 2
}

/// One row in the meaning of a packed tensor's codes.
struct Row {
    codes: Vec<u8>,
    scales: Vec<f32>,
    minimums: Vec<f32>,
    factor: f32,
}

impl Row {
    fn new(codes: Codes, padded_cols: u32) -> Row {
        let groups = (padded_cols / codes.group) as usize;
        Row {
            codes: vec![0; padded_cols as usize],
            scales: vec![0.0; groups],
            minimums: vec![0.0; groups],
            factor: 1.0,
        }
    }

    /// Reads a source's row; `None` gives zeros. Afterwards scales and minimums are those that are stored.
    fn read(&mut self, line: Option<Line<'_>>, codes: Codes) -> Result<(), BadGroup> {
        self.decode(line.as_ref(), codes, 0..self.codes.len())?;
        self.finish(line.as_ref(), codes)
    }

    /// Decodes those of the row's columns that are among `columns`, and their groups; other columns become zero.
    /// `columns` is all, or, of a line that is divisible, a multiple of [`CHUNK`] or up to the last.
    fn decode(&mut self, line: Option<&Line<'_>>, codes: Codes, columns: Range<usize>) -> Result<(), BadGroup> {
        let cols = line.map_or(0, |line| line.cols);
        let here = columns.start..cols.clamp(columns.start, columns.end);
        // A group has a power of two columns.
        let group_at = |col: usize| col >> codes.group.trailing_zeros();
        let groups = group_at(here.start)..group_at(here.end + codes.group as usize - 1);
        let unused = groups.end..group_at(columns.end);
        if here.end < columns.end {
            self.codes[here.end..columns.end].fill(0);
            self.scales[unused.clone()].fill(0.0);
            self.minimums[unused].fill(0.0);
        }
        let Some(line) = line.filter(|_| !here.is_empty()) else { return Ok(()) };
        let scales = &mut self.scales[groups.clone()];
        let minimums = &mut self.minimums[if has_minimums(codes, line) { groups } else { 0..0 }];
        let to = &mut self.codes[here.clone()];
        match line.format.codes() {
            Some(from) if from.group == codes.group => line.decode(here, to, scales, minimums)?,
            Some(from) => {
                let mut numbers = vec![0.0; 2 * from.groups(here.len())];
                let (wide_scales, wide_minimums) = numbers.split_at_mut(from.groups(here.len()));
                let wide_minimums = if minimums.is_empty() { &mut [] } else { wide_minimums };
                line.decode(here, to, wide_scales, wide_minimums)?;
                let each = (from.group / codes.group) as usize;
                scales.chunks_mut(each).zip(wide_scales).for_each(|(to, x)| to.fill(*x));
                minimums.chunks_mut(each).zip(wide_minimums).for_each(|(to, x)| to.fill(*x));
            }
            None => {
                let mut numbers = vec![0.0f32; cols];
                line.floats(&mut numbers)?;
                match codes {
                    INT8 => quantize::int8(&numbers, to, scales),
                    INT4 => quantize::int4(&numbers, to, scales, minimums),
                    _ => panic!("numbers are quantised to int8 or int4, not to {codes:?}"),
                }
            }
        }
        if cols <= columns.end {
            self.pad(codes, cols);
        }
        Ok(())
    }

    /// Turns scales and minimums of a decoded row into those that are stored.
    fn finish(&mut self, line: Option<&Line<'_>>, codes: Codes) -> Result<(), BadGroup> {
        self.factor = 1.0;
        let Some(line) = line else { return Ok(()) };
        let groups = codes.groups(line.cols);
        if let Some(from) = line.format.codes() {
            let minimums = if has_minimums(codes, line) { &self.minimums[..groups] } else { &[] };
            let finite = from.finite(&self.scales[..groups], minimums);
            let each = (from.group / codes.group) as usize;
            finite.map_err(|bad| BadGroup { group: bad.group / each, ..bad })?;
        }
        let exponent = |x: f32| if x > 0.0 && x.is_finite() { Some(exponent_of(x)) } else { None };
        let shift = value_exponent(codes.number);
        let stored = codes.minimum == Minimum::Stored;
        let (scale, minimum) = wide(
            #[inline(always)]
            || (largest(&self.scales), if stored { largest(&self.minimums) } else { 0.0 }),
        );
        let scales = exponent(scale).map(|e| e + shift - scale_exponent(codes.number));
        let minimums = exponent(minimum).map(|e| e - 14);
        let power = scales.max(minimums).unwrap_or(0).clamp(-126, 127);
        let first = self.scales[0];
        let same = groups > 0 && self.scales[..groups].iter().all(|scale| scale.to_bits() == first.to_bits());
        let mut factor = power_of_two(power);
        let unit = if same { first.abs() } else { line.unit().abs() };
        if let Some(exponent) = exponent(unit) {
            // The unit's significant bits go to the factor, unless that leaves the range of f32.
            let significant = f64::from(unit) * power_of_two(-exponent);
            if (f32::MIN_POSITIVE.into()..f32::MAX.into()).contains(&(factor * significant)) {
                factor *= significant;
            }
        }
        self.factor = factor as f32;
        wide(
            #[inline(always)]
            || {
                multiply(&mut self.scales, power_of_two(shift) / factor);
                if stored {
                    multiply(&mut self.minimums, 1.0 / factor);
                }
            },
        );
        Ok(())
    }
}

impl Row {
    /// Sets minimums near the middle of the values of an affine code. Scales count value · 2⁻ᵉ.
    fn centre(&mut self, codes: Codes) {
        for (minimum, scale) in self.minimums.iter_mut().zip(&self.scales) {
            *minimum = *scale * 2f32.powi(codes.bits as i32 - 1 - value_exponent(codes.number));
        }
    }

    /// Returns the number in a column, without the row's factor, before scales and minimums are rounded.
    fn number(&self, codes: Codes, col: usize) -> f64 {
        let group = col / codes.group as usize;
        let (scale, shift) = (f64::from(self.scales[group]), value_exponent(codes.number));
        let minimum = match codes.minimum {
            Minimum::Stored => f64::from(self.minimums[group]),
            Minimum::Zero { halves } => scale * f64::from(halves) * 2f64.powi(-1 - shift),
        };
        f64::from(codes.number.table()[usize::from(self.codes[col])]) * 2f64.powi(-shift) * scale - minimum
    }

    /// Gives the columns beyond `cols` of a group that has fewer columns than others the code nearest to zero: their
    /// scale is not zero.
    fn pad(&mut self, codes: Codes, cols: usize) {
        let end = codes.groups(cols) * codes.group as usize;
        if codes.number != Number::Affine || end == cols {
            return;
        }
        let last = end / codes.group as usize - 1;
        let zero = match (codes.minimum, self.scales[last], self.minimums[last]) {
            (Minimum::Zero { halves }, ..) => f32::from(halves) * 0.5,
            (Minimum::Stored, scale, minimum) if scale != 0.0 => minimum / scale,
            _ => 0.0,
        };
        // A conversion to an integer saturates.
        let zero = (zero.round() as u8).min(((1u32 << codes.bits) - 1) as u8);
        self.codes[cols..end].fill(zero);
    }
}

/// Whether minimums of a line are decoded: where they are stored, or do not follow from the scales after a product.
fn has_minimums(codes: Codes, line: &Line<'_>) -> bool {
    codes.minimum == Minimum::Stored || matches!(line.format, SourceFormat::ScaledBlocks(..))
}

/// Returns e with 2ᵉ ≤ x < 2ᵉ⁺¹, for a finite x above zero.
fn exponent_of(x: f32) -> i32 {
    let bits = x.to_bits();
    match bits >> 23 {
        0 => -118 - bits.leading_zeros() as i32,
        e => e as i32 - 127,
    }
}

/// Returns 2ᵉ, for a normal f64.
fn power_of_two(e: i32) -> f64 {
    f64::from_bits(((1023 + e) as u64) << 52)
}

/// Returns the largest absolute value, of those that are numbers.
#[inline(always)]
fn largest(numbers: &[f32]) -> f32 {
    let most = quant::largest(numbers);
    if most.is_nan() { numbers.iter().fold(0.0, |most, x| most.max(x.abs())) } else { most }
}

/// Multiplies numbers by a factor, and rounds the products once.
#[inline(always)]
fn multiply(numbers: &mut [f32], by: f64) {
    let narrow = by as f32;
    if f64::from(narrow) == by {
        numbers.iter_mut().for_each(|x| *x *= narrow);
    } else {
        numbers.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
    }
}

/// Implements [`super::pack`] for codes; `start` is the part's first byte and a multiple of the tensor's unit.
pub(super) fn pack_codes(
    packing: &Packing,
    codes: Codes,
    sources: &[Rows<'_>],
    start: u64,
    out: &mut [u8],
) -> Result<(), BadRow> {
    let padded = packing.padded_cols();
    let line = |row: u32| sources.iter().find_map(|s| s.line(row));
    let row_bytes = row_bytes(codes, packing.layout, padded);
    match packing.layout {
        Layout::RowMajor { .. } => {
            let mut row = Row::new(codes, padded);
            let first = (start / row_bytes) as u32;
            for (index, out) in (first..).zip(out.chunks_exact_mut(row_bytes as usize)) {
                row.read(line(index), codes).map_err(|group| BadRow { row: index, group })?;
                write_row(codes, &row, out);
            }
        }
        Layout::Fragments => {
            let block_bytes = row_bytes * u64::from(FRAGMENT_ROWS);
            let first = (start / block_bytes) as u32;
            let mut pair = [Row::new(codes, padded), Row::new(codes, padded)];
            let mut room = Room::new();
            // Rows beyond the last one are zeros.
            let line = |index: u32| if index < packing.rows { line(index) } else { None };
            for (block, out) in (first..).zip(out.chunks_exact_mut(block_bytes as usize)) {
                let first = block * FRAGMENT_ROWS;
                for u in (0..FRAGMENT_ROWS).filter(|row| row / 2 % 2 == 0) {
                    let indices = [first + u, first + u + 2];
                    if read_pair(codes, indices.map(line), &mut pair, u, &mut room, out).is_err() {
                        // The block's first bad row may be in a later pair.
                        for index in first..first + FRAGMENT_ROWS {
                            pair[0].read(line(index), codes).map_err(|group| BadRow { row: index, group })?;
                        }
                    }
                    for (row, index) in pair.iter_mut().zip(indices) {
                        row.factor = if index < packing.rows { row.factor } else { 0.0 };
                    }
                    write_numbers(codes, u, [&pair[0], &pair[1]], &mut room, out);
                }
            }
        }
    }
    Ok(())
}

/// Reads the rows u and v = u + 2 of a block of 16 rows and writes their codes into the block, some columns after the other:
/// what is decoded stays in the nearest cache, and the processor fetches further bytes of the file meanwhile.
fn read_pair(
    codes: Codes,
    lines: [Option<Line<'_>>; 2],
    pair: &mut [Row; 2],
    u: u32,
    room: &mut Room,
    out: &mut [u8],
) -> Result<(), BadGroup> {
    let padded = pair[0].codes.len();
    let (unit, bytes) = (unit_cols(codes) as usize, fragment_unit_bytes(codes) as usize);
    let divisible = lines.iter().flatten().all(Line::is_divisible);
    let chunk = if divisible { CHUNK } else { padded };
    for start in (0..padded).step_by(chunk) {
        let columns = start..padded.min(start + chunk);
        for (row, line) in pair.iter_mut().zip(&lines) {
            row.decode(line.as_ref(), codes, columns.clone())?;
        }
        let unit_at = |col: usize| BLOCK_HEADER as usize + col / unit * bytes;
        let units = &mut out[unit_at(columns.start)..unit_at(columns.end)];
        let rows = [&pair[0].codes[columns.clone()], &pair[1].codes[columns]];
        write_planes(codes.bits, (unit, bytes), u, rows, &mut room.words, units);
    }
    pair.iter_mut().zip(&lines).try_for_each(|(row, line)| row.finish(line.as_ref(), codes))
}

/// Writes a row of a row-major tensor.
fn write_row(codes: Codes, row: &Row, out: &mut [u8]) {
    out[..4].copy_from_slice(&row.factor.to_le_bytes());
    out[4..ROW_HEADER as usize].fill(0);
    let mut rest = &mut out[ROW_HEADER as usize..];
    for (plane, shift) in planes(codes.bits) {
        let (to, after) = rest.split_at_mut(row.codes.len() * plane as usize / 8);
        rest = after;
        match plane {
            8 => to.copy_from_slice(&row.codes),
            4 => join::<2>(&row.codes, to, |two| {
                let x = u16::from_le_bytes(two) >> shift & 0x0f0f;
                (x | x >> 4) as u8
            }),
            2 => join::<4>(&row.codes, to, |four| {
                let x = u32::from_le_bytes(four) >> shift & 0x0303_0303;
                let x = x | x >> 6;
                (x | x >> 12) as u8
            }),
            _ => join::<8>(&row.codes, to, |eight| {
                let x = u64::from_le_bytes(eight) >> shift & 0x0101_0101_0101_0101;
                let x = x | x >> 7;
                let x = x | x >> 14;
                (x | x >> 28) as u8
            }),
        }
    }
    let stored = codes.minimum == Minimum::Stored;
    let mut halves = Vec::new();
    for numbers in [Some(&row.scales), stored.then_some(&row.minimums)].into_iter().flatten() {
        let (to, after) = rest.split_at_mut(2 * numbers.len());
        rest = after;
        round(numbers, &mut halves);
        to.as_chunks_mut::<2>().0.iter_mut().zip(&halves).for_each(|(to, half)| *to = half.to_le_bytes());
    }
    rest.fill(0);
}

/// Writes a byte for each `EACH` codes.
#[inline(always)]
fn join<const EACH: usize>(codes: &[u8], to: &mut [u8], byte: impl Fn([u8; EACH]) -> u8) {
    to.iter_mut().zip(codes.as_chunks::<EACH>().0).for_each(|(to, codes)| *to = byte(*codes));
}

/// Rounds numbers to f16: a whole slice, because the processor has instructions for that.
fn round(numbers: &[f32], halves: &mut Vec<f16>) {
    halves.resize(numbers.len(), f16::ZERO);
    halves.convert_from_f32_slice(numbers);
}

/// Room for what is made of two rows.
struct Room {
    /// Words of a plane ([`Plane::words`]).
    words: [u32; CHUNK / 2],
    /// The scales or minimums in f16.
    halves: [Vec<f16>; 2],
    /// Those of both, in the words of [`pair_place`].
    pairs: Vec<[u8; 4]>,
}

impl Room {
    fn new() -> Room {
        Room { words: [0; CHUNK / 2], halves: [Vec::new(), Vec::new()], pairs: Vec::new() }
    }

    /// Joins the numbers of rows u and v, a word for each group.
    fn join(&mut self, u: &[f32], v: &[f32]) -> &[[u8; 4]] {
        let [above, below] = &mut self.halves;
        round(u, above);
        round(v, below);
        self.pairs.resize(u.len(), [0; 4]);
        let words = &mut self.pairs;
        wide(
            #[inline(always)]
            || {
                for ((word, u), v) in words.iter_mut().zip(above).zip(below) {
                    *word = (u32::from(u.to_bits()) | u32::from(v.to_bits()) << 16).to_le_bytes();
                }
            },
        );
        words
    }
}

/// Writes adjacent columns of the rows u and v = u + 2 of a block of 16 rows, which lie in the same lanes, into the columns'
/// units: what [`fragment_place`] describes, a word at a time. A unit has `cols` columns and `bytes` bytes; `rows` has the
/// codes of the same whole units.
fn write_planes(
    bits: u32,
    (cols, bytes): (usize, usize),
    u: u32,
    rows: [&[u8]; 2],
    words: &mut [u32; CHUNK / 2],
    units: &mut [u8],
) {
    let g = (2 * (u / 4) + u % 2) as usize;
    let of_chunk = CHUNK / cols * bytes;
    for ((u, v), units) in rows[0].chunks(CHUNK).zip(rows[1].chunks(CHUNK)).zip(units.chunks_mut(of_chunk)) {
        let mut at = 0;
        for (plane, shift) in planes(bits) {
            let to = Plane { units, cols, bytes, at, g, words };
            wide(
                #[inline(always)]
                || match plane {
                    8 => to.write_bytes(u, v),
                    4 => to.write::<4>(u, v, shift),
                    2 => to.write::<2>(u, v, shift),
                    _ => to.write::<1>(u, v, shift),
                },
            );
            at += FRAGMENT_ROWS as usize * cols * plane as usize / 8;
        }
    }
}

/// Returns four codes in the order of a word's bytes: the second and the third change places.
#[inline(always)]
fn in_order(four: &[u8; 4]) -> u32 {
    let x = u32::from_le_bytes(*four);
    x & 0xff00_00ff | x >> 8 & 0xff00 | x << 8 & 0xff_0000
}

/// The place of two rows in a plane of units.
struct Plane<'a> {
    /// The units of at most [`CHUNK`] columns: `cols` columns and `bytes` each.
    units: &'a mut [u8],
    cols: usize,
    bytes: usize,
    /// The plane's first byte in a unit.
    at: usize,
    /// The rows' lanes are 4g .. 4g + 4.
    g: usize,
    /// Room for words before they are in the order of the lanes.
    words: &'a mut [u32; CHUNK / 2],
}

impl Plane<'_> {
    /// Calls `write` for each run of adjacent lanes of the rows, 4 of the plane's 32, with the next `WORDS` words. A unit has
    /// `words`.
    #[inline(always)]
    fn each<const WORDS: usize>(self, words: usize, write: impl Fn(&[u32; WORDS], usize) -> [u32; 4]) {
        for (unit, words) in self.units.chunks_exact_mut(self.bytes).zip(self.words.chunks_exact(words)) {
            let (lanes, _) = unit[self.at + 64 * self.g..].as_chunks_mut::<16>();
            for (lanes, words) in lanes.chunks_mut(32).zip(words.as_chunks::<WORDS>().0) {
                for (t, lane) in lanes[..4].iter_mut().enumerate() {
                    lane.copy_from_slice(write(words, t).map(u32::to_le_bytes).as_flattened());
                }
            }
        }
    }

    /// Writes a plane of `BITS` bits (1, 2 or 4), which are at bit `shift` of the codes of rows u and v.
    #[inline(always)]
    fn write<const BITS: u32>(self, u: &[u8], v: &[u8], shift: u32) {
        let mask = 0x0101_0101 * ((1 << BITS) - 1);
        // Four columns are a half of a lane's columns in a block.
        for ((half, u), v) in self.words.iter_mut().zip(u.as_chunks::<4>().0).zip(v.as_chunks::<4>().0) {
            *half = in_order(u) >> shift & mask | (in_order(v) >> shift & mask) << BITS;
        }
        let words = self.cols / 4;
        match BITS {
            4 => self.each(words, |two: &[u32; 16], t| [two[2 * t], two[2 * t + 1], two[2 * t + 8], two[2 * t + 9]]),
            2 => self.each(words, |four: &[u32; 32], t| {
                let word = |block: usize| four[8 * block + 2 * t] | four[8 * block + 2 * t + 1] << 4;
                [word(0), word(1), word(2), word(3)]
            }),
            _ => self.each(words, |eight: &[u32; 64], t| {
                let block = |block: usize| eight[8 * block + 2 * t] | eight[8 * block + 2 * t + 1] << 2;
                let word = |two: usize| block(2 * two) | block(2 * two + 1) << 4;
                [word(0), word(1), word(2), word(3)]
            }),
        }
    }

    /// Writes a plane of 8 bits.
    #[inline(always)]
    fn write_bytes(self, u: &[u8], v: &[u8]) {
        let halves = self.words.as_chunks_mut::<2>().0;
        for ((half, u), v) in halves.iter_mut().zip(u.as_chunks::<4>().0).zip(v.as_chunks::<4>().0) {
            *half = [in_order(u), in_order(v)];
        }
        let words = self.cols / 2;
        self.each(words, |block: &[u32; 16], t| [block[4 * t], block[4 * t + 1], block[4 * t + 2], block[4 * t + 3]]);
    }
}

/// Writes the factors, scales and minimums of the rows u and v = u + 2 of a block of 16 rows into the block: what
/// [`pair_place`] describes, a word at a time.
fn write_numbers(codes: Codes, u: u32, rows: [&Row; 2], room: &mut Room, out: &mut [u8]) {
    let (header, units) = out.split_at_mut(BLOCK_HEADER as usize);
    header[FRAGMENT_ROWS as usize * 4..].fill(0);
    for (index, row) in [u, u + 2].into_iter().zip(rows) {
        header[index as usize * 4..][..4].copy_from_slice(&row.factor.to_le_bytes());
    }
    let (unit, unit_bytes) = (unit_cols(codes), fragment_unit_bytes(codes) as usize);
    let groups = (unit / codes.group) as usize;
    let g = (2 * (u / 4) + u % 2) as usize;
    // Behind a unit's planes are the 8 pairs' scales, then their minimums.
    let mut at = (FRAGMENT_ROWS * unit * codes.bits / 8) as usize + 4 * g * groups;
    let mut numbers = |words: &[[u8; 4]]| {
        let places = units.chunks_exact_mut(unit_bytes).map(|unit| &mut unit[at..]);
        match groups {
            1 => copy_words::<1>(words, places),
            2 => copy_words::<2>(words, places),
            4 => copy_words::<4>(words, places),
            8 => copy_words::<8>(words, places),
            _ => copy_words::<16>(words, places),
        }
        at += 4 * 8 * groups;
    };
    numbers(room.join(&rows[0].scales, &rows[1].scales));
    if codes.minimum == Minimum::Stored {
        numbers(room.join(&rows[0].minimums, &rows[1].minimums));
    }
}

/// Copies `N` words to each place. Such small copies take longer where their size is not known.
fn copy_words<'a, const N: usize>(words: &[[u8; 4]], places: impl Iterator<Item = &'a mut [u8]>) {
    for (words, place) in words.as_chunks::<N>().0.iter().zip(places) {
        place.as_chunks_mut::<4>().0[..N].copy_from_slice(words);
    }
}

/// Returns a packed tensor of `rows` rows and `cols` columns, in which every code that stands for a finite number
/// occurs among any 256 adjacent columns of 16 rows, in an order that looks random; scales are positive and negative and
/// of different sizes. For tests of kernels.
pub fn sample(codes: Codes, layout: Layout, rows: u32, cols: u32) -> Vec<u32> {
    let finite = finite(codes);
    let largest = 2f32.powi(scale_exponent(codes.number));
    write_rows(codes, layout, (rows, cols), |index, row| {
        for (col, code) in (0..).zip(&mut row.codes[..cols as usize]) {
            // Odd multipliers visit every remainder of a power of two.
            *code = finite[(col * 0x9e37 + index * 16 + col / 256) as usize % finite.len()];
        }
        for (group, scale) in (0..).zip(&mut row.scales) {
            let size = largest * (1.0 + (group * 5 + index) as f32 % 7.0 / 8.0) / (1 << (group % 3)) as f32;
            *scale = if (group + index).is_multiple_of(2) { size } else { -size };
        }
        row.centre(codes);
        // Weights of wide number formats must not overflow f16 when they are multiplied by their row's factor.
        let wide = matches!(codes.number, Number::E4m3 | Number::E5m2);
        row.factor = 2f32.powi(index as i32 % 3 - if wide { 12 } else { 0 });
    })
}

/// Returns a packed tensor of `rows` rows and `cols` columns of random codes, whose numbers have mean 0 and the standard
/// deviation `deviation` in each row. `random` returns random bits.
pub fn random(
    codes: Codes,
    layout: Layout,
    (rows, cols): (u32, u32),
    deviation: f32,
    random: &mut dyn FnMut() -> u64,
) -> Vec<u32> {
    let finite = finite(codes);
    let largest = 2f32.powi(scale_exponent(codes.number));
    write_rows(codes, layout, (rows, cols), |_, row| {
        for code in &mut row.codes[..cols as usize] {
            *code = finite[(random() % finite.len() as u64) as usize];
        }
        for scale in &mut row.scales {
            let bits = random();
            let size = largest * (0.5 + (bits >> 40) as f32 / 2f32.powi(25));
            *scale = if bits & 1 == 0 { size } else { -size };
        }
        row.centre(codes);
        let square = |col: usize| row.number(codes, col).powi(2);
        let mean = (0..cols as usize).map(square).sum::<f64>() / f64::from(cols);
        row.factor = (f64::from(deviation) / mean.sqrt().max(f64::MIN_POSITIVE)) as f32;
    })
}

/// Returns the codes that stand for finite numbers.
fn finite(codes: Codes) -> Vec<u8> {
    (0..1u32 << codes.bits).map(|code| code as u8).filter(|code| codes.number.is_finite(*code)).collect()
}

/// Returns a packed tensor whose rows `fill` writes, given their numbers; it begins with rows of zeros.
fn write_rows(codes: Codes, layout: Layout, (rows, cols): (u32, u32), mut fill: impl FnMut(u32, &mut Row)) -> Vec<u32> {
    let packing = Packing { rows, cols, layout, format: super::Format::Codes(codes) };
    let padded = packing.padded_cols();
    let mut out = vec![0u8; packing.bytes() as usize];
    let bytes = row_bytes(codes, layout, padded) as usize;
    let mut row_of = |index: u32| {
        let mut row = Row::new(codes, padded);
        if index >= rows {
            row.factor = 0.0;
            return row;
        }
        fill(index, &mut row);
        row
    };
    match layout {
        Layout::RowMajor { .. } => {
            for (index, out) in (0..rows).zip(out.chunks_exact_mut(bytes)) {
                write_row(codes, &row_of(index), out);
            }
        }
        Layout::Fragments => {
            let mut room = Room::new();
            for (block, out) in (0..).zip(out.chunks_exact_mut(bytes * FRAGMENT_ROWS as usize)) {
                for u in (0..FRAGMENT_ROWS).filter(|row| row / 2 % 2 == 0) {
                    let [first, second] = [u, u + 2].map(|row| row_of(block * FRAGMENT_ROWS + row));
                    let unit = (unit_cols(codes) as usize, fragment_unit_bytes(codes) as usize);
                    let rows = [&first.codes[..], &second.codes];
                    write_planes(codes.bits, unit, u, rows, &mut room.words, &mut out[BLOCK_HEADER as usize..]);
                    write_numbers(codes, u, [&first, &second], &mut room, out);
                }
            }
        }
    }
    out.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// Returns the weight in row `row` and column `col` of a packed tensor: the reference of what kernels read. `word`
/// returns a 32-bit word of the tensor.
pub fn element(
    codes: Codes,
    layout: Layout,
    padded_cols: u32,
    (row, col): (u32, u32),
    word: impl Fn(u64) -> u32,
) -> f32 {
    let bytes = row_bytes(codes, layout, padded_cols);
    let half = |at: u64| f16::from_bits((word(at / 2) >> (16 * (at % 2))) as u16).to_f32();
    let stored = |at: u64| if codes.minimum == Minimum::Stored { half(at) } else { 0.0 };
    let group = col / codes.group;
    let mut code = 0;
    let (factor, scale, minimum) = match layout {
        Layout::RowMajor { .. } => {
            let first = u64::from(row) * bytes / 4;
            let mut at = first + ROW_HEADER / 4;
            for (plane, shift) in planes(codes.bits) {
                let each = 32 / plane;
                let bits = word(at + u64::from(col / each)) >> (col % each * plane);
                code |= (bits & ((1 << plane) - 1)) << shift;
                at += u64::from(padded_cols / each);
            }
            let scale = at * 2 + u64::from(group);
            (f32::from_bits(word(first)), half(scale), stored(scale + u64::from(padded_cols / codes.group)))
        }
        Layout::Fragments => {
            let (unit, index) = (unit_cols(codes), row % FRAGMENT_ROWS);
            let block = u64::from(row / FRAGMENT_ROWS) * bytes * u64::from(FRAGMENT_ROWS) / 4;
            let groups = unit / codes.group;
            let mut at = block + BLOCK_HEADER / 4 + u64::from(col / unit * (fragment_unit_bytes(codes) / 4));
            for (plane, shift) in planes(codes.bits) {
                let (place, bits) = fragment_place(plane, index, col % unit / 4);
                let bits = word(at + u64::from(place)) >> bits[col as usize % 4];
                code |= (bits & ((1 << plane) - 1)) << shift;
                at += u64::from(FRAGMENT_ROWS * unit * plane / 32);
            }
            let scale = at * 2 + u64::from(pair_place(index, group % groups, groups));
            (f32::from_bits(word(block + u64::from(index))), half(scale), stored(scale + u64::from(16 * groups)))
        }
    };
    let shift = value_exponent(codes.number);
    let number = f64::from(codes.number.table()[code as usize]);
    let minimum = match codes.minimum {
        Minimum::Stored => f64::from(minimum),
        Minimum::Zero { halves } => f64::from(scale) * f64::from(halves) * 2f64.powi(-1 - shift),
    };
    (f64::from(factor) * (number * 2f64.powi(-shift) * f64::from(scale) - minimum)) as f32
}

#[cfg(test)]
mod tests {
    use super::super::{Format, RowMap, pack};
    use super::*;
    use crate::quant::blocks::BlockType;

    const LAYOUTS: [Layout; 2] = [Layout::RowMajor { columns_multiple: 8 }, Layout::Fragments];

    /// Returns numbers between -1 and 1 that look random, some rows larger by a power of two.
    fn numbers(rows: u32, cols: u32, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..rows)
            .flat_map(|row| (0..cols).map(move |_| row))
            .map(|row| next() * 2f32.powi(row as i32 % 5 * 4 - 8))
            .collect()
    }

    fn blocks_of(kind: BlockType, numbers: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; numbers.len() / kind.elements() * kind.bytes()];
        kind.quantize(numbers, &mut bytes);
        bytes
    }

    fn source(bytes: &[u8], kind: BlockType, rows: u32, cols: u32) -> Rows<'_> {
        let format = SourceFormat::Blocks(kind);
        Rows { bytes, map: RowMap::whole(format, rows, cols) }
    }

    fn words(packing: &Packing, sources: &[Rows<'_>]) -> Vec<u32> {
        let mut out = vec![0xa5; packing.bytes() as usize];
        pack(packing, sources, 0..packing.bytes(), &mut out).expect("finite values");
        out.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    fn read(packing: &Packing, words: &[u32], row: u32, col: u32) -> f32 {
        let Format::Codes(codes) = packing.format else { unreachable!("codes") };
        element(codes, packing.layout, packing.padded_cols(), (row, col), |word| words[word as usize])
    }

    /// A sample has every code that stands for a finite number among any 256 columns of a block of rows.
    #[test]
    fn samples_have_every_code() {
        for (kind, layout) in BlockType::ALL.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout))) {
            let codes = kind.codes();
            let (rows, cols) = (FRAGMENT_ROWS, 256);
            let packing = Packing { rows, cols, layout, format: Format::Codes(codes) };
            let words = sample(codes, layout, rows, cols);
            assert_eq!(words.len() as u64 * 4, packing.bytes());
            // The first group of each row has one scale and one minimum.
            let values = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
            let group = |(row, col): (u32, u32)| (row, col / codes.group);
            let mut found = std::collections::BTreeMap::<_, std::collections::BTreeSet<u32>>::new();
            for place in values {
                let value = read(&packing, &words, place.0, place.1);
                assert!(value.is_finite(), "{kind:?} {layout:?}: {value}");
                found.entry(group(place)).or_default().insert(value.to_bits());
            }
            let distinct = found.values().map(|values| values.len()).sum::<usize>();
            let all = (1usize << codes.bits).min(codes.group as usize);
            assert!(
                distinct >= found.len() * all * 3 / 4,
                "{kind:?} {layout:?}: {distinct} values in {} groups",
                found.len()
            );
        }
    }

    /// Every type of block, in both layouts, has the numbers that it had in the file, but for the rounding of scales and
    /// minimums to f16; padding is zero.
    #[test]
    fn packed_blocks_are_the_numbers_of_the_file() {
        for kind in BlockType::ALL {
            let cols = (kind.elements() as u32 * 3).max(96);
            let rows = 21;
            let bytes = blocks_of(kind, &numbers(rows, cols, 7));
            let mut wanted = vec![0.0; (rows * cols) as usize];
            kind.dequantize(&bytes, &mut wanted);
            for layout in LAYOUTS {
                let packing = Packing { rows, cols, layout, format: Format::Codes(kind.codes()) };
                let words = words(&packing, &[source(&bytes, kind, rows, cols)]);
                for row in 0..rows {
                    let line = &wanted[(row * cols) as usize..][..cols as usize];
                    let largest = line.iter().fold(0f32, |most, x| most.max(x.abs()));
                    for col in 0..packing.padded_cols() {
                        let (found, wanted) = (read(&packing, &words, row, col), line.get(col as usize).copied());
                        let limit = largest * 2f32.powi(-9);
                        assert!(
                            (found - wanted.unwrap_or(0.0)).abs() <= if wanted.is_some() { limit } else { 0.0 },
                            "{kind} {layout:?} {row} {col}: {found}, not {wanted:?}"
                        );
                    }
                }
            }
        }
    }

    /// Formats whose files have f16 scales lose nothing.
    #[test]
    fn f16_scales_are_kept_exactly() {
        for kind in [BlockType::Q4_0, BlockType::Q5_0, BlockType::Q8_0, BlockType::IQ4_NL, BlockType::MXFP4] {
            let (rows, cols) = (17, 256);
            let bytes = blocks_of(kind, &numbers(rows, cols, 8));
            let mut wanted = vec![0.0; (rows * cols) as usize];
            kind.dequantize(&bytes, &mut wanted);
            for layout in LAYOUTS {
                let packing = Packing { rows, cols, layout, format: Format::Codes(kind.codes()) };
                let words = words(&packing, &[source(&bytes, kind, rows, cols)]);
                for (i, wanted) in (0..).zip(&wanted) {
                    assert_eq!(read(&packing, &words, i / cols, i % cols), *wanted, "{kind} {layout:?} {i}");
                }
            }
        }
    }

    /// Every code, scale and minimum of rows that are longer than a chunk lies where the layout says, for each number of bits
    /// and size of a group.
    #[test]
    fn long_rows_are_exact() {
        let (rows, cols) = (21, 2 * CHUNK as u32 + 200);
        let groups = [16, 32, 64, 128].into_iter().flat_map(|group| [(group, true), (group, false)]);
        for (bits, (group, stored)) in [2, 3, 4, 5, 6, 8].into_iter().flat_map(|b| groups.clone().map(move |g| (b, g)))
        {
            let zero = 1 << (bits - 1);
            let minimum = if stored { Minimum::Stored } else { Minimum::Zero { halves: 2 * zero } };
            let codes = Codes { bits, group, number: Number::Affine, minimum };
            let code =
                |row: u32, col: u32| ((col * 0x9e37 + row * 77 + col / 31) >> 3) as u8 & ((1u32 << bits) - 1) as u8;
            // 11 bits, which f16 keeps, and powers of two.
            let scale = |row: u32, group: u32| {
                let size = (1024 + (group * 37 + row * 11) % 1024) as f32 * 2f32.powi(-(group as i32 % 3));
                if group.is_multiple_of(5) { -size } else { size }
            };
            let least = |row: u32, group: u32| scale(row + 3, group + 1) * f32::from(zero);
            let line = |row: u32| {
                let numbers: Vec<u8> = (0..cols).map(|col| code(row, col)).collect();
                let all = 0..codes.groups(cols as usize) as u32;
                let scales: Vec<f32> = all.clone().map(|group| scale(row, group)).collect();
                let minimums: Vec<f32> = all.filter(|_| stored).map(|group| least(row, group)).collect();
                let mut out = vec![0; codes.canonical_bytes(cols as usize)];
                codes.write_canonical(&numbers, &scales, &minimums, 1.0, &mut out);
                out
            };
            let bytes: Vec<u8> = (0..rows).flat_map(line).collect();
            for layout in LAYOUTS {
                let packing = Packing { rows, cols, layout, format: Format::Codes(codes) };
                let map = RowMap::whole(SourceFormat::Canonical(codes), rows, cols);
                let words = words(&packing, &[Rows { bytes: &bytes, map }]);
                for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                    let (number, scale) = (f32::from(code(row, col)), scale(row, col / group));
                    let minimum = if stored { least(row, col / group) } else { scale * f32::from(zero) };
                    let wanted = scale * number - minimum;
                    assert_eq!(read(&packing, &words, row, col), wanted, "{codes} {layout:?} {row} {col}");
                }
            }
        }
    }

    /// The first bad row is reported, in whatever order rows are read.
    #[test]
    fn the_first_bad_row_is_found() {
        let (kind, rows, cols) = (BlockType::Q8_0, 32, 64);
        let mut bytes = blocks_of(kind, &numbers(rows, cols, 4));
        let row_bytes = bytes.len() / rows as usize;
        for bad in [18, 17] {
            // The scale of the row's second block is infinite.
            bytes[bad * row_bytes + kind.bytes()..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
            for layout in LAYOUTS {
                let packing = Packing { rows, cols, layout, format: Format::Codes(kind.codes()) };
                let mut out = vec![0; packing.bytes() as usize];
                let found = pack(&packing, &[source(&bytes, kind, rows, cols)], 0..packing.bytes(), &mut out);
                let error = found.expect_err("a scale is infinite");
                assert_eq!((error.row as usize, error.group.group), (bad, 1), "{layout:?}");
            }
        }
    }

    /// Sources of several formats, with strides and steps, in the codes that they have in common.
    #[test]
    fn merged_sources_keep_their_numbers() {
        let (a, b) = (BlockType::Q4_K, BlockType::Q6_K);
        let cols = 512;
        let common = a.codes().common(b.codes()).expect("affine codes");
        assert_eq!((common.bits, common.group, common.minimum), (6, 16, Minimum::Stored));
        let (first, second) = (blocks_of(a, &numbers(20, cols, 1)), blocks_of(b, &numbers(7, cols, 2)));
        let (mut x, mut y) = (vec![0.0; 20 * cols as usize], vec![0.0; 7 * cols as usize]);
        a.dequantize(&first, &mut x);
        b.dequantize(&second, &mut y);
        let row_bytes = first.len() / 20;
        // Packed rows 0 to 9 are rows 0, 2, 4, … of the first tensor, rows 10, 12, … those of the second.
        let whole = |kind: BlockType, rows| RowMap::whole(SourceFormat::Blocks(kind), rows, cols);
        let sources = [
            Rows { bytes: &first[..row_bytes * 19], map: RowMap { stride: 2, ..whole(a, 10) } },
            Rows { bytes: &second, map: RowMap { first_row: 10, row_step: 2, ..whole(b, 7) } },
        ];
        for layout in LAYOUTS {
            let packing = Packing { rows: 24, cols, layout, format: Format::Codes(common) };
            let words = words(&packing, &sources);
            for row in 0..24 {
                let wanted = match row {
                    0..10 => &x[(row * 2 * cols) as usize..][..cols as usize],
                    _ if row % 2 == 0 && row < 24 => &y[((row - 10) / 2 * cols) as usize..][..cols as usize],
                    _ => &[][..],
                };
                let largest = wanted.iter().fold(0f32, |most, x| most.max(x.abs()));
                for col in 0..cols {
                    let wanted = wanted.get(col as usize).copied().unwrap_or(0.0);
                    let found = read(&packing, &words, row, col);
                    assert!(
                        (found - wanted).abs() <= largest * 2f32.powi(-9),
                        "{layout:?} {row} {col}: {found}, {wanted}"
                    );
                }
            }
        }
    }

    /// Columns of a row, from the first of a group on, have the numbers that they have in the whole row.
    #[test]
    fn some_columns_of_rows_keep_their_numbers() {
        let (rows, cols) = (19, 768);
        let same = |format: SourceFormat, codes: Codes, bytes: &[u8], (first, count): (u32, u32)| {
            let whole = RowMap::whole(format, rows, cols);
            let part = RowMap { first_col: first, used_cols: count, ..whole };
            for layout in LAYOUTS {
                let packing = |cols| Packing { rows, cols, layout, format: Format::Codes(codes) };
                let (all, some) = (packing(cols), packing(count));
                let wanted = words(&all, &[Rows { bytes, map: whole }]);
                let found = words(&some, &[Rows { bytes, map: part }]);
                for (row, col) in (0..rows).flat_map(|row| (0..count).map(move |col| (row, col))) {
                    let (found, wanted) = (read(&some, &found, row, col), read(&all, &wanted, row, first + col));
                    // Another largest scale of a row may round small ones differently.
                    let near = (found - wanted).abs() <= wanted.abs() * 2f32.powi(-11);
                    assert!(near, "{format} {layout:?} {row} {col}: {found}, {wanted}");
                }
            }
        };
        for kind in [BlockType::Q4_K, BlockType::Q6_K, BlockType::Q8_0, BlockType::MXFP4] {
            // Whole blocks, and groups within blocks.
            for part in [(256, 256), (32, 320)] {
                same(SourceFormat::Blocks(kind), kind.codes(), &blocks_of(kind, &numbers(rows, cols, 5)), part);
            }
        }
        for minimum in [Minimum::Zero { halves: 16 }, Minimum::Stored] {
            let codes = Codes { bits: 4, group: 128, number: Number::Affine, minimum };
            let line = |row: u32| {
                let line: Vec<u8> = (0..cols).map(|col| ((col * 7 + col / 128 + row) % 16) as u8).collect();
                let scales: Vec<f32> = (0..cols / 128).map(|group| 0.25 + (group * 3 + row) as f32).collect();
                let minimums: Vec<f32> = scales.iter().map(|scale| scale * 3.0).collect();
                let stored = if minimum == Minimum::Stored { &minimums[..] } else { &[] };
                let mut out = vec![0; SourceFormat::Canonical(codes).row_bytes(cols) as usize];
                codes.write_canonical(&line, &scales, stored, 1.0, &mut out);
                out
            };
            let bytes: Vec<u8> = (0..rows).flat_map(line).collect();
            same(SourceFormat::Canonical(codes), codes, &bytes, (256, 256));
        }
    }

    /// Columns beyond the last one are zero also where the last group has fewer columns than others, if the group has a
    /// code for zero.
    #[test]
    fn padding_of_a_short_group_is_zero() {
        let (rows, cols) = (3u32, 200u32);
        for (bits, minimum) in [
            (4, Minimum::Zero { halves: 16 }),
            (8, Minimum::Zero { halves: 256 }),
            (4, Minimum::Stored),
            (8, Minimum::Stored),
        ] {
            let codes = Codes { bits, group: 128, number: Number::Affine, minimum };
            let bytes: Vec<u8> = (0..rows)
                .flat_map(|row| {
                    let line: Vec<u8> = (0..cols).map(|col| ((col * 7 + row) % (1 << bits)) as u8).collect();
                    let scales = [0.25 + row as f32, 0.5 + row as f32];
                    let zeros = if minimum == Minimum::Stored { [3.0, 5.0] } else { [0.0; 2] };
                    let minimums: Vec<f32> = scales.iter().zip(zeros).map(|(scale, zero)| scale * zero).collect();
                    let stored = if minimum == Minimum::Stored { &minimums[..] } else { &[] };
                    let mut out = vec![0; SourceFormat::Canonical(codes).row_bytes(cols) as usize];
                    codes.write_canonical(&line, &scales, stored, 1.0, &mut out);
                    out
                })
                .collect();
            for layout in LAYOUTS {
                let packing = Packing { rows, cols, layout, format: Format::Codes(codes) };
                let format = SourceFormat::Canonical(codes);
                let source = Rows { bytes: &bytes, map: RowMap::whole(format, rows, cols) };
                let words = words(&packing, &[source]);
                for (row, col) in (0..rows).flat_map(|row| (cols..packing.padded_cols()).map(move |col| (row, col))) {
                    assert_eq!(read(&packing, &words, row, col), 0.0, "{codes:?} {layout:?} {row} {col}");
                }
            }
        }
    }

    /// Blocks with a factor have the numbers of the blocks multiplied by it, exactly.
    #[test]
    fn blocks_with_a_factor_are_multiplied() {
        let (kind, rows, cols, factor) = (BlockType::NVFP4, 17, 256, 0.001_234_5f32);
        let bytes = blocks_of(kind, &numbers(rows, cols, 9));
        let mut wanted = vec![0.0; (rows * cols) as usize];
        kind.dequantize(&bytes, &mut wanted);
        assert!(wanted.iter().any(|x| *x != 0.0));
        for layout in LAYOUTS {
            let packing = Packing { rows, cols, layout, format: Format::Codes(kind.codes()) };
            let format = SourceFormat::ScaledBlocks(kind, factor.to_bits());
            let words = words(&packing, &[Rows { bytes: &bytes, map: RowMap::whole(format, rows, cols) }]);
            for (i, wanted) in (0..).zip(&wanted) {
                let wanted = (f64::from(*wanted) * f64::from(factor)) as f32;
                let found = read(&packing, &words, i / cols, i % cols);
                assert!(
                    (found - wanted).abs() <= wanted.abs() * 2f32.powi(-22),
                    "{layout:?} {i}: {found:e}, {wanted:e}"
                );
            }
        }
    }

    /// Any cut into units gives the same bytes.
    #[test]
    fn parts_are_as_the_whole() {
        let kind = BlockType::Q5_K;
        let (rows, cols) = (40, 256);
        let bytes = blocks_of(kind, &numbers(rows, cols, 3));
        for layout in LAYOUTS {
            let packing = Packing { rows, cols, layout, format: Format::Codes(kind.codes()) };
            let mut whole = vec![0; packing.bytes() as usize];
            pack(&packing, &[source(&bytes, kind, rows, cols)], 0..packing.bytes(), &mut whole).unwrap();
            let unit = packing.unit_bytes();
            for begin in (0..packing.bytes()).step_by(unit as usize) {
                let mut part = vec![1; unit as usize];
                pack(&packing, &[source(&bytes, kind, rows, cols)], begin..begin + unit, &mut part).unwrap();
                assert_eq!(part, &whole[begin as usize..][..unit as usize], "{layout:?} {begin}");
            }
        }
    }

    /// Scales at the ends of f32's range, zeros and infinities neither panic nor become NaN where they are finite.
    #[test]
    fn rows_of_extreme_scales() {
        for scale in [0.0, f32::MIN_POSITIVE / 64.0, 1e-30, 1e-15, 1e15] {
            let numbers: Vec<f32> = (0..256).map(|i| (i as f32 - 128.0) / 128.0 * scale).collect();
            let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            for codes in [INT8, INT4] {
                for layout in LAYOUTS {
                    let packing = Packing { rows: 1, cols: 256, layout, format: Format::Codes(codes) };
                    let format = SourceFormat::Numbers(Format::F32);
                    let source = Rows { bytes: &bytes, map: RowMap::whole(format, 1, 256) };
                    let words = words(&packing, &[source]);
                    for (col, wanted) in (0..).zip(&numbers) {
                        let found = read(&packing, &words, 0, col);
                        let limit = scale.abs() * if codes == INT8 { 0.01 } else { 0.1 } + f32::MIN_POSITIVE;
                        assert!(
                            (found - wanted).abs() <= limit,
                            "{codes:?} {scale:e} {col}: {found:e}, not {wanted:e}"
                        );
                    }
                }
            }
        }
    }
}

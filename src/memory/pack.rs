//! The layouts of weights in device memory, and the pure functions that convert a checkpoint's rows into them. Any
//! contiguous part of a packed tensor can be produced separately, so that parts are packed in parallel and streamed.
//! Not here: files, threads, devices, and what a tensor means.

pub mod codes;

use crate::quant::blocks::BlockType;
use crate::quant::{BadGroup, Codes};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fmt;
use std::ops::Range;

/// The number format of a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE half precision, 2 bytes.
    F16,
    /// IEEE single precision, 4 bytes.
    F32,
    /// Codes with scales ([`codes`]).
    Codes(Codes),
}

impl Format {
    /// The size of one number in bytes.
    ///
    /// # Panics
    /// For codes, which do not have whole bytes each.
    pub const fn bytes(self) -> usize {
        match self {
            Format::Bf16 | Format::F16 => 2,
            Format::F32 => 4,
            Format::Codes(_) => panic!("codes have no whole bytes each"),
        }
    }

    /// The codes of a quantised format.
    pub const fn codes(self) -> Option<Codes> {
        match self {
            Format::Codes(codes) => Some(codes),
            _ => None,
        }
    }
}

/// The number format of a checkpoint's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceFormat {
    /// Numbers one after the other; never codes.
    Numbers(Format),
    /// Quantised blocks; a row is a whole number of them.
    Blocks(BlockType),
    /// Quantised blocks whose values are all multiplied by a factor; these are the bits of its f32.
    ScaledBlocks(BlockType, u32),
    /// Each number x is stored as -eˣ in f32.
    NegatedExp,
    /// Canonical rows, as [`Codes::write_canonical`] makes them: the loader decodes weights of several tensors into these.
    Canonical(Codes),
}

impl SourceFormat {
    /// The size in bytes of a row of `cols` columns.
    pub fn row_bytes(self, cols: u32) -> u64 {
        match self {
            SourceFormat::Numbers(format) => u64::from(cols) * format.bytes() as u64,
            SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) => {
                u64::from(cols) / blocks.elements() as u64 * blocks.bytes() as u64
            }
            SourceFormat::NegatedExp => u64::from(cols) * 4,
            SourceFormat::Canonical(codes) => codes.canonical_bytes(cols as usize) as u64,
        }
    }

    /// The codes of a quantised format.
    pub const fn codes(self) -> Option<Codes> {
        match self {
            SourceFormat::Numbers(_) | SourceFormat::NegatedExp => None,
            SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) => Some(blocks.codes()),
            SourceFormat::Canonical(codes) => Some(codes),
        }
    }
}

/// Adjacent columns of a stored matrix that are rows of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transposed {
    /// The number of elements in a row of the stored matrix.
    pub width: u32,
    /// The first of the columns.
    pub first: u32,
}

/// Writes the numbers of a stored row in f32 to `out`, which has room for exactly those.
///
/// # Errors
/// If a quantised row has values that are not finite. `out` then has any content.
pub fn floats(format: SourceFormat, row: &[u8], out: &mut [f32]) -> Result<(), BadGroup> {
    Line { bytes: row, format, stored: out.len(), first: 0, cols: out.len(), plus: 0.0 }.floats(out)
}

/// A row of a quantised source that does not have finite values.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("row {row}, group {}, has scale {} and minimum {}: its values are not finite", group.group, group.scale, group.minimum)]
pub struct BadRow {
    /// The packed tensor's row.
    pub row: u32,
    /// The group and its numbers.
    pub group: BadGroup,
}

impl fmt::Display for SourceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceFormat::Numbers(format) => write!(f, "{format:?}"),
            SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) => write!(f, "{blocks}"),
            SourceFormat::NegatedExp => f.write_str("negated exponentials"),
            SourceFormat::Canonical(codes) => write!(f, "{codes}"),
        }
    }
}

/// The order of the numbers of a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row-major: each row is padded with zeros to a multiple of `columns_multiple` numbers.
    RowMajor {
        /// The multiple of the padded row length, in numbers; at least 1.
        columns_multiple: u32,
    },
    /// Matrix fragments: blocks of 16 rows × 32 columns, 1,024 bytes each, in the order in which 32 lanes load them, 16
    /// bytes per lane at a time (512 contiguous bytes per subgroup load). See [`fragment_index`]. Rows are padded with
    /// zeros to a multiple of 16, columns to a multiple of 32. Only for 2-byte formats and codes; for codes see
    /// [`codes`].
    Fragments,
}

/// The number of rows in a fragment block.
pub const FRAGMENT_ROWS: u32 = 16;
/// The number of columns in a fragment block.
pub const FRAGMENT_COLS: u32 = 32;
/// The size of a fragment block in bytes.
const FRAGMENT_BYTES: usize = 1024;

/// The size and layout of a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packing {
    /// The number of rows without padding.
    pub rows: u32,
    /// The number of columns without padding.
    pub cols: u32,
    /// The order of the numbers.
    pub layout: Layout,
    /// The format of each number.
    pub format: Format,
}

impl Packing {
    /// The number of rows with padding.
    pub fn padded_rows(&self) -> u32 {
        match self.layout {
            Layout::RowMajor { .. } => self.rows,
            Layout::Fragments => self.rows.next_multiple_of(FRAGMENT_ROWS),
        }
    }

    /// The number of columns with padding.
    pub fn padded_cols(&self) -> u32 {
        self.cols.next_multiple_of(match (self.format, self.layout) {
            (Format::Codes(codes), _) => codes::unit_cols(codes),
            (_, Layout::RowMajor { columns_multiple }) => columns_multiple.max(1),
            (_, Layout::Fragments) => FRAGMENT_COLS,
        })
    }

    /// The size of one padded row in bytes. A row's numbers are contiguous only in `RowMajor`.
    pub fn row_bytes(&self) -> u64 {
        match self.format {
            Format::Codes(codes) => codes::row_bytes(codes, self.layout, self.padded_cols()),
            format => u64::from(self.padded_cols()) * format.bytes() as u64,
        }
    }

    /// The size of the whole packed tensor in bytes.
    pub fn bytes(&self) -> u64 {
        self.row_bytes() * u64::from(self.padded_rows())
    }

    /// The number of consecutive rows whose numbers are interleaved in memory. Parts whose boundaries are multiples of
    /// this number of rows read no source row twice.
    pub fn rows_of_unit(&self) -> u32 {
        match self.layout {
            Layout::RowMajor { .. } => 1,
            Layout::Fragments => FRAGMENT_ROWS,
        }
    }

    /// The size in bytes of the smallest part that [`pack`] can produce separately: a number or a fragment block; of
    /// codes a row or a block of 16 rows.
    pub fn unit_bytes(&self) -> u64 {
        match (self.format, self.layout) {
            (Format::Codes(_), _) => self.row_bytes() * u64::from(self.rows_of_unit()),
            (format, Layout::RowMajor { .. }) => format.bytes() as u64,
            (_, Layout::Fragments) => FRAGMENT_BYTES as u64,
        }
    }
}

/// Returns the index, in numbers, of row `row` and column `col` in a tensor packed as [`Layout::Fragments`] with
/// `padded_cols` columns.
///
/// Lane `4g + t` of block (row / 16, col / 32) holds columns 8t..8t+8 of rows `u = 4(g >> 1) + (g & 1)` and `v = u +
/// 2`: its first 16 bytes are `u[0..4] v[0..4]`, and the 16 bytes at an offset of 512 bytes are `u[4..8] v[4..8]`.
pub fn fragment_index(row: u32, col: u32, padded_cols: u32) -> usize {
    let block = (row / 16) as usize * (padded_cols / 32) as usize + (col / 32) as usize;
    let (r, k) = ((row % 16) as usize, (col % 32) as usize);
    let g = 2 * (r / 4) + r % 2;
    let second = (r / 2) % 2;
    let (t, half, e) = (k / 8, k % 8 / 4, k % 4);
    ((block * 2 + half) * 32 + g * 4 + t) * 8 + second * 4 + e
}

/// The map from rows of a checkpoint's tensor to rows of a packed tensor: row `i` of the source becomes packed row
/// `first_row + i * row_step`. Several sources may form one tensor: q, k and v as consecutive ranges, gate and up
/// interleaved with a step of 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowMap {
    /// The format of the source's numbers.
    pub format: SourceFormat,
    /// The number of source rows.
    pub rows: u32,
    /// The number of columns of a source row.
    pub cols: u32,
    /// The first column that is packed. In blocks and canonical rows, it begins a group of codes.
    pub first_col: u32,
    /// The number of columns that are packed; further columns of the packed tensor are zero.
    pub used_cols: u32,
    /// The packed row of source row 0.
    pub first_row: u32,
    /// The distance between the packed rows of consecutive source rows; at least 1.
    pub row_step: u32,
    /// The distance between consecutive source rows, in rows of the stored tensor; at least 1.
    pub stride: u32,
    /// A constant that is added to every number, in f32, before it is rounded to the packed tensor's format: 1 for norm
    /// weights that are stored zero-centred, otherwise 0.
    pub plus: f32,
}

impl RowMap {
    /// The map of adjacent rows to packed rows of the same index.
    pub fn whole(format: SourceFormat, rows: u32, cols: u32) -> RowMap {
        RowMap { format, rows, cols, first_col: 0, used_cols: cols, first_row: 0, row_step: 1, stride: 1, plus: 0.0 }
    }

    /// Returns the size of the source's rows in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * self.format.row_bytes(self.cols)
    }

    /// Returns the source rows that become packed rows in `packed`.
    pub fn source_rows(&self, packed: Range<u32>) -> Range<u32> {
        let index = |row: u32| row.saturating_sub(self.first_row).div_ceil(self.row_step).min(self.rows);
        index(packed.start)..index(packed.end)
    }
}

/// Rows of a checkpoint's tensor and their destination.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The rows in the source's format, little endian, with any alignment. There are no bytes after the last row.
    pub bytes: &'a [u8],
    /// The destination of the rows.
    pub map: RowMap,
}

impl<'a> Rows<'a> {
    /// Returns packed row `row`, if it comes from this source.
    fn line(&self, row: u32) -> Option<Line<'a>> {
        let RowMap { format, cols: stored, first_col, used_cols, plus, .. } = self.map;
        let (bytes, cols) = (self.find(row)?, used_cols as usize);
        let whole_blocks = |blocks: BlockType| {
            let elements = blocks.elements() as u32;
            first_col.is_multiple_of(elements) && used_cols.is_multiple_of(elements)
        };
        let adjacent = match format {
            SourceFormat::Numbers(_) | SourceFormat::NegatedExp => true,
            SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) => whole_blocks(blocks),
            SourceFormat::Canonical(_) => false,
        };
        Some(match adjacent {
            false => Line { bytes, format, stored: stored as usize, first: first_col as usize, cols, plus },
            true => {
                let begin = format.row_bytes(first_col) as usize;
                let bytes = &bytes[begin..][..format.row_bytes(used_cols) as usize];
                Line { bytes, format, stored: cols, first: 0, cols, plus }
            }
        })
    }

    /// Returns the source bytes of packed row `row`, if it comes from this source.
    fn find(&self, row: u32) -> Option<&'a [u8]> {
        let map = self.map;
        let from_first = row.checked_sub(map.first_row)?;
        let index = from_first / map.row_step;
        if !from_first.is_multiple_of(map.row_step) || index >= map.rows {
            return None;
        }
        let row_bytes = map.format.row_bytes(map.cols) as usize;
        Some(&self.bytes[index as usize * map.stride as usize * row_bytes..][..row_bytes])
    }
}

/// Adjacent columns of one row of a checkpoint's tensor.
#[derive(Clone, Copy)]
struct Line<'a> {
    /// A row of `stored` columns; the line is its `cols` columns from `first` on.
    bytes: &'a [u8],
    format: SourceFormat,
    stored: usize,
    first: usize,
    cols: usize,
    plus: f32,
}

impl Line<'_> {
    /// Whether the row's numbers can be copied unchanged into a packed tensor of this format.
    fn is(&self, format: Format) -> bool {
        self.format == SourceFormat::Numbers(format) && self.plus == 0.0
    }

    /// The count of numbers in the row.
    fn numbers(&self) -> usize {
        self.cols
    }

    /// Writes the row's numbers `range` in a packed tensor's format to `out`, which has room for exactly those.
    fn write(&self, range: Range<usize>, format: Format, out: &mut [u8]) -> Result<(), BadGroup> {
        match self.format {
            SourceFormat::Numbers(from) => {
                let size = from.bytes();
                convert(from, &self.bytes[range.start * size..range.end * size], self.plus, format, out);
            }
            _ => {
                let mut numbers = vec![0.0; self.cols];
                self.floats(&mut numbers)?;
                let (numbers, size) = (&numbers[range], format.bytes());
                for (numbers, out) in numbers.chunks(BLOCK).zip(out.chunks_mut(BLOCK * size)) {
                    narrow(numbers, format, out);
                }
            }
        }
        Ok(())
    }

    /// Writes all numbers of the row in f32.
    fn floats(&self, out: &mut [f32]) -> Result<(), BadGroup> {
        match self.format {
            SourceFormat::Numbers(format) => {
                let size = format.bytes();
                for (from, out) in self.bytes.chunks(BLOCK * size).zip(out.chunks_mut(BLOCK)) {
                    widen(format, from, out);
                }
            }
            SourceFormat::NegatedExp => {
                widen(Format::F32, self.bytes, out);
                out.iter_mut().for_each(|x| *x = (-*x).ln());
            }
            SourceFormat::Blocks(_) | SourceFormat::ScaledBlocks(..) | SourceFormat::Canonical(_) => {
                let codes = self.format.codes().expect("a quantised format");
                let groups = codes.groups(self.cols);
                let (mut numbers, mut scales, mut minimums) =
                    (vec![0; self.cols], vec![0.0; groups], vec![0.0; groups]);
                self.decode(0..self.cols, &mut numbers, &mut scales, &mut minimums)?;
                codes.finite(&scales, &minimums)?;
                codes.dequantize(&numbers, &scales, &minimums, out);
            }
        }
        if self.plus != 0.0 {
            out.iter_mut().for_each(|x| *x += self.plus);
        }
        Ok(())
    }

    /// Returns a number of which all scales of a quantised row are multiples by numbers of few bits.
    fn unit(&self) -> f32 {
        match (self.format, self.bytes.last_chunk()) {
            (SourceFormat::ScaledBlocks(_, factor), _) => f32::from_bits(factor),
            (SourceFormat::Canonical(_), Some(unit)) => f32::from_le_bytes(*unit),
            _ => 1.0,
        }
    }

    /// Whether parts of a quantised row can be decoded, which begin and end with a block.
    fn is_divisible(&self) -> bool {
        match self.format {
            SourceFormat::Numbers(_) | SourceFormat::NegatedExp => false,
            SourceFormat::Blocks(_) | SourceFormat::ScaledBlocks(..) => self.stored == self.cols,
            SourceFormat::Canonical(_) => true,
        }
    }

    /// Decodes columns of a quantised row: a code for each column, and a scale and a minimum for each group of the source's
    /// codes. `columns` is all of the line, or part of a divisible one. Only of blocks' other columns are the values checked:
    /// those of the line are the caller's to check.
    fn decode(
        &self,
        columns: Range<usize>,
        codes: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
    ) -> Result<(), BadGroup> {
        match self.format {
            SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) if self.stored != self.cols => {
                let of = blocks.codes();
                let (mut all, groups) = (vec![0; self.stored], of.groups(self.stored));
                let (mut all_scales, mut all_minimums) = (vec![0.0; groups], vec![0.0; groups]);
                let whole = Line { first: 0, cols: self.stored, ..*self };
                whole.decode(0..self.stored, &mut all, &mut all_scales, &mut all_minimums)?;
                of.finite(&all_scales, &all_minimums)?;
                let first = self.first / of.group as usize;
                codes.copy_from_slice(&all[self.first..][..self.cols]);
                scales.copy_from_slice(&all_scales[first..][..scales.len()]);
                minimums.copy_from_slice(&all_minimums[first..][..minimums.len()]);
            }
            SourceFormat::Numbers(_) | SourceFormat::NegatedExp => unreachable!("numbers have no codes"),
            SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) => {
                let byte = |col: usize| col / blocks.elements() * blocks.bytes();
                blocks.decode(&self.bytes[byte(columns.start)..byte(columns.end)], codes, scales, minimums);
                if let SourceFormat::ScaledBlocks(_, factor) = self.format {
                    scales.iter_mut().chain(&mut *minimums).for_each(|x| *x *= f32::from_bits(factor));
                }
            }
            SourceFormat::Canonical(of) => {
                let (from, numbers) = self.bytes.split_at(of.code_bytes(self.stored));
                // A multiple of two.
                let start = self.first + columns.start;
                of.split(&from[of.code_bytes(start)..][..of.code_bytes(codes.len())], codes);
                let first = start / of.group as usize;
                let (numbers, _) = numbers.as_chunks::<4>();
                let of_groups = |from: usize| numbers[from..].iter().map(|bytes| f32::from_le_bytes(*bytes));
                scales.iter_mut().zip(of_groups(first)).for_each(|(scale, x)| *scale = x);
                match of.zero() {
                    None => {
                        let stored = of_groups(of.groups(self.stored) + first);
                        minimums.iter_mut().zip(stored).for_each(|(minimum, x)| *minimum = x);
                    }
                    Some(zero) => minimums.iter_mut().zip(&*scales).for_each(|(minimum, s)| *minimum = s * zero),
                }
            }
        }
        Ok(())
    }
}

/// Writes the bytes `part` of the packed tensor (multiples of [`Packing::unit_bytes`]) to `out`, which has the length
/// of `part` and any previous content. Rows that no source provides, and padding, become zero.
///
/// Numbers are converted if the formats differ: widening is exact, narrowing rounds to nearest, ties to even.
///
/// # Errors
/// If a quantised row has values that are not finite. `out` then has any content.
///
/// # Panics
/// If `part` is not whole units of the tensor, `out` has another length, a source is wider than the tensor, or the
/// layout and the format are incompatible: bugs of the caller.
pub fn pack(packing: &Packing, sources: &[Rows<'_>], part: Range<u64>, out: &mut [u8]) -> Result<(), BadRow> {
    let unit = packing.unit_bytes();
    assert!(part.start <= part.end && part.end <= packing.bytes(), "{part:?} of {packing:?}");
    assert!(part.start.is_multiple_of(unit) && part.end.is_multiple_of(unit), "{part:?} is not in units of {unit}");
    assert_eq!(out.len() as u64, part.end - part.start, "output length");
    for source in sources {
        let RowMap { cols, first_col, used_cols, row_step, .. } = source.map;
        assert!(used_cols <= packing.cols && row_step > 0, "a source fits in {packing:?}");
        assert!(first_col + used_cols <= cols, "columns {first_col} and {used_cols} behind it of {cols}");
    }
    match (packing.format, packing.layout) {
        (Format::Codes(codes), _) => codes::pack_codes(packing, codes, sources, part.start, out),
        (_, Layout::RowMajor { .. }) => pack_rows(packing, sources, part.start, out),
        (_, Layout::Fragments) => pack_fragments(packing, sources, part.start, out),
    }
}

/// Implements [`pack`] for row-major tensors; `start` is the part's first byte.
fn pack_rows(packing: &Packing, sources: &[Rows<'_>], start: u64, mut out: &mut [u8]) -> Result<(), BadRow> {
    let size = packing.format.bytes();
    let row_bytes = packing.row_bytes() as usize;
    let mut row = (start / packing.row_bytes()) as u32;
    let mut at = (start % packing.row_bytes()) as usize;
    while !out.is_empty() {
        // Whole rows that need no conversion or padding are copied at once.
        if at == 0
            && let Some(run) = verbatim(packing, sources, row, out.len() / row_bytes)
        {
            let (done, rest) = out.split_at_mut(run.len());
            done.copy_from_slice(run);
            row += (run.len() / row_bytes) as u32;
            out = rest;
            continue;
        }
        let (this, rest) = out.split_at_mut(out.len().min(row_bytes - at));
        let filled = match sources.iter().find_map(|s| s.line(row)) {
            Some(line) => {
                let (first, numbers) = (at / size, this.len() / size);
                let (from, to) = (first.min(line.numbers()), (first + numbers).min(line.numbers()));
                let filled = (to - from) * size;
                let written = line.write(from..to, packing.format, &mut this[..filled]);
                written.map_err(|group| BadRow { row, group })?;
                filled
            }
            None => 0,
        };
        this[filled..].fill(0);
        row += 1;
        at = 0;
        out = rest;
    }
    Ok(())
}

/// Returns the bytes of up to `most` whole packed rows, from `row` on, that are contiguous in one source and need no
/// conversion or padding; `None` if not even one row does.
fn verbatim<'a>(packing: &Packing, sources: &[Rows<'a>], row: u32, most: usize) -> Option<&'a [u8]> {
    let source = sources.iter().find(|s| s.find(row).is_some())?;
    let map = source.map;
    let whole = map.used_cols == map.cols && map.cols == packing.padded_cols();
    let same = source.line(row).is_some_and(|line| line.is(packing.format)) && whole;
    let index = ((row - map.first_row) / map.row_step) as usize;
    let adjacent = map.row_step == 1 && map.stride == 1;
    let rows = if adjacent { most.min(map.rows as usize - index) } else { most.min(1) };
    let row_bytes = packing.row_bytes() as usize;
    (same && rows > 0).then(|| &source.bytes[index * map.stride as usize * row_bytes..][..rows * row_bytes])
}

/// Implements [`pack`] for fragments; `start` is the part's first byte. Processes a block of 16 rows column by column,
/// so that it reads 16 sequential streams and writes one.
fn pack_fragments(packing: &Packing, sources: &[Rows<'_>], start: u64, out: &mut [u8]) -> Result<(), BadRow> {
    assert_eq!(packing.format.bytes(), 2, "fragments are of 2-byte formats");
    const CHUNK: usize = FRAGMENT_COLS as usize;
    let chunks = u64::from(packing.padded_cols() / FRAGMENT_COLS);
    let mut unit = start / FRAGMENT_BYTES as u64;
    let mut out = out.as_chunks_mut::<FRAGMENT_BYTES>().0;
    while !out.is_empty() {
        let (this, first) = ((unit / chunks) as u32, (unit % chunks) as usize);
        let count = out.len().min(chunks as usize - first);
        let (here, rest) = out.split_at_mut(count);
        let rows: [Option<Line<'_>>; 16] = std::array::from_fn(|r| {
            let row = this * FRAGMENT_ROWS + r as u32;
            sources.iter().find_map(|s| s.line(row))
        });
        // Columns that all 16 rows provide in the packed format are copied without converting each number.
        let plain: usize = rows
            .iter()
            .map(|row| match row {
                Some(line) if line.is(packing.format) => line.bytes.len() / (2 * CHUNK),
                _ => 0,
            })
            .min()
            .unwrap_or(0);
        let (as_is, converted) = here.split_at_mut(plain.saturating_sub(first).min(count));
        if !as_is.is_empty() {
            let words = rows.map(|row| {
                let bytes = row.map_or(&[][..], |line| line.bytes);
                &bytes[first * 2 * CHUNK..][..as_is.len() * 2 * CHUNK]
            });
            for (i, target) in as_is.iter_mut().enumerate() {
                let at = i * 2 * CHUNK;
                weave(|r| words[r][at..].first_chunk().expect("as long as the target's chunks"), target);
            }
        }
        let from = first + as_is.len();
        for (i, target) in converted.iter_mut().enumerate() {
            let mut block = [[0u8; 2 * CHUNK]; 16];
            for ((row, index), line) in rows.iter().zip(0..).zip(&mut block) {
                let Some(row) = row else { continue };
                let (a, b) = (((from + i) * CHUNK).min(row.numbers()), ((from + i + 1) * CHUNK).min(row.numbers()));
                let written = row.write(a..b, packing.format, &mut line[..(b - a) * 2]);
                written.map_err(|group| BadRow { row: this * FRAGMENT_ROWS + index, group })?;
            }
            weave(|r| &block[r], target);
        }
        unit += count as u64;
        out = rest;
    }
    Ok(())
}

/// Writes one fragment block from 32 numbers of each of 16 rows.
#[inline(always)]
fn weave<'a>(row: impl Fn(usize) -> &'a [u8; 64], out: &mut [u8; FRAGMENT_BYTES]) {
    let (low, high) = out.split_at_mut(FRAGMENT_BYTES / 2);
    let (low, high) = (low.as_chunks_mut::<8>().0, high.as_chunks_mut::<8>().0);
    for g in 0..8 {
        let r = 4 * (g >> 1) + (g & 1);
        let (u, v) = (row(r).as_chunks::<8>().0, row(r + 2).as_chunks::<8>().0);
        let (low, high) = (&mut low[g * 8..][..8], &mut high[g * 8..][..8]);
        for t in 0..4 {
            low[2 * t] = u[2 * t];
            low[2 * t + 1] = v[2 * t];
            high[2 * t] = u[2 * t + 1];
            high[2 * t + 1] = v[2 * t + 1];
        }
    }
}

/// The count of numbers that are converted at once.
const BLOCK: usize = 64;

/// Converts numbers and adds `plus`; `from` and `out` hold the same count of numbers. The conversion goes through f32,
/// which represents every number of the other formats, so only the sum and the last step can round.
fn convert(from_format: Format, from: &[u8], plus: f32, to_format: Format, out: &mut [u8]) {
    debug_assert_eq!(from.len() / from_format.bytes(), out.len() / to_format.bytes());
    if from_format == to_format && plus == 0.0 {
        out.copy_from_slice(from);
        return;
    }
    if (from_format, to_format) == (Format::Bf16, Format::F32) && plus == 0.0 {
        for (from, out) in from.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<4>().0) {
            *out = (u32::from(u16::from_le_bytes(*from)) << 16).to_le_bytes();
        }
        return;
    }
    let mut numbers = [0f32; BLOCK];
    let blocks = from.chunks(BLOCK * from_format.bytes());
    for (from, out) in blocks.zip(out.chunks_mut(BLOCK * to_format.bytes())) {
        let numbers = &mut numbers[..from.len() / from_format.bytes()];
        widen(from_format, from, numbers);
        // Adding a zero would turn a checkpoint's -0 into 0.
        if plus != 0.0 {
            numbers.iter_mut().for_each(|x| *x += plus);
        }
        narrow(numbers, to_format, out);
    }
}

/// Converts at most 64 numbers to f32, exactly.
fn widen(format: Format, from: &[u8], numbers: &mut [f32]) {
    let pairs = from.as_chunks::<2>().0;
    match format {
        Format::Bf16 => {
            for (b, x) in pairs.iter().zip(numbers) {
                *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        Format::F16 => {
            let mut halves = [f16::ZERO; 64];
            for (b, h) in pairs.iter().zip(&mut halves) {
                *h = f16::from_le_bytes(*b);
            }
            // A whole slice is converted at once, because the processor has instructions for that.
            halves[..pairs.len()].convert_to_f32_slice(numbers);
        }
        Format::F32 => {
            for (b, x) in from.as_chunks::<4>().0.iter().zip(numbers) {
                *x = f32::from_le_bytes(*b);
            }
        }
        Format::Codes(_) => unreachable!("codes are decoded, not widened"),
    }
}

/// Converts at most 64 numbers from f32, rounding to nearest, ties to even.
fn narrow(numbers: &[f32], format: Format, out: &mut [u8]) {
    match format {
        Format::Bf16 => {
            for (x, b) in numbers.iter().zip(out.as_chunks_mut::<2>().0) {
                *b = bf16_bits(*x).to_le_bytes();
            }
        }
        Format::F16 => {
            let mut halves = [f16::ZERO; 64];
            halves[..numbers.len()].convert_from_f32_slice(numbers);
            for (h, b) in halves.iter().zip(out.as_chunks_mut::<2>().0) {
                *b = h.to_le_bytes();
            }
        }
        Format::F32 => {
            for (x, b) in numbers.iter().zip(out.as_chunks_mut::<4>().0) {
                *b = x.to_le_bytes();
            }
        }
        Format::Codes(_) => unreachable!("codes are packed by rows"),
    }
}

/// Returns the bits of the nearest bf16, ties to even; a NaN stays a NaN. Has no branches, so that a loop over it is
/// vectorised.
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    /// Returns a number that every format here represents exactly, and that differs between nearby (row, col).
    fn value(row: u32, col: u32) -> f32 {
        ((row * 37 + col * 11) % 251) as f32 - 125.0
    }

    fn encode(format: Format, value: f32) -> Vec<u8> {
        match format {
            Format::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            Format::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            Format::F32 => value.to_le_bytes().to_vec(),
            Format::Codes(_) => unreachable!("no numbers"),
        }
    }

    fn decode(format: Format, bytes: &[u8]) -> f32 {
        match format {
            Format::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            Format::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            Format::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Format::Codes(_) => unreachable!("no numbers"),
        }
    }

    fn tensor(format: Format, rows: u32, cols: u32, value: impl Fn(u32, u32) -> f32) -> Vec<u8> {
        (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).flat_map(|(r, c)| encode(format, value(r, c))).collect()
    }

    /// Packs a tensor one number at a time, by the definition of the layouts.
    fn expected(packing: &Packing, value: impl Fn(u32, u32) -> f32) -> Vec<u8> {
        let size = packing.format.bytes();
        let mut out = vec![0; packing.bytes() as usize];
        for row in 0..packing.rows {
            for col in 0..packing.cols {
                let index = match packing.layout {
                    Layout::RowMajor { .. } => (row * packing.padded_cols() + col) as usize,
                    Layout::Fragments => fragment_index(row, col, packing.padded_cols()),
                };
                out[index * size..][..size].copy_from_slice(&encode(packing.format, value(row, col)));
            }
        }
        out
    }

    fn whole(packing: &Packing, sources: &[Rows<'_>]) -> Vec<u8> {
        let mut out = vec![0xa5; packing.bytes() as usize];
        pack(packing, sources, 0..packing.bytes(), &mut out).unwrap();
        out
    }

    /// Compares [`fragment_index`] with the address arithmetic of a GPU shader that packs weights as the B operand,
    /// written out word by word (words of 16 bytes). That arithmetic is the reference.
    #[test]
    fn fragments_are_as_the_packing_shader_defines_them() {
        let (rows, cols) = (48u32, 96u32);
        let word = |row: u32, col: u32| (row * cols + col) as u16;
        let mut truth = vec![0u16; (rows * cols) as usize];
        for d in 0..rows * (cols / 8) {
            let (lane, h, q) = (d & 31, (d >> 5) & 1, d >> 6);
            let (kc, rb) = (q % (cols / 32), q / (cols / 32));
            let (g, c) = (lane >> 2, kc * 4 + (lane & 3));
            let r0 = rb * 16 + 4 * (g >> 1) + (g & 1);
            let r1 = r0 + 2;
            for i in 0..4 {
                truth[(d * 8 + i) as usize] = word(r0, c * 8 + h * 4 + i);
                truth[(d * 8 + 4 + i) as usize] = word(r1, c * 8 + h * 4 + i);
            }
        }
        for row in 0..rows {
            for col in 0..cols {
                assert_eq!(truth[fragment_index(row, col, cols)], word(row, col), "({row}, {col})");
            }
        }
        let bytes: Vec<u8> = (0..rows * cols).flat_map(|i| (i as u16).to_le_bytes()).collect();
        let packing = Packing { rows, cols, layout: Layout::Fragments, format: Format::Bf16 };
        let format = SourceFormat::Numbers(Format::Bf16);
        let source = Rows { bytes: &bytes, map: RowMap::whole(format, rows, cols) };
        let packed: Vec<u8> = truth.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(whole(&packing, &[source]), packed);
    }

    #[test]
    fn sizes_include_padding() {
        let ragged = Packing { rows: 17, cols: 33, layout: Layout::Fragments, format: Format::Bf16 };
        assert_eq!((ragged.padded_rows(), ragged.padded_cols(), ragged.bytes()), (32, 64, 4096));
        let rows = Packing { layout: Layout::RowMajor { columns_multiple: 8 }, ..ragged };
        assert_eq!((rows.padded_rows(), rows.padded_cols(), rows.bytes()), (17, 40, 17 * 80));
        let vector =
            Packing { rows: 1, cols: 5, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::F32 };
        assert_eq!(vector.bytes(), 20);
    }

    #[test]
    fn a_vector_widens_exactly() {
        let norm = tensor(Format::Bf16, 1, 7, |_, c| 1.0 + c as f32 / 128.0);
        let packing =
            Packing { rows: 1, cols: 7, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::F32 };
        let format = SourceFormat::Numbers(Format::Bf16);
        let source = Rows { bytes: &norm, map: RowMap::whole(format, 1, 7) };
        let out = whole(&packing, &[source]);
        for c in 0..7 {
            assert_eq!(decode(Format::F32, &out[c * 4..]), 1.0 + c as f32 / 128.0);
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even_and_keeps_nan() {
        let cases: [(f32, u16); 6] = [
            (f32::from_bits(0x3f80_8000), 0x3f80), // tie, even below
            (f32::from_bits(0x3f81_8000), 0x3f82), // tie, even above
            (f32::from_bits(0x3f80_8001), 0x3f81), // above the tie
            (f32::from_bits(0x3f80_7fff), 0x3f80), // below the tie
            (f32::INFINITY, 0x7f80),
            (f32::MAX, 0x7f80),
        ];
        for (from, to) in cases {
            let mut out = [0; 2];
            convert(Format::F32, &from.to_le_bytes(), 0.0, Format::Bf16, &mut out);
            assert_eq!(u16::from_le_bytes(out), to, "{from:e}");
        }
        let mut out = [0; 2];
        convert(Format::F32, &f32::from_bits(0x7f80_0001).to_le_bytes(), 0.0, Format::Bf16, &mut out);
        assert!(bf16::from_le_bytes(out).is_nan());
        convert(Format::F32, &(1.0f32 + 1.0 / 1024.0).to_le_bytes(), 0.0, Format::F16, &mut out);
        assert_eq!(f16::from_le_bytes(out).to_f32(), 1.0 + 1.0 / 1024.0);
        convert(Format::F32, &(1.0f32 + 1.0 / 2048.0).to_le_bytes(), 0.0, Format::F16, &mut out);
        assert_eq!(f16::from_le_bytes(out).to_f32(), 1.0, "tie to even");
    }

    /// The reference is transformers: it converts the weight to f32 and then adds.
    #[test]
    fn a_norm_stored_around_zero_is_one_more_in_f32() {
        for bits in [0x0000u16, 0x8000, 0x3c23, 0xbf7f, 0x3f80, 0x0001] {
            let weight = bf16::from_bits(bits);
            let mut out = [0; 4];
            convert(Format::Bf16, &weight.to_le_bytes(), 1.0, Format::F32, &mut out);
            assert_eq!(f32::from_le_bytes(out), 1.0 + weight.to_f32(), "{bits:#x}");
        }
        let mut out = [0; 4];
        convert(Format::F32, &(-0.0f32).to_le_bytes(), 0.0, Format::F32, &mut out);
        assert!(f32::from_le_bytes(out).is_sign_negative(), "what nothing is added to stays as it is");
    }

    #[test]
    fn subnormal_halves_widen_exactly() {
        let mut out = [0; 4];
        convert(Format::F16, &1u16.to_le_bytes(), 0.0, Format::F32, &mut out);
        assert_eq!(f32::from_le_bytes(out), 2f32.powi(-24));
    }

    fn formats() -> impl Strategy<Value = Format> {
        prop_oneof![Just(Format::Bf16), Just(Format::F16), Just(Format::F32)]
    }

    proptest! {
        #[test]
        fn bf16_rounds_as_the_half_crate_does(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assert_eq!(bf16_bits(x), bf16::from_f32(x).to_bits());
        }

        /// Goal: a tensor packed in parts equals the definition, for any packing, any sources and any cuts.
        #[test]
        fn parts_equal_the_definition(
            cols in 1u32..100,
            counts in prop::collection::vec((1u32..24, formats()), 1..4),
            interleave in any::<bool>(),
            gap in 0u32..3,
            fragments in any::<bool>(),
            multiple in 1u32..20,
            format in formats(),
            cuts in prop::collection::vec(0.0f64..1.0, 0..5),
            plus in prop_oneof![Just(0.0f32), Just(1.0), Just(-2.5)],
            beside in (0u32..40, 0u32..40),
        ) {
            prop_assume!(!fragments || format != Format::F32);
            let layout = if fragments { Layout::Fragments } else { Layout::RowMajor { columns_multiple: multiple } };
            // The sources are either consecutive ranges with gaps, or interleaved and of equal length.
            let n = counts.len() as u32;
            let mut places = Vec::new();
            let mut rows = 0;
            for (i, (count, dtype)) in counts.iter().enumerate() {
                if interleave {
                    places.push((counts[0].0, i as u32, n, *dtype));
                    rows = counts[0].0 * n + gap;
                } else {
                    places.push((*count, rows, 1, *dtype));
                    rows += count + gap;
                }
            }
            let data: Vec<Vec<u8>> = places.iter().map(|(count, first, step, dtype)| {
                // Some columns before and behind those that are packed.
                let (before, behind) = beside;
                tensor(*dtype, *count, before + cols + behind, |r, c| match c.checked_sub(before) {
                    Some(c) if c < cols => value(first + r * step, c),
                    _ => 99.0,
                })
            }).collect();
            let sources: Vec<Rows<'_>> = places.iter().zip(&data).map(|((count, first, step, dtype), bytes)| Rows {
                bytes,
                map: RowMap {
                    first_row: *first,
                    row_step: *step,
                    plus,
                    first_col: beside.0,
                    used_cols: cols,
                    ..RowMap::whole(SourceFormat::Numbers(*dtype), *count, beside.0 + cols + beside.1)
                },
            }).collect();
            let packing = Packing { rows, cols, layout, format };
            let covered = |row| places.iter().any(|(count, first, step, _)| {
                row >= *first && (row - first) % step == 0 && (row - first) / step < *count
            });
            let want = expected(&packing, |r, c| if covered(r) { value(r, c) + plus } else { 0.0 });

            let units = packing.bytes() / packing.unit_bytes();
            let mut cuts: Vec<u64> = cuts.iter().map(|c| (c * units as f64) as u64).collect();
            cuts.extend([0, units]);
            cuts.sort();
            let mut got = vec![0x5a; packing.bytes() as usize];
            for pair in cuts.windows(2) {
                let part = pair[0] * packing.unit_bytes()..pair[1] * packing.unit_bytes();
                pack(&packing, &sources, part.clone(), &mut got[part.start as usize..part.end as usize]).unwrap();
            }
            prop_assert_eq!(got, want);
        }
    }
}

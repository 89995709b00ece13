//! Rows that the device packs: which rows of a tensor these are, how they are divided among staging slots, and how they are
//! copied into one, as `kernels::pack_codes` takes them. Not here: threads, slots and submissions.

use super::{BAND, Buffers, LoadError, LoadTensor, MatrixRows, SLOT_ALIGNMENT, TILE, TensorSource};
use crate::kernels::pack_codes::{ABSENT, BEYOND, PackVariant, Strip, StripLines};
use crate::memory::pack::{Packing, RowMap, SourceFormat};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How the device packs rows of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawWay {
    pub(super) variant: PackVariant,
    /// The number of columns that are packed.
    pub(super) cols: u32,
    /// Of blocks, the bytes of a row that hold these columns; otherwise 0.
    row_bytes: u64,
}

/// Packed rows, whole row units, that the device makes of rows of a file. In a staging slot, a table with an entry for each of
/// them comes first; then the rows, or the strips of rows of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RawPart {
    pub(super) tensor: usize,
    pub(super) rows: Range<u32>,
    pub(super) way: RawWay,
    /// The first byte in the slot.
    pub(super) at: u64,
    /// The most bytes that it takes in the slot.
    pub(super) bytes: u64,
}

/// Packed rows, whole row units, that are packed in the same way: on the device, or by the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) rows: Range<u32>,
    pub(super) way: Option<RawWay>,
}

impl RawPart {
    /// The bytes of the packed tensor.
    pub(super) fn packed(&self, packing: &Packing) -> Range<u64> {
        u64::from(self.rows.start) * packing.row_bytes()..u64::from(self.rows.end) * packing.row_bytes()
    }

    /// The number of these bytes.
    pub(super) fn packed_bytes(&self, packing: &Packing) -> u64 {
        let packed = self.packed(packing);
        packed.end - packed.start
    }
}

impl RawWay {
    /// Returns how the device packs a source's rows; `None` if the host does: if the columns are not whole blocks or groups, if
    /// numbers are changed, or if nothing that `packs` accepts does it.
    fn of(source: &TensorSource, packing: &Packing, packs: &impl Fn(PackVariant) -> bool) -> Option<RawWay> {
        let RowMap { format, cols, first_col, used_cols, plus, .. } = source.map;
        let (variant, row_bytes) = match (format, &source.matrix, source.transposed) {
            (SourceFormat::Blocks(kind), None, None) => {
                let whole = |cols: u32| cols.is_multiple_of(kind.elements() as u32);
                let fits = whole(first_col) && whole(used_cols) && plus == 0.0;
                (PackVariant::of(kind, packing).filter(|_| fits)?, format.row_bytes(used_cols))
            }
            (SourceFormat::Canonical(_), Some(of), None) => {
                let fits = first_col == 0 && used_cols == cols;
                (PackVariant::of_matrix(&of.description, packing).filter(|_| fits && is_in_order(of))?, 0)
            }
            _ => return None,
        };
        (used_cols > 0 && packs(variant)).then_some(RawWay { variant, cols: used_cols, row_bytes })
    }

    /// The bytes of the table of `rows` rows; what follows it begins at a cache line.
    fn table_bytes(&self, rows: u64) -> u64 {
        (4 * u64::from(self.variant.table_words()) * rows).next_multiple_of(SLOT_ALIGNMENT)
    }

    /// Returns the most bytes that packed rows of these sources take in a slot.
    pub(super) fn bytes(&self, sources: &[TensorSource], rows: &Range<u32>) -> u64 {
        let table = self.table_bytes(rows.len() as u64);
        let strip = |source: &TensorSource| Some(self.strip_of(source, rows)?.1.bytes());
        match self.row_bytes {
            0 => table + sources.iter().filter_map(strip).sum::<u64>(),
            each => table + rows.len() as u64 * each,
        }
    }

    /// Returns the strip of a source's rows that become packed rows in `rows`, and the first of its rows in the matrix; `None`
    /// if there are none.
    fn strip_of(&self, source: &TensorSource, rows: &Range<u32>) -> Option<(u32, Strip)> {
        let (of, matrix) = (source.map.source_rows(rows.clone()), source.matrix.as_ref()?);
        if of.is_empty() {
            return None;
        }
        // Eight rows are in a word. A matrix has a multiple of eight.
        let first = (matrix.first + of.start) / 8 * 8;
        let end = (matrix.first + of.end).next_multiple_of(8);
        Some((first, self.variant.strip(end - first, self.cols)?))
    }

    /// Whether a unit of rows fits in a slot, whatever sources they have.
    fn fits(&self, unit: u32, slot_bytes: u64) -> bool {
        let each = self.variant.strip(8, self.cols).map_or(self.row_bytes, |strip| strip.bytes());
        self.table_bytes(unit.into()) + u64::from(unit) * each <= slot_bytes
    }
}

/// Whether the columns of a matrix are in their own order, and its files are mapped.
fn is_in_order(of: &MatrixRows) -> bool {
    let mapped = of.tensors.iter().all(|(file, _)| file.is_mapped());
    let in_order = |index: usize| {
        let (file, range) = &of.tensors[index];
        let bytes = file.bytes(range.clone(), &mut [], "the groups of columns").ok()?;
        of.description.order(bytes).ok()
    };
    mapped && of.description.group_index().is_none_or(|index| in_order(index) == Some(None))
}

/// Divides the rows of a tensor, `offset` bytes behind the begin of its buffer, by how they are packed. Where rows of a unit are
/// of different types, where several sources have a row, and where a unit does not fit in a slot, the host packs.
pub(super) fn segments(
    packing: &Packing,
    sources: &[TensorSource],
    offset: u64,
    slot_bytes: u64,
    packs: impl Fn(PackVariant) -> bool,
) -> Vec<Segment> {
    let whole = || vec![Segment { rows: 0..packing.padded_rows(), way: None }];
    let unit = packing.rows_of_unit();
    let way = |source| RawWay::of(source, packing, &packs).filter(|way| way.fits(unit, slot_bytes));
    let ways: Vec<Option<RawWay>> = sources.iter().map(way).collect();
    if !offset.is_multiple_of(16) || ways.iter().all(Option::is_none) {
        return whole();
    }
    let mut of_rows: Vec<Option<usize>> = vec![None; packing.padded_rows() as usize];
    for (index, source) in sources.iter().enumerate() {
        let RowMap { rows, first_row, row_step, .. } = source.map;
        for row in (0..rows).map(|row| (first_row + row * row_step) as usize) {
            if of_rows[row].replace(index).is_some() {
                return whole();
            }
        }
    }
    let mut segments: Vec<Segment> = Vec::new();
    for (first, unit_rows) in (0..).step_by(unit as usize).zip(of_rows.chunks(unit as usize)) {
        let mut found = unit_rows.iter().flatten().map(|source| ways[*source]);
        let way = match found.next() {
            Some(first) => first.filter(|way| found.all(|other| other == Some(*way))),
            // Rows without a source belong to those before them.
            None => segments.last().and_then(|last: &Segment| last.way),
        };
        let rows = first..first + unit_rows.len() as u32;
        match segments.last_mut() {
            Some(last) if last.way == way => last.rows.end = rows.end,
            _ => segments.push(Segment { rows, way }),
        }
    }
    // Rows of several types that alternate would be many small pieces.
    if segments.len() > 2 * sources.len() + 2 { whole() } else { segments }
}

/// Cuts rows that the device packs into what fits in slots of at least a unit of rows: for each of `segments` its tensor, the
/// rows of a unit, the rows and how they are packed; `size` returns the bytes of some of them. Small segments share a slot.
pub(super) fn cut_raw(
    segments: &[(usize, u32, Range<u32>, RawWay)],
    slot_bytes: u64,
    size: impl Fn(usize, &Range<u32>, &RawWay) -> u64,
) -> Vec<Vec<RawPart>> {
    let mut slots = Vec::new();
    let (mut slot, mut used) = (Vec::new(), 0u64);
    for (tensor, unit, rows, way) in segments {
        let mut first = rows.start;
        while first < rows.end {
            let at = used.next_multiple_of(SLOT_ALIGNMENT);
            let bytes = |count: u32| size(*tensor, &(first..first + count), way);
            // The most units that fit.
            let (mut least, mut most) = (0, (rows.end - first) / unit);
            while least < most {
                let middle = (least + most).div_ceil(2);
                match at + bytes(middle * unit) <= slot_bytes {
                    true => least = middle,
                    false => most = middle - 1,
                }
            }
            // Whole workgroups, and whole words of strips.
            let fit = least * unit;
            let fit = if fit > 16 && first + fit < rows.end { fit / 16 * 16 } else { fit };
            if fit == 0 {
                assert!(!slot.is_empty(), "a slot of {slot_bytes} bytes holds {unit} rows, {} bytes", bytes(*unit));
                slots.push(std::mem::take(&mut slot));
                used = 0;
                continue;
            }
            let part = RawPart { tensor: *tensor, rows: first..first + fit, way: *way, at, bytes: bytes(fit) };
            used = at + part.bytes;
            first += fit;
            slot.push(part);
        }
    }
    if !slot.is_empty() {
        slots.push(slot);
    }
    slots
}

/// Copies rows of a tensor from its files as the device packs them: calls `put` with the offset in the part and the bytes of
/// each run of rows, and at last of the table of rows. Returns the time spent reading files.
pub(super) fn copy_rows(
    tensor: &LoadTensor,
    part: &RawPart,
    buffers: &mut Buffers,
    mut put: impl FnMut(u64, &[u8]),
) -> Result<Duration, LoadError> {
    let words = part.way.variant.table_words();
    let beyond = tensor.packing.rows.clamp(part.rows.start, part.rows.end);
    let place = |row: u32| if row < beyond { ABSENT } else { BEYOND };
    let mut table: Vec<u32> = part.rows.clone().flat_map(|row| (0..words).map(move |_| place(row))).collect();
    let mut at = part.way.table_bytes(part.rows.len() as u64);
    let mut read = Duration::ZERO;
    for source in &tensor.sources {
        let of = source.map.source_rows(part.rows.clone());
        if of.is_empty() {
            continue;
        }
        let entry = |row: u32| {
            let packed = source.map.first_row + row * source.map.row_step;
            ((packed - part.rows.start) * words) as usize
        };
        match (part.way.strip_of(source, &part.rows), &source.matrix) {
            (Some((first, strip)), Some(matrix)) => {
                read += copy_strip(matrix, first, &strip, &tensor.name, &mut buffers.tile, |offset, bytes| {
                    put(at + offset, bytes)
                })?;
                for row in of {
                    table[entry(row)..][..2].copy_from_slice(&[at as u32, matrix.first + row - first]);
                }
                at += strip.bytes();
            }
            _ => {
                read +=
                    copy_blocks(source, &of, part.way.row_bytes, &tensor.name, &mut buffers.band, |offset, bytes| {
                        put(at + offset, bytes)
                    })?;
                for row in of {
                    table[entry(row)] = at as u32;
                    at += part.way.row_bytes;
                }
            }
        }
    }
    put(0, bytemuck::cast_slice(&table));
    Ok(read)
}

/// Copies rows of blocks, one behind the other. `band` is room for those of files that are not mapped.
fn copy_blocks(
    source: &TensorSource,
    of: &Range<u32>,
    row_bytes: u64,
    name: &str,
    band: &mut Vec<u8>,
    mut put: impl FnMut(u64, &[u8]),
) -> Result<Duration, LoadError> {
    let RowMap { format, cols, first_col, used_cols, stride, .. } = source.map;
    let begun = Instant::now();
    source.file.unchanged()?;
    source.file.announce(&source.bytes_of(of))?;
    let mut read = begun.elapsed();
    // Adjacent rows of the file are copied together.
    let adjacent = stride == 1 && used_cols == cols;
    let run = if adjacent { (BAND / row_bytes).max(1) as u32 } else { 1 };
    let mut at = 0;
    for first in of.clone().step_by(run as usize) {
        let rows = first..of.end.min(first + run);
        let begin = source.bytes_of(&rows).start + format.row_bytes(first_col);
        let bytes = u64::from(rows.end - rows.start) * row_bytes;
        if !source.file.is_mapped() && band.len() < bytes as usize {
            band.resize(bytes as usize, 0);
        }
        let room = if source.file.is_mapped() { &mut [][..] } else { &mut band[..bytes as usize] };
        let begun = Instant::now();
        let found = source.file.bytes(begin..begin + bytes, room, name)?;
        read += begun.elapsed();
        put(at, found);
        at += bytes;
    }
    Ok(read)
}

/// Copies a strip of a matrix whose files are mapped: the rows from `first` on. Lines are gathered in `tile`.
fn copy_strip(
    of: &MatrixRows,
    first: u32,
    strip: &Strip,
    name: &str,
    tile: &mut Vec<u8>,
    mut put: impl FnMut(u64, &[u8]),
) -> Result<Duration, LoadError> {
    put(0, bytemuck::cast_slice(&strip.header()));
    tile.resize(tile.len().max(TILE), 0);
    let mut read = Duration::ZERO;
    for StripLines { role, at, lines, bits } in strip.lines() {
        let Some(index) = of.description.tensors.iter().position(|tensor| tensor.role == role) else { continue };
        let (file, range) = &of.tensors[index];
        let stride = (range.end - range.start) / lines;
        let begin = range.start + u64::from(first) * bits / 8;
        let each = strip.rows() * bits / 8;
        let begun = Instant::now();
        file.unchanged()?;
        file.announce(&(begin..begin + (lines - 1) * stride + each))?;
        read += begun.elapsed();
        let (mut filled, mut done) = (0usize, at);
        for line in 0..lines {
            let begin = begin + line * stride;
            let bytes = file.bytes(begin..begin + each, &mut [], name)?;
            if filled > 0 && filled + bytes.len() > tile.len() {
                put(done, &tile[..filled]);
                (filled, done) = (0, done + filled as u64);
            }
            if bytes.len() > tile.len() {
                put(done, bytes);
                done += each;
                continue;
            }
            tile[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        }
        put(done, &tile[..filled]);
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::WeightFile;
    use crate::memory::pack::{Format, Layout};
    use crate::quant::blocks::BlockType;
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        /// Goal: every row is in exactly one part, in its order, and the parts of a slot do not overlap and fit in it.
        #[test]
        fn rows_that_the_device_packs_are_cut_once(
            tensors in prop::collection::vec((1u32..200, any::<bool>(), any::<bool>(), 1u64..12), 1..6),
            slot in 5000u64..40_000,
        ) {
            let segment = |(index, (units, fragments, six, blocks)): (usize, &(u32, bool, bool, u64))| {
                let kind = if *six { BlockType::Q6_K } else { BlockType::Q4_K };
                let layout = if *fragments { Layout::Fragments } else { Layout::RowMajor { columns_multiple: 8 } };
                let packing = Packing { rows: 1, cols: 256, layout, format: Format::Codes(kind.codes()) };
                let variant = PackVariant::of(kind, &packing).expect("a kernel");
                let unit = packing.rows_of_unit();
                // At least one unit of rows fits in a slot.
                let row_bytes = (blocks * kind.bytes() as u64).min((slot - 64) / u64::from(unit) - 4);
                (index, unit, 0..units * unit, RawWay { variant, cols: 256, row_bytes })
            };
            let size = |_: usize, rows: &Range<u32>, way: &RawWay| way.bytes(&[], rows);
            let segments: Vec<_> = tensors.iter().enumerate().map(segment).collect();
            let mut next = vec![0u32; segments.len()];
            for parts in cut_raw(&segments, slot, size) {
                let mut free_from = 0;
                prop_assert!(!parts.is_empty());
                for part in parts {
                    let (_, unit, _, way) = &segments[part.tensor];
                    prop_assert_eq!((part.way, part.rows.start), (*way, next[part.tensor]));
                    prop_assert!(!part.rows.is_empty() && (part.rows.len() as u32).is_multiple_of(*unit));
                    prop_assert!(part.at >= free_from && part.at.is_multiple_of(SLOT_ALIGNMENT));
                    free_from = part.at + part.bytes;
                    prop_assert!(free_from <= slot, "{} of {}", free_from, slot);
                    next[part.tensor] = part.rows.end;
                }
            }
            let ends: Vec<u32> = segments.iter().map(|(_, _, rows, _)| rows.end).collect();
            prop_assert_eq!(next, ends);
        }
    }

    /// Rows go to the device where a whole unit of them is of one type that it packs, in sources of which no two have a row.
    #[test]
    fn units_of_one_type_are_packed_on_the_device() {
        let keep = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(keep.path(), [0; 8]).unwrap();
        let file = Arc::new(WeightFile::open(keep.path()).unwrap());
        let (four, six) = (BlockType::Q4_K, BlockType::Q6_K);
        let both = four.codes().common(six.codes()).expect("affine codes");
        let rows = |kind: BlockType, first_row, rows| TensorSource {
            file: Arc::clone(&file),
            offset: 0,
            map: RowMap { first_row, ..RowMap::whole(SourceFormat::Blocks(kind), rows, 512) },
            transposed: None,
            matrix: None,
        };
        let found = |layout, sources: &[TensorSource]| {
            let packing = Packing { rows: 64, cols: 512, layout, format: Format::Codes(both) };

            let segments = segments(&packing, sources, 0, 1 << 20, |_| true);
            segments.into_iter().map(|s| (s.rows, s.way.map(|way| way.row_bytes))).collect::<Vec<_>>()
        };
        let (row_major, fragments) = (Layout::RowMajor { columns_multiple: 8 }, Layout::Fragments);
        let [of_four, of_six] = [four, six].map(|kind| Some(2 * kind.bytes() as u64));
        let two = [rows(four, 0, 24), rows(six, 24, 30)];
        assert_eq!(found(row_major, &two), [(0..24, of_four), (24..64, of_six)]);
        assert_eq!(found(fragments, &two), [(0..16, of_four), (16..32, None), (32..64, of_six)]);
        assert_eq!(found(fragments, &[rows(four, 16, 40)]), [(0..16, None), (16..64, of_four)]);
        // Rows that two sources have are those of the first one, as the host packs them.
        assert_eq!(found(row_major, &[rows(four, 0, 40), rows(six, 39, 20)]), [(0..64, None)]);
        // Types that alternate.
        let step = |source: TensorSource| TensorSource { map: RowMap { row_step: 2, ..source.map }, ..source };
        let [even, odd] = [step(rows(four, 0, 32)), step(rows(six, 1, 32))];
        assert_eq!(found(row_major, &[even.clone(), odd.clone()]), [(0..64, None)]);
        assert_eq!(found(fragments, &[even.clone(), odd]), [(0..64, None)]);
        assert_eq!(found(fragments, &[even, step(rows(four, 1, 32))]), [(0..64, of_four)]);
        // Columns that are no whole blocks, and numbers that are changed.
        let map = |change: fn(&mut RowMap)| {
            let mut source = rows(four, 0, 64);
            change(&mut source.map);
            found(fragments, &[source])
        };
        assert_eq!(map(|map| map.used_cols = 256), [(0..64, Some(four.bytes() as u64))]);
        assert_eq!(map(|map| (map.first_col, map.used_cols) = (32, 256)), [(0..64, None)]);
        assert_eq!(map(|map| map.plus = 1.0), [(0..64, None)]);
        assert_eq!(map(|map| map.format = SourceFormat::Blocks(BlockType::MXFP4)), [(0..64, None)]);
        assert_eq!(map(|map| map.format = SourceFormat::ScaledBlocks(BlockType::Q4_K, 0)), [(0..64, None)]);
    }
}

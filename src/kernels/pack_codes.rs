//! `pack_codes`: packs rows of a file's quantised blocks on the device, as `memory::pack` does on the host. Also its probe:
//! rows in which every code and every kind of scale occurs. Not here: which weights are packed so (`actors::packer`), and
//! the layouts (`memory::pack::codes`).

use super::host_memory::HostMemory;
use super::recording::{Call, Range, Recording};
use super::shaders::{PackCodesArgs, PackCodesConstants};
use super::{Format, codes_of, codes_word, fold, interpreter};
use crate::memory::pack::codes::unit_cols;
use crate::memory::pack::{Layout, Packing, RowMap, Rows, SourceFormat, pack};
use crate::quant::Codes;
use crate::quant::blocks::BlockType;
use std::fmt;

/// In place of the first byte of a row: a packed row without a source, which becomes zeros.
pub const ABSENT: u32 = 0xffff_fffe;
/// In place of the first byte of a row: a row beyond the last one of a block of 16.
pub const BEYOND: u32 = 0xffff_ffff;
/// The value of `faults` as long as no part has a scale or minimum that is not finite.
pub const NO_FAULT: u32 = u32::MAX;
/// The name of a probe's results.
pub const RESULTS: &str = "pack.target";

/// Returns the kernel that packs blocks of a type; `None` if the host packs them.
fn kernel(kind: BlockType) -> Option<&'static str> {
    match kind {
        BlockType::Q4_0 => Some("pack_codes.q4_0"),
        BlockType::Q4_1 => Some("pack_codes.q4_1"),
        BlockType::Q5_0 => Some("pack_codes.q5_0"),
        BlockType::Q5_1 => Some("pack_codes.q5_1"),
        BlockType::Q8_0 => Some("pack_codes.q8_0"),
        BlockType::Q2_K => Some("pack_codes.q2_k"),
        BlockType::Q3_K => Some("pack_codes.q3_k"),
        BlockType::Q4_K => Some("pack_codes.q4_k"),
        BlockType::Q5_K => Some("pack_codes.q5_k"),
        BlockType::Q6_K => Some("pack_codes.q6_k"),
        _ => None,
    }
}

/// A variant of the kernel: the blocks that it reads, and the layout and the codes that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackVariant {
    kind: BlockType,
    codes: Codes,
    fragments: bool,
}

impl fmt::Display for PackVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.fragments { "fragments" } else { "rows" };
        write!(f, "{} as {layout} of {}", self.kind, self.codes)
    }
}

/// The rows that a call packs.
#[derive(Clone, Copy, Debug)]
pub struct PackedRows {
    /// The number of rows, in fragments with those beyond the last one of a block.
    pub rows: u32,
    /// The number of columns that the file's rows have.
    pub cols: u32,
    /// The number of columns of a packed row with padding.
    pub padded_cols: u32,
    /// The number that `faults` gets if a scale or minimum of the rows is not finite and no smaller number stands there.
    pub part: u32,
}

impl PackVariant {
    /// Returns the variant that packs blocks of a type into a tensor; `None` if there is none.
    pub fn of(kind: BlockType, packing: &Packing) -> Option<PackVariant> {
        kernel(kind)?;
        // The codes have to represent everything that the blocks do.
        let codes = packing.format.codes().filter(|codes| kind.codes().common(*codes) == Some(*codes))?;
        Some(PackVariant { kind, codes, fragments: packing.layout == Layout::Fragments })
    }

    fn layout(self) -> Layout {
        if self.fragments { Layout::Fragments } else { Layout::RowMajor { columns_multiple: 1 } }
    }

    fn packing(self, rows: u32, cols: u32) -> Packing {
        Packing { rows, cols, layout: self.layout(), format: Format::Codes(self.codes) }
    }

    /// Returns the call that packs rows. `raw` begins with the first byte of each row within it, or [`ABSENT`] or
    /// [`BEYOND`]; `target` are the packed rows; `faults` is a word. Workgroups of fragments have up to `most_threads`
    /// invocations, at least 128.
    pub fn call(
        self,
        label: String,
        of: PackedRows,
        raw: Range,
        target: Range,
        faults: Range,
        most_threads: u32,
    ) -> Call {
        let PackedRows { rows, cols, padded_cols, part } = of;
        let units = padded_cols / unit_cols(self.codes);
        let (threads, groups) = match self.fragments {
            true => (256.min(most_threads) / 16 * 16, rows.div_ceil(16)),
            false => (64, rows),
        };
        let constants = PackCodesConstants {
            threads,
            fragments: self.fragments.into(),
            codes: codes_word(Format::Codes(self.codes)),
        };
        Call {
            kernel: kernel(self.kind).expect("a variant has a kernel"),
            label,
            constants: constants.into_values(),
            args: PackCodesArgs { raw, target, faults, rows, cols, units, part }.into_args(),
            groups: fold(groups, 1),
        }
    }

    /// Returns a probe of the variant; another `seed` gives other numbers.
    pub fn probe(self, most_threads: u32, seed: u64) -> PackProbe {
        // The last block of 16 rows has rows without a source and rows beyond the last one, the last unit has columns of
        // padding, where the blocks allow it.
        let (rows, table) = if self.fragments { (29, 32) } else { (29, 29) };
        let cols = if self.kind.elements() == 256 { 768 } else { 416 };
        let absent = [7, 20];
        let mut random = Random(seed);
        let row_bytes = cols as usize / self.kind.elements() * self.kind.bytes();
        let mut bytes = Vec::new();
        let mut at = Vec::new();
        for row in 0..table {
            if row >= rows || absent.contains(&row) {
                at.push(if row >= rows { BEYOND } else { ABSENT });
                continue;
            }
            // Rows may be in any order, at even bytes.
            at.push(table * 4 + bytes.len() as u32);
            bytes.extend(probe_row(self.kind, row, row_bytes, &mut random));
            bytes.extend([0; 2]);
        }
        bytes.resize(bytes.len().next_multiple_of(4) + 4, 0);
        let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        let raw: Vec<u32> = at.into_iter().chain(words).collect();
        let mut recording = Recording::new(format!("probe.{}", kernel(self.kind).expect("a variant has a kernel")));
        let packing = self.packing(rows, cols);
        let source = recording.buffer("pack.raw", raw.len() as u64 * 4);
        let target = recording.buffer(RESULTS, packing.bytes());
        let faults = recording.buffer("pack.faults", 4);
        let of = PackedRows { rows: table, cols, padded_cols: packing.padded_cols(), part: 0 };
        recording.call(self.call("pack".to_owned(), of, source, target, faults, most_threads));
        let mut memory = HostMemory::new(&recording);
        memory.buffers[source.buffer.0 as usize] = raw;
        memory.buffers[target.buffer.0 as usize].fill(0xdead_beef);
        memory.set_u32(faults, 0, NO_FAULT);
        PackProbe { recording, memory }
    }
}

/// A recording of one call of the kernel, and the memory that it starts from.
#[derive(Clone, Debug)]
pub struct PackProbe {
    /// The call, and its buffers.
    pub recording: Recording,
    /// The contents of the buffers before the call.
    pub memory: HostMemory,
}

impl PackProbe {
    /// Returns a description of the first word in which `found`, the memory after the call on a device, differs from the
    /// reference; `None` if all are equal.
    pub fn difference(&self, found: &HostMemory) -> Option<String> {
        let mut wanted = self.memory.clone();
        interpreter::run(&self.recording, &mut wanted);
        let buffers = self.recording.buffers.iter().zip(wanted.buffers.iter().zip(&found.buffers));
        for (decl, (wanted, found)) in buffers {
            let differs = wanted.iter().zip(found).position(|(a, b)| a != b);
            if let Some(at) = differs {
                return Some(format!("word {at} of {} is {:#x}, not {:#x}", decl.name, found[at], wanted[at]));
            }
        }
        None
    }
}

/// Pseudo-random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
}

/// Returns the bytes of a block at which its f16s begin.
fn halves_of(kind: BlockType) -> &'static [usize] {
    match kind {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        _ => &[0],
    }
}

/// Gives all groups of a block the same integers of scales and minimums.
fn make_uniform(kind: BlockType, block: &mut [u8], random: u32) {
    let (a, b) = (random as u8 & 63, (random >> 8) as u8 & 63);
    match kind {
        BlockType::Q4_K | BlockType::Q5_K => {
            block[4..8].fill(a | a >> 4 << 6);
            block[8..12].fill(b | b >> 4 << 6);
            block[12..16].fill(a & 15 | b << 4);
        }
        BlockType::Q6_K => block[192..208].fill(a),
        BlockType::Q2_K => block[..16].fill(a),
        BlockType::Q3_K => block[96..108].fill(0),
        _ => {}
    }
}

/// Returns the blocks of a row of a probe: random bytes with f16s of a size that depends on the row: of rows of numbers
/// beside each other, of the smallest and largest f16s, of zeros, and with the same scale in all groups, whose digits are
/// then in the row's factor.
fn probe_row(kind: BlockType, row: u32, row_bytes: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..row_bytes).map(|_| random.next() as u8).collect();
    let shared = (random.next(), random.next(), random.next());
    for block in bytes.chunks_exact_mut(kind.bytes()) {
        for (index, at) in halves_of(kind).iter().enumerate() {
            let (sign, digits) = (random.next() & 0x8000, random.next() & 1023);
            let exponent = random.next();
            let of_all = if index == 0 { shared.0 } else { shared.1 };
            let half = match row % 8 {
                // Any finite f16, small ones, subnormal ones, zeros among others.
                0 => sign | (exponent % 31) << 10 | digits,
                1 => sign | (exponent % 3) << 10 | digits,
                2 => sign | digits,
                3 if exponent.is_multiple_of(3) => sign,
                // Scales that all groups share, beside minimums that differ.
                4 | 5 if index == 0 => of_all & 0x8000 | (10 + of_all % 8) << 10 | of_all >> 16 & 1023,
                6 => of_all & 0x8000 | (of_all % 31) << 10 | of_all >> 16 & 1023,
                // The largest ones.
                7 if row.is_multiple_of(3) => sign | 30 << 10 | digits,
                _ => sign | (8 + exponent % 8) << 10 | digits,
            } as u16;
            block[*at..*at + 2].copy_from_slice(&half.to_le_bytes());
        }
        if matches!(row % 8, 4 | 6) {
            make_uniform(kind, block, shared.2);
        }
    }
    bytes
}

pub(super) fn reference_pack_codes(call: &Call, memory: &mut HostMemory) {
    let a = PackCodesArgs::from_args(&call.args);
    let c = PackCodesConstants::from_values(&call.constants);
    let kind = BlockType::ALL.into_iter().find(|kind| kernel(*kind) == Some(call.kernel)).expect("a kernel's blocks");
    let variant = PackVariant { kind, codes: codes_of(c.codes), fragments: c.fragments == 1 };
    let at: Vec<u32> = (0..a.rows).map(|row| memory.u32(a.raw, row)).collect();
    let rows = at.iter().filter(|at| **at != BEYOND).count() as u32;
    let raw: Vec<u8> = (0..(a.raw.bytes / 4) as u32).flat_map(|word| memory.u32(a.raw, word).to_le_bytes()).collect();
    let format = SourceFormat::Blocks(kind);
    let row_bytes = format.row_bytes(a.cols) as usize;
    let of_row = |(row, at): (u32, &u32)| {
        let bytes = &raw.get(*at as usize..)?[..row_bytes];
        Some(Rows { bytes, map: RowMap { first_row: row, ..RowMap::whole(format, 1, a.cols) } })
    };
    let sources: Vec<Rows<'_>> = (0..).zip(&at).filter(|(_, at)| **at < ABSENT).filter_map(of_row).collect();
    let packing = variant.packing(rows, a.units * unit_cols(variant.codes));
    let mut out = vec![0; packing.bytes() as usize];
    match pack(&packing, &sources, 0..packing.bytes(), &mut out) {
        Ok(()) => {
            for (word, bytes) in (0..).zip(out.as_chunks::<4>().0) {
                memory.set_u32(a.target, word, u32::from_le_bytes(*bytes));
            }
        }
        // What the rows become then has no meaning.
        Err(_) => memory.set_u32(a.faults, 0, memory.u32(a.faults, 0).min(a.part)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pack::codes::element;

    /// The probes have rows whose factor has the digits of a scale, every code, and values that are not all alike, or they
    /// would show little.
    #[test]
    fn probes_have_every_code_and_factors_with_digits() {
        for kind in BlockType::ALL.into_iter().filter(|kind| kernel(*kind).is_some()) {
            let packing =
                Packing { rows: 29, cols: 768, layout: Layout::Fragments, format: Format::Codes(kind.codes()) };
            let variant = PackVariant::of(kind, &packing).expect("its own codes");
            let probe = variant.probe(256, 1);
            let mut memory = probe.memory.clone();
            interpreter::run(&probe.recording, &mut memory);
            assert_eq!(probe.difference(&memory), None);
            let (target, cols) = (&memory.buffers[1], if kind.elements() == 256 { 768 } else { 416 });
            let padded = variant.packing(29, cols).padded_cols();
            let read =
                |row, col| element(kind.codes(), Layout::Fragments, padded, (row, col), |word| target[word as usize]);
            let mut values: Vec<u32> = (0..cols).map(|col| read(0, col).to_bits()).collect();
            values.sort_unstable();
            values.dedup();
            assert!(values.len() > cols as usize / 8, "{kind}: {} values", values.len());
            let digits = |row: usize| target[row / 16 * (target.len() / 2) + row % 16] & 0x007f_ffff;
            assert!(digits(6) != 0 && digits(22) != 0, "{kind}: a factor with digits");
            assert!([0, 3, 7, 20].iter().all(|row| digits(*row) == 0), "{kind}: powers of two");
            let changed = memory.buffers[1].iter().position(|word| *word == 0xdead_beef);
            assert_eq!(changed, None, "{kind}: all words are written");
            // A word that differs is found.
            memory.buffers[1][100] ^= 1 << 20;
            let why = probe.difference(&memory).expect("a difference");
            assert!(why.starts_with("word 100 of pack.target is "), "{why}");
        }
    }

    #[test]
    fn only_codes_that_represent_the_blocks_are_packed() {
        let packing = |codes| Packing { rows: 16, cols: 256, layout: Layout::Fragments, format: Format::Codes(codes) };
        let (four, six, eight) = (BlockType::Q4_K, BlockType::Q6_K, BlockType::Q8_0);
        let both = four.codes().common(six.codes()).expect("affine codes");
        assert!(PackVariant::of(four, &packing(both)).is_some() && PackVariant::of(six, &packing(both)).is_some());
        assert!(PackVariant::of(six, &packing(four.codes())).is_none());
        assert!(PackVariant::of(eight, &packing(six.codes())).is_none());
        assert!(PackVariant::of(BlockType::MXFP4, &packing(BlockType::MXFP4.codes())).is_none());
        let numbers = Packing { format: Format::Bf16, ..packing(both) };
        assert!(PackVariant::of(four, &numbers).is_none());
    }

    /// Blocks whose scale or minimum is not finite are told apart from others.
    #[test]
    fn a_part_with_infinite_scales_is_noted() {
        let packing =
            Packing { rows: 29, cols: 768, layout: Layout::Fragments, format: Format::Codes(BlockType::Q4_K.codes()) };
        let probe = PackVariant::of(BlockType::Q4_K, &packing).expect("a variant").probe(256, 1);
        for (block, half) in [(0u16, 0x7c00u16), (2, 0xfc00), (1, 0x7e00)] {
            let mut memory = probe.memory.clone();
            // The first row begins behind the table, its first word holds the block's two f16s.
            let at = 32 + usize::from(block) * 36;
            memory.buffers[0][at] = memory.buffers[0][at] & 0xffff | u32::from(half) << 16;
            interpreter::run(&probe.recording, &mut memory);
            assert_eq!(memory.buffers[2], [0]);
        }
    }
}

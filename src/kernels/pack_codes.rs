//! `pack_codes`: packs rows of a file's quantised weights on the device, as `memory::pack` does on the host. Also the strips
//! in which it takes rows of matrices in several tensors, and its probe: rows in which every code and every kind of scale
//! occurs. Not here: which weights are packed so (`actors::loader`), and the layouts (`memory::pack::codes`).

use super::host_memory::HostMemory;
use super::recording::{Call, Range, Recording};
use super::shaders::{PackCodesArgs, PackCodesConstants};
use super::{Format, codes_of, codes_word, fold, interpreter};
use crate::memory::pack::codes::unit_cols;
use crate::memory::pack::{Layout, Packing, RowMap, Rows, SourceFormat, pack};
use crate::quant::blocks::BlockType;
use crate::quant::safetensors::{
    Awq, CodeMatrix, Description, Gptq, GptqVersion, Storage, Tensor, TensorDtype, TensorRole,
};
use crate::quant::{Codes, Minimum};
use std::fmt;

/// In place of the first byte of a row: a packed row without a source, which becomes zeros.
pub const ABSENT: u32 = 0xffff_fffe;
/// In place of the first byte of a row: a row beyond the last one of a block of 16.
pub const BEYOND: u32 = 0xffff_ffff;
/// The value of `faults` as long as no part has a scale or minimum that is not finite.
pub const NO_FAULT: u32 = u32::MAX;
/// The name of a probe's results.
pub const RESULTS: &str = "pack.target";

/// The format of the rows that the kernel packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RawFormat {
    /// Blocks of GGUF files.
    Blocks(BlockType),
    /// Strips of AWQ, version gemm.
    Awq,
    /// Strips of GPTQ of 4 bits.
    Gptq(GptqVersion),
}

impl fmt::Display for RawFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RawFormat::Blocks(kind) => write!(f, "{kind}"),
            RawFormat::Awq => f.write_str("AWQ"),
            RawFormat::Gptq(GptqVersion::V1) => f.write_str("GPTQ"),
            RawFormat::Gptq(GptqVersion::V2) => f.write_str("GPTQ v2"),
        }
    }
}

/// Returns the kernel that packs rows of a format; `None` if the host packs them.
fn kernel(source: RawFormat) -> Option<&'static str> {
    let kind = match source {
        RawFormat::Blocks(kind) => kind,
        RawFormat::Awq => return Some("pack_codes.awq"),
        RawFormat::Gptq(GptqVersion::V1) => return Some("pack_codes.gptq"),
        RawFormat::Gptq(GptqVersion::V2) => return Some("pack_codes.gptq_v2"),
    };
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

/// Adjacent rows of a matrix of AWQ or GPTQ, as the kernel takes them: a header of 16 bytes, then what the tensors of codes,
/// scales and zeros have of the rows, line by line. The number of rows is a multiple of 8, and so are the bytes of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strip {
    gptq: bool,
    group: u64,
    cols: u64,
    rows: u64,
}

/// What a strip has of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripLines {
    /// The tensor.
    pub role: TensorRole,
    /// The first byte in the strip.
    pub at: u64,
    /// The number of lines, each behind the one before.
    pub lines: u64,
    /// The bits that a row has in a line.
    pub bits: u64,
}

impl Strip {
    /// The bytes of the header.
    const HEADER: u64 = 16;

    /// Returns what the strip has of each tensor. Where all zeros are the same, and AWQ has no tensor of them, the last one has
    /// no meaning.
    pub fn lines(&self) -> [StripLines; 3] {
        let Strip { gptq, group, cols, rows } = *self;
        let (lines, bits) = if gptq { (cols / 8, 32) } else { (cols, 4) };
        let mut at = Strip::HEADER;
        [(TensorRole::Codes, lines, bits), (TensorRole::Scale, cols / group, 16), (TensorRole::Zero, cols / group, 4)]
            .map(|(role, lines, bits)| {
                let begin = at;
                at += lines * rows * bits / 8;
                StripLines { role, at: begin, lines, bits }
            })
    }

    /// The number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The bytes of the strip, a multiple of 16.
    pub fn bytes(&self) -> u64 {
        let [_, _, zeros] = self.lines();
        (zeros.at + zeros.lines * self.rows * zeros.bits / 8).next_multiple_of(16)
    }

    /// The words of the header.
    pub fn header(&self) -> [u32; 4] {
        let [_, scales, zeros] = self.lines();
        [self.rows as u32, scales.at as u32, zeros.at as u32, 0]
    }
}

/// A variant of the kernel: the rows that it reads, and the layout and the codes that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackVariant {
    source: RawFormat,
    codes: Codes,
    fragments: bool,
}

impl fmt::Display for PackVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.fragments { "fragments" } else { "rows" };
        write!(f, "{} as {layout} of {}", self.source, self.codes)
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
        let source = RawFormat::Blocks(kind);
        kernel(source)?;
        // The codes have to represent everything that the blocks do.
        let codes = packing.format.codes().filter(|codes| kind.codes().common(*codes) == Some(*codes))?;
        Some(PackVariant { source, codes, fragments: packing.layout == Layout::Fragments })
    }

    /// Returns the variant that packs rows of a matrix in several tensors into a tensor of its own codes; `None` if there is
    /// none. The matrix' columns are in their own order.
    pub fn of_matrix(description: &Description, packing: &Packing) -> Option<PackVariant> {
        let (source, group) = match description.storage {
            Storage::Awq { group } => (RawFormat::Awq, group?),
            Storage::Gptq { bits: 4, group, version, .. } => (RawFormat::Gptq(version), group?),
            _ => return None,
        };
        let matrix = description.check().ok()?;
        let codes = packing.format.codes().filter(|codes| *codes == matrix.codes())?;
        let halves =
            |role| description.tensors.iter().any(|tensor| (tensor.role, tensor.dtype) == (role, TensorDtype::F16));
        let whole = matrix.cols().is_multiple_of(group) && matrix.rows().is_multiple_of(8) && codes.group == group;
        let variant = PackVariant { source, codes, fragments: packing.layout == Layout::Fragments };
        (whole && matrix.cols() > 0 && halves(TensorRole::Scale)).then_some(variant)
    }

    /// The strip of `rows` rows, a multiple of 8, of a matrix of `cols` columns; `None` if the variant packs blocks.
    pub fn strip(&self, rows: u32, cols: u32) -> Option<Strip> {
        let gptq = match self.source {
            RawFormat::Blocks(_) => return None,
            RawFormat::Awq => false,
            RawFormat::Gptq(_) => true,
        };
        Some(Strip { gptq, group: self.codes.group.into(), cols: cols.into(), rows: rows.into() })
    }

    /// The number of words that the table of rows has for each: of a strip's rows the index in the strip follows.
    pub fn table_words(&self) -> u32 {
        if matches!(self.source, RawFormat::Blocks(_)) { 1 } else { 2 }
    }

    fn layout(self) -> Layout {
        if self.fragments { Layout::Fragments } else { Layout::RowMajor { columns_multiple: 1 } }
    }

    fn packing(self, rows: u32, cols: u32) -> Packing {
        Packing { rows, cols, layout: self.layout(), format: Format::Codes(self.codes) }
    }

    /// Returns the call that packs rows. `raw` begins with the first byte of each row within it, or of its [`Strip`] and the
    /// row's index in it, or [`ABSENT`] or [`BEYOND`]; `target` are the packed rows; `faults` is a word. Workgroups have up to
    /// `most_threads` invocations, at least 128.
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
        let threads = 256.min(most_threads) / 16 * 16;
        let constants = PackCodesConstants {
            threads,
            fragments: self.fragments.into(),
            codes: codes_word(Format::Codes(self.codes)),
        };
        Call {
            kernel: self.kernel(),
            label,
            constants: constants.into_values(),
            args: PackCodesArgs { raw, target, faults, rows, cols, units, part }.into_args(),
            groups: fold(rows.div_ceil(16), 1),
        }
    }

    fn kernel(self) -> &'static str {
        kernel(self.source).expect("a variant has a kernel")
    }

    /// Returns a probe of the variant; another `seed` gives other numbers.
    pub fn probe(self, most_threads: u32, seed: u64) -> PackProbe {
        // The last block of 16 rows has rows without a source and rows beyond the last one, the last unit has columns of
        // padding, where the blocks allow it.
        let (rows, table) = if self.fragments { (29, 32) } else { (29, 29) };
        let without = |row: u32| match row {
            7 | 20 => Some(ABSENT),
            _ => (row >= rows).then_some(BEYOND),
        };
        let mut random = Random(seed);
        let (cols, at, mut bytes) = match self.source {
            RawFormat::Blocks(kind) => {
                let cols = if kind.elements() == 256 { 768 } else { 416 };
                let row_bytes = cols as usize / kind.elements() * kind.bytes();
                let (mut at, mut bytes) = (Vec::new(), Vec::new());
                for row in 0..table {
                    at.push(without(row).unwrap_or(table * 4 + bytes.len() as u32));
                    if without(row).is_none() {
                        // Rows may be in any order, at even bytes.
                        bytes.extend(probe_row(kind, row, row_bytes, &mut random));
                        bytes.extend([0; 2]);
                    }
                }
                (cols, at, bytes)
            }
            RawFormat::Awq | RawFormat::Gptq(_) => {
                // Rows of two strips take turns.
                let cols = 5 * self.codes.group;
                let strip = self.strip(16, cols).expect("it packs strips");
                let first = (table * 8).next_multiple_of(16);
                let place = |row: u32| match without(row) {
                    Some(word) => [word, 0],
                    None => [first + row % 2 * strip.bytes() as u32, row / 2],
                };
                let mut bytes = vec![0; (first - table * 8) as usize];
                (0..2).for_each(|odd| bytes.extend(self.probe_strip(&strip, odd, &mut random)));
                (cols, (0..table).flat_map(place).collect(), bytes)
            }
        };
        bytes.resize(bytes.len().next_multiple_of(4) + 4, 0);
        let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        let raw: Vec<u32> = at.into_iter().chain(words).collect();
        let mut recording = Recording::new(format!("probe.{}", self.kernel()));
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

    /// Returns a strip of a probe, whose row i is row 2i of the probe, or that behind it if `odd` is 1.
    fn probe_strip(&self, strip: &Strip, odd: u32, random: &mut Random) -> Vec<u8> {
        let mut bytes: Vec<u8> = strip.header().into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.extend((Strip::HEADER..strip.bytes()).map(|_| random.next() as u8));
        let [_, scales, zeros] = strip.lines();
        let shared: Vec<u32> = (0..strip.rows).map(|_| random.next()).collect();
        for (index, of_row) in (0..scales.lines).flat_map(|_| (0..strip.rows).zip(&shared)).enumerate() {
            let (row, of_all) = of_row;
            let half = probe_half(2 * row as u32 + odd, *of_all, true, random);
            bytes[scales.at as usize + 2 * index..][..2].copy_from_slice(&half.to_le_bytes());
        }
        if self.codes.minimum != Minimum::Stored {
            // The zero of all groups is 8; the first version stores one less.
            let zero = if self.source == RawFormat::Gptq(GptqVersion::V1) { 0x77 } else { 0x88 };
            bytes[zeros.at as usize..].fill(zero);
        }
        bytes
    }

    /// Opens a strip. The bytes of its tensors are in the order of [`Strip::lines`].
    fn open<'a>(
        &self,
        strip: &Strip,
        [codes, scales, zeros]: [&'a [u8]; 3],
        shapes: &'a [[u64; 2]; 3],
    ) -> Option<CodeMatrix<'a>> {
        let tensor = |name, dtype, shape: &'a [u64; 2], bytes| Tensor { name, dtype, shape, bytes: Some(bytes) };
        let qweight = tensor("codes", TensorDtype::I32, &shapes[0], codes);
        let scales = tensor("scales", TensorDtype::F16, &shapes[1], scales);
        let zeros = tensor("zeros", TensorDtype::I32, &shapes[2], zeros);
        let (group, symmetric) = (Some(strip.group as u32), self.codes.minimum != Minimum::Stored);
        let matrix = match self.source {
            RawFormat::Blocks(_) => return None,
            RawFormat::Awq => Awq { qweight, qzeros: (!symmetric).then_some(zeros), scales, group }.open(),
            RawFormat::Gptq(version) => {
                Gptq { qweight, qzeros: zeros, scales, g_idx: None, bits: 4, group, symmetric, version }.open()
            }
        };
        matrix.ok()
    }

    /// Returns a row of a strip as a canonical row; `None` if it has values that are not finite, or a wrong zero.
    fn canonical(&self, strip: &Strip, bytes: &[u8], row: u32) -> Option<Vec<u8>> {
        let lines = strip.lines();
        let shapes =
            lines.map(|of| [of.lines, of.bits * strip.rows / if of.role == TensorRole::Scale { 16 } else { 32 }]);
        let parts = lines.map(|of| &bytes[of.at as usize..][..(of.lines * strip.rows * of.bits / 8) as usize]);
        let matrix = self.open(strip, parts, &shapes)?;
        let mut out = vec![0; self.codes.canonical_bytes(strip.cols as usize)];
        matrix.decode_canonical(row, 1, &mut out).ok()?;
        Some(out)
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

/// Returns an f16 of a row of a probe, of a size that depends on the row: any, the smallest and the largest ones, zeros, and
/// the same in all groups, `of_all`: the digits of such a scale are in the row's factor.
fn probe_half(row: u32, of_all: u32, is_scale: bool, random: &mut Random) -> u16 {
    let (sign, digits) = (random.next() & 0x8000, random.next() & 1023);
    let exponent = random.next();
    let half = match row % 8 {
        // Any finite f16, small ones, subnormal ones, zeros among others.
        0 => sign | (exponent % 31) << 10 | digits,
        1 => sign | (exponent % 3) << 10 | digits,
        2 => sign | digits,
        3 if exponent.is_multiple_of(3) => sign,
        // Scales that all groups share, beside minimums that differ.
        4 | 5 if is_scale => of_all & 0x8000 | (10 + of_all % 8) << 10 | of_all >> 16 & 1023,
        6 => of_all & 0x8000 | (of_all % 31) << 10 | of_all >> 16 & 1023,
        // The largest ones.
        7 if row.is_multiple_of(3) => sign | 30 << 10 | digits,
        _ => sign | (8 + exponent % 8) << 10 | digits,
    };
    half as u16
}

/// Returns the blocks of a row of a probe: random bytes with f16s of [`probe_half`].
fn probe_row(kind: BlockType, row: u32, row_bytes: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..row_bytes).map(|_| random.next() as u8).collect();
    let shared = (random.next(), random.next(), random.next());
    for block in bytes.chunks_exact_mut(kind.bytes()) {
        for (index, at) in halves_of(kind).iter().enumerate() {
            let half = probe_half(row, if index == 0 { shared.0 } else { shared.1 }, index == 0, random);
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
    let blocks = BlockType::ALL.map(RawFormat::Blocks).into_iter();
    let matrices = [RawFormat::Awq, RawFormat::Gptq(GptqVersion::V1), RawFormat::Gptq(GptqVersion::V2)];
    let source = blocks.chain(matrices).find(|source| kernel(*source) == Some(call.kernel)).expect("a kernel's rows");
    let variant = PackVariant { source, codes: codes_of(c.codes), fragments: c.fragments == 1 };
    let entry = |row: u32| memory.u32(a.raw, row * variant.table_words());
    let rows = (0..a.rows).filter(|row| entry(*row) != BEYOND).count() as u32;
    let raw: Vec<u8> = (0..(a.raw.bytes / 4) as u32).flat_map(|word| memory.u32(a.raw, word).to_le_bytes()).collect();
    let format = match source {
        RawFormat::Blocks(kind) => SourceFormat::Blocks(kind),
        RawFormat::Awq | RawFormat::Gptq(_) => SourceFormat::Canonical(variant.codes),
    };
    let of_row = |row: u32| -> Option<Vec<u8>> {
        let bytes = raw.get(entry(row) as usize..)?;
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        match source {
            RawFormat::Blocks(_) => Some(bytes[..format.row_bytes(a.cols) as usize].to_vec()),
            RawFormat::Awq | RawFormat::Gptq(_) => {
                let strip = variant.strip(number(0), a.cols)?;
                variant.canonical(&strip, bytes, memory.u32(a.raw, row * 2 + 1))
            }
        }
    };
    let found: Vec<(u32, Option<Vec<u8>>)> =
        (0..a.rows).filter(|row| entry(*row) < ABSENT).map(|row| (row, of_row(row))).collect();
    let is_whole = found.iter().all(|(_, bytes)| bytes.is_some());
    let sources: Vec<Rows<'_>> = found
        .iter()
        .filter_map(|(row, bytes)| {
            let map = RowMap { first_row: *row, ..RowMap::whole(format, 1, a.cols) };
            Some(Rows { bytes: bytes.as_ref()?, map })
        })
        .collect();
    let packing = variant.packing(rows, a.units * unit_cols(variant.codes));
    let mut out = vec![0; packing.bytes() as usize];
    match pack(&packing, &sources, 0..packing.bytes(), &mut out) {
        Ok(()) if is_whole => {
            for (word, bytes) in (0..).zip(out.as_chunks::<4>().0) {
                memory.set_u32(a.target, word, u32::from_le_bytes(*bytes));
            }
        }
        // What the rows become then has no meaning.
        _ => memory.set_u32(a.faults, 0, memory.u32(a.faults, 0).min(a.part)),
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
        for kind in BlockType::ALL.into_iter().filter(|kind| kernel(RawFormat::Blocks(*kind)).is_some()) {
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

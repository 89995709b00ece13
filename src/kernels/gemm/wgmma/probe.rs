//! Probes of `wgmma`: for the constants of a call, a small recording that launches the same program on random numbers,
//! with more columns than stages and with tiles that are not full, the memory that it starts from, and the comparison of
//! a device's results with the reference's. They show at start that the driver has compiled the program correctly and
//! launches it as documented here.
//!
//! Not here: running a probe on a device (`gpu::build`).

use super::{Shares, WgmmaOptions, order_of, variant_of, wgmma, wgmma_sorted};
use crate::kernels::format_of_word;
use crate::kernels::gemm::panel::{Fold, Unscaled};
use crate::kernels::gemm::tiled::{Output, Packed, PackedOrder, SWIZZLED_COLS, Tiled, e4m3_scale};
use crate::kernels::gemm::{Activations, Epilogue, Matrix};
use crate::kernels::host_memory::{HostMemory, PackedMatrix};
use crate::kernels::interpreter;
use crate::kernels::moe::{ExpertPart, NOBODY, Sorted};
use crate::kernels::recording::{Range, Recording};
use crate::memory::pack::codes::{sample, unit_cols};
use crate::memory::pack::{Format, Layout};
use crate::quant::Codes;
use crate::quant::number::to_e4m3;
use half::{bf16, f16};

/// The names of the buffers of a probe's results: y, what is made of it for a norm, and the counters of shared tiles.
pub const RESULTS: [&str; 4] = ["probe.y", "probe.next", "probe.squares", "probe.counters"];
/// The rows of x beyond a whole tile: not a multiple of 8.
const MORE_ROWS: u32 = 21;
/// The expert of each tile in probes of sorted rows, and the number of the tile's rows in use (`None`: all).
const EXPERT_TILES: [(u32, Option<u32>); 4] = [(0, None), (2, Some(5)), (3, None), (NOBODY, Some(0))];
/// The number of experts of such probes.
const EXPERTS: u32 = 4;

/// A recording of one call, the memory that it starts from, and where its results are.
#[derive(Clone, Debug)]
pub struct WgmmaProbe {
    /// The call, and its buffers.
    pub recording: Recording,
    /// The contents of the buffers before the call.
    pub memory: HostMemory,
    y: Output,
    /// What is made of y for a norm.
    normed: Option<Unscaled>,
    /// The counters of shared tiles, which a call leaves at 0.
    counters: Option<Range>,
    rows: u32,
    cols: u32,
    /// The maximum error of a result, relative to the root mean square of its row, and that of a row's length.
    tolerance: (f64, f64),
}

/// Returns the probe of calls with these constants, on `processors` workgroups at most.
pub fn probe(constants: &[u32], processors: u32) -> WgmmaProbe {
    let variant = variant_of(constants);
    let tile = variant.tile;
    // More than a whole tile, in a number that can be packed.
    let n = (tile.weight_rows() + 1).next_multiple_of(2 * SWIZZLED_COLS);
    // More columns than there are stages, the last of which is not full.
    let codes = format_of_word(variant.codes).codes();
    let stage = codes.map_or(SWIZZLED_COLS, unit_cols);
    let k = (tile.stages + 2) * stage - if codes.is_none() || variant.e4m3 { 0 } else { SWIZZLED_COLS };
    sized(constants, tile.tokens + MORE_ROWS, (n, k), processors)
}

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn half(&mut self, scale: f32) -> u32 {
        u32::from(bf16::from_f32(self.next() * scale).to_bits())
    }

    /// Returns pairs of numbers in a format between -`scale` and `scale`.
    fn pairs(&mut self, format: Format, bytes: u64, scale: f32) -> Vec<u32> {
        let mut half = |scale: f32| match format {
            Format::F16 => u32::from(f16::from_f32(self.next() * scale).to_bits()),
            _ => self.half(scale),
        };
        (0..bytes / 4).map(|_| half(scale) | half(scale) << 16).collect()
    }

    /// Returns rows of numbers in 16 bits between -`scale` and `scale`, in f16 of different scales.
    fn rows(&mut self, order: PackedOrder, rows: u32, cols: u32, scale: f32) -> Vec<u32> {
        let bytes = order.scales_at(rows, cols);
        if !order.has_scales() {
            return self.pairs(order.format(), bytes, scale);
        }
        let scaled = |row: u32| scale * 2f32.powi(-14 - (row as i32 % 3));
        let mut words = self.pairs(order.format(), bytes, 2f32.powi(14));
        words.extend((0..rows).map(|row| scaled(row).to_bits()));
        words
    }

    /// Returns rows in [`PackedOrder::E4m3`] with numbers between -`scale` and `scale`, of different scales.
    fn e4m3(&mut self, rows: u32, cols: u32, scale: f32) -> Vec<u32> {
        let mut words = vec![0; (Packed::bytes(rows, cols) / 4) as usize];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for byte in &mut bytes[..(rows * cols) as usize] {
            *byte = to_e4m3(self.next() * 448.0);
        }
        for (row, word) in (0..rows).zip(&mut words[(rows * cols / 4) as usize..]) {
            *word = (e4m3_scale(scale) * 2f32.powi(-(row as i32 % 3))).to_bits();
        }
        words
    }

    /// Returns floats between -1 and 1.
    fn floats(&mut self, count: u32) -> Vec<u32> {
        (0..count).map(|_| self.half(1.0) << 16).collect()
    }
}

/// Like [`probe`], for `rows` rows of x (not of sorted rows) and a weight matrix of `n` rows and `k` columns. With 0 in
/// place of a number of processors, the number of rows is given by a chunk descriptor.
pub fn sized(constants: &[u32], rows: u32, (n, k): (u32, u32), processors: u32) -> WgmmaProbe {
    let variant = variant_of(constants);
    let tile = variant.tile.tokens;
    let (rows, experts) = match variant.experts {
        true => (EXPERT_TILES.len() as u32 * tile, EXPERTS),
        false => (rows, 1),
    };
    let mut recording = Recording::new("probe.wgmma");
    let mut words: Vec<Vec<u32>> = Vec::new();
    let mut buffer = |name: &str, content: Vec<u32>| -> Range {
        let range = recording.buffer(&format!("probe.{name}"), content.len() as u64 * 4);
        words.push(content);
        range
    };
    let mut numbers = Numbers(1);
    let packed = |range, cols| Packed { range, cols, order: PackedOrder::Swizzled };
    // The sums are about 1, so that gated outputs are neither all zero nor all linear.
    let size = 3.0 / (k as f32).sqrt();
    let format = format_of_word(variant.codes);
    let (weights, scale) = match format {
        Format::Bf16 | Format::F16 | Format::F32 => {
            (numbers.pairs(format, u64::from(experts * n) * u64::from(k) * 2, size), 1.0)
        }
        Format::Codes(codes) => {
            let weights = sample(codes, Layout::Fragments, experts * n, k);
            let mean = mean_square(codes, &weights, k).sqrt();
            (weights, (f64::from(size) / mean) as f32)
        }
    };
    let weight = buffer("weight", weights);
    let order = order_of(format, variant.e4m3);
    let padded = match variant.experts {
        true => rows,
        false => Packed::padded_rows(rows),
    };
    let x = match variant.e4m3 {
        true => numbers.e4m3(padded, k, scale),
        false => numbers.rows(order, padded, k, scale),
    };
    let x = Packed { order, ..packed(buffer("x", x), k) };
    let bias = variant.bias.then(|| buffer("bias", numbers.floats(experts * n)));
    let epilogue = Epilogue::of_code(variant.epilogue);
    let cols = if epilogue.halves() { n / 2 } else { n };
    let y = match variant.packed {
        true => Output::Packed(packed(buffer("y", vec![0; (Packed::bytes(rows, cols) / 4) as usize]), cols)),
        false => {
            let stride = cols.next_multiple_of(8) + 8;
            Output::Rows(Activations { range: buffer("y", numbers.floats(rows * stride)), stride })
        }
    };
    let squares = |cols: u32| (Unscaled::square_bytes(PackedOrder::Swizzled, rows, cols) / 4) as u32;
    let (fold, normed) = match variant.fold {
        // The factors are between 0.5 and 8.
        1 => {
            let squares =
                numbers.floats(squares(k)).iter().map(|word| (f32::from_bits(*word) * 2.0 + 2.0).to_bits()).collect();
            (Fold::Scale(Unscaled { rows: x, squares: buffer("squares", squares) }, 1e-2), None)
        }
        2 => {
            let next = packed(buffer("next", vec![0; (Packed::bytes(rows, n) / 4) as usize]), n);
            let normed = Unscaled { rows: next, squares: buffer("squares", vec![0; squares(n) as usize]) };
            (Fold::Next(normed, buffer("norm", numbers.floats(n))), Some(normed))
        }
        _ => (Fold::None, None),
    };
    let label = "probe".to_owned();
    let weight = Matrix { range: weight, format, rows: n, cols: k };
    let product = Tiled { label, weight, x, bias, epilogue, y };
    let mut counters = None;
    let call = match variant.experts {
        true => {
            let mut tiles: Vec<u32> = EXPERT_TILES.iter().map(|(expert, _)| *expert).collect();
            tiles.push(EXPERT_TILES.iter().filter(|(expert, _)| *expert != NOBODY).count() as u32);
            // An odd multiplier reaches every row once, as there are an even number of them without other factors.
            let slot = |i: u32| {
                let (_, used) = EXPERT_TILES[(i / tile) as usize];
                if used.is_none_or(|used| i % tile < used) { (i * 7 + 3) % rows } else { NOBODY }
            };
            let (tiles, slots) = (buffer("tiles", tiles), buffer("slots", (0..rows).map(slot).collect()));
            let most = EXPERT_TILES.len() as u32;
            let sorted = Sorted { tiles, slots, tile, most, chosen: 1, part: ExpertPart::ALL };
            wgmma_sorted(&product, variant.tile, &sorted, processors)
        }
        false => {
            let count = (processors == 0).then(|| buffer("count", vec![0, 0, rows]));
            let shares = (variant.tile.splits > 1).then(|| {
                let [partials, counters] = Shares::bytes(variant.tile, rows, n).map(|bytes| bytes as usize / 4);
                Shares {
                    partials: buffer("partials", vec![u32::MAX; partials]),
                    counters: buffer("counters", vec![0; counters]),
                }
            });
            counters = shares.map(|shares| shares.counters);
            let processors = if processors == 0 { 132 } else { processors };
            wgmma(&product, variant.tile, (rows, count), WgmmaOptions { processors, shares, fold })
        }
    };
    recording.call(call);
    // Weights of codes are rounded to bfloat16, 2^-9 of themselves. Where results are multiplied by each other, the error of
    // one is multiplied by the other one, which may be large. A lane that reads wrong codes makes a row wrong by more than a
    // tenth of its length.
    let tolerance = match (format.codes(), epilogue.multiplies()) {
        (None, _) => (1e-3, f64::INFINITY),
        (Some(_), false) => (3e-2, 1e-2),
        (Some(_), true) => (0.3, 2e-2),
    };
    WgmmaProbe { recording, memory: HostMemory { buffers: words }, y, normed, counters, rows, cols, tolerance }
}

/// Returns the mean square of the first 16 rows of a packed matrix of codes.
fn mean_square(codes: Codes, weights: &[u32], k: u32) -> f64 {
    let mut recording = Recording::new("weights");
    let range = recording.buffer("weights", weights.len() as u64 * 4);
    let memory = HostMemory { buffers: vec![weights.to_vec()] };
    let cols = k.next_multiple_of(unit_cols(codes));
    let matrix = PackedMatrix { range, format: Format::Codes(codes), fragments: true, cols };
    let square = |i: u32| f64::from(memory.element(&matrix, i / k, i % k)).powi(2);
    (0..16 * k).map(square).sum::<f64>() / f64::from(16 * k)
}

impl WgmmaProbe {
    /// Returns a description of the first result in which `found`, the memory after the call on a device, differs from the
    /// reference; `None` if they agree.
    pub fn difference(&self, found: &HostMemory) -> Option<String> {
        let mut wanted = self.memory.clone();
        interpreter::run(&self.recording, &mut wanted);
        // Sums differ in their order only; an output in bfloat16 may be rounded to the other neighbor, 2^-8 of itself.
        let rounding = if matches!(self.y, Output::Packed(_)) { 2f64.powi(-7) } else { 1e-4 };
        let (least, mean) = self.tolerance;
        let value = |memory: &HostMemory, row: u32, col: u32| match self.y {
            Output::Rows(y) => memory.f32(y.range, row * y.stride + col),
            Output::Packed(y) => memory.weight(Format::Bf16, y.range, y.index(row, col, self.rows) as u32),
        };
        for row in 0..self.rows {
            let squares: f64 = (0..self.cols).map(|col| f64::from(value(&wanted, row, col)).powi(2)).sum();
            let most = least * (squares / f64::from(self.cols)).sqrt();
            let mut errors = 0.0;
            for col in 0..self.cols {
                let [wanted, found] = [&wanted, found].map(|memory| f64::from(value(memory, row, col)));
                let error = (wanted - found).abs();
                if error.is_nan() || error > most + rounding * wanted.abs() {
                    return Some(format!("row {row}, column {col} is {found}, not {wanted}"));
                }
                errors += error * error;
            }
            if errors.sqrt() > mean * squares.sqrt() {
                return Some(format!("row {row} is wrong by {:.4} of its length", (errors / squares).sqrt()));
            }
        }
        if let Some(normed) = self.normed {
            let difference = self.difference_of_norm(normed, &wanted, found);
            if difference.is_some() {
                return difference;
            }
        }
        if let Some(counters) = self.counters
            && (0..counters.bytes as u32 / 4).any(|at| found.u32(counters, at) != 0)
        {
            return Some("a counter of a shared tile is not 0".to_owned());
        }
        // What lies beyond the results stays as it was.
        if let Output::Rows(y) = self.y {
            for (row, col) in (0..self.rows).flat_map(|row| (self.cols..y.stride).map(move |col| (row, col))) {
                let [before, after] = [&self.memory, found].map(|memory| memory.u32(y.range, row * y.stride + col));
                if before != after {
                    return Some(format!("row {row}, column {col} was overwritten"));
                }
            }
        }
        None
    }

    /// Returns a description of the first row in which the input of a norm differs.
    fn difference_of_norm(&self, normed: Unscaled, wanted: &HostMemory, found: &HostMemory) -> Option<String> {
        let (_, tolerance) = self.tolerance;
        let (padded, parts) = (Packed::padded_rows(self.rows), self.cols / SWIZZLED_COLS);
        for row in 0..self.rows {
            let squares = |memory: &HostMemory| -> f64 {
                (0..parts).map(|part| f64::from(memory.f32(normed.squares, part * padded + row))).sum()
            };
            let [length, other] = [wanted, found].map(squares);
            if (length - other).abs() > length * (2.0 * tolerance.min(1e-2) + 1e-4) || other.is_nan() {
                return Some(format!("the squares of row {row} are {other}, not {length}"));
            }
            let value = |memory: &HostMemory, col: u32| {
                f64::from(memory.weight(Format::Bf16, normed.rows.range, normed.rows.index(row, col, self.rows) as u32))
            };
            // Each is rounded to the other neighbor at most, but for the product's own error.
            let most = 2f64.powi(-7) + self.tolerance.0;
            for col in 0..self.cols {
                let [wanted, found] = [wanted, found].map(|memory| value(memory, col));
                let error = (wanted - found).abs();
                if error.is_nan() || error > most * wanted.abs() + most * 0.25 {
                    return Some(format!("row {row}, column {col} of the norm is {found}, not {wanted}"));
                }
            }
        }
        None
    }
}

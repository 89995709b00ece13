//! Probes of `wgmma`: for the constants of a call, a small recording that launches the same program on random numbers,
//! with more columns than stages and with tiles that are not full, the memory that it starts from, and the comparison of
//! a device's results with the reference's. They show at start that the driver has compiled the program correctly and
//! launches it as documented here.
//!
//! Not here: running a probe on a device (`gpu::build`).

use super::{variant_of, wgmma};
use crate::kernels::gemm::tiled::{Output, Packed, PackedOrder, SWIZZLED_COLS, Tiled};
use crate::kernels::gemm::{Activations, Epilogue, Glu, Matrix};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::interpreter;
use crate::kernels::recording::{Range, Recording};
use crate::memory::pack::Format;
use half::bf16;

/// The name of the buffer of a probe's results.
pub const RESULTS: &str = "probe.y";
/// The rows of x beyond a whole tile: not a multiple of 8.
const MORE_ROWS: u32 = 21;

/// A recording of one call, the memory that it starts from, and where its results are.
#[derive(Clone, Debug)]
pub struct WgmmaProbe {
    /// The call, and its buffers.
    pub recording: Recording,
    /// The contents of the buffers before the call.
    pub memory: HostMemory,
    y: Output,
    rows: u32,
    cols: u32,
}

/// Returns the probe of calls with these constants, on `processors` workgroups at most.
pub fn probe(constants: &[u32], processors: u32) -> WgmmaProbe {
    let variant = variant_of(constants);
    let tile = variant.tile;
    // More than a whole tile, in a number that can be packed.
    let n = (tile.weight_rows() + 1).next_multiple_of(2 * SWIZZLED_COLS);
    let k = (tile.stages + 2) * SWIZZLED_COLS;
    sized(constants, tile.tokens + MORE_ROWS, (n, k), processors)
}

/// Like [`probe`], for `rows` rows of x and a weight matrix of `n` rows and `k` columns. With 0 in place of a number of
/// processors, the number of rows is given by a chunk descriptor.
pub fn sized(constants: &[u32], rows: u32, (n, k): (u32, u32), processors: u32) -> WgmmaProbe {
    let variant = variant_of(constants);
    let mut recording = Recording::new("probe.wgmma");
    let mut words = Vec::new();
    let mut buffer = |name: &str, content: Vec<u32>| -> Range {
        let range = recording.buffer(&format!("probe.{name}"), content.len() as u64 * 4);
        words.push(content);
        range
    };
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut numbers = |bytes: u64, scale: f32| -> Vec<u32> {
        let mut half = || u32::from(bf16::from_f32(random() * scale).to_bits());
        (0..bytes / 4).map(|_| half() | half() << 16).collect()
    };
    let packed = |range, cols| Packed { range, format: Format::Bf16, cols, order: PackedOrder::Swizzled };
    // The sums are about 1, so that gated outputs are neither all zero nor all linear.
    let weight = buffer("weight", numbers(u64::from(n) * u64::from(k) * 2, 3.0 / (k as f32).sqrt()));
    let x = packed(buffer("x", numbers(Packed::bytes(rows, k), 1.0)), k);
    let mut floats = |count: u32| -> Vec<u32> { (0..count).map(|_| (numbers(4, 1.0)[0] & 0xffff) << 16).collect() };
    let bias = variant.bias.then(|| buffer("bias", floats(n)));
    let epilogue = match variant.epilogue {
        0 => Epilogue::Store,
        1 => Epilogue::Residual,
        3 => Epilogue::Gated(Glu::GeluTanh),
        clamped if clamped & 0xff == 4 => Epilogue::Gated(Glu::Clamped { limit: clamped & !0xff }),
        _ => Epilogue::Gated(Glu::Silu),
    };
    let cols = if epilogue.halves() { n / 2 } else { n };
    let y = match variant.packed {
        true => Output::Packed(packed(buffer("y", vec![0; (Packed::bytes(rows, cols) / 4) as usize]), cols)),
        false => {
            let stride = cols.next_multiple_of(8) + 8;
            Output::Rows(Activations { range: buffer("y", floats(rows * stride)), stride })
        }
    };
    let count = (processors == 0).then(|| buffer("count", vec![0, 0, rows]));
    let label = "probe".to_owned();
    let weight = Matrix { range: weight, format: Format::Bf16, rows: n, cols: k };
    let product = Tiled { label, weight, x, bias, epilogue, y };
    let call = wgmma(&product, variant.tile, rows, count, if processors == 0 { 132 } else { processors });
    recording.call(call);
    WgmmaProbe { recording, memory: HostMemory { buffers: words }, y, rows, cols }
}

impl WgmmaProbe {
    /// Returns a description of the first result in which `found`, the memory after the call on a device, differs from the
    /// reference; `None` if they agree.
    pub fn difference(&self, found: &HostMemory) -> Option<String> {
        let mut wanted = self.memory.clone();
        interpreter::run(&self.recording, &mut wanted);
        // Sums differ in their order only; an output in bfloat16 may be rounded to the other neighbor, 2^-8 of itself.
        let rounding = if matches!(self.y, Output::Packed(_)) { 2f64.powi(-7) } else { 1e-4 };
        let value = |memory: &HostMemory, row: u32, col: u32| match self.y {
            Output::Rows(y) => memory.f32(y.range, row * y.stride + col),
            Output::Packed(y) => memory.weight(Format::Bf16, y.range, y.index(row, col, self.rows) as u32),
        };
        for row in 0..self.rows {
            let squares: f64 = (0..self.cols).map(|col| f64::from(value(&wanted, row, col)).powi(2)).sum();
            let most = 1e-3 * (squares / f64::from(self.cols)).sqrt();
            for col in 0..self.cols {
                let [wanted, found] = [&wanted, found].map(|memory| f64::from(value(memory, row, col)));
                let error = (wanted - found).abs();
                if error.is_nan() || error > most + rounding * wanted.abs() {
                    return Some(format!("row {row}, column {col} is {found}, not {wanted}"));
                }
            }
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
}

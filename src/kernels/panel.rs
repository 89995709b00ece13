//! `panel`: products for the rows of a larger decode batch, packed as `tiled` takes them, on weights packed
//! as fragments. Deliberately absent: a prompt's rows (`tiled`), and rows of floats (`skinny`).

use super::gemm::{self, Epilogue};
use super::host_memory::HostMemory;
use super::recording::Call;
use super::shaders::{PanelArgs, PanelConstants};
use super::skinny::Matrices;
use super::tiled::{Output, Tiled, token_index};
use super::{Format, fold};
use crate::memory::pack::{FRAGMENT_COLS, fragment_index};

/// The shape of `panel`'s workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Config {
    /// Invocations: a multiple of 32; each 32 take a share of K.
    pub threads: u32,
    /// Blocks of 16 rows of W.
    pub tiles: u32,
    /// Chunks of 32 columns that each 32 invocations have in flight.
    pub ahead: u32,
    /// Blocks of 16 rows of x.
    pub blocks: u32,
}

impl Config {
    /// Shared memory of a workgroup, bytes.
    pub fn shared_bytes(self, matrices: Matrices) -> u32 {
        let exchange = if matrices == Matrices::ByHand { self.threads * 32 } else { 0 };
        self.threads / 32 * self.blocks * 64 * 16 + exchange
    }
}

/// A product of `rows` packed rows of x.
///
/// # Panics
/// If formats are others than bfloat16 or y is packed in other columns than the product gives.
pub fn panel(product: &Tiled, rows: u32, matrices: Matrices, config: Config) -> Call {
    let weight = product.weight;
    assert_eq!((weight.format, product.x.format, product.x.cols), (Format::Bf16, Format::Bf16, weight.cols));
    let (y, y_stride, packed) = match product.y {
        Output::Rows(y) => (y.range, y.stride, 0),
        Output::Packed(y) => {
            assert_eq!((product.epilogue, y.cols), (Epilogue::SwiGlu, weight.rows / 2), "packed y");
            (y.range, y.cols.div_ceil(FRAGMENT_COLS), 1)
        }
    };
    let blocks = config.blocks;
    let constants = PanelConstants {
        threads: config.threads,
        lanes: config.threads,
        bias: u32::from(product.bias.is_some()),
        epilogue: product.epilogue.code(),
        tiles: config.tiles,
        ahead: config.ahead,
        blocks,
        chunks: weight.cols.div_ceil(FRAGMENT_COLS),
        packed,
    };
    let args = PanelArgs {
        weight: weight.range,
        x: product.x.range,
        bias: product.bias.unwrap_or(weight.range.none()),
        y,
        n: weight.rows,
        rows,
        y_stride,
    };
    Call {
        kernel: match matrices {
            Matrices::ByHand => "panel.bf16.plain",
            Matrices::Cooperative => "panel.bf16",
        },
        label: product.label.clone(),
        constants: constants.into_values(),
        args: args.into_args(),
        groups: fold(weight.rows.div_ceil(16 * config.tiles), rows.div_ceil(16 * blocks)),
    }
}

/// Sums in f64, as of the other products.
pub(super) fn reference_panel(call: &Call, memory: &mut HostMemory) {
    let a = PanelArgs::from_args(&call.args);
    let c = PanelConstants::from_values(&call.constants);
    let k = c.chunks * FRAGMENT_COLS;
    let weight = |memory: &HostMemory, r, col| {
        f64::from(memory.weight(Format::Bf16, a.weight, fragment_index(r, col, k) as u32))
    };
    let rows = if c.packed == 1 { a.rows.next_multiple_of(16) } else { a.rows };
    for row in 0..rows {
        let x: Vec<f64> =
            (0..k).map(|col| f64::from(memory.weight(Format::Bf16, a.x, token_index(row, col, k) as u32))).collect();
        let v: Vec<f64> = (0..a.n)
            .map(|r| {
                let dot: f64 = (0..k).zip(&x).map(|(col, x)| weight(memory, r, col) * x).sum();
                dot + if c.bias == 1 { f64::from(memory.f32(a.bias, r)) } else { 0.0 }
            })
            .collect();
        if c.packed == 0 {
            gemm::finish(memory, c.epilogue, (a.y, None), row * a.y_stride, &v);
        } else {
            // Columns go two at a time; those behind are left as they are.
            for (col, pair) in (0..).zip(v.chunks_exact(2)) {
                let at = token_index(row, col, a.y_stride * FRAGMENT_COLS);
                memory.set_number(Format::Bf16, a.y, at as u32, gemm::swiglu(pair[0], pair[1]) as f32);
            }
            if a.n / 2 % 2 == 1 {
                let at = token_index(row, a.n / 2, a.y_stride * FRAGMENT_COLS);
                memory.set_number(Format::Bf16, a.y, at as u32, 0.0);
            }
        }
    }
}

//! `skinny`, the small-M GEMM: products of a fragment-packed weight matrix with a few rows of activations, with the
//! same result as `gemv`. Not here: row-major weights (`gemm`).

use super::{Format, fold, format_of};
use crate::kernels::gemm::{Product, Shape, product};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{SkinnyArgs, SkinnyConstants};
use crate::kernels::tags::Flow;

/// How a kernel multiplies blocks of 16 × 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Matrices {
    /// With scalar arithmetic, through shared memory: on any device.
    Emulated,
    /// With cooperative matrices, on the device's matrix units.
    Cooperative,
}

/// The shape of `skinny`'s workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SkinnyConfig {
    /// The number of invocations, a multiple of 32. Each group of 32 processes a share of K.
    pub threads: u32,
    /// The number of blocks of 16 rows of W per workgroup.
    pub tiles: u32,
    /// The number of chunks of 32 columns that each group of 32 invocations has in flight.
    pub ahead: u32,
}

/// The maximum number of rows of x.
pub const MOST_ROWS: u32 = 64;

/// The maximum of [`SkinnyConfig::ahead`] with one block of rows of W: with more weights in flight, registers are stored to
/// memory.
pub const MOST_AHEAD: u32 = 8;

impl SkinnyConfig {
    /// Returns the shared memory that a workgroup uses for `rows` rows of x, in bytes.
    pub fn shared_bytes(self, rows: u32, matrices: Matrices) -> u32 {
        let (groups, blocks, tokens, quads) = (self.threads / 32, rows.div_ceil(8), rows.min(8), self.ahead * 8);
        let loads = (tokens * quads).div_ceil(32);
        let squares = match matrices {
            Matrices::Emulated => quads,
            Matrices::Cooperative if rows == 1 => loads,
            Matrices::Cooperative => quads.div_ceil(32),
        };
        let exchange = if matrices == Matrices::Emulated { self.threads * 32 } else { 0 };
        let (sums, x) = (self.tiles * blocks * tokens * 4 * 16, tokens * quads * 16);
        groups * (sums + x + blocks * tokens * squares * 4) + exchange
    }
}

/// Returns the call of `product` for `rows` rows of x, at most [`MOST_ROWS`], with W packed as
/// [`crate::memory::pack::Layout::Fragments`] in bfloat16 or f16. `flow` gives the tagged operands.
pub fn skinny(
    product: &Product,
    rows: u32,
    matrices: Matrices,
    config: SkinnyConfig,
    flow: Flow,
    fault: Range,
) -> Call {
    assert!(rows <= MOST_ROWS, "{rows} rows of \"{}\"", product.label);
    let (norm, bias, epsilon) = product.touched();
    let chunks = product.weight.cols.div_ceil(32);
    let constants = SkinnyConstants {
        threads: config.threads,
        lanes: config.threads,
        norm: u32::from(product.norm.is_some()),
        bias: u32::from(product.bias.is_some()),
        epilogue: product.epilogue.code(),
        tiles: config.tiles,
        ahead: config.ahead,
        blocks: rows.div_ceil(8),
        rows,
        chunks,
        tagged: flow.code(),
        devices: 0,
    };
    let args = SkinnyArgs {
        weight: product.weight.range,
        x: product.x.range,
        norm,
        bias,
        y: product.y.range,
        // An empty range, so that no barrier is derived: calls may set and read the fault word in any order.
        fault: fault.none(),
        n: product.weight.rows,
        k: product.weight.cols,
        x_stride: product.x.stride,
        y_stride: product.y.stride,
        epsilon,
        x_tag: flow.input,
        old_tag: flow.old,
        y_tag: flow.output.unwrap_or(0),
    };
    let call = Call {
        kernel: match (product.weight.format, matrices) {
            (Format::Bf16, Matrices::Emulated) => "skinny.bf16.plain",
            (Format::Bf16, Matrices::Cooperative) => "skinny.bf16",
            (Format::F16, Matrices::Emulated) => "skinny.f16.plain",
            (Format::F16, Matrices::Cooperative) => "skinny.f16",
            (format, _) => panic!("{format:?} of \"{}\"", product.label),
        },
        label: product.label.clone(),
        constants: constants.into_values(),
        args: args.into_args(),
        groups: fold(product.weight.rows.div_ceil(16 * config.tiles), 1),
    };
    flow.mark(call, product.x.range, product.y.range)
}

pub(crate) fn reference_skinny(call: &Call, memory: &mut HostMemory) {
    let a = SkinnyArgs::from_args(&call.args);
    let c = SkinnyConstants::from_values(&call.constants);
    let shape = Shape {
        weight: a.weight,
        x: a.x,
        norm: (c.norm == 1).then_some(a.norm),
        bias: (c.bias == 1).then_some(a.bias),
        y: a.y,
        n: a.n,
        k: a.k,
        cols: a.k,
        first_col: 0,
        fragments: true,
        x_stride: a.x_stride,
        y_stride: a.y_stride,
        epsilon: a.epsilon,
        epilogue: c.epilogue,
        tag: (c.tagged == 3).then_some(a.y_tag),
    };
    product(memory, format_of(call.kernel, 0), c.rows, &shape);
}

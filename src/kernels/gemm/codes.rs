//! Products of quantised weights in fragment order: `skinny_codes`, the small-M GEMM, and `expand_codes`, which expands a
//! part of a matrix to bfloat16 for the products of many rows. Not here: row-major quantised weights (`gemm`), and the
//! layout of codes (`memory::pack::codes`).

use super::skinny::Matrices;
use super::{Matrix, Product, Shape, product};
use crate::kernels::host_memory::{HostMemory, PackedMatrix};
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{ExpandCodesArgs, ExpandCodesConstants, SkinnyCodesArgs, SkinnyCodesConstants};
use crate::kernels::tags::Flow;
use crate::kernels::{Format, codes_word, fold, format_of};
use crate::memory::pack::codes::unit_cols;
use crate::memory::pack::{FRAGMENT_COLS, FRAGMENT_ROWS, Layout, Packing, fragment_index};

/// The maximum number of rows of x.
pub const MOST_ROWS: u32 = 16;

/// Returns the number of units of columns of a matrix of codes.
///
/// # Panics
/// If it has no codes.
pub fn units(weight: &Matrix) -> u32 {
    let codes = weight.format.codes().unwrap_or_else(|| panic!("weights of {:?} are no codes", weight.format));
    weight.cols.div_ceil(unit_cols(codes))
}

/// The shape of `skinny_codes`' workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodesConfig {
    /// The number of invocations, a multiple of 32. Each group of 32 processes a share of K.
    pub threads: u32,
    /// The number of blocks of 16 rows of W that a workgroup computes together.
    pub tiles: u32,
    /// The number of units of columns of a step of a group of 32 invocations; two steps are in flight.
    pub ahead: u32,
    /// The maximum number of workgroups; each computes as many tiles, but for the last ones.
    pub workgroups: u32,
}

impl CodesConfig {
    /// Returns the shared memory that a workgroup uses for `rows` rows of x and a matrix of `cols` columns, in bytes.
    pub fn shared_bytes(self, format: Format, cols: u32, rows: u32, matrices: Matrices) -> u32 {
        let unit = format.codes().map_or(128, unit_cols);
        let (groups, halves, block) = (self.threads / 32, rows.div_ceil(8), rows.min(8));
        let rounds = cols.div_ceil(unit).div_ceil(groups * self.ahead);
        let all_loads = rounds * self.ahead * unit / 128;
        let loads = all_loads.next_multiple_of(all_loads.min(8));
        let (x, sums) = (halves * loads * 4 * block * 4 * 16, 2 * self.tiles * halves * block * 4 * 16);
        let exchange = if matrices == Matrices::Emulated { self.threads * 36 } else { 0 };
        groups * (x + sums + rows * 8) + exchange
    }
}

/// The columns of W that a call of `skinny_codes` multiplies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProductColumns {
    /// Those of a range of units, with which x begins.
    Of(std::ops::Range<u32>),
    /// All of them, each part by as many workgroups; `partials`, of [`partial_bytes`], has the sums of all parts but the last.
    /// x and y are tagged.
    Parts {
        /// The number of parts.
        count: u32,
        /// The sums of all parts but the last.
        partials: Range,
    },
}

/// Returns the size in bytes of the sums of `count` parts of the columns of a matrix of `n` rows, for `rows` rows of x.
pub fn partial_bytes(count: u32, rows: u32, n: u32) -> u64 {
    u64::from(count - 1) * u64::from(rows) * u64::from(n.next_multiple_of(4)) * 4
}

/// Returns the call of `product` for `rows` rows of x, at most [`MOST_ROWS`], with W as codes packed as
/// [`crate::memory::pack::Layout::Fragments`]. `flow` gives the tagged operands, and `columns` the
/// columns of W that are multiplied.
///
/// # Panics
/// If there are too many rows, W has no codes, a part of the columns has a norm, or parts side by side are not tagged.
pub fn skinny_codes(
    product: &Product,
    rows: u32,
    matrices: Matrices,
    config: CodesConfig,
    columns: ProductColumns,
    flow: Flow,
    fault: Range,
) -> Call {
    let units = units(&product.weight);
    let (part, count, partials) = match columns {
        ProductColumns::Of(part) => (part, 1, fault.none()),
        ProductColumns::Parts { count, partials } => (0..units, count, partials),
    };
    let own_units = (part.end - part.start).div_ceil(count);
    assert!(rows <= MOST_ROWS && (own_units == units || product.norm.is_none()), "{rows} rows, units {part:?}");
    let tagged = flow.input_carried && flow.output.is_some();
    assert!(count == 1 || tagged && own_units * (count - 1) < units, "{count} parts of {units} units, {flow:?}");
    let skipped = product.weight.format.codes().map_or(0, |codes| part.start * unit_cols(codes));
    let k = match part.end == units {
        true => product.weight.cols - skipped,
        false => product.weight.format.codes().map_or(0, |codes| own_units * unit_cols(codes)),
    };
    let bytes = partial_bytes(count, rows, product.weight.rows);
    assert!(partials.bytes >= bytes, "{partials:?} instead of {bytes} bytes of partial sums");
    let (norm, bias, epsilon) = product.touched();
    let constants = SkinnyCodesConstants {
        threads: config.threads,
        lanes: config.threads,
        norm: u32::from(product.norm.is_some()),
        bias: u32::from(product.bias.is_some()),
        epilogue: product.epilogue.code(),
        tiles: config.tiles,
        ahead: config.ahead,
        rows,
        units,
        tagged: flow.code(),
        codes: codes_word(product.weight.format),
        first_unit: part.start,
        own_units,
        devices: 0,
        column_parts: count,
    };
    let args = SkinnyCodesArgs {
        weight: product.weight.range,
        x: product.x.range,
        norm,
        bias,
        y: product.y.range,
        partials: Range { bytes, ..partials },
        // An empty range, so that no barrier is derived: calls may set and read the fault word in any order.
        fault: fault.none(),
        n: product.weight.rows,
        k,
        x_stride: product.x.stride,
        y_stride: product.y.stride,
        epsilon,
        x_tag: flow.input,
        old_tag: flow.old,
        y_tag: flow.output.unwrap_or(0),
    };
    let call = Call {
        kernel: match matrices {
            Matrices::Emulated => "skinny_codes.plain",
            Matrices::Cooperative => "skinny_codes",
        },
        label: product.label.clone(),
        constants: constants.into_values(),
        args: args.into_args(),
        groups: {
            let tiles = product.weight.rows.div_ceil(16 * config.tiles);
            let each = tiles.div_ceil((config.workgroups / count).max(1));
            fold(tiles.div_ceil(each) * count, 1)
        },
    };
    let call = flow.mark(call, product.x.range, product.y.range);
    if count > 1 { call.carry(partials) } else { call }
}

pub(crate) fn reference_skinny_codes(call: &Call, memory: &mut HostMemory) {
    let a = SkinnyCodesArgs::from_args(&call.args);
    let c = SkinnyCodesConstants::from_values(&call.constants);
    let format = format_of("codes", c.codes);
    let unit = format.codes().map_or(1, unit_cols);
    let shape = Shape {
        weight: a.weight,
        x: a.x,
        norm: (c.norm == 1).then_some(a.norm),
        bias: (c.bias == 1).then_some(a.bias),
        y: a.y,
        n: a.n,
        k: a.k,
        cols: c.units * unit,
        first_col: c.first_unit * unit,
        fragments: true,
        x_stride: a.x_stride,
        y_stride: a.y_stride,
        epsilon: a.epsilon,
        epilogue: c.epilogue,
        tag: (c.tagged == 3).then_some(a.y_tag),
    };
    product(memory, format, c.rows, &shape);
}

/// Returns the size in bytes of `rows` rows of a matrix of `cols` columns after [`expand_codes`].
pub fn expanded_bytes(rows: u32, cols: u32) -> u64 {
    Packing { rows, cols, layout: Layout::Fragments, format: Format::Bf16 }.bytes()
}

/// Returns the call that expands rows `first .. first + rows` of W, codes in fragment order, to bfloat16 in fragment
/// order in `y`, of [`expanded_bytes`].
///
/// # Panics
/// If W has no codes, or `first` is not a multiple of 16.
pub fn expand_codes(label: String, weight: &Matrix, (first, rows): (u32, u32), matrices: Matrices, y: Range) -> Call {
    assert!(first.is_multiple_of(FRAGMENT_ROWS) && first + rows <= weight.rows, "rows {first} + {rows} of {weight:?}");
    let packing = Packing { rows, cols: weight.cols, layout: Layout::Fragments, format: weight.format };
    let (threads, row_blocks) = (128, rows.div_ceil(FRAGMENT_ROWS));
    let constants =
        ExpandCodesConstants { threads, lanes: threads, units: units(weight), codes: codes_word(weight.format) };
    let args = ExpandCodesArgs {
        weight: weight.range.part(packing.row_bytes() * u64::from(first), packing.bytes()),
        y,
        row_blocks,
        chunks: weight.cols.div_ceil(FRAGMENT_COLS),
    };
    Call {
        kernel: match matrices {
            Matrices::Emulated => "expand_codes.plain",
            Matrices::Cooperative => "expand_codes",
        },
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: fold((row_blocks * constants.units).div_ceil(threads / 32), 1),
    }
}

pub(crate) fn reference_expand_codes(call: &Call, memory: &mut HostMemory) {
    let a = ExpandCodesArgs::from_args(&call.args);
    let c = ExpandCodesConstants::from_values(&call.constants);
    let format = format_of("codes", c.codes);
    let cols = a.chunks * FRAGMENT_COLS;
    let unit = format.codes().map_or(1, unit_cols);
    let matrix = PackedMatrix { range: a.weight, format, fragments: true, cols: c.units * unit };
    for row in 0..a.row_blocks * FRAGMENT_ROWS {
        for col in 0..cols {
            let value = memory.element(&matrix, row, col);
            memory.set_number(Format::Bf16, a.y, fragment_index(row, col, cols) as u32, value);
        }
    }
}

//! `panel`, the small-M GEMM for larger decode batches: products of a fragment-packed weight matrix with packed rows,
//! as `tiled` takes them. An RMSNorm between two products can be fused into both. Not here: rows of prompts (`tiled`),
//! and rows of floats (`skinny`).

use super::{Format, codes_word, fold, format_of};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::gemm::tiled::{Output, Packed, PackedOrder, Tiled, token_index};
use crate::kernels::gemm::{self, Epilogue};
use crate::kernels::host_memory::{HostMemory, PackedMatrix};
use crate::kernels::moe::{ExpertPart, NOBODY, Sorted};
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{PanelArgs, PanelConstants};
use crate::memory::pack::FRAGMENT_COLS;
use crate::memory::pack::codes::unit_cols;

/// The shape of `panel`'s workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PanelConfig {
    /// The number of invocations, a multiple of 32. Each group of 32 processes a share of K.
    pub threads: u32,
    /// The number of blocks of 16 rows of W per workgroup.
    pub tiles: u32,
    /// The number of chunks of 32 columns, or of units of columns of codes, that each group of 32 invocations has in flight.
    pub ahead: u32,
    /// The number of blocks of 16 rows of x per workgroup.
    pub blocks: u32,
    /// Whether codes are multiplied in f16 where x allows, which takes fewer instructions than bfloat16. Applies to codes on
    /// cooperative matrices.
    pub in_f16: bool,
}

impl PanelConfig {
    /// Returns the shared memory that a workgroup uses, in bytes.
    pub fn shared_bytes(self, matrices: Matrices) -> u32 {
        let exchange = if matrices == Matrices::Emulated { self.threads * 32 } else { 0 };
        self.threads / 32 * self.blocks * 64 * 16 + exchange
    }
}

/// The input of an RMSNorm that is fused into the products around it: packed rows that are multiplied by the norm's
/// weight but not scaled, and their squares.
#[derive(Clone, Copy, Debug)]
pub struct Unscaled {
    /// Each row ⊙ the norm's weight; the number of columns is a multiple of 32, or of 64 in [`PackedOrder::Swizzled`].
    pub rows: Packed,
    /// `[rows padded to a multiple of 16][columns / 16]` f32: the sums of the squares of 16 columns. Of rows in
    /// [`PackedOrder::Swizzled`] instead `[columns / 64][padded rows]`, the sums of the squares of 64 columns.
    pub squares: Range,
}

impl Unscaled {
    /// Returns the size of the squares of `rows` rows and `cols` columns in this order in bytes.
    pub fn square_bytes(order: PackedOrder, rows: u32, cols: u32) -> u64 {
        let sums = match order {
            PackedOrder::Swizzled => u64::from(Packed::padded_rows(rows)) * u64::from(cols / 64),
            _ => u64::from(rows.next_multiple_of(16)) * u64::from(cols / 16),
        };
        sums * 4
    }
}

/// The part of a fused RMSNorm that a product computes.
#[derive(Clone, Copy, Debug)]
pub enum Fold {
    /// None.
    None,
    /// The scaling: x is [`Unscaled::rows`], and the product is scaled with this epsilon.
    Scale(Unscaled, f32),
    /// The preparation of the next norm, which has this weight: the residual product also writes y as [`Unscaled`].
    Next(Unscaled, Range),
}

/// Returns the call of a product with `rows` packed rows of x.
///
/// # Panics
/// If x is not bfloat16, W is f32, the columns of a packed y are not those of the product, or the fused norm does not fit
/// the product.
pub fn panel(product: &Tiled, rows: u32, matrices: Matrices, config: PanelConfig, fold_norm: Fold) -> Call {
    of_rows(product, rows, matrices, config, fold_norm, None)
}

/// Returns the call of a product with rows sorted by expert (MoE), whose tiles have as many rows as a panel of
/// `config`: `product.weight` holds the weights of the experts of `sorted.part`, and its `rows` are those of one expert.
/// Rows of floats are written to the place of their choice: `[rows][chosen][stride]`. In packed rows, padding columns are
/// left unchanged.
pub fn panel_sorted(product: &Tiled, sorted: &Sorted, matrices: Matrices, config: PanelConfig) -> Call {
    assert_eq!(sorted.tile, 16 * config.blocks, "rows of a tile");
    of_rows(product, sorted.slot_count(), matrices, config, Fold::None, Some(sorted))
}

fn of_rows(
    product: &Tiled,
    rows: u32,
    matrices: Matrices,
    config: PanelConfig,
    fold_norm: Fold,
    sorted: Option<&Sorted>,
) -> Call {
    let weight = product.weight;
    let x = (product.x.order, product.x.cols);
    assert_eq!(x, (PackedOrder::Fragments, weight.cols), "x of \"{}\"", product.label);
    let (coded, half) = (weight.format.codes().is_some(), weight.format == Format::F16);
    let (y, y_stride, packed) = match product.y {
        Output::Rows(y) => (y.range, y.stride, 0),
        Output::Packed(y) => {
            assert_eq!((product.epilogue.halves(), y.cols), (true, weight.rows / 2), "packed y");
            (y.range, y.cols.div_ceil(FRAGMENT_COLS), 1)
        }
    };
    let blocks = config.blocks;
    let part = sorted.map_or(ExpertPart::ALL, |s| s.part);
    let none = weight.range.none();
    let (fold_code, parts, squares, norm, next, epsilon) = match fold_norm {
        Fold::None => (0, 1, none, none, none, 0.0),
        Fold::Scale(x, epsilon) => (1, x.rows.cols / 16, x.squares, none, none, epsilon),
        Fold::Next(next, norm) => {
            let fits = product.epilogue == Epilogue::Residual
                && weight.rows == next.rows.cols
                && weight.rows.is_multiple_of(32);
            assert!(fits, "{:?} of {} rows leaves no rows to a norm", product.epilogue, weight.rows);
            (2, 1, next.squares, norm, next.rows.range, 0.0)
        }
    };
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
        fold: fold_code,
        parts,
        experts: u32::from(sorted.is_some()),
        first_expert: part.first,
        part_experts: part.count,
        codes: codes_word(weight.format),
        in_f16: u32::from((config.in_f16 && coded || half) && matrices == Matrices::Cooperative),
    };
    let args = PanelArgs {
        weight: weight.range,
        x: product.x.range,
        bias: product.bias.unwrap_or(weight.range.none()),
        y,
        squares,
        norm,
        next,
        tiles: sorted.map_or(none, |s| s.tiles),
        slots: sorted.map_or(none, |s| s.slots),
        n: weight.rows,
        rows,
        y_stride,
        k: weight.cols,
        epsilon,
    };
    let call = Call {
        kernel: match (weight.format, matrices) {
            (Format::Bf16, Matrices::Emulated) => "panel.bf16.plain",
            (Format::Bf16, Matrices::Cooperative) => "panel.bf16",
            (Format::F16, Matrices::Emulated) => "panel.f16.plain",
            (Format::F16, Matrices::Cooperative) => "panel.f16",
            (Format::Codes(_), Matrices::Emulated) => "panel.codes.plain",
            (Format::Codes(_), Matrices::Cooperative) => "panel.codes",
            (Format::F32, _) => panic!("f32 of \"{}\" in fragments", product.label),
        },
        label: product.label.clone(),
        constants: constants.into_values(),
        args: args.into_args(),
        groups: fold(weight.rows.div_ceil(16 * config.tiles), rows.div_ceil(16 * blocks)),
    };
    match fold_norm {
        Fold::Scale(x, _) => call.reads(x.squares),
        _ => call,
    }
}

/// Sums in f64, like the references of the other products.
pub(crate) fn reference_panel(call: &Call, memory: &mut HostMemory) {
    let a = PanelArgs::from_args(&call.args);
    let c = PanelConstants::from_values(&call.constants);
    let k = c.chunks * FRAGMENT_COLS;
    let format = format_of(call.kernel, c.codes);
    let cols = format.codes().map_or(k, |codes| k.next_multiple_of(unit_cols(codes)));
    let matrix = PackedMatrix { range: a.weight, format, fragments: true, cols };
    let weight = |memory: &HostMemory, r, col| f64::from(memory.element(&matrix, r, col));
    let tile = 16 * c.blocks;
    let rows = if c.packed == 1 { a.rows.next_multiple_of(16) } else { a.rows };
    let part = ExpertPart { first: c.first_expert, count: c.part_experts };
    for row in 0..rows {
        let (mut first, mut bias_row, mut to) = (0, 0, row);
        if c.experts == 1 {
            let expert = memory.u32(a.tiles, row / tile);
            to = if expert == NOBODY { NOBODY } else { memory.u32(a.slots, row) };
            if expert == NOBODY || part.lacks(expert) || (c.packed == 0 && to == NOBODY) {
                continue;
            }
            (first, bias_row) = ((expert - part.first) * a.n, expert * a.n);
        }
        let x: Vec<f64> =
            (0..k).map(|col| f64::from(memory.weight(Format::Bf16, a.x, token_index(row, col, k) as u32))).collect();
        let scale = match c.fold {
            1 => {
                let sum: f64 = (0..c.parts).map(|i| f64::from(memory.f32(a.squares, row * c.parts + i))).sum();
                1.0 / (sum / f64::from(a.k) + f64::from(a.epsilon)).sqrt()
            }
            _ => 1.0,
        };
        let v: Vec<f64> = (0..a.n)
            .map(|r| {
                let dot: f64 = (0..k).zip(&x).map(|(col, x)| weight(memory, first + r, col) * x).sum();
                dot * scale + if c.bias == 1 { f64::from(memory.f32(a.bias, bias_row + r)) } else { 0.0 }
            })
            .collect();
        if c.packed == 0 {
            gemm::finish(memory, c.epilogue, (a.y, None), to * a.y_stride, &v);
            if c.fold == 2 {
                let y: Vec<f32> = (0..a.n).map(|i| memory.f32(a.y, row * a.y_stride + i)).collect();
                for (part, sixteen) in (0..).zip(y.chunks_exact(16)) {
                    let sum: f64 = sixteen.iter().map(|v| f64::from(*v).powi(2)).sum();
                    memory.set_f32(a.squares, row * (a.n / 16) + part, sum as f32);
                }
                for (col, v) in (0..).zip(&y) {
                    let value = memory.f32(a.norm, col) * v;
                    memory.set_number(Format::Bf16, a.next, token_index(row, col, a.n) as u32, value);
                }
            }
        } else {
            // Columns are written in pairs; those beyond the last are left unchanged.
            for (col, pair) in (0..).zip(v.chunks_exact(2)) {
                let at = token_index(row, col, a.y_stride * FRAGMENT_COLS);
                memory.set_number(Format::Bf16, a.y, at as u32, gemm::glu(c.epilogue, pair[0], pair[1]) as f32);
            }
            if a.n / 2 % 2 == 1 {
                let at = token_index(row, a.n / 2, a.y_stride * FRAGMENT_COLS);
                memory.set_number(Format::Bf16, a.y, at as u32, 0.0);
            }
        }
    }
}

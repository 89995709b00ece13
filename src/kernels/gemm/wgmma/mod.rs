//! `wgmma`, the GEMM of many rows on the matrix units of NVIDIA's compute capability 9.0, which only PTX reaches: products
//! of a fragment-packed weight matrix with packed rows in [`PackedOrder::Swizzled`], also of the experts of sorted rows
//! (grouped GEMM), of a matrix in f16 with rows in [`PackedOrder::HalfSwizzled`], and of a matrix in e4m3 with rows in
//! [`PackedOrder::E4m3`]. Its program is a text that [`text`](mod@text)
//! makes for the constants of a call. Not here: other devices (`tiled`, `panel`).

pub mod probe;
pub mod text;

pub use text::{WgmmaTile, WgmmaVariant};

use super::Format;
use crate::kernels::gemm::panel::Fold;
use crate::kernels::gemm::tiled::{E4M3_COLS, Output, Packed, PackedOrder, SWIZZLED_COLS, Tiled, swizzled_index};
use crate::kernels::gemm::{self, Epilogue};
use crate::kernels::host_memory::{HostMemory, PackedMatrix};
use crate::kernels::moe::{ExpertPart, NOBODY, Sorted};
use crate::kernels::recording::{Access, Arg, Call, Range, Recording};
use crate::kernels::shaders::WGMMA;
use crate::kernels::{format_of_word, format_word};
use crate::memory::pack::codes::unit_cols;
use crate::quant::number::Number;

/// Returns what the program of a call with these constants is made for.
pub fn variant_of(constants: &[u32]) -> WgmmaVariant {
    let &[groups, blocks, tokens, stages, bias, epilogue, packed, codes, experts, e4m3, splits, fold] = constants
    else {
        panic!("{} has other constants than {constants:?}", WGMMA.name)
    };
    let tile = WgmmaTile { groups, blocks, tokens, stages, splits };
    let [bias, packed, experts, e4m3] = [bias, packed, experts, e4m3].map(|word| word == 1);
    WgmmaVariant { tile, epilogue, bias, packed, codes, experts, e4m3, fold }
}

/// Whether the kernel multiplies with a weight matrix of `n` rows and `k` columns.
pub fn serves(format: Format, n: u32, k: u32) -> bool {
    format != Format::F32 && n.is_multiple_of(16) && k.is_multiple_of(SWIZZLED_COLS)
}

/// Whether the kernel multiplies rows in e4m3 ([`PackedOrder::E4m3`]) with a weight matrix of `n` rows and `k` columns.
pub fn serves_e4m3(format: Format, n: u32, k: u32) -> bool {
    serves(format, n, k) && format.codes().is_some_and(text::multiplies_e4m3) && k.is_multiple_of(E4M3_COLS)
}

/// Returns the order of the rows that are multiplied with weights in a format; `e4m3`: those in e4m3.
pub fn order_of(format: Format, e4m3: bool) -> PackedOrder {
    match (format, e4m3) {
        (_, true) => PackedOrder::E4m3,
        (Format::F16, false) => PackedOrder::HalfSwizzled,
        (_, false) => PackedOrder::Swizzled,
    }
}

/// Whether a call multiplies rows in e4m3.
pub fn is_e4m3(call: &Call) -> bool {
    call.kernel == WGMMA.name && variant_of(&call.constants).e4m3
}

/// Whether the kernel can write the gated outputs of `n` rows of W as packed rows for the next product.
pub fn packs(n: u32) -> bool {
    n.is_multiple_of(2 * SWIZZLED_COLS)
}

/// Returns the constants of a call of this variant.
pub fn constants_of(variant: WgmmaVariant) -> Vec<u32> {
    let WgmmaVariant { tile, epilogue, bias, packed, codes, experts, e4m3, fold } = variant;
    let [bias, packed, experts, e4m3] = [bias, packed, experts, e4m3].map(u32::from);
    let WgmmaTile { groups, blocks, tokens, stages, splits } = tile;
    vec![groups, blocks, tokens, stages, bias, epilogue, packed, codes, experts, e4m3, splits, fold]
}

/// Every tile that is chosen, the largest first, with as many stages as weights in bfloat16 leave room for.
const CHOSEN: [WgmmaTile; 11] = {
    const fn tile(groups: u32, blocks: u32, tokens: u32, stages: u32) -> WgmmaTile {
        WgmmaTile { groups, blocks, tokens, stages, splits: 1 }
    }
    [
        tile(2, 1, 256, 4),
        tile(2, 2, 128, 4),
        tile(3, 1, 128, 5),
        tile(2, 1, 128, 6),
        tile(1, 1, 128, 8),
        tile(3, 1, 64, 6),
        tile(2, 1, 64, 8),
        tile(1, 1, 64, 12),
        tile(3, 1, 32, 7),
        tile(2, 1, 32, 10),
        tile(1, 1, 32, 17),
    ]
};

/// Returns the cycles that a processor probably takes for 64 columns of a tile with `rows` rows of x, or for 128 columns of
/// rows in e4m3.
fn cycles(tile: WgmmaTile, rows: u32, format: Format, e4m3: bool) -> u64 {
    let (w, x) = (tile.weight_rows(), tile.tokens.min(rows.next_multiple_of(8)));
    if e4m3 {
        // The matrix units take as long for 128 columns as for 64 in 16 bits; the sums of a warpgroup are scaled while
        // another one multiplies, if there is another.
        let scaled = if tile.groups == 1 { tile.blocks * tile.tokens } else { 0 };
        let work = w / 64 * tile.tokens * 2 + scaled;
        return u64::from(work.max((w + x) * 128 / 56) + 80);
    }
    // The matrix units take 2 for a row of x and 64 of W, a copy from the L2 cache takes one for 56 bytes; codes of 16 rows
    // take a warp's 110 instructions, of which four warps issue one each at the same time; and some cycles are lost.
    let work = w / 64 * tile.tokens * 2;
    let (weight_bits, dequantised) = match format.codes() {
        Some(codes) => (codes.bits + 1, w / 64 * 110),
        None => (16, 0),
    };
    let copies = (w * weight_bits * 8 + x * 128) / 56;
    u64::from(work.max(copies).max(dequantised) + 80)
}

/// The most workgroups that share the columns of a tile.
const MOST_SPLITS: u32 = 4;
/// The least steps of a share.
const LEAST_STEPS: u32 = 4;
/// Returns the cycles that joining the shares of a tile probably adds; `None` if tiles of these products are not shared.
///
/// Workgroups that share a tile dequantise its codes side by side. Weights that are not dequantised wait for memory, to
/// which the shares add: they gain only where even the smallest tiles would leave a third of the processors idle.
fn join_cycles(rows: u32, n: u32, processors: u32, format: Format, e4m3: bool) -> Option<u64> {
    match format.codes() {
        Some(_) => (!e4m3).then_some(9000),
        None => (CHOSEN[CHOSEN.len() - 1].tiles(rows, n) <= processors * 2 / 3).then_some(12_000),
    }
}

/// Returns the tile with which a device of `processors` processors probably finishes `rows` rows of x, in bfloat16 or in e4m3,
/// by `n` rows and `k` columns of W first; `folds`: of those with which norms are folded.
pub fn choose(
    rows: u32,
    (n, k): (u32, u32),
    processors: u32,
    (format, e4m3): (Format, bool),
    folds: bool,
) -> WgmmaTile {
    let steps = k.div_ceil(if e4m3 { E4M3_COLS } else { SWIZZLED_COLS });
    let join = join_cycles(rows, n, processors, format, e4m3);
    // A processor computes one tile at a time, or one share of it.
    let cost = |tile: &WgmmaTile| {
        let shares = u64::from(tile.tiles(rows, n)) * u64::from(tile.splits);
        let each = u64::from(steps.div_ceil(tile.splits)) * cycles(*tile, rows, format, e4m3);
        shares.div_ceil(u64::from(processors.max(1))) * each + join.filter(|_| tile.splits > 1).unwrap_or(0)
    };
    // Tiles are shared if they leave processors idle. No tile has a half without rows. Of equal costs the first is chosen.
    let fits = |tile: &WgmmaTile| {
        let idle = tile.tiles(rows, n) * tile.splits <= processors;
        let shared = join.is_some() && idle && most_splits(k, format) >= tile.splits * LEAST_STEPS;
        tile.tokens <= rows.next_multiple_of(64) && (tile.splits == 1 || shared)
    };
    let tiles = CHOSEN.into_iter().flat_map(|tile| (1..=MOST_SPLITS).map(move |splits| WgmmaTile { splits, ..tile }));
    let tiles = tiles.filter_map(|tile| tile.for_format(format_word(format), e4m3, folds));
    tiles.filter(fits).min_by_key(cost).expect("the smallest tile fits every format and number of rows")
}

/// The most workgroups that can share a tile: the number of stages that `k` columns of a weight take, of which each has some.
pub fn most_splits(k: u32, format: Format) -> u32 {
    k.div_ceil(format.codes().map_or(SWIZZLED_COLS, unit_cols))
}

/// Where workgroups that share a tile put their sums.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// Room for the sums of all shares.
    pub partials: Range,
    /// A counter for each tile, 0 between calls.
    pub counters: Range,
}

impl Shares {
    /// Declares what a product with this tile, for at most `rows` rows by `n` rows of W, needs; `None` if its tiles are not
    /// shared.
    pub fn declare(recording: &mut Recording, tile: WgmmaTile, rows: u32, n: u32) -> Option<Shares> {
        let [partials, counters] = Shares::bytes(tile, rows, n);
        (tile.splits > 1).then(|| Shares {
            partials: recording.buffer("wgmma.partials", partials),
            counters: recording.buffer("wgmma.counters", counters),
        })
    }

    /// The sizes of `partials` and `counters` in bytes.
    fn bytes(tile: WgmmaTile, rows: u32, n: u32) -> [u64; 2] {
        let tiles = u64::from(tile.tiles(rows, n));
        [tiles * u64::from(tile.splits * tile.share_bytes()), (tiles * 4).next_multiple_of(16)]
    }
}

/// Returns the tile for rows sorted by expert, about `each` of them for each of `experts`, by experts of `n` rows of W: the
/// best of all, or of those with `tokens` rows of x. `e4m3`: whether these rows are in e4m3.
pub fn choose_sorted(
    (each, experts): (u32, u32),
    n: u32,
    tokens: Option<u32>,
    processors: u32,
    (format, e4m3): (Format, bool),
) -> WgmmaTile {
    let cost = |tile: &WgmmaTile| {
        // Experts are chosen unevenly: on average, half of an expert's last tile is empty.
        let (each, tokens) = (u64::from(each), u64::from(tile.tokens));
        let of_rows = (u64::from(experts) * (2 * each + tokens)).div_ceil(2 * tokens).max(experts.into());
        let tiles = of_rows * u64::from(n.div_ceil(tile.weight_rows()));
        tiles.div_ceil(u64::from(processors.max(1))) * cycles(*tile, tile.tokens, format, e4m3)
    };
    let tiles = CHOSEN.into_iter().filter(|tile| tokens.is_none_or(|tokens| tile.tokens == tokens));
    let tiles = tiles.filter_map(|tile| tile.for_format(format_word(format), e4m3, false));
    tiles.min_by_key(cost).expect("the smallest tile of any number of rows fits every format")
}

/// The rows of x of a product.
#[derive(Clone, Copy)]
enum Rows<'a> {
    /// At most this number of rows; the exact number is read from the range, if any.
    Counted(u32, Option<Range>),
    /// Sorted by expert.
    Sorted(&'a Sorted),
}

/// What the call of a product needs beside its operands and its tile.
#[derive(Clone, Copy, Debug)]
pub struct WgmmaOptions {
    /// The number of workgroups that run at once.
    pub processors: u32,
    /// What [`Shares::declare`] gave for the tile.
    pub shares: Option<Shares>,
    /// The part of an RMSNorm that the product computes; with a tile that was chosen for it.
    pub fold: Fold,
}

/// Returns the call of a product for at most `rows` rows of x: the chunk descriptor `count` holds the number of rows in
/// use; without, all are.
///
/// # Panics
/// If the kernel does not serve the weight ([`serves`]), rows are packed in another order or with other columns, y is packed
/// without a gated linear unit, or the folded norm does not fit the product: bugs of the caller.
pub fn wgmma(product: &Tiled, tile: WgmmaTile, (rows, count): (u32, Option<Range>), options: WgmmaOptions) -> Call {
    let most = most_splits(product.weight.cols, product.weight.format);
    let splits = tile.splits;
    assert!(splits <= most && options.shares.is_some() == (splits > 1), "shares of \"{}\"", product.label);
    call(product, tile, Rows::Counted(rows, count), options)
}

/// Returns the call for rows sorted by expert (MoE) in tiles of `tile.tokens` rows: `weight` holds the weights of all
/// experts, and `weight.rows` are the rows of one expert. Rows of floats are written to the place of their choice:
/// `[rows][chosen][stride]`.
///
/// # Panics
/// Like [`wgmma`], and if the tiles have another number of rows, `weight` lacks experts or y is a residual.
pub fn wgmma_sorted(product: &Tiled, tile: WgmmaTile, sorted: &Sorted, processors: u32) -> Call {
    assert_eq!(sorted.tile, tile.tokens, "rows of a tile of \"{}\"", product.label);
    assert_eq!(sorted.part, ExpertPart::ALL, "the experts of \"{}\"", product.label);
    assert_ne!(product.epilogue, Epilogue::Residual, "the epilogue of \"{}\"", product.label);
    call(product, tile, Rows::Sorted(sorted), WgmmaOptions { processors, shares: None, fold: Fold::None })
}

fn call(product: &Tiled, tile: WgmmaTile, of: Rows<'_>, options: WgmmaOptions) -> Call {
    let WgmmaOptions { processors, shares, fold } = options;
    let (weight, n, k) = (product.weight.range, product.weight.rows, product.weight.cols);
    let label = &product.label;
    let e4m3 = product.x.order == PackedOrder::E4m3;
    let served = if e4m3 { serves_e4m3 } else { serves };
    assert!(served(product.weight.format, n, k), "{n} × {k} of \"{label}\"");
    let order = order_of(product.weight.format, e4m3);
    assert_eq!((product.x.order, product.x.cols), (order, k), "x of \"{label}\"");
    let (rows, count, padded) = match of {
        Rows::Counted(rows, count) => (rows, count, Packed::padded_rows(rows)),
        Rows::Sorted(sorted) => (sorted.slot_count(), None, sorted.slot_count()),
    };
    let (y, y_stride, y_rows) = match product.y {
        Output::Rows(y) => (y.range, y.stride, 0),
        Output::Packed(y) => {
            let made = (product.epilogue.halves(), packs(n), y.order, y.cols);
            assert_eq!(made, (true, true, PackedOrder::Swizzled, n / 2), "packed y of \"{label}\"");
            (y.used(padded), 0, padded)
        }
    };
    let sorted = match of {
        Rows::Sorted(sorted) => Some(sorted),
        Rows::Counted(..) => None,
    };
    let none = weight.none();
    let (fold, squares, norm, next, epsilon) = match fold {
        Fold::None => (0, none, none, none, 0.0),
        Fold::Scale(x, epsilon) => (1, x.squares, none, none, epsilon),
        Fold::Next(next, norm) => {
            let made = (product.epilogue, next.rows.order, next.rows.cols, n.is_multiple_of(SWIZZLED_COLS));
            assert_eq!(made, (Epilogue::Residual, PackedOrder::Swizzled, n, true), "the norm behind \"{label}\"");
            (2, next.squares, norm, next.rows.used(padded), 0.0)
        }
    };
    let y_rows = if fold == 2 { padded } else { y_rows };
    let variant = WgmmaVariant {
        tile,
        epilogue: product.epilogue.code(),
        bias: product.bias.is_some(),
        packed: matches!(product.y, Output::Packed(_)),
        codes: format_word(product.weight.format),
        experts: sorted.is_some(),
        e4m3,
        fold,
    };
    assert!(variant.is_possible(), "{variant:?} of \"{label}\"");
    let constants = constants_of(variant);
    // Gated outputs are not read before they are written, but a call may leave some of them as they are.
    let access = if product.epilogue == Epilogue::Residual { Access::ReadWrite } else { Access::Write };
    let args = vec![
        Arg::Buffer(weight, Access::Read),
        Arg::Buffer(product.x.used(padded), Access::Read),
        Arg::Buffer(product.bias.unwrap_or(weight.none()), Access::Read),
        Arg::Buffer(y, access),
        Arg::Buffer(count.unwrap_or(weight.none()), Access::Read),
        Arg::Buffer(sorted.map_or(weight.none(), |sorted| sorted.tiles), Access::Read),
        Arg::Buffer(sorted.map_or(weight.none(), |sorted| sorted.slots), Access::Read),
        Arg::Buffer(shares.map_or(none, |shares| shares.partials), Access::ReadWrite),
        Arg::Buffer(shares.map_or(none, |shares| shares.counters), Access::ReadWrite),
        Arg::Buffer(squares, if fold == 2 { Access::Write } else { Access::Read }),
        Arg::Buffer(norm, Access::Read),
        Arg::Buffer(next, Access::Write),
        Arg::U32(n),
        Arg::U32(k),
        Arg::U32(if count.is_some() { 0 } else { rows }),
        Arg::U32(padded),
        Arg::U32(y_stride),
        Arg::U32(y_rows),
        Arg::F32(epsilon),
    ];
    let tiles = tile.tiles(rows, n) * tile.splits;
    Call { kernel: WGMMA.name, label: label.clone(), constants, args, groups: [tiles.min(processors.max(1)), 1, 1] }
}

/// Returns the numbers of row `row` of packed rows, of which there are `rows` with the padding.
fn row_of(memory: &HostMemory, packed: Packed, row: u32, rows: u32) -> Vec<f64> {
    let index = |col: u32| packed.order.index(row, col, rows) as u32;
    let cols = 0..packed.cols;
    let scale = if packed.order.has_scales() { memory.f32(packed.scales(rows), row) } else { 1.0 };
    if packed.order != PackedOrder::E4m3 {
        let number = |col| memory.weight(packed.order.format(), packed.range, index(col)) * scale;
        return cols.map(|col| f64::from(number(col))).collect();
    }
    let number = |col: u32| Number::E4m3.table()[usize::from(memory.u8(packed.range, index(col)))];
    cols.map(|col| f64::from(number(col)) * f64::from(scale)).collect()
}

/// Sums in f64, like the references of the other products. Rows beyond the rows in use, and those of tiles without an
/// expert, are left unchanged.
pub(crate) fn reference_wgmma(call: &Call, memory: &mut HostMemory) {
    let variant = variant_of(&call.constants);
    let [weight, x, bias, y, count, tiles, slots, _, _, squares, norm, next, values @ .., epsilon] = &call.args[..]
    else {
        panic!("arguments of {}", WGMMA.name)
    };
    let [weight, x, bias, y, tiles, slots] = [weight, x, bias, y, tiles, slots].map(|arg| arg.range());
    let [squares, norm, next] = [squares, norm, next].map(|arg| arg.range());
    let values: Vec<u32> = values.iter().map(|value| value.u32()).collect();
    let &[n, k, rows, x_rows, y_stride, y_rows] = &values[..] else { panic!("arguments of {}", WGMMA.name) };
    let rows = if rows == 0 { memory.u32(count.range(), 2) } else { rows };
    let format = format_of_word(variant.codes);
    let cols = format.codes().map_or(k, |codes| k.next_multiple_of(unit_cols(codes)));
    let matrix = PackedMatrix { range: weight, format, fragments: true, cols };
    let mut read = (u32::MAX, Vec::new());
    for row in 0..rows {
        let expert = if variant.experts { memory.u32(tiles, row / variant.tile.tokens) } else { 0 };
        if expert == NOBODY {
            continue;
        }
        let to = if variant.experts && !variant.packed { memory.u32(slots, row) } else { row };
        if to == NOBODY {
            continue;
        }
        if read.0 != expert {
            let element = |i: u32| f64::from(memory.element(&matrix, expert * n + i / k, i % k));
            read = (expert, (0..n * k).map(element).collect());
        }
        let order = order_of(format, variant.e4m3);
        let x = row_of(memory, Packed { range: x, cols: k, order }, row, x_rows);
        let factor = match variant.fold {
            1 => {
                let square = |part: u32| f64::from(memory.f32(squares, part * x_rows + row));
                let mean = (0..k / SWIZZLED_COLS).map(square).sum::<f64>() / f64::from(k);
                1.0 / (mean + f64::from(epsilon.f32())).sqrt()
            }
            _ => 1.0,
        };
        let v: Vec<f64> = (0..n)
            .zip(read.1.chunks_exact(k as usize))
            .map(|(r, w)| {
                let dot: f64 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
                dot * factor + if variant.bias { f64::from(memory.f32(bias, expert * n + r)) } else { 0.0 }
            })
            .collect();
        if !variant.packed {
            gemm::finish(memory, variant.epilogue, (y, None), to * y_stride, &v);
            for part in 0..if variant.fold == 2 { n / SWIZZLED_COLS } else { 0 } {
                let mut sum = 0.0;
                for col in part * SWIZZLED_COLS..(part + 1) * SWIZZLED_COLS {
                    let value = memory.f32(y, row * y_stride + col);
                    sum += f64::from(value).powi(2);
                    let normed = value * memory.f32(norm, col);
                    memory.set_number(Format::Bf16, next, swizzled_index(row, col, y_rows) as u32, normed);
                }
                memory.set_f32(squares, part * y_rows + row, sum as f32);
            }
            continue;
        }
        for (col, pair) in (0..).zip(v.chunks_exact(2)) {
            let value = gemm::glu(variant.epilogue, pair[0], pair[1]) as f32;
            memory.set_number(Format::Bf16, y, swizzled_index(row, col, y_rows) as u32, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{Codes, Minimum};

    #[test]
    fn tiles_get_smaller_where_large_ones_leave_processors_idle() {
        let chosen = |rows, n| {
            let tile = choose(rows, (n, 1024), 132, (Format::Bf16, false), false);
            (tile.weight_rows(), tile.tokens)
        };
        assert_eq!([64, 128, 256].map(|rows| chosen(rows, 24_576)), [(192, 64), (192, 128), (192, 128)]);
        assert_eq!([64, 128, 256, 512].map(|rows| chosen(rows, 4096)), [(64, 32), (64, 64), (64, 128), (128, 128)]);
        assert_eq!([2048, 4096].map(|rows| chosen(rows, 6144)), [(128, 256); 2]);
    }

    #[test]
    fn few_tiles_of_long_rows_are_shared() {
        let format = Format::Codes(Codes { bits: 4, group: 32, number: Number::Affine, minimum: Minimum::Stored });
        let splits = |rows, size, format, e4m3| choose(rows, size, 132, (format, e4m3), false).splits;
        assert!([(2560, 9216), (4096, 12_288)].iter().all(|size| splits(64, *size, format, false) > 1));
        // Many tiles, and rows that are soon multiplied.
        let others = [(64, (24_576, 4096)), (512, (4096, 12_288)), (64, (2560, 256))];
        assert_eq!(others.map(|(rows, size)| splits(rows, size, format, false)), [1; 3]);
        // Unquantised weights share a tile only if a third of the processors would idle.
        let of = [(2560, 9216), (2560, 4096), (4096, 12_288)].map(|size| splits(64, size, Format::Bf16, false));
        assert_eq!(of, [3, 1, 1]);
        let fp8 =
            Format::Codes(Codes { bits: 8, group: 128, number: Number::E4m3, minimum: Minimum::Zero { halves: 0 } });
        assert!(splits(64, (4096, 12_288), fp8, false) > 1);
        assert_eq!(splits(64, (4096, 12_288), fp8, true), 1);
    }

    #[test]
    fn tiles_fit_the_device_and_its_registers() {
        for rows in [64, 65, 128, 192, 256, 384, 512, 1024, 2048, 4096] {
            for n in [16, 1024, 4096, 6144, 24_576, 151_936] {
                let tile = choose(rows, (n, 4096), 132, (Format::Bf16, false), false);
                assert!(tile.is_possible(), "{tile:?}");
            }
        }
    }
}

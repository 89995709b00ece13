//! `tiled`, the GEMM for the rows of prompts on fragment-packed weights, with cooperative matrices or scalar
//! arithmetic; and `pack_rows`, which rounds the rows and reorders them into fragments. Not here: row-major weights
//! (`gemm`) and decode batches (`skinny`, `panel`).

use super::{Format, fold, format_of};
use crate::kernels::gemm::{self, Activations, Epilogue, Matrix};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::moe::{ExpertPart, NOBODY, Sorted};
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{PackRowsArgs, PackRowsConstants, TiledArgs, TiledConstants};
use crate::memory::pack::{FRAGMENT_COLS, fragment_index};
use crate::quant::number;

/// The number of rows of x in a tile; packed rows are padded to a multiple of it.
pub const TILE_TOKENS: u32 = 64;

/// The columns of rows in [`PackedOrder::Swizzled`] are a multiple of this.
pub const SWIZZLED_COLS: u32 = 64;

/// The columns of rows in [`PackedOrder::E4m3`] are a multiple of this.
pub const E4M3_COLS: u32 = 128;

/// The order of packed rows, and the format of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedOrder {
    /// Bfloat16 in the order of [`token_index`], which `tiled` and `panel` read.
    Fragments,
    /// Bfloat16 in the order of [`swizzled_index`], which `wgmma` reads; the columns are a multiple of 64.
    Swizzled,
    /// F16 in the order of [`token_index`], which `tiled` multiplies with weights in f16. Behind them, each row has an f32
    /// scale, a power of two ([`half_scale`]), by which its numbers are multiplied.
    HalfFragments,
    /// F16 in the order of [`swizzled_index`], which `wgmma` multiplies with weights in f16; the columns are a multiple of 64,
    /// and each row has a scale, as in [`PackedOrder::HalfFragments`].
    HalfSwizzled,
    /// Numbers in e4m3 in the order of [`e4m3_index`], which `wgmma` multiplies with weights in e4m3; the columns are a
    /// multiple of 128. Behind them, each row has an f32 scale, a power of two, by which its numbers are multiplied.
    E4m3,
}

impl PackedOrder {
    /// Whether kernels other than [`pack_rows`] can write the order. A row's scale depends on all of its numbers.
    pub fn is_written_by_products(self) -> bool {
        !self.has_scales()
    }

    /// Whether each row has a scale.
    pub fn has_scales(self) -> bool {
        !matches!(self, PackedOrder::Fragments | PackedOrder::Swizzled)
    }

    /// Whether `wgmma` reads the order.
    pub fn is_of_wgmma(self) -> bool {
        !matches!(self, PackedOrder::Fragments | PackedOrder::HalfFragments)
    }

    /// The format of numbers in 16 bits; numbers in [`PackedOrder::E4m3`] do without.
    pub fn format(self) -> Format {
        match self {
            PackedOrder::HalfFragments | PackedOrder::HalfSwizzled => Format::F16,
            PackedOrder::Fragments | PackedOrder::Swizzled | PackedOrder::E4m3 => Format::Bf16,
        }
    }

    /// Returns the constant PACKED of kernels that pack their output: 0 if they do not.
    ///
    /// # Panics
    /// If such kernels cannot write the order.
    pub fn word(order: Option<PackedOrder>) -> u32 {
        match order {
            None => 0,
            Some(PackedOrder::Fragments) => 1,
            Some(PackedOrder::Swizzled) => 2,
            Some(order) => panic!("only pack_rows writes rows in {order:?}"),
        }
    }

    /// Returns the order of a constant PACKED; `None` if the output is not packed.
    pub fn of_word(word: u32) -> Option<PackedOrder> {
        match word {
            0 => None,
            1 => Some(PackedOrder::Fragments),
            _ => Some(PackedOrder::Swizzled),
        }
    }

    /// Returns the number of columns of a block. A kernel that packs its output writes whole blocks.
    pub fn block_cols(self) -> u32 {
        match self {
            PackedOrder::Fragments | PackedOrder::HalfFragments => FRAGMENT_COLS,
            PackedOrder::Swizzled | PackedOrder::HalfSwizzled => SWIZZLED_COLS,
            PackedOrder::E4m3 => E4M3_COLS,
        }
    }

    /// Returns the stride argument of kernels that pack `rows` rows of `cols` columns: the number of blocks of a row, or in
    /// the swizzled order the number of rows that there is memory for.
    pub fn stride(self, rows: u32, cols: u32) -> u32 {
        match self {
            PackedOrder::Fragments | PackedOrder::HalfFragments => cols.div_ceil(FRAGMENT_COLS),
            _ => Packed::padded_rows(rows),
        }
    }

    /// Returns the size of `padded_rows` rows of `cols` columns in bytes.
    pub fn bytes(self, padded_rows: u32, cols: u32) -> u64 {
        let scales = if self.has_scales() { 4 } else { 0 };
        self.scales_at(padded_rows, cols) + u64::from(padded_rows) * scales
    }

    /// Returns the place of the rows' scales behind `padded_rows` rows of `cols` columns, in bytes.
    pub fn scales_at(self, padded_rows: u32, cols: u32) -> u64 {
        let each = if self == PackedOrder::E4m3 { 1 } else { 2 };
        each * u64::from(padded_rows) * u64::from(cols.next_multiple_of(FRAGMENT_COLS))
    }

    /// Returns the index, in numbers, of row `row` and column `col` of packed rows with this stride.
    pub fn index(self, row: u32, col: u32, stride: u32) -> usize {
        match self {
            PackedOrder::Fragments | PackedOrder::HalfFragments => token_index(row, col, stride * FRAGMENT_COLS),
            PackedOrder::Swizzled | PackedOrder::HalfSwizzled => swizzled_index(row, col, stride),
            PackedOrder::E4m3 => e4m3_index(row, col, stride),
        }
    }
}

/// Packed rows of activations, in 16 bits or in e4m3: the rows are padded to [`TILE_TOKENS`] and the columns to 32, both with
/// zeros.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// The memory, of which [`Packed::bytes`] are used.
    pub range: Range,
    /// The number of columns, without padding.
    pub cols: u32,
    /// The order.
    pub order: PackedOrder,
}

impl Packed {
    /// Returns the number of rows that there is memory for.
    pub const fn padded_rows(rows: u32) -> u32 {
        rows.next_multiple_of(TILE_TOKENS)
    }

    /// Returns the index, in numbers, of row `row` and column `col` of `rows` rows of `cols` columns.
    pub fn index(self, row: u32, col: u32, rows: u32) -> usize {
        self.order.index(row, col, self.stride(rows))
    }

    /// Returns the stride argument of kernels that pack their output, of `rows` rows ([`PackedOrder::stride`]).
    pub fn stride(self, rows: u32) -> u32 {
        self.order.stride(rows, self.cols)
    }

    /// Returns the part of the range that `padded_rows` rows use.
    pub fn used(self, padded_rows: u32) -> Range {
        self.range.part(0, self.order.bytes(padded_rows, self.cols))
    }

    /// Returns the scales of `padded_rows` rows; none of rows without.
    pub fn scales(self, padded_rows: u32) -> Range {
        let at = self.order.scales_at(padded_rows, self.cols);
        self.range.part(at, self.order.bytes(padded_rows, self.cols) - at)
    }

    /// Returns the size of `rows` rows of `cols` columns of 16 bits without scales in bytes, of which rows in
    /// [`PackedOrder::E4m3`] need only a part.
    pub fn bytes(rows: u32, cols: u32) -> u64 {
        PackedOrder::Fragments.bytes(Packed::padded_rows(rows), cols)
    }
}

/// Returns the index, in numbers, of row `row` and column `col` in packed rows of `padded_cols` columns (a multiple of
/// 32).
///
/// Lane `4g + t` of block (row / 16, col / 32) has columns 8t..8t + 8 of rows `u = g` and `v = g + 8`: its first
/// 16 bytes are `u[0..2] v[0..2] u[2..4] v[2..4]`, and the 16 bytes at an offset of 512 bytes are the same of `[4..8]`.
pub fn token_index(row: u32, col: u32, padded_cols: u32) -> usize {
    let block = (row / 16) as usize * (padded_cols / 32) as usize + (col / 32) as usize;
    let (g, second) = ((row % 8) as usize, (row / 8 % 2) as usize);
    let (t, half, e) = ((col % 32 / 8) as usize, (col % 8 / 4) as usize, (col % 4) as usize);
    ((block * 2 + half) * 32 + g * 4 + t) * 8 + e / 2 * 4 + second * 2 + e % 2
}

/// Returns the index, in numbers, of row `row` and column `col` among `rows` rows in [`PackedOrder::Swizzled`].
///
/// Blocks of 64 columns lie one after the other, each with 128 bytes for each row: eight words of 16 bytes, of which word
/// `w` lies at place `w ^ (row % 8)`. Word 4c + u holds columns 32c + 8t + 2u and + 1 of the block for t = 0 … 3: the
/// order in which a lane's fragments of W have their columns.
pub fn swizzled_index(row: u32, col: u32, rows: u32) -> usize {
    let word = col % 64 / 32 * 4 + col % 8 / 2;
    let at = (word ^ (row % 8)) * 8 + col % 32 / 8 * 2 + col % 2;
    (u64::from(col / 64) * u64::from(rows) + u64::from(row)) as usize * 64 + at as usize
}

/// Returns the index, in bytes, of row `row` and column `col` among `rows` rows in [`PackedOrder::E4m3`].
///
/// Blocks of 128 columns lie one after the other, each with 128 bytes for each row: eight words of 16 bytes, of which word
/// `w` lies at place `w ^ (row % 8)`. Word 2c + h holds columns 32c + 8t + 4h + e of the block, for t = 0 … 3 in turn and of
/// each e = 0, 2, 1, 3: the order of the codes of W in a lane's fragments ([`crate::memory::pack::codes::fragment_place`]).
pub fn e4m3_index(row: u32, col: u32, rows: u32) -> usize {
    let word = col % 128 / 32 * 2 + col % 8 / 4;
    let at = (word ^ (row % 8)) * 16 + col % 32 / 8 * 4 + [0, 2, 1, 3][(col % 4) as usize];
    (u64::from(col / 128) * u64::from(rows) + u64::from(row)) as usize * 128 + at as usize
}

/// Returns the scale of a row in f16 whose largest number has the absolute value `largest`: the power of two with which its
/// exponent becomes 14, so that numbers of every size are as exact, and none is beyond f16.
pub fn half_scale(largest: f32) -> f32 {
    f32::from_bits(((largest.to_bits() >> 23).clamp(16, 254) - 14) << 23)
}

/// Returns the scale of a row in [`PackedOrder::E4m3`] whose largest number has the absolute value `largest`: the smallest
/// power of two of at least 2⁻¹⁰⁰ with which the number fits in e4m3.
pub fn e4m3_scale(largest: f32) -> f32 {
    // 448, the largest number of e4m3, is 1.75 · 2⁸: a mantissa above 1.75 needs the next power.
    let exponent = ((largest.to_bits() + 0x1f_ffff) >> 23).max(127 + 8 - 100) - 8;
    f32::from_bits(exponent << 23)
}

/// Returns the call that packs `rows` rows, or as many of them as the chunk descriptor `count` holds, after an optional
/// RMSNorm with the given weight (`[packed.cols]`) and epsilon.
///
/// # Panics
/// If the order does not have so many columns.
pub fn pack_rows(
    label: String,
    x: Activations,
    norm: Option<(Range, f32)>,
    packed: Packed,
    rows: u32,
    count: Option<Range>,
) -> Call {
    let rows_of = match count {
        Some(count) => Rows::Counted(count),
        None => Rows::All(rows),
    };
    packing(label, x, norm, packed, rows, rows_of)
}

/// Returns the call that packs the rows of x in the order of the experts (MoE), after an optional RMSNorm: for each
/// slot, the row whose choice the slot holds. Rows of tiles without an expert are left unchanged.
pub fn pack_sorted(label: String, x: Activations, norm: Option<(Range, f32)>, packed: Packed, sorted: &Sorted) -> Call {
    packing(label, x, norm, packed, sorted.slot_count(), Rows::Sorted(sorted))
}

/// The rows to pack.
enum Rows<'a> {
    /// The given number of rows.
    All(u32),
    /// The number of rows is read from the chunk descriptor.
    Counted(Range),
    /// For each slot, the row whose choice the slot holds.
    Sorted(&'a Sorted),
}

fn packing(
    label: String,
    x: Activations,
    norm: Option<(Range, f32)>,
    packed: Packed,
    rows: u32,
    rows_of: Rows<'_>,
) -> Call {
    let chunks = packed.cols.div_ceil(FRAGMENT_COLS);
    let none = x.range.none();
    let (count, used, (slots, tiles), each, tile) = match rows_of {
        Rows::All(rows) => (none, rows, (none, none), 0, 16),
        Rows::Counted(count) => (count, 0, (none, none), 0, 16),
        Rows::Sorted(sorted) => (none, 0, (sorted.slots, sorted.tiles), sorted.chosen, sorted.tile),
    };
    let pairs = match rows_of {
        Rows::Sorted(_) => rows / 2,
        _ => Packed::padded_rows(rows) / 2,
    };
    let whole = !packed.order.is_of_wgmma() || packed.cols.is_multiple_of(packed.order.block_cols());
    assert!(whole, "{packed:?} cannot be packed");
    // The orders of `wgmma` have more work for each word, and only devices with it use them, which run such workgroups.
    let most = if packed.order.is_of_wgmma() { 512 } else { 256 };
    let threads = (chunks * 8).next_power_of_two().clamp(32, most);
    let (weight, epsilon) = norm.unwrap_or((none, 0.0));
    let args = PackRowsArgs {
        x: x.range,
        norm: weight,
        count,
        slots,
        tiles,
        packed: packed.used(pairs * 2),
        k: packed.cols,
        chunks,
        pairs,
        x_stride: x.stride,
        epsilon,
    };
    Call {
        kernel: match packed.order {
            PackedOrder::Fragments => "pack_rows.bf16",
            PackedOrder::Swizzled => "pack_rows.bf16.swizzled",
            PackedOrder::HalfFragments => "pack_rows.f16",
            PackedOrder::HalfSwizzled => "pack_rows.f16.swizzled",
            PackedOrder::E4m3 => "pack_rows.e4m3",
        },
        label,
        constants: PackRowsConstants { threads, norm: u32::from(norm.is_some()), rows: used, each, tile }.into_values(),
        args: args.into_args(),
        groups: fold(pairs, 1),
    }
}

/// The tile that one workgroup of `tiled` computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 64 rows of x by 256 rows of W, with cooperative matrices.
    Wide,
    /// 64 by 128, with cooperative matrices.
    Half,
    /// 64 by 64, with cooperative matrices.
    Square,
    /// 64 by 64 with scalar arithmetic, for drivers without cooperative matrices.
    Plain,
}

impl Tile {
    /// The number of rows of W.
    pub fn weight_rows(self) -> u32 {
        match self {
            Tile::Wide => 256,
            Tile::Half => 128,
            Tile::Square | Tile::Plain => 64,
        }
    }
}

/// Returns the cooperative-matrix tile with which a device of `processors` processors, each running two workgroups at a
/// time, probably finishes `rows` rows of x by `n` rows of W first.
pub fn choose(rows: u32, n: u32, processors: u32) -> Tile {
    // `work`: the time of a workgroup that shares its processor with another, in thousandths of that of a wide tile;
    // smaller tiles load more data per product. A workgroup that is alone on its processor takes 13/20 of the time in
    // which two that share it finish.
    let cost = |tile: Tile| {
        let work = match tile {
            Tile::Wide => 1000,
            Tile::Half => 560,
            Tile::Square | Tile::Plain => 340,
        };
        let processors = u64::from(processors.max(1));
        let tiles = u64::from(rows.div_ceil(TILE_TOKENS)) * u64::from(n.div_ceil(tile.weight_rows()));
        let (waves, rest) = (tiles / (2 * processors), tiles % (2 * processors));
        let last = match rest {
            0 => 0,
            r if r <= processors => 13,
            _ => 20,
        };
        (waves * 20 + last) * work
    };
    // Of equal costs the first, the largest tile, is chosen.
    [Tile::Wide, Tile::Half, Tile::Square].into_iter().min_by_key(|tile| cost(*tile)).unwrap_or(Tile::Wide)
}

/// The destination of a product of packed rows.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    /// Rows of floats.
    Rows(Activations),
    /// Packed rows for the next product; only with [`Epilogue::Gated`]. Rows beyond the rows in use are zero up to a
    /// multiple of [`TILE_TOKENS`]; rows beyond those are left unchanged.
    Packed(Packed),
}

/// A product `y = epilogue(W · x)` for packed rows.
#[derive(Clone, Debug)]
pub struct Tiled {
    /// The name of the call's span.
    pub label: String,
    /// The weight matrix W, packed as [`crate::memory::pack::Layout::Fragments`].
    pub weight: Matrix,
    /// The input x, with the columns of W.
    pub x: Packed,
    /// The bias that is added to the product.
    pub bias: Option<Range>,
    /// The operation on the product.
    pub epilogue: Epilogue,
    /// The output y.
    pub y: Output,
}

impl Tiled {
    /// Returns the call for at most `rows` rows of x; the chunk descriptor `count` holds the number of rows in use.
    ///
    /// # Panics
    /// If x has another format or other columns than W, or y is packed without SwiGLU, in f16 or with other columns than the
    /// product's: bugs of the caller.
    pub fn call(&self, tile: Tile, rows: u32, count: Range) -> Call {
        self.for_rows(tile, rows, Some(count), None)
    }

    /// Returns the call for `rows` rows of x, all in use; see [`Tiled::call`].
    pub fn batch(&self, tile: Tile, rows: u32) -> Call {
        self.for_rows(tile, rows, None, None)
    }

    /// Returns the call for rows sorted by expert (MoE), in tiles of [`TILE_TOKENS`] rows: `weight` holds the weights
    /// of the experts of `sorted.part`, and `weight.rows` are the rows of one expert. Rows of floats are written to the
    /// place of their choice: `[rows][chosen][stride]`.
    pub fn sorted(&self, tile: Tile, sorted: &Sorted) -> Call {
        assert_eq!(sorted.tile, TILE_TOKENS, "rows of a tile");
        self.for_rows(tile, sorted.slot_count(), None, Some(sorted))
    }

    fn for_rows(&self, tile: Tile, rows: u32, count: Option<Range>, sorted: Option<&Sorted>) -> Call {
        let Matrix { range: weight, format, rows: n, cols } = self.weight;
        let x = (self.x.order.format(), self.x.cols, self.x.order.is_of_wgmma());
        assert_eq!(x, (format, cols, false), "x of \"{}\"", self.label);
        let padded = if sorted.is_some() { rows } else { Packed::padded_rows(rows) };
        let (y, y_stride, packed) = match self.y {
            Output::Rows(y) => (y.range, y.stride, 0),
            Output::Packed(y) => {
                let made = (self.epilogue.halves(), y.cols, self.x.order, y.order);
                let bfloat = PackedOrder::Fragments;
                assert_eq!(made, (true, n / 2, bfloat, bfloat), "packed y of \"{}\"", self.label);
                (y.range.part(0, Packed::bytes(rows, y.cols)), 0, 1)
            }
        };
        let part = sorted.map_or(ExpertPart::ALL, |s| s.part);
        let constants = TiledConstants {
            n,
            k: cols.next_multiple_of(FRAGMENT_COLS),
            bias: u32::from(self.bias.is_some()),
            epilogue: self.epilogue.code(),
            packed,
            order: 8,
            rows: if count.is_some() { 0 } else { rows },
            experts: u32::from(sorted.is_some()),
            first_expert: part.first,
            part_experts: part.count,
        };
        let args = TiledArgs {
            weight,
            x: self.x.used(padded),
            bias: self.bias.unwrap_or(weight.none()),
            y,
            count: count.unwrap_or(weight.none()),
            tiles: sorted.map_or(weight.none(), |s| s.tiles),
            slots: sorted.map_or(weight.none(), |s| s.slots),
            scales: self.x.scales(padded),
            y_stride,
        };
        Call {
            kernel: match (format, tile) {
                (Format::Bf16, Tile::Wide) => "tiled.bf16",
                (Format::Bf16, Tile::Half) => "tiled.bf16.128",
                (Format::Bf16, Tile::Square) => "tiled.bf16.64",
                (Format::Bf16, Tile::Plain) => "tiled.bf16.plain",
                (Format::F16, Tile::Wide) => "tiled.f16",
                (Format::F16, Tile::Half) => "tiled.f16.128",
                (Format::F16, Tile::Square) => "tiled.f16.64",
                (Format::F16, Tile::Plain) => "tiled.f16.plain",
                (Format::F32 | Format::Codes(_), _) => panic!("fragments are of 16-bit numbers"),
            },
            label: self.label.clone(),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: fold(rows.div_ceil(TILE_TOKENS) * n.div_ceil(tile.weight_rows()), 1),
        }
    }
}

pub(crate) fn reference_pack_rows(call: &Call, memory: &mut HostMemory) {
    let a = PackRowsArgs::from_args(&call.args);
    let c = PackRowsConstants::from_values(&call.constants);
    let used = if c.rows == 0 && c.each == 0 { memory.u32(a.count, 2) } else { c.rows };
    let order = match call.kernel {
        "pack_rows.e4m3" => PackedOrder::E4m3,
        "pack_rows.f16" => PackedOrder::HalfFragments,
        "pack_rows.f16.swizzled" => PackedOrder::HalfSwizzled,
        "pack_rows.bf16.swizzled" => PackedOrder::Swizzled,
        _ => PackedOrder::Fragments,
    };
    let packed = Packed { range: a.packed, cols: a.chunks * FRAGMENT_COLS, order };
    for row in 0..a.pairs * 2 {
        let from = match c.each {
            0 => (row < used).then_some(row),
            _ if memory.u32(a.tiles, row / c.tile) == NOBODY => continue,
            each => Some(memory.u32(a.slots, row)).filter(|slot| *slot != NOBODY).map(|slot| slot / each),
        };
        let mut x: Vec<f64> = match from {
            Some(row) => (0..a.k).map(|i| f64::from(memory.f32(a.x, row * a.x_stride + i))).collect(),
            None => vec![0.0; a.k as usize],
        };
        if c.norm == 1 && from.is_some() {
            x = gemm::normed(memory, x, a.norm, a.epsilon);
        }
        set_row(memory, packed, (row, a.pairs * 2), &x);
    }
}

/// Sums in f64, like the references of the other products; padding is not read.
pub(crate) fn reference_tiled(call: &Call, memory: &mut HostMemory) {
    let a = TiledArgs::from_args(&call.args);
    let c = TiledConstants::from_values(&call.constants);
    let format = format_of(call.kernel, 0);
    let used = if c.rows == 0 { memory.u32(a.count, 2) } else { c.rows };
    let weights_from = |memory: &HostMemory, first: u32| -> Vec<f64> {
        (0..c.n)
            .flat_map(|r| (0..c.k).map(move |col| (first + r, col)))
            .map(|(r, col)| f64::from(memory.weight(format, a.weight, fragment_index(r, col, c.k) as u32)))
            .collect()
    };
    let mut weights = if c.experts == 0 { weights_from(memory, 0) } else { Vec::new() };
    let mut expert_row = 0;
    let part = ExpertPart { first: c.first_expert, count: c.part_experts };
    let y_rows = Packed { range: a.y, cols: c.n / 2, order: PackedOrder::Fragments };
    for row in 0..used {
        let mut to = row;
        if c.experts == 1 {
            let expert = memory.u32(a.tiles, row / TILE_TOKENS);
            if expert == NOBODY || part.lacks(expert) {
                continue;
            }
            if row % TILE_TOKENS == 0 {
                weights = weights_from(memory, (expert - part.first) * c.n.next_multiple_of(16));
                expert_row = expert * c.n;
            }
            to = memory.u32(a.slots, row);
            if c.packed == 0 && to == NOBODY {
                continue;
            }
        }
        let scale = if format == Format::F16 { memory.f32(a.scales, row) } else { 1.0 };
        let number = |col| f64::from(memory.weight(format, a.x, token_index(row, col, c.k) as u32) * scale);
        let x: Vec<f64> = (0..c.k).map(number).collect();
        let v: Vec<f64> = (0..c.n)
            .zip(weights.chunks_exact(c.k as usize))
            .map(|(r, w)| {
                let dot: f64 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
                dot + if c.bias == 1 { f64::from(memory.f32(a.bias, expert_row + r)) } else { 0.0 }
            })
            .collect();
        if c.packed == 0 {
            gemm::finish(memory, c.epilogue, (a.y, None), to * a.y_stride, &v);
        } else {
            let y: Vec<f64> = v.chunks_exact(2).map(|pair| gemm::glu(c.epilogue, pair[0], pair[1])).collect();
            set_row(memory, y_rows, (row, 0), &y);
        }
    }
    if c.packed == 1 {
        for row in used..used.next_multiple_of(TILE_TOKENS) {
            set_row(memory, y_rows, (row, 0), &[]);
        }
    }
}

/// Writes row `row` of `rows` packed rows; columns without a value are zero.
fn set_row(memory: &mut HostMemory, packed: Packed, (row, padded_rows): (u32, u32), values: &[f64]) {
    let cols = packed.cols.next_multiple_of(FRAGMENT_COLS);
    let mut scale = 1.0;
    if packed.order.has_scales() {
        let largest = values.iter().fold(0f32, |most, value| most.max(value.abs() as f32));
        scale = if packed.order == PackedOrder::E4m3 { e4m3_scale(largest) } else { half_scale(largest) };
        memory.set_u32(packed.scales(padded_rows), row, scale.to_bits());
    }
    for col in 0..cols {
        let value = values.get(col as usize).copied().unwrap_or(0.0);
        let at = match packed.order {
            PackedOrder::Fragments | PackedOrder::HalfFragments => token_index(row, col, cols),
            PackedOrder::Swizzled | PackedOrder::HalfSwizzled => swizzled_index(row, col, padded_rows),
            PackedOrder::E4m3 => {
                let number = value as f32 / scale;
                let code = if number.is_infinite() { 0x7f } else { number::to_e4m3(number) };
                memory.set_u8(packed.range, e4m3_index(row, col, padded_rows) as u32, code);
                continue;
            }
        };
        memory.set_number(packed.order.format(), packed.range, at as u32, value as f32 / scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packed_number_has_a_place_of_its_own() {
        let (rows, cols) = (32, 96);
        let mut places: Vec<usize> = (0..rows).flat_map(|r| (0..cols).map(move |c| token_index(r, c, cols))).collect();
        places.sort_unstable();
        assert_eq!(places, (0..(rows * cols) as usize).collect::<Vec<_>>());
    }

    #[test]
    fn every_swizzled_number_has_a_place_of_its_own() {
        let (rows, cols) = (24, 192);
        let mut places: Vec<usize> =
            (0..rows).flat_map(|row| (0..cols).map(move |col| swizzled_index(row, col, rows))).collect();
        places.sort_unstable();
        assert_eq!(places, (0..(rows * cols) as usize).collect::<Vec<_>>());
    }

    #[test]
    fn every_number_in_e4m3_has_a_place_of_its_own_and_scales_lie_behind() {
        let (rows, cols) = (24, 384);
        let mut places: Vec<usize> =
            (0..rows).flat_map(|row| (0..cols).map(move |col| e4m3_index(row, col, rows))).collect();
        places.sort_unstable();
        assert_eq!(places, (0..(rows * cols) as usize).collect::<Vec<_>>());
        assert_eq!(PackedOrder::E4m3.scales_at(rows, cols), u64::from(rows * cols));
    }

    #[test]
    fn a_scale_is_the_smallest_power_of_two_with_which_a_number_fits() {
        for (largest, scale) in
            [(448.0, 1.0), (449.0, 2.0), (225.0, 1.0), (224.0, 0.5), (1.0, 2f32.powi(-8)), (3.6, 2f32.powi(-6))]
        {
            assert_eq!(e4m3_scale(largest), scale, "{largest}");
        }
        assert_eq!([0.0, 1e-38].map(e4m3_scale), [2f32.powi(-100); 2]);
        assert!(e4m3_scale(f32::MAX).is_finite());
    }

    #[test]
    fn the_largest_number_of_a_row_in_f16_has_an_exponent_of_14() {
        for (largest, scale) in [(1.0, -14), (1.99, -14), (65_504.0, 1), (1e6, 5), (1e-6, -34), (0.0, -125)] {
            assert_eq!(half_scale(largest), 2f32.powi(scale), "{largest}");
        }
        assert!(half_scale(f32::INFINITY).is_finite());
    }

    #[test]
    fn tiles_get_smaller_where_large_ones_leave_processors_idle() {
        assert_eq!(choose(4096, 4096, 132), Tile::Wide);
        assert_eq!(choose(1024, 4096, 132), Tile::Wide);
        assert_eq!(choose(512, 24_576, 132), Tile::Wide);
        assert_eq!(choose(512, 4096, 132), Tile::Half);
        assert_eq!(choose(128, 4096, 132), Tile::Square);
    }
}

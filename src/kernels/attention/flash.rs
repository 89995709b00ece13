//! `flash`, `flash_f32`, `flash_matrix` and `flash_wgmma`, the prefill attention: attention of a prompt chunk's rows, causal or over all
//! of the chunk, over keys and values of f16 or of codes, after `append` has prepared them; the same result as `attention`
//! without `fused`. Not here: decode steps (`flash_decode`) and f32 caches (`attention`).

use crate::config::KvFormat;
use crate::kernels::attention::cache::{CachePages, Half, TokenPlace, kv_format_of};
use crate::kernels::attention::{Heads, PAGE_TOKENS, first_visible, flash_wgmma, gate, last_visible, score};
use crate::kernels::gemm::matmul::MatrixUnits;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::gemm::tiled::swizzled_index;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::Call;
use crate::kernels::shaders::{FLASH_WGMMA, FlashArgs, FlashConstants, FlashMatrixConstants};
use crate::memory::pack::Format;

/// The number of invocations of a workgroup of `flash`. A tile has half as many (row, query head) pairs.
const THREADS: u32 = 128;

/// The maximum shared memory of a workgroup in bytes, for `flash` with matrix units.
const SHARED_BYTES: u32 = 48 * 1024;

/// The maximum number of prompts of a step whose tiles are shared by several workgroups.
pub const SHARING_PROMPTS: u32 = 64;

/// The maximum number of pairs of a tile.
const MOST_PAIRS: u32 = THREADS / 2;

/// The maximum number of invocations of a workgroup of `flash_matrix`.
const MOST_THREADS: u32 = 256;

/// How the products of prompts' attention are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlashWay {
    /// `flash`: matrices of 16 × 16 × 16 whose elements are where `fragment_layout` expects them, or their emulation.
    Fragments(Matrices),
    /// `flash_matrix`: matrices of which only the shape is known.
    Loads(FlashShape),
    /// `flash_f32`: no matrices, with all products in f32.
    F32(FlashF32Shape),
    /// `flash_wgmma`: the matrix units of NVIDIA's compute capability 9.0.
    Wgmma {
        /// Whether its output is packed rows in [`PackedOrder::Swizzled`] for the next product, and `output_stride` the
        /// number of rows that there is memory for.
        ///
        /// [`PackedOrder::Swizzled`]: crate::kernels::gemm::tiled::PackedOrder::Swizzled
        packed: bool,
    },
}

/// The shape of a workgroup of `flash_matrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashShape {
    /// The matrices.
    pub units: MatrixUnits,
    /// The number of subgroups, each of which has `units.m` pairs of a tile.
    pub subgroups: u32,
    /// The number of tokens of a block, a multiple of 16.
    pub block: u32,
    /// Whether queries stay in matrices, not in shared memory.
    pub held: bool,
    /// Whether keys and values use the same part of shared memory.
    pub alike: bool,
}

impl FlashShape {
    /// Returns the shape for heads on a device with these matrices and with `shared` bytes of shared memory. `None` if
    /// `flash_matrix` does not serve the heads, or an invocation's sums leave less than half of its registers, so that another
    /// kernel is faster.
    pub fn choose(heads: Heads, units: MatrixUnits, shared: u32) -> Option<FlashShape> {
        let registers = if FlashShape::has_few_registers(units) { 128 } else { 256 };
        let sums = units.m * heads.dim / units.subgroup;
        FlashShape::largest(heads, units, shared).filter(|_| sums <= registers / 2)
    }

    /// Whether an invocation has 128 registers and not 255 or 256: subgroups of 8 or 16 are Intel's.
    fn has_few_registers(units: MatrixUnits) -> bool {
        units.subgroup < 32
    }

    /// Returns the first shape that fits, with long blocks and many pairs first, whatever registers it needs.
    pub fn largest(heads: Heads, units: MatrixUnits, shared: u32) -> Option<FlashShape> {
        let few_registers = FlashShape::has_few_registers(units);
        let most = (MOST_PAIRS / units.m).min(MOST_THREADS / units.subgroup).max(1);
        // Matrices of all queries of wide heads need more registers than devices have.
        let held = heads.dim <= 128 && !few_registers;
        let blocks = if few_registers { [16, 16, 16] } else { [32, 32, 16] };
        let subgroups = [most, (most / 2).max(1)];
        let mut shapes = subgroups.into_iter().flat_map(|subgroups| {
            let blocks = blocks.into_iter().zip([false, true, true]);
            blocks.map(move |(block, alike)| FlashShape { units, subgroups, block, held, alike })
        });
        shapes.find(|shape| shape.serves(heads) && shape.shared_bytes(heads) <= shared)
    }

    /// Whether the shape serves heads: caches of f16 or of codes, and dimensions that are a multiple of 16 up to 256. The
    /// scores of a row must be divided evenly among the invocations that share it, four at a time.
    fn serves(self, heads: Heads) -> bool {
        let even = (self.block / 4).is_multiple_of((self.units.subgroup / self.units.m).max(1));
        even && heads.kv_format != KvFormat::F32 && heads.dim.is_multiple_of(16) && (16..=256).contains(&heads.dim)
    }

    /// The number of (row, query head) pairs of a tile.
    fn pairs(self) -> u32 {
        self.subgroups * self.units.m
    }

    fn threads(self) -> u32 {
        self.subgroups * self.units.subgroup
    }

    /// Returns the constants of `flash_matrix`, of which the first are those of `flash`.
    fn constants(self, of: FlashConstants) -> FlashMatrixConstants {
        let FlashConstants { threads, d, g, kv_heads, lanes, splits, gated, scale, window, soft_cap, sinks, both } = of;
        let MatrixUnits { m: matrix_m, n: matrix_n, k: matrix_k, subgroup } = self.units;
        FlashMatrixConstants {
            threads,
            d,
            g,
            kv_heads,
            lanes,
            splits,
            gated,
            scale,
            window,
            soft_cap,
            sinks,
            both,
            block: self.block,
            held: u32::from(self.held),
            alike: u32::from(self.alike),
            matrix_m,
            matrix_n,
            matrix_k,
            subgroup,
        }
    }

    /// Returns the shared memory of a workgroup in bytes.
    pub fn shared_bytes(self, heads: Heads) -> u32 {
        let MatrixUnits { m, n, subgroup, .. } = self.units;
        let row = heads.dim / 8 + 1;
        let cache = if self.alike { 1 } else { 2 } * self.block * row;
        let queries = if self.held { 1 } else { self.pairs() * row };
        let slabs = self.pairs() * (self.block / 4 + 1).max(n / 4);
        let states = self.threads() * (m / subgroup).max(1);
        let scales = if heads.kv_format == KvFormat::Int8 { self.block / 2 } else { 0 };
        16 * (cache + queries + slabs + scales) + 4 * states + 4 + 8 * SHARING_PROMPTS
    }
}

/// The shape of a workgroup of `flash_f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashF32Shape {
    threads: u32,
    /// The number of (row, query head) pairs of a tile.
    pairs: u32,
    /// The number of tokens of a block.
    block: u32,
}

impl FlashF32Shape {
    /// The shapes, the largest first.
    pub const ALL: [FlashF32Shape; 2] =
        [FlashF32Shape { threads: 128, pairs: 32, block: 32 }, FlashF32Shape { threads: 64, pairs: 16, block: 16 }];

    /// Returns the shape for heads on a device with `shared` bytes of shared memory; `None` if `flash_f32` does not serve them.
    pub fn choose(heads: Heads, shared: u32) -> Option<FlashF32Shape> {
        FlashF32Shape::ALL.into_iter().find(|shape| shape.serves(heads) && shape.shared_bytes(heads) <= shared)
    }

    /// Whether the shape serves heads: caches of f16 or of codes, and dimensions that are a multiple of 16 up to 256. An
    /// invocation of the largest shape has too many sums of more than 128 dimensions.
    fn serves(self, heads: Heads) -> bool {
        let most = if self == FlashF32Shape::ALL[0] { 128 } else { 256 };
        heads.kv_format != KvFormat::F32 && heads.dim.is_multiple_of(16) && (16..=most).contains(&heads.dim)
    }

    /// Returns the shared memory of a workgroup in bytes.
    fn shared_bytes(self, heads: Heads) -> u32 {
        let FlashF32Shape { threads, pairs, block } = self;
        let scales = if heads.kv_format == KvFormat::Int8 { block / 2 } else { 0 };
        let words = block * (heads.dim / 8 + 1) + pairs * (heads.dim / 4 + block / 4 + 1) + scales;
        16 * words + 4 * pairs + 8 * threads + 4 + 8 * SHARING_PROMPTS
    }
}

impl FlashWay {
    /// Returns whether a device with `shared` bytes of shared memory computes the attention of these heads this way.
    /// [`FlashWay::Fragments`] serves caches of f16 or of codes, and dimensions that are a multiple of 32 up to 256; it is
    /// tuned for 64 and 128 dimensions.
    pub fn serves(self, heads: Heads, shared: u32) -> bool {
        match self {
            FlashWay::Fragments(matrices) => {
                heads.kv_format != KvFormat::F32
                    && heads.dim.is_multiple_of(32)
                    && (32..=256).contains(&heads.dim)
                    && (matrices == Matrices::Emulated || shared >= SHARED_BYTES)
            }
            FlashWay::Loads(shape) => shape.serves(heads) && shape.shared_bytes(heads) <= shared,
            FlashWay::F32(shape) => shape.serves(heads) && shape.shared_bytes(heads) <= shared,
            FlashWay::Wgmma { .. } => flash_wgmma::serves(heads),
        }
    }

    /// The number of (row, query head) pairs of a tile.
    fn pairs(self) -> u32 {
        match self {
            FlashWay::Fragments(_) => THREADS / 2,
            FlashWay::Loads(shape) => shape.pairs(),
            FlashWay::F32(shape) => shape.pairs,
            FlashWay::Wgmma { .. } => flash_wgmma::PAIRS,
        }
    }

    /// The number of invocations of a workgroup.
    fn threads(self) -> u32 {
        match self {
            FlashWay::Fragments(_) => THREADS,
            FlashWay::Loads(shape) => shape.threads(),
            FlashWay::F32(shape) => shape.threads,
            FlashWay::Wgmma { .. } => flash_wgmma::THREADS,
        }
    }

    /// Returns the number of tiles of a prompt's `rows` rows. Per KV head, one workgroup or several serve a tile.
    pub fn tiles(self, heads: Heads, rows: u32) -> u32 {
        (rows * heads.group()).div_ceil(self.pairs())
    }
}

/// Returns the number of workgroups that may share tiles for which `partials` and `counters` have room, per KV head: enough
/// for a prompt's tiles beside the rows of a batch, and fewer with many KV heads, whose tiles are many.
pub fn parts(heads: Heads) -> u32 {
    (512 / heads.kv).clamp(32, 64)
}

/// Returns the size of `partials` in bytes, for either way.
pub fn partials_bytes(heads: Heads) -> u64 {
    u64::from(heads.kv * parts(heads)) * u64::from((heads.dim / 8 + 1) * THREADS) * 16
}

/// Returns the size of `counters` in bytes.
pub fn counters_bytes(heads: Heads) -> u64 {
    u64::from(heads.kv * parts(heads)) * 4
}

/// Returns the call for the attention of up to `rows` rows of up to `prompts` prompts; `splits` is the maximum number
/// of workgroups that share a tile.
///
/// # Panics
/// If the way does not serve the heads, or has several workgroups for a tile though it cannot, or rows are not aligned to 16
/// bytes.
pub fn flash(
    label: String,
    heads: Heads,
    (rows, prompts, splits): (u32, u32, u32),
    way: FlashWay,
    args: FlashArgs,
) -> Call {
    assert!(way.serves(heads, u32::MAX), "{way:?} does not serve {heads:?}");
    let whole = matches!(way, FlashWay::Wgmma { .. });
    assert!(splits == 1 || !whole, "{splits} workgroups for a tile");
    assert!(
        args.stride.is_multiple_of(4) && args.output_stride.is_multiple_of(4),
        "rows of {} and {} floats are not aligned",
        args.stride,
        args.output_stride
    );
    let [scale, window, soft_cap] = heads.scores.words();
    let threads = way.threads();
    let constants = FlashConstants {
        threads,
        d: heads.dim,
        g: heads.group(),
        kv_heads: heads.kv,
        lanes: threads,
        splits,
        gated: u32::from(heads.gated),
        scale,
        window,
        soft_cap,
        sinks: u32::from(heads.scores.sinks),
        both: u32::from(heads.scores.both),
    };
    let codes = heads.kv_format == KvFormat::Int8;
    let (kernel, constants) = match (way, codes) {
        (FlashWay::Fragments(Matrices::Emulated), true) => ("flash.int8.plain", constants.into_values()),
        (FlashWay::Fragments(Matrices::Emulated), false) => ("flash.plain", constants.into_values()),
        (FlashWay::Fragments(Matrices::Cooperative), true) => ("flash.int8", constants.into_values()),
        (FlashWay::Fragments(Matrices::Cooperative), false) => ("flash", constants.into_values()),
        (FlashWay::Loads(shape), codes) => {
            let constants = shape.constants(constants).into_values();
            (if codes { "flash_matrix.int8" } else { "flash_matrix" }, constants)
        }
        (FlashWay::F32(shape), codes) => {
            // Behind the constants of `flash`: BLOCK and ROWS.
            let constants = constants.into_values().into_iter().chain([shape.block, shape.pairs]);
            (if codes { "flash_f32.int8" } else { "flash_f32" }, constants.collect())
        }
        (FlashWay::Wgmma { packed }, _) => {
            let constants = constants.into_values().into_iter().chain([u32::from(packed)]);
            (FLASH_WGMMA.name, constants.collect())
        }
    };
    // Each prompt but one may add a tile that is not full.
    let tiles = way.tiles(heads, rows) + prompts.min(rows) - 1;
    Call {
        kernel,
        label,
        constants,
        // All kernels have the same arguments.
        args: FlashArgs { parts: parts(heads), ..args }.into_args(),
        groups: if whole { [heads.kv * tiles, 1, 1] } else { [heads.kv, tiles, splits] },
    }
}

/// Adds room for the tiles of `more` further prompts to a call of one of these kernels; other calls stay as they are.
pub fn add_prompts(call: &mut Call, more: u32) {
    let kernel = call.kernel.split('.').next().unwrap_or(call.kernel);
    match kernel {
        _ if call.kernel == FLASH_WGMMA.name => {
            // The first constants of all kernels are the same.
            call.groups[0] += FlashConstants::from_values(&call.constants).kv_heads * more;
        }
        "flash" | "flash_matrix" | "flash_f32" => call.groups[1] += more,
        _ => {}
    }
}

/// The reference of all these kernels, which computes in f64 and rounds nothing but the result.
pub(crate) fn reference_flash(call: &Call, memory: &mut HostMemory) {
    let a = FlashArgs::from_args(&call.args);
    // The first constants of all kernels are the same.
    let c = FlashConstants::from_values(&call.constants);
    let packed = call.kernel == FLASH_WGMMA.name && flash_wgmma::packs(&call.constants);
    let cache = CachePages { format: kv_format_of(call.kernel), kv_heads: c.kv_heads, dim: c.d };
    let d = c.d as usize;
    let [prompts, _, in_use, _] = std::array::from_fn(|i| memory.u32(a.chunk, i as u32));
    for (index, kvh) in (0..prompts).flat_map(|index| (0..c.kv_heads).map(move |kvh| (index, kvh))) {
        let [slot, start, first, _] = std::array::from_fn(|i| memory.u32(a.chunk, 4 + 4 * index + i as u32));
        let end = if index + 1 < prompts { memory.u32(a.chunk, 4 + 4 * (index + 1) + 2) } else { in_use };
        if slot == u32::MAX {
            continue;
        }
        // The keys and values of the tokens so far, in order.
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for row in first..end {
            let position = start + row - first;
            let last = last_visible(c.both, c.window, position, start + end - first - 1);
            for t in (keys.len() / d) as u32..=last {
                let page = memory.u32(a.pages, slot * a.max_pages + t / PAGE_TOKENS);
                let at = TokenPlace { page, head: kvh, token: t % PAGE_TOKENS };
                keys.extend(cache.head(memory, a.k, Half::Keys, at));
                values.extend(cache.head(memory, a.v, Half::Values, at));
            }
            for h in kvh * c.g..(kvh + 1) * c.g {
                let query: Vec<f64> =
                    (0..c.d).map(|i| f64::from(memory.f32(a.qkv, row * a.stride + h * c.d + i))).collect();
                let of_key = |key: &[f64]| {
                    let dot = key.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>();
                    score(dot, c.d, c.scale, c.soft_cap)
                };
                let first = first_visible(c.window, position) as usize;
                debug_assert_eq!(keys.len(), (last as usize + 1) * d, "rows see ever later tokens");
                let scores: Vec<f64> = keys.chunks_exact(d).skip(first).map(of_key).collect();
                let sink = if c.sinks == 1 { f64::from(memory.f32(a.sinks, h)) } else { f64::NEG_INFINITY };
                let top = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum::<f64>() + (sink - top).exp();
                let mut sums = vec![0.0; d];
                for (weight, value) in weights.iter().zip(values.chunks_exact(d).skip(first)) {
                    sums.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
                }
                for (i, sum) in (0..).zip(sums) {
                    let gate = gate(c.gated, memory, a.qkv, row * a.stride + (c.kv_heads * (c.g + 2) + h) * c.d + i);
                    let (col, value) = (h * c.d + i, (sum / total * gate) as f32);
                    match packed {
                        true => {
                            let at = swizzled_index(row, col, a.output_stride);
                            memory.set_number(Format::Bf16, a.o, at as u32, value);
                        }
                        false => memory.set_f32(a.o, row * a.output_stride + col, value),
                    }
                }
            }
        }
    }
}

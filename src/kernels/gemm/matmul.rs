//! `matmul`, the GEMM for many rows on row-major weights, on every device; and `block_rows`, which normalizes, scales and
//! reorders the rows of x for it. Not here: few rows (`gemv`, in the parent module), and weights in fragment order.

use super::{Activations, Matrix, Product, finish};
use crate::device::{Capabilities, Component, MatrixShape};
use crate::kernels::host_memory::{HostMemory, PackedMatrix};
use crate::kernels::moe::{ExpertPart, NOBODY, Sorted};
use crate::kernels::recording::{Call, Range, Recording};
use crate::kernels::shaders::{BlockRowsArgs, BlockRowsConstants, MatmulArgs, MatmulConstants};
use crate::kernels::{Format, codes_word, fold, format_of};

/// The number of rows to a multiple of which rows are padded.
const GROUP: u32 = 8;
/// The number of columns to a multiple of which rows are padded.
const COLUMNS: u32 = 32;
/// The maximum number of rows that `block_rows` prepares by one workgroup each.
const FEW_ROWS: u32 = 256;
/// The number of invocations per compute unit from which on a product is not divided among more workgroups.
const THREADS_PER_PROCESSOR: u32 = 512;
/// The maximum number of sums of an invocation, in registers, of the workgroups that are worth trying; with matrices twice
/// as many.
const MOST_SUMS: u32 = 64;
/// The maximum number of splits of the workgroups that are worth trying.
pub const MOST_SPLITS: u32 = 32;
/// The minimum size of a tile's partial sums in bytes: two parts of the smallest tile of [`MatmulConfig::possible`].
const LEAST_TILE_BYTES: u64 = 2 * 8 * 32 * 4;
/// The minimum number of invocations of the workgroups that are worth trying.
const LEAST_THREADS: u32 = 32;
/// The value of `block_rows`'s constant EACH for rows that are in the order of slots already.
const IN_ORDER: u32 = u32::MAX;

/// The arithmetic of `matmul`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// 32-bit floats, on every device.
    F32,
    /// Pairs of 16-bit floats, whose sums over 32 columns are added in f32: relative errors of about 8e-4 of a product.
    /// Weights of f32 are multiplied in f32.
    F16,
    /// Cooperative matrices of f16 with sums in f32. Weights of f32 are multiplied in f32.
    Matrices(MatrixUnits),
}

/// A shape of cooperative matrices, of f16 with sums in f32: `m × k` by `k × n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixUnits {
    /// Rows of x.
    pub m: u32,
    /// Rows of W.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// The number of invocations of a subgroup.
    pub subgroup: u32,
}

impl MatrixUnits {
    /// Returns the cooperative matrices that a device promises and `matmul` can use: the largest shape whose sides are 8 or
    /// 16, with the smallest subgroups, in which drivers of 8, 16, 32 and 64 invocations multiply.
    pub fn of(capabilities: &Capabilities) -> Option<MatrixUnits> {
        let side = |n: u32| n == 8 || n == 16;
        let serves = |shape: &&MatrixShape| {
            (shape.input, shape.accumulator) == (Component::F16, Component::F32)
                && [shape.m, shape.n, shape.k].into_iter().all(side)
        };
        let whole = capabilities.cooperative_matrix && capabilities.float16 && capabilities.full_subgroups;
        let subgroup = match capabilities.subgroup_size_control {
            true => capabilities.subgroup_min,
            false => capabilities.subgroup_size,
        };
        let shapes = capabilities.matrix_shapes.iter().filter(serves);
        let largest = shapes.max_by_key(|shape| (shape.m * shape.n * shape.k, shape.n));
        let largest = largest.filter(|_| whole && (8..=64).contains(&subgroup))?;
        Some(MatrixUnits { m: largest.m, n: largest.n, k: largest.k, subgroup })
    }
}

impl Arithmetic {
    /// Returns the arithmetic for weights of a format: f32 weights are not rounded.
    pub fn of(self, format: Format) -> Arithmetic {
        if format == Format::F32 { Arithmetic::F32 } else { self }
    }

    /// The constant ORDER of `block_rows`.
    fn order(self) -> u32 {
        match self {
            Arithmetic::F32 => 0,
            Arithmetic::F16 | Arithmetic::Matrices(_) => 1,
        }
    }

    /// The number of bytes of a value of x.
    fn bytes(self) -> u64 {
        if self == Arithmetic::F32 { 4 } else { 2 }
    }

    /// The number of rows of which a 16-byte word in shared memory has values; 1 where x is row after row.
    fn rows_of_word(self) -> u32 {
        match self {
            Arithmetic::F32 => 4,
            Arithmetic::F16 => 8,
            Arithmetic::Matrices(_) => 1,
        }
    }
}

/// Rows of activations as `block_rows` writes them.
#[derive(Clone, Copy, Debug)]
pub struct Blocked {
    /// The values, of which [`Blocked::bytes`] are used.
    pub range: Range,
    /// The scale of each row, of which [`Blocked::scale_bytes`] are used.
    pub scales: Range,
    /// The number of columns, without padding.
    pub cols: u32,
    /// The arithmetic for which the rows are prepared.
    pub arithmetic: Arithmetic,
}

impl Blocked {
    /// Returns the size of `rows` rows of `cols` columns in bytes.
    pub fn bytes(arithmetic: Arithmetic, rows: u32, cols: u32) -> u64 {
        arithmetic.bytes() * u64::from(rows.next_multiple_of(GROUP)) * u64::from(cols.next_multiple_of(COLUMNS))
    }

    /// Returns the size of the scales of `rows` rows in bytes.
    pub fn scale_bytes(rows: u32) -> u64 {
        4 * u64::from(rows.next_multiple_of(GROUP))
    }

    /// Declares the buffers of `rows` rows of `cols` columns.
    pub fn declare(r: &mut Recording, name: &str, arithmetic: Arithmetic, rows: u32, cols: u32) -> Blocked {
        Blocked {
            range: r.buffer(name, Blocked::bytes(arithmetic, rows, cols)),
            scales: r.buffer(&format!("{name}.scales"), Blocked::scale_bytes(rows)),
            cols,
            arithmetic,
        }
    }
}

/// The rows that are prepared or multiplied.
#[derive(Clone, Copy, Debug)]
pub enum MatmulRows<'a> {
    /// The given number of rows.
    All(u32),
    /// At most the given number of rows; word 2 of the chunk descriptor holds the number of those in use.
    Counted(u32, Range),
    /// Rows sorted by expert (MoE): `block_rows` takes, for each slot, the row whose choice the slot holds.
    Sorted(&'a Sorted),
    /// Rows in the order of slots (MoE), one for each slot.
    Slots(&'a Sorted),
}

impl MatmulRows<'_> {
    /// Returns the maximum number of rows.
    pub fn most(self) -> u32 {
        match self {
            MatmulRows::All(rows) | MatmulRows::Counted(rows, _) => rows,
            MatmulRows::Sorted(sorted) | MatmulRows::Slots(sorted) => sorted.slot_count(),
        }
    }

    /// The kernels' argument `rows`: 0 if a descriptor holds the number.
    fn known(self) -> u32 {
        if matches!(self, MatmulRows::Counted(..)) { 0 } else { self.most() }
    }
}

/// Returns the call that prepares rows of x for `matmul`, after an optional RMSNorm with the given weight and epsilon.
pub fn block_rows(label: String, x: Activations, norm: Option<(Range, f32)>, y: Blocked, rows: MatmulRows<'_>) -> Call {
    let none = x.range.none();
    let (each, tile, slots, tiles) = match rows {
        MatmulRows::All(_) | MatmulRows::Counted(..) => (0, 16, none, none),
        MatmulRows::Sorted(sorted) => (sorted.chosen, sorted.tile, sorted.slots, sorted.tiles),
        MatmulRows::Slots(sorted) => (IN_ORDER, sorted.tile, none, sorted.tiles),
    };
    // Few rows are prepared by large workgroups, as no others wait for their turn.
    let few = rows.most() <= FEW_ROWS;
    let threads = y.cols.div_ceil(8).next_power_of_two().clamp(64, if few { 256 } else { 128 });
    // For products in f32, values of four rows lie next to each other.
    let group = match y.arithmetic {
        Arithmetic::F32 => GROUP,
        _ if few => 1,
        _ => 2,
    };
    let constants = BlockRowsConstants {
        threads,
        lanes: threads,
        norm: u32::from(norm.is_some()),
        order: y.arithmetic.order(),
        each,
        tile,
        group,
    };
    let (weight, epsilon) = norm.unwrap_or((none, 0.0));
    let args = BlockRowsArgs {
        x: x.range,
        norm: weight,
        count: if let MatmulRows::Counted(_, count) = rows { count } else { none },
        slots,
        tiles,
        y: y.range.part(0, Blocked::bytes(y.arithmetic, rows.most(), y.cols)),
        scales: y.scales.part(0, Blocked::scale_bytes(rows.most())),
        k: y.cols,
        x_stride: x.stride,
        epsilon,
        rows: rows.known(),
    };
    Call {
        kernel: "block_rows",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: fold(rows.most().next_multiple_of(GROUP) / group, 1),
    }
}

/// The work of one workgroup of `matmul`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulConfig {
    /// The rows of x of a tile.
    pub tokens: u32,
    /// The rows of W of a tile.
    pub features: u32,
    /// 16-byte words of rows of x per invocation: of 4 rows in f32, of 8 in f16. With matrices: blocks of
    /// [`MatrixUnits::m`] rows per subgroup.
    pub words: u32,
    /// The rows of W per invocation, an even number. With matrices: blocks of [`MatrixUnits::n`] rows per subgroup.
    pub each: u32,
    /// The number of workgroups among which a tile's columns are divided.
    pub splits: u32,
}

impl MatmulConfig {
    /// Returns the workgroups by rule for at most `rows` rows of x by `n` rows of W of `cols` columns, on a device with
    /// `processors` compute units. `small`: for CPU drivers, small tiles without splits.
    pub fn choose(
        arithmetic: Arithmetic,
        rows: u32,
        (n, cols): (u32, u32),
        processors: u32,
        small: bool,
    ) -> MatmulConfig {
        let config = |tokens, features, words, each| MatmulConfig { tokens, features, words, each, splits: 1 };
        // 32 sums per invocation: with 64, drivers of Adreno and Apple GPUs spill registers to memory.
        let mut config = match (arithmetic, rows) {
            (Arithmetic::Matrices(of), _) => {
                // In blocks of the device's size. Narrow tiles have more workgroups, among which columns are divided.
                let tokens = match rows {
                    _ if rows <= of.m => 1,
                    ..=32 => 2,
                    33..=64 => 4,
                    _ => 8,
                };
                let narrow = tokens == 4 && n.div_ceil(8 * of.n) < processors;
                let features = if tokens == 1 || narrow { 4 } else { 8 };
                // A workgroup has about 128 invocations, whatever its subgroups' size.
                let (words, each) = match tokens * features * of.subgroup / 128 {
                    16.. => (4, 4),
                    8.. => (2, 4),
                    4.. => (2, 2),
                    _ => (1, 2),
                };
                config(tokens * of.m, features * of.n, words, each)
            }
            (_, ..=16) => config(16, 64, 1, 4),
            (Arithmetic::F32, _) if small => config(64, 64, 1, 4),
            (Arithmetic::F32, ..=32) => config(32, 64, 2, 4),
            (Arithmetic::F32, ..=127) => config(64, 64, 2, 4),
            (Arithmetic::F32, _) => config(128, 64, 2, 4),
            (Arithmetic::F16, ..=32) => config(32, 64, 1, 4),
            (Arithmetic::F16, ..=127) => config(64, 64, 1, 4),
            (Arithmetic::F16, _) => config(128, 64, 1, 4),
        };
        if !small {
            config.splits = config.filling_splits(arithmetic, rows, (n, cols), processors);
        }
        config
    }

    /// Returns the number of splits with which there are enough workgroups to fill a device, each with at least eight
    /// stages.
    fn filling_splits(&self, arithmetic: Arithmetic, rows: u32, (n, cols): (u32, u32), processors: u32) -> u32 {
        let tiles = rows.div_ceil(self.tokens) * n.div_ceil(self.features);
        let stages = cols.div_ceil(COLUMNS);
        let wanted = THREADS_PER_PROCESSOR * processors / self.threads(arithmetic).max(1);
        // Sums in pairs of f16 take much longer than the addition of parts.
        let splits = if arithmetic == Arithmetic::F16 { wanted.div_ceil(tiles) } else { wanted / tiles };
        splits.min(stages / 8).clamp(1, 16)
    }

    /// Returns the workgroups that are worth trying for a product like that of [`MatmulConfig::choose`]: tiles that are hardly
    /// larger than the rows and whose sums fit in registers, with as many splits as fill the device, fewer and more.
    /// `shared_bytes` is the shared memory of a workgroup.
    pub fn possible(
        arithmetic: Arithmetic,
        rows: u32,
        (n, cols): (u32, u32),
        processors: u32,
        shared_bytes: u32,
    ) -> Vec<MatmulConfig> {
        let stages = cols.div_ceil(COLUMNS);
        let mut configs = Vec::new();
        for (tokens, features) in [8, 16, 32, 64, 128].into_iter().flat_map(|t| [32, 64, 128].map(|f| (t, f))) {
            for (words, each) in [1, 2, 4].into_iter().flat_map(|words| [2, 4, 8].map(|each| (words, each))) {
                let config = MatmulConfig { tokens, features, words, each, splits: 1 };
                let (sums, most) = match arithmetic {
                    Arithmetic::Matrices(of) => (words * each * of.m * of.n / of.subgroup, 2 * MOST_SUMS),
                    other => (words * other.rows_of_word() * each, MOST_SUMS),
                };
                let small = tokens <= rows.next_power_of_two().max(16);
                let threads = if config.fits(arithmetic) { config.threads(arithmetic) } else { 0 };
                let light = (8..=most).contains(&sums) && config.shared_bytes(arithmetic) <= shared_bytes;
                if !(small && light && threads >= LEAST_THREADS) {
                    continue;
                }
                let filling = config.filling_splits(arithmetic, rows, (n, cols), processors);
                let mut splits = vec![1, filling / 2, filling, filling * 2];
                splits.retain(|splits| (1..=(stages / 4).clamp(1, MOST_SPLITS)).contains(splits));
                splits.sort_unstable();
                splits.dedup();
                configs.extend(splits.into_iter().map(|splits| MatmulConfig { splits, ..config }));
            }
        }
        configs
    }

    /// Returns the shared memory of a workgroup in bytes.
    pub fn shared_bytes(&self, arithmetic: Arithmetic) -> u32 {
        // Rows of W, and with matrices of x too, are four 16-byte words and one more; x is in words of several rows otherwise.
        let x = match arithmetic {
            Arithmetic::Matrices(of) => {
                let subgroups = self.threads(arithmetic) / of.subgroup;
                self.tokens * 5 * 16 + subgroups * of.m * of.n * 4
            }
            Arithmetic::F16 => self.tokens / 8 * 33 * 16,
            Arithmetic::F32 => self.tokens / 4 * 17 * 16,
        };
        self.features * 5 * 16 + x + 4
    }

    /// Returns the number of invocations of a workgroup.
    pub fn threads(&self, arithmetic: Arithmetic) -> u32 {
        match arithmetic {
            Arithmetic::Matrices(of) => {
                of.subgroup * (self.tokens / (self.words * of.m)) * (self.features / (self.each * of.n))
            }
            other => self.tokens / (self.words * other.rows_of_word()) * (self.features / self.each),
        }
    }

    /// Whether the tile is divided evenly among its invocations, whose number is one that every device offers.
    pub fn fits(&self, arithmetic: Arithmetic) -> bool {
        let (tokens, features) = match arithmetic {
            Arithmetic::Matrices(of) => (self.words * of.m, self.each * of.n),
            other => (self.words * other.rows_of_word(), self.each),
        };
        let even = tokens > 0 && features > 0 && self.each.is_multiple_of(2) && self.splits > 0;
        even && self.tokens.is_multiple_of(tokens)
            && self.features.is_multiple_of(features)
            && self.tokens > 0
            && (1..=256).contains(&self.threads(arithmetic))
    }

    /// Returns the size of the partial sums and of the counters for `rows` rows of x by `n` rows of W, in bytes. Zero
    /// without splits.
    pub fn scratch_bytes(&self, rows: u32, n: u32) -> [u64; 2] {
        if self.splits == 1 {
            return [0, 0];
        }
        let tiles = u64::from(rows.div_ceil(self.tokens)) * u64::from(n.div_ceil(self.features));
        [tiles * u64::from(self.splits * self.tokens * self.features) * 4, tiles * 4]
    }
}

/// Buffers for the partial sums of a tile's workgroups and for the counters of their arrival;
/// [`MatmulConfig::scratch_bytes`] gives the size of each. The counters are zero between calls.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// The partial sums.
    pub partials: Range,
    /// The counters.
    pub counters: Range,
}

impl Scratch {
    /// Declares buffers of at least `room` bytes of partial sums, and of counters for as many tiles as these may belong to.
    pub fn reserve(r: &mut Recording, room: u64) {
        r.buffer("matmul.partials", room.max(16));
        r.buffer("matmul.counters", (room / LEAST_TILE_BYTES * 4).max(4));
    }

    /// Declares the buffers for a product of `rows` rows of x by `n` rows of W.
    pub fn declare(r: &mut Recording, config: MatmulConfig, rows: u32, n: u32) -> Scratch {
        let [partials, counters] = config.scratch_bytes(rows, n);
        let empty = |range: Range, bytes| if bytes == 0 { range.none() } else { range };
        Scratch {
            partials: empty(r.buffer("matmul.partials", partials.max(16)), partials),
            counters: empty(r.buffer("matmul.counters", counters.max(4)), counters),
        }
    }
}

impl Product {
    /// Returns the call for many rows of x: `x` has them prepared by [`block_rows`], with this product's norm. With
    /// [`MatmulRows::Sorted`], `self.weight` holds the weights of the experts of its part, and `each_expert` is the number of
    /// rows of one; results are written to the place of their slots. With [`MatmulRows::Slots`] they are written in the order
    /// of the slots.
    ///
    /// # Panics
    /// If x was prepared for other columns, or the config does not fit the arithmetic: bugs of the caller.
    pub fn matmul(
        &self,
        x: Blocked,
        rows: MatmulRows<'_>,
        each_expert: u32,
        config: MatmulConfig,
        scratch: Scratch,
    ) -> Call {
        let Matrix { range: weight, format, cols, .. } = self.weight;
        let arithmetic = x.arithmetic;
        assert_eq!((x.cols, arithmetic.of(format)), (cols, arithmetic), "x of \"{}\"", self.label);
        let sorted = match rows {
            MatmulRows::Sorted(sorted) | MatmulRows::Slots(sorted) => Some(sorted),
            _ => None,
        };
        assert!(sorted.is_none_or(|s| s.tile == config.tokens), "tiles of {config:?} in \"{}\"", self.label);
        assert!(config.fits(arithmetic), "{config:?} of {arithmetic:?} in \"{}\"", self.label);
        let n = if sorted.is_some() { each_expert } else { self.weight.rows };
        let threads = config.threads(arithmetic);
        let units = match arithmetic {
            Arithmetic::Matrices(units) => units,
            _ => MatrixUnits { m: 0, n: 0, k: 0, subgroup: 0 },
        };
        let part = sorted.map_or(ExpertPart::ALL, |s| s.part);
        let constants = MatmulConstants {
            threads,
            lanes: threads,
            bias: u32::from(self.bias.is_some()),
            epilogue: self.epilogue.code(),
            tokens: config.tokens,
            features: config.features,
            words: config.words,
            each: config.each,
            splits: config.splits,
            experts: u32::from(sorted.is_some()),
            scatter: u32::from(matches!(rows, MatmulRows::Sorted(_))),
            first_expert: part.first,
            part_experts: part.count,
            codes: codes_word(format),
            matrix_m: units.m,
            matrix_n: units.n,
            matrix_k: units.k,
            subgroup: units.subgroup,
        };
        let none = weight.none();
        let most = rows.most();
        let args = MatmulArgs {
            weight,
            x: x.range.part(0, Blocked::bytes(arithmetic, most, cols)),
            scales: x.scales.part(0, Blocked::scale_bytes(most)),
            bias: self.bias.unwrap_or(none),
            y: self.y.range,
            count: if let MatmulRows::Counted(_, count) = rows { count } else { none },
            tiles: sorted.map_or(none, |s| s.tiles),
            slots: sorted.map_or(none, |s| s.slots),
            partials: scratch.partials,
            counters: scratch.counters,
            n,
            chunks: cols.div_ceil(8),
            y_stride: self.y.stride,
            rows: rows.known(),
        };
        Call {
            kernel: kernel(format, arithmetic),
            label: self.label.clone(),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: [most.div_ceil(config.tokens), n.div_ceil(config.features), config.splits],
        }
    }
}

fn kernel(format: Format, arithmetic: Arithmetic) -> &'static str {
    match (format, arithmetic) {
        (Format::Bf16, Arithmetic::F32) => "matmul.bf16",
        (Format::F16, Arithmetic::F32) => "matmul.f16",
        (Format::F32, _) => "matmul.f32",
        (Format::Codes(_), Arithmetic::F32) => "matmul.codes",
        (Format::Bf16, Arithmetic::F16) => "matmul.bf16.half",
        (Format::F16, Arithmetic::F16) => "matmul.f16.half",
        (Format::Codes(_), Arithmetic::F16) => "matmul.codes.half",
        (Format::Bf16, Arithmetic::Matrices(_)) => "matmul.bf16.matrix",
        (Format::F16, Arithmetic::Matrices(_)) => "matmul.f16.matrix",
        (Format::Codes(_), Arithmetic::Matrices(_)) => "matmul.codes.matrix",
    }
}

/// Returns the order of x (the constant ORDER of `block_rows`) that a variant of `matmul` reads.
pub(crate) fn order_of(kernel: &str) -> u32 {
    match kernel.rsplit('.').next() {
        Some("half" | "matrix") => 1,
        _ => 0,
    }
}

/// Returns the index of an element in rows that `block_rows` has written in an order, in values; `cols` are padded.
pub(crate) fn blocked_index(order: u32, row: u32, col: u32, cols: u32) -> u32 {
    match order {
        0 => (row / 4 * cols + col) * 4 + row % 4,
        _ => row * cols + col,
    }
}

/// Computes like the kernel in f32, so that the values, which are then rounded, have the same bits. Only the scales are
/// computed in f64.
pub(crate) fn reference_block_rows(call: &Call, memory: &mut HostMemory) {
    let a = BlockRowsArgs::from_args(&call.args);
    let c = BlockRowsConstants::from_values(&call.constants);
    let used = if a.rows == 0 { memory.u32(a.count, 2) } else { a.rows };
    let cols = a.k.next_multiple_of(COLUMNS);
    for row in 0..used.next_multiple_of(GROUP) {
        let mut from = (row < used).then_some(row);
        if c.each > 0 {
            if memory.u32(a.tiles, row / c.tile) == NOBODY {
                continue;
            }
            if c.each != IN_ORDER {
                let slot = memory.u32(a.slots, row);
                from = from.filter(|_| slot != NOBODY).map(|_| slot / c.each);
            }
        }
        let x: Vec<f32> = match from {
            Some(from) => (0..a.k).map(|i| memory.f32(a.x, from * a.x_stride + i)).collect(),
            None => vec![0.0; a.k as usize],
        };
        let normed: Vec<f32> = match c.norm {
            1 if from.is_some() => (0..).zip(&x).map(|(i, v)| v * memory.f32(a.norm, i)).collect(),
            _ => x.clone(),
        };
        let most = normed.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let bits = if c.order == 0 { 127 << 23 } else { (most.to_bits() & 0x7f80_0000).min(253 << 23) };
        let factor = f32::from_bits((254 << 23) - bits);
        let mut scale = f64::from(f32::from_bits(bits));
        if c.norm == 1 {
            let mean = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / f64::from(a.k);
            scale /= (mean + f64::from(a.epsilon)).sqrt();
        }
        memory.set_f32(a.scales, row, scale as f32);
        for col in 0..cols {
            let value = normed.get(col as usize).map_or(0.0, |v| v * factor);
            let at = blocked_index(c.order, row, col, cols);
            match c.order {
                0 => memory.set_f32(a.y, at, value),
                _ => memory.set_f16(a.y, at, value),
            }
        }
    }
}

/// Sums in f64, like the references of the other products; padding of W is not read.
pub(crate) fn reference_matmul(call: &Call, memory: &mut HostMemory) {
    let a = MatmulArgs::from_args(&call.args);
    let c = MatmulConstants::from_values(&call.constants);
    let (format, order) = (format_of(call.kernel, c.codes), order_of(call.kernel));
    let used = if a.rows == 0 { memory.u32(a.count, 2) } else { a.rows };
    let k = a.chunks * 8;
    let cols = k.next_multiple_of(COLUMNS);
    let matrix = PackedMatrix { range: a.weight, format, fragments: false, cols: k };
    let mut cached: (Option<u32>, Vec<f64>) = (None, Vec::new());
    let part = ExpertPart { first: c.first_expert, count: c.part_experts };
    for row in 0..used {
        let (mut to, mut first, mut bias_row) = (row, 0, 0);
        if c.experts == 1 {
            let expert = memory.u32(a.tiles, row / c.tokens);
            if expert == NOBODY || part.lacks(expert) {
                continue;
            }
            (first, bias_row) = ((expert - part.first) * a.n, expert * a.n);
            if c.scatter == 1 {
                to = memory.u32(a.slots, row);
                if to == NOBODY {
                    continue;
                }
            }
        }
        if cached.0 != Some(first) {
            let weight = |r: u32| (0..k).map(move |i| (first + r, i));
            let all = (0..a.n).flat_map(weight);
            cached = (Some(first), all.map(|(r, i)| f64::from(memory.element(&matrix, r, i))).collect());
        }
        let x: Vec<f64> = (0..k)
            .map(|col| {
                let at = blocked_index(order, row, col, cols);
                f64::from(if order == 0 { memory.f32(a.x, at) } else { memory.f16(a.x, at) })
            })
            .collect();
        let scale = f64::from(memory.f32(a.scales, row));
        let v: Vec<f64> = (0..a.n)
            .zip(cached.1.chunks_exact(k as usize))
            .map(|(r, w)| {
                let dot: f64 = w.iter().zip(&x).filter(|(_, x)| **x != 0.0).map(|(w, x)| w * x).sum();
                dot * scale + if c.bias == 1 { f64::from(memory.f32(a.bias, bias_row + r)) } else { 0.0 }
            })
            .collect();
        finish(memory, c.epilogue, (a.y, None), to * a.y_stride, &v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_gives_each_value_a_place_of_its_own() {
        for order in 0..2 {
            let places: std::collections::BTreeSet<u32> =
                (0..16).flat_map(|row| (0..64).map(move |col| blocked_index(order, row, col, 64))).collect();
            assert_eq!((places.len(), places.last()), (1024, Some(&1023)));
        }
    }

    #[test]
    fn a_tile_has_as_many_invocations_as_it_has_words_and_rows() {
        let config = MatmulConfig { tokens: 64, features: 128, words: 1, each: 8, splits: 4 };
        assert_eq!(config.threads(Arithmetic::F16), 128);
        assert_eq!(config.threads(Arithmetic::F32), 256);
        assert_eq!(config.scratch_bytes(65, 129), [4 * 4 * 64 * 128 * 4, 4 * 4]);
        let units = MatrixUnits { m: 16, n: 16, k: 16, subgroup: 32 };
        assert_eq!(MatmulConfig { words: 2, each: 4, ..config }.threads(Arithmetic::Matrices(units)), 128);
    }

    /// Goal: what is worth trying can run, has the rule's choice among it, and needs no more scratch than is reserved.
    #[test]
    fn workgroups_worth_trying_fit_and_have_the_rules_among_them() {
        let units = |m, n, subgroup| Arithmetic::Matrices(MatrixUnits { m, n, k: 16, subgroup });
        let arithmetics = [Arithmetic::F32, Arithmetic::F16, units(16, 16, 32), units(8, 16, 16), units(16, 16, 64)];
        for arithmetic in arithmetics {
            for (rows, n, cols, processors) in
                [(4, 4096, 4096, 16), (16, 12288, 4096, 32), (64, 1024, 4096, 132), (512, 4096, 12288, 60)]
            {
                let of = (arithmetic, rows, n, cols);
                let configs = MatmulConfig::possible(arithmetic, rows, (n, cols), processors, 32 << 10);
                let rule = MatmulConfig::choose(arithmetic, rows, (n, cols), processors, false);
                assert!(configs.contains(&rule), "{of:?}: no {rule:?}");
                assert!(configs.len() >= 8, "{of:?}: {configs:?}");
                for config in &configs {
                    assert!(
                        config.fits(arithmetic) && config.shared_bytes(arithmetic) <= 32 << 10,
                        "{of:?}: {config:?}"
                    );
                    assert!(config.tokens <= rows.next_power_of_two().max(16), "{of:?}: {config:?}");
                    let [partials, counters] = config.scratch_bytes(rows, n);
                    assert!(partials / LEAST_TILE_BYTES * 4 >= counters, "{of:?}: {config:?}");
                }
            }
        }
        // Without shared memory for it, a tile is not tried.
        let least = MatmulConfig::possible(Arithmetic::F32, 512, (4096, 4096), 16, 8 << 10);
        assert!(!least.is_empty() && least.iter().all(|config| config.shared_bytes(Arithmetic::F32) <= 8 << 10));
    }

    fn shape(m: u32, n: u32, k: u32, input: Component, accumulator: Component) -> MatrixShape {
        MatrixShape { m, n, k, input, accumulator }
    }

    #[test]
    fn the_largest_matrices_with_sums_in_f32_are_used() {
        let mut capabilities = Capabilities {
            cooperative_matrix: true,
            float16: true,
            full_subgroups: true,
            subgroup_size_control: true,
            subgroup_size: 64,
            subgroup_min: 32,
            subgroup_max: 64,
            matrix_shapes: vec![
                shape(16, 16, 16, Component::F16, Component::F16),
                shape(8, 8, 16, Component::F16, Component::F32),
                shape(16, 8, 16, Component::F16, Component::F32),
                shape(16, 16, 32, Component::I8, Component::I32),
                shape(32, 32, 16, Component::F16, Component::F32),
            ],
            ..Capabilities::default()
        };
        assert_eq!(MatrixUnits::of(&capabilities), Some(MatrixUnits { m: 16, n: 8, k: 16, subgroup: 32 }));
        capabilities.matrix_shapes.push(shape(16, 16, 16, Component::F16, Component::F32));
        assert_eq!(MatrixUnits::of(&capabilities), Some(MatrixUnits { m: 16, n: 16, k: 16, subgroup: 32 }));
        capabilities.float16 = false;
        assert_eq!(MatrixUnits::of(&capabilities), None);
    }
}

//! The gated delta rule (linear attention) and the state space of Mamba-2, which is that rule without its correction:
//! `delta_step` for rows that decode and verification, and `delta_blocks`, `delta_scan`
//! (on matrices of which only the shape is known `delta_blocks_matrix`, `delta_scan_matrix`) and `delta_gate` for prefill.
//! Not here: the projections before and after, and the assignment of cells.

use super::Format;
use super::embed::{BLOCK_ROWS, CELL_WORDS};
use super::gemm::matmul::MatrixUnits;
use super::gemm::skinny::Matrices;
use super::gemm::tiled::{PackedOrder, TILE_TOKENS};
use super::host_memory::HostMemory;
use super::recording::{Call, Range};
use super::shaders::{
    DeltaBlocksArgs, DeltaBlocksConstants, DeltaBlocksMatrixArgs, DeltaBlocksMatrixConstants, DeltaGateArgs,
    DeltaGateConstants, DeltaScanArgs, DeltaScanConstants, DeltaScanMatrixArgs, DeltaScanMatrixConstants,
    DeltaStepArgs, DeltaStepConstants,
};
use super::state::{SLOT_SETTLED, SLOT_WORDS};
use super::tags::{Flow, tagged};
use crate::memory::pack::FRAGMENT_COLS;

/// The number of positions in a cell's convolution window (a ring buffer).
pub const RING: u32 = 8;
/// The maximum number of tokens of a sequence that [`delta_verify`] processes and that may be pending.
pub const MOST_PENDING: u32 = 4;
pub(super) const NO_CELL: u32 = u32::MAX;
const L2_EPSILON: f64 = 1e-6;

/// How a token changes a head's state S and reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeltaRule {
    /// The gated delta rule, with k and q of length 1: S ← αS + k̂ δᵀ, where δ = σ(b) (v - αSᵀk̂). The output Sᵀq̂ has a norm
    /// of each head before its gate.
    Delta,
    /// The state space of Mamba-2: S ← αS + k δᵀ, where δ = softplus(a + `dt_bias`) v and α = exp(-exp(`a_log`) softplus(…)).
    /// The output is Sᵀq + skip · v, with a factor `skip` of each head, times its gate. There is no b.
    StateSpace {
        /// Whether the convolution has biases, which follow its weights.
        conv_bias: bool,
    },
}

impl DeltaRule {
    /// The rule that a kernel's constants describe.
    fn of(plain: u32, conv_bias: u32) -> DeltaRule {
        if plain == 1 { DeltaRule::StateSpace { conv_bias: conv_bias == 1 } } else { DeltaRule::Delta }
    }

    /// The kernels' constants: whether the update does not depend on the state, and whether the convolution has biases.
    fn constants(self) -> (u32, u32) {
        match self {
            DeltaRule::Delta => (0, 0),
            DeltaRule::StateSpace { conv_bias } => (1, u32::from(conv_bias)),
        }
    }
}

/// The heads of a gated-delta layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaHeads {
    /// The number of heads of q and k.
    pub key: u32,
    /// The number of heads of v, z, the state and the output.
    pub value: u32,
    /// Whether key heads take turns, so that value head h uses key head h % key. Otherwise each key head is shared by
    /// value / key consecutive value heads.
    pub tiled: bool,
    /// The dimension of a head of q or k.
    pub key_dim: u32,
    /// The dimension of a head of v.
    pub value_dim: u32,
    /// The rule of the state.
    pub rule: DeltaRule,
}

impl DeltaHeads {
    /// The heads that a kernel's constants describe: the numbers of key and value heads, their dimensions, and
    /// whether they are tiled.
    fn of([key, value, key_dim, value_dim, tiled]: [u32; 5], rule: DeltaRule) -> DeltaHeads {
        DeltaHeads { key, value, tiled: tiled == 1, key_dim, value_dim, rule }
    }

    /// The column of the merged projection where the columns of a begin.
    fn decays(self) -> u32 {
        self.projected() - self.value
    }

    /// The number of channels of the convolution: q, k and v.
    pub fn channels(self) -> u32 {
        2 * self.key * self.key_dim + self.value * self.value_dim
    }

    /// The number of columns of the merged projection: q, k, v, z, b and a; a state space has no b.
    pub fn projected(self) -> u32 {
        let gates = if self.rule == DeltaRule::Delta { 2 } else { 1 };
        self.channels() + self.value * self.value_dim + gates * self.value
    }

    /// The number of columns of the output.
    pub fn output(self) -> u32 {
        self.value * self.value_dim
    }

    /// Returns the size of the states of `cells` cells in bytes.
    pub fn state_bytes(self, cells: u32) -> u64 {
        4 * u64::from(cells) * u64::from(self.value) * u64::from(self.key_dim * self.value_dim)
    }

    /// Returns the size of the convolution windows of `cells` cells in bytes.
    pub fn window_bytes(self, cells: u32) -> u64 {
        4 * u64::from(cells) * u64::from(RING * self.channels())
    }

    /// Returns the size of the pending tokens of `cells` cells in bytes, with `entries` tokens each.
    pub fn pending_bytes(self, cells: u32, entries: u32) -> u64 {
        4 * u64::from(cells) * u64::from(self.value * entries) * u64::from(self.pending_floats())
    }

    /// The number of floats of a head's pending token: k̂, δ and α, then the number of tokens in the state, and
    /// padding.
    fn pending_floats(self) -> u32 {
        self.key_dim + self.value_dim + 4
    }

    /// The key head that a value head uses.
    fn key_of(self, value: u32) -> u32 {
        if self.tiled { value % self.key } else { value / (self.value / self.key) }
    }
}

/// Returns whether the kernels support these heads: the dimensions must be multiples of 16 up to 128, and the number of
/// value heads a multiple of the number of key heads.
pub fn delta_serves(heads: DeltaHeads) -> bool {
    let dim = |dim: u32| dim.is_multiple_of(16) && (16..=128).contains(&dim);
    heads.key > 0
        && heads.value > 0
        && heads.value.is_multiple_of(heads.key)
        && dim(heads.key_dim)
        && dim(heads.value_dim)
}

fn check(heads: DeltaHeads, packed: Option<PackedOrder>, stride: u32, y_stride: u32) {
    assert!(delta_serves(heads), "the delta rule does not serve {heads:?}");
    assert!(stride >= heads.projected() && stride.is_multiple_of(4), "rows of {stride} floats for {heads:?}");
    match packed {
        Some(PackedOrder::Fragments) => {
            assert!(heads.output() == y_stride * FRAGMENT_COLS, "{y_stride} blocks of columns for {heads:?}");
        }
        Some(order) => {
            let fits = heads.output().is_multiple_of(order.block_cols()) && y_stride.is_multiple_of(TILE_TOKENS);
            assert!(fits, "{y_stride} swizzled rows for {heads:?}");
        }
        None => assert!(y_stride >= heads.output() && y_stride.is_multiple_of(4), "output rows of {y_stride} floats"),
    }
}

/// Returns the call that processes one token of each of `rows` rows of a step. With `packed`, the output is packed for
/// the next product in this order, and its stride is [`Packed::stride`](super::gemm::tiled::Packed::stride). Only rows with a
/// sequence are written; with tagged operands, all rows are.
///
/// A cell has `entries` pending tokens ([`DeltaHeads::pending_bytes`]). The call adds the pending tokens to the state up
/// to the row's position, and leaves the row's own token pending, so that the step can be run again.
///
/// # Panics
/// If [`delta_serves`] rejects the heads, strides do not fit them, there are not 1 to 4 entries, or the output is both
/// packed and tagged.
pub fn delta_step(
    label: String,
    heads: DeltaHeads,
    (rows, entries): (u32, u32),
    packed: Option<PackedOrder>,
    flow: Flow,
    args: DeltaStepArgs,
) -> Call {
    step(label, heads, (rows, 1, entries), packed, flow, args)
}

/// Returns the call that processes `tokens` tokens, of which some may be rejected later, of each of `sequences`
/// sequences. A sequence's tokens are consecutive rows at consecutive positions; rows without a token follow the
/// others. The call adds the accepted ones of the pending tokens to the states; the new tokens are then pending.
///
/// # Panics
/// Like [`delta_step`]; also if there are not 2 to 4 tokens, or more tokens than pending entries.
pub fn delta_verify(
    label: String,
    heads: DeltaHeads,
    (sequences, tokens, entries): (u32, u32, u32),
    packed: Option<PackedOrder>,
    flow: Flow,
    args: DeltaStepArgs,
) -> Call {
    assert!(
        (2..=MOST_PENDING).contains(&tokens) && tokens <= entries,
        "{tokens} tokens of a sequence, {entries} may be pending"
    );
    step(label, heads, (sequences, tokens, entries), packed, flow, args)
}

fn step(
    label: String,
    heads: DeltaHeads,
    (sequences, tokens, entries): (u32, u32, u32),
    packed: Option<PackedOrder>,
    flow: Flow,
    args: DeltaStepArgs,
) -> Call {
    check(heads, packed, args.stride, args.y_stride);
    assert!(packed.is_none() || flow.output.is_none(), "packed words carry no tags");
    let constants = DeltaStepConstants {
        tagged: flow.code(),
        packed: PackedOrder::word(packed),
        tokens,
        ..step_constants(heads, entries)
    };
    let chunk = args.chunk.none();
    let args =
        DeltaStepArgs { fault: args.fault.none(), chunk, x_tag: flow.input, y_tag: flow.output.unwrap_or(0), ..args };
    let (x, y) = (args.x, args.y);
    let call = Call {
        kernel: "delta_step",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [heads.value, sequences, 1],
    };
    flow.mark(call, x, y)
}

/// Returns the constants of `delta_step` for one token of a sequence, without tags, of a decode step.
fn step_constants(heads: DeltaHeads, entries: u32) -> DeltaStepConstants {
    let (plain, conv_bias) = heads.rule.constants();
    assert!((1..=MOST_PENDING).contains(&entries), "{entries} pending tokens for each cell");
    DeltaStepConstants {
        threads: STEP_GROUPS * heads.value_dim / 4,
        key_heads: heads.key,
        value_heads: heads.value,
        key_dim: heads.key_dim,
        value_dim: heads.value_dim,
        groups: STEP_GROUPS,
        tagged: 0,
        packed: PackedOrder::word(None),
        tokens: 1,
        pending: entries,
        tiled: u32::from(heads.tiled),
        devices: 0,
        beside_prompts: 0,
        plain,
        conv_bias,
    }
}

/// Returns the call that processes the tokens of the slots that decode in a prompt step; `outputs` is where the step's scan
/// writes its rows. Its cells are of no prompt of the step, so it may run beside the calls of [`delta_prompts`].
fn decoding_rows(label: &str, heads: DeltaHeads, of: DecodingRows, o: &PromptOperands, outputs: Range) -> Call {
    let constants = DeltaStepConstants { beside_prompts: 1, ..step_constants(heads, of.entries) };
    let args = DeltaStepArgs {
        x: o.x,
        rows: of.rows,
        conv: o.conv,
        a_log: o.a_log,
        dt_bias: o.dt_bias,
        norm: o.norm,
        state: o.state,
        window: o.window,
        pending: of.pending,
        slots: of.slots,
        y: outputs,
        fault: o.chunk.none(),
        chunk: o.chunk,
        stride: o.stride,
        y_stride: heads.output(),
        epsilon: o.epsilon,
        x_tag: 0,
        y_tag: 0,
    };
    let call = Call {
        kernel: "delta_step",
        label: format!("{label}.rows"),
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [heads.value, of.most, 1],
    };
    call.apart(o.state).apart(o.window)
}

/// Adds room for `more` further slots that decode in a prompt step to the call of [`delta_prompts`] for them; other calls stay
/// as they are.
pub fn add_decoding_rows(call: &mut Call, more: u32) {
    if call.kernel == "delta_step" {
        call.groups[1] += more;
    }
}

/// The number of groups into which a workgroup of `delta_step` divides a state's rows. With 8, an invocation loads
/// 16 rows of the largest heads at once, and a workgroup consists of full subgroups for all supported heads.
const STEP_GROUPS: u32 = 8;

/// Returns the maximum number of blocks of a step with `rows` rows of `prompts` prompts.
fn most_blocks(rows: u32, prompts: u32) -> u32 {
    let prompts = prompts.min(rows).max(1);
    // The last block of each prompt may hold a single row.
    ((rows - rows.min(prompts)) / BLOCK_ROWS + prompts).min(rows)
}

/// How the products of prompts' delta rule are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaWay {
    /// `delta_blocks` and `delta_scan`: matrices whose elements are where `fragment_layout` expects them, or f32 without
    /// matrices.
    Fragments(Matrices),
    /// `delta_blocks_matrix` and `delta_scan_matrix`: matrices of which only the shape is known.
    Loads(DeltaShape),
}

/// The shape of the workgroups of `delta_blocks_matrix` and `delta_scan_matrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// The matrices.
    pub units: MatrixUnits,
    /// The number of value columns of a workgroup of `delta_scan_matrix`, divided by 16.
    pub together: u32,
}

impl DeltaShape {
    /// Returns the shape for heads on a device with these matrices and with `shared` bytes of shared memory. `None` if the
    /// kernels do not serve the heads there, or an invocation's sums take more than a quarter of its registers, so that
    /// drivers spill many.
    pub fn choose(heads: DeltaHeads, units: MatrixUnits, shared: u32) -> Option<DeltaShape> {
        // Subgroups of 8 or 16 are Intel's, whose invocations have 128 registers and not 255 or 256.
        let registers = if units.subgroup < 32 { 128 } else { 256 };
        let sums = units.m * BLOCK_ROWS / units.subgroup;
        let shape = DeltaShape { units, together: 1 };
        let serves = shape.serves(heads) && shape.shared_bytes(heads) <= shared && sums <= registers / 4;
        serves.then_some(shape)
    }

    /// Whether the kernels serve heads in this shape: a workgroup has at most 256 invocations, and workgroups of
    /// `delta_scan_matrix` divide the value columns evenly.
    fn serves(self, heads: DeltaHeads) -> bool {
        // In f16, with k̂ and q̂ of length 1.
        let MatrixUnits { m, n, k, .. } = self.units;
        let sides = [m, n, k].into_iter().all(|side| side == 8 || side == 16);
        heads.rule == DeltaRule::Delta
            && sides
            && self.threads() <= 256
            && delta_serves(heads)
            && heads.value_dim.is_multiple_of(16 * self.together)
    }

    /// The number of invocations of a workgroup of either kernel: a subgroup has `units.m` rows of a block.
    fn threads(self) -> u32 {
        BLOCK_ROWS / self.units.m * self.units.subgroup
    }

    /// Returns the shared memory of a workgroup in bytes: the larger one of both kernels.
    pub fn shared_bytes(self, heads: DeltaHeads) -> u32 {
        let subgroups = BLOCK_ROWS / self.units.m;
        let blocks = 16 * BLOCK_ROWS * (BLOCK_ROWS / 4 + 1) + 20 * BLOCK_ROWS;
        let columns = 16 * self.together;
        let (state, rows) = (heads.key_dim / 8 + 1, BLOCK_ROWS / 8 + 1);
        let slabs = subgroups * (self.units.m / 4 + 1);
        let scan = 16 * columns * (2 * state + 4 * rows + slabs) + 16 * subgroups;
        blocks.max(scan)
    }
}

/// The sizes in bytes of the parts of the scratch buffer of a prompt step, each a multiple of 256.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    mixed: u64,
    turned: u64,
    solved: u64,
    values: u64,
    gates: u64,
    outputs: u64,
}

impl Scratch {
    fn new(heads: DeltaHeads, rows: u32, prompts: u32, way: DeltaWay) -> Scratch {
        let row = u64::from(BLOCK_ROWS) * 4;
        let blocks = u64::from(most_blocks(rows, prompts));
        let value_blocks = blocks * u64::from(heads.value);
        // With fragments in matrices: q, k and kᵀ of each key head. Otherwise q and k of each value head, and by loads kᵀ of
        // each key head.
        let (mixed, turned) = match way {
            DeltaWay::Fragments(Matrices::Cooperative) => (3 * heads.key, 0),
            DeltaWay::Fragments(Matrices::Emulated) => (2 * heads.value, 0),
            DeltaWay::Loads(_) => (2 * heads.value, heads.key),
        };
        let key_blocks = |heads_: u32| blocks * u64::from(heads_) * u64::from(heads.key_dim) * row;
        Scratch {
            mixed: key_blocks(mixed),
            turned: key_blocks(turned),
            solved: value_blocks * u64::from(2 * BLOCK_ROWS) * row,
            values: value_blocks * u64::from(heads.value_dim) * row,
            gates: value_blocks * 4 * row,
            outputs: (u64::from(rows) * u64::from(heads.output()) * 4).next_multiple_of(256),
        }
    }

    fn sizes(self) -> [u64; 6] {
        [self.mixed, self.turned, self.solved, self.values, self.gates, self.outputs]
    }
}

/// Returns the size in bytes of the scratch buffer for steps of up to `rows` rows of up to `prompts` prompts.
pub fn scratch_bytes(heads: DeltaHeads, rows: u32, prompts: u32, way: DeltaWay) -> u64 {
    Scratch::new(heads, rows, prompts, way).sizes().iter().sum()
}

/// The operands of [`delta_prompts`].
#[derive(Clone, Copy, Debug)]
pub struct PromptOperands {
    /// The rows of the merged projection, f32.
    pub x: Range,
    /// The number of floats from a row of `x` to the next, a multiple of 4.
    pub stride: u32,
    /// The descriptor of the prompt step ([`super::embed::ChunkLayout`]).
    pub chunk: Range,
    /// The part of the descriptor about the prompts' cells.
    pub cells: Range,
    /// The convolution's weights, f32 `[channels][4]`, followed by its biases if it has any, f32 `[channels]`.
    pub conv: Range,
    /// The decay parameter, f32 `[value heads]`.
    pub a_log: Range,
    /// The time step bias, f32 `[value heads]`.
    pub dt_bias: Range,
    /// The output norm's weight, f32 `[value_dim]`; of a state space, the factors of v in the output, f32 `[value heads]`.
    pub norm: Range,
    /// The epsilon of the norm.
    pub epsilon: f32,
    /// The layer's states, of [`DeltaHeads::state_bytes`].
    pub state: Range,
    /// The layer's convolution windows, of [`DeltaHeads::window_bytes`].
    pub window: Range,
    /// The scratch buffer, of [`scratch_bytes`]; its contents serve this step only.
    pub scratch: Range,
    /// The output.
    pub y: Range,
    /// The number of floats from a row of `y` to the next, a multiple of 4; with a packed output,
    /// [`Packed::stride`](super::gemm::tiled::Packed::stride).
    pub y_stride: u32,
}

/// What the rows of slots that decode in a prompt step take beside [`PromptOperands`].
#[derive(Clone, Copy, Debug)]
pub struct DecodingRows {
    /// The maximum number of slots.
    pub most: u32,
    /// The row table of the step.
    pub rows: Range,
    /// The slots, which say how many tokens each cell includes.
    pub slots: Range,
    /// The pending tokens of the slots' cells, `entries` each, of [`DeltaHeads::pending_bytes`].
    pub pending: Range,
    /// The number of pending tokens of a cell.
    pub entries: u32,
}

/// Returns the calls that process the rows of up to `prompts` prompts, `rows` in total: three calls, each of which
/// depends on the previous one; and with `decoding` one beside them, for slots that decode in the step. With `packed`, the output is packed for the next product in this order, and rows beyond
/// the last are zero up to a multiple of 64.
///
/// # Panics
/// If [`delta_serves`] or the way rejects the heads, or strides do not fit them.
pub fn delta_prompts(
    label: &str,
    heads: DeltaHeads,
    (rows, prompts): (u32, u32),
    packed: Option<PackedOrder>,
    way: DeltaWay,
    operands: PromptOperands,
    decoding: Option<DecodingRows>,
) -> Vec<Call> {
    let o = operands;
    check(heads, packed, o.stride, o.y_stride);
    let mut offset = 0;
    let [mixed, turned, solved, values, gates, outputs] =
        Scratch::new(heads, rows, prompts, way).sizes().map(|bytes| {
            let part = o.scratch.part(offset, bytes);
            offset += bytes;
            part
        });
    let DeltaHeads { key, value, key_dim, value_dim, tiled, rule } = heads;
    let tiled = u32::from(tiled);
    let (plain, conv_bias) = rule.constants();
    let of_blocks = DeltaBlocksArgs {
        x: o.x,
        chunk: o.chunk,
        cells: o.cells,
        conv: o.conv,
        a_log: o.a_log,
        dt_bias: o.dt_bias,
        window: o.window,
        mixed,
        solved,
        values,
        gates,
        stride: o.stride,
        skip: o.norm,
    };
    let of_scan = DeltaScanArgs {
        x: o.x,
        chunk: o.chunk,
        cells: o.cells,
        mixed,
        solved,
        values,
        gates,
        state: o.state,
        window: o.window,
        o: outputs,
        stride: o.stride,
    };
    let (threads, together) = scan_shape(heads, way);
    let block_constants =
        DeltaBlocksConstants { key_heads: key, value_heads: value, key_dim, value_dim, tiled, plain, conv_bias };
    let scan_constants =
        DeltaScanConstants { threads, key_heads: key, value_heads: value, key_dim, value_dim, together, tiled };
    let [blocks, scan] = match way {
        DeltaWay::Fragments(matrices) => {
            let names = match matrices {
                Matrices::Emulated => ["delta_blocks.plain", "delta_scan.plain"],
                Matrices::Cooperative => ["delta_blocks", "delta_scan"],
            };
            let constants = [block_constants.into_values(), scan_constants.into_values()];
            let args = [of_blocks.into_args(), of_scan.into_args()];
            [0, 1].map(|part| (names[part], constants[part].clone(), args[part].clone()))
        }
        DeltaWay::Loads(shape) => {
            assert!(shape.serves(heads), "{shape:?} does not serve {heads:?}");
            [
                (
                    "delta_blocks_matrix",
                    blocks_by_loads(shape, block_constants).into_values(),
                    blocks_with_turned(of_blocks, turned).into_args(),
                ),
                (
                    "delta_scan_matrix",
                    scan_by_loads(shape, scan_constants).into_values(),
                    scan_with_turned(of_scan, turned).into_args(),
                ),
            ]
        }
    };
    let call = |part: &str, (kernel, constants, args), groups| Call {
        kernel,
        label: format!("{label}.{part}"),
        constants,
        args,
        groups,
    };
    let blocks = call("blocks", blocks, [value, most_blocks(rows, prompts), 1]);
    let scan = call("scan", scan, [value * value_dim / (16 * together), prompts.min(rows), 1]);
    let together = (256 / (value_dim / 4)).min(value);
    let gate = Call {
        kernel: "delta_gate",
        label: format!("{label}.gate"),
        constants: DeltaGateConstants {
            threads: together * value_dim / 4,
            value_heads: value,
            value_dim,
            together,
            z: heads.channels(),
            packed: PackedOrder::word(packed),
            plain,
        }
        .into_values(),
        args: DeltaGateArgs {
            o: outputs,
            x: o.x,
            norm: o.norm,
            count: o.chunk,
            y: o.y,
            stride: o.stride,
            y_stride: o.y_stride,
            epsilon: o.epsilon,
        }
        .into_args(),
        groups: [value.div_ceil(together), rows.next_multiple_of(TILE_TOKENS) / 2, 1],
    };
    // The scan waits for the blocks, and the gate, which reads all rows, for the scan.
    let rows = decoding.map(|of| decoding_rows(label, heads, of, &o, outputs));
    [blocks].into_iter().chain(rows).chain([scan, gate]).collect()
}

/// Returns the number of invocations of a workgroup of `delta_scan`, and its number of columns divided by 16.
fn scan_shape(heads: DeltaHeads, way: DeltaWay) -> (u32, u32) {
    match way {
        DeltaWay::Fragments(Matrices::Emulated) => (64, 1),
        DeltaWay::Fragments(Matrices::Cooperative) => {
            let together = if heads.value_dim.is_multiple_of(32) { 2 } else { 1 };
            (128 * together, together)
        }
        DeltaWay::Loads(shape) => (shape.threads(), shape.together),
    }
}

/// The constants of `delta_blocks_matrix`, of which the first five are those of `delta_blocks`.
fn blocks_by_loads(shape: DeltaShape, of: DeltaBlocksConstants) -> DeltaBlocksMatrixConstants {
    let DeltaBlocksConstants { key_heads, value_heads, key_dim, value_dim, tiled, .. } = of;
    let MatrixUnits { m: matrix_m, n: matrix_n, k: matrix_k, subgroup } = shape.units;
    let threads = shape.threads();
    DeltaBlocksMatrixConstants {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        tiled,
        threads,
        matrix_m,
        matrix_n,
        matrix_k,
        subgroup,
    }
}

/// The constants of `delta_scan_matrix`, of which the first are those of `delta_scan`.
fn scan_by_loads(shape: DeltaShape, of: DeltaScanConstants) -> DeltaScanMatrixConstants {
    let DeltaScanConstants { threads, key_heads, value_heads, key_dim, value_dim, together, tiled } = of;
    let MatrixUnits { m: matrix_m, n: matrix_n, k: matrix_k, subgroup } = shape.units;
    DeltaScanMatrixConstants {
        threads,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        together,
        tiled,
        matrix_m,
        matrix_n,
        matrix_k,
        subgroup,
    }
}

/// The arguments of `delta_blocks_matrix`, of which the first are those of `delta_blocks`.
fn blocks_with_turned(of: DeltaBlocksArgs, turned: Range) -> DeltaBlocksMatrixArgs {
    let DeltaBlocksArgs { x, chunk, cells, conv, a_log, dt_bias, window, mixed, solved, values, gates, stride, .. } =
        of;
    DeltaBlocksMatrixArgs {
        x,
        chunk,
        cells,
        conv,
        a_log,
        dt_bias,
        window,
        mixed,
        solved,
        values,
        gates,
        stride,
        turned,
    }
}

/// The constants of `delta_blocks` that a call of any variant stands for.
fn block_constants(call: &Call) -> DeltaBlocksConstants {
    if call.kernel != "delta_blocks_matrix" {
        return DeltaBlocksConstants::from_values(&call.constants);
    }
    let of = DeltaBlocksMatrixConstants::from_values(&call.constants);
    let DeltaBlocksMatrixConstants { key_heads, value_heads, key_dim, value_dim, tiled, .. } = of;
    DeltaBlocksConstants { key_heads, value_heads, key_dim, value_dim, tiled, plain: 0, conv_bias: 0 }
}

/// The arguments of `delta_scan_matrix`, of which the first are those of `delta_scan`.
fn scan_with_turned(of: DeltaScanArgs, turned: Range) -> DeltaScanMatrixArgs {
    let DeltaScanArgs { x, chunk, cells, mixed, solved, values, gates, state, window, o, stride } = of;
    DeltaScanMatrixArgs { x, chunk, cells, mixed, solved, values, gates, state, window, o, stride, turned }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Returns ln(1 + e^(a + `dt_bias`)), the time step of a token.
fn time_step(a: f32, dt_bias: f32) -> f64 {
    let x = f64::from(a) + f64::from(dt_bias);
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Returns ln α of a token.
fn log_decay(a: f32, a_log: f32, dt_bias: f32) -> f64 {
    -f64::from(a_log).exp() * time_step(a, dt_bias)
}

/// Returns β of a token, whose row of the merged projection begins at float `row` of `x`, and a head.
fn beta_of(memory: &HostMemory, heads: DeltaHeads, (x, row): (Range, u32), h: u32, dt_bias: Range) -> f64 {
    match heads.rule {
        DeltaRule::Delta => sigmoid(memory.f32(x, row + heads.channels() + heads.output() + h)),
        DeltaRule::StateSpace { .. } => time_step(memory.f32(x, row + heads.decays() + h), memory.f32(dt_bias, h)),
    }
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

/// Returns x scaled to length 1.
fn unit(x: &[f64]) -> Vec<f64> {
    let scale = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() + L2_EPSILON).sqrt();
    x.iter().map(|v| v * scale).collect()
}

/// Returns a channel after convolution and silu, from its last four inputs.
fn mix(memory: &HostMemory, heads: DeltaHeads, conv: Range, channel: u32, taps: [f64; 4]) -> f64 {
    let weight = |j: u32| f64::from(memory.f32(conv, channel * 4 + j));
    let bias = match heads.rule {
        DeltaRule::StateSpace { conv_bias: true } => f64::from(memory.f32(conv, heads.channels() * 4 + channel)),
        _ => 0.0,
    };
    silu(bias + (0..).zip(taps).map(|(j, u)| weight(j) * u).sum::<f64>())
}

/// Returns a value head's q, k and v after the convolution, with q and k normalized for the delta rule. `u` returns a channel's last four
/// inputs.
fn head_rows(
    memory: &HostMemory,
    heads: DeltaHeads,
    conv: Range,
    h: u32,
    u: &dyn Fn(u32) -> [f64; 4],
) -> [Vec<f64>; 3] {
    let DeltaHeads { key, key_dim, value_dim, .. } = heads;
    let kh = heads.key_of(h);
    let run = |first: u32, count: u32| -> Vec<f64> {
        (first..first + count).map(|channel| mix(memory, heads, conv, channel, u(channel))).collect()
    };
    let (q, k) = (run(kh * key_dim, key_dim), run((key + kh) * key_dim, key_dim));
    let (q, k) = match heads.rule {
        DeltaRule::Delta => (unit(&q).iter().map(|v| v / f64::from(key_dim).sqrt()).collect(), unit(&k)),
        DeltaRule::StateSpace { .. } => (q, k),
    };
    [q, k, run(2 * key * key_dim + h * value_dim, value_dim)]
}

/// Returns a head's output after its norm, for the delta rule, and gate.
fn gated(
    memory: &HostMemory,
    rule: DeltaRule,
    o: &[f64],
    (norm, epsilon): (Range, f32),
    z: &dyn Fn(u32) -> f32,
) -> Vec<f32> {
    if rule != DeltaRule::Delta {
        return (0..).zip(o).map(|(i, v)| (v * silu(f64::from(z(i)))) as f32).collect();
    }
    let mean = o.iter().map(|v| v * v).sum::<f64>() / o.len() as f64;
    let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
    (0..).zip(o).map(|(i, v)| (v * scale * f64::from(memory.f32(norm, i)) * silu(f64::from(z(i)))) as f32).collect()
}

fn put(memory: &mut HostMemory, y: Range, packed: u32, (row, column, y_stride): (u32, u32, u32), value: f32) {
    match PackedOrder::of_word(packed) {
        None => memory.set_f32(y, row * y_stride + column, value),
        Some(order) => memory.set_number(Format::Bf16, y, order.index(row, column, y_stride) as u32, value),
    }
}

/// Computes in f64 and rounds only what is stored, which includes k̂, δ and α of a pending token.
pub(super) fn reference_delta_step(call: &Call, memory: &mut HostMemory) {
    let a = DeltaStepArgs::from_args(&call.args);
    let c = DeltaStepConstants::from_values(&call.constants);
    let rule = DeltaRule::of(c.plain, c.conv_bias);
    let heads = DeltaHeads::of([c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.tiled], rule);
    let DeltaHeads { value, key_dim, value_dim, .. } = heads;
    let channels = heads.channels();
    let beside = c.beside_prompts == 1;
    let rows = match beside {
        true => {
            let [rows, decoding] = [2, 3].map(|word| memory.u32(a.chunk, word));
            rows - decoding..rows
        }
        false => 0..call.groups[1] * c.tokens,
    };
    for first_row in rows.step_by(c.tokens as usize) {
        let info = |memory: &HostMemory, row: u32| std::array::from_fn(|i| memory.u32(a.rows, row * 4 + i as u32));
        let [_, start, cell, _] = info(memory, first_row);
        let rows = first_row..first_row + c.tokens;
        let valid = rows.clone().take_while(|row| info(memory, *row)[3] != 0).count() as u32;
        for row in rows.start + valid..rows.end {
            for column in 0..if c.tagged == 0 { 0 } else { heads.output() } {
                match c.tagged {
                    3 => memory.set_u32(a.y, row * a.y_stride + column, tagged(0.0, a.y_tag)),
                    _ => put(memory, a.y, c.packed, (row, column, a.y_stride), 0.0),
                }
            }
        }
        if valid == 0 {
            continue;
        }
        let ring = |position: u32, channel: u32| (cell * RING + position % RING) * channels + channel;
        for (row, channel) in (0..valid).flat_map(|n| (0..channels).map(move |channel| (n, channel))) {
            let u = memory.u32(a.x, (first_row + row) * a.stride + channel);
            memory.set_u32(a.window, ring(start + row, channel), u);
        }
        let lag = match start > 0 {
            true => start.wrapping_sub(memory.u32(a.slots, cell * SLOT_WORDS + SLOT_SETTLED)).min(c.pending),
            false => 0,
        };
        for h in 0..value {
            let at = |d: usize, column: usize| ((cell * value + h) * key_dim + d as u32) * value_dim + column as u32;
            let pending_at = |token: u32| ((cell * value + h) * c.pending + token) * heads.pending_floats();
            // The step has added them before and is being run again.
            let added = lag > 0 && memory.f32(a.pending, pending_at(0) + key_dim + value_dim + 1) == start as f32;
            let pending = if added { 0 } else { lag };
            // [key dim][column]
            let mut s: Vec<Vec<f64>> = (0..key_dim as usize)
                .map(|d| {
                    let load = |column| f64::from(memory.f32(a.state, at(d, column)));
                    (0..value_dim as usize).map(|column| if start == 0 { 0.0 } else { load(column) }).collect()
                })
                .collect();
            let advance = |s: &mut [Vec<f64>], k: &[f64], delta: &[f64], alpha: f64| {
                for (row, k) in s.iter_mut().zip(k) {
                    row.iter_mut().zip(delta).for_each(|(s, delta)| *s = alpha * *s + k * delta);
                }
            };
            for token in 0..pending {
                let all: Vec<f64> = (0..heads.pending_floats())
                    .map(|i| f64::from(memory.f32(a.pending, pending_at(token) + i)))
                    .collect();
                let (k, rest) = all.split_at(key_dim as usize);
                advance(&mut s, k, &rest[..value_dim as usize], rest[value_dim as usize]);
            }
            let store = |memory: &mut HostMemory, s: &[Vec<f64>]| {
                for (d, row) in s.iter().enumerate() {
                    row.iter().enumerate().for_each(|(column, s)| memory.set_f32(a.state, at(d, column), *s as f32));
                }
            };
            if pending > 0 || start == 0 {
                store(memory, &s);
            }
            for token in 0..valid {
                let (row, position) = (first_row + token, start + token);
                let beta = beta_of(memory, heads, (a.x, row * a.stride), h, a.dt_bias);
                let decay = memory.f32(a.x, row * a.stride + heads.decays() + h);
                let alpha = log_decay(decay, memory.f32(a.a_log, h), memory.f32(a.dt_bias, h)).exp();
                let [q, k, v] = head_rows(memory, heads, a.conv, h, &|channel| {
                    std::array::from_fn(|j| match (position + j as u32).checked_sub(3) {
                        Some(past) => f64::from(memory.f32(a.window, ring(past, channel))),
                        None => 0.0,
                    })
                });
                let dots = |s: &[Vec<f64>], x: &[f64], column: usize| -> f64 {
                    s.iter().zip(x).map(|(row, x)| row[column] * x).sum()
                };
                let (skip, correction) = match rule {
                    DeltaRule::Delta => (0.0, alpha),
                    DeltaRule::StateSpace { .. } => (f64::from(memory.f32(a.norm, h)), 0.0),
                };
                let delta: Vec<f64> =
                    v.iter().enumerate().map(|(column, v)| beta * (v - correction * dots(&s, &k, column))).collect();
                advance(&mut s, &k, &delta, alpha);
                let o: Vec<f64> = (0..).zip(&v).map(|(column, v)| dots(&s, &q, column) + skip * v).collect();
                if beside {
                    store(memory, &s);
                    (0..).zip(o).for_each(|(i, o)| memory.set_f32(a.y, row * a.y_stride + h * value_dim + i, o as f32));
                    continue;
                }
                let rest = [alpha, f64::from(start), 0.0, 0.0];
                for (i, value) in (0..).zip(k.iter().chain(&delta).chain(&rest)) {
                    memory.set_f32(a.pending, pending_at(token) + i, *value as f32);
                }
                let z = |i: u32| memory.f32(a.x, row * a.stride + channels + h * value_dim + i);
                for (i, value) in (0..).zip(gated(memory, rule, &o, (a.norm, a.epsilon), &z)) {
                    let column = h * value_dim + i;
                    match c.tagged {
                        3 => memory.set_u32(a.y, row * a.y_stride + column, tagged(value, a.y_tag)),
                        _ => put(memory, a.y, c.packed, (row, column, a.y_stride), value),
                    }
                }
            }
        }
    }
}

/// A prompt of a step, from the step's descriptor; none of those that are slots that decode.
struct Prompt {
    slot: u32,
    start: u32,
    first_row: u32,
    rows: u32,
    from: Option<u32>,
    keeps: [(u32, u32); 2],
    first_block: u32,
}

fn prompts_of(memory: &HostMemory, chunk: Range, cells: Range) -> Vec<Prompt> {
    let [prompts, _, in_use, decoding] = std::array::from_fn(|i| memory.u32(chunk, i as u32));
    (0..prompts - decoding)
        .map(|index| {
            let [slot, start, first_row, _] = std::array::from_fn(|i| memory.u32(chunk, 4 + 4 * index + i as u32));
            let end = if index + 1 < prompts { memory.u32(chunk, 4 + 4 * (index + 1) + 2) } else { in_use };
            let [from, at0, keep0, at1, keep1, first_block, ..] =
                std::array::from_fn::<u32, 8, _>(|i| memory.u32(cells, CELL_WORDS * index + i as u32));
            Prompt {
                slot,
                start,
                first_row,
                rows: end - first_row,
                from: (from != NO_CELL).then_some(from),
                keeps: [(at0, keep0), (at1, keep1)],
                first_block,
            }
        })
        .collect()
}

/// Returns the place of a block's q and k of value head `h` in `mixed`, in pairs of both: of each value head, or of each key head
/// in calls on fragments in matrices.
fn mixed_at(call: &Call, heads: DeltaHeads, block: u32, h: u32) -> u32 {
    match call.kernel {
        "delta_blocks" | "delta_scan" => block * heads.key + heads.key_of(h),
        _ => block * heads.value + h,
    }
}

/// Writes what the variant without cooperative matrices writes, but for [`mixed_at`]; computed in f64. The first arguments of
/// all variants are the same; `skip`, behind them, is read of state spaces only.
pub(super) fn reference_delta_blocks(call: &Call, memory: &mut HostMemory) {
    let (a, c) = (DeltaBlocksArgs::from_args(&call.args), block_constants(call));
    let rule = DeltaRule::of(c.plain, c.conv_bias);
    let heads = DeltaHeads::of([c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.tiled], rule);
    let channels = heads.channels();
    let n = BLOCK_ROWS as usize;
    for prompt in prompts_of(memory, a.chunk, a.cells) {
        let u = |memory: &HostMemory, index: i64, channel: u32| {
            let position = i64::from(prompt.start) + index;
            match (u32::try_from(index), u32::try_from(position), prompt.from) {
                (Ok(index), ..) => f64::from(memory.f32(a.x, (prompt.first_row + index) * a.stride + channel)),
                (Err(_), Ok(p), Some(cell)) => {
                    f64::from(memory.f32(a.window, (cell * RING + p % RING) * channels + channel))
                }
                _ => 0.0,
            }
        };
        for (block, h) in (0..prompt.rows.div_ceil(BLOCK_ROWS)).flat_map(|b| (0..heads.value).map(move |h| (b, h))) {
            let own = (prompt.first_block + block) * heads.value + h;
            let mut sums = vec![0.0; n];
            let mut betas = vec![0.0; n];
            let [mut q, mut k, mut v] =
                [heads.key_dim, heads.key_dim, heads.value_dim].map(|dim| vec![vec![0.0; dim as usize]; n]);
            let mut sum = 0.0;
            for i in 0..n {
                let index = block * BLOCK_ROWS + i as u32;
                if index < prompt.rows {
                    let row = (prompt.first_row + index) * a.stride;
                    betas[i] = beta_of(memory, heads, (a.x, row), h, a.dt_bias);
                    let decay = memory.f32(a.x, row + heads.decays() + h);
                    sum += log_decay(decay, memory.f32(a.a_log, h), memory.f32(a.dt_bias, h));
                    [q[i], k[i], v[i]] = head_rows(memory, heads, a.conv, h, &|channel| {
                        std::array::from_fn(|j| u(memory, i64::from(index) + j as i64 - 3, channel))
                    });
                }
                sums[i] = sum;
            }
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let plain = rule != DeltaRule::Delta;
            let mut t = vec![vec![0.0; n]; n];
            for i in 0..n {
                t[i][i] = if plain { betas[i] } else { 1.0 };
                for j in 0..if plain { 0 } else { i } {
                    let factor = betas[i] * dot(&k[i], &k[j]) * (sums[i] - sums[j]).exp();
                    let (before, rest) = t.split_at_mut(i);
                    rest[0].iter_mut().zip(&before[j]).for_each(|(t, above)| *t -= factor * above);
                }
            }
            let mut e = vec![vec![0.0; n]; n];
            for i in 0..n {
                for j in 0..=i {
                    let factor = dot(&q[i], &k[j]) * (sums[i] - sums[j]).exp();
                    e[i].iter_mut().zip(&t[j]).for_each(|(e, t)| *e += factor * t);
                }
            }
            if plain {
                let skip = f64::from(memory.f32(a.skip, h));
                e.iter_mut().enumerate().for_each(|(i, row)| row[i] += skip);
                betas.fill(0.0);
            } else {
                v.iter_mut().zip(&betas).for_each(|(row, beta)| row.iter_mut().for_each(|v| *v *= beta));
            }
            let grown: Vec<f64> = sums.iter().map(|g| g.exp()).collect();
            let gates = [
                grown.clone(),
                grown.iter().zip(&betas).map(|(g, beta)| g * beta).collect(),
                sums.iter().map(|g| (sum - g).exp()).collect(),
            ];
            let mut store = |to: Range, first: u32, values: &mut dyn Iterator<Item = &f64>| {
                (first..).zip(values).for_each(|(at, value)| memory.set_f32(to, at, *value as f32));
            };
            let mixed = mixed_at(call, heads, prompt.first_block + block, h);
            store(a.mixed, mixed * 2 * BLOCK_ROWS * heads.key_dim, &mut q.iter().chain(&k).flatten());
            store(a.solved, own * 2 * BLOCK_ROWS * BLOCK_ROWS, &mut t.iter().chain(&e).flatten());
            store(a.values, own * BLOCK_ROWS * heads.value_dim, &mut v.iter().flatten());
            store(a.gates, own * 4 * BLOCK_ROWS, &mut gates.iter().flatten());
        }
    }
}

/// Continues from the output of [`reference_delta_blocks`]; the state stays in f64 until it is stored.
pub(super) fn reference_delta_scan(call: &Call, memory: &mut HostMemory) {
    let a = DeltaScanArgs::from_args(&call.args);
    let c = DeltaScanConstants::from_values(&call.constants);
    // The scan is the same for both rules.
    let heads = DeltaHeads::of([c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.tiled], DeltaRule::Delta);
    let DeltaHeads { value, key_dim, value_dim, .. } = heads;
    let (n, cell_floats) = (BLOCK_ROWS, value * key_dim * value_dim);
    for prompt in prompts_of(memory, a.chunk, a.cells) {
        let ends = [(prompt.rows, prompt.slot)].into_iter().chain(prompt.keeps).filter(|(end, _)| *end > 0);
        for h in 0..value {
            let at = |cell: u32, d: u32, column: u32| cell * cell_floats + (h * key_dim + d) * value_dim + column;
            // [key dim][column]
            let mut s: Vec<f64> = match prompt.from {
                Some(cell) if prompt.start > 0 => {
                    (0..key_dim * value_dim).map(|i| f64::from(memory.f32(a.state, at(cell, 0, i)))).collect()
                }
                _ => vec![0.0; (key_dim * value_dim) as usize],
            };
            for block in 0..prompt.rows.div_ceil(n) {
                let own = (prompt.first_block + block) * value + h;
                let load_at = |own: u32, range: Range, count: u32| -> Vec<f64> {
                    (own * count..(own + 1) * count).map(|i| f64::from(memory.f32(range, i))).collect()
                };
                let load = |range: Range, count: u32| load_at(own, range, count);
                let of_mixed = mixed_at(call, heads, prompt.first_block + block, h);
                let (mixed, solved) = (load_at(of_mixed, a.mixed, 2 * n * key_dim), load(a.solved, 2 * n * n));
                let (q, k) = mixed.split_at((n * key_dim) as usize);
                let (t, e) = solved.split_at((n * n) as usize);
                let (v, gates) = (load(a.values, n * value_dim), load(a.gates, 4 * n));
                // left [rows][inner] times right [inner][value_dim]
                let times = |left: &[f64], inner: u32, right: &[f64]| -> Vec<f64> {
                    let mut out = Vec::with_capacity((n * value_dim) as usize);
                    for row in left.chunks_exact(inner as usize) {
                        let mut sums = vec![0.0; value_dim as usize];
                        for (factor, other) in row.iter().zip(right.chunks_exact(value_dim as usize)) {
                            sums.iter_mut().zip(other).for_each(|(sum, x)| *sum += factor * x);
                        }
                        out.extend(sums);
                    }
                    out
                };
                let (from_key, from_query) = (times(k, key_dim, &s), times(q, key_dim, &s));
                let gate = |which: u32, i: usize| gates[which as usize * n as usize + i / value_dim as usize];
                let r: Vec<f64> = v.iter().zip(from_key).enumerate().map(|(i, (v, x))| v - gate(1, i) * x).collect();
                let (made, seen) = (times(t, n, &r), times(e, n, &r));
                for i in 0..(prompt.rows - block * n).min(n) * value_dim {
                    let row = prompt.first_row + block * n + i / value_dim;
                    let o = gate(0, i as usize) * from_query[i as usize] + seen[i as usize];
                    memory.set_f32(a.o, (row * value + h) * value_dim + i % value_dim, o as f32);
                }
                let decay = gates[n as usize - 1];
                s.iter_mut().for_each(|s| *s *= decay);
                for (i, made) in made.into_iter().enumerate() {
                    let (token, column) = (i / value_dim as usize, i % value_dim as usize);
                    for d in 0..key_dim as usize {
                        s[d * value_dim as usize + column] += k[token * key_dim as usize + d] * gate(2, i) * made;
                    }
                }
                let end = ((block + 1) * n).min(prompt.rows);
                for (_, cell) in ends.clone().filter(|(at, _)| *at == end) {
                    (0..).zip(&s).for_each(|(i, s)| memory.set_f32(a.state, at(cell, 0, i), *s as f32));
                }
            }
        }
        for ((end, cell), past) in ends.flat_map(|end| (1..=3).map(move |past| (end, past))) {
            let index = i64::from(end) - past;
            let Ok(position) = u32::try_from(i64::from(prompt.start) + index) else { continue };
            let place = |cell: u32| (cell * RING + position % RING) * heads.channels();
            for channel in 0..heads.channels() {
                let word = match (u32::try_from(index), prompt.from) {
                    (Ok(index), _) => memory.u32(a.x, (prompt.first_row + index) * a.stride + channel),
                    (Err(_), Some(from)) if from != cell => memory.u32(a.window, place(from) + channel),
                    _ => continue,
                };
                memory.set_u32(a.window, place(cell) + channel, word);
            }
        }
    }
}

pub(super) fn reference_delta_gate(call: &Call, memory: &mut HostMemory) {
    let a = DeltaGateArgs::from_args(&call.args);
    let c = DeltaGateConstants::from_values(&call.constants);
    let used = memory.u32(a.count, 2);
    let width = c.value_heads * c.value_dim;
    for (row, h) in (0..used).flat_map(|row| (0..c.value_heads).map(move |h| (row, h))) {
        let first = h * c.value_dim;
        let o: Vec<f64> = (0..c.value_dim).map(|i| f64::from(memory.f32(a.o, row * width + first + i))).collect();
        let z = |i: u32| memory.f32(a.x, row * a.stride + c.z + first + i);
        let rule = DeltaRule::of(c.plain, 0);
        for (i, value) in (0..).zip(gated(memory, rule, &o, (a.norm, a.epsilon), &z)) {
            put(memory, a.y, c.packed, (row, first + i, a.y_stride), value);
        }
    }
    if c.packed > 0 {
        for row in used..used.next_multiple_of(TILE_TOKENS) {
            (0..width).for_each(|column| put(memory, a.y, c.packed, (row, column, a.y_stride), 0.0));
        }
    }
}

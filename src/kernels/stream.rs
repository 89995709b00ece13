//! Stages between products, for models that need them: `add_branch`, which adds a changed output of a mixer or an MLP to
//! the residual stream; `norm_heads` and `norm_groups`, the norms of parts of rows; `gate_rows`, a gated linear unit of two
//! buffers; `bound_logits`, which scales and bounds logits. Also the end of a step whose prompts are embedded: `row_scales`
//! and `pool_rows`, the sums of normed rows. Not here: norms before a product, which are a part of it (`gemm`), and norms of
//! queries and keys in attention (`attention`).

use super::gemm::{Activations, Glu, glu};
use super::host_memory::HostMemory;
use super::recording::{Call, Range};
use super::shaders::{
    AddBranchArgs, AddBranchConstants, BoundLogitsArgs, BoundLogitsConstants, GateRowsArgs, GateRowsConstants,
    NormGroupsArgs, NormGroupsConstants, NormHeadsArgs, NormHeadsConstants, PoolRowsArgs, PoolRowsConstants,
    RowScalesArgs, RowScalesConstants,
};
use super::tags::{Flow, tagged};

/// The number of invocations of a workgroup.
const THREADS: u32 = 128;
/// The maximum number of invocations of a workgroup of `add_branch`.
const MOST_BRANCH_THREADS: u32 = 256;

/// The output of a mixer or an MLP, and how it is changed before it is added to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct Branch {
    /// The output.
    pub x: Activations,
    /// The weights of its norm, if it has one.
    pub norm: Option<Range>,
    /// A second branch, whose output is added to the first one's.
    pub beside: Option<Beside>,
    /// The epsilon of the norms.
    pub epsilon: f32,
    /// The factor behind the norms.
    pub scale: f32,
}

/// A branch beside another one; both have norms.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// The output, with the stride of the other branch.
    pub x: Activations,
    /// The weights of its norm.
    pub norm: Range,
    /// The weights of the norm of the sum of both branches.
    pub sum_norm: Range,
}

/// The tags of the operands of [`add_branch`].
#[derive(Clone, Copy, Debug)]
pub struct BranchFlow {
    /// Those of the branch and of the stream.
    pub flow: Flow,
    /// Those of the second branch, which is tagged if and only if the first one is.
    pub beside: Flow,
}

impl BranchFlow {
    /// No operand is tagged.
    pub const NONE: BranchFlow = BranchFlow { flow: Flow::NONE, beside: Flow::NONE };
}

/// Returns the call that adds `rows` rows of a branch to `columns` floats of each row of the residual stream `y`, and
/// multiplies the sum by `factor[0]` if there is one.
///
/// # Panics
/// If a second branch has another stride, or the first one has no norm then.
pub fn add_branch(
    label: String,
    (rows, columns): (u32, u32),
    branch: Branch,
    (y, factor): (Activations, Option<Range>),
    tags: BranchFlow,
    fault: Range,
) -> Call {
    let Branch { x, norm, beside, epsilon, scale } = branch;
    let BranchFlow { flow, beside: beside_flow } = tags;
    assert!(beside.is_none_or(|beside| beside.x.stride == x.stride && norm.is_some()), "\"{label}\": {beside:?}");
    let none = x.range.none();
    let args = AddBranchArgs {
        x: x.range,
        beside: beside.map_or(none, |beside| beside.x.range),
        norm: norm.unwrap_or(none),
        beside_norm: beside.map_or(none, |beside| beside.norm),
        sum_norm: beside.map_or(none, |beside| beside.sum_norm),
        y: y.range,
        factor: factor.unwrap_or(none),
        // An empty range, so that no barrier is derived: calls may set and read the fault word in any order.
        fault: fault.none(),
        columns,
        x_stride: x.stride,
        y_stride: y.stride,
        epsilon,
        scale,
        x_tag: flow.input,
        beside_tag: beside_flow.input,
        old_tag: flow.old,
        y_tag: flow.output.unwrap_or(0),
    };
    let quads = columns.div_ceil(4);
    let threads = quads.div_ceil(4).next_power_of_two().clamp(32, MOST_BRANCH_THREADS);
    let constants = AddBranchConstants {
        threads,
        norm: u32::from(norm.is_some()),
        beside: u32::from(beside.is_some()),
        factor: u32::from(factor.is_some()),
        quads: quads.div_ceil(threads),
        tagged: flow.code(),
        devices: 0,
    };
    let call = Call {
        kernel: "add_branch",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [rows, 1, 1],
    };
    let call = flow.mark(call, x.range, y.range);
    match beside {
        Some(beside) if beside_flow.input_carried => call.carry(beside.x.range),
        _ => call,
    }
}

/// Returns the call that norms `parts` adjacent parts of `width` floats, from float `first` on, of each of `rows` rows of
/// x in place. `norm` has the weights, if there are any, and epsilon.
pub fn norm_heads(
    label: String,
    rows: u32,
    x: Activations,
    parts: (u32, u32, u32),
    norm: (Option<Range>, f32),
) -> Call {
    norm_parts(label, rows, x, (parts, (0, 0)), norm, None)
}

/// Like [`norm_heads`] of a single part, float `first` and `width`, by the mean of it and of `further` floats of the same row
/// (first and number), which stay as they are.
pub fn norm_with(
    label: String,
    rows: u32,
    x: Activations,
    (first, width): (u32, u32),
    further: (u32, u32),
    norm: (Option<Range>, f32),
) -> Call {
    norm_parts(label, rows, x, ((first, 1, width), further), norm, None)
}

/// Like [`norm_heads`], and then adds a factor times the same floats of another buffer, and divides the sums by √2.
pub fn norm_and_add(
    label: String,
    rows: u32,
    x: Activations,
    parts: (u32, u32, u32),
    norm: (Option<Range>, f32),
    added: (Activations, f32),
) -> Call {
    norm_parts(label, rows, x, (parts, (0, 0)), norm, Some(added))
}

fn norm_parts(
    label: String,
    rows: u32,
    x: Activations,
    ((first, parts, width), (further_first, further_width)): ((u32, u32, u32), (u32, u32)),
    (norm, epsilon): (Option<Range>, f32),
    added: Option<(Activations, f32)>,
) -> Call {
    let (y, scale) = added.unwrap_or((Activations { range: x.range.none(), stride: 0 }, 0.0));
    let args = NormHeadsArgs {
        x: x.range,
        norm: norm.unwrap_or(x.range.none()),
        y: y.range,
        first,
        width,
        stride: x.stride,
        y_stride: y.stride,
        further_first,
        further_width,
        epsilon,
        scale,
    };
    let constants =
        NormHeadsConstants { threads: THREADS, norm: u32::from(norm.is_some()), add: u32::from(added.is_some()) };
    Call {
        kernel: "norm_heads",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [parts, rows, 1],
    }
}

/// Returns the call that norms each of `groups` groups of `width` adjacent columns of `rows` rows of x, and writes them to y.
/// `norm` has the weights of all groups, and epsilon.
///
/// # Panics
/// If the width is not a multiple of 4.
pub fn norm_groups(
    label: String,
    rows: u32,
    (groups, width): (u32, u32),
    (x, y): (Activations, Activations),
    (norm, epsilon): (Range, f32),
    (flow, fault): (Flow, Range),
) -> Call {
    assert!(width.is_multiple_of(4), "\"{label}\": groups of {width} columns");
    let quads = width / 4;
    let threads = quads.next_power_of_two().clamp(32, 256);
    let args = NormGroupsArgs {
        x: x.range,
        norm,
        y: y.range,
        // An empty range, so that no barrier is derived: calls may set and read the fault word in any order.
        fault: fault.none(),
        width,
        x_stride: x.stride,
        y_stride: y.stride,
        epsilon,
        x_tag: flow.input,
        y_tag: flow.output.unwrap_or(0),
    };
    let constants = NormGroupsConstants { threads, quads: quads.div_ceil(threads), tagged: flow.code(), devices: 0 };
    let call = Call {
        kernel: "norm_groups",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [groups, rows, 1],
    };
    flow.mark(call, x.range, y.range)
}

/// Returns the call that replaces `columns` floats x of each of `rows` rows by `glu(x, y)`, where y begins at float
/// `first` of the row of another buffer.
pub fn gate_rows(
    label: String,
    (rows, columns): (u32, u32),
    x: Activations,
    (y, first): (Activations, u32),
    unit: Glu,
) -> Call {
    let args = GateRowsArgs { x: x.range, y: y.range, columns, first, stride: x.stride, y_stride: y.stride };
    Call {
        kernel: "gate_rows",
        label,
        constants: GateRowsConstants { threads: THREADS, glu: unit.code() }.into_values(),
        args: args.into_args(),
        groups: [columns.div_ceil(THREADS), rows, 1],
    }
}

/// Returns the call that scales `columns` logits of each of `rows` rows in place, and bounds them with `cap`.
pub fn bound_logits(
    label: String,
    (rows, columns): (u32, u32),
    logits: Activations,
    scale: f32,
    cap: Option<f32>,
) -> Call {
    let args = BoundLogitsArgs { logits: logits.range, columns, stride: logits.stride, scale, cap: cap.unwrap_or(0.0) };
    Call {
        kernel: "bound_logits",
        label,
        constants: BoundLogitsConstants { threads: THREADS, cap: u32::from(cap.is_some()) }.into_values(),
        args: args.into_args(),
        groups: [columns.div_ceil(THREADS), rows, 1],
    }
}

/// The number of words that say which rows of a step with at most `prompts` prompts are pooled: {the number of runs of
/// rows, the index of the first output}, then {first row, number of rows} of each run.
pub fn pool_words(prompts: u32) -> u64 {
    2 + 2 * u64::from(prompts)
}

/// Returns the size in bytes of the outputs of two steps with at most `prompts` pooled prompts each, so that one can be
/// read while the next is computed.
pub fn pooled_bytes(prompts: u32, stride: u32) -> u64 {
    2 * u64::from(prompts) * u64::from(stride) * 4
}

/// Returns the call that computes the factor of the RMS norm of each row of a prompt step with at most `rows` rows.
pub fn row_scales(label: String, (rows, columns): (u32, u32), args: RowScalesArgs) -> Call {
    debug_assert_eq!(columns, args.columns);
    Call {
        kernel: "row_scales",
        label,
        constants: RowScalesConstants { threads: THREADS }.into_values(),
        args: args.into_args(),
        groups: [rows, 1, 1],
    }
}

/// Returns the call that sums runs of normed rows, at most `prompts`.
pub fn pool_rows(label: String, prompts: u32, args: PoolRowsArgs) -> Call {
    let threads = 64;
    Call {
        kernel: "pool_rows",
        label,
        constants: PoolRowsConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [args.columns.div_ceil(threads), prompts, 1],
    }
}

/// Returns the factor of an RMS norm without weights.
fn rms(values: &[f64], epsilon: f32) -> f64 {
    1.0 / (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64 + f64::from(epsilon)).sqrt()
}

pub(crate) fn reference_add_branch(call: &Call, memory: &mut HostMemory) {
    let a = AddBranchArgs::from_args(&call.args);
    let c = AddBranchConstants::from_values(&call.constants);
    let normed = |memory: &HostMemory, values: Vec<f64>, norm: Range| -> Vec<f64> {
        let factor = rms(&values, a.epsilon);
        (0..).zip(values).map(|(i, value)| value * factor * f64::from(memory.f32(norm, i))).collect()
    };
    for row in 0..call.groups[0] {
        let line = |memory: &HostMemory, range: Range| -> Vec<f64> {
            (0..a.columns).map(|i| f64::from(memory.f32(range, row * a.x_stride + i))).collect()
        };
        let mut branch = line(memory, a.x);
        if c.norm == 1 {
            branch = normed(memory, branch, a.norm);
        }
        if c.beside == 1 {
            let beside = normed(memory, line(memory, a.beside), a.beside_norm);
            branch.iter_mut().zip(beside).for_each(|(value, beside)| *value += beside);
            branch = normed(memory, branch, a.sum_norm);
        }
        let factor = if c.factor == 1 { f64::from(memory.f32(a.factor, 0)) } else { 1.0 };
        for (i, branch) in (0..).zip(branch) {
            let at = row * a.y_stride + i;
            let value = ((f64::from(memory.f32(a.y, at)) + branch * f64::from(a.scale)) * factor) as f32;
            match c.tagged {
                3 => memory.set_u32(a.y, at, tagged(value, a.y_tag)),
                _ => memory.set_f32(a.y, at, value),
            }
        }
    }
}

pub(crate) fn reference_norm_heads(call: &Call, memory: &mut HostMemory) {
    let a = NormHeadsArgs::from_args(&call.args);
    let c = NormHeadsConstants::from_values(&call.constants);
    for (row, part) in (0..call.groups[1]).flat_map(|row| (0..call.groups[0]).map(move |part| (row, part))) {
        let base = row * a.stride + a.first + part * a.width;
        let x: Vec<f64> = (0..a.width).map(|i| f64::from(memory.f32(a.x, base + i))).collect();
        let further = (0..a.further_width).map(|i| f64::from(memory.f32(a.x, row * a.stride + a.further_first + i)));
        let all: Vec<f64> = x.iter().copied().chain(further).collect();
        let factor = rms(&all, a.epsilon);
        for (i, x) in (0..).zip(x) {
            let weight = if c.norm == 1 { f64::from(memory.f32(a.norm, i)) } else { 1.0 };
            let mut value = x * factor * weight;
            if c.add == 1 {
                let y = memory.f32(a.y, row * a.y_stride + a.first + part * a.width + i);
                value = (value + f64::from(a.scale) * f64::from(y)) * std::f64::consts::FRAC_1_SQRT_2;
            }
            memory.set_f32(a.x, base + i, value as f32);
        }
    }
}

pub(crate) fn reference_norm_groups(call: &Call, memory: &mut HostMemory) {
    let a = NormGroupsArgs::from_args(&call.args);
    let c = NormGroupsConstants::from_values(&call.constants);
    for (row, group) in (0..call.groups[1]).flat_map(|row| (0..call.groups[0]).map(move |group| (row, group))) {
        let first = group * a.width;
        let x: Vec<f64> = (first..first + a.width).map(|i| f64::from(memory.f32(a.x, row * a.x_stride + i))).collect();
        let factor = rms(&x, a.epsilon);
        for (i, x) in (first..).zip(x) {
            let value = (x * factor * f64::from(memory.f32(a.norm, i))) as f32;
            let at = row * a.y_stride + i;
            match c.tagged {
                3 => memory.set_u32(a.y, at, tagged(value, a.y_tag)),
                _ => memory.set_f32(a.y, at, value),
            }
        }
    }
}

pub(crate) fn reference_row_scales(call: &Call, memory: &mut HostMemory) {
    let a = RowScalesArgs::from_args(&call.args);
    for row in 0..call.groups[0].min(memory.u32(a.chunk, 2)) {
        let x: Vec<f64> = (0..a.columns).map(|i| f64::from(memory.f32(a.x, row * a.x_stride + i))).collect();
        memory.set_f32(a.scales, row, rms(&x, a.epsilon) as f32);
    }
}

pub(crate) fn reference_pool_rows(call: &Call, memory: &mut HostMemory) {
    let a = PoolRowsArgs::from_args(&call.args);
    let (runs, first) = (memory.u32(a.pool, 0), memory.u32(a.pool, 1));
    for (run, i) in (0..call.groups[1].min(runs)).flat_map(|run| (0..a.columns).map(move |i| (run, i))) {
        let (from, count) = (memory.u32(a.pool, 2 + 2 * run), memory.u32(a.pool, 3 + 2 * run));
        let scaled = |row: u32| f64::from(memory.f32(a.x, row * a.x_stride + i)) * f64::from(memory.f32(a.scales, row));
        let sum: f64 = (from..from + count).map(scaled).sum();
        let value = sum * f64::from(memory.f32(a.norm, i));
        memory.set_f32(a.pooled, (first + run) * a.pooled_stride + i, value as f32);
    }
}

pub(crate) fn reference_gate_rows(call: &Call, memory: &mut HostMemory) {
    let a = GateRowsArgs::from_args(&call.args);
    let c = GateRowsConstants::from_values(&call.constants);
    for (row, i) in (0..call.groups[1]).flat_map(|row| (0..a.columns).map(move |i| (row, i))) {
        let at = row * a.stride + i;
        let y = f64::from(memory.f32(a.y, row * a.y_stride + a.first + i));
        memory.set_f32(a.x, at, glu(c.glu, f64::from(memory.f32(a.x, at)), y) as f32);
    }
}

pub(crate) fn reference_bound_logits(call: &Call, memory: &mut HostMemory) {
    let a = BoundLogitsArgs::from_args(&call.args);
    let c = BoundLogitsConstants::from_values(&call.constants);
    for (row, i) in (0..call.groups[1]).flat_map(|row| (0..a.columns).map(move |i| (row, i))) {
        let at = row * a.stride + i;
        let value = f64::from(memory.f32(a.logits, at)) * f64::from(a.scale);
        let cap = f64::from(a.cap);
        memory.set_f32(a.logits, at, if c.cap == 1 { cap * (value / cap).tanh() } else { value } as f32);
    }
}

//! `flash_decode`, the decode attention on blocks of 16 × 16, for one new token per row, or for several rows with the next
//! tokens of a sequence; the same result as `attention` with `fused` for one row after the other. `plan_splits` distributes
//! its workgroups over the rows of a batch. Not here: prompts, and caches of f32.

use super::cache::kv_format_of;
use crate::config::KvFormat;
use crate::kernels::attention::{Heads, PAGE_TOKENS, attend, first_visible, put_row};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::gemm::tiled::PackedOrder;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{
    AttentionArgs, AttentionConstants, FlashDecodeConstants, PlanSplitsArgs, PlanSplitsConstants,
};
use crate::kernels::tags::Flow;
use crate::memory::pack::Format;

/// The maximum number of splits along a context.
pub const MOST_SPLITS: u32 = 32;

/// How long what a unit does besides attending to its pages takes, in rounds of the pages to which it attends at a time
/// (`plan_splits`).
const FIXED_ROUNDS: u32 = 3;

/// The maximum number of query heads of a workgroup.
const MOST_QUERY_HEADS: u32 = 8;
/// The maximum number of workgroups that share the query heads of a KV head; each reads the same keys and values.
const MOST_PARTS: u32 = 4;

/// Returns whether the kernel supports these heads.
pub fn serves(heads: Heads) -> bool {
    heads.kv_format != KvFormat::F32 && heads.dim.is_multiple_of(32) && heads.dim <= 256 && parts(heads) <= MOST_PARTS
}

/// Returns the number of workgroups that share the query heads of a KV head: as few as possible.
pub fn parts(heads: Heads) -> u32 {
    let group = heads.group();
    let served = |parts: &u32| group.is_multiple_of(*parts) && group / parts <= MOST_QUERY_HEADS;
    (1..=group).find(served).unwrap_or(group)
}

/// Returns the shared memory that a workgroup of `threads` invocations uses, in bytes, for sequences of `new_tokens` rows.
pub fn shared_bytes(heads: Heads, threads: u32, new_tokens: u32, matrices: Matrices) -> u32 {
    let (g, d, groups) = (heads.group() / parts(heads), heads.dim, threads / 32);
    let exchange = if matrices == Matrices::Emulated { threads * 32 } else { 0 };
    // Without shuffles that are wide enough, there is one partial sum for each four dimensions.
    let joined = if matrices == Matrices::Emulated { 1 } else { 8 };
    let raw = g + 2 * new_tokens + if heads.gated { g } else { 0 };
    let sums = (raw + g * new_tokens) * (d / 4) / joined * 4;
    // Of each split, for a workgroup that combines them.
    let combined = if matrices == Matrices::Emulated { 0 } else { 3 * MOST_SPLITS * 4 };
    // The new keys in f32 and the largest magnitudes of the new keys and values.
    let quantised = if heads.kv_format == KvFormat::Int8 { new_tokens * 2 * (d / 4) / joined * 4 } else { 0 };
    4 * (raw * d + g * d + new_tokens * d + 1)
        + quantised
        + combined
        + groups * (16 * (d / 8 + 1) * 16 + g * 8 + MOST_QUERY_HEADS * 4)
        + sums
        + exchange
}

/// The parameters of `plan_splits`, which distributes the workgroups of a batch's attention over its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// The number of units beside one per row, at most. A unit is [`parts`] workgroups per KV head.
    pub units: u32,
    /// The minimum number of pages per unit.
    pub least: u32,
    /// How the number of pages of a unit is chosen.
    pub by: SpreadBy,
    /// The number of workgroups that combine the units of a row with several, for each KV head ([`combiners`]); 0 if
    /// workgroups may not wait for others.
    pub combiners: u32,
}

/// How `plan_splits` chooses the number of pages of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpreadBy {
    /// Each row gets the share of the units that its pages have of those of all rows.
    Shares,
    /// All units have about as many pages: as many that the last one ends first.
    Turns {
        /// The number of units that the device runs at a time.
        turn: u32,
        /// The number of pages to which a unit attends at a time.
        groups: u32,
    },
}

impl SpreadBy {
    /// Returns the constants TURN and GROUPS.
    fn words(self) -> [u32; 2] {
        match self {
            SpreadBy::Shares => [0, 1],
            SpreadBy::Turns { turn, groups } => [turn.max(1), groups],
        }
    }
}

impl Spread {
    /// Returns the maximum number of units of the plan for `rows` rows: each row has at least one, whatever its share.
    pub fn most(self, rows: u32) -> u32 {
        rows + self.units
    }

    /// Returns the number of the plan's entries for `rows` rows: units, then combining workgroups.
    fn entries(self, rows: u32) -> u32 {
        self.most(rows) + rows * self.combiners
    }

    /// Returns the size of the plan in bytes.
    pub fn bytes(self, rows: u32) -> u64 {
        u64::from(self.entries(rows)) * 16
    }
}

/// Returns the call that computes the plan of an attention's `rows` rows from their positions. `window` is the number of
/// tokens that a token sees, if not all.
pub fn plan_splits(label: String, rows: u32, spread: Spread, window: Option<u32>, table: Range, work: Range) -> Call {
    Call {
        kernel: "plan_splits",
        label,
        constants: PlanSplitsConstants {
            threads: rows.next_power_of_two().clamp(32, 128),
            rows,
            units: spread.most(rows),
            most: MOST_SPLITS,
            window: window.unwrap_or(0),
            combiners: spread.combiners,
            turn: spread.by.words()[0],
            groups: spread.by.words()[1],
        }
        .into_values(),
        args: PlanSplitsArgs { rows: table, work, spread: spread.units, least: spread.least }.into_args(),
        groups: [1, 1, 1],
    }
}

/// The source of a `flash_decode`'s rows and splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The rows of a step, each with up to the same number of splits.
    Evenly {
        /// The number of rows.
        rows: u32,
        /// The maximum number of splits along a context.
        splits: u32,
    },
    /// A plan of `plan_splits`.
    Planned {
        /// The number of rows.
        rows: u32,
        /// The plan's parameters.
        spread: Spread,
    },
}

/// The number of quads of the output that a combining workgroup has.
const COMBINED_QUADS: u32 = 32;

/// Returns the number of workgroups that combine the splits of a row and KV head: none if it would be more than `most`, or if
/// one split's workgroup has an invocation for each quad of the output. With fewer invocations it takes several turns, each
/// as long as a read of the splits' results.
pub fn combiners(heads: Heads, threads: u32, most: u32) -> u32 {
    let quads = heads.group() / parts(heads) * heads.dim / 4;
    let count = quads / COMBINED_QUADS;
    let divides = (heads.dim / 4).is_multiple_of(COMBINED_QUADS) && threads >= MOST_SPLITS;
    if quads > threads && divides && count <= most { count } else { 0 }
}

/// The shape of a `flash_decode` call.
#[derive(Clone, Copy, Debug)]
pub struct FlashDecodeShape {
    /// The source of its rows and splits.
    pub split: Split,
    /// The number of invocations of a workgroup.
    pub threads: u32,
    /// The number of rows of each sequence, which follow each other and have its next tokens.
    pub new_tokens: u32,
    /// The order in which the output is packed for the next product, if it is; the output's stride then counts blocks of
    /// 32 columns ([`PackedOrder::Fragments`]) or rows ([`PackedOrder::Swizzled`]).
    pub packed: Option<PackedOrder>,
    /// How the kernel multiplies matrices.
    pub matrices: Matrices,
}

/// Returns the call for the attention of a step's rows, split along their contexts.
pub fn flash_decode(label: String, heads: Heads, shape: FlashDecodeShape, flow: Flow, args: AttentionArgs) -> Call {
    let FlashDecodeShape { split, threads, new_tokens, packed, matrices } = shape;
    let parts = parts(heads);
    assert!(serves(heads) && (packed.is_none() || flow.output.is_none()), "{heads:?}, {packed:?}");
    // Polling requires that earlier workgroups were launched first, but a CPU driver may run workgroups in any order.
    let waits = flow.output.is_some() && matrices == Matrices::Cooperative;
    let (planned, combiners, groups) = match split {
        Split::Evenly { rows, splits } => {
            assert!(splits <= MOST_SPLITS, "{splits} splits");
            let combiners = if waits && splits > 1 { combiners(heads, threads, u32::MAX) } else { 0 };
            (0, combiners, [splits + combiners, heads.kv * parts, rows])
        }
        Split::Planned { rows, spread } => {
            assert!(spread.combiners == 0 || waits, "{spread:?}");
            (1, spread.combiners, [spread.entries(rows), heads.kv * parts, 1])
        }
    };
    let [scale, window, soft_cap] = heads.scores.words();
    let constants = FlashDecodeConstants {
        threads,
        lanes: threads,
        d: heads.dim,
        rot: heads.rot,
        g: heads.group() / parts,
        kv_heads: heads.kv,
        qk_norm: heads.qk_norm as u32,
        tagged: flow.code(),
        planned,
        packed: PackedOrder::word(packed),
        gated: u32::from(heads.gated),
        waits: u32::from(waits),
        combiners,
        scale,
        window,
        soft_cap,
        sinks: u32::from(heads.scores.sinks),
        query_scales: heads.scores.query_scales.unwrap_or(0),
        v_norm: u32::from(heads.v_norm),
        parts,
        devices: 0,
        new_tokens,
    };
    // The argument block is the same as `attention`'s, field for field.
    let args = AttentionArgs { fault: args.fault.none(), qkv_tag: flow.input, o_tag: flow.output.unwrap_or(0), ..args };
    let AttentionArgs { qkv, o, partials, counters, .. } = args;
    let call = Call {
        kernel: match (matrices, heads.kv_format) {
            (Matrices::Emulated, KvFormat::Int8) => "flash_decode.int8.plain",
            (Matrices::Emulated, _) => "flash_decode.plain",
            (Matrices::Cooperative, KvFormat::Int8) => "flash_decode.int8",
            (Matrices::Cooperative, _) => "flash_decode",
        },
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups,
    };
    // The splits' scratch buffers bypass the L1 cache, and the output's tags order their next use.
    let call = if flow.output.is_some() { call.carry(partials).carry(counters) } else { call };
    flow.mark(call, qkv, o)
}

pub(crate) fn reference_flash_decode(call: &Call, memory: &mut HostMemory) {
    let args = AttentionArgs::from_args(&call.args);
    let c = FlashDecodeConstants::from_values(&call.constants);
    let constants = AttentionConstants {
        threads: c.threads,
        d: c.d,
        rot: c.rot,
        g: c.g,
        kv_heads: c.kv_heads,
        qk_norm: c.qk_norm,
        fused: 1,
        workers: c.threads,
        tagged: c.tagged,
        gated: c.gated,
        scale: c.scale,
        window: c.window,
        soft_cap: c.soft_cap,
        sinks: c.sinks,
        query_scales: c.query_scales,
        parts: c.parts,
        v_norm: c.v_norm,
        devices: 0,
        // A row sees no later token.
        both: 0,
    };
    let [groups, _, rows] = call.groups;
    let word = |at: u32| memory.u32(args.rows, at);
    let mut rows: Vec<[u32; 4]> = match c.planned {
        0 => (0..rows).map(|row| [row, word(row * 4 + 1), word(row * 4 + 2), word(row * 4 + 3)]).collect(),
        // Only the first unit of each row is taken: it stands for all of the row's units, and for those that combine them.
        _ => (0..groups)
            .map(|unit| std::array::from_fn(|i| word(unit * 4 + i as u32)))
            .filter(|[.., code]: &[u32; 4]| *code != 0 && code & 255 == 0)
            .map(|[row, position, slot, code]| [row, position, slot, code >> 16])
            .collect(),
    };
    // A sequence's rows follow each other: each appends its key and value, which the next ones read.
    rows.sort();
    let put = |memory: &mut HostMemory, row, column, value| match PackedOrder::of_word(c.packed) {
        None => put_row(&args, &constants, memory, row, column, value),
        Some(order) => {
            let at = order.index(row, column, args.output_stride);
            memory.set_number(Format::Bf16, args.o, at as u32, value);
        }
    };
    for &[row, .., valid] in &rows {
        if c.packed != 0 && valid == 0 {
            (0..c.kv_heads * c.g * c.parts * c.d).for_each(|column| put(memory, row, column, 0.0));
        }
    }
    attend(kv_format_of(call.kernel), &rows, &args, &constants, memory, &put);
}

pub(crate) fn reference_plan_splits(call: &Call, memory: &mut HostMemory) {
    let a = PlanSplitsArgs::from_args(&call.args);
    let c = PlanSplitsConstants::from_values(&call.constants);
    let rows: Vec<[u32; 4]> =
        (0..c.rows).map(|row| std::array::from_fn(|i| memory.u32(a.rows, row * 4 + i as u32))).collect();
    let pages = |row: &[u32; 4]| match row[3] {
        0 => 0,
        _ => row[1].div_ceil(PAGE_TOKENS) - first_visible(c.window, row[1]) / PAGE_TOKENS,
    };
    let all: u32 = rows.iter().map(pages).sum();
    let longest = rows.iter().map(pages).max().unwrap_or(0);
    // With TURN: the number of pages of a unit by which the last unit ends first.
    let size_of = |units: u32| longest.div_ceil(units).max(a.least).max(1);
    let units_of = |size: u32| -> Vec<u32> { rows.iter().map(|row| pages(row).div_ceil(size).min(c.most)).collect() };
    let cost = |units: &u32| {
        let size = size_of(*units);
        let taken: u32 = units_of(size).into_iter().map(|units| units.max(1)).sum();
        let turns = units_of(size).into_iter().sum::<u32>().div_ceil(c.turn.max(1));
        if taken > c.units { u32::MAX } else { turns * (size.div_ceil(c.groups) + FIXED_ROUNDS) }
    };
    let size = size_of((1..=32).min_by_key(cost).expect("there are numbers"));
    let live = |row: &[u32; 4]| {
        if c.turn > 0 {
            return pages(row).div_ceil(size).clamp(1, c.most);
        }
        let most = (pages(row) / a.least.max(1)).clamp(1, c.most);
        (a.spread * pages(row) / all.max(1)).clamp(1, most)
    };
    let (several, single): (Vec<u32>, Vec<u32>) = (0..c.rows).partition(|row| live(&rows[*row as usize]) > 1);
    let units = several.iter().chain(&single).flat_map(|row| {
        let info = rows[*row as usize];
        let (live, valid) = (live(&info), u32::from(info[3] != 0));
        (0..live).map(move |split| [*row, info[1], info[2], split | live << 8 | valid << 16])
    });
    let units: Vec<[u32; 4]> = units.chain(std::iter::repeat([0; 4])).take(c.units as usize).collect();
    let combining = (0..c.rows).flat_map(|row| {
        let first = units.iter().position(|unit| unit[3] != 0 && unit[0] == row).unwrap_or(0);
        let [_, _, slot, code] = units[first];
        let several = code >> 16 != 0 && code >> 8 & 255 > 1;
        let entry = move |i| if several { [row, first as u32, slot, code + c.most + i] } else { [0; 4] };
        (0..c.combiners).map(entry)
    });
    for (entry, words) in (0..).zip(units.iter().copied().chain(combining)) {
        for (i, word) in (0..).zip(words) {
            memory.set_u32(a.work, entry * 4 + i, word);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::shaders::find;

    #[test]
    fn the_argument_block_is_that_of_attention() {
        let block = |name| find(name).fields.iter().map(|f| (f.name, f.offset, f.bytes)).collect::<Vec<_>>();
        assert_eq!(block("flash_decode"), block("attention.f16"));
        assert_eq!(block("flash_decode.plain"), block("attention.f16"));
    }
}

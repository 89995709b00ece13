//! `embed_rows`: which token stands where in a step's rows, and its embedding.

use super::host_memory::HostMemory;
use super::recording::Call;
use super::shaders::{EmbedRowsArgs, EmbedRowsConstants};
use super::tags::{Flow, tagged};
use super::{Format, format_of, state};
use crate::memory::pack::fragment_index;

/// What the rows of a step are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowsFrom {
    /// Row r is the slot in word r of the batch list.
    Batch,
    /// Row r is token r of the prompt chunk.
    Chunk,
}

/// How an embedding table lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// Of its values.
    pub format: Format,
    /// In fragment order, not row after row.
    pub fragments: bool,
}

/// Words of a chunk descriptor before its tokens: slot, start, count, flags.
pub const CHUNK_HEADER: u32 = 4;

/// Writes `rows` and `x` for `rows` rows.
///
/// `part` is the range of vocabulary rows that `embedding` holds; a table that is split over
/// several allocations takes one call for each.
///
/// # Panics
/// If a table in fragment order is not in bfloat16.
pub fn embed_rows(
    label: String,
    table: Table,
    from: RowsFrom,
    rows: u32,
    hidden: u32,
    flow: Flow,
    args: EmbedRowsArgs,
) -> Call {
    let kernel = match (table.format, table.fragments) {
        (Format::Bf16, false) => "embed_rows.bf16",
        (Format::F16, false) => "embed_rows.f16",
        (Format::F32, false) => "embed_rows.f32",
        (Format::Bf16, true) => "embed_rows.bf16.fragments",
        (format, true) => panic!("no kernel reads {format:?} in fragment order"),
    };
    let threads = 64;
    let constants = EmbedRowsConstants { threads, prefill: u32::from(from == RowsFrom::Chunk), tagged: flow.code() };
    let (x, args) = (args.x, EmbedRowsArgs { x_tag: flow.output.unwrap_or(0), ..args });
    let call = Call {
        kernel,
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [hidden.div_ceil(8).div_ceil(threads), rows, 1],
    };
    flow.mark(call, x, x)
}

pub(super) fn reference_embed_rows(call: &Call, memory: &mut HostMemory) {
    let args = EmbedRowsArgs::from_args(&call.args);
    let constants = EmbedRowsConstants::from_values(&call.constants);
    let fragments = call.kernel.ends_with(".fragments");
    let format = if fragments { Format::Bf16 } else { format_of(call.kernel) };
    for row in 0..call.groups[1] {
        let (token, position, slot, valid) = if constants.prefill == 1 {
            let count = memory.u32(args.chunk, 2);
            let valid = row < count;
            let token = if valid { memory.u32(args.chunk, CHUNK_HEADER + row) } else { 0 };
            (token, memory.u32(args.chunk, 1) + row, memory.u32(args.chunk, 0), valid)
        } else {
            let slot = memory.u32(args.batch, row);
            if slot == u32::MAX {
                (0, 0, slot, false)
            } else {
                let word = |memory: &HostMemory, i: u32| memory.u32(args.slots, slot * state::SLOT_WORDS + i);
                let valid = word(memory, state::SLOT_ACTIVE) == 1;
                let token = if valid { word(memory, state::SLOT_TOKEN) } else { 0 };
                (token, word(memory, state::SLOT_POSITION), slot, valid)
            }
        };
        for (i, value) in [token, position, slot, u32::from(valid)].into_iter().enumerate() {
            memory.set_u32(args.rows, row * 4 + i as u32, value);
        }
        if token < args.part_first || token - args.part_first >= args.part_rows {
            continue;
        }
        for i in 0..args.chunks * 8 {
            let from = token - args.part_first;
            let at = match fragments {
                true => fragment_index(from, i, (args.chunks * 8).next_multiple_of(32)) as u32,
                false => from * args.chunks * 8 + i,
            };
            let value = memory.weight(format, args.embedding, at);
            match constants.tagged {
                3 => memory.set_u32(args.x, row * args.x_stride + i, tagged(value, args.x_tag)),
                _ => memory.set_f32(args.x, row * args.x_stride + i, value),
            }
        }
    }
}

/// The bytes of a `rows` buffer.
pub fn rows_bytes(rows: u32) -> u64 {
    u64::from(rows) * 16
}

/// Where a chunk's descriptor and tokens lie, for a chunk of at most `tokens`.
pub fn chunk_bytes(tokens: u32) -> u64 {
    u64::from(CHUNK_HEADER + tokens) * 4
}

//! `embed_rows`: which token stands where in a step's rows, and its embedding.

use super::host_memory::HostMemory;
use super::recording::Call;
use super::shaders::{EmbedRowsArgs, EmbedRowsConstants};
use super::{Format, format_of, state};

/// What the rows of a step are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowsFrom {
    /// Row r is the slot in word r of the batch list.
    Batch,
    /// Row r is token r of the prompt chunk.
    Chunk,
}

/// Words of a chunk descriptor before its tokens: slot, start, count, flags.
pub const CHUNK_HEADER: u32 = 4;

/// Writes `rows` and `x` for `rows` rows.
///
/// `part` is the range of vocabulary rows that `embedding` holds; a table that is split over
/// several allocations takes one call for each.
pub fn embed_rows(label: String, format: Format, from: RowsFrom, rows: u32, hidden: u32, args: EmbedRowsArgs) -> Call {
    let kernel = match format {
        Format::Bf16 => "embed_rows.bf16",
        Format::F16 => "embed_rows.f16",
        Format::F32 => "embed_rows.f32",
    };
    let threads = 64;
    let constants = EmbedRowsConstants { threads, prefill: u32::from(from == RowsFrom::Chunk) };
    Call {
        kernel,
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [hidden.div_ceil(8).div_ceil(threads), rows, 1],
    }
}

pub(super) fn reference_embed_rows(call: &Call, memory: &mut HostMemory) {
    let args = EmbedRowsArgs::from_args(&call.args);
    let constants = EmbedRowsConstants::from_values(&call.constants);
    let format = format_of(call.kernel);
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
            let value = memory.weight(format, args.embedding, (token - args.part_first) * args.chunks * 8 + i);
            memory.set_f32(args.x, row * args.x_stride + i, value);
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

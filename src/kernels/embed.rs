//! `embed_rows`, the embedding lookup: it determines the token, position and slot of each row of a step, and how many rows
//! of its prompt follow, and writes its embedding; `ChunkLayout`, the descriptor of a prompt step; and `decode_rows`, which
//! completes it with slots that decode in the step. Not here: the choice of the prompts of a step.

use super::host_memory::{HostMemory, PackedMatrix};
use super::recording::Call;
use super::shaders::{DecodeRowsArgs, DecodeRowsConstants, EmbedRowsArgs, EmbedRowsConstants};
use super::tags::{Flow, tagged};
use super::{Format, codes_word, format_of, state};

/// The source of a step's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowsFrom {
    /// Row r is the slot in word r of the batch list.
    Batch,
    /// Row r is token r of the prompt step.
    Chunk,
}

/// The format and layout of an embedding table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// The format of its values.
    pub format: Format,
    /// Whether the table is in fragment order instead of row-major.
    pub fragments: bool,
}

/// The layout of a prompt step's descriptor, in words:
/// - `{prompts, lasts, rows, decoding}`: the numbers of prompts, of prompts whose last chunk this is, of rows, and of slots
///   that decode in the step: these are the last prompts, of one row each;
/// - for each prompt with a chunk in the step `{slot, position of its first row, first row, 0}`, in ascending order of
///   rows;
/// - only where prompts have cells, for each prompt the cell whose state it continues or `u32::MAX`; twice {the
///   number of rows after which the state is also stored as a snapshot, the snapshot's cell}; the first of its blocks
///   of [`BLOCK_ROWS`] rows; the token that follows its last row if it is known; 0;
/// - for each prompt whose last chunk this is, its last row, from which a token is drawn;
/// - the token of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLayout {
    /// The maximum number of prompts per step.
    pub prompts: u32,
    /// Whether prompts have cells: see [`StateLayout::cells`](super::layout::StateLayout::cells).
    pub cells: bool,
}

/// The number of rows of a prompt that the recurrent state's scan processes at a time.
pub const BLOCK_ROWS: u32 = 64;
/// The number of words about a prompt's cells.
pub(super) const CELL_WORDS: u32 = 8;

impl ChunkLayout {
    /// The index of a prompt's first word of four.
    pub fn prompt(self, index: u32) -> u32 {
        4 + 4 * index
    }

    /// The index of a prompt's first word of eight about its cells.
    pub fn cells(self, index: u32) -> u32 {
        self.prompt(self.prompts) + CELL_WORDS * index
    }

    /// The index of the word with a last row.
    pub fn last(self, index: u32) -> u32 {
        self.cells(if self.cells { self.prompts } else { 0 }) + index
    }

    /// The index of the word with a row's token.
    pub fn token(self, row: u32) -> u32 {
        self.last(self.prompts).next_multiple_of(4) + row
    }

    /// The size in bytes of a descriptor of at most `tokens` rows.
    pub fn bytes(self, tokens: u32) -> u64 {
        u64::from(self.token(tokens)) * 4
    }

    /// Returns the number of words of the descriptor of a microbatch of at most `prompts` prompts: the first four words of a
    /// step's descriptor, and four for each prompt. It has no cells, no last rows (their number is 0) and no tokens, so only layers
    /// read it that need none of these.
    pub fn microbatch_words(prompts: u32) -> u32 {
        4 + 4 * prompts
    }

    /// Returns the words of the descriptor of a microbatch, whose rows are those of `prompts`.
    pub fn describe_microbatch(prompts: &[PromptRows<'_>]) -> Vec<u32> {
        // The first two runs of a step's descriptor, which are adjacent.
        let layout = ChunkLayout { prompts: prompts.len() as u32, cells: false };
        layout.describe(prompts).into_iter().take(2).flat_map(|(_, words)| words).collect()
    }

    /// Returns the words of a step's descriptor, as runs with the index of their first word.
    ///
    /// # Panics
    /// If there are more prompts than the descriptor has room for, or a snapshot is requested at a row where no block
    /// ends or beyond a prompt's end.
    pub fn describe(self, prompts: &[PromptRows<'_>]) -> Vec<(u32, Vec<u32>)> {
        self.describe_mixed(prompts, &[])
    }

    /// Like [`ChunkLayout::describe`], for a step in which the slots `decoding` decode. [`decode_rows`] writes their
    /// positions and tokens. Their words about cells say nothing: their state is in their own cells.
    pub fn describe_mixed(self, prompts: &[PromptRows<'_>], decoding: &[u32]) -> Vec<(u32, Vec<u32>)> {
        let count = prompts.len() + decoding.len();
        assert!(count <= self.prompts as usize, "{count} prompts, at most {}", self.prompts);
        let (mut first_row, mut first_block) = (0, 0);
        let (mut words, mut cells) = (Vec::with_capacity(4 * prompts.len()), Vec::new());
        let (mut lasts, mut tokens) = (Vec::new(), Vec::new());
        for prompt in prompts {
            words.extend([prompt.slot, prompt.start, first_row, 0]);
            if self.cells {
                let rows = prompt.tokens.len();
                assert!(prompt.keeps.len() <= 2, "{} snapshots of a prompt", prompt.keeps.len());
                for &(at, cell) in prompt.keeps {
                    let ends = at.is_multiple_of(BLOCK_ROWS) && at as usize <= rows;
                    assert!(ends, "keeping cell {cell} after {at} of {rows} rows");
                }
                let keep = |index: usize| prompt.keeps.get(index).copied().unwrap_or((0, u32::MAX));
                let ((rows, cell), (more_rows, more_cell)) = (keep(0), keep(1));
                let from = prompt.from.unwrap_or(u32::MAX);
                let next = prompt.next.unwrap_or(0);
                cells.extend([from, rows, cell, more_rows, more_cell, first_block, next, 0]);
            }
            first_row += prompt.tokens.len() as u32;
            first_block += (prompt.tokens.len() as u32).div_ceil(BLOCK_ROWS);
            if prompt.last {
                lasts.push(first_row - 1);
            }
            tokens.extend_from_slice(prompt.tokens);
        }
        for slot in decoding {
            words.extend([*slot, 0, first_row, 0]);
            if self.cells {
                cells.extend([u32::MAX, 0, u32::MAX, 0, u32::MAX, first_block, 0, 0]);
            }
            lasts.push(first_row);
            tokens.push(0);
            first_row += 1;
        }
        vec![
            (0, vec![count as u32, lasts.len() as u32, first_row, decoding.len() as u32]),
            (self.prompt(0), words),
            (self.cells(0), cells),
            (self.last(0), lasts),
            (self.token(0), tokens),
        ]
    }
}

/// A prompt's part of a step.
#[derive(Clone, Copy, Debug)]
pub struct PromptRows<'a> {
    /// The slot of the sequence.
    pub slot: u32,
    /// The position of the first token.
    pub start: u32,
    /// The tokens; at least one.
    pub tokens: &'a [u32],
    /// Whether a token is drawn from the last row.
    pub last: bool,
    /// The token that follows the last of them, if it is known.
    pub next: Option<u32>,
    /// The cell whose recurrent state they continue; `None` at the beginning of a sequence.
    pub from: Option<u32>,
    /// The numbers of rows, multiples of [`BLOCK_ROWS`], after which the state is stored as a snapshot, each with its
    /// cell; at most two.
    pub keeps: &'a [(u32, u32)],
}

impl<'a> PromptRows<'a> {
    /// Returns the part of the first `rows` rows, and that of the others; `None` if it has no row. The parts say nothing about
    /// cells.
    fn cut(self, rows: usize) -> [Option<PromptRows<'a>>; 2] {
        let (before, behind) = self.tokens.split_at(rows.min(self.tokens.len()));
        let part = |tokens: &'a [u32], start: u32| {
            let part = PromptRows { start, tokens, last: false, next: None, from: None, keeps: &[], ..self };
            (!tokens.is_empty()).then_some(part)
        };
        [part(before, self.start), part(behind, self.start + before.len() as u32)]
    }
}

/// Returns the prompts of the first `rows` rows of a step, which are the first microbatch, and those of the others, which are the
/// second. They say nothing about cells.
pub fn microbatches<'a>(prompts: &[PromptRows<'a>], rows: u32) -> [Vec<PromptRows<'a>>; 2] {
    let (mut parts, mut left) = ([Vec::new(), Vec::new()], rows as usize);
    for prompt in prompts {
        parts.iter_mut().zip(prompt.cut(left)).for_each(|(part, own)| part.extend(own));
        left -= left.min(prompt.tokens.len());
    }
    parts
}

/// Returns the call that writes the buffers `rows` and `x` for `rows` rows of a step.
///
/// `args.part_first` and `args.part_rows` give the vocabulary rows that `args.embedding` holds; a table that is split
/// over several allocations takes one call per allocation.
///
/// # Panics
/// If a table in fragment order is in f32.
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
        (Format::F16, true) => "embed_rows.f16.fragments",
        (Format::Codes(_), false) => "embed_rows.codes",
        (Format::Codes(_), true) => "embed_rows.codes.fragments",
        (Format::F32, true) => panic!("no kernel reads f32 in fragment order"),
    };
    let threads = 64;
    let constants = EmbedRowsConstants {
        threads,
        prefill: u32::from(from == RowsFrom::Chunk),
        tagged: flow.code(),
        codes: codes_word(table.format),
    };
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

/// Returns the call that writes the positions and tokens of the slots that decode in a prompt step to its descriptor; the
/// prompts of slots that do not run lose their slot.
pub fn decode_rows(label: String, args: DecodeRowsArgs) -> Call {
    let constants = DecodeRowsConstants { threads: 64 };
    Call { kernel: "decode_rows", label, constants: constants.into_values(), args: args.into_args(), groups: [1, 1, 1] }
}

pub(super) fn reference_decode_rows(call: &Call, memory: &mut HostMemory) {
    let a = DecodeRowsArgs::from_args(&call.args);
    let [prompts, _, _, decoding] = std::array::from_fn(|word| memory.u32(a.chunk, word as u32));
    for index in prompts - decoding..prompts {
        let at = 4 + 4 * index;
        let (slot, row) = (memory.u32(a.chunk, at), memory.u32(a.chunk, at + 2));
        let word = |memory: &HostMemory, word: u32| memory.u32(a.slots, slot * state::SLOT_WORDS + word);
        let runs = word(memory, state::SLOT_ACTIVE) == state::ACTIVE_RUNNING;
        let (position, token) = (word(memory, state::SLOT_POSITION), word(memory, state::SLOT_TOKEN));
        memory.set_u32(a.chunk, at, if runs { slot } else { u32::MAX });
        memory.set_u32(a.chunk, at + 1, if runs { position } else { 0 });
        memory.set_u32(a.chunk, a.tokens_at + row, if runs { token } else { 0 });
    }
}

pub(super) fn reference_embed_rows(call: &Call, memory: &mut HostMemory) {
    let args = EmbedRowsArgs::from_args(&call.args);
    let constants = EmbedRowsConstants::from_values(&call.constants);
    let fragments = call.kernel.ends_with(".fragments");
    let format = format_of(call.kernel, constants.codes);
    let matrix = PackedMatrix { range: args.embedding, format, fragments, cols: args.chunks * 8 };
    for row in 0..call.groups[1] {
        let (token, position, slot, valid) = if constants.prefill == 1 {
            let prompt =
                |index: u32| std::array::from_fn::<u32, 4, _>(|i| memory.u32(args.chunk, 4 + 4 * index + i as u32));
            let prompts = (0..memory.u32(args.chunk, 0)).map(prompt);
            let mut end = memory.u32(args.chunk, 2);
            let mut prompts = prompts.rev().skip_while(|p| {
                let later = p[2] > row;
                end = if later { p[2] } else { end };
                later
            });
            let [slot, start, first, _] = prompts.next().expect("the first begins at row 0");
            // A prompt may have no slot.
            let valid = row < memory.u32(args.chunk, 2) && slot != u32::MAX;
            let valid = if valid { end - row } else { 0 };
            let token = if valid > 0 { memory.u32(args.chunk, args.tokens_at + row) } else { 0 };
            (token, start + row - first, slot, valid)
        } else {
            let slot = memory.u32(args.batch, row);
            if slot == u32::MAX {
                (0, 0, slot, 0)
            } else {
                let word = |memory: &HostMemory, i: u32| memory.u32(args.slots, slot * state::SLOT_WORDS + i);
                let valid = u32::from(word(memory, state::SLOT_ACTIVE) == 1);
                let token = if valid > 0 { word(memory, state::SLOT_TOKEN) } else { 0 };
                (token, word(memory, state::SLOT_POSITION), slot, valid)
            }
        };
        for (i, value) in [token, position, slot, valid].into_iter().enumerate() {
            memory.set_u32(args.rows, row * 4 + i as u32, value);
        }
        if token < args.part_first || token - args.part_first >= args.part_rows {
            continue;
        }
        for i in 0..args.chunks * 8 {
            let value = memory.element(&matrix, token - args.part_first, i) * args.scale;
            match constants.tagged {
                3 => memory.set_u32(args.x, row * args.x_stride + i, tagged(value, args.x_tag)),
                _ => memory.set_f32(args.x, row * args.x_stride + i, value),
            }
        }
    }
}

/// The size of a `rows` buffer in bytes.
pub fn rows_bytes(rows: u32) -> u64 {
    u64::from(rows) * 16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each row of a step is in one microbatch, at its position, and prompts are in the order of their rows. Method: all
    /// cuts of two prompts, before, within and behind each of them.
    #[test]
    fn rows_are_in_one_of_both_microbatches_at_their_positions() {
        let tokens: Vec<u32> = (100..109).collect();
        let prompt = |slot, start, tokens| PromptRows {
            slot,
            start,
            tokens,
            last: true,
            next: Some(7),
            from: Some(3),
            keeps: &[(64, 5)],
        };
        let prompts = [prompt(4, 32, &tokens[..6]), prompt(2, 0, &tokens[6..])];
        // The slot, the position and the token of each row.
        let rows = |prompts: &[PromptRows<'_>]| -> Vec<(u32, u32, u32)> {
            let each = |p: &PromptRows<'_>| {
                let slot = p.slot;
                (p.start..).zip(p.tokens.to_vec()).map(move |(at, token)| (slot, at, token))
            };
            prompts.iter().flat_map(each).collect()
        };
        for first in 0..=9 {
            let parts = microbatches(&prompts, first);
            assert_eq!(rows(&parts[0]).len(), first as usize);
            assert_eq!(parts.iter().flat_map(|part| rows(part)).collect::<Vec<_>>(), rows(&prompts), "cut at {first}");
            assert!(parts.iter().flatten().all(|part| !part.tokens.is_empty() && part.from.is_none()));
        }
        let [first, second] = microbatches(&prompts, 4);
        assert_eq!(ChunkLayout::describe_microbatch(&first), [1, 0, 4, 0, 4, 32, 0, 0]);
        assert_eq!(ChunkLayout::describe_microbatch(&second), [2, 0, 5, 0, 4, 36, 0, 0, 2, 0, 2, 0]);
        assert!(ChunkLayout::microbatch_words(2) >= 12);
    }
}

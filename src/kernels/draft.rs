//! The kernels of speculative decoding: the rows of a verification step and of a drafting pass, the input of a draft
//! (MTP) block or of a draft head (`join_rows`), and the storage of its draft tokens; the rows of a draft model
//! (`draft_rows`); and drafts that are looked up where the last tokens occurred before (`note_tokens`, `look_up`). Not here:
//! the products and attention of drafting passes, which are those of prompts, and the drawing of tokens (`sampling`), which
//! decides which draft tokens are accepted.

use super::deterministic::key_of;
use super::gemm::Activations;
use super::host_memory::HostMemory;
use super::recording::{Call, Range};
use super::shaders::{
    DraftRowsArgs, DraftRowsConstants, JoinNormsArgs, JoinNormsConstants, JoinRowsArgs, JoinRowsConstants, LookUpArgs,
    LookUpConstants, NextTokensArgs, NextTokensConstants, NoteTokensArgs, NoteTokensConstants, ShiftTokensArgs,
    ShiftTokensConstants, StoreDraftArgs, StoreDraftConstants, VerifyRowsArgs, VerifyRowsConstants,
};
use super::state::{
    ACTIVE_RUNNING, MOST_DRAFTS, SLOT_ACTIVE, SLOT_DRAFTS, SLOT_POSITION, SLOT_TOKEN, SLOT_WORDS, TOKEN_NONE,
};

/// The shape of a verification step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyRows {
    /// The number of sequences in the batch.
    pub sequences: u32,
    /// The number of rows per sequence: its next token and its draft tokens.
    pub each: u32,
}

/// Returns the call that writes the descriptor of a verification step from the batch and its slots' draft tokens, all
/// but the cells.
pub fn verify_rows(label: String, rows: VerifyRows, args: VerifyRowsArgs) -> Call {
    assert!((1..=MOST_DRAFTS + 1).contains(&rows.each), "{} rows of a sequence", rows.each);
    let VerifyRows { sequences, each } = rows;
    Call {
        kernel: "verify_rows",
        label,
        constants: VerifyRowsConstants { threads: 32, rows: sequences, each }.into_values(),
        args: args.into_args(),
        groups: [1, 1, 1],
    }
}

/// Returns the call that keeps the tokens of a step's rows by slot and position.
pub fn note_tokens(label: String, args: NoteTokensArgs) -> Call {
    let threads = 64;
    Call {
        kernel: "note_tokens",
        label,
        constants: NoteTokensConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [args.row_count.div_ceil(threads), 1, 1],
    }
}

/// Returns the call that drafts `drafts` tokens of each of `sequences` sequences, whose rows are `each` rows apart. The
/// `stride` of the history is at most 2^28.
pub fn look_up(label: String, (sequences, each): (u32, u32), drafts: u32, args: LookUpArgs) -> Call {
    assert!((1..=MOST_DRAFTS).contains(&drafts), "{drafts} drafts of a sequence");
    assert!(args.stride <= 1 << POSITION_BITS, "a history of {} positions", args.stride);
    Call {
        kernel: "look_up",
        label,
        constants: LookUpConstants { threads: 128, each, drafts }.into_values(),
        args: args.into_args(),
        groups: [sequences, 1, 1],
    }
}

/// The bits of a position in a match of `look_up`; the number of equal tokens stands above them.
const POSITION_BITS: u32 = 28;
/// The maximum number of tokens that `look_up` compares.
const TAIL: u32 = 3;

/// Returns what followed the last tokens of a sequence where they occurred before: defines what `look_up` computes.
/// `history` holds all tokens, the last of which is the next one to be computed; at least one.
pub fn looked_up(history: &[u32], drafts: u32) -> Vec<u32> {
    let position = history.len() - 1;
    let same = |at: usize| {
        let most = (TAIL as usize).min(at + 1);
        (0..most).take_while(|back| history[at - back] == history[position - back]).count()
    };
    let best = (0..position).filter(|at| same(*at) > 0).max_by_key(|at| (same(*at), *at));
    let mut all = history.to_vec();
    for index in 0..drafts as usize {
        all.push(best.map_or(history[position], |best| all[best + 1 + index]));
    }
    all.split_off(history.len())
}

pub(super) fn reference_note_tokens(call: &Call, memory: &mut HostMemory) {
    let a = NoteTokensArgs::from_args(&call.args);
    for row in 0..a.row_count {
        let [token, position, slot, valid] = std::array::from_fn(|i| memory.u32(a.rows, row * 4 + i as u32));
        if valid != 0 && position < a.stride {
            memory.set_u32(a.history, slot * a.stride + position, token);
        }
    }
}

pub(super) fn reference_look_up(call: &Call, memory: &mut HostMemory) {
    let a = LookUpArgs::from_args(&call.args);
    let c = LookUpConstants::from_values(&call.constants);
    for sequence in 0..call.groups[0] {
        let [_, _, slot, valid] = std::array::from_fn(|i| memory.u32(a.rows, sequence * c.each * 4 + i as u32));
        let at = slot.wrapping_mul(SLOT_WORDS);
        if valid == 0 || memory.u32(a.slots, at + SLOT_ACTIVE) != ACTIVE_RUNNING {
            continue;
        }
        let position = memory.u32(a.slots, at + SLOT_POSITION);
        let mut history: Vec<u32> = (0..position).map(|i| memory.u32(a.history, slot * a.stride + i)).collect();
        history.push(memory.u32(a.slots, at + SLOT_TOKEN));
        for (index, draft) in (0..).zip(looked_up(&history, c.drafts)) {
            memory.set_u32(a.slots, at + SLOT_DRAFTS + index, draft);
        }
    }
}

/// Returns the call that writes the descriptor of the drafting pass over rows that the model has computed and drawn
/// from: all rows with `step` 0, or one row per sequence for the `step`-th draft token.
pub fn next_tokens(label: String, rows: VerifyRows, step: u32, args: NextTokensArgs) -> Call {
    assert!(step == 0 || (step <= MOST_DRAFTS && rows.each == 1), "step {step} of {} rows a sequence", rows.each);
    let VerifyRows { sequences, each } = rows;
    let constants = NextTokensConstants { threads: 32, rows: sequences * each, each, step };
    Call { kernel: "next_tokens", label, constants: constants.into_values(), args: args.into_args(), groups: [1, 1, 1] }
}

/// The source of the slots of a draft model's pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotsFrom {
    /// The slots of the batch.
    Batch,
    /// The row table of a step, with this many rows a sequence.
    Rows {
        /// The number of rows.
        each: u32,
    },
}

/// Returns the call that writes the descriptor of a draft model's pass: of the last two tokens of each of `sequences`
/// sequences with `step` 0, of their `step`-th draft token otherwise. `args.batch` is what `from` says.
pub fn draft_rows(label: String, sequences: u32, step: u32, from: SlotsFrom, args: DraftRowsArgs) -> Call {
    assert!(step < MOST_DRAFTS, "step {step}");
    let each = match from {
        SlotsFrom::Batch => 0,
        SlotsFrom::Rows { each } => each,
    };
    let constants = DraftRowsConstants { threads: 32, rows: sequences, step, each };
    Call { kernel: "draft_rows", label, constants: constants.into_values(), args: args.into_args(), groups: [1, 1, 1] }
}

/// Returns the call that writes the descriptor of the drafting pass over a prompt step.
pub fn shift_tokens(label: String, args: ShiftTokensArgs) -> Call {
    let threads = 64;
    let groups = args.rows.div_ceil(threads);
    let args = ShiftTokensArgs { rows: groups * threads, ..args };
    Call {
        kernel: "shift_tokens",
        label,
        constants: ShiftTokensConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [groups, 1, 1],
    }
}

/// Returns the call that writes the input of a draft block's projection for `rows` rows.
pub fn join_norms(label: String, rows: u32, args: JoinNormsArgs) -> Call {
    Call {
        kernel: "join_norms",
        label,
        constants: JoinNormsConstants { threads: 128 }.into_values(),
        args: args.into_args(),
        groups: [rows, 1, 1],
    }
}

/// Returns the call that writes the first `width` floats of each of `rows` rows of x to the rows of y, from float `first` on:
/// normed, if there is a norm. The second part of `norm` is its epsilon.
pub fn join_rows(
    label: String,
    (rows, width): (u32, u32),
    x: Activations,
    norm: Option<(Range, f32)>,
    (y, first): (Activations, u32),
) -> Call {
    assert!(
        width <= x.stride && first + width <= y.stride,
        "{width} floats of {} at {first} of {}",
        x.stride,
        y.stride
    );
    let args = JoinRowsArgs {
        x: x.range,
        norm: norm.map_or(x.range.none(), |(norm, _)| norm),
        y: y.range,
        width,
        x_stride: x.stride,
        y_stride: y.stride,
        first,
        epsilon: norm.map_or(0.0, |(_, epsilon)| epsilon),
    };
    Call {
        kernel: "join_rows",
        label,
        constants: JoinRowsConstants { threads: 128, norm: u32::from(norm.is_some()) }.into_values(),
        args: args.into_args(),
        groups: [rows, 1, 1],
    }
}

/// Returns the call that stores the best token of each row as draft token `index` of its slot. If `token_ids` is not empty,
/// that of a vocabulary whose tokens it lists.
pub fn store_draft(label: String, index: u32, args: StoreDraftArgs) -> Call {
    assert!(index < MOST_DRAFTS, "draft {index}");
    let threads = 32;
    Call {
        kernel: "store_draft",
        label,
        constants: StoreDraftConstants { threads, index, mapped: u32::from(args.token_ids.bytes > 0) }.into_values(),
        args: args.into_args(),
        groups: [args.row_count.div_ceil(threads), 1, 1],
    }
}

fn slot_word(memory: &HostMemory, slots: Range, slot: u32, word: u32) -> u32 {
    memory.u32(slots, slot * SLOT_WORDS + word)
}

pub(super) fn reference_verify_rows(call: &Call, memory: &mut HostMemory) {
    let a = VerifyRowsArgs::from_args(&call.args);
    let c = VerifyRowsConstants::from_values(&call.constants);
    for (i, word) in (0..).zip([c.rows, 0, c.rows * c.each, 0]) {
        memory.set_u32(a.chunk, i, word);
    }
    for index in 0..c.rows {
        let slot = memory.u32(a.batch, index);
        let runs = slot != u32::MAX && slot_word(memory, a.slots, slot, SLOT_ACTIVE) == ACTIVE_RUNNING;
        let word = |memory: &HostMemory, word| if runs { slot_word(memory, a.slots, slot, word) } else { 0 };
        let prompt = [if runs { slot } else { u32::MAX }, word(memory, SLOT_POSITION), index * c.each, 0];
        for (i, word) in (0..).zip(prompt) {
            memory.set_u32(a.chunk, 4 + 4 * index + i, word);
        }
        for offset in 0..c.each {
            let row = index * c.each + offset;
            let token = word(memory, if offset == 0 { SLOT_TOKEN } else { SLOT_DRAFTS + offset - 1 });
            memory.set_u32(a.chunk, a.tokens_at + row, token);
        }
    }
}

pub(super) fn reference_next_tokens(call: &Call, memory: &mut HostMemory) {
    let a = NextTokensArgs::from_args(&call.args);
    let c = NextTokensConstants::from_values(&call.constants);
    let sequences = c.rows / c.each;
    for (i, word) in (0..).zip([sequences, sequences, c.rows, 0]) {
        memory.set_u32(a.next, i, word);
    }
    for row in 0..c.rows {
        let [_, own, slot, valid] = std::array::from_fn(|i| memory.u32(a.rows, row * 4 + i as u32));
        let slot = if valid == 0 { 0 } else { slot };
        let drawn = slot_word(memory, a.slots, slot, SLOT_POSITION);
        let position = if c.step == 0 { own } else { drawn + c.step - 1 };
        if row % c.each == 0 {
            let index = row / c.each;
            let draws = c.step > 0 || drawn != own;
            let runs = valid != 0 && draws && slot_word(memory, a.slots, slot, SLOT_ACTIVE) == ACTIVE_RUNNING;
            let prompt = [if runs { slot } else { u32::MAX }, position, row, 0];
            for (i, word) in (0..).zip(prompt) {
                memory.set_u32(a.next, 4 + 4 * index + i, word);
            }
            let accepted = if c.step == 0 && runs { (drawn - own).min(c.each) } else { 1 };
            memory.set_u32(a.next, a.last_at + index, row + accepted - 1);
        }
        let token = if c.step > 0 {
            slot_word(memory, a.slots, slot, SLOT_DRAFTS + c.step - 1)
        } else if position + 1 == drawn {
            slot_word(memory, a.slots, slot, SLOT_TOKEN)
        } else {
            memory.u32(a.rows, (row + 1).min(c.rows - 1) * 4)
        };
        memory.set_u32(a.next, a.tokens_at + row, if valid == 0 { 0 } else { token });
    }
}

pub(super) fn reference_draft_rows(call: &Call, memory: &mut HostMemory) {
    let a = DraftRowsArgs::from_args(&call.args);
    let c = DraftRowsConstants::from_values(&call.constants);
    let each = if c.step == 0 { 2 } else { 1 };
    for (i, word) in (0..).zip([c.rows, c.rows, c.rows * each, 0]) {
        memory.set_u32(a.next, i, word);
    }
    for index in 0..c.rows {
        let row = |word: u32| memory.u32(a.batch, index * c.each * 4 + word);
        let slot = match c.each {
            0 => memory.u32(a.batch, index),
            _ if row(3) == 0 => u32::MAX,
            _ => row(2),
        };
        let runs = slot != u32::MAX && slot_word(memory, a.slots, slot, SLOT_ACTIVE) == ACTIVE_RUNNING;
        let own = if runs { slot_word(memory, a.slots, slot, SLOT_POSITION) } else { 0 };
        let first = if c.step == 0 { own.saturating_sub(1) } else { own + c.step };
        let prompt = [if runs { slot } else { u32::MAX }, if runs { first } else { 0 }, index * each, 0];
        for (i, word) in (0..).zip(prompt) {
            memory.set_u32(a.next, 4 + 4 * index + i, word);
        }
        memory.set_u32(a.next, a.last_at + index, index * each + if c.step == 0 { own - first } else { 0 });
        for offset in 0..each {
            let token = match c.step {
                _ if !runs => 0,
                0 if first + offset < own => memory.u32(a.history, slot * a.stride + first + offset),
                0 => slot_word(memory, a.slots, slot, SLOT_TOKEN),
                step => slot_word(memory, a.slots, slot, SLOT_DRAFTS + step - 1),
            };
            memory.set_u32(a.next, a.tokens_at + index * each + offset, token);
        }
    }
}

pub(super) fn reference_shift_tokens(call: &Call, memory: &mut HostMemory) {
    let a = ShiftTokensArgs::from_args(&call.args);
    let [prompts, lasts, used, _] = std::array::from_fn(|i| memory.u32(a.chunk, i as u32));
    for word in (0..4 + 4 * prompts).chain(a.last_at..a.last_at + lasts) {
        let value = memory.u32(a.chunk, word);
        memory.set_u32(a.next, word, value);
    }
    for prompt in 0..prompts {
        let first = |prompt: u32| memory.u32(a.chunk, 4 + 4 * prompt + 2);
        let rows = first(prompt)..if prompt + 1 < prompts { first(prompt + 1) } else { used };
        for row in rows.clone() {
            let at = if row + 1 < rows.end { a.tokens_at + row + 1 } else { a.cells_at + 8 * prompt + 6 };
            let token = memory.u32(a.chunk, at);
            memory.set_u32(a.next, a.tokens_at + row, token);
        }
    }
}

pub(super) fn reference_join_norms(call: &Call, memory: &mut HostMemory) {
    let a = JoinNormsArgs::from_args(&call.args);
    let norm = |memory: &HostMemory, x: Vec<f64>, weight: Range| super::gemm::normed(memory, x, weight, a.epsilon);
    for row in 0..call.groups[0] {
        let values = |memory: &HostMemory, range| -> Vec<f64> {
            (0..a.width).map(|i| f64::from(memory.f32(range, row * a.stride + i))).collect()
        };
        let e = norm(memory, values(memory, a.e), a.e_norm);
        let h = norm(memory, values(memory, a.h), a.final_norm);
        let h = norm(memory, h, a.h_norm);
        for (i, value) in (0..).zip(e.into_iter().chain(h)) {
            memory.set_f32(a.y, row * a.y_stride + i, value as f32);
        }
    }
}

pub(super) fn reference_join_rows(call: &Call, memory: &mut HostMemory) {
    let a = JoinRowsArgs::from_args(&call.args);
    let c = JoinRowsConstants::from_values(&call.constants);
    for row in 0..call.groups[0] {
        let x: Vec<f64> = (0..a.width).map(|i| f64::from(memory.f32(a.x, row * a.x_stride + i))).collect();
        let y = if c.norm == 1 { super::gemm::normed(memory, x, a.norm, a.epsilon) } else { x };
        for (i, value) in (0..).zip(y) {
            memory.set_f32(a.y, row * a.y_stride + a.first + i, value as f32);
        }
    }
}

pub(super) fn reference_store_draft(call: &Call, memory: &mut HostMemory) {
    let a = StoreDraftArgs::from_args(&call.args);
    let c = StoreDraftConstants::from_values(&call.constants);
    for row in 0..a.row_count {
        let [_, _, slot, valid] = std::array::from_fn(|i| memory.u32(a.rows, row * 4 + i as u32));
        if valid == 0 {
            continue;
        }
        let mut best = (0, 0);
        for part in 0..a.parts {
            let at = (row * a.parts + part) * 2;
            let (key, token) = (key_of(memory.f32(a.partials, at)), memory.u32(a.partials, at + 1));
            if token != TOKEN_NONE && (key > best.0 || (key == best.0 && token < best.1)) {
                best = (key, token);
            }
        }
        let token = if c.mapped == 1 { memory.u32(a.token_ids, best.1) } else { best.1 };
        memory.set_u32(a.slots, slot * SLOT_WORDS + SLOT_DRAFTS + c.index, token);
    }
}

//! The kernels of speculative decoding: the rows of a verification step and of a drafting pass, the input of a draft
//! (MTP) block, and the storage of its draft tokens. Not here: the products and attention of both, which are those of
//! prompts, and the drawing of tokens (`sampling`), which decides which draft tokens are accepted.

use super::deterministic::key_of;
use super::host_memory::HostMemory;
use super::recording::{Call, Range};
use super::shaders::{
    JoinNormsArgs, JoinNormsConstants, NextTokensArgs, NextTokensConstants, ShiftTokensArgs, ShiftTokensConstants,
    StoreDraftArgs, StoreDraftConstants, VerifyRowsArgs, VerifyRowsConstants,
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
    /// The number of attention tiles per sequence.
    pub tiles: u32,
}

/// Returns the call that writes the descriptor of a verification step from the batch and its slots' draft tokens, all
/// but the cells.
pub fn verify_rows(label: String, rows: VerifyRows, args: VerifyRowsArgs) -> Call {
    assert!((1..=MOST_DRAFTS + 1).contains(&rows.each), "{} rows of a sequence", rows.each);
    let VerifyRows { sequences, each, tiles } = rows;
    Call {
        kernel: "verify_rows",
        label,
        constants: VerifyRowsConstants { threads: 32, rows: sequences, each, tiles }.into_values(),
        args: args.into_args(),
        groups: [1, 1, 1],
    }
}

/// Returns the call that writes the descriptor of the drafting pass over rows that the model has computed and drawn
/// from: all rows with `step` 0, or one row per sequence for the `step`-th draft token.
pub fn next_tokens(label: String, rows: VerifyRows, step: u32, args: NextTokensArgs) -> Call {
    assert!(step == 0 || (step <= MOST_DRAFTS && rows.each == 1), "step {step} of {} rows a sequence", rows.each);
    let VerifyRows { sequences, each, tiles } = rows;
    let constants = NextTokensConstants { threads: 32, rows: sequences * each, each, tiles, step };
    Call { kernel: "next_tokens", label, constants: constants.into_values(), args: args.into_args(), groups: [1, 1, 1] }
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

/// Returns the call that stores the best token of each row as draft token `index` of its slot.
pub fn store_draft(label: String, index: u32, args: StoreDraftArgs) -> Call {
    assert!(index < MOST_DRAFTS, "draft {index}");
    let threads = 32;
    Call {
        kernel: "store_draft",
        label,
        constants: StoreDraftConstants { threads, index }.into_values(),
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
    for (i, word) in (0..).zip([c.rows, 0, c.rows * c.each, c.rows * c.tiles]) {
        memory.set_u32(a.chunk, i, word);
    }
    for index in 0..c.rows {
        let slot = memory.u32(a.batch, index);
        let runs = slot != u32::MAX && slot_word(memory, a.slots, slot, SLOT_ACTIVE) == ACTIVE_RUNNING;
        let word = |memory: &HostMemory, word| if runs { slot_word(memory, a.slots, slot, word) } else { 0 };
        let prompt = [if runs { slot } else { u32::MAX }, word(memory, SLOT_POSITION), index * c.each, index * c.tiles];
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
    for (i, word) in (0..).zip([sequences, sequences, c.rows, sequences * c.tiles]) {
        memory.set_u32(a.next, i, word);
    }
    for row in 0..c.rows {
        let [_, own, slot, valid] = std::array::from_fn(|i| memory.u32(a.rows, row * 4 + i as u32));
        let slot = if valid == 0 { 0 } else { slot };
        let drawn = slot_word(memory, a.slots, slot, SLOT_POSITION);
        let position = if c.step == 0 { own } else { drawn + c.step - 1 };
        if row % c.each == 0 {
            let index = row / c.each;
            let runs = valid != 0 && slot_word(memory, a.slots, slot, SLOT_ACTIVE) == ACTIVE_RUNNING;
            let prompt = [if runs { slot } else { u32::MAX }, position, row, index * c.tiles];
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
        memory.set_u32(a.slots, slot * SLOT_WORDS + SLOT_DRAFTS + c.index, best.1);
    }
}

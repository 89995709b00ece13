//! The sampling kernels `sample`, `argmax`, `advance`, `patch`, `clear_counts` and `mark_prompt`: from logits to the
//! next token, and the updates of the state around it. Not here: stop strings (the host handles text) and the choice of
//! the slots that run.

pub mod score;
pub mod shared;

use crate::kernels::deterministic::{
    KEY_MINUS_INFINITY, exp_negative, gumbel, key_of, mass_of, philox, token_bits, value_of,
};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{
    AdvanceArgs, AdvanceConstants, ArgmaxArgs, ArgmaxConstants, ClearCountsArgs, ClearCountsConstants, MarkPromptArgs,
    MarkPromptConstants, PatchArgs, PatchConstants, SampleArgs, SampleConstants,
};
use crate::kernels::state::*;

/// The number of words in an inbox before its entries; the first is the number of entries.
pub const INBOX_HEADER: u32 = 4;

/// Returns the number of words in a row of logits: the vocabulary's size, rounded up because rows are read 16 bytes at
/// a time.
pub fn row_stride(vocabulary: u32) -> u32 {
    vocabulary.next_multiple_of(4)
}

/// Returns the size of `logits`, and of the scratch buffer `keys`, for `rows` rows, in bytes.
pub fn logits_bytes(rows: u32, vocabulary: u32) -> u64 {
    u64::from(rows) * u64::from(row_stride(vocabulary)) * 4
}

/// Returns the size of `state` in bytes.
pub fn state_bytes(slots: u32) -> u64 {
    u64::from(slots) * u64::from(SLOT_WORDS) * 4
}

/// Returns the size of `bias` in bytes.
pub fn bias_bytes(slots: u32) -> u64 {
    u64::from(slots) * u64::from(BIAS_ENTRIES) * 8
}

/// Returns the size of `counts` in bytes.
pub fn counts_bytes(slots: u32, vocabulary: u32) -> u64 {
    u64::from(slots) * u64::from(vocabulary) * 4
}

/// Returns the number of words in a slot's row in `masks`: bit `i % 32` of word `i / 32` stands for token `i`.
pub fn mask_words(vocabulary: u32) -> u32 {
    vocabulary.div_ceil(32)
}

/// Returns the size of `masks` in bytes.
pub fn masks_bytes(slots: u32, vocabulary: u32) -> u64 {
    u64::from(slots) * u64::from(mask_words(vocabulary)) * 4
}

/// Returns the size of `ring` in bytes.
pub fn ring_bytes(ring_steps: u32, ring_rows: u32) -> u64 {
    u64::from(ring_steps) * u64::from(ring_rows) * u64::from(ENTRY_WORDS + TOP_WORDS) * 4
}

/// Returns the size of the inbox of a `patch` of at most `pairs` pairs, in bytes.
pub fn patch_bytes(pairs: u32) -> u64 {
    u64::from(INBOX_HEADER + 2 * pairs) * 4
}

/// Returns the size of the inbox of a `clear_counts` of at most `slots` slots, in bytes.
pub fn clear_bytes(slots: u32) -> u64 {
    u64::from(INBOX_HEADER + slots) * 4
}

/// Returns the number of invocations of a workgroup of `sample` on a device whose workgroups have at most
/// `max_invocations`. One workgroup processes a row, so it should have as many loads in flight as possible. The result
/// does not depend on the number.
pub fn sample_threads(max_invocations: u32) -> u32 {
    match max_invocations {
        1024.. => 1024,
        512.. => 512,
        256.. => 256,
        _ => 128,
    }
}

/// The changes of a buffer's words, from which inboxes of `patch` are filled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Patch {
    /// Offset and value, in the order in which they were set.
    words: Vec<[u32; 2]>,
}

impl Patch {
    /// Sets a word. If an offset is set several times, the last value counts.
    pub fn set(&mut self, offset: u32, value: u32) {
        self.words.push([offset, value]);
    }

    /// Sets consecutive words.
    pub fn set_all(&mut self, offset: u32, values: &[u32]) {
        self.words.extend((offset..).zip(values).map(|(at, value)| [at, *value]));
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the pairs in ascending order, each offset once, because a kernel applies them in any order.
    pub fn into_pairs(self) -> Vec<[u32; 2]> {
        let mut words = self.words;
        // The sort is stable: equal offsets stay in the order in which they were set.
        words.sort_by_key(|[offset, _]| *offset);
        words.reverse();
        words.dedup_by_key(|[offset, _]| *offset);
        words.reverse();
        words
    }
}

/// Returns the words of an inbox of `patch`.
pub fn patch_inbox(pairs: &[[u32; 2]]) -> Vec<u32> {
    let mut inbox = vec![pairs.len() as u32, 0, 0, 0];
    inbox.extend(pairs.iter().flatten());
    inbox
}

/// Returns the words of an inbox of `clear_counts`.
pub fn clear_inbox(slots: &[u32]) -> Vec<u32> {
    let mut inbox = vec![slots.len() as u32, 0, 0, 0];
    inbox.extend(slots);
    inbox
}

// Bits of the argument `options` of `sample`, as in its source.
const OPTION_HEEDS_FAULT: u32 = 1;
const OPTION_COUNTS_STEP: u32 = 2;
const OPTION_LAGS: u32 = 4;
const OPTION_DRAWN: u32 = 8;

/// Properties of the step whose logits are sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampledStep {
    /// Whether the replica's decode steps may fault; then no row is drawn while the fault word is set.
    pub heeds_fault: bool,
    /// Whether the step's `delta_step` leaves tokens pending, so that the recurrent state lags behind by the row's
    /// token.
    pub lags: bool,
    /// Whether tokens may be drawn before from the parts of rows that several devices have ([`shared`]).
    pub shared: bool,
}

/// Returns the call that draws the next token of `rows` rows, advances their slots and writes their ring entries.
/// `partials` may be any range (`Range::none`) if `partial_count` is 0. With a single row, the call increments the step
/// number itself and needs no `advance`. The function sets `every`, `first` and `options`.
pub fn sample(label: String, rows: u32, threads: u32, step: SampledStep, args: SampleArgs) -> Call {
    let options = step.options() | if rows == 1 { OPTION_COUNTS_STEP } else { 0 };
    sample_rows(label, rows, threads, SampleArgs { every: 1, first: 0, options, ..args })
}

impl SampledStep {
    fn options(self) -> u32 {
        let options = [(self.heeds_fault, OPTION_HEEDS_FAULT), (self.lags, OPTION_LAGS), (self.shared, OPTION_DRAWN)];
        options.into_iter().filter(|(chosen, _)| *chosen).map(|(_, bit)| bit).sum()
    }
}

/// Returns the call that draws from row `first` of the `every` rows of each of `sequences` sequences, if the row before
/// it drew the draft token that the row holds. The function sets `every`, `first` and `options`.
pub fn sample_drafts(
    label: String,
    sequences: u32,
    (every, first): (u32, u32),
    threads: u32,
    step: SampledStep,
    args: SampleArgs,
) -> Call {
    assert!(first < every, "row {first} of {every}");
    sample_rows(label, sequences, threads, SampleArgs { every, first, options: step.options(), ..args })
}

fn sample_rows(label: String, rows: u32, threads: u32, args: SampleArgs) -> Call {
    debug_assert!(
        args.row_stride.is_multiple_of(4) && args.row_stride >= args.vocabulary,
        "rows are read 16 bytes at a time"
    );
    let constants = SampleConstants { threads }.into_values();
    Call { kernel: "sample", label, constants, args: args.into_args(), groups: [rows, 1, 1] }
}

/// The number of parts into which `argmax` divides a row of logits.
pub const ARGMAX_PARTS: u32 = 64;

/// Returns the size of the partial maxima of `rows` rows in bytes.
pub fn partials_bytes(rows: u32) -> u64 {
    u64::from(rows) * u64::from(ARGMAX_PARTS) * 8
}

/// Returns the call that writes the maximum of each of `args.parts` parts ([`ARGMAX_PARTS`] in a model) of each row,
/// for `sample`.
pub fn argmax(label: String, rows: u32, threads: u32, args: ArgmaxArgs) -> Call {
    Call {
        kernel: "argmax",
        label,
        constants: ArgmaxConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [args.parts, rows, 1],
    }
}

pub(crate) fn reference_argmax(call: &Call, memory: &mut HostMemory) {
    let args = ArgmaxArgs::from_args(&call.args);
    let quads = args.vocabulary.div_ceil(4);
    let each = quads.div_ceil(args.parts);
    for row in 0..call.groups[1] {
        for part in 0..args.parts {
            let tokens = (part * each * 4)..((part + 1) * each * 4).min(args.vocabulary);
            let mut best: Option<(u32, u32)> = None;
            for token in tokens {
                let key = key_of(memory.f32(args.logits, row * args.row_stride + token));
                if best.is_none_or(|(most, _)| key > most) {
                    best = Some((key, token));
                }
            }
            let (bits, token) = best.map_or((f32::NEG_INFINITY.to_bits(), u32::MAX), |(key, token)| {
                (value_of(key).to_bits(), args.first + token)
            });
            let at = (row * args.parts + part) * 2;
            memory.set_u32(args.partials, at, bits);
            memory.set_u32(args.partials, at + 1, token);
        }
    }
}

/// Returns the call that increments the step number: the last call of a region that sampled.
pub fn advance(label: String, args: AdvanceArgs) -> Call {
    Call {
        kernel: "advance",
        label,
        constants: AdvanceConstants { threads: 1 }.into_values(),
        args: args.into_args(),
        groups: [1, 1, 1],
    }
}

/// Returns the call that writes the words of an inbox to a buffer.
pub fn patch(label: String, args: PatchArgs) -> Call {
    Call {
        kernel: "patch",
        label,
        constants: PatchConstants { threads: 128 }.into_values(),
        args: args.into_args(),
        groups: [1, 1, 1],
    }
}

/// Returns the call that zeroes the counts of the slots in an inbox of at most `capacity` slots.
pub fn clear_counts(label: String, capacity: u32, args: ClearCountsArgs) -> Call {
    let threads = 128;
    Call {
        kernel: "clear_counts",
        label,
        constants: ClearCountsConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [args.vocabulary.div_ceil(threads), capacity, 1],
    }
}

/// Returns the call that enters the rows of a prompt chunk in the counts of the slots with penalties.
pub fn mark_prompt(label: String, args: MarkPromptArgs) -> Call {
    let threads = 128;
    Call {
        kernel: "mark_prompt",
        label,
        constants: MarkPromptConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [args.row_count.div_ceil(threads), 1, 1],
    }
}

/// The tables that sampling reads for a slot, in addition to the slot's words.
#[derive(Clone, Copy, Debug)]
pub struct SlotTables<'a> {
    /// The slot's row of `counts`; read only with `FLAG_PENALTIES`.
    pub counts: &'a [u32],
    /// The slot's row of `bias`; read only with `FLAG_BIAS`.
    pub bias: &'a [u32],
    /// The slot's row of `masks`; read only with `FLAG_MASK`.
    pub mask: &'a [u32],
}

/// The result of a draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The drawn token.
    pub token: u32,
    /// The token's log probability; 0 if the slot has no `FLAG_LOGPROBS`.
    pub logprob: f32,
    /// The most probable tokens, best first; empty if the slot has no `FLAG_LOGPROBS`.
    pub top: Vec<(u32, f32)>,
    /// The adjusted logits as keys, if biases, penalties, a mask or masked stop ids changed them.
    pub keys: Option<Vec<u32>>,
}

fn float(words: &[u32], at: u32) -> f32 {
    f32::from_bits(words[at as usize])
}

fn flag(slot: &[u32], bit: u32) -> bool {
    slot[SLOT_FLAGS as usize] & bit != 0
}

/// Whether stop ids are masked: until `min_tokens` tokens were drawn.
fn masks_stops(slot: &[u32]) -> bool {
    slot[SLOT_MIN_LEFT as usize] > 0 && slot[SLOT_STOP_COUNT as usize] > 0
}

fn stop_ids(slot: &[u32]) -> &[u32] {
    let first = SLOT_STOP_IDS as usize;
    &slot[first..first + slot[SLOT_STOP_COUNT as usize].min(STOP_ENTRIES) as usize]
}

/// Returns the keys of the logits after biases, penalties and masks.
pub fn adjusted_keys(logits: &[f32], slot: &[u32], tables: SlotTables<'_>) -> Vec<u32> {
    let penalised = |token: usize, value: f32| {
        let count = if flag(slot, FLAG_PENALTIES) { tables.counts[token] } else { 0 };
        let mut l = value;
        if count != 0 {
            l *= if l > 0.0 { float(slot, SLOT_REPETITION_INVERSE) } else { float(slot, SLOT_REPETITION) };
        }
        let times = count & !COUNT_PROMPT;
        if times != 0 {
            l -= float(slot, SLOT_FREQUENCY) * times as f32;
            l -= float(slot, SLOT_PRESENCE);
        }
        key_of(l)
    };
    let plain = |token: usize| value_of(key_of(logits[token]));
    let mut keys: Vec<u32> = (0..logits.len()).map(|token| penalised(token, plain(token))).collect();
    if flag(slot, FLAG_BIAS) {
        let count = slot[SLOT_BIAS_COUNT as usize].min(BIAS_ENTRIES) as usize;
        for entry in tables.bias.chunks_exact(2).take(count) {
            let token = entry[0] as usize;
            if token < keys.len() {
                keys[token] = penalised(token, plain(token) + f32::from_bits(entry[1]));
            }
        }
    }
    if flag(slot, FLAG_MASK) {
        for (token, key) in keys.iter_mut().enumerate() {
            if tables.mask[token / 32] >> (token % 32) & 1 == 0 {
                *key = KEY_MINUS_INFINITY;
            }
        }
    }
    if masks_stops(slot) {
        for token in stop_ids(slot) {
            if let Some(key) = keys.get_mut(*token as usize) {
                *key = KEY_MINUS_INFINITY;
            }
        }
    }
    keys
}

/// Returns the distance of a key from the greatest one, divided by the temperature.
fn distance(key: u32, most: f32, temperature_inverse: f32) -> f32 {
    (value_of(key) - most) * temperature_inverse
}

/// Returns the tokens among which a slot draws, in ascending order: min-p, then top-k, then top-p, each applied to what
/// the previous filter kept, with all tokens that are equal to the last one kept. It sorts, where the kernel uses
/// histograms.
pub fn survivors(keys: &[u32], slot: &[u32]) -> Vec<u32> {
    let inverse = float(slot, SLOT_TEMPERATURE_INVERSE);
    let mut sorted: Vec<u32> = keys.iter().copied().filter(|k| *k > KEY_MINUS_INFINITY).collect();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let Some(&best) = sorted.first() else {
        return Vec::new();
    };
    let most = value_of(best);
    if float(slot, SLOT_MIN_P) > 0.0 {
        sorted.retain(|k| distance(*k, most, inverse) >= float(slot, SLOT_MIN_P_LOG));
    }
    let cut = |sorted: &mut Vec<u32>, kept: usize| {
        let last = sorted[kept.min(sorted.len()) - 1];
        sorted.retain(|k| *k >= last);
    };
    let top_k = slot[SLOT_TOP_K as usize] as usize;
    if top_k > 0 {
        cut(&mut sorted, top_k);
    }
    let top_p = float(slot, SLOT_TOP_P);
    if top_p < 1.0 {
        let masses: Vec<u64> = sorted.iter().map(|k| u64::from(mass_of(distance(*k, most, inverse)))).collect();
        let total: u64 = masses.iter().sum();
        let fraction = (top_p.max(0.0) * 4_294_967_296.0) as u32;
        let target = (u128::from(total) * u128::from(fraction)).div_ceil(1 << 32) as u64;
        let mut sum = 0;
        let kept = masses.iter().position(|mass| {
            sum += mass;
            sum >= target
        });
        cut(&mut sorted, kept.map_or(masses.len(), |k| k + 1));
    }
    let least = sorted[sorted.len() - 1];
    (0..keys.len() as u32).filter(|token| keys[*token as usize] >= least).collect()
}

/// Draws a token from a row of logits: what `sample` computes, without its updates of the state.
pub fn draw(logits: &[f32], slot: &[u32], tables: SlotTables<'_>) -> Drawn {
    let changed = [FLAG_PENALTIES, FLAG_BIAS, FLAG_MASK].into_iter().any(|bit| flag(slot, bit)) || masks_stops(slot);
    let keys = if changed { adjusted_keys(logits, slot, tables) } else { logits.iter().map(|l| key_of(*l)).collect() };
    let first_best = |scores: &mut dyn Iterator<Item = (u32, u32)>| {
        scores.fold((0, TOKEN_NONE), |best, (key, token)| if key > best.0 { (key, token) } else { best })
    };
    let best = first_best(&mut keys.iter().copied().zip(0..));
    let most = value_of(best.0);
    let mut token = best.1;
    if float(slot, SLOT_TEMPERATURE) > 0.0 && best.0 > KEY_MINUS_INFINITY {
        let inverse = float(slot, SLOT_TEMPERATURE_INVERSE);
        let seed = [slot[SLOT_SEED_LOW as usize], slot[SLOT_SEED_HIGH as usize]];
        let draw_key = philox(slot[SLOT_GENERATED as usize], seed);
        let mut scores = survivors(&keys, slot).into_iter().map(|t| {
            let score = distance(keys[t as usize], most, inverse) + gumbel(token_bits(t, draw_key));
            (key_of(score), t)
        });
        token = first_best(&mut scores).1;
    }
    let mut logprob = 0.0;
    let mut top = Vec::new();
    if flag(slot, FLAG_LOGPROBS) {
        let finite = || keys.iter().copied().zip(0u32..).filter(|(key, _)| *key > KEY_MINUS_INFINITY);
        let sum: f64 = finite().map(|(key, _)| f64::from(exp_negative(value_of(key) - most))).sum();
        let of = |key: u32| (f64::from(value_of(key)) - f64::from(most) - sum.ln()) as f32;
        logprob = if best.0 > KEY_MINUS_INFINITY { of(keys[token as usize]) } else { f32::NEG_INFINITY };
        let mut order: Vec<(u32, u32)> = finite().collect();
        order.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        order.truncate(slot[SLOT_TOP_N as usize].min(TOP_ENTRIES) as usize);
        top = order.into_iter().map(|(key, token)| (token, of(key))).collect();
    }
    Drawn { token, logprob, top, keys: changed.then_some(keys) }
}

fn words(memory: &HostMemory, range: Range, first: u32, count: u32) -> Vec<u32> {
    (first..first + count).map(|i| memory.u32(range, i)).collect()
}

/// Returns the token of a row that `draw_shortlisted` has drawn, or the best of all devices' parts of a greedy row, if the row
/// has no conditions.
fn token_before(args: &SampleArgs, memory: &HostMemory, row: u32, slot: &[u32]) -> Option<u32> {
    if args.options & OPTION_DRAWN == 0 || slot[SLOT_FLAGS as usize] != 0 || masks_stops(slot) {
        return None;
    }
    let first = 2 * row * (args.partial_count + 1);
    if float(slot, SLOT_TEMPERATURE) > 0.0 {
        let pair = [0, 1].map(|i| memory.u32(args.partials, first + 2 * args.partial_count + i));
        return (pair[1] != 0).then_some(pair[0]);
    }
    let pairs = (0..args.partial_count).map(|i| [0, 1].map(|at| memory.u32(args.partials, first + 2 * i + at)));
    let best = shared::best_of(pairs);
    Some(best.1)
}

pub(crate) fn reference_sample(call: &Call, memory: &mut HostMemory) {
    let args = SampleArgs::from_args(&call.args);
    let vocabulary = args.vocabulary;
    let number = memory.u32(args.step_number, 0);
    let fault = args.options & OPTION_HEEDS_FAULT != 0 && memory.u32(args.fault, 0) != 0;
    if args.options & OPTION_COUNTS_STEP != 0 {
        memory.set_u32(args.step_number, 0, number.wrapping_add(1));
    }
    for sequence in 0..call.groups[0] {
        let row = sequence * args.every + args.first;
        let [token, position, slot, valid] = [0, 1, 2, 3].map(|i| memory.u32(args.rows, row * 4 + i));
        let entry = RingEntry::at(number, row, args.ring_steps, args.ring_rows) as u32;
        let at = slot.wrapping_mul(SLOT_WORDS);
        let word = |word: u32| memory.u32(args.state, at + word);
        let follows = || args.first == 0 || (word(SLOT_TOKEN), word(SLOT_POSITION)) == (token, position);
        if valid == 0 || fault || word(SLOT_ACTIVE) != ACTIVE_RUNNING || !follows() {
            memory.set_u32(args.ring, entry + ENTRY_STEP, number);
            memory.set_u32(args.ring, entry + ENTRY_SLOT, slot);
            memory.set_u32(args.ring, entry + ENTRY_TOKEN, TOKEN_NONE);
            memory.set_u32(args.ring, entry + ENTRY_DONE, if fault { DONE_FAULT } else { DONE_NO });
            let word = if fault { memory.u32(args.fault, 0) } else { 0 };
            memory.set_u32(args.ring, entry + ENTRY_TOP_COUNT, word);
            continue;
        }
        let mut state = words(memory, args.state, at, SLOT_WORDS);
        let logits: Vec<f32> = (0..vocabulary).map(|i| memory.f32(args.logits, row * args.row_stride + i)).collect();
        let counts = if flag(&state, FLAG_PENALTIES) {
            words(memory, args.counts, slot * vocabulary, vocabulary)
        } else {
            Vec::new()
        };
        let bias = if flag(&state, FLAG_BIAS) {
            words(memory, args.bias, slot * BIAS_ENTRIES * 2, BIAS_ENTRIES * 2)
        } else {
            Vec::new()
        };
        let length = mask_words(vocabulary);
        let mask = if flag(&state, FLAG_MASK) { words(memory, args.masks, slot * length, length) } else { Vec::new() };
        let mut drawn = draw(&logits, &state, SlotTables { counts: &counts, bias: &bias, mask: &mask });
        if let Some(token) = token_before(&args, memory, row, &state) {
            drawn.token = token;
        }
        for (i, key) in drawn.keys.iter().flatten().enumerate() {
            memory.set_u32(args.keys, row * args.row_stride + i as u32, *key);
        }
        let token = drawn.token;
        let min_left = state[SLOT_MIN_LEFT as usize];
        let remaining = state[SLOT_REMAINING as usize].saturating_sub(1);
        let done = if min_left == 0 && stop_ids(&state).contains(&token) {
            DONE_STOP
        } else if remaining == 0 {
            DONE_LENGTH
        } else {
            DONE_NO
        };
        if flag(&state, FLAG_PENALTIES) {
            let count = memory.u32(args.counts, slot * vocabulary + token);
            memory.set_u32(args.counts, slot * vocabulary + token, count + 1);
        }
        state[SLOT_MIN_LEFT as usize] = min_left.saturating_sub(1);
        state[SLOT_TOKEN as usize] = token;
        state[SLOT_POSITION as usize] = position + 1;
        state[SLOT_REMAINING as usize] = remaining;
        state[SLOT_GENERATED as usize] += 1;
        if args.first == 0 {
            state[SLOT_SETTLED as usize] = if args.options & OPTION_LAGS == 0 { position + 1 } else { position };
        }
        if done != DONE_NO {
            state[SLOT_ACTIVE as usize] = ACTIVE_DONE;
        }
        for (i, word) in (at..).zip(state) {
            memory.set_u32(args.state, i, word);
        }
        memory.set_u32(args.ring, entry + ENTRY_STEP, number);
        memory.set_u32(args.ring, entry + ENTRY_SLOT, slot);
        memory.set_u32(args.ring, entry + ENTRY_TOKEN, token);
        memory.set_u32(args.ring, entry + ENTRY_DONE, done);
        memory.set_f32(args.ring, entry + ENTRY_LOGPROB, drawn.logprob);
        memory.set_u32(args.ring, entry + ENTRY_TOP_COUNT, drawn.top.len() as u32);
        let top = RingEntry::top_at(number, row, args.ring_steps, args.ring_rows) as u32;
        for (i, (token, logprob)) in (0..).zip(drawn.top) {
            memory.set_u32(args.ring, top + 2 * i, token);
            memory.set_f32(args.ring, top + 2 * i + 1, logprob);
        }
    }
}

pub(crate) fn reference_advance(call: &Call, memory: &mut HostMemory) {
    let args = AdvanceArgs::from_args(&call.args);
    let number = memory.u32(args.step_number, 0);
    memory.set_u32(args.step_number, 0, number.wrapping_add(1));
}

pub(crate) fn reference_patch(call: &Call, memory: &mut HostMemory) {
    let args = PatchArgs::from_args(&call.args);
    for i in 0..memory.u32(args.inbox, 0).min(args.capacity) {
        let offset = memory.u32(args.inbox, INBOX_HEADER + 2 * i);
        let value = memory.u32(args.inbox, INBOX_HEADER + 2 * i + 1);
        if offset < args.words {
            memory.set_u32(args.target, offset, value);
        }
    }
}

pub(crate) fn reference_clear_counts(call: &Call, memory: &mut HostMemory) {
    let args = ClearCountsArgs::from_args(&call.args);
    for i in 0..memory.u32(args.inbox, 0).min(call.groups[1]) {
        let slot = memory.u32(args.inbox, INBOX_HEADER + i);
        if slot < args.slots {
            for token in 0..args.vocabulary {
                memory.set_u32(args.counts, slot * args.vocabulary + token, 0);
            }
        }
    }
}

pub(crate) fn reference_mark_prompt(call: &Call, memory: &mut HostMemory) {
    let args = MarkPromptArgs::from_args(&call.args);
    for row in 0..args.row_count {
        let [token, position, slot, valid] = [0, 1, 2, 3].map(|i| memory.u32(args.rows, row * 4 + i));
        if valid == 0 || token >= args.vocabulary {
            continue;
        }
        let at = slot * SLOT_WORDS;
        if memory.u32(args.state, at + SLOT_FLAGS) & FLAG_PENALTIES == 0 {
            continue;
        }
        if position != 0 && position == memory.u32(args.state, at + SLOT_POSITION) {
            continue;
        }
        let count = memory.u32(args.counts, slot * args.vocabulary + token);
        let prompt = position < memory.u32(args.state, at + SLOT_PROMPT_TOKENS);
        let count = if prompt { count | COUNT_PROMPT } else { count + 1 };
        memory.set_u32(args.counts, slot * args.vocabulary + token, count);
    }
}

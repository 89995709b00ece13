//! The test at start of a split replica's decode steps without barriers: sequences decode a few tokens on all devices, as in
//! normal operation, once without barriers and once with them. Tokens and logits must be equal; a number of rows that fails
//! runs with barriers.
//! Not here: the same of a replica on one device (`overlap_test`), and faults at run time (`gpu::executor::split`).

use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::plan::{
    Capacity, Change, Chunk, PLANS_IN_FLIGHT, Page, PageTable, Sampled, Slot, SlotParams, StepPlan, Work,
};
use crate::engine::request::Sampling;
use crate::gpu::executor::split::SplitExecutor;
use crate::kernels::attention::PAGE_TOKENS;
use std::collections::BTreeSet;

/// The number of steps per plan, if the executor queues as many.
const STEPS: u32 = 4;
/// The number of pages of context before the tested tokens, if a slot can hold that many: enough to split attention.
const CONTEXT_PAGES: u32 = 40;

/// The result of a run of a few steps.
#[derive(Debug, PartialEq)]
struct Outcome {
    tokens: Vec<(Slot, u32)>,
    /// The logits of the first slot's last token, as f32 bits.
    logits: Vec<u32>,
}

impl Outcome {
    fn note(&mut self, drawn: Vec<Sampled>) {
        for Sampled { slot, id, details, .. } in drawn {
            self.tokens.push((slot, id));
            if let Some(logits) = details.and_then(|details| details.logits) {
                self.logits = logits.into_iter().map(f32::to_bits).collect();
            }
        }
    }
}

/// Tests every number of rows that decodes without barriers, and lets those that fail run with barriers. Returns the
/// failed ones, each with a description of the fault.
pub(crate) fn test_split(executor: &mut SplitExecutor) -> Result<Vec<(u32, String)>, ExecuteError> {
    let mut failed = Vec::new();
    for rows in executor.overlapping_rows() {
        executor.test(false);
        let found = run(executor, rows)?;
        executor.test(true);
        let wanted = run(executor, rows)?;
        let faults = executor.end_test();
        let why = match () {
            () if faults > 0 => "a call waited too long",
            () if found.tokens != wanted.tokens => "it draws other tokens",
            () if found != wanted => "its logits differ",
            () => continue,
        };
        executor.drop_overlap(rows);
        failed.push((rows, why.to_owned()));
    }
    Ok(failed)
}

/// The number of rounds of [`test_exchanges`] if kernels wait for other devices' words while they run, which Vulkan does not
/// promise.
const ROUNDS_OF_POLLS: u32 = 8;
/// The number of rounds if steps are divided at their exchanges, so that submissions and semaphores order all accesses.
const ROUNDS_OF_DIVIDED: u32 = 2;

/// The greatest root mean square of the differences of logits, in parts of their own, between a prompt that is computed in
/// microbatches and in two chunks of as many rows. Kernels for other numbers of rows may round otherwise; wrong rows or keys
/// change logits entirely.
const MICROBATCH_TOLERANCE: f64 = 0.1;

/// What a test at start has found about prompts in microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Microbatches {
    /// They are right, or there are none.
    Tested,
    /// No sequence has room for a prompt that is computed in them.
    Untested,
    /// Their logits are wrong.
    Wrong,
}

/// Tests the exchange of sums between devices that each have a part of every layer: decodes with one sequence and with as
/// many as a step holds, and computes a prompt in microbatches if there are any. It must get the same tokens and logits in every
/// round. `polls`: whether kernels wait for words of other devices. An exchange in which a word does not come is an error.
/// Unless microbatches are tested, and the logits of the prompt are those of the prompt in two chunks, prompts are computed whole.
pub(crate) fn test_exchanges(executor: &mut SplitExecutor, polls: bool) -> Result<Microbatches, ExecuteError> {
    let rounds = if polls { ROUNDS_OF_POLLS } else { ROUNDS_OF_DIVIDED };
    executor.test(true);
    let differs = |what: &str| {
        Err(ExecuteError::Failed(format!(
            "{what} got other tokens or logits in a repetition: sums of several devices are not reliable; split = \
             \"layers\" works"
        )))
    };
    for rows in BTreeSet::from([1, executor.capacity().slots]) {
        let first = run(executor, rows)?;
        for _ in 1..rounds {
            if run(executor, rows)? != first {
                return differs(&format!("{rows} sequences"));
            }
        }
    }
    let mut tested = Microbatches::Tested;
    let smallest = executor.rows_in_microbatches();
    if let Some(rows) = smallest.filter(|rows| has_room(executor.capacity(), *rows)) {
        let first = run_prompt(executor, &[rows], 0)?;
        for round in 1..rounds {
            if run_prompt(executor, &[rows], round)? != first {
                return differs(&format!("a prompt of {rows} tokens"));
            }
        }
        // Half of a step's rows are one microbatch, so these steps are whole. Their kernels are those of a microbatch where
        // there is a step of as many rows.
        let chunked = run_prompt(executor, &[rows / 2, rows - rows / 2], 0)?;
        if difference(&first.logits, &chunked.logits) >= MICROBATCH_TOLERANCE {
            tested = Microbatches::Wrong;
        }
    } else if smallest.is_some() {
        tested = Microbatches::Untested;
    }
    if tested != Microbatches::Tested {
        executor.forbid_microbatches();
    }
    executor.end_test();
    Ok(tested)
}

/// Returns the root mean square of the differences of logits, in parts of their own. Logits that are no numbers differ, and so do
/// those that have not come.
fn difference(found: &[u32], wanted: &[u32]) -> f64 {
    let square = |x: f64| x * x;
    let pairs = || found.iter().zip(wanted).map(|(a, b)| [*a, *b].map(|bits| f64::from(f32::from_bits(bits))));
    let own: f64 = pairs().map(|[_, b]| square(b)).sum();
    let differences: f64 = pairs().map(|[a, b]| square(a - b)).sum();
    let ratio = (differences / own.max(f64::MIN_POSITIVE)).sqrt();
    if ratio.is_nan() || found.len() != wanted.len() || wanted.is_empty() { f64::INFINITY } else { ratio }
}

/// Whether a sequence can have a prompt of `rows` tokens and one token more.
fn has_room(capacity: &Capacity, rows: u32) -> bool {
    let pages = capacity.window.map_or(capacity.pages, |window| window.pages.min(capacity.pages));
    rows < capacity.context && (rows + 1).div_ceil(PAGE_TOKENS) <= pages
}

/// Returns the parameters of a sequence whose tokens behind the first `prompt_tokens` are drawn greedily.
fn params(prompt_tokens: u32, dump_logits: bool) -> Box<SlotParams> {
    Box::new(SlotParams {
        sampling: Sampling::default(),
        seed: 0,
        generated: 0,
        prompt_tokens,
        max_tokens: u32::MAX,
        min_tokens: 0,
        stop_ids: Vec::new(),
        logprobs: None,
        dump_logits,
        mask: None,
    })
}

/// Draws the token that follows a prompt in chunks of these numbers of tokens, each of which is a step. Rounds take turns in pages,
/// as far as there are some, so that keys of the round before are not found in place of those that were not written yet.
fn run_prompt(executor: &mut SplitExecutor, chunks: &[u32], round: u32) -> Result<Outcome, ExecuteError> {
    let rows: u32 = chunks.iter().sum();
    let Capacity { pages, window, vocabulary, .. } = *executor.capacity();
    let slot = Slot(0);
    let (needed, all) = ((rows + 1).div_ceil(PAGE_TOKENS), window.map_or(pages, |window| window.pages.min(pages)));
    let first = round % (all / needed).clamp(1, 3) * needed;
    let table: Vec<Page> = (first..first + needed).map(Page).collect();
    let mut changes = vec![Change::Join { slot, params: params(rows, true), cached: Vec::new() }];
    let tables = [Some(PageTable::Full), window.map(|_| PageTable::Window)];
    changes.extend(tables.into_iter().flatten().map(|of| Change::Pages {
        slot,
        table: of,
        first: 0,
        pages: table.clone(),
    }));
    let token = |at: u32| (at * 97 + 1) % vocabulary;
    let mut outcome = Outcome { tokens: Vec::new(), logits: Vec::new() };
    let mut start = 0;
    for tokens in chunks {
        let end = start + tokens;
        let chunk = Chunk {
            slot,
            tokens: (start..end).map(token).collect(),
            start,
            last: end == rows,
            next: (end < rows).then_some(token(end)),
            restore: None,
            keeps: Vec::new(),
            score: None,
            pooled: 0..0,
        };
        let work = Work::Prefill { chunks: vec![chunk], decoding: Vec::new(), awaits: false };
        executor.submit(StepPlan { changes: std::mem::take(&mut changes), work: Some(work) })?;
        for report in executor.finish()? {
            outcome.note(report.tokens);
        }
        start = end;
    }
    executor.submit(StepPlan { changes: vec![Change::Leave { slot }], work: None })?;
    Ok(outcome)
}

/// Has as many sequences as a step of `rows` rows holds decode a few tokens after a short prompt each, or after one token
/// behind a context that they share.
fn run(executor: &mut SplitExecutor, rows: u32) -> Result<Outcome, ExecuteError> {
    let Capacity {
        slots, pages, window, context, prompts, run_ahead, prefill_chunk, vocabulary, ref snapshots, ..
    } = *executor.capacity();
    let steps = STEPS.min(run_ahead / PLANS_IN_FLIGHT as u32).max(1);
    let tokens = 2 + steps * PLANS_IN_FLIGHT as u32;
    // Recurrent state is only treated as empty at position 0.
    let room = (context.saturating_sub(tokens) / PAGE_TOKENS).min(pages.saturating_sub(2)) * PAGE_TOKENS;
    let whole_pages = snapshots.is_none() && prefill_chunk >= PAGE_TOKENS;
    let shared = if whole_pages { (CONTEXT_PAGES * PAGE_TOKENS).min(room) } else { 0 };
    let own = (shared + tokens).div_ceil(PAGE_TOKENS) - shared / PAGE_TOKENS;
    let most = window.map_or(pages, |window| window.pages.min(pages));
    let sequences = rows.min(slots).min((most.saturating_sub(1)) / own).max(1);
    let token = |slot: u32| (slot * 97 + 1) % vocabulary;
    let mut changes = Vec::new();
    for slot in 0..sequences {
        changes.push(Change::Join { slot: Slot(slot), params: params(shared + 1, slot == 0), cached: Vec::new() });
        // Page 0 is the context of all sequences, as often as it takes.
        let mut table = vec![Page(0); (shared / PAGE_TOKENS) as usize];
        table.extend((0..own).map(|page| Page(1 + slot * own + page)));
        let tables = [Some(PageTable::Full), window.map(|_| PageTable::Window)];
        for of in tables.into_iter().flatten() {
            changes.push(Change::Pages { slot: Slot(slot), table: of, first: 0, pages: table.clone() });
        }
    }
    let chunk = |slot: u32, start: u32, tokens: Vec<u32>, last: bool| Chunk {
        slot: Slot(slot),
        tokens,
        start,
        last,
        next: (!last).then_some(token(slot)),
        restore: None,
        keeps: Vec::new(),
        score: None,
        pooled: 0..0,
    };
    let mut outcome = Outcome { tokens: Vec::new(), logits: Vec::new() };
    let mut note = |drawn: Vec<Sampled>| outcome.note(drawn);
    let mut plans = Vec::new();
    if shared > 0 {
        // All tokens of the context have the same page.
        let filled = (0..PAGE_TOKENS).map(|at| token(at + 1)).collect();
        plans.push(Work::Prefill { chunks: vec![chunk(0, 0, filled, false)], decoding: Vec::new(), awaits: false });
    }
    let firsts: Vec<u32> = (0..sequences).collect();
    for some in firsts.chunks(prompts.min(prefill_chunk) as usize) {
        let chunks = some.iter().map(|slot| chunk(*slot, shared, vec![token(*slot)], true)).collect();
        plans.push(Work::Prefill { chunks, decoding: Vec::new(), awaits: false });
    }
    let slots: Vec<Slot> = (0..sequences).map(Slot).collect();
    for work in plans {
        executor.submit(StepPlan { changes: std::mem::take(&mut changes), work: Some(work) })?;
        executor.finish()?.into_iter().for_each(|report| note(report.tokens));
    }
    let decode = |steps| {
        let work = Work::Decode { slots: slots.clone(), steps, drafts: 0, awaits: false };
        StepPlan { changes: Vec::new(), work: Some(work) }
    };
    for _ in 0..PLANS_IN_FLIGHT {
        executor.submit(decode(steps))?;
    }
    executor.finish()?.into_iter().for_each(|report| note(report.tokens));
    // Of steps in flight, only one can keep its logits.
    executor.submit(decode(1))?;
    executor.finish()?.into_iter().for_each(|report| note(report.tokens));
    let changes = slots.into_iter().map(|slot| Change::Leave { slot }).collect();
    executor.submit(StepPlan { changes, work: None })?;
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_differ_by_more_than_rounding_or_not() {
        let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let (whole, rounded) = (bits(&[1.0, -2.0, 3.0]), bits(&[1.01, -2.01, 2.99]));
        assert!(difference(&rounded, &whole) < MICROBATCH_TOLERANCE && difference(&whole, &whole) == 0.0);
        for wrong in [&[3.0, 1.0, -2.0][..], &[1.0, -2.0], &[f32::NAN, -2.0, 3.0], &[0.0; 3]] {
            assert!(difference(&bits(wrong), &whole) > MICROBATCH_TOLERANCE, "{wrong:?}");
        }
        assert!(difference(&[], &[]) > MICROBATCH_TOLERANCE, "no logits");
    }
}

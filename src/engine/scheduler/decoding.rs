//! Decode plans: which sequences have rows, and how many steps are queued; and the rows of sequences that decode in a
//! prefill step.
//! Not here: the prompts of prefill plans (`prompts`), and which sequence is preempted (`preemption`).

use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, Change, Chunk, PageTable, Slot, StepPlan, Work};
use crate::engine::scheduler::{Flight, Scheduler, Waits};
use crate::engine::sequence::{Sequence, SequenceId, SequenceState};
use std::time::Duration;

/// The target duration of a decode plan: long enough that a submission costs little in comparison, short enough that
/// arrivals and aborts take effect soon.
pub(super) const PLAN_TIME: Duration = Duration::from_millis(10);

/// The number of tokens that should share the cost of a submission and a wait. A decode plan may exceed [`PLAN_TIME`]
/// to reach it, up to [`PLAN_TIME_MAX`].
pub(super) const PLAN_TOKENS: u32 = 10;

/// The maximum duration of a decode plan that exceeds [`PLAN_TIME`] to draw [`PLAN_TOKENS`] tokens.
pub(super) const PLAN_TIME_MAX: Duration = Duration::from_millis(40);

/// The minimum number of steps of a decode plan, even on a device that takes longer than [`PLAN_TIME`] for them, as long as
/// they keep to [`Capacity::plan_limit`]. Tokens are still reported one by one, so none is delayed.
///
/// [`Capacity::plan_limit`]: crate::engine::plan::Capacity::plan_limit
pub(super) const PLAN_STEPS_MIN: u32 = 2;

/// The maximum number of steps of a decode plan.
pub(super) const PLAN_STEPS_MAX: u32 = 16;

/// The number of consecutive prefill plans in which rows decode, before they have a decode plan of their own.
const MIXED_IN_A_ROW: u32 = 32;

/// The number of prefill plans that take turns with decode plans if rows would wait longer in the smallest prefill step.
const TURNS: u32 = 32;

/// The sequences of a decode step.
struct DecodeRows {
    /// Their slots.
    rows: Vec<Slot>,
    /// The least and the greatest number of tokens that the device may still be asked to draw for one of them.
    undrawn: (u32, u32),
    /// Whether logits of one of them are read back.
    dumps: bool,
    /// Whether a row is constrained, apart from those that wait for their masks outside the batch, which do not limit the
    /// others.
    constrained: bool,
}

/// The rows that sequences have in a plan.
#[derive(Default)]
pub(super) struct TakenRows {
    /// Their slots.
    pub(super) slots: Vec<Slot>,
    /// The slots whose masks are not available yet; see [`Flight::awaits`].
    pub(super) awaits: Vec<(Slot, u32)>,
}

/// Whether a draft model can draft for all rows.
enum CaughtUp {
    /// It can.
    Yes,
    /// Not before tokens are reported that it must compute.
    Unreported,
    /// When it has computed these chunks, or these and others.
    By(Vec<Chunk>),
}

impl Scheduler {
    /// Makes the next decode plan, if a sequence can decode. `beside_prompt`: prompts alternate with it, so it has one
    /// step.
    pub(super) fn plan_decode(&mut self, pace: &Pace, beside_prompt: bool) -> Option<StepPlan> {
        let outstanding: u32 = self.flights.iter().filter(|f| !f.is_prefill()).map(|f| f.steps_left).sum();
        let room = self.setup.capacity.run_ahead.saturating_sub(outstanding);
        if room == 0 {
            return None;
        }
        self.choices.0 += 1;
        let DecodeRows { mut rows, undrawn: (least, most), dumps, constrained } = self.decode_rows(pace);
        if rows.is_empty() {
            return None;
        }
        // While sequences wait for a slot, the plan ends with the first row that can free its slot.
        let useful = if self.waiting.is_empty() { most } else { least };
        let sequences = rows.len() as u32;
        let mut drafts = if dumps || constrained { 0 } else { self.speculation.choose(sequences, pace) };
        // Each slot may write `drafts` positions more than it draws, which must fit in the context too.
        if least < 2 * drafts + 1 {
            drafts = 0;
        }
        let time = if drafts > 0 { pace.verify(sequences, drafts).or(pace.step()) } else { pace.step() };
        let measures = self.speculation.measures();
        let aim = if beside_prompt || dumps || constrained || measures { 1 } else { self.steps_aim(time, sequences) };
        let mut steps = aim.min(room).min(useful);
        if drafts > 0 {
            steps = steps.min((least - drafts) / (drafts + 1));
            while steps > 0 && self.pages_missing(&rows, steps * (drafts + 1) + drafts) > self.pool.free() {
                steps /= 2;
            }
            if steps == 0 {
                (drafts, steps) = (0, 1);
            }
        }
        if drafts > 0 && self.setup.capacity.drafts.catches_up {
            let caught_up = self.catch_up(&rows, pace);
            if !matches!(caught_up, CaughtUp::Yes) {
                self.speculation.hold(drafts);
            }
            match caught_up {
                CaughtUp::Yes => {}
                CaughtUp::Unreported => return None,
                // The rows do not wait until all is computed: they decode between its parts.
                CaughtUp::By(_) if self.caught_up_last => (drafts, steps) = (0, 1),
                CaughtUp::By(chunks) => return Some(self.plan_catching_up(chunks)),
            }
        }
        let tokens = |steps: u32| if drafts > 0 { steps * (drafts + 1) + drafts } else { steps };

        let mut missing = self.pages_missing(&rows, tokens(steps));
        while steps > 1 && missing > self.pool.free() {
            steps /= 2;
            missing = self.pages_missing(&rows, tokens(steps));
        }
        if missing > self.pool.free() {
            // The best sequences first. Those that find no page then wait for pages that will soon be released.
            rows.sort_by_key(|slot| self.row(*slot).rank());
            self.preempt(&mut rows);
            let mut free = self.pool.free();
            rows.retain(|slot| {
                let missing = self.pages_missing(&[*slot], steps);
                let fits = missing <= free;
                free -= if fits { missing } else { 0 };
                fits
            });
            if rows.is_empty() {
                return None;
            }
        }

        let mut changes = self.take_leaves();
        changes.reserve(missing.min(rows.len() as u32) as usize);
        let each = (tokens(steps), steps * (drafts + 1));
        let TakenRows { slots, awaits } = self.take_rows(&rows, each, drafts > 0, &mut changes);
        self.prefilled_last = false;
        self.caught_up_last = false;
        self.mixed_in_a_row = 0;
        let waits = !awaits.is_empty();
        self.unnamed = Some(Flight {
            slots: slots.clone(),
            rows: slots.len() as u32,
            steps_left: steps,
            awaits,
            drafts,
            reserved: steps * (drafts + 1),
            drawn: if drafts > 0 { vec![0; slots.len()] } else { Vec::new() },
            ..Flight::default()
        });
        Some(StepPlan { changes, work: Some(Work::Decode { slots, steps, drafts, awaits: waits }) })
    }

    /// Returns whether a draft model has all keys and values that it needs to draft for `rows`, or the chunks by which it
    /// computes them, as many as a plan may have.
    fn catch_up(&self, rows: &[Slot], pace: &Pace) -> CaughtUp {
        let prompts = self.setup.capacity.prompts;
        // A draft model is hardly slower than the model that it drafts for.
        let (mut left, mut chunks): (u32, Vec<Chunk>) = (self.bearable_tokens(pace), Vec::new());
        for &slot in rows {
            let (start, tokens) = match self.row(slot).undrafted() {
                Err(_) => return CaughtUp::Unreported,
                Ok(None) => continue,
                Ok(Some((start, tokens))) => (start, tokens[..tokens.len().min(left as usize)].to_vec()),
            };
            if tokens.is_empty() || chunks.len() == prompts as usize {
                continue;
            }
            left -= tokens.len() as u32;
            let (next, restore, keeps) = (None, None, Vec::new());
            chunks.push(Chunk { slot, tokens, start, last: false, next, restore, keeps, score: None, pooled: 0..0 });
        }
        if chunks.is_empty() { CaughtUp::Yes } else { CaughtUp::By(chunks) }
    }

    /// Makes the plan by which a draft model computes `chunks`.
    fn plan_catching_up(&mut self, chunks: Vec<Chunk>) -> StepPlan {
        for chunk in &chunks {
            let id = self.slots[chunk.slot.0 as usize].expect("rows hold slots");
            let sequence = self.sequences.get_mut(id).expect("rows are known");
            sequence.drafts_through(chunk.start, chunk.start + chunk.tokens.len() as u32);
            self.outstanding[chunk.slot.0 as usize].in_flight += 1;
            self.name_drafted(id);
        }
        self.prefilled_last = false;
        let slots: Vec<Slot> = chunks.iter().map(|chunk| chunk.slot).collect();
        let rows = chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum();
        self.caught_up_last = true;
        self.unnamed = Some(Flight { slots, catches_up: true, rows, steps_left: 1, ..Flight::default() });
        StepPlan { changes: self.take_leaves(), work: Some(Work::CatchUp { chunks }) }
    }

    /// Tells the pool which pages of a sequence a draft model has computed.
    pub(super) fn name_drafted(&mut self, id: SequenceId) {
        if self.setup.capacity.drafts.catches_up && self.setup.prefix_cache {
            let sequence = self.sequences.get_mut(id).expect("who holds pages is known");
            sequence.newly_drafted().for_each(|page| self.pool.set_drafted(page));
        }
    }

    /// Gives the holder of a slot a row of the plan that is being made, whose steps write up to `written` positions and draw up
    /// to `drawn` tokens for it. Its pages must have been counted.
    fn take_row(&mut self, slot: Slot, (written, drawn): (u32, u32), turn: u64, changes: &mut Vec<Change>) {
        self.settle_asked(slot);
        let id = self.row(slot).id;
        let sequence = self.sequences.get_mut(id).expect("rows are known");
        let missing = sequence.pages_missing(written);
        if missing > 0 {
            let pages = self.pool.take(missing).expect("the pages were counted");
            let first = sequence.pages.len() as u32;
            sequence.pages.extend_from_slice(&pages);
            changes.push(Change::Pages { slot, table: PageTable::Full, first, pages });
        }
        let end = sequence.written_after(written);
        self.move_window(id, end, changes);
        let sequence = self.sequences.get_mut(id).expect("rows are known");
        sequence.draw(drawn);
        sequence.turn = turn;
        // Drafts and windows move with the tokens that are known.
        let waits = self.setup.capacity.drafts.most == 0 && self.window.is_none() && sequence.can_wait();
        self.outstanding[slot.0 as usize].waits = waits.then(|| Waits::of(sequence));
    }

    /// Returns the sequences that can decode in the next prefill step, ordered by slot: all that decode, except those whose
    /// masks must come first. `None` if none does, if they cannot all have a row there, if drafts may pay for them, or if they
    /// wait less for a token where prefill and decode plans take turns.
    pub(super) fn mixed_rows(&mut self, pace: &Pace) -> Option<Vec<Slot>> {
        // Short steps share little with those of prompts, and delay them little.
        let least = self.setup.capacity.mixed_steps?;
        if self.turns_left > 0 || pace.step().is_none_or(|step| step < least) {
            return None;
        }
        // Logits are read back before the next step.
        let decoding = || self.residents().filter(|sequence| sequence.state == SequenceState::Decode);
        if decoding().any(Sequence::dumps_logits) {
            return None;
        }
        let ready = |sequence: &&Sequence| sequence.decodes() && !self.waits_for_mask(sequence);
        let rows: Vec<Slot> = decoding().filter(ready).filter_map(|sequence| sequence.slot).collect();
        let constrained = decoding().any(|sequence| sequence.constraint.is_some());
        let may_draft = !constrained && self.speculation.may_pay(rows.len() as u32, pace);
        let Capacity { sequences, prefill_chunk, .. } = self.setup.capacity;
        let fits = rows.len() < sequences as usize
            && rows.len() as u32 + self.least_chunk() <= prefill_chunk
            && self.pages_missing(&rows, 1) <= self.pool.free();
        if !fits || may_draft || rows.is_empty() {
            return None;
        }
        // All is judged by the time of a decode step, which must be measured again now and then.
        if self.mixed_in_a_row >= MIXED_IN_A_ROW {
            self.mixed_in_a_row = 0;
            return None;
        }
        let count = rows.len() as u32;
        if self.bearable_prompt_tokens(pace, count).0.is_none() && self.turns_are_shorter(pace, count) {
            self.turns_left = TURNS;
            return None;
        }
        Some(rows)
    }

    /// Whether so many rows wait less for a token if prefill and decode plans take turns than in the smallest prefill step with
    /// them.
    fn turns_are_shorter(&self, pace: &Pace, rows: u32) -> bool {
        let time = |tokens| pace.chunk(tokens, self.choices.1);
        let alone = self.bearable_prompt_tokens(pace, 0).0.and_then(time);
        match (alone, pace.step(), time(self.least_size(rows))) {
            (Some(alone), Some(step), Some(mixed)) => alone + step < mixed,
            _ => false,
        }
    }

    /// Gives `rows` a row each in the prefill plan that is being made; none if there are too few pages for all.
    pub(super) fn take_mixed_rows(&mut self, rows: &[Slot], changes: &mut Vec<Change>) -> TakenRows {
        if self.pages_missing(rows, 1) > self.pool.free() {
            return TakenRows::default();
        }
        self.take_rows(rows, (1, 1), false, changes)
    }

    /// Gives each of `rows` a row of the plan that is being made; see [`Scheduler::take_row`]. `drafts`: whether its steps draft.
    fn take_rows(
        &mut self,
        rows: &[Slot],
        (written, drawn): (u32, u32),
        drafts: bool,
        changes: &mut Vec<Change>,
    ) -> TakenRows {
        let mut taken = TakenRows { slots: rows.to_vec(), awaits: Vec::new() };
        let may_draft = self.setup.capacity.drafts.most > 0;
        for &slot in rows {
            let turn = self.next_turn();
            let outstanding = &mut self.outstanding[slot.0 as usize];
            outstanding.in_flight += 1;
            if let Some(waits) = outstanding.waits.as_mut().filter(|waits| waits.can_ask(drawn)) {
                let missing = waits.pages_missing(drawn);
                let pages = self.pool.take(missing).expect("the pages were counted");
                let first = waits.ask(drawn, turn, pages.first().copied());
                if missing > 0 {
                    changes.push(Change::Pages { slot, table: PageTable::Full, first, pages });
                }
                continue;
            }
            let sequence = self.holder(slot).expect("a row has a slot that is held");
            if may_draft {
                sequence.drafts_now(drafts);
            }
            taken.awaits.extend(sequence.awaited_mask().map(|output| (slot, output)));
            self.take_row(slot, (written, drawn), turn, changes);
        }
        taken
    }

    /// Whether a constrained sequence has no row before its mask is available.
    fn waits_for_mask(&self, sequence: &Sequence) -> bool {
        match self.setup.capacity.gates {
            true => sequence.waits_apart(),
            false => sequence.awaited_mask().is_some(),
        }
    }

    /// Returns the sequences that can decode, ordered by slot, so that rows keep their places from step to step. Their
    /// number is at most the largest bucket, and at most what the device serves best at a time. If more can decode,
    /// those that have waited longest for a row are chosen.
    fn decode_rows(&self, pace: &Pace) -> DecodeRows {
        let mut constrained = false;
        let mut rows: Vec<Slot> = Vec::with_capacity(self.slots.len());
        for ((slot, id), outstanding) in (0..).map(Slot).zip(&self.slots).zip(&self.outstanding) {
            if outstanding.waits.is_some() {
                rows.push(slot);
                continue;
            }
            let Some(sequence) = id.map(|id| &self.sequences[id]).filter(|sequence| sequence.decodes()) else {
                continue;
            };
            if sequence.constraint.is_some() {
                constrained |= !sequence.waits_apart();
                if self.waits_for_mask(sequence) {
                    continue;
                }
            }
            // Logits must be read back before the next step overwrites them.
            if !sequence.dumps_logits() || self.is_free(sequence) {
                rows.push(slot);
            }
        }
        let most = *self.setup.capacity.buckets.last().expect("there are buckets");
        let most = pace.best_rows(most.min(rows.len() as u32), self.choices.0) as usize;
        if rows.len() > most {
            let waits = |slot: Slot| self.outstanding[slot.0 as usize].waits;
            rows.sort_by_key(|slot| waits(*slot).map_or_else(|| self.row(*slot).turn, |waits| waits.turn));
            rows.truncate(most);
        }
        let (mut least, mut most, mut dumps) = (u32::MAX, 0, false);
        for slot in &rows {
            let undrawn = match self.outstanding[slot.0 as usize].waits {
                Some(waits) => waits.undrawn,
                None => {
                    dumps |= self.row(*slot).dumps_logits();
                    self.row(*slot).undrawn()
                }
            };
            (least, most) = (least.min(undrawn), most.max(undrawn));
        }
        DecodeRows { rows, undrawn: (least, most), dumps, constrained }
    }

    pub(super) fn steps_aim(&self, step_time: Option<Duration>, rows: u32) -> u32 {
        // Half of the run-ahead, so that two plans fit.
        let most = (self.setup.capacity.run_ahead / 2).clamp(1, PLAN_STEPS_MAX);
        let least = PLAN_STEPS_MIN.min(most);
        let limit = self.setup.capacity.plan_limit;
        match step_time {
            // The first plan of all measures how long a step takes.
            None if limit.is_some() => 1,
            None => least,
            Some(step_time) => {
                let step_ns = step_time.as_nanos().max(1);
                let shared = u128::from(PLAN_TOKENS.div_ceil(rows)).min(PLAN_TIME_MAX.as_nanos() / step_ns);
                let aim = (PLAN_TIME.as_nanos() / step_ns).max(shared).clamp(u128::from(least), u128::from(most));
                let fits = limit.map_or(u128::MAX, |limit| limit.as_nanos() / step_ns);
                aim.min(fits).max(1) as u32
            }
        }
    }

    /// Returns the number of pages to add so that `tokens` more tokens can be written for each row.
    pub(super) fn pages_missing(&self, rows: &[Slot], tokens: u32) -> u32 {
        let missing = |slot: &Slot| match self.outstanding[slot.0 as usize].waits {
            Some(waits) => waits.pages_missing(tokens),
            None => self.row(*slot).pages_missing(tokens),
        };
        rows.iter().map(missing).sum()
    }
}

//! Prefill plans: which sequence joins, how much of its history the prefix cache holds, and which chunks of which
//! prompts share a step.
//! Not here: decode plans (`decoding`).

use super::PASSED_OVER_MAX;
use crate::engine::pace::Pace;
use crate::engine::plan::{
    Capacity, Change, Chunk, Keep, MOST_KEEPS, Page, PageTable, STATE_TOKENS, Slot, StateSlot, StepPlan, Work,
};
use crate::engine::request::{Event, Started};
use crate::engine::scheduler::decoding::TakenRows;
use crate::engine::scheduler::{Flight, Scheduler, SchedulerOutput};
use crate::engine::sequence::{Sequence, SequenceId, pages_for};
use crate::engine::snapshots::Found;
use crate::kernels::attention::PAGE_TOKENS;
use std::cmp::Reverse;
use std::time::{Duration, Instant};

/// The maximum duration of a prefill plan while rows decode, in decode steps. It is above 1, because small chunks use
/// the device badly, and a queue builds up if prompts arrive faster than they are computed.
pub(super) const PROMPT_STEPS: u32 = 4;

/// The value of [`PROMPT_STEPS`] for a single prompt that takes several plans. Together with their own step, the rows
/// then wait three times as long for each token, for as long as that prompt lasts.
pub(super) const LONE_PROMPT_STEPS: u32 = 2;

/// The duration of a plan of a single prompt that takes several, if rows decode in it: hardly longer than anybody notices.
const LONE_MIXED_TIME: Duration = Duration::from_micros(8500);

/// The least and the greatest duration of such a plan in tenths of a decode step: hardly twice as long as the rows wait
/// otherwise, so that the prompt does not take too long, and less than three times. The next chunk of a prompt takes
/// longer than those before it, from which its time is estimated.
const LONE_MIXED_TENTHS: (u32, u32) = (17, 27);

/// The limit of a prompt's weight against rows that decode: if there are several prompts, each counts for as many rows
/// as there are prompts, but for at most this many. A prefill plan may last [`PROMPT_STEPS`] multiplied by the ratio of
/// the prompts' weight to the rows. So prompts that arrive together are computed before much is decoded; the larger
/// batch then decodes in hardly more time than a small one.
const MOST_ROWS_PER_PROMPT: usize = 16;

/// The numbers of tokens that a prefill plan can be reduced to if the maximum would take too long.
const PROMPT_SIZES: [u32; 14] = [1536, 1024, 768, 640, 512, 384, 256, 192, 128, 96, 64, 48, 32, PAGE_TOKENS];

/// The sequence whose chunk is next.
#[derive(Debug)]
pub(super) enum Prompt {
    /// The sequence holds a slot.
    Resident(SequenceId),
    /// The sequence joins the batch with this chunk.
    Joining(Joining),
}

impl Prompt {
    fn id(&self) -> SequenceId {
        match self {
            Prompt::Resident(id) => *id,
            Prompt::Joining(joining) => joining.id,
        }
    }
}

/// A sequence that can join: a slot and pages for it are free.
#[derive(Debug)]
pub(super) struct Joining {
    id: SequenceId,
    slot: Slot,
    /// The part of its history that the prefix cache holds.
    beginning: Beginning,
}

/// The part of a waiting sequence's history that the prefix cache holds.
#[derive(Debug, Default)]
pub(super) struct Beginning {
    pages: Vec<Page>,
    /// The window pages of the tokens that the next one sees, if windows have pages of their own.
    window: Vec<Page>,
    /// The number of `pages` that are free.
    free: u32,
    /// The recurrent state after the pages, for models that have such state.
    restore: Option<StateSlot>,
    /// The number of tokens whose pages were found, whether or not a recurrent state after them was found too.
    branch: u32,
}

impl Scheduler {
    /// Returns the sequence whose chunk is next: the best of those that hold a slot or, if none does or that one has a
    /// lower priority, a sequence that can join.
    pub(super) fn next_prompt(&mut self) -> Option<Prompt> {
        let resident = self
            .prompts()
            .min_by_key(|sequence| sequence.rank())
            .map(|sequence| (sequence.id, sequence.shielded, sequence.priority));
        match (resident, self.next_to_join()) {
            (Some((_, shielded, priority)), Some(joining))
                if !shielded && priority < self.sequences[joining.id].priority =>
            {
                Some(Prompt::Joining(joining))
            }
            (Some((resident, ..)), _) => Some(Prompt::Resident(resident)),
            (None, joining) => joining.map(Prompt::Joining),
        }
    }

    /// Returns the head of the queue if there are a slot and pages for it. No sequence behind it goes first, because a
    /// long prompt might then wait forever.
    pub(super) fn next_to_join(&mut self) -> Option<Joining> {
        let oldest = *self.waiting.first()?;
        let &(_, best) = self.ranked.first()?;
        let id = if self.passed_over >= PASSED_OVER_MAX { oldest } else { best };
        let slot = self.slots.iter().position(Option::is_none)?;
        // Pages that reported tokens have filled can be found.
        self.settle();
        // Reserve a page for each running sequence; otherwise the sequence that joins would be preempted at once.
        let reserve = self.slots.iter().flatten().count() as u32;
        if self.sequences[id].dumps_logits() && self.residents().any(Sequence::dumps_logits) {
            return None;
        }
        if let Some(window) = &self.window {
            let share = |sequence: &Sequence| window.share(sequence.most_tokens());
            let shares = self.residents().map(share).sum::<u32>() + share(&self.sequences[id]);
            if !window.serves(shares) {
                return None;
            }
        }
        let beginning = self.beginning(id)?;
        let missing = pages_for(self.sequences[id].tokens.len() as u32) - beginning.pages.len() as u32;
        let needed = missing + beginning.free + reserve;
        (needed <= self.pool.free()).then_some(Joining { id, slot: Slot(slot as u32), beginning })
    }

    /// Returns the part of a waiting sequence's history that the prefix cache holds; `None` if the plan being made
    /// stores a longer recurrent state, which the next plan can use.
    pub(super) fn beginning(&mut self, id: SequenceId) -> Option<Beginning> {
        if !self.setup.prefix_cache || self.sequences[id].computes_all() {
            return Some(Beginning::default());
        }
        let sequence = self.sequences.get_mut(id).expect("a waiting sequence is known");
        let wanted = sequence.wanted();
        let (mut pages, free) = self.pool.find(wanted);
        let branch = pages.len() as u32 * PAGE_TOKENS;
        if let Some(window) = &self.window {
            let (usable, seen) = window.find(&wanted[..pages.len()]);
            pages.truncate(usable);
            let free = self.pool.free_among(&pages);
            return Some(Beginning { pages, window: seen, free, restore: None, branch });
        }
        let Some(snapshots) = &self.snapshots else {
            return Some(Beginning { pages, free, branch, ..Beginning::default() });
        };
        let (usable, restore) = match snapshots.find(&wanted[..pages.len()]) {
            Found::Soon(_) => return None,
            Found::Ready(usable, cell) => (usable, Some(cell)),
            Found::Nothing => (0, None),
        };
        pages.truncate(usable);
        let free = self.pool.free_among(&pages);
        Some(Beginning { pages, free, restore, branch, ..Beginning::default() })
    }

    /// Returns the unit of chunk sizes in tokens: a chunk that is not a prompt's last has a multiple of it.
    pub(super) fn chunk_unit(&self) -> u32 {
        if self.snapshots.is_some() { STATE_TOKENS } else { 1 }
    }

    /// Returns the number of tokens that the next chunk of a prompt could have.
    pub(super) fn unqueued(&self, prompt: &Prompt) -> u32 {
        match prompt {
            Prompt::Resident(id) => self.sequences[*id].unqueued(),
            Prompt::Joining(Joining { id, beginning, .. }) => {
                self.sequences[*id].tokens.len() as u32 - beginning.pages.len() as u32 * PAGE_TOKENS
            }
        }
    }

    /// Returns the number of prompt tokens that a prefill plan may have now: the maximum of a step, or as many as keep to the
    /// plan limit and do not delay the rows that decode too much; and whether it is for a lone prompt that takes several plans.
    /// `mixed`: the number of rows that decode in the plan.
    pub(super) fn prompt_tokens_aim(&self, pace: &Pace, mixed: u32) -> (u32, bool) {
        let (found, lone) = self.bearable_prompt_tokens(pace, mixed);
        let least = self.least_size(mixed);
        (found.unwrap_or(least - mixed).max(self.chunk_unit()), lone)
    }

    /// Returns the smallest number of prompt tokens for which a prefill step is planned, unless a prompt has fewer.
    pub(super) fn least_chunk(&self) -> u32 {
        PAGE_TOKENS.max(self.chunk_unit())
    }

    /// Returns the smallest size of a prefill step in which so many rows decode.
    pub(super) fn least_size(&self, mixed: u32) -> u32 {
        let sizes = PROMPT_SIZES.into_iter().rev().find(|size| *size >= mixed + self.least_chunk());
        sizes.unwrap_or(u32::MAX).min(self.setup.capacity.prefill_chunk)
    }

    /// Like [`Scheduler::prompt_tokens_aim`]; `None` if a step of any size takes longer than it should.
    pub(super) fn bearable_prompt_tokens(&self, pace: &Pace, mixed: u32) -> (Option<u32>, bool) {
        let most = self.setup.capacity.prefill_chunk;
        // Sizes are those of whole steps, rows that decode included.
        let least = self.least_size(mixed);
        let mut bearable = self.bearable_sizes(least, pace);
        let rows = self.residents().filter(|sequence| sequence.decodes()).count();
        let (Some(step), true) = (pace.step(), rows > 0) else {
            return (bearable.next().map(|size| size - mixed), false);
        };
        let taken_in = || self.prompts();
        let prompts = taken_in().count() + self.waiting.len();
        let weight = prompts * prompts.min(MOST_ROWS_PER_PROMPT) / rows;
        let lasts_for = |tokens: u32, time: Duration| {
            let allowed = time * weight.max(1) as u32;
            tokens <= most && pace.chunk(tokens, self.choices.1).is_none_or(|time| time <= allowed)
        };
        let lasts = |tokens: u32, steps: u32| lasts_for(tokens, step * steps);
        let waiting = self.waiting.iter().map(|id| self.sequences[*id].tokens.len() as u32);
        let left = || taken_in().map(|sequence| sequence.unqueued()).chain(waiting.clone());
        let was_lone = taken_in().any(|sequence| sequence.lone);
        let lone = prompts == 1 && (was_lone || left().any(|tokens| !lasts(tokens, PROMPT_STEPS)));
        let (least_tenths, most_tenths) = LONE_MIXED_TENTHS;
        let fits = |tokens: u32| match (lone, mixed) {
            (true, 0) => lasts(tokens, LONE_PROMPT_STEPS),
            (true, _) => lasts_for(tokens, LONE_MIXED_TIME.clamp(step * least_tenths / 10, step * most_tenths / 10)),
            (false, _) => lasts(tokens, PROMPT_STEPS),
        };
        let aim = bearable.find(|&tokens| fits(tokens));
        // What one plan could compute alone is not divided because rows decode in it.
        let whole = left().sum::<u32>();
        let tokens = aim.map(|aim| if whole <= aim && whole + mixed <= most { whole } else { aim - mixed });
        (tokens, lone)
    }

    /// Returns the maximum number of tokens of a plan that keeps to the plan limit.
    pub(super) fn bearable_tokens(&self, pace: &Pace) -> u32 {
        let least = self.setup.capacity.prefill_chunk.min(PAGE_TOKENS);
        self.bearable_sizes(least, pace).next().unwrap_or(least)
    }

    /// Returns the sizes of prefill steps from `least` on that keep to the plan limit, the largest first.
    fn bearable_sizes(&self, least: u32, pace: &Pace) -> impl Iterator<Item = u32> {
        let Capacity { prefill_chunk: most, plan_limit, .. } = self.setup.capacity;
        let sizes = PROMPT_SIZES.into_iter().filter(move |tokens| (least..most).contains(tokens));
        [most].into_iter().chain(sizes).filter(move |tokens| match plan_limit {
            // Before anything is known of the device, the smallest chunk measures it.
            Some(limit) => pace.chunk_at_most(*tokens).is_some_and(|time| time <= limit),
            None => true,
        })
    }

    /// Makes the next prefill plan, which begins with `prompt`. The sequences `mixed` decode in it.
    pub(super) fn plan_prefill(&mut self, prompt: Prompt, mixed: &[Slot], pace: &Pace, now: Instant) -> StepPlan {
        let mut prompt = Some(prompt);
        let (mut left, lone) = self.prompt_tokens_aim(pace, mixed.len() as u32);
        self.choices.1 += 1;
        let mut changes = self.take_leaves();
        let Capacity { prompts, sequences, .. } = self.setup.capacity;
        let most_chunks = (prompts as usize).min(sequences as usize - mixed.len());
        let mut chunks: Vec<Chunk> = Vec::new();
        let (unit, whole) = (self.chunk_unit(), !self.setup.capacity.causal);
        while let Some(next) = prompt {
            // A prompt that is scored is alone in its plan.
            let scored = self.is_scored(&next);
            let unqueued = self.unqueued(&next);
            // A prompt that cannot be divided may be longer than a plan should be; then it is alone in its plan.
            if whole && chunks.is_empty() {
                left = left.max(unqueued);
            }
            let least = if whole { unqueued } else { unit.min(unqueued) };
            if left < least || (scored && !(chunks.is_empty() && mixed.is_empty())) {
                break;
            }
            let id = match next {
                Prompt::Resident(id) => id,
                Prompt::Joining(joining) => {
                    let id = joining.id;
                    self.admit(joining, &mut changes, now);
                    id
                }
            };
            let turn = self.next_turn();
            let end = self.sequences[id].chunk_end(left, unit);
            self.move_window(id, end, &mut changes);
            let sequence = self.sequences.get_mut(id).expect("a prompt's sequence is known");
            let mut chunk = sequence.next_chunk(left, unit);
            self.outstanding[chunk.slot.0 as usize].in_flight += 1;
            sequence.turn = turn;
            sequence.lone |= lone;
            sequence.drafts_through(chunk.start, chunk.start + chunk.tokens.len() as u32);
            self.name_pages(id);
            self.name_drafted(id);
            chunk.keeps = self.keeps(id, &chunk);
            left -= chunk.tokens.len() as u32;
            chunks.push(chunk);
            let room = left > 0 && !scored && chunks.len() < most_chunks;
            prompt = if room { self.next_prompt() } else { None };
        }
        let TakenRows { slots: decoding, awaits } = self.take_mixed_rows(mixed, &mut changes);
        let waits = !awaits.is_empty();
        self.mixed_in_a_row = if decoding.is_empty() { 0 } else { self.mixed_in_a_row + 1 };
        self.turns_left = self.turns_left.saturating_sub(1);
        self.prefilled_last = true;
        self.unnamed = Some(Flight {
            chunks: chunks.iter().map(|chunk| chunk.tokens.len() as u32).collect(),
            starts: chunks.iter().map(|chunk| chunk.start).collect(),
            slots: chunks.iter().map(|chunk| chunk.slot).chain(decoding.iter().copied()).collect(),
            rows: chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum(),
            steps_left: 1,
            awaits,
            ..Flight::default()
        });
        StepPlan { changes, work: Some(Work::Prefill { chunks, decoding, awaits: waits }) }
    }

    /// Whether tokens of a prompt are scored.
    pub(super) fn is_scored(&self, prompt: &Prompt) -> bool {
        self.sequences[prompt.id()].is_scored()
    }

    /// Takes cells for the snapshots that a chunk stores.
    pub(super) fn keeps(&mut self, id: SequenceId, chunk: &Chunk) -> Vec<Keep> {
        let Some(snapshots) = self.snapshots.as_mut().filter(|_| self.setup.prefix_cache) else { return Vec::new() };
        let kept = self.sequences[id]
            .keep_points(chunk)
            .filter_map(|(point, name)| Some(Keep { tokens: point - chunk.start, cell: snapshots.keep(name)? }));
        kept.take(MOST_KEEPS).collect()
    }

    /// Gives the content of a sequence's pages that have become final to the pool, so that others can find them.
    pub(super) fn name_pages(&mut self, id: SequenceId) {
        if self.setup.prefix_cache {
            let sequence = self.sequences.get_mut(id).expect("who holds pages is known");
            for (page, window_page, content) in sequence.newly_full() {
                if let (Some(window), Some(page)) = (&mut self.window, window_page) {
                    window.pool.name(page, content.name);
                }
                self.pool.name_content(page, content);
            }
        }
    }

    pub(super) fn admit(&mut self, joining: Joining, changes: &mut Vec<Change>, now: Instant) {
        let Joining { id, slot, beginning: Beginning { mut pages, window: seen, restore, branch, .. } } = joining;
        let found = pages.len() as u32;
        if let (Some(snapshots), Some(cell)) = (&mut self.snapshots, restore) {
            snapshots.read(cell);
        }
        let drafted = pages.iter().take_while(|page| self.pool.is_drafted(**page)).count();
        for page in &pages {
            self.pool.share(*page);
        }
        if let Some(window) = &mut self.window {
            seen.iter().for_each(|page| window.pool.share(*page));
        }
        let sequence = self.sequences.get_mut(id).expect("a joining sequence is known");
        let missing = pages_for(sequence.tokens.len() as u32) - found;
        pages.extend(self.pool.take(missing).expect("next_to_join counted the pages"));
        if self.waiting.first() == Some(&id) {
            sequence.shielded |= self.passed_over >= PASSED_OVER_MAX;
            self.passed_over = 0;
        } else {
            self.passed_over += 1;
        }
        self.waiting.remove(&id);
        self.ranked.remove(&(Reverse(sequence.priority), id));
        let holder = self.slots[slot.0 as usize].replace(id);
        assert!(holder.is_none(), "the slot is held");
        let (params, cached) = sequence.join(slot, pages.clone(), found, self.setup.capacity.drafts.history);
        sequence.continue_state(restore, branch);
        sequence.finds_drafted(drafted as u32);
        changes.push(Change::Join { slot, params: Box::new(params), cached });
        changes.push(Change::Pages { slot, table: PageTable::Full, first: 0, pages });
        if self.window.is_some() {
            sequence.window_first = found - seen.len() as u32;
            sequence.window.clone_from(&seen);
            if !seen.is_empty() {
                let first = sequence.window_first;
                changes.push(Change::Pages { slot, table: PageTable::Window, first, pages: seen });
            }
        }
        if sequence.started.is_none() {
            sequence.started = Some(now);
            self.prompt_tokens += u64::from(sequence.prompt_tokens);
            self.cached_tokens += u64::from(sequence.cached_tokens);
            let started = Started {
                device_name: self.setup.device_name.clone(),
                device_uuid: self.setup.device_uuid.clone(),
                replica: self.setup.replica.clone(),
                queue: now.saturating_duration_since(sequence.arrived),
                prompt_tokens: sequence.prompt_tokens,
                cached_tokens: sequence.cached_tokens,
            };
            self.outputs.push(SchedulerOutput::Event(id, Event::Started(Box::new(started))));
        }
    }
}

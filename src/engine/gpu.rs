//! The executor on a device: turns plans into patches of device state and submissions of
//! recorded regions, and the token ring into tokens.
//! Deliberately absent: scheduling, and Vulkan other than through the actors.

use super::executor::{
    Capacity, Change, Chunk, Done, ExecuteError, Executor, Progress, Sampled, ScoredChunk, Slot, SlotParams, StepPlan,
    Ticket, Work,
};
use super::overlap::OverlapRetry;
use super::pace::Pace;
use super::request::{PerToken, Scored, TokenLogprobs};
use super::variants::{Fallback, Variants};
use crate::actors::compute::{Compute, Submission};
use crate::actors::timeline::{FlushReason, SubmissionRecord};
use crate::actors::watcher::{Outbox, Report};
use crate::device::{Device, Gate, Point};
use crate::kernels::attention::Heads;
use crate::kernels::embed::PromptRows;
use crate::kernels::flash::flash_tiles;
use crate::kernels::layout::StateLayout;
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::sampling::{Patch, clear_inbox, mask_words, patch_inbox};
use crate::kernels::score::Score;
use crate::kernels::state::{self, RingEntry, SlotInit};
use crate::memory::Buffer;
use crate::model::decoder::RingLayout;
use crossbeam_channel::{Receiver, bounded};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reports that may wait for the engine's thread: as many as plans in flight can make.
const REPORTS: usize = 1024;

/// How often a plan is run again after faults. Repeats have barriers, so a second fault is a device's or ours.
const MOST_REPEATS: u32 = 4;

/// A client should not wait longer than this for a token that the device has finished: of one row; with several, a
/// report is shared by as many more tokens and comes as much sooner.
const REPORT_EVERY: Duration = Duration::from_millis(16);

/// A slot of the inbox, through which changes reach the device, with the regions that apply it.
#[derive(Debug)]
pub struct Inbox {
    /// Mapped: the words of a patch.
    pub patch: Arc<Buffer>,
    /// Mapped: the slots whose counts are cleared.
    pub clear: Arc<Buffer>,
    /// Mapped: `[rows][4]` of token, position, slot and 1, tokens that counts hear of.
    pub seen: Arc<Buffer>,
    /// Applies `patch`.
    pub apply: Arc<Region>,
    /// Clears counts.
    pub clear_counts: Arc<Region>,
    /// Enters the tokens seen in counts.
    pub mark_seen: Arc<Region>,
}

/// The regions of a decode bucket.
#[derive(Debug)]
pub struct DecodeRegions {
    /// With a barrier for every dependency.
    pub plain: DecodeRegion,
    /// The same step with tagged words in place of barriers, where the device passed the start's test. Both give the
    /// same bits.
    pub carried: Option<DecodeRegion>,
    /// For tests: `carried`, but one of its calls waits for words that are never written.
    pub broken: Option<DecodeRegion>,
}

/// Faults that tests inject.
#[derive(Clone, Copy, Debug, Default)]
pub struct Injection {
    /// The fault word is set before this decode plan, counted from 1; 0: never.
    pub plan: u32,
    /// The step with this number among those without barriers, counted from 1, has a broken call; 0: none.
    pub step: u32,
    /// Every so manieth step without barriers has; 0: none.
    pub every: u32,
}

impl Injection {
    fn breaks(self, step: u64) -> bool {
        step == u64::from(self.step) || self.every > 0 && step.is_multiple_of(self.every.into())
    }
}

/// A decode step, whole and in two parts.
#[derive(Clone, Debug)]
pub struct DecodeRegion {
    /// All of it.
    pub whole: Arc<Region>,
    /// Up to the logits, and from there on: behind the gate where a mask is still to come. Where there are gates.
    pub parts: Option<[Arc<Region>; 2]>,
}

/// What a replica's executor is made of; everything in it is allocated and recorded.
#[derive(Debug)]
pub struct Parts {
    /// What it can hold.
    pub capacity: Capacity,
    /// Device state.
    pub layout: StateLayout,
    /// Of attention, for its tiles.
    pub heads: Heads,
    /// Token ring.
    pub ring: RingLayout,
    /// Mapped: the token ring.
    pub ring_buffer: Arc<Buffer>,
    /// Mapped: `[slots][vocabulary / 32, rounded up]`, the tokens that a constrained slot may draw next.
    pub masks: Arc<Buffer>,
    /// What steps wait for whose masks are still to come.
    pub gate: Arc<Gate>,
    /// Mapped: the logits of a step that a slot asked for.
    pub dump: Arc<Buffer>,
    /// Copies row 0 of the logits there.
    pub dump_region: Arc<Region>,
    /// By rows.
    pub decode: BTreeMap<u32, DecodeRegions>,
    /// Steps that verify drafts, by drafts of a sequence and sequences.
    pub verify: BTreeMap<u32, BTreeMap<u32, Arc<Region>>>,
    /// The layers over a step of prompts, by rows.
    pub prefill: BTreeMap<u32, Arc<Region>>,
    /// What draws the first tokens of prompts, by their number.
    pub first: BTreeMap<u32, Arc<Region>>,
    /// What scores the next rows of a step of prompts, so many at a time.
    pub score: (u32, Arc<Region>),
    /// Mapped: what it finds, of two steps.
    pub scores: Arc<Buffer>,
    /// At least two; more than plans in flight, or `submit` waits.
    pub inboxes: Vec<Inbox>,
    /// Pairs that an inbox's patch holds.
    pub patch_pairs: u32,
    /// Rows that an inbox's tokens seen have.
    pub seen_rows: u32,
    /// The device's compute queue.
    pub compute: Arc<Compute>,
    /// What the first submission waits for: the weights' last copies.
    pub ready: Vec<Point>,
    /// What runs.
    pub variants: Arc<Variants>,
    /// For messages.
    pub device_name: String,
    /// The device, and the kernels' pipelines, for regions that are timed.
    pub device: Arc<Device>,
    /// As `device` says.
    pub pipelines: Pipelines,
    /// For tests.
    pub injection: Injection,
    /// How long steps run with barriers after a first fault.
    pub retry_after: Duration,
}

/// Runs plans on a device's compute queue.
#[derive(Debug)]
pub struct GpuExecutor {
    parts: Parts,
    outbox: Outbox,
    reports: Receiver<Report>,
    wake: Receiver<()>,
    next: u64,
    next_step: u32,
    pending: VecDeque<Pending>,
    /// Reports that were taken while waiting for an inbox.
    early: VecDeque<Report>,
    free_inboxes: Vec<usize>,
    /// Batch list on the device.
    batch: Vec<u32>,
    /// Slots whose logits are asked for.
    dumps: Vec<bool>,
    /// Slots whose log probabilities are asked for.
    logprobs: Vec<bool>,
    /// Values of the gate that submissions wait for, so far.
    gates: u64,
    pace: Pace,
    /// Chunks that were scored, so far: their scores go to each half of the buffer in turn.
    scored: u32,
    /// When steps run without barriers again after a fault.
    overlap: OverlapRetry,
    /// The plan that is being queued repeats steps of a fault, with barriers.
    repeats: bool,
    decode_plans: u32,
    /// Steps without barriers that were queued.
    carried_steps: u64,
    /// Plans with work that are still to be profiled.
    profiled: u32,
    /// Of plans that are not finished: the submissions that are, in order.
    submissions: VecDeque<(Ticket, SubmissionRecord)>,
}

/// Changes of the device's state that a plan brings.
#[derive(Debug, Default)]
struct Posts {
    patch: Patch,
    /// Slots whose counts are cleared.
    clear: Vec<u32>,
    /// Tokens that counts hear of.
    seen: Vec<[u32; 4]>,
}

/// Inboxes that are filled, and the regions that apply them.
#[derive(Debug, Default)]
struct Applied {
    inboxes: Vec<usize>,
    regions: Vec<Arc<Region>>,
}

/// The smallest bucket with so many rows.
fn fitting<T>(buckets: &BTreeMap<u32, T>, rows: u32) -> (u32, &T) {
    let (bucket, found) =
        buckets.range(rows..).next().unwrap_or_else(|| panic!("{rows} rows exceed the largest bucket"));
    (*bucket, found)
}

#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    /// Steps that sample, the first of them, and rows of each.
    steps: u32,
    first_step: u32,
    rows: u32,
    /// Entries that are done.
    entries: u32,
    /// Tokens of a chunk that are scored.
    scoring: Option<Scoring>,
    /// Steps from this one on drew nothing because of a fault; `u32::MAX` if none is known.
    good: u32,
    /// With `good`, the fault word: the number of the call that waited too long.
    fault: u32,
    /// Faults that its plan has met with before it was submitted this time.
    faults: u32,
    work: Kind,
    /// Tokens of a step of prompts.
    prompt_tokens: u32,
    /// Of a decode plan, for the steps that have to be run again after a fault.
    slots: Vec<Slot>,
    /// Tokens drafted for each of them.
    drafts: u32,
    dump: bool,
    inboxes: Vec<usize>,
    /// Dispatches and barriers of the patches, and of each step.
    fixed: (u32, u32),
    each: (u32, u32),
    /// What its draw waits for.
    gate: Option<u64>,
    /// Its masks are still to come.
    awaits: bool,
    flush: FlushReason,
    submitted: Instant,
    started: bool,
}

/// Which tokens are scored, and where the scores will be.
#[derive(Clone, Copy, Debug)]
struct Scoring {
    slot: Slot,
    /// Position of the first.
    first: u32,
    tokens: u32,
    /// The first's entry.
    entry: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// There is nothing to report.
    Changes,
    /// Prompts of which none ends: a step without tokens.
    Prompts,
    /// Tokens are drawn.
    Sampled,
}

impl GpuExecutor {
    /// An executor over recorded regions.
    pub fn new(parts: Parts) -> GpuExecutor {
        let (sender, reports) = bounded(REPORTS);
        let (waker, wake) = bounded(1);
        let slots = parts.capacity.slots as usize;
        GpuExecutor {
            outbox: Outbox { reports: sender, wake: waker },
            reports,
            wake,
            next: 0,
            next_step: 0,
            pending: VecDeque::new(),
            early: VecDeque::new(),
            free_inboxes: (0..parts.inboxes.len()).collect(),
            batch: vec![u32::MAX - 1; parts.layout.rows as usize],
            dumps: vec![false; slots],
            logprobs: vec![false; slots],
            gates: 0,
            scored: 0,
            pace: Pace::default(),
            overlap: OverlapRetry::new(parts.retry_after),
            repeats: false,
            decode_plans: 0,
            carried_steps: 0,
            profiled: 0,
            submissions: VecDeque::new(),
            parts,
        }
    }

    fn changes(&mut self, changes: &[Change]) -> Posts {
        let layout = self.parts.layout;
        let mut posts = Posts::default();
        let patch = &mut posts.patch;
        for change in changes {
            match change {
                Change::Join { slot, params, cached } => {
                    let init = slot_init(params);
                    if init.has_penalties() {
                        posts.clear.push(slot.0);
                        let rows = (0..).zip(cached).map(|(position, token)| [*token, position, slot.0, 1]);
                        posts.seen.extend(rows);
                    }
                    self.dumps[slot.0 as usize] = params.dump_logits;
                    self.logprobs[slot.0 as usize] = params.logprobs.is_some();
                    patch.set_all(layout.slot_word(slot.0, 0), &init.words());
                    patch.set_all(layout.bias_word(slot.0, 0), &state::bias_words(&params.sampling.logit_bias));
                    if let Some(mask) = &params.mask {
                        self.set_mask(*slot, mask);
                    }
                }
                Change::Pages { slot, first, pages } => {
                    for (index, page) in (*first..).zip(pages) {
                        patch.set(layout.page_word(slot.0, index), page.0);
                    }
                }
                Change::Leave { slot } => {
                    self.dumps[slot.0 as usize] = false;
                    patch.set(layout.slot_word(slot.0, state::SLOT_ACTIVE), state::ACTIVE_IDLE);
                }
            }
        }
        posts
    }

    /// Fills inboxes and gives the regions that apply them, in order. What needs more inboxes than there are is
    /// submitted by itself, under the ticket of the plan that it belongs to.
    fn post(&mut self, ticket: Ticket, posts: Posts) -> Result<Applied, ExecuteError> {
        let mut applied = Applied::default();
        for slots in posts.clear.chunks(self.parts.layout.slots.max(1) as usize) {
            let inbox = self.inbox(ticket, &mut applied)?;
            inbox.clear.write(0, bytemuck::cast_slice(&clear_inbox(slots)));
            applied.regions.push(Arc::clone(&inbox.clear_counts));
        }
        for pairs in posts.patch.into_pairs().chunks(self.parts.patch_pairs as usize) {
            let inbox = self.inbox(ticket, &mut applied)?;
            inbox.patch.write(0, bytemuck::cast_slice(&patch_inbox(pairs)));
            applied.regions.push(Arc::clone(&inbox.apply));
        }
        // Marks read what the patch has written of their slots.
        let rows = self.parts.seen_rows as usize;
        for seen in posts.seen.chunks(rows) {
            let inbox = self.inbox(ticket, &mut applied)?;
            let mut words = seen.to_vec();
            words.resize(rows, [0; 4]);
            inbox.seen.write(0, bytemuck::cast_slice(&words));
            applied.regions.push(Arc::clone(&inbox.mark_seen));
        }
        Ok(applied)
    }

    /// The next inbox of a plan.
    fn inbox(&mut self, ticket: Ticket, applied: &mut Applied) -> Result<&Inbox, ExecuteError> {
        if applied.inboxes.len() >= self.parts.inboxes.len() / 2 {
            let full = std::mem::take(applied);
            self.hand_over(Pending::changes(ticket, full.inboxes), vec![full.regions], Vec::new());
        }
        let index = self.free_inbox()?;
        applied.inboxes.push(index);
        Ok(&self.parts.inboxes[index])
    }

    /// A free inbox; where none is, the oldest submission is waited for.
    fn free_inbox(&mut self) -> Result<usize, ExecuteError> {
        if let Some(index) = self.free_inboxes.pop() {
            return Ok(index);
        }
        // Reports come in the order of submission, and every used inbox belongs to one. Each submission is owed a last
        // report, also by actors that have ended.
        let mut finished = 0;
        loop {
            let report = self.reports.recv().expect("the executor holds a sender");
            let (last, failed) = (report.last, report.result.is_err());
            self.early.push_back(report);
            if failed {
                let report = self.early.pop_back().expect("put there above");
                self.take(report)?;
            }
            if !last {
                continue;
            }
            let done = self.early_finished();
            if done > finished {
                finished = done;
                let freed: Vec<usize> = self
                    .pending
                    .iter_mut()
                    .take(finished)
                    .flat_map(|pending| std::mem::take(&mut pending.inboxes))
                    .collect();
                self.free_inboxes.extend(freed);
                let _ = self.outbox.wake.try_send(());
                if let Some(index) = self.free_inboxes.pop() {
                    return Ok(index);
                }
            }
        }
    }

    /// The submissions of a plan that is finished; those of changes alone, which nobody asks for, go with the next.
    fn submissions_of(&mut self, ticket: Ticket) -> Vec<SubmissionRecord> {
        let (of, kept) = self.submissions.drain(..).partition::<Vec<_>, _>(|(of, _)| of.0 <= ticket.0);
        self.submissions = kept.into();
        of.into_iter().map(|(_, record)| record).collect()
    }

    fn early_finished(&self) -> usize {
        self.early.iter().filter(|report| report.last).count()
    }

    /// The bucket and the regions of `steps` decode steps of so many sequences.
    fn decode_steps(&mut self, sequences: u32, steps: u32) -> (u32, Vec<DecodeRegion>) {
        let (rows, regions) = fitting(&self.parts.decode, sequences);
        let overlaps = !self.repeats && self.overlap.allows(Instant::now());
        let Some(carried) = regions.carried.as_ref().filter(|_| overlaps) else {
            return (rows, vec![regions.plain.clone(); steps as usize]);
        };
        let first = self.carried_steps + 1;
        self.carried_steps += u64::from(steps);
        let region = |step| match &regions.broken {
            Some(broken) if self.parts.injection.breaks(step) => broken,
            _ => carried,
        };
        (rows, (first..self.carried_steps + 1).map(|step| region(step).clone()).collect())
    }

    /// The entries of a step's rows, for which `words` has room. Alternatives, which few ask for, are read only where
    /// there are some.
    fn ring_entries<'a>(&'a self, step: u32, words: &'a mut [u32]) -> impl Iterator<Item = RingEntry> + 'a {
        let RingLayout { steps, rows: ring_rows } = self.parts.ring;
        let at = RingEntry::at(step, 0, steps, ring_rows) as u64 * 4;
        self.parts.ring_buffer.read(at, bytemuck::cast_slice_mut(words));
        let top = move |row: u32| {
            let mut words = [0u32; state::TOP_WORDS as usize];
            let at = RingEntry::top_at(step, row, steps, ring_rows) as u64 * 4;
            self.parts.ring_buffer.read(at, bytemuck::cast_slice_mut(&mut words));
            words
        };
        let entries = words.chunks_exact(state::ENTRY_WORDS as usize).zip(0..);
        entries.map(move |(words, row)| RingEntry::read(words, || top(row)))
    }

    /// The tokens of steps `from..to`, and the first step that drew none because of a fault (`to` if none is) with its
    /// fault word.
    fn tokens(&self, pending: &Pending, from: u32, to: u32) -> Result<(Vec<Sampled>, u32, u32), ExecuteError> {
        let mut tokens = Vec::with_capacity((pending.rows * (to - from)) as usize);
        let mut words = vec![0u32; (pending.rows * state::ENTRY_WORDS) as usize];
        for step in from..to {
            let number = pending.first_step.wrapping_add(step);
            for (row, entry) in self.ring_entries(number, &mut words).enumerate() {
                if entry.step != number {
                    return Err(ExecuteError::StepMismatch { expected: number, found: entry.step });
                }
                if entry.done == state::DONE_FAULT {
                    return Ok((tokens, step, entry.fault));
                }
                let Some(id) = entry.token else { continue };
                // The slot is the same sequence's until all its plans are reported.
                let asked = self.logprobs[entry.slot as usize];
                // Only row 0 is copied; `submit` puts a slot that asks there.
                let logits = (pending.dump && row == 0 && self.dumps[entry.slot as usize]).then(|| {
                    let mut logits = vec![0f32; self.parts.capacity.vocabulary as usize];
                    self.parts.dump.read(0, bytemuck::cast_slice_mut(&mut logits));
                    logits
                });
                tokens.push(Sampled {
                    slot: Slot(entry.slot),
                    id,
                    draft: row as u32 % (pending.drafts + 1),
                    done: match entry.done {
                        state::DONE_STOP => Some(Done::Stop),
                        state::DONE_LENGTH => Some(Done::Length),
                        _ => None,
                    },
                    logprobs: asked.then_some(TokenLogprobs { chosen: entry.logprob, top: entry.top }),
                    logits,
                });
            }
        }
        Ok((tokens, to, 0))
    }

    fn take(&mut self, mut report: Report) -> Result<Option<Progress>, ExecuteError> {
        if let Err(error) = report.result {
            // Nothing follows of it.
            self.pending.pop_front();
            let device = self.parts.device_name.clone();
            return Err(match error.is_lost() {
                true => ExecuteError::DeviceLost { device, source: Box::new(error) },
                false => ExecuteError::Failed(format!("device \"{device}\": {error}")),
            });
        }
        let mut pending = self.pending.pop_front().unwrap_or_else(|| panic!("report {} has no submission", report.id));
        assert_eq!(pending.ticket.0, report.id, "reports come in the order of submission");
        let ungated = report.record.as_deref().and_then(ungated);
        if let Some(record) = report.record.take() {
            self.submissions.push_back((pending.ticket, *record));
        }
        // A gated step is two entries.
        let (from, to) = (pending.entries, report.entries.min(pending.steps.max(1)));
        pending.entries = to;
        let progress = match pending.work {
            Kind::Changes => None,
            Kind::Prompts | Kind::Sampled => {
                let (tokens, good, fault) = match pending.work {
                    Kind::Sampled => self.tokens(&pending, from.min(pending.good), to.min(pending.good))?,
                    _ => (Vec::new(), to, 0),
                };
                let from = from.min(pending.good);
                if good < to.min(pending.good) {
                    (pending.good, pending.fault) = (good, fault);
                }
                let first = !pending.started;
                pending.started = true;
                let cost = pending.cost(&report, first, good - from);
                let finished = report.last && pending.good >= pending.steps;
                let steps = good - from;
                let progress = Progress {
                    ticket: pending.ticket,
                    steps,
                    tokens,
                    scored: pending.scoring.filter(|_| report.last).map(|scoring| self.scores(scoring)),
                    finished,
                    faults: if finished { pending.faults } else { 0 },
                    cost,
                    submissions: if finished { self.submissions_of(pending.ticket) } else { Vec::new() },
                };
                (finished || good > from).then_some(progress)
            }
        };
        if report.last {
            self.free_inboxes.append(&mut pending.inboxes);
            if pending.work == Kind::Sampled && pending.good < pending.steps {
                self.note_fault(&pending);
                self.run_again(&pending)?;
            }
            let total = report.device_time.unwrap_or_else(|| pending.submitted.elapsed());
            // What waited at the gate does not count as a step's time.
            let total = match pending.gate {
                Some(_) => ungated,
                None => Some(total),
            };
            match total {
                None => {}
                // Waiting in vain is not what a step takes.
                Some(_) if pending.good < pending.steps => {}
                // Another chunk as long takes less.
                Some(_) if pending.scoring.is_some() => {}
                Some(total) if pending.prompt_tokens > 0 => self.pace.note_chunk(pending.prompt_tokens, total),
                Some(total) if pending.work == Kind::Sampled => {
                    let (each, time) = (pending.drafts + 1, total / pending.steps.max(1));
                    match pending.drafts {
                        0 => self.pace.note_step(pending.rows.max(1), time),
                        drafts => self.pace.note_verify(pending.rows / each, drafts, time),
                    }
                }
                Some(_) => {}
            }
        } else {
            self.pending.push_front(pending);
        }
        Ok(progress)
    }
}

/// How long the first part of a gated step took on the device, where that was timed.
fn ungated(record: &SubmissionRecord) -> Option<Duration> {
    let (_, body) = record.regions.split_last()?;
    let [first, ..] = body else { return None };
    Some(body.last()?.end.since(first.begin))
}

impl GpuExecutor {
    /// The regions of a step of prompts, the rows that draw tokens, and the prompts' tokens; what the device must know
    /// of the step is patched.
    fn prompts(&self, chunks: &[Chunk], patch: &mut Patch) -> (Vec<Arc<Region>>, u32, u32) {
        let layout = self.parts.layout;
        let mut chunks: Vec<&Chunk> = chunks.iter().collect();
        // Only the first row's logits can be asked for.
        chunks.sort_by_key(|chunk| !(chunk.last && self.dumps[chunk.slot.0 as usize]));
        let keeps: Vec<Vec<(u32, u32)>> =
            chunks.iter().map(|chunk| chunk.keeps.iter().map(|keep| (keep.tokens, keep.cell.0)).collect()).collect();
        let rows: Vec<PromptRows<'_>> = chunks
            .iter()
            .zip(&keeps)
            .map(|(chunk, keeps)| PromptRows {
                slot: chunk.slot.0,
                start: chunk.start,
                tokens: &chunk.tokens,
                last: chunk.last,
                // A slot's own cell goes on from chunk to chunk.
                next: chunk.next,
                from: chunk.restore.map(|cell| cell.0).or((chunk.start > 0).then_some(chunk.slot.0)),
                keeps,
            })
            .collect();
        for (word, words) in layout.chunk_layout().describe(&rows, |rows| flash_tiles(self.parts.heads, rows)) {
            patch.set_all(layout.chunk_word(word), &words);
        }
        let tokens = chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum();
        let lasts = chunks.iter().filter(|chunk| chunk.last).count() as u32;
        let (_, layers) = fitting(&self.parts.prefill, tokens);
        let mut regions = vec![Arc::clone(layers)];
        let mut rows = 0;
        if lasts > 0 {
            let (bucket, first) = fitting(&self.parts.first, lasts);
            regions.push(Arc::clone(first));
            rows = bucket;
        }
        (regions, rows, tokens)
    }

    /// What of a step's tokens is scored, and by which regions; what the device must know of it is patched.
    fn scoring(&mut self, chunks: &[Chunk], patch: &mut Patch) -> Option<(Scoring, Vec<Arc<Region>>)> {
        let asked = chunks.iter().find(|chunk| chunk.score.is_some())?;
        assert_eq!(chunks.len(), 1, "a scored chunk shares its plan");
        let rows = asked.tokens.len() as u32;
        let tokens = rows - u32::from(asked.next.is_none());
        if tokens == 0 {
            return None;
        }
        let entry = self.scored % 2 * self.parts.layout.chunk;
        self.scored = self.scored.wrapping_add(1);
        let words = [0, asked.next.unwrap_or(state::TOKEN_NONE), asked.score?, entry];
        patch.set_all(self.parts.layout.score_word(), &words);
        let (each, region) = &self.parts.score;
        let turns = vec![Arc::clone(region); tokens.div_ceil(*each) as usize];
        Some((Scoring { slot: asked.slot, first: asked.start + 1, tokens, entry }, turns))
    }

    /// What was scored, once the device is done with it.
    fn scores(&self, scoring: Scoring) -> ScoredChunk {
        let Scoring { slot, first, tokens, entry } = scoring;
        let mut words = vec![0u32; (tokens * state::SCORE_WORDS) as usize];
        let at = u64::from(entry) * u64::from(state::SCORE_WORDS) * 4;
        self.parts.scores.read(at, bytemuck::cast_slice_mut(&mut words));
        let scored = |words: &[u32]| {
            let Score { token, logprob, top } = Score::read(words);
            Scored { id: token, logprobs: TokenLogprobs { chosen: logprob, top } }
        };
        let tokens = words.chunks_exact(state::SCORE_WORDS as usize).map(scored).collect();
        ScoredChunk { slot, first, tokens }
    }

    /// Queues work behind all earlier, after changes of the device's state.
    fn enqueue(&mut self, ticket: Ticket, planned: Option<Work>, mut posts: Posts) -> Result<(), ExecuteError> {
        let layout = self.parts.layout;
        let mut prompt_tokens = 0;
        let mut scoring = None;
        let mut draw: Option<Arc<Region>> = None;
        let steps = planned.as_ref().map_or(0, Work::steps);
        // The regions of each step; of a plan without steps, what it runs.
        let once = |regions: Vec<Arc<Region>>| vec![regions; steps.max(1) as usize];
        let (work, steps, rows, mut entries, flush) = match &planned {
            None => (Kind::Changes, 0, 0, once(Vec::new()), FlushReason::PhaseBoundary),
            Some(Work::Prefill { chunks }) => {
                let (mut regions, rows, tokens) = self.prompts(chunks, &mut posts.patch);
                prompt_tokens = tokens;
                if let Some((asked, turns)) = self.scoring(chunks, &mut posts.patch) {
                    scoring = Some(asked);
                    // Behind the layers, and before the first token's logits take the place of theirs.
                    regions.splice(1..1, turns);
                }
                let kind = if rows > 0 { Kind::Sampled } else { Kind::Prompts };
                (kind, steps, rows, once(regions), FlushReason::PhaseBoundary)
            }
            Some(Work::Decode { slots, drafts, awaits, .. }) => {
                let (sequences, regions) = match drafts {
                    0 => {
                        let (sequences, mut regions) = self.decode_steps(slots.len() as u32, steps);
                        if *awaits {
                            let [body, drawing] = regions.remove(0).parts.expect("there are gates");
                            draw = Some(drawing);
                            (sequences, vec![vec![body]])
                        } else {
                            (sequences, regions.into_iter().map(|region| vec![region.whole]).collect())
                        }
                    }
                    _ => {
                        let (sequences, region) = fitting(&self.parts.verify[drafts], slots.len() as u32);
                        (sequences, once(vec![Arc::clone(region)]))
                    }
                };
                let rows = sequences * (drafts + 1);
                let mut slots = slots.clone();
                slots.sort_by_key(|slot| !self.dumps[slot.0 as usize]);
                for row in 0..sequences {
                    let slot = slots.get(row as usize).map_or(u32::MAX, |slot| slot.0);
                    if self.batch[row as usize] != slot {
                        self.batch[row as usize] = slot;
                        posts.patch.set(layout.batch_word(row), slot);
                    }
                }
                (Kind::Sampled, steps, rows, regions, FlushReason::Readback)
            }
        };
        let applied = self.post(ticket, posts)?;
        let sum = |regions: &[Arc<Region>]| {
            regions.iter().fold((0, 0), |(d, b), region| (d + region.dispatches(), b + region.barriers()))
        };
        let fixed = sum(&applied.regions);
        // There is one place for logits: the plan that fills it is the only one in flight that does.
        let asks = |slot: &Slot| self.dumps[slot.0 as usize];
        let asked = match &planned {
            Some(Work::Prefill { chunks }) => chunks.iter().any(|chunk| chunk.last && asks(&chunk.slot)),
            Some(Work::Decode { slots, .. }) => slots.iter().any(asks),
            None => false,
        };
        let dump = asked && !self.pending.iter().any(|pending| pending.dump);
        let mut each = sum(&entries[0]);
        if let Some(draw) = draw {
            let drawing = sum(std::slice::from_ref(&draw));
            each = (each.0 + drawing.0, each.1 + drawing.1);
            entries.push(vec![draw]);
        }
        if dump {
            let dump = &self.parts.dump_region;
            let copying = sum(std::slice::from_ref(dump));
            each = (each.0 + copying.0, each.1 + copying.1);
            for entry in entries.iter_mut().rev().take(steps.max(1) as usize) {
                entry.push(Arc::clone(dump));
            }
        }
        if self.profiled > 0 && planned.is_some() {
            self.profiled -= 1;
            let timed = entries.len() - steps.max(1) as usize + 1;
            for region in entries.iter_mut().take(timed).flatten() {
                self.time(region);
            }
        }
        entries[0].splice(0..0, applied.regions);
        // A slow device reports single steps, a fast one the whole plan.
        let every = match self.pace.step() {
            Some(time) if !time.is_zero() => {
                let patience = REPORT_EVERY / rows.max(1);
                (patience.as_nanos() / time.as_nanos()).clamp(1, u128::from(steps.max(1))) as u32
            }
            _ => 1,
        };
        let (slots, drafts, awaits) = match planned {
            Some(Work::Decode { slots, drafts, awaits, .. }) => (slots, drafts, awaits),
            _ => (Vec::new(), 0, false),
        };
        let reported = if awaits { 0 } else { entries.len() as u32 };
        let report_after = (1..=reported).filter(|entry| entry % every == 0).collect();
        self.gates += u64::from(awaits);
        let gate = awaits.then_some(self.gates);
        let first_step = self.next_step;
        if work == Kind::Sampled {
            self.next_step = self.next_step.wrapping_add(steps);
        }
        let changes = Pending::changes(ticket, applied.inboxes);
        let pending = Pending {
            steps,
            first_step,
            rows,
            slots,
            drafts,
            work,
            prompt_tokens,
            scoring,
            dump,
            fixed,
            each,
            gate,
            awaits,
            flush,
            ..changes
        };
        self.hand_over(pending, entries, report_after);
        Ok(())
    }

    /// Puts a region in place of another that does the same and is timed. It is recorded for this one run.
    fn time(&self, region: &mut Arc<Region>) {
        match region.timed(&self.parts.device, &self.parts.pipelines) {
            Ok(timed) => *region = Arc::new(timed),
            Err(error) => tracing::warn!(%error, region = region.name(), "a region cannot be profiled"),
        }
    }

    /// Gives entries to the compute actor, whose reports will be about `pending`.
    fn hand_over(&mut self, mut pending: Pending, entries: Vec<Vec<Arc<Region>>>, report_after: Vec<u32>) {
        let waits = std::mem::take(&mut self.parts.ready);
        if !waits.is_empty() {
            pending.flush = FlushReason::CrossQueue;
        }
        let (id, flush) = (pending.ticket.0, pending.flush);
        let gate = pending.gate.map(|value| (Arc::clone(&self.parts.gate), value));
        self.pending.push_back(pending);
        let outbox = self.outbox.clone();
        self.parts.compute.submit(Submission { id, entries, waits, gate, flush, report_after, outbox });
    }

    /// Opens the gate as far as no step waits for a mask.
    fn open_gate(&self) -> Result<(), ExecuteError> {
        // Those that a fault has let through come back behind others.
        let opened = self.parts.gate.opened();
        let waits = |pending: &&Pending| pending.awaits && pending.gate > Some(opened);
        let waiting = self.pending.iter().filter(waits).filter_map(|pending| pending.gate).min();
        self.open_gate_to(waiting.map_or(self.gates, |value| value - 1))
    }

    fn open_gate_to(&self, value: u64) -> Result<(), ExecuteError> {
        let failed = |error| ExecuteError::Failed(format!("device \"{}\": {error}", self.parts.device_name));
        self.parts.gate.open(value).map_err(failed)
    }

    /// A call of a plan's step waited too long for tagged words.
    fn note_fault(&mut self, pending: &Pending) {
        let Some(pause) = self.overlap.fault(Instant::now()) else { return };
        self.parts.variants.fell_back(Fallback::OverlapFault);
        let (_, regions) = fitting(&self.parts.decode, pending.rows);
        let call = regions.carried.as_ref().and_then(|region| region.whole.label(pending.fault.wrapping_sub(1)));
        tracing::warn!(
            device = self.parts.device_name,
            call = call.unwrap_or("unknown"),
            rows = pending.rows,
            pause_ms = pause.as_millis() as u64,
            "a call of a decode step without barriers waited too long: its step and those behind it run again, with \
             barriers until the pause is over"
        );
    }

    /// Submits the steps of a plan that drew nothing because of a fault again, with barriers. Plans that were queued
    /// behind this one draw nothing either, as the fault word is set, and come here in their turn.
    ///
    /// The device's state is that of the last good step, and what faulty steps have written is written again before it
    /// is read: activations by every step; keys, values and the convolution's window at the position that a step
    /// computes; recurrent state only takes tokens that were drawn (`delta_step`). Slots, counts, random state and the
    /// ring's tokens are the sampler's, which does nothing while the fault word is set.
    fn run_again(&mut self, pending: &Pending) -> Result<(), ExecuteError> {
        if pending.faults >= MOST_REPEATS {
            let device = &self.parts.device_name;
            return Err(ExecuteError::Failed(format!(
                "device \"{device}\": a decode plan has faulted {} times, at most {MOST_REPEATS} repeats are tried",
                pending.faults + 1
            )));
        }
        let mut posts = Posts::default();
        posts.patch.set(self.parts.layout.fault_word(), 0);
        // Steps behind this one draw nothing, with masks or without, and are run again in their turn: until they have
        // come out of the queue this one does not run.
        self.open_gate_to(self.gates)?;
        let (slots, steps) = (pending.slots.clone(), pending.steps - pending.good);
        let work = Work::Decode { slots, steps, drafts: 0, awaits: pending.awaits };
        self.repeats = true;
        let queued = self.enqueue(pending.ticket, Some(work), posts);
        self.repeats = false;
        queued?;
        self.pending.back_mut().into_iter().for_each(|again| again.faults = pending.faults + 1);
        Ok(())
    }
}

impl Pending {
    /// Of changes alone.
    fn changes(ticket: Ticket, inboxes: Vec<usize>) -> Pending {
        Pending {
            ticket,
            steps: 0,
            first_step: 0,
            rows: 0,
            entries: 0,
            good: u32::MAX,
            fault: 0,
            faults: 0,
            work: Kind::Changes,
            prompt_tokens: 0,
            scoring: None,
            slots: Vec::new(),
            drafts: 0,
            dump: false,
            inboxes,
            fixed: (0, 0),
            each: (0, 0),
            gate: None,
            awaits: false,
            flush: FlushReason::PhaseBoundary,
            submitted: Instant::now(),
            started: false,
        }
    }

    fn cost(&self, report: &Report, first: bool, steps: u32) -> PerToken {
        let count = |fixed: u32, each: u32| f64::from(each * steps + if first { fixed } else { 0 });
        let once = if first { 1.0 } else { 0.0 };
        let mut cost = PerToken {
            submits: once,
            dispatches: count(self.fixed.0, self.each.0),
            barriers: count(self.fixed.1, self.each.1),
            host_waits: f64::from(report.host_waits),
            enqueue_us: report.enqueue.as_secs_f64() * 1e6,
            gpu_us: report.device_time.map_or(0.0, |t| t.as_secs_f64() * 1e6),
            ..PerToken::default()
        };
        match self.flush {
            FlushReason::PhaseBoundary => cost.flushes.phase_boundary = once,
            FlushReason::Readback => cost.flushes.readback = once,
            FlushReason::CrossQueue => cost.flushes.cross_queue = once,
        }
        cost
    }
}

impl Executor for GpuExecutor {
    fn capacity(&self) -> &Capacity {
        &self.parts.capacity
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError> {
        let mut posts = self.changes(&plan.changes);
        let ticket = Ticket(self.next);
        self.next += 1;
        if matches!(plan.work, Some(Work::Decode { .. })) {
            self.decode_plans = self.decode_plans.wrapping_add(1);
            if self.decode_plans == self.parts.injection.plan {
                posts.patch.set(self.parts.layout.fault_word(), 1);
            }
        }
        self.enqueue(ticket, plan.work, posts)?;
        Ok(ticket)
    }

    fn wake(&self) -> &Receiver<()> {
        &self.wake
    }

    fn poll(&mut self) -> Result<Vec<Progress>, ExecuteError> {
        let mut progress = Vec::new();
        while let Some(report) = self.early.pop_front().or_else(|| self.reports.try_recv().ok()) {
            progress.extend(self.take(report)?);
        }
        Ok(progress)
    }

    fn set_mask(&mut self, slot: Slot, mask: &[u32]) {
        let words = mask_words(self.parts.capacity.vocabulary);
        assert_eq!(mask.len() as u32, words, "a mask has a bit for each token");
        self.parts.masks.write(u64::from(slot.0) * u64::from(words) * 4, bytemuck::cast_slice(mask));
    }

    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError> {
        for pending in self.pending.iter_mut().filter(|pending| pending.ticket == ticket) {
            pending.awaits = false;
        }
        self.open_gate()
    }

    fn profile(&mut self, plans: u32) {
        self.profiled = plans;
    }

    fn faults(&self) -> u64 {
        self.parts.variants.fallen(Fallback::OverlapFault)
    }

    fn pace(&self) -> &Pace {
        &self.pace
    }

    fn variants(&self) -> Arc<Variants> {
        Arc::clone(&self.parts.variants)
    }
}

impl Drop for GpuExecutor {
    fn drop(&mut self) {
        // Nobody brings masks any more; what is drawn without is not reported.
        let _ = self.parts.gate.open(self.gates);
        // The device's work ends before what it works on goes. There is no limit: each submission is owed a last report,
        // also where the device is lost.
        let mut open: usize = self.pending.len() - self.early_finished().min(self.pending.len());
        while open > 0 {
            match self.reports.recv_timeout(Duration::from_secs(30)) {
                Ok(report) => open -= usize::from(report.last),
                Err(_) => tracing::warn!(device = self.parts.device_name, plans = open, "the device is still at work"),
            }
        }
    }
}

fn slot_init(params: &SlotParams) -> SlotInit {
    let sampling = &params.sampling;
    SlotInit {
        remaining: params.max_tokens,
        generated: params.generated,
        min_left: params.min_tokens,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition: sampling.repetition_penalty,
        presence: sampling.presence_penalty,
        frequency: sampling.frequency_penalty,
        seed: params.seed,
        stop_ids: params.stop_ids.clone(),
        bias_count: (state::bias_words(&sampling.logit_bias).len() / 2) as u32,
        logprobs: params.logprobs,
        dump_logits: params.dump_logits,
        masked: params.mask.is_some(),
        prompt_tokens: params.prompt_tokens,
    }
}

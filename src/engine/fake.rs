//! An executor without a device, for tests and simulations. It implements the executor's contract exactly, and panics
//! if the step loop breaks its part of it. It draws tokens that depend on all tokens before, which it reads through the
//! page table, so that a page that is lost, wrongly shared or overwritten changes the output. With recurrent state,
//! each cell holds a hash of the tokens that it includes, which must match the content of the pages.
//! Not here: models and GPUs.

use crate::actors::timeline::{ClockQuality, FlushReason, KernelSpan, RegionSpan, SubmissionRecord};
use crate::actors::timeline::{Point, Role};
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::pace::Pace;
use crate::engine::plan::{
    Capacity, Change, Chunk, Done, Drafts, MOST_KEEPS, Page, PageTable, PlanReport, PooledChunk, STATE_TOKENS, Sampled,
    SampledDetails, ScoredChunk, Slot, SlotParams, StateSlot, StepPlan, Ticket, Work,
};
use crate::engine::request::{Flushes, PerToken, Scored, TokenLogprobs};
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::sampling::mask_words;
use crate::model::grammar::bit;
use crate::model::split_mix::split_mix;
use crate::telemetry::clock::Moment;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use std::collections::{HashSet, VecDeque};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The behavior of a fake executor.
#[derive(Clone, Debug)]
pub struct FakeConfig {
    /// The executor's capacity.
    pub capacity: Capacity,
    /// The time of a decode step.
    pub step: Duration,
    /// The time of a prefill step.
    pub chunk: Duration,
    /// If not empty, output token `i` is `script[i % script.len()]`; otherwise tokens depend on the history.
    pub script: Vec<u32>,
    /// If not 0, decode plans are reported in parts, cut at random with this seed. Also the seed that decides how many
    /// drafts are accepted.
    pub parts: u64,
    /// The device is lost at the first plan with work after this many.
    pub lost_after: Option<u64>,
    /// Every `fault_every`-th decode plan has a fault that keeps its steps from drawing, so that they run again: the
    /// plan takes twice as long and draws the same tokens.
    pub fault_every: Option<u64>,
}

impl Default for FakeConfig {
    fn default() -> FakeConfig {
        FakeConfig {
            capacity: Capacity {
                slots: 1,
                pages: 64,
                window: None,
                context: 1024,
                prefill_chunk: 128,
                causal: true,
                prompts: 8,
                sequences: 8,
                mixed_steps: None,
                buckets: vec![1],
                run_ahead: 32,
                gates: true,
                vocabulary: 256,
                drafts: Drafts::default(),
                snapshots: None,
                plan_limit: None,
            },
            step: Duration::from_millis(1),
            chunk: Duration::from_millis(2),
            script: Vec::new(),
            parts: 0,
            lost_after: None,
            fault_every: None,
        }
    }
}

/// The fake executor.
#[derive(Debug)]
pub struct FakeExecutor {
    config: FakeConfig,
    clock: Clock,
    wake: Receiver<()>,
    memory: Vec<PageMemory>,
    /// The pages of layers with a sliding window, and who has read each of them.
    windows: Vec<(PageMemory, Vec<Reader>)>,
    slots: Vec<FakeSlot>,
    /// By cell: a hash of the tokens that its state includes; `None` if nothing was written.
    cells: Vec<Option<u64>>,
    decode_plans: u64,
    faults: u64,
    /// The random state that decides how many drafts are accepted.
    luck: u64,
    /// The ticket of the last plan submitted.
    ticket: u64,
    /// The ticket of the plan being executed.
    working: u64,
    /// The plans that are not executed yet: one whose masks are not all set, and those after it. They are executed when
    /// it is released.
    held: VecDeque<Held>,
    /// The ticket of the last plan with work that was reported finished.
    finished: u64,
    /// The number of decode steps executed and not reported.
    steps_queued: u32,
    /// The reports that are not due yet, in order.
    reports: VecDeque<Report>,
    /// The submission of the plan whose last report is not queued yet.
    submission: Option<SubmissionRecord>,
    /// When the simulated device has finished all its work.
    busy_until: Instant,
    parts: u64,
    works: u64,
    /// The number of plans with work that are still to be profiled.
    profiled: u32,
    pace: Pace,
}

#[derive(Debug)]
struct Held {
    ticket: Ticket,
    plan: StepPlan,
    awaits: bool,
}

#[derive(Debug)]
struct Report {
    due: Instant,
    /// The number of decode steps that the report completes; 0 for a prefill step.
    decode_steps: u32,
    progress: PlanReport,
}

#[derive(Debug)]
enum Clock {
    /// Time is set by the simulation.
    Virtual(Instant),
    /// The machine's time; a thread wakes the step loop at each of the times sent.
    Real(Timer),
}

#[derive(Debug)]
struct Timer {
    // Order matters: the thread ends when its inbox closes.
    times: Option<Sender<Instant>>,
    thread: Option<JoinHandle<()>>,
}

/// The tokens of a page, and the last stay of a sequence that wrote to it.
#[derive(Clone, Debug)]
struct PageMemory {
    tokens: [u32; PAGE_TOKENS as usize],
    /// Whether the draft model has the token's keys and values, and those of all tokens before it.
    drafted: [bool; PAGE_TOKENS as usize],
    /// The slot, and the number of the stay in it.
    writer: Option<(Slot, u64)>,
}

impl PageMemory {
    /// Returns a page that nobody has written since `writer` began it.
    fn begun(writer: Option<(Slot, u64)>) -> PageMemory {
        PageMemory { tokens: [POISON; PAGE_TOKENS as usize], drafted: [false; PAGE_TOKENS as usize], writer }
    }
}

/// The last time that a slot has read a window page.
#[derive(Clone, Copy, Debug)]
struct Reader {
    slot: Slot,
    stay: u64,
    /// The position of the row that has read it.
    position: u32,
    /// The plan.
    ticket: u64,
}

/// The value of a position that was never written.
const POISON: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct FakeSlot {
    params: SlotParams,
    /// Whether a sequence has joined and not left.
    joined: bool,
    done: bool,
    /// The number of joins so far.
    stay: u64,
    table: Vec<Page>,
    /// The window pages, from the one with this index in the page table on.
    window: (u32, Vec<Page>),
    /// The number of positions written.
    written: u32,
    /// The token drawn last, which is not written yet: the input of the next step.
    input: Option<u32>,
    /// The number of tokens drawn in this stay.
    drawn: u32,
    /// The ticket of the last plan whose work names the slot.
    last_ticket: u64,
    /// The number of samples drawn and not reported.
    unreported: u32,
}

impl FakeExecutor {
    /// Creates an executor on virtual time, which `advance` moves.
    pub fn simulated(config: FakeConfig, now: Instant) -> FakeExecutor {
        // The channel is never signalled: the simulation polls.
        let (_, wake) = bounded(1);
        FakeExecutor::with(config, Clock::Virtual(now), wake, now)
    }

    /// Creates an executor on real time with one slot, whose decode steps take `step` and prefill steps twice that.
    pub fn realtime(step: Duration) -> FakeExecutor {
        FakeExecutor::realtime_with(FakeConfig { step, chunk: step * 2, ..FakeConfig::default() })
    }

    /// Creates an executor on real time.
    pub fn realtime_with(config: FakeConfig) -> FakeExecutor {
        let (waker, wake) = bounded(1);
        // Unbounded, but it holds at most one time for each report of the plans in flight.
        let (times, inbox) = unbounded::<Instant>();
        let thread = std::thread::Builder::new()
            .name("fake device".to_string())
            .spawn(move || {
                for time in inbox {
                    std::thread::sleep(time.saturating_duration_since(Instant::now()));
                    // If it is full, the step loop has a wake-up to receive already.
                    let _ = waker.try_send(());
                }
            })
            .expect("a test's machine has threads");
        let clock = Clock::Real(Timer { times: Some(times), thread: Some(thread) });
        FakeExecutor::with(config, clock, wake, Instant::now())
    }

    fn with(config: FakeConfig, clock: Clock, wake: Receiver<()>, now: Instant) -> FakeExecutor {
        let empty = FakeSlot {
            params: SlotParams {
                sampling: super::request::Sampling::default(),
                seed: 0,
                generated: 0,
                prompt_tokens: 0,
                max_tokens: 0,
                min_tokens: 0,
                stop_ids: Vec::new(),
                logprobs: None,
                dump_logits: false,
                mask: None,
            },
            joined: false,
            done: false,
            stay: 0,
            table: Vec::new(),
            window: (0, Vec::new()),
            written: 0,
            input: None,
            drawn: 0,
            last_ticket: 0,
            unreported: 0,
        };
        FakeExecutor {
            memory: vec![PageMemory::begun(None); config.capacity.pages as usize],
            windows: vec![
                (PageMemory::begun(None), Vec::new());
                config.capacity.window.map_or(0, |window| window.pages) as usize
            ],
            slots: vec![empty; config.capacity.slots as usize],
            cells: vec![None; (config.capacity.slots + config.capacity.snapshots.unwrap_or(0)) as usize],
            decode_plans: 0,
            faults: 0,
            luck: config.parts,
            ticket: 0,
            working: 0,
            held: VecDeque::new(),
            finished: 0,
            steps_queued: 0,
            reports: VecDeque::new(),
            submission: None,
            busy_until: now,
            parts: config.parts,
            works: 0,
            profiled: 0,
            pace: Pace::default(),
            config,
            clock,
            wake,
        }
    }

    /// Moves virtual time forward.
    pub fn advance(&mut self, to: Instant) {
        match &mut self.clock {
            Clock::Virtual(now) => *now = (*now).max(to),
            Clock::Real(_) => panic!("a device on the machine's time cannot be moved"),
        }
    }

    /// Returns when the next report is due; `None` if nothing is in flight.
    pub fn next_report(&self) -> Option<Instant> {
        self.reports.front().map(|report| report.due)
    }

    /// Returns the full output that the executor draws for a request that runs alone.
    pub fn alone(prompt: &[u32], params: &SlotParams, vocabulary: u32, script: &[u32]) -> Vec<u32> {
        let mut tokens = prompt.to_vec();
        let mut output = Vec::new();
        loop {
            let index = params.generated + output.len() as u32;
            let token = draw(tokens.iter().copied(), params, index, vocabulary, script);
            output.push(token);
            tokens.push(token);
            if verdict(params, token, output.len() as u32).is_some() {
                return output;
            }
        }
    }

    fn now(&self) -> Instant {
        match self.clock {
            Clock::Virtual(now) => now,
            Clock::Real(_) => Instant::now(),
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Join { slot, params, .. } => {
                let finished = self.finished;
                let s = self.slot(slot);
                assert!(!s.joined || s.done, "{slot:?} joins while it runs");
                assert!(s.last_ticket <= finished, "{slot:?} joins before its last plan is finished");
                assert!(params.max_tokens > 0, "{slot:?} joins with nothing to draw");
                *s = FakeSlot {
                    params: *params,
                    joined: true,
                    done: false,
                    stay: s.stay + 1,
                    table: Vec::new(),
                    window: (0, Vec::new()),
                    written: 0,
                    input: None,
                    drawn: 0,
                    last_ticket: s.last_ticket,
                    unreported: 0,
                };
            }
            Change::Pages { slot, table: PageTable::Window, first, pages } => {
                for &page in &pages {
                    assert!((page.0 as usize) < self.windows.len(), "window {page:?} does not exist");
                }
                let s = self.slot(slot);
                assert!(s.joined, "window pages for {slot:?}, which has not joined");
                let (begin, own) = &mut s.window;
                if own.is_empty() {
                    *begin = first;
                }
                assert_eq!(*begin + own.len() as u32, first, "the window of {slot:?} has a gap");
                own.extend(pages);
            }
            Change::Pages { slot, table: PageTable::Full, first, pages } => {
                let most = self.config.capacity.context.div_ceil(PAGE_TOKENS);
                for &page in &pages {
                    assert!(page.0 < self.config.capacity.pages, "{page:?} does not exist");
                }
                let s = self.slot(slot);
                assert!(s.joined, "pages for {slot:?}, which has not joined");
                assert_eq!(s.table.len(), first as usize, "the page table of {slot:?} has a gap");
                s.table.extend(pages);
                assert!(s.table.len() <= most as usize, "more pages for {slot:?} than its context has");
            }
            Change::Leave { slot } => {
                let s = self.slot(slot);
                assert!(s.joined, "{slot:?} leaves and has not joined");
                s.joined = false;
            }
        }
    }

    fn prefill(&mut self, chunks: &[Chunk], decoding: &[Slot]) -> Vec<Sampled> {
        let capacity = &self.config.capacity;
        let tokens = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
        let (rows, most) = (tokens + decoding.len(), capacity.prefill_chunk);
        assert!(rows <= most as usize, "{rows} rows in a prefill step, at most {most}");
        let most = capacity.prompts;
        assert!(
            (1..=most as usize).contains(&chunks.len()),
            "{} prompts in a prefill step, at most {most}",
            chunks.len()
        );
        let (parts, most) = (chunks.len() + decoding.len(), capacity.sequences);
        assert!(parts <= most as usize, "{parts} sequences in a prefill step, at most {most}");
        let slots: HashSet<Slot> = chunks.iter().map(|chunk| chunk.slot).chain(decoding.iter().copied()).collect();
        assert_eq!(slots.len(), parts, "a slot twice in a plan");
        if !decoding.is_empty() {
            assert!(capacity.mixed_steps.is_some(), "{decoding:?} decode in a prefill step");
            assert!(self.steps_queued == 0, "a mixed step behind {} decode steps", self.steps_queued);
            assert!(chunks.iter().all(|chunk| chunk.score.is_none()), "rows beside a chunk that is scored");
        }
        let own = capacity.slots;
        let kept: Vec<StateSlot> = chunks.iter().flat_map(|chunk| &chunk.keeps).map(|keep| keep.cell).collect();
        let mut distinct: HashSet<StateSlot> = kept.iter().copied().collect();
        assert_eq!(distinct.len(), kept.len(), "a cell is written twice in a plan");
        distinct.extend(chunks.iter().filter_map(|chunk| chunk.restore));
        let read: HashSet<StateSlot> = chunks.iter().filter_map(|chunk| chunk.restore).collect();
        assert_eq!(distinct.len(), kept.len() + read.len(), "a cell is read and written in a plan");
        assert!(distinct.iter().all(|cell| cell.0 >= own), "a snapshot in a slot's own cell");
        let first: Vec<Sampled> = chunks.iter().flat_map(|chunk| self.chunk(chunk)).collect();
        let next = decoding.iter().flat_map(|slot| {
            self.begin_row(*slot);
            self.row(*slot, 0)
        });
        first.into_iter().chain(next).collect()
    }

    fn chunk(&mut self, chunk: &Chunk) -> Vec<Sampled> {
        let &Chunk { slot, ref tokens, start, last, restore, ref keeps, .. } = chunk;
        assert!(!tokens.is_empty(), "an empty chunk");
        let (ticket, causal) = (self.working, self.config.capacity.causal);
        let s = self.slot(slot);
        assert!(s.joined && !s.done, "a chunk for {slot:?}, which does not run");
        let whole = start == 0 && tokens.len() as u32 == s.params.prompt_tokens && !last;
        assert!(causal || whole, "{} tokens from {start} on of {slot:?}, not its whole prompt", tokens.len());
        let first = s.written == 0;
        if first && start.is_multiple_of(PAGE_TOKENS) {
            // The positions before the first chunk are in pages of the prefix cache.
            s.written = start;
        }
        assert_eq!(s.written, start, "a chunk of {slot:?} does not follow the one before");
        assert_eq!(s.drawn, 0, "a chunk for {slot:?}, which decodes");
        s.last_ticket = ticket;
        let stateful = self.config.capacity.snapshots.is_some();
        assert!(stateful || (restore.is_none() && keeps.is_empty()), "state of a model without any");
        assert!(restore.is_none() || (first && start > 0), "{slot:?} has state of its own");
        assert!(!stateful || restore.is_some() || start == 0 || !first, "{slot:?} begins at {start} without state");
        if first {
            self.cells[slot.0 as usize] = match restore {
                Some(cell) => Some(self.cells[cell.0 as usize].expect("a cell that is restored was written")),
                None => Some(0),
            };
        }
        assert!(keeps.len() <= MOST_KEEPS, "{} snapshots of a chunk", keeps.len());
        assert!(keeps.iter().all(|keep| keep.tokens > 0 && keep.tokens.is_multiple_of(STATE_TOKENS)), "{keeps:?}");
        assert!(keeps.iter().all(|keep| keep.tokens as usize <= tokens.len()), "{keeps:?} of {} tokens", tokens.len());
        let (begin, drafted) = (self.slot(slot).written, self.is_drafted(slot, self.slots[slot.0 as usize].written));
        for (count, &token) in (1..).zip(tokens) {
            self.write(slot, token);
            if drafted {
                self.set_drafted(slot, begin + count - 1);
            }
            for keep in keeps.iter().filter(|keep| keep.tokens == count) {
                self.cells[keep.cell.0 as usize] = self.cells[slot.0 as usize];
            }
        }
        if !last {
            return Vec::new();
        }
        let s = self.slot(slot);
        let history = s.params.prompt_tokens + s.params.generated;
        assert_eq!(s.written, history, "{slot:?} decodes from another history than it joined with");
        self.expect_sample(slot);
        vec![self.sample(slot)]
    }

    /// Returns the scores that a plan's chunk asks for; called when its tokens are written.
    fn score(&mut self, chunks: &[Chunk]) -> Option<ScoredChunk> {
        let asked = chunks.iter().find(|chunk| chunk.score.is_some())?;
        assert_eq!(chunks.len(), 1, "a scored chunk shares its plan");
        let unreported = self.reports.iter().filter(|report| report.progress.scored.is_some()).count();
        assert!(unreported < 2, "a third scored chunk before the first is reported");
        let top = asked.score?;
        let targets = asked.tokens[1..].iter().copied().chain(asked.next);
        let tokens = (asked.start..).zip(targets).map(|(before, token)| {
            let history: Vec<u32> = (0..=before).map(|position| self.read(asked.slot, position)).collect();
            scored(&history, token, top, self.config.capacity.vocabulary)
        });
        let tokens: Vec<Scored> = tokens.collect();
        (!tokens.is_empty()).then_some(ScoredChunk { slot: asked.slot, first: asked.start + 1, tokens })
    }

    /// Returns the pooled states of a plan's chunks; called when their tokens are written.
    fn pool(&mut self, chunks: &[Chunk]) -> Vec<PooledChunk> {
        let unreported = self.reports.iter().filter(|report| !report.progress.pooled.is_empty()).count();
        let pooled: Vec<PooledChunk> = chunks
            .iter()
            .filter(|chunk| !chunk.pooled.is_empty())
            .map(|chunk| {
                assert!(!chunk.last && chunk.pooled.end as usize <= chunk.tokens.len(), "{:?}", chunk.pooled);
                let mut sum = vec![0.0; HIDDEN];
                for row in chunk.pooled.clone() {
                    let history = (0..=chunk.start + row).map(|position| self.read(chunk.slot, position));
                    sum.iter_mut().zip(hidden(history)).for_each(|(sum, value)| *sum += value);
                }
                PooledChunk { slot: chunk.slot, tokens: chunk.pooled.len() as u32, sum }
            })
            .collect();
        assert!(pooled.is_empty() || unreported < 2, "a third plan with pooled tokens before the first is reported");
        pooled
    }

    /// Returns the token at a position of a slot.
    fn read(&self, slot: Slot, position: u32) -> u32 {
        let page = self.slots[slot.0 as usize].table[(position / PAGE_TOKENS) as usize];
        let token = self.memory[page.0 as usize].tokens[(position % PAGE_TOKENS) as usize];
        assert_ne!(token, POISON, "{slot:?} reads position {position}, which nobody has written");
        token
    }

    fn decode(&mut self, slots: &[Slot], steps: u32, drafts: u32) -> Vec<Vec<Sampled>> {
        let Drafts { most, sequences, .. } = self.config.capacity.drafts;
        assert!(drafts == 0 || (drafts <= most && slots.len() <= sequences as usize), "{drafts} drafts of {slots:?}");
        let capacity = &self.config.capacity;
        let most = *capacity.buckets.last().expect("a device has buckets");
        assert!(steps > 0 && !slots.is_empty(), "an empty plan");
        assert!(slots.len() <= most as usize, "{} rows, at most {most}", slots.len());
        assert_eq!(slots.iter().collect::<HashSet<_>>().len(), slots.len(), "a slot twice in a plan");
        self.steps_queued += steps;
        let (queued, most) = (self.steps_queued, capacity.run_ahead);
        assert!(queued <= most, "{queued} steps queued, at most {most}");
        slots.iter().for_each(|slot| self.begin_row(*slot));
        (0..steps).map(|_| slots.iter().flat_map(|slot| self.row(*slot, drafts)).collect()).collect()
    }

    /// Checks that a slot may have a row of the plan being executed.
    fn begin_row(&mut self, slot: Slot) {
        let ticket = self.working;
        let s = self.slot(slot);
        assert!(s.joined, "a step for {slot:?}, which has not joined or has left");
        assert!(s.drawn > 0, "a step for {slot:?}, whose prompt is not taken in");
        s.last_ticket = ticket;
    }

    /// Runs a slot's part of a decode step, and returns the tokens that it draws.
    fn row(&mut self, slot: Slot, drafts: u32) -> Vec<Sampled> {
        // The number of accepted drafts is random.
        let right = match drafts {
            0 => 0,
            _ => (split_mix(&mut self.luck) % u64::from(drafts + 1)) as u32,
        };
        let mut drawn = Vec::new();
        let position = self.slot(slot).written;
        let catches_up = drafts > 0 && self.config.capacity.drafts.catches_up && !self.slot(slot).done;
        if catches_up {
            // The draft model computes the last two tokens itself, and all of its drafts but the last.
            assert!(self.is_drafted(slot, position.saturating_sub(1)), "{slot:?} drafts at {position} from a gap");
        }
        for draft in 0..=right {
            if self.slot(slot).done {
                break;
            }
            let input = self.slot(slot).input.take().expect("a slot that decodes has drawn");
            self.write(slot, input);
            self.expect_sample(slot);
            drawn.push(Sampled { draft, ..self.sample(slot) });
        }
        if catches_up {
            let end = self.slot(slot).written.min(position + drafts);
            (position.saturating_sub(1)..end).for_each(|position| self.set_drafted(slot, position));
        }
        drawn
    }

    /// Whether the draft model has keys and values of all tokens of a slot before `position`.
    fn is_drafted(&self, slot: Slot, position: u32) -> bool {
        position == 0 || *self.drafted(slot, position - 1)
    }

    fn drafted(&self, slot: Slot, position: u32) -> &bool {
        let page = self.slots[slot.0 as usize].table[(position / PAGE_TOKENS) as usize];
        &self.memory[page.0 as usize].drafted[(position % PAGE_TOKENS) as usize]
    }

    fn set_drafted(&mut self, slot: Slot, position: u32) {
        let page = self.slots[slot.0 as usize].table[(position / PAGE_TOKENS) as usize];
        self.memory[page.0 as usize].drafted[(position % PAGE_TOKENS) as usize] = true;
    }

    /// The draft model computes tokens of slots that decode.
    fn catch_up(&mut self, chunks: &[Chunk]) {
        let capacity = &self.config.capacity;
        assert!(capacity.drafts.catches_up, "a draft model catches up with steps that it has been part of");
        let tokens = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
        let (parts, most) = (capacity.prompts as usize, capacity.prefill_chunk as usize);
        assert!((1..=parts).contains(&chunks.len()) && tokens <= most, "{tokens} tokens of {} slots", chunks.len());
        for chunk in chunks {
            let ticket = self.working;
            let s = self.slot(chunk.slot);
            assert!(s.joined && s.drawn > 0, "{:?} does not decode", chunk.slot);
            assert_eq!(s.unreported, 0, "{:?} catches up with tokens that are not known", chunk.slot);
            s.last_ticket = ticket;
            assert!(self.is_drafted(chunk.slot, chunk.start), "a gap before {} of {:?}", chunk.start, chunk.slot);
            assert!(!chunk.tokens.is_empty(), "an empty chunk");
            for (position, token) in (chunk.start..).zip(&chunk.tokens) {
                assert_eq!(self.read(chunk.slot, position), *token, "{:?} at {position}", chunk.slot);
                self.set_drafted(chunk.slot, position);
            }
        }
    }

    fn expect_sample(&mut self, slot: Slot) {
        let s = self.slot(slot);
        s.unreported += 1;
        assert!(!s.params.dump_logits || s.unreported == 1, "{slot:?} dumps logits and runs ahead");
    }

    fn write(&mut self, slot: Slot, token: u32) {
        let context = self.config.capacity.context;
        let s = self.slot(slot);
        let position = s.written;
        assert!(position < context, "{slot:?} writes position {position} of a context of {context}");
        let page = s.table.get((position / PAGE_TOKENS) as usize).copied();
        let page = page.unwrap_or_else(|| panic!("{slot:?} has no page for position {position}"));
        s.written += 1;
        let stay = s.stay;
        if self.memory[page.0 as usize].writer != Some((slot, stay)) {
            self.begin(page, slot, position);
        }
        self.memory[page.0 as usize].tokens[(position % PAGE_TOKENS) as usize] = token;
        self.write_window(slot, position, token);
        let state = &mut self.cells[slot.0 as usize];
        *state = state.map(|taken| take_in(taken, token));
    }

    /// Writes a token to its window page, and reads what its row sees.
    fn write_window(&mut self, slot: Slot, position: u32, token: u32) {
        let Some(window) = self.config.capacity.window else { return };
        let s = &self.slots[slot.0 as usize];
        let (stay, (first, own)) = (s.stay, &s.window);
        let page_of = |position: u32| {
            let index = (position / PAGE_TOKENS).checked_sub(*first).and_then(|index| own.get(index as usize));
            *index.unwrap_or_else(|| panic!("{slot:?} has no window page for position {position}"))
        };
        let seen: Vec<(u32, Page)> =
            ((position + 1).saturating_sub(window.tokens)..position).map(|seen| (seen, page_of(seen))).collect();
        let page = page_of(position);
        if self.windows[page.0 as usize].0.writer != Some((slot, stay)) || position.is_multiple_of(PAGE_TOKENS) {
            assert_eq!(position % PAGE_TOKENS, 0, "{slot:?} writes in the middle of window {page:?}");
            for reader in std::mem::take(&mut self.windows[page.0 as usize].1) {
                self.check_reader(page, reader);
            }
            self.windows[page.0 as usize].0 = PageMemory::begun(Some((slot, stay)));
        }
        self.windows[page.0 as usize].0.tokens[(position % PAGE_TOKENS) as usize] = token;
        let reader = Reader { slot, stay, position, ticket: self.working };
        for (seen, page) in seen {
            let (memory, readers) = &mut self.windows[page.0 as usize];
            let found = memory.tokens[(seen % PAGE_TOKENS) as usize];
            readers.retain(|reader| reader.slot != slot);
            readers.push(reader);
            assert_eq!(found, self.read(slot, seen), "{slot:?} sees another token at {seen} from {position}");
        }
    }

    /// Panics if a row that has read a window page may still be computed again, so that the page must not be written: it is
    /// in an unfinished plan, and no token drawn from it or from a later row of its slot was reported.
    fn check_reader(&self, page: Page, reader: Reader) {
        let s = &self.slots[reader.slot.0 as usize];
        let history = s.params.prompt_tokens + s.params.generated;
        // Row `history - 1 + n` draws token n of the stay.
        let reported = reader.position + 1 >= history && reader.position + 1 - history < s.drawn - s.unreported;
        let done = s.stay != reader.stay || reader.ticket <= self.finished || reported;
        assert!(done, "window {page:?} is written, and {reader:?} has read it");
    }

    /// Begins a page: the slot writes to it for the first time in this stay.
    fn begin(&mut self, page: Page, slot: Slot, position: u32) {
        assert_eq!(position % PAGE_TOKENS, 0, "{slot:?} writes in the middle of {page:?}, which it did not begin");
        for (index, other) in self.slots.iter().enumerate() {
            let live = (other.joined && !other.done) || other.last_ticket > self.finished;
            if index != slot.0 as usize && live {
                // Only pages that the other slot has already reached are in use: a sequence that has just joined may
                // share a page that is written now.
                let used = &other.table[..other.written.div_ceil(PAGE_TOKENS) as usize];
                assert!(!used.contains(&page), "{slot:?} writes to {page:?}, which slot {index} uses");
            }
        }
        let stay = self.slots[slot.0 as usize].stay;
        // Poison the page, so that its old content cannot matter.
        self.memory[page.0 as usize] = PageMemory::begun(Some((slot, stay)));
    }

    fn sample(&mut self, slot: Slot) -> Sampled {
        let vocabulary = self.config.capacity.vocabulary;
        let s = &self.slots[slot.0 as usize];
        let history: Vec<u32> = (0..s.written).map(|position| self.read(slot, position)).collect();
        if self.config.capacity.snapshots.is_some() {
            let state = history.iter().fold(0, |taken, token| take_in(taken, *token));
            assert_eq!(self.cells[slot.0 as usize], Some(state), "the state of {slot:?} is of another history");
        }
        let index = s.params.generated + s.drawn;
        let id = draw(history.into_iter(), &s.params, index, vocabulary, &self.config.script);
        let logprobs = s.params.logprobs.map(|top| TokenLogprobs {
            chosen: -0.5,
            top: (0..top).map(|i| ((id + i) % vocabulary, -0.5 - i as f32)).collect(),
        });
        let logits = s.params.dump_logits.then(|| {
            let mut logits = vec![0.0; vocabulary as usize];
            logits[id as usize] = 1.0;
            logits
        });
        let s = self.slot(slot);
        s.drawn += 1;
        s.input = Some(id);
        let done = verdict(&s.params, id, s.drawn);
        s.done = done.is_some();
        let details = (logprobs.is_some() || logits.is_some()).then(|| Box::new(SampledDetails { logprobs, logits }));
        Sampled { slot, id, done, draft: 0, details }
    }

    /// Returns the number of steps of the next partial report of a decode plan that has `steps` left.
    fn part(&mut self, steps: u32) -> u32 {
        if self.parts == 0 { steps } else { 1 + (split_mix(&mut self.parts) % u64::from(steps)) as u32 }
    }

    fn report(&mut self, due: Instant, decode_steps: u32, mut progress: PlanReport) {
        if progress.finished {
            progress.submissions.extend(self.submission.take());
        }
        if let Clock::Real(Timer { times: Some(times), .. }) = &self.clock {
            times.send(due).expect("the timer lives as long as its inbox");
        }
        self.reports.push_back(Report { due, decode_steps, progress });
    }

    /// Returns the record that a device would make of a submission that begins at `start`. If profiled, it has one
    /// kernel.
    fn submission(
        &mut self,
        ticket: Ticket,
        name: String,
        runs: u32,
        start: Instant,
        took: Duration,
    ) -> SubmissionRecord {
        let (now, begin) = (Moment::of(self.now()), Moment::of(start));
        let end = begin.plus(took);
        let flush = if name.starts_with("decode") { FlushReason::Readback } else { FlushReason::PhaseBoundary };
        let kernel = KernelSpan { label: "all".into(), kernel: "fake", begin, end };
        let kernels = if self.profiled > 0 { vec![kernel] } else { Vec::new() };
        self.profiled = self.profiled.saturating_sub(1);
        SubmissionRecord {
            device: std::sync::Arc::default(),
            enqueue: (now, now),
            point: Point { role: Role::Compute, value: ticket.0 },
            waits: Vec::new(),
            flush,
            seen: end,
            host_waits: 1,
            regions: vec![RegionSpan { name: name.into(), runs, begin, end, kernels }],
            clock: Some(ClockQuality::Estimated { error: Duration::ZERO }),
            dispatches: 10 * runs,
            barriers: 8 * runs,
        }
    }

    /// Executes the plans in the queue, up to one whose masks are not all set.
    fn work_off(&mut self) -> Result<(), ExecuteError> {
        while let Some(Held { ticket, plan, .. }) = self.held.pop_front_if(|held| !held.awaits) {
            self.work_on(ticket, plan)?;
        }
        Ok(())
    }

    fn work_on(&mut self, ticket: Ticket, plan: StepPlan) -> Result<(), ExecuteError> {
        self.working = ticket.0;
        for change in plan.changes {
            self.change(change);
        }
        let Some(work) = plan.work else {
            return Ok(());
        };
        self.works += 1;
        self.pace.note_step(1, self.config.step);
        if self.config.lost_after.is_some_and(|works| self.works > works) {
            return Err(ExecuteError::DeviceLost { device: "fake".to_string(), source: "it was told to".into() });
        }
        let start = self.busy_until.max(self.now());
        match work {
            Work::Prefill { chunks, decoding, awaits } => {
                assert!(!awaits || !decoding.is_empty(), "no row of a prefill step waits for masks");
                let tokens = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
                let count = (tokens + decoding.len()) as u32;
                let took = self.config.chunk;
                self.submission = Some(self.submission(ticket, format!("prefill.{count}"), 1, start, took));
                let tokens = self.prefill(&chunks, &decoding);
                let scored = self.score(&chunks);
                let pooled = self.pool(&chunks);
                self.pace.note_chunk(count, self.config.chunk);
                self.busy_until = start + self.config.chunk;
                let cost = cost(1, 1.0);
                let due = self.busy_until;
                let progress = PlanReport {
                    ticket,
                    steps: 1,
                    drafts: 0,
                    tokens,
                    scored,
                    pooled,
                    finished: true,
                    faults: 0,
                    cost,
                    submissions: Vec::new(),
                };
                self.report(due, 0, progress);
            }
            Work::CatchUp { chunks } => {
                self.submission = Some(self.submission(ticket, "catch_up".to_owned(), 1, start, self.config.step));
                self.catch_up(&chunks);
                self.busy_until = start + self.config.step;
                let progress = PlanReport {
                    ticket,
                    steps: 1,
                    drafts: 0,
                    tokens: Vec::new(),
                    scored: None,
                    pooled: Vec::new(),
                    finished: true,
                    faults: 0,
                    cost: cost(1, 1.0),
                    submissions: Vec::new(),
                };
                self.report(self.busy_until, 0, progress);
            }
            Work::Decode { slots, steps, drafts, awaits } => {
                assert!(!awaits || (steps, drafts) == (1, 0), "{steps} steps of {drafts} drafts wait for masks");
                let (name, took) = (format!("decode.{}", slots.len()), self.config.step * steps);
                self.submission = Some(self.submission(ticket, name, steps, start, took));
                match drafts {
                    0 => self.pace.note_step(slots.len() as u32, self.config.step),
                    _ => self.pace.note_verify(slots.len() as u32, drafts, self.config.step),
                }
                self.decode_plans += 1;
                let due = |every: Option<u64>| every.is_some_and(|every| self.decode_plans.is_multiple_of(every));
                let faults = due(self.config.fault_every);
                let mut rows = self.decode(&slots, steps, drafts).into_iter();
                let mut left = steps;
                self.faults += u64::from(faults);
                // The run that drew nothing comes first.
                let start = if faults { start + self.config.step * steps } else { start };
                self.busy_until = start + self.config.step * steps;
                while left > 0 {
                    let part = self.part(left);
                    let submits = if left == steps { 1.0 } else { 0.0 };
                    left -= part;
                    let due = start + self.config.step * (steps - left);
                    let tokens = rows.by_ref().take(part as usize).flatten().collect();
                    let cost = cost(part, submits);
                    let finished = left == 0;
                    self.report(
                        due,
                        part,
                        PlanReport {
                            ticket,
                            steps: part,
                            drafts,
                            tokens,
                            scored: None,
                            pooled: Vec::new(),
                            finished,
                            faults: u32::from(faults && finished),
                            cost,
                            submissions: Vec::new(),
                        },
                    );
                }
            }
        }
        Ok(())
    }

    fn slot(&mut self, slot: Slot) -> &mut FakeSlot {
        &mut self.slots[slot.0 as usize]
    }
}

impl Executor for FakeExecutor {
    fn capacity(&self) -> &Capacity {
        &self.config.capacity
    }

    /// Executes the plan at once, or queues it behind a plan whose masks are not all set; only reports are delayed
    /// until they are due. Plans are executed in order.
    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError> {
        self.ticket += 1;
        let ticket = Ticket(self.ticket);
        let awaits = plan.work.as_ref().is_some_and(Work::awaits);
        assert!(!awaits || self.config.capacity.gates, "a step waits for masks on a device without gates");
        let decodes = matches!(plan.work, Some(Work::Decode { .. }) | None);
        assert!(decodes || self.held.is_empty(), "{ticket:?}, of prompts, is queued behind a closed gate");
        self.held.push_back(Held { ticket, plan, awaits });
        self.work_off()?;
        Ok(ticket)
    }

    fn set_mask(&mut self, slot: Slot, mask: &[u32]) {
        let words = mask_words(self.config.capacity.vocabulary);
        assert_eq!(mask.len() as u32, words, "a mask has a bit for each token");
        let s = self.slot(slot);
        assert!(s.params.mask.is_some(), "a mask for {slot:?}, which is not constrained");
        s.params.mask = Some(mask.into());
    }

    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError> {
        let held = self.held.iter_mut().find(|held| held.ticket == ticket);
        held.unwrap_or_else(|| panic!("{ticket:?} waits for no mask")).awaits = false;
        self.work_off()
    }

    fn wake(&self) -> &Receiver<()> {
        &self.wake
    }

    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError> {
        let now = self.now();
        let mut due = Vec::new();
        while let Some(report) = self.reports.pop_front_if(|report| report.due <= now) {
            let Report { decode_steps, progress, .. } = report;
            self.steps_queued -= decode_steps;
            if progress.finished {
                self.finished = progress.ticket.0;
            }
            for sampled in &progress.tokens {
                self.slot(sampled.slot).unreported -= 1;
            }
            due.push(progress);
        }
        Ok(due)
    }

    fn profile(&mut self, plans: u32) {
        self.profiled = plans;
    }

    fn faults(&self) -> u64 {
        self.faults
    }

    fn pace(&self) -> &Pace {
        &self.pace
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.times = None;
        if let Some(thread) = self.thread.take() {
            // The thread only sleeps and wakes, so it does not panic.
            let _ = thread.join();
        }
    }
}

/// Returns the hash of a state after one more token.
fn take_in(taken: u64, token: u32) -> u64 {
    (taken ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

/// Returns the next token: the script's, or else a hash of all tokens before, the seed if sampling is not greedy, and
/// the output index, moved to the next token that the mask allows.
fn draw(history: impl Iterator<Item = u32>, params: &SlotParams, index: u32, vocabulary: u32, script: &[u32]) -> u32 {
    let mix = history.fold(0u64, |mix, token| (mix ^ u64::from(token)).wrapping_mul(0x100_0000_01b3).rotate_left(17));
    if !script.is_empty() {
        return script[index as usize % script.len()];
    }
    let seed = if params.sampling.temperature > 0.0 { params.seed } else { 0 };
    let mut state = mix ^ seed.rotate_left(32) ^ u64::from(index);
    let first = (split_mix(&mut state) % u64::from(vocabulary)) as u32;
    let allowed = |token: &u32| params.mask.as_ref().is_none_or(|mask| bit(mask, *token));
    (first..vocabulary).chain(0..first).find(allowed).expect("a mask allows something")
}

/// Returns made-up log probabilities of `token` after `history`, which differ from history to history.
pub fn scored(history: &[u32], token: u32, top: u32, vocabulary: u32) -> Scored {
    let mut mix = history.iter().fold(u64::from(token), |mix, token| take_in(mix, *token));
    let chosen = -((split_mix(&mut mix) % 1000) as f32);
    let top = (0..top).map(|i| ((token + i) % vocabulary, -(i as f32))).collect();
    Scored { id: token, logprobs: TokenLogprobs { chosen, top } }
}

/// The number of values of a made-up hidden state.
pub const HIDDEN: usize = 4;

/// Returns the made-up hidden state of a token, given the history that ends with it: whole numbers up to 256, whose sums
/// are exact.
pub fn hidden(history: impl Iterator<Item = u32>) -> [f32; HIDDEN] {
    let mut mix = history.fold(1, take_in);
    std::array::from_fn(|_| (split_mix(&mut mix) % 256) as f32)
}

/// Returns why the slot is done with `token`, the `drawn`th token of this stay; `None` if it is not.
fn verdict(params: &SlotParams, token: u32, drawn: u32) -> Option<Done> {
    if drawn > params.min_tokens && params.stop_ids.contains(&token) {
        Some(Done::Stop)
    } else if drawn >= params.max_tokens {
        Some(Done::Length)
    } else {
        None
    }
}

/// Returns made-up costs of plausible size: ten dispatches and eight barriers per step.
fn cost(steps: u32, submits: f64) -> PerToken {
    let steps = f64::from(steps);
    PerToken {
        submits,
        dispatches: 10.0 * steps,
        barriers: 8.0 * steps,
        enqueue_us: submits,
        flushes: Flushes { readback: submits, ..Flushes::default() },
        ..PerToken::default()
    }
}

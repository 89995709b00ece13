//! A loaded model whose steps can be rebuilt with other choices, timed and compared by their logits.
//! Not here: which choices are tried (`knobs`, `search`).

use super::compare::{DUELLED, Logits, ROUNDING, median, same};
use crate::actors::compute::{Compute, Gates, Submission};
use crate::actors::timeline::FlushReason;
use crate::actors::watcher::Outbox;
use crate::config;
use crate::device::{Adapter, Device, Point};
use crate::gpu::build::defaults::PATCH_PAIRS;
use crate::gpu::build::recordings::InboxRecordings;
use crate::gpu::build::{Build, PreparedModel};
use crate::gpu::error::StartError;
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::embed::{BLOCK_ROWS, PromptRows};
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::sampling::{Patch, patch_inbox};
use crate::kernels::state::{self, SlotInit};
use crate::memory::{Buffer, BufferTable, Place};
use crate::model::decoder::{Decoder, StepShape, Tuning, stride};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A GPU that finishes nothing for this long counts as stuck.
const STEP_WAIT: Duration = Duration::from_secs(120);
/// The number of warm-up steps, which are not counted, so that clocks and caches are in the same state as in normal
/// operation.
const WARM: usize = 1;
/// The time for which a GPU is kept busy before the first measurement.
const CLOCKS_RISE: Duration = Duration::from_millis(500);
/// The maximum time, in microseconds, for repetitions of a step, so that slow devices can try several values too.
const REPEATED_US: f64 = 300_000.0;
/// The number of submissions in flight; low enough that the compute actor has timestamps for all of them.
const IN_FLIGHT: usize = 24;

/// The places in memory of the sequences of the steps: the whole pages of a context, which all sequences share, and pages
/// behind it that each has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// The number of context tokens before a decode step of one row; the contexts of other steps end with its last whole page.
    depth: u32,
    /// The maximum number of rows of a decode step; at least 1.
    rows: u32,
    /// The maximum number of rows of a prompt chunk; 0 without prompts.
    prompt: u32,
}

impl Places {
    pub(super) fn new(depth: u32, steps: &[StepShape]) -> Places {
        let most = |of: fn(&StepShape) -> u32| steps.iter().map(of).max().unwrap_or(0);
        Places {
            depth,
            rows: most(|step| if let StepShape::Decode { rows } = step { *rows } else { 0 }).max(1),
            prompt: most(|step| if let StepShape::Prefill { rows } = step { *rows } else { 0 }),
        }
    }

    /// Whether only decode steps of one row are asked for.
    fn of_one_row(self) -> bool {
        self.rows == 1 && self.prompt == 0
    }

    /// The number of sequences: one for each row, and at least 2. The last one is that of prompt chunks, which continue the
    /// recurrent state of the first one.
    fn sequences(self) -> u32 {
        self.rows.max(2)
    }

    /// The number of pages of the shared context.
    fn shared(self) -> u32 {
        self.depth / PAGE_TOKENS
    }

    /// The number of pages that a step's sequence has for itself.
    fn own(self, shape: StepShape) -> u32 {
        match shape {
            StepShape::Prefill { rows } => rows.div_ceil(PAGE_TOKENS),
            _ => 1,
        }
    }

    /// The number of tokens before a step.
    fn position(self, shape: StepShape) -> u32 {
        match shape {
            StepShape::Decode { rows: 1 } => self.depth,
            _ => self.shared() * PAGE_TOKENS,
        }
    }

    /// The number of tokens of the longest sequence.
    pub(super) fn context(self) -> u32 {
        self.depth.saturating_add(self.prompt).saturating_add(16)
    }

    /// The page in memory of page `index` of a sequence.
    fn page(self, shape: StepShape, slot: u32, index: u32) -> u32 {
        match (shape, index.checked_sub(self.shared())) {
            (_, None) => index,
            (StepShape::Prefill { .. }, Some(own)) => self.shared() + self.sequences() + own,
            (_, Some(_)) => self.shared() + slot,
        }
    }

    /// The number of pages in memory.
    fn pages(self) -> u32 {
        self.shared() + self.sequences() + self.own(StepShape::Prefill { rows: self.prompt }) + 1
    }

    /// Returns a model with the sizes for the steps. For a decode step of one row alone they are those of a server.
    pub(super) fn sized(self, model: config::Model) -> config::Model {
        let model = config::Model { context: Some(self.context()), ..model };
        if self.of_one_row() {
            return model;
        }
        // No more memory and recordings than the steps need.
        config::Model {
            drafts: Some(0),
            slots: Some(self.sequences()),
            kv_pages: Some(self.pages()),
            prefill_chunk: Some(self.prompt.max(BLOCK_ROWS).next_multiple_of(BLOCK_ROWS)),
            ..model
        }
    }
}

/// A loaded model whose steps can be rebuilt and timed.
pub(super) struct Bench<'a> {
    pub(super) decoder: Decoder<'a>,
    places: Places,
    /// The kind of step that is timed.
    shape: StepShape,
    device: Arc<Device>,
    device_name: String,
    compute: Arc<Compute>,
    table: BufferTable,
    pipelines: Pipelines,
    /// The points that the first submission waits for.
    ready: Vec<Point>,
    /// Mapped memory: the words that `apply` writes to the device state.
    patch: Arc<Buffer>,
    apply: Arc<Region>,
    /// A prefill of one chunk.
    prompt: Arc<Region>,
    /// The LM head for the last row of a prompt chunk.
    head: Arc<Region>,
    /// For each row of a decode step, copies its logits, and the fault word, to buffers that the host reads.
    checks: Vec<Arc<Region>>,
    logits: Arc<Buffer>,
    fault: Arc<Buffer>,
    /// The approximate time of a step.
    step_us: f64,
}

impl<'a> Bench<'a> {
    /// Builds the bench and fills the context.
    pub(super) fn new(
        build: &'a Build<'_>,
        prepared: PreparedModel<'a>,
        adapter: &Adapter,
        places: Places,
    ) -> Result<Bench<'a>, StartError> {
        let PreparedModel { decoder, recordings, mut table, pipelines, loading, .. } = prepared;
        let device = Arc::clone(&build.opened.device);
        let fault = build.opened.arena.buffer("tune.fault", fault_bytes(&decoder), Place::Readback)?;
        table.add(Arc::clone(&fault))?;
        let region = |recording: &Recording| Region::build(&device, recording, &table, &pipelines).map(Arc::new);
        let (_, prompt) = recordings.prefill.last().expect("there is at least one bucket");
        let InboxRecordings { apply, .. } = recordings.inboxes.first().expect("there is an inbox");
        let head = recordings.logits.as_ref().and_then(|logits| logits.first.first());
        let (_, head) = head.expect("a model on one device draws tokens");
        let checks = (0..places.rows).map(|row| region(&check(&decoder, row))).collect::<Result<_, _>>()?;
        let (prompt, apply, head) = (region(prompt)?, region(apply)?, region(head)?);
        let mut bench = Bench {
            compute: Arc::clone(&build.opened.compute),
            device_name: adapter.name.clone(),
            patch: Arc::clone(table.require("inbox.0.patch")?),
            logits: Arc::clone(table.require("dump")?),
            ready: build.finish(loading)?.0,
            places,
            shape: StepShape::Decode { rows: 1 },
            apply,
            prompt,
            head,
            checks,
            fault,
            step_us: 1.0,
            decoder,
            device,
            table,
            pipelines,
        };
        bench.fill()?;
        Ok(bench)
    }

    fn unsupported(&self, what: String) -> StartError {
        StartError::Unsupported { model: "tune".to_owned(), what: format!("device \"{}\": {what}", self.device_name) }
    }

    /// Returns the step's region for each tuning; `None` where the driver cannot build it, or a buffer is too small for it.
    pub(super) fn regions(&mut self, tunings: &[Tuning]) -> Result<Vec<Option<Arc<Region>>>, StartError> {
        let record = |tuning: &Tuning| Decoder { tuning: tuning.clone(), ..self.decoder.clone() }.record(self.shape);
        let steps: Vec<Recording> = tunings.iter().map(record).collect();
        let has_room = |step: &Recording| {
            let fits = |name: &str, bytes| self.table.get(name).is_some_and(|buffer| buffer.bytes() >= bytes);
            step.buffers.iter().all(|decl| fits(&decl.name, decl.bytes))
        };
        let mut built: Vec<bool> = steps.iter().map(has_room).collect();
        let all: Vec<&Recording> = steps.iter().zip(&built).filter(|(_, fits)| **fits).map(|(step, _)| step).collect();
        if self.pipelines.add(&self.device, &all).is_err() {
            for (step, built) in steps.iter().zip(&mut built).filter(|(_, built)| **built) {
                match self.pipelines.add(&self.device, &[step]) {
                    Ok(()) => {}
                    Err(error) if error.is_lost() => return Err(error.into()),
                    Err(_) => *built = false,
                }
            }
        }
        let region = |step: &Recording| Region::build(&self.device, step, &self.table, &self.pipelines).map(Arc::new);
        let regions = steps.iter().zip(built).map(|(step, built)| built.then(|| region(step)).transpose());
        Ok(regions.collect::<Result<_, _>>()?)
    }

    pub(super) fn region(&mut self, tuning: &Tuning) -> Result<Arc<Region>, StartError> {
        let region = self.regions(std::slice::from_ref(tuning))?.pop().flatten();
        region.ok_or_else(|| self.unsupported("its step cannot be built".to_owned()))
    }

    /// Returns the logits of the default step with barriers as the reference, and the tuning to search from: the
    /// default one, without tags if the step with tags has other logits.
    pub(super) fn reference(&mut self, rules: Tuning) -> Result<(Tuning, Logits), StartError> {
        let barriers = Tuning { tags: false, ..rules.clone() };
        let region = self.region(&barriers)?;
        let reference = self.logits(&region)?.and_then(|logits| same(&logits, &logits, ROUNDING).map(|()| logits));
        let reference = reference.map_err(|what| self.unsupported(what))?;
        self.step_us = median(&self.times(&[&region], 1)?[0]);
        if rules == barriers {
            return Ok((rules, reference));
        }
        let region = self.region(&rules)?;
        let right = self.logits(&region)?.and_then(|logits| same(&reference, &logits, ROUNDING));
        Ok((if right.is_ok() { rules } else { barriers }, reference))
    }

    /// Runs each region in a submission of its own and returns the device time of each in microseconds.
    fn run(&mut self, regions: &[Arc<Region>]) -> Result<Vec<Option<f64>>, StartError> {
        let (reports, done) = crossbeam_channel::unbounded();
        let (wake, _woken) = crossbeam_channel::bounded(1);
        let mut times = Vec::new();
        for some in regions.chunks(IN_FLIGHT) {
            for region in some {
                self.compute.submit(Submission {
                    id: 0,
                    ahead: None,
                    entries: vec![vec![Arc::clone(region)]],
                    waits: std::mem::take(&mut self.ready),
                    gates: Gates::new(),
                    waits_within: false,
                    flush: FlushReason::PhaseBoundary,
                    report_after: Vec::new(),
                    outbox: Outbox { reports: reports.clone(), wake: wake.clone() },
                    then: None,
                });
            }
            for _ in some {
                let report = self.compute.report(&done, STEP_WAIT);
                let seconds = STEP_WAIT.as_secs();
                let report = report.ok_or_else(|| self.unsupported(format!("a step did not finish in {seconds} s")))?;
                report.result?;
                times.push(report.device_time.map(|time| time.as_secs_f64() * 1e6));
            }
        }
        Ok(times)
    }

    /// Writes words of the device state. No other work uses the state meanwhile.
    fn write(&mut self, patch: Patch) -> Result<(), StartError> {
        for pairs in patch.into_pairs().chunks(PATCH_PAIRS as usize) {
            self.patch.write(0, bytemuck::cast_slice(&patch_inbox(pairs)));
            self.run(&[Arc::clone(&self.apply)])?;
        }
        Ok(())
    }

    /// Fills the shared context with made-up tokens.
    fn fill(&mut self) -> Result<(), StartError> {
        let (layout, places) = (self.decoder.state, self.places);
        let tokens = self.tokens(places.depth);
        let shape = StepShape::Decode { rows: 1 };
        let mut patch = Patch::default();
        self.set_pages(&mut patch, shape, 0)?;
        self.write(patch)?;
        for (index, some) in tokens.chunks(layout.chunk as usize).enumerate() {
            let start = index as u32 * layout.chunk;
            let from = (start > 0).then_some(0);
            let rows = PromptRows { slot: 0, start, tokens: some, last: false, next: None, from, keeps: &[] };
            self.run_prompt(rows)?;
        }
        if !self.decoder.config.is_recurrent() || places.of_one_row() {
            return Ok(());
        }
        // Recurrent state is each sequence's own. The keys and values of the few tokens are those of the shared context.
        let few = (places.shared() * PAGE_TOKENS).clamp(1, BLOCK_ROWS) as usize;
        for slot in 1..places.sequences() {
            let mut patch = Patch::default();
            self.set_pages(&mut patch, shape, slot)?;
            self.write(patch)?;
            let some = &self.tokens(few as u32);
            let rows = PromptRows { slot, start: 0, tokens: some, last: false, next: None, from: None, keeps: &[] };
            self.run_prompt(rows)?;
        }
        Ok(())
    }

    /// Returns made-up tokens of a prompt.
    fn tokens(&self, count: u32) -> Vec<u32> {
        (0..count).map(|at| at.wrapping_mul(2_654_435_761) % self.decoder.config.vocab).collect()
    }

    fn run_prompt(&mut self, rows: PromptRows<'_>) -> Result<(), StartError> {
        let mut patch = Patch::default();
        self.describe(&mut patch, rows);
        self.write(patch)?;
        self.run(&[Arc::clone(&self.prompt)])?;
        Ok(())
    }

    /// Sets the descriptor of a prompt step. The tiles of a single prompt begin at 0.
    fn describe(&self, patch: &mut Patch, rows: PromptRows<'_>) {
        let layout = self.decoder.state;
        for (word, words) in layout.chunk_layout().describe(&[rows]) {
            patch.set_all(layout.chunk_word(word), &words);
        }
    }

    /// Sets the page tables of a sequence of a step.
    fn set_pages(&self, patch: &mut Patch, shape: StepShape, slot: u32) -> Result<(), StartError> {
        let (layout, places) = (self.decoder.state, self.places);
        let count = (places.shared() + places.own(shape)).min(layout.max_pages);
        for index in 0..count {
            patch.set(layout.page_word(slot, index), places.page(shape, slot, index));
        }
        let Some(pages) = self.decoder.window_pages.filter(|_| layout.windows) else { return Ok(()) };
        // The context takes turns in all window pages but one for each sequence.
        let turns = pages.checked_sub(places.sequences()).filter(|turns| *turns > 0);
        let turns = turns.ok_or_else(|| self.unsupported(format!("{pages} window pages are too few")))?;
        for index in 0..count {
            let own = index >= places.shared() && !matches!(shape, StepShape::Prefill { .. });
            patch.set(layout.window_word(slot, index), if own { turns + slot } else { index % turns });
        }
        Ok(())
    }

    /// Prepares the device state for steps of a kind, which [`Bench::times`] and [`Bench::logits`] then run.
    pub(super) fn begin(&mut self, shape: StepShape) -> Result<(), StartError> {
        let (layout, places) = (self.decoder.state, self.places);
        let position = places.position(shape);
        let slots = match shape {
            StepShape::Prefill { .. } => layout.slots - 1..layout.slots,
            _ => 0..shape.rows(),
        };
        let (mut first, mut again) = (Patch::default(), Patch::default());
        for (row, slot) in (0..).zip(slots) {
            self.set_pages(&mut first, shape, slot)?;
            first.set_all(layout.slot_word(slot, 0), &SlotInit { remaining: 1 << 20, ..SlotInit::default() }.words());
            first.set(layout.batch_word(row), slot);
            // A step changes these words, so `apply` sets them again before every step.
            for (word, value) in [
                (state::SLOT_ACTIVE, state::ACTIVE_RUNNING),
                (state::SLOT_TOKEN, (self.decoder.config.vocab / 2 + 101 * row) % self.decoder.config.vocab),
                (state::SLOT_POSITION, position),
                (state::SLOT_REMAINING, 1 << 20),
                (state::SLOT_GENERATED, 0),
                (state::SLOT_MIN_LEFT, 0),
                (state::SLOT_SETTLED, position),
            ] {
                again.set(layout.slot_word(slot, word), value);
            }
            if let StepShape::Prefill { rows } = shape {
                let tokens = self.tokens(rows);
                let from = (position > 0).then_some(0);
                let rows =
                    PromptRows { slot, start: position, tokens: &tokens, last: true, next: None, from, keeps: &[] };
                self.describe(&mut first, rows);
            }
        }
        again.set(layout.fault_word(), 0);
        self.shape = shape;
        self.write(first)?;
        self.write(again)
    }

    /// Returns the times in microseconds of each of several steps, which run alternately for up to `rounds` rounds.
    pub(super) fn times(&mut self, steps: &[&Arc<Region>], rounds: usize) -> Result<Vec<Vec<f64>>, StartError> {
        let fit = (REPEATED_US / self.step_us.max(1.0)) as usize;
        let rounds = fit.clamp(rounds.div_ceil(4), rounds);
        let round = steps.iter().flat_map(|step| [Arc::clone(&self.apply), Arc::clone(step)]);
        let all: Vec<Arc<Region>> = std::iter::repeat_n(round.collect::<Vec<_>>(), rounds + WARM).flatten().collect();
        let times = self.run(&all)?;
        let mut by_step = vec![Vec::new(); steps.len()];
        for (index, time) in times.iter().skip(1).step_by(2).enumerate().skip(WARM * steps.len()) {
            let time = time.ok_or_else(|| self.unsupported("its compute queue has no timestamps".to_owned()))?;
            by_step[index % steps.len()].push(time);
        }
        Ok(by_step)
    }

    /// Returns the median time of a step in microseconds, measured after [`CLOCKS_RISE`] of such steps: a GPU that was idle
    /// runs at a fraction of its clocks at first.
    pub(super) fn steady_us(&mut self, step: &Arc<Region>) -> Result<f64, StartError> {
        let begun = Instant::now();
        loop {
            let us = median(&self.times(&[step], DUELLED)?[0]);
            if begun.elapsed() >= CLOCKS_RISE {
                return Ok(us);
            }
        }
    }

    /// Returns the logits of each row of a step, or of the last row of a prompt chunk; the inner error describes a problem
    /// on the device.
    pub(super) fn logits(&mut self, step: &Arc<Region>) -> Result<Result<Logits, String>, StartError> {
        let mut regions = vec![Arc::clone(&self.apply), Arc::clone(step)];
        let rows = match self.shape {
            StepShape::Decode { rows } => rows as usize,
            _ => {
                regions.push(Arc::clone(&self.head));
                1
            }
        };
        self.run(&regions)?;
        let mut all = Vec::new();
        let checks: Vec<Arc<Region>> = self.checks.iter().take(rows).cloned().collect();
        for check in checks {
            self.run(&[check])?;
            if self.fault.load_u32(0) != 0 {
                return Ok(Err("a workgroup waited too long for another".to_owned()));
            }
            let mut logits = vec![0f32; self.decoder.config.vocab as usize];
            self.logits.read(0, bytemuck::cast_slice_mut(&mut logits));
            all.push(logits);
        }
        Ok(Ok(all))
    }
}

/// Returns the size of the fault words.
fn fault_bytes(decoder: &Decoder<'_>) -> u64 {
    decoder.state.fault(&mut Recording::new("fault")).bytes
}

/// Returns the recording that copies a row's logits and the fault word to buffers that the host reads.
fn check(decoder: &Decoder<'_>, row: u32) -> Recording {
    let mut check = Recording::new("check");
    let (bytes, each) = (u64::from(decoder.config.vocab) * 4, u64::from(stride(decoder.config.vocab)) * 4);
    let from = check.buffer("logits", u64::from(row) * each + bytes).part(u64::from(row) * each, bytes);
    let to = check.buffer("dump", bytes);
    check.ops.push(Op::Copy { from, to });
    let from = decoder.state.fault(&mut check);
    let to = check.buffer("tune.fault", from.bytes);
    check.ops.push(Op::Copy { from, to });
    check
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn sequences_share_whole_pages_and_write_to_their_own() {
        let decode = |rows| StepShape::Decode { rows };
        let prompt = StepShape::Prefill { rows: 100 };
        let places = Places::new(40, &[decode(1), decode(4), prompt]);
        assert_eq!([decode(1), decode(4), prompt].map(|shape| places.position(shape)), [40, 32, 32]);
        let pages = |shape, slot, count| (0..count).map(|index| places.page(shape, slot, index)).collect::<Vec<u32>>();
        assert_eq!(pages(decode(4), 0, 3), [0, 1, 2]);
        assert_eq!(pages(decode(4), 3, 3), [0, 1, 5]);
        assert_eq!(pages(prompt, 3, 9), [0, 1, 6, 7, 8, 9, 10, 11, 12]);
        let own: BTreeSet<u32> = (0..4).map(|slot| places.page(decode(4), slot, 2)).collect();
        assert_eq!(own.len(), 4);
        assert!(places.pages() > 12 && places.pages() * PAGE_TOKENS >= places.context());
    }

    #[test]
    fn a_step_of_one_row_is_sized_like_a_server() {
        let model = config::Model::new("tune", "", None);
        let one = [StepShape::Decode { rows: 1 }];
        let alone = Places::new(256, &one).sized(model.clone());
        assert_eq!((alone.context, alone.slots, alone.kv_pages, alone.prefill_chunk), (Some(272), None, None, None));
        let two = Places::new(256, &[StepShape::Decode { rows: 1 }, StepShape::Decode { rows: 2 }]);
        assert_eq!((two.rows, two.sized(model.clone()).slots), (2, Some(2)));
        let prompt = Places::new(256, &[StepShape::Prefill { rows: 64 }]);
        assert_eq!((prompt.rows, prompt.sized(model.clone()).slots), (1, Some(2)));
        let steps = [StepShape::Decode { rows: 64 }, StepShape::Prefill { rows: 500 }];
        let many = Places::new(256, &steps).sized(model);
        // Chunks of recurrent state are whole blocks.
        assert_eq!((many.context, many.slots, many.prefill_chunk), (Some(772), Some(64), Some(512)));
        assert_eq!(many.kv_pages, Some(16 + 64 + 32 + 1));
    }
}

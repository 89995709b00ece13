//! Chooses and submits the regions of a plan, and repeats steps after a fault.

use crate::actors::compute::{Gates, Submission};
use crate::actors::timeline::FlushReason;
use crate::actors::watcher::Then;
use crate::engine::executor::ExecuteError;
use crate::engine::plan::{Chunk, Slot, Ticket, Work};
use crate::engine::variants::Fallback;
use crate::gpu::executor::inbox::Posts;
use crate::gpu::executor::{
    Around, Commands, DecodeRegion, DecodeRegions, GpuExecutor, Kind, Link, MOST_REPEATS, Parts, Pending, Pools,
    REPORT_EVERY, Scoring, Steps,
};
use crate::kernels::embed::{self, ChunkLayout, PromptRows};
use crate::kernels::region::Region;
use crate::kernels::sampling::Patch;
use crate::kernels::state::{self};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns the smallest bucket with at least `rows` rows.
pub(super) fn fitting<T>(buckets: &BTreeMap<u32, T>, rows: u32) -> (u32, &T) {
    let (bucket, found) =
        buckets.range(rows..).next().unwrap_or_else(|| panic!("{rows} rows exceed the largest bucket"));
    (*bucket, found)
}

impl Parts {
    /// Returns the number of rows of the first of the two microbatches in which a prefill step of `rows` rows is computed, with so
    /// many prompts and slots that decode in it; `None` if it is computed whole. All devices of a replica return the same.
    ///
    /// # Panics
    /// If no bucket has as many rows.
    pub(super) fn first_microbatch(&self, rows: u32, (prompts, decoding): (usize, usize)) -> Option<u32> {
        // The descriptors of microbatches have neither rows that decode nor more prompts.
        if decoding > 0 || prompts > self.layout.prompts as usize {
            return None;
        }
        let (bucket, _) = fitting(&self.prefill, rows);
        let first = bucket / 2;
        (self.microbatches.contains_key(&bucket) && rows > first).then_some(first)
    }
}

/// Work that is ready to be queued, apart from the changes before it.
struct Queued {
    steps: Steps,
    /// The regions of each entry of the submission. Work without steps has one entry.
    entries: Vec<Vec<Arc<Region>>>,
    /// Whether masks are still to come: the last entry waits behind the gate.
    awaits: bool,
    flush: FlushReason,
}

impl Queued {
    /// Returns work without steps.
    fn changes() -> Queued {
        let flush = FlushReason::PhaseBoundary;
        Queued { steps: Steps::default(), entries: vec![Vec::new()], awaits: false, flush }
    }
}

impl GpuExecutor {
    /// Returns the regions of steps that verify so many drafts for each sequence, by number of sequences.
    fn buckets(&self, drafts: u32) -> &BTreeMap<u32, DecodeRegions> {
        if drafts > 0 { &self.parts.verify[&drafts] } else { &self.parts.decode }
    }

    /// Returns the bucket and the regions of `steps` steps of `sequences` sequences, each of which verifies `drafts` drafts for
    /// each sequence, and which of these steps a test breaks.
    fn decode_steps(
        &mut self,
        (sequences, drafts): (u32, u32),
        steps: u32,
    ) -> (u32, Vec<DecodeRegion>, Vec<(u32, usize)>) {
        let (sequences, regions) = fitting(self.buckets(drafts), sequences);
        let overlaps = !self.repeats && self.overlap.allows(Instant::now());
        let Some(carried) = regions.carried.as_ref().filter(|_| overlaps) else {
            return (sequences, vec![regions.plain.clone(); steps as usize], Vec::new());
        };
        let mut steps = vec![carried.clone(); steps as usize];
        let first = self.carried_steps + 1;
        let last = self.carried_steps + steps.len() as u64;
        let mut broken = Vec::new();
        let injections = &self.parts.variants.injections();
        let wait = injections.next(sequences * (drafts + 1), drafts).filter(|_| self.breaks);
        let wait = wait.and_then(|wait| Some((wait, regions.broken.get(&wait)?)));
        if let Some((wait, region)) = wait {
            let (one, every) = (u64::from(self.parts.injection.step), u64::from(injections.every()));
            for (index, number) in (0u32..).zip(first..=last) {
                if number == one || every > 0 && number.is_multiple_of(every) {
                    steps[index as usize] = region.clone();
                    broken.push((index, wait));
                }
            }
        }
        self.carried_steps = last;
        (sequences, steps, broken)
    }

    /// Returns the regions of a prefill step in which the slots `decoding` decode, whose masks it `awaits` or not, the number
    /// of rows that draw tokens (rounded up to a bucket), the number of all rows, and what is pooled. Adds the description of the step to `patch`.
    pub(super) fn prompts(
        &mut self,
        chunks: &[Chunk],
        (decoding, awaits): (&[Slot], bool),
        patch: &mut Patch,
    ) -> (Vec<Arc<Region>>, u32, u32, Pools) {
        let layout = self.parts.layout;
        let mut chunks: Vec<&Chunk> = chunks.iter().collect();
        // Logits can only be requested for the first row.
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
                // A slot's own cell carries its recurrent state from chunk to chunk.
                next: chunk.next,
                from: chunk.restore.map(|cell| cell.0).or((chunk.start > 0).then_some(chunk.slot.0)),
                keeps,
            })
            .collect();
        let decoding: Vec<u32> = decoding.iter().map(|slot| slot.0).collect();
        for (word, words) in layout.chunk_layout().describe_mixed(&rows, &decoding) {
            patch.set_all(layout.chunk_word(word), &words);
        }
        let all_rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>() + decoding.len();
        let all_rows = all_rows as u32;
        let lasts = (chunks.iter().filter(|chunk| chunk.last).count() + decoding.len()) as u32;
        let wide = (chunks.len() + decoding.len()) as u32 > layout.prompts;
        let (bucket, mut layers) = fitting(if wide { &self.parts.wide } else { &self.parts.prefill }, all_rows);
        if let Some(first) = self.parts.first_microbatch(all_rows, (chunks.len(), decoding.len())) {
            layers = &self.parts.microbatches[&bucket];
            for (index, part) in (0..).zip(embed::microbatches(&rows, first)) {
                patch.set_all(layout.microbatch_word(index), &ChunkLayout::describe_microbatch(&part));
            }
        }
        let completed = (!decoding.is_empty()).then(|| {
            let region = self.parts.decode_rows.as_ref();
            Arc::clone(region.expect("slots decode in prefill steps only where there are mixed steps"))
        });
        let mut regions: Vec<Arc<Region>> = completed.into_iter().chain([Arc::clone(layers)]).collect();
        let mut rows = 0;
        if let Some(logits) = self.parts.logits.as_ref().filter(|_| lasts > 0) {
            let (bucket, drawing) = match decoding.is_empty() {
                true => fitting(&logits.first, lasts),
                false => {
                    let (bucket, mixed) = fitting(&logits.mixed, lasts);
                    (bucket, if awaits { mixed.gated.as_ref().expect("there are gates") } else { &mixed.whole })
                }
            };
            regions.push(Arc::clone(drawing));
            rows = bucket;
        }
        let Some(head) = &self.parts.head else { return (regions, 0, all_rows, Pools::default()) };
        let (mut pools, mut ranges, mut first_row) = (Pools::default(), Vec::new(), 0);
        for chunk in &chunks {
            if !chunk.pooled.is_empty() {
                pools.runs.push((chunk.slot, chunk.pooled.len() as u32));
                ranges.extend([first_row + chunk.pooled.start, chunk.pooled.len() as u32]);
            }
            first_row += chunk.tokens.len() as u32;
        }
        if !pools.runs.is_empty() {
            pools.first = self.pooled % 2 * layout.prompts;
            self.pooled = self.pooled.wrapping_add(1);
            let words: Vec<u32> = [pools.runs.len() as u32, pools.first].into_iter().chain(ranges).collect();
            patch.set_all(layout.pool_word(), &words);
            regions.push(Arc::clone(&head.pool));
        }
        (regions, rows, all_rows, pools)
    }

    /// Returns the number of tokens that a prefill step scores.
    fn scored_tokens(chunks: &[Chunk]) -> u32 {
        let Some(asked) = chunks.iter().find(|chunk| chunk.score.is_some()) else { return 0 };
        assert_eq!(chunks.len(), 1, "a scored chunk shares its plan");
        asked.tokens.len() as u32 - u32::from(asked.next.is_none())
    }

    /// Returns the number of runs of the region that scores the rows of a prefill step.
    pub(super) fn score_turns(&self, chunks: &[Chunk]) -> u32 {
        let logits = self.parts.logits.as_ref();
        logits.map_or(0, |logits| Self::scored_tokens(chunks).div_ceil(logits.score.0))
    }

    /// Returns the tokens of a step that are scored and the regions that score them; `None` if none are. Adds the
    /// parameters of the scoring to `patch`.
    pub(super) fn scoring(&mut self, chunks: &[Chunk], patch: &mut Patch) -> Option<(Scoring, Vec<Arc<Region>>)> {
        let (tokens, turns) = (Self::scored_tokens(chunks), self.score_turns(chunks));
        let logits = self.parts.logits.as_ref().filter(|_| tokens > 0)?;
        let asked = &chunks[0];
        let entry = self.scored % 2 * self.parts.layout.chunk;
        self.scored = self.scored.wrapping_add(1);
        let words = [0, asked.next.unwrap_or(state::TOKEN_NONE), asked.score?, entry];
        patch.set_all(self.parts.layout.score_word(), &words);
        let turns = vec![Arc::clone(&logits.score.1); turns as usize];
        Some((Scoring { slot: asked.slot, first: asked.start + 1, tokens, entry }, turns))
    }

    /// Returns a prefill step. Adds its description to `patch`. With `awaits`, the step is in two entries, of which the second,
    /// from the LM head on, waits behind the gate.
    fn prefill(&mut self, chunks: &[Chunk], decoding: &[Slot], awaits: bool, patch: &mut Patch) -> Queued {
        let (mut regions, rows, prefill_rows, pooling) = self.prompts(chunks, (decoding, awaits), patch);
        let scoring = self.scoring(chunks, patch).map(|(scoring, turns)| {
            assert!(decoding.is_empty(), "a scored chunk shares its plan");
            // The scores are computed after the layers, and before the logits of the first output tokens overwrite the
            // logits of the scored rows.
            regions.splice(1..1, turns);
            scoring
        });
        // Other devices compute logits for the one that draws the tokens.
        let (draws, scoring) = (self.parts.head.is_some(), scoring.filter(|_| self.parts.head.is_some()));
        let kind = if rows > 0 && draws { Kind::Sampled } else { Kind::Layers };
        let dump = chunks.iter().any(|chunk| chunk.last && self.dumps[chunk.slot.0 as usize]);
        let steps = Steps { kind, count: 1, rows, prefill_rows, scoring, pooling, dump, ..Steps::default() };
        let mut entries = vec![regions];
        if awaits {
            // Behind the row table's completion and the layers.
            let behind = entries[0].split_off(2);
            entries.push(behind);
        }
        Queued { steps, entries, awaits, flush: FlushReason::PhaseBoundary }
    }

    /// Returns the draft model's pass over tokens that it has not computed. Adds its description to `patch`.
    fn catch_up(&mut self, chunks: &[Chunk], patch: &mut Patch) -> Queued {
        let layout = self.parts.layout;
        let prompt = |chunk| {
            let &Chunk { slot, start, ref tokens, .. } = chunk;
            PromptRows { slot: slot.0, start, tokens, last: false, next: None, from: None, keeps: &[] }
        };
        let rows: Vec<PromptRows<'_>> = chunks.iter().map(prompt).collect();
        for (word, words) in layout.chunk_layout().describe(&rows) {
            patch.set_all(layout.chunk_word(word), &words);
        }
        let tokens = chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum();
        let (_, region) = fitting(&self.parts.catch_up, tokens);
        let steps = Steps { kind: Kind::Layers, count: 1, ..Steps::default() };
        let entries = vec![vec![Arc::clone(region)]];
        Queued { steps, entries, awaits: false, flush: FlushReason::PhaseBoundary }
    }

    /// Returns `count` decode steps of `slots`. Adds the changes of the batch's rows to `patch`. With `awaits`, the step is
    /// in two entries, of which the second waits behind the gate.
    fn decode(&mut self, slots: Vec<Slot>, count: u32, drafts: u32, awaits: bool, patch: &mut Patch) -> Queued {
        let (sequences, mut regions, broken) = self.decode_steps((slots.len() as u32, drafts), count);
        let entries = if awaits {
            regions.remove(0).parts.expect("there are gates").map(|part| vec![part]).into()
        } else {
            regions.into_iter().map(|region| vec![region.whole]).collect()
        };
        // Logits can only be requested for the first row.
        let dump = slots.iter().any(|slot| self.dumps[slot.0 as usize]);
        let mut batch = slots.clone();
        if dump {
            batch.sort_by_key(|slot| !self.dumps[slot.0 as usize]);
        }
        for row in 0..sequences {
            let slot = batch.get(row as usize).map_or(u32::MAX, |slot| slot.0);
            if self.batch[row as usize] != slot {
                self.batch[row as usize] = slot;
                patch.set(self.parts.layout.batch_word(row), slot);
            }
        }
        let kind = if self.parts.head.is_some() { Kind::Sampled } else { Kind::Layers };
        let rows = sequences * (drafts + 1);
        let steps = Steps { kind, count, rows, slots, drafts, broken, dump, ..Steps::default() };
        Queued { steps, entries, awaits, flush: FlushReason::Readback }
    }

    /// Queues work behind all earlier work, after the given changes of the device state. `around` are the regions around
    /// the step of a stage.
    pub(super) fn enqueue(
        &mut self,
        ticket: Ticket,
        planned: Option<Work>,
        mut posts: Posts,
        around: Option<Around>,
    ) -> Result<(), ExecuteError> {
        let queued = match planned {
            None => Queued::changes(),
            Some(Work::Prefill { chunks, decoding, awaits }) => {
                self.prefill(&chunks, &decoding, awaits, &mut posts.patch)
            }
            Some(Work::CatchUp { chunks }) => self.catch_up(&chunks, &mut posts.patch),
            Some(Work::Decode { slots, steps, drafts, awaits }) => {
                self.decode(slots, steps, drafts, awaits, &mut posts.patch)
            }
        };
        let applied = self.post(ticket, posts)?;
        let Queued { mut steps, mut entries, awaits, flush } = queued;
        let mut gates = self.divide(&mut entries);
        let count = steps.count.max(1) as usize;
        // Every step is one entry, except that a step behind the gate is two.
        let of_first = entries.len() - count + 1;
        let mut each = Commands::of(entries[..of_first].iter().flatten());
        // There is one `dump` buffer, so only one plan in flight may fill it.
        steps.dump &= self.parts.head.is_some() && !self.pending.iter().any(|pending| pending.steps.dump);
        if steps.dump {
            let dump = Arc::clone(&self.head().dump_region);
            each.add([&dump]);
            for entry in entries.iter_mut().rev().take(count) {
                entry.push(Arc::clone(&dump));
            }
        }
        if self.profiled > 0 && steps.kind != Kind::Changes {
            self.profiled -= 1;
            for region in entries.iter_mut().take(of_first).flatten() {
                self.time(region);
            }
        }
        let (mut link, mut ahead) = (Link::default(), None);
        if let Some(around) = around {
            ahead = around.ahead;
            each.add(around.before.iter().chain(&around.after));
            entries[0].splice(0..0, around.before);
            entries.last_mut().expect("a step has an entry").extend(around.after);
            link = around.link;
        }
        gates.extend(link.gate.take().map(|gate| (1, gate)));
        let fixed = Commands::of(&applied.regions);
        entries[0].splice(0..0, applied.regions);
        let single = awaits || !gates.is_empty();
        let report_after = if single { Vec::new() } else { self.report_after(&steps, entries.len() as u32) };
        self.gates += u64::from(awaits);
        let gate = awaits.then_some(self.gates);
        gates.extend(gate.map(|value| (entries.len() as u32, (Arc::clone(&self.head().gate), value))));
        steps.first = self.next_step;
        if steps.kind == Kind::Sampled {
            self.next_step = self.next_step.wrapping_add(steps.count);
        }
        let changes = Pending::changes(ticket, applied.inboxes);
        let before_gate = entries[..entries.len() - 1].iter().map(Vec::len).sum();
        let pending = Pending { steps, fixed, each, gate, before_gate, awaits, flush, ..changes };
        self.hand_over(pending, (ahead, entries), report_after, (gates, link.then));
        Ok(())
    }

    /// Divides a step where the host carries words between devices into entries of its own, and returns the gates behind
    /// which they wait. Other work stays as it is.
    fn divide(&self, entries: &mut Vec<Vec<Arc<Region>>>) -> Gates {
        let mut gates = Gates::new();
        let sums = self.parts.exchange.as_ref().and_then(|exchange| exchange.sums.as_ref());
        let divided = sums.and_then(|sums| sums.divided.as_ref());
        let (Some(divided), Some(first)) = (divided, self.first_sum) else { return gates };
        let [regions] = &mut entries[..] else { panic!("{} entries of a step with exchanges", entries.len()) };
        let (regions, mut numbers) = (std::mem::take(regions), first..);
        for region in regions {
            let rest = divided.rest.get(region.shared_name());
            entries.last_mut().expect("there is one").push(region);
            for (region, number) in rest.into_iter().flatten().zip(&mut numbers) {
                entries.push(vec![Arc::clone(region)]);
                gates.insert(entries.len() as u32, (Arc::clone(&divided.gate), number));
            }
        }
        gates
    }

    /// Returns the entries after which the steps are reported: on a slow device all of them, on a fast one only the last.
    fn report_after(&self, steps: &Steps, entries: u32) -> Vec<u32> {
        let every = match self.pace.step() {
            Some(time) if !time.is_zero() => {
                let patience = REPORT_EVERY / steps.rows.max(1);
                (patience.as_nanos() / time.as_nanos()).clamp(1, u128::from(steps.count.max(1))) as u32
            }
            _ => 1,
        };
        (1..=entries).filter(|entry| entry % every == 0).collect()
    }

    /// Replaces a region by a copy with timestamps, recorded for this run only.
    pub(super) fn time(&self, region: &mut Arc<Region>) {
        match region.timed(&self.parts.device, &self.parts.pipelines) {
            Ok(timed) => *region = Arc::new(timed),
            Err(error) => tracing::warn!(%error, region = region.name(), "a region cannot be profiled"),
        }
    }

    /// Passes entries, and a region that runs ahead of their gate, to the compute actor, whose reports will refer to `pending`.
    pub(super) fn hand_over(
        &mut self,
        mut pending: Pending,
        (ahead, entries): (Option<Arc<Region>>, Vec<Vec<Arc<Region>>>),
        report_after: Vec<u32>,
        (gates, then): (Gates, Option<Then>),
    ) {
        let waits = std::mem::take(&mut self.parts.ready);
        if !waits.is_empty() {
            pending.flush = FlushReason::CrossQueue;
        }
        let (id, flush) = (pending.ticket.0, pending.flush);
        self.pending.push_back(pending);
        let outbox = self.outbox.clone();
        let waits_within = self.first_sum.is_some();
        let submission =
            Submission { id, ahead, entries, waits, gates, waits_within, flush, report_after, outbox, then };
        self.parts.compute.submit(submission);
    }

    /// Opens the gate up to the first step that still waits for a mask.
    pub(super) fn open_gate(&self) -> Result<(), ExecuteError> {
        // Steps that were let through because of a fault are ignored: they are queued again, behind others.
        let opened = self.head().gate.opened();
        let waits = |pending: &&Pending| pending.awaits && pending.gate > Some(opened);
        let waiting = self.pending.iter().filter(waits).filter_map(|pending| pending.gate).min();
        self.open_gate_to(waiting.map_or(self.gates, |value| value - 1))
    }

    pub(super) fn open_gate_to(&self, value: u64) -> Result<(), ExecuteError> {
        let failed = |error| ExecuteError::Failed(format!("device \"{}\": {error}", self.parts.device_name));
        self.head().gate.open(value).map_err(failed)
    }

    /// Records that a call of a plan's step timed out while polling for tagged words. Pauses steps without barriers,
    /// unless they are already paused.
    pub(super) fn note_fault(&mut self, pending: &Pending) {
        if pending.faults.behind {
            return;
        }
        // The fault word stays set until the repetition, which is not queued yet.
        let injections = self.parts.variants.injections();
        for queued in &mut self.pending {
            queued.faults.behind = true;
            if queued.steps.kind == Kind::Sampled {
                injections.note_behind(queued.steps.prefill_rows > 0, queued.steps.drafts > 0);
            }
        }
        self.note_injected(pending);
        let Some(pause) = self.overlap.fault(Instant::now()) else { return };
        self.parts.variants.fell_back(Fallback::OverlapFault);
        let drafts = pending.steps.drafts;
        self.warn_of_fault((pending.steps.rows / (drafts + 1), drafts), pending.faults.call, pause);
    }

    /// Returns the label of a call of a step of so many sequences, and drafts for each, without barriers, by the call's number
    /// (`tags::number_calls`).
    pub(super) fn polling_call(&self, (sequences, drafts): (u32, u32), call: u32) -> Option<&str> {
        let (_, regions) = fitting(self.buckets(drafts), sequences);
        regions.carried.as_ref().and_then(|region| region.whole.label(call.wrapping_sub(1)))
    }

    /// Warns that a call of a step of so many sequences, and drafts for each, waited too long, and of the pause that follows.
    pub(super) fn warn_of_fault(&self, (sequences, drafts): (u32, u32), call: u32, pause: Duration) {
        let label = self.polling_call((sequences, drafts), call);
        tracing::warn!(
            device = self.parts.device_name,
            call = label.unwrap_or("unknown"),
            rows = sequences * (drafts + 1),
            drafts,
            pause_ms = pause.as_millis() as u64,
            "a call of a step without barriers waited too long: its step and those behind it run again, with \
             barriers until the pause is over"
        );
    }

    /// Counts the fault of a plan's step: for the wait that a test has broken in this step, or as one that no broken wait
    /// explains. Steps that run ahead of outputs that are done do not count.
    fn note_injected(&self, pending: &Pending) {
        let broken = pending.steps.broken.iter().find(|(step, _)| *step == pending.faults.good);
        let token = pending.steps.slots.iter().find_map(|slot| self.drawn[slot.0 as usize]);
        self.parts.variants.injections().note_fault(broken.map(|(_, wait)| *wait), pending.faults.call, token);
    }

    /// Submits again, with barriers, the steps of a plan that drew nothing because of a fault. Plans queued behind this
    /// one draw nothing either while the fault word is set, and are repeated in turn.
    ///
    /// The device state is that of the last good step, and everything that faulty steps have written is written again
    /// before it is read: activations by every step; keys, values and the convolution window at the position that a
    /// step computes; recurrent state only takes in tokens that were drawn (`delta_step`). Slots, counts, random state
    /// and the ring's tokens are written by the sampler only, which does nothing while the fault word is set.
    pub(super) fn run_again(&mut self, pending: &Pending) -> Result<(), ExecuteError> {
        if pending.faults.before >= MOST_REPEATS {
            let device = &self.parts.device_name;
            return Err(ExecuteError::Failed(format!(
                "device \"{device}\": a decode plan has faulted {} times, at most {MOST_REPEATS} repeats are tried",
                pending.faults.before + 1
            )));
        }
        let mut posts = Posts::default();
        posts.patch.set(self.parts.layout.fault_word(), 0);
        // Opens the gate for all queued steps. With or without their masks, they draw nothing while the fault word is
        // set, and they are repeated in turn. This plan's repetition runs only after they have left the queue.
        self.open_gate_to(self.gates)?;
        let (slots, steps) = (pending.steps.slots.clone(), pending.steps.count - pending.faults.good);
        let work = Work::Decode { slots, steps, drafts: 0, awaits: pending.awaits };
        self.repeats = true;
        let queued = self.enqueue(pending.ticket, Some(work), posts, None);
        self.repeats = false;
        queued?;
        let before = pending.faults.before + 1;
        self.pending.back_mut().into_iter().for_each(|again| again.faults.before = before);
        Ok(())
    }
}

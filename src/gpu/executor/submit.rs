//! Chooses and submits the regions of a plan, and repeats steps after a fault.

use crate::actors::compute::Submission;
use crate::actors::timeline::FlushReason;
use crate::engine::executor::ExecuteError;
use crate::engine::plan::{Chunk, Slot, Ticket, Work};
use crate::engine::variants::Fallback;
use crate::gpu::executor::inbox::Posts;
use crate::gpu::executor::{
    Around, DecodeRegion, GpuExecutor, Kind, Link, MOST_REPEATS, Pending, Pools, REPORT_EVERY, Scoring,
};
use crate::kernels::embed::PromptRows;
use crate::kernels::region::Region;
use crate::kernels::sampling::Patch;
use crate::kernels::state::{self};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Returns the smallest bucket with at least `rows` rows.
pub(super) fn fitting<T>(buckets: &BTreeMap<u32, T>, rows: u32) -> (u32, &T) {
    let (bucket, found) =
        buckets.range(rows..).next().unwrap_or_else(|| panic!("{rows} rows exceed the largest bucket"));
    (*bucket, found)
}

impl GpuExecutor {
    /// Returns the bucket and the regions of `steps` decode steps of `sequences` sequences, and which of these steps a
    /// test breaks.
    pub(super) fn decode_steps(&mut self, sequences: u32, steps: u32) -> (u32, Vec<DecodeRegion>, Vec<(u32, usize)>) {
        let (rows, regions) = fitting(&self.parts.decode, sequences);
        let overlaps = !self.repeats && self.overlap.allows(Instant::now());
        let Some(carried) = regions.carried.as_ref().filter(|_| overlaps) else {
            return (rows, vec![regions.plain.clone(); steps as usize], Vec::new());
        };
        let mut steps = vec![carried.clone(); steps as usize];
        let first = self.carried_steps + 1;
        self.carried_steps += steps.len() as u64;
        let mut broken = Vec::new();
        let injections = &self.parts.variants.injections();
        let wait = injections.next(rows).and_then(|wait| Some((wait, regions.broken.get(&wait)?)));
        if let Some((wait, region)) = wait {
            let (one, every) = (u64::from(self.parts.injection.step), u64::from(injections.every()));
            for (index, number) in (0u32..).zip(first..=self.carried_steps) {
                if number == one || every > 0 && number.is_multiple_of(every) {
                    steps[index as usize] = region.clone();
                    broken.push((index, wait));
                }
            }
        }
        (rows, steps, broken)
    }

    /// Returns the regions of a prefill step, the number of rows that draw tokens (rounded up to a bucket), the number of
    /// prompt tokens, and what is pooled. Adds the description of the step to `patch`.
    pub(super) fn prompts(&mut self, chunks: &[Chunk], patch: &mut Patch) -> (Vec<Arc<Region>>, u32, u32, Pools) {
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
        for (word, words) in layout.chunk_layout().describe(&rows) {
            patch.set_all(layout.chunk_word(word), &words);
        }
        let tokens = chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum();
        let lasts = chunks.iter().filter(|chunk| chunk.last).count() as u32;
        let (_, layers) = fitting(&self.parts.prefill, tokens);
        let mut regions = vec![Arc::clone(layers)];
        let mut rows = 0;
        let Some(head) = &self.parts.head else { return (regions, 0, tokens, Pools::default()) };
        if lasts > 0 {
            let (bucket, first) = fitting(&head.first, lasts);
            regions.push(Arc::clone(first));
            rows = bucket;
        }
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
        (regions, rows, tokens, pools)
    }

    /// Returns the tokens of a step that are scored and the regions that score them; `None` if none are. Adds the
    /// parameters of the scoring to `patch`.
    pub(super) fn scoring(&mut self, chunks: &[Chunk], patch: &mut Patch) -> Option<(Scoring, Vec<Arc<Region>>)> {
        let head = self.parts.head.as_ref()?;
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
        let (each, region) = &head.score;
        let turns = vec![Arc::clone(region); tokens.div_ceil(*each) as usize];
        Some((Scoring { slot: asked.slot, first: asked.start + 1, tokens, entry }, turns))
    }

    /// Queues work behind all earlier work, after the given changes of the device state. `around` is what surrounds the
    /// step of a stage.
    pub(super) fn enqueue(
        &mut self,
        ticket: Ticket,
        planned: Option<Work>,
        mut posts: Posts,
        around: Option<Around>,
    ) -> Result<(), ExecuteError> {
        let layout = self.parts.layout;
        let mut prompt_tokens = 0;
        let mut scoring = None;
        let mut pooling = Pools::default();
        let mut draw: Option<Arc<Region>> = None;
        let mut broken = Vec::new();
        let steps = planned.as_ref().map_or(0, Work::steps);
        // The regions of each step; for a plan without steps, the regions that it runs once.
        let once = |regions: Vec<Arc<Region>>| vec![regions; steps.max(1) as usize];
        let (work, steps, rows, mut entries, flush) = match &planned {
            None => (Kind::Changes, 0, 0, once(Vec::new()), FlushReason::PhaseBoundary),
            Some(Work::Prefill { chunks }) => {
                let (mut regions, rows, tokens, pools) = self.prompts(chunks, &mut posts.patch);
                pooling = pools;
                prompt_tokens = tokens;
                if let Some((asked, turns)) = self.scoring(chunks, &mut posts.patch) {
                    scoring = Some(asked);
                    // The scores are computed after the layers, and before the logits of the first output tokens
                    // overwrite the logits of the scored rows.
                    regions.splice(1..1, turns);
                }
                let kind = if rows > 0 { Kind::Sampled } else { Kind::Layers };
                (kind, steps, rows, once(regions), FlushReason::PhaseBoundary)
            }
            Some(Work::Decode { slots, drafts, awaits, .. }) => {
                let (sequences, regions) = match drafts {
                    0 => {
                        let (sequences, mut regions, by_test) = self.decode_steps(slots.len() as u32, steps);
                        broken = by_test;
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
                let kind = if self.parts.head.is_some() { Kind::Sampled } else { Kind::Layers };
                (kind, steps, rows, regions, FlushReason::Readback)
            }
        };
        let applied = self.post(ticket, posts)?;
        let sum = |regions: &[Arc<Region>]| {
            regions.iter().fold((0, 0), |(d, b), region| (d + region.dispatches(), b + region.barriers()))
        };
        let fixed = sum(&applied.regions);
        // There is one `dump` buffer, so only one plan in flight may fill it.
        let asks = |slot: &Slot| self.dumps[slot.0 as usize];
        let asked = match &planned {
            Some(Work::Prefill { chunks }) => chunks.iter().any(|chunk| chunk.last && asks(&chunk.slot)),
            Some(Work::Decode { slots, .. }) => slots.iter().any(asks),
            None => false,
        };
        let dump = asked && self.parts.head.is_some() && !self.pending.iter().any(|pending| pending.dump);
        let mut each = sum(&entries[0]);
        if let Some(draw) = draw {
            let drawing = sum(std::slice::from_ref(&draw));
            each = (each.0 + drawing.0, each.1 + drawing.1);
            entries.push(vec![draw]);
        }
        if dump {
            let dump = Arc::clone(&self.head().dump_region);
            let copying = sum(std::slice::from_ref(&dump));
            each = (each.0 + copying.0, each.1 + copying.1);
            for entry in entries.iter_mut().rev().take(steps.max(1) as usize) {
                entry.push(Arc::clone(&dump));
            }
        }
        if self.profiled > 0 && planned.is_some() {
            self.profiled -= 1;
            let timed = entries.len() - steps.max(1) as usize + 1;
            for region in entries.iter_mut().take(timed).flatten() {
                self.time(region);
            }
        }
        let mut link = Link::default();
        if let Some(around) = around {
            let own = sum(&[&around.before[..], &around.after[..]].concat());
            each = (each.0 + own.0, each.1 + own.1);
            entries[0].splice(0..0, around.before);
            entries.last_mut().expect("a step has an entry").extend(around.after);
            link = around.link;
        }
        entries[0].splice(0..0, applied.regions);
        // On a slow device every step is reported, on a fast one only the whole plan.
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
            broken,
            work,
            prompt_tokens,
            scoring,
            pooling,
            dump,
            fixed,
            each,
            gate,
            awaits,
            flush,
            ..changes
        };
        self.hand_over(pending, entries, report_after, link);
        Ok(())
    }

    /// Replaces a region by a copy with timestamps, recorded for this run only.
    pub(super) fn time(&self, region: &mut Arc<Region>) {
        match region.timed(&self.parts.device, &self.parts.pipelines) {
            Ok(timed) => *region = Arc::new(timed),
            Err(error) => tracing::warn!(%error, region = region.name(), "a region cannot be profiled"),
        }
    }

    /// Passes entries to the compute actor, whose reports will refer to `pending`.
    pub(super) fn hand_over(
        &mut self,
        mut pending: Pending,
        entries: Vec<Vec<Arc<Region>>>,
        report_after: Vec<u32>,
        link: Link,
    ) {
        let waits = std::mem::take(&mut self.parts.ready);
        if !waits.is_empty() {
            pending.flush = FlushReason::CrossQueue;
        }
        let (id, flush) = (pending.ticket.0, pending.flush);
        let gate = match pending.gate {
            Some(value) => Some((Arc::clone(&self.head().gate), value)),
            None => link.gate,
        };
        self.pending.push_back(pending);
        let outbox = self.outbox.clone();
        self.parts.compute.submit(Submission {
            id,
            entries,
            waits,
            gate,
            flush,
            report_after,
            outbox,
            then: link.then,
        });
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
        if pending.behind {
            return;
        }
        // The fault word stays set until the repetition, which is not queued yet.
        let injections = self.parts.variants.injections();
        for queued in &mut self.pending {
            queued.behind = true;
            if queued.work == Kind::Sampled {
                injections.note_behind(queued.prompt_tokens > 0, queued.drafts > 0);
            }
        }
        self.note_injected(pending);
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

    /// Counts the fault of a plan's step if a test has broken the step. Steps that run ahead of outputs that are done do
    /// not count.
    fn note_injected(&self, pending: &Pending) {
        let Some((_, wait)) = pending.broken.iter().find(|(step, _)| *step == pending.good) else { return };
        let Some(token) = pending.slots.iter().find_map(|slot| self.drawn[slot.0 as usize]) else { return };
        let injections = &self.parts.variants.injections();
        injections.note(*wait, token);
        let wait = injections.wait(*wait);
        tracing::warn!(call = wait.call, tag = wait.tag, rows = wait.rows, token, "a test has broken this call");
    }

    /// Submits again, with barriers, the steps of a plan that drew nothing because of a fault. Plans queued behind this
    /// one draw nothing either while the fault word is set, and are repeated in turn.
    ///
    /// The device state is that of the last good step, and everything that faulty steps have written is written again
    /// before it is read: activations by every step; keys, values and the convolution window at the position that a
    /// step computes; recurrent state only takes in tokens that were drawn (`delta_step`). Slots, counts, random state
    /// and the ring's tokens are written by the sampler only, which does nothing while the fault word is set.
    pub(super) fn run_again(&mut self, pending: &Pending) -> Result<(), ExecuteError> {
        if pending.faults >= MOST_REPEATS {
            let device = &self.parts.device_name;
            return Err(ExecuteError::Failed(format!(
                "device \"{device}\": a decode plan has faulted {} times, at most {MOST_REPEATS} repeats are tried",
                pending.faults + 1
            )));
        }
        let mut posts = Posts::default();
        posts.patch.set(self.parts.layout.fault_word(), 0);
        // Opens the gate for all queued steps. With or without their masks, they draw nothing while the fault word is
        // set, and they are repeated in turn. This plan's repetition runs only after they have left the queue.
        self.open_gate_to(self.gates)?;
        let (slots, steps) = (pending.slots.clone(), pending.steps - pending.good);
        let work = Work::Decode { slots, steps, drafts: 0, awaits: pending.awaits };
        self.repeats = true;
        let queued = self.enqueue(pending.ticket, Some(work), posts, None);
        self.repeats = false;
        queued?;
        self.pending.back_mut().into_iter().for_each(|again| again.faults = pending.faults + 1);
        Ok(())
    }
}

//! Turns the compute actor's reports and the entries of the token ring into reports of plans.

use crate::actors::timeline::{FlushReason, SubmissionRecord};
use crate::actors::watcher::Report;
use crate::engine::executor::ExecuteError;
use crate::engine::plan::{Done, PlanReport, PooledChunk, Sampled, SampledDetails, ScoredChunk, Slot, Ticket};
use crate::engine::request::{PerToken, Scored, TokenLogprobs};
use crate::gpu::executor::{GpuExecutor, Kind, Pending, Pools, Scoring};
use crate::kernels::sampling::score::Score;
use crate::kernels::state::{self, RingEntry};
use crate::model::decoder::RingLayout;
use std::time::Duration;

/// The number of rows whose ring entries are read at a time.
const ROWS_AT_ONCE: u32 = 32;

impl GpuExecutor {
    /// Returns the submissions of a finished plan. Those of earlier plans without work, for which there is no report,
    /// are included.
    pub(super) fn submissions_of(&mut self, ticket: Ticket) -> Vec<SubmissionRecord> {
        let (of, kept) = self.submissions.drain(..).partition::<Vec<_>, _>(|(of, _)| of.0 <= ticket.0);
        self.submissions = kept.into();
        of.into_iter().map(|(_, record)| record).collect()
    }

    pub(super) fn early_finished(&self) -> usize {
        self.early.iter().filter(|report| report.last).count()
    }

    /// Returns the ring entries of a step's rows from `first` on, as many as `words` has room for. The alternatives of a token
    /// are only read if there are any, because few requests ask for them.
    pub(super) fn ring_entries<'a>(
        &'a self,
        step: u32,
        first: u32,
        words: &'a mut [u32],
    ) -> impl Iterator<Item = RingEntry> + 'a {
        let RingLayout { steps, rows: ring_rows } = self.head().ring;
        let at = RingEntry::at(step, first, steps, ring_rows) as u64 * 4;
        self.head().ring_buffer.load_quads(at, bytemuck::cast_slice_mut(words));
        let top = move |row: u32| {
            let mut words = [0u32; state::TOP_WORDS as usize];
            let at = RingEntry::top_at(step, row, steps, ring_rows) as u64 * 4;
            self.head().ring_buffer.read(at, bytemuck::cast_slice_mut(&mut words));
            words
        };
        let entries = words.chunks_exact(state::ENTRY_WORDS as usize).zip(first..);
        entries.map(move |(words, row)| RingEntry::read(words, || top(row)))
    }

    /// Returns the tokens of steps `from..to`, the first step that drew no token because of a fault (`to` if every step
    /// drew one), and its fault word (0 without a fault).
    pub(super) fn tokens(
        &self,
        pending: &Pending,
        from: u32,
        to: u32,
    ) -> Result<(Vec<Sampled>, u32, u32), ExecuteError> {
        let mut tokens = Vec::with_capacity((pending.steps.rows * (to - from)) as usize);
        let rows = pending.steps.rows;
        // Few at a time, so that they stay in the processor's fastest memory.
        let mut words = [0u32; (ROWS_AT_ONCE * state::ENTRY_WORDS) as usize];
        for (step, first) in
            (from..to).flat_map(|step| (0..rows).step_by(ROWS_AT_ONCE as usize).map(move |row| (step, row)))
        {
            let number = pending.steps.first.wrapping_add(step);
            let words = &mut words[..(ROWS_AT_ONCE.min(rows - first) * state::ENTRY_WORDS) as usize];
            for (row, entry) in (first..).zip(self.ring_entries(number, first, words)) {
                if entry.step != number {
                    return Err(ExecuteError::StepMismatch { expected: number, found: entry.step });
                }
                if entry.done == state::DONE_FAULT {
                    return Ok((tokens, step, entry.fault));
                }
                let Some(id) = entry.token else { continue };
                // The slot belongs to the same sequence until all plans of the sequence are reported.
                let asked = self.logprobs[entry.slot as usize];
                // Only row 0 of the logits is copied; `submit` assigns it to a slot that requested logits.
                let logits = (pending.steps.dump && row == 0 && self.dumps[entry.slot as usize]).then(|| {
                    let mut logits = vec![0f32; self.parts.capacity.vocabulary as usize];
                    self.head().dump.read(0, bytemuck::cast_slice_mut(&mut logits));
                    logits
                });
                let logprobs = asked.then_some(TokenLogprobs { chosen: entry.logprob, top: entry.top });
                tokens.push(Sampled {
                    slot: Slot(entry.slot),
                    id,
                    draft: row % (pending.steps.drafts + 1),
                    done: match entry.done {
                        state::DONE_STOP => Some(Done::Stop),
                        state::DONE_LENGTH => Some(Done::Length),
                        _ => None,
                    },
                    details: (asked || logits.is_some()).then(|| Box::new(SampledDetails { logprobs, logits })),
                });
            }
        }
        Ok((tokens, to, 0))
    }

    pub(super) fn take(&mut self, mut report: Report) -> Result<Option<PlanReport>, ExecuteError> {
        if let Err(error) = report.result {
            // No other report of this submission follows.
            self.pending.pop_front();
            let device = self.parts.device_name.clone();
            return Err(match error.is_lost() {
                true => ExecuteError::DeviceLost { device, source: Box::new(error) },
                false => ExecuteError::Failed(format!("device \"{device}\": {error}")),
            });
        }
        let mut pending = self.pending.pop_front().unwrap_or_else(|| panic!("report {} has no submission", report.id));
        assert_eq!(pending.ticket.0, report.id, "reports come in the order of submission");
        let ungated = report.record.as_deref().and_then(|record| ungated(record, pending.before_gate));
        if let Some(record) = report.record.take() {
            self.submissions.push_back((pending.ticket, *record));
        }
        // A gated step consists of two entries.
        let (from, to) = (pending.entries, report.entries.min(pending.steps.count.max(1)));
        pending.entries = to;
        let progress = match pending.steps.kind {
            Kind::Changes => None,
            Kind::Layers | Kind::Sampled => {
                let (tokens, good, fault) = match pending.steps.kind {
                    Kind::Sampled => {
                        self.tokens(&pending, from.min(pending.faults.good), to.min(pending.faults.good))?
                    }
                    _ => (Vec::new(), to, 0),
                };
                for token in &tokens {
                    let drawn = &mut self.drawn[token.slot.0 as usize];
                    *drawn = drawn.filter(|_| token.done.is_none()).map(|count| count + 1);
                }
                let from = from.min(pending.faults.good);
                if good < to.min(pending.faults.good) {
                    (pending.faults.good, pending.faults.call) = (good, fault);
                }
                let first = !pending.started;
                pending.started = true;
                let cost = pending.cost(&report, first, good - from);
                // A stage's step that faults is over: the split executor runs it again on all stages.
                let over = self.parts.exchange.is_some() || pending.faults.good >= pending.steps.count;
                let finished = report.last && over;
                let steps = good - from;
                let progress = PlanReport {
                    ticket: pending.ticket,
                    steps,
                    drafts: pending.steps.drafts,
                    tokens,
                    scored: pending.steps.scoring.filter(|_| report.last).map(|scoring| self.scores(scoring)),
                    pooled: match report.last && !pending.steps.pooling.runs.is_empty() {
                        true => self.pooled(&pending.steps.pooling),
                        false => Vec::new(),
                    },
                    finished,
                    faults: if finished { pending.faults.before } else { 0 },
                    cost,
                    submissions: if finished { self.submissions_of(pending.ticket) } else { Vec::new() },
                };
                (finished || good > from).then_some(progress)
            }
        };
        if report.last {
            self.free_inboxes.append(&mut pending.inboxes);
            if pending.steps.kind == Kind::Sampled && pending.faults.good < pending.steps.count {
                match self.parts.exchange {
                    Some(_) => self.faulted.push_back((pending.ticket, pending.faults.call)),
                    None => {
                        self.note_fault(&pending);
                        self.run_again(&pending)?;
                    }
                }
            }
            let total = report.device_time.unwrap_or_else(|| pending.submitted.elapsed());
            // The time that a gated step waited at the gate does not count.
            let total = match pending.gate {
                Some(_) => ungated,
                None => Some(total),
            };
            match total {
                None => {}
                // The time includes the wait until the call timed out.
                Some(_) if pending.faults.good < pending.steps.count => {}
                // A chunk of the same size without scoring takes less time.
                Some(_) if pending.steps.scoring.is_some() => {}
                Some(total) if pending.steps.prefill_rows > 0 => {
                    self.pace.note_chunk(pending.steps.prefill_rows, total)
                }
                Some(total) if pending.steps.kind == Kind::Sampled => {
                    let (each, time) = (pending.steps.drafts + 1, total / pending.steps.count.max(1));
                    match pending.steps.drafts {
                        0 => self.pace.note_step(pending.steps.rows.max(1), time),
                        drafts => self.pace.note_verify(pending.steps.rows / each, drafts, time),
                    }
                }
                Some(_) => {}
            }
        } else {
            self.pending.push_front(pending);
        }
        Ok(progress)
    }

    /// Reads the pooled rows of a step from the mapped buffer, after the device has written them.
    pub(super) fn pooled(&self, pools: &Pools) -> Vec<PooledChunk> {
        let (hidden, stride) = self.head().hidden;
        let read = |(&(slot, tokens), row): (&(Slot, u32), u32)| {
            let mut sum = vec![0f32; hidden as usize];
            let at = u64::from(row) * u64::from(stride) * 4;
            self.head().pooled.read(at, bytemuck::cast_slice_mut(&mut sum));
            PooledChunk { slot, tokens, sum }
        };
        pools.runs.iter().zip(pools.first..).map(read).collect()
    }

    /// Reads the scores of a chunk from the mapped buffer, after the device has written them.
    pub(super) fn scores(&self, scoring: Scoring) -> ScoredChunk {
        let Scoring { slot, first, tokens, entry } = scoring;
        let mut words = vec![0u32; (tokens * state::SCORE_WORDS) as usize];
        let at = u64::from(entry) * u64::from(state::SCORE_WORDS) * 4;
        self.head().scores.read(at, bytemuck::cast_slice_mut(&mut words));
        let scored = |words: &[u32]| {
            let Score { token, logprob, top } = Score::read(words);
            Scored { id: token, logprobs: TokenLogprobs { chosen: logprob, top } }
        };
        let tokens = words.chunks_exact(state::SCORE_WORDS as usize).map(scored).collect();
        ScoredChunk { slot, first, tokens }
    }
}

impl Pending {
    pub(super) fn cost(&self, report: &Report, first: bool, steps: u32) -> PerToken {
        let count = |fixed: u32, each: u32| f64::from(each * steps + if first { fixed } else { 0 });
        let once = if first { 1.0 } else { 0.0 };
        let mut cost = PerToken {
            submits: once,
            dispatches: count(self.fixed.dispatches, self.each.dispatches),
            barriers: count(self.fixed.barriers, self.each.barriers),
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

/// Returns the device time of a gated step up to its gate, if it was timed: without its wait there and without what comes
/// behind it. The spans of regions follow each other without gaps, so that of the first region behind the gate contains the
/// wait. `before` is the number of regions before the gate.
fn ungated(record: &SubmissionRecord, before: usize) -> Option<Duration> {
    // Too few time stamps leave one span for several regions.
    let body = record.regions.get(..before).filter(|_| record.regions.len() > before)?;
    let [first, ..] = body else { return None };
    Some(body.last()?.end.since(first.begin))
}

//! Inboxes: how changes of the device state reach the device, as patches in mapped memory that a region applies.

use crate::actors::compute::Gates;
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::plan::{Change, PageTable, SlotParams, Ticket};
use crate::gpu::executor::{GpuExecutor, Pending};
use crate::kernels::region::Region;
use crate::kernels::sampling::{Patch, clear_inbox, patch_inbox};
use crate::kernels::state::{self, SlotInit};
use crate::memory::Buffer;
use std::sync::Arc;

/// A staging area in mapped memory for changes of the device state, with the regions that apply them.
#[derive(Debug)]
pub struct Inbox {
    /// Mapped memory: the words of a patch.
    pub patch: Arc<Buffer>,
    /// Applies `patch`.
    pub apply: Arc<Region>,
    /// The part for token counts; `None` in a stage that draws no tokens.
    pub counts: Option<CountInbox>,
}

/// A staging area in mapped memory for changes of token counts, with the regions that apply them.
#[derive(Debug)]
pub struct CountInbox {
    /// Mapped memory: the slots whose token counts are cleared.
    pub clear: Arc<Buffer>,
    /// Mapped memory: `[rows][4]` of token, position, slot and 1 for tokens to add to token counts; unused rows are 0.
    pub seen: Arc<Buffer>,
    /// Clears the token counts of the slots in `clear`.
    pub clear_counts: Arc<Region>,
    /// Adds the tokens in `seen` to token counts and, if drafts are looked up, keeps them.
    pub mark_seen: Arc<Region>,
}

impl Inbox {
    fn counts(&self) -> &CountInbox {
        self.counts.as_ref().expect("only stages that draw tokens count them")
    }
}

/// The changes of the device state that a plan requires.
#[derive(Debug, Default)]
pub(super) struct Posts {
    pub(super) patch: Patch,
    /// The slots whose token counts are cleared.
    pub(super) clear: Vec<u32>,
    /// The tokens to add to token counts and to keep for look-up: token, position, slot and 1.
    pub(super) seen: Vec<[u32; 4]>,
}

/// The inboxes that were filled, and the regions that apply them.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) inboxes: Vec<usize>,
    pub(super) regions: Vec<Arc<Region>>,
}

impl GpuExecutor {
    pub(super) fn changes(&mut self, changes: &[Change]) -> Posts {
        let layout = self.parts.layout;
        let mut posts = Posts::default();
        let patch = &mut posts.patch;
        for change in changes {
            match change {
                Change::Join { slot, params, cached } => {
                    let init = slot_init(params);
                    let draws = self.parts.head.is_some();
                    if draws && init.has_penalties() {
                        posts.clear.push(slot.0);
                    }
                    let rows = (0..).zip(cached).map(|(position, token)| [*token, position, slot.0, 1]);
                    posts.seen.extend(rows.filter(|_| draws));
                    self.dumps[slot.0 as usize] = params.dump_logits;
                    self.drawn[slot.0 as usize] = Some(params.generated);
                    self.logprobs[slot.0 as usize] = params.logprobs.is_some();
                    patch.set_all(layout.slot_word(slot.0, 0), &init.words());
                    patch.set_all(layout.bias_word(slot.0, 0), &state::bias_words(&params.sampling.logit_bias));
                    if let Some(mask) = params.mask.as_ref().filter(|_| draws) {
                        self.set_mask(*slot, mask);
                    }
                }
                Change::Pages { slot, table, first, pages } => {
                    for (index, page) in (*first..).zip(pages) {
                        let word = match table {
                            PageTable::Full => layout.page_word(slot.0, index),
                            PageTable::Window => layout.window_word(slot.0, index),
                        };
                        patch.set(word, page.0);
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

    /// Fills inboxes and returns the regions that apply them, in order. A plan may need more inboxes than it can use at
    /// once; then the filled ones are first submitted separately, under the plan's ticket.
    pub(super) fn post(&mut self, ticket: Ticket, posts: Posts) -> Result<Applied, ExecuteError> {
        let mut applied = Applied::default();
        for slots in posts.clear.chunks(self.parts.layout.slots.max(1) as usize) {
            let inbox = self.inbox(ticket, &mut applied)?.counts();
            inbox.clear.write(0, bytemuck::cast_slice(&clear_inbox(slots)));
            applied.regions.push(Arc::clone(&inbox.clear_counts));
        }
        for pairs in posts.patch.into_pairs().chunks(self.parts.patch_pairs as usize) {
            let inbox = self.inbox(ticket, &mut applied)?;
            inbox.patch.write(0, bytemuck::cast_slice(&patch_inbox(pairs)));
            applied.regions.push(Arc::clone(&inbox.apply));
        }
        // This must follow the patch, because `mark_seen` reads words of the slots that the patch writes.
        let rows = self.parts.seen_rows as usize;
        for seen in posts.seen.chunks(rows) {
            let inbox = self.inbox(ticket, &mut applied)?.counts();
            let mut words = seen.to_vec();
            words.resize(rows, [0; 4]);
            inbox.seen.write(0, bytemuck::cast_slice(&words));
            applied.regions.push(Arc::clone(&inbox.mark_seen));
        }
        Ok(applied)
    }

    /// Returns the next inbox for a plan. If the plan already uses half of the inboxes, submits those first.
    pub(super) fn inbox(&mut self, ticket: Ticket, applied: &mut Applied) -> Result<&Inbox, ExecuteError> {
        if applied.inboxes.len() >= self.parts.inboxes.len() / 2 {
            let full = std::mem::take(applied);
            self.hand_over(
                Pending::changes(ticket, full.inboxes),
                (None, vec![full.regions]),
                Vec::new(),
                (Gates::new(), None),
            );
        }
        let index = self.free_inbox()?;
        applied.inboxes.push(index);
        Ok(&self.parts.inboxes[index])
    }

    /// Returns a free inbox. If all are in use, waits until the oldest submission that uses one has finished.
    pub(super) fn free_inbox(&mut self) -> Result<usize, ExecuteError> {
        if let Some(index) = self.free_inboxes.pop() {
            return Ok(index);
        }
        // Reports come in submission order, and every used inbox belongs to a submission. Each submission gets a last
        // report, even if an actor has ended.
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

//! Preemption: which sequence loses its pages when there are too few for a decode step.
//! Not here: how it is computed again later, which is an ordinary admission (`prompts`).

use crate::engine::plan::{Page, Slot};
use crate::engine::scheduler::Scheduler;
use crate::engine::sequence::{Sequence, SequenceState};
use std::collections::HashMap;

impl Scheduler {
    /// Preempts sequences, the youngest of the lowest priority first, until the pages for one step of the remaining
    /// rows are free, now or when the unfinished plans have finished.
    pub(super) fn preempt(&mut self, rows: &mut Vec<Slot>) {
        // A sequence that loses its pages is computed again from its tokens.
        self.settle();
        loop {
            if self.pages_missing(rows, 1) <= self.pool.free() + self.pages_free_soon() {
                return;
            }
            let victim = self
                .residents()
                .filter(|s| s.state == SequenceState::Prefill || s.decodes())
                .max_by_key(|s| s.rank())
                .expect("one sequence alone always finds its pages")
                .id;
            rows.retain(|&slot| self.holder_id(slot) != Some(victim));
            self.preemptions += 1;
            let sequence = self.sequences.get_mut(victim).expect("a victim is known");
            sequence.preemptions += 1;
            self.leave(victim, true);
        }
    }

    /// Returns the number of pages that will be free when the plans in flight have finished: those held only by
    /// sequences that leave or that have no token left to draw.
    pub(super) fn pages_free_soon(&self) -> u32 {
        let mut releases: HashMap<Page, u32> = HashMap::new();
        let ends =
            |s: &&Sequence| s.state == SequenceState::Leaving || (s.state == SequenceState::Decode && s.undrawn() == 0);
        for &page in self.residents().filter(ends).flat_map(|s| &s.pages) {
            *releases.entry(page).or_default() += 1;
        }
        releases.into_iter().filter(|&(page, releases)| releases == self.pool.holders(page)).count() as u32
    }
}

//! The prefix cache of recurrent state: which cell holds the state after which token prefix, so that a prompt with the
//! same prefix is not computed from its first token. Pure bookkeeping: page keys in, cells out.
//! Not here: KV cache pages (`page_pool`), and when state is stored (`scheduler`).

use crate::engine::plan::{STATE_TOKENS, StateSlot};
use crate::engine::prefix::PageKey;
use crate::kernels::attention::PAGE_TOKENS;
use std::collections::HashMap;

/// The number of pages between two places at which state can be stored.
const STATE_PAGES: usize = (STATE_TOKENS / PAGE_TOKENS) as usize;

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// There is no state; the prompt must be computed from its first token.
    Nothing,
    /// The state after this many pages is in the cell.
    Ready(usize, StateSlot),
    /// The plan that is being made will store the state after this many pages; the next plan can use it.
    Soon(usize),
}

#[derive(Clone, Copy, Debug)]
struct Snapshot {
    /// The key of the last page before the state; `None` if the cell is empty.
    name: Option<PageKey>,
    /// The clock value of the last use.
    used: u64,
    /// The number of the last plan that reads the cell, and of the plan that writes it.
    read_by: u64,
    written_by: u64,
}

/// The snapshot cells, those after the slots' own. No cell is both read and written within a plan, and the device runs
/// plans in order. So a later plan can overwrite a cell at once, even if an unfinished plan still reads it.
#[derive(Debug)]
pub struct Snapshots {
    /// The index of the first snapshot cell.
    first: u32,
    snapshots: Vec<Snapshot>,
    named: HashMap<PageKey, usize>,
    clock: u64,
    plan: u64,
}

impl Snapshots {
    /// Creates `count` empty cells, the first of which has index `first`.
    pub fn new(first: u32, count: u32) -> Snapshots {
        let empty = Snapshot { name: None, used: 0, read_by: 0, written_by: 0 };
        Snapshots { first, snapshots: vec![empty; count as usize], named: HashMap::new(), clock: 0, plan: 1 }
    }

    /// Begins another plan: later lookups and changes belong to it.
    pub fn next_plan(&mut self) {
        self.plan += 1;
    }

    /// Returns the number of cells that hold a state.
    pub fn used(&self) -> u32 {
        self.named.len() as u32
    }

    /// Finds the state after the longest prefix of these pages, if it is stored or will be.
    pub fn find(&self, names: &[PageKey]) -> Found {
        let mut pages = names.len() / STATE_PAGES * STATE_PAGES;
        while pages > 0 {
            if let Some(&index) = self.named.get(&names[pages - 1]) {
                return match self.snapshots[index].written_by == self.plan {
                    true => Found::Soon(pages),
                    false => Found::Ready(pages, self.cell(index)),
                };
            }
            pages -= STATE_PAGES;
        }
        Found::Nothing
    }

    /// Notes that the plan being made reads a cell that [`Snapshots::find`] returned.
    pub fn read(&mut self, cell: StateSlot) {
        let (clock, plan) = (self.tick(), self.plan);
        let snapshot = &mut self.snapshots[(cell.0 - self.first) as usize];
        snapshot.used = clock;
        snapshot.read_by = plan;
    }

    /// Returns a cell for the state after the page with this key, which the plan being made writes: an empty cell or
    /// the least recently used one. `None` if the state is already stored, or if the plan uses every cell.
    pub fn keep(&mut self, name: PageKey) -> Option<StateSlot> {
        let clock = self.tick();
        if let Some(&index) = self.named.get(&name) {
            self.snapshots[index].used = clock;
            return None;
        }
        let plan = self.plan;
        let free = |snapshot: &Snapshot| snapshot.read_by != plan && snapshot.written_by != plan;
        let oldest = (0..self.snapshots.len()).filter(|&i| free(&self.snapshots[i])).min_by_key(|&i| {
            let snapshot = &self.snapshots[i];
            (snapshot.name.is_some(), snapshot.used)
        })?;
        let snapshot = &mut self.snapshots[oldest];
        if let Some(old) = snapshot.name.replace(name) {
            self.named.remove(&old);
        }
        snapshot.used = clock;
        snapshot.written_by = plan;
        self.named.insert(name, oldest);
        Some(self.cell(oldest))
    }

    /// Discards all states. Only allowed while no plan reads or writes a cell.
    pub fn forget(&mut self) {
        self.named.clear();
        for snapshot in &mut self.snapshots {
            snapshot.name = None;
        }
    }

    fn cell(&self, index: usize) -> StateSlot {
        StateSlot(self.first + index as u32)
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(numbers: impl IntoIterator<Item = u128>) -> Vec<PageKey> {
        numbers.into_iter().map(PageKey).collect()
    }

    #[test]
    fn the_longest_kept_beginning_is_found_from_the_next_plan_on() {
        let mut snapshots = Snapshots::new(8, 2);
        let pages = names(0..11);
        assert_eq!(snapshots.find(&pages), Found::Nothing);
        assert_eq!(snapshots.keep(pages[3]), Some(StateSlot(8)));
        assert_eq!(snapshots.find(&pages), Found::Soon(4), "it is being written");
        snapshots.next_plan();
        assert_eq!(snapshots.find(&pages), Found::Ready(4, StateSlot(8)));
        assert_eq!(snapshots.find(&pages[..3]), Found::Nothing, "it is behind page 3");
        assert_eq!(snapshots.keep(pages[3]), None, "it is there already");
        assert_eq!(snapshots.keep(pages[7]), Some(StateSlot(9)));
        snapshots.next_plan();
        assert_eq!(snapshots.find(&pages), Found::Ready(8, StateSlot(9)));
        assert_eq!(snapshots.find(&pages[..7]), Found::Ready(4, StateSlot(8)));
        assert_eq!(snapshots.used(), 2);
    }

    #[test]
    fn the_least_lately_used_goes_first_but_not_what_the_plan_reads_or_writes() {
        let mut snapshots = Snapshots::new(0, 2);
        let pages = names(0..20);
        assert_eq!(snapshots.keep(pages[3]), Some(StateSlot(0)));
        assert_eq!(snapshots.keep(pages[7]), Some(StateSlot(1)));
        assert_eq!(snapshots.keep(pages[11]), None, "both are written by this plan");
        snapshots.next_plan();
        snapshots.read(StateSlot(0));
        assert_eq!(snapshots.keep(pages[11]), Some(StateSlot(1)), "the other is read by this plan");
        assert_eq!(snapshots.find(&pages), Found::Soon(12));
        snapshots.next_plan();
        assert_eq!(snapshots.keep(pages[15]), Some(StateSlot(0)));
        snapshots.next_plan();
        assert_eq!(snapshots.find(&pages[..8]), Found::Nothing, "both old states have gone");
        assert_eq!(snapshots.find(&pages), Found::Ready(16, StateSlot(0)));
    }

    #[test]
    fn what_is_forgotten_is_not_found_and_its_cells_go_first() {
        let mut snapshots = Snapshots::new(0, 2);
        let pages = names(0..8);
        assert_eq!(snapshots.keep(pages[3]), Some(StateSlot(0)));
        snapshots.next_plan();
        snapshots.forget();
        assert_eq!((snapshots.used(), snapshots.find(&pages)), (0, Found::Nothing));
        snapshots.next_plan();
        assert!(snapshots.keep(pages[3]).is_some() && snapshots.keep(pages[7]).is_some());
        snapshots.next_plan();
        assert_eq!(snapshots.used(), 2);
        assert!(matches!(snapshots.find(&pages), Found::Ready(8, _)));
    }

    #[test]
    fn without_cells_nothing_is_kept() {
        let mut snapshots = Snapshots::new(4, 0);
        assert_eq!(snapshots.keep(PageKey(1)), None);
        assert_eq!(snapshots.find(&names([1, 1, 1, 1])), Found::Nothing);
    }
}

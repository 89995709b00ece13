//! Snapshots of recurrent state: which cell holds the state behind which beginning, so that a prompt that begins alike
//! need not be computed from its first token. Pure bookkeeping: page names in, cells out.
//! Deliberately absent: pages of keys and values (`pages`), and when state is kept (`scheduler`).

use crate::engine::plan::{STATE_TOKENS, StateSlot};
use crate::engine::prefix::PageKey;
use crate::kernels::attention::PAGE_TOKENS;
use std::collections::HashMap;

/// Pages between two places at which state can be kept.
const STATE_PAGES: usize = (STATE_TOKENS / PAGE_TOKENS) as usize;

/// What is there for a beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing: compute from the first token.
    Nothing,
    /// The state behind so many pages lies in the cell.
    Ready(usize, StateSlot),
    /// The plan at hand leaves the state behind so many pages: the next one can use it.
    Soon(usize),
}

#[derive(Clone, Copy, Debug)]
struct Snapshot {
    /// The name of the last page before the state.
    name: Option<PageKey>,
    /// When it was used last.
    used: u64,
    /// The last plan that reads it, and the one that writes it.
    read_by: u64,
    written_by: u64,
}

/// The cells behind the slots' own. Within a plan no cell is both read and written, and the device runs plans in
/// their order: so a cell can be taken for another state at once, whoever is still to read it.
#[derive(Debug)]
pub struct Snapshots {
    /// The first of them.
    first: u32,
    snapshots: Vec<Snapshot>,
    named: HashMap<PageKey, usize>,
    clock: u64,
    plan: u64,
}

impl Snapshots {
    /// `count` cells from cell `first` on, all empty.
    pub fn new(first: u32, count: u32) -> Snapshots {
        let empty = Snapshot { name: None, used: 0, read_by: 0, written_by: 0 };
        Snapshots { first, snapshots: vec![empty; count as usize], named: HashMap::new(), clock: 0, plan: 1 }
    }

    /// What is asked and taken from now on belongs to another plan.
    pub fn next_plan(&mut self) {
        self.plan += 1;
    }

    /// Cells that hold a state.
    pub fn used(&self) -> u32 {
        self.named.len() as u32
    }

    /// The longest beginning of these pages whose state is there or soon will be.
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

    /// The plan at hand reads a cell that [`Snapshots::find`] gave.
    pub fn read(&mut self, cell: StateSlot) {
        let (clock, plan) = (self.tick(), self.plan);
        let snapshot = &mut self.snapshots[(cell.0 - self.first) as usize];
        snapshot.used = clock;
        snapshot.read_by = plan;
    }

    /// A cell for the state behind the page of this name, which the plan at hand writes: the one that was used least
    /// lately. `None` if the state is kept already, or if the plan uses every cell.
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

    /// No state is found any more. Only while no plan reads or writes one.
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

//! Decides which batches may be submitted to one hardware queue, and when. Pure data, no Vulkan calls.
//!
//! A hardware queue executes in order, so a wait that is submitted before its own signal on the same queue never ends.
//! A batch that waits for a point which has not been submitted yet is therefore held back, together with all later
//! batches of its lane, until the signal has been submitted. A wait for a lane of another hardware queue holds nothing
//! back: the driver resolves it.

use crate::device::point::{Point, Role};
use std::collections::VecDeque;

struct DeferredBatch<T> {
    last: u64,
    waits: Vec<Point>,
    item: T,
}

/// The lanes of one hardware queue: one lane for each role that the queue serves.
pub(super) struct Lanes<T> {
    /// Whether the role's lane is on this queue.
    served: [bool; 2],
    /// The last timeline value reserved for a batch.
    reserved: [u64; 2],
    /// The last timeline value whose signal was submitted.
    submitted: [u64; 2],
    held: [VecDeque<DeferredBatch<T>>; 2],
}

/// The refusal of a batch that could never run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unsatisfiable {
    pub(super) wait: Point,
    pub(super) reason: &'static str,
}

impl<T> Lanes<T> {
    /// Creates lanes for these roles, all at value 0.
    pub(super) fn new(served: &[Role]) -> Lanes<T> {
        Lanes {
            served: Role::ALL.map(|role| served.contains(&role)),
            reserved: [0; 2],
            submitted: [0; 2],
            held: [VecDeque::new(), VecDeque::new()],
        }
    }

    /// The last timeline value reserved in a lane.
    pub(super) fn reserved(&self, role: Role) -> u64 {
        self.reserved[role.index()]
    }

    /// The number of batches that are held back.
    pub(super) fn deferred(&self) -> usize {
        self.held.iter().map(VecDeque::len).sum()
    }

    /// Adds a batch that signals the next `signals` values of its lane. Returns the batches to submit now, in this
    /// order: none, this batch, or this batch and others that waited for it. On refusal nothing has changed.
    pub(super) fn enqueue(
        &mut self,
        role: Role,
        signals: u64,
        waits: &[Point],
        item: T,
    ) -> Result<Vec<(Role, T)>, Unsatisfiable> {
        let lane = role.index();
        if let Some(&wait) = waits.iter().find(|w| w.role == role && w.value > self.reserved[lane]) {
            return Err(Unsatisfiable { wait, reason: "it would wait for itself or for what comes after it" });
        }
        let last = self.reserved[lane] + signals;
        self.held[lane].push_back(DeferredBatch { last, waits: waits.to_vec(), item });
        self.reserved[lane] = last;
        let mut ready = Vec::new();
        while let Some(role) = Role::ALL.into_iter().find(|role| self.can_go(*role)) {
            if let Some(batch) = self.held[role.index()].pop_front() {
                self.submitted[role.index()] = batch.last;
                ready.push((role, batch.item));
            }
        }
        // Nothing that was just submitted can be part of a cycle, so `ready` is empty if the batch is refused.
        if let Some(wait) = self.find_deadlock() {
            self.held[lane].pop_back();
            self.reserved[lane] -= signals;
            return Err(Unsatisfiable { wait, reason: "what it waits for waits for it" });
        }
        Ok(ready)
    }

    fn can_go(&self, role: Role) -> bool {
        self.held[role.index()].front().is_some_and(|batch| self.blocking(batch).next().is_none())
    }

    /// Returns the waits of a batch for signals of this queue that have not been submitted.
    fn blocking<'a>(&'a self, batch: &'a DeferredBatch<T>) -> impl Iterator<Item = Point> + 'a {
        let open = |w: &Point| self.served[w.role.index()] && w.value > self.submitted[w.role.index()];
        batch.waits.iter().copied().filter(open)
    }

    /// Detects a deadlock: both lane heads wait for values that the other lane has already reserved, so neither can
    /// ever be submitted. Returns such a wait of the second lane's head.
    fn find_deadlock(&self) -> Option<Point> {
        let stuck = |lane: usize| {
            let given = |w: &Point| w.value <= self.reserved[w.role.index()];
            self.held[lane].front().and_then(|batch| self.blocking(batch).find(given))
        };
        stuck(0).and(stuck(1))
    }
}

#[cfg(test)]
#[path = "submit_order_tests.rs"]
mod tests;

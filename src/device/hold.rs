//! Decides what may be submitted to one hardware queue, and when. Pure.
//!
//! A queue runs in order: a wait submitted ahead of its own signal on the same hardware queue
//! never ends. So a batch whose wait has not been submitted yet is held back, and everything
//! after it in its lane with it, until the signal has been submitted. A wait for a lane of
//! another hardware queue is the driver's affair and holds nothing back.

use crate::device::point::{Point, Role};
use std::collections::VecDeque;

struct Held<T> {
    last: u64,
    waits: Vec<Point>,
    item: T,
}

/// The lanes of one hardware queue: one a role that it serves.
pub(super) struct Lanes<T> {
    /// Whether the role's lane is on this queue.
    served: [bool; 2],
    /// The last value given out.
    reserved: [u64; 2],
    /// The last value whose signal was submitted.
    submitted: [u64; 2],
    held: [VecDeque<Held<T>>; 2],
}

/// Why a batch is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Never {
    pub(super) wait: Point,
    pub(super) reason: &'static str,
}

impl<T> Lanes<T> {
    /// Lanes for these roles, all at value 0.
    pub(super) fn new(served: &[Role]) -> Lanes<T> {
        Lanes {
            served: Role::ALL.map(|role| served.contains(&role)),
            reserved: [0; 2],
            submitted: [0; 2],
            held: [VecDeque::new(), VecDeque::new()],
        }
    }

    /// The last value given out in a lane.
    pub(super) fn reserved(&self, role: Role) -> u64 {
        self.reserved[role.index()]
    }

    /// How many batches are held back.
    pub(super) fn held(&self) -> usize {
        self.held.iter().map(VecDeque::len).sum()
    }

    /// Takes a batch that signals the next `signals` values of its lane. Gives back what must
    /// be submitted now, in this order: nothing, the batch, or the batch and others that
    /// waited for it. On refusal nothing has changed.
    pub(super) fn offer(
        &mut self,
        role: Role,
        signals: u64,
        waits: &[Point],
        item: T,
    ) -> Result<Vec<(Role, T)>, Never> {
        let lane = role.index();
        if let Some(&wait) = waits.iter().find(|w| w.role == role && w.value > self.reserved[lane]) {
            return Err(Never { wait, reason: "it would wait for itself or for what comes after it" });
        }
        let last = self.reserved[lane] + signals;
        self.held[lane].push_back(Held { last, waits: waits.to_vec(), item });
        self.reserved[lane] = last;
        let mut ready = Vec::new();
        while let Some(role) = Role::ALL.into_iter().find(|role| self.can_go(*role)) {
            if let Some(batch) = self.held[role.index()].pop_front() {
                self.submitted[role.index()] = batch.last;
                ready.push((role, batch.item));
            }
        }
        // Whatever was submitted just now cannot be part of a circle, so a refusal leaves it empty.
        if let Some(wait) = self.circle() {
            self.held[lane].pop_back();
            self.reserved[lane] -= signals;
            return Err(Never { wait, reason: "what it waits for waits for it" });
        }
        Ok(ready)
    }

    fn can_go(&self, role: Role) -> bool {
        self.held[role.index()].front().is_some_and(|batch| self.blocking(batch).next().is_none())
    }

    /// The waits of a batch whose signal on this queue has not been submitted.
    fn blocking<'a>(&'a self, batch: &'a Held<T>) -> impl Iterator<Item = Point> + 'a {
        let open = |w: &Point| self.served[w.role.index()] && w.value > self.submitted[w.role.index()];
        batch.waits.iter().copied().filter(open)
    }

    /// A wait of the first lane's head, if both heads wait for values that the other lane has
    /// given out already: both are held, so neither can ever go.
    fn circle(&self) -> Option<Point> {
        let stuck = |lane: usize| {
            let given = |w: &Point| w.value <= self.reserved[w.role.index()];
            self.held[lane].front().and_then(|batch| self.blocking(batch).find(given))
        };
        stuck(0).and(stuck(1))
    }
}

#[cfg(test)]
#[path = "hold_tests.rs"]
mod tests;

//! Constraints that were asked for lately, compiled and at their beginning, so that who asks for the same again does not
//! wait for it once more. Deliberately absent: what compiling is, and constraints that failed at it.

use super::Constraint;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Constraints that are kept: a service asks with some dozens of schemas, mostly.
const MOST_KEPT: usize = 64;
/// Bytes that all of them may take, by estimate; one that takes more by itself is not kept.
const MOST_KEPT_BYTES: usize = 64 << 20;

/// How often constraints were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// They were compiled, or failed at it.
    pub compiled: u64,
    /// They were there.
    pub kept: u64,
}

/// The constraints, the lately used last, and of each what there is at its beginning.
pub(super) struct Kept<T> {
    entries: Mutex<VecDeque<Entry<T>>>,
    compiled: AtomicU64,
    kept: AtomicU64,
}

impl<T> Default for Kept<T> {
    fn default() -> Kept<T> {
        Kept { entries: Mutex::default(), compiled: AtomicU64::new(0), kept: AtomicU64::new(0) }
    }
}

struct Entry<T> {
    constraint: Constraint,
    ignore_eos: bool,
    bytes: usize,
    started: Arc<T>,
}

impl<T> Entry<T> {
    fn is(&self, constraint: &Constraint, ignore_eos: bool) -> bool {
        self.ignore_eos == ignore_eos && self.constraint == *constraint
    }
}

impl<T> Kept<T> {
    /// The beginning, if the constraint is there.
    pub(super) fn find(&self, constraint: &Constraint, ignore_eos: bool) -> Option<Arc<T>> {
        let found = {
            let mut entries = self.entries();
            let at = entries.iter().position(|entry| entry.is(constraint, ignore_eos));
            at.and_then(|at| entries.remove(at)).map(|entry| {
                let started = Arc::clone(&entry.started);
                entries.push_back(entry);
                started
            })
        };
        let counter = if found.is_some() { &self.kept } else { &self.compiled };
        counter.fetch_add(1, Relaxed);
        found
    }

    /// Keeps a beginning that takes so many bytes; what was used least lately makes room for it.
    pub(super) fn keep(&self, constraint: &Constraint, ignore_eos: bool, bytes: usize, started: &Arc<T>) {
        if bytes > MOST_KEPT_BYTES {
            return;
        }
        let started = Arc::clone(started);
        let mut entries = self.entries();
        // Whoever else has compiled it meanwhile.
        entries.retain(|entry| !entry.is(constraint, ignore_eos));
        let mut used: usize = entries.iter().map(|entry| entry.bytes).sum();
        while entries.len() >= MOST_KEPT || used + bytes > MOST_KEPT_BYTES {
            used -= entries.pop_front().map_or(0, |entry| entry.bytes);
        }
        entries.push_back(Entry { constraint: constraint.clone(), ignore_eos, bytes, started });
    }

    /// Since it was made.
    pub(super) fn uses(&self) -> Uses {
        Uses { compiled: self.compiled.load(Relaxed), kept: self.kept.load(Relaxed) }
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<Entry<T>>> {
        // Each change of it is whole when a panic could happen.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

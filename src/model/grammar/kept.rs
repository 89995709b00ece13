//! A cache of recently used constraints, compiled and at their start, so that repeated requests do not compile them
//! again.
//!
//! Not here: compilation, and constraints that failed to compile.

use super::Constraint;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The maximum number of cached constraints. Most services use a few dozen schemas.
const MOST_KEPT: usize = 64;
/// The maximum estimated size in bytes of all cached constraints. One that is larger than this by itself is not cached.
const MOST_KEPT_BYTES: usize = 64 << 20;

/// How often constraints were requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Requests that had to compile the constraint, including those that failed to.
    pub compiled: u64,
    /// Requests that found the constraint in the cache.
    pub kept: u64,
}

/// The cache: constraints in order of use, the most recently used last, each with a value for its start.
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
    /// Returns the cached value of a constraint, if there is one, and counts the use.
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

    /// Caches a value of an estimated `bytes` bytes. The least recently used entries are evicted to make room.
    pub(super) fn keep(&self, constraint: &Constraint, ignore_eos: bool, bytes: usize, started: &Arc<T>) {
        if bytes > MOST_KEPT_BYTES {
            return;
        }
        let started = Arc::clone(started);
        let mut entries = self.entries();
        // Another thread may have compiled the same constraint in the meantime.
        entries.retain(|entry| !entry.is(constraint, ignore_eos));
        let mut used: usize = entries.iter().map(|entry| entry.bytes).sum();
        while entries.len() >= MOST_KEPT || used + bytes > MOST_KEPT_BYTES {
            used -= entries.pop_front().map_or(0, |entry| entry.bytes);
        }
        entries.push_back(Entry { constraint: constraint.clone(), ignore_eos, bytes, started });
    }

    /// Returns the counts since the cache was created.
    pub(super) fn uses(&self) -> Uses {
        Uses { compiled: self.compiled.load(Relaxed), kept: self.kept.load(Relaxed) }
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<Entry<T>>> {
        // No panic can leave the entries half changed, so a poisoned lock is still usable.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

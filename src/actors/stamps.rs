//! Timestamps between the regions of submissions: a ring of queries, each with a command buffer that writes it, recorded
//! once. Deliberately absent: which clock they are told on (`gpu_clock`), kernels' own stamps (a region has those).

use crate::device::{Commands, Device, DeviceError, Queries, Role};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Stamps that can be pending at once: several submissions of a stamp for each of sixteen steps. Submissions that find
/// fewer free are told with less detail.
const STAMPS: u64 = 256;

/// The ring. Taken from by the compute actor, given back to by the watcher, in the order of submission.
pub(super) struct Stamps {
    queries: Queries,
    commands: Vec<Commands>,
    taken: u64,
    free_from: Arc<AtomicU64>,
}

/// Consecutive stamps of one submission.
pub(super) struct Taken {
    queries: Queries,
    first: u64,
    count: u64,
    free_from: Arc<AtomicU64>,
}

impl Stamps {
    /// `None` where the compute queue has no timestamps.
    pub(super) fn new(device: &Device) -> Result<Option<Stamps>, DeviceError> {
        let queries = match Queries::new(device, STAMPS as u32) {
            Ok(queries) => queries,
            Err(DeviceError::Unsupported { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let one = |index| Commands::record(device, Role::Compute, |encoder| encoder.timestamp(&queries, index));
        let commands = (0..STAMPS as u32).map(one).collect::<Result<_, _>>()?;
        Ok(Some(Stamps { queries, commands, taken: 0, free_from: Arc::default() }))
    }

    /// Stamps that are free.
    pub(super) fn free(&self) -> u64 {
        STAMPS - (self.taken - self.free_from.load(Ordering::Acquire))
    }

    /// The next `count` stamps, which must be free.
    pub(super) fn take(&mut self, count: u64) -> Taken {
        assert!(count <= self.free(), "{count} stamps of {} free ones", self.free());
        let first = self.taken;
        self.taken += count;
        Taken { queries: self.queries.clone(), first, count, free_from: Arc::clone(&self.free_from) }
    }

    /// What writes the `index`th of them.
    pub(super) fn commands(&self, taken: &Taken, index: u64) -> Commands {
        assert!(index < taken.count);
        self.commands[((taken.first + index) % STAMPS) as usize].clone()
    }
}

impl Taken {
    /// Nanoseconds of each, of a submission that has finished; `None` where one was not written.
    pub(super) fn read(&self) -> Option<Vec<u64>> {
        let mut times = Vec::with_capacity(self.count as usize);
        for (first, count) in self.parts() {
            for time in self.queries.read(first, count).ok()? {
                times.push(time?);
            }
        }
        Some(times)
    }

    /// The ring has an end.
    fn parts(&self) -> impl Iterator<Item = (u32, u32)> {
        let first = self.first % STAMPS;
        let before_end = self.count.min(STAMPS - first);
        let parts = [(first as u32, before_end as u32), (0, (self.count - before_end) as u32)];
        parts.into_iter().filter(|(_, count)| *count > 0)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // Whoever held it has seen the submission's end, or the submission never was.
        for (first, count) in self.parts() {
            self.queries.reset_range(first, count);
        }
        // In order: the watcher follows one submission after the other.
        self.free_from.fetch_add(self.count, Ordering::AcqRel);
    }
}

//! Timestamps between the regions of submissions: a ring of queries, each with a command buffer that writes it and is
//! recorded once. Not here: the conversion to the host's clock (`gpu_clock`), and timestamps between kernels, which
//! belong to a region.

use crate::device::{Commands, Device, DeviceError, Queries, Role};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of the ring: enough for several pending submissions with one timestamp per step of sixteen steps. A
/// submission that finds too few free timestamps is timed as a whole, or not timed.
const STAMPS: u64 = 256;

/// The ring of timestamps. The compute actor takes from it, the watcher returns to it, both in submission order.
pub(super) struct Stamps {
    queries: Queries,
    commands: Vec<Commands>,
    taken: u64,
    free_from: Arc<AtomicU64>,
}

/// Consecutive timestamps that one submission uses. Dropping it resets and frees them.
pub(super) struct Taken {
    queries: Queries,
    first: u64,
    count: u64,
    free_from: Arc<AtomicU64>,
}

impl Stamps {
    /// Creates the ring; `None` if the compute queue has no timestamps.
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

    /// The number of free timestamps.
    pub(super) fn free(&self) -> u64 {
        STAMPS - (self.taken - self.free_from.load(Ordering::Acquire))
    }

    /// Takes the next `count` timestamps.
    ///
    /// # Panics
    /// If fewer are free.
    pub(super) fn take(&mut self, count: u64) -> Taken {
        assert!(count <= self.free(), "{count} stamps of {} free ones", self.free());
        let first = self.taken;
        self.taken += count;
        Taken { queries: self.queries.clone(), first, count, free_from: Arc::clone(&self.free_from) }
    }

    /// The command buffer that writes the `index`th of the taken timestamps.
    pub(super) fn commands(&self, taken: &Taken, index: u64) -> Commands {
        assert!(index < taken.count);
        self.commands[((taken.first + index) % STAMPS) as usize].clone()
    }
}

impl Taken {
    /// The times of a finished submission's timestamps in nanoseconds of the device's clock; `None` if one was not
    /// written.
    pub(super) fn read(&self) -> Option<Vec<u64>> {
        let mut times = Vec::with_capacity(self.count as usize);
        for (first, count) in self.parts() {
            for time in self.queries.read(first, count).ok()? {
                times.push(time?);
            }
        }
        Some(times)
    }

    /// The query ranges `(first, count)`: two where the timestamps wrap around the end of the ring.
    fn parts(&self) -> impl Iterator<Item = (u32, u32)> {
        let first = self.first % STAMPS;
        let before_end = self.count.min(STAMPS - first);
        let parts = [(first as u32, before_end as u32), (0, (self.count - before_end) as u32)];
        parts.into_iter().filter(|(_, count)| *count > 0)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // The submission has ended or was never made, so the device no longer writes these queries.
        for (first, count) in self.parts() {
            self.queries.reset_range(first, count);
        }
        // The watcher drops these in submission order, so a counter is enough.
        self.free_from.fetch_add(self.count, Ordering::AcqRel);
    }
}

//! The staging ring: a few slots of mapped memory through which weights travel to the device,
//! each used again when the device has finished with it. Made once, never grows.
//! Deliberately absent: the copies (the transfer actor's).

use super::MemoryError;
use super::arena::{Arena, Buffer, HostSlice};
use super::place::Place;
use crate::device::{Device, DeviceError, Point};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long [`StagingRing::acquire`] waits for a GPU: for a slot, and then while its queue does not move. The slowest link
/// moves a ring's bytes in far less; past it the device or the one who holds a slot is stuck.
const ACQUIRE_WAIT: Duration = Duration::from_secs(60);

/// The ring. Clones share it; any thread may acquire.
#[derive(Clone, Debug)]
pub struct StagingRing {
    device: Arc<Device>,
    free: Receiver<Free>,
    give_back: Sender<Free>,
    slots: usize,
    slot_bytes: usize,
}

/// A slot that nobody holds, and the last copy out of it.
#[derive(Debug)]
struct Free {
    slice: HostSlice,
    last_copy: Option<Point>,
}

/// A slot that somebody holds; goes back to the ring when dropped.
#[derive(Debug)]
pub struct Slot {
    /// `Some` until dropped.
    held: Option<Free>,
    give_back: Sender<Free>,
}

impl StagingRing {
    /// A ring of `slots × slot_bytes`, both at least 1.
    pub fn new(arena: &Arena, slots: usize, slot_bytes: usize) -> Result<StagingRing, MemoryError> {
        let (_, slices) = arena.sliced("staging", slot_bytes, slots, Place::Upload { bar: false })?;
        // As many places as slots: giving one back never waits.
        let (give_back, free) = bounded(slots);
        for slice in slices {
            give_back
                .send(Free { slice, last_copy: None })
                .expect("the receiver is in scope and there is a place for each slot");
        }
        Ok(StagingRing { device: arena.device().clone(), free, give_back, slots, slot_bytes })
    }

    /// The device that it leads to.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// A slot that the device has finished with: waits until one is given back, then for
    /// exactly the point of its last copy. On a CPU driver, which is as slow as its machine is busy, however long.
    pub fn acquire(&self) -> Result<Slot, MemoryError> {
        let timeout = || MemoryError::StagingTimeout { seconds: ACQUIRE_WAIT.as_secs() };
        let held = "the ring holds a sender itself";
        let free = match self.device.adapter().is_cpu() {
            true => self.free.recv().expect(held),
            false => self.free.recv_timeout(ACQUIRE_WAIT).map_err(|_| timeout())?,
        };
        self.finished(free, |point| self.device.wait_while_moving(point, ACQUIRE_WAIT))?.ok_or_else(timeout)
    }

    /// As [`StagingRing::acquire`], with a limit on the whole wait.
    pub fn acquire_within(&self, limit: Duration) -> Result<Slot, MemoryError> {
        let deadline = Instant::now() + limit;
        let timeout = || MemoryError::StagingTimeout { seconds: limit.as_secs() };
        let free = self.free.recv_timeout(limit).map_err(|_| timeout())?;
        let left = |point| self.device.wait(point, deadline.saturating_duration_since(Instant::now()));
        self.finished(free, left)?.ok_or_else(timeout)
    }

    /// The slot once its last copy was reached; `None`, and it is given back, where `wait` gives up.
    fn finished(
        &self,
        free: Free,
        wait: impl FnOnce(Point) -> Result<bool, DeviceError>,
    ) -> Result<Option<Slot>, MemoryError> {
        let point = free.last_copy;
        // From here on an early return gives the slot back.
        let mut slot = Slot { held: Some(free), give_back: self.give_back.clone() };
        if let Some(point) = point {
            if !wait(point)? {
                return Ok(None);
            }
            slot.free().last_copy = None;
        }
        Ok(Some(slot))
    }
}

impl Slot {
    fn free(&mut self) -> &mut Free {
        self.held.as_mut().expect("held until drop")
    }

    fn slice(&self) -> &HostSlice {
        &self.held.as_ref().expect("held until drop").slice
    }

    /// The slot's memory, to fill. What it holds before is left over from an earlier use.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let free = self.free();
        assert!(free.last_copy.is_none(), "a slot is filled before it is copied");
        free.slice.bytes_mut()
    }

    /// Copies bytes to `offset` in the slot, past the host's caches: see [`HostSlice::stream`].
    ///
    /// # Panics
    /// If they do not fit in the slot: a bug of the caller.
    pub fn stream(&mut self, offset: usize, from: &[u8]) {
        let free = self.free();
        assert!(free.last_copy.is_none(), "a slot is filled before it is copied");
        free.slice.stream(offset, from);
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a slot has bytes")]
    pub fn len(&self) -> usize {
        self.slice().len()
    }

    /// The buffer that copies read.
    pub fn buffer(&self) -> &Arc<Buffer> {
        self.slice().buffer()
    }

    /// Where the slot starts in that buffer.
    pub fn offset(&self) -> u64 {
        self.slice().offset()
    }

    /// Says that the submission with this point copies out of the slot: it is used again only
    /// afterwards. The slot may be dropped at once.
    pub fn busy_until(&mut self, point: Point) {
        self.slice().buffer().mark_read(point);
        self.free().last_copy = Some(point);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(free) = self.held.take() {
            // Fails only when the ring is gone, and then the memory goes too.
            let _ = self.give_back.try_send(free);
        }
    }
}

//! The staging ring: a few slots of mapped memory through which weights are copied to the device. A slot is reused when
//! the device has finished with it. The ring is created once and never grows.
//! Not here: the copies (the transfer actor makes them).

use super::MemoryError;
use super::arena::{Arena, Buffer, HostSlice};
use super::place::Place;
use crate::device::{Device, DeviceError, Point};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long [`StagingRing::acquire`] waits on a GPU: first for a free slot, then while the queue makes no progress.
/// Even the slowest link moves a ring's bytes in far less time; after that, the device or the owner of a slot is stuck.
const ACQUIRE_WAIT: Duration = Duration::from_secs(60);

/// The staging ring. Clones share it; any thread may acquire a slot.
#[derive(Clone, Debug)]
pub struct StagingRing {
    device: Arc<Device>,
    free: Receiver<Free>,
    give_back: Sender<Free>,
    slots: usize,
    slot_bytes: usize,
}

/// A slot without an owner, and the point of the last copy out of it.
#[derive(Debug)]
struct Free {
    slice: HostSlice,
    last_copy: Option<Point>,
}

/// A slot with an owner. It returns to the ring when it is dropped.
#[derive(Debug)]
pub struct StagingSlot {
    /// `Some` until the slot is dropped.
    held: Option<Free>,
    give_back: Sender<Free>,
}

impl StagingRing {
    /// Creates a ring of `slots` slots of `slot_bytes` bytes; both must be at least 1.
    pub fn new(arena: &Arena, slots: usize, slot_bytes: usize) -> Result<StagingRing, MemoryError> {
        let (_, slices) = arena.sliced("staging", slot_bytes, slots, Place::Upload { bar: false })?;
        // The channel has a place for every slot, so that returning a slot never blocks.
        let (give_back, free) = bounded(slots);
        for slice in slices {
            give_back
                .send(Free { slice, last_copy: None })
                .expect("the receiver is in scope and there is a place for each slot");
        }
        Ok(StagingRing { device: arena.device().clone(), free, give_back, slots, slot_bytes })
    }

    /// The device to which the ring leads.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The size of a slot in bytes.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Returns a slot that the device has finished with. Waits until a slot is returned to the ring, then until the
    /// point of the slot's last copy is reached. On a CPU driver, whose speed depends on the load of the machine, the
    /// wait is unlimited.
    ///
    /// # Errors
    /// `StagingTimeout` if no slot became free, or if the queue made no progress, for `ACQUIRE_WAIT`.
    pub fn acquire(&self) -> Result<StagingSlot, MemoryError> {
        let timeout = || MemoryError::StagingTimeout { seconds: ACQUIRE_WAIT.as_secs() };
        let held = "the ring holds a sender itself";
        let free = match self.device.adapter().is_cpu() {
            true => self.free.recv().expect(held),
            false => self.free.recv_timeout(ACQUIRE_WAIT).map_err(|_| timeout())?,
        };
        self.finished(free, |point| self.device.wait_while_moving(point, ACQUIRE_WAIT))?.ok_or_else(timeout)
    }

    /// Acquires a slot as [`StagingRing::acquire`] does, with a limit on the total wait.
    pub fn acquire_within(&self, limit: Duration) -> Result<StagingSlot, MemoryError> {
        let deadline = Instant::now() + limit;
        let timeout = || MemoryError::StagingTimeout { seconds: limit.as_secs() };
        let free = self.free.recv_timeout(limit).map_err(|_| timeout())?;
        let left = |point| self.device.wait(point, deadline.saturating_duration_since(Instant::now()));
        self.finished(free, left)?.ok_or_else(timeout)
    }

    /// Returns the slot once the point of its last copy is reached. If `wait` gives up, returns `None` and puts the
    /// slot back into the ring.
    fn finished(
        &self,
        free: Free,
        wait: impl FnOnce(Point) -> Result<bool, DeviceError>,
    ) -> Result<Option<StagingSlot>, MemoryError> {
        let point = free.last_copy;
        // From here on an early return drops the slot and thereby puts it back into the ring.
        let mut slot = StagingSlot { held: Some(free), give_back: self.give_back.clone() };
        if let Some(point) = point {
            if !wait(point)? {
                return Ok(None);
            }
            slot.free().last_copy = None;
        }
        Ok(Some(slot))
    }
}

impl StagingSlot {
    fn free(&mut self) -> &mut Free {
        self.held.as_mut().expect("held until drop")
    }

    fn slice(&self) -> &HostSlice {
        &self.held.as_ref().expect("held until drop").slice
    }

    /// The slot's memory, to be filled. Its previous content is left over from an earlier use.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let free = self.free();
        assert!(free.last_copy.is_none(), "a slot is filled before it is copied");
        free.slice.bytes_mut()
    }

    /// Copies bytes to `offset` in the slot, bypassing the host's caches; see [`HostSlice::stream`].
    ///
    /// # Panics
    /// If the bytes do not fit in the slot: a bug of the caller.
    pub fn stream(&mut self, offset: usize, from: &[u8]) {
        let free = self.free();
        assert!(free.last_copy.is_none(), "a slot is filled before it is copied");
        free.slice.stream(offset, from);
    }

    /// The slot's length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a slot has bytes")]
    pub fn len(&self) -> usize {
        self.slice().len()
    }

    /// The buffer from which copies read.
    pub fn buffer(&self) -> &Arc<Buffer> {
        self.slice().buffer()
    }

    /// The slot's offset in that buffer, in bytes.
    pub fn offset(&self) -> u64 {
        self.slice().offset()
    }

    /// Records that the submission with this point copies from the slot. The slot is reused only after that point is
    /// reached; it may be dropped at once.
    pub fn busy_until(&mut self, point: Point) {
        self.slice().buffer().mark_read(point);
        self.free().last_copy = Some(point);
    }
}

impl Drop for StagingSlot {
    fn drop(&mut self) {
        if let Some(free) = self.held.take() {
            // Fails only if the ring is gone; the memory is then freed with the slot.
            let _ = self.give_back.try_send(free);
        }
    }
}

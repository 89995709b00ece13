//! Submission of one role's batches to its hardware queue and timeline. Keeps what was submitted alive until it has
//! finished. Not here: the order in which batches may be submitted (`submit_order`), and waiting (`handle`).

use crate::device::commands::Commands;
use crate::device::error::DeviceError;
use crate::device::gate::Gate;
use crate::device::logical::Logical;
use crate::device::point::{Point, Role};
use crate::device::submit_order::Lanes;
use ash::vk;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A unit of a batch: its commands run in order, then the next timeline value is signalled. Entries are ordered with
/// each other only as consecutive commands are: an entry that reads what an earlier entry wrote must begin with a
/// barrier.
#[derive(Clone, Debug, Default)]
pub struct QueueEntry {
    /// The command buffers; may be empty, then the entry only signals.
    pub commands: Vec<Commands>,
    /// A gate and a value: this entry and all later submissions wait until the host has opened the gate up to the
    /// value. On a hardware queue that both roles share, the other role waits too.
    pub gate: Option<(Arc<Gate>, u64)>,
}

/// The entries that one call submits to a queue.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// At least one entry.
    pub entries: Vec<QueueEntry>,
    /// The points that must be reached before the first entry begins, and thereby before all later entries.
    pub waits: Vec<Point>,
}

impl Batch {
    /// Creates a batch with one entry.
    pub fn one(commands: Commands, waits: Vec<Point>) -> Batch {
        Batch { entries: vec![QueueEntry { commands: vec![commands], gate: None }], waits }
    }
}

/// The timeline semaphores of a device, shared by everything that waits for them or signals them.
pub(super) struct Timelines {
    pub(super) semaphores: [vk::Semaphore; 2],
    /// The last value reserved in each timeline; written under the hardware queue's lock.
    reserved: [AtomicU64; 2],
}

impl Timelines {
    pub(super) fn new(semaphores: [vk::Semaphore; 2]) -> Timelines {
        Timelines { semaphores, reserved: [AtomicU64::new(0), AtomicU64::new(0)] }
    }

    pub(super) fn reserved(&self, role: Role) -> u64 {
        self.reserved[role.index()].load(Ordering::Acquire)
    }
}

/// A hardware queue; two roles may share it.
pub(super) struct Hardware {
    raw: vk::Queue,
    state: Mutex<QueueState>,
}

pub(super) struct QueueState {
    lanes: Lanes<Submission>,
    /// Per role, the entries of unfinished submissions, each with the timeline value that ends it.
    in_flight: [VecDeque<(u64, Vec<QueueEntry>)>; 2],
}

struct Submission {
    first: u64,
    batch: Batch,
}

impl Hardware {
    pub(super) fn new(raw: vk::Queue, served: &[Role]) -> Hardware {
        let state = QueueState { lanes: Lanes::new(served), in_flight: [VecDeque::new(), VecDeque::new()] };
        Hardware { raw, state: Mutex::new(state) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, QueueState> {
        // A poisoned lock is usable: the only panics under it are failed assertions about a batch, before anything has
        // changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases everything, held back or in flight. Only to be called when the device is idle or lost.
    pub(super) fn clear(&self) {
        let mut state = self.lock();
        state.in_flight = [VecDeque::new(), VecDeque::new()];
        state.lanes = Lanes::new(&[]);
    }
}

/// The queue of one role.
pub struct Queue {
    role: Role,
    family: u32,
    hardware: Arc<Hardware>,
    timelines: Arc<Timelines>,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("role", &self.role)
            .field("family", &self.family)
            .field("last", &self.last().value)
            .finish()
    }
}

impl Queue {
    pub(super) fn new(role: Role, hardware: Arc<Hardware>, timelines: Arc<Timelines>, logical: Arc<Logical>) -> Queue {
        Queue { role, family: logical.slot(role).family, hardware, timelines, logical }
    }

    /// The role that the queue serves.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The queue family.
    pub fn family(&self) -> u32 {
        self.family
    }

    /// Whether the other role uses the same hardware queue.
    pub fn aliased(&self) -> bool {
        self.logical.aliased()
    }

    /// The last point that was returned; reached when everything submitted to this queue so far has finished.
    pub fn last(&self) -> Point {
        Point { role: self.role, value: self.timelines.reserved(self.role) }
    }

    /// Submits a batch with one `vkQueueSubmit2` and returns the point of its last entry; entry `i` of `n` signals that
    /// value minus `n - 1 - i`. Unsatisfiable waits for the GPU. If both roles share a hardware queue, a batch that waits for a
    /// point which has not been submitted yet is held on the host until it has been; the batch's point is valid at
    /// once.
    ///
    /// A wait for a point of another hardware queue never ends if that point is never submitted.
    ///
    /// # Errors
    /// `NeverRuns` for a wait that cannot be satisfied; `DeviceLost`. Any failure of the submission itself counts as a
    /// loss, because values that were already returned would never be signalled.
    ///
    /// # Panics
    /// If the batch has no entries, or commands of another device or queue family.
    pub fn submit(&self, batch: Batch) -> Result<Point, DeviceError> {
        let signals = batch.entries.len() as u64;
        assert!(signals > 0, "a batch needs an entry");
        for commands in batch.entries.iter().flat_map(|e| &e.commands) {
            commands.assert_for(&self.logical, self.family);
        }
        let mut state = self.hardware.lock();
        self.logical.alive()?;
        self.collect_locked(&mut state)?;
        let first = state.lanes.reserved(self.role) + 1;
        let waits = batch.waits.clone();
        let ready = state
            .lanes
            .enqueue(self.role, signals, &waits, Submission { first, batch })
            .map_err(|never| DeviceError::NeverRuns { role: self.role, wait: never.wait, reason: never.reason })?;
        let last = first + signals - 1;
        self.timelines.reserved[self.role.index()].store(last, Ordering::Release);
        for (role, submission) in ready {
            let value = submission.first + submission.batch.entries.len() as u64 - 1;
            let submitted = self.submit_now(role, &submission);
            // Kept even after a failed submission: it is unknown whether the work runs.
            state.in_flight[role.index()].push_back((value, submission.batch.entries));
            submitted?;
        }
        Ok(Point { role: self.role, value: last })
    }

    /// The number of batches held back on the host, of both roles if they share the hardware queue.
    pub fn deferred(&self) -> usize {
        self.hardware.lock().lanes.deferred()
    }

    /// Releases what finished submissions kept alive. Every call of [`Queue::submit`] does this too.
    pub fn collect(&self) -> Result<(), DeviceError> {
        self.collect_locked(&mut self.hardware.lock())
    }

    fn collect_locked(&self, state: &mut QueueState) -> Result<(), DeviceError> {
        for role in Role::ALL {
            let in_flight = &mut state.in_flight[role.index()];
            if in_flight.is_empty() {
                continue;
            }
            let semaphore = self.timelines.semaphores[role.index()];
            // SAFETY: the semaphore lives as long as the device's queues.
            let value = unsafe { self.logical.raw.get_semaphore_counter_value(semaphore) };
            let value = self.logical.check("vkGetSemaphoreCounterValue", value)?;
            while in_flight.front().is_some_and(|(last, _)| *last <= value) {
                in_flight.pop_front();
            }
        }
        Ok(())
    }

    /// Submits to the hardware queue; the caller holds its lock.
    fn submit_now(&self, role: Role, submission: &Submission) -> Result<(), DeviceError> {
        let Submission { first, batch } = submission;
        let on = |role: Role, value: u64| {
            vk::SemaphoreSubmitInfo::default()
                .semaphore(self.timelines.semaphores[role.index()])
                .value(value)
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
        };
        let closed = |(gate, value): &(Arc<Gate>, u64)| {
            let info = vk::SemaphoreSubmitInfo::default().semaphore(gate.raw()).value(*value);
            info.stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
        };
        let waits: Vec<Vec<_>> = batch
            .entries
            .iter()
            .enumerate()
            .map(|(i, entry)| {
                let points = if i == 0 { batch.waits.as_slice() } else { &[] };
                let points = points.iter().filter(|w| w.value > 0).map(|w| on(w.role, w.value));
                points.chain(entry.gate.iter().map(closed)).collect()
            })
            .collect();
        let signals: Vec<_> = (*first..).take(batch.entries.len()).map(|value| [on(role, value)]).collect();
        let commands: Vec<Vec<_>> = batch
            .entries
            .iter()
            .map(|entry| {
                let info = |c: &Commands| vk::CommandBufferSubmitInfo::default().command_buffer(c.raw());
                entry.commands.iter().map(info).collect()
            })
            .collect();
        let infos: Vec<_> = commands
            .iter()
            .zip(&signals)
            .zip(&waits)
            .map(|((commands, signal), waits)| {
                let info = vk::SubmitInfo2::default().command_buffer_infos(commands).signal_semaphore_infos(signal);
                info.wait_semaphore_infos(waits)
            })
            .collect();
        // SAFETY: the queue is used only under its lock. The command buffers are executable, of this queue family,
        // allow simultaneous use, and are kept in `in_flight` until their value is reached. The values of a timeline
        // are submitted in increasing order (see `Lanes`).
        let result = unsafe { self.logical.raw.queue_submit2(self.hardware.raw, &infos, vk::Fence::null()) };
        result.map_err(|source| self.logical.lose(&format!("vkQueueSubmit2 ({source})")))
    }
}

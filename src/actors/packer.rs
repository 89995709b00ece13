//! Packing of weights on the device, for one load: slots of device memory for rows as the file has them, and the calls on
//! the compute queue that pack them into their tensors. A slot is used again when its rows are packed.
//! Not here: reading files and copying rows into slots (the loader and the transfer actor), and the choice of weights.

use super::compute::{Compute, Gates, Submission};
use super::timeline::FlushReason;
use super::watcher::{Outbox, Report};
use crate::device::{Device, DeviceError, Point, Role};
use crate::kernels::pack_codes::{NO_FAULT, PackVariant, PackedRows};
use crate::kernels::recording::Recording;
use crate::kernels::region::{Pipelines, Region, RegionError};
use crate::memory::{Arena, Buffer, BufferTable, MemoryError, Place};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the device may make no progress while a slot is waited for, on a GPU.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval at which one who waits for a slot looks whether the load has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The bytes behind the last slot: a kernel reads whole words.
const BEHIND: u64 = 16;

/// Errors of packing on the device.
#[derive(Debug, thiserror::Error)]
pub enum PackerError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The commands could not be recorded.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A slot's memory is missing.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device made no progress.
    #[error("the device has packed nothing in {seconds} s")]
    Stuck {
        /// The time without progress, seconds.
        seconds: u64,
    },
    /// The load ended while a slot was waited for.
    #[error("the load has ended")]
    Ended,
}

/// The sizes of the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawSlots {
    /// The number of slots.
    pub count: usize,
    /// The bytes of each.
    pub bytes: u64,
}

impl RawSlots {
    /// Returns the bytes of device memory that all of them take.
    pub fn total_bytes(self) -> u64 {
        self.count as u64 * self.bytes + BEHIND
    }
}

/// Packs rows on a device.
pub struct DevicePacker {
    compute: Arc<Compute>,
    device: Arc<Device>,
    pipelines: Pipelines,
    variants: HashSet<PackVariant>,
    most_threads: u32,
    raw: Arc<Buffer>,
    /// The word of the first part with values that are not finite.
    faults: Arc<Buffer>,
    slots: RawSlots,
    free: Mutex<Vec<usize>>,
    /// The number of submissions whose report has not been taken.
    outstanding: AtomicUsize,
    outbox: Outbox,
    reports: Receiver<Report>,
}

impl fmt::Debug for DevicePacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePacker").field("variants", &self.variants).field("slots", &self.slots).finish()
    }
}

/// A slot with an owner. Unless it is submitted, it becomes free again when it is dropped.
#[derive(Debug)]
pub struct RawSlot<'a> {
    packer: &'a DevicePacker,
    /// `None` after its submission.
    index: Option<usize>,
}

/// Rows in a slot, and their destination.
#[derive(Debug)]
pub struct RawRows {
    /// How they are packed.
    pub variant: PackVariant,
    /// The rows.
    pub rows: PackedRows,
    /// The first byte in the slot, a multiple of 16, and the number of bytes.
    pub at: u64,
    /// The number of bytes in the slot.
    pub bytes: u64,
    /// The destination.
    pub target: Arc<Buffer>,
    /// The first byte in the destination, a multiple of 16.
    pub offset: u64,
    /// The number of bytes in the destination.
    pub packed_bytes: u64,
}

impl DevicePacker {
    /// Allocates the slots. `pipelines` has those of the variants for workgroups of up to `most_threads` invocations.
    pub fn new(
        arena: &Arena,
        compute: Arc<Compute>,
        pipelines: Pipelines,
        (variants, most_threads): (HashSet<PackVariant>, u32),
        slots: RawSlots,
    ) -> Result<DevicePacker, MemoryError> {
        let raw = arena.buffer("raw", slots.total_bytes(), Place::DeviceLocal)?;
        let faults = arena.buffer("raw.faults", 4, Place::Readback)?;
        faults.write(0, &NO_FAULT.to_le_bytes());
        // A slot has one submission at a time, so no report waits for room.
        let (reports, receiver) = bounded(slots.count);
        // Nobody waits for the wake-up channel.
        let (wake, _) = bounded(1);
        Ok(DevicePacker {
            compute,
            device: Arc::clone(arena.device()),
            pipelines,
            variants,
            most_threads,
            raw,
            faults,
            slots,
            free: Mutex::new((0..slots.count).collect()),
            outstanding: AtomicUsize::new(0),
            outbox: Outbox { reports, wake },
            reports: receiver,
        })
    }

    /// Whether it has a variant of the kernel.
    pub fn packs(&self, variant: PackVariant) -> bool {
        self.variants.contains(&variant)
    }

    /// The bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slots.bytes
    }

    /// The device memory of all slots.
    pub fn raw(&self) -> &Arc<Buffer> {
        &self.raw
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        // Every change of the list is a single operation.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a slot whose rows are packed. Waits for one until `ended` is true.
    ///
    /// # Errors
    /// If an earlier submission has failed, or the device makes no progress for 60 s.
    pub fn acquire(&self, ended: impl Fn() -> bool) -> Result<RawSlot<'_>, PackerError> {
        let mut patience = Patience::new(self);
        loop {
            if let Some(index) = self.free().pop() {
                return Ok(RawSlot { packer: self, index: Some(index) });
            }
            match self.reports.recv_timeout(LOOK_EVERY) {
                Ok(report) => return self.finished(report).map(|index| RawSlot { packer: self, index: Some(index) }),
                Err(RecvTimeoutError::Timeout) if ended() => return Err(PackerError::Ended),
                Err(RecvTimeoutError::Timeout) => patience.look()?,
                Err(RecvTimeoutError::Disconnected) => unreachable!("the outbox is in the same struct"),
            }
        }
    }

    /// Returns the slot of a submission that has ended.
    fn finished(&self, report: Report) -> Result<usize, PackerError> {
        self.outstanding.fetch_sub(1, Ordering::AcqRel);
        report.result?;
        Ok(report.id as usize)
    }

    /// Packs rows of a slot as soon as `copied` is reached.
    pub fn submit(&self, mut slot: RawSlot<'_>, rows: Vec<RawRows>, copied: Point) -> Result<(), PackerError> {
        let index = slot.index.expect("a slot is submitted once");
        let mut recording = Recording::new("pack_weights");
        let mut table = BufferTable::new();
        let raw = recording.buffer("raw", self.raw.bytes()).part(slot.offset(), self.slots.bytes + BEHIND);
        let faults = recording.buffer("raw.faults", 4);
        table.add(Arc::clone(&self.raw))?;
        table.add(Arc::clone(&self.faults))?;
        let mut targets: Vec<Arc<Buffer>> = Vec::new();
        for RawRows { variant, rows, at, bytes, target, offset, packed_bytes } in rows {
            let known = targets.iter().position(|known| Arc::ptr_eq(known, &target));
            let number = known.unwrap_or(targets.len());
            let name = format!("target.{number}");
            let to = recording.buffer(&name, target.bytes()).part(offset, packed_bytes);
            if known.is_none() {
                table.alias(name.clone(), Arc::clone(&target))?;
                targets.push(target);
            }
            recording.call(variant.call(name, rows, raw.part(at, bytes + BEHIND), to, faults, self.most_threads));
        }
        let region = Arc::new(Region::build(&self.device, &recording, &table, &self.pipelines)?);
        self.outstanding.fetch_add(1, Ordering::AcqRel);
        slot.index = None;
        self.compute.submit(Submission {
            id: index as u64,
            ahead: None,
            entries: vec![vec![region]],
            waits: vec![copied],
            gates: Gates::new(),
            waits_within: false,
            flush: FlushReason::CrossQueue,
            report_after: Vec::new(),
            outbox: self.outbox.clone(),
            then: None,
        });
        Ok(())
    }

    /// Waits until everything that was submitted has ended. Returns the first error.
    pub fn settle(&self) -> Result<(), PackerError> {
        let (mut patience, mut result) = (Patience::new(self), Ok(()));
        while self.outstanding.load(Ordering::Acquire) > 0 {
            match self.reports.recv_timeout(LOOK_EVERY) {
                Ok(report) => match self.finished(report) {
                    Ok(index) => self.free().push(index),
                    Err(error) => result = result.and(Err(error)),
                },
                // Every submission to a lost device gets its report, and what is stuck is left alone.
                Err(_) if self.device.is_lost() => {}
                Err(_) => patience.look()?,
            }
        }
        result
    }

    /// Returns the smallest part that has a scale or minimum that is not finite, among the parts that are packed.
    pub fn fault(&self) -> Option<u32> {
        let mut word = [0; 4];
        self.faults.read(0, &mut word);
        Some(u32::from_le_bytes(word)).filter(|part| *part != NO_FAULT)
    }
}

impl RawSlot<'_> {
    /// The slot's offset in [`DevicePacker::raw`].
    pub fn offset(&self) -> u64 {
        self.index.expect("it is not submitted") as u64 * self.packer.slots.bytes
    }
}

impl Drop for RawSlot<'_> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            self.packer.free().push(index);
        }
    }
}

/// Notes whether a device makes progress.
struct Patience<'a> {
    device: &'a Device,
    seen: Option<[u64; 2]>,
    since: Instant,
}

impl<'a> Patience<'a> {
    fn new(packer: &'a DevicePacker) -> Patience<'a> {
        Patience { device: &packer.device, seen: None, since: Instant::now() }
    }

    /// Returns an error if the device is lost, or is a GPU that has finished nothing for [`PATIENCE`].
    fn look(&mut self) -> Result<(), PackerError> {
        let now = Some([self.device.progress(Role::Compute)?, self.device.progress(Role::Transfer)?]);
        if now != self.seen || self.device.adapter().is_cpu() {
            (self.seen, self.since) = (now, Instant::now());
        }
        match self.since.elapsed() < PATIENCE {
            true => Ok(()),
            false => Err(PackerError::Stuck { seconds: PATIENCE.as_secs() }),
        }
    }
}

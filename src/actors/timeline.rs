//! What happened when, as plain data: submissions to the compute queue and to the transfer queue, on the host's clock.
//! Deliberately absent: who asked for them (`engine`), reading clocks.

use crate::device::Point;
use crate::telemetry::clock::Moment;
use std::sync::Arc;
use std::time::Duration;

/// How a device's times were brought to the host's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockQuality {
    /// The driver reads both clocks together; times are off by at most so much.
    Calibrated {
        /// As said.
        error: Duration,
    },
    /// No such driver: the device's times are placed between submission and completion; off by at most so much.
    Estimated {
        /// As said.
        error: Duration,
    },
}

impl ClockQuality {
    /// `calibrated` or `estimated`.
    pub fn name(self) -> &'static str {
        match self {
            ClockQuality::Calibrated { .. } => "calibrated",
            ClockQuality::Estimated { .. } => "estimated",
        }
    }

    /// How far off times may be.
    pub fn error(self) -> Duration {
        match self {
            ClockQuality::Calibrated { error } | ClockQuality::Estimated { error } => error,
        }
    }
}

/// Why a submission ended where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushReason {
    /// Load, prefill and decode follow each other.
    PhaseBoundary,
    /// The host needs what was drawn.
    Readback,
    /// A point of another queue must come first.
    CrossQueue,
}

impl FlushReason {
    /// `phase_boundary`, `readback` or `cross_queue`.
    pub fn name(self) -> &'static str {
        match self {
            FlushReason::PhaseBoundary => "phase_boundary",
            FlushReason::Readback => "readback",
            FlushReason::CrossQueue => "cross_queue",
        }
    }
}

/// One region's run on the device, or several runs of the same region one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct RegionSpan {
    /// The recording's name, `decode.8` for example.
    pub name: Arc<str>,
    /// How often it ran in this time.
    pub runs: u32,
    /// When what came before it had ended.
    pub begin: Moment,
    /// When all of it had ended.
    pub end: Moment,
    /// Its kernels, of a profiled submission; else empty.
    pub kernels: Vec<KernelSpan>,
}

/// One kernel's time in a region's run.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSpan {
    /// The call's label, `layers.3.qkv` for example.
    pub label: Arc<str>,
    /// The shader.
    pub kernel: &'static str,
    /// When what came before it had ended.
    pub begin: Moment,
    /// When it had ended.
    pub end: Moment,
}

/// One submission to the compute queue.
#[derive(Clone, Debug)]
pub struct SubmissionRecord {
    /// When the compute actor took it, and when the driver had it.
    pub enqueue: (Moment, Moment),
    /// The last point that it reaches.
    pub point: Point,
    /// Points of other queues that it waited for.
    pub waits: Vec<Point>,
    /// Why it ended where it did.
    pub flush: FlushReason,
    /// When the watcher saw its end.
    pub seen: Moment,
    /// Blocking waits of the watcher for it.
    pub host_waits: u32,
    /// What ran, in order; empty where nothing was timed.
    pub regions: Vec<RegionSpan>,
    /// How its device times were found; `None`: there are none.
    pub clock: Option<ClockQuality>,
    /// Dispatches in it.
    pub dispatches: u32,
    /// Barriers in it.
    pub barriers: u32,
}

impl SubmissionRecord {
    /// From the first region's begin to the last one's end, on the device.
    pub fn device_span(&self) -> Option<(Moment, Moment)> {
        Some((self.regions.first()?.begin, self.regions.last()?.end))
    }
}

/// One submission to the transfer queue.
#[derive(Clone, Debug)]
pub struct TransferRecord {
    /// Grows by one.
    pub number: u64,
    /// What it is: `copy` (fills among them) or `readback`.
    pub what: &'static str,
    /// Bytes that it copies or fills.
    pub bytes: u64,
    /// Copy and fill commands.
    pub copies: u32,
    /// When the actor took it, and when the driver had it.
    pub enqueue: (Moment, Moment),
    /// Begin and end on the device, where its queue has timestamps.
    pub device: Option<(Moment, Moment)>,
    /// How these were found.
    pub clock: Option<ClockQuality>,
    /// When the actor saw its end: not sooner than it was reached, and up to a look later.
    pub seen: Moment,
    /// The point that it reaches.
    pub point: Point,
    /// Points of other queues that it waited for.
    pub waits: Vec<Point>,
}

//! Records of submissions to the compute queue and the transfer queue, as plain data with times on the host's clock.
//! Not here: which requests they were for (`engine`), reading clocks.

pub use crate::device::{Point, Role};
use crate::telemetry::clock::Moment;
use std::sync::Arc;
use std::time::Duration;

/// How device times were converted to the host's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockQuality {
    /// The driver reads both clocks together.
    Calibrated {
        /// The maximum error of the times.
        error: Duration,
    },
    /// The driver cannot read both clocks together. Device times are placed between submission and completion.
    Estimated {
        /// The maximum error of the times.
        error: Duration,
    },
}

impl ClockQuality {
    /// Returns `calibrated` or `estimated`.
    pub fn name(self) -> &'static str {
        match self {
            ClockQuality::Calibrated { .. } => "calibrated",
            ClockQuality::Estimated { .. } => "estimated",
        }
    }

    /// Returns the maximum error of the times.
    pub fn error(self) -> Duration {
        match self {
            ClockQuality::Calibrated { error } | ClockQuality::Estimated { error } => error,
        }
    }
}

/// Why a submission ended where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushReason {
    /// A phase (load, prefill or decode) ends and another begins.
    PhaseBoundary,
    /// The host needs results (such as sampled tokens) now.
    Readback,
    /// A point of another queue must be reached first.
    CrossQueue,
}

impl FlushReason {
    /// Returns `phase_boundary`, `readback` or `cross_queue`.
    pub fn name(self) -> &'static str {
        match self {
            FlushReason::PhaseBoundary => "phase_boundary",
            FlushReason::Readback => "readback",
            FlushReason::CrossQueue => "cross_queue",
        }
    }
}

/// One run of a region on the device, or several consecutive runs of the same region.
#[derive(Clone, Debug, PartialEq)]
pub struct RegionSpan {
    /// The recording's name, such as `decode.8`.
    pub name: Arc<str>,
    /// The number of runs in this span.
    pub runs: u32,
    /// When all preceding work had ended.
    pub begin: Moment,
    /// When the last run had ended.
    pub end: Moment,
    /// The kernels of a profiled run; otherwise empty.
    pub kernels: Vec<KernelSpan>,
}

/// The time of one kernel in a run of a region.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSpan {
    /// The call's label, such as `layers.3.qkv`.
    pub label: Arc<str>,
    /// The shader's name.
    pub kernel: &'static str,
    /// When the preceding kernel had ended.
    pub begin: Moment,
    /// When this kernel had ended.
    pub end: Moment,
}

/// The device of a submission.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordedDevice {
    /// The index among the host's adapters.
    pub index: usize,
    /// The name.
    pub name: String,
    /// The UUID.
    pub uuid: String,
}

/// One submission to the compute queue.
#[derive(Clone, Debug)]
pub struct SubmissionRecord {
    /// The device that it ran on.
    pub device: Arc<RecordedDevice>,
    /// When the compute actor received it, and when the driver had accepted it.
    pub enqueue: (Moment, Moment),
    /// The last point that it signals.
    pub point: Point,
    /// Points of other queues that it waited for.
    pub waits: Vec<Point>,
    /// Why it ended where it did.
    pub flush: FlushReason,
    /// When the watcher saw its end.
    pub seen: Moment,
    /// The watcher's blocking waits for its last point.
    pub host_waits: u32,
    /// The regions that ran, in order; empty if nothing was timed.
    pub regions: Vec<RegionSpan>,
    /// How the device times were converted; `None` if there are none.
    pub clock: Option<ClockQuality>,
    /// The number of dispatches.
    pub dispatches: u32,
    /// The number of pipeline barriers.
    pub barriers: u32,
}

impl SubmissionRecord {
    /// The begin of the first region and the end of the last one, on the host's clock; `None` if nothing was timed.
    pub fn device_span(&self) -> Option<(Moment, Moment)> {
        Some((self.regions.first()?.begin, self.regions.last()?.end))
    }
}

/// One submission to the transfer queue.
#[derive(Clone, Debug)]
pub struct TransferRecord {
    /// Sequence number, consecutive from 0.
    pub number: u64,
    /// The kind: `copy` (which includes fills) or `readback`.
    pub what: &'static str,
    /// Bytes copied or filled.
    pub bytes: u64,
    /// The number of copy and fill commands.
    pub copies: u32,
    /// When the actor began the submission, and when the driver had accepted it.
    pub enqueue: (Moment, Moment),
    /// Begin and end on the device; `None` if the queue has no timestamps or none were free.
    pub device: Option<(Moment, Moment)>,
    /// How the device times were converted.
    pub clock: Option<ClockQuality>,
    /// When the actor saw its end: up to one polling interval after the point was reached.
    pub seen: Moment,
    /// The point that it signals.
    pub point: Point,
    /// Points of other queues that it waited for.
    pub waits: Vec<Point>,
}

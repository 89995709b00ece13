//! Owns the host's waiting: turns timeline progress into messages, in the order of
//! submission. Never submits, never decides what runs.

use super::gpu_clock::GpuClock;
use super::mailbox::{Address, Mailbox, mailbox};
use super::stamps::Taken;
use super::timeline::{FlushReason, KernelSpan, RegionSpan, SubmissionRecord};
use crate::device::{Device, DeviceError, Point};
use crate::kernels::region::{Region, Timing};
use crate::telemetry::clock::Moment;
use crossbeam_channel::Sender;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Consecutive regions of a submission that are told as one.
pub(super) struct Run {
    pub(super) name: Arc<str>,
    pub(super) regions: u32,
    /// The region, if it has timestamps inside.
    pub(super) timed: Option<Arc<Region>>,
}

impl Run {
    /// Of one region.
    pub(super) fn of(region: &Arc<Region>) -> Run {
        let timed = region.timing().map(|_| Arc::clone(region));
        Run { name: Arc::clone(region.shared_name()), regions: 1, timed }
    }
}

/// What to watch: a submission's points and where to say that they were reached.
pub(super) struct Watch {
    /// The submission's number, handed back.
    pub(super) id: u64,
    /// Reports to make, ascending: entries completed by then, and the point that says so.
    pub(super) reports: Vec<(u32, Point)>,
    /// When enqueueing began and ended.
    pub(super) enqueue: (Moment, Moment),
    /// What it waited for, and why it ended.
    pub(super) waits: Vec<Point>,
    pub(super) flush: FlushReason,
    /// What is told apart, and a stamp before the first of them and behind each.
    pub(super) runs: Vec<Run>,
    pub(super) stamps: Option<Taken>,
    /// Its regions, in order.
    pub(super) regions: Vec<Arc<Region>>,
    /// Where reports go.
    pub(super) outbox: Outbox,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("id", &self.id).field("reports", &self.reports).finish_non_exhaustive()
    }
}

/// The receiving side of reports, held by who submits.
#[derive(Clone, Debug)]
pub struct Outbox {
    /// Reports in order. A receiver that is gone loses them, which is its wish.
    pub reports: Sender<Report>,
    /// Made readable after each report; holds one token.
    pub wake: Sender<()>,
}

/// Progress of a submission.
#[derive(Debug)]
pub struct Report {
    /// The submission.
    pub id: u64,
    /// Entries that are complete, counted from the submission's first.
    pub entries: u32,
    /// The submission is complete.
    pub last: bool,
    /// Blocking waits that this report took: 0 where the point had been reached already.
    pub host_waits: u32,
    /// Host time of enqueueing the submission; in the last report only.
    pub enqueue: Duration,
    /// Device time of the submission; in the last report, where the queue has timestamps.
    pub device_time: Option<Duration>,
    /// When everything happened; in the last report.
    pub record: Option<Box<SubmissionRecord>>,
    /// What the wait ended in.
    pub result: Result<(), DeviceError>,
}

impl Report {
    /// Of a submission that the driver did not take.
    pub(super) fn failed(id: u64, (begin, end): (Moment, Moment), error: DeviceError) -> Report {
        Report {
            id,
            entries: 0,
            last: true,
            host_waits: 0,
            enqueue: end.since(begin),
            device_time: None,
            record: None,
            result: Err(error),
        }
    }
}

/// Handle of the watcher of a device's compute queue.
#[derive(Debug)]
pub struct Watcher {
    // Order matters: the inbox closes before the thread is joined.
    inbox: Option<Address<Watch>>,
    thread: Option<JoinHandle<()>>,
}

/// A submission holds at least one step, and no executor has more than a few dozen in flight;
/// a full inbox makes the compute actor wait for the device, which is right.
const INBOX: usize = 256;

/// Between two looks at a point that is not a submission's last: a client hears of a token at most this late,
/// and a look costs far less than a blocking wait.
const LOOK_EVERY: Duration = Duration::from_micros(300);

/// How long one wait lasts before the watcher looks at the device again.
const PATIENCE: Duration = Duration::from_secs(2);

impl Watcher {
    /// Starts the thread.
    pub fn spawn(device: Arc<Device>) -> Watcher {
        let (address, inbox) = mailbox(INBOX);
        let thread = std::thread::Builder::new()
            .name("watcher".to_owned())
            .spawn(move || {
                let clock = GpuClock::of(&device);
                Actor { device, clock }.run(&inbox);
            })
            .expect("the host can start a thread");
        Watcher { inbox: Some(address), thread: Some(thread) }
    }

    /// Reports behind everything watched before.
    pub(super) fn watch(&self, watch: Watch) {
        if let Some(inbox) = &self.inbox {
            // The thread lives as long as the handle.
            let _ = inbox.send(watch);
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.inbox.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Actor {
    device: Arc<Device>,
    clock: GpuClock,
}

impl Actor {
    fn run(mut self, inbox: &Mailbox<Watch>) {
        while let Ok(watch) = inbox.recv() {
            self.follow(watch);
        }
    }

    fn follow(&mut self, mut watch: Watch) {
        let reports = std::mem::take(&mut watch.reports);
        let count = reports.len();
        for (index, (entries, point)) in reports.into_iter().enumerate() {
            let last = index + 1 == count;
            let (result, host_waits) = if last { self.reach(point) } else { (self.look_for(point), 0) };
            let failed = result.is_err();
            let mut report = Report {
                id: watch.id,
                entries,
                last: last || failed,
                host_waits,
                enqueue: Duration::ZERO,
                device_time: None,
                record: None,
                result,
            };
            if last {
                report.enqueue = watch.enqueue.1.since(watch.enqueue.0);
            }
            if last && !failed {
                let record = self.record(&mut watch, point, host_waits);
                report.device_time = record.device_span().map(|(begin, end)| end.since(begin));
                report.record = Some(Box::new(record));
            }
            let _ = watch.outbox.reports.send(report);
            let _ = watch.outbox.wake.try_send(());
            if failed {
                return;
            }
        }
    }

    /// What is known of a submission that has finished.
    fn record(&mut self, watch: &mut Watch, point: Point, host_waits: u32) -> SubmissionRecord {
        let seen = Moment::now();
        // Dropped here: its stamps are free again.
        let stamps = watch.stamps.take();
        let times = stamps.as_ref().and_then(Taken::read).filter(|times| times.len() == watch.runs.len() + 1);
        let (mut regions, mut clock) = (Vec::new(), None);
        if let Some([first, .., last]) = times.as_deref() {
            self.clock.follow(&self.device, (*first, *last), (watch.enqueue.0, seen));
            clock = self.clock.quality(*last);
            let place = |time: u64| self.clock.place(time).unwrap_or(seen);
            let ends = times.iter().flatten().skip(1);
            let mut begin = place(*first);
            for (run, end) in watch.runs.iter().zip(ends) {
                let end = place(*end);
                let timing = run.timed.as_ref().and_then(|region| region.timing());
                let kernels = timing.map(|timing| kernels(timing, &self.clock)).unwrap_or_default();
                regions.push(RegionSpan { name: Arc::clone(&run.name), runs: run.regions, begin, end, kernels });
                begin = end;
            }
        }
        let sum = |count: fn(&Region) -> u32| watch.regions.iter().map(|region| count(region)).sum();
        SubmissionRecord {
            enqueue: watch.enqueue,
            point,
            waits: std::mem::take(&mut watch.waits),
            flush: watch.flush,
            seen,
            host_waits,
            regions,
            clock,
            dispatches: sum(Region::dispatches),
            barriers: sum(Region::barriers),
        }
    }

    /// Looks at a point from time to time until it is reached.
    fn look_for(&self, point: Point) -> Result<(), DeviceError> {
        while !self.device.reached(point)? {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn reach(&self, point: Point) -> (Result<(), DeviceError>, u32) {
        match self.device.reached(point) {
            Ok(true) => return (Ok(()), 0),
            Ok(false) => {}
            Err(error) => return (Err(error), 0),
        }
        let mut waits = 0;
        loop {
            waits += 1;
            match self.device.wait(point, PATIENCE) {
                Ok(true) => return (Ok(()), waits),
                Ok(false) => {}
                Err(error) => return (Err(error), waits),
            }
        }
    }
}

/// The operations of a region that has run, each from the end of the one before it.
fn kernels(timing: &Timing, clock: &GpuClock) -> Vec<KernelSpan> {
    let Some(times) = timing.read() else { return Vec::new() };
    let placed: Option<Vec<Moment>> = times.into_iter().map(|time| clock.place(time)).collect();
    let Some(placed) = placed else { return Vec::new() };
    let spans = placed.windows(2).zip(timing.operations());
    spans
        .map(|(span, operation)| KernelSpan {
            label: Arc::clone(&operation.label),
            kernel: operation.kernel,
            begin: span[0],
            end: span[1],
        })
        .collect()
}

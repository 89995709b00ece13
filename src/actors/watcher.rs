//! Owns the host's waiting: turns timeline progress into messages, in the order of
//! submission. Never submits, never decides what runs.

use super::gpu_clock::GpuClock;
use super::mailbox::{Address, Mailbox, mailbox};
use super::stamps::Taken;
use super::timeline::{FlushReason, KernelSpan, RegionSpan, SubmissionRecord};
use crate::device::{Device, DeviceError, Point, Role};
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
    pub(super) owed: Owed,
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

/// What actors of a device say when they end before their time: that it is lost.
pub(super) trait Loses: Send + Sync {
    /// Gives it up, and the error for whoever waits.
    fn lose(&self, why: &str) -> DeviceError;
}

impl Loses for Device {
    fn lose(&self, why: &str) -> DeviceError {
        self.declare_lost(why);
        self.progress(Role::Compute).expect_err("it is lost")
    }
}

/// A submission's way back, which ends with a last report whatever becomes of it. Dropped before, because the actor that
/// had it has ended (a bug there, as actors end with their handles only), it says that the device is lost: nobody would
/// submit to it or watch it any more.
pub(super) struct Owed {
    /// The submission's number, handed back.
    id: u64,
    outbox: Outbox,
    open: bool,
    device: Arc<dyn Loses>,
}

/// As [`Owed`] says.
const ENDED: &str = "one of its actors, which has ended";

impl Owed {
    pub(super) fn new(id: u64, outbox: Outbox, device: Arc<dyn Loses>) -> Owed {
        Owed { id, outbox, open: true, device }
    }

    /// Hands a report over; waits while there is no room.
    pub(super) fn report(&mut self, report: Report) {
        self.open &= !report.last;
        // A receiver that is gone loses it, which is its wish.
        let _ = self.outbox.reports.send(report);
        let _ = self.outbox.wake.try_send(());
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if self.open {
            let now = Moment::now();
            let report = Report::failed(self.id, (now, now), self.device.lose(ENDED));
            // Never waits: it may be the receiver's own thread that drops it. Receivers have room for what they asked for.
            let _ = self.outbox.reports.try_send(report);
            let _ = self.outbox.wake.try_send(());
        }
    }
}

/// Gives the device up where its thread ends by a panic.
pub(super) struct OnPanic(pub(super) Arc<Device>);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.declare_lost(ENDED);
        }
    }
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
                let _lost = OnPanic(Arc::clone(&device));
                let clock = GpuClock::of(&device);
                Actor { device, clock }.run(&inbox);
            })
            .expect("the host can start a thread");
        Watcher { inbox: Some(address), thread: Some(thread) }
    }

    /// Reports behind everything watched before.
    pub(super) fn watch(&self, watch: Watch) {
        if let Some(inbox) = &self.inbox {
            // Where the thread has ended, the watch has too, and says so where its reports go.
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
            watch.owed.report(report);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::bounded;
    use std::sync::Mutex;

    /// A device that keeps why it was given up.
    #[derive(Default)]
    struct Fake(Mutex<Vec<String>>);

    impl Loses for Fake {
        fn lose(&self, why: &str) -> DeviceError {
            self.0.lock().unwrap().push(why.to_owned());
            DeviceError::DeviceLost { device: "fake".to_owned(), call: why.to_owned() }
        }
    }

    fn watch(id: u64, outbox: &Outbox, device: &Arc<Fake>) -> Watch {
        let now = Moment::now();
        Watch {
            id,
            reports: vec![(1, Point { role: Role::Compute, value: id })],
            enqueue: (now, now),
            waits: Vec::new(),
            flush: FlushReason::Readback,
            runs: Vec::new(),
            stamps: None,
            regions: Vec::new(),
            owed: Owed::new(id, outbox.clone(), Arc::clone(device) as _),
        }
    }

    fn done(id: u64) -> Report {
        let now = Moment::now();
        Report { result: Ok(()), ..Report::failed(id, (now, now), Fake::default().lose("nothing")) }
    }

    /// Method: a thread that reports the first of three watches and panics with the second in hand; a fourth comes when
    /// it has ended.
    #[test]
    fn a_watcher_that_panics_owes_nobody_a_report() {
        let (reports, heard) = bounded(8);
        let (wake, woken) = bounded(1);
        let (outbox, device) = (Outbox { reports, wake }, Arc::new(Fake::default()));
        let (address, inbox) = mailbox::<Watch>(8);
        (1..=3).for_each(|id| address.send(watch(id, &outbox, &device)).unwrap());
        let thread = std::thread::spawn(move || {
            while let Ok(mut watch) = inbox.recv() {
                assert_ne!(watch.id, 2, "a bug");
                watch.owed.report(done(watch.id));
            }
        });
        thread.join().unwrap_err();
        address.send(watch(4, &outbox, &device)).unwrap_err();
        let mut told: Vec<(u64, bool)> = heard.try_iter().map(|report| (report.id, report.result.is_ok())).collect();
        told.sort_unstable();
        assert_eq!(told, [(1, true), (2, false), (3, false), (4, false)], "each one once");
        assert!(woken.try_recv().is_ok());
        let given_up = device.0.lock().unwrap();
        assert_eq!(given_up.len(), 3);
        assert!(given_up.iter().all(|why| why == ENDED));
    }
}

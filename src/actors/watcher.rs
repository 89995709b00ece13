//! Owns the host-side waiting for the compute queue: turns the progress of its timeline into reports, in submission
//! order. Not here: submitting, the decision what runs.

use super::gpu_clock::GpuClock;
use super::mailbox::{Address, Mailbox, mailbox};
use super::stamps::Taken;
use super::timeline::{FlushReason, KernelSpan, RecordedDevice, RegionSpan, SubmissionRecord};
use super::turns::Turn;
use crate::actors::thread::{ActorThread, SpawnError};
use crate::device::{Adapter, Device, DeviceError, Point, Role};
use crate::kernels::region::{Region, Timing};
use crate::telemetry::clock::Moment;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Consecutive regions of a submission that are timed and recorded as one.
pub(super) struct Run {
    pub(super) name: Arc<str>,
    pub(super) regions: u32,
    /// The region, if it has timestamps inside; such a region is a run of its own.
    pub(super) timed: Option<Arc<Region>>,
}

impl Run {
    /// A run of one region.
    pub(super) fn of(region: &Arc<Region>) -> Run {
        let timed = region.timing().map(|_| Arc::clone(region));
        Run { name: Arc::clone(region.shared_name()), regions: 1, timed }
    }
}

/// A submission to watch: its points, and the destination of the reports about them.
pub(super) struct Watch {
    /// The submission's id, copied to its reports.
    pub(super) id: u64,
    /// The reports to make, in ascending order: the number of entries completed, and the point that completes them.
    pub(super) reports: Vec<(u32, Point)>,
    /// When enqueueing began and ended.
    pub(super) enqueue: (Moment, Moment),
    /// The points of other queues that the submission waited for, and why it ended where it did.
    pub(super) waits: Vec<Point>,
    pub(super) flush: FlushReason,
    /// The runs to time, and the timestamps: one before the first run and one after each run.
    pub(super) runs: Vec<Run>,
    pub(super) stamps: Option<Taken>,
    /// The submission's regions, in order, and the one ahead of them, which counts nowhere.
    pub(super) regions: Vec<Arc<Region>>,
    pub(super) ahead: Option<Arc<Region>>,
    /// Destination of the reports.
    pub(super) owed: Owed,
    /// The function to call when the last point is reached.
    pub(super) then: Option<Then>,
    /// The turn on the device, which ends when the last point of its last submission is reached.
    pub(super) turn: Option<Arc<Turn>>,
}

/// A function that the watcher calls as soon as a submission has finished, to pass data to another device and to
/// release the work that waits for it there. It must not block.
pub struct Then {
    work: Box<dyn FnOnce() -> Result<(), DeviceError> + Send>,
    /// Disconnected once the function that releases this submission's work has been called or dropped.
    released: Option<Receiver<()>>,
    /// Dropped with this function, or after its call.
    releases: Option<Sender<()>>,
}

impl Then {
    /// Creates it from a function. An error takes the place of the submission's own result.
    pub fn new(work: impl FnOnce() -> Result<(), DeviceError> + Send + 'static) -> Then {
        Then { work: Box::new(work), released: None, releases: None }
    }

    /// Makes it follow `earlier`, the function that releases this submission's work on its device: until that one has been
    /// called, the watcher sleeps instead of polling. Of the devices of a split model, only the one that computes then has
    /// a thread that polls.
    pub fn behind(mut self, earlier: &mut Then) -> Then {
        let (releases, released) = bounded(0);
        earlier.releases = Some(releases);
        self.released = Some(released);
        self
    }

    /// Waits until the submission's work is released, or never will be.
    fn wait_for_release(&mut self) {
        if let Some(released) = self.released.take() {
            // Nothing is ever sent: the sender is dropped.
            let _ = released.recv();
        }
    }

    fn call(self) -> Result<(), DeviceError> {
        let Then { work, releases, .. } = self;
        let result = work();
        drop(releases);
        result
    }
}

impl std::fmt::Debug for Then {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Then")
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("id", &self.id).field("reports", &self.reports).finish_non_exhaustive()
    }
}

/// The sending side of a report channel and of its wake-up channel, provided by the submitter.
#[derive(Clone, Debug)]
pub struct Outbox {
    /// Reports in order. They are dropped if the receiver is gone, which is the receiver's choice.
    pub reports: Sender<Report>,
    /// A channel of capacity 1 that becomes readable after each report.
    pub wake: Sender<()>,
}

/// Declares a device lost. An actor uses it when it ends before its handle is dropped.
pub(super) trait Loses: Send + Sync {
    /// Declares the device lost and returns the error for those who wait for it.
    fn lose(&self, why: &str) -> DeviceError;
}

impl Loses for Device {
    fn lose(&self, why: &str) -> DeviceError {
        self.declare_lost(why);
        self.progress(Role::Compute).expect_err("it is lost")
    }
}

/// The obligation to send a submission's last report. If it is dropped without that report, then the actor that held it
/// has ended early (a bug: an actor normally lives as long as its handle). The drop declares the device lost, because
/// nothing would submit to it or watch it any more, and reports that error.
pub(super) struct Owed {
    /// The submission's id, copied to its reports.
    id: u64,
    outbox: Outbox,
    open: bool,
    device: Arc<dyn Loses>,
}

/// The reason given when a device is declared lost because one of its actors has ended; see [`Owed`].
const ENDED: &str = "one of its actors, which has ended";

impl Owed {
    pub(super) fn new(id: u64, outbox: Outbox, device: Arc<dyn Loses>) -> Owed {
        Owed { id, outbox, open: true, device }
    }

    /// Sends a report; blocks while the channel is full.
    pub(super) fn report(&mut self, report: Report) {
        self.open &= !report.last;
        // The report is dropped if the receiver is gone, which is the receiver's choice.
        let _ = self.outbox.reports.send(report);
        let _ = self.outbox.wake.try_send(());
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if self.open {
            let now = Moment::now();
            let report = Report::failed(self.id, (now, now), self.device.lose(ENDED));
            // Must not block, because the dropping thread may be the receiver's own. Receivers have room for the
            // reports that they requested.
            let _ = self.outbox.reports.try_send(report);
            let _ = self.outbox.wake.try_send(());
        }
    }
}

/// Declares the device lost if its thread ends with a panic.
pub(super) struct OnPanic(pub(super) Arc<Device>);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.declare_lost(ENDED);
        }
    }
}

/// A report on the progress of a submission.
#[derive(Debug)]
pub struct Report {
    /// The submission's id.
    pub id: u64,
    /// The number of completed entries, counted from the submission's first.
    pub entries: u32,
    /// Whether this is the last report: the submission is complete or has failed.
    pub last: bool,
    /// The number of blocking waits for this report; 0 if the point was already reached.
    pub host_waits: u32,
    /// Host time spent enqueueing the submission; only in the last report.
    pub enqueue: Duration,
    /// Device time of the submission; only in the last report, and only if it was timed.
    pub device_time: Option<Duration>,
    /// The moments of the submission on the host's clock; only in the last report.
    pub record: Option<Box<SubmissionRecord>>,
    /// `Ok` if the entries are complete, otherwise the error that ended the wait.
    pub result: Result<(), DeviceError>,
}

impl Report {
    /// The last report of a submission that has failed, for example because the driver did not accept it.
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
    // Field order matters: the inbox must close before the thread is joined.
    inbox: Address<Watch>,
    _thread: ActorThread,
}

/// Capacity of the inbox. A submission holds at least one step, and an executor has at most a few dozen in flight, a stage of
/// a split model 128. A full inbox makes the compute actor wait for the device, which is intended.
const INBOX: usize = 256;

/// Polling interval for points other than a submission's last. It bounds the delay with which a client gets a token; a
/// poll costs far less than a blocking wait.
const LOOK_EVERY: Duration = Duration::from_micros(300);

/// The time for which the watcher polls without a pause for a point behind which another device waits: longer than decode
/// steps take. Steps that take longer lose little by a late look.
const SPIN: Duration = Duration::from_millis(100);

/// Timeout of one blocking wait; the watcher then waits again.
const PATIENCE: Duration = Duration::from_secs(2);

impl Watcher {
    /// Starts the watcher thread.
    pub fn spawn(device: Arc<Device>) -> Result<Watcher, SpawnError> {
        let (address, inbox) = mailbox(INBOX);
        let thread = ActorThread::spawn("watcher", move || {
            let _lost = OnPanic(Arc::clone(&device));
            let clock = GpuClock::of(&device);
            let Adapter { index, name, uuid, .. } = device.adapter().clone();
            let recorded = Arc::new(RecordedDevice { index, name, uuid });
            Actor { device, recorded, clock }.run(&inbox);
        })?;
        Ok(Watcher { inbox: address, _thread: thread })
    }

    /// Queues a submission to watch, behind those queued before. Blocks while the inbox is full.
    pub(super) fn watch(&self, watch: Watch) {
        {
            // If the thread has ended, the mailbox drops the watch, and dropping its `owed` reports the error.
            let _ = self.inbox.send(watch);
        }
    }
}

struct Actor {
    device: Arc<Device>,
    /// The device as records name it.
    recorded: Arc<RecordedDevice>,
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
            let (mut result, host_waits) = match last {
                false => (self.look_for(point), 0),
                true => match &mut watch.then {
                    Some(then) => {
                        then.wait_for_release();
                        self.reach_soon(point)
                    }
                    None => self.reach(point),
                },
            };
            // First of all what others wait for: another process, and another device.
            if last {
                watch.turn = None;
            }
            if let Some(then) = watch.then.take_if(|_| last)
                && result.is_ok()
            {
                result = then.call();
            }
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
                // Before the report, so that its receiver finds the buffers of regions that nobody else keeps free, and with
                // the point of this use.
                watch.regions.clear();
                watch.ahead = None;
            }
            watch.owed.report(report);
            if failed {
                return;
            }
        }
    }

    /// Collects the record of a finished submission.
    fn record(&mut self, watch: &mut Watch, point: Point, host_waits: u32) -> SubmissionRecord {
        let seen = Moment::now();
        // Dropped at the end of this function, which frees the timestamps.
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
            device: Arc::clone(&self.recorded),
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

    /// Polls until a point is reached.
    fn look_for(&self, point: Point) -> Result<(), DeviceError> {
        while !self.device.reached(point)? {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Like [`Actor::reach`], for a point behind which another device waits: polls without a pause at first, because a thread
    /// that sleeps until a GPU has finished wakes up tens of microseconds late.
    fn reach_soon(&self, point: Point) -> (Result<(), DeviceError>, u32) {
        let begun = Instant::now();
        // The threads of a CPU driver need the cores themselves.
        while !self.device.adapter().is_cpu() && begun.elapsed() < SPIN {
            match self.device.reached(point) {
                Ok(true) => return (Ok(()), 0),
                // On a machine with few cores, the thread that opens this device's gate may wait for this one.
                Ok(false) => std::thread::yield_now(),
                Err(error) => return (Err(error), 0),
            }
        }
        self.reach(point)
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

/// The kernels of a region that has run. Each begins when the one before it ends.
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
    use std::sync::Mutex;

    /// A fake device that records why it was declared lost.
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
            ahead: None,
            regions: Vec::new(),
            owed: Owed::new(id, outbox.clone(), Arc::clone(device) as _),
            then: None,
            turn: None,
        }
    }

    fn done(id: u64) -> Report {
        let now = Moment::now();
        Report { result: Ok(()), ..Report::failed(id, (now, now), Fake::default().lose("nothing")) }
    }

    /// Goal: every watch gets exactly one last report when the watcher panics. Method: a thread reports the first of
    /// three watches and panics while it holds the second; a fourth watch is sent after the thread has ended.
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

    #[test]
    fn a_function_behind_another_is_released_by_its_call_and_by_its_end() {
        for called in [true, false] {
            let mut first = Then::new(|| Ok(()));
            let mut second = Then::new(|| Ok(())).behind(&mut first);
            let released = second.released.clone().expect("it follows the first one");
            assert!(released.recv_timeout(Duration::from_millis(1)).is_err_and(|error| error.is_timeout()));
            match called {
                true => first.call().expect("it does nothing"),
                false => drop(first),
            }
            second.wait_for_release();
        }
    }
}

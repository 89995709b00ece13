//! Owns the host's waiting: turns timeline progress into messages, in the order of
//! submission. Never submits, never decides what runs.

use crate::device::{Device, DeviceError, Point};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Reads a finished submission's device time, where its timestamps were written.
pub type DeviceTime = Box<dyn FnOnce() -> Option<Duration> + Send>;

/// What to watch: a submission's points and where to say that they were reached.
pub struct Watch {
    /// The submission's number, handed back.
    pub id: u64,
    /// Reports to make, ascending: entries completed by then, and the point that says so.
    pub reports: Vec<(u32, Point)>,
    /// Host time that enqueueing took.
    pub enqueue: Duration,
    /// Reads the device time of the whole submission once it is complete.
    pub device_time: Option<DeviceTime>,
    /// Where reports go.
    pub outbox: Outbox,
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
    /// What the wait ended in.
    pub result: Result<(), DeviceError>,
}

/// Handle of the watcher of a device's compute queue.
#[derive(Debug)]
pub struct Watcher {
    // Order matters: the inbox closes before the thread is joined.
    inbox: Option<Sender<Watch>>,
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
        let (sender, inbox) = bounded(INBOX);
        let thread = std::thread::Builder::new()
            .name("watcher".to_owned())
            .spawn(move || Actor { device }.run(&inbox))
            .expect("the host can start a thread");
        Watcher { inbox: Some(sender), thread: Some(thread) }
    }

    /// Reports behind everything watched before.
    pub fn watch(&self, watch: Watch) {
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
}

impl Actor {
    fn run(self, inbox: &Receiver<Watch>) {
        while let Ok(watch) = inbox.recv() {
            self.follow(watch);
        }
    }

    fn follow(&self, watch: Watch) {
        let Watch { id, reports, enqueue, mut device_time, outbox } = watch;
        let count = reports.len();
        for (index, (entries, point)) in reports.into_iter().enumerate() {
            let last = index + 1 == count;
            let (result, host_waits) = if last { self.reach(point) } else { (self.look_for(point), 0) };
            let failed = result.is_err();
            let device_time = match device_time.take() {
                Some(read) if last && !failed => read(),
                kept => {
                    device_time = kept;
                    None
                }
            };
            let enqueue = if last { enqueue } else { Duration::ZERO };
            let report = Report { id, entries, last: last || failed, host_waits, enqueue, device_time, result };
            let _ = outbox.reports.send(report);
            let _ = outbox.wake.try_send(());
            if failed {
                return;
            }
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

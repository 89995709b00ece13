//! Owns the compute queue: submits regions in the order asked and has their completion
//! watched. Does not allocate, does not record, does not decide what runs.

use super::mailbox::{Address, Mailbox, mailbox};
use super::stamps::Stamps;
use super::timeline::FlushReason;
use super::watcher::{OnPanic, Outbox, Owed, Report, Run, Watch, Watcher};
pub use crate::config::GpuTime;
use crate::device::{Batch, Commands, Device, DeviceError, Entry, Gate, Point, Role};
use crate::kernels::region::Region;
use crate::telemetry::clock::Moment;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Work for the queue: entries run in order, each is complete at a point of its own.
#[derive(Debug)]
pub struct Submission {
    /// Handed back in reports.
    pub id: u64,
    /// Regions of each entry, in order.
    pub entries: Vec<Vec<Arc<Region>>>,
    /// Points of other queues that must be reached first.
    pub waits: Vec<Point>,
    /// What the last entry waits for, and with it all that is submitted later. Such a submission is reported once.
    pub gate: Option<(Arc<Gate>, u64)>,
    /// Why it ends where it does.
    pub flush: FlushReason,
    /// Entries (counted from 1) after which a report is wanted, ascending; the last always is.
    pub report_after: Vec<u32>,
    /// Where reports go: the last one always comes, with an error where the device is lost or an actor has ended.
    pub outbox: Outbox,
}

/// Handle of the compute actor of a device.
#[derive(Debug)]
pub struct Compute {
    // Order matters: the inbox closes before the thread is joined.
    inbox: Option<Address<Message>>,
    thread: Option<JoinHandle<()>>,
    device: Arc<Device>,
}

enum Message {
    Submit(Box<Work>),
}

/// A submission whose way back is kept.
struct Work {
    id: u64,
    entries: Vec<Vec<Arc<Region>>>,
    waits: Vec<Point>,
    gate: Option<(Arc<Gate>, u64)>,
    flush: FlushReason,
    report_after: Vec<u32>,
    owed: Owed,
}

/// Executors keep a few submissions in flight each; a full inbox means that the driver blocks
/// on its own limit, and then waiting is all there is to do.
const INBOX: usize = 64;

impl Compute {
    /// Starts the thread and the watcher behind it.
    pub fn spawn(device: Arc<Device>, gpu_time: GpuTime) -> Result<Compute, DeviceError> {
        let stamps = if gpu_time == GpuTime::Off { None } else { Stamps::new(&device)? };
        let (address, inbox) = mailbox(INBOX);
        let of_handle = Arc::clone(&device);
        let thread = std::thread::Builder::new()
            .name("compute".to_owned())
            .spawn(move || {
                let _lost = OnPanic(Arc::clone(&device));
                let watcher = Watcher::spawn(Arc::clone(&device));
                Actor { device, watcher, stamps, gpu_time }.run(&inbox);
            })
            .expect("the host can start a thread");
        Ok(Compute { inbox: Some(address), thread: Some(thread), device: of_handle })
    }

    /// Runs after everything submitted before it.
    pub fn submit(&self, submission: Submission) {
        let Submission { id, entries, waits, gate, flush, report_after, outbox } = submission;
        let owed = Owed::new(id, outbox, Arc::clone(&self.device) as _);
        if let Some(inbox) = &self.inbox {
            // Where the thread has ended, the submission has too, and says so where its reports go.
            let _ = inbox.send(Message::Submit(Box::new(Work { id, entries, waits, gate, flush, report_after, owed })));
        }
    }

    /// The next report, for whoever has submitted and waits. `None` once the queue has not moved for `patience`; a CPU
    /// driver is waited for without limit, as [`Device::wait_while_moving`] says.
    pub fn report(&self, reports: &Receiver<Report>, patience: Duration) -> Option<Report> {
        let moved = || self.device.progress(Role::Compute).ok();
        let mut seen = moved();
        let begun = Instant::now();
        loop {
            match reports.recv_timeout(patience) {
                Ok(report) => return Some(report),
                // Each submission is owed one: there was none.
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = moved();
            // Of a lost device the report is on its way.
            if now.is_some() && now == seen && !self.device.adapter().is_cpu() {
                return None;
            }
            seen = now;
            let (device, seconds) = (&self.device.adapter().name, begun.elapsed().as_secs());
            tracing::warn!(device, seconds, "a submission takes long");
        }
    }
}

impl Drop for Compute {
    fn drop(&mut self) {
        drop(self.inbox.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Actor {
    device: Arc<Device>,
    watcher: Watcher,
    stamps: Option<Stamps>,
    gpu_time: GpuTime,
}

impl Actor {
    fn run(mut self, inbox: &Mailbox<Message>) {
        while let Ok(Message::Submit(work)) = inbox.recv() {
            self.submit(*work);
        }
    }

    fn submit(&mut self, work: Work) {
        let begin = Moment::now();
        let Work { id, entries, waits, mut gate, flush, mut report_after, mut owed } = work;
        let count = entries.len() as u32;
        report_after.retain(|entry| *entry > 0 && *entry < count);
        report_after.push(count);
        assert!(gate.is_none() || report_after.len() == 1, "parts of a gated submission are reported");
        let mut runs = self.runs(&entries);
        let stamps = self.stamps.as_mut().and_then(|stamps| {
            // A stamp before the first and one behind each; in need, around all of them.
            if stamps.free() <= runs.len() as u64 {
                runs = whole(&entries);
            }
            let count = runs.len() as u64 + 1;
            (stamps.free() >= count).then(|| stamps.take(count))
        });
        let stamp = |index: usize| Some(self.stamps.as_ref()?.commands(stamps.as_ref()?, index as u64));
        let mut batch = Batch { entries: Vec::with_capacity(report_after.len()), waits: waits.clone() };
        let mut commands: Vec<Commands> = stamp(0).into_iter().collect();
        // Entries that nobody hears of end with the next that somebody does: a signal costs the host and the
        // device about a microsecond each.
        let (mut run, mut left) = (0, runs.first().map_or(0, |run| run.regions));
        let mut reported = 0;
        for (done, regions) in (1..).zip(&entries) {
            if done == count && gate.is_some() {
                batch.entries.push(Entry { commands: std::mem::take(&mut commands), gate: None });
            }
            for region in regions {
                commands.push(region.commands().clone());
                left -= 1;
                if left == 0 {
                    run += 1;
                    commands.extend(stamp(run));
                    left = runs.get(run).map_or(0, |run| run.regions);
                }
            }
            if report_after[reported] == done {
                reported += 1;
                // With a gate only the last is reported.
                batch.entries.push(Entry { commands: std::mem::take(&mut commands), gate: gate.take() });
            }
        }
        let queue = self.device.queue(Role::Compute);
        let result = queue.submit(batch);
        let enqueue = (begin, Moment::now());
        // Of a submission that failed it may not be known whether it runs: the last point given out is none sooner.
        let used = *result.as_ref().unwrap_or(&queue.last());
        entries.iter().flatten().for_each(|region| region.mark_used(used));
        let last = match result {
            Ok(last) => last,
            Err(error) => return owed.report(Report::failed(id, enqueue, error)),
        };
        let reports = report_after.len() as u64;
        let point = |index: usize| Point { role: last.role, value: last.value - (reports - 1 - index as u64) };
        self.watcher.watch(Watch {
            id,
            reports: report_after.into_iter().enumerate().map(|(index, entry)| (entry, point(index))).collect(),
            enqueue,
            waits,
            flush,
            runs,
            stamps,
            regions: entries.into_iter().flatten().collect(),
            owed,
        });
    }

    /// What is told apart of a submission.
    fn runs(&self, entries: &[Vec<Arc<Region>>]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for region in entries.iter().flatten() {
            match runs.last_mut() {
                Some(last)
                    if self.gpu_time == GpuTime::Phases
                        && last.name == *region.shared_name()
                        && last.timed.is_none()
                        && region.timing().is_none() =>
                {
                    last.regions += 1;
                }
                _ => runs.push(Run::of(region)),
            }
        }
        runs
    }
}

/// A submission as one run, under the name of its last region.
fn whole(entries: &[Vec<Arc<Region>>]) -> Vec<Run> {
    let regions = entries.iter().flatten().count() as u32;
    let last = entries.iter().flatten().last();
    last.map(|last| Run { regions, ..Run::of(last) }).into_iter().collect()
}

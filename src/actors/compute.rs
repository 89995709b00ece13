//! Owns the compute queue: submits regions in request order and has their completion watched by the watcher. Not here:
//! allocation, recording, the decision what runs.

use super::mailbox::{Address, Mailbox, mailbox};
use super::stamps::Stamps;
use super::timeline::FlushReason;
use super::turns::Turns;
use super::watcher::{OnPanic, Outbox, Owed, Report, Run, Then, Watch, Watcher};
use crate::actors::thread::{ActorThread, SpawnError};
pub use crate::config::GpuTime;
use crate::device::{Batch, Commands, Device, Gate, Point, QueueEntry, Role};
use crate::kernels::region::Region;
use crate::telemetry::clock::Moment;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Work for the compute queue. Its entries run in order; each entry that is reported has its own timeline point.
#[derive(Debug)]
pub struct Submission {
    /// Identifies the submission in its reports.
    pub id: u64,
    /// A region that runs before the gate of the first entry. It is not timed.
    pub ahead: Option<Arc<Region>>,
    /// The regions of each entry, in order.
    pub entries: Vec<Vec<Arc<Region>>>,
    /// Points of other queues that must be reached before the submission runs.
    pub waits: Vec<Point>,
    /// For entries (counted from 1) that wait: a host-signaled timeline and the value that it must reach. Everything behind
    /// such an entry runs after it. A gated submission must ask for no report but the last.
    pub gates: Gates,
    /// Whether kernels of the submission wait for another device.
    pub waits_within: bool,
    /// Why the submission ends where it does.
    pub flush: FlushReason,
    /// The entries (counted from 1, ascending) after which a report is wanted. The last entry is always reported.
    pub report_after: Vec<u32>,
    /// Destination of the reports. The last report always arrives; it carries an error if the device is lost or an
    /// actor has ended.
    pub outbox: Outbox,
    /// The function that the watcher calls as soon as the submission has finished, before the last report. It is
    /// dropped uncalled if the device is lost.
    pub then: Option<Then>,
}

/// Handle of a device's compute actor.
#[derive(Debug)]
pub struct Compute {
    // Field order matters: the inbox must close before the thread is joined.
    inbox: Address<Message>,
    _thread: ActorThread,
    device: Arc<Device>,
}

/// For some entries of a submission, counted from 1, a timeline that the host signals and the value that the entry waits
/// for.
pub type Gates = BTreeMap<u32, (Arc<Gate>, u64)>;

enum Message {
    Submit(Box<Work>),
    StopTiming,
}

/// A submission together with the obligation to report its end.
struct Work {
    id: u64,
    ahead: Option<Arc<Region>>,
    entries: Vec<Vec<Arc<Region>>>,
    waits: Vec<Point>,
    gates: Gates,
    waits_within: bool,
    flush: FlushReason,
    report_after: Vec<u32>,
    owed: Owed,
    then: Option<Then>,
}

/// Capacity of the inbox. Each executor keeps only a few submissions in flight. A full inbox means that the driver
/// blocks at its own limit, and the sender has to wait.
const INBOX: usize = 64;

impl Compute {
    /// Starts the compute thread and its watcher. With [`GpuTime::Off`], or on a queue without timestamps, nothing is
    /// timed. With `turns`, submissions without a gate take turns with other processes.
    pub fn spawn(device: Arc<Device>, gpu_time: GpuTime, turns: Option<Turns>) -> Result<Compute, SpawnError> {
        let stamps = if gpu_time == GpuTime::Off { None } else { Stamps::new(&device)? };
        let (address, inbox) = mailbox(INBOX);
        let of_handle = Arc::clone(&device);
        let watcher = Watcher::spawn(Arc::clone(&device))?;
        let thread = ActorThread::spawn("compute", move || {
            let _lost = OnPanic(Arc::clone(&device));
            Actor { device, watcher, stamps, timed: true, gpu_time, turns }.run(&inbox);
        })?;
        Ok(Compute { inbox: address, _thread: thread, device: of_handle })
    }

    /// Queues a submission behind all earlier ones. Blocks while the inbox is full.
    pub fn submit(&self, submission: Submission) {
        let Submission { id, ahead, entries, waits, gates, waits_within, flush, report_after, outbox, then } =
            submission;
        let owed = Owed::new(id, outbox, Arc::clone(&self.device) as _);
        {
            // If the thread has ended, the mailbox drops the message, and dropping `owed` reports the error.
            let _ = self.inbox.send(Message::Submit(Box::new(Work {
                id,
                ahead,
                entries,
                waits,
                gates,
                waits_within,
                flush,
                report_after,
                owed,
                then,
            })));
        }
    }

    /// Times nothing that is submitted from now on. For drivers where reading a timestamp waits for all queued work, if
    /// work is queued that waits for other devices, which wait for this device's watcher.
    pub fn stop_timing(&self) {
        // If the thread has ended, nothing is timed any more.
        let _ = self.inbox.send(Message::StopTiming);
    }

    /// Returns the next report. Returns `None` if the queue made no progress for `patience`, or if no report is
    /// outstanding. On a CPU driver it waits without limit, for the reason given at [`Device::wait_while_moving`].
    pub fn report(&self, reports: &Receiver<Report>, patience: Duration) -> Option<Report> {
        let moved = || self.device.progress(Role::Compute).ok();
        let mut seen = moved();
        let begun = Instant::now();
        loop {
            match reports.recv_timeout(patience) {
                Ok(report) => return Some(report),
                // Every submission reports before it drops its sender, so no report is outstanding.
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = moved();
            // `None` means that the device is lost; then the report is on its way.
            if now.is_some() && now == seen && !self.device.adapter().is_cpu() {
                return None;
            }
            seen = now;
            let (device, seconds) = (&self.device.adapter().name, begun.elapsed().as_secs());
            tracing::warn!(device, seconds, "a submission takes long");
        }
    }
}

struct Actor {
    device: Arc<Device>,
    watcher: Watcher,
    stamps: Option<Stamps>,
    /// Whether submissions are timed, if there are timestamps.
    timed: bool,
    gpu_time: GpuTime,
    turns: Option<Turns>,
}

impl Actor {
    fn run(mut self, inbox: &Mailbox<Message>) {
        while let Ok(message) = inbox.recv() {
            match message {
                Message::Submit(work) => self.submit(*work),
                Message::StopTiming => self.timed = false,
            }
        }
    }

    fn submit(&mut self, work: Work) {
        // What waits for the host or for another device takes no turn: these could wait for a process that waits for this
        // turn.
        let turns = self.turns.as_mut().filter(|_| work.gates.is_empty() && !work.waits_within);
        let turn = turns.and_then(Turns::take);
        let begin = Moment::now();
        let Work { id, ahead, entries, waits, mut gates, flush, mut report_after, mut owed, then, .. } = work;
        let count = entries.len() as u32;
        report_after.retain(|entry| *entry > 0 && *entry < count);
        report_after.push(count);
        assert!(gates.is_empty() || report_after.len() == 1, "parts of a gated submission are reported");
        let mut runs = self.runs(&entries);
        let stamps = self.stamps.as_mut().filter(|_| self.timed).and_then(|stamps| {
            // One timestamp before the first run and one after each run. If too few are free, time the whole submission
            // as one run.
            if stamps.free() <= runs.len() as u64 {
                runs = whole(&entries);
            }
            let count = runs.len() as u64 + 1;
            (stamps.free() >= count).then(|| stamps.take(count))
        });
        let stamp = |index: usize| Some(self.stamps.as_ref()?.commands(stamps.as_ref()?, index as u64));
        let mut batch = Batch { entries: Vec::with_capacity(report_after.len()), waits: waits.clone() };
        batch
            .entries
            .extend(ahead.iter().map(|region| QueueEntry { commands: vec![region.commands().clone()], gate: None }));
        let mut commands: Vec<Commands> = stamp(0).into_iter().collect();
        // Entries without a report are merged into the next entry with one, because each timeline signal costs the host
        // and the device about a microsecond.
        let (mut run, mut left) = (0, runs.first().map_or(0, |run| run.regions));
        let (mut reported, mut gate) = (0, None);
        for (done, regions) in (1..).zip(&entries) {
            if let Some(own) = gates.remove(&done) {
                // The first timestamp is behind the gate of the first entry.
                if done > 1 {
                    batch.entries.push(QueueEntry { commands: std::mem::take(&mut commands), gate: gate.take() });
                }
                gate = Some(own);
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
                batch.entries.push(QueueEntry { commands: std::mem::take(&mut commands), gate: gate.take() });
            }
        }
        let queue = self.device.queue(Role::Compute);
        let result = queue.submit(batch);
        let enqueue = (begin, Moment::now());
        // After a failed submission it is unknown whether its commands run. The last point handed out is not earlier
        // than any point that they could signal, so the regions count as used until then.
        let used = *result.as_ref().unwrap_or(&queue.last());
        entries.iter().flatten().chain(&ahead).for_each(|region| region.mark_used(used));
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
            ahead,
            owed,
            then,
            turn,
        });
    }

    /// Groups the regions of a submission into runs that are timed separately. With [`GpuTime::Phases`], consecutive
    /// regions of the same name and without timestamps inside form one run; otherwise each region is a run.
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

/// Returns the whole submission as one run, named after its last region.
fn whole(entries: &[Vec<Arc<Region>>]) -> Vec<Run> {
    let regions = entries.iter().flatten().count() as u32;
    let last = entries.iter().flatten().last();
    last.map(|last| Run { regions, ..Run::of(last) }).into_iter().collect()
}

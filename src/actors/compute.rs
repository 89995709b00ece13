//! Owns the compute queue: submits regions in the order asked and has their completion
//! watched. Does not allocate, does not record, does not decide what runs.

use super::watcher::{DeviceTime, Outbox, Report, Watch, Watcher};
use crate::device::{Batch, Commands, Device, DeviceError, Entry, Point, Queries, Role};
use crate::kernels::region::Region;
use crossbeam_channel::{Receiver, Sender, bounded};
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
    /// Entries (counted from 1) after which a report is wanted, ascending; the last always is.
    pub report_after: Vec<u32>,
    /// Where reports go.
    pub outbox: Outbox,
}

/// Handle of the compute actor of a device.
#[derive(Debug)]
pub struct Compute {
    // Order matters: the inbox closes before the thread is joined.
    inbox: Option<Sender<Message>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Message {
    Submit(Submission),
}

/// Executors keep a few submissions in flight each; a full inbox means that the driver blocks
/// on its own limit, and then waiting is all there is to do.
const INBOX: usize = 64;

/// Submissions whose timestamps can be pending at once; further ones go untimed.
const STAMPS: u32 = 32;

impl Compute {
    /// Starts the thread and the watcher behind it.
    pub fn spawn(device: Arc<Device>) -> Result<Compute, DeviceError> {
        let stamps = Stamps::new(&device)?;
        let (sender, inbox) = bounded(INBOX);
        let thread = std::thread::Builder::new()
            .name("compute".to_owned())
            .spawn(move || {
                let watcher = Watcher::spawn(Arc::clone(&device));
                Actor { device, watcher, stamps }.run(&inbox);
            })
            .expect("the host can start a thread");
        Ok(Compute { inbox: Some(sender), thread: Some(thread) })
    }

    /// Runs after everything submitted before it.
    pub fn submit(&self, submission: Submission) {
        if let Some(inbox) = &self.inbox {
            // The thread lives as long as the handle.
            let _ = inbox.send(Message::Submit(submission));
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
}

impl Actor {
    fn run(mut self, inbox: &Receiver<Message>) {
        while let Ok(Message::Submit(submission)) = inbox.recv() {
            self.submit(submission);
        }
    }

    fn submit(&mut self, submission: Submission) {
        let start = Instant::now();
        let Submission { id, entries, waits, mut report_after, outbox } = submission;
        let count = entries.len() as u32;
        report_after.retain(|entry| *entry > 0 && *entry < count);
        report_after.push(count);
        let stamp = self.stamps.as_mut().and_then(Stamps::take);
        let mut batch = Batch { entries: Vec::with_capacity(report_after.len()), waits };
        let mut commands: Vec<Commands> = stamp.iter().map(|stamp| stamp.pair.begin.clone()).collect();
        // Entries that nobody hears of end with the next that somebody does: a signal costs the host and the
        // device about a microsecond each.
        for (done, regions) in (1..).zip(&entries) {
            commands.extend(regions.iter().map(|region| region.commands().clone()));
            if done == count {
                commands.extend(stamp.iter().map(|stamp| stamp.pair.end.clone()));
            }
            if report_after[batch.entries.len()] == done {
                batch.entries.push(Entry { commands: std::mem::take(&mut commands) });
            }
        }
        let result = self.device.queue(Role::Compute).submit(batch);
        let enqueue = start.elapsed();
        let last = match result {
            Ok(last) => last,
            Err(error) => {
                let report = Report {
                    id,
                    entries: 0,
                    last: true,
                    host_waits: 0,
                    enqueue,
                    device_time: None,
                    result: Err(error),
                };
                let _ = outbox.reports.send(report);
                let _ = outbox.wake.try_send(());
                return;
            }
        };
        let reports = report_after.len() as u64;
        let point = |index: usize| Point { role: last.role, value: last.value - (reports - 1 - index as u64) };
        self.watcher.watch(Watch {
            id,
            reports: report_after.into_iter().enumerate().map(|(index, entry)| (entry, point(index))).collect(),
            enqueue,
            device_time: stamp.map(|stamp| Box::new(move || stamp.read()) as DeviceTime),
            outbox,
        });
    }
}

/// Timestamps around submissions: a ring of query pairs with their command buffers, all
/// recorded once. A pair in use returns to the ring when it is dropped.
struct Stamps {
    free: Receiver<Pair>,
    back: Sender<Pair>,
}

#[derive(Clone)]
struct Pair {
    begin: Commands,
    end: Commands,
    queries: Queries,
    first: u32,
}

struct Stamp {
    pair: Pair,
    back: Sender<Pair>,
}

impl Stamps {
    /// `None` where the compute queue has no timestamps.
    fn new(device: &Device) -> Result<Option<Stamps>, DeviceError> {
        let queries = match Queries::new(device, STAMPS * 2) {
            Ok(queries) => queries,
            Err(DeviceError::Unsupported { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let (back, free) = bounded(STAMPS as usize);
        for index in 0..STAMPS {
            let first = index * 2;
            let begin = Commands::record(device, Role::Compute, |encoder| {
                encoder.reset(&queries, first, 2);
                encoder.timestamp(&queries, first);
            })?;
            let end = Commands::record(device, Role::Compute, |encoder| encoder.timestamp(&queries, first + 1))?;
            let _ = back.send(Pair { begin, end, queries: queries.clone(), first });
        }
        Ok(Some(Stamps { free, back }))
    }

    fn take(&mut self) -> Option<Stamp> {
        Some(Stamp { pair: self.free.try_recv().ok()?, back: self.back.clone() })
    }
}

impl Stamp {
    /// Device time between the two stamps of a finished submission.
    fn read(&self) -> Option<Duration> {
        match self.pair.queries.read(self.pair.first, 2).ok()?[..] {
            [Some(begin), Some(end)] => Some(Duration::from_nanos(end.saturating_sub(begin))),
            _ => None,
        }
    }
}

impl Drop for Stamp {
    fn drop(&mut self) {
        // The ring has room for every pair there is.
        let _ = self.back.try_send(self.pair.clone());
    }
}

//! A replica: one model on one device. This file has the handle through which others submit requests and read its
//! state. Not here: its engine thread (`thread`), text and tokio.

mod client;
pub mod gaps;
mod masks;
pub mod observer;
pub mod rebuild;
pub mod record;
pub mod spans;
mod thread;
pub mod totals;

use crate::actors::loader::LoadReport;
use crate::actors::mailbox::{Address, mailbox};
use crate::actors::thread::{ActorThread, SpawnError};
use crate::config::DeviceNames;
use crate::engine::executor::Executor;
use crate::engine::page_pool::PageChange;
use crate::engine::request::{Bounds, Request, RequestError, SAMPLE_MARK, Sink, SinkClosed, sample_id};
use crate::engine::scheduler::{EngineLoad, Scheduler, Setup};
use crate::engine::sequence::RequestView;
use crate::engine::sequence_map::SequenceMap;
use crate::engine::variants::Variants;
use crate::model::split_mix::split_mix;
use crate::replica::client::{Sample, Submission};
use crate::replica::gaps::{GapCounts, Gaps};
use crate::replica::masks::Masks;
use crate::replica::observer::Observer;
use crate::replica::rebuild::{Rebuild, Rebuilds};
use crate::replica::record::StepRecord;
use crate::replica::thread::{Actor, Message};
use crate::replica::totals::{StepTotals, Totals};
use crate::telemetry::clock::Moment;
use crossbeam_channel::bounded;
use std::collections::BTreeSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The identity of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// The index among the host's adapters.
    pub index: usize,
    /// The name that the driver reports.
    pub name: String,
    /// The UUID, lower-case hex with dashes.
    pub uuid: String,
    /// The PCI address, such as `0000:65:00.0`, if the driver reports it.
    pub pci: Option<String>,
    /// Whether it is a CPU driver.
    pub is_cpu: bool,
}

impl DeviceInfo {
    /// The names of the device that a selector is compared with.
    pub fn names(&self) -> DeviceNames<'_> {
        DeviceNames {
            index: self.index,
            name: &self.name,
            uuid: &self.uuid,
            pci: self.pci.as_deref(),
            is_cpu: self.is_cpu,
        }
    }
}

/// One line of a memory plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// The replica, as `MODEL/INDEX`.
    pub replica: String,
    /// The purpose: `weights`, `kv pages` and so on.
    pub purpose: String,
    /// The size in bytes.
    pub bytes: u64,
    /// Whether it is device memory; otherwise host memory.
    pub on_device: bool,
}

/// The part of a split replica on one of its devices.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaStage {
    /// The device.
    pub device: DeviceInfo,
    /// The layers that it computes, or of which it computes a part.
    pub layers: Range<u32>,
    /// The memory plan of the part, by purpose.
    pub memory: Vec<MemoryUse>,
}

/// Why a replica did not accept a request.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The request is invalid: the caller's mistake.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The queue is full.
    #[error("the queue of \"{replica}\" is full: {waiting} waiting, at most {limit}")]
    QueueFull {
        /// The replica's name.
        replica: String,
        /// The number of requests waiting.
        waiting: usize,
        /// The maximum number of requests waiting.
        limit: usize,
    },
    /// The queue does not have room for all samples of a request, so none was accepted.
    #[error("\"{replica}\" has no room for {asked} samples: {unfinished} unfinished, at most {limit}")]
    NoRoom {
        /// The replica's name.
        replica: String,
        /// The number of samples requested.
        asked: usize,
        /// The number of requests that run or wait.
        unfinished: usize,
        /// The maximum of that number: slots and queue together.
        limit: usize,
    },
    /// The replica is draining or stopped, or its device or engine failed.
    #[error("\"{replica}\" takes no requests: {why}")]
    Unavailable {
        /// The replica's name.
        replica: String,
        /// The reason.
        why: String,
    },
}

/// A batch of changes of the pages that prompts without a salt can reuse, for the followers of
/// [`Replica::follow_pages`].
#[derive(Clone, Debug)]
pub struct PageBatch {
    /// The batch number. It grows by one per batch over the replica's life and starts at 1.
    pub number: u64,
    /// When the batch was made.
    pub at: Moment,
    /// The changes, in order.
    pub changes: Arc<[PageChange]>,
}

/// Receives batches on the engine thread. It must not block. After an error nothing further is sent.
pub type PageSink = Box<dyn FnMut(PageBatch) -> Result<(), SinkClosed> + Send>;

/// The configuration of a replica, from its model and its operator.
#[derive(Clone, Debug)]
pub struct ReplicaConfig {
    /// The maximum number of requests that wait, in addition to those that have a slot.
    pub queue_limit: usize,
    /// The model's end-of-sequence ids.
    pub eos_ids: Vec<u32>,
    /// The maximum length of prompt and output together, in tokens. Reduced if the executor can hold less.
    pub context: u32,
    /// The size of the vocabulary.
    pub vocabulary: u32,
    /// Whether the prefix cache is used.
    pub prefix_cache: bool,
    /// Builds another executor when the device is lost; `None`: the replica then fails.
    pub rebuild: Option<Rebuild>,
}

/// A model on a device, or split over several: an engine thread and its executor behind a bounded inbox. Dropping it
/// aborts all requests and joins the thread.
pub struct Replica {
    /// The name, as `MODEL/INDEX`.
    pub name: String,
    /// The device that it runs on; of a split replica, the first one.
    pub device: DeviceInfo,
    /// The parts of a split replica, in the order of their devices; empty on one device.
    pub stages: Vec<ReplicaStage>,
    /// How its weights were loaded, if they were.
    pub loaded: Option<LoadReport>,
    /// The memory plan of the replica, by purpose; of a split one, the plans of all parts.
    pub memory: Vec<MemoryUse>,
    bounds: Bounds,
    /// The maximum number of unfinished requests: one per slot, and the queue.
    live_max: AtomicUsize,
    slots: usize,
    shared: Arc<Shared>,
    totals: Arc<StepTotals>,
    // Order matters: the inbox closes before the thread is joined.
    inbox: Address<Message>,
    thread: ActorThread,
}

/// The state that the handle reads without asking the engine thread. In particular, a request is accepted or refused at
/// once, because its caller is an async task.
#[derive(Debug, Default)]
struct Shared {
    gate: Mutex<Gate>,
    /// The scheduler's load, written by the engine thread once per turn.
    load: Mutex<EngineLoad>,
    /// The kernels and fallbacks of the current executor.
    variants: Mutex<Arc<Variants>>,
    /// The gaps between the tokens of each stream.
    gaps: Gaps,
    /// The device was lost and is being rebuilt.
    rebuilding: AtomicBool,
    /// How often the device was lost.
    losses: AtomicU64,
    /// The number of faults of steps without barriers, over all executors of the replica.
    faults: AtomicU64,
    /// When the engine thread last saw that number grow (`Moment`'s nanoseconds; 0: never).
    last_fault: AtomicU64,
    /// The device or the engine failed.
    failed: AtomicBool,
    /// The replica was stopped on purpose.
    stopped: AtomicBool,
}

/// Admission state. Its lock is only held for an insertion, a removal or a read.
#[derive(Debug, Default)]
struct Gate {
    /// The ids of unfinished requests, one for each sample. The handle inserts them and the engine thread removes them.
    live: BTreeSet<String>,
    /// Why no further request is accepted.
    closed: Option<String>,
}

impl Gate {
    /// Returns the ids of a request's unfinished samples.
    fn samples<'a>(&'a self, id: &'a str) -> impl Iterator<Item = &'a String> {
        let from = self.live.range::<str, _>((Bound::Included(id), Bound::Unbounded));
        from.take_while(move |live| {
            live.strip_prefix(id).is_some_and(|rest| rest.is_empty() || rest.starts_with(SAMPLE_MARK))
        })
    }
}

impl Shared {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        // Poisoning is ignored: no code panics while the lock is held, and every change is complete.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load(&self) -> MutexGuard<'_, EngineLoad> {
        // Poisoning is ignored: the value is only replaced as a whole.
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn variants(&self) -> MutexGuard<'_, Arc<Variants>> {
        // Poisoning is ignored: the value is only replaced as a whole.
        self.variants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Replica {
    /// Starts the engine thread. Fails only if the system cannot start a thread.
    pub fn spawn(
        name: impl Into<String>,
        device: DeviceInfo,
        executor: Box<dyn Executor>,
        config: ReplicaConfig,
    ) -> Result<Replica, SpawnError> {
        let name = name.into();
        let capacity = executor.capacity().clone();
        let context = config.context.min(capacity.usable_context());
        let eos_ids = config.eos_ids.clone();
        let bounds = Bounds { vocabulary: config.vocabulary, context, eos_ids, draws: capacity.causal };
        let slots = capacity.slots as usize;
        let live_max = slots + config.queue_limit;
        // Room for every request that may be unfinished, for the abort of each, and for 16 other messages, so that in
        // practice no sender waits for room.
        let (inbox, messages) = mailbox(2 * live_max + 16);
        let shared = Arc::new(Shared::default());
        shared.load().pages_total = capacity.pages;
        let mut seed = RandomState::new().hash_one(&name);
        let setup = Setup {
            capacity,
            context,
            eos_ids: config.eos_ids,
            device_name: device.name.clone(),
            device_uuid: device.uuid.clone(),
            replica: name.clone(),
            seed: split_mix(&mut seed),
            prefix_cache: config.prefix_cache,
        };
        let wake = executor.wake().clone();
        *shared.variants() = executor.variants();
        let observer = Observer::new(Instant::now());
        let totals = observer.totals();
        let actor = Actor {
            scheduler: Scheduler::new(setup),
            executor,
            wake,
            masks: Masks::default(),
            failed: None,
            rebuilds: Rebuilds::new(config.rebuild),
            earlier_faults: 0,
            clients: SequenceMap::default(),
            observer,
            reported: Vec::new(),
            done: Vec::new(),
            followers: Vec::new(),
            page_batches: 0,
            name: name.clone(),
            busy: (Duration::ZERO, Duration::ZERO),
            shared: shared.clone(),
            stopping: None,
        };
        let of_thread = Arc::clone(&shared);
        let thread = ActorThread::spawn(format!("engine {name}"), move || {
            actor.run_guarded(&messages);
            drop(messages);
            // Requests that passed the gate before it closed, but arrived after the thread's last turn.
            of_thread.gate().live.clear();
        })?;
        Ok(Replica {
            name,
            device,
            stages: Vec::new(),
            loaded: None,
            memory: Vec::new(),
            bounds,
            live_max: AtomicUsize::new(live_max),
            slots,
            shared,
            totals,
            inbox,
            thread,
        })
    }

    /// Returns the devices that it runs on, those of a split replica in the configured order.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceInfo> {
        let own = self.stages.is_empty().then_some(&self.device);
        own.into_iter().chain(self.stages.iter().map(|stage| &stage.device))
    }

    /// Returns the replica's memory plan on a device; empty if it does not run there.
    pub fn memory_on(&self, device: &DeviceInfo) -> &[MemoryUse] {
        match self.stages.iter().find(|stage| stage.device == *device) {
            Some(stage) => &stage.memory,
            None if self.stages.is_empty() && self.device == *device => &self.memory,
            None => &[],
        }
    }

    /// Returns the limits that requests are validated against.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Queues a request; events are sent to `sink` on the engine thread.
    pub fn submit(&self, request: Request, sink: Sink) -> Result<(), SubmitError> {
        self.submit_samples(request, vec![sink])
    }

    /// Queues as many samples of a request as there are sinks (see [`Request::into_samples`]), all of them or none. They
    /// arrive in one message, and their events contain their index.
    pub fn submit_samples(&self, request: Request, sinks: Vec<Sink>) -> Result<(), SubmitError> {
        request.validate(&self.bounds)?;
        let asked = sinks.len();
        let id = request.id.clone();
        self.submit_all(request.into_samples(asked as u32), sinks, |gate| gate.samples(&id).next().is_some())
    }

    /// Queues one of several inputs of a call, each with a prompt of its own. All have the call's id, by which they can
    /// be aborted together; the engine knows them under the ids of samples ([`sample_id`]).
    pub fn submit_input(&self, request: Request, input: u32, sink: Sink) -> Result<(), SubmitError> {
        request.validate(&self.bounds)?;
        let id = sample_id(&request.id, input);
        self.submit_all(vec![Request { id: id.clone(), ..request }], vec![sink], |gate| gate.live.contains(&id))
    }

    /// Queues validated requests, all or none. `taken` says whether their ids are in use.
    fn submit_all(
        &self,
        samples: Vec<Request>,
        sinks: Vec<Sink>,
        taken: impl FnOnce(&Gate) -> bool,
    ) -> Result<(), SubmitError> {
        let asked = sinks.len();
        {
            let mut gate = self.shared.gate();
            if let Some(why) = &gate.closed {
                return Err(self.unavailable(why));
            }
            if taken(&gate) {
                return Err(RequestError::DuplicateId(samples[0].id.clone()).into());
            }
            let unfinished = gate.live.len();
            let live_max = self.live_max.load(Relaxed);
            if unfinished + asked > live_max {
                let replica = self.name.clone();
                return Err(if asked == 1 {
                    // The limit may have been lowered below the number that waits already.
                    let (waiting, limit) = (unfinished.saturating_sub(self.slots), live_max - self.slots);
                    SubmitError::QueueFull { replica, waiting, limit }
                } else {
                    SubmitError::NoRoom { replica, asked, unfinished, limit: live_max }
                });
            }
            gate.live.extend(samples.iter().map(|sample| sample.id.clone()));
        }
        let at = Instant::now();
        let submissions = samples.into_iter().zip(sinks).enumerate().map(|(index, (request, sink))| {
            let sample = Sample { index: index as u32, one_of_several: asked > 1 };
            let queue = spans::queue(&request.span);
            sample.name(&queue);
            Submission { queue, request, sink, sample, at }
        });
        let sent = self.inbox.send(Message::Submit(submissions.collect()));
        sent.map_err(|_| self.unavailable("its engine thread has ended"))
    }

    /// Ends all samples of a request with `Aborted`; unknown ids are ignored.
    pub fn abort(&self, id: &str) {
        let samples: Vec<String> = self.shared.gate().samples(id).cloned().collect();
        self.end(samples);
    }

    /// Ends one sample of a request with `Aborted`; unknown ids are ignored.
    pub fn abort_sample(&self, id: &str, index: u32) {
        let id = sample_id(id, index);
        let live = self.shared.gate().live.contains(&id);
        self.end(live.then_some(id));
    }

    fn end(&self, ids: impl IntoIterator<Item = String>) {
        for id in ids {
            // If the thread has ended, so has the request.
            let _ = self.inbox.send(Message::Abort(id));
        }
    }

    /// Returns the current load.
    pub fn load(&self) -> EngineLoad {
        let live = self.shared.gate().live.len() as u32;
        let load = *self.shared.load();
        // Requests in the inbox wait as well.
        EngineLoad { waiting: live.saturating_sub(load.admitted), ..load }
    }

    /// Returns the number of requests that can run at once.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of requests that it would accept now; each sample counts. 0 while it is closed or its device
    /// is being rebuilt.
    pub fn room(&self) -> usize {
        let gate = self.shared.gate();
        if gate.closed.is_some() || self.rebuilding() {
            0
        } else {
            self.live_max.load(Relaxed).saturating_sub(gate.live.len())
        }
    }

    /// Returns the number of requests accepted and not finished.
    pub fn unfinished(&self) -> usize {
        self.shared.gate().live.len()
    }

    /// Returns why it accepts no requests; `None` if it does.
    pub fn closed(&self) -> Option<String> {
        self.shared.gate().closed.clone()
    }

    /// Whether its device or its engine has failed.
    pub fn failed(&self) -> bool {
        self.shared.failed.load(Relaxed)
    }

    /// Whether its device was lost and is being rebuilt. Requests wait meanwhile.
    pub fn rebuilding(&self) -> bool {
        self.shared.rebuilding.load(Relaxed)
    }

    /// Returns how often its device was lost.
    pub fn losses(&self) -> u64 {
        self.shared.losses.load(Relaxed)
    }

    /// Returns the number of faults while serving: how often a kernel of a step without barriers timed out while
    /// it polled for another kernel's words.
    pub fn faults(&self) -> u64 {
        self.shared.faults.load(Relaxed)
    }

    /// Returns when the engine thread last saw that number grow; `None` if there was no fault.
    pub fn last_fault(&self) -> Option<Moment> {
        let at = self.shared.last_fault.load(Relaxed);
        (at > 0).then_some(Moment(at))
    }

    /// Returns the sums over all finished plans.
    pub fn totals(&self) -> Totals {
        self.totals.read()
    }

    /// Returns the gaps between the tokens of each stream since the replica's start.
    pub fn gaps(&self) -> GapCounts {
        self.shared.gaps.read()
    }

    /// Returns the kernels that run, and counts of the fallbacks in use.
    pub fn variants(&self) -> Arc<Variants> {
        Arc::clone(&self.shared.variants())
    }

    /// Returns the last step records, at most `last` of them, oldest first.
    pub fn steps(&self, last: usize) -> Vec<StepRecord> {
        self.ask(move |actor| actor.observer.last(last))
    }

    /// Returns the step records from `number` on that are still in the ring, oldest first.
    pub fn steps_from(&self, number: u64) -> Vec<StepRecord> {
        self.ask(move |actor| actor.observer.from(number))
    }

    /// Returns the unfinished requests, oldest first, one entry per sample.
    pub fn requests(&self) -> Vec<RequestView> {
        self.ask(|actor| actor.scheduler.views(Instant::now()))
    }

    /// Times the kernels of the next `plans` plans with work (see [`Executor::profile`]). Returns the number of the
    /// next step record.
    pub fn profile(&self, plans: u32) -> u64 {
        self.ask(move |actor| {
            actor.executor.profile(plans);
            actor.observer.next_number()
        })
    }

    /// Empties the prefix cache if no request runs or waits. Returns whether it did.
    pub fn forget_prompts(&self) -> bool {
        self.ask(|actor| actor.scheduler.forget_prompts())
    }

    /// Sends the pages that prompts can reuse to `sink`: first all pages, then every change.
    pub fn follow_pages(&self, sink: PageSink) {
        self.ask(move |actor| actor.follow(sink));
    }

    /// Returns the number of tokens drawn per second over the last `window`, or over the part of it that the step ring
    /// covers.
    pub fn tokens_per_second(&self, window: Duration) -> f64 {
        self.ask(move |actor| actor.observer.tokens_per_second(Moment::now(), window))
    }

    /// Runs `question` on the engine thread and returns its answer, or the default value if the thread has ended.
    fn ask<T: Default + Send + 'static>(&self, question: impl FnOnce(&mut Actor) -> T + Send + 'static) -> T {
        let (reply, answer) = bounded(1);
        let ask = Message::Ask(Box::new(move |actor| {
            // The caller may be gone.
            let _ = reply.send(question(actor));
        }));
        match self.inbox.send(ask) {
            Ok(()) => answer.recv().unwrap_or_default(),
            Err(_) => T::default(),
        }
    }

    /// Stops accepting requests; those accepted before continue.
    pub fn drain(&self) {
        self.shared.gate().closed.get_or_insert_with(|| "it is draining".to_string());
    }

    /// Sets the maximum number of waiting requests. Requests that wait already stay. The inbox keeps the size that it
    /// got at spawn: if the limit is raised above the initial one, `submit` may have to wait for a turn of the engine
    /// thread.
    pub fn set_queue_limit(&self, limit: usize) {
        self.live_max.store(self.slots + limit, Relaxed);
    }

    /// Ends all requests and releases all resources on the device before it returns. `why` is the error that its
    /// requests end with, and that later requests are refused with.
    pub fn stop(&self, why: &str) {
        self.shared.stopped.store(true, Relaxed);
        self.shared.gate().closed = Some(why.to_owned());
        // If the thread has ended, it has released everything.
        let _ = self.inbox.send(Message::Stop(why.to_owned()));
        self.thread.join();
    }

    /// Whether it was stopped on purpose.
    pub fn stopped(&self) -> bool {
        self.shared.stopped.load(Relaxed)
    }

    fn unavailable(&self, why: &str) -> SubmitError {
        SubmitError::Unavailable { replica: self.name.clone(), why: why.to_string() }
    }
}

impl fmt::Debug for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replica").field("name", &self.name).field("device", &self.device).finish_non_exhaustive()
    }
}

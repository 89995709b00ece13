//! A replica: one model on one device. The handle that others submit requests to; its engine thread is in `thread`.

mod client;
mod masks;
pub mod observer;
pub mod rebuild;
pub mod spans;
mod thread;
pub mod totals;

use crate::actors::loader::LoadReport;
use crate::actors::mailbox::{Address, mailbox};
use crate::engine::executor::Executor;
use crate::engine::page_pool::PageChange;
use crate::engine::request::{Bounds, Request, RequestError, SAMPLE_MARK, Sink, SinkClosed, sample_id};
use crate::engine::scheduler::{Scheduler, Setup, split_mix};
use crate::engine::sequence::RequestView;
use crate::engine::sequence_map::SequenceMap;
use crate::engine::variants::Variants;
use crate::replica::client::{Sample, Submission};
use crate::replica::masks::Masks;
use crate::replica::observer::{Observer, StepRecord};
use crate::replica::rebuild::{Rebuild, Rebuilds};
use crate::replica::thread::{Actor, Message};
use crate::replica::totals::{StepTotals, Totals};
use crate::telemetry::clock::Moment;
use crossbeam_channel::bounded;
use std::collections::BTreeSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Identity of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Index among the host's adapters.
    pub index: usize,
    /// As the driver says.
    pub name: String,
    /// Lower-case hex with dashes.
    pub uuid: String,
    /// `0000:65:00.0`, where the driver tells.
    pub pci: Option<String>,
}

/// How busy a replica is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplicaLoad {
    /// Sequences that hold a slot.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// KV pages in use.
    pub pages_used: u32,
    /// KV pages in all.
    pub pages_total: u32,
    /// Free pages that a prompt may still find.
    pub pages_cached: u32,
    /// Tokens of the prompts that have started.
    pub prompt_tokens: u64,
    /// Of them found in pages.
    pub cached_tokens: u64,
    /// Sequences that lost their pages to others.
    pub preemptions: u64,
    /// Tokens that were drafted and verified.
    pub drafted_tokens: u64,
    /// Of them those that were right.
    pub accepted_tokens: u64,
    /// Snapshots of recurrent state that a prompt may find.
    pub snapshots: u32,
}

/// A line of a memory plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Whose: `MODEL/INDEX`.
    pub replica: String,
    /// What for: `weights`, `kv pages` and so on.
    pub purpose: String,
    /// Bytes.
    pub bytes: u64,
    /// In the device's own memory; else in the host's.
    pub on_device: bool,
}

/// Why a replica did not take a request.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The caller's mistake.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The queue is full.
    #[error("the queue of \"{replica}\" is full: {waiting} waiting, at most {limit}")]
    QueueFull {
        /// Which replica.
        replica: String,
        /// Requests waiting.
        waiting: usize,
        /// The bound.
        limit: usize,
    },
    /// The queue has room, but not for all samples of a request: none is taken.
    #[error("\"{replica}\" has no room for {asked} samples: {unfinished} unfinished, at most {limit}")]
    NoRoom {
        /// Which replica.
        replica: String,
        /// Samples asked for.
        asked: usize,
        /// Requests that run or wait.
        unfinished: usize,
        /// The bound: its slots and its queue.
        limit: usize,
    },
    /// The replica is draining or its device failed.
    #[error("\"{replica}\" takes no requests: {why}")]
    Unavailable {
        /// Which replica.
        replica: String,
        /// The reason.
        why: String,
    },
}

/// Changes of the pages that prompts without a salt can be found in, told to those who follow them.
#[derive(Clone, Debug)]
pub struct PageBatch {
    /// Grows by one a batch, from 1 on, over the replica's life.
    pub number: u64,
    /// When it was made.
    pub at: Moment,
    /// In order.
    pub changes: Arc<[PageChange]>,
}

/// Receives batches on the engine's thread. It must not block; after an error nothing further is sent.
pub type PageSink = Box<dyn FnMut(PageBatch) -> Result<(), SinkClosed> + Send>;

/// What a replica is told of its model and its operator's wishes.
#[derive(Clone, Debug)]
pub struct ReplicaConfig {
    /// Requests that may wait beyond those that have a slot.
    pub queue_limit: usize,
    /// The model's end-of-sequence ids.
    pub eos_ids: Vec<u32>,
    /// Longest prompt and output together, tokens; less where the executor holds less.
    pub context: u32,
    /// Vocabulary size.
    pub vocabulary: u32,
    /// Whether prompts are looked for in pages.
    pub prefix_cache: bool,
    /// What makes another executor when the device is lost; `None`: the replica fails then.
    pub rebuild: Option<Rebuild>,
}

/// A model on a device: an engine thread and its executor behind a bounded inbox. Dropped, it
/// aborts what runs and joins the thread.
pub struct Replica {
    /// `NAME/INDEX`.
    pub name: String,
    /// Where it runs.
    pub device: DeviceInfo,
    /// How its weights came there, where they did.
    pub loaded: Option<LoadReport>,
    /// What its memory was planned for.
    pub memory: Vec<MemoryUse>,
    bounds: Bounds,
    /// Requests that may be unfinished: one a slot, and the queue.
    live_max: AtomicUsize,
    slots: usize,
    shared: Arc<Shared>,
    totals: Arc<StepTotals>,
    // Order matters: the inbox closes before the thread is joined.
    inbox: Address<Message>,
    thread: JoinOnDrop,
}

/// What the handle must know at once, without asking the thread: a request is refused or taken
/// while its caller, an async task, stands by.
#[derive(Debug, Default)]
struct Shared {
    gate: Mutex<Gate>,
    /// Slots held. Written by the thread once a turn, like the next nine.
    running: AtomicU32,
    /// Unfinished requests that have left the queue.
    admitted: AtomicU32,
    pages_used: AtomicU32,
    pages_cached: AtomicU32,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    preemptions: AtomicU64,
    drafted_tokens: AtomicU64,
    accepted_tokens: AtomicU64,
    snapshots: AtomicU32,
    /// Written once, at spawn.
    pages_total: AtomicU32,
    /// Of the executor.
    variants: Mutex<Arc<Variants>>,
    /// The device was lost, and is being built anew.
    rebuilding: AtomicBool,
    /// How often it was lost.
    losses: AtomicU64,
    /// Faults of decode steps without barriers, over all executors that it had, and when the last one was told
    /// (`Moment`'s nanoseconds; 0: never).
    faults: AtomicU64,
    /// As `faults` says.
    last_fault: AtomicU64,
    /// The device or the engine failed.
    failed: AtomicBool,
    /// It was stopped on purpose.
    stopped: AtomicBool,
}

/// Held for an insertion, a removal or a look.
#[derive(Debug, Default)]
struct Gate {
    /// Ids of unfinished requests, each sample's its own: entered by the handle, removed by the thread.
    live: BTreeSet<String>,
    /// Why no request is taken any more.
    closed: Option<String>,
}

impl Gate {
    /// The unfinished samples of a request.
    fn samples<'a>(&'a self, id: &'a str) -> impl Iterator<Item = &'a String> {
        let from = self.live.range::<str, _>((Bound::Included(id), Bound::Unbounded));
        from.take_while(move |live| {
            live.strip_prefix(id).is_some_and(|rest| rest.is_empty() || rest.starts_with(SAMPLE_MARK))
        })
    }
}

impl Shared {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        // No panic happens while it is held, and each change of it is whole.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn variants(&self) -> MutexGuard<'_, Arc<Variants>> {
        // It is replaced as a whole.
        self.variants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Replica {
    /// Starts the engine thread. Fails only where the system has no thread to give.
    pub fn spawn(
        name: impl Into<String>,
        device: DeviceInfo,
        executor: Box<dyn Executor>,
        config: ReplicaConfig,
    ) -> std::io::Result<Replica> {
        let name = name.into();
        let capacity = executor.capacity().clone();
        let context = config.context.min(capacity.usable_context());
        let bounds = Bounds { vocabulary: config.vocabulary, context, eos_ids: config.eos_ids.clone() };
        let slots = capacity.slots as usize;
        let live_max = slots + config.queue_limit;
        // A place for every request that may be unfinished, one for the abort of each, and some
        // for the curious: so nobody waits for one in practice.
        let (inbox, messages) = mailbox(2 * live_max + 16);
        let shared = Arc::new(Shared::default());
        shared.pages_total.store(capacity.pages, Relaxed);
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
            done: Vec::new(),
            followers: Vec::new(),
            page_batches: 0,
            name: name.clone(),
            busy: (Duration::ZERO, Duration::ZERO),
            shared: shared.clone(),
            stopping: None,
        };
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("engine {name}")).spawn(move || {
            actor.run_guarded(&messages);
            drop(messages);
            // Those that passed the gate before it was closed, and came too late.
            of_thread.gate().live.clear();
        })?;
        Ok(Replica {
            name,
            device,
            loaded: None,
            memory: Vec::new(),
            bounds,
            live_max: AtomicUsize::new(live_max),
            slots,
            shared,
            totals,
            inbox,
            thread: JoinOnDrop(Mutex::new(Some(thread))),
        })
    }

    /// What requests are validated against.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Queues a request; events arrive at `sink` on the engine's thread.
    pub fn submit(&self, request: Request, sink: Sink) -> Result<(), SubmitError> {
        self.submit_samples(&request, vec![sink])
    }

    /// Queues as many samples of a request as there are sinks (see [`Request::sample`]), all of them or none. They
    /// arrive together, and their events name them by index.
    pub fn submit_samples(&self, request: &Request, sinks: Vec<Sink>) -> Result<(), SubmitError> {
        request.validate(&self.bounds)?;
        let asked = sinks.len();
        let samples: Vec<Request> = (0..asked).map(|index| request.sample(index as u32)).collect();
        {
            let mut gate = self.shared.gate();
            if let Some(why) = &gate.closed {
                return Err(self.unavailable(why));
            }
            if gate.samples(&request.id).next().is_some() {
                return Err(RequestError::DuplicateId(request.id.clone()).into());
            }
            let unfinished = gate.live.len();
            let live_max = self.live_max.load(Relaxed);
            if unfinished + asked > live_max {
                let replica = self.name.clone();
                return Err(if asked == 1 {
                    // The limit may have been lowered below what waits.
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

    /// Ends all samples of a request; unknown ids are ignored. Their `Finished` say `Aborted`.
    pub fn abort(&self, id: &str) {
        let samples: Vec<String> = self.shared.gate().samples(id).cloned().collect();
        self.end(samples);
    }

    /// Ends one sample of the request of this id, as [`Replica::abort`] does with all.
    pub fn abort_sample(&self, id: &str, index: u32) {
        let id = sample_id(id, index);
        let live = self.shared.gate().live.contains(&id);
        self.end(live.then_some(id));
    }

    fn end(&self, ids: impl IntoIterator<Item = String>) {
        for id in ids {
            // A thread that has ended has ended the request too.
            let _ = self.inbox.send(Message::Abort(id));
        }
    }

    /// How busy it is now.
    pub fn load(&self) -> ReplicaLoad {
        let live = self.shared.gate().live.len() as u32;
        ReplicaLoad {
            running: self.shared.running.load(Relaxed),
            waiting: live.saturating_sub(self.shared.admitted.load(Relaxed)),
            pages_used: self.shared.pages_used.load(Relaxed),
            pages_total: self.shared.pages_total.load(Relaxed),
            pages_cached: self.shared.pages_cached.load(Relaxed),
            snapshots: self.shared.snapshots.load(Relaxed),
            prompt_tokens: self.shared.prompt_tokens.load(Relaxed),
            cached_tokens: self.shared.cached_tokens.load(Relaxed),
            preemptions: self.shared.preemptions.load(Relaxed),
            drafted_tokens: self.shared.drafted_tokens.load(Relaxed),
            accepted_tokens: self.shared.accepted_tokens.load(Relaxed),
        }
    }

    /// Requests that run at once.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Requests that it would take now, and could begin with; a request's samples count each.
    pub fn room(&self) -> usize {
        let gate = self.shared.gate();
        if gate.closed.is_some() || self.rebuilding() {
            0
        } else {
            self.live_max.load(Relaxed).saturating_sub(gate.live.len())
        }
    }

    /// Requests taken and not finished.
    pub fn unfinished(&self) -> usize {
        self.shared.gate().live.len()
    }

    /// Why it takes no requests, if so.
    pub fn closed(&self) -> Option<String> {
        self.shared.gate().closed.clone()
    }

    /// Whether its device or its engine has failed.
    pub fn failed(&self) -> bool {
        self.shared.failed.load(Relaxed)
    }

    /// Whether its device was lost and is being built anew. Requests wait meanwhile.
    pub fn rebuilding(&self) -> bool {
        self.shared.rebuilding.load(Relaxed)
    }

    /// How often its device was lost.
    pub fn losses(&self) -> u64 {
        self.shared.losses.load(Relaxed)
    }

    /// Faults while serving: how often a kernel of a decode step without barriers waited in vain for another's words.
    pub fn faults(&self) -> u64 {
        self.shared.faults.load(Relaxed)
    }

    /// When the last of them was told.
    pub fn last_fault(&self) -> Option<Moment> {
        let at = self.shared.last_fault.load(Relaxed);
        (at > 0).then_some(Moment(at))
    }

    /// What all its finished plans were like together.
    pub fn totals(&self) -> Totals {
        self.totals.read()
    }

    /// Which kernels run, and the slower ways that are taken.
    pub fn variants(&self) -> Arc<Variants> {
        Arc::clone(&self.shared.variants())
    }

    /// The last steps, oldest first, at most `last`.
    pub fn steps(&self, last: usize) -> Vec<StepRecord> {
        self.ask(move |actor| actor.observer.last(last))
    }

    /// The steps from `number` on that are kept, oldest first.
    pub fn steps_from(&self, number: u64) -> Vec<StepRecord> {
        self.ask(move |actor| actor.observer.from(number))
    }

    /// Requests that are not finished, oldest first, each sample by itself.
    pub fn requests(&self) -> Vec<RequestView> {
        self.ask(|actor| actor.scheduler.views(Instant::now()))
    }

    /// Times the kernels of the next `plans` plans with work (see [`Executor::profile`]); gives the number of the next
    /// step record.
    pub fn profile(&self, plans: u32) -> u64 {
        self.ask(move |actor| {
            actor.executor.profile(plans);
            actor.observer.next_number()
        })
    }

    /// Forgets all that a prompt could begin with, if no request runs or waits; whether it did.
    pub fn forget_prompts(&self) -> bool {
        self.ask(|actor| actor.scheduler.forget_prompts())
    }

    /// Tells `sink` what prompts can be found in: all pages first, then what changes.
    pub fn follow_pages(&self, sink: PageSink) {
        self.ask(move |actor| actor.follow(sink));
    }

    /// Tokens drawn a second, over the last `window` or as much of it as the step ring holds.
    pub fn tokens_per_second(&self, window: Duration) -> f64 {
        self.ask(move |actor| actor.observer.tokens_per_second(Moment::now(), window))
    }

    /// Asks the thread; a thread that has ended has nothing to tell.
    fn ask<T: Default + Send + 'static>(&self, question: impl FnOnce(&mut Actor) -> T + Send + 'static) -> T {
        let (reply, answer) = bounded(1);
        let ask = Message::Ask(Box::new(move |actor| {
            // Whoever asked may have gone.
            let _ = reply.send(question(actor));
        }));
        match self.inbox.send(ask) {
            Ok(()) => answer.recv().unwrap_or_default(),
            Err(_) => T::default(),
        }
    }

    /// Stops taking requests; those taken go on.
    pub fn drain(&self) {
        self.shared.gate().closed.get_or_insert_with(|| "it is draining".to_string());
    }

    /// Requests that may wait from now on. Those that wait already stay, and where more may than at its start, whoever
    /// submits one may have to wait for a turn of the engine's thread.
    pub fn set_queue_limit(&self, limit: usize) {
        self.live_max.store(self.slots + limit, Relaxed);
    }

    /// Ends what runs, and gives back all that it has of its device: nothing of it is left when this returns. `why` is
    /// what its requests end with, and what later ones are refused with.
    pub fn stop(&self, why: &str) {
        self.shared.stopped.store(true, Relaxed);
        self.shared.gate().closed = Some(why.to_owned());
        // A thread that has ended has given everything back.
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

#[derive(Debug)]
struct JoinOnDrop(Mutex<Option<JoinHandle<()>>>);

impl JoinOnDrop {
    fn join(&self) {
        // Held while it is joined: whoever comes second returns after the end too.
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // A panic was logged where it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for JoinOnDrop {
    fn drop(&mut self) {
        self.join();
    }
}

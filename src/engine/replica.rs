//! A model on a device: the engine thread, which owns the scheduler, the executor and the
//! requests' sinks, and steps the one with the other. It never blocks on a client, and it knows
//! neither text nor tokio.

use super::by_age::ByAge;
use super::executor::{ExecuteError, Executor};
use super::host::{DeviceInfo, Load, MemoryUse, RequestView, StepRecord, SubmitError};
use super::masks::{Answer, Masks};
pub use super::observe::STEP_RING;
use super::observe::{Observer, Reported};
use super::pages::PageChange;
use super::rebuild::{Absent, Built, Rebuild, Rebuilds};
use super::request::{
    Bounds, Event, FinishReason, Finished, PerToken, Request, RequestError, SAMPLE_MARK, Sink, SinkClosed, Timings,
    sample_id,
};
use super::scheduler::{Order, Output, Scheduler, Setup, split_mix};
use super::sequence::SequenceId;
use super::spans;
use super::totals::{StepTotals, Totals};
use super::variants::Variants;
use crate::actors::loader::LoadReport;
use crate::actors::mailbox::{Address, Mailbox, mailbox};
use crate::telemetry::clock::Moment;
use crate::telemetry::spans::{SpanName, exports};
use crate::telemetry::with_causes;
use crossbeam_channel::{Receiver, after, bounded, never, select};
use std::collections::BTreeSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
            clients: ByAge::default(),
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
    pub fn load(&self) -> Load {
        let live = self.shared.gate().live.len() as u32;
        Load {
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

/// Which sample of its request it is.
#[derive(Clone, Copy)]
struct Sample {
    index: u32,
    one_of_several: bool,
}

impl Sample {
    /// Writes it to one of its spans, where there are others that it could be taken for.
    fn name(self, span: &tracing::Span) {
        if self.one_of_several {
            spans::sample(span, self.index);
        }
    }
}

struct Submission {
    request: Request,
    sample: Sample,
    sink: Sink,
    /// The request's `queue` span, open.
    queue: tracing::Span,
    at: Instant,
}

enum Message {
    /// The samples of one request.
    Submit(Vec<Submission>),
    Abort(String),
    /// To look at something, or ask for something, between two turns.
    Ask(Box<dyn FnOnce(&mut Actor) + Send>),
    /// To end every request with this reason, and then the thread.
    Stop(String),
}

enum Wake {
    Message(Message),
    Device,
    Mask(Answer),
    /// What the attempt at another executor came to.
    Built(Built),
    Deadline,
    /// The handle is gone.
    Closed,
    /// The executor's wake channel is gone.
    DeviceGone,
}

/// Who asked, and hears of it.
struct Client {
    id: String,
    /// The same, for records.
    name: Arc<str>,
    sample: Sample,
    sink: Sink,
    /// The sink has failed: nothing further is sent.
    gone: bool,
    request: tracing::Span,
    /// `queue`, `prefill` or `decode`.
    phase: tracing::Span,
    prompt_tokens: u32,
    output_tokens: u32,
    /// Its request's span, where its trace is exported.
    traced: Option<SpanName>,
    /// Finished plans that it had rows in.
    plans: u32,
    /// Faults of those plans: in all, and in its present phase.
    faults: (u32, u32),
}

struct Actor {
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    wake: Receiver<()>,
    masks: Masks,
    /// Why the executor is not used any more.
    failed: Option<String>,
    rebuilds: Rebuilds,
    /// Faults of the executors before this one.
    earlier_faults: u64,
    /// From submission until `Finished`.
    clients: ByAge<Client>,
    observer: Observer,
    /// Plans that were finished in this turn: their records' numbers, and whom they were for.
    done: Vec<(u64, Vec<SequenceId>)>,
    /// Who follows the pages; and the number of the last batch.
    followers: Vec<PageSink>,
    page_batches: u64,
    /// `MODEL/INDEX`.
    name: String,
    shared: Arc<Shared>,
    /// Time that this thread has worked, and handed tokens out, and no step was charged with.
    busy: (Duration, Duration),
    /// It ends with this turn, and why.
    stopping: Option<String>,
}

impl Actor {
    /// Runs until the handle is gone. A panic ends every request with an error first: a client
    /// must not wait for a thread that is no more.
    fn run_guarded(mut self, inbox: &Mailbox<Message>) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run(inbox)));
        if outcome.is_ok() {
            return;
        }
        let why = "its engine thread has panicked".to_string();
        tracing::error!("{why}");
        self.shared.failed.store(true, Relaxed);
        self.shared.gate().closed = Some(why.clone());
        for id in self.clients.ids() {
            let Some(client) = self.clients.remove(id) else { continue };
            self.shared.gate().live.remove(&client.id);
            client.end(FinishReason::Error(why.clone()));
        }
        self.followers.clear();
        // Some may have passed the gate before it was closed, and none may wait in vain.
        self.failed = Some(why);
        for message in inbox.iter() {
            if matches!(message, Message::Stop(_)) {
                return;
            }
            self.take(message);
        }
    }

    fn run(&mut self, inbox: &Mailbox<Message>) {
        loop {
            match self.next_wake(inbox) {
                Wake::Message(message) => {
                    self.take(message);
                    // All of one turn's arrivals and aborts are planned for together.
                    while let Ok(message) = inbox.try_recv() {
                        self.take(message);
                    }
                }
                Wake::Mask(answer) => self.constrained(answer),
                Wake::Built(built) => self.rebuilt(built),
                Wake::Device | Wake::Deadline => {}
                Wake::DeviceGone => self.fail(&ExecuteError::Failed("the executor has gone".to_string())),
                Wake::Closed => break,
            }
            if let Some(why) = self.stopping.take() {
                self.scheduler.fail(&why, Instant::now());
                self.failed = Some(why);
                // Some may have passed the gate before it was closed.
                inbox.try_iter().for_each(|message| self.take(message));
                break;
            }
            self.turn();
        }
        let now = Instant::now();
        for id in self.clients.ids() {
            self.scheduler.abort_sequence(id, now);
        }
        self.deliver();
        self.publish();
    }

    fn next_wake(&self, inbox: &Mailbox<Message>) -> Wake {
        let deadline = match self.scheduler.next_deadline() {
            Some(deadline) => after(deadline.saturating_duration_since(Instant::now())),
            None => never(),
        };
        let device = if self.failed.is_none() { self.wake.clone() } else { never() };
        select! {
            recv(**inbox) -> message => message.map_or(Wake::Closed, Wake::Message),
            recv(device) -> woken => woken.map_or(Wake::DeviceGone, |()| Wake::Device),
            recv(deadline) -> _ => Wake::Deadline,
            // The sender is this thread's own too.
            recv(self.masks.answers()) -> answer => answer.map_or(Wake::Device, Wake::Mask),
            recv(self.rebuilds.built()) -> built => built.map_or(Wake::Device, Wake::Built),
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Submit(submissions) => {
                for submission in submissions {
                    self.arrive(submission);
                }
            }
            // What has failed has ended all it knew.
            Message::Abort(_) if self.failed.is_some() => {}
            Message::Abort(id) => self.scheduler.abort(&id, Instant::now()),
            Message::Ask(question) => question(self),
            Message::Stop(why) => self.stopping = Some(why),
        }
    }

    fn arrive(&mut self, submission: Submission) {
        if let Some(why) = &self.failed {
            // It passed the gate before that was closed.
            let why = why.clone();
            self.shared.gate().live.remove(&submission.request.id);
            Client::new(submission).1.end(FinishReason::Error(why));
            return;
        }
        let at = submission.at;
        let (request, client) = Client::new(submission);
        let id = self.scheduler.arrive(request, at);
        self.clients.insert(id, client);
    }

    /// Takes in what the device says, gives it what is next, and only then tells the clients.
    fn turn(&mut self) {
        loop {
            let start = Instant::now();
            if self.failed.is_none()
                && let Err(error) = self.advance()
            {
                self.lose(error);
            }
            self.export_steps();
            self.publish();
            let planned = Instant::now();
            self.busy.0 += planned - start;
            let again = self.deliver();
            self.busy.1 += planned.elapsed();
            if !again {
                self.tell_followers();
                return;
            }
        }
    }

    /// The state as of the last batch is the new follower's first, under a number of its own: who has followed before
    /// and missed some sees that.
    fn follow(&mut self, mut sink: PageSink) {
        self.tell_followers();
        self.page_batches += 1;
        let cleared = [PageChange::Cleared].into_iter();
        let stored = self.scheduler.pool().contents().into_iter().map(PageChange::Stored);
        let all: Arc<[PageChange]> = cleared.chain(stored).collect();
        let number = self.page_batches;
        let batch = |changes| PageBatch { number, at: Moment::now(), changes };
        // Numbers have no gap for the others.
        self.followers.retain_mut(|follower| follower(batch(Arc::from([]))).is_ok());
        if sink(batch(all)).is_ok() {
            self.followers.push(sink);
        }
        self.scheduler.pool().watch(!self.followers.is_empty());
    }

    fn tell_followers(&mut self) {
        if self.followers.is_empty() {
            return;
        }
        let changes: Arc<[PageChange]> = self.scheduler.pool().take_changes().into();
        if changes.is_empty() {
            return;
        }
        self.page_batches += 1;
        let batch = PageBatch { number: self.page_batches, at: Moment::now(), changes };
        self.followers.retain_mut(|follower| follower(batch.clone()).is_ok());
        self.scheduler.pool().watch(!self.followers.is_empty());
    }

    fn advance(&mut self) -> Result<(), ExecuteError> {
        while self.wake.try_recv().is_ok() {}
        for mut progress in self.executor.poll()? {
            let now = Instant::now();
            if progress.steps > 0 {
                let (scheduling, delivering) = std::mem::take(&mut self.busy);
                progress.cost.schedule_us = scheduling.as_secs_f64() * 1e6;
                progress.cost.deliver_us = delivering.as_secs_f64() * 1e6;
            }
            let reported = Reported::of(&mut progress);
            let faults = progress.faults;
            if let Some(completed) = self.scheduler.progress(progress, now) {
                let clients = &self.clients;
                let name = |id| clients.get(id).map(|client| Arc::clone(&client.name));
                let done = self.observer.reported(reported, completed, self.scheduler.counts(), name);
                if faults > 0 {
                    for id in done.iter().flat_map(|(_, sequences)| sequences) {
                        self.clients.get_mut(*id).into_iter().for_each(|client| client.note_faults(faults));
                    }
                }
                // Nobody else asks whom a plan was for.
                self.done.extend(done.filter(|_| exports()));
            }
        }
        while let Ok(answer) = self.masks.answers().try_recv() {
            self.constrained(answer);
        }
        let now = Instant::now();
        self.scheduler.expire(now);
        self.scheduler.give_up_late_masks(now);
        self.obey()?;
        if self.rebuilds.under_way() {
            return Ok(());
        }
        while let Some(plan) = self.scheduler.next_plan(Instant::now(), self.executor.pace()) {
            let sequences = plan.slots().filter_map(|slot| self.scheduler.holder_id(slot)).collect();
            let works = plan.work.is_some();
            let planned = Moment::now();
            let ticket = self.executor.submit(plan)?;
            self.scheduler.submitted(ticket);
            if works {
                self.observer.planned(ticket, planned, sequences);
            }
        }
        self.obey()
    }

    fn constrained(&mut self, Answer { id, grammar, next }: Answer) {
        if self.failed.is_none() {
            self.scheduler.constrained(id, grammar, next, Instant::now());
        }
    }

    /// Does what the scheduler wants about constraints.
    fn obey(&mut self) -> Result<(), ExecuteError> {
        for order in self.scheduler.take_orders() {
            match order {
                Order::Take(id, grammar, token) => self.masks.take(id, grammar, token),
                Order::Mask(slot, mask) => self.executor.set_mask(slot, &mask),
                Order::Release(ticket) => self.executor.release(ticket)?,
            }
        }
        Ok(())
    }

    /// Exports the plans of this turn that someone's trace shows: after the device has its next work, and before
    /// their clients hear of the end.
    fn export_steps(&mut self) {
        for (number, sequences) in self.done.drain(..) {
            let mut shown = Vec::new();
            let faulted = self.observer.record(number).is_some_and(|record| record.faults > 0);
            for id in sequences {
                let Some(client) = self.clients.get_mut(id) else { continue };
                let index = client.plans;
                client.plans += 1;
                if client.traced.is_some() && (faulted || spans::shows_step(index)) {
                    shown.push(id);
                }
            }
            let Some(record) = self.observer.record(number).filter(|_| !shown.is_empty()) else { continue };
            let clients = &self.clients;
            let traced = |id: &SequenceId| {
                let client = clients.get(*id)?;
                Some(spans::Traced { request: client.traced.clone()?, phase: &client.phase })
            };
            let traced: Vec<spans::Traced<'_>> = shown.iter().filter_map(traced).collect();
            spans::step(record, &self.name, &traced);
        }
    }

    /// The executor failed: if that is because the device is lost, another one is built, and who ran goes on with it.
    fn lose(&mut self, error: ExecuteError) {
        if !matches!(error, ExecuteError::DeviceLost { .. }) {
            return self.fail(&error);
        }
        self.shared.losses.fetch_add(1, Relaxed);
        let how = match self.rebuilds.lost(Instant::now()) {
            Ok(how) => how,
            Err(given_up) => {
                tracing::error!(replica = self.name, %given_up, "the device is not built anew");
                return self.fail(&error);
            }
        };
        let absent = Absent::new(self.executor.capacity().clone());
        self.wake = absent.wake().clone();
        let lost = std::mem::replace(&mut self.executor, Box::new(absent));
        self.earlier_faults += lost.faults();
        if let Err(no_thread) = self.rebuilds.begin(&self.name, how, lost) {
            tracing::error!(replica = self.name, %no_thread, "the device is not built anew");
            return self.fail(&error);
        }
        let why = with_causes(&error);
        tracing::error!(replica = self.name, error = %why, "the device is lost, and built anew");
        self.shared.rebuilding.store(true, Relaxed);
        self.scheduler.restart(&why, Instant::now());
        self.observer.forget_open();
    }

    fn rebuilt(&mut self, built: Built) {
        self.rebuilds.ended();
        self.shared.rebuilding.store(false, Relaxed);
        match built {
            Ok(executor) => {
                tracing::info!(replica = self.name, "the device is there again");
                self.wake = executor.wake().clone();
                *self.shared.variants() = executor.variants();
                self.executor = executor;
            }
            Err(error) => {
                let error = with_causes(&*error);
                self.fail(&ExecuteError::Failed(format!("its device was lost and could not be built anew: {error}")));
            }
        }
    }

    /// The device failed: every request ends, and none is taken any more.
    fn fail(&mut self, error: &ExecuteError) {
        let why = with_causes(error);
        tracing::error!(error = %why, "the executor has failed");
        self.shared.failed.store(true, Relaxed);
        self.shared.gate().closed = Some(why.clone());
        self.scheduler.fail(&why, Instant::now());
        self.failed = Some(why);
    }

    /// Hands out what the scheduler has said; whether a sink failed, so that there is more to do.
    fn deliver(&mut self) -> bool {
        let mut gone = Vec::new();
        for output in self.scheduler.take_outputs() {
            let (id, event) = match output {
                Output::Prefilled(id, cost) | Output::Decoded(id, cost) => {
                    if let Some(client) = self.clients.get(id) {
                        spans::record(&client.phase, &cost);
                    }
                    continue;
                }
                Output::Event(id, event) => (id, event),
            };
            if matches!(event, Event::Finished(_)) {
                // The id is free before its user hears of the end.
                if let Some(client) = self.clients.remove(id) {
                    self.shared.gate().live.remove(&client.id);
                    client.finish(event);
                }
            } else if let Some(client) = self.clients.get_mut(id)
                && !client.tell(event)
            {
                gone.push(id);
            }
        }
        let now = Instant::now();
        for &id in &gone {
            self.scheduler.abort_sequence(id, now);
        }
        !gone.is_empty()
    }

    fn publish(&self) {
        let counts = self.scheduler.counts();
        self.shared.running.store(counts.running, Relaxed);
        self.shared.admitted.store(counts.admitted, Relaxed);
        self.shared.pages_used.store(counts.pages_used, Relaxed);
        self.shared.pages_cached.store(counts.pages_cached, Relaxed);
        self.shared.snapshots.store(counts.snapshots, Relaxed);
        self.shared.prompt_tokens.store(counts.prompt_tokens, Relaxed);
        self.shared.cached_tokens.store(counts.cached_tokens, Relaxed);
        self.shared.preemptions.store(counts.preemptions, Relaxed);
        self.shared.drafted_tokens.store(counts.drafted_tokens, Relaxed);
        self.shared.accepted_tokens.store(counts.accepted_tokens, Relaxed);
        let faults = self.earlier_faults + self.executor.faults();
        if self.shared.faults.swap(faults, Relaxed) < faults {
            self.shared.last_fault.store(Moment::now().0, Relaxed);
        }
    }
}

impl Client {
    fn new(submission: Submission) -> (Request, Client) {
        let Submission { request, sample, sink, queue, .. } = submission;
        let client = Client {
            id: request.id.clone(),
            name: request.id.as_str().into(),
            sample,
            sink,
            gone: false,
            request: request.span.clone(),
            phase: queue,
            prompt_tokens: request.prompt.len() as u32,
            output_tokens: 0,
            traced: SpanName::of(&request.span),
            plans: 0,
            faults: (0, 0),
        };
        (request, client)
    }

    /// Hands an event on; false if the client has just gone.
    fn tell(&mut self, mut event: Event) -> bool {
        match &mut event {
            Event::Started(_) => {
                self.begin(spans::prefill(&self.request));
                self.sample.name(&self.phase);
            }
            Event::Token(token) => {
                token.index = self.sample.index;
                if self.output_tokens == 0 {
                    self.begin(spans::decode(&self.request));
                    self.sample.name(&self.phase);
                }
                self.output_tokens += 1;
            }
            Event::Prompt(_) | Event::Finished(_) => {}
        }
        if self.gone {
            return true;
        }
        self.gone = (self.sink)(event).is_err();
        !self.gone
    }

    /// Steps of a plan that it had rows in drew nothing at first.
    fn note_faults(&mut self, faults: u32) {
        self.faults.0 += faults;
        self.faults.1 += faults;
    }

    /// The present phase ends, and `next` begins.
    fn begin(&mut self, next: tracing::Span) {
        spans::faults(&self.phase, std::mem::take(&mut self.faults.1));
        self.phase = next;
    }

    fn finish(mut self, mut event: Event) {
        if let Event::Finished(finished) = &mut event {
            finished.index = self.sample.index;
        }
        // The spans end before the client hears of it.
        self.begin(tracing::Span::none());
        // Samples share the span: their phases say it.
        if !self.sample.one_of_several {
            spans::faults(&self.request, self.faults.0);
        }
        self.request = tracing::Span::none();
        if !self.gone {
            // Nothing follows, whether it is heard or not.
            let _ = (self.sink)(event);
        }
    }

    /// Ends a request that the scheduler does not know (any more).
    fn end(self, reason: FinishReason) {
        let finished = Finished {
            index: 0,
            reason,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: 0,
            output_tokens: self.output_tokens,
            drafted_tokens: 0,
            accepted_tokens: 0,
            timings: Timings::default(),
            per_token: PerToken::default(),
        };
        self.finish(Event::Finished(Box::new(finished)));
    }
}

//! The engine thread of a replica. It owns the scheduler, the executor and the requests' sinks, submits the scheduler's
//! plans to the executor, and gives the executor's reports to the scheduler. It never blocks on a client.
//! Not here: text, tokio, and what runs next (`engine::scheduler`).

use crate::actors::mailbox::Mailbox;
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::page_pool::PageChange;
use crate::engine::request::{Event, FinishReason};
use crate::engine::scheduler::{Completed, ConstraintCommand, EngineLoad, Scheduler, SchedulerOutput};
use crate::engine::sequence::SequenceId;
use crate::engine::sequence_map::SequenceMap;
use crate::replica::client::{Client, Submission};
use crate::replica::masks::{Answer, Masks};
use crate::replica::observer::{Observer, Reported};
use crate::replica::rebuild::{Absent, Built, Rebuilds};
use crate::replica::spans;
use crate::replica::{PageBatch, PageSink, Shared};
use crate::telemetry::clock::Moment;
use crate::telemetry::spans::exports;
use crate::telemetry::with_causes;
use crossbeam_channel::{Receiver, after, never, select};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

pub(super) enum Message {
    /// The samples of one request.
    Submit(Vec<Submission>),
    Abort(String),
    /// Runs a function on the thread's state between two turns.
    Ask(Box<dyn FnOnce(&mut Actor) + Send>),
    /// Ends every request with this reason, and then the thread.
    Stop(String),
}

enum Wake {
    Message(Message),
    Device,
    Mask(Answer),
    /// The result of an attempt to build another executor.
    Built(Built),
    Deadline,
    /// The handle was dropped.
    Closed,
    /// The executor's wake channel was closed.
    DeviceGone,
}

pub(super) struct Actor {
    pub(super) scheduler: Scheduler,
    pub(super) executor: Box<dyn Executor>,
    pub(super) wake: Receiver<()>,
    pub(super) masks: Masks,
    /// Why the executor is no longer used.
    pub(super) failed: Option<String>,
    pub(super) rebuilds: Rebuilds,
    /// The number of faults of all previous executors.
    pub(super) earlier_faults: u64,
    /// The clients by sequence, from submission until `Finished`.
    pub(super) clients: SequenceMap<Client>,
    pub(super) observer: Observer,
    /// The reports of this turn that the observer has not taken: the steps that they complete, and the load then.
    pub(super) reported: Vec<(Reported, Completed, EngineLoad)>,
    /// The plans that were finished in this turn: the numbers of their records, and their sequences.
    pub(super) done: Vec<(u64, Vec<SequenceId>)>,
    /// The followers of the page changes, and the number of the last batch.
    pub(super) followers: Vec<PageSink>,
    pub(super) page_batches: u64,
    /// The replica's name, as `MODEL/INDEX`.
    pub(super) name: String,
    pub(super) shared: Arc<Shared>,
    /// The time that this thread has spent until the device had its next work, and after that, and that is not charged to
    /// a step yet.
    pub(super) busy: (Duration, Duration),
    /// Why the thread ends with this turn, if it does.
    pub(super) stopping: Option<String>,
}

impl Actor {
    /// Runs until the handle is dropped. After a panic it ends every request with an error, because no client may wait
    /// for a thread that does not run.
    pub(super) fn run_guarded(mut self, inbox: &Mailbox<Message>) {
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
        // Requests may have passed the gate before it closed; their clients must not wait forever.
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
                    // Take all messages that are there, so that they are planned for together.
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
                // Requests may have passed the gate before it closed.
                inbox.try_iter().for_each(|message| self.take(message));
                break;
            }
            self.turn();
        }
        let now = Instant::now();
        for id in self.clients.ids() {
            self.scheduler.abort_sequence(id, now);
        }
        self.deliver(now);
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
            // This thread also holds a sender, so the channel never closes.
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
            // A failure has ended all known requests.
            Message::Abort(_) if self.failed.is_some() => {}
            Message::Abort(id) => self.scheduler.abort(&id, Instant::now()),
            Message::Ask(question) => question(self),
            Message::Stop(why) => self.stopping = Some(why),
        }
    }

    fn arrive(&mut self, submission: Submission) {
        if let Some(why) = &self.failed {
            // The request passed the gate before it closed.
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

    /// One turn: takes the executor's reports, submits the next plans, and only then sends events to the clients.
    fn turn(&mut self) {
        loop {
            let start = Instant::now();
            let advanced = if self.failed.is_none() { self.advance() } else { Ok(()) };
            let planned = Instant::now();
            self.busy.0 += planned - start;
            self.observe();
            if let Err(error) = advanced {
                self.lose(error);
            }
            self.export_steps();
            self.publish();
            let again = self.deliver(planned);
            self.busy.1 += planned.elapsed();
            if !again {
                self.tell_followers();
                return;
            }
        }
    }

    /// Adds a follower. Its first batch is the state as of the last batch, with a number of its own, so that a follower
    /// that subscribes again and has missed batches can notice that.
    pub(super) fn follow(&mut self, mut sink: PageSink) {
        self.tell_followers();
        self.page_batches += 1;
        let cleared = [PageChange::Cleared].into_iter();
        let stored = self.scheduler.pool().contents().into_iter().map(PageChange::Stored);
        let all: Arc<[PageChange]> = cleared.chain(stored).collect();
        let number = self.page_batches;
        let batch = |changes| PageBatch { number, at: Moment::now(), changes };
        // The other followers get an empty batch with this number, so that their numbers have no gap.
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
            if let Some(completed) = self.scheduler.progress(progress, now) {
                self.reported.push((reported, completed, self.scheduler.load()));
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

    /// Gives the observer the reports of this turn. This happens after the device has its next work.
    fn observe(&mut self) {
        for (reported, completed, load) in self.reported.drain(..) {
            let faults = reported.faults();
            let clients = &self.clients;
            let name = |id| clients.get(id).map(|client| Arc::clone(&client.name));
            let done = self.observer.reported(reported, completed, load, name);
            if faults > 0 {
                for id in done.iter().flat_map(|(_, sequences)| sequences) {
                    self.clients.get_mut(*id).into_iter().for_each(|client| client.note_faults(faults));
                }
            }
            // Only the export needs to know the sequences of a plan.
            self.done.extend(done.filter(|_| exports()));
        }
    }

    fn constrained(&mut self, Answer { id, grammar, next }: Answer) {
        if self.failed.is_none() {
            self.scheduler.constrained(id, grammar, next, Instant::now());
        }
    }

    /// Carries out the scheduler's commands concerning constraints.
    fn obey(&mut self) -> Result<(), ExecuteError> {
        for command in self.scheduler.take_commands() {
            match command {
                ConstraintCommand::Take(id, grammar, token) => self.masks.take(id, grammar, token),
                ConstraintCommand::Mask(slot, mask) => self.executor.set_mask(slot, &mask),
                ConstraintCommand::Release(ticket) => self.executor.release(ticket)?,
            }
        }
        Ok(())
    }

    /// Exports the plans finished in this turn that an exported trace shows. This happens after the device has its next
    /// work, and before the clients are notified that their requests have ended.
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

    /// Handles a failure of the executor. If the device was lost, another executor is built, and the running sequences
    /// continue on it.
    fn lose(&mut self, error: ExecuteError) {
        if !matches!(error, ExecuteError::DeviceLost { .. } | ExecuteError::ExchangeEnded) {
            return self.fail(&error);
        }
        self.shared.losses.fetch_add(1, Relaxed);
        let how = match self.rebuilds.lost(Instant::now()) {
            Ok(how) => how,
            Err(given_up) => {
                tracing::error!(replica = self.name, %given_up, "the device is not rebuilt");
                return self.fail(&error);
            }
        };
        let absent = Absent::new(self.executor.capacity().clone());
        self.wake = absent.wake().clone();
        let lost = std::mem::replace(&mut self.executor, Box::new(absent));
        self.earlier_faults += lost.faults();
        if let Err(no_thread) = self.rebuilds.begin(&self.name, how, lost) {
            tracing::error!(replica = self.name, %no_thread, "the device is not rebuilt");
            return self.fail(&error);
        }
        let why = with_causes(&error);
        tracing::error!(replica = self.name, error = %why, "the device is lost and is being rebuilt");
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
                self.fail(&ExecuteError::Failed(format!("its device was lost and could not be rebuilt: {error}")));
            }
        }
    }

    /// Handles the failure of the device: every request ends, and no further request is accepted.
    fn fail(&mut self, error: &ExecuteError) {
        let why = with_causes(error);
        tracing::error!(error = %why, "the executor has failed");
        self.shared.failed.store(true, Relaxed);
        self.shared.gate().closed = Some(why.clone());
        self.scheduler.fail(&why, Instant::now());
        self.failed = Some(why);
    }

    /// Sends the scheduler's outputs to the clients, at `now`. Returns whether a sink failed, so that there are sequences to
    /// abort.
    fn deliver(&mut self, now: Instant) -> bool {
        let mut gone = Vec::new();
        for output in self.scheduler.take_outputs() {
            let (id, event) = match output {
                SchedulerOutput::Prefilled(id, cost) | SchedulerOutput::Decoded(id, cost) => {
                    if let Some(client) = self.clients.get(id) {
                        spans::record(&client.phase, &cost);
                    }
                    continue;
                }
                SchedulerOutput::Event(id, event) => (id, event),
            };
            if matches!(event, Event::Finished(_)) {
                // The id is free before the client is notified of the end.
                if let Some(client) = self.clients.remove(id) {
                    self.shared.gate().live.remove(&client.id);
                    client.finish(event);
                }
            } else if let Some(client) = self.clients.get_mut(id)
                && !client.tell(event, now, &self.shared.gaps)
            {
                gone.push(id);
            }
        }
        for &id in &gone {
            self.scheduler.abort_sequence(id, now);
        }
        !gone.is_empty()
    }

    fn publish(&self) {
        *self.shared.load() = self.scheduler.load();
        let faults = self.earlier_faults + self.executor.faults();
        if self.shared.faults.swap(faults, Relaxed) < faults {
            self.shared.last_fault.store(Moment::now().0, Relaxed);
        }
    }
}

//! A pool of worker processes for work whose stack, memory or time cannot be bounded inside this process: compiling and
//! following constraints, and parsing and rendering chat templates. A worker runs one job at a time, so the job that it
//! runs is the cause of its death. A worker may hold state between jobs (outputs that follow a constraint). That state
//! is lost with the process, and its owner rebuilds it in another worker. Only a job that exceeds its limits ends a
//! worker that holds state of others; a job that is cancelled in such a worker runs to its end, and its result is
//! dropped.
//!
//! A worker is a second process of this program (`ostinato worker`), at a lower priority, that answers frames on its
//! standard input with frames on its standard output: four bytes of length, little endian, and the bytes. This file
//! owns the processes, one thread for each, and the queue of jobs.
//! Not here: what the frames mean (`model::grammar`, `model::text::chat`), and the worker's side (`model::worker`).

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::io::{self, Read, Write};
use std::ops::{Deref, DerefMut};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The stack size of a worker's job thread in bytes. The address space is reserved, the memory is used as needed.
pub const STACK: u64 = 64 << 20;
/// The exit status of a worker whose job has panicked.
pub const PANICKED: i32 = 101;
/// The name of the hidden command of a worker.
pub const COMMAND: &str = "worker";
/// Added to the nice value of a worker: against threads of this process, such as an engine's, a worker gets about a
/// tenth of a core that both want.
pub const NICE: i32 = 10;

/// The interval at which a running job is checked: whether anyone waits for it, and what it has used.
const TICK: Duration = Duration::from_millis(10);
/// How long a job waits for the worker that it prefers. A worker that is busy for longer runs something slow.
const PATIENCE: Duration = Duration::from_millis(10);
/// The limit on the elapsed time of a job, as a multiple of its limit of processor time. It is high because a job may
/// wait for a processor, at a lower priority than the rest of the program.
const WALL: u32 = 30;
/// The time in which a worker must be ready after its start, unless the machine is overloaded.
const START: Duration = Duration::from_secs(60);
/// The most bytes of a frame from a worker. Masks take tens of kilobytes, rendered templates a few megabytes.
const MOST_FRAME: usize = 128 << 20;
/// The most bytes that are read of what a dying worker has written to its standard error.
const MOST_WORDS: u64 = 64 << 10;
/// The most worker processes of a pool: as many as there are processors, within these bounds.
const MOST: (usize, usize) = (2, 8);
/// The open files of this process for each worker: its standard input, output and error.
const FILES: usize = 3;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The most worker processes of one pool.
fn most() -> usize {
    cores().clamp(MOST.0, MOST.1)
}

/// The most open files that the workers of one pool take in this process.
pub fn files() -> usize {
    FILES * most()
}

/// The limits of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerLimits {
    /// The most bytes of memory of a worker beyond what it has at its start.
    pub memory: u64,
    /// The most processor time of one job.
    pub cpu: Duration,
}

impl Default for WorkerLimits {
    /// 512 MiB and 2 s.
    fn default() -> WorkerLimits {
        WorkerLimits { memory: 512 << 20, cpu: Duration::from_secs(2) }
    }
}

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
static LIMITS: RwLock<Option<WorkerLimits>> = RwLock::new(None);

/// Sets the program that workers run; later calls have no effect. Without a call the program `ostinato` is looked for
/// in the folder of the executable and in the folder above it, where tests find it.
pub fn use_program(path: impl Into<PathBuf>) {
    let _ = PROGRAM.set(path.into());
}

/// Sets the limits of pools that are created from now on.
pub fn use_limits(limits: WorkerLimits) {
    *LIMITS.write().unwrap_or_else(PoisonError::into_inner) = Some(limits);
}

/// The limits of pools that are created now.
pub fn limits() -> WorkerLimits {
    LIMITS.read().unwrap_or_else(PoisonError::into_inner).unwrap_or_default()
}

fn program() -> io::Result<PathBuf> {
    if let Some(program) = PROGRAM.get() {
        return Ok(program.clone());
    }
    let own = std::env::current_exe()?;
    let beside = own.ancestors().skip(1).take(2).map(|folder| folder.join("ostinato"));
    let found = beside.into_iter().find(|path| path.is_file() && *path != own);
    found.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("no program \"ostinato\" beside {}", own.display()))
    })
}

/// Tells a job whether anyone still waits for it. Cheap to clone; clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    ended: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl Cancel {
    /// Creates one that is also cancelled when the deadline passes.
    pub fn until(deadline: Option<Instant>) -> Cancel {
        Cancel { ended: Arc::default(), deadline }
    }

    /// Cancels: nobody waits any more.
    pub fn cancel(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether it was cancelled or its deadline has passed.
    pub fn is_cancelled(&self) -> bool {
        self.ended.load(Ordering::Acquire) || self.is_late()
    }

    /// Whether its deadline has passed.
    pub fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Returns a guard that cancels when it is dropped.
    pub fn guard(&self) -> CancelOnDrop {
        CancelOnDrop(self.clone())
    }
}

/// See [`Cancel::guard`].
#[derive(Debug)]
pub struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The reasons why a job has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The worker reached its memory limit.
    #[error("it takes more than {} MiB of memory, the most that it may take", most >> 20)]
    Memory {
        /// The limit, bytes.
        most: u64,
    },
    /// The job nests or recurses too deeply.
    #[error("it is nested too deeply: it takes more than {} MiB of stack, the most that it may take", most >> 20)]
    Stack {
        /// The limit, bytes.
        most: u64,
    },
    /// The job reached its limit of processor time.
    #[error("it takes more than {:.1} s of processor time, the most that it may take", most.as_secs_f64())]
    Time {
        /// The limit.
        most: Duration,
    },
    /// The job was cancelled.
    #[error("nobody waits for it any more")]
    Cancelled,
    /// The library that does the work has panicked.
    #[error("the library that reads it has failed on it")]
    Panicked,
    /// The worker has ended for an unknown reason, or was not ready in time.
    #[error("its worker process has ended: {0}")]
    Died(String),
    /// No worker could be started.
    #[error("no worker process could be started: {0}")]
    Start(String),
}

impl Failure {
    /// Whether the job should be tried again in a new worker: it reached the memory limit in a worker that had done
    /// other work before (not `alone`), or something else ended its worker.
    pub fn may_be_others(&self, alone: bool) -> bool {
        match self {
            Failure::Memory { .. } => !alone,
            Failure::Died(_) => true,
            _ => false,
        }
    }
}

/// The identity of a worker process. A later process in the same seat has another home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    seat: usize,
    generation: u64,
}

/// A job. It gets exclusive use of a worker, or the reason why no worker is available, and delivers its result itself.
pub type Job = Box<dyn FnOnce(Result<&mut Worker, Failure>) + Send>;

/// A job that runs only in one particular worker process.
pub type OwnJob = Box<dyn FnOnce(&mut Worker) + Send>;

/// A pool of workers. Threads and processes are started as jobs need them. When the pool is dropped, they end after the
/// jobs that run.
pub struct Workers {
    shared: Arc<Shared>,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

struct Shared {
    name: &'static str,
    /// The first frame that every worker gets.
    first: Vec<u8>,
    limits: WorkerLimits,
    /// The number of workers that share the work.
    usual: usize,
    /// The most workers, which there may be while all others are busy with something slow.
    most: usize,
    /// The program; `None` for the program given to [`use_program`].
    program: Option<PathBuf>,
    /// The time in which a worker must be ready.
    start: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    closed: bool,
    queue: VecDeque<Queued>,
    seats: Vec<Seat>,
}

struct Queued {
    job: Job,
    home: Option<Home>,
    /// The job continues something that has begun, and goes before jobs that begin something.
    urgent: bool,
}

/// A place for a worker process, with the thread that runs its jobs.
#[derive(Default)]
struct Seat {
    wake: Arc<Condvar>,
    /// When the running job began.
    running: Option<Instant>,
    /// Counts the processes of this seat.
    generation: u64,
    /// Whether the last job was slow.
    slow: bool,
    /// Whether the seat has a thread.
    manned: bool,
    /// The id of the process.
    process: Option<u32>,
    /// The outputs whose state the process holds, by number.
    held: HashSet<u64>,
    /// Jobs for this process and no other; they are dropped when it ends.
    own: VecDeque<OwnJob>,
}

impl State {
    /// The home if its process still lives.
    fn alive(&self, home: Option<Home>) -> Option<Home> {
        home.filter(|home| self.seats[home.seat].generation == home.generation)
    }

    /// The time from which a job may run in another seat than the one that it prefers: `None` if that seat is gone or
    /// idle.
    fn elsewhere(&self, home: Option<Home>) -> Option<Instant> {
        let home = self.alive(home)?;
        Some(self.seats[home.seat].running? + PATIENCE)
    }

    /// Takes the first job of the queue that may run in a seat, or returns the time when there may be one.
    fn next(&mut self, seat: usize, now: Instant) -> Result<Queued, Option<Instant>> {
        let mut soonest: Option<Instant> = None;
        for at in 0..self.queue.len() {
            let home = self.queue[at].home;
            let mine = self.alive(home).is_none_or(|home| home.seat == seat);
            match self.elsewhere(home) {
                _ if mine => {}
                Some(when) if when <= now => {}
                Some(when) => {
                    soonest = Some(soonest.map_or(when, |soonest| soonest.min(when)));
                    continue;
                }
                // The preferred seat is idle and was woken for it.
                None => continue,
            }
            return Ok(self.queue.remove(at).expect("it was found there"));
        }
        Err(soonest)
    }

    /// An idle seat for a job without a home: one whose last job was fast, if there is one.
    fn idle(&self) -> Option<usize> {
        let idle = self.seats.iter().enumerate().filter(|(_, seat)| seat.manned && seat.running.is_none());
        idle.min_by_key(|(index, seat)| (seat.slow, *index)).map(|(index, _)| index)
    }
}

impl Workers {
    /// Creates a pool whose workers get the frame `first` at their start.
    pub fn new(name: &'static str, first: Vec<u8>) -> Workers {
        Workers::with(name, first, limits())
    }

    /// Creates a pool like [`Workers::new`], with the given limits.
    pub fn with(name: &'static str, first: Vec<u8>, limits: WorkerLimits) -> Workers {
        let (most, state) = (most(), Mutex::default());
        let usual = (cores() / 2).clamp(1, most);
        let shared = Shared { name, first, limits, usual, most, program: None, start: START, state };
        Workers { shared: Arc::new(shared) }
    }

    /// The limits of its jobs.
    pub fn limits(&self) -> WorkerLimits {
        self.shared.limits
    }

    /// Queues a job. The worker at `home` runs it, unless that worker has ended or is busy for longer than
    /// `PATIENCE`. Jobs with a home go before jobs without. Each job is run exactly once.
    pub fn submit(&self, home: Option<Home>, job: Job) {
        let mut state = self.shared.state();
        let preferred = state.alive(home);
        let urgent = home.is_some();
        let at = if urgent { state.queue.partition_point(|queued| queued.urgent) } else { state.queue.len() };
        state.queue.insert(at, Queued { job, home: preferred, urgent });
        match preferred {
            Some(home) if state.seats[home.seat].running.is_none() => {
                state.seats[home.seat].wake.notify_one();
                return;
            }
            // Busy: the running job's thread finds another worker if it takes long.
            _ => {}
        }
        if let Some(error) = self.shared.look_after_queue(&mut state, preferred.is_none())
            && state.seats.iter().all(|seat| !seat.manned)
        {
            let queue = std::mem::take(&mut state.queue);
            drop(state);
            refuse(queue, &Failure::Start(error.to_string()));
        }
    }

    /// Runs a job and waits for its result.
    pub fn run<T: Send + 'static>(
        &self,
        home: Option<Home>,
        job: impl FnOnce(&mut Worker) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (reply, answer) = crossbeam_channel::bounded(1);
        self.submit(
            home,
            Box::new(move |worker| {
                // The receiver may have gone.
                let _ = reply.send(worker.and_then(job));
            }),
        );
        // The job is dropped without a reply only if it has panicked.
        answer.recv().unwrap_or(Err(Failure::Panicked))
    }

    /// The process ids of the workers.
    pub fn processes(&self) -> Vec<u32> {
        self.shared.state().seats.iter().filter_map(|seat| seat.process).collect()
    }

    /// Queues a job that only the worker at `home` may run, before any other job. It is dropped if that worker has
    /// ended or ends before.
    pub fn submit_to(&self, home: Home, job: OwnJob) {
        let mut state = self.shared.state();
        if state.alive(Some(home)).is_some() && !state.closed {
            let seat = &mut state.seats[home.seat];
            seat.own.push_back(job);
            seat.wake.notify_one();
        }
    }

    /// Removes an output from those whose state the worker at `home` holds. Returns whether it was one of them.
    pub fn release(&self, home: Home, output: u64) -> bool {
        let mut state = self.shared.state();
        state.alive(Some(home)).is_some() && state.seats[home.seat].held.remove(&output)
    }

    /// The number of outputs whose state each worker holds.
    pub fn held(&self) -> Vec<usize> {
        self.shared.state().seats.iter().filter(|seat| seat.process.is_some()).map(|seat| seat.held.len()).collect()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.closed = true;
        let queue = std::mem::take(&mut state.queue);
        state.seats.iter().for_each(|seat| seat.wake.notify_one());
        drop(state);
        refuse(queue, &Failure::Cancelled);
    }
}

/// Tells jobs that no worker will run them. Must be called without the lock, since dropping a job may run other code.
fn refuse(queue: VecDeque<Queued>, failure: &Failure) {
    for queued in queue {
        (queued.job)(Err(failure.clone()));
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Jobs run without the lock, and every change of the state is complete before it is released.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a worker for the queued jobs: an idle one, or a new one if there are fewer than usual or all others are
    /// busy with slow jobs.
    fn look_after_queue(self: &Arc<Shared>, state: &mut State, now: bool) -> Option<io::Error> {
        if let Some(idle) = state.idle() {
            state.seats[idle].wake.notify_one();
            return None;
        }
        let stuck = |seat: &Seat| seat.running.is_some_and(|since| since.elapsed() >= PATIENCE);
        let manned = state.seats.iter().filter(|seat| seat.manned).count();
        let wanted = if state.seats.iter().filter(|seat| seat.manned).all(stuck) { self.most } else { self.usual };
        if manned >= wanted || !(now || manned == 0 || wanted == self.most) {
            return None;
        }
        let seat = Seat { manned: true, ..Seat::default() };
        let index = state.seats.iter().position(|seat| !seat.manned).unwrap_or(state.seats.len());
        match state.seats.get_mut(index) {
            Some(place) => *place = Seat { generation: place.generation + 1, ..seat },
            None => state.seats.push(seat),
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name(format!("{} {index}", self.name));
        let spawned = thread.spawn(move || shared.work(index));
        spawned.err().inspect(|_| state.seats[index].manned = false)
    }

    fn work(self: Arc<Shared>, seat: usize) {
        let mut worker =
            Worker { shared: Arc::clone(&self), seat, process: None, generation: 0, calls: 0, resident: 0 };
        loop {
            let mut state = self.state();
            let job = loop {
                if state.closed {
                    return;
                }
                worker.generation = state.seats[seat].generation;
                if let Some(own) = state.seats[seat].own.pop_front() {
                    let job: Job = Box::new(|worker| drop(worker.map(own)));
                    break job;
                }
                match state.next(seat, Instant::now()) {
                    Ok(queued) => break queued.job,
                    Err(when) => {
                        let wake = Arc::clone(&state.seats[seat].wake);
                        state = match when {
                            None => wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                            Some(when) => {
                                let most = when.saturating_duration_since(Instant::now());
                                wake.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
                            }
                        };
                    }
                }
            };
            let begun = Instant::now();
            state.seats[seat].running = Some(begun);
            drop(state);
            // A panic here is a bug of this program. The receiver of the result notices that the job was dropped.
            let job = std::panic::AssertUnwindSafe(|| job(Ok(&mut worker)));
            if std::panic::catch_unwind(job).is_err() {
                worker.end();
            }
            let mut state = self.state();
            state.seats[seat].running = None;
            state.seats[seat].slow = begun.elapsed() > 5 * PATIENCE;
        }
    }
}

/// A worker process, or the place for one, that is lent to a job.
pub struct Worker {
    shared: Arc<Shared>,
    seat: usize,
    process: Option<Process>,
    generation: u64,
    /// The number of calls that the process has answered.
    calls: u64,
    /// The bytes of memory that the process held at its start.
    resident: u64,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("seat", &self.seat).field("generation", &self.generation).finish_non_exhaustive()
    }
}

/// A child process that is killed and waited for when it is dropped.
#[derive(Debug)]
pub struct KilledOnDrop(pub Child);

impl Deref for KilledOnDrop {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for KilledOnDrop {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Both fail only if the process was waited for before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Process {
    child: KilledOnDrop,
    /// Does not block: a worker that does not read must not hold its thread here.
    input: ChildStdin,
    output: ChildStdout,
}

/// Calls a check at most every [`TICK`], however often it is asked.
struct Watch<'a> {
    check: &'a mut dyn FnMut() -> Result<(), Failure>,
    next: Instant,
}

impl Watch<'_> {
    fn new(check: &mut dyn FnMut() -> Result<(), Failure>) -> Watch<'_> {
        Watch { check, next: Instant::now() + TICK }
    }

    fn look(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + TICK;
        (self.check)()
    }
}

impl Worker {
    /// The identity of the process. It changes after each [`Failure`] but [`Failure::Cancelled`], after which it may be
    /// the same.
    pub fn home(&self) -> Home {
        Home { seat: self.seat, generation: self.generation }
    }

    /// The number of calls that this process has answered since its start.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// The bytes of memory that the process holds beyond what it held at its start.
    pub fn grown(&self) -> u64 {
        resident(self.id()).saturating_sub(self.resident)
    }

    /// Notes that the process holds the state of an output, until [`Workers::release`] or its end.
    pub fn keep(&self, output: u64) {
        self.shared.state().seats[self.seat].held.insert(output);
    }

    /// The id of the process; 0 if no process runs.
    fn id(&self) -> u32 {
        self.process.as_ref().map_or(0, |process| process.child.id())
    }

    /// Ends the process; the next call starts a new one.
    pub fn end(&mut self) {
        self.process = None;
        self.calls = 0;
        let mut state = self.shared.state();
        let seat = &mut state.seats[self.seat];
        seat.process = None;
        seat.generation += 1;
        seat.held.clear();
        self.generation = seat.generation;
        let own = std::mem::take(&mut seat.own);
        drop(state);
        // Without the lock, since dropping a job may run other code.
        drop(own);
    }

    /// Sends a frame and returns the answer. `ask` answers questions of the worker on the way, which are frames that
    /// begin with the byte `question`. `output` is the output whose state the call changes. A cancelled call ends the
    /// process, unless that holds the state of other outputs: then the call runs on within its limits, the state is
    /// kept, and [`Failure::Cancelled`] is returned at its end.
    pub fn call(
        &mut self,
        frame: &[u8],
        cancel: &Cancel,
        output: Option<u64>,
        question: u8,
        ask: &mut dyn FnMut(&[u8]) -> Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        if cancel.is_cancelled() {
            return Err(Failure::Cancelled);
        }
        if self.process.is_none() {
            self.start()?;
        }
        match self.exchange(frame, cancel, output, question, ask) {
            Ok(_) if cancel.is_cancelled() => {
                self.calls += 1;
                Err(Failure::Cancelled)
            }
            Ok(answer) => {
                self.calls += 1;
                Ok(answer)
            }
            Err(failure) => {
                self.end();
                Err(failure)
            }
        }
    }

    fn start(&mut self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::Start(error.to_string());
        let shared = Arc::clone(&self.shared);
        let path = shared.program.clone().map_or_else(program, Ok).map_err(failed)?;
        let mut command = Command::new(path);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A constraint that takes over the worker must find nothing of value there, and variables may hold secrets.
        let kept = ["PATH", "LD_LIBRARY_PATH", "LLVM_PROFILE_FILE"];
        let kept = kept.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        // A process group of its own: a terminal's signals to the server must not reach it.
        command.env_clear().envs(kept.collect::<Vec<_>>()).process_group(0);
        let mut child = KilledOnDrop(command.spawn().map_err(failed)?);
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { unreachable!("both were asked for") };
        rustix::io::ioctl_fionbio(&input, true).map_err(|error| failed(error.into()))?;
        self.process = Some(Process { child, input, output });
        shared.state().seats[self.seat].process = Some(self.id());
        let WorkerLimits { memory, cpu } = shared.limits;
        let begun = [&memory.to_le_bytes()[..], &cpu.as_millis().to_le_bytes()[..8]].concat();
        let until = Instant::now() + shared.start;
        let mut in_time = || if Instant::now() < until { Ok(()) } else { Err(Failure::Start("it hangs".to_owned())) };
        let mut watch = Watch::new(&mut in_time);
        let told = self.send(&begun, &mut watch).and_then(|()| self.send(&shared.first, &mut watch));
        match told.and_then(|()| self.receive(&mut watch)) {
            Ok(_) => {
                self.resident = resident(self.id());
                Ok(())
            }
            Err(failure) => {
                self.end();
                Err(Failure::Died(format!("at its start: {failure}")))
            }
        }
    }

    fn exchange(
        &mut self,
        frame: &[u8],
        cancel: &Cancel,
        output: Option<u64>,
        question: u8,
        ask: &mut dyn FnMut(&[u8]) -> Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        let WorkerLimits { memory, cpu } = self.shared.limits;
        let (pid, seat, most_resident) = (self.id(), self.seat, self.resident + memory + STACK);
        let begun = Instant::now();
        // The processor time at the first check, and the elapsed time until then, which counts as processor time.
        let mut first_look: Option<(Duration, Duration)> = None;
        let shared = Arc::clone(&self.shared);
        let mut check = move || {
            let waited = begun.elapsed();
            let mut state = shared.state();
            if cancel.is_cancelled() && !state.seats[seat].held.iter().any(|held| Some(*held) != output) {
                return Err(Failure::Cancelled);
            }
            if waited > PATIENCE && !state.queue.is_empty() {
                // A thread that cannot be started now is tried again at the next check.
                let _ = shared.look_after_queue(&mut state, true);
            }
            drop(state);
            let total = processor_time(pid);
            let (at_first, before) = *first_look.get_or_insert((total.unwrap_or_default(), waited));
            let used = total.map_or(waited, |total| total.saturating_sub(at_first) + before);
            if used > cpu || waited > cpu * WALL {
                return Err(Failure::Time { most: cpu });
            }
            // The worker limits itself; this is for one that has changed its limits.
            if resident(pid) > most_resident { Err(Failure::Memory { most: memory }) } else { Ok(()) }
        };
        let mut watch = Watch::new(&mut check);
        self.send(frame, &mut watch)?;
        loop {
            // The answers to questions count against the job's limits.
            let answer = self.receive(&mut watch)?;
            if answer.first() != Some(&question) {
                return Ok(answer);
            }
            // The library that answers may panic.
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ask(&answer[1..])));
            self.send(&told.unwrap_or_default(), &mut watch)?;
        }
    }

    /// Writes a frame. `watch` decides whether to go on while the worker does not read.
    fn send(&mut self, frame: &[u8], watch: &mut Watch<'_>) -> Result<(), Failure> {
        let mut whole = Vec::with_capacity(4 + frame.len());
        write_frame(&mut whole, frame).map_err(|error| Failure::Died(error.to_string()))?;
        let mut rest = &whole[..];
        while !rest.is_empty() {
            let Some(process) = &mut self.process else { return Err(Failure::Start("it has ended".to_owned())) };
            match process.input.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready(PollFd::new(&process.input, PollFlags::OUT))?;
                }
                Err(_) => return Err(self.why_ended()),
            }
            watch.look()?;
        }
        Ok(())
    }

    /// Reads the next frame. `watch` decides whether to go on.
    fn receive(&mut self, watch: &mut Watch<'_>) -> Result<Vec<u8>, Failure> {
        let mut head = [0; 4];
        self.fill(&mut head, watch)?;
        let length = u32::from_le_bytes(head) as usize;
        if length > MOST_FRAME {
            return Err(Failure::Died(format!("it answered with {length} bytes, at most {MOST_FRAME} are taken")));
        }
        let mut frame = vec![0; length];
        self.fill(&mut frame, watch)?;
        Ok(frame)
    }

    fn fill(&mut self, bytes: &mut [u8], watch: &mut Watch<'_>) -> Result<(), Failure> {
        let mut at = 0;
        while at < bytes.len() {
            let Some(process) = &mut self.process else { return Err(Failure::Start("it has ended".to_owned())) };
            if ready(PollFd::new(&process.output, PollFlags::IN))? {
                match process.output.read(&mut bytes[at..]) {
                    Ok(0) => return Err(self.why_ended()),
                    Ok(read) => at += read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => return Err(self.why_ended()),
                }
            }
            // Under traffic too: a worker that always has something to say is checked as often as a silent one.
            watch.look()?;
        }
        Ok(())
    }

    /// The reason why a process that has closed its ends has ended.
    fn why_ended(&mut self) -> Failure {
        let WorkerLimits { memory, cpu } = self.shared.limits;
        let Some(process) = &mut self.process else { return Failure::Start("it has ended".to_owned()) };
        // It has closed its output, so it has ended or is about to; it may hang on the way.
        let _ = process.child.kill();
        let mut words = Vec::new();
        if let Some(errors) = process.child.stderr.take() {
            // No other process writes there, so this ends with the process.
            let _ = errors.take(MOST_WORDS).read_to_end(&mut words);
        }
        let words = String::from_utf8_lossy(&words);
        let status = match process.child.wait() {
            Ok(status) => status,
            Err(error) => return Failure::Died(error.to_string()),
        };
        const SIGKILL: i32 = 9;
        const SIGXCPU: i32 = 24;
        if words.contains("memory allocation of") {
            Failure::Memory { most: memory }
        } else if words.contains("overflowed its stack") {
            Failure::Stack { most: STACK }
        } else if status.signal() == Some(SIGXCPU) {
            Failure::Time { most: cpu }
        } else if status.code() == Some(PANICKED) {
            Failure::Panicked
        } else if status.signal() == Some(SIGKILL) {
            // The kill above comes after the process has closed its output; any other means that the machine has no
            // memory.
            Failure::Memory { most: memory }
        } else {
            Failure::Died(status.to_string())
        }
    }
}

/// Waits up to a [`TICK`] until a pipe can be read or written.
fn ready(pipe: PollFd<'_>) -> Result<bool, Failure> {
    let tick = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as _ };
    match poll(&mut [pipe], Some(&tick)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(Failure::Died(error.to_string())),
    }
}

/// The resident memory of a process without pages of files, in bytes; 0 if it is unknown.
fn resident(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let mut pages = statm.split_whitespace().skip(1).map_while(|pages| pages.parse::<u64>().ok());
    let (all, of_files) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
    all.saturating_sub(of_files) * rustix::param::page_size() as u64
}

/// The processor time that a process has used so far; `None` if it is unknown.
fn processor_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may hold any character: the state, ten numbers, then user and system time in ticks.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_millis((user + system) * 1000 / ticks))
}

/// Writes a frame.
pub fn write_frame(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).map_err(|_| io::Error::other("a frame of more than 4 GiB"))?;
    if frame.len() < 4096 {
        // One write, so that the other side wakes up once.
        let mut whole = Vec::with_capacity(4 + frame.len());
        whole.extend(length.to_le_bytes());
        whole.extend(frame);
        to.write_all(&whole)?;
    } else {
        to.write_all(&length.to_le_bytes())?;
        to.write_all(frame)?;
    }
    to.flush()
}

/// Reads a frame; `None` if the other side has closed its end.
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut head = [0; 4];
    match from.read_exact(&mut head) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let mut frame = Vec::new();
    let length = u64::from(u32::from_le_bytes(head));
    from.take(length).read_to_end(&mut frame)?;
    if frame.len() as u64 == length { Ok(Some(frame)) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A worker in shell. It repeats each frame, and some frames make it misbehave.
    const SCRIPT: &str = r#"#!/bin/sh
frame() {
    n=$(dd bs=1 count=4 2>/dev/null | od -An -tu4 | tr -d ' ')
    [ -n "$n" ] || exit 0
    body=$(dd bs=1 count=$n 2>/dev/null | tr -d '\0')
}
say() {
    printf "\\$(printf %03o ${#1})\\000\\000\\000%s" "$1"
}
frame
frame
say ready
case "$body" in deaf) exec sleep 1000 ;; esac
while :; do
    frame
    case "$body" in
        slow) sleep 1 ;;
        slower) exec sleep 1000 ;;
        # Frames of 0x01010101 bytes without a pause, each of which is a question. Descriptor 3 keeps the input open.
        traffic) exec tr '\0' '\1' 3<&0 </dev/zero ;;
    esac
    say "$body"
done
"#;

    fn pool(first: &str, most: usize, cpu: Duration) -> (tempfile::TempDir, Workers) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("worker");
        std::fs::write(&program, SCRIPT).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let shared = Shared {
            name: "test",
            first: first.as_bytes().to_vec(),
            limits: WorkerLimits { cpu, ..WorkerLimits::default() },
            usual: most,
            most,
            program: Some(program),
            start: START,
            state: Mutex::default(),
        };
        (folder, Workers { shared: Arc::new(shared) })
    }

    const LONG: Duration = Duration::from_secs(60);
    const QUESTION: u8 = 1;

    fn call(worker: &mut Worker, frame: &str, cancel: &Cancel, output: Option<u64>) -> Result<String, Failure> {
        let answer = worker.call(frame.as_bytes(), cancel, output, QUESTION, &mut |_| Vec::new())?;
        Ok(String::from_utf8(answer).unwrap())
    }

    fn soon() -> Cancel {
        Cancel::until(Some(Instant::now() + Duration::from_millis(100)))
    }

    /// Goal: a cancelled job does not cost others the state that its worker holds for them; if the worker holds no
    /// state of others, the job ends at once.
    #[test]
    fn a_cancelled_job_leaves_the_state_of_others_alone() {
        let (_folder, workers) = pool("", 1, LONG);
        let first = workers.run(None, |worker| {
            worker.keep(1);
            assert_eq!(call(worker, "one", &Cancel::default(), Some(1))?, "one");
            Ok(worker.home())
        });
        let home = first.unwrap();
        let cancelled = |frame: &'static str, output| {
            let begun = Instant::now();
            let job = move |worker: &mut Worker| Ok((call(worker, frame, &soon(), Some(output)), worker.home()));
            let (failure, home) = workers.run(None, job).unwrap();
            assert_eq!(failure, Err(Failure::Cancelled));
            (begun.elapsed(), home)
        };
        let (took, after) = cancelled("slow", 2);
        assert_eq!(after, home, "the worker has ended, and with it the state of another output");
        assert!(took >= Duration::from_millis(900), "{took:?}");
        // The frames are still in step.
        let next = workers.run(Some(home), |worker| call(worker, "next", &Cancel::default(), Some(1)));
        assert_eq!(next.unwrap(), "next");
        // Its own state protects nobody.
        let (took, after) = cancelled("slower", 1);
        assert!(after != home && took < Duration::from_secs(20), "{took:?}");
        assert_eq!(workers.held(), [0; 0]);
    }

    /// Goal: a worker that does not read holds its thread for no longer than a job may take.
    #[test]
    fn a_worker_that_does_not_read_meets_the_limit_of_time() {
        let (_folder, workers) = pool("deaf", 1, Duration::from_millis(50));
        let begun = Instant::now();
        let failure = workers.run(None, |worker| call(worker, &"x".repeat(1 << 20), &Cancel::default(), None));
        assert!(matches!(failure, Err(Failure::Time { .. })), "{failure:?}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    /// Goal: limits and cancellation are noticed while a worker sends without a pause.
    #[test]
    fn a_worker_that_never_stops_sending_meets_the_limit_of_time() {
        let (_folder, workers) = pool("", 1, Duration::from_millis(200));
        let traffic = |cancel: Cancel| workers.run(None, move |worker| call(worker, "traffic", &cancel, None));
        let failure = traffic(Cancel::default());
        assert!(matches!(failure, Err(Failure::Time { .. })), "{failure:?}");
        assert_eq!(traffic(soon()), Err(Failure::Cancelled));
    }

    /// Goal: a job for one process runs there, however long that is busy, and before other jobs; and it goes with the
    /// process.
    #[test]
    fn a_job_for_one_process_is_not_run_by_another() {
        let (_folder, workers) = pool("", 2, LONG);
        let start = |worker: &mut Worker| call(worker, "a", &Cancel::default(), None).map(|_| worker.home());
        let home = workers.run(None, start).unwrap();
        let (busy, is_busy) = crossbeam_channel::bounded(1);
        let (release, released) = crossbeam_channel::bounded::<()>(1);
        workers.submit(
            Some(home),
            Box::new(move |worker| {
                busy.send(worker.unwrap().home()).unwrap();
                let _ = released.recv_timeout(Duration::from_secs(60));
            }),
        );
        assert_eq!(is_busy.recv().unwrap(), home);
        let (ran, where_it_ran) = crossbeam_channel::bounded(1);
        workers.submit_to(home, Box::new(move |worker| ran.send(worker.home()).unwrap()));
        // Another job with the same home is run elsewhere meanwhile.
        let other = workers.run(Some(home), |worker| Ok(worker.home())).unwrap();
        assert_ne!(other, home);
        assert!(where_it_ran.is_empty(), "the process is busy");
        release.send(()).unwrap();
        assert_eq!(where_it_ran.recv_timeout(Duration::from_secs(20)), Ok(home));
        let end = |worker: &mut Worker| {
            worker.end();
            Ok(())
        };
        workers.run(Some(home), end).unwrap();
        let (ran, where_it_ran) = crossbeam_channel::bounded::<Home>(1);
        workers.submit_to(home, Box::new(move |worker| ran.send(worker.home()).unwrap()));
        assert!(where_it_ran.recv_timeout(Duration::from_secs(20)).is_err(), "it was dropped");
    }
}

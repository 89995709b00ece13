//! A pool of worker processes, for work whose stack, memory or time cannot be bounded inside this process: compiling
//! and following constraints, parsing and rendering chat templates. A worker runs one job at a time. When it dies, or
//! is ended because the job exceeds its limits or nobody waits for it any more, that job is the cause and no other.
//! What else the worker held is gone with it; whoever owns it makes it again in another worker.
//!
//! A worker is a second process of this program (`ostinato worker`) that answers frames on its standard input with
//! frames on its standard output: a length of four bytes, little endian, and so many bytes. This file owns the
//! processes, one thread for each, and the queue. Deliberately absent: what the frames say.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Of a worker's thread that does the work; reserved, used as far as needed.
pub const STACK: u64 = 64 << 20;
/// The exit status of a worker whose job has panicked.
pub const PANICKED: i32 = 101;
/// The name of the hidden command.
pub const COMMAND: &str = "worker";

/// Between two looks at a job that takes long: for who waits for it, and what processor time it has taken.
const TICK: Duration = Duration::from_millis(10);
/// How long a job waits for the worker that it prefers. A worker that is busy for longer works on something slow.
const PATIENCE: Duration = Duration::from_millis(10);
/// A job may wait for processor time: so many times its limit passes on the clock before it counts as stuck.
const WALL: u32 = 15;
/// A worker that has started says so within this time, unless the machine is overwhelmed.
const START: Duration = Duration::from_secs(60);
/// Most bytes of a frame from a worker: masks are tens of kilobytes, rendered templates a few megabytes.
const MOST_FRAME: usize = 128 << 20;
/// Most bytes of what a dying worker has written to its standard error that are read.
const MOST_WORDS: u64 = 64 << 10;

/// What a job may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory of a worker beyond what it has at its start.
    pub memory: u64,
    /// Processor time of one job.
    pub cpu: Duration,
}

impl Default for Limits {
    /// 512 MiB and 2 s.
    fn default() -> Limits {
        Limits { memory: 512 << 20, cpu: Duration::from_secs(2) }
    }
}

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
static LIMITS: RwLock<Option<Limits>> = RwLock::new(None);

/// Names the program that workers run; the first call counts. Without one it is looked for beside the executable and in
/// the folder above it, as tests have it.
pub fn use_program(path: impl Into<PathBuf>) {
    let _ = PROGRAM.set(path.into());
}

/// Sets the limits of pools that are made from now on.
pub fn use_limits(limits: Limits) {
    *LIMITS.write().unwrap_or_else(PoisonError::into_inner) = Some(limits);
}

/// Of pools that are made now.
pub fn limits() -> Limits {
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

/// Whether anyone still waits for a job. Cheap to clone; all clones are one.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    ended: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl Cancel {
    /// One that is also cancelled when the deadline passes.
    pub fn until(deadline: Option<Instant>) -> Cancel {
        Cancel { ended: Arc::default(), deadline }
    }

    /// Nobody waits any more.
    pub fn cancel(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether nobody waits any more.
    pub fn is_cancelled(&self) -> bool {
        self.ended.load(Ordering::Acquire) || self.is_late()
    }

    /// Whether its deadline has passed.
    pub fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Cancels when it is dropped.
    pub fn guard(&self) -> CancelOnDrop {
        CancelOnDrop(self.clone())
    }
}

/// Of [`Cancel::guard`].
#[derive(Debug)]
pub struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Why a job has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The worker's memory limit was met.
    #[error("it takes more than {} MiB of memory, the most that it may take", most >> 20)]
    Memory {
        /// The limit, bytes.
        most: u64,
    },
    /// It nests or recurs too deeply.
    #[error("it is nested too deeply: it takes more than {} MiB of stack, the most that it may take", most >> 20)]
    Stack {
        /// The limit, bytes.
        most: u64,
    },
    /// The limit of processor time was met.
    #[error("it takes more than {:.1} s of processor time, the most that it may take", most.as_secs_f64())]
    Time {
        /// The limit.
        most: Duration,
    },
    /// Nobody waited for it any more.
    #[error("nobody waits for it any more")]
    Cancelled,
    /// The library that does the work has failed on it.
    #[error("the library that reads it has failed on it")]
    Panicked,
    /// The worker has ended without saying why, or has not begun.
    #[error("its worker process has ended: {0}")]
    Died(String),
    /// There is no worker.
    #[error("no worker process could be started: {0}")]
    Start(String),
}

impl Failure {
    /// Whether the job is worth another try in a new worker: it has met the limit of memory in a worker that has done
    /// other work (`alone` says if not), or its worker was ended by somebody else.
    pub fn may_be_others(&self, alone: bool) -> bool {
        match self {
            Failure::Memory { .. } => !alone,
            Failure::Died(_) => true,
            _ => false,
        }
    }
}

/// A worker process, as long as it lives: another process in the same place is another home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    seat: usize,
    generation: u64,
}

/// What a job is: it is given a worker for itself, or why there is none, and tells whoever asked by its own means.
pub type Job = Box<dyn FnOnce(Result<&mut Worker, Failure>) + Send>;

/// The pool. Threads and processes begin with the first job; dropped, they end once their jobs have.
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
    /// The first frame of every worker.
    first: Vec<u8>,
    limits: Limits,
    /// Workers that share the work, and as many as there may be where all of those are busy with something slow.
    usual: usize,
    most: usize,
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
    /// Something goes on in a worker that waits for it: it goes before what begins.
    urgent: bool,
}

/// A place for a worker, with a thread that works there.
struct Seat {
    wake: Arc<Condvar>,
    /// Since when a job runs.
    running: Option<Instant>,
    generation: u64,
    /// Its last job was slow.
    slow: bool,
    /// A thread is there.
    manned: bool,
    /// Its process.
    process: Option<u32>,
}

impl State {
    /// Whether a job need not wait for the seat that it prefers: `None` if not, or when it may go elsewhere.
    fn elsewhere(&self, home: Option<Home>) -> Option<Instant> {
        let home = home.filter(|home| self.seats[home.seat].generation == home.generation)?;
        Some(self.seats[home.seat].running? + PATIENCE)
    }

    /// The first job for a seat, or when there may be one.
    fn next(&mut self, seat: usize, now: Instant) -> Result<Queued, Option<Instant>> {
        let mut soonest: Option<Instant> = None;
        for at in 0..self.queue.len() {
            let home = self.queue[at].home;
            let alive = home.filter(|home| self.seats[home.seat].generation == home.generation);
            let mine = alive.is_none_or(|home| home.seat == seat);
            match self.elsewhere(home) {
                _ if mine => {}
                Some(when) if when <= now => {}
                Some(when) => {
                    soonest = Some(soonest.map_or(when, |soonest| soonest.min(when)));
                    continue;
                }
                // The seat that it prefers is idle and has been told.
                None => continue,
            }
            return Ok(self.queue.remove(at).expect("it was found there"));
        }
        Err(soonest)
    }

    /// An idle seat, the best for a job without a home.
    fn idle(&self) -> Option<usize> {
        let idle = self.seats.iter().enumerate().filter(|(_, seat)| seat.manned && seat.running.is_none());
        idle.min_by_key(|(index, seat)| (seat.slow, *index)).map(|(index, _)| index)
    }
}

impl Workers {
    /// A pool whose workers are given `first` at their start.
    pub fn new(name: &'static str, first: Vec<u8>) -> Workers {
        Workers::with(name, first, limits())
    }

    /// The same with limits of its own.
    pub fn with(name: &'static str, first: Vec<u8>, limits: Limits) -> Workers {
        const MOST: usize = 8;
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let usual = (cores / 2).clamp(1, MOST);
        let state = Mutex::default();
        Workers { shared: Arc::new(Shared { name, first, limits, usual, most: MOST, state }) }
    }

    /// What a job may take.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// Queues a job, for the worker at `home` if it is there and not busy for long. Jobs that have or had a home go before
    /// others. Each job is run once.
    pub fn submit(&self, home: Option<Home>, job: Job) {
        let mut state = self.shared.state();
        let preferred = home.filter(|home| state.seats[home.seat].generation == home.generation);
        let urgent = home.is_some();
        let at = if urgent { state.queue.partition_point(|queued| queued.urgent) } else { state.queue.len() };
        state.queue.insert(at, Queued { job, home: preferred, urgent });
        match preferred {
            Some(home) if state.seats[home.seat].running.is_none() => {
                state.seats[home.seat].wake.notify_one();
                return;
            }
            // Busy: another looks after the job if that lasts.
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

    /// Runs a job and waits for what it gives.
    pub fn run<T: Send + 'static>(
        &self,
        home: Option<Home>,
        job: impl FnOnce(&mut Worker) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (reply, answer) = crossbeam_channel::bounded(1);
        self.submit(
            home,
            Box::new(move |worker| {
                // Whoever asked may have gone.
                let _ = reply.send(worker.and_then(job));
            }),
        );
        // Dropped unrun only where it has panicked.
        answer.recv().unwrap_or(Err(Failure::Panicked))
    }

    /// The process ids of the workers, for those who watch them.
    pub fn processes(&self) -> Vec<u32> {
        self.shared.state().seats.iter().filter_map(|seat| seat.process).collect()
    }

    /// Whether a worker is still the process that it was.
    pub fn is_home(&self, home: Home) -> bool {
        self.shared.state().seats[home.seat].generation == home.generation
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

/// For jobs that no worker will run. Without the lock: a job may own the last of much.
fn refuse(queue: VecDeque<Queued>, failure: &Failure) {
    for queued in queue {
        (queued.job)(Err(failure.clone()));
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Jobs run without it, and each change of it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that somebody takes what is queued: an idle worker, or a new one while there are few or all others
    /// are busy with something slow.
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
        let seat =
            Seat { wake: Arc::default(), running: None, generation: 0, slow: false, manned: true, process: None };
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
            let queued = loop {
                if state.closed {
                    return;
                }
                worker.generation = state.seats[seat].generation;
                match state.next(seat, Instant::now()) {
                    Ok(queued) => break queued,
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
            // A panic is a bug of ours: whoever waits for the job hears that it was dropped.
            let job = std::panic::AssertUnwindSafe(|| (queued.job)(Ok(&mut worker)));
            if std::panic::catch_unwind(job).is_err() {
                worker.end();
            }
            let mut state = self.state();
            state.seats[seat].running = None;
            state.seats[seat].slow = begun.elapsed() > 5 * PATIENCE;
        }
    }
}

/// A worker process, or the place for one, lent to a job.
pub struct Worker {
    shared: Arc<Shared>,
    seat: usize,
    process: Option<Process>,
    generation: u64,
    /// Calls that the process has answered.
    calls: u64,
    /// Bytes that it held at its start.
    resident: u64,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("seat", &self.seat).field("generation", &self.generation).finish_non_exhaustive()
    }
}

struct Process {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    /// Which process it is. Another one after each [`Failure`].
    pub fn home(&self) -> Home {
        Home { seat: self.seat, generation: self.generation }
    }

    /// Calls that this process has answered since its start.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Bytes of memory that the process holds beyond what it had at its start.
    pub fn grown(&self) -> u64 {
        let pid = self.process.as_ref().map_or(0, |process| process.child.id());
        resident(pid).saturating_sub(self.resident)
    }

    /// Ends the process; the next call has a new one.
    pub fn end(&mut self) {
        self.process = None;
        self.calls = 0;
        let mut state = self.shared.state();
        state.seats[self.seat].process = None;
        state.seats[self.seat].generation += 1;
        self.generation = state.seats[self.seat].generation;
    }

    /// Sends a frame and gives the answer. `ask` answers what the worker wants to know on the way: frames that begin with
    /// the byte `question`.
    pub fn call(
        &mut self,
        frame: &[u8],
        cancel: &Cancel,
        question: u8,
        ask: &mut dyn FnMut(&[u8]) -> Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        if cancel.is_cancelled() {
            return Err(Failure::Cancelled);
        }
        if self.process.is_none() {
            self.start()?;
        }
        let answered = self.exchange(frame, cancel, question, ask);
        match &answered {
            Ok(_) => self.calls += 1,
            Err(_) => self.end(),
        }
        answered
    }

    fn start(&mut self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::Start(error.to_string());
        let mut command = Command::new(program().map_err(failed)?);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // What a constraint could reach in it must not be worth reaching: secrets stand in variables, too.
        let kept = ["PATH", "LD_LIBRARY_PATH", "LLVM_PROFILE_FILE"];
        let kept = kept.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        // A group of its own: what a terminal sends to the server is not meant for it.
        command.env_clear().envs(kept.collect::<Vec<_>>()).process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { unreachable!("both were asked for") };
        let pid = child.id();
        self.process = Some(Process { child, input, output });
        self.shared.state().seats[self.seat].process = Some(pid);
        let first =
            [&self.shared.limits.memory.to_le_bytes()[..], &self.shared.limits.cpu.as_millis().to_le_bytes()[..8]];
        let begun = first.concat();
        let told = self.send(&begun).and_then(|()| self.send(&Arc::clone(&self.shared).first));
        let until = Instant::now() + START;
        let ready = told.and_then(|()| {
            self.receive(&mut |_| {
                if Instant::now() < until { Ok(()) } else { Err(Failure::Start("it hangs".to_owned())) }
            })
        });
        match ready {
            Ok(_) => {
                self.resident = resident(pid);
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
        question: u8,
        ask: &mut dyn FnMut(&[u8]) -> Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        let cpu = self.shared.limits.cpu;
        let begun = Instant::now();
        let pid = self.process.as_ref().map_or(0, |process| process.child.id());
        // Processor time when it was first looked at, a tick after the beginning at most.
        let mut first_look: Option<(Duration, Duration)> = None;
        let shared = Arc::clone(&self.shared);
        let mut watch = move |waited: Duration| {
            if cancel.is_cancelled() {
                return Err(Failure::Cancelled);
            }
            if waited > PATIENCE {
                let mut state = shared.state();
                if !state.queue.is_empty() {
                    // A thread that cannot be had now is asked for again.
                    let _ = shared.look_after_queue(&mut state, true);
                }
            }
            let total = processor_time(pid);
            let (at_first, before) = *first_look.get_or_insert((total.unwrap_or_default(), waited));
            let used = total.map_or(waited, |total| total.saturating_sub(at_first) + before);
            if used > cpu || waited > cpu * WALL { Err(Failure::Time { most: cpu }) } else { Ok(()) }
        };
        self.send(frame)?;
        // What is answered on the way is charged with what it takes.
        loop {
            let answer = self.receive(&mut |_| watch(begun.elapsed()))?;
            if answer.first() != Some(&question) {
                return Ok(answer);
            }
            // What answers may be a library that panics.
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ask(&answer[1..])));
            self.send(&told.unwrap_or_default())?;
        }
    }

    fn send(&mut self, frame: &[u8]) -> Result<(), Failure> {
        let Some(process) = &mut self.process else { return Err(Failure::Start("it has ended".to_owned())) };
        let sent = write_frame(&mut process.input, frame);
        sent.map_err(|_| self.why_ended())
    }

    /// The next frame. `watch` is asked at each tick whether to wait on.
    fn receive(&mut self, watch: &mut dyn FnMut(()) -> Result<(), Failure>) -> Result<Vec<u8>, Failure> {
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

    fn fill(&mut self, bytes: &mut [u8], watch: &mut dyn FnMut(()) -> Result<(), Failure>) -> Result<(), Failure> {
        let mut at = 0;
        while at < bytes.len() {
            let Some(process) = &mut self.process else { return Err(Failure::Start("it has ended".to_owned())) };
            let tick = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as _ };
            let mut fds = [PollFd::new(&process.output, PollFlags::IN)];
            match poll(&mut fds, Some(&tick)) {
                Ok(0) => watch(())?,
                Ok(_) => match process.output.read(&mut bytes[at..]) {
                    Ok(0) => return Err(self.why_ended()),
                    Ok(read) => at += read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => return Err(self.why_ended()),
                },
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Failure::Died(error.to_string())),
            }
        }
        Ok(())
    }

    /// Of a process that has closed its ends.
    fn why_ended(&mut self) -> Failure {
        let Limits { memory, cpu } = self.shared.limits;
        let Some(process) = &mut self.process else { return Failure::Start("it has ended".to_owned()) };
        // It has closed its output, so it ends or has ended; it may hang on the way.
        let _ = process.child.kill();
        let mut words = Vec::new();
        if let Some(errors) = process.child.stderr.take() {
            // Nobody else writes there, so this ends with the process.
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
            // Ours comes after it has closed its output by itself; anyone else's means that the machine has no memory.
            Failure::Memory { most: memory }
        } else {
            Failure::Died(status.to_string())
        }
    }
}

/// Memory of a process, bytes; 0 where it cannot be told.
fn resident(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: Option<u64> = statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

/// Processor time of a process so far.
fn processor_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may hold anything: state, ten numbers, then user and system time in ticks.
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
        // In one piece: the other side wakes up once.
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

/// Reads a frame; `None` where the other side has closed its end.
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

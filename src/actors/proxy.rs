//! Owns the passing of words from one device's exchanges to the other devices (`kernels::exchange`), while steps run: it
//! polls the words that the device stores in host memory, and stores each that is complete in the other devices' memory,
//! where their kernels poll for it. Not here: which steps run, and what the words mean.

use super::mailbox::{Address, Mailbox, mailbox};
use crate::actors::thread::{ActorThread, SpawnError};
use crate::device::{DeviceError, Gate};
use crate::kernels::exchange::{BlockSums, Blocks, SLOTS, WORD_BYTES, is_complete, sent_fault, stop_offset, words_of};
use crate::memory::Buffer;
use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use rustix::time::{ClockId, clock_gettime};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The time without a word after which the host gives up an exchange that other devices wait for. Other programs' time
/// slices and other models' steps last far less.
const PATIENCE: Duration = Duration::from_secs(10);
/// [`PATIENCE`] if a device is a CPU driver. Its kernels take any time, and its threads share the cores with everything
/// else, so only time counts in which this process hardly works (see [`Patience`]).
const PATIENCE_CPU: Duration = Duration::from_secs(120);
/// The processor time that counts as progress: a quarter of a core for [`PATIENCE_CPU`]. A process whose drivers wait uses
/// less, also while each device's watcher looks for its next point (some hundredths of a core); one that computes or
/// compiles uses more, unless the machine leaves it almost nothing.
const PROGRESS: Duration = Duration::from_secs(30);

/// The number of polls between two looks at the clock.
const POLLS_BETWEEN_LOOKS: u32 = 4096;

/// One thread carries a device's words per this many cores of the device's share: these threads spin while steps run.
const CORES_EACH: usize = 2;
/// The maximum number of threads that carry a device's words.
const MOST_THREADS: usize = 8;
/// The minimum number of words of an exchange that a thread carries: a few of them are faster with fewer threads.
const LEAST_WORDS: u32 = 320;
/// The number of words that are loaded at once, so that the processor waits for several cache lines at a time.
const LOADED: usize = 32;
/// The number of polls after which stored words leave the processor's write buffers, if no further ones come.
const POLLS_BEFORE_FENCE: u32 = 16;
/// A thread that waits for a word of a CPU driver sleeps after so many polls.
const YIELDS_BEFORE_SLEEP: u32 = 32;
/// How long it sleeps then.
const CPU_DRIVER_SLEEP: Duration = Duration::from_micros(50);
/// Each thread's words of a sum begin at a multiple of this: a cache line.
const LINE: u64 = 64 / WORD_BYTES;

/// Capacity of the inbox: more than the steps of the plans in flight.
const INBOX: usize = 1024;

/// The exchanges of a step: of sums, then of logits. The first word of an exchange of logits has the number of words behind
/// it, and whether the next exchange of the same rows has words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchanges {
    /// The number of the first exchange, counted from 1 since the devices began. Words carry its low bits.
    pub first: u64,
    /// The number of exchanges of sums.
    pub count: u32,
    /// The numbers of floats of exchanges of sums, which take turns: of the first, the third and so on, and of the others.
    pub floats: [u32; 2],
    /// Whether they are rounded to bfloat16 and pass in blocks.
    pub halves: bool,
    /// The number of exchanges of scored rows, which all have words.
    pub turns: u32,
    /// The number of exchanges of the rows that draw tokens. The first one has a slot of its own.
    pub of_head: u32,
}

impl Exchanges {
    /// Returns the number of the first exchange of scored rows.
    pub fn first_turn(&self) -> u64 {
        self.first + u64::from(self.count)
    }

    /// Returns the number of the first exchange of the rows that draw tokens.
    pub fn first_of_head(&self) -> u64 {
        self.first_turn() + u64::from(self.turns)
    }

    /// Returns the number behind the last exchange.
    pub fn end(&self) -> u64 {
        self.first_of_head() + u64::from(self.of_head)
    }
}

/// The fault of a device that sent words of an exchange although they are wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFault {
    /// The device's index.
    pub device: usize,
    /// The low bits of the number of the exchange.
    pub exchange: u32,
    /// The device's fault word: the number of a call that waited too long for tagged words, or
    /// [`EXCHANGE_FAULT`](crate::kernels::exchange::EXCHANGE_FAULT).
    pub word: u32,
}

/// The memory through which the devices of a replica exchange words.
#[derive(Clone, Debug)]
pub struct ExchangeMemory {
    /// For each device, what it has for the others: host memory.
    pub outboxes: Vec<Arc<Buffer>>,
    /// For each device, what it gets from the others: its own memory.
    pub inboxes: Vec<Arc<Buffer>>,
    /// For each device, the gate that opens to the number of an exchange when all its words have come; none if kernels wait
    /// for words themselves.
    pub gates: Vec<Arc<Gate>>,
    /// The number of words of each slot.
    pub slot_words: u32,
    /// The number of words of the slot for the best tokens of a step's rows, behind all else.
    pub best_words: u32,
    /// Whether a device is a CPU driver.
    pub on_cpu: bool,
}

/// A slot of outboxes and inboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// One of those that exchanges use in turn.
    InTurn,
    /// The one for the best tokens of a step's rows.
    Best,
}

impl ExchangeMemory {
    /// Returns the first word of a slot in an outbox.
    fn slot(&self, place: Place, number: u32) -> u64 {
        match place {
            Place::InTurn => u64::from(number % SLOTS) * u64::from(self.slot_words),
            Place::Best => u64::from(SLOTS) * u64::from(self.slot_words),
        }
    }

    /// Returns all devices but one.
    fn others(&self, from: usize) -> impl Iterator<Item = usize> {
        (0..self.inboxes.len()).filter(move |to| *to != from)
    }

    /// Returns the first word of the same slot of device `from` in the inbox of device `to`.
    fn slot_in(&self, place: Place, number: u32, from: usize, to: usize) -> u64 {
        let index = (from - usize::from(from > to)) as u64;
        match place {
            Place::InTurn => index * u64::from(SLOTS) * u64::from(self.slot_words) + self.slot(place, number),
            Place::Best => {
                let stop = stop_offset(self.slot_words, self.inboxes.len() as u32) / WORD_BYTES;
                stop + 1 + index * u64::from(self.best_words)
            }
        }
    }
}

/// The proxies of a replica, some threads for each device whose words pass to the others. Dropping them ends all exchanges.
#[derive(Debug)]
pub struct Proxies {
    // Field order matters: the inboxes must close before the threads are joined.
    inboxes: Vec<Address<Exchanges>>,
    shared: Arc<Shared>,
    _threads: Vec<ActorThread>,
}

#[derive(Debug)]
struct Shared {
    memory: ExchangeMemory,
    /// Set when exchanges end before their words have come.
    stopped: AtomicBool,
    /// The fault by which they ended, if a device told of one.
    fault: OnceLock<DeviceFault>,
    /// The number of the last exchange that was queued.
    queued: AtomicU64,
    /// For each thread of each device, the number of the last exchange of which it has carried all of its words.
    carried: Mutex<Vec<Vec<u64>>>,
}

impl Shared {
    /// Ends all exchanges, now and later: kernels that wait for words go on without.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let at = stop_offset(self.memory.slot_words, self.memory.inboxes.len() as u32);
        for inbox in &self.memory.inboxes {
            inbox.store_u32(at, 1);
        }
        fence(Ordering::SeqCst);
        self.let_go();
    }

    /// Opens the gates of all exchanges that are queued, after exchanges have ended.
    fn let_go(&self) {
        for gate in &self.memory.gates {
            // A gate of a lost device cannot be opened, and nothing waits at it.
            let _ = gate.open(self.queued.load(Ordering::Acquire));
        }
    }

    /// Notes that a thread of device `from` has carried all of its words of an exchange, and opens the gates of those devices
    /// that have got the words of all.
    fn passed(&self, (from, thread): (usize, usize), number: u64) -> Result<(), DeviceError> {
        // Every change is a single assignment, so a panic leaves it valid.
        let mut carried = self.carried.lock().unwrap_or_else(PoisonError::into_inner);
        carried[from][thread] = number;
        for (to, gate) in self.memory.gates.iter().enumerate() {
            let others = carried.iter().enumerate().filter(|(other, _)| *other != to);
            gate.open(others.flat_map(|(_, threads)| threads).copied().min().unwrap_or(0))?;
        }
        Ok(())
    }
}

impl Proxies {
    /// Starts threads for each device, as many as suit the machine.
    pub fn spawn(memory: ExchangeMemory) -> Result<Proxies, SpawnError> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let each = (cores / (CORES_EACH * memory.outboxes.len())).clamp(1, MOST_THREADS);
        Proxies::spawn_each(memory, each)
    }

    /// Starts `each` threads for each device.
    pub fn spawn_each(memory: ExchangeMemory, each: usize) -> Result<Proxies, SpawnError> {
        let devices = memory.outboxes.len();
        let carried = Mutex::new(vec![vec![0; each]; devices]);
        let (stopped, queued) = (AtomicBool::new(false), AtomicU64::new(0));
        let shared = Arc::new(Shared { memory, stopped, fault: OnceLock::new(), queued, carried });
        // If a thread cannot be started, the inboxes close before the others are joined.
        let (mut threads, mut inboxes) = (Vec::new(), Vec::new());
        for from in 0..devices {
            let (senders, receivers): (Vec<_>, Vec<_>) = (1..each).map(|_| unbounded()).unzip();
            let others = receivers.into_iter().map(Counts::From);
            for (thread, counts) in std::iter::once(Counts::To(senders)).chain(others).enumerate() {
                let (address, inbox) = mailbox(INBOX);
                let of_thread = Arc::clone(&shared);
                threads.push(ActorThread::spawn(format!("proxy {from}.{thread}"), move || {
                    // A panic must not leave kernels waiting.
                    let _stop = StopOnPanic(Arc::clone(&of_thread));
                    run(&of_thread, from, (thread, each), &counts, &inbox);
                })?);
                inboxes.push(address);
            }
        }
        Ok(Proxies { inboxes, shared, _threads: threads })
    }

    /// Queues the exchanges of a step, behind those of earlier steps. Blocks while an inbox is full.
    pub fn carry(&self, exchanges: Exchanges) {
        self.shared.queued.store(exchanges.end() - 1, Ordering::Release);
        if self.has_stopped() {
            return self.shared.let_go();
        }
        for inbox in &self.inboxes {
            // If the thread has ended, exchanges have stopped.
            let _ = inbox.send(exchanges);
        }
    }

    /// Whether exchanges ended before their words had come: all results since then are wrong.
    pub fn has_stopped(&self) -> bool {
        self.shared.stopped.load(Ordering::Acquire)
    }

    /// Returns the fault by which exchanges have ended, if a device told of one.
    pub fn fault(&self) -> Option<DeviceFault> {
        self.shared.fault.get().copied()
    }

    /// Waits until all words of an exchange have passed, which is at once if its step has ended on all devices. Returns false if
    /// exchanges have ended before.
    pub fn have_carried(&self, number: u64) -> bool {
        loop {
            if self.has_stopped() {
                return false;
            }
            let carried = self.shared.carried.lock().unwrap_or_else(PoisonError::into_inner);
            if carried.iter().flatten().all(|last| *last >= number) {
                return true;
            }
            drop(carried);
            std::thread::yield_now();
        }
    }

    /// Ends all exchanges, so that steps that are queued come to an end, with wrong results.
    pub fn stop(&self) {
        self.shared.stop();
    }
}

impl Drop for Proxies {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

/// The processor time in nanoseconds that the threads of all proxies have spent in waits for words, up to their last look at
/// the clock.
static WAITED_NS: AtomicU64 = AtomicU64::new(0);

/// The time for which a wait may go on: it begins again with each [`PROGRESS`] of work.
#[derive(Clone, Copy, Debug)]
struct Patience {
    most: Duration,
    /// When it began last, and the work that had been done by then.
    since: Instant,
    work: Duration,
}

impl Patience {
    /// Creates it at `now`, when `work` has been done since the process began.
    fn new(most: Duration, now: Instant, work: Duration) -> Patience {
        Patience { most, since: now, work }
    }

    /// Whether the time is over at `now`, when `work` has been done since the process began.
    fn is_over(&mut self, now: Instant, work: Duration) -> bool {
        if work.saturating_sub(self.work) >= PROGRESS {
            (self.since, self.work) = (now, work);
        }
        now.saturating_duration_since(self.since) > self.most
    }
}

/// Measures the processor time of the process without that of waits for words.
struct Work {
    /// The processor time of this thread when it last looked.
    own: Duration,
}

impl Work {
    fn new() -> Work {
        Work { own: processor_time(ClockId::ThreadCPUTime) }
    }

    /// Returns the processor time that the process has spent on anything but waits for words.
    fn done(&mut self) -> Duration {
        let own = processor_time(ClockId::ThreadCPUTime);
        let waited = own.saturating_sub(std::mem::replace(&mut self.own, own)).as_nanos() as u64;
        let waited = WAITED_NS.fetch_add(waited, Ordering::Relaxed) + waited;
        processor_time(ClockId::ProcessCPUTime).saturating_sub(Duration::from_nanos(waited))
    }
}

fn processor_time(of: ClockId) -> Duration {
    let time = clock_gettime(of);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

struct StopOnPanic(Arc<Shared>);

impl Drop for StopOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// A thread among those that carry the words of a device.
#[derive(Clone, Copy, Debug)]
struct Carrier {
    from: usize,
    thread: usize,
    threads: usize,
}

impl Carrier {
    /// Returns the thread's share of `words` words from word `first` on.
    fn share(&self, first: u64, words: u64) -> Range<u64> {
        let sharing = self.threads.min((words / u64::from(LEAST_WORDS)) as usize).max(1);
        let first_of = |thread: usize| match thread < sharing {
            true => first + words * thread as u64 / sharing as u64 / LINE * LINE,
            false => first + words,
        };
        first_of(self.thread)..first_of(self.thread + 1)
    }
}

/// The number of words behind the first word of an exchange of logits, and whether the next exchange of the same rows has
/// words.
type Counted = (u32, bool);

/// Where a thread's [`Counted`] of each exchange of logits go to, or come from. A device's first thread reads them in the
/// first word and tells its other threads. Those cannot read them there: nothing waits for a thread without words of its
/// own, so the device may have written other words to the slot before such a thread looks.
#[derive(Debug)]
enum Counts {
    To(Vec<Sender<Counted>>),
    From(Receiver<Counted>),
}

/// Carries the share of thread `thread` of `threads` in the words of device `from`, exchange by exchange.
fn run(shared: &Shared, from: usize, (thread, threads): (usize, usize), counts: &Counts, inbox: &Mailbox<Exchanges>) {
    let carrier = Carrier { from, thread, threads };
    while let Ok(exchanges) = inbox.recv() {
        let (first_turn, first_of_head) = (exchanges.first_turn(), exchanges.first_of_head());
        let sums = exchanges.floats.map(|floats| carrier.share(0, words_of(floats.into())));
        let mut has_words = true;
        for number in exchanges.first..exchanges.end() {
            let turn = ((number - exchanges.first) % 2) as usize;
            let carried = match number {
                _ if number < first_turn && exchanges.halves => {
                    carry_blocks(shared, carrier, number as u32, Blocks::of(exchanges.floats[turn]))
                }
                _ if number < first_turn => carry(shared, from, (number as u32, Place::InTurn), sums[turn].clone()),
                _ if number < first_of_head => {
                    carry_counted(shared, carrier, counts, (number as u32, Place::InTurn)).is_some()
                }
                _ if !has_words => true,
                _ => {
                    let place = if number == first_of_head { Place::Best } else { Place::InTurn };
                    let follows = carry_counted(shared, carrier, counts, (number as u32, place));
                    has_words = follows == Some(true);
                    follows.is_some()
                }
            };
            if !carried {
                return shared.stop();
            }
            if let Err(error) = shared.passed((from, thread), number) {
                tracing::error!(%error, exchange = number, "a device cannot be told that words have come");
                return shared.stop();
            }
        }
    }
}

/// Carries words of an exchange whose first word has the number of the others. Returns whether the next exchange of the same
/// rows has words; `None` if words have not come.
fn carry_counted(shared: &Shared, carrier: Carrier, counts: &Counts, (number, place): (u32, Place)) -> Option<bool> {
    let from = carrier.from;
    let (words, follows) = match counts {
        Counts::To(others) => {
            let counted = count(shared, from, (number, place))?;
            for other in others {
                // If the thread has ended, exchanges have stopped.
                let _ = other.send(counted);
            }
            if !carry(shared, from, (number, place), 0..1) {
                return None;
            }
            counted
        }
        Counts::From(first) => told(shared, first)?,
    };
    carry(shared, from, (number, place), carrier.share(1, words.into())).then_some(follows)
}

/// Reads the first word of an exchange of logits of a device, when it has come.
fn count(shared: &Shared, from: usize, (number, place): (u32, Place)) -> Option<Counted> {
    let memory = &shared.memory;
    let at = memory.slot(place, number);
    let mut word = [[0; 4]];
    memory.outboxes[from].load_quads(at * WORD_BYTES, &mut word);
    while !is_complete(word[0], number) {
        if !wait(shared, from, number, at) {
            return None;
        }
        memory.outboxes[from].load_quads(at * WORD_BYTES, &mut word);
    }
    let [words, follows, ..] = word[0];
    let room = if place == Place::Best { memory.best_words } else { memory.slot_words };
    if words >= room {
        tracing::error!(
            exchange = number,
            device = from,
            words,
            room,
            "a device sends more words than there is room for"
        );
        return None;
    }
    Some((words, follows != 0))
}

/// Waits for what the device's first thread tells of the next exchange of logits. That thread watches the clock.
fn told(shared: &Shared, first: &Receiver<Counted>) -> Option<Counted> {
    loop {
        match first.try_recv() {
            Ok(counted) => return Some(counted),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if shared.stopped.load(Ordering::Acquire) => return None,
            Err(TryRecvError::Empty) if shared.memory.on_cpu => std::thread::yield_now(),
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
}

/// Carries words of one exchange. Returns whether all have come.
fn carry(shared: &Shared, from: usize, (number, place): (u32, Place), words: Range<u64>) -> bool {
    let memory = &shared.memory;
    let slot = memory.slot(place, number);
    let outbox = &memory.outboxes[from];
    // The slots of this device's words in the others' inboxes.
    let slot_of = |to: usize| (&*memory.inboxes[to], memory.slot_in(place, number, from, to));
    let others = || memory.others(from).map(slot_of);
    let mut block = [[0; 4]; LOADED];
    let mut word = words.start;
    while word < words.end {
        let block = &mut block[..(words.end - word).min(LOADED as u64) as usize];
        outbox.load_quads((slot + word) * WORD_BYTES, block);
        let complete = block.iter().take_while(|word| is_complete(**word, number)).count();
        for (to, first) in others() {
            to.store_quads((first + word) * WORD_BYTES, &block[..complete]);
        }
        word += complete as u64;
        if complete < block.len() && !wait(shared, from, number, slot + word) {
            return false;
        }
    }
    // What was stored leaves the processor's write buffers now.
    fence(Ordering::SeqCst);
    true
}

/// Carries the thread's blocks of an exchange of sums, in turn with the other threads. Returns whether all have come.
fn carry_blocks(shared: &Shared, carrier: Carrier, number: u32, blocks: Blocks) -> bool {
    let (memory, from) = (&shared.memory, carrier.from);
    let slot = memory.slot(Place::InTurn, number);
    for block in (carrier.thread as u32..blocks.count()).step_by(carrier.threads) {
        let header = u64::from(blocks.header(block, memory.slot_words));
        let mut since = None;
        loop {
            if !wait(shared, from, number, slot + header) {
                return false;
            }
            let mut word = [[0; 4]];
            memory.outboxes[from].load_quads((slot + header) * WORD_BYTES, &mut word);
            let [[x, y, z, _]] = word;
            let sums = copy_block(memory, from, number, blocks.places(block, memory.slot_words));
            if sums.bits() == [x, y, z] {
                // The header is behind the block in the other devices' memory too.
                fence(Ordering::SeqCst);
                for to in memory.others(from) {
                    let at = memory.slot_in(Place::InTurn, number, from, to) + header;
                    memory.inboxes[to].store_quads(at * WORD_BYTES, &word);
                }
                break;
            }
            // Words of the block are on their way, unless exchanges have ended.
            if shared.stopped.load(Ordering::Acquire) {
                return false;
            }
            if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                tracing::error!(exchange = number, device = from, block, "a block in an exchange is not whole");
                return false;
            }
        }
    }
    fence(Ordering::SeqCst);
    true
}

/// Copies a block, the words of a slot in these places, from a device to all others, and returns the sums of its words.
fn copy_block(memory: &ExchangeMemory, from: usize, number: u32, words: Range<u32>) -> BlockSums {
    let slot = memory.slot(Place::InTurn, number);
    let (mut sums, mut at) = (BlockSums::default(), u64::from(words.start));
    let mut some = [[0; 4]; LOADED];
    while at < u64::from(words.end) {
        let some = &mut some[..(u64::from(words.end) - at).min(LOADED as u64) as usize];
        memory.outboxes[from].load_quads((slot + at) * WORD_BYTES, some);
        sums.add(some);
        for to in memory.others(from) {
            let first = memory.slot_in(Place::InTurn, number, from, to);
            memory.inboxes[to].store_quads((first + at) * WORD_BYTES, some);
        }
        at += some.len() as u64;
    }
    sums
}

/// Waits until a word of an exchange, the `at`-th of the outbox, has come. Returns whether it has.
fn wait(shared: &Shared, from: usize, number: u32, at: u64) -> bool {
    let memory = &shared.memory;
    let (mut polls, mut word) = (0u32, [[0; 4]]);
    let mut clock: Option<(Work, Patience)> = None;
    loop {
        memory.outboxes[from].load_quads(at * WORD_BYTES, &mut word);
        if is_complete(word[0], number) {
            return true;
        }
        if let Some(word) = sent_fault(word[0], number) {
            // The first one is the cause: other devices wait for this one's words. After a stop, that is the cause of all.
            if !shared.stopped.load(Ordering::Acquire) {
                let _ = shared.fault.set(DeviceFault { device: from, exchange: number, word });
            }
            return false;
        }
        polls = polls.wrapping_add(1);
        if polls == POLLS_BEFORE_FENCE {
            fence(Ordering::SeqCst);
        }
        std::hint::spin_loop();
        // A CPU driver computes what is waited for, on cores that this thread should leave to it.
        if memory.on_cpu && polls.is_multiple_of(YIELDS_BEFORE_SLEEP) {
            std::thread::sleep(CPU_DRIVER_SLEEP);
        } else if memory.on_cpu {
            std::thread::yield_now();
        }
        if !polls.is_multiple_of(POLLS_BETWEEN_LOOKS) && !memory.on_cpu {
            continue;
        }
        if shared.stopped.load(Ordering::Acquire) {
            return false;
        }
        if !polls.is_multiple_of(POLLS_BETWEEN_LOOKS) {
            continue;
        }
        let now = Instant::now();
        let begin = || match memory.on_cpu {
            true => {
                let mut work = Work::new();
                let done = work.done();
                (work, Patience::new(PATIENCE_CPU, now, done))
            }
            false => (Work::new(), Patience::new(PATIENCE, now, Duration::ZERO)),
        };
        let (work, patience) = clock.get_or_insert_with(begin);
        // A GPU's progress is not seen here.
        let done = if memory.on_cpu { work.done() } else { Duration::ZERO };
        if patience.is_over(now, done) {
            tracing::error!(exchange = number, device = from, word = at, "a device has stopped in an exchange");
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Goal: a wait for a CPU driver goes on for as long as the driver computes, and ends a fixed time after it has stopped.
    #[test]
    fn patience_begins_again_with_work() {
        let start = Instant::now();
        let mut patience = Patience::new(PATIENCE_CPU, start, 100 * SECOND);
        // Half a core, for an hour.
        for second in 1..=3600 {
            assert!(!patience.is_over(start + second * SECOND, 100 * SECOND + second * SECOND / 2), "{second} s");
        }
        // From then on a tenth of a core: less than counts.
        let (stopped, work) = (start + 3600 * SECOND, 1900 * SECOND);
        let mut over =
            (1..=600).filter(|second| patience.is_over(stopped + *second * SECOND, work + *second * SECOND / 10));
        let first = over.next().map(|second| second * SECOND);
        // The last progress was seen up to 60 s before: 30 s of half a core.
        assert!(
            first.is_some_and(|first| first > PATIENCE_CPU - 60 * SECOND && first <= PATIENCE_CPU + SECOND),
            "{first:?}"
        );
        // Without work, which is never seen of GPUs, the time does not grow.
        let mut patience = Patience::new(PATIENCE, start, Duration::ZERO);
        assert!(!patience.is_over(start + PATIENCE, Duration::ZERO));
        assert!(patience.is_over(start + PATIENCE + SECOND, Duration::ZERO));
    }

    /// Goal: waiting is no progress, but work of another thread is.
    #[test]
    fn work_is_processor_time_without_that_of_waits() {
        let spin = |until: Duration| {
            while processor_time(ClockId::ThreadCPUTime) < until {
                std::hint::spin_loop();
            }
        };
        let now = || processor_time(ClockId::ThreadCPUTime);
        let most = Duration::from_millis(50);
        let mut work = Work::new();
        let before = work.done();
        let of_process = processor_time(ClockId::ProcessCPUTime);
        spin(now() + most);
        let own = work.done().saturating_sub(before);
        let others = processor_time(ClockId::ProcessCPUTime).saturating_sub(of_process + most);
        // Other tests of the process may run at the same time.
        assert!(own <= others + most / 5, "{own:?} of work, {others:?} of other threads");
        let before = work.done();
        std::thread::scope(|scope| {
            scope.spawn(|| spin(most));
        });
        assert!(work.done().saturating_sub(before) >= most * 4 / 5);
    }
}

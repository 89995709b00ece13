//! Admission and scheduling of the CPU work that precedes admission to the engine or answers a call directly: chat
//! templates, tokenizing, grammars, decoding. The work runs on blocking threads, with a bounded number of jobs at once.
//! Further jobs wait in a bounded queue, ordered by due time. A job that has begun cannot be stopped: it keeps its
//! turn, and everything it owns, until it ends, even if its caller has gone away.
//! Not here: what a job does, and which client limits it counts against (`clients`).

use super::clients::Client;
use super::refusal::Refusal;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The lower and upper bound of the number of jobs that run at once; between them it is the number of processors.
const AT_ONCE: (usize, usize) = (4, 16);
/// The most message bytes of a short job. A job with more bytes, or with a constraint, is a long job; long jobs get at
/// most half of the turns.
pub const LONG: usize = 64 << 10;
/// The most message bytes of all long jobs that run at once, because encoding takes 100 to 150 times the memory of the
/// text. A job that exceeds the bound by itself runs as the only long job. By default a text of the largest size
/// (`prompt_text_bytes`, 4 MiB) is one of them.
const LONG_BYTES: usize = 4 << 20;
/// The most jobs that wait for a turn, over all clients.
pub const WAITING: usize = 512;
/// The expected duration of a job for each MiB of its message.
const OF_A_MIB: Duration = Duration::from_secs(1);
/// The expected duration that a constraint adds to a job.
const OF_A_CONSTRAINT: Duration = Duration::from_millis(250);
/// The expected duration of the smallest job.
const LEAST: Duration = Duration::from_millis(1);

/// The cost of a job as far as it is known before the job runs.
#[derive(Clone, Debug)]
pub struct Size {
    /// The encoded size of the request message in bytes.
    pub bytes: usize,
    /// Whether the job compiles a constraint.
    pub constraint: bool,
}

impl Size {
    fn long(&self) -> bool {
        self.constraint || self.bytes > LONG
    }

    fn expected(&self) -> Duration {
        let constraint = if self.constraint { OF_A_CONSTRAINT } else { Duration::ZERO };
        LEAST + constraint + OF_A_MIB.mul_f64(self.bytes as f64 / f64::from(1 << 20))
    }
}

/// The bounds of one [`Jobs`].
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Jobs that run at once.
    at_once: usize,
    /// Long jobs among them.
    long: usize,
    /// Jobs that wait.
    waiting: usize,
    /// Message bytes of all jobs, running and waiting.
    bytes: usize,
}

/// The running jobs and the queue of waiting jobs.
#[derive(Debug)]
pub struct Jobs {
    bounds: Bounds,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    /// Long jobs among the running ones.
    long: usize,
    /// Message bytes of the running long jobs.
    long_bytes: usize,
    /// The queue, ordered by due time; the number makes keys unique.
    waiting: BTreeMap<Key, Waiting>,
    /// Message bytes of all jobs, running and waiting.
    bytes: usize,
    /// The number of jobs of each client, running and waiting.
    clients: HashMap<Client, usize>,
    next: u64,
}

/// The due time of a waiting job and its number.
type Key = (Instant, u64);
/// The receiver gets a turn, or the reason why the job lost its waiting place.
type Answer = Result<Turn, Refusal>;

#[derive(Debug)]
struct Waiting {
    client: Client,
    size: Size,
    turn: oneshot::Sender<Answer>,
}

/// The waiting places or the waiting bytes: the two resources that a full queue can run out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scarce {
    Places,
    Bytes,
}

impl Scarce {
    /// Returns the amount of the scarce resource that a job of this size takes: one place, or its bytes.
    fn of(self, size: &Size) -> usize {
        match self {
            Scarce::Places => 1,
            Scarce::Bytes => size.bytes,
        }
    }
}

impl Jobs {
    /// Creates a queue whose jobs, running and waiting, have at most `bytes` message bytes together.
    pub fn new(bytes: usize) -> Jobs {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let at_once = processors.clamp(AT_ONCE.0, AT_ONCE.1);
        Jobs::of(Bounds { at_once, long: at_once / 2, waiting: WAITING, bytes })
    }

    fn of(bounds: Bounds) -> Jobs {
        Jobs { bounds, state: Mutex::default() }
    }

    /// Runs `work` on a blocking thread when its turn comes. If the future is dropped before that, `work` never runs;
    /// if it is dropped later, `work` runs to its end. Fails with RESOURCE_EXHAUSTED if the queue has no room for the
    /// job, or if the job loses its place to another client.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Jobs>,
        client: Client,
        size: Size,
        work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let turn = self.turn(client, size).await?;
        let job = move || {
            let _turn = turn;
            work()
        };
        // The panic hook has logged a panic of the job already.
        tokio::task::spawn_blocking(job).await.unwrap_or_else(|error| Err(Refusal::Failed(error.to_string())))
    }

    async fn turn(self: &Arc<Jobs>, client: Client, size: Size) -> Result<Turn, Refusal> {
        let (sender, turn) = oneshot::channel();
        let (key, granted) = {
            let mut state = self.state();
            let mut displaced = Vec::new();
            let room = self.make_room(&mut state, &client, &size, &mut displaced);
            if let Err(refusal) = room {
                // Nobody loses a place to a job that is refused anyway.
                displaced.into_iter().for_each(|(key, waiting)| state.restore(key, waiting));
                return Err(refusal);
            }
            let mut granted: Vec<_> = displaced.into_iter().map(|(_, waiting)| self.displace(waiting)).collect();
            state.bytes += size.bytes;
            let jobs = state.clients.entry(client.clone()).or_insert(0);
            // The more jobs a client has, the later its next job is due.
            let due = Instant::now() + size.expected() * u32::try_from(*jobs + 1).unwrap_or(u32::MAX);
            *jobs += 1;
            let key = (due, state.next);
            state.next += 1;
            state.waiting.insert(key, Waiting { client, size, turn: sender });
            granted.append(&mut self.grant(&mut state));
            (key, granted)
        };
        hand_out(granted);
        let _left = Left { jobs: self, key };
        // The sender leaves the queue only to be answered.
        turn.await.unwrap_or_else(|error| Err(Refusal::Failed(error.to_string())))
    }

    /// Makes room in the queue for a job by removing jobs of the client that takes most of what is scarce. Fails if
    /// that client is the newcomer, or takes no more than the newcomer would. Running jobs are never removed.
    fn make_room(
        &self,
        state: &mut State,
        client: &Client,
        size: &Size,
        displaced: &mut Vec<(Key, Waiting)>,
    ) -> Result<(), Refusal> {
        loop {
            let Bounds { waiting: most, bytes: most_bytes, .. } = self.bounds;
            let (scarce, refusal) = if state.waiting.len() >= most {
                (Scarce::Places, Refusal::Jobs { waiting: state.waiting.len(), most })
            } else if state.bytes.saturating_add(size.bytes) > most_bytes {
                let crowded = Refusal::Crowded { held: state.bytes, bytes: size.bytes, most: most_bytes };
                (Scarce::Bytes, crowded)
            } else {
                return Ok(());
            };
            let Some(victim) = state.victim(client, size, scarce) else { return Err(refusal) };
            displaced.extend(state.take(victim).map(|waiting| (victim, waiting)));
        }
    }

    /// The answer to a job that lost its waiting place.
    fn displace(&self, waiting: Waiting) -> (oneshot::Sender<Answer>, Answer) {
        let client = waiting.client.to_string();
        (waiting.turn, Err(Refusal::Displaced { client, most: self.bounds.waiting }))
    }

    /// Removes the jobs whose turn has come from the queue. Jobs are taken in the order of the queue with one
    /// exception: short jobs pass long ones while the long ones have all of their turns, or too many bytes. Long jobs
    /// never pass each other, so a job that is larger than [`LONG_BYTES`] waits only for long jobs that were due before
    /// it.
    fn grant(self: &Arc<Jobs>, state: &mut State) -> Vec<(oneshot::Sender<Answer>, Answer)> {
        let mut granted = Vec::new();
        while state.running < self.bounds.at_once {
            let first_long = state.waiting.iter().find(|(_, waiting)| waiting.size.long()).map(|(key, _)| *key);
            let may = |key: &Key, waiting: &Waiting| {
                let fits = state.long == 0 || state.long_bytes.saturating_add(waiting.size.bytes) <= LONG_BYTES;
                !waiting.size.long() || (Some(*key) == first_long && state.long < self.bounds.long && fits)
            };
            let Some(key) = state.waiting.iter().find(|(key, waiting)| may(key, waiting)).map(|(key, _)| *key) else {
                break;
            };
            let Some(Waiting { client, size, turn }) = state.waiting.remove(&key) else { break };
            state.running += 1;
            if size.long() {
                state.long += 1;
                state.long_bytes += size.bytes;
            }
            granted.push((turn, Ok(Turn { jobs: Arc::clone(self), client, size })));
        }
        granted
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic can happen while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The waiting job that makes room for a newcomer: the last one of the client whose waiting jobs take most of what
    /// is scarce. `None` if no other client takes more than the newcomer would.
    fn victim(&self, newcomer: &Client, size: &Size, scarce: Scarce) -> Option<Key> {
        let mut taken: HashMap<&Client, (usize, Key)> = HashMap::new();
        for (key, waiting) in &self.waiting {
            let (amount, last) = taken.entry(&waiting.client).or_insert((0, *key));
            *amount += scarce.of(&waiting.size);
            *last = *key;
        }
        let own = taken.get(newcomer).map_or(0, |(amount, _)| *amount) + scarce.of(size);
        let others = taken.into_iter().filter(|(client, _)| *client != newcomer);
        let (_, (amount, last)) = others.max_by_key(|(_, taken)| *taken)?;
        (amount > own).then_some(last)
    }

    /// Removes a waiting job from the queue and from all counts.
    fn take(&mut self, key: Key) -> Option<Waiting> {
        let waiting = self.waiting.remove(&key)?;
        self.forget(&waiting.client, &waiting.size);
        Some(waiting)
    }

    /// Undoes [`State::take`].
    fn restore(&mut self, key: Key, waiting: Waiting) {
        self.bytes += waiting.size.bytes;
        *self.clients.entry(waiting.client.clone()).or_insert(0) += 1;
        self.waiting.insert(key, waiting);
    }

    fn forget(&mut self, client: &Client, size: &Size) {
        self.bytes -= size.bytes;
        if let Some(jobs) = self.clients.get_mut(client) {
            *jobs -= 1;
            if *jobs == 0 {
                self.clients.remove(client);
            }
        }
    }
}

/// Answers waiting jobs. Must be called without the lock: a turn whose receiver has gone is dropped here, and takes it.
fn hand_out(granted: Vec<(oneshot::Sender<Answer>, Answer)>) {
    for (sender, turn) in granted {
        let _ = sender.send(turn);
    }
}

/// A guard that removes a waiting job from the queue when its caller goes away.
struct Left<'a> {
    jobs: &'a Jobs,
    key: Key,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.jobs.state().take(self.key);
    }
}

/// The turn of one running job. Dropping it ends the turn and starts the next jobs.
#[derive(Debug)]
struct Turn {
    jobs: Arc<Jobs>,
    client: Client,
    size: Size,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let granted = {
            let mut state = self.jobs.state();
            state.running -= 1;
            if self.size.long() {
                state.long -= 1;
                state.long_bytes -= self.size.bytes;
            }
            state.forget(&self.client, &self.size);
            self.jobs.grant(&mut state)
        };
        hand_out(granted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use tokio::task::JoinHandle;

    const SHORT: Size = Size { bytes: 100, constraint: false };
    const LARGE: Size = Size { bytes: 1 << 20, constraint: false };

    fn jobs(at_once: usize, long: usize, waiting: usize, bytes: usize) -> Arc<Jobs> {
        Arc::new(Jobs::of(Bounds { at_once, long, waiting, bytes }))
    }

    fn client(name: &str) -> Client {
        Client::Named(name.to_owned())
    }

    /// Starts a job that ends when its sender is dropped; returns once it runs.
    async fn begun(jobs: &Arc<Jobs>, of: &str, size: Size) -> (mpsc::Sender<()>, JoinHandle<()>) {
        let (end, ended) = mpsc::channel::<()>();
        let (begun, begins) = oneshot::channel();
        let (jobs, client) = (Arc::clone(jobs), client(of));
        let task = tokio::spawn(async move {
            let work = move || {
                let _ = begun.send(());
                let _ = ended.recv();
                Ok(())
            };
            jobs.run(client, size, work).await.unwrap();
        });
        begins.await.unwrap();
        (end, task)
    }

    /// Waits until a condition holds, but not for ever.
    async fn until(holds: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !holds() {
            assert!(Instant::now() < until, "it does not come to that");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until `count` jobs wait.
    async fn waiting(jobs: &Jobs, count: usize) {
        until(|| jobs.state().waiting.len() == count).await;
    }

    fn nothing_is_left(jobs: &Jobs) {
        let state = jobs.state();
        assert_eq!((state.running, state.long, state.bytes, state.waiting.len()), (0, 0, 0, 0));
        assert!(state.clients.is_empty());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_job_that_has_begun_keeps_its_turn_and_one_that_waits_gives_it_up() {
        let jobs = jobs(1, 1, 2, 1 << 20);
        let (end, task) = begun(&jobs, "a", SHORT).await;
        // The caller goes away.
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        assert_eq!(jobs.state().running, 1, "the job goes on");
        let ran = Arc::new(Mutex::new(Vec::new()));
        let queue = |name: &'static str, size: Size| {
            let (jobs, ran) = (Arc::clone(&jobs), Arc::clone(&ran));
            tokio::spawn(async move {
                let work = move || {
                    ran.lock().unwrap().push(name);
                    Ok(())
                };
                jobs.run(client(name), size, work).await
            })
        };
        let gone = queue("gone", SHORT);
        waiting(&jobs, 1).await;
        let stays = queue("stays", SHORT);
        waiting(&jobs, 2).await;
        let refused = queue("refused", SHORT).await.unwrap().unwrap_err();
        assert_eq!(refused.to_string(), "2 requests are waiting to be prepared; the maximum is 2");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        gone.abort();
        assert!(gone.await.is_err());
        waiting(&jobs, 1).await;
        drop(end);
        stays.await.unwrap().unwrap();
        assert_eq!(*ran.lock().unwrap(), ["stays"]);
        let error = jobs.run(client("a"), Size { bytes: (1 << 20) + 1, constraint: false }, || Ok(())).await;
        assert_eq!(error.unwrap_err().code(), tonic::Code::ResourceExhausted);
        nothing_is_left(&jobs);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn short_jobs_and_those_of_others_do_not_wait_for_long_ones() {
        let jobs = jobs(2, 1, 100, 1 << 30);
        let (end, first) = begun(&jobs, "greedy", LARGE).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        let mut queue = |name: &'static str, of: &str, size: Size| {
            let (jobs, order, client) = (Arc::clone(&jobs), Arc::clone(&order), client(of));
            tasks.push(tokio::spawn(async move {
                let work = move || {
                    order.lock().unwrap().push(name);
                    Ok(())
                };
                jobs.run(client, size, work).await.unwrap();
            }));
        };
        for count in 1..=3 {
            queue("greedy's", "greedy", LARGE);
            waiting(&jobs, count).await;
        }
        queue("other's", "other", LARGE);
        waiting(&jobs, 4).await;
        // Long jobs may take one of the two turns.
        let (also, short) = begun(&jobs, "other", SHORT).await;
        assert!(order.lock().unwrap().is_empty());
        drop((end, also));
        first.await.unwrap();
        short.await.unwrap();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), ["other's", "greedy's", "greedy's", "greedy's"]);
        nothing_is_left(&jobs);
    }

    /// Queues a job that does nothing.
    fn queue(jobs: &Arc<Jobs>, of: &str, size: Size) -> JoinHandle<Result<(), Refusal>> {
        let (jobs, client) = (Arc::clone(jobs), client(of));
        tokio::spawn(async move { jobs.run(client, size, || Ok(())).await })
    }

    fn refused<T>(results: &[Result<T, Refusal>]) -> usize {
        results.iter().filter(|result| result.is_err()).count()
    }

    async fn all(tasks: Vec<JoinHandle<Result<(), Refusal>>>) -> Vec<Result<(), Refusal>> {
        let mut results = Vec::new();
        for task in tasks {
            results.push(task.await.unwrap());
        }
        results
    }

    /// Goal: a client that takes all waiting places keeps nobody else out. Method: a greedy client fills the queue and
    /// goes on asking; another client's jobs all run, at the cost of the greedy client's.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_full_queue_is_full_for_the_client_that_filled_it() {
        let jobs = jobs(1, 1, 64, 1 << 20);
        let (end, task) = begun(&jobs, "greedy", SHORT).await;
        let mut greedy = Vec::new();
        for count in 1..=64 {
            greedy.push(queue(&jobs, "greedy", SHORT));
            waiting(&jobs, count).await;
        }
        let error = queue(&jobs, "greedy", SHORT).await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "64 requests are waiting to be prepared; the maximum is 64");
        let mut others: Vec<_> = (0..20).map(|_| queue(&jobs, "other", SHORT)).collect();
        until(|| jobs.state().clients.get(&client("other")) == Some(&20)).await;
        assert_eq!(jobs.state().waiting.len(), 64);
        // Two clients share the places equally: one that asks for more than half of them gets half.
        others.extend((0..20).map(|_| queue(&jobs, "other", SHORT)));
        until(|| others.iter().filter(|task| task.is_finished()).count() == 8).await;
        assert_eq!(jobs.state().clients.get(&client("other")), Some(&32));
        drop(end);
        task.await.unwrap();
        assert_eq!(refused(&all(others).await), 8);
        let greedy = all(greedy).await;
        assert_eq!(refused(&greedy), 32);
        let displaced = greedy.iter().find_map(|result| result.as_ref().err()).unwrap();
        assert_eq!(displaced.code(), tonic::Code::ResourceExhausted);
        assert_eq!(
            displaced.to_string(),
            "client \"greedy\" has most of the waiting requests, and another client needs a place in the queue of 64"
        );
        nothing_is_left(&jobs);
    }

    /// Goal: a client whose waiting messages take all bytes keeps nobody else out.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn waiting_bytes_are_shared_as_places_are() {
        let jobs = jobs(1, 1, 64, 10 << 20);
        let (end, task) = begun(&jobs, "greedy", SHORT).await;
        let mut greedy = Vec::new();
        for count in 1..=9 {
            greedy.push(queue(&jobs, "greedy", LARGE));
            waiting(&jobs, count).await;
        }
        let error = queue(&jobs, "greedy", LARGE).await.unwrap().unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted, "{error}");
        // A job that could not have room is refused, and displaces nobody.
        let error = queue(&jobs, "other", Size { bytes: 9 << 20, constraint: false }).await.unwrap().unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted, "{error}");
        assert_eq!(jobs.state().waiting.len(), 9);
        let others = vec![queue(&jobs, "other", LARGE), queue(&jobs, "other", Size { bytes: 3 << 20, ..LARGE })];
        until(|| jobs.state().clients.get(&client("other")) == Some(&2)).await;
        drop(end);
        task.await.unwrap();
        assert_eq!(refused(&all(others).await), 0);
        assert_eq!(refused(&all(greedy).await), 4);
        nothing_is_left(&jobs);
    }

    /// Goal: a job that runs only as the only long job is not passed by long jobs that come later. Method: it waits
    /// for a running long job, and later long jobs fit beside that.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_job_that_runs_alone_is_not_passed_for_ever() {
        let jobs = jobs(4, 2, 100, 1 << 30);
        let (end, running) = begun(&jobs, "small", LARGE).await;
        let huge = queue(&jobs, "huge", Size { bytes: LONG_BYTES + 1, constraint: false });
        waiting(&jobs, 1).await;
        // As if it had waited until it was due.
        {
            let mut state = jobs.state();
            let (_, huge) = state.waiting.pop_first().unwrap();
            let key = (Instant::now(), u64::MAX);
            state.waiting.insert(key, huge);
        }
        let later: Vec<_> = (0..5).map(|_| queue(&jobs, "small", LARGE)).collect();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(jobs.state().waiting.len(), 6, "later long jobs have passed the one that waits to run alone");
        drop(end);
        running.await.unwrap();
        assert_eq!(refused(&all(later).await), 0);
        huge.await.unwrap().unwrap();
        nothing_is_left(&jobs);
    }
}

//! The CPU work of calls before they are admitted or answered: templates, tokenizing, grammars, decoding. It runs on
//! threads that may block, so many jobs at once; further ones wait within bounds, and those that take little go first. A
//! job that has begun belongs to nobody: its caller may go away, its turn, and what it holds, last until it ends.
//! Deliberately absent: what a job does, whose places it takes.

use super::clients::Client;
use super::refusal::Refusal;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Jobs at once: as many as there are processors, within these.
const AT_ONCE: (usize, usize) = (4, 16);
/// A job of more bytes is a long one, and so is one with a constraint. Long ones may take half of the turns.
pub const LONG: usize = 64 << 10;
/// Bytes of the long jobs that run at once, of which one may have more: encoding takes a hundred times the memory.
const LONG_BYTES: usize = 8 << 20;
/// Jobs that may wait for a turn.
pub const WAITING: usize = 512;
/// How long a job is expected to take: for each MiB of its message, and if it has a constraint.
const OF_A_MIB: Duration = Duration::from_secs(1);
const OF_A_CONSTRAINT: Duration = Duration::from_millis(250);
const LEAST: Duration = Duration::from_millis(1);

/// What is known of a job before it runs.
#[derive(Clone, Debug)]
pub struct Size {
    /// Of its message.
    pub bytes: usize,
    /// Whether something is compiled.
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

/// How many jobs there may be.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    at_once: usize,
    long: usize,
    waiting: usize,
    /// Of the messages of all jobs, those that wait included.
    bytes: usize,
}

/// Who runs, and who waits.
#[derive(Debug)]
pub struct Jobs {
    bounds: Bounds,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    /// Of them, and their bytes.
    long: usize,
    long_bytes: usize,
    /// By when they should have ended.
    waiting: BTreeMap<(Instant, u64), Waiting>,
    bytes: usize,
    /// Jobs of each client, those that wait included.
    clients: HashMap<Client, usize>,
    next: u64,
}

#[derive(Debug)]
struct Waiting {
    client: Client,
    size: Size,
    turn: oneshot::Sender<Turn>,
}

impl Jobs {
    /// Whose messages have `bytes` at most, all together.
    pub fn new(bytes: usize) -> Jobs {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let at_once = processors.clamp(AT_ONCE.0, AT_ONCE.1);
        Jobs::of(Bounds { at_once, long: at_once / 2, waiting: WAITING, bytes })
    }

    fn of(bounds: Bounds) -> Jobs {
        Jobs { bounds, state: Mutex::default() }
    }

    /// Runs a job when its turn has come. Dropped before, it never runs; dropped after, it runs to its end.
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
        // A panic was logged where it happened.
        tokio::task::spawn_blocking(job).await.unwrap_or_else(|error| Err(Refusal::Failed(error.to_string())))
    }

    async fn turn(self: &Arc<Jobs>, client: Client, size: Size) -> Result<Turn, Refusal> {
        let (sender, turn) = oneshot::channel();
        let (key, granted) = {
            let mut state = self.state();
            let Bounds { waiting: most, bytes: most_bytes, .. } = self.bounds;
            if state.waiting.len() >= most {
                return Err(Refusal::Jobs { waiting: state.waiting.len(), most });
            }
            let held = state.bytes;
            if held.saturating_add(size.bytes) > most_bytes {
                return Err(Refusal::Crowded { held, bytes: size.bytes, most: most_bytes });
            }
            state.bytes += size.bytes;
            let jobs = state.clients.entry(client.clone()).or_insert(0);
            // Who has many waits behind who has few.
            let due = Instant::now() + size.expected() * u32::try_from(*jobs + 1).unwrap_or(u32::MAX);
            *jobs += 1;
            let key = (due, state.next);
            state.next += 1;
            state.waiting.insert(key, Waiting { client, size, turn: sender });
            (key, self.grant(&mut state))
        };
        hand_out(granted);
        let _left = Left { jobs: self, key };
        // The sender leaves the queue with its turn only.
        turn.await.map_err(|error| Refusal::Failed(error.to_string()))
    }

    /// Those whose turn it is, taken from the queue.
    fn grant(self: &Arc<Jobs>, state: &mut State) -> Vec<(oneshot::Sender<Turn>, Turn)> {
        let mut granted = Vec::new();
        while state.running < self.bounds.at_once {
            let may = |waiting: &Waiting| {
                let fits = state.long == 0 || state.long_bytes.saturating_add(waiting.size.bytes) <= LONG_BYTES;
                !waiting.size.long() || (state.long < self.bounds.long && fits)
            };
            let Some(key) = state.waiting.iter().find(|(_, waiting)| may(waiting)).map(|(key, _)| *key) else {
                break;
            };
            let Some(Waiting { client, size, turn }) = state.waiting.remove(&key) else { break };
            state.running += 1;
            if size.long() {
                state.long += 1;
                state.long_bytes += size.bytes;
            }
            granted.push((turn, Turn { jobs: Arc::clone(self), client, size }));
        }
        granted
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic happens while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
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

/// Outside of the lock: a turn whose owner has gone ends here.
fn hand_out(granted: Vec<(oneshot::Sender<Turn>, Turn)>) {
    for (sender, turn) in granted {
        let _ = sender.send(turn);
    }
}

/// A place in the queue, given up when its owner goes.
struct Left<'a> {
    jobs: &'a Jobs,
    key: (Instant, u64),
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        let mut state = self.jobs.state();
        if let Some(Waiting { client, size, .. }) = state.waiting.remove(&self.key) {
            state.forget(&client, &size);
        }
    }
}

/// One job's turn, over when it is dropped.
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

    const SHORT: Size = Size { bytes: 100, constraint: false };
    const LARGE: Size = Size { bytes: 1 << 20, constraint: false };

    fn jobs(at_once: usize, long: usize, waiting: usize, bytes: usize) -> Arc<Jobs> {
        Arc::new(Jobs::of(Bounds { at_once, long, waiting, bytes }))
    }

    fn client(name: &str) -> Client {
        Client::Named(name.to_owned())
    }

    /// A job that ends when its sender is dropped, and says that it runs.
    async fn begun(jobs: &Arc<Jobs>, of: &str, size: Size) -> (mpsc::Sender<()>, tokio::task::JoinHandle<()>) {
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

    /// Waits until so many wait.
    async fn waiting(jobs: &Jobs, count: usize) {
        while jobs.state().waiting.len() != count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
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
        // Its caller goes away.
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
        assert_eq!(refused.to_string(), "2 requests wait to be prepared, at most 2 may");
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
        // Long ones take one of two turns.
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
}

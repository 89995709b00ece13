//! Goal: every input on which the fuzzer once found a defect, and every seed input, is processed without a panic, a
//! hang or unbounded memory. Method: the functions of the fuzz targets (`tests/fuzz/targets.rs`) are called with the
//! inputs stored next to them, one after the other, in a process of their own, whose memory and whose workers' memory is
//! read. No fuzzer is needed.

use crate::targets::TARGETS;
use ostinato::actors::workers::limits;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The most processor time of the thread that takes one input. It does not grow when the machine is busy with other work.
const MOST_WORK: Duration = Duration::from_secs(10);
/// The most time for one input, most of which is waiting for worker processes: their processor time is bounded by their
/// own limits, and each of a constraint's four jobs (compiling it, and three masks) is ended after a minute at most.
const LONGEST: Duration = Duration::from_secs(4 * 60);

/// The most resident memory of the process that takes the inputs, at any time, MiB.
const MOST_MIB: u64 = 128;
/// The resident memory of a worker before its first job, at most, MiB: the program, its libraries and the vocabulary.
const WORKER_START_MIB: u64 = 128;
/// The interval at which memory is read. What a process had at most is kept by the kernel for as long as it lives.
const LOOK: Duration = Duration::from_millis(10);
/// Set in the process that takes the inputs.
const CHILD: &str = "OSTINATO_TEST_FUZZ_INPUTS";

/// Returns the most resident memory that a process has had, MiB; 0 if it has ended.
fn peak_mib(process: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) >> 10
}

/// Returns the ids of this process's children.
fn children() -> Vec<String> {
    let threads = std::fs::read_dir("/proc/self/task").expect("a list of threads").flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Reads the memory of this process's workers all the time.
struct WorkersMemory {
    /// The most that any of them had since the last question, MiB.
    most: Arc<AtomicU64>,
    stop: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl WorkersMemory {
    fn watch() -> WorkersMemory {
        let (most, (stop, stopped)) = (Arc::<AtomicU64>::default(), mpsc::channel());
        let found = Arc::clone(&most);
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
                let now = children().iter().map(|worker| peak_mib(worker)).max().unwrap_or(0);
                found.fetch_max(now, Relaxed);
            }
        });
        WorkersMemory { most, stop, thread }
    }

    /// Returns the most resident memory that any worker had, MiB.
    fn most_mib(&self) -> u64 {
        self.most.load(Relaxed)
    }

    fn end(self) {
        drop(self.stop);
        self.thread.join().expect("it only reads");
    }
}

/// The processor time that this thread has used.
fn worked() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Returns the inputs of a target: its seeds and those on which it has failed.
fn inputs(target: &str) -> Vec<PathBuf> {
    let folders = ["seeds", "regressions"].map(|kind| here().join(kind).join(target));
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let mut inputs: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    inputs.sort();
    inputs
}

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz")
}

#[test]
fn inputs_of_fuzz_targets_are_taken() {
    if std::env::var_os(CHILD).is_some() {
        return take_inputs();
    }
    // Other tests of this process must not count.
    let output = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "regressions::inputs_of_fuzz_targets_are_taken", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("a process");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}

fn take_inputs() {
    let workers = WorkersMemory::watch();
    let most_of_worker = (limits().memory >> 20) + WORKER_START_MIB;
    for (name, target) in TARGETS {
        let inputs = inputs(name);
        assert!(!inputs.is_empty(), "{name} has nothing to begin with");
        for input in inputs {
            let bytes = std::fs::read(&input).unwrap_or_else(|e| panic!("{}: {e}", input.display()));
            let (begun, before) = (Instant::now(), worked());
            if let Err(panic) = std::panic::catch_unwind(|| target(&bytes)) {
                eprintln!("{name} fails on {}", input.display());
                std::panic::resume_unwind(panic);
            }
            let (took, work) = (begun.elapsed(), worked() - before);
            let within = took < LONGEST && work < MOST_WORK;
            assert!(within, "{name} takes {took:?}, of which {work:?} are work, for {}", input.display());
            let (own, worker) = (peak_mib("self"), workers.most_mib());
            let input = input.display();
            assert!(own <= MOST_MIB, "{name} has taken {own} MiB for {input}, at most {MOST_MIB} are allowed");
            assert!(
                worker <= most_of_worker,
                "a worker of {name} has taken {worker} MiB for {input}, at most {most_of_worker} are allowed"
            );
        }
    }
    let most = workers.most_mib();
    eprintln!("{} MiB, and {most} MiB of a worker", peak_mib("self"));
    assert!(most > 0, "no worker was seen");
    workers.end();
}

#[test]
fn every_input_lies_under_the_name_of_a_target_and_every_target_runs() {
    for kind in ["seeds", "regressions"] {
        for entry in std::fs::read_dir(here().join(kind)).into_iter().flatten() {
            let name = entry.expect("a readable folder").file_name().into_string().expect("a name");
            assert!(TARGETS.iter().any(|(target, _)| *target == name), "{kind}/{name} is of no target");
        }
    }
    let script = std::fs::read_to_string(here().join("run.sh")).expect("the script");
    let manifest = std::fs::read_to_string(here().join("Cargo.toml")).expect("the manifest");
    let listed = TARGETS.map(|(name, _)| name).join(" ");
    assert!(script.contains(&format!("all=({listed})")), "run.sh runs others than {listed}");
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"\npath = \"bins/{name}.rs\"")), "{name} has no binary");
    }
}

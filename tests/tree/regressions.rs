//! Goal: every input on which the fuzzer once found a defect, and every seed input, is processed without a panic, a
//! hang or unbounded memory. Method: the functions of the fuzz targets (`tests/fuzz/targets.rs`) are called with the
//! inputs stored next to them, one after the other. No fuzzer is needed.

use crate::targets::TARGETS;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The most processor time of the thread that takes one input. It does not grow when the machine is busy with other work.
const MOST_WORK: Duration = Duration::from_secs(10);
/// The most time for one input, most of which is waiting for worker processes: their processor time is bounded by their
/// own limits, and each of a constraint's four jobs (compiling it, and three masks) is ended after a minute at most.
const LONGEST: Duration = Duration::from_secs(4 * 60);

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
        }
    }
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

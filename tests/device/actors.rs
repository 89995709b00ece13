//! Goal: every submission to a device's actors is completed or reported as lost, and memory outlives the work that uses
//! it, whichever ends first. Method: the compute actor on CPU drivers (or on the selected GPU); long-running work (a
//! large buffer filled many times); a submission that violates the actor's rules so that the actor panics; and a device
//! that is declared lost while it works. The validation layer reports objects that are destroyed while in use.

use crate::common::{Driver, Vulkan};
use ostinato::actors::compute::{Compute, Gates, GpuTime, Submission};
use ostinato::actors::timeline::FlushReason;
use ostinato::actors::watcher::{Outbox, Report, Then};
use ostinato::device::{Device, DeviceError, Gate};
use ostinato::kernels::recording::{Op, Recording};
use ostinato::kernels::region::{Pipelines, Region};
use ostinato::memory::{Arena, BufferTable, Place};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit, longer than any wait here takes on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// Returns a region that fills a buffer of `bytes` bytes `times` times.
fn filling(device: &Device, arena: &Arena, bytes: u64, times: u32) -> Arc<Region> {
    let mut recording = Recording::new("filling");
    let to = recording.buffer("large", bytes);
    recording.ops.extend((0..times).map(|word| Op::Fill { to, word }));
    let mut table = BufferTable::new();
    table.add(arena.buffer("large", bytes, Place::DeviceLocal).unwrap()).unwrap();
    let none = Pipelines::build(device, None, &[&recording], &|_, _| {}).unwrap();
    Arc::new(Region::build(device, &recording, &table, &none).unwrap())
}

/// The channel that receives reports. It holds a sender itself, so that, as in an executor, a waiting receiver cannot
/// learn from a closed channel that a report will never come.
struct Reports {
    outbox: Outbox,
    reports: crossbeam_channel::Receiver<Report>,
    _wake: crossbeam_channel::Receiver<()>,
}

impl Reports {
    fn new() -> Reports {
        let (sender, reports) = crossbeam_channel::bounded(64);
        let (waker, wake) = crossbeam_channel::bounded(1);
        Reports { outbox: Outbox { reports: sender, wake: waker }, reports, _wake: wake }
    }

    fn submission(&self, id: u64, regions: Vec<Arc<Region>>) -> Submission {
        Submission {
            id,
            ahead: None,
            entries: vec![regions],
            waits: Vec::new(),
            gates: Gates::new(),
            waits_within: false,
            flush: FlushReason::PhaseBoundary,
            report_after: Vec::new(),
            outbox: self.outbox.clone(),
            then: None,
        }
    }
}

#[test]
fn every_submission_is_owed_a_report_also_by_an_actor_that_has_ended() {
    let vulkan = Vulkan::without_validation();
    let device = vulkan.device(Driver::first());
    let arena = Arena::new(&device).unwrap();
    let compute = Compute::spawn(Arc::clone(&device), GpuTime::Phases, None).unwrap();
    let region = filling(&device, &arena, 32 << 20, 4);
    let reports = Reports::new();
    // Submission 0 is running. Submission 1 makes the actor panic. Submission 2 is probably in the inbox at that time.
    // Submission 3 comes after the actor has ended.
    compute.submit(reports.submission(0, vec![Arc::clone(&region)]));
    let gates = Gates::from([(2, (Arc::new(Gate::new(&device).unwrap()), 1))]);
    let wrong = Submission { gates, report_after: vec![1], ..reports.submission(1, Vec::new()) };
    compute.submit(Submission { entries: vec![Vec::new(), Vec::new()], ..wrong });
    compute.submit(reports.submission(2, vec![Arc::clone(&region)]));
    let mut heard = Vec::new();
    let hear = |heard: &mut Vec<(u64, bool)>| {
        let report = reports.reports.recv_timeout(LONG).expect("a report that is owed");
        assert!(report.last && report.result.as_ref().err().is_none_or(|error| error.is_lost()), "{report:?}");
        heard.push((report.id, report.result.is_err()));
    };
    (0..3).for_each(|_| hear(&mut heard));
    compute.submit(reports.submission(3, vec![region]));
    hear(&mut heard);
    heard.sort_unstable();
    let ids: Vec<u64> = heard.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [0, 1, 2, 3], "each one once");
    assert!(heard[1..].iter().all(|(_, lost)| *lost), "{heard:?}");
    assert!(device.is_lost(), "an ended actor is a lost device");
    drop(compute);
    assert!(reports.reports.is_empty(), "nothing is told twice");
}

#[test]
fn memory_outlives_the_work_on_a_device_that_was_declared_lost() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let device = vulkan.device(driver);
        let arena = Arena::new(&device).unwrap();
        let compute = Compute::spawn(Arc::clone(&device), GpuTime::Off, None).unwrap();
        let region = filling(&device, &arena, 64 << 20, 16);
        let reports = Reports::new();
        // Measures how long one run takes, after one that touches the memory for the first time.
        let mut took = Duration::ZERO;
        for id in 0..4 {
            let begun = Instant::now();
            compute.submit(reports.submission(id, vec![Arc::clone(&region)]));
            reports.reports.recv_timeout(LONG).unwrap().result.unwrap();
            took = begun.elapsed();
        }

        compute.submit(reports.submission(4, vec![Arc::clone(&region); 4]));
        while device.queue(ostinato::device::Role::Compute).last().value < 5 {
            std::thread::sleep(Duration::from_micros(100));
        }
        let begun = Instant::now();
        device.declare_lost("a test");
        // The report may come at once or when the work has ended.
        let report = reports.reports.recv_timeout(LONG).unwrap();
        assert!(report.result.is_err_and(|error| error.is_lost()));
        // The region is the last owner of the memory, which the device may still be using.
        assert!(arena.usage().buffers_bytes >= 64 << 20);
        drop(region);
        while arena.usage().buffers_bytes > 0 {
            assert!(begun.elapsed() < LONG, "the watcher keeps what it no longer watches");
            std::thread::sleep(Duration::from_micros(100));
        }
        let waited = begun.elapsed();
        eprintln!("{driver:?}: one run took {took:?}; memory was given back {waited:?} after a loss within four");
        vulkan.assert_clean();
        assert!(
            waited > took,
            "it was given back {waited:?} after the loss, and four times {took:?} of work were left"
        );
    }
}

#[test]
fn a_slow_driver_is_waited_for() {
    let vulkan = Vulkan::without_validation();
    let device = vulkan.device(Driver::first());
    let arena = Arena::new(&device).unwrap();
    let compute = Compute::spawn(Arc::clone(&device), GpuTime::Off, None).unwrap();
    let region = filling(&device, &arena, 64 << 20, 32);
    let reports = Reports::new();
    // Much less than the work takes.
    let patience = Duration::from_millis(2);
    compute.submit(reports.submission(0, vec![Arc::clone(&region)]));
    assert!(reports.reports.recv_timeout(patience).is_err(), "the test's work is too small");
    if device.adapter().is_cpu() {
        let report = compute.report(&reports.reports, patience).expect("a CPU driver is waited for");
        report.result.unwrap();
    } else {
        // Work behind a closed gate makes no progress, so the wait on a GPU must give up.
        let gate = Arc::new(Gate::new(&device).unwrap());
        reports.reports.recv_timeout(LONG).unwrap().result.unwrap();
        compute.submit(Submission {
            gates: Gates::from([(1, (Arc::clone(&gate), 1))]),
            ..reports.submission(1, vec![region])
        });
        assert!(compute.report(&reports.reports, Duration::from_millis(100)).is_none());
        gate.open(1).unwrap();
        compute.report(&reports.reports, LONG).expect("it moves").result.unwrap();
    }
    let point = device.queue(ostinato::device::Role::Compute).last();
    assert!(device.wait_while_moving(point, patience).unwrap());
}

/// Goal: each entry of a submission waits at its own gate, behind the entries before it, and the submission is reported
/// after the last one. Method: each entry writes another word to memory that the host reads.
#[test]
fn entries_of_a_submission_wait_at_gates_of_their_own() {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let device = vulkan.device(*driver);
        let arena = Arena::new(&device).unwrap();
        let compute = Compute::spawn(Arc::clone(&device), GpuTime::Phases, None).unwrap();
        let word = arena.buffer("word", 16, Place::Readback).unwrap();
        word.write(0, &[0; 16]);
        let mut table = BufferTable::new();
        table.add(Arc::clone(&word)).unwrap();
        let writes = |value: u32| {
            let mut recording = Recording::new("write");
            let to = recording.buffer("word", 16);
            recording.ops.push(Op::Fill { to, word: value });
            let none = Pipelines::build(&device, None, &[&recording], &|_, _| {}).unwrap();
            Arc::new(Region::build_gated(&device, &recording, &table, &none).unwrap())
        };
        let gate = Arc::new(Gate::new(&device).unwrap());
        let reports = Reports::new();
        compute.submit(Submission {
            entries: (1..=4).map(|value| vec![writes(value)]).collect(),
            gates: Gates::from([(2, (Arc::clone(&gate), 1)), (4, (Arc::clone(&gate), 2))]),
            ..reports.submission(0, Vec::new())
        });
        let reaches = |value: u32| {
            let begun = Instant::now();
            while word.load_u32(0) != value {
                assert!(begun.elapsed() < LONG, "{driver:?}: {} in place of {value}", word.load_u32(0));
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for (opened, value) in [(None, 1), (Some(1), 3)] {
            opened.into_iter().for_each(|value| gate.open(value).unwrap());
            reaches(value);
            assert!(reports.reports.recv_timeout(Duration::from_millis(20)).is_err(), "{driver:?}: it waits");
            reaches(value);
        }
        gate.open(2).unwrap();
        let report = reports.reports.recv_timeout(LONG).unwrap();
        report.result.unwrap();
        assert_eq!((report.entries, report.last, word.load_u32(0)), (4, true, 4), "{driver:?}");
    }
}

/// Goal: work on one device goes on when work on another one has finished, without anybody waiting for a report. Method:
/// a submission to one CPU driver waits at a gate, which the end of one to the other driver opens; then both the other way
/// round.
#[test]
fn work_goes_on_when_that_of_another_device_has_finished() {
    let vulkan = Vulkan::new();
    let devices = Driver::BOTH.map(|driver| vulkan.device(driver));
    for (first, second) in [(0, 1), (1, 0)] {
        let computes = devices.each_ref().map(|device| Compute::spawn(Arc::clone(device), GpuTime::Off, None).unwrap());
        let gate = Arc::new(Gate::new(&devices[second]).unwrap());
        let (one, other) = (Reports::new(), Reports::new());
        let arenas = devices.each_ref().map(|device| Arena::new(device).unwrap());
        let regions = [first, second].map(|at| filling(&devices[at], &arenas[at], 4096, 1));
        let waiting = Submission {
            gates: Gates::from([(1, (Arc::clone(&gate), 1))]),
            ..other.submission(0, vec![regions[1].clone()])
        };
        computes[second].submit(waiting);
        assert!(other.reports.recv_timeout(Duration::from_millis(50)).is_err(), "it waits");
        let opens = Then::new({
            let gate = Arc::clone(&gate);
            move || gate.open(1)
        });
        computes[first].submit(Submission { then: Some(opens), ..one.submission(0, vec![regions[0].clone()]) });
        other.reports.recv_timeout(LONG).expect("the gate is open").result.unwrap();
        assert_eq!(gate.opened(), 1);
        one.reports.recv_timeout(LONG).unwrap().result.unwrap();

        // What fails there is the submission's result, and what is lost before is not done.
        let fails =
            Then::new(|| Err(DeviceError::DeviceLost { device: "other".to_owned(), call: "a test".to_owned() }));
        computes[first].submit(Submission { then: Some(fails), ..one.submission(1, vec![regions[0].clone()]) });
        let report = one.reports.recv_timeout(LONG).unwrap();
        assert!(report.last && report.result.is_err_and(|error| error.to_string().contains("other")));
    }
}

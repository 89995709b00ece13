//! Runs a recording on a device and in the plain-Rust interpreter, both starting from the same memory contents, and
//! compares the resulting buffers word by word. Not here: the recordings to run.
#![allow(dead_code)]

pub mod models;

use crate::common::{Driver, Vulkan, gpu_assisted};
use half::{bf16, f16};
use ostinato::actors::compute::{Compute, Gates, GpuTime, Submission};
use ostinato::actors::timeline::FlushReason;
use ostinato::actors::watcher::Outbox;
use ostinato::device::Device;
use ostinato::kernels::barriers;
use ostinato::kernels::embed::{ChunkLayout, PromptRows};
use ostinato::kernels::gemm::skinny::Matrices;
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::interpreter;
use ostinato::kernels::recording::{Call, Op, Range, Recording};
use ostinato::kernels::region::{PipelineTable, Pipelines, Region, RegionError};
use ostinato::kernels::tags::TAG_BITS;
use ostinato::memory::pack::Format;
use ostinato::memory::{Arena, BufferTable, Place};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// Initial content of output buffers: a quiet NaN with a payload. No kernel writes this word, and every sum that
/// includes it is NaN.
pub const POISON: u32 = 0x7fc0_dead;

/// Returns the implementations of the 16 × 16 matrix product to test on the selected device.
pub fn ways() -> &'static [Matrices] {
    match Driver::first() {
        Driver::Gpu => &[Matrices::Emulated, Matrices::Cooperative],
        _ => &[Matrices::Emulated],
    }
}

/// Returns whether tests run all of their cases (`OSTINATO_TEST_EVERY_CASE`), also those that repeat others in depth.
pub fn every_case() -> bool {
    std::env::var_os("OSTINATO_TEST_EVERY_CASE").is_some()
}

/// A device with an arena for buffers and a compute actor that runs recordings.
pub struct Bench {
    pub driver: Driver,
    pub device: Arc<Device>,
    pub arena: Arena,
    compute: Compute,
    pipelines: PipelineTable,
}

impl Bench {
    pub fn new(vulkan: &Vulkan, driver: Driver) -> Bench {
        let device = vulkan.device(driver);
        let arena = Arena::new(&device).expect("an arena");
        let compute = Compute::spawn(Arc::clone(&device), GpuTime::Phases, None).expect("a compute actor");
        Bench { driver, device, arena, compute, pipelines: PipelineTable::default() }
    }

    /// Allocates host-visible memory for every buffer of the recordings and builds their pipelines.
    pub fn bind(&self, recordings: &[&Recording]) -> Bound<'_> {
        let mut table = BufferTable::new();
        for (name, bytes) in ostinato::kernels::region::buffer_sizes(recordings) {
            table.add(self.arena.buffer(&name, bytes, Place::Readback).expect("memory")).expect("names are unique");
        }
        let pipelines = Pipelines::build_for(&self.device, &self.pipelines, None, recordings, None, &|_, _| {});
        let pipelines = pipelines.expect("pipelines");
        Bound { bench: self, table, pipelines }
    }

    /// Runs the recording once, starting from `before`, and returns the resulting memory.
    pub fn run(&self, recording: &Recording, before: &HostMemory) -> HostMemory {
        let bound = self.bind(&[recording]);
        bound.write(recording, before);
        bound.run(&[recording]);
        bound.read(recording)
    }
}

/// Device buffers and pipelines of a set of recordings.
pub struct Bound<'a> {
    bench: &'a Bench,
    pub table: BufferTable,
    pipelines: Pipelines,
}

impl Bound<'_> {
    /// Copies the contents of a recording's buffers to the device.
    pub fn write(&self, recording: &Recording, memory: &HostMemory) {
        for (decl, words) in recording.buffers.iter().zip(&memory.buffers) {
            let buffer = self.table.get(&decl.name).expect("bound");
            buffer.write(0, &bytemuck::cast_slice(words)[..decl.bytes as usize]);
        }
    }

    /// Returns the contents of a recording's buffers on the device.
    pub fn read(&self, recording: &Recording) -> HostMemory {
        let mut memory = HostMemory::new(recording);
        for (decl, words) in recording.buffers.iter().zip(&mut memory.buffers) {
            let buffer = self.table.get(&decl.name).expect("bound");
            buffer.read(0, &mut bytemuck::cast_slice_mut(words)[..decl.bytes as usize]);
        }
        memory
    }

    /// Builds a region from the recording and checks its counters: one dispatch per recorded call, and the derived
    /// barriers plus one at the start.
    pub fn region(&self, recording: &Recording) -> Arc<Region> {
        let region = self.try_region(recording).unwrap_or_else(|e| panic!("{}: {e}", recording.name));
        let calls = recording.ops.iter().filter(|op| matches!(op, Op::Call(_))).count();
        let derived = barriers::derive(&recording.ops).into_iter().filter(|needed| *needed).count();
        assert_eq!(region.dispatches() as usize, calls, "{}", recording.name);
        assert_eq!(region.barriers() as usize, derived + 1, "{}, and one at the start", recording.name);
        Arc::new(region)
    }

    pub fn try_region(&self, recording: &Recording) -> Result<Region, RegionError> {
        Region::build(&self.bench.device, recording, &self.table, &self.pipelines)
    }

    /// Runs the recordings one after the other in one submission and waits until the last has finished.
    pub fn run(&self, recordings: &[&Recording]) {
        let entries = recordings.iter().map(|recording| vec![self.region(recording)]).collect();
        let (reports, done) = crossbeam_channel::bounded(1);
        let (wake, _woken) = crossbeam_channel::bounded(1);
        let outbox = Outbox { reports, wake };
        self.bench.compute.submit(Submission {
            id: 0,
            ahead: None,
            entries,
            waits: Vec::new(),
            gates: Gates::new(),
            waits_within: false,
            flush: FlushReason::PhaseBoundary,
            report_after: Vec::new(),
            outbox,
            then: None,
        });
        // CPU drivers compile when they run a kernel for the first time, instrumented ones for minutes.
        let patience = Duration::from_secs(if gpu_assisted() { 1200 } else { 240 });
        let report = done.recv_timeout(patience).expect("the device finishes");
        report.result.expect("the device is alive");
    }
}

/// The precision with which a buffer must match the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expect {
    /// Equal bit for bit.
    Exact,
    /// f32 values that differ by at most `limit · (1 + |reference|)`.
    Floats(f32),
    /// Tagged f32 values: the tags are equal, and the values differ by at most the limit of [`Expect::Floats`].
    Tagged(f32),
    /// Pairs of a word that must be equal bit for bit and an f32 value with the limit of [`Expect::Floats`].
    Pairs(f32),
    /// Two f16 values per word, each with the limit of [`Expect::Floats`].
    Halves(f32),
    /// Two bfloat16 values per word, each with the limit of [`Expect::Floats`].
    Bfloats(f32),
    /// Packed rows with scales: `numbers` words of [`Expect::Halves`], and the scales, which must be equal.
    HalfRows { numbers: u32, limit: f32 },
    /// Pages of `words` words, of which the first `codes` words hold four 8-bit codes each, which may differ by one, and
    /// the others an f32 scale each, with the limit of [`Expect::Floats`].
    CodePages { words: u32, codes: u32, limit: f32 },
    /// Not compared: scratch whose contents depend on how the work is split.
    Any,
}

/// The fraction of the allowed difference by which a row may change when the device computes it again in another way.
const AGAIN: f32 = 1.0 / 64.0;

/// The largest difference found, as a fraction of the allowed difference, and where it was found.
pub type Worst = Option<(f32, String)>;

/// Memory before and after a run.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    pub before: &'a HostMemory,
    pub after: &'a HostMemory,
}

/// Fails if any buffer differs by more than `expect` allows, and returns the largest difference. A word that the
/// reference run leaves unchanged must also be unchanged on the device, either bit for bit or, for floats, within
/// [`AGAIN`] of the allowed difference, which is how far two computations of the same row may differ.
pub fn compare(
    recording: &Recording,
    what: &str,
    device: Change<'_>,
    reference: Change<'_>,
    expect: &dyn Fn(&str) -> Expect,
) -> Worst {
    let mut worst: Worst = None;
    for (index, decl) in recording.buffers.iter().enumerate() {
        let name = &decl.name;
        let expect = expect(name);
        if expect == Expect::Any {
            continue;
        }
        let [(old, found), (past, wanted)] =
            [device, reference].map(|change| (&change.before.buffers[index], &change.after.buffers[index]));
        for i in 0..wanted.len() {
            let place = || format!("{what}: word {i} of \"{name}\"");
            if wanted[i] == past[i] {
                // The word was overwritten with the same value or not written. Or a row that belongs to no sequence was
                // computed again by a step with a different number of rows, which sums in a different order.
                let again = match expect {
                    Expect::Floats(limit) | Expect::Tagged(limit) => {
                        let [was, is] = [old[i], found[i]].map(f32::from_bits);
                        // Devices differ in the NaN that they compute from NaN.
                        (was - is).abs() <= limit * AGAIN * (1.0 + was.abs()) || (was.is_nan() && is.is_nan())
                    }
                    _ => false,
                };
                let same = found[i] == old[i] || found[i] == wanted[i] || again;
                assert!(same, "{} was not to be written: {:#010x} became {:#010x}", place(), old[i], found[i]);
            }
            if found[i] == wanted[i] {
                continue;
            }
            let mut near = |found: f32, wanted: f32, limit: f32| {
                // The payload of a NaN depends on the device.
                if found.is_nan() && wanted.is_nan() {
                    return;
                }
                let part = (found - wanted).abs() / (limit * (1.0 + wanted.abs()));
                assert!(
                    part <= 1.0,
                    "{}: {found:e} instead of {wanted:e}, {part:.2} times the difference allowed",
                    place()
                );
                if worst.as_ref().is_none_or(|(worst, _)| part > *worst) {
                    worst = Some((part, place()));
                }
            };
            match expect {
                Expect::Tagged(limit) => {
                    let tags = [found[i], wanted[i]].map(|word| word & ((1 << TAG_BITS) - 1));
                    assert_eq!(tags[0], tags[1], "{}: {:#010x} has another tag", place(), found[i]);
                    near(f32::from_bits(found[i]), f32::from_bits(wanted[i]), limit);
                }
                Expect::Pairs(_) if i % 2 == 0 => {
                    panic!("{}: {:#010x} instead of {:#010x}", place(), found[i], wanted[i])
                }
                Expect::Floats(limit) | Expect::Pairs(limit) => {
                    near(f32::from_bits(found[i]), f32::from_bits(wanted[i]), limit);
                }
                Expect::HalfRows { numbers, .. } if i as u32 >= numbers => {
                    panic!("{}: the scale {:#010x} instead of {:#010x}", place(), found[i], wanted[i])
                }
                Expect::Halves(limit) | Expect::Bfloats(limit) | Expect::HalfRows { limit, .. } => {
                    for shift in [0, 16] {
                        let half = |word: u32| match expect {
                            Expect::Halves(_) | Expect::HalfRows { .. } => {
                                f16::from_bits((word >> shift) as u16).to_f32()
                            }
                            _ => bf16::from_bits((word >> shift) as u16).to_f32(),
                        };
                        if half(found[i]).to_bits() != half(wanted[i]).to_bits() {
                            near(half(found[i]), half(wanted[i]), limit);
                        }
                    }
                }
                Expect::CodePages { words, codes, .. } if (i as u32) % words < codes => {
                    for shift in [0, 8, 16, 24] {
                        let [a, b] = [found[i], wanted[i]].map(|word| i32::from((word >> shift) as u8 as i8));
                        assert!((a - b).abs() <= 1, "{}: {:#010x} instead of {:#010x}", place(), found[i], wanted[i]);
                    }
                }
                Expect::CodePages { limit, .. } => near(f32::from_bits(found[i]), f32::from_bits(wanted[i]), limit),
                _ => panic!("{}: {:#010x} instead of {:#010x}", place(), found[i], wanted[i]),
            }
        }
    }
    worst
}

/// A recording of many calls, each with its own buffers, together with the buffers' initial contents and the precision
/// expected of each.
pub struct Cases {
    pub recording: Recording,
    fills: Vec<(Range, Vec<u32>)>,
    expects: HashMap<String, Expect>,
    prefix: String,
    /// The number of operations before each case.
    starts: Vec<usize>,
    /// Whether no other driver runs these cases.
    pub alone: bool,
}

impl Cases {
    pub fn new(name: &str) -> Cases {
        Cases {
            recording: Recording::new(name),
            fills: Vec::new(),
            expects: HashMap::new(),
            prefix: String::new(),
            starts: Vec::new(),
            alone: false,
        }
    }

    /// Starts a test case: the names of buffers added from now on begin with `name`.
    pub fn case(&mut self, name: String) {
        self.prefix = name;
        self.starts.push(self.recording.ops.len());
    }

    /// Adds a buffer with these initial contents.
    pub fn words(&mut self, name: &str, words: &[u32]) -> Range {
        let name = format!("{}.{name}", self.prefix);
        assert!(self.recording.buffers.iter().all(|b| b.name != name), "\"{name}\" exists");
        let range = self.recording.buffer(&name, words.len() as u64 * 4);
        self.fills.push((range, words.to_vec()));
        range
    }

    pub fn floats(&mut self, name: &str, values: &[f32]) -> Range {
        let words: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
        self.words(name, &words)
    }

    /// Adds a buffer of values packed in `format`. Their number must be even for 16-bit formats.
    pub fn weights(&mut self, name: &str, format: Format, values: &[f32]) -> Range {
        self.words(name, &pack(format, values))
    }

    /// Adds a buffer of `words` words, each initialised to [`POISON`].
    pub fn output(&mut self, name: &str, words: usize, expect: Expect) -> Range {
        let range = self.words(name, &vec![POISON; words]);
        self.expect(range, expect);
        range
    }

    /// Sets the precision that a buffer must have; the default is [`Expect::Exact`].
    pub fn expect(&mut self, range: Range, expect: Expect) {
        let name = self.recording.decl(range.buffer).name.clone();
        self.expects.insert(name, expect);
    }

    /// Returns the memory before the first call.
    pub fn before(&self) -> HostMemory {
        let mut memory = HostMemory::new(&self.recording);
        for (range, words) in &self.fills {
            memory.buffers[range.buffer.0 as usize].copy_from_slice(words);
        }
        memory
    }

    /// Returns the memory after the last call, computed by the interpreter.
    pub fn reference(&self) -> HostMemory {
        let mut memory = self.before();
        interpreter::run(&self.recording, &mut memory);
        memory
    }

    /// Returns the recording without the cases that need a further pipeline, although each of the pipeline's constants
    /// already has its value in an earlier one of the same shader. Beside lavapipe, SwiftShader runs one pipeline of each
    /// shader, but none that multiplies fragments without matrix units, which a device does in the tests only.
    fn fewer(&self, driver: Driver) -> Recording {
        let beside = driver == Driver::SwiftShader && !self.alone;
        let (mut pipelines, mut constants) = (HashSet::new(), HashSet::new());
        let all = &self.recording.ops;
        let ends = self.starts.iter().skip(1).copied().chain([all.len()]);
        let mut ops = all[..self.starts.first().copied().unwrap_or(all.len())].to_vec();
        for (start, end) in self.starts.iter().zip(ends) {
            let case = &all[*start..end];
            let calls: Vec<&Call> =
                case.iter().filter_map(|op| if let Op::Call(call) = op { Some(call) } else { None }).collect();
            // Prompts of recurrent layers have no other kernels on devices without matrix units.
            let plain = |call: &&Call| call.kernel.ends_with(".plain") && !call.kernel.starts_with("delta_");
            if driver == Driver::SwiftShader && calls.iter().any(plain) {
                continue;
            }
            // The last pair stands for the shader itself, which may have no constants.
            let pairs = |call: &&Call| -> Vec<(usize, u32)> {
                let all = call.constants.iter().copied().chain([0]).enumerate();
                all.skip(if beside { call.constants.len() } else { 0 }).collect()
            };
            let new =
                calls.iter().any(|call| pairs(call).iter().any(|pair| !constants.contains(&(call.kernel, *pair))));
            if new || calls.iter().all(|call| pipelines.contains(&(call.kernel, &call.constants))) {
                ops.extend_from_slice(case);
                pipelines.extend(calls.iter().map(|call| (call.kernel, &call.constants)));
                constants.extend(calls.iter().flat_map(|call| pairs(call).into_iter().map(|pair| (call.kernel, pair))));
            }
        }
        Recording { ops, ..self.recording.clone() }
    }

    /// Compares the memory after some of the cases with `reference`. `what` names both in messages.
    pub fn compare(&self, recording: &Recording, reference: &HostMemory, found: &HostMemory, what: &str) {
        let before = self.before();
        let expect = |name: &str| self.expects.get(name).copied().unwrap_or(Expect::Exact);
        let changes = [found, reference].map(|after| Change { before: &before, after });
        let worst = compare(recording, what, changes[0], changes[1], &expect);
        let (ran, all) = (recording.ops.len(), self.recording.ops.len());
        println!("{what}: {ran} of {all} calls, largest difference {worst:?} of what is allowed");
    }

    /// Runs the recording on a device and compares its memory with `reference`. The CPU drivers, whose compilers take most of
    /// the time of these tests, run the cases of [`Cases::fewer`] beside each other, unless `OSTINATO_TEST_EVERY_CASE` is set.
    pub fn check(&self, bench: &Bench, reference: &HostMemory) {
        let before = self.before();
        let what = format!("{} on {:?}", self.recording.name, bench.driver);
        let run = |recording: &Recording, reference: &HostMemory| {
            self.compare(recording, reference, &bench.run(recording, &before), &what);
        };
        if Driver::all().len() > 1 && !every_case() {
            let fewer = self.fewer(bench.driver);
            if fewer.ops.is_empty() {
                return println!("{what}: on other drivers only");
            }
            let mut reference = before.clone();
            interpreter::run(&fewer, &mut reference);
            run(&fewer, &reference);
        } else {
            run(&self.recording, reference);
        }
    }
}

/// Packs values in a format into 32-bit words. The 16-bit formats need an even number of values.
pub fn pack(format: Format, values: &[f32]) -> Vec<u32> {
    let pairs = |bits: &dyn Fn(f32) -> u16| {
        assert_eq!(values.len() % 2, 0, "pairs of 16-bit values");
        values.chunks_exact(2).map(|p| u32::from(bits(p[0])) | u32::from(bits(p[1])) << 16).collect()
    };
    match format {
        Format::F32 => values.iter().map(|v| v.to_bits()).collect(),
        Format::F16 => pairs(&|v| f16::from_f32(v).to_bits()),
        Format::Bf16 => pairs(&|v| bf16::from_f32(v).to_bits()),
        Format::Codes(_) => panic!("codes are packed by `memory::pack`"),
    }
}

/// Returns a value rounded to a format.
pub fn round(format: Format, value: f32) -> f32 {
    match format {
        Format::F32 => value,
        Format::F16 => f16::from_f32(value).to_f32(),
        Format::Bf16 => bf16::from_f32(value).to_f32(),
        Format::Codes(_) => panic!("codes have no rounding of their own"),
    }
}

/// Seeded random number generator (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u32) -> u32 {
        (self.next() % u64::from(bound)) as u32
    }

    /// Returns a value in [-1, 1).
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Returns the numbers 0..count in a random order.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut items: Vec<u32> = (0..count).collect();
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u32 + 1) as usize);
        }
        items
    }
}

/// Returns the words of a step's descriptor, starting at word 0. Words that the layout does not set are [`POISON`].
pub fn descriptor(layout: ChunkLayout, prompts: &[PromptRows<'_>]) -> Vec<u32> {
    descriptor_mixed(layout, prompts, &[])
}

/// Like [`descriptor`], for a step in which slots decode.
pub fn descriptor_mixed(layout: ChunkLayout, prompts: &[PromptRows<'_>], decoding: &[u32]) -> Vec<u32> {
    let mut words = Vec::new();
    for (at, part) in layout.describe_mixed(prompts, decoding) {
        words.resize(at as usize, POISON);
        words.extend(part);
    }
    words
}

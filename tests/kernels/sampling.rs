//! Goal: the sampling kernels equal their references word for word on both CPU drivers (or the selected GPU) under
//! validation. Cases are seeded, and each failure names its seed, row and parameters.

use crate::common::{Driver, Vulkan};
use ostinato::device::{Batch, Device, QueueEntry, Role};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::recording::{Op, Range, Recording};
use ostinato::kernels::region::{Pipelines, Region};
use ostinato::kernels::sampling::{self, SampledStep, SlotTables};
use ostinato::kernels::shaders::{AdvanceArgs, ClearCountsArgs, MarkPromptArgs, PatchArgs, SampleArgs};
use ostinato::kernels::state::*;
use ostinato::kernels::{deterministic, interpreter};
use ostinato::memory::{Arena, BufferTable, Place};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A device that runs recordings. Pipelines are cached by the kernels and constants of a recording.
struct Gpu {
    name: String,
    vulkan: Vulkan,
    device: Arc<Device>,
    arena: Arena,
    most_threads: u32,
    pipelines: Mutex<HashMap<String, Arc<Pipelines>>>,
}

fn all() -> impl Iterator<Item = Gpu> {
    Driver::all().iter().map(|&driver| {
        let vulkan = Vulkan::new();
        let adapter = vulkan.adapter(driver);
        let device = vulkan.device(driver);
        let arena = Arena::new(&device).expect("an arena");
        let most_threads = adapter.capabilities.max_invocations.min(1024);
        Gpu { name: adapter.name, vulkan, device, arena, most_threads, pipelines: Mutex::default() }
    })
}

impl Gpu {
    /// Runs a recording as one region with `memory` as the contents of its buffers, and reads the contents back.
    fn run(&self, recording: &Recording, memory: &mut HostMemory) {
        let mut table = BufferTable::new();
        for (decl, words) in recording.buffers.iter().zip(&memory.buffers) {
            let buffer = self.arena.buffer(&decl.name, decl.bytes, Place::Readback).expect("a buffer");
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            buffer.write(0, &bytes);
            table.add(buffer).expect("distinct names");
        }
        let calls = recording.ops.iter().map(|op| match op {
            Op::Call(call) => format!("{}{:?}", call.kernel, call.constants),
            other => panic!("{other:?} is no call"),
        });
        let key = calls.collect::<Vec<_>>().join(" ");
        let pipelines = self
            .pipelines
            .lock()
            .expect("no test thread panicked")
            .entry(key)
            .or_insert_with(|| {
                Arc::new(Pipelines::build(&self.device, None, &[recording], &|_, _| {}).expect("pipelines"))
            })
            .clone();
        let region = Region::build(&self.device, recording, &table, &pipelines).expect("a region");
        let batch = Batch {
            entries: vec![QueueEntry { commands: vec![region.commands().clone()], gate: None }],
            waits: Vec::new(),
        };
        let point = self.device.queue(Role::Compute).submit(batch).expect("submitted");
        assert!(
            self.device.wait(point, Duration::from_secs(120)).expect("the device lives"),
            "no end on {}",
            self.name
        );
        for (decl, words) in recording.buffers.iter().zip(&mut memory.buffers) {
            let mut bytes = vec![0; words.len() * 4];
            table.get(&decl.name).expect("added above").read(0, &mut bytes);
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        self.vulkan.assert_clean();
    }
}

/// Seeded random number generator (SplitMix64).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 16_777_216.0
    }
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

/// A row of a step and the slot that it uses.
#[derive(Clone)]
struct Row {
    style: &'static str,
    logits: Vec<f32>,
    init: SlotInit,
    active: u32,
    valid: bool,
    counts: Vec<u32>,
    bias: Vec<(u32, f32)>,
    mask: Vec<u32>,
}

struct Scene {
    vocabulary: u32,
    rows: Vec<Row>,
    partials: u32,
    threads: u32,
}

struct Built {
    recording: Recording,
    memory: HostMemory,
    ring: Range,
}

const RING_STEPS: u32 = 3;
const STEP: u32 = 7;

impl Scene {
    fn build(&self) -> Built {
        let v = self.vocabulary;
        let rows = self.rows.len() as u32;
        let stride = sampling::row_stride(v);
        let mut recording = Recording::new("test.sample");
        let logits = recording.buffer("logits", sampling::logits_bytes(rows, v));
        let keys = recording.buffer("sample.keys", sampling::logits_bytes(rows, v));
        let partials = recording.buffer("partials", u64::from(rows * self.partials.max(1)) * 8);
        let row_list = recording.buffer("rows", u64::from(rows) * 16);
        let state = recording.buffer("state", sampling::state_bytes(rows));
        let counts = recording.buffer("counts", sampling::counts_bytes(rows, v));
        let bias = recording.buffer("bias", sampling::bias_bytes(rows));
        let masks = recording.buffer("masks", sampling::masks_bytes(rows, v));
        let step_number = recording.buffer("step", 4);
        let ring = recording.buffer("ring", sampling::ring_bytes(RING_STEPS, rows));
        let args = SampleArgs {
            logits,
            partials: if self.partials == 0 { partials.none() } else { partials },
            rows: row_list,
            state,
            counts,
            bias,
            keys,
            step_number,
            ring,
            vocabulary: v,
            row_stride: stride,
            partial_count: self.partials,
            ring_steps: RING_STEPS,
            ring_rows: rows,
            fault: row_list.none(),
            masks,
            every: 1,
            first: 0,
            options: 0,
        };
        recording.call(sampling::sample("sample".into(), rows, self.threads, SampledStep::default(), args));
        if rows > 1 {
            recording.call(sampling::advance("advance".into(), AdvanceArgs { step_number }));
        }
        let mut memory = HostMemory::new(&recording);
        memory.set_u32(step_number, 0, STEP);
        for (r, row) in (0..).zip(&self.rows) {
            // Slots are in the reverse order of the rows, so that a mix-up is detected.
            let slot = rows - 1 - r;
            for (t, l) in (0..).zip(&row.logits) {
                memory.set_f32(logits, r * stride + t, *l);
            }
            for t in v..stride {
                memory.set_f32(logits, r * stride + t, f32::MAX);
            }
            for p in 0..self.partials {
                let part = v.div_ceil(self.partials);
                let range = (p * part).min(v)..((p + 1) * part).min(v);
                let best = range.clone().fold((f32::NEG_INFINITY, range.start), |best, t| {
                    let l = row.logits[t as usize];
                    if l > best.0 { (l, t) } else { best }
                });
                memory.set_f32(partials, (r * self.partials + p) * 2, best.0);
                memory.set_u32(partials, (r * self.partials + p) * 2 + 1, best.1);
            }
            for (i, word) in (0..).zip([999, 40 + r, slot, u32::from(row.valid)]) {
                memory.set_u32(row_list, r * 4 + i, word);
            }
            let biases = bias_words(&row.bias);
            let masked = !row.mask.is_empty();
            let init = SlotInit { bias_count: (biases.len() / 2) as u32, masked, ..row.init.clone() };
            let mut words = init.words();
            words[SLOT_ACTIVE as usize] = row.active;
            for (i, word) in (0..).zip(words) {
                memory.set_u32(state, slot * SLOT_WORDS + i, word);
            }
            for (i, word) in (0..).zip(biases) {
                memory.set_u32(bias, slot * BIAS_ENTRIES * 2 + i, word);
            }
            for (i, word) in (0..).zip(&row.mask) {
                memory.set_u32(masks, slot * v.div_ceil(32) + i, *word);
            }
            for (t, count) in (0..).zip(&row.counts) {
                memory.set_u32(counts, slot * v + t, *count);
            }
        }
        Built { recording, memory, ring }
    }

    /// Runs the scene on a device and in plain Rust, compares every word, and returns the ring entries of the device.
    fn check(&self, gpu: &Gpu, seed: u64) -> Vec<RingEntry> {
        let Built { recording, memory, ring } = self.build();
        let mut want = memory.clone();
        interpreter::run(&recording, &mut want);
        let mut got = memory;
        gpu.run(&recording, &mut got);
        let rows = self.rows.len() as u32;
        let entries = |memory: &HostMemory| -> Vec<RingEntry> {
            (0..rows)
                .map(|row| {
                    let at = RingEntry::at(STEP, row, RING_STEPS, rows) as u32;
                    let words: Vec<u32> = (at..at + ENTRY_WORDS).map(|i| memory.u32(ring, i)).collect();
                    let top = RingEntry::top_at(STEP, row, RING_STEPS, rows) as u32;
                    RingEntry::read(&words, || std::array::from_fn(|i| memory.u32(ring, top + i as u32)))
                })
                .collect()
        };
        let (got_entries, want_entries) = (entries(&got), entries(&want));
        for (i, (g, w)) in got_entries.iter().zip(&want_entries).enumerate() {
            let row = &self.rows[i];
            let context = || {
                format!(
                    "on {}, seed {seed}, vocabulary {}, row {i} ({} logits, active {}, valid {}, {} biases): {:?}\n got {g:?}\nwant {w:?}",
                    gpu.name,
                    self.vocabulary,
                    row.style,
                    row.active,
                    row.valid,
                    row.bias.len(),
                    row.init
                )
            };
            assert_eq!(
                (g.step, g.slot, g.token, g.done, g.top.len()),
                (w.step, w.slot, w.token, w.done, w.top.len()),
                "{}",
                context()
            );
            let near = |a: f32, b: f32| a == b || (a - b).abs() <= 2e-5 * b.abs().max(1.0);
            assert!(near(g.logprob, w.logprob), "{}", context());
            for (a, b) in g.top.iter().zip(&w.top) {
                assert!(a.0 == b.0 && near(a.1, b.1), "{}", context());
            }
        }
        for (b, decl) in recording.buffers.iter().enumerate() {
            if decl.name == "ring" {
                continue;
            }
            if let Some(at) = (0..got.buffers[b].len()).find(|i| got.buffers[b][*i] != want.buffers[b][*i]) {
                panic!(
                    "on {}, seed {seed}, vocabulary {}: word {at} of {} is {:#x}, not {:#x}",
                    gpu.name, self.vocabulary, decl.name, got.buffers[b][at], want.buffers[b][at]
                );
            }
        }
        got_entries
    }
}

fn logits(random: &mut Random, style: &str, vocabulary: u32) -> Vec<f32> {
    let v = vocabulary as usize;
    let mut l: Vec<f32> = match style {
        "equal" => vec![1.25; v],
        "steps" => (0..v).map(|_| random.below(6) as f32 - 3.0).collect(),
        "sparse" => (0..v).map(|_| if random.below(8) == 0 { random.normal() } else { f32::NEG_INFINITY }).collect(),
        "nan" => (0..v).map(|_| if random.below(3) == 0 { f32::NAN } else { 4.0 * random.normal() }).collect(),
        "all nan" => vec![f32::NAN; v],
        "none" => vec![f32::NEG_INFINITY; v],
        "infinite" => {
            (0..v).map(|_| random.of(&[f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0, -0.0])).collect()
        }
        "wide" => (0..v).map(|_| random.normal() * 1e4).collect(),
        "flat" => (0..v).map(|_| random.normal() * 1e-3).collect(),
        "rising" => (0..v).map(|i| i as f32 * 1e-3).collect(),
        "peak" => (0..v).map(|_| random.normal()).collect(),
        _ => (0..v).map(|_| 3.0 * random.normal()).collect(),
    };
    if style == "peak" {
        let at = random.below(v);
        l[at] = 30.0;
    }
    l
}

const STYLES: [&str; 12] =
    ["normal", "equal", "steps", "sparse", "nan", "all nan", "none", "infinite", "wide", "flat", "rising", "peak"];

fn random_row(random: &mut Random, vocabulary: u32, style: &'static str) -> Row {
    let v = vocabulary as usize;
    let token = |random: &mut Random| random.below(v) as u32;
    let penalties = random.below(3) == 0;
    let minimum = random.below(3) == 0;
    let stops = random.below(STOP_ENTRIES as usize + 1);
    let biases = if random.below(3) == 0 { random.of(&[1, 3, 40, 300]) } else { 0 };
    Row {
        style,
        logits: logits(random, style, vocabulary),
        init: SlotInit {
            remaining: random.of(&[1, 2, 100]),
            generated: random.below(50) as u32,
            min_left: if minimum { random.of(&[1, 5]) } else { 0 },
            temperature: random.of(&[0.0, 0.0, 1e-3, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0]),
            top_k: random.of(&[0, 0, 1, 2, 5, 50, vocabulary - 1, vocabulary, vocabulary + 10, u32::MAX]),
            top_p: random.of(&[1.0, 1.0, 1e-9, 1e-12, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0 - 1e-7]),
            min_p: random.of(&[0.0, 0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
            repetition: if penalties { random.of(&[1.0, 1.1, 2.0, 0.5]) } else { 1.0 },
            presence: if penalties { random.of(&[0.0, 0.5, -0.5, 2.0]) } else { 0.0 },
            frequency: if penalties { random.of(&[0.0, 0.3, -0.3]) } else { 0.0 },
            seed: random.bits(),
            stop_ids: (0..stops).map(|_| token(random)).collect(),
            bias_count: 0,
            logprobs: random.of(&[None, None, Some(0), Some(1), Some(5), Some(20)]),
            dump_logits: false,
            masked: false,
            prompt_tokens: u32::MAX,
        },
        active: random.of(&[1, 1, 1, 1, 1, 1, 1, 1, 0, 2]),
        valid: random.below(12) != 0,
        counts: (0..v)
            .map(|_| match random.below(6) {
                0 => COUNT_PROMPT,
                1 => 1 + random.below(4) as u32,
                2 => COUNT_PROMPT | (1 + random.below(4) as u32),
                _ => 0,
            })
            .collect(),
        bias: (0..biases).map(|_| (token(random), random.of(&[-100.0, -1.0, 0.5, 5.0, 100.0]))).collect(),
        mask: match random.below(4) {
            0 => (0..vocabulary.div_ceil(32)).map(|_| (random.bits() & random.bits()) as u32).collect(),
            _ => Vec::new(),
        },
    }
}

fn plain_row(logits: Vec<f32>, init: SlotInit) -> Row {
    let counts = Vec::new();
    Row {
        style: "given",
        logits,
        init,
        active: ACTIVE_RUNNING,
        valid: true,
        counts,
        bias: Vec::new(),
        mask: Vec::new(),
    }
}

fn tokens(entries: &[RingEntry]) -> Vec<u32> {
    entries.iter().map(|e| e.token.expect("every row runs")).collect()
}

#[test]
fn awkward_rows_equal_the_reference() {
    for gpu in all() {
        for (seed, vocabulary, rows) in [
            (1, 1, 60),
            (2, 2, 60),
            (3, 7, 120),
            (4, 8, 60),
            (5, 257, 120),
            (6, 1021, 60),
            (7, 32_003, 36),
            (8, 151_936, 24),
        ] {
            let mut random = Random(seed);
            let rows: Vec<Row> =
                (0..rows).map(|i| random_row(&mut random, vocabulary, STYLES[i % STYLES.len()])).collect();
            let threads = 128;
            let entries = Scene { vocabulary, rows, partials: 0, threads }.check(&gpu, seed);
            assert!(entries.iter().any(|e| e.token.is_none()) && entries.iter().any(|e| e.token.is_some()));
        }
    }
}

#[test]
fn the_longest_rows_stay_below_the_drivers_loop_limit() {
    let vocabulary = 262_144;
    let mut random = Random(11);
    let logits = logits(&mut random, "normal", vocabulary);
    let mut rising = logits.clone();
    rising.sort_by(f32::total_cmp);
    let init = SlotInit {
        temperature: 1.0,
        top_k: 200_000,
        top_p: 0.99,
        min_p: 1e-6,
        repetition: 1.1,
        logprobs: Some(20),
        remaining: 5,
        ..SlotInit::default()
    };
    for gpu in all() {
        let rows = vec![plain_row(logits.clone(), init.clone()), plain_row(rising.clone(), init.clone())];
        let threads = 256;
        let entries = Scene { vocabulary, rows, partials: 0, threads }.check(&gpu, 11);
        assert_eq!(entries[0].top.len(), 20);
    }
}

#[test]
fn partial_maxima_give_the_token_of_a_scan() {
    for gpu in all() {
        for (seed, vocabulary, partials) in [(21, 1, 1), (22, 257, 3), (23, 32_003, 125), (24, 32_003, 2001)] {
            let mut random = Random(seed);
            let threads = 128;
            let rows: Vec<Row> = ["normal", "steps", "equal", "none", "sparse"]
                .iter()
                .map(|style| {
                    plain_row(logits(&mut random, style, vocabulary), SlotInit { remaining: 4, ..SlotInit::default() })
                })
                .collect();
            let scene = Scene { vocabulary, rows, partials, threads };
            // The reference always scans the logits.
            scene.check(&gpu, seed);
            // With partial maxima the kernel must not read the logits.
            let mut blind = scene.build();
            let logits = blind.recording.buffers.iter().position(|b| b.name == "logits").expect("declared");
            blind.memory.buffers[logits].fill(0);
            let mut want = scene.build().memory;
            interpreter::run(&blind.recording, &mut want);
            gpu.run(&blind.recording, &mut blind.memory);
            let state = blind.recording.buffers.iter().position(|b| b.name == "state").expect("declared");
            assert_eq!(blind.memory.buffers[state], want.buffers[state], "on {}, seed {seed}", gpu.name);
        }
    }
}

/// Goal: a seed gives the same draw in any environment: with other rows beside it, with other workgroup sizes, on
/// another driver.
#[test]
fn a_seed_gives_the_same_tokens_everywhere() {
    let vocabulary = 5000;
    let mut random = Random(31);
    let shared = logits(&mut random, "normal", vocabulary);
    let init = |seed| SlotInit { temperature: 1.3, top_p: 0.97, seed, remaining: 9, ..SlotInit::default() };
    let mut seen: Vec<Vec<u32>> = Vec::new();
    for gpu in all() {
        for threads in [64, 128, gpu.most_threads] {
            for shift in [0, 3] {
                let mut rows: Vec<Row> = (0..shift).map(|_| random_row(&mut random, vocabulary, "flat")).collect();
                rows.extend((0..16).map(|seed| plain_row(shared.clone(), init(seed))));
                let scene = Scene { vocabulary, rows, partials: 0, threads };
                seen.push(tokens(&scene.check(&gpu, 31)[shift..]));
            }
        }
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "{seen:?}");
    let mut distinct = seen[0].clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 8, "sixteen seeds gave only {distinct:?}");
}

/// Goal: the tokens drawn are exactly those that the filters leave. Method: many seeds at a temperature at which every
/// remaining token is likely.
#[test]
fn draws_reach_exactly_the_survivors() {
    let vocabulary = 97;
    let mut random = Random(41);
    for gpu in all() {
        for (top_k, top_p, min_p, style) in [
            (5, 1.0, 0.0, "normal"),
            (0, 0.6, 0.0, "normal"),
            (20, 0.5, 0.0, "flat"),
            (0, 1.0, 0.97, "normal"),
            (30, 0.8, 0.96, "normal"),
            (3, 1.0, 0.0, "steps"),
            (0, 0.3, 0.0, "steps"),
            (0, 1e-9, 0.0, "steps"),
            (0, 1.0, 1.0, "equal"),
        ] {
            let row = logits(&mut random, style, vocabulary);
            let init = SlotInit { temperature: 100.0, top_k, top_p, min_p, remaining: 9, ..SlotInit::default() };
            let keys: Vec<u32> = row.iter().map(|l| deterministic::key_of(*l)).collect();
            let want = sampling::survivors(&keys, &init.words());
            let rows = (0..800).map(|seed| plain_row(row.clone(), SlotInit { seed, ..init.clone() })).collect();
            let mut got = tokens(&Scene { vocabulary, rows, partials: 0, threads: 64 }.check(&gpu, 41));
            got.sort_unstable();
            got.dedup();
            assert_eq!(got, want, "on {}: top_k {top_k}, top_p {top_p}, min_p {min_p}, {style} logits", gpu.name);
        }
    }
}

/// Goal: frequencies follow the softmax. Method: a chi-square test over many seeds, and over many draws of one seed.
#[test]
fn draws_follow_the_softmax() {
    let vocabulary = 40u32;
    let draws = 6_000u32;
    let temperature = 0.8;
    let row: Vec<f32> = (0..vocabulary).map(|t| -0.11 * ((t * 17) % vocabulary) as f32).collect();
    let total: f64 = row.iter().map(|l| (f64::from(*l) / temperature).exp()).sum();
    for gpu in all() {
        for one_seed in [false, true] {
            let rows = (0..draws)
                .map(|i| {
                    let (seed, generated) = if one_seed { (99, i) } else { (u64::from(i) << 20, 3) };
                    plain_row(
                        row.clone(),
                        SlotInit {
                            temperature: temperature as f32,
                            seed,
                            generated,
                            remaining: 9,
                            ..SlotInit::default()
                        },
                    )
                })
                .collect();
            let drawn = tokens(&Scene { vocabulary, rows, partials: 0, threads: 64 }.check(&gpu, 51));
            let mut counts = vec![0f64; vocabulary as usize];
            drawn.iter().for_each(|t| counts[*t as usize] += 1.0);
            let chi: f64 = row
                .iter()
                .zip(&counts)
                .map(|(l, count)| {
                    let expected = f64::from(draws) * (f64::from(*l) / temperature).exp() / total;
                    (count - expected).powi(2) / expected
                })
                .sum();
            // 39 degrees of freedom: mean 39, standard deviation 8.8. A value above 73 has a probability of one in a
            // thousand; the seeds are fixed.
            assert!((12.0..73.0).contains(&chi), "on {}: chi-square {chi} (one seed: {one_seed})", gpu.name);
        }
    }
}

#[test]
fn patches_clears_and_marks_equal_the_reference() {
    let (slots, vocabulary, row_count) = (5u32, 1000u32, 300u32);
    for gpu in all() {
        let mut random = Random(61);
        let mut recording = Recording::new("test.patch");
        let state = recording.buffer("state", sampling::state_bytes(slots));
        let counts = recording.buffer("counts", sampling::counts_bytes(slots, vocabulary));
        let rows = recording.buffer("rows", u64::from(row_count) * 16);
        let inbox = recording.buffer("inbox", sampling::patch_bytes(slots * SLOT_WORDS + 8));
        let clears = recording.buffer("clears", sampling::clear_bytes(slots));
        let words = slots * SLOT_WORDS;
        recording.call(sampling::patch("state".into(), PatchArgs { inbox, target: state, capacity: words + 8, words }));
        recording.call(sampling::clear_counts(
            "counts".into(),
            slots,
            ClearCountsArgs { inbox: clears, counts, slots, vocabulary },
        ));
        recording
            .call(sampling::mark_prompt("chunk".into(), MarkPromptArgs { rows, state, counts, row_count, vocabulary }));
        let mut memory = HostMemory::new(&recording);
        for i in 0..slots * vocabulary {
            memory.set_u32(counts, i, random.bits() as u32 & 0x8000_0003);
        }
        let mut patch = sampling::Patch::default();
        for slot in 0..slots {
            let presence = if slot == 2 { 0.0 } else { 0.5 };
            let init =
                SlotInit { presence, prompt_tokens: if slot == 3 { 100 } else { u32::MAX }, ..SlotInit::default() };
            patch.set_all(slot * SLOT_WORDS, &init.words());
        }
        patch.set(words - 1, 76);
        patch.set(words + 3, 78);
        // The row at the position of a slot's next token decodes: it is not counted again.
        patch.set(3 * SLOT_WORDS + SLOT_POSITION, 142);
        // If a patch sets a word twice, the last value counts.
        patch.set(words - 1, 77);
        let pairs = patch.into_pairs();
        assert_eq!(pairs.len() as u32, words + 1);
        for (i, word) in (0..).zip(sampling::patch_inbox(&pairs)) {
            memory.set_u32(inbox, i, word);
        }
        for (i, word) in (0..).zip(sampling::clear_inbox(&[4, 9, 1])) {
            memory.set_u32(clears, i, word);
        }
        for row in 0..row_count {
            let token = if row % 50 == 7 { vocabulary + 5 } else { random.below(40) as u32 };
            let slot = if row % 2 == 0 { 3 } else { random.below(5) as u32 };
            for (i, word) in (0..).zip([token, row, slot, u32::from(row % 10 != 0)]) {
                memory.set_u32(rows, row * 4 + i, word);
            }
        }
        memory.set_u32(rows, 142 * 4, 40);
        let before = memory.u32(counts, 3 * vocabulary + 40);
        let mut want = memory.clone();
        interpreter::run(&recording, &mut want);
        gpu.run(&recording, &mut memory);
        assert_eq!(memory.u32(counts, 3 * vocabulary + 40), before, "no other row has this token");
        assert_eq!(memory.u32(state, words - 1), 77);
        for (b, decl) in recording.buffers.iter().enumerate() {
            assert!(memory.buffers[b] == want.buffers[b], "{} differs on {}", decl.name, gpu.name);
        }
        // Slot 3 has both: flags of prompt tokens and counts of output tokens.
        let of_three: Vec<u32> = (0..40).map(|t| memory.u32(counts, 3 * vocabulary + t)).collect();
        assert!(
            of_three.iter().any(|c| c & COUNT_PROMPT != 0) && of_three.iter().any(|c| c & !COUNT_PROMPT > 4),
            "{of_three:?}"
        );
    }
}

/// Goal: a slot goes through its whole life correctly: stop ids suppressed until the minimum length, counting down,
/// stopping, and no tokens afterwards.
#[test]
fn a_slot_counts_down_stops_and_falls_silent() {
    let vocabulary = 9;
    let row: Vec<f32> = (0..9).map(|t| t as f32).collect();
    let init = SlotInit { min_left: 2, stop_ids: vec![8, 7], remaining: 5, ..SlotInit::default() };
    for gpu in all() {
        let scene = Scene { vocabulary, rows: vec![plain_row(row.clone(), init.clone())], partials: 0, threads: 64 };
        let mut built = scene.build();
        let mut seen = Vec::new();
        for step in STEP..STEP + 5 {
            gpu.run(&built.recording, &mut built.memory);
            let at = RingEntry::at(step, 0, RING_STEPS, 1) as u32;
            let words: Vec<u32> = (at..at + ENTRY_WORDS).map(|i| built.memory.u32(built.ring, i)).collect();
            let entry = RingEntry::read(&words, || panic!("nobody asked for alternatives"));
            assert_eq!(entry.step, step);
            seen.push((entry.token, entry.done));
        }
        let want = [(Some(6), DONE_NO), (Some(6), DONE_NO), (Some(8), DONE_STOP), (None, DONE_NO), (None, DONE_NO)];
        assert_eq!(seen, want, "on {}", gpu.name);
    }
}

/// Goal: the reference itself filters in the documented order. Method: numbers computed by hand.
#[test]
fn the_reference_masks_in_the_order_that_it_says() {
    let tables = SlotTables { counts: &[], bias: &[], mask: &[] };
    let keys = |logits: &[f32]| logits.iter().map(|l| deterministic::key_of(*l)).collect::<Vec<u32>>();
    // Probabilities 0.5, 0.125, 0.25, 0.125.
    let row: Vec<f32> = [0.5f32, 0.125, 0.25, 0.125].iter().map(|p| p.ln()).collect();
    let of = |top_k, top_p, min_p| {
        let init = SlotInit { temperature: 1.0, top_k, top_p, min_p, ..SlotInit::default() };
        sampling::survivors(&keys(&row), &init.words())
    };
    assert_eq!(of(0, 1.0, 0.0), [0, 1, 2, 3]);
    assert_eq!(of(1, 1.0, 0.0), [0]);
    assert_eq!(of(3, 1.0, 0.0), [0, 1, 2, 3], "equal to the third");
    assert_eq!(of(0, 0.49, 0.0), [0]);
    assert_eq!(of(0, 0.6, 0.0), [0, 2]);
    assert_eq!(of(2, 0.6, 0.0), [0], "two thirds of what top-k left");
    assert_eq!(of(2, 0.7, 0.0), [0, 2]);
    assert_eq!(of(0, 0.7, 0.3), [0, 2], "of what min-p left, 0.67 is not enough");
    assert_eq!(of(0, 0.6, 0.3), [0]);
    let init = SlotInit { logprobs: Some(2), ..SlotInit::default() };
    let drawn = sampling::draw(&row, &init.words(), tables);
    assert_eq!(drawn.token, 0);
    assert!((drawn.logprob - 0.5f32.ln()).abs() < 1e-6);
    assert_eq!(drawn.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 2]);
    // The order is: bias, then the repetition penalty, then frequency and presence penalties.
    let init = SlotInit { repetition: 2.0, presence: 0.25, frequency: 0.5, bias_count: 1, ..SlotInit::default() };
    let bias = bias_words(&[(1, 3.0)]);
    let counts = [COUNT_PROMPT, COUNT_PROMPT | 2, 0];
    let keys = sampling::adjusted_keys(
        &[-1.0, 1.0, 1.0],
        &init.words(),
        SlotTables { counts: &counts, bias: &bias, mask: &[] },
    );
    assert_eq!(
        keys.iter().map(|k| deterministic::value_of(*k)).collect::<Vec<_>>(),
        [-2.0, 4.0 / 2.0 - 1.0 - 0.25, 1.0]
    );
}

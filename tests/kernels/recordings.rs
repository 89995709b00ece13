//! Goal: the recordings of whole models compute the same on the device and in plain Rust, and contain no more
//! dispatches and barriers than they should. Method: committed checkpoints; a prompt in chunks, the first of them
//! beside another prompt's chunk, then decode steps, on the device and in the interpreter, each with its own memory.
//! After every step all named buffers are compared, tokens and state bit for bit. The tokens must also equal those of
//! transformers, so that both sides cannot be wrong in the same way.
//!
//! Tolerance: keys and values are f32, so the two sides differ only by the order of sums. With random weights the
//! difference grows from layer to layer, to 3e-5 after five layers, and to 8e-5 after four layers whose recurrent state
//! has processed two hundred tokens. The limit is 1e-4, and twice that for models with recurrent state. A wrong index,
//! scale or position changes values of about 1 by far more. Activations, pages and states start as NaN except for the
//! padding that kernels may read.
//!
//! Steps of which several devices compute a part each are compared with whole ones in the interpreter alone.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{drafted, expected, fixture};
use crate::harness::{Bench, Bound, Change, Expect, POISON, Random, compare, every_case};
use crate::pages::stored;
use ostinato::config::KvFormat;
use ostinato::gpu::build::defaults;
use ostinato::kernels::attention::{Heads, flash};
use ostinato::kernels::embed::{self, ChunkLayout, PromptRows};
use ostinato::kernels::exchange::{Blocks, Columns, Phase, Rank, SLOTS, check_of, words_of};
use ostinato::kernels::gemm::codes_ptx::CodesPtxConfig;
use ostinato::kernels::gemm::skinny::{Matrices, SkinnyConfig, skinny};
use ostinato::kernels::gemm::{Activations, Epilogue, GemvConfig, Matrix, Product, take_last, wgmma};
use ostinato::kernels::host_memory::{HostMemory, PackedMatrix};
use ostinato::kernels::interpreter;
use ostinato::kernels::layout::StateLayout;
use ostinato::kernels::recording::{Access, Arg, Call, Op, Recording, Touch};
use ostinato::kernels::region::{RegionError, buffer_sizes};
use ostinato::kernels::shaders::{
    AllGatherArgs, AllGatherConstants, AllReduceArgs, AllReduceConstants, TakeLastArgs, find,
};
use ostinato::kernels::state::{self, RingEntry, SlotInit};
use ostinato::kernels::tags::{self, Flow, tagged};
use ostinato::kernels::{barriers, delta};
use ostinato::memory::pack::codes::{sample, unit_cols};
use ostinato::memory::pack::{self, Format, Layout, Packing};
use ostinato::model::checkpoint::{Checkpoint, WeightKind, WeightSpec};
use ostinato::model::config::{LayerKind, MlpKind, ModelConfig};
use ostinato::model::decoder::drafter::{DRAFTER, Drafter, DrafterKind, PlacedWeight};
use ostinato::model::decoder::parallel::{HEAD_EXCHANGES, INBOX, exchanges};
use ostinato::model::decoder::stage::{LayerStage, divide_vocabulary};
use ostinato::model::decoder::{Decoder, RECURRENT, ROPE, RingLayout, StepShape, stride};
use ostinato::model::synth::{self, SynthOptions};
use ostinato::quant::number::Number;
use ostinato::quant::store::StoredType;
use ostinato::quant::{Codes, Minimum};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

const CHUNK: u32 = 16;
/// The slot, of four, whose sequence generates tokens.
const SLOT: u32 = 2;
/// The slot of the prompt that runs beside the first chunk; it is idle afterwards.
const BESIDE: u32 = 3;
/// Pages of the longest sequence.
const PAGES: u32 = 14;
/// Rows of a prompt that one recording scores.
const SCORED: u32 = 6;
const RING: RingLayout = RingLayout { steps: 4, rows: 4 };
const NEAR: f32 = 1e-4;

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&fixture(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Returns a replica's recordings, tuned as for a CPU driver, with a small KV cache.
fn decoder<'a>(vulkan: &Vulkan, driver: Driver, checkpoint: &'a Checkpoint, max_buffer_bytes: u64) -> Decoder<'a> {
    Decoder {
        input_tags: BTreeMap::new(),
        config: &checkpoint.config,
        weights: checkpoint.weights(),
        stage: LayerStage::whole(&checkpoint.config),
        max_buffer_bytes,
        state: StateLayout {
            slots: 4,
            rows: 4,
            chunk: CHUNK,
            prompts: 2,
            sequences: 2,
            max_pages: PAGES,
            cells: checkpoint.config.is_recurrent(),
            windows: false,
        },
        cells: 4,
        drafts: 0,
        drafter: None,
        pages: PAGES + 2,
        window_pages: None,
        kv_format: KvFormat::F32,
        ring: RING,
        context: 16 * PAGES,
        tuning: defaults::tuning(
            &vulkan.adapter(driver),
            None,
            checkpoint.config.attention_kinds[0].kv_heads,
            checkpoint.config.context,
        ),
    }
}

const WHOLE: u64 = 1 << 30;

/// Returns the size of the largest buffer with which the experts of every layer are divided, both matrices unevenly and
/// differently: it holds all experts' `down` but one's, and less than half of their gates and ups.
fn dividing(decoder: &Decoder<'_>) -> u64 {
    let whole = |weight: &WeightSpec, rows: u32| Packing { rows, ..decoder.packing(weight) }.bytes();
    let down = |weight: &&WeightSpec| weight.name.ends_with("experts.down");
    let down = decoder.weights.iter().find(down).expect("experts");
    let bytes = whole(down, down.rows - decoder.expert_rows(down).expect("experts"));
    for weight in decoder.weights.iter().filter(|weight| weight.is_of_shared_expert()) {
        assert!(whole(weight, weight.rows) <= bytes, "{} is in one buffer", weight.name);
    }
    let divided = Decoder { max_buffer_bytes: bytes, ..decoder.clone() };
    for weight in decoder.weights {
        let Some(rows) = decoder.expert_rows(weight) else { continue };
        let parts = divided.parts(weight);
        let least = if weight.name.ends_with("gate_up") { 3 } else { 2 };
        assert!(parts.len() >= least, "{} in {parts:?}", weight.name);
        assert!(parts.iter().all(|part| part.bytes <= bytes && part.rows.is_multiple_of(rows)), "{parts:?}");
        assert_eq!(parts.iter().map(|part| part.rows).sum::<u32>(), weight.rows);
    }
    bytes
}

/// The words of all buffers of a replica's recordings, by buffer name.
type Memory = HashMap<String, Vec<u32>>;

/// Returns the words of all weight buffers as the loader writes them, also of a draft model.
fn weight_words(decoder: &Decoder<'_>) -> Memory {
    let mut memory = Memory::new();
    for PlacedWeight { spec: weight, packing, parts } in decoder.placed_weights() {
        if weight.sources.iter().any(|source| source.matrix.is_some()) {
            memory.extend(parts.into_iter().map(|part| (part.name, sampled(weight.format, part.rows, weight.cols))));
            continue;
        }
        let files: Vec<Vec<u8>> = weight.sources.iter().map(|s| std::fs::read(&s.path).expect("a shard")).collect();
        let rows: Vec<pack::Rows<'_>> = weight
            .sources
            .iter()
            .zip(&files)
            .map(|(source, file)| pack::Rows {
                bytes: &file[source.offset as usize..(source.offset + source.map.bytes()) as usize],
                map: source.map,
            })
            .collect();
        for part in parts {
            let first = u64::from(part.first_row) * packing.row_bytes();
            let mut bytes = vec![0; part.bytes as usize];
            pack::pack(&packing, &rows, first..first + part.bytes, &mut bytes).expect("finite values");
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            memory.insert(
                part.name,
                bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            );
        }
    }
    memory
}

/// Returns codes in fragments for a weight whose codes and scales are tensors of their own: not its own, but of a size that
/// keeps activations about 1.
fn sampled(format: Format, rows: u32, cols: u32) -> Vec<u32> {
    let codes = format.codes().expect("codes");
    let mut words = sample(codes, Layout::Fragments, rows, cols);
    let range = Recording::new("weights").buffer("weights", words.len() as u64 * 4);
    let memory = HostMemory { buffers: vec![words.clone()] };
    let matrix = PackedMatrix { range, format, fragments: true, cols: cols.next_multiple_of(unit_cols(codes)) };
    let square = |i: u32| memory.element(&matrix, i / cols, i % cols).powi(2);
    let length = (0..16 * cols).map(square).sum::<f32>().sqrt() / 4.0;
    // A block of 16 rows begins with a factor for each.
    let each = words.len() / rows.div_ceil(16) as usize;
    for factor in words.chunks_exact_mut(each).flat_map(|block| &mut block[..16]) {
        *factor = (f32::from_bits(*factor) / length).to_bits();
    }
    words
}

/// Returns a replica's memory before its first step.
fn initial(decoder: &Decoder<'_>, recordings: &[&Recording]) -> Memory {
    let mut memory = weight_words(decoder);
    memory.extend(decoder.placed_tables().into_iter().filter(|(_, words)| !words.is_empty()));
    for (name, bytes) in buffer_sizes(recordings) {
        let of_drafter = decoder.drafter.as_ref().filter(|_| name.starts_with(DRAFTER));
        let decoder = of_drafter.map_or(decoder, |drafter| &drafter.decoder);
        let (c, heads) = (decoder.config, decoder.heads(0));
        let words = bytes.div_ceil(4) as usize;
        let row = |width: u32| {
            let stride = stride(width);
            (0..words).map(|i| if i as u32 % stride < width { POISON } else { 0 }).collect::<Vec<u32>>()
        };
        if memory.contains_key(&name) {
            continue;
        }
        let projected = || match (c.delta, c.short_conv) {
            (Some(net), _) => net.projected_rows(),
            (None, conv) => conv.expect("only recurrent layers have this buffer").projected_rows(),
        };
        let experts = || c.experts.expect("only experts have this buffer");
        // Of each row the chosen experts' parts and the shared expert's part, each padded.
        let middle = || {
            let part = |inner: u32| (0..stride(inner)).map(move |i| if i < inner { POISON } else { 0 });
            let chosen = (0..experts().chosen).flat_map(|_| part(experts().inner));
            let line: Vec<u32> = chosen.chain(experts().shared_inner.into_iter().flat_map(part)).collect();
            line.into_iter().cycle().take(words).collect()
        };
        let content = match name.strip_prefix(DRAFTER).unwrap_or(&name) {
            "x" | "head.x" | "draft.x" | "draft.embedded" | "draft.head" => row(c.hidden),
            "draft.projected" | "draft.output" => row(c.hidden),
            "draft.joined" => row(2 * c.hidden),
            "qkv" => row(c.qkv_rows(&c.attention_kinds[0])),
            "attention.output" => row(heads.q * heads.dim),
            "in_proj.output" => row(projected()),
            // Read for rows without a sequence, but not written where only steps of few rows have this buffer.
            "mixer.output" => vec![0; words],
            "mlp.hidden" => row(c.intermediate),
            "router.logits" => row(experts().count + u32::from(experts().shared_inner.is_some())),
            "experts.middle" => middle(),
            "logits" | "draft.logits" => row(c.vocab),
            name if name.starts_with(ROPE) => {
                let tables = decoder.rope_tables();
                let table = tables.iter().find(|(table, _)| table == name).expect("a table of this name");
                table.1.iter().map(|v| v.to_bits()).collect()
            }
            // Pages, states and scratch are not initialised.
            name if name.starts_with("kv.") || name.starts_with(RECURRENT) => vec![POISON; words],
            "scan" | "experts.parts" => vec![POISON; words],
            name if name.starts_with("attention.partials") => vec![POISON; words],
            _ => vec![0; words],
        };
        assert_eq!(content.len(), words, "\"{name}\"");
        memory.insert(name, content);
    }
    memory
}

/// Returns the words of a recording's buffers.
fn gather(memory: &Memory, recording: &Recording) -> HostMemory {
    let words = |decl: &ostinato::kernels::recording::BufferDecl| {
        memory[&decl.name][..decl.bytes.div_ceil(4) as usize].to_vec()
    };
    HostMemory { buffers: recording.buffers.iter().map(words).collect() }
}

fn scatter(memory: &mut Memory, recording: &Recording, host: &HostMemory) {
    for (decl, words) in recording.buffers.iter().zip(&host.buffers) {
        memory.get_mut(&decl.name).expect("bound")[..words.len()].copy_from_slice(words);
    }
}

fn expect(name: &str, heads: Heads, near: f32) -> Expect {
    match name.strip_prefix(DRAFTER).unwrap_or(name) {
        "x" | "head.x" | "qkv" | "attention.output" | "mlp.hidden" | "logits" => Expect::Floats(near),
        "branch" | "experts.output" | "in_proj.output" | "mixer.output" | "router.logits" | "experts.middle" => {
            Expect::Floats(near)
        }
        "experts.parts" | "experts.sorted" | "shared.hidden" | "shared.output" => Expect::Floats(near),
        // Rows of floats for `matmul`, and their factors.
        name if name.starts_with("blocked.") => Expect::Floats(near),
        "draft.x" | "draft.embedded" | "draft.joined" | "draft.head" | "draft.logits" => Expect::Floats(near),
        "draft.features" | "draft.projected" | "draft.output" => Expect::Floats(near),
        // Pairs of a chosen expert and its share.
        "experts.choices" => Expect::Pairs(near),
        // Pairs of a token and its log probability.
        "scores" => Expect::Pairs(near),
        "experts.x" | "experts.packed" | "shared.packed" => Expect::Bfloats(near),
        // Recurrent states and their pending inputs.
        name if name.starts_with(RECURRENT) => Expect::Floats(near),
        // Partial results of a split context.
        "flash.partials" => Expect::Any,
        name if name.trim_start_matches("tagged.").starts_with("attention.partials") => Expect::Any,
        // Partial sums of divided columns.
        "tagged.column_sums" => Expect::Any,
        "matmul.partials" => Expect::Any,
        // The contents of a gated delta net's scratch are an implementation detail of its kernels.
        "scan" => Expect::Any,
        name if name.starts_with("tagged.") => Expect::Tagged(near),
        // Rows in f16, whose scales may be rounded to neighbors, are compared by their products.
        name if name.starts_with("packed.f16.") => Expect::Any,
        "experts.x.f16" | "experts.packed.f16" | "experts.hidden" => Expect::Any,
        name if name.starts_with("packed.") => Expect::Bfloats(near),
        name if name.starts_with("kv.") && heads.kv_format == KvFormat::F16 => Expect::Halves(near),
        name if name.starts_with("kv.") && heads.kv_format == KvFormat::Int8 => stored(heads, near),
        name if name.starts_with("kv.") => Expect::Floats(near),
        // Derived from the bits of the logits, which differ.
        "sampling.keys" | "sampling.partials" | "draft.partials" => Expect::Any,
        _ => Expect::Exact,
    }
}

/// The recordings of a replica that a run uses.
struct Recordings {
    /// The layers for a step of prompts.
    layers: Recording,
    /// The LM head and sampler for one prompt and for two.
    first: [Recording; 2],
    /// Scores [`SCORED`] rows of a prompt.
    score: Recording,
    decode: Vec<Recording>,
    /// Verification steps for one sequence and for two; empty if the model does not draft.
    verify: Vec<Recording>,
    /// The number of rows of a sequence in them.
    each: u32,
    /// The pass in which a draft model computes tokens that it has missed, if there is one.
    catch_up: Option<Recording>,
}

impl Recordings {
    fn new(decoder: &Decoder<'_>) -> Recordings {
        let rows = decoder.state.chunk;
        let verified: &[u32] = if decoder.drafts > 0 { &[1, 2] } else { &[] };
        let verify = |&sequences: &u32| decoder.record(StepShape::Verify { sequences, drafts: decoder.drafts });
        Recordings {
            verify: verified.iter().map(verify).collect(),
            each: decoder.drafts + 1,
            catch_up: decoder.catch_up(rows),
            layers: decoder.record(StepShape::Prefill { rows }),
            first: [1, 2].map(|rows| decoder.record(StepShape::Head { rows })),
            score: decoder.record(StepShape::Score { rows: SCORED }),
            decode: [1, 2, 4].map(|rows| decoder.record(StepShape::Decode { rows })).to_vec(),
        }
    }

    fn all(&self) -> Vec<&Recording> {
        let drafting = self.verify.iter().chain(&self.catch_up);
        [&self.layers, &self.score].into_iter().chain(&self.first).chain(&self.decode).chain(drafting).collect()
    }
}

/// A run of a replica's recordings on the device and, if requested, in the interpreter.
struct Run<'a> {
    name: String,
    layout: StateLayout,
    bound: Bound<'a>,
    host: Option<Memory>,
    heads: Heads,
    near: f32,
}

impl<'a> Run<'a> {
    fn new(name: &str, bench: &'a Bench, decoder: &Decoder<'_>, recordings: &Recordings, interpreted: bool) -> Run<'a> {
        let all = recordings.all();
        let memory = initial(decoder, &all);
        let bound = bench.bind(&all);
        for (name, buffer) in bound.table.iter() {
            buffer.write(0, &bytemuck::cast_slice(&memory[name])[..buffer.bytes() as usize]);
        }
        Run {
            name: format!("{name} on {:?}", bench.driver),
            layout: decoder.state,
            bound,
            host: interpreted.then_some(memory),
            heads: decoder.heads(0),
            near: if decoder.config.delta.is_some() { 2.0 * NEAR } else { NEAR },
        }
    }

    /// Changes words of the device state on both sides.
    fn patch(&mut self, word: u32, values: &[u32]) {
        self.bound.table.get("state").expect("bound").write(u64::from(word) * 4, bytemuck::cast_slice(values));
        if let Some(host) = &mut self.host {
            host.get_mut("state").expect("bound")[word as usize..word as usize + values.len()].copy_from_slice(values);
        }
    }

    /// Runs the recordings in one submission on the device and one after the other in the interpreter, and compares the
    /// buffers of the last one.
    fn step(&mut self, recordings: &[&Recording]) {
        let last = recordings.last().expect("there is one");
        let before = self.host.as_ref().map(|host| [self.bound.read(last), gather(host, last)]);
        self.bound.run(recordings);
        let Some(host) = &mut self.host else { return };
        for recording in recordings {
            let mut memory = gather(host, recording);
            interpreter::run(recording, &mut memory);
            scatter(host, recording, &memory);
        }
        let what = format!("{} after {}", self.name, last.name);
        let before = before.expect("there is a host");
        let after = [self.bound.read(last), gather(host, last)];
        let [device, reference] = [0, 1].map(|side| Change { before: &before[side], after: &after[side] });
        let expect = |name: &str| expect(name, self.heads, self.near);
        let worst = compare(last, &what, device, reference, &expect);
        println!("{what}: largest difference {worst:?} of what is allowed");
    }

    /// Returns the token that a step left in the ring, or `None` for a row without a sequence.
    fn token(&self, step: u32, row: u32) -> Option<u32> {
        let mut words = [0u32; state::ENTRY_WORDS as usize];
        let at = RingEntry::at(step, row, RING.steps, RING.rows) as u64 * 4;
        self.bound.table.get("ring").expect("bound").read(at, bytemuck::cast_slice_mut(&mut words));
        let entry = RingEntry::read(&words, || panic!("nobody asked for alternatives"));
        assert_eq!(entry.step, step, "{}", self.name);
        entry.token
    }

    fn words(&self, name: &str) -> Vec<u32> {
        let buffer = self.bound.table.get(name).unwrap_or_else(|| panic!("\"{name}\" is bound"));
        let mut words = vec![0; buffer.bytes() as usize / 4];
        buffer.read(0, bytemuck::cast_slice_mut(&mut words));
        words
    }

    /// Runs a prompt in chunks, the first of them beside another prompt. Returns its first token and the number of the
    /// next step.
    fn prompt(&mut self, recordings: &Recordings, prompt: &[u32]) -> (u32, u32) {
        let layout = self.layout;
        let pages = Random(11).permutation(PAGES + 2);
        for (slot, pages) in [(SLOT, &pages[..PAGES as usize]), (BESIDE, &pages[PAGES as usize..][..1])] {
            self.patch(layout.slot_word(slot, 0), &SlotInit { remaining: 64, ..SlotInit::default() }.words());
            self.patch(layout.page_word(slot, 0), pages);
        }
        let mut step = 0;
        let mut start = 0;
        while start < prompt.len() {
            let beside: &[u32] = if start == 0 { &[1, 2, 3] } else { &[] };
            let end = prompt.len().min(start + layout.chunk as usize - beside.len());
            let last = end == prompt.len();
            let (tokens, from) = (&prompt[start..end], (start > 0).then_some(SLOT));
            let next = prompt.get(end).copied();
            let mut parts = vec![PromptRows { slot: SLOT, start: start as u32, tokens, last, next, from, keeps: &[] }];
            if start == 0 {
                let beside = PromptRows {
                    slot: BESIDE,
                    start: 0,
                    tokens: beside,
                    last: true,
                    next: None,
                    from: None,
                    keeps: &[],
                };
                parts.insert(0, beside);
            }
            for (word, words) in layout.chunk_layout().describe(&parts) {
                self.patch(layout.chunk_word(word), &words);
            }
            self.step(&[&recordings.layers]);
            let rows: usize = parts.iter().map(|part| part.tokens.len()).sum();
            let half = u32::from(start > 0) * layout.chunk;
            // With rounded sums, tokens of nearly equal probability may change places, so no alternatives are
            // requested.
            let alternatives = if self.near <= 2.0 * NEAR { 3 } else { 0 };
            self.patch(layout.score_word(), &[0, next.unwrap_or(state::TOKEN_NONE), alternatives, half]);
            self.step(&vec![&recordings.score; rows.div_ceil(SCORED as usize)]);
            let lasts = parts.iter().filter(|part| part.last).count();
            if lasts > 0 {
                self.step(&[&recordings.first[lasts - 1]]);
                step += 1;
            }
            start = end;
        }
        let lasts = if step == 1 { 2 } else { 1 };
        (self.token(step - 1, lasts - 1).expect("a token was drawn"), step)
    }

    /// Runs a prompt, then decode steps for nine further tokens. Returns the tokens.
    fn generate(&mut self, recordings: &Recordings, prompt: &[u32]) -> Vec<u32> {
        let (first, mut step) = self.prompt(recordings, prompt);
        let mut tokens = vec![first];
        // The row is in a different position of a different bucket each time, with rows without a sequence before and
        // after it.
        let [one, two, four] = &recordings.decode[..] else { panic!("three buckets") };
        let steps: [(&[u32], Vec<&Recording>); 4] = [
            (&[SLOT], vec![one]),
            (&[u32::MAX, SLOT], vec![two]),
            // Another slot, which is idle, and a row without a slot.
            (&[0, u32::MAX, SLOT, 1], vec![four, four, four]),
            (&[SLOT], vec![one, one, one, one]),
        ];
        for (batch, recordings) in steps {
            self.patch(self.layout.batch_word(0), batch);
            self.step(&recordings);
            let row = batch.iter().position(|slot| *slot == SLOT).expect("it runs");
            for _ in &recordings {
                tokens.push(self.token(step, row as u32).expect("a token was drawn"));
                for other in (0..batch.len()).filter(|other| *other != row) {
                    assert_eq!(self.token(step, other as u32), None, "row {other} has no sequence");
                }
                step += 1;
            }
        }
        tokens
    }

    /// Runs a prompt, then steps that verify the drafts of a draft model and steps without drafts. Returns the tokens and
    /// the number of drafts that were accepted.
    fn verify_own(&mut self, recordings: &Recordings, prompt: &[u32]) -> (Vec<u32>, u32) {
        let (first, mut step) = self.prompt(recordings, prompt);
        let ([one, two], decode) = (&recordings.verify[..], &recordings.decode[..2]) else { panic!("two buckets") };
        let (mut tokens, mut accepted) = (vec![first], 0);
        let steps: [(&[u32], &Recording); 8] = [
            (&[SLOT], one),
            (&[u32::MAX, SLOT], two),
            (&[BESIDE, SLOT], two),
            (&[SLOT], &decode[0]),
            (&[BESIDE, SLOT], &decode[1]),
            (&[SLOT, BESIDE], two),
            // Another slot, which is idle.
            (&[SLOT, 1], two),
            (&[SLOT], one),
        ];
        // By slot: the number of tokens of which the draft model has keys and values at least.
        let mut drafted = [SLOT, BESIDE].map(|slot| (slot, self.position(slot) - 1));
        for (batch, recording) in steps {
            let verifies = recording.name.starts_with("verify");
            if verifies {
                self.catch_up(recordings, &drafted);
            }
            self.patch(self.layout.batch_word(0), batch);
            self.step(&[recording]);
            if verifies {
                drafted = drafted.map(|(slot, _)| (slot, self.position(slot) - 1));
            }
            let rows = if verifies { recordings.each } else { 1 };
            for (index, slot) in (0..).zip(batch) {
                let drawn: Vec<u32> = (0..rows).filter_map(|row| self.token(step, rows * index + row)).collect();
                let runs = [SLOT, BESIDE].contains(slot);
                assert_eq!(drawn.is_empty(), !runs, "sequence {index} of {batch:?}");
                accepted += drawn.len().saturating_sub(1) as u32;
                tokens.extend(drawn.into_iter().filter(|_| *slot == SLOT));
            }
            step += 1;
        }
        (tokens, accepted)
    }

    /// Returns the position of a slot's next token.
    fn position(&self, slot: u32) -> u32 {
        self.words("state")[self.layout.slot_word(slot, state::SLOT_POSITION) as usize]
    }

    /// Has the draft model compute the tokens that it lacks before it drafts: those of each slot from a position on.
    fn catch_up(&mut self, recordings: &Recordings, drafted: &[(u32, u32)]) {
        let (history, stride) = (self.words("history"), self.layout.max_pages * 16);
        let missed: Vec<(u32, u32, Vec<u32>)> = drafted
            .iter()
            .map(|&(slot, start)| {
                let tokens = (start..self.position(slot) - 1).map(|at| history[(slot * stride + at) as usize]);
                (slot, start, tokens.collect())
            })
            .filter(|(_, _, tokens): &(u32, u32, Vec<u32>)| !tokens.is_empty())
            .collect();
        if missed.is_empty() {
            return;
        }
        let prompts = missed.iter().map(|(slot, start, tokens)| PromptRows {
            slot: *slot,
            start: *start,
            tokens,
            last: false,
            next: None,
            from: None,
            keeps: &[],
        });
        for (word, words) in self.layout.chunk_layout().describe(&prompts.collect::<Vec<_>>()) {
            self.patch(self.layout.chunk_word(word), &words);
        }
        self.step(&[recordings.catch_up.as_ref().expect("a draft model")]);
    }

    /// Runs a prompt, then steps that verify drafts and steps without drafts. Returns the tokens. `known` are the
    /// expected tokens: the drafts are made from them, right and wrong ones, except in one step that uses the model's
    /// own drafts.
    fn verify(&mut self, recordings: &Recordings, prompt: &[u32], known: &[u32]) -> Vec<u32> {
        #[derive(PartialEq)]
        enum Drafts {
            Right,
            Wrong,
            Own,
        }
        let (first, mut step) = self.prompt(recordings, prompt);
        let mut tokens = vec![first];
        let ([one, two], decode) = (&recordings.verify[..], &recordings.decode[0]) else { panic!("two buckets") };
        // After an accepted draft the next step finds the token before its own pending; after a rejected draft it finds
        // none.
        type Verified<'a> = Option<(&'a Recording, Drafts)>;
        let steps: [(&[u32], Verified<'_>); 7] = [
            (&[SLOT], Some((one, Drafts::Right))),
            (&[SLOT], Some((one, Drafts::Wrong))),
            (&[u32::MAX, SLOT], Some((two, Drafts::Right))),
            (&[SLOT], None),
            (&[SLOT], Some((one, Drafts::Own))),
            // Another slot, which is idle.
            (&[SLOT, 1], Some((two, Drafts::Wrong))),
            (&[SLOT], None),
        ];
        for (batch, verify) in steps {
            self.patch(self.layout.batch_word(0), batch);
            let Some((recording, drafts)) = verify else {
                self.step(&[decode]);
                tokens.push(self.token(step, 0).expect("a token was drawn"));
                step += 1;
                continue;
            };
            let right = known[tokens.len()];
            if drafts != Drafts::Own {
                let draft = if drafts == Drafts::Right { right } else { right ^ 1 };
                self.patch(self.layout.slot_word(SLOT, state::SLOT_DRAFTS), &[draft]);
            }
            self.step(&[recording]);
            for (index, slot) in (0..).zip(batch) {
                let drawn = [0, 1].map(|row| self.token(step, 2 * index + row));
                if *slot != SLOT {
                    assert_eq!(drawn, [None; 2], "sequence {index} is none");
                    continue;
                }
                tokens.push(drawn[0].expect("a token was drawn"));
                tokens.extend(drawn[1]);
                match drafts {
                    Drafts::Right => assert!(drawn[1].is_some(), "{}: the draft is right", self.name),
                    Drafts::Wrong => assert_eq!(drawn[1], None, "{}: the draft is wrong", self.name),
                    Drafts::Own => {}
                }
            }
            step += 1;
        }
        tokens
    }
}

/// Checkpoints that together cover biases, norms per head, tied and untied heads, every format, grouped queries and a
/// head larger than a subgroup's share; experts; gated delta nets; and both.
const CHECKPOINTS: [&str; 9] = [
    "llama-bias",
    "llama-deep",
    "llama-f32",
    "qwen3-f16",
    "qwen3-gqa7",
    "qwen3-yarn",
    "moe-top2",
    "hybrid-two",
    "hybrid-moe",
];

fn run_checkpoint(vulkan: &Vulkan, bench: &Bench, name: &str) {
    let checkpoint = open(name);
    let mut decoder = decoder(vulkan, bench.driver, &checkpoint, WHOLE);
    if name == "hybrid-moe" {
        // A chunk has more than one block of rows of the scan, and partial blocks.
        decoder.state.chunk = 80;
    }
    run_decoder(bench, name, &decoder);
}

/// Runs a checkpoint's recordings on the device and in the interpreter, which must give the tokens of transformers.
fn run_decoder(bench: &Bench, name: &str, decoder: &Decoder<'_>) {
    let recordings = Recordings::new(decoder);
    let known = expected(name);
    let mut run = Run::new(name, bench, decoder, &recordings, true);
    let tokens = run.generate(&recordings, &known.prompt);
    assert_eq!(tokens, known.greedy[..tokens.len()], "{name} on {:?}", bench.driver);
}

/// Goal: experts that are divided among several buffers compute what whole ones do. Method: as for whole weights; chunks
/// whose rows read their experts one by one, and chunks that are sorted by expert, with and without a shared expert.
#[test]
fn recordings_of_experts_in_several_buffers_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    for (name, chunk) in [("moe-top2", 16), ("moe-top2", 32), ("hybrid-moe", 32)] {
        let checkpoint = open(name);
        let mut decoder = decoder(&vulkan, bench.driver, &checkpoint, WHOLE);
        decoder.state.chunk = chunk;
        decoder.max_buffer_bytes = dividing(&decoder);
        run_decoder(&bench, name, &decoder);
    }
}

#[test]
fn recordings_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    // A stretched rotary table is data to these recordings, and one of the last two has the recurrent layers of both.
    let some = |name: &&str| every_case() || !["qwen3-yarn", "hybrid-two"].contains(name);
    for name in CHECKPOINTS.into_iter().filter(some) {
        run_checkpoint(&vulkan, &bench, name);
    }
}

#[test]
fn recordings_mean_the_same_on_swiftshader_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::SwiftShader);
    for name in ["qwen3-gqa7", "llama-deep"].into_iter().take(if every_case() { 2 } else { 1 }) {
        run_checkpoint(&vulkan, &bench, name);
    }
}

/// Goal: a prompt step's recording with room for more sequences has the workgroups that it would have if it had been recorded for
/// as many prompts, for attention and for slots that decode. Method: recordings for two prompts and for four.
#[test]
fn room_for_more_sequences_is_what_more_prompts_would_have() {
    let vulkan = Vulkan::new();
    let (mut attention, mut decoding) = (0, 0);
    for name in ["qwen3-gqa7", "hybrid-two"] {
        let checkpoint = open(name);
        let mut decoder = decoder(&vulkan, Driver::first(), &checkpoint, WHOLE);
        decoder.tuning.mixed_steps = Some(1);
        (decoder.kv_format, decoder.tuning.flash_f32) = (KvFormat::F16, true);
        decoder.state.sequences = 4;
        let [few, many] = [2, 4].map(|prompts| {
            let state = StateLayout { prompts, ..decoder.state };
            Decoder { state, ..decoder.clone() }.record(StepShape::Prefill { rows: CHUNK })
        });
        assert_eq!(few.ops.len(), many.ops.len());
        for (few, many) in few.ops.iter().zip(&many.ops) {
            let (Op::Call(few), Op::Call(many)) = (few, many) else { continue };
            let mut wide = few.clone();
            flash::add_prompts(&mut wide, 2);
            delta::add_decoding_rows(&mut wide, 2);
            let (flashes, decodes) = (few.kernel.starts_with("flash"), few.kernel == "delta_step");
            if flashes || decodes {
                assert_eq!((wide.groups, few.kernel), (many.groups, many.kernel), "{name}, {}", few.label);
                assert_ne!(wide.groups, few.groups);
            } else {
                assert_eq!(wide, *few);
            }
            attention += u32::from(flashes);
            decoding += u32::from(decodes);
        }
    }
    assert!(attention > 0 && decoding > 0, "{attention} calls of attention, {decoding} for slots that decode");
}

/// Goal: slots that decode in the prompt steps of a hybrid cost no barrier: their calls run beside those of the prompts' blocks.
#[test]
fn slots_that_decode_beside_prompts_add_calls_and_no_barriers() {
    let vulkan = Vulkan::new();
    let checkpoint = open("hybrid-two");
    let [without, with] = [0, 1].map(|mixed_steps| {
        let mut decoder = decoder(&vulkan, Driver::first(), &checkpoint, WHOLE);
        decoder.tuning.mixed_steps = Some(mixed_steps);
        let recording = decoder.record(StepShape::Prefill { rows: CHUNK });
        let barriers = barriers::derive(&recording.ops).into_iter().filter(|needed| *needed).count();
        (recording.ops.len(), barriers)
    });
    let layers = checkpoint.config.layers_of(LayerKind::GatedDelta).count();
    assert_eq!(with, (without.0 + layers, without.1));
}

/// Goal: right and wrong drafts change only the number of steps. Method: drafting blocks of one layer, which draft in
/// every step that draws tokens and have their own keys and values.
#[test]
fn steps_that_verify_drafts_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    for name in ["hybrid-one", "next-moe"] {
        let checkpoint = open(name);
        let mut decoder = decoder(&vulkan, bench.driver, &checkpoint, WHOLE);
        assert!(checkpoint.has_mtp(), "{name} can draft");
        decoder.drafts = 1;
        let recordings = Recordings::new(&decoder);
        let known = expected(name);
        let mut run = Run::new(&format!("{name} with drafts"), &bench, &decoder, &recordings, true);
        let tokens = run.verify(&recordings, &known.prompt, &known.greedy);
        assert_eq!(tokens, known.greedy[..tokens.len()], "{name}");
    }
}

/// Goal: steps that verify drafts without barriers mean the same, whose rows read each other's keys and values in attention.
/// Method: right and wrong drafts of trained models, in caches of f16 and of codes, looked up or of the model's own block.
#[test]
fn steps_that_verify_drafts_without_barriers_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let (_folder, checkpoints) = on_fragments();
    for (name, way) in [("demo", TAGGED), ("demo", CODED), ("demo-hybrid", TAGGED)] {
        let (_, checkpoint) = checkpoints.iter().find(|(of, _)| *of == name).expect("it is among them");
        let mut decoder = emulated(&vulkan, bench.driver, checkpoint, way);
        decoder.drafts = 1;
        let recordings = Recordings::new(&decoder);
        for step in &recordings.verify {
            let barriers =
                |recording: &Recording| barriers::derive(&recording.ops).iter().filter(|before| **before).count();
            let (without, with) = (barriers(step), barriers(&step.with_barriers()));
            assert!(without * 2 < with, "{}: {without} barriers instead of {with}", step.name);
        }
        let known = expected(name);
        let mut run = Run::new(&format!("{name} with drafts {way:?}"), &bench, &decoder, &recordings, true);
        run.near = way.near;
        let tokens = run.verify(&recordings, &known.prompt, &known.greedy);
        assert_eq!(tokens, known.greedy[..tokens.len()], "{name} {way:?}");
        assert_eq!(run.words("state")[decoder.state.fault_word() as usize], 0, "{name} {way:?}: the fault word");
    }
}

/// Goal: the passes of a draft model without barriers draft what it would draw. Method: a trained model drafts for itself, so that
/// every draft is right. Plain Rust is not compared: it computes tokens that it has computed in a prompt to the same bits.
#[test]
fn passes_of_a_draft_model_without_barriers_draft_what_it_would_draw() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let (_folder, checkpoints) = on_fragments();
    let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == "demo").expect("it is among them");
    let own = emulated(&vulkan, bench.driver, checkpoint, TAGGED);
    let decoder = with_draft_model(own.clone(), own, 2);
    let recordings = Recordings::new(&decoder);
    let known = expected("demo");
    let mut run = Run::new("demo with itself, tagged", &bench, &decoder, &recordings, false);
    let (tokens, accepted) = run.verify_own(&recordings, &known.prompt);
    assert_eq!(tokens, known.greedy[..tokens.len()]);
    assert_eq!(accepted, 16, "every draft is right");
    assert_eq!(run.words("state")[decoder.state.fault_word() as usize], 0, "the fault word");
}

/// Goal: a draft model computes the tokens of all steps at their positions. Method: a model drafts for itself, so that all
/// of its drafts are right unless it misses a token; its pages start as NaN.
#[test]
fn steps_of_a_draft_model_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    for name in ["qwen3-gqa7", "llama-bias"] {
        let checkpoint = open(name);
        let own = decoder(&vulkan, bench.driver, &checkpoint, WHOLE);
        let decoder = with_draft_model(own.clone(), own, 1);
        let recordings = Recordings::new(&decoder);
        let known = expected(name);
        let mut run = Run::new(&format!("{name} with itself"), &bench, &decoder, &recordings, true);
        let (tokens, accepted) = run.verify_own(&recordings, &known.prompt);
        assert_eq!(tokens, known.greedy[..tokens.len()], "{name}");
        assert_eq!(accepted, 8, "{name}: every draft is right");
    }
}

/// Goal: a draft head drafts the tokens that PyTorch's does, behind a prompt in chunks and behind steps that accept none, some
/// or all of its drafts. Method: the drafts that each step leaves in the sequence's slot; pages start as NaN. The small one is
/// also compared with plain Rust, buffer by buffer.
#[test]
fn a_draft_head_drafts_what_pytorchs_does() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    for (name, interpreted) in [("options", true), ("demo", false)] {
        let (folder, cases) = drafted(name);
        let model = Checkpoint::open(&folder).expect("the model");
        let head = Checkpoint::open_draft(&fixture(&format!("eagle/{name}"))).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut own = decoder(&vulkan, bench.driver, &model, WHOLE);
        own.state.cells = true;
        let drafting = Decoder { config: &head.config, weights: head.weights(), ..own.clone() };
        let kind = DrafterKind::Head { token_ids: &head.draft_tokens };
        let drafter = Some(Drafter { kind, decoder: Box::new(drafting), sequences: 2 });
        let decoder = Decoder { drafts: 3, drafter, ..own };
        let recordings = Recordings::new(&decoder);
        let mut accepted = [0; 4];
        for (number, case) in cases.iter().enumerate() {
            let what = format!("{name}, prompt {number}");
            let mut run = Run::new(&what, &bench, &decoder, &recordings, interpreted && number == 0);
            let (first, mut step) = run.prompt(&recordings, &case.prompt);
            let mut tokens = vec![first];
            loop {
                assert_eq!(tokens, case.greedy[..tokens.len()], "{what}");
                let at = decoder.state.slot_word(SLOT, state::SLOT_DRAFTS) as usize;
                let drafts = &run.words("state")[at..at + 3];
                assert_eq!(drafts, &case.drafts[tokens.len() - 1][..], "{what}, behind {} tokens", tokens.len());
                if tokens.len() + 4 > case.greedy.len() {
                    break;
                }
                // The row is in different positions of different buckets, alone or beside another sequence, while that has room
                // in its page, or an idle slot.
                let beside = if tokens.len() < 6 { BESIDE } else { 1 };
                let (batch, recording, row): (Vec<u32>, _, u32) = match tokens.len() % 2 {
                    0 => (vec![SLOT], &recordings.verify[0], 0),
                    _ => (vec![beside, SLOT], &recordings.verify[1], 4),
                };
                run.patch(run.layout.batch_word(0), &batch);
                run.step(&[recording]);
                let drawn: Vec<u32> = (row..row + 4).map_while(|row| run.token(step, row)).collect();
                accepted[drawn.len() - 1] += 1;
                tokens.extend(drawn);
                step += 1;
            }
        }
        println!("{name}: {accepted:?} steps accepted none to three drafts");
        assert!(name != "demo" || accepted.iter().all(|steps| *steps > 0), "{accepted:?}");
    }
}

/// Options of a run on weights in fragment order without matrix units.
#[derive(Clone, Copy, Debug)]
struct Emulated {
    chunk: u32,
    tags: bool,
    kv_format: KvFormat,
    near: f32,
}

/// Returns checkpoints for weights in fragment order. The widths of most are multiples of 32, so that their activations
/// can carry tags; those of two are not. They cover attention and dense MLPs, gated delta nets, experts, both, short
/// convolutions with biases, norms behind mixers and MLPs with windows, and these with heads of two sizes and experts beside dense MLPs. The folder holds the files
/// of the checkpoints that are generated here, because their weights are read again.
fn on_fragments() -> (tempfile::TempDir, [(&'static str, Checkpoint); 11]) {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, seed: u64, config: &str| {
        let path = folder.path().join(name);
        synth::write(config, &path, &SynthOptions { seed, ..SynthOptions::default() }, &mut |_, _| {})
            .expect("written");
        Checkpoint::open(&path).expect("what was written")
    };
    let written = |name: &str, seed: u64, hybrid: bool| {
        let mut config = synth::preset(name).expect("a preset");
        if hybrid {
            // Tags need two layers of each kind (every fourth layer has attention) and enough heads that the width of
            // the gated delta net's projection, which has two rows per head for the gates, is a multiple of 32.
            let mut json: serde_json::Value = serde_json::from_str(&synth::with_layers(&config, 8)).expect("JSON");
            for (key, value) in
                [("num_key_heads", 8), ("num_value_heads", 16), ("key_head_dim", 16), ("value_head_dim", 16)]
            {
                json["text_config"][format!("linear_{key}")] = value.into();
            }
            config = json.to_string();
        }
        write(name, seed, &config)
    };
    // Layers with a window and layers without take turns.
    let gemma = serde_json::json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 128, "head_dim": 64,
        "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000, "rope_theta": 1_000_000, "sliding_window": 20, "sliding_window_pattern": 2,
        "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16", "bos_token_id": 2, "eos_token_id": 1,
    });
    let file = "tests/fixtures/families/gemma4-moe/config.json";
    let file = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect("a configuration");
    let mut gemma4: serde_json::Value = serde_json::from_str(&file).expect("JSON");
    let sizes = [
        ("hidden_size", 128),
        ("intermediate_size", 96),
        ("num_hidden_layers", 4),
        ("head_dim", 32),
        ("global_head_dim", 64),
        ("moe_intermediate_size", 32),
    ];
    for (key, value) in sizes {
        gemma4["text_config"][key] = value.into();
    }
    gemma4["text_config"]["layer_types"] = ["sliding_attention", "full_attention"].repeat(2).into();
    // Experts whose output is multiplied before it is added.
    let granite = serde_json::json!({
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 128,
        "intermediate_size": 64, "shared_intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "layer_types": ["attention", "attention", "attention"],
        "position_embedding_type": "rope", "residual_multiplier": 0.5, "embedding_multiplier": 2.0,
        "attention_multiplier": 0.15, "logits_scaling": 2.0, "torch_dtype": "bfloat16", "bos_token_id": 2,
        "eos_token_id": 1,
    });
    let lfm2 = serde_json::json!({
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 128, "intermediate_size": 96,
        "block_auto_adjust_ff_dim": false, "num_attention_heads": 4, "num_hidden_layers": 5, "num_key_value_heads": 2,
        "vocab_size": 512, "max_position_embeddings": 512, "norm_eps": 1e-6, "conv_L_cache": 3, "conv_bias": true,
        "full_attn_idxs": [1, 3], "torch_dtype": "bfloat16", "bos_token_id": 2, "eos_token_id": 1,
    });
    // State spaces, whose output has a norm, and a dense MLP; the rows of the input projection are no multiple of 32.
    let mut mamba = granite.clone();
    for (key, value) in [("mamba_expand", 4), ("mamba_n_heads", 16), ("mamba_d_head", 32), ("mamba_d_state", 32)] {
        mamba[key] = value.into();
    }
    (mamba["num_local_experts"], mamba["num_experts_per_tok"], mamba["num_hidden_layers"]) =
        (0.into(), 0.into(), 4.into());
    mamba["layer_types"] = ["mamba", "attention"].repeat(2).into();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    let checkpoints = [
        ("demo", Checkpoint::open(&demo.join("model")).expect("the demo model")),
        ("tiny-llama", written("tiny-llama", 0, false)),
        ("demo-hybrid", Checkpoint::open(&demo.join("hybrid")).expect("the hybrid demo model")),
        ("tiny-qwen3-moe", written("tiny-qwen3-moe", 0, false)),
        // The seed is chosen so that no near tie decides which experts are chosen. Where the last chosen expert and the
        // next one nearly tie, a different order of summation chooses differently: of the seeds 0 to 6 this happens
        // with 1 (logits of 3.6 that differ by 3e-4, while decoding), and with 0 and 4 at chunk 32.
        ("tiny-qwen3.5-moe", written("tiny-qwen3.5-moe", 2, true)),
        ("tiny-gemma3", write("tiny-gemma3", 0, &gemma.to_string())),
        // As above, of the seeds 0 to 6: the largest difference is 0.5 to 0.9 times the allowed one with 1, 3, 4 and 5.
        ("tiny-gemma4", write("tiny-gemma4", 3, &gemma4.to_string())),
        ("tiny-granite", write("tiny-granite", 0, &granite.to_string())),
        ("tiny-lfm2", write("tiny-lfm2", 0, &lfm2.to_string())),
        ("tiny-mamba", write("tiny-mamba", 0, &mamba.to_string())),
        ("qwen3-deep", open("qwen3-deep")),
    ];
    (folder, checkpoints)
}

/// Returns a decoder that verifies so many drafts of a draft model.
fn with_draft_model<'a>(own: Decoder<'a>, drafting: Decoder<'a>, drafts: u32) -> Decoder<'a> {
    let drafter = Drafter { kind: DrafterKind::Model, decoder: Box::new(drafting), sequences: 2 };
    Decoder { drafts, drafter: Some(drafter), ..own }
}

fn emulated<'a>(vulkan: &Vulkan, driver: Driver, checkpoint: &'a Checkpoint, way: Emulated) -> Decoder<'a> {
    let mut decoder = decoder(vulkan, driver, checkpoint, WHOLE);
    decoder.state.chunk = way.chunk;
    decoder.kv_format = way.kv_format;
    decoder.tuning.fragments = Some(Matrices::Emulated);
    decoder.tuning.tags = way.tags;
    // Workgroups of 512 invocations, as a GPU would have, take a CPU driver long to compile.
    decoder.tuning.flash_threads = 64;
    decoder
}

/// Tolerances: `skinny` truncates activations to 2^-15 of themselves, which grows from layer to layer as sums do. f16
/// keys and values that are rounded to the other neighbor change by 2^-10. Chunks of more than 16 rows round
/// activations to bfloat16, which changes a value by 2^-8 if it is rounded the other way. Values are about 1, up to
/// some ten; a wrong index changes them by as much.
fn run_emulated(driver: Driver, ways: &[Emulated], names: &[&str]) {
    let names: Vec<(&str, &[Emulated])> = names.iter().map(|name| (*name, ways)).collect();
    run_emulated_ways(driver, &names);
}

fn run_emulated_ways(driver: Driver, names: &[(&str, &[Emulated])]) {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, driver);
    let (_folder, checkpoints) = on_fragments();
    for (wanted, ways) in names {
        let (name, checkpoint) = checkpoints.iter().find(|(name, _)| name == wanted).expect("it is among them");
        for way in *ways {
            run_emulated_decoder(&bench, name, &emulated(&vulkan, driver, checkpoint, *way), *way);
        }
    }
}

fn run_emulated_decoder(bench: &Bench, name: &str, decoder: &Decoder<'_>, way: Emulated) {
    let recordings = Recordings::new(decoder);
    let (prompt, greedy) = match name {
        name if name.starts_with("tiny-") => ((3..40).collect(), None),
        _ => {
            let known = expected(name);
            (known.prompt, Some(known.greedy))
        }
    };
    let mut run = Run::new(&format!("{name} {way:?}"), bench, decoder, &recordings, true);
    // Layers of random weights amplify differences more than trained ones do, and so do the norms of what gated delta nets
    // read from a state that has processed few tokens.
    run.near = way.near * if name == "qwen3-deep" || decoder.config.delta.is_some() { 4.0 } else { 1.0 };
    let tokens = run.generate(&recordings, &prompt);
    // With rounded prompts the greedy tokens may differ from those of the unrounded model.
    if let Some(greedy) = greedy.filter(|_| way.chunk <= 16) {
        assert_eq!(tokens, greedy[..tokens.len()], "{name} {way:?} on {:?}", bench.driver);
    }
    let state = run.words("state");
    assert_eq!(state[decoder.state.fault_word() as usize], 0, "{name} {way:?}: the fault word");
}

const ON_FRAGMENTS: Emulated = Emulated { chunk: 16, tags: false, kv_format: KvFormat::F32, near: 1e-3 };
const TAGGED: Emulated = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 1e-2 };
const ROUNDED: Emulated = Emulated { chunk: 32, tags: true, kv_format: KvFormat::F16, near: 8e-2 };
/// A key that lies between two codes may become the other one: a change of up to 2^-8 of its largest value.
const CODED: Emulated = Emulated { chunk: 16, tags: true, kv_format: KvFormat::Int8, near: 5e-2 };

/// All ways, or these ones of them, where other models run in the others.
fn ways<'a>(all: &'a [Emulated], some: &'a [Emulated]) -> &'a [Emulated] {
    if every_case() { all } else { some }
}

const ALL: [Emulated; 4] = [ON_FRAGMENTS, TAGGED, ROUNDED, CODED];

#[test]
fn recordings_of_the_demo_model_on_fragments_mean_the_same_on_lavapipe_and_in_plain_rust() {
    run_emulated(Driver::first(), ways(&ALL, &[TAGGED, ROUNDED]), &["demo"]);
}

#[test]
fn recordings_of_random_weights_on_fragments_mean_the_same_on_lavapipe_and_in_plain_rust() {
    run_emulated(Driver::first(), ways(&ALL, &[ON_FRAGMENTS, CODED]), &["tiny-llama"]);
}

#[test]
fn recordings_with_norms_behind_mixers_and_mlps_mean_the_same_on_lavapipe_and_in_plain_rust() {
    run_emulated(Driver::first(), &[TAGGED], &["tiny-gemma3"]);
    // The scores of Gemma 4's queries and keys are not scaled, and its router's logits are large, so that rounded rows and
    // keys choose others.
    let exact = Emulated { chunk: 8, kv_format: KvFormat::F32, near: 1e-2, ..TAGGED };
    run_emulated(
        Driver::first(),
        ways(&[exact, Emulated { chunk: 8, near: 8e-2, ..TAGGED }], &[exact]),
        &["tiny-gemma4", "tiny-granite"],
    );
}

#[test]
fn recordings_of_short_convolutions_mean_the_same_on_lavapipe_and_in_plain_rust() {
    run_emulated(Driver::first(), ways(&ALL, &[ON_FRAGMENTS, TAGGED, ROUNDED]), &["tiny-lfm2"]);
}

#[test]
fn recordings_of_state_spaces_on_fragments_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let (_folder, checkpoints) = on_fragments();
    let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == "tiny-mamba").expect("it is among them");
    let decoder = emulated(&Vulkan::new(), Driver::first(), checkpoint, TAGGED);
    let carries = decoder
        .record(StepShape::Decode { rows: 1 })
        .ops
        .iter()
        .any(|op| matches!(op, Op::Call(call) if call.args.iter().any(|arg| matches!(arg, Arg::Carried(..)))));
    assert!(carries, "its decode steps have no tagged words");
    run_emulated(Driver::first(), ways(&[ON_FRAGMENTS, TAGGED, ROUNDED], &[TAGGED, ROUNDED]), &["tiny-mamba"]);
}

/// The widths of the first model do not allow tags, and the rows of the second one's input projection are no multiple of 32.
#[test]
fn recordings_of_other_widths_on_fragments_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let both = [ON_FRAGMENTS, ROUNDED];
    let names = [("qwen3-deep", ways(&both, &both[..1])), ("demo-hybrid", ways(&both, &both[1..]))];
    run_emulated_ways(Driver::first(), &names);
}

/// With more than eight rows, the rows are sorted by expert and activations are rounded.
#[test]
fn recordings_of_experts_on_fragments_mean_the_same_on_lavapipe_and_in_plain_rust() {
    run_emulated(Driver::first(), &[Emulated { chunk: 8, ..TAGGED }, ROUNDED], &["tiny-qwen3.5-moe"]);
}

/// A checkpoint, the way in which it runs, which of its matrices are in f16, and the least rows that are packed in f16.
type InF16<'a> = (&'a str, Emulated, fn(&WeightSpec) -> bool, u32);

/// Goal: a model in f16 computes in fragments what it computes in bfloat16 where its numbers are exact in both, also beside
/// matrices of bfloat16. Method: the formats of checkpoints' matrices are changed.
#[test]
fn recordings_in_f16_on_fragments_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let (_folder, checkpoints) = on_fragments();
    let all = |_: &WeightSpec| true;
    let some = |w: &WeightSpec| w.name.contains("qkv") || w.name.contains("down");
    let narrow = Emulated { chunk: 8, ..TAGGED };
    let list: [InF16<'_>; 7] = [
        ("demo", TAGGED, all, 128),
        ("demo", ROUNDED, all, 128),
        ("demo", ROUNDED, all, 32),
        ("demo", ROUNDED, some, 32),
        ("tiny-qwen3.5-moe", narrow, all, 128),
        ("tiny-qwen3.5-moe", ROUNDED, all, 128),
        ("tiny-qwen3.5-moe", ROUNDED, all, 32),
    ];
    for (wanted, way, which, half_rows) in list {
        let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == wanted).expect("it is among them");
        let change = |w: &WeightSpec| match matches!(w.kind, WeightKind::Matrix) && which(w) {
            true => WeightSpec { format: Format::F16, ..w.clone() },
            false => w.clone(),
        };
        let weights: Vec<WeightSpec> = checkpoint.weights().iter().map(change).collect();
        let mut decoder = Decoder { weights: &weights, ..emulated(&vulkan, bench.driver, checkpoint, way) };
        decoder.tuning.half_rows = Some(half_rows);
        let has = |shape: StepShape, kernel: &str| {
            let step = decoder.record(shape);
            step.ops.iter().any(|op| matches!(op, Op::Call(call) if call.kernel == kernel))
        };
        assert!(has(StepShape::Decode { rows: 1 }, "skinny.f16.plain"), "{wanted}");
        if way.chunk == 32 {
            let kernel = if half_rows == 32 { "tiled.f16.plain" } else { "panel.f16.plain" };
            assert!(has(StepShape::Prefill { rows: 32 }, kernel), "{wanted}: {kernel}");
        }
        run_emulated_decoder(&bench, wanted, &decoder, way);
    }
}

/// Goal: matrices of f32 beside others of 16 bits, such as routers in GGUF files, do not keep a model from fragments, and
/// models of f32 alone are not rounded; f16 stays f16. Method: the formats of a checkpoint's matrices are changed, and the
/// packings of all are looked at.
#[test]
fn matrices_of_16_bits_are_in_fragments_and_f32_beside_them() {
    let vulkan = Vulkan::new();
    let (_folder, checkpoints) = on_fragments();
    let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == "tiny-qwen3-moe").expect("a model with experts");
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let layouts = |change: &dyn Fn(&WeightSpec) -> Format| {
        let change = |w: &WeightSpec| WeightSpec { format: change(w), ..w.clone() };
        let weights: Vec<WeightSpec> = checkpoint.weights().iter().map(change).collect();
        let decoder = Decoder { weights: &weights, ..emulated(&vulkan, Driver::first(), checkpoint, way) };
        let matrices = weights.iter().filter(|w| matches!(w.kind, WeightKind::Matrix));
        matrices.map(|w| (w.name.clone(), decoder.packing(w))).collect::<Vec<_>>()
    };
    let router = |w: &WeightSpec| w.name.ends_with(".router");
    let matrix = |w: &WeightSpec| matches!(w.kind, WeightKind::Matrix);
    for (of_routers, of_others, packed) in [
        (Format::F32, Format::Bf16, [Format::Bf16, Format::Bf16]),
        (Format::F32, Format::F16, [Format::F16, Format::F16]),
        (Format::F16, Format::Bf16, [Format::F16, Format::Bf16]),
    ] {
        let format = |w: &WeightSpec| match matrix(w) {
            true => {
                if router(w) {
                    of_routers
                } else {
                    of_others
                }
            }
            false => w.format,
        };
        for (name, packing) in layouts(&format) {
            let wanted = packed[usize::from(!name.ends_with(".router"))];
            assert_eq!((packing.layout, packing.format), (Layout::Fragments, wanted), "{name}");
        }
    }
    for (name, packing) in layouts(&|w| if matrix(w) { Format::F32 } else { w.format }) {
        assert!(packing.format == Format::F32 && packing.layout != Layout::Fragments, "{name}: {packing:?}");
    }
}

/// Goal: experts that are divided among several buffers compute in fragments what whole ones do, also with tags: steps of a few
/// rows, and chunks that are sorted by expert, with a shared expert.
#[test]
fn recordings_of_experts_in_several_buffers_on_fragments_mean_the_same_on_lavapipe_and_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let (_folder, checkpoints) = on_fragments();
    for (wanted, way) in [("tiny-qwen3-moe", Emulated { chunk: 8, ..TAGGED }), ("tiny-qwen3.5-moe", ROUNDED)] {
        let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == wanted).expect("it is among them");
        let mut decoder = emulated(&vulkan, bench.driver, checkpoint, way);
        decoder.max_buffer_bytes = dividing(&decoder);
        run_emulated_decoder(&bench, wanted, &decoder, way);
    }
}

/// Goal: a prompt step whose products are `wgmma` means the same as one whose products are others. Method: both
/// recordings in the interpreter, from the same memory; both round the same activations, so that only sums of rounded
/// values differ.
#[test]
fn a_prompt_step_with_wgmma_means_the_same_in_plain_rust() {
    let vulkan = Vulkan::new();
    let (_folder, checkpoints) = on_fragments();
    let used = |name: &str| ["demo", "demo-hybrid"].contains(&name);
    let formats = [Format::Bf16, Format::F16];
    for ((name, checkpoint), format) in
        checkpoints.iter().filter(|(name, _)| used(name)).flat_map(|of| formats.map(|format| (of, format)))
    {
        let way = Emulated { chunk: 32, tags: false, kv_format: KvFormat::F16, near: 0.0 };
        let of_matrix = |w: &WeightSpec| if matches!(w.kind, WeightKind::Matrix) { format } else { w.format };
        let change = |w: &WeightSpec| WeightSpec { format: of_matrix(w), ..w.clone() };
        let weights: Vec<WeightSpec> = checkpoint.weights().iter().map(change).collect();
        let mut decoder = Decoder { weights: &weights, ..emulated(&vulkan, Driver::first(), checkpoint, way) };
        decoder.tuning.half_rows = Some(32);
        let shape = StepShape::Prefill { rows: 32 };
        let plain = decoder.record(shape);
        (decoder.tuning.ptx, decoder.tuning.wgmma_rows) = (true, 32);
        let ptx = decoder.record(shape);
        let [plain_x, ptx_x] = prompt_step(&decoder, [&plain, &ptx], 27);
        let stride = stride(checkpoint.config.hidden) as usize;
        for (at, (a, b)) in plain_x.iter().zip(&ptx_x).enumerate().take(27 * stride) {
            assert!((a - b).abs() <= 1e-3 * (1.0 + a.abs()), "{name} in {format:?}, {at}: {b} instead of {a}");
        }
        let others: Vec<&str> =
            layer_products(&ptx).filter(|call| call.kernel != "wgmma").map(|call| call.label.as_str()).collect();
        assert!(others.is_empty(), "{name}: {others:?}");
        assert!(layer_products(&plain).all(|call| call.kernel != "wgmma"), "{name}");
    }
}

/// Goal: a decode step whose norms are folded into `wgmma` means the same as one with stages for them. Method: both recordings
/// in the interpreter, behind the same prompt.
#[test]
fn a_decode_step_with_norms_folded_into_wgmma_means_the_same_in_plain_rust() {
    let vulkan = Vulkan::new();
    let (_folder, checkpoints) = on_fragments();
    for (name, checkpoint) in checkpoints.iter().filter(|(name, _)| ["demo", "demo-hybrid"].contains(name)) {
        let way = Emulated { chunk: 32, tags: false, kv_format: KvFormat::F16, near: 0.0 };
        let mut decoder = emulated(&vulkan, Driver::first(), checkpoint, way);
        decoder.state.rows = 32;
        (decoder.tuning.ptx, decoder.tuning.wgmma_rows, decoder.tuning.fold_rows) = (true, 32, 0);
        let prompt = [StepShape::Prefill { rows: 32 }, StepShape::Head { rows: 1 }].map(|shape| decoder.record(shape));
        let folded = decoder.record(StepShape::Decode { rows: 32 });
        decoder.tuning.wgmma_folds = false;
        let plain = decoder.record(StepShape::Decode { rows: 32 });
        let packs = |recording: &Recording| {
            recording
                .ops
                .iter()
                .filter(|op| matches!(op, Op::Call(call) if call.kernel.starts_with("pack_rows")))
                .count()
        };
        assert_eq!(packs(&folded) + 2 * checkpoint.config.layers as usize - 1, packs(&plain), "{name}");
        let recordings = [&prompt[0], &prompt[1], &folded, &plain];
        let mut memory = initial(&decoder, &recordings);
        write_prompt(&decoder, &mut memory, 27);
        let state = memory.get_mut("state").expect("the state");
        let slot = SlotInit { remaining: 64, ..SlotInit::default() }.words();
        let at = decoder.state.slot_word(SLOT, 0) as usize;
        state[at..at + slot.len()].copy_from_slice(&slot);
        for recording in &prompt {
            let mut own = gather(&memory, recording);
            interpreter::run(recording, &mut own);
            scatter(&mut memory, recording, &own);
        }
        let state = memory.get_mut("state").expect("the state");
        let batch = decoder.state.batch_word(0) as usize;
        state[batch..batch + 32].fill(u32::MAX);
        state[batch + 9] = SLOT;
        let [folded_x, plain_x] = [&folded, &plain].map(|recording| left_in_x(&memory, recording));
        let stride = stride(checkpoint.config.hidden) as usize;
        let row = 9 * stride..9 * stride + checkpoint.config.hidden as usize;
        // Rows are rounded before the norm's factor in one, and behind it in the other.
        let (mut errors, mut squares) = (0.0, 0.0);
        for (a, b) in plain_x[row.clone()].iter().zip(&folded_x[row]) {
            errors += f64::from(a - b).powi(2);
            squares += f64::from(*a).powi(2);
        }
        let error = (errors / squares).sqrt();
        println!("{name}: {error:.5} of the row's length");
        assert!(squares > 1.0 && error < 0.02, "{name}: {error} of the row's length");
    }
}

/// Returns the products of a recording's layers.
fn layer_products(recording: &Recording) -> impl Iterator<Item = &Call> {
    let calls = recording.ops.iter().filter_map(|op| if let Op::Call(call) = op { Some(call) } else { None });
    calls.filter(|call| {
        ["qkv", "in_proj", "o", "gate_up", "down"].iter().any(|part| call.label.ends_with(&format!(".{part}")))
    })
}

/// Runs both recordings of a prompt step in the interpreter, from the same memory, with a prompt of `count` tokens. Returns
/// the rows that each leaves in the residual stream.
fn prompt_step(decoder: &Decoder<'_>, recordings: [&Recording; 2], count: u32) -> [Vec<f32>; 2] {
    let mut memory = initial(decoder, &recordings);
    write_prompt(decoder, &mut memory, count);
    recordings.map(|recording| left_in_x(&memory, recording))
}

/// Runs a recording in the interpreter and returns what it leaves in the residual stream.
fn left_in_x(memory: &Memory, recording: &Recording) -> Vec<f32> {
    let mut memory = gather(memory, recording);
    interpreter::run(recording, &mut memory);
    let x = recording.buffers.iter().position(|buffer| buffer.name == "x").expect("x");
    memory.buffers[x].iter().map(|word| f32::from_bits(*word)).collect()
}

/// Describes a prompt of `count` tokens of one sequence in the state.
fn write_prompt(decoder: &Decoder<'_>, memory: &mut Memory, count: u32) {
    let tokens: Vec<u32> = (3..3 + count).collect();
    let prompt = PromptRows { slot: SLOT, start: 0, tokens: &tokens, last: true, next: None, from: None, keeps: &[] };
    let layout = decoder.state;
    let words = memory.get_mut("state").expect("the state");
    for (word, values) in layout.chunk_layout().describe(&[prompt]) {
        let at = layout.chunk_word(word) as usize;
        words[at..at + values.len()].copy_from_slice(&values);
    }
    for index in 0..2 {
        words[layout.page_word(SLOT, index) as usize] = index + 1;
    }
}

/// Goal: with `fp8_activations`, the products of weights in FP8 take rows in e4m3, and the step means nearly the same.
/// Method: both recordings in the interpreter; the residual stream may differ by a fifth of its length. A wrong order
/// of columns or a wrong scale makes it another one.
#[test]
fn a_prompt_step_with_rows_in_e4m3_means_nearly_the_same_in_plain_rust() {
    let vulkan = Vulkan::new();
    let folder = tempfile::tempdir().expect("a folder");
    for (preset, kind) in [
        ("tiny-llama", StoredType::Fp8),
        ("tiny-llama", StoredType::Fp8Block),
        ("tiny-qwen3-moe", StoredType::Fp8Channel),
    ] {
        let mut config: serde_json::Value =
            serde_json::from_str(&synth::preset(preset).expect("a preset")).expect("JSON");
        for (key, value) in [
            ("hidden_size", 256),
            ("intermediate_size", 384),
            ("moe_intermediate_size", 128),
            ("num_attention_heads", 4),
            ("num_key_value_heads", 2),
            ("head_dim", 64),
        ] {
            if config.get(key).is_some() || key == "head_dim" {
                config[key] = value.into();
            }
        }
        let [numbers, path] = ["numbers", "fp8"].map(|name| folder.path().join(format!("{preset}-{kind:?}-{name}")));
        synth::write(&config.to_string(), &numbers, &SynthOptions::default(), &mut |_, _| {}).expect("written");
        synth::quantise(&numbers, None, &path, kind, 1 << 30, 2, &|_, _| {}).expect("quantised");
        let checkpoint = Checkpoint::open(&path).expect("what was written");
        let way = Emulated { chunk: 64, tags: false, kv_format: KvFormat::F16, near: 0.0 };
        let mut decoder = emulated(&vulkan, Driver::first(), &checkpoint, way);
        (decoder.tuning.ptx, decoder.tuning.wgmma_each, decoder.tuning.processors) = (true, 1, 2);
        let shape = StepShape::Prefill { rows: 64 };
        let plain = decoder.record(shape);
        (decoder.tuning.fp8_activations, decoder.tuning.e4m3_rows) = (true, 64);
        let e4m3 = decoder.record(shape);
        let [wanted, found] = prompt_step(&decoder, [&plain, &e4m3], 40);
        let used = 40 * stride(checkpoint.config.hidden) as usize;
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let differs = square(&mut wanted.iter().zip(&found).take(used).map(|(a, b)| a - b));
        let error = (differs / square(&mut wanted.iter().take(used).copied())).sqrt();
        assert!((1e-3..0.2).contains(&error), "{preset} {kind:?}: an error of {error}");
        let others: Vec<&str> =
            layer_products(&e4m3).filter(|call| !wgmma::is_e4m3(call)).map(|call| call.label.as_str()).collect();
        assert!(others.is_empty(), "{preset} {kind:?}: {others:?}");
        assert!(!layer_products(&plain).any(wgmma::is_e4m3), "{preset} {kind:?}");
        // Attention packs rows in bfloat16 itself, and leaves those in e4m3 to `pack_rows`.
        let texts = [&plain, &e4m3].map(Recording::to_string);
        assert!(texts.iter().all(|text| text.contains("flash_wgmma")), "{preset} {kind:?}");
        assert_eq!(texts.map(|text| text.contains(".o_pack")), [false, true], "{preset} {kind:?}");
    }
}

/// Goal: the calls of a weight's parts share the processors if they run side by side. Method: queries and keys of ten blocks of
/// rows beside values of two, on six processors; with three bits another kernel serves the first part, and parts with orders
/// run one after the other.
#[test]
fn parts_of_codes_share_the_processors() {
    let vulkan = Vulkan::new();
    let (_folder, checkpoints) = on_fragments();
    let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == "tiny-llama").expect("it is among them");
    let affine = |bits, group, minimum| Format::Codes(Codes { bits, group, number: Number::Affine, minimum });
    let four = affine(4, 32, Minimum::Stored);
    let three = affine(3, 32, Minimum::Stored);
    let six = affine(6, 16, Minimum::Zero { halves: 64 });
    for (format, ordered, wanted) in [
        (four, false, [("skinny_codes.ptx", 5), ("skinny_codes.ptx", 1)]),
        (three, false, [("skinny_codes", 10), ("skinny_codes.ptx", 2)]),
        (four, true, [("skinny_codes.ptx", 5), ("skinny_codes.ptx", 2)]),
    ] {
        let parts = |w: &WeightSpec| {
            if w.merged != "layers.0.qkv" {
                return vec![w.clone()];
            }
            let order = ordered.then(|| (0..w.cols).rev().collect());
            let part = |name: &str, first_row, rows, format| WeightSpec {
                name: format!("layers.0.qkv{name}"),
                first_row,
                rows,
                format,
                order: order.clone(),
                ..w.clone()
            };
            vec![part("", 0, w.rows - 32, format), part(".values", w.rows - 32, 32, six)]
        };
        let weights: Vec<WeightSpec> = checkpoint.weights().iter().flat_map(parts).collect();
        let way = Emulated { chunk: 64, tags: true, kv_format: KvFormat::F16, near: 0.0 };
        let mut decoder = Decoder { weights: &weights, ..emulated(&vulkan, Driver::first(), checkpoint, way) };
        (decoder.tuning.fragments, decoder.tuning.ptx) = (Some(Matrices::Cooperative), true);
        (decoder.tuning.codes_ptx, decoder.tuning.processors) = (true, 6);
        for (bits, rows) in [(4, 160), (6, 32)] {
            let config = CodesPtxConfig { groups: 1, slots: 2, workgroups: 6 };
            decoder.tuning.codes_ptx_shapes.insert((bits, rows, 128), config);
        }
        let recording = decoder.record(StepShape::Decode { rows: 1 });
        let calls = layer_products(&recording).take(2).map(|call| (call.kernel, call.groups[0]));
        assert_eq!(calls.collect::<Vec<_>>(), wanted, "{format:?}, ordered: {ordered}");
    }
}

/// Writes a checkpoint whose tensors, of these names and sizes in bfloat16, are holes in the file.
fn hollow(folder: &Path, config: &serde_json::Value, tensors: &[(String, Vec<u64>)]) -> Checkpoint {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let first = end;
        end += shape.iter().product::<u64>() * 2;
        header.insert(name.clone(), serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [first, end]}));
    }
    let header = serde_json::to_string(&header).expect("JSON");
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    let path = folder.join("model.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).expect("written");
    let file = std::fs::File::options().write(true).open(&path).expect("it was written");
    file.set_len(8 + header.len() as u64 + end).expect("a hole");
    Checkpoint::open(folder).expect("a checkpoint")
}

/// Goal: steps of few rows of a model with codes use `skinny_codes.ptx` for all products, without barriers between the parts of a
/// weight and without sums of parts of columns; with experts, up to as many rows as the kernels of their codes take, also beside an
/// output projection of few columns, which no program multiplies, and if some layer's experts are of numbers. Method: models of
/// 4,096 hidden values, with query and key rows of four bits and value rows of six.
#[test]
fn few_rows_of_codes_use_programs_in_ptx_without_barriers_between_parts() {
    let vulkan = Vulkan::new();
    let folder = tempfile::tempdir().expect("a folder");
    let affine = |bits, group, minimum| Format::Codes(Codes { bits, group, number: Number::Affine, minimum });
    let (four, six) = (affine(4, 32, Minimum::Stored), affine(6, 16, Minimum::Zero { halves: 64 }));
    // Weights with `numbers` in their names stay as they are.
    for (class, model_type, heads, experts, numbers, expert_ptx, most) in [
        ("LlamaForCausalLM", "llama", 32, 0, "router", true, 8),
        ("LlamaForCausalLM", "llama", 4, 0, "router", true, 4),
        ("MixtralForCausalLM", "mixtral", 32, 2, "router", true, 8),
        ("MixtralForCausalLM", "mixtral", 4, 2, "router", true, 8),
        ("MixtralForCausalLM", "mixtral", 32, 2, "layers.1.experts", true, 8),
        ("MixtralForCausalLM", "mixtral", 32, 2, "layers.1.experts.down", true, 4),
        ("MixtralForCausalLM", "mixtral", 32, 2, "router", false, 4),
    ] {
        let case = format!("{class}, {heads} heads, {numbers}");
        let (query_rows, key_rows) = (heads * 128, heads * 128 / 4);
        let config = serde_json::json!({
            "architectures": [class], "model_type": model_type, "hidden_size": 4096, "intermediate_size": 4096,
            "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads / 4, "head_dim": 128,
            "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": false, "num_local_experts": experts, "num_experts_per_tok": 2,
            "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
        });
        let mut tensors =
            vec![("model.embed_tokens".to_owned(), vec![512, 4096]), ("lm_head".to_owned(), vec![512, 4096])];
        tensors.push(("model.norm".to_owned(), vec![4096]));
        for layer in 0..2 {
            let mut add =
                |name: &str, shape: &[u64]| tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            add("input_layernorm", &[4096]);
            add("post_attention_layernorm", &[4096]);
            for (name, rows) in [("q", query_rows), ("k", key_rows), ("v", key_rows)] {
                add(&format!("self_attn.{name}_proj"), &[rows, 4096]);
            }
            add("self_attn.o_proj", &[4096, query_rows]);
            for name in ["gate", "up", "down"].iter().filter(|_| experts == 0) {
                add(&format!("mlp.{name}_proj"), &[4096, 4096]);
            }
            if experts > 0 {
                add("block_sparse_moe.gate", &[experts, 4096]);
            }
            for (expert, name) in (0..experts).flat_map(|expert| ["w1", "w2", "w3"].map(|name| (expert, name))) {
                add(&format!("block_sparse_moe.experts.{expert}.{name}"), &[4096, 4096]);
            }
        }
        tensors.iter_mut().for_each(|(name, _)| name.push_str(".weight"));
        let checkpoint = hollow(&folder.path().join(format!("{model_type}.{heads}")), &config, &tensors);
        let parts = |w: &WeightSpec| {
            if w.kind == WeightKind::Vector || w.name.ends_with("router") || w.name.contains(numbers) {
                return vec![w.clone()];
            }
            let values = if w.merged.ends_with(".qkv") { key_rows as u32 } else { 0 };
            let part = |name: &str, first_row, rows, format| WeightSpec {
                name: format!("{}{name}", w.name),
                first_row,
                rows,
                format,
                ..w.clone()
            };
            let all = [part("", 0, w.rows - values, four), part(".values", w.rows - values, values, six)];
            all.into_iter().filter(|part| part.rows > 0).collect()
        };
        let weights: Vec<WeightSpec> = checkpoint.weights().iter().flat_map(parts).collect();
        let way = Emulated { chunk: 64, tags: true, kv_format: KvFormat::F16, near: 0.0 };
        let mut decoder = Decoder { weights: &weights, ..emulated(&vulkan, Driver::first(), &checkpoint, way) };
        (decoder.tuning.fragments, decoder.tuning.ptx) = (Some(Matrices::Cooperative), true);
        (decoder.tuning.codes_ptx, decoder.tuning.processors) = (true, 132);
        decoder.tuning.expert_ptx = expert_ptx;
        for rows in [1, 2, 4, 8, 16] {
            let recording = decoder.record(StepShape::Decode { rows });
            let calls: Vec<&Call> = layer_products(&recording).filter(|call| call.label.ends_with("qkv")).collect();
            assert_eq!(calls.len(), 4, "{case}, {rows} rows");
            assert_eq!(tags::check(&recording), Ok(()), "{case}, {rows} rows");
            let of_experts = layer_products(&recording).filter(|call| call.label.contains("experts."));
            let by_programs = of_experts.filter(|call| call.kernel == "expert_skinny.codes.ptx").count();
            assert_eq!(by_programs > 0, experts > 0 && expert_ptx && rows <= most, "{case}, {rows} rows");
            let as_ptx = calls.iter().all(|call| call.kernel == "skinny_codes.ptx");
            assert_eq!(as_ptx, rows <= most, "{case}, {rows} rows: {}", calls[0].kernel);
            let behind = recording
                .ops
                .iter()
                .zip(barriers::derive(&recording.ops))
                .filter(|(op, _)| matches!(op, Op::Call(call) if call.label.ends_with("qkv")));
            let needed: Vec<bool> = behind.map(|(_, needed)| needed).collect();
            assert!(!needed[1] && !needed[3], "{case}, {rows} rows: a barrier between parts");
            let sums = recording.buffers.iter().find(|decl| decl.name == "column_sums").map_or(0, |decl| decl.bytes);
            assert!(rows > most || sums == 0, "{case}, {rows} rows: {sums} bytes of sums");
        }
    }
}

#[test]
fn tagged_recordings_mean_the_same_on_swiftshader_and_in_plain_rust() {
    run_emulated(Driver::SwiftShader, &[TAGGED], &["tiny-llama"]);
}

/// Goal: a draft model's calls before a tagged decode step have barriers of their own and leave its tags alone.
#[test]
fn a_tagged_decode_step_behind_a_draft_model_means_the_same_in_plain_rust() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let (_folder, checkpoints) = on_fragments();
    let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == "demo").expect("the demo model");
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 1e-2 };
    let own = emulated(&vulkan, bench.driver, checkpoint, way);
    let mut drafting = own.clone();
    drafting.tuning.tags = false;
    let decoder = with_draft_model(own, drafting, 1);
    let recordings = Recordings::new(&decoder);
    for decode in &recordings.decode {
        let carried =
            |arg: &Arg| matches!(arg, Arg::Carried(range, _) if !decode.decl(range.buffer).name.starts_with(DRAFTER));
        let ops = decode.ops.iter().filter_map(|op| if let Op::Call(call) = op { Some(call) } else { None });
        assert!(ops.flat_map(|call| &call.args).any(carried), "{} is tagged", decode.name);
    }
    let known = expected("demo");
    let mut run = Run::new("demo with itself, tagged", &bench, &decoder, &recordings, true);
    // The sequence beside it has a prompt that means nothing, whose logits are uncertain.
    run.near = 2.0 * way.near;
    let (tokens, accepted) = run.verify_own(&recordings, &known.prompt);
    assert_eq!(tokens, known.greedy[..tokens.len()]);
    assert!(accepted >= 6, "{accepted} of 8 drafts are right");
    assert_eq!(run.words("state")[decoder.state.fault_word() as usize], 0, "the fault word");
}

#[test]
fn a_tagged_decode_step_has_barriers_only_around_its_layers() {
    let vulkan = Vulkan::new();
    let (_folder, checkpoints) = on_fragments();
    for (name, checkpoint) in &checkpoints {
        let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 0.0 };
        let decoder = emulated(&vulkan, Driver::first(), checkpoint, way);
        let carries = *name != "qwen3-deep";
        for rows in [1, 2, 4] {
            let recording = decoder.record(StepShape::Decode { rows });
            let named = recording.buffers.iter().any(|b| b.name.starts_with("tagged."));
            assert_eq!(named, carries, "{name}: tags need widths of whole chunks");
            let count = |recording: &Recording| -> [usize; 2] {
                let needed = barriers::derive(&recording.ops);
                let layered = |label: &str| label.starts_with("layers.");
                let inside = calls(recording).iter().zip(&needed).filter(|(l, n)| layered(l) && **n).count();
                [inside, needed.iter().filter(|n| **n).count() - inside]
            };
            let layers = checkpoint.config.layers as usize;
            let plain = count(&recording.with_barriers());
            assert_eq!(tags::check(&recording), Ok(()), "{name}");
            // Every place at which a call polls can be broken, and the check finds each of them.
            let polls = tags::polls(&recording);
            assert_eq!(polls.is_empty(), !carries, "{name}, {}", recording.name);
            for poll in polls {
                let broken = tags::break_poll(&recording, poll).expect("some tag is never written");
                assert!(tags::check(&broken).is_err(), "{name}, {}: {poll:?} is not broken", recording.name);
            }
            // One barrier per stage: three for a mixer, two for a dense MLP, three for an MLP with a router, and one for
            // each output that is changed before it is added. Experts beside a dense MLP add
            // two.
            let c = &checkpoint.config;
            let routed = c.mlp_kinds.iter().filter(|kind| **kind == MlpKind::Experts).count();
            let changed = if c.has_branch_stages() { 2 * layers } else { 0 };
            let beside = c.experts.is_some_and(|experts| experts.beside_dense);
            let own = if beside { 2 * layers + changed } else { routed + changed };
            assert_eq!(plain[0], 5 * layers + own, "{name}, {}", recording.name);
            let found = count(&recording);
            println!("{name}, {}: {found:?} instead of {plain:?}", recording.name);
            if carries {
                // The product that computes the logits also waits for tagged words; the plan of several rows' attention
                // does not.
                let plans = calls(&recording).iter().filter(|label| **label == "plan").count();
                assert_eq!(found[0] + found[1], plain[1] + plans, "{name}, {}", recording.name);
                assert!(found[0] <= 3, "{name}, {}: {} barriers inside the layers", recording.name, found[0]);
            } else {
                assert_eq!(found, plain);
            }
        }
    }
}

/// A part of a buffer in the simulation: its tag, and the step and operation that wrote it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Word {
    tag: u32,
    by: Option<(u32, usize)>,
}

/// A workgroup of an operation in the simulation: the parts of tagged buffers for which it still waits, each with the
/// expected tag and writer, and the parts that it then writes.
#[derive(Clone, Debug)]
struct Workgroup {
    op: usize,
    waits: Vec<(u32, usize, Word)>,
    writes: Vec<(u32, usize, Word)>,
}

/// Goal: a tagged step reads exactly the intended words and terminates, in whatever order a device that launches
/// workgroups in order executes them. Method: three steps of a recording on a simulated device. Every operation has
/// three workgroups, which take their words one by one at random moments; barriers stand where they are derived.
fn simulate(recording: &Recording, random: &mut Random) -> Result<(), String> {
    const PARTS: usize = 3;
    const MASK: u32 = 127;
    let barriers = barriers::derive(&recording.ops);
    // The exchanges with other devices, with the buffers whose words they send. One may send only when this device has got all
    // words of the one before.
    let exchange = |(op, of): (usize, &Op)| match of {
        Op::Call(call) if call.kernel == "all_reduce" => Some((op, AllReduceArgs::from_args(&call.args).x.buffer.0)),
        _ => None,
    };
    let exchanges: Vec<(usize, u32)> = recording.ops.iter().enumerate().filter_map(exchange).collect();
    let mut memory: HashMap<(u32, usize), Word> = HashMap::new();
    let mut chance = |n: usize| random.below(n as u32) as usize;
    for step in 0..3u32 {
        // The last writer of each part of a buffer in the order of the recording.
        let mut last: HashMap<(u32, usize), Word> = HashMap::new();
        let mut got = vec![0; exchanges.len()];
        let mut queue: Vec<(bool, Workgroup)> = Vec::new();
        for (op, (call, barrier)) in recording.ops.iter().zip(&barriers).enumerate() {
            let Op::Call(call) = call else { panic!("a step has calls alone") };
            let fields = find(call.kernel).fields;
            let tag = |name: &str| fields.iter().position(|f| f.name == name).map(|at| call.args[at].u32() & MASK);
            let constant = |name: &str| find(call.kernel).constants.iter().find(|(_, of)| *of == name);
            let value = |name: &str| constant(name).map_or(0, |(id, _)| call.constants[*id as usize]);
            let (mut reads, mut olds, mut writes) = (Vec::new(), Vec::new(), Vec::new());
            let mut sums_of_columns = None;
            for (arg, field) in call.args.iter().zip(fields) {
                if call.kernel == "clear_tags" {
                    if let Arg::Buffer(range, _) = arg
                        && range.bytes > 0
                    {
                        writes.push((range.buffer.0, 0));
                    }
                    continue;
                }
                let Arg::Carried(range, access) = arg else { continue };
                if range.bytes == 0 {
                    continue;
                }
                let buffer = range.buffer.0;
                match field.name {
                    // The sums of all parts of the columns but the last, which this call writes and reads.
                    "partials" if call.kernel.starts_with("skinny_codes") => {
                        assert_eq!(value("column_parts"), 2, "{}", call.label);
                        sums_of_columns = Some((buffer, tag("y_tag").unwrap()));
                    }
                    "partials" | "counters" => {}
                    "qkv" => reads.push((buffer, tag("qkv_tag").unwrap())),
                    "logits" => reads.push((buffer, tag("logits_tag").unwrap())),
                    "beside" => reads.push((buffer, tag("beside_tag").unwrap())),
                    "x" if access.writes() => writes.push((buffer, tag("x_tag").unwrap())),
                    "x" => reads.push((buffer, tag("x_tag").unwrap())),
                    "o" => writes.push((buffer, tag("o_tag").unwrap())),
                    "y" => {
                        // A residual addition also reads the old value.
                        let adds = ["epilogue", "add"].map(value).contains(&1);
                        if adds || call.kernel == "add_branch" {
                            olds.push((buffer, tag("old_tag").unwrap_or(0)));
                        }
                        writes.push((buffer, tag("y_tag").unwrap()));
                    }
                    other => panic!("{}: {other}", call.kernel),
                }
            }
            let reads_all = ["skinny", "expert_skinny", "add_branch"];
            // Where experts are divided among calls, those of the second stage read the values of their own.
            let sums = value("part_experts") > 0 && value("stage") == 1;
            let whole = !sums && reads_all.iter().any(|kernel| call.kernel.starts_with(kernel));
            // The calls of a weight's parts write one generation together, each a part of it. Only those that add the outputs of
            // divided experts write one each.
            let labels = calls(recording);
            let first = (0..op).rev().take_while(|at| labels[*at] == call.label).last().unwrap_or(op);
            let alike: Vec<usize> = (first..labels.len()).take_while(|at| labels[*at] == call.label).collect();
            let place = op - first;
            let makes = |part: usize| sums || part % alike.len() == place;
            assert!(sums || alike.len() <= PARTS, "{} in {} parts", call.label, alike.len());
            let mut begun = false;
            for own in (0..PARTS).filter(|own| makes(*own)) {
                let word = |buffer: &u32, tag: u32, part: usize| Word {
                    tag,
                    by: last.get(&(*buffer, part)).and_then(|word| word.by),
                };
                let parts = |whole: bool| (0..PARTS).filter(move |part| whole || *part == own);
                if let Some((buffer, tag)) = sums_of_columns {
                    // Workgroups with the first part of the columns read some of the words of x, those with the second the
                    // others and the sums of the first.
                    let sum = (buffer, own, Word { tag, by: Some((step, op)) });
                    let wanted = |(of, tag): &(u32, u32), part: usize| (*of, part, word(of, *tag, part));
                    let first = reads.iter().map(|read| wanted(read, 0)).collect();
                    queue.push((
                        *barrier && !std::mem::replace(&mut begun, true),
                        Workgroup { op, waits: first, writes: vec![sum] },
                    ));
                    let rest = reads.iter().flat_map(|read| (1..PARTS).map(move |part| wanted(read, part)));
                    let old = olds.iter().map(|old| wanted(old, own));
                    let waits = rest.chain(old).chain([sum]).collect();
                    let writes =
                        writes.iter().map(|(of, tag)| (*of, own, Word { tag: *tag, by: Some((step, op)) })).collect();
                    queue.push((false, Workgroup { op, waits, writes }));
                    continue;
                }
                let mut waits: Vec<(u32, usize, Word)> = Vec::new();
                for (buffer, tag) in &reads {
                    waits.extend(parts(whole).map(|part| (*buffer, part, word(buffer, *tag, part))));
                }
                for (buffer, tag) in &olds {
                    waits.push((*buffer, own, word(buffer, *tag, own)));
                }
                let made = |(buffer, tag): &(u32, u32)| (*buffer, own, Word { tag: *tag, by: Some((step, op)) });
                let writes = writes.iter().map(made).collect();
                queue.push((*barrier && !std::mem::replace(&mut begun, true), Workgroup { op, waits, writes }));
            }
            for (buffer, tag) in &writes {
                for part in (0..PARTS).filter(|part| makes(*part)) {
                    last.insert((*buffer, part), Word { tag: *tag, by: Some((step, op)) });
                }
            }
        }
        let room = [2, 7, 40, 1000][chance(4)];
        let mut queue = queue.into_iter().peekable();
        let mut running: Vec<Workgroup> = Vec::new();
        let mut idle = 0;
        while queue.peek().is_some() || !running.is_empty() {
            let launches =
                queue.peek().is_some_and(|(barrier, _)| running.len() < room && (!barrier || running.is_empty()));
            if launches && (running.is_empty() || chance(3) > 0) {
                running.push(queue.next().expect("it was peeked").1);
                idle = 0;
                continue;
            }
            let at = chance(running.len());
            let workgroup = &mut running[at];
            if workgroup.waits.is_empty() {
                for (buffer, part, word) in &workgroup.writes {
                    memory.insert((*buffer, *part), *word);
                }
                if let Some(number) = exchanges.iter().position(|(op, _)| *op == workgroup.op) {
                    got[number] += 1;
                }
                running.swap_remove(at);
                idle = 0;
                continue;
            }
            let next = chance(workgroup.waits.len());
            let (buffer, part, wanted) = workgroup.waits[next];
            let found = memory.get(&(buffer, part)).copied().unwrap_or_default();
            if found.tag == wanted.tag {
                if found.by != wanted.by {
                    let label = calls(recording)[workgroup.op];
                    return Err(format!("step {step}, {label}: took {found:?} for {wanted:?}"));
                }
                let number = exchanges.iter().position(|of| *of == (workgroup.op, buffer)).unwrap_or(0);
                if number > 0 && got[number - 1] < PARTS {
                    let label = calls(recording)[workgroup.op];
                    return Err(format!("step {step}, {label}: begins before the exchange before it has ended"));
                }
                workgroup.waits.swap_remove(next);
                idle = 0;
            } else {
                idle += 1;
                if idle > 100_000 {
                    let waiting: Vec<&str> = running.iter().map(|w| calls(recording)[w.op]).collect();
                    return Err(format!("step {step}: {waiting:?} wait for ever"));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_tagged_step_reads_no_word_of_another_whatever_the_order_of_workgroups() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let mut random = Random(5);
    let folder = tempfile::tempdir().expect("a folder");
    let mut written = Vec::new();
    for layers in [2, 3, 4, 5, 70] {
        let config = synth::with_layers(&synth::preset("tiny-llama").expect("a preset"), layers);
        let path = folder.path().join(layers.to_string());
        synth::write(&config, &path, &SynthOptions::default(), &mut |_, _| {}).expect("written");
        written.push((format!("{layers} layers"), Checkpoint::open(&path).expect("what was written")));
    }
    let (_folder, others) = on_fragments();
    let others = others.into_iter().filter(|(name, _)| name.starts_with("tiny-"));
    written.extend(others.map(|(name, checkpoint)| (name.to_owned(), checkpoint)));
    // For one row, x of this model's second MLP product does not fit in shared memory.
    let wide = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "head_dim": 32,
        "intermediate_size": 16384, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
        "bos_token_id": 2, "eos_token_id": 1,
    });
    let [numbers, codes] = ["numbers", "codes"].map(|name| folder.path().join(name));
    synth::write(&wide.to_string(), &numbers, &SynthOptions::default(), &mut |_, _| {}).expect("written");
    synth::quantise(&numbers, None, &codes, StoredType::Awq, 1 << 30, 2, &|_, _| {}).expect("quantised");
    written.push(("codes".to_owned(), Checkpoint::open(&codes).expect("what was written")));
    let mut stale = 0;
    let mut decoders = Vec::new();
    for (name, checkpoint) in &written {
        let decoder = emulated(&vulkan, Driver::first(), checkpoint, way);
        if checkpoint.config.experts.is_some() {
            let divided = Decoder { max_buffer_bytes: dividing(&decoder), ..decoder.clone() };
            decoders.push((format!("{name}, experts in several buffers"), divided));
        }
        decoders.push((name.clone(), decoder));
    }
    for (name, decoder) in &decoders {
        let divided = decoder.divides_experts();
        assert_eq!(divided, name.contains("buffers"), "{name}");
        // Several rows of the model of codes are packed, and not tagged.
        let all_rows: &[u32] = if name == "codes" { &[1] } else { &[1, 4] };
        for &rows in all_rows {
            let recording = decoder.record(StepShape::Decode { rows });
            assert_eq!(tags::check(&recording), Ok(()), "{name}");
            let sums = recording.buffers.iter().any(|buffer| buffer.name == "tagged.column_sums");
            assert_eq!(sums, name == "codes", "{name}, {rows} rows");
            // Every place at which a call polls can be broken, and the check finds each of them.
            for poll in tags::polls(&recording).into_iter().filter(|_| divided) {
                let broken = tags::break_poll(&recording, poll).expect("some tag is never written");
                assert!(tags::check(&broken).is_err(), "{name}, {}: {poll:?} is not broken", recording.name);
            }
            // The same recording without the clearing of tags must be detected as wrong. Only the barriers between the calls of
            // divided experts leave no word of the step before to a later layer.
            let mut uncleared = recording.clone();
            uncleared.ops.retain(|op| !matches!(op, Op::Call(call) if call.kernel == "clear_tags"));
            assert_eq!(uncleared.ops.len() + 1, recording.ops.len(), "{name}: tags are not cleared");
            assert!(divided || tags::check(&uncleared).is_err(), "{name}: the check sees no stale words");
            for _ in 0..if name.starts_with("70") { 3 } else { 40 } {
                assert_eq!(simulate(&recording, &mut random), Ok(()), "{name}, {rows} rows");
                stale += u32::from(simulate(&uncleared, &mut random).is_err());
            }
        }
    }
    assert!(stale > 0, "the simulation finds no stale word even where tags are not cleared");
}

/// Goal: as above, for steps that verify drafts: looked up, of the model's own block, and of a draft model, whose passes each clear
/// their tags. Method: the same simulation.
#[test]
fn a_tagged_step_that_verifies_drafts_reads_no_word_of_another() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let mut random = Random(6);
    let (_folder, checkpoints) = on_fragments();
    for (name, drafts_itself) in [("demo", false), ("demo", true), ("demo-hybrid", false), ("tiny-gemma3", false)] {
        let (_, checkpoint) = checkpoints.iter().find(|(of, _)| *of == name).expect("it is among them");
        let own = emulated(&vulkan, Driver::first(), checkpoint, way);
        let decoder = match drafts_itself {
            true => with_draft_model(own.clone(), own, 3),
            false => Decoder { drafts: 3, ..own },
        };
        for (sequences, drafts) in [(1, 1), (1, 3), (2, 1)] {
            let recording = decoder.record(StepShape::Verify { sequences, drafts });
            let what = format!("{name}, {}, drafts for itself: {drafts_itself}", recording.name);
            assert_eq!(tags::check(&recording), Ok(()), "{what}");
            let polls = tags::polls(&recording);
            assert!(!polls.is_empty(), "{what}: not tagged");
            for poll in polls {
                let broken = tags::break_poll(&recording, poll).expect("some tag is never written");
                assert!(tags::check(&broken).is_err(), "{what}: {poll:?} is not broken");
            }
            let clears = |op: &Op| matches!(op, Op::Call(call) if call.kernel == "clear_tags");
            let passes = 1 + if drafts_itself { drafts } else { 0 };
            let cleared: Vec<usize> = (0..recording.ops.len()).filter(|at| clears(&recording.ops[*at])).collect();
            assert_eq!(cleared.len() as u32, passes, "{what}");
            // Without any one of the calls that clear tags it is wrong.
            for at in cleared {
                let mut uncleared = recording.clone();
                uncleared.ops.remove(at);
                assert!(tags::check(&uncleared).is_err(), "{what}: the check sees no stale words without call {at}");
            }
            for _ in 0..20 {
                assert_eq!(simulate(&recording, &mut random), Ok(()), "{what}");
            }
        }
    }
}

/// A device's part of a checkpoint.
struct InParts {
    checkpoint: Checkpoint,
    weights: Vec<WeightSpec>,
    rank: Rank,
    vocabulary: Option<Columns>,
}

impl InParts {
    /// Returns the parts of a checkpoint for `of` devices, the last of which has the LM head.
    fn of(whole: &Checkpoint, of: u32) -> Vec<InParts> {
        InParts::with(whole, of, None)
    }

    /// Returns the parts of a checkpoint for `of` devices, with a division of the LM head's rows.
    fn with(whole: &Checkpoint, of: u32, vocabulary: Option<Columns>) -> Vec<InParts> {
        let part = |index| {
            let rank = Rank { index, of };
            let checkpoint = whole.shard(rank).expect("it can be divided");
            let stage = LayerStage::of_rank(&checkpoint.config, rank, vocabulary);
            let weights = stage.weights(&checkpoint.config, checkpoint.weights());
            InParts { checkpoint, weights, rank, vocabulary }
        };
        (0..of).map(part).collect()
    }

    /// Returns the decoder of the part, whose kernels wait for the other devices' words.
    fn decoder<'a>(&'a self, vulkan: &Vulkan, way: Emulated) -> Decoder<'a> {
        let mut decoder = emulated(vulkan, Driver::first(), &self.checkpoint, way);
        decoder.stage = LayerStage::of_rank(&self.checkpoint.config, self.rank, self.vocabulary);
        decoder.weights = &self.weights;
        decoder.tuning.exchange_polls = 1;
        decoder
    }
}

/// Returns checkpoints that two devices divide into parts of whole chunks of columns: dense layers with and without norms
/// behind mixers and MLPs, recurrent layers with experts beside a shared one, experts alone and with biases; and the folders
/// with their files.
fn to_divide() -> ([tempfile::TempDir; 2], Vec<(&'static str, Checkpoint)>) {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, config: &serde_json::Value| {
        let path = folder.path().join(name);
        synth::write(&config.to_string(), &path, &SynthOptions::default(), &mut |_, _| {}).expect("written");
        Checkpoint::open(&path).expect("what was written")
    };
    let hybrid = synth::with_layers(&synth::preset("tiny-qwen3.5-moe").expect("a preset"), 8);
    let mut hybrid: serde_json::Value = serde_json::from_str(&hybrid).expect("JSON");
    for (key, value) in [("num_key_heads", 16), ("num_value_heads", 32), ("key_head_dim", 16), ("value_head_dim", 16)] {
        hybrid["text_config"][format!("linear_{key}")] = value.into();
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/gptoss-bf16/config.json");
    let file = std::fs::read_to_string(file).expect("a configuration");
    let mut gpt_oss: serde_json::Value = serde_json::from_str(&file).expect("JSON");
    for (key, value) in [
        ("hidden_size", 128),
        ("intermediate_size", 64),
        ("num_hidden_layers", 4),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("num_local_experts", 8),
    ] {
        gpt_oss[key] = value.into();
    }
    let (others, checkpoints) = on_fragments();
    let names = ["demo", "tiny-llama", "tiny-qwen3-moe", "tiny-gemma3", "tiny-granite"];
    let mut all: Vec<_> = checkpoints.into_iter().filter(|(name, _)| names.contains(name)).collect();
    assert_eq!(all.len(), names.len());
    all.extend([("hybrid with experts", write("hybrid", &hybrid)), ("gpt-oss", write("gpt-oss", &gpt_oss))]);
    ([folder, others], all)
}

/// Goal: a decode step of a part of each layer has the barriers of a whole one, reads no word of another, and begins no exchange
/// before it has got all words of the one before. Method: as for whole steps, with experts in one buffer and in several; the
/// step with barriers has one between any two exchanges.
#[test]
fn a_tagged_decode_step_in_parts_has_barriers_only_around_its_layers() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let (_folders, checkpoints) = to_divide();
    let mut random = Random(6);
    for (name, checkpoint) in &checkpoints {
        let whole = emulated(&vulkan, Driver::first(), checkpoint, way);
        let parts = InParts::of(checkpoint, 2);
        let mut decoders: Vec<Decoder<'_>> = parts.iter().map(|part| part.decoder(&vulkan, way)).collect();
        // The simulation has no workgroups for as many parts of a recurrent layer's projection.
        if checkpoint.config.experts.is_some() && checkpoint.config.delta.is_none() {
            let divided = Decoder { max_buffer_bytes: dividing(&decoders[1]), ..decoders[1].clone() };
            decoders.push(divided);
        }
        for (decoder, rows) in decoders.iter().flat_map(|decoder| [1, 2, 4].map(|rows| (decoder, rows))) {
            let recording = decoder.record(StepShape::Decode { rows });
            let what = format!("{name}, {}, {:?}", recording.name, decoder.stage.rank);
            assert_eq!(tags::check(&recording), Ok(()), "{what}");
            let polls = tags::polls(&recording);
            assert!(!polls.is_empty(), "{what}: not tagged");
            for poll in polls {
                let broken = tags::break_poll(&recording, poll).expect("some tag is never written");
                assert!(tags::check(&broken).is_err(), "{what}: {poll:?} is not broken");
            }
            let inside = |recording: &Recording| {
                let needed = barriers::derive(&recording.ops);
                let labels = calls(recording);
                labels.iter().zip(&needed).filter(|(label, needed)| label.starts_with("layers.") && **needed).count()
            };
            if !decoder.divides_experts() {
                let wanted = inside(&whole.record(StepShape::Decode { rows }));
                assert_eq!(inside(&recording), wanted, "{what}: barriers inside the layers");
            }
            assert_barriers_between_exchanges(&recording.with_barriers(), &what);
            for _ in 0..20 {
                assert_eq!(simulate(&recording, &mut random), Ok(()), "{what}");
            }
        }
    }
}

/// Goal: the blocks in which prompts' sums pass have words of each slot for themselves. Method: the largest steps of parts of
/// models whose LM heads are divided where they can be.
#[test]
fn blocks_of_prompts_are_behind_all_other_words_of_a_slot() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 64, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let (_folders, checkpoints) = to_divide();
    for (name, checkpoint) in &checkpoints {
        for part in &InParts::with(checkpoint, 2, divide_vocabulary(&checkpoint.config, 2)) {
            let mut decoder = part.decoder(&vulkan, way);
            decoder.tuning.exchange_halves = Some(true);
            let (rows, chunk) = (decoder.state.rows, decoder.state.chunk);
            // The greatest numbers of words at both ends of a slot.
            let (mut checked, mut in_blocks) = (0, 0);
            for shape in [StepShape::Decode { rows }, StepShape::Prefill { rows: chunk }, StepShape::Head { rows }] {
                for op in decoder.record(shape).ops {
                    let Op::Call(call) = op else { continue };
                    if call.kernel == "all_reduce" {
                        let args = AllReduceArgs::from_args(&call.args);
                        let (floats, slot_words) = (args.row_count * args.stride, args.slot_words);
                        assert_eq!(slot_words, decoder.exchange_words());
                        match AllReduceConstants::from_values(&call.constants).halves {
                            0 => checked = checked.max(words_of(floats.into()) as u32),
                            _ => in_blocks = in_blocks.max(Blocks::of(floats).slot_words()),
                        }
                    } else if call.kernel == "all_gather" {
                        let args = AllGatherArgs::from_args(&call.args);
                        let columns = Columns { count: args.columns, unit: args.unit };
                        let of_best = AllGatherConstants::from_values(&call.constants).best == 1;
                        checked = checked.max(if of_best { 0 } else { columns.words(args.row_count, 2) as u32 });
                    }
                }
            }
            let words = decoder.exchange_words();
            assert!(checked > 0 && in_blocks > 0 && words.is_multiple_of(4), "{name}: {checked} {in_blocks} {words}");
            assert!(checked + in_blocks <= words, "{name}: {checked} and {in_blocks} words in slots of {words}");
        }
    }
}

/// Goal: an empty range of a buffer counts as written only where nothing of the buffer is read. Method: one call or operation
/// for each kind of access.
#[test]
fn empty_ranges_of_what_is_read_are_not_written() {
    let mut recording = Recording::new("accesses");
    let [input, lacking, fault, output, apart, copied, filled] =
        ["input", "lacking", "fault", "output", "apart", "copied", "filled"].map(|name| recording.buffer(name, 64));
    let args = vec![
        Arg::Buffer(input, Access::Read),
        Arg::Buffer(lacking, Access::Read),
        Arg::Buffer(lacking.none(), Access::Write),
        Arg::Buffer(fault.none(), Access::ReadWrite),
        Arg::Buffer(output, Access::Write),
        Arg::Buffer(output.none(), Access::Write),
        Arg::Apart(apart, Access::ReadWrite),
    ];
    let label = "call".to_owned();
    recording.call(Call { kernel: "all_reduce", label, constants: Vec::new(), args, groups: [1; 3] });
    recording.ops.push(Op::Copy { from: input, to: copied });
    recording.ops.push(Op::Fill { to: filled, word: 0 });
    assert_eq!(recording.written(), BTreeSet::from(["apart", "copied", "fault", "filled", "output"]));
}

/// Goal: the two microbatches of a prompt step take turns between exchanges, each exchange has a number of its own, and no call of
/// one of them writes what the other one needs. Method: models of all kinds that have microbatches; of what both write, only
/// the residual stream and the row table in parts that do not overlap, KV pages and the state.
#[test]
fn microbatches_of_a_prompt_step_take_turns_and_share_no_buffer() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 64, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let (_folders, checkpoints) = to_divide();
    let mut with_microbatches = 0;
    for ((name, checkpoint), ptx) in checkpoints.iter().flat_map(|of| [false, true].map(|ptx| (of, ptx))) {
        for part in &InParts::of(checkpoint, 2) {
            let mut decoder = part.decoder(&vulkan, way);
            (decoder.tuning.ptx, decoder.tuning.wgmma_rows, decoder.tuning.microbatch_rows) = (ptx, 32, 64);
            assert!(!decoder.has_microbatches(32), "{name}");
            assert_eq!(decoder.has_microbatches(64), checkpoint.config.delta.is_none(), "{name}");
            let later = ModelConfig { causal: false, ..decoder.config.clone() };
            assert!(!Decoder { config: &later, ..decoder.clone() }.has_microbatches(64), "{name}: sees later tokens");
            if !decoder.has_microbatches(64) {
                continue;
            }
            with_microbatches += 1;
            let whole = decoder.record(StepShape::Prefill { rows: 64 });
            let recording = decoder.record_in_microbatches(64);
            let count = exchanges(&recording);
            assert_eq!(count, 2 * exchanges(&whole), "{name}");
            let second = |buffer: &str| buffer.ends_with(".second");
            let of_whole: BTreeSet<&str> = whole.buffers.iter().map(|decl| &*decl.name).collect();
            let parts = decoder.placed_weights().into_iter().flat_map(|weight| weight.parts);
            let tables = decoder.placed_tables().into_iter().map(|(name, _)| name);
            let constant: BTreeSet<String> = parts.map(|part| part.name).chain(tables).collect();
            let doubled = recording.buffers.iter().map(|decl| decl.name.trim_end_matches(".second"));
            let doubled = doubled.filter(|name| !of_whole.contains(name));
            assert_eq!(doubled.collect::<Vec<_>>(), [""; 0], "{name}: buffers that a whole step lacks");
            for decl in recording.buffers.iter().filter(|decl| second(&decl.name)) {
                let of_first = decl.name.trim_end_matches(".second");
                assert!(recording.buffers.iter().any(|other| other.name == of_first), "{name}: {}", decl.name);
                assert!(!constant.contains(of_first), "{name}: \"{of_first}\" has content from outside of the step");
            }
            // The microbatch whose layers the next call computes.
            let (mut own, mut phases) = (0, Vec::new());
            for op in &recording.ops {
                let Op::Call(call) = op else { continue };
                let phase = Phase::of(call).map(|phase| (phase, AllReduceArgs::from_args(&call.args).index));
                if let Some((Phase::Receive, index)) = phase {
                    own = index % 2;
                }
                let accesses = call.args.iter().filter_map(|arg| arg.access());
                for (range, access) in accesses.filter(|_| call.label.starts_with("layers.")) {
                    let decl = recording.decl(range.buffer);
                    let shared = ["x", "rows", "state"].contains(&&*decl.name)
                        || ["kv.", "exchange."].iter().any(|prefix| decl.name.starts_with(prefix));
                    // Calls without use for an output get an empty range of an input.
                    let unused = range.bytes == 0 && constant.contains(&decl.name);
                    if access.writes() && !shared && !unused {
                        assert_eq!(second(&decl.name), own == 1, "{name}: \"{}\" writes \"{}\"", call.label, decl.name);
                    }
                    if ["x", "rows"].contains(&&*decl.name) && range.bytes > 0 {
                        let half = decl.bytes / 2;
                        let of = u64::from(own) * half;
                        let inside = of <= range.offset && range.offset + range.bytes <= of + half;
                        assert!(inside, "{name}: \"{}\" uses rows of the other microbatch", call.label);
                    }
                }
                if let Some((Phase::Send, 0)) = phase {
                    own = 1;
                }
                phases.extend(phase);
            }
            let mut wanted = vec![(Phase::Send, 0), (Phase::Send, 1)];
            for index in 0..count {
                wanted.push((Phase::Receive, index));
                wanted.extend((index + 2 < count).then_some((Phase::Send, index + 2)));
            }
            assert_eq!(phases, wanted, "{name}: the order of exchanges");
        }
    }
    assert!(with_microbatches > 4, "{with_microbatches} parts have microbatches");
}

/// Checks that a step with barriers has one between any two exchanges.
fn assert_barriers_between_exchanges(recording: &Recording, what: &str) {
    let mut ordered = true;
    for (op, barrier) in recording.ops.iter().zip(barriers::derive(&recording.ops)) {
        ordered |= barrier;
        let Op::Call(call) = op else { continue };
        if ["all_reduce", "all_gather"].contains(&call.kernel) {
            assert!(ordered, "{what}: \"{}\" may begin before the exchange before it has ended", call.label);
            ordered = false;
        }
    }
}

/// Goal: the exchanges of a divided LM head begin after all words of those before have come, in steps with and without
/// barriers inside the layers, and their buffers hold the words of every step.
#[test]
fn the_exchanges_of_a_divided_lm_head_are_in_order() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let (_folders, checkpoints) = to_divide();
    for (name, checkpoint) in checkpoints.iter().filter(|(name, _)| ["demo", "tiny-llama", "gpt-oss"].contains(name)) {
        let columns = divide_vocabulary(&checkpoint.config, 2).expect("there are enough rows");
        for part in &InParts::with(checkpoint, 2, Some(columns)) {
            let decoder = part.decoder(&vulkan, way);
            let score = StepShape::Score { rows: decoder.score_rows() };
            for (shape, gathers) in [
                (StepShape::Decode { rows: 1 }, HEAD_EXCHANGES),
                (StepShape::Decode { rows: 4 }, HEAD_EXCHANGES),
                (StepShape::Head { rows: 2 }, HEAD_EXCHANGES),
                (score, 1),
                (StepShape::Prefill { rows: 16 }, 0),
            ] {
                let recording = decoder.record(shape);
                let what = format!("{name}, {}, {:?}", recording.name, part.rank);
                assert_eq!(tags::check(&recording), Ok(()), "{what}");
                let is = |op: &&Op, kernel: &str| matches!(op, Op::Call(call) if call.kernel == kernel);
                let count = |kernel: &str| recording.ops.iter().filter(|op| is(op, kernel)).count() as u32;
                assert_eq!(count("all_gather"), gathers, "{what}");
                assert_barriers_between_exchanges(&recording.with_barriers(), &what);
                let begin = recording.ops.iter().position(|op| is(&op, "all_gather")).unwrap_or(recording.ops.len());
                let needed = barriers::derive(&recording.ops);
                let begin = recording.ops[..begin].iter().rposition(|op| is(&op, "all_reduce")).unwrap_or(begin);
                let gather = |at: &usize| is(&&recording.ops[*at], "all_gather");
                let found: Vec<usize> = (begin..recording.ops.len()).filter(gather).collect();
                for (before, at) in [begin].iter().chain(&found).zip(&found) {
                    let ordered = *before == *at || (before + 1..=*at).any(|at| needed[at]);
                    assert!(ordered, "{what}: exchange {at} may begin before exchange {before} has ended");
                }
                // Only the last device draws tokens.
                let draws = count("sample") + count("score") + count("join_scores");
                let last = part.rank.index == 1 && gathers > 0;
                assert_eq!(draws, u32::from(last), "{what}");
            }
        }
    }
}

/// Goal: experts beside a dense MLP have two sums that do not depend on each other, so their steps in parts have barriers, one
/// of them between the two exchanges; the simulation finds that tags alone would not order them.
#[test]
fn the_two_exchanges_of_experts_beside_a_dense_mlp_are_in_order() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F16, near: 0.0 };
    let (_folder, checkpoints) = on_fragments();
    let (_, checkpoint) = checkpoints.iter().find(|(name, _)| *name == "tiny-gemma4").expect("it is among them");
    let parts = InParts::of(checkpoint, 2);
    for part in &parts {
        let decoder = part.decoder(&vulkan, way);
        for shape in [StepShape::Decode { rows: 1 }, StepShape::Decode { rows: 4 }, StepShape::Prefill { rows: 16 }] {
            let recording = decoder.record(shape);
            let what = format!("{}, {:?}", recording.name, part.rank);
            let count = recording.ops.iter().filter(|op| matches!(op, Op::Call(c) if c.kernel == "all_reduce")).count();
            assert_eq!(count as u32, 3 * checkpoint.config.layers, "{what}");
            assert_eq!(tags::polls(&recording), [], "{what}");
            assert_barriers_between_exchanges(&recording, &what);
        }
    }
}

/// A recording with its memory.
struct Interpreted {
    recording: Recording,
    memory: HostMemory,
    state: StateLayout,
}

impl Interpreted {
    fn new(decoder: &Decoder<'_>, shape: StepShape) -> Interpreted {
        Interpreted::of(decoder, decoder.record(shape))
    }

    fn of(decoder: &Decoder<'_>, recording: Recording) -> Interpreted {
        let memory = gather(&initial(decoder, &[&recording]), &recording);
        Interpreted { recording, memory, state: decoder.state }
    }

    fn words(&mut self, name: &str) -> &mut Vec<u32> {
        let at = self.recording.buffers.iter().position(|decl| decl.name == name);
        &mut self.memory.buffers[at.unwrap_or_else(|| panic!("\"{name}\" in \"{}\"", self.recording.name))]
    }

    fn patch(&mut self, word: u32, values: &[u32]) {
        self.words("state")[word as usize..][..values.len()].copy_from_slice(values);
    }

    /// Has each row decode a sequence from its first token on, which has a page of its own.
    fn join(&mut self, rows: u32) {
        let layout = self.state;
        for slot in 0..rows {
            let init = SlotInit { remaining: 64, prompt_tokens: 0, ..SlotInit::default() };
            self.patch(layout.slot_word(slot, 0), &init.words());
            self.patch(layout.slot_word(slot, state::SLOT_TOKEN), &[7 + 40 * slot]);
            self.patch(layout.page_word(slot, 0), &[slot]);
            self.patch(layout.batch_word(slot), &[slot]);
        }
    }

    /// Returns the words of the first `rows` slots.
    fn slots(&mut self, rows: u32) -> Vec<u32> {
        let (from, to) = (self.state.slot_word(0, 0), self.state.slot_word(rows, 0));
        self.words("state")[from as usize..to as usize].to_vec()
    }

    /// Runs operations `ops` of the recording.
    fn run(&mut self, ops: std::ops::Range<usize>) {
        let ops = self.recording.ops[ops].to_vec();
        interpreter::run(&Recording { ops, ..self.recording.clone() }, &mut self.memory);
    }

    /// Returns the calls of a step that send in its exchanges: the index of the operation and its arguments.
    fn exchanges(&self) -> Vec<(usize, AllReduceArgs)> {
        let exchange = |(index, op): (usize, &Op)| match op {
            Op::Call(call) if call.kernel == "all_reduce" && Phase::of(call) != Some(Phase::Receive) => {
                Some((index, AllReduceArgs::from_args(&call.args)))
            }
            _ => None,
        };
        self.recording.ops.iter().enumerate().filter_map(exchange).collect()
    }
}

/// Runs a step of all parts, the first exchange of which has this number. Before each exchange, every part gets the words of
/// the others.
fn run_parts(parts: &mut [Interpreted], first: u32) {
    let each = parts[0].exchanges().len();
    let number = parts[0].state.exchange_word();
    parts.iter_mut().for_each(|part| part.patch(number, &[first]));
    let mut begun = vec![0; parts.len()];
    for exchange in 0..each {
        let places: Vec<(usize, AllReduceArgs)> =
            parts.iter().map(|part| part.exchanges().swap_remove(exchange)).collect();
        for ((part, begun), (at, _)) in parts.iter_mut().zip(&mut begun).zip(&places) {
            part.run(std::mem::replace(begun, *at)..*at);
        }
        for (from, to) in (0..parts.len()).flat_map(|from| (0..places.len()).map(move |to| (from, to))) {
            if from == to {
                continue;
            }
            let (x, number) = (places[from].1.x, first + exchange as u32);
            let floats = (places[from].1.row_count * places[from].1.stride) as usize;
            let sent = parts[from].memory.buffers[x.buffer.0 as usize][(x.offset / 4) as usize..][..floats].to_vec();
            let place = (from - usize::from(from > to)) * SLOTS as usize + (number % SLOTS) as usize;
            let inbox = parts[to].words(INBOX);
            for (word, floats) in sent.chunks(3).enumerate() {
                let bits: [u32; 3] = std::array::from_fn(|i| floats.get(i).copied().unwrap_or(0));
                let at = (place * places[to].1.slot_words as usize + word) * 4;
                inbox[at..at + 3].copy_from_slice(&bits);
                inbox[at + 3] = check_of(bits, number);
            }
        }
    }
    for (part, begun) in parts.iter_mut().zip(begun) {
        part.run(begun..part.recording.ops.len());
    }
}

/// Goal: a prompt step in microbatches leaves the residual stream that it leaves when it is computed whole, with and without
/// programs in PTX. Method: two devices' parts in the interpreter; two prompts, one of which is cut, and a second microbatch that
/// is not full.
#[test]
fn a_prompt_step_in_microbatches_means_the_same_as_a_whole_one_in_plain_rust() {
    const ROWS: u32 = 64;
    const TOKENS: [u32; 2] = [40, 11];
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: ROWS, tags: false, kv_format: KvFormat::F32, near: 0.0 };
    let (_folders, checkpoints) = to_divide();
    let (mut compared, mut in_ptx) = (0, 0);
    // Without programs in PTX, a dense model and one with experts.
    let without =
        checkpoints.iter().filter(|(name, _)| ["demo", "tiny-qwen3-moe"].contains(name)).map(|of| (of, false));
    for ((name, checkpoint), ptx) in without.chain(checkpoints.iter().map(|of| (of, true))) {
        let parts = InParts::of(checkpoint, 2);
        let mut run = |in_microbatches: bool| {
            let in_parts = |part: &InParts| {
                let mut decoder = part.decoder(&vulkan, way);
                (decoder.tuning.ptx, decoder.tuning.wgmma_rows, decoder.tuning.microbatch_rows) = (ptx, 32, ROWS);
                let recording = match in_microbatches {
                    true => decoder.record_in_microbatches(ROWS),
                    false => decoder.record(StepShape::Prefill { rows: ROWS }),
                };
                let products = recording.ops.iter().filter(|op| matches!(op, Op::Call(call) if call.kernel == "wgmma"));
                in_ptx += products.count();
                let mut own = Interpreted::of(&decoder, recording);
                let tokens: Vec<u32> = (3..3 + ROWS).collect();
                let prompt = |slot: u32, tokens| PromptRows {
                    slot,
                    start: 0,
                    tokens,
                    last: true,
                    next: None,
                    from: None,
                    keeps: &[],
                };
                let [first, second] = TOKENS.map(|count| count as usize);
                let prompts = [prompt(0, &tokens[..first]), prompt(1, &tokens[first..first + second])];
                let layout = decoder.state;
                for (word, values) in layout.chunk_layout().describe(&prompts) {
                    own.patch(layout.chunk_word(word), &values);
                }
                for (index, part) in (0..).zip(embed::microbatches(&prompts, ROWS / 2)) {
                    own.patch(layout.microbatch_word(index), &ChunkLayout::describe_microbatch(&part));
                }
                // The first prompt has two pages.
                for (slot, index, page) in [(0, 0, 1), (0, 1, 2), (1, 0, 0)] {
                    own.patch(layout.page_word(slot, index), &[page]);
                }
                own
            };
            let mut parts: Vec<Interpreted> = parts.iter().map(in_parts).collect();
            run_parts(&mut parts, 1);
            let floats = (TOKENS.iter().sum::<u32>() * stride(checkpoint.config.hidden)) as usize;
            parts.iter_mut().map(|part| part.words("x")[..floats].to_vec()).collect::<Vec<_>>()
        };
        if !parts[0].decoder(&vulkan, way).has_microbatches(ROWS) {
            continue;
        }
        compared += 1;
        let (whole, found) = (run(false), run(true));
        for (at, (found, whole)) in found.iter().flatten().zip(whole.iter().flatten()).enumerate() {
            let [found, whole] = [found, whole].map(|bits| f32::from_bits(*bits));
            assert!(
                (found - whole).abs() <= 1e-3 * (1.0 + whole.abs()),
                "{name}, PTX {ptx}, {at}: {found} for {whole}"
            );
        }
    }
    assert!(compared > 6 && in_ptx > 0, "{compared} models, {in_ptx} products in PTX");
}

/// Goal: a drafting block with experts, which the last of two devices computes whole, drafts what it drafts for a whole model.
/// Method: steps that verify drafts, in the interpreter.
#[test]
fn a_block_with_experts_drafts_the_same_for_a_model_in_parts_in_plain_rust() {
    let vulkan = Vulkan::new();
    let checkpoint = open("next-moe");
    let shape = StepShape::Verify { sequences: 1, drafts: 2 };
    let drafting = |decoder: Decoder<'_>| Interpreted::new(&Decoder { drafts: 2, ..decoder }, shape);
    let mut whole = drafting(decoder(&vulkan, Driver::first(), &checkpoint, WHOLE));
    let parts = InParts::of(&checkpoint, 2);
    assert!(parts[1].weights.iter().any(WeightSpec::is_mtp) && !parts[0].weights.iter().any(WeightSpec::is_mtp));
    let in_parts = |part: &InParts| {
        let mut own = decoder(&vulkan, Driver::first(), &part.checkpoint, WHOLE);
        own.stage = LayerStage::of_rank(&part.checkpoint.config, part.rank, part.vocabulary);
        own.weights = &part.weights;
        own.tuning.exchange_polls = 1;
        drafting(own)
    };
    let mut parts: Vec<Interpreted> = parts.iter().map(in_parts).collect();
    std::iter::once(&mut whole).chain(&mut parts).for_each(|run| run.join(1));
    let each = parts[0].exchanges().len() as u32;
    let mut seen = Vec::new();
    for step in 0..4 {
        whole.run(0..whole.recording.ops.len());
        run_parts(&mut parts, 1 + step * each);
        let drawn = parts[1].slots(1);
        assert_eq!(drawn, whole.slots(1), "step {step}");
        seen.push(drawn[state::SLOT_DRAFTS as usize..][..2].to_vec());
        let first = parts[0].state.slot_word(0, 0);
        parts[0].patch(first, &drawn);
    }
    seen.dedup();
    assert!(seen.len() > 2 && seen.iter().flatten().all(|draft| *draft < checkpoint.config.vocab), "{seen:?}");
}

/// Goal: tagged decode steps of two devices' parts draw what whole ones draw, and both devices have the same residual stream, bit
/// for bit. Method: some steps of several rows in the interpreter, from the sequences' beginnings; logits as near as
/// roundings of tagged words allow.
#[test]
fn tagged_decode_steps_in_parts_mean_the_same_as_whole_ones_in_plain_rust() {
    let vulkan = Vulkan::new();
    let way = Emulated { chunk: 16, tags: true, kv_format: KvFormat::F32, near: 1e-2 };
    let (_folders, checkpoints) = to_divide();
    let rows = 2;
    for (name, checkpoint) in &checkpoints {
        let shape = StepShape::Decode { rows };
        let mut whole = Interpreted::new(&emulated(&vulkan, Driver::first(), checkpoint, way), shape);
        let parts = InParts::of(checkpoint, 2);
        let mut parts: Vec<Interpreted> =
            parts.iter().map(|part| Interpreted::new(&part.decoder(&vulkan, way), shape)).collect();
        std::iter::once(&mut whole).chain(&mut parts).for_each(|run| run.join(rows));
        let each = parts[0].exchanges().len() as u32;
        for step in 0..3 {
            whole.run(0..whole.recording.ops.len());
            run_parts(&mut parts, 1 + step * each);
            let what = format!("{name}, step {step}");
            let wanted = whole.words("logits").clone();
            let (last, others) = parts.split_last_mut().expect("two parts");
            let found = last.words("logits").clone();
            for (found, wanted) in found.iter().zip(&wanted).map(|(f, w)| (f32::from_bits(*f), f32::from_bits(*w))) {
                assert!((found - wanted).abs() <= way.near, "{what}: a logit of {found} in place of {wanted}");
            }
            let stream = last.words("tagged.x").clone();
            let drawn = last.slots(rows);
            assert_eq!(drawn, whole.slots(rows), "{what}: slots");
            for other in others {
                assert_eq!(*other.words("tagged.x"), stream, "{what}: the residual stream");
                other.patch(other.state.slot_word(0, 0), &drawn);
            }
        }
    }
}

/// Goal: a product whose input never gets the expected tag sets the fault word and ends. Method: an input with another
/// tag, and for comparison one with the right tag.
#[test]
fn a_tagged_product_whose_input_never_comes_raises_the_fault_word_and_ends() {
    let mut recording = Recording::new("stuck");
    let layout = StateLayout {
        slots: 4,
        rows: 4,
        chunk: 16,
        prompts: 2,
        sequences: 2,
        max_pages: 8,
        cells: false,
        windows: false,
    };
    let fault = layout.fault(&mut recording);
    let weight = recording.buffer("weight", 16 * 32 * 2);
    let [x, y] = [("x", 32), ("y", 32)].map(|(name, width)| recording.buffer(name, width * 4));
    let product = Product {
        label: "stuck".to_owned(),
        weight: Matrix { range: weight, format: Format::Bf16, rows: 16, cols: 32 },
        x: Activations { range: x, stride: 32 },
        norm: None,
        bias: None,
        epilogue: Epilogue::Store,
        y: Activations { range: y, stride: 32 },
    };
    let flow = Flow { input_carried: true, input: 2, old: 0, output: Some(1) };
    let config = SkinnyConfig { threads: 32, tiles: 1, ahead: 1 };
    recording.call(skinny(&product, 1, Matrices::Emulated, config, flow, fault));
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        for (tag, raised) in [(2, 0), (1, 1)] {
            let mut before = HostMemory::new(&recording);
            before.buffers[x.buffer.0 as usize].fill(tagged(1.0, tag));
            let start = std::time::Instant::now();
            let after = bench.run(&recording, &before);
            assert_eq!(after.u32(fault, 0), raised, "input of tag {tag} on {driver:?}");
            println!("input of tag {tag} on {driver:?}: {:?}", start.elapsed());
        }
    }
}

/// Goal: calls, copies and fills in one recording run in order, with the right barriers between them.
#[test]
fn copies_and_fills_meet_calls_in_order() {
    let mut recording = Recording::new("mixed");
    let words = |r: &mut Recording, name: &str, words: u64| r.buffer(name, words * 4);
    let (x, y, z) = (words(&mut recording, "x", 64), words(&mut recording, "y", 64), words(&mut recording, "z", 96));
    let (rows, chunk) = (words(&mut recording, "rows", 16), words(&mut recording, "chunk", 5));
    let last = words(&mut recording, "last", 4);
    let take = |x, head_x| {
        let args = TakeLastArgs { x, rows, chunk, head_x, head_rows: last, x_stride: 16, last_at: 4 };
        Op::Call(take_last("take".to_owned(), 1, args))
    };
    recording.ops = vec![
        Op::Fill { to: y.part(16, 64), word: 0x4000_0000 },
        // Row 2 of x goes to the first quarter of y, then parts of y are copied to z.
        take(x, y.part(0, 64)),
        Op::Copy { from: y.part(32, 96), to: z.part(64, 96) },
        Op::Fill { to: y.part(64, 32), word: 7 },
        // The copied words serve as the rows of a chunk again.
        take(z, y.part(128, 64)),
        Op::Copy { from: y.part(0, 256), to: x.part(0, 256) },
        Op::Fill { to: z, word: 1 },
    ];
    // The barrier before the second fill also covers z, which is not accessed in between.
    let needed = [false, true, true, true, false, true, false];
    assert_eq!(barriers::derive(&recording.ops), needed, "no more than it takes");
    let mut before = HostMemory::new(&recording);
    let mut random = Random(12);
    for buffer in &mut before.buffers {
        buffer.iter_mut().for_each(|word| *word = random.next() as u32);
    }
    before.buffers[chunk.buffer.0 as usize] = vec![0, 1, 3, 0, 2];
    let mut reference = before.clone();
    interpreter::run(&recording, &mut reference);
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let device = Bench::new(&vulkan, *driver).run(&recording, &before);
        for (decl, (found, wanted)) in recording.buffers.iter().zip(device.buffers.iter().zip(&reference.buffers)) {
            assert_eq!(found, wanted, "\"{}\" on {driver:?}", decl.name);
        }
    }
}

#[test]
fn a_region_without_memory_or_with_too_little_is_refused() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let with = |bytes: u64, name: &str| {
        let mut recording = Recording::new("fill");
        let to = recording.buffer(name, bytes);
        recording.ops.push(Op::Fill { to, word: 0 });
        recording
    };
    let bound = bench.bind(&[&with(64, "x")]);
    let refused = |recording: &Recording| bound.try_region(recording).map(|_| ()).expect_err("refused");
    let error = refused(&with(64, "y"));
    assert!(matches!(&error, RegionError::NoBuffer { buffer, .. } if buffer == "y"), "{error:?}");
    let error = refused(&with(68, "x"));
    assert!(matches!(&error, RegionError::SmallBuffer { needed: 68, has: 64, .. }), "{error:?}");
    assert!(["\"fill\"", "\"x\"", "68", "64"].iter().all(|part| error.to_string().contains(part)), "{error}");
    bound.run(&[&with(32, "x")]);
}

/// Goal: GPU-assisted validation, which `make test-full` runs these tests under, sees what it is there for. Method: a product
/// reads rows behind the end of its weights.
#[test]
#[ignore = "needs OSTINATO_TEST_GPU_ASSISTED; in make test-full"]
fn gpu_assisted_validation_sees_reads_behind_a_buffer() {
    assert!(crate::common::gpu_assisted());
    let (rows, cols) = (4096, 32);
    let mut recording = Recording::new("behind");
    let weight = recording.buffer("weight", 4 * u64::from(cols));
    let [x, y] = [("x", cols), ("y", rows)].map(|(name, width)| recording.buffer(name, u64::from(width) * 4));
    let product = Product {
        label: "behind".to_owned(),
        weight: Matrix { range: weight, format: Format::F32, rows, cols },
        x: Activations { range: x, stride: cols },
        norm: None,
        bias: None,
        epilogue: Epilogue::Store,
        y: Activations { range: y, stride: rows },
    };
    recording.call(product.gemv(1, GemvConfig { threads: 64, weight_rows: 2, batch: 1 }));
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::Lavapipe);
    bench.run(&recording, &HostMemory::new(&recording));
    drop(bench);
    let messages = vulkan.provoked();
    assert!(
        messages.iter().any(|message| message.contains("VUID-RuntimeSpirv-PhysicalStorageBuffer64")),
        "{messages:?}"
    );
}

/// Goal: a weight that exceeds the largest allocation is split into row ranges without any effect on results. Method:
/// buffers of at most 4 KiB split every matrix of the checkpoint. All results must equal those of whole weights bit for
/// bit, because the sum of a row does not depend on other rows.
#[test]
fn weights_in_parts_give_the_same_bits_as_whole_ones() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    for name in ["llama-bias", "qwen3-yarn"] {
        let checkpoint = open(name);
        let known = expected(name);
        let run = |max_buffer_bytes: u64| {
            let decoder = decoder(&vulkan, bench.driver, &checkpoint, max_buffer_bytes);
            for weight in decoder.weights.iter().filter(|weight| weight.cols > 1) {
                let parts = decoder.parts(weight);
                assert_eq!(parts.len() > 1, max_buffer_bytes < WHOLE, "{} in {} parts", weight.name, parts.len());
                assert!(parts.iter().all(|part| part.bytes <= max_buffer_bytes));
                assert_eq!(parts.iter().map(|part| part.rows).sum::<u32>(), weight.rows);
            }
            let recordings = Recordings::new(&decoder);
            let mut run = Run::new(name, &bench, &decoder, &recordings, false);
            let tokens = run.generate(&recordings, &known.prompt);
            assert_eq!(tokens, known.greedy[..tokens.len()], "{name}, at most {max_buffer_bytes} bytes a buffer");
            let mut names = vec!["x", "qkv", "attention.output", "mlp.hidden", "logits", "head.x", "state", "ring"];
            names.extend(["kv.0.k", "kv.0.v"]);
            names.into_iter().map(|name| (name, run.words(name))).collect::<Vec<_>>()
        };
        let (whole, parts) = (run(WHOLE), run(4096));
        for ((buffer, whole), (_, parts)) in whole.iter().zip(&parts) {
            assert!(whole == parts, "\"{buffer}\" of {name}");
        }
    }
}

fn calls(recording: &Recording) -> Vec<&str> {
    recording
        .ops
        .iter()
        .map(|op| match op {
            Op::Call(call) => call.label.as_str(),
            other => panic!("{} has {other:?}", recording.name),
        })
        .collect()
}

/// Returns the stages of a layer in a decode step. With experts on row-major weights, choosing the experts is a
/// separate stage. Outputs that are changed before they are added are added by stages of their own.
fn stages(checkpoint: &Checkpoint, layer: u32, fragments: bool) -> Vec<String> {
    let c = &checkpoint.config;
    let mixer: &[&str] = match c.layer_kinds[layer as usize] {
        LayerKind::Attention => &["qkv", "attention", "o"],
        LayerKind::GatedDelta if c.has_single_blocks() => &["in_proj", "delta", "group_norm", "o"],
        LayerKind::GatedDelta => &["in_proj", "delta", "o"],
        LayerKind::ShortConv => &["conv_in", "short_conv", "o"],
        LayerKind::None => &[],
    };
    let beside = c.experts.is_some_and(|experts| experts.beside_dense);
    let mlp: &[&str] = match c.mlp_kinds[layer as usize] {
        MlpKind::None => &[],
        MlpKind::Dense if c.has_branch_stages() => &["gate_up", "down", "down_add"],
        MlpKind::Dense => &["gate_up", "down"],
        MlpKind::Experts if beside => &["gate_up", "down", "router", "experts.gate_up", "experts.down", "mlp_add"],
        MlpKind::Experts if fragments && c.has_branch_stages() => {
            &["router", "experts.gate_up", "experts.down", "experts_add"]
        }
        MlpKind::Experts if fragments => &["router", "experts.gate_up", "experts.down"],
        MlpKind::Experts => &["router", "experts.choose", "experts.gate_up", "experts.down"],
    };
    let added: &[&str] = if c.has_branch_stages() { &["o_add"] } else { &[] };
    mixer.iter().chain(added).chain(mlp).map(|stage| format!("layers.{layer}.{stage}")).collect()
}

/// Goal: a decode step has one barrier per dependent stage of a layer: 5 with a dense MLP, whatever the mixer, 6 with
/// experts on weights in fragment order, and 7 with experts on row-major weights.
#[test]
fn a_decode_step_has_a_dispatch_and_a_barrier_for_each_stage_of_a_layer() {
    let vulkan = Vulkan::new();
    let check = |name: &str, checkpoint: &Checkpoint, recordings: &[Recording], fragments: bool| {
        for recording in recordings {
            let layers = (0..checkpoint.config.layers).map(|layer| stages(checkpoint, layer, fragments));
            let mut wanted = vec!["embed".to_owned()];
            wanted.extend(layers.clone().flatten());
            wanted.push("lm_head".to_owned());
            // The plan that splits each row's context runs once per step, if several rows attend on fragment-order
            // weights.
            let further = ["plan", "bound_logits"];
            let found: Vec<&str> = calls(recording).into_iter().filter(|label| !further.contains(label)).collect();
            let (layered, drawing) = found.split_at(wanted.len().min(found.len()));
            assert_eq!(layered, wanted, "{name}, {}", recording.name);
            // The sampler may use up to three calls. With a single row, `sample` counts the step itself; otherwise
            // `advance` follows.
            let last: &[&str] = if recording.name == "decode.1" { &["sample"] } else { &["sample", "advance"] };
            assert!(
                drawing.iter().rev().zip(last.iter().rev()).all(|(found, wanted)| found == wanted)
                    && drawing.len() <= 3,
                "{name}: {drawing:?}"
            );
            let needed = barriers::derive(&recording.ops);
            for (layer, stages) in layers.enumerate() {
                let prefix = format!("layers.{layer}.");
                let found = calls(recording)
                    .iter()
                    .zip(&needed)
                    .filter(|(label, needed)| label.starts_with(&prefix) && **needed)
                    .count();
                // A router beside a dense MLP reads what the MLP has read.
                let free = usize::from(checkpoint.config.experts.is_some_and(|experts| experts.beside_dense));
                assert_eq!(found, stages.len() - free, "{name}, layer {layer} of {}", recording.name);
            }
        }
    };
    let (_folder, checkpoints) = on_fragments();
    for (name, checkpoint) in &checkpoints {
        let way = Emulated { chunk: 16, tags: false, kv_format: KvFormat::F16, near: 0.0 };
        let decoder = emulated(&vulkan, Driver::first(), checkpoint, way);
        check(name, checkpoint, &Recordings::new(&decoder).decode, true);
    }
    for name in
        ["llama-deep", "qwen3-deep", "llama-bias", "hybrid-two", "hybrid-moe", "moe-top2", "families/lfm2-plain"]
    {
        let checkpoint = open(name);
        let decoder = decoder(&vulkan, Driver::first(), &checkpoint, WHOLE);
        check(name, &checkpoint, &Recordings::new(&decoder).decode, false);
    }
}

/// Goal: recordings use only declared buffers and are deterministic. Method: every checkpoint, every shape, with whole
/// weights and with weights in parts.
#[test]
fn recordings_name_only_what_they_declare_and_print_the_same_every_time() {
    let vulkan = Vulkan::new();
    for name in CHECKPOINTS.into_iter().chain(["next-moe"]) {
        let checkpoint = open(name);
        let whole = decoder(&vulkan, Driver::first(), &checkpoint, WHOLE);
        let small = if checkpoint.config.experts.is_some() { dividing(&whole) } else { 4096 };
        for max_buffer_bytes in [WHOLE, small] {
            let mut decoder = Decoder { max_buffer_bytes, ..whole.clone() };
            decoder.drafts = u32::from(checkpoint.has_mtp());
            let recordings = Recordings::new(&decoder);
            let mut names = std::collections::HashSet::new();
            for recording in recordings.all() {
                assert!(names.insert(recording.name.clone()), "two recordings are called {}", recording.name);
                let declared: std::collections::HashSet<&str> =
                    recording.buffers.iter().map(|b| b.name.as_str()).collect();
                assert_eq!(declared.len(), recording.buffers.len(), "a name is one buffer");
                for op in &recording.ops {
                    for Touch { range, .. } in op.touches() {
                        let decl = recording.buffers.get(range.buffer.0 as usize).expect("declared");
                        assert!(
                            range.offset + range.bytes <= decl.bytes,
                            "{range:?} leaves \"{}\" of {}",
                            decl.name,
                            decl.bytes
                        );
                        assert_eq!(range.offset % 4, 0, "{range:?}");
                    }
                    let Op::Call(call) = op else { continue };
                    let shader = ostinato::kernels::shaders::find(call.kernel);
                    assert_eq!(call.args.len(), shader.fields.len(), "{}", call.kernel);
                    // Other variants of the shader may have further constants, whose values this one ignores.
                    assert!(call.constants.len() >= shader.constants.len(), "{}", call.kernel);
                    for (arg, field) in call.args.iter().zip(shader.fields) {
                        let buffer = matches!(arg, Arg::Buffer(..) | Arg::Carried(..) | Arg::Apart(..));
                        assert_eq!(buffer, field.bytes == 8, "{}.{}", call.kernel, field.name);
                    }
                    assert!(
                        call.groups.iter().all(|count| (1..=65_535).contains(count)),
                        "{}: {:?}",
                        call.label,
                        call.groups
                    );
                }
                let text = recording.to_string();
                assert_eq!(text.lines().count(), recording.ops.len() + 1, "a line an operation");
                assert!(text.starts_with(&format!("recording {}\n", recording.name)));
                assert!(
                    calls(recording)
                        .iter()
                        .zip(text.lines().skip(1))
                        .all(|(label, line)| line.trim_start().starts_with(&format!("{label} = ")))
                );
            }
            let again = Recordings::new(&decoder);
            for (one, other) in recordings.all().into_iter().zip(again.all()) {
                assert_eq!(one, other);
                assert_eq!(one.to_string(), other.to_string());
            }
        }
    }
}

//! The test at start of the results: a small model with the layer kinds, head shapes and weight formats of the model that
//! is served runs a prompt and decode steps on the device and in plain Rust, and both must give the same logits and
//! tokens. A combination of driver, kernels and their variants that has passed is kept in a file beside the pipeline
//! cache and is not tested again.
//! Not here: the small model (`model::synth::miniature`), and the tests of single kernels (`format_test`, `ptx_test`).

use crate::config::{KvFormat, file};
use crate::device::{driver_key, fnv, write_atomically};
use crate::gpu::build::Build;
use crate::gpu::error::StartError;
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::embed::PromptRows;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::interpreter;
use crate::kernels::layout::StateLayout;
use crate::kernels::recording::{BufferDecl, Op, Range, Recording};
use crate::kernels::region::{Pipelines, Region, buffer_sizes};
use crate::kernels::shaders::SHADER_SET;
use crate::kernels::state::{self, RingEntry, SlotInit};
use crate::memory::pack::Packing;
use crate::memory::{BufferTable, Place};
use crate::model::checkpoint::WeightSpec;
use crate::model::decoder::stage::LayerStage;
use crate::model::decoder::{Decoder, RingLayout, StepShape, stride};
use crate::model::synth::miniature::Miniature;
use crate::telemetry::with_causes;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The numbers of rows of the prompt's steps; the last one is not full.
const CHUNKS: [(u32, usize); 2] = [(16, 16), (64, 41)];
/// The numbers of rows of the decode steps.
const BATCHES: [u32; 4] = [1, 4, 16, 64];
/// The number of pages of a sequence.
const PAGES: u32 = 5;
/// The maximum difference between the logits of both sides, relative to their norm: several times what rounding to bfloat16
/// or half precision makes of sums in another order.
const TOLERANCE: f64 = 0.02;
/// The same with keys and values in int8, where a number near the middle of two codes may get either.
const TOLERANCE_INT8: f64 = 0.05;
/// A word differs noticeably if its value as a float differs by this part.
const NOTICEABLE: f32 = 0.05;
/// A difference of less than this part of the words' root mean square is not noticed.
const NEGLIGIBLE: f32 = 0.01;
/// The maximum difference of logits between calls together and one by one, relative to their norm.
const SAME: f64 = 1e-3;
/// Words that are floats are below this and above its inverse. Codes and pairs of 16 bits that differ by rounding are not between
/// them where one of both would be no number.
const LARGE: f32 = 1e30;
/// A call is suspected if more than this part of the words that it writes differs noticeably.
const SUSPECTED: f32 = 0.02;
/// The maximum number of combinations that a file keeps.
const MOST_KEPT: usize = 256;

/// The outcome of the test.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tested {
    /// All results are right. The text says what was compared.
    Right(String),
    /// The same combination has passed before.
    Before,
    /// A small model of this kind cannot be made, for this reason.
    Unknown(String),
    /// A result is wrong. The text names the kernel.
    Wrong(String),
}

/// Tests the kernels that a model's decoder uses. `cache` is the folder of the file with the combinations that have passed.
pub(crate) fn test_reference(
    build: &Build<'_>,
    decoder: &Decoder<'_>,
    cache: Option<&Path>,
) -> Result<Tested, StartError> {
    let small = match Miniature::of(decoder.config, build.all_weights()) {
        Ok(small) => small,
        Err(error) => return Ok(Tested::Unknown(with_causes(&error))),
    };
    let own = small_decoder(decoder, &small);
    let recordings = Recordings::new(&own);
    let key = recordings.key();
    // An injected failure is not that of the combination.
    let cache = cache.filter(|_| own.tuning.broken_reference == 0);
    let path = cache.map(|folder| folder.join(format!("{}.tested.json", build.adapter.file_stem())));
    let mut kept = Kept::read(path.as_deref(), driver_key(build.adapter, SHADER_SET));
    if kept.passed.contains(&key) {
        return Ok(Tested::Before);
    }
    let pipelines = Pipelines::build(&build.opened.device, cache, &recordings.all(), &|_, _| {})?;
    let mut test = Test::new(build, &own, &small, &recordings, &pipelines)?;
    let outcome = test.run(&recordings)?;
    if let (Tested::Right(_), Some(path)) = (&outcome, &path) {
        kept.passed.insert(0, key);
        kept.passed.truncate(MOST_KEPT);
        if let Err(error) = kept.write(path) {
            tracing::warn!(%error, "the next start tests again: \"{}\" cannot be written", path.display());
        }
    }
    Ok(outcome)
}

/// The file of combinations that have passed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// A hash of device, driver and shaders, in hexadecimal.
    key: String,
    /// Hashes of the kernels and constants of recordings that have passed with these, the last one first.
    passed: Vec<String>,
}

impl Kept {
    /// Reads a file. One that cannot be read, or is of another driver or other shaders, counts as empty.
    fn read(path: Option<&Path>, key: u64) -> Kept {
        let key = format!("{key:016x}");
        let text = path.and_then(|path| file::read_text(path, file::SMALL).ok());
        let read = text.and_then(|text| serde_json::from_str(&text).ok());
        read.filter(|kept: &Kept| kept.key == key).unwrap_or(Kept { key, passed: Vec::new() })
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(io::Error::other)? + "\n";
        write_atomically(path, text.as_bytes())
    }
}

/// Returns the decoder of the small model, with the choices that a model's decoder has.
fn small_decoder<'a>(decoder: &Decoder<'_>, small: &'a Miniature) -> Decoder<'a> {
    let causal = small.config.causal;
    let slots = if causal { decoder.state.rows.min(*BATCHES.last().expect("there are some")) } else { 1 };
    let chunk = CHUNKS.iter().map(|(rows, _)| *rows).max().expect("there are some");
    let pages = PAGES + slots;
    let mut own = Decoder {
        config: &small.config,
        weights: &small.weights,
        stage: LayerStage::whole(&small.config),
        input_tags: BTreeMap::new(),
        max_buffer_bytes: decoder.max_buffer_bytes,
        state: StateLayout {
            slots,
            rows: slots,
            chunk,
            prompts: 1,
            sequences: 1,
            max_pages: PAGES,
            cells: small.config.is_recurrent(),
            windows: decoder.state.windows,
        },
        cells: slots,
        drafts: 0,
        drafter: None,
        pages,
        window_pages: decoder.window_pages.map(|_| pages),
        kv_format: decoder.kv_format,
        ring: RingLayout { steps: 16, rows: slots },
        context: PAGES * PAGE_TOKENS,
        tuning: decoder.tuning.clone(),
    };
    own.max_buffer_bytes = divided(decoder, &own);
    own
}

/// Returns the maximum size of a buffer of weights with which the experts of a small model are divided like those of the
/// model, among two buffers at least; the device's, if the model's are whole.
fn divided(decoder: &Decoder<'_>, small: &Decoder<'_>) -> u64 {
    if !decoder.divides_experts() {
        return decoder.max_buffer_bytes;
    }
    let bytes = |weight: &WeightSpec, rows: u32| Packing { rows, ..small.packing(weight) }.bytes();
    let halves = |weight: &WeightSpec, rows: u32| bytes(weight, (weight.rows / rows).div_ceil(2) * rows);
    let experts = || small.weights.iter().filter_map(|weight| Some((weight, small.expert_rows(weight)?)));
    let least = experts().map(|(weight, rows)| bytes(weight, rows)).max().unwrap_or(0);
    let shared = small.weights.iter().filter(|weight| weight.is_of_shared_expert());
    let least = shared.map(|weight| bytes(weight, weight.rows)).fold(least, u64::max);
    experts().map(|(weight, rows)| halves(weight, rows)).fold(decoder.max_buffer_bytes, u64::min).max(least)
}

/// A recording up to the search for the best token, and the rest. Words are drawn from the same logits on both sides.
struct Drawing {
    rows: u32,
    body: Recording,
    draw: Recording,
}

/// The recordings of the small model, with barriers between dependent calls.
struct Recordings {
    prompts: Vec<Recording>,
    /// The draw behind the prompt, then decode steps if the model draws tokens.
    drawing: Vec<Drawing>,
}

impl Recordings {
    fn new(decoder: &Decoder<'_>) -> Recordings {
        let drawing = |shape: StepShape| {
            let (body, draw) = decoder.record(shape).with_barriers().split("argmax");
            Drawing { rows: shape.rows(), body, draw }
        };
        let prompts = match decoder.config.causal {
            true => &CHUNKS[..],
            false => &CHUNKS[1..],
        };
        let prompts = prompts.iter().map(|(rows, _)| decoder.record(StepShape::Prefill { rows: *rows })).collect();
        let mut shapes = vec![StepShape::Head { rows: 1 }];
        if decoder.config.causal {
            let batches = BATCHES.iter().filter(|rows| **rows <= decoder.state.rows);
            shapes.extend(batches.map(|rows| StepShape::Decode { rows: *rows }));
        }
        Recordings { prompts, drawing: shapes.into_iter().map(drawing).collect() }
    }

    fn all(&self) -> Vec<&Recording> {
        let drawing = self.drawing.iter().flat_map(|step| [&step.body, &step.draw]);
        self.prompts.iter().chain(drawing).collect()
    }

    /// Returns a hash of the kernels and their constants, in hexadecimal.
    fn key(&self) -> String {
        let mut bytes: Vec<u8> = Vec::new();
        for op in self.all().into_iter().flat_map(|recording| &recording.ops) {
            let Op::Call(call) = op else { continue };
            bytes.extend(call.kernel.as_bytes());
            bytes.extend_from_slice(bytemuck::cast_slice(&call.constants));
        }
        format!("{:016x}", fnv(&bytes))
    }
}

/// The words of all buffers, by name.
type Memory = BTreeMap<String, Vec<u32>>;

/// Regions that copy buffers between host and device memory.
struct Copies {
    /// Copies all buffers to the device.
    all: Arc<Region>,
    /// Copies the device state to the device.
    state: Arc<Region>,
    /// Copies the buffers that recordings write to the host.
    results: Arc<Region>,
}

struct Test<'a> {
    build: &'a Build<'a>,
    decoder: &'a Decoder<'a>,
    pipelines: &'a Pipelines,
    /// The buffers in device memory, as a model's are, and for each a copy in host memory ([`COPY`]).
    table: BufferTable,
    copies: Copies,
    host: Memory,
    /// The largest difference of logits so far, relative to their norm.
    worst: f64,
}

impl<'a> Test<'a> {
    fn new(
        build: &'a Build<'a>,
        decoder: &'a Decoder<'a>,
        small: &Miniature,
        recordings: &Recordings,
        pipelines: &'a Pipelines,
    ) -> Result<Test<'a>, StartError> {
        let mut host = Memory::new();
        for placed in decoder.placed_weights() {
            let words = small.words(placed.spec, &placed.packing);
            for part in placed.parts {
                let first = (u64::from(part.first_row) * placed.packing.row_bytes() / 4) as usize;
                let own = &words[first..words.len().min(first + part.bytes.div_ceil(4) as usize)];
                host.insert(part.name, own.to_vec());
            }
        }
        let tables = decoder.placed_rope_tables().into_iter();
        host.extend(tables.map(|(name, table)| (name, table.into_iter().map(f32::to_bits).collect())));
        host.extend(decoder.placed_tables());
        let mut table = BufferTable::new();
        for (name, bytes) in buffer_sizes(&recordings.all()) {
            let words = host.entry(name.clone()).or_default();
            words.resize(bytes.div_ceil(4) as usize, 0);
            let bytes = 4 * words.len() as u64;
            table.add(build.opened.arena.buffer(&name, bytes, Place::DeviceLocal)?)?;
            table.add(build.opened.arena.buffer(&format!("{COPY}{name}"), bytes, Place::Readback)?)?;
        }
        let all = recordings.all();
        let mut results: BTreeSet<&str> = BTreeSet::new();
        for recording in &all {
            let ranges = recording.ops.iter().flat_map(written);
            results.extend(ranges.map(|range| recording.decl(range.buffer).name.as_str()));
        }
        let (mut up, mut down) = (Recording::new("reference_test.up"), Recording::new("reference_test.down"));
        for (name, bytes) in buffer_sizes(&all) {
            let bytes = 4 * bytes.div_ceil(4);
            for (recording, to_device) in [(&mut up, true), (&mut down, false)] {
                if to_device || results.contains(name.as_str()) {
                    let (on_device, copy) =
                        (recording.buffer(&name, bytes), recording.buffer(&format!("{COPY}{name}"), bytes));
                    let (from, to) = if to_device { (copy, on_device) } else { (on_device, copy) };
                    recording.ops.push(Op::Copy { from, to });
                }
            }
        }
        // Copies need no pipelines.
        let region = |of: &Recording| -> Result<Arc<Region>, StartError> {
            Ok(Arc::new(Region::build(&build.opened.device, of, &table, pipelines)?))
        };
        let mut state = Recording::new("reference_test.state");
        let bytes = decoder.state.bytes();
        let (from, to) = (state.buffer(&format!("{COPY}{STATE}"), bytes), state.buffer(STATE, bytes));
        state.ops.push(Op::Copy { from, to });
        let copies = Copies { all: region(&up)?, state: region(&state)?, results: region(&down)? };
        let test = Test { build, decoder, pipelines, table, copies, host, worst: 0.0 };
        test.upload()?;
        Ok(test)
    }

    /// Writes the host's words to the device.
    fn upload(&self) -> Result<(), StartError> {
        let tuning = &self.decoder.tuning;
        let broken = tuning.broken_reference > u32::from(tuning.fragments.is_none());
        for (name, words) in &self.host {
            let Some(buffer) = self.table.get(&format!("{COPY}{name}")) else { continue };
            match broken && name == BROKEN {
                true => buffer.write(0, bytemuck::cast_slice(&words.iter().rev().copied().collect::<Vec<u32>>())),
                false => buffer.write(0, bytemuck::cast_slice(words)),
            }
        }
        self.build.run_all(vec![vec![Arc::clone(&self.copies.all)]], &[])
    }

    /// Sets words of the device state on both sides; the device has them from its next recording on.
    fn patch(&mut self, word: u32, values: &[u32]) -> Result<(), StartError> {
        let copy = self.table.require(&format!("{COPY}{STATE}"))?;
        copy.write(4 * u64::from(word), bytemuck::cast_slice(values));
        let words = self.host.get_mut(STATE).expect("every recording has the state");
        words[word as usize..][..values.len()].copy_from_slice(values);
        Ok(())
    }

    /// Runs all steps on both sides.
    fn run(&mut self, recordings: &Recordings) -> Result<Tested, StartError> {
        let layout = self.decoder.state;
        let vocabulary = self.decoder.config.vocab;
        for slot in 0..layout.slots {
            // Some draw the best token, and others draw at random.
            let temperature = if slot % 2 == 0 { 0.0 } else { 0.8 };
            let (top_k, top_p) = ([0, 20][slot as usize / 2 % 2], [1.0, 0.9][slot as usize / 4 % 2]);
            let init = SlotInit { remaining: 64, temperature, top_k, top_p, seed: slot.into(), ..SlotInit::default() };
            self.patch(layout.slot_word(slot, 0), &init.words())?;
            self.patch(layout.slot_word(slot, state::SLOT_TOKEN), &[(slot * 97 + 1) % vocabulary])?;
            // The first sequence has several pages, and each other one has one.
            let pages: Vec<u32> = if slot == 0 { (0..PAGES).rev().collect() } else { vec![PAGES + slot - 1] };
            self.patch(layout.page_word(slot, 0), &pages)?;
            if layout.windows {
                self.patch(layout.window_word(slot, 0), &pages)?;
            }
        }
        let mut start = 0;
        let chunks = &CHUNKS[CHUNKS.len() - recordings.prompts.len()..];
        for (index, (recording, (_, count))) in recordings.prompts.iter().zip(chunks).enumerate() {
            let end = start + *count as u32;
            let tokens: Vec<u32> = (start..end).map(|at| (at * 37 + 5) % vocabulary).collect();
            let last = index + 1 == recordings.prompts.len();
            let (from, next) = ((start > 0).then_some(0), (!last).then(|| (end * 37 + 5) % vocabulary));
            let rows = PromptRows { slot: 0, start, tokens: &tokens, last, next, from, keeps: &[] };
            for (word, words) in layout.chunk_layout().describe(&[rows]) {
                self.patch(layout.chunk_word(word), &words)?;
            }
            if last {
                // What the layers of a prompt's step compute shows in the logits of its last row.
                if let Some(why) = self.compare(Some(recording), &recordings.drawing[0])? {
                    return Ok(Tested::Wrong(why));
                }
            } else {
                self.step(recording)?;
            }
            start = end;
        }
        for step in &recordings.drawing[1..] {
            for row in 0..layout.rows {
                let slot = if row < step.rows { row } else { u32::MAX };
                self.patch(layout.batch_word(row), &[slot])?;
            }
            if let Some(why) = self.compare(None, step)? {
                return Ok(Tested::Wrong(why));
            }
        }
        let steps = recordings.prompts.len() + recordings.drawing.len();
        Ok(Tested::Right(format!("{steps} steps, logits differ by {:.0e} at most", self.worst)))
    }

    /// Runs a recording on both sides.
    fn step(&mut self, recording: &Recording) -> Result<(), StartError> {
        self.on_device(recording)?;
        self.on_host(recording);
        Ok(())
    }

    fn on_device(&self, recording: &Recording) -> Result<(), StartError> {
        self.build.wanted()?;
        let region = Region::build(&self.build.opened.device, recording, &self.table, self.pipelines)?;
        let Copies { state, results, .. } = &self.copies;
        self.build.run_all(vec![vec![Arc::clone(state), Arc::new(region), Arc::clone(results)]], &[])
    }

    fn on_host(&mut self, recording: &Recording) {
        let mut memory = gather(&self.host, recording);
        interpreter::run(recording, &mut memory);
        scatter(&mut self.host, recording, memory);
    }

    /// Returns the words of a buffer of the device that recordings write.
    fn device_words(&self, name: &str) -> Result<Vec<u32>, StartError> {
        let buffer = self.table.require(&format!("{COPY}{name}"))?;
        let mut words = vec![0; self.host[name].len()];
        buffer.read(0, bytemuck::cast_slice_mut(&mut words));
        Ok(words)
    }

    /// Runs a step that draws tokens, behind the layers of a prompt if given, and compares logits and tokens. Returns what
    /// is wrong; `None` if nothing is.
    fn compare(&mut self, layers: Option<&Recording>, step: &Drawing) -> Result<Option<String>, StartError> {
        let recordings: Vec<&Recording> = layers.into_iter().chain([&step.body]).collect();
        let before = self.written_by_device(&recordings)?;
        for recording in &recordings {
            self.step(recording)?;
        }
        let found_words = self.device_words(LOGITS)?;
        let wanted = self.host[LOGITS].clone();
        let vocabulary = self.decoder.config.vocab;
        let tolerance = match self.decoder.kv_format {
            KvFormat::Int8 => TOLERANCE_INT8,
            KvFormat::F16 | KvFormat::F32 => TOLERANCE,
        };
        let width = stride(vocabulary) as usize;
        let row = |words: &[u32], row: usize| -> Vec<f64> {
            words[row * width..][..vocabulary as usize].iter().map(|word| f32::from_bits(*word).into()).collect()
        };
        for index in 0..step.rows as usize {
            let (wanted, found) = (row(&wanted, index), row(&found_words, index));
            let norm = wanted.iter().map(|x| x * x).sum::<f64>().sqrt();
            let difference = wanted.iter().zip(&found).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt() / norm;
            if difference.is_nan() || difference > tolerance {
                let Some(what) = self.culprit(before, &recordings, &found_words)? else {
                    // Each call is right for the device's own inputs: rounding has grown from call to call. Both sides
                    // now have the device's memory.
                    break;
                };
                return Ok(Some(format!(
                    "{what}; in row {index} of \"{}\" the logits differ by {:.0} % of their size",
                    step.body.name,
                    100.0 * difference
                )));
            }
            self.worst = self.worst.max(difference);
        }
        // Tokens are drawn from the device's logits, since nearly equal ones may change places.
        self.host.insert(LOGITS.to_owned(), found_words);
        self.step(&step.draw)?;
        let (found, wanted) = (self.device_words(RING)?, &self.host[RING]);
        let ring = self.decoder.ring;
        let entries = (ring.steps * ring.rows) as usize * state::ENTRY_WORDS as usize;
        let tokens = |words: &[u32]| -> Vec<Option<u32>> {
            let entries = words[..entries].chunks_exact(state::ENTRY_WORDS as usize);
            entries.map(|words| RingEntry::read(words, || [0; state::TOP_WORDS as usize]).token).collect()
        };
        if tokens(&found) != tokens(wanted) {
            return Ok(Some(format!("sample: \"{}\" draws other tokens from the same logits", step.draw.name)));
        }
        Ok(None)
    }

    /// Returns the device's words of the buffers that recordings write.
    fn written_by_device(&self, recordings: &[&Recording]) -> Result<Memory, StartError> {
        let mut memory = Memory::new();
        for recording in recordings {
            for range in recording.ops.iter().flat_map(written) {
                let name = &recording.decl(range.buffer).name;
                if !memory.contains_key(name) {
                    memory.insert(name.clone(), self.device_words(name)?);
                }
            }
        }
        Ok(memory)
    }

    /// Runs the calls of recordings one by one from the memory `before`, on both sides, each from the device's results of
    /// those before it. Returns the first call whose results differ, by kernel and label, or that the calls together gave
    /// other logits, `found`, than one by one; `None` if neither is so.
    fn culprit(
        &mut self,
        before: Memory,
        recordings: &[&Recording],
        found: &[u32],
    ) -> Result<Option<String>, StartError> {
        self.host.extend(before);
        self.upload()?;
        for recording in recordings {
            for op in &recording.ops {
                let one = Recording { ops: vec![op.clone()], ..(*recording).clone() };
                self.on_device(&one)?;
                self.on_host(&one);
                if let Op::Call(call) = op
                    && let Some(where_) = self.differs(recording, op)?
                {
                    return Ok(Some(format!("{} ({}: {where_})", call.kernel, call.label)));
                }
                for name in written(op).map(|range| &recording.decl(range.buffer).name) {
                    let words = self.device_words(name)?;
                    self.host.insert(name.clone(), words);
                }
            }
        }
        let square = |of: &dyn Fn(usize) -> f64| (0..found.len()).map(|at| of(at).powi(2)).sum::<f64>();
        let float = |words: &[u32], at: usize| f64::from(f32::from_bits(words[at]));
        let alone = &self.host[LOGITS];
        let difference = square(&|at| float(alone, at) - float(found, at));
        let same = difference <= SAME * SAME * square(&|at| float(alone, at));
        Ok((!same).then(|| "calls give other results together than one by one".to_owned()))
    }

    /// Returns where the words that an operation has written differ between both sides: the first word, if many differ noticeably,
    /// or one that is finite on the host only, which calls that read it spread over whole rows.
    fn differs(&self, recording: &Recording, op: &Op) -> Result<Option<String>, StartError> {
        for Range { buffer, offset, bytes } in written(op) {
            let name = &recording.decl(buffer).name;
            let words = (offset / 4) as usize..((offset + bytes) / 4) as usize;
            let (found, wanted) = (self.device_words(name)?, &self.host[name]);
            let (found, wanted) = (&found[words.clone()], &wanted[words]);
            // Numbers much smaller than the others may be what is left of larger ones.
            let squares = wanted.iter().map(|word| f64::from(f32::from_bits(*word)).powi(2)).filter(|x| x.is_finite());
            let small = NEGLIGIBLE * (squares.sum::<f64>() / wanted.len().max(1) as f64).sqrt() as f32;
            let floats = || found.iter().zip(wanted).map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b)));
            let apart = |(x, y): (f32, f32)| {
                let near = (x - y).abs() <= (NOTICEABLE * x.abs().max(y.abs())).max(small);
                x.to_bits() != y.to_bits() && !near && !(x.is_nan() && y.is_nan())
            };
            let written = wanted.iter().filter(|word| **word != 0).count().max(1);
            let many = floats().filter(|pair| apart(*pair)).count() as f32 > SUSPECTED * written as f32;
            let is_float = |y: f32| (1.0 / LARGE..LARGE).contains(&y.abs());
            let bad = |(x, y): (f32, f32)| if many { apart((x, y)) } else { !x.is_finite() && is_float(y) };
            if let Some((at, (x, y))) = floats().enumerate().find(|(_, pair)| bad(*pair)) {
                return Ok(Some(format!("word {at} of \"{name}\" is {x:e}, not {y:e}")));
            }
        }
        Ok(None)
    }
}

/// The prefix of the names of copies in host memory.
const COPY: &str = "reference_test.";
/// The names of buffers that the test reads.
const STATE: &str = "state";
const LOGITS: &str = "logits";
const RING: &str = "ring";
/// The weight of which a test's device has another content (`Tuning::broken_reference`).
const BROKEN: &str = "final_norm";

/// Returns the ranges that an operation writes.
fn written(op: &Op) -> impl Iterator<Item = Range> {
    op.accesses().into_iter().filter(|(_, access)| access.writes()).map(|(range, _)| range)
}

/// Returns the words of a recording's buffers.
fn gather(memory: &Memory, recording: &Recording) -> HostMemory {
    let words = |decl: &BufferDecl| memory[&decl.name][..decl.bytes.div_ceil(4) as usize].to_vec();
    HostMemory { buffers: recording.buffers.iter().map(words).collect() }
}

fn scatter(memory: &mut Memory, recording: &Recording, host: HostMemory) {
    for (decl, words) in recording.buffers.iter().zip(host.buffers) {
        memory.get_mut(&decl.name).expect("it was gathered")[..words.len()].copy_from_slice(&words);
    }
}

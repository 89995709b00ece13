//! Writes checkpoints with random weights in Hugging Face layout: shapes of released models for benchmarks, tiny ones
//! for tests. Each weight depends only on the seed, the tensor's name and the element's index, not on threads or
//! shards. Unlike the rest of `model`, this module writes files and uses threads.

pub mod miniature;
mod presets;
mod quantised;
mod tensors;

use crate::model::python_json;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use serde_json::{Map, Value, json};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use super::config::{Dtype, ModelConfig, ModelConfigError};
use super::gguf::write::WriteError;
use super::split_mix::{GAMMA, mix};
use crate::quant::store::StoredType;
pub use presets::{PRESETS, Preset, preset, with_layers};
pub use quantised::quantise;
use tensors::{Distribution, tensors_of};

/// The number of bytes that a thread fills and writes at a time: large enough to make the cost of system calls
/// negligible, small enough to stay in a cache.
const CHUNK_BYTES: u64 = 1 << 20;
/// The maximum default number of threads. More do not make a disk faster.
const MAX_THREADS: usize = 16;

/// Options for writing a checkpoint.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    /// The seed; equal seeds give equal weights.
    pub seed: u64,
    /// The element type of the weights. `None`: the type in config.json, otherwise bf16.
    pub dtype: Option<Dtype>,
    /// The maximum bytes of tensor data in a shard. A tensor is never divided, so one that is larger gets a shard of
    /// its own.
    pub shard_bytes: u64,
    /// The number of threads. `None`: one per core, at least 2 and at most 16.
    pub threads: Option<usize>,
}

impl Default for SynthOptions {
    fn default() -> SynthOptions {
        SynthOptions { seed: 0, dtype: None, shard_bytes: 4 << 30, threads: None }
    }
}

/// A summary of the written checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The size of all tensors in bytes.
    pub bytes: u64,
    /// The paths of the safetensors files.
    pub shards: Vec<PathBuf>,
    /// Whether a tokenizer was written; it is not if the vocabulary is too small for one.
    pub tokenizer: bool,
}

/// The reason why a checkpoint could not be written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// There is no quantised format with this name.
    #[error("quantised type \"{0}\" is not known ({known} are)", known = StoredType::ALL.map(StoredType::name).join(", "))]
    UnknownType(String),
    /// The checkpoint that is quantised cannot be read.
    #[error("the checkpoint cannot be quantised: {0}")]
    Source(String),
    /// The GGUF file cannot be written.
    #[error(transparent)]
    Gguf(#[from] WriteError),
    /// There is no preset with this name.
    #[error("architecture \"{0}\" is not known ({known} are)", known = PRESETS.map(|(name, _)| name).join(", "))]
    UnknownArch(String),
    /// The caller gave both an architecture and a config.json, or neither.
    #[error("give either an architecture or a config.json")]
    Shape,
    /// The configuration cannot be run.
    #[error("{} cannot be used: {source}", path.display())]
    Config {
        /// The file, or the preset's name.
        path: PathBuf,
        /// The cause.
        source: ModelConfigError,
    },
    /// config.json could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The directory already holds a checkpoint.
    #[error("{} exists already; choose an empty directory", .0.display())]
    Occupied(PathBuf),
    /// The operating system reported an error, for example that the disk is full.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The tokenizer could not be built.
    #[error("cannot make a tokenizer: {0}")]
    Tokenizer(String),
}

impl SynthError {
    /// Whether the caller can fix the error (arguments and files), as opposed to a bug of this program.
    pub fn is_callers(&self) -> bool {
        !matches!(self, SynthError::Tokenizer(_))
    }
}

/// Writes a checkpoint with the shape given by `config_json` into `out`. The directory is created if necessary and must
/// not contain a checkpoint. `progress` is called from time to time with the bytes written and the total bytes.
/// config.json is written last, so that a directory that contains it is complete. If writing fails, the files written
/// so far are removed.
pub fn write(
    config_json: &str,
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Written, SynthError> {
    files(config_json, out, options, Some(progress)).map(|(written, _)| written)
}

/// Writes the checkpoint that [`write()`] writes, but for the weights: the safetensors files have their headers and their
/// lengths, and holes, which take no space, where the weights are. The weights are computed where they are read, so that
/// a checkpoint can be written in another format without being written in this one.
pub fn outline(config_json: &str, out: &Path, options: &SynthOptions) -> Result<(Written, RandomWeights), SynthError> {
    files(config_json, out, options, None)
}

/// Writes a checkpoint; without `progress`, its outline.
fn files(
    config_json: &str,
    out: &Path,
    options: &SynthOptions,
    progress: Option<&mut dyn FnMut(u64, u64)>,
) -> Result<(Written, RandomWeights), SynthError> {
    let named = |source| SynthError::Config { path: "config.json".into(), source };
    let config = ModelConfig::parse(config_json, None).map_err(named)?;
    let dtype = options.dtype.or(config.dtype).unwrap_or(Dtype::Bf16);
    std::fs::create_dir_all(out).map_err(|source| SynthError::Write { path: out.to_owned(), source })?;
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        if out.join(name).exists() {
            return Err(SynthError::Occupied(out.join(name)));
        }
    }

    let plan = Plan::new(&config, root(config_json), dtype, options.shard_bytes);
    let weights = RandomWeights::new(&plan, options.seed);
    let small = small_files(config_json, &config, dtype, &plan)?;
    let mut guard = RemoveOnDrop { paths: Vec::new() };
    let mut shards = Vec::new();
    for (name, shard) in plan.names().into_iter().zip(&plan.shards) {
        let path = out.join(name);
        guard.paths.push(path.clone());
        let opened = File::create_new(&path).and_then(|file| {
            file.write_all_at(&shard.header, 0)?;
            file.set_len(shard.header.len() as u64 + shard.bytes)?;
            Ok(file)
        });
        let file = opened.map_err(|source| SynthError::Write { path: path.clone(), source })?;
        shards.push((path, file));
    }
    if let Some(progress) = progress {
        fill(&plan, &weights, &shards, options.threads, progress)?;
    }
    let tokenizer = small.iter().any(|(name, _)| *name == "tokenizer.json");
    for (name, contents) in small {
        let path = out.join(name);
        guard.paths.push(path.clone());
        std::fs::write(&path, contents).map_err(|source| SynthError::Write { path, source })?;
    }
    guard.paths.clear();
    let written = Written {
        parameters: plan.bytes / dtype.bytes(),
        bytes: plan.bytes,
        shards: shards.into_iter().map(|(path, _)| path).collect(),
        tokenizer,
    };
    Ok((written, weights))
}

/// The key of config.json under which a multimodal model has the configuration of its text model. The tensor names of
/// such a model begin with another prefix, see [`root`].
const TEXT: &str = "text_config";

/// Returns the prefix of the tensor names, except those of the LM head and of the multi-token-prediction (MTP) blocks.
fn root(config_json: &str) -> &'static str {
    match python_json::parse(config_json) {
        Ok(config) if config.get(TEXT).is_some_and(Value::is_object) => "model.language_model.",
        _ => "model.",
    }
}

/// Files that are removed when this is dropped, unless the list was cleared.
struct RemoveOnDrop {
    paths: Vec<PathBuf>,
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        for path in &self.paths {
            // Best effort: a failure to remove a file has no remedy here.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// One tensor and its location.
#[derive(Clone, Debug)]
struct Planned {
    name: String,
    shape: Vec<u64>,
    spread: Distribution,
    /// Byte offset in its file; see [`Shard::new`].
    offset: u64,
    bytes: u64,
}

/// One safetensors file.
struct Shard {
    header: Vec<u8>,
    /// The size in bytes of the data that follows the header.
    bytes: u64,
    tensors: Vec<Planned>,
}

/// The contents of the whole checkpoint.
struct Plan {
    dtype: Dtype,
    shards: Vec<Shard>,
    bytes: u64,
}

impl Plan {
    fn new(config: &ModelConfig, root: &str, dtype: Dtype, shard_bytes: u64) -> Plan {
        let mut shards = Vec::new();
        let mut tensors: Vec<Planned> = Vec::new();
        let mut filled = 0;
        let mut total = 0;
        for (name, shape, spread) in tensors_of(config, root) {
            let bytes = shape.iter().product::<u64>() * dtype.bytes();
            if filled + bytes > shard_bytes && !tensors.is_empty() {
                shards.push(Shard::new(std::mem::take(&mut tensors), filled, dtype));
                filled = 0;
            }
            tensors.push(Planned { name, shape, spread, offset: filled, bytes });
            filled += bytes;
            total += bytes;
        }
        shards.push(Shard::new(tensors, filled, dtype));
        Plan { dtype, shards, bytes: total }
    }

    fn names(&self) -> Vec<String> {
        match self.shards.len() {
            1 => vec!["model.safetensors".to_owned()],
            n => (1..=n).map(|i| format!("model-{i:05}-of-{n:05}.safetensors")).collect(),
        }
    }

    /// Returns the text of model.safetensors.index.json, or `None` if there is only one shard.
    fn index(&self) -> Option<String> {
        let names = self.names();
        let map: BTreeMap<&str, &str> = self
            .shards
            .iter()
            .zip(&names)
            .flat_map(|(shard, file)| shard.tensors.iter().map(|tensor| (tensor.name.as_str(), file.as_str())))
            .collect();
        let index = json!({"metadata": {"total_size": self.bytes}, "weight_map": map});
        (names.len() > 1).then(|| format!("{index:#}\n"))
    }
}

impl Shard {
    /// Builds the header. `tensors` come with offsets that count from the start of the data; the shard stores offsets
    /// that count from the start of the file.
    fn new(mut tensors: Vec<Planned>, bytes: u64, dtype: Dtype) -> Shard {
        let mut entries = Map::new();
        entries.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        for tensor in &tensors {
            let entry = json!({
                "dtype": dtype.safetensors_name(),
                "shape": tensor.shape,
                "data_offsets": [tensor.offset, tensor.offset + tensor.bytes],
            });
            entries.insert(tensor.name.clone(), entry);
        }
        let mut json = Value::Object(entries).to_string();
        // Pad the header so that the data begins at a multiple of 8.
        json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json.as_bytes());
        for tensor in &mut tensors {
            tensor.offset += header.len() as u64;
        }
        Shard { header, bytes, tensors }
    }
}

/// The weights of a random checkpoint, without memory of their own.
#[derive(Debug)]
pub struct RandomWeights {
    /// The size of an element in bytes.
    size: u64,
    tables: Vec<(Distribution, Table)>,
    /// By the tensor's name: its bytes, the start of its random sequence, and the index of its table.
    tensors: BTreeMap<String, (u64, u64, usize)>,
}

impl RandomWeights {
    fn new(plan: &Plan, seed: u64) -> RandomWeights {
        let (mut tables, mut tensors) = (Vec::<(Distribution, Table)>::new(), BTreeMap::new());
        for tensor in plan.shards.iter().flat_map(|shard| &shard.tensors) {
            let table = tables.iter().position(|(spread, _)| *spread == tensor.spread).unwrap_or_else(|| {
                tables.push((tensor.spread, Table::new(plan.dtype, tensor.spread)));
                tables.len() - 1
            });
            tensors.insert(tensor.name.clone(), (tensor.bytes, key(seed, &tensor.name), table));
        }
        RandomWeights { size: plan.dtype.bytes(), tables, tensors }
    }

    /// Computes bytes of a tensor, from byte `begin` on, which begins an element. Returns false if there is no such
    /// tensor, or if it has fewer bytes.
    pub fn read(&self, tensor: &str, begin: u64, bytes: &mut [u8]) -> bool {
        let Some(&(all, key, table)) = self.tensors.get(tensor) else { return false };
        if begin.checked_add(bytes.len() as u64).is_none_or(|end| end > all) {
            return false;
        }
        let (table, group) = (&self.tables[table].1, 4 * self.size);
        let skipped = (begin % group) as usize;
        if skipped == 0 {
            table.fill(key, begin / group, bytes);
        } else {
            // Four elements share a hash, so the first of them are computed too.
            let mut whole = vec![0; skipped + bytes.len()];
            table.fill(key, begin / group, &mut whole);
            bytes.copy_from_slice(&whole[skipped..]);
        }
        true
    }
}

/// A part of one tensor that is filled and written at a time.
struct Piece<'a> {
    file: &'a File,
    path: &'a Path,
    tensor: &'a Planned,
    /// Byte offset within the tensor; a multiple of [`CHUNK_BYTES`].
    begin: u64,
    bytes: u64,
}

/// Fills every tensor, in parallel.
fn fill(
    plan: &Plan,
    weights: &RandomWeights,
    shards: &[(PathBuf, File)],
    threads: Option<usize>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let mut pieces = Vec::new();
    for (shard, (path, file)) in plan.shards.iter().zip(shards) {
        let mut of_shard = 0;
        for tensor in &shard.tensors {
            for begin in (0..tensor.bytes).step_by(CHUNK_BYTES as usize) {
                let bytes = CHUNK_BYTES.min(tensor.bytes - begin);
                pieces.push((of_shard, Piece { file, path, tensor, begin, bytes }));
                of_shard += 1;
            }
        }
    }
    // Interleave the shards, because concurrent writers of one file wait for each other in the kernel.
    pieces.sort_by_key(|(of_shard, _)| *of_shard);
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let threads = threads.unwrap_or(cores.clamp(2, MAX_THREADS)).max(1);
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    // The channel is bounded so that the reported progress does not lag behind what was written.
    let (sender, receiver) = mpsc::sync_channel::<Result<u64, SynthError>>(4 * threads);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next, stop, pieces) = (sender.clone(), &next, &stop, &pieces);
            scope.spawn(move || {
                let mut buffer = vec![0; CHUNK_BYTES as usize];
                while let Some((_, piece)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let buffer = &mut buffer[..piece.bytes as usize];
                    weights.read(&piece.tensor.name, piece.begin, buffer);
                    let written = piece.file.write_all_at(buffer, piece.tensor.offset + piece.begin);
                    let result = written
                        .map(|()| piece.bytes)
                        .map_err(|source| SynthError::Write { path: piece.path.to_owned(), source });
                    if sender.send(result).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut done = 0;
        let mut failed = None;
        for result in receiver {
            match result {
                Ok(bytes) => {
                    done += bytes;
                    progress(done, plan.bytes);
                }
                Err(error) => {
                    stop.store(true, Ordering::Relaxed);
                    failed.get_or_insert(error);
                }
            }
        }
        failed.map_or(Ok(()), Err)
    })
}

/// The number of discrete values that approximate a distribution.
const LEVELS: usize = 4096;

/// The discrete values in a storage format. Random bits select one, so that a weight costs a quarter of a hash and one
/// lookup in a table that fits in the L1 cache.
#[derive(Debug)]
enum Table {
    Two(Box<[u16; LEVELS]>),
    Four(Box<[u32; LEVELS]>),
}

impl Table {
    fn new(dtype: Dtype, spread: Distribution) -> Table {
        let level = |i: usize| {
            let share = (i as f64 + 0.5) / LEVELS as f64;
            match spread {
                Distribution::Normal { mean, deviation } => mean + deviation * quantile(share) as f32,
                Distribution::LogOfUniform { low, high } => (low + (high - low) * share as f32).ln(),
            }
        };
        match dtype {
            Dtype::Bf16 => Table::Two(Box::new(std::array::from_fn(|i| half::bf16::from_f32(level(i)).to_bits()))),
            Dtype::F16 => Table::Two(Box::new(std::array::from_fn(|i| half::f16::from_f32(level(i)).to_bits()))),
            Dtype::F32 => Table::Four(Box::new(std::array::from_fn(|i| level(i).to_bits()))),
        }
    }

    /// Fills the buffer with elements, starting with element `4 * first_word`. Four consecutive elements share one
    /// hash.
    fn fill(&self, key: u64, first_word: u64, buffer: &mut [u8]) {
        let mut word = first_word;
        let mut lanes = || {
            let bits = mix(key.wrapping_add(word.wrapping_mul(GAMMA)));
            word = word.wrapping_add(1);
            [0, 16, 32, 48].map(|shift| (bits >> shift) as usize % LEVELS)
        };
        match self {
            Table::Two(levels) => {
                let mut packed = || {
                    let [a, b, c, d] = lanes().map(|lane| u64::from(levels[lane]));
                    (a | b << 16 | c << 32 | d << 48).to_le_bytes()
                };
                let (whole, rest) = buffer.as_chunks_mut::<8>();
                whole.iter_mut().for_each(|out| *out = packed());
                rest.copy_from_slice(&packed()[..rest.len()]);
            }
            Table::Four(levels) => {
                let mut packed = || {
                    let [a, b, c, d] = lanes().map(|lane| u128::from(levels[lane]));
                    (a | b << 32 | c << 64 | d << 96).to_le_bytes()
                };
                let (whole, rest) = buffer.as_chunks_mut::<16>();
                whole.iter_mut().for_each(|out| *out = packed());
                rest.copy_from_slice(&packed()[..rest.len()]);
            }
        }
    }
}

/// Returns the start of a tensor's random sequence.
fn key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed.wrapping_add(GAMMA)), |key, byte| mix(key.wrapping_mul(GAMMA) ^ u64::from(byte)))
}

/// Returns the quantile of the standard normal distribution at `p` (Acklam's rational approximation, relative error
/// 1e-9).
fn quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969683028665376e+01,
        2.209460984245205e+02,
        -2.759285104469687e+02,
        1.38357751867269e+02,
        -3.066479806614716e+01,
        2.506628277459239e+00,
    ];
    const B: [f64; 5] = [
        -5.447609879822406e+01,
        1.615858368580409e+02,
        -1.556989798598866e+02,
        6.680131188771972e+01,
        -1.328068155288572e+01,
    ];
    const C: [f64; 6] = [
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838e+00,
        -2.549732539343734e+00,
        4.374664141464968e+00,
        2.938163982698783e+00,
    ];
    const D: [f64; 4] = [7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00, 3.754408661907416e+00];
    let polynomial = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    if p > 0.5 {
        return -quantile(1.0 - p);
    }
    if p < 0.02425 {
        let q = (-2.0 * p.ln()).sqrt();
        return polynomial(&C, q) / (polynomial(&D, q) * q + 1.0);
    }
    let q = p - 0.5;
    let r = q * q;
    polynomial(&A, r) * q / (polynomial(&B, r) * r + 1.0)
}

/// Returns the names and contents of all files except the weights, in the order of writing; config.json is last.
fn small_files(
    config_json: &str,
    config: &ModelConfig,
    dtype: Dtype,
    plan: &Plan,
) -> Result<Vec<(&'static str, String)>, SynthError> {
    let mut files = Vec::new();
    if let Some(index) = plan.index() {
        files.push(("model.safetensors.index.json", index));
    }
    if let Some(ids) = TokenIds::new(config) {
        files.push(("tokenizer.json", ids.tokenizer().map_err(|error| SynthError::Tokenizer(error.to_string()))?));
        files.push(("tokenizer_config.json", ids.tokenizer_config(config)));
    }
    let mut generation = Map::new();
    if let Some(bos) = config.bos {
        generation.insert("bos_token_id".to_owned(), bos.into());
    }
    if !config.eos.is_empty() {
        generation.insert("eos_token_id".to_owned(), config.eos.clone().into());
    }
    files.push(("generation_config.json", format!("{:#}\n", Value::Object(generation))));

    // The text has been parsed before, so this cannot fail. Only the element type may change.
    let mut config = match python_json::parse(config_json) {
        Ok(Value::Object(config)) => config,
        _ => Map::new(),
    };
    let written = match config.get_mut(TEXT) {
        Some(Value::Object(text)) => text,
        _ => &mut config,
    };
    let key = if written.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    written.insert(key.to_owned(), dtype.config_name().into());
    files.push(("config.json", format!("{:#}\n", Value::Object(config))));
    Ok(files)
}

const END_OF_TEXT: &str = "<|endoftext|>";
const TURN_BEGIN: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";

const CHAT_TEMPLATE: &str = "{%- for message in messages %}\n\
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n\
    {%- endfor %}\n\
    {%- if add_generation_prompt %}\n\
    {{- '<|im_start|>assistant\\n' }}\n\
    {%- endif %}\n";

/// The ids of a tokenizer with 256 byte tokens and three special tokens. The end-of-turn and end-of-text tokens take
/// the configuration's end-of-sequence and beginning-of-sequence ids if it names them; the others take the lowest free
/// ids.
struct TokenIds {
    bytes: Vec<u32>,
    end_of_text: u32,
    turn_begin: u32,
    turn_end: u32,
}

impl TokenIds {
    /// Returns `None` if the vocabulary is too small.
    fn new(config: &ModelConfig) -> Option<TokenIds> {
        let turn_end = config.eos.first().copied();
        let end_of_text = config.bos.filter(|bos| Some(*bos) != turn_end);
        let mut free = (0..config.vocab).filter(|id| Some(*id) != turn_end && Some(*id) != end_of_text);
        let bytes: Vec<u32> = free.by_ref().take(256).collect();
        if bytes.len() < 256 {
            return None;
        }
        Some(TokenIds {
            bytes,
            end_of_text: end_of_text.or_else(|| free.next())?,
            turn_begin: free.next()?,
            turn_end: turn_end.or_else(|| free.next())?,
        })
    }

    fn tokenizer(&self) -> tokenizers::Result<String> {
        let special = [(END_OF_TEXT, self.end_of_text), (TURN_BEGIN, self.turn_begin), (TURN_END, self.turn_end)];
        let mut characters = byte_characters().zip(&self.bytes);
        let vocabulary: [(String, u32); 256 + 3] = std::array::from_fn(|i| match characters.next() {
            Some((character, id)) => (character.to_string(), *id),
            None => (special[i - 256].0.to_owned(), special[i - 256].1),
        });
        let bpe = BPE::builder().vocab_and_merges(vocabulary, Vec::new()).build()?;
        let mut tokenizer = Tokenizer::new(bpe);
        let byte_level = ByteLevel::default().add_prefix_space(false);
        tokenizer.with_pre_tokenizer(Some(byte_level));
        tokenizer.with_decoder(Some(byte_level));
        tokenizer.add_special_tokens(special.map(|(token, _)| AddedToken::from(token, true)))?;
        tokenizer.to_string(true)
    }

    fn tokenizer_config(&self, config: &ModelConfig) -> String {
        let mut object = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
            "model_max_length": config.context,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "chat_template": CHAT_TEMPLATE,
        });
        if config.bos == Some(self.end_of_text) {
            object["bos_token"] = END_OF_TEXT.into();
        }
        format!("{object:#}\n")
    }
}

/// Returns, for each byte in order, the visible character that represents it in a byte-level vocabulary: printable
/// Latin-1 characters represent themselves, the others are numbered from U+0100.
fn byte_characters() -> impl Iterator<Item = char> {
    let mut next = 0x100;
    (0..=255u32).map(move |byte| {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable {
            byte
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).expect("below U+0180 everything is a character")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_released_sizes() {
        let parameters = |name: &str| {
            let config = ModelConfig::parse(&preset(name).unwrap(), None).unwrap();
            Plan::new(&config, "model.", Dtype::Bf16, u64::MAX).bytes / 2
        };
        // As counted by transformers for the released checkpoints.
        assert_eq!(parameters("qwen3-0.6b"), 596_049_920);
        assert_eq!(parameters("qwen3-1.7b"), 1_720_574_976);
        assert_eq!(parameters("qwen3-4b"), 4_022_468_096);
        assert_eq!(parameters("qwen3-8b"), 8_190_735_360);
        assert_eq!(parameters("llama-3.2-1b"), 1_235_814_400);
        assert_eq!(parameters("llama-3.1-8b"), 8_030_261_248);
        // As counted by transformers for the text models of these shapes, plus one multi-token-prediction (MTP) block:
        // a layer with full attention, two more norms than a layer has, the final norm, and the projection of two
        // concatenated rows to one.
        assert_eq!(parameters("qwen3.5-0.8b"), 772_845_888);
        assert_eq!(parameters("qwen3.5-2b"), 1_942_653_248);
        assert_eq!(parameters("qwen3.5-4b"), 4_326_350_848);
        assert_eq!(parameters("qwen3.5-9b"), 9_197_093_888);
        assert_eq!(parameters("qwen3.5-35b-a3b"), 35_505_251_456);
        assert_eq!(parameters("qwen3-next-80b-a3b"), 81_324_862_720);
        assert_eq!(parameters("qwen3-30b-a3b"), 30_532_122_624);
        let error = preset("qwen9").unwrap_err().to_string();
        assert!(error.contains("\"qwen9\"") && error.contains("tiny-llama"), "{error}");
    }

    #[test]
    fn weights_are_normal_around_their_mean() {
        let spread = Distribution::Normal { mean: 1.0, deviation: 0.25 };
        let mut buffer = vec![0; 4 * 100_000];
        Table::new(Dtype::F32, spread).fill(key(1, "x"), 0, &mut buffer);
        let values: Vec<f64> = buffer.chunks(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt();
        let within = values.iter().filter(|v| (*v - 1.0).abs() < 0.25).count() as f64 / n;
        assert!((mean - 1.0).abs() < 0.004, "{mean}");
        assert!((deviation - 0.25).abs() < 0.004, "{deviation}");
        assert!((within - 0.6827).abs() < 0.006, "{within}");
        // Neighbouring elements, which may share a hash, are uncorrelated.
        let pairs = values.windows(2).map(|w| (w[0] - 1.0) * (w[1] - 1.0)).sum::<f64>() / n / 0.0625;
        assert!(pairs.abs() < 0.015, "{pairs}");
    }

    /// Goal: the recurrent states of random hybrids decay slowly enough to carry information over several tokens.
    /// Method: draw the decay factor of one step, `exp(-exp(A_log) * softplus(a + dt_bias))`, where `a` is the
    /// projection of a normalised input, and check that most draws are between 0.8 and 0.999.
    #[test]
    fn states_of_random_hybrids_last_for_some_tokens() {
        let config = ModelConfig::parse(&preset("qwen3.5-0.8b").unwrap(), None).unwrap();
        let spread = |end: &str| {
            let found = tensors_of(&config, "model.").into_iter().find(|(name, ..)| name.ends_with(end));
            found.map(|(.., spread)| spread).unwrap_or_else(|| panic!("{end}"))
        };
        let draw = |spread: Distribution, seed: u64| -> Vec<f32> {
            let mut buffer = vec![0; 4 * 4096];
            Table::new(Dtype::F32, spread).fill(key(seed, "x"), 0, &mut buffer);
            buffer.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let Distribution::Normal { deviation, .. } = spread("in_proj_a.weight") else {
            panic!("a projection is normal")
        };
        let a = draw(Distribution::Normal { mean: 0.0, deviation: deviation * (config.hidden as f32).sqrt() }, 1);
        let (a_log, bias) = (draw(spread("A_log"), 2), draw(spread("dt_bias"), 3));
        assert!(a_log.iter().all(|x| (0.0..16f32.ln()).contains(x)));
        let kept = a.iter().zip(&a_log).zip(&bias).map(|((a, a_log), bias)| {
            let softplus = (a + bias).exp().ln_1p();
            (-a_log.exp() * softplus).exp()
        });
        let kept: Vec<f32> = kept.collect();
        let within = kept.iter().filter(|kept| (0.8..0.999).contains(*kept)).count() as f64 / kept.len() as f64;
        assert!(within > 0.9, "{within}");
        assert!(kept.iter().any(|kept| *kept < 0.8) && kept.iter().any(|kept| *kept > 0.99));
    }

    #[test]
    fn pieces_and_formats_agree() {
        let spread = Distribution::Normal { mean: 0.0, deviation: 0.02 };
        let (table, wide) = (Table::new(Dtype::Bf16, spread), Table::new(Dtype::F32, spread));
        let mut whole = vec![0; 2 * 1001];
        table.fill(7, 0, &mut whole);
        let mut part = vec![0; 2 * 201];
        table.fill(7, 200, &mut part);
        assert_eq!(part[..], whole[2 * 800..]);
        let mut single = vec![0; 4 * 1001];
        wide.fill(7, 0, &mut single);
        for (narrow, wide) in whole.chunks(2).zip(single.chunks(4)) {
            let wide = f32::from_le_bytes(wide.try_into().unwrap());
            assert_eq!(u16::from_le_bytes(narrow.try_into().unwrap()), half::bf16::from_f32(wide).to_bits());
        }
        let mut other = vec![0; 2 * 1001];
        table.fill(8, 0, &mut other);
        assert_ne!(whole, other);
    }

    /// Goal: a checkpoint that is written in another format from an outline has the bytes of one that is written from
    /// the whole checkpoint. Method: both, for a shape with awkward sizes, in two formats of safetensors and as GGUF
    /// files; parts of tensors that begin at any element are compared with the whole ones.
    #[test]
    fn outlines_give_the_files_of_whole_checkpoints() {
        use crate::model::gguf::write::{FileType, convert, convert_outline};
        let folder = tempfile::tempdir().unwrap();
        let mut config: Map<String, Value> = serde_json::from_str(&preset("tiny-qwen3-moe").unwrap()).unwrap();
        config.insert("vocab_size".into(), 301.into());
        let config = Value::Object(config).to_string();
        let options = SynthOptions { shard_bytes: 300_000, ..SynthOptions::default() };
        let (whole, hollow) = (folder.path().join("whole"), folder.path().join("hollow"));
        write(&config, &whole, &options, &mut |_, _| {}).unwrap();
        let (_, weights) = outline(&config, &hollow, &options).unwrap();

        let mut tensor = vec![0; 2 * 301 * 128];
        assert!(weights.read("model.embed_tokens.weight", 0, &mut tensor));
        for (begin, length) in [(2, 2), (6, 100), (8, 7 * 2), (2 * 301 * 128 - 10, 10)] {
            let mut part = vec![0; length];
            assert!(weights.read("model.embed_tokens.weight", begin as u64, &mut part));
            assert_eq!(part, tensor[begin..begin + length]);
        }
        assert!(!weights.read("model.embed_tokens.weight", 2 * 301 * 128 - 8, &mut [0; 10]));
        assert!(!weights.read("model.none.weight", 0, &mut [0; 2]));

        for kind in [StoredType::Fp8Channel, StoredType::Awq] {
            let [from_whole, from_hollow] = [(&whole, None), (&hollow, Some(&weights))].map(|(from, weights)| {
                let out = folder.path().join(format!("{}-{}", kind.name(), weights.is_some()));
                quantise(from, weights, &out, kind, 200_000, 2, &|_, _| {}).unwrap();
                let mut files: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()).collect();
                files.sort();
                files.iter().map(|path| (path.file_name().unwrap().to_owned(), std::fs::read(path).unwrap())).collect()
            });
            let (from_whole, from_hollow): (Vec<_>, Vec<_>) = (from_whole, from_hollow);
            assert!(from_whole.len() > 4 && from_whole == from_hollow, "{}", kind.name());
        }
        for name in ["BF16", "Q4_K_M"] {
            let (from_whole, from_hollow) = (folder.path().join("whole.gguf"), folder.path().join("hollow.gguf"));
            convert(&whole, &from_whole, FileType::from_name(name).unwrap(), 2).unwrap();
            let read = |tensor: &str, begin: u64, bytes: &mut [u8]| weights.read(tensor, begin, bytes);
            convert_outline(&hollow, &read, &from_hollow, FileType::from_name(name).unwrap(), 2).unwrap();
            assert!(std::fs::read(from_whole).unwrap() == std::fs::read(from_hollow).unwrap(), "{name}");
        }
    }

    #[test]
    fn quantiles() {
        for (p, z) in [(0.5, 0.0), (0.975, 1.959_963_985), (0.001, -3.090_232_306), (0.8413447461, 1.0)] {
            assert!((quantile(p) - z).abs() < 1e-6, "{p}: {}", quantile(p));
        }
    }

    #[test]
    fn a_vocabulary_without_room_has_no_tokenizer() {
        let with_vocab = |vocab: u32, eos: Value| {
            let mut config: Map<String, Value> = serde_json::from_str(&preset("tiny-llama").unwrap()).unwrap();
            config.insert("vocab_size".into(), vocab.into());
            config.insert("eos_token_id".into(), eos);
            config.insert("bos_token_id".into(), 1.into());
            ModelConfig::parse(&Value::Object(config).to_string(), None).unwrap()
        };
        assert!(TokenIds::new(&with_vocab(258, json!(2))).is_none());
        let ids = TokenIds::new(&with_vocab(259, json!(2))).unwrap();
        assert_eq!((ids.end_of_text, ids.turn_end, ids.turn_begin), (1, 2, 258));
        assert_eq!(ids.bytes[..3], [0, 3, 4]);
        let ids = TokenIds::new(&with_vocab(259, json!(1))).unwrap();
        assert_eq!((ids.turn_end, ids.end_of_text, ids.turn_begin), (1, 257, 258));
    }
}

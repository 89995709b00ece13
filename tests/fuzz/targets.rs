//! The fuzz targets: one function for each kind of external input. None may panic, hang or use unbounded memory on any
//! bytes. The fuzzer's binaries and `tests/tree/regressions.rs` call the same functions. Not here: which result is correct;
//! the ordinary tests check that.

#[path = "constraints.rs"]
mod constraints;
#[path = "weights.rs"]
mod weights;

pub use weights::weights;

use ostinato::actors::workers::{self, Cancel};
use ostinato::config::{KvFormat, Sources, from_sources};
use ostinato::engine::fake::{FakeConfig, FakeExecutor};
use ostinato::host::{Host, ModelInfo, ServedModel};
use ostinato::model::checkpoint::Checkpoint;
use ostinato::model::config::ModelConfig;
use ostinato::model::gguf;
use ostinato::model::gguf::container::Header;
use ostinato::model::gguf::split::GgufFiles;
use ostinato::model::grammar::{GrammarError, Grammars, Next, bit};
use ostinato::model::text::Text;
use ostinato::model::text::chat::{ChatMessage, ChatOptions};
use ostinato::replica::ReplicaConfig;
use ostinato::replica::{DeviceInfo, Replica};
use ostinato::service::prepare::{self, Prepared};
use ostinato::service::proto::{self, vllm::grpc::engine as contract};
use ostinato::service::refusal::{Refusal, status};
use ostinato::service::vllm::convert;
use prost::Message;
use std::cell::Cell;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use tempfile::TempDir;

/// The name of a target and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets, under the names of their binaries.
pub const TARGETS: [Target; 11] = [
    ("safetensors", safetensors),
    ("gguf", gguf),
    ("gguf_split", gguf_split),
    ("weights", weights),
    ("model_config", model_config),
    ("tokenizer", tokenizer),
    ("chat", chat),
    ("constraint", constraint),
    ("configuration", configuration),
    ("generate", generate),
    ("vllm_generate", vllm_generate),
];

thread_local! {
    /// Whether this thread is currently in a library whose panics the service turns into errors.
    pub static READING: Cell<bool> = const { Cell::new(false) };
}

const TOKENIZER: &[u8] = include_bytes!("../../demo/model/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../../demo/model/tokenizer_config.json");
const MODEL_CONFIG: &[u8] = include_bytes!("../../demo/model/config.json");

/// Returns a new folder, in memory if possible, because targets write their input thousands of times a second.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a folder")
}

/// Returns a new folder that contains a file with these bytes and the other given files.
fn with_file(name: &str, bytes: &[u8], others: &[(&str, &[u8])]) -> TempDir {
    let folder = folder();
    for (name, bytes) in others.iter().copied().chain([(name, bytes)]) {
        std::fs::write(folder.path().join(name), bytes).expect("a file");
    }
    folder
}

/// The weights file of a checkpoint: its header is parsed and checked against the configuration.
pub fn safetensors(bytes: &[u8]) {
    let folder = with_file("model.safetensors", bytes, &[("config.json", MODEL_CONFIG)]);
    if let Err(error) = Checkpoint::open(folder.path()) {
        assert!(!error.to_string().is_empty());
    }
}

/// A GGUF file: its header becomes a configuration, tensors and a tokenizer, first one by one, as far as each comes, and
/// then as a checkpoint and a text.
pub fn gguf(bytes: &[u8]) {
    gguf::fuzz(bytes);
    if Header::parse(bytes, bytes.len() as u64).is_err() {
        // No load comes further.
        return;
    }
    let folder = with_file("model.gguf", bytes, &[]);
    let file = folder.path().join("model.gguf");
    let opened = Checkpoint::open(&file);
    if let Err(error) = &opened {
        assert!(!error.to_string().is_empty());
    }
    READING.set(true);
    let text = Text::load(&file);
    READING.set(false);
    match text {
        Ok(Some(text)) => drop(text.encode("It's 12 o'clock.\n\n  Grüße \u{1f98a}", true)),
        Ok(None) => {}
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A model that is split into two GGUF files: the length of the first in two bytes, and both.
pub fn gguf_split(bytes: &[u8]) {
    let Some((length, bytes)) = bytes.split_first_chunk() else { return };
    let (first, second) = bytes.split_at(usize::from(u16::from_le_bytes(*length)).min(bytes.len()));
    let files = GgufFiles::open(Path::new("m-00001-of-00002.gguf"), |path: &Path| {
        let bytes = if path == Path::new("m-00001-of-00002.gguf") { first } else { second };
        Ok((bytes, bytes.len() as u64))
    });
    match files {
        Ok(files) => {
            // Every tensor lies within its file.
            for at in files.tensors.values() {
                let info = files.at(*at);
                assert!(info.offset.checked_add(info.bytes).is_some_and(|end| end <= files.files[at.file].bytes));
            }
            drop(gguf::Gguf::new(files, &gguf::config::RopeFactors::default()));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// config.json and, after a zero byte, generation_config.json. If they parse, opening a checkpoint with this
/// configuration and without weights must fail.
pub fn model_config(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == 0).map(std::str::from_utf8);
    let (Some(Ok(config)), generation) = (parts.next(), parts.next()) else { return };
    let Ok(generation) = generation.transpose() else { return };
    match ModelConfig::parse(config, generation) {
        Ok(parsed) => {
            // These numbers are computed from the configuration before anything is loaded.
            let kinds = &parsed.attention_kinds;
            let rows: Vec<u32> =
                kinds.iter().flat_map(|kind| [kind.q_rows(), kind.kv_rows(), parsed.qkv_rows(kind)]).collect();
            assert!(rows[2] >= rows[0] && parsed.kv_bytes_per_token(KvFormat::Int8) > 0, "{rows:?}");
            let folder = with_file("config.json", config.as_bytes(), &[]);
            assert!(Checkpoint::open(folder.path()).is_err(), "it has no weights");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// tokenizer.json and, after a zero byte, a text that the tokenizer encodes and decodes again.
pub fn tokenizer(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == 0);
    let file = parts.next().unwrap_or_default();
    let text = String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
    // An empty file stands for the demo model's tokenizer; then only the text is the input.
    static DEMO: OnceLock<Text> = OnceLock::new();
    let read = || Text::from_bytes(file, Some(TOKENIZER_CONFIG), None);
    let tokenizer = if file.is_empty() {
        DEMO.get_or_init(|| Text::from_bytes(TOKENIZER, Some(TOKENIZER_CONFIG), None).expect("the demo's")).clone()
    } else {
        READING.set(true);
        let read = read();
        READING.set(false);
        let Ok(tokenizer) = read else { return };
        tokenizer
    };
    let Ok(ids) = tokenizer.encode(&text, true) else { return };
    // Decode the ids as a whole and as a stream of single tokens.
    let _ = tokenizer.decode(&ids, false);
    let mut assembler = tokenizer.assembler(vec!["stop".to_owned()]);
    for id in ids {
        let _ = assembler.push(id);
    }
}

/// A template with the constructs of released templates: roles, trimming, splitting, tests, a reversed loop.
const TEMPLATE: &str = "\
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}{%- endif %}\
{%- set ns = namespace(last=messages|length - 1) %}\
{%- for message in messages[::-1] %}{%- if message.role == 'user' and message.content is string %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
{%- for message in messages %}\
{%- set content = message.content %}\
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}\
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{- raise_exception('no such role: ' + message.role) }}{%- endif %}\
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' + (message.content | tojson) + message.role | title }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Roles and contents alternately, separated by zero bytes. They are rendered by two templates and encoded.
pub fn chat(bytes: &[u8]) {
    static TEXTS: OnceLock<[Text; 2]> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        let text = |template| Text::from_bytes(TOKENIZER, Some(TOKENIZER_CONFIG), template).expect("the demo's");
        [text(None), text(Some(TEMPLATE))]
    });
    let parts: Vec<String> =
        bytes.split(|byte| *byte == 0).map(|part| String::from_utf8_lossy(part).into_owned()).collect();
    let messages: Vec<ChatMessage> = parts
        .chunks(2)
        .map(|pair| ChatMessage {
            role: pair[0].clone(),
            content: pair.get(1).cloned().unwrap_or_default(),
            ..Default::default()
        })
        .collect();
    for text in texts {
        if let Ok(rendered) = text.chat(&messages, &ChatOptions::default()) {
            let _ = text.encode(&rendered, false);
        }
    }
}

/// A structured constraint (`constraints.rs`) that is compiled and followed for up to three tokens.
pub fn constraint(bytes: &[u8]) {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    let grammars = GRAMMARS.get_or_init(|| {
        // The fuzzer gets the program's path from this variable; ordinary tests find the program next to them.
        std::env::var_os("OSTINATO_PROGRAM").into_iter().for_each(workers::use_program);
        let text = Text::from_bytes(TOKENIZER, Some(TOKENIZER_CONFIG), None).expect("the demo's");
        Grammars::new(&text, text.vocabulary() as u32, &[2]).expect("a byte-level tokenizer")
    });
    let followed = grammars.start(&constraints::constraint(bytes), false).and_then(|started| {
        let (mut grammar, mut mask) = (started.grammar, started.mask);
        for _ in 0..3 {
            let token = (0..mask.len() as u32 * 32).find(|token| bit(&mask, *token)).expect("a mask allows something");
            match grammar.take(token)? {
                Next::Mask(next) => mask = next,
                Next::Complete => break,
            }
        }
        Ok(())
    });
    // Errors caused by the constraint are reported with a message. A missing worker, or one that ended without a
    // reason, is our defect.
    match followed {
        Ok(()) => {}
        Err(GrammarError::Unavailable(why)) => panic!("{why}"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// The operator's configuration file.
pub fn configuration(bytes: &[u8]) {
    let folder = with_file("ostinato.toml", bytes, &[]);
    let sources = Sources { file: Some(folder.path().join("ostinato.toml")), ..Sources::default() };
    if let Err(error) = from_sources(&sources) {
        assert!(!error.to_string().is_empty());
    }
}

/// Returns a host with one model on a fake device.
fn host() -> &'static Arc<Host> {
    static HOST: OnceLock<Arc<Host>> = OnceLock::new();
    HOST.get_or_init(|| {
        let fake = FakeConfig::default();
        let (vocabulary, context) = (fake.capacity.vocabulary, fake.capacity.context);
        let config =
            ReplicaConfig { queue_limit: 4, eos_ids: vec![2], context, vocabulary, prefix_cache: true, rebuild: None };
        let device = DeviceInfo { index: 0, name: "none".to_owned(), uuid: "00".to_owned(), pci: None, is_cpu: false };
        let replica = |name: &str| {
            let executor = Box::new(FakeExecutor::realtime_with(fake.clone()));
            Replica::spawn(name.to_owned(), device.clone(), executor, config.clone()).expect("a thread")
        };
        let info = ModelInfo {
            architecture: "Qwen3ForCausalLM".to_owned(),
            context,
            vocabulary,
            eos_ids: vec![2],
            weight_bytes: 1,
            bytes_per_token: 1,
            parameters: 1,
            active_parameters: 1,
            embedding: Default::default(),
        };
        let text = Text::from_bytes(TOKENIZER, Some(TOKENIZER_CONFIG), None).expect("the demo's");
        let replicas = vec![replica("demo/0"), replica("demo/1")];
        let model = ServedModel::new("demo".to_owned(), info, Some(Arc::new(text)), replicas);
        Arc::new(Host::new(vec![model]))
    })
}

/// Checks that a prepared request can be validated without a panic, and that an error or a refusal has a message.
fn checked(prepared: Result<Prepared, Refusal>) {
    match prepared {
        Ok(prepared) => {
            assert!(prepared.samples >= 1);
            let bounds = prepared.place.replica().bounds();
            if let Err(error) = prepared.request.validate(bounds) {
                assert!(!error.to_string().is_empty());
            }
            let samples = prepared.request.into_samples(prepared.samples);
            assert_eq!(samples.len(), prepared.samples as usize);
        }
        Err(refusal) => assert!(!status(&refusal).message().is_empty()),
    }
}

/// A `GenerateRequest` of our own contract.
pub fn generate(bytes: &[u8]) {
    let Ok(message) = proto::GenerateRequest::decode(bytes) else { return };
    checked(prepare::prepare(host(), message, None));
}

/// A `GenerateRequest` of the routers' engine contract.
pub fn vllm_generate(bytes: &[u8]) {
    let Ok(message) = contract::GenerateRequest::decode(bytes) else { return };
    checked(convert::model(host()).and_then(|model| {
        let asked = convert::request(&model, message)?;
        let place = prepare::Target::of(host(), model, &asked.replica)?;
        let (keep, span, cancel) = (asked.rest.keep, tracing::Span::none(), Cancel::default());
        let mut prepared = prepare::prepare_at(place, asked.message, None, keep, &span, &cancel)?;
        asked.rest.apply(&mut prepared);
        Ok(prepared)
    }));
}

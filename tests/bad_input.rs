//! Goal: every defect of a checkpoint, a configuration or a request gives a typed error that names the defective item
//! and both numbers; the failed attempt leaves nothing behind; and valid input works afterwards. Method: copies of
//! committed checkpoints with one defect each, on lavapipe under the validation layer, which reports device objects
//! that outlive their device. After a refused start no actor thread is alive; after a refused request nothing is queued
//! and no page is in use. Malformed messages go to a server on fake devices, as raw HTTP/2 frames where no client
//! library would send them.

mod common;
mod harness;
mod serving;

use common::{Driver, Vulkan};
use harness::models::{expected, fixture, generate, idle, request};
use ostinato::actors::loader::LoadError;
use ostinato::config::{self, Bytes, Config, ConfigError, Model, Sources};
use ostinato::device::DeviceError;
use ostinato::engine::request::{Request, RequestError};
use ostinato::gpu::devices::start_on;
use ostinato::gpu::error::StartError;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::memory::plan::{PlanError, Purpose};
use ostinato::model::checkpoint::CheckpointProblem;
use ostinato::model::config::ConfigProblem;
use ostinato::model::gguf;
use ostinato::replica::{Replica, SubmitError};
use ostinato::service::proto;
use ostinato::service::proto::smg::grpc::common as smg;
use ostinato::service::proto::vllm::grpc::engine as contract;
use ostinato::service::proto::vllm::grpc::engine::vllm_engine_client::VllmEngineClient;
use ostinato::service::server::Options;
use ostinato::telemetry::with_causes;
use prost::Message;
use safetensors::tensor::{Dtype, TensorView};
use serving::raw::{self, Raw};
use serving::{Served, fake, serve_models, text_request, token_request, tokenizer};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

/// Serializes the tests of this file, because they count the threads of the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the names of the living threads that belong to a device or a replica.
fn actors() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("this system lists threads").flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    let ours = |name: &String| {
        ["compute", "watcher", "transfer", "loader", "engine "].iter().any(|actor| name.starts_with(actor))
    };
    names.map(|name| name.trim_end_matches('\n').to_owned()).filter(ours).collect()
}

fn assert_no_actor_lives() {
    let start = Instant::now();
    while !actors().is_empty() {
        // A thread that has been joined may be listed a moment longer.
        assert!(start.elapsed() < Duration::from_secs(5), "still there: {:?}", actors());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn assert_names(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "\"{part}\" is not in: {text}");
    }
}

/// Returns a copy of a committed checkpoint, which the test may modify.
fn copy(name: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(fixture(name)).expect("the fixture").flatten() {
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a copy");
    }
    folder
}

/// Sets keys of a checkpoint's config.json.
fn configure(folder: &Path, changes: serde_json::Value) {
    let path = folder.join("config.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).expect("config.json")).expect("JSON");
    for (key, value) in changes.as_object().expect("an object") {
        json[key] = value.clone();
    }
    std::fs::write(&path, json.to_string()).expect("config.json");
}

fn model(vulkan: &Vulkan, folder: &Path) -> Model {
    Model::new("m", folder, Some(vulkan.adapter(Driver::Lavapipe).selector()))
}

fn start(vulkan: &Vulkan, models: Vec<Model>) -> Result<Host, StartError> {
    start_on(&vulkan.instance, &Config { models, ..Config::default() }, &Quiet)
}

/// Returns the error of a start that must fail and must leave no actor thread and no validation message behind.
fn refused(vulkan: &Vulkan, models: Vec<Model>) -> StartError {
    let error = start(vulkan, models).map(|_| ()).expect_err("it cannot be served");
    assert!(error.is_users(), "the operator can mend it: {error:?}");
    assert_no_actor_lives();
    vulkan.assert_clean();
    error
}

/// Checks that the unmodified checkpoint starts, answers correctly and ends all its threads.
fn works(vulkan: &Vulkan, name: &str) {
    let host = start(vulkan, vec![model(vulkan, &fixture(name))]).unwrap_or_else(|e| panic!("{}", with_causes(&e)));
    answers(&host.replicas().next().unwrap(), name);
    let alive = actors();
    for actor in ["compute", "watcher", "engine m/0"] {
        assert!(alive.iter().any(|name| name == actor), "{actor} is not among {alive:?}");
    }
    drop(host);
    assert_no_actor_lives();
}

/// Checks that a replica generates the tokens of transformers and is idle afterwards.
fn answers(replica: &Replica, name: &str) {
    let known = expected(name);
    assert_eq!(generate(replica, request(&known.prompt, 12)).tokens, known.greedy[..12], "{name}");
    idle(replica);
}

fn problems(error: &StartError) -> &[CheckpointProblem] {
    match error {
        StartError::Checkpoint { model, source, .. } if model == "m" => &source.problems,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_shard_is_named_with_the_tensors_that_it_takes_away() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let folder = copy("llama-deep");
    let shard = folder.path().join("model-00002-of-00002.safetensors");
    std::fs::remove_file(&shard).expect("removed");
    let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
    let [CheckpointProblem::MissingShard { path, tensors }] = problems(&error) else { panic!("{error:?}") };
    assert_eq!(path, &shard);
    assert!(*tensors > 1);
    assert_names(&with_causes(&error), &["\"m\"", "model-00002-of-00002.safetensors", &tensors.to_string()]);
    works(&vulkan, "llama-deep");
}

#[test]
fn a_truncated_shard_is_named_with_both_lengths() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let folder = copy("llama-deep");
    let shard = folder.path().join("model-00001-of-00002.safetensors");
    let bytes = std::fs::metadata(&shard).expect("the shard").len();
    let cut = |to: u64| {
        std::fs::copy(fixture("llama-deep").join("model-00001-of-00002.safetensors"), &shard).expect("whole again");
        std::fs::OpenOptions::new().write(true).open(&shard).expect("the shard").set_len(to).expect("cut");
        refused(&vulkan, vec![model(&vulkan, folder.path())])
    };
    let error = cut(bytes - 1);
    let found = problems(&error);
    assert_eq!(found, [CheckpointProblem::Truncated { path: shard.clone(), needs: bytes, has: bytes - 1 }]);
    assert_names(
        &with_causes(&error),
        &["model-00001-of-00002.safetensors", &bytes.to_string(), &(bytes - 1).to_string()],
    );
    // Cut within the header, within the header's length field, and to an empty file.
    for to in [100, 4, 0] {
        let error = cut(to);
        let named = problems(&error).iter().any(|problem| match problem {
            CheckpointProblem::Truncated { path, has, .. } => path == &shard && *has == to,
            CheckpointProblem::BadHeader { path, .. } => path == &shard,
            _ => false,
        });
        assert!(named, "cut to {to}: {error:?}");
    }
    works(&vulkan, "llama-deep");
}

#[test]
fn shapes_that_contradict_the_configuration_are_all_named() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let folder = copy("llama-plain");
    configure(folder.path(), serde_json::json!({ "intermediate_size": 64, "vocab_size": 300 }));
    let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
    let mut shapes: Vec<(&str, &[u64], &[u64])> = problems(&error)
        .iter()
        .map(|problem| match problem {
            CheckpointProblem::Shape { tensor, shape, expected } => (tensor.as_str(), &shape[..], &expected[..]),
            other => panic!("{other:?}"),
        })
        .collect();
    shapes.sort();
    let wanted: [(&str, &[u64], &[u64]); 4] = [
        ("model.embed_tokens.weight", &[257, 160], &[300, 160]),
        ("model.layers.0.mlp.down_proj.weight", &[160, 56], &[160, 64]),
        ("model.layers.0.mlp.gate_proj.weight", &[56, 160], &[64, 160]),
        ("model.layers.0.mlp.up_proj.weight", &[56, 160], &[64, 160]),
    ];
    assert_eq!(shapes, wanted);
    let text = with_causes(&error);
    assert_names(
        &text,
        &["model.embed_tokens.weight", "[257, 160]", "[300, 160]", "up_proj", "[56, 160]", "[64, 160]"],
    );
    works(&vulkan, "llama-plain");
}

#[test]
fn everything_that_is_not_supported_is_named_at_once() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let folder = copy("llama-plain");
    configure(
        folder.path(),
        serde_json::json!({
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "dtype": "float8_e4m3fn",
            "hidden_act": "relu2",
            "quantization_config": { "quant_method": "aqlm" },
        }),
    );
    let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
    let found: Vec<&ConfigProblem> = problems(&error)
        .iter()
        .filter_map(|problem| match problem {
            CheckpointProblem::Config(problem) => Some(problem),
            _ => None,
        })
        .collect();
    let wanted = [
        ConfigProblem::UnsupportedArchitecture("MambaForCausalLM".to_owned()),
        ConfigProblem::UnsupportedDtype("float8_e4m3fn".to_owned()),
        ConfigProblem::UnsupportedActivation("relu2".to_owned(), "silu"),
        ConfigProblem::Quantized("aqlm".to_owned()),
    ];
    for problem in &wanted {
        assert!(found.contains(&problem), "{problem} is not among {found:?}");
    }
    assert_names(
        &with_causes(&error),
        &["MambaForCausalLM", "Qwen3ForCausalLM", "float8_e4m3fn", "bfloat16", "relu2", "aqlm"],
    );
    works(&vulkan, "llama-plain");
}

#[test]
fn tensors_of_a_format_that_is_not_read_are_all_named() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let folder = copy("llama-plain");
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("the weights");
    // The replacement has the same length, so the tensors' offsets stay valid.
    let (from, to) = (br#""BF16""#, br#""I16" "#);
    let mut changed = 0;
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    for at in 8..header - from.len() {
        if bytes[at..].starts_with(from) {
            bytes[at..at + to.len()].copy_from_slice(to);
            changed += 1;
        }
    }
    std::fs::write(&path, bytes).expect("written");
    let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
    let found = problems(&error);
    assert_eq!(found.len(), changed, "every tensor: {found:?}");
    assert!(changed > 8);
    assert!(
        found
            .iter()
            .all(|problem| matches!(problem, CheckpointProblem::UnsupportedDtype { dtype, .. } if dtype == "I16")),
        "{found:?}"
    );
    assert_names(&with_causes(&error), &["model.embed_tokens.weight", "I16", "BF16"]);
    works(&vulkan, "llama-plain");
}

/// Writes a checkpoint's tensors again after a change: dtype, shape and data by name.
fn change_tensors(folder: &Path, change: impl FnOnce(&mut Tensors)) {
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).expect("the weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let each = file.tensors().into_iter();
    let mut tensors: Tensors =
        each.map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).expect("a tensor"))
    });
    safetensors::serialize_to_file(views, None, &path).expect("written");
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Every defect is found in the headers, before a device has allocated anything, and all of a checkpoint at once.
#[test]
fn defects_of_quantised_headers_are_all_named() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let check = |fixture: &str, change: &dyn Fn(&mut Tensors), parts: &[&str], count: usize| {
        let folder = copy(fixture);
        change_tensors(folder.path(), change);
        let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
        assert_eq!(problems(&error).len(), count, "{error:?}");
        assert_names(&with_causes(&error), parts);
    };
    let without = |name: &'static str| move |tensors: &mut Tensors| drop(tensors.remove(name).expect(name));
    let q_proj = "model.layers.0.self_attn.q_proj";
    check("quantised/gptq-4", &without("model.layers.0.self_attn.q_proj.scales"), &[q_proj, "scales is missing"], 1);
    check("quantised/awq", &without("model.layers.0.self_attn.q_proj.qweight"), &[q_proj, "weight is missing"], 1);
    check(
        "quantised/fp8-hybrid",
        &without("model.language_model.layers.0.linear_attn.in_proj_z.weight_scale_inv"),
        &["in_proj_z", "weight_scale_inv", "is missing"],
        1,
    );
    check(
        "quantised/gptq-8",
        &|tensors| {
            // One group too many, and a row too few.
            let (_, shape, data) = tensors.get_mut("model.layers.0.self_attn.q_proj.scales").expect("scales");
            shape[0] += 1;
            data.resize(shape.iter().product::<usize>() * 2, 0);
            let (_, shape, data) = tensors.get_mut("model.layers.1.mlp.down_proj.qzeros").expect("zeros");
            shape[1] -= 1;
            data.truncate(shape.iter().product::<usize>() * 4);
        },
        &["q_proj.scales has shape [2, 64], expected [1, 64]", "down_proj.qzeros has shape [6, 15], expected [6, 16]"],
        2,
    );
    check(
        "quantised/ct-mixed",
        &|tensors| {
            let name = "model.layers.0.self_attn.o_proj.weight";
            tensors.insert(name.to_owned(), (Dtype::BF16, vec![64, 64], vec![0; 64 * 64 * 2]));
        },
        &["o_proj.weight of dtype BF16 has the scale", "o_proj.weight_scale beside it"],
        1,
    );
    // Groups of columns are read when the checkpoint is opened.
    let index = "model.layers.0.mlp.down_proj.g_idx";
    let misplaced = |tensors: &mut Tensors| tensors.get_mut(index).expect(index).2[4] = 9;
    check("quantised/gptq-4", &misplaced, &[index, "column 1", "group 9 of 3"], 1);
    let crowded = |tensors: &mut Tensors| tensors.get_mut(index).expect(index).2[4 * 40] = 0;
    check("quantised/gptq-4", &crowded, &[index, "more than 32 columns in group 0"], 1);
    let folder = copy("quantised/gptq-8");
    configure(
        folder.path(),
        serde_json::json!({"quantization_config": {
        "quant_method": "gptq", "bits": 6, "group_size": 100, "checkpoint_format": "gptq_p"}}),
    );
    let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
    let parts = ["bits is 6, must be 2 or 3 or 4 or 8", "group_size is 100", "checkpoint_format is \"gptq_p\""];
    assert_names(&with_causes(&error), &parts);
    let folder = copy("quantised/awq");
    configure(folder.path(), serde_json::json!({"quantization_config": null}));
    let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
    assert_names(&with_causes(&error), &["q_proj.qweight of dtype I32 is quantised, but config.json has no"]);
    works(&vulkan, "quantised/gptq-8");
}

/// Goal: a defect that only the data shows ends the load, and nothing is left behind.
#[test]
fn quantised_values_that_are_not_finite_end_a_load() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let check = |fixture: &str, tensor: &str, at: usize, with: &[u8], parts: &[&str]| {
        let folder = copy(fixture);
        change_tensors(folder.path(), |tensors| {
            tensors.get_mut(tensor).expect(tensor).2[at..at + with.len()].copy_from_slice(with);
        });
        let error = refused(&vulkan, vec![model(&vulkan, folder.path())]);
        assert!(matches!(error, StartError::Load { source: LoadError::Weight { .. }, .. }), "{error:?}");
        assert_names(&with_causes(&error), parts);
    };
    let scales = "model.layers.0.self_attn.q_proj.scales";
    check("quantised/gptq-4", scales, 6, &[0, 0x7e], &["layers.0.qkv", scales, "NaN", "row 3, group 0"]);
    check("quantised/awq", scales, 130, &[0, 0x7c], &["layers.0.qkv", scales, "inf", "row 1, group 1"]);
    let weight = "model.language_model.layers.0.linear_attn.in_proj_z.weight";
    check("quantised/fp8-hybrid", weight, 161, &[0x7f], &["layers.0.in_proj", weight, "0x7f", "row 1, column 1"]);

    // A block of a GGUF file with a scale that is not a number.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("demo.gguf");
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    gguf::write::convert(demo, &path, gguf::write::FileType::from_name("Q8_0").expect("a type"), 2).expect("written");
    let (opened, _) = gguf::open(&path).expect("a model");
    let name = "model.layers.0.mlp.down_proj.weight";
    let offset = opened.parts.at(opened.sources[name].at).offset;
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
    file.write_all_at(&[0, 0x7e], offset).expect("written");
    let error = refused(&vulkan, vec![model(&vulkan, &path)]);
    assert!(matches!(error, StartError::Load { source: LoadError::BadRow { .. }, .. }), "{error:?}");
    assert_names(&with_causes(&error), &["layers.0.down", "row 0, group 0", "NaN"]);
}

#[test]
fn a_context_longer_than_the_models_is_refused_with_both_numbers() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let asked = Model { context: Some(4096), ..model(&vulkan, &fixture("llama-plain")) };
    let error = refused(&vulkan, vec![asked]);
    assert!(matches!(&error, StartError::Context { model, asked: 4096, own: 512 } if model == "m"), "{error:?}");
    assert_names(&error.to_string(), &["\"m\"", "4096", "512"]);
    // The model's full context is accepted.
    let asked = Model { context: Some(512), ..model(&vulkan, &fixture("llama-plain")) };
    let host = start(&vulkan, vec![asked]).unwrap_or_else(|e| panic!("{}", with_causes(&e)));
    assert_eq!(host.models()[0].info.context, 512);
    answers(&host.replicas().next().unwrap(), "llama-plain");
}

#[test]
fn sizes_that_no_device_has_are_refused_with_both_numbers() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let good = model(&vulkan, &fixture("llama-plain"));
    let slots = Model { slots: Some(u32::MAX), ..good.clone() };
    let chunk = Model { prefill_chunk: Some(u32::MAX), ..good.clone() };
    // The scheduler keeps an entry per snapshot, so their number is limited even where memory is not.
    let hybrid = model(&vulkan, &fixture("hybrid-one"));
    let snapshots = Model { snapshots: Some(u32::MAX), ..hybrid.clone() };
    let unused = Model { snapshots: Some(u32::MAX), ..good.clone() };
    for (wrong, most) in [(slots, "1024"), (chunk, "16384"), (snapshots, "65536"), (unused, "65536")] {
        let error = refused(&vulkan, vec![wrong]);
        assert!(matches!(&error, StartError::Unsupported { .. }), "{error:?}");
        assert_names(&error.to_string(), &["\"m\"", "4294967295", most]);
    }
    let pages = Model { kv_pages: Some(u32::MAX), ..good };
    let error = refused(&vulkan, vec![pages]);
    assert!(
        matches!(&error, StartError::Plan { source: PlanError::DoesNotFit { purpose: Purpose::KvPages, .. }, .. }),
        "{error:?}"
    );
    // The largest allowed number of snapshots must also fit in memory.
    let snapshots = Model { snapshots: Some(65_536), memory_limit: Some(Bytes(64 << 20)), ..hybrid };
    let error = refused(&vulkan, vec![snapshots]);
    assert!(
        matches!(&error, StartError::Plan { source: PlanError::DoesNotFit { purpose: Purpose::Recurrent, .. }, .. }),
        "{error:?}"
    );
    works(&vulkan, "llama-plain");
}

/// What has been logged, as text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Runs `work` and returns its result. What this thread logs meanwhile is kept.
    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || log.clone()).finish();
        tracing::subscriber::with_default(subscriber, work)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Goal: a pipeline cache that cannot be written, which only saves compilation at the next start, causes a warning, but
/// prevents neither a start nor the rebuild of a lost device. Method: the cache folder cannot be created because a file has its name,
/// first from the start on, then once the server runs; in the second case the device is then lost, and the request must
/// be answered.
#[test]
fn a_pipeline_cache_that_cannot_be_written_ends_nothing() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    std::fs::write(&file, b"in the way").unwrap();
    let serve = |cache: &Path| {
        let mut config = Config { models: vec![model(&vulkan, &fixture("llama-plain"))], ..Config::default() };
        config.runtime.cache_directory = Some(cache.to_owned());
        start_on(&vulkan.instance, &config, &Quiet).unwrap_or_else(|e| panic!("{}", with_causes(&e)))
    };
    for cache in [file.clone(), file.join("below")] {
        let log = Log::default();
        let host = log.during(|| serve(&cache));
        let (text, path) = (log.text(), cache.display().to_string());
        let warned = |line: &&str| line.contains("WARN") && line.contains("the pipeline cache is not kept");
        assert!(text.lines().find(warned).is_some_and(|line| line.contains(&path)), "{path}: {text}");
        answers(&host.replicas().next().unwrap(), "llama-plain");
        drop(host);
        assert_no_actor_lives();
    }
    let cache = folder.path().join("cache");
    let host = serve(&cache);
    assert!(std::fs::read_dir(&cache).unwrap().count() > 0, "it is kept where it can be");
    std::fs::remove_dir_all(&cache).unwrap();
    std::fs::write(&cache, b"in the way").unwrap();
    host.devices()[0].status.as_ref().unwrap().declare_lost("a test");
    let replica = host.replicas().next().unwrap();
    answers(&replica, "llama-plain");
    assert_eq!((replica.losses(), replica.failed()), (1, false));
    drop((replica, host));
    assert_no_actor_lives();
}

#[test]
fn drafts_and_chunks_that_a_model_cannot_have_are_refused_with_both_numbers() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    // The first model has a drafting block and recurrent state, the second has neither.
    let [hybrid, dense] = ["hybrid-one", "llama-plain"].map(|name| model(&vulkan, &fixture(name)));
    let drafts = |model: &Model, drafts: u32| Model { drafts: Some(drafts), ..model.clone() };
    let chunk = Model { prefill_chunk: Some(100), ..hybrid.clone() };
    for (wrong, names) in [
        (drafts(&hybrid, 4), ["drafts", "4", "3"]),
        (drafts(&hybrid, u32::MAX), ["drafts", "4294967295", "3"]),
        (drafts(&dense, 2), ["drafts", "2", "only 0"]),
        (chunk, ["prefill_chunk", "100", "64"]),
    ] {
        let error = refused(&vulkan, vec![wrong]);
        assert!(matches!(&error, StartError::Unsupported { model, .. } if model == "m"), "{error:?}");
        assert_names(&error.to_string(), &names);
    }
    // `drafts = 0` is always valid, and without recurrent state so is a chunk of any size.
    let dense = Model { prefill_chunk: Some(100), ..drafts(&dense, 0) };
    let host = start(&vulkan, vec![dense]).unwrap_or_else(|e| panic!("{}", with_causes(&e)));
    answers(&host.replicas().next().unwrap(), "llama-plain");
    drop(host);
    assert_no_actor_lives();
    works(&vulkan, "hybrid-one");
}

#[test]
fn a_model_larger_than_the_memory_limit_is_refused_with_both_numbers() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let good = model(&vulkan, &fixture("llama-plain"));
    let limited = |bytes: u64| Model { memory_limit: Some(config::Bytes(bytes)), ..good.clone() };
    // One limit is too small for the weights, the other for the allocations that follow them.
    for (limit, wanted) in [(64 << 10, Some(Purpose::Weights)), (400 << 10, None)] {
        let error = refused(&vulkan, vec![limited(limit)]);
        let StartError::Plan { model, source: PlanError::DoesNotFit { purpose, asked, free, limited: true, device } } =
            &error
        else {
            panic!("{error:?}")
        };
        assert_eq!(model, "m");
        assert!(wanted.is_none_or(|wanted| wanted == *purpose), "{purpose:?}");
        assert!(asked > free && *free <= limit, "{asked} of {free} bytes, limit {limit}");
        assert_eq!(device, &good_name(&vulkan));
        let text = with_causes(&error);
        assert_names(&text, &["\"m\"", "memory limit", device, "cannot reserve"]);
        assert!(text.matches("KiB").count() + text.matches("MiB").count() >= 2, "both numbers: {text}");
    }
    // A replica's limit overrides the model's.
    let mut wider = limited(64 << 10);
    wider.replicas[0].memory_limit = Some(config::Bytes(1 << 30));
    let host = start(&vulkan, vec![wider]).unwrap_or_else(|e| panic!("{}", with_causes(&e)));
    answers(&host.replicas().next().unwrap(), "llama-plain");
}

fn good_name(vulkan: &Vulkan) -> String {
    vulkan.adapter(Driver::Lavapipe).name
}

#[test]
fn an_unknown_device_is_refused_before_anything_is_opened() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let good = model(&vulkan, &fixture("llama-plain"));
    let elsewhere = Model {
        name: "n".to_owned(),
        replicas: vec![config::Placement::on(Some("GeForce 256".parse().expect("a name")))],
        ..good.clone()
    };
    let error = refused(&vulkan, vec![good, elsewhere]);
    let StartError::Device(DeviceError::NoMatch { selector, adapters, .. }) = &error else { panic!("{error:?}") };
    assert!(selector.contains("GeForce 256"), "{selector}");
    for adapter in vulkan.instance.adapters() {
        assert_names(adapters, &[&adapter.name, &adapter.uuid]);
    }
    works(&vulkan, "llama-plain");
}

/// Goal: a broken second model refuses the start and releases the first, which is already loaded and ready.
#[test]
fn a_bad_second_model_takes_down_all_of_the_first() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let good = Model { name: "first".to_owned(), ..model(&vulkan, &fixture("llama-deep")) };
    let folder = copy("llama-plain");
    std::fs::remove_file(folder.path().join("model.safetensors")).expect("removed");
    let error = refused(&vulkan, vec![good.clone(), model(&vulkan, folder.path())]);
    assert!(matches!(problems(&error), [CheckpointProblem::NoWeights { .. }]), "{error:?}");
    let limited = Model { memory_limit: Some(config::Bytes(64 << 10)), ..model(&vulkan, &fixture("llama-plain")) };
    let error = refused(&vulkan, vec![good, limited]);
    assert!(matches!(&error, StartError::Plan { model, .. } if model == "m"), "{error:?}");
    works(&vulkan, "llama-deep");
}

#[test]
fn bad_requests_are_refused_with_both_numbers_and_take_nothing() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let host =
        start(&vulkan, vec![model(&vulkan, &fixture("llama-plain"))]).unwrap_or_else(|e| panic!("{}", with_causes(&e)));
    let replica = &host.replicas().next().unwrap();
    let (vocabulary, context) = (257u32, replica.bounds().context as usize);
    assert_eq!(context, 512);
    let known = expected("llama-plain");
    let bad = |change: &dyn Fn(&mut Request)| {
        let mut request = request(&known.prompt, 4);
        change(&mut request);
        let sink = Box::new(|event| panic!("a refused request has no events: {event:?}"));
        let error = replica.submit(request, sink).expect_err("refused");
        let text = error.to_string();
        idle(replica);
        match error {
            SubmitError::Request(error) => (error, text),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(bad(&|r| r.prompt.clear()).0, RequestError::EmptyPrompt);

    for (token, position) in [(vocabulary, 0), (u32::MAX, known.prompt.len() - 1)] {
        let (error, text) = bad(&|r| r.prompt[position] = token);
        assert_eq!(error, RequestError::TokenOutOfRange { token, position, vocabulary });
        assert_names(&text, &[&token.to_string(), &position.to_string(), "257"]);
    }

    for length in [context, context + 1, 100_000] {
        let (error, text) = bad(&|r| r.prompt = vec![1; length]);
        assert_eq!(error, RequestError::ContextExceeded { prompt: length, output: 1, context });
        assert_names(&text, &[&length.to_string(), "512"]);
    }

    type Field = (&'static str, fn(&mut Request) -> &mut f32, f32);
    let fields: [Field; 6] = [
        ("temperature", |r| &mut r.sampling.temperature, -0.5),
        ("top_p", |r| &mut r.sampling.top_p, 1.5),
        ("min_p", |r| &mut r.sampling.min_p, -0.1),
        ("repetition_penalty", |r| &mut r.sampling.repetition_penalty, 0.0),
        ("presence_penalty", |r| &mut r.sampling.presence_penalty, 2.5),
        ("frequency_penalty", |r| &mut r.sampling.frequency_penalty, -2.5),
    ];
    for (name, field, outside) in fields {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, outside] {
            let (error, text) = bad(&|r| *field(r) = value);
            assert!(matches!(&error, RequestError::Value { field, .. } if *field == name), "{name} {value}: {error:?}");
            assert_names(&text, &[name, &value.to_string(), "must be"]);
        }
    }
    for bias in [(3, f32::NAN), (3, f32::INFINITY), (vocabulary, 1.0)] {
        let (error, _) = bad(&|r| r.sampling.logit_bias = vec![(1, 0.5), bias]);
        assert!(matches!(&error, RequestError::Value { field: "logit_bias", .. }), "{error:?}");
    }
    for (name, change) in [
        ("max_tokens", (|r| r.limits.max_tokens = Some(0)) as fn(&mut Request)),
        ("min_tokens", |r| r.limits.min_tokens = 5),
        ("stop_ids", |r| r.limits.stop_ids = vec![257]),
        ("stop_ids", |r| r.limits.stop_ids = (0..17).collect()),
        ("logprobs", |r| r.logprobs = Some(21)),
    ] {
        let (error, text) = bad(&change);
        assert!(matches!(&error, RequestError::Value { field, .. } if *field == name), "{error:?}");
        assert_names(&text, &[name]);
    }

    // The replica still works, and the id of the refused requests can be used again.
    answers(replica, "llama-plain");
    // The longest valid prompt leaves room for exactly one token in the context.
    let longest = generate(replica, request(&vec![1; context - 1], 9));
    assert_eq!(longest.tokens.len(), 1);
    idle(replica);
}

#[test]
fn a_malformed_configuration_file_is_refused_and_mended() {
    let _turn = turn();
    let vulkan = Vulkan::new();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ostinato.toml");
    let load = |text: &str| {
        std::fs::write(&path, text).expect("written");
        config::from_sources(&Sources { file: Some(path.clone()), ..Sources::default() })
    };
    let error = load("[server]\nlisten = \"127.0.0.1:1\"\n[[models]\nname = 3").expect_err("no TOML");
    assert!(matches!(&error, ConfigError::Syntax { path: found, .. } if *found == path), "{error:?}");
    assert_names(&with_causes(&error), &["ostinato.toml", "line 3"]);

    let error = load(
        "[server]\nlissten = \"x\"\n[[models]]\nname = \"m\"\npath = \"p\"\ncontext = 0\nmemory_limit = \"many\"\nreplicas = []\n\
         [[models]]\nname = \"m\"\npath = \"q\"\nkv_format = \"f8\"\nreplicas = [{ device = \"\" }]\n",
    )
    .expect_err("seven things are wrong");
    let ConfigError::Problems(found) = &error else { panic!("{error:?}") };
    for key in [
        "lissten",
        "models[0].context",
        "models[0].memory_limit",
        "models[0].replicas",
        "models[1].name",
        "models[1].kv_format",
        "models[1].replicas[0].device",
    ] {
        assert!(found.iter().any(|problem| problem.key.contains(key)), "{key} is not among {found:#?}");
    }
    assert_names(&error.to_string(), &["lissten", "many", "f8", "at least 1"]);

    let missing = folder.path().join("nowhere.toml");
    let error =
        config::from_sources(&Sources { file: Some(missing.clone()), ..Sources::default() }).expect_err("not there");
    assert!(matches!(&error, ConfigError::Read { path, .. } if *path == missing), "{error:?}");

    let uuid = vulkan.adapter(Driver::Lavapipe).uuid;
    let checkpoint = fixture("llama-plain");
    let good = load(&format!(
        "[[models]]\nname = \"m\"\npath = {checkpoint:?}\ncontext = 128\nreplicas = [{{ device = \"{uuid}\" }}]\n"
    ));
    let host =
        start_on(&vulkan.instance, &good.expect("mended"), &Quiet).unwrap_or_else(|e| panic!("{}", with_causes(&e)));
    assert_eq!(host.replicas().next().unwrap().bounds().context, 128);
    answers(&host.replicas().next().unwrap(), "llama-plain");
}

// ---- on the wire ----

/// Runs an asynchronous test with clients and a server, serialized with the other tests of this file.
fn in_turn(test: impl Future<Output = ()>) {
    let _turn = turn();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(test);
}

/// The Generate method of both gRPC contracts.
const PATHS: [&str; 2] = ["/ostinato.v1.Ostinato/Generate", "/vllm.grpc.engine.VllmEngine/Generate"];

/// Duration of a step of the fake device.
const STEP: Duration = Duration::from_millis(1);

/// Serves one model on a fake device of two slots.
async fn served(step: Duration, options: Options) -> Served {
    let fakes = vec![(0, fake(step, b"abc"))];
    serve_models(vec![serving::model("alpha", Some(tokenizer(true)), fakes, 1000)], options).await
}

/// Returns the same request encoded for each of the contracts in [`PATHS`].
fn questions(max_tokens: u32) -> [Vec<u8>; 2] {
    let sampling = contract::SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..Default::default() };
    let tokens = contract::TokenizedInput { input_ids: vec![1, 2, 3], ..Default::default() };
    let theirs = contract::GenerateRequest {
        input: Some(contract::generate_request::Input::Tokenized(tokens)),
        sampling_params: Some(sampling),
        stream: true,
        ..Default::default()
    };
    [token_request("alpha", &[1, 2, 3], max_tokens).encode_to_vec(), theirs.encode_to_vec()]
}

/// Checks that the server itself reports nothing running, nothing waiting and no page in use, and that it still
/// answers.
async fn nothing_is_left(served: &Served) {
    served.idle("alpha/0", Duration::from_secs(30)).await;
    let mut client = served.client().await;
    let load = client.get_load(proto::GetLoadRequest::default()).await.expect("it answers").into_inner();
    let load = &load.replicas[0];
    assert_eq!((load.running, load.waiting, load.pages_used), (0, 0, 0), "{load:?}");
    assert_eq!(serving::generate(&mut client, text_request("alpha", "x", 3)).await.text(), "abc");
}

/// Sends raw bytes as the body of a call and returns the gRPC status.
async fn answer(served: &Served, path: &str, body: &[u8]) -> u32 {
    let mut raw = Raw::open(&served.address).await;
    raw.acknowledge().await;
    let call = raw.call(path, 1).await;
    for part in body.chunks(16_384) {
        raw.data(call, part, false).await;
    }
    raw.data(call, &[], true).await;
    loop {
        let frame = raw.frame().await.unwrap_or_else(|| panic!("closed: {path}, {body:x?}"));
        assert_ne!(frame.kind, raw::GOAWAY, "{frame:x?}: {path}, {body:x?}");
        if frame.stream == call && frame.ends() {
            return status_of(&frame.payload);
        }
    }
}

/// Returns the gRPC status in a header block. Strings may be Huffman-coded; the value that follows the literal
/// `grpc-status` has one or two digits.
fn status_of(block: &[u8]) -> u32 {
    // "grpc-status" in HPACK's Huffman code and as plain text.
    let names: [&[u8]; 2] = [&[0x9a, 0xca, 0xc8, 0xb2, 0x12, 0x34, 0xda, 0x8f], b"grpc-status"];
    let after = names.iter().find_map(|name| {
        let at = block.windows(name.len()).position(|window| window == *name)?;
        Some(&block[at + name.len()..])
    });
    let after = after.unwrap_or_else(|| panic!("no status in {block:x?}"));
    let (packed, length) = (after[0] & 0x80 != 0, usize::from(after[0] & 0x7f));
    let value = &after[1..1 + length];
    if !packed {
        return std::str::from_utf8(value).expect("digits").parse().expect("a number");
    }
    // In HPACK's Huffman code the digits 0 to 2 have five bits and 3 to 9 have six.
    let bits = value.iter().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
    let mut left = value.len() * 8;
    let mut number = 0;
    while left >= 5 {
        let five = (bits >> (left - 5) & 0x1f) as u32;
        if five < 3 {
            (number, left) = (number * 10 + five, left - 5);
        } else if left >= 6 && (0x19..=0x1f).contains(&(bits >> (left - 6) & 0x3f)) {
            (number, left) = (number * 10 + (bits >> (left - 6) & 0x3f) as u32 - 0x19 + 3, left - 6);
        } else {
            break;
        }
    }
    number
}

#[test]
fn bytes_that_are_no_message_are_refused_and_take_nothing() {
    in_turn(async {
        let served = served(STEP, Options { max_message_bytes: 32 << 10, ..Options::default() }).await;
        let [invalid, internal, range, unimplemented] =
            [tonic::Code::InvalidArgument, tonic::Code::Internal, tonic::Code::OutOfRange, tonic::Code::Unimplemented];
        for (path, good) in PATHS.iter().zip(questions(3)) {
            let framed = raw::message(&good);
            assert_eq!(answer(&served, path, &framed).await, 0, "{path}");
            let with = |change: fn(&mut Vec<u8>)| {
                let mut bytes = framed.clone();
                change(&mut bytes);
                bytes
            };
            // Field 1 is the request id, a string, in both contracts.
            let text = |bytes: &[u8]| raw::message(&[&[0x0a, bytes.len() as u8], bytes].concat());
            for (what, body, codes) in [
                ("text that is not UTF-8", text(&[0xff, 0xfe, 0x80]), &[internal][..]),
                ("half a character", text(&"é".as_bytes()[..1]), &[internal]),
                ("a field of another kind", raw::message(&[0x08, 0x01]), &[internal]),
                ("a field that is longer than the message", raw::message(&[0x0a, 0x7f, b'x']), &[internal]),
                ("a number without an end", raw::message(&[0xff; 12]), &[internal]),
                ("a group without an end", raw::message(&[0x7b]), &[internal]),
                ("noise", raw::message(&[0xa5; 999]), &[internal]),
                ("no field", raw::message(&[]), &[invalid]),
                ("more than a message may have", raw::message(&vec![0; (32 << 10) + 1]), &[range]),
                ("the promise of 4 GiB", with(|bytes| bytes[1..5].fill(0xff)), &[range]),
                ("compressed without saying how", with(|bytes| bytes[0] = 1), &[internal, unimplemented]),
                ("a flag that there is not", with(|bytes| bytes[0] = 9), &[internal]),
                ("a message that is cut", with(|bytes| bytes.truncate(8)), &[internal]),
                ("half a prefix", vec![0, 0], &[internal]),
                ("nothing", Vec::new(), &[internal]),
                ("what is no message behind one that is", [&framed[..], &[9; 99]].concat(), &[internal]),
                ("two messages, of which the first is meant", [&framed[..], &framed].concat(), &[tonic::Code::Ok]),
            ] {
                let code = answer(&served, path, &body).await;
                assert!(codes.iter().any(|expected| *expected as u32 == code), "{path}: {what}: {code}");
            }
        }
        nothing_is_left(&served).await;
    });
}

#[test]
fn what_a_request_may_say_is_bounded_on_both_contracts() {
    in_turn(async {
        let served = served(STEP, Options { max_prompt_bytes: 1000, ..Options::default() }).await;
        let mut ours = served.client().await;
        let mut theirs = VllmEngineClient::new(served.channel().await);
        let stop = |strings: Vec<String>| {
            let stopping = proto::Stopping { max_tokens: Some(3), strings: strings.clone(), ..Default::default() };
            let mine = proto::GenerateRequest { stopping: Some(stopping), ..text_request("alpha", "x", 3) };
            let params = contract::SamplingParams { max_tokens: Some(3), stop: strings, ..Default::default() };
            let other = contract::GenerateRequest { sampling_params: Some(params), ..their_text("x") };
            (mine, other)
        };
        let named = |name: usize| {
            let request_id = "n".repeat(name);
            let mine = proto::GenerateRequest { request_id: request_id.clone(), ..text_request("alpha", "x", 3) };
            (mine, contract::GenerateRequest { request_id, ..their_text("x") })
        };
        let long = |bytes: usize| (text_request("alpha", &"x".repeat(bytes), 3), their_text(&"x".repeat(bytes)));
        let strings = |count: usize, bytes: usize| stop(vec!["z".repeat(bytes); count]);
        for (edge, beyond, words) in [
            (strings(16, 1), strings(17, 1), ["17 strings", "at most 16"]),
            (strings(1, 1024), strings(1, 1025), ["1025 bytes", "at most 1024"]),
            (named(256), named(257), ["257 bytes", "at most 256"]),
            (long(1000), long(1001), ["1001 bytes", "maximum is 1000"]),
        ] {
            assert!(serving::generate(&mut ours, edge.0).await.error.is_none());
            theirs
                .generate(edge.1)
                .await
                .expect("it is within the bound")
                .into_inner()
                .message()
                .await
                .expect("an answer");
            let both = [
                ours.generate(beyond.0).await.map(drop).expect_err(words[0]),
                theirs.generate(beyond.1).await.map(drop).expect_err(words[0]),
            ];
            for status in both {
                assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
                assert_names(status.message(), &words);
            }
        }
        let say = |content: &str| proto::ChatMessage {
            role: "user".to_owned(),
            content: content.to_owned(),
            ..Default::default()
        };
        let chat = |messages: Vec<proto::ChatMessage>| {
            let prompt = Some(proto::generate_request::Prompt::Chat(proto::Chat { messages, ..Default::default() }));
            proto::GenerateRequest { prompt, ..text_request("alpha", "", 3) }
        };
        for (message, words) in [
            (chat(vec![say(""); 4097]), ["4097 messages", "at most 4096"]),
            // The roles count as well.
            (chat(vec![say(&"x".repeat(500)), say(&"x".repeat(500))]), ["1008 bytes", "maximum is 1000"]),
            (proto::GenerateRequest { model: "m".repeat(9999), ..text_request("", "x", 1) }, ["model", "9999 bytes"]),
            (proto::GenerateRequest { device: "d".repeat(9999), ..text_request("", "x", 1) }, ["device", "9999 bytes"]),
            (proto::GenerateRequest { cache_salt: "s".repeat(257), ..text_request("", "x", 1) }, ["cache_salt", "257"]),
        ] {
            let status = ours.generate(message).await.map(drop).expect_err(words[0]);
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
            assert_names(status.message(), &words);
        }
        let input = Some(proto::tokenize_request::Input::Text("x".repeat(1001)));
        let status = ours.tokenize(proto::TokenizeRequest { input, ..Default::default() }).await.expect_err("too long");
        assert_names(status.message(), &["text", "1001", "1000"]);
        let aborts = |count: usize| contract::AbortRequest { request_ids: vec!["x".to_owned(); count] };
        theirs.abort(aborts(1024)).await.expect("within the bound");
        assert_names(theirs.abort(aborts(1025)).await.expect_err("too many").message(), &["1025 ids", "at most 1024"]);
        // A value quoted in an error message is truncated, because the message is sent in response headers.
        let profile = smg::StartProfileRequest { output_dir: Some("d".repeat(100_000)), ..Default::default() };
        let status = theirs.start_profile(profile).await.expect_err("no folder is taken");
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().len() < 1100, "{}", status.message().len());

        // Headers above the size limit are refused and the server keeps serving.
        let mut large = tonic::Request::new(text_request("alpha", "x", 3));
        large.metadata_mut().insert("x-large", "h".repeat(20 << 10).parse().expect("a value"));
        let error = serving::generate(&mut ours, large).await.error.expect("they are too large");
        assert!(error.message().contains("431"), "{error:?}");
        nothing_is_left(&served).await;
    });
}

fn their_text(text: &str) -> contract::GenerateRequest {
    contract::GenerateRequest {
        input: Some(contract::generate_request::Input::Text(text.to_owned())),
        sampling_params: Some(contract::SamplingParams { max_tokens: Some(3), ..Default::default() }),
        ..Default::default()
    }
}

/// Goal: calls that never send a message end by themselves and do not affect other clients. Method: 10,000 calls that
/// send only headers, on 50 connections, while another client's generation runs.
#[test]
fn calls_without_a_message_end_by_themselves_and_disturb_nobody() {
    in_turn(async {
        const CONNECTIONS: usize = 50;
        const CALLS: usize = 200;
        let wait = Duration::from_secs(4);
        let served = served(STEP, Options { message_wait: wait, ..Options::default() }).await;
        let mut client = served.client().await;
        let stream = client.generate(text_request("alpha", "x", 4000)).await.expect("served").into_inner();
        let other = tokio::spawn(serving::read(stream));
        let mut open = Vec::new();
        for connection in 0..CONNECTIONS {
            let mut raw = Raw::open(&served.address).await;
            raw.acknowledge().await;
            let last = raw.call(PATHS[connection % 2], CALLS).await;
            if connection % 5 == 0 {
                // Every fifth connection also sends the beginning of a message.
                raw.data(last, &[0, 0, 0, 1], false).await;
            }
            open.push(raw);
        }
        // Other requests are served meanwhile.
        assert_eq!(serving::generate(&mut client, text_request("alpha", "x", 3)).await.text(), "abc");
        let begin = Instant::now();
        for mut raw in open {
            let mut ended = 0;
            while ended < CALLS {
                let frame = tokio::time::timeout(Duration::from_secs(30), raw.frame()).await.expect("it is answered");
                let frame = frame.expect("the connection goes on");
                assert_ne!(frame.kind, raw::GOAWAY, "{frame:?}");
                ended += usize::from(frame.kind == raw::HEADERS && frame.ends());
            }
        }
        assert!(begin.elapsed() < wait + Duration::from_secs(20), "{:?}", begin.elapsed());
        let outcome = other.await.expect("it is read");
        assert!(outcome.error.is_none(), "{:?}", outcome.error);
        assert_eq!(outcome.ids().len(), 4000);
        nothing_is_left(&served).await;

        // Calls above the limit of a connection (200) are reset, and those before them are not.
        let mut raw = Raw::open(&served.address).await;
        raw.acknowledge().await;
        raw.call(PATHS[0], 230).await;
        let mut reset = 0;
        while let Ok(Some(frame)) = tokio::time::timeout(Duration::from_secs(1), raw.frame()).await {
            reset += usize::from(frame.kind == raw::RESET);
        }
        assert_eq!(reset, 30);
        drop(raw);
        nothing_is_left(&served).await;
    });
}

/// Goal: up to sixteen messages of the maximum size may be in transit at once, of one client half as many; more are
/// refused until there is room.
#[test]
fn messages_on_their_way_have_so_much_room() {
    in_turn(async {
        let served = served(STEP, Options { max_message_bytes: 1024, ..Options::default() }).await;
        let mut raw = Raw::open(&served.address).await;
        raw.acknowledge().await;
        let begun = [0, 0, 0, 4, 0].iter().copied().chain([0; 1000]).collect::<Vec<u8>>();
        for call in 0..40 {
            let call = raw.call(PATHS[call % 2], 1).await;
            raw.data(call, &begun, false).await;
        }
        let mut refused = Vec::new();
        while let Ok(Some(frame)) = tokio::time::timeout(Duration::from_secs(1), raw.frame()).await {
            if frame.kind == raw::HEADERS && frame.ends() {
                refused.push(frame);
            }
        }
        assert_eq!(refused.len(), 40 - 8);
        assert_eq!(status_of(&refused[0].payload), tonic::Code::ResourceExhausted as u32);
        drop(raw);
        nothing_is_left(&served).await;
    });
}

/// Goal: a client that sends requests and never reads the answers holds up neither its own requests nor the server's
/// threads.
#[test]
fn a_client_that_never_reads_holds_up_nobody() {
    in_turn(async {
        // Room for the text of the client that reads, however late.
        let served = served(STEP / 10, Options { stream_buffer: 320, ..Options::default() }).await;
        let mut client = served.client().await;
        let mut sent = Vec::new();
        for (path, question) in PATHS.iter().zip(questions(2000)) {
            let mut raw = Raw::open(&served.address).await;
            raw.acknowledge().await;
            for _ in 0..50 {
                let call = raw.call(path, 1).await;
                raw.data(call, &raw::message(&question), true).await;
            }
            sent.push(raw);
        }
        let begin = Instant::now();
        while served.host.unfinished() == 0 {
            assert!(begin.elapsed() < Duration::from_secs(10), "none has come");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let outcome = serving::generate(&mut client, text_request("alpha", "x", 300)).await;
        assert_eq!(outcome.ids().len(), 300, "{:?}", outcome.error);
        // The clients that do not read are still connected.
        nothing_is_left_within(&served, Duration::from_secs(120)).await;
        drop(sent);
        nothing_is_left(&served).await;
    });
}

async fn nothing_is_left_within(served: &Served, within: Duration) {
    served.idle("alpha/0", within).await;
    nothing_is_left(served).await;
}

/// Goal: a client that sends requests and then neither reads nor answers keepalive pings is disconnected within the
/// keepalive timeout, its requests end, and others continue. Method: room for two connections, so that a third one
/// shows whether a place has become free. Once with the default HTTP/2 windows, and once with so much unread data in
/// transit that the server cannot send anything more, neither a ping nor a GOAWAY.
#[test]
fn a_client_that_neither_reads_nor_answers_is_cut_off() {
    in_turn(async {
        let (keepalive, keepalive_wait) = (Duration::from_millis(500), Duration::from_secs(2));
        for flooded in [false, true] {
            let options = Options { connections: 2, keepalive, keepalive_wait, ..Options::default() };
            let served = served(STEP * 5, options).await;
            let mut client = served.client().await;
            let stream = client.generate(text_request("alpha", "x", 1200)).await.expect("served").into_inner();
            let other = tokio::spawn(serving::read(stream));
            let mut raw = match flooded {
                false => Raw::open(&served.address).await,
                true => Raw::open_wide(&served.address).await,
            };
            let call = raw.call(PATHS[0], 1).await;
            raw.data(call, &raw::message(&questions(4000)[0]), true).await;
            served.busy("alpha/0", 2, 0).await;
            if flooded {
                // Each answer has tens of kilobytes.
                let symbol = MessageRequest::FileContainingSymbol("ostinato.v1.Ostinato".to_owned());
                let asked = ServerReflectionRequest { message_request: Some(symbol), ..Default::default() };
                for _ in 0..150 {
                    let call = raw.call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", 1).await;
                    raw.data(call, &raw::message(&asked.encode_to_vec()), true).await;
                }
            }
            let begin = Instant::now();
            let limit = keepalive + keepalive_wait;
            while Raw::open(&served.address).await.frame().await.is_none() {
                assert!(begin.elapsed() < limit + Duration::from_secs(10), "it is still connected, {flooded}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(begin.elapsed() > keepalive_wait, "after {:?}: it had time to answer", begin.elapsed());
            served.busy("alpha/0", 1, 0).await;
            let outcome = other.await.expect("it is read");
            assert_eq!(outcome.ids().len(), 1200, "{:?}", outcome.error);
            nothing_is_left(&served).await;
            drop(raw);
        }
    });
}

//! Goal: the same tokens and logits as Hugging Face transformers (float32) from whole models on
//! the CPU drivers. Method: each committed random-weight checkpoint is served in process; 64
//! greedy tokens must be equal, logits must lie within a relative error.

mod common;

use common::{Driver, Vulkan};
use ostinato::config::{self, Config, KvFormat, Model};
use ostinato::engine::host::Host;
use ostinato::engine::request::{Event, FinishReason, Finished, Limits, Request, Sampling, Token};
use ostinato::engine::start::{Quiet, start_on};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// With f32 keys and values nothing is rounded but sums.
const EXACT: f64 = 2e-3;

struct Expected {
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    steps: Vec<usize>,
    logits: Vec<Vec<f32>>,
    f16_kv: f64,
}

fn fixtures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("the fixtures are in the tree")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.join("expected.json").exists())
        .collect();
    found.sort();
    found
}

fn expected(folder: &Path) -> Expected {
    let text = std::fs::read_to_string(folder.join("expected.json")).expect("expected.json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let ids = |key: &str| -> Vec<u32> { serde_json::from_value(json[key].clone()).expect(key) };
    let bytes = std::fs::read(folder.join("expected.safetensors")).expect("expected.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let logits = tensors.tensor("logits").expect("logits");
    let width = logits.shape()[1];
    let values: Vec<f32> =
        logits.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    Expected {
        prompt: ids("prompt"),
        greedy: ids("greedy"),
        steps: ids("logit_steps").iter().map(|s| *s as usize).collect(),
        logits: values.chunks_exact(width).map(<[f32]>::to_vec).collect(),
        // Files of the demo models have no rounding: a trained model is held to the exact limit either way.
        f16_kv: json["rounding"]["f16_kv"].as_f64().unwrap_or(EXACT / 3.0),
    }
}

fn serve(vulkan: &Vulkan, driver: Driver, folder: &Path, kv: KvFormat) -> Host {
    let uuid = vulkan.adapter(driver).uuid;
    let own = folder.join("config.json").exists();
    // What is expected of a model of the program lies in a folder of its name.
    let name = folder.file_name().map(Path::new).and_then(config::embedded);
    let path =
        if own { folder } else { Path::new(name.expect("a fixture is a checkpoint or of a model of the program")) };
    let mut model = Model::new("fixture", path, Some(&uuid));
    model.kv_format = Some(kv);
    let config = Config { models: vec![model], ..Config::default() };
    start_on(&vulkan.instance, &config, &Quiet).unwrap_or_else(|e| panic!("{}: {e:?}", folder.display()))
}

fn generate(host: &Host, prompt: &[u32], tokens: u32, dump: bool) -> (Vec<Token>, Finished) {
    let (_, replica) = host.route("", "").expect("one model");
    let (sender, events) = crossbeam_channel::unbounded();
    let request = Request {
        id: "test".to_owned(),
        prompt: prompt.to_vec(),
        sampling: Sampling::default(),
        limits: Limits { max_tokens: Some(tokens), ignore_eos: true, ..Limits::default() },
        logprobs: None,
        dump_logits: dump,
        grammar: None,
        priority: 0,
        cache_salt: String::new(),
        deadline: None,
        span: tracing::Span::none(),
    };
    let sink = Box::new(move |event| sender.send(event).map_err(|_| ostinato::engine::request::SinkClosed));
    replica.submit(request, sink).expect("an idle replica takes a request");
    let mut drawn = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(120)).expect("the request goes on") {
            Event::Started(_) => {}
            Event::Token(token) => drawn.push(token),
            Event::Finished(finished) => return (drawn, *finished),
        }
    }
}

fn error(found: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let difference = square(&mut found.iter().zip(wanted).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (difference / square(&mut wanted.iter().map(|v| f64::from(*v)))).sqrt()
}

fn check(vulkan: &Vulkan, driver: Driver, folder: &Path, kv: KvFormat, limit: impl Fn(&Expected) -> f64) {
    let name = folder.file_name().expect("a fixture has a name").to_string_lossy().into_owned();
    let expected = expected(folder);
    let host = serve(vulkan, driver, folder, kv);
    let count = expected.greedy.len() as u32;
    // Run ahead, as every request does.
    let (tokens, finished) = generate(&host, &expected.prompt, count, false);
    let ids: Vec<u32> = tokens.iter().map(|t| t.id).collect();
    assert_eq!(ids, expected.greedy, "{name} on {driver:?} with {kv:?}");
    assert_eq!(finished.reason, FinishReason::Length);
    assert!(finished.per_token.submits < 1.0, "{name}: {} submits a token", finished.per_token.submits);
    // Step by step, with logits.
    let (tokens, _) = generate(&host, &expected.prompt, count, true);
    let limit = limit(&expected);
    for (step, wanted) in expected.steps.iter().zip(&expected.logits) {
        let found = tokens[*step].logits.as_ref().expect("logits were asked for");
        let error = error(found, wanted);
        println!("{name} {driver:?} {kv:?} step {step}: relative error {error:.2e}, at most {limit:.2e}");
        assert!(
            error <= limit,
            "{name} on {driver:?} with {kv:?}, step {step}: relative error {error:.2e} exceeds {limit:.2e}"
        );
    }
}

#[test]
fn fixtures_agree_on_lavapipe_with_f32_keys_and_values() {
    let vulkan = Vulkan::new();
    for folder in fixtures() {
        check(&vulkan, Driver::Lavapipe, &folder, KvFormat::F32, |_| EXACT);
    }
}

#[test]
fn fixtures_agree_on_lavapipe_with_f16_keys_and_values() {
    let vulkan = Vulkan::new();
    for folder in fixtures() {
        // What rounding keys and values costs transformers itself, with room for other sums.
        check(&vulkan, Driver::Lavapipe, &folder, KvFormat::F16, |e| e.f16_kv * 3.0);
    }
}

#[test]
fn fixtures_agree_on_swiftshader() {
    let vulkan = Vulkan::new();
    for folder in fixtures().into_iter().step_by(3) {
        check(&vulkan, Driver::SwiftShader, &folder, KvFormat::F32, |_| EXACT);
    }
}

//! Goal: a fault in a decode step without barriers changes and loses no token, neither in the test at start nor during
//! generation. Method: the embedded demo models on lavapipe with the kernels for matrix units in the variant that
//! multiplies without them (or on the selected GPU); the reference is the output without faults. Faults are injected:
//! the fault word is set before a plan (`fault_at`), or one call of a step waits for words that are never written
//! (`broken_call`), in one step (`broken_step`) or repeatedly (`broken_every`), with two plans in flight, with one
//! sequence and with several.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{Lines, generate, request};
use ostinato::config::{Config, DEMO_PATH, Model};
use ostinato::engine::variants::Fallback;
use ostinato::gpu::devices::start_on;
use ostinato::host::Host;
use ostinato::model::synth::{self, SynthOptions};
use std::path::Path;

/// Starts a replica of a model with a number of drafts, slots and tokens of context, and these tuning changes. Returns the
/// host and the lines about barriers that its start printed.
fn start_model(
    vulkan: &Vulkan,
    path: &str,
    (drafts, slots, context): (Option<u32>, u32, u32),
    tune: &[&str],
) -> (Host, Vec<String>) {
    let driver = Driver::first();
    let mut model = Model::new("demo", path, Some(vulkan.adapter(driver).selector()));
    model.context = Some(context);
    model.slots = Some(slots);
    model.drafts = drafts;
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.cache_directory = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned());
    // A GPU uses its own choice of kernels.
    let fragments: &[&str] = if driver == Driver::Gpu { &[] } else { &["fragments=1"] };
    config.runtime.tune = fragments.iter().chain(tune).map(|change| (*change).to_owned()).collect();
    let lines = Lines::default();
    let host = start_on(&vulkan.instance, &config, &lines).unwrap_or_else(|e| panic!("{e:?}"));
    let mut lines = lines.0.into_inner().expect("no panic");
    lines.retain(|line| line.contains("barriers"));
    (host, lines)
}

fn start(vulkan: &Vulkan, slots: u32, tune: &[&str]) -> (Host, Vec<String>) {
    start_model(vulkan, DEMO_PATH, (None, slots, 128), tune)
}

/// Returns the number of faults that the replica has had.
fn faults(host: &Host) -> u64 {
    host.route("", "").expect("one model").1.variants().fallen(Fallback::OverlapFault)
}

const PROMPT: [u32; 5] = [5, 80, 300, 7, 1200];
const TOKENS: u32 = 16;

/// Returns the greedy tokens of `count` concurrent sequences with different prompts.
fn texts(host: &Host, count: u32) -> Vec<Vec<u32>> {
    let (_, replica) = host.route("", "").expect("one model");
    let replica = &*replica;
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..count)
            .map(|i| {
                scope.spawn(move || {
                    let prompt: Vec<u32> = PROMPT.iter().map(|token| token + i).collect();
                    let mut request = request(&prompt, TOKENS);
                    request.id = format!("text {i}");
                    generate(replica, request).tokens
                })
            })
            .collect();
        runs.into_iter().map(|run| run.join().expect("no panic")).collect()
    })
}

/// Returns the number of barriers per step of the last plan.
fn barriers(host: &Host) -> f64 {
    let (_, replica) = host.route("", "").expect("one model");
    let last = replica.steps(1).pop().expect("steps ran");
    last.cost.barriers / f64::from(last.steps)
}

#[test]
fn a_fault_at_the_start_or_in_a_text_costs_no_token() {
    let vulkan = Vulkan::without_validation();
    let (host, said) = start(&vulkan, 1, &["tags=0"]);
    assert!(said.is_empty(), "{said:?}");
    let wanted = texts(&host, 1);
    let with = barriers(&host);
    drop(host);

    let (host, said) = start(&vulkan, 1, &["tags=1"]);
    assert!(said.is_empty(), "the start's test fails: {said:?}");
    assert_eq!(texts(&host, 1), wanted);
    let without = barriers(&host);
    assert!(without < with / 3.0, "{without} barriers a step, {with} with all of them");
    assert_eq!(faults(&host), 0);
    drop(host);

    for plan in ["fault_at=1", "fault_at=5"] {
        let (host, said) = start(&vulkan, 1, &["tags=1", "retry_ms=600000", plan]);
        assert!(said.is_empty(), "{said:?}");
        assert_eq!(texts(&host, 1), wanted, "{plan}");
        assert!(barriers(&host) >= with, "{plan}: {} barriers a step after the fault", barriers(&host));
        assert_eq!(texts(&host, 1), wanted, "{plan}: a second text");
        assert_eq!(faults(&host), 1, "{plan}");
    }
    // After the pause, steps run without barriers again.
    let (host, _) = start(&vulkan, 1, &["tags=1", "retry_ms=1", "fault_at=1"]);
    assert_eq!(texts(&host, 1), wanted);
    assert!(barriers(&host) < with / 3.0, "{} barriers a step after the pause", barriers(&host));
    drop(host);

    // Found by the test at start: a call waits for words that are never written.
    let (host, said) = start(&vulkan, 1, &["tags=1", "broken_call=6"]);
    assert!(said.len() == 1 && said[0].contains("waited too long"), "{said:?}");
    assert_eq!(texts(&host, 1), wanted);
}

#[test]
fn a_fault_with_four_sequences_costs_none_of_them_a_token() {
    let vulkan = Vulkan::without_validation();
    let (host, _) = start(&vulkan, 4, &["tags=1"]);
    let wanted = texts(&host, 4);
    assert!(wanted.iter().all(|text| text.len() == TOKENS as usize));
    drop(host);
    for injected in [&["fault_at=1"][..], &["fault_at=4"], &["broken_call=9", "broken_every=3", "retry_ms=0"]] {
        let (host, said) = start(&vulkan, 4, &[&["tags=1"], injected].concat());
        assert!(said.is_empty(), "{said:?}");
        assert_eq!(texts(&host, 4), wanted, "{injected:?}");
        assert!(faults(&host) > 0);
    }
}

/// Writes a hybrid checkpoint of random weights whose activations can be tagged: eight layers, two of them attention.
fn hybrid(folder: &Path) {
    let preset = synth::preset("tiny-qwen3.5-moe").expect("a preset");
    let mut json: serde_json::Value = serde_json::from_str(&synth::with_layers(&preset, 8)).expect("JSON");
    for (key, value) in [("num_key_heads", 8), ("num_value_heads", 16), ("key_head_dim", 16), ("value_head_dim", 16)] {
        json["text_config"][format!("linear_{key}")] = value.into();
    }
    // The vocabulary covers the prompts, which are made for the demo model.
    json["text_config"]["vocab_size"] = 2048.into();
    synth::write(&json.to_string(), folder, &SynthOptions::default(), &mut |_, _| {}).expect("written");
}

/// Goal: the test at start reads and writes the window pages of its own sequences only, so that a right step passes it.
/// Method: experts of random weights in layers of which every other one has a window that is much shorter than the
/// context, with one sequence and with several.
#[test]
fn steps_of_layers_with_windows_pass_the_test_at_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = include_str!("../fixtures/families/gptoss-mxfp4/config.json");
    let mut json: serde_json::Value = serde_json::from_str(config).expect("JSON");
    json.as_object_mut().expect("an object").remove("quantization_config");
    let layers = ["sliding_attention", "full_attention"].repeat(2);
    for (key, value) in [("num_hidden_layers", 4), ("num_key_value_heads", 2), ("intermediate_size", 64)] {
        json[key] = value.into();
    }
    json["layer_types"] = layers.into();
    json["vocab_size"] = 2048.into();
    synth::write(&json.to_string(), folder.path(), &SynthOptions::default(), &mut |_, _| {}).expect("written");
    let path = folder.path().to_str().expect("a name in UTF-8");

    let vulkan = Vulkan::without_validation();
    let texts_and_barriers = |tags: &str| {
        let (host, said) = start_model(&vulkan, path, (None, 4, 512), &[tags]);
        assert!(said.is_empty(), "{tags}: {said:?}");
        (texts(&host, 4), barriers(&host))
    };
    let (wanted, with) = texts_and_barriers("tags=0");
    let (found, without) = texts_and_barriers("tags=1");
    assert_eq!(found, wanted);
    assert!(without < with / 3.0, "{without} barriers a step, {with} with all of them");
}

/// Goal: a fault in a call changes no token, because everything that a faulty step has written is written again before
/// it is read. Method: one call is broken, in every step or in every second one, with two sequences. The ignored test
/// does the same with recurrent state, which a step that is run again must not change twice.
#[test]
fn a_fault_in_any_call_of_any_step_changes_no_token() {
    // With several rows the call before the first attention waits for nothing, so it cannot be broken.
    any_call(DEMO_PATH, [5, 11]);
}

#[test]
#[ignore = "long; not yet run to its end on a CPU driver"]
fn a_fault_in_any_call_changes_no_recurrent_state() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("hybrid");
    hybrid(&path);
    any_call(path.to_str().expect("UTF-8"), [4, 23]);
}

fn any_call(path: &str, calls: [u32; 2]) {
    let vulkan = Vulkan::without_validation();
    let (host, said) = start_model(&vulkan, path, (Some(0), 2, 128), &["tags=1"]);
    assert!(said.is_empty(), "{path}: {said:?}");
    let wanted = texts(&host, 2);
    drop(host);
    for (index, call) in calls.into_iter().enumerate() {
        let broken = format!("broken_call={call}");
        let every = format!("broken_every={}", 1 + index % 3);
        let (host, said) = start_model(&vulkan, path, (Some(0), 2, 128), &["tags=1", "retry_ms=0", &broken, &every]);
        assert!(said.is_empty(), "{path}: {said:?}");
        assert_eq!(texts(&host, 2), wanted, "{path}, {broken}, {every}");
        assert!(faults(&host) > 0, "{path}: {broken} breaks nothing");
    }
}

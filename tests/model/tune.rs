//! Goal: `ostinato tune` stores the improvements that it reports, for one row, several rows and prompts, and later starts use
//! them without changing generated tokens. Method: the embedded demo model, also as codes that are multiplied by integer dot products, on lavapipe with few values of each choice. The stored file is then replaced
//! by other content that a machine may have: other entries, a file for other shaders, a truncated one.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{Lines, generate, request};
use ostinato::config::{Config, DEMO_PATH, Model};
use ostinato::device::Adapter;
use ostinato::gpu::devices::start_on;
use ostinato::host::progress::Quiet;
use ostinato::measure::tune::{TuneEvent, TuneOptions, TuneOutcome, tune};
use ostinato::model::checkpoint::Checkpoint;
use ostinato::model::decoder::StepShape;
use ostinato::model::demo;
use ostinato::model::gguf::write::{FileType, convert};
use std::path::Path;
use std::time::Duration;

/// Returns the lines about tuned shapes that a start prints, and 12 tokens generated after a prompt.
fn start(vulkan: &Vulkan, adapter: &Adapter, path: &Path, cache: &Path, tune: &[&str]) -> (Vec<String>, Vec<u32>) {
    let mut model = Model::new("demo", path, Some(adapter.selector()));
    model.context = Some(64);
    model.prefill_chunk = Some(16);
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.cache_directory = Some(cache.to_owned());
    config.runtime.tune = tune.iter().map(|change| (*change).to_owned()).collect();
    let lines = Lines::default();
    let host = start_on(&vulkan.instance, &config, &lines).unwrap_or_else(|e| panic!("{e:?}"));
    let (_, replica) = host.route("", "").expect("one model");
    let tokens = generate(&replica, request(&[5, 80, 300, 7], 12)).tokens;
    drop(host);
    let mut lines = lines.0.into_inner().expect("no panic");
    lines.retain(|line| line.contains("ostinato tune"));
    (lines, tokens)
}

/// Tunes with few values. Returns the events and the result.
fn tune_demo(
    vulkan: &Vulkan,
    adapter: &Adapter,
    cache: &Path,
    changes: &[&str],
    rows: Option<&[u32]>,
    prompts: Option<&[u32]>,
) -> (Vec<TuneEvent>, TuneOutcome) {
    let checkpoint =
        Checkpoint::open(&demo::unpack(Path::new(DEMO_PATH), Some(cache)).expect("a folder")).expect("the demo model");
    tune_model(vulkan, adapter, &checkpoint, cache, changes, (rows, prompts, 20))
}

/// Like [`tune_demo`], for a checkpoint.
fn tune_model(
    vulkan: &Vulkan,
    adapter: &Adapter,
    checkpoint: &Checkpoint,
    cache: &Path,
    changes: &[&str],
    (rows, prompts, seconds): (Option<&[u32]>, Option<&[u32]>, u64),
) -> (Vec<TuneEvent>, TuneOutcome) {
    let changes: Vec<String> = changes.iter().map(|change| (*change).to_owned()).collect();
    let options = TuneOptions {
        depth: 20,
        rows,
        prompts,
        time: Some(Duration::from_secs(seconds)),
        candidates: 1,
        tune: &changes,
        cache: Some(cache),
    };
    let mut events = Vec::new();
    let outcome = tune(&vulkan.instance, adapter, checkpoint, &options, &Quiet, &mut |e| events.push(e.clone()))
        .unwrap_or_else(|e| panic!("{e:?}"));
    assert!(outcome.steps.iter().all(|step| step.before_us > 0.0 && step.after_us > 0.0), "{outcome:?}");
    let first = &outcome.steps[0];
    assert!(first.tried > 0 && first.after_us <= first.before_us, "{outcome:?}");
    (events, outcome)
}

/// Returns the stored file.
fn stored(outcome: &TuneOutcome) -> (std::path::PathBuf, serde_json::Value) {
    let path = outcome.file.clone().expect("kept");
    let text = std::fs::read_to_string(&path).expect("the file");
    (path, serde_json::from_str(&text).expect("JSON"))
}

/// Fails if the stored file has an entry of a kind of step that no event reported with its value.
fn assert_reported(file: &serde_json::Value, variant: &str, events: &[TuneEvent]) {
    for (name, value) in file["shapes"][variant].as_object().into_iter().flatten() {
        let found = |event: &TuneEvent| matches!(event, TuneEvent::Improved { name: of, new, .. } if name.starts_with(of) && new == value);
        assert!(events.iter().any(found), "{name} is kept as {value} and was not found in {events:?}");
    }
}

#[test]
fn what_is_found_is_kept_and_used_by_later_starts_without_changing_tokens() {
    let vulkan = Vulkan::without_validation();
    let adapter = vulkan.adapter(Driver::first());
    let cache = tempfile::tempdir().expect("a folder");
    let fragments = ["fragments=1", "tags=0"];
    let (lines, wanted) = start(&vulkan, &adapter, Path::new(DEMO_PATH), cache.path(), &fragments);
    assert!(lines.is_empty(), "{lines:?}");

    let (events, outcome) = tune_demo(&vulkan, &adapter, cache.path(), &fragments, None, None);
    println!("{events:#?}");
    assert!(
        matches!(&events[0], TuneEvent::Began { variant, us, .. } if variant == "fragments, emulated" && *us > 0.0)
    );
    assert!(events.iter().all(|event| !matches!(event, TuneEvent::Wrong { .. })), "{events:?}");
    let steps: Vec<StepShape> = outcome.steps.iter().map(|step| step.step).collect();
    assert_eq!(steps, [StepShape::Decode { rows: 1 }], "weights in fragments are searched for one row");
    let (path, mut file) = stored(&outcome);
    assert_reported(&file, "fragments, emulated", &events);

    // Three entries for this model, independent of the tuning result, and one for another model.
    file["shapes"] = serde_json::json!({"fragments, emulated": {
        "skinny.512x256": "128/1/2", "skinny.2048x256": "64/2/1", "splits.8x4x32": "6", "splits.8x2x64": "1",
    }});
    let changed = serde_json::to_string_pretty(&file).expect("text");
    std::fs::write(&path, &changed).expect("written");
    let (lines, tokens) = start(&vulkan, &adapter, Path::new(DEMO_PATH), cache.path(), &fragments);
    assert!(lines.len() == 1 && lines[0].contains(": 3 workgroup shapes"), "{lines:?}");
    assert_eq!(tokens, wanted);
    // Row-major weights have separate entries.
    let (lines, _) = start(&vulkan, &adapter, Path::new(DEMO_PATH), cache.path(), &["fragments=0", "tags=0"]);
    assert!(lines.is_empty(), "{lines:?}");

    let key = file["key"].as_str().expect("a key").to_owned();
    for (bad, why) in [
        (changed.replace(&key, "0123456789abcdef"), "is of other shaders"),
        (changed[..changed.len() / 2].to_owned(), "cannot be read"),
    ] {
        std::fs::write(&path, bad).expect("written");
        let (lines, tokens) = start(&vulkan, &adapter, Path::new(DEMO_PATH), cache.path(), &fragments);
        assert!(lines.len() == 1 && lines[0].contains(why) && lines[0].contains("not used"), "{lines:?}");
        assert_eq!(tokens, wanted, "{why}");
    }
}

#[test]
fn batches_and_prompts_of_row_major_weights_are_tuned_and_a_change_that_is_given_stays() {
    let vulkan = Vulkan::without_validation();
    let adapter = vulkan.adapter(Driver::first());
    let cache = tempfile::tempdir().expect("a folder");
    let rows = ["fragments=0", "tags=0"];
    let (lines, wanted) = start(&vulkan, &adapter, Path::new(DEMO_PATH), cache.path(), &rows);
    assert!(lines.is_empty(), "{lines:?}");

    let changes = ["fragments=0", "tags=0", "gemv_threads=64"];
    let (events, outcome) = tune_demo(&vulkan, &adapter, cache.path(), &changes, Some(&[1, 4, 32]), Some(&[16]));
    println!("{events:#?}");
    let steps: Vec<StepShape> = outcome.steps.iter().map(|step| step.step).collect();
    let decode = |rows| StepShape::Decode { rows };
    assert_eq!(steps, [decode(1), decode(4), decode(32), StepShape::Prefill { rows: 16 }]);
    let began = |event: &TuneEvent| match event {
        TuneEvent::Began { step, variant, us } => {
            assert!(variant == "rows" && *us > 0.0, "{event:?}");
            Some(*step)
        }
        _ => None,
    };
    assert_eq!(events.iter().filter_map(began).collect::<Vec<StepShape>>(), steps);
    assert!(events.iter().all(|event| !matches!(event, TuneEvent::Wrong { .. })), "{events:?}");
    let (path, mut file) = stored(&outcome);
    assert_reported(&file, "rows", &events);
    assert!(!file.to_string().contains("gemv_threads"), "{file}");

    // Entries as a search writes them, independent of its result: the next start's prompt of 4 tokens, in a step of 16, uses
    // one of them.
    file["shapes"] = serde_json::json!({"rows": {
        "gemv_most.256x512": "3", "matmul.16x512x256": "8/64/1/4/2", "matmul.4x1024x256": "8/32/1/4/1",
        "matmul.16x4096x4096": "8/32/1/4/1",
    }});
    std::fs::write(&path, file.to_string()).expect("written");
    let (lines, tokens) = start(&vulkan, &adapter, Path::new(DEMO_PATH), cache.path(), &rows);
    assert!(lines.len() == 1 && lines[0].contains(": 3 workgroup shapes"), "{lines:?}");
    assert_eq!(tokens, wanted);
    // A later search replaces the entries of its steps and keeps those of others.
    let (_, outcome) = tune_demo(&vulkan, &adapter, cache.path(), &rows, Some(&[32]), Some(&[]));
    let (_, file) = stored(&outcome);
    assert_eq!(file["shapes"]["rows"]["matmul.16x512x256"], "8/64/1/4/2", "{file}");
}

/// Goal: the workgroups of integer dot products, their rows, and from how many rows on other kernels are used, are searched with
/// models of codes. Method: entries that no search has found are in the file, are used by a start, and are then replaced by a
/// search: it keeps only what it has found.
#[test]
fn integer_dot_products_of_codes_are_tuned() {
    let vulkan = Vulkan::without_validation();
    let adapter = vulkan.adapter(Driver::first());
    let cache = tempfile::tempdir().expect("a folder");
    let file = cache.path().join("model.gguf");
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    convert(demo, &file, FileType::from_name("Q4_K_M").expect("a type"), 2).expect("converted");
    let checkpoint = Checkpoint::open(&file).expect("a model");
    let changes = ["fragments=0", "tags=0", "integer_dots=1", "dots_most=4"];
    let (lines, wanted) = start(&vulkan, &adapter, &file, cache.path(), &changes[..3]);
    assert!(lines.is_empty(), "{lines:?}");

    let search = |changes: &[&str]| {
        let (events, outcome) =
            tune_model(&vulkan, &adapter, &checkpoint, cache.path(), changes, (Some(&[1, 2]), Some(&[]), 120));
        println!("{events:#?}");
        assert!(events.iter().all(|event| !matches!(event, TuneEvent::Wrong { .. })), "{events:?}");
        let (path, file) = stored(&outcome);
        assert_reported(&file, "rows", &events);
        (outcome, path, file)
    };
    let (outcome, path, mut kept) = search(&changes[..3]);
    // One row: workgroups, and threads of attention. Two rows: their number for a workgroup, `gemv` and `matmul`.
    let tried: Vec<usize> = outcome.steps.iter().map(|step| step.tried).collect();
    assert!(tried[0] >= 2 && tried[1] >= 3, "{outcome:?}");

    let own = ["dots.256x512", "dots_batch.256x512", "dots_most.256x512"];
    kept["shapes"] = serde_json::json!({"rows": {
        "dots.256x512": "2/32/4/2/2", "dots_batch.256x512": "1", "dots_most.256x512": "1", "dots.4096x12288": "8/64/4/1/2",
    }});
    std::fs::write(&path, kept.to_string()).expect("written");
    let (lines, tokens) = start(&vulkan, &adapter, &file, cache.path(), &changes[..3]);
    assert!(lines.len() == 1 && lines[0].contains(": 3 workgroup shapes"), "{lines:?}");
    assert_eq!(tokens, wanted);
    // Weights that no integer dots multiply leave them as they are.
    let (lines, _) = start(&vulkan, &adapter, &file, cache.path(), &["fragments=0", "tags=0"]);
    assert!(lines.len() == 1 && lines[0].contains(": 1 workgroup shape"), "{lines:?}");

    // What is given is not searched: its entry stays.
    kept["shapes"]["rows"].as_object_mut().expect("entries").retain(|name, _| own.contains(&name.as_str()));
    std::fs::write(&path, kept.to_string()).expect("written");
    let (_, outcome) =
        tune_model(&vulkan, &adapter, &checkpoint, cache.path(), &changes, (Some(&[1, 2]), Some(&[]), 120));
    assert_eq!(stored(&outcome).1["shapes"]["rows"]["dots_most.256x512"], "1");
    std::fs::write(&path, kept.to_string()).expect("written");
    search(&changes[..3]);
}

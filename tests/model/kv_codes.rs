//! Goal: keys and values in 8-bit codes (`kv_format = "int8"`) change logits hardly and tokens of trained models not at
//! all, in every kind of model, and sequences stay independent of each other. Method: each checkpoint draws greedily with
//! f32 keys and values and with codes; the logits are compared up to the first token that differs, from which on the two
//! texts are different.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{collect, expected, fixture, generate, idle, request, submit};
use crate::quantised::{divergence, draw};
use ostinato::config::{Config, KvFormat, Model};
use ostinato::engine::request::Request;
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use std::path::Path;

/// The number of tokens that each checkpoint draws.
const TOKENS: u32 = 20;

fn serve(vulkan: &Vulkan, path: &Path, format: KvFormat, tune: &[&str], change: impl FnOnce(&mut Model)) -> Host {
    let mut model = Model::new("m", path, Some(vulkan.adapter(Driver::Lavapipe).selector()));
    model.kv_format = Some(format);
    model.context = Some(512);
    change(&mut model);
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.tune = tune.iter().map(|change| (*change).to_owned()).collect();
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()))
}

/// Returns the divergence of each step with codes from that with f32, in order of size.
fn apart(vulkan: &Vulkan, path: &Path, prompt: &[u32], count: u32) -> Vec<f64> {
    let [wanted, found] =
        [KvFormat::F32, KvFormat::Int8].map(|format| draw(&serve(vulkan, path, format, &[], |_| {}), prompt, count));
    let same = wanted.0.iter().zip(&found.0).take_while(|(a, b)| a == b).count();
    let steps = (same + 1).min(count as usize);
    let of = |step: usize| divergence(&found.1[step..=step], &wanted.1[step..=step]);
    let mut steps: Vec<f64> = (0..steps).map(of).collect();
    steps.sort_by(f64::total_cmp);
    steps
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Checks checkpoints with random weights, whose logits follow small changes of their activations, each with the most that
/// the mean divergence may be: three to five times what was measured. Of a model with experts the steps of the largest
/// quarter do not count: where rounding changes the choice of an expert, the logits are off by much more than rounding.
fn check(checkpoints: &[(&str, f64)]) {
    let vulkan = Vulkan::shared();
    // Longer than a page, and than the windows of these models.
    let prompt: Vec<u32> = (0..45).map(|i| 3 + i * 7 % 60).collect();
    for (name, limit) in checkpoints {
        let steps = apart(&vulkan, &fixture(name), &prompt, TOKENS);
        let config = std::fs::read_to_string(fixture(name).join("config.json")).expect("config.json");
        let counted = if config.contains("experts_per_tok") { (steps.len() * 3).div_ceil(4) } else { steps.len() };
        let (all, mean) = (mean(&steps), mean(&steps[..counted]));
        println!("{name}: mean divergence {mean:.1e} of {counted} steps, {all:.1e} of all {}", steps.len());
        assert!(mean <= *limit, "{name}: {mean:e} of {counted} steps");
    }
}

#[test]
fn dense_models_hybrids_and_experts_stay_near() {
    check(&[("qwen3-deep", 5e-3), ("llama-wide", 5e-4), ("hybrid-long", 2e-4), ("moe-top2", 1e-2)]);
}

#[test]
fn windows_sinks_soft_caps_shared_layers_and_latent_vectors_stay_near() {
    check(&[
        ("families/gemma2-new", 5e-3),
        ("families/gptoss-bf16", 5e-3),
        ("families/gemma4-shared", 3e-2),
        ("families/mistral-window", 4e-3),
        ("families/deepseek2-lite", 1e-2),
    ]);
}

/// Returns the folder of a demo model.
fn demo(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo").join(name)
}

/// The trained demo models draw the same 64 tokens, and their logits are much nearer than those of random weights.
#[test]
fn trained_models_draw_the_same_tokens() {
    let vulkan = Vulkan::shared();
    for (folder, name) in [("model", "demo"), ("hybrid", "demo-hybrid")] {
        let steps = apart(&vulkan, &demo(folder), &expected(name).prompt, 64);
        println!("{name}: mean divergence {:.1e} of {} steps", mean(&steps), steps.len());
        assert_eq!(steps.len(), 64, "{name}");
        assert!(mean(&steps) <= 1e-5, "{name}: {:e}", mean(&steps));
    }
}

/// The kernels for weights in fragments, without matrix units.
#[test]
fn fragments_stay_near() {
    let vulkan = Vulkan::shared();
    let tune = ["fragments=1", "flash_threads=64"];
    let prompt = expected("demo").prompt;
    let wanted = draw(&serve(&vulkan, &demo("model"), KvFormat::F32, &[], |_| {}), &prompt, 16);
    let found = draw(&serve(&vulkan, &demo("model"), KvFormat::Int8, &tune, |_| {}), &prompt, 16);
    let apart = divergence(&found.1, &wanted.1);
    println!("demo in fragments: mean divergence {apart:.1e}");
    assert_eq!(found.0, wanted.0);
    assert!(apart <= 2e-5, "{apart:e}");
}

/// Goal: a sequence draws the same beside others, from cached pages, and after it has lost its pages. Method: the demo
/// model, first one request at a time, then all at once with too few pages for all; then again, with their beginnings
/// in the prefix cache.
#[test]
fn sequences_with_codes_draw_together_what_they_draw_alone() {
    let vulkan = Vulkan::shared();
    let prompt = expected("demo").prompt;
    let known = draw(&serve(&vulkan, &demo("model"), KvFormat::Int8, &[], |_| {}), &prompt, 64).0;
    let text: Vec<u32> = prompt.iter().chain(&known).copied().collect();
    let host = serve(&vulkan, &demo("model"), KvFormat::Int8, &[], |model| {
        model.slots = Some(4);
        model.kv_pages = Some(24);
        model.context = Some(160);
        model.prefill_chunk = Some(16);
    });
    let replica = &host.replicas().next().expect("one model");
    let ask = |more: usize| Request { id: format!("r{more}"), ..request(&text[..prompt.len() + more], 40) };
    let lengths = [0, 1, 5, 16, 9, 2];
    let alone = lengths.map(|more| generate(replica, ask(more)).tokens);
    for (more, tokens) in lengths.iter().zip(&alone) {
        assert_eq!(tokens[..], text[prompt.len() + more..][..40], "{more} tokens more");
    }
    for turn in 0..2 {
        let events = lengths.map(|more| submit(replica, ask(more)));
        for ((more, events), alone) in lengths.iter().zip(&events).zip(&alone) {
            assert_eq!(&collect(events).tokens, alone, "turn {turn}, {more} tokens more");
        }
        idle(replica);
    }
}

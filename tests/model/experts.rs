//! Goal: a model whose experts are divided among several buffers, as those of layers that no buffer of a device holds, draws
//! what it draws with whole ones. Method: fixtures of several families are served in process with the largest buffer of
//! weights that divides the experts of every layer. Steps of prompts sort their rows by expert, so that each row's experts are
//! added in the same order as with whole ones: their logits must have the same bits. In decode steps each call adds its
//! experts' outputs, so that logits differ by the order of sums.
//! Not here: how recordings divide experts (`kernels::recordings`), and the kernels (`kernels::moe`).

use crate::common::{Driver, Vulkan};
use crate::harness::every_case;
use crate::harness::models::{Lines, fixture};
use crate::quantised::{divergence, draw, start};
use ostinato::config::{Config, Model};
use ostinato::gpu::devices::start_with;
use ostinato::gpu::error::StartError;
use ostinato::host::progress::Quiet;
use ostinato::model::checkpoint::Checkpoint;

/// The maximum mean divergence of logits where sums have another order.
const DIVERGENCE: f64 = 1e-9;
/// The same in fragments, where rows are divided into parts of 16 bits.
const IN_FRAGMENTS: f64 = 1e-7;

/// Returns a maximum size of buffers of weights that no layer's `gate_up` or `down` fits in: three quarters of the latter.
/// Buffers hold an expert at least.
fn dividing(name: &str) -> u64 {
    let checkpoint = Checkpoint::open(&fixture(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let bytes = |part: &str| {
        let of = checkpoint.weights().iter().filter(|weight| weight.name.ends_with(part)).map(|weight| weight.bytes());
        of.min().unwrap_or_else(|| panic!("{name} has {part}"))
    };
    let limit = bytes("experts.down") * 3 / 4;
    assert!(limit < bytes("experts.gate_up"), "{name}");
    limit
}

#[test]
fn experts_in_several_buffers_draw_what_whole_ones_draw() {
    let vulkan = Vulkan::shared();
    let prompt: Vec<u32> = (0..150).map(|i| i * 7 % 190 + 3).collect();
    // Biases; codes with biases; experts beside a dense MLP; experts from some groups, sorted in every step; a shared expert;
    // codes beside a shared expert.
    let fixtures = [
        ("families/gptoss-bf16", true),
        ("families/gptoss-mxfp4", true),
        ("families/gemma4-moe", every_case()),
        ("families/deepseek3-groups", every_case()),
        ("families/qwen2moe-second", true),
        ("quantised/fp8-shared", true),
    ];
    for (name, in_fragments) in fixtures {
        for (fragments, most) in [(0, DIVERGENCE), (1, IN_FRAGMENTS)].into_iter().take(1 + usize::from(in_fragments)) {
            let drawn = [0, dividing(name)].map(|limit| {
                let tune = [format!("fragments={fragments}"), format!("weight_buffer={limit}")];
                let tune: Vec<&str> = tune.iter().map(String::as_str).collect();
                draw(&start(&vulkan, &fixture(name), None, &tune), &prompt, 8)
            });
            let [(wanted, whole), (found, divided)] = drawn;
            let apart = divergence(&divided, &whole);
            let same = divided.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            println!("{name}, fragments={fragments}: divergence {apart:.1e}, {same} of {} rows equal", whole.len());
            assert_eq!(found, wanted, "{name}, fragments={fragments}");
            assert!(divided[0] == whole[0], "{name}, fragments={fragments}: the prompt's logits have other bits");
            assert!(apart <= most, "{name}, fragments={fragments}: {apart:e}");
        }
    }
}

/// Goal: an expert that no buffer holds is refused with its name and both numbers.
#[test]
fn an_expert_larger_than_the_largest_buffer_is_refused() {
    let vulkan = Vulkan::shared();
    let model = Model::new("m", fixture("moe-top2"), Some(vulkan.adapter(Driver::Lavapipe).selector()));
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.tune = vec!["weight_buffer=4096".to_owned()];
    let error = start_with(&vulkan.devices, &config, &Quiet).map(|_| ()).expect_err("4 KiB hold no expert");
    assert!(matches!(&error, StartError::Unsupported { model, .. } if model == "m"), "{error:?}");
    // 2 · 24 rows of 48 numbers in 16 bits.
    let text = error.to_string();
    let parts = ["\"layers.0.experts.gate_up\"", "4608 bytes for each expert", "at most 4096"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

/// Goal: where experts are divided, so are those of the small model that is tested at start. Method: its test passes, with
/// kernels of its own: the file beside the pipeline cache keeps another combination than for whole experts.
#[test]
fn the_small_model_of_the_test_at_start_has_experts_in_several_buffers_too() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let name = "families/gptoss-mxfp4";
    for limit in [0, dividing(name)] {
        let model = Model::new("m", fixture(name), Some(vulkan.adapter(Driver::Lavapipe).selector()));
        let mut config = Config { models: vec![model], ..Config::default() };
        config.runtime.cache_directory = Some(folder.path().to_owned());
        config.runtime.tune = vec!["reference_test=2".to_owned(), format!("weight_buffer={limit}")];
        let lines = Lines::default();
        drop(start_with(&vulkan.devices, &config, &lines).unwrap_or_else(|e| panic!("{name}: {e:?}")));
        let lines = lines.0.into_inner().expect("no panic");
        let right =
            lines.iter().any(|line| line.contains("a small model of the same kind gives the reference's results"));
        assert!(right, "{lines:?}");
    }
}

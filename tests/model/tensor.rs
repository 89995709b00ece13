//! Goal: a model of which two devices each have a part of every layer (tensor parallelism) draws the tokens that
//! transformers draws, or that one device draws. Method: lavapipe and SwiftShader under the validation layer, whose steps
//! are divided where the host carries sums from one to the other; keys and values in f32; checkpoints of every kind of
//! layer that can be divided so; batches, prompt chunks, prefix hits, preemption, drafts, constraints, log probabilities
//! and a lost device.

use crate::common::{Driver, Vulkan};
use crate::harness::every_case;
use crate::harness::models::{Generated, Lines, expected, fixture, generate, idle, request};
use crate::quantised::{RANDOM_PROMPT, THREE_EACH, random_model};
use crate::split::{
    check, check_beside_prompts, check_constraint, check_family, check_lost_devices, check_scores, configured, mixed,
    named, only, over_both, refused, serve, together, tokens,
};
use ostinato::config::{DEMO_PATH, Draft, Model, Placement, Quantize, SplitMode};
use ostinato::engine::request::{FinishReason, Request, Sampling, Token, TokenLogprobs};
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::model::checkpoint::Checkpoint;
use ostinato::model::gguf::write::{FileType, convert};
use std::path::{Path, PathBuf};

/// Serves a model of which each driver has a part of every layer.
fn divided(vulkan: &Vulkan, path: impl Into<PathBuf>, change: impl FnOnce(&mut Model)) -> Host {
    serve(vulkan, path, |model| {
        model.replicas = vec![over_both(vulkan, SplitMode::Tensor)];
        change(model);
    })
}

/// Serves a model on lavapipe alone.
fn whole(vulkan: &Vulkan, path: impl Into<PathBuf>, change: impl FnOnce(&mut Model)) -> Host {
    serve(vulkan, path, |model| {
        model.replicas = vec![Placement::on(Some(vulkan.adapter(Driver::Lavapipe).selector()))];
        change(model);
    })
}

#[test]
fn parts_of_layers_on_two_devices_draw_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    // Biases, an odd number of inner values, experts with and without a shared one, and recurrent layers. A key head that
    // both devices have with different numbers of query heads is that of the model of the other tests here.
    let further: &[&str] = if every_case() { &["qwen3-deep", "moe-top2", "hybrid-two", "hybrid-moe"] } else { &[] };
    for name in ["llama-bias", "moe-top1", "next-moe"].iter().chain(further) {
        let name = *name;
        let host = divided(&vulkan, fixture(name), |_| {});
        let replica = only(&host);
        let on: Vec<&str> = replica.devices().map(|device| device.uuid.as_str()).collect();
        assert_eq!(on, Driver::BOTH.map(|driver| vulkan.adapter(driver).uuid), "{name}");
        check(&replica, name);
        idle(&replica);
    }
}

/// Goal: latent attention, norms over all heads of a row, experts beside a dense MLP, and inputs of layers that depend on the
/// token, with which prompts are computed whole. Method: numbers of heads that the devices divide unevenly, and a key head that
/// both have.
#[test]
fn latent_vectors_norms_of_rows_and_experts_beside_an_mlp_draw_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    let further: &[&str] = if every_case() {
        &[
            "deepseek2-lite",
            "deepseek3-blocks",
            "deepseek3-halves",
            "glm4lite-types",
            "olmo2-equal",
            "olmo3-new",
            "gemma4-shared",
        ]
    } else {
        &[]
    };
    for name in ["deepseek2-groups", "olmo3-old", "gemma4-moe"].iter().chain(further) {
        check_family(name, |folder, change| divided(&vulkan, folder, change));
    }
}

#[test]
fn channels_of_short_convolutions_draw_in_parts_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    let further: &[&str] = if every_case() { &["lfm2-plain"] } else { &[] };
    for name in ["lfm2moe-scaled"].iter().chain(further) {
        check_family(name, |folder, change| divided(&vulkan, folder, change));
    }
}

/// Goal: value heads of GGUF files, whose key heads take turns, keep their key heads. Method: a random hybrid; each device has
/// three value heads, which use both key heads, one of them twice.
#[test]
fn recurrent_heads_that_take_turns_draw_in_parts_what_one_device_draws() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = random_model(folder.path(), "hybrid-three", &THREE_EACH);
    let file = folder.path().join("model.gguf");
    for name in if every_case() { &["BF16", "Q8_0"][..] } else { &["Q8_0"] } {
        convert(&checkpoint, &file, FileType::from_name(name).expect("a type"), 2).expect("converted");
        let draw = |host: &Host| generate(&only(host), request(&RANDOM_PROMPT, 24)).tokens;
        let sizes = |model: &mut Model| model.context = Some(128);
        assert!(Checkpoint::open(&file).expect("a model").config.delta.is_some_and(|net| net.tiled));
        assert_eq!(draw(&divided(&vulkan, &file, sizes)), draw(&whole(&vulkan, &file, sizes)), "{name}");
    }
}

/// Goal: windows, sinks, norms around branches, softcaps, scales, experts with biases, sigmoid routing and shared experts.
/// Method: prompts longer than the windows, all at once, in small chunks and with few pages.
#[test]
#[ignore = "long: make test-full"]
fn families_in_parts_draw_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    for name in [
        "gemma2-new",
        "gemma3-wrapped",
        "gemma4-dense",
        "gptoss-bf16",
        "gptoss-mxfp4",
        "mistral-window",
        "mixtral-window",
        "minimaxm2-part",
        "olmoe-grouped",
        "exaone4-window",
        "dots1-window",
        "seedoss-biases",
        "ernie45-biases",
        "ernie45moe-plain",
        "granitehybrid-moe",
        "hunyuanmoe-lists",
        "lfm2moe-plain",
        "qwen3vlmoe-dense",
        "glm4-bias",
        "glm4moe-air",
        "granite-tied",
        "phi3-plain",
        "qwen2moe-every",
        "qwen3vl-untied",
        "smollm3-list",
        "nemotronh-moe",
    ] {
        check_family(name, |folder, change| divided(&vulkan, folder, change));
    }
}

#[test]
#[ignore = "long: make test-full"]
fn quantised_parts_draw_what_one_device_draws() {
    let vulkan = Vulkan::shared();
    // Formats of several kinds in one model, K-quants whose blocks are divided between devices, and quantised while loaded.
    // Parts of the demo model begin with whole groups, so its numbers are those of one device.
    for (folder, prompt, to) in [
        (fixture("quantised/ct-mixed"), expected("quantised/ct-mixed").prompt, None),
        (fixture("llama.cpp/demo-Q4_K_M.gguf"), (300..340).collect(), None),
        (PathBuf::from(DEMO_PATH), (300..340).collect(), Some(Quantize::Int8)),
    ] {
        let quantised = |model: &mut Model| (model.quantize, model.context) = (to, Some(128));
        let draw = |host: &Host| generate(&only(host), request(&prompt, 40)).tokens;
        let wanted = draw(&whole(&vulkan, &folder, quantised));
        assert_eq!(draw(&divided(&vulkan, &folder, quantised)), wanted, "{}", folder.display());
    }
}

/// Goal: sequences of a batch draw what one device draws: with every kind of sampling, stop conditions and log
/// probabilities, with more requests than slots, when their pages are lost and recomputed, and on cached prefixes.
#[test]
fn batches_of_a_model_in_parts_draw_what_one_device_draws() {
    let vulkan = Vulkan::shared();
    let prompt: Vec<u32> = expected("qwen3-deep").prompt.iter().cycle().copied().take(64).collect();
    let sizes = |model: &mut Model, pages: u32, cache: bool| {
        model.context = Some(128);
        model.kv_pages = Some(pages);
        model.prefix_cache = Some(cache);
        model.prefill_chunk = Some(8);
    };
    let one = whole(&vulkan, fixture("qwen3-deep"), |model| sizes(model, 40, false));
    let mut asks = mixed(&prompt);
    asks[0].logprobs = Some(3);
    let wanted: Vec<Generated> = asks.iter().map(|ask| generate(&only(&one), ask.clone())).collect();
    let stop = wanted[5].tokens[9];
    asks[5].limits.stop_ids = vec![stop];
    let stopped = wanted[5].tokens.iter().position(|token| *token == stop).expect("it is there");

    let host = divided(&vulkan, fixture("qwen3-deep"), |model| sizes(model, 12, true));
    let replica = only(&host);
    let found = together(&replica, &asks);
    assert_eq!(tokens(&found)[..5], tokens(&wanted)[..5]);
    assert_eq!(found[5].tokens, wanted[5].tokens[..=stopped]);
    assert_eq!(found[5].finished.reason, FinishReason::Stop(stop));
    let chosen = |of: &Generated| -> Vec<f32> {
        of.drawn.iter().map(|token| token.logprobs.as_ref().expect("asked for").chosen).collect()
    };
    for (found, wanted) in chosen(&found[0]).into_iter().zip(chosen(&wanted[0])) {
        assert!((found - wanted).abs() < 1e-3, "{found} in place of {wanted}");
    }
    idle(&replica);
    // The second time, the prompt's pages are found.
    let long = named("long", request(&prompt, 20));
    let [first, again] = [0, 1].map(|_| generate(&replica, long.clone()));
    assert_eq!(first.tokens, again.tokens);
    assert_eq!(first.tokens, generate(&only(&one), long).tokens);
    assert_eq!(again.finished.cached_tokens, 48, "of the prompt's 64 tokens");
    // Log probabilities of the prompt itself, chunk by chunk.
    let scores =
        |host: &Host| generate(&only(host), Request { prompt_logprobs: Some(2), ..request(&prompt[..40], 1) }).scored;
    let (found, wanted) = (scores(&host), scores(&one));
    check_scores(&found, &wanted);
}

/// Goal: sequences decode in the steps of prompts on devices that each have a part of every layer, with every kind of sampling,
/// more sequences than prompts, an LM head of its own or the embedding, recurrent layers, and drafts.
#[test]
fn sequences_in_parts_draw_beside_prompts_what_they_draw_alone() {
    let vulkan = Vulkan::shared();
    let tensor = SplitMode::Tensor;
    check_beside_prompts(&vulkan, "qwen3-deep", tensor, &["mixed_steps=1", "prompts=1"], (24, &|_| {}));
    let lookup = |model: &mut Model| (model.draft, model.drafts) = (Some(Draft::Lookup), Some(1));
    check_beside_prompts(&vulkan, "moe-top1", tensor, &["mixed_steps=1"], (24, &lookup));
    check_beside_prompts(&vulkan, "hybrid-two", tensor, &["mixed_steps=1"], (128, &|_| {}));
}

/// Goal: the rows of the LM head are divided, tied or not, and draw what the last device alone draws, in rows that need the
/// greatest logits, shortlists or all logits. Method: vocabularies that no tile divides; requests that filter in every way,
/// at the same time.
#[test]
fn the_vocabulary_in_parts_draws_what_the_last_device_alone_draws() {
    let vulkan = Vulkan::shared();
    let hot = Sampling { temperature: 0.9, seed: Some(3), ..Sampling::default() };
    let samplings = [
        Sampling::default(),
        Sampling { top_p: 0.9, ..hot.clone() },
        Sampling { top_k: 3, min_p: 0.02, ..hot.clone() },
        Sampling { top_k: 40, top_p: 0.5, ..hot },
    ];
    // The last one's LM head is its embedding.
    let untied: &[&str] = if every_case() { &["moe-top1", "hybrid-two"] } else { &["moe-top1"] };
    for name in untied.iter().chain(&["qwen3-deep"]) {
        let prompt = expected(name).prompt;
        let mut asks: Vec<Request> = (0..)
            .zip(&samplings)
            .map(|(id, sampling)| Request { sampling: sampling.clone(), ..named(id, request(&prompt[..9 - id], 16)) })
            .collect();
        (asks[0].limits.stop_ids, asks[0].limits.min_tokens) = (vec![7, 8, 9], 5);
        asks[2].logprobs = Some(4);
        let draw = |tune: &str| {
            let mut config = configured(&vulkan, fixture(name), |model| {
                model.replicas = vec![over_both(&vulkan, SplitMode::Tensor)];
                model.context = Some(64);
            });
            config.runtime.tune = vec![tune.to_owned()];
            let lines = Lines::default();
            let host = start_with(&vulkan.devices, &config, &lines).unwrap_or_else(|e| panic!("{e:?}"));
            let found = together(&only(&host), &asks);
            idle(&only(&host));
            let alternatives = |token: &Token| token.logprobs.clone().expect("asked for");
            let logprobs: Vec<TokenLogprobs> = found[2].drawn.iter().map(alternatives).collect();
            let lines = lines.0.lock().expect("no panic").join("\n");
            (found.into_iter().map(|one| one.tokens).collect::<Vec<_>>(), logprobs, lines)
        };
        let (found, logprobs, lines) = draw("vocabulary_rows=1");
        let (wanted, wanted_logprobs, whole) = draw("vocabulary_rows=0");
        assert_eq!(found, wanted, "{name}");
        for (found, wanted) in logprobs.iter().zip(&wanted_logprobs) {
            assert!((found.chosen - wanted.chosen).abs() < 1e-4, "{name}: {found:?} in place of {wanted:?}");
            let ids = |of: &TokenLogprobs| of.top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(ids(found), ids(wanted), "{name}");
        }
        assert!(lines.contains("rows 0 to 255 of the LM head") || *name == "hybrid-two", "{lines}");
        assert!(whole.contains("the LM head is on the last device alone: vocabulary_rows=0"), "{whole}");
    }
}

/// Goal: sums of prompts that pass as bfloat16 in blocks are those that pass as f32, but for their rounding. Method: the demo
/// model, with prompts whose chunks have one block or several, the last of them not full, beside decode steps, whose sums use the
/// same slots in words. The tokens are the same; log probabilities differ a little, which shows that sums were rounded.
#[test]
fn sums_of_prompts_in_blocks_are_rounded_and_nothing_else() {
    let vulkan = Vulkan::shared();
    let draw = |tune: &str| {
        let mut config = configured(&vulkan, DEMO_PATH, |model| {
            model.replicas = vec![over_both(&vulkan, SplitMode::Tensor)];
            (model.context, model.prefill_chunk) = (Some(128), Some(32));
        });
        config.runtime.tune = vec![tune.to_owned()];
        let host = start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
        let asks: Vec<Request> = [1, 33, 70, 5]
            .into_iter()
            .enumerate()
            .map(|(at, length)| Request {
                logprobs: Some(0),
                ..named(at, request(&(300..300 + length).collect::<Vec<u32>>(), 12))
            })
            .collect();
        let found = together(&only(&host), &asks);
        idle(&only(&host));
        let chosen = |token: &Token| token.logprobs.as_ref().expect("asked for").chosen;
        let logprobs: Vec<f32> = found.iter().flat_map(|one| one.drawn.iter().map(chosen)).collect();
        (found.into_iter().map(|one| one.tokens).collect::<Vec<_>>(), logprobs)
    };
    let (wanted, exact) = draw("exchange_halves=0");
    let (found, rounded) = draw("exchange_halves=1");
    assert_eq!(found, wanted);
    let most = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(most > 1e-6 && most < 0.1, "log probabilities differ by up to {most}");
}

/// Goal: drafts by the model's own block and by a draft head change no token, and some are accepted.
#[test]
fn drafts_for_a_model_in_parts_change_no_token() {
    let vulkan = Vulkan::shared();
    let demo = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("demo").join(name);
    // A draft model drafts as where the layers are on several devices (`split`).
    let head = Draft::Model(fixture("eagle/demo"));
    for (name, draft) in [("hybrid", None), ("model", Some(head))] {
        let sizes = |model: &mut Model| (model.context, model.slots) = (Some(128), Some(1));
        let one = whole(&vulkan, demo(name), |model| {
            sizes(model);
            model.drafts = Some(0);
        });
        let text = one.models()[0].text.clone().expect("the demo has a tokenizer");
        let asked = "<|im_start|>user\nTell me a story about a fox, please.<|im_end|>\n<|im_start|>assistant\n";
        let ask = request(&text.encode(asked, true).expect("text"), 14);
        let host = divided(&vulkan, demo(name), |model| {
            sizes(model);
            (model.draft, model.drafts, model.drafts_always) = (draft.clone(), Some(2), Some(true));
            // The last device drafts; lavapipe compiles faster.
            model.replicas[0].devices.reverse();
        });
        let found = generate(&only(&host), ask.clone());
        assert_eq!(found.tokens, generate(&only(&one), ask).tokens, "{name}, {draft:?}");
        let (drafted, accepted) = (found.finished.drafted_tokens, found.finished.accepted_tokens);
        assert!(accepted > 2, "{name}, {draft:?}: {accepted} accepted of {drafted}");
    }
}

/// Goal: a block with experts drafts, and its drafts change no token. That they are those of one device is tested in plain Rust
/// (`kernels::recordings`): the model's weights are random, and it accepts hardly any.
#[test]
fn a_block_with_experts_drafts_for_a_model_in_parts() {
    let vulkan = Vulkan::shared();
    let known = expected("next-moe");
    let host = divided(&vulkan, fixture("next-moe"), |model| {
        (model.slots, model.drafts, model.drafts_always) = (Some(1), Some(2), Some(true));
        // The last device drafts; lavapipe compiles faster.
        model.replicas[0].devices.reverse();
    });
    let drawn = generate(&only(&host), request(&known.prompt, 24));
    assert_eq!(drawn.tokens, known.greedy[..24]);
    assert!(drawn.finished.drafted_tokens > 0);
}

/// Goal: drafts that are looked up change no token and some are accepted.
#[test]
#[ignore = "in make test-full: split::drafts_on_two_devices_change_no_token, with layers in parts"]
fn looked_up_drafts_for_a_model_in_parts_change_no_token() {
    let vulkan = Vulkan::shared_without_validation();
    let host = divided(&vulkan, DEMO_PATH, |model| {
        (model.context, model.slots) = (Some(256), Some(2));
        (model.draft, model.drafts, model.drafts_always) = (Some(Draft::Lookup), Some(3), Some(true));
    });
    let served = &host.models()[0];
    let text = served.text.as_ref().expect("the demo has a tokenizer");
    let replica = only(&host);
    let prompt = text.encode(&"The fox saw the bird. ".repeat(6), false).expect("text");
    let ask = request(&prompt, 24);
    let one = whole(&vulkan, DEMO_PATH, |model| model.context = Some(256));
    let drafting = generate(&replica, ask.clone());
    assert_eq!(drafting.tokens, generate(&only(&one), ask).tokens);
    assert!(drafting.finished.accepted_tokens > 0, "none accepted of {}", drafting.finished.drafted_tokens);
}

/// Goal: a constrained output follows its constraint, while its neighbour draws what it draws alone.
#[test]
fn a_constraint_of_a_model_in_parts_is_followed() {
    let vulkan = Vulkan::shared_without_validation();
    check_constraint(&divided(&vulkan, DEMO_PATH, |model| (model.context, model.slots) = (Some(64), Some(2))));
}

/// Goal: the loss of a device in the middle of steps rebuilds the replica on both, and its streams go on with the
/// tokens that they would have had.
#[test]
fn a_model_in_parts_that_loses_a_device_goes_on() {
    let vulkan = Vulkan::new();
    let host = divided(&vulkan, fixture("qwen3-deep"), |model| {
        (model.slots, model.prefix_cache) = (Some(2), Some(false));
    });
    // Both have a part of every layer, so one stands for the other.
    check_lost_devices(&host, if every_case() { &[0, 1] } else { &[1] });
}

/// Goal: a device that has a fault in an exchange ends the exchanges of all: no token of that step is used, the replica is
/// rebuilt, and its streams go on. Method: the fault word of the first device is set before the fifteenth decode plan of each
/// build.
#[test]
fn a_fault_in_an_exchange_changes_no_token() {
    let vulkan = Vulkan::shared();
    let known = expected("qwen3-deep");
    let mut config = configured(&vulkan, fixture("qwen3-deep"), |model| {
        model.replicas = vec![over_both(&vulkan, SplitMode::Tensor)];
    });
    config.runtime.tune = vec!["fault_at=15".to_owned()];
    let host = start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
    let replica = only(&host);
    // A step that returns its logits is a plan of its own.
    let found = generate(&replica, Request { dump_logits: true, ..request(&known.prompt, 24) });
    assert_eq!(found.tokens, known.greedy[..24]);
    assert!(replica.losses() > 0 && !replica.failed(), "{} losses", replica.losses());
    idle(&replica);
}

/// Goal: what cannot be divided is refused with the numbers, and with what works.
#[test]
fn what_cannot_be_divided_by_tensors_is_refused() {
    let vulkan = Vulkan::shared();
    let tensor = |model: &mut Model| model.replicas = vec![over_both(&vulkan, SplitMode::Tensor)];
    for (name, what) in [
        ("hybrid-three", "3 value heads of recurrent layers cannot be divided equally among 2 devices"),
        (
            "families/lfm2-biases",
            "60 channels of short convolutions cannot be divided equally among 2 devices, in multiples of 4",
        ),
        ("families/nemotronh-dense", "norm their heads in 3 groups, which cannot be divided equally among 2 devices"),
        ("families/granitemamba-dense", "norm their heads in 1 group, which cannot be divided equally among 2 devices"),
        ("quantised/ct-order", "are not in the order of its inputs (act-order)"),
    ] {
        let error = refused(&vulkan, fixture(name), tensor);
        let text = error.to_string();
        assert!(
            error.is_users() && text.contains(what) && text.ends_with("split = \"layers\" works"),
            "{name}: {text}"
        );
    }
}

//! Goal: a model whose layers are split over two devices draws the tokens that transformers draws, or that one device
//! draws. Method: lavapipe and SwiftShader under the validation layer, keys and values in f32; checkpoints of every kind
//! of layer; batches, prompt chunks, prefix hits, preemption, drafts, constraints, log probabilities, pooling and a lost
//! device.

use crate::common::{Driver, Vulkan};
use crate::families::{cases, small_chunk};
use crate::harness::every_case;
use crate::harness::models::{Generated, Lines, Warnings, collect, expected, fixture, generate, idle, request, submit};
use crate::transformers::error;
use ostinato::config::{Config, DEMO_PATH, Draft, KvFormat, Model, Placement, Quantize, SplitMode};
use ostinato::engine::request::{FinishReason, Request, Sampling, Scored};
use ostinato::gpu::devices::start_with;
use ostinato::gpu::error::StartError;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::model::grammar::{Constraint, Grammars};
use ostinato::model::text::Text;
use ostinato::model::text::chat::{ChatMessage, ChatOptions};
use ostinato::replica::Replica;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The allowed relative error of logits with f32 keys and values, where only sums differ.
const EXACT: f64 = 2e-3;

/// A replica whose first layers are on one CPU driver and the others on the other one; without shares, as many as measured
/// times say.
pub fn split_over(vulkan: &Vulkan, shares: &[u32]) -> Placement {
    Placement { shares: shares.to_vec(), ..over_both(vulkan, SplitMode::Layers) }
}

/// A replica on both CPU drivers.
pub fn over_both(vulkan: &Vulkan, split: SplitMode) -> Placement {
    let devices = Driver::BOTH.map(|driver| vulkan.adapter(driver).selector()).to_vec();
    Placement { devices, split: Some(split), ..Placement::default() }
}

pub fn configured(vulkan: &Vulkan, path: impl Into<PathBuf>, change: impl FnOnce(&mut Model)) -> Config {
    let mut model = Model::new("m", path, None);
    model.replicas = vec![split_over(vulkan, &[1, 1])];
    model.kv_format = Some(KvFormat::F32);
    model.slots = Some(4);
    change(&mut model);
    Config { models: vec![model], ..Config::default() }
}

/// Serves a model whose steps run as they should: no test at start has failed.
pub fn serve(vulkan: &Vulkan, path: impl Into<PathBuf>, change: impl FnOnce(&mut Model)) -> Host {
    let warnings = Warnings::default();
    let host = start_with(&vulkan.devices, &configured(vulkan, path, change), &warnings);
    assert_eq!(*warnings.0.lock().expect("no panic"), [""; 0], "{:?}", host.as_ref().err());
    host.unwrap_or_else(|e| panic!("{e:?}"))
}

pub fn refused(vulkan: &Vulkan, path: impl Into<PathBuf>, change: impl FnOnce(&mut Model)) -> StartError {
    start_with(&vulkan.devices, &configured(vulkan, path, change), &Quiet).map(|_| ()).expect_err("it cannot be served")
}

pub fn only(host: &Host) -> Arc<Replica> {
    host.replicas().next().expect("one replica")
}

pub fn named(id: impl ToString, request: Request) -> Request {
    Request { id: id.to_string(), ..request }
}

/// Generates tokens that transformers draws from a checkpoint, and compares the logits of some steps.
pub fn check(replica: &Replica, name: &str) {
    // More tokens add no kind of step, and SwiftShader takes long for each.
    const TOKENS: usize = 24;
    let mut known = expected(name);
    known.greedy.truncate(TOKENS);
    known.logits.retain(|(step, _)| *step < TOKENS);
    let ran = generate(replica, request(&known.prompt, known.greedy.len() as u32));
    assert_eq!(ran.tokens, known.greedy, "{name}");
    assert_eq!(ran.finished.reason, FinishReason::Length);
    let steps = known.logits.iter().map(|(step, _)| *step as u32 + 1).max().expect("there are logits");
    let stepped = generate(replica, Request { dump_logits: true, ..request(&known.prompt, steps) });
    for (step, wanted) in &known.logits {
        let found = stepped.drawn[*step].logits.as_ref().expect("logits were asked for");
        let error = error(found, wanted);
        assert!(error <= EXACT, "{name}, step {step}: relative error {error:.2e} exceeds {EXACT:.2e}");
    }
}

#[test]
fn layers_on_two_devices_draw_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    // A long rotary table, recurrent layers with a block that drafts, and with experts. The other tests here have dense
    // layers, and recurrent ones without such a block.
    let further: &[&str] = if every_case() { &["qwen3-deep", "llama-deep", "hybrid-two", "moe-top2"] } else { &[] };
    for name in ["qwen3-long", "hybrid-three", "hybrid-moe"].iter().chain(further) {
        let name = *name;
        let host = serve(&vulkan, fixture(name), |_| {});
        let replica = only(&host);
        let on: Vec<&str> = replica.devices().map(|device| device.uuid.as_str()).collect();
        assert_eq!(on, Driver::BOTH.map(|driver| vulkan.adapter(driver).uuid), "{name}");
        let layers: Vec<_> = replica.stages.iter().map(|stage| stage.layers.clone()).collect();
        assert!(layers[0].start == 0 && layers[0].end == layers[1].start && !layers[1].is_empty(), "{layers:?}");
        check(&replica, name);
        idle(&replica);
    }
}

/// Has a replica draw what transformers draws from all prompts of a checkpoint at once, in small chunks and with few pages.
pub fn check_family(name: &str, serve: impl FnOnce(PathBuf, &dyn Fn(&mut Model)) -> Host) {
    let folder = fixture("families").join(name);
    let cases = cases(&folder);
    let longest = cases.iter().map(|case| case.prompt.len() + case.greedy.len()).max().expect("prompts") as u32;
    let chunk = small_chunk(&folder);
    let host = serve(folder, &|model| {
        model.context = Some(longest + 16);
        model.prefill_chunk = Some(chunk);
        model.kv_pages = Some(longest.div_ceil(16) + 6);
    });
    let replica = only(&host);
    let asks = cases.iter().enumerate();
    let events: Vec<_> = asks
        .map(|(index, case)| submit(&replica, named(index, request(&case.prompt, case.greedy.len() as u32))))
        .collect();
    for (case, events) in cases.iter().zip(&events) {
        assert_eq!(collect(events).tokens, case.greedy, "{name}, prompt of {}", case.prompt.len());
    }
    idle(&replica);
}

#[test]
fn short_convolutions_on_two_devices_draw_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    check_family("lfm2-biases", |folder, change| serve(&vulkan, folder, change));
}

/// Goal: layers with windows, experts, latent attention, norms around branches, and layers that read the keys of others
/// or that have inputs of their own. Method: prompts longer than the windows, all at once, in small chunks and with few
/// pages.
#[test]
#[ignore = "long: make test-full"]
fn families_on_two_devices_draw_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    for name in [
        "gemma3-wrapped",
        "gemma4-shared",
        "olmo3-old",
        "gptoss-mxfp4",
        "deepseek2-lite",
        "mistral-window",
        "glm4-plain",
        "lfm2moe-plain",
        "granitemamba-moe",
        "nemotronh-moe",
        "nemotronh-dense",
    ] {
        check_family(name, |folder, change| serve(&vulkan, folder, change));
    }
}

#[test]
#[ignore = "long: make test-full"]
fn quantised_layers_on_two_devices_draw_what_one_device_draws() {
    let vulkan = Vulkan::shared();
    for name in ["quantised/gptq-4", "quantised/fp8-hybrid"] {
        let known = expected(name);
        let replica = only(&serve(&vulkan, fixture(name), |_| {}));
        assert_eq!(
            generate(&replica, request(&known.prompt, known.greedy.len() as u32)).tokens,
            known.greedy,
            "{name}"
        );
    }
    // Quantised while it is loaded: the reference is one device.
    let known = expected("qwen3-deep");
    let quantised = |model: &mut Model| model.quantize = Some(Quantize::Int8);
    let draw = |host: &Host| generate(&only(host), request(&known.prompt, 40)).tokens;
    let one = serve(&vulkan, fixture("qwen3-deep"), |model| {
        model.replicas = vec![Placement::on(Some(vulkan.adapter(Driver::Lavapipe).selector()))];
        quantised(model);
    });
    assert_eq!(draw(&serve(&vulkan, fixture("qwen3-deep"), quantised)), draw(&one));
}

/// Requests of several lengths with all kinds of sampling.
pub fn mixed(prompt: &[u32]) -> Vec<Request> {
    let hot = Sampling { temperature: 1.0, seed: Some(7), ..Sampling::default() };
    let samplings = [
        Sampling::default(),
        hot.clone(),
        Sampling { top_k: 5, seed: Some(8), ..hot.clone() },
        Sampling { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: -0.5, ..Sampling::default() },
        Sampling { logit_bias: vec![(3, 2.0), (50, -1.0)], seed: Some(9), ..hot },
        Sampling::default(),
    ];
    let sizes = [(17, 40), (1, 5), (8, 33), (16, 20), (3, 17), (12, 26)];
    let of = |(index, (sampling, (length, tokens))): (usize, (Sampling, (usize, u32)))| Request {
        sampling,
        ..named(index, request(&prompt[..length], tokens))
    };
    samplings.into_iter().zip(sizes).enumerate().map(of).collect()
}

pub fn together(replica: &Replica, asks: &[Request]) -> Vec<Generated> {
    let events: Vec<_> = asks.iter().map(|ask| submit(replica, ask.clone())).collect();
    events.iter().map(collect).collect()
}

pub fn tokens(generated: &[Generated]) -> Vec<&[u32]> {
    generated.iter().map(|one| &one.tokens[..]).collect()
}

/// Goal: sequences of a batch draw what one device draws: with every kind of sampling, stop conditions and log
/// probabilities, with more requests than slots, when their pages are lost and recomputed, and on cached prefixes.
#[test]
fn batches_on_two_devices_draw_what_one_device_draws() {
    let vulkan = Vulkan::shared();
    for name in ["qwen3-deep", "hybrid-two"] {
        let prompt = expected(name).prompt;
        let prompt = prompt.iter().cycle().copied().take(64).collect::<Vec<u32>>();
        let sizes = |model: &mut Model, pages: u32, cache: bool| {
            model.context = Some(128);
            model.kv_pages = Some(pages);
            model.prefix_cache = Some(cache);
            if name == "qwen3-deep" {
                model.prefill_chunk = Some(8);
            }
        };
        let one = serve(&vulkan, fixture(name), |model| {
            model.replicas = vec![Placement::on(Some(vulkan.adapter(Driver::Lavapipe).selector()))];
            sizes(model, 40, false);
        });
        let mut asks = mixed(&prompt);
        asks[0].logprobs = Some(3);
        let wanted: Vec<Generated> = asks.iter().map(|ask| generate(&only(&one), ask.clone())).collect();
        let stop = wanted[5].tokens[9];
        asks[5].limits.stop_ids = vec![stop];
        let stopped = wanted[5].tokens.iter().position(|token| *token == stop).expect("it is there");

        let host = serve(&vulkan, fixture(name), |model| sizes(model, 12, true));
        let replica = only(&host);
        for turn in 0..2 {
            let found = together(&replica, &asks);
            assert_eq!(tokens(&found)[..5], tokens(&wanted)[..5], "{name}, turn {turn}");
            assert_eq!(found[5].tokens, wanted[5].tokens[..=stopped], "{name}, turn {turn}");
            assert_eq!(found[5].finished.reason, FinishReason::Stop(stop));
            let chosen = |of: &Generated| -> Vec<f32> {
                of.drawn.iter().map(|token| token.logprobs.as_ref().expect("asked for").chosen).collect()
            };
            for (found, wanted) in chosen(&found[0]).into_iter().zip(chosen(&wanted[0])) {
                assert!((found - wanted).abs() < 1e-3, "{name}: {found} in place of {wanted}");
            }
            idle(&replica);
        }
        // The second time, the prompt's pages, and its recurrent state where there is some, are found.
        let long = named("long", request(&prompt, 20));
        let [first, again] = [0, 1].map(|_| generate(&replica, long.clone()));
        assert_eq!(first.tokens, again.tokens);
        assert_eq!(first.tokens, generate(&only(&one), long).tokens, "{name}");
        if name == "qwen3-deep" {
            assert_eq!(again.finished.cached_tokens, 48, "of the prompt's 64 tokens");
        }
    }
}

/// Goal: with few pages, sequences lose theirs and are computed again, on both devices.
#[test]
fn sequences_that_lose_their_pages_on_two_devices_go_on() {
    let vulkan = Vulkan::shared();
    let known = expected("qwen3-deep");
    let host = serve(&vulkan, fixture("qwen3-deep"), |model| {
        model.context = Some(128);
        model.kv_pages = Some(12);
        model.prefill_chunk = Some(8);
        model.prefix_cache = Some(false);
    });
    let replica = only(&host);
    let ask = |index: usize| named(index, request(&known.prompt, known.greedy.len() as u32));
    for one in together(&replica, &(0..6).map(ask).collect::<Vec<_>>()) {
        assert_eq!(one.tokens, known.greedy);
    }
    let prefilled: u32 =
        replica.steps(100_000).iter().filter(|step| step.phase == "prefill").map(|step| step.rows).sum();
    assert!(prefilled > 6 * known.prompt.len() as u32, "none was computed again: {prefilled} prompt tokens");
    idle(&replica);
}

/// Goal: drafts by the model's own block, by a draft model and by look-up change no token, and some are accepted: the output
/// is that of one device without drafts.
#[test]
fn drafts_on_two_devices_change_no_token() {
    let vulkan = Vulkan::shared();
    let content = "Sort these words: pear, apple, fig, grape, cherry".to_owned();
    let message = ChatMessage { role: "user".to_owned(), content, ..Default::default() };
    let demo = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("demo").join(name);
    // The block's drafts are right where the answer is certain, those of a look-up where the text repeats itself, and those of
    // the model itself nearly always.
    for (name, drafts, draft) in
        [("hybrid", 2, None), ("model", 3, Some(Draft::Lookup)), ("model", 3, Some(Draft::Model(demo("model"))))]
    {
        let folder = demo(name);
        let text = Text::load(&folder).expect("the tokenizer").expect("there is one");
        let asked = match &draft {
            Some(Draft::Lookup) => "The fox saw the bird. ".repeat(6),
            _ => text.chat(std::slice::from_ref(&message), &ChatOptions::default()).expect("the template takes it"),
        };
        let prompt = text.encode(&asked, false).expect("text");
        // One at a time: on a CPU driver a verifying step has one sequence.
        let asks = [named(0, request(&prompt, 24))];
        let sizes = |model: &mut Model| (model.context, model.slots) = (Some(128), Some(2));
        let plain = serve(&vulkan, &folder, |model| {
            model.replicas = vec![Placement::on(Some(vulkan.adapter(Driver::Lavapipe).selector()))];
            model.drafts = Some(0);
            sizes(model);
        });
        let drafting = serve(&vulkan, &folder, |model| {
            sizes(model);
            (model.draft, model.drafts, model.drafts_always) = (draft.clone(), Some(drafts), Some(true));
            if let Some(Draft::Model(_)) = model.draft {
                // The last device drafts; lavapipe compiles faster.
                model.replicas[0].devices.reverse();
            }
        });
        let [plain, drafting] = [plain, drafting].map(|host| together(&only(&host), &asks));
        assert_eq!(tokens(&drafting), tokens(&plain), "{name}");
        let sum = |of: fn(&Generated) -> u32| drafting.iter().map(of).sum::<u32>();
        let (drafted, accepted) = (sum(|one| one.finished.drafted_tokens), sum(|one| one.finished.accepted_tokens));
        let least = if matches!(draft, Some(Draft::Model(_))) { drafted * 2 / 3 } else { 0 };
        assert!(accepted > least, "{name}, {draft:?}: {accepted} accepted of {drafted}");
    }
}

/// Has a replica of the demo model draw a constrained output, which follows its constraint, beside a neighbour, which draws
/// what it draws alone.
pub fn check_constraint(host: &Host) {
    let served = &host.models()[0];
    let text = served.text.as_ref().expect("the demo has a tokenizer");
    let eos = text.id("<|im_end|>").expect("the demo's end of a turn");
    let grammars = Grammars::new(text, served.info.vocabulary, &[eos]).expect("grammars");
    let constraint = Constraint::Regex("[0-9]{4}-[01][0-9]-[0-3][0-9]".to_owned());
    let prompt = text.encode("When? ", false).expect("text");
    let replica = only(host);
    let free = named("free", request(&prompt, 16));
    let alone = generate(&replica, free.clone()).tokens;
    let mut ask = named("date", request(&prompt, 40));
    ask.limits.ignore_eos = false;
    ask.grammar = Some(grammars.start(&constraint, false).expect("a constraint"));
    let found = together(&replica, &[ask, free]);
    let date = text.decode(&found[0].tokens, false).expect("text");
    let parts: Vec<usize> = date.split('-').map(str::len).collect();
    assert_eq!(parts, [4, 2, 2], "{date:?}");
    assert_eq!(found[1].tokens, alone);
}

/// Goal: a constrained output follows its constraint, and its neighbour draws what it draws alone.
#[test]
fn a_constraint_on_two_devices_is_followed() {
    let vulkan = Vulkan::shared_without_validation();
    let host = serve(&vulkan, DEMO_PATH, |model| model.context = Some(256));
    check_constraint(&host);
}

/// Compares the scores of a prompt's tokens.
pub fn check_scores(found: &[Scored], wanted: &[Scored]) {
    assert!(found.len() > 30 && found.len() == wanted.len());
    for (found, wanted) in found.iter().zip(wanted) {
        let difference = (found.logprobs.chosen - wanted.logprobs.chosen).abs();
        assert!(found.id == wanted.id && difference < 1e-3, "{found:?} in place of {wanted:?}");
    }
}

/// Goal: log probabilities of a prompt, which the last stage computes chunk by chunk.
#[test]
fn scores_of_a_prompt_on_two_devices_are_those_of_one() {
    let vulkan = Vulkan::shared();
    let known = expected("qwen3-deep");
    let scores = |placement: Placement| {
        let host = serve(&vulkan, fixture("qwen3-deep"), |model| {
            model.replicas = vec![placement];
            model.prefill_chunk = Some(16);
        });
        let prompt: Vec<u32> = known.prompt.iter().chain(&known.greedy[..30]).copied().collect();
        generate(&only(&host), Request { prompt_logprobs: Some(2), ..request(&prompt, 1) }).scored
    };
    let found = scores(split_over(&vulkan, &[1, 1]));
    let wanted = scores(Placement::on(Some(vulkan.adapter(Driver::Lavapipe).selector())));
    check_scores(&found, &wanted);
}

/// Has these devices of a split replica of "qwen3-deep" be lost in the middle of steps: the replica is rebuilt, and its
/// streams go on with the tokens that they would have had.
pub fn check_lost_devices(host: &Host, devices: &[usize]) {
    let known = expected("qwen3-deep");
    let replica = only(host);
    for (losses, lost) in (1..).zip(devices.iter().copied()) {
        let uuid = &replica.stages[lost].device.uuid;
        // One request more than there are slots.
        let streams: Vec<_> = (0..3).map(|id| submit(&replica, named(id, request(&known.prompt, 40)))).collect();
        let start = Instant::now();
        while streams[0].len() < 5 {
            assert!(start.elapsed() < Duration::from_secs(60), "it does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        let served = host.devices().into_iter().find(|served| served.info.uuid == *uuid).expect("it is served");
        served.status.expect("an open device").declare_lost("a test");
        for events in &streams {
            let generated = collect(events);
            assert_eq!(generated.tokens, known.greedy[..40], "device {lost}");
            assert_eq!(generated.finished.reason, FinishReason::Length);
        }
        assert_eq!((replica.losses(), replica.failed(), replica.rebuilding()), (losses, false, false));
        idle(&replica);
    }
}

/// Goal: the loss of either device rebuilds the whole replica, and its streams go on with the tokens that they would
/// have had.
#[test]
fn a_replica_that_loses_either_device_goes_on() {
    let vulkan = Vulkan::new();
    let host = serve(&vulkan, fixture("qwen3-deep"), |model| {
        (model.slots, model.prefix_cache) = (Some(2), Some(false));
    });
    check_lost_devices(&host, &[0, 1]);
}

/// Goal: shares and memory decide where the layers are; what cannot be is refused with what would be.
#[test]
fn shares_place_layers_and_what_cannot_be_split_is_refused() {
    let vulkan = Vulkan::shared();
    let layers = |shares: &[u32]| -> Vec<std::ops::Range<u32>> {
        let host = serve(&vulkan, fixture("qwen3-deep"), |model| model.replicas = vec![split_over(&vulkan, shares)]);
        check(&only(&host), "qwen3-deep");
        only(&host).stages.iter().map(|stage| stage.layers.clone()).collect()
    };
    assert_eq!(layers(&[1, 100]), [0..1, 1..5]);
    assert_eq!(layers(&[100, 1]), [0..4, 4..5]);

    let lavapipe = vulkan.adapter(Driver::Lavapipe);
    let twice = refused(&vulkan, fixture("qwen3-deep"), |model| {
        model.replicas[0].devices = vec![lavapipe.selector(), lavapipe.name.parse().expect("a name")];
    });
    assert!(twice.is_users() && twice.to_string().contains("name each device once"), "{twice}");
    let single = refused(&vulkan, fixture("qwen3-f16"), |_| {});
    let what = "split over 2 devices is asked for, its 1 layers can be divided in at most 1 parts";
    assert!(single.is_users() && single.to_string().contains(what), "{single}");
    let little =
        refused(&vulkan, fixture("qwen3-deep"), |model| model.memory_limit = Some("64KiB".parse().expect("bytes")));
    let text = ostinato::telemetry::with_causes(&little);
    assert!(little.is_users() && text.contains("64.0 KiB") || text.contains("left under the memory limit"), "{text}");
}

/// Goal: without shares, each device is measured, once in a process, and layers are divided by the times; the texts are those of
/// any division.
#[test]
fn measured_times_divide_the_layers() {
    let vulkan = Vulkan::shared();
    let said = || {
        let config = configured(&vulkan, fixture("qwen3-deep"), |model| {
            model.replicas = vec![split_over(&vulkan, &[])];
        });
        let lines = Lines::default();
        let host = start_with(&vulkan.devices, &config, &lines).unwrap_or_else(|e| panic!("{e:?}"));
        check(&only(&host), "qwen3-deep");
        let layers: Vec<std::ops::Range<u32>> = only(&host).stages.iter().map(|stage| stage.layers.clone()).collect();
        let lines = lines.0.into_inner().expect("no panic");
        let line = lines.iter().find(|line| line.contains("layers are divided by measured times"));
        (line.unwrap_or_else(|| panic!("no measured times in {lines:?}")).clone(), layers)
    };
    let (line, layers) = said();
    for (driver, layers) in Driver::BOTH.into_iter().zip(&layers) {
        let of = match layers.len() {
            1 => format!("layer {} of 5", layers.start),
            _ => format!("layers {} to {} of 5", layers.start, layers.end - 1),
        };
        let (name, wanted) = (&vulkan.adapter(driver).name, format!("/s, and those of {of} in "));
        assert!(line.contains(&format!("\"{name}\" reads weights at ")) && line.contains(&wanted), "{wanted}: {line}");
    }
    // The second load finds the speeds, and so the same stages.
    assert_eq!(said(), (line, layers));
}

/// Goal: devices that keep themselves busy while they wait for each other draw what others draw. Method: few polls, so that waits
/// end with the gate and before it.
#[test]
fn devices_that_do_not_wait_idle_draw_what_transformers_draws() {
    let vulkan = Vulkan::shared();
    let mut config = configured(&vulkan, fixture("qwen3-deep"), |_| {});
    config.runtime.tune = vec!["gate_polls=2000".to_owned()];
    let host = start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
    check(&only(&host), "qwen3-deep");
    idle(&only(&host));
}

/// Has sequences decode in the steps of prompts on both devices. They draw what one device draws without such steps.
pub fn check_beside_prompts(
    vulkan: &Vulkan,
    name: &str,
    split: SplitMode,
    tune: &[&str],
    (chunk, change): (u32, &dyn Fn(&mut Model)),
) {
    // Long prompts, so that rows decode beside several chunks of each.
    let lengths = [chunk / 2, chunk + 5, 2 * chunk + 3, chunk - 1, 3 * chunk, 7];
    let prompt = expected(name).prompt;
    let samplings = mixed(&prompt.iter().cycle().copied().take(64).collect::<Vec<u32>>());
    let asks = samplings.into_iter().zip(lengths).enumerate().map(|(index, (ask, length))| {
        let rotated: Vec<u32> = prompt.iter().cycle().skip(index).take(length as usize).copied().collect();
        Request { sampling: ask.sampling, ..named(index, request(&rotated, 20)) }
    });
    let asks: Vec<Request> = asks.collect();
    let sizes = |model: &mut Model| {
        model.context = Some(3 * chunk + 32);
        model.prefill_chunk = Some(chunk);
        model.prefix_cache = Some(false);
    };
    let one = serve(vulkan, fixture(name), |model| {
        model.replicas = vec![Placement::on(Some(vulkan.adapter(Driver::Lavapipe).selector()))];
        model.drafts = Some(0);
        sizes(model);
    });
    let wanted: Vec<Generated> = asks.iter().map(|ask| generate(&only(&one), ask.clone())).collect();
    let mut config = configured(vulkan, fixture(name), |model| {
        if split == SplitMode::Tensor {
            model.replicas = vec![over_both(vulkan, split)];
        }
        sizes(model);
        change(model);
    });
    config.runtime.tune = tune.iter().map(|change| (*change).to_owned()).collect();
    let host = start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
    let replica = only(&host);
    // How many tokens are drawn in prefill steps depends on how long steps take.
    let mut asked = 0;
    for round in 1.. {
        let found = together(&replica, &asks);
        assert_eq!(tokens(&found), tokens(&wanted), "{name}, {split:?}, {tune:?}, round {round}");
        asked += asks.len() as u32;
        let steps = replica.steps(100_000);
        let drawn: u32 = steps.iter().filter(|step| step.phase == "prefill").map(|step| step.tokens).sum();
        // Each prompt draws one token in a prefill step, and so does a sequence that was computed again.
        if drawn > asked + replica.load().preemptions as u32 + 10 {
            break;
        }
        assert!(round < 40, "{name}, {split:?}, {tune:?}: {drawn} tokens were drawn in prefill steps");
    }
    idle(&replica);
}

/// Goal: sequences decode in the steps of prompts on devices that each have some of the layers, with every kind of sampling,
/// more sequences than prompts, recurrent layers, a block that drafts and a draft model.
#[test]
fn sequences_on_two_devices_draw_beside_prompts_what_they_draw_alone() {
    let vulkan = Vulkan::shared();
    let layers = SplitMode::Layers;
    check_beside_prompts(&vulkan, "qwen3-deep", layers, &["mixed_steps=1"], (24, &|_| {}));
    check_beside_prompts(&vulkan, "hybrid-three", layers, &["mixed_steps=1", "prompts=1"], (128, &|_| {}));
    let drafting = |model: &mut Model| {
        (model.draft, model.drafts) = (Some(Draft::Model(fixture("qwen3-deep"))), Some(1));
        // The last device drafts; lavapipe compiles faster.
        model.replicas[0].devices.reverse();
    };
    check_beside_prompts(&vulkan, "qwen3-deep", layers, &["mixed_steps=1", "prompts=1"], (24, &drafting));
}

/// Goal: each device's plan is printed with its layers, requests find the replica by either device, and each step has
/// submissions to both.
#[test]
fn both_devices_of_a_split_replica_are_shown() {
    let vulkan = Vulkan::shared();
    let config = configured(&vulkan, fixture("qwen3-deep"), |_| {});
    let lines = Lines::default();
    let host = start_with(&vulkan.devices, &config, &lines).unwrap_or_else(|e| panic!("{e:?}"));
    let said = lines.0.into_inner().expect("no panic").join("\n");
    let replica = only(&host);
    let table = said.split_once("memory of \"m/0\" on 2 devices").expect("the plans").1;
    let mut headings = table.lines().skip(1).take(2);
    let (names, layers) = (headings.next().expect("names"), headings.next().expect("layers"));
    for row in ["weights", "kv pages", "total", "free"] {
        let found = table.lines().find(|line| line.trim_start().starts_with(row));
        assert!(found.is_some_and(|line| line.matches("iB").count() >= 2), "{row} of both devices is not in {said}");
    }
    for stage in &replica.stages {
        let heading = match stage.layers.len() {
            1 => format!("layer {}", stage.layers.start),
            _ => format!("layers {} to {}", stage.layers.start, stage.layers.end - 1),
        };
        assert!(names.contains(&stage.device.name) && layers.contains(&heading), "{heading} is not in {said}");
        assert_eq!(host.route("m", &stage.device.uuid).expect("found").1.name, "m/0");
        let planned = host.devices().into_iter().find(|served| served.info == stage.device).expect("served").memory;
        assert!(!planned.is_empty() && planned == stage.memory);
    }
    generate(&replica, request(&expected("qwen3-deep").prompt, 8));
    let steps = replica.steps(100);
    for step in steps.iter().filter(|step| step.steps > 0) {
        let on = |index: usize| step.submissions.iter().filter(|record| record.device.index == index).count() as u32;
        for stage in &replica.stages {
            assert!(on(stage.device.index) >= step.steps, "{} steps, {:?}", step.steps, stage.device);
        }
    }
}

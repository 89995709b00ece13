//! Goal: drafting changes only the number of steps, whether the model's own block drafts or a look-up in the sequence. The tokens are the same, and drafts are accepted. Method: the
//! hybrid demo model on lavapipe with keys and values in f32; prompts of held-out tasks whose answers the model
//! predicts with certainty; with the largest number of drafts and without; greedy and sampled with a seed, alone and
//! two at a time.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{Generated, collect, expected, fixture, generate, idle, request, submit};
use ostinato::config::{Config, Draft, KvFormat, Model};
use ostinato::engine::request::{Limits, Request, Sampling};
use ostinato::gpu::devices::start_on;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::model::text::Text;
use ostinato::model::text::chat::{ChatMessage, ChatOptions};
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/hybrid")
}

fn serve(vulkan: &Vulkan, drafts: u32, slots: u32) -> Host {
    let mut model = Model::new("hybrid", folder(), Some(vulkan.adapter(Driver::Lavapipe).selector()));
    model.kv_format = Some(KvFormat::F32);
    model.slots = Some(slots);
    model.context = Some(256);
    model.drafts = Some(drafts);
    model.drafts_always = Some(true);
    let config = Config { models: vec![model], ..Config::default() };
    start_on(&vulkan.instance, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
}

const QUESTIONS: [&str; 3] =
    ["What is 347 + 285?", "Reverse the word lantern.", "Sort these words: pear, apple, fig, grape, cherry"];

fn requests(temperature: f32) -> Vec<Request> {
    let text = Text::load(&folder()).expect("the tokenizer").expect("there is one");
    (0..)
        .zip(QUESTIONS)
        .map(|(number, question)| {
            let message = ChatMessage { role: "user".to_owned(), content: question.to_owned(), ..Default::default() };
            let rendered = text.chat(&[message], &ChatOptions::default()).expect("the template takes it");
            Request {
                id: format!("{number}"),
                prompt: text.encode(&rendered, false).expect("the tokenizer takes it"),
                // The answers are nearly certain, so sampling at a low temperature draws the most probable tokens.
                sampling: Sampling { temperature, seed: Some(number), ..Sampling::default() },
                limits: Limits { max_tokens: Some(40 - number as u32), ..Limits::default() },
                logprobs: None,
                prompt_logprobs: None,
                pooling: None,
                allowed: None,
                dump_logits: false,
                grammar: None,
                priority: 0,
                cache_salt: String::new(),
                deadline: None,
                span: tracing::Span::none(),
            }
        })
        .collect()
}

fn run(host: &Host, requests: &[Request], together: bool) -> Vec<Generated> {
    let (_, replica) = host.route("", "").expect("one model");
    let replica = &*replica;
    let generated = match together {
        true => {
            let events: Vec<_> = requests.iter().map(|request| submit(replica, request.clone())).collect();
            events.iter().map(collect).collect()
        }
        false => requests.iter().map(|request| collect(&submit(replica, request.clone()))).collect(),
    };
    idle(replica);
    generated
}

fn tokens(generated: &[Generated]) -> Vec<&[u32]> {
    generated.iter().map(|one| &one.tokens[..]).collect()
}

#[test]
fn drafts_save_steps_and_change_no_token() {
    let vulkan = Vulkan::new();
    let plain = serve(&vulkan, 0, 2);
    // Sampling with a seed is checked with the largest number of drafts.
    for (drafts, temperatures) in [(1, &[0.0][..]), (3, &[0.0, 0.3])] {
        let drafting = serve(&vulkan, drafts, 2);
        for &temperature in temperatures {
            let requests = requests(temperature);
            let wanted = run(&plain, &requests, false);
            assert!(wanted.iter().all(|one| one.finished.drafted_tokens == 0));
            let found = run(&drafting, &requests, false);
            assert_eq!(tokens(&found), tokens(&wanted), "{drafts} drafts, temperature {temperature}");
            let (mut drafted, mut accepted, mut output) = (0, 0, 0);
            for one in &found {
                let finished = &one.finished;
                // The first token comes from the prompt, and the last may end the sequence one step before its drafts
                // are verified.
                let steps = finished.drafted_tokens / drafts;
                assert_eq!(1 + steps + finished.accepted_tokens, finished.output_tokens, "{finished:?}");
                drafted += finished.drafted_tokens;
                accepted += finished.accepted_tokens;
                output += finished.output_tokens;
            }
            println!("{drafts} drafts, temperature {temperature}: {accepted} of {drafted} right, {output} tokens");
            assert!(accepted * 3 > output, "{accepted} of {output} tokens were drafted, {drafted} in all");
            // Two concurrent sequences share steps, or take turns if a verification step has room for only one.
            let together = run(&drafting, &requests, true);
            assert_eq!(tokens(&together), tokens(&wanted), "{drafts} drafts, two at a time");
        }
    }
}

#[test]
fn drafts_end_where_the_context_does() {
    let vulkan = Vulkan::new();
    let [plain, drafting] = [0, 3].map(|drafts| serve(&vulkan, drafts, 1));
    let mut request = requests(0.0).swap_remove(0);
    request.limits = Limits { max_tokens: None, ignore_eos: true, ..Limits::default() };
    let found = run(&drafting, std::slice::from_ref(&request), false);
    assert_eq!(found[0].tokens.len() + request.prompt.len(), 256, "all of the context is used");
    // After the end of its answer the model's predictions are uncertain.
    request.limits.max_tokens = Some(12);
    let wanted = run(&plain, &[request], false);
    assert_eq!(found[0].tokens[..12], wanted[0].tokens);
}

/// Serves a model whose drafts are looked up, as many as possible wherever they are possible.
fn serve_with_lookup(
    vulkan: &Vulkan,
    path: PathBuf,
    drafts: u32,
    change: impl FnOnce(&mut Model, &mut Config),
) -> Host {
    let mut model = Model::new("m", path, Some(vulkan.adapter(Driver::Lavapipe).selector()));
    model.kv_format = Some(KvFormat::F32);
    model.slots = Some(2);
    model.draft = (drafts > 0).then_some(Draft::Lookup);
    (model.drafts, model.drafts_always) = (Some(drafts), Some(true));
    let mut config = Config::default();
    change(&mut model, &mut config);
    config.models = vec![model];
    start_on(&vulkan.instance, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
}

/// Goal: models without a drafting block verify what was looked up, and draw the tokens of transformers, also when pages
/// of the prompt are found in the prefix cache.
#[test]
fn looked_up_drafts_change_no_token() {
    let vulkan = Vulkan::new();
    for name in ["qwen3-deep", "llama-f32", "hybrid-two"] {
        let host = serve_with_lookup(&vulkan, fixture(name), 3, |model, config| {
            model.prefill_chunk = Some(64);
            config.runtime.tune = vec!["fragments=0".into()];
        });
        let (_, replica) = host.route("", "").expect("one model");
        let known = expected(name);
        let prompt = [&known.prompt[..], &known.greedy[..24]].concat();
        for turn in 0..2 {
            let found = generate(&replica, request(&known.prompt, 64));
            assert_eq!(found.tokens, known.greedy, "{name}, turn {turn}");
            assert!(found.finished.drafted_tokens > 0);
            let rest = generate(&replica, request(&prompt, 40));
            assert_eq!(rest.tokens, known.greedy[24..], "{name}, turn {turn}, the rest");
        }
        idle(&replica);
    }
}

/// Goal: repetitions are drafted, in the prompt and in the output, and steps are saved; greedy and sampled with a seed.
#[test]
fn repetitions_are_looked_up() {
    let vulkan = Vulkan::new();
    let folder = || Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model");
    let [plain, drafting] =
        [0, 3].map(|drafts| serve_with_lookup(&vulkan, folder(), drafts, |model, _| model.context = Some(256)));
    let text = Text::load(&folder()).expect("the tokenizer").expect("there is one");
    let sentence = text.encode("The fox saw the bird. ", false).expect("it is text");
    for temperature in [0.0, 0.2] {
        let ask = |number: u64, repeats: usize| Request {
            id: number.to_string(),
            sampling: Sampling { temperature, seed: Some(number), ..Sampling::default() },
            ..request(&sentence.repeat(repeats), 60)
        };
        let asked: Vec<Request> = (0..2).map(|number| ask(number, 6)).collect();
        let wanted = run(&plain, &asked, false);
        let found = run(&drafting, &asked, false);
        assert_eq!(tokens(&found), tokens(&wanted), "temperature {temperature}");
        assert_eq!(tokens(&run(&drafting, &asked, true)), tokens(&wanted), "temperature {temperature}, two at a time");
        let accepted: u32 = found.iter().map(|one| one.finished.accepted_tokens).sum();
        let output: u32 = found.iter().map(|one| one.finished.output_tokens).sum();
        println!("temperature {temperature}: {accepted} of {output} tokens were looked up");
        assert!(temperature > 0.0 || accepted * 3 > output, "{accepted} of {output} tokens were looked up");
    }
}

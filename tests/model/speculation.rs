//! Goal: drafting changes only the number of steps, whether the model's own block drafts, a look-up in the sequence, a
//! second model, or a draft head. The tokens are the same, and drafts are accepted. Method: the demo models and committed checkpoints on
//! lavapipe with keys and values in f32; for the block, prompts of held-out tasks whose answers the model predicts with
//! certainty; with the largest number of drafts and without; greedy and sampled with a seed, alone and several at a time.

use crate::common::{Driver, Vulkan};
use crate::families::cases;
use crate::harness::every_case;
use crate::harness::models::{
    Drafted, Generated, Lines, collect, drafted, expected, fixture, generate, idle, request, submit,
};
use ostinato::config::{Config, Draft, KvFormat, Model, Placement, Quantize, SplitMode};
use ostinato::engine::request::{Limits, Request, Sampling};
use ostinato::gpu::devices::start_with;
use ostinato::gpu::error::StartError;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::model::draft::DraftError;
use ostinato::model::grammar::Constraint;
use ostinato::model::text::Text;
use ostinato::model::text::chat::{ChatMessage, ChatOptions};
use ostinato::telemetry::with_causes;
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
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
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
                // The answers are nearly certain, so sampling at a low temperature draws the most probable tokens.
                sampling: Sampling { temperature, seed: Some(number), ..Sampling::default() },
                limits: Limits { max_tokens: Some(40 - number as u32), ..Limits::default() },
                ..Request::new(number.to_string(), text.encode(&rendered, false).expect("the tokenizer takes it"))
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
    let vulkan = Vulkan::shared();
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
    let vulkan = Vulkan::shared();
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
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
}

/// Goal: models without a drafting block verify what was looked up, and draw the tokens of transformers, also when pages
/// of the prompt are found in the prefix cache.
#[test]
fn looked_up_drafts_change_no_token() {
    let vulkan = Vulkan::shared();
    for name in ["qwen3-deep", "llama-f32", "hybrid-two", "families/lfm2-plain", "families/lfm2-biases"] {
        let host = serve_with_lookup(&vulkan, fixture(name), 3, |model, config| {
            model.prefill_chunk = Some(64);
            config.runtime.tune = vec!["fragments=0".into()];
        });
        let (_, replica) = host.route("", "").expect("one model");
        let (known, greedy) = match name.starts_with("families/") {
            true => cases(&fixture(name)).pop().map(|case| (case.prompt, case.greedy)).expect("there are prompts"),
            false => (expected(name).prompt, expected(name).greedy),
        };
        let prompt = [&known[..], &greedy[..24]].concat();
        for turn in 0..2 {
            let found = generate(&replica, request(&known, 64));
            assert_eq!(found.tokens, greedy, "{name}, turn {turn}");
            assert!(found.finished.drafted_tokens > 0);
            let rest = generate(&replica, request(&prompt, 40));
            assert_eq!(rest.tokens, greedy[24..], "{name}, turn {turn}, the rest");
        }
        idle(&replica);
    }
}

/// Goal: repetitions are drafted, in the prompt and in the output, and steps are saved; greedy and sampled with a seed.
#[test]
fn repetitions_are_looked_up() {
    let vulkan = Vulkan::shared();
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

/// Serves a model, with drafts of another one wherever they are possible, or without drafts.
fn serve_with_model(
    vulkan: &Vulkan,
    (path, draft): (&Path, Option<&Path>),
    lines: &Lines,
    change: impl Fn(&mut Model),
) -> Result<Host, StartError> {
    let mut model = Model::new("m", path, Some(vulkan.adapter(Driver::first()).selector()));
    model.kv_format = Some(KvFormat::F32);
    model.slots = Some(2);
    model.draft = draft.map(|path| Draft::Model(path.to_owned()));
    (model.drafts, model.drafts_always) = (Some(if draft.is_some() { 3 } else { 0 }), Some(true));
    change(&mut model);
    let mut config = Config { models: vec![model], ..Config::default() };
    // Rows for which nothing is drafted may decode beside prompts.
    config.runtime.tune = vec!["fragments=0".into(), "mixed_steps=1".into()];
    start_with(&vulkan.devices, &config, lines)
}

/// Serves a model twice: without drafts, and with those of another one.
fn without_and_with(vulkan: &Vulkan, pair: (&Path, &Path), change: impl Fn(&mut Model)) -> [Host; 2] {
    [None, Some(pair.1)].map(|draft| {
        let served = serve_with_model(vulkan, (pair.0, draft), &Lines::default(), &change);
        served.unwrap_or_else(|error| panic!("{pair:?}: {}", with_causes(&error)))
    })
}

/// Returns the sums of drafted, accepted and all tokens.
fn sums(generated: &[Generated]) -> (u32, u32, u32) {
    let sum = |of: fn(&Generated) -> u32| generated.iter().map(of).sum();
    (
        sum(|one| one.finished.drafted_tokens),
        sum(|one| one.finished.accepted_tokens),
        sum(|one| one.finished.output_tokens),
    )
}

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo").join(name)
}

/// Goal: the draft model computes what the model does: its own drafts are right, and a step draws four tokens. The tokens
/// are those of transformers, also where the prompt's pages are found in the prefix cache and its chunks are short.
#[test]
fn a_model_drafts_for_itself() {
    let vulkan = Vulkan::shared();
    for name in ["qwen3-deep", "llama-f32"] {
        let (path, known) = (fixture(name), expected(name));
        let prompt = [&known.prompt[..], &known.greedy[..24]].concat();
        for chunk in [16, 64] {
            let pair = (&*path, Some(&*path));
            let host = serve_with_model(&vulkan, pair, &Lines::default(), |model| model.prefill_chunk = Some(chunk));
            let host = host.unwrap_or_else(|error| panic!("{name}: {}", with_causes(&error)));
            let (_, replica) = host.route("", "").expect("one model");
            for turn in 0..2 {
                let found = generate(&replica, request(&known.prompt, 64));
                assert_eq!(found.tokens, known.greedy, "{name}, chunk {chunk}, turn {turn}");
                let rest = generate(&replica, request(&prompt, 40));
                assert_eq!(rest.tokens, known.greedy[24..], "{name}, chunk {chunk}, turn {turn}, the rest");
                let cached = (found.finished.cached_tokens, rest.finished.cached_tokens);
                assert!(turn == 0 || cached.0.min(cached.1) >= 16, "{name}: {cached:?} tokens are found");
                let (drafted, accepted, output) = sums(&[found, rest]);
                println!("{name}, chunk {chunk}, turn {turn}: {accepted} of {drafted} right, {output} tokens");
                assert!(accepted * 20 >= drafted * 19, "{name}, turn {turn}: {accepted} of {drafted} drafts are right");
                let steps = output - accepted;
                assert!(steps * 5 <= output * 2, "{name}, turn {turn}: {steps} steps for {output} tokens");
            }
            idle(&replica);
        }
    }
}

/// Goal: drafts that are nearly always wrong change no token: of another random model, greedy and sampled with a seed; for
/// models with windows, experts and recurrent state, and from models with windows and with weights of codes.
#[test]
fn drafts_of_another_model_change_no_token() {
    let vulkan = Vulkan::shared();
    for (name, draft) in [
        ("qwen3-deep", "llama-f32"),
        ("moe-top1", "qwen3-long"),
        ("hybrid-two", "quantised/ct-order"),
        ("families/gemma3-text", "families/gemma3-wrapped"),
        ("families/mistral-window", "families/qwen2-yarn"),
    ] {
        let [path, other] = [name, draft].map(fixture);
        let hosts = without_and_with(&vulkan, (&path, &other), |model| model.context = Some(512));
        let asks: Vec<Request> = [(0.0, 0), (0.8, 1), (1.5, 2)]
            .into_iter()
            .map(|(temperature, seed)| Request {
                id: format!("{seed}"),
                sampling: Sampling { temperature, seed: Some(seed), ..Sampling::default() },
                ..request(&(0..21).map(|i| (i * 37 + seed as u32) % 190).collect::<Vec<u32>>(), 40)
            })
            .collect();
        let [wanted, found] = hosts.each_ref().map(|host| run(host, &asks, false));
        assert_eq!(tokens(&found), tokens(&wanted), "{name} with {draft}");
        let (drafted, accepted, output) = sums(&found);
        println!("{name} with {draft}: {accepted} of {drafted} right, {output} tokens");
        assert!(drafted > output, "{name}: {drafted} drafts for {output} tokens");
        assert_eq!(tokens(&run(&hosts[1], &asks, true)), tokens(&wanted), "{name} with {draft}, at a time");
    }
}

/// Goal: of trained models with a tokenizer, drafts of the smaller or coarser one are often right: of the dense demo model
/// for the hybrid one, and of the dense one as a GGUF file of four bits for itself. The load names both models, and the
/// memory plan has the weights and keys of both.
#[test]
fn drafts_of_a_trained_model_are_often_right() {
    let vulkan = Vulkan::shared();
    let coarse = fixture("llama.cpp/demo-Q4_K_M.gguf");
    for (path, draft, share) in [(demo("model"), coarse, 75), (demo("hybrid"), demo("model"), 50)] {
        let [plain, drafting] = [None, Some(&*draft)].map(|draft| {
            let lines = Lines::default();
            let host = serve_with_model(&vulkan, (&path, draft), &lines, |model| {
                (model.context, model.kv_pages) = (Some(256), Some(64));
            });
            (host.unwrap_or_else(|error| panic!("{}", with_causes(&error))), lines)
        });
        let lines = drafting.1.0.lock().expect("no panic");
        let named = lines.iter().find(|line| line.contains("drafts come from")).expect("a line about the drafts");
        assert!(named.contains("\"m/0\"") && named.contains(&*draft.to_string_lossy()), "{named}");
        let bytes = |host: &Host, purpose: &str| -> u64 {
            let (_, replica) = host.route("", "").expect("one model");
            replica.memory.iter().filter(|part| part.purpose == purpose).map(|part| part.bytes).sum()
        };
        let of = |purpose| [&plain.0, &drafting.0].map(|host| bytes(host, purpose));
        let [none, weights] = of("draft weights");
        assert!(none == 0 && weights > 1 << 20, "{none} and {weights} bytes of draft weights");
        assert_eq!(of("weights")[1], of("weights")[0]);
        assert!(of("kv pages")[1] > of("kv pages")[0], "{:?} bytes of pages", of("kv pages"));

        let text = Text::load(&path).expect("the tokenizer").expect("there is one");
        let story = text.encode("Once upon a time there was a little fox", false).expect("it is text");
        let mut asks = requests(0.0);
        asks.push(Request { id: "story".to_owned(), ..request(&story, 60) });
        let wanted = run(&plain.0, &asks, false);
        let found = run(&drafting.0, &asks, false);
        assert_eq!(tokens(&found), tokens(&wanted), "{}", path.display());
        let (drafted, accepted, output) = sums(&found);
        println!("{} with {}: {accepted} of {drafted} right, {output} tokens", path.display(), draft.display());
        assert!(accepted * 100 >= drafted * share, "{accepted} of {drafted} drafts are right");
    }
}

/// Goal: sequences that share steps, lose their pages and find those of others draw what they draw without drafts. Method:
/// a model that drafts for itself, with too few pages for all sequences, and one with recurrent state; prompts with the
/// same beginning in short chunks; then one at a time, on pages that steps of several sequences have written.
#[test]
fn a_draft_model_follows_preemption_and_prefix_hits() {
    let vulkan = Vulkan::shared();
    for (name, draft, pages) in [("qwen3-deep", "qwen3-deep", 9), ("hybrid-two", "llama-plain", 9)] {
        let [path, other] = [name, draft].map(fixture);
        let hosts = without_and_with(&vulkan, (&path, &other), |model| {
            (model.slots, model.context, model.kv_pages) = (Some(3), Some(128), Some(pages));
            model.prefill_chunk = Some(64);
        });
        let asks: Vec<Request> = (0..4u32)
            .map(|number| {
                let prompt: Vec<u32> = (0..66).map(|i| i * 29 % 250).chain([number, 3, number]).collect();
                let temperature = if number % 2 == 0 { 0.0 } else { 0.9 };
                let sampling = Sampling { temperature, seed: Some(number.into()), ..Sampling::default() };
                Request { id: number.to_string(), sampling, ..request(&prompt, 44 - number) }
            })
            .collect();
        let wanted = run(&hosts[0], &asks, false);
        for turn in 0..2 {
            let found = run(&hosts[1], &asks, true);
            assert_eq!(tokens(&found), tokens(&wanted), "{name}, turn {turn}, together");
            let found = run(&hosts[1], &asks, false);
            assert_eq!(tokens(&found), tokens(&wanted), "{name}, turn {turn}, alone");
            assert!(found.iter().any(|one| one.finished.cached_tokens >= 64), "{name}: pages are found");
            let (drafted, accepted, _) = sums(&found);
            println!("{name} with {draft}, turn {turn}: {accepted} of {drafted} right");
            assert!(drafted > 0, "{name}: one at a time is drafted");
        }
        let (_, replica) = hosts[1].route("", "").expect("one model");
        assert!(replica.load().preemptions > 0, "{name}: {pages} pages do not suffice");
    }
}

/// Returns the drafts that are accepted, if a sequence draws these tokens with three drafts wherever they are possible.
fn accepted_of(greedy: &[u32], drafts: &[Vec<u32>]) -> u32 {
    let (mut known, mut accepted) = (1, 0);
    while known < greedy.len() {
        let right = drafts[known - 1].iter().zip(&greedy[known..]).take_while(|(draft, token)| draft == token).count();
        accepted += right;
        known += right + 1;
    }
    accepted as u32
}

/// The number of tokens at the end of an output, at most, that are drawn without drafts, as the steps that are queued may not
/// draw more than is left.
const LAST: usize = 15;

/// Goal: a draft head drafts what PyTorch's does: as many drafts are accepted, and the tokens are those of transformers, for
/// prompts in long and short chunks and with pages of the prefix cache.
#[test]
fn a_draft_head_drafts_what_it_was_trained_to() {
    let vulkan = Vulkan::shared();
    for name in ["demo", "options"] {
        let (path, cases) = drafted(name);
        let head = fixture(&format!("eagle/{name}"));
        for chunk in [16, 64] {
            let lines = Lines::default();
            let host = serve_with_model(&vulkan, (&path, Some(&head)), &lines, |model| {
                (model.context, model.prefill_chunk) = (Some(256), Some(chunk));
            });
            let host = host.unwrap_or_else(|error| panic!("{name}: {}", with_causes(&error)));
            let lines = lines.0.lock().expect("no panic");
            assert!(
                lines.iter().any(|line| line.contains("drafts come from") && line.contains("a draft head")),
                "{lines:?}"
            );
            let (_, replica) = host.route("", "").expect("one model");
            for turn in 0..2 {
                let (mut sum, mut all) = (0, 0);
                for Drafted { prompt, greedy, drafts } in &cases {
                    let found = generate(&replica, request(prompt, greedy.len() as u32));
                    assert_eq!(found.tokens, *greedy, "{name}, chunk {chunk}, turn {turn}");
                    let right = found.finished.accepted_tokens;
                    let wanted = accepted_of(&greedy[..greedy.len() - LAST], drafts)..=accepted_of(greedy, drafts);
                    assert!(
                        wanted.contains(&right),
                        "{name}, turn {turn}: {right} drafts are accepted, {wanted:?} of PyTorch"
                    );
                    assert!(
                        turn == 0 || prompt.len() <= 16 || found.finished.cached_tokens >= 16,
                        "{name}: pages are found"
                    );
                    sum += right;
                    all += found.finished.output_tokens;
                }
                println!("{name}, chunk {chunk}, turn {turn}: {sum} of {all} tokens were drafted");
                assert!(name != "demo" || sum * 3 > all, "{sum} of {all} tokens were drafted");
            }
            idle(&replica);
        }
    }
}

/// Goal: sequences that share steps, lose their pages and find those of others, sampled and constrained ones, draw with a
/// draft head what they draw without; also beside quantised weights and on weights in fragments, and with the head's own
/// weights quantised.
#[test]
fn a_draft_head_changes_no_token() {
    let vulkan = Vulkan::shared();
    let head = fixture("eagle/demo");
    let gguf = fixture("llama.cpp/demo-Q4_K_M.gguf");
    // The first case has few pages, and sequences find those of others in a second turn.
    for (path, quantize, fragments, pages) in [
        (demo("model"), None, "fragments=0", 8),
        (demo("model"), Some(Quantize::Int8), "fragments=1", 32),
        (gguf, None, "fragments=0", 32),
    ]
    .into_iter()
    .take(if every_case() { 3 } else { 2 })
    {
        let whole = pages == 8 || every_case();
        let hosts = [None, Some(&*head)].map(|draft| {
            let mut model = Model::new("m", &*path, Some(vulkan.adapter(Driver::first()).selector()));
            model.draft = draft.map(|path| Draft::Model(path.to_owned()));
            (model.drafts, model.drafts_always) = (Some(if draft.is_some() { 3 } else { 0 }), Some(true));
            (model.kv_format, model.quantize, model.slots) = (Some(KvFormat::F32), quantize, Some(3));
            (model.context, model.kv_pages, model.prefill_chunk) = (Some(128), Some(pages), Some(64));
            let mut config = Config { models: vec![model], ..Config::default() };
            config.runtime.tune = vec![fragments.into()];
            start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|error| panic!("{}", with_causes(&error)))
        });
        let text = Text::load(&demo("model")).expect("the tokenizer").expect("there is one");
        let asks: Vec<Request> = (0..if whole { 4u32 } else { 2 })
            .map(|number| {
                let asked = format!(
                    "<|im_start|>user\nTell me a story about a fox, a lantern, a river and a bird who saw it all, once upon \
                     a time in the old forest behind the mill, {}<|im_end|>\n<|im_start|>assistant\n",
                    ["please.", "now.", "and a bee.", "and a cat."][number as usize]
                );
                let prompt = text.encode(&asked, true).expect("it is text");
                let temperature = if number % 2 == 0 { 0.0 } else { 0.4 };
                let sampling = Sampling { temperature, seed: Some(number.into()), ..Sampling::default() };
                Request { id: number.to_string(), sampling, ..request(&prompt, if whole { 40 } else { 20 } - number) }
            })
            .collect();
        let what = format!("{}, {quantize:?}, {fragments}", path.display());
        let wanted = run(&hosts[0], &asks, false);
        for turn in 0..if whole { 2 } else { 1 } {
            if whole {
                let found = run(&hosts[1], &asks, true);
                assert_eq!(tokens(&found), tokens(&wanted), "{what}, turn {turn}, together");
            }
            let found = run(&hosts[1], &asks, false);
            assert_eq!(tokens(&found), tokens(&wanted), "{what}, turn {turn}, alone");
            if whole {
                assert!(found.iter().any(|one| one.finished.cached_tokens >= 16), "{what}: pages are found");
            }
            let (drafted, accepted, output) = sums(&found);
            println!("{what}, turn {turn}: {accepted} of {drafted} right, {output} tokens");
            assert!(accepted * 5 > output, "{what}: {accepted} of {output} tokens were drafted");
        }
        if !whole {
            continue;
        }
        // Steps of a constrained row verify no drafts.
        let both = hosts.each_ref().map(|host| {
            let model = host.models()[0].clone();
            let text = model.text.as_deref().expect("a tokenizer");
            let grammars = text.grammars(model.info.vocabulary, &model.info.eos_ids).expect("constraints");
            let grammar = grammars.start(&Constraint::Regex("[a-z ]{40}".to_owned()), false).expect("a constraint");
            let ask = Request { id: "constrained".to_owned(), grammar: Some(grammar), ..request(&asks[0].prompt, 20) };
            run(host, &[ask, asks[2].clone()], true)
        });
        assert_eq!(tokens(&both[1]), tokens(&both[0]), "{what}, beside a constrained row");
        let (_, replica) = hosts[1].route("", "").expect("one model");
        assert!(pages > 8 || replica.load().preemptions > 0, "{what}: {pages} pages do not suffice");
    }
}

/// Returns the folder of a copy of a draft head whose configuration and tensors are changed.
fn changed(
    name: &str,
    change: impl FnOnce(&mut serde_json::Value),
    keep: impl Fn(&str) -> Option<Vec<i64>>,
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let from = fixture(&format!("eagle/{name}"));
    let text = std::fs::read_to_string(from.join("config.json")).expect("a configuration");
    let mut config = serde_json::from_str(&text).expect("JSON");
    change(&mut config);
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("a file");
    let bytes = std::fs::read(from.join("model.safetensors")).expect("the tensors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let words: Vec<(String, Option<Vec<u8>>)> = tensors
        .names()
        .into_iter()
        .map(|tensor| (tensor.to_owned(), keep(tensor).map(|all| all.iter().flat_map(|n| n.to_le_bytes()).collect())))
        .collect();
    let views =
        words.iter().filter(|(_, words)| words.as_ref().is_none_or(|words| !words.is_empty())).map(|(name, words)| {
            let old = tensors.tensor(name).expect("a tensor");
            let data = words.as_deref().unwrap_or(old.data());
            (
                name.clone(),
                safetensors::tensor::TensorView::new(old.dtype(), old.shape().to_vec(), data).expect("a view"),
            )
        });
    let bytes = safetensors::serialize(views, None).expect("tensors");
    std::fs::write(folder.path().join("model.safetensors"), bytes).expect("a file");
    folder
}

/// Goal: a draft head of another model, or with tensors that are missing or too many, is refused by name with both numbers
/// before anything is loaded; and so is a draft head that is to be served alone.
#[test]
fn a_draft_head_that_does_not_fit_is_refused_by_what_it_is() {
    let vulkan = Vulkan::shared_without_validation();
    let (error, text) = refused(&vulkan, &fixture("qwen3-deep"), &fixture("eagle/demo"));
    assert!(matches!(error, DraftError::Hidden { draft: 256, own: 40 }), "{text}");
    assert!(text.contains("256") && text.contains("40"), "{text}");
    let with = |key: &str, value: serde_json::Value| {
        let key = key.to_owned();
        changed("demo", move |config| config[key] = value, |_| None)
    };
    let refused_head = |folder: &tempfile::TempDir| refused(&vulkan, &demo("model"), folder.path());
    let (error, text) = refused_head(&with("vocab_size", 2049.into()));
    assert!(matches!(error, DraftError::HeadVocabulary { draft: 2049, own: 2048 }), "{text}");
    let (error, text) = refused_head(&with("eagle_aux_hidden_state_layer_ids", vec![2, 4, 8].into()));
    assert!(matches!(error, DraftError::Layer { layer: 8, layers: 7 }), "{text}");
    for (folder, wanted) in [
        (with("draft_vocab_size", 380.into()), "lm_head.weight has shape [384, 256], config.json asks for [380, 256]"),
        (with("target_hidden_size", 128.into()), "fc.weight has shape [256, 768], config.json asks for [256, 384]"),
        (changed("demo", |_| {}, |name| (name == "d2t").then(Vec::new)), "tensor d2t is missing"),
        (
            changed("demo", |_| {}, |name| (name == "midlayer.hidden_norm.weight").then(Vec::new)),
            "midlayer.hidden_norm.weight is missing",
        ),
        (
            changed("demo", |_| {}, |name| (name == "d2t").then(|| vec![1700; 384])),
            "makes token 2048 of entry 348, the vocabulary has 2048 tokens",
        ),
        (
            changed("options", |config| config["norm_before_fc"] = false.into(), |_| None),
            "input_norm.weight would not be",
        ),
    ] {
        let (error, text) = refused_head(&folder);
        assert!(matches!(error, DraftError::Checkpoint(_)) && text.contains(wanted), "{wanted}: {text}");
    }
    let path = fixture("eagle/demo");
    let error = serve_with_model(&vulkan, (&path, None), &Lines::default(), |_| {}).expect_err("it is no model");
    let text = with_causes(&error);
    assert!(error.is_users() && text.contains("is a draft head (EAGLE-3), which is no model of its own"), "{text}");
}

/// Returns the error of a start with a draft model.
fn refused(vulkan: &Vulkan, path: &Path, draft: &Path) -> (DraftError, String) {
    let error = serve_with_model(vulkan, (path, Some(draft)), &Lines::default(), |_| {}).expect_err("it cannot draft");
    let text = with_causes(&error);
    assert!(error.is_users() && text.contains("model \"m\"") && text.contains(&*draft.to_string_lossy()), "{text}");
    match error {
        StartError::Draft { source, .. } => (source, text),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_draft_model_that_does_not_fit_is_refused_by_what_it_is() {
    let vulkan = Vulkan::shared_without_validation();
    let other = |path: &str, draft: &str| refused(&vulkan, &fixture(path), &fixture(draft));
    let (error, text) = other("qwen3-deep", "llama-plain");
    assert!(matches!(error, DraftError::Vocabulary { draft: 257, own: 509 }), "{text}");
    assert!(text.contains("257") && text.contains("509"), "{text}");
    let (error, text) = other("qwen3-deep", "no-such-folder");
    assert!(matches!(error, DraftError::Checkpoint(_)), "{text}");
    for (path, draft, what) in [
        ("llama-plain", "hybrid-two", "recurrent layers"),
        ("qwen3-deep", "moe-top1", "experts"),
        ("families/gemma3-text", "families/deepseek2-lite", "latent attention"),
        ("families/gemma3-text", "families/gemma4-shared", "of layers that depend on the token"),
    ] {
        let (error, text) = other(path, draft);
        assert!(matches!(error, DraftError::Family { .. }) && text.contains(what), "{draft}: {text}");
    }
    // The same model with two words exchanged.
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(demo("model")).expect("the demo model") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, folder.path().join(path.file_name().expect("a name"))).expect("a copy");
    }
    let path = folder.path().join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).expect("it")).expect("JSON");
    let vocabulary = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
    let (old, new) = (vocabulary["Ġthe"].clone(), vocabulary["Ġa"].clone());
    vocabulary.insert("Ġthe".to_owned(), new.clone());
    vocabulary.insert("Ġa".to_owned(), old.clone());
    std::fs::write(&path, json.to_string()).expect("a file");
    let (error, text) = refused(&vulkan, &demo("hybrid"), folder.path());
    let first = old.as_u64().min(new.as_u64()).expect("a number");
    assert!(matches!(error, DraftError::Token { id, .. } if u64::from(id) == first), "{text}");
    assert!(text.contains("Ġthe") && text.contains("Ġa"), "{text}");
    // With drafts disabled the draft model is not opened.
    let pair = (&*fixture("llama-plain"), Some(Path::new("/nowhere")));
    let host = serve_with_model(&vulkan, pair, &Lines::default(), |model| model.drafts = Some(0));
    assert!(host.is_ok(), "{:?}", host.err());
}

/// Goal: a draft head for a replica whose layers are on several devices is refused before anything is loaded.
#[test]
fn a_draft_head_of_a_replica_split_by_layers_is_refused() {
    let vulkan = Vulkan::shared_without_validation();
    let (path, head) = (demo("model"), fixture("eagle/demo"));
    let devices = Driver::all().iter().map(|driver| vulkan.adapter(*driver).selector()).collect();
    let error = serve_with_model(&vulkan, (&path, Some(&head)), &Lines::default(), |model| {
        model.replicas =
            vec![Placement { devices: Vec::clone(&devices), split: Some(SplitMode::Layers), ..Placement::default() }];
    });
    let error = error.expect_err("it is split");
    let devices = Driver::all().len();
    assert!(
        matches!(&error, StartError::Draft { source: DraftError::Split { devices: of }, .. } if *of == devices),
        "{}",
        with_causes(&error)
    );
}

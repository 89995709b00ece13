//! Goal: sequences that share a device's decode steps do not affect each other. Each draws bit for bit the tokens that
//! it draws alone, regardless of batch rows, buckets and prompt chunks, and of other sequences leaving the batch.
//! Method: one replica with four slots on lavapipe; requests with every kind of sampling, first alone and then all at
//! once; too few pages for all of them, so that some are preempted and recomputed. Kernels of other shapes (weights in
//! fragment order, many rows) sum in a different order. With those a token may differ, but only where the two
//! candidates' logits, in the sequence run alone, differ by no more than those orders of summation do.
//!
//! `OSTINATO_TEST_CHECKPOINT=DIR` runs the wide batch on another checkpoint, for example a large one on a GPU.

use crate::common::{Driver, Vulkan};
use crate::harness::Random;
use crate::harness::models::{collect, expected, fixture, generate, idle, request, submit};
use ostinato::config::{Config, KvFormat, Model};
use ostinato::engine::request::{Event, FinishReason, Request, Sampling};
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use std::time::Duration;

const CHECKPOINT: &str = "qwen3-deep";

fn serve(vulkan: &Vulkan, kv_pages: u32) -> Host {
    serve_with(vulkan, kv_pages, true)
}

fn serve_with(vulkan: &Vulkan, kv_pages: u32, prefix_cache: bool) -> Host {
    // Smaller than most prompts, so that they take several chunks.
    serve_chunks(vulkan, kv_pages, prefix_cache, 8, &[])
}

fn serve_chunks(vulkan: &Vulkan, kv_pages: u32, prefix_cache: bool, chunk: u32, tune: &[&str]) -> Host {
    let mut model = Model::new("m", fixture(CHECKPOINT), Some(vulkan.adapter(Driver::first()).selector()));
    model.slots = Some(4);
    model.kv_pages = Some(kv_pages);
    model.kv_format = Some(KvFormat::F32);
    model.context = Some(128);
    model.prefill_chunk = Some(chunk);
    model.prefix_cache = Some(prefix_cache);
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.tune = tune.iter().map(|change| (*change).to_owned()).collect();
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
}

/// Returns requests that cover many prompt lengths, every kind of sampling and different output lengths.
fn requests() -> Vec<Request> {
    let prompt = expected(CHECKPOINT).prompt;
    let hot = Sampling { temperature: 1.0, seed: Some(7), ..Sampling::default() };
    let samplings = [
        Sampling::default(),
        hot.clone(),
        Sampling { top_k: 5, seed: Some(8), ..hot.clone() },
        Sampling { top_p: 0.7, temperature: 1.5, ..hot.clone() },
        Sampling { min_p: 0.1, seed: Some(u64::MAX), ..hot.clone() },
        Sampling { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: -0.5, ..Sampling::default() },
        Sampling { frequency_penalty: 1.0, logit_bias: vec![(3, 2.0), (508, -1.0)], seed: Some(9), ..hot.clone() },
        Sampling { logit_bias: (0..300).map(|id| (id, -1.5)).collect(), ..Sampling::default() },
        hot,
    ];
    let lengths = [17, 1, 8, 9, 16, 7, 3, 12, 15];
    let outputs = [40, 5, 33, 1, 20, 48, 17, 2, 26];
    samplings
        .into_iter()
        .zip(lengths)
        .zip(outputs)
        .enumerate()
        .map(|(index, ((sampling, length), tokens))| Request {
            id: format!("r{index}"),
            sampling,
            ..request(&prompt[..length], tokens)
        })
        .collect()
}

#[test]
fn sequences_draw_together_what_they_draw_alone() {
    let vulkan = Vulkan::shared();
    let host = serve(&vulkan, 40);
    let replica = &host.replicas().next().unwrap();
    let alone: Vec<Vec<u32>> = requests().into_iter().map(|request| generate(replica, request).tokens).collect();
    assert_ne!(alone[1], alone[0][..5], "sampling matters");
    for turn in 0..2 {
        // Both orders, so that different sequences share the batch.
        let mut order: Vec<usize> = (0..alone.len()).collect();
        if turn == 1 {
            order.reverse();
        }
        let mut asked = requests();
        let events: Vec<_> = order.iter().map(|&index| (index, submit(replica, asked[index].clone()))).collect();
        let most = std::iter::from_fn(|| Some(replica.load().running))
            .take(200)
            .inspect(|_| std::thread::sleep(Duration::from_millis(1)))
            .max();
        for (index, events) in events {
            let together = collect(&events);
            assert_eq!(together.tokens, alone[index], "request {index}, turn {turn}");
            assert_eq!(together.tokens.len() as u32, asked[index].limits.max_tokens.take().expect("given"));
        }
        assert!(most.is_some_and(|most| most > 1), "they ran together: {most:?}");
        idle(replica);
    }
}

/// Goal: sequences that decode in prefill steps draw what they draw alone, with every kind of sampling, when some lose their
/// pages. Method: as above, with chunks that have room for rows that decode.
#[test]
fn sequences_draw_beside_prompts_what_they_draw_alone() {
    // Steps with more sequences than prompts have recordings of their own.
    for tune in [&["mixed_steps=1"][..], &["mixed_steps=1", "prompts=1"]] {
        check_beside_prompts(tune);
    }
}

fn check_beside_prompts(tune: &[&str]) {
    let vulkan = Vulkan::shared();
    let host = serve_chunks(&vulkan, 11, false, 24, tune);
    let replica = &host.replicas().next().unwrap();
    let prompt = expected(CHECKPOINT).prompt;
    let mut asked = requests();
    // Long prompts, so that rows decode beside several chunks of each.
    for (index, request) in asked.iter_mut().enumerate() {
        let rotated = prompt.iter().cycle().skip(index).take(20 + 9 * index).copied();
        request.prompt = rotated.collect();
        request.limits.max_tokens = Some(30);
    }
    let alone: Vec<Vec<u32>> = asked.iter().map(|request| generate(replica, request.clone()).tokens).collect();
    let before = replica.steps(1).last().expect("there were steps").number;
    // How many tokens are drawn in prefill steps, and whether a sequence loses its pages, depends on how long steps take.
    for round in 1.. {
        let events: Vec<_> = asked.iter().map(|request| submit(replica, request.clone())).collect();
        for (index, events) in events.iter().enumerate() {
            assert_eq!(collect(events).tokens, alone[index], "request {index}, round {round}");
        }
        let steps = replica.steps(100_000);
        let prefill = steps.iter().filter(|step| step.number > before && step.phase == "prefill");
        let drawn: u32 = prefill.map(|step| step.tokens).sum();
        let preemptions = replica.load().preemptions;
        if drawn > 10 && preemptions > 0 {
            break;
        }
        assert!(round < 10, "{drawn} tokens were drawn in prefill steps, and {preemptions} sequences lost their pages");
    }
    idle(replica);
}

/// Goal: a preempted sequence continues as if it had not been preempted. Method: six sequences of up to six pages each
/// run in four slots with twelve pages in total. Some lose their pages, and their prompt and output tokens are computed
/// again in chunks.
#[test]
fn sequences_that_lose_their_pages_go_on_as_if_they_had_not() {
    let vulkan = Vulkan::shared();
    let host = serve_with(&vulkan, 12, false);
    let replica = &host.replicas().next().unwrap();
    let known = expected(CHECKPOINT);
    let tokens = known.greedy.len() as u32;
    let events: Vec<_> = (0..6)
        .map(|index| submit(replica, Request { id: format!("r{index}"), ..request(&known.prompt, tokens) }))
        .collect();
    for (index, events) in events.iter().enumerate() {
        let generated = collect(events);
        assert_eq!(generated.tokens, known.greedy, "request {index}");
        assert_eq!(generated.finished.reason, FinishReason::Length);
    }
    // Recomputation means that more prompt tokens were run than the prompts contain.
    let prefilled: u32 =
        replica.steps(100_000).iter().filter(|step| step.phase == "prefill").map(|step| step.rows).sum();
    assert!(prefilled > 6 * known.prompt.len() as u32, "none was computed again: {prefilled} prompt tokens");
    idle(replica);
}

/// Goal: a prompt whose prefix is found in cached pages gives the same output as without the prefix cache, whether the
/// pages belong to a finished sequence, to a running one, or are written in the same step; and penalties count the
/// cached tokens as well. Prompts end one token before a page boundary, at it and one token after it.
#[test]
fn prompts_that_find_their_beginning_draw_what_they_draw_without() {
    let vulkan = Vulkan::shared();
    let known = expected(CHECKPOINT);
    let tokens: Vec<u32> = known.prompt.iter().chain(&known.greedy).copied().collect();
    let penalties =
        Sampling { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.4, ..Sampling::default() };
    let hot = Sampling { temperature: 1.0, seed: Some(5), ..Sampling::default() };
    let asks: Vec<Request> = [15, 16, 17, 31, 32, 33, 47, 48, 49]
        .into_iter()
        .enumerate()
        .map(|(index, length)| Request {
            id: format!("r{index}"),
            sampling: [Sampling::default(), penalties.clone(), hot.clone()][index % 3].clone(),
            // The last request runs to the end of the context.
            ..request(&tokens[..length], if index == 8 { 128 } else { 20 })
        })
        .collect();
    let without: Vec<Vec<u32>> = {
        let host = serve_with(&vulkan, 40, false);
        let replica = &host.replicas().next().unwrap();
        let runs = asks.iter().map(|ask| {
            let run = generate(replica, ask.clone());
            assert_eq!(run.finished.cached_tokens, 0);
            run.tokens
        });
        runs.collect()
    };
    let host = serve(&vulkan, 40);
    let replica = &host.replicas().next().unwrap();
    for turn in 0..2 {
        // In the first turn the requests run together; in the second the pages of all of them are already cached.
        let events: Vec<_> = asks.iter().map(|ask| submit(replica, ask.clone())).collect();
        for ((ask, events), without) in asks.iter().zip(events).zip(&without) {
            let run = collect(&events);
            assert_eq!(&run.tokens, without, "a prompt of {} tokens, turn {turn}", ask.prompt.len());
            let most = (ask.prompt.len() as u32 - 1) / 16 * 16;
            let cached = run.finished.cached_tokens;
            assert!(cached <= most, "{cached} cached tokens of {}", ask.prompt.len());
            if turn == 1 {
                assert_eq!(cached, most, "a prompt of {} tokens", ask.prompt.len());
            }
        }
        idle(replica);
    }
    // A request with another cache salt finds no cached pages.
    let mut other = asks[4].clone();
    other.cache_salt = "other".into();
    let run = generate(replica, other);
    assert_eq!((run.finished.cached_tokens, &run.tokens), (0, &without[4]));
    // Generated tokens are cached as well. The last request generated up to the end of the context, so a longer prompt
    // finds them.
    let run = generate(replica, request(&tokens[..76], 5));
    assert_eq!(run.finished.cached_tokens, 64);
    assert_eq!(run.tokens, tokens[76..81], "greedy goes on as it went");
    idle(replica);
}

/// Number of streams of the wide batch and tokens of each, on a GPU and on a CPU. The tokens outnumber the steps that
/// all the prompts take, because otherwise the first streams have finished when the last begin to decode.
const WIDE: [(u32, u32); 2] = [(40, 24), (20, 14)];
/// The largest difference at which two logits count as tied, as a fraction of the root mean square of the step's
/// logits. Kernels for large batches and for prompts round rows to bfloat16 (2^-9 of each value at every product). That
/// moved the logits by up to 8.2e-3 in relative norm on real shapes, and single logits by several times as much.
const TIE: f32 = 0.06;

/// Goal: every stream of a batch of mixed prompt lengths draws greedily the tokens that it draws alone, or diverges
/// from them at a tie.
#[test]
#[ignore = "long: make test-full"]
fn streams_of_a_wide_batch_draw_what_they_draw_alone_or_part_at_a_tie() {
    let vulkan = Vulkan::shared();
    let given = std::env::var_os("OSTINATO_TEST_CHECKPOINT").map(std::path::PathBuf::from);
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model");
    let folder = given.unwrap_or(demo);
    let mut model = Model::new("m", folder, Some(vulkan.adapter(Driver::first()).selector()));
    let (streams, tokens) = WIDE[usize::from(Driver::first() != Driver::Gpu)];
    model.slots = Some(streams + 1);
    model.context = Some(512);
    let mut config = Config { models: vec![model], ..Config::default() };
    if Driver::first() != Driver::Gpu {
        // Use the kernels for a GPU's matrix units, in the variant that multiplies the blocks without them.
        config.runtime.tune = vec!["fragments=1".into(), "flash_threads=64".into()];
    }
    let host = start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
    let replica = &host.replicas().next().unwrap();
    let vocabulary = host.models()[0].info.vocabulary;
    let ask = |index: u32| {
        let length = [1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100][index as usize % 12] + index / 12;
        let prompt: Vec<u32> = (0..length).map(|at| (index * 7919 + at * 104_729 + 17) % vocabulary).collect();
        // A salt per stream, so that no prompt finds cached pages and all are computed beside others.
        let salt = format!("{index}");
        Request { id: format!("w{index}"), cache_salt: salt, ..request(&prompt, tokens) }
    };
    let events: Vec<_> = (0..streams).map(|index| submit(replica, ask(index))).collect();
    let together: Vec<Vec<u32>> = events.iter().map(|events| collect(events).tokens).collect();
    let most_rows = replica.steps(100_000).iter().filter(|s| s.phase == "decode").map(|s| s.rows).max();
    assert!(most_rows > Some(16), "at most {most_rows:?} rows decoded together");
    let mut parted = 0;
    for (index, together) in (0..).zip(&together) {
        let alone = generate(replica, Request { dump_logits: true, cache_salt: format!("a{index}"), ..ask(index) });
        let Some(at) = (0..tokens as usize).find(|&at| alone.tokens[at] != together[at]) else { continue };
        let logits = alone.drawn[at].logits.as_ref().expect("asked for");
        let size = (logits.iter().map(|l| l * l).sum::<f32>() / logits.len() as f32).sqrt();
        let gap = (logits[alone.tokens[at] as usize] - logits[together[at] as usize]) / size;
        println!("stream {index} parts at token {at}: its logits are {gap:.1e} of their size apart");
        assert!((0.0..TIE).contains(&gap), "stream {index}, token {at}: {gap} is no tie");
        parted += 1;
    }
    println!("{} of {streams} streams of up to {most_rows:?} rows draw what they draw alone", streams - parted);
    idle(replica);
}

/// Goal: when hundreds of sequences join, finish and are cancelled, and some lose their pages, nothing of them is left.
/// Method: prompts that are prefixes of one greedy text, so that the expected output of each is known; pages for about
/// two sequences.
#[test]
#[ignore = "long: make test-full"]
fn hundreds_join_and_leave_and_dozens_lose_their_pages_and_nothing_is_left() {
    let vulkan = Vulkan::shared();
    let host = serve(&vulkan, 9);
    let replica = &host.replicas().next().unwrap();
    let known = expected(CHECKPOINT);
    let text: Vec<u32> = known.prompt.iter().chain(&known.greedy).copied().collect();
    let mut random = Random(99);
    let mut completed = 0;
    for wave in 0..4 {
        let asks: Vec<Request> = (0..50)
            .map(|index| {
                let length = known.prompt.len() + random.below(30) as usize;
                let tokens = 1 + random.below((text.len() - length) as u32);
                let salt = ["", "apart", "too"][index % 3].to_owned();
                Request { id: format!("{wave}.{index}"), cache_salt: salt, ..request(&text[..length], tokens) }
            })
            .collect();
        let events: Vec<_> = asks.iter().map(|ask| submit(replica, ask.clone())).collect();
        for (index, ask) in asks.iter().enumerate().filter(|(index, _)| index % 4 == 3) {
            // Some are aborted while they wait in the queue and some while they run.
            if index % 8 == 3 {
                std::thread::sleep(Duration::from_millis(5));
            }
            replica.abort(&ask.id);
        }
        for (index, (ask, events)) in asks.iter().zip(&events).enumerate() {
            let tokens: Vec<u32> = {
                let mut tokens = Vec::new();
                loop {
                    match events.recv_timeout(Duration::from_secs(120)).expect("it goes on") {
                        Event::Token(token) => tokens.push(token.id),
                        Event::Finished(finished) => {
                            let cut = finished.reason == FinishReason::Aborted;
                            assert!(cut && index % 4 == 3 || finished.reason == FinishReason::Length, "{finished:?}");
                            completed += u32::from(!cut);
                            break tokens;
                        }
                        Event::Started(_) | Event::Prompt(_) | Event::Embedding(_) => {}
                    }
                }
            };
            let length = ask.prompt.len();
            assert_eq!(tokens, text[length..length + tokens.len()], "request {}", ask.id);
        }
        idle(replica);
    }
    assert!((150..200).contains(&completed), "{completed} of 200 were not cancelled");
    let load = replica.load();
    assert_eq!((load.running, load.waiting, load.pages_used), (0, 0, 0), "{load:?}");
    assert!(load.preemptions > 5 && load.cached_tokens > 0 && load.pages_cached > 0, "{load:?}");
}

#[test]
fn an_aborted_sequence_leaves_the_others_as_they_are() {
    let vulkan = Vulkan::shared();
    let host = serve(&vulkan, 40);
    let replica = &host.replicas().next().unwrap();
    let known = expected(CHECKPOINT);
    let ask = |id: &str| submit(replica, Request { id: id.to_owned(), ..request(&known.prompt, 60) });
    let (first, leaving, last) = (ask("first"), ask("leaving"), ask("last"));
    // Wait until it has drawn three tokens.
    let mut drawn = 0;
    while drawn < 3 {
        match leaving.recv_timeout(Duration::from_secs(60)).expect("it goes on") {
            Event::Token(_) => drawn += 1,
            Event::Finished(finished) => panic!("{finished:?}"),
            Event::Started(_) | Event::Prompt(_) | Event::Embedding(_) => {}
        }
    }
    replica.abort("leaving");
    let next = ask("next");
    for events in [first, last, next] {
        assert_eq!(collect(&events).tokens, known.greedy[..60]);
    }
    let reason = leaving.iter().find_map(|event| match event {
        Event::Finished(finished) => Some(finished.reason),
        _ => None,
    });
    assert_eq!(reason, Some(FinishReason::Aborted));
    idle(replica);
}

#[test]
fn logits_and_log_probabilities_are_those_of_the_sequence_that_asked() {
    let vulkan = Vulkan::shared();
    let host = serve(&vulkan, 40);
    let replica = &host.replicas().next().unwrap();
    let known = expected(CHECKPOINT);
    let asks = |id: &str| Request {
        id: id.to_owned(),
        dump_logits: true,
        grammar: None,
        logprobs: Some(3),
        ..request(&known.prompt[..11], 12)
    };
    let alone = generate(replica, asks("alone"));
    // The others occupy the first batch rows when this request arrives.
    let others: Vec<_> =
        (0..3).map(|i| submit(replica, Request { id: format!("o{i}"), ..request(&known.prompt, 60) })).collect();
    let together = collect(&submit(replica, asks("together")));
    assert_eq!(together.tokens, alone.tokens);
    for (step, (together, alone)) in together.drawn.iter().zip(&alone.drawn).enumerate() {
        assert_eq!(together.logprobs, alone.logprobs, "step {step}");
        let logits = |token: &ostinato::engine::request::Token| token.logits.clone().expect("asked for");
        assert!(logits(together) == logits(alone), "logits of step {step}");
        let best = (0..509).max_by(|a, b| logits(alone)[*a].total_cmp(&logits(alone)[*b]));
        assert_eq!(best, Some(alone.id as usize), "they are this step's");
        let top = &alone.logprobs.as_ref().expect("asked for").top;
        assert_eq!((top.len(), top[0].0), (3, alone.id));
    }
    for events in others {
        let other = collect(&events);
        assert_eq!(other.tokens, known.greedy[..60]);
        assert!(other.drawn.iter().all(|token| token.logits.is_none() && token.logprobs.is_none()), "not asked for");
    }
    // A token of probability 1 has log probability 0, which must be distinguishable from an absent value.
    let mut certain = request(&known.prompt, 6);
    certain.sampling.logit_bias = vec![(42, 1.0e4)];
    certain.logprobs = Some(0);
    let generated = generate(replica, certain);
    assert_eq!(generated.tokens, [42; 6]);
    for token in generated.drawn {
        let logprobs = token.logprobs.expect("asked for");
        assert_eq!((logprobs.chosen, logprobs.top.len()), (0.0, 0));
    }
    idle(replica);
}

//! Goal: the recurrent state of a sequence is private to it like its pages. The output of a hybrid model does not
//! depend on how its prompt is split into chunks, on other sequences in the batch, on preemption, or on whether its
//! prefix was computed or restored from a snapshot. Method: committed random checkpoints with known greedy tokens on
//! lavapipe, keys and values in f32. Any prompt that is a prefix of the known text continues with that text, so prompts
//! of all lengths have known answers.

use crate::common::{Driver, Vulkan};
use crate::families::cases;
use crate::harness::models::{collect, expected, fixture, generate, idle, request, submit};
use ostinato::config::{Config, KvFormat, Model};
use ostinato::engine::request::{Event, FinishReason, Request};
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::replica::Replica;
use std::sync::Arc;
use std::time::Duration;

/// Models of gated delta nets and attention, and of short convolutions and attention, without and with experts.
const CHECKPOINTS: [&str; 4] = ["hybrid-long", "hybrid-moe", "families/lfm2-plain", "families/lfm2moe-scaled"];

/// A known text: the number of its prompt tokens, and its prompt followed by the greedy tokens.
struct Text {
    prompt: usize,
    tokens: Vec<u32>,
}

fn text(name: &str) -> Text {
    if name.starts_with("families/") {
        let longest =
            cases(&fixture(name)).into_iter().max_by_key(|case| case.prompt.len()).expect("there are prompts");
        let prompt = longest.prompt.len();
        return Text { prompt, tokens: longest.prompt.into_iter().chain(longest.greedy).collect() };
    }
    let known = expected(name);
    Text { prompt: known.prompt.len(), tokens: known.prompt.into_iter().chain(known.greedy).collect() }
}

impl Text {
    /// Returns a request whose prompt ends `more` tokens after the known prompt.
    fn ask(&self, id: &str, more: usize, tokens: usize) -> Request {
        Request { id: id.to_owned(), ..request(&self.tokens[..self.prompt + more], tokens as u32) }
    }

    fn answer(&self, more: usize, tokens: usize) -> &[u32] {
        &self.tokens[self.prompt + more..][..tokens]
    }
}

fn serve(vulkan: &Vulkan, name: &str, change: impl FnOnce(&mut Model, &mut Config)) -> Host {
    let mut model = Model::new("m", fixture(name), Some(vulkan.adapter(Driver::Lavapipe).selector()));
    model.slots = Some(4);
    model.kv_format = Some(KvFormat::F32);
    let mut config = Config::default();
    change(&mut model, &mut config);
    config.models = vec![model];
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{name}: {e:?}"))
}

fn replica(host: &Host) -> Arc<Replica> {
    host.replicas().next().unwrap()
}

#[test]
fn prompts_in_chunks_and_side_by_side_draw_what_they_draw_alone() {
    let vulkan = Vulkan::shared();
    for name in CHECKPOINTS {
        let text = text(name);
        for chunk in [64, 192] {
            let host = serve(&vulkan, name, |model, _| {
                model.prefill_chunk = Some(chunk);
                model.prefix_cache = Some(false);
            });
            let replica = &replica(&host);
            let lengths = [0, 1, 7, 30, 2, 15];
            let events: Vec<_> =
                lengths.iter().map(|&more| submit(replica, text.ask(&format!("r{more}"), more, 30))).collect();
            for (&more, events) in lengths.iter().zip(&events) {
                let generated = collect(events);
                assert_eq!(generated.tokens, text.answer(more, 30), "{name}, chunks of {chunk}, {more} tokens more");
                assert_eq!(generated.finished.cached_tokens, 0);
            }
            idle(replica);
        }
    }
}

/// Goal: the kernels for matrix units, in the variant that multiplies without them, draw the same tokens; with them the
/// state of a batch takes other code paths. Sums of rounded rows may diverge from the text at a near tie, so only the
/// first tokens are compared.
#[test]
fn blocks_on_emulated_matrix_units_draw_the_same() {
    let vulkan = Vulkan::shared();
    for name in ["hybrid-long", "hybrid-moe", "moe-top2"] {
        let text = text(name);
        let host = serve(&vulkan, name, |model, config| {
            model.kv_format = None;
            model.prefix_cache = Some(false);
            config.runtime.tune = vec!["fragments=1".into(), "flash_threads=64".into()];
        });
        let replica = &replica(&host);
        let events: Vec<_> = (0..4).map(|i| submit(replica, text.ask(&format!("r{i}"), 3 * i, 8))).collect();
        for (i, events) in events.iter().enumerate() {
            let found = collect(events).tokens;
            let wanted = text.answer(3 * i, 8);
            let same = found.iter().zip(wanted).take_while(|(a, b)| a == b).count();
            assert!(same >= 4, "{name}: {found:?} instead of {wanted:?}");
        }
        idle(replica);
    }
}

/// Goal: sequences that decode in prefill steps draw what they draw alone: beside prompts of all lengths, several in a step, that
/// begin anew or continue from a snapshot; when one is aborted; when some lose their pages; with experts; and in models that
/// draft. Method: two long outputs and many short ones in four slots, whose chunks leave room for rows that decode: for many
/// prompts, few rows wait as long as a CPU driver takes for such a step.
#[test]
fn sequences_draw_beside_prompts_what_they_draw_alone() {
    let vulkan = Vulkan::shared();
    // The second has too few pages for three sequences.
    let worlds = [
        ("hybrid-long", 192, None),
        ("hybrid-long", 128, Some(26)),
        ("hybrid-moe", 128, None),
        ("next-moe", 128, None),
        ("families/lfm2-biases", 192, None),
        ("families/lfm2-plain", 128, Some(26)),
    ];
    for (name, chunk, kv_pages) in worlds {
        let text = text(name);
        let host = serve(&vulkan, name, |model, config| {
            model.prefill_chunk = Some(chunk);
            model.kv_pages = kv_pages;
            model.context = Some(400);
            model.prefix_cache = Some(kv_pages.is_none());
            // In one model, steps have more sequences than prompts.
            let prompts = if name == "hybrid-moe" { "prompts=1" } else { "prompts=4" };
            config.runtime.tune = vec!["mixed_steps=1".into(), prompts.into()];
        });
        let replica = &replica(&host);
        let ask = |index: usize| {
            const LENGTHS: [usize; 18] = [65, 1, 200, 129, 64, 300, 190, 128, 40, 77, 16, 101, 63, 90, 33, 127, 70, 12];
            // The prompts of one pair begin alike.
            let rotated = text.tokens.iter().cycle().skip(23 * (index / 2)).take(LENGTHS[index]);
            let tokens = match index {
                0 | 1 => 60 - 10 * index as u32,
                // With few pages, most sequences need more of them while they decode.
                _ if kv_pages.is_some() => 40,
                _ => 4 + index as u32 % 4,
            };
            Request { id: format!("r{index}"), ..request(&rotated.copied().collect::<Vec<u32>>(), tokens) }
        };
        let alone: Vec<Vec<u32>> = (0..18).map(|index| generate(replica, ask(index)).tokens).collect();
        let before = replica.steps(1).last().expect("there were steps").number;
        let (mut asked, cached) = (0, replica.load().cached_tokens);
        // How many tokens are drawn in prefill steps, and whether a sequence loses its pages, depends on how long steps take.
        for round in 1.. {
            let mut events: Vec<_> = (0..2).map(|index| submit(replica, ask(index))).collect();
            std::thread::sleep(Duration::from_millis(20));
            events.extend((2..18).map(|index| submit(replica, ask(index))));
            asked += 18;
            // The last one may be aborted at any time.
            std::thread::sleep(Duration::from_millis(20 * round));
            replica.abort("r17");
            for (index, events) in events.iter().enumerate() {
                let found = collect_any(events);
                let wanted = &alone[index][..if index == 17 { found.len() } else { alone[index].len() }];
                assert_eq!(found, wanted, "{name}, chunks of {chunk}, request {index}, round {round}");
            }
            idle(replica);
            let steps = replica.steps(100_000);
            let prefill = steps.iter().filter(|step| step.number > before && step.phase == "prefill");
            let drawn: u32 = prefill.map(|step| step.tokens).sum();
            let load = replica.load();
            let found = load.cached_tokens > cached || kv_pages.is_some();
            let lost = load.preemptions > 0 || kv_pages.is_none();
            if drawn > asked + load.preemptions as u32 + 10 && found && lost {
                break;
            }
            assert!(round < 20, "{name}, chunks of {chunk}: {drawn} tokens drawn in prefill steps, {load:?}");
        }
    }
}

/// Returns the tokens of a request until its end, whatever that is.
fn collect_any(events: &crossbeam_channel::Receiver<Event>) -> Vec<u32> {
    let mut tokens = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(120)).expect("it goes on") {
            Event::Token(token) => tokens.push(token.id),
            Event::Finished(_) => return tokens,
            Event::Started(_) | Event::Prompt(_) | Event::Embedding(_) => {}
        }
    }
}

#[test]
fn sequences_that_lose_their_place_are_computed_again() {
    let vulkan = Vulkan::shared();
    for name in ["hybrid-long", "families/lfm2-plain"] {
        let text = text(name);
        let [all, prompt] = [text.tokens.len(), text.prompt].map(|tokens| (tokens as u32).div_ceil(16));
        let host = serve(&vulkan, name, |model, _| {
            // There is room for two prompts, but not for their outputs.
            model.kv_pages = Some(2 * prompt + 3);
            model.context = Some(16 * all);
            model.prefix_cache = Some(false);
        });
        let replica = &replica(&host);
        let tokens = text.tokens.len() - text.prompt;
        let events: Vec<_> = (0..5).map(|i| submit(replica, text.ask(&format!("r{i}"), 0, tokens))).collect();
        for events in &events {
            let generated = collect(events);
            assert_eq!(generated.tokens, text.answer(0, tokens), "{name}");
            assert_eq!(generated.finished.reason, FinishReason::Length);
        }
        idle(replica);
        assert!(replica.load().preemptions > 0, "{name}: {:?}", replica.load());
    }
}

#[test]
fn beginnings_are_restored_from_the_longest_snapshot() {
    let vulkan = Vulkan::shared();
    for name in ["hybrid-long", "families/lfm2-plain", "families/lfm2moe-scaled"] {
        restores_beginnings(&vulkan, name);
    }
}

fn restores_beginnings(vulkan: &Vulkan, name: &str) {
    let text = text(name);
    let host = serve(vulkan, name, |model, _| model.prefill_chunk = Some(128));
    let replica = &replica(&host);
    let first = generate(replica, text.ask("first", 0, 10));
    assert_eq!((&first.tokens[..], first.finished.cached_tokens), (text.answer(0, 10), 0));
    assert!(replica.load().snapshots > 0, "{:?}", replica.load());
    // The next turn of a conversation: the state after the last whole block of the prompt is in a snapshot.
    let block = ((text.prompt - 1) / 64 * 64) as u32;
    let second = generate(replica, text.ask("second", 10, 10));
    assert_eq!((&second.tokens[..], second.finished.cached_tokens), (text.answer(10, 10), block));
    // Several concurrent prompts, all of which use the existing snapshots.
    let events: Vec<_> = [0, 3, 20].map(|more| (more, submit(replica, text.ask(&format!("{more}"), more, 10)))).into();
    for (more, events) in events {
        let generated = collect(&events);
        assert_eq!(generated.tokens, text.answer(more, 10), "{more} tokens more");
        assert!(generated.finished.cached_tokens >= block, "{}", generated.finished.cached_tokens);
    }
    // A request with another cache salt has to compute everything.
    let other = Request { cache_salt: "other".into(), ..text.ask("other", 10, 10) };
    let other = generate(replica, other);
    assert_eq!((&other.tokens[..], other.finished.cached_tokens), (text.answer(10, 10), 0));
    idle(replica);
}

/// Goal: where two prompts diverge, the second leaves a snapshot, so that from the third on the state is found there
/// although no prompt ended there.
#[test]
fn where_prompts_part_a_snapshot_is_left_for_the_next() {
    let vulkan = Vulkan::shared();
    let name = "hybrid-long";
    let text = text(name);
    // One chunk per prompt; otherwise a snapshot would be kept at the end of each chunk.
    let host = serve(&vulkan, name, |model, _| model.prefill_chunk = Some(640));
    let replica = &replica(&host);
    let ask = |number: u32| {
        let mut tokens = text.tokens[..text.prompt].to_vec();
        // The prompts are equal up to the 140th token.
        tokens[140..].iter_mut().for_each(|token| *token = (*token + number) % 200);
        Request { id: format!("p{number}"), ..request(&tokens, 4) }
    };
    let cached = [0, 1, 2, 3].map(|number| generate(replica, ask(number)).finished.cached_tokens);
    assert_eq!(cached, [0, 0, 128, 128], "the second finds pages without a state, and leaves one");
    // A restored state gives the same output as a computed one.
    let plain = serve(&vulkan, name, |model, _| model.prefix_cache = Some(false));
    let [restored, computed] = [replica, &self::replica(&plain)].map(|replica| generate(replica, ask(3)).tokens);
    assert_eq!(restored, computed);
    idle(replica);
}

/// Goal: concurrent requests with the same prompt wait for the state that the first one leaves.
#[test]
fn samples_of_one_prompt_share_its_state() {
    let vulkan = Vulkan::shared();
    let name = "hybrid-long";
    let text = text(name);
    let host = serve(&vulkan, name, |_, _| {});
    let replica = &replica(&host);
    let events: Vec<_> = (0..4).map(|i| submit(replica, text.ask(&format!("s{i}"), 0, 12))).collect();
    let generated: Vec<_> = events.iter().map(collect).collect();
    assert!(generated.iter().all(|one| one.tokens == text.answer(0, 12)));
    let found = generated.iter().filter(|one| one.finished.cached_tokens > 0).count();
    assert!(found >= 2, "{found} of four found what the first had computed");
    idle(replica);
}

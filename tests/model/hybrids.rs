//! Goal: the recurrent state of a sequence is private to it like its pages. The output of a hybrid model does not
//! depend on how its prompt is split into chunks, on other sequences in the batch, on preemption, or on whether its
//! prefix was computed or restored from a snapshot. Method: committed random checkpoints with known greedy tokens on
//! lavapipe, keys and values in f32. Any prompt that is a prefix of the known text continues with that text, so prompts
//! of all lengths have known answers.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{collect, expected, fixture, generate, idle, request, submit};
use ostinato::config::{Config, KvFormat, Model};
use ostinato::engine::request::{FinishReason, Request};
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::replica::Replica;
use std::sync::Arc;

/// A model of gated delta nets and attention, and one that also has experts.
const CHECKPOINTS: [&str; 2] = ["hybrid-long", "hybrid-moe"];

/// A known text: the number of its prompt tokens, and its prompt followed by the greedy tokens.
struct Text {
    prompt: usize,
    tokens: Vec<u32>,
}

fn text(name: &str) -> Text {
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

#[test]
fn sequences_that_lose_their_place_are_computed_again() {
    let vulkan = Vulkan::shared();
    let name = "hybrid-long";
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
        assert_eq!(generated.tokens, text.answer(0, tokens));
        assert_eq!(generated.finished.reason, FinishReason::Length);
    }
    idle(replica);
    assert!(replica.load().preemptions > 0, "{:?}", replica.load());
}

#[test]
fn beginnings_are_restored_from_the_longest_snapshot() {
    let vulkan = Vulkan::shared();
    let name = "hybrid-long";
    let text = text(name);
    let host = serve(&vulkan, name, |model, _| model.prefill_chunk = Some(128));
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

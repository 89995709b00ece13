//! Goal: recurrent state is as much a sequence's own as its pages: what a hybrid model draws does not depend on how its prompt
//! is cut, who runs beside it, whether it lost its place, or whether its beginning was computed or found.
//! Method: committed random checkpoints with chosen greedy tokens on lavapipe, keys and values in f32. Any prompt that
//! continues the known text draws how it goes on, so that prompts of all lengths have known answers.

mod common;
mod harness;

use common::{Driver, Vulkan};
use harness::models::{collect, expected, fixture, generate, idle, request, submit};
use ostinato::config::{Config, KvFormat, Model};
use ostinato::engine::request::{FinishReason, Request};
use ostinato::gpu::devices::start_on;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::replica::Replica;
use std::sync::Arc;

/// Gated delta nets and attention; the same with experts.
const CHECKPOINTS: [&str; 2] = ["hybrid-long", "hybrid-moe"];

/// A prompt and what follows it.
struct Text {
    prompt: usize,
    tokens: Vec<u32>,
}

fn text(name: &str) -> Text {
    let known = expected(name);
    Text { prompt: known.prompt.len(), tokens: known.prompt.into_iter().chain(known.greedy).collect() }
}

impl Text {
    /// Goes on from so many tokens behind the prompt.
    fn ask(&self, id: &str, more: usize, tokens: usize) -> Request {
        Request { id: id.to_owned(), ..request(&self.tokens[..self.prompt + more], tokens as u32) }
    }

    fn answer(&self, more: usize, tokens: usize) -> &[u32] {
        &self.tokens[self.prompt + more..][..tokens]
    }
}

fn serve(vulkan: &Vulkan, name: &str, change: impl FnOnce(&mut Model, &mut Config)) -> Host {
    let mut model = Model::new("m", fixture(name), Some(&vulkan.adapter(Driver::Lavapipe).uuid));
    model.slots = Some(4);
    model.kv_format = Some(KvFormat::F32);
    let mut config = Config::default();
    change(&mut model, &mut config);
    config.models = vec![model];
    start_on(&vulkan.instance, &config, &Quiet).unwrap_or_else(|e| panic!("{name}: {e:?}"))
}

fn replica(host: &Host) -> Arc<Replica> {
    host.replicas().next().unwrap()
}

#[test]
fn prompts_in_chunks_and_side_by_side_draw_what_they_draw_alone() {
    let vulkan = Vulkan::new();
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

/// On blocks multiplied by hand the state of a batch of rows goes other ways through the kernels; sums of rounded rows may
/// part from the text where it is nearly a tie, so only the first tokens are compared.
#[test]
fn blocks_multiplied_by_hand_draw_the_same() {
    let vulkan = Vulkan::new();
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
    let vulkan = Vulkan::new();
    let name = "hybrid-long";
    let text = text(name);
    let [all, prompt] = [text.tokens.len(), text.prompt].map(|tokens| (tokens as u32).div_ceil(16));
    let host = serve(&vulkan, name, |model, _| {
        // Two prompts find room, but not what they draw.
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
    let vulkan = Vulkan::new();
    let name = "hybrid-long";
    let text = text(name);
    let host = serve(&vulkan, name, |model, _| model.prefill_chunk = Some(128));
    let replica = &replica(&host);
    let first = generate(replica, text.ask("first", 0, 10));
    assert_eq!((&first.tokens[..], first.finished.cached_tokens), (text.answer(0, 10), 0));
    assert!(replica.load().snapshots > 0, "{:?}", replica.load());
    // The next turn of a conversation: the state behind the last whole block of the prompt is there.
    let block = ((text.prompt - 1) / 64 * 64) as u32;
    let second = generate(replica, text.ask("second", 10, 10));
    assert_eq!((&second.tokens[..], second.finished.cached_tokens), (text.answer(10, 10), block));
    // All at once on what is there.
    let events: Vec<_> = [0, 3, 20].map(|more| (more, submit(replica, text.ask(&format!("{more}"), more, 10)))).into();
    for (more, events) in events {
        let generated = collect(&events);
        assert_eq!(generated.tokens, text.answer(more, 10), "{more} tokens more");
        assert!(generated.finished.cached_tokens >= block, "{}", generated.finished.cached_tokens);
    }
    // Another tenant has to compute everything.
    let other = Request { cache_salt: "other".into(), ..text.ask("other", 10, 10) };
    let other = generate(replica, other);
    assert_eq!((&other.tokens[..], other.finished.cached_tokens), (text.answer(10, 10), 0));
    idle(replica);
}

/// Two prompts that part inside show where: from the third on the state is there, though no prompt ended there.
#[test]
fn where_prompts_part_a_snapshot_is_left_for_the_next() {
    let vulkan = Vulkan::new();
    let name = "hybrid-long";
    let text = text(name);
    // One chunk a prompt: else the end of each would be kept.
    let host = serve(&vulkan, name, |model, _| model.prefill_chunk = Some(640));
    let replica = &replica(&host);
    let ask = |number: u32| {
        let mut tokens = text.tokens[..text.prompt].to_vec();
        // The same up to the 140th token.
        tokens[140..].iter_mut().for_each(|token| *token = (*token + number) % 200);
        Request { id: format!("p{number}"), ..request(&tokens, 4) }
    };
    let cached = [0, 1, 2, 3].map(|number| generate(replica, ask(number)).finished.cached_tokens);
    assert_eq!(cached, [0, 0, 128, 128], "the second finds pages without a state, and leaves one");
    // What was restored draws what is computed.
    let plain = serve(&vulkan, name, |model, _| model.prefix_cache = Some(false));
    let [restored, computed] = [replica, &self::replica(&plain)].map(|replica| generate(replica, ask(3)).tokens);
    assert_eq!(restored, computed);
    idle(replica);
}

/// Samples of one prompt that come together wait for the state that the first leaves.
#[test]
fn samples_of_one_prompt_share_its_state() {
    let vulkan = Vulkan::new();
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

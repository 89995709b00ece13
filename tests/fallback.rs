//! Goal: a step without barriers that must be given up costs no token and changes none: at the start, where its
//! logits differ or a kernel waits in vain, and in the middle of a text, where the fault word is set.
//! Method: the embedded demo model on lavapipe, whose blocks are multiplied by hand there (or on the GPU that is
//! tested); the text with barriers is the measure. The fault word is set by the executor before one of its plans (`fault_at`), early
//! and late, with two plans in flight, alone and with four sequences; steps then have to be run again.

mod common;
mod harness;

use common::{Driver, Vulkan};
use harness::models::{Lines, generate, request};
use ostinato::config::{Config, DEMO_PATH, Model};
use ostinato::engine::host::Host;
use ostinato::engine::start::start_on;

/// A replica with these changes, and what its start said of steps without barriers.
fn start(vulkan: &Vulkan, slots: u32, tune: &[&str]) -> (Host, Vec<String>) {
    let driver = Driver::first();
    let mut model = Model::new("demo", DEMO_PATH, Some(&vulkan.adapter(driver).uuid));
    model.context = Some(128);
    model.slots = Some(slots);
    let mut config = Config { models: vec![model], ..Config::default() };
    // A GPU takes what it has.
    let fragments: &[&str] = if driver == Driver::Gpu { &[] } else { &["fragments=1"] };
    config.runtime.tune = fragments.iter().chain(tune).map(|change| (*change).to_owned()).collect();
    let lines = Lines::default();
    let host = start_on(&vulkan.instance, &config, &lines).unwrap_or_else(|e| panic!("{e:?}"));
    let mut lines = lines.0.into_inner().expect("no panic");
    lines.retain(|line| line.contains("barriers"));
    (host, lines)
}

const PROMPT: [u32; 5] = [5, 80, 300, 7, 1200];
const TOKENS: u32 = 40;

/// Greedy tokens of `count` sequences at once, each of a prompt of its own.
fn texts(host: &Host, count: u32) -> Vec<Vec<u32>> {
    let (_, replica) = host.route("", "").expect("one model");
    let replica = &*replica;
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..count)
            .map(|i| {
                scope.spawn(move || {
                    let prompt: Vec<u32> = PROMPT.iter().map(|token| token + i).collect();
                    let mut request = request(&prompt, TOKENS);
                    request.id = format!("text {i}");
                    generate(replica, request).tokens
                })
            })
            .collect();
        runs.into_iter().map(|run| run.join().expect("no panic")).collect()
    })
}

/// Barriers of the last step.
fn barriers(host: &Host) -> f64 {
    let (_, replica) = host.route("", "").expect("one model");
    let last = replica.steps(1).pop().expect("steps ran");
    last.cost.barriers / f64::from(last.steps)
}

#[test]
fn a_fault_at_the_start_or_in_a_text_costs_no_token_and_ends_steps_without_barriers() {
    let vulkan = Vulkan::without_validation();
    let (host, said) = start(&vulkan, 1, &["tags=0"]);
    assert!(said.is_empty(), "{said:?}");
    let wanted = texts(&host, 1);
    let with = barriers(&host);
    drop(host);

    let (host, said) = start(&vulkan, 1, &["tags=1"]);
    assert!(said.is_empty(), "the start's test fails: {said:?}");
    assert_eq!(texts(&host, 1), wanted);
    let without = barriers(&host);
    assert!(without < with / 3.0, "{without} barriers a step, {with} with all of them");
    drop(host);

    for plan in ["fault_at=1", "fault_at=5"] {
        let (host, said) = start(&vulkan, 1, &["tags=1", plan]);
        assert!(said.is_empty(), "{said:?}");
        assert_eq!(texts(&host, 1), wanted, "{plan}");
        assert!(barriers(&host) >= with, "{plan}: {} barriers a step after the fault", barriers(&host));
        assert_eq!(texts(&host, 1), wanted, "{plan}: a second text");
    }

    // Found at the start: the first product of the last layer waits for a word that is never written.
    let (host, said) = start(&vulkan, 1, &["tags=1", "wrong_tag=1"]);
    assert!(said.len() == 1 && said[0].contains("waited in vain"), "{said:?}");
    assert_eq!(texts(&host, 1), wanted);
}

#[test]
fn a_fault_with_four_sequences_costs_none_of_them_a_token() {
    let vulkan = Vulkan::without_validation();
    let (host, _) = start(&vulkan, 4, &["tags=0"]);
    let wanted = texts(&host, 4);
    assert!(wanted.iter().all(|text| text.len() == TOKENS as usize));
    drop(host);
    for plan in ["fault_at=1", "fault_at=4"] {
        let (host, said) = start(&vulkan, 4, &["tags=1", plan]);
        assert!(said.is_empty(), "{said:?}");
        assert_eq!(texts(&host, 4), wanted, "{plan}");
    }
}

//! Tests of the whole engine without a GPU.
//!
//! Goal: every request finishes exactly once with the tokens that it would get alone; no page is leaked or wrongly
//! shared; no plan exceeds its budget; no request waits forever. Method: a seeded simulation of the scheduler with a
//! `FakeExecutor` on virtual time (which checks the step loop's half of the contract at every plan), and the real
//! engine thread in real time.
//!
//! `OSTINATO_SIM_SEED=N` repeats a simulation; a failing one prints its seed.

use ostinato::engine::executor::{ExecuteError, Executor};
use ostinato::engine::fake::{FakeConfig, FakeExecutor, HIDDEN, hidden, scored};
use ostinato::engine::pace::Pace;
use ostinato::engine::plan::{Capacity, Drafts, PlanReport, Slot, SlotParams, StepPlan, Ticket, WindowCapacity, Work};
use ostinato::engine::request::{
    Event, FinishReason, Finished, Limits, Request, RequestError, Sampling, Scored, Sink, SinkClosed,
};
use ostinato::engine::scheduler::PASSED_OVER_MAX;
use ostinato::engine::scheduler::{ConstraintCommand, Scheduler, SchedulerOutput, Setup};
use ostinato::engine::sequence::SequenceId;
use ostinato::host::route::RouteError;
use ostinato::host::{Host, ModelInfo, ServedModel};
use ostinato::model::embedding::Pooling;
use ostinato::model::grammar::{Constraint, Grammar, GrammarError, Grammars, Next, StartedGrammar};
use ostinato::model::split_mix::split_mix;
use ostinato::model::text::Text;
use ostinato::replica::observer::STEP_RING;
use ostinato::replica::rebuild::Rebuild;
use ostinato::replica::{DeviceInfo, SubmitError};
use ostinato::replica::{Replica, ReplicaConfig};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use tracing_subscriber::layer::{Context, SubscriberExt};

const VOCABULARY: u32 = 97;
const EOS: u32 = 96;
/// The error of a request that was running at too many device losses.
const LOST: &str = "the device was lost";

// ---- simulation ----

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        split_mix(&mut self.0) % end
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns a length of at least 1: up to `most` in one case of eight, otherwise up to an eighth of it.
    fn length(&mut self, most: u64) -> u64 {
        let most = if self.one_in(8) { most } else { most.div_ceil(8) };
        1 + self.below(most)
    }
}

/// Prints the seed if the simulation panics.
struct Seed(u64, &'static str);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation \"{}\" failed: repeat with OSTINATO_SIM_SEED={}", self.1, self.0);
        }
    }
}

/// Returns compiled constraints for a vocabulary of the printable ASCII characters, one token of two characters, and
/// the end-of-sequence token.
fn constraints() -> Vec<StartedGrammar> {
    let character = |byte: u8| if byte == b' ' { 'Ġ' } else { char::from(byte) };
    let vocabulary: serde_json::Map<String, serde_json::Value> = (b' '..=b'~')
        .map(|byte| character(byte).to_string())
        .chain(["ab".to_owned()])
        .zip(0u32..)
        .map(|(token, id)| (token, id.into()))
        .collect();
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "added_tokens": [{
            "id": EOS, "content": "<|end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false,
        }],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]]},
    });
    let text = Text::from_bytes(tokenizer.to_string().as_bytes(), None, None).unwrap();
    let grammars = Grammars::new(&text, VOCABULARY, &[EOS]).unwrap();
    [
        Constraint::Regex("(ab|c){3,40}".to_owned()),
        Constraint::Regex("[0-9]{5}(-[0-9]{2})*".to_owned()),
        Constraint::JsonSchema(r#"{"type": "array", "items": {"type": "integer"}}"#.to_owned()),
        Constraint::Choice(["yes".to_owned(), "no".to_owned()].into()),
        Constraint::Regex("[a-z]{600}".to_owned()),
    ]
    .iter()
    // The compilation time depends on the machine, so no simulation may depend on it.
    .map(|constraint| StartedGrammar { slow: false, ..grammars.start(constraint, false).unwrap() })
    .collect()
}

struct World {
    name: &'static str,
    requests: u64,
    capacity: Capacity,
    /// Roughly the number of decode steps between bursts of arrivals.
    gap_steps: u64,
    priorities: u64,
    /// One request in this many is aborted, and one in this many has a deadline that may pass.
    nuisance: u64,
    /// The number of prefixes that prompts share; 0: none.
    beginnings: u64,
    /// Decode plans from one fault to the next; the steps of a plan with a fault run again. `None`: no faults.
    fault_every: Option<u64>,
    /// One request in this many has a constraint; 0: none.
    constrained: u64,
    /// At each event the device is lost with a probability of one in this many; 0: never.
    lost: u64,
}

#[derive(Default)]
struct Seen {
    started: bool,
    scored: Vec<Scored>,
    output: Vec<u32>,
    embedding: Option<Box<[f32]>>,
    finished: Option<FinishReason>,
}

#[derive(Debug, Default)]
struct Outcome {
    preemptions: u64,
    aborted: u64,
    expired: u64,
    stopped: u64,
    /// Requests that were ended because the device was lost repeatedly while they ran.
    lost: u64,
    /// Constrained requests that ended because their output was complete.
    complete: u64,
    /// The largest number of consecutive first starts that passed over the oldest request that had not started.
    passed_over_most: u32,
    running_most: u32,
    plans: u64,
    cached_tokens: u64,
    /// Prompt tokens that were scored.
    scored: u64,
    /// Prompts that were embedded.
    embedded: u64,
    /// Rows that decoded in prefill plans.
    mixed: u64,
    /// Prefill plans that waited for masks.
    gated: u64,
    /// Plans by which a draft model caught up.
    caught_up: u64,
}

fn simulate(world: &World, seed: u64) -> Outcome {
    let _seed = Seed(seed, world.name);
    let mut random = Random(seed);
    let epoch = Instant::now();
    let step = Duration::from_micros(500 + random.below(5_000));
    let context = world.capacity.usable_context();
    let config = FakeConfig {
        capacity: world.capacity.clone(),
        step,
        chunk: step * 3,
        parts: seed | 1,
        fault_every: world.fault_every,
        ..FakeConfig::default()
    };
    let mut fake = FakeExecutor::simulated(config.clone(), epoch);
    let mut scheduler = Scheduler::new(setup(world.capacity.clone(), seed));
    let beginnings: Vec<Vec<u32>> =
        (0..world.beginnings).map(|_| (0..context).map(|_| random.below(VOCABULARY.into()) as u32).collect()).collect();

    let constraints = if world.constrained > 0 { constraints() } else { Vec::new() };
    // Pending answers of the constraint workers, by the time at which they arrive.
    type Answer = (SequenceId, Box<Grammar>, Result<Next, GrammarError>);
    let mut answers: BTreeMap<(Instant, u64), Answer> = BTreeMap::new();
    let mut questions = 0;
    // External events by time: arrivals and aborts.
    let mut requests = Vec::new();
    let mut at = epoch;
    let mut aborts = BTreeSet::new();
    for number in 0..world.requests {
        let gap = if random.one_in(3) { random.below(6 * world.gap_steps) } else { 0 };
        at += step * gap as u32;
        let most = u64::from(context - 1);
        let length = random.length(most) as usize;
        let mut prompt: Vec<u32> = (0..length).map(|_| random.below(VOCABULARY.into()) as u32).collect();
        if world.beginnings > 0 && !random.one_in(4) {
            let beginning = &beginnings[random.below(world.beginnings) as usize];
            let same = random.below(length as u64 + 1) as usize;
            prompt[..same].copy_from_slice(&beginning[..same]);
        }
        let request = Request {
            id: number.to_string(),
            prompt,
            sampling: Sampling {
                temperature: if random.one_in(2) { 0.0 } else { 1.0 },
                seed: Some(random.below(1000)),
                ..Sampling::default()
            },
            limits: Limits {
                max_tokens: (!random.one_in(10)).then(|| random.length(2 * most) as u32),
                min_tokens: 0,
                stop_ids: (0..random.below(3)).map(|_| random.below(VOCABULARY.into()) as u32).collect(),
                ignore_eos: random.one_in(4),
            },
            logprobs: None,
            prompt_logprobs: random.one_in(12).then(|| random.below(4) as u32),
            pooling: (random.one_in(8) || !world.capacity.causal).then(|| POOLINGS[random.below(3) as usize]),
            allowed: None,
            dump_logits: random.one_in(50),
            grammar: (world.constrained > 0 && random.one_in(world.constrained))
                .then(|| constraints[random.below(constraints.len() as u64) as usize].clone()),
            priority: random.below(world.priorities) as i32,
            cache_salt: if random.one_in(10) { "apart".into() } else { String::new() },
            deadline: random.one_in(world.nuisance).then(|| at + step * random.length(2_000) as u32),
            span: tracing::Span::none(),
        };
        if random.one_in(world.nuisance) {
            aborts.insert((at + step * random.length(2_000) as u32, number));
        }
        requests.push((at, request));
    }

    let mut seen: Vec<Seen> = (0..world.requests).map(|_| Seen::default()).collect();
    let mut arrived = 0;
    let mut outcome = Outcome::default();
    let mut unstarted = BTreeSet::new();
    let mut passed_over = 0;
    loop {
        let next = [
            requests.get(arrived).map(|&(at, _)| at),
            aborts.first().map(|&(at, _)| at),
            scheduler.next_deadline(),
            fake.next_report(),
            answers.first_key_value().map(|(&(at, _), _)| at),
        ];
        let Some(now) = next.into_iter().flatten().min() else {
            break;
        };
        fake.advance(now);
        while let Some((_, request)) = requests.get(arrived).filter(|&&(at, _)| at <= now) {
            let id = scheduler.arrive(request.clone(), now);
            assert_eq!(id.0, arrived as u64, "ids go by arrival");
            unstarted.insert(id);
            arrived += 1;
        }
        let mut due = Vec::new();
        while let Some(abort) = aborts.first().filter(|&&(at, _)| at <= now).copied() {
            aborts.remove(&abort);
            due.push(abort.1);
        }
        // The others are aborted when the next plan is made, while tokens of these reports may wait to be taken.
        due.iter().filter(|number| *number % 2 == 0).for_each(|number| scheduler.abort(&number.to_string(), now));
        for progress in fake.poll().unwrap() {
            scheduler.progress(progress, now);
            scheduler.assert_consistent();
        }
        if world.lost > 0 && random.one_in(world.lost) {
            fake = FakeExecutor::simulated(config.clone(), now);
            scheduler.restart(LOST, now);
            scheduler.assert_consistent();
        }
        while let Some(answer) = answers.first_entry().filter(|answer| answer.key().0 <= now) {
            let (id, grammar, next) = answer.remove();
            scheduler.constrained(id, grammar, next, now);
            scheduler.assert_consistent();
        }
        scheduler.expire(now);
        scheduler.give_up_late_masks(now);
        scheduler.assert_consistent();
        let mut obey = |scheduler: &mut Scheduler, fake: &mut FakeExecutor, random: &mut Random| {
            for order in scheduler.take_commands() {
                match order {
                    ConstraintCommand::Take(id, mut grammar, token) => {
                        questions += 1;
                        let next = grammar.take(token);
                        let late = match random.below(32) {
                            0 => random.below(200),
                            1..8 => random.below(3),
                            _ => 0,
                        };
                        answers.insert((now + step * late as u32, questions), (id, grammar, next));
                    }
                    ConstraintCommand::Mask(slot, mask) => fake.set_mask(slot, &mask),
                    ConstraintCommand::Release(ticket) => fake.release(ticket).unwrap(),
                }
            }
        };
        obey(&mut scheduler, &mut fake, &mut random);
        while let Some(plan) = scheduler.next_plan(now, fake.pace()) {
            if let Some(Work::Prefill { decoding, awaits, .. }) = &plan.work {
                outcome.mixed += decoding.len() as u64;
                outcome.gated += u64::from(*awaits);
            }
            outcome.caught_up += u64::from(matches!(plan.work, Some(Work::CatchUp { .. })));
            let ticket = fake.submit(plan).unwrap();
            scheduler.submitted(ticket);
            scheduler.assert_consistent();
            outcome.plans += 1;
        }
        due.iter().filter(|number| *number % 2 == 1).for_each(|number| scheduler.abort(&number.to_string(), now));
        scheduler.assert_consistent();
        obey(&mut scheduler, &mut fake, &mut random);
        outcome.running_most = outcome.running_most.max(scheduler.load().running);
        for output in scheduler.take_outputs() {
            let SchedulerOutput::Event(id, event) = output else {
                continue;
            };
            let one = &mut seen[id.0 as usize];
            assert!(one.finished.is_none(), "{id:?} goes on after its end: {event:?}");
            match event {
                Event::Started(_) => {
                    assert!(!one.started, "{id:?} starts twice");
                    one.started = true;
                    passed_over = if unstarted.first() == Some(&id) { 0 } else { passed_over + 1 };
                    outcome.passed_over_most = outcome.passed_over_most.max(passed_over);
                    unstarted.remove(&id);
                }
                Event::Prompt(tokens) => {
                    assert!(one.started && one.output.is_empty(), "{id:?} hears of its prompt too early or too late");
                    one.scored.extend(tokens);
                }
                Event::Token(token) => {
                    assert!(one.started, "{id:?} draws before its start");
                    one.output.push(token.id);
                }
                Event::Embedding(vector) => {
                    assert!(one.started && one.embedding.is_none(), "{id:?} gets a vector too early or twice");
                    one.embedding = Some(vector);
                }
                Event::Finished(finished) => {
                    if unstarted.first() == Some(&id) {
                        passed_over = 0;
                    }
                    unstarted.remove(&id);
                    assert_eq!(finished.output_tokens as usize, one.output.len());
                    one.finished = Some(finished.reason);
                }
            }
        }
    }

    assert!(scheduler.is_idle(), "nothing can happen any more, and there is work left");
    assert_eq!(scheduler.load().pages_used, 0);
    outcome.preemptions = scheduler.load().preemptions;
    outcome.cached_tokens = scheduler.load().cached_tokens;
    for ((_, request), seen) in requests.iter().zip(&seen) {
        let id = &request.id;
        let prompt = &request.prompt;
        let scores: Vec<Scored> = match request.prompt_logprobs.filter(|_| request.pooling.is_none()) {
            None => Vec::new(),
            Some(top) => (1..prompt.len()).map(|at| scored(&prompt[..at], prompt[at], top, VOCABULARY)).collect(),
        };
        assert!(scores.starts_with(&seen.scored), "{id}: scores of another prompt");
        assert!(seen.output.is_empty() || seen.scored.len() == scores.len(), "{id} draws before its prompt is scored");
        outcome.scored += seen.scored.len() as u64;
        if let Some(pooling) = request.pooling {
            assert!(seen.output.is_empty() && seen.scored.is_empty(), "{id} is embedded and draws");
            let wanted = seen.finished == Some(FinishReason::Embedded);
            assert_eq!(seen.embedding, wanted.then(|| embedded(prompt, pooling)), "{id} has another vector than alone");
            outcome.embedded += u64::from(wanted);
            if wanted {
                continue;
            }
        }
        assert_eq!(seen.embedding, None, "{id} gets a vector");
        let alone = if request.pooling.is_some() { Vec::new() } else { alone(request, context) };
        match seen.finished.as_ref().unwrap_or_else(|| panic!("{id} never ends")) {
            FinishReason::Stop(stop) => {
                assert_eq!(seen.output, alone, "{id} differs from what it draws alone");
                assert_eq!(alone.last(), Some(stop));
                outcome.stopped += 1;
            }
            FinishReason::Length => {
                assert_eq!(seen.output, alone, "{id} differs from what it draws alone");
            }
            FinishReason::Complete => {
                assert_eq!(seen.output, alone, "{id} differs from what it draws alone");
                assert!(request.grammar.is_some());
                outcome.complete += 1;
            }
            FinishReason::Error(why) if world.lost > 0 && why == LOST => {
                assert!(alone.starts_with(&seen.output), "{id} differs from what it draws alone");
                outcome.lost += 1;
            }
            FinishReason::Constraint(error) => panic!("{id}: {error}"),
            FinishReason::Error(why) => panic!("{id}: {why}"),
            cut => {
                assert!(alone.starts_with(&seen.output), "{id} differs from what it draws alone");
                match cut {
                    FinishReason::Aborted => outcome.aborted += 1,
                    _ => outcome.expired += 1,
                }
            }
        }
    }
    outcome
}

fn setup(capacity: Capacity, seed: u64) -> Setup {
    Setup {
        context: capacity.usable_context(),
        capacity,
        eos_ids: vec![EOS],
        device_name: "fake".into(),
        device_uuid: "f".into(),
        replica: "m/0".into(),
        seed,
        prefix_cache: true,
    }
}

const POOLINGS: [Pooling; 3] = [Pooling::Last, Pooling::First, Pooling::Mean];

/// Returns the vector of a prompt that has the device to itself.
fn embedded(prompt: &[u32], pooling: Pooling) -> Box<[f32]> {
    let rows = pooling.pooled(0, prompt.len() as u32, prompt.len() as u32);
    let count = rows.len() as f32;
    let mut sum = [0.0; HIDDEN];
    for row in rows {
        let state = hidden(prompt[..=row as usize].iter().copied());
        sum.iter_mut().zip(state).for_each(|(sum, value)| *sum += value);
    }
    sum.map(|value: f32| value / count).into()
}

/// Returns the output of a request that has the device to itself.
fn alone(request: &Request, context: u32) -> Vec<u32> {
    let room = context - request.prompt.len() as u32;
    let params = SlotParams {
        sampling: request.sampling.clone(),
        seed: request.sampling.seed.unwrap(),
        generated: 0,
        prompt_tokens: request.prompt.len() as u32,
        max_tokens: request.limits.max_tokens.map_or(room, |asked| asked.min(room)),
        min_tokens: request.limits.min_tokens,
        stop_ids: request.limits.resolve_stop_ids(&[EOS]),
        logprobs: None,
        dump_logits: false,
        mask: None,
    };
    let Some(mut started) = request.grammar.clone() else {
        return FakeExecutor::alone(&request.prompt, &params, VOCABULARY, &[]);
    };
    // Generates one token at a time, each under the mask that the tokens before it give.
    let (mut history, mut mask) = (request.prompt.clone(), started.mask);
    for generated in 0..params.max_tokens {
        let one = SlotParams { generated, max_tokens: 1, mask: Some(mask), ..params.clone() };
        let token = FakeExecutor::alone(&history, &one, VOCABULARY, &[])[0];
        history.push(token);
        if params.stop_ids.contains(&token) {
            break;
        }
        match started.grammar.take(token).unwrap() {
            Next::Mask(next) => mask = next,
            Next::Complete => break,
        }
    }
    history.split_off(request.prompt.len())
}

fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("OSTINATO_SIM_SEED") {
        Ok(seed) => vec![seed.parse().expect("OSTINATO_SIM_SEED is a number")],
        Err(_) => (1..=count).collect(),
    }
}

fn capacity(slots: u32, pages: u32, buckets: &[u32]) -> Capacity {
    Capacity {
        slots,
        pages,
        window: None,
        context: 160,
        prefill_chunk: 24,
        causal: true,
        prompts: 4,
        sequences: 4,
        mixed_steps: None,
        buckets: buckets.to_vec(),
        run_ahead: 32,
        gates: true,
        vocabulary: VOCABULARY,
        drafts: Drafts::default(),
        snapshots: None,
        plan_limit: None,
    }
}

#[test]
fn thousands_of_requests_one_at_a_time() {
    for seed in seeds(3) {
        let world = World {
            name: "one slot",
            requests: 4_000,
            capacity: capacity(1, 10, &[1]),
            gap_steps: 20,
            priorities: 3,
            nuisance: 10,
            beginnings: 0,
            fault_every: None,
            constrained: 0,
            lost: 0,
        };
        let outcome = simulate(&world, seed);
        assert_eq!(outcome.preemptions, 0, "one alone always finds its pages");
        assert_eq!(outcome.running_most, 1);
        assert!(outcome.aborted > 50 && outcome.expired > 50, "{outcome:?}");
        assert!(outcome.stopped > 500 && outcome.scored > 1_000 && outcome.embedded > 200, "{outcome:?}");
        assert!((1..=PASSED_OVER_MAX).contains(&outcome.passed_over_most), "{outcome:?}");
    }
}

#[test]
fn thousands_of_requests_on_eight_slots_with_pages_for_few() {
    for seed in seeds(4) {
        let world = World {
            name: "eight slots, scarce pages",
            requests: 5_000,
            capacity: capacity(8, 14, &[1, 2, 4, 8]),
            gap_steps: 9,
            priorities: 3,
            nuisance: 10,
            beginnings: 6,
            fault_every: None,
            constrained: 0,
            lost: 0,
        };
        let outcome = simulate(&world, seed);
        assert!(outcome.preemptions > 100, "{outcome:?}");
        assert!(outcome.cached_tokens > 0, "{outcome:?}");
        assert!(outcome.aborted > 50 && outcome.expired > 50, "{outcome:?}");
        assert!(outcome.stopped > 500 && outcome.scored > 1_000 && outcome.embedded > 200, "{outcome:?}");
        assert!(outcome.running_most > 5, "{outcome:?}");
    }
}

#[test]
fn ten_thousand_requests_with_a_few_beginnings_on_many_slots() {
    for seed in seeds(2) {
        let world = World {
            name: "64 slots, shared beginnings",
            requests: 10_000,
            capacity: Capacity {
                prefill_chunk: 96,
                prompts: 16,
                sequences: 16,
                ..capacity(64, 300, &[1, 2, 4, 8, 16, 32, 64])
            },
            gap_steps: 2,
            priorities: 3,
            nuisance: 10,
            beginnings: 6,
            fault_every: None,
            constrained: 0,
            lost: 0,
        };
        let outcome = simulate(&world, seed);
        assert!(outcome.cached_tokens > 10_000, "{outcome:?}");
        assert!(outcome.aborted > 50 && outcome.expired > 50, "{outcome:?}");
        assert!(outcome.running_most > 40, "{outcome:?}");
    }
}

/// Goal: prompts with a common prefix continue from snapshots of the recurrent state, and results stay correct when
/// decode plans have faults, without drafts and with one or two drafts that are right by chance.
#[test]
fn thousands_of_requests_with_recurrent_state() {
    for (seed, snapshots, fault_every) in [(0, 12, None), (1, 3, Some(7)), (2, 0, Some(50))] {
        let world = World {
            name: "recurrent state",
            requests: 4_000,
            capacity: Capacity {
                prefill_chunk: 192,
                context: 1200,
                snapshots: Some(snapshots),
                drafts: Drafts {
                    most: seed as u32,
                    sequences: 4,
                    always: seed == 2,
                    history: seed == 2,
                    catches_up: false,
                },
                ..capacity(8, 80, &[1, 2, 4, 8])
            },
            gap_steps: 30,
            priorities: 3,
            nuisance: 20,
            beginnings: 5,
            fault_every,
            constrained: 5,
            lost: 0,
        };
        let outcome = simulate(&world, seed);
        assert_eq!(outcome.cached_tokens > 1_000, snapshots > 0, "{outcome:?}");
        assert!(outcome.preemptions > 100, "{outcome:?}");
        assert!(outcome.running_most > 5, "{outcome:?}");
    }
}

/// Goal: pages of layers with a sliding window are given back and taken again without a row that sees another sequence's
/// tokens, with prefixes that are found, drafts, faults, preemptions and too few window pages for all slots.
#[test]
fn thousands_of_requests_with_sliding_windows() {
    for (seed, tokens, pages, fault_every) in [(0, 20, 26, None), (1, 5, 40, Some(7)), (2, 100, 32, Some(50))] {
        let drafts = Drafts { most: seed as u32, sequences: 4, always: seed == 2, history: false, catches_up: false };
        let world = World {
            name: "sliding windows",
            requests: 4_000,
            capacity: Capacity {
                context: 480,
                run_ahead: 8,
                window: Some(WindowCapacity { tokens, pages }),
                drafts,
                ..capacity(8, 60, &[1, 2, 4, 8])
            },
            gap_steps: 30,
            priorities: 3,
            nuisance: 20,
            beginnings: 5,
            fault_every,
            constrained: 5,
            lost: 0,
        };
        let outcome = simulate(&world, seed);
        assert!(outcome.cached_tokens > 1_000, "{outcome:?}");
        assert!(outcome.preemptions > 10, "{outcome:?}");
        assert!(outcome.running_most > 2, "{outcome:?}");
    }
}

#[test]
fn thousands_of_requests_of_one_priority_start_in_their_order() {
    for seed in seeds(3) {
        let world = World {
            name: "eight slots, one priority",
            requests: 4_000,
            capacity: capacity(8, 24, &[8]),
            gap_steps: 4,
            priorities: 1,
            nuisance: 1_000_000,
            beginnings: 0,
            fault_every: None,
            constrained: 0,
            lost: 0,
        };
        let outcome = simulate(&world, seed);
        assert_eq!(outcome.passed_over_most, 0);
        assert_eq!(outcome.aborted + outcome.expired, 0);
        assert!(outcome.preemptions > 0);
    }
}

/// Goal: where tokens see later ones, every prompt is one chunk of a plan, also one that is as long as a plan may be, no
/// page is found again, and a prompt whose device was lost begins anew.
#[test]
fn thousands_of_prompts_that_cannot_be_divided() {
    for (seed, pages, lost) in [(0, 60, 0), (1, 13, 0), (2, 60, 400)] {
        let world = World {
            name: "whole prompts",
            requests: 4_000,
            capacity: Capacity { causal: false, prefill_chunk: 96, context: 96, ..capacity(8, pages, &[1, 2, 4, 8]) },
            gap_steps: 4,
            priorities: 3,
            nuisance: 20,
            beginnings: 5,
            fault_every: None,
            constrained: 0,
            lost,
        };
        let outcome = simulate(&world, seed);
        assert_eq!(outcome.cached_tokens, 0, "{outcome:?}");
        assert!(outcome.embedded > 3_000, "{outcome:?}");
    }
}

/// Goal: a draft model that leaves out steps without drafts has the keys and values of all tokens before it drafts, also of
/// tokens that were found in the prefix cache, with few pages, windows, faults and lost devices. The fake checks it.
#[test]
fn thousands_of_requests_with_a_draft_model() {
    for seed in seeds(2) {
        let drafts = Drafts { most: 2, sequences: 4, always: false, history: true, catches_up: true };
        let small = Capacity { drafts, context: 480, run_ahead: 8, ..capacity(8, 60, &[1, 2, 4, 8]) };
        let windows = Capacity { window: Some(WindowCapacity { tokens: 20, pages: 40 }), ..small.clone() };
        let always = Capacity { drafts: Drafts { always: true, ..drafts }, pages: 30, ..small.clone() };
        let worlds = [
            ("a draft model", small, Some(7), 0),
            ("with windows", windows, None, 150),
            ("always", always, Some(50), 0),
        ];
        for (name, capacity, fault_every, lost) in worlds {
            let world = World {
                name,
                requests: 1_500,
                capacity,
                gap_steps: 25,
                priorities: 3,
                nuisance: 20,
                beginnings: 4,
                fault_every,
                constrained: 9,
                lost,
            };
            let outcome = simulate(&world, seed);
            assert!(outcome.caught_up > 50 && outcome.cached_tokens > 500, "{name}: {outcome:?}");
        }
    }
}

/// Goal: results stay correct where sequences decode in prefill steps, with few pages, windows, recurrent state, drafts, faults,
/// lost devices and constrained requests, with and without gates, and with room for fewer sequences in a prefill step than
/// there are.
#[test]
fn thousands_of_requests_that_decode_in_prefill_steps() {
    for seed in seeds(2) {
        let scarce = capacity(8, 14, &[1, 2, 4, 8]);
        let many =
            Capacity { prefill_chunk: 96, prompts: 16, sequences: 16, ..capacity(64, 300, &[1, 2, 4, 8, 16, 32, 64]) };
        let windows = Capacity {
            context: 480,
            run_ahead: 8,
            window: Some(WindowCapacity { tokens: 20, pages: 40 }),
            ..capacity(8, 60, &[1, 2, 4, 8])
        };
        let all = Capacity { prompts: 8, sequences: 8, ..capacity(8, 40, &[1, 2, 4, 8]) };
        let recurrent = Capacity { prefill_chunk: 192, context: 1200, pages: 80, snapshots: Some(12), ..all.clone() };
        let drafts = Drafts { most: 2, sequences: 2, always: false, history: true, catches_up: true };
        let drafting = Capacity { drafts, context: 480, pages: 60, run_ahead: 8, ..all.clone() };
        let recurrent_drafting =
            Capacity { drafts: Drafts { always: true, catches_up: false, ..drafts }, ..recurrent.clone() };
        let worlds = [
            ("mixed, scarce pages", Capacity { prompts: 8, sequences: 8, ..scarce }, None, 0, 0),
            ("mixed, many slots", many, Some(7), 0, 0),
            ("mixed, windows", windows.clone(), Some(50), 6, 0),
            ("mixed, lost", all.clone(), None, 9, 150),
            ("mixed, constrained", all.clone(), None, 3, 0),
            ("mixed, more sequences than prompts", Capacity { prompts: 2, ..all.clone() }, Some(7), 9, 0),
            ("mixed, constrained without gates", Capacity { gates: false, ..all }, Some(9), 3, 0),
            ("mixed, recurrent state", recurrent.clone(), Some(7), 6, 0),
            ("mixed, few snapshots", Capacity { snapshots: Some(2), pages: 60, ..recurrent }, None, 0, 200),
            ("mixed, a draft model", drafting, Some(9), 9, 0),
            ("mixed, drafts and recurrent state", recurrent_drafting, Some(9), 9, 150),
            ("mixed, drafts and windows", Capacity { drafts, run_ahead: 4, ..windows }, None, 9, 0),
        ];
        for (name, capacity, fault_every, constrained, lost) in worlds {
            let gates = capacity.gates;
            let world = World {
                name,
                requests: 1_500,
                capacity: Capacity { mixed_steps: Some(Duration::ZERO), ..capacity },
                gap_steps: 9,
                priorities: 3,
                nuisance: 10,
                beginnings: 4,
                fault_every,
                constrained,
                lost,
            };
            let outcome = simulate(&world, seed);
            assert!(outcome.mixed > 500, "{name}: {outcome:?}");
            assert_eq!(outcome.gated > 20, constrained > 0 && gates, "{name}: {outcome:?}");
            assert!(outcome.stopped > 100 && outcome.scored > 100 && outcome.cached_tokens > 0, "{name}: {outcome:?}");
        }
    }
}

#[test]
fn odd_capacities() {
    let odd: [(&'static str, Capacity); 4] = [
        ("fewer rows than slots", capacity(8, 30, &[3])),
        ("no run-ahead", Capacity { run_ahead: 1, ..capacity(4, 30, &[1, 2, 4]) }),
        ("chunks of one token", Capacity { prefill_chunk: 1, ..capacity(4, 30, &[1, 2, 4]) }),
        ("pages for one", capacity(8, 10, &[1, 2, 4, 8])),
    ];
    for (name, capacity) in odd {
        for seed in seeds(2) {
            let capacity = capacity.clone();
            let world = World {
                name,
                requests: 1_500,
                capacity,
                gap_steps: 8,
                priorities: 2,
                nuisance: 20,
                beginnings: 4,
                fault_every: None,
                constrained: 3,
                lost: 0,
            };
            simulate(&world, seed);
        }
    }
}

/// Goal: results stay correct when every third request is constrained and masks arrive at once or steps later, with
/// gates and on devices without gates, which queue a step only after its masks are there.
#[test]
fn thousands_of_requests_that_are_constrained() {
    for seed in seeds(4) {
        for gates in [true, false] {
            let world = World {
                name: "constrained",
                requests: 2_500,
                capacity: Capacity { gates, ..capacity(8, 16, &[1, 2, 4, 8]) },
                gap_steps: 9,
                priorities: 3,
                nuisance: 10,
                beginnings: 4,
                fault_every: None,
                constrained: 3,
                lost: 0,
            };
            let outcome = simulate(&world, seed);
            assert!(outcome.preemptions > 20, "{outcome:?}");
            assert!(outcome.complete > 50, "{outcome:?}");
            assert!(outcome.aborted > 50 && outcome.expired > 30, "{outcome:?}");
        }
    }
}

/// Goal: requests survive device losses at arbitrary moments, with constraints, with recurrent state and drafts, and
/// with few pages.
#[test]
fn thousands_of_requests_on_devices_that_are_lost() {
    for seed in seeds(3) {
        let plain = capacity(8, 16, &[1, 2, 4, 8]);
        let recurrent = Capacity {
            prefill_chunk: 192,
            context: 1200,
            snapshots: Some(12),
            drafts: Drafts { most: 1, sequences: 4, always: true, history: false, catches_up: false },
            ..capacity(8, 80, &[1, 2, 4, 8])
        };
        let windows = Capacity {
            context: 480,
            window: Some(WindowCapacity { tokens: 20, pages: 40 }),
            ..capacity(8, 60, &[1, 2, 4, 8])
        };
        for capacity in [plain, recurrent, windows] {
            let snapshots = capacity.snapshots;
            let world = World {
                name: "lost",
                requests: 1_200,
                capacity,
                gap_steps: 20,
                priorities: 3,
                nuisance: 10,
                beginnings: 4,
                fault_every: snapshots.map(|_| 40),
                constrained: if snapshots.is_none() { 3 } else { 0 },
                lost: 150,
            };
            let outcome = simulate(&world, seed);
            assert!(outcome.lost > 5 && outcome.stopped > 200, "{outcome:?}");
            assert!(outcome.scored > 500 && outcome.cached_tokens > 50, "{outcome:?}");
        }
    }
}

#[test]
fn the_same_seed_is_the_same_simulation() {
    let world = World {
        name: "twice",
        requests: 500,
        capacity: capacity(8, 20, &[1, 2, 4, 8]),
        gap_steps: 6,
        priorities: 3,
        nuisance: 10,
        beginnings: 3,
        fault_every: None,
        constrained: 4,
        lost: 0,
    };
    assert_eq!(format!("{:?}", simulate(&world, 7)), format!("{:?}", simulate(&world, 7)));
}

#[test]
fn a_device_with_steps_to_do_never_waits_for_the_host() {
    let epoch = Instant::now();
    let step = Duration::from_micros(500);
    let capacity = Capacity { context: 2048, ..capacity(1, 128, &[1]) };
    let config = FakeConfig { capacity: capacity.clone(), step, chunk: step, ..FakeConfig::default() };
    let mut fake = FakeExecutor::simulated(config.clone(), epoch);
    let mut scheduler = Scheduler::new(setup(capacity, 0));
    let tokens = 1001;
    scheduler.arrive(request("a", 1, tokens), epoch);
    let mut now = epoch;
    let mut finished = None;
    loop {
        while let Some(plan) = scheduler.next_plan(now, fake.pace()) {
            let ticket = fake.submit(plan).unwrap();
            scheduler.submitted(ticket);
        }
        let Some(due) = fake.next_report() else { break };
        now = due;
        fake.advance(now);
        for progress in fake.poll().unwrap() {
            scheduler.progress(progress, now);
        }
        for output in scheduler.take_outputs() {
            if let SchedulerOutput::Event(_, Event::Finished(end)) = output {
                finished = Some(end);
            }
        }
    }
    let finished = finished.unwrap();
    assert_eq!(finished.output_tokens, tokens);
    assert_eq!(now - epoch, step * tokens, "the device had gaps");
    assert_eq!(finished.timings.prefill, step);
    assert!(finished.per_token.submits <= 1.0 / 8.0, "{:?}", finished.per_token);
    assert!((finished.per_token.dispatches - 10.0).abs() < 1e-9);
    assert!((finished.per_token.barriers - 8.0).abs() < 1e-9);
}

// ---- the engine thread ----

fn request(id: &str, prompt: u32, max_tokens: u32) -> Request {
    Request {
        sampling: Sampling { seed: Some(1), ..Sampling::default() },
        limits: Limits { max_tokens: Some(max_tokens), ignore_eos: true, ..Limits::default() },
        ..Request::new(id, (0..prompt).map(|i| i % VOCABULARY).collect())
    }
}

fn device(index: usize) -> DeviceInfo {
    DeviceInfo {
        index,
        name: format!("Fake Accelerator {}", 4000 + index),
        uuid: format!("0000000{index}-aaaa-bbbb-cccc-000000000000"),
        pci: Some(format!("0000:0{index}:00.0")),
        is_cpu: false,
    }
}

fn fake(slots: u32, step: Duration) -> FakeConfig {
    let capacity = Capacity { context: 512, ..capacity(slots, 64, &[1, 2, 4, 8]) };
    FakeConfig { capacity, step, chunk: step, ..FakeConfig::default() }
}

fn spawn(name: &str, index: usize, executor: impl Executor + 'static, queue_limit: usize) -> Replica {
    spawn_with(name, index, executor, queue_limit, None)
}

fn spawn_with(
    name: &str,
    index: usize,
    executor: impl Executor + 'static,
    queue_limit: usize,
    rebuild: Option<Rebuild>,
) -> Replica {
    let eos_ids = vec![EOS];
    let config =
        ReplicaConfig { queue_limit, eos_ids, context: 512, vocabulary: VOCABULARY, prefix_cache: true, rebuild };
    Replica::spawn(name, device(index), Box::new(executor), config).unwrap()
}

/// Returns a replica whose device is lost after the number of plans that each entry of `lives` gives (`None`: never).
/// Rebuilding takes 20 ms and fails once `lives` is used up.
fn losing(config: FakeConfig, queue_limit: usize, lives: Vec<Option<u64>>) -> Replica {
    let mut lives = lives.into_iter();
    let life = FakeConfig { lost_after: lives.next().expect("a first life"), ..config.clone() };
    let lives = Mutex::new(lives);
    let rebuild = Rebuild::new(move |_, _| {
        std::thread::sleep(Duration::from_millis(20));
        let lost_after = lives.lock().unwrap().next().ok_or("there is no other")?;
        Ok(Box::new(FakeExecutor::realtime_with(FakeConfig { lost_after, ..config.clone() })))
    });
    spawn_with("m/0", 0, FakeExecutor::realtime_with(life), queue_limit, Some(rebuild))
}

fn replica(config: FakeConfig, queue_limit: usize) -> Replica {
    spawn("m/0", 0, FakeExecutor::realtime_with(config), queue_limit)
}

/// Returns a sink that forwards all events, and their receiver.
fn sink() -> (Sink, mpsc::Receiver<Event>) {
    let (events, receiver) = mpsc::channel();
    (Box::new(move |event| events.send(event).map_err(|_| SinkClosed)), receiver)
}

fn submit(replica: &Replica, request: Request) -> mpsc::Receiver<Event> {
    let (sink, events) = sink();
    replica.submit(request, sink).unwrap();
    events
}

/// Time limit for waits. It is long because the machine may be busy with other tests.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns all of a request's output and how it finished.
fn collect(events: &mpsc::Receiver<Event>) -> (Vec<u32>, Finished) {
    let mut output = Vec::new();
    loop {
        match events.recv_timeout(PATIENCE).expect("the request ends in time") {
            Event::Started(started) => assert!(output.is_empty() && started.prompt_tokens > 0),
            Event::Prompt(_) | Event::Embedding(_) => panic!("nobody asked"),
            Event::Token(token) => output.push(token.id),
            Event::Finished(finished) => {
                assert_eq!(finished.output_tokens as usize, output.len());
                let after = events.recv_timeout(PATIENCE);
                assert!(after.is_err(), "{after:?} follows the end");
                return (output, *finished);
            }
        }
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn until_idle(replica: &Replica) {
    until("the replica is idle", || {
        let load = replica.load();
        (load.running, load.waiting, load.pages_used) == (0, 0, 0)
    });
}

fn unavailable(replica: &Replica) -> String {
    match replica.submit(request("another", 1, 2), sink().0) {
        Err(SubmitError::Unavailable { why, .. }) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn many_callers_get_what_they_would_get_alone() {
    let replica = replica(fake(8, Duration::from_micros(200)), 64);
    std::thread::scope(|scope| {
        for caller in 0..16 {
            let replica = &replica;
            scope.spawn(move || {
                for turn in 0..6 {
                    let id = format!("{caller}-{turn}");
                    let request = request(&id, 1 + 7 * caller, 5 + 9 * turn);
                    let expected = alone(&request, 512);
                    let (output, finished) = collect(&submit(replica, request));
                    assert_eq!(output, expected);
                    assert_eq!(finished.reason, FinishReason::Length);
                    assert!((finished.per_token.dispatches - 10.0).abs() < 1e-9);
                }
            });
        }
    });
    until_idle(&replica);
    assert_eq!(replica.load().pages_total, 64);
    let steps = replica.steps(usize::MAX);
    assert!(!steps.is_empty() && steps.len() <= STEP_RING);
    for pair in steps.windows(2) {
        assert!(pair[0].number + 1 == pair[1].number && pair[0].at <= pair[1].at, "{pair:?}");
    }
    for phase in ["prefill", "decode"] {
        assert!(steps.iter().any(|step| step.phase == phase && step.rows > 0 && step.steps > 0));
    }
    let last = replica.steps(3);
    assert_eq!(last.len(), 3);
    assert_eq!(last[2].number, steps.last().unwrap().number);
}

#[test]
fn the_queue_is_bounded_and_ids_are_unique() {
    let replica = replica(fake(1, Duration::from_millis(1)), 2);
    let running = submit(&replica, request("a", 1, 500));
    assert!(matches!(running.recv_timeout(PATIENCE), Ok(Event::Started(_))));
    let waiting = ["b", "c"].map(|id| submit(&replica, request(id, 1, 2)));
    until("the load says so", || (replica.load().running, replica.load().waiting) == (1, 2));
    match replica.submit(request("d", 1, 2), sink().0) {
        Err(SubmitError::QueueFull { waiting: 2, limit: 2, replica }) => assert_eq!(replica, "m/0"),
        other => panic!("{other:?}"),
    }
    match replica.submit(request("b", 1, 2), sink().0) {
        Err(SubmitError::Request(RequestError::DuplicateId(id))) => assert_eq!(id, "b"),
        other => panic!("{other:?}"),
    }
    match replica.submit(request("e", 0, 2), sink().0) {
        Err(SubmitError::Request(RequestError::EmptyPrompt)) => {}
        other => panic!("{other:?}"),
    }
    // The queued request "b" and the running request "a" are aborted. The third request then runs, and the id can be
    // used again.
    replica.abort("b");
    let (output, finished) = collect(&waiting[0]);
    assert_eq!((output.len(), finished.reason), (0, FinishReason::Aborted));
    assert!(finished.timings.queue > Duration::ZERO);
    replica.abort("a");
    replica.abort("nobody");
    // The start event was received above.
    let ends = running.iter().filter(|event| matches!(event, Event::Finished(_))).count();
    assert_eq!(ends, 1);
    assert_eq!(collect(&waiting[1]).1.reason, FinishReason::Length);
    assert_eq!(collect(&submit(&replica, request("a", 1, 2))).0.len(), 2);
    until_idle(&replica);
}

#[test]
fn deadlines_pass_without_anything_else_happening() {
    let replica = replica(fake(1, Duration::from_secs(5)), 4);
    let start = Instant::now();
    let deadline = Some(start + Duration::from_millis(50));
    let all = ["running", "waiting"].map(|id| submit(&replica, Request { deadline, ..request(id, 1, 500) }));
    for events in &all {
        assert_eq!(collect(events).1.reason, FinishReason::DeadlineExceeded);
    }
    assert!(start.elapsed() < Duration::from_secs(4), "it waited for the device");
}

#[test]
fn a_sink_that_fails_frees_its_row_and_hears_nothing_more() {
    let replica = replica(fake(1, Duration::from_micros(500)), 4);
    let (calls, called) = mpsc::channel();
    let mut left = 3;
    let failing: Sink = Box::new(move |_| {
        calls.send(()).unwrap();
        left -= 1;
        if left == 0 { Err(SinkClosed) } else { Ok(()) }
    });
    replica.submit(request("a", 1, 500), failing).unwrap();
    assert_eq!(collect(&submit(&replica, request("b", 1, 3))).0.len(), 3);
    // The sink is dropped with the request, so the iteration ends.
    assert_eq!(called.iter().count(), 3);
    until_idle(&replica);
}

#[test]
fn draining_refuses_the_new_and_finishes_the_old() {
    let replica = replica(fake(1, Duration::from_micros(200)), 4);
    let all = ["a", "b"].map(|id| submit(&replica, request(id, 1, 40)));
    replica.drain();
    assert_eq!(unavailable(&replica), "it is draining");
    for events in &all {
        assert_eq!(collect(events).0.len(), 40);
    }
    assert_eq!(replica.unfinished(), 0);
}

#[test]
fn dropping_a_replica_aborts_what_runs() {
    let replica = replica(fake(1, Duration::from_millis(1)), 4);
    let all = ["a", "b"].map(|id| submit(&replica, request(id, 1, 500)));
    drop(replica);
    for events in &all {
        assert_eq!(collect(events).1.reason, FinishReason::Aborted);
    }
}

#[test]
fn a_lost_device_ends_every_request_and_takes_no_more() {
    let replica = replica(FakeConfig { lost_after: Some(5), ..fake(2, Duration::from_millis(5)) }, 4);
    let all = ["a", "b", "c", "d"].map(|id| submit(&replica, request(id, 1, 400)));
    for events in &all {
        match collect(events).1.reason {
            FinishReason::Error(why) => assert_eq!(why, "device \"fake\" is lost: it was told to"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(unavailable(&replica), "device \"fake\" is lost: it was told to");
    until_idle(&replica);
    assert!(!replica.steps(10).is_empty(), "the steps before are still told");
}

/// Goal: requests that run or wait when the device is lost get the output that they would have got without the loss.
/// Method: a device that is lost during prompts and during decoding; its tokens are a function of the whole history;
/// requests also arrive while it is gone.
#[test]
fn a_device_that_is_built_anew_goes_on_where_the_lost_one_was() {
    for lost_after in [1, 2, 3, 7, 20] {
        let config = fake(2, Duration::from_millis(1));
        let replica = losing(config, 8, vec![Some(lost_after), None]);
        let requests: Vec<Request> = (0..5).map(|i| request(&i.to_string(), 3 + 40 * i, 60)).collect();
        let mut all: Vec<_> = requests.iter().map(|request| submit(&replica, request.clone())).collect();
        until("the device is lost", || replica.losses() > 0);
        let late = request("late", 5, 10);
        all.push(submit(&replica, late.clone()));
        for (request, events) in requests.iter().chain([&late]).zip(&all) {
            let (tokens, finished) = collect(events);
            assert_eq!(tokens, alone(request, 512), "{}, lost after {lost_after}", request.id);
            assert!(!matches!(finished.reason, FinishReason::Error(_)), "{finished:?}");
        }
        assert_eq!((replica.losses(), replica.failed(), replica.rebuilding()), (1, false, false));
        until_idle(&replica);
        assert_eq!(replica.room(), 10);
    }
}

/// Goal: a fault of a decode step costs time but changes no token, and faults are counted over the lifetime of the
/// replica, including device losses.
#[test]
fn a_fault_of_a_step_is_counted_and_changes_no_token() {
    let config = FakeConfig { fault_every: Some(2), ..fake(2, Duration::from_millis(1)) };
    let replica = losing(config, 8, vec![Some(7), None]);
    let requests: Vec<Request> = (0..4).map(|i| request(&i.to_string(), 3 + 20 * i, 60)).collect();
    let all: Vec<_> = requests.iter().map(|request| submit(&replica, request.clone())).collect();
    for (request, events) in requests.iter().zip(&all) {
        assert_eq!(collect(events).0, alone(request, 512), "{}", request.id);
    }
    until_idle(&replica);
    assert_eq!(replica.losses(), 1);
    let told: u32 = replica.steps(usize::MAX).iter().map(|step| step.faults).sum();
    // A plan that was in flight when the device was lost is in no step record.
    let faults = replica.faults();
    assert!(told >= 3 && (u64::from(told)..=u64::from(told) + 2).contains(&faults), "{faults} faults, {told} told");
    assert!(replica.last_fault().is_some());
}

/// Goal: a request that may cause the device losses is ended after the second loss, and others continue.
#[test]
fn who_is_there_whenever_the_device_is_lost_is_ended() {
    let config = fake(1, Duration::from_millis(1));
    let replica = losing(config, 4, vec![Some(6), Some(6), None]);
    let cause = submit(&replica, request("cause", 3, 400));
    let other = request("other", 3, 20);
    let events = submit(&replica, other.clone());
    let (_, finished) = collect(&cause);
    assert_eq!(finished.reason, FinishReason::Error("device \"fake\" is lost: it was told to".to_owned()));
    let (tokens, _) = collect(&events);
    assert_eq!(tokens, alone(&other, 512));
    assert_eq!(replica.losses(), 2);
}

#[test]
fn a_device_that_does_not_come_back_ends_every_request() {
    let replica = losing(fake(2, Duration::from_millis(5)), 4, vec![Some(5)]);
    let all = ["a", "b", "c", "d"].map(|id| submit(&replica, request(id, 1, 400)));
    let why = "its device was lost and could not be rebuilt: there is no other";
    for events in &all {
        assert_eq!(collect(events).1.reason, FinishReason::Error(why.to_owned()));
    }
    assert_eq!(unavailable(&replica), why);
    assert!(replica.failed() && !replica.rebuilding());
    until_idle(&replica);
}

/// Goal: while the device is gone, requests can be ended by their clients and by their deadlines, and the replica can
/// be stopped, all without waiting for the device.
#[test]
fn a_device_that_is_gone_holds_nobody_up() {
    let config = fake(2, Duration::from_millis(1));
    let life = FakeConfig { lost_after: Some(3), ..config };
    let rebuild = Rebuild::new(|_, cancelled| {
        while !cancelled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err("nobody wants it".into())
    });
    let replica = spawn_with("m/0", 0, FakeExecutor::realtime_with(life), 4, Some(rebuild));
    let [aborted, stopped] = ["a", "b"].map(|id| submit(&replica, request(id, 3, 400)));
    until("the device is lost", || replica.rebuilding());
    assert_eq!(replica.room(), 0);
    let deadline = Some(Instant::now() + Duration::from_millis(5));
    let late = submit(&replica, Request { deadline, ..request("late", 3, 4) });
    assert_eq!(collect(&late).1.reason, FinishReason::DeadlineExceeded);
    replica.abort("a");
    assert_eq!(collect(&aborted).1.reason, FinishReason::Aborted);
    replica.stop("a test");
    assert_eq!(collect(&stopped).1.reason, FinishReason::Error("a test".to_owned()));
}

/// An executor that panics on the first plan.
struct Broken(FakeExecutor);

impl Executor for Broken {
    fn capacity(&self) -> &Capacity {
        self.0.capacity()
    }
    fn submit(&mut self, _: StepPlan) -> Result<Ticket, ExecuteError> {
        panic!("a bug in an executor");
    }
    fn wake(&self) -> &crossbeam_channel::Receiver<()> {
        self.0.wake()
    }
    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError> {
        self.0.poll()
    }
    fn pace(&self) -> &Pace {
        self.0.pace()
    }
    fn set_mask(&mut self, slot: Slot, mask: &[u32]) {
        self.0.set_mask(slot, mask);
    }
    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError> {
        self.0.release(ticket)
    }
}

#[test]
fn a_panicking_engine_thread_ends_every_request_with_an_error() {
    let replica = spawn("m/0", 0, Broken(FakeExecutor::realtime(Duration::from_millis(1))), 4);
    let (_, finished) = collect(&submit(&replica, request("a", 1, 4)));
    let why = "its engine thread has panicked".to_string();
    assert_eq!(finished.reason, FinishReason::Error(why.clone()));
    assert_eq!(unavailable(&replica), why);
    assert_eq!(replica.unfinished(), 0);
    assert!(replica.steps(5).is_empty());
    replica.abort("a");
}

/// Goal: a client that queries a replica or submits to it while it is stopped always gets an answer. Method: each round
/// stops the replica after a different time, while three clients query and submit continuously.
#[test]
fn nobody_waits_for_a_replica_that_is_stopped() {
    for round in 0..150u64 {
        let replica = replica(fake(2, Duration::from_micros(50)), 8);
        std::thread::scope(|scope| {
            for client in 0..3 {
                let replica = &replica;
                scope.spawn(move || {
                    for count in 0.. {
                        replica.steps(1);
                        let (sink, events) = sink();
                        match replica.submit(request(&format!("{client}-{count}"), 3, 2), sink) {
                            Ok(()) => loop {
                                match events.recv_timeout(PATIENCE) {
                                    Ok(_) => {}
                                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                                    Err(mpsc::RecvTimeoutError::Timeout) => panic!("round {round}: it never ends"),
                                }
                            },
                            Err(SubmitError::Unavailable { .. }) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_micros(37 * round));
            replica.stop("a test");
        });
        assert_eq!(replica.unfinished(), 0);
    }
}

/// Goal: a sequence whose mask takes five seconds does not hold up the other rows, prompts that arrive meanwhile are
/// run although all slots are held, and the late sequence continues with allowed tokens once its mask is there. Method:
/// the fake device on virtual time; the answer about the third token is held back. With gates, without them, as on
/// replicas that are split over devices, and with recurrent state.
#[test]
fn rows_beside_one_whose_mask_is_late_draw_on() {
    for (gates, snapshots) in [(true, None), (false, None), (true, Some(4))] {
        let mut capacity = capacity(2, 1024, &[1, 2]);
        (capacity.context, capacity.gates, capacity.snapshots) = (8192, gates, snapshots);
        if snapshots.is_some() {
            capacity.prefill_chunk = capacity.prefill_chunk.max(64);
        }
        let (step, epoch) = (Duration::from_millis(1), Instant::now());
        let config = FakeConfig { capacity: capacity.clone(), step, chunk: step * 3, ..FakeConfig::default() };
        let mut fake = FakeExecutor::simulated(config, epoch);
        let mut scheduler = Scheduler::new(setup(capacity, 1));
        let grammar = constraints().pop();
        let late = scheduler.arrive(Request { grammar, ..request("late", 40, 50) }, epoch);
        let free = scheduler.arrive(request("free", 4, 6_000), epoch);
        let mut third = None;
        let (mut questions, mut drawn, mut last, mut longest) = (0, 0, epoch, Duration::ZERO);
        let (mut answers, mut finished, mut joined) = (Vec::new(), None, None);
        let held = epoch + Duration::from_secs(5);
        let mut now = epoch;
        while finished.is_none() {
            let next = [scheduler.next_deadline(), fake.next_report(), third.as_ref().map(|_| held)];
            // In the first iteration nothing has been submitted yet.
            assert!(now == epoch || next.iter().any(Option::is_some), "nothing is to happen");
            now = next.into_iter().flatten().min().unwrap_or(now).max(now);
            assert!(now < epoch + Duration::from_secs(10), "it never ends");
            fake.advance(now);
            if joined.is_none() && now > epoch + Duration::from_secs(1) {
                joined = Some((scheduler.arrive(request("later", 30, 3), now), now, None));
            }
            for progress in fake.poll().unwrap() {
                scheduler.progress(progress, now);
                scheduler.assert_consistent();
            }
            if now >= held {
                answers.extend(third.take());
            }
            for (id, grammar, next) in answers.drain(..) {
                scheduler.constrained(id, grammar, next, now);
                scheduler.assert_consistent();
            }
            scheduler.expire(now);
            scheduler.give_up_late_masks(now);
            scheduler.assert_consistent();
            for turn in 0..2 {
                for order in scheduler.take_commands() {
                    match order {
                        ConstraintCommand::Take(id, mut grammar, token) => {
                            questions += 1;
                            let next = grammar.take(token);
                            match questions {
                                3 => third = Some((id, grammar, next)),
                                _ => answers.push((id, grammar, next)),
                            }
                        }
                        ConstraintCommand::Mask(slot, mask) => fake.set_mask(slot, &mask),
                        ConstraintCommand::Release(ticket) => fake.release(ticket).unwrap(),
                    }
                }
                while turn == 0
                    && let Some(plan) = scheduler.next_plan(now, fake.pace())
                {
                    let ticket = fake.submit(plan).unwrap();
                    scheduler.submitted(ticket);
                    scheduler.assert_consistent();
                }
            }
            // Masks found at once are delivered at once.
            for (id, grammar, next) in answers.drain(..) {
                scheduler.constrained(id, grammar, next, now);
            }
            for order in scheduler.take_commands() {
                match order {
                    ConstraintCommand::Mask(slot, mask) => fake.set_mask(slot, &mask),
                    ConstraintCommand::Release(ticket) => fake.release(ticket).unwrap(),
                    ConstraintCommand::Take(..) => unreachable!("nothing was drawn"),
                }
            }
            while let Some(plan) = scheduler.next_plan(now, fake.pace()) {
                let ticket = fake.submit(plan).unwrap();
                scheduler.submitted(ticket);
            }
            for output in scheduler.take_outputs() {
                match output {
                    SchedulerOutput::Event(id, Event::Token(_)) if id == free => {
                        longest = longest.max(now - last);
                        (last, drawn) = (now, drawn + 1);
                    }
                    SchedulerOutput::Event(id, Event::Finished(end)) if id == late => finished = Some(end.reason),
                    SchedulerOutput::Event(id, Event::Finished(_)) => {
                        let (_, _, ended) =
                            joined.as_mut().filter(|(joined, ..)| *joined == id).expect("the short one");
                        *ended = Some(now);
                    }
                    _ => {}
                }
            }
        }
        assert_eq!(finished, Some(FinishReason::Length));
        assert!(now >= held, "it has not waited for its mask");
        assert_eq!(questions, 49, "the last token's successor is not asked for");
        assert!(longest < Duration::from_millis(60), "gates {gates}: a free row waited {longest:?}");
        assert!(drawn > 3_000, "gates {gates}: {drawn} tokens in five seconds of a millisecond's steps");
        let (_, arrived, ended) = joined.expect("it came");
        // Without gates the late sequence delays no other row, but it would keep a slot that it does not use.
        let soon = ended.is_some_and(|ended| ended - arrived < Duration::from_millis(200));
        assert!(soon, "gates {gates}: arrived {arrived:?}, ended {ended:?}");
    }
}

/// Goal: prompts get their turn although steps that wait for masks follow each other without a gap in the queue.
#[test]
fn constrained_sequences_leave_prompts_their_turn() {
    let replica = replica(fake(4, Duration::from_millis(1)), 8);
    let endless = constraints().pop().expect("there are constraints");
    let long = |id: &str| Request { grammar: Some(endless.clone()), ..request(id, 4, 290) };
    let events = [submit(&replica, long("a")), submit(&replica, long("b"))];
    for events in &events {
        while !matches!(events.recv().expect("it goes on"), Event::Token(_)) {}
    }
    for number in 0..4 {
        let (_, finished) = collect(&submit(&replica, request(&format!("short {number}"), 30, 3)));
        assert_eq!(finished.reason, FinishReason::Length);
    }
    assert_eq!(replica.unfinished(), 2, "the short ones had to wait for the long ones");
    replica.abort("a");
    replica.abort("b");
}

#[test]
fn a_dump_hands_out_every_steps_logits_and_logprobs_come_as_asked() {
    let replica = replica(fake(1, Duration::from_micros(200)), 4);
    let ask = Request { dump_logits: true, logprobs: Some(3), ..request("a", 5, 6) };
    let events = submit(&replica, ask);
    let mut tokens = 0;
    for event in events {
        if let Event::Token(token) = event {
            assert_eq!(token.logits.unwrap()[token.id as usize], 1.0);
            assert_eq!(token.logprobs.unwrap().top.len(), 3);
            tokens += 1;
        }
    }
    assert_eq!(tokens, 6);
}

// ---- routing ----

fn served(name: &str, replicas: Vec<Replica>) -> ServedModel {
    let info = ModelInfo {
        architecture: "Fake".into(),
        context: 512,
        vocabulary: VOCABULARY,
        eos_ids: vec![EOS],
        weight_bytes: 0,
        bytes_per_token: 0,
        parameters: 0,
        active_parameters: 0,
        embedding: Default::default(),
    };
    ServedModel::new(name.into(), info, None, replicas)
}

fn slow(name: &str, index: usize) -> Replica {
    spawn(name, index, FakeExecutor::realtime(Duration::from_millis(2)), 4)
}

#[test]
fn requests_find_their_replica() {
    let host =
        Host::new(vec![served("one", vec![slow("one/0", 0), slow("one/1", 1)]), served("two", vec![slow("two/0", 1)])]);
    let route = |model: &str, device: &str| host.route(model, device).map(|(_, replica)| replica.name.clone());
    for (selector, expected) in [
        ("one/1", "one/1"),
        ("00000001-AAAA-bbbb-cccc-000000000000", "one/1"),
        ("0000:01:00.0", "one/1"),
        ("1", "one/1"),
        ("accelerator 4001", "one/1"),
        ("0", "one/0"),
        ("", "one/0"),
        ("fake", "one/0"),
    ] {
        assert_eq!(route("one", selector).as_deref(), Ok(expected), "{selector}");
    }
    assert_eq!(route("two", "").as_deref(), Ok("two/0"));
    // A numeric selector is an index, although a device's name contains this number.
    for selector in ["4000", "2", "two/0", "nonsense"] {
        match route("one", selector) {
            Err(RouteError::UnknownDevice { asked, available, .. }) => {
                assert_eq!(asked, selector);
                assert!(available.contains("one/0") && available.contains("one/1"), "{available}");
            }
            other => panic!("{selector}: {other:?}"),
        }
    }
    for unknown in ["", "three"] {
        let error = RouteError::UnknownModel { asked: unknown.into(), served: "one, two".into() };
        let words = if unknown.is_empty() { "name one of one, two: --model" } else { "\"three\" is not served" };
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(route(unknown, ""), Err(error));
    }
    // Routing avoids a busy replica unless it is named, and a draining one.
    let replicas = host.models()[0].replicas.clone();
    let _events = submit(&replicas[0], request("a", 1, 500));
    assert_eq!(route("one", "").as_deref(), Ok("one/1"));
    assert_eq!(route("one", "0").as_deref(), Ok("one/0"));
    replicas[1].drain();
    assert_eq!(route("one", "").as_deref(), Ok("one/0"));
    host.drain();
    assert_eq!(host.unfinished(), 1);
    for replica in host.replicas() {
        assert!(replica.closed().is_some());
    }
}

#[test]
fn the_only_model_needs_no_name() {
    let host = Host::new(vec![served("one", vec![slow("one/0", 0)])]);
    assert_eq!(host.route("", "").unwrap().0.name, "one");
    assert_eq!(host.route("one", "").unwrap().1.name, "one/0");
}

// ---- spans ----

/// Records the spans of this program: name, parent and numeric fields.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<HashMap<u64, SpanSeen>>>);

#[derive(Clone, Debug, Default)]
struct SpanSeen {
    name: &'static str,
    parent: Option<u64>,
    fields: HashMap<String, f64>,
    closed: bool,
}

struct Fields<'a>(&'a mut HashMap<String, f64>);

impl tracing::field::Visit for Fields<'_> {
    fn record_f64(&mut self, field: &tracing::field::Field, value: f64) {
        self.0.insert(field.name().to_string(), value);
    }
    fn record_u64(&mut self, field: &tracing::field::Field, value: u64) {
        self.0.insert(field.name().to_string(), value as f64);
    }
    fn record_debug(&mut self, _: &tracing::field::Field, _: &dyn std::fmt::Debug) {}
}

impl Spans {
    fn change(&self, id: &tracing::span::Id, change: impl FnOnce(&mut SpanSeen)) {
        change(self.0.lock().unwrap().entry(id.into_u64()).or_default());
    }
}

// The registry reuses the id of a closed span. The test keeps its parent span open and looks only at that span's
// children.
impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Spans {
    fn on_new_span(&self, attributes: &tracing::span::Attributes<'_>, id: &tracing::span::Id, _: Context<'_, S>) {
        self.change(id, |seen| {
            assert!(seen.name.is_empty() || seen.closed);
            *seen = SpanSeen {
                name: attributes.metadata().name(),
                parent: attributes.parent().map(tracing::span::Id::into_u64),
                ..SpanSeen::default()
            };
            attributes.record(&mut Fields(&mut seen.fields));
        });
    }
    fn on_record(&self, id: &tracing::span::Id, values: &tracing::span::Record<'_>, _: Context<'_, S>) {
        self.change(id, |seen| values.record(&mut Fields(&mut seen.fields)));
    }
    fn on_close(&self, id: tracing::span::Id, _: Context<'_, S>) {
        self.change(&id, |seen| seen.closed = true);
    }
}

#[test]
fn a_request_has_three_spans_with_what_they_cost() {
    let spans = Spans::default();
    let subscriber = tracing_subscriber::registry().with(spans.clone());
    tracing::subscriber::set_global_default(subscriber).expect("no other test sets one");
    let replica = replica(fake(1, Duration::from_micros(500)), 4);
    let span = tracing::info_span!("request under test");
    let parent = span.id().unwrap().into_u64();
    let ask = Request { span: span.clone(), ..request("a", 50, 40) };
    let (_, finished) = collect(&submit(&replica, ask));
    let seen: Vec<SpanSeen> = {
        let all = spans.0.lock().unwrap();
        all.values().filter(|seen| seen.parent == Some(parent)).cloned().collect()
    };
    assert_eq!(seen.len(), 3, "one a phase, none a token: {seen:?}");
    let named = |name| seen.iter().find(|seen| seen.name == name).unwrap();
    assert!(seen.iter().all(|seen| seen.closed));
    assert!(named("queue").fields.is_empty());
    let prefill = &named("prefill").fields;
    assert_eq!(prefill["ostinato.tokens"], 50.0);
    assert_eq!(prefill["ostinato.steps"], 3.0);
    assert_eq!(prefill["ostinato.submits"], 3.0);
    let decode = &named("decode").fields;
    assert_eq!(decode["ostinato.tokens"], 39.0);
    assert_eq!(decode["ostinato.steps"], 39.0);
    assert!((decode["ostinato.dispatches"] - 390.0).abs() < 1e-6);
    assert!((decode["ostinato.submits"] - 39.0 * finished.per_token.submits).abs() < 1e-6);
    assert_eq!(decode["ostinato.flushes.readback"], decode["ostinato.submits"]);
    assert_eq!(decode["ostinato.host_waits"], 0.0);
}

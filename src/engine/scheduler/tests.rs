//! Goal: the scheduler keeps its promises. Method: each test drives a scheduler against a device that is simulated in a
//! few lines.

use super::*;
use crate::engine::pace::Pace;
use crate::engine::plan::{
    Capacity, Change, Drafts, Page, PlanReport, Sampled, Slot, StepPlan, Ticket, WindowCapacity, Work,
};
use crate::engine::request::{Event, FinishReason, Limits, PerToken, Request};
use crate::engine::scheduler::decoding::PLAN_STEPS_MIN;
use crate::engine::scheduler::{ConstraintCommand, EngineLoad, Scheduler, SchedulerOutput, Setup};
use crate::engine::sequence::SequenceId;
use crate::kernels::attention::PAGE_TOKENS;
use crate::model::grammar::{Constraint, Grammars, StartedGrammar};
use crate::model::split_mix::split_mix;
use crate::model::text::Text;
use std::time::Duration;

fn setup(slots: u32, pages: u32) -> Setup {
    let capacity = Capacity {
        slots,
        pages,
        window: None,
        context: 256,
        prefill_chunk: 32,
        causal: true,
        prompts: 4,
        sequences: 4,
        mixed_steps: None,
        buckets: vec![1, 2, 4, 8],
        run_ahead: 32,
        gates: true,
        vocabulary: 100,
        snapshots: None,
        drafts: Drafts::default(),
        plan_limit: None,
    };
    Setup {
        context: capacity.usable_context(),
        capacity,
        eos_ids: vec![99],
        device_name: "fake".into(),
        device_uuid: "0".into(),
        replica: "m/0".into(),
        seed: 1,
        prefix_cache: false,
    }
}

fn request(id: &str, prompt: usize, max_tokens: u32) -> Request {
    Request {
        limits: Limits { max_tokens: Some(max_tokens), ..Limits::default() },
        ..Request::new(id, vec![1; prompt])
    }
}

/// The load of a scheduler that has nothing to do.
fn idle(bench: &Bench) -> EngineLoad {
    let pages_total = bench.scheduler.setup.capacity.pages;
    EngineLoad { prompt_tokens: bench.scheduler.prompt_tokens, pages_total, ..EngineLoad::default() }
}

/// A scheduler, its plans in flight, and a device that draws the same token for every row.
struct Bench {
    scheduler: Scheduler,
    now: Instant,
    pace: Pace,
    tickets: u64,
    flights: VecDeque<(Ticket, Work)>,
}

impl Bench {
    fn new(setup: Setup) -> Bench {
        Bench {
            scheduler: Scheduler::new(setup),
            now: Instant::now(),
            pace: Pace::of_step(Duration::from_millis(1)),
            tickets: 0,
            flights: VecDeque::new(),
        }
    }

    fn arrive(&mut self, request: Request) {
        self.scheduler.arrive(request, self.now);
    }

    fn plan(&mut self) -> Option<StepPlan> {
        let plan = self.scheduler.next_plan(self.now, &self.pace)?;
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.scheduler.submitted(ticket);
        if let Some(work) = &plan.work {
            self.flights.push_back((ticket, work.clone()));
        }
        self.scheduler.assert_consistent();
        Some(plan)
    }

    fn work(&mut self) -> Option<Work> {
        self.plan().map(|plan| plan.work.expect("work"))
    }

    /// Reports the oldest plan as a whole; every row draws token 7.
    fn complete(&mut self) {
        let (ticket, work) = self.flights.pop_front().expect("a plan in flight");
        let token = |slot| Sampled { slot, id: 7, done: None, draft: 0, details: None };
        let (steps, tokens) = match work {
            Work::Prefill { chunks, decoding, .. } => {
                let lasts = chunks.iter().filter(|chunk| chunk.last).map(|chunk| chunk.slot);
                (1, lasts.chain(decoding).map(token).collect())
            }
            Work::CatchUp { .. } => (1, Vec::new()),
            Work::Decode { slots, steps, .. } => {
                (steps, (0..steps).flat_map(|_| slots.iter().map(|&slot| token(slot))).collect())
            }
        };
        self.report(ticket, (steps, 0), tokens);
    }

    /// Reports that a plan of so many steps has finished, with so many faults.
    fn report(&mut self, ticket: Ticket, (steps, faults): (u32, u32), tokens: Vec<Sampled>) {
        let named = |flight: &&Flight| flight.ticket == ticket;
        let drafts = self.scheduler.flights.iter().find(named).map_or(0, |flight| flight.drafts);
        let report = PlanReport {
            ticket,
            steps,
            drafts: if faults > 0 { 0 } else { drafts },
            tokens,
            scored: None,
            pooled: Vec::new(),
            finished: true,
            faults,
            cost: PerToken::default(),
            submissions: Vec::new(),
        };
        self.scheduler.progress(report, self.now);
        self.scheduler.assert_consistent();
    }

    fn finished(&mut self) -> Vec<FinishReason> {
        let outputs = self.scheduler.take_outputs().into_iter();
        outputs
            .filter_map(|output| match output {
                SchedulerOutput::Event(_, Event::Finished(finished)) => Some(finished.reason),
                _ => None,
            })
            .collect()
    }
}

/// Returns the slot, the first position, the number of tokens and `last` of each chunk.
fn chunks(work: Option<Work>) -> Vec<(u32, u32, usize, bool)> {
    match work {
        Some(Work::Prefill { chunks, .. }) => {
            chunks.iter().map(|chunk| (chunk.slot.0, chunk.start, chunk.tokens.len(), chunk.last)).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the slots that decode in a prefill plan.
fn decoding(work: &Option<Work>) -> &[Slot] {
    match work {
        Some(Work::Prefill { decoding, .. }) => decoding,
        other => panic!("{other:?}"),
    }
}

fn steps(work: Option<Work>) -> u32 {
    match work {
        Some(Work::Decode { steps, .. }) => steps,
        other => panic!("{other:?}"),
    }
}

/// Goal: where steps are mixed, a row draws a token in each plan of a prompt that arrives, and the prompt does not wait for
/// plans of the row's own, nor is it divided because of the row if one plan could compute it.
#[test]
fn a_row_decodes_in_the_plans_of_a_prompt() {
    let mut setup = setup(2, 32);
    setup.capacity.mixed_steps = Some(Duration::ZERO);
    let mut bench = Bench::new(setup);
    bench.arrive(request("a", 5, 60));
    assert_eq!(chunks(bench.work()), [(0, 0, 5, true)]);
    let ahead = steps(bench.work());
    bench.arrive(request("b", 70, 30));
    bench.complete();
    assert_eq!(bench.plan(), None, "the decode steps in flight may draw nothing yet");
    bench.complete();
    for expected in [(1, 0, 31, false), (1, 31, 31, false), (1, 62, 8, true)] {
        let work = bench.work();
        assert_eq!(decoding(&work), [Slot(0)]);
        assert_eq!(chunks(work), [expected], "32 rows with that of the other sequence");
        if bench.flights.len() == 2 {
            bench.complete();
        }
    }
    assert_eq!(bench.scheduler.sequences[SequenceId(0)].output_tokens(), 1 + ahead + 2);
    let work = bench.work();
    assert!(matches!(&work, Some(Work::Decode { slots, .. }) if slots[..] == [Slot(0), Slot(1)]), "{work:?}");
    bench.complete();
    bench.complete();
    bench.arrive(request("c", 31, 10));
    bench.scheduler.abort("b", bench.now);
    let work = bench.work();
    assert_eq!((decoding(&work), chunks(work.clone())), (&[Slot(0)][..], vec![(1, 0, 31, true)]));
}

/// Goal: rows that decode beside a long prompt have a decode plan now and then, so that the time of a step stays known, and
/// plans take turns with the prompt's if a step with both takes too long.
#[test]
fn mixed_steps_are_interrupted_and_given_up_if_they_take_too_long() {
    let mut setup = setup(2, 300);
    setup.capacity.mixed_steps = Some(Duration::ZERO);
    (setup.capacity.context, setup.context) = (4096, 4096);
    let mut bench = Bench::new(setup);
    bench.arrive(request("a", 5, 300));
    assert_eq!(chunks(bench.work()), [(0, 0, 5, true)]);
    bench.complete();
    bench.arrive(request("b", 3000, 30));
    let next = |bench: &mut Bench| {
        let work = bench.work();
        bench.complete();
        work
    };
    for _ in 0..2 {
        for plan in 0..32 {
            assert_eq!(decoding(&next(&mut bench)), [Slot(0)], "plan {plan}");
        }
        assert_eq!(steps(next(&mut bench)), 1);
    }
    bench.pace.note_step(1, Duration::from_millis(4));
    (0..9).for_each(|_| bench.pace.note_chunk(32, Duration::from_millis(20)));
    for turn in 0..8 {
        let work = next(&mut bench);
        assert_eq!((decoding(&work), chunks(work.clone()).len()), (&[][..], 1), "turn {turn}");
        assert_eq!(steps(next(&mut bench)), 1, "turn {turn}");
        bench.pace.note_chunk(16, Duration::from_millis(3));
        bench.pace.note_chunk(32, Duration::from_millis(4));
    }
}

/// Returns a started grammar whose tokens the tests themselves decide.
fn grammar() -> StartedGrammar {
    let tokenizer = serde_json::json!({
        "version": "1.0", "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": {"a": 7, "b": 8}, "merges": []},
    });
    let text = Text::from_bytes(tokenizer.to_string().as_bytes(), None, None).unwrap();
    let grammars = Grammars::new(&text, 100, &[99]).unwrap();
    StartedGrammar { slow: false, ..grammars.start(&Constraint::Regex("[ab]{200}".to_owned()), false).unwrap() }
}

/// Answers the questions about what may follow a token. Returns the plans whose masks are all set now.
fn answer(bench: &mut Bench) -> Vec<Ticket> {
    let mut released = Vec::new();
    let mut orders = bench.scheduler.take_commands();
    while !orders.is_empty() {
        for order in orders {
            match order {
                ConstraintCommand::Take(id, mut grammar, token) => {
                    let next = grammar.take(token);
                    bench.scheduler.constrained(id, grammar, next, bench.now);
                }
                ConstraintCommand::Mask(..) => {}
                ConstraintCommand::Release(ticket) => released.push(ticket),
            }
        }
        orders = bench.scheduler.take_commands();
    }
    released
}

/// Goal: a constrained row decodes in the plans of a prompt, like the row beside it. With gates each of its plans is queued
/// before its mask is there, and the next plan of the prompt when it is; without gates its plans come after its masks, and the
/// row beside it has all of them.
#[test]
fn constrained_rows_decode_in_the_plans_of_a_prompt() {
    for gates in [true, false] {
        let mut setup = setup(3, 300);
        setup.capacity.mixed_steps = Some(Duration::ZERO);
        setup.capacity.gates = gates;
        (setup.capacity.context, setup.context) = (2048, 2048);
        let mut bench = Bench::new(setup);
        bench.arrive(request("a", 5, 150));
        bench.arrive(Request { grammar: Some(grammar()), ..request("b", 5, 150) });
        assert_eq!(chunks(bench.work()).len(), 2);
        bench.complete();
        bench.arrive(request("c", 600, 2));
        let (mut drawn, mut waited) = (0, 0);
        for plan in 0..12 {
            let work = bench.work();
            let Some(Work::Prefill { decoding, awaits, .. }) = &work else { panic!("{work:?}") };
            assert!(decoding.contains(&Slot(0)), "plan {plan}");
            assert_eq!(*awaits, gates, "plan {plan}: the last token of the row is reported, its mask is not");
            drawn += u32::from(decoding.contains(&Slot(1)));
            waited += u32::from(*awaits);
            if *awaits {
                assert_eq!(bench.plan(), None, "a prompt is not queued behind a closed gate");
            }
            let released = answer(&mut bench);
            assert_eq!(released.len(), usize::from(*awaits), "plan {plan}");
            bench.complete();
        }
        let wanted = if gates { (12, 12) } else { (6, 0) };
        assert_eq!((drawn, waited), wanted, "gates: {gates}");
        let output = |id: u64| bench.scheduler.sequences[SequenceId(id)].output_tokens();
        assert_eq!((output(0), output(1)), (13, 1 + drawn));
    }
}

/// Goal: with recurrent state, a chunk beside rows that decode is a multiple of the state's blocks, and its step has room for
/// both; if it has none, plans take turns.
#[test]
fn chunks_with_state_beside_rows_are_whole_blocks() {
    for (most, expected) in [(192, Some(128)), (64, None)] {
        let mut setup = setup(2, 300);
        setup.capacity.mixed_steps = Some(Duration::ZERO);
        (setup.capacity.snapshots, setup.capacity.prefill_chunk) = (Some(4), most);
        (setup.capacity.context, setup.context) = (2048, 2048);
        let mut bench = Bench::new(setup);
        bench.pace.note_chunk(most, Duration::from_micros(1500));
        bench.arrive(request("a", 5, 150));
        chunks(bench.work());
        bench.complete();
        bench.arrive(request("b", 1000, 2));
        if expected.is_none() {
            // The row's turn, after its own prompt.
            steps(bench.work());
            bench.complete();
        }
        for turn in 0..3 {
            let work = bench.work();
            let rows = decoding(&work).len();
            match expected {
                Some(tokens) => assert_eq!((rows, chunks(work)[0].2), (1, tokens), "turn {turn}"),
                None => {
                    assert_eq!((rows, chunks(work)[0].2), (0, 64), "turn {turn}");
                    bench.complete();
                    steps(bench.work());
                }
            }
            bench.complete();
        }
    }
}

/// Goal: rows for which drafts may pay take turns with prompts; more rows than may draft, and rows for which drafts are known
/// not to pay, decode in the prompts' plans.
#[test]
fn rows_that_may_draft_take_turns_with_prompts() {
    for (sequences, verify_ms, mixes) in [(1, None, true), (2, None, false), (2, Some(1), false), (2, Some(9), true)] {
        let mut setup = setup(3, 300);
        setup.capacity.mixed_steps = Some(Duration::ZERO);
        setup.capacity.drafts = Drafts { most: 1, sequences, ..Drafts::default() };
        (setup.capacity.context, setup.context) = (2048, 2048);
        let mut bench = Bench::new(setup);
        bench.pace.note_step(2, Duration::from_millis(1));
        verify_ms.into_iter().for_each(|time| bench.pace.note_verify(2, 1, Duration::from_millis(time)));
        bench.arrive(request("a", 5, 150));
        bench.arrive(request("b", 5, 150));
        chunks(bench.work());
        bench.complete();
        bench.arrive(request("c", 600, 2));
        let work = match bench.work() {
            Some(Work::Decode { .. }) => {
                bench.complete();
                bench.work()
            }
            work => work,
        };
        assert_eq!(decoding(&work).len(), if mixes { 2 } else { 0 }, "{sequences} may draft, in {verify_ms:?} ms");
    }
}

/// Goal: each of many short prompts shares its plan with the row that decodes, if that has plans of its own between them.
#[test]
fn short_prompts_one_after_the_other_all_have_plans_with_the_row() {
    let mut setup = setup(2, 200);
    setup.capacity.mixed_steps = Some(Duration::ZERO);
    (setup.capacity.context, setup.context) = (2048, 2048);
    let mut bench = Bench::new(setup);
    bench.arrive(request("a", 5, 2000));
    assert_eq!(chunks(bench.work()), [(0, 0, 5, true)]);
    bench.complete();
    for index in 0..40 {
        bench.arrive(request(&format!("b{index}"), 10, 2));
        let work = bench.work();
        assert_eq!(decoding(&work), [Slot(0)], "prompt {index}");
        bench.complete();
        steps(bench.work());
        bench.complete();
        bench.finished();
    }
}

/// Goal: rows decode while a draft model catches up with many tokens, and what it catches up for is done afterwards. Method:
/// drafts that are always wanted, and such that are tried now and then.
#[test]
fn rows_do_not_wait_for_all_of_a_draft_models_catching_up() {
    for always in [true, false] {
        let mut setup = setup(2, 300);
        setup.capacity.drafts = Drafts { most: 1, sequences: 1, always, catches_up: true, ..Drafts::default() };
        (setup.capacity.context, setup.context) = (4096, 4096);
        let mut bench = Bench::new(setup);
        bench.pace.note_step(1, Duration::from_millis(1));
        bench.pace.note_verify(1, 1, Duration::from_millis(9));
        // Two rows are too many for drafts.
        bench.arrive(request("a", 5, 3000));
        bench.arrive(request("b", 5, 90));
        // Plans may only take notice of sequences that have ended.
        let next = |bench: &mut Bench| {
            let work = std::iter::from_fn(|| bench.plan()).find_map(|plan| plan.work).expect("there is work");
            bench.complete();
            work
        };
        let mut work = next(&mut bench);
        while !matches!(work, Work::CatchUp { .. }) {
            assert!(matches!(work, Work::Prefill { .. } | Work::Decode { drafts: 0, .. }), "{work:?}");
            work = next(&mut bench);
        }
        let (mut parts, mut tokens) = (0, 0);
        while let Work::CatchUp { chunks } = work {
            parts += 1;
            tokens += chunks[0].tokens.len();
            work = next(&mut bench);
            if let Work::Decode { steps: 1, drafts: 0, .. } = work {
                work = next(&mut bench);
            }
        }
        assert!(matches!(work, Work::Decode { drafts: 1, .. }), "{work:?} after {parts} parts");
        assert!(parts >= 3 && tokens >= 85, "{tokens} tokens in {parts} parts of at most 32");
    }
}

/// Goal: a draft model computes the tokens of steps without drafts once drafts are chosen again, when all of them are known,
/// before the step that needs them.
#[test]
fn a_draft_model_catches_up_before_drafts() {
    let mut setup = setup(2, 64);
    setup.capacity.drafts = Drafts { most: 1, sequences: 1, catches_up: true, ..Drafts::default() };
    let mut bench = Bench::new(setup);
    // Two rows are too many for drafts, of which no time is known yet.
    bench.arrive(request("a", 5, 200));
    bench.arrive(request("b", 5, 4));
    assert_eq!(chunks(bench.work()), [(0, 0, 5, true), (1, 0, 5, true)]);
    bench.complete();
    let plain = |work: Option<Work>| match work {
        Some(Work::Decode { slots, steps, drafts: 0, .. }) => (slots.len(), steps),
        work => panic!("{work:?}"),
    };
    assert_eq!(plain(bench.work()).0, 2);
    bench.complete();
    bench.pace.note_step(1, Duration::from_millis(1));
    assert_eq!(bench.finished().len(), 1, "b has all of its tokens");
    let length = bench.scheduler.sequences[SequenceId(0)].tokens.len();
    let ahead = bench.flights.len();
    let work = bench.work();
    match work {
        Some(Work::CatchUp { chunks }) => {
            assert_eq!((chunks.len(), chunks[0].slot, chunks[0].start), (1, Slot(0), 5));
            assert_eq!(chunks[0].tokens.len() + 5, length - 2, "the last two are the step's own");
        }
        work => panic!("{work:?}, {ahead} plans ahead"),
    }
    let drafting = |work: Option<Work>| assert!(matches!(work, Some(Work::Decode { drafts: 1, .. })), "{work:?}");
    drafting(bench.work());
    bench.complete();
    bench.complete();
    drafting(bench.work());

    // A plan that was run again without drafts has left its tokens to be computed, and those of the plans queued behind it.
    let length = bench.scheduler.sequences[SequenceId(0)].tokens.len();
    while let Some((ticket, work)) = bench.flights.pop_front() {
        let Work::Decode { slots, steps, drafts: 1, .. } = work else { panic!("{work:?}") };
        let token = |_| Sampled { slot: slots[0], id: 7, done: None, draft: 0, details: None };
        bench.report(ticket, (steps, 1), (0..steps).map(token).collect());
    }
    let drawn = bench.scheduler.sequences[SequenceId(0)].tokens.len() - length;
    match bench.work() {
        Some(Work::CatchUp { chunks }) => {
            assert_eq!((chunks[0].start as usize, chunks[0].tokens.len()), (length - 2, drawn));
        }
        work => panic!("{work:?}"),
    }
}

#[test]
fn a_prompt_runs_in_chunks_and_decoding_follows_without_waiting_for_its_token() {
    let mut bench = Bench::new(setup(1, 16));
    bench.arrive(request("a", 70, 10));
    let plan = bench.plan().unwrap();
    assert!(matches!(&plan.changes[0], Change::Join { slot: Slot(0), .. }));
    assert!(matches!(&plan.changes[1], Change::Pages { first: 0, pages, .. } if pages.len() == 5));
    assert_eq!(chunks(plan.work), [(0, 0, 32, false)]);
    assert_eq!(chunks(bench.work()), [(0, 32, 32, false)]);
    assert_eq!(bench.plan(), None, "two plans are in flight");
    bench.complete();
    assert_eq!(chunks(bench.work()), [(0, 64, 6, true)]);
    bench.complete();
    assert_eq!(steps(bench.work()), 9, "one token comes from the prompt, nine from decoding");
}

#[test]
fn a_plan_lasts_ten_milliseconds_or_ten_tokens_and_two_fit_the_run_ahead() {
    for (micros, expected) in [(100, 16), (625, 16), (1_000, 10), (3_800, 10), (9_000, 4), (50_000, 2)] {
        let mut bench = Bench::new(setup(1, 16));
        bench.pace = Pace::of_step(Duration::from_micros(micros));
        bench.arrive(request("a", 1, 200));
        bench.plan();
        bench.complete();
        assert_eq!(steps(bench.work()), expected, "{micros} us a step");
        assert_eq!(steps(bench.work()), expected);
        assert_eq!(bench.plan(), None);
    }
    let mut unknown = Bench::new(setup(1, 16));
    unknown.pace = Pace::default();
    unknown.arrive(request("a", 1, 200));
    unknown.plan();
    unknown.complete();
    assert_eq!(steps(unknown.work()), PLAN_STEPS_MIN, "nobody knows yet what a step takes");
    let mut little = setup(1, 16);
    little.capacity.run_ahead = 3;
    let mut bench = Bench::new(little);
    bench.arrive(request("a", 1, 200));
    bench.plan();
    bench.complete();
    assert_eq!((steps(bench.work()), steps(bench.work())), (1, 1));
}

/// Goal: plans keep to a limit of time, from the first one on, when nothing is known of the device. Method: a slow device, on
/// which a token of a prompt takes 4 ms and a decode step 60 ms, with a limit of 100 ms; then a fast one.
#[test]
fn plans_keep_to_a_limit_of_time_from_the_first_one_on() {
    let limited = || {
        let mut setup = setup(1, 64);
        setup.capacity.prefill_chunk = 128;
        setup.capacity.plan_limit = Some(Duration::from_millis(100));
        let mut bench = Bench::new(setup);
        bench.pace = Pace::default();
        bench.arrive(request("a", 180, 20));
        bench
    };
    let taken = |work| chunks(work).iter().map(|chunk| chunk.2).sum::<usize>();
    let mut slow = limited();
    assert_eq!([taken(slow.work()), taken(slow.work())], [16, 16], "the first chunks measure the device");
    slow.pace.note_chunk(16, Duration::from_millis(64));
    let mut left = 180 - 32;
    while left > 0 {
        slow.complete();
        let tokens = taken(slow.work());
        assert_eq!(tokens, left.min(16), "24 tokens would take 96 ms, but there is no such size");
        left -= tokens;
    }
    slow.complete();
    assert_eq!(steps(slow.work()), 1, "nobody knows yet what a step takes");
    slow.pace.note_step(1, Duration::from_millis(60));
    slow.complete();
    assert_eq!(steps(slow.work()), 1, "two steps would take 120 ms");

    let mut fast = limited();
    assert_eq!(taken(fast.work()), 16);
    fast.pace.note_chunk(16, Duration::from_millis(5));
    assert_eq!(taken(fast.work()), 128, "expected to take 40 ms at most");
}

#[test]
fn no_step_is_queued_beyond_the_last_token_and_no_page_taken_for_it() {
    let mut bench = Bench::new(setup(1, 16));
    bench.arrive(request("a", 14, 4));
    bench.plan();
    // Positions 14, 15 and 16 are written; the fourth token never is.
    let plan = bench.plan().unwrap();
    assert!(matches!(&plan.changes[..], [Change::Pages { first: 1, pages, .. }] if pages.len() == 1));
    assert_eq!(plan.work, Some(Work::Decode { slots: vec![Slot(0)], steps: 3, drafts: 0, awaits: false }));
    bench.complete();
    assert_eq!(bench.plan(), None);
    bench.complete();
    assert_eq!(bench.finished(), [FinishReason::Length]);
    // The device did not mark the slot done (this one never does), so the scheduler tells it to leave the slot.
    assert_eq!(bench.plan().unwrap().changes, [Change::Leave { slot: Slot(0) }]);
    assert!(bench.scheduler.is_idle());
    assert_eq!(bench.scheduler.load(), idle(&bench));
}

#[test]
fn an_aborted_slot_is_held_until_its_plans_are_finished_and_its_surplus_is_dropped() {
    let mut bench = Bench::new(setup(1, 16));
    bench.arrive(request("a", 1, 100));
    bench.arrive(request("b", 1, 100));
    bench.plan();
    bench.plan();
    bench.scheduler.abort("a", bench.now);
    bench.scheduler.abort("a", bench.now);
    bench.scheduler.abort("nobody", bench.now);
    assert_eq!(bench.finished(), [FinishReason::Aborted]);
    assert_eq!(bench.plan(), None);
    bench.complete();
    assert_eq!(bench.scheduler.load().running, 1);
    let plan = bench.plan().unwrap();
    assert_eq!(plan, StepPlan { changes: vec![Change::Leave { slot: Slot(0) }], work: None });
    bench.complete();
    assert_eq!(bench.scheduler.load().running, 0);
    assert!(bench.scheduler.take_outputs().is_empty(), "tokens after the end");
    assert_eq!(chunks(bench.work()), [(0, 0, 1, true)]);
}

#[test]
fn deadlines_end_requests_in_the_queue_and_on_the_device() {
    let mut bench = Bench::new(setup(1, 16));
    let deadline = bench.now + Duration::from_secs(1);
    for id in ["a", "b"] {
        bench.arrive(Request { deadline: Some(deadline), ..request(id, 1, 100) });
    }
    bench.plan();
    assert_eq!(bench.scheduler.next_deadline(), Some(deadline));
    bench.scheduler.expire(deadline - Duration::from_nanos(1));
    assert_eq!(bench.finished(), []);
    bench.scheduler.expire(deadline);
    assert_eq!(bench.finished(), [FinishReason::DeadlineExceeded, FinishReason::DeadlineExceeded]);
    assert_eq!(bench.scheduler.next_deadline(), None);
    bench.complete();
    bench.plan();
    assert!(bench.scheduler.is_idle());
}

#[test]
fn higher_priority_goes_first_and_the_oldest_is_not_passed_over_for_ever() {
    let mut bench = Bench::new(setup(1, 16));
    bench.arrive(request("low", 1, 1));
    let mut order = Vec::new();
    for i in 0..20 {
        bench.arrive(Request { priority: 5, ..request(&format!("high {i}"), 1, 1) });
        let Some(plan) = bench.plan() else { panic!() };
        assert!(plan.work.is_some());
        for output in bench.scheduler.take_outputs() {
            if let SchedulerOutput::Event(id, Event::Started(_)) = output {
                order.push(id.0);
            }
        }
        bench.complete();
    }
    assert_eq!(order[..PASSED_OVER_MAX as usize], [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(order[PASSED_OVER_MAX as usize], 0, "the oldest had its turn");
    assert_eq!(order[8..10], [8, 9]);
}

#[test]
fn the_youngest_of_the_lowest_priority_gives_way_and_resumes_with_its_history() {
    let mut small = setup(3, 6);
    small.context = 96;
    let mut bench = Bench::new(small);
    bench.pace = Pace::of_step(Duration::from_millis(10));
    bench.arrive(Request { priority: 1, ..request("first", 15, 60) });
    bench.arrive(request("second", 15, 60));
    bench.arrive(request("third", 15, 60));
    let mut left = Vec::new();
    let mut joined = Vec::new();
    while bench.scheduler.preemptions < 2 {
        while let Some(plan) = bench.plan() {
            for change in plan.changes {
                match change {
                    Change::Join { slot, params, .. } => joined.push((slot, params.generated, params.max_tokens)),
                    Change::Leave { slot } => left.push(slot),
                    Change::Pages { .. } => {}
                }
            }
        }
        bench.complete();
    }
    // Slots were assigned in order of arrival: the third sequence is preempted first, then the second.
    assert_eq!(left[0], Slot(2));
    assert_eq!(joined[..3], [(Slot(0), 0, 60), (Slot(1), 0, 60), (Slot(2), 0, 60)]);
    while !bench.scheduler.is_idle() {
        while let Some(plan) = bench.plan() {
            for change in plan.changes {
                if let Change::Join { slot, params, .. } = change {
                    joined.push((slot, params.generated, params.max_tokens));
                }
            }
        }
        if !bench.flights.is_empty() {
            bench.complete();
        }
    }
    assert!(joined.len() >= 5);
    for (_, generated, max_tokens) in &joined[3..] {
        assert!(*generated > 0);
        assert_eq!(generated + max_tokens, 60);
    }
    assert_eq!(bench.finished(), vec![FinishReason::Length; 3]);
}

#[test]
fn a_sequence_that_was_passed_over_keeps_its_pages_to_the_end() {
    let mut small = setup(2, 6);
    small.context = 96;
    let mut bench = Bench::new(small);
    bench.pace = Pace::of_step(Duration::from_millis(10));
    bench.arrive(request("low", 15, 60));
    bench.scheduler.passed_over = PASSED_OVER_MAX;
    bench.plan();
    let high = Request { priority: 5, ..request("high", 15, 60) };
    bench.arrive(high);
    let mut left = Vec::new();
    while bench.scheduler.preemptions == 0 {
        while let Some(plan) = bench.plan() {
            left.extend(plan.changes.into_iter().filter_map(|change| match change {
                Change::Leave { slot } => Some(slot),
                _ => None,
            }));
        }
        bench.complete();
    }
    while left.is_empty() {
        let plan = bench.plan();
        left.extend(plan.into_iter().flat_map(|plan| plan.changes).filter_map(|change| match change {
            Change::Leave { slot } => Some(slot),
            _ => None,
        }));
        if left.is_empty() {
            bench.complete();
        }
    }
    assert_eq!(left, [Slot(1)], "the one of higher priority gave way");
}

#[test]
fn prompts_alternate_with_decoding() {
    let mut bench = Bench::new(setup(2, 32));
    bench.arrive(request("a", 1, 100));
    bench.plan();
    bench.complete();
    bench.arrive(request("b", 100, 10));
    let mut kinds = Vec::new();
    for _ in 0..8 {
        match bench.work().unwrap() {
            Work::Prefill { .. } => kinds.push(0),
            Work::Decode { steps, .. } => kinds.push(steps),
            work => panic!("{work:?}"),
        }
        bench.complete();
    }
    assert_eq!(kinds, [1, 0, 1, 0, 1, 0, 1, 0]);
}

#[test]
fn several_prompts_share_a_step_up_to_its_tokens_and_its_number_of_prompts() {
    let mut bench = Bench::new(setup(8, 64));
    for (id, prompt) in [("a", 10), ("b", 12), ("c", 40), ("d", 1), ("e", 1), ("f", 1), ("g", 1)] {
        bench.arrive(request(id, prompt, 1));
    }
    assert_eq!(chunks(bench.work()), [(0, 0, 10, true), (1, 0, 12, true), (2, 0, 10, false)]);
    let expected = [(2, 10, 30, true), (3, 0, 1, true), (4, 0, 1, true)];
    assert_eq!(chunks(bench.work()), expected, "32 tokens");
    bench.complete();
    let plan = bench.plan().unwrap();
    // The sequences whose only token was drawn have left their slots.
    assert_eq!(chunks(plan.work), [(0, 0, 1, true), (1, 0, 1, true)]);
}

#[test]
fn beside_rows_that_decode_a_prompt_plan_is_short_and_a_lone_long_prompts_is_shorter() {
    for (prompt, wanted) in [(64, 64), (100, 100), (200, 48)] {
        beside_rows(prompt, wanted);
    }
}

/// Checks the first plan of a prompt beside a row whose step takes 4 ms, on a device on which 64 prompt tokens take 9
/// ms and 32 take 6 ms.
fn beside_rows(prompt: usize, wanted: usize) {
    let mut large = setup(8, 64);
    large.capacity.prefill_chunk = 128;
    let mut bench = Bench::new(large);
    bench.arrive(request("a", 1, 200));
    bench.plan();
    bench.complete();
    bench.pace.note_step(1, Duration::from_millis(4));
    bench.pace.note_chunk(64, Duration::from_millis(9));
    bench.pace.note_chunk(32, Duration::from_millis(6));
    bench.arrive(request("b", prompt, 10));
    let taken = |work| chunks(work).iter().map(|chunk| chunk.2).sum::<usize>();
    let decoded = bench.work();
    assert_eq!(steps(decoded), 1);
    assert_eq!(taken(bench.work()), wanted, "{prompt} tokens");
    // There are more prompts than rows, so prompts are not cut short for the rows.
    for id in ["c", "d", "e"] {
        bench.arrive(request(id, 40, 10));
    }
    bench.complete();
    assert_eq!(steps(bench.work()), 1);
    bench.complete();
    assert_eq!(taken(bench.work()), (prompt - wanted + 3 * 40).min(128), "three prompts or four for one row");
}

fn cached(slots: u32, pages: u32) -> Bench {
    Bench::new(Setup { prefix_cache: true, ..setup(slots, pages) })
}

fn counting(id: &str, prompt: u32) -> Request {
    Request { prompt: (0..prompt).map(|i| i % 90).collect(), ..request(id, 1, 20) }
}

#[test]
fn prompts_with_one_beginning_share_its_full_pages_even_within_a_plan() {
    let mut bench = cached(4, 16);
    for id in ["a", "b"] {
        bench.arrive(counting(id, 30));
    }
    let plan = bench.plan().unwrap();
    let tables: Vec<&Vec<Page>> = plan
        .changes
        .iter()
        .filter_map(|change| match change {
            Change::Pages { pages, .. } => Some(pages),
            _ => None,
        })
        .collect();
    assert_eq!(tables[0][0], tables[1][0]);
    assert_ne!(tables[0][1], tables[1][1], "a page that grows is nobody else's");
    assert_eq!(chunks(plan.work), [(0, 0, 30, true), (1, 16, 2, false)], "32 tokens");
    assert_eq!(bench.scheduler.load().pages_used, 3);
    assert_eq!(bench.scheduler.load().cached_tokens, 16);
}

#[test]
fn at_least_one_token_is_computed_and_another_salt_finds_nothing() {
    let mut bench = cached(4, 16);
    bench.arrive(counting("a", 32));
    bench.plan();
    bench.complete();
    bench.arrive(counting("b", 32));
    bench.arrive(Request { cache_salt: "x".into(), ..counting("c", 32) });
    let work = loop {
        match bench.work() {
            Some(Work::Decode { .. }) => bench.complete(),
            work => break work,
        }
    };
    assert_eq!(chunks(work), [(1, 16, 16, true), (2, 0, 16, false)]);
}

#[test]
fn what_was_generated_is_found_by_the_next_turn_after_the_first_has_ended() {
    let mut bench = cached(2, 16);
    bench.arrive(Request { limits: Limits { max_tokens: Some(20), ..Limits::default() }, ..counting("a", 15) });
    while !bench.scheduler.is_idle() {
        while bench.plan().is_some() {}
        if !bench.flights.is_empty() {
            bench.complete();
        }
    }
    let counts = bench.scheduler.load();
    assert_eq!((counts.pages_used, counts.pages_cached), (0, 2), "the last token was never written");
    // Every token drawn was 7.
    let mut next = counting("b", 15);
    next.prompt.extend([7; 20]);
    next.prompt.push(1);
    bench.arrive(next);
    assert_eq!(chunks(bench.work()), [(0, 32, 4, true)]);
    let started = bench.scheduler.take_outputs().into_iter().find_map(|output| match output {
        SchedulerOutput::Event(SequenceId(1), Event::Started(started)) => Some(started.cached_tokens),
        _ => None,
    });
    assert_eq!(started, Some(32));
}

#[test]
fn a_preempted_sequence_finds_what_is_left_of_its_pages() {
    let mut small = setup(2, 6);
    small.context = 96;
    small.prefix_cache = true;
    let mut bench = Bench::new(small);
    bench.pace = Pace::of_step(Duration::from_millis(10));
    bench.arrive(counting("first", 15));
    bench.arrive(Request { cache_salt: "x".into(), ..counting("second", 15) });
    for request in ["first", "second"] {
        let id = bench.scheduler.by_request[request];
        bench.scheduler.sequences.get_mut(id).unwrap().max_tokens = 60;
    }
    let mut resumed = None;
    while !bench.scheduler.is_idle() {
        while let Some(plan) = bench.plan() {
            if let Some(Work::Prefill { chunks, .. }) = plan.work
                && bench.scheduler.preemptions > 0
            {
                resumed.get_or_insert(chunks[0].start);
            }
        }
        if !bench.flights.is_empty() {
            bench.complete();
        }
    }
    assert!(resumed.is_some_and(|start| start > 0 && start % PAGE_TOKENS == 0), "{resumed:?}");
}

#[test]
fn a_request_that_dumps_logits_does_not_run_ahead_and_runs_one_at_a_time() {
    let mut bench = Bench::new(setup(2, 16));
    for id in ["a", "b"] {
        bench.arrive(Request { dump_logits: true, ..request(id, 1, 3) });
    }
    for _ in 0..2 {
        for expected in [0, 1, 1] {
            match bench.work().unwrap() {
                Work::Prefill { .. } => assert_eq!(expected, 0),
                Work::Decode { steps, slots, .. } => {
                    assert_eq!((steps, slots.len()), (expected, 1))
                }
                work => panic!("{work:?}"),
            }
            assert_eq!(bench.plan(), None);
            bench.complete();
        }
    }
}

#[test]
fn more_rows_than_the_largest_bucket_take_turns() {
    let mut narrow = setup(3, 32);
    narrow.capacity.buckets = vec![1, 2];
    let mut bench = Bench::new(narrow);
    bench.pace = Pace::of_step(Duration::from_millis(10));
    for id in ["a", "b", "c"] {
        bench.arrive(request(id, 1, 150));
    }
    let mut turns = [0; 3];
    for _ in 0..40 {
        if let Work::Decode { slots, .. } = bench.work().unwrap() {
            assert!(slots.len() <= 2);
            slots.iter().for_each(|slot| turns[slot.0 as usize] += 1);
        }
        bench.complete();
    }
    assert!(turns.iter().all(|&turns| turns >= 20), "{turns:?}");
}

#[test]
fn a_row_too_many_for_a_good_step_takes_turns_with_the_others() {
    let mut bench = Bench::new(setup(5, 64));
    // So often that neither is looked at again soon.
    for _ in 0..32 {
        bench.pace.note_step(4, Duration::from_millis(10));
        bench.pace.note_step(5, Duration::from_millis(30));
    }
    for id in ["a", "b", "c", "d", "e"] {
        bench.arrive(request(id, 1, 200));
    }
    let mut drawn = [0; 5];
    for _ in 0..21 {
        if let Work::Decode { slots, .. } = bench.work().unwrap() {
            assert_eq!(slots.len(), 4);
            slots.iter().for_each(|slot| drawn[slot.0 as usize] += 1);
        }
        bench.complete();
    }
    assert!(drawn.iter().all(|&drawn| (14..=17).contains(&drawn)), "{drawn:?}");
}

/// Goal: decode plans ask sequences that wait for tokens, and take a page for them, without the sequences, which know of both
/// when they are told or end; and the next page is taken in the same way.
#[test]
fn sequences_that_wait_are_told_later_what_plans_asked_of_them() {
    let mut bench = Bench::new(setup(2, 64));
    bench.arrive(request("a", 10, 100));
    bench.arrive(request("b", 10, 100));
    while bench.scheduler.outstanding[0].waits.is_none() {
        bench.plan();
        bench.complete();
    }
    bench.scheduler.take_outputs();
    let undrawn = |bench: &Bench| [0, 1].map(|slot| bench.scheduler.row(Slot(slot)).undrawn());
    let waits = |bench: &Bench, slot: usize| bench.scheduler.outstanding[slot].waits.unwrap();
    let (known, used) = (undrawn(&bench), bench.scheduler.load().pages_used);
    while waits(&bench, 0).page.is_none() {
        bench.plan();
        bench.complete();
    }
    assert_eq!(bench.scheduler.load().pages_used, used + 2);
    assert_eq!(undrawn(&bench), known);
    let asked = waits(&bench, 1).asked;
    assert!(asked > 0 && asked == waits(&bench, 0).asked);
    assert_eq!(bench.scheduler.row(Slot(1)).pages.len() as u32 + 1, waits(&bench, 1).pages);
    // The end of a sequence, and what it was asked for.
    bench.scheduler.abort("a", bench.now);
    bench.scheduler.take_outputs();
    assert_eq!(bench.scheduler.row(Slot(1)).undrawn(), known[1] - asked);
    assert_eq!(bench.scheduler.row(Slot(1)).pages.len() as u32, waits(&bench, 1).pages);
    let mut plans = 0;
    while let Some(plan) = bench.plan() {
        // The last one only leaves a slot.
        if plan.work.is_some() {
            bench.complete();
        }
        plans += 1;
    }
    assert!(plans > 4 && bench.finished() == [FinishReason::Length] && bench.scheduler.is_idle());
    assert_eq!(bench.scheduler.load().pages_used, 0);
}

#[test]
fn a_failed_device_ends_everything() {
    let mut bench = Bench::new(setup(2, 16));
    for id in ["a", "b", "c"] {
        bench.arrive(request(id, 1, 50));
    }
    bench.plan();
    bench.plan();
    bench.scheduler.fail("gone", bench.now);
    assert_eq!(bench.finished(), vec![FinishReason::Error("gone".into()); 3]);
    assert!(bench.scheduler.is_idle());
    assert_eq!(bench.scheduler.load(), idle(&bench));
    bench.scheduler.assert_consistent();
}

/// The part of a plan that measured times decide: the tokens of a prompt plan, or the rows and drafts of a decode plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Chosen {
    Chunk(u32),
    Rows(u32, u32),
}

impl Chosen {
    /// Returns the choice with its tokens or rows rounded up to a power of two: choices of equal size share pipelines.
    fn size(self) -> Chosen {
        match self {
            Chosen::Chunk(tokens) => Chosen::Chunk(tokens.next_power_of_two()),
            Chosen::Rows(rows, drafts) => Chosen::Rows(rows.next_power_of_two(), drafts),
        }
    }
}

/// A device whose pace the scheduler learns, and on which work may be slow at first.
struct Learned {
    bench: Bench,
    /// How often each size still takes ten times as long.
    slow: std::collections::BTreeMap<Chosen, u32>,
    /// The number of slow executions of a size.
    cold: u32,
    arrived: usize,
    /// Verification steps so far, which decide which drafts are right.
    verified: u64,
    chosen: Vec<Chosen>,
}

impl Learned {
    fn new(drafts: Drafts, cold: u32, warmed: Option<Chosen>) -> Learned {
        let mut setup = setup(16, 4096);
        setup.capacity.context = 2048;
        setup.context = setup.capacity.usable_context();
        setup.capacity.prefill_chunk = 512;
        setup.capacity.buckets = vec![1, 2, 4, 8, 16];
        setup.capacity.drafts = drafts;
        let mut bench = Bench::new(setup);
        bench.pace = Pace::default();
        let slow = warmed.into_iter().map(|chosen| (chosen, 0)).collect();
        Learned { bench, slow, cold, arrived: 0, verified: 0, chosen: Vec::new() }
    }

    fn arrive(&mut self, prompt: usize, max_tokens: u32) {
        self.arrived += 1;
        self.bench.arrive(request(&self.arrived.to_string(), prompt, max_tokens));
    }

    /// The time of one step of some work on a warm device. Eight rows take hardly longer than one; sixteen take half as
    /// long again.
    fn warm(chosen: Chosen) -> Duration {
        Duration::from_micros(match chosen {
            Chosen::Chunk(tokens) => 600 + 7 * u64::from(tokens) / 2,
            Chosen::Rows(rows, drafts) => (if rows > 8 { 1000 } else { 640 }) * (10 + u64::from(drafts)) / 10,
        })
    }

    /// Makes a plan, executes it and reports it.
    fn step(&mut self) {
        let work = self.bench.work().expect("there is work");
        let chosen = match &work {
            Work::Prefill { chunks, .. } => Chosen::Chunk(chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum()),
            Work::Decode { slots, drafts, .. } => Chosen::Rows(slots.len() as u32, *drafts),
            work => panic!("{work:?}"),
        };
        let left = self.slow.entry(chosen.size()).or_insert(self.cold);
        let time = Learned::warm(chosen) * if *left > 0 { 10 } else { 1 };
        *left = left.saturating_sub(1);
        let pace = &mut self.bench.pace;
        match chosen {
            Chosen::Chunk(tokens) => pace.note_chunk(tokens, time),
            Chosen::Rows(rows, 0) => pace.note_step(rows, time),
            Chosen::Rows(rows, drafts) => pace.note_verify(rows, drafts, time),
        }
        self.chosen.push(chosen);
        match work {
            Work::Decode { slots, steps, drafts, .. } if drafts > 0 => self.verify(&slots, steps, drafts),
            _ => self.bench.complete(),
        }
        self.bench.now += time;
    }

    /// Reports a plan of verification steps: the first draft is always right, the second one every second time, and the
    /// third one never.
    fn verify(&mut self, slots: &[Slot], steps: u32, drafts: u32) {
        let (ticket, _) = self.bench.flights.pop_front().expect("the plan");
        let mut tokens = Vec::new();
        for _ in 0..steps {
            self.verified += 1;
            let right = if self.verified.is_multiple_of(2) { 2 } else { 1 };
            for &slot in slots {
                let token = |draft| Sampled { slot, id: 7, done: None, draft, details: None };
                tokens.extend((0..=drafts.min(right)).map(token));
            }
        }
        self.bench.report(ticket, (steps, 0), tokens);
    }

    /// Keeps `rows` sequences decoding and, with `prompts`, one prompt of 512 tokens waiting, for a number of plans.
    fn serve(mut self, rows: usize, prompts: bool, plans: usize) -> Vec<Chosen> {
        let mut running = 0;
        while self.chosen.len() < plans {
            running += (0..rows - running).inspect(|_| self.arrive(16, 900)).count();
            let waiting = self.bench.scheduler.waiting.len();
            if prompts && waiting == 0 && self.chosen.len().is_multiple_of(4) {
                self.arrive(512, 1);
            }
            self.step();
            let outputs = self.bench.scheduler.take_outputs();
            running -= outputs
                .iter()
                .filter(|output| {
                    matches!(output, SchedulerOutput::Event(_, Event::Finished(finished)) if finished.output_tokens > 1)
                })
                .count();
        }
        self.chosen
    }
}

/// The choice of each kind that is made most often in each window of plans.
fn usual(chosen: &[Chosen], window: usize, is: fn(&Chosen) -> bool) -> Vec<Option<Chosen>> {
    let most = |window: &[Chosen]| {
        let mut counts = std::collections::BTreeMap::new();
        window.iter().filter(|chosen| is(chosen)).for_each(|chosen| *counts.entry(*chosen).or_insert(0) += 1);
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(chosen, _)| chosen)
    };
    chosen.chunks_exact(window).map(most).collect()
}

/// Goal: a first start is not slow for good. Where the first executions of each size take ten times as long, because
/// pipelines are compiled or nothing is warm, the sizes of prompts' chunks, the rows of a batch and the numbers of drafts
/// soon become those of a device that was never slow. Method: the same traffic against a warm and a cold device; after a
/// bounded number of plans, the choices of the cold one that are made most often must equal those of the warm one. That
/// many plans, of one to ten steps, take a few seconds on a GPU.
#[test]
fn what_was_learned_while_a_device_was_cold_is_forgotten() {
    const WINDOW: usize = 64;
    const WITHIN: usize = 1024;
    let chunk: fn(&Chosen) -> bool = |chosen| matches!(chosen, Chosen::Chunk(_));
    let rows: fn(&Chosen) -> bool = |chosen| matches!(chosen, Chosen::Rows(..));
    let none = Drafts::default();
    let drafts = Drafts { most: 3, sequences: 2, always: false, history: false, catches_up: false };
    // In three cases a smaller size is warm already, so that a cold one looks bad beside it.
    let cases = [
        ("chunks", none, 4, true, chunk, None),
        ("a full batch", none, 16, false, rows, Some(Chosen::Rows(8, 0))),
        ("a full batch beside prompts", none, 16, true, rows, Some(Chosen::Rows(8, 0))),
        ("a batch in turns", none, 9, false, rows, None),
        ("drafts", drafts, 1, false, rows, Some(Chosen::Rows(1, 0))),
    ];
    let mut bitten = Vec::new();
    for (what, drafts, running, prompts, kind, warmed) in cases {
        let serve = |cold| {
            let mut learned = Learned::new(drafts, cold, warmed);
            if let Some(Chosen::Rows(rows, 0)) = warmed.filter(|_| drafts.most == 0) {
                // As if fewer sequences had run before.
                learned.bench.pace.note_step(rows, Learned::warm(Chosen::Rows(rows, 0)));
            }
            usual(&learned.serve(running, prompts, 2 * WITHIN), WINDOW, kind)
        };
        let warm = serve(0);
        let settled = warm[warm.len() / 2];
        assert!(warm[warm.len() / 2..].iter().all(|usual| *usual == settled), "{what}: a warm device: {warm:?}");
        for cold in [1, 3, 10] {
            let seen = serve(cold);
            let healed = seen.iter().rposition(|usual| *usual != settled).map_or(0, |last| (last + 1) * WINDOW);
            println!("{what}: after {cold} slow executions of each size as on a warm device after {healed} plans");
            assert!(healed <= WITHIN, "{what}, {cold} slow executions: not {settled:?} after {healed} plans: {seen:?}");
            if healed > 0 {
                bitten.push(what);
            }
        }
    }
    bitten.dedup();
    assert_eq!(bitten, ["chunks", "a full batch", "a full batch beside prompts", "drafts"], "a cold device misleads");
}

/// Goal: sequences that have joined always find the window pages that they need, also while prompts that have been computed
/// wait for their turn. Method: a prompt of many chunks and shorter ones at random times, as many window pages as the
/// sequences' shares and chunks, and plans that are reported late.
#[test]
fn there_are_window_pages_for_all_sequences_that_join() {
    for seed in 0..100 {
        let mut state = seed;
        let mut below = |most: u32| (split_mix(&mut state) % u64::from(most)) as u32;
        let (slots, context, run_ahead, prefill_chunk) = (9, 40_976, 32, 4096);
        let mut setup = setup(slots, slots * context / PAGE_TOKENS);
        let tokens = 1 + below(40);
        let pages = slots * WindowCapacity::pages_each(tokens, context, run_ahead, 0)
            + WindowCapacity::pages_of_chunks(prefill_chunk);
        let window = Some(WindowCapacity { tokens, pages });
        let plan_limit = Some(Duration::from_millis(100));
        setup.capacity = Capacity {
            context,
            prefill_chunk,
            run_ahead,
            prompts: 16,
            sequences: 16,
            window,
            plan_limit,
            ..setup.capacity
        };
        setup.context = setup.capacity.usable_context();
        setup.prefix_cache = below(4) > 0;
        let mut bench = Bench::new(setup);
        bench.pace = Pace::default();
        let (long_at, at, count, length) = (below(60), below(60), 1 + below(8), 200 + below(260));
        let step = Duration::from_micros(u64::from(100 + below(2000)));
        let token = Duration::from_nanos(u64::from(10 + below(20_000)));
        for event in 0..150 {
            if event == long_at {
                bench.arrive(Request { prompt: vec![99; 40_960 + below(10) as usize], ..request("long", 1, 1) });
            }
            if event == at {
                for n in 0..count {
                    bench.arrive(Request { prompt: vec![n; length as usize], ..request(&n.to_string(), 1, 76) });
                }
            }
            match (below(5), bench.flights.front()) {
                (0..3, Some((_, work))) => {
                    match work {
                        Work::Prefill { chunks, .. } => {
                            let tokens = chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum();
                            bench.pace.note_chunk(tokens, token * tokens);
                        }
                        Work::Decode { slots, .. } => bench.pace.note_step(slots.len() as u32, step),
                        Work::CatchUp { .. } => panic!("{work:?}"),
                    }
                    bench.complete();
                }
                _ => drop(bench.plan()),
            }
            bench.scheduler.take_outputs();
        }
    }
}

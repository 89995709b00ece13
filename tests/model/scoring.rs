//! Goal: the log probability of each prompt token does not depend on how the prompt is split into chunks, on other
//! sequences in the batch or on the prefix cache, and equals that of transformers. Method: the kernels alone against
//! plain Rust; committed checkpoints with next-token logits from transformers, compared also with the log probabilities
//! of the model's own decode steps.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{collect, expected, fixture, generate, idle, request, submit};
use crate::harness::{Bench, Cases, Expect, POISON, Random};
use ostinato::config::{Config, KvFormat, Model};
use ostinato::engine::request::{Request, Scored, TokenLogprobs};
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::kernels::exchange::{Columns, Rank};
use ostinato::kernels::recording::Op;
use ostinato::kernels::sampling::score::{Score, join_scores, part_columns, score, score_of, score_part, take_rows};
use ostinato::kernels::sampling::{advance, row_stride};
use ostinato::kernels::shaders::{AdvanceArgs, JoinScoresArgs, ScoreArgs, ScorePartArgs, TakeRowsArgs};
use ostinato::kernels::state::{SCORE_WORDS, TOKEN_NONE};

/// Returns logits of several kinds: ties, infinities, NaN, all equal, all negative infinity.
fn logits(random: &mut Random, vocabulary: usize, kind: usize) -> Vec<f32> {
    let mut row: Vec<f32> = (0..vocabulary).map(|_| random.float() * 12.0).collect();
    let one = random.below(vocabulary as u32) as usize;
    match kind % 7 {
        0 => {}
        1 => row.iter_mut().for_each(|l| *l = (*l / 6.0).round()),
        2 => row[one] = f32::INFINITY,
        3 => row.iter_mut().step_by(3).for_each(|l| *l = f32::NAN),
        4 => row.iter_mut().skip(2).for_each(|l| *l = f32::NEG_INFINITY),
        5 => row.fill(-3.5),
        _ => row.fill(f32::NEG_INFINITY),
    }
    row
}

#[test]
fn scores_are_the_logarithms_of_what_softmax_gives_the_next_tokens() {
    let vulkan = Vulkan::shared();
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        let mut cases = Cases::new("score");
        let mut random = Random(3);
        let mut wanted = Vec::new();
        // Rows of the chunk, rows per recording, vocabulary, invocations, alternatives, whether the token after the
        // chunk is known.
        let shapes = [
            (1, 4, 5, 128, 0, true),
            (7, 7, 1000, 32, 20, false),
            (9, 4, 4099, 128, 3, true),
            (15, 8, 260, 128, 20, true),
        ];
        for (rows, at_a_time, vocabulary, threads, top, known) in shapes {
            cases.case(format!("{rows}.{at_a_time}.{vocabulary}"));
            let stride = row_stride(vocabulary);
            let tokens: Vec<u32> = (0..rows + 1).map(|_| random.below(vocabulary)).collect();
            let infos: Vec<u32> = tokens[..rows as usize].iter().flat_map(|token| [*token, 0, 0, 1]).collect();
            let next = if known { tokens[rows as usize] } else { TOKEN_NONE };
            let first = 3;
            let words = cases.words("score", &[0, next, top, first]);
            let chunk = cases.words("chunk", &[1, 0, rows, 0]);
            let row_list = cases.words("rows", &infos);
            let x: Vec<f32> = (0..rows * 8).map(|i| i as f32).collect();
            let x = cases.floats("x", &x);
            let scores = cases.output("scores", ((first + rows) * SCORE_WORDS) as usize, Expect::Pairs(2e-6));
            let mut turn = 0;
            while turn * at_a_time < rows {
                let made: Vec<Vec<f32>> =
                    (0..at_a_time).map(|r| logits(&mut random, vocabulary as usize, (turn + r) as usize)).collect();
                for (r, row) in (turn * at_a_time..rows).zip(&made) {
                    let token = if r + 1 < rows { tokens[r as usize + 1] } else { next };
                    let score = (token != TOKEN_NONE).then(|| score_of(row, token, top));
                    wanted.push((scores, first + r, score));
                }
                let padded = made.iter().flat_map(|row| {
                    let behind = (stride - vocabulary) as usize;
                    row.iter().copied().chain(std::iter::repeat_n(f32::MAX, behind)).collect::<Vec<_>>()
                });
                let padded: Vec<f32> = padded.collect();
                let logits = cases.floats(&format!("logits.{turn}"), &padded);
                let head_x = cases.output(&format!("head_x.{turn}"), (at_a_time * 8) as usize, Expect::Exact);
                let args = TakeRowsArgs { x, chunk, score: words, head_x, x_stride: 8 };
                cases.recording.call(take_rows("take_rows".into(), at_a_time, args));
                let row_stride = stride;
                let args = ScoreArgs { logits, rows: row_list, chunk, score: words, scores, vocabulary, row_stride };
                cases.recording.call(score("score".into(), at_a_time, threads, args));
                cases.recording.call(advance("next_rows".into(), AdvanceArgs { step_number: words.part(0, 4) }));
                turn += 1;
            }
        }
        let reference = cases.reference();
        for (scores, entry, score) in wanted {
            let words: Vec<u32> =
                (0..SCORE_WORDS).map(|word| reference.u32(scores, entry * SCORE_WORDS + word)).collect();
            match score {
                Some(score) => assert_eq!(Score::read(&words), score),
                None => assert!(words.iter().all(|word| *word == POISON), "an entry of no token"),
            }
        }
        cases.check(&bench, &reference);
    }
}

/// Goal: scores that are joined from the parts of two or three devices are those of all logits.
#[test]
fn scores_joined_from_parts_of_the_vocabulary_are_those_of_all_logits() {
    let (mut cases, mut random, mut wanted) = (Cases::new("join_scores"), Random(4), Vec::new());
    for (rows, vocabulary, devices, top) in [(9, 509, 2, 20), (8, 3000, 3, 4), (7, 61, 3, 20), (3, 40, 2, 0)] {
        cases.case(format!("{rows}.{vocabulary}.{devices}"));
        let tokens: Vec<u32> = (0..rows + 1).map(|_| random.below(vocabulary)).collect();
        let infos: Vec<u32> = tokens[..rows as usize].iter().flat_map(|token| [*token, 0, 0, 1]).collect();
        let (at_a_time, first) = (rows + 2, 2);
        let words = cases.words("score", &[0, tokens[rows as usize], top, first]);
        let chunk = cases.words("chunk", &[1, 0, rows, 0]);
        let row_list = cases.words("rows", &infos);
        let scores = cases.output("scores", ((first + rows) * SCORE_WORDS) as usize, Expect::Pairs(1e-5));
        let made: Vec<Vec<f32>> = (0..rows).map(|r| logits(&mut random, vocabulary as usize, r as usize)).collect();
        for (row, logits) in (0..).zip(&made) {
            wanted.push((scores, first + row, score_of(logits, tokens[row as usize + 1], top)));
        }
        let columns = Columns { count: vocabulary, unit: 16 };
        let of_parts = part_columns(Rank { index: 0, of: devices });
        let parts = cases.output("parts", (at_a_time * of_parts.count) as usize, Expect::Pairs(1e-5));
        for index in 0..devices {
            let own = columns.part(Rank { index, of: devices });
            let stride = row_stride(own.len() as u32);
            let mut values = vec![f32::MAX; (at_a_time * stride) as usize];
            for (row, logits) in values.chunks_exact_mut(stride as usize).zip(&made) {
                row[..own.len()].copy_from_slice(&logits[own.start as usize..own.end as usize]);
            }
            let logits = cases.floats(&format!("logits.{index}"), &values);
            let size = (at_a_time * SCORE_WORDS) as usize;
            let part = cases.output(&format!("part.{index}"), size, Expect::Pairs(1e-5));
            let args = ScorePartArgs {
                logits,
                rows: row_list,
                chunk,
                score: words,
                parts: part,
                vocabulary: own.len() as u32,
                row_stride: stride,
                first: own.start,
            };
            cases.recording.call(score_part(format!("part.{index}"), at_a_time, 128, args));
            for row in 0..at_a_time {
                let unit = u64::from(SCORE_WORDS) * 4;
                let from = part.part(u64::from(row) * unit, unit);
                cases
                    .recording
                    .ops
                    .push(Op::Copy { from, to: parts.part(u64::from(row * devices + index) * unit, unit) });
            }
        }
        let args = JoinScoresArgs { parts, rows: row_list, chunk, score: words, scores, vocabulary };
        cases.recording.call(join_scores("join".into(), at_a_time, devices, args));
    }
    let reference = cases.reference();
    for (scores, entry, wanted) in wanted {
        let words: Vec<u32> = (0..SCORE_WORDS).map(|word| reference.u32(scores, entry * SCORE_WORDS + word)).collect();
        let found = Score::read(&words);
        let near = |a: f32, b: f32| a == b || (a - b).abs() < 1e-5;
        let ids = |of: &Score| of.top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert!(near(found.logprob, wanted.logprob) && ids(&found) == ids(&wanted), "{found:?} in place of {wanted:?}");
        assert!(found.token == wanted.token && found.top.iter().zip(&wanted.top).all(|(a, b)| near(a.1, b.1)));
    }
    let vulkan = Vulkan::shared();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

#[test]
fn a_score_adds_up() {
    let score = score_of(&[0.0, f32::NAN, 0.0, f32::NEG_INFINITY, 0.0], 2, 20);
    let third = -(3f32.ln());
    assert_eq!(score, Score { token: 2, logprob: third, top: vec![(0, third), (2, third), (4, third)] });
    assert_eq!(score_of(&[1.0, f32::NEG_INFINITY], 1, 1).logprob, f32::NEG_INFINITY);
    assert_eq!(score_of(&[f32::NAN; 3], 1, 2), Score { token: 1, logprob: f32::NEG_INFINITY, top: Vec::new() });
}

/// Serves a fixture with four slots, f32 keys and values and row-major weights, after a change of its configuration.
pub(crate) fn serve(vulkan: &Vulkan, name: &str, change: impl FnOnce(&mut Model, &mut Config)) -> Host {
    let mut model = Model::new("m", fixture(name), Some(vulkan.adapter(Driver::first()).selector()));
    model.slots = Some(4);
    model.kv_format = Some(KvFormat::F32);
    let mut config = Config::default();
    // Row-major weights avoid rounding of activations, on a GPU as well.
    config.runtime.tune = vec!["fragments=0".into()];
    change(&mut model, &mut config);
    config.models = vec![model];
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{name}: {e:?}"))
}

fn ask(id: &str, prompt: &[u32], top: u32, tokens: u32) -> Request {
    Request { id: id.to_owned(), prompt_logprobs: Some(top), ..request(prompt, tokens) }
}

/// Compares two scorings of the same prompt. Log probabilities may differ by `near`.
fn compare(found: &[Scored], wanted: &[Scored], near: f32, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let mut worst = 0f32;
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        assert_eq!(found.id, wanted.id, "{what}, {at}");
        worst = worst.max((found.logprobs.chosen - wanted.logprobs.chosen).abs());
        assert_eq!(found.logprobs.top.len(), wanted.logprobs.top.len(), "{what}, {at}");
        for (rank, (f, w)) in found.logprobs.top.iter().zip(&wanted.logprobs.top).enumerate() {
            worst = worst.max((f.1 - w.1).abs());
            // Alternatives of nearly equal probability may change places.
            assert!(f.0 == w.0 || (f.1 - w.1).abs() < near, "{what}, {at}, {rank}: {f:?} instead of {w:?}");
        }
    }
    println!("{what}: {} tokens, largest difference {worst:.1e} of {near:.0e}", found.len());
    assert!(worst <= near, "{what}: {worst} apart, at most {near}");
}

/// Goal: scores equal those of transformers for the last tokens of a text, and those that the model reported when it
/// drew these tokens.
#[test]
fn prompts_are_as_probable_as_transformers_has_them_and_as_their_tokens_were_when_drawn() {
    let vulkan = Vulkan::shared();
    for name in ["qwen3-deep", "llama-f32", "moe-top2", "hybrid-long"] {
        let host = serve(&vulkan, name, |_, _| {});
        let replica = &host.replicas().next().unwrap();
        let known = expected(name);
        let drawn = generate(replica, Request { logprobs: Some(20), ..request(&known.prompt, 40) });
        assert_eq!(drawn.tokens, known.greedy[..40]);
        let own: Vec<Scored> = drawn
            .drawn
            .iter()
            .map(|token| Scored { id: token.id, logprobs: token.logprobs.clone().expect("asked for") })
            .collect();
        let text: Vec<u32> = known.prompt.iter().chain(&known.greedy[..40]).copied().collect();
        let read = generate(replica, ask("read", &text, 20, 3));
        assert_eq!(read.tokens, known.greedy[40..43], "{name} draws on");
        assert_eq!(read.started.cached_tokens, 0, "all of it is computed");
        assert_eq!(read.scored.iter().map(|token| token.id).collect::<Vec<_>>(), text[1..]);
        compare(&read.scored[known.prompt.len() - 1..], &own, 2e-4, &format!("{name}, its own tokens"));
        for (step, logits) in known.logits.iter().filter(|(step, _)| *step < 40) {
            let id = known.greedy[*step];
            let Score { token, logprob, top } = score_of(logits, id, 20);
            let wanted = Scored { id: token, logprobs: TokenLogprobs { chosen: logprob, top } };
            let at = known.prompt.len() - 1 + step;
            compare(&read.scored[at..=at], &[wanted], 2e-4, &format!("{name}, step {step} of transformers"));
        }
        idle(replica);
    }
}

#[test]
fn scores_do_not_depend_on_chunks_neighbours_or_what_was_found() {
    let vulkan = Vulkan::shared();
    for name in ["qwen3-deep", "hybrid-two"] {
        let known = expected(name);
        let text: Vec<u32> = known.prompt.iter().chain(&known.greedy).copied().collect();
        let mut wanted = Vec::new();
        for chunk in [256, 64] {
            let host = serve(&vulkan, name, |model, _| model.prefill_chunk = Some(chunk));
            let replica = &host.replicas().next().unwrap();
            // The text's pages are already cached, and other requests run between its chunks.
            generate(replica, request(&text, 1));
            let before = submit(replica, Request { id: "before".into(), ..request(&known.prompt, 20) });
            let events: Vec<_> = (0..3).map(|i| submit(replica, ask(&format!("s{i}"), &text, 5, 2))).collect();
            let beside = submit(replica, Request { id: "beside".into(), ..request(&known.prompt, 20) });
            for events in [before, beside] {
                let plain = collect(&events);
                assert_eq!(plain.tokens, known.greedy[..20]);
                assert!(plain.scored.is_empty());
            }
            for events in &events {
                let read = collect(events);
                assert_eq!(read.scored.len(), text.len() - 1);
                if wanted.is_empty() {
                    wanted = read.scored;
                } else {
                    compare(&read.scored, &wanted, 2e-4, &format!("{name}, chunks of {chunk}"));
                }
            }
            let one = generate(replica, ask("one", &text[..1], 5, 1));
            assert!(one.scored.is_empty(), "nothing is before its only token");
            // A later request finds the pages that were computed again.
            let again = generate(replica, request(&text, 1));
            assert!(again.started.cached_tokens > 0);
            idle(replica);
        }
    }
}

/// Goal: scores are the same with rows rounded to bfloat16 for matrix units (on a CPU driver, the variant without
/// them), and for a sequence that is preempted.
#[test]
fn scores_of_fragments_and_of_who_loses_its_place_are_the_same() {
    let vulkan = Vulkan::shared();
    let name = "qwen3-deep";
    let known = expected(name);
    let text: Vec<u32> = known.prompt.iter().chain(&known.greedy).copied().collect();
    let host = serve(&vulkan, name, |_, _| {});
    let wanted = generate(&host.replicas().next().unwrap(), ask("read", &text, 3, 1)).scored;
    drop(host);
    let host = serve(&vulkan, name, |_, config| {
        config.runtime.tune = match Driver::first() {
            Driver::Gpu => Vec::new(),
            _ => vec!["fragments=1".into(), "flash_threads=64".into()],
        };
    });
    let read = generate(&host.replicas().next().unwrap(), ask("read", &text, 3, 1));
    compare(&read.scored, &wanted, 0.1, "in fragments");
    drop(host);
    // There are ten pages: two prompts fill eight of them, which leaves two. While the second prompt is processed token
    // by token, the first sequence outgrows them.
    let prompt = &text[..64];
    let host = serve(&vulkan, name, |model, _| {
        model.kv_pages = Some(10);
        model.context = Some(16 * 10);
        model.prefill_chunk = Some(1);
    });
    let replica = &host.replicas().next().unwrap();
    let events: Vec<_> = (0..3)
        .map(|i| {
            let ask = ask(&format!("r{i}"), prompt, 3, 60);
            submit(replica, Request { cache_salt: i.to_string(), ..ask })
        })
        .collect();
    for events in &events {
        compare(&collect(events).scored, &wanted[..prompt.len() - 1], 2e-4, "who lost its place");
    }
    assert!(replica.load().preemptions > 0, "{:?}", replica.load());
    idle(replica);
}

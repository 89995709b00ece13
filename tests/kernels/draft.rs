//! Goal: the kernels of speculative decoding match their references on both CPU drivers or a GPU. Tokens of the gated
//! delta rule that are verified, partly rejected and replayed leave the same state as plain decode steps of the
//! accepted tokens. Method: seeded cases with slots that run, have finished or do not exist, and poison wherever
//! nothing may be read or written. The state after verification steps is compared with that of `delta_step` on the
//! accepted tokens alone, both on the device.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, descriptor};
use ostinato::kernels::delta::{DeltaHeads, DeltaRule, MOST_PENDING, delta_step, delta_verify};
use ostinato::kernels::draft::{self, SlotsFrom, VerifyRows};
use ostinato::kernels::embed::{ChunkLayout, PromptRows, decode_rows};
use ostinato::kernels::gemm::Activations;
use ostinato::kernels::recording::Range;
use ostinato::kernels::shaders::{
    DecodeRowsArgs, DeltaStepArgs, DraftRowsArgs, JoinNormsArgs, LookUpArgs, NextTokensArgs, NoteTokensArgs,
    ShiftTokensArgs, StoreDraftArgs, VerifyRowsArgs,
};
use ostinato::kernels::state::*;
use ostinato::kernels::tags::Flow;

const LAYOUT: ChunkLayout = ChunkLayout { prompts: 5, cells: true };
const EPSILON: f32 = 1e-6;
/// Tolerance for sums of some dozens of f32 in a different order.
const SUMS: f32 = 1e-5;

fn check(cases: &Cases) {
    let vulkan = Vulkan::new();
    let reference = cases.reference();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

/// Returns the slot words of four slots: running, finished, idle, running.
fn slots(positions: [u32; 4]) -> Vec<u32> {
    let mut words = vec![POISON; 4 * SLOT_WORDS as usize];
    let active = [ACTIVE_RUNNING, ACTIVE_DONE, ACTIVE_IDLE, ACTIVE_RUNNING];
    for (slot, (position, active)) in positions.into_iter().zip(active).enumerate() {
        let mut set = |word: u32, value: u32| words[slot * SLOT_WORDS as usize + word as usize] = value;
        set(SLOT_ACTIVE, active);
        set(SLOT_TOKEN, 100 + slot as u32);
        set(SLOT_POSITION, position);
        (0..MOST_DRAFTS).for_each(|i| set(SLOT_DRAFTS + i, 200 + 10 * slot as u32 + i));
    }
    words
}

/// Goal: look-up drafts the tokens that followed the last tokens: after the longest match, the last one of several,
/// across the sequence's end.
#[test]
fn drafts_are_what_followed_the_last_tokens() {
    for (history, wanted) in [
        (&[7][..], [7, 7, 7]),
        (&[1, 2, 3, 4], [4, 4, 4]),
        (&[5, 1, 6, 2, 5], [1, 6, 2]),
        (&[5, 1, 9, 5, 2, 9, 5], [2, 9, 5]),
        // Three equal tokens go before a later match of two.
        (&[1, 2, 3, 8, 9, 2, 3, 6, 1, 2, 3], [8, 9, 2]),
        (&[4, 4], [4, 4, 4]),
        (&[1, 2, 1, 2, 1], [2, 1, 2]),
    ] {
        assert_eq!(draft::looked_up(history, 3), wanted, "{history:?}");
    }
}

#[test]
fn tokens_are_kept_and_looked_up() {
    let mut cases = Cases::new("look_up");
    let mut random = Random(91);
    for (drafts, each, stride, positions) in
        [(1, 1, 16, [0, 1, 2, 15]), (3, 4, 48, [3, 9, 0, 40]), (2, 3, 1024, [1023, 0, 0, 700])]
    {
        cases.case(format!("{drafts} {each} {stride}"));
        // Few different tokens, so that there are matches of all lengths, and poison behind the last token.
        let mut words = vec![POISON; 4 * stride as usize];
        for (slot, position) in positions.iter().enumerate() {
            let known = &mut words[slot * stride as usize..][..*position as usize];
            known.iter_mut().for_each(|token| *token = 100 + random.below(5));
        }
        let history = cases.words("history", &words);
        let slots = cases.words("slots", &slots(positions));
        cases.expect(slots, Expect::Exact);
        // The first row of each sequence names its slot; there is a row of no sequence.
        let named = [3, 0, u32::MAX, 1];
        let row = |slot: u32| [0, 0, slot, u32::from(slot != u32::MAX)];
        let rows: Vec<u32> = named.into_iter().flat_map(|slot| (0..each).flat_map(move |_| row(slot))).collect();
        let args = LookUpArgs { rows: cases.words("rows", &rows), history, slots, stride };
        cases.recording.call(draft::look_up("look_up".to_owned(), (4, each), drafts, args));
        // Tokens, positions and slots of rows, of which one is not valid and one is behind the end.
        let noted = [[11, 0, 2, 1], [12, stride - 1, 1, 1], [13, 3, 0, 0], [14, stride, 3, 1], [15, 5, 3, 1]].concat();
        let kept = cases.output("kept", 4 * stride as usize, Expect::Exact);
        let args = NoteTokensArgs { rows: cases.words("noted", &noted), history: kept, row_count: 5, stride };
        cases.recording.call(draft::note_tokens("note_tokens".to_owned(), args));
    }
    check(&cases);
}

#[test]
fn rows_to_verify_and_rows_to_draft_from() {
    let mut cases = Cases::new("rows of drafts");
    for (each, batch) in [(2, vec![3, 0]), (4, vec![0, u32::MAX, 3, 1]), (1, vec![2])] {
        cases.case(format!("{each}.{}", batch.len()));
        let sequences = batch.len() as u32;
        let rows = VerifyRows { sequences, each };
        let slots = cases.words("slots", &slots([17, 5, 0, 40]));
        let chunk = cases.output("chunk", LAYOUT.bytes(16) as usize / 4, Expect::Exact);
        let args = VerifyRowsArgs { slots, batch: cases.words("batch", &batch), chunk, tokens_at: LAYOUT.token(0) };
        cases.recording.call(draft::verify_rows("verify_rows".to_owned(), rows, args));
    }
    // Of slot 3 the first two of three rows were accepted, of slot 0 all. Slot 1 has finished, the next row belongs to no
    // sequence, and from the last rows, again of slot 3, nothing was drawn.
    for (each, step) in [(3, 0), (1, 1), (1, 2)] {
        cases.case(format!("next.{each}.{step}"));
        let starts = [(3u32, 38u32), (0, 14), (1, 9), (u32::MAX, 0), (3, 40)];
        let table: Vec<u32> = starts
            .iter()
            .flat_map(|&(slot, start)| {
                (0..each).flat_map(move |t| [500 + 10 * (slot & 7) + t, start + t, slot, u32::from(slot != u32::MAX)])
            })
            .collect();
        let next = cases.output("next", LAYOUT.bytes(16) as usize / 4, Expect::Exact);
        let args = NextTokensArgs {
            rows: cases.words("rows", &table),
            slots: cases.words("slots", &slots([17, 10, 0, 40])),
            next,
            last_at: LAYOUT.last(0),
            tokens_at: LAYOUT.token(0),
        };
        let rows = VerifyRows { sequences: starts.len() as u32, each };
        cases.recording.call(draft::next_tokens("next_tokens".to_owned(), rows, step, args));
        let memory = cases.reference();
        let word = |at: u32| memory.u32(next, at);
        if step == 0 {
            // The row from which the last token was drawn gets that token; the rows before it get the accepted drafts.
            assert_eq!([word(LAYOUT.last(0)), word(LAYOUT.last(1))], [1, 5]);
            assert_eq!([0, 1, 3, 4, 5].map(|row| word(LAYOUT.token(row))), [531, 103, 501, 502, 100]);
            let slots = [0, 1, 2, 3, 4].map(|index| word(4 + 4 * index));
            assert_eq!(slots, [3, 0, u32::MAX, u32::MAX, u32::MAX]);
            assert!((0..5).all(|index| word(LAYOUT.last(index)) < 15), "last rows are rows of the step");
        } else {
            assert_eq!(word(LAYOUT.token(0)), 230 + step - 1, "the draft before is read");
            assert_eq!(word(5), 40 + step - 1, "at the position behind the token drawn");
        }
    }
    check(&cases);
}

/// Goal: the slots that decode in a prompt step have their own tokens at their own positions; one that has finished and one
/// that is idle lose theirs; the prompts keep what was said of them.
#[test]
fn rows_that_decode_in_a_prompt_step() {
    let mut cases = Cases::new("decode_rows");
    let layout = ChunkLayout { prompts: 6, cells: false };
    let prompt =
        PromptRows { slot: 9, start: 7, tokens: &[61, 62, 63], last: false, next: None, from: None, keeps: &[] };
    for (prompts, decoding) in
        [(vec![prompt], vec![0, 1, 3, 2]), (vec![prompt, prompt], vec![3]), (vec![prompt], vec![])]
    {
        cases.case(format!("{} {decoding:?}", prompts.len()));
        let mut words = vec![POISON; layout.bytes(12) as usize / 4];
        for (at, part) in layout.describe_mixed(&prompts, &decoding) {
            words[at as usize..][..part.len()].copy_from_slice(&part);
        }
        let chunk = cases.words("chunk", &words);
        cases.expect(chunk, Expect::Exact);
        let slots = cases.words("slots", &slots([17, 5, 0, 40]));
        let args = DecodeRowsArgs { slots, chunk, tokens_at: layout.token(0) };
        cases.recording.call(decode_rows("decode_rows".to_owned(), args));
        if decoding.len() < 4 {
            continue;
        }
        let memory = cases.reference();
        let word = |at: u32| memory.u32(chunk, at);
        assert_eq!([0, 1, 2, 3].map(word), [5, 4, 7, 4], "prompts, rows that draw, rows, slots that decode");
        let of_prompt = |index: u32| [0, 1, 2].map(|at| word(layout.prompt(index) + at));
        let wanted = [[9, 7, 0], [0, 17, 3], [u32::MAX, 0, 4], [3, 40, 5], [u32::MAX, 0, 6]];
        assert_eq!([0, 1, 2, 3, 4].map(of_prompt), wanted);
        assert_eq!([0, 2, 3, 4, 5, 6].map(|row| word(layout.token(row))), [61, 63, 100, 0, 103, 0]);
        assert_eq!([0, 1, 2, 3].map(|index| word(layout.last(index))), [3, 4, 5, 6]);
    }
    check(&cases);
}

/// Goal: a draft model sees the last two tokens and then its own drafts, at their positions.
#[test]
fn rows_of_a_draft_model() {
    let mut cases = Cases::new("draft_rows");
    let (stride, batch) = (48, [3, u32::MAX, 0, 1]);
    let history: Vec<u32> = (0..4 * stride).map(|at| 1000 + at).collect();
    let by_batch = [SlotsFrom::Batch, SlotsFrom::Rows { each: 1 }, SlotsFrom::Rows { each: 3 }];
    let positions = [(0, [17, 5, 0, 40]), (0, [0, 9, 2, 1]), (1, [17, 5, 0, 40]), (2, [1, 5, 0, 44])];
    for (from, (step, positions)) in by_batch.into_iter().flat_map(|from| positions.map(|of| (from, of))) {
        cases.case(format!("{step}.{positions:?}.{from:?}"));
        let next = cases.output("next", LAYOUT.bytes(16) as usize / 4, Expect::Exact);
        // The first row of a sequence names its slot; a row without a slot is not valid.
        let row = |slot: u32, first: bool| match (slot, first) {
            (u32::MAX, true) => [7, 7, 0, 0],
            (slot, true) => [7, 7, slot, 1],
            (_, false) => [7, 7, 2, 1],
        };
        let words: Vec<u32> = match from {
            SlotsFrom::Batch => batch.to_vec(),
            SlotsFrom::Rows { each } => {
                batch.iter().flat_map(|slot| (0..each).flat_map(move |at| row(*slot, at == 0))).collect()
            }
        };
        let args = DraftRowsArgs {
            slots: cases.words("slots", &slots(positions)),
            batch: cases.words("batch", &words),
            history: cases.words("history", &history),
            next,
            stride,
            last_at: LAYOUT.last(0),
            tokens_at: LAYOUT.token(0),
        };
        cases.recording.call(draft::draft_rows("draft_rows".to_owned(), 4, step, from, args));
        let memory = cases.reference();
        let word = |at: u32| memory.u32(next, at);
        // Of each sequence: its slot, the position of its first row, and the row that is drafted from.
        let of = |index: u32| [word(4 + 4 * index), word(5 + 4 * index), word(LAYOUT.last(index))];
        let tokens = |count: u32| (0..count).map(|row| word(LAYOUT.token(row))).collect::<Vec<u32>>();
        assert_eq!(
            [of(1), of(3)].map(|of| of[..2].to_vec()),
            [[u32::MAX, 0], [u32::MAX, 0]],
            "no slot, and one that ended"
        );
        match (step, positions[0]) {
            (0, 17) => {
                assert_eq!([of(0), of(2)], [[3, 39, 1], [0, 16, 5]]);
                assert_eq!(tokens(8), [1000 + 3 * stride + 39, 103, 0, 0, 1016, 100, 0, 0]);
            }
            (0, _) => {
                assert_eq!([of(0), of(2)], [[3, 0, 1], [0, 0, 4]], "a first token has none before it");
                assert_eq!(tokens(8), [1000 + 3 * stride, 103, 0, 0, 100, 100, 0, 0]);
            }
            (step, position) => {
                assert_eq!([of(0), of(2)], [[3, positions[3] + step, 0], [0, position + step, 2]]);
                assert_eq!(tokens(4), [230 + step - 1, 0, 200 + step - 1, 0]);
            }
        }
    }
    check(&cases);
}

#[test]
fn tokens_of_prompts_shift_by_one() {
    let mut cases = Cases::new("shift");
    let lengths: [&[usize]; 3] = [&[1], &[5, 1, 70], &[64, 3]];
    for (index, lengths) in lengths.into_iter().enumerate() {
        cases.case(format!("{index}"));
        let rows: usize = lengths.iter().sum();
        let tokens: Vec<u32> = (0..rows as u32).map(|i| 1000 + i).collect();
        let mut first = 0;
        let prompts: Vec<PromptRows<'_>> = lengths
            .iter()
            .enumerate()
            .map(|(slot, length)| {
                let tokens = &tokens[first..first + length];
                first += length;
                let next = (slot != 1).then_some(7 + slot as u32);
                PromptRows { slot: slot as u32, start: 3, tokens, last: slot == 1, next, from: None, keeps: &[] }
            })
            .collect();
        let next = cases.output("next", LAYOUT.bytes(rows as u32 + 2) as usize / 4, Expect::Exact);
        let args = ShiftTokensArgs {
            chunk: cases.words("chunk", &descriptor(LAYOUT, &prompts)),
            next,
            cells_at: LAYOUT.cells(0),
            last_at: LAYOUT.last(0),
            tokens_at: LAYOUT.token(0),
            rows: rows as u32,
        };
        cases.recording.call(draft::shift_tokens("shift_tokens".to_owned(), args));
        let memory = cases.reference();
        assert_eq!(memory.u32(next, LAYOUT.token(lengths[0] as u32 - 1)), 7, "the token behind a chunk");
        if lengths[0] > 1 {
            assert_eq!(memory.u32(next, LAYOUT.token(0)), 1001);
        }
    }
    check(&cases);
}

#[test]
fn norms_are_joined_and_the_best_token_is_kept() {
    let mut cases = Cases::new("norms and drafts");
    let mut random = Random(5);
    for (rows, width) in [(1, 8), (3, 100), (4, 256)] {
        cases.case(format!("{rows}.{width}"));
        let (stride, y_stride) = (width + 4, 2 * width + 8);
        let mut values = |name: &str, count: u32| cases.floats(name, &random.floats(count as usize));
        let args = JoinNormsArgs {
            e: values("e", rows * stride),
            h: values("h", rows * stride),
            e_norm: values("e_norm", width),
            final_norm: values("final_norm", width),
            h_norm: values("h_norm", width),
            y: cases.output("y", (rows * y_stride) as usize, Expect::Floats(SUMS)),
            width,
            stride,
            y_stride,
            epsilon: EPSILON,
        };
        cases.recording.call(draft::join_norms("norms".to_owned(), rows, args));
    }
    for (rows, width, first, normed) in [(1, 8, 0, true), (3, 100, 12, true), (4, 256, 256, false), (2, 40, 80, false)]
    {
        cases.case(format!("rows.{rows}.{width}"));
        let (x_stride, y_stride) = (width + 4, first + width + 8);
        let x = cases.floats("x", &random.floats((rows * x_stride) as usize));
        let norm = cases.floats("norm", &random.floats(width as usize));
        let y = cases.output("y", (rows * y_stride) as usize, Expect::Floats(SUMS));
        let [x, y] = [(x, x_stride), (y, y_stride)].map(|(range, stride)| Activations { range, stride });
        let norm = normed.then_some((norm, EPSILON));
        cases.recording.call(draft::join_rows("rows".to_owned(), (rows, width), x, norm, (y, first)));
        let memory = cases.reference();
        let at = |range, index: u32| memory.f32(range, index);
        assert!(normed || at(y.range, first + width - 1) == at(x.range, width - 1), "rows as they are");
        assert!(first == 0 || at(y.range, first - 1).is_nan(), "columns before the first are left");
    }
    for index in 0..MOST_DRAFTS {
        cases.case(format!("draft.{index}"));
        // The first row has a tie and a part without tokens; the second row has NaN logits.
        let partials = [
            [(1.0f32, 5), (3.0, 40), (3.0, 21), (f32::NEG_INFINITY, TOKEN_NONE)],
            [(f32::NAN, 3), (f32::NAN, 9), (f32::NEG_INFINITY, TOKEN_NONE), (f32::NAN, 30)],
            [(-2.0, 5), (-1.0, 11), (-8.0, 21), (-3.0, 33)],
        ];
        let words: Vec<u32> = partials.iter().flatten().flat_map(|(value, token)| [value.to_bits(), *token]).collect();
        let args = StoreDraftArgs {
            partials: cases.words("partials", &words),
            rows: cases.words("rows", &[1, 9, 3, 1, 1, 9, 0, 1, 1, 9, 1, 0]),
            slots: cases.words("slots", &slots([1, 2, 3, 4])),
            // The tokens of a vocabulary of its own, for one of the drafts.
            token_ids: {
                let token_ids = cases.words("token_ids", &(0..41).map(|token| 1000 + token).collect::<Vec<u32>>());
                if index == 1 { token_ids } else { token_ids.none() }
            },
            row_count: 3,
            parts: 4,
        };
        cases.recording.call(draft::store_draft("store".to_owned(), index, args));
        let memory = cases.reference();
        let lower = if index == 1 { 1021 } else { 21 };
        assert_eq!(memory.u32(args.slots, 3 * SLOT_WORDS + SLOT_DRAFTS + index), lower, "the lower of equals");
        assert_eq!(memory.u32(args.slots, SLOT_WORDS + SLOT_DRAFTS + index), 210 + index, "a row that is not valid");
    }
    check(&cases);
}

/// The operands of a layer, and the rows of its projection by position.
struct Layer {
    heads: DeltaHeads,
    stride: u32,
    vectors: [Range; 4],
    rows: Vec<Vec<f32>>,
}

/// The buffers of one cell.
struct Cell {
    state: Range,
    window: Range,
    pending: Range,
}

impl Layer {
    fn new(cases: &mut Cases, random: &mut Random, heads: DeltaHeads, tokens: u32) -> Layer {
        let stride = heads.projected().next_multiple_of(4);
        let mut values = |name: &str, count: u32| cases.floats(name, &random.floats(count as usize));
        let vectors = [
            values("conv", heads.channels() * 4),
            values("a_log", heads.value),
            values("dt_bias", heads.value),
            values("norm", heads.value_dim),
        ];
        let rows = (0..tokens).map(|_| random.floats(stride as usize)).collect();
        Layer { heads, stride, vectors, rows }
    }

    fn cell(&self, cases: &mut Cases, name: &str) -> Cell {
        let mut buffer =
            |part: &str, bytes: u64| cases.output(&format!("{name}.{part}"), bytes as usize / 4, Expect::Floats(SUMS));
        let state = buffer("state", self.heads.state_bytes(1));
        let window = buffer("window", self.heads.window_bytes(1));
        Cell { state, window, pending: buffer("pending", self.heads.pending_bytes(1, MOST_PENDING)) }
    }

    /// Adds a step that processes `rows` from `position` on: a plain step for one row, otherwise a verification step.
    /// `settled` is the number of tokens already in the state; those from there to `position` are pending.
    fn step(
        &self,
        cases: &mut Cases,
        name: &str,
        cell: &Cell,
        (position, settled): (u32, u32),
        rows: &[Vec<f32>],
    ) -> Range {
        let (width, each) = (self.heads.output(), rows.len() as u32);
        let mut words = vec![POISON; SLOT_WORDS as usize];
        words[SLOT_SETTLED as usize] = settled;
        let table: Vec<u32> = (0..each).flat_map(|t| [1, position + t, 0, 1]).collect();
        let [conv, a_log, dt_bias, norm] = self.vectors;
        let x = cases.floats(&format!("{name}.x"), &rows.concat());
        let args = DeltaStepArgs {
            x,
            rows: cases.words(&format!("{name}.rows"), &table),
            conv,
            a_log,
            dt_bias,
            norm,
            state: cell.state,
            window: cell.window,
            slots: cases.words(&format!("{name}.slots"), &words),
            pending: cell.pending,
            y: cases.output(&format!("{name}.y"), (each * width) as usize, Expect::Floats(SUMS)),
            fault: cases.words(&format!("{name}.fault"), &[0, 0]),
            chunk: x.none(),
            stride: self.stride,
            y_stride: width,
            epsilon: EPSILON,
            x_tag: 0,
            y_tag: 0,
        };
        let label = name.to_owned();
        let entries = MOST_PENDING;
        cases.recording.call(match each {
            1 => delta_step(label, self.heads, (1, entries), None, Flow::NONE, args),
            _ => delta_verify(label, self.heads, (1, each, entries), None, Flow::NONE, args),
        });
        args.y
    }
}

#[test]
fn rejected_tokens_leave_nothing_and_accepted_ones_what_steps_would() {
    let mut cases = Cases::new("delta_verify");
    let mut random = Random(23);
    let mut compared: Vec<(Range, Range, u32)> = Vec::new();
    let shapes = [(1, 1, 16, 32), (2, 4, 32, 16), (1, 3, 48, 48)];
    for (index, (key, value, key_dim, value_dim)) in shapes.into_iter().enumerate() {
        let heads = DeltaHeads { key, value, key_dim, value_dim, tiled: false, rule: DeltaRule::Delta };
        cases.case(format!("{heads:?}"));
        let layer = Layer::new(&mut cases, &mut random, heads, 24);
        let (plain, drafting) = (layer.cell(&mut cases, "plain"), layer.cell(&mut cases, "drafting"));
        // The turns are pairs of the rows in a verification step (one more than its drafts) and the rows that are
        // accepted.
        let [mut position, mut settled] = [0, 0];
        let mut outputs: Vec<(Range, u32)> = Vec::new();
        for p in 0..2 {
            let row = std::slice::from_ref(&layer.rows[p as usize]);
            outputs.push((layer.step(&mut cases, &format!("first.{p}"), &drafting, (p, settled), row), 0));
            [position, settled] = [p + 1, p];
        }
        let turns: [(u32, u32); 6] = [(2, 1), (4, 4), (3, 2), (1, 1), (4, 3), (2, 2)];
        for (turn, (each, accepted)) in turns.into_iter().enumerate() {
            // Rows after the accepted ones belong to draft tokens that were rejected.
            let rows: Vec<Vec<f32>> = (0..each)
                .map(|t| match t < accepted {
                    true => layer.rows[(position + t) as usize].clone(),
                    false => random.floats(layer.stride as usize),
                })
                .collect();
            let at = (position, settled);
            // Steps with a fault, which process arbitrary rows, run first. The correct step must give the same result
            // as if it had run alone.
            for again in 0..turn % 3 {
                let garbage: Vec<Vec<f32>> = (0..each).map(|_| random.floats(layer.stride as usize)).collect();
                layer.step(&mut cases, &format!("faulty.{turn}.{again}"), &drafting, at, &garbage);
            }
            let y = layer.step(&mut cases, &format!("verify.{turn}"), &drafting, at, &rows);
            outputs.extend((0..accepted).map(|t| (y, t)));
            settled = position;
            position += accepted;
        }
        assert!(position - settled <= MOST_PENDING && position + 1 < layer.rows.len() as u32);
        // A step without drafts adds the pending tokens to the state.
        let row = |p: u32| std::slice::from_ref(&layer.rows[p as usize]);
        outputs.push((layer.step(&mut cases, "last", &drafting, (position, settled), row(position)), 0));
        // The next step adds the last token to the state.
        layer.step(&mut cases, "behind", &drafting, (position + 1, position), row(position + 1));
        for p in 0..=position {
            let at = (p, p.saturating_sub(1));
            let y = layer.step(&mut cases, &format!("plain.{p}"), &plain, at, row(p));
            let (drafted, row) = outputs[p as usize];
            compared.push((drafted.part(u64::from(row * heads.output()) * 4, u64::from(heads.output()) * 4), y, p));
        }
        layer.step(&mut cases, "plain.behind", &plain, (position + 1, position), row(position + 1));
        compared.push((drafting.state, plain.state, index as u32));
    }
    let vulkan = Vulkan::new();
    let reference = cases.reference();
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        cases.check(&bench, &reference);
        let memory = bench.run(&cases.recording, &cases.before());
        for (drafted, plain, position) in &compared {
            for i in 0..(plain.bytes / 4) as u32 {
                let [found, wanted] = [drafted, plain].map(|range| memory.f32(*range, i));
                let near = (found - wanted).abs() <= 1e-4 * (1.0 + wanted.abs());
                assert!(near, "{driver:?}, position {position}, value {i}: {found} instead of {wanted}");
            }
        }
    }
}

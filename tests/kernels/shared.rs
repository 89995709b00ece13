//! Goal: devices that each have the logits of a part of the vocabulary draw the token that is drawn from all logits, or say
//! that they need them all. Method: rows of every kind of sampling, with ties, flat rows and rows without numbers, divided
//! among two and three devices; the results of the references are compared with the draw from whole rows, and both CPU
//! drivers with the references, word for word.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, POISON, Random};
use ostinato::kernels::exchange::{Columns, Rank};
use ostinato::kernels::recording::{Op, Range};
use ostinato::kernels::sampling::shared::{self, ListedRows};
use ostinato::kernels::sampling::{self, SlotTables};
use ostinato::kernels::shaders::{ArgmaxArgs, DrawShortlistedArgs, SharedRowsArgs, ShortlistArgs};
use ostinato::kernels::state::*;

/// The logits of a row, by the kind of row.
fn logits(kind: u32, vocabulary: u32, random: &mut Random) -> Vec<f32> {
    let of = |token: u32| match kind % 6 {
        // Most of the mass is on some tokens.
        0 | 1 => {
            let sum: f32 = (0..4).map(|_| random.float()).sum();
            if random.float() > 0.98 { 12.0 + sum } else { 3.0 * sum }
        }
        // Any token may be drawn.
        2 => 0.1 * random.float(),
        // Ties, more than a shortlist holds.
        3 => {
            if token.is_multiple_of(3) {
                5.0
            } else {
                random.float()
            }
        }
        // Few tokens that are possible.
        4 => {
            if token % 97 == 5 {
                4.0 * random.float()
            } else {
                f32::NEG_INFINITY
            }
        }
        _ => {
            if token.is_multiple_of(2) {
                f32::NAN
            } else {
                f32::NEG_INFINITY
            }
        }
    };
    (0..vocabulary).map(of).collect()
}

/// The slots of the rows.
fn slots() -> Vec<SlotInit> {
    let hot = SlotInit { temperature: 0.8, seed: 5, generated: 7, ..SlotInit::default() };
    vec![
        SlotInit::default(),
        hot.clone(),
        SlotInit { top_k: 20, top_p: 0.8, ..hot.clone() },
        SlotInit { top_p: 0.95, seed: 6, ..hot.clone() },
        SlotInit { top_k: 1, ..hot.clone() },
        SlotInit { top_k: 300, ..hot.clone() },
        SlotInit { min_p: 0.05, temperature: 1.5, ..hot.clone() },
        SlotInit { min_p: 0.1, top_k: 40, top_p: 0.5, ..hot.clone() },
        SlotInit { top_p: 0.999, temperature: 2.0, ..hot.clone() },
        SlotInit { presence: 0.5, ..hot.clone() },
        SlotInit { logprobs: Some(2), ..SlotInit::default() },
        SlotInit { min_left: 3, stop_ids: vec![4], ..SlotInit::default() },
        SlotInit { min_left: 3, top_k: 7, ..hot },
    ]
}

struct Made {
    vocabulary: u32,
    /// The logits and the slot of each row.
    rows: Vec<(Vec<f32>, Vec<u32>)>,
    best: Range,
    best_count: u32,
    whole: Range,
}

fn record(cases: &mut Cases, random: &mut Random, vocabulary: u32, devices: u32) -> Made {
    let slots = slots();
    // The last row has no sequence.
    let count = 6 * slots.len() as u32 + 1;
    let (mut rows, mut table, mut state) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..count {
        let slot = slots[row as usize % slots.len()].words().to_vec();
        // Slots are in the reverse order of the rows.
        table.extend([row, 9, count - 1 - row, u32::from(row + 1 < count)]);
        rows.push((logits(row / slots_len(&slots), vocabulary, random), slot));
    }
    rows.iter().rev().for_each(|(_, slot)| state.extend(slot));
    let (table, state) = (cases.words("rows", &table), cases.words("state", &state));
    let columns = Columns { count: vocabulary, unit: 16 };
    let rank_of = |index: u32| Rank { index, of: devices };
    let (of_best, of_lists) = (shared::best_columns(rank_of(0)), shared::shortlist_columns(rank_of(0)));
    let (best_count, best_stride) = (of_best.count / 2, of_best.count / 2 + 1);
    let best = cases.words("best", &vec![POISON; (count * best_stride * 2) as usize]);
    let lists = ["short", "whole"].map(|name| cases.words(name, &vec![0; count as usize + 2]));
    let listed =
        |list: Range| SharedRowsArgs { rows: table, state, best, list, row_count: count, best_count, best_stride };
    cases.recording.call(shared::shared_rows("short".to_owned(), ListedRows::Short, listed(lists[0])));
    let mut parts = Vec::new();
    for index in 0..devices {
        let own = columns.part(rank_of(index));
        let stride = own.len().next_multiple_of(4);
        let of_row = |(logits, _): &(Vec<f32>, Vec<u32>)| {
            let mut part = logits[own.start as usize..own.end as usize].to_vec();
            part.resize(stride, f32::MAX);
            part
        };
        let values: Vec<f32> = rows.iter().flat_map(of_row).collect();
        let part = cases.floats(&format!("logits.{index}"), &values);
        let partials = cases.words(&format!("partials.{index}"), &vec![0; (count * of_best.unit) as usize]);
        let args = ArgmaxArgs {
            logits: part,
            partials,
            vocabulary: own.len() as u32,
            row_stride: stride as u32,
            parts: shared::parts_each(devices),
            first: own.start,
        };
        cases.recording.call(sampling::argmax(format!("argmax.{index}"), count, 128, args));
        for row in 0..count {
            let unit = u64::from(of_best.unit) * 4;
            let from = partials.part(u64::from(row) * unit, unit);
            let to = best.part(u64::from(row * best_stride) * 8 + u64::from(index) * unit, unit);
            cases.recording.ops.push(Op::Copy { from, to });
        }
        parts.push((own, part, stride as u32));
    }
    let shortlists = cases.words("shortlists", &vec![0; (count * of_lists.count) as usize]);
    for (index, (own, part, row_stride)) in (0..).zip(parts) {
        let own_list = cases.words(&format!("shortlist.{index}"), &vec![0; (count * of_lists.unit) as usize]);
        let args = ShortlistArgs {
            logits: part,
            best,
            list: lists[0],
            rows: table,
            state,
            shortlists: own_list,
            vocabulary: own.len() as u32,
            row_stride,
            first: own.start,
            whole_vocabulary: vocabulary,
            best_count,
            best_stride,
            every: 1,
        };
        cases.recording.call(shared::shortlist(format!("shortlist.{index}"), count, 128, rank_of(index), args));
        for row in 0..count {
            let unit = u64::from(of_lists.unit) * 4;
            let from = own_list.part(u64::from(row) * unit, unit);
            let to = shortlists.part(u64::from(row * devices + index) * unit, unit);
            cases.recording.ops.push(Op::Copy { from, to });
        }
    }
    let args = DrawShortlistedArgs {
        shortlists,
        best,
        list: lists[0],
        rows: table,
        state,
        whole_vocabulary: vocabulary,
        best_count,
        best_stride,
        every: 1,
    };
    cases.recording.call(shared::draw_shortlisted("draw".to_owned(), count, rank_of(0), args));
    cases.recording.call(shared::shared_rows("whole".to_owned(), ListedRows::Whole, listed(lists[1])));
    Made { vocabulary, rows, best, best_count, whole: lists[1] }
}

fn slots_len(slots: &[SlotInit]) -> u32 {
    slots.len() as u32
}

#[test]
fn devices_draw_together_what_is_drawn_from_all_logits() {
    let (mut cases, mut random, mut made) = (Cases::new("shared"), Random(77), Vec::new());
    for (vocabulary, devices) in [(509, 2), (61, 3), (5000, 2), (3001, 3)] {
        cases.case(format!("{vocabulary} on {devices}"));
        made.push(record(&mut cases, &mut random, vocabulary, devices));
    }
    let reference = cases.reference();
    let (mut short, mut tried) = (0, 0);
    for Made { vocabulary, rows, best, best_count, whole } in made {
        let listed: Vec<u32> = (0..reference.u32(whole, 1)).map(|at| reference.u32(whole, 2 + at)).collect();
        assert_eq!(reference.u32(whole, 0), 1);
        for (row, (logits, slot)) in (0..).zip(&rows) {
            let tables = SlotTables { counts: &vec![0; logits.len()], bias: &[], mask: &[] };
            let wanted = sampling::draw(logits, slot, tables);
            let pair = |i: u32| [0, 1].map(|at| reference.u32(best, 2 * (row * (best_count + 1) + i) + at));
            let what = format!("row {row} of a vocabulary of {vocabulary}");
            let conditions = slot[SLOT_FLAGS as usize] != 0
                || slot[SLOT_MIN_LEFT as usize] > 0 && slot[SLOT_STOP_COUNT as usize] > 0;
            let greedy = f32::from_bits(slot[SLOT_TEMPERATURE as usize]) <= 0.0;
            let [token, drawn] = pair(best_count);
            if row as usize + 1 == rows.len() {
                assert!(!listed.contains(&row) && drawn == 0, "{what}");
                continue;
            }
            assert_eq!(listed.contains(&row), (conditions || !greedy) && drawn == 0, "{what}");
            if conditions || greedy {
                assert_eq!(drawn, 0, "{what}");
                continue;
            }
            tried += 1;
            short += drawn;
            assert!(drawn == 0 || token == wanted.token, "{what}: {token} in place of {}", wanted.token);
        }
    }
    // The others: flat rows, ties and rows without numbers.
    assert!(short * 3 > tried * 2 && short < tried, "{short} of {tried} rows drawn from shortlists");
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

//! Draws of tokens by several devices, each of which has the logits of a part of the vocabulary: `shared_rows`, `shortlist` and
//! `draw_shortlisted`. Not here: the exchange of words between the devices (`kernels::exchange`).

use super::{ARGMAX_PARTS, TOKEN_NONE, distance, float, masks_stops, words};
use crate::kernels::deterministic::{KEY_MINUS_INFINITY, gumbel, key_of, mass_of, philox, token_bits, value_of};
use crate::kernels::exchange::{Columns, Rank};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{
    DrawShortlistedArgs, DrawShortlistedConstants, SharedRowsArgs, SharedRowsConstants, ShortlistArgs,
    ShortlistConstants,
};
use crate::kernels::state::*;
use std::cmp::Reverse;

/// The maximum number of rows of `shared_rows`.
pub const MOST_ROWS: u32 = 1024;

/// The capacity of the list from which a token is drawn: `LIST` of the shader.
const LIST: u32 = 1024;
/// The maximum number of tokens of a device's shortlist: more than most filters keep.
const MOST_ENTRIES: u32 = 128;
/// The number of words of a shortlist before its tokens.
const HEADER: u32 = 8;

/// Returns the number of parts into which `argmax` divides the part of a row of each of `devices` devices.
pub fn parts_each(devices: u32) -> u32 {
    (ARGMAX_PARTS / devices).max(1)
}

/// Returns the words of each device about the greatest logits of a row: pairs of a logit and its token.
pub fn best_columns(rank: Rank) -> Columns {
    let unit = 2 * parts_each(rank.of);
    Columns { count: rank.of * unit, unit }
}

/// Returns the maximum number of tokens of the shortlist of each of `devices` devices.
fn entries(devices: u32) -> u32 {
    MOST_ENTRIES.min(LIST / devices)
}

/// Returns the words of each device's shortlist of a row.
pub fn shortlist_columns(rank: Rank) -> Columns {
    let unit = HEADER + 2 * entries(rank.of);
    Columns { count: rank.of * unit, unit }
}

/// Returns the size in bytes of a list of at most `rows` rows.
pub fn list_bytes(rows: u32) -> u64 {
    4 * (2 + u64::from(rows))
}

/// Which rows `shared_rows` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListedRows {
    /// Those that are drawn from shortlists.
    Short,
    /// Those that are drawn from all logits, after shortlists were tried.
    Whole,
}

/// Returns the call that lists rows of a step.
pub fn shared_rows(label: String, listed: ListedRows, args: SharedRowsArgs) -> Call {
    assert!(args.row_count <= MOST_ROWS, "\"{label}\": {} rows, at most {MOST_ROWS} can be listed", args.row_count);
    let constants = SharedRowsConstants { threads: 128, short: (listed == ListedRows::Short).into() };
    Call { kernel: "shared_rows", label, constants: constants.into_values(), args: args.into_args(), groups: [1, 1, 1] }
}

/// Returns the call that makes the shortlists of a device of `rank`, of up to `rows` listed rows.
pub fn shortlist(label: String, rows: u32, threads: u32, rank: Rank, args: ShortlistArgs) -> Call {
    debug_assert!(args.row_stride.is_multiple_of(4), "rows are read 16 bytes at a time");
    let constants = ShortlistConstants { threads, entries: entries(rank.of) };
    Call {
        kernel: "shortlist",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [rows, 1, 1],
    }
}

/// Returns the call that draws tokens from the shortlists of all devices, of up to `rows` listed rows.
pub fn draw_shortlisted(label: String, rows: u32, rank: Rank, args: DrawShortlistedArgs) -> Call {
    let constants = DrawShortlistedConstants { threads: 128, entries: entries(rank.of), ranks: rank.of };
    let constants = constants.into_values();
    Call { kernel: "draw_shortlisted", label, constants, args: args.into_args(), groups: [rows, 1, 1] }
}

/// Returns the key and the token of the best of pairs of a logit's bits and a token.
pub(super) fn best_of(pairs: impl Iterator<Item = [u32; 2]>) -> (u32, u32) {
    pairs.fold((0, TOKEN_NONE), |best, [bits, token]| {
        let key = key_of(f32::from_bits(bits));
        if key > best.0 || key == best.0 && token < best.1 { (key, token) } else { best }
    })
}

fn has_conditions(slot: &[u32]) -> bool {
    slot[SLOT_FLAGS as usize] != 0 || masks_stops(slot)
}

pub(crate) fn reference_shared_rows(call: &Call, memory: &mut HostMemory) {
    let args = SharedRowsArgs::from_args(&call.args);
    let short = SharedRowsConstants::from_values(&call.constants).short == 1;
    let (mut listed, mut others) = (Vec::new(), 0);
    for row in 0..args.row_count {
        let pair = 2 * (row * args.best_stride + args.best_count);
        let drawn = !short && memory.u32(args.best, pair + 1) != 0;
        if short {
            memory.set_u32(args.best, pair, TOKEN_NONE);
            memory.set_u32(args.best, pair + 1, 0);
        }
        let [slot, valid] = [2, 3].map(|i| memory.u32(args.rows, row * 4 + i));
        if valid == 0 {
            continue;
        }
        let slot = words(memory, args.state, slot * SLOT_WORDS, SLOT_WORDS);
        let conditions = has_conditions(&slot);
        if float(&slot, SLOT_TEMPERATURE) > 0.0 || conditions {
            others = 1;
            if if short { !conditions } else { !drawn } {
                listed.push(row);
            }
        }
    }
    for (at, word) in (0..).zip([others, listed.len() as u32].into_iter().chain(listed)) {
        memory.set_u32(args.list, at, word);
    }
}

fn listed_rows(list: Range, memory: &HostMemory, most: u32) -> Vec<u32> {
    words(memory, list, 2, memory.u32(list, 1).min(most))
}

/// The draw of a row, as `draw.glsl` reads it from a slot.
struct Draw {
    least: u32,
    most: f32,
    top_k: Option<u32>,
    /// top_p in units of 2^-32.
    fraction: Option<u32>,
    inverse: f32,
    key: [u32; 2],
}

impl Draw {
    fn of(slot: &[u32], best: u32, ahead: u32, vocabulary: u32) -> Draw {
        let (inverse, most) = (float(slot, SLOT_TEMPERATURE_INVERSE), value_of(best));
        let mut least = KEY_MINUS_INFINITY + 1;
        if float(slot, SLOT_MIN_P) > 0.0 {
            let bound = float(slot, SLOT_MIN_P_LOG);
            let mut high = best;
            while least < high {
                let middle = least + (high - least) / 2;
                if distance(middle, most, inverse) >= bound { high = middle } else { least = middle + 1 }
            }
        }
        let (top_k, top_p) = (slot[SLOT_TOP_K as usize], float(slot, SLOT_TOP_P));
        let generated = slot[SLOT_GENERATED as usize].wrapping_add(ahead);
        Draw {
            least,
            most,
            top_k: Some(top_k).filter(|top_k| *top_k > 0 && *top_k < vocabulary),
            fraction: (top_p < 1.0).then(|| (top_p.clamp(0.0, 0.999_999_94) * 4_294_967_296.0) as u32),
            inverse,
            key: philox(generated, [slot[SLOT_SEED_LOW as usize], slot[SLOT_SEED_HIGH as usize]]),
        }
    }

    fn mass(&self, key: u32) -> u64 {
        mass_of(distance(key, self.most, self.inverse)).into()
    }

    /// Returns the key of a token's score.
    fn score(&self, (key, token): (u32, u32)) -> u32 {
        key_of(distance(key, self.most, self.inverse) + gumbel(token_bits(token, self.key)))
    }

    /// Returns the token with the best score, and that as a key.
    fn best(&self, tokens: impl Iterator<Item = (u32, u32)>) -> (u32, u32) {
        let scores = tokens.map(|token| (self.score(token), token.1));
        better(scores).unwrap_or((KEY_MINUS_INFINITY, TOKEN_NONE))
    }
}

/// Returns the greatest key with its token, the lowest of equal ones.
fn better(scores: impl Iterator<Item = (u32, u32)>) -> Option<(u32, u32)> {
    scores.reduce(|a, b| if b.0 > a.0 || b.0 == a.0 && b.1 < a.1 { b } else { a })
}

/// Returns the part of `total` that top_p keeps at least.
fn share(total: u64, fraction: u32) -> u64 {
    ((u128::from(total) * u128::from(fraction)).div_ceil(1 << 32) as u64).max(1)
}

/// Returns the draw of a row; `None` if no logit of it is a number.
fn draw_of(
    memory: &HostMemory,
    (row, every): (u32, u32),
    (best, best_stride, best_count): (Range, u32, u32),
    (rows, state): (Range, Range),
    vocabulary: u32,
) -> Option<Draw> {
    let pair = |i: u32| [0, 1].map(|at| memory.u32(best, 2 * (row * best_stride + i) + at));
    let (best, _) = best_of((0..best_count).map(pair));
    let slot = words(memory, state, memory.u32(rows, row * 4 + 2) * SLOT_WORDS, SLOT_WORDS);
    (best > KEY_MINUS_INFINITY).then(|| Draw::of(&slot, best, row % every, vocabulary))
}

pub(crate) fn reference_shortlist(call: &Call, memory: &mut HostMemory) {
    let a = ShortlistArgs::from_args(&call.args);
    let entries = ShortlistConstants::from_values(&call.constants).entries;
    let each = HEADER + 2 * entries;
    for row in listed_rows(a.list, memory, call.groups[0]) {
        let best = (a.best, a.best_stride, a.best_count);
        let mut list = vec![0; each as usize];
        if let Some(draw) = draw_of(memory, (row, a.every), best, (a.rows, a.state), a.whole_vocabulary) {
            let key = |token: u32| key_of(memory.f32(a.logits, row * a.row_stride + token));
            let tokens = (0..a.vocabulary).map(|token| (key(token), a.first + token));
            let mut tokens: Vec<(u32, u32)> = tokens.filter(|(key, _)| *key >= draw.least).collect();
            if draw.top_k.is_some() || draw.fraction.is_some() {
                if draw.fraction.is_some() {
                    let mass: u64 = tokens.iter().map(|(key, _)| draw.mass(*key)).sum();
                    (list[2], list[3]) = (mass as u32, (mass >> 32) as u32);
                }
                tokens.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
                tokens.truncate(entries as usize);
                list[0] = tokens.len() as u32;
                let pairs = list[HEADER as usize..].chunks_exact_mut(2).zip(&tokens);
                pairs.for_each(|(pair, (key, token))| pair.copy_from_slice(&[*key, *token]));
            } else {
                (list[4], list[5]) = draw.best(tokens.into_iter());
            }
        }
        (0..).zip(list).for_each(|(i, word)| memory.set_u32(a.shortlists, row * each + i, word));
    }
}

pub(crate) fn reference_draw_shortlisted(call: &Call, memory: &mut HostMemory) {
    let a = DrawShortlistedArgs::from_args(&call.args);
    let c = DrawShortlistedConstants::from_values(&call.constants);
    let each = HEADER + 2 * c.entries;
    for row in listed_rows(a.list, memory, call.groups[0]) {
        let best = (a.best, a.best_stride, a.best_count);
        let Some(draw) = draw_of(memory, (row, a.every), best, (a.rows, a.state), a.whole_vocabulary) else { continue };
        let lists = (0..c.ranks).map(|rank| words(memory, a.shortlists, (row * c.ranks + rank) * each, each));
        let lists: Vec<Vec<u32>> = lists.collect();
        if let Some(token) = draw_from(&draw, &lists, c.entries) {
            let pair = 2 * (row * a.best_stride + a.best_count);
            memory.set_u32(a.best, pair, token);
            memory.set_u32(a.best, pair + 1, 1);
        }
    }
}

/// Returns the token that is drawn from the shortlists of all devices; `None` if they do not suffice.
fn draw_from(draw: &Draw, lists: &[Vec<u32>], entries: u32) -> Option<u32> {
    if draw.top_k.is_none() && draw.fraction.is_none() {
        let winner = better(lists.iter().map(|list| (list[4], list[5])));
        return winner.map(|(_, token)| token).filter(|token| *token != TOKEN_NONE);
    }
    let tokens_of = |list: &Vec<u32>| -> Vec<(u32, u32)> {
        let pairs = list[HEADER as usize..].chunks_exact(2).take(list[0] as usize);
        pairs.map(|pair| (pair[0], pair[1])).collect()
    };
    let full = lists.iter().filter(|list| list[0] == entries);
    let bound = full.filter_map(|list| Some(tokens_of(list).last()?.0 + 1)).fold(draw.least, u32::max);
    let mut tokens: Vec<(u32, u32)> = lists.iter().flat_map(tokens_of).filter(|(key, _)| *key >= bound).collect();
    let complete = bound == draw.least;
    tokens.sort_by_key(|(key, _)| Reverse(*key));
    if let Some(top_k) = draw.top_k {
        if !complete && tokens.len() < top_k as usize {
            return None;
        }
        if let Some((last, _)) = tokens.get(top_k as usize - 1).copied() {
            tokens.retain(|(key, _)| *key >= last);
        }
    }
    if let Some(fraction) = draw.fraction {
        let listed: u64 = tokens.iter().map(|(key, _)| draw.mass(*key)).sum();
        let all = || lists.iter().map(|list| u64::from(list[2]) | u64::from(list[3]) << 32).sum();
        let wanted = share(if complete || draw.top_k.is_some() { listed } else { all() }, fraction);
        if listed < wanted {
            return None;
        }
        let above =
            |key: u32| tokens.iter().filter(|(other, _)| *other > key).map(|(other, _)| draw.mass(*other)).sum::<u64>();
        let kept: Vec<(u32, u32)> = tokens.iter().copied().filter(|(key, _)| above(*key) < wanted).collect();
        tokens = kept;
    }
    Some(draw.best(tokens.into_iter()).1)
}

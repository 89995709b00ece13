//! `take_rows` and `score`: the logprobs of a prompt's tokens, each given the tokens before it; and `score_part` and
//! `join_scores` in place of `score` where devices each have the logits of a part of the vocabulary. Not here: the LM head
//! between them (`gemm`, `tiled`), and which prompts are scored.

use crate::kernels::deterministic::{KEY_MINUS_INFINITY, exp_negative, key_of, value_of};
use crate::kernels::exchange::{Columns, Rank};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{
    JoinScoresArgs, JoinScoresConstants, ScoreArgs, ScoreConstants, ScorePartArgs, ScorePartConstants, TakeRowsArgs,
    TakeRowsConstants,
};
use crate::kernels::state::*;

/// Returns the size of `scores` for chunks of at most `chunk_rows` rows, in bytes. It holds two chunks, so that one can
/// be read while the next is computed.
pub fn scores_bytes(chunk_rows: u32) -> u64 {
    2 * u64::from(chunk_rows) * u64::from(SCORE_WORDS) * 4
}

/// Returns the call that copies the next `rows` rows of a chunk to the LM head's input.
pub fn take_rows(label: String, rows: u32, args: TakeRowsArgs) -> Call {
    let threads = 64;
    Call {
        kernel: "take_rows",
        label,
        constants: TakeRowsConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [args.x_stride.div_ceil(threads), rows, 1],
    }
}

/// Returns the call that scores the tokens that follow those rows. The caller must increment SCORE_TURN after it.
pub fn score(label: String, rows: u32, threads: u32, args: ScoreArgs) -> Call {
    debug_assert!(
        args.row_stride.is_multiple_of(4) && args.row_stride >= args.vocabulary,
        "rows are read 16 bytes at a time"
    );
    Call {
        kernel: "score",
        label,
        constants: ScoreConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [rows, 1, 1],
    }
}

/// Returns the words of each device about the score of a row.
pub fn part_columns(rank: Rank) -> Columns {
    Columns { count: rank.of * SCORE_WORDS, unit: SCORE_WORDS }
}

/// Returns the call that makes a device's part of the scores of the tokens that follow those rows.
pub fn score_part(label: String, rows: u32, threads: u32, args: ScorePartArgs) -> Call {
    debug_assert!(
        args.row_stride.is_multiple_of(4) && args.row_stride >= args.vocabulary,
        "rows are read 16 bytes at a time"
    );
    let constants = ScorePartConstants { threads }.into_values();
    Call { kernel: "score_part", label, constants, args: args.into_args(), groups: [rows, 1, 1] }
}

/// Returns the call that joins the parts of `devices` devices. The caller must increment SCORE_TURN after it.
pub fn join_scores(label: String, rows: u32, devices: u32, args: JoinScoresArgs) -> Call {
    let constants = JoinScoresConstants { threads: 32, ranks: devices }.into_values();
    Call { kernel: "join_scores", label, constants, args: args.into_args(), groups: [rows, 1, 1] }
}

/// The logprob of a token, and the most probable alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The token.
    pub token: u32,
    /// The token's log probability (natural logarithm).
    pub logprob: f32,
    /// The most probable tokens with their log probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

impl Score {
    /// Decodes an entry of `SCORE_WORDS` words.
    pub fn read(words: &[u32]) -> Score {
        let count = words[SCORE_TOP_COUNT as usize].min(TOP_ENTRIES) as usize;
        let pairs = words[SCORE_TOP as usize..].chunks_exact(2).take(count);
        Score {
            token: words[SCORE_TOKEN as usize],
            logprob: f32::from_bits(words[SCORE_LOGPROB as usize]),
            top: pairs.map(|pair| (pair[0], f32::from_bits(pair[1]))).collect(),
        }
    }
}

/// Computes a token's score from the logits of the row before it; defines what `score` computes.
pub fn score_of(logits: &[f32], token: u32, top_n: u32) -> Score {
    let keys = logits.iter().map(|l| key_of(*l)).zip(0..);
    let mut order: Vec<(u32, u32)> = keys.filter(|(key, _)| *key > KEY_MINUS_INFINITY).collect();
    order.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    let Some(&(best, _)) = order.first() else {
        return Score { token, logprob: f32::NEG_INFINITY, top: Vec::new() };
    };
    let most = value_of(best);
    let sum: f64 = order.iter().map(|(key, _)| f64::from(exp_negative(value_of(*key) - most))).sum();
    let of = |key: u32| (f64::from(value_of(key)) - f64::from(most) - sum.ln()) as f32;
    let top = order.iter().take(top_n.min(TOP_ENTRIES) as usize).map(|&(key, token)| (token, of(key))).collect();
    Score { token, logprob: of(key_of(logits[token as usize])), top }
}

pub(crate) fn reference_take_rows(call: &Call, memory: &mut HostMemory) {
    let a = TakeRowsArgs::from_args(&call.args);
    let heads = call.groups[1];
    for head in 0..heads {
        let row = memory.u32(a.score, SCORE_TURN) * heads + head;
        let inside = row < memory.u32(a.chunk, 2);
        for i in 0..a.x_stride {
            let value = if inside { memory.u32(a.x, row * a.x_stride + i) } else { 0 };
            memory.set_u32(a.head_x, head * a.x_stride + i, value);
        }
    }
}

/// Returns the workgroups of `heads` that score a row, each with the row of the step and the token that follows it. The ranges
/// are the parameters of the scoring, the step's descriptor and its rows.
fn scored_rows(memory: &HostMemory, [score, chunk, rows]: [Range; 3], heads: u32) -> Vec<(u32, u32, u32)> {
    let (first, count) = (memory.u32(score, SCORE_TURN) * heads, memory.u32(chunk, 2));
    let next = |row| if row + 1 < count { memory.u32(rows, (row + 1) * 4) } else { memory.u32(score, SCORE_NEXT) };
    let all = (0..heads).map(|head| (head, first + head)).filter(|(_, row)| *row < count);
    all.map(|(head, row)| (head, row, next(row))).collect()
}

/// Writes a score at a word of a range, as [`Score::read`] reads it.
fn store_score(memory: &mut HostMemory, (to, word): (Range, u32), score: &Score) {
    memory.set_u32(to, word + SCORE_TOKEN, score.token);
    memory.set_f32(to, word + SCORE_LOGPROB, score.logprob);
    memory.set_u32(to, word + SCORE_TOP_COUNT, score.top.len() as u32);
    for (i, (token, logprob)) in (0..).zip(&score.top) {
        memory.set_u32(to, word + SCORE_TOP + 2 * i, *token);
        memory.set_f32(to, word + SCORE_TOP + 2 * i + 1, *logprob);
    }
}

pub(crate) fn reference_score(call: &Call, memory: &mut HostMemory) {
    let a = ScoreArgs::from_args(&call.args);
    let state = |memory: &HostMemory, word: u32| memory.u32(a.score, word);
    for (head, row, token) in scored_rows(memory, [a.score, a.chunk, a.rows], call.groups[0]) {
        if token >= a.vocabulary {
            continue;
        }
        let logits: Vec<f32> = (0..a.vocabulary).map(|i| memory.f32(a.logits, head * a.row_stride + i)).collect();
        let score = score_of(&logits, token, state(memory, SCORE_TOP_N));
        let entry = (state(memory, SCORE_FIRST) + row) * SCORE_WORDS;
        store_score(memory, (a.scores, entry), &score);
    }
}

pub(crate) fn reference_score_part(call: &Call, memory: &mut HostMemory) {
    let a = ScorePartArgs::from_args(&call.args);
    let state = |memory: &HostMemory, word: u32| memory.u32(a.score, word);
    for (head, _, token) in scored_rows(memory, [a.score, a.chunk, a.rows], call.groups[0]) {
        let key = |id: u32| key_of(memory.f32(a.logits, head * a.row_stride + id));
        let mut tokens: Vec<(u32, u32)> = (0..a.vocabulary).map(|id| (key(id), a.first + id)).collect();
        let target = tokens.iter().find(|(_, id)| *id == token).map_or(KEY_MINUS_INFINITY, |(key, _)| *key);
        tokens.retain(|(key, _)| *key > KEY_MINUS_INFINITY);
        tokens.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        let log_sum = tokens.first().map_or(f32::NEG_INFINITY, |(best, _)| {
            let most = value_of(*best);
            let sum: f64 = tokens.iter().map(|(key, _)| f64::from(exp_negative(value_of(*key) - most))).sum();
            (f64::from(most) + sum.ln()) as f32
        });
        tokens.truncate(state(memory, SCORE_TOP_N).min(TOP_ENTRIES) as usize);
        let entry = head * SCORE_WORDS;
        let top = tokens.into_iter().map(|(key, id)| (id, value_of(key))).collect();
        store_score(memory, (a.parts, entry), &Score { token, logprob: value_of(target), top });
        memory.set_f32(a.parts, entry + SCORE_LOG_SUM, log_sum);
    }
}

pub(crate) fn reference_join_scores(call: &Call, memory: &mut HostMemory) {
    let a = JoinScoresArgs::from_args(&call.args);
    let ranks = JoinScoresConstants::from_values(&call.constants).ranks;
    let state = |memory: &HostMemory, word: u32| memory.u32(a.score, word);
    for (head, row, token) in scored_rows(memory, [a.score, a.chunk, a.rows], call.groups[0]) {
        if token >= a.vocabulary {
            continue;
        }
        let parts: Vec<u32> = (0..ranks).map(|rank| (head * ranks + rank) * SCORE_WORDS).collect();
        let floats = |word: u32| -> Vec<f32> { parts.iter().map(|part| memory.f32(a.parts, part + word)).collect() };
        let greatest = |of: &[f32]| of.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sums = floats(SCORE_LOG_SUM);
        let most = greatest(&sums);
        let sum: f64 = sums.iter().map(|sum| f64::from(sum - most).exp()).sum();
        let of = |logit: f32| match most == f32::NEG_INFINITY {
            true => f32::NEG_INFINITY,
            false => (f64::from(logit) - f64::from(most) - sum.ln()) as f32,
        };
        let logprob = of(greatest(&floats(SCORE_LOGPROB)));
        let mut top = Vec::new();
        for part in &parts {
            let pairs = (0..memory.u32(a.parts, part + SCORE_TOP_COUNT)).map(|i| part + SCORE_TOP + 2 * i);
            top.extend(pairs.map(|at| (memory.f32(a.parts, at + 1), memory.u32(a.parts, at))));
        }
        top.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        top.truncate(state(memory, SCORE_TOP_N).min(TOP_ENTRIES) as usize);
        let entry = (state(memory, SCORE_FIRST) + row) * SCORE_WORDS;
        let top = top.into_iter().map(|(logit, id)| (id, of(logit))).collect();
        store_score(memory, (a.scores, entry), &Score { token, logprob, top });
    }
}

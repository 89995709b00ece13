//! How fast a device has been lately: what a decode step took by its rows, and a prompt token by the size of its chunk.
//! Deliberately absent: clocks; who measures tells.

use crate::kernels::state;
use std::time::Duration;

/// Drafts of a sequence are told apart up to so many.
const MOST_DRAFTS: usize = state::MOST_DRAFTS as usize;

/// Chunks are told apart by powers of two up to `2^(SIZES - 1)` tokens.
const SIZES: usize = 20;

/// A new reading counts for this share of the mean.
const SHARE: f64 = 0.25;

/// A prompt's chunk is taken to last as long as a decode step and this many of its tokens as one more, where none
/// as small was measured yet.
const TOKENS_PER_STEP: f64 = 64.0;

/// Where none of its size was measured, but a smaller one, a chunk is taken to last longer by this power of how much
/// larger it is: large chunks' tokens are cheaper, and it is tried only if it is taken for short enough.
const GROWTH: f64 = 0.75;

/// What steps took lately.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    step: Option<Duration>,
    /// Of decode steps, by the size of their batch.
    batch: [Option<Duration>; SIZES],
    /// Of steps that verify drafts, by the size of their batch and the drafts of a sequence.
    verify: [[Option<Duration>; MOST_DRAFTS]; SIZES],
    /// Seconds a token, by size.
    token: [Option<f64>; SIZES],
}

fn size(tokens: u32) -> usize {
    (tokens.max(1).next_power_of_two().trailing_zeros() as usize).min(SIZES - 1)
}

impl Pace {
    /// With a decode step's time known.
    #[cfg(test)]
    pub fn of_step(step: Duration) -> Pace {
        Pace { step: Some(step), ..Pace::default() }
    }

    /// A decode step of `rows` rows took so long.
    pub fn note_step(&mut self, rows: u32, time: Duration) {
        self.step = Some(time);
        self.batch[size(rows)] = Some(time);
    }

    /// A step that verified `drafts` tokens of each of `sequences` sequences took so long.
    pub fn note_verify(&mut self, sequences: u32, drafts: u32, time: Duration) {
        self.verify[size(sequences)][drafts as usize - 1] = Some(time);
    }

    /// What a step took lately that verified `drafts` tokens of each of so many sequences, with 0 a step without
    /// drafts.
    pub fn verify(&self, sequences: u32, drafts: u32) -> Option<Duration> {
        match drafts {
            0 => self.batch[size(sequences)],
            _ => self.verify[size(sequences)][drafts as usize - 1],
        }
    }

    /// Rows of which a step draws most tokens a second, of `rows` that there are: all of them, or as many as fill the
    /// next smaller power of two, where the larger step takes longer by more than its rows.
    pub fn best_rows(&self, rows: u32) -> u32 {
        let full = size(rows);
        let fewer = 1u32 << full.saturating_sub(1);
        match (self.batch[full], self.batch[full.saturating_sub(1)]) {
            (Some(all), Some(some)) if full > 0 && some * rows < all * fewer => fewer,
            _ => rows,
        }
    }

    /// A chunk of `tokens` took so long.
    pub fn note_chunk(&mut self, tokens: u32, time: Duration) {
        let reading = time.as_secs_f64() / f64::from(tokens.max(1));
        let mean = &mut self.token[size(tokens)];
        *mean = Some(mean.map_or(reading, |mean| mean + SHARE * (reading - mean)));
    }

    /// What a decode step took lately; `None` before the first.
    pub fn step(&self) -> Option<Duration> {
        self.step
    }

    /// What a chunk of so many tokens should take; `None` if nothing was measured that could tell.
    pub fn chunk(&self, tokens: u32) -> Option<Duration> {
        let own = size(tokens);
        let tokens = f64::from(tokens);
        let smaller = (0..own).rev().find_map(|size| Some((self.token[size]?, f64::from(1u32 << size))));
        let seconds = match (self.token[own], smaller, self.step) {
            (Some(mean), ..) => mean * tokens,
            (None, Some((mean, size)), _) => mean * size * (tokens / size).powf(GROWTH),
            (None, None, Some(step)) => step.as_secs_f64() * (1.0 + tokens / TOKENS_PER_STEP),
            (None, None, None) => return None,
        };
        Some(Duration::from_secs_f64(seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_judged_by_those_of_its_size_or_smaller_or_by_a_step() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        assert_eq!(pace.chunk(64), None);
        pace.note_step(1, ms(4));
        assert_eq!(pace.chunk(64), Some(ms(8)));
        pace.note_chunk(128, ms(8));
        assert_eq!(pace.chunk(128), Some(ms(8)));
        let guess = pace.chunk(512).unwrap();
        assert!(ms(16) < guess && guess < ms(32), "{guess:?} until one of its size was seen");
        pace.note_chunk(512, ms(20));
        assert_eq!(pace.chunk(512), Some(ms(20)));
        pace.note_step(1, ms(2));
        assert_eq!(pace.chunk(64), Some(ms(4)), "a larger one says nothing of it");
    }

    #[test]
    fn a_batch_that_hardly_fills_a_larger_step_is_served_in_turns() {
        let us = Duration::from_micros;
        let mut pace = Pace::default();
        assert_eq!(pace.best_rows(9), 9, "nothing is known");
        pace.note_step(8, us(675));
        assert_eq!(pace.best_rows(9), 9, "the larger step has to be tried");
        pace.note_step(9, us(995));
        assert_eq!([8, 9, 11, 12, 16].map(|rows| pace.best_rows(rows)), [8, 8, 8, 12, 16]);
        pace.note_step(16, us(700));
        assert_eq!(pace.best_rows(9), 9);
        assert_eq!(pace.best_rows(1), 1);
    }

    #[test]
    fn readings_are_averaged() {
        let mut pace = Pace::default();
        pace.note_chunk(100, Duration::from_millis(100));
        pace.note_chunk(100, Duration::from_millis(200));
        assert_eq!(pace.chunk(100), Some(Duration::from_millis(125)));
    }
}

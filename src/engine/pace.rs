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

/// One in so many choices takes what is not best as far as is known: its last reading may have been a bad one, and
/// what is never taken is never measured again.
const EXPLORE: u64 = 64;

/// What steps took lately.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    step: Option<Duration>,
    /// Of decode steps, by the size of their batch.
    batch: [Option<Duration>; SIZES],
    /// Of steps that verify drafts, by the size of their batch and the drafts of a sequence.
    verify: [[Option<Duration>; MOST_DRAFTS]; SIZES],
    /// Seconds a token, by size.
    token: [Option<Mean>; SIZES],
    /// Chunks that were measured.
    chunks: u64,
}

/// A mean of readings.
#[derive(Clone, Copy, Debug)]
struct Mean {
    seconds: f64,
    /// Which chunk the last of them was.
    at: u64,
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
    /// next smaller power of two, where the larger step takes longer by more than its rows. `choice` counts the choices so
    /// far: one in `EXPLORE` is the other of the two, where the other could be better.
    pub fn best_rows(&self, rows: u32, choice: u64) -> u32 {
        let full = size(rows);
        let fewer = 1u32 << full.saturating_sub(1);
        // The larger step has to be tried first.
        let Some(all) = self.batch[full].filter(|_| full > 0) else { return rows };
        let best = match self.batch[full - 1] {
            Some(some) if some * rows < all * fewer => fewer,
            _ => rows,
        };
        let other = if best == rows { fewer } else { rows };
        // A step whose rows are all taken is worth more than one of half of them.
        let could_be = other == rows || rows < 1 << full;
        if could_be && choice % EXPLORE == EXPLORE - 1 { other } else { best }
    }

    /// A chunk of `tokens` took so long.
    pub fn note_chunk(&mut self, tokens: u32, time: Duration) {
        let reading = time.as_secs_f64() / f64::from(tokens.max(1));
        self.chunks += 1;
        let at = self.chunks;
        let mean = &mut self.token[size(tokens)];
        // What was avoided for long counts no more.
        let recent = mean.filter(|mean| at - mean.at < EXPLORE / 2);
        let seconds = recent.map_or(reading, |mean| mean.seconds + SHARE * (reading - mean.seconds));
        *mean = Some(Mean { seconds, at });
    }

    /// What a decode step took lately; `None` before the first.
    pub fn step(&self) -> Option<Duration> {
        self.step
    }

    /// What a chunk of so many tokens should take; `None` if nothing was measured that could tell. `choice` counts the
    /// choices so far: with one in `EXPLORE`, a size that was not measured for long is judged by smaller ones, as one
    /// that was never measured, if they make it shorter.
    pub fn chunk(&self, tokens: u32, choice: u64) -> Option<Duration> {
        let guessed = || self.estimate(tokens, false);
        let mean = self.token[size(tokens)];
        match mean {
            Some(mean) if choice % EXPLORE == EXPLORE - 1 && self.chunks - mean.at >= EXPLORE / 2 => {
                self.estimate(tokens, true).min(guessed())
            }
            _ => self.estimate(tokens, true),
        }
    }

    /// As [`Pace::chunk`], with what was measured of its own size or without.
    fn estimate(&self, tokens: u32, by_its_own: bool) -> Option<Duration> {
        let own = size(tokens);
        let tokens = f64::from(tokens);
        let seconds = |size: usize| Some(self.token[size]?.seconds);
        let smaller = (0..own).rev().find_map(|size| Some((seconds(size)?, f64::from(1u32 << size))));
        let seconds = match (seconds(own).filter(|_| by_its_own), smaller, self.step) {
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
        assert_eq!(pace.chunk(64, 0), None);
        pace.note_step(1, ms(4));
        assert_eq!(pace.chunk(64, 0), Some(ms(8)));
        pace.note_chunk(128, ms(8));
        assert_eq!(pace.chunk(128, 0), Some(ms(8)));
        let guess = pace.chunk(512, 0).unwrap();
        assert!(ms(16) < guess && guess < ms(32), "{guess:?} until one of its size was seen");
        pace.note_chunk(512, ms(20));
        assert_eq!(pace.chunk(512, 0), Some(ms(20)));
        pace.note_step(1, ms(2));
        assert_eq!(pace.chunk(64, 0), Some(ms(4)), "a larger one says nothing of it");
    }

    #[test]
    fn a_batch_that_hardly_fills_a_larger_step_is_served_in_turns() {
        let us = Duration::from_micros;
        let mut pace = Pace::default();
        assert_eq!(pace.best_rows(9, 0), 9, "nothing is known");
        pace.note_step(8, us(675));
        assert_eq!(pace.best_rows(9, 0), 9, "the larger step has to be tried");
        pace.note_step(9, us(995));
        assert_eq!([8, 9, 11, 12, 16].map(|rows| pace.best_rows(rows, 0)), [8, 8, 8, 12, 16]);
        pace.note_step(16, us(700));
        assert_eq!(pace.best_rows(9, 0), 9);
        assert_eq!(pace.best_rows(1, 0), 1);
    }

    #[test]
    fn readings_are_averaged() {
        let mut pace = Pace::default();
        pace.note_chunk(100, Duration::from_millis(100));
        pace.note_chunk(100, Duration::from_millis(200));
        assert_eq!(pace.chunk(100, 0), Some(Duration::from_millis(125)));
    }

    /// What steps of so many rows take, in microseconds, and what each choice of so many notes.
    fn decode(pace: &mut Pace, rows: u32, took: impl Fn(u32) -> u64, choices: std::ops::Range<u64>) -> Vec<u32> {
        let choose = |choice| {
            let chosen = pace.best_rows(rows, choice);
            pace.note_step(chosen, Duration::from_micros(took(chosen)));
            chosen
        };
        choices.map(choose).collect()
    }

    #[test]
    fn a_batch_that_is_avoided_is_measured_again() {
        let mut pace = Pace::default();
        // One bad reading of the larger step: something else was on the device.
        pace.note_step(8, Duration::from_micros(600));
        pace.note_step(16, Duration::from_micros(9000));
        let took = |rows: u32| if rows > 8 { 700 } else { 600 };
        let chosen = decode(&mut pace, 16, took, 0..2 * EXPLORE);
        assert_eq!(chosen[0], 8);
        let first = chosen.iter().position(|rows| *rows == 16).expect("it is tried again");
        assert!(first < EXPLORE as usize, "after {first} choices");
        assert!(chosen[first..].iter().all(|rows| *rows == 16), "and is best: {chosen:?}");

        // The same of the smaller one, where nine rows had better take turns.
        let mut pace = Pace::default();
        pace.note_step(8, Duration::from_micros(9000));
        pace.note_step(16, Duration::from_micros(1000));
        let took = |rows: u32| if rows > 8 { 1000 } else { 600 };
        let chosen = decode(&mut pace, 9, took, 0..2 * EXPLORE);
        let first = chosen.iter().position(|rows| *rows == 8).expect("it is tried again");
        assert!(first < EXPLORE as usize, "after {first} choices");
        assert_eq!(chosen[first..].iter().filter(|rows| **rows == 9).count(), 1, "then only to look: {chosen:?}");
    }

    #[test]
    fn looking_again_is_rare_and_ends_where_nothing_is_heard() {
        let mut pace = Pace::default();
        pace.note_step(8, Duration::from_micros(600));
        pace.note_step(16, Duration::from_micros(9000));
        // Nothing is measured any more.
        let looks = (0..10 * EXPLORE).filter(|choice| pace.best_rows(16, *choice) == 16).count();
        assert_eq!(looks, 10);
        assert!((0..EXPLORE).all(|choice| pace.best_rows(1, choice) == 1 && Pace::default().best_rows(9, choice) == 9));
        // A full step is not given up to see whether half of it is better.
        pace.note_step(16, Duration::from_micros(700));
        assert!((0..EXPLORE).all(|choice| pace.best_rows(16, choice) == 16));
    }

    #[test]
    fn a_chunk_that_is_avoided_is_tried_again_where_smaller_ones_speak_for_it() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        // The first of its size was slow: pipelines were still cold.
        pace.note_chunk(512, ms(400));
        let allowed = ms(30);
        let mut tried = Vec::new();
        for choice in 0..3 * EXPLORE {
            let large = pace.chunk(512, choice).is_some_and(|time| time <= allowed);
            tried.push(large);
            match large {
                true => pace.note_chunk(512, ms(16)),
                false => pace.note_chunk(64, ms(4)),
            }
        }
        let first = tried.iter().position(|large| *large).expect("it is tried again");
        assert!(first < EXPLORE as usize, "after {first} chunks");
        assert!(tried[first..].iter().all(|large| *large), "one reading says more than the old mean");
        // Where it is as slow as it was, it is looked at now and then and no more.
        let mut slow = Pace::default();
        slow.note_chunk(512, ms(400));
        let mut looks = 0;
        for choice in 0..10 * EXPLORE {
            if slow.chunk(512, choice).is_some_and(|time| time <= allowed) {
                slow.note_chunk(512, ms(400));
                looks += 1;
            } else {
                slow.note_chunk(64, ms(4));
            }
        }
        assert!((1..=10).contains(&looks), "{looks} looks");
    }
}

//! The recent speed of a device: the times of decode steps by number of rows, of verification steps, and of prompt
//! tokens by the size of their chunk.
//! Not here: reading clocks; callers pass the times that they measured.

use crate::kernels::state;
use std::time::Duration;

/// The maximum number of drafts per sequence that times are kept for.
const MOST_DRAFTS: usize = state::MOST_DRAFTS as usize;

/// The number of size classes. Sizes are rounded up to powers of two; the largest class is `2^(SIZES - 1)`.
const SIZES: usize = 20;

/// The weight of a new reading in the moving average.
const SHARE: f64 = 0.25;

/// While no chunk of a size or smaller was measured, a chunk is estimated to take as long as one decode step, plus one
/// more per this many tokens.
const TOKENS_PER_STEP: f64 = 64.0;

/// While no chunk of a size was measured, but a smaller one was, the time is extrapolated from the smaller one by the
/// ratio of sizes to the power of `GROWTH`, or by its additional tokens if that is less. The power is below 1, because
/// tokens of large chunks are cheaper, and because a size is only tried if its estimate is short enough.
const GROWTH: f64 = 0.75;

/// The part of a chunk's time that is due to the number of its tokens at least, although it is not longer than a step.
const LEAST_SHARE: f64 = 0.1;

/// One choice in `EXPLORE` differs from the best known one. The last reading of the alternative may have been an
/// outlier, and what is never chosen is never measured again.
const EXPLORE: u64 = 64;

/// [`EXPLORE`] while the alternative is young: measured fewer than [`YOUNG`] times. Its readings may then be those of a
/// cold device: the first executions of a size can take many times as long as all later ones.
const EXPLORE_YOUNG: u64 = 8;

/// See [`EXPLORE_YOUNG`].
const YOUNG: u32 = 32;

/// The number of readings of a chunk size after which it is believed to be slow: two plans are in flight, so that the second
/// one may be made before the first one is measured.
const FIRST_READINGS: u32 = 3;

/// The recent step times.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    step: Option<Duration>,
    /// The last time of a decode step, by size of the batch.
    batch: [Option<Duration>; SIZES],
    /// How often that was measured.
    batch_readings: [u32; SIZES],
    /// The last time of a verification step, by number of sequences and drafts per sequence.
    verify: [[Option<Duration>; MOST_DRAFTS]; SIZES],
    /// The mean time of chunks, by their size.
    chunk: [Option<Mean>; SIZES],
    /// The number of chunks measured so far.
    chunks: u64,
}

/// A moving average of readings.
#[derive(Clone, Copy, Debug)]
struct Mean {
    seconds: f64,
    /// The mean number of tokens of the chunks that were read.
    tokens: f64,
    /// The number of the chunk that was read last.
    at: u64,
    /// The number of readings.
    readings: u32,
}

impl Mean {
    /// Returns the time in seconds of a chunk of `tokens` tokens of about the same size, if every chunk takes `least`.
    fn of(self, tokens: f64, least: f64) -> f64 {
        let by_tokens = (self.seconds - least).max(self.seconds * LEAST_SHARE);
        self.seconds + by_tokens * (tokens / self.tokens - 1.0)
    }
}

/// Whether a choice of this number looks at an alternative that was measured so often.
fn explores(choice: u64, readings: u32) -> bool {
    let every = if readings < YOUNG { EXPLORE_YOUNG } else { EXPLORE };
    choice % every == every - 1
}

fn size(tokens: u32) -> usize {
    (tokens.max(1).next_power_of_two().trailing_zeros() as usize).min(SIZES - 1)
}

impl Pace {
    /// Creates a pace with a known decode step time.
    #[cfg(test)]
    pub fn of_step(step: Duration) -> Pace {
        Pace { step: Some(step), ..Pace::default() }
    }

    /// Notes the time of a decode step of `rows` rows.
    pub fn note_step(&mut self, rows: u32, time: Duration) {
        self.step = Some(time);
        let size = size(rows);
        self.batch[size] = Some(time);
        self.batch_readings[size] = self.batch_readings[size].saturating_add(1);
    }

    /// Notes the time of a step that verified `drafts` draft tokens for each of `sequences` sequences.
    pub fn note_verify(&mut self, sequences: u32, drafts: u32, time: Duration) {
        self.verify[size(sequences)][drafts as usize - 1] = Some(time);
    }

    /// Returns the last time of a step that verified `drafts` draft tokens for each of `sequences` sequences; with 0
    /// drafts, of an ordinary decode step.
    pub fn verify(&self, sequences: u32, drafts: u32) -> Option<Duration> {
        match drafts {
            0 => self.batch[size(sequences)],
            _ => self.verify[size(sequences)][drafts as usize - 1],
        }
    }

    /// Returns how many of `rows` rows give the most tokens per second: all of them, or only as many as fill the next
    /// smaller bucket (a power of two) if the larger step is slower by more than the additional rows are worth.
    /// `choice` is the number of choices so far: one in `EXPLORE`, or `EXPLORE_YOUNG`, returns the alternative, if that
    /// could be better.
    pub fn best_rows(&self, rows: u32, choice: u64) -> u32 {
        let full = size(rows);
        let fewer = 1u32 << full.saturating_sub(1);
        // The larger step must be measured first.
        let Some(all) = self.batch[full].filter(|_| full > 0) else { return rows };
        let best = match self.batch[full - 1] {
            Some(some) if some * rows < all * fewer => fewer,
            _ => rows,
        };
        let other = if best == rows { fewer } else { rows };
        // Half the rows are not tried in place of a full bucket, which is worth more.
        let could_be = other == rows || rows < 1 << full;
        if could_be && explores(choice, self.batch_readings[size(other)]) { other } else { best }
    }

    /// Notes the time of a chunk of `tokens` tokens.
    pub fn note_chunk(&mut self, tokens: u32, time: Duration) {
        let (time, count) = (time.as_secs_f64(), f64::from(tokens.max(1)));
        self.chunks += 1;
        let at = self.chunks;
        let mean = &mut self.chunk[size(tokens)];
        let readings = mean.map_or(0, |mean| mean.readings).saturating_add(1);
        // An average that was not updated for a long time is replaced, and one that is twice the reading: much makes a
        // chunk slower than it has to be, but nothing makes it faster.
        let slower = |mean: &Mean| time / count >= mean.seconds / mean.tokens / 2.0;
        let recent = mean.filter(|mean| at - mean.at < EXPLORE / 2 && slower(mean));
        let towards = |mean: f64, reading: f64| mean + SHARE * (reading - mean);
        let (seconds, tokens) = match recent {
            Some(mean) => (towards(mean.seconds, time), towards(mean.tokens, count)),
            None => (time, count),
        };
        *mean = Some(Mean { seconds, tokens, at, readings });
    }

    /// Returns the time in seconds that every chunk takes, however small it is: that of the fastest decode step, which reads
    /// the same weights; 0 if none was measured.
    fn least(&self) -> f64 {
        let steps = self.batch.iter().flatten().chain(&self.step);
        steps.min().map_or(0.0, Duration::as_secs_f64)
    }

    /// Returns the last time of a decode step; `None` before the first.
    pub fn step(&self) -> Option<Duration> {
        self.step
    }

    /// Returns the expected time of a chunk of `tokens` tokens; `None` if nothing was measured that allows an estimate.
    /// `choice` is the number of choices so far: at one in `EXPLORE`, or `EXPLORE_YOUNG`, a size that was not measured
    /// for half as many chunks is estimated from smaller sizes, as if it had never been measured, if that estimate is
    /// shorter.
    pub fn chunk(&self, tokens: u32, choice: u64) -> Option<Duration> {
        let guessed = || self.estimate(tokens, false);
        let unheard = |readings: u32| if readings < YOUNG { EXPLORE_YOUNG / 2 } else { EXPLORE / 2 };
        let mean = self.chunk[size(tokens)];
        match mean {
            Some(mean) if explores(choice, mean.readings) && self.chunks - mean.at >= unheard(mean.readings) => {
                self.estimate(tokens, true).min(guessed())
            }
            _ => self.estimate(tokens, true),
        }
    }

    /// Returns a time that a chunk of `tokens` tokens hardly exceeds: the time of its size as last measured, or in proportion
    /// to smaller ones, whose tokens take longer each. If its own size was not measured for a long time, or only once
    /// or twice, it is the shorter of both, because the first executions may have been slow. `None` if no chunk of the
    /// size or smaller was measured.
    pub fn chunk_at_most(&self, tokens: u32) -> Option<Duration> {
        let (own, least) = (size(tokens), self.least());
        let tokens = f64::from(tokens);
        // In proportion to a chunk of the smaller size.
        let by_smaller = |mean: Mean| mean.seconds / mean.tokens * tokens;
        let smaller = (0..own).rev().find_map(|size| self.chunk[size]).map(by_smaller);
        let doubtful = |mean: Mean| mean.readings < FIRST_READINGS || self.chunks - mean.at >= EXPLORE / 2;
        let by_own = self.chunk[own].map(|mean| (mean.of(tokens, least), doubtful(mean)));
        let seconds = match (by_own, smaller) {
            (Some((own, true)), Some(smaller)) => own.min(smaller),
            (Some((seconds, _)), _) | (None, Some(seconds)) => seconds,
            (None, None) => return None,
        };
        Some(Duration::from_secs_f64(seconds))
    }

    /// Estimates the time of a chunk, from the average of its own size if `by_its_own`, else as if that size was not
    /// measured. If it was not, it takes no longer than smaller and larger ones say together.
    fn estimate(&self, tokens: u32, by_its_own: bool) -> Option<Duration> {
        let (own, least) = (size(tokens), self.least());
        let tokens = f64::from(tokens);
        let of_own = self.chunk[own].filter(|_| by_its_own);
        let smaller = (0..own).rev().find_map(|size| self.chunk[size]);
        let seconds = match (of_own, smaller, self.step) {
            (Some(mean), ..) => mean.of(tokens, least),
            (None, Some(mean), _) => {
                let grown = mean.seconds * (tokens / mean.tokens).powf(GROWTH);
                // Without a known step this is the time in proportion.
                grown.min(mean.of(tokens, least))
            }
            (None, None, Some(step)) => step.as_secs_f64() * (1.0 + tokens / TOKENS_PER_STEP),
            (None, None, None) => return None,
        };
        // What larger ones say is not asked of a size that was measured: they may have been measured beside fewer rows.
        let above = (own + 1..SIZES).filter(|_| self.chunk[own].is_none()).find_map(|size| self.chunk[size]);
        let most = above.map(|above| match smaller {
            None => above.seconds,
            Some(below) => {
                let share = (tokens - below.tokens) / (above.tokens - below.tokens);
                below.seconds + (above.seconds - below.seconds).max(0.0) * share
            }
        });
        Some(Duration::from_secs_f64(seconds.min(most.unwrap_or(f64::INFINITY))))
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

    /// Goal: sizes whose first executions were slow are used at full speed soon, although a limit forbids slow ones. Method:
    /// the first two chunks of each size take thirty times as long; prompts of 512 tokens are computed one after the other.
    #[test]
    fn a_limit_does_not_keep_a_cold_size_away() {
        let limit = Duration::from_millis(100);
        let took = |tokens: u32| 0.004 + 1e-5 * f64::from(tokens);
        let (mut pace, mut runs) = (Pace::default(), [0u32; 10]);
        let mut chunks = Vec::new();
        for _ in 0..6 {
            let mut left = 512;
            let mut count = 0;
            while left > 0 {
                let sizes = [512, 256, 128, 64, 32, 16];
                let bearable = |tokens: &&u32| pace.chunk_at_most(**tokens).is_some_and(|time| time <= limit);
                let tokens = left.min(*sizes.iter().find(bearable).unwrap_or(&16));
                let cold = if runs[size(tokens)] < 2 { 30.0 } else { 1.0 };
                runs[size(tokens)] += 1;
                pace.note_chunk(tokens, Duration::from_secs_f64(took(tokens) * cold));
                left -= tokens;
                count += 1;
            }
            chunks.push(count);
        }
        assert!(chunks[3..].iter().all(|count| *count == 1), "chunks of each prompt: {chunks:?}");
    }

    /// Goal: no chunk takes much longer than a limit on a device whose speed is not known, and a bad reading heals. Method:
    /// the largest size that keeps to the limit is chosen again and again on devices of different speed.
    #[test]
    fn chunks_grow_up_to_a_limit_as_they_are_measured() {
        let (limit, sizes) = (0.1, [2048, 1024, 512, 256, 128, 64, 32, 16]);
        // Seconds for any chunk, and for each token of it.
        for (base, each) in [(0.005, 1e-5), (0.004, 2e-3), (0.0, 0.05)] {
            let took = |tokens: u32| base + each * f64::from(tokens);
            let mut pace = Pace::default();
            let mut chosen = Vec::new();
            for turn in 0..3 * EXPLORE {
                let bearable = |tokens: &&u32| pace.chunk_at_most(**tokens).is_some_and(|t| t.as_secs_f64() <= limit);
                let tokens = *sizes.iter().find(bearable).unwrap_or(&16);
                chosen.push(tokens);
                // Once, something else held up the device.
                let held_up = if turn == EXPLORE { 10.0 } else { 1.0 };
                pace.note_chunk(tokens, Duration::from_secs_f64(took(tokens) * held_up));
            }
            let best = *sizes.iter().find(|tokens| took(**tokens) <= limit).unwrap_or(&16);
            assert_eq!(chosen[0], 16);
            assert!(chosen.iter().all(|tokens| *tokens == 16 || took(*tokens) <= 1.05 * limit), "{chosen:?}");
            assert_eq!((chosen[10], chosen.last().copied()), (best, Some(best)), "{chosen:?}");
        }
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

    /// Goal: a short chunk is not charged to its tokens alone, as its weights are read for longer ones too: after it, longer
    /// ones are not thought to be slower than they are.
    #[test]
    fn short_chunks_take_as_long_as_a_step() {
        let us = Duration::from_micros;
        let mut pace = Pace::default();
        pace.note_step(1, us(3500));
        pace.note_chunk(17, us(4350));
        let near = |pace: &Pace, tokens: u32, wanted: u64| {
            let found = pace.chunk(tokens, 0).unwrap().as_micros() as u64;
            assert!(found.abs_diff(wanted) < 5, "{tokens}: {found} µs");
        };
        near(&pace, 17, 4350);
        near(&pace, 32, 5100);
        // The same if no step was known at the time, and what was measured is not doubted.
        let mut pace = Pace::default();
        pace.note_chunk(96, us(6166));
        pace.note_step(1, us(3500));
        near(&pace, 96, 6166);
        near(&pace, 128, 6166 + 888);
        pace.note_step(1, us(7000));
        near(&pace, 96, 6166);
    }

    /// Goal: a size between two that were measured is not thought to be slower than both say.
    #[test]
    fn sizes_between_others_are_not_slower() {
        let us = Duration::from_micros;
        let mut pace = Pace::default();
        pace.note_step(1, us(3500));
        pace.note_chunk(17, us(5430));
        pace.note_chunk(96, us(6670));
        for (tokens, most) in [(48, 5920), (64, 6170)] {
            let found = pace.chunk(tokens, 0).unwrap();
            assert!((us(5430)..us(most)).contains(&found), "{tokens}: {found:?}");
        }
        // A larger one that was slow for another reason says nothing.
        pace.note_chunk(512, us(150_000));
        assert!(pace.chunk(128, 0).unwrap() < us(8000));
    }

    #[test]
    fn readings_are_averaged() {
        let mut pace = Pace::default();
        pace.note_chunk(100, Duration::from_millis(100));
        pace.note_chunk(100, Duration::from_millis(200));
        assert_eq!(pace.chunk(100, 0), Some(Duration::from_millis(125)));
        // What takes less than half as long was not disturbed: the average was.
        pace.note_chunk(100, Duration::from_millis(60));
        assert_eq!(pace.chunk(100, 0), Some(Duration::from_millis(60)));
    }

    /// Makes one choice of rows for each number in `choices`, and notes the time in microseconds that `took` gives for
    /// a step of that many rows. Returns the choices.
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
        // One bad reading of the larger step, because something else ran on the device.
        pace.note_step(8, Duration::from_micros(600));
        pace.note_step(16, Duration::from_micros(9000));
        let took = |rows: u32| if rows > 8 { 700 } else { 600 };
        let chosen = decode(&mut pace, 16, took, 0..2 * EXPLORE);
        assert_eq!(chosen[0], 8);
        let first = chosen.iter().position(|rows| *rows == 16).expect("it is tried again");
        assert!(first < EXPLORE as usize, "after {first} choices");
        assert!(chosen[first..].iter().all(|rows| *rows == 16), "and is best: {chosen:?}");

        // The same for the smaller step, in a case where nine rows are served better in turns.
        let mut pace = Pace::default();
        (0..YOUNG).for_each(|_| pace.note_step(16, Duration::from_micros(1000)));
        pace.note_step(8, Duration::from_micros(9000));
        let took = |rows: u32| if rows > 8 { 1000 } else { 600 };
        let chosen = decode(&mut pace, 9, took, 0..2 * EXPLORE);
        let first = chosen.iter().position(|rows| *rows == 8).expect("it is tried again");
        assert!(first < EXPLORE as usize, "after {first} choices");
        assert!(first < EXPLORE_YOUNG as usize, "soon, because it was measured once: after {first} choices");
        assert_eq!(chosen[first..].iter().filter(|rows| **rows == 9).count(), 2, "then only to look: {chosen:?}");
    }

    #[test]
    fn looking_again_is_rare_and_ends_where_nothing_is_heard() {
        let mut pace = Pace::default();
        for _ in 0..YOUNG {
            pace.note_step(8, Duration::from_micros(600));
            pace.note_step(16, Duration::from_micros(9000));
        }
        // Nothing is measured any more.
        let looks = (0..10 * EXPLORE).filter(|choice| pace.best_rows(16, *choice) == 16).count();
        assert_eq!(looks, 10);
        assert!((0..EXPLORE).all(|choice| pace.best_rows(1, choice) == 1 && Pace::default().best_rows(9, choice) == 9));
        // A full bucket is not given up to see whether half of it is better.
        pace.note_step(16, Duration::from_micros(700));
        assert!((0..EXPLORE).all(|choice| pace.best_rows(16, choice) == 16));
    }

    #[test]
    fn a_chunk_that_is_avoided_is_tried_again_where_smaller_ones_speak_for_it() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        // The first chunk of this size was slow, because pipelines were not warm yet.
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
        // If it is still as slow, it is only tried now and then once it is well known.
        let mut slow = Pace::default();
        (0..YOUNG).for_each(|_| slow.note_chunk(512, ms(400)));
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

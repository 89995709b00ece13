//! Arrival times of the tokens of each stream, and what is computed from them: gaps, the rate while all streams decode,
//! percentiles. `bench` uses the same arithmetic in process and through gRPC, so that the results can be compared. Not
//! here: the source of the tokens.

use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Tokens that arrive within this time of the first token of a group belong to that group: the engine delivers a plan's
/// tokens at once, but the transport may split them into several messages.
const TOGETHER: Duration = Duration::from_millis(1);

/// Returns the speed of `tokens` tokens after the first, which took `seconds`; `None` if they came in one piece with it,
/// because the time between them is then not that of making them.
pub(super) fn speed(tokens: u32, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds >= TOGETHER.as_secs_f64()).then(|| f64::from(tokens) / seconds)
}

/// The arrival times of one stream's tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrivals {
    /// Groups of tokens that arrived together, in order: arrival time of the first token, and number of tokens.
    groups: Vec<(Instant, u32)>,
}

impl Arrivals {
    /// Records that `tokens` tokens arrived at `at`, which must not be earlier than the previous call's time.
    pub(super) fn push(&mut self, at: Instant, tokens: u32) {
        match self.groups.last_mut() {
            Some((first, count)) if at.saturating_duration_since(*first) < TOGETHER => *count += tokens,
            _ if tokens > 0 => self.groups.push((at, tokens)),
            _ => {}
        }
    }

    /// When the first token arrived.
    pub(super) fn first(&self) -> Option<Instant> {
        self.groups.first().map(|(at, _)| *at)
    }

    /// When the last group of tokens arrived.
    pub(super) fn last(&self) -> Option<Instant> {
        self.groups.last().map(|(at, _)| *at)
    }

    /// The total number of tokens.
    pub(super) fn tokens(&self) -> u64 {
        self.groups.iter().map(|(_, tokens)| u64::from(*tokens)).sum()
    }

    /// The times between consecutive groups, seconds.
    pub(super) fn gaps(&self) -> impl Iterator<Item = f64> {
        self.groups.windows(2).map(|pair| (pair[1].0 - pair[0].0).as_secs_f64())
    }

    /// Seconds per token from the first group to the last; `None` if there is only one group.
    pub(super) fn seconds_per_token(&self) -> Option<f64> {
        let (first, last) = (self.groups.first()?, self.groups.last()?);
        let after = self.tokens() - u64::from(first.1);
        (after > 0).then(|| (last.0 - first.0).as_secs_f64() / after as f64)
    }

    /// The number of tokens between two instants. The tokens of a group count as produced evenly since the previous
    /// group. Otherwise the end of the window would cut off whole plans of all streams except the one that ends it.
    fn within(&self, from: Instant, to: Instant) -> f64 {
        let overlap = |pair: &[(Instant, u32)]| {
            let (begin, end) = (pair[0].0, pair[1].0);
            let inside = end.min(to).saturating_duration_since(begin.max(from));
            f64::from(pair[1].1) * inside.as_secs_f64() / (end - begin).as_secs_f64()
        };
        self.groups.windows(2).map(overlap).sum()
    }
}

/// The time window in which all streams decode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    /// Tokens of all streams inside the window.
    pub(super) tokens: f64,
    /// Length of the window.
    pub(super) seconds: f64,
}

impl Window {
    /// The window from the last stream's first token to the first stream's last token. `None` if a stream has no token,
    /// or if a stream ended before another began.
    pub(super) fn of<'a>(streams: impl Iterator<Item = &'a Arrivals> + Clone) -> Option<Window> {
        let mut from = None;
        let mut to: Option<Instant> = None;
        for stream in streams.clone() {
            from = from.max(Some(stream.first()?));
            let last = stream.last()?;
            to = Some(to.map_or(last, |to| to.min(last)));
        }
        let (from, to) = (from?, to?);
        let seconds = to.checked_duration_since(from).filter(|length| !length.is_zero())?.as_secs_f64();
        Some(Window { tokens: streams.map(|stream| stream.within(from, to)).sum(), seconds })
    }

    /// Tokens per second.
    pub(super) fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }
}

/// Percentiles of measured values; each percentile is one of the values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Percentiles {
    /// Computes percentiles by nearest rank: the smallest value such that at least that percentage of the values is not
    /// larger. `None` without values.
    pub(super) fn of(mut values: Vec<f64>) -> Option<Percentiles> {
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len();
        let at = |percent: usize| values[(count * percent).div_ceil(100).max(1) - 1];
        (count > 0).then(|| Percentiles { p50: at(50), p95: at(95), p99: at(99), max: at(100) })
    }

    /// Formats the percentiles as a JSON object, each multiplied by `factor`.
    pub(super) fn json(&self, factor: f64) -> Value {
        json!({
            "p50": self.p50 * factor, "p95": self.p95 * factor, "p99": self.p99 * factor, "max": self.max * factor,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(begin: Instant, groups: &[(u64, u32)]) -> Arrivals {
        let mut arrivals = Arrivals::default();
        for &(at_us, tokens) in groups {
            arrivals.push(begin + Duration::from_micros(at_us), tokens);
        }
        arrivals
    }

    #[test]
    fn tokens_that_come_together_are_one_group_however_they_are_cut() {
        let begin = Instant::now();
        let whole = stream(begin, &[(0, 1), (10_000, 8), (20_000, 8)]);
        let cut = stream(begin, &[(0, 1), (10_000, 5), (10_300, 3), (20_000, 1), (20_100, 7), (20_900, 0)]);
        assert_eq!(whole.groups, cut.groups);
        assert_eq!(cut.tokens(), 17);
        assert_eq!(cut.gaps().collect::<Vec<_>>(), [0.01, 0.01]);
        assert!((cut.seconds_per_token().unwrap() - 0.02 / 16.0).abs() < 1e-9);
        // A long sequence of tokens with small gaps is not one group.
        let steady = stream(begin, &(0..20).map(|i| (i * 500, 1)).collect::<Vec<_>>());
        assert_eq!(steady.groups.len(), 10);
        assert_eq!(stream(begin, &[(5, 3)]).seconds_per_token(), None);
    }

    /// Three streams with 8 tokens every 10 ms each, whose plans reach the reader one after the other.
    #[test]
    fn the_window_counts_a_steady_batch_at_its_rate() {
        let begin = Instant::now();
        let of = |late: u64| {
            let groups: Vec<(u64, u32)> = (1..=20).map(|plan| (plan * 10_000 + late, 8)).collect();
            stream(begin, &[&[(late, 1)][..], &groups].concat())
        };
        let streams = [of(0), of(200), of(400)];
        let window = Window::of(streams.iter()).unwrap();
        assert!((window.seconds - 0.1996).abs() < 1e-9, "{window:?}");
        assert!((window.rate() - 2400.0).abs() < 1e-6, "{window:?}");
    }

    #[test]
    fn what_comes_before_all_decode_and_after_one_has_ended_is_not_counted() {
        let begin = Instant::now();
        // The first stream runs fast while it is alone, and slower once the second has begun.
        let alone: Vec<(u64, u32)> = (0..10).map(|i| (i * 10_000, 10)).collect();
        let beside: Vec<(u64, u32)> = (10..20).map(|i| (i * 10_000, 5)).collect();
        let first = stream(begin, &[alone, beside].concat());
        let second = stream(begin, &(0..30).map(|i| (90_000 + i * 10_000, 5)).collect::<Vec<_>>());
        let window = Window::of([&first, &second].into_iter()).unwrap();
        assert!((window.seconds - 0.1).abs() < 1e-9, "{window:?}");
        assert!((window.tokens - 100.0).abs() < 1e-6, "{window:?}");
        // If one stream ends before another begins, there is nothing to measure.
        let later = stream(begin, &[(900_000, 1), (910_000, 1)]);
        assert_eq!(Window::of([&first, &later].into_iter()), None);
        assert_eq!(Window::of([&first, &Arrivals::default()].into_iter()), None);
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let of = |count: u32| Percentiles::of((0..count).rev().map(|i| f64::from(i + 1)).collect()).unwrap();
        assert_eq!(of(1), Percentiles { p50: 1.0, p95: 1.0, p99: 1.0, max: 1.0 });
        assert_eq!(of(100), Percentiles { p50: 50.0, p95: 95.0, p99: 99.0, max: 100.0 });
        assert_eq!(of(10), Percentiles { p50: 5.0, p95: 10.0, p99: 10.0, max: 10.0 });
        assert_eq!(Percentiles::of(Vec::new()), None);
    }
}

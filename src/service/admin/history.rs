//! The last hour of a server for the page's charts: a ring of samples, one every five seconds. Not here: the metrics
//! that a monitoring system collects and keeps ([`super::metrics`]).

use crate::host::Host;
use crate::replica::gaps::GapCounts;
use crate::telemetry::clock::Moment;
use crate::telemetry::requests::{Counts, EndedRequest};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time between two samples.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);
/// The number of samples that are kept: those of an hour.
const KEPT: usize = 720;

/// The events of the interval between the previous sample and this one, and the load at its end.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// The end of the interval.
    pub at: Moment,
    /// The length of the interval.
    pub length: Duration,
    /// The prompt tokens that steps computed, without those found in the prefix cache.
    pub prompt_tokens: u64,
    /// The tokens that steps generated.
    pub output_tokens: u64,
    /// The requests that ended, that failed, and that were refused.
    pub requests: Counts,
    /// Time to the first token of the requests that ended.
    pub first_token: Option<Quantiles>,
    /// Mean time per token after the first of the requests that ended.
    pub per_token: Option<Quantiles>,
    /// Time between the tokens of a stream, of all streams, also of requests that still run.
    pub gap: Option<Quantiles>,
    /// The sequences that hold a slot, and the requests in queues, of all replicas.
    pub running: u32,
    pub waiting: u32,
    /// The KV pages in use, and all KV pages, of all replicas.
    pub pages_used: u32,
    pub pages_total: u32,
}

/// Two quantiles of the requests or gaps of an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Quantiles {
    pub p50: Duration,
    pub p95: Duration,
}

impl Quantiles {
    /// Returns the quantiles by nearest rank; `None` without values.
    fn of(values: impl Iterator<Item = Duration>) -> Option<Quantiles> {
        let mut values: Vec<Duration> = values.collect();
        values.sort_unstable();
        let rank = |percent: usize| (values.len() * percent).div_ceil(100).checked_sub(1);
        let at = |percent| rank(percent).and_then(|rank| values.get(rank).copied());
        Some(Quantiles { p50: at(50)?, p95: at(95)? })
    }

    fn of_gaps(gaps: &GapCounts) -> Option<Quantiles> {
        Some(Quantiles { p50: gaps.percentile(50)?, p95: gaps.percentile(95)? })
    }
}

/// The token counts of a replica since its start.
#[derive(Clone, Copy, Debug, Default)]
struct Tokens {
    prompt: u64,
    output: u64,
}

impl Tokens {
    /// Returns the tokens since `before`. A replica that was reloaded counts from zero.
    fn since(self, before: Tokens) -> Tokens {
        let more = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        Tokens { prompt: more(self.prompt, before.prompt), output: more(self.output, before.output) }
    }
}

/// The counters of a replica since its start.
#[derive(Debug, Default)]
struct Counted {
    tokens: Tokens,
    gaps: GapCounts,
}

/// The counts at the time of the last sample.
#[derive(Debug)]
struct Before {
    at: Moment,
    /// The counters of each replica, by its name.
    replicas: HashMap<String, Counted>,
    requests: Counts,
}

#[derive(Debug, Default)]
struct State {
    before: Option<Before>,
    samples: VecDeque<Sample>,
}

/// The samples of the last hour.
#[derive(Debug, Default)]
pub(super) struct History(Mutex<State>);

impl History {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every update of it is complete, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a sample. The first call only records the counts that the next one is compared with.
    pub(super) fn sample(&self, host: &Host) {
        let now = Moment::now();
        let requests = host.ended.counts();
        let mut replicas = HashMap::new();
        let (mut running, mut waiting, mut pages_used, mut pages_total) = (0, 0, 0, 0);
        for replica in host.replicas() {
            let (load, totals) = (replica.load(), replica.totals());
            let drawn = totals.prefill.tokens + totals.decode.tokens;
            let tokens = Tokens { prompt: totals.prefill.rows, output: drawn };
            replicas.insert(replica.name.clone(), Counted { tokens, gaps: replica.gaps() });
            running += load.running;
            waiting += load.waiting;
            pages_used += load.pages_used;
            pages_total += load.pages_total;
        }
        let mut state = self.state();
        if let Some(before) = &state.before {
            let ended = host.ended.after(before.at);
            let mut made = Counted::default();
            for (name, now) in &replicas {
                let before = before.replicas.get(name);
                let tokens = now.tokens.since(before.map_or_else(Tokens::default, |before| before.tokens));
                made.tokens.prompt += tokens.prompt;
                made.tokens.output += tokens.output;
                made.gaps.add_since(&now.gaps, before.map(|before| &before.gaps));
            }
            let sample = Sample {
                at: now,
                length: now.since(before.at),
                prompt_tokens: made.tokens.prompt,
                output_tokens: made.tokens.output,
                requests: requests.since(before.requests),
                first_token: quantiles(&ended, |of| of.first_token),
                per_token: quantiles(&ended, |of| of.per_token),
                gap: Quantiles::of_gaps(&made.gaps),
                running,
                waiting,
                pages_used,
                pages_total,
            };
            if state.samples.len() == KEPT {
                state.samples.pop_front();
            }
            state.samples.push_back(sample);
        }
        state.before = Some(Before { at: now, replicas, requests });
    }

    /// Returns the samples after `moment`, oldest first.
    pub(super) fn after(&self, moment: Moment) -> Vec<Sample> {
        self.state().samples.iter().filter(|sample| sample.at > moment).cloned().collect()
    }
}

fn quantiles(ended: &[EndedRequest], of: impl Fn(&EndedRequest) -> Option<Duration>) -> Option<Quantiles> {
    Quantiles::of(ended.iter().filter_map(of))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_by_nearest_rank() {
        let ms = Duration::from_millis;
        assert_eq!(Quantiles::of(std::iter::empty()), None);
        assert_eq!(Quantiles::of([ms(3)].into_iter()), Some(Quantiles { p50: ms(3), p95: ms(3) }));
        let hundred = (1..=100).rev().map(ms);
        assert_eq!(Quantiles::of(hundred), Some(Quantiles { p50: ms(50), p95: ms(95) }));
    }

    #[test]
    fn tokens_of_a_replica_that_was_loaded_again_count_from_zero() {
        let before = Tokens { prompt: 100, output: 50 };
        let more = Tokens { prompt: 130, output: 50 }.since(before);
        assert_eq!((more.prompt, more.output), (30, 0));
        let again = Tokens { prompt: 7, output: 3 }.since(before);
        assert_eq!((again.prompt, again.output), (7, 3));
    }

    #[test]
    fn an_hour_is_kept() {
        let (history, host) = (History::default(), Host::new(Vec::new()));
        history.sample(&host);
        assert!(history.after(Moment(0)).is_empty(), "one look has nothing to compare with");
        for _ in 0..KEPT + 2 {
            history.sample(&host);
        }
        let samples = history.after(Moment(0));
        assert_eq!(samples.len(), KEPT);
        assert!(samples.iter().all(|sample| sample.gap.is_none()), "no gaps, no quantiles");
        assert_eq!(history.after(samples[KEPT - 2].at).len(), 1);
    }
}

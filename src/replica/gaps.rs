//! The gaps between the tokens of a replica's streams, counted in buckets by length: bounded memory, one addition a gap.
//! Tokens that are delivered in the same turn of the engine thread come together and have no gap between them.
//! Not here: the time to the first token, and means of whole requests, which `Finished` has.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The number of buckets of equal width in each power of two of microseconds, so that a bucket's middle differs from
/// each of its gaps by at most 1/32.
const PARTS: usize = 16;
/// The base-2 logarithm of `PARTS`. Gaps below `PARTS` microseconds have a bucket for each microsecond.
const PARTS_LOG: u32 = PARTS.ilog2();
/// The base-2 logarithm of the length in microseconds from which on gaps count as the longest: 67 s.
const LONGEST_LOG: u32 = 26;
/// The number of buckets: 3 KiB of counts.
const BUCKETS: usize = PARTS * (1 + (LONGEST_LOG - PARTS_LOG) as usize);

/// Returns the bucket of a gap.
fn bucket(gap: Duration) -> usize {
    let micros = u64::try_from(gap.as_micros()).unwrap_or(u64::MAX).min((1 << LONGEST_LOG) - 1);
    let shift = micros.max(1).ilog2().saturating_sub(PARTS_LOG);
    // `micros >> shift` is below `PARTS` only in the buckets of single microseconds, where `shift` is 0.
    shift as usize * PARTS + (micros >> shift) as usize
}

/// Returns the middle of a bucket.
fn middle(bucket: usize) -> Duration {
    let shift = (bucket / PARTS).saturating_sub(1);
    let least = ((bucket - shift * PARTS) as u64) << shift;
    Duration::from_nanos(least * 1000 + (500 << shift))
}

/// The gaps of a replica since its start, by bucket. The engine thread adds to it; other threads read.
pub(super) struct Gaps([AtomicU64; BUCKETS]);

impl Default for Gaps {
    fn default() -> Gaps {
        Gaps([const { AtomicU64::new(0) }; BUCKETS])
    }
}

impl fmt::Debug for Gaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gaps").field(&self.read().count()).finish()
    }
}

impl Gaps {
    /// Adds a gap.
    pub(super) fn add(&self, gap: Duration) {
        self.0[bucket(gap)].fetch_add(1, Relaxed);
    }

    /// Returns a copy of the counts.
    pub(super) fn read(&self) -> GapCounts {
        GapCounts(self.0.iter().map(|count| count.load(Relaxed)).collect())
    }
}

/// Numbers of gaps, by bucket.
#[derive(Clone, PartialEq, Eq)]
pub struct GapCounts(Box<[u64]>);

impl Default for GapCounts {
    fn default() -> GapCounts {
        GapCounts(vec![0; BUCKETS].into())
    }
}

impl fmt::Debug for GapCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GapCounts").field(&self.count()).finish()
    }
}

impl GapCounts {
    /// Returns the number of gaps.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds the gaps of `now` after `before`, two readings of one replica. If `now` has fewer gaps of any length, the
    /// replica was loaded again and counts from zero.
    pub fn add_since(&mut self, now: &GapCounts, before: Option<&GapCounts>) {
        let before = before.filter(|before| now.0.iter().zip(&before.0).all(|(now, before)| now >= before));
        for (index, sum) in self.0.iter_mut().enumerate() {
            *sum += now.0[index] - before.map_or(0, |before| before.0[index]);
        }
    }

    /// Returns a percentile by nearest rank, as the middle of its bucket; `None` without gaps.
    pub fn percentile(&self, percent: u64) -> Option<Duration> {
        let rank = (self.count() * percent).div_ceil(100);
        let mut below = 0;
        let found = self.0.iter().position(|count| {
            below += count;
            below > 0 && below >= rank
        });
        found.map(middle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_buckets_middle_is_close_to_its_gaps() {
        let mut last = 0;
        for micros in (0..2000).chain((1..6000).map(|n| n * 11_117)) {
            let gap = Duration::from_micros(micros);
            let at = bucket(gap);
            assert!(at >= last, "{gap:?}: buckets are in the order of their gaps");
            last = at;
            let off = middle(at).abs_diff(gap);
            assert!(off <= (gap / 32).max(Duration::from_nanos(500)), "{gap:?} in the bucket of {:?}", middle(at));
        }
        assert_eq!(bucket(Duration::from_secs(67)), BUCKETS - 1);
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1, "the longest take all that are longer");
        assert_eq!(
            (bucket(Duration::ZERO), bucket(Duration::from_micros(16)), bucket(Duration::from_micros(32))),
            (0, 16, 32)
        );
    }

    #[test]
    fn percentiles_are_those_by_nearest_rank() {
        let gaps = Gaps::default();
        assert_eq!(gaps.read().percentile(50), None, "nothing was counted");
        gaps.add(MS(20));
        let one = gaps.read();
        assert_eq!(one.percentile(50), one.percentile(95));
        // 94 short gaps and 6 long ones of 100: the 95th is a long one.
        (0..93).for_each(|_| gaps.add(MS(20)));
        (0..6).for_each(|_| gaps.add(MS(300)));
        let counts = gaps.read();
        let near = |of: Option<Duration>, wanted: Duration| of.unwrap().abs_diff(wanted) <= wanted / 32;
        assert_eq!(counts.count(), 100);
        assert!(near(counts.percentile(50), MS(20)) && near(counts.percentile(94), MS(20)), "{counts:?}");
        assert!(near(counts.percentile(95), MS(300)), "{:?}", counts.percentile(95));
    }

    #[test]
    fn an_interval_has_the_gaps_after_its_begin_of_all_replicas() {
        let (one, other) = (Gaps::default(), Gaps::default());
        (0..9).for_each(|_| one.add(MS(5)));
        let before = one.read();
        one.add(MS(80));
        other.add(MS(80));
        let mut interval = GapCounts::default();
        interval.add_since(&one.read(), Some(&before));
        interval.add_since(&other.read(), None);
        assert_eq!(interval.count(), 2, "none of the nine");
        assert!(interval.percentile(50).unwrap() > MS(70));
        let mut none = GapCounts::default();
        none.add_since(&before, Some(&before));
        assert_eq!(none, GapCounts::default());
        // Loaded again: fewer of 5 ms than before.
        let again = Gaps::default();
        again.add(MS(5));
        let mut interval = GapCounts::default();
        interval.add_since(&again.read(), Some(&before));
        assert_eq!(interval.count(), 1);
    }
}

//! The clock on which all times of host and devices are reported: the host's monotonic clock, which drivers can be
//! calibrated against. Not here: devices.

use rustix::time::{ClockId, clock_gettime};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

/// A moment of `CLOCK_MONOTONIC`, in nanoseconds since the host started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// Returns the CPU time that this process has used, with all its threads.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Readings of both clocks, taken together once so that all conversions agree.
static START: OnceLock<(Moment, SystemTime)> = OnceLock::new();

impl Moment {
    /// Reads the clock.
    pub fn now() -> Moment {
        let time = clock_gettime(ClockId::Monotonic);
        Moment(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }

    /// Converts an [`Instant`].
    pub fn of(instant: Instant) -> Moment {
        let (now, moment) = (Instant::now(), Moment::now());
        match now.checked_duration_since(instant) {
            Some(ago) => moment.minus(ago),
            None => moment.plus(instant - now),
        }
    }

    /// Returns the moment `duration` later.
    pub fn plus(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(duration.as_nanos() as u64))
    }

    /// Returns the moment `duration` earlier.
    pub fn minus(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_sub(duration.as_nanos() as u64))
    }

    /// Returns the time from `earlier` to this moment; zero if `earlier` is later.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Converts to wall-clock time. The offset is read at the first call, so later changes of the wall clock do not
    /// shift spans.
    pub fn wall(self) -> SystemTime {
        let (start, wall) = *START.get_or_init(|| (Moment::now(), SystemTime::now()));
        if self >= start { wall + self.since(start) } else { wall - start.since(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_agree_with_instants_and_with_the_wall_clock() {
        let (before, instant, after) = (Moment::now(), Instant::now(), Moment::now());
        let moment = Moment::of(instant);
        let slack = Duration::from_millis(2);
        assert!(moment.plus(slack) >= before && moment <= after.plus(slack), "{before:?} {moment:?} {after:?}");
        let later = instant + Duration::from_secs(5);
        assert!(Moment::of(later).since(moment) > Duration::from_secs(4));
        let wall = moment.wall();
        assert!(wall.elapsed().unwrap() < Duration::from_secs(1));
        let apart = Moment(moment.0 + 1_000_000_007).wall().duration_since(wall).unwrap();
        assert_eq!(apart, Duration::from_nanos(1_000_000_007), "differences are kept to the nanosecond");
    }
}

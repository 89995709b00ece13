//! Converts a device's timestamps to the host's clock: by calibrating about once per second where the driver supports
//! it, otherwise from the known times of submission and completion. Only `follow` reads clocks; the rest is pure. Not
//! here: the source of the timestamps.

use super::timeline::ClockQuality;
use crate::device::{Calibration, Device};
use crate::telemetry::clock::Moment;
use std::time::Duration;

/// Interval between calibrations once the rate between the clocks is known. Also the age at which bounds are replaced.
const INTERVAL: Duration = Duration::from_secs(1);
/// The first interval between calibrations; each further one is twice as long, up to `INTERVAL`.
const FIRST_INTERVAL: Duration = Duration::from_millis(8);
/// Assumed relative drift between the clocks before their rate was measured.
const UNKNOWN_DRIFT: f64 = 1e-4;
/// Assumed relative drift after the rate was measured: how much the rate changes from one second to the next.
const KNOWN_DRIFT: f64 = 2e-6;
/// The maximum plausible relative rate between the clocks. A larger value is a faulty reading and is ignored.
const MOST_DRIFT: f64 = 1e-3;

/// A device's clock, as seen from the host.
#[derive(Debug)]
pub(super) struct GpuClock {
    /// Whether the driver can read both clocks together.
    calibrates: bool,
    /// The number of nanoseconds after which timestamps wrap around; 0 if they do not.
    range: u64,
    /// The last calibration; `None` before the first one, and if the driver cannot calibrate.
    last: Option<Calibration>,
    /// The relative drift of the host's clock against the device's (positive if the host's is faster), and the bound on
    /// its error; both are fractions.
    rate: f64,
    drift: f64,
    interval: Duration,
    /// Without calibration: bounds on the host's clock minus the device's clock, from the current interval and from the
    /// previous one.
    bounds: Option<(Bounds, Option<Bounds>)>,
}

#[derive(Clone, Copy, Debug)]
struct Bounds {
    since: Moment,
    low: i128,
    high: i128,
}

impl Bounds {
    fn and(self, other: Bounds) -> Bounds {
        Bounds { since: self.since, low: self.low.max(other.low), high: self.high.min(other.high) }
    }
}

impl GpuClock {
    /// Creates a clock without calibration for timestamps with `bits` valid bits and a tick of `period_ns` nanoseconds.
    fn new(bits: u32, period_ns: f32) -> GpuClock {
        let range = if bits >= 64 { 0 } else { ((1u128 << bits) as f64 * f64::from(period_ns)) as u64 };
        GpuClock {
            calibrates: false,
            range,
            last: None,
            rate: 0.0,
            drift: UNKNOWN_DRIFT,
            interval: FIRST_INTERVAL,
            bounds: None,
        }
    }

    /// The clock of a device.
    pub(super) fn of(device: &Device) -> GpuClock {
        let capabilities = &device.adapter().capabilities;
        let mut clock = GpuClock::new(capabilities.timestamp_bits, capabilities.timestamp_period_ns);
        clock.calibrates = capabilities.calibrated_timestamps;
        clock
    }

    /// Updates the clock after a submission has finished: the device times `span` lie between the two host moments
    /// `between`. Calibrates if it is time to.
    pub(super) fn follow(&mut self, device: &Device, span: (u64, u64), between: (Moment, Moment)) {
        if !self.calibrates {
            self.bound(span, between);
        } else if self.is_due(between.1) {
            match device.calibrate() {
                Ok(calibration) => self.calibrate(calibration),
                Err(error) => {
                    // Logged once, because estimated times are used from now on.
                    tracing::warn!(%error, "the device's clock cannot be read");
                    self.calibrates = false;
                    self.last = None;
                    self.bound(span, between);
                }
            }
        }
    }

    /// Whether it is time for the next calibration.
    fn is_due(&self, now: Moment) -> bool {
        self.last.is_none_or(|last| now.since(Moment(last.host_ns)) >= self.interval)
    }

    /// Takes in a new calibration: updates the rate and doubles the interval.
    fn calibrate(&mut self, new: Calibration) {
        if let Some(last) = self.last {
            let host = new.host_ns.saturating_sub(last.host_ns) as f64;
            let device = self.difference(new.device_ns, last.device_ns) as f64;
            if host > 0.0 && device > 0.0 {
                let rate = host / device - 1.0;
                if rate.abs() < MOST_DRIFT {
                    self.rate = rate;
                    self.drift = KNOWN_DRIFT + (new.deviation_ns + last.deviation_ns) as f64 / host;
                }
            }
            self.interval = (self.interval * 2).min(INTERVAL);
        }
        self.last = Some(new);
    }

    /// Takes in the bounds from a finished submission: the device times `begin` and `end` lie between the host moments
    /// of its submission and of its observed end.
    fn bound(&mut self, (begin, end): (u64, u64), (submitted, seen): (Moment, Moment)) {
        let new = Bounds {
            since: seen,
            low: i128::from(submitted.0) - i128::from(begin),
            high: i128::from(seen.0) - i128::from(end),
        };
        self.bounds = Some(match self.bounds {
            Some((now, _)) if seen.since(now.since) > INTERVAL => (new, Some(now)),
            Some((now, before)) => {
                let both = now.and(new);
                // Clocks drift and timestamps wrap around, so bounds that contradict the new ones are dropped.
                if both.low <= both.high { (both, before) } else { (new, None) }
            }
            None => (new, None),
        });
    }

    /// The kind and maximum error of the conversion of `device_ns`; `None` before anything is known.
    pub(super) fn quality(&self, device_ns: u64) -> Option<ClockQuality> {
        if let Some(last) = self.last {
            let age = self.difference(device_ns, last.device_ns).unsigned_abs() as f64;
            let error = Duration::from_nanos(last.deviation_ns + (age * self.drift) as u64);
            return Some(ClockQuality::Calibrated { error });
        }
        let bounds = self.best_bounds()?;
        let error = Duration::from_nanos(((bounds.high - bounds.low) / 2) as u64);
        Some(ClockQuality::Estimated { error })
    }

    /// Converts a device timestamp to the host's clock; `None` before anything is known.
    pub(super) fn place(&self, device_ns: u64) -> Option<Moment> {
        if let Some(last) = self.last {
            let since = self.difference(device_ns, last.device_ns) as f64;
            let host = i128::from(last.host_ns) + (since + since * self.rate) as i128;
            return Some(Moment(host.max(0) as u64));
        }
        let bounds = self.best_bounds()?;
        Some(Moment((i128::from(device_ns) + (bounds.low + bounds.high) / 2).max(0) as u64))
    }

    fn best_bounds(&self) -> Option<Bounds> {
        let (now, before) = self.bounds?;
        let both = before.map(|before| now.and(before)).filter(|both| both.low <= both.high);
        Some(both.unwrap_or(now))
    }

    /// The signed difference `to - from` in nanoseconds, with at most one wrap-around between them.
    fn difference(&self, to: u64, from: u64) -> i64 {
        let plain = to.wrapping_sub(from) as i64;
        if self.range == 0 {
            return plain;
        }
        let range = self.range as i64;
        let within = plain.rem_euclid(range);
        if within > range / 2 { within - range } else { within }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(device_ns: u64, host_ns: u64) -> Calibration {
        Calibration { device_ns, host_ns, deviation_ns: 500 }
    }

    #[test]
    fn between_calibrations_the_clocks_rate_counts() {
        let mut clock = GpuClock::new(64, 1.0);
        assert!(clock.place(5).is_none() && clock.quality(5).is_none() && clock.is_due(Moment(1)));
        clock.calibrate(at(1000, 50 * SECOND));
        assert_eq!(clock.place(3000), Some(Moment(50 * SECOND + 2000)));
        assert_eq!(clock.place(0), Some(Moment(50 * SECOND - 1000)), "stamps may be older than the calibration");
        // The host's clock gains 20 microseconds per second.
        clock.calibrate(at(1000 + SECOND, 51 * SECOND + 20_000));
        let placed = clock.place(1000 + SECOND + SECOND / 2).unwrap();
        assert!(placed.0.abs_diff(51 * SECOND + 20_000 + SECOND / 2 + 10_000) <= 1, "{placed:?}");
        let near = clock.quality(1000 + SECOND).unwrap().error();
        let far = clock.quality(1000 + SECOND + SECOND / 2).unwrap().error();
        assert_eq!(near, Duration::from_nanos(500));
        assert!(far > near && far < Duration::from_micros(3), "{far:?}");
    }

    #[test]
    fn stamps_that_begin_again_are_placed_behind_those_before() {
        let mut clock = GpuClock::new(36, 1.0);
        let range = 1u64 << 36;
        clock.calibrate(at(range - 10, 90 * SECOND));
        assert_eq!(clock.place(5), Some(Moment(90 * SECOND + 15)));
        assert_eq!(clock.place(range - 20), Some(Moment(90 * SECOND - 10)));
    }

    #[test]
    fn without_calibration_stamps_lie_between_submission_and_completion() {
        let mut clock = GpuClock::new(64, 1.0);
        // The host's clock is 10 s ahead. The first submission waits 40 us for the device, and its end is seen 10 us
        // late.
        let host = 10 * SECOND;
        clock.bound((100_000, 200_000), (Moment(host + 60_000), Moment(host + 210_000)));
        let quality = clock.quality(100_000).unwrap();
        assert_eq!(quality, ClockQuality::Estimated { error: Duration::from_micros(25) });
        // The end of a second one is seen 4 us late, which narrows the bounds.
        clock.bound((300_000, 400_000), (Moment(host + 250_000), Moment(host + 404_000)));
        assert_eq!(clock.quality(300_000).unwrap().error(), Duration::from_micros(22));
        let placed = clock.place(300_000).unwrap();
        assert!(placed >= Moment(host + 250_000) && placed.0.abs_diff(host + 300_000) <= 22_000, "{placed:?}");
        // A contradicting observation (the device's clock was set back) takes effect at once.
        clock.bound((10, 20), (Moment(host + SECOND / 2), Moment(host + SECOND / 2 + 30)));
        assert!(clock.place(15).unwrap() >= Moment(host + SECOND / 2));
    }

    #[test]
    fn the_first_intervals_are_short() {
        let mut clock = GpuClock::new(64, 1.0);
        clock.calibrate(at(0, SECOND));
        assert!(!clock.is_due(Moment(SECOND + 1_000_000)));
        assert!(clock.is_due(Moment(SECOND + 8_000_000)));
        for step in 1..20 {
            clock.calibrate(at(step * SECOND, (1 + step) * SECOND));
        }
        assert!(!clock.is_due(Moment(20 * SECOND + 999_000_000)) && clock.is_due(Moment(21 * SECOND)));
    }
}

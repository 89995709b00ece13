//! When decode steps without barriers are tried again after a fault: a pure function of the faults' times.
//! Deliberately absent: what a fault is (`tags.glsl`) and how its steps are run again (`gpu`).

use std::time::{Duration, Instant};

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A fault that comes later than this many pauses after the last one begins again with the first pause.
const CALM_PAUSES: u32 = 10;

/// Whether steps run without barriers now. After a fault they pause; each fault soon after a pause doubles the next one.
#[derive(Clone, Copy, Debug)]
pub struct OverlapRetry {
    first: Duration,
    pause: Duration,
    until: Option<Instant>,
}

impl OverlapRetry {
    /// Steps run without barriers until the first fault, and pause for `first` then.
    pub fn new(first: Duration) -> OverlapRetry {
        OverlapRetry { first, pause: first, until: None }
    }

    /// Notes a fault; gives how long steps run with barriers. `None`: they already do, and the fault is one that was
    /// known of.
    pub fn fault(&mut self, now: Instant) -> Option<Duration> {
        match self.until {
            Some(until) if now < until => return None,
            Some(until) if now - until < self.pause * CALM_PAUSES => self.pause = (self.pause * 2).min(LONGEST_PAUSE),
            _ => self.pause = self.first,
        }
        self.until = Some(now + self.pause);
        Some(self.pause)
    }

    /// Whether steps may run without barriers.
    pub fn allows(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pauses_double_while_faults_come_soon_and_begin_again_after_calm() {
        let mut retry = OverlapRetry::new(SECOND);
        let mut now = Instant::now();
        assert!(retry.allows(now));
        for wanted in [1, 2, 4, 8, 16, 32, 60, 60] {
            let pause = retry.fault(now).expect("a new fault");
            assert_eq!(pause, SECOND * wanted);
            assert!(!retry.allows(now) && !retry.allows(now + pause - SECOND / 2));
            assert_eq!(retry.fault(now + pause / 2), None, "a step that was queued with the faulted one");
            now += pause;
            assert!(retry.allows(now));
        }
        now += LONGEST_PAUSE * CALM_PAUSES;
        assert_eq!(retry.fault(now), Some(SECOND));
    }
}

//! Decides when steps without barriers are tried again after a fault: a pure function of the times of faults.
//! Not here: the detection of faults (`tags.glsl`), and the repetition of steps (`gpu::executor`).

use std::time::{Duration, Instant};

/// The maximum pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A fault that occurs later than this many pauses after the end of the last pause starts again with the first pause.
const CALM_PAUSES: u32 = 10;

/// Whether steps currently run without barriers. They pause after a fault, and each fault soon after a pause doubles
/// the next pause.
#[derive(Clone, Copy, Debug)]
pub struct OverlapRetry {
    first: Duration,
    pause: Duration,
    until: Option<Instant>,
}

impl OverlapRetry {
    /// Steps run without barriers until the first fault, and then pause for `first`.
    pub fn new(first: Duration) -> OverlapRetry {
        OverlapRetry { first, pause: first, until: None }
    }

    /// Records a fault and returns the time for which steps run with barriers. Returns `None` during a pause: the fault
    /// then belongs to a step that was queued before the pause.
    pub fn fault(&mut self, now: Instant) -> Option<Duration> {
        match self.until {
            Some(until) if now < until => return None,
            Some(until) if now - until < self.pause * CALM_PAUSES => self.pause = (self.pause * 2).min(LONGEST_PAUSE),
            _ => self.pause = self.first,
        }
        self.until = Some(now + self.pause);
        Some(self.pause)
    }

    /// Returns whether steps may run without barriers now.
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

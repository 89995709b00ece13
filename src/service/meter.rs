//! A rate limit in tokens per minute: a token bucket that fills steadily up to the tokens of one minute. Requests are refused
//! while it is empty; running requests continue, and may leave it in debt.
//! Not here: which client has which bucket (`auth`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A token bucket.
#[derive(Debug)]
pub struct Meter {
    level: Mutex<Level>,
}

#[derive(Debug)]
struct Level {
    /// The bucket's capacity, and the number of tokens that are added in a minute.
    per_minute: u32,
    /// The number of tokens in the bucket; negative while it is in debt.
    left: f64,
    at: Instant,
}

/// The error of an empty bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spent {
    /// The number of tokens that are added in a minute.
    pub per_minute: u32,
    /// The number of tokens below zero.
    pub debt: u64,
    /// The time until there is a token again.
    pub retry: Duration,
}

impl Meter {
    /// Returns a full bucket.
    pub fn new(per_minute: u32, now: Instant) -> Meter {
        Meter { level: Mutex::new(Level { per_minute, left: f64::from(per_minute), at: now }) }
    }

    /// Changes the rate. Tokens that were taken stay taken.
    pub fn change(&self, per_minute: u32, now: Instant) {
        let mut level = self.level(now);
        let taken = f64::from(level.per_minute) - level.left;
        level.left = f64::from(per_minute) - taken;
        level.per_minute = per_minute;
    }

    /// Checks that the bucket is not empty.
    pub fn ask(&self, now: Instant) -> Result<(), Spent> {
        self.level(now).ask()
    }

    /// Takes the tokens of a request's prompt, if the bucket is not empty.
    pub fn admit(&self, prompt: u32, now: Instant) -> Result<(), Spent> {
        let mut level = self.level(now);
        level.ask()?;
        level.left -= f64::from(prompt);
        Ok(())
    }

    /// Takes output tokens.
    pub fn draw(&self, tokens: u32, now: Instant) {
        self.level(now).left -= f64::from(tokens);
    }

    /// Gives back the prompt tokens of a request that did not run.
    pub fn give_back(&self, prompt: u32, now: Instant) {
        self.level(now).left += f64::from(prompt);
    }

    /// Fills the bucket up to the current time.
    fn level(&self, now: Instant) -> MutexGuard<'_, Level> {
        // No panic can happen while the lock is held.
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let most = f64::from(level.per_minute);
        let since = now.saturating_duration_since(level.at).as_secs_f64();
        level.left = (level.left + since * most / 60.0).min(most);
        level.at = level.at.max(now);
        level
    }
}

impl Level {
    fn ask(&self) -> Result<(), Spent> {
        if self.left >= 1.0 {
            return Ok(());
        }
        let retry = Duration::from_secs_f64((1.0 - self.left) * 60.0 / f64::from(self.per_minute));
        Err(Spent { per_minute: self.per_minute, debt: (-self.left).max(0.0).ceil() as u64, retry })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minutes_worth_comes_in_a_minute_and_debt_is_waited_for() {
        let begin = Instant::now();
        let at = |seconds: f64| begin + Duration::from_secs_f64(seconds);
        let meter = Meter::new(600, begin);
        meter.admit(500, begin).unwrap();
        meter.draw(99, begin);
        meter.ask(begin).unwrap();
        // The last one may be longer than what there is.
        meter.admit(51, begin).unwrap();
        let spent = meter.ask(begin).unwrap_err();
        assert_eq!((spent.per_minute, spent.debt), (600, 50));
        assert!((spent.retry.as_secs_f64() - 5.1).abs() < 1e-6, "{spent:?}");
        assert!(meter.admit(1, at(5.05)).is_err());
        meter.admit(1, at(5.15)).unwrap();
        // Nothing is saved up beyond a minute, and what is given back is there again.
        meter.admit(600, at(1000.0)).unwrap();
        assert!(meter.ask(at(1000.0)).is_err());
        meter.give_back(600, at(1000.0));
        meter.admit(600, at(1000.0)).unwrap();
        // A clock that stands still or goes back fills nothing.
        assert!(meter.ask(at(999.0)).is_err());
    }

    #[test]
    fn a_changed_rate_forgives_nothing() {
        let now = Instant::now();
        let meter = Meter::new(100, now);
        meter.admit(150, now).unwrap();
        meter.change(120, now);
        assert_eq!(meter.ask(now).unwrap_err().debt, 30);
        meter.change(1000, now);
        meter.admit(850, now).unwrap();
        assert!(meter.ask(now).is_err());
    }
}

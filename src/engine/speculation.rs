//! Chooses the number of draft tokens: compares the expected tokens per second of verification steps with those of
//! ordinary decode steps, from their times and from how often drafts were accepted. Pure bookkeeping.
//! Not here: the draft tokens themselves, which stay on the device.

use crate::engine::pace::Pace;
use crate::engine::plan::Drafts;

/// The weight of a new observation in the moving averages.
const SHARE: f64 = 1.0 / 64.0;
/// The acceptance rate of a draft before the first observation.
const UNSEEN: f64 = 0.5;
/// One plan in `EXPLORE` uses another number of drafts than the best one, so that its current time and acceptance rate
/// are measured. If the best number is 0, it is one plan in `EXPLORE * IDLE`.
const EXPLORE: u64 = 32;
/// The factor by which exploration is rarer while the best number of drafts is 0; see [`EXPLORE`].
const IDLE: u64 = 8;
/// Replaces [`EXPLORE`] until every number of drafts was tried [`YOUNG`] times: the first times may be those of a cold
/// device, which are many times as long as all later ones.
const EXPLORE_YOUNG: u64 = 8;
/// Replaces [`EXPLORE_YOUNG`] where a draft model must catch up first, so that a trial costs as much as several steps.
const EXPLORE_CATCHING_UP: u64 = 32;
/// The number of trials after which the times of a number of drafts are trusted; see [`EXPLORE_YOUNG`].
const YOUNG: u32 = 16;

/// The chooser, with the acceptance rates that it has measured.
#[derive(Clone, Debug)]
pub struct Speculation {
    can: Drafts,
    /// By draft: the rate at which it was accepted if all drafts before it were.
    right: Vec<f64>,
    /// The number of choices so far.
    choices: u64,
    /// By number of drafts: how often it was chosen, up to [`YOUNG`].
    tried: Vec<u32>,
    /// Whether the last choice only measures a number that was tried a few times.
    measures: bool,
    /// The last choice, if it is to be made again.
    held: Option<u32>,
}

impl Speculation {
    /// Creates a chooser for an executor with these limits.
    pub fn new(can: Drafts) -> Speculation {
        let numbers = can.most as usize + 1;
        Speculation {
            can,
            right: vec![UNSEEN; can.most as usize],
            choices: 0,
            tried: vec![0; numbers],
            measures: false,
            held: None,
        }
    }

    /// Makes the next choice the same as the last one: what it was made for is not possible yet.
    pub fn hold(&mut self, drafts: u32) {
        self.held = Some(drafts);
    }

    /// Whether the last choice only measures how long steps with its number of drafts take, for which one step is enough.
    pub fn measures(&self) -> bool {
        self.measures
    }

    /// Returns the number of tokens to draft for each of `sequences` sequences.
    pub fn choose(&mut self, sequences: u32, pace: &Pace) -> u32 {
        let held = self.held.take();
        if self.can.most == 0 || sequences > self.can.sequences {
            self.measures = false;
            return 0;
        }
        if let Some(drafts) = held {
            return drafts;
        }
        self.measures = false;
        if self.can.always {
            return self.can.most;
        }
        self.choices += 1;
        let chosen = self.number(sequences, pace);
        let tried = &mut self.tried[chosen as usize];
        *tried = (*tried + 1).min(YOUNG);
        chosen
    }

    /// Whether drafts for `sequences` sequences are possible and, as far as their times are known, pay.
    pub fn may_pay(&self, sequences: u32, pace: &Pace) -> bool {
        let possible = self.can.most > 0 && sequences <= self.can.sequences;
        possible && (self.can.always || self.best(sequences, pace) != Ok(0))
    }

    /// Returns the number of drafts that draws most tokens per second.
    ///
    /// # Errors
    /// The first number of drafts whose time is not known.
    fn best(&self, sequences: u32, pace: &Pace) -> Result<u32, u32> {
        let times: Vec<Option<f64>> =
            (0..=self.can.most).map(|drafts| pace.verify(sequences, drafts).map(|t| t.as_secs_f64())).collect();
        if let Some(unknown) = times.iter().position(Option::is_none) {
            return Err(unknown as u32);
        }
        let mut best = (0, 0.0);
        let (mut tokens, mut all_right) = (1.0, 1.0);
        for (drafts, time) in (0u32..).zip(times.into_iter().flatten()) {
            if drafts > 0 {
                all_right *= self.right[drafts as usize - 1];
                tokens += all_right;
            }
            let speed = tokens / time.max(1e-9);
            if speed > best.1 {
                best = (drafts, speed);
            }
        }
        Ok(best.0)
    }

    /// Returns the best number of drafts, or now and then another one.
    fn number(&mut self, sequences: u32, pace: &Pace) -> u32 {
        let best = match self.best(sequences, pace) {
            Ok(best) => best,
            // A number of drafts without a measured time is tried first.
            Err(unknown) => return unknown,
        };
        let others = (0u32..).zip(&self.tried).filter(|(drafts, tried)| *drafts != best && **tried < YOUNG);
        let often = if self.can.catches_up { EXPLORE_CATCHING_UP } else { EXPLORE_YOUNG };
        if self.choices.is_multiple_of(often)
            && let Some((young, _)) = others.min_by_key(|(_, tried)| **tried)
        {
            self.measures = true;
            return young;
        }
        let every = if best == 0 { EXPLORE * IDLE } else { EXPLORE };
        match self.choices % every {
            0 => (self.choices / every % u64::from(self.can.most + 1)) as u32,
            _ => best,
        }
    }

    /// Notes a token of a step that verified `drafts` drafts: `draft` of them were accepted before it (0 for the step's
    /// first token).
    pub fn note(&mut self, drafts: u32, draft: u32) {
        if draft > 0 {
            self.right[draft as usize - 1] += SHARE;
        }
        // The next draft counts as rejected until its own token is noted.
        if draft < drafts {
            self.right[draft as usize] *= 1.0 - SHARE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn timed(micros: [u64; 3]) -> Pace {
        let mut pace = Pace::default();
        pace.note_step(1, Duration::from_micros(micros[0]));
        pace.note_verify(1, 1, Duration::from_micros(micros[1]));
        pace.note_verify(1, 2, Duration::from_micros(micros[2]));
        pace
    }

    fn usual(speculation: &mut Speculation, pace: &Pace) -> u32 {
        let mut counts = [0; 4];
        (0..15).for_each(|_| counts[speculation.choose(1, pace) as usize] += 1);
        (0..4).max_by_key(|drafts| counts[*drafts as usize]).expect("there are choices")
    }

    #[test]
    fn every_number_of_drafts_is_timed_before_one_is_preferred() {
        let mut speculation = Speculation::new(Drafts { most: 2, sequences: 2, always: false, ..Drafts::default() });
        let mut pace = Pace::default();
        assert_eq!(speculation.choose(1, &pace), 0);
        pace.note_step(1, Duration::from_millis(2));
        assert_eq!(speculation.choose(1, &pace), 1);
        pace.note_verify(1, 1, Duration::from_millis(2));
        assert_eq!(speculation.choose(1, &pace), 2);
        assert_eq!(speculation.choose(3, &pace), 0, "more sequences than a verifying step has");
    }

    #[test]
    fn drafts_are_as_many_as_are_worth_their_time() {
        let mut speculation = Speculation::new(Drafts { most: 2, sequences: 2, always: false, ..Drafts::default() });
        let pace = timed([1000, 1200, 1500]);
        for _ in 0..2000 {
            // The first draft is accepted, the second rejected.
            speculation.note(2, 0);
            speculation.note(2, 1);
        }
        assert!(speculation.right[0] > 0.95 && speculation.right[1] < 0.05, "{:?}", speculation.right);
        assert_eq!(usual(&mut speculation, &pace), 1);
        assert_eq!(usual(&mut speculation, &timed([1000, 2100, 2500])), 0, "too slow");
        for _ in 0..2000 {
            (0..3).for_each(|draft| speculation.note(2, draft));
        }
        assert_eq!(usual(&mut speculation, &pace), 2);
        for _ in 0..2000 {
            speculation.note(2, 0);
        }
        assert_eq!(usual(&mut speculation, &pace), 0, "none is right any more");
        // Each number is tried a few times soon, and rarely after that.
        for _ in 0..3 * EXPLORE_YOUNG * u64::from(YOUNG) {
            speculation.choose(1, &pace);
        }
        let tried = (0..4 * EXPLORE * IDLE).filter(|_| speculation.choose(1, &pace) > 0).count();
        assert!((1..=8).contains(&tried), "{tried} plans look whether that has changed");
    }

    #[test]
    fn without_drafts_none_are_chosen() {
        assert_eq!(Speculation::new(Drafts::default()).choose(1, &Pace::default()), 0);
    }
}

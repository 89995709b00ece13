//! What is done when a replica's device is lost: its executor is built anew on a thread of its own, and how often that is
//! tried. Deliberately absent: how one is built (its maker's), and what becomes of sequences (`scheduler`).

use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, PlanReport, Slot, StepPlan, Ticket};
use crossbeam_channel::{Receiver, Sender, never, unbounded};
use std::collections::VecDeque;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Losses within [`LOSSES_WITHIN`] after which a device is given up: it fails by itself, whatever runs.
const MOST_LOSSES: usize = 5;
/// As [`MOST_LOSSES`] says.
const LOSSES_WITHIN: Duration = Duration::from_secs(600);

/// Why there is no new executor.
pub type RebuildError = Box<dyn Error + Send + Sync>;

type Make = dyn Fn(&Capacity, &AtomicBool) -> Result<Box<dyn Executor>, RebuildError> + Send + Sync;

/// Makes an executor of a capacity in place of one whose device was lost. The flag is set when nobody wants it any more.
#[derive(Clone)]
pub struct Rebuild(Arc<Make>);

impl Rebuild {
    /// By a function that may take its time.
    pub fn new(
        make: impl Fn(&Capacity, &AtomicBool) -> Result<Box<dyn Executor>, RebuildError> + Send + Sync + 'static,
    ) -> Rebuild {
        Rebuild(Arc::new(make))
    }
}

impl fmt::Debug for Rebuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rebuild")
    }
}

/// Why a lost device is not tried again.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum GivenUp {
    /// Nobody said how.
    #[error("nothing builds it anew")]
    NotPossible,
    /// It was lost too often.
    #[error("it was lost {losses} times within {} minutes", LOSSES_WITHIN.as_secs() / 60)]
    TooOften {
        /// Times.
        losses: usize,
    },
}

/// A replica's attempts.
pub struct Rebuilds {
    how: Option<Rebuild>,
    /// When the device was lost lately.
    losses: VecDeque<Instant>,
    built: (Sender<Built>, Receiver<Built>),
    cancelled: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What an attempt came to.
pub type Built = Result<Box<dyn Executor>, RebuildError>;

impl Rebuilds {
    /// None so far.
    pub fn new(how: Option<Rebuild>) -> Rebuilds {
        Rebuilds { how, losses: VecDeque::new(), built: unbounded(), cancelled: Arc::default(), thread: None }
    }

    /// Whether an executor is being built.
    pub fn under_way(&self) -> bool {
        self.thread.is_some()
    }

    /// The device is lost; how another executor is built, if one may be.
    pub fn lost(&mut self, now: Instant) -> Result<Rebuild, GivenUp> {
        let how = self.how.clone().ok_or(GivenUp::NotPossible)?;
        self.losses.retain(|at| now.saturating_duration_since(*at) < LOSSES_WITHIN);
        self.losses.push_back(now);
        if self.losses.len() > MOST_LOSSES {
            return Err(GivenUp::TooOften { losses: self.losses.len() });
        }
        Ok(how)
    }

    /// Has an executor built in place of `lost`, which ends on the same thread, for that can take as long as the device
    /// takes to stop. Fails only where the system has no thread to give.
    pub fn begin(&mut self, name: &str, how: Rebuild, lost: Box<dyn Executor>) -> std::io::Result<()> {
        assert!(!self.under_way(), "an executor that is not there cannot be lost");
        let (cancelled, sender) = (Arc::clone(&self.cancelled), self.built.0.clone());
        let work = move || {
            let capacity = lost.capacity().clone();
            let make = || -> Built {
                drop(lost);
                let built = how.0(&capacity, &cancelled)?;
                match *built.capacity() == capacity {
                    true => Ok(built),
                    false => Err(format!("it would hold {:?} in place of {capacity:?}", built.capacity()).into()),
                }
            };
            let built = catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|_| Err("its making has panicked".into()));
            // The receiver lives with the sender.
            let _ = sender.send(built);
        };
        let thread = std::thread::Builder::new().name(format!("rebuild {name}")).spawn(work);
        self.thread = Some(thread?);
        Ok(())
    }

    /// What attempts came to; [`Rebuilds::ended`] must follow.
    pub fn built(&self) -> &Receiver<Built> {
        &self.built.1
    }

    /// The attempt has said what it came to.
    pub fn ended(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Its panics were caught.
            let _ = thread.join();
        }
    }
}

impl Drop for Rebuilds {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.ended();
    }
}

impl fmt::Debug for Rebuilds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rebuilds").field("losses", &self.losses).field("under_way", &self.under_way()).finish()
    }
}

/// Stands in for an executor that is being built: it holds as much, and nothing happens on it.
#[derive(Debug)]
pub struct Absent {
    capacity: Capacity,
    wake: Receiver<()>,
    pace: Pace,
}

impl Absent {
    /// In place of one of that capacity.
    pub fn new(capacity: Capacity) -> Absent {
        Absent { capacity, wake: never(), pace: Pace::default() }
    }
}

impl Executor for Absent {
    fn capacity(&self) -> &Capacity {
        &self.capacity
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError> {
        Err(ExecuteError::Failed(format!("there is no device for {plan:?}")))
    }

    fn wake(&self) -> &Receiver<()> {
        &self.wake
    }

    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError> {
        Ok(Vec::new())
    }

    fn set_mask(&mut self, slot: Slot, _: &[u32]) {
        panic!("{slot:?} of a device that is not there");
    }

    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError> {
        Err(ExecuteError::Failed(format!("there is no device for {ticket:?}")))
    }

    fn pace(&self) -> &Pace {
        &self.pace
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fake::{FakeConfig, FakeExecutor};

    fn begin(rebuilds: &mut Rebuilds) {
        let how = rebuilds.lost(Instant::now()).unwrap();
        rebuilds.begin("m/0", how, fake()).unwrap();
    }

    fn fake() -> Box<dyn Executor> {
        Box::new(FakeExecutor::realtime_with(FakeConfig::default()))
    }

    fn build(rebuilds: &mut Rebuilds) -> Built {
        begin(rebuilds);
        assert!(rebuilds.under_way());
        let built = rebuilds.built().recv_timeout(Duration::from_secs(20)).unwrap();
        rebuilds.ended();
        assert!(!rebuilds.under_way());
        built
    }

    #[test]
    fn a_device_that_is_lost_too_often_is_given_up() {
        let mut rebuilds = Rebuilds::new(Some(Rebuild::new(|_, _| Ok(fake()))));
        let start = Instant::now();
        let minutes = |minutes: u64| start + Duration::from_secs(60 * minutes);
        for minute in [0, 1, 2, 3, 4, 11, 12] {
            rebuilds.lost(minutes(minute)).unwrap();
        }
        // Those of minutes 3, 4, 11 and 12 count.
        rebuilds.lost(minutes(12)).unwrap();
        let error = rebuilds.lost(minutes(12)).unwrap_err();
        assert_eq!(error.to_string(), "it was lost 6 times within 10 minutes");
        assert_eq!(Rebuilds::new(None).lost(start).err(), Some(GivenUp::NotPossible));
    }

    #[test]
    fn what_panics_or_holds_something_else_is_an_error() {
        let mut panics = Rebuilds::new(Some(Rebuild::new(|_, _| panic!("a bug"))));
        assert_eq!(build(&mut panics).err().unwrap().to_string(), "its making has panicked");
        let other = |capacity: &Capacity, _: &AtomicBool| -> Built {
            let capacity = Capacity { pages: capacity.pages + 1, ..capacity.clone() };
            Ok(Box::new(FakeExecutor::realtime_with(FakeConfig { capacity, ..FakeConfig::default() })))
        };
        let mut same = Rebuilds::new(Some(Rebuild::new(|_, _| Ok(fake()))));
        build(&mut same).unwrap();
        let mut other = Rebuilds::new(Some(Rebuild::new(other)));
        assert!(build(&mut other).err().unwrap().to_string().contains("in place of"));
    }

    #[test]
    fn one_that_nobody_wants_any_more_hears_of_it() {
        let waits = |_: &Capacity, cancelled: &AtomicBool| -> Built {
            while !cancelled.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err("cancelled".into())
        };
        let mut rebuilds = Rebuilds::new(Some(Rebuild::new(waits)));
        begin(&mut rebuilds);
        drop(rebuilds);
    }
}

//! Recovery from a lost device: builds another executor on a separate thread, and limits how often that is tried.
//! Not here: how an executor is built (the function in [`Rebuild`]), and what happens to the sequences (`scheduler`).

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

/// The maximum number of losses within [`LOSSES_WITHIN`] after each of which the device is rebuilt. A device that is
/// lost more often fails by itself, whatever runs on it, and is given up.
const MOST_LOSSES: usize = 5;
/// The period in which losses are counted.
const LOSSES_WITHIN: Duration = Duration::from_secs(600);

/// Why no new executor could be built.
pub type RebuildError = Box<dyn Error + Send + Sync>;

type Make = dyn Fn(&Capacity, &AtomicBool) -> Result<Box<dyn Executor>, RebuildError> + Send + Sync;

/// Builds an executor with a given capacity in place of one whose device was lost. The flag is set when the executor is
/// no longer needed.
#[derive(Clone)]
pub struct Rebuild(Arc<Make>);

impl Rebuild {
    /// Creates it from a function, which may take as long as it needs.
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

/// Why a lost device is not rebuilt.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum GivenUp {
    /// There is no function that builds an executor.
    #[error("nothing builds it anew")]
    NotPossible,
    /// The device was lost too often.
    #[error("it was lost {losses} times within {} minutes", LOSSES_WITHIN.as_secs() / 60)]
    TooOften {
        /// The number of losses.
        losses: usize,
    },
}

/// A replica's attempts to rebuild its executor.
pub struct Rebuilds {
    how: Option<Rebuild>,
    /// When the device was lost, within the last [`LOSSES_WITHIN`].
    losses: VecDeque<Instant>,
    built: (Sender<Built>, Receiver<Built>),
    cancelled: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The result of an attempt.
pub type Built = Result<Box<dyn Executor>, RebuildError>;

impl Rebuilds {
    /// Creates it without any attempts.
    pub fn new(how: Option<Rebuild>) -> Rebuilds {
        Rebuilds { how, losses: VecDeque::new(), built: unbounded(), cancelled: Arc::default(), thread: None }
    }

    /// Whether an executor is being built.
    pub fn under_way(&self) -> bool {
        self.thread.is_some()
    }

    /// Notes that the device is lost. Returns how to build another executor, or why that is not done.
    pub fn lost(&mut self, now: Instant) -> Result<Rebuild, GivenUp> {
        let how = self.how.clone().ok_or(GivenUp::NotPossible)?;
        self.losses.retain(|at| now.saturating_duration_since(*at) < LOSSES_WITHIN);
        self.losses.push_back(now);
        if self.losses.len() > MOST_LOSSES {
            return Err(GivenUp::TooOften { losses: self.losses.len() });
        }
        Ok(how)
    }

    /// Starts to build an executor in place of `lost`. `lost` is dropped on the same thread, because that can take as
    /// long as the device needs to stop. Fails only if the system cannot start a thread.
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
            // The receiver is dropped together with the sender of `self`.
            let _ = sender.send(built);
        };
        let thread = std::thread::Builder::new().name(format!("rebuild {name}")).spawn(work);
        self.thread = Some(thread?);
        Ok(())
    }

    /// Returns the channel of results. [`Rebuilds::ended`] must be called after each.
    pub fn built(&self) -> &Receiver<Built> {
        &self.built.1
    }

    /// Joins the thread of an attempt whose result was received.
    pub fn ended(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread catches the panics of its work.
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

/// A placeholder for an executor that is being rebuilt: it has the same capacity and does nothing.
#[derive(Debug)]
pub struct Absent {
    capacity: Capacity,
    wake: Receiver<()>,
    pace: Pace,
}

impl Absent {
    /// Creates a placeholder for an executor with this capacity.
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
        // The losses of minutes 3, 4, 11 and 12 count.
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

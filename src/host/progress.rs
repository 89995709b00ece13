//! The progress of a load: the trait for reporting it, and the units.

/// Receives progress reports of a load.
pub trait Progress: Sync {
    /// Reports a fact that is worth a line of output: a memory plan, the speed of a load.
    fn line(&self, text: &str);
    /// Reports that a model runs in a slower way than its device should allow, because a test at start has failed.
    fn warning(&self, text: &str);
    /// Reports that `done` of `total` units of the activity `what` are complete.
    fn step(&self, what: &str, done: u64, total: u64, unit: Unit);
}

/// The unit of a progress report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Items.
    Count,
}

/// Discards all reports.
#[derive(Clone, Copy, Debug)]
pub struct Quiet;

impl Progress for Quiet {
    fn line(&self, _: &str) {}
    fn warning(&self, _: &str) {}
    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

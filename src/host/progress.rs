//! The progress of a load: the trait for reporting it, and the units.

/// Receives progress reports of a load.
pub trait Progress: Sync {
    /// Reports a fact that is worth a line of output: a memory plan, the speed of a load.
    fn line(&self, text: &str);
    /// Reports that a model runs in a slower way than it could: because a test at start has failed, or the device lacks what the
    /// faster way needs although the configuration asks for it.
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

/// Writes warnings to the log and discards other reports.
#[derive(Clone, Copy, Debug)]
pub struct WarningsOnly;

impl Progress for WarningsOnly {
    fn line(&self, _: &str) {}
    fn warning(&self, text: &str) {
        tracing::warn!("{text}");
    }
    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

/// Discards all reports.
#[derive(Clone, Copy, Debug)]
pub struct Quiet;

impl Progress for Quiet {
    fn line(&self, _: &str) {}
    fn warning(&self, _: &str) {}
    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

//! How far a load is: the sink that is told, and its units.

/// Says what a start does and how far it is.
pub trait Progress: Sync {
    /// A fact worth a line: a plan table, a load's speed.
    fn line(&self, text: &str);
    /// `done` of `total` (bytes or things, by `unit`) of what is going on.
    fn step(&self, what: &str, done: u64, total: u64, unit: Unit);
}

/// What a step counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things.
    Count,
}

/// Says nothing.
#[derive(Clone, Copy, Debug)]
pub struct Quiet;

impl Progress for Quiet {
    fn line(&self, _: &str) {}
    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

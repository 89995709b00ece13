//! Measurements on devices for `ostinato tune`, `ostinato bench` and `ostinato devices --pairs`. Only `cli` uses them.

pub mod pairs;
pub mod read_bandwidth;
pub mod stages;
pub mod tune;

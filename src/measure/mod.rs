//! Measurements on a device for `ostinato tune`, `ostinato bench` and `ostinato profile`. Only `cli` uses them.

pub mod read_bandwidth;
pub mod stages;
pub mod tune;

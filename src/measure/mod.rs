//! Measurements on a device for `ostinato tune` and `ostinato bench`. Only `cli` uses them.

pub mod read_bandwidth;
pub mod stages;
pub mod tune;

//! Builds replicas on Vulkan devices: opens devices, plans memory, loads weights, records command buffers, and runs
//! plans. It implements `host::source::ModelSource` and `engine::executor::Executor`.
//! Not here: which models are loaded and when (`host`).

pub mod abilities;
pub mod build;
pub mod check;
pub mod devices;
pub mod error;
pub mod executor;
pub mod matrix_units;
pub mod overlap;
mod spans;
pub mod timing;
pub mod tuned;

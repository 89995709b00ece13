//! The Vulkan layer: adapters and their selection, queues, timelines, pipelines, command encoding. It depends on
//! nothing above it. `unsafe` code exists only here and in `memory`'s arena. Not here: what a weight is.
//!
//! Guarantees to the layers above:
//! - A [`Point`] is the only meaning of "done". Each [`Role`] has one timeline, whose value only grows.
//! - [`Commands`], [`Pipeline`], [`Program`] and [`Queries`] are handles. A queue keeps everything submitted to it alive until the
//!   point of that submission is reached, so dropping a handle early is harmless.
//! - Buffers are the exception: the owner of a buffer's memory must keep it until the last point that uses it is
//!   reached (`memory` does this).
#![allow(unsafe_code)]

mod adapter;
mod budget;
mod cache;
mod capabilities;
mod commands;
mod diagnose;
mod error;
mod families;
mod features;
mod gate;
mod handle;
mod instance;
mod logical;
mod module;
mod pipeline;
mod point;
mod probe;
mod ptx;
mod queries;
mod queue;
mod select;
mod submit_order;

pub use adapter::{Adapter, AdapterKind, HeapInfo, QueueFamilyInfo};
pub use budget::MemoryBudget;
pub(crate) use cache::fnv;
pub use cache::{PipelineCache, driver_key, write_atomically};
pub use capabilities::{Capabilities, Component, MatrixShape};
pub use commands::{Commands, Encoder};
pub use diagnose::{NoGpuDiagnosis, choose, diagnose_no_gpu};
pub use error::DeviceError;
pub use gate::Gate;
pub use handle::{Calibration, Device};
pub use instance::{Instance, InstanceOptions};
pub use module::{Module, NEEDED, NEEDED_INVOCATIONS, NEEDED_SHARED_BYTES};
pub use pipeline::{Executable, Pipeline, PipelineDesc, Statistic};
pub use point::{Point, Role};
pub use ptx::{MOST_SHARED_BYTES, Program, ProgramDesc};
pub use queries::Queries;
pub use queue::{Batch, Queue, QueueEntry};
pub use select::select;

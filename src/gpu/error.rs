//! The errors of building a model on a device.

use crate::actors::loader::LoadError;
use crate::actors::thread::SpawnError;
use crate::actors::transfer::TransferError;
use crate::device::DeviceError;
use crate::engine::executor::ExecuteError;
use crate::host::source::{BuildError, BuildErrorKind};
use crate::kernels::region::RegionError;
use crate::memory::MemoryError;
use crate::memory::plan::PlanError;
use crate::model::checkpoint::CheckpointError;
use crate::model::draft::DraftError;
use crate::model::text::TextError;
use std::path::PathBuf;

/// The reason for which a start or a load failed. See [`StartError::is_users`] for the errors that the operator can
/// correct.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No device or several devices match, the device is lost, or another Vulkan error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A checkpoint that cannot be served.
    #[error("model \"{model}\" cannot be loaded from {path}")]
    Checkpoint {
        /// The model's name.
        model: String,
        /// The checkpoint's directory.
        path: PathBuf,
        /// All problems of the checkpoint.
        #[source]
        source: CheckpointError,
    },
    /// A draft model or draft head that cannot draft for the model.
    #[error("model \"{model}\" cannot take its drafts from {path}")]
    Draft {
        /// The model's name.
        model: String,
        /// The draft model's path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: DraftError,
    },
    /// A tokenizer or chat template that cannot be read.
    #[error("the tokenizer of model \"{model}\" cannot be loaded")]
    Text {
        /// The model's name.
        model: String,
        /// The cause.
        #[source]
        source: TextError,
    },
    /// A change of the tuning that the device does not take.
    #[error("tuning \"{change}\" is not KEY=VALUE with a key of the tuning")]
    Tuning {
        /// The change.
        change: String,
    },
    /// The kernels or the device do not support the model's shape or configuration, or the device did not respond.
    #[error("model \"{model}\": {what}")]
    Unsupported {
        /// The model's name.
        model: String,
        /// The problem, with numbers.
        what: String,
    },
    /// The configured context exceeds the model's own.
    #[error("model \"{model}\" is configured for a context of {asked} tokens, its own is {own}")]
    Context {
        /// The model's name.
        model: String,
        /// The configured context in tokens.
        asked: u32,
        /// The checkpoint's context in tokens.
        own: u32,
    },
    /// The model does not fit into memory.
    #[error("model \"{model}\" does not fit")]
    Plan {
        /// The model's name.
        model: String,
        /// The required and the available memory.
        #[source]
        source: PlanError,
    },
    /// An allocation failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A region could not be recorded.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The weights could not be loaded.
    #[error("the weights of model \"{model}\" could not be loaded")]
    Load {
        /// The model's name.
        model: String,
        /// The cause.
        #[source]
        source: LoadError,
    },
    /// A copy failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// An actor could not be started.
    #[error(transparent)]
    Actor(#[from] SpawnError),
    /// The load was cancelled.
    #[error("the load of model \"{model}\" was cancelled")]
    Cancelled {
        /// The model's name.
        model: String,
    },
    /// A device failed while the decode steps of a split model were tested.
    #[error("the test of model \"{model}\" on its devices failed")]
    SplitTest {
        /// The model's name.
        model: String,
        /// The cause.
        #[source]
        source: ExecuteError,
    },
    /// The host cannot write to as much memory of a device as its exchanges with other devices need.
    #[error("the host cannot write to memory of \"{device}\" (it needs a resizable BAR)")]
    NoBar {
        /// The device's name.
        device: String,
    },
    /// An error of the host that did not originate here.
    #[error(transparent)]
    Host(BuildError),
    /// An embedded model could not be unpacked.
    #[error("the embedded demo model could not be unpacked to {path}")]
    Demo {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl StartError {
    /// Returns whether the operator can correct the problem: arguments, files, configuration, devices.
    pub fn is_users(&self) -> bool {
        match self {
            StartError::Device(error) => error.is_users(),
            StartError::Checkpoint { .. }
            | StartError::Draft { .. }
            | StartError::Text { .. }
            | StartError::Tuning { .. }
            | StartError::Unsupported { .. }
            | StartError::Context { .. }
            | StartError::Plan { .. }
            | StartError::Load { .. }
            | StartError::Demo { .. } => true,
            StartError::Memory(_)
            | StartError::Region(_)
            | StartError::Transfer(_)
            | StartError::SplitTest { .. }
            | StartError::NoBar { .. }
            | StartError::Cancelled { .. } => false,
            StartError::Host(error) => error.is_users(),
            StartError::Actor(SpawnError::Device(error)) => error.is_users(),
            StartError::Actor(_) => false,
        }
    }
}

impl From<StartError> for BuildError {
    fn from(error: StartError) -> BuildError {
        let kind = match &error {
            StartError::Plan { .. } => BuildErrorKind::NoMemory,
            StartError::Cancelled { .. } => BuildErrorKind::Cancelled,
            error if error.is_users() => BuildErrorKind::Invalid,
            _ => BuildErrorKind::Internal,
        };
        BuildError::new(kind, error)
    }
}

impl From<BuildError> for StartError {
    fn from(error: BuildError) -> StartError {
        error.into_reason().unwrap_or_else(StartError::Host)
    }
}

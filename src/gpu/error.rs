//! Why a model could not be built on a device.

use crate::actors::loader::LoadError;
use crate::actors::thread::SpawnError;
use crate::actors::transfer::TransferError;
use crate::device::DeviceError;
use crate::host::source::{BuildError, BuildErrorKind};
use crate::kernels::region::RegionError;
use crate::memory::MemoryError;
use crate::memory::plan::PlanError;
use crate::model::checkpoint::CheckpointError;
use crate::model::text::TextError;
use std::path::PathBuf;

/// Why a start failed. `is_users` tells what the operator can mend.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No or several devices, a lost device, Vulkan.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A checkpoint that cannot be served.
    #[error("model \"{model}\" cannot be loaded from {path}")]
    Checkpoint {
        /// The model.
        model: String,
        /// The directory.
        path: PathBuf,
        /// Everything that is wrong.
        #[source]
        source: CheckpointError,
    },
    /// A tokenizer or chat template that cannot be read.
    #[error("the tokenizer of model \"{model}\" cannot be loaded")]
    Text {
        /// The model.
        model: String,
        /// Why.
        #[source]
        source: TextError,
    },
    /// The model's shape is outside what the kernels do.
    #[error("model \"{model}\": {what}")]
    Unsupported {
        /// The model.
        model: String,
        /// What, with numbers.
        what: String,
    },
    /// More context was asked for than the model was made for.
    #[error("model \"{model}\" is configured for a context of {asked} tokens, its own is {own}")]
    Context {
        /// The model.
        model: String,
        /// Configured tokens.
        asked: u32,
        /// The checkpoint's.
        own: u32,
    },
    /// Memory does not suffice.
    #[error("model \"{model}\" does not fit")]
    Plan {
        /// The model.
        model: String,
        /// Both numbers.
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
        /// The model.
        model: String,
        /// Why.
        #[source]
        source: LoadError,
    },
    /// A copy failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// An actor could not be started.
    #[error(transparent)]
    Actor(#[from] SpawnError),
    /// Nobody wants it any more.
    #[error("the load of model \"{model}\" was cancelled")]
    Cancelled {
        /// The model.
        model: String,
    },
    /// The host could not load it.
    #[error(transparent)]
    Host(BuildError),
    /// An embedded model could not be unpacked.
    #[error("the embedded demo model could not be unpacked to {path}")]
    Demo {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl StartError {
    /// Whether the operator can mend it: arguments, files, configuration, devices.
    pub fn is_users(&self) -> bool {
        match self {
            StartError::Device(error) => error.is_users(),
            StartError::Checkpoint { .. }
            | StartError::Text { .. }
            | StartError::Unsupported { .. }
            | StartError::Context { .. }
            | StartError::Plan { .. }
            | StartError::Load { .. }
            | StartError::Demo { .. } => true,
            StartError::Memory(_) | StartError::Region(_) | StartError::Transfer(_) | StartError::Cancelled { .. } => {
                false
            }
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

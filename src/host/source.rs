//! The trait by which a host builds models, which `gpu` implements, and the errors of a build.

use crate::config::{self};
use crate::host::ServedDevice;
use crate::host::ServedModel;
use crate::host::progress::Progress;
use std::error::Error;
use std::fmt;
use std::sync::atomic::AtomicBool;

/// Builds models.
pub trait ModelSource: fmt::Debug + Send + Sync {
    /// Returns an error if the devices that the model names are not available. Called before a load begins.
    fn check(&self, model: &config::Model) -> Result<(), BuildError>;
    /// Builds a model. Blocks until it is loaded; after an error, no resources of it remain on any device.
    fn build(&self, model: &config::Model, attempt: &LoadAttempt<'_>) -> Result<ServedModel, BuildError>;
    /// Returns the open devices, ordered by index. Their `memory` is empty; the host fills it from the replicas.
    fn devices(&self) -> Vec<ServedDevice>;
}

/// The inputs of a build apart from the model's configuration.
#[derive(Clone, Copy)]
pub struct LoadAttempt<'a> {
    /// Whether other models serve meanwhile; the build must not slow them down noticeably.
    pub beside: bool,
    /// The maximum number of requests that wait for each replica.
    pub queue_limit: usize,
    /// Set when the load is cancelled.
    pub cancelled: &'a AtomicBool,
    /// Receives progress reports.
    pub progress: &'a dyn Progress,
}

impl fmt::Debug for LoadAttempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadAttempt").field("beside", &self.beside).finish_non_exhaustive()
    }
}

/// A source that builds nothing, for a host that was created with its models.
#[derive(Debug)]
pub(super) struct Fixed(pub(super) Vec<ServedDevice>);

impl ModelSource for Fixed {
    fn check(&self, model: &config::Model) -> Result<(), BuildError> {
        Err(BuildError::new(BuildErrorKind::Internal, NoSource { model: model.name.clone() }))
    }

    fn build(&self, model: &config::Model, _: &LoadAttempt<'_>) -> Result<ServedModel, BuildError> {
        self.check(model)?;
        unreachable!("no model passes the check")
    }

    fn devices(&self) -> Vec<ServedDevice> {
        self.0.clone()
    }
}

/// The reason why a model was not built, with the message and the causes of the source's error.
#[derive(Debug)]
pub struct BuildError {
    /// The kind of error, which determines what a caller does about it.
    pub kind: BuildErrorKind,
    reason: Box<dyn Error + Send + Sync>,
}

/// The kinds of [`BuildError`] that callers treat differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildErrorKind {
    /// The operator can correct it: configuration, files, devices.
    Invalid,
    /// The operator can correct it: the model does not fit into the device's memory.
    NoMemory,
    /// The load was cancelled.
    Cancelled,
    /// Anything else.
    Internal,
}

/// The host was created with its models and cannot load others.
#[derive(Debug, thiserror::Error)]
#[error("model \"{model}\" cannot be loaded: this host loads none")]
struct NoSource {
    model: String,
}

/// The load was cancelled before the source built anything.
#[derive(Debug, thiserror::Error)]
#[error("the load of model \"{model}\" was cancelled")]
struct Cancelled {
    model: String,
}

impl BuildError {
    /// Wraps a source's own error.
    pub fn new(kind: BuildErrorKind, reason: impl Into<Box<dyn Error + Send + Sync>>) -> BuildError {
        BuildError { kind, reason: reason.into() }
    }

    /// Creates the error of a cancelled load.
    pub fn cancelled(model: &str) -> BuildError {
        BuildError::new(BuildErrorKind::Cancelled, Cancelled { model: model.to_owned() })
    }

    /// Returns whether the operator can correct the problem.
    pub fn is_users(&self) -> bool {
        matches!(self.kind, BuildErrorKind::Invalid | BuildErrorKind::NoMemory)
    }

    /// Returns the source's own error, if it has this type.
    pub fn reason<E: Error + 'static>(&self) -> Option<&E> {
        self.reason.downcast_ref()
    }

    /// Like [`BuildError::reason`], by value. Returns the error itself if the source's error has another type.
    pub fn into_reason<E: Error + 'static>(self) -> Result<E, BuildError> {
        let BuildError { kind, reason } = self;
        reason.downcast().map(|reason| *reason).map_err(|reason| BuildError { kind, reason })
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl Error for BuildError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.reason.source()
    }
}

//! What builds models for a host: the trait that `gpu` implements, and why a build failed.

use crate::config::{self};
use crate::host::ServedDevice;
use crate::host::ServedModel;
use crate::host::progress::Progress;
use std::error::Error;
use std::fmt;
use std::sync::atomic::AtomicBool;

/// Builds models.
pub trait ModelSource: fmt::Debug + Send + Sync {
    /// Whether a model's devices are there, before anything is begun.
    fn check(&self, model: &config::Model) -> Result<(), BuildError>;
    /// Builds a model. Takes as long as it takes; on an error nothing of it is left on any device.
    fn build(&self, model: &config::Model, attempt: &LoadAttempt<'_>) -> Result<ServedModel, BuildError>;
    /// The devices that are open, by index; their memory is told by whoever is on them.
    fn devices(&self) -> Vec<ServedDevice>;
}

/// What a model is built with beside its own configuration.
#[derive(Clone, Copy)]
pub struct LoadAttempt<'a> {
    /// Others serve meanwhile, and must not feel it.
    pub beside: bool,
    /// Requests that may wait for each replica.
    pub queue_limit: usize,
    /// Set when nobody wants the model any more.
    pub cancelled: &'a AtomicBool,
    /// Hears how far it is.
    pub progress: &'a dyn Progress,
}

impl fmt::Debug for LoadAttempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadAttempt").field("beside", &self.beside).finish_non_exhaustive()
    }
}

/// Builds nothing: of a host whose models were handed to it.
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

/// Why a model was not built. Its text and its causes are those of the source's own error.
#[derive(Debug)]
pub struct BuildError {
    /// What a caller does about it.
    pub kind: BuildErrorKind,
    reason: Box<dyn Error + Send + Sync>,
}

/// What a caller does about a [`BuildError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildErrorKind {
    /// The operator can mend it: configuration, files, devices.
    Invalid,
    /// The operator can mend it: the model does not fit the device's memory.
    NoMemory,
    /// The load was cancelled.
    Cancelled,
    /// Anything else.
    Internal,
}

/// The host was made with its models and loads no others.
#[derive(Debug, thiserror::Error)]
#[error("model \"{model}\" cannot be loaded: this host loads none")]
struct NoSource {
    model: String,
}

/// The load was cancelled before its source was asked.
#[derive(Debug, thiserror::Error)]
#[error("the load of model \"{model}\" was cancelled")]
struct Cancelled {
    model: String,
}

impl BuildError {
    /// Of a source's own error.
    pub fn new(kind: BuildErrorKind, reason: impl Into<Box<dyn Error + Send + Sync>>) -> BuildError {
        BuildError { kind, reason: reason.into() }
    }

    /// The load of a model was cancelled.
    pub fn cancelled(model: &str) -> BuildError {
        BuildError::new(BuildErrorKind::Cancelled, Cancelled { model: model.to_owned() })
    }

    /// Whether the operator can mend it.
    pub fn is_users(&self) -> bool {
        matches!(self.kind, BuildErrorKind::Invalid | BuildErrorKind::NoMemory)
    }

    /// The source's own error, if it is of this type.
    pub fn reason<E: Error + 'static>(&self) -> Option<&E> {
        self.reason.downcast_ref()
    }

    /// The same by value, or the error itself.
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

//! Every reason not to serve, and the one function that turns them into gRPC statuses.

use crate::engine::host::{RouteError, SubmitError};
use crate::engine::lifecycle::LifecycleError;
use crate::engine::request::RequestError;
use crate::engine::start::StartError;
use crate::model::grammar::GrammarError;
use crate::model::text::TextError;
use tonic::{Code, Status};

/// Why a request is not served, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No such model or device.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The replica did not take it.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// Text could not be encoded, rendered or decoded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The output cannot be constrained so.
    #[error("{field}: {source}")]
    Grammar {
        /// The message's field.
        field: &'static str,
        /// Why.
        source: GrammarError,
    },
    /// A field that must be set is not.
    #[error("{field} is missing: {rule}")]
    Missing {
        /// The message's field.
        field: &'static str,
        /// What is needed.
        rule: &'static str,
    },
    /// A field's value cannot be served.
    #[error("{field} is {value}, must be {rule}")]
    Value {
        /// The message's field.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// Text was asked of a model that has token ids only.
    #[error("model \"{model}\" has no tokenizer: it serves token ids only, and {field} needs text")]
    NoTokenizer {
        /// The model.
        model: String,
        /// The message's field.
        field: &'static str,
    },
    /// What a subscriber has missed cannot be told again.
    #[error("{field} is {value}: nothing is kept to resume from, 0 begins with what there is now")]
    Past {
        /// The message's field.
        field: &'static str,
        /// What was asked for.
        value: u64,
    },
    /// A subscriber reads slower than things happen.
    #[error("the stream was read too slowly and has a gap: subscribe again from 0")]
    Gap,
    /// The contract names no model, so it can mean only the one that is served.
    #[error("this contract names no model, and more than one is served: {served}")]
    SeveralModels {
        /// Comma-separated names.
        served: String,
    },
    /// The contract names no model, and none is served.
    #[error("no model is served now")]
    NoModel,
    /// A field or value of a later version.
    #[error("{field} is not served yet")]
    NotServed {
        /// The message's field.
        field: &'static str,
    },
    /// The client has as many unfinished requests as one may have.
    #[error("client {client} has {unfinished} unfinished requests and asks for {asked} more, at most {limit}")]
    ClientBusy {
        /// Whom the limit counts for.
        client: String,
        /// What it has.
        unfinished: u32,
        /// Samples of this request.
        asked: u32,
        /// The bound.
        limit: u32,
    },
    /// The deadline passed while it ran or waited.
    #[error("the deadline passed after {output_tokens} tokens")]
    Deadline {
        /// Tokens handed out.
        output_tokens: u32,
    },
    /// The client reads slower than its tokens come.
    #[error("the stream was read too slowly: {buffered} events were waiting, at most as many are kept")]
    Slow {
        /// The bound.
        buffered: usize,
    },
    /// The device or the engine failed.
    #[error("the generation failed: {0}")]
    Failed(String),
    /// The server's grace period is over.
    #[error("the server stops")]
    Stopping,
    /// Its model is not there any more.
    #[error("model \"{model}\" was unloaded meanwhile")]
    Unloaded {
        /// Which.
        model: String,
    },
    /// A model was not loaded or unloaded.
    #[error("{}", chain(.0))]
    Lifecycle(LifecycleError),
}

/// An error with its causes: what a client can mend is said by the last of them.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some errors quote their cause in their own words.
        if !text.contains(&next) {
            text.push_str(&format!(": {next}"));
        }
        cause = error.source();
    }
    text
}

fn lifecycle_code(error: &LifecycleError) -> Code {
    match error {
        LifecycleError::NotConfigured { .. } => Code::NotFound,
        LifecycleError::Busy { .. } => Code::Aborted,
        LifecycleError::NotServed { .. } => Code::FailedPrecondition,
        LifecycleError::Stopping { .. } => Code::Unavailable,
        LifecycleError::Load { source, .. } => match **source {
            StartError::Plan { .. } => Code::ResourceExhausted,
            StartError::Cancelled { .. } => Code::Aborted,
            ref source if source.is_users() => Code::FailedPrecondition,
            _ => Code::Internal,
        },
    }
}

impl Refusal {
    /// The gRPC code.
    pub fn code(&self) -> Code {
        match self {
            Refusal::Route(_) => Code::NotFound,
            Refusal::Submit(SubmitError::Request(RequestError::DuplicateId(_))) => Code::AlreadyExists,
            Refusal::Submit(SubmitError::Request(_)) => Code::InvalidArgument,
            Refusal::Submit(SubmitError::QueueFull { .. } | SubmitError::NoRoom { .. }) => Code::ResourceExhausted,
            Refusal::Submit(SubmitError::Unavailable { .. }) => Code::Unavailable,
            Refusal::Text(TextError::NoTemplate(_)) => Code::FailedPrecondition,
            Refusal::Text(
                TextError::Encode(_) | TextError::Decode(_) | TextError::Template(_) | TextError::Refused(_),
            ) => Code::InvalidArgument,
            Refusal::Text(_) => Code::Internal,
            Refusal::Grammar { source: GrammarError::Tokenizer, .. } => Code::FailedPrecondition,
            Refusal::Grammar { .. } => Code::InvalidArgument,
            Refusal::Missing { .. } | Refusal::Value { .. } => Code::InvalidArgument,
            Refusal::NoTokenizer { .. } => Code::FailedPrecondition,
            Refusal::Past { .. } => Code::OutOfRange,
            Refusal::Gap => Code::DataLoss,
            Refusal::SeveralModels { .. } | Refusal::NoModel => Code::FailedPrecondition,
            Refusal::NotServed { .. } => Code::Unimplemented,
            Refusal::ClientBusy { .. } => Code::ResourceExhausted,
            Refusal::Deadline { .. } => Code::DeadlineExceeded,
            Refusal::Slow { .. } => Code::ResourceExhausted,
            Refusal::Failed(_) => Code::Internal,
            Refusal::Stopping | Refusal::Unloaded { .. } => Code::Unavailable,
            Refusal::Lifecycle(error) => lifecycle_code(error),
        }
    }

    /// A word for `error.type`.
    pub fn kind(&self) -> &'static str {
        code_name(self.code())
    }
}

/// The one way from our errors to gRPC.
pub fn status(refusal: &Refusal) -> Status {
    Status::new(refusal.code(), refusal.to_string())
}

/// gRPC's own name of a code.
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

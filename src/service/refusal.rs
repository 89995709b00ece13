//! Every reason not to serve, and the one function that turns them into gRPC statuses.

use super::meter::Spent;
use crate::engine::request::RequestError;
use crate::host::lifecycle::LifecycleError;
use crate::host::route::RouteError;
use crate::host::source::BuildErrorKind;
use crate::model::grammar::GrammarError;
use crate::model::text::TextError;
use crate::replica::SubmitError;
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
    /// A prompt's text is too long.
    #[error("{field} has {bytes} bytes, at most {most} are taken")]
    LongText {
        /// The message's field.
        field: &'static str,
        /// What was given.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// More ids are to be decoded than a model has drawn.
    #[error("token_ids has {ids} ids, at most {most} are decoded: as many as the model's context holds")]
    ManyIds {
        /// What was given.
        ids: usize,
        /// The bound.
        most: usize,
    },
    /// Text was asked of a model that has token ids only.
    #[error("model \"{model}\" has no tokenizer: it serves token ids only, and {field} needs text")]
    NoTokenizer {
        /// The model.
        model: String,
        /// The message's field.
        field: &'static str,
    },
    /// Tools for a model whose chat template has none.
    #[error("the model's chat template has no tools: they cannot be given")]
    NoTools,
    /// Calls are required of a model whose form of calls is not known.
    #[error(
        "tool_choice cannot be enforced: the form of the model's calls is not known from its chat template, so they are \
         neither constrained nor read"
    )]
    UnknownCalls,
    /// A field of a JSON body has the wrong type, or a value that cannot be served.
    #[error("{field} is {value}, must be {rule}")]
    Json {
        /// The path of the field, such as `messages[0].content`.
        field: String,
        /// What was given: a number, or the kind of anything that may quote a prompt.
        value: String,
        /// What is allowed.
        rule: String,
    },
    /// The body of an HTTP request is not JSON.
    #[error("the body is not JSON: {0}")]
    NotJson(String),
    /// The body of an HTTP request ended before it was whole.
    #[error("the body was not received to its end")]
    CutBody,
    /// A path or a method that the endpoint does not have.
    #[error("there is no {method} {path} here")]
    NoRoute {
        /// The HTTP method.
        method: String,
        /// The path, shortened.
        path: String,
    },
    /// A browser's page of another origin asks a server that has no tokens.
    #[error("without tokens this address is answered under localhost and 127.0.0.1 only, and to pages from there")]
    OtherOrigin,
    /// A field that this version does not serve.
    #[error("{field} is not served")]
    NotServedField {
        /// The path of the field.
        field: String,
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
    #[error(
        "this contract names no model, and more than one is served: {served}; a model with a listen address of its own \
         is served alone there"
    )]
    SeveralModels {
        /// Comma-separated names.
        served: String,
    },
    /// The endpoint serves another model only.
    #[error("model \"{model}\" is not served at this address, which is that of \"{only}\"")]
    OtherEndpoint {
        /// Which was asked for.
        model: String,
        /// The model of the endpoint.
        only: String,
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
    /// The client has taken its tokens of this minute.
    #[error(
        "client {client} has taken its {} tokens a minute and {} more, try again in {:.1} s",
        spent.per_minute, spent.debt, spent.retry.as_secs_f64()
    )]
    Spent {
        /// Whose.
        client: String,
        /// How far.
        spent: Spent,
    },
    /// There is no token where one is needed, or more than one.
    #[error("a token is needed: authorization is missing or not one of \"Bearer TOKEN\"")]
    NoToken,
    /// Nobody has this token.
    #[error("the token is not known")]
    UnknownToken,
    /// The token has not the right that the method needs.
    #[error("token \"{name}\" has not the right \"{right}\", which this method needs")]
    NoRight {
        /// Whose.
        name: String,
        /// Which.
        right: &'static str,
    },
    /// The token is for other models.
    #[error("token \"{name}\" is not for model \"{model}\"")]
    OtherModel {
        /// Whose.
        name: String,
        /// Which.
        model: String,
    },
    /// Messages that are coming in, or that are being prepared, take all the room that there is for them.
    #[error("messages of {held} bytes are coming in, {bytes} more are more than the {most} that are kept")]
    Crowded {
        /// Of all calls.
        held: usize,
        /// Of this one.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// The client's own messages that are coming in take its share of the room.
    #[error(
        "messages of {held} bytes of client {client} are coming in, {bytes} more are more than the {most} that are left"
    )]
    Share {
        /// The client of the call.
        client: String,
        /// Bytes of all its messages.
        held: usize,
        /// Bytes of this message.
        bytes: usize,
        /// The bytes that are free, which is the most that one client may have.
        most: usize,
    },
    /// A repeated field of a message has too many elements to be decoded.
    #[error("{field} has {elements} elements, at most {most} are taken in one message")]
    Elements {
        /// The field, `Message.field`.
        field: String,
        /// The number of elements over the whole message.
        elements: usize,
        /// The bound.
        most: usize,
    },
    /// As many requests wait to be prepared as may.
    #[error("{waiting} requests wait to be prepared, at most {most} may")]
    Jobs {
        /// Of all clients.
        waiting: usize,
        /// The bound.
        most: usize,
    },
    /// The request lost its waiting place to a client that has fewer requests waiting.
    #[error(
        "client {client} has most of the waiting requests, and another client needs a place: at most {most} may wait"
    )]
    Displaced {
        /// The client of the request.
        client: String,
        /// The bound, over all clients.
        most: usize,
    },
    /// A message says that it is longer than may be.
    #[error("a message of {bytes} bytes is longer than the {most} that are taken")]
    LongMessage {
        /// The declared length in bytes.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// A call was opened and its message did not come.
    #[error("the message did not come within {seconds:.1} s")]
    NoMessage {
        /// The bound.
        seconds: f64,
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
    /// No model that the token is for is served.
    #[error("no model that token \"{name}\" is for is served")]
    NoneOfIts {
        /// Whose.
        name: String,
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
        LifecycleError::Load { source, .. } => match source.kind {
            BuildErrorKind::NoMemory => Code::ResourceExhausted,
            BuildErrorKind::Cancelled => Code::Aborted,
            BuildErrorKind::Invalid => Code::FailedPrecondition,
            BuildErrorKind::Internal => Code::Internal,
        },
    }
}

impl Refusal {
    /// The gRPC code.
    pub fn code(&self) -> Code {
        match self {
            Refusal::Route(RouteError::Selector(_)) => Code::InvalidArgument,
            Refusal::Route(_) => Code::NotFound,
            Refusal::Submit(SubmitError::Request(RequestError::DuplicateId(_))) => Code::AlreadyExists,
            Refusal::Submit(SubmitError::Request(_)) => Code::InvalidArgument,
            Refusal::Submit(SubmitError::QueueFull { .. } | SubmitError::NoRoom { .. }) => Code::ResourceExhausted,
            Refusal::Submit(SubmitError::Unavailable { .. }) => Code::Unavailable,
            Refusal::Text(TextError::NoTemplate(_)) => Code::FailedPrecondition,
            Refusal::Text(
                TextError::Encode(_)
                | TextError::Decode(_)
                | TextError::Template(_)
                | TextError::TooLarge(_)
                | TextError::Refused(_),
            ) => Code::InvalidArgument,
            Refusal::Text(TextError::Cancelled) | Refusal::Grammar { source: GrammarError::Cancelled, .. } => {
                Code::Cancelled
            }
            Refusal::Text(TextError::Unavailable(_))
            | Refusal::Grammar { source: GrammarError::Unavailable(_), .. } => Code::Unavailable,
            Refusal::Text(_) => Code::Internal,
            Refusal::Grammar { source: GrammarError::Tokenizer, .. } => Code::FailedPrecondition,
            Refusal::Grammar { .. } => Code::InvalidArgument,
            Refusal::Missing { .. } | Refusal::Value { .. } | Refusal::LongText { .. } => Code::InvalidArgument,
            Refusal::ManyIds { .. } | Refusal::Elements { .. } => Code::InvalidArgument,
            Refusal::Json { .. } | Refusal::NotJson(_) | Refusal::CutBody => Code::InvalidArgument,
            Refusal::NoTokenizer { .. } | Refusal::NoTools | Refusal::UnknownCalls => Code::FailedPrecondition,
            Refusal::NoRoute { .. } | Refusal::OtherEndpoint { .. } => Code::NotFound,
            Refusal::OtherOrigin => Code::PermissionDenied,
            Refusal::Past { .. } | Refusal::LongMessage { .. } => Code::OutOfRange,
            Refusal::Gap => Code::DataLoss,
            Refusal::SeveralModels { .. } | Refusal::NoModel => Code::FailedPrecondition,
            Refusal::NotServed { .. } | Refusal::NotServedField { .. } => Code::Unimplemented,
            Refusal::ClientBusy { .. } | Refusal::Spent { .. } => Code::ResourceExhausted,
            Refusal::Crowded { .. } | Refusal::Share { .. } => Code::ResourceExhausted,
            Refusal::Jobs { .. } | Refusal::Displaced { .. } => Code::ResourceExhausted,
            Refusal::NoToken | Refusal::UnknownToken => Code::Unauthenticated,
            Refusal::NoRight { .. } | Refusal::OtherModel { .. } | Refusal::NoneOfIts { .. } => Code::PermissionDenied,
            Refusal::NoMessage { .. } => Code::DeadlineExceeded,
            Refusal::Deadline { .. } => Code::DeadlineExceeded,
            Refusal::Slow { .. } => Code::ResourceExhausted,
            Refusal::Failed(_) => Code::Internal,
            Refusal::Stopping | Refusal::Unloaded { .. } => Code::Unavailable,
            Refusal::Lifecycle(error) => lifecycle_code(error),
        }
    }

    /// The same refusal with the field names of another contract; `names` has pairs of our name and the other one.
    pub fn renamed(mut self, names: &[(&'static str, &'static str)]) -> Refusal {
        if let Some(field) = self.field_mut()
            && let Some((_, theirs)) = names.iter().find(|(ours, _)| ours == field)
        {
            *field = theirs;
        }
        self
    }

    fn field_mut(&mut self) -> Option<&mut &'static str> {
        match self {
            Refusal::Missing { field, .. }
            | Refusal::Value { field, .. }
            | Refusal::LongText { field, .. }
            | Refusal::NoTokenizer { field, .. }
            | Refusal::NotServed { field }
            | Refusal::Grammar { field, .. }
            | Refusal::Submit(SubmitError::Request(RequestError::Value { field, .. })) => Some(field),
            _ => None,
        }
    }

    /// The field that the refusal is about, if it is about one.
    pub fn field(&self) -> Option<&str> {
        match self {
            Refusal::Missing { field, .. }
            | Refusal::Value { field, .. }
            | Refusal::LongText { field, .. }
            | Refusal::NoTokenizer { field, .. }
            | Refusal::NotServed { field }
            | Refusal::Grammar { field, .. }
            | Refusal::Submit(SubmitError::Request(RequestError::Value { field, .. })) => Some(field),
            Refusal::Json { field, .. } | Refusal::NotServedField { field } => Some(field),
            _ => None,
        }
    }

    /// What may stand in traces: a template's own words may quote the messages.
    pub fn recorded(&self) -> String {
        match self {
            Refusal::Text(TextError::Encode(_) | TextError::Decode(_)) => {
                "text could not be encoded or decoded".to_owned()
            }
            Refusal::Text(TextError::Template(_) | TextError::Refused(_)) => {
                "the chat template failed or refused".to_owned()
            }
            Refusal::Grammar { field, .. } => format!("{field} cannot be followed"),
            Refusal::Json { rule, .. } => format!("a field of the body is not {rule}"),
            Refusal::NoRoute { .. } => "there is no such path".to_owned(),
            _ => status(self).message().to_owned(),
        }
    }

    /// A word for `error.type`.
    pub fn kind(&self) -> &'static str {
        code_name(self.code())
    }
}

/// The longest message of a status, bytes: some quote what was asked for, and messages travel in headers.
const MAX_MESSAGE: usize = 1024;
/// When to try again, milliseconds; gRPC's own name.
const RETRY: &str = "grpc-retry-pushback-ms";

/// The one way from our errors to gRPC.
pub fn status(refusal: &Refusal) -> Status {
    let mut message = refusal.to_string();
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        message.push('…');
    }
    let mut status = Status::new(refusal.code(), message);
    if let Refusal::Spent { spent, .. } = refusal {
        let millis = u64::try_from(spent.retry.as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        status.metadata_mut().insert(RETRY, millis.into());
    }
    status
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn messages_are_cut_between_characters_and_say_when_to_come_again() {
        let long = Refusal::Failed("é".repeat(5000));
        let message = status(&long).message().to_owned();
        assert!(message.ends_with("é…") && (MAX_MESSAGE..MAX_MESSAGE + 8).contains(&message.len()), "{message}");
        let spent = Spent { per_minute: 60, debt: 3, retry: Duration::from_millis(4000) };
        let status = status(&Refusal::Spent { client: "with token \"a\"".to_owned(), spent });
        let words = "client with token \"a\" has taken its 60 tokens a minute and 3 more, try again in 4.0 s";
        assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, words));
        assert_eq!(status.metadata().get(RETRY).unwrap(), "4001");
    }

    #[test]
    fn what_a_template_says_is_for_the_client_only() {
        for error in [TextError::Template("PROMPT".to_owned()), TextError::Refused("PROMPT".to_owned())] {
            let refusal = Refusal::from(error);
            assert!(status(&refusal).message().contains("PROMPT") && !refusal.recorded().contains("PROMPT"));
        }
        assert_eq!(Refusal::Stopping.recorded(), "the server stops");
    }
}

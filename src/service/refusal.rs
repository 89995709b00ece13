//! The errors with which the service refuses or ends a request, and their conversion to gRPC statuses.

use super::meter::Spent;
use crate::engine::request::RequestError;
use crate::host::lifecycle::LifecycleError;
use crate::host::route::RouteError;
use crate::host::source::BuildErrorKind;
use crate::model::grammar::GrammarError;
use crate::model::text::TextError;
use crate::replica::SubmitError;
use tonic::{Code, Status};

/// The reason for which a request is refused, or ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no such model or device.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The replica did not accept the request.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// Text could not be encoded, rendered or decoded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The constraint on the output cannot be compiled or followed.
    #[error("{field}: {source}")]
    Grammar {
        /// The message's field.
        field: &'static str,
        /// The cause.
        source: GrammarError,
    },
    /// A required field is not set.
    #[error("{field} is missing: {rule}")]
    Missing {
        /// The message's field.
        field: &'static str,
        /// The required content of the field.
        rule: &'static str,
    },
    /// The value of a field is not allowed.
    #[error("{field} is {value}, must be {rule}")]
    Value {
        /// The message's field.
        field: &'static str,
        /// The given value.
        value: String,
        /// The allowed values.
        rule: &'static str,
    },
    /// A prompt's text is too long.
    #[error("{field} has {bytes} bytes; the maximum is {most}")]
    LongText {
        /// The message's field.
        field: &'static str,
        /// The length of the given text in bytes.
        bytes: usize,
        /// The maximum length in bytes.
        most: usize,
    },
    /// A Detokenize call has more token ids than the model's context.
    #[error("token_ids has {ids} ids; the maximum is {most}, the model's context")]
    ManyIds {
        /// The number of given ids.
        ids: usize,
        /// The maximum number of ids.
        most: usize,
    },
    /// The request needs a tokenizer, and the model has none.
    #[error("model \"{model}\" has no tokenizer: it serves token ids only, and {field} needs text")]
    NoTokenizer {
        /// The model's name.
        model: String,
        /// The message's field.
        field: &'static str,
    },
    /// The request has tools, and the model's chat template does not support them.
    #[error("the model's chat template does not support tools")]
    NoTools,
    /// The request requires a tool call, and the syntax of the model's tool calls is not known.
    #[error(
        "tool_choice cannot be enforced: the chat template does not tell the syntax of the model's tool calls, so they are \
         neither constrained nor parsed"
    )]
    UnknownCalls,
    /// A field of a JSON body has the wrong type, or a value that cannot be served.
    #[error("{field} is {value}, must be {rule}")]
    Json {
        /// The path of the field, such as `messages[0].content`.
        field: String,
        /// The given value if it is a number; otherwise only its type, because the value may quote a prompt.
        value: String,
        /// The allowed values.
        rule: String,
    },
    /// The body of an HTTP request is not JSON.
    #[error("the body is not JSON: {0}")]
    NotJson(String),
    /// The body of an HTTP request ended before it was whole.
    #[error("the body is incomplete")]
    CutBody,
    /// The endpoint has no such path, or the path does not support the method.
    #[error("there is no {method} {path} here")]
    NoRoute {
        /// The HTTP method.
        method: String,
        /// The path, shortened.
        path: String,
    },
    /// The request comes from a browser page of another origin, and the server has no tokens.
    #[error("a server without tokens answers only requests to localhost and 127.0.0.1, and pages from there")]
    OtherOrigin,
    /// A field of a JSON body that is not supported.
    #[error("{field}{what} is not served")]
    NotServedField {
        /// The path of the field.
        field: String,
        /// The value that is not supported, with a space before it; empty if it is the field.
        what: String,
    },
    /// A subscriber asked for past events, which are not kept.
    #[error("{field} is {value}: past events are not kept; 0 starts with the current pages")]
    Past {
        /// The message's field.
        field: &'static str,
        /// The requested event number.
        value: u64,
    },
    /// A subscriber reads events more slowly than they occur, and has missed some.
    #[error("the stream was read too slowly and has a gap: subscribe again from 0")]
    Gap,
    /// The contract has no model field, and several models are served.
    #[error(
        "this contract has no model field, and several models are served: {served}; a model with a listen address of \
         its own is served alone there"
    )]
    SeveralModels {
        /// The names of the served models, separated by commas.
        served: String,
    },
    /// The endpoint serves a different model only.
    #[error("model \"{model}\" is not served at this address, which serves only \"{only}\"")]
    OtherEndpoint {
        /// The requested model.
        model: String,
        /// The model of the endpoint.
        only: String,
    },
    /// The contract has no model field, and no model is served.
    #[error("no model is served now")]
    NoModel,
    /// A field or value that is not supported yet.
    #[error("{field} is not served yet")]
    NotServed {
        /// The message's field.
        field: &'static str,
    },
    /// The client would exceed its limit of unfinished requests.
    #[error("client {client} has {unfinished} unfinished requests and asks for {asked} more; the limit is {limit}")]
    ClientBusy {
        /// The client whose requests are counted.
        client: String,
        /// The number of its unfinished requests.
        unfinished: u32,
        /// The number of samples of this request.
        asked: u32,
        /// The client's limit.
        limit: u32,
    },
    /// The client has used its tokens per minute.
    #[error(
        "client {client} has used its {} tokens per minute and {} more; try again in {:.1} s",
        spent.per_minute, spent.debt, spent.retry.as_secs_f64()
    )]
    Spent {
        /// The client.
        client: String,
        /// The state of its rate limit.
        spent: Spent,
    },
    /// The method needs a token, and the call has none or several.
    #[error("a token is required: the authorization header is missing or is not a single \"Bearer TOKEN\"")]
    NoToken,
    /// The token is not in the token file.
    #[error("the token is unknown")]
    UnknownToken,
    /// The token does not have the right that the method needs.
    #[error("token \"{name}\" does not have the right \"{right}\", which this method requires")]
    NoRight {
        /// The token's name.
        name: String,
        /// The missing right.
        right: &'static str,
    },
    /// The token does not allow the use of this model.
    #[error("token \"{name}\" does not allow model \"{model}\"")]
    OtherModel {
        /// The token's name.
        name: String,
        /// The requested model.
        model: String,
    },
    /// The memory for incoming messages, or for messages that are being prepared, is used up.
    #[error("incoming messages take {held} bytes, and {bytes} more would exceed the limit of {most}")]
    Crowded {
        /// The bytes in use, of all calls.
        held: usize,
        /// The bytes that this call needs.
        bytes: usize,
        /// The maximum, of all calls together.
        most: usize,
    },
    /// The client's incoming messages exceed its share of the memory for incoming messages.
    #[error(
        "incoming messages of client {client} take {held} bytes, and {bytes} more would exceed its share of {most}"
    )]
    Share {
        /// The client of the call.
        client: String,
        /// The size of all its incoming messages in bytes.
        held: usize,
        /// The bytes that this message needs.
        bytes: usize,
        /// The number of free bytes, which is the maximum for one client.
        most: usize,
    },
    /// A repeated field of a message has too many elements to be decoded.
    #[error("{field} has {elements} elements; the maximum for one message is {most}")]
    Elements {
        /// The name of the field, as `Message.field`.
        field: String,
        /// The number of elements over the whole message.
        elements: usize,
        /// The maximum number of elements.
        most: usize,
    },
    /// The queue of requests that wait for preparation is full.
    #[error("{waiting} requests are waiting to be prepared; the maximum is {most}")]
    Jobs {
        /// The number of waiting requests of all clients.
        waiting: usize,
        /// The capacity of the queue.
        most: usize,
    },
    /// The request lost its place in the queue to a client that has fewer requests waiting.
    #[error(
        "client {client} has most of the waiting requests, and another client needs a place in the queue of {most}"
    )]
    Displaced {
        /// The client of the request.
        client: String,
        /// The capacity of the queue, over all clients.
        most: usize,
    },
    /// A message declares a length above the limit.
    #[error("a message of {bytes} bytes exceeds the limit of {most}")]
    LongMessage {
        /// The declared length in bytes.
        bytes: usize,
        /// The maximum length in bytes.
        most: usize,
    },
    /// The message of a call did not arrive in time.
    #[error("the message did not arrive within {seconds:.1} s")]
    NoMessage {
        /// The time limit in seconds.
        seconds: f64,
    },
    /// The deadline passed while the request ran or waited.
    #[error("the deadline passed after {output_tokens} tokens")]
    Deadline {
        /// The number of tokens that were delivered.
        output_tokens: u32,
    },
    /// The client reads the stream more slowly than tokens are generated.
    #[error("the stream was read too slowly: its buffer of {buffered} events is full")]
    Slow {
        /// The number of events that are buffered.
        buffered: usize,
    },
    /// The device or the engine failed.
    #[error("the generation failed: {0}")]
    Failed(String),
    /// The server is stopping, and its grace period is over.
    #[error("the server is stopping")]
    Stopping,
    /// The model was unloaded while the request ran or waited.
    #[error("model \"{model}\" has been unloaded")]
    Unloaded {
        /// The model's name.
        model: String,
    },
    /// The server serves none of the models that the token allows.
    #[error("none of the models that token \"{name}\" allows is served")]
    NoneOfIts {
        /// The token's name.
        name: String,
    },
    /// A load or unload of a model failed.
    #[error("{}", chain(.0))]
    Lifecycle(LifecycleError),
}

/// Formats an error with its causes. The last cause usually says what the client can correct.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some errors contain the text of their cause.
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
    /// Returns the gRPC code.
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

    /// Returns the refusal with the field names of another contract; `names` maps our names to the other contract's.
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

    /// Returns the field that caused the refusal, if a single field did.
    pub fn field(&self) -> Option<&str> {
        match self {
            Refusal::Missing { field, .. }
            | Refusal::Value { field, .. }
            | Refusal::LongText { field, .. }
            | Refusal::NoTokenizer { field, .. }
            | Refusal::NotServed { field }
            | Refusal::Grammar { field, .. }
            | Refusal::Submit(SubmitError::Request(RequestError::Value { field, .. })) => Some(field),
            Refusal::Json { field, .. } | Refusal::NotServedField { field, .. } => Some(field),
            _ => None,
        }
    }

    /// Returns the message for traces. It leaves out errors of chat templates, which may quote the prompt.
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

    /// Returns the value of the span attribute `error.type`.
    pub fn kind(&self) -> &'static str {
        code_name(self.code())
    }
}

/// The maximum length of a status message in bytes. Some messages quote the request, and messages are sent in headers.
const MAX_MESSAGE: usize = 1024;
/// gRPC's metadata key for the time in milliseconds after which a client should try again.
const RETRY: &str = "grpc-retry-pushback-ms";

/// Converts a refusal to a gRPC status.
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

/// Returns a code's name as the gRPC specification writes it.
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
        let words = "client with token \"a\" has used its 60 tokens per minute and 3 more; try again in 4.0 s";
        assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, words));
        assert_eq!(status.metadata().get(RETRY).unwrap(), "4001");
    }

    #[test]
    fn what_a_template_says_is_for_the_client_only() {
        for error in [TextError::Template("PROMPT".to_owned()), TextError::Refused("PROMPT".to_owned())] {
            let refusal = Refusal::from(error);
            assert!(status(&refusal).message().contains("PROMPT") && !refusal.recorded().contains("PROMPT"));
        }
        assert_eq!(Refusal::Stopping.recorded(), "the server is stopping");
    }
}

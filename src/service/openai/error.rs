//! Converts refusals to the errors of OpenAI's API: an HTTP status and `{"error": {"message", "type", "param",
//! "code"}}`.

use super::fields::BODY;
use crate::engine::request::RequestError;
use crate::host::route::RouteError;
use crate::replica::SubmitError;
use crate::service::refusal::{Refusal, status};
use axum::http::header::{self, HeaderValue};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tonic::Code;

/// Pairs of our field name and OpenAI's.
const NAMES: [(&str, &str); 24] = [
    ("sampling.n", "n"),
    ("stopping.strings", "stop"),
    ("stopping.ids", "stop_token_ids"),
    ("stop_ids", "stop_token_ids"),
    ("constraint", "response_format"),
    ("constraint.kind", "response_format"),
    ("constraint.json_schema", "response_format"),
    ("constraint.json_object", "response_format"),
    ("constraint.regex", "structured_outputs.regex"),
    ("constraint.grammar", "structured_outputs.grammar"),
    ("constraint.choice", "structured_outputs.choice"),
    ("constraint.structural_tag", "structured_outputs.structural_tag"),
    ("prompt.text", "prompt"),
    ("prompt.tokens", "prompt"),
    ("prompt.chat", "messages"),
    ("chat.messages", "messages"),
    ("chat.tools", "tools"),
    ("chat.messages.tool_calls.arguments", "messages.tool_calls.function.arguments"),
    ("chat.template_arguments", "chat_template_kwargs"),
    ("output.text", "model"),
    ("logprobs", "top_logprobs"),
    ("prompt_logprobs", "logprobs"),
    ("inputs", "input"),
    ("inputs.text", "input"),
];

/// Returns the HTTP status for a gRPC code, and the `type` and `code` of OpenAI's error.
fn words(code: Code) -> (StatusCode, &'static str, Option<&'static str>) {
    const INVALID: &str = "invalid_request_error";
    match code {
        Code::InvalidArgument | Code::FailedPrecondition => (StatusCode::BAD_REQUEST, INVALID, None),
        Code::OutOfRange => (StatusCode::PAYLOAD_TOO_LARGE, INVALID, Some("request_too_large")),
        Code::Unimplemented => (StatusCode::BAD_REQUEST, INVALID, Some("unsupported_parameter")),
        Code::NotFound => (StatusCode::NOT_FOUND, INVALID, Some("not_found")),
        Code::AlreadyExists | Code::Aborted => (StatusCode::CONFLICT, INVALID, Some("conflict")),
        Code::Unauthenticated => (StatusCode::UNAUTHORIZED, "authentication_error", Some("invalid_api_key")),
        Code::PermissionDenied => (StatusCode::FORBIDDEN, "permission_error", Some("insufficient_permissions")),
        Code::ResourceExhausted => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("rate_limit_exceeded")),
        Code::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, "timeout_error", Some("timeout")),
        Code::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("unavailable")),
        // The client is gone, and so nobody reads it.
        Code::Cancelled => (StatusCode::REQUEST_TIMEOUT, INVALID, Some("cancelled")),
        Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => {
            (StatusCode::INTERNAL_SERVER_ERROR, "server_error", None)
        }
    }
}

/// An error in OpenAI's format.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    body: Value,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl ApiError {
    /// `{"error": …}`.
    pub(super) fn body(&self) -> &Value {
        &self.body
    }
}

fn error(message: &str, words: (StatusCode, &str, Option<&str>), param: Option<&str>) -> ApiError {
    let (status, kind, code) = words;
    let body = json!({"error": {"message": message, "type": kind, "param": param, "code": code}});
    ApiError { status, body, headers: Vec::new() }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let refusal = refusal.renamed(&NAMES);
        let mut words = words(refusal.code());
        let mut param = refusal.field().filter(|field| *field != BODY);
        let mut headers = Vec::new();
        // The message as gRPC has it, cut to the same length.
        let mut message = status(&refusal).message().to_owned();
        match &refusal {
            Refusal::Route(RouteError::UnknownModel { .. } | RouteError::NotLoaded { .. }) => {
                (words.2, param) = (Some("model_not_found"), Some("model"));
            }
            Refusal::Submit(SubmitError::Request(RequestError::ContextExceeded { prompt, output, context })) => {
                let code = "context_length_exceeded";
                words.2 = Some(code);
                // Clients tell this error from others by such words: LiteLLM by the first ones, LangChain by the code.
                message = format!(
                    "this model's maximum context length is {context} tokens: {prompt} prompt tokens and {output} to \
                     generate exceed it ({code})"
                );
            }
            Refusal::NoMessage { .. } => words.0 = StatusCode::REQUEST_TIMEOUT,
            Refusal::NoRoute { .. } => words.2 = Some("unknown_url"),
            Refusal::NoTools => param = Some("tools"),
            Refusal::UnknownCalls => param = Some("tool_choice"),
            Refusal::NoToken | Refusal::UnknownToken => {
                headers.push((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
            }
            Refusal::Spent { spent, .. } => {
                headers.push((header::RETRY_AFTER, HeaderValue::from(spent.retry.as_secs().saturating_add(1))));
            }
            _ => {}
        }
        ApiError { headers, ..error(&message, words, param) }
    }
}

impl From<tonic::Status> for ApiError {
    /// The error with which a stream ends after it has begun.
    fn from(status: tonic::Status) -> ApiError {
        error(status.message(), words(status.code()), None)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.body.to_string();
        let mut response = (self.status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
        response.headers_mut().extend(self.headers);
        response
    }
}

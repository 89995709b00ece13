//! Access from pages in browsers: requests of other origins are refused, and browsers are told which pages may read
//! answers (CORS).
//! Not here: tokens (`service::auth`).

use super::OpenAi;
use crate::service::admin;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// The time for which a browser may cache the answer to a preflight request, in seconds.
const KEPT: &str = "600";

/// Returns whether an origin is a page of this machine.
fn is_local(origin: &HeaderValue) -> bool {
    let host = origin.to_str().ok().and_then(|origin| Some(origin.split_once("://")?.1));
    host.is_some_and(admin::is_loopback)
}

/// Returns whether a request names this machine as its host and does not come from a page of another origin.
pub(super) fn from_here<B>(request: &Request<B>) -> bool {
    let mut origins = request.headers().get_all(header::ORIGIN).iter();
    admin::names_loopback(request.uri(), request.headers()) && origins.all(is_local)
}

impl OpenAi {
    /// Returns the origin of a request if its page may read the answer: pages of this machine always may, others only
    /// if the server has tokens, which browsers do not send by themselves.
    fn origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let (Some(origin), None) = (origins.next(), origins.next()) else { return None };
        (self.authentication.has_tokens() || is_local(origin)).then(|| origin.clone())
    }
}

/// Answers preflight requests, and adds the CORS headers to other answers.
pub(super) async fn share(State(openai): State<Arc<OpenAi>>, request: Request, next: Next) -> Response {
    let origin = openai.origin(request.headers());
    let preflight = request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = match (request.method() == Method::OPTIONS && preflight, &origin) {
        (true, Some(_)) => (StatusCode::NO_CONTENT, Body::empty()).into_response(),
        _ => next.run(request).await,
    };
    let Some(origin) = origin else { return response };
    let mut set = |name: HeaderName, value: HeaderValue| response.headers_mut().insert(name, value);
    set(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    set(header::VARY, HeaderValue::from_name(header::ORIGIN));
    if preflight {
        set(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        set(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(KEPT));
        wanted.map(|wanted| set(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted));
    }
    set(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after, traceparent"));
    response
}

//! What one client may cost the others, each with a name: of a request, of a call, of a connection. What a message says
//! is bounded when it is read; that it comes at all, and how many come at once, by a layer that every call passes.
//! Deliberately absent: limits that the operator gives to clients (`clients`), what the engine can run.

use super::proto;
use super::refusal::{Refusal, status};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use proto::generate_request::Prompt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// Stop strings of a request: each is looked for in every piece of text.
pub const MAX_STOP_STRINGS: usize = 16;
/// Bytes of each: as many may be held back from a stream.
pub const MAX_STOP_BYTES: usize = 1024;
/// Messages of a chat: a template walks over all of them, some more than once.
pub const MAX_CHAT_MESSAGES: usize = 4096;
/// Bytes of an id, a name, a selector, a salt: they are kept, logged and told again.
pub const MAX_NAME_BYTES: usize = 256;
/// Ids of one call that ends requests: every replica is asked for each.
pub const MAX_ABORTS: usize = 1024;
/// Calls that are open at once on a connection; a client keeps further ones back itself, or they are reset.
pub const STREAMS: u32 = 200;
/// Bytes of a call's headers as HTTP/2 counts them; more are answered with status 431.
pub const HEADER_BYTES: u32 = 16 << 10;
/// From a connection's beginning until it speaks HTTP/2 (with TLS: that long until it is encrypted, and again).
pub const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// A connection on which nothing has come for as long is asked whether anybody is there.
pub const KEEPALIVE: Duration = Duration::from_secs(30);
/// As long an answer to that is waited for; whoever gives none is cut off.
pub const KEEPALIVE_WAIT: Duration = Duration::from_secs(20);
/// TLS handshakes at once; further connections wait for theirs.
pub const HANDSHAKES: usize = 256;
/// From a call's beginning until its message is there.
pub const MESSAGE_WAIT: Duration = Duration::from_secs(30);
/// Messages of the largest size that may be coming in at once, or as many bytes of smaller ones.
pub const MESSAGES_COMING: usize = 16;

/// Services whose calls are conversations: only the first message is waited for.
const CONVERSATIONS: &str = "/grpc.reflection.";

/// No more stop strings than are looked for, none that is empty or too long.
pub fn stop_strings(strings: &[String]) -> Result<(), Refusal> {
    let refuse = |value: String, rule| Err(Refusal::Value { field: "stopping.strings", value, rule });
    if strings.len() > MAX_STOP_STRINGS {
        let rule = const {
            assert!(MAX_STOP_STRINGS == 16, "as the rule says");
            "at most 16 strings"
        };
        return refuse(format!("{} strings", strings.len()), rule);
    }
    if strings.iter().any(String::is_empty) {
        return refuse("\"\"".to_owned(), "without empty strings");
    }
    match strings.iter().map(String::len).max() {
        Some(most) if most > MAX_STOP_BYTES => {
            let rule = const {
                assert!(MAX_STOP_BYTES == 1024, "as the rule says");
                "strings of at most 1024 bytes"
            };
            refuse(format!("a string of {most} bytes"), rule)
        }
        _ => Ok(()),
    }
}

/// A name that a request gives.
pub fn name(field: &'static str, name: &str) -> Result<(), Refusal> {
    if name.len() <= MAX_NAME_BYTES {
        return Ok(());
    }
    let rule = const {
        assert!(MAX_NAME_BYTES == 256, "as the rule says");
        "at most 256 bytes"
    };
    Err(Refusal::Value { field, value: format!("{} bytes", name.len()), rule })
}

/// How many requests one call ends.
pub fn aborts(ids: usize) -> Result<(), Refusal> {
    if ids <= MAX_ABORTS {
        return Ok(());
    }
    let rule = const {
        assert!(MAX_ABORTS == 1024, "as the rule says");
        "at most 1024 ids"
    };
    Err(Refusal::Value { field: "request_ids", value: format!("{ids} ids"), rule })
}

/// Before anything is done with it: a prompt of no more than `most` bytes of text, names that are names.
pub fn request(message: &proto::GenerateRequest, most: usize) -> Result<(), Refusal> {
    for (field, text) in [
        ("request_id", &message.request_id),
        ("model", &message.model),
        ("device", &message.device),
        ("cache_salt", &message.cache_salt),
    ] {
        name(field, text)?;
    }
    match &message.prompt {
        Some(Prompt::Text(text)) => prompt("prompt.text", text.len(), most),
        Some(Prompt::Chat(messages)) => chat(messages, most),
        Some(Prompt::Tokens(_)) | None => Ok(()),
    }
}

/// A conversation, all its text together.
pub fn chat(chat: &proto::Chat, most: usize) -> Result<(), Refusal> {
    let messages = chat.messages.len();
    if messages > MAX_CHAT_MESSAGES {
        let rule = const {
            assert!(MAX_CHAT_MESSAGES == 4096, "as the rule says");
            "at most 4096 messages"
        };
        return Err(Refusal::Value { field: "chat.messages", value: format!("{messages} messages"), rule });
    }
    let bytes = chat.messages.iter().map(|message| message.role.len() + message.content.len()).sum();
    prompt("prompt.chat", bytes, most)
}

/// Text of a prompt: how long encoding takes is for nobody but the operator to say.
pub fn prompt(field: &'static str, bytes: usize, most: usize) -> Result<(), Refusal> {
    if bytes <= most { Ok(()) } else { Err(Refusal::LongText { field, bytes, most }) }
}

/// Has every call's message come in time and within what there is room for.
#[derive(Clone, Debug)]
pub struct Arrival {
    wait: Duration,
    room: Arc<Room>,
}

/// Bytes that were received of messages that are not whole yet.
#[derive(Debug)]
struct Room {
    held: AtomicUsize,
    most: usize,
}

impl Arrival {
    /// Within `wait`, and [`MESSAGES_COMING`] of `max_message_bytes` at once.
    pub fn new(wait: Duration, max_message_bytes: usize) -> Arrival {
        let most = max_message_bytes.saturating_mul(MESSAGES_COMING);
        Arrival { wait, room: Arc::new(Room { held: AtomicUsize::new(0), most }) }
    }
}

impl<S> Layer<S> for Arrival {
    type Service = Awaited<S>;

    fn layer(&self, inner: S) -> Awaited<S> {
        Awaited { arrival: self.clone(), inner }
    }
}

/// A service behind [`Arrival`].
#[derive(Clone, Debug)]
pub struct Awaited<S> {
    arrival: Arrival,
    inner: S,
}

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for Awaited<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        let conversation = request.uri().path().starts_with(CONVERSATIONS);
        let Arrival { wait, room } = &self.arrival;
        let (wait, room) = (*wait, Arc::clone(room));
        let until = Instant::now() + wait;
        let coming = |body| Coming { body, wait, until: Some(until), timer: None, conversation, room, held: 0 };
        self.inner.call(request.map(|body| Body::new(coming(body))))
    }
}

/// A body whose message is waited for.
struct Coming {
    body: Body,
    wait: Duration,
    /// `None`: it may take as long as it likes.
    until: Option<Instant>,
    /// Made when there is something to wait for; most messages are there at once.
    timer: Option<Pin<Box<Sleep>>>,
    /// Many small messages instead of one: once the first has come the others may take their time.
    conversation: bool,
    room: Arc<Room>,
    held: usize,
}

impl Coming {
    /// Room for what has come.
    fn hold(&mut self, bytes: usize) -> Result<(), Refusal> {
        let most = self.room.most;
        let held = self.room.held.fetch_add(bytes, Ordering::Relaxed);
        self.held += bytes;
        if held.saturating_add(bytes) > most { Err(Refusal::Crowded { held, bytes, most }) } else { Ok(()) }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.room.held.fetch_sub(self.held, Ordering::Relaxed);
    }
}

impl http_body::Body for Coming {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                if self.conversation {
                    self.until = None;
                    return Poll::Ready(Some(Ok(frame)));
                }
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                match self.hold(bytes) {
                    Ok(()) => Poll::Ready(Some(Ok(frame))),
                    Err(refusal) => Poll::Ready(Some(Err(status(&refusal)))),
                }
            }
            Poll::Pending => {
                let Some(until) = self.until else {
                    return Poll::Pending;
                };
                let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
                if timer.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                let refusal = Refusal::NoMessage { seconds: self.wait.as_secs_f64() };
                Poll::Ready(Some(Err(status(&refusal))))
            }
            ended => ended,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

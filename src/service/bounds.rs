//! What one client may cost the others, each with a name: of a request, of a call, of a connection. What a message says
//! is bounded when it is read; that it comes at all, and how many come at once, by a layer that every call passes.
//! Deliberately absent: limits that the operator gives to clients (`clients`), what the engine can run.

use super::proto;
use super::refusal::{Refusal, status};
use super::wire;
use crate::engine::request::MAX_LOGIT_BIAS;
use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body as _, Frame, SizeHint};
use proto::generate_request::Prompt;
use std::collections::VecDeque;
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
/// Stop ids of a request as it lists them, the same ones more than once.
pub const MAX_STOP_IDS: usize = 1024;
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
/// Connections at once that are being encrypted or have not said yet that they speak HTTP/2: one more closes the oldest
/// that has said nothing, of the peer that has most of them.
pub const HANDSHAKES: usize = 256;
/// Open files that connections leave alone: devices, checkpoints, logs, and what libraries open.
pub const FILES_KEPT: u32 = 256;
/// From a call's beginning until its message is there.
pub const MESSAGE_WAIT: Duration = Duration::from_secs(30);
/// Messages of the largest size that may be coming in at once, or as many bytes of smaller ones.
pub const MESSAGES_COMING: usize = 16;

/// A message of this part of the largest size is a small one: a part of the room as large as this is kept for those.
const SMALL_MESSAGE: usize = 256;
const SMALL_ROOM: usize = 4;

/// Bytes of a message of such a conversation: names of services and files.
pub const CONVERSATION_BYTES: usize = 64 << 10;

/// Services whose calls are conversations: only the first message is waited for, and each that has begun.
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
    let biases = message.sampling.as_ref().map_or(0, |sampling| sampling.logit_bias.len());
    if biases > MAX_LOGIT_BIAS {
        let rule = const {
            assert!(MAX_LOGIT_BIAS == 300, "as the rule says");
            "at most 300 entries"
        };
        return Err(Refusal::Value { field: "logit_bias", value: biases.to_string(), rule });
    }
    // Of different ones there may be fewer, as the engine says.
    let ids = message.stopping.as_ref().map_or(0, |stopping| stopping.ids.len());
    if ids > MAX_STOP_IDS {
        let rule = const {
            assert!(MAX_STOP_IDS == 1024, "as the rule says");
            "at most 1024 ids"
        };
        return Err(Refusal::Value { field: "stopping.ids", value: format!("{ids} ids"), rule });
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

/// Ids to be decoded: no more than a model can have drawn.
pub fn decoded(ids: usize, context: usize) -> Result<(), Refusal> {
    if ids <= context { Ok(()) } else { Err(Refusal::ManyIds { ids, most: context }) }
}

/// Has every call's message come in time, whole, and within what there is room for, before the call is begun. Nothing is
/// reserved for what a message says that it is long: its bytes are kept as they come, and only the first message of a
/// call, as all our methods take one.
#[derive(Clone, Debug)]
pub struct Arrival {
    wait: Duration,
    /// Of one message.
    most: usize,
    room: Arc<Room>,
}

/// Bytes that were received of messages that are not read yet.
#[derive(Debug)]
struct Room {
    held: AtomicUsize,
    most: usize,
    /// Messages of so many bytes find room where large ones do not.
    small: usize,
}

/// Some of them.
#[derive(Debug)]
struct Held {
    room: Arc<Room>,
    bytes: usize,
}

impl Held {
    /// Room for what has come.
    fn more(&mut self, bytes: usize) -> Result<(), Refusal> {
        let Room { most, small, .. } = *self.room;
        let held = self.room.held.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        let most = if self.bytes <= small { most.saturating_add(most / SMALL_ROOM) } else { most };
        if held.saturating_add(bytes) > most { Err(Refusal::Crowded { held, bytes, most }) } else { Ok(()) }
    }

    fn give_back(&mut self) {
        self.room.held.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Arrival {
    /// Within `wait`, and [`MESSAGES_COMING`] of `max_message_bytes` at once.
    pub fn new(wait: Duration, max_message_bytes: usize) -> Arrival {
        let most = max_message_bytes.saturating_mul(MESSAGES_COMING);
        let room = Arc::new(Room { held: AtomicUsize::new(0), most, small: max_message_bytes / SMALL_MESSAGE });
        Arrival { wait, most: max_message_bytes, room }
    }

    fn held(&self) -> Held {
        Held { room: Arc::clone(&self.room), bytes: 0 }
    }

    /// The body of a call with one message, once it has ended. What follows its first message is looked at and not kept.
    async fn whole(&self, path: &str, mut body: Body) -> Result<Whole, Status> {
        let mut messages = Messages::new(self.most);
        let mut whole = Whole { parts: VecDeque::new(), held: self.held() };
        let mut first = true;
        while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let Ok(mut data) = frame?.into_data() else { continue };
            while !data.is_empty() {
                let before = data.len();
                let told = messages.take(&mut data, first);
                if first {
                    whole.held.more(before - data.len()).map_err(|refusal| status(&refusal))?;
                }
                match told {
                    None => {}
                    Some(Told::Message(parts)) if std::mem::take(&mut first) => {
                        let bytes = parts.iter().skip(1).map(|part| &part[..]);
                        wire::schema().check(path, bytes).map_err(|refusal| status(&refusal))?;
                        whole.parts = parts;
                    }
                    Some(Told::Message(_)) => {}
                    // Whoever reads it says what is wrong.
                    Some(Told::Refused(prefix)) => {
                        whole.parts.push_back(prefix);
                        return Ok(whole);
                    }
                }
            }
        }
        // As above; the length of a message that is cut is not told, so that nobody makes room for it.
        whole.parts.extend(messages.rest());
        Ok(whole)
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

impl<S> Service<http::Request<Body>> for Awaited<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let arrival = self.arrival.clone();
        let wait = arrival.wait;
        if request.uri().path().starts_with(CONVERSATIONS) {
            let coming = |body| Conversation {
                body,
                wait,
                until: Some(Instant::now() + wait),
                timer: None,
                messages: Messages::new(arrival.most.min(CONVERSATION_BYTES)),
                data: Bytes::new(),
                parts: VecDeque::new(),
                held: arrival.held(),
            };
            return Box::pin(self.inner.call(request.map(|body| Body::new(coming(body)))));
        }
        // The one that was said to be ready is called; its clone takes its place.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let whole = tokio::time::timeout(wait, arrival.whole(parts.uri.path(), body)).await;
            let late = |_| Err(status(&Refusal::NoMessage { seconds: wait.as_secs_f64() }));
            match whole.unwrap_or_else(late) {
                Ok(whole) => inner.call(http::Request::from_parts(parts, Body::new(whole))).await,
                Err(status) => Ok(status.into_http()),
            }
        })
    }
}

/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Bytes of a message that are kept together: a long one is a list of such blocks, so that it never has to move.
const BLOCK: usize = 64 << 10;

/// Cuts a stream of bytes into messages.
#[derive(Debug)]
struct Messages {
    /// Bytes of one.
    most: usize,
    prefix: [u8; PREFIX],
    /// Bytes of the prefix that have come.
    begun: usize,
    /// Bytes of the message that have not.
    missing: usize,
    /// Those that have, the last of which may grow.
    blocks: VecDeque<BytesMut>,
}

/// What has come.
#[derive(Debug)]
enum Told {
    /// A message: its prefix, then the rest.
    Message(VecDeque<Bytes>),
    /// A prefix that is none, or of a message that is too long.
    Refused(Bytes),
}

impl Messages {
    fn new(most: usize) -> Messages {
        Messages { most, prefix: [0; PREFIX], begun: 0, missing: 0, blocks: VecDeque::new() }
    }

    /// Whether the middle of a message is waited for.
    fn under_way(&self) -> bool {
        self.begun > 0
    }

    /// Takes bytes up to the end of a message, or all. What is not kept is counted only.
    fn take(&mut self, data: &mut Bytes, keep: bool) -> Option<Told> {
        if self.begun < PREFIX {
            let taken = data.split_to(data.len().min(PREFIX - self.begun));
            self.prefix[self.begun..][..taken.len()].copy_from_slice(&taken);
            self.begun += taken.len();
            if self.begun < PREFIX {
                return None;
            }
            let [compressed, length @ ..] = self.prefix;
            self.missing = u32::from_be_bytes(length) as usize;
            if compressed > 1 || self.missing > self.most {
                return Some(Told::Refused(Bytes::copy_from_slice(&self.prefix)));
            }
            if keep && data.len() >= self.missing {
                // It is all there: as it is, and nothing is copied.
                let parts = VecDeque::from([Bytes::copy_from_slice(&self.prefix), data.split_to(self.missing)]);
                (self.begun, self.missing) = (0, 0);
                return Some(Told::Message(parts));
            }
        }
        // Copied: a few bytes of a frame would keep the whole buffer that the frame was read into.
        while self.missing > 0 && !data.is_empty() {
            let part = data.len().min(self.missing);
            if !keep {
                data.advance(part);
                self.missing -= part;
                continue;
            }
            if self.blocks.back().is_none_or(|block| block.len() == BLOCK) {
                self.blocks.push_back(BytesMut::new());
            }
            if let Some(block) = self.blocks.back_mut() {
                let part = data.split_to(part.min(BLOCK - block.len()));
                block.extend_from_slice(&part);
                self.missing -= part.len();
            }
        }
        if self.missing > 0 {
            return None;
        }
        self.begun = 0;
        let prefix = Bytes::copy_from_slice(&self.prefix);
        let blocks = std::mem::take(&mut self.blocks);
        Some(Told::Message(std::iter::once(prefix).chain(blocks.into_iter().map(BytesMut::freeze)).collect()))
    }

    /// Where bytes end in the middle of a message: something that is no message either.
    fn rest(&self) -> Option<Bytes> {
        self.under_way().then(|| Bytes::copy_from_slice(&self.prefix[..self.begun.min(PREFIX - 1)]))
    }
}

/// A body that has come.
#[derive(Debug)]
struct Whole {
    parts: VecDeque<Bytes>,
    /// Until it is read.
    held: Held,
}

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.parts.pop_front().map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.parts.iter().map(|part| part.len() as u64).sum())
    }
}

/// A body of many messages, each of which is handed on when it is whole. The first is waited for, and each that has
/// begun; between them as long as the client likes.
struct Conversation {
    body: Body,
    wait: Duration,
    /// `None`: it may take as long as it likes.
    until: Option<Instant>,
    /// Made when there is something to wait for; most messages are there at once.
    timer: Option<Pin<Box<Sleep>>>,
    messages: Messages,
    /// Has come and was not looked at.
    data: Bytes,
    /// Of a message that is whole.
    parts: VecDeque<Bytes>,
    held: Held,
}

impl http_body::Body for Conversation {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if let Some(part) = this.parts.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(part))));
            }
            if !this.data.is_empty() {
                let before = this.data.len();
                let told = this.messages.take(&mut this.data, true);
                let taken = before - this.data.len();
                if told.is_none() {
                    if let Err(refusal) = this.held.more(taken) {
                        return Poll::Ready(Some(Err(status(&refusal))));
                    }
                    this.until.get_or_insert_with(|| Instant::now() + this.wait);
                    continue;
                }
                this.held.give_back();
                (this.until, this.timer) = (None, None);
                match told {
                    Some(Told::Message(parts)) => this.parts = parts,
                    Some(Told::Refused(prefix)) if prefix[0] > 1 => this.parts.push_back(prefix),
                    _ => {
                        let (bytes, most) = (this.messages.missing, this.messages.most);
                        return Poll::Ready(Some(Err(status(&Refusal::LongMessage { bytes, most }))));
                    }
                }
                continue;
            }
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => this.data = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                Poll::Ready(None) => {
                    let rest = std::mem::replace(&mut this.messages, Messages::new(0)).rest();
                    return Poll::Ready(rest.map(|rest| Ok(Frame::data(rest))));
                }
                Poll::Ready(error) => return Poll::Ready(error),
                Poll::Pending => {
                    let Some(until) = this.until else {
                        return Poll::Pending;
                    };
                    let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
                    if timer.as_mut().poll(context).is_pending() {
                        return Poll::Pending;
                    }
                    let refusal = Refusal::NoMessage { seconds: this.wait.as_secs_f64() };
                    return Poll::Ready(Some(Err(status(&refusal))));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(bytes: &[u8]) -> Vec<u8> {
        let mut framed = vec![0];
        framed.extend((bytes.len() as u32).to_be_bytes());
        framed.extend(bytes);
        framed
    }

    fn joined(told: Option<Told>) -> Vec<u8> {
        match told {
            Some(Told::Message(parts)) => parts.into_iter().flatten().collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn messages_come_out_whole_however_they_come_in() {
        let long: Vec<u8> = (0..200_000u32).map(|number| number as u8).collect();
        for step in [1, 3, 5, 4096, 70_000, usize::MAX] {
            let mut messages = Messages::new(long.len());
            for expected in [&b""[..], b"abc", &long, b"x"] {
                let bytes = framed(expected);
                let mut told = None;
                for part in bytes.chunks(step.min(bytes.len())) {
                    assert!(told.is_none(), "more than was sent");
                    let mut part = Bytes::copy_from_slice(part);
                    told = messages.take(&mut part, true);
                    assert!(part.is_empty());
                }
                assert_eq!(joined(told), bytes);
                assert!(!messages.under_way() && messages.rest().is_none());
            }
        }
    }

    #[test]
    fn what_a_message_says_that_it_is_long_makes_no_room() {
        let mut messages = Messages::new(16 << 20);
        let mut begun = Bytes::from_static(&[0, 1, 0, 0, 0, 7]);
        assert!(messages.take(&mut begun, true).is_none());
        let kept: usize = messages.blocks.iter().map(BytesMut::capacity).sum();
        assert!(kept <= 64, "{kept} bytes are kept for one that has come");
        for _ in 0..1 << 10 {
            assert!(messages.take(&mut Bytes::from_static(&[7; 100]), true).is_none());
        }
        let kept: usize = messages.blocks.iter().map(BytesMut::capacity).sum();
        assert!(kept <= 2 * 102_401, "{kept} bytes are kept for 102401");
        // What ends in its middle is told without its length.
        assert_eq!(messages.rest().unwrap().len(), PREFIX - 1);
        // What is not kept takes nothing.
        let mut messages = Messages::new(16 << 20);
        assert!(messages.take(&mut Bytes::from(vec![0, 1, 0, 0, 0, 7, 7, 7]), false).is_none());
        assert!(messages.blocks.is_empty());
        for wrong in [[2, 0, 0, 0, 1], [0, 1, 0, 0, 1]] {
            let told = Messages::new(16 << 20).take(&mut Bytes::copy_from_slice(&wrong), true);
            assert!(matches!(told, Some(Told::Refused(prefix)) if prefix[..] == wrong));
        }
    }
}

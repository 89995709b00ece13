//! The bounds on what one client may cost the others, each as a named constant: per request, per call, per connection.
//! The fields of a decoded message are checked by functions. The arrival of messages is bounded by the layer
//! [`Arrival`], which every call passes: how long a message may take, how many bytes of messages may be on their way,
//! and how many elements a message may have before it is decoded.
//! Not here: limits that the operator sets for clients (`clients`), and what the engine can run.

use super::auth::Identity;
use super::clients::{Client, Clients};
use super::crowd::OpenCall;
use super::proto;
use super::refusal::{Refusal, status};
use super::tls::ConnectInfo;
use super::wire;
use crate::engine::request::MAX_LOGIT_BIAS;
use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body as _, Frame, SizeHint};
use proto::generate_request::Prompt;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// The most stop strings of a request. Each one is searched for in every piece of text.
pub const MAX_STOP_STRINGS: usize = 16;
/// The most bytes of one stop string. A stream may hold back as many bytes of text.
pub const MAX_STOP_BYTES: usize = 1024;
/// The most messages of a chat. A template iterates over all of them, possibly several times.
pub const MAX_CHAT_MESSAGES: usize = 4096;
/// The most tools of a chat. Templates iterate over them, and constraints have a rule for each.
pub const MAX_CHAT_TOOLS: usize = 1024;
/// The most bytes of an id, name, selector or salt, which are kept, logged and returned.
pub const MAX_NAME_BYTES: usize = 256;
/// The most request ids of one Abort call. Every replica is searched for each of them.
pub const MAX_ABORTS: usize = 1024;
/// The most stop ids that a request lists, duplicates included.
pub const MAX_STOP_IDS: usize = 1024;
/// The most elements of a JSON body: members of objects and lists. One takes up to 150 bytes of memory once parsed.
pub const MAX_JSON_ELEMENTS: usize = 1 << 20;
/// The most objects and lists of a JSON body: several for each message, call and tool of the largest chat.
pub const MAX_JSON_CONTAINERS: usize = 1 << 16;
/// The maximum number of prompt tokens, summed over all choices, that a completion repeats (`echo`) with log
/// probabilities.
pub const MAX_ECHO_TOKENS: usize = 1 << 16;
/// The maximum number of bytes of prompts, summed over all choices, that a completion repeats (`echo`).
pub const MAX_ECHO_BYTES: usize = 16 << 20;
/// The most open calls of a connection. HTTP/2 clients hold further calls back; calls beyond it are reset.
pub const STREAMS: u32 = 200;
/// The most bytes of a call's headers, as HTTP/2 counts them. More are answered with HTTP status 431.
pub const HEADER_BYTES: u32 = 16 << 10;
/// The time from accepting a connection until it speaks HTTP/2. With TLS the handshake has this time first, and HTTP/2
/// has it again.
pub const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// The time without received bytes after which a connection is sent a ping.
pub const KEEPALIVE: Duration = Duration::from_secs(30);
/// The time in which a ping must be answered. A connection that does not answer is closed.
pub const KEEPALIVE_WAIT: Duration = Duration::from_secs(20);
/// The most connections in a TLS handshake, or connected but not yet known to speak HTTP/2. A further one closes one of
/// them: of the peer that has most, the oldest that has sent nothing, else the oldest.
pub const HANDSHAKES: usize = 256;
/// The open files that connections leave to everything else: devices, checkpoints, logs and libraries. Those of worker
/// processes are counted separately (`actors::workers::files`).
pub const FILES_KEPT: u32 = 256;
/// The time from the beginning of a call until its message is complete.
pub const MESSAGE_WAIT: Duration = Duration::from_secs(30);
/// The number of messages of the largest size whose bytes may be on their way at once, over all clients.
pub const MESSAGES_COMING: usize = 16;

/// A message of at most 1/`SMALL_MESSAGE` of the largest size is small.
const SMALL_MESSAGE: usize = 256;
/// Small messages may use 1/`SMALL_ROOM` more bytes than all others, so that large ones do not keep them out.
const SMALL_ROOM: usize = 4;

/// The most bytes of one message of a conversation, which holds names of services and files.
pub const CONVERSATION_BYTES: usize = 64 << 10;

/// The path prefix of services whose calls are conversations of many messages. Only the first message, and the rest of
/// any message that has begun, must come in time.
const CONVERSATIONS: &str = "/grpc.reflection.";

/// Refuses more than [`MAX_STOP_STRINGS`] stop strings, empty ones, and ones longer than [`MAX_STOP_BYTES`].
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

/// Refuses a name, id or salt of a request that is longer than [`MAX_NAME_BYTES`].
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

/// Refuses a call that aborts more than [`MAX_ABORTS`] requests.
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

/// Refuses more entries of `logit_bias` than the engine takes.
pub fn logit_biases(biases: usize) -> Result<(), Refusal> {
    if biases <= MAX_LOGIT_BIAS {
        return Ok(());
    }
    let rule = const {
        assert!(MAX_LOGIT_BIAS == 300, "as the rule says");
        "at most 300 entries"
    };
    Err(Refusal::Value { field: "logit_bias", value: biases.to_string(), rule })
}

/// Refuses more than [`MAX_STOP_IDS`] stop ids. The engine has a lower bound for the number of different ones.
pub fn stop_ids(ids: usize) -> Result<(), Refusal> {
    if ids <= MAX_STOP_IDS {
        return Ok(());
    }
    let rule = const {
        assert!(MAX_STOP_IDS == 1024, "as the rule says");
        "at most 1024 ids"
    };
    Err(Refusal::Value { field: "stopping.ids", value: format!("{ids} ids"), rule })
}

/// Refuses more than [`MAX_CHAT_TOOLS`] tools.
pub fn tools(tools: usize) -> Result<(), Refusal> {
    if tools <= MAX_CHAT_TOOLS {
        return Ok(());
    }
    let rule = const {
        assert!(MAX_CHAT_TOOLS == 1024, "as the rule says");
        "at most 1024 tools"
    };
    Err(Refusal::Value { field: "chat.tools", value: format!("{tools} tools"), rule })
}

/// Refuses a JSON body with more than [`MAX_JSON_ELEMENTS`] elements or [`MAX_JSON_CONTAINERS`] objects and lists, which
/// are counted before it is parsed: an element of two bytes takes many times as much memory. Text that is not JSON is
/// counted too, and is not refused here.
pub fn json(body: &[u8]) -> Result<(), Refusal> {
    let (mut commas, mut containers) = (0, 0);
    let mut bytes = body.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b',' => commas += 1,
            b'{' | b'[' => containers += 1,
            b'"' => {
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'"' => break,
                        b'\\' => {
                            bytes.next();
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let refuse = |field: &str, elements, most| Err(Refusal::Elements { field: field.to_owned(), elements, most });
    if containers > MAX_JSON_CONTAINERS {
        return refuse("the body, counting its objects and lists,", containers, MAX_JSON_CONTAINERS);
    }
    // A list or an object has one element more than it has commas, or none.
    let elements = commas + containers;
    if elements > MAX_JSON_ELEMENTS {
        return refuse("the body", elements, MAX_JSON_ELEMENTS);
    }
    Ok(())
}

/// Refuses a completion that would repeat (`echo`) more than [`MAX_ECHO_TOKENS`] tokens or [`MAX_ECHO_BYTES`] bytes of
/// prompts, summed over all choices, each of which has its own copy. The tokens count only with log probabilities.
pub fn echo(tokens: usize, bytes: usize, logprobs: bool) -> Result<(), Refusal> {
    let refuse = |value, rule| Err(Refusal::Value { field: "echo", value, rule });
    if logprobs && tokens > MAX_ECHO_TOKENS {
        let rule = const {
            assert!(MAX_ECHO_TOKENS == 65_536, "as the rule says");
            "at most 65536 tokens with logprobs, of all choices together"
        };
        return refuse(format!("{tokens} tokens of prompts"), rule);
    }
    if bytes > MAX_ECHO_BYTES {
        let rule = const {
            assert!(MAX_ECHO_BYTES == 16_777_216, "as the rule says");
            "at most 16777216 bytes, of all choices together"
        };
        return refuse(format!("{bytes} bytes of prompts"), rule);
    }
    Ok(())
}

/// Checks the lengths of a request's fields before any work is done for it. `most` is the most text bytes of a prompt.
pub fn request(message: &proto::GenerateRequest, most: usize) -> Result<(), Refusal> {
    name("request_id", &message.request_id)?;
    name("cache_salt", &message.cache_salt)?;
    logit_biases(message.sampling.as_ref().map_or(0, |sampling| sampling.logit_bias.len()))?;
    stop_ids(message.stopping.as_ref().map_or(0, |stopping| stopping.ids.len()))?;
    match &message.prompt {
        Some(Prompt::Text(text)) => prompt("prompt.text", text.len(), most),
        Some(Prompt::Chat(messages)) => chat(messages, most),
        Some(Prompt::Tokens(_)) | None => Ok(()),
    }
}

/// Refuses a chat of more than [`MAX_CHAT_MESSAGES`] messages or [`MAX_CHAT_TOOLS`] tools, or of more than `most` text
/// bytes in all messages, tools and template arguments.
pub fn chat(chat: &proto::Chat, most: usize) -> Result<(), Refusal> {
    let messages = chat.messages.len();
    if messages > MAX_CHAT_MESSAGES {
        let rule = const {
            assert!(MAX_CHAT_MESSAGES == 4096, "as the rule says");
            "at most 4096 messages"
        };
        return Err(Refusal::Value { field: "chat.messages", value: format!("{messages} messages"), rule });
    }
    tools(chat.tools.len())?;
    let call = |call: &proto::chat_message::ToolCall| call.id.len() + call.name.len() + call.arguments.len();
    let message = |message: &proto::ChatMessage| {
        let proto::ChatMessage { role, content, tool_calls, tool_call_id, name, reasoning_content } = message;
        let texts = [role, content, tool_call_id, name, reasoning_content];
        texts.map(|text| text.len()).into_iter().chain(tool_calls.iter().map(call)).sum::<usize>()
    };
    let messages: usize = chat.messages.iter().map(message).sum();
    let tools: usize = chat.tools.iter().map(String::len).sum();
    prompt("prompt.chat", messages + tools + chat.template_arguments.len(), most)
}

/// Refuses a prompt of more than `most` text bytes, because the time that encoding takes grows with them.
pub fn prompt(field: &'static str, bytes: usize, most: usize) -> Result<(), Refusal> {
    if bytes <= most { Ok(()) } else { Err(Refusal::LongText { field, bytes, most }) }
}

/// Refuses to decode more ids than the `context` of the model, which is the most that it can have drawn.
pub fn decoded(ids: usize, context: usize) -> Result<(), Refusal> {
    if ids <= context { Ok(()) } else { Err(Refusal::ManyIds { ids, most: context }) }
}

/// A layer that receives the whole message of a call before it begins the call. It bounds the time, the bytes that all
/// messages on their way take, each client's share of those, and the elements that decoding would allocate. Memory is
/// used for bytes that were received, not for a declared length. Only the first message of a call is kept, since all
/// our methods take one.
#[derive(Clone, Debug)]
pub struct Arrival {
    wait: Duration,
    /// The most bytes of one message.
    most: usize,
    room: Arc<Room>,
    clients: Arc<Clients>,
}

/// The bytes that were received of messages that are not read yet.
#[derive(Debug)]
struct Room {
    held: Mutex<Occupied>,
    /// The most bytes of all messages that are not small.
    most: usize,
    /// The most bytes of a small message.
    small: usize,
}

#[derive(Debug, Default)]
struct Occupied {
    all: usize,
    /// The bytes of each client that has any.
    clients: HashMap<Client, usize>,
}

impl Room {
    fn occupied(&self) -> MutexGuard<'_, Occupied> {
        // No panic can happen while the lock is held.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of a [`Room`] that one call takes. Dropping it gives the bytes back.
#[derive(Debug)]
struct Held {
    room: Arc<Room>,
    client: Client,
    bytes: usize,
}

impl Held {
    /// Takes room for bytes that were received. A client may take at most as many bytes as would then be left free, so
    /// a single client gets half of the room, and N greedy clients leave 1/(N + 1) of it to the next one.
    fn more(&mut self, bytes: usize) -> Result<(), Refusal> {
        let Room { most, small, .. } = *self.room;
        let most = if self.bytes + bytes <= small { most.saturating_add(most / SMALL_ROOM) } else { most };
        let mut occupied = self.room.occupied();
        let (held, own) = (occupied.all, occupied.clients.get(&self.client).copied().unwrap_or(0));
        let left = most.saturating_sub(held);
        if bytes > left {
            return Err(Refusal::Crowded { held, bytes, most });
        }
        // A client without any may take what is left, as long as it is one message.
        if own > self.bytes && own + bytes > left {
            return Err(Refusal::Share { client: self.client.to_string(), held: own, bytes, most: left });
        }
        occupied.all += bytes;
        match occupied.clients.get_mut(&self.client) {
            Some(own) => *own += bytes,
            None => drop(occupied.clients.insert(self.client.clone(), bytes)),
        }
        self.bytes += bytes;
        Ok(())
    }

    fn give_back(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes == 0 {
            return;
        }
        let mut occupied = self.room.occupied();
        occupied.all -= bytes;
        if let Some(own) = occupied.clients.get_mut(&self.client) {
            *own -= bytes;
            if *own == 0 {
                occupied.clients.remove(&self.client);
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Arrival {
    /// Each message has at most `max_message_bytes` and must come within `wait`; all messages on their way have at most
    /// [`MESSAGES_COMING`] times as many bytes. `clients` identifies the client of a call without a token.
    pub fn new(wait: Duration, max_message_bytes: usize, clients: Arc<Clients>) -> Arrival {
        let most = max_message_bytes.saturating_mul(MESSAGES_COMING);
        let room = Arc::new(Room { held: Mutex::default(), most, small: max_message_bytes / SMALL_MESSAGE });
        Arrival { wait, most: max_message_bytes, room, clients }
    }

    fn held(&self, client: Client) -> Held {
        Held { room: Arc::clone(&self.room), client, bytes: 0 }
    }

    /// The client whose share of the room a call takes: as for all other limits, but a name that a gateway gives in a
    /// form that is refused later counts for the gateway.
    pub(super) fn client<B>(&self, request: &http::Request<B>) -> Client {
        if let Some(identity) = request.extensions().get::<Identity>() {
            return Client::Token(identity.name().to_owned());
        }
        let peer = request.extensions().get::<ConnectInfo>().and_then(ConnectInfo::peer);
        self.clients.identify(request.headers(), peer).unwrap_or_else(|_| Client::of(peer))
    }

    /// Receives the body of an HTTP request of `client` to its end, within the same time and room as a gRPC message.
    /// The room is taken until the second value is dropped.
    pub(super) async fn body<B>(&self, client: Client, mut body: B) -> Result<(BytesMut, impl Send + use<B>), Refusal>
    where
        B: http_body::Body<Data = Bytes> + Unpin,
    {
        let too_long = |bytes: usize| Refusal::LongMessage { bytes, most: self.most };
        // A declared length is believed where it is a reason to refuse, and reserves nothing.
        let declared = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if declared > self.most {
            return Err(too_long(declared));
        }
        let mut held = self.held(client);
        let mut whole = BytesMut::new();
        let received = async {
            while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
                let Ok(data) = frame.map_err(|_| Refusal::CutBody)?.into_data() else { continue };
                if whole.len() + data.len() > self.most {
                    return Err(too_long(whole.len() + data.len()));
                }
                held.more(data.len())?;
                whole.extend_from_slice(&data);
            }
            Ok(())
        };
        let late = |_| Err(Refusal::NoMessage { seconds: self.wait.as_secs_f64() });
        tokio::time::timeout(self.wait, received).await.unwrap_or_else(late)?;
        Ok((whole, held))
    }

    /// Receives the body of a call with one message to its end. What follows the first message is counted and not kept.
    async fn whole(&self, path: &str, mut body: Body, held: Held) -> Result<Whole, Status> {
        let mut messages = Messages::new(self.most);
        let mut whole = Whole { parts: VecDeque::new(), held };
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
                        // Before more is received: the bytes of a message that is refused are given back at once.
                        let bytes = parts.iter().skip(1).map(|part| &part[..]);
                        wire::schema().check(path, bytes).map_err(|refusal| status(&refusal))?;
                        whole.parts = parts;
                    }
                    Some(Told::Message(_)) => {}
                    // tonic's decoder reads the prefix and says what is wrong with it.
                    Some(Told::Refused(prefix)) => {
                        whole.parts.push_back(prefix);
                        return Ok(whole);
                    }
                }
            }
        }
        // tonic's decoder reports that the message is cut. It does not get the length, for which it would reserve
        // memory.
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

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let arrival = self.arrival.clone();
        let wait = arrival.wait;
        let held = arrival.held(arrival.client(&request));
        let connection = request.extensions().get::<ConnectInfo>().cloned();
        if let Some(connection) = &connection {
            // tonic finds the peer's address only in an extension of its own type.
            request.extensions_mut().insert(connection.tcp().clone());
            connection.standing().call_begins();
        }
        if request.uri().path().starts_with(CONVERSATIONS) {
            let coming = |body| Conversation {
                body,
                wait,
                until: Some(Instant::now() + wait),
                timer: None,
                messages: Messages::new(arrival.most.min(CONVERSATION_BYTES)),
                data: Bytes::new(),
                parts: VecDeque::new(),
                held,
            };
            return Box::pin(self.inner.call(request.map(|body| Body::new(coming(body)))));
        }
        // `poll_ready` was called on `self.inner`, so that instance must be used, and a clone replaces it.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let whole = tokio::time::timeout(wait, arrival.whole(parts.uri.path(), body, held)).await;
            let late = |_| Err(status(&Refusal::NoMessage { seconds: wait.as_secs_f64() }));
            match whole.unwrap_or_else(late) {
                Ok(whole) => {
                    // A health check that watches, or a call without its message, does not hold its connection's place.
                    let ours = wire::schema().has(parts.uri.path());
                    let open = connection.filter(|_| ours).map(|connection| connection.standing().call());
                    let answered = inner.call(http::Request::from_parts(parts, Body::new(whole))).await;
                    answered.map(|response| match open {
                        Some(open) => response.map(|body| Body::new(Answer { body, _open: open })),
                        None => response,
                    })
                }
                Err(status) => Ok(status.into_http()),
            }
        })
    }
}

/// The body of an answer, which holds its connection's place until it has been sent.
struct Answer {
    body: Body,
    _open: OpenCall,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The length of the prefix of each gRPC message: a flag whether it is compressed, and four bytes of length.
const PREFIX: usize = 5;
/// The size of the blocks in which a message is kept. A long message is a list of blocks, so that growing never copies
/// it.
const BLOCK: usize = 64 << 10;

/// Splits a stream of bytes into gRPC messages.
#[derive(Debug)]
struct Messages {
    /// The most bytes of one message.
    most: usize,
    prefix: [u8; PREFIX],
    /// The number of bytes of the prefix that were received.
    begun: usize,
    /// The number of bytes of the message that were not received yet.
    missing: usize,
    /// The received bytes of the message. The last block may grow.
    blocks: VecDeque<BytesMut>,
}

/// A complete message, or the prefix of a refused one, as [`Messages::take`] returns it.
#[derive(Debug)]
enum Told {
    /// A message: its prefix, then its bytes.
    Message(VecDeque<Bytes>),
    /// An invalid prefix, or the prefix of a message that is too long.
    Refused(Bytes),
}

impl Messages {
    fn new(most: usize) -> Messages {
        Messages { most, prefix: [0; PREFIX], begun: 0, missing: 0, blocks: VecDeque::new() }
    }

    /// Whether a message has begun and is not complete.
    fn under_way(&self) -> bool {
        self.begun > 0
    }

    /// Takes bytes from `data` up to the end of a message, or all of them. Without `keep` the bytes are counted and
    /// discarded.
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
                // The whole message is in `data`: it is split off without a copy.
                let parts = VecDeque::from([Bytes::copy_from_slice(&self.prefix), data.split_to(self.missing)]);
                (self.begun, self.missing) = (0, 0);
                return Some(Told::Message(parts));
            }
        }
        // The bytes are copied, since a slice of `data` would keep the whole buffer that the frame was read into.
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

    /// The prefix without its last byte if the stream has ended inside a message: a decoder refuses it as cut.
    fn rest(&self) -> Option<Bytes> {
        self.under_way().then(|| Bytes::copy_from_slice(&self.prefix[..self.begun.min(PREFIX - 1)]))
    }
}

/// A request body that was received to its end.
#[derive(Debug)]
struct Whole {
    parts: VecDeque<Bytes>,
    /// The room of the bytes, until the body is dropped.
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

/// A request body of many messages, each of which is passed on when it is complete. The first message, and every
/// message that has begun, must be complete within `wait`; the time between messages is not bounded.
struct Conversation {
    body: Body,
    wait: Duration,
    /// The time by which the current message must be complete; `None` between messages.
    until: Option<Instant>,
    /// The timer of `until`, created only when a message is not complete at once.
    timer: Option<Pin<Box<Sleep>>>,
    messages: Messages,
    /// Received bytes that were not split into messages yet.
    data: Bytes,
    /// The rest of a complete message that is being passed on.
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
        // The length of a cut message is not passed on.
        assert_eq!(messages.rest().unwrap().len(), PREFIX - 1);
        // Bytes that are not kept take no memory.
        let mut messages = Messages::new(16 << 20);
        assert!(messages.take(&mut Bytes::from(vec![0, 1, 0, 0, 0, 7, 7, 7]), false).is_none());
        assert!(messages.blocks.is_empty());
        for wrong in [[2, 0, 0, 0, 1], [0, 1, 0, 0, 1]] {
            let told = Messages::new(16 << 20).take(&mut Bytes::copy_from_slice(&wrong), true);
            assert!(matches!(told, Some(Told::Refused(prefix)) if prefix[..] == wrong));
        }
    }

    #[test]
    fn elements_of_json_are_counted_outside_of_texts() {
        let refused = |body: &str| match json(body.as_bytes()) {
            Err(Refusal::Elements { elements, most, .. }) => Some((elements, most)),
            other => other.map(|()| None).unwrap(),
        };
        let text = format!("[\"{}\\\\\", \"\\\"{}\"]", ",[{".repeat(400_000), "[,".repeat(700_000));
        assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok());
        assert_eq!(refused(&text), None);
        let numbers = |count: usize| format!("[{}1]", "1,".repeat(count - 1));
        assert_eq!(refused(&numbers(MAX_JSON_ELEMENTS)), None);
        assert_eq!(refused(&numbers(MAX_JSON_ELEMENTS + 1)), Some((MAX_JSON_ELEMENTS + 1, MAX_JSON_ELEMENTS)));
        let lists = |count: usize| format!("[{}{{}}]", "[],".repeat(count - 2));
        assert_eq!(refused(&lists(MAX_JSON_CONTAINERS)), None);
        assert_eq!(refused(&lists(MAX_JSON_CONTAINERS + 1)), Some((MAX_JSON_CONTAINERS + 1, MAX_JSON_CONTAINERS)));
        // A text that does not end.
        assert_eq!(refused("{\"\\"), None);
    }

    /// Goal: no client, and no few clients, can take the whole room. Method: greedy clients take what they get, then
    /// another client's message comes.
    #[test]
    fn greedy_clients_leave_room_to_others() {
        let clients = Arc::new(Clients::new(None, false));
        let arrival = Arrival::new(Duration::from_secs(1), 1 << 20, clients);
        let named = |name: &str| Client::Named(name.to_owned());
        let message = |name: &str, bytes: usize| {
            let mut held = arrival.held(named(name));
            for _ in 0..bytes / 1024 {
                held.more(1024)?;
            }
            Ok::<_, Refusal>(held)
        };
        let mut all = Vec::new();
        for (greedy, messages) in [("first", 8), ("second", 4), ("third", 2)] {
            let refusal = loop {
                match message(greedy, 1 << 20) {
                    Ok(held) => all.push(held),
                    Err(refusal) => break refusal,
                }
            };
            assert_eq!(refusal.code(), tonic::Code::ResourceExhausted);
            assert!(matches!(refusal, Refusal::Share { .. }), "{refusal}");
            let own = arrival.room.occupied().clients[&named(greedy)];
            assert_eq!(own, messages << 20, "{greedy}");
        }
        all.push(message("other", 1 << 20).unwrap());
        // Small messages have room of their own.
        all.push(message("other", 4096).unwrap());
        drop(all);
        let occupied = arrival.room.occupied();
        assert_eq!((occupied.all, occupied.clients.len()), (0, 0));
    }
}

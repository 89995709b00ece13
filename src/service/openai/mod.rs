//! OpenAI's API over HTTP: a thin adapter to the messages of our own service, like `service::vllm`. A request passes
//! the same checks as a gRPC call (tokens, bounds, client limits, jobs) and appears in the same traces and counts; its
//! answer is converted from our own stream.
//! Not here: anything that our own service does not support; TLS and connections (`service::tls`,
//! `service::connections`).
//!
//! | path | what |
//! |---|---|
//! | `/v1/chat/completions`, `/v1/completions`, `/v1/responses` | generations, whole or as a stream of events (SSE) |
//! | `/v1/models`, `/v1/models/{model}` | the served models that the caller may use |
//! | `/v1/embeddings` | vectors of texts |
//! | `/v1/rerank`, `/v1/score` | how relevant documents are to a query; also at the paths of other servers |
//! | `/health` | 200 while requests are taken, else 503 |

mod answer;
mod channels;
mod chat;
mod completions;
mod embeddings;
mod error;
mod fields;
mod marked;
mod origin;
mod output;
mod pieces;
mod request;
mod responses;
mod tools;

use super::auth::Authentication;
use super::bounds::Arrival;
use super::connections;
use super::crowd::OpenCall;
use super::inputs::Failure;
use super::prepare::{Prepared, Reasons, Target};
use super::proto;
use super::refusal::{Refusal, code_name};
use super::rpc::{Caller, Rpc, Tracked};
use super::tls::{Accept, ConnectInfo};
use crate::host::ServedModel;
use crate::model::text::SpecialText;
use crate::model::text::chat::CallForm;
use crate::service::jobs::LONG;
use crate::telemetry::{names, spans};
use answer::{Answer, Frame, Reading, Running};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use error::ApiError;
use fields::Fields;
use proto::generate_request::Prompt;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tools::{Choice, Tools};
use tracing::Span;

/// The implementation of the API over a host. Cheap to clone.
#[derive(Clone, Debug)]
pub struct OpenAi {
    rpc: Rpc,
    authentication: Authentication,
    arrival: Arrival,
    /// Whether only this machine can reach the address and no token is needed.
    open_loopback: bool,
    /// The start of the server in seconds since 1970; the `created` time of all models.
    began: u64,
}

impl OpenAi {
    /// Creates the API with the host, clients, tokens, bounds and streams of the gRPC endpoint.
    pub fn new(rpc: Rpc, authentication: Authentication, arrival: Arrival) -> OpenAi {
        OpenAi { rpc, authentication, arrival, open_loopback: false, began: since_1970() }
    }
}

fn since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Serves `listener` until `stop` is cancelled; then finishes the requests that have begun.
pub async fn serve(openai: OpenAi, listener: TcpListener, accept: Accept, stop: CancellationToken) {
    let loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let open_loopback = loopback && !openai.authentication.has_tokens();
    let app = router(Arc::new(OpenAi { open_loopback, ..openai }));
    connections::serve(listener, app, accept, "http", stop).await;
}

fn router(openai: Arc<OpenAi>) -> Router {
    Router::new()
        .route(CHAT, post(chat_completions))
        .route(COMPLETIONS, post(text_completions))
        .route(RESPONSES, post(created_response))
        .route(EMBEDDINGS, post(vectors))
        .route(RERANK[0], post(ranks::<0>))
        .route(RERANK[1], post(ranks::<1>))
        .route(RERANK[2], post(ranks::<2>))
        .route(SCORE[0], post(scores::<0>))
        .route(SCORE[1], post(scores::<1>))
        .route(MODELS, get(models))
        .route(MODEL_PATHS, get(model))
        .route(HEALTH, get(health))
        .fallback(no_route)
        .method_not_allowed_fallback(no_route)
        .layer(middleware::from_fn_with_state(Arc::clone(&openai), origin::share))
        .with_state(openai)
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const EMBEDDINGS: &str = "/v1/embeddings";
/// The paths of Jina's and of vLLM's API.
const RERANK: [&str; 3] = ["/v1/rerank", "/v2/rerank", "/rerank"];
const SCORE: [&str; 2] = ["/v1/score", "/score"];
const MODELS: &str = "/v1/models";
/// The route of a model, as in spans and in the table of rights.
const MODEL: &str = "/v1/models/{model}";
/// The pattern of the route; names of models may contain slashes.
const MODEL_PATHS: &str = "/v1/models/{*model}";
const HEALTH: &str = "/health";

/// A request that is being answered.
struct Call {
    openai: Arc<OpenAi>,
    span: Span,
    caller: Caller,
    /// Keeps the connection's place from the end of the request's body until the answer has been sent.
    open: Option<OpenCall>,
}

/// Creates the SERVER span of a request, as a child of the remote span in its headers.
fn http_span(method: &Method, route: &'static str, headers: &HeaderMap) -> Span {
    let span = tracing::info_span!(
        parent: None,
        names::SPAN_HTTP,
        otel.name = format!("{method} {route}"),
        otel.kind = "server",
    );
    spans::set_remote_parent(&span, |name| headers.get(name)?.to_str().ok());
    // Other methods are not supported, and could contain arbitrary text of the client.
    spans::set(&span, names::HTTP_REQUEST_METHOD, if method == Method::GET { "GET" } else { "POST" });
    spans::set(&span, names::HTTP_ROUTE, route);
    span
}

/// Returns the answer of a refused request, sets the error on the span, and counts the refusal.
fn refused(openai: &OpenAi, span: &Span, refusal: Refusal) -> Response {
    openai.rpc.host().ended.refuse(refusal.kind());
    spans::fail(span, refusal.kind(), &refusal.recorded());
    let error = ApiError::from(refusal);
    answered(span, error.into_response())
}

/// Sets the status of an answer on the span, and adds the trace context to the answer's headers.
fn answered(span: &Span, mut response: Response) -> Response {
    spans::set(span, names::HTTP_RESPONSE_STATUS_CODE, i64::from(response.status().as_u16()));
    spans::inject(span, |name, value| {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            response.headers_mut().insert(name, value);
        }
    });
    response
}

fn json_answer(span: &Span, value: &Value) -> Response {
    answered(span, ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response())
}

impl OpenAi {
    /// Checks the origin and the token of a request.
    fn admit<B>(
        self: &Arc<OpenAi>,
        route: &'static str,
        span: &Span,
        request: &mut Request<B>,
    ) -> Result<Call, Refusal> {
        if self.open_loopback && !origin::from_here(request) {
            return Err(Refusal::OtherOrigin);
        }
        let identity = self.authentication.identify(route, request.headers())?;
        // Nobody behind needs it, and what is not there is not logged.
        request.headers_mut().remove(header::AUTHORIZATION);
        if let Some(identity) = &identity {
            request.extensions_mut().insert(identity.clone());
        }
        let peer = request.extensions().get::<ConnectInfo>().and_then(ConnectInfo::peer);
        let caller = Caller::of_http(request.headers(), peer, identity);
        Ok(Call { openai: Arc::clone(self), span: span.clone(), caller, open: None })
    }

    /// Receives the body of a request and parses it.
    async fn body(&self, call: &mut Call, request: Request<Body>) -> Result<Fields, Refusal> {
        if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING) {
            let identity = encoding.as_bytes().eq_ignore_ascii_case(b"identity");
            if !identity {
                let value = format!("{encoding:?}");
                return Err(Refusal::Value { field: "content-encoding", value, rule: "identity" });
            }
        }
        let client = self.arrival.client(&request);
        let connection = request.extensions().get::<ConnectInfo>().cloned();
        let (bytes, held) = self.arrival.body(client, request.into_body()).await?;
        // A call without its message does not hold its connection's place.
        call.open = connection.map(|connection| connection.standing().call());
        let long = bytes.len() > LONG;
        let size = bytes.len();
        let parse = move || {
            super::bounds::json(&bytes)?;
            let value = serde_json::from_slice::<Value>(&bytes).map_err(|error| Refusal::NotJson(error.to_string()))?;
            drop(held);
            Fields::of("", value)
        };
        // A long body takes long to parse, and several times its memory.
        if long { self.rpc.text_work(&call.caller, size, parse).await } else { parse() }
    }
}

/// The results of preparing a prompt that the answer needs.
struct Found {
    reasons: Reasons,
    /// The tokens of the prompt, if the answer repeats the prompt (`echo`).
    ids: Vec<u32>,
}

impl Call {
    /// Refuses the call.
    fn refuse(self, refusal: Refusal) -> Response {
        refused(&self.openai, &self.span, refusal)
    }

    /// Looks up the model that a request names, or the only one.
    fn model(&self, body: &mut Fields) -> Result<Target, Refusal> {
        let name = body.text("model")?.unwrap_or_default();
        self.caller.scope.place(self.openai.rpc.host(), &name, "")
    }

    /// Starts a generation on `place`. `special_text`: whether special tokens appear in the text; `form`: the syntax of
    /// tool calls that the answer may contain; `echo`: whether the answer repeats the prompt.
    async fn start(
        &self,
        place: &Target,
        message: proto::GenerateRequest,
        keep: Option<usize>,
        special_text: bool,
        form: Option<CallForm>,
        echo: bool,
    ) -> Result<(Tracked, Found), Refusal> {
        let adjust = move |prepared: &mut Prepared| {
            prepared.special_text = match special_text {
                true => SpecialText::All,
                // What tells reasoning, content and calls apart may be special tokens.
                false => {
                    let calls = form.map_or(&[][..], CallForm::marks);
                    SpecialText::Named([prepared.reasons.marks(), calls].concat())
                }
            };
            let ids = if echo { prepared.request.prompt.clone() } else { Vec::new() };
            Found { reasons: prepared.reasons, ids }
        };
        self.openai.rpc.open(&self.span, &self.caller, place.clone(), message, keep, adjust).await
    }

    /// Returns the answer of running generations: a whole body, or a stream of events.
    async fn reply(self, answer: Answer, running: Running, telling: Telling) -> Response {
        let id = HeaderValue::try_from(answer.id.as_str());
        let mut events = Events { running, answer, telling, ended: false, _open: self.open };
        let mut response = if events.answer.streaming.stream {
            let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
            answered(&self.span, (headers, Body::from_stream(events)).into_response())
        } else {
            let end = std::future::poll_fn(|context| {
                loop {
                    match std::task::ready!(events.running.poll(context)) {
                        // Responses order their items by the frames.
                        Some(Ok(frame)) => events.item(frame),
                        Some(Err(status)) => return Poll::Ready(Err(status)),
                        None => return Poll::Ready(Ok(())),
                    }
                }
            });
            match end.await {
                Ok(()) => json_answer(&self.span, &events.whole()),
                Err(status) => answered(&self.span, ApiError::from(status).into_response()),
            }
        };
        if let Ok(id) = id {
            response.headers_mut().insert(HeaderName::from_static("x-request-id"), id);
        }
        response
    }
}

/// The kind of an answer, with its state.
enum Telling {
    Chat,
    Text { echo: Option<completions::Echo>, offsets: completions::Offsets },
    Response(Box<responses::Telling>),
}

/// The answer of running generations, as a stream of bytes.
struct Events {
    running: Running,
    answer: Answer,
    telling: Telling,
    ended: bool,
    _open: Option<OpenCall>,
}

/// The number of bytes up to which events are sent together.
const TOGETHER: usize = 16 << 10;

impl Events {
    fn whole(&self) -> Value {
        match &self.telling {
            Telling::Chat => chat::whole(&self.answer, &self.running.choices),
            Telling::Text { echo, .. } => completions::whole(&self.answer, &self.running, echo.as_ref()),
            Telling::Response(telling) => telling.whole(&self.answer, &self.running.choices),
        }
    }

    /// Processes a frame of an answer that is not streamed.
    fn item(&mut self, frame: Frame) {
        if let Telling::Response(telling) = &mut self.telling {
            telling.events(&self.answer, &self.running.choices, frame);
        }
    }

    /// Appends the events of a frame to `to`.
    fn tell(&mut self, frame: Frame, to: &mut String) {
        let last = matches!(frame, Frame::Done);
        let chunks = match &mut self.telling {
            Telling::Chat => chat::chunks(&self.answer, &self.running.choices, frame),
            Telling::Text { echo, offsets } => {
                completions::chunks(&self.answer, &self.running, echo.as_ref(), offsets, frame)
            }
            Telling::Response(telling) => {
                for event in telling.events(&self.answer, &self.running.choices, frame) {
                    named_event(&event, to);
                }
                return;
            }
        };
        chunks.iter().for_each(|chunk| event(chunk, to));
        if last {
            to.push_str(DONE);
        }
    }

    /// Appends the events of a failure, which end the stream, to `to`.
    fn fail(&mut self, status: tonic::Status, to: &mut String) {
        let error = ApiError::from(status);
        match &mut self.telling {
            Telling::Response(telling) => {
                let failed = telling.failed(&self.answer, &self.running.choices, error.body());
                failed.iter().for_each(|failed| named_event(failed, to));
            }
            _ => {
                event(error.body(), to);
                to.push_str(DONE);
            }
        }
    }
}

/// The event that ends a stream.
const DONE: &str = "data: [DONE]\n\n";

fn event(data: &Value, to: &mut String) {
    to.push_str("data: ");
    to.push_str(&data.to_string());
    to.push_str("\n\n");
}

/// Appends an event whose name is its `type`.
fn named_event(data: &Value, to: &mut String) {
    to.push_str("event: ");
    to.push_str(data["type"].as_str().unwrap_or("error"));
    to.push('\n');
    event(data, to);
}

impl Stream for Events {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let mut text = String::new();
        while !this.ended && text.len() < TOGETHER {
            match this.running.poll(context) {
                Poll::Pending if text.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Some(Ok(frame))) => this.tell(frame, &mut text),
                Poll::Ready(Some(Err(status))) => {
                    this.fail(status, &mut text);
                    this.ended = true;
                }
                Poll::Ready(None) => this.ended = true,
            }
        }
        // An empty chunk would end the body.
        Poll::Ready((!text.is_empty()).then(|| Ok(Bytes::from(text))))
    }
}

/// Runs `work` until the call's deadline.
async fn in_time<T, E: From<Refusal>>(
    deadline: Option<Instant>,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let late = |_| Err(Refusal::Deadline { output_tokens: 0 }.into());
    match deadline {
        None => work.await,
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(late),
    }
}

/// Checks a POST request and receives its body. Returns the call, the body's fields and the deadline.
async fn received(
    openai: &Arc<OpenAi>,
    route: &'static str,
    mut request: Request<Body>,
) -> Result<(Arc<Call>, Fields, Option<Instant>), Response> {
    let span = http_span(request.method(), route, request.headers());
    let mut call = match openai.admit(route, &span, &mut request) {
        Ok(call) => call,
        Err(refusal) => return Err(refused(openai, &span, refusal)),
    };
    let deadline = match call.caller.deadline() {
        Ok(deadline) => deadline,
        Err(refusal) => return Err(call.refuse(refusal)),
    };
    match in_time(deadline, openai.body(&mut call, request)).await {
        Ok(body) => Ok((Arc::new(call), body, deadline)),
        Err(refusal) => Err(call.refuse(refusal)),
    }
}

/// Answers a POST request of several inputs; `work` returns the call's id and the body of the answer.
async fn settle<F>(
    openai: Arc<OpenAi>,
    route: &'static str,
    request: Request<Body>,
    work: impl FnOnce(Arc<Call>, Fields) -> F,
) -> Response
where
    F: Future<Output = Result<(String, Value), Failure>>,
{
    let (call, body, deadline) = match received(&openai, route, request).await {
        Ok(received) => received,
        Err(response) => return response,
    };
    let answered = in_time(deadline, work(Arc::clone(&call), body)).await;
    match answered {
        Ok((id, value)) => {
            let mut response = json_answer(&call.span, &value);
            if let Ok(id) = HeaderValue::try_from(id) {
                response.headers_mut().insert(HeaderName::from_static("x-request-id"), id);
            }
            response
        }
        Err(Failure::Refused(refusal)) => {
            let refusal = call.caller.scope.narrowed(openai.rpc.host(), refusal);
            refused(&openai, &call.span, refusal)
        }
        // The input that failed has told the span.
        Err(Failure::Ended(status)) => answered_with(&call.span, status),
    }
}

fn answered_with(span: &Span, status: tonic::Status) -> Response {
    answered(span, ApiError::from(status).into_response())
}

/// Answers a POST request with generations, which `work` starts.
async fn generate<F>(
    openai: Arc<OpenAi>,
    route: &'static str,
    request: Request<Body>,
    work: impl FnOnce(Arc<Call>, Fields) -> F,
) -> Response
where
    F: Future<Output = Result<(Answer, Running, Telling), Refusal>>,
{
    let (call, body, deadline) = match received(&openai, route, request).await {
        Ok(received) => received,
        Err(response) => return response,
    };
    let span = call.span.clone();
    let begun = in_time(deadline, work(Arc::clone(&call), body)).await;
    let begun = begun.map_err(|refusal| call.caller.scope.narrowed(openai.rpc.host(), refusal));
    // The work has dropped its handle.
    let Some(call) = Arc::into_inner(call) else { return refused(&openai, &span, Refusal::Stopping) };
    match begun {
        Ok((answer, running, telling)) => call.reply(answer, running, telling).await,
        Err(refusal) => call.refuse(refusal),
    }
}

impl Answer {
    fn new(id: &str, model: &ServedModel, streaming: request::Streaming) -> Answer {
        Answer {
            id: id.to_owned(),
            created: since_1970(),
            model: model.name.clone(),
            text: model.text.clone(),
            streaming,
            reasoning: true,
            logprobs: false,
        }
    }
}

/// Returns the syntax of the tool calls that the answer may contain; `None` if calls are not parsed.
fn call_form(model: &ServedModel, tools: &Tools) -> Option<CallForm> {
    let form = model.text.as_ref().and_then(|text| text.chat_style(true).1.tools);
    form.filter(|_| tools.choice != Choice::None)
}

/// Returns how the choices of an answer with tools are parsed.
fn reading<'a>(
    form: Option<CallForm>,
    tools: &'a Tools,
    found: &Found,
    stop_ids: &'a [u32],
    keep: bool,
) -> Reading<'a> {
    Reading {
        reasons: found.reasons,
        form,
        tools: &tools.callable,
        one_call: !tools.parallel,
        keep,
        stop_ids,
        hidden: false,
    }
}

async fn chat_completions(State(openai): State<Arc<OpenAi>>, request: Request<Body>) -> Response {
    generate(openai, CHAT, request, async |call, mut body| {
        let place = call.model(&mut body)?;
        let asked = chat::read(body, place.model())?;
        let (common, logprobs) = (&asked.common, asked.common.message.output.as_ref());
        let logprobs = logprobs.is_some_and(|output| output.logprobs.is_some());
        let (id, streaming) = (common.message.request_id.clone(), common.streaming);
        let stop_ids = common.message.stopping.as_ref().map(|stopping| stopping.ids.clone()).unwrap_or_default();
        let (each, keep, constrained) = (common.n as usize, common.keep, common.constrained());
        let form = call_form(place.model(), &asked.tools);
        let started = call.start(&place, asked.common.message, keep, asked.common.special_text, form, false).await;
        let (stream, found) = started.map_err(|refusal| request::renamed(refusal, constrained))?;
        let reading = reading(form, &asked.tools, &found, &stop_ids, !streaming.stream);
        let running = Running::new(&id, vec![stream], each, &reading);
        let answer = Answer { reasoning: asked.reasoning, logprobs, ..Answer::new(&id, place.model(), streaming) };
        Ok((answer, running, Telling::Chat))
    })
    .await
}

async fn text_completions(State(openai): State<Arc<OpenAi>>, request: Request<Body>) -> Response {
    generate(openai, COMPLETIONS, request, async |call, mut body| {
        let place = call.model(&mut body)?;
        let asked = completions::read(body, place.model())?;
        let (id, streaming) = (asked.common.message.request_id.clone(), asked.common.streaming);
        let output = asked.common.message.output.unwrap_or_default();
        let logprobs = output.logprobs.is_some() || output.prompt_logprobs.is_some();
        let stop_ids = asked.common.message.stopping.clone().unwrap_or_default().ids;
        let text = place.model().text.as_deref();
        let (mut streams, mut echo) = (Vec::new(), completions::Echo::default());
        let (keep, each) = (asked.common.keep, asked.common.n as usize);
        let (mut tokens, mut bytes) = (0usize, 0usize);
        let mut reasons = Reasons::Never;
        for (index, prompt) in asked.prompts.into_iter().enumerate() {
            let given = match &prompt {
                Prompt::Text(text) if asked.echo && keep.is_none() => Some(text.clone()),
                _ => None,
            };
            let message = completions::message(&asked.common, index, prompt);
            let started = call.start(&place, message, keep, asked.common.special_text, None, asked.echo).await;
            let (stream, found) = started.map_err(|refusal| request::renamed(refusal, asked.common.constrained()))?;
            if asked.echo {
                let shown = completions::shown(given, &found.ids, text);
                tokens = tokens.saturating_add(found.ids.len().saturating_mul(each));
                bytes = bytes.saturating_add(shown.len().saturating_mul(each));
                super::bounds::echo(tokens, bytes, logprobs)?;
                echo.texts.push(shown);
                echo.first.push(found.ids.first().copied());
            }
            reasons = found.reasons;
            streams.push(stream);
        }
        let tools: Arc<[tools::Tool]> = Arc::default();
        let reading = Reading {
            reasons,
            form: None,
            tools: &tools,
            one_call: false,
            keep: !streaming.stream,
            stop_ids: &stop_ids,
            hidden: asked.hidden,
        };
        let running = Running::new(&id, streams, each, &reading);
        let answer = Answer { logprobs, ..Answer::new(&id, place.model(), streaming) };
        let (echo, offsets) = (asked.echo.then_some(echo), completions::Offsets::default());
        Ok((answer, running, Telling::Text { echo, offsets }))
    })
    .await
}

async fn created_response(State(openai): State<Arc<OpenAi>>, request: Request<Body>) -> Response {
    generate(openai, RESPONSES, request, async |call, mut body| {
        let place = call.model(&mut body)?;
        let asked = responses::read(body, place.model())?;
        let (id, streaming) = (asked.common.message.request_id.clone(), asked.common.streaming);
        let (keep, constrained) = (asked.common.keep, asked.common.constrained());
        let form = call_form(place.model(), &asked.tools);
        let started = call.start(&place, asked.common.message, keep, asked.common.special_text, form, false).await;
        let (stream, found) = started.map_err(|refusal| request::renamed(refusal, constrained))?;
        // The last events of a stream tell everything again.
        let reading = reading(form, &asked.tools, &found, &[], true);
        let running = Running::new(&id, vec![stream], 1, &reading);
        let answer = Answer::new(&id, place.model(), streaming);
        Ok((answer, running, Telling::Response(Box::new(asked.telling))))
    })
    .await
}

async fn vectors(State(openai): State<Arc<OpenAi>>, request: Request<Body>) -> Response {
    settle(openai, EMBEDDINGS, request, async |call, mut body| {
        let place = call.model(&mut body)?;
        let asked = embeddings::read(body, place.model())?;
        let answers = call.openai.rpc.vectors(&call.span, &call.caller, place, asked.call).await?;
        let told = embeddings::vectors(&answers, asked.encoding);
        Ok((answers.id, told))
    })
    .await
}

async fn ranks<const AT: usize>(State(openai): State<Arc<OpenAi>>, request: Request<Body>) -> Response {
    settle(openai, RERANK[AT], request, async |call, mut body| {
        let place = call.model(&mut body)?;
        let asked = embeddings::read_ranks(body, place.model())?;
        let documents: Vec<String> = match asked.echo {
            true => asked.call.pairs.iter().map(|(_, document)| document.clone()).collect(),
            false => Vec::new(),
        };
        let answers = call.openai.rpc.relevance(&call.span, &call.caller, place, asked.call).await?;
        let told = embeddings::ranks(&answers, &documents, asked.most, asked.echo);
        Ok((answers.id, told))
    })
    .await
}

async fn scores<const AT: usize>(State(openai): State<Arc<OpenAi>>, request: Request<Body>) -> Response {
    settle(openai, SCORE[AT], request, async |call, mut body| {
        let place = call.model(&mut body)?;
        let asked = embeddings::read_scores(body, place.model())?;
        let answers = call.openai.rpc.relevance(&call.span, &call.caller, place, asked).await?;
        let told = embeddings::scores(&answers, since_1970());
        Ok((answers.id, told))
    })
    .await
}

/// Returns the description of a model.
fn listed(openai: &OpenAi, model: &ServedModel) -> Value {
    json!({
        "id": model.name, "object": "model", "created": openai.began, "owned_by": names::SERVICE,
        "root": model.name, "parent": null, "max_model_len": model.info.context,
    })
}

async fn models(State(openai): State<Arc<OpenAi>>, mut request: Request<Body>) -> Response {
    let span = http_span(request.method(), MODELS, request.headers());
    match openai.admit(MODELS, &span, &mut request) {
        Err(refusal) => refused(&openai, &span, refusal),
        Ok(call) => {
            let models = openai.rpc.host().models();
            let mine = models.iter().filter(|model| call.caller.scope.may_use(&model.name).is_ok());
            let list: Vec<Value> = mine.map(|model| listed(&openai, model)).collect();
            json_answer(&span, &json!({"object": "list", "data": list}))
        }
    }
}

async fn model(State(openai): State<Arc<OpenAi>>, Path(name): Path<String>, mut request: Request<Body>) -> Response {
    let span = http_span(request.method(), MODEL, request.headers());
    let found =
        openai.admit(MODEL, &span, &mut request).and_then(|call| call.caller.scope.place(openai.rpc.host(), &name, ""));
    match found {
        Ok(place) => json_answer(&span, &listed(&openai, place.model())),
        Err(refusal) => refused(&openai, &span, refusal),
    }
}

async fn health(State(openai): State<Arc<OpenAi>>) -> Response {
    let serving = openai.rpc.host().is_serving();
    let status = if serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    status.into_response()
}

async fn no_route(State(openai): State<Arc<OpenAi>>, request: Request<Body>) -> Response {
    /// The maximum length of a path in an error message.
    const MOST: usize = 64;
    let path = request.uri().path();
    let path = path[..path.floor_char_boundary(MOST)].to_owned();
    let refusal = Refusal::NoRoute { method: request.method().to_string(), path };
    openai.rpc.host().ended.refuse(code_name(refusal.code()));
    ApiError::from(refusal).into_response()
}

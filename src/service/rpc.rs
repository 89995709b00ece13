//! The RPCs of `ostinato.v1.Ostinato`. Each call gets a span, is checked against the caller's rights and limits, and is
//! answered by the host with a message or a status. Not here: sockets.

use super::auth::Identity;
use super::bounds;
use super::clients::{Allowance, Client, Clients, Places};
use super::deadline::deadline;
use super::generation::{Delivery, Generation};
use super::inputs::Failure;
use super::jobs::{Jobs, Size};
use super::lifecycle::{self, Loading};
use super::model_endpoints::{ModelEndpoints, OnlyModel};
use super::prepare::{self, Prepared, Target};
use super::proto;
use super::refusal::{Refusal, code_name, status};
use super::server::{Changeable, Options};
use super::{convert, proto::ostinato_server::Ostinato};
use crate::actors::workers::Cancel;
use crate::host::lifecycle::LifecycleError;
use crate::host::route::RouteError;
use crate::host::{Host, ServedModel};
use crate::model::text::Text;
use crate::replica::record::StepRecord;
use crate::telemetry::clock::Moment;
use crate::telemetry::{names, spans};
use http::HeaderMap;
use prost::Message;
use proto::generate_request::Prompt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};
use tracing::Span;

/// The maximum number of calls that wait for engine threads at once, each on one of the 512 blocking threads.
const QUESTIONS: usize = 32;

/// The package and the name of the service, as in spans and health checks.
pub const SERVICE: &str = "ostinato.v1.Ostinato";

/// The implementation of the service over a host. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Rpc {
    host: Arc<Host>,
    settings: watch::Receiver<Changeable>,
    clients: Arc<Clients>,
    stop: CancellationToken,
    streams: TaskTracker,
    /// The maximum length of a prompt's text in bytes.
    most_text: usize,
    /// The queue of the work that precedes a call's admission or answer.
    jobs: Arc<Jobs>,
    /// Bounds the threads that wait for engine threads.
    questions: Arc<Semaphore>,
    /// The endpoints of single models, for ListModels.
    endpoints: Option<Arc<ModelEndpoints>>,
}

impl Rpc {
    /// Creates the service. Cancelling `stop` cuts the open streams, which `streams` counts.
    pub fn new(
        host: Arc<Host>,
        settings: watch::Receiver<Changeable>,
        clients: Arc<Clients>,
        stop: CancellationToken,
        streams: TaskTracker,
    ) -> Rpc {
        let jobs = Arc::new(Jobs::new(usize::MAX));
        let questions = Arc::new(Semaphore::new(QUESTIONS));
        Rpc { host, settings, clients, stop, streams, most_text: usize::MAX, jobs, questions, endpoints: None }
    }

    /// Creates a service without limits, for calls from within this process.
    pub fn alone(host: Arc<Host>) -> Rpc {
        // The settings never change, so the sender can be dropped.
        let (_, settings) = watch::channel(Options::default().changeable());
        let clients = Arc::new(Clients::new(None, false));
        Rpc::new(host, settings, clients, CancellationToken::new(), TaskTracker::new())
    }

    /// Returns the maximum length of a prompt's text in bytes.
    pub(super) fn most_text(&self) -> usize {
        self.most_text
    }

    /// Counts an open stream until the token is dropped.
    pub(super) fn open_call(&self) -> TaskTrackerToken {
        self.streams.token()
    }

    /// Gives back tokens that were charged to a caller's rate limit and not computed.
    pub(super) fn give_back(&self, caller: &Caller, tokens: u32) {
        caller.allowance().meter.iter().for_each(|meter| meter.give_back(tokens, Instant::now()));
    }

    /// Sets the endpoints of single models that ListModels shows.
    pub fn with_model_endpoints(self, endpoints: Option<Arc<ModelEndpoints>>) -> Rpc {
        Rpc { endpoints, ..self }
    }

    /// Sets the maximum length of a prompt's text in bytes.
    pub fn with_most_text(self, most_text: usize) -> Rpc {
        Rpc { most_text, ..self }
    }

    /// Sets the maximum size in bytes of all messages that are being prepared.
    pub fn with_most_prepared(self, bytes: usize) -> Rpc {
        Rpc { jobs: Arc::new(Jobs::new(bytes)), ..self }
    }
}

/// Creates the SERVER span of a call, as a child of the remote span in its metadata.
pub(super) fn rpc_span(service: &'static str, method: &'static str, metadata: &MetadataMap) -> Span {
    let span = tracing::info_span!(
        parent: None,
        names::SPAN_RPC,
        otel.name = format!("{service}/{method}"),
        otel.kind = "server",
    );
    spans::set_remote_parent(&span, |name| metadata.get(name)?.to_str().ok());
    spans::set(&span, names::RPC_SYSTEM, "grpc");
    spans::set(&span, names::RPC_SERVICE, service);
    spans::set(&span, names::RPC_METHOD, method);
    span
}

/// Adds the trace context (W3C `traceparent`) to the metadata of an answer, if the span is part of a trace.
fn name_trace(span: &Span, metadata: &mut MetadataMap) {
    spans::inject(span, |name, value| {
        let key = tonic::metadata::MetadataKey::from_bytes(name.as_bytes());
        if let (Ok(key), Ok(value)) = (key, value.parse()) {
            let key: tonic::metadata::MetadataKey<tonic::metadata::Ascii> = key;
            metadata.insert(key, value);
        }
    });
}

/// Returns the answer of a unary call, and sets the status on its span.
pub(super) fn answer<T>(span: &Span, result: Result<T, Refusal>) -> Result<Response<T>, Status> {
    match result {
        Ok(message) => {
            spans::set(span, names::RPC_GRPC_STATUS_CODE, tonic::Code::Ok as i64);
            Ok(Response::new(message))
        }
        Err(refusal) => Err(refused(span, &refusal)),
    }
}

pub(super) fn refused(span: &Span, refusal: &Refusal) -> Status {
    let status = status(refusal);
    spans::set(span, names::RPC_GRPC_STATUS_CODE, status.code() as i64);
    spans::fail(span, code_name(status.code()), &refusal.recorded());
    status
}

/// Runs blocking work on a separate thread. The caller bounds the number of such threads.
pub(super) async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(Refusal::Failed(error.to_string())))
}

#[tonic::async_trait]
impl Ostinato for Rpc {
    type GenerateStream = Tracked;
    type LoadModelStream = Loading;

    async fn generate(&self, request: Request<proto::GenerateRequest>) -> Result<Response<Tracked>, Status> {
        let span = rpc_span(SERVICE, "Generate", request.metadata());
        let caller = Caller::of(&request);
        let started = async {
            let message = request.into_inner();
            let place = caller.scope.place(&self.host, &message.model, &message.device)?;
            self.open(&span, &caller, place, message, None, |_| {}).await.map(|(stream, ())| stream)
        };
        self.stream_response(&span, started.await)
    }

    async fn embed(&self, request: Request<proto::EmbedRequest>) -> Result<Response<proto::EmbedResponse>, Status> {
        let span = rpc_span(SERVICE, "Embed", request.metadata());
        let caller = Caller::of(&request);
        let answered = async {
            let message = request.into_inner();
            let place = caller.scope.place(&self.host, &message.model, &message.device)?;
            self.vectors(&span, &caller, place, convert::embed_call(message)?).await.map(convert::embedded)
        };
        self.unary_response(&span, answered.await)
    }

    async fn abort(&self, request: Request<proto::AbortRequest>) -> Result<Response<proto::AbortResponse>, Status> {
        let span = rpc_span(SERVICE, "Abort", request.metadata());
        let caller = Caller::of(&request);
        let id = request.into_inner().request_id;
        if id.is_empty() {
            let rule = "the id of the request to end";
            return answer(&span, Err(Refusal::Missing { field: "request_id", rule }));
        }
        if let Err(refusal) = bounds::name("request_id", &id) {
            return answer(&span, Err(refusal));
        }
        self.abort_request(&caller, &id);
        answer(&span, Ok(proto::AbortResponse {}))
    }

    async fn list_devices(
        &self,
        request: Request<proto::ListDevicesRequest>,
    ) -> Result<Response<proto::ListDevicesResponse>, Status> {
        let span = rpc_span(SERVICE, "ListDevices", request.metadata());
        let caller = Caller::of(&request);
        let devices = convert::devices(&self.host, |model| caller.scope.may_use(model).is_ok());
        answer(&span, Ok(proto::ListDevicesResponse { devices }))
    }

    async fn list_models(
        &self,
        request: Request<proto::ListModelsRequest>,
    ) -> Result<Response<proto::ListModelsResponse>, Status> {
        let span = rpc_span(SERVICE, "ListModels", request.metadata());
        let caller = Caller::of(&request);
        let listed = self.host.listed();
        let mine = listed.iter().filter(|model| caller.scope.may_use(&model.name).is_ok());
        let address = |name: &str| self.endpoints.as_ref().and_then(|endpoints| endpoints.address(name));
        let models = mine.map(|listed| lifecycle::listed(listed, address(&listed.name))).collect();
        answer(&span, Ok(proto::ListModelsResponse { models }))
    }

    async fn load_model(&self, request: Request<proto::LoadModelRequest>) -> Result<Response<Loading>, Status> {
        let span = rpc_span(SERVICE, "LoadModel", request.metadata());
        let settings = self.settings();
        let scope = Caller::of(&request).scope;
        answer(&span, Loading::start(&self.host, request.into_inner(), scope, settings.drain, span.clone()))
    }

    async fn unload_model(
        &self,
        request: Request<proto::UnloadModelRequest>,
    ) -> Result<Response<proto::UnloadModelResponse>, Status> {
        let span = rpc_span(SERVICE, "UnloadModel", request.metadata());
        let scope = Caller::of(&request).scope;
        let unloaded = lifecycle::unload(&self.host, request.into_inner(), &scope, self.settings().drain).await;
        answer(&span, unloaded.map_err(|refusal| scope.narrowed(&self.host, refusal)))
    }

    async fn get_load(
        &self,
        request: Request<proto::GetLoadRequest>,
    ) -> Result<Response<proto::GetLoadResponse>, Status> {
        let span = rpc_span(SERVICE, "GetLoad", request.metadata());
        let caller = Caller::of(&request);
        let model = request.into_inner().model;
        let replicas = if model.is_empty() {
            let models = self.host.models();
            let mine = models.iter().filter(|model| caller.scope.may_use(&model.name).is_ok());
            Ok(mine.flat_map(|model| &model.replicas).map(|replica| convert::load(replica)).collect())
        } else {
            let loads = |place: Target| place.model().replicas.iter().map(|replica| convert::load(replica)).collect();
            caller.scope.place(&self.host, &model, "").map(loads)
        };
        answer(&span, replicas.map(|replicas| proto::GetLoadResponse { replicas }))
    }

    async fn profile(
        &self,
        request: Request<proto::ProfileRequest>,
    ) -> Result<Response<proto::ProfileResponse>, Status> {
        let span = rpc_span(SERVICE, "Profile", request.metadata());
        let scope = Caller::of(&request).scope;
        let profiled = self.profiled(&scope, request.into_inner()).await;
        answer(&span, profiled)
    }

    async fn tokenize(
        &self,
        request: Request<proto::TokenizeRequest>,
    ) -> Result<Response<proto::TokenizeResponse>, Status> {
        let span = rpc_span(SERVICE, "Tokenize", request.metadata());
        let caller = Caller::of(&request);
        let tokens = self.tokenized(&caller, request.into_inner()).await;
        answer(&span, tokens)
    }

    async fn detokenize(
        &self,
        request: Request<proto::DetokenizeRequest>,
    ) -> Result<Response<proto::DetokenizeResponse>, Status> {
        let span = rpc_span(SERVICE, "Detokenize", request.metadata());
        let caller = Caller::of(&request);
        let text = self.detokenized(&caller, request.into_inner()).await;
        answer(&span, text)
    }
}

/// The maximum and the default number of plans whose kernels one call times.
const PROFILED_PLANS: (u32, u32) = (256, 16);
/// The maximum and the default time that a call waits for these plans, in seconds.
const PROFILE_WAIT: (f64, f64) = (60.0, 10.0);
/// The interval at which a call checks whether the plans have run.
const PROFILE_LOOK: Duration = Duration::from_millis(20);

/// The caller of a call, and its timeout: everything about a call that is not in its message.
#[derive(Clone)]
pub(super) struct Caller {
    metadata: MetadataMap,
    peer: Option<SocketAddr>,
    /// Whether the call came over gRPC.
    grpc: bool,
    /// The time at which the call was received and its timeout began.
    received: Instant,
    /// The models that the caller may use.
    pub(super) scope: Scope,
}

/// The models that a caller may use and whose names it may learn: all models, or those of its token. Over the endpoint
/// of a model, only that model.
#[derive(Clone, Debug)]
pub(super) struct Scope {
    /// The identity of the caller's token; `None` if the server has no tokens.
    identity: Option<Identity>,
    /// The model of the endpoint, if the call came over the endpoint of a single model.
    endpoint: Option<Arc<str>>,
}

impl Scope {
    /// Checks that the caller may use the model with this name, whether or not such a model exists.
    pub(super) fn may_use(&self, model: &str) -> Result<(), Refusal> {
        if let Some(only) = self.endpoint.as_deref().filter(|only| *only != model) {
            return Err(Refusal::OtherEndpoint { model: model.to_owned(), only: only.to_owned() });
        }
        match &self.identity {
            Some(identity) if !identity.may_use(model) => {
                Err(Refusal::OtherModel { name: identity.name().to_owned(), model: model.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Looks up the model that a request of this caller names, if the caller may use it, and chooses a replica on
    /// `device`. An empty name means the only model that the caller may use.
    pub(super) fn place(&self, host: &Arc<Host>, model: &str, device: &str) -> Result<Target, Refusal> {
        bounds::name("model", model)?;
        bounds::name("device", device)?;
        let found = self.only(host, model).and_then(|only| match only {
            Some(only) => Target::of(host, only, device),
            None => self.may_use(model).and_then(|()| Target::find(host, model, device)),
        });
        found.map_err(|refusal| self.narrowed(host, refusal))
    }

    /// Returns the model that an empty name means for a caller that may use only some models; `None` if all models are
    /// allowed.
    fn only(&self, host: &Host, asked: &str) -> Result<Option<Arc<ServedModel>>, Refusal> {
        if let Some(only) = self.endpoint.as_deref().filter(|_| asked.is_empty()) {
            self.may_use(only)?;
            return Ok(Some(host.model(only)?));
        }
        let Some(identity) = self.identity.as_ref().filter(|identity| identity.is_restricted() && asked.is_empty())
        else {
            return Ok(None);
        };
        let models = host.models();
        let mut own = models.iter().filter(|model| identity.may_use(&model.name));
        match (own.next(), own.next()) {
            (None, _) => Err(Refusal::NoneOfIts { name: identity.name().to_owned() }),
            (Some(only), None) => Ok(Some(Arc::clone(only))),
            _ => {
                let served = self.own(models.iter().map(|model| &*model.name));
                Err(RouteError::UnknownModel { asked: String::new(), served }.into())
            }
        }
    }

    /// Returns the only model that the caller may use, for contracts without a model field.
    pub(super) fn only_model(&self, host: &Host) -> Result<Arc<ServedModel>, Refusal> {
        match self.only(host, "") {
            Ok(None) => super::vllm::convert::model(host),
            Ok(Some(only)) => Ok(only),
            Err(refusal @ Refusal::Route(_)) if self.endpoint.is_some() => Err(self.narrowed(host, refusal)),
            Err(Refusal::Route(RouteError::UnknownModel { served, .. })) => Err(Refusal::SeveralModels { served }),
            Err(refusal) => Err(refusal),
        }
    }

    /// Removes the names of models that the caller may not use from a refusal.
    pub(super) fn narrowed(&self, host: &Host, refusal: Refusal) -> Refusal {
        if self.endpoint.is_none() && self.identity.as_ref().is_none_or(|identity| !identity.is_restricted()) {
            return refusal;
        }
        let served = || self.own(host.models().iter().map(|model| &*model.name));
        match refusal {
            Refusal::Route(RouteError::UnknownModel { asked, .. }) => {
                RouteError::UnknownModel { asked, served: served() }.into()
            }
            Refusal::Route(RouteError::NotLoaded { asked, state, .. }) => {
                RouteError::NotLoaded { asked, state, served: served() }.into()
            }
            Refusal::Lifecycle(LifecycleError::NotConfigured { asked, .. }) => {
                let configured = self.own(host.listed().iter().map(|model| &*model.name));
                Refusal::Lifecycle(LifecycleError::NotConfigured { asked, configured })
            }
            other => other,
        }
    }

    /// Lists the names that the caller may use, separated by commas.
    fn own<'a>(&self, names: impl Iterator<Item = &'a str>) -> String {
        let own: Vec<&str> = names.filter(|name| self.may_use(name).is_ok()).collect();
        if own.is_empty() { "none".to_owned() } else { own.join(", ") }
    }
}

impl Caller {
    pub(super) fn of<T>(request: &Request<T>) -> Caller {
        let identity = request.extensions().get().cloned();
        let endpoint = request.extensions().get().map(|OnlyModel(model)| Arc::clone(model));
        let scope = Scope { identity, endpoint };
        let (metadata, peer) = (request.metadata().clone(), request.remote_addr());
        Caller { metadata, peer, grpc: true, received: Instant::now(), scope }
    }

    /// Returns the caller of an HTTP request with these headers; `identity` is the holder of its token.
    pub(super) fn of_http(headers: &HeaderMap, peer: Option<SocketAddr>, identity: Option<Identity>) -> Caller {
        let metadata = MetadataMap::from_headers(headers.clone());
        let scope = Scope { identity, endpoint: None };
        Caller { metadata, peer, grpc: false, received: Instant::now(), scope }
    }

    /// Returns whether the call came over gRPC.
    pub(super) fn is_grpc(&self) -> bool {
        self.grpc
    }

    /// Returns the limits that the caller's token sets.
    fn allowance(&self) -> Allowance {
        self.scope.identity.as_ref().map(|identity| identity.allowance().clone()).unwrap_or_default()
    }

    /// Returns the deadline of the call, which applies to every request that the call starts.
    pub(super) fn deadline(&self) -> Result<Option<Instant>, Refusal> {
        deadline(self.metadata.as_ref(), self.received)
    }
}

impl Rpc {
    pub(super) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Returns the current values of the settings that can change.
    pub(super) fn settings(&self) -> Changeable {
        *self.settings.borrow()
    }

    /// Returns the token that is cancelled when streams are cut.
    pub(super) fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Runs a call that waits for an engine thread on a thread where it may block. The number of such calls at a time is
    /// limited.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.questions).acquire_owned().await;
        on_blocking_thread(move || {
            let _permit = permit;
            question()
        })
        .await
    }

    /// Returns the client whose requests the call counts among.
    fn client(&self, caller: &Caller) -> Result<Client, Refusal> {
        match &caller.scope.identity {
            Some(identity) => Ok(Client::Token(identity.name().to_owned())),
            None => self.clients.identify(caller.metadata.as_ref(), caller.peer),
        }
    }

    /// Reserves places for a client's requests, waits for a turn, and runs `work` before the requests are submitted.
    /// The work owns the places: they stay reserved until it ends, even if the client disconnects.
    pub(super) async fn work<T: Send + 'static>(
        &self,
        caller: &Caller,
        asked: u32,
        size: Size,
        work: impl FnOnce(Option<Places>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let client = self.client(caller)?;
        let places = self.clients.take(client.clone(), asked, &caller.allowance())?;
        self.jobs.run(client, size, move || work(places)).await
    }

    /// Starts a generation on `place`; the message's own `model` and `device` are not read. `keep` truncates the prompt to
    /// its last tokens. `adjust` sets what the message has no field for in the prepared request; its result is returned
    /// too.
    pub(super) async fn open<T: Send + 'static>(
        &self,
        span: &Span,
        caller: &Caller,
        place: Target,
        message: proto::GenerateRequest,
        keep: Option<usize>,
        adjust: impl FnOnce(&mut Prepared) -> T + Send + 'static,
    ) -> Result<(Tracked, T), Refusal> {
        let deadline = caller.deadline()?;
        bounds::request(&message, self.most_text)?;
        if let Some(Prompt::Tokens(tokens)) = &message.prompt {
            prepare::fits(place.model(), keep.map_or(tokens.ids.len(), |keep| keep.min(tokens.ids.len())), 1)?;
        }
        let samples = prepare::samples(&message)?;
        let size = Size { bytes: message.encoded_len(), constraint: message.constraint.is_some() };
        // Cancels the preparation when the call ends.
        let cancel = Cancel::until(deadline);
        let _waits = cancel.guard();
        let within = span.clone();
        let work = move |mut places: Option<Places>| {
            let mut prepared = prepare::prepare_at(place, message, deadline, keep, &within, &cancel)?;
            let found = adjust(&mut prepared);
            let prompt = u32::try_from(prepared.request.prompt.len()).unwrap_or(u32::MAX);
            if let Some(places) = &mut places {
                places.admit(&prepared.request.id, prompt)?;
            }
            Ok((prepared, found, places, prompt))
        };
        let worked = self.work(caller, samples, size, work).await;
        let (prepared, found, places, prompt) = worked.map_err(|refusal| caller.scope.narrowed(&self.host, refusal))?;
        let delivery = Delivery {
            buffer: self.settings().stream_buffer,
            rpc: span.clone(),
            grpc: caller.grpc,
            stop: self.stop.clone(),
            places,
            logits: None,
        };
        let generation = Generation::start(prepared, delivery).inspect_err(|_| {
            // A request that did not run is not charged.
            caller.allowance().meter.iter().for_each(|meter| meter.give_back(prompt, Instant::now()));
        })?;
        Ok((Tracked { generation, _open: self.streams.token() }, found))
    }

    async fn tokenized(
        &self,
        caller: &Caller,
        message: proto::TokenizeRequest,
    ) -> Result<proto::TokenizeResponse, Refusal> {
        use proto::tokenize_request::Input;
        let place = caller.scope.place(&self.host, &message.model, "")?;
        let field = match &message.input {
            None => return Err(Refusal::Missing { field: "input", rule: "one of text and chat" }),
            Some(Input::Text(text)) => bounds::prompt("text", text.len(), self.most_text).map(|()| "text")?,
            Some(Input::Chat(chat)) => bounds::chat(chat, self.most_text).map(|()| "chat")?,
        };
        let cancel = Cancel::until(caller.deadline()?);
        let _waits = cancel.guard();
        self.text_work(caller, message.encoded_len(), move || {
            let tokenizer = tokenizer(&place, field)?;
            let (text, token_ids) = match message.input {
                Some(Input::Chat(chat)) => prepare::encode_chat(tokenizer, chat, &Span::none(), &cancel)?,
                Some(Input::Text(text)) => {
                    let ids = tokenizer.encode(&text, true)?;
                    (text, ids)
                }
                None => Default::default(),
            };
            Ok(proto::TokenizeResponse { token_ids, text })
        })
        .await
    }

    async fn detokenized(
        &self,
        caller: &Caller,
        message: proto::DetokenizeRequest,
    ) -> Result<proto::DetokenizeResponse, Refusal> {
        let place = caller.scope.place(&self.host, &message.model, "")?;
        bounds::decoded(message.token_ids.len(), place.model().info.context as usize)?;
        self.text_work(caller, message.encoded_len(), move || {
            let text = tokenizer(&place, "token_ids")?.decode(&message.token_ids, message.skip_special)?;
            Ok(proto::DetokenizeResponse { text })
        })
        .await
    }

    /// Runs the work of a Tokenize or Detokenize call, or parses the body of an HTTP request; `bytes` is the message's
    /// size. It counts as one of the client's requests until it ends.
    pub(super) async fn text_work<T: Send + 'static>(
        &self,
        caller: &Caller,
        bytes: usize,
        work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.work(caller, 1, Size { bytes, constraint: false }, move |_places| work()).await
    }

    /// Returns the response of a Generate call: the stream with the trace context in its metadata, or the status of the
    /// refusal, which is counted.
    pub(super) fn stream_response<S>(&self, span: &Span, started: Result<S, Refusal>) -> Result<Response<S>, Status> {
        match started {
            Ok(stream) => {
                let mut response = Response::new(stream);
                name_trace(span, response.metadata_mut());
                Ok(response)
            }
            Err(refusal) => {
                self.host.ended.refuse(refusal.kind());
                Err(refused(span, &refusal))
            }
        }
    }

    /// Returns the response of a unary call that the engine answered: the message with the trace context in its
    /// metadata, or the status of the failure.
    pub(super) fn unary_response<T>(&self, span: &Span, answered: Result<T, Failure>) -> Result<Response<T>, Status> {
        match answered {
            Ok(message) => {
                let mut response = answer(span, Ok(message))?;
                name_trace(span, response.metadata_mut());
                Ok(response)
            }
            Err(Failure::Refused(refusal)) => {
                self.host.ended.refuse(refusal.kind());
                Err(refused(span, &refusal))
            }
            // The failure was set on the span already.
            Err(Failure::Ended(status)) => Err(status),
        }
    }

    /// Aborts the request with this id on all replicas, unless it belongs to another token, or its model is not that of
    /// the endpoint.
    pub(super) fn abort_request(&self, caller: &Caller, id: &str) {
        if let Some(identity) = &caller.scope.identity
            && !self.clients.may_end(&Client::Token(identity.name().to_owned()), id)
        {
            return;
        }
        let models = self.host.models_and_leaving();
        let own = |model: &&Arc<ServedModel>| caller.scope.endpoint.as_deref().is_none_or(|only| only == model.name);
        for replica in models.iter().filter(own).flat_map(|model| &model.replicas) {
            replica.abort(id);
        }
    }

    async fn profiled(&self, scope: &Scope, message: proto::ProfileRequest) -> Result<proto::ProfileResponse, Refusal> {
        if !(0.0..=PROFILE_WAIT.0).contains(&message.wait_seconds) {
            let (field, value) = ("wait_seconds", message.wait_seconds.to_string());
            return Err(Refusal::Value { field, value, rule: "from 0 to 60" });
        }
        if message.kernels && message.last > PROFILED_PLANS.0 {
            let (field, value) = ("last", message.last.to_string());
            return Err(Refusal::Value { field, value, rule: "at most 256 with kernels" });
        }
        let place = scope.place(&self.host, &message.model, &message.device)?;
        let steps = if message.kernels {
            let plans = if message.last == 0 { PROFILED_PLANS.1 } else { message.last };
            let wait = if message.wait_seconds == 0.0 { PROFILE_WAIT.1 } else { message.wait_seconds };
            let until = Instant::now() + Duration::from_secs_f64(wait);
            let asked = place.clone();
            let mut next = self.ask(move || Ok(asked.replica().profile(plans))).await?;
            let mut steps: Vec<StepRecord> = Vec::new();
            let timed = |step: &StepRecord| {
                step.submissions
                    .iter()
                    .flat_map(|submission| &submission.regions)
                    .any(|region| !region.kernels.is_empty())
            };
            loop {
                // Each record is copied once: with kernels they are large, and the engine's thread copies them.
                let asked = place.clone();
                steps.extend(self.ask(move || Ok(asked.replica().steps_from(next))).await?);
                next = steps.last().map_or(next, |step| step.number + 1);
                let stopped = self.stop.is_cancelled() || place.replica().closed().is_some();
                if steps.iter().filter(|step| timed(step)).count() >= plans as usize
                    || Instant::now() >= until
                    || stopped
                {
                    // Cancels the profiling of plans that have not run.
                    let asked = place.clone();
                    self.ask(move || Ok(asked.replica().profile(0))).await?;
                    let last = steps.iter().rposition(timed).map_or(steps.len(), |index| index + 1);
                    steps.truncate(last);
                    break steps;
                }
                tokio::time::sleep(PROFILE_LOOK).await;
            }
        } else {
            let last = if message.last == 0 { usize::MAX } else { message.last as usize };
            let asked = place.clone();
            self.ask(move || Ok(asked.replica().steps(last))).await?
        };
        let asked = place.clone();
        let transfers = self.ask(move || {
            let devices = asked.host().devices();
            let device = devices.iter().find(|device| device.info == asked.replica().device);
            Ok(device.map(|device| device.transfers(0)).unwrap_or_default())
        });
        let transfers = transfers.await?.iter().map(convert::transfer).collect();
        let replica = place.replica();
        let now = Moment::now();
        let unix = now.wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Ok(proto::ProfileResponse {
            replica: replica.name.clone(),
            steps: steps.iter().map(convert::step).collect(),
            device: Some(convert::device(&replica.device)),
            transfers,
            pages_total: replica.load().pages_total,
            now_ns: now.0,
            now_unix_ns: unix.as_nanos() as u64,
            load: replica.loaded.as_ref().map(convert::load_report),
        })
    }
}

fn tokenizer<'a>(place: &'a Target, field: &'static str) -> Result<&'a Text, Refusal> {
    let model = place.model();
    model.text.as_deref().ok_or_else(|| Refusal::NoTokenizer { model: model.name.clone(), field })
}

/// A generation that is counted as an open stream of the server.
#[derive(Debug)]
pub struct Tracked {
    generation: Generation,
    _open: TaskTrackerToken,
}

impl tokio_stream::Stream for Tracked {
    type Item = Result<proto::GenerateResponse, Status>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::pin::Pin::new(&mut self.generation).poll_next(context)
    }
}

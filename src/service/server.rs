//! The gRPC endpoint (our service, the engine contract of routers, health and reflection on one socket), those of single
//! models beside it, and the HTTP endpoint of OpenAI's API with the same clients, limits and tokens; and the way they stop: health says so
//! first, new requests are refused, running streams go on for a while, then they are cut. Not here: signals,
//! and where the host comes from.

use super::auth::{Authentication, Tokens};
use super::bounds::{self, Arrival};
use super::clients::Clients;
use super::deadline::Deadlines;
use super::model_endpoints::{ModelEndpoints, OfModel, Order};
use super::openai::{self, OpenAi};
use super::proto;
use super::proto::ostinato_server::OstinatoServer;
use super::proto::vllm::grpc::engine::vllm_engine_server::VllmEngineServer;
use super::rpc::{Rpc, SERVICE};
use super::tls::{self, Protocol, Tls};
use super::vllm::{self, VllmRpc};
use crate::host::Host;
use crate::telemetry::with_causes;
use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;

/// After the streams have ended, the time for connections to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);
/// Between two looks at whether the model of an endpoint of its own is served, for that endpoint's health.
const HEALTH_LOOK: Duration = Duration::from_millis(200);

/// How a host is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long running streams may go on once the server stops.
    pub drain: Duration,
    /// Largest message taken from a client, bytes.
    pub max_message_bytes: usize,
    /// Most text of a prompt, bytes.
    pub max_prompt_bytes: usize,
    /// Events kept of each sample for a client that falls behind.
    pub stream_buffer: usize,
    /// Requests that a client may have unfinished; `None`: any number.
    pub client_limit: Option<u32>,
    /// Whether `ostinato-client` in the metadata names the client.
    pub trust_client_header: bool,
    /// Certificates; `None`: connections are not encrypted.
    pub tls: Option<Arc<Tls>>,
    /// Who may ask; `None`: whoever can connect.
    pub tokens: Option<Arc<Tokens>>,
    /// Connections of each endpoint that are open at once.
    pub connections: usize,
    /// From a connection's beginning until it is encrypted, and again until it speaks HTTP/2.
    pub handshake_wait: Duration,
    /// From a call's beginning until its message is there.
    pub message_wait: Duration,
    /// After so much silence of a connection its client is asked whether it is there.
    pub keepalive: Duration,
    /// How long an answer to that is waited for. A client to which nothing can be sent has as long as both together.
    pub keepalive_wait: Duration,
    /// The endpoints of single models; `None`: there are none.
    pub model_endpoints: Option<Arc<ModelEndpoints>>,
    /// What of it changes while the server runs, if somebody changes something.
    pub changes: Option<watch::Receiver<Changeable>>,
}

/// What of [`Options`] can change while the server runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Changeable {
    /// As in [`Options`]; also how long requests go on whose model leaves.
    pub drain: Duration,
    /// As in [`Options`], of requests that come.
    pub stream_buffer: usize,
    /// As in [`Options`].
    pub client_limit: Option<u32>,
    /// As in [`Options`].
    pub trust_client_header: bool,
}

impl Options {
    /// What of it can change.
    pub fn changeable(&self) -> Changeable {
        let Options { drain, stream_buffer, client_limit, trust_client_header, .. } = *self;
        Changeable { drain, stream_buffer, client_limit, trust_client_header }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            drain: Duration::from_secs(30),
            max_message_bytes: 16 << 20,
            max_prompt_bytes: 4 << 20,
            stream_buffer: 1024,
            client_limit: None,
            trust_client_header: false,
            tls: None,
            tokens: None,
            connections: 1024,
            handshake_wait: bounds::HANDSHAKE_WAIT,
            message_wait: bounds::MESSAGE_WAIT,
            keepalive: bounds::KEEPALIVE,
            keepalive_wait: bounds::KEEPALIVE_WAIT,
            model_endpoints: None,
            changes: None,
        }
    }
}

/// Why a server ended or never began.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors built into the program cannot be read back.
    #[error("cannot serve reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The transport failed.
    #[error("the gRPC transport failed")]
    Transport(#[from] tonic::transport::Error),
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Streams that were cut because the grace period was over.
    pub cut: usize,
}

/// Keeps clients' bounds as they are set.
async fn follow(mut settings: watch::Receiver<Changeable>, clients: Arc<Clients>) {
    while settings.changed().await.is_ok() {
        let Changeable { client_limit, trust_client_header, .. } = *settings.borrow();
        clients.set(client_limit, trust_client_header);
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The task of the HTTP endpoint, if there is one. It is aborted when this is dropped.
struct OnEnd(Option<tokio::task::JoinHandle<()>>);

impl OnEnd {
    /// Waits for its end.
    async fn ended(&mut self) {
        if let Some(task) = &mut self.0 {
            // A panic was logged where it happened.
            let _ = task.await;
        }
    }
}

impl Drop for OnEnd {
    fn drop(&mut self) {
        self.0.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Serves `host` over gRPC on `listener` until `shutdown` resolves, then drains.
pub async fn serve(
    host: Arc<Host>,
    listener: TcpListener,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> Result<Stopped, ServeError> {
    serve_with_http(host, listener, None, options, shutdown).await
}

/// As [`serve`], and OpenAI's API over HTTP on `http`, if there is one.
pub async fn serve_with_http(
    host: Arc<Host>,
    listener: TcpListener,
    http: Option<TcpListener>,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> Result<Stopped, ServeError> {
    let stop = CancellationToken::new();
    let (draining, closing) = (CancellationToken::new(), CancellationToken::new());
    let streams = TaskTracker::new();
    let clients = Arc::new(Clients::new(options.client_limit, options.trust_client_header));
    // Without a sender it stays as it is.
    let settings = options.changes.clone().unwrap_or_else(|| watch::channel(options.changeable()).1);
    let rpc = Rpc::new(Arc::clone(&host), settings.clone(), Arc::clone(&clients), stop.clone(), streams.clone())
        .with_most_text(options.max_prompt_bytes)
        .with_most_prepared(options.max_message_bytes.saturating_mul(bounds::MESSAGES_COMING))
        .with_model_endpoints(options.model_endpoints.clone());
    let follow = tokio::spawn(follow(settings.clone(), Arc::clone(&clients)));
    let _follow = AbortOnDrop(follow);
    let _following = closing.clone().drop_guard();
    options.tls.iter().for_each(|tls| drop(tokio::spawn(tls.follow(closing.clone()))));
    options.tokens.iter().for_each(|tokens| drop(tokio::spawn(tokens.follow(closing.clone()))));
    let grpc = Grpc {
        authentication: Authentication::new(options.tokens.clone(), Arc::clone(&host)),
        arrival: Arrival::new(options.message_wait, options.max_message_bytes, Arc::clone(&clients)),
        accept: tls::Accept {
            protocol: Protocol::Http2,
            tls: options.tls,
            connections: options.connections,
            handshake: options.handshake_wait,
            stuck: options.keepalive + options.keepalive_wait,
        },
        rpc,
        max_message_bytes: options.max_message_bytes,
        keepalive: (options.keepalive, options.keepalive_wait),
    };
    let openai = http.map(|listener| {
        let openai = OpenAi::new(grpc.rpc.clone(), grpc.authentication.clone(), grpc.arrival.clone());
        let accept = tls::Accept { protocol: Protocol::Http1, ..grpc.accept.clone() };
        tokio::spawn(openai::serve(openai, listener, accept, closing.clone()))
    });
    let mut openai = OnEnd(openai);
    let orders = options.model_endpoints.as_ref().and_then(|endpoints| endpoints.orders());
    let mut models = OnEnd(orders.map(|orders| {
        let grpc = grpc.clone();
        tokio::spawn(serve_models(grpc, orders, draining.clone(), closing.clone()))
    }));
    let (reporter, health) = tonic_health::server::health_reporter();
    set_health(&reporter, ServingStatus::Serving).await;
    let server = grpc.serve(listener, None, health, closing.clone());
    tokio::pin!(server);

    tokio::select! {
        ended = &mut server => {
            ended?;
            return Ok(Stopped { cut: 0 });
        }
        () = shutdown => {}
    }

    // The socket stays open while streams run, so that clients hear UNAVAILABLE and balancers
    // read NOT_SERVING instead of a refused connection.
    draining.cancel();
    set_health(&reporter, ServingStatus::NotServing).await;
    host.drain();
    let until = Instant::now() + settings.borrow().drain;
    tracing::info!(streams = streams.len(), "draining");
    let drained = async {
        streams.close();
        streams.wait().await;
    };
    let cut = tokio::select! {
        ended = &mut server => {
            ended?;
            return Ok(Stopped { cut: 0 });
        }
        () = drained => 0,
        () = tokio::time::sleep_until(until.into()) => streams.len(),
    };
    stop.cancel();
    end_health(reporter).await;
    closing.cancel();
    // What still hangs after that is dropped with the server.
    let ended = async { tokio::join!(&mut server, openai.ended(), models.ended()).0 };
    if let Ok(ended) = tokio::time::timeout(GOODBYE, ended).await {
        ended?;
    }
    Ok(Stopped { cut })
}

/// Sets the health of all services.
async fn set_health(reporter: &HealthReporter, status: ServingStatus) {
    reporter.set_service_status("", status).await;
    reporter.set_service_status(SERVICE, status).await;
    reporter.set_service_status(vllm::SERVICE, status).await;
}

/// Ends the streams of those who watch the health: they would hold their connections for ever.
async fn end_health(mut reporter: HealthReporter) {
    reporter.clear_service_status("").await;
    reporter.clear_service_status(SERVICE).await;
    reporter.clear_service_status(vllm::SERVICE).await;
}

/// What all gRPC endpoints have in common.
#[derive(Clone)]
struct Grpc {
    rpc: Rpc,
    authentication: Authentication,
    arrival: Arrival,
    accept: tls::Accept,
    max_message_bytes: usize,
    /// The silence after which a client is asked whether it is there, and how long the answer may take.
    keepalive: (Duration, Duration),
}

impl Grpc {
    /// Answers on `listener` until `closing`, for all models or for one.
    async fn serve<H: Health>(
        &self,
        listener: TcpListener,
        model: Option<Arc<str>>,
        health: HealthServer<H>,
        closing: CancellationToken,
    ) -> Result<(), ServeError> {
        let theirs = VllmEngineServer::new(VllmRpc::new(self.rpc.clone()));
        let theirs = theirs.max_decoding_message_size(self.max_message_bytes);
        let ours = OstinatoServer::new(self.rpc.clone()).max_decoding_message_size(self.max_message_bytes);
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let router = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(self.keepalive.0))
            .http2_keepalive_timeout(Some(self.keepalive.1))
            .http2_max_header_list_size(bounds::HEADER_BYTES)
            .max_concurrent_streams(bounds::STREAMS)
            .layer(Deadlines::new(Arc::clone(self.rpc.host())))
            .layer(self.authentication.clone())
            .layer(self.arrival.clone())
            .layer(OfModel(model))
            .add_service(ours)
            .add_service(theirs)
            .add_service(health)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?);
        let incoming = tls::incoming(listener, self.accept.clone());
        router.serve_with_incoming_shutdown(incoming, closing.cancelled_owned()).await?;
        Ok(())
    }

    /// Answers on the endpoint of one model until `closing`. It is healthy while the model is served, until `draining`.
    async fn serve_model(
        &self,
        listener: TcpListener,
        model: Arc<str>,
        draining: &CancellationToken,
        closing: CancellationToken,
    ) -> Result<(), ServeError> {
        let (reporter, health) = tonic_health::server::health_reporter();
        let host = Arc::clone(self.rpc.host());
        let is_served = || host.models().iter().any(|served| *served.name == *model) && !draining.is_cancelled();
        let status = |served| if served { ServingStatus::Serving } else { ServingStatus::NotServing };
        let mut served = is_served();
        set_health(&reporter, status(served)).await;
        let server = self.serve(listener, Some(Arc::clone(&model)), health, closing.clone());
        tokio::pin!(server);
        loop {
            tokio::select! {
                ended = &mut server => return ended,
                () = closing.cancelled() => {
                    end_health(reporter).await;
                    return server.await;
                }
                () = tokio::time::sleep(HEALTH_LOOK) => {}
            }
            let now = is_served();
            if now != served {
                served = now;
                set_health(&reporter, status(served)).await;
            }
        }
    }
}

/// Opens and closes endpoints of single models as ordered, until `closing`; then ends when they have ended.
async fn serve_models(
    grpc: Grpc,
    mut orders: UnboundedReceiver<Order>,
    draining: CancellationToken,
    closing: CancellationToken,
) {
    let endpoints = TaskTracker::new();
    let mut open: HashMap<String, CancellationToken> = HashMap::new();
    loop {
        let order = tokio::select! {
            order = orders.recv() => order,
            () = closing.cancelled() => None,
        };
        match order {
            None => break,
            Some(Order::Close(model)) => open.remove(&model).iter().for_each(CancellationToken::cancel),
            Some(Order::Open(model, listener)) => {
                let ending = closing.child_token();
                let before = open.insert(model.clone(), ending.clone());
                before.iter().for_each(CancellationToken::cancel);
                let (grpc, draining) = (grpc.clone(), draining.clone());
                endpoints.spawn(async move {
                    if let Err(error) = grpc.serve_model(listener, Arc::from(&*model), &draining, ending).await {
                        tracing::error!(model, "the model's endpoint has ended: {}", with_causes(&error));
                    }
                });
            }
        }
    }
    // Without a server nobody orders any more.
    closing.cancelled().await;
    endpoints.close();
    endpoints.wait().await;
}

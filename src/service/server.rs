//! The servers: the gRPC endpoint (our service, the routers' engine contract, health and reflection), the gRPC
//! endpoints of single models, and the HTTP endpoint of OpenAI's API, which shares clients, limits and tokens. To stop,
//! a server first reports itself as not serving and refuses new requests; running streams then have a grace period,
//! after which they are cut. Not here: signals, and creating the host.

use super::auth::{Authentication, Tokens};
use super::bounds::{self, Arrival};
use super::clients::Clients;
use super::deadline::Deadlines;
use super::model_endpoints::{EndpointChange, ModelEndpoints, OfModel};
use super::openai::{self, OpenAi};
use super::proto;
use super::proto::ostinato_server::OstinatoServer;
use super::proto::vllm::grpc::engine::vllm_engine_server::VllmEngineServer;
use super::rpc::{Rpc, SERVICE};
use super::tls::{self, Protocol, Tls};
use super::vllm::{self, VllmRpc};
use crate::host::{Host, ServedModel};
use crate::telemetry::with_causes;
use std::collections::HashMap;
use std::convert::Infallible;
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

/// The time that connections have to close after the streams have ended.
const GOODBYE: Duration = Duration::from_secs(1);
/// The interval at which the health of an endpoint is updated.
const HEALTH_LOOK: Duration = Duration::from_millis(200);

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The grace period of running streams once the server stops.
    pub drain: Duration,
    /// The maximum size of a client's message in bytes.
    pub max_message_bytes: usize,
    /// The maximum length of a prompt's text in bytes.
    pub max_prompt_bytes: usize,
    /// The number of events of each sample that are buffered for a slow client.
    pub stream_buffer: usize,
    /// The maximum number of unfinished requests of a client; `None` for no limit.
    pub client_limit: Option<u32>,
    /// Whether the metadata key `ostinato-client` identifies the client.
    pub trust_client_header: bool,
    /// The certificates; `None` to serve without TLS.
    pub tls: Option<Arc<Tls>>,
    /// The access tokens; `None` to let every caller in.
    pub tokens: Option<Arc<Tokens>>,
    /// The maximum number of open connections of each endpoint.
    pub connections: usize,
    /// The time limit for the TLS handshake, and again for the beginning of HTTP/2.
    pub handshake_wait: Duration,
    /// The time limit from the beginning of a call until its message has arrived.
    pub message_wait: Duration,
    /// The time without received bytes after which a connection is sent a keepalive ping.
    pub keepalive: Duration,
    /// The time limit for the answer to a ping. A client that takes no data has the sum of both times.
    pub keepalive_wait: Duration,
    /// The endpoints of single models, if there are any.
    pub model_endpoints: Option<Arc<ModelEndpoints>>,
    /// Changes of the settings that can change while the server runs.
    pub changes: Option<watch::Receiver<Changeable>>,
}

/// The settings that can change while the server runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Changeable {
    /// See [`Options::drain`]; also the grace period of requests on a model that is unloaded.
    pub drain: Duration,
    /// See [`Options::stream_buffer`]; applies to new requests.
    pub stream_buffer: usize,
    /// See [`Options::client_limit`].
    pub client_limit: Option<u32>,
    /// See [`Options::trust_client_header`].
    pub trust_client_header: bool,
}

impl Options {
    /// Returns the settings that can change while the server runs.
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

/// The reason for which a server failed or could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The protobuf descriptors that are built into the program cannot be decoded.
    #[error("cannot serve reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The transport failed.
    #[error("the gRPC transport failed")]
    Transport(#[from] tonic::transport::Error),
}

/// The result of a server's shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// The number of streams that were cut because the grace period was over.
    pub cut: usize,
}

/// Applies changed client limits, until the sender is dropped.
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
    /// Waits until the task ends.
    async fn ended(&mut self) {
        if let Some(task) = &mut self.0 {
            // The panic hook has logged the panic.
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

/// Like [`serve`], and also serves OpenAI's API over HTTP on `http`, if given.
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
    // Without a sender, the settings never change.
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
    let changes = options.model_endpoints.as_ref().and_then(|endpoints| endpoints.changes());
    let mut models = OnEnd(changes.map(|changes| {
        let grpc = grpc.clone();
        tokio::spawn(serve_models(grpc, changes, draining.clone(), closing.clone()))
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
        never = follow_health(&reporter, true, || host.is_serving()) => match never {},
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
    // Connections that are still open are dropped with the server.
    let ended = async { tokio::join!(&mut server, openai.ended(), models.ended()).0 };
    if let Ok(ended) = tokio::time::timeout(GOODBYE, ended).await {
        ended?;
    }
    Ok(Stopped { cut })
}

/// Sets the health status of all services.
async fn set_health(reporter: &HealthReporter, status: ServingStatus) {
    reporter.set_service_status("", status).await;
    reporter.set_service_status(SERVICE, status).await;
    reporter.set_service_status(vllm::SERVICE, status).await;
}

/// Updates the health status of all services whenever `is_serving` changes from its previous value, `was`. Never returns.
async fn follow_health(reporter: &HealthReporter, mut was: bool, is_serving: impl Fn() -> bool) -> Infallible {
    loop {
        tokio::time::sleep(HEALTH_LOOK).await;
        let now = is_serving();
        if now != was {
            was = now;
            set_health(reporter, status(now)).await;
        }
    }
}

fn status(serves: bool) -> ServingStatus {
    if serves { ServingStatus::Serving } else { ServingStatus::NotServing }
}

/// Ends the watch streams of the health service, which would otherwise keep their connections open.
async fn end_health(mut reporter: HealthReporter) {
    reporter.clear_service_status("").await;
    reporter.clear_service_status(SERVICE).await;
    reporter.clear_service_status(vllm::SERVICE).await;
}

/// The parts that all gRPC endpoints share.
#[derive(Clone)]
struct Grpc {
    rpc: Rpc,
    authentication: Authentication,
    arrival: Arrival,
    accept: tls::Accept,
    max_message_bytes: usize,
    /// The keepalive interval, and the time limit for the answer.
    keepalive: (Duration, Duration),
}

impl Grpc {
    /// Serves `listener` until `closing` is cancelled, for all models or for one.
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
                .register_encoded_file_descriptor_set(proto::descriptors())
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

    /// Serves the endpoint of one model until `closing` is cancelled. The endpoint is healthy while a replica of the model
    /// takes requests and the server does not drain.
    async fn serve_model(
        &self,
        listener: TcpListener,
        model: Arc<str>,
        draining: &CancellationToken,
        closing: CancellationToken,
    ) -> Result<(), ServeError> {
        let (reporter, health) = tonic_health::server::health_reporter();
        let host = Arc::clone(self.rpc.host());
        let takes = |served: &ServedModel| served.replicas.iter().any(|replica| replica.closed().is_none());
        let is_served = || {
            let models = host.models();
            models.iter().any(|served| *served.name == *model && takes(served)) && !draining.is_cancelled()
        };
        let served = is_served();
        set_health(&reporter, status(served)).await;
        let server = self.serve(listener, Some(Arc::clone(&model)), health, closing.clone());
        tokio::pin!(server);
        tokio::select! {
            ended = &mut server => return ended,
            () = closing.cancelled() => {}
            never = follow_health(&reporter, served, is_served) => match never {},
        }
        end_health(reporter).await;
        server.await
    }
}

/// Opens and closes endpoints of single models on request, until `closing` is cancelled; then waits for all of them to
/// end.
async fn serve_models(
    grpc: Grpc,
    mut changes: UnboundedReceiver<EndpointChange>,
    draining: CancellationToken,
    closing: CancellationToken,
) {
    let endpoints = TaskTracker::new();
    let mut open: HashMap<String, CancellationToken> = HashMap::new();
    loop {
        let change = tokio::select! {
            change = changes.recv() => change,
            () = closing.cancelled() => None,
        };
        match change {
            None => break,
            Some(EndpointChange::Close(model)) => open.remove(&model).iter().for_each(CancellationToken::cancel),
            Some(EndpointChange::Open(model, listener)) => {
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
    // The sender was dropped, so no change will follow.
    closing.cancelled().await;
    endpoints.close();
    endpoints.wait().await;
}

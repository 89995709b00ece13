//! The gRPC endpoint (our service, the engine contract of routers, health and reflection on one socket) and beside it
//! the HTTP endpoint of OpenAI's API with the same clients, limits and tokens; and the way they stop: health says so
//! first, new requests are refused, running streams go on for a while, then they are cut. Deliberately absent: signals,
//! and where the host comes from.

use super::auth::{Authentication, Tokens};
use super::bounds::{self, Arrival};
use super::clients::Clients;
use super::deadline::Deadlines;
use super::openai::{self, OpenAi};
use super::proto;
use super::proto::ostinato_server::OstinatoServer;
use super::proto::vllm::grpc::engine::vllm_engine_server::VllmEngineServer;
use super::rpc::{Rpc, SERVICE};
use super::tls::{self, Protocol, Tls};
use super::vllm::{self, VllmRpc};
use crate::host::Host;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic_health::ServingStatus;

/// After the streams have ended, the time for connections to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

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
    let closing = CancellationToken::new();
    let streams = TaskTracker::new();
    let clients = Arc::new(Clients::new(options.client_limit, options.trust_client_header));
    // Without a sender it stays as it is.
    let settings = options.changes.clone().unwrap_or_else(|| watch::channel(options.changeable()).1);
    let rpc = Rpc::new(Arc::clone(&host), settings.clone(), Arc::clone(&clients), stop.clone(), streams.clone())
        .with_most_text(options.max_prompt_bytes)
        .with_most_prepared(options.max_message_bytes.saturating_mul(bounds::MESSAGES_COMING));
    let follow = tokio::spawn(follow(settings.clone(), Arc::clone(&clients)));
    let _follow = AbortOnDrop(follow);
    let _following = closing.clone().drop_guard();
    options.tls.iter().for_each(|tls| drop(tokio::spawn(tls.follow(closing.clone()))));
    options.tokens.iter().for_each(|tokens| drop(tokio::spawn(tokens.follow(closing.clone()))));
    let authentication = Authentication::new(options.tokens.clone(), Arc::clone(&host));
    let arrival = Arrival::new(options.message_wait, options.max_message_bytes, Arc::clone(&clients));
    let accept = tls::Accept {
        protocol: Protocol::Http2,
        tls: options.tls,
        connections: options.connections,
        handshake: options.handshake_wait,
        stuck: options.keepalive + options.keepalive_wait,
    };
    let openai = http.map(|listener| {
        let openai = OpenAi::new(rpc.clone(), authentication.clone(), arrival.clone());
        let accept = tls::Accept { protocol: Protocol::Http1, ..accept.clone() };
        tokio::spawn(openai::serve(openai, listener, accept, closing.clone()))
    });
    let mut openai = OnEnd(openai);
    let theirs = VllmEngineServer::new(VllmRpc::new(rpc.clone())).max_decoding_message_size(options.max_message_bytes);
    let ours = OstinatoServer::new(rpc).max_decoding_message_size(options.max_message_bytes);
    let (mut reporter, health) = tonic_health::server::health_reporter();
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let set_health = async |reporter: &tonic_health::server::HealthReporter, status| {
        reporter.set_service_status("", status).await;
        reporter.set_service_status(SERVICE, status).await;
        reporter.set_service_status(vllm::SERVICE, status).await;
    };
    set_health(&reporter, ServingStatus::Serving).await;

    let router = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(options.keepalive))
        .http2_keepalive_timeout(Some(options.keepalive_wait))
        .http2_max_header_list_size(bounds::HEADER_BYTES)
        .max_concurrent_streams(bounds::STREAMS)
        .layer(Deadlines::new(Arc::clone(&host)))
        .layer(authentication)
        .layer(arrival)
        .add_service(ours)
        .add_service(theirs)
        .add_service(health)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    let incoming = tls::incoming(listener, accept);
    let server = router.serve_with_incoming_shutdown(incoming, closing.clone().cancelled_owned());
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
    // Watchers of health would hold their connections for ever.
    reporter.clear_service_status("").await;
    reporter.clear_service_status(SERVICE).await;
    reporter.clear_service_status(vllm::SERVICE).await;
    closing.cancel();
    // What still hangs after that is dropped with the server.
    let ended = async { tokio::join!(&mut server, openai.ended()).0 };
    if let Ok(ended) = tokio::time::timeout(GOODBYE, ended).await {
        ended?;
    }
    Ok(Stopped { cut })
}

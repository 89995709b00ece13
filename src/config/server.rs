//! `[server]`: the gRPC endpoint and its limits.

use super::listen::address;
use super::load::Problem;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The gRPC endpoint.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// The address and port to listen on; port 0 takes a free port and prints it.
    #[serde(deserialize_with = "address")]
    pub listen: SocketAddr,
    /// Allows a `listen` address that other machines can reach without `tls`.
    pub insecure: bool,
    /// The TLS certificates; by default connections are not encrypted.
    pub tls: Option<TlsConfig>,
    /// The file of access tokens, relative to the configuration file. If set, a client needs a token; by default anyone
    /// who can connect may send requests.
    pub tokens: Option<PathBuf>,
    /// The maximum number of open connections of each endpoint, gRPC and HTTP; a further one is closed.
    pub connections: u32,
    /// The maximum number of requests that wait for each replica; a further one fails with `RESOURCE_EXHAUSTED`.
    pub queue_limit: u32,
    /// The maximum number of unfinished requests of a client, running or waiting, on all models together. Each sample
    /// of a prompt counts as one request, and a further one fails with `RESOURCE_EXHAUSTED`. By default there is no
    /// limit. A client is identified by its token, by a trusted gateway's header (`trust_client_header`), or by its IP
    /// address.
    pub client_limit: Option<u32>,
    /// Whether a client is identified by the metadata key `ostinato-client`, if present. Only for a server that is
    /// reachable through a gateway alone: any other client could send a new name with each request.
    pub trust_client_header: bool,
    /// How long running streams may continue after SIGTERM or SIGINT, and the requests of a model that a reloaded
    /// configuration removes or replaces, in seconds.
    pub drain_seconds: f64,
    /// The maximum size of a message from a client.
    pub max_message_bytes: super::Bytes,
    /// The maximum text size of a prompt; for a chat, of all its messages together.
    pub max_prompt_bytes: super::Bytes,
    /// The maximum memory that a worker process may use in addition to its memory at start, for all structured-output
    /// constraints that it follows or for rendering a chat template. A constraint that needs more is refused.
    pub worker_memory: super::Bytes,
    /// The maximum processor time in seconds for one job of a worker: compiling a constraint, computing the tokens that
    /// it allows next, or rendering a chat template.
    pub worker_seconds: f64,
    /// The number of events that are buffered per sample for a client that reads more slowly than tokens are generated.
    /// The samples of a request share one buffer; the request is cancelled when that buffer is full.
    pub stream_buffer: u32,
}

/// The certificate files, relative to the configuration file; they are read again when they change.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// The server's certificate and its intermediate certificates, PEM.
    pub certificate: PathBuf,
    /// The certificate's private key, PEM.
    pub key: PathBuf,
    /// The authorities of client certificates, PEM; by default clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

impl Default for Server {
    fn default() -> Server {
        Server {
            listen: SocketAddr::from(([127, 0, 0, 1], 50051)),
            insecure: false,
            tls: None,
            tokens: None,
            connections: 1024,
            queue_limit: 64,
            client_limit: None,
            trust_client_header: false,
            drain_seconds: 30.0,
            max_message_bytes: super::Bytes(16 << 20),
            max_prompt_bytes: super::Bytes(4 << 20),
            worker_memory: super::Bytes(512 << 20),
            worker_seconds: 2.0,
            stream_buffer: 1024,
        }
    }
}

impl Server {
    /// Returns the paths of the files that the section names.
    pub(super) fn files(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let tls = self
            .tls
            .iter_mut()
            .flat_map(|tls| [&mut tls.certificate, &mut tls.key].into_iter().chain(&mut tls.client_ca));
        tls.chain(&mut self.tokens).filter(|path| !path.as_os_str().is_empty())
    }

    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !self.listen.ip().is_loopback() && !self.insecure && self.tls.is_none() {
            problems.push(Problem::new(
                "server.listen",
                "must be a loopback address unless there are certificates (server.tls), or \
                 server.insecure = true (or --insecure) allows connections that are not encrypted",
                self.listen,
            ));
        }
        if let Some(tls) = &self.tls {
            for (key, path) in [("certificate", &tls.certificate), ("key", &tls.key)] {
                if path.as_os_str().is_empty() {
                    problems.push(Problem::missing(format!("server.tls.{key}")));
                }
            }
        }
        if self.tokens.is_some() && self.trust_client_header {
            problems.push(Problem::new(
                "server.trust_client_header",
                "must not be given together with server.tokens: a token says who its client is",
                true,
            ));
        }
        if !(1..=1_048_576).contains(&self.connections) {
            problems.push(Problem::new("server.connections", "must be between 1 and 1048576", self.connections));
        }
        if !(1..=65_536).contains(&self.queue_limit) {
            problems.push(Problem::new("server.queue_limit", "must be between 1 and 65536", self.queue_limit));
        }
        if self.client_limit == Some(0) {
            problems.push(Problem::new("server.client_limit", "must be at least 1, or left out for no limit", 0));
        }
        if !(0.0..=3600.0).contains(&self.drain_seconds) {
            problems.push(Problem::new("server.drain_seconds", "must be between 0 and 3600", self.drain_seconds));
        }
        if !(1 << 10..=1 << 30).contains(&self.max_message_bytes.0) {
            problems.push(Problem::new(
                "server.max_message_bytes",
                "must be between 1 KiB and 1 GiB",
                self.max_message_bytes,
            ));
        }
        if self.max_prompt_bytes.0 == 0 {
            problems.push(Problem::new("server.max_prompt_bytes", "must be above 0", 0));
        }
        if !(64 << 20..=64 << 30).contains(&self.worker_memory.0) {
            problems.push(Problem::new(
                "server.worker_memory",
                "must be between 64 MiB and 64 GiB",
                self.worker_memory,
            ));
        }
        if !(0.1..=600.0).contains(&self.worker_seconds) {
            problems.push(Problem::new("server.worker_seconds", "must be between 0.1 and 600", self.worker_seconds));
        }
        if !(1..=1_048_576).contains(&self.stream_buffer) {
            problems.push(Problem::new("server.stream_buffer", "must be between 1 and 1048576", self.stream_buffer));
        }
        problems
    }
}

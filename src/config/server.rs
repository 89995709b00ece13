//! `[server]`: the gRPC endpoint and what it bounds.

use super::load::Problem;
use serde::Deserialize;
use std::net::SocketAddr;

/// The gRPC endpoint.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// Address and port; port 0 takes a free one and prints it.
    pub listen: SocketAddr,
    /// Allows a `listen` that other machines reach: there is no TLS and no authentication.
    pub insecure: bool,
    /// Requests that may wait for each replica; one more is `RESOURCE_EXHAUSTED`.
    pub queue_limit: u32,
    /// Requests that a client may have unfinished, running or waiting, on all models together; samples of one
    /// prompt count each, and one more is `RESOURCE_EXHAUSTED`. Unset: no limit. A client is an IP address.
    pub client_limit: Option<u32>,
    /// Where the metadata key `ostinato-client` is there, the client is whom it names. For a server that only a
    /// gateway reaches: any other client could name itself anew for each request.
    pub trust_client_header: bool,
    /// How long running streams may go on after SIGTERM.
    pub drain_seconds: f64,
    /// Largest message taken from a client, bytes.
    pub max_message_bytes: super::Bytes,
    /// Events kept of each sample for a client that reads slower than its tokens come; one more cancels it.
    pub stream_buffer: u32,
}

impl Default for Server {
    fn default() -> Server {
        Server {
            listen: SocketAddr::from(([127, 0, 0, 1], 50051)),
            insecure: false,
            queue_limit: 64,
            client_limit: None,
            trust_client_header: false,
            drain_seconds: 30.0,
            max_message_bytes: super::Bytes(16 << 20),
            stream_buffer: 1024,
        }
    }
}

impl Server {
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !self.listen.ip().is_loopback() && !self.insecure {
            problems.push(Problem::new(
                "server.listen",
                "must be a loopback address unless server.insecure = true (or --insecure): \
                 there is no TLS and no authentication",
                self.listen,
            ));
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
        if !(1..=1_048_576).contains(&self.stream_buffer) {
            problems.push(Problem::new("server.stream_buffer", "must be between 1 and 1048576", self.stream_buffer));
        }
        problems
    }
}

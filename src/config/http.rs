//! `[http]`: the HTTP endpoint of OpenAI's API. Its certificates, tokens and limits are those of `[server]`.

use super::listen::{clash, http};
use super::load::Problem;
use super::server::Server;
use serde::Deserialize;
use std::net::SocketAddr;

/// The HTTP endpoint.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpConfig {
    /// The address and port to listen on; port 0 takes a free port and prints it. `None` (`"off"`) disables the
    /// endpoint.
    #[serde(deserialize_with = "http")]
    pub listen: Option<SocketAddr>,
    /// Allows a `listen` address that other machines can reach without `server.tls`.
    pub insecure: bool,
}

impl Default for HttpConfig {
    fn default() -> HttpConfig {
        HttpConfig { listen: Some(SocketAddr::from(([127, 0, 0, 1], 8000))), insecure: false }
    }
}

impl HttpConfig {
    /// Returns the problems of these values; `admin` is the address of the admin endpoint.
    pub(super) fn problems(&self, server: &Server, admin: Option<SocketAddr>) -> Vec<Problem> {
        let Some(listen) = self.listen else {
            return Vec::new();
        };
        let mut problems = Vec::new();
        if !listen.ip().is_loopback() && !self.insecure && server.tls.is_none() {
            problems.push(Problem::new(
                "http.listen",
                "must be a loopback address unless there are certificates (server.tls), or \
                 http.insecure = true (or --insecure) allows connections that are not encrypted",
                listen,
            ));
        }
        for (key, other) in [("server.listen", Some(server.listen)), ("admin.listen", admin)] {
            if other.is_some_and(|other| clash(listen, other)) {
                problems.push(Problem::new("http.listen", &format!("must differ from {key}"), listen));
            }
        }
        problems
    }
}

//! `[admin]`: the HTTP endpoint of the admin page, the metrics and the health check. Not here: the content of those.

use super::listen::{admin, clash};
use super::load::Problem;
use serde::Deserialize;
use std::net::SocketAddr;

/// The admin endpoint.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// The address and port to listen on; port 0 takes a free port and prints it. `None` (`"off"`) disables the
    /// endpoint.
    #[serde(deserialize_with = "admin")]
    pub listen: Option<SocketAddr>,
    /// Allows a `listen` address that other machines can reach, although the endpoint has no TLS and no authentication.
    pub insecure: bool,
}

impl Default for AdminConfig {
    fn default() -> AdminConfig {
        AdminConfig { listen: Some(SocketAddr::from(([127, 0, 0, 1], 9464))), insecure: false }
    }
}

impl AdminConfig {
    /// Returns the problems of these values; `server` is the address of the gRPC endpoint.
    pub(super) fn problems(&self, server: SocketAddr) -> Vec<Problem> {
        let Some(listen) = self.listen else {
            return Vec::new();
        };
        let mut problems = Vec::new();
        if !listen.ip().is_loopback() && !self.insecure {
            problems.push(Problem::new(
                "admin.listen",
                "must be a loopback address unless admin.insecure = true (or --insecure): \
                 there is no TLS and no authentication",
                listen,
            ));
        }
        if clash(listen, server) {
            problems.push(Problem::new("admin.listen", "must differ from server.listen", listen));
        }
        problems
    }
}

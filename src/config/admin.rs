//! `[admin]`: the HTTP endpoint of the page, the metrics and the health check. Deliberately absent: what it shows.

use super::load::Problem;
use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected};
use std::net::SocketAddr;

/// The admin endpoint.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// Address and port, port 0 takes a free one and prints it; `None` (`"off"`): there is no such endpoint.
    #[serde(deserialize_with = "address_or_off")]
    pub listen: Option<SocketAddr>,
    /// Allows a `listen` that other machines reach: there is no TLS and no authentication.
    pub insecure: bool,
}

impl Default for Admin {
    fn default() -> Admin {
        Admin { listen: Some(SocketAddr::from(([127, 0, 0, 1], 9464))), insecure: false }
    }
}

/// What `admin.listen` may be, for messages.
const LISTEN: &str = "an address and port such as 127.0.0.1:9464, or \"off\"";

fn address_or_off<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text == "off" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| D::Error::invalid_value(Unexpected::Str(&text), &LISTEN))
}

impl Admin {
    /// `server` is where the gRPC endpoint listens.
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
        // Found now and not when the models are loaded and the second of them begins to listen.
        let any = listen.ip().is_unspecified() || server.ip().is_unspecified();
        if listen.port() != 0 && listen.port() == server.port() && (any || listen.ip() == server.ip()) {
            problems.push(Problem::new("admin.listen", "must differ from server.listen", listen));
        }
        problems
    }
}

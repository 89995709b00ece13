//! Addresses to listen on that can be `"off"`, and whether two of them conflict.

use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected};
use std::net::SocketAddr;

/// What such a key accepts, for error messages.
const LISTEN: &str = "an address and port such as 127.0.0.1:9464, or \"off\"";

/// Reads an address, or `None` from `"off"`.
pub(super) fn address_or_off<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text == "off" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| D::Error::invalid_value(Unexpected::Str(&text), &LISTEN))
}

/// Whether two endpoints cannot listen on these addresses together. Checked with the configuration, because otherwise
/// the conflict would appear only after the models are loaded, when the second endpoint begins to listen.
pub(super) fn clash(one: SocketAddr, other: SocketAddr) -> bool {
    let any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && (any || one.ip() == other.ip())
}

//! Addresses to listen on, some of which can be `"off"`, and whether two of them conflict.

use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected};
use std::net::SocketAddr;

/// The values that keys of addresses accept, for error messages.
const ADDRESS: &str = "an address and port such as 127.0.0.1:50051";
/// The values that `http.listen` accepts, for error messages.
const HTTP: &str = "an address and port such as 127.0.0.1:8000, or \"off\"";
/// The values that `admin.listen` accepts, for error messages.
const ADMIN: &str = "an address and port such as 127.0.0.1:9464, or \"off\"";

/// Reads an address.
pub(super) fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| D::Error::invalid_value(Unexpected::Str(&text), &ADDRESS))
}

/// Reads an address of a key that may be left out.
pub(super) fn some_address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    address(deserializer).map(Some)
}

/// Reads `http.listen`: an address, or `None` from `"off"`.
pub(super) fn http<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    address_or_off(deserializer, HTTP)
}

/// Reads `admin.listen`: an address, or `None` from `"off"`.
pub(super) fn admin<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    address_or_off(deserializer, ADMIN)
}

fn address_or_off<'de, D: Deserializer<'de>>(
    deserializer: D,
    expected: &'static str,
) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text == "off" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| D::Error::invalid_value(Unexpected::Str(&text), &expected))
}

/// Whether two endpoints cannot listen on these addresses together. Checked with the configuration, because otherwise
/// the conflict would appear only after the models are loaded, when the second endpoint begins to listen.
pub(super) fn clash(one: SocketAddr, other: SocketAddr) -> bool {
    let any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && (any || one.ip() == other.ip())
}

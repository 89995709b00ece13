//! How many unfinished requests each client has, and whether it may have more. A client is who connects, or whom a
//! gateway names that may be believed. Deliberately absent: who may connect at all.

use super::refusal::Refusal;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tonic::metadata::MetadataMap;

/// The metadata key by which a trusted gateway names its client.
pub const CLIENT_HEADER: &str = "ostinato-client";
/// The longest name, bytes: names are kept, and stand in messages.
const MAX_NAME: usize = 128;

/// No configured limit is as large.
const ANY_NUMBER: u32 = u32::MAX;

/// What clients may have unfinished, and what they have. Names with nothing unfinished are not kept.
#[derive(Debug, Default)]
pub struct Clients {
    /// Requests of each; [`ANY_NUMBER`]: as many as it likes.
    limit: AtomicU32,
    /// Whether [`CLIENT_HEADER`] is believed.
    trust_header: AtomicBool,
    unfinished: Mutex<HashMap<Client, u32>>,
}

/// Whose requests are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// By a gateway.
    Named(String),
    /// By where it connects from; port and address family do not matter.
    At(IpAddr),
    /// All that have no address.
    Unknown,
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Client::Named(name) => write!(f, "\"{name}\""),
            Client::At(address) => write!(f, "at {address}"),
            Client::Unknown => write!(f, "without an address"),
        }
    }
}

impl Clients {
    /// Counts for each client, up to `limit` where there is one.
    pub fn new(limit: Option<u32>, trust_header: bool) -> Clients {
        let clients = Clients::default();
        clients.set(limit, trust_header);
        clients
    }

    /// As [`Clients::new`] from now on. Requests that were taken without a limit are not counted.
    pub fn set(&self, limit: Option<u32>, trust_header: bool) {
        self.limit.store(limit.unwrap_or(ANY_NUMBER), Relaxed);
        self.trust_header.store(trust_header, Relaxed);
    }

    /// Who asks.
    pub fn identify(&self, metadata: &MetadataMap, peer: Option<SocketAddr>) -> Result<Client, Refusal> {
        if let (true, Some(name)) = (self.trust_header.load(Relaxed), metadata.get(CLIENT_HEADER)) {
            let shown = name.to_str().unwrap_or_default();
            if shown.is_empty() || shown.len() > MAX_NAME {
                let rule = const {
                    assert!(MAX_NAME == 128, "as the rule says");
                    "1 to 128 printable ASCII characters"
                };
                return Err(Refusal::Value { field: CLIENT_HEADER, value: format!("{name:?}"), rule });
            }
            return Ok(Client::Named(shown.to_owned()));
        }
        Ok(peer.map_or(Client::Unknown, |peer| Client::At(peer.ip().to_canonical())))
    }

    /// Room for a client's `asked` requests, all or none; `None` where nothing is counted.
    pub fn take(self: &Arc<Clients>, client: Client, asked: u32) -> Result<Option<Places>, Refusal> {
        let limit = self.limit.load(Relaxed);
        if limit == ANY_NUMBER {
            return Ok(None);
        }
        let mut all = self.unfinished();
        let unfinished = all.get(&client).copied().unwrap_or(0);
        if asked > limit.saturating_sub(unfinished) {
            return Err(Refusal::ClientBusy { client: client.to_string(), unfinished, asked, limit });
        }
        all.insert(client.clone(), unfinished + asked);
        Ok(Some(Places { clients: Arc::clone(self), client, held: asked }))
    }

    fn unfinished(&self) -> MutexGuard<'_, HashMap<Client, u32>> {
        // No panic happens while it is held, and each change of it is whole.
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client's room for some requests; what has not ended when it is dropped ends then.
#[derive(Debug)]
pub struct Places {
    clients: Arc<Clients>,
    client: Client,
    held: u32,
}

impl Places {
    /// One of them has ended.
    pub fn end_one(&mut self) {
        self.give_back(1);
    }

    fn give_back(&mut self, count: u32) {
        let count = count.min(self.held);
        self.held -= count;
        let mut all = self.clients.unfinished();
        if let Some(unfinished) = all.get_mut(&self.client) {
            *unfinished -= count;
            if *unfinished == 0 {
                all.remove(&self.client);
            }
        }
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        self.give_back(self.held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> Option<SocketAddr> {
        Some(text.parse().unwrap())
    }

    fn named(name: &str) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        metadata.insert(CLIENT_HEADER, name.parse().unwrap());
        metadata
    }

    #[test]
    fn a_client_is_its_address_or_whom_a_trusted_gateway_names() {
        let plain = Clients::new(Some(1), false);
        let trusting = Clients::new(Some(1), true);
        let at = Client::At("10.0.0.1".parse().unwrap());
        let identify = |clients: &Clients, metadata: &MetadataMap, from: &str| clients.identify(metadata, peer(from));
        assert_eq!(identify(&plain, &named("a"), "10.0.0.1:1").unwrap(), at, "anybody could say so");
        assert_eq!(identify(&plain, &MetadataMap::new(), "[::ffff:10.0.0.1]:2").unwrap(), at);
        assert_eq!(identify(&trusting, &MetadataMap::new(), "10.0.0.1:3").unwrap(), at);
        // A name that looks like an address is none.
        let name = Client::Named("10.0.0.1".to_owned());
        assert_eq!(identify(&trusting, &named("10.0.0.1"), "10.0.0.9:4").unwrap(), name);
        assert_ne!(name, at);
        for bad in ["", &"x".repeat(129)] {
            let error = identify(&trusting, &named(bad), "10.0.0.1:5").unwrap_err().to_string();
            assert!(error.contains(CLIENT_HEADER), "{error}");
        }
        assert_eq!(plain.identify(&MetadataMap::new(), None).unwrap(), Client::Unknown);
    }

    #[test]
    fn places_are_counted_for_each_client_and_forgotten_when_given_back() {
        let clients = Arc::new(Clients::new(Some(3), true));
        let client = |name: &str| Client::Named(name.to_owned());
        let mut two = clients.take(client("a"), 2).unwrap().unwrap();
        let error = clients.take(client("a"), 2).unwrap_err().to_string();
        assert_eq!(error, "client \"a\" has 2 unfinished requests and asks for 2 more, at most 3");
        let other = clients.take(client("b"), 3).unwrap();
        let one = clients.take(client("a"), 1).unwrap();
        assert!(clients.take(client("a"), 1).is_err());
        two.end_one();
        drop(clients.take(client("a"), 1).unwrap());
        // No more is given back than was held.
        two.end_one();
        two.end_one();
        assert!(clients.take(client("a"), 3).is_err());
        drop((one, other, two));
        assert!(clients.unfinished().is_empty());
        assert!(clients.take(client("a"), u32::MAX).is_err());
        assert!(Arc::new(Clients::new(None, false)).take(client("a"), u32::MAX).unwrap().is_none());
    }
}

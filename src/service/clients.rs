//! Counts the unfinished requests of each client against its limit, and keeps which client owns which request. A client is
//! identified by its access token, by the header of a trusted gateway, or by its address.
//! Not here: access rights (`auth`).

use super::meter::Meter;
use super::refusal::Refusal;
use crate::engine::request::{RequestError, SAMPLE_MARK};
use crate::replica::SubmitError;
use http::HeaderMap;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The metadata key by which a trusted gateway names its client.
pub const CLIENT_HEADER: &str = "ostinato-client";
/// The maximum length of a client's name in bytes; names are kept and appear in messages.
const MAX_NAME: usize = 128;

/// The value of [`Clients::limit`] if there is no limit.
const ANY_NUMBER: u32 = u32::MAX;

/// The limits of all clients, and their unfinished requests. Clients without unfinished requests are not kept.
#[derive(Debug, Default)]
pub struct Clients {
    /// The maximum number of unfinished requests of a client, or [`ANY_NUMBER`].
    limit: AtomicU32,
    /// Whether [`CLIENT_HEADER`] is trusted.
    trust_header: AtomicBool,
    unfinished: Mutex<HashMap<Client, u32>>,
    /// The unfinished requests of clients with tokens, by id: the owner, and the number of requests with that id.
    owners: Mutex<HashMap<String, (Client, u32)>>,
}

/// A client, whose requests are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// The holder of a token, by name.
    Token(String),
    /// The client that a gateway names.
    Named(String),
    /// All callers from one IP address, with IPv4-mapped addresses as IPv4.
    At(IpAddr),
    /// All callers without an address count as one client.
    Unknown,
}

/// The limits that a token sets for its holder.
#[derive(Clone, Debug, Default)]
pub struct Allowance {
    /// The maximum number of unfinished requests, in place of the limit for all clients.
    pub requests: Option<u32>,
    /// The rate limit in tokens per minute.
    pub meter: Option<Arc<Meter>>,
}

impl Client {
    /// Returns the client at an address.
    pub fn of(peer: Option<SocketAddr>) -> Client {
        peer.map_or(Client::Unknown, |peer| Client::At(peer.ip().to_canonical()))
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Client::Token(name) => write!(f, "with token \"{name}\""),
            Client::Named(name) => write!(f, "\"{name}\""),
            Client::At(address) => write!(f, "at {address}"),
            Client::Unknown => write!(f, "without an address"),
        }
    }
}

impl Clients {
    /// Creates the counts with a limit for each client; `None` for no limit.
    pub fn new(limit: Option<u32>, trust_header: bool) -> Clients {
        let clients = Clients::default();
        clients.set(limit, trust_header);
        clients
    }

    /// Changes the limit. Requests that were accepted without a limit are not counted.
    pub fn set(&self, limit: Option<u32>, trust_header: bool) {
        self.limit.store(limit.unwrap_or(ANY_NUMBER), Relaxed);
        self.trust_header.store(trust_header, Relaxed);
    }

    /// Identifies the client of a call by the gateway's header or by its address.
    pub fn identify(&self, headers: &HeaderMap, peer: Option<SocketAddr>) -> Result<Client, Refusal> {
        if let (true, Some(name)) = (self.trust_header.load(Relaxed), headers.get(CLIENT_HEADER)) {
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
        Ok(Client::of(peer))
    }

    /// Reserves places for `asked` requests of a client: all or none. Returns `None` if the client's requests are not
    /// counted.
    pub fn take(
        self: &Arc<Clients>,
        client: Client,
        asked: u32,
        allowance: &Allowance,
    ) -> Result<Option<Places>, Refusal> {
        let own = Some(self.limit.load(Relaxed)).filter(|limit| *limit != ANY_NUMBER);
        let limit = allowance.requests.or(own);
        let meter = allowance.meter.clone();
        if limit.is_none() && !matches!(client, Client::Token(_)) {
            return Ok(None);
        }
        if let Some(spent) = meter.as_ref().and_then(|meter| meter.ask(Instant::now()).err()) {
            return Err(Refusal::Spent { client: client.to_string(), spent });
        }
        let mut all = self.unfinished();
        let unfinished = all.get(&client).copied().unwrap_or(0);
        if let Some(limit) = limit.filter(|limit| asked > limit.saturating_sub(unfinished)) {
            return Err(Refusal::ClientBusy { client: client.to_string(), unfinished, asked, limit });
        }
        all.insert(client.clone(), unfinished.saturating_add(asked));
        Ok(Some(Places { clients: Arc::clone(self), client, held: asked, meter, id: None }))
    }

    /// Returns whether a client with a token may abort the requests with this id: the client owns the id, or no client
    /// with a token does. A sample's id is its request's id followed by a number.
    pub fn may_end(&self, client: &Client, id: &str) -> bool {
        let id = id.split(SAMPLE_MARK).next().unwrap_or_default();
        self.owners().get(id).is_none_or(|(owner, _)| owner == client)
    }

    fn owners(&self) -> MutexGuard<'_, HashMap<String, (Client, u32)>> {
        // See `unfinished`.
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unfinished(&self) -> MutexGuard<'_, HashMap<Client, u32>> {
        // No panic can happen while the lock is held, and every change is complete.
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The places that a client has reserved. Dropping it frees those of requests that have not ended.
#[derive(Debug)]
pub struct Places {
    clients: Arc<Clients>,
    client: Client,
    held: u32,
    /// The rate limit that the tokens of prompts and outputs count against.
    meter: Option<Arc<Meter>>,
    /// The id of the requests, if a client with a token owns it.
    id: Option<String>,
}

impl Places {
    /// Records the id of the requests, and charges a prompt of `prompt` tokens. Refuses an id that belongs to another
    /// token, because the owner of an id may abort its requests.
    pub fn admit(&mut self, id: &str, prompt: u32) -> Result<(), Refusal> {
        if matches!(self.client, Client::Token(_)) {
            let mut owners = self.clients.owners();
            let owner = owners.entry(id.to_owned()).or_insert_with(|| (self.client.clone(), 0));
            if owner.0 != self.client {
                return Err(SubmitError::Request(RequestError::DuplicateId(id.to_owned())).into());
            }
            owner.1 += 1;
            self.id = Some(id.to_owned());
        }
        match &self.meter {
            None => Ok(()),
            Some(meter) => {
                let spent = |spent| Refusal::Spent { client: self.client.to_string(), spent };
                meter.admit(prompt, Instant::now()).map_err(spent)
            }
        }
    }

    /// Charges one output token.
    pub fn drew_one(&self) {
        if let Some(meter) = &self.meter {
            meter.draw(1, Instant::now());
        }
    }

    /// Frees the place of a request that has ended.
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
        if let Some(id) = &self.id {
            let mut owners = self.clients.owners();
            if let Some((_, count)) = owners.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    owners.remove(id);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> Option<SocketAddr> {
        Some(text.parse().unwrap())
    }

    fn named(name: &str) -> HeaderMap {
        let mut metadata = HeaderMap::new();
        metadata.insert(CLIENT_HEADER, name.parse().unwrap());
        metadata
    }

    #[test]
    fn a_client_is_its_address_or_whom_a_trusted_gateway_names() {
        let plain = Clients::new(Some(1), false);
        let trusting = Clients::new(Some(1), true);
        let at = Client::At("10.0.0.1".parse().unwrap());
        let identify = |clients: &Clients, metadata: &HeaderMap, from: &str| clients.identify(metadata, peer(from));
        assert_eq!(identify(&plain, &named("a"), "10.0.0.1:1").unwrap(), at, "anybody could say so");
        assert_eq!(identify(&plain, &HeaderMap::new(), "[::ffff:10.0.0.1]:2").unwrap(), at);
        assert_eq!(identify(&trusting, &HeaderMap::new(), "10.0.0.1:3").unwrap(), at);
        // A name that looks like an address is none.
        let name = Client::Named("10.0.0.1".to_owned());
        assert_eq!(identify(&trusting, &named("10.0.0.1"), "10.0.0.9:4").unwrap(), name);
        assert_ne!(name, at);
        for bad in ["", &"x".repeat(129)] {
            let error = identify(&trusting, &named(bad), "10.0.0.1:5").unwrap_err().to_string();
            assert!(error.contains(CLIENT_HEADER), "{error}");
        }
        assert_eq!(plain.identify(&HeaderMap::new(), None).unwrap(), Client::Unknown);
    }

    #[test]
    fn places_are_counted_for_each_client_and_forgotten_when_given_back() {
        let clients = Arc::new(Clients::new(Some(3), true));
        let client = |name: &str| Client::Named(name.to_owned());
        let none = Allowance::default;
        let mut two = clients.take(client("a"), 2, &none()).unwrap().unwrap();
        let error = clients.take(client("a"), 2, &none()).unwrap_err().to_string();
        assert_eq!(error, "client \"a\" has 2 unfinished requests and asks for 2 more; the limit is 3");
        let other = clients.take(client("b"), 3, &none()).unwrap();
        let one = clients.take(client("a"), 1, &none()).unwrap();
        assert!(clients.take(client("a"), 1, &none()).is_err());
        two.end_one();
        drop(clients.take(client("a"), 1, &none()).unwrap());
        // No more is given back than was held.
        two.end_one();
        two.end_one();
        assert!(clients.take(client("a"), 3, &none()).is_err());
        drop((one, other, two));
        assert!(clients.unfinished().is_empty());
        assert!(clients.take(client("a"), u32::MAX, &none()).is_err());
        assert!(Arc::new(Clients::new(None, false)).take(client("a"), u32::MAX, &none()).unwrap().is_none());
    }
    #[test]
    fn a_tokens_own_limits_go_before_those_of_all_and_its_ids_are_its_own() {
        let clients = Arc::new(Clients::new(Some(1), false));
        let client = |name: &str| Client::Token(name.to_owned());
        let meter = Arc::new(Meter::new(60, Instant::now()));
        let allowance = Allowance { requests: Some(2), meter: Some(Arc::clone(&meter)) };
        let mut two = clients.take(client("a"), 2, &allowance).unwrap().unwrap();
        let error = clients.take(client("a"), 1, &allowance).unwrap_err().to_string();
        assert_eq!(error, "client with token \"a\" has 2 unfinished requests and asks for 1 more; the limit is 2");
        assert!(clients.take(client("b"), 2, &Allowance::default()).is_err(), "what all may have");

        two.admit("id", 50).unwrap();
        assert!(clients.may_end(&client("a"), "id") && !clients.may_end(&client("b"), "id"));
        assert!(clients.may_end(&client("b"), "other"));
        assert!(!clients.may_end(&client("b"), "id\u{0}1"), "one of its samples");
        let mut other = clients.take(client("b"), 1, &Allowance::default()).unwrap().unwrap();
        assert_eq!(other.admit("id", 1).unwrap_err().code(), tonic::Code::AlreadyExists);
        other.admit("own", 1).unwrap();
        drop(other);
        assert!(clients.may_end(&client("a"), "own"));

        // The prompt is charged first, then each drawn token; a client without tokens left is refused.
        (0..20).for_each(|_| two.drew_one());
        two.end_one();
        let error = clients.take(client("a"), 1, &allowance).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        assert!(error.to_string().contains("60 tokens per minute and 10 more"), "{error}");
        meter.give_back(50, Instant::now());
        drop(clients.take(client("a"), 1, &allowance).unwrap().unwrap());
        drop(two);
        assert!(clients.unfinished().is_empty() && clients.owners().is_empty());
        assert!(clients.may_end(&client("b"), "id"));
        // Without limits a token's requests are still its own.
        let clients = Arc::new(Clients::new(None, false));
        assert!(clients.take(client("a"), 1, &Allowance::default()).unwrap().is_some());
    }
}

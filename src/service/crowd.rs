//! The open connections of a listener, in a bounded number of places, and the choice of the connection that gives up
//! its place when a new one needs it. The gRPC endpoint (`tls`) and the endpoints of HTTP/1.1 (`connections`) use it.
//! Not here: accepting, reading and closing connections. A connection that loses its place is notified by a token
//! and closes itself.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// The connections of one listener.
#[derive(Debug)]
pub struct Crowd {
    /// When the listener began; [`Standing::heard`] counts from here.
    began: Instant,
    /// The most connections.
    most: usize,
    /// The most connections among them that are not established yet.
    most_new: usize,
    /// See [`Crowd::new`].
    blocked: Duration,
    all: Mutex<Vec<Entry>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    peer: Option<IpAddr>,
    standing: Arc<Standing>,
    out: CancellationToken,
}

/// The progress of a connection. A connection of a lower stage loses its place first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Stage {
    /// Nothing was received.
    Silent,
    /// Something was received.
    Begun,
    /// The connection speaks the protocol of the listener.
    Established,
    /// A call has begun on the connection.
    Called,
}

/// The state of one connection that decides whether it can be asked to give up its place. Shared by the connection,
/// which updates it, and its [`Crowd`], which reads it.
#[derive(Debug)]
pub struct Standing {
    began: Instant,
    /// A [`Stage`].
    stage: AtomicU8,
    /// The time of the last bytes that were received, in microseconds after `began`; until the connection is
    /// established the time at which it was accepted.
    heard: AtomicU64,
    /// The number of calls that are being answered.
    calls: AtomicUsize,
    /// Since when bytes wait that the peer does not take, in microseconds after `began`; `TAKING` if none do.
    blocked: AtomicU64,
}

/// The value of [`Standing::blocked`] while no bytes wait.
const TAKING: u64 = u64::MAX;

impl Standing {
    fn new(began: Instant) -> Standing {
        let heard = AtomicU64::new(micros(began));
        let (stage, blocked) = (AtomicU8::new(Stage::Silent as u8), AtomicU64::new(TAKING));
        Standing { began, stage, heard, calls: AtomicUsize::new(0), blocked }
    }

    /// Bytes were received.
    pub fn hear(&self) {
        self.stage.fetch_max(Stage::Begun as u8, Ordering::Relaxed);
        if self.is_established() {
            self.heard.store(micros(self.began), Ordering::Relaxed);
        }
    }

    /// The connection speaks the protocol of the listener.
    pub fn establish(&self) {
        self.stage.fetch_max(Stage::Established as u8, Ordering::Relaxed);
        self.hear();
    }

    /// The head of a call was received. The call may be without its message yet: it does not hold the place, see
    /// [`Standing::call`].
    pub fn call_begins(&self) {
        self.stage.fetch_max(Stage::Called as u8, Ordering::Relaxed);
    }

    fn is_established(&self) -> bool {
        self.stage.load(Ordering::Relaxed) >= Stage::Established as u8
    }

    fn is_idle(&self) -> bool {
        self.calls.load(Ordering::Relaxed) == 0
    }

    /// Something was sent, or it was tried: whether bytes are left that the peer does not take.
    pub fn send(&self, left: bool) {
        if !left {
            self.blocked.store(TAKING, Ordering::Relaxed);
        } else if self.blocked.load(Ordering::Relaxed) == TAKING {
            self.blocked.store(micros(self.began), Ordering::Relaxed);
        }
    }

    /// Whether the peer has taken nothing for this time although there is something.
    fn is_blocked(&self, time: Duration) -> bool {
        let since = self.blocked.load(Ordering::Relaxed);
        micros(self.began).checked_sub(since).is_some_and(|micros| u128::from(micros) >= time.as_micros())
    }

    /// A call is being answered until the guard is dropped; meanwhile the connection keeps its place.
    pub fn call(self: &Arc<Standing>) -> OpenCall {
        self.calls.fetch_add(1, Ordering::Relaxed);
        OpenCall(Arc::clone(self))
    }
}

/// See [`Standing::call`].
#[derive(Debug)]
pub struct OpenCall(Arc<Standing>);

impl Drop for OpenCall {
    fn drop(&mut self) {
        // A peer says nothing while its call is answered: without this, a connection between two calls would count as
        // silent for as long as the first one took, and lose its place to connections that never call.
        self.0.hear();
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

fn micros(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}

impl Crowd {
    /// Creates `most` places, of which at most `most_new` are for connections that are not established. A connection whose
    /// calls are answered may lose its place only if its peer has taken nothing of the answers for the time `blocked`.
    pub fn new(most: usize, most_new: usize, blocked: Duration) -> Crowd {
        Crowd { began: Instant::now(), most, most_new, blocked, all: Mutex::default(), next: AtomicU64::new(0) }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Entry>> {
        // Every change of the list is complete before the lock is released.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a new connection of `peer`. If all places for new connections are taken, a connection that is
    /// not established loses its place; if all places are taken, one without calls that are being answered does, or else
    /// one whose peer does not read its answers. Returns `None` if every connection has a call whose answer is read.
    pub fn enter(self: &Arc<Crowd>, peer: Option<IpAddr>) -> Option<ConnectionPlace> {
        let mut all = self.all();
        let is_new = |entry: &Entry| !entry.standing.is_established();
        if all.iter().filter(|entry| is_new(entry)).count() >= self.most_new {
            let goes = victim(&all, is_new)?;
            all.remove(goes).out.cancel();
        }
        if all.len() >= self.most {
            let idle = victim(&all, |entry| entry.standing.is_idle());
            let goes = idle.or_else(|| victim(&all, |entry| entry.standing.is_blocked(self.blocked)))?;
            all.remove(goes).out.cancel();
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (standing, out) = (Arc::new(Standing::new(self.began)), CancellationToken::new());
        all.push(Entry { number, peer, standing: Arc::clone(&standing), out: out.clone() });
        Some(ConnectionPlace { crowd: Arc::clone(self), number, standing, out })
    }
}

/// The index of the connection that loses its place. Only connections that `may` lose it count. It belongs to the peer
/// that has most of them (or to one of several such peers); among these connections it is the one with the lowest
/// stage, and among equals the one heard least recently. A peer is an IP address, whatever its ports.
fn victim(all: &[Entry], may: impl Fn(&Entry) -> bool) -> Option<usize> {
    let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
    all.iter().filter(|entry| may(entry)).for_each(|entry| *counts.entry(entry.peer).or_insert(0) += 1);
    let most = counts.values().max().copied()?;
    let of_most = all.iter().enumerate().filter(|(_, entry)| may(entry) && counts.get(&entry.peer) == Some(&most));
    let key = |entry: &Entry| {
        let Standing { stage, heard, .. } = &*entry.standing;
        (stage.load(Ordering::Relaxed), heard.load(Ordering::Relaxed), entry.number)
    };
    of_most.min_by_key(|(_, entry)| key(entry)).map(|(index, _)| index)
}

/// The place of one connection. Dropping it frees the place.
#[derive(Debug)]
pub struct ConnectionPlace {
    crowd: Arc<Crowd>,
    number: u64,
    standing: Arc<Standing>,
    out: CancellationToken,
}

impl ConnectionPlace {
    /// The state of the connection, to be updated by it.
    pub fn standing(&self) -> &Arc<Standing> {
        &self.standing
    }

    /// Cancelled when the connection has lost its place, and must close.
    pub fn out(&self) -> &CancellationToken {
        &self.out
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.crowd.all().retain(|entry| entry.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKED: Duration = Duration::from_secs(1);

    fn peer(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    fn gone(places: &[ConnectionPlace]) -> Vec<bool> {
        places.iter().map(|place| place.out().is_cancelled()).collect()
    }

    fn heard(place: &ConnectionPlace, at: u64) {
        place.standing().heard.store(at, Ordering::Relaxed);
    }

    #[test]
    fn of_too_many_half_open_connections_the_oldest_silent_one_of_the_greediest_goes() {
        let crowd = Arc::new(Crowd::new(100, 4, BLOCKED));
        let enter = |last: u8| crowd.enter(peer(last)).unwrap();
        let other = enter(1);
        let all: Vec<_> = (0..3).map(|_| enter(2)).collect();
        all[0].standing().hear();
        assert_eq!(gone(&all), [false; 3], "there is room for four");
        let fifth = enter(3);
        assert_eq!(gone(&all), [false, true, false]);
        let sixth = enter(3);
        assert_eq!(gone(&all), [false, true, true], "both peers have two: the oldest silent one goes");
        assert!(!other.out().is_cancelled());
        // Connections that have ended leave nothing behind.
        drop((all, fifth, sixth));
        assert_eq!(crowd.all().len(), 1);
        let unharmed = !other.out().is_cancelled();
        drop(other);
        assert!(crowd.all().is_empty() && unharmed);
        // All have begun: the oldest goes.
        let begun: Vec<_> = (0..5).map(|_| enter(9)).inspect(|place| place.standing().hear()).collect();
        assert_eq!(gone(&begun), [true, false, false, false, false]);
    }

    #[test]
    fn where_all_places_are_taken_the_greediest_peer_gives_one_up() {
        let crowd = Arc::new(Crowd::new(6, usize::MAX, BLOCKED));
        let established = |last: u8| crowd.enter(peer(last)).inspect(|place| place.standing().establish());
        let honest = established(1).unwrap();
        heard(&honest, 0);
        let greedy: Vec<_> = (0..5).map(|_| established(2).unwrap()).collect();
        greedy.iter().zip([50, 10, 20, 30, 40]).for_each(|(place, at)| heard(place, at));
        let calls = [greedy[1].standing().call(), greedy[2].standing().call()];
        // Of those without a call the one that was heard least recently.
        let second = established(3).unwrap();
        assert_eq!(gone(&greedy), [false, false, false, true, false]);
        // The greedy peer's own new connections take its own places.
        let _more = established(2).unwrap();
        assert_eq!(gone(&greedy), [false, false, false, true, true]);
        assert!(!honest.out().is_cancelled() && !second.out().is_cancelled());
        assert_eq!(crowd.all().len(), 6);
        // Where every connection has a call, the new one is turned away.
        let busy: Vec<_> = crowd.all().iter().map(|entry| entry.standing.call()).collect();
        assert!(established(4).is_none());
        drop((busy, calls));
        assert!(established(4).is_some());
    }

    #[test]
    fn a_connection_keeps_its_place_between_two_calls() {
        let crowd = Arc::new(Crowd::new(3, usize::MAX, BLOCKED));
        let established = |last: u8| crowd.enter(peer(last)).inspect(|place| place.standing().establish());
        let client = established(1).unwrap();
        let call = client.standing().call();
        std::thread::sleep(Duration::from_millis(1));
        let silent: Vec<_> = (2..=3).map(|last| established(last).unwrap()).collect();
        std::thread::sleep(Duration::from_millis(1));
        drop(call);
        let _new = established(4).unwrap();
        assert_eq!(gone(&silent), [true, false]);
        assert!(!client.out().is_cancelled());
    }

    #[test]
    fn connections_without_any_call_give_up_their_places_first() {
        let crowd = Arc::new(Crowd::new(3, usize::MAX, BLOCKED));
        let established = || crowd.enter(peer(1)).inspect(|place| place.standing().establish()).unwrap();
        let client = established();
        client.standing().call_begins();
        heard(&client, 0);
        let later: Vec<_> = (0..10).map(|_| established()).collect();
        assert!(!client.out().is_cancelled());
        assert_eq!(gone(&later).iter().filter(|gone| **gone).count(), 8);
        // Among connections with calls, the one that was heard least recently goes.
        later[8..].iter().for_each(|place| place.standing().call_begins());
        let _new = established();
        assert!(client.out().is_cancelled());
    }

    #[test]
    fn calls_whose_answers_are_not_read_keep_nobody_out() {
        let crowd = Arc::new(Crowd::new(3, usize::MAX, BLOCKED));
        let established = |last: u8| crowd.enter(peer(last)).inspect(|place| place.standing().establish());
        let all: Vec<_> = (1..=3).map(|last| established(last).unwrap()).collect();
        let calls: Vec<_> = all.iter().map(|place| place.standing().call()).collect();
        all.iter().for_each(|place| place.standing().send(true));
        assert!(established(4).is_none(), "answers wait only now");
        let waits = |place: &ConnectionPlace| place.standing().blocked.store(0, Ordering::Relaxed);
        all.iter().for_each(waits);
        // One of them takes what it is sent again.
        all[0].standing().send(false);
        all[0].standing().send(true);
        std::thread::sleep(BLOCKED);
        all[0].standing().send(false);
        heard(&all[1], 2);
        heard(&all[2], 1);
        let _new = established(4).unwrap();
        assert_eq!(gone(&all), [false, false, true], "the one that was heard least recently");
        drop(calls);
    }
}

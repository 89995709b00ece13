//! Connections of the admin endpoint: so many at once, none that waits for ever. Whoever comes is served: where all places
//! are taken, the connection that has been silent longest makes room, so that a health check is answered while others
//! hold connections open. Deliberately absent: what is answered.

use crate::service::tls::{NO_ROOM, Saying, Stuck, is_ours};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections that are open at once.
pub const CONNECTIONS: usize = 64;
/// From a connection's beginning, or its last answer, until the next request's head is there.
const HEAD_WAIT: Duration = Duration::from_secs(10);
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// A connection that has taken nothing for as long, with bytes waiting, is closed.
const STUCK: Duration = Duration::from_secs(20);

/// Answers on `listener` until `stop`; then what is under way is answered.
pub(super) async fn serve(listener: TcpListener, app: Router, stop: CancellationToken) {
    let places = Arc::new(Places::default());
    let tasks = TaskTracker::new();
    let mut saying = Saying::default();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                if is_ours(&error) {
                    if saying.again() {
                        tracing::warn!(%error, "connections of the admin endpoint cannot be taken");
                    }
                    tokio::time::sleep(NO_ROOM).await;
                }
                continue;
            }
        };
        let place = places.enter();
        tasks.spawn(answer(stream, place, app.clone(), stop.clone()));
    }
    tasks.close();
    tasks.wait().await;
}

/// Answers one client.
async fn answer(stream: TcpStream, place: Place, app: Router, stop: CancellationToken) {
    let out = place.out.clone();
    let stream = TokioIo::new(Watched { stream, stuck: Stuck::after(STUCK), place });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_WAIT).max_buf_size(HEAD_BYTES);
    let mut served = pin!(server.serve_connection(stream, TowerToHyperService::new(app)));
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection of the admin endpoint ended");
                }
                return;
            }
            () = out.cancelled() => {
                tracing::debug!("a connection of the admin endpoint made room for another one");
                return;
            }
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

/// The connections that are open.
#[derive(Debug)]
struct Places {
    began: Instant,
    all: Mutex<Vec<Entry>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    /// When something was heard last, microseconds after the beginning.
    heard: Arc<AtomicU64>,
    out: CancellationToken,
}

impl Default for Places {
    fn default() -> Places {
        Places { began: Instant::now(), all: Mutex::default(), next: AtomicU64::new(0) }
    }
}

impl Places {
    fn all(&self) -> MutexGuard<'_, Vec<Entry>> {
        // Each change of it is whole.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// A place; whoever has been silent longest gives up its own where all are taken.
    fn enter(self: &Arc<Places>) -> Place {
        let (heard, out) = (Arc::new(AtomicU64::new(self.now())), CancellationToken::new());
        let mut all = self.all();
        if all.len() >= CONNECTIONS {
            let longest = all.iter().enumerate().min_by_key(|(_, entry)| entry.heard.load(Ordering::Relaxed));
            if let Some((goes, _)) = longest {
                all.remove(goes).out.cancel();
            }
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        all.push(Entry { number, heard: Arc::clone(&heard), out: out.clone() });
        Place { places: Arc::clone(self), number, heard, out }
    }
}

/// One of them.
#[derive(Debug)]
struct Place {
    places: Arc<Places>,
    number: u64,
    heard: Arc<AtomicU64>,
    /// When others need it.
    out: CancellationToken,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.all().retain(|entry| entry.number != self.number);
    }
}

/// A connection that is held to taking what it is sent, and tells its place when it is heard.
struct Watched {
    stream: TcpStream,
    stuck: Stuck,
    place: Place,
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if into.filled().len() > before {
            self.place.heard.store(self.place.places.now(), Ordering::Relaxed);
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.stuck.sent(context, sent)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_flush(context);
        self.stuck.sent(context, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_shutdown(context);
        self.stuck.sent(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.stuck.sent(context, sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_all_places_are_taken_the_longest_silent_makes_room() {
        let places = Arc::new(Places::default());
        let all: Vec<Place> = (0..CONNECTIONS).map(|_| places.enter()).collect();
        let heard = |place: usize, at: u64| all[place].heard.store(at, Ordering::Relaxed);
        (0..CONNECTIONS).for_each(|place| heard(place, 100 + place as u64));
        heard(0, u64::MAX);
        let mut more = Vec::new();
        for goes in &all[1..4] {
            assert!(!goes.out.is_cancelled());
            more.push(places.enter());
            more.iter().for_each(|place| place.heard.store(u64::MAX, Ordering::Relaxed));
            assert!(goes.out.is_cancelled());
            assert_eq!(places.all().len(), CONNECTIONS);
        }
        assert!(!all[0].out.is_cancelled());
        drop((all, more));
        assert!(places.all().is_empty());
    }
}

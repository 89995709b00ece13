//! The connections of the admin endpoint: a bounded number, none of which may wait for ever. A new connection is always
//! accepted: if all places are taken, the connection that was heard least recently, of the peer that has most, gives up
//! its place (`service::crowd`). So a health check is answered while others hold connections open.
//! Not here: what is answered.

use crate::service::crowd::{ConnectionPlace, Crowd};
use crate::service::tls::{NO_ROOM, Saying, Stuck, is_ours};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The most open connections.
pub const CONNECTIONS: usize = 64;
/// The time from a connection's beginning, or its last answer, until the head of the next request is complete.
const HEAD_WAIT: Duration = Duration::from_secs(10);
/// The most bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// The time after which a connection is closed that takes nothing of what it is sent.
const STUCK: Duration = Duration::from_secs(20);

/// Answers on `listener` until `stop` is cancelled; then finishes the requests that have begun.
pub(super) async fn serve(listener: TcpListener, app: Router, stop: CancellationToken) {
    // All count as established: this listener has no handshake.
    let crowd = Arc::new(Crowd::new(CONNECTIONS, usize::MAX));
    let tasks = TaskTracker::new();
    let mut saying = Saying::default();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
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
        // No connection is ever marked as having a call, so there is always one that gives up its place.
        let Some(place) = crowd.enter(Some(peer.ip().to_canonical())) else { continue };
        place.standing().establish();
        tasks.spawn(answer(stream, place, app.clone(), stop.clone()));
    }
    tasks.close();
    tasks.wait().await;
}

/// Answers the requests of one connection.
async fn answer(stream: TcpStream, place: ConnectionPlace, app: Router, stop: CancellationToken) {
    let out = place.out().clone();
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
                tracing::debug!("a connection of the admin endpoint gave up its place");
                return;
            }
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

/// A connection that must take what it is sent, and that notes in its place when it is heard.
struct Watched {
    stream: TcpStream,
    stuck: Stuck,
    place: ConnectionPlace,
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if into.filled().len() > before {
            self.place.standing().hear();
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

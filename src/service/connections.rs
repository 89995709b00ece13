//! The connections of an HTTP/1.1 endpoint, bounded in number and in waiting time. The admin endpoint and OpenAI's API
//! use it. If all places are taken, a new connection takes the place of the least recently active connection of the
//! peer with the most connections, except for connections whose call is answered and read (`service::crowd`).
//! Not here: the answers, and accepting connections (`service::tls`).

use super::tls::{self, Accept, Connection};
use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::pin::pin;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::server::Connected;
use tower_service::Service;

/// The time limit from the beginning of a connection, or its last answer, until the head of the next request is
/// complete.
pub const HEAD_WAIT: Duration = Duration::from_secs(10);
/// The maximum size of a request's head in bytes.
const HEAD_BYTES: usize = 16 << 10;

/// Serves `listener` until `stop` is cancelled; then finishes the requests that have begun. Each request has the
/// connection's [`tls::ConnectInfo`] in its extensions. `endpoint` names the endpoint in logs.
pub(super) async fn serve(
    listener: TcpListener,
    app: Router,
    accept: Accept,
    endpoint: &'static str,
    stop: CancellationToken,
) {
    let mut incoming = tls::incoming(listener, accept);
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = incoming.next() => accepted,
        };
        match accepted {
            Some(Ok(connection)) => drop(tasks.spawn(answer(connection, app.clone(), endpoint, stop.clone()))),
            Some(Err(_)) => {}
            None => break,
        }
    }
    drop(incoming);
    tasks.close();
    tasks.wait().await;
}

/// Serves one connection.
async fn answer(connection: Connection, app: Router, endpoint: &'static str, stop: CancellationToken) {
    let (info, out) = (connection.connect_info(), connection.out().clone());
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_WAIT).max_buf_size(HEAD_BYTES);
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        info.standing().call_begins();
        request.extensions_mut().insert(info.clone());
        app.clone().call(request)
    });
    let mut served = pin!(server.serve_connection(TokioIo::new(connection), service));
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, endpoint, "a connection ended");
                }
                return;
            }
            () = out.cancelled() => {
                tracing::debug!(endpoint, "a connection gave up its place");
                return;
            }
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

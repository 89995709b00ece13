//! The connections of all endpoints: accepting and counting them, the TLS handshake where there are certificates, and
//! the bounds on a connection's behaviour. A connection must speak its protocol soon and must take what it is sent. A
//! half-open connection costs one place for a bounded time: nothing waits for its handshake, and if too many are half
//! open, or all places are taken, a connection of the peer that has most gives up its place (`crowd`).
//! Not here: which calls a client may make (`auth`).

use super::bounds::HANDSHAKES;
use super::crowd::{ConnectionPlace, Crowd, Standing};
use super::watch::Watched;
use crate::config::{self, file};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{Connected, TcpConnectInfo};

use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

/// The time for which a peer over HTTP/1.1 may take nothing of its answers before its connection may lose its place to a new
/// one: a peer that keeps up never waits so long.
const UNREAD: Duration = Duration::from_secs(1);

/// The protocol of an endpoint's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/2, for gRPC.
    Http2,
    /// HTTP/1.1.
    Http1,
}

impl Protocol {
    /// The name in TLS (ALPN).
    fn alpn(self) -> &'static [u8] {
        match self {
            Protocol::Http2 => b"h2",
            Protocol::Http1 => b"http/1.1",
        }
    }

    /// Whether a connection with this result of ALPN is taken. Clients of HTTP/1.1 need not take part in it.
    fn takes(self, alpn: Option<&[u8]>) -> bool {
        alpn.map_or(self == Protocol::Http1, |alpn| alpn == self.alpn())
    }

    /// The number of bytes after which a connection is taken to speak the protocol: of HTTP/2's connection preface and
    /// the first frame's header, or of the shortest request line.
    fn preface(self) -> usize {
        match self {
            Protocol::Http2 => 24 + 9,
            Protocol::Http1 => "GET / HTTP/1.1\r\n".len(),
        }
    }
}
/// The capacity of the channel of connections that are ready; the server takes them at once.
const READY: usize = 16;
/// The wait until the next `accept` after one that failed for lack of files or memory.
const NO_ROOM: Duration = Duration::from_millis(100);
/// The least time between two log lines about something that clients can cause repeatedly.
const SAID: Duration = Duration::from_secs(60);

/// The reasons why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file is missing, is not PEM, or does not hold what it should.
    #[error("cannot read {what} from \"{}\"", path.display())]
    File {
        /// The expected content of the file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: PemError,
    },
    /// A certificate in the file of authorities is not an authority's.
    #[error("\"{}\" holds what is no authority's certificate", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// The authorities cannot be used to verify clients' certificates.
    #[error("clients' certificates cannot be checked with \"{}\"", path.display())]
    Verifier {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: VerifierBuilderError,
    },
    /// The certificate and the key do not belong together, or are of an unknown kind.
    #[error("certificate \"{}\" cannot be used with key \"{}\"", certificate.display(), key.display())]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
}

/// The certificates of the endpoint, read again when their files change. New connections use the new ones; open
/// connections keep theirs.
#[derive(Debug)]
pub struct Tls {
    configs: Arc<Watched<Configs>>,
}

/// The TLS configurations of both protocols, with the same certificates.
#[derive(Debug)]
struct Configs {
    http2: Arc<ServerConfig>,
    http1: Arc<ServerConfig>,
}

impl Tls {
    /// Reads the files.
    pub fn read(files: &config::TlsConfig) -> Result<Tls, TlsError> {
        let paths = [&files.certificate, &files.key].into_iter().chain(&files.client_ca).cloned().collect();
        let files = files.clone();
        let load = move |_: Option<&Configs>| {
            let of = |protocol: Protocol, mut config: ServerConfig| {
                config.alpn_protocols = vec![protocol.alpn().to_vec()];
                Arc::new(config)
            };
            let config = server_config(&files)?;
            Ok(Configs { http2: of(Protocol::Http2, config.clone()), http1: of(Protocol::Http1, config) })
        };
        Ok(Tls { configs: Arc::new(Watched::new("certificates", paths, load)?) })
    }

    /// Reads the files again when they change, until `stop` is cancelled.
    pub fn follow(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.configs).follow(stop)
    }

    fn acceptor(&self, protocol: Protocol) -> TlsAcceptor {
        let configs = self.configs.current();
        TlsAcceptor::from(Arc::clone(match protocol {
            Protocol::Http2 => &configs.http2,
            Protocol::Http1 => &configs.http1,
        }))
    }
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |source| TlsError::File { what, path: path.to_owned(), source };
    let pem = file::read(path, file::SMALL).map_err(|error| wrong(PemError::Io(error)))?;
    let all: Vec<_> = CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().map_err(wrong)?;
    if all.is_empty() { Err(wrong(PemError::NoItemsFound)) } else { Ok(all) }
}

fn server_config(files: &config::TlsConfig) -> Result<ServerConfig, TlsError> {
    let config::TlsConfig { certificate, key, client_ca } = files;
    let chain = certificates("a certificate", certificate)?;
    let wrong = |source| TlsError::File { what: "a private key", path: key.clone(), source };
    let pem = file::read(key, file::SMALL).map_err(|error| wrong(PemError::Io(error)))?;
    let private = PrivateKeyDer::from_pem_slice(&pem).map_err(wrong)?;
    let pair = |source| TlsError::Pair { certificate: certificate.clone(), key: key.clone(), source };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(pair)?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates("authorities of clients", path)? {
                let wrong = |source| TlsError::Authority { path: path.clone(), source };
                roots.add(authority).map_err(wrong)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            let wrong = |source| TlsError::Verifier { path: path.clone(), source };
            builder.with_client_cert_verifier(verifier.map_err(wrong)?)
        }
    };
    builder.with_single_cert(chain, private).map_err(pair)
}

/// How connections are accepted.
#[derive(Clone, Debug)]
pub struct Accept {
    /// The protocol of the connections.
    pub protocol: Protocol,
    /// The certificates; `None`: connections are not encrypted.
    pub tls: Option<Arc<Tls>>,
    /// The most open connections. A further one takes the place of one without open calls.
    pub connections: usize,
    /// The time for the TLS handshake, and again for the beginning of the protocol.
    pub handshake: Duration,
    /// The time after which a connection is closed whose peer reads none of the data sent to it.
    pub stuck: Duration,
}

/// Accepts connections until the stream is dropped.
pub fn incoming(listener: TcpListener, accept: Accept) -> ReceiverStream<io::Result<Connection>> {
    let (sender, receiver) = mpsc::channel(READY);
    tokio::spawn(async move {
        tokio::select! {
            () = sender.closed() => {}
            () = take(listener, accept, &sender) => {}
        }
    });
    ReceiverStream::new(receiver)
}

async fn take(listener: TcpListener, accept: Accept, sender: &mpsc::Sender<io::Result<Connection>>) {
    let blocked = match accept.protocol {
        // A client of gRPC has the time of a keepalive to answer, however full the endpoint is.
        Protocol::Http2 => accept.stuck,
        Protocol::Http1 => UNREAD,
    };
    let crowd = Arc::new(Crowd::new(accept.connections, HANDSHAKES, blocked));
    let mut saying = Saying::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                if is_ours(&error) {
                    if saying.again() {
                        tracing::warn!(%error, "connections cannot be taken");
                    }
                    tokio::time::sleep(NO_ROOM).await;
                }
                continue;
            }
        };
        let info = stream.connect_info();
        let peer = info.remote_addr;
        let Some(place) = crowd.enter(peer.map(|peer| peer.ip().to_canonical())) else {
            if saying.again() {
                tracing::warn!(
                    connections = accept.connections,
                    "all connections have calls whose answers are read, further ones are closed"
                );
            }
            continue;
        };
        // Nagle's algorithm would hold tokens back. The call fails only if the peer has gone.
        let _ = stream.set_nodelay(true);
        let (wait, protocol, bounds) = (accept.handshake, accept.protocol, accept.clone());
        let Some(tls) = &accept.tls else {
            let connection = Connection::new(Transport::Plain(stream), info, place, &bounds);
            if sender.send(Ok(connection)).await.is_err() {
                return;
            }
            continue;
        };
        let acceptor = tls.acceptor(protocol);
        let sender = sender.clone();
        tokio::spawn(async move {
            let handshake = async {
                // Any byte counts as the beginning. `readable` alone may return without one.
                stream.peek(&mut [0]).await?;
                place.standing().hear();
                acceptor.accept(stream).await
            };
            let ended = tokio::select! {
                biased;
                () = place.out().cancelled() => {
                    tracing::debug!(?peer, "a TLS handshake gave up its place");
                    return;
                }
                ended = tokio::time::timeout(wait, handshake) => ended,
            };
            match ended {
                Ok(Ok(stream)) if protocol.takes(stream.get_ref().1.alpn_protocol()) => {
                    let stream = Transport::Encrypted(Box::new(stream));
                    // Fails only when the server stops.
                    let _ = sender.send(Ok(Connection::new(stream, info, place, &bounds))).await;
                }
                Ok(Ok(_)) => tracing::debug!(?peer, "a connection does not speak {protocol:?}"),
                Ok(Err(error)) => tracing::debug!(?peer, %error, "a TLS handshake failed"),
                Err(_) => tracing::debug!(?peer, "a TLS handshake took longer than {:.1} s", wait.as_secs_f64()),
            }
        });
    }
}

/// Whether `accept` failed because of this process (files, memory) and not because the client has gone.
fn is_ours(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    ![ConnectionAborted, ConnectionReset, Interrupted].contains(&error.kind())
}

/// Limits how often something that clients can cause repeatedly is logged: once in [`SAID`].
#[derive(Debug, Default)]
struct Saying(Option<Instant>);

impl Saying {
    /// Whether to log it now.
    fn again(&mut self) -> bool {
        let due = self.0.is_none_or(|said| said.elapsed() >= SAID);
        if due {
            self.0 = Some(Instant::now());
        }
        due
    }
}

/// The properties of a request's connection, kept in the request's extensions.
#[derive(Clone, Debug)]
pub struct ConnectInfo {
    tcp: TcpConnectInfo,
    standing: Arc<Standing>,
}

impl ConnectInfo {
    /// The addresses, in the type in which tonic looks for them.
    pub fn tcp(&self) -> &TcpConnectInfo {
        &self.tcp
    }

    /// The address of the client.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.tcp.remote_addr
    }

    /// The state of the connection, to which calls are added while they are answered.
    pub fn standing(&self) -> &Arc<Standing> {
        &self.standing
    }
}

/// One connection, until it is closed.
#[derive(Debug)]
pub struct Connection {
    stream: Transport,
    info: TcpConnectInfo,
    place: ConnectionPlace,
    /// Ready when the connection has lost its place.
    out: Pin<Box<WaitForCancellationFutureOwned>>,
    /// The time by which the connection must speak its protocol; `None` once it does.
    proof: Option<Pin<Box<Sleep>>>,
    /// The number of bytes that were received until it did.
    heard: usize,
    /// The number of bytes after which it does.
    preface: usize,
    stuck: Stuck,
}

impl Connection {
    fn new(stream: Transport, info: TcpConnectInfo, place: ConnectionPlace, bounds: &Accept) -> Connection {
        let out = Box::pin(place.out().clone().cancelled_owned());
        let proof = Some(Box::pin(tokio::time::sleep(bounds.handshake)));
        let (preface, stuck) = (bounds.protocol.preface(), Stuck::after(bounds.stuck));
        Connection { stream, info, place, out, proof, heard: 0, preface, stuck }
    }

    /// Cancelled when the connection has lost its place.
    pub fn out(&self) -> &CancellationToken {
        self.place.out()
    }

    /// Fails when the connection has lost its place.
    fn poll_out(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.place.out().is_cancelled() || self.out.as_mut().poll(context).is_ready() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    /// Passes on the result of a write, as [`Stuck::sent`] does, and notes whether the peer reads the data sent to it.
    fn sent<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.place.standing().send(sent.is_pending());
        self.stuck.sent(context, sent)
    }
}

/// Detects a connection whose peer reads none of the data sent to it.
#[derive(Debug)]
struct Stuck {
    /// The time for which it may take nothing.
    after: Duration,
    /// The end of that time, while a write is pending.
    standing: Option<Pin<Box<Sleep>>>,
}

impl Stuck {
    fn after(after: Duration) -> Stuck {
        Stuck { after, standing: None }
    }

    /// Passes on the result of a write, or an error if writes have been pending for too long. HTTP/2 alone would wait
    /// for ever, because its pings and its last frame are queued behind the bytes that are not taken.
    fn sent<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if sent.is_ready() {
            self.standing = None;
            return sent;
        }
        let wait = self.after;
        let standing = self.standing.get_or_insert_with(|| Box::pin(tokio::time::sleep(wait)));
        standing.as_mut().poll(context).map(|()| {
            tracing::debug!("nothing could be sent on a connection for {:.1} s", wait.as_secs_f64());
            Err(io::ErrorKind::TimedOut.into())
        })
    }
}

#[derive(Debug)]
enum Transport {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl Connected for Connection {
    type ConnectInfo = ConnectInfo;

    fn connect_info(&self) -> ConnectInfo {
        ConnectInfo { tcp: self.info.clone(), standing: Arc::clone(self.place.standing()) }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.poll_out(context)?;
        let before = into.filled().len();
        let read = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_read(context, into),
            Transport::Encrypted(stream) => Pin::new(stream).poll_read(context, into),
        };
        let heard = into.filled().len() - before;
        if heard > 0 {
            self.place.standing().hear();
        }
        if let Some(proof) = &mut self.proof {
            if read.is_pending() {
                return proof.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()));
            }
            self.heard += heard;
            if self.heard >= self.preface {
                self.proof = None;
                self.place.standing().establish();
            }
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_out(context)?;
        let sent = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Transport::Encrypted(stream) => Pin::new(stream).poll_write(context, bytes),
        };
        self.sent(context, sent)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_out(context)?;
        let sent = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_flush(context),
            Transport::Encrypted(stream) => Pin::new(stream).poll_flush(context),
        };
        self.sent(context, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Transport::Encrypted(stream) => Pin::new(stream).poll_shutdown(context),
        };
        self.stuck.sent(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_out(context)?;
        let sent = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
            Transport::Encrypted(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
        };
        self.sent(context, sent)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Transport::Plain(stream) => stream.is_write_vectored(),
            Transport::Encrypted(stream) => stream.is_write_vectored(),
        }
    }
}

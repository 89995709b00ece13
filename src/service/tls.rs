//! Connections as they come in: accepted, counted, encrypted where there are certificates, and held to speaking HTTP/2
//! soon and to taking what they are sent. A connection that is half open, or whose client does not read, takes one place
//! for some time and nothing else. Deliberately absent: who may ask what on them (`auth`).

use super::bounds::HANDSHAKES;
use super::watch::Watched;
use crate::config::{self, file};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::{Connected, TcpConnectInfo};

use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

/// What gRPC speaks, as TLS names it.
const ALPN: &[u8] = b"h2";
/// Bytes of HTTP/2's preface and of the first frame's head: whoever has sent them speaks it.
const PREFACE: usize = 24 + 9;
/// Connections that are ready and not taken yet: they are taken at once.
const READY: usize = 16;
/// When the system has no room for a connection (open files, memory), until the next try.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// Not there, not PEM, or not what it should hold.
    #[error("cannot read {what} from \"{}\"", path.display())]
    File {
        /// A certificate, a key, authorities.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// The cause.
        source: PemError,
    },
    /// An authority is none.
    #[error("\"{}\" holds what is no authority's certificate", path.display())]
    Authority {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// Clients' certificates cannot be checked against it.
    #[error("clients' certificates cannot be checked with \"{}\"", path.display())]
    Verifier {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: VerifierBuilderError,
    },
    /// The parts do not belong together, or are of a kind that is not known.
    #[error("certificate \"{}\" cannot be used with key \"{}\"", certificate.display(), key.display())]
    Pair {
        /// Which.
        certificate: PathBuf,
        /// Which.
        key: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
}

/// Certificates, read again when their files change: new connections are encrypted with the new ones, those that are
/// open go on.
#[derive(Debug)]
pub struct Tls {
    config: Arc<Watched<Arc<ServerConfig>>>,
}

impl Tls {
    /// Reads the files.
    pub fn read(files: &config::Tls) -> Result<Tls, TlsError> {
        let paths = [&files.certificate, &files.key].into_iter().chain(&files.client_ca).cloned().collect();
        let files = files.clone();
        let load = move |_: Option<&Arc<ServerConfig>>| server_config(&files).map(Arc::new);
        Ok(Tls { config: Arc::new(Watched::new("certificates", paths, load)?) })
    }

    /// Looks for changes of the files, until `stop`.
    pub fn follow(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.config).follow(stop)
    }
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |source| TlsError::File { what, path: path.to_owned(), source };
    let pem = file::read(path, file::SMALL).map_err(|error| wrong(PemError::Io(error)))?;
    let all: Vec<_> = CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().map_err(wrong)?;
    if all.is_empty() { Err(wrong(PemError::NoItemsFound)) } else { Ok(all) }
}

fn server_config(files: &config::Tls) -> Result<ServerConfig, TlsError> {
    let config::Tls { certificate, key, client_ca } = files;
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
    let mut config = builder.with_single_cert(chain, private).map_err(pair)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// How connections are taken.
#[derive(Clone, Debug)]
pub struct Accept {
    /// Certificates; `None`: connections are not encrypted.
    pub tls: Option<Arc<Tls>>,
    /// Connections that are open at once; one more is closed.
    pub connections: usize,
    /// A connection has as long to be encrypted, and again to begin with HTTP/2.
    pub handshake: Duration,
    /// A connection that has taken nothing for as long, with bytes waiting, is closed.
    pub stuck: Duration,
}

/// The connections of a listener, until the stream is dropped.
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
    let places = Arc::new(Semaphore::new(accept.connections.min(Semaphore::MAX_PERMITS)));
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    // Said once until there is room again.
    let mut said = false;
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
                if ![ConnectionAborted, ConnectionReset, Interrupted].contains(&error.kind()) {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(%error, "connections cannot be taken");
                    }
                    tokio::time::sleep(NO_ROOM).await;
                }
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            if !std::mem::replace(&mut said, true) {
                tracing::warn!(connections = accept.connections, "all connections are taken, further ones are closed");
            }
            continue;
        };
        said = false;
        // Small messages one by one: Nagle's algorithm would hold tokens back. It fails only where the peer is gone.
        let _ = stream.set_nodelay(true);
        let info = stream.connect_info();
        let peer = info.remote_addr;
        let (wait, stuck) = (accept.handshake, accept.stuck);
        let connection = move |stream| Connection {
            stream,
            info,
            silence: Some(Box::pin(tokio::time::sleep(wait))),
            heard: 0,
            stuck,
            standing: None,
            _place: place,
        };
        let Some(tls) = &accept.tls else {
            if sender.send(Ok(connection(Transport::Plain(stream)))).await.is_err() {
                return;
            }
            continue;
        };
        let acceptor = TlsAcceptor::from(Arc::clone(&*tls.config.current()));
        let sender = sender.clone();
        // Never closed.
        let Ok(turn) = Arc::clone(&handshakes).acquire_owned().await else {
            return;
        };
        tokio::spawn(async move {
            match tokio::time::timeout(wait, acceptor.accept(stream)).await {
                Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(ALPN) => {
                    drop(turn);
                    // Fails where the server stops.
                    let _ = sender.send(Ok(connection(Transport::Encrypted(Box::new(stream))))).await;
                }
                Ok(Ok(_)) => tracing::debug!(?peer, "a connection does not speak HTTP/2"),
                Ok(Err(error)) => tracing::debug!(?peer, %error, "a TLS handshake failed"),
                Err(_) => tracing::debug!(?peer, "a TLS handshake took longer than {:.1} s", wait.as_secs_f64()),
            }
        });
    }
}

/// One connection, until it is closed.
#[derive(Debug)]
pub struct Connection {
    stream: Transport,
    info: TcpConnectInfo,
    /// Until it has said enough: when it is taken for dead.
    silence: Option<Pin<Box<Sleep>>>,
    heard: usize,
    /// How long it may take nothing of what it is to be sent.
    stuck: Duration,
    /// While it takes nothing: until when.
    standing: Option<Pin<Box<Sleep>>>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    /// What a write came to: an error where none has for too long. HTTP/2 alone would wait for ever: it asks the client
    /// whether it is there, and says goodbye, behind what is not taken.
    fn sent<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if sent.is_ready() {
            self.standing = None;
            return sent;
        }
        let wait = self.stuck;
        let standing = self.standing.get_or_insert_with(|| Box::pin(tokio::time::sleep(wait)));
        standing.as_mut().poll(context).map(|()| {
            tracing::debug!(peer = ?self.info.remote_addr, "nothing could be sent for {:.1} s", wait.as_secs_f64());
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
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.info.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_read(context, into),
            Transport::Encrypted(stream) => Pin::new(stream).poll_read(context, into),
        };
        if let Some(silence) = &mut self.silence {
            if read.is_pending() {
                return silence.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()));
            }
            self.heard += into.filled().len() - before;
            if self.heard >= PREFACE {
                self.silence = None;
            }
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Transport::Encrypted(stream) => Pin::new(stream).poll_write(context, bytes),
        };
        self.sent(context, sent)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
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
        self.sent(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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

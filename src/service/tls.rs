//! Connections as they come in: accepted, counted, encrypted where there are certificates, and held to speaking HTTP/2
//! soon and to taking what they are sent. A connection that is half open, or whose client does not read, takes one place
//! for some time and nothing else: nobody waits for its handshake, and where many are half open the oldest goes.
//! Deliberately absent: who may ask what on them (`auth`).

use super::bounds::HANDSHAKES;
use super::watch::Watched;
use crate::config::{self, file};
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
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

/// What gRPC speaks, as TLS names it.
const ALPN: &[u8] = b"h2";
/// Bytes of HTTP/2's preface and of the first frame's head: whoever has sent them speaks it.
const PREFACE: usize = 24 + 9;
/// Connections that are ready and not taken yet: they are taken at once.
const READY: usize = 16;
/// When the system has no room for a connection (open files, memory), until the next try.
pub(super) const NO_ROOM: Duration = Duration::from_millis(100);
/// Between two lines of the log about what clients bring about.
const SAID: Duration = Duration::from_secs(60);

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
    let unproven = Arc::new(Unproven::new(HANDSHAKES));
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
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            if saying.again() {
                tracing::warn!(connections = accept.connections, "all connections are taken, further ones are closed");
            }
            continue;
        };
        // Small messages one by one: Nagle's algorithm would hold tokens back. It fails only where the peer is gone.
        let _ = stream.set_nodelay(true);
        let info = stream.connect_info();
        let peer = info.remote_addr;
        let (wait, stuck) = (accept.handshake, accept.stuck);
        let (mut proof, out) = unproven.enter(peer.map(|peer| peer.ip().to_canonical()));
        let Some(tls) = &accept.tls else {
            proof.wait = Some(Box::pin(tokio::time::sleep(wait)));
            let connection = Connection::new(Transport::Plain(stream), info, proof, stuck, place);
            if sender.send(Ok(connection)).await.is_err() {
                return;
            }
            continue;
        };
        let acceptor = TlsAcceptor::from(Arc::clone(&*tls.config.current()));
        let sender = sender.clone();
        tokio::spawn(async move {
            let handshake = async {
                // Whoever says something has begun, whatever it is.
                stream.readable().await?;
                proof.begun.store(true, Ordering::Relaxed);
                acceptor.accept(stream).await
            };
            let ended = tokio::select! {
                biased;
                () = out.cancelled() => {
                    tracing::debug!(?peer, "a TLS handshake made room for others");
                    return;
                }
                ended = tokio::time::timeout(wait, handshake) => ended,
            };
            match ended {
                Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(ALPN) => {
                    proof.wait = Some(Box::pin(tokio::time::sleep(wait)));
                    let stream = Transport::Encrypted(Box::new(stream));
                    // Fails where the server stops.
                    let _ = sender.send(Ok(Connection::new(stream, info, proof, stuck, place))).await;
                }
                Ok(Ok(_)) => tracing::debug!(?peer, "a connection does not speak HTTP/2"),
                Ok(Err(error)) => tracing::debug!(?peer, %error, "a TLS handshake failed"),
                Err(_) => tracing::debug!(?peer, "a TLS handshake took longer than {:.1} s", wait.as_secs_f64()),
            }
        });
    }
}

/// Whether a connection was not accepted for lack of something of ours, and not because its client has gone.
pub(super) fn is_ours(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    ![ConnectionAborted, ConnectionReset, Interrupted].contains(&error.kind())
}

/// What clients bring about is said once in a while, however often it happens.
#[derive(Debug, Default)]
pub(super) struct Saying(Option<Instant>);

impl Saying {
    /// Whether it is time to say it.
    pub(super) fn again(&mut self) -> bool {
        let due = self.0.is_none_or(|said| said.elapsed() >= SAID);
        if due {
            self.0 = Some(Instant::now());
        }
        due
    }
}

/// Connections that have not shown yet that they speak HTTP/2.
#[derive(Debug)]
struct Unproven {
    most: usize,
    /// The oldest first.
    all: Mutex<Vec<Entry>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    peer: Option<IpAddr>,
    begun: Arc<AtomicBool>,
    out: CancellationToken,
}

impl Unproven {
    fn new(most: usize) -> Unproven {
        Unproven { most, all: Mutex::default(), next: AtomicU64::new(0) }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Entry>> {
        // Each change of it is whole.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one more, for which another one may have to go; cancelled when it is its own turn.
    fn enter(self: &Arc<Unproven>, peer: Option<IpAddr>) -> (Proof, CancellationToken) {
        let (begun, out) = (Arc::new(AtomicBool::new(false)), CancellationToken::new());
        let mut all = self.all();
        if all.len() >= self.most {
            let goes = victim(&all);
            all.remove(goes).out.cancel();
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        all.push(Entry { number, peer, begun: Arc::clone(&begun), out: out.clone() });
        let cancelled = Box::pin(out.clone().cancelled_owned());
        (Proof { unproven: Arc::clone(self), number, begun, out: cancelled, wait: None }, out)
    }
}

/// Which one goes: of the peer that has the most, the oldest that has said nothing, else the oldest.
fn victim(all: &[Entry]) -> usize {
    let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
    all.iter().for_each(|entry| *counts.entry(entry.peer).or_insert(0) += 1);
    let most = counts.values().max().copied().unwrap_or(0);
    let of_most = |entry: &&Entry| counts.get(&entry.peer) == Some(&most);
    let silent = |entry: &Entry| !entry.begun.load(Ordering::Relaxed);
    let goes = all.iter().filter(of_most).min_by_key(|entry| (!silent(entry), entry.number));
    goes.and_then(|goes| all.iter().position(|entry| entry.number == goes.number)).unwrap_or(0)
}

/// What a connection owes: dropped when it has shown that it speaks HTTP/2.
#[derive(Debug)]
struct Proof {
    unproven: Arc<Unproven>,
    number: u64,
    begun: Arc<AtomicBool>,
    /// When others need its place.
    out: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Once it is encrypted: when it is taken for dead.
    wait: Option<Pin<Box<Sleep>>>,
}

impl Proof {
    /// Ready when it has taken too long, or is in the way.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.out.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        self.wait.as_mut().map_or(Poll::Pending, |wait| wait.as_mut().poll(context))
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        self.unproven.all().retain(|entry| entry.number != self.number);
    }
}

/// One connection, until it is closed.
#[derive(Debug)]
pub struct Connection {
    stream: Transport,
    info: TcpConnectInfo,
    /// Until it has said enough.
    proof: Option<Proof>,
    heard: usize,
    stuck: Stuck,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    fn new(
        stream: Transport,
        info: TcpConnectInfo,
        proof: Proof,
        stuck: Duration,
        place: OwnedSemaphorePermit,
    ) -> Connection {
        Connection { stream, info, proof: Some(proof), heard: 0, stuck: Stuck::after(stuck), _place: place }
    }
}

/// Notices a connection that takes nothing of what it is to be sent.
#[derive(Debug)]
pub(super) struct Stuck {
    /// How long it may do so.
    after: Duration,
    /// While it does: until when.
    standing: Option<Pin<Box<Sleep>>>,
}

impl Stuck {
    pub(super) fn after(after: Duration) -> Stuck {
        Stuck { after, standing: None }
    }

    /// What a write came to: an error where none has for too long. HTTP/2 alone would wait for ever: it asks the client
    /// whether it is there, and says goodbye, behind what is not taken.
    pub(super) fn sent<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
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
        let heard = into.filled().len() - before;
        if let Some(proof) = &mut self.proof {
            if read.is_pending() {
                return proof.poll_over(context).map(|()| Err(io::ErrorKind::TimedOut.into()));
            }
            proof.begun.fetch_or(heard > 0, Ordering::Relaxed);
            self.heard += heard;
            if self.heard >= PREFACE {
                self.proof = None;
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
        self.stuck.sent(context, sent)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_flush(context),
            Transport::Encrypted(stream) => Pin::new(stream).poll_flush(context),
        };
        self.stuck.sent(context, sent)
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
        let sent = match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
            Transport::Encrypted(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
        };
        self.stuck.sent(context, sent)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Transport::Plain(stream) => stream.is_write_vectored(),
            Transport::Encrypted(stream) => stream.is_write_vectored(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_half_open_connections_the_oldest_silent_one_of_the_greediest_goes() {
        let unproven = Arc::new(Unproven::new(4));
        let peer = |last: u8| Some(IpAddr::from([10, 0, 0, last]));
        let (other, its) = unproven.enter(peer(1));
        let all: Vec<_> = (0..3).map(|_| unproven.enter(peer(2))).collect();
        let gone = || all.iter().map(|(_, out)| out.is_cancelled()).collect::<Vec<_>>();
        all[0].0.begun.store(true, Ordering::Relaxed);
        // There is room for four.
        assert_eq!(gone(), [false; 3]);
        let (fifth, _) = unproven.enter(peer(3));
        assert_eq!(gone(), [false, true, false]);
        let (sixth, _) = unproven.enter(peer(3));
        // Both peers have two: the oldest that is silent.
        assert_eq!(gone(), [false, true, true]);
        assert!(!its.is_cancelled());
        // Those that are gone leave nothing behind, and those that have ended make room.
        drop((all, fifth, sixth));
        assert_eq!(unproven.all().len(), 1);
        drop(other);
        assert!(unproven.all().is_empty() && !its.is_cancelled());
        // All have begun: the oldest goes.
        let begun: Vec<_> = (0..5)
            .map(|_| unproven.enter(None))
            .inspect(|(proof, _)| proof.begun.store(true, Ordering::Relaxed))
            .collect();
        assert_eq!(
            begun.iter().map(|(_, out)| out.is_cancelled()).collect::<Vec<_>>(),
            [true, false, false, false, false]
        );
    }
}

//! Connects to a server: address, certificates and access token. Not here: the calls.

use super::Usage;
use crate::config::{AdminConfig, HttpConfig, Server, file};
use crate::service::proto::ostinato_client::OstinatoClient;
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri};
use tonic::{Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// The environment variable with the token, used if no token file is given.
const VARIABLE: &str = "OSTINATO_TOKEN";

/// The longest wait for the answer of a server that may not speak gRPC.
const PROBE: Duration = Duration::from_secs(2);

/// The heading of these arguments in `--help`.
const HEADING: &str = "Reaching a server";

/// Returns the address at which a server listens unless it is configured otherwise.
pub(super) fn usual() -> String {
    Server::default().listen.to_string()
}

/// A client that adds the token to its calls.
pub(super) type Client = OstinatoClient<InterceptedService<Channel, Bearer>>;

/// Arguments that describe how to reach a server and how to authenticate.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Reach {
    /// Certificates (PEM) of the authorities that may have issued the server's certificate. Encrypts the connection.
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires = "server")]
    tls_ca: Option<PathBuf>,
    /// This client's own certificate (PEM), if the server requires one.
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires_all = ["server", "tls_ca", "tls_key"])]
    tls_cert: Option<PathBuf>,
    /// The private key (PEM) of --tls-cert.
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires_all = ["server", "tls_cert"])]
    tls_key: Option<PathBuf>,
    /// A file that contains only an access token. Default: the environment variable OSTINATO_TOKEN, if it is set.
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires = "server")]
    token_file: Option<PathBuf>,
}

/// Adds the token, if any, to the metadata of each call.
#[derive(Clone)]
pub(super) struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

impl Reach {
    /// Creates the endpoint for HOST:PORT or a URI.
    pub(super) fn endpoint(&self, address: &str) -> anyhow::Result<Endpoint> {
        let scheme = if self.tls_ca.is_some() { "https" } else { "http" };
        let uri = if address.contains("://") { address.to_owned() } else { format!("{scheme}://{address}") };
        let wrong = |error: &dyn std::fmt::Display| Usage(format!("\"{address}\" is not a server's address: {error}"));
        let endpoint = Endpoint::from_shared(uri.clone()).map_err(|error| wrong(&error))?;
        let Some(authorities) = &self.tls_ca else {
            if uri.starts_with("https://") {
                return Err(wrong(&"https needs --tls-ca, the authority of its certificate").into());
            }
            return Ok(endpoint);
        };
        if !uri.starts_with("https://") {
            return Err(wrong(&"with --tls-ca it begins with https://, or with neither").into());
        }
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(authorities)?));
        if let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) {
            tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        // The error's own text says only that the transport failed, so append its cause.
        let why = |error: &dyn std::error::Error| error.source().map_or(String::new(), |cause| format!(": {cause}"));
        let unusable = |error| Usage(format!("the certificates cannot be used{}", why(&error))).into();
        endpoint.tls_config(tls).map_err(unusable)
    }

    /// Reads the token from the file or the environment variable; without either, no token is sent.
    pub(super) fn bearer(&self) -> anyhow::Result<Bearer> {
        let (text, place) = match &self.token_file {
            Some(file) => (String::from_utf8_lossy(&read(file)?).into_owned(), format!("\"{}\"", file.display())),
            None => match std::env::var(VARIABLE) {
                Ok(text) => (text, VARIABLE.to_owned()),
                Err(_) => return Ok(Bearer(None)),
            },
        };
        // The message does not quote the content, because even a malformed token is a secret.
        let wrong = || Usage(format!("{place} holds no token: one line of printable ASCII characters is one"));
        let token = text.trim();
        if token.is_empty() || token.contains(char::is_whitespace) {
            return Err(wrong().into());
        }
        let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse().map_err(|_| wrong())?;
        value.set_sensitive(true);
        Ok(Bearer(Some(value)))
    }

    /// Connects to the server at HOST:PORT or a URI.
    pub(super) async fn connect(&self, address: &str) -> anyhow::Result<Client> {
        let endpoint = self.endpoint(address)?;
        open_first(&endpoint, self.bearer()?, address).await
    }
}

/// Connects to an endpoint. `address` is its name in error messages.
pub(super) async fn open(endpoint: &Endpoint, bearer: Bearer, address: &str) -> anyhow::Result<Client> {
    let channel = endpoint.connect().await.with_context(|| format!("cannot reach a server at {address}"))?;
    Ok(OstinatoClient::with_interceptor(channel, bearer))
}

/// Connects to an endpoint as [`open`] does, and finds out whether it speaks gRPC at all: a connection alone does not
/// tell, and the error of the first call would name neither protocol.
pub(super) async fn open_first(endpoint: &Endpoint, bearer: Bearer, address: &str) -> anyhow::Result<Client> {
    let channel = endpoint.connect().await.with_context(|| format!("cannot reach a server at {address}"))?;
    let mut health = HealthClient::with_interceptor(channel.clone(), bearer.clone());
    // A status that a server has sent, such as one about a token, is an answer in gRPC; others have a cause here.
    if let Err(status) = health.check(HealthCheckRequest::default()).await
        && std::error::Error::source(&status).is_some()
        && speaks_http1(endpoint.uri()).await
    {
        let own = Server::default().listen;
        let port = |listen: Option<std::net::SocketAddr>| listen.map_or(0, |address| address.port());
        let (http, page) = (port(HttpConfig::default().listen), port(AdminConfig::default().listen));
        return Err(Usage(format!(
            "{address} answers HTTP/1 and not gRPC, as OpenAI's API (port {http}) and the admin page (port {page}) of \
             a server do: --server takes the address that the server prints after \"listening on\" ({own} unless \
             configured otherwise)"
        ))
        .into());
    }
    Ok(OstinatoClient::with_interceptor(channel, bearer))
}

/// Whether an address without encryption answers a request of HTTP/1 in that protocol.
async fn speaks_http1(uri: &Uri) -> bool {
    let (Some("http"), Some(host)) = (uri.scheme_str(), uri.host()) else { return false };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let answer = async {
        let mut socket = TcpStream::connect((host, uri.port_u16().unwrap_or(80))).await?;
        socket.write_all(b"GET / HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n").await?;
        let mut first = [0; 7];
        socket.read_exact(&mut first).await?;
        std::io::Result::Ok(first == *b"HTTP/1.")
    };
    matches!(timeout(PROBE, answer).await, Ok(Ok(true)))
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    file::read_argument(path, file::SMALL)
        .map_err(|error| Usage(format!("cannot read \"{}\": {error}", path.display())).into())
}

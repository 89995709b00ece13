//! How the program reaches a server: its address, certificates and a token. Deliberately absent: what it asks there.

use super::Usage;
use crate::config::file;
use crate::service::proto::ostinato_client::OstinatoClient;
use anyhow::Context;
use std::path::{Path, PathBuf};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

/// Where the token is when there is no file of it.
const VARIABLE: &str = "OSTINATO_TOKEN";

/// What `--help` shows the arguments under.
const HEADING: &str = "Reaching a server";

/// A client whose calls have the token.
pub(super) type Client = OstinatoClient<InterceptedService<Channel, Bearer>>;

/// What a server wants to see, and what it is known by.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Reach {
    /// Certificates of authorities (PEM), one of which vouches for the server's. The connection is encrypted.
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires = "server")]
    tls_ca: Option<PathBuf>,
    /// Our own certificate (PEM), where the server asks for one.
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires_all = ["server", "tls_ca", "tls_key"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires_all = ["server", "tls_cert"])]
    tls_key: Option<PathBuf>,
    /// A file that holds a token and nothing else. Left out: the variable OSTINATO_TOKEN, if there is one.
    #[arg(long, help_heading = HEADING, value_name = "FILE", requires = "server")]
    token_file: Option<PathBuf>,
}

/// Puts a token into each call.
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
    /// The endpoint at HOST:PORT or a URI.
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
        // Its own words say only that the transport failed.
        let why = |error: &dyn std::error::Error| error.source().map_or(String::new(), |cause| format!(": {cause}"));
        let unusable = |error| Usage(format!("the certificates cannot be used{}", why(&error))).into();
        endpoint.tls_config(tls).map_err(unusable)
    }

    /// What goes with each call.
    pub(super) fn bearer(&self) -> anyhow::Result<Bearer> {
        let (text, place) = match &self.token_file {
            Some(file) => (String::from_utf8_lossy(&read(file)?).into_owned(), format!("\"{}\"", file.display())),
            None => match std::env::var(VARIABLE) {
                Ok(text) => (text, VARIABLE.to_owned()),
                Err(_) => return Ok(Bearer(None)),
            },
        };
        // It is not quoted: it is a secret all the same.
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
        open(&endpoint, self.bearer()?, address).await
    }
}

/// Connects to an endpoint that is known as `address`.
pub(super) async fn open(endpoint: &Endpoint, bearer: Bearer, address: &str) -> anyhow::Result<Client> {
    let channel = endpoint.connect().await.with_context(|| format!("cannot reach a server at {address}"))?;
    Ok(OstinatoClient::with_interceptor(channel, bearer))
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    file::read_argument(path, file::SMALL)
        .map_err(|error| Usage(format!("cannot read \"{}\": {error}", path.display())).into())
}

//! HTTP requests to a hub: descriptions of a repository and its files, and downloads that resume where they were
//! interrupted. The access token goes to the hub's own address only, never to one that it redirects to. Not here: the
//! cache, and the comparison of a file with the hub's description.

use super::settings::Settings;
use http::header::{AUTHORIZATION, AsHeaderName, CONTENT_RANGE, ETAG, LOCATION, RANGE};
use http::{HeaderMap, Response, StatusCode, Uri};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::time::Duration;
use ureq::{Agent, Body};

/// How often a file's download is taken up again where it was cut.
const RETRIES: u32 = 5;
/// The pause before the first retry; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(250);
/// The maximum number of redirects that one request follows.
const REDIRECTS: usize = 8;
/// How long establishing a connection may take.
const CONNECT: Duration = Duration::from_secs(30);
/// How long a connection may be silent.
const SILENCE: Duration = Duration::from_secs(60);
/// The most bytes of a repository's description that are read.
const DESCRIPTION: u64 = 64 << 20;
/// Bytes that are written at once.
const CHUNK: usize = 256 << 10;
/// The characters that are escaped in one part of a path.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// [`ESCAPED`] without `/`, for a path of several parts.
const ESCAPED_IN_PATH: &AsciiSet = &ESCAPED.remove(b'/');

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// The connection or the protocol failed.
    #[error(transparent)]
    Http(#[from] ureq::Error),
    /// The hub refuses.
    #[error("the status is {0}")]
    Status(u16),
    /// The address cannot be requested.
    #[error("{0:?} is not an HTTP address")]
    Address(String),
    /// A redirect names no address, or one that may not be followed, such as from HTTPS to HTTP.
    #[error("it redirects to {0:?}, which cannot be followed")]
    Redirect(String),
    /// There are too many redirects.
    #[error("there are more than {REDIRECTS} redirects")]
    Redirects,
    /// A header is missing or has another form.
    #[error("its header {name} is {value:?}")]
    Header {
        /// The header's name.
        name: &'static str,
        /// Its value; empty if it is missing.
        value: String,
    },
    /// The answer is not the hub's description of a repository.
    #[error("it describes no repository: {0}")]
    Description(String),
    /// The download ended before the file did.
    #[error("it ended after {has} of {bytes} bytes")]
    Cut {
        /// The bytes that have arrived.
        has: u64,
        /// The file's size.
        bytes: u64,
    },
    /// The answer has more bytes than the file.
    #[error("it has more than {0} bytes")]
    Long(u64),
    /// The connection was cut, or the file cannot be written.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl RequestError {
    /// Whether the same request may succeed if it is repeated.
    fn is_passing(&self) -> bool {
        match self {
            RequestError::Http(_) | RequestError::Cut { .. } => true,
            RequestError::Io(error) => error.kind() != std::io::ErrorKind::StorageFull,
            RequestError::Status(status) => *status == 429 || *status >= 500,
            _ => false,
        }
    }
}

/// A hub's description of a repository at a revision.
pub(super) struct Description {
    pub(super) commit: String,
    /// The names of its files.
    pub(super) names: Vec<String>,
}

/// A hub's description of a file. Only the form of the size has been checked.
pub(super) struct About {
    pub(super) commit: String,
    /// The ETag, without quotes.
    pub(super) etag: String,
    pub(super) bytes: u64,
}

/// Sends requests to one hub.
pub(super) struct Client<'a> {
    settings: &'a Settings,
    agent: Agent,
}

impl Client<'_> {
    pub(super) fn new(settings: &Settings) -> Client<'_> {
        let config = Agent::config_builder()
            // Redirects are followed here, with the token for the hub alone.
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("ostinato/", env!("CARGO_PKG_VERSION")))
            // Ranges and sizes are those of the file itself.
            .accept_encoding("identity")
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(SILENCE));
        Client { settings, agent: config.build().into() }
    }

    /// Asks for a repository's commit and files.
    pub(super) fn describe(&self, repository: &str, revision: &str) -> Result<Description, RequestError> {
        let revision = utf8_percent_encode(revision, ESCAPED);
        let url = format!("{}/api/models/{repository}/revision/{revision}", self.settings.endpoint);
        let (answer, _) = self.get(&url, None)?;
        let text = accepted(answer)?.into_body().into_with_config().limit(DESCRIPTION).read_to_vec()?;
        let wrong = |what: &str| RequestError::Description(what.to_owned());
        let value: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| RequestError::Description(error.to_string()))?;
        let commit = value["sha"].as_str().ok_or_else(|| wrong("it has no text \"sha\""))?.to_owned();
        let files = value["siblings"].as_array().ok_or_else(|| wrong("it has no list \"siblings\""))?;
        let names = files.iter().map(|file| file["rfilename"].as_str().map(str::to_owned)).collect::<Option<_>>();
        Ok(Description { commit, names: names.ok_or_else(|| wrong("a file of \"siblings\" has no \"rfilename\""))? })
    }

    /// Returns the address of a file at a commit.
    pub(super) fn url(&self, repository: &str, commit: &str, name: &str) -> String {
        let name = utf8_percent_encode(name, ESCAPED_IN_PATH);
        format!("{}/{repository}/resolve/{commit}/{name}", self.settings.endpoint)
    }

    /// Asks for a file's commit, etag and size.
    pub(super) fn about(&self, url: &str) -> Result<About, RequestError> {
        let (answer, said) = self.get(url, Some("bytes=0-0".to_owned()))?;
        let said = said.as_ref().unwrap_or(answer.headers());
        let etag = text(said, "x-linked-etag").or_else(|| text(said, ETAG)).unwrap_or_default();
        let etag = etag.strip_prefix("W/").unwrap_or(&etag).trim_matches('"').to_owned();
        let commit = text(said, COMMIT).unwrap_or_default();
        let bytes = match answer.status() {
            StatusCode::OK => answer.body().content_length(),
            // An empty file has no first byte.
            StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                text(answer.headers(), CONTENT_RANGE).and_then(|range| range.rsplit('/').next()?.parse().ok())
            }
            status => return Err(RequestError::Status(status.as_u16())),
        };
        let wrong = || header("content-range", answer.headers());
        Ok(About { commit, etag, bytes: bytes.ok_or_else(wrong)? })
    }

    /// Downloads what a file still lacks of its `bytes`, and continues a few times where the download is cut. `arrived`
    /// receives the bytes that are there.
    pub(super) fn download(
        &self,
        url: &str,
        file: &mut File,
        bytes: u64,
        mut arrived: impl FnMut(u64),
    ) -> Result<(), RequestError> {
        let mut retry = 0;
        loop {
            match self.download_once(url, file, bytes, &mut arrived) {
                Err(error) if retry < RETRIES && error.is_passing() => std::thread::sleep(PAUSE * 2u32.pow(retry)),
                result => return result,
            }
            retry += 1;
        }
    }

    fn download_once(
        &self,
        url: &str,
        file: &mut File,
        bytes: u64,
        arrived: &mut impl FnMut(u64),
    ) -> Result<(), RequestError> {
        let mut has = file.seek(SeekFrom::End(0))?;
        if has >= bytes {
            return Ok(());
        }
        let (answer, _) = self.get(url, (has > 0).then(|| format!("bytes={has}-")))?;
        let answer = accepted(answer)?;
        if answer.status() == StatusCode::PARTIAL_CONTENT {
            let range = text(answer.headers(), CONTENT_RANGE);
            if !range.is_some_and(|range| range.starts_with(&format!("bytes {has}-"))) {
                return Err(header("content-range", answer.headers()));
            }
        } else if has > 0 {
            // The server does not support ranges: this is the file from its first byte.
            file.set_len(0)?;
            has = file.seek(SeekFrom::Start(0))?;
        }
        arrived(has);
        let mut body = answer.into_body().into_reader();
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = body.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            if read as u64 > bytes - has {
                return Err(RequestError::Long(bytes));
            }
            file.write_all(&buffer[..read])?;
            has += read as u64;
            arrived(has);
        }
        if has < bytes { Err(RequestError::Cut { has, bytes }) } else { Ok(()) }
    }

    /// Sends a request and follows redirects. Returns the last answer, and the headers of the first redirect that the
    /// hub itself answered about a file with, if any.
    fn get(&self, url: &str, range: Option<String>) -> Result<(Response<Body>, Option<HeaderMap>), RequestError> {
        let address = |text: &str| text.parse().map_err(|_| RequestError::Address(text.to_owned()));
        let own = origin(&address(&self.settings.endpoint)?);
        let mut at: Uri = address(url)?;
        let mut said = None;
        for _ in 0..=REDIRECTS {
            let mut request = self.agent.get(&at);
            if let Some(range) = &range {
                request = request.header(RANGE, range);
            }
            let to_hub = origin(&at) == own;
            if let Some(token) = self.settings.token.as_ref().filter(|_| to_hub) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            let answer = request.call()?;
            if !answer.status().is_redirection() {
                return Ok((answer, said));
            }
            if to_hub && said.is_none() && answer.headers().contains_key(COMMIT) {
                said = Some(answer.headers().clone());
            }
            let location = text(answer.headers(), LOCATION).unwrap_or_default();
            at = target(&at, &location).ok_or(RequestError::Redirect(location))?;
        }
        Err(RequestError::Redirects)
    }
}

/// The header with the commit of a file.
const COMMIT: &str = "x-repo-commit";

/// Returns an answer unless its status is an error.
fn accepted(answer: Response<Body>) -> Result<Response<Body>, RequestError> {
    match answer.status() {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(answer),
        status => Err(RequestError::Status(status.as_u16())),
    }
}

fn text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

fn header(name: &'static str, headers: &HeaderMap) -> RequestError {
    RequestError::Header { name, value: text(headers, name).unwrap_or_default() }
}

/// Scheme, host and port of an address.
fn origin(uri: &Uri) -> (String, String, Option<u16>) {
    let scheme = uri.scheme_str().unwrap_or_default().to_ascii_lowercase();
    let usual = match scheme.as_str() {
        "https" => Some(443),
        "http" => Some(80),
        _ => None,
    };
    (scheme, uri.host().unwrap_or_default().to_ascii_lowercase(), uri.port_u16().or(usual))
}

/// Returns the address that a redirect of `from` leads to; `None` if it names no address or one that may not be
/// followed.
fn target(from: &Uri, location: &str) -> Option<Uri> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    let whole = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ => location.to_owned(),
    };
    let to: Uri = whole.parse().ok()?;
    match (scheme, to.scheme_str()?) {
        (_, "https") | ("http", "http") => Some(to),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_to_no_weaker_protocol() {
        let from: Uri = "https://hub.example:8443/a/b?x=1".parse().expect("an address");
        for (location, leads) in [
            ("/c?y=2", Some("https://hub.example:8443/c?y=2")),
            ("//other.example/c", Some("https://other.example/c")),
            ("https://other.example/c", Some("https://other.example/c")),
            ("http://hub.example:8443/c", None),
            ("file:///etc/passwd", None),
            ("c", None),
            ("", None),
        ] {
            assert_eq!(target(&from, location).map(|to| to.to_string()).as_deref(), leads, "{location}");
        }
        let plain: Uri = "http://hub.example/a".parse().expect("an address");
        assert!(target(&plain, "http://other.example/").is_some());
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let of = |text: &str| origin(&text.parse().expect("an address"));
        assert_eq!(of("https://Hub.example/a"), of("https://hub.example:443/b"));
        for other in ["http://hub.example", "https://hub.example:444", "https://hub.example.org", "https://x"] {
            assert_ne!(of("https://hub.example"), of(other), "{other}");
        }
    }
}

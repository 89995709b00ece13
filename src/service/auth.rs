//! Access control: each call needs a bearer token in its metadata, which is looked up by its digest in a file that is
//! reloaded when it changes. `need` says which right a gRPC method or an HTTP route requires; every call is checked
//! before its message is read.
//! Not here: certificates (`tls`), counting (`clients`, `meter`).

use super::clients::Allowance;
use super::meter::Meter;
use super::refusal::{Refusal, status};
use super::watch::Watched;
use crate::config::{self, ConfigError, Right};
use crate::host::Host;
use http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// The maximum length of a token in bytes; tokens made by `ostinato token` have 68.
const MAX_TOKEN: usize = 1024;

/// The requirement of a method on its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// The method requires nothing, not even a token.
    Nothing,
    /// The method requires a token with any rights.
    Token,
    /// The method requires a token with this right.
    Right(Right),
}

const GENERATE: Need = Need::Right(Right::Generate);
const ADMIN: Need = Need::Right(Right::Admin);

/// The requirements of every method, by service.
const NEEDS: [(&str, &[&str], Need); 14] = [
    // Load balancers and orchestrators check health without a token.
    ("grpc.health.v1.Health", &["Check", "List", "Watch"], Need::Nothing),
    ("grpc.reflection.v1.ServerReflection", &["ServerReflectionInfo"], Need::Token),
    ("grpc.reflection.v1alpha.ServerReflection", &["ServerReflectionInfo"], Need::Token),
    ("ostinato.v1.Ostinato", &["Generate", "Embed", "Abort", "Tokenize", "Detokenize"], GENERATE),
    ("ostinato.v1.Ostinato", &["ListDevices", "ListModels", "GetLoad"], Need::Token),
    ("ostinato.v1.Ostinato", &["Profile", "LoadModel", "UnloadModel"], ADMIN),
    ("vllm.grpc.engine.VllmEngine", &["Generate", "Embed", "Abort", "GetTokenizer"], GENERATE),
    ("vllm.grpc.engine.VllmEngine", &["HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads"], Need::Token),
    // Events contain the prompts of all clients, and flushes and profiles affect all clients.
    ("vllm.grpc.engine.VllmEngine", &["SubscribeKvEvents", "FlushCache", "StartProfile", "StopProfile"], ADMIN),
    // OpenAI's API over HTTP.
    ("", &["health"], Need::Nothing),
    ("v1", &["chat/completions", "completions", "responses", "embeddings", "rerank", "score"], GENERATE),
    // The paths of the last two in other servers.
    ("", &["rerank", "score"], GENERATE),
    ("v2", &["rerank"], GENERATE),
    ("v1", &["models", "models/{model}"], Need::Token),
];

fn listed(path: &str) -> Option<Need> {
    let path = path.strip_prefix('/')?;
    let (service, method) = path.split_once('/').unwrap_or(("", path));
    let found = NEEDS.iter().find(|(of, methods, _)| *of == service && methods.contains(&method));
    found.map(|(.., need)| *need)
}

/// Returns the requirement of the method at `path`. Methods that are not listed require the administrator's right.
fn need(path: &str) -> Need {
    listed(path).unwrap_or(ADMIN)
}

/// The tokens of a file, which is reloaded when it changes.
#[derive(Debug)]
pub struct Tokens {
    table: Arc<Watched<Table>>,
}

#[derive(Debug)]
struct Table {
    entries: Vec<([u8; 32], Identity)>,
}

/// The holder of a token. Stored in the extensions of each call.
#[derive(Clone, Debug)]
pub struct Identity(Arc<Holder>);

#[derive(Debug)]
struct Holder {
    name: String,
    allowance: Allowance,
    /// The models that the token allows; `None` for all.
    models: Option<Vec<String>>,
    may: Vec<Right>,
}

impl Identity {
    /// Returns the token's name in the file.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the limits that the token sets.
    pub fn allowance(&self) -> &Allowance {
        &self.0.allowance
    }

    /// Returns whether the token has a right.
    pub fn may(&self, right: Right) -> bool {
        self.0.may.contains(&right)
    }

    /// Returns whether the token is limited to some models.
    pub fn is_restricted(&self) -> bool {
        self.0.models.is_some()
    }

    /// Returns whether the token allows the use of a model.
    pub fn may_use(&self, model: &str) -> bool {
        self.0.models.as_ref().is_none_or(|models| models.iter().any(|name| name == model))
    }
}

impl Tokens {
    /// Reads the token file.
    pub fn read(path: &Path) -> Result<Tokens, ConfigError> {
        let file = path.to_owned();
        let load = move |before: Option<&Table>| Ok(Table::new(config::tokens(&file)?, before, Instant::now()));
        Ok(Tokens { table: Arc::new(Watched::new("tokens", vec![path.to_owned()], load)?) })
    }

    /// Reloads the file when it changes, until `stop` is cancelled.
    pub fn follow(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.table).follow(stop)
    }
}

impl Table {
    /// Builds the table from the tokens of a file. Tokens that were in the previous table keep their rate limits'
    /// state.
    fn new(tokens: Vec<config::AccessToken>, before: Option<&Table>, now: Instant) -> Table {
        let meter = |name: &str, per_minute: u32| {
            let same = |(_, other): &&([u8; 32], Identity)| other.name() == name;
            let before = before.and_then(|table| table.entries.iter().find(same)?.1.0.allowance.meter.clone());
            match before {
                Some(meter) => {
                    meter.change(per_minute, now);
                    meter
                }
                None => Arc::new(Meter::new(per_minute, now)),
            }
        };
        let entry = |token: config::AccessToken| {
            let allowance = Allowance {
                requests: token.requests,
                meter: token.tokens_per_minute.map(|per_minute| meter(&token.name, per_minute)),
            };
            let may = token.may.unwrap_or_else(|| vec![Right::Generate]);
            let holder = Holder { name: token.name, allowance, models: token.models, may };
            // The file reader requires a name and a digest for each token.
            (token.sha256.unwrap_or_default(), Identity(Arc::new(holder)))
        };
        Table { entries: tokens.into_iter().map(entry).collect() }
    }

    /// Finds the holder of a token. Compares all entries in constant time.
    fn find(&self, token: &[u8]) -> Option<&Identity> {
        let digest: [u8; 32] = Sha256::digest(token).into();
        let mut found = Choice::from(0);
        let mut at = 0u64;
        for (index, (other, _)) in (0u64..).zip(&self.entries) {
            let equal = digest.ct_eq(other);
            at.conditional_assign(&index, equal);
            found |= equal;
        }
        bool::from(found).then(|| &self.entries[at as usize].1)
    }

    /// Checks a call with these headers, and returns the holder of its token; `None` if the method needs no token.
    fn admit(&self, path: &str, headers: &HeaderMap) -> Result<Option<Identity>, Refusal> {
        let need = need(path);
        if need == Need::Nothing {
            return Ok(None);
        }
        let token = bearer(headers).ok_or(Refusal::NoToken)?;
        let identity = self.find(token).ok_or(Refusal::UnknownToken)?;
        match need {
            Need::Right(right) if !identity.may(right) => {
                Err(Refusal::NoRight { name: identity.name().to_owned(), right: word(right) })
            }
            _ => Ok(Some(identity.clone())),
        }
    }
}

fn word(right: Right) -> &'static str {
    match right {
        Right::Generate => "generate",
        Right::Admin => "admin",
    }
}

/// Returns the bearer token of a call that has exactly one.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut all = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (all.next(), all.next()) else {
        return None;
    };
    let (scheme, token) = value.as_bytes().split_at_checked("Bearer ".len())?;
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !token.is_empty() && token.len() <= MAX_TOKEN).then_some(token)
}

/// A layer that refuses calls without the required token and stores the token's holder in the call's extensions. If the
/// server has no tokens, all calls pass.
#[derive(Clone, Debug)]
pub struct Authentication {
    tokens: Option<Arc<Tokens>>,
    host: Arc<Host>,
}

impl Authentication {
    /// Creates the layer. Its refusals are counted in `host`.
    pub fn new(tokens: Option<Arc<Tokens>>, host: Arc<Host>) -> Authentication {
        Authentication { tokens, host }
    }

    /// Returns whether the server has tokens.
    pub(super) fn has_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    /// Returns the holder of the token in the headers of a call of the method at `path`; `None` if the server has no
    /// tokens or the method needs none. Does not count a refusal.
    pub(super) fn identify(&self, path: &str, headers: &HeaderMap) -> Result<Option<Identity>, Refusal> {
        match &self.tokens {
            Some(tokens) => tokens.table.current().admit(path, headers),
            None => Ok(None),
        }
    }
}

impl<S> Layer<S> for Authentication {
    type Service = Authenticated<S>;

    fn layer(&self, inner: S) -> Authenticated<S> {
        Authenticated { authentication: self.clone(), inner }
    }
}

/// A service behind [`Authentication`].
#[derive(Clone, Debug)]
pub struct Authenticated<S> {
    authentication: Authentication,
    inner: S,
}

impl<S> Service<http::Request<Body>> for Authenticated<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        if self.authentication.has_tokens() {
            match self.authentication.identify(request.uri().path(), request.headers()) {
                Ok(identity) => {
                    // The token is not needed any more; without it, it cannot be logged.
                    request.headers_mut().remove(header::AUTHORIZATION);
                    if let Some(identity) = identity {
                        request.extensions_mut().insert(identity);
                    }
                }
                Err(refusal) => {
                    self.authentication.host.ended.refuse(refusal.kind());
                    let response = status(&refusal).into_http();
                    return Box::pin(async { Ok(response) });
                }
            }
        }
        Box::pin(self.inner.call(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::proto;
    use prost::Message;
    use prost_types::FileDescriptorSet;

    fn table(tokens: &[(&str, &str, &[Right])]) -> Table {
        let token = |(name, token, may): &(&str, &str, &[Right])| config::AccessToken {
            name: (*name).to_owned(),
            sha256: Some(Sha256::digest(token).into()),
            may: (!may.is_empty()).then(|| may.to_vec()),
            ..Default::default()
        };
        Table::new(tokens.iter().map(token).collect(), None, Instant::now())
    }

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        headers
    }

    /// Goal: every method that is served has a decided requirement.
    #[test]
    fn every_method_is_listed() {
        let set = FileDescriptorSet::decode(proto::descriptors()).unwrap();
        let mut methods = 0;
        for file in &set.file {
            for service in &file.service {
                for method in &service.method {
                    let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                    assert!(listed(&path).is_some(), "{path} is not in the table of needs");
                    methods += 1;
                }
            }
        }
        assert!(methods > 15, "{methods}");
        for (path, needed) in [
            ("/grpc.health.v1.Health/Watch", Need::Nothing),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Need::Token),
            ("/ostinato.v1.Ostinato/Generate", GENERATE),
            ("/ostinato.v1.Ostinato/ListModels", Need::Token),
            ("/ostinato.v1.Ostinato/UnloadModel", ADMIN),
            ("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", ADMIN),
            ("/ostinato.v1.Ostinato/Unheard", ADMIN),
            ("/health", Need::Nothing),
            ("/v1/chat/completions", GENERATE),
            ("/v1/models/{model}", Need::Token),
            ("/v1/unheard", ADMIN),
            ("/other.Service/Generate", ADMIN),
            ("/grpc.health.v1.Health", ADMIN),
            ("", ADMIN),
        ] {
            assert_eq!(need(path), needed, "{path}");
        }
    }

    #[test]
    fn a_token_is_found_wherever_it_stands_and_no_other_is() {
        let table = table(&[("a", "one", &[]), ("b", "two", &[Right::Admin]), ("c", "three", &[])]);
        for (token, name) in [("one", "a"), ("two", "b"), ("three", "c")] {
            assert_eq!(table.find(token.as_bytes()).unwrap().name(), name);
        }
        for token in ["", "One", "one ", "four"] {
            assert!(table.find(token.as_bytes()).is_none(), "{token:?}");
        }
        let empty = super::Table::new(Vec::new(), None, Instant::now());
        assert!(empty.find(b"").is_none());
    }

    #[test]
    fn calls_need_one_token_that_is_known_and_has_the_right() {
        let table = table(&[("a", "one", &[]), ("b", "two", &[Right::Admin])]);
        let (generate, profile) = ("/ostinato.v1.Ostinato/Generate", "/ostinato.v1.Ostinato/Profile");
        let code = |path: &str, values: &[&str]| table.admit(path, &headers(values)).map_err(|refusal| refusal.code());
        let name = |path: &str, values: &[&str]| code(path, values).map(|identity| identity.unwrap().name().to_owned());
        assert_eq!(name(generate, &["Bearer one"]), Ok("a".to_owned()));
        assert_eq!(name(generate, &["bearer one"]), Ok("a".to_owned()));
        assert_eq!(name(profile, &["Bearer two"]), Ok("b".to_owned()));
        assert!(code("/grpc.health.v1.Health/Check", &[]).unwrap().is_none());
        let long = format!("Bearer {}", "x".repeat(MAX_TOKEN + 1));
        for values in [
            &[][..],
            &["one"],
            &["Bearer"],
            &["Bearer "],
            &["Basic one"],
            &["Bearer three"],
            &["Bearer one", "Bearer one"],
            &[&long],
        ] {
            assert_eq!(name(generate, values), Err(tonic::Code::Unauthenticated), "{values:?}");
        }
        // One right is not the other.
        assert_eq!(name(profile, &["Bearer one"]), Err(tonic::Code::PermissionDenied));
        assert_eq!(name(generate, &["Bearer two"]), Err(tonic::Code::PermissionDenied));
        assert_eq!(name("/unknown/Method", &["Bearer one"]), Err(tonic::Code::PermissionDenied));
    }

    #[test]
    fn a_bucket_outlives_the_file_that_it_was_read_from() {
        let now = Instant::now();
        let token = |per_minute: Option<u32>| config::AccessToken {
            name: "a".to_owned(),
            sha256: Some([7; 32]),
            tokens_per_minute: per_minute,
            ..Default::default()
        };
        let first = super::Table::new(vec![token(Some(100))], None, now);
        let meter = |table: &Table| table.entries[0].1.allowance().meter.clone();
        meter(&first).unwrap().admit(150, now).unwrap();
        let second = super::Table::new(vec![token(Some(120))], Some(&first), now);
        assert_eq!(meter(&second).unwrap().ask(now).unwrap_err().debt, 30);
        assert!(meter(&super::Table::new(vec![token(None)], Some(&second), now)).is_none());
    }
}

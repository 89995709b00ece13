//! The admin endpoint: what an operator looks at, over HTTP. A page, its data as JSON ([`api`] says what it is), a health
//! check and the metrics. It shows and changes nothing: only GET is answered, and a model that loads is shown too.
//! Not here: TLS and authentication (it listens on loopback unless told otherwise), requests for tokens: the
//! page's chat talks to the endpoint of OpenAI's API.
//!
//! | path | what |
//! |---|---|
//! | `/` | the page; `/page.css`, `/page.js`, `/history.js`, `/chat.js`, `/favicon.svg` belong to it |
//! | `/api/state`, `/api/steps`, `/api/transfers`, `/api/requests`, `/api/history` | JSON |
//! | `/healthz` | 200 while a replica takes requests, or none is loaded and one can be; else 503: loading, draining or failed. The first line is the status, each further one a warning: it changes no status |
//! | `/metrics` | [`metrics`] for Prometheus |

pub mod api;
mod history;
pub mod metrics;

use crate::host::Host;
use crate::host::progress::{Progress, Unit};
use crate::replica::Replica;
use crate::service::connections;
use crate::service::model_endpoints::ModelEndpoints;
use crate::service::tls::{Accept, Protocol};
use crate::telemetry::clock::Moment;
use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use history::History;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// The most open connections. A new one is always accepted, so that a health check is answered while others hold
/// connections open: none is marked as having a call.
pub const CONNECTIONS: usize = 64;
/// The time after which a connection is closed that takes nothing of what it is sent.
const STUCK: Duration = Duration::from_secs(20);
/// Lines of a start that are kept: some dozens are written for each replica.
const LINES: usize = 256;
/// Threads that may wait for engine threads at once: each answers after its turn, and several pages may be open.
const QUESTIONS: usize = 8;
/// Longest time for an answer: engine threads answer between two turns.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// After the server's end, the time for answers under way.
const GOODBYE: Duration = Duration::from_secs(1);
/// How long after a fault of a decode step there is a warning of it.
const FAULT_WARNING: Duration = Duration::from_secs(600);

/// What the browser may do with the page, but for `connect-src`: its own files and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; connect-src 'self'";

/// What the admin endpoint shows.
#[derive(Debug)]
pub struct Admin {
    started: Moment,
    endpoint: OnceLock<SocketAddr>,
    http: OnceLock<HttpEndpoint>,
    models: OnceLock<Arc<ModelEndpoints>>,
    history: History,
    host: OnceLock<Arc<Host>>,
    loading: Mutex<Loading>,
    questions: Semaphore,
}

/// The endpoint of OpenAI's API, as the page's chat reaches it.
#[derive(Clone, Copy, Debug)]
pub struct HttpEndpoint {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether connections are encrypted.
    pub tls: bool,
    /// Whether requests need a token.
    pub tokens: bool,
}

impl HttpEndpoint {
    fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// The address as a URL has it.
    fn host(&self) -> String {
        match self.address.ip() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        }
    }

    /// The origins that the page may connect to, if it was opened under `page`, the `Host` of its request: the same
    /// name with this endpoint's port, and the endpoint's own address.
    fn origins(&self, page: Option<&str>) -> String {
        let plain = |name: &&str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte))
        };
        let page = page.map(split_port).filter(plain).map(ToOwned::to_owned);
        let own = (!self.address.ip().is_unspecified()).then(|| self.host());
        let (scheme, port) = (self.scheme(), self.address.port());
        page.into_iter().chain(own).map(|host| format!(" {scheme}://{host}:{port}")).collect()
    }
}

/// How far the start is.
#[derive(Clone, Debug, Default)]
struct Loading {
    /// What goes on now.
    step: Option<Step>,
    /// At most `LINES`.
    lines: VecDeque<String>,
}

#[derive(Clone, Debug)]
struct Step {
    what: String,
    done: u64,
    total: u64,
    unit: Unit,
    begun: Moment,
}

impl Admin {
    /// Of a server that starts now and has no host yet.
    pub fn new() -> Arc<Admin> {
        Arc::new(Admin {
            started: Moment::now(),
            endpoint: OnceLock::new(),
            http: OnceLock::new(),
            models: OnceLock::new(),
            history: History::default(),
            host: OnceLock::new(),
            loading: Mutex::default(),
            questions: Semaphore::new(QUESTIONS),
        })
    }

    /// Loading is over. A second host is not shown.
    pub fn set_host(&self, host: Arc<Host>) {
        self.loading().step = None;
        let _ = self.host.set(host);
    }

    /// Where the gRPC endpoint listens: the page says how to send a request there.
    pub fn set_endpoint(&self, address: SocketAddr) {
        let _ = self.endpoint.set(address);
    }

    /// Where the endpoint of OpenAI's API listens: the page has a chat there.
    pub fn set_http(&self, http: HttpEndpoint) {
        let _ = self.http.set(http);
    }

    /// Which models have gRPC endpoints of their own: the page says where.
    pub fn set_model_endpoints(&self, endpoints: Arc<ModelEndpoints>) {
        let _ = self.models.set(endpoints);
    }

    /// What is served; `None` while it is loaded.
    pub fn host(&self) -> Option<&Host> {
        self.host.get().map(|host| &**host)
    }

    fn loading(&self) -> MutexGuard<'_, Loading> {
        // Each change of it is whole.
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Status {
        match self.host() {
            None => Status::Loading,
            Some(host) if host.replicas().any(|replica| replica.closed().is_none()) => Status::Serving,
            Some(host) if host.models().is_empty() && host.can_load() => Status::Idle,
            Some(_) => Status::Closed,
        }
    }

    /// What an operator should know though requests are served: a sentence each.
    fn warnings(&self) -> Vec<String> {
        let now = Moment::now();
        let mut warnings = Vec::new();
        for replica in self.host().into_iter().flat_map(|host| host.replicas()) {
            if replica.rebuilding() {
                warnings.push(format!("{}: its device was lost and is built anew; requests wait", replica.name));
            }
            if let Some(ago) = replica.last_fault().map(|at| now.since(at)).filter(|ago| *ago < FAULT_WARNING) {
                warnings.push(fault_warning(&replica.name, replica.faults(), ago));
            }
        }
        warnings
    }
}

fn fault_warning(replica: &str, faults: u64, ago: Duration) -> String {
    let times = if faults == 1 { "once".to_owned() } else { format!("{faults} times") };
    format!(
        "{replica}: a kernel of a decode step waited in vain {times}, last {} s ago; steps were run again, and ran slower",
        ago.as_secs()
    )
}

impl Progress for Admin {
    fn line(&self, text: &str) {
        let mut loading = self.loading();
        if loading.lines.len() == LINES {
            loading.lines.pop_front();
        }
        loading.lines.push_back(text.to_owned());
    }

    fn step(&self, what: &str, done: u64, total: u64, unit: Unit) {
        let mut loading = self.loading();
        match &mut loading.step {
            Some(step) if step.what == what && done >= step.done => (step.done, step.total) = (done, total),
            // Another model's weights begin at zero again.
            step => *step = Some(Step { what: what.to_owned(), done, total, unit, begun: Moment::now() }),
        }
    }
}

/// Whether requests are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Loading,
    Serving,
    /// No model is loaded, and one can be.
    Idle,
    /// No replica takes requests: all drain or have failed.
    Closed,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Loading => "loading",
            Status::Serving => "serving",
            Status::Idle => "idle",
            Status::Closed => "closed",
        }
    }
}

/// Answers on `listener` until `stop`, then for a moment more.
pub async fn serve(admin: Arc<Admin>, listener: TcpListener, stop: CancellationToken) {
    let loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let (protocol, connections, handshake) = (Protocol::Http1, CONNECTIONS, connections::HEAD_WAIT);
    let accept = Accept { protocol, tls: None, connections, handshake, stuck: STUCK };
    let sampled = sample(Arc::clone(&admin));
    let server = connections::serve(listener, router(admin, loopback), accept, "admin", stop.clone());
    let late = async {
        stop.cancelled().await;
        tokio::time::sleep(GOODBYE).await;
    };
    tokio::select! {
        () = server => {}
        () = late => {}
        () = sampled => {}
    }
}

/// Samples the history for ever.
async fn sample(admin: Arc<Admin>) {
    let mut ticks = tokio::time::interval(history::INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Some(host) = admin.host() {
            admin.history.sample(host);
        }
    }
}

fn router(admin: Arc<Admin>, loopback: bool) -> Router {
    let file = |kind: &'static str, text: &'static str| get(async move || ([(header::CONTENT_TYPE, kind)], text));
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("page/index.html")))
        .route("/page.css", file("text/css; charset=utf-8", include_str!("page/page.css")))
        .route("/page.js", file("text/javascript; charset=utf-8", include_str!("page/page.js")))
        .route("/history.js", file("text/javascript; charset=utf-8", include_str!("page/history.js")))
        .route("/chat.js", file("text/javascript; charset=utf-8", include_str!("page/chat.js")))
        .route("/favicon.svg", file("image/svg+xml", include_str!("page/favicon.svg")))
        .route("/api/state", get(state))
        .route("/api/steps", get(steps))
        .route("/api/transfers", get(transfers))
        .route("/api/requests", get(requests))
        .route("/api/history", get(history))
        .route("/healthz", get(health))
        .route("/metrics", get(metrics))
        .fallback(async || (StatusCode::NOT_FOUND, "there is no such page\n"))
        .with_state(Arc::clone(&admin))
        .layer(middleware::from_fn(move |request: Request, next: Next| {
            guard(Arc::clone(&admin), loopback, request, next)
        }))
}

/// Refuses what is not for us, and tells browsers to keep to our own files.
async fn guard(admin: Arc<Admin>, loopback: bool, request: Request, next: Next) -> Response {
    let page = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let origins = admin.http.get().map(|http| http.origins(page)).unwrap_or_default();
    let policy = HeaderValue::try_from(format!("{POLICY}{origins}")).unwrap_or(HeaderValue::from_static(POLICY));
    // A page of another site whose name was made to mean this machine comes with that site's name (DNS rebinding).
    let mut response = if loopback && !names_loopback(request.uri(), request.headers()) {
        (StatusCode::FORBIDDEN, "this address is answered under localhost and 127.0.0.1 only\n").into_response()
    } else if ![Method::GET, Method::HEAD].contains(request.method()) {
        let allow = [(header::ALLOW, HeaderValue::from_static("GET, HEAD"))];
        (StatusCode::METHOD_NOT_ALLOWED, allow, "only GET is answered\n").into_response()
    } else {
        let late = |_| (StatusCode::SERVICE_UNAVAILABLE, "the answer took too long\n").into_response();
        tokio::time::timeout(ANSWER_WAIT, next.run(request)).await.unwrap_or_else(late)
    };
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    let set = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in set {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Whether all that says whom the request is for says this machine.
pub(super) fn names_loopback(uri: &Uri, headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter().map(HeaderValue::to_str).peekable();
    hosts.peek().is_some()
        && hosts.all(|host| host.is_ok_and(is_loopback))
        && uri.authority().is_none_or(|authority| is_loopback(authority.as_str()))
}

/// The host of `HOST[:PORT]`.
fn split_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // The colons of a bare IPv6 address stand in brackets.
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Whether `HOST[:PORT]` is `localhost` or a loopback address.
pub(super) fn is_loopback(host: &str) -> bool {
    let name = split_port(host);
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

async fn health(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let status = admin.status();
    let code = match status {
        Status::Serving | Status::Idle => StatusCode::OK,
        Status::Loading | Status::Closed => StatusCode::SERVICE_UNAVAILABLE,
    };
    let warnings: String = admin.warnings().iter().map(|warning| format!("warning: {warning}\n")).collect();
    (code, format!("{}\n{warnings}", status.name()))
}

async fn metrics(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics::render(admin.host()))
}

async fn state(State(admin): State<Arc<Admin>>) -> Response {
    json(&api::state(&admin))
}

/// Which steps.
#[derive(Debug, serde::Deserialize)]
struct Steps {
    replica: String,
    from: Option<u64>,
    last: Option<usize>,
}

async fn steps(State(admin): State<Arc<Admin>>, Query(query): Query<Steps>) -> Response {
    ask(admin, move |admin, host| {
        let replica = find(host, &query.replica)?;
        let replica = &*replica;
        let steps = match (query.from, query.last) {
            (Some(from), _) => replica.steps_from(from),
            (None, last) => replica.steps(last.unwrap_or(usize::MAX)),
        };
        Ok(api::steps(admin, replica, &steps))
    })
    .await
}

/// Which transfers.
#[derive(Debug, serde::Deserialize)]
struct Transfers {
    device: usize,
    #[serde(default)]
    from: u64,
}

async fn transfers(State(admin): State<Arc<Admin>>, Query(query): Query<Transfers>) -> Response {
    ask(admin, move |admin, host| {
        let device = host.devices().into_iter().find(|device| device.info.index == query.device);
        let device = device.ok_or_else(|| format!("nothing is served on a device of index {}", query.device))?;
        Ok(api::transfers(admin, &device, query.from))
    })
    .await
}

/// Which ended requests, or samples of the history.
#[derive(Debug, serde::Deserialize)]
struct Since {
    /// Microseconds since the server's start.
    #[serde(default)]
    since: f64,
}

async fn requests(State(admin): State<Arc<Admin>>, Query(query): Query<Since>) -> Response {
    ask(admin, move |admin, host| Ok(api::requests(admin, host, query.since))).await
}

async fn history(State(admin): State<Arc<Admin>>, Query(query): Query<Since>) -> Response {
    json(&api::history(&admin, query.since))
}

fn find(host: &Host, replica: &str) -> Result<Arc<Replica>, String> {
    host.replicas().find(|found| found.name == replica).ok_or_else(|| {
        let served: Vec<String> = host.replicas().map(|replica| replica.name.clone()).collect();
        format!("replica \"{replica}\" is not served; served are {}", served.join(", "))
    })
}

/// Looks at the host on a thread that may wait: engine threads answer between two turns.
async fn ask(
    admin: Arc<Admin>,
    question: impl FnOnce(&Admin, &Host) -> Result<serde_json::Value, String> + Send + 'static,
) -> Response {
    let loading = || (StatusCode::SERVICE_UNAVAILABLE, "the models are being loaded\n").into_response();
    if admin.host().is_none() {
        return loading();
    }
    let asking = Arc::clone(&admin);
    let Ok(_permit) = admin.questions.acquire().await else {
        return loading();
    };
    let answer = tokio::task::spawn_blocking(move || asking.host().map(|host| question(&asking, host))).await;
    match answer {
        Ok(Some(Ok(value))) => json(&value),
        Ok(Some(Err(why))) => (StatusCode::NOT_FOUND, format!("{why}\n")).into_response(),
        Ok(None) => loading(),
        // A panic was logged where it happened.
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "the answer could not be made\n").into_response(),
    }
}

fn json(value: &serde_json::Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_loopback() {
        for host in ["localhost", "LocalHost:9464", "127.0.0.1", "127.0.0.1:1", "127.8.8.8:80", "[::1]", "[::1]:9464"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in
            ["", ":9464", "localhost.evil.example", "127.0.0.1.evil.example:9464", "evil.example", "10.0.0.1:9464"]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn the_page_may_connect_to_the_api_under_its_own_name_and_that_of_the_api() {
        let http = |address: &str, tls| HttpEndpoint { address: address.parse().unwrap(), tls, tokens: false };
        let local = http("127.0.0.1:8000", false);
        assert_eq!(local.origins(Some("localhost:9464")), " http://localhost:8000 http://127.0.0.1:8000");
        assert_eq!(local.origins(None), " http://127.0.0.1:8000");
        assert_eq!(http("0.0.0.0:8001", true).origins(Some("gpu.example:9464")), " https://gpu.example:8001");
        assert_eq!(http("[::1]:8000", false).origins(Some("[::1]:9464")), " http://[::1]:8000 http://[::1]:8000");
        for host in ["a b", "x;script-src *", "*", ""] {
            assert_eq!(http("0.0.0.0:8000", false).origins(Some(host)), "", "{host}");
        }
    }

    #[test]
    fn a_start_is_kept_in_bounds_and_forgotten_when_it_is_over() {
        let admin = Admin::new();
        for line in 0..LINES + 3 {
            admin.line(&line.to_string());
        }
        assert_eq!(admin.loading().lines.len(), LINES);
        assert_eq!(admin.loading().lines.front().map(String::as_str), Some("3"));
        admin.step("loading weights", 5, 10, Unit::Bytes);
        let begun = admin.loading().step.as_ref().map(|step| step.begun);
        std::thread::sleep(Duration::from_millis(1));
        admin.step("loading weights", 10, 10, Unit::Bytes);
        assert_eq!(admin.loading().step.as_ref().map(|step| step.begun), begun, "the same work goes on");
        admin.step("loading weights", 0, 20, Unit::Bytes);
        assert_ne!(admin.loading().step.as_ref().map(|step| step.begun), begun, "the next model's");
        assert_eq!(admin.status(), Status::Loading);
        admin.set_host(Arc::new(Host::new(Vec::new())));
        assert!(admin.loading().step.is_none());
        assert_eq!(admin.status(), Status::Closed, "nothing takes requests");
    }
}

//! The admin endpoint over HTTP: a page for operators, its data as JSON ([`api`] describes it), a health check and
//! metrics. It is read-only: it answers GET requests only.
//! Not here: TLS and authentication (it listens on loopback unless configured otherwise); generating text (the page's
//! chat uses the endpoint of OpenAI's API).
//!
//! | path | what |
//! |---|---|
//! | `/` | the page; `/page.css`, `/page.js`, `/history.js`, `/chat.js`, `/favicon.svg` belong to it |
//! | `/api/state`, `/api/steps`, `/api/transfers`, `/api/requests`, `/api/history` | JSON |
//! | `/healthz` | 200 while a replica takes requests, or none is loaded and one can be; else 503: loading, draining or failed. The first line is the status, each further one a warning, which changes no status: of a replica that has failed, why |
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

/// The maximum number of open connections. No connection is marked as having a call, so a new one always gets a place,
/// and health checks are answered even if other connections stay open.
pub const CONNECTIONS: usize = 64;
/// The time after which a connection is closed that accepts no data.
const STUCK: Duration = Duration::from_secs(20);
/// The number of lines of a load's output that are kept; each replica writes a few dozen.
const LINES: usize = 256;
/// The maximum number of threads that wait for engine threads at once.
const QUESTIONS: usize = 8;
/// The maximum time for an answer. Engine threads answer between two turns.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// The time that answers have to finish after the server's end.
const GOODBYE: Duration = Duration::from_secs(1);
/// The time for which a fault of a decode step is shown as a warning.
const FAULT_WARNING: Duration = Duration::from_secs(600);

/// The page's Content Security Policy, to which `connect-src` origins are appended: only the endpoint's own files.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; connect-src 'self'";

/// The state that the admin endpoint shows.
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

/// The address of the endpoint of OpenAI's API, for the page's chat.
#[derive(Clone, Copy, Debug)]
pub struct HttpEndpoint {
    /// The address that it listens on.
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

    /// Returns the host as written in a URL.
    fn host(&self) -> String {
        match self.address.ip() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        }
    }

    /// Returns the origins that the page may connect to, given the `Host` of its request: this host with the endpoint's
    /// port, and the endpoint's own address.
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

/// The progress of the start.
#[derive(Clone, Debug, Default)]
struct Loading {
    /// The current activity.
    step: Option<Step>,
    /// The last lines of output, at most [`LINES`].
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
    /// Creates the state of a server that is starting.
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

    /// Sets the host, once all models are loaded. Later calls have no effect on the host.
    pub fn set_host(&self, host: Arc<Host>) {
        self.loading().step = None;
        let _ = self.host.set(host);
    }

    /// Sets the address of the gRPC endpoint.
    pub fn set_endpoint(&self, address: SocketAddr) {
        let _ = self.endpoint.set(address);
    }

    /// Sets the address of the endpoint of OpenAI's API.
    pub fn set_http(&self, http: HttpEndpoint) {
        let _ = self.http.set(http);
    }

    /// Sets the gRPC endpoints of single models.
    pub fn set_model_endpoints(&self, endpoints: Arc<ModelEndpoints>) {
        let _ = self.models.set(endpoints);
    }

    /// Returns the host; `None` while models are loaded.
    pub fn host(&self) -> Option<&Host> {
        self.host.get().map(|host| &**host)
    }

    fn loading(&self) -> MutexGuard<'_, Loading> {
        // Every change is complete, so a poisoned lock is harmless.
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Status {
        match self.host() {
            None => Status::Loading,
            Some(host) if !host.is_serving() => Status::Closed,
            Some(host) if host.is_idle() => Status::Idle,
            Some(_) => Status::Serving,
        }
    }

    /// Returns warnings for the operator, one sentence each: about problems while requests are served, and about replicas
    /// that have failed for good.
    fn warnings(&self) -> Vec<String> {
        let now = Moment::now();
        let mut warnings = Vec::new();
        for replica in self.host().into_iter().flat_map(|host| host.replicas()) {
            if replica.rebuilding() {
                warnings.push(format!("{}: its device was lost and is being rebuilt; requests wait", replica.name));
            }
            if let Some(why) = replica.closed().filter(|_| replica.failed()) {
                warnings.push(format!("{}: it has failed and takes no requests: {why}", replica.name));
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
        "{replica}: a kernel of a decode step timed out {times}, last {} s ago; its steps were run again, more slowly",
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

    fn warning(&self, text: &str) {
        self.line(&format!("warning: {text}"));
    }

    fn step(&self, what: &str, done: u64, total: u64, unit: Unit) {
        let mut loading = self.loading();
        match &mut loading.step {
            Some(step) if step.what == what && done >= step.done => (step.done, step.total) = (done, total),
            // The progress of the next model begins at zero.
            step => *step = Some(Step { what: what.to_owned(), done, total, unit, begun: Moment::now() }),
        }
    }
}

/// Whether the server accepts requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Loading,
    Serving,
    /// No model is loaded, but models can be loaded.
    Idle,
    /// No replica accepts requests: all are draining or have failed.
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

/// Serves `listener` until `stop` is cancelled, and then for a short time more.
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

/// Samples the history; never returns.
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

/// Refuses requests for other hosts, and adds the security headers to answers.
async fn guard(admin: Arc<Admin>, loopback: bool, request: Request, next: Next) -> Response {
    let page = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let origins = admin.http.get().map(|http| http.origins(page)).unwrap_or_default();
    let policy = HeaderValue::try_from(format!("{POLICY}{origins}")).unwrap_or(HeaderValue::from_static(POLICY));
    // Against DNS rebinding: a page of another site whose name resolves to this machine sends that site's name as the
    // host.
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

/// Returns whether all headers that name the requested host name this machine.
pub(super) fn names_loopback(uri: &Uri, headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter().map(HeaderValue::to_str).peekable();
    hosts.peek().is_some()
        && hosts.all(|host| host.is_ok_and(is_loopback))
        && uri.authority().is_none_or(|authority| is_loopback(authority.as_str()))
}

/// Returns the host of `HOST[:PORT]`.
fn split_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // An IPv6 address without a port is in brackets, so its last part is not a number.
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Returns whether `HOST[:PORT]` is `localhost` or a loopback address.
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

/// The query of `/api/steps`.
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

/// The query of `/api/transfers`.
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

/// The query of `/api/requests` and `/api/history`.
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

/// Runs a question to the host on a blocking thread, because engine threads answer between two turns.
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
        // The panic hook has logged the panic.
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

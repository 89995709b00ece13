//! `ostinato serve`: starts the configuration, telemetry, admin endpoint, host and gRPC endpoint in this order, waits
//! for a signal, and stops them in reverse order. Not here: applying a new configuration (`reload`).

use super::placement::DeviceArgs;
use super::reload::Reload;
use super::{Usage, cache_directory, named, progress};
use crate::actors::workers::{self, WorkerLimits};
use crate::config::{self, Bytes, Config, ConfigError, DEMO_PATH, Model, Placement, Quantize, Sources};
use crate::gpu::devices::start;
use crate::host::Host;
use crate::host::progress::{Progress, Unit};
use crate::service::admin::{self, Admin, HttpEndpoint};
use crate::service::auth::Tokens;
use crate::service::bounds::FILES_KEPT;
use crate::service::model_endpoints::ModelEndpoints;
use crate::service::server::{Changeable, Options, serve_with_http};
use crate::service::tls::Tls;
use crate::telemetry;
use anyhow::Context;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The longest wait for a load in progress when the server stops.
const SETTLE: Duration = Duration::from_secs(20);
/// The pools of worker processes of a model: one for constraints, one for chat templates.
const POOLS: usize = 2;
/// The number of connections that the system queues before they are accepted.
const BACKLOG: u32 = 1024;

/// What `--device` and `--split` mean where there may be several models and replicas.
const DEVICE_HELP: &str = "The device of the models given on the command line without one: UUID, PCI address, index, name \
    or `cpu`. Default: the only GPU. If given again, each model gets a replica on each; with --split, one over all of them";
const SPLIT_HELP: &str = "Split each of these models over all --device, in their order, instead of a replica on each: \
    `layers` gives each device consecutive layers, `tensor` a part of every layer";

#[derive(Clone, Debug, clap::Args)]
#[command(mut_arg("device", |arg| arg.help(DEVICE_HELP)), mut_arg("split", |arg| arg.help(SPLIT_HELP)))]
pub(crate) struct Serve {
    /// Models to serve, each a checkpoint's folder, a GGUF file, ORG/NAME on the Hugging Face hub (downloaded unless it
    /// is in the cache, see `ostinato pull`), or an embedded demo model. Each is served under the last part of its
    /// path; --model gives it another name. Without any model, `demo` is served.
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Configuration file (TOML). `deploy/ostinato.toml` shows all keys.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A model to serve: its name, its checkpoint's folder or GGUF file (or an embedded demo model, `demo` or
    /// `demo-hybrid`), and its device (UUID, PCI address, index, name or `cpu`; default: --device, or the only GPU).
    /// Replaces the configured model of that name or adds one. If given again with the same name, adds a replica.
    #[arg(long, value_name = "NAME=DIR[@DEVICE]")]
    model: Vec<Model>,
    /// Address and port of the gRPC endpoint. Port 0 selects a free port. Default: 127.0.0.1:50051, unless configured
    /// otherwise.
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// Address and port of OpenAI's API (HTTP), or `off`. Port 0 selects a free port. Default: 127.0.0.1:8000, unless
    /// configured otherwise.
    #[arg(long, value_name = "ADDR|off")]
    http: Option<String>,
    /// Address and port of the admin page, the metrics and the health check (HTTP), or `off`. Port 0 selects a free
    /// port. Default: 127.0.0.1:9464, unless configured otherwise.
    #[arg(long, value_name = "ADDR|off")]
    admin: Option<String>,
    /// Maximum length of prompt and output together, in tokens, for models without a configured one. Default: the
    /// checkpoint's, or as much of it as the device's memory holds.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Quantise 16-bit and 32-bit matrices at load, of models for which the configuration does not say it: int8 (8.125 bits
    /// a weight, relative error 0.65 %) or int4 (5 bits, 7.3 %).
    #[arg(long, value_name = "int8|int4")]
    quantize: Option<Quantize>,
    /// Maximum device memory of each replica, such as 20GiB, for models without a configured limit.
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<Bytes>,
    /// Allow addresses that other machines can reach without encryption: for --listen and --http if no certificates are
    /// configured (`server.tls`), and for --admin, which has neither encryption nor authentication.
    #[arg(long)]
    insecure: bool,
    #[command(flatten)]
    self_test: super::SelfTestArgs,
    /// Print JSON lines only: log lines and progress on stderr, the addresses on stdout.
    #[arg(long)]
    pub(super) json: bool,
}

impl Serve {
    /// Returns the arguments with every model of the command line as a `--model` with its name, files and devices.
    /// Downloads what is neither a path nor in the hub's cache.
    fn found(&self) -> anyhow::Result<Serve> {
        let mut models = Vec::new();
        let mut names = Vec::new();
        for given in &self.models {
            let name = named::served_as(given);
            models.push(Model::new(&name, named::find(given, self.json)?, None));
            names.push((name, given.clone()));
        }
        for model in &self.model {
            // Given again, a --model adds a replica.
            if !names[self.models.len()..].iter().any(|(name, _)| *name == model.name) {
                names.push((model.name.clone(), model.path.display().to_string()));
            }
            let path = match model.path.to_str() {
                Some(given) => named::find(given, self.json)?,
                None => model.path.clone(),
            };
            models.push(Model { path, ..model.clone() });
        }
        named::told_apart(&names)?;
        self.devices.check()?;
        for model in &mut models {
            self.place(model);
        }
        Ok(Serve { models: Vec::new(), model: models, ..self.clone() })
    }

    /// Gives a model without a device the devices of the command line.
    fn place(&self, model: &mut Model) {
        let replicas = self.devices.replicas();
        if !replicas.is_empty() && !model.replicas.iter().any(Placement::is_placed) {
            model.replicas = replicas;
        }
    }

    /// Reads the configuration from the arguments, the environment and the file, as they are now.
    pub(super) fn configuration(&self) -> Result<Config, ConfigError> {
        let mut config = config::from_sources(&Sources {
            file: self.config.clone(),
            environment: true,
            listen: self.listen.clone(),
            http: self.http.clone(),
            admin: self.admin.clone(),
            insecure: self.insecure,
            models: self.model.clone(),
        })?;
        if config.models.is_empty() {
            let mut demo = Model::new("demo", DEMO_PATH, None);
            self.place(&mut demo);
            config.models.push(demo);
        }
        for model in &mut config.models {
            model.memory_limit = model.memory_limit.or(self.memory_limit);
            model.context = model.context.or(self.context);
            model.quantize = model.quantize.or(self.quantize);
        }
        config.runtime.self_test &= self.self_test.wanted();
        if config.runtime.cache_directory.is_none() {
            config.runtime.cache_directory = cache_directory();
        }
        Ok(config)
    }
}

pub(crate) fn run(args: &Serve) -> anyhow::Result<()> {
    let args = &args.found()?;
    let config = args.configuration()?;
    let mut settings = config.telemetry.settings(args.json);
    if progress::verbosity() == progress::Verbosity::Quiet && config.telemetry.log == "info" {
        settings.log = "warn".to_owned();
    }
    let _telemetry = telemetry::init(&settings)?;
    workers::use_limits(worker_limits(&config));
    // Bind now, so that an address in use is reported before minutes of loading. The socket listens only after loading;
    // until then clients are refused.
    let socket = bind(config.server.listen, "server.listen")?;
    let http = config.http.listen.map(|address| bind(address, "http.listen")).transpose()?;
    let models = models_with_endpoints(&config).map(|(model, address)| {
        let socket = bind(address, &format!("listen of the model \"{model}\""))?;
        Ok((model.to_owned(), address, socket))
    });
    let models = models.collect::<anyhow::Result<Vec<_>>>()?;
    // Also reads the certificates, so that errors in them are reported before loading.
    let options = options(&config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("ostinato-grpc")
        .enable_all()
        .build()
        .context("cannot start the threads of the endpoint")?;
    let admin = Admin::new();
    let stop = CancellationToken::new();
    // The admin endpoint starts before the models are loaded, so that loading can be watched.
    let page = match config.admin.listen {
        Some(address) => {
            let _context = runtime.enter();
            let listener = listener(address, "admin.listen")?;
            let address = listener.local_addr().context("the admin endpoint has no address")?;
            tracing::info!("admin on http://{address}/");
            Some((address, runtime.spawn(admin::serve(Arc::clone(&admin), listener, stop.clone()))))
        }
        None => None,
    };
    let (page_address, page_task) = page.unzip();
    // A SIGHUP during loading is handled afterwards.
    let hangups = {
        let _context = runtime.enter();
        signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?
    };
    let host = {
        let show = if args.json { progress::Show::log() } else { progress::Show::new(false) };
        Arc::new(start(&config, &Both(&show, &*admin))?)
    };
    announce(&host);
    admin.set_host(Arc::clone(&host));
    let served = runtime.block_on(async {
        let endpoints = ModelEndpoints::new();
        let options = Options { model_endpoints: Some(Arc::clone(&endpoints)), ..options };
        let reload = Reload::new(args, config.clone(), Arc::clone(&host), endpoints);
        let page = (page_address, args.json);
        let served = listen((socket, http, models), host, &config, options, &admin, page, (hangups, reload)).await;
        stop.cancel();
        if let Some(page) = page_task {
            // The task has ended, or it panicked and the panic was logged.
            let _ = page.await;
        }
        served
    });
    // Wait at most a second for admin requests that still wait for an engine thread.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

/// Shows progress in two places.
struct Both<'a>(&'a dyn Progress, &'a dyn Progress);

impl Progress for Both<'_> {
    fn line(&self, text: &str) {
        self.0.line(text);
        self.1.line(text);
    }

    fn warning(&self, text: &str) {
        self.0.warning(text);
        self.1.warning(text);
    }

    fn step(&self, what: &str, done: u64, total: u64, unit: Unit) {
        self.0.step(what, done, total, unit);
        self.1.step(what, done, total, unit);
    }
}

async fn listen(
    (socket, http, models): (TcpSocket, Option<TcpSocket>, Vec<(String, SocketAddr, TcpSocket)>),
    host: Arc<Host>,
    config: &Config,
    options: Options,
    admin: &Admin,
    (page, json): (Option<SocketAddr>, bool),
    (hangups, reload): (Signal, Reload),
) -> anyhow::Result<()> {
    // Install the signal handlers before the address is announced: a script may stop the server as soon as it reads the
    // address.
    let stopped = signals()?;
    let listener = socket.listen(BACKLOG).map_err(|error| in_use(config.server.listen, "server.listen", error))?;
    let address = listener.local_addr().context("the endpoint has no address")?;
    let http = match (http, config.http.listen) {
        (Some(socket), Some(address)) => {
            Some(socket.listen(BACKLOG).map_err(|error| in_use(address, "http.listen", error))?)
        }
        _ => None,
    };
    admin.set_endpoint(address);
    let mut model_addresses = Vec::new();
    if let Some(endpoints) = &options.model_endpoints {
        for (model, address, socket) in models {
            let failed = |error| in_use(address, &format!("listen of the model \"{model}\""), error);
            let address = endpoints.open(&model, socket.listen(BACKLOG).map_err(failed)?).map_err(failed)?;
            model_addresses.push((model, address));
        }
        admin.set_model_endpoints(Arc::clone(endpoints));
    }
    // On standard output, because scripts read the port from it.
    let http_address = http.as_ref().and_then(|listener| listener.local_addr().ok());
    let tls = config.server.tls.is_some();
    if let Some(address) = http_address {
        admin.set_http(HttpEndpoint { address, tls, tokens: config.server.tokens.is_some() });
    }
    let scheme = if tls { "https" } else { "http" };
    if json {
        let models: serde_json::Map<String, serde_json::Value> =
            model_addresses.into_iter().map(|(model, address)| (model, address.to_string().into())).collect();
        let event = serde_json::json!({
            "event": "listening", "grpc": address, "http": http_address, "admin": page, "models": models,
        });
        println!("{event}");
    } else {
        println!("listening on {address}");
        // The script that has read the port may already have closed the pipe, so errors are ignored.
        if let Some(page) = page {
            let _ = writeln!(std::io::stdout(), "admin on http://{page}/");
        }
        if let Some(http) = http_address {
            let _ = writeln!(std::io::stdout(), "OpenAI's API on {scheme}://{http}/v1");
        }
        for (model, address) in model_addresses {
            let _ = writeln!(std::io::stdout(), "model \"{model}\" alone on {address}");
        }
    }
    let (sender, changes) = watch::channel(changeable(&config.server));
    let reloads = tokio::spawn(reload.at(hangups, sender));
    let options = Options { changes: Some(changes), ..options };
    let stopped = serve_with_http(Arc::clone(&host), listener, http, options, stopped).await?;
    reloads.abort();
    // A load in progress has been told to end. Wait for it, so that the process does not exit while the driver compiles
    // its pipelines.
    let settled = tokio::task::spawn_blocking(move || host.settle(SETTLE)).await;
    if !settled.unwrap_or(false) {
        tracing::warn!("a model is still being loaded");
    }
    match stopped.cut {
        0 => tracing::info!("stopped"),
        cut => tracing::warn!(cut, "stopped; the grace period was over for some streams"),
    }
    Ok(())
}

/// The endpoint settings that can change while the server runs.
pub(super) fn changeable(server: &config::Server) -> Changeable {
    Changeable {
        drain: Duration::from_secs_f64(server.drain_seconds),
        stream_buffer: server.stream_buffer as usize,
        client_limit: server.client_limit,
        trust_client_header: server.trust_client_header,
    }
}

fn options(config: &Config) -> anyhow::Result<Options> {
    let server = &config.server;
    let bytes = |bytes: Bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX);
    let open = |address: SocketAddr| !address.ip().is_loopback();
    let of_models = || models_with_endpoints(config).any(|(_, address)| open(address));
    let reached = open(server.listen) || config.http.listen.is_some_and(open) || of_models();
    if server.tokens.is_some() && server.tls.is_none() && reached {
        tracing::warn!(
            "access tokens are sent over unencrypted connections: anyone who can read the traffic can use them"
        );
    }
    let Changeable { drain, stream_buffer, client_limit, trust_client_header } = changeable(server);
    Ok(Options {
        drain,
        max_message_bytes: bytes(server.max_message_bytes),
        max_prompt_bytes: bytes(server.max_prompt_bytes),
        stream_buffer,
        client_limit,
        trust_client_header,
        tls: server.tls.as_ref().map(|files| Tls::read(files).map(Arc::new)).transpose()?,
        tokens: server.tokens.as_deref().map(|file| Tokens::read(file).map(Arc::new)).transpose()?,
        connections: connections(config),
        ..Options::default()
    })
}

/// Returns the number of connections that each endpoint accepts: as many as configured, or fewer if the limit of open
/// files does not allow them. Raises the soft limit as far as the hard limit allows.
fn connections(config: &Config) -> usize {
    let (asked, models) = (config.server.connections, config.models.len());
    let endpoints = 1 + u64::from(config.http.listen.is_some()) + models_with_endpoints(config).count() as u64;
    // A model that is replaced serves until the new one is loaded, so one model more has workers.
    let workers = (workers::files() * POOLS * (models + 1)) as u64;
    let page = if config.admin.listen.is_some() { admin::CONNECTIONS as u64 } else { 0 };
    let others = u64::from(FILES_KEPT) + workers + page;
    let wanted = u64::from(asked) * endpoints + others;
    let mut limits = getrlimit(Resource::Nofile);
    if limits.current.is_some_and(|current| current < wanted) {
        let raised = limits.maximum.map_or(wanted, |most| most.min(wanted));
        // If this fails, the limit stays as it is.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..limits });
        limits = getrlimit(Resource::Nofile);
    }
    let fitting = limits.current.map_or(u64::from(asked), |files| fitting(u64::from(asked), endpoints, others, files));
    if fitting < u64::from(asked) {
        tracing::warn!(
            "server.connections is {asked}, and {fitting} are taken by each of {endpoints} endpoints: of {} open files \
             {others} are kept for others",
            limits.current.unwrap_or_default()
        );
    }
    usize::try_from(fitting).unwrap_or(usize::MAX)
}

/// The number of connections, at most `asked`, that each of the `endpoints` can have with `files` open files, of which
/// `others` are needed for other purposes. All endpoints have at least a quarter of `files`, and each at least 1, up to
/// `asked`.
fn fitting(asked: u64, endpoints: u64, others: u64, files: u64) -> u64 {
    asked.min((files.saturating_sub(others).max(files / 4) / endpoints).max(1))
}

/// Returns the models with gRPC endpoints of their own, and the configured addresses of those.
pub(super) fn models_with_endpoints(config: &Config) -> impl Iterator<Item = (&str, SocketAddr)> {
    config.models.iter().filter_map(|model| Some((model.name.as_str(), model.listen?)))
}

/// Binds a socket and listens on it.
pub(super) fn listener(address: SocketAddr, key: &str) -> anyhow::Result<TcpListener> {
    bind(address, key)?.listen(BACKLOG).map_err(|error| in_use(address, key, error))
}

/// Binds a socket. `key` is the configuration key of the address, for error messages.
fn bind(address: SocketAddr, key: &str) -> anyhow::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket.context("cannot open a socket")?;
    // Allows a restart while old connections are still in TIME_WAIT.
    socket.set_reuseaddr(true).context("cannot set up a socket")?;
    socket.bind(address).map_err(|error| in_use(address, key, error))?;
    Ok(socket)
}

fn in_use(address: SocketAddr, key: &str, error: std::io::Error) -> anyhow::Error {
    let option = match key {
        "server.listen" => "; --listen gives another address",
        "http.listen" => "; --http gives another address",
        "admin.listen" => "; --admin gives another address",
        _ => "",
    };
    anyhow::Error::from(Usage(format!("cannot listen on {address} ({key}): {error}{option}")))
}

/// Returns a future that resolves at the first SIGTERM or SIGINT. A second signal ends the process with status 1.
fn signals() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let stop = CancellationToken::new();
    let first = stop.clone().cancelled_owned();
    tokio::spawn(async move {
        for last in [false, true] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if last {
                tracing::warn!("stopped by a second signal");
                std::process::exit(1);
            }
            stop.cancel();
        }
    });
    Ok(first)
}

/// Returns the limits of worker processes that a configuration sets.
fn worker_limits(config: &Config) -> WorkerLimits {
    WorkerLimits { memory: config.server.worker_memory.0, cpu: Duration::from_secs_f64(config.server.worker_seconds) }
}

/// Logs each replica and its device.
fn announce(host: &Host) {
    for model in &*host.models() {
        for replica in &model.replicas {
            tracing::info!(
                model = model.name,
                replica = replica.name,
                device = replica.device.name,
                uuid = replica.device.uuid,
                pci = replica.device.pci,
                context = model.info.context,
                "ready"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a constraint or template may take 2 s of processor time and 512 MiB if the configuration says nothing, which
    /// is also what other commands allow. `tests/hostile/constraints.rs` measures that a server keeps to it.
    #[test]
    fn workers_have_the_default_limits_unless_they_are_configured() {
        let mut config = Config::default();
        let shipped = WorkerLimits { memory: 512 << 20, cpu: Duration::from_secs(2) };
        assert_eq!((worker_limits(&config), WorkerLimits::default()), (shipped, shipped));
        (config.server.worker_seconds, config.server.worker_memory) = (0.5, Bytes(64 << 20));
        assert_eq!(worker_limits(&config), WorkerLimits { memory: 64 << 20, cpu: Duration::from_millis(500) });
    }

    #[test]
    fn connections_leave_files_to_others() {
        for (asked, endpoints, others, files, fitting) in [
            (1024, 1, 320, 65_536, 1024),
            (1024, 1, 320, 1344, 1024),
            (1024, 1, 320, 1024, 704),
            (1024, 2, 320, 1024, 352),
            (100, 1, 320, 1024, 100),
            (100, 2, 320, 1024, 100),
            // With few files, a quarter of them and at least one.
            (1024, 1, 320, 256, 64),
            (1024, 2, 320, 0, 1),
        ] {
            assert_eq!(
                super::fitting(asked, endpoints, others, files),
                fitting,
                "{asked} {endpoints} {others} {files}"
            );
        }
    }
}

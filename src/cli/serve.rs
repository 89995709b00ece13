//! `ostinato serve`: configuration, telemetry, host, endpoint, bottom to top; a signal; then
//! top to bottom.

use super::{Usage, cache_directory, progress};
use crate::config::{self, Bytes, Config, DEMO_PATH, Model, Sources};
use crate::engine::host::Host;
use crate::engine::start::start;
use crate::service::server::{Options, serve};
use crate::telemetry;
use anyhow::Context;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpSocket;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Connections that the system may hold before they are accepted.
const BACKLOG: u32 = 1024;

#[derive(Debug, clap::Args)]
pub(crate) struct Serve {
    /// A configuration file (TOML); `deploy/ostinato.toml` shows every key.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A model, where its checkpoint is (or an embedded demo model, `demo` or `demo-hybrid`), and the device that it
    /// runs on (UUID, PCI address, index, name or `cpu`; left out: the only GPU). It replaces the file's model of that
    /// name or adds one; the same name again is another replica. Without any model, `demo` is served.
    #[arg(long, value_name = "NAME=DIR[@DEVICE]")]
    model: Vec<Model>,
    /// Address and port of the endpoint; port 0 takes a free one.
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// The most device memory that each replica may take, such as 20GiB, where the configuration sets none.
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<Bytes>,
    /// Allows an address that other machines reach; there is no TLS and no authentication.
    #[arg(long)]
    insecure: bool,
    /// Log lines as JSON objects.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Serve) -> anyhow::Result<()> {
    let mut config = config::from_sources(&Sources {
        file: args.config.clone(),
        environment: true,
        listen: args.listen.clone(),
        insecure: args.insecure,
        models: args.model.clone(),
    })?;
    if config.models.is_empty() {
        config.models.push(Model::new("demo", DEMO_PATH, None));
    }
    for model in &mut config.models {
        model.memory_limit = model.memory_limit.or(args.memory_limit);
    }
    if config.runtime.cache_directory.is_none() {
        config.runtime.cache_directory = cache_directory();
    }
    let _telemetry = telemetry::init(&telemetry::Settings {
        otlp_endpoint: config.telemetry.otlp_endpoint.clone(),
        sample_ratio: config.telemetry.sample_ratio,
        log: config.telemetry.log.clone(),
        json: args.json,
    })?;
    // Taken before minutes of loading, listened on after: until then clients are refused.
    let socket = bind(config.server.listen)?;
    let host = {
        let show = progress::Show::new(args.json);
        Arc::new(start(&config, &show)?)
    };
    announce(&host);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("ostinato-grpc")
        .enable_all()
        .build()
        .context("cannot start the threads of the endpoint")?;
    runtime.block_on(listen(socket, host, &config))
}

async fn listen(socket: TcpSocket, host: Arc<Host>, config: &Config) -> anyhow::Result<()> {
    let listener = socket.listen(BACKLOG).map_err(|error| in_use(config.server.listen, error))?;
    let address = listener.local_addr().context("the endpoint has no address")?;
    // On standard output: scripts read the port from it.
    println!("listening on {address}");
    let options = Options {
        drain: Duration::from_secs_f64(config.server.drain_seconds),
        max_message_bytes: usize::try_from(config.server.max_message_bytes.0).unwrap_or(usize::MAX),
        stream_buffer: config.server.stream_buffer as usize,
        client_limit: config.server.client_limit,
        trust_client_header: config.server.trust_client_header,
    };
    let stopped = serve(host, listener, options, signals()?).await?;
    match stopped.cut {
        0 => tracing::info!("stopped"),
        cut => tracing::warn!(cut, "stopped; the grace period was over for some streams"),
    }
    Ok(())
}

fn bind(address: SocketAddr) -> anyhow::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket.context("cannot open a socket")?;
    // A restart must not wait for the old connections' last packets.
    socket.set_reuseaddr(true).context("cannot set up a socket")?;
    socket.bind(address).map_err(|error| in_use(address, error))?;
    Ok(socket)
}

fn in_use(address: SocketAddr, error: std::io::Error) -> anyhow::Error {
    anyhow::Error::from(Usage(format!("cannot listen on {address}: {error}")))
}

/// Resolves at the first SIGTERM or SIGINT; the second ends the program.
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

/// What runs where.
fn announce(host: &Host) {
    for model in &host.models {
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

//! Applies a new configuration to a running server at SIGHUP: models are added, removed and replaced, and the
//! endpoint's limits change. Settings that cannot change while the server runs keep their value, with a warning. A
//! configuration with an error changes nothing. Not here: reading a configuration, and loading and unloading models.

use super::serve::{Serve, changeable, listener, models_with_endpoints};
use crate::config::Config;
use crate::host::Host;
use crate::host::progress::{Progress, Unit};
use crate::service::model_endpoints::ModelEndpoints;
use crate::service::server::Changeable;
use crate::telemetry::with_causes;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::Signal;
use tokio::sync::watch;

/// How long an address may be held by an endpoint that was closed before, and between two attempts to have it.
const ADDRESS_WAIT: Duration = Duration::from_secs(2);
const ADDRESS_LOOK: Duration = Duration::from_millis(50);

/// The arguments from which the configuration is read again, and the configuration in force.
pub(super) struct Reload {
    args: Serve,
    config: Config,
    host: Arc<Host>,
    endpoints: Arc<ModelEndpoints>,
    /// The configured addresses of the models' own endpoints that are open.
    open: HashMap<String, SocketAddr>,
}

impl Reload {
    /// Creates the reloader. `config` is the configuration that the server was started with; `endpoints` are the models'
    /// own endpoints, all of which are opened from it.
    pub(super) fn new(args: &Serve, config: Config, host: Arc<Host>, endpoints: Arc<ModelEndpoints>) -> Reload {
        let open = models_with_endpoints(&config).map(|(model, address)| (model.to_owned(), address)).collect();
        Reload { args: args.clone(), config, host, endpoints, open }
    }

    /// Reads the configuration again at each signal, and sends changed limits to the endpoint.
    pub(super) async fn at(mut self, mut signals: Signal, endpoint: watch::Sender<Changeable>) {
        while signals.recv().await.is_some() {
            let endpoint = endpoint.clone();
            let read = tokio::task::spawn_blocking(move || {
                self.once(&endpoint);
                self
            });
            match read.await {
                Ok(reload) => self = reload,
                // The panic was logged where it happened.
                Err(_) => return,
            }
        }
    }

    fn once(&mut self, endpoint: &watch::Sender<Changeable>) {
        let config = match self.args.configuration() {
            Ok(config) => config,
            Err(error) => {
                tracing::error!("nothing is changed: {}", with_causes(&error));
                return;
            }
        };
        let grace = Duration::from_secs_f64(config.server.drain_seconds);
        tracing::info!("the configuration is read again");
        let changed =
            match self.host.configure(&config.models, config.server.queue_limit as usize, grace, &Lines, || {
                endpoint.send_replace(changeable(&config.server));
                for kept in kept(&self.config, &config) {
                    tracing::warn!("{kept}");
                }
            }) {
                Ok(changed) => changed,
                Err(problems) => {
                    let problems: Vec<String> = problems.iter().map(|error| with_causes(error)).collect();
                    tracing::error!("nothing is changed: {}", problems.join("; "));
                    return;
                }
            };
        for changed in &changed {
            match &changed.result {
                Ok(()) => tracing::info!(model = changed.model, "{}", changed.change),
                Err(error) => {
                    tracing::error!(model = changed.model, "could not be {}: {}", changed.change, with_causes(error));
                }
            }
        }
        self.endpoints(&config);
        // Settings that need a restart keep their old value here, so that each reload warns about them again.
        let Config { server, models, .. } = config;
        let in_force = &mut self.config.server;
        in_force.queue_limit = server.queue_limit;
        in_force.client_limit = server.client_limit;
        in_force.trust_client_header = server.trust_client_header;
        in_force.drain_seconds = server.drain_seconds;
        in_force.stream_buffer = server.stream_buffer;
        self.config.models = models;
        tracing::info!("the configuration is in force");
    }
}

impl Reload {
    /// Opens and closes the models' own endpoints as `config` says. One that cannot be opened is tried again at the next
    /// reload.
    fn endpoints(&mut self, config: &Config) {
        let wanted: HashMap<String, SocketAddr> =
            models_with_endpoints(config).map(|(model, address)| (model.to_owned(), address)).collect();
        // First of all what is given up: another model may take its address.
        let given_up: Vec<String> = self
            .open
            .iter()
            .filter(|(model, at)| wanted.get(*model) != Some(at))
            .map(|(model, _)| model.clone())
            .collect();
        for model in given_up {
            tracing::info!(model, "the model has no endpoint at {} any more", self.open[&model]);
            self.endpoints.close(&model);
            self.open.remove(&model);
        }
        for (model, address) in wanted {
            if self.open.contains_key(&model) {
                continue;
            }
            let opened =
                self.listener(address, &model).and_then(|listener| Ok(self.endpoints.open(&model, listener)?));
            match opened {
                Ok(at) => {
                    tracing::info!(model, "the model is served alone on {at}");
                    self.open.insert(model, address);
                }
                Err(error) => tracing::error!(model, "the model gets no endpoint: {error:#}"),
            }
        }
    }

    /// Listens on the address of a model's own endpoint. An endpoint that was closed just now may still hold it for a
    /// moment.
    fn listener(&self, address: SocketAddr, model: &str) -> anyhow::Result<tokio::net::TcpListener> {
        let until = Instant::now() + ADDRESS_WAIT;
        loop {
            match listener(address, &format!("listen of the model \"{model}\"")) {
                Err(_) if Instant::now() < until => std::thread::sleep(ADDRESS_LOOK),
                listener => return listener,
            }
        }
    }
}

/// Returns a warning for each setting that differs in the new configuration but takes effect only after a restart.
fn kept(old: &Config, new: &Config) -> Vec<String> {
    let mut kept = Vec::new();
    let mut compare = |key: &str, old: String, new: String| {
        if old != new {
            kept.push(format!("{key} stays {old}: {new} takes a new start"));
        }
    };
    fn show(value: &impl std::fmt::Debug) -> String {
        format!("{value:?}")
    }
    let (a, b) = (&old.server, &new.server);
    compare("server.listen", a.listen.to_string(), b.listen.to_string());
    compare("server.insecure", a.insecure.to_string(), b.insecure.to_string());
    compare("server.max_message_bytes", a.max_message_bytes.to_string(), b.max_message_bytes.to_string());
    compare("server.max_prompt_bytes", a.max_prompt_bytes.to_string(), b.max_prompt_bytes.to_string());
    compare("server.worker_memory", a.worker_memory.to_string(), b.worker_memory.to_string());
    compare("server.worker_seconds", a.worker_seconds.to_string(), b.worker_seconds.to_string());
    compare("server.connections", a.connections.to_string(), b.connections.to_string());
    compare("server.tls", show(&a.tls), show(&b.tls));
    compare("server.tokens", show(&a.tokens), show(&b.tokens));
    let (a, b) = (&old.http, &new.http);
    let listens = |listen: Option<std::net::SocketAddr>| listen.map_or("off".to_owned(), |at| at.to_string());
    compare("http.listen", listens(a.listen), listens(b.listen));
    compare("http.insecure", a.insecure.to_string(), b.insecure.to_string());
    let (a, b) = (&old.admin, &new.admin);
    compare("admin.listen", listens(a.listen), listens(b.listen));
    compare("admin.insecure", a.insecure.to_string(), b.insecure.to_string());
    let (a, b) = (&old.telemetry, &new.telemetry);
    compare("telemetry.otlp_endpoint", show(&a.otlp_endpoint), show(&b.otlp_endpoint));
    compare("telemetry.sample_ratio", show(&a.sample_ratio), show(&b.sample_ratio));
    compare("telemetry.log", show(&a.log), show(&b.log));
    compare("telemetry.gpu_time", show(&a.gpu_time), show(&b.gpu_time));
    let (a, b) = (&old.runtime, &new.runtime);
    compare("runtime.cache_directory", show(&a.cache_directory), show(&b.cache_directory));
    compare("runtime.tune", show(&a.tune), show(&b.tune));
    compare("runtime.ptx", show(&a.ptx), show(&b.ptx));
    compare("runtime.turns", show(&a.turns), show(&b.turns));
    compare("runtime.self_test", show(&a.self_test), show(&b.self_test));
    compare("runtime.validation", show(&a.validation), show(&b.validation));
    kept
}

/// Writes the lines and warnings of loads to the log.
struct Lines;

impl Progress for Lines {
    fn line(&self, text: &str) {
        tracing::info!("{text}");
    }

    fn warning(&self, text: &str) {
        tracing::warn!("{text}");
    }

    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_change_is_named_with_both_values() {
        let old = Config::default();
        let mut new = old.clone();
        new.server.queue_limit += 1;
        new.server.drain_seconds += 1.0;
        assert!(kept(&old, &new).is_empty(), "these can change");
        new.server.listen = "127.0.0.1:1".parse().expect("an address");
        new.admin.listen = None;
        new.telemetry.log = "debug".to_owned();
        new.runtime.cache_directory = Some("/a".into());
        let kept = kept(&old, &new);
        assert_eq!(
            kept,
            [
                "server.listen stays 127.0.0.1:50051: 127.0.0.1:1 takes a new start",
                "admin.listen stays 127.0.0.1:9464: off takes a new start",
                "telemetry.log stays \"info\": \"debug\" takes a new start",
                "runtime.cache_directory stays None: Some(\"/a\") takes a new start",
            ]
        );
    }
}

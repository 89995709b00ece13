//! Telemetry: the names of all spans, metrics and attributes, the OTLP exporter, the host's clock, and the log output.
//! Not here: knowledge of models. This module uses no other module of this crate; settings come in as plain values.

pub mod clock;
pub mod names;
pub mod otlp;
pub mod requests;
pub mod spans;

use std::io::IsTerminal;
use std::time::Duration;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Formats an error and all its causes on one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// Settings of logs and span export.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Endpoint of the OTLP collector for spans (gRPC); `None` exports nothing.
    pub otlp_endpoint: Option<String>,
    /// The timeout of one export; by default two seconds.
    pub export_timeout: Option<Duration>,
    /// Attributes of the resource, which take precedence over the exporter's own; of two with the same name the later
    /// one does.
    pub resource: Vec<(String, String)>,
    /// The fraction of traces started by this process that are sampled, 0 to 1.
    pub sample_ratio: f64,
    /// Whether traces started elsewhere keep the caller's decision; otherwise `sample_ratio` applies to them too.
    pub parent_based: bool,
    /// The log filter for stderr, in `tracing`'s filter syntax.
    pub log: String,
    /// Whether log lines are JSON objects.
    pub json: bool,
}

impl Default for Settings {
    /// Logs from level `info` on, and no export.
    fn default() -> Settings {
        Settings {
            otlp_endpoint: None,
            export_timeout: None,
            resource: Vec::new(),
            sample_ratio: 1.0,
            parent_based: true,
            log: "info".to_owned(),
            json: false,
        }
    }
}

/// Why telemetry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log filter has a syntax error.
    #[error("log filter \"{filter}\" cannot be read")]
    Filter {
        /// The filter as configured.
        filter: String,
        /// The cause.
        source: tracing_subscriber::filter::ParseError,
    },
    /// The exporter cannot be built.
    #[error("cannot export spans to \"{endpoint}\"")]
    Exporter {
        /// The endpoint as configured.
        endpoint: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The process already has a `tracing` subscriber.
    #[error("telemetry is started twice")]
    Twice(#[source] tracing_subscriber::util::TryInitError),
}

/// Keeps telemetry running; held until the program ends. Dropping it sends the remaining spans, which takes at most two
/// seconds.
#[derive(Debug)]
#[must_use = "spans are exported only while it lives"]
pub struct Guard {
    exporter: Option<otlp::Exporter>,
}

impl Guard {
    /// Sends the spans that have ended so far. Returns when they have been sent or the export has failed.
    pub fn flush(&self) {
        if let Some(exporter) = &self.exporter {
            exporter.flush();
        }
    }
}

/// Default filter directives for libraries that log a line for each frame, reset or alert that a client sends, or for
/// each token of a vocabulary. Directives of the configured filter for the same libraries take precedence.
const QUIET: &str = "h2=error,rustls=off,tokenizers=error";

/// Starts the logs to stderr and, if an endpoint is set, the export of spans. To be called once per process.
///
/// Fails if the log filter has a syntax error, the exporter cannot be built, or the process already has a subscriber.
pub fn init(settings: &Settings) -> Result<Guard, TelemetryError> {
    let filter = EnvFilter::try_new(format!("{QUIET},{}", settings.log))
        .map_err(|source| TelemetryError::Filter { filter: settings.log.clone(), source })?;
    let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = if settings.json {
        plain.json().with_filter(filter).boxed()
    } else {
        plain.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed()
    };
    let exporter =
        settings.otlp_endpoint.as_deref().map(|endpoint| otlp::Exporter::new(endpoint, settings)).transpose()?;
    let spans = exporter.as_ref().map(otlp::Exporter::layer);
    tracing_subscriber::registry().with(logs).with(spans).try_init().map_err(TelemetryError::Twice)?;
    if let Some(exporter) = &exporter {
        spans::export_with(exporter.tracer());
        tracing::info!(
            endpoint = exporter.endpoint,
            service = exporter.resource(names::SERVICE_NAME),
            instance = exporter.resource(names::SERVICE_INSTANCE_ID),
            "spans are exported"
        );
    }
    Ok(Guard { exporter })
}

/// Starts logging of warnings to stderr, for commands that do one thing and end. Does nothing if the process already
/// has a subscriber.
pub fn warnings() {
    let filter = EnvFilter::new(format!("{QUIET},warn"));
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = logs.with_ansi(std::io::stderr().is_terminal()).with_filter(filter);
    let _ = tracing_subscriber::registry().with(logs).try_init();
}

//! Every span, metric and attribute name; the OTLP exporter. Knows no models, and uses no
//! other module of ours: what is configured comes in as plain values.

pub mod clock;
pub mod names;
pub mod otlp;
pub mod requests;
pub mod spans;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// An error and everything that caused it, on one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// What telemetry needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where spans go, OTLP over gRPC; `None`: nowhere.
    pub otlp_endpoint: Option<String>,
    /// Share of the traces that begin here and are kept, 0 to 1.
    pub sample_ratio: f64,
    /// What is logged to stderr, in `tracing`'s filter syntax.
    pub log: String,
    /// Log lines as JSON objects.
    pub json: bool,
}

/// Why telemetry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter of `log` cannot be read.
    #[error("log filter \"{filter}\" cannot be read")]
    Filter {
        /// As given.
        filter: String,
        /// The cause.
        source: tracing_subscriber::filter::ParseError,
    },
    /// The exporter cannot be built.
    #[error("cannot export spans to \"{endpoint}\"")]
    Exporter {
        /// As given.
        endpoint: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The program has a subscriber already.
    #[error("telemetry is started twice")]
    Twice(#[source] tracing_subscriber::util::TryInitError),
}

/// Lives as long as the program; dropped, it sends what has not been sent yet, for at most
/// two seconds.
#[derive(Debug)]
#[must_use = "spans are exported only while it lives"]
pub struct Guard {
    exporter: Option<otlp::Exporter>,
}

impl Guard {
    /// Sends what has ended so far; returns when it was sent, or failed.
    pub fn flush(&self) {
        if let Some(exporter) = &self.exporter {
            exporter.flush();
        }
    }
}

/// Libraries that warn of what a client does, a line for each frame, reset or alert that it sends; what the filter says of
/// them goes before this.
const QUIET: &str = "h2=error,rustls=off";

/// Starts logs to stderr and, with an endpoint, the export of spans. Once a process.
pub fn init(settings: &Settings) -> Result<Guard, TelemetryError> {
    let filter = EnvFilter::try_new(format!("{QUIET},{}", settings.log))
        .map_err(|source| TelemetryError::Filter { filter: settings.log.clone(), source })?;
    let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = if settings.json {
        plain.json().with_filter(filter).boxed()
    } else {
        use std::io::IsTerminal;
        plain.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed()
    };
    let exporter = settings
        .otlp_endpoint
        .as_deref()
        .map(|endpoint| otlp::Exporter::new(endpoint, settings.sample_ratio))
        .transpose()?;
    let spans = exporter.as_ref().map(otlp::Exporter::layer);
    tracing_subscriber::registry().with(logs).with(spans).try_init().map_err(TelemetryError::Twice)?;
    if let Some(exporter) = &exporter {
        spans::export_with(exporter.tracer());
    }
    Ok(Guard { exporter })
}

/// Warnings to stderr and nothing else, for commands that do one thing and end. Does nothing where the program
/// has a subscriber already.
pub fn warnings() {
    let level = tracing_subscriber::filter::LevelFilter::WARN;
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(level);
    let _ = tracing_subscriber::registry().with(logs).try_init();
}

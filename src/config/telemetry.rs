//! `[telemetry]`: logs and traces.

use super::load::Problem;
use super::otel::OtelSettings;
use crate::telemetry::Settings;
use serde::Deserialize;

/// Logs and traces.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Telemetry {
    /// The OTLP/gRPC endpoint to which spans are sent, such as `http://127.0.0.1:4317`; by default none are sent.
    pub otlp_endpoint: Option<String>,
    /// The fraction of traces to keep, from 0 to 1, among those that begin here. A client's own decision, in its
    /// `traceparent`, takes precedence.
    pub sample_ratio: f64,
    /// The filter for logs on stderr, in `tracing`'s filter syntax.
    pub log: String,
    /// How finely GPU timestamps divide the device's work.
    pub gpu_time: GpuTime,
    /// The settings that only standard `OTEL_*` environment variables have.
    #[serde(skip)]
    pub otel: OtelSettings,
}

/// How finely GPU timestamps divide the device's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum GpuTime {
    /// No timestamps are written, and device times are missing everywhere.
    Off,
    /// One interval per phase of a submission: state changes, prompts, the LM head, and all decode steps together.
    #[default]
    Phases,
    /// One interval per region: each decode step separately.
    Regions,
}

impl Default for Telemetry {
    fn default() -> Telemetry {
        Telemetry {
            otlp_endpoint: None,
            sample_ratio: 1.0,
            log: "info".to_owned(),
            gpu_time: GpuTime::default(),
            otel: OtelSettings::default(),
        }
    }
}

impl Telemetry {
    /// Returns the settings with which telemetry is started; `json` makes log lines JSON objects.
    pub fn settings(&self, json: bool) -> Settings {
        Settings {
            otlp_endpoint: self.otlp_endpoint.clone(),
            export_timeout: self.otel.timeout,
            resource: self.otel.resource.clone(),
            sample_ratio: self.sample_ratio,
            parent_based: self.otel.parent_based,
            log: self.log.clone(),
            json,
        }
    }

    /// Whether a text is an address to which spans can be exported.
    pub(super) fn is_endpoint(text: &str) -> bool {
        let rest = text.strip_prefix("http://");
        rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(char::is_whitespace))
    }

    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(endpoint) = &self.otlp_endpoint
            && !Telemetry::is_endpoint(endpoint)
        {
            let rule = "must be an http:// address such as http://127.0.0.1:4317";
            problems.push(Problem::new("telemetry.otlp_endpoint", rule, endpoint));
        }
        if !(0.0..=1.0).contains(&self.sample_ratio) {
            problems.push(Problem::new("telemetry.sample_ratio", "must be between 0 and 1", self.sample_ratio));
        }
        problems
    }
}

//! `[telemetry]`: logs and traces.

use super::load::Problem;
use serde::Deserialize;

/// Logs and traces.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Telemetry {
    /// Where spans go, OTLP over gRPC: `http://127.0.0.1:4317`. Unset: nowhere.
    pub otlp_endpoint: Option<String>,
    /// Share of traces that begin here and are kept, 0 to 1. A client's own decision, in
    /// its `traceparent`, goes first.
    pub sample_ratio: f64,
    /// What is logged to stderr, in `tracing`'s filter syntax.
    pub log: String,
    /// How much of the device's work is told apart by timestamps.
    pub gpu_time: GpuTime,
}

/// How much of the device's work is told apart by timestamps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum GpuTime {
    /// Nothing: none are written, and device times are missing everywhere.
    Off,
    /// Phases of a submission: changes, prompts, the head, all decode steps together.
    #[default]
    Phases,
    /// Each step by itself.
    Regions,
}

impl Default for Telemetry {
    fn default() -> Telemetry {
        Telemetry { otlp_endpoint: None, sample_ratio: 1.0, log: "info".to_owned(), gpu_time: GpuTime::default() }
    }
}

impl Telemetry {
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(endpoint) = &self.otlp_endpoint {
            let rest = endpoint.strip_prefix("http://");
            if rest.is_none_or(|rest| rest.is_empty() || rest.contains(char::is_whitespace)) {
                problems.push(Problem::new(
                    "telemetry.otlp_endpoint",
                    "must be an http:// address such as http://127.0.0.1:4317",
                    endpoint,
                ));
            }
        }
        if !(0.0..=1.0).contains(&self.sample_ratio) {
            problems.push(Problem::new("telemetry.sample_ratio", "must be between 0 and 1", self.sample_ratio));
        }
        problems
    }
}

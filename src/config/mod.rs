//! The configuration that an operator can write: one typed tree. Unknown keys are refused, and all problems are
//! reported at once with key, rule and value. Not here: defaults that depend on the machine.

mod admin;
mod bytes;
pub mod file;
mod http;
mod listen;
mod load;
mod models;
mod otel;
mod selector;
mod server;
mod telemetry;
mod tokens;

use serde::Deserialize;

pub use admin::AdminConfig;
pub use bytes::Bytes;
pub use http::HttpConfig;
pub use load::{ConfigError, Problem, Sources, from_sources};
pub use models::{
    DEMO_HYBRID_PATH, DEMO_PATH, Draft, KvFormat, LoadWhen, Model, ParseModelError, Placement, Quantize, SplitMode,
    embedded,
};
pub use otel::{OTEL_VARIABLES, OtelSettings};
pub use selector::{DeviceNames, Selector, SelectorError};
pub use server::{Server, TlsConfig};
pub use telemetry::{GpuTime, Telemetry};
pub use tokens::{AccessToken, Right, tokens};

/// The whole configuration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[server]`: the gRPC endpoint.
    pub server: Server,
    /// `[http]`: the HTTP endpoint of OpenAI's API.
    pub http: HttpConfig,
    /// `[admin]`: the HTTP endpoint of the admin page, the metrics and the health check.
    pub admin: AdminConfig,
    /// `[telemetry]`: logs and traces.
    pub telemetry: Telemetry,
    /// `[runtime]`: settings that apply to all devices.
    pub runtime: Runtime,
    /// `[[models]]`: the served models and their devices.
    pub models: Vec<Model>,
}

/// Settings that apply to all devices.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// The directory in which compiled pipelines are kept between starts; by default the user's cache directory.
    pub cache_directory: Option<std::path::PathBuf>,
    /// Changes to the device tuning, each `KEY=VALUE`; for experiments (`ostinato bench --tune`).
    pub tune: Vec<String>,
    /// Whether kernels may use PTX programs, which exist for NVIDIA's compute capability 9.0 only; by default the
    /// engine's choice.
    pub ptx: Option<bool>,
    /// Whether processes of this program that use one GPU take turns, a submission each.
    pub turns: bool,
    /// Whether a model with weights row after row starts only after a small model of its kind has given the right results on
    /// its device. CPU drivers are not tested.
    pub self_test: bool,
    /// Loads the Khronos validation layer (slow; for development).
    pub validation: bool,
}

impl Default for Runtime {
    fn default() -> Runtime {
        Runtime { cache_directory: None, tune: Vec::new(), ptx: None, turns: true, self_test: true, validation: false }
    }
}

impl Config {
    /// Applies OpenTelemetry's variables, and returns the problems of those that matter. `ours` tells whether
    /// `OSTINATO_*` has a key; `variable` returns the value of a variable.
    fn apply_otel(&mut self, ours: impl Fn(&str) -> bool, variable: impl Fn(&str) -> Option<String>) -> Vec<Problem> {
        otel::apply(&mut self.telemetry, ours, variable)
    }

    /// Returns the problems of the values, alone and in combination; empty if there are none.
    fn problems(&self) -> Vec<Problem> {
        let mut problems = self.server.problems();
        problems.extend(self.admin.problems(self.server.listen));
        problems.extend(self.http.problems(&self.server, self.admin.listen));
        problems.extend(self.telemetry.problems());
        problems.extend(models::problems(&self.models));
        let others = [
            ("server.listen", Some(self.server.listen)),
            ("http.listen", self.http.listen),
            ("admin.listen", self.admin.listen),
        ];
        problems.extend(models::listen_problems(&self.models, &self.server, &others));
        problems
    }
}

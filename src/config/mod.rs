//! What an operator may say: one typed tree, unknown keys refused, all problems reported at
//! once with key, rule and value. Deliberately absent: defaults that depend on the machine.

mod admin;
mod bytes;
pub mod file;
mod load;
mod models;
mod server;
mod telemetry;
mod tokens;

use serde::Deserialize;

pub use admin::Admin;
pub use bytes::Bytes;
pub use load::{ConfigError, Problem, Sources, from_sources};
pub use models::{DEMO_HYBRID_PATH, DEMO_PATH, KvFormat, LoadWhen, Model, ParseModelError, Replica, embedded};
pub use server::{Server, Tls};
pub use telemetry::{GpuTime, Telemetry};
pub use tokens::{Right, Token, tokens};

/// Everything that can be configured.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[server]`: the gRPC endpoint.
    pub server: Server,
    /// `[admin]`: the page, the metrics and the health check over HTTP.
    pub admin: Admin,
    /// `[telemetry]`: logs and traces.
    pub telemetry: Telemetry,
    /// `[runtime]`: what all devices share.
    pub runtime: Runtime,
    /// `[[models]]`: what is served, and where.
    pub models: Vec<Model>,
}

/// What all devices share.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// Where compiled pipelines are kept between starts; unset: the user's cache folder.
    pub cache_directory: Option<std::path::PathBuf>,
    /// Changes of what a device is tuned to, `KEY=VALUE`: for experiments (`ostinato bench --tune`).
    pub tune: Vec<String>,
    /// Loads the Khronos validation layer (slow; for development).
    pub validation: bool,
}

impl Config {
    /// What is wrong with the values, each on its own and together; empty if nothing is.
    fn problems(&self) -> Vec<Problem> {
        let mut problems = self.server.problems();
        problems.extend(self.admin.problems(self.server.listen));
        problems.extend(self.telemetry.problems());
        problems.extend(models::problems(&self.models));
        problems
    }
}

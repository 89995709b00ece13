//! The gRPC and HTTP edge; except for the command line and telemetry the only user of tokio. Its only policy is
//! admission and deadlines.
//!
//! `prepare` converts a message to an engine request, and `generation` converts the engine's events to a stream of
//! messages. `ostinato generate` uses both without a server.

pub mod admin;
pub mod auth;
pub mod bounds;
pub mod clients;
pub mod connections;
pub mod convert;
pub mod crowd;
pub mod deadline;
mod embed;
pub mod generation;
mod inputs;
pub mod jobs;
pub mod lifecycle;
pub mod meter;
pub mod model_endpoints;
pub mod openai;
pub mod prepare;
pub mod proto;
pub mod refusal;
pub mod rpc;
pub mod server;
pub mod tls;
pub mod vllm;
pub mod watch;
pub mod wire;

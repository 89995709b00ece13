//! gRPC and HTTP in, engine out; the only tokio. No policy beyond admission and deadlines.
//!
//! A request crosses once each way: `prepare` turns the message into an engine request,
//! `generation` turns the engine's events into the stream of messages. Both are used without
//! a server too: `ostinato generate` is the same code on both ways.

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

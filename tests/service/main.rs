//! The gRPC services and the admin pages, in front of fake devices.

#[path = "../common/mod.rs"]
mod common;
#[path = "../serving/mod.rs"]
mod serving;

mod admin;
mod embedding;
mod endpoints;
mod lifecycle;
mod metrics;
mod native;
mod openai;
mod security;
mod structured;
mod vllm;

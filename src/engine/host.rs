//! What serves a configuration: its devices, its models' replicas, and the way from a
//! request to one of them. Skeleton: bodies come with the engine.

use super::request::{Request, RequestError, Sink};
use crate::model::text::Text;
use std::sync::Arc;

/// Everything that runs: dropped, it stops bottom to top.
#[derive(Debug)]
pub struct Host {
    /// In the configuration's order.
    pub models: Vec<ServedModel>,
}

/// A model under its served name.
#[derive(Debug)]
pub struct ServedModel {
    /// The configuration's name for it.
    pub name: String,
    /// What clients may know.
    pub info: ModelInfo,
    /// Tokenizer and chat template; `None` where the checkpoint has none.
    pub text: Option<Arc<Text>>,
    /// At least one, in the configuration's order.
    pub replicas: Vec<Replica>,
}

/// What clients may know of a model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// For example `Qwen3ForCausalLM`.
    pub architecture: String,
    /// Longest context, tokens.
    pub context: u32,
    /// Vocabulary size.
    pub vocabulary: u32,
    /// End-of-sequence ids.
    pub eos_ids: Vec<u32>,
    /// Weights in device memory, bytes.
    pub weight_bytes: u64,
    /// Weight bytes a decoded token reads at batch 1 (no KV).
    pub bytes_per_token: u64,
    /// Parameters.
    pub parameters: u64,
}

/// A model on a device: an engine thread and its executor behind a bounded inbox.
#[derive(Debug)]
pub struct Replica {
    /// `NAME/INDEX`.
    pub name: String,
    /// Where it runs.
    pub device: DeviceInfo,
    handle: (),
}

/// Identity of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Index among the host's adapters.
    pub index: usize,
    /// As the driver says.
    pub name: String,
    /// Lower-case hex with dashes.
    pub uuid: String,
    /// `0000:65:00.0`, where the driver tells.
    pub pci: Option<String>,
}

/// How busy a replica is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Sequences that hold a slot.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// KV pages in use.
    pub pages_used: u32,
    /// KV pages in all.
    pub pages_total: u32,
}

/// One entry of the step ring.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// Grows by one a completed plan report.
    pub number: u64,
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Rows of the batch (decode) or tokens of the chunk (prefill).
    pub rows: u32,
    /// Steps that this record sums up.
    pub steps: u32,
    /// When it completed, since the replica's start.
    pub at: std::time::Duration,
    /// What it cost, summed over the steps.
    pub cost: super::request::PerToken,
}

/// Why a replica did not take a request.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The caller's mistake.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The queue is full.
    #[error("the queue of \"{replica}\" is full: {waiting} waiting, at most {limit}")]
    QueueFull {
        /// Which replica.
        replica: String,
        /// Requests waiting.
        waiting: usize,
        /// The bound.
        limit: usize,
    },
    /// The replica is draining or its device failed.
    #[error("\"{replica}\" takes no requests: {why}")]
    Unavailable {
        /// Which replica.
        replica: String,
        /// The reason.
        why: String,
    },
}

/// Why no replica was found for a request.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RouteError {
    /// No model of that name.
    #[error("model \"{asked}\" is not served; served are {served}")]
    UnknownModel {
        /// What was asked.
        asked: String,
        /// Comma-separated names.
        served: String,
    },
    /// The model has no replica on the asked device.
    #[error("model \"{model}\" has no replica on device \"{asked}\"; it runs on {available}")]
    UnknownDevice {
        /// The model.
        model: String,
        /// The selector as given.
        asked: String,
        /// Comma-separated replicas with their devices.
        available: String,
    },
}

impl Host {
    /// The replica for a request: the named model (empty: the only one), on the selected
    /// device or replica (empty: the least loaded).
    pub fn route(&self, model: &str, device: &str) -> Result<(&ServedModel, &Replica), RouteError> {
        let _ = (model, device);
        todo!()
    }

    /// Stops taking requests; running ones go on.
    pub fn drain(&self) {
        todo!()
    }
}

impl Replica {
    /// Queues a request; events arrive at `sink` on the engine's thread.
    pub fn submit(&self, request: Request, sink: Sink) -> Result<(), SubmitError> {
        let _ = (request, sink);
        todo!()
    }

    /// Ends a request; unknown ids are ignored. Its `Finished` says `Aborted`.
    pub fn abort(&self, id: &str) {
        let _ = id;
        todo!()
    }

    /// How busy it is now.
    pub fn load(&self) -> Load {
        todo!()
    }

    /// The last steps, oldest first, at most `last`.
    pub fn steps(&self, last: usize) -> Vec<StepRecord> {
        let _ = last;
        todo!()
    }
}

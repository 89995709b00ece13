//! All models of the process: the served models with their replicas, and the lookup from a request to a replica. The
//! list of served models changes while requests run; a caller that has found a model keeps a reference to it.
//! Not here: loading and unloading models (`lifecycle`), opening devices and loading weights (`gpu`).

mod affinity;
pub mod catalogue;
pub mod lifecycle;
pub mod progress;
pub mod route;
pub mod source;

use crate::actors::timeline::TransferRecord;
use crate::actors::transfer::TransferCounters;
use crate::host::affinity::Affinity;
use crate::host::catalogue::Catalogue;
use crate::host::source::{Fixed, ModelSource};
use crate::model::embedding::Embedding;
use crate::model::text::Text;
use crate::replica::Replica;
use crate::replica::{DeviceInfo, MemoryUse};
use crate::telemetry::requests::Requests;
use arc_swap::ArcSwap;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All models and devices of the process. Dropping it stops the models, then the devices that they run on.
#[derive(Debug)]
pub struct Host {
    /// The served models, in the configuration's order.
    models: ArcSwap<Vec<Arc<ServedModel>>>,
    /// Models that new requests no longer find, but that may still run requests.
    leaving: Mutex<Vec<Arc<ServedModel>>>,
    /// The record of requests that have ended.
    pub ended: Requests,
    /// Every model that can be loaded, with its load state.
    catalogue: Catalogue,
    // Field order matters: the devices must be dropped after the models that run on them.
    source: Box<dyn ModelSource>,
}

/// A model that is served under a name.
#[derive(Debug)]
pub struct ServedModel {
    /// The model's name in the configuration.
    pub name: String,
    /// The properties that clients may see.
    pub info: ModelInfo,
    /// The tokenizer and chat template; `None` if the checkpoint has none.
    pub text: Option<Arc<Text>>,
    /// The model's replicas, at least one, in the configuration's order.
    pub replicas: Vec<Arc<Replica>>,
    /// The prompts that each replica received. Locked while a prompt is routed.
    affinity: Mutex<Affinity>,
}

/// The properties of a model that clients may see.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The name of the architecture, for example `Qwen3ForCausalLM`.
    pub architecture: String,
    /// The maximum context in tokens.
    pub context: u32,
    /// The size of the vocabulary.
    pub vocabulary: u32,
    /// The end-of-sequence token ids.
    pub eos_ids: Vec<u32>,
    /// The size of the weights in device memory, in bytes.
    pub weight_bytes: u64,
    /// The weight bytes that decoding one token at batch size 1 reads, without the KV cache.
    pub bytes_per_token: u64,
    /// The number of parameters.
    pub parameters: u64,
    /// The number of parameters that one token uses: of the experts, only the selected ones count.
    pub active_parameters: u64,
    /// How it makes vectors of texts.
    pub embedding: Embedding,
}

/// An open device, on which replicas run or have run.
#[derive(Clone, Debug)]
pub struct ServedDevice {
    /// The device's identity.
    pub info: DeviceInfo,
    /// The memory plans of the replicas on the device.
    pub memory: Vec<MemoryUse>,
    /// The live state of the device; `None` for a fake.
    pub status: Option<Arc<dyn DeviceStatus>>,
}

/// How models are computed on a device, and what it lacks: the beginning of the report of `ostinato check-device`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// The driver's name and version.
    pub driver: String,
    /// The path of its kernels, in words, for models whose tuning chooses no other.
    pub path: String,
    /// The features that it lacks, each with the consequence.
    pub lacks: Vec<(String, &'static str)>,
}

/// The live state of an open device. Implemented by `gpu`.
pub trait DeviceStatus: Any + fmt::Debug + Send + Sync {
    /// Returns the size and usage of the device's memory, as the driver reports them now.
    fn memory(&self) -> DeviceMemory;
    /// Returns how models are computed on the device, and what it lacks.
    fn report(&self) -> DeviceReport;
    /// Returns the size in bytes of all buffers of this process on the device.
    fn buffer_bytes(&self) -> u64;
    /// Returns the counters of the device's transfer queue.
    fn transfer_counters(&self) -> TransferCounters;
    /// Returns the completed submissions to the transfer queue from number `number` on, oldest first, as far as they
    /// are still recorded.
    fn transfers(&self, number: u64) -> Vec<TransferRecord>;
    /// Treats the device as lost, as if the driver had reported it: its replicas are rebuilt. For tests and drills.
    fn declare_lost(&self, why: &str);
    /// Returns whether the device is lost.
    fn is_lost(&self) -> bool;
}

/// The memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The size of the largest device-local heap.
    pub heap_bytes: u64,
    /// The budget and usage of this process; `None` if the driver does not report them (`VK_EXT_memory_budget`).
    pub budget: Option<MemoryShare>,
}

/// The part of a device's memory that belongs to this process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryShare {
    /// The bytes that this process may use in total.
    pub budget_bytes: u64,
    /// The bytes that this process uses.
    pub used_bytes: u64,
}

impl ServedDevice {
    /// Returns the completed submissions to the transfer queue from number `number` on, oldest first; empty for a fake.
    pub fn transfers(&self, number: u64) -> Vec<TransferRecord> {
        self.status.as_ref().map(|status| status.transfers(number)).unwrap_or_default()
    }
}

impl Host {
    /// Creates a host of running replicas, with the devices that they name. For fakes, whose devices have no live
    /// state. No other model can be loaded.
    pub fn new(models: Vec<ServedModel>) -> Host {
        let mut devices: Vec<ServedDevice> = Vec::new();
        let replicas = models.iter().flat_map(|model| &model.replicas);
        for info in replicas.flat_map(|replica| replica.devices()) {
            if devices.iter().all(|device| device.info != *info) {
                devices.push(ServedDevice { info: info.clone(), memory: Vec::new(), status: None });
            }
        }
        let host = Host::empty(Catalogue::default(), Box::new(Fixed(devices)));
        host.models.store(Arc::new(models.into_iter().map(Arc::new).collect()));
        host
    }

    /// Creates a host without served models. The models of the catalogue can be loaded from the source.
    fn empty(catalogue: Catalogue, source: Box<dyn ModelSource>) -> Host {
        Host { models: ArcSwap::default(), leaving: Mutex::default(), ended: Requests::default(), catalogue, source }
    }

    /// Returns the models that are served now, in the configuration's order.
    pub fn models(&self) -> Arc<Vec<Arc<ServedModel>>> {
        self.models.load_full()
    }

    /// Returns the served models, followed by those that are removed as soon as nothing runs on them.
    pub fn models_and_leaving(&self) -> Vec<Arc<ServedModel>> {
        let models = self.models();
        models.iter().chain(&*self.leaving()).map(Arc::clone).collect()
    }

    /// Replaces the list of served models. The caller must hold the catalogue's lock, so that only one thread changes
    /// the list at a time.
    fn set_models(&self, models: Vec<Arc<ServedModel>>) {
        self.models.store(Arc::new(models));
    }

    fn leaving(&self) -> MutexGuard<'_, Vec<Arc<ServedModel>>> {
        // Every change of the list is a single operation, so a panic leaves it valid.
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the open devices, ordered by index, with the memory plans of their replicas.
    pub fn devices(&self) -> Vec<ServedDevice> {
        let mut devices = self.source.devices();
        for model in self.models_and_leaving() {
            for replica in &model.replicas {
                for device in &mut devices {
                    device.memory.extend_from_slice(replica.memory_on(&device.info));
                }
            }
        }
        devices
    }

    /// Stops accepting requests and cancels loads in progress. Requests accepted before continue.
    pub fn drain(&self) {
        self.stop_loading();
        for replica in self.replicas() {
            replica.drain();
        }
    }

    /// Whether a replica takes requests, or no model is loaded and one can be. It is false while all replicas are draining
    /// or have failed.
    pub fn is_serving(&self) -> bool {
        self.replicas().any(|replica| replica.closed().is_none()) || self.is_idle()
    }

    /// Whether no model is loaded and one can be.
    pub fn is_idle(&self) -> bool {
        self.models().is_empty() && self.can_load()
    }

    /// Returns the number of accepted requests that have not ended. It reaches 0 some time after `drain`.
    pub fn unfinished(&self) -> usize {
        self.replicas().map(|replica| replica.unfinished()).sum()
    }

    /// Returns all replicas, model by model; those of models that are being removed come last.
    pub fn replicas(&self) -> impl Iterator<Item = Arc<Replica>> + use<> {
        self.models_and_leaving().into_iter().flat_map(|served| served.replicas.clone())
    }
}

impl ServedModel {
    /// Whether tokens can be drawn; otherwise the model gives embeddings only.
    pub fn draws(&self) -> bool {
        self.replicas.iter().all(|replica| replica.bounds().draws)
    }

    /// Creates a served model with the given replicas, at least one.
    pub fn new(name: String, info: ModelInfo, text: Option<Arc<Text>>, replicas: Vec<Replica>) -> ServedModel {
        let replicas = replicas.into_iter().map(Arc::new).collect();
        ServedModel { name, info, text, replicas, affinity: Mutex::default() }
    }

    fn affinity(&self) -> MutexGuard<'_, Affinity> {
        // A panic leaves the table usable: it only records past choices, and an incomplete record does no harm.
        self.affinity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

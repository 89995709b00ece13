//! What serves a configuration: the models that are loaded, their replicas, and the way from a request to one of
//! them. Which models there are changes while requests run; whoever has found one keeps it.
//! Deliberately absent: how models come and go (`lifecycle`), opening devices and loading weights (`devices`).

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
use crate::model::text::Text;
use crate::replica::Replica;
use crate::replica::{DeviceInfo, MemoryUse};
use crate::telemetry::requests::Requests;
use arc_swap::ArcSwap;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Everything that runs: dropped, it stops bottom to top.
#[derive(Debug)]
pub struct Host {
    /// In the configuration's order.
    models: ArcSwap<Vec<Arc<ServedModel>>>,
    /// Models that no request finds any more and some still run on.
    leaving: Mutex<Vec<Arc<ServedModel>>>,
    /// Requests that have ended.
    pub ended: Requests,
    /// Every model that may be loaded, and what is being done with it.
    catalogue: Catalogue,
    // Order matters: the devices go after what runs on them.
    source: Box<dyn ModelSource>,
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
    pub replicas: Vec<Arc<Replica>>,
    /// Which replica was given what. Held while one prompt is routed.
    affinity: Mutex<Affinity>,
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
    /// Of them those that one token goes through: of experts the chosen ones.
    pub active_parameters: u64,
}

/// A device that is open: replicas run on it, or have run on it.
#[derive(Clone, Debug)]
pub struct ServedDevice {
    /// Its identity.
    pub info: DeviceInfo,
    /// The memory plans of the replicas on it.
    pub memory: Vec<MemoryUse>,
    /// Its state while it is open; `None` for a fake.
    pub status: Option<Arc<dyn DeviceStatus>>,
}

/// What an open device says about itself. `gpu` implements it.
pub trait DeviceStatus: Any + fmt::Debug + Send + Sync {
    /// Size and use of its memory, as the driver reports them now.
    fn memory(&self) -> DeviceMemory;
    /// Bytes of the buffers that this process has on it.
    fn buffer_bytes(&self) -> u64;
    /// Counters of its transfer queue.
    fn transfer_counters(&self) -> TransferCounters;
    /// The finished submissions to its transfer queue from `number` on, oldest first, as far as they are kept.
    fn transfers(&self, number: u64) -> Vec<TransferRecord>;
    /// Treats the device as lost, as if its driver had said so: its replicas are built anew. For tests and drills.
    fn declare_lost(&self, why: &str);
    /// Whether the device is lost.
    fn is_lost(&self) -> bool;
}

/// Memory of a device, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Its largest device-local heap.
    pub heap_bytes: u64,
    /// What this process may use in all and what it uses; `None` where the driver does not report it
    /// (`VK_EXT_memory_budget`).
    pub budget: Option<MemoryShare>,
}

/// This process's share of a device's memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryShare {
    /// What it may use in all.
    pub budget_bytes: u64,
    /// What it uses.
    pub used_bytes: u64,
}

impl ServedDevice {
    /// The finished submissions to its transfer queue from `number` on, oldest first; none of a fake.
    pub fn transfers(&self, number: u64) -> Vec<TransferRecord> {
        self.status.as_ref().map(|status| status.transfers(number)).unwrap_or_default()
    }
}

impl Host {
    /// Of replicas that run, on the devices that they name: for fakes, of which no more is known. No further model can
    /// be loaded.
    pub fn new(models: Vec<ServedModel>) -> Host {
        let mut devices: Vec<ServedDevice> = Vec::new();
        for replica in models.iter().flat_map(|model| &model.replicas) {
            if devices.iter().all(|device| device.info != replica.device) {
                let info = replica.device.clone();
                let memory = Vec::new();
                devices.push(ServedDevice { info, memory, status: None });
            }
        }
        let host = Host::empty(Catalogue::default(), Box::new(Fixed(devices)));
        host.models.store(Arc::new(models.into_iter().map(Arc::new).collect()));
        host
    }

    /// Without any model yet: those of the catalogue can be loaded from the source.
    fn empty(catalogue: Catalogue, source: Box<dyn ModelSource>) -> Host {
        Host { models: ArcSwap::default(), leaving: Mutex::default(), ended: Requests::default(), catalogue, source }
    }

    /// The models that are served now, in the configuration's order.
    pub fn models(&self) -> Arc<Vec<Arc<ServedModel>>> {
        self.models.load_full()
    }

    /// Those and the ones that go as soon as nothing runs on them any more.
    pub fn models_and_leaving(&self) -> Vec<Arc<ServedModel>> {
        let models = self.models();
        models.iter().chain(&*self.leaving()).map(Arc::clone).collect()
    }

    /// Serves another list of models. Only one at a time may change it: whoever holds the catalogue.
    fn set_models(&self, models: Vec<Arc<ServedModel>>) {
        self.models.store(Arc::new(models));
    }

    fn leaving(&self) -> MutexGuard<'_, Vec<Arc<ServedModel>>> {
        // Each change of it is whole.
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The devices that are open, by index.
    pub fn devices(&self) -> Vec<ServedDevice> {
        let mut devices = self.source.devices();
        for model in self.models_and_leaving() {
            for replica in &model.replicas {
                let device = devices.iter_mut().find(|device| device.info == replica.device);
                device.into_iter().for_each(|device| device.memory.extend(replica.memory.iter().cloned()));
            }
        }
        devices
    }

    /// Stops taking requests, also on models that are being loaded; those taken go on.
    pub fn drain(&self) {
        self.stop_loading();
        for replica in self.replicas() {
            replica.drain();
        }
    }

    /// Requests taken and not finished: 0 some time after `drain`.
    pub fn unfinished(&self) -> usize {
        self.replicas().map(|replica| replica.unfinished()).sum()
    }

    /// All replicas, model after model, those last that no request finds any more.
    pub fn replicas(&self) -> impl Iterator<Item = Arc<Replica>> + use<> {
        self.models_and_leaving().into_iter().flat_map(|served| served.replicas.clone())
    }
}

impl ServedModel {
    /// Of its replicas, at least one.
    pub fn new(name: String, info: ModelInfo, text: Option<Arc<Text>>, replicas: Vec<Replica>) -> ServedModel {
        let replicas = replicas.into_iter().map(Arc::new).collect();
        ServedModel { name, info, text, replicas, affinity: Mutex::default() }
    }

    fn affinity(&self) -> MutexGuard<'_, Affinity> {
        // Whatever a panic left of it: it is a memory of what was chosen, and nothing is wrong that it says.
        self.affinity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

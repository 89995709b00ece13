//! What serves a configuration: the models that are loaded, their replicas, and the way from a request to one of
//! them. Which models there are changes while requests run; whoever has found one keeps it.
//! Deliberately absent: how models come and go (`lifecycle`), opening devices and loading weights (`stations`).

use super::affinity::{Affinity, Candidate};
use super::lifecycle::{Catalogue, Fixed, Source, State};
use super::prefix::PageKey;
pub use super::replica::Replica;
use super::request::RequestError;
use crate::actors::compute::Compute;
use crate::actors::timeline::{SubmissionRecord, TransferRecord};
use crate::actors::transfer::Transfer;
use crate::device::Device;
use crate::memory::Arena;
use crate::memory::plan::{Purpose, Side};
use crate::model::text::Text;
use crate::telemetry::clock::Moment;
use crate::telemetry::requests::Requests;
use arc_swap::ArcSwap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
    pub(super) catalogue: Catalogue,
    // Order matters: the devices go after what runs on them.
    pub(super) source: Box<dyn Source>,
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
    /// Free pages that a prompt may still find.
    pub pages_cached: u32,
    /// Tokens of the prompts that have started.
    pub prompt_tokens: u64,
    /// Of them found in pages.
    pub cached_tokens: u64,
    /// Sequences that lost their pages to others.
    pub preemptions: u64,
    /// Tokens that were drafted and verified.
    pub drafted_tokens: u64,
    /// Of them those that were right.
    pub accepted_tokens: u64,
    /// Snapshots of recurrent state that a prompt may find.
    pub snapshots: u32,
}

/// One entry of the step ring: a plan, from its making to its last token.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// Grows by one a finished plan.
    pub number: u64,
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Rows of the batch (decode) or tokens of the chunk (prefill).
    pub rows: u32,
    /// Steps that this record sums up.
    pub steps: u32,
    /// When it completed, since the replica's start.
    pub at: Duration,
    /// What it cost, summed over the steps.
    pub cost: super::request::PerToken,
    /// Tokens that it drew.
    pub tokens: u32,
    /// When the engine had made the plan.
    pub planned: Moment,
    /// When the engine had taken in its last report.
    pub taken: Moment,
    /// The requests that had rows in it and had not ended when it was finished, by id.
    pub requests: Vec<Arc<str>>,
    /// What it took on the compute queue, in order.
    pub submissions: Vec<SubmissionRecord>,
    /// As of its end: sequences that hold a slot, and those in the queue.
    pub running: u32,
    /// As `running` says.
    pub waiting: u32,
    /// As of its end: KV pages in use.
    pub pages_used: u32,
    /// How often a fault kept some of its steps from drawing, so that they were run again.
    pub faults: u32,
}

/// A device that is open: something is or was served on it.
#[derive(Clone, Debug)]
pub struct ServedDevice {
    /// Which.
    pub info: DeviceInfo,
    /// What its memory was planned for, by the replicas that are on it.
    pub memory: Vec<MemoryUse>,
    /// Its submissions to the transfer queue; `None`: it has no such queue (a fake).
    pub transfer: Option<Arc<Transfer>>,
    /// What submits to its compute queue; `None`: it is a fake.
    pub compute: Option<Arc<Compute>>,
    /// The device itself; `None`: it is a fake.
    pub device: Option<Arc<Device>>,
    /// Where its buffers come from; `None`: it is a fake.
    pub arena: Option<Arena>,
}

impl ServedDevice {
    /// Its last submissions to the transfer queue that have ended, from `number` on, oldest first.
    pub fn transfers(&self, number: u64) -> Vec<TransferRecord> {
        self.transfer.as_ref().map(|transfer| transfer.records(number)).unwrap_or_default()
    }
}

/// A line of a memory plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Whose: `MODEL/INDEX`.
    pub replica: String,
    /// What for.
    pub purpose: Purpose,
    /// Bytes.
    pub bytes: u64,
    /// In the device's own memory, or the host's.
    pub side: Side,
}

/// A request that is not finished, as the scheduler sees one sample of it.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestView {
    /// The request's id; samples after the first have a mark and their index behind it.
    pub id: String,
    /// `waiting`, `prefill`, `decode` or `leaving`.
    pub phase: &'static str,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Of the history that this stay on the device computes or found: tokens queued so far.
    pub prefilled_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Output tokens reported.
    pub output_tokens: u32,
    /// Most output tokens.
    pub max_tokens: u32,
    /// KV pages held.
    pub pages: u32,
    /// How often it lost its pages.
    pub preemptions: u32,
    /// Submission until now.
    pub age: Duration,
    /// Submission to its first chunk; until now for one that waits.
    pub queued: Duration,
    /// Submission to its first token.
    pub first_token: Option<Duration>,
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
    /// The queue has room, but not for all samples of a request: none is taken.
    #[error("\"{replica}\" has no room for {asked} samples: {unfinished} unfinished, at most {limit}")]
    NoRoom {
        /// Which replica.
        replica: String,
        /// Samples asked for.
        asked: usize,
        /// Requests that run or wait.
        unfinished: usize,
        /// The bound: its slots and its queue.
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
    /// The configuration names the model, and it is not served now.
    #[error("model \"{asked}\" is not served: {state}; served are {served}")]
    NotLoaded {
        /// What was asked.
        asked: String,
        /// What is the matter with it.
        state: State,
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
    /// Of replicas that run, on the devices that they name: for fakes, of which no more is known. No further model can
    /// be loaded.
    pub fn new(models: Vec<ServedModel>) -> Host {
        let mut devices: Vec<ServedDevice> = Vec::new();
        for replica in models.iter().flat_map(|model| &model.replicas) {
            if devices.iter().all(|device| device.info != replica.device) {
                let info = replica.device.clone();
                let memory = Vec::new();
                devices.push(ServedDevice { info, memory, transfer: None, compute: None, device: None, arena: None });
            }
        }
        let host = Host::empty(Catalogue::default(), Box::new(Fixed(devices)));
        host.models.store(Arc::new(models.into_iter().map(Arc::new).collect()));
        host
    }

    /// Without any model yet: those of the catalogue can be loaded from the source.
    pub(super) fn empty(catalogue: Catalogue, source: Box<dyn Source>) -> Host {
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
    pub(super) fn set_models(&self, models: Vec<Arc<ServedModel>>) {
        self.models.store(Arc::new(models));
    }

    pub(super) fn leaving(&self) -> MutexGuard<'_, Vec<Arc<ServedModel>>> {
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

    /// The replica for a request: the named model (empty: the only one), on the selected
    /// device or replica (empty: the least loaded).
    ///
    /// `device` is a replica's name, or a device's UUID, PCI address, index, or part of its
    /// name. Of several that fit it is the least loaded, of those that take requests if any do.
    pub fn route(&self, model: &str, device: &str) -> Result<(Arc<ServedModel>, Arc<Replica>), RouteError> {
        let served = self.find(model)?;
        let replica = served.fitting(device)?.into_iter().min_by_key(|&replica| {
            let replica = &served.replicas[replica];
            let load = replica.load();
            let pages_per_mille = load.pages_used as u64 * 1000 / u64::from(load.pages_total.max(1));
            (replica.closed().is_some(), load.running + load.waiting, pages_per_mille)
        });
        let replica = Arc::clone(&served.replicas[replica.expect("at least one fits")]);
        Ok((served, replica))
    }

    /// The replica for `samples` requests of a prompt whose full pages have the names `keys`: as [`Host::route`], but
    /// rather one that was given the prompt's beginning before, unless it is too busy ([`Affinity`] says when), and
    /// one that has room for them rather than one that has not.
    pub fn route_prompt(
        &self,
        model: &str,
        device: &str,
        keys: &[PageKey],
        samples: usize,
    ) -> Result<(Arc<ServedModel>, Arc<Replica>), RouteError> {
        let served = self.find(model)?;
        let fitting = served.fitting(device)?;
        if let [only] = served.replicas.as_slice() {
            let only = Arc::clone(only);
            return Ok((served, only));
        }
        let candidate = |replica: usize| {
            let asked = &served.replicas[replica];
            let load = asked.load();
            Candidate {
                replica,
                ready: asked.room() >= samples,
                unfinished: asked.unfinished() as u32,
                slots: asked.slots() as u32,
                pages_tenths: (u64::from(load.pages_used) * 10 / u64::from(load.pages_total.max(1))) as u32,
            }
        };
        let candidates: Vec<Candidate> = fitting.into_iter().map(candidate).collect();
        let chosen = served.affinity().choose(&candidates, keys).expect("at least one fits");
        let replica = Arc::clone(&served.replicas[chosen]);
        Ok((served, replica))
    }

    /// The named model, or the only one.
    fn find(&self, model: &str) -> Result<Arc<ServedModel>, RouteError> {
        let models = self.models();
        let found = match models.as_slice() {
            [only] if model.is_empty() => Some(only),
            models => models.iter().find(|served| served.name == model),
        };
        if let Some(found) = found {
            return Ok(Arc::clone(found));
        }
        let asked = model.to_string();
        let names: Vec<&str> = models.iter().map(|served| served.name.as_str()).collect();
        let served = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        Err(match self.state(model) {
            // Between the two looks it may have come.
            Some(state) => RouteError::NotLoaded { asked, state, served },
            None => RouteError::UnknownModel { asked, served },
        })
    }

    /// Forgets which replica of the model was given which prompts: they have forgotten them too.
    pub fn forget_prompts(&self, model: &str) {
        if let Ok(model) = self.find(model) {
            *model.affinity() = Affinity::default();
        }
    }

    /// Stops taking requests, also on models that are being loaded; those taken go on.
    pub fn drain(&self) {
        self.close();
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

    /// The replicas that a selector means, at least one.
    fn fitting(&self, device: &str) -> Result<Vec<usize>, RouteError> {
        let fitting = fitting(&self.replicas, device);
        if !fitting.is_empty() {
            return Ok(fitting);
        }
        let place =
            |replica: &Arc<Replica>| format!("{} (\"{}\", {})", replica.name, replica.device.name, replica.device.uuid);
        Err(RouteError::UnknownDevice {
            model: self.name.clone(),
            asked: device.to_string(),
            available: self.replicas.iter().map(place).collect::<Vec<_>>().join(", "),
        })
    }
}

/// The replicas that a selector means. The exact ways of naming go before part of a name, and
/// a number is an index and nothing else: "3" must not find an "RTX 3060".
fn fitting(replicas: &[Arc<Replica>], selector: &str) -> Vec<usize> {
    let find = |fits: &dyn Fn(&Replica) -> bool| -> Vec<usize> {
        replicas.iter().enumerate().filter(|(_, replica)| fits(replica)).map(|(index, _)| index).collect()
    };
    if selector.is_empty() {
        return find(&|_| true);
    }
    if let Ok(index) = selector.parse::<usize>() {
        return find(&|replica| replica.device.index == index);
    }
    let exact = find(&|replica| {
        let pci = replica.device.pci.as_deref().unwrap_or_default();
        replica.name == selector
            || replica.device.uuid.eq_ignore_ascii_case(selector)
            || pci.eq_ignore_ascii_case(selector)
    });
    if !exact.is_empty() {
        return exact;
    }
    let part = selector.to_lowercase();
    find(&|replica| replica.device.name.to_lowercase().contains(&part))
}

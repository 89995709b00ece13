//! The catalogue: every model of the configuration, with its load state and the load or unload in progress.

use crate::config::{self};
use crate::host::lifecycle::LifecycleError;
use crate::host::progress::Unit;
use crate::host::{Host, ServedModel};
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The load state of a model of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadState {
    /// The model is not loaded and can be loaded.
    Unloaded,
    /// The model is being loaded. A model that still serves while its replacement is loaded is reported as
    /// [`LoadState::Serving`] by [`Host::state`].
    Loading,
    /// The model accepts requests.
    Serving,
    /// The model is being unloaded: it accepts no new requests, and some requests may still run.
    Unloading,
}

impl fmt::Display for LoadState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LoadState::Unloaded => "it is not loaded",
            LoadState::Loading => "it is being loaded",
            LoadState::Serving => "it is served",
            LoadState::Unloading => "it is being unloaded",
        })
    }
}

/// The progress of a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The current activity.
    pub what: String,
    /// The number of completed units.
    pub done: u64,
    /// The total number of units.
    pub total: u64,
    /// The unit.
    pub unit: Unit,
}

/// A model of the configuration with its current state.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The model's name.
    pub name: String,
    /// The load state.
    pub state: LoadState,
    /// The served model, also while a replacement is being loaded.
    pub served: Option<Arc<ServedModel>>,
    /// The progress of the load, if one is in progress.
    pub step: Option<Step>,
}

/// Every model that can be loaded, in the configuration's order, with the load or unload in progress.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    pub(super) state: Mutex<Models>,
    /// Notified whenever a load or unload ends.
    pub(super) done: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Models {
    pub(super) entries: Vec<Entry>,
    /// The maximum number of requests that wait for each replica.
    pub(super) queue_limit: usize,
    /// Whether the host is stopping; no model is loaded any more.
    pub(super) closed: bool,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) model: config::Model,
    /// The configuration from which the served model was built; `None` if the model is not served.
    pub(super) served_as: Option<config::Model>,
    pub(super) work: Option<ModelWork>,
    /// Whether the model was unloaded by [`Host::unload`]. A new configuration with the same entry does not load it
    /// again.
    pub(super) unloaded: bool,
    /// Whether the model is no longer in the configuration. It cannot be loaded any more, and the entry is removed when
    /// the served model has been unloaded.
    pub(super) removed: bool,
}

#[derive(Debug)]
pub(super) enum ModelWork {
    Loading { step: Option<Step>, cancelled: Arc<AtomicBool> },
    Unloading,
}

impl ModelWork {
    pub(super) fn state(&self) -> LoadState {
        match self {
            ModelWork::Loading { .. } => LoadState::Loading,
            ModelWork::Unloading => LoadState::Unloading,
        }
    }
}

impl Entry {
    pub(super) fn new(model: &config::Model) -> Entry {
        Entry { model: model.clone(), served_as: None, work: None, unloaded: false, removed: false }
    }

    /// Returns whether the served model was built from the current configuration.
    pub(super) fn is_current(&self) -> bool {
        self.served_as.as_ref().is_some_and(|served| builds_the_same(served, &self.model))
    }
}

/// Returns whether two configurations result in the same model: they are equal except for the time at which the model
/// is loaded (`load`) and the address of its own endpoint (`listen`).
pub(super) fn builds_the_same(a: &config::Model, b: &config::Model) -> bool {
    config::Model { load: a.load, listen: a.listen, ..b.clone() } == *a
}

impl Catalogue {
    pub(super) fn new(models: &[config::Model], queue_limit: usize) -> Catalogue {
        let entries = models.iter().map(Entry::new).collect();
        let state = Mutex::new(Models { entries, queue_limit, closed: false });
        Catalogue { state, done: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Models> {
        // Every change of the catalogue leaves it valid, so a panic of another thread does no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Models {
    /// Returns the entry with this name, even if it is being removed.
    pub(super) fn entry(&mut self, name: &str) -> Result<&mut Entry, LifecycleError> {
        match self.entries.iter().position(|entry| entry.model.name == name) {
            Some(index) => Ok(&mut self.entries[index]),
            None => Err(self.not_configured(name)),
        }
    }

    /// Returns the entry with this name if the configuration contains it.
    pub(super) fn configured(&mut self, name: &str) -> Result<&mut Entry, LifecycleError> {
        match self.entries.iter().position(|entry| entry.model.name == name && !entry.removed) {
            Some(index) => Ok(&mut self.entries[index]),
            None => Err(self.not_configured(name)),
        }
    }

    pub(super) fn not_configured(&self, asked: &str) -> LifecycleError {
        let names = self.entries.iter().filter(|entry| !entry.removed).map(|entry| entry.model.name.as_str());
        let names: Vec<&str> = names.collect();
        let configured = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        LifecycleError::NotConfigured { asked: asked.to_owned(), configured }
    }
}

impl Host {
    /// Returns the load state of a model; `None` if no model has this name.
    pub fn state(&self, name: &str) -> Option<LoadState> {
        self.listed().into_iter().find(|listed| listed.name == name).map(|listed| listed.state)
    }

    /// Returns every model of the configuration, in order. For a host that was created with its models, returns those.
    pub fn listed(&self) -> Vec<Listed> {
        let catalogue = self.catalogue.lock();
        let models = self.models();
        let find = |name: &str| models.iter().find(|served| served.name == name).map(Arc::clone);
        let known = |name: &str| catalogue.entries.iter().any(|entry| entry.model.name == name && !entry.removed);
        let of_entry = |entry: &Entry| {
            let served = find(&entry.model.name);
            let state = match (&entry.work, &served) {
                (_, Some(_)) => LoadState::Serving,
                (Some(work), None) => work.state(),
                (None, None) => LoadState::Unloaded,
            };
            let step = match &entry.work {
                Some(ModelWork::Loading { step, .. }) => step.clone(),
                _ => None,
            };
            Listed { name: entry.model.name.clone(), state, served, step }
        };
        // A model that was removed from the configuration is listed while it is served, loaded or unloaded.
        let there = |listed: &Listed| listed.state != LoadState::Unloaded || known(&listed.name);
        let configured = catalogue.entries.iter().map(of_entry).filter(there);
        let unknown =
            |served: &&Arc<ServedModel>| catalogue.entries.iter().all(|entry| entry.model.name != served.name);
        let others = models.iter().filter(unknown).map(|served| Listed {
            name: served.name.clone(),
            state: LoadState::Serving,
            served: Some(Arc::clone(served)),
            step: None,
        });
        configured.chain(others).collect()
    }

    /// Returns whether a model can be loaded: the host is not stopping and the configuration contains a model.
    pub fn can_load(&self) -> bool {
        let catalogue = self.catalogue.lock();
        !catalogue.closed && catalogue.entries.iter().any(|entry| !entry.removed)
    }
}

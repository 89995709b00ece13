//! The catalogue: every model of the configuration, its load state, and what is being done with it.

use crate::config::{self};
use crate::host::lifecycle::LifecycleError;
use crate::host::progress::Unit;
use crate::host::{Host, ServedModel};
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What is the matter with a model of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadState {
    /// It can be loaded.
    Unloaded,
    /// It is being loaded; one that is being replaced serves meanwhile.
    Loading,
    /// Requests reach it.
    Serving,
    /// No new request reaches it, and some still run.
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

/// How far a load is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What is done.
    pub what: String,
    /// So much of it.
    pub done: u64,
    /// Of so much.
    pub total: u64,
    /// What is counted.
    pub unit: Unit,
}

/// A model of the configuration, as it stands.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// What is the matter with it.
    pub state: LoadState,
    /// What serves it, also while it is being replaced.
    pub served: Option<Arc<ServedModel>>,
    /// Of a load that goes on.
    pub step: Option<Step>,
}

/// Every model that may be loaded, in the configuration's order, and what is being done with it.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    pub(super) state: Mutex<Models>,
    /// Whenever something has been done.
    pub(super) done: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Models {
    pub(super) entries: Vec<Entry>,
    /// Requests that may wait for each replica.
    pub(super) queue_limit: usize,
    /// Nothing is loaded any more.
    pub(super) closed: bool,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) model: config::Model,
    /// As what is served was configured.
    pub(super) served_as: Option<config::Model>,
    pub(super) work: Option<ModelWork>,
    /// Somebody unloaded it: a new configuration that says the same of it does not load it.
    pub(super) unloaded: bool,
    /// The configuration does not have it any more. Nothing is loaded under its name, and the entry goes when what is
    /// served has left.
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

    /// Whether what is served is what is configured.
    pub(super) fn is_current(&self) -> bool {
        self.served_as.as_ref().is_some_and(|served| builds_the_same(served, &self.model))
    }
}

/// When a model is loaded makes no difference to it.
pub(super) fn builds_the_same(a: &config::Model, b: &config::Model) -> bool {
    config::Model { load: a.load, ..b.clone() } == *a
}

impl Catalogue {
    pub(super) fn new(models: &[config::Model], queue_limit: usize) -> Catalogue {
        let entries = models.iter().map(Entry::new).collect();
        let state = Mutex::new(Models { entries, queue_limit, closed: false });
        Catalogue { state, done: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Models> {
        // Each change of it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Models {
    /// The entry of that name, be it one that goes.
    pub(super) fn entry(&mut self, name: &str) -> Result<&mut Entry, LifecycleError> {
        match self.entries.iter().position(|entry| entry.model.name == name) {
            Some(index) => Ok(&mut self.entries[index]),
            None => Err(self.not_configured(name)),
        }
    }

    /// The entry of that name, of those that the configuration has.
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
    /// What is the matter with a model of the configuration; `None`: there is none of that name.
    pub fn state(&self, name: &str) -> Option<LoadState> {
        self.listed().into_iter().find(|listed| listed.name == name).map(|listed| listed.state)
    }

    /// Every model of the configuration, in its order; of a host whose models were handed to it those.
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
        // One that the configuration does not have any more is shown for as long as there is something of it.
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

    /// Whether a model could be loaded that is not served, or is being loaded.
    pub fn can_load(&self) -> bool {
        let catalogue = self.catalogue.lock();
        !catalogue.closed && catalogue.entries.iter().any(|entry| !entry.removed)
    }
}

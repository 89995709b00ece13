//! Loads, replaces and unloads models while others serve, and applies changes of the configuration. Only models of the
//! configuration can be loaded, by name. The work runs on the callers' threads.
//! Not here: building a model (see [`ModelSource`]), gRPC, signals.
//!
//! A caller that has found a model keeps a reference to it. A model that is unloaded is first removed from the list, so
//! that new requests do not find it. Its running requests continue, and its memory is released when they have ended or
//! their grace period is over.

use crate::config::{self, LoadWhen};
use crate::host::catalogue::{Catalogue, Entry, LoadState, ModelWork, Models, Step, builds_the_same};
use crate::host::progress::{Progress, Unit};
use crate::host::source::{BuildError, LoadAttempt, ModelSource};
use crate::host::{Host, ServedModel};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The interval at which a model that is being unloaded is checked for running requests.
const IDLE_LOOK: Duration = Duration::from_millis(5);
/// The time for which an idle model that is being unloaded waits for callers that found it but have not submitted their
/// request yet: longer than any prompt takes to be encoded.
const LINGER: Duration = Duration::from_secs(2);

/// How to load a model that is already served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replace {
    /// Load the new model beside the old one, which serves until the load is complete.
    #[default]
    Beside,
    /// Unload the old model first, so that the new one can use its memory. The model is not served during the load, nor
    /// after a failed load.
    UnloadFirst,
}

/// The reason for which a model was not loaded or unloaded.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    /// The configuration contains no such model.
    #[error("model \"{asked}\" is not configured; configured are {configured}")]
    NotConfigured {
        /// The requested name.
        asked: String,
        /// The names of the configured models, separated by commas.
        configured: String,
    },
    /// The model is already being loaded or unloaded.
    #[error("model \"{model}\" is busy: {state}")]
    Busy {
        /// The model's name.
        model: String,
        /// The state that the model is in.
        state: LoadState,
    },
    /// The model is not served.
    #[error("model \"{model}\" cannot be unloaded: {state}")]
    NotServed {
        /// The model's name.
        model: String,
        /// The model's load state.
        state: LoadState,
    },
    /// The server is stopping.
    #[error("model \"{model}\" is not loaded: the server is stopping")]
    Stopping {
        /// The model's name.
        model: String,
    },
    /// The load failed.
    #[error("model \"{model}\" could not be loaded")]
    Load {
        /// The model's name.
        model: String,
        /// The cause.
        #[source]
        source: Box<BuildError>,
    },
}

/// A model that was loaded.
#[derive(Debug)]
#[must_use = "what it replaces is still there"]
pub struct Loaded {
    /// The new model, which is served now.
    pub model: Arc<ServedModel>,
    /// The model that it replaces, which still holds its memory.
    pub old: Option<Leaving>,
}

/// A model that new requests no longer find. [`Host::retire`] releases its memory.
#[derive(Debug)]
#[must_use = "it keeps its memory until it is retired"]
pub struct Leaving(Arc<ServedModel>);

/// The result of unloading a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unloaded {
    /// The planned device memory that was released, in bytes.
    pub freed_bytes: u64,
    /// The number of requests that were ended because the grace period was over.
    pub cut: usize,
}

/// The effect of a new configuration on a model.
#[derive(Debug)]
pub struct Changed {
    /// The model's name.
    pub model: String,
    /// The intended change.
    pub change: ModelChange,
    /// Whether the change succeeded.
    pub result: Result<(), LifecycleError>,
}

/// A change of a model that a new configuration requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelChange {
    /// The model is no longer configured and is unloaded.
    Removed,
    /// The model is served from a different configuration and is replaced.
    Replaced,
    /// The model is loaded.
    Added,
}

impl fmt::Display for ModelChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ModelChange::Removed => "removed",
            ModelChange::Replaced => "replaced",
            ModelChange::Added => "added",
        })
    }
}

/// A load or unload in progress; dropping it marks it as ended and wakes the waiting threads.
struct Job<'a> {
    host: &'a Host,
    name: &'a str,
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        if let Ok(entry) = self.host.catalogue.lock().entry(self.name) {
            entry.work = None;
        }
        self.host.catalogue.done.notify_all();
    }
}

/// Records the progress of a load in the catalogue and passes it on.
struct Kept<'a> {
    job: &'a Job<'a>,
    also: &'a dyn Progress,
}

impl Progress for Kept<'_> {
    fn line(&self, text: &str) {
        self.also.line(text);
    }

    fn warning(&self, text: &str) {
        self.also.warning(text);
    }

    fn step(&self, what: &str, done: u64, total: u64, unit: Unit) {
        if let Ok(entry) = self.job.host.catalogue.lock().entry(self.job.name)
            && let Some(ModelWork::Loading { step, .. }) = &mut entry.work
        {
            *step = Some(Step { what: what.to_owned(), done, total, unit });
        }
        self.also.step(what, done, total, unit);
    }
}

impl Host {
    /// Creates a host for models that can be loaded from a source; none is loaded yet.
    pub fn of(models: &[config::Model], queue_limit: usize, source: Box<dyn ModelSource>) -> Host {
        Host::empty(Catalogue::new(models, queue_limit), source)
    }

    /// Loads every model whose configuration says to load it at start. Called before the server accepts requests.
    pub fn load_all(&self, progress: &dyn Progress) -> Result<(), BuildError> {
        let wanted = |entry: &&Entry| entry.model.load == LoadWhen::Start;
        let names: Vec<String> =
            self.catalogue.lock().entries.iter().filter(wanted).map(|entry| entry.model.name.clone()).collect();
        for name in names {
            match self.load_as(&name, Replace::Beside, Duration::ZERO, false, progress) {
                Ok(Loaded { old, .. }) => debug_assert!(old.is_none(), "nothing was served"),
                Err(LifecycleError::Load { source, .. }) => return Err(*source),
                Err(_) => return Err(BuildError::cancelled(&name)),
            }
        }
        Ok(())
    }

    /// Loads or reloads a model of the configuration. With [`Replace::UnloadFirst`], requests on the old model have
    /// `grace` to end. On an error nothing has changed, except that with [`Replace::UnloadFirst`] the old model may
    /// already be unloaded.
    pub fn load(
        &self,
        name: &str,
        replace: Replace,
        grace: Duration,
        progress: &dyn Progress,
    ) -> Result<Loaded, LifecycleError> {
        let beside = !self.models_and_leaving().is_empty();
        self.load_as(name, replace, grace, beside, progress)
    }

    fn load_as(
        &self,
        name: &str,
        replace: Replace,
        grace: Duration,
        beside: bool,
        progress: &dyn Progress,
    ) -> Result<Loaded, LifecycleError> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let (model, queue_limit) = {
            let mut catalogue = self.catalogue.lock();
            if catalogue.closed {
                return Err(LifecycleError::Stopping { model: name.to_owned() });
            }
            let queue_limit = catalogue.queue_limit;
            let entry = catalogue.configured(name)?;
            if let Some(work) = &entry.work {
                return Err(LifecycleError::Busy { model: name.to_owned(), state: work.state() });
            }
            entry.work = Some(ModelWork::Loading { step: None, cancelled: Arc::clone(&cancelled) });
            entry.unloaded = false;
            (entry.model.clone(), queue_limit)
        };
        let job = Job { host: self, name };
        let failed = |source| LifecycleError::Load { model: name.to_owned(), source: Box::new(source) };
        if replace == Replace::UnloadFirst {
            // Checks the devices before the old model is unloaded.
            self.source.check(&model).map_err(failed)?;
            let old = self.take_out(&mut self.catalogue.lock(), name);
            if let Some(old) = old {
                progress.line(&format!("\"{name}\" is unloaded first"));
                self.retire(old, grace);
            }
        }
        let kept = Kept { job: &job, also: progress };
        let attempt = LoadAttempt { beside, queue_limit, cancelled: &cancelled, progress: &kept };
        let built = self.source.build(&model, &attempt).map_err(failed)?;
        let built = Arc::new(built);
        let mut catalogue = self.catalogue.lock();
        // A model must not be served if it has been removed from the configuration, or its load cancelled, in the
        // meantime.
        let unwanted = catalogue.closed || cancelled.load(Ordering::Relaxed) || catalogue.configured(name).is_err();
        if unwanted {
            drop(catalogue);
            return Err(failed(BuildError::cancelled(name)));
        }
        // The limit may have changed during the load.
        built.replicas.iter().for_each(|replica| replica.set_queue_limit(catalogue.queue_limit));
        let old = self.take_out(&mut catalogue, name);
        let place = |name: &str| catalogue.entries.iter().position(|entry| entry.model.name == name);
        let mut models = self.models().to_vec();
        let at = models.iter().position(|served| place(&served.name) > place(name)).unwrap_or(models.len());
        models.insert(at, Arc::clone(&built));
        self.set_models(models);
        catalogue.entry(name)?.served_as = Some(model);
        drop(catalogue);
        Ok(Loaded { model: built, old })
    }

    /// Removes a model from the list of served models, if it is there, and adds it to the models that are being
    /// removed.
    fn take_out(&self, catalogue: &mut Models, name: &str) -> Option<Leaving> {
        let models = self.models();
        let at = models.iter().position(|served| served.name == name)?;
        let old = Arc::clone(&models[at]);
        let mut left = models.to_vec();
        left.remove(at);
        // The model must always be in one of the two lists, because a caller that ends a request searches both.
        self.leaving().push(Arc::clone(&old));
        self.set_models(left);
        if let Ok(entry) = catalogue.entry(name) {
            entry.served_as = None;
        }
        Some(Leaving(old))
    }

    /// Waits until nothing runs on a removed model, at most for `grace`. Then ends the remaining requests and releases
    /// the model's memory.
    pub fn retire(&self, leaving: Leaving, grace: Duration) -> Unloaded {
        let Leaving(model) = leaving;
        let until = Instant::now() + grace;
        let mut idle_since = None;
        let unfinished = || -> usize { model.replicas.iter().map(|replica| replica.unfinished()).sum() };
        loop {
            let now = Instant::now();
            if unfinished() > 0 {
                idle_since = None;
            } else {
                // The two references here and in the list of models that are being removed.
                let unseen = Arc::strong_count(&model) <= 2;
                let idle: Instant = *idle_since.get_or_insert(now);
                if unseen || now.duration_since(idle) >= LINGER || self.catalogue.lock().closed {
                    break;
                }
            }
            if now >= until {
                break;
            }
            std::thread::sleep(IDLE_LOOK.min(until - now));
        }
        let cut = unfinished();
        let why = format!("model \"{}\" was unloaded", model.name);
        model.replicas.iter().for_each(|replica| replica.stop(&why));
        self.leaving().retain(|other| !Arc::ptr_eq(other, &model));
        let memory = model.replicas.iter().flat_map(|replica| &replica.memory);
        let freed_bytes = memory.filter(|line| line.on_device).map(|line| line.bytes).sum();
        Unloaded { freed_bytes, cut }
    }

    /// Unloads a model: it accepts no new requests from now on, and running requests have `grace` to end. If the model
    /// is being loaded, cancels the load.
    pub fn unload(&self, name: &str, grace: Duration) -> Result<Unloaded, LifecycleError> {
        let mut loading = false;
        let leaving = {
            let mut catalogue = self.catalogue.lock();
            loop {
                let entry = catalogue.entry(name)?;
                match &entry.work {
                    Some(ModelWork::Loading { cancelled, .. }) => cancelled.store(true, Ordering::Relaxed),
                    Some(ModelWork::Unloading) => {
                        return Err(LifecycleError::Busy { model: name.to_owned(), state: LoadState::Unloading });
                    }
                    None => break,
                }
                loading = true;
                catalogue = self.catalogue.done.wait(catalogue).unwrap_or_else(PoisonError::into_inner);
            }
            catalogue.entry(name)?.unloaded = true;
            match self.take_out(&mut catalogue, name) {
                Some(leaving) => {
                    catalogue.entry(name)?.work = Some(ModelWork::Unloading);
                    leaving
                }
                None if loading => return Ok(Unloaded::default()),
                None => {
                    return Err(LifecycleError::NotServed { model: name.to_owned(), state: LoadState::Unloaded });
                }
            }
        };
        let _job = Job { host: self, name };
        Ok(self.retire(leaving, grace))
    }

    /// Applies the models of a new configuration. First unloads the models that it no longer contains, then replaces
    /// those whose configuration changed and loads those that it adds, in the configuration's order. Requests on a
    /// model that is unloaded or replaced have `grace` to end. A model that cannot be loaded leaves the old state in
    /// place, and is tried again with the next configuration.
    ///
    /// Returns errors, and changes nothing, if the devices of a model are not available. Calls `begins` once all
    /// devices have been checked.
    pub fn configure(
        &self,
        models: &[config::Model],
        queue_limit: usize,
        grace: Duration,
        progress: &(dyn Progress + Sync),
        begins: impl FnOnce(),
    ) -> Result<Vec<Changed>, Vec<BuildError>> {
        let problems: Vec<BuildError> = models.iter().filter_map(|model| self.source.check(model).err()).collect();
        if !problems.is_empty() {
            return Err(problems);
        }
        begins();
        let (removed, wanted) = self.take_over(models, queue_limit);
        let mut changed: Vec<Changed> = std::thread::scope(|scope| {
            let leave = |model: String| {
                scope.spawn(move || {
                    let result = match self.unload(&model, grace) {
                        // Another caller has unloaded it already.
                        Err(LifecycleError::NotServed { .. }) => return None,
                        Err(LifecycleError::Busy { .. }) => {
                            self.until_idle(&model);
                            return None;
                        }
                        result => result.map(|_| ()),
                    };
                    Some(Changed { model, change: ModelChange::Removed, result })
                })
            };
            let leaving: Vec<_> = removed.iter().cloned().map(leave).collect();
            leaving.into_iter().filter_map(|thread| thread.join().expect("it does not panic")).collect()
        });
        self.catalogue.lock().entries.retain(|entry| !entry.removed || entry.work.is_some());
        std::thread::scope(|scope| {
            for (model, change) in wanted {
                // A load with the previous configuration has been cancelled; waits for it to end.
                self.until_idle(&model);
                let result = self.load(&model, Replace::Beside, grace, progress).map(|loaded| {
                    if let Some(old) = loaded.old {
                        scope.spawn(move || self.retire(old, grace));
                    }
                });
                changed.push(Changed { model, change, result });
            }
        });
        Ok(changed)
    }

    /// Writes a new configuration into the catalogue. Returns the names of the models to unload and of the models to
    /// load.
    fn take_over(&self, models: &[config::Model], queue_limit: usize) -> (Vec<String>, Vec<(String, ModelChange)>) {
        let mut catalogue = self.catalogue.lock();
        catalogue.queue_limit = queue_limit;
        self.replicas().for_each(|replica| replica.set_queue_limit(queue_limit));
        let mut before = std::mem::take(&mut catalogue.entries);
        let mut entries = Vec::new();
        let mut wanted = Vec::new();
        for model in models {
            let mut entry = match before.iter().position(|entry| entry.model.name == model.name) {
                None => Entry::new(model),
                Some(at) => {
                    let mut entry = before.remove(at);
                    entry.unloaded &= entry.model == *model;
                    entry.removed = false;
                    entry
                }
            };
            let same = builds_the_same(&entry.model, model);
            entry.model = model.clone();
            let mut asked = model.load == LoadWhen::Start && !entry.unloaded && (entry.work.is_none() || !same);
            if let (Some(ModelWork::Loading { cancelled, .. }), false) = (&entry.work, same) {
                cancelled.store(true, Ordering::Relaxed);
                // A load of the previous configuration was requested, so the new configuration is loaded instead.
                asked = true;
            }
            let serves = entry.served_as.is_some();
            if serves && !entry.is_current() {
                wanted.push((model.name.clone(), ModelChange::Replaced));
            } else if !serves && asked {
                wanted.push((model.name.clone(), ModelChange::Added));
            }
            entries.push(entry);
        }
        let removed = before.iter().map(|entry| entry.model.name.clone()).collect();
        // Removed entries stay in the catalogue until their models have been unloaded.
        before.iter_mut().for_each(|entry| entry.removed = true);
        entries.append(&mut before);
        catalogue.entries = entries;
        (removed, wanted)
    }

    /// Waits until the model is neither being loaded nor unloaded.
    fn until_idle(&self, name: &str) {
        let busy = |models: &mut Models| models.entry(name).is_ok_and(|entry| entry.work.is_some());
        let _idle = self.catalogue.done.wait_while(self.catalogue.lock(), busy).unwrap_or_else(PoisonError::into_inner);
    }

    /// Waits until no model is being loaded or unloaded, at most for `limit`. Returns false if the limit was reached.
    pub fn settle(&self, limit: Duration) -> bool {
        let busy = |models: &mut Models| models.entries.iter().any(|entry| entry.work.is_some());
        let waited = self.catalogue.done.wait_timeout_while(self.catalogue.lock(), limit, busy);
        let (_models, late) = waited.unwrap_or_else(PoisonError::into_inner);
        !late.timed_out()
    }

    /// Prevents further loads and cancels the loads in progress.
    pub(super) fn stop_loading(&self) {
        let mut catalogue = self.catalogue.lock();
        catalogue.closed = true;
        for entry in &catalogue.entries {
            if let Some(ModelWork::Loading { cancelled, .. }) = &entry.work {
                cancelled.store(true, Ordering::Relaxed);
            }
        }
    }
}

//! Models that come and go while others serve: which may be loaded, what is being done with each, and how one is loaded,
//! replaced and unloaded. Only models of the configuration can be loaded, by their names.
//! Deliberately absent: how a model is built (its [`ModelSource`]'s), gRPC, signals. Callers' threads do the work.
//!
//! Who has found a model keeps it: one that leaves is taken from the list first, so that no new request finds it, goes on
//! with those it has, and gives its memory back when they have ended or the time that they were given has.

use crate::config::{self, LoadWhen};
use crate::host::catalogue::{Catalogue, Entry, LoadState, ModelWork, Models, Step, builds_the_same};
use crate::host::progress::{Progress, Unit};
use crate::host::source::{BuildError, LoadAttempt, ModelSource};
use crate::host::{Host, ServedModel};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks at whether a model that leaves is idle.
const IDLE_LOOK: Duration = Duration::from_millis(5);
/// How long an idle model that leaves waits for those who had found it and have not asked yet: longer than any prompt
/// takes to be encoded.
const LINGER: Duration = Duration::from_secs(2);

/// What is done where a model that is served is loaded again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replace {
    /// The new one is loaded beside the old one, which serves until then.
    #[default]
    Beside,
    /// The old one leaves first, and its memory is the new one's: the model is not served meanwhile, nor afterwards where
    /// the load fails.
    UnloadFirst,
}

/// Why a model was not loaded or unloaded.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    /// No such model in the configuration.
    #[error("model \"{asked}\" is not configured; configured are {configured}")]
    NotConfigured {
        /// What was asked.
        asked: String,
        /// Comma-separated names.
        configured: String,
    },
    /// It is being loaded or unloaded already.
    #[error("model \"{model}\" cannot be touched: {state}")]
    Busy {
        /// Which.
        model: String,
        /// What is done with it.
        state: LoadState,
    },
    /// It is not served.
    #[error("model \"{model}\" cannot be unloaded: {state}")]
    NotServed {
        /// Which.
        model: String,
        /// What is the matter with it.
        state: LoadState,
    },
    /// The server stops.
    #[error("model \"{model}\" is not loaded: the server stops")]
    Stopping {
        /// Which.
        model: String,
    },
    /// It could not be loaded.
    #[error("model \"{model}\" could not be loaded")]
    Load {
        /// Which.
        model: String,
        /// Why.
        #[source]
        source: Box<BuildError>,
    },
}

/// A model that was loaded.
#[derive(Debug)]
#[must_use = "what it replaces is still there"]
pub struct Loaded {
    /// It is served.
    pub model: Arc<ServedModel>,
    /// The one that it replaces, which still has its memory.
    pub old: Option<Leaving>,
}

/// A model that no request finds any more: [`Host::retire`] has its memory given back.
#[derive(Debug)]
#[must_use = "it keeps its memory until it is retired"]
pub struct Leaving(Arc<ServedModel>);

/// What a model that has gone has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unloaded {
    /// Device memory that it was planned with and has given back, bytes.
    pub freed_bytes: u64,
    /// Requests that were ended because their time was over.
    pub cut: usize,
}

/// What a new configuration did to a model.
#[derive(Debug)]
pub struct Changed {
    /// Which.
    pub model: String,
    /// What was to be done.
    pub change: ModelChange,
    /// Whether it was.
    pub result: Result<(), LifecycleError>,
}

/// What is to be done with a model when the configuration changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelChange {
    /// It is not configured any more.
    Removed,
    /// It is served, and configured otherwise.
    Replaced,
    /// It is to be served.
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

/// Something that is being done with a model; dropped, it is over.
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

/// Keeps how far a load is for whoever looks, and hands it on.
struct Kept<'a> {
    job: &'a Job<'a>,
    also: &'a dyn Progress,
}

impl Progress for Kept<'_> {
    fn line(&self, text: &str) {
        self.also.line(text);
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
    /// Of models that can be loaded from a source, of which none is yet.
    pub fn of(models: &[config::Model], queue_limit: usize, source: Box<dyn ModelSource>) -> Host {
        Host::empty(Catalogue::new(models, queue_limit), source)
    }

    /// Loads every model that is not left for a request to load, before anybody is served.
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

    /// Loads a model of the configuration, or loads it anew; where it is to leave first, what runs on it has `grace`.
    /// On an error everything is as it was, but for [`Replace::UnloadFirst`].
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
            // What can be known before is known before.
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
        // Nothing is served that the configuration does not have.
        let unwanted = catalogue.closed || cancelled.load(Ordering::Relaxed) || catalogue.configured(name).is_err();
        if unwanted {
            drop(catalogue);
            return Err(failed(BuildError::cancelled(name)));
        }
        // It may have been changed meanwhile.
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

    /// Takes a model from the list, if it is in it.
    fn take_out(&self, catalogue: &mut Models, name: &str) -> Option<Leaving> {
        let models = self.models();
        let at = models.iter().position(|served| served.name == name)?;
        let old = Arc::clone(&models[at]);
        let mut left = models.to_vec();
        left.remove(at);
        // It is never in neither list: whoever ends a request looks in both.
        self.leaving().push(Arc::clone(&old));
        self.set_models(left);
        if let Ok(entry) = catalogue.entry(name) {
            entry.served_as = None;
        }
        Some(Leaving(old))
    }

    /// Waits until nothing runs on a model that leaves, at most `grace`, ends what still does, and has its memory given
    /// back.
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
                // This one, and the one in the list of those that leave.
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

    /// Unloads a model: no new request reaches it from now on, those that it has go on for `grace`. A load that goes on
    /// is cancelled.
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

    /// Takes over what a new configuration says of models: those that it does not have leave, those that it has otherwise
    /// are replaced, those that it adds are loaded, in this order; each that leaves has `grace` for what runs. One that
    /// cannot be loaded leaves things as they are, and is tried again with the next configuration. Nothing is done where
    /// a model's devices are not there; `begins` is called once they are known to be.
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
                        // Somebody was faster.
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
                // A load of what it was configured as before has been cancelled.
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

    /// Writes a new configuration into the catalogue; gives the models that are to leave it, and those to be loaded.
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
                // Whoever wanted it as it was wants it.
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
        // Until they have left.
        before.iter_mut().for_each(|entry| entry.removed = true);
        entries.append(&mut before);
        catalogue.entries = entries;
        (removed, wanted)
    }

    /// Waits until nothing is done with a model.
    fn until_idle(&self, name: &str) {
        let busy = |models: &mut Models| models.entry(name).is_ok_and(|entry| entry.work.is_some());
        let _idle = self.catalogue.done.wait_while(self.catalogue.lock(), busy).unwrap_or_else(PoisonError::into_inner);
    }

    /// Waits until nothing is being loaded or unloaded, at most `limit`; whether that is so.
    pub fn settle(&self, limit: Duration) -> bool {
        let busy = |models: &mut Models| models.entries.iter().any(|entry| entry.work.is_some());
        let waited = self.catalogue.done.wait_timeout_while(self.catalogue.lock(), limit, busy);
        let (_models, late) = waited.unwrap_or_else(PoisonError::into_inner);
        !late.timed_out()
    }

    /// Nothing is loaded from now on, and what is being loaded is not finished.
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

//! Routing: from the model and device that a request names to one replica.

use crate::engine::prefix::PageKey;
use crate::host::affinity::{Affinity, Candidate};
use crate::host::catalogue::LoadState;
use crate::host::{Host, ServedModel};
use crate::replica::Replica;
use std::sync::Arc;

/// The reason for which no replica was found.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RouteError {
    /// There is no model of that name.
    #[error("model \"{asked}\" is not served; served are {served}")]
    UnknownModel {
        /// The requested name.
        asked: String,
        /// The names of the served models, separated by commas.
        served: String,
    },
    /// The configuration contains the model, but it is not served now.
    #[error("model \"{asked}\" is not served: {state}; served are {served}")]
    NotLoaded {
        /// The requested name.
        asked: String,
        /// The model's load state.
        state: LoadState,
        /// The names of the served models, separated by commas.
        served: String,
    },
    /// The model has no replica on the requested device.
    #[error("model \"{model}\" has no replica on device \"{asked}\"; it runs on {available}")]
    UnknownDevice {
        /// The model's name.
        model: String,
        /// The device selector as given.
        asked: String,
        /// The model's replicas with their devices, separated by commas.
        available: String,
    },
}

impl Host {
    /// Returns a replica of the named model (empty: the only model) that matches the device selector (empty: all
    /// replicas).
    ///
    /// `device` is a replica's name, or a device's UUID, PCI address, index, or a part of its name. If several replicas
    /// match, returns the least loaded one, preferring replicas that accept requests.
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

    /// Returns the replica for `samples` requests with a prompt whose full pages have the keys `keys`. Like
    /// [`Host::route`], but prefers a replica that received the prompt's beginning before, unless it is too busy (see
    /// [`Affinity`]), and replicas that have room for all samples.
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

    /// Returns the named model, or the only one if `model` is empty.
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
            // The model may have been loaded between the two lookups; then the state is `Serving`.
            Some(state) => RouteError::NotLoaded { asked, state, served },
            None => RouteError::UnknownModel { asked, served },
        })
    }

    /// Clears the record of which replica received which prompts, after the replicas have cleared their prefix caches.
    pub fn forget_prompts(&self, model: &str) {
        if let Ok(model) = self.find(model) {
            *model.affinity() = Affinity::default();
        }
    }
}

impl ServedModel {
    /// Returns the indices of the replicas that match a selector, at least one.
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

/// Returns the indices of the replicas that match a selector. Exact matches come before partial names, and a number is
/// only an index: "3" must not match an "RTX 3060".
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

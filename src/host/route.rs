//! Routing: from the model and device that a request names to one replica.

use crate::config::{Selector, SelectorError};
use crate::engine::prefix::PageKey;
use crate::host::affinity::{Affinity, Candidate};
use crate::host::catalogue::LoadState;
use crate::host::{Host, ServedModel};
use crate::replica::Replica;
use std::sync::Arc;

/// The reason for which no replica was found.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RouteError {
    /// There is no model of that name, or there are several and none was named.
    #[error("{}", unknown(asked, served))]
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
    /// The requested device cannot be parsed.
    #[error(transparent)]
    Selector(#[from] SelectorError),
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

fn unknown(asked: &str, served: &str) -> String {
    match (asked, served) {
        ("", served) if served != NONE => format!("name one of {served}: --model, or `model` of the request"),
        _ => format!("model \"{asked}\" is not served; served are {served}"),
    }
}

/// The names of the served models, if there are none.
const NONE: &str = "none";

impl Host {
    /// The replica for a request: [`Host::model`], then [`ServedModel::route`].
    pub fn route(&self, model: &str, device: &str) -> Result<(Arc<ServedModel>, Arc<Replica>), RouteError> {
        let served = self.model(model)?;
        let replica = served.route(device)?;
        Ok((served, replica))
    }

    /// The named model, or the only one.
    pub fn model(&self, model: &str) -> Result<Arc<ServedModel>, RouteError> {
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
        let served = if names.is_empty() { NONE.to_owned() } else { names.join(", ") };
        Err(match self.state(model) {
            // The model may have been loaded between the two lookups; then the state is `Serving`.
            Some(state) => RouteError::NotLoaded { asked, state, served },
            None => RouteError::UnknownModel { asked, served },
        })
    }
}

impl ServedModel {
    /// Clears the record of which replica received which prompts, after the replicas have cleared their prefix caches.
    pub fn forget_prompts(&self) {
        *self.affinity() = Affinity::default();
    }

    /// The replica for a request on the selected device or replica; with an empty `device` on any.
    ///
    /// `device` is a replica's name or a [`Selector`]. If several replicas fit, it is the least loaded of those that
    /// accept requests, or the least loaded of all if none does.
    pub fn route(&self, device: &str) -> Result<Arc<Replica>, RouteError> {
        let least = self.fitting(device)?.into_iter().min_by_key(|&replica| {
            let replica = &self.replicas[replica];
            let load = replica.load();
            let pages_per_mille = load.pages_used as u64 * 1000 / u64::from(load.pages_total.max(1));
            (replica.closed().is_some(), load.running + load.waiting, pages_per_mille)
        });
        Ok(Arc::clone(&self.replicas[least.expect("at least one fits")]))
    }

    /// The replica for `samples` requests of a prompt whose full pages have the names `keys`: as
    /// [`ServedModel::route`], but with a preference for a replica that was given the prompt's beginning before, unless
    /// it is too busy (`affinity`), and for one that has room for all samples.
    pub fn route_prompt(&self, device: &str, keys: &[PageKey], samples: usize) -> Result<Arc<Replica>, RouteError> {
        let fitting = self.fitting(device)?;
        if let [only] = self.replicas.as_slice() {
            return Ok(Arc::clone(only));
        }
        let candidate = |replica: usize| {
            let asked = &self.replicas[replica];
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
        let chosen = self.affinity().choose(&candidates, keys).expect("at least one fits");
        Ok(Arc::clone(&self.replicas[chosen]))
    }

    /// Returns the positions of the replicas that `device` names, at least one: a replica's own name, else a selector.
    fn fitting(&self, device: &str) -> Result<Vec<usize>, RouteError> {
        if device.is_empty() {
            return Ok((0..self.replicas.len()).collect());
        }
        let named = self.replicas.iter().position(|replica| replica.name == device);
        let fitting = match named {
            Some(replica) => vec![replica],
            None => {
                // A split replica is found by each of its devices.
                let (replicas, names): (Vec<usize>, Vec<_>) = (0..)
                    .zip(&self.replicas)
                    .flat_map(|(index, replica)| replica.devices().map(move |device| (index, device.names())))
                    .unzip();
                let found = device.parse::<Selector>()?.find(names.into_iter(), true);
                let mut fitting: Vec<usize> = found.into_iter().map(|at| replicas[at]).collect();
                fitting.dedup();
                fitting
            }
        };
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

//! The arguments that place a model on its devices, which all commands that load one to use it share, and how a placed
//! replica is shown. Not here: what a device's name means (`config::selector`), its choice (`device::select`), and the
//! division of a model (`gpu::build::split`).

use super::Usage;
use crate::config::{Placement, Selector, SplitMode};
use crate::service::proto;

/// Arguments that name the devices of a model.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct DeviceArgs {
    /// The device: UUID, PCI address, index, name, or `cpu`. Default: the only GPU, or the server's choice. With --split,
    /// given once for each device.
    #[arg(long, value_name = "SEL")]
    device: Vec<Selector>,
    /// Split the model over all --device, in their order: `layers` gives each device consecutive layers, `tensor` a part of
    /// every layer.
    #[arg(long, value_name = "HOW")]
    split: Option<SplitMode>,
}

impl DeviceArgs {
    /// Refuses a split over fewer than two devices, or over one device twice.
    pub(super) fn check(&self) -> Result<(), Usage> {
        let Some(split) = self.split else {
            return Ok(());
        };
        let devices = &self.device;
        if devices.len() < 2 {
            let given = devices.len();
            return Err(Usage(format!("--split {split} needs at least two devices, and --device names {given}")));
        }
        match (1..devices.len()).find(|at| devices[..*at].contains(&devices[*at])) {
            Some(at) => {
                let twice = &devices[at];
                Err(Usage(format!("--split {split} takes each device once: --device {twice} is given again")))
            }
            None => Ok(()),
        }
    }

    /// Returns the placement of a single replica.
    pub(super) fn replica(&self) -> Result<Placement, Usage> {
        self.check()?;
        let given = self.device.len();
        if self.split.is_none() && given > 1 {
            return Err(Usage(format!("{given} devices need --split layers or tensor, or a run for each")));
        }
        Ok(self.replicas().into_iter().next().unwrap_or_else(|| Placement::on(None)))
    }

    /// Returns the placements of the replicas of a served model: one on each device, or one over all of them. There are
    /// none if nothing is given.
    pub(super) fn replicas(&self) -> Vec<Placement> {
        let devices = self.device.iter().cloned();
        match self.split {
            Some(_) => vec![Placement { devices: devices.collect(), split: self.split, ..Placement::default() }],
            None => devices.map(|device| Placement::on(Some(device))).collect(),
        }
    }

    /// Returns the device of a request to a server, which is empty for any.
    pub(super) fn of_request(&self) -> Result<String, Usage> {
        match self.device.as_slice() {
            [] => Ok(String::new()),
            [device] => Ok(device.to_string()),
            devices => Err(Usage(format!("a request to a server names one --device, and {} are given", devices.len()))),
        }
    }
}

/// Returns the name of a replica's device, or of all with its layers on each.
pub(super) fn placed(replica: &proto::ModelReplica) -> Option<String> {
    let stages = replica.stages.iter().filter_map(|stage| {
        let (first, end) = (stage.first_layer, stage.first_layer + stage.layers);
        Some(format!("{} (layers {first} to {})", stage.device.as_ref()?.name, end.saturating_sub(1)))
    });
    let stages: Vec<String> = stages.collect();
    match stages.is_empty() {
        true => Some(replica.device.as_ref()?.name.clone()),
        false => Some(stages.join(" + ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(devices: &[&str], split: Option<SplitMode>) -> DeviceArgs {
        DeviceArgs { device: devices.iter().map(|device| device.parse().expect("a selector")).collect(), split }
    }

    #[test]
    fn devices_make_one_replica_or_one_each() {
        let split = Placement {
            devices: vec![Selector::Index(1), Selector::Cpu],
            split: Some(SplitMode::Tensor),
            ..Placement::default()
        };
        let over_both = given(&["1", "cpu"], Some(SplitMode::Tensor));
        assert_eq!(over_both.replica().ok(), Some(split.clone()));
        assert_eq!(over_both.replicas(), [split]);
        let on = |device| Placement::on(Some(device));
        assert_eq!(given(&["1"], None).replica().ok(), Some(on(Selector::Index(1))));
        let each = given(&["1", "cpu"], None);
        assert_eq!(each.replicas(), [on(Selector::Index(1)), on(Selector::Cpu)]);
        assert!(each.replica().is_err_and(|error| error.0.starts_with("2 devices need --split")));
        assert_eq!(given(&[], None).replica().ok(), Some(Placement::on(None)));
        assert_eq!(given(&[], None).replicas(), []);
        for (devices, words) in [(&["1"][..], "at least two devices"), (&["1", "0", "1"], "--device 1 is given again")]
        {
            let wrong = given(devices, Some(SplitMode::Layers));
            assert!(wrong.replica().is_err_and(|error| error.0.contains(words)), "{devices:?}");
            assert!(wrong.check().is_err_and(|error| error.0.contains(words)), "{devices:?}");
        }
    }

    #[test]
    fn a_request_names_at_most_one_device_or_replica() {
        for (devices, sent) in [(&[][..], ""), (&["qwen/0"], "qwen/0"), (&["65:00.0"], "0000:65:00.0")] {
            assert_eq!(given(devices, None).of_request().ok().as_deref(), Some(sent));
        }
        assert!(given(&["0", "1"], None).of_request().is_err_and(|error| error.0.ends_with("2 are given")));
    }
}

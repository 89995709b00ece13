//! The kernels that a replica's regions consist of, and counts of the slower implementations (fallbacks) in use. Plain
//! data, filled at start; only faults, and those that tests inject, are counted at run time. Not here: choosing kernels.

use crate::engine::injection::Injections;
use crate::kernels::recording::{Op, Recording};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A stage of a region and the kernel that computes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    /// The recording's name, for example `decode.8`.
    pub region: String,
    /// The calls' label without the layer number, for example `qkv`.
    pub stage: String,
    /// The kernel and its variant, for example `skinny.bf16`.
    pub kernel: &'static str,
}

/// A slower implementation that is used instead of the best one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Weights are stored row-major, because the device does not store matrix blocks in a form that the kernels can
    /// use.
    RowLayout,
    /// Matrix blocks are multiplied with scalar arithmetic instead of matrix units.
    Emulated,
    /// The stages of a decode step run one after the other, because the device does not guarantee which workgroups
    /// start first.
    NoOverlap,
    /// A bucket's step without barriers failed its test at start.
    OverlapTest,
    /// A kernel of a step without barriers timed out at run time; steps have barriers for a while.
    OverlapFault,
}

impl Fallback {
    /// All fallbacks.
    pub const ALL: [Fallback; 5] =
        [Fallback::RowLayout, Fallback::Emulated, Fallback::NoOverlap, Fallback::OverlapTest, Fallback::OverlapFault];

    /// Returns the fallback's name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Fallback::RowLayout => "row_layout",
            Fallback::Emulated => "emulated",
            Fallback::NoOverlap => "no_overlap",
            Fallback::OverlapTest => "overlap_test",
            Fallback::OverlapFault => "overlap_fault",
        }
    }
}

/// The kernels of a replica and counts of its fallbacks.
#[derive(Debug, Default)]
pub struct Variants {
    calls: Vec<Variant>,
    fallbacks: [AtomicU64; Fallback::ALL.len()],
    injections: Injections,
}

impl Variants {
    /// Collects the kernels of the regions that these recordings become.
    pub fn of<'a>(recordings: impl IntoIterator<Item = &'a Recording>) -> Variants {
        let mut calls = BTreeSet::new();
        for recording in recordings {
            for op in &recording.ops {
                if let Op::Call(call) = op {
                    let (region, stage) = (recording.name.clone(), stage(&call.label));
                    calls.insert(Variant { region, stage, kernel: call.kernel });
                }
            }
        }
        Variants { calls: calls.into_iter().collect(), ..Variants::default() }
    }

    /// Adds the faults that tests inject.
    pub fn with_injections(self, injections: Injections) -> Variants {
        Variants { injections, ..self }
    }

    /// Joins those of the stages of a split replica.
    pub fn joined(stages: &[Arc<Variants>]) -> Variants {
        let (mut calls, joined) = (BTreeSet::new(), Variants::default());
        let injections = Injections::joined(stages.iter().map(|stage| stage.injections()));
        for stage in stages {
            calls.extend(stage.calls.iter().cloned());
            for (sum, count) in joined.fallbacks.iter().zip(&stage.fallbacks) {
                sum.fetch_add(count.load(Relaxed), Relaxed);
            }
        }
        Variants { calls: calls.into_iter().collect(), injections, ..joined }
    }

    /// Returns the kernels, each once, ordered by region and stage.
    pub fn calls(&self) -> &[Variant] {
        &self.calls
    }

    /// Returns the faults that tests inject.
    pub fn injections(&self) -> &Injections {
        &self.injections
    }

    /// Counts one use of a fallback.
    pub fn fell_back(&self, to: Fallback) {
        self.fallbacks[to as usize].fetch_add(1, Relaxed);
    }

    /// Returns how often a fallback was counted.
    pub fn fallen(&self, to: Fallback) -> u64 {
        self.fallbacks[to as usize].load(Relaxed)
    }
}

/// Returns a call's label without its layer: `layers.3.qkv` becomes `qkv`, and `drafter.0.layers.3.qkv` `drafter.0.qkv`.
pub fn stage(label: &str) -> String {
    let mut parts = Vec::new();
    let mut after_layers = false;
    for part in label.split('.') {
        let number = after_layers && part.bytes().all(|byte| byte.is_ascii_digit());
        after_layers = part == "layers";
        if !after_layers && !number {
            parts.push(part);
        }
    }
    parts.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_no_layers_number() {
        for (label, wanted) in [
            ("layers.3.qkv", "qkv"),
            ("layers.12.mlp.gate_up", "mlp.gate_up"),
            ("drafter.0.layers.3.qkv", "drafter.0.qkv"),
            ("sample.1", "sample.1"),
            ("lm_head", "lm_head"),
        ] {
            assert_eq!(stage(label), wanted);
        }
    }

    #[test]
    fn every_way_has_its_own_place_and_name() {
        let variants = Variants::default();
        let mut names = BTreeSet::new();
        for (times, fallback) in Fallback::ALL.into_iter().enumerate() {
            (0..times).for_each(|_| variants.fell_back(fallback));
            assert!(names.insert(fallback.name()));
        }
        let fallen: Vec<u64> = Fallback::ALL.into_iter().map(|fallback| variants.fallen(fallback)).collect();
        assert_eq!(fallen, [0, 1, 2, 3, 4]);
    }
}

//! Which kernels a replica's regions are made of, and every slower way that was taken than the program has: plain
//! data, made at start, but for faults at run time. Deliberately absent: choosing.

use crate::kernels::recording::{Op, Recording};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A stage of a region and what computes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    /// The recording's name, `decode.8` for example.
    pub region: String,
    /// The calls' label without the layer's number, `qkv` for example.
    pub stage: String,
    /// The kernel and its variant, `skinny.bf16` for example.
    pub kernel: &'static str,
}

/// A slower way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Weights lie row after row: the device has no blocks that the matrix kernels could use.
    RowLayout,
    /// Blocks are multiplied by hand, not by matrix units.
    ByHand,
    /// The stages of a decode step run one after the other: the device does not say which workgroups it begins with.
    NoOverlap,
    /// A bucket's step without barriers failed its test at start.
    OverlapTest,
    /// A call waited too long at run time: for a while steps have barriers.
    OverlapFault,
}

impl Fallback {
    /// All of them.
    pub const ALL: [Fallback; 5] =
        [Fallback::RowLayout, Fallback::ByHand, Fallback::NoOverlap, Fallback::OverlapTest, Fallback::OverlapFault];

    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            Fallback::RowLayout => "row_layout",
            Fallback::ByHand => "by_hand",
            Fallback::NoOverlap => "no_overlap",
            Fallback::OverlapTest => "overlap_test",
            Fallback::OverlapFault => "overlap_fault",
        }
    }
}

/// What runs, and what does not run as it could.
#[derive(Debug, Default)]
pub struct Variants {
    calls: Vec<Variant>,
    fallbacks: [AtomicU64; Fallback::ALL.len()],
}

impl Variants {
    /// Of the regions that these recordings become.
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

    /// In order of region and stage, each once.
    pub fn calls(&self) -> &[Variant] {
        &self.calls
    }

    /// Notes that a slower way is taken, once more.
    pub fn fell_back(&self, to: Fallback) {
        self.fallbacks[to as usize].fetch_add(1, Relaxed);
    }

    /// How often it was noted.
    pub fn fallen(&self, to: Fallback) -> u64 {
        self.fallbacks[to as usize].load(Relaxed)
    }
}

/// A label without layers' numbers: `layers.3.qkv` is `qkv`.
fn stage(label: &str) -> String {
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
            ("mtp.layers.0.qkv", "mtp.qkv"),
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

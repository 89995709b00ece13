//! Goal: `pack_codes` gives the bytes of the Rust packer on both CPU drivers, for every type of block that it packs, in both
//! layouts, in the type's own codes and in those that it has in common with other types. Method: its probes, with several
//! seeds: rows of every kind of scale, without a source, and beyond the last one.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, every_case};
use ostinato::kernels::pack_codes::{PackVariant, RESULTS};
use ostinato::memory::pack::{Format, Layout, Packing};
use ostinato::quant::blocks::BlockType;
use std::collections::HashSet;

const LAYOUTS: [Layout; 2] = [Layout::Fragments, Layout::RowMajor { columns_multiple: 8 }];

#[test]
fn packed_blocks_are_those_of_the_host() {
    let mut seen = HashSet::new();
    for driver in Driver::BOTH {
        let vulkan = Vulkan::new();
        let bench = Bench::new(&vulkan, driver);
        for kind in BlockType::ALL {
            // Beside rows of these types, a weight has more bits, smaller groups, or minimums.
            let beside = [kind, BlockType::Q6_K, BlockType::Q8_0, BlockType::Q2_K, BlockType::Q5_K];
            let mut formats = HashSet::new();
            for (codes, layout) in beside.iter().flat_map(|other| LAYOUTS.map(|layout| (other.codes(), layout))) {
                let Some(codes) = kind.codes().common(codes) else { continue };
                let packing = Packing { rows: 1, cols: 256, layout, format: Format::Codes(codes) };
                let Some(variant) = PackVariant::of(kind, &packing) else { continue };
                let is_own = codes == kind.codes();
                // Each pipeline takes a CPU driver a while.
                let is_case = is_own || every_case() || [BlockType::Q4_K, BlockType::Q6_K].contains(&kind);
                if !formats.insert(variant) || !is_case {
                    continue;
                }
                seen.insert(variant);
                for seed in 1..=if is_own { 8 } else { 3 } {
                    let probe = variant.probe(bench.device.adapter().capabilities.max_invocations, seed);
                    let after = bench.run(&probe.recording, &probe.memory);
                    assert_eq!(probe.difference(&after), None, "{driver:?}: {variant}, seed {seed}");
                    // What the reference writes is what the device was asked for.
                    let results =
                        probe.recording.buffers.iter().position(|decl| decl.name == RESULTS).expect("results");
                    assert!(!after.buffers[results].contains(&0xdead_beef), "{variant}: all words are written");
                }
            }
        }
        vulkan.assert_clean();
    }
    assert!(seen.len() >= 26, "only {} variants were compared", seen.len());
}

/// A scale or minimum that is infinite or not a number is noted, with the smallest number of a part; others leave the word
/// as it is.
#[test]
fn values_that_are_not_finite_are_noted() {
    for driver in Driver::BOTH {
        let vulkan = Vulkan::new();
        let bench = Bench::new(&vulkan, driver);
        for layout in LAYOUTS {
            let format = Format::Codes(BlockType::Q4_K.codes());
            let packing = Packing { rows: 1, cols: 256, layout, format };
            let variant = PackVariant::of(BlockType::Q4_K, &packing).expect("a variant");
            let probe = variant.probe(128, 1);
            // The first word of a row has the block's two f16s.
            let row = (probe.memory.buffers[0][1] / 4) as usize;
            for (low, high, wanted) in
                [(0x3c00u32, 0x3c00u32, u32::MAX), (0x7c00, 0, 0), (0, 0xfc00, 0), (0x7e01, 0, 0)]
            {
                let mut memory = probe.memory.clone();
                let shift = 8 * (probe.memory.buffers[0][1] % 4);
                assert!(shift == 0 || shift == 16, "rows begin at even bytes");
                let bits = u64::from(low | high << 16) << shift;
                let words = &mut memory.buffers[0][row..row + 2];
                let old = u64::from(words[0]) | u64::from(words[1]) << 32;
                let new = old & !(0xffff_ffff << shift) | bits;
                (words[0], words[1]) = (new as u32, (new >> 32) as u32);
                let after = bench.run(&probe.recording, &memory);
                assert_eq!(after.buffers[2], [wanted], "{driver:?} {layout:?} {low:x} {high:x}");
            }
        }
        vulkan.assert_clean();
    }
}

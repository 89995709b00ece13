//! Goal: `pack_codes` gives the bytes of the Rust packer on both CPU drivers and on a GPU, for every type of block that it packs, in both
//! layouts, in the type's own codes and in those that it has in common with other types, and for AWQ and GPTQ. Method: its
//! probes, with several seeds: rows of every kind of scale, without a source, and beyond the last one.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, every_case};
use ostinato::kernels::pack_codes::{PackVariant, RESULTS};
use ostinato::memory::pack::{Format, Layout, Packing};
use ostinato::quant::blocks::BlockType;
use ostinato::quant::safetensors::{Description, GptqVersion, Storage, TensorDtype, TensorHead, TensorRole};
use std::collections::HashSet;

const LAYOUTS: [Layout; 2] = [Layout::Fragments, Layout::RowMajor { columns_multiple: 8 }];

#[test]
fn packed_blocks_are_those_of_the_host() {
    let mut seen = HashSet::new();
    for driver in Driver::all().iter().copied() {
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
                // SwiftShader takes seconds for a pipeline; beside another driver it has fewer.
                let is_case = every_case()
                    || match driver {
                        Driver::SwiftShader if Driver::all().len() > 1 => {
                            is_own && layout == LAYOUTS[0] || kind == BlockType::Q4_K
                        }
                        _ => is_own || [BlockType::Q4_K, BlockType::Q6_K].contains(&kind),
                    };
                if !formats.insert(variant) || !is_case {
                    continue;
                }
                seen.insert(variant);
                for seed in 1..=if is_own { 6 } else { 2 } {
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

/// Returns the description of a matrix of 64 rows.
fn matrix(storage: Storage, has_zeros: bool, group: u64) -> Description {
    let cols = 5 * group;
    let codes = if matches!(storage, Storage::Awq { .. }) { [cols, 8] } else { [cols / 8, 64] };
    let head =
        |role, dtype, shape: [u64; 2]| TensorHead { role, name: format!("{role:?}"), dtype, shape: shape.to_vec() };
    let scales = head(TensorRole::Scale, TensorDtype::F16, [5, 64]);
    let zeros = has_zeros.then(|| head(TensorRole::Zero, TensorDtype::I32, [5, 8]));
    let tensors = [head(TensorRole::Codes, TensorDtype::I32, codes), scales].into_iter().chain(zeros).collect();
    Description { storage, tensors }
}

/// Returns the ways in which AWQ and GPTQ store a matrix, with the same group of columns.
fn matrices(group: u32) -> Vec<Description> {
    let of = |storage, has_zeros| matrix(storage, has_zeros, group.into());
    let gptq = |symmetric, version| Storage::Gptq { bits: 4, group: Some(group), symmetric, version };
    let awq = Storage::Awq { group: Some(group) };
    let gptq =
        [false, true].into_iter().flat_map(|symmetric| [GptqVersion::V1, GptqVersion::V2].map(|v| gptq(symmetric, v)));
    [of(awq, true), of(awq, false)].into_iter().chain(gptq.map(|storage| of(storage, true))).collect()
}

/// Goal: rows of matrices in several tensors are those of the Rust packer too. Method: as above, but for SwiftShader, which
/// compiles too slowly; a wrong zero of a symmetric GPTQ matrix is noted.
#[test]
fn packed_matrices_are_those_of_the_host() {
    // SwiftShader takes minutes for one of these pipelines.
    let skips = |driver: &Driver| *driver == Driver::SwiftShader && Driver::all().len() > 1 && !every_case();
    for driver in Driver::all().iter().copied().filter(|driver| !skips(driver)) {
        let vulkan = Vulkan::new();
        let bench = Bench::new(&vulkan, driver);
        let mut wrong_zeros = 0;
        for (group, layout) in [32, 128].into_iter().flat_map(|group| LAYOUTS.map(|layout| (group, layout))) {
            for description in matrices(group) {
                let codes = description.check().expect("a matrix").codes();
                let packing = Packing { rows: 64, cols: 5 * group, layout, format: Format::Codes(codes) };
                let variant = PackVariant::of_matrix(&description, &packing).expect("a variant");
                let is_case = group == 128 || matches!(description.storage, Storage::Awq { .. });
                if !is_case && !every_case() {
                    continue;
                }
                for seed in 1..=3 {
                    let probe = variant.probe(bench.device.adapter().capabilities.max_invocations, seed);
                    let after = bench.run(&probe.recording, &probe.memory);
                    assert_eq!(probe.difference(&after), None, "{driver:?}: {variant}, seed {seed}");
                    assert_eq!(after.buffers[2], [u32::MAX], "{variant}: all values are finite");
                    assert!(!after.buffers[1].contains(&0xdead_beef), "{variant}: all words are written");
                }
                if !matches!(description.storage, Storage::Gptq { symmetric: true, .. }) {
                    continue;
                }
                let probe = variant.probe(bench.device.adapter().capabilities.max_invocations, 1);
                let mut memory = probe.memory.clone();
                // A word of zeros of the first row's strip.
                let strip = memory.buffers[0][0] as usize / 4;
                let zeros = strip + memory.buffers[0][strip + 2] as usize / 4;
                memory.buffers[0][zeros] ^= 0x10;
                let after = bench.run(&probe.recording, &memory);
                assert_eq!(after.buffers[2], [0], "{driver:?}: {variant}");
                wrong_zeros += 1;
            }
        }
        assert!(wrong_zeros >= 4, "{driver:?}: {wrong_zeros}");
        vulkan.assert_clean();
    }
}

/// A scale or minimum that is infinite or not a number is noted, with the smallest number of a part; others leave the word
/// as it is.
#[test]
fn values_that_are_not_finite_are_noted() {
    for driver in Driver::all().iter().copied() {
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

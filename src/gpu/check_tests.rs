//! Tests of the checks: what every device is asked for against what the shaders use, and how numbers of drivers are read.
//! Not here: a check on a driver (`tests/program/check.rs`).

use super::*;
use crate::config::KvFormat;
use crate::device::{AdapterKind, Capabilities, Module, NEEDED, NEEDED_INVOCATIONS, NEEDED_SHARED_BYTES, Statistic};
use crate::gpu::build::defaults::{RING_STEPS, tuning};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::layout::StateLayout;
use crate::kernels::shaders::{SHADERS, find};
use crate::model::checkpoint::{CheckpointProblem, WeightSpec};
use crate::model::decoder::stage::LayerStage;
use crate::model::decoder::{Decoder, RingLayout, Tuning};
use crate::model::synth::miniature::Miniature;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A GPU that offers no more than every path through the kernels needs.
fn least() -> Adapter {
    let mut adapter = Adapter::made_up(0, "least", AdapterKind::Integrated);
    adapter.capabilities = Capabilities {
        subgroup_size: 64,
        subgroup_min: 64,
        subgroup_max: 64,
        max_invocations: NEEDED_INVOCATIONS,
        max_workgroup_size: [NEEDED_INVOCATIONS, NEEDED_INVOCATIONS, 64],
        max_shared_bytes: NEEDED_SHARED_BYTES,
        max_push_bytes: 128,
        ..Capabilities::default()
    };
    adapter
}

/// The folders of all checkpoints in the repository.
fn checkpoints() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from("tests/fixtures"), PathBuf::from("demo")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with("config.json") && folder.join("model.safetensors").exists() {
                // The folder of a module of an embedding model is none.
                let module = folder.parent().is_some_and(|parent| parent.join("modules.json").exists());
                found.extend((!module).then(|| folder.clone()));
            }
        }
    }
    found
}

/// Returns the pipelines of a checkpoint with a tuning: kernels with their constants.
fn pipelines(checkpoint: &Checkpoint, tuning: Tuning) -> BTreeSet<(&'static str, Vec<u32>)> {
    let drafts = u32::from(checkpoint.has_mtp());
    let (slots, chunk, context) = (8, 2048, 2048);
    let decoder = Decoder {
        input_tags: BTreeMap::new(),
        config: &checkpoint.config,
        weights: if drafts > 0 { checkpoint.weights() } else { checkpoint.weights_without_mtp() },
        stage: LayerStage::whole(&checkpoint.config),
        max_buffer_bytes: u64::MAX,
        state: StateLayout {
            slots,
            rows: slots,
            chunk,
            prompts: slots,
            sequences: slots,
            max_pages: 128,
            cells: checkpoint.config.is_recurrent(),
            windows: checkpoint.config.recycled_window().is_some(),
        },
        cells: slots,
        drafts,
        drafter: None,
        pages: 128,
        window_pages: checkpoint.config.recycled_window().map(|_| 64),
        kv_format: KvFormat::F16,
        ring: RingLayout { steps: RING_STEPS, rows: slots },
        context,
        tuning,
    };
    let recordings = Recordings::new(&decoder, &[16, 256, chunk], 1);
    let ops = recordings.all().into_iter().flat_map(|recording| recording.ops.clone());
    ops.filter_map(|op| if let Op::Call(call) = op { Some((call.kernel, call.constants)) } else { None }).collect()
}

#[test]
fn what_every_device_is_asked_for_is_what_the_plain_path_uses() {
    let adapter = least();
    let (mut used, mut invocations, mut shared) = (BTreeSet::new(), BTreeMap::new(), BTreeMap::new());
    let folders = checkpoints();
    assert!(folders.len() > 10, "{folders:?}");
    for folder in folders {
        let checkpoint = match Checkpoint::open(&folder) {
            Ok(checkpoint) => checkpoint,
            // Fixtures of families that do not run yet.
            Err(error) if error.to_string().contains("architecture \"") => continue,
            // Heads that draft for another one of these models, with the kernels of its drafting steps.
            Err(error) if matches!(error.problems[..], [CheckpointProblem::DraftHead(_)]) => continue,
            Err(error) => panic!("{}: {error}", folder.display()),
        };
        let tuning = tuning(&adapter, None, checkpoint.config.least_kv_heads(), 2048);
        for (kernel, constants) in pipelines(&checkpoint, tuning) {
            let module = Module::read(&find(kernel).words(), &constants);
            let bytes = module.shared_bytes.unwrap_or_else(|| panic!("{kernel}: its shared memory is not known"));
            invocations.entry(module.invocations()).or_insert(kernel);
            shared.entry(bytes).or_insert((kernel, folder.clone()));
            used.extend(module.capabilities);
        }
    }
    let needed: BTreeSet<String> = NEEDED.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(used, needed, "the capabilities of the plain path, and those that `device::module` asks for");
    let (most, kernel) = invocations.last_key_value().expect("there are kernels");
    assert_eq!(*most, NEEDED_INVOCATIONS, "{kernel} has the largest workgroups");
    let (most, kernel) = shared.last_key_value().expect("there are kernels");
    assert!(*most <= NEEDED_SHARED_BYTES, "{kernel:?} has {most} bytes of shared memory");
    assert!(
        *most > NEEDED_SHARED_BYTES / 2,
        "{kernel:?} has {most} bytes at most, which is much less than is asked for"
    );
}

/// Goal: a step is recorded for every size of shared memory. Method: inputs of a norm that one workgroup of the product with
/// codes does not hold, with one row as with several.
#[test]
fn inputs_of_norms_that_are_larger_than_shared_memory_are_packed() {
    let folder = PathBuf::from("tests/fixtures/quantised/fp8-hybrid");
    let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|error| panic!("{error}"));
    let emulated = tuning(&least(), Some(Matrices::Emulated), checkpoint.config.least_kv_heads(), 2048);
    let kernels = |shared_bytes: u32| -> BTreeSet<&str> {
        let tuning = Tuning { shared_bytes, ..emulated.clone() };
        pipelines(&checkpoint, tuning).into_iter().map(|(kernel, _)| kernel).collect()
    };
    assert!(kernels(NEEDED_SHARED_BYTES).contains("skinny_codes.plain"));
    let narrow = kernels(3 << 10);
    assert!(!narrow.contains("skinny_codes.plain") && narrow.contains("panel.codes.plain"), "{narrow:?}");
}

/// The test at start leaves out models of which no small one can be made.
#[test]
fn a_small_model_can_be_made_of_every_checkpoint() {
    let mut count = 0;
    for folder in checkpoints() {
        // A family that is refused has fixtures too.
        let Ok(checkpoint) = Checkpoint::open(&folder) else { continue };
        let small = Miniature::of(&checkpoint.config, checkpoint.weights_without_mtp());
        let small = small.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for weight in checkpoint.weights_without_mtp() {
            let kept = |other: &WeightSpec| (other.kind, other.format) == (weight.kind, weight.format);
            assert!(small.weights.iter().any(kept), "{}: {:?}", folder.display(), weight.format);
        }
        count += 1;
    }
    assert!(count > 60, "{count} checkpoints");
}

#[test]
fn a_shader_that_asks_for_more_has_a_variant_that_does_not() {
    // Weights in fragments that are multiplied on emulated matrix units are a choice of the operator's, which no device
    // is given by default.
    let emulation = ["GroupNonUniformShuffle", "GroupNonUniformVote"];
    let needed: Vec<&str> = NEEDED.iter().map(|(name, _)| *name).collect();
    for shader in SHADERS {
        let module = Module::read(&shader.words(), &[]);
        let optional: Vec<&String> =
            module.capabilities.iter().filter(|name| !needed.contains(&name.as_str())).collect();
        if shader.name.ends_with(".plain") && optional.iter().all(|name| emulation.contains(&name.as_str())) {
            continue;
        }
        // The layout of matrices is asked for only where there are matrices, wider tiles have the plain variant of the
        // others, and other arithmetic has that in f32. Prompts without `flash_matrix` take `flash_f32`, those without
        // `delta_blocks_matrix` and `delta_scan_matrix` the plain variants of the kernels of these names, and rows of codes
        // without `gemv_dots` take `gemv`.
        let base = shader.name.trim_end_matches(".128").trim_end_matches(".64");
        let plain = [format!("{base}.plain"), base.trim_end_matches(".half").trim_end_matches(".matrix").to_owned()];
        let is_plain = |name: &str| name != shader.name && plain.iter().any(|plain| plain == name);
        let twin = SHADERS.iter().any(|other| is_plain(other.name))
            || ["fragment_layout.", "flash_matrix", "gemv_dots", "delta_blocks_matrix", "delta_scan_matrix"]
                .iter()
                .any(|asked| base.starts_with(asked));
        assert!(optional.is_empty() || twin, "{} needs {optional:?} and has no plain variant", shader.name);
    }
}

#[test]
fn all_that_matrix_units_need_is_asked_for() {
    let mut capabilities = Capabilities::default();
    let lacks = unpromised(&capabilities);
    assert!(
        lacks.contains(&"cooperative matrices") && !lacks.iter().any(|what| what.contains("16x16x16")),
        "{lacks:?}"
    );
    capabilities.cooperative_matrix = true;
    let lacks = unpromised(&capabilities);
    assert!(lacks.contains(&"matrices of 16x16x16 in bf16 with sums in f32"), "{lacks:?}");
    assert!(lacks.contains(&"matrices of 16x8x16 in f16 with sums in f32"), "{lacks:?}");
}

#[test]
fn registers_and_spills_are_found_under_each_drivers_names() {
    let program = |statistics: &[(&str, f64)]| Executable {
        name: "main".to_owned(),
        subgroup_size: 32,
        statistics: statistics
            .iter()
            .map(|(name, value)| Statistic { name: (*name).to_owned(), value: *value })
            .collect(),
    };
    // What a driver tells, then the registers and the spills of it.
    type Case<'a> = (&'a [(&'a str, f64)], Option<u64>, Option<u64>);
    let cases: [Case<'_>; 6] = [
        (&[("SGPRs", 108.0), ("VGPRs", 96.0), ("Spilled SGPRs", 4.0), ("Spilled VGPRs", 2.0)], Some(96), Some(2)),
        (&[("Number of GPRs", 40.0), ("Spills to memory", 3.0), ("Spills to reg", 9.0)], Some(40), Some(3)),
        (&[("Registers used", 32.0), ("Half-registers used", 4.0), ("STP Count", 0.0)], Some(32), Some(0)),
        (&[("GPRs", 128.0), ("Spills", 727.0), ("Fills", 900.0)], Some(128), Some(727)),
        (&[("Max live registers", 90.0), ("Spill count", 649.0), ("Fill count", 700.0)], Some(90), Some(649)),
        (&[("Code size", 90.0)], None, None),
    ];
    for (statistics, of_registers, of_spills) in cases {
        let programs = [program(statistics)];
        assert_eq!((registers(&programs), spills(&programs)), (of_registers, of_spills), "{statistics:?}");
    }
    // Of programs for several subgroup sizes, the larger number counts.
    let several = [program(&[("Spill count", 1.0)]), program(&[("Spill count", 7.0)])];
    assert_eq!(spills(&several), Some(7));
}

#[test]
fn a_check_fails_with_a_test_and_not_with_one_that_did_not_run() {
    let check = |outcome| Check { tests: vec![SelfTest { name: "start", outcome }], ..Check::default() };
    assert!(check(Outcome::NotRun("because")).passed());
    assert!(check(Outcome::Passed(String::new())).passed());
    assert!(!check(Outcome::Failed("wrong".to_owned())).passed());
}

//! Goal: a GGUF file that llama.cpp's converter made from a checkpoint of any supported architecture gives the same
//! tokens and logits as Hugging Face transformers gives for the checkpoint (float32). Method: the files of
//! `tests/fixtures/gguf_families`, which are differences from the random checkpoints in `tests/fixtures/families`, are
//! put together and served in process, all prompts one by one, step by step and with logits: run-ahead, batches and cached
//! prefixes of the same weights are tested in `families.rs`.

use super::families::{cases, exact, in_fragments, step_by_step};
use crate::common::Vulkan;
use crate::harness::models::fixture;
use ostinato::model::gguf;
use std::collections::BTreeSet;

/// Returns the bytes of the GGUF file of a fixture in the folder `checkpoints`; its difference from the checkpoint's file is
/// in the folder `deltas`. `make_gguf_families.py` describes the format of that.
pub fn restored(deltas: &str, checkpoints: &str, name: &str) -> Vec<u8> {
    let delta = fixture(deltas).join(format!("{name}.delta"));
    let delta = std::fs::read(&delta).unwrap_or_else(|error| panic!("{}: {error}", delta.display()));
    let source = fixture(checkpoints).join(name).join("model.safetensors");
    let source = std::fs::read(&source).unwrap_or_else(|error| panic!("{}: {error}", source.display()));
    let mut rest = delta.as_slice();
    let mut take = |count: usize| {
        let (head, tail) = rest.split_at_checked(count)?;
        rest = tail;
        Some(head)
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
    assert_eq!(take(8), Some(&b"OSTDELTA"[..]), "{name}");
    let [length, hash] = [8, 8].map(|bytes| number(take(bytes).expect("the file's length and hash")));
    let mut file: Vec<u8> = Vec::new();
    while let Some(length) = take(4) {
        let (length, offset) = (number(length) as usize, take(8).map(number).expect("an offset"));
        match offset {
            u64::MAX => file.extend(take(length).expect("the bytes themselves")),
            _ => file.extend(&source[offset as usize..][..length]),
        }
    }
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let found = file.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
    assert_eq!((file.len() as u64, found), (length, hash), "{name} is not what the converter wrote");
    file
}

/// Files of models with experts whose kernels for weights in fragments are compared too.
const IN_FRAGMENTS: [&str; 2] = ["gemma4-moe", "qwen2moe-every"];

/// Checks the tokens and logits of GGUF files of an architecture.
fn check(architecture: &str, names: &[&str]) {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    for name in names {
        let file = folder.path().join(format!("{name}.gguf"));
        std::fs::write(&file, restored("gguf_families", "families", name)).expect("written");
        let (found, _) = gguf::open(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found.model.architecture.name(), architecture, "{name}");
        let cases = cases(&fixture("families").join(name));
        assert!(!cases.is_empty(), "{name} has no prompts");
        let host = exact(&vulkan, &file, &cases);
        let replica = host.replicas().next().expect("one model");
        for case in &cases {
            step_by_step(&replica, &format!("{name}.gguf"), case);
        }
        // Files of bfloat16 have their routers in f32.
        if IN_FRAGMENTS.contains(name) {
            in_fragments(&vulkan, &file, &format!("{name}.gguf"), &cases, true);
        }
    }
}

macro_rules! architectures {
    ($($test:ident $architecture:literal $names:expr;)*) => {
        $(#[test]
        fn $test() {
            check($architecture, &$names);
        })*

        #[test]
        fn every_file_belongs_to_a_tested_architecture() {
            let tested: BTreeSet<String> = [$(&$names[..]),*].concat().into_iter().map(str::to_owned).collect();
            let all = std::fs::read_dir(fixture("gguf_families")).expect("the fixtures are in the tree");
            let names = all.map(|entry| entry.expect("a readable folder").file_name().into_string().expect("a name"));
            let found = names.filter_map(|name| name.strip_suffix(".delta").map(str::to_owned));
            assert_eq!(found.collect::<BTreeSet<_>>(), tested);
        }
    };
}

architectures! {
    gemma3_files_agree "gemma3" ["gemma3-text", "gemma3-wrapped"];
    gpt_oss_files_agree "gpt-oss" ["gptoss-mxfp4"];
    gemma2_files_agree "gemma2" ["gemma2-new", "gemma2-old"];
    phi3_files_agree "phi3" ["phi3-long", "phi3-plain", "phi3-short"];
    qwen2_moe_files_agree "qwen2moe" ["qwen2moe-every"];
    granite_files_agree "granite" ["granite-tied", "granite-untied"];
    smollm3_files_agree "smollm3" ["smollm3-list"];
    olmo_files_agree "olmo2" ["olmo2-equal", "olmo2-grouped", "olmo3-new", "olmo3-old"];
    glm4_files_agree "glm4" ["glm4-bias", "glm4-plain"];
    mistral3_files_agree "mistral3" ["ministral3-flat", "ministral3-wrapped"];
    qwen2_files_agree "qwen2" ["qwen2-tied", "qwen2-yarn"];
    mistral_files_agree "llama" ["mistral-nemo"];
    gemma4_files_agree "gemma4" ["gemma4-dense", "gemma4-moe", "gemma4-shared"];
    deepseek2_files_agree "deepseek2" ["deepseek2-groups", "deepseek2-lite"];
    deepseek3_files_agree "deepseek2" ["deepseek3-groups", "deepseek3-halves"];
    blocks_of_latent_projections_agree "deepseek2" ["deepseek3-blocks"];
    glm4_moe_lite_files_agree "deepseek2" ["glm4lite-mtp"];
    glm4_moe_files_agree "glm4moe" ["glm4moe-air", "glm4moe-groups"];
    qwen3_vl_files_agree "qwen3vl" ["qwen3vl-tied", "qwen3vl-untied"];
    qwen3_vl_moe_files_agree "qwen3vlmoe" ["qwen3vlmoe-transposed"];
    qwen2_5_vl_files_agree "qwen2vl" ["qwen25vl-tied"];
    mixtral_files_agree "llama" ["mixtral-plain"];
    seed_oss_files_agree "seed_oss" ["seedoss-biases", "seedoss-plain"];
    ernie_4_5_files_agree "ernie4_5" ["ernie45-biases", "ernie45-plain"];
    exaone4_files_agree "exaone4" ["exaone4-plain", "exaone4-window"];
    olmoe_files_agree "olmoe" ["olmoe-plain"];
    dots1_files_agree "dots1" ["dots1-plain"];
    minimax_m2_files_agree "minimax-m2" ["minimaxm2-part"];
    hunyuan_files_agree "hunyuan-dense" ["hunyuan-alpha", "hunyuan-plain"];
    hunyuan_moe_files_agree "hunyuan-moe" ["hunyuanmoe-lists"];
    ernie_4_5_moe_files_agree "ernie4_5-moe" ["ernie45moe-plain"];
    granite_moe_files_agree "granitemoe" ["granitemoe-plain", "granitemoe-shared"];
    lfm2_files_agree "lfm2" ["lfm2-plain"];
    lfm2_moe_files_agree "lfm2moe" ["lfm2moe-plain"];
    granite_hybrid_files_agree "granite" ["granitehybrid-dense"];
    granite_mamba_files_agree "granitehybrid" ["granitemamba-dense", "granitemamba-moe"];
    nemotron_h_files_agree "nemotron_h" ["nemotronh-dense"];
    nemotron_h_moe_files_agree "nemotron_h_moe" ["nemotronh-moe"];
}

//! The origin of tensors: orders of rows and columns, and the names of every family.

use std::collections::BTreeSet;

use super::super::config::RopeFactors;
use super::super::container::{Array, Header, TensorType, Value};
use super::super::split::{GgufFile, GgufFiles, TensorRef};
use super::super::tensors::{ColumnOrder, RowOrder, Source, StoredAs};
use super::super::{Gguf, GgufError};
use super::{File, small_model, text};
use crate::model::config::{self as model_config, LayerKind, MlpKind, ModelConfig};

fn source(rows: u64, cols: u64, order: RowOrder) -> Source {
    Source {
        at: TensorRef { file: 0, index: 0 },
        shape: vec![rows, cols],
        rows,
        cols,
        first: 0,
        order,
        columns: ColumnOrder::Same,
        change: StoredAs::None,
        scale: None,
        expert: None,
    }
}

/// Returns the stored row of each row, and checks that the runs have each row once and in order.
fn stored_rows(source: &Source) -> Vec<u64> {
    let mut rows = Vec::new();
    for run in source.runs() {
        assert_eq!(run.row, rows.len() as u64);
        rows.extend((0..run.rows).map(|i| run.stored + i * run.stored_step));
    }
    assert_eq!(rows.len() as u64, source.rows);
    rows
}

#[test]
fn rows_stand_where_their_order_says() {
    for (heads, dim) in [(1, 2), (3, 8), (4, 6)] {
        let rows = stored_rows(&source(heads * dim, 1, RowOrder::RotaryPairs { heads, head_dim: dim }));
        for h in 0..heads {
            for i in 0..dim / 2 {
                for j in 0..2 {
                    assert_eq!(rows[(h * dim + j * dim / 2 + i) as usize], h * dim + 2 * i + j);
                }
            }
        }
    }
    for (lead, key_heads, per_key, head_rows) in [(0, 2, 3, 4), (8, 4, 2, 1), (6, 3, 5, 2), (0, 4, 2, 1)] {
        let order = RowOrder::TiledHeads { lead, key_heads, per_key, head_rows };
        let all = lead + key_heads * per_key * head_rows;
        let rows = stored_rows(&source(all, 1, order));
        assert!((0..lead).all(|row| rows[row as usize] == row));
        for k in 0..key_heads {
            for r in 0..per_key {
                for i in 0..head_rows {
                    let row = lead + (k * per_key + r) * head_rows + i;
                    assert_eq!(rows[row as usize], lead + (r * key_heads + k) * head_rows + i);
                }
            }
        }
        // Columns are reordered alike.
        let columns = ColumnOrder::TiledHeads { key_heads, per_key, head_cols: head_rows };
        let columns = Source { columns, ..source(1, all - lead, RowOrder::Same) };
        let stored: Vec<u64> = (0..all - lead).map(|column| lead + columns.columns.stored_column(column)).collect();
        assert_eq!(stored, rows[lead as usize..]);
    }
    let groups = Source { first: 3, ..source(6, 1, RowOrder::Groups { rows: 2, stride: 5 }) };
    assert_eq!(stored_rows(&groups), [3, 4, 8, 9, 13, 14]);
    assert_eq!(stored_rows(&Source { first: 7, ..source(3, 1, RowOrder::Same) }), [7, 8, 9]);
}

#[test]
fn a_part_of_the_rows_is_the_same_part_of_the_runs() {
    let orders = [
        RowOrder::Same,
        RowOrder::RotaryPairs { heads: 3, head_dim: 8 },
        RowOrder::TiledHeads { lead: 6, key_heads: 3, per_key: 2, head_rows: 3 },
        RowOrder::Groups { rows: 4, stride: 9 },
    ];
    for order in orders {
        let source = Source { first: 5, ..source(24, 1, order) };
        let all = stored_rows(&source);
        for row in 0..=24 {
            for rows in 0..=30 {
                let runs = source.runs_of(row, rows);
                let stored = runs.iter().flat_map(|run| (0..run.rows).map(|i| run.stored + i * run.stored_step));
                assert_eq!(stored.collect::<Vec<_>>(), all[row as usize..(row + rows).min(24) as usize]);
                assert!(runs.first().is_none_or(|run| run.row == row));
            }
        }
    }
}

#[test]
fn values_are_restored() {
    let stored = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let order = RowOrder::RotaryPairs { heads: 1, head_dim: 4 };
    assert_eq!(source(4, 2, order).restore(&stored), [1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]);
    let columns = ColumnOrder::TiledHeads { key_heads: 2, per_key: 2, head_cols: 1 };
    let tiled = Source { columns, ..source(2, 4, RowOrder::Same) };
    assert_eq!(tiled.restore(&stored), [1.0, 3.0, 2.0, 4.0, 5.0, 7.0, 6.0, 8.0]);
    let norm = Source { change: StoredAs::PlusOne, ..source(2, 1, RowOrder::Same) };
    assert_eq!(norm.restore(&[1.5, 0.25]), [0.5, -0.75]);
    let a_log = Source { change: StoredAs::NegativeExp, ..source(1, 1, RowOrder::Same) };
    assert_eq!(a_log.restore(&[-1.0]), [0.0]);
    assert!(source(1, 1, RowOrder::Same).is_plain() && !a_log.is_plain() && !tiled.is_plain());
}

/// Returns a hybrid of 4 layers with experts: 2 key heads of 16, 6 value heads of 16.
pub(super) fn hybrid(name: &str, experts: bool, mtp: bool) -> File {
    let mut file = small_model();
    file.tensors.clear();
    file.pairs.retain(|(key, _)| !key.starts_with("llama."));
    file.pairs[0].1 = text(name);
    let mut sizes = vec![
        ("block_count", if mtp { 5 } else { 4 }),
        ("nextn_predict_layers", u32::from(mtp)),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 24),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 4),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 6),
        ("ssm.inner_size", 96),
        ("full_attention_interval", 4),
    ];
    if experts {
        sizes.extend([
            ("expert_count", 3),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 8),
            ("expert_shared_feed_forward_length", 24),
        ]);
    }
    for (key, value) in sizes {
        file = file.pair(&format!("{name}.{key}"), Value::U32(value));
    }
    file = file.pair(&format!("{name}.attention.layer_norm_rms_epsilon"), Value::F32(1e-6));
    let mut tensors: Vec<(String, Vec<u64>)> = vec![
        ("token_embd.weight".to_owned(), vec![32, 4]),
        ("output_norm.weight".to_owned(), vec![32]),
        ("output.weight".to_owned(), vec![32, 4]),
    ];
    for layer in 0..if mtp { 5 } else { 4 } {
        let mut add = |part: &str, dims: &[u64]| tensors.push((format!("blk.{layer}.{part}"), dims.to_vec()));
        add("attn_norm.weight", &[32]);
        add("post_attention_norm.weight", &[32]);
        if layer >= 3 {
            add("attn_q.weight", &[32, 64]);
            add("attn_k.weight", &[32, 16]);
            add("attn_v.weight", &[32, 16]);
            add("attn_output.weight", &[32, 32]);
            add("attn_q_norm.weight", &[16]);
            add("attn_k_norm.weight", &[16]);
        } else {
            add("attn_qkv.weight", &[32, 160]);
            add("attn_gate.weight", &[32, 96]);
            add("ssm_conv1d.weight", &[4, 160]);
            add("ssm_a", &[6]);
            add("ssm_dt.bias", &[6]);
            add("ssm_norm.weight", &[16]);
            add("ssm_out.weight", &[96, 32]);
            if name == "qwen3next" {
                add("ssm_ba.weight", &[32, 12]);
            } else {
                add("ssm_beta.weight", &[32, 6]);
                add("ssm_alpha.weight", &[32, 6]);
            }
        }
        if experts {
            add("ffn_gate_inp.weight", &[32, 3]);
            add("ffn_gate_up_exps.weight", &[32, 16, 3]);
            add("ffn_down_exps.weight", &[8, 32, 3]);
            add("ffn_gate_inp_shexp.weight", &[32]);
        }
        let end = if experts { "_shexp" } else { "" };
        add(&format!("ffn_gate{end}.weight"), &[32, 24]);
        add(&format!("ffn_up{end}.weight"), &[32, 24]);
        add(&format!("ffn_down{end}.weight"), &[24, 32]);
        if layer == 4 {
            add("nextn.eh_proj.weight", &[64, 32]);
            for part in ["enorm", "hnorm", "shared_head_norm"] {
                add(&format!("nextn.{part}.weight"), &[32]);
            }
        }
    }
    with_floats(file, tensors)
}

/// Returns the file with these tensors too, in f32: their names and dimensions.
fn with_floats(file: File, tensors: Vec<(String, Vec<u64>)>) -> File {
    tensors.iter().fold(file, |file, (name, dims)| file.tensor(name, dims, TensorType::F32))
}

fn open(file: &File) -> Result<Gguf, GgufError> {
    open_with(file, &RopeFactors::default())
}

fn open_with(file: &File, factors: &RopeFactors) -> Result<Gguf, GgufError> {
    let bytes = file.bytes();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    Gguf::new(
        GgufFiles::new(vec![GgufFile { path: "m.gguf".into(), bytes: bytes.len() as u64, header }]).unwrap(),
        factors,
    )
}

#[test]
fn hybrids_have_all_their_tensors() {
    let cases =
        [("qwen35", false, true), ("qwen35moe", true, true), ("qwen35moe", true, false), ("qwen3next", true, false)];
    for (name, experts, mtp) in cases {
        let file = hybrid(name, experts, mtp);
        let gguf = open(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let json = std::str::from_utf8(gguf.file("config.json").unwrap()).unwrap();
        let config = ModelConfig::parse(json, None).unwrap();
        assert_eq!((config.layers, config.mtp_layers), (4, u32::from(mtp)));
        assert_eq!(config.layers_of(LayerKind::Attention).collect::<Vec<_>>(), [3]);
        let delta = model_config::DeltaNet {
            key_heads: 2,
            value_heads: 6,
            key_dim: 16,
            value_dim: 16,
            conv_kernel: 4,
            tiled: false,
            space: None,
        };
        assert_eq!((config.delta, config.attention_kinds[0].rope.as_ref().unwrap().rotary_dim), (Some(delta), 4));
        let expected = experts.then_some(model_config::Experts {
            count: 3,
            chosen: 2,
            inner: 8,
            shared_inner: Some(24),
            shared_gate: true,
            routing: None,
            normalise: true,
            bias: false,
            beside_dense: false,
        });
        assert_eq!(config.experts, expected);
        // Every GGUF tensor is used.
        let used: BTreeSet<usize> = gguf.sources.values().map(|source| source.at.index).collect();
        assert_eq!(used.len(), file.tensors.len(), "{name}");
        let get = |name: &str| &gguf.sources[name];
        let tiled = |lead: u64, head_rows: u64| match name {
            "qwen3next" => RowOrder::Same,
            _ => RowOrder::TiledHeads { lead, key_heads: 2, per_key: 3, head_rows },
        };
        let first = "model.layers.0.linear_attn.";
        assert_eq!(get(&format!("{first}in_proj_qkv.weight")).order, tiled(64, 16));
        assert_eq!(get(&format!("{first}in_proj_z.weight")).order, tiled(0, 16));
        assert_eq!(get(&format!("{first}A_log")).order, tiled(0, 1));
        assert_eq!(get(&format!("{first}A_log")).change, StoredAs::NegativeExp);
        assert_eq!(get(&format!("{first}conv1d.weight")).shape, [160, 1, 4]);
        assert_eq!(get(&format!("{first}norm.weight")).change, StoredAs::None);
        assert_eq!(get("model.norm.weight").change, StoredAs::PlusOne);
        assert_eq!(get(&format!("{first}out_proj.weight")).columns == ColumnOrder::Same, name == "qwen3next");
        if experts {
            let up = get("model.layers.3.mlp.experts.2.up_proj.weight");
            assert_eq!((up.first, up.rows, up.cols, up.expert), (2 * 16 + 8, 8, 32, Some(2)));
            assert_eq!(get("model.layers.3.mlp.shared_expert_gate.weight").shape, [1, 32]);
        }
        assert_eq!(gguf.sources.contains_key("mtp.layers.0.self_attn.q_proj.weight"), mtp);
        if mtp {
            assert_eq!(get("mtp.fc.weight").shape, [32, 64]);
            // A file may say that it has the block, and not have it.
            let mut without = file.clone();
            without.tensors.retain(|tensor| !tensor.name.starts_with("blk.4."));
            assert!(!open(&without).unwrap().sources.contains_key("mtp.fc.weight"));
        }
    }
}

#[test]
fn too_many_experts_are_refused_before_they_are_listed() {
    let mut file = hybrid("qwen35moe", true, false);
    for (key, value) in &mut file.pairs {
        match key.as_str() {
            "qwen35moe.block_count" => *value = Value::U32(4096),
            "qwen35moe.expert_count" => *value = Value::U32(4096),
            _ => {}
        }
    }
    assert_eq!(
        open(&file).unwrap_err().to_string(),
        "1 problems, first: 4096 layers of 4096 experts are too many, at most 1048576 tensors are supported"
    );
}

/// Returns a model of DeepSeek's family with two heads: a dense layer, then one with two experts and a shared one. Its
/// latent vector has 16 dimensions, heads 16 + 8 and values of 8.
fn latent(split: bool) -> File {
    let mut file = small_model();
    file.tensors.clear();
    file.pairs.retain(|(key, _)| !key.starts_with("llama."));
    file.pairs[0].1 = text("deepseek2");
    let [key, value] = if split {
        ["attention.key_length_mla", "attention.value_length_mla"]
    } else {
        ["attention.key_length", "attention.value_length"]
    };
    for (key, size) in [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 24),
        ("attention.head_count", 2),
        ("attention.head_count_kv", if split { 1 } else { 2 }),
        ("attention.kv_lora_rank", 16),
        ("attention.q_lora_rank", 8),
        (key, 24),
        (value, 8),
        ("rope.dimension_count", 8),
        ("leading_dense_block_count", 1),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_feed_forward_length", 8),
        ("expert_shared_count", 1),
    ] {
        file = file.pair(&format!("deepseek2.{key}"), Value::U32(size));
    }
    file = file.pair("deepseek2.attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    let mut tensors: Vec<(String, Vec<u64>)> = vec![
        ("token_embd.weight".to_owned(), vec![32, 4]),
        ("output_norm.weight".to_owned(), vec![32]),
        ("output.weight".to_owned(), vec![32, 4]),
    ];
    for layer in 0..2 {
        let mut add = |part: &str, dims: &[u64]| tensors.push((format!("blk.{layer}.{part}"), dims.to_vec()));
        add("attn_norm.weight", &[32]);
        add("ffn_norm.weight", &[32]);
        add("attn_q_a.weight", &[32, 8]);
        add("attn_q_a_norm.weight", &[8]);
        add("attn_q_b.weight", &[8, 48]);
        add("attn_kv_a_mqa.weight", &[32, 24]);
        add("attn_kv_a_norm.weight", &[16]);
        if split {
            add("attn_k_b.weight", &[16, 16, 2]);
            add("attn_v_b.weight", &[16, 8, 2]);
        } else {
            add("attn_kv_b.weight", &[16, 48]);
        }
        add("attn_output.weight", &[16, 32]);
        if layer == 0 {
            add("ffn_gate.weight", &[32, 24]);
            add("ffn_up.weight", &[32, 24]);
            add("ffn_down.weight", &[24, 32]);
        } else {
            add("ffn_gate_inp.weight", &[32, 2]);
            add("exp_probs_b.bias", &[2]);
            for end in ["exps", "shexp"] {
                let count = if end == "exps" { vec![2] } else { Vec::new() };
                add(&format!("ffn_gate_{end}.weight"), &[vec![32, 8], count.clone()].concat());
                add(&format!("ffn_up_{end}.weight"), &[vec![32, 8], count.clone()].concat());
                add(&format!("ffn_down_{end}.weight"), &[vec![8, 32], count].concat());
            }
        }
    }
    with_floats(file, tensors)
}

#[test]
fn latent_projections_are_found_together_and_apart() {
    for split in [true, false] {
        let file = latent(split);
        let gguf = open(&file).unwrap();
        let config = ModelConfig::parse(std::str::from_utf8(gguf.file("config.json").unwrap()).unwrap(), None).unwrap();
        let expected = model_config::Latent { q_rank: Some(8), kv_rank: 16, nope: 16, rope: 8, value_dim: 8 };
        assert_eq!(config.latent, Some(expected));
        let experts = config.experts.unwrap();
        assert_eq!((experts.shared_inner, experts.shared_gate), (Some(8), false));
        let used: BTreeSet<usize> = gguf.sources.values().map(|source| source.at.index).collect();
        assert_eq!(used.len(), file.tensors.len());
        let has = |part: &str| gguf.sources.contains_key(&format!("model.layers.1.{part}"));
        assert_eq!([has("self_attn.kv_b_proj.weight"), has("self_attn.k_b_proj.weight")], [!split, split]);
        assert!(has("mlp.gate.e_score_correction_bias") && has("mlp.shared_experts.down_proj.weight"));
        assert!(has("mlp.experts.1.up_proj.weight") && !has("mlp.up_proj.weight"));
        if split {
            let keys = &gguf.sources["model.layers.0.self_attn.k_b_proj.weight"];
            assert_eq!((&keys.shape[..], keys.rows, keys.cols), (&[2, 16, 16][..], 32, 16));
        }
        // A tensor of each form is refused if its dimensions are not those of the keys.
        let mut wrong = file.clone();
        let name = if split { "blk.1.attn_k_b.weight" } else { "blk.1.attn_kv_b.weight" };
        let tensor = wrong.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        tensor.dims[1] -= 8;
        let expected = if split { "[16, 8, 2], must have [16, 16, 2]" } else { "[16, 40], must have [16, 48]" };
        let error = open(&wrong).unwrap_err().to_string();
        assert_eq!(error, format!("1 problems, first: tensor {name} has the dimensions {expected}"));
    }
    let mut none = latent(true);
    none.tensors.retain(|tensor| tensor.name != "blk.1.attn_k_b.weight");
    assert_eq!(open(&none).unwrap_err().to_string(), "1 problems, first: tensor blk.1.attn_k_b.weight is missing");
}

/// Goal: factors that are tensors of the model are not taken for those of quantised blocks. Method: a model of Gemma 4's
/// family with experts, whose last layer reads the keys and values of the second.
#[test]
fn factors_of_the_model_are_no_factors_of_blocks() {
    let mut file = small_model();
    file.tensors.clear();
    file.pairs.retain(|(key, _)| !key.starts_with("llama."));
    file.pairs[0].1 = text("gemma4");
    for (key, size) in [
        ("block_count", 3),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 24),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.key_length_swa", 8),
        ("attention.sliding_window", 16),
        ("attention.shared_kv_layers", 1),
        ("embedding_length_per_layer_input", 8),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 8),
    ] {
        file = file.pair(&format!("gemma4.{key}"), Value::U32(size));
    }
    let pattern = Value::Array(Array::Bool(vec![true, false, false]));
    file = file
        .pair("gemma4.attention.layer_norm_rms_epsilon", Value::F32(1e-6))
        .pair("gemma4.attention.sliding_window_pattern", pattern);
    let mut tensors: Vec<(String, Vec<u64>)> = vec![
        ("token_embd.weight".to_owned(), vec![32, 4]),
        ("output_norm.weight".to_owned(), vec![32]),
        ("rope_freqs.weight".to_owned(), vec![8]),
        ("per_layer_token_embd.weight".to_owned(), vec![24, 4]),
        ("per_layer_model_proj.weight".to_owned(), vec![32, 24]),
        ("per_layer_proj_norm.weight".to_owned(), vec![8]),
    ];
    for (layer, dim) in [(0, 8), (1, 16), (2, 16)] {
        let mut add = |part: &str, dims: &[u64]| tensors.push((format!("blk.{layer}.{part}"), dims.to_vec()));
        for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"] {
            add(&format!("{norm}.weight"), &[32]);
        }
        for norm in ["post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"] {
            add(&format!("{norm}.weight"), &[32]);
        }
        add("attn_q.weight", &[32, 2 * dim]);
        add("attn_q_norm.weight", &[dim]);
        add("attn_output.weight", &[2 * dim, 32]);
        if layer < 2 {
            add("attn_k.weight", &[32, dim]);
            add("attn_v.weight", &[32, dim]);
            add("attn_k_norm.weight", &[dim]);
        }
        add("ffn_gate.weight", &[32, 24]);
        add("ffn_up.weight", &[32, 24]);
        add("ffn_down.weight", &[24, 32]);
        add("ffn_gate_inp.weight", &[32, 4]);
        add("ffn_gate_inp.scale", &[32]);
        add("ffn_gate_up_exps.weight", &[32, 16, 4]);
        add("ffn_down_exps.weight", &[8, 32, 4]);
        add("ffn_down_exps.scale", &[4]);
        add("inp_gate.weight", &[32, 8]);
        add("proj.weight", &[8, 32]);
        add("layer_output_scale.weight", &[1]);
    }
    let file = with_floats(file, tensors);
    let still = [1.0, 1.0, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30];
    let factors = RopeFactors { llama3: Some(still.to_vec()), long: None };
    let gguf = open_with(&file, &factors).unwrap();
    let config = ModelConfig::parse(std::str::from_utf8(gguf.file("config.json").unwrap()).unwrap(), None).unwrap();
    assert_eq!(config.cache_of, [0, 1, 1]);
    assert!(gguf.sources.values().all(|source| source.scale.is_none()));
    let shape = |name: &str| gguf.sources[&format!("model.layers.2.{name}")].shape.clone();
    assert_eq!(
        (shape("router.scale"), shape("router.per_expert_scale"), shape("layer_scalar")),
        (vec![32], vec![4], vec![1])
    );
    assert_eq!(shape("experts.3.up_proj.weight"), [8, 32]);
    assert!(!gguf.sources.contains_key("model.layers.2.self_attn.k_proj.weight"));
    // Every tensor is used but that of the divisors, which is read before.
    let used: BTreeSet<usize> = gguf.sources.values().map(|source| source.at.index).collect();
    assert_eq!(used.len(), file.tensors.len() - 1);
}

/// Returns a model of Nemotron-H's family of two state spaces, attention and two MLPs, in the order M-*M-: 2 heads of 16,
/// and state spaces of 4 heads of 16 in 2 groups. `mtp`: there is a block behind the layers, of attention and of experts.
pub(super) fn single_blocks(experts: bool, mtp: bool) -> File {
    let name = if experts { "nemotron_h_moe" } else { "nemotron_h" };
    let mut file = small_model();
    file.tensors.clear();
    file.pairs.retain(|(key, _)| !key.starts_with("llama."));
    file.pairs[0].1 = text(name);
    let behind = usize::from(mtp);
    let mut sizes = vec![
        ("block_count", 5 + behind as u32),
        ("nextn_predict_layers", behind as u32),
        ("context_length", 64),
        ("embedding_length", 32),
        ("vocab_size", 4),
        ("attention.head_count", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        // The converter takes it from other sizes than the heads'. Nothing is rotated.
        ("rope.dimension_count", 20),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 32),
        ("ssm.group_count", 2),
        ("ssm.inner_size", 64),
        ("ssm.time_step_rank", 4),
    ];
    if experts {
        sizes.extend([
            ("expert_count", 4),
            ("expert_used_count", 2),
            ("expert_group_count", 1),
            ("expert_group_used_count", 1),
            ("expert_shared_count", 1),
            ("expert_feed_forward_length", 48),
            ("expert_shared_feed_forward_length", 80),
        ]);
    }
    for (key, value) in sizes {
        file = file.pair(&format!("{name}.{key}"), Value::U32(value));
    }
    let list = |sizes: [i32; 6]| Value::Array(Array::I32(sizes[..5 + behind].into()));
    file = file
        .pair(&format!("{name}.attention.head_count_kv"), list([0, 0, 1, 0, 0, 1]))
        .pair(&format!("{name}.feed_forward_length"), list([0, 48, 0, 0, 48, 48]))
        .pair(&format!("{name}.attention.layer_norm_rms_epsilon"), Value::F32(1e-5))
        .pair(&format!("{name}.rope.scaling.finetuned"), Value::Bool(false));
    if experts {
        file = file
            .pair("nemotron_h_moe.expert_weights_norm", Value::Bool(true))
            .pair("nemotron_h_moe.expert_weights_scale", Value::F32(2.5));
    }
    let mut tensors: Vec<(String, Vec<u64>)> = vec![
        ("token_embd.weight".to_owned(), vec![32, 4]),
        ("output_norm.weight".to_owned(), vec![32]),
        ("output.weight".to_owned(), vec![32, 4]),
    ];
    for (layer, kinds) in ["M", "-", "*", "M", "-", "*-"].into_iter().enumerate().take(5 + behind) {
        let mut add = |part: &str, dims: &[u64]| tensors.push((format!("blk.{layer}.{part}"), dims.to_vec()));
        add("attn_norm.weight", &[32]);
        for kind in kinds.chars() {
            match kind {
                'M' => {
                    add("ssm_in.weight", &[32, 64 + 64 + 2 * 2 * 32 + 4]);
                    add("ssm_conv1d.weight", &[4, 64 + 2 * 2 * 32]);
                    add("ssm_conv1d.bias", &[64 + 2 * 2 * 32]);
                    add("ssm_a", &[1, 4]);
                    add("ssm_d", &[1, 4]);
                    add("ssm_dt.bias", &[4]);
                    add("ssm_norm.weight", &[32, 2]);
                    add("ssm_out.weight", &[64, 32]);
                }
                '*' => {
                    add("attn_q.weight", &[32, 32]);
                    add("attn_k.weight", &[32, 16]);
                    add("attn_v.weight", &[32, 16]);
                    add("attn_output.weight", &[32, 32]);
                }
                _ if experts => {
                    add("ffn_gate_inp.weight", &[32, 4]);
                    add("exp_probs_b.bias", &[4]);
                    add("ffn_up_exps.weight", &[32, 48, 4]);
                    add("ffn_down_exps.weight", &[48, 32, 4]);
                    add("ffn_up_shexp.weight", &[32, 80]);
                    add("ffn_down_shexp.weight", &[80, 32]);
                }
                _ => {
                    add("ffn_up.weight", &[32, 48]);
                    add("ffn_down.weight", &[48, 32]);
                }
            }
        }
        if layer == 5 {
            add("post_attention_norm.weight", &[32]);
            add("nextn.eh_proj.weight", &[64, 32]);
            for part in ["enorm", "hnorm", "shared_head_norm"] {
                add(&format!("nextn.{part}.weight"), &[32]);
            }
        }
    }
    with_floats(file, tensors)
}

/// Goal: files of Nemotron-H open with each layer as what the lists say, and every tensor of the layers is used; a block
/// behind the layers is left out.
#[test]
fn layers_of_one_block_have_all_their_tensors() {
    for (experts, mtp) in [(false, false), (true, false), (true, true)] {
        let file = single_blocks(experts, mtp);
        let gguf = open(&file).unwrap_or_else(|error| panic!("{experts}, {mtp}: {error}"));
        let config = ModelConfig::parse(std::str::from_utf8(gguf.file("config.json").unwrap()).unwrap(), None).unwrap();
        let (space, none, full) = (LayerKind::GatedDelta, LayerKind::None, LayerKind::Attention);
        assert_eq!((config.layers, config.mtp_layers), (5, 0));
        assert_eq!(config.layer_kinds, [space, none, full, space, none]);
        let mlp = if experts { MlpKind::Experts } else { MlpKind::Dense };
        assert_eq!(config.mlp_kinds, [MlpKind::None, mlp, MlpKind::None, MlpKind::None, mlp]);
        assert!(config.attention(2).rope.is_none() && !config.activation.has_gate() && !config.tied);
        let delta = config.delta.unwrap();
        assert_eq!((delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim), (2, 4, 32, 16));
        let space = model_config::StateSpace { conv_bias: true, norm_groups: 2 };
        assert_eq!((delta.space, config.rms_eps), (Some(space), 1e-5));
        let of_experts =
            config.experts.map(|e| (e.count, e.chosen, e.inner, e.shared_inner, e.normalise, e.shared_gate));
        assert_eq!(of_experts, experts.then_some((4, 2, 48, Some(80), true, false)));
        let routing = config.experts.and_then(|experts| experts.routing);
        let routing = routing.map(|r| (r.sigmoid, r.choice_bias, r.groups, r.kept, r.factor));
        assert_eq!(routing, experts.then_some((true, true, 1, 1, 2.5)));

        let used: BTreeSet<usize> = gguf.sources.values().map(|source| source.at.index).collect();
        let of_layers = file.tensors.iter().filter(|tensor| !tensor.name.starts_with("blk.5.")).count();
        assert_eq!(used, (0..of_layers).collect());
        let has = |name: &str| gguf.sources.contains_key(&format!("model.layers.{name}"));
        assert!(has("2.norm.weight") && has("2.mixer.q_proj.weight") && !has("2.post_attention_layernorm.weight"));
        assert_eq!(gguf.sources["model.layers.2.mixer.q_proj.weight"].order, RowOrder::Same);
        assert_eq!([has("1.mixer.up_proj.weight"), has("1.mixer.experts.3.up_proj.weight")], [!experts, experts]);
        assert_eq!(
            [has("1.mixer.gate.e_score_correction_bias"), has("4.mixer.shared_experts.down_proj.weight")],
            [experts, experts]
        );
        assert!(gguf.sources.keys().all(|name| !name.contains("gate_proj") && !name.starts_with("model.layers.5.")));
        let space = |part: &str| &gguf.sources[&format!("model.layers.3.mixer.{part}")];
        assert_eq!((space("A_log").change, space("A_log").shape.as_slice()), (StoredAs::NegativeExp, &[4][..]));
        assert_eq!(
            (space("norm.weight").shape.as_slice(), space("conv1d.weight").shape.as_slice()),
            (&[64][..], &[192, 1, 4][..])
        );
    }
}

#[test]
fn tensors_of_layers_of_one_block_are_checked() {
    let refused = |file: &File| open(file).unwrap_err().to_string();
    let without = |mut file: File, name: &str| {
        file.tensors.retain(|tensor| tensor.name != name);
        file
    };
    for (experts, name) in [
        (false, "blk.0.ssm_in.weight"),
        (false, "blk.1.ffn_up.weight"),
        (false, "blk.2.attn_k.weight"),
        (true, "blk.1.ffn_down_exps.weight"),
        (true, "blk.4.exp_probs_b.bias"),
        (true, "blk.4.ffn_up_shexp.weight"),
    ] {
        let error = refused(&without(single_blocks(experts, false), name));
        assert_eq!(error, format!("1 problems, first: tensor {name} is missing"));
    }
    // What the layers' tensors have decides whether there are biases, wherever the last layer of the kind stands.
    let biased = single_blocks(false, false)
        .tensor("blk.1.ffn_up.bias", &[48], TensorType::F32)
        .tensor("blk.1.ffn_down.bias", &[32], TensorType::F32)
        .tensor("blk.4.ffn_up.bias", &[48], TensorType::F32)
        .tensor("blk.4.ffn_down.bias", &[32], TensorType::F32);
    let gguf = open(&biased).unwrap();
    assert!(gguf.sources.contains_key("model.layers.1.mixer.down_proj.bias") && gguf.model.mlp_bias);
    let error = refused(&without(biased, "blk.4.ffn_down.bias"));
    assert_eq!(error, "1 problems, first: tensor blk.4.ffn_down.bias is missing");
    let some = single_blocks(false, false).tensor("blk.2.attn_q.bias", &[32], TensorType::F32);
    let Err(GgufError::Tensors(problems)) = open(&some) else { panic!("it is refused") };
    let missing = ["k", "v"].map(|part| format!("tensor blk.2.attn_{part}.bias is missing"));
    assert_eq!(problems.iter().map(ToString::to_string).collect::<Vec<_>>(), missing);
    // Projections around the experts, which files have with moe_latent_size.
    let latent = single_blocks(true, false).tensor("blk.1.ffn_latent_down.weight", &[32, 32], TensorType::F32);
    assert!(refused(&latent).starts_with("1 problems, first: tensor blk.1.ffn_latent_down.weight would not be used"));
    // Only the tensors say whether the convolution has biases.
    let mut plain = single_blocks(false, false);
    plain.tensors.retain(|tensor| !tensor.name.ends_with("ssm_conv1d.bias"));
    assert!(!open(&plain).unwrap().model.space.unwrap().conv_bias);
}

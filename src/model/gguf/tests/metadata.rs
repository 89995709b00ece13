//! The configuration: what of the metadata is understood, refused and written.

use super::super::config::{GgufModel, GgufRope, Llama3, RopeFactors, SpecialIds, fit_llama3};
use super::super::container::{Array, TensorType, Value};
use super::super::split::{GgufFile, GgufFiles};
use super::super::{Gguf, GgufError};
use super::{File, small_model, text};
use crate::model::checkpoint::{Checkpoint, CheckpointProblem};
use crate::model::config::{self as model_config, ModelConfig};
use crate::model::embedding::{self, Embedding, Pooling};
use crate::quant::blocks::BlockType;

fn open(file: &File, factors: Option<&[f32]>) -> Result<Gguf, GgufError> {
    let bytes = file.bytes();
    let header = super::super::container::Header::parse(&bytes, bytes.len() as u64).unwrap();
    let part = GgufFile { path: "m.gguf".into(), bytes: bytes.len() as u64, header };
    let factors = RopeFactors { llama3: factors.map(<[f32]>::to_vec), long: None };
    Gguf::new(GgufFiles::new(vec![part]).unwrap(), &factors)
}

fn refused(file: &File) -> String {
    open(file, None).expect_err("it is refused").to_string()
}

fn parsed(file: &File) -> ModelConfig {
    let gguf = open(file, None).unwrap();
    let file = |name: &str| std::str::from_utf8(gguf.file(name).unwrap()).unwrap();
    ModelConfig::parse(file("config.json"), Some(file("generation_config.json"))).unwrap()
}

/// Returns the small model with a metadata value replaced or added.
fn with(key: &str, value: Value) -> File {
    let mut file = small_model();
    file.pairs.retain(|(other, _)| other != key);
    file.pair(key, value)
}

#[test]
fn a_small_model_is_understood() {
    let config = parsed(&small_model());
    assert_eq!(config.architecture, model_config::Architecture::Llama);
    assert_eq!((config.hidden, config.intermediate, config.layers), (8, 4, 1));
    assert_eq!(
        (
            config.attention_kinds[0].heads,
            config.attention_kinds[0].kv_heads,
            config.attention_kinds[0].head_dim,
            config.vocab
        ),
        (2, 1, 4, 4)
    );
    assert_eq!(
        (config.rms_eps, config.attention_kinds[0].rope.as_ref().unwrap().theta, config.context),
        (1e-6, 500_000.0, 64)
    );
    assert_eq!((config.tied, config.qkv_bias, config.mlp_bias), (true, false, false));
    assert_eq!((config.eos, config.bos), (vec![3], None));
}

#[test]
fn scalings_of_the_rotary_frequencies_are_translated() {
    let scaling = |pairs: &[(&str, Value)]| {
        let mut file = small_model();
        for (key, value) in pairs {
            file = file.pair(&format!("llama.rope.{key}"), value.clone());
        }
        parsed(&file).attention_kinds[0].rope.clone().unwrap().scaling
    };
    use model_config::RopeScaling as Expected;
    assert_eq!(scaling(&[("scaling.type", text("none"))]), Expected::Default);
    let linear = Expected::Linear { factor: 2.5 };
    assert_eq!(scaling(&[("scaling.type", text("linear")), ("scaling.factor", Value::F32(2.5))]), linear);
    assert_eq!(scaling(&[("scale_linear", Value::F32(2.5))]), linear);
    let yarn = [
        ("scaling.type", text("yarn")),
        ("scaling.factor", Value::F32(4.0)),
        ("scaling.original_context_length", Value::U32(32)),
    ];
    let expected = |beta_fast: f64, attention_factor: Option<f64>| Expected::Yarn {
        factor: 4.0,
        original_context: 32.0,
        beta_fast,
        beta_slow: 1.0,
        truncate: true,
        attention_factor,
        mscale: None,
        mscale_all_dim: None,
    };
    assert_eq!(scaling(&yarn), expected(32.0, None));
    let more = [("scaling.yarn_beta_fast", Value::F32(16.0)), ("scaling.yarn_attn_factor", Value::F32(1.1))];
    assert_eq!(scaling(&[&yarn[..], &more].concat()), expected(16.0, Some(1.1)));
    assert_eq!(
        refused(&small_model().pair("llama.rope.scaling.type", text("longrope"))),
        "llama.rope.scaling.type is \"longrope\", which is not supported (none, linear and yarn are)"
    );
}

#[test]
fn llama_3s_scaling_is_found_from_its_factors() {
    for (theta, dim) in [(500_000.0, 128u64), (500_000.0, 64), (10_000.0, 128), (1e6, 256), (500_000.0, 80)] {
        for (factor, high, context) in [
            (8.0, 4.0, 8192.0),
            (32.0, 4.0, 8192.0),
            (4.0, 4.0, 4096.0),
            (16.0, 4.0, 131_072.0),
            (2.0, 8.0, 8192.0),
            (8.0, 2.5, 6000.0),
        ] {
            let llama3 = Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: high, original_context: context };
            let factors: Vec<f32> = (0..dim / 2)
                .map(|i| llama3.divisor(std::f64::consts::TAU * f64::powf(theta, 2.0 * i as f64 / dim as f64)) as f32)
                .collect();
            let found = fit_llama3(&factors, theta, dim).unwrap();
            assert_eq!(found, GgufRope::Llama3(llama3), "theta {theta}, {dim} dimensions");
            // A factor that does not belong to the others is noticed.
            for index in 0..factors.len() - 1 {
                let mut odd = factors.clone();
                odd[index] *= 1.001;
                let odd = fit_llama3(&odd, theta, dim);
                assert_ne!(odd.as_ref(), Ok(&found), "theta {theta}, {dim} dimensions, {index}");
            }
        }
    }
    assert_eq!(fit_llama3(&[1.0; 4], 1e4, 8), Ok(GgufRope::Default));
    for bad in [&[1.0; 3][..], &[1.0, 0.5, 1.0, 1.0], &[1.0, f32::NAN, 1.0, 1.0], &[1.0, f32::INFINITY, 1.0, 2.0]] {
        assert!(fit_llama3(bad, 1e4, 8).is_err(), "{bad:?}");
    }
    let file = small_model().tensor("rope_freqs.weight", &[2], TensorType::F32);
    assert_eq!(refused(&file), "tensor rope_freqs.weight has no values, which is not the scaling of Llama 3");
    assert!(open(&file, Some(&[1.0, 1.0])).is_ok());
    let error = open(&file, Some(&[2.0, 1.0])).unwrap_err().to_string();
    assert_eq!(error, "tensor rope_freqs.weight has 2 values from 1 to 2, which is not the scaling of Llama 3");
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let list = "llama, qwen2, qwen3, qwen3moe, qwen3next, qwen35, qwen35moe, qwen2moe, gemma2, gemma3, gemma-embedding, \
                gpt-oss, phi3, granite, smollm3, olmo2, glm4, mistral3, gemma4, deepseek2, glm4moe, qwen3vl, \
                qwen3vlmoe, qwen2vl, seed_oss, ernie4_5, exaone4, olmoe, dots1, minimax-m2, hunyuan-dense, \
                hunyuan-moe, ernie4_5-moe, granitemoe, lfm2, lfm2moe, granitehybrid, nemotron_h, \
                nemotron_h_moe are";
    for name in ["gemma4-assistant", "deepseek32", "phimoe", ""] {
        let error = refused(&with("general.architecture", text(name)));
        assert_eq!(error, format!("architecture {name:?} is not supported ({list})"));
    }
    let foreign = [
        ("llama.attention.sliding_window", Value::U32(4096), "sliding-window attention"),
        ("llama.attention.causal", Value::Bool(false), "attention to later tokens"),
        ("llama.logit_scale", Value::F32(0.5), "a scale of the logits"),
        ("llama.expert_gating_func", Value::U32(2), "a router without softmax"),
    ];
    for (key, value, what) in foreign {
        let error = refused(&with(key, value.clone()));
        assert_eq!(error, format!("{key} is {value}, which is not supported ({what})"));
    }
    for (key, value) in [
        ("llama.attention.sliding_window", Value::U32(0)),
        ("llama.expert_count", Value::U32(0)),
        ("llama.logit_scale", Value::F32(1.0)),
    ] {
        assert!(open(&with(key, value), None).is_ok(), "{key}");
    }
    for key in ["block_count", "embedding_length", "attention.head_count", "context_length"] {
        let key = format!("llama.{key}");
        let mut file = small_model();
        file.pairs.retain(|(other, _)| *other != key);
        assert_eq!(refused(&file), format!("the metadata key {key} is missing"));
    }
    assert_eq!(
        refused(&with("llama.block_count", Value::U32(5000))),
        "llama.block_count is 5000, must be an integer from 1 to 4096"
    );
    assert_eq!(
        refused(&with("llama.embedding_length", Value::U32(16))),
        "llama.embedding_length is 16, tensor token_embd.weight has 8"
    );
    assert_eq!(
        refused(&with("llama.vocab_size", Value::U32(5))),
        "llama.vocab_size is 5, tensor token_embd.weight has 4"
    );
    let by_layer = |heads: &[i32]| with("llama.attention.head_count", Value::Array(Array::I32(heads.into())));
    assert!(open(&by_layer(&[2]), None).is_ok());
    assert_eq!(
        refused(&by_layer(&[2, 4])),
        "llama.attention.head_count is a list of 2, must be the same in all layers"
    );
}

#[test]
fn tensors_are_checked_against_the_metadata() {
    let mut file = small_model();
    file.tensors.retain(|tensor| tensor.name != "blk.0.attn_k.weight");
    let norm = file.tensors.iter_mut().find(|tensor| tensor.name == "blk.0.ffn_norm.weight").unwrap();
    (norm.dims, norm.bytes) = (vec![4], 16);
    let Err(GgufError::Tensors(problems)) = open(&file, None) else { panic!("it is refused") };
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        problems,
        ["tensor blk.0.ffn_norm.weight has the dimensions [4], must have [8]", "tensor blk.0.attn_k.weight is missing"]
    );
    let mut file = small_model();
    file.tensors[1].kind = TensorType::Blocks(BlockType::Q4_0).id();
    file.tensors[1].dims = vec![32];
    for (key, value) in [("llama.embedding_length", 32), ("llama.attention.key_length", 4)] {
        file.pairs.retain(|(other, _)| other != key);
        file = file.pair(key, Value::U32(value));
    }
    file.tensors[0].dims = vec![32, 1];
    let Err(GgufError::Tensors(problems)) = open(&file, None) else { panic!("it is refused") };
    assert_eq!(problems[0].to_string(), "tensor output_norm.weight is a vector of type Q4_0, must not be quantised");
}

/// Goal: a file does not load with biases or norms that the forward pass would leave out.
#[test]
fn biases_and_norms_that_nothing_uses_are_refused() {
    let f32 = TensorType::F32;
    let refused_for = |file: File| match open(&file, None) {
        Err(GgufError::Tensors(problems)) => problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
        other => panic!("{:?}", other.map(|_| ())),
    };
    let text = |tensor: &str| {
        vec![format!("tensor {tensor} would not be used: the architecture, or the last layer, has no such tensor")]
    };
    for tensor in ["blk.0.attn_q_norm.weight", "blk.0.attn_sub_norm.weight", "blk.0.ffn_gate_inp.bias"] {
        assert_eq!(refused_for(small_model().tensor(tensor, &[4], f32)), text(tensor));
    }
    // The last layer decides whether there are biases.
    let mut file = with("llama.block_count", Value::U32(2));
    for index in 0..file.tensors.len() {
        let (name, kind) = (file.tensors[index].name.clone(), f32);
        if let Some(part) = name.strip_prefix("blk.0.") {
            let dims = file.tensors[index].dims.clone();
            file = file.tensor(&format!("blk.1.{part}"), &dims, kind);
        }
    }
    open(&file, None).unwrap();
    assert_eq!(refused_for(file.tensor("blk.0.attn_q.bias", &[8], f32)), text("blk.0.attn_q.bias"));
    // Drafting blocks, divisors of frequencies and other parts may be there.
    let mut file = small_model();
    for tensor in ["blk.1.attn_q.bias", "blk.0.nextn.enorm.weight", "v.blk.0.ln1.bias", "mm.0.bias"] {
        file = file.tensor(tensor, &[8], f32);
    }
    open(&file, None).unwrap();
}

/// Goal: a bias of the attention's output that the configuration has not is refused, unless it is zero.
#[test]
fn a_bias_of_the_output_without_those_of_the_input_is_refused_unless_it_is_zero() {
    let file = small_model().tensor("blk.0.attn_output.bias", &[8], TensorType::F32);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut bytes = file.bytes();
    let header = super::super::container::Header::parse(&bytes, bytes.len() as u64).unwrap();
    let bias = header.tensors.iter().find(|tensor| tensor.name == "blk.0.attn_output.bias").unwrap();
    let at = bias.offset as usize;
    bytes[at..at + bias.bytes as usize].fill(0);
    std::fs::write(&path, &bytes).unwrap();
    Checkpoint::open(&path).unwrap();
    bytes[at + 31] = 0x3f;
    std::fs::write(&path, &bytes).unwrap();
    let problems = Checkpoint::open(&path).unwrap_err().problems;
    let tensor = "model.layers.0.self_attn.o_proj.bias".to_owned();
    assert_eq!(problems, [CheckpointProblem::UnusedTensor { tensor, what: "bias" }]);
}

#[test]
fn the_fraction_of_rotated_dimensions_is_exact() {
    let mut file = small_model();
    file.pairs.retain(|(key, _)| key != "llama.rope.dimension_count");
    for head_dim in (2..=512u64).step_by(2) {
        for rotary in (2..=head_dim).step_by(2) {
            let model = GgufModel { head_dim, rotary_dim: rotary, ..open(&file, None).unwrap().model };
            let json = model.config_json(&SpecialIds::default());
            let partial =
                json["rope_parameters"].get("partial_rotary_factor").map_or(1.0, |value| value.as_f64().unwrap());
            assert_eq!((head_dim as f64 * partial) as u64, rotary);
            assert!(partial <= 1.0);
        }
        if head_dim > 64 {
            // The rest takes long in unoptimised builds and differs by nothing.
            break;
        }
    }
}

/// Goal: dense modules follow the pooling, as the mean unless the file says otherwise; their shapes are those of keys.
#[test]
fn dense_modules_of_embedding_models_are_read() {
    let f32 = TensorType::F32;
    let file = || small_model().tensor("dense_2.weight", &[8, 3], f32).tensor("dense_3.weight", &[3, 5], f32);
    let gguf = open(&file(), None).unwrap();
    let files = |name: &str| Ok(gguf.file(name).map(<[u8]>::to_vec));
    let values = |_: &str, _: &str, shape: &[u64]| Ok(Some(vec![0.5; shape.iter().product::<u64>() as usize]));
    let read = embedding::read(files, &values, (8, 100)).unwrap();
    let shapes: Vec<(u32, u32)> = read.dense.iter().map(|dense| (dense.inputs, dense.outputs)).collect();
    assert_eq!((read.pooling, read.normalize, read.size, shapes), (Pooling::Mean, true, 5, vec![(8, 3), (3, 5)]));
    assert_eq!(gguf.sources["2_Dense/linear.weight"].shape, [3, 8]);
    let stated = file().pair("llama.dense_3_feat_out", Value::U32(6));
    assert_eq!(refused(&stated), "llama.dense_3_feat_out is 6, tensor dense_3 has 5");
    assert!(open(&file().pair("llama.dense_3_feat_out", Value::U32(5)), None).is_ok());
    let bias = file().tensor("dense_2.bias", &[3], f32);
    assert_eq!(refused(&bias), "tensor dense_2.bias, the bias of a dense module, is not supported");
    // A module that does not fit the hidden states is refused when it is read.
    let gguf = open(&small_model().tensor("dense_2.weight", &[7, 3], f32), None).unwrap();
    let files = |name: &str| Ok(gguf.file(name).map(<[u8]>::to_vec));
    let error = embedding::read(files, &values, (8, 100)).unwrap_err().to_string();
    assert_eq!(error, "2_Dense/config.json: in_features is 7, must be 8, the number of values of the vector before it");
}

#[test]
fn the_pooling_of_embedding_models_is_read() {
    let embedding = |pooling| {
        let gguf = open(&with("llama.pooling_type", Value::U32(pooling)), None).unwrap();
        let file = |name: &str| Ok(gguf.file(name).map(<[u8]>::to_vec));
        embedding::read(file, &|_, _, _| Ok(None), (0, 100)).unwrap()
    };
    for (kind, pooling) in [(1, Pooling::Mean), (2, Pooling::First), (3, Pooling::Last)] {
        let read = embedding(kind);
        assert_eq!((read.pooling, read.normalize, read.declared), (pooling, true, true));
    }
    assert_eq!(embedding(0), Embedding::default());
    assert!(refused(&with("llama.pooling_type", Value::U32(4))).contains("llama.pooling_type is 4"));
    assert!(refused(&with("llama.pooling_type", Value::U32(5))).contains("from 0 to 3"));
}

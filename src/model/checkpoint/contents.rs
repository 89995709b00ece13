//! The contents of a checkpoint's files according to their headers, for `ostinato inspect`; also for models that cannot
//! be run.
//!
//! Not here: the tensors' data.

use super::headers::Headers;
use super::{Checkpoint, CheckpointError, CheckpointProblem};
use crate::config::file;
use crate::model::config::{ConfigProblem, quantization};
use crate::model::gguf::config::GgufConfigError;
use crate::model::gguf::split::GgufFiles;
use crate::model::gguf::{self, GgufError};
use crate::model::python_json;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};

/// The purpose of a tensor, by its name. The variants are in the order in which they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorKind {
    /// The token embedding.
    Embedding,
    /// Projections of attention.
    Attention,
    /// Recurrent layers: the gated delta rule, short convolutions and state-space layers.
    Recurrent,
    /// Dense MLPs.
    Mlp,
    /// Routed and shared experts, and their routers.
    Experts,
    /// Norms.
    Norms,
    /// The LM head, unless it is the embedding.
    Head,
    /// Multi-token prediction, and what is a draft head's own beside its layer: both draft tokens.
    Drafts,
    /// Images and other inputs that are no text.
    Vision,
    /// Any other tensor.
    Other,
}

impl fmt::Display for TensorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TensorKind::Embedding => "embedding",
            TensorKind::Attention => "attention",
            TensorKind::Recurrent => "recurrent",
            TensorKind::Mlp => "mlp",
            TensorKind::Experts => "experts",
            TensorKind::Norms => "norms",
            TensorKind::Head => "head",
            TensorKind::Drafts => "drafts",
            TensorKind::Vision => "vision",
            TensorKind::Other => "other",
        })
    }
}

impl TensorKind {
    /// Returns the kind of the tensor with this name in a safetensors or GGUF file.
    pub fn of(name: &str) -> TensorKind {
        let any = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        let begins = |parts: &[&str]| parts.iter().any(|part| name.starts_with(part));
        match () {
            () if begins(&["mtp.", "fc.", "d2t", "t2d"]) || any(&[".nextn."]) => TensorKind::Drafts,
            () if any(&["visual", "vision", "mm_projector", "multi_modal_projector", "audio"])
                || begins(&["v.", "mm."]) =>
            {
                TensorKind::Vision
            }
            () if any(&["norm"]) => TensorKind::Norms,
            () if any(&["embed_tokens", "embeddings.", "token_embd", "wte."]) => TensorKind::Embedding,
            () if begins(&["lm_head.", "output."]) => TensorKind::Head,
            () if any(&[
                "expert",
                "_exps",
                "_shexp",
                "ffn_gate_inp",
                "mlp.gate.",
                "mixer.gate.",
                "feed_forward.gate.",
                "router",
                "block_sparse_moe",
            ]) =>
            {
                TensorKind::Experts
            }
            () if any(&["mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj"]) => TensorKind::Attention,
            () if any(&["mixer.up_proj", "mixer.down_proj"]) => TensorKind::Mlp,
            () if any(&["linear_attn.", ".ssm_", ".mamba.", "mixer.", ".conv.", ".shortconv."]) => {
                TensorKind::Recurrent
            }
            () if any(&["attn", "attention", "rope_freqs"]) => TensorKind::Attention,
            () if any(&["mlp", "ffn", "feed_forward"]) => TensorKind::Mlp,
            () => TensorKind::Other,
        }
    }
}

/// A tensor as its file describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedTensor {
    /// The name in the file.
    pub name: String,
    /// The element type as the file spells it.
    pub dtype: String,
    /// The number of elements. Packed codes count as the elements that hold them.
    pub elements: u64,
    /// The size in bytes.
    pub bytes: u64,
}

/// The contents of a checkpoint's files.
#[derive(Clone, Debug)]
pub struct Contents {
    /// `safetensors` or `GGUF`.
    pub format: &'static str,
    /// The files with their sizes in bytes.
    pub files: Vec<(PathBuf, u64)>,
    /// The architecture as the files name it.
    pub architecture: Option<String>,
    /// The maximum context length in tokens as the files say it.
    pub context: Option<u64>,
    /// All tensors, in the order of their names.
    pub tensors: Vec<ListedTensor>,
    /// The checkpoint, which may be a draft head, or all reasons for which it cannot be run.
    pub checkpoint: Result<Checkpoint, CheckpointError>,
}

impl Contents {
    /// Reads the headers of a checkpoint: of a directory, or of a GGUF file and the others of its model.
    ///
    /// # Errors Files that are missing or damaged. A model that is complete and cannot be run is no error.
    pub fn read(path: &Path) -> Result<Contents, CheckpointError> {
        let checkpoint = Checkpoint::open_draft(path);
        if let Err(error) = &checkpoint
            && (error.problems.iter().any(is_damage) || !error.problems.iter().any(is_unsupported))
        {
            return Err(error.clone());
        }
        match gguf::is_named(path) {
            true => of_gguf(path, checkpoint),
            false => of_folder(path, checkpoint),
        }
    }
}

fn of_folder(dir: &Path, checkpoint: Result<Checkpoint, CheckpointError>) -> Result<Contents, CheckpointError> {
    let mut problems = Vec::new();
    let headers = Headers::read(dir, &mut problems);
    if !problems.is_empty() {
        return Err(CheckpointError { problems });
    }
    let text = file::read_text(&dir.join("config.json"), file::SMALL).unwrap_or_default();
    let config: Value = python_json::parse(&text).unwrap_or_default();
    let texts = [&config, &config["text_config"], &config["transformer_layer_config"]];
    let architecture = config["architectures"][0].as_str().or_else(|| config["model_type"].as_str());
    let tensors = headers.tensors.into_iter().map(|(name, info)| ListedTensor {
        name,
        dtype: info.dtype,
        elements: info.shape.iter().fold(1, |product: u64, size| product.saturating_mul(*size)),
        bytes: info.bytes,
    });
    Ok(Contents {
        format: "safetensors",
        files: headers.files.iter().map(|file| (file.path.to_path_buf(), file.bytes)).collect(),
        architecture: architecture.map(str::to_owned),
        context: texts.iter().find_map(|config| config["max_position_embeddings"].as_u64()),
        tensors: tensors.collect(),
        checkpoint,
    })
}

fn of_gguf(path: &Path, checkpoint: Result<Checkpoint, CheckpointError>) -> Result<Contents, CheckpointError> {
    let files = GgufFiles::open(path, |path| file::open(path).map(|(file, metadata)| (file, metadata.len())));
    let files = files.map_err(|error| CheckpointError {
        problems: vec![CheckpointProblem::Gguf { path: path.to_owned(), error: Box::new(error.into()) }],
    })?;
    let architecture = files.get("general.architecture").and_then(|value| value.text()).map(str::to_owned);
    let context = architecture.as_ref().and_then(|name| files.get(&format!("{name}.context_length"))?.unsigned());
    let tensors = files.tensors.iter().map(|(name, at)| {
        let info = files.at(*at);
        ListedTensor {
            name: name.clone(),
            dtype: info.kind.name().to_owned(),
            elements: info.rows().saturating_mul(info.cols()),
            bytes: info.bytes,
        }
    });
    Ok(Contents {
        format: "GGUF",
        tensors: tensors.collect(),
        files: files.files.iter().map(|file| (file.path.clone(), file.bytes)).collect(),
        architecture,
        context,
        checkpoint,
    })
}

/// Whether files are missing, cannot be read, or contradict themselves.
fn is_damage(problem: &CheckpointProblem) -> bool {
    match problem {
        CheckpointProblem::NoDirectory(_)
        | CheckpointProblem::Unreadable { .. }
        | CheckpointProblem::NoWeights { .. }
        | CheckpointProblem::BadIndex { .. }
        | CheckpointProblem::MissingShard { .. }
        | CheckpointProblem::Truncated { .. }
        | CheckpointProblem::BadHeader { .. }
        | CheckpointProblem::Config(ConfigProblem::NotJson { .. }) => true,
        CheckpointProblem::Gguf { error, .. } => matches!(**error, GgufError::Files(_)),
        _ => false,
    }
}

/// Whether the model is complete and has something that cannot be run.
fn is_unsupported(problem: &CheckpointProblem) -> bool {
    match problem {
        // The configuration of quantised weights may ask for more than is supported.
        CheckpointProblem::Config(ConfigProblem::Value { key, .. }) => {
            key.starts_with("quantization_config") || quantization::FILES.iter().any(|file| key.starts_with(file))
        }
        CheckpointProblem::Config(problem) => {
            !matches!(problem, ConfigProblem::NotJson { .. } | ConfigProblem::Missing(_))
        }
        CheckpointProblem::Gguf { error, .. } => match &**error {
            GgufError::Config(error) => {
                matches!(error, GgufConfigError::GgufArchitecture(_) | GgufConfigError::Unsupported { .. })
            }
            GgufError::Tokenizer(_) => true,
            _ => false,
        },
        CheckpointProblem::Stored { .. }
        | CheckpointProblem::ScaleBeside { .. }
        | CheckpointProblem::NotQuantised { .. }
        | CheckpointProblem::OtherFormat { .. }
        | CheckpointProblem::NoQuantization { .. }
        | CheckpointProblem::MixedFormats { .. }
        | CheckpointProblem::QuantState { .. }
        | CheckpointProblem::UnusedTensor { .. }
        | CheckpointProblem::UnsupportedDtype { .. } => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_both_kinds_of_files_have_a_purpose() {
        for (name, kind) in [
            ("model.embed_tokens.weight", TensorKind::Embedding),
            ("token_embd.weight", TensorKind::Embedding),
            ("model.layers.0.self_attn.q_proj.weight", TensorKind::Attention),
            ("model.layers.0.self_attn.q_proj.weight_scale", TensorKind::Attention),
            ("blk.3.attn_q.weight", TensorKind::Attention),
            ("model.layers.0.self_attn.q_norm.weight", TensorKind::Norms),
            ("blk.3.attn_norm.weight", TensorKind::Norms),
            ("output_norm.weight", TensorKind::Norms),
            ("model.norm.weight", TensorKind::Norms),
            ("model.layers.0.mlp.gate_proj.weight", TensorKind::Mlp),
            ("blk.3.ffn_down.weight", TensorKind::Mlp),
            ("model.layers.0.mlp.gate.weight", TensorKind::Experts),
            ("model.layers.0.mlp.experts.7.up_proj.weight", TensorKind::Experts),
            ("model.layers.0.mlp.shared_expert_gate.weight", TensorKind::Experts),
            ("blk.3.ffn_gate_exps.weight", TensorKind::Experts),
            ("blk.3.ffn_gate_inp.weight", TensorKind::Experts),
            ("model.layers.0.linear_attn.in_proj_qkv.weight", TensorKind::Recurrent),
            ("blk.3.ssm_out.weight", TensorKind::Recurrent),
            ("model.layers.0.conv.in_proj.weight", TensorKind::Recurrent),
            ("blk.0.shortconv.in_proj.weight", TensorKind::Recurrent),
            ("model.layers.2.feed_forward.gate.weight", TensorKind::Experts),
            ("model.layers.0.feed_forward.w1.weight", TensorKind::Mlp),
            ("backbone.embeddings.weight", TensorKind::Embedding),
            ("backbone.layers.0.norm.weight", TensorKind::Norms),
            ("backbone.layers.0.mixer.in_proj.weight", TensorKind::Recurrent),
            ("backbone.layers.1.mixer.gate.weight", TensorKind::Experts),
            ("backbone.layers.1.mixer.experts.7.up_proj.weight", TensorKind::Experts),
            ("backbone.layers.2.mixer.q_proj.weight", TensorKind::Attention),
            ("backbone.layers.3.mixer.up_proj.weight", TensorKind::Mlp),
            ("lm_head.weight", TensorKind::Head),
            ("output.weight", TensorKind::Head),
            ("mtp.layers.0.self_attn.q_proj.weight", TensorKind::Drafts),
            ("fc.weight", TensorKind::Drafts),
            ("model.visual.blocks.0.attn.qkv.weight", TensorKind::Vision),
            ("something.else", TensorKind::Other),
        ] {
            assert_eq!(TensorKind::of(name), kind, "{name}");
        }
    }
}

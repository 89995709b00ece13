//! Checks whether a model or a draft head can draft for a model: a draft model has the vocabulary of the model that it drafts
//! for, and layers with full attention only; a draft head was trained for a model of this hidden size and vocabulary.
//!
//! Not here: the recordings of a draft model (`decoder::drafter`) or of a draft head (`decoder::draft_head`).

use super::checkpoint::{Checkpoint, CheckpointError};
use super::config::{DraftHead, LayerKind, ModelConfig};
use super::text::{Text, TextError};

/// Why a model cannot draft for another one.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The draft model is not a checkpoint that can be run.
    #[error("the draft model cannot be loaded")]
    Checkpoint(#[from] CheckpointError),
    /// Its tokenizer cannot be read.
    #[error("the tokenizer of the draft model cannot be loaded")]
    Text(#[from] TextError),
    /// The vocabularies have different sizes.
    #[error("the draft model has a vocabulary of {draft} tokens, the model one of {own}")]
    Vocabulary {
        /// The number of tokens of the draft model.
        draft: u32,
        /// The number of tokens of the model.
        own: u32,
    },
    /// The tokenizers assign the same id to different tokens.
    #[error("the tokenizers differ: token {id} is {draft:?} in the draft model and {own:?} in the model")]
    Token {
        /// The first such number.
        id: u32,
        /// The token of the draft model.
        draft: String,
        /// The token of the model.
        own: String,
    },
    /// The draft model is of a family that cannot draft.
    #[error("a draft model with {what} is not supported: only dense models with full attention can draft")]
    Family {
        /// The unsupported property of its layers.
        what: &'static str,
    },
    /// The draft head was trained for a model of another hidden size.
    #[error("the draft head is for a model of hidden size {draft}, the model has {own}")]
    Hidden {
        /// The hidden size for which the head was trained.
        draft: u32,
        /// The hidden size of the model.
        own: u32,
    },
    /// The draft head was trained for a model with another vocabulary.
    #[error("the draft head is for a model with a vocabulary of {draft} tokens, the model has {own}")]
    HeadVocabulary {
        /// The number of tokens for which the head was trained.
        draft: u32,
        /// The number of tokens of the model.
        own: u32,
    },
    /// The draft head reads hidden states of a layer that the model does not have.
    #[error("the draft head reads the input of layer {layer}, the model has {layers} layers")]
    Layer {
        /// The layer's number, from 0.
        layer: u32,
        /// The number of layers of the model.
        layers: u32,
    },
    /// The draft head reads hidden states of layers that are on several devices.
    #[error(
        "a draft head reads hidden states of layers that a replica with split = \"layers\" has on {devices} devices: split = \
         \"tensor\" and draft models work"
    )]
    Split {
        /// The number of devices.
        devices: usize,
    },
}

/// Checks that a model or a draft head can draft for a model.
pub fn check(draft: &Checkpoint, own: &Checkpoint) -> Result<(), DraftError> {
    if let Some(what) = unsupported(&draft.config) {
        return Err(DraftError::Family { what });
    }
    if let Some(head) = &draft.config.draft_head {
        return check_head(head, &own.config);
    }
    if draft.config.vocab != own.config.vocab {
        return Err(DraftError::Vocabulary { draft: draft.config.vocab, own: own.config.vocab });
    }
    // The error of the model's own tokenizer is reported where it is used.
    if let (Some(draft), Ok(Some(own))) = (Text::of(draft)?, Text::of(own)) {
        compare(&draft, &own)?;
    }
    Ok(())
}

/// Checks that a draft head is for a model like this one.
fn check_head(head: &DraftHead, own: &ModelConfig) -> Result<(), DraftError> {
    if head.target_hidden != own.hidden {
        return Err(DraftError::Hidden { draft: head.target_hidden, own: own.hidden });
    }
    if head.target_vocab != own.vocab {
        return Err(DraftError::HeadVocabulary { draft: head.target_vocab, own: own.vocab });
    }
    match head.features(own.layers).into_iter().find(|layer| *layer > own.layers) {
        Some(layer) => Err(DraftError::Layer { layer, layers: own.layers }),
        None => Ok(()),
    }
}

/// Returns what the layers of a model have that a draft model must not have.
fn unsupported(config: &ModelConfig) -> Option<&'static str> {
    if config.is_recurrent() {
        return Some("recurrent layers");
    }
    if !config.causal {
        return Some("attention that is not causal");
    }
    if config.latent.is_some() {
        return Some("latent attention");
    }
    if config.experts.is_some() {
        return Some("experts");
    }
    if config.layer_inputs.is_some() {
        return Some("inputs of layers that depend on the token");
    }
    config.layers_of(LayerKind::Attention).any(|layer| !config.owns_cache(layer)).then_some("layers that share keys")
}

/// Compares the tokens of two tokenizers. Models of one family differ in special tokens and in tokens that were added
/// later; those are not drafted, or rarely and then rejected.
fn compare(draft: &Text, own: &Text) -> Result<(), DraftError> {
    let most = u32::try_from(draft.vocabulary().min(own.vocabulary())).unwrap_or(u32::MAX);
    for id in 0..most {
        let (Some(theirs), Some(ours)) = (draft.spelling(id), own.spelling(id)) else { continue };
        if theirs != ours && !draft.is_special(id) && !own.is_special(id) {
            return Err(DraftError::Token { id, draft: theirs, own: ours });
        }
    }
    Ok(())
}

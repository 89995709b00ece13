//! Reads the vocabulary of a draft head: the tokens of the model that its logits stand for, from the tensor `d2t`, which holds
//! each token's distance from its own index.
//!
//! Not here: the inverse (`t2d`), which only training needs.

use super::CheckpointProblem;
use super::headers::Headers;
use crate::model::config::ModelConfig;

/// The tensor with the distances.
const DISTANCES: &str = "d2t";

/// Returns the tokens of a draft head's vocabulary; none for a model. Problems go to `problems`.
pub(super) fn read(config: &ModelConfig, headers: &Headers, problems: &mut Vec<CheckpointProblem>) -> Vec<u32> {
    let Some(head) = &config.draft_head else { return Vec::new() };
    match distances(config, headers) {
        Ok(None) if config.vocab == head.target_vocab => (0..config.vocab).collect(),
        Ok(None) => {
            if !headers.is_lost(DISTANCES) {
                problems.push(CheckpointProblem::MissingTensor { tensor: DISTANCES.to_owned() });
            }
            Vec::new()
        }
        Ok(Some(distances)) => {
            let mut tokens = Vec::with_capacity(distances.len());
            for (entry, distance) in distances.into_iter().enumerate() {
                let token = distance.saturating_add(entry as i64);
                match u32::try_from(token).ok().filter(|token| *token < head.target_vocab) {
                    Some(token) => tokens.push(token),
                    None => {
                        let (tensor, vocab) = (DISTANCES.to_owned(), head.target_vocab);
                        problems.push(CheckpointProblem::DraftToken { tensor, entry, token, vocab });
                        return Vec::new();
                    }
                }
            }
            tokens
        }
        Err(problem) => {
            problems.push(problem);
            Vec::new()
        }
    }
}

/// Returns the distances, `[vocab]`; `None` if the tensor is missing.
fn distances(config: &ModelConfig, headers: &Headers) -> Result<Option<Vec<i64>>, CheckpointProblem> {
    let Some((tensor, info)) = headers.find(DISTANCES) else { return Ok(None) };
    let (tensor, expected) = (tensor.to_owned(), vec![u64::from(config.vocab)]);
    let width: u64 = match info.dtype.as_str() {
        "I64" => 8,
        "I32" => 4,
        dtype => return Err(CheckpointProblem::DistanceDtype { tensor, dtype: dtype.to_owned() }),
    };
    if info.shape != expected {
        return Err(CheckpointProblem::Shape { tensor, shape: info.shape.clone(), expected });
    }
    if info.bytes != width * expected[0] {
        return Err(CheckpointProblem::Shape { tensor, shape: vec![info.bytes / width], expected });
    }
    let bytes = headers.place(info).read()?;
    let number = |bytes: &[u8]| match (bytes.first_chunk(), bytes.first_chunk()) {
        (Some(long), _) => i64::from_le_bytes(*long),
        (None, Some(short)) => i64::from(i32::from_le_bytes(*short)),
        (None, None) => 0,
    };
    Ok(Some(bytes.chunks_exact(width as usize).map(number).collect()))
}

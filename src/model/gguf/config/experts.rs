//! The experts of a model, and how they are chosen.
//!
//! Not here: whether a family has experts.

use super::super::container::Value;
use super::GgufArchitecture::{DeepSeek2, Ernie45Moe, Lfm2Moe, NemotronHMoe, Olmoe, Qwen2Moe};
use super::{
    CHOICE_BIAS, GgufBlock, GgufConfigError, GgufExperts, GgufRouting, Keys, MAX_EXPERTS, MAX_LAYERS, MAX_SIZE,
};

/// The value of `expert_gating_func` if the file does not state the kind of scores.
pub(super) const NOT_STATED: u64 = 0;
/// The value of `expert_gating_func` for a softmax over all experts.
pub(super) const SOFTMAX: u64 = 1;
/// The value of `expert_gating_func` for sigmoids.
pub(super) const SIGMOID: u64 = 2;
/// The value of `expert_gating_func` for a softmax over the chosen experts.
pub(super) const SOFTMAX_OF_CHOSEN: u64 = 3;

/// The key of the kind of scores.
pub(super) const SCORES: &str = "expert_gating_func";

/// Reads the experts, if the model has any. `blocks`: what each layer is, in families whose layers are either a mixer or an
/// MLP.
pub(super) fn read(
    keys: &Keys<'_>,
    layers: u64,
    blocks: Option<&[GgufBlock]>,
) -> Result<Option<GgufExperts>, GgufConfigError> {
    let stated = keys.size_or_zero("expert_count", MAX_EXPERTS)? > 0;
    if !(keys.architecture.has_experts() || stated && keys.architecture.may_have_experts()) {
        return Ok(None);
    }
    let leading = keys.architecture.states_routing();
    let dense_layers = match leading {
        true => keys.size_or_zero("leading_dense_block_count", MAX_LAYERS)?,
        false => 0,
    };
    if dense_layers >= layers {
        let rule = format!("less than the number of layers ({layers})");
        return Err(keys.wrong("leading_dense_block_count", &Value::U64(dense_layers), rule));
    }
    let interval = match keys.architecture {
        Ernie45Moe => keys.size_or_zero("interleave_moe_layer_step", MAX_LAYERS)?.max(1),
        _ => 1,
    };
    let first = match blocks {
        None => (dense_layers..layers).find(|layer| (layer + 1).is_multiple_of(interval)),
        Some(blocks) => (0..layers).zip(blocks).find(|(_, block)| **block == GgufBlock::Mlp).map(|(layer, _)| layer),
    };
    let first = first.unwrap_or(dense_layers);
    // Some files lack the sizes of the experts, which their tensors have: the contiguous dimension of a down
    // projection is the intermediate size.
    let tensor = |name: &str| keys.parts.tensor(&format!("blk.{first}.{name}.weight")).map(|tensor| tensor.cols());
    let inner = "expert_feed_forward_length";
    let inner = keys.uniform(inner)?.or(tensor("ffn_down_exps")).ok_or_else(|| keys.missing(inner))?;
    let shared_inner = match leading && keys.architecture != NemotronHMoe {
        true => {
            let count = keys.size_or_zero("expert_shared_count", MAX_EXPERTS)?;
            Some(count * inner).filter(|n| *n > 0)
        }
        false => match keys.size_or_zero("expert_shared_feed_forward_length", MAX_SIZE)? {
            0 => tensor("ffn_down_shexp"),
            n => Some(n),
        },
    };
    let routing = leading.then(|| routing(keys, first)).transpose()?;
    let norm = keys.get("expert_weights_norm").and_then(Value::flag);
    let normalise = match routing {
        // The released models of these families normalise, except for Qwen2's and OLMoE; only few files state it.
        None => norm.unwrap_or(![Qwen2Moe, Olmoe].contains(&keys.architecture)),
        // The class has no key for it.
        Some(_) if keys.architecture == Ernie45Moe => true,
        // The released models of this family normalise, and the files do not state it.
        Some(_) => norm.unwrap_or(keys.architecture == Lfm2Moe),
    };
    if let (Some(GgufRouting { sigmoid: false, biased: false, .. }), true, Some(value)) =
        (routing, normalise, keys.get("expert_weights_norm"))
    {
        return Err(keys.unsupported("expert_weights_norm", value, "softmax scores of groups with a sum of 1"));
    }
    Ok(Some(GgufExperts {
        count: keys.need("expert_count", MAX_EXPERTS)?,
        chosen: keys.need("expert_used_count", MAX_EXPERTS)?,
        inner,
        shared_inner,
        normalise,
        dense_layers,
        interval,
        routing,
    }))
}

/// Reads how experts are chosen. `layer` is the first layer that has them.
fn routing(keys: &Keys<'_>, layer: u64) -> Result<GgufRouting, GgufConfigError> {
    // Sigmoid scores always have the bias, softmax scores only in ERNIE's family. Files of models whose published configuration does not
    // name the scores lack the key.
    let biased = keys.parts.has(&format!("blk.{layer}.{CHOICE_BIAS}"));
    let sigmoid = match keys.get(SCORES).map(|value| (value, value.unsigned())) {
        None | Some((_, Some(NOT_STATED | SOFTMAX))) if keys.architecture == Ernie45Moe => false,
        None | Some((_, Some(NOT_STATED))) => biased || keys.architecture != DeepSeek2,
        Some((_, Some(SIGMOID))) => true,
        Some((value, Some(SOFTMAX))) if biased => {
            return Err(keys.unsupported(SCORES, value, "softmax scores with a bias"));
        }
        Some((_, Some(SOFTMAX))) if keys.architecture == DeepSeek2 => false,
        Some((value, _)) => return Err(keys.unsupported(SCORES, value, "scores of this kind")),
    };
    Ok(GgufRouting {
        sigmoid,
        biased: sigmoid || keys.architecture == Ernie45Moe,
        // Files without these keys, which older converters wrote, are run without groups elsewhere too.
        groups: keys.size_or_zero("expert_group_count", MAX_EXPERTS)?.max(1),
        kept_groups: keys.size_or_zero("expert_group_used_count", MAX_EXPERTS)?.max(1),
        factor: keys.optional("expert_weights_scale", None)?.unwrap_or(1.0),
    })
}

//! The heads of a model's attention layers: the same in all layers, other ones in the layers that see all tokens, or
//! those of latent attention.

use super::super::container::Value;
use super::GgufArchitecture::{DeepSeek2, Gemma4};
use super::families::pattern;
use super::{GgufConfigError, GgufFullHeads, GgufLatent, Keys, MAX_SIZE, ROPE_FACTORS};

/// The smallest divisor of a rotary frequency that means that the dimension is not rotated. The converter writes 1e30.
const NOT_ROTATED: f32 = 1e29;

/// The heads of a model.
pub(super) struct Heads {
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    pub(super) rotary_dim: u64,
    pub(super) full: Option<GgufFullHeads>,
    /// The number of layers with keys and values of their own.
    pub(super) own_caches: u64,
    pub(super) latent: Option<GgufLatent>,
}

/// Reads the heads. `divisors` are the divisors of the rotary frequencies, if the model has the tensor.
pub(super) fn read(
    keys: &Keys<'_>,
    layers: u64,
    hidden: u64,
    divisors: Option<&[f32]>,
) -> Result<Heads, GgufConfigError> {
    match keys.architecture {
        Gemma4 => two_kinds(keys, layers, divisors),
        DeepSeek2 => latent(keys, layers),
        _ => one_kind(keys, layers, hidden),
    }
}

fn query_heads(keys: &Keys<'_>) -> Result<u64, GgufConfigError> {
    keys.uniform("attention.head_count")?.ok_or_else(|| keys.missing("attention.head_count"))
}

/// Checks that the stated dimensions of values, if any, equal those of keys.
fn same_values(keys: &Keys<'_>, key: &str, head_dim: u64) -> Result<(), GgufConfigError> {
    match keys.size(key, MAX_SIZE)?.filter(|length| *length != head_dim) {
        None => Ok(()),
        Some(length) => Err(keys.wrong(key, &Value::U64(length), format!("equal to the keys' ({head_dim})"))),
    }
}

fn one_kind(keys: &Keys<'_>, layers: u64, hidden: u64) -> Result<Heads, GgufConfigError> {
    let heads = query_heads(keys)?;
    let kv_heads = keys.uniform("attention.head_count_kv")?.unwrap_or(heads);
    let head_dim = match keys.size("attention.key_length", MAX_SIZE)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(keys.missing("attention.key_length")),
    };
    same_values(keys, "attention.value_length", head_dim)?;
    let rotary_dim = match keys.architecture.has_single_blocks() {
        // Nothing is rotated. The converter takes the number from sizes that are not those of the heads.
        true => head_dim,
        false => keys.size("rope.dimension_count", head_dim)?.unwrap_or(head_dim),
    };
    Ok(Heads { heads, kv_heads, head_dim, rotary_dim, full: None, own_caches: layers, latent: None })
}

/// Reads the heads of a model whose layers that see all tokens have other heads than those with a window.
fn two_kinds(keys: &Keys<'_>, layers: u64, divisors: Option<&[f32]>) -> Result<Heads, GgufConfigError> {
    let heads = query_heads(keys)?;
    let key = "rope.scaling.type";
    if let Some(value) = keys.get(key).filter(|value| !matches!(value.text(), Some("none" | "linear"))) {
        return Err(keys.unsupported(key, value, "none and linear are where a part of each half of a head is rotated"));
    }
    let full_dim = keys.need("attention.key_length", MAX_SIZE)?;
    same_values(keys, "attention.value_length", full_dim)?;
    let head_dim = keys.need("attention.key_length_swa", MAX_SIZE)?;
    same_values(keys, "attention.value_length_swa", head_dim)?;
    // The divisors decide which of the dimensions are rotated.
    let key = "rope.dimension_count";
    if let Some(stated) = keys.size(key, MAX_SIZE)?.filter(|stated| *stated != full_dim) {
        return Err(keys.wrong(key, &Value::U64(stated), format!("equal to attention.key_length ({full_dim})")));
    }
    let rotary_dim = keys.size("rope.dimension_count_swa", head_dim)?.unwrap_or(head_dim);
    let own_caches = layers - keys.size_or_zero("attention.shared_kv_layers", layers - 1)?;
    let slides = pattern(keys, layers)?;

    let key = "attention.head_count_kv";
    let by_layer = keys.by_layer(key, layers, 1)?.unwrap_or_else(|| vec![heads; layers as usize]);
    let of_kind = |slides_too: bool| {
        let mut of_kind = by_layer.iter().zip(&slides).filter(|(_, slides)| **slides == slides_too).map(|(n, _)| *n);
        let first = of_kind.next();
        match (first, of_kind.find(|n| Some(*n) != first)) {
            (Some(one), Some(other)) => {
                let rule = format!("the same in all layers of a kind, not {one} and {other}");
                Err(keys.wrong(key, keys.get(key).unwrap_or(&Value::U64(one)), rule))
            }
            _ => Ok(first),
        }
    };
    let (local, full) = (of_kind(true)?, of_kind(false)?);
    let full_kv_heads = full.or(local).unwrap_or(heads);
    let kv_heads = local.unwrap_or(full_kv_heads);

    let has_values =
        |layer: usize| ["attn_v", "attn_qkv"].iter().any(|part| keys.parts.has(&format!("blk.{layer}.{part}.weight")));
    let values_are_keys = !(0..own_caches as usize).any(|layer| !slides[layer] && has_values(layer));
    if !values_are_keys && full_kv_heads != kv_heads {
        let rule = format!("{kv_heads} in all layers, not {full_kv_heads} in some that have values of their own");
        return Err(keys.wrong(key, keys.get(key).unwrap_or(&Value::U64(full_kv_heads)), rule));
    }
    let full = GgufFullHeads {
        kv_heads: full_kv_heads,
        head_dim: full_dim,
        rotary_dim: rotated(divisors, full_dim)?,
        values_are_keys,
    };
    Ok(Heads { heads, kv_heads, head_dim, rotary_dim, full: Some(full), own_caches, latent: None })
}

/// Returns the number of rotated dimensions of a head, given the divisors of the frequencies: 1 for the dimensions of a
/// half that are rotated, which come first, and a number so large that nothing rotates for the others.
fn rotated(divisors: Option<&[f32]>, head_dim: u64) -> Result<u64, GgufConfigError> {
    let wrong = |has: String| GgufConfigError::Divisors {
        tensor: ROPE_FACTORS,
        has,
        rule: format!("{} values, first some 1 and then 1e30 only", head_dim / 2),
    };
    let divisors = divisors.ok_or(GgufConfigError::MissingTensor(ROPE_FACTORS))?;
    if divisors.len() as u64 != head_dim / 2 {
        return Err(wrong(format!("{} values", divisors.len())));
    }
    let rotated = divisors.iter().take_while(|divisor| **divisor == 1.0).count();
    if rotated == 0 {
        return Err(wrong(divisors.first().map_or("no values".to_owned(), |first| format!("{first} first"))));
    }
    match divisors[rotated..].iter().find(|divisor| !(divisor.is_finite() && **divisor >= NOT_ROTATED)) {
        None => Ok(2 * rotated as u64),
        Some(odd) => Err(wrong(format!("{odd} after {rotated} values of 1"))),
    }
}

/// Reads the dimensions of latent attention.
fn latent(keys: &Keys<'_>, layers: u64) -> Result<Heads, GgufConfigError> {
    let heads = query_heads(keys)?;
    let kv_rank = keys.need("attention.kv_lora_rank", MAX_SIZE)?;
    let rope = keys.need("rope.dimension_count", MAX_SIZE)?;
    // Files in which keys' and values' projections are two tensors state what is cached as the lengths, and the heads'
    // dimensions under keys of their own. Older files state the heads' dimensions as the lengths.
    let split = keys.get("attention.key_length_mla").is_some();
    let [key, value] = match split {
        true => ["attention.key_length_mla", "attention.value_length_mla"],
        false => ["attention.key_length", "attention.value_length"],
    };
    let (length, values) = (keys.need(key, MAX_SIZE)?, keys.need(value, MAX_SIZE)?);
    let nope = length.checked_sub(rope).filter(|nope| *nope > 0);
    let nope = nope.ok_or_else(|| {
        keys.wrong(key, &Value::U64(length), format!("more than the rotated dimensions (rope.dimension_count, {rope})"))
    })?;
    let cached = [
        ("attention.key_length", kv_rank + rope, "kv_lora_rank with the rotated dimensions"),
        ("attention.value_length", kv_rank, "kv_lora_rank"),
    ];
    for (key, expected, what) in cached.into_iter().filter(|_| split) {
        if let Some(stated) = keys.size(key, MAX_SIZE)?.filter(|stated| *stated != expected) {
            return Err(keys.wrong(key, &Value::U64(stated), format!("that of {what} ({expected})")));
        }
    }
    let expected = if split { 1 } else { heads };
    let key = "attention.head_count_kv";
    if let Some(stated) = keys.uniform(key)?.filter(|stated| *stated != expected) {
        return Err(keys.wrong(key, &Value::U64(stated), format!("{expected} where attention is latent")));
    }
    // Some files of models whose queries are projected at once state a rank all the same.
    let q_rank = match keys.parts.has("blk.0.attn_q.weight") {
        true => None,
        false => Some(keys.need("attention.q_lora_rank", MAX_SIZE)?),
    };
    Ok(Heads {
        heads,
        kv_heads: heads,
        head_dim: rope,
        rotary_dim: rope,
        full: None,
        own_caches: layers,
        latent: Some(GgufLatent { q_rank, kv_rank, nope, rope, values }),
    })
}

//! Draft heads of the EAGLE-3 kind in config.json: how one is recognised, and what its keys say beside those of its layer,
//! which is one of a dense family.
//!
//! Sources: the heads that EAGLE's authors, SpecForge and AngelSlim publish, and those in the format of vLLM's speculators,
//! which keeps the layer's keys in `transformer_layer_config`.
//!
//! Not here: the model that a head drafts for (`model::draft`).

use serde_json::{Map, Value};

use super::read::{MAX_DIMENSION, MAX_LAYERS, Reader};
use super::{ConfigProblem, ModelConfig};

/// The key of the layer's own configuration object in the format of vLLM's speculators.
const LAYER: &str = "transformer_layer_config";
/// The key of the layers whose inputs are features, at the top or in [`EAGLE`].
const FEATURES: &str = "eagle_aux_hidden_state_layer_ids";
/// The key of an object with keys of the head.
const EAGLE: &str = "eagle_config";
/// The number of hidden states that make a token's features, if no key names their layers.
const DEFAULT_FEATURES: u32 = 3;
/// The maximum number of hidden states that make a token's features.
const MOST_FEATURES: usize = 8;

/// A draft head of the EAGLE-3 kind: a layer that drafts for another model. Its inputs are the embedding of a token, and
/// features: hidden states of the token before it, between layers of that model. Its own output is the features of a token
/// that it has drafted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftHead {
    /// The layers of the model whose inputs, side by side, are the features; the model's number of layers stands for the last
    /// layer's output. `None`: see [`DraftHead::features`].
    pub layers: Option<Vec<u32>>,
    /// The hidden size of the model.
    pub target_hidden: u32,
    /// The number of tokens of the model's vocabulary. That of the head is [`ModelConfig::vocab`].
    pub target_vocab: u32,
    /// Whether the layer's residual stream begins with the normed features; otherwise with the features.
    pub stream_is_normed: bool,
    /// Whether the hidden states are normed together before they are projected.
    pub norms_features: bool,
}

impl DraftHead {
    /// Returns the number of hidden states that make a token's features.
    pub fn feature_count(&self) -> u32 {
        self.layers.as_ref().map_or(DEFAULT_FEATURES, |layers| layers.len() as u32)
    }

    /// Returns the layers whose inputs are the features, in a model of `layers` layers: those that the head names, or the
    /// third, the one in the middle, and the last but two.
    pub fn features(&self, layers: u32) -> Vec<u32> {
        self.layers.clone().unwrap_or_else(|| vec![2.min(layers), layers / 2, layers.saturating_sub(3)])
    }
}

/// Whether config.json describes a draft head.
pub(super) fn is_draft_head(map: &Map<String, Value>) -> bool {
    let named = map.get("architectures").and_then(Value::as_array);
    let named = named.into_iter().flatten().filter_map(Value::as_str);
    let eagle = |name: &str| name.to_ascii_lowercase().contains("eagle3");
    named.chain(map.get("speculators_model_type").and_then(Value::as_str)).any(eagle)
        || ["draft_vocab_size", EAGLE].iter().any(|key| map.get(*key).is_some_and(|value| !value.is_null()))
}

/// Returns a head's keys as those of a model of its layer's family: the names of `architectures` are those of heads.
pub(super) fn as_model(mut map: Map<String, Value>) -> Map<String, Value> {
    if let Some(Value::Object(layer)) = map.remove(LAYER) {
        map.extend(layer);
    }
    map.remove("architectures");
    map.entry("model_type").or_insert_with(|| "llama".into());
    map
}

/// Reads the keys of a draft head, whose layer has been read into `config`. Problems are recorded in the reader.
pub(super) fn read(reader: &mut Reader, config: &mut ModelConfig) {
    if config.layers != 1 {
        reader.wrong("num_hidden_layers", config.layers, "1 for a draft head");
    }
    let target_hidden = reader.optional_count("target_hidden_size", MAX_DIMENSION).unwrap_or(config.hidden);
    let own_vocab = reader.optional_count("draft_vocab_size", MAX_DIMENSION).unwrap_or(config.vocab);
    if own_vocab > config.vocab {
        reader.wrong("draft_vocab_size", own_vocab, format!("at most vocab_size ({})", config.vocab));
    }
    let eagle = reader.value(EAGLE).cloned().unwrap_or_default();
    if eagle["use_aux_hidden_state"] == Value::Bool(false) {
        reader.wrong(&format!("{EAGLE}.use_aux_hidden_state"), false, "true: heads of the EAGLE-3 kind are supported");
    }
    for key in ["fc_norm", "norm_output", "parallel_drafting"] {
        if reader.flag(key) {
            reader.wrong(key, true, "false for a draft head");
        }
    }
    let layers = match (reader.value(FEATURES).cloned(), &eagle[FEATURES]) {
        (Some(named), _) => feature_layers(reader, FEATURES, &named),
        (None, Value::Null) => None,
        (None, named) => feature_layers(reader, &format!("{EAGLE}.{FEATURES}"), named),
    };
    let (stream_is_normed, norms_features) = (reader.flag("norm_before_residual"), reader.flag("norm_before_fc"));
    config.draft_head =
        Some(DraftHead { layers, target_hidden, target_vocab: config.vocab, stream_is_normed, norms_features });
    config.vocab = own_vocab;
    // The head has a matrix of its own: another number of rows than the embedding.
    config.tied = false;
}

/// Returns the layers whose inputs are features. Heads name either those layers or the ones before them, whose outputs are
/// the same hidden states; those that begin with 1 do the latter, since the output of the first layer is never a feature
/// of the former.
fn feature_layers(reader: &mut Reader, key: &str, named: &Value) -> Option<Vec<u32>> {
    let number = |value: &Value| value.as_u64().filter(|number| *number < MAX_LAYERS).map(|number| number as u32);
    let layers = named.as_array().and_then(|all| all.iter().map(number).collect::<Option<Vec<u32>>>());
    match layers.filter(|layers| (1..=MOST_FEATURES).contains(&layers.len())) {
        Some(layers) => {
            let before = u32::from(layers[0] == 1);
            Some(layers.into_iter().map(|layer| layer + before).collect())
        }
        None => {
            let rule = format!("a list of 1 to {MOST_FEATURES} numbers of layers");
            reader.problems.push(ConfigProblem::Value { key: key.to_owned(), value: named.to_string(), rule });
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ARCHITECTURES: [&str; 3] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"];

    fn llama() -> Value {
        json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "draft_vocab_size": 80,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": true
        })
    }

    fn parsed(value: &Value) -> Result<ModelConfig, String> {
        ModelConfig::parse(&value.to_string(), None).map_err(|error| error.to_string())
    }

    fn with(pairs: &[(&str, Value)]) -> Value {
        let mut value = llama();
        pairs.iter().for_each(|(key, of)| value[*key] = of.clone());
        value
    }

    #[test]
    fn heads_are_recognised_by_their_keys_whatever_they_are_called() {
        for name in ARCHITECTURES.map(Some).into_iter().chain([None]) {
            let config = parsed(&match name {
                Some(name) => with(&[("architectures", json!([name]))]),
                None => llama(),
            });
            let config = config.unwrap_or_else(|error| panic!("{name:?}: {error}"));
            let head = config.draft_head.as_ref().expect("a draft head");
            assert_eq!((config.hidden, config.vocab, config.tied), (64, 80, false), "{name:?}");
            assert_eq!((head.target_hidden, head.target_vocab, head.feature_count()), (64, 500, 3), "{name:?}");
            assert_eq!(head.features(32), [2, 16, 29]);
        }
        // The speculators' format.
        let layer = llama();
        let config = parsed(&json!({
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 90,
            "norm_before_residual": true, "target_hidden_size": 48, "transformer_layer_config": layer,
        }));
        let config = config.expect("a draft head");
        let head = config.draft_head.expect("a draft head");
        assert_eq!((head.target_hidden, head.stream_is_normed, config.hidden), (48, true, 64));
        let plain = with(&[("draft_vocab_size", Value::Null), ("architectures", json!(["LlamaForCausalLM"]))]);
        assert_eq!(parsed(&plain).expect("a model").draft_head, None);
    }

    #[test]
    fn layers_are_counted_before_or_behind_as_their_first_number_says() {
        let of = |layers: &[u32], nested: bool| {
            let value = match nested {
                true => with(&[(EAGLE, json!({FEATURES: layers}))]),
                false => with(&[(FEATURES, json!(layers))]),
            };
            parsed(&value).expect("a draft head").draft_head.expect("one").layers.expect("they are named")
        };
        assert_eq!(of(&[1, 15, 28], true), [2, 16, 29], "outputs of layers");
        assert_eq!(of(&[2, 16, 29], true), [2, 16, 29], "inputs of layers");
        assert_eq!(of(&[24, 30, 36], false), [24, 30, 36]);
    }

    #[test]
    fn heads_of_another_kind_are_refused_by_name() {
        for (pairs, wanted) in [
            (vec![("num_hidden_layers", json!(2))], "num_hidden_layers is 2, must be 1 for a draft head"),
            (vec![("draft_vocab_size", json!(501))], "draft_vocab_size is 501, must be at most vocab_size (500)"),
            (vec![(EAGLE, json!({"use_aux_hidden_state": false}))], "eagle_config.use_aux_hidden_state is false"),
            (vec![("fc_norm", json!(true))], "fc_norm is true"),
            (vec![(FEATURES, json!([]))], "eagle_aux_hidden_state_layer_ids is [], must be a list of 1 to 8"),
            (vec![(EAGLE, json!({FEATURES: [2, -1]}))], "eagle_config.eagle_aux_hidden_state_layer_ids is [2,-1]"),
        ] {
            let error = parsed(&with(&pairs)).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }
}

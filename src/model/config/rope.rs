//! The rotary position embedding (RoPE): its parameters in both spellings of config.json, and the frequencies derived
//! from them.
//!
//! Not here: the tables of cosines and sines, which `decoder::attention` computes.

use serde_json::{Map, Value};

use super::ConfigProblem;
use super::families::{Facts, LocalRope};
use super::read::Reader;

/// How the rotary frequencies are changed to support a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No change.
    Default,
    /// Every frequency is divided by the same factor.
    Linear {
        /// The divisor of every frequency.
        factor: f64,
    },
    /// Low frequencies are divided, high ones are kept, and those in between are interpolated.
    Llama3 {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Frequencies with a wavelength above `original_context / low_freq_factor` are low.
        low_freq_factor: f64,
        /// Frequencies with a wavelength below `original_context / high_freq_factor` are high.
        high_freq_factor: f64,
        /// The context length of the original training, in tokens.
        original_context: f64,
    },
    /// YaRN: low frequencies are divided, high ones are kept, with a linear ramp over the dimensions in between.
    Yarn {
        /// The divisor of the low frequencies.
        factor: f64,
        /// The context length of the original training, in tokens.
        original_context: f64,
        /// The number of rotations over the original context at which the ramp begins: frequencies with more are kept.
        beta_fast: f64,
        /// The number of rotations over the original context at which the ramp ends: frequencies with fewer are
        /// divided.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// The factor that multiplies cos and sin. If `None`, it is derived from `factor`, `mscale` and
        /// `mscale_all_dim`.
        attention_factor: Option<f64>,
        /// The coefficient in the numerator of the derived attention factor.
        mscale: Option<f64>,
        /// The coefficient in the denominator of the derived attention factor.
        mscale_all_dim: Option<f64>,
    },
    /// LongRoPE: every frequency is divided by a factor of its own, of one list for short contexts and of another for
    /// long ones. transformers chooses by the length of a sequence so far; here the context that is served decides,
    /// because cached keys cannot change.
    LongRope {
        /// The divisors of a context of up to `original_context` tokens, `[rotary_dim / 2]`.
        short: Vec<f64>,
        /// The divisors of longer contexts, `[rotary_dim / 2]`.
        long: Vec<f64>,
        /// The context length of the original training, in tokens.
        original_context: f64,
        /// The factor that multiplies cos and sin.
        attention_factor: f64,
    },
}

/// Queries that grow with their position p: they are multiplied by `1 + beta * ln(1 + floor(p / original_context))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// The factor of the logarithm.
    pub beta: f64,
    /// The context length of the original training, in tokens.
    pub original_context: f64,
}

impl QueryGrowth {
    /// Returns the factor of the query at a position, computed in f32 as in transformers.
    pub fn factor(self, position: u32) -> f32 {
        let turns = (position as f32 / self.original_context as f32).floor();
        1.0 + self.beta as f32 * (1.0 + turns).ln()
    }
}

/// The pairs of a head's dimensions that are rotated together. Kernels rotate the halves of the first `rotary_dim`
/// dimensions; the rows of q and k of the other kinds are reordered where they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotatedPairs {
    /// j and j + rotary_dim / 2 (rotate-half).
    Halves,
    /// 2j and 2j + 1.
    Neighbours,
    /// j and j + head_dim / 2.
    HalvesOfHead,
}

impl RotatedPairs {
    /// Returns the place in a kernel's head of each dimension of a head of `dim` dimensions, of which `rotated` are rotated.
    pub fn places(self, dim: u32, rotated: u32) -> Vec<u32> {
        let half = rotated / 2;
        let place = |i: u32| match self {
            RotatedPairs::Neighbours if i < rotated => i / 2 + if i.is_multiple_of(2) { 0 } else { half },
            RotatedPairs::HalvesOfHead if i < half => i,
            RotatedPairs::HalvesOfHead if i < dim / 2 => i + half,
            RotatedPairs::HalvesOfHead if i < dim / 2 + half => i - dim / 2 + half,
            _ => i,
        };
        (0..dim).map(place).collect()
    }
}

/// The rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// The number of leading dimensions of each head that are rotated; even.
    pub rotary_dim: u32,
    /// The change of the frequencies for longer contexts.
    pub scaling: RopeScaling,
    /// The divisor of the exponents: mostly `rotary_dim`, but the dimensions of the whole head for proportional rotary
    /// embeddings.
    pub exponent_dim: u32,
    /// The pairing of dimensions that are rotated together.
    pub pairs: RotatedPairs,
    /// The growth of queries with their position.
    pub query_growth: Option<QueryGrowth>,
}

impl Rope {
    /// Returns the inverse frequencies, `[rotary_dim / 2]`, for a context of this many tokens: the angle of dimension pair
    /// `j` at position `p` is `p * inv_freq[j]`.
    ///
    /// Powers are computed in f64 and rounded to f32. The remaining operations use f32 in the same order as
    /// transformers, so that the results differ from its tables by at most one rounding.
    pub fn inv_freq(&self, context: u32) -> Vec<f32> {
        let dim = self.exponent_dim as f32;
        let theta = f64::from(self.theta as f32);
        let powers: Vec<f32> =
            (0..self.rotary_dim / 2).map(|j| theta.powf(f64::from((2 * j) as f32 / dim)) as f32).collect();
        match &self.scaling {
            RopeScaling::LongRope { short, long, original_context, .. } => {
                let divisors = if f64::from(context) > *original_context { long } else { short };
                powers.iter().zip(divisors).map(|(p, divisor)| 1.0 / (*divisor as f32 * p)).collect()
            }
            &RopeScaling::Default => powers.iter().map(|p| 1.0 / p).collect(),
            &RopeScaling::Linear { factor } => powers.iter().map(|p| 1.0 / p / factor as f32).collect(),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let longest = (original_context / low_freq_factor) as f32;
                let shortest = (original_context / high_freq_factor) as f32;
                let span = (high_freq_factor - low_freq_factor) as f32;
                let factor = factor as f32;
                powers
                    .iter()
                    .map(|p| {
                        let inv = 1.0 / p;
                        let wavelength = (1.0 / inv) * std::f64::consts::TAU as f32;
                        if wavelength > longest {
                            inv / factor
                        } else if wavelength < shortest {
                            inv
                        } else {
                            let ratio = (1.0 / wavelength) * original_context as f32;
                            let smooth = (ratio - low_freq_factor as f32) / span;
                            (1.0 - smooth) * inv / factor + smooth * inv
                        }
                    })
                    .collect()
            }
            &RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let dim = f64::from(self.rotary_dim);
                let correction = |rotations: f64| {
                    dim * (original_context / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (correction(beta_fast), correction(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(dim - 1.0);
                if low == high {
                    high += 0.001;
                }
                powers
                    .iter()
                    .enumerate()
                    .map(|(j, p)| {
                        let ramp = ((j as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        let kept = 1.0 - ramp;
                        let divided = 1.0 / (factor as f32 * p);
                        divided * (1.0 - kept) + (1.0 / p) * kept
                    })
                    .collect()
            }
        }
    }

    /// Returns the factor that multiplies cos and sin, for both queries and keys; 1 except with YaRN and LongRoPE.
    pub fn attention_scale(&self) -> f32 {
        if let RopeScaling::LongRope { attention_factor, .. } = self.scaling {
            return attention_factor as f32;
        }
        let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = self.scaling else {
            return 1.0;
        };
        let derived = |coefficient: f64| if factor <= 1.0 { 1.0 } else { 0.1 * coefficient * factor.ln() + 1.0 };
        let scale = match (attention_factor, mscale, mscale_all_dim) {
            (Some(scale), _, _) => scale,
            (None, Some(above), Some(below)) => derived(above) / derived(below),
            _ => derived(1.0),
        };
        scale as f32
    }
}

/// The rotary embedding's parameters in config.json.
pub(super) struct Parameters {
    pub(super) theta: f64,
    /// A factor that stretches the base, by its power of d / (d - 2) for d rotated dimensions.
    pub(super) alpha: Option<f64>,
    /// The fraction of a head that is rotated, above 0 and at most 1; `None` if the file does not say.
    pub(super) partial: Option<f64>,
    pub(super) scaling: RopeScaling,
    pub(super) query_growth: Option<QueryGrowth>,
    /// Whether the exponents' divisor is the whole head, whose halves rotate together.
    pub(super) proportional: bool,
}

/// The layers that a rotary embedding is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layers {
    /// Layers with full attention.
    Full,
    /// Layers with a sliding window.
    Sliding,
}

impl Layers {
    /// The name in `layer_types`, and of the layers' own object in `rope_parameters`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Layers::Full => "full_attention",
            Layers::Sliding => "sliding_attention",
        }
    }
}

/// Reads either spelling: `rope_parameters`, which may have an object for each kind of layers, or `rope_theta` next to
/// `rope_scaling`. `context` is the model's maximum sequence length. Returns `None` if it has recorded a problem.
pub(super) fn read(reader: &mut Reader, facts: &Facts, layers: Layers, context: Option<u32>) -> Option<Parameters> {
    let before = reader.problems.len();
    let mut section = "rope_scaling".to_owned();
    let mut parameters = Map::new();
    for name in ["rope_scaling", "rope_parameters"] {
        match reader.value(name).cloned() {
            None => {}
            // If both are given, `rope_scaling` wins, as in transformers.
            Some(Value::Object(map)) if parameters.is_empty() && !map.is_empty() => {
                section = name.to_owned();
                parameters = map;
            }
            Some(Value::Object(_)) => {}
            Some(other) => reader.wrong(name, other, "an object"),
        }
    }
    let nested = [Layers::Full, Layers::Sliding].iter().any(|kind| parameters.contains_key(kind.name()));
    let (mut default_theta, mut outer_theta) = (facts.defaults.theta, Some("rope_theta"));
    if nested {
        parameters = match parameters.remove(layers.name()) {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(map)) => map,
            Some(other) => {
                reader.wrong(&format!("{section}.{}", layers.name()), other, "an object");
                return None;
            }
        };
        section = format!("{section}.{}", layers.name());
    }
    if let (Layers::Sliding, LocalRope::Own(key, theta)) = (layers, facts.local_rope) {
        (default_theta, outer_theta) = (theta, key);
        if !nested {
            // The classes take nothing from such a section, and older ones took it for the other layers.
            let plain = |(key, value): (&String, &Value)| match key.as_str() {
                "rope_theta" => value.as_f64() == Some(facts.defaults.theta),
                "rope_type" | "type" => value == "default",
                _ => value.is_null(),
            };
            if section == "rope_parameters" && !parameters.iter().all(plain) {
                let rule = "an object each for full_attention and sliding_attention";
                reader.wrong("rope_parameters", Value::Object(parameters), rule);
                return None;
            }
            let theta = match key.and_then(|key| reader.value(key).cloned().map(|value| (key, value))) {
                None => theta,
                Some((key, value)) => match value.as_f64().filter(|n| n.is_finite() && *n > 1.0) {
                    Some(n) => n,
                    None => {
                        reader.wrong(key, value, "a number above 1");
                        return None;
                    }
                },
            };
            return Some(Parameters {
                theta,
                alpha: None,
                partial: None,
                scaling: RopeScaling::Default,
                query_growth: None,
                proportional: false,
            });
        }
    }
    if facts.rope_required && parameters.is_empty() {
        let key = reader.named("rope_parameters");
        reader.problems.push(ConfigProblem::Missing(key));
        return None;
    }
    let mut number = |key: &str, least: f64, default: Option<f64>| -> Option<f64> {
        let (value, key) = match parameters.get(key).filter(|value| !value.is_null()) {
            Some(value) => (Some(value.clone()), format!("{section}.{key}")),
            None if ["rope_theta", "partial_rotary_factor"].contains(&key) => {
                let outer = if key == "rope_theta" { outer_theta } else { Some(key) };
                (outer.and_then(|key| reader.value(key).cloned()), outer.unwrap_or(key).to_owned())
            }
            None => (None, format!("{section}.{key}")),
        };
        match (value, default) {
            (None, default) => default,
            (Some(value), _) => match value.as_f64().filter(|n| *n > least && (1e-30..=1e30).contains(n)) {
                Some(n) => Some(n),
                None => {
                    reader.wrong(&key, value, format!("a number above {least}"));
                    default
                }
            },
        }
    };

    let theta = number("rope_theta", 1.0, Some(default_theta))?;
    let partial = number("partial_rotary_factor", 0.0, None);
    let factor = number("factor", 0.0, None);
    let alpha = number("alpha", 0.0, None);
    let low = number("low_freq_factor", 0.0, None);
    let high = number("high_freq_factor", 0.0, None);
    let original = number("original_max_position_embeddings", 0.0, context.map(f64::from));
    let beta_fast = number("beta_fast", 0.0, Some(32.0))?;
    let beta_slow = number("beta_slow", 0.0, Some(1.0))?;
    let attention_factor = number("attention_factor", 0.0, None);
    // 0 turns these off, as in transformers.
    let mut coefficient = |key: &str| match parameters.get(key).and_then(Value::as_f64) {
        Some(0.0) => None,
        _ => number(key, 0.0, None),
    };
    let (mscale, mscale_all_dim) = (coefficient("mscale"), coefficient("mscale_all_dim"));
    let beta = if facts.query_growth { number("llama_4_scaling_beta", 0.0, None) } else { None };
    if let Some(partial) = partial.filter(|partial| *partial > 1.0) {
        let own = parameters.get("partial_rotary_factor").is_some_and(|value| !value.is_null());
        let key = if own { format!("{section}.partial_rotary_factor") } else { "partial_rotary_factor".to_owned() };
        reader.wrong(&key, partial, "at most 1");
    }
    // A key of this name outside the section takes precedence, as in transformers, which ignores it where kinds of layers
    // have rotary embeddings of their own.
    let by_kind = nested || facts.local_rope != LocalRope::Same;
    let original = match reader.value("original_max_position_embeddings").and_then(Value::as_f64) {
        Some(outer) if outer > 0.0 && !by_kind => Some(outer),
        _ => original,
    };
    let truncate = match parameters.get("truncate") {
        None => true,
        Some(Value::Null) => false,
        Some(Value::Bool(truncate)) => *truncate,
        Some(other) => {
            reader.wrong(&format!("{section}.truncate"), other, "true or false");
            true
        }
    };

    let kind = parameters.get("rope_type").or(parameters.get("type")).filter(|value| !value.is_null());
    let kind = match kind {
        None => "default",
        // Old Phi-3 files name LongRoPE so.
        Some(Value::String(kind))
            if ["su", "yarn"].contains(&kind.as_str()) && parameters.contains_key("long_factor") =>
        {
            "longrope"
        }
        // Positions in several dimensions, which are the same in all of them for text.
        Some(Value::String(kind)) if kind == "mrope" => "default",
        Some(Value::String(kind)) => kind.as_str(),
        Some(other) => {
            reader.problems.push(ConfigProblem::UnsupportedRope(other.to_string()));
            return None;
        }
    };
    let partial = partial.filter(|_| kind != "default" || !facts.default_rope_is_whole);
    let [short_factors, long_factors] = match kind {
        "longrope" => ["short_factor", "long_factor"].map(|key| {
            let value = parameters.get(key).cloned().unwrap_or(Value::Null);
            let list = value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>());
            let list = list.filter(|list| list.iter().all(|n| (1e-30..=1e30).contains(n)));
            if list.is_none() {
                reader.wrong(&format!("{section}.{key}"), value, "a list of positive numbers");
            }
            list
        }),
        _ => [None, None],
    };
    let mut need = |key: &str, value: Option<f64>| {
        let key = reader.named(&format!("{section}.{key}"));
        // An invalid value has already been recorded under the same key.
        let noted =
            reader.problems.iter().any(|problem| matches!(problem, ConfigProblem::Value { key: k, .. } if *k == key));
        if value.is_none() && !noted {
            reader.problems.push(ConfigProblem::Missing(key));
        }
        value
    };
    let scaling = match kind {
        "default" => Some(RopeScaling::Default),
        "proportional" => Some(match factor {
            None => RopeScaling::Default,
            Some(factor) => RopeScaling::Linear { factor },
        }),
        // It changes frequencies beyond `max_position_embeddings` only, and no longer context is served.
        "dynamic" if facts.rope_alpha && alpha.is_some() => Some(RopeScaling::Default),
        "dynamic" => need("factor", factor).map(|_| RopeScaling::Default),
        "linear" => need("factor", factor).map(|factor| RopeScaling::Linear { factor }),
        "llama3" => {
            let factor = need("factor", factor);
            let low = need("low_freq_factor", low);
            let high = need("high_freq_factor", high);
            if let (Some(low), Some(high)) = (low, high)
                && high <= low
            {
                let rule = format!("above low_freq_factor ({low})");
                reader.wrong(&format!("{section}.high_freq_factor"), high, rule);
            }
            match (factor, low, high, original) {
                (Some(factor), Some(low_freq_factor), Some(high_freq_factor), Some(original_context)) => {
                    Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context })
                }
                _ => None,
            }
        }
        "yarn" => {
            // Without an explicit factor, it is the ratio of the new context to the original one.
            let factor = factor.or(match (context, original) {
                (Some(context), Some(original)) => Some(f64::from(context) / original),
                _ => None,
            });
            match (factor, original) {
                (Some(factor), Some(original_context)) => Some(RopeScaling::Yarn {
                    factor,
                    original_context,
                    beta_fast,
                    beta_slow,
                    truncate,
                    attention_factor,
                    mscale,
                    mscale_all_dim,
                }),
                _ => None,
            }
        }
        "longrope" => {
            let original = need("original_max_position_embeddings", original);
            if let Some(original) = original.filter(|original| *original <= 1.0) {
                reader.wrong(&format!("{section}.original_max_position_embeddings"), original, "above 1");
            }
            let attention_factor = attention_factor.or_else(|| {
                let original = original?;
                let factor = factor.or(context.map(|context| f64::from(context) / original))?;
                Some(if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() })
            });
            match (short_factors, long_factors, original, attention_factor) {
                (Some(short), Some(long), Some(original_context), Some(attention_factor)) => {
                    Some(RopeScaling::LongRope { short, long, original_context, attention_factor })
                }
                _ => None,
            }
        }
        other => {
            reader.problems.push(ConfigProblem::UnsupportedRope(other.to_owned()));
            None
        }
    };
    let query_growth = match (beta, original) {
        (Some(beta), Some(original_context)) => Some(QueryGrowth { beta, original_context }),
        _ => None,
    };
    let proportional = kind == "proportional";
    (reader.problems.len() == before).then_some(Parameters {
        theta,
        alpha: alpha.filter(|_| facts.rope_alpha && kind == "dynamic"),
        partial,
        scaling: scaling?,
        query_growth,
        proportional,
    })
}

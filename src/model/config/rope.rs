//! Rotary embedding: its parameters in both spellings of config.json, and the frequencies that
//! follow from them. Deliberately absent: tables of cosines (`dense` makes them).

use serde_json::{Map, Value};

use super::ConfigProblem;
use super::read::Reader;

/// How the rotary frequencies are changed for a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency is divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// Low frequencies are divided, high ones kept, those between interpolated.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are low.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are high.
        high_freq_factor: f64,
        /// Context of the first training, in tokens.
        original_context: f64,
    },
    /// A linear ramp over the dimensions between divided and kept frequencies.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Context of the first training, in tokens.
        original_context: f64,
        /// Rotations over the original context at which the ramp begins.
        beta_fast: f64,
        /// Rotations at which it ends.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Multiplies cos and sin; `None`: derived from `factor` and the two below.
        attention_factor: Option<f64>,
        /// Numerator's coefficient of the derived attention factor.
        mscale: Option<f64>,
        /// Denominator's coefficient of the derived attention factor.
        mscale_all_dim: Option<f64>,
    },
}

/// Rotary position embedding, rotate-half style.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How many of a head's first dimensions are rotated (even).
    pub rotary_dim: u32,
    /// The change for longer contexts.
    pub scaling: RopeScaling,
}

impl Rope {
    /// `[rotary_dim / 2]`: the angle of dimension pair `j` at position `p` is `p * inv_freq[j]`.
    ///
    /// Powers are taken in f64 and rounded; what follows is done in f32 in the order of
    /// transformers, so that the result differs from its tables by a rounding at most.
    pub fn inv_freq(&self) -> Vec<f32> {
        let dim = self.rotary_dim as f32;
        let theta = f64::from(self.theta as f32);
        let powers: Vec<f32> =
            (0..self.rotary_dim / 2).map(|j| theta.powf(f64::from((2 * j) as f32 / dim)) as f32).collect();
        match self.scaling {
            RopeScaling::Default => powers.iter().map(|p| 1.0 / p).collect(),
            RopeScaling::Linear { factor } => powers.iter().map(|p| 1.0 / p / factor as f32).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
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
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
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

    /// Multiplies cos and sin, of queries and of keys; 1 except with yarn.
    pub fn attention_scale(&self) -> f32 {
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

/// What config.json says of the rotary embedding.
pub(super) struct Parameters {
    pub(super) theta: f64,
    /// How much of a head is rotated, above 0 and at most 1; `None` where the file does not say.
    pub(super) partial: Option<f64>,
    pub(super) scaling: RopeScaling,
}

/// Both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`.
pub(super) fn read(reader: &mut Reader, context: Option<u32>) -> Option<Parameters> {
    let before = reader.problems.len();
    let mut section = "rope_scaling";
    let mut parameters = Map::new();
    for name in ["rope_scaling", "rope_parameters"] {
        match reader.value(name).cloned() {
            None => {}
            // transformers prefers `rope_scaling` where both are given.
            Some(Value::Object(map)) if parameters.is_empty() && !map.is_empty() => {
                section = name;
                parameters = map;
            }
            Some(Value::Object(_)) => {}
            Some(other) => reader.wrong(name, other, "an object"),
        }
    }
    let mut number = |key: &str, least: f64, default: Option<f64>| -> Option<f64> {
        let (value, key) = match parameters.get(key).filter(|value| !value.is_null()) {
            Some(value) => (Some(value.clone()), format!("{section}.{key}")),
            None if key == "rope_theta" || key == "partial_rotary_factor" => {
                (reader.value(key).cloned(), key.to_owned())
            }
            None => (None, format!("{section}.{key}")),
        };
        match (value, default) {
            (None, default) => default,
            (Some(value), _) => match value.as_f64().filter(|n| n.is_finite() && *n > least) {
                Some(n) => Some(n),
                None => {
                    reader.wrong(&key, value, format!("a number above {least}"));
                    default
                }
            },
        }
    };

    let theta = number("rope_theta", 1.0, Some(10_000.0))?;
    let partial = number("partial_rotary_factor", 0.0, None);
    let factor = number("factor", 0.0, None);
    let low = number("low_freq_factor", 0.0, None);
    let high = number("high_freq_factor", 0.0, None);
    let original = number("original_max_position_embeddings", 0.0, context.map(f64::from));
    let beta_fast = number("beta_fast", 0.0, Some(32.0))?;
    let beta_slow = number("beta_slow", 0.0, Some(1.0))?;
    let attention_factor = number("attention_factor", 0.0, None);
    let mscale = number("mscale", 0.0, None);
    let mscale_all_dim = number("mscale_all_dim", 0.0, None);
    if let Some(partial) = partial.filter(|partial| *partial > 1.0) {
        let own = parameters.get("partial_rotary_factor").is_some_and(|value| !value.is_null());
        let key = if own { format!("{section}.partial_rotary_factor") } else { "partial_rotary_factor".to_owned() };
        reader.wrong(&key, partial, "at most 1");
    }
    // A model-wide key beside the section has priority in transformers.
    let original = match reader.value("original_max_position_embeddings").and_then(Value::as_f64) {
        Some(outer) if outer > 0.0 => Some(outer),
        _ => original,
    };
    let truncate = match parameters.get("truncate") {
        None | Some(Value::Null) => true,
        Some(Value::Bool(truncate)) => *truncate,
        Some(other) => {
            reader.wrong(&format!("{section}.truncate"), other, "true or false");
            true
        }
    };

    let kind = parameters.get("rope_type").or(parameters.get("type")).filter(|value| !value.is_null());
    let kind = match kind {
        None => "default",
        Some(Value::String(kind)) => kind.as_str(),
        Some(other) => {
            reader.problems.push(ConfigProblem::UnsupportedRope(other.to_string()));
            return None;
        }
    };
    let mut need = |key: &str, value: Option<f64>| {
        let key = reader.named(&format!("{section}.{key}"));
        // A wrong value has already been noted under the same key.
        let noted =
            reader.problems.iter().any(|problem| matches!(problem, ConfigProblem::Value { key: k, .. } if *k == key));
        if value.is_none() && !noted {
            reader.problems.push(ConfigProblem::Missing(key));
        }
        value
    };
    let scaling = match kind {
        "default" => Some(RopeScaling::Default),
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
            // Where the factor is absent, it is the growth of the context.
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
        other => {
            reader.problems.push(ConfigProblem::UnsupportedRope(other.to_owned()));
            None
        }
    };
    (reader.problems.len() == before).then_some(Parameters { theta, partial, scaling: scaling? })
}

//! The dense modules of an embedding model: linear maps that its pooled vectors go through, one after the other, before they
//! are cut and scaled. They are computed here, on the host: a prompt needs each weight once.
//! Not here: which modules a model has (`embedding`).

use super::{EmbeddingError, wrong};
use crate::config::file;
use serde_json::{Map, Value};

/// The maximum number of inputs, and of outputs, of a module.
const MOST: u64 = 1 << 16;
/// The number of sums that are kept apart, so that they can be added in parallel.
const LANES: usize = 16;

/// A linear map with an activation: `activation(weight * x + bias)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    /// The number of values that it takes.
    pub inputs: u32,
    /// The number of values that it gives.
    pub outputs: u32,
    /// `[outputs][inputs]`.
    pub weight: Vec<f32>,
    /// `[outputs]`.
    pub bias: Option<Vec<f32>>,
    /// Whether the hyperbolic tangent of each value is taken.
    pub tanh: bool,
}

/// Returns the values of the tensor of a module's folder that has this name and must have this shape, `[outputs, inputs]` or
/// `[outputs]`; `None` if there is no such tensor.
pub type ReadTensor<'a> = dyn Fn(&str, &str, &[u64]) -> Result<Option<Vec<f32>>, EmbeddingError> + 'a;

impl Dense {
    /// Reads a module that takes `size` values from its folder, whose config.json, named `file`, has these settings.
    ///
    /// # Errors Another number of inputs, an activation that is not supported, or a tensor that is missing or of another
    /// shape.
    pub(super) fn read(
        folder: &str,
        (file, settings): (&str, &Map<String, Value>),
        size: u32,
        tensor: &ReadTensor<'_>,
    ) -> Result<Dense, EmbeddingError> {
        let of = |key: &str| settings.get(key).cloned().unwrap_or_default();
        let count = |key: &str| {
            let value = of(key);
            let count = value.as_u64().filter(|count| (1..=MOST).contains(count));
            count.ok_or_else(|| wrong(file, key, &value, format!("an integer from 1 to {MOST}")))
        };
        let (inputs, outputs) = (count("in_features")?, count("out_features")?);
        if inputs != u64::from(size) {
            let rule = format!("{size}, the number of values of the vector before it");
            return Err(wrong(file, "in_features", &of("in_features"), rule));
        }
        if inputs * outputs * 4 > file::LARGE {
            let rule = format!("at most {} with {inputs} inputs", file::LARGE / (4 * inputs));
            return Err(wrong(file, "out_features", &of("out_features"), rule));
        }
        // A class's path has changed from version to version; its name has not. Without the key it is Tanh.
        let activation = of("activation_function");
        let tanh = match activation.as_str().map(|path| path.rsplit('.').next().unwrap_or(path)) {
            Some("Identity") => false,
            Some("Tanh") => true,
            None if activation.is_null() => true,
            _ => return Err(wrong(file, "activation_function", &activation, "Identity or Tanh")),
        };
        // Newer files say which of the values that modules hand on it reads and writes.
        for key in ["module_input_name", "module_output_name"] {
            match of(key) {
                Value::Null => {}
                Value::String(name) if name == "sentence_embedding" => {}
                other => return Err(wrong(file, key, &other, "sentence_embedding")),
            }
        }
        let has_bias = match of("bias") {
            Value::Null => true,
            Value::Bool(has) => has,
            other => return Err(wrong(file, "bias", &other, "true or false")),
        };
        let need = |name: &str, shape: &[u64]| {
            tensor(folder, name, shape)?.ok_or_else(|| EmbeddingError::NoTensor {
                folder: folder.to_owned(),
                tensor: name.to_owned(),
                shape: shape.to_vec(),
            })
        };
        Ok(Dense {
            inputs: inputs as u32,
            outputs: outputs as u32,
            weight: need("linear.weight", &[outputs, inputs])?,
            bias: if has_bias { Some(need("linear.bias", &[outputs])?) } else { None },
            tanh,
        })
    }

    /// Returns the results for vectors of [`Dense::inputs`] values each, in f32.
    ///
    /// # Panics
    /// If a vector has another number of values: a bug of the caller.
    pub fn apply(&self, vectors: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let inputs = self.inputs as usize;
        assert!(vectors.iter().all(|vector| vector.len() == inputs), "vectors of other sizes than {inputs}");
        let mut results: Vec<Vec<f32>> = vectors.iter().map(|_| Vec::with_capacity(self.outputs as usize)).collect();
        // Row by row, so that a row's weights are read from memory once for all vectors.
        for (index, row) in self.weight.chunks_exact(inputs).enumerate() {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[index]);
            for (vector, result) in vectors.iter().zip(&mut results) {
                let value = dot(row, vector) + bias;
                result.push(if self.tanh { value.tanh() } else { value });
            }
        }
        results
    }
}

/// Returns the product of two vectors of the same length.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, b) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.0.iter().zip(b.0) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = a.1.iter().zip(b.1).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_go_through_a_linear_map() {
        // More inputs than lanes, and a rest.
        let inputs = 2 * LANES + 3;
        let weight: Vec<f32> = (0..3 * inputs).map(|i| (i * 37 % 19) as f32 / 19.0 - 0.5).collect();
        let dense = Dense { inputs: inputs as u32, outputs: 3, weight, bias: Some(vec![0.25, 0.0, -1.0]), tanh: false };
        let vectors: Vec<Vec<f32>> =
            (1..=2).map(|n| (0..inputs).map(|i| ((i * n) % 7) as f32 - 3.0).collect()).collect();
        let wanted = |vector: &[f32], row: usize| {
            let of = dense.weight[row * inputs..][..inputs].iter().zip(vector);
            of.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() + f64::from(dense.bias.as_ref().unwrap()[row])
        };
        let found = dense.apply(&vectors);
        let bounded = Dense { tanh: true, ..dense.clone() }.apply(&vectors);
        for (index, vector) in vectors.iter().enumerate() {
            for row in 0..3 {
                let wanted = wanted(vector, row);
                assert!((f64::from(found[index][row]) - wanted).abs() < 1e-5);
                assert!((f64::from(bounded[index][row]) - wanted.tanh()).abs() < 1e-5);
            }
        }
    }
}

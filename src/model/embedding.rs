//! The embedding settings of a checkpoint, from the files of sentence-transformers: how hidden states are pooled, the dense
//! modules behind that, whether the vector is scaled to unit length, the texts that are put before inputs, and the two
//! tokens by which a reranker answers. A checkpoint without these files is a language model: its last token is pooled, or if its attention is
//! not causal the mean of all.
//! Not here: the model itself, and the prompt of a reranker.

pub mod dense;

use super::checkpoint::Checkpoint;
use crate::config::file;
use crate::memory::pack;
use dense::{Dense, ReadTensor};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

/// The file that lists the modules of a model. Without it there are none.
const MODULES: &str = "modules.json";
/// The file with the texts that are put before inputs.
const PROMPTS: &str = "config_sentence_transformers.json";

/// How the hidden states of a prompt, after the model's final norm, become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The state of the last token.
    Last,
    /// The state of the first token.
    First,
    /// The mean of the states of all tokens.
    Mean,
}

impl Pooling {
    /// Returns which of the tokens `start..end` of a prompt of `count` tokens are pooled.
    pub fn pooled(self, start: u32, end: u32, count: u32) -> Range<u32> {
        let all = match self {
            Pooling::Last => count - 1..count,
            Pooling::First => 0..1,
            Pooling::Mean => 0..count,
        };
        all.start.max(start)..all.end.min(end)
    }

    /// Returns the number of tokens of a prompt of `count` tokens that are pooled.
    pub fn count(self, count: u32) -> u32 {
        self.pooled(0, count, count).len() as u32
    }
}

/// How a checkpoint makes vectors of texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// The number of values of a vector.
    pub size: u32,
    /// How hidden states become a vector.
    pub pooling: Pooling,
    /// The linear maps that the pooled vector goes through, in their order. The first takes as many values as the model's
    /// hidden states have, the last gives `size`.
    pub dense: Arc<[Dense]>,
    /// Whether vectors are scaled to unit length unless a request says otherwise.
    pub normalize: bool,
    /// Whether the checkpoint's files say that it makes vectors: it is not meant to draw tokens.
    pub declared: bool,
    /// The texts that a request may have put before its inputs, by name.
    pub prompts: BTreeMap<String, String>,
    /// The name of the default text, which is put before inputs of requests that name none.
    pub default_prompt: Option<String>,
    /// The tokens by which a reranker says that a document is relevant and that it is not, if its files say so.
    pub answers: Option<[u32; 2]>,
}

impl Default for Embedding {
    fn default() -> Embedding {
        Embedding {
            size: 0,
            pooling: Pooling::Last,
            dense: Arc::new([]),
            normalize: true,
            declared: false,
            prompts: BTreeMap::new(),
            default_prompt: None,
            answers: None,
        }
    }
}

/// A file that describes something that is not supported, or nothing that makes sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EmbeddingError {
    /// A file cannot be read.
    #[error("{file} cannot be read: {reason}")]
    Unreadable {
        /// The file's path within the checkpoint.
        file: String,
        /// The reason.
        reason: String,
    },
    /// A value is missing, of the wrong type or not supported.
    #[error("{file}: {key} is {value}, must be {rule}")]
    Value {
        /// The file's path within the checkpoint.
        file: String,
        /// The key.
        key: String,
        /// The value, as JSON.
        value: String,
        /// The values allowed.
        rule: String,
    },
    /// A tensor of a module has another shape than its settings say.
    #[error("{folder}: tensor {tensor} has shape {has:?}, must have {shape:?}")]
    Shape {
        /// The module's folder.
        folder: String,
        /// The tensor's name.
        tensor: String,
        /// Its shape, outermost dimension first.
        has: Vec<u64>,
        /// The shape that the module's settings give.
        shape: Vec<u64>,
    },
    /// A tensor of a module is missing.
    #[error("{folder}: tensor {tensor} is missing, must have shape {shape:?}")]
    NoTensor {
        /// The module's folder.
        folder: String,
        /// The tensor's name.
        tensor: String,
        /// The shape that the module's settings give.
        shape: Vec<u64>,
    },
    /// The values of a tensor of a module cannot be read.
    #[error("{folder}: tensor {tensor} cannot be read: {reason}")]
    Tensor {
        /// The module's folder.
        folder: String,
        /// The tensor's name.
        tensor: String,
        /// The reason.
        reason: String,
    },
}

impl Embedding {
    /// Returns the vectors that prompts' pooled hidden states become: what the dense modules make of them, neither cut nor
    /// scaled. Takes a few milliseconds for each if there are such modules.
    pub fn project(&self, mut pooled: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        for dense in &*self.dense {
            pooled = dense.apply(&pooled);
        }
        pooled
    }
}

/// Reads the files of a checkpoint. `read` returns the content of a file by its path within the checkpoint, or `None` if
/// there is no such file; `tensor` the values of a module's tensors. The model's hidden states have `hidden` values, and it
/// has `vocabulary` tokens.
///
/// # Errors The first problem found.
pub fn read(
    read: impl Fn(&str) -> Result<Option<Vec<u8>>, EmbeddingError>,
    tensor: &ReadTensor<'_>,
    (hidden, vocabulary): (u32, u32),
) -> Result<Embedding, EmbeddingError> {
    let mut embedding = Embedding { size: hidden, ..Embedding::default() };
    if let Some(modules) = json(&read, MODULES)? {
        let Value::Array(modules) = modules else { return Err(wrong(MODULES, "the file", &modules, "a list")) };
        embedding.normalize = false;
        for (index, module) in modules.iter().enumerate() {
            apply(&read, tensor, &mut embedding, (index, module), vocabulary)?;
        }
    }
    if let Some(Value::Object(mut prompts)) = json(&read, PROMPTS)? {
        if let Some(Value::Object(named)) = prompts.remove("prompts") {
            let text = |(name, text): (String, Value)| match text {
                Value::String(text) => Ok((name, text)),
                other => Err(wrong(PROMPTS, &format!("prompts.{name}"), &other, "a text")),
            };
            embedding.prompts = named.into_iter().map(text).collect::<Result<_, _>>()?;
        }
        embedding.default_prompt = match prompts.remove("default_prompt_name") {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) if embedding.prompts.contains_key(&name) => Some(name),
            Some(other) => return Err(wrong(PROMPTS, "default_prompt_name", &other, "one of the prompts' names")),
        };
    }
    Ok(embedding)
}

/// Reads the files of an open checkpoint; those of a GGUF file are in the file. See [`read`].
///
/// # Errors The first problem found.
pub fn of(checkpoint: &Checkpoint) -> Result<Embedding, EmbeddingError> {
    let embedded = |name: &str| {
        let found = checkpoint.embedded.iter().find(|(other, _)| *other == name);
        Ok(found.map(|(_, bytes)| bytes.clone()))
    };
    let open = |name: &str| match file::read(&checkpoint.dir.join(name), file::SMALL) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(EmbeddingError::Unreadable { file: name.to_owned(), reason: error.to_string() }),
    };
    let tensor = |folder: &str, name: &str, shape: &[u64]| module_tensor(checkpoint, folder, name, shape);
    let config = &checkpoint.config;
    let sizes = (config.hidden, config.vocab);
    let read = match checkpoint.embedded.is_empty() {
        true => read(open, &tensor, sizes)?,
        false => read(embedded, &tensor, sizes)?,
    };
    Ok(match config.causal || read.declared {
        true => read,
        // It draws no tokens, and the last token is not one that sees more than others.
        false => Embedding { pooling: Pooling::Mean, declared: true, ..read },
    })
}

/// Reads a tensor of a module's folder in f32; see [`ReadTensor`].
fn module_tensor(
    checkpoint: &Checkpoint,
    folder: &str,
    name: &str,
    shape: &[u64],
) -> Result<Option<Vec<f32>>, EmbeddingError> {
    let unreadable = |reason: String| EmbeddingError::Tensor { folder: folder.into(), tensor: name.into(), reason };
    let found = checkpoint.module_tensor(folder, name).map_err(|problem| unreadable(problem.to_string()))?;
    let Some((info, place)) = found else { return Ok(None) };
    if info.shape != shape {
        let (folder, tensor) = (folder.to_owned(), name.to_owned());
        return Err(EmbeddingError::Shape { folder, tensor, has: info.shape, shape: shape.to_vec() });
    }
    let format = info.format.ok_or_else(|| unreadable(format!("numbers of type {} are not supported", info.dtype)))?;
    let cols = *shape.last().unwrap_or(&1) as u32;
    let mut values = vec![0.0; shape.iter().product::<u64>() as usize];
    let row_bytes = format.row_bytes(cols) as usize;
    let needs = (row_bytes * values.len() / cols as usize) as u64;
    if needs != place.bytes {
        return Err(unreadable(format!("it has {} bytes, must have {needs}", place.bytes)));
    }
    let bytes = place.read().map_err(|problem| unreadable(problem.to_string()))?;
    for (row, out) in bytes.chunks_exact(row_bytes).zip(values.chunks_exact_mut(cols as usize)) {
        pack::floats(format, row, out).map_err(|_| unreadable("it has values that are not finite".to_owned()))?;
    }
    Ok(Some(values))
}

/// Applies a module of the list to what is known.
fn apply(
    read: &impl Fn(&str) -> Result<Option<Vec<u8>>, EmbeddingError>,
    tensor: &ReadTensor<'_>,
    embedding: &mut Embedding,
    (index, module): (usize, &Value),
    vocabulary: u32,
) -> Result<(), EmbeddingError> {
    let key = |name: &str| format!("[{index}].{name}");
    let kind = module["type"].as_str().ok_or_else(|| wrong(MODULES, &key("type"), &module["type"], "a text"))?;
    // The classes have moved between modules of the library; their names have not.
    let class = kind.rsplit('.').next().unwrap_or(kind);
    let folder = module["path"].as_str().unwrap_or_default();
    let file = format!("{folder}/config.json");
    let settings = || match json(read, &file)? {
        Some(Value::Object(settings)) => Ok(settings),
        other => Err(wrong(&file, "the file", &other.unwrap_or_default(), "an object")),
    };
    match class {
        "Transformer" => {}
        "Normalize" => embedding.normalize = true,
        "Dense" => {
            if !embedding.declared || embedding.normalize {
                return Err(wrong(MODULES, &key("type"), &Value::from(kind), "behind Pooling and before Normalize"));
            }
            let mut parts = Path::new(folder).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(wrong(MODULES, &key("path"), &Value::from(folder), "a folder of the checkpoint"));
            }
            let dense = Dense::read(folder, (&file, &settings()?), embedding.size, tensor)?;
            embedding.size = dense.outputs;
            embedding.dense = embedding.dense.iter().cloned().chain([dense]).collect();
        }
        "Pooling" if embedding.declared => {
            return Err(wrong(MODULES, &key("type"), &Value::from(kind), "the only Pooling"));
        }
        "Pooling" => {
            embedding.pooling = pooling(&file, &settings()?)?;
            embedding.declared = true;
        }
        "LogitScore" => {
            let settings = settings()?;
            let token = |name: &str| {
                let value = settings.get(name).unwrap_or(&Value::Null);
                let token = value.as_u64().filter(|token| *token < u64::from(vocabulary));
                token
                    .map(|token| token as u32)
                    .ok_or_else(|| wrong(&file, name, value, format!("a token of the vocabulary of {vocabulary}")))
            };
            embedding.answers = Some([token("true_token_id")?, token("false_token_id")?]);
        }
        _ => {
            let rule = "Transformer, Pooling, Dense, Normalize or LogitScore";
            return Err(wrong(MODULES, &key("type"), &Value::from(kind), rule));
        }
    }
    Ok(())
}

/// Reads the pooling from the settings of its module, in the older or the newer form.
fn pooling(file: &str, settings: &Map<String, Value>) -> Result<Pooling, EmbeddingError> {
    const OLDER: &str = "pooling_mode_";
    let refused =
        |key: &str, value: &Value| Err(wrong(file, key, value, "cls, lasttoken or mean, and only one of them"));
    if settings.get("include_prompt") == Some(&Value::Bool(false)) {
        return Err(wrong(file, "include_prompt", &Value::Bool(false), "true"));
    }
    let named = match settings.get("pooling_mode") {
        Some(Value::String(mode)) => vec![mode.as_str()],
        Some(Value::Array(modes)) => modes.iter().filter_map(Value::as_str).collect(),
        _ => {
            let set = settings.iter().filter(|(_, value)| **value == Value::Bool(true));
            set.filter_map(|(key, _)| key.strip_prefix(OLDER)).collect()
        }
    };
    match named[..] {
        ["lasttoken"] => Ok(Pooling::Last),
        ["cls" | "cls_token"] => Ok(Pooling::First),
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        _ => refused("pooling_mode", &Value::from(named)),
    }
}

fn json(
    read: &impl Fn(&str) -> Result<Option<Vec<u8>>, EmbeddingError>,
    file: &str,
) -> Result<Option<Value>, EmbeddingError> {
    let parse = |bytes: Vec<u8>| {
        serde_json::from_slice(&bytes)
            .map_err(|error| EmbeddingError::Unreadable { file: file.to_owned(), reason: error.to_string() })
    };
    read(file)?.map(parse).transpose()
}

fn wrong(file: &str, key: &str, value: &Value, rule: impl Into<String>) -> EmbeddingError {
    EmbeddingError::Value { file: file.to_owned(), key: key.to_owned(), value: value.to_string(), rule: rule.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(files: &[(&str, Value)]) -> Result<Embedding, EmbeddingError> {
        let open = |name: &str| {
            Ok(files.iter().find(|(other, _)| *other == name).map(|(_, value)| value.to_string().into_bytes()))
        };
        read(open, &|_, _, _| Ok(None), (0, 100))
    }

    fn modules(classes: &[&str]) -> (&'static str, Value) {
        let module = |(index, class): (usize, &&str)| {
            let path = if index == 0 { String::new() } else { format!("{index}_{class}") };
            json!({"idx": index, "name": index.to_string(), "path": path, "type": format!("sentence_transformers.models.{class}")})
        };
        (MODULES, classes.iter().enumerate().map(module).collect())
    }

    #[test]
    fn each_pooled_token_is_in_one_chunk() {
        for (pooling, count, wanted) in [(Pooling::Last, 7, 6..7), (Pooling::First, 7, 0..1), (Pooling::Mean, 7, 0..7)]
        {
            let chunks = [0..3, 3..6, 6..7].map(|chunk: Range<u32>| pooling.pooled(chunk.start, chunk.end, count));
            assert_eq!(chunks.into_iter().flatten().collect::<Vec<_>>(), wanted.collect::<Vec<_>>(), "{pooling:?}");
            assert_eq!(pooling.count(1), 1);
        }
    }

    #[test]
    fn a_language_model_pools_its_last_token() {
        assert_eq!(of(&[]), Ok(Embedding::default()));
    }

    #[test]
    fn poolings_of_both_forms_are_read() {
        let settings = [
            (json!({"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false}), Pooling::Last),
            (json!({"pooling_mode_cls_token": true}), Pooling::First),
            (json!({"pooling_mode": "mean", "include_prompt": true}), Pooling::Mean),
            (json!({"pooling_mode": ["lasttoken"]}), Pooling::Last),
        ];
        for (settings, pooling) in settings {
            let read = of(&[modules(&["Transformer", "Pooling", "Normalize"]), ("1_Pooling/config.json", settings)]);
            assert_eq!(read, Ok(Embedding { pooling, declared: true, ..Embedding::default() }));
        }
        let plain = json!({"pooling_mode": "mean"});
        let read = of(&[modules(&["Transformer", "Pooling"]), ("1_Pooling/config.json", plain)]).unwrap();
        assert!(!read.normalize, "there is no module that does");
    }

    #[test]
    fn prompts_and_the_answers_of_rerankers_are_read() {
        let prompts = json!({"prompts": {"query": "Instruct: x\nQuery:", "document": ""}, "default_prompt_name": null});
        let read = of(&[(PROMPTS, prompts)]).unwrap();
        assert_eq!(read.prompts["query"], "Instruct: x\nQuery:");
        assert_eq!((read.prompts.len(), read.default_prompt), (2, None));
        let answers = json!({"true_token_id": 7, "false_token_id": 9});
        let read = of(&[modules(&["Transformer", "LogitScore"]), ("1_LogitScore/config.json", answers)]).unwrap();
        assert_eq!((read.answers, read.declared), (Some([7, 9]), false));
    }

    /// The files of a model with hidden states of 4 values, and a dense module with these settings.
    fn dense_files(classes: &[&str], settings: Value) -> Vec<(&'static str, Value)> {
        let pooling = ("1_Pooling/config.json", json!({"pooling_mode": "mean"}));
        vec![modules(classes), pooling, ("2_Dense/config.json", settings)]
    }

    /// Reads files as those of a model with hidden states of 4 values; `linear.weight` has the shape `has`.
    fn of_dense(files: &[(&str, Value)], has: &[u64]) -> Result<Embedding, EmbeddingError> {
        let open = |name: &str| {
            Ok(files.iter().find(|(other, _)| *other == name).map(|(_, value)| value.to_string().into_bytes()))
        };
        let tensor = |folder: &str, name: &str, shape: &[u64]| match name {
            "linear.weight" if has == shape => Ok(Some((0..has.iter().product()).map(|n| n as f32).collect())),
            "linear.weight" if !has.is_empty() => {
                let (folder, tensor) = (folder.to_owned(), name.to_owned());
                Err(EmbeddingError::Shape { folder, tensor, has: has.to_vec(), shape: shape.to_vec() })
            }
            _ => Ok(None),
        };
        read(open, &tensor, (4, 100))
    }

    const WITH_DENSE: [&str; 4] = ["Transformer", "Pooling", "Dense", "Normalize"];

    #[test]
    fn dense_modules_are_read_and_change_the_size() {
        let settings = json!({
            "in_features": 4, "out_features": 3, "bias": false,
            "activation_function": "torch.nn.modules.linear.Identity"
        });
        let read = of_dense(&dense_files(&WITH_DENSE, settings.clone()), &[3, 4]).unwrap();
        assert_eq!((read.size, read.dense.len(), read.normalize, read.dense[0].tanh), (3, 1, true, false));
        assert_eq!(read.project(vec![vec![1.0, 0.0, 0.0, 2.0]]), [[6.0, 18.0, 30.0]]);
        let mut bounded = settings;
        bounded["activation_function"] = json!("torch.nn.modules.activation.Tanh");
        assert!(of_dense(&dense_files(&WITH_DENSE, bounded), &[3, 4]).unwrap().dense[0].tanh);
    }

    #[test]
    fn wrong_dense_modules_are_named_with_both_numbers() {
        let settings = |change: (&str, Value)| {
            let mut settings = json!({
                "in_features": 4, "out_features": 3, "bias": false, "activation_function": "nn.Identity"
            });
            settings[change.0] = change.1;
            settings
        };
        let error = |change: (&str, Value), has: &[u64]| {
            of_dense(&dense_files(&WITH_DENSE, settings(change)), has).unwrap_err().to_string()
        };
        let same = || ("bias", json!(false));
        assert_eq!(error(same(), &[3, 5]), "2_Dense: tensor linear.weight has shape [3, 5], must have [3, 4]");
        assert_eq!(error(same(), &[]), "2_Dense: tensor linear.weight is missing, must have shape [3, 4]");
        let bias = error(("bias", json!(true)), &[3, 4]);
        assert_eq!(bias, "2_Dense: tensor linear.bias is missing, must have shape [3]");
        let inputs = error(("in_features", json!(5)), &[3, 5]);
        assert_eq!(
            inputs,
            "2_Dense/config.json: in_features is 5, must be 4, the number of values of the vector before it"
        );
        let outputs = error(("out_features", json!(0)), &[0, 4]);
        assert_eq!(outputs, "2_Dense/config.json: out_features is 0, must be an integer from 1 to 65536");
        let activation = error(("activation_function", json!("torch.nn.modules.activation.GELU")), &[3, 4]);
        assert!(activation.ends_with("activation.GELU\", must be Identity or Tanh"), "{activation}");
        let other = error(("module_input_name", json!("token_embeddings")), &[3, 4]);
        assert!(other.contains("module_input_name is \"token_embeddings\""), "{other}");
        let early = of_dense(&dense_files(&["Transformer", "Normalize", "Dense"], settings(same())), &[3, 4]);
        assert!(early.unwrap_err().to_string().ends_with("must be behind Pooling and before Normalize"));
        let mut outside = dense_files(&WITH_DENSE, settings(same()));
        outside[0].1[2]["path"] = json!("../2_Dense");
        let outside = of_dense(&outside, &[3, 4]).unwrap_err().to_string();
        assert!(outside.contains("[2].path is \"../2_Dense\""), "{outside}");
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let error = |files: &[(&str, Value)]| of(files).unwrap_err().to_string();
        let other = error(&[modules(&["Transformer", "WordWeights"])]);
        assert!(other.contains("modules.json: [1].type is \"sentence_transformers.models.WordWeights\""), "{other}");
        let settings = |settings| [modules(&["Transformer", "Pooling"]), ("1_Pooling/config.json", settings)];
        for wrong in [
            json!({"pooling_mode": "max"}),
            json!({"pooling_mode": ["cls", "mean"]}),
            json!({"pooling_mode_cls_token": true, "pooling_mode_lasttoken": true}),
            json!({}),
        ] {
            assert!(error(&settings(wrong)).contains("must be cls, lasttoken or mean"));
        }
        assert!(error(&settings(json!({"pooling_mode": "mean", "include_prompt": false}))).contains("include_prompt"));
        let far = json!({"true_token_id": 100, "false_token_id": 9});
        let far = error(&[modules(&["Transformer", "LogitScore"]), ("1_LogitScore/config.json", far)]);
        assert!(far.contains("true_token_id is 100") && far.contains("vocabulary of 100"), "{far}");
        let default = json!({"prompts": {"a": "b"}, "default_prompt_name": "c"});
        assert!(error(&[(PROMPTS, default)]).contains("default_prompt_name is \"c\""));
    }
}

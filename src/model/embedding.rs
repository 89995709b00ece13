//! The embedding settings of a checkpoint, from the files of sentence-transformers: how hidden states are pooled,
//! whether the vector is scaled to unit length, the texts that are put before inputs, and the two tokens by which a
//! reranker answers. A checkpoint without these files is a language model: its last token is pooled.
//! Not here: the model itself, and the prompt of a reranker.

use super::checkpoint::Checkpoint;
use crate::config::file;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;

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
}

/// Reads the files of a checkpoint. `read` returns the content of a file by its path within the checkpoint, or `None` if
/// there is no such file. `vocabulary` is the number of the model's tokens.
///
/// # Errors The first problem found.
pub fn read(
    read: impl Fn(&str) -> Result<Option<Vec<u8>>, EmbeddingError>,
    vocabulary: u32,
) -> Result<Embedding, EmbeddingError> {
    let mut embedding = Embedding::default();
    if let Some(modules) = json(&read, MODULES)? {
        let Value::Array(modules) = modules else { return Err(wrong(MODULES, "the file", &modules, "a list")) };
        embedding.normalize = false;
        for (index, module) in modules.iter().enumerate() {
            apply(&read, &mut embedding, index, module, vocabulary)?;
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
    let vocabulary = checkpoint.config.vocab;
    let read = if checkpoint.embedded.is_empty() { read(open, vocabulary) } else { read(embedded, vocabulary) };
    Ok(Embedding { size: checkpoint.config.hidden, ..read? })
}

/// Applies a module of the list to what is known.
fn apply(
    read: &impl Fn(&str) -> Result<Option<Vec<u8>>, EmbeddingError>,
    embedding: &mut Embedding,
    index: usize,
    module: &Value,
    vocabulary: u32,
) -> Result<(), EmbeddingError> {
    let key = |name: &str| format!("[{index}].{name}");
    let kind = module["type"].as_str().ok_or_else(|| wrong(MODULES, &key("type"), &module["type"], "a text"))?;
    // The classes have moved between modules of the library; their names have not.
    let class = kind.rsplit('.').next().unwrap_or(kind);
    let file = format!("{}/config.json", module["path"].as_str().unwrap_or_default());
    let settings = || match json(read, &file)? {
        Some(Value::Object(settings)) => Ok(settings),
        other => Err(wrong(&file, "the file", &other.unwrap_or_default(), "an object")),
    };
    match class {
        "Transformer" => {}
        "Normalize" => embedding.normalize = true,
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
            let rule = "Transformer, Pooling, Normalize or LogitScore";
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
        read(open, 100)
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

    #[test]
    fn what_is_not_supported_is_named() {
        let error = |files: &[(&str, Value)]| of(files).unwrap_err().to_string();
        let dense = error(&[modules(&["Transformer", "Dense"])]);
        assert!(dense.contains("modules.json: [1].type is \"sentence_transformers.models.Dense\""), "{dense}");
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

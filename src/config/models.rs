//! `[[models]]`: what is served, and on which devices.

use super::Bytes;
use super::load::Problem;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The `path` of the model that is part of the program: a dense one.
pub const DEMO_PATH: &str = "embedded:demo";
/// The `path` of the other one: a hybrid of gated delta nets and attention, which drafts tokens ahead.
pub const DEMO_HYBRID_PATH: &str = "embedded:demo-hybrid";

/// Which model of the program a `path` stands for, as [`DEMO_PATH`] or [`DEMO_HYBRID_PATH`]: those, or what follows their
/// colon. A folder of such a name is reached as `./demo`.
pub fn embedded(path: &Path) -> Option<&'static str> {
    // Not by the path's components, for which `demo` and `demo/` are the same.
    let given = path.as_os_str();
    let known = [DEMO_PATH, DEMO_HYBRID_PATH];
    known.into_iter().find(|known| given == *known || known.strip_prefix("embedded:").is_some_and(|name| given == name))
}

/// The longest name of a model: it is part of span names and of replica names.
const MAX_NAME: usize = 128;

/// A model and where it runs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// What clients call it.
    #[serde(default)]
    pub name: String,
    /// A checkpoint's folder, relative to the configuration file; or a model of the program, see [`embedded`].
    #[serde(default)]
    pub path: PathBuf,
    /// One for each place that it runs at; at least one.
    #[serde(default)]
    pub replicas: Vec<Replica>,
    /// When it is loaded.
    #[serde(default)]
    pub load: LoadWhen,
    /// Longest context, tokens; unset: the checkpoint's, or what the memory holds.
    pub context: Option<u32>,
    /// Sequences that run at once; unset: the engine's choice.
    pub slots: Option<u32>,
    /// KV pages of 16 tokens, of each replica; unset: what the memory holds.
    pub kv_pages: Option<u32>,
    /// KV memory of each replica, instead of `kv_pages`.
    pub kv_memory: Option<Bytes>,
    /// How keys and values are kept; unset: `f16`.
    pub kv_format: Option<KvFormat>,
    /// The most device memory that each replica may take in all.
    pub memory_limit: Option<Bytes>,
    /// Prompt tokens that run as one step, of one request or several; unset: the engine's choice.
    pub prefill_chunk: Option<u32>,
    /// Whether prompts find pages of earlier ones with the same beginning; unset: yes.
    pub prefix_cache: Option<bool>,
    /// Snapshots of recurrent state that each replica keeps for prompts with the same beginning, of models that have such
    /// state; unset: the engine's choice.
    pub snapshots: Option<u32>,
    /// Tokens that are drafted at a time, at most 3, of models that can draft; 0 none; unset: the engine's choice.
    pub drafts: Option<u32>,
    /// Whether so many are drafted even where fewer would be faster; unset: no.
    pub drafts_always: Option<bool>,
}

/// When a model is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadWhen {
    /// Before the server takes requests.
    #[default]
    Start,
    /// When somebody asks for it.
    Request,
}

/// A number format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// 2 bytes a value.
    F16,
    /// 4 bytes a value.
    F32,
}

/// One place that a model runs at.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replica {
    /// UUID, PCI address, index, name or part of it, or `cpu` for a CPU driver. Unset: the
    /// only GPU of the machine (it fails where there are several).
    pub device: Option<String>,
    /// Instead of the model's `memory_limit`.
    pub memory_limit: Option<Bytes>,
}

/// Not `NAME=DIR[@DEVICE]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{given}\" is not NAME=DIR or NAME=DIR@DEVICE: {why}")]
pub struct ParseModelError {
    given: String,
    why: &'static str,
}

impl Model {
    /// A model with one replica and nothing else said.
    pub fn new(name: &str, path: impl Into<PathBuf>, device: Option<&str>) -> Model {
        Model {
            name: name.to_owned(),
            path: path.into(),
            replicas: vec![Replica { device: device.map(str::to_owned), memory_limit: None }],
            load: LoadWhen::Start,
            context: None,
            slots: None,
            kv_pages: None,
            kv_format: None,
            kv_memory: None,
            memory_limit: None,
            prefill_chunk: None,
            prefix_cache: None,
            snapshots: None,
            drafts: None,
            drafts_always: None,
        }
    }
}

impl FromStr for Model {
    type Err = ParseModelError;

    /// `NAME=DIR` or `NAME=DIR@DEVICE`: the name ends at the first `=`, the device begins
    /// after the last `@`.
    fn from_str(text: &str) -> Result<Model, ParseModelError> {
        let wrong = |why| ParseModelError { given: text.to_owned(), why };
        let (name, rest) = text.split_once('=').ok_or_else(|| wrong("there is no \"=\""))?;
        let (path, device) = match rest.rsplit_once('@') {
            Some((_, "")) => return Err(wrong("the device is empty")),
            Some((path, device)) => (path, Some(device)),
            None => (rest, None),
        };
        if name.is_empty() {
            return Err(wrong("the name is empty"));
        }
        if path.is_empty() {
            return Err(wrong("the folder is empty"));
        }
        Ok(Model::new(name, path, device))
    }
}

/// `models[i].key`, as problems name it.
fn key(index: usize, key: &str) -> String {
    format!("models[{index}].{key}")
}

pub(super) fn problems(models: &[Model]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, model) in models.iter().enumerate() {
        if model.name.is_empty() {
            problems.push(Problem::missing(key(index, "name")));
        } else if model.name.len() > MAX_NAME || model.name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            problems.push(Problem::new(
                key(index, "name"),
                "must be at most 128 bytes without spaces",
                format!("{:?}", model.name),
            ));
        }
        let earlier = models[..index].iter().position(|other| other.name == model.name);
        if let Some(earlier) = earlier.filter(|_| !model.name.is_empty()) {
            problems.push(Problem::new(
                key(index, "name"),
                &format!("must differ from models[{earlier}].name"),
                format!("{:?}", model.name),
            ));
        }
        if model.path.as_os_str().is_empty() {
            problems.push(Problem::missing(key(index, "path")));
        }
        if model.replicas.is_empty() {
            problems.push(Problem::missing(key(index, "replicas")));
        }
        for (replica, value) in model.replicas.iter().enumerate() {
            if value.device.as_ref().is_some_and(|device| device.trim().is_empty()) {
                problems.push(Problem::new(
                    key(index, &format!("replicas[{replica}].device")),
                    "must name a device, or be left out for the machine's only GPU",
                    "\"\"",
                ));
            }
            if value.memory_limit == Some(Bytes(0)) {
                problems.push(Problem::new(
                    key(index, &format!("replicas[{replica}].memory_limit")),
                    "must be above 0",
                    0,
                ));
            }
        }
        for (name, value) in [
            ("context", model.context),
            ("slots", model.slots),
            ("kv_pages", model.kv_pages),
            ("prefill_chunk", model.prefill_chunk),
        ] {
            if value == Some(0) {
                problems.push(Problem::new(key(index, name), "must be at least 1", 0));
            }
        }
        for (name, value) in [("kv_memory", model.kv_memory), ("memory_limit", model.memory_limit)] {
            if value == Some(Bytes(0)) {
                problems.push(Problem::new(key(index, name), "must be above 0", 0));
            }
        }
        if let (Some(_), Some(bytes)) = (model.kv_pages, model.kv_memory) {
            problems.push(Problem::new(key(index, "kv_memory"), "must not be given together with kv_pages", bytes));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_models_have_two_names_each_and_folders_of_those_names_a_dot() {
        for (name, path) in [("demo", DEMO_PATH), ("demo-hybrid", DEMO_HYBRID_PATH)] {
            assert_eq!(embedded(Path::new(name)), Some(path));
            assert_eq!(embedded(Path::new(path)), Some(path));
            for folder in [format!("./{name}"), format!("{name}/"), format!("/{name}"), format!("./{path}")] {
                assert_eq!(embedded(Path::new(&folder)), None, "{folder}");
            }
        }
        assert_eq!(embedded(Path::new("embedded:other")), None);
        assert_eq!(embedded(Path::new("")), None);
    }

    #[test]
    fn a_model_argument_is_split_at_the_first_equals_and_the_last_at() {
        let model: Model = "qwen=/models/a@b=c@NVIDIA H200".parse().unwrap();
        assert_eq!(model, Model::new("qwen", "/models/a@b=c", Some("NVIDIA H200")));
        let model: Model = "qwen=/models/a".parse().unwrap();
        assert_eq!(model, Model::new("qwen", "/models/a", None));
    }

    #[test]
    fn a_model_argument_with_a_part_missing_is_refused() {
        for (text, why) in [
            ("/models/a@0", "no \"=\""),
            ("=/models/a", "name is empty"),
            ("a=", "folder is empty"),
            ("a=@0", "folder is empty"),
            ("a=/b@", "device is empty"),
        ] {
            let error = text.parse::<Model>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(text), "{error}");
        }
    }
}

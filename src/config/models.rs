//! `[[models]]`: the served models and their devices.

use super::Bytes;
use super::listen::{clash, some_address};
use super::load::Problem;
use super::server::Server;
use crate::config::{Selector, SelectorError};
use serde::Deserialize;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The `path` of the embedded dense model.
pub const DEMO_PATH: &str = "embedded:demo";
/// The `path` of the embedded hybrid model: gated delta rule and attention layers, with a block that drafts tokens.
pub const DEMO_HYBRID_PATH: &str = "embedded:demo-hybrid";

/// Returns the embedded model that a `path` names, as [`DEMO_PATH`] or [`DEMO_HYBRID_PATH`]. The path is one of these,
/// or the part of it after the colon. A directory with such a name is reached as `./demo`.
pub fn embedded(path: &Path) -> Option<&'static str> {
    // Compared as text: `Path` comparison treats `demo` and `demo/` as equal.
    let given = path.as_os_str();
    let known = [DEMO_PATH, DEMO_HYBRID_PATH];
    known.into_iter().find(|known| given == *known || known.strip_prefix("embedded:").is_some_and(|name| given == name))
}

/// The maximum length of a model's name in bytes; the name is part of span names and replica names.
const MAX_NAME: usize = 128;

/// A served model and its devices.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The name that clients use.
    #[serde(default)]
    pub name: String,
    /// The directory of a checkpoint or a GGUF file, relative to the configuration file, or an embedded model, see
    /// [`embedded`].
    #[serde(default)]
    pub path: PathBuf,
    /// The replicas, one for each device on which the model runs; at least one.
    #[serde(default)]
    pub replicas: Vec<Placement>,
    /// When the model is loaded.
    #[serde(default)]
    pub load: LoadWhen,
    /// The address and port of a gRPC endpoint that serves this model only, beside the one of all models; port 0 takes
    /// a free port and prints it. By default the model has no endpoint of its own.
    #[serde(default, deserialize_with = "some_address")]
    pub listen: Option<SocketAddr>,
    /// The maximum context length in tokens; by default the checkpoint's, reduced if the memory does not hold it.
    pub context: Option<u32>,
    /// The maximum number of sequences that run at once; by default the engine's choice.
    pub slots: Option<u32>,
    /// The number of KV pages of each replica, 16 tokens each; by default the engine's choice, at most what the memory
    /// holds.
    pub kv_pages: Option<u32>,
    /// The KV cache memory of each replica, as an alternative to `kv_pages`.
    pub kv_memory: Option<Bytes>,
    /// The number format of the KV cache; by default `f16`.
    pub kv_format: Option<KvFormat>,
    /// Whether products of 128 rows and more with weights in FP8 (e4m3) round their inputs to FP8 too, where the device
    /// multiplies such numbers; by default false.
    pub fp8_activations: Option<bool>,
    /// The codes to which matrices of 16 or 32 bits are quantised when the model is loaded; by default they are kept.
    pub quantize: Option<Quantize>,
    /// The maximum device memory of each replica in total.
    pub memory_limit: Option<Bytes>,
    /// The maximum number of prompt tokens in one prefill step, from one request or several; by default the engine's
    /// choice. The maximum context of models whose prompts cannot be divided.
    pub prefill_chunk: Option<u32>,
    /// Whether prompts reuse the KV pages of earlier prompts with the same prefix; by default true.
    pub prefix_cache: Option<bool>,
    /// The number of recurrent-state snapshots that each replica keeps for prompts with the same prefix, for models
    /// that have recurrent state; by default the engine's choice.
    pub snapshots: Option<u32>,
    /// The source of draft tokens: look-up, a draft model or a draft head; by default the model's own block, if it has one.
    pub draft: Option<Draft>,
    /// The maximum number of draft tokens per step, at most 3, for models that can draft; 0 disables drafting. By
    /// default the engine's choice.
    pub drafts: Option<u32>,
    /// Whether `drafts` tokens are always drafted, even when fewer would be faster; by default false.
    pub drafts_always: Option<bool>,
}

/// A source of draft tokens other than the model's own block.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Draft {
    /// Prompt look-up: what followed the sequence's last tokens where they occurred before in it.
    Lookup,
    /// A smaller model of the same vocabulary, or a draft head (EAGLE-3) that was trained for the model: its path, like
    /// [`Model::path`].
    Model(PathBuf),
}

impl FromStr for Draft {
    type Err = String;

    /// Parses `lookup` or a path. A directory of that name is reached as `./lookup`.
    fn from_str(text: &str) -> Result<Draft, String> {
        match text {
            "" => Err("an empty text is neither lookup nor a draft model".to_owned()),
            "lookup" => Ok(Draft::Lookup),
            path => Ok(Draft::Model(path.into())),
        }
    }
}

impl TryFrom<String> for Draft {
    type Error = String;

    fn try_from(text: String) -> Result<Draft, String> {
        text.parse()
    }
}

/// When a model is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadWhen {
    /// The model is loaded at the start, before the server accepts requests.
    #[default]
    Start,
    /// The model is loaded on a LoadModel call.
    Request,
}

/// The number format of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// 16-bit float, 2 bytes per value.
    F16,
    /// 32-bit float, 4 bytes per value.
    F32,
    /// Signed 8-bit codes with a 32-bit scale for each token and KV head of keys, and of values.
    Int8,
}

impl KvFormat {
    /// Returns the bytes of a token's key, or value, of a head with `dim` dimensions.
    pub fn head_bytes(self, dim: u32) -> u32 {
        match self {
            KvFormat::F16 => 2 * dim,
            KvFormat::F32 => 4 * dim,
            KvFormat::Int8 => dim + 4,
        }
    }
}

impl FromStr for KvFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<KvFormat, String> {
        match text {
            "f16" => Ok(KvFormat::F16),
            "f32" => Ok(KvFormat::F32),
            "int8" => Ok(KvFormat::Int8),
            _ => Err(format!("\"{text}\" is neither f16, f32 nor int8")),
        }
    }
}

/// The codes to which a checkpoint's matrices are quantised when they are loaded, by rounding to nearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantize {
    /// 8 bits with a scale for each 128 columns: 8.125 bits a weight, a relative error of 0.65 %.
    Int8,
    /// 4 bits with a scale and a minimum for each 32 columns: 5 bits a weight, a relative error of 7.3 %. The embedding
    /// and the LM head get 8 bits.
    Int4,
}

impl FromStr for Quantize {
    type Err = String;

    fn from_str(text: &str) -> Result<Quantize, String> {
        match text {
            "int8" => Ok(Quantize::Int8),
            "int4" => Ok(Quantize::Int4),
            _ => Err(format!("\"{text}\" is neither int8 nor int4")),
        }
    }
}

impl fmt::Display for Quantize {
    /// Writes a line about the error, such as `int8: 8.125 bits a weight, relative error 0.65 %`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Quantize::Int8 => "int8: 8.125 bits a weight, relative error of the weights about 0.65 %",
            Quantize::Int4 => {
                "int4: 5 bits a weight, relative error of the weights about 7.3 %; a checkpoint that was quantised with \
                 calibration (Q4_K_M, AWQ, GPTQ) is better"
            }
        })
    }
}

/// A replica of a model: the device, or the devices, on which it runs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// The device's UUID, PCI address, index, name or a part of the name, or `cpu` for the CPU driver. By default the
    /// machine's only GPU; it is an error if there are several.
    pub device: Option<Selector>,
    /// The maximum device memory of this replica, instead of the model's `memory_limit`; of a split replica, on each of
    /// its devices.
    pub memory_limit: Option<Bytes>,
    /// The devices of a split replica, at least two; with `layers`, in the order of their layers.
    #[serde(default)]
    pub devices: Vec<Selector>,
    /// How the replica is split over its devices.
    pub split: Option<SplitMode>,
    /// The parts of the model's weights that the devices get, in proportion; by default parts by measured times, or by free
    /// memory where a longer context or twice as many KV pages fit then.
    #[serde(default)]
    pub shares: Vec<u32>,
}

/// How a replica is split over several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum SplitMode {
    /// Each device has consecutive layers, and tokens pass from one to the next.
    Layers,
    /// Each device has a part of every layer, some heads and inner values, and all of them compute a step together.
    Tensor,
}

impl FromStr for SplitMode {
    type Err = String;

    fn from_str(text: &str) -> Result<SplitMode, String> {
        match text {
            "layers" => Ok(SplitMode::Layers),
            "tensor" => Ok(SplitMode::Tensor),
            _ => Err(format!("\"{text}\" is not a way to split a model, \"layers\" and \"tensor\" are")),
        }
    }
}

impl TryFrom<String> for SplitMode {
    type Error = String;

    fn try_from(text: String) -> Result<SplitMode, String> {
        text.parse()
    }
}

impl fmt::Display for SplitMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SplitMode::Layers => "layers",
            SplitMode::Tensor => "tensor",
        })
    }
}

impl Placement {
    /// A replica on one device; `None` is the machine's only GPU.
    pub fn on(device: Option<Selector>) -> Placement {
        Placement { device, ..Placement::default() }
    }

    /// Whether the placement names a device.
    pub fn is_placed(&self) -> bool {
        self.device.is_some() || !self.devices.is_empty()
    }

    /// Returns the problems of the placement: each with its key, the rule, and the value.
    pub(crate) fn problems(&self) -> Vec<(&'static str, String, String)> {
        let mut problems = Vec::new();
        let count = self.devices.len();
        if self.memory_limit == Some(Bytes(0)) {
            problems.push(("memory_limit", "must be above 0".to_owned(), "0".to_owned()));
        }
        if let (Some(device), 1..) = (&self.device, count) {
            problems.push(("device", "must not be given together with devices".to_owned(), format!("\"{device}\"")));
        }
        match self.split {
            None if count > 0 => {
                let rule = "needs split = \"layers\" or \"tensor\" for one replica over all devices, or an entry of \
                            replicas with a device for each";
                problems.push(("devices", rule.to_owned(), format!("{count} devices")));
            }
            Some(split) if count < 2 => {
                let rule = "needs at least two devices in devices";
                problems.push(("split", rule.to_owned(), format!("\"{split}\" with {count}")));
            }
            _ => {}
        }
        for (index, device) in self.devices.iter().enumerate() {
            if self.devices[..index].contains(device) {
                let rule = "must name each device once: a second part on one device gains nothing";
                problems.push(("devices", rule.to_owned(), format!("\"{device}\"")));
            }
        }
        if !self.shares.is_empty() && (self.shares.len() != count || self.shares.contains(&0)) {
            let rule = format!("must be as many numbers above 0 as there are devices, {count}");
            problems.push(("shares", rule, format!("{:?}", self.shares)));
        }
        if !self.shares.is_empty() && self.split == Some(SplitMode::Tensor) {
            let rule = "must not be given with split = \"tensor\": the devices get equal parts".to_owned();
            problems.push(("shares", rule, format!("{:?}", self.shares)));
        }
        problems
    }
}

/// The text is not `NAME=DIR[@DEVICE]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{given}\" is not NAME=DIR or NAME=DIR@DEVICE: {why}")]
pub struct ParseModelError {
    given: String,
    why: String,
}

impl Model {
    /// Creates a model with one replica and no other settings.
    pub fn new(name: &str, path: impl Into<PathBuf>, device: Option<Selector>) -> Model {
        Model {
            name: name.to_owned(),
            path: path.into(),
            replicas: vec![Placement::on(device)],
            load: LoadWhen::Start,
            listen: None,
            context: None,
            slots: None,
            kv_pages: None,
            kv_format: None,
            fp8_activations: None,
            quantize: None,
            kv_memory: None,
            memory_limit: None,
            prefill_chunk: None,
            prefix_cache: None,
            snapshots: None,
            draft: None,
            drafts: None,
            drafts_always: None,
        }
    }
}

impl FromStr for Model {
    type Err = ParseModelError;

    /// Parses `NAME=DIR` or `NAME=DIR@DEVICE`. The name ends at the first `=`, and the device begins after the last
    /// `@`.
    fn from_str(text: &str) -> Result<Model, ParseModelError> {
        let wrong = |why: &str| ParseModelError { given: text.to_owned(), why: why.to_owned() };
        let (name, rest) = text.split_once('=').ok_or_else(|| wrong("there is no \"=\""))?;
        let (path, device) = match rest.rsplit_once('@') {
            Some((_, "")) => return Err(wrong("the device is empty")),
            Some((path, device)) => {
                let device: Selector = device.parse().map_err(|error: SelectorError| wrong(&error.to_string()))?;
                (path, Some(device))
            }
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

/// Returns the key `models[index].key` as problems name it.
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
            for (name, rule, given) in value.problems() {
                problems.push(Problem::new(key(index, &format!("replicas[{replica}].{name}")), &rule, given));
            }
            if let (Some(split), Some(bytes)) = (value.split, model.kv_memory) {
                let rule = format!("must not be given with split = \"{split}\": give kv_pages");
                problems.push(Problem::new(key(index, "kv_memory"), &rule, bytes));
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

/// Returns the problems of the addresses of models' own endpoints; `others` are the other endpoints' addresses with their
/// keys.
pub(super) fn listen_problems(
    models: &[Model],
    server: &Server,
    others: &[(&str, Option<SocketAddr>)],
) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, listen) in models.iter().enumerate().filter_map(|(index, model)| Some((index, model.listen?))) {
        let key = key(index, "listen");
        if !listen.ip().is_loopback() && !server.insecure && server.tls.is_none() {
            problems.push(Problem::new(
                &*key,
                "must be a loopback address unless there are certificates (server.tls), or \
                 server.insecure = true (or --insecure) allows connections that are not encrypted",
                listen,
            ));
        }
        let others = others.iter().map(|(other, at)| ((*other).to_owned(), *at));
        let earlier = models[..index].iter().enumerate();
        let earlier = earlier.map(|(other, model)| (self::key(other, "listen"), model.listen));
        for (other, at) in others.chain(earlier) {
            if at.is_some_and(|at| clash(listen, at)) {
                problems.push(Problem::new(&*key, &format!("must differ from {other}"), listen));
            }
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
    fn drafts_are_looked_up_or_come_from_a_model() {
        let parsed = |text: &str| text.parse::<Draft>();
        assert_eq!(parsed("lookup"), Ok(Draft::Lookup));
        for path in ["./lookup", "/models/small", "small.gguf", "demo"] {
            assert_eq!(parsed(path), Ok(Draft::Model(path.into())));
        }
        assert!(parsed("").unwrap_err().contains("neither lookup nor a draft model"));
    }

    #[test]
    fn a_model_argument_is_split_at_the_first_equals_and_the_last_at() {
        let model: Model = "qwen=/models/a@b=c@NVIDIA H200".parse().unwrap();
        assert_eq!(model, Model::new("qwen", "/models/a@b=c", Some(Selector::Name("NVIDIA H200".to_owned()))));
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

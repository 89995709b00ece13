//! How the weights of a safetensors checkpoint are quantised: `quantization_config` of config.json, or the file that
//! stands for it (`quantize_config.json`, `quant_config.json`, `hf_quant_config.json`). Which modules are quantised is
//! seen in the tensors; the configuration says how their tensors are to be read.
//!
//! Activations are not quantised: weights alone decide, and keys that only concern activations or caches are ignored.
//!
//! Not here: the tensors.

use fancy_regex::Regex;
use serde_json::{Map, Value};

use super::ConfigProblem;
use crate::quant::safetensors::GptqVersion;

/// Files that older tools write instead of the key `quantization_config`.
pub const FILES: [&str; 3] = ["quantize_config.json", "quant_config.json", "hf_quant_config.json"];

/// The values of `quant_method` that are supported.
const METHODS: [&str; 8] =
    ["awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4"];

/// The largest group size; a larger number means that the file is damaged.
const MAX_GROUP: u64 = 1 << 24;
/// The maximum number of patterns and names in the lists of a configuration.
const MAX_PATTERNS: usize = 4096;
/// How often a pattern may go back while it is matched against a name.
const BACKTRACKS: usize = 100_000;
/// The maximum size of a compiled pattern in bytes; names of modules need a hundredth.
const PATTERN_BYTES: usize = 256 << 10;
/// The maximum number of patterns of a configuration, in all of its lists.
const MOST_COMPILED: usize = 1024;

/// How the weights of a checkpoint are quantised.
#[derive(Clone, Debug, PartialEq)]
pub enum Quantization {
    /// `fp8`, `fbgemm_fp8`, and `modelopt` with FP8: 8-bit floats with a scale a tensor, row or block.
    Fp8 {
        /// The rows and columns of a block; `None` for a scale a tensor or row.
        block: Option<[u32; 2]>,
    },
    /// `gptq`.
    Gptq {
        /// The layout of modules that no rule matches.
        layout: GptqLayout,
        /// The version of the zeros.
        version: GptqVersion,
        /// The key `dynamic`: the first rule that matches a module decides.
        rules: Vec<Rule>,
    },
    /// `awq`, version gemm, 4 bits.
    Awq {
        /// The columns of a group; `None` for a whole row.
        group: Option<u32>,
        /// The key `zero_point`: whether modules must have zeros; those of other checkpoints may have some.
        zeros: bool,
    },
    /// `bitsandbytes`. Which modules of `llm_int8_skip_modules` are not quantised is seen in the tensors, and so are types,
    /// blocks, and whether scales are quantised themselves.
    BitsAndBytes {
        /// 4 (`load_in_4bit`) or 8 (`load_in_8bit`).
        bits: u32,
    },
    /// `compressed-tensors`.
    CompressedTensors {
        /// The key `config_groups`.
        groups: Vec<SchemeGroup>,
        /// The key `ignore`: modules that are not quantised.
        ignore: Vec<ModuleTarget>,
    },
    /// `modelopt` with NVFP4.
    ModelOptNvfp4,
    /// `mxfp4`.
    Mxfp4,
}

/// How GPTQ stores a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptqLayout {
    /// The number of bits: 2, 3, 4 or 8.
    pub bits: u32,
    /// The columns of a group; `None` for a whole row.
    pub group: Option<u32>,
    /// Whether every zero is the middle code.
    pub symmetric: bool,
}

/// A rule of GPTQ's `dynamic`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The pattern, matched at the start of a module's name.
    pub pattern: Pattern,
    /// The layout of the modules that match; `None` if they are not quantised.
    pub layout: Option<GptqLayout>,
}

/// A group of `config_groups`.
#[derive(Clone, Debug, PartialEq)]
pub struct SchemeGroup {
    /// The modules that the group describes.
    pub targets: Vec<ModuleTarget>,
    /// How their weights are stored.
    pub scheme: Scheme,
}

/// A module, or modules, in a list of compressed-tensors.
#[derive(Clone, Debug, PartialEq)]
pub enum ModuleTarget {
    /// A module's exact name, or the name of a class such as `Linear`.
    Name(String),
    /// `re:` and a regular expression that is matched at the start of a module's name.
    Pattern(Pattern),
}

/// A regular expression that is matched at the start of a name, as Python's `re.match` does.
#[derive(Clone, Debug)]
pub struct Pattern(Regex);

impl PartialEq for Pattern {
    fn eq(&self, other: &Pattern) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Pattern {
    fn new(text: &str) -> Result<Pattern, String> {
        let built = fancy_regex::RegexBuilder::new(&format!("^(?:{text})"))
            .backtrack_limit(BACKTRACKS)
            .delegate_size_limit(PATTERN_BYTES)
            .delegate_dfa_size_limit(PATTERN_BYTES)
            .build();
        built.map(Pattern).map_err(|error| error.to_string())
    }

    /// The pattern's text in the configuration.
    fn text(&self) -> &str {
        let text = self.0.as_str();
        text.strip_prefix("^(?:").and_then(|text| text.strip_suffix(')')).unwrap_or(text)
    }

    /// Whether the pattern matches at the start of a name. A pattern that would take too long does not match.
    fn matches(&self, name: &str) -> bool {
        self.0.is_match(name).unwrap_or(false)
    }
}

/// The granularity of scales, in the terms of compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// A scale for the tensor.
    Tensor,
    /// A scale a row.
    Channel,
    /// A scale for this many columns of a row.
    Group(u32),
    /// A scale for this many rows and columns.
    Block([u32; 2]),
}

/// How a module's weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// 8-bit floats; the shape of the scales' tensor says how many weights share one, unless they are blocks.
    Fp8 {
        /// The rows and columns of a block.
        block: Option<[u32; 2]>,
    },
    /// GPTQ.
    Gptq {
        /// Bits, group and zeros.
        layout: GptqLayout,
        /// The version of the zeros.
        version: GptqVersion,
    },
    /// AWQ, version gemm.
    Awq {
        /// The columns of a group; `None` for a whole row.
        group: Option<u32>,
        /// Whether modules must have zeros.
        zeros: bool,
    },
    /// bitsandbytes.
    BitsAndBytes {
        /// 4 or 8.
        bits: u32,
    },
    /// compressed-tensors `pack-quantized`: integers in 32-bit words.
    PackedInts {
        /// The number of bits.
        bits: u32,
        /// The granularity of scales.
        strategy: Strategy,
        /// Whether there are no zeros.
        symmetric: bool,
    },
    /// compressed-tensors `int-quantized`: bytes.
    Int8 {
        /// The granularity of scales.
        strategy: Strategy,
        /// Whether there are no zeros.
        symmetric: bool,
    },
    /// compressed-tensors `float-quantized`: 8-bit floats.
    Floats {
        /// The granularity of scales.
        strategy: Strategy,
    },
    /// NVFP4 of compressed-tensors (`weight_packed`, `weight_global_scale`) or ModelOpt (`weight`, `weight_scale_2`).
    Nvfp4 {
        /// Whether it is compressed-tensors', whose global scale divides.
        compressed: bool,
    },
    /// MXFP4 of compressed-tensors (`weight_packed`), or of gpt-oss (`_blocks` and `_scales` of all experts).
    Mxfp4 {
        /// Whether it is compressed-tensors'.
        compressed: bool,
    },
}

impl Quantization {
    /// Returns how the weight of a module is stored, if it is quantised. The module may have several names: what a pattern or
    /// list says of one of them comes before what is said of all modules, and a module is left out only if that is said of
    /// each name, because a pattern that excludes one part of a model matches names without that part.
    pub fn scheme(&self, names: &[&str], class: &str) -> Option<Scheme> {
        let said: Vec<Said> = names.iter().map(|name| self.said(name, class)).collect();
        let named = said.iter().find_map(|said| if let Said::OfName(scheme) = said { Some(*scheme) } else { None });
        let of_all = || said.iter().find_map(|said| if let Said::OfAll(scheme) = said { Some(*scheme) } else { None });
        named.or_else(of_all)
    }

    /// Returns what is said of a module of this name.
    fn said(&self, name: &str, class: &str) -> Said {
        match self {
            Quantization::Fp8 { block } => Said::OfAll(Scheme::Fp8 { block: *block }),
            Quantization::Gptq { layout, version, rules } => {
                let scheme = |layout| Scheme::Gptq { layout, version: *version };
                match rules.iter().find(|rule| rule.pattern.matches(name)) {
                    Some(rule) => rule.layout.map_or(Said::Nothing, |layout| Said::OfName(scheme(layout))),
                    None => Said::OfAll(scheme(*layout)),
                }
            }
            Quantization::Awq { group, zeros } => Said::OfAll(Scheme::Awq { group: *group, zeros: *zeros }),
            Quantization::BitsAndBytes { bits } => Said::OfAll(Scheme::BitsAndBytes { bits: *bits }),
            Quantization::CompressedTensors { groups, ignore } => {
                if ignore.iter().any(|target| target.is(name) || target.matches(name) || target.is(class)) {
                    return Said::Nothing;
                }
                // As the library does: exact names come before patterns, which it tries in the order of their texts.
                let targets =
                    || groups.iter().flat_map(|group| group.targets.iter().map(|target| (target, group.scheme)));
                let exact = targets().find(|(target, _)| target.is(name));
                let matching =
                    || targets().filter(|(target, _)| target.matches(name)).min_by_key(|(target, _)| target.text());
                let of_class = || targets().find(|(target, _)| target.is(class));
                match exact.or_else(matching) {
                    Some((_, scheme)) => Said::OfName(scheme),
                    None => of_class().map_or(Said::Nothing, |(_, scheme)| Said::OfAll(scheme)),
                }
            }
            Quantization::ModelOptNvfp4 => Said::OfAll(Scheme::Nvfp4 { compressed: false }),
            // Modules of `modules_to_not_convert` have no blocks.
            Quantization::Mxfp4 => Said::OfAll(Scheme::Mxfp4 { compressed: false }),
        }
    }
}

/// What a configuration says of a module.
enum Said {
    /// How modules of this name are stored.
    OfName(Scheme),
    /// How all modules are stored, or all of a class.
    OfAll(Scheme),
    /// That it is not quantised.
    Nothing,
}

impl ModuleTarget {
    /// Whether it is this name of a module or class.
    fn is(&self, name: &str) -> bool {
        matches!(self, ModuleTarget::Name(target) if target == name)
    }

    /// Whether it is a pattern that matches a name.
    fn matches(&self, name: &str) -> bool {
        matches!(self, ModuleTarget::Pattern(pattern) if pattern.matches(name))
    }

    fn text(&self) -> &str {
        match self {
            ModuleTarget::Name(text) => text,
            ModuleTarget::Pattern(pattern) => pattern.text(),
        }
    }
}

/// Reads the keys of one object of the configuration and records what is wrong with them.
struct Keys<'a> {
    map: &'a Map<String, Value>,
    /// The object's path, for messages.
    path: String,
    problems: &'a mut Vec<ConfigProblem>,
}

/// Reads the configuration; `path` is the key or file that holds it. `None` if something is wrong, which is recorded.
pub(super) fn read(value: &Value, path: &str, problems: &mut Vec<ConfigProblem>) -> Option<Quantization> {
    let Some(map) = value.as_object() else {
        let (key, value) = (path.to_owned(), value.to_string());
        problems.push(ConfigProblem::Value { key, value, rule: "an object".to_owned() });
        return None;
    };
    // ModelOpt's own file has everything under one key.
    let inner = (path == FILES[2]).then(|| map.get("quantization").and_then(Value::as_object)).flatten();
    let map = inner.unwrap_or(map);
    let before = problems.len();
    let compiled = patterns(value);
    if compiled > MOST_COMPILED {
        let rule = format!("a configuration of at most {MOST_COMPILED} regular expressions");
        let (key, value) = (path.to_owned(), format!("{compiled} regular expressions"));
        problems.push(ConfigProblem::Value { key, value, rule });
        return None;
    }
    let mut keys = Keys { map, path: path.to_owned(), problems };
    let method = match keys.value("quant_method").map(|value| value.as_str().ok_or_else(|| value.to_string())) {
        Some(Ok(method)) => method.to_owned(),
        Some(Err(other)) => other,
        None if path == FILES[0] => "gptq".to_owned(),
        None if path == FILES[1] => "awq".to_owned(),
        None if inner.is_some() => "modelopt".to_owned(),
        None => "unnamed".to_owned(),
    };
    let read = match method.as_str() {
        "fp8" | "fbgemm_fp8" => keys.fp8(),
        "gptq" => keys.gptq(),
        "awq" => keys.awq(),
        "bitsandbytes" => keys.bits_and_bytes(),
        "compressed-tensors" => keys.compressed_tensors(),
        "modelopt" => keys.modelopt(),
        "mxfp4" => Some(Quantization::Mxfp4),
        _ => {
            keys.problems.push(ConfigProblem::Quantized(method));
            None
        }
    };
    read.filter(|_| problems.len() == before)
}

/// Counts the regular expressions of a configuration: texts that begin with `re:`, and the keys of `dynamic`.
fn patterns(value: &Value) -> usize {
    match value {
        Value::String(text) => usize::from(text.starts_with("re:")),
        Value::Array(list) => list.iter().map(patterns).sum(),
        Value::Object(map) => {
            let rules = map.get("dynamic").and_then(Value::as_object).map_or(0, Map::len);
            rules + map.values().map(patterns).sum::<usize>()
        }
        _ => 0,
    }
}

/// The supported values of `quant_method`, for messages.
pub(super) fn methods() -> String {
    METHODS.join(", ")
}

impl<'a> Keys<'a> {
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns the value of the first of several spellings of a key, with that spelling.
    fn any(&self, keys: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        keys.iter().find_map(|key| self.value(key).map(|value| (*key, value)))
    }

    fn wrong(&mut self, key: &str, value: &Value, rule: impl Into<String>) {
        let key = format!("{}.{key}", self.path);
        self.problems.push(ConfigProblem::Value { key, value: value.to_string(), rule: rule.into() });
    }

    fn missing(&mut self, key: &str) {
        self.problems.push(ConfigProblem::Missing(format!("{}.{key}", self.path)));
    }

    /// Reads a boolean, or returns `default` if the key is absent.
    fn flag(&mut self, key: &str, default: bool) -> bool {
        match self.value(key) {
            None => default,
            Some(Value::Bool(flag)) => *flag,
            Some(other) => {
                self.wrong(key, other, "true or false");
                default
            }
        }
    }

    /// Reads one of these numbers.
    fn number(&mut self, keys: &[&'static str], allowed: &[u32]) -> Option<u32> {
        let Some((key, value)) = self.any(keys) else {
            self.missing(keys[0]);
            return None;
        };
        match value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| allowed.contains(n)) {
            Some(number) => Some(number),
            None => {
                let allowed: Vec<String> = allowed.iter().map(u32::to_string).collect();
                self.wrong(key, value, allowed.join(" or "));
                None
            }
        }
    }

    /// Reads a group size. The inner `None` (−1 in the file) stands for a whole row.
    fn group(&mut self, keys: &[&'static str]) -> Option<Option<u32>> {
        let Some((key, value)) = self.any(keys) else {
            self.missing(keys[0]);
            return None;
        };
        match (value.as_i64(), value.as_u64()) {
            (Some(-1), _) => Some(None),
            (_, Some(n)) if n > 0 && n <= MAX_GROUP && n % 16 == 0 => Some(Some(n as u32)),
            _ => {
                self.wrong(key, value, format!("-1, or a multiple of 16 of at most {MAX_GROUP}"));
                None
            }
        }
    }

    /// Refuses a value other than those of `allowed`, in any case of letters; an absent key is accepted.
    fn only(&mut self, key: &str, allowed: &[&str]) {
        let Some(value) = self.value(key) else { return };
        let known = value.as_str().is_some_and(|text| allowed.iter().any(|known| text.eq_ignore_ascii_case(known)));
        if !known {
            self.wrong(key, value, allowed.join(" or "));
        }
    }

    /// Reads the rows and columns of a block: `[128, 128]`.
    fn block(&mut self, key: &str) -> Option<Option<[u32; 2]>> {
        let Some(value) = self.value(key) else { return Some(None) };
        let size = |value: &Value| value.as_u64().filter(|n| (1..=MAX_GROUP).contains(n)).map(|n| n as u32);
        let sizes: Option<Vec<u32>> = value.as_array().and_then(|sizes| sizes.iter().map(size).collect());
        match sizes.as_deref() {
            Some(&[rows, cols]) if cols % 16 == 0 => Some(Some([rows, cols])),
            _ => {
                self.wrong(key, value, "two numbers of rows and columns, the columns a multiple of 16");
                None
            }
        }
    }

    fn fp8(&mut self) -> Option<Quantization> {
        self.only("fmt", &["e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"]);
        self.only("activation_scheme", &["dynamic", "static"]);
        if let Some(value) = self.value("expert_dtype") {
            self.wrong("expert_dtype", value, "absent");
        }
        Some(Quantization::Fp8 { block: self.block("weight_block_size")? })
    }

    fn gptq(&mut self) -> Option<Quantization> {
        let layout = self.gptq_layout(None);
        let format = self.any(&["checkpoint_format", "format"]);
        let version = match format.map(|(_, value)| value.as_str()) {
            None | Some(Some("gptq")) => Some(GptqVersion::V1),
            Some(Some("gptq_v2")) => Some(GptqVersion::V2),
            Some(_) => {
                let (key, value) = format.expect("it was read just now");
                self.wrong(key, value, "gptq or gptq_v2");
                None
            }
        };
        self.only("pack_dtype", &["int32"]);
        let (layout, version) = (layout?, version?);
        let mut rules = Vec::new();
        match self.value("dynamic") {
            None => {}
            Some(Value::Object(map)) if map.len() <= MAX_PATTERNS => {
                for (text, value) in map {
                    rules.push(self.rule(text, value, layout)?);
                }
            }
            Some(Value::Bool(false)) => {}
            Some(other) => self.wrong("dynamic", other, format!("an object of at most {MAX_PATTERNS} patterns")),
        }
        Some(Quantization::Gptq { layout, version, rules })
    }

    /// Reads the keys of a GPTQ layout; absent ones are those of `base`.
    fn gptq_layout(&mut self, base: Option<GptqLayout>) -> Option<GptqLayout> {
        let present = |keys: &Keys<'_>, names: &[&'static str]| base.is_none() || keys.any(names).is_some();
        let bits = match present(self, &["bits"]) {
            true => self.number(&["bits"], &[2, 3, 4, 8]),
            false => base.map(|base| base.bits),
        };
        let group = match present(self, &["group_size"]) {
            true => self.group(&["group_size"]),
            false => base.map(|base| base.group),
        };
        let symmetric = self.flag("sym", base.is_none_or(|base| base.symmetric));
        self.flag("desc_act", false);
        Some(GptqLayout { bits: bits?, group: group?, symmetric })
    }

    /// Reads a rule of `dynamic`.
    fn rule(&mut self, text: &str, value: &Value, base: GptqLayout) -> Option<Rule> {
        let (skips, pattern) = match text.strip_prefix("-:") {
            Some(pattern) => (true, pattern),
            None => (false, text.strip_prefix("+:").unwrap_or(text)),
        };
        let pattern = match Pattern::new(pattern) {
            Ok(pattern) => pattern,
            Err(reason) => {
                self.wrong("dynamic", &Value::from(text), format!("a regular expression ({reason})"));
                return None;
            }
        };
        if skips {
            return Some(Rule { pattern, layout: None });
        }
        let Some(map) = value.as_object() else {
            self.wrong("dynamic", value, format!("an object for {text}"));
            return None;
        };
        let mut keys = Keys { map, path: format!("{}.dynamic[{text}]", self.path), problems: self.problems };
        let layout = keys.gptq_layout(Some(base))?;
        Some(Rule { pattern, layout: Some(layout) })
    }

    fn awq(&mut self) -> Option<Quantization> {
        let bits = self.number(&["bits", "w_bit"], &[4]);
        let group = self.group(&["group_size", "q_group_size"]);
        self.only("version", &["gemm"]);
        let zeros = self.flag("zero_point", false);
        bits?;
        Some(Quantization::Awq { group: group?, zeros })
    }

    fn bits_and_bytes(&mut self) -> Option<Quantization> {
        self.only("bnb_4bit_quant_type", &["nf4", "fp4"]);
        let bits = match (self.flag("load_in_4bit", false), self.flag("load_in_8bit", false)) {
            (true, false) => Some(4),
            (false, true) => Some(8),
            (both, _) => {
                let found = Value::from(if both { "true beside load_in_8bit" } else { "false beside load_in_8bit" });
                self.wrong("load_in_4bit", &found, "true or false, and load_in_8bit the other one");
                None
            }
        };
        Some(Quantization::BitsAndBytes { bits: bits? })
    }

    fn modelopt(&mut self) -> Option<Quantization> {
        match self.value("quant_algo") {
            Some(Value::String(name)) if name == "FP8" || name == "FP8_PER_CHANNEL_PER_TOKEN" => {
                Some(Quantization::Fp8 { block: None })
            }
            Some(Value::String(name)) if name == "NVFP4" => Some(Quantization::ModelOptNvfp4),
            Some(other) => {
                self.wrong("quant_algo", other, "FP8 or FP8_PER_CHANNEL_PER_TOKEN or NVFP4");
                None
            }
            None => {
                self.missing("quant_algo");
                None
            }
        }
    }

    fn compressed_tensors(&mut self) -> Option<Quantization> {
        // Rotations of the activations belong to the weights of such a checkpoint.
        if let Some(transforms) = self.value("transform_config")
            && transforms.get("config_groups").and_then(Value::as_object).is_none_or(|groups| !groups.is_empty())
            && transforms.as_object().is_none_or(|map| !map.is_empty())
        {
            self.wrong("transform_config", transforms, "absent or empty");
        }
        if let Some(sparsity) = self.value("sparsity_config")
            && sparsity.as_object().is_none_or(|map| !map.is_empty())
            && sparsity.get("format").and_then(Value::as_str) != Some("dense")
        {
            self.wrong("sparsity_config", sparsity, "absent, or of format dense");
        }
        let ignore = self.targets("ignore").unwrap_or_default();
        let groups = match self.value("config_groups") {
            Some(Value::Object(groups)) if groups.len() <= MAX_PATTERNS => groups,
            Some(other) => {
                self.wrong("config_groups", other, format!("an object of at most {MAX_PATTERNS} groups"));
                return None;
            }
            None => {
                self.missing("config_groups");
                return None;
            }
        };
        let format = self.value("format");
        let mut read = Vec::new();
        for (name, group) in groups {
            let Some(map) = group.as_object() else {
                self.wrong(&format!("config_groups.{name}"), group, "an object");
                continue;
            };
            let path = format!("{}.config_groups.{name}", self.path);
            let mut keys = Keys { map, path, problems: self.problems };
            let format = keys.value("format").or(format).cloned();
            let Some(targets) = keys.targets("targets") else {
                keys.missing("targets");
                continue;
            };
            let Some(Value::Object(weights)) = keys.value("weights") else {
                // A group of activations or caches alone.
                continue;
            };
            let mut keys = Keys { map: weights, path: format!("{}.weights", keys.path), problems: keys.problems };
            if let Some(scheme) = keys.scheme(format.as_ref()) {
                read.push(SchemeGroup { targets, scheme });
            }
        }
        Some(Quantization::CompressedTensors { groups: read, ignore })
    }

    /// Reads a list of modules; `None` if the key is absent.
    fn targets(&mut self, key: &str) -> Option<Vec<ModuleTarget>> {
        let value = self.value(key)?;
        let Some(list) = value.as_array().filter(|list| list.len() <= MAX_PATTERNS) else {
            self.wrong(key, value, format!("a list of at most {MAX_PATTERNS} names"));
            return None;
        };
        let mut targets = Vec::new();
        for entry in list {
            let target = match entry.as_str().map(|text| (text, text.strip_prefix("re:"))) {
                Some((_, Some(pattern))) => Pattern::new(pattern).map(ModuleTarget::Pattern),
                Some((text, None)) => Ok(ModuleTarget::Name(text.to_owned())),
                None => Err("not a name".to_owned()),
            };
            match target {
                Ok(target) => targets.push(target),
                Err(reason) => self.wrong(key, entry, format!("a name or a regular expression ({reason})")),
            }
        }
        Some(targets)
    }

    /// Reads the `weights` of a group of compressed-tensors. `format` is the group's or the whole configuration's.
    fn scheme(&mut self, format: Option<&Value>) -> Option<Scheme> {
        let kind = self.value("type").and_then(Value::as_str).unwrap_or("int").to_owned();
        let symmetric = self.flag("symmetric", true);
        let strategy = self.strategy();
        let format = format.and_then(Value::as_str).unwrap_or("absent").to_owned();
        let bits = match (kind.as_str(), format.as_str()) {
            ("int", "pack-quantized") => self.number(&["num_bits"], &[2, 3, 4, 5, 6, 8]),
            ("int", "int-quantized" | "naive-quantized") | ("float", "float-quantized" | "naive-quantized") => {
                self.number(&["num_bits"], &[8])
            }
            ("float", "nvfp4-pack-quantized" | "mxfp4-pack-quantized") => self.number(&["num_bits"], &[4]),
            _ => {
                let rule = "int in pack-quantized, int-quantized or naive-quantized, or float in float-quantized, \
                            naive-quantized, nvfp4-pack-quantized or mxfp4-pack-quantized";
                self.wrong("type", &Value::from(format!("{kind} in {format}")), rule);
                None
            }
        };
        let (bits, strategy) = (bits?, strategy?);
        let scheme = match (kind.as_str(), format.as_str()) {
            ("int", "pack-quantized") => Scheme::PackedInts { bits, strategy, symmetric },
            ("int", _) => Scheme::Int8 { strategy, symmetric },
            (_, "nvfp4-pack-quantized") => Scheme::Nvfp4 { compressed: true },
            (_, "mxfp4-pack-quantized") => Scheme::Mxfp4 { compressed: true },
            _ => Scheme::Floats { strategy },
        };
        let blocks = matches!(strategy, Strategy::Block(_));
        if blocks && matches!(scheme, Scheme::PackedInts { .. }) {
            self.wrong("strategy", &Value::from("block"), "tensor or channel or group in pack-quantized");
            return None;
        }
        Some(scheme)
    }

    fn strategy(&mut self) -> Option<Strategy> {
        let group = match self.value("group_size").and_then(Value::as_i64) {
            None | Some(-1) => None,
            Some(_) => self.group(&["group_size"])?,
        };
        match self.value("strategy").map(|value| value.as_str().ok_or(value)) {
            None if group.is_some() => group.map(Strategy::Group),
            Some(Ok("group" | "tensor_group")) => match group {
                Some(group) => Some(Strategy::Group(group)),
                None => {
                    self.missing("group_size");
                    None
                }
            },
            None | Some(Ok("channel")) => Some(Strategy::Channel),
            Some(Ok("tensor")) => Some(Strategy::Tensor),
            Some(Ok("block")) => match self.block("block_structure")? {
                Some(block) => Some(Strategy::Block(block)),
                None => {
                    self.missing("block_structure");
                    None
                }
            },
            Some(Ok(other)) => {
                self.wrong("strategy", &Value::from(other), "tensor, channel, group, tensor_group or block");
                None
            }
            Some(Err(other)) => {
                self.wrong("strategy", other, "a name");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<Quantization, Vec<String>> {
        let mut problems = Vec::new();
        let read = read(&value, "quantization_config", &mut problems);
        match read {
            Some(read) if problems.is_empty() => Ok(read),
            _ => Err(problems.iter().map(ToString::to_string).collect()),
        }
    }

    fn refused(value: Value, expected: &str) {
        assert_eq!(parse(value).unwrap_err(), [expected]);
    }

    #[test]
    fn gptq_rules_decide_in_their_order() {
        let read = parse(json!({
            "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": false, "desc_act": true,
            "checkpoint_format": "gptq_v2",
            "dynamic": {
                "-:.*\\.o_proj": {}, "+:model\\.layers\\.1\\.": {"bits": 8}, ".*\\.(?!up)[a-z]+_proj$": {"group_size": -1},
            },
        }))
        .unwrap();
        let layout = |name: &str| match read.scheme(&[name], "Linear") {
            Some(Scheme::Gptq { layout, version: GptqVersion::V2 }) => Some((layout.bits, layout.group)),
            None => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(layout("model.layers.1.self_attn.o_proj"), None);
        assert_eq!(layout("model.layers.1.mlp.up_proj"), Some((8, Some(128))));
        assert_eq!(layout("model.layers.10.mlp.up_proj"), Some((4, Some(128))));
        assert_eq!(layout("model.layers.10.mlp.down_proj"), Some((4, None)));
    }

    #[test]
    fn compressed_tensors_names_modules_exactly_by_pattern_or_by_class() {
        let weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true});
        let read = parse(json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights},
                "group_1": {"targets": ["re:.*down_proj$"], "format": "int-quantized",
                            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
            },
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        }))
        .unwrap();
        let of = |name: &str| read.scheme(&[name], "Linear");
        assert_eq!(of("lm_head"), None);
        assert_eq!(of("model.layers.0.mlp.gate"), None);
        let packed = Scheme::PackedInts { bits: 4, strategy: Strategy::Group(32), symmetric: true };
        assert_eq!(of("model.layers.0.mlp.gate_proj"), Some(packed));
        let bytes = Scheme::Int8 { strategy: Strategy::Channel, symmetric: true };
        assert_eq!(of("model.layers.0.mlp.down_proj"), Some(bytes));
        assert_eq!(read.scheme(&["model.embed_tokens"], "Embedding"), None);
    }

    #[test]
    fn exact_names_come_before_patterns_whatever_the_order_of_groups() {
        let group = |targets: Value, symmetric: bool| {
            let weights = json!({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": symmetric});
            json!({"targets": targets, "weights": weights})
        };
        let read = parse(json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {
                "group_0": group(json!(["re:.*_proj$", "re:.*z_proj$"]), true),
                "group_1": group(json!(["model.layers.0.mlp.down_proj", "re:.*[o-q]_proj$"]), false),
            },
        }))
        .unwrap();
        let of = |name: &str| match read.scheme(&[name], "Linear") {
            Some(Scheme::PackedInts { symmetric, .. }) => symmetric,
            other => panic!("{other:?}"),
        };
        assert!(!of("model.layers.0.mlp.down_proj"));
        assert!(of("model.layers.1.mlp.down_proj"));
        // Of the patterns that match, the first in the order of their texts: "[" comes before "_".
        assert!(!of("model.layers.1.self_attn.o_proj"));
    }

    #[test]
    fn patterns_that_exclude_a_part_of_a_model_leave_its_modules_quantised() {
        let (file, text) = ("model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj");
        let (other_file, other_text) = ("model.visual.blocks.0.mlp.up_proj", "visual.blocks.0.mlp.up_proj");
        let weights = json!({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": true});
        let compressed = parse(json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [r"re:^(?!model\.language_model\.).*"],
        }));
        let gptq = parse(json!({
            "quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {r"-:^(?!model\.language_model)": {}},
        }));
        for read in [compressed.unwrap(), gptq.unwrap()] {
            assert!(read.scheme(&[file, text], "Linear").is_some(), "{read:?}");
            assert_eq!(read.scheme(&[other_file, other_text], "Linear"), None);
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        refused(
            json!({"quant_method": "aqlm"}),
            "quantization \"aqlm\" is not supported (awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, \
             modelopt, mxfp4 are)",
        );
        let bnb = |of_4: bool, of_8: bool, kind: &str| {
            json!({"quant_method": "bitsandbytes", "load_in_4bit": of_4, "load_in_8bit": of_8,
                "bnb_4bit_quant_type": kind, "llm_int8_skip_modules": null, "llm_int8_threshold": 6.0})
        };
        assert_eq!(parse(bnb(true, false, "nf4")), Ok(Quantization::BitsAndBytes { bits: 4 }));
        assert_eq!(parse(bnb(false, true, "fp4")), Ok(Quantization::BitsAndBytes { bits: 8 }));
        refused(bnb(true, false, "int4"), "quantization_config.bnb_4bit_quant_type is \"int4\", must be nf4 or fp4");
        for both in [true, false] {
            let found = format!("quantization_config.load_in_4bit is \"{both} beside load_in_8bit\"");
            refused(bnb(both, both, "nf4"), &format!("{found}, must be true or false, and load_in_8bit the other one"));
        }
        let awq = |bits: u32, group: i64, version: &str| json!({"quant_method": "awq", "bits": bits, "group_size": group, "version": version, "zero_point": true});
        parse(awq(4, 128, "GEMM")).unwrap();
        refused(awq(4, 128, "gemv"), "quantization_config.version is \"gemv\", must be gemm");
        refused(awq(3, 128, "gemm"), "quantization_config.bits is 3, must be 4");
        let group = "must be -1, or a multiple of 16 of at most 16777216";
        refused(awq(4, 40, "gemm"), &format!("quantization_config.group_size is 40, {group}"));
        let gptq = |key: &str, value: Value| {
            let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
            config[key] = value;
            config
        };
        let from = |key: &str, value: Value, rule: &str| {
            let message = format!("quantization_config.{key} is {value}, must be {rule}");
            refused(gptq(key, value), &message);
        };
        from("bits", json!(5), "2 or 3 or 4 or 8");
        from("checkpoint_format", json!("marlin"), "gptq or gptq_v2");
        from("pack_dtype", json!("int16"), "int32");
        from("sym", json!("yes"), "true or false");
        let ct = |format: &str, kind: &str, bits: u32| {
            json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"g": {
                "targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "strategy": "channel"}}}})
        };
        parse(ct("float-quantized", "float", 8)).unwrap();
        refused(
            ct("marlin-24", "int", 4),
            "quantization_config.config_groups.g.weights.type is \"int in marlin-24\", must be int in pack-quantized, \
             int-quantized or naive-quantized, or float in float-quantized, naive-quantized, nvfp4-pack-quantized or \
             mxfp4-pack-quantized",
        );
        refused(ct("int-quantized", "int", 4), "quantization_config.config_groups.g.weights.num_bits is 4, must be 8");
        let mut rotated = ct("float-quantized", "float", 8);
        rotated["transform_config"] = json!({"config_groups": {"u": {}}});
        let message = parse(rotated).unwrap_err().remove(0);
        assert!(message.starts_with("quantization_config.transform_config is"), "{message}");
    }

    #[test]
    fn a_pattern_that_takes_too_long_does_not_match() {
        let pattern = Pattern::new("(a+)+(?=b)c").unwrap();
        assert!(!pattern.matches(&"a".repeat(200)));
        assert!(Pattern::new("(").is_err());
    }
}

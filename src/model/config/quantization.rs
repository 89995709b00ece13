//! How the weights of a safetensors checkpoint are quantised: `quantization_config` of config.json, or the file that
//! stands for it (`quantize_config.json`, `quant_config.json`, `hf_quant_config.json`). Which modules are quantised is
//! seen in the tensors; the configuration says how their tensors are to be read.
//!
//! Activations are not quantised: weights alone decide, and keys that only concern activations or caches are ignored.
//!
//! Not here: the tensors.

use std::collections::BTreeMap;

use fancy_regex::Regex;
use serde_json::{Map, Value};

use super::ConfigProblem;
use crate::quant::safetensors::GptqVersion;

/// Files that older tools write instead of the key `quantization_config`.
pub const FILES: [&str; 3] = ["quantize_config.json", "quant_config.json", "hf_quant_config.json"];

/// The values of `quant_method` that are supported.
const METHODS: [&str; 10] = [
    "auto-round",
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gptq",
    "modelopt",
    "mxfp4",
    "quark",
];

/// The largest group size; a larger number means that the file is damaged.
const MAX_GROUP: u64 = 1 << 24;
/// The maximum number of patterns and names in the lists of a configuration.
const MAX_PATTERNS: usize = 4096;
/// The maximum number of modules that a configuration describes one by one: those of all experts.
const MAX_MODULES: usize = 1 << 20;
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
    /// `auto-round`, `modelopt` and `quark`.
    ByModule(ModuleSchemes),
    /// `mxfp4`.
    Mxfp4,
}

/// A scheme for all modules, and those of modules that differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModuleSchemes {
    /// The scheme of modules that nothing else names; `None` if they are not quantised.
    all: Option<Scheme>,
    /// The schemes of modules by their names, or by that of a module that they belong to; `None` for one that is not
    /// quantised.
    named: BTreeMap<String, Option<Scheme>>,
    /// The schemes of other modules; the first target that matches decides.
    rules: Vec<(ModuleTarget, Option<Scheme>)>,
}

impl ModuleSchemes {
    /// Returns what is said of a module of this name.
    fn said(&self, name: &str) -> Said {
        let mut of = Some(name);
        let named = std::iter::from_fn(|| {
            let here = of?;
            of = here.rsplit_once('.').map(|(outer, _)| outer);
            Some(here)
        });
        let found = named.into_iter().find_map(|name| self.named.get(name));
        let by_rule = || {
            let mut rules = self.rules.iter();
            rules.find(|(target, _)| target.is(name) || target.matches(name)).map(|(_, scheme)| scheme)
        };
        match (found.or_else(by_rule), self.all) {
            (Some(Some(scheme)), _) => Said::OfName(*scheme),
            (None, Some(scheme)) => Said::OfAll(scheme),
            (Some(None), _) | (None, None) => Said::Nothing,
        }
    }
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

/// A module, or modules, in a list of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum ModuleTarget {
    /// A module's exact name, or the name of a class such as `Linear`.
    Name(String),
    /// A regular expression that is matched at the start of a module's name.
    Pattern(Pattern),
    /// A whole name in which `*` stands for any characters and `?` for one.
    Wildcard(String),
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
    /// MXFP4.
    Mxfp4 {
        /// Whose tensors they are.
        names: Mxfp4Names,
    },
}

/// How the tensors of MXFP4 are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mxfp4Names {
    /// compressed-tensors: `weight_packed`, `weight_scale`.
    Compressed,
    /// gpt-oss: `_blocks` and `_scales` of all experts.
    Blocks,
    /// Quark: `weight`, `weight_scale`.
    Plain,
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
            Quantization::ByModule(schemes) => schemes.said(name),
            // Modules of `modules_to_not_convert` have no blocks.
            Quantization::Mxfp4 => Said::OfAll(Scheme::Mxfp4 { names: Mxfp4Names::Blocks }),
        }
    }
}

/// Reads a name with `*` or `?` as a wildcard.
fn wildcards(target: ModuleTarget) -> ModuleTarget {
    match target {
        ModuleTarget::Name(text) if text.contains(['*', '?']) => ModuleTarget::Wildcard(text),
        other => other,
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
        match self {
            ModuleTarget::Name(_) => false,
            ModuleTarget::Pattern(pattern) => pattern.matches(name),
            ModuleTarget::Wildcard(text) => has_form(name.as_bytes(), text.as_bytes()),
        }
    }

    fn text(&self) -> &str {
        match self {
            ModuleTarget::Name(text) | ModuleTarget::Wildcard(text) => text,
            ModuleTarget::Pattern(pattern) => pattern.text(),
        }
    }
}

/// Whether a name is what `form` describes, in which `*` stands for any characters and `?` for one.
fn has_form(name: &[u8], form: &[u8]) -> bool {
    let (mut at, mut of) = (0, 0);
    // Where the last `*` is, and where what follows it was looked for.
    let mut last: Option<(usize, usize)> = None;
    while at < name.len() {
        match form.get(of) {
            Some(b'*') => {
                last = Some((of, at));
                of += 1;
            }
            Some(byte) if *byte == b'?' || *byte == name[at] => (at, of) = (at + 1, of + 1),
            _ => {
                let Some((star, from)) = last else { return false };
                last = Some((star, from + 1));
                (at, of) = (from + 1, star + 1);
            }
        }
    }
    form[of..].iter().all(|byte| *byte == b'*')
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
        "auto-round" | "intel/auto-round" => keys.auto_round(),
        "fp8" | "fbgemm_fp8" => keys.fp8(),
        "gptq" => keys.gptq(),
        "awq" => keys.awq(),
        "bitsandbytes" => keys.bits_and_bytes(),
        "compressed-tensors" => keys.compressed_tensors(),
        "modelopt" => keys.modelopt(),
        "mxfp4" => Some(Quantization::Mxfp4),
        "quark" => keys.quark(),
        _ => {
            keys.problems.push(ConfigProblem::Quantized(method));
            None
        }
    };
    read.filter(|_| problems.len() == before)
}

/// Counts the regular expressions of a configuration: texts that begin with `re:`, the keys of `dynamic`, and those of
/// `extra_config` that are not names.
fn patterns(value: &Value) -> usize {
    match value {
        Value::String(text) => usize::from(text.starts_with("re:")),
        Value::Array(list) => list.iter().map(patterns).sum(),
        Value::Object(map) => {
            let rules = map.get("dynamic").and_then(Value::as_object).map_or(0, Map::len);
            let extra = map.get("extra_config").and_then(Value::as_object).into_iter().flatten();
            rules + extra.filter(|(key, _)| !is_name(key)).count() + map.values().map(patterns).sum::<usize>()
        }
        _ => 0,
    }
}

/// Whether a text is a module's name and not a regular expression, by its characters.
fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c))
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

    /// Reads auto-round's configuration: the tensors of GPTQ or AWQ, with a layout for each module.
    fn auto_round(&mut self) -> Option<Quantization> {
        let packing = match self.value("packing_format").map(|value| value.as_str().ok_or(value)) {
            None | Some(Ok("auto" | "auto_round:auto_gptq" | "auto_round:gptq")) => Some(Some(GptqVersion::V1)),
            // These packings keep the zeros as they are.
            Some(Ok("auto_round" | "auto_round:gptqmodel")) => Some(Some(GptqVersion::V2)),
            Some(Ok("auto_round:auto_awq" | "auto_round:awq")) => Some(None),
            Some(Ok(_)) | Some(Err(_)) => {
                let value = self.value("packing_format").expect("it was read just now");
                let rule = "auto_round:auto_gptq, auto_round:gptq, auto_round:gptqmodel, auto_round, auto_round:auto_awq or \
                            auto_round:awq";
                self.wrong("packing_format", value, rule);
                None
            }
        };
        let layout = self.auto_round_layout(packing.flatten().is_none(), None);
        let (packing, layout) = (packing?, layout?);
        let scheme = |layout: Option<GptqLayout>| {
            layout.map(|layout| match packing {
                Some(version) => Scheme::Gptq { layout, version },
                None => Scheme::Awq { group: layout.group, zeros: true },
            })
        };
        let mut schemes = ModuleSchemes { all: scheme(layout), ..ModuleSchemes::default() };
        for (name, value) in self.modules("extra_config")? {
            let Some(map) = value.as_object() else {
                self.wrong(&format!("extra_config[{name}]"), value, "an object");
                continue;
            };
            // The library leaves these out.
            if map.is_empty() {
                continue;
            }
            let mut keys = Keys { map, path: format!("{}.extra_config[{name}]", self.path), problems: self.problems };
            let Some(layout) = keys.auto_round_layout(packing.is_none(), layout) else { continue };
            if is_name(name) {
                schemes.named.insert(name.clone(), scheme(layout));
                continue;
            }
            // The library searches in the whole name.
            match Pattern::new(&format!(".*?(?:{name})")) {
                Ok(pattern) => schemes.rules.push((ModuleTarget::Pattern(pattern), scheme(layout))),
                Err(reason) => {
                    let text = Value::from(name.as_str());
                    self.wrong("extra_config", &text, format!("a name or a regular expression ({reason})"));
                }
            }
        }
        Some(Quantization::ByModule(schemes))
    }

    /// Reads the keys of a layout of auto-round, of which the inner `None` stands for 16 bits and more; absent ones are those
    /// of `base`.
    #[expect(clippy::option_option, reason = "wrong, or not quantised")]
    fn auto_round_layout(&mut self, is_awq: bool, base: Option<GptqLayout>) -> Option<Option<GptqLayout>> {
        // Modules that are not quantised keep other keys.
        if self.value("bits").and_then(Value::as_u64).is_some_and(|bits| bits >= 16) {
            return Some(None);
        }
        self.only("data_type", &["int", "int_sym", "int_asym"]);
        for key in ["super_bits", "super_group_size", "rotation_config"] {
            if let Some(value) = self.value(key).filter(|value| value.as_object().is_none_or(|map| !map.is_empty())) {
                self.wrong(key, value, "absent");
            }
        }
        if is_awq && (base.is_none() || self.value("bits").is_some()) {
            self.number(&["bits"], &[4])?;
        }
        self.gptq_layout(base).map(Some)
    }

    /// Returns the modules that a key describes by name; none if it is absent.
    fn modules(&mut self, key: &str) -> Option<Vec<(&'a String, &'a Value)>> {
        match self.value(key) {
            None => Some(Vec::new()),
            Some(Value::Object(map)) if map.len() <= MAX_MODULES => Some(map.iter().collect()),
            Some(other) => {
                self.wrong(key, other, format!("an object of at most {MAX_MODULES} modules"));
                None
            }
        }
    }

    fn modelopt(&mut self) -> Option<Quantization> {
        let excluded = self.excluded(&["exclude_modules", "ignore"])?;
        let rules = excluded.into_iter().map(|target| (target, None)).collect();
        let mut schemes = ModuleSchemes { rules, ..ModuleSchemes::default() };
        if self.value("quant_algo").and_then(Value::as_str) != Some("MIXED_PRECISION") {
            schemes.all = Some(self.modelopt_scheme(", or MIXED_PRECISION")?);
            return Some(Quantization::ByModule(schemes));
        }
        if self.value("quantized_layers").is_none() {
            self.missing("quantized_layers");
        }
        for (name, value) in self.modules("quantized_layers")? {
            let Some(map) = value.as_object() else {
                self.wrong(&format!("quantized_layers[{name}]"), value, "an object");
                continue;
            };
            let mut keys =
                Keys { map, path: format!("{}.quantized_layers[{name}]", self.path), problems: self.problems };
            if let Some(scheme) = keys.modelopt_scheme("") {
                schemes.named.insert(name.clone(), Some(scheme));
            }
        }
        Some(Quantization::ByModule(schemes))
    }

    /// Reads how ModelOpt stores one module, or all; `more` are further values of the key that the caller reads.
    fn modelopt_scheme(&mut self, more: &str) -> Option<Scheme> {
        let Some(value) = self.value("quant_algo") else {
            self.missing("quant_algo");
            return None;
        };
        let group = |keys: &mut Keys<'_>, size: u32| match keys.value("group_size") {
            None => Some(()),
            // 0 is written where no group was looked for.
            Some(value) if value == 0 => Some(()),
            Some(_) => keys.number(&["group_size"], &[size]).map(drop),
        };
        match value.as_str() {
            Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => Some(Scheme::Fp8 { block: None }),
            Some("NVFP4" | "W4A16_NVFP4") => {
                group(self, 16)?;
                Some(Scheme::Nvfp4 { compressed: false })
            }
            Some("MXFP8") => {
                group(self, 32)?;
                Some(Scheme::Floats { strategy: Strategy::Group(32) })
            }
            Some("W8A16") => Some(Scheme::Int8 { strategy: Strategy::Channel, symmetric: true }),
            _ => {
                let rule = format!("FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4, MXFP8 or W8A16{more}");
                self.wrong("quant_algo", value, rule);
                None
            }
        }
    }

    /// Reads lists of modules that are not quantised: names, and names with `*`; those that begin with `re:` are regular
    /// expressions.
    fn excluded(&mut self, lists: &[&str]) -> Option<Vec<ModuleTarget>> {
        let before = self.problems.len();
        let targets: Vec<ModuleTarget> =
            lists.iter().flat_map(|key| self.targets(key).unwrap_or_default()).map(wildcards).collect();
        (self.problems.len() == before).then_some(targets)
    }

    /// Reads Quark's configuration: a scheme for all modules and others by names with `*`.
    fn quark(&mut self) -> Option<Quantization> {
        let excluded = self.excluded(&["exclude"])?;
        let mut schemes = ModuleSchemes::default();
        schemes.rules.extend(excluded.into_iter().map(|target| (target, None)));
        if let Some(value) = self.value("layer_type_quant_config")
            && value.as_object().is_none_or(|map| !map.is_empty())
        {
            self.wrong("layer_type_quant_config", value, "absent or empty");
        }
        if let Some(map) = self.value("export").and_then(Value::as_object) {
            let mut keys = Keys { map, path: format!("{}.export", self.path), problems: self.problems };
            keys.only("weight_format", &["real_quantized"]);
        }
        schemes.all = match self.value("global_quant_config") {
            None => None,
            Some(value) => self.quark_scheme("global_quant_config", value)?,
        };
        let layers = self.modules("layer_quant_config")?;
        if layers.len() > MAX_PATTERNS {
            let found = Value::from(format!("{} modules", layers.len()));
            self.wrong("layer_quant_config", &found, format!("an object of at most {MAX_PATTERNS} modules"));
        }
        for (name, value) in layers {
            let scheme = self.quark_scheme(&format!("layer_quant_config[{name}]"), value)?;
            schemes.rules.push((wildcards(ModuleTarget::Name(name.clone())), scheme));
        }
        Some(Quantization::ByModule(schemes))
    }

    /// Refuses scales along another dimension of a weight than these; an absent key is accepted.
    fn axis(&mut self, allowed: &[i64]) -> Option<()> {
        match self.value("ch_axis") {
            Some(value) if value.as_i64().is_none_or(|axis| !allowed.contains(&axis)) => {
                let allowed: Vec<String> = allowed.iter().map(i64::to_string).collect();
                self.wrong("ch_axis", value, allowed.join(" or "));
                None
            }
            _ => Some(()),
        }
    }

    /// Reads how Quark stores a module's weight; the inner `None` is a module that is not quantised.
    #[expect(clippy::option_option, reason = "wrong, or not quantised")]
    fn quark_scheme(&mut self, key: &str, value: &Value) -> Option<Option<Scheme>> {
        let path = format!("{}.{key}", self.path);
        let Some(map) = value.as_object() else {
            self.wrong(key, value, "an object");
            return None;
        };
        let mut weight = map.get("weight").filter(|weight| !weight.is_null());
        if let Some(Value::Array(list)) = weight {
            // Several steps: NVFP4 and others, whose scales are quantised themselves.
            let [one] = list.as_slice() else {
                let found = Value::from(format!("a list of {}", list.len()));
                self.wrong(&format!("{key}.weight"), &found, "an object");
                return None;
            };
            weight = Some(one);
        }
        let map = match weight {
            None => return Some(None),
            Some(Value::Object(map)) => map,
            Some(other) => {
                self.wrong(&format!("{key}.weight"), other, "an object");
                return None;
            }
        };
        let mut keys = Keys { map, path: format!("{path}.weight"), problems: self.problems };
        let text = |keys: &Keys<'_>, key: &str| keys.value(key).and_then(Value::as_str).unwrap_or("absent").to_owned();
        match (text(&keys, "dtype").as_str(), text(&keys, "qscheme").as_str()) {
            ("fp8_e4m3" | "fp8_e5m2", "per_tensor") => Some(Some(Scheme::Fp8 { block: None })),
            ("fp8_e4m3" | "fp8_e5m2", "per_channel") => {
                // A scale a row.
                keys.axis(&[0])?;
                Some(Some(Scheme::Fp8 { block: None }))
            }
            ("fp4", "per_group") => {
                keys.number(&["group_size"], &[32])?;
                // Groups of columns.
                keys.axis(&[-1, 1])?;
                let before = keys.problems.len();
                keys.only("scale_format", &["e8m0"]);
                (keys.problems.len() == before).then_some(Some(Scheme::Mxfp4 { names: Mxfp4Names::Plain }))
            }
            (dtype, form) => {
                let found = Value::from(format!("{dtype} {form}"));
                keys.wrong("dtype", &found, "fp8_e4m3 or fp8_e5m2 per_tensor or per_channel, or fp4 per_group");
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
            (_, "mxfp4-pack-quantized") => Scheme::Mxfp4 { names: Mxfp4Names::Compressed },
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

    /// Goal: auto-round's modules have the layouts that its library gives them: that of their name, else that of the first
    /// regular expression that is found anywhere in the name, else the common one.
    #[test]
    fn auto_round_decides_by_name_then_by_pattern() {
        let config = |packing: &str| {
            json!({
                "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": false, "data_type": "int",
                "packing_format": packing, "autoround_version": "0.9.2", "iters": 200,
                "extra_config": {
                    ".*mlp.*": {"bits": 16, "data_type": "float"}, "up_proj$": {"bits": 8},
                    "model.layers.1.self_attn.o_proj": {"bits": 16, "data_type": "fp"},
                    "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": -1, "sym": true}, "v_proj|q_proj": {},
                },
            })
        };
        let read = parse(config("auto_round:auto_gptq")).unwrap();
        let of = |name: &str| match read.scheme(&[name], "Linear") {
            Some(Scheme::Gptq { layout, version: GptqVersion::V1 }) => {
                Some((layout.bits, layout.group, layout.symmetric))
            }
            None => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(of("model.layers.0.mlp.down_proj"), Some((8, None, true)));
        assert_eq!(of("model.layers.1.mlp.down_proj"), None);
        assert_eq!(of("model.layers.1.mlp.up_proj"), None);
        assert_eq!(of("model.layers.1.self_attn.o_proj"), None);
        assert_eq!(of("model.layers.11.self_attn.o_proj"), Some((4, Some(128), false)));
        assert_eq!(of("other.up_proj"), Some((8, Some(128), false)));
        assert_eq!(of("model.layers.0.self_attn.v_proj"), Some((4, Some(128), false)));
        let version = |packing: &str| {
            let mut config = config(packing);
            config["extra_config"] = json!({});
            config["quant_method"] = json!("intel/auto-round");
            match parse(config).unwrap().scheme(&["q_proj"], "Linear") {
                Some(Scheme::Gptq { version, .. }) => Some(version),
                Some(Scheme::Awq { group: Some(128), zeros: true }) => None,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(["auto", "auto_round:gptq"].map(version), [Some(GptqVersion::V1); 2]);
        assert_eq!(["auto_round", "auto_round:gptqmodel"].map(version), [Some(GptqVersion::V2); 2]);
        assert_eq!(["auto_round:awq", "auto_round:auto_awq"].map(version), [None; 2]);

        let with = |key: &str, value: Value, rule: &str| {
            let mut config = config("auto_round");
            config[key] = value.clone();
            refused(config, &format!("quantization_config.{key} is {value}, must be {rule}"));
        };
        let packings = "auto_round:auto_gptq, auto_round:gptq, auto_round:gptqmodel, auto_round, auto_round:auto_awq or \
                        auto_round:awq";
        with("packing_format", json!("auto_round:llm_compressor"), packings);
        with("bits", json!(5), "2 or 3 or 4 or 8");
        with("data_type", json!("mx_fp"), "int or int_sym or int_asym");
        with("super_bits", json!(6), "absent");
        let mut awq = config("auto_round:auto_awq");
        awq["extra_config"] = json!({"up_proj$": {"bits": 8}});
        refused(awq, "quantization_config.extra_config[up_proj$].bits is 8, must be 4");
    }

    #[test]
    fn modules_of_mixed_precision_have_their_own_algorithms() {
        let config = |algorithm: &str| {
            json!({
                "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": "FP8",
                "quantized_layers": {
                    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                    "model.layers.0.mlp.up_proj": {"quant_algo": algorithm, "group_size": 16},
                    "model.layers.1.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
                    "model.layers.1.mlp.shared": {"quant_algo": "MXFP8", "group_size": 32},
                    "model.layers.1.mlp.down_proj": {"quant_algo": "W8A16"},
                },
                "exclude_modules": ["lm_head", "model.layers.2*"],
            })
        };
        let read = parse(config("W4A16_NVFP4")).unwrap();
        let of = |name: &str| read.scheme(&[name], "Linear");
        assert_eq!(of("model.layers.0.self_attn.q_proj"), Some(Scheme::Fp8 { block: None }));
        assert_eq!(of("model.layers.0.mlp.up_proj"), Some(Scheme::Nvfp4 { compressed: false }));
        assert_eq!(of("model.layers.1.mlp.experts.7.up_proj"), Some(Scheme::Nvfp4 { compressed: false }));
        assert_eq!(of("model.layers.1.mlp.shared"), Some(Scheme::Floats { strategy: Strategy::Group(32) }));
        let rows = Scheme::Int8 { strategy: Strategy::Channel, symmetric: true };
        assert_eq!(of("model.layers.1.mlp.down_proj"), Some(rows));
        assert_eq!(of("model.layers.0.mlp.down_proj"), None);
        let known = "must be FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4, MXFP8 or W8A16";
        let key = "quantization_config.quantized_layers[model.layers.0.mlp.up_proj].quant_algo";
        refused(config("W4A16_AWQ"), &format!("{key} is \"W4A16_AWQ\", {known}"));
        let all =
            |algorithm: &str| json!({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["*.o_proj"]});
        let read = parse(all("NVFP4")).unwrap();
        assert_eq!(read.scheme(&["model.layers.0.self_attn.o_proj"], "Linear"), None);
        assert!(read.scheme(&["model.layers.0.self_attn.q_proj"], "Linear").is_some());
        let key = "quantization_config.quant_algo";
        refused(all("NVFP4_AWQ"), &format!("{key} is \"NVFP4_AWQ\", {known}, or MIXED_PRECISION"));
        let mut without = config("NVFP4");
        without["quantized_layers"] = Value::Null;
        refused(without, "quantization_config.quantized_layers is missing");
    }

    #[test]
    fn quark_excludes_modules_and_gives_some_a_scheme_of_their_own() {
        let fp8 =
            json!({"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": null, "is_dynamic": false}});
        let fp4 = |group: u32, scale: &str| {
            json!({"input_tensors": {"dtype": "fp4"}, "weight": {
                "dtype": "fp4", "qscheme": "per_group", "group_size": group, "scale_format": scale, "ch_axis": -1}})
        };
        let config = |all: &Value| {
            json!({
                "quant_method": "quark", "global_quant_config": all, "exclude": ["lm_head", "*.mlp.gate", "re:.*k_proj"],
                "layer_quant_config": {"*self_attn*": fp8, "*.o_proj": {"weight": null}}, "layer_type_quant_config": {},
                "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
            })
        };
        let read = parse(config(&fp4(32, "e8m0"))).unwrap();
        let of = |name: &str| read.scheme(&[name], "Linear");
        assert_eq!(of("model.layers.0.mlp.up_proj"), Some(Scheme::Mxfp4 { names: Mxfp4Names::Plain }));
        assert_eq!(of("model.layers.0.self_attn.o_proj"), Some(Scheme::Fp8 { block: None }));
        assert_eq!(of("model.layers.0.linear_attn.o_proj"), None);
        for name in ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.k_proj"] {
            assert_eq!(of(name), None, "{name}");
        }
        let key = "quantization_config.global_quant_config.weight";
        refused(config(&fp4(16, "e8m0")), &format!("{key}.group_size is 16, must be 32"));
        refused(config(&fp4(32, "float32")), &format!("{key}.scale_format is \"float32\", must be e8m0"));
        let across = json!({"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1}});
        refused(config(&across), &format!("{key}.ch_axis is 1, must be 0"));
        let mut down = fp4(32, "e8m0");
        down["weight"]["ch_axis"] = json!(0);
        refused(config(&down), &format!("{key}.ch_axis is 0, must be -1 or 1"));
        let int4 = json!({"weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": 128}});
        let rule = "must be fp8_e4m3 or fp8_e5m2 per_tensor or per_channel, or fp4 per_group";
        refused(config(&int4), &format!("{key}.dtype is \"uint4 per_group\", {rule}"));
        let steps = json!({"weight": [{"dtype": "fp4"}, {"dtype": "fp8_e4m3"}]});
        refused(config(&steps), &format!("{key} is \"a list of 2\", must be an object"));
    }

    #[test]
    fn wildcards_match_whole_names() {
        for (name, form, wanted) in [
            ("model.layers.0.mlp", "model.layers.0*", true),
            ("model.layers.0", "model.layers.0*", true),
            ("my.model.layers.0", "model.layers.0*", false),
            ("a.b.c.b.d", "*b.d", true),
            ("a.b.c.b.d", "a*b*d", true),
            ("a.b.c.b.d", "a*c*c", false),
            ("layers.10.mlp", "layers.1.*", false),
            ("layers.10.mlp", "layers.1?.m*", true),
            ("", "*", true),
            ("a", "", false),
        ] {
            assert_eq!(has_form(name.as_bytes(), form.as_bytes()), wanted, "{name} {form}");
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        refused(
            json!({"quant_method": "aqlm"}),
            "quantization \"aqlm\" is not supported (auto-round, awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, \
             gptq, modelopt, mxfp4, quark are)",
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

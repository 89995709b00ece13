//! The metadata of a tokenizer, from `tokenizer.json` and `tokenizer_config.json`. Only tokenizers that come back from
//! the metadata exactly are accepted: byte-level BPE with a pre-tokenizer that has a name.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::super::container::{Array, DEFAULT_ALIGNMENT, Header, Value};
use super::super::tokenizer::{
    ADD_BOS, ADD_EOS, ENDS, MERGES, MODEL, PRE, Step, TEMPLATE, TOKENS, TYPES, convert, name_of_pre,
};

/// The reason why a tokenizer cannot be stored in a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the tokenizer cannot be stored: {0}")]
pub struct NoText(String);

/// Types of tokens in the metadata.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Returns the metadata of a tokenizer with its chat templates, given the files of the checkpoint. Ids that the
/// embedding has, but the tokenizer has not, become unused tokens.
///
/// # Errors The format has no way to express the tokenizer, or to express it exactly.
pub fn text(
    config: &Json,
    generation: Option<&Json>,
    tokenizer: &Json,
    tokenizer_config: Option<&Json>,
) -> Result<Vec<(String, Value)>, NoText> {
    let vocab = config.get("text_config").and_then(|text| text.get("vocab_size")).or(config.get("vocab_size"));
    let rows = vocab.and_then(Json::as_u64).filter(|rows| *rows <= 1 << 30).unwrap_or_default() as usize;
    let pre = pre_tokenizer(tokenizer)?;
    let tokens = Tokens::read(tokenizer, rows)?;
    let merges = merges(&tokenizer["model"]["merges"])?;

    // The names of special tokens in tokenizer_config.json count before the ids in config.json.
    let of_config = |name: &str| {
        let entry = tokenizer_config.and_then(|config| config.get(name))?;
        entry.as_str().or_else(|| entry.get("content").and_then(Json::as_str)).and_then(|text| tokens.id(text))
    };
    let of_ids = |key: &str| {
        let of = |json: Option<&Json>| id_list(json.and_then(|json| json.get(key)));
        let text = config.get("text_config");
        [generation, Some(config), text].into_iter().flat_map(of).filter(|id| (*id as usize) < rows).collect()
    };
    let ids: [Vec<u32>; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"].map(of_ids);
    let around = special_tokens(&tokenizer["post_processor"])?;
    let known = |text: &Option<String>| match text {
        None => Ok(None),
        Some(text) => tokens.id(text).map(Some).ok_or_else(|| no(format!("the special token {text:?} has no id"))),
    };
    let (first, last) = (known(&around.0)?, known(&around.1)?);
    // What stands around every sequence must be what the metadata name the beginning and the end.
    let bos = first.or(of_config("bos_token")).or(ids[0].first().copied());
    let eos = last.or(of_config("eos_token")).or(ids[1].first().copied());
    let pad = of_config("pad_token").or(ids[2].first().copied());

    let mut pairs = vec![
        (MODEL.to_owned(), Value::String("gpt2".to_owned())),
        (PRE.to_owned(), Value::String(pre.to_owned())),
        (TOKENS.to_owned(), Value::Array(Array::String(tokens.texts.clone()))),
        (TYPES.to_owned(), Value::Array(Array::I32(tokens.types.clone()))),
        (MERGES.to_owned(), Value::Array(Array::String(merges))),
    ];
    // Readers know the usual tokens that end an answer by their texts; two others can be named.
    let usual = |id: &u32| ENDS.contains(&tokens.texts[*id as usize].as_str());
    let mut others: Vec<u32> = Vec::new();
    for id in ids[1].iter().filter(|id| eos != Some(**id) && !usual(id)) {
        if !others.contains(id) {
            others.push(*id);
        }
    }
    if others.len() > 2 {
        return Err(no(format!("{} tokens of unusual names end an answer, the format has room for 2", others.len())));
    }
    let end = |index: usize| others.get(index).copied();
    for (name, id) in [("bos", bos), ("eos", eos), ("eot", end(0)), ("eom", end(1)), ("padding", pad)] {
        if let Some(id) = id {
            pairs.push((format!("tokenizer.ggml.{name}_token_id"), Value::U32(id)));
        }
    }
    pairs.push((ADD_BOS.to_owned(), Value::Bool(first.is_some())));
    pairs.push((ADD_EOS.to_owned(), Value::Bool(last.is_some())));
    pairs.extend(templates(tokenizer_config.and_then(|config| config.get("chat_template")))?);

    // The last word has the reader.
    let metadata: BTreeMap<String, Value> = pairs.iter().cloned().collect();
    let header = Header { version: 3, alignment: DEFAULT_ALIGNMENT, metadata, tensors: Vec::new(), data_start: 0 };
    convert(&header).map_err(|error| no(error.to_string()))?;
    Ok(pairs)
}

fn no(reason: impl Into<String>) -> NoText {
    NoText(reason.into())
}

/// Returns the ids of a value that is an id or a list of ids.
pub(super) fn id_list(value: Option<&Json>) -> Vec<u32> {
    let id = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Json::Array(list)) => list.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Returns the steps of a value that is null, a step, or a sequence of steps under the key `list`.
fn steps<'a>(value: &'a Json, list: &str) -> Vec<&'a Json> {
    match value.get("type").and_then(Json::as_str) {
        Some("Sequence") => {
            value.get(list).and_then(Json::as_array).into_iter().flatten().flat_map(|step| steps(step, list)).collect()
        }
        _ if value.is_null() => Vec::new(),
        _ => vec![value],
    }
}

fn kind(step: &Json) -> &str {
    step.get("type").and_then(Json::as_str).unwrap_or_default()
}

/// Returns the name of the pre-tokenizer.
fn pre_tokenizer(tokenizer: &Json) -> Result<&'static str, NoText> {
    let model = &tokenizer["model"];
    // Old files do not name the only kind of model that has merges.
    if !matches!(kind(model), "BPE" | "") || !model["merges"].is_array() {
        return Err(no(format!("its model is {:?}, must be BPE", kind(model))));
    }
    let is_set = |key: &str| {
        let value = &model[key];
        !(value.is_null() || value == &Json::Bool(false) || value.as_str() == Some(""))
    };
    for key in ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"] {
        if is_set(key) {
            return Err(no(format!("{key} is {} in its model", model[key])));
        }
    }
    let nfc = match steps(&tokenizer["normalizer"], "normalizers")[..] {
        [] => false,
        [step] if kind(step) == "NFC" => true,
        ref other => return Err(no(format!("its normalizers are {:?}", kinds(other)))),
    };
    let mut found = Vec::new();
    let list = steps(&tokenizer["pre_tokenizer"], "pretokenizers");
    let mut byte_level = false;
    for (index, step) in list.iter().enumerate() {
        let flag = |key: &str, default: bool| step[key].as_bool().unwrap_or(default);
        match kind(step) {
            "Split" if step["behavior"] == "Isolated" && !flag("invert", false) => {
                let regex = step["pattern"]["Regex"].as_str();
                found.push(Step::Split(regex.ok_or_else(|| no("it splits text at a fixed string"))?));
            }
            "Digits" if flag("individual_digits", false) => found.push(Step::Digits),
            "ByteLevel" if !flag("add_prefix_space", true) && index + 1 == list.len() => {
                byte_level = true;
                if flag("use_regex", true) {
                    found.push(Step::Gpt2);
                }
            }
            other => return Err(no(format!("its pre-tokenizer has a step {other:?} that has no name"))),
        }
    }
    let decoder = kind(&tokenizer["decoder"]);
    if !byte_level || decoder != "ByteLevel" {
        return Err(no(format!("it is not of byte level (decoder {decoder:?})")));
    }
    let ignore_merges = model["ignore_merges"].as_bool().unwrap_or(false);
    name_of_pre(&found, nfc, ignore_merges).ok_or_else(|| {
        let split = found.iter().find_map(|step| if let Step::Split(regex) = step { Some(*regex) } else { None });
        let split: String = split.unwrap_or_default().chars().take(200).collect();
        no(format!("its pre-tokenizer has no name ({} steps, expression {split:?})", found.len()))
    })
}

fn kinds<'a>(steps: &[&'a Json]) -> Vec<&'a str> {
    steps.iter().map(|step| kind(step)).collect()
}

/// Returns the texts of the tokens that are put before and behind a sequence.
fn special_tokens(post_processor: &Json) -> Result<(Option<String>, Option<String>), NoText> {
    let mut around = (None, None);
    for step in steps(post_processor, "processors") {
        match kind(step) {
            "ByteLevel" => {}
            "TemplateProcessing" => {
                let parts = step["single"].as_array().map_or(&[][..], Vec::as_slice);
                let special = |part: &Json| part["SpecialToken"]["id"].as_str().map(str::to_owned);
                let sequence = |part: &Json| part.get("Sequence").is_some();
                around = match parts {
                    [text] if sequence(text) => (None, None),
                    [first, text] if sequence(text) => (special(first), None),
                    [text, last] if sequence(text) => (None, special(last)),
                    [first, text, last] if sequence(text) => (special(first), special(last)),
                    _ => return Err(no(format!("it puts {} special tokens around a text", parts.len()))),
                };
            }
            other => return Err(no(format!("its post-processor has a step {other:?}"))),
        }
    }
    Ok(around)
}

/// The tokens by id.
struct Tokens {
    texts: Vec<String>,
    types: Vec<i32>,
    ids: BTreeMap<String, u32>,
}

impl Tokens {
    /// Reads the tokens, and fills the list up to `rows` tokens.
    fn read(tokenizer: &Json, rows: usize) -> Result<Tokens, NoText> {
        let mut tokens = Tokens { texts: vec![String::new(); rows], types: vec![UNUSED; rows], ids: BTreeMap::new() };
        let vocabulary = tokenizer["model"]["vocab"].as_object().ok_or_else(|| no("it has no vocabulary"))?;
        for (text, id) in vocabulary {
            tokens.set(text, id, NORMAL)?;
        }
        let normalised = !tokenizer["normalizer"].is_null();
        for added in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let text = added["content"].as_str().ok_or_else(|| no("an added token has no text"))?;
            let flag = |key: &str| added[key].as_bool().unwrap_or(false);
            // Normalising changes nothing in plain ASCII.
            let changed = flag("normalized") && normalised && !text.is_ascii();
            if flag("single_word") || flag("lstrip") || flag("rstrip") || changed {
                return Err(no(format!("the added token {text:?} takes a part of the text around it")));
            }
            tokens.set(text, &added["id"], if flag("special") { CONTROL } else { USER_DEFINED })?;
        }
        for (id, (text, kind)) in tokens.texts.iter_mut().zip(&tokens.types).enumerate() {
            if *kind == UNUSED {
                *text = format!("[PAD{id}]");
            }
        }
        Ok(tokens)
    }

    fn set(&mut self, text: &str, id: &Json, kind: i32) -> Result<(), NoText> {
        let rows = self.texts.len();
        let at = id.as_u64().filter(|id| *id < rows as u64);
        let at = at.ok_or_else(|| no(format!("token {text:?} has the id {id}, the embedding {rows} rows")))? as usize;
        if self.types[at] != UNUSED && self.texts[at] != text {
            return Err(no(format!("id {at} has the tokens {:?} and {text:?}", self.texts[at])));
        }
        if let Some(other) = self.ids.insert(text.to_owned(), at as u32).filter(|other| *other as usize != at) {
            return Err(no(format!("token {text:?} has the ids {other} and {at}")));
        }
        self.texts[at] = text.to_owned();
        self.types[at] = kind;
        Ok(())
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }
}

/// Returns the merges as texts: two tokens with a space between them.
fn merges(list: &Json) -> Result<Vec<String>, NoText> {
    let text = |merge: &Json| match merge {
        Json::String(text) => Some(text.clone()),
        Json::Array(pair) => match (pair.len(), pair.first()?.as_str()?, pair.get(1)?.as_str()?) {
            (2, left, right) if !left.contains(' ') && !right.contains(' ') => Some(format!("{left} {right}")),
            _ => None,
        },
        _ => None,
    };
    let wrong = |(index, merge): (usize, &Json)| text(merge).ok_or_else(|| no(format!("merge {index} is {merge}")));
    list.as_array().into_iter().flatten().enumerate().map(wrong).collect()
}

/// Returns the chat templates: one, or several with names.
fn templates(value: Option<&Json>) -> Result<Vec<(String, Value)>, NoText> {
    let list = match value {
        None | Some(Json::Null) => return Ok(Vec::new()),
        Some(Json::String(template)) => return Ok(vec![(TEMPLATE.to_owned(), Value::String(template.clone()))]),
        Some(list) => list.as_array().ok_or_else(|| no("its chat template is neither a text nor a list"))?,
    };
    let (mut pairs, mut names) = (Vec::new(), Vec::new());
    for entry in list {
        let (Some(name), Some(template)) = (entry["name"].as_str(), entry["template"].as_str()) else {
            return Err(no("a chat template has no name or no text"));
        };
        let template = Value::String(template.to_owned());
        if name == "default" {
            pairs.push((TEMPLATE.to_owned(), template));
        } else {
            pairs.push((format!("{TEMPLATE}.{name}"), template));
            names.push(name.to_owned());
        }
    }
    if !names.is_empty() {
        pairs.push(("tokenizer.chat_templates".to_owned(), Value::Array(Array::String(names))));
    }
    Ok(pairs)
}

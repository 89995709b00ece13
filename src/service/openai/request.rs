//! The fields that OpenAI's requests for generations have in common: sampling, stopping, constraints, and vLLM's
//! extensions. Sampling parameters default to those of the model's generation_config.json, then to OpenAI's.
//! Not here: prompts, and answers.

use super::fields::{self, Fields, refuse};
use super::tools::{Choice, Tools};
use crate::engine::request::MAX_LOGPROBS;
use crate::host::ServedModel;
use crate::service::bounds;
use crate::service::prepare::{constraint_size, format, fresh_id, named_constraint};
use crate::service::proto;
use crate::service::refusal::Refusal;
use proto::constraint::{AnyJsonObject, Choice as Texts, Kind};
use serde_json::{Map, Value, json};

/// The fields of vLLM's and of OpenAI's older API that are refused unless they have no effect.
const NOT_SERVED: [&str; 13] = [
    "use_beam_search",
    "logits_processors",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "kv_transfer_params",
    "mm_processor_kwargs",
    "prompt_embeds",
    "suffix",
    "web_search_options",
    "audio",
    "continue_final_message",
];
/// The maximum absolute value of an entry of `logit_bias`.
const MAX_BIAS: f32 = 100.0;

/// How an answer is sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Streaming {
    pub(super) stream: bool,
    /// Whether the stream ends with a chunk that contains the usage.
    pub(super) usage: bool,
}

/// The common part of a request.
#[derive(Debug)]
pub(super) struct Common {
    /// Our message, without its prompt, constraint and log probabilities.
    pub(super) message: proto::GenerateRequest,
    pub(super) streaming: Streaming,
    /// Whether special tokens appear in the text.
    pub(super) special_text: bool,
    /// The number of samples.
    pub(super) n: u32,
    /// The number of last tokens of each prompt that are kept; `None` for all.
    pub(super) keep: Option<usize>,
    /// The field of the body that the message's constraint comes from.
    constrained: &'static str,
}

/// Returns the sampling parameters that the model's generation_config.json recommends.
fn recommended(model: &ServedModel) -> Map<String, Value> {
    let files = model.text.iter().flat_map(|text| text.files());
    let bytes =
        files.into_iter().find(|(name, _)| *name == "generation_config.json").map(|(_, bytes)| bytes.as_slice());
    bytes.and_then(|bytes| serde_json::from_slice(bytes).ok()).unwrap_or_default()
}

impl Common {
    /// Parses the common fields of a request for `model`; `id` is the prefix of the request's id.
    pub(super) fn read(body: &mut Fields, model: &ServedModel, id: &str) -> Result<Common, Refusal> {
        body.not_served(&NOT_SERVED)?;
        let recommended = recommended(model);
        let default = |name: &str| recommended.get(name).and_then(Value::as_f64).map(|value| value as f32);
        let n = body.whole("n")?.unwrap_or(1);
        if let Some(best_of) = body.whole("best_of")?.filter(|best_of| *best_of > n) {
            return Err(refuse("best_of", &best_of.into(), format!("at most n, which is {n}")));
        }
        let top_k = match body.signed("top_k")? {
            // vLLM's value for all tokens.
            Some(-1) => Some(0),
            Some(given) => Some(u32::try_from(given).map_err(|_| refuse("top_k", &given.into(), "at least -1"))?),
            None => recommended.get("top_k").and_then(fields::whole).and_then(|given| u32::try_from(given).ok()),
        };
        let sampling = proto::Sampling {
            temperature: Some(body.number("temperature")?.or(default("temperature")).unwrap_or(1.0)),
            top_k,
            top_p: body.number("top_p")?.or(default("top_p")),
            min_p: body.number("min_p")?.or(default("min_p")),
            repetition_penalty: body.number("repetition_penalty")?.or(default("repetition_penalty")),
            presence_penalty: body.number("presence_penalty")?,
            frequency_penalty: body.number("frequency_penalty")?,
            // A negative seed keeps its bits; our seeds are unsigned.
            seed: body.signed("seed")?.map(|seed| seed as u64),
            logit_bias: logit_bias(body)?,
            n: Some(n),
        };
        let stopping = proto::Stopping {
            max_tokens: None,
            min_tokens: body.whole("min_tokens")?,
            strings: stop(body)?,
            ids: stop_ids(body)?,
            ignore_eos: body.flag("ignore_eos")?.unwrap_or(false),
        };
        let stream = body.flag("stream")?.unwrap_or(false);
        let usage = match body.object("stream_options")? {
            Some(mut options) => options.flag("include_usage")?.unwrap_or(false),
            None => false,
        };
        let priority = body.signed("priority")?.unwrap_or(0);
        let message = proto::GenerateRequest {
            request_id: format!("{id}-{}", fresh_id()),
            sampling: Some(sampling),
            stopping: Some(stopping),
            priority: i32::try_from(priority)
                .map_err(|_| refuse("priority", &priority.into(), "a whole number of 32 bits"))?,
            cache_salt: body.text("cache_salt")?.unwrap_or_default(),
            ..Default::default()
        };
        let special_text = !body.flag("skip_special_tokens")?.unwrap_or(true);
        let keep = kept(body, model, 1)?;
        let streaming = Streaming { stream, usage };
        Ok(Common { message, streaming, special_text, n, keep, constrained: "tools" })
    }

    pub(super) fn stopping(&mut self) -> &mut proto::Stopping {
        self.message.stopping.get_or_insert_default()
    }
}

fn logit_bias(body: &mut Fields) -> Result<std::collections::HashMap<u32, f32>, Refusal> {
    let Some(object) = body.object("logit_bias")? else { return Ok(Default::default()) };
    let object = object.into_map();
    bounds::logit_biases(object.len())?;
    let entry = |(id, bias): (String, Value)| {
        let key = id
            .parse::<u32>()
            .map_err(|_| refuse("logit_bias", &Value::from(id.as_str()), "an object of token ids and numbers"))?;
        let in_range = bias.as_f64().map(|bias| bias as f32).filter(|bias| bias.abs() <= MAX_BIAS);
        let value = in_range.ok_or_else(|| refuse(format!("logit_bias.{key}"), &bias, "a number from -100 to 100"))?;
        Ok((key, value))
    };
    object.into_iter().map(entry).collect()
}

/// Parses `stop`: a text, or a list of texts. An empty list or an empty text has no effect.
fn stop(body: &mut Fields) -> Result<Vec<String>, Refusal> {
    let strings = match body.any("stop") {
        None => Vec::new(),
        Some(Value::String(text)) if text.is_empty() => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => {
            let text = |(index, text)| fields::text(&format!("stop[{index}]"), text);
            list.into_iter().enumerate().map(text).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(refuse("stop", &other, "a text or a list of texts")),
    };
    bounds::stop_strings(&strings)?;
    Ok(strings)
}

fn stop_ids(body: &mut Fields) -> Result<Vec<u32>, Refusal> {
    let list = body.list("stop_token_ids")?.unwrap_or_default();
    bounds::stop_ids(list.len())?;
    ids("stop_token_ids", list)
}

/// Parses `truncate_prompt_tokens`, the number of last tokens of a prompt that are kept; `output` is the number of
/// tokens that must fit behind it.
pub(super) fn kept(body: &mut Fields, model: &ServedModel, output: u32) -> Result<Option<usize>, Refusal> {
    match body.signed("truncate_prompt_tokens")? {
        None => Ok(None),
        // As many tokens as fit in the context.
        Some(-1) => {
            let context = model.replicas.iter().map(|replica| replica.bounds().context).min().unwrap_or(0);
            Ok(Some(context.saturating_sub(output) as usize))
        }
        Some(most) => match usize::try_from(most) {
            Ok(most @ 1..) => Ok(Some(most)),
            _ => Err(refuse("truncate_prompt_tokens", &most.into(), "at least 1, or -1")),
        },
    }
}

/// Parses a list of token ids.
pub(super) fn ids(path: &str, list: Vec<Value>) -> Result<Vec<u32>, Refusal> {
    let id = |(index, value): (usize, Value)| {
        let id = fields::whole(&value).and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| refuse(format!("{path}[{index}]"), &value, "a token id"))
    };
    list.into_iter().enumerate().map(id).collect()
}

/// Checks a number of alternative tokens against the engine's maximum.
pub(super) fn alternatives(path: &str, given: Option<u32>) -> Result<Option<u32>, Refusal> {
    match given {
        Some(given) if given > MAX_LOGPROBS => {
            Err(refuse(path, &given.into(), format!("a whole number from 0 to {MAX_LOGPROBS}")))
        }
        given => Ok(given),
    }
}

/// Parses a JSON Schema: an object, or a text that contains one.
fn schema(path: String, value: Value) -> Result<String, Refusal> {
    match value {
        Value::String(text) => Ok(text),
        object @ Value::Object(_) => Ok(object.to_string()),
        other => Err(refuse(path, &other, "a JSON Schema")),
    }
}

/// The paths of vLLM's constraints: of a JSON Schema, any JSON object, a regular expression, a grammar, texts, and a
/// structural tag. The first list is that of its older fields.
const GUIDED: [[&str; 6]; 2] = [
    ["guided_json", "guided_json_object", "guided_regex", "guided_grammar", "guided_choice", "guided_structural_tag"],
    [
        "structured_outputs.json",
        "structured_outputs.json_object",
        "structured_outputs.regex",
        "structured_outputs.grammar",
        "structured_outputs.choice",
        "structured_outputs.structural_tag",
    ],
];

/// Parses vLLM's constraints: `guided_*` and `structured_outputs`. Each has the path of its field.
fn guided(body: &mut Fields) -> Result<Vec<(&'static str, Kind)>, Refusal> {
    let mut kinds = Vec::new();
    let mut read = |from: &mut Fields, paths: [&'static str; 6]| -> Result<(), Refusal> {
        let [json, object, regex, grammar, choice, tag] = paths;
        let key = |path: &'static str| path.rsplit('.').next().unwrap_or(path);
        if let Some(value) = from.any(key(json)) {
            kinds.push((json, Kind::JsonSchema(schema(json.to_owned(), value)?)));
        }
        if from.flag(key(object))?.unwrap_or(false) {
            kinds.push((object, Kind::JsonObject(AnyJsonObject {})));
        }
        kinds.extend(from.text(key(regex))?.map(|text| (regex, Kind::Regex(text))));
        kinds.extend(from.text(key(grammar))?.map(|text| (grammar, Kind::Grammar(text))));
        if let Some(texts) = from.list(key(choice))? {
            let text = |(index, value)| fields::text(&format!("{choice}[{index}]"), value);
            let texts = texts.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
            kinds.push((choice, Kind::Choice(Texts { texts })));
        }
        if let Some(value) = from.any(key(tag)) {
            kinds.push((tag, Kind::StructuralTag(schema(tag.to_owned(), value)?)));
        }
        Ok(())
    };
    let [older, newer] = GUIDED;
    read(body, older)?;
    if let Some(mut structured) = body.object("structured_outputs")? {
        read(&mut structured, newer)?;
    }
    Ok(kinds)
}

/// Takes the first of the texts `keys` of a format that is given.
fn one_text(format: &mut Fields, keys: [&str; 2]) -> Result<String, Refusal> {
    match format.text(keys[0])? {
        Some(text) => Ok(text),
        None => format.text(keys[1])?.ok_or_else(|| format.missing(keys[0], "a text")),
    }
}

/// Parses `response_format`, or `text.format` of the Responses API, which contains its schema directly (`flat`).
pub(super) fn response_format(format: Option<Fields>, flat: bool) -> Result<Option<Kind>, Refusal> {
    let Some(mut format) = format else { return Ok(None) };
    let kind = format.need_text("type")?;
    match kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(Kind::JsonObject(AnyJsonObject {}))),
        "json_schema" => {
            let mut named = match flat {
                true => format,
                false => format.object("json_schema")?.ok_or_else(|| format.missing("json_schema", "an object"))?,
            };
            let value = named.any("schema").ok_or_else(|| named.missing("schema", "a JSON Schema"))?;
            Ok(Some(Kind::JsonSchema(schema(named.at("schema"), value)?)))
        }
        "structural_tag" => {
            let mut tag = format.into_map();
            tag.retain(|_, value| !value.is_null());
            if !tag.contains_key("format") {
                tag.remove("type");
            }
            Ok(Some(Kind::StructuralTag(Value::Object(tag).to_string())))
        }
        // Not OpenAI's: other servers have them, with either name of the text.
        "regex" => Ok(Some(Kind::Regex(one_text(&mut format, ["regex", "pattern"])?))),
        "grammar" => Ok(Some(Kind::Grammar(one_text(&mut format, ["grammar", "value"])?))),
        _ => {
            let rule = "\"text\", \"json_object\", \"json_schema\", \"structural_tag\", \"regex\" or \"grammar\"";
            Err(refuse(format.at("type"), &Value::from(kind), rule))
        }
    }
}

/// Our names of the kinds of constraints.
const KINDS: [&str; 6] = [
    "constraint.json_schema",
    "constraint.json_object",
    "constraint.regex",
    "constraint.grammar",
    "constraint.choice",
    "constraint.structural_tag",
];

/// Returns the refusal of a constraint with the name of the field `theirs`.
pub(super) fn renamed(refusal: Refusal, theirs: &'static str) -> Refusal {
    refusal.renamed(&KINDS.map(|ours| (ours, theirs)))
}

impl Common {
    /// Returns the constraint of a request: `format`, which was parsed before, or one of vLLM's. Refuses more than one.
    pub(super) fn constraint(
        &mut self,
        body: &mut Fields,
        format: Option<(&'static str, Kind)>,
    ) -> Result<Option<Kind>, Refusal> {
        let mut kinds = guided(body)?;
        kinds.extend(format);
        if kinds.len() > 1 {
            return Err(refuse(
                body.at("structured_outputs"),
                &kinds.len().into(),
                "one constraint, response_format included",
            ));
        }
        let Some((field, kind)) = kinds.pop() else { return Ok(None) };
        self.constrained = field;
        constraint_size(&kind).map_err(|refusal| renamed(refusal, field))?;
        Ok(Some(kind))
    }

    /// Returns the field of the body that the constraint comes from.
    pub(super) fn constrained(&self) -> &'static str {
        self.constrained
    }

    /// Returns the constraint of a chat whose answer may call `tools`, in the syntax of `model`.
    pub(super) fn with_tools(
        &self,
        tools: &Tools,
        kind: Option<Kind>,
        model: &ServedModel,
    ) -> Result<Option<proto::Constraint>, Refusal> {
        with_tools(tools, kind, model).map_err(|refusal| renamed(refusal, self.constrained))
    }
}

fn with_tools(tools: &Tools, kind: Option<Kind>, model: &ServedModel) -> Result<Option<proto::Constraint>, Refusal> {
    let constrain = |kind| proto::Constraint { kind: Some(kind), after_reasoning: true };
    if tools.choice == Choice::None {
        return Ok(kind.map(constrain));
    }
    let Some(text) = model.text.as_deref() else { return Ok(None) };
    let style = text.chat_style(true).1;
    let form = match style.tools {
        Some(form) => form,
        None if style.shows_tools && tools.choice == Choice::Required => return Err(Refusal::UnknownCalls),
        // Calls that are not parsed are content. If the template does not support tools, preparing the prompt refuses
        // them.
        None => return Ok(kind.map(constrain)),
    };
    let content = kind.filter(|_| tools.choice == Choice::Auto).map(content_format).transpose()?;
    let format = tools.format(form, text, content).map_err(|source| Refusal::Grammar { field: "tools", source })?;
    let tag = format.map(|format| json!({"type": "structural_tag", "format": format}).to_string());
    Ok(tag.map(Kind::StructuralTag).map(constrain))
}

/// Converts a constraint to a format of a structural tag.
fn content_format(kind: Kind) -> Result<Value, Refusal> {
    let (field, constraint) = named_constraint(kind);
    format(constraint).map_err(|source| Refusal::Grammar { field, source })
}

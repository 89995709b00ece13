//! `/v1/completions`: converts requests to our messages, and our streams of events to a completion or its chunks.
//! Not here: HTTP.

use super::answer::{Answer, Choices, Frame, Running, finite, usage};
use super::fields::{Fields, refuse};
use super::pieces::Piece;
use super::request::{self, Common};
use crate::engine::request::MAX_SAMPLES;
use crate::host::ServedModel;
use crate::model::text::Text;
use crate::service::proto;
use crate::service::refusal::Refusal;
use proto::generate_request::Prompt;
use serde_json::{Map, Value, json};

/// The default of `max_tokens`, the same as OpenAI's.
const DEFAULT_TOKENS: u32 = 16;

/// A parsed request for a completion: its prompts, what their messages have in common, and what the answer needs.
#[derive(Debug)]
pub(super) struct Asked {
    /// The common part. Its message has no prompt yet.
    pub(super) common: Common,
    pub(super) prompts: Vec<Prompt>,
    /// Whether the answer repeats the prompts before the outputs.
    pub(super) echo: bool,
    /// Whether the answer omits the outputs.
    pub(super) hidden: bool,
}

/// Parses `prompt`: a text, a list of texts, token ids, or a list of lists of token ids.
fn prompts(value: Option<Value>) -> Result<Vec<Prompt>, Refusal> {
    const RULE: &str = "a text, token ids, or a list of those";
    let tokens =
        |path: &str, list: Vec<Value>| request::ids(path, list).map(|ids| Prompt::Tokens(proto::TokenIds { ids }));
    match value {
        None => Err(refuse("prompt", &Value::Null, RULE)),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) if list.is_empty() => Err(refuse("prompt", &json!("[]"), "not empty")),
        Some(Value::Array(list)) if list[0].is_number() => Ok(vec![tokens("prompt", list)?]),
        Some(Value::Array(list)) => {
            let one = |(index, value): (usize, Value)| {
                let path = format!("prompt[{index}]");
                match value {
                    Value::String(text) => Ok(Prompt::Text(text)),
                    Value::Array(list) => tokens(&path, list),
                    other => Err(refuse(path, &other, "a text or token ids")),
                }
            };
            list.into_iter().enumerate().map(one).collect()
        }
        Some(other) => Err(refuse("prompt", &other, RULE)),
    }
}

/// Parses a request for `model`.
pub(super) fn read(mut body: Fields, model: &ServedModel) -> Result<Asked, Refusal> {
    let mut common = Common::read(&mut body, model, "cmpl")?;
    let echo = body.flag("echo")?.unwrap_or(false);
    let most = body.whole("max_tokens")?.unwrap_or(DEFAULT_TOKENS);
    // The engine generates at least one token. If the request wants only the prompt, the token is omitted.
    let hidden = most == 0 && echo;
    common.stopping().max_tokens = Some(if hidden { 1 } else { most });
    let logprobs = request::alternatives("logprobs", body.whole("logprobs")?)?;
    let format = body.object("response_format")?;
    let format = request::response_format(format, false)?;
    let kind = common.constraint(&mut body, format.map(|kind| ("response_format", kind)))?;
    common.message.constraint = kind.map(|kind| proto::Constraint { kind: Some(kind), after_reasoning: false });
    let prompts = prompts(body.any("prompt"))?;
    let samples = prompts.len().saturating_mul(common.n as usize);
    if samples > MAX_SAMPLES as usize && prompts.len() > 1 {
        let given = Value::from(samples);
        return Err(refuse("prompt", &given, format!("at most {MAX_SAMPLES} choices, of all prompts together")));
    }
    common.message.output = Some(proto::Output {
        text: Some(true),
        token_ids: Some(false),
        logprobs: if hidden { None } else { logprobs },
        prompt_logprobs: logprobs.filter(|_| echo),
    });
    Ok(Asked { common, prompts, echo, hidden })
}

/// Returns the message for one of several prompts. As in vLLM, all of them have the same seed.
pub(super) fn message(common: &Common, index: usize, prompt: Prompt) -> proto::GenerateRequest {
    let mut message = common.message.clone();
    if index > 0 {
        message.request_id = format!("{}-{index}", message.request_id);
    }
    message.prompt = Some(prompt);
    message
}

/// Returns the text of a repeated prompt: `given` if the request has the whole prompt as text, otherwise the decoded
/// tokens.
pub(super) fn shown(given: Option<String>, ids: &[u32], text: Option<&Text>) -> String {
    match given {
        Some(given) => given,
        None => text.and_then(|text| text.decode(ids, false).ok()).unwrap_or_default(),
    }
}

/// The `logprobs` object of a completion: parallel lists. Offsets count characters.
#[derive(Debug, Default)]
struct Lists {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
}

impl Lists {
    fn push(&mut self, text: &Text, id: u32, known: Option<&proto::TokenLogprobs>, offset: &mut usize) {
        let token = String::from_utf8_lossy(&text.bytes(id)).into_owned();
        self.offsets.push((*offset).into());
        *offset += token.chars().count();
        self.logprobs.push(known.map_or(Value::Null, |known| finite(known.logprob)));
        let top = |known: &proto::TokenLogprobs| {
            let name = |id: u32| String::from_utf8_lossy(&text.bytes(id)).into_owned();
            let mut top: Map<String, Value> =
                known.top.iter().map(|other| (name(other.token_id), finite(other.logprob))).collect();
            // The token itself is always included.
            top.entry(token.clone()).or_insert(finite(known.logprob));
            Value::Object(top)
        };
        self.top.push(known.map_or(Value::Null, top));
        self.tokens.push(token.into());
    }

    fn told(self) -> Value {
        json!({
            "tokens": self.tokens, "token_logprobs": self.logprobs, "top_logprobs": self.top,
            "text_offset": self.offsets,
        })
    }
}

/// The repeated prompts: their texts, and their first tokens if log probabilities are requested.
#[derive(Debug, Default)]
pub(super) struct Echo {
    pub(super) texts: Vec<String>,
    pub(super) first: Vec<Option<u32>>,
}

/// The state of the chunks of a stream.
#[derive(Debug, Default)]
pub(super) struct Offsets(Vec<usize>);

impl Offsets {
    fn of(&mut self, index: usize) -> &mut usize {
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        &mut self.0[index]
    }
}

fn lists_of_prompt(
    answer: &Answer,
    echo: &Echo,
    running: &Running,
    prompt: usize,
    offset: &mut usize,
) -> Option<Lists> {
    let (text, true) = (answer.text.as_deref()?, answer.logprobs) else { return None };
    let mut lists = Lists::default();
    if let Some(first) = echo.first.get(prompt).copied().flatten() {
        lists.push(text, first, None, offset);
    }
    running.prompt(prompt).iter().for_each(|token| lists.push(text, token.token_id, Some(token), offset));
    Some(lists)
}

/// Returns the chunks for a frame.
pub(super) fn chunks(
    answer: &Answer,
    running: &Running,
    echo: Option<&Echo>,
    offsets: &mut Offsets,
    frame: Frame,
) -> Vec<Value> {
    let chunk = |choices: Value, used: Value| {
        let mut chunk = json!({
            "id": answer.id, "object": "text_completion", "created": answer.created, "model": answer.model,
            "choices": choices,
        });
        if answer.streaming.usage {
            chunk["usage"] = used;
        }
        chunk
    };
    let choice = |index: usize, text: &str, logprobs: Value, finish: Value, stop: Value| {
        let choice = json!({
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop,
        });
        chunk(json!([choice]), Value::Null)
    };
    match frame {
        Frame::Started => Vec::new(),
        Frame::Prompt { prompt } => {
            let Some(echo) = echo else { return Vec::new() };
            let told = |index: usize| {
                let lists = lists_of_prompt(answer, echo, running, prompt, offsets.of(index));
                let lists = lists.map_or(Value::Null, Lists::told);
                choice(index, &echo.texts[prompt], lists, Value::Null, Value::Null)
            };
            running.choices_of(prompt).map(told).collect()
        }
        Frame::Pieces { index, pieces, logprobs } => {
            let content: String = pieces.into_iter().filter_map(content).collect();
            let lists = match (&answer.text, logprobs.is_empty()) {
                (Some(text), false) => {
                    let mut lists = Lists::default();
                    let offset = offsets.of(index);
                    logprobs.iter().for_each(|token| lists.push(text, token.token_id, Some(token), offset));
                    lists.told()
                }
                _ => Value::Null,
            };
            vec![choice(index, &content, lists, Value::Null, Value::Null)]
        }
        Frame::Finished { index } => {
            let ended = running.choices.ended(index);
            vec![choice(index, "", Value::Null, ended.reason.into(), ended.stop.clone())]
        }
        Frame::Done if answer.streaming.usage => vec![chunk(json!([]), usage(running.choices.usage()))],
        Frame::Done => Vec::new(),
    }
}

fn content(piece: Piece) -> Option<String> {
    match piece {
        Piece::Content(text) => Some(text),
        _ => None,
    }
}

/// Returns the whole completion.
pub(super) fn whole(answer: &Answer, running: &Running, echo: Option<&Echo>) -> Value {
    let choices: &Choices = &running.choices;
    let each = choices.count() / echo.map_or(1, |echo| echo.texts.len().max(1));
    let all = (0..choices.count()).map(|index| {
        let ended = choices.ended(index);
        let (mut text, mut offset, mut lists) = (String::new(), 0, Lists::default());
        if let Some(echo) = echo {
            let prompt = index / each.max(1);
            text.push_str(&echo.texts[prompt]);
            lists = lists_of_prompt(answer, echo, running, prompt, &mut offset).unwrap_or_default();
        }
        text.push_str(&ended.content);
        let logprobs = match &answer.text {
            Some(tokenizer) if answer.logprobs => {
                ended.logprobs.iter().for_each(|token| lists.push(tokenizer, token.token_id, Some(token), &mut offset));
                lists.told()
            }
            _ => Value::Null,
        };
        json!({
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": ended.reason,
            "stop_reason": ended.stop,
        })
    });
    json!({
        "id": answer.id, "object": "text_completion", "created": answer.created, "model": answer.model,
        "choices": all.collect::<Vec<_>>(), "usage": usage(choices.usage()),
    })
}

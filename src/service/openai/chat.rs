//! `/v1/chat/completions`: converts a conversation to our message, and our stream of events to a completion or its
//! chunks.
//! Not here: HTTP, and parsing tool calls and reasoning (`output`).

use super::answer::{Answer, Choices, Frame, usage};
use super::fields::{self, Fields, refuse};
use super::pieces::Piece;
use super::request::{self, Common};
use super::tools::{self, Tools};
use crate::host::ServedModel;
use crate::model::text::Text;
use crate::service::proto;
use crate::service::refusal::Refusal;
use proto::chat_message::ToolCall;
use proto::generate_request::Prompt;
use serde_json::{Map, Value, json};

/// A parsed request for a chat completion: our message, and what the answer needs.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) common: Common,
    pub(super) tools: Tools,
    /// Whether the answer contains reasoning.
    pub(super) reasoning: bool,
}

/// The types of content parts that are not text.
const MEDIA: [&str; 9] = [
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "audio_url",
    "video_url",
    "input_file",
    "file",
    "image_embeds",
];

/// Parses `content`: a text, or a list of parts, which must be text. Joins the parts with newlines, as vLLM does.
/// Returns `None` if it is absent.
pub(super) fn content(path: &str, value: Option<Value>) -> Result<Option<String>, Refusal> {
    let parts = match value {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(refuse(path, &other, "a text or a list of parts")),
    };
    let mut texts = Vec::new();
    for (index, part) in parts.into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        if let Value::String(text) = part {
            texts.push(text);
            continue;
        }
        let mut part = Fields::of(path, part)?;
        let kind = part.need_text("type")?;
        match kind.as_str() {
            "text" | "input_text" | "output_text" => texts.push(part.need_text("text")?),
            "refusal" => texts.push(part.need_text("refusal")?),
            media if MEDIA.contains(&media) => {
                return Err(Refusal::NotServedField { field: part.at("type"), what: format!(" \"{media}\"") });
            }
            _ => return Err(refuse(part.at("type"), &Value::from(kind), "\"text\"")),
        }
    }
    Ok(Some(texts.join("\n")))
}

/// Converts the role at `path` to the one that chat templates know.
pub(super) fn role(path: String, role: String) -> Result<String, Refusal> {
    match role.as_str() {
        "developer" => Ok("system".to_owned()),
        "function" => Ok("tool".to_owned()),
        "system" | "user" | "assistant" | "tool" => Ok(role),
        _ => {
            let rule = "\"system\", \"developer\", \"user\", \"assistant\", \"tool\" or \"function\"";
            Err(refuse(path, &Value::from(role), rule))
        }
    }
}

fn message(path: String, value: Value) -> Result<proto::ChatMessage, Refusal> {
    let mut message = Fields::of(path, value)?;
    let role = role(message.at("role"), message.need_text("role")?)?;
    message.not_served(&["audio", "function_call"])?;
    let text = content(&message.at("content"), message.any("content"))?;
    let calls_path = message.at("tool_calls");
    let mut tool_calls = Vec::new();
    for (index, call) in message.list("tool_calls")?.unwrap_or_default().into_iter().enumerate() {
        let mut call = Fields::of(format!("{calls_path}[{index}]"), call)?;
        let id = call.text("id")?.unwrap_or_default();
        let mut function = call.object("function")?.ok_or_else(|| call.missing("function", "an object"))?;
        let name = function.need_text("name")?;
        let arguments = tools::arguments(&function.at("arguments"), function.any("arguments"))?;
        tool_calls.push(ToolCall { id, name, arguments });
    }
    if text.is_none() && role != "assistant" {
        return Err(message.missing("content", "a text or a list of parts"));
    }
    let reasoning = match message.text("reasoning_content")? {
        None => message.text("reasoning")?,
        some => some,
    };
    Ok(proto::ChatMessage {
        role,
        content: text.unwrap_or_default(),
        tool_calls,
        tool_call_id: message.text("tool_call_id")?.unwrap_or_default(),
        name: message.text("name")?.unwrap_or_default(),
        reasoning_content: reasoning.unwrap_or_default(),
    })
}

/// Returns `chat_template_kwargs` with the request's own `enable_thinking` and `reasoning_effort`.
pub(super) fn template_arguments(body: &mut Fields) -> Result<String, Refusal> {
    let mut arguments = body.object("chat_template_kwargs")?.map(Fields::into_map).unwrap_or_default();
    if let Some(thinking) = body.flag("enable_thinking")? {
        arguments.entry("enable_thinking").or_insert(thinking.into());
    }
    if let Some(effort) = body.text("reasoning_effort")? {
        arguments.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(if arguments.is_empty() { String::new() } else { Value::Object(arguments).to_string() })
}

/// Parses a request for `model`.
pub(super) fn read(mut body: Fields, model: &ServedModel) -> Result<Asked, Refusal> {
    let mut common = Common::read(&mut body, model, "chatcmpl")?;
    body.not_served(&["echo", "documents", "chat_template"])?;
    if body.any("modalities").is_some_and(|modalities| modalities != json!(["text"])) {
        let (field, what) = ("modalities".to_owned(), " other than text".to_owned());
        return Err(Refusal::NotServedField { field, what });
    }
    let most = match body.whole("max_completion_tokens")? {
        None => body.whole("max_tokens")?,
        some => some,
    };
    common.stopping().max_tokens = most;
    let wants = body.flag("logprobs")?.unwrap_or(false);
    let top = request::alternatives("top_logprobs", body.whole("top_logprobs")?)?;
    if let (Some(top @ 1..), false) = (top, wants) {
        return Err(refuse("top_logprobs", &top.into(), "0, or given with \"logprobs\": true"));
    }
    let tools = Tools::read(&mut body, false)?;
    let format = body.object("response_format")?;
    let format = request::response_format(format, false)?;
    let kind = common.constraint(&mut body, format.map(|kind| ("response_format", kind)))?;
    common.message.constraint = common.with_tools(&tools, kind, model)?;
    let messages = body.list("messages")?.ok_or_else(|| body.missing("messages", "a list of messages"))?;
    if messages.is_empty() {
        let (field, rule) = ("messages".to_owned(), "at least one message".to_owned());
        return Err(Refusal::Json { field, value: "empty".to_owned(), rule });
    }
    let messages = messages.into_iter().enumerate();
    let messages = messages.map(|(index, value)| message(format!("messages[{index}]"), value));
    common.message.prompt = Some(Prompt::Chat(proto::Chat {
        messages: messages.collect::<Result<_, _>>()?,
        tools: tools.shown.clone(),
        template_arguments: template_arguments(&mut body)?,
        add_generation_prompt: body.flag("add_generation_prompt")?,
    }));
    common.message.output = Some(proto::Output {
        text: Some(true),
        token_ids: Some(false),
        logprobs: wants.then_some(top.unwrap_or(0)),
        prompt_logprobs: None,
    });
    let reasoning = body.flag("include_reasoning")?.unwrap_or(true);
    Ok(Asked { common, tools, reasoning })
}

/// Returns the `logprobs` object of a chat completion.
fn logprobs(text: &Text, tokens: &[proto::TokenLogprobs]) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = text.bytes(id);
        let mut entry = Map::new();
        entry.insert("token".to_owned(), String::from_utf8_lossy(&bytes).into_owned().into());
        entry.insert("logprob".to_owned(), super::answer::finite(logprob));
        entry.insert("bytes".to_owned(), bytes.into());
        entry
    };
    let token = |token: &proto::TokenLogprobs| {
        let mut told = entry(token.token_id, token.logprob);
        let top = token.top.iter().map(|other| Value::Object(entry(other.token_id, other.logprob)));
        told.insert("top_logprobs".to_owned(), top.collect());
        Value::Object(told)
    };
    json!({"content": tokens.iter().map(token).collect::<Vec<_>>(), "refusal": null})
}

/// Returns a tool call; only chunks have an `index`.
fn call(id: &str, name: &str, arguments: &str, index: Option<usize>) -> Value {
    let mut call = Map::new();
    if let Some(index) = index {
        call.insert("index".to_owned(), index.into());
    }
    call.insert("id".to_owned(), id.into());
    call.insert("type".to_owned(), "function".into());
    call.insert("function".to_owned(), json!({"name": name, "arguments": arguments}));
    Value::Object(call)
}

/// Returns the chunks for a frame.
pub(super) fn chunks(answer: &Answer, choices: &Choices, frame: Frame) -> Vec<Value> {
    let chunk = |choices: Value, usage: Value| {
        let mut chunk = json!({
            "id": answer.id, "object": "chat.completion.chunk", "created": answer.created, "model": answer.model,
            "choices": choices,
        });
        if answer.streaming.usage {
            chunk["usage"] = usage;
        }
        chunk
    };
    let choice = |index: usize, delta: Value, logprobs: Value, finish: Value, stop: Value| {
        let mut choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        if !finish.is_null() {
            choice["stop_reason"] = stop;
        }
        chunk(json!([choice]), Value::Null)
    };
    match frame {
        Frame::Started => {
            let begin = json!({"role": "assistant", "content": ""});
            (0..choices.count())
                .map(|index| choice(index, begin.clone(), Value::Null, Value::Null, Value::Null))
                .collect()
        }
        Frame::Prompt { .. } => Vec::new(),
        Frame::Pieces { index, pieces, logprobs: tokens } => {
            let mut told = Vec::new();
            // The probabilities of a delta stand in its first chunk.
            let mut probabilities = match tokens.is_empty() {
                true => Value::Null,
                false => answer.text.as_deref().map_or(Value::Null, |text| logprobs(text, &tokens)),
            };
            for piece in pieces {
                let delta = match piece {
                    Piece::Reasoning(text) if answer.reasoning => json!({"reasoning_content": text}),
                    Piece::Reasoning(_) => continue,
                    Piece::Content(text) => json!({"content": text}),
                    Piece::Call { index: number, name } => {
                        let id = choices.call_id(index, number);
                        json!({"tool_calls": [call(&id, &name, "", Some(number))]})
                    }
                    Piece::Arguments { index: number, text } => {
                        json!({"tool_calls": [{"index": number, "function": {"arguments": text}}]})
                    }
                };
                told.push(choice(index, delta, std::mem::take(&mut probabilities), Value::Null, Value::Null));
            }
            if !probabilities.is_null() {
                told.push(choice(index, json!({}), probabilities, Value::Null, Value::Null));
            }
            told
        }
        Frame::Finished { index } => {
            let ended = choices.ended(index);
            vec![choice(index, json!({}), Value::Null, ended.reason.into(), ended.stop.clone())]
        }
        Frame::Done if answer.streaming.usage => vec![chunk(json!([]), usage(choices.usage()))],
        Frame::Done => Vec::new(),
    }
}

/// Returns the whole completion.
pub(super) fn whole(answer: &Answer, choices: &Choices) -> Value {
    let all = (0..choices.count()).map(|index| {
        let ended = choices.ended(index);
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        let content = if ended.content.is_empty() && !ended.calls.is_empty() {
            Value::Null
        } else {
            ended.content.as_str().into()
        };
        message.insert("content".to_owned(), content);
        message.insert("refusal".to_owned(), Value::Null);
        if answer.reasoning && !ended.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), ended.reasoning.as_str().into());
        }
        if !ended.calls.is_empty() {
            let calls = ended
                .calls
                .iter()
                .enumerate()
                .map(|(number, (name, arguments))| call(&choices.call_id(index, number), name, arguments, None));
            message.insert("tool_calls".to_owned(), calls.collect());
        }
        let probabilities = match &answer.text {
            Some(text) if answer.logprobs => logprobs(text, &ended.logprobs),
            _ => Value::Null,
        };
        json!({
            "index": index, "message": message, "logprobs": probabilities, "finish_reason": ended.reason,
            "stop_reason": ended.stop,
        })
    });
    json!({
        "id": answer.id, "object": "chat.completion", "created": answer.created, "model": answer.model,
        "choices": all.collect::<Vec<_>>(), "usage": usage(choices.usage()),
    })
}

/// Parses a message of the Responses API, whose fields have other names.
pub(super) fn plain_message(role: String, path: &str, value: Option<Value>) -> Result<proto::ChatMessage, Refusal> {
    let text = content(path, value)?.ok_or_else(|| fields::refuse(path, &Value::Null, "a text or a list of parts"))?;
    Ok(proto::ChatMessage { role, content: text, ..Default::default() })
}

//! `/v1/responses`: the Responses API for text, without stored state. Converts a list of items to our message, and our
//! stream of events to a response of items or its named events.
//! Not here: stored responses and conversations, tools that a server runs, and HTTP.

use super::answer::{Answer, Choices, Frame, Used};
use super::chat;
use super::fields::{Fields, refuse};
use super::pieces::Piece;
use super::request::{self, Common};
use super::tools::{self, Tools};
use crate::host::ServedModel;
use crate::service::bounds;
use crate::service::proto;
use crate::service::refusal::Refusal;
use proto::ChatMessage;
use proto::chat_message::ToolCall;
use proto::generate_request::Prompt;
use serde_json::{Map, Value, json};

/// A parsed request for a response: our message, and what the answer needs.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) common: Common,
    pub(super) tools: Tools,
    pub(super) telling: Telling,
}

/// The fields that need stored state or a server that runs tools.
const NOT_SERVED: [&str; 6] =
    ["previous_response_id", "conversation", "background", "prompt", "max_tool_calls", "top_logprobs"];

/// The maximum number of entries of `metadata`, and the maximum lengths of a key and of a value in bytes; the same as
/// OpenAI's.
const METADATA: (usize, usize, usize) = (16, 64, 512);

/// Parses `metadata`: texts by name.
fn metadata(body: &mut Fields) -> Result<Value, Refusal> {
    let (most, most_key, most_value) = METADATA;
    let Some(metadata) = body.object("metadata")? else { return Ok(json!({})) };
    let metadata = metadata.into_map();
    let wrong = |value: String, rule: String| Err(Refusal::Json { field: "metadata".to_owned(), value, rule });
    if metadata.len() > most {
        return wrong(format!("{} entries", metadata.len()), format!("at most {most} entries"));
    }
    for (key, value) in &metadata {
        if key.len() > most_key {
            let rule = format!("an object with keys of at most {most_key} bytes");
            return wrong(format!("an object with a key of {} bytes", key.len()), rule);
        }
        if value.as_str().is_none_or(|value| value.len() > most_value) {
            return Err(refuse(format!("metadata.{key}"), value, format!("a text of at most {most_value} bytes")));
        }
    }
    Ok(Value::Object(metadata))
}

/// Parses a short text that the response repeats.
fn short_text(fields: &mut Fields, key: &str, name: &'static str) -> Result<Value, Refusal> {
    let text = fields.text(key)?;
    bounds::name(name, text.as_deref().unwrap_or_default())?;
    Ok(text.into())
}

/// The members of `text.format` that the response repeats.
fn format_again(format: Option<&mut Fields>) -> Result<Value, Refusal> {
    let Some(format) = format else { return Ok(json!({"type": "text"})) };
    // Type and schema are checked when the constraint is read.
    let kind = format.peek("type").cloned().unwrap_or_default();
    if kind != "json_schema" {
        return Ok(json!({"type": kind}));
    }
    let schema = format.peek("schema").cloned().unwrap_or_default();
    let name = short_text(format, "name", "text.format.name")?;
    Ok(json!({"type": kind, "name": name, "schema": schema, "strict": format.flag("strict")?}))
}

/// Parses `input` into messages, after a message with the instructions.
fn messages(body: &mut Fields, instructions: Option<&str>) -> Result<Vec<ChatMessage>, Refusal> {
    let mut messages = Vec::new();
    if let Some(instructions) = instructions {
        messages.push(ChatMessage { role: "system".into(), content: instructions.into(), ..Default::default() });
    }
    let items = match body.any("input") {
        Some(Value::String(text)) => {
            messages.push(ChatMessage { role: "user".into(), content: text, ..Default::default() });
            return Ok(messages);
        }
        Some(Value::Array(items)) => items,
        Some(other) => return Err(refuse("input", &other, "a text or a list of items")),
        None => return Err(refuse("input", &Value::Null, "a text or a list of items")),
    };
    // The reasoning of the assistant's next message.
    let mut reasoning = String::new();
    // Calls and texts of one turn of the assistant are one message.
    let mut own_turn = false;
    for (index, item) in items.into_iter().enumerate() {
        let mut item = Fields::of(format!("input[{index}]"), item)?;
        let kind = item.text("type")?.unwrap_or_else(|| "message".to_owned());
        let assistant = |messages: &mut Vec<ChatMessage>, own_turn: bool, reasoning: &mut String| {
            if !own_turn {
                let reasoning_content = std::mem::take(reasoning);
                messages.push(ChatMessage { role: "assistant".into(), reasoning_content, ..Default::default() });
            }
        };
        match kind.as_str() {
            "message" => {
                let role = item.need_text("role")?;
                let role = chat::role(item.at("role"), role)?;
                let message = chat::plain_message(role, &item.at("content"), item.any("content"))?;
                own_turn = message.role == "assistant";
                let reasoning_content = if own_turn { std::mem::take(&mut reasoning) } else { String::new() };
                messages.push(ChatMessage { reasoning_content, ..message });
            }
            "function_call" => {
                assistant(&mut messages, own_turn, &mut reasoning);
                own_turn = true;
                let call = ToolCall {
                    id: item.need_text("call_id")?,
                    name: item.need_text("name")?,
                    arguments: tools::arguments(&item.at("arguments"), item.any("arguments"))?,
                };
                if let Some(message) = messages.last_mut() {
                    message.tool_calls.push(call);
                }
            }
            "function_call_output" => {
                own_turn = false;
                let tool_call_id = item.need_text("call_id")?;
                let output = chat::content(&item.at("output"), item.any("output"))?;
                let content = output.ok_or_else(|| item.missing("output", "a text or a list of parts"))?;
                messages.push(ChatMessage { role: "tool".into(), content, tool_call_id, ..Default::default() });
            }
            "reasoning" => {
                own_turn = false;
                let path = item.at("content");
                for (index, part) in item.list("content")?.unwrap_or_default().into_iter().enumerate() {
                    let mut part = Fields::of(format!("{path}[{index}]"), part)?;
                    reasoning.push_str(&part.need_text("text")?);
                }
            }
            _ => {
                let rule = "\"message\", \"function_call\", \"function_call_output\" or \"reasoning\"";
                return Err(refuse(item.at("type"), &Value::from(kind), rule));
            }
        }
    }
    Ok(messages)
}

/// Parses a request for `model`.
pub(super) fn read(mut body: Fields, model: &ServedModel) -> Result<Asked, Refusal> {
    body.not_served(&NOT_SERVED)?;
    let included = body.list("include")?.unwrap_or_default();
    if let Some(at) = included.iter().position(|part| part == "message.output_text.logprobs") {
        return Err(Refusal::NotServedField { field: format!("include[{at}]"), what: String::new() });
    }
    // The fields that the response repeats.
    let mut again = Map::new();
    let mut echo = |body: &Fields, key: &str, absent: Value| {
        let value = body.peek(key).cloned().unwrap_or(absent);
        again.insert(key.to_owned(), value);
    };
    for (key, absent) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("parallel_tool_calls", true.into()),
        ("temperature", Value::Null),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_p", Value::Null),
        ("truncation", "disabled".into()),
    ] {
        echo(&body, key, absent);
    }
    again.insert("metadata".to_owned(), metadata(&mut body)?);
    again.insert("user".to_owned(), short_text(&mut body, "user", "user")?);
    if let Some(truncation) = body.text("truncation")?.filter(|truncation| truncation != "disabled") {
        return Err(refuse("truncation", &truncation.into(), "\"disabled\": no input is left out"));
    }
    let mut common = Common::read(&mut body, model, "resp")?;
    if common.n != 1 {
        return Err(refuse("n", &common.n.into(), "1: a response has one output"));
    }
    common.stopping().max_tokens = body.whole("max_output_tokens")?;
    let tools = Tools::read(&mut body, true)?;
    let mut format = match body.object("text")? {
        Some(mut text) => text.object("format")?,
        None => None,
    };
    again.insert("text".to_owned(), json!({"format": format_again(format.as_mut())?}));
    let format = request::response_format(format, true)?;
    let kind = common.constraint(&mut body, format.map(|kind| ("text.format", kind)))?;
    common.message.constraint = common.with_tools(&tools, kind, model)?;
    let (mut effort, mut summary) = (Value::Null, Value::Null);
    if let Some(mut reasoning) = body.object("reasoning")? {
        effort = short_text(&mut reasoning, "effort", "reasoning.effort")?;
        summary = short_text(&mut reasoning, "summary", "reasoning.summary")?;
    }
    if !effort.is_null() {
        body.put("reasoning_effort", effort.clone());
    }
    again.insert("reasoning".to_owned(), json!({"effort": effort, "summary": summary}));
    let instructions = body.text("instructions")?;
    common.message.prompt = Some(Prompt::Chat(proto::Chat {
        messages: messages(&mut body, instructions.as_deref())?,
        tools: tools.shown.clone(),
        template_arguments: chat::template_arguments(&mut body)?,
        add_generation_prompt: None,
    }));
    common.message.output =
        Some(proto::Output { text: Some(true), token_ids: Some(false), logprobs: None, prompt_logprobs: None });
    Ok(Asked { common, tools, telling: Telling { again, items: Vec::new(), open: None, sequence: 0 } })
}

/// The items of a response, and the state of its events.
#[derive(Debug)]
pub(super) struct Telling {
    /// The fields of the request that the response repeats.
    again: Map<String, Value>,
    /// The complete items.
    items: Vec<Value>,
    open: Option<Open>,
    /// The number of the next event.
    sequence: u64,
}

/// An item that is not complete yet.
#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Debug, PartialEq)]
enum Kind {
    Reasoning,
    Message,
    Call { call_id: String, name: String },
}

impl Open {
    /// Returns the item with this status; with `in_progress`, without its content.
    fn item(&self, status: &str) -> Value {
        let begun = status == "in_progress";
        match &self.kind {
            Kind::Reasoning => {
                let content = if begun { json!([]) } else { json!([self.part()]) };
                json!({"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status})
            }
            Kind::Message => {
                let content = if begun { json!([]) } else { json!([self.part()]) };
                json!({
                    "id": self.id, "type": "message", "role": "assistant", "status": status, "content": content,
                })
            }
            Kind::Call { call_id, name } => json!({
                "id": self.id, "type": "function_call", "call_id": call_id, "name": name, "arguments": self.text,
                "status": status,
            }),
        }
    }

    /// Returns the single content part of a reasoning item or a message.
    fn part(&self) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
            _ => json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}),
        }
    }

    /// Returns the prefix of the names of the item's events.
    fn event(&self) -> &'static str {
        match self.kind {
            Kind::Reasoning => "response.reasoning_text",
            Kind::Message => "response.output_text",
            Kind::Call { .. } => "response.function_call_arguments",
        }
    }
}

fn used(used: Used) -> Value {
    json!({
        "input_tokens": used.prompt, "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": used.output, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt.saturating_add(used.output),
    })
}

impl Telling {
    fn event(&mut self, kind: &str, mut fields: Value) -> Value {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, &mut fields) {
            event.append(fields);
        }
        event
    }

    fn response(&self, answer: &Answer, status: &str, usage: Value, error: Value) -> Value {
        let incomplete = if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null };
        let mut response = json!({
            "id": answer.id, "object": "response", "created_at": answer.created, "status": status,
            "background": false, "error": error, "incomplete_details": incomplete, "model": answer.model,
            "output": self.items, "previous_response_id": null, "store": false, "usage": usage,
        });
        if let Value::Object(response) = &mut response {
            response.extend(self.again.clone());
        }
        response
    }

    /// Returns the status of the response.
    fn status(choices: &Choices) -> &'static str {
        match choices.ended(0).reason {
            "length" => "incomplete",
            "abort" => "cancelled",
            _ => "completed",
        }
    }

    /// Returns the whole response.
    pub(super) fn whole(&self, answer: &Answer, choices: &Choices) -> Value {
        self.response(answer, Telling::status(choices), used(choices.usage()), Value::Null)
    }

    /// Returns the last events of a failed response; `error` is OpenAI's error object.
    pub(super) fn failed(&mut self, answer: &Answer, choices: &Choices, error: &Value) -> Vec<Value> {
        let error = json!({"code": "server_error", "message": error["error"]["message"]});
        let response = self.response(answer, "failed", used(choices.usage()), error);
        vec![self.event("response.failed", json!({"response": response}))]
    }

    /// Completes the open item.
    fn close(&mut self, status: &str, events: &mut Vec<Value>) {
        let Some(open) = self.open.take() else { return };
        let at = self.items.len();
        let done = format!("{}.done", open.event());
        match &open.kind {
            Kind::Call { name, .. } => {
                let fields = json!({"item_id": open.id, "output_index": at, "name": name, "arguments": open.text});
                events.push(self.event(&done, fields));
            }
            kind => {
                let mut fields = json!({"item_id": open.id, "output_index": at, "content_index": 0, "text": open.text});
                if *kind == Kind::Message {
                    fields["logprobs"] = json!([]);
                }
                events.push(self.event(&done, fields));
                let part = json!({"item_id": open.id, "output_index": at, "content_index": 0, "part": open.part()});
                events.push(self.event("response.content_part.done", part));
            }
        }
        let item = open.item(status);
        events.push(self.event("response.output_item.done", json!({"output_index": at, "item": item})));
        self.items.push(item);
    }

    /// Opens an item of this kind, unless it is open already.
    fn open(&mut self, answer: &Answer, kind: Kind, events: &mut Vec<Value>) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", events);
        let at = self.items.len();
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        };
        let id = format!("{prefix}_{}_{at}", answer.id.trim_start_matches("resp-"));
        let open = Open { kind, id, text: String::new() };
        let added = json!({"output_index": at, "item": open.item("in_progress")});
        events.push(self.event("response.output_item.added", added));
        if !matches!(open.kind, Kind::Call { .. }) {
            let part = json!({"item_id": open.id, "output_index": at, "content_index": 0, "part": open.part()});
            events.push(self.event("response.content_part.added", part));
        }
        self.open = Some(open);
    }

    fn delta(&mut self, text: String, events: &mut Vec<Value>) {
        let at = self.items.len();
        let Some(open) = &mut self.open else { return };
        open.text.push_str(&text);
        let mut fields = json!({"item_id": open.id, "output_index": at, "delta": text});
        if !matches!(open.kind, Kind::Call { .. }) {
            fields["content_index"] = 0.into();
        }
        if open.kind == Kind::Message {
            fields["logprobs"] = json!([]);
        }
        let name = format!("{}.delta", open.event());
        events.push(self.event(&name, fields));
    }

    /// Returns the events for a frame.
    pub(super) fn events(&mut self, answer: &Answer, choices: &Choices, frame: Frame) -> Vec<Value> {
        let mut events = Vec::new();
        match frame {
            Frame::Started => {
                for kind in ["response.created", "response.in_progress"] {
                    let response = self.response(answer, "in_progress", Value::Null, Value::Null);
                    events.push(self.event(kind, json!({"response": response})));
                }
            }
            Frame::Prompt { .. } => {}
            Frame::Pieces { index, pieces, .. } => {
                for piece in pieces {
                    match piece {
                        Piece::Reasoning(text) => {
                            self.open(answer, Kind::Reasoning, &mut events);
                            self.delta(text, &mut events);
                        }
                        Piece::Content(text) => {
                            self.open(answer, Kind::Message, &mut events);
                            self.delta(text, &mut events);
                        }
                        Piece::Call { index: number, name } => {
                            let call_id = choices.call_id(index, number);
                            self.open(answer, Kind::Call { call_id, name }, &mut events);
                        }
                        Piece::Arguments { text, .. } => self.delta(text, &mut events),
                    }
                }
            }
            Frame::Finished { .. } => {
                let status = Telling::status(choices);
                if self.open.is_none() && self.items.is_empty() {
                    // An empty output is a message without text.
                    self.open(answer, Kind::Message, &mut events);
                }
                self.close(if status == "completed" { status } else { "incomplete" }, &mut events);
            }
            Frame::Done => {
                let status = Telling::status(choices);
                let response = self.whole(answer, choices);
                events.push(self.event(&format!("response.{status}"), json!({"response": response})));
            }
        }
        events
    }
}

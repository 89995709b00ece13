//! Converts a message to an engine request: chooses the replica, encodes the prompt, compiles the constraint.
//! Everything that can be refused without the engine is refused here; no field is ignored. Not here: tokio.

use super::refusal::Refusal;
use super::{bounds, proto};
use crate::actors::workers::Cancel;
use crate::engine::prefix::{PageKey, page_keys};
use crate::engine::request::{Limits, MAX_SAMPLES, Request, RequestError, Sampling};
use crate::host::{Host, ServedModel};
use crate::model::grammar::{Constraint, GrammarError, MOST_BYTES, MOST_CHOICES, StartedGrammar};
use crate::model::text::chat::{CalledFunction, ChatMessage, ChatOptions, Marks, Reasoning, ToolCall, channels};
use crate::model::text::{SpecialText, Text, TextError};
use crate::replica::{Replica, SubmitError};
use crate::telemetry::names;
use proto::constraint::Kind;
use proto::generate_request::Prompt;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tracing::Span;

/// The model and the replica of a call. A call looks its model up once, and every later stage uses the target: a model
/// that is loaded under the same name meanwhile may have another tokenizer.
#[derive(Clone, Debug)]
pub struct Target {
    host: Arc<Host>,
    model: Arc<ServedModel>,
    replica: Arc<Replica>,
    /// The device or replica that the caller asked for; empty for any.
    device: String,
}

impl Target {
    /// Looks up a request's `model`, and chooses one of its replicas on `device`.
    pub fn find(host: &Arc<Host>, model: &str, device: &str) -> Result<Target, Refusal> {
        Target::of(host, host.model(model)?, device)
    }

    /// Chooses a replica on `device` of a model that has been looked up.
    pub fn of(host: &Arc<Host>, model: Arc<ServedModel>, device: &str) -> Result<Target, Refusal> {
        let replica = model.route(device)?;
        Ok(Target { host: Arc::clone(host), model, replica, device: device.to_owned() })
    }

    /// Chooses the replica for `samples` samples of a prompt whose full pages have the names `keys`. It is a replica of
    /// the same model, even if another model has its name by now: the prompt was made with this model's tokenizer.
    pub(super) fn for_prompt(self, keys: &[PageKey], samples: usize) -> Result<Target, Refusal> {
        let replica = self.model.route_prompt(&self.device, keys, samples)?;
        Ok(Target { replica, ..self })
    }

    /// Returns the model, which may have been unloaded since it was looked up.
    pub fn model(&self) -> &ServedModel {
        &self.model
    }

    /// Returns the host of the model.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the replica.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Returns the refusal of a request that the engine did not finish; `why` is the engine's message.
    pub fn failed(&self, why: &str) -> Refusal {
        match self.replica.stopped() {
            true => Refusal::Unloaded { model: self.model.name.clone() },
            false => Refusal::Failed(why.to_owned()),
        }
    }
}

/// A request to the engine that is ready to be submitted, and how its output is delivered.
#[derive(Debug)]
pub struct Prepared {
    /// The model and the replica that it is submitted to.
    pub place: Target,
    /// The engine request. Its span is not set.
    pub request: Request,
    /// The number of samples; at least one.
    pub samples: u32,
    /// The operation's name in spans: `chat`, `text_completion`, `embeddings` or `rerank`.
    pub operation: &'static str,
    /// The stop strings of every sample.
    pub stop_strings: Vec<String>,
    /// The special tokens that appear in the output text and that stop strings can match.
    pub special_text: SpecialText,
    /// The place of the model's reasoning in the output.
    pub reasons: Reasons,
    /// Whether deltas contain text.
    pub text: bool,
    /// Whether deltas contain token ids.
    pub token_ids: bool,
    /// The index of the input within a call of several inputs, which all have the call's id. `None` for generations.
    pub input: Option<u32>,
}

/// The possible place of the model's reasoning in an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reasons {
    /// Nowhere: the model has no chat template or no reasoning, or the prompt has closed the reasoning.
    Never,
    /// At the beginning, if the output begins with the opening mark.
    IfOpened(&'static Marks),
    /// From the beginning on: the prompt ends with the opening mark.
    Opened(&'static Marks),
    /// In messages on their own channel (harmony): the output consists of messages.
    Channel,
}

/// Returns a mark as a format of a structural tag: its special token if the model has one, otherwise its text.
pub(super) fn mark(text: &Text, name: &str) -> Value {
    match text.special_id(name) {
        Some(id) => json!({"type": "token", "token": id}),
        None => json!({"type": "const_string", "value": name}),
    }
}

/// Returns free text up to and including a mark, as a format of a structural tag.
pub(super) fn until(text: &Text, name: &str) -> Value {
    let end = match text.special_id(name) {
        Some(_) => mark(text, name),
        None => Value::from(name),
    };
    json!({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end})
}

/// The beginning of a message on a channel, as formats of a structural tag.
pub(super) fn channel(text: &Text, channel: &str) -> Vec<Value> {
    let name = json!({"type": "const_string", "value": channel});
    vec![mark(text, channels::CHANNEL), name, mark(text, channels::MESSAGE)]
}

impl Reasons {
    /// Returns where the output after a conversation that was rendered with the template of `text` may contain
    /// reasoning.
    fn after(text: &Text, rendered: &str) -> Reasons {
        let end = rendered.trim_end();
        match text.chat_style(false).1.reasoning {
            Reasoning::Marked(marks) if end.ends_with(marks[0]) => Reasons::Opened(marks),
            Reasoning::Marked(marks) if !end.ends_with(marks[1]) => Reasons::IfOpened(marks),
            // If the prompt ends inside the content of a message, the channel is fixed already.
            Reasoning::Channel if !end.ends_with(channels::MESSAGE) => Reasons::Channel,
            _ => Reasons::Never,
        }
    }

    /// Returns the marks that a reader of the output must see even if they are special tokens.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            Reasons::Never => &[],
            Reasons::IfOpened(marks) | Reasons::Opened(marks) => marks,
            Reasons::Channel => Reasoning::Channel.marks(),
        }
    }

    /// Returns a structural tag for a constraint that applies only after the reasoning.
    fn before(self, constraint: Constraint, text: &Text) -> Result<Constraint, GrammarError> {
        let space = json!({"type": "regex", "pattern": r"\s{0,4}"});
        let optional =
            |elements: Vec<Value>| json!({"type": "optional", "content": {"type": "sequence", "elements": elements}});
        let first = match self {
            Reasons::Never => return Ok(constraint),
            Reasons::Opened([_, close]) => vec![until(text, close), space],
            Reasons::IfOpened([open, close]) => vec![optional(vec![mark(text, open), until(text, close), space])],
            Reasons::Channel => {
                let mut reasoning = channel(text, "analysis");
                let next = json!({"type": "const_string", "value": "assistant"});
                reasoning.extend([until(text, channels::END), mark(text, channels::START), next]);
                let mut first = vec![optional(reasoning)];
                // A structural tag describes whole messages, because it may be one of calls.
                if !matches!(constraint, Constraint::StructuralTag(_)) {
                    first.extend(channel(text, "final"));
                }
                first
            }
        };
        // A tag of the older form begins with free text, in which the model may reason.
        let has_format = |tag: &str| serde_json::from_str::<Value>(tag).is_ok_and(|tag| tag.get("format").is_some());
        if matches!(&constraint, Constraint::StructuralTag(tag) if !has_format(tag)) {
            return Ok(constraint);
        }
        let then = format(constraint)?;
        let elements: Vec<Value> = first.into_iter().chain([then]).collect();
        let format = json!({"type": "sequence", "elements": elements});
        Ok(Constraint::StructuralTag(json!({"type": "structural_tag", "format": format}).to_string()))
    }
}

/// Converts a constraint to a format of a structural tag.
pub(super) fn format(constraint: Constraint) -> Result<Value, GrammarError> {
    let parse = |what: &str, text: &str| {
        serde_json::from_str::<Value>(text)
            .map_err(|error| GrammarError::Invalid(format!("{what} is not JSON: {error}")))
    };
    Ok(match constraint {
        Constraint::JsonSchema(schema) => json!({"type": "json_schema", "json_schema": parse("the schema", &schema)?}),
        Constraint::JsonObject => json!({"type": "json_schema", "json_schema": {"type": "object"}}),
        Constraint::Regex(pattern) => json!({"type": "regex", "pattern": pattern}),
        Constraint::Grammar(grammar) => json!({"type": "grammar", "grammar": grammar}),
        Constraint::Choice(texts) => {
            let texts = texts.into_iter().map(|text| json!({"type": "const_string", "value": text}));
            json!({"type": "or", "elements": texts.collect::<Vec<_>>()})
        }
        Constraint::StructuralTag(tag) => match parse("the structural tag", &tag)?.get_mut("format") {
            Some(format) => format.take(),
            None => return Err(GrammarError::Invalid("the structural tag has no \"format\"".to_owned())),
        },
    })
}

/// Returns the number of samples that a message asks for.
pub fn samples(message: &proto::GenerateRequest) -> Result<u32, Refusal> {
    let samples = message.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1);
    if (1..=MAX_SAMPLES).contains(&samples) {
        return Ok(samples);
    }
    let rule = const {
        assert!(MAX_SAMPLES == 64, "as the rule says");
        "from 1 to 64"
    };
    Err(Refusal::Value { field: "sampling.n", value: samples.to_string(), rule })
}

/// Checks a message and converts it to an engine request, including the tokens of its prompt. Fails once the deadline
/// has passed.
pub fn prepare(
    host: &Arc<Host>,
    message: proto::GenerateRequest,
    deadline: Option<Instant>,
) -> Result<Prepared, Refusal> {
    let place = Target::find(host, &message.model, &message.device)?;
    prepare_at(place, message, deadline, None, &Span::none(), &Cancel::until(deadline))
}

/// Like [`prepare`], for a model that has been looked up: the message's own `model` and `device` are not read. If `keep`
/// is given, only the last `keep` tokens of the prompt are kept. Ends early once `cancel` is cancelled. The spans of the
/// work are children of `span`.
pub fn prepare_at(
    place: Target,
    message: proto::GenerateRequest,
    deadline: Option<Instant>,
    keep: Option<usize>,
    span: &Span,
    cancel: &Cancel,
) -> Result<Prepared, Refusal> {
    if !place.model().draws() {
        return Err(SubmitError::Request(RequestError::EmbedsOnly).into());
    }
    let samples = samples(&message)?;
    let sampling = message.sampling.unwrap_or_default();
    let stopping = message.stopping.unwrap_or_default();
    let output = message.output.unwrap_or_default();
    let tokenizer = |field| {
        place.model().text.as_deref().ok_or_else(|| Refusal::NoTokenizer { model: place.model().name.clone(), field })
    };
    if !stopping.strings.is_empty() {
        tokenizer("stopping.strings")?;
    }
    bounds::stop_strings(&stopping.strings)?;
    let text = match output.text {
        Some(true) => {
            tokenizer("output.text")?;
            true
        }
        Some(false) => false,
        None => place.model().text.is_some(),
    };
    let mut reasons = Reasons::Never;
    let (operation, mut prompt) = match message.prompt {
        None => {
            return Err(Refusal::Missing { field: "prompt", rule: "one of text, tokens and chat" });
        }
        Some(Prompt::Text(text)) => {
            let tokenizer = tokenizer("prompt.text")?;
            ("text_completion", tokenize_span(span).in_scope(|| tokenizer.encode(&text, true))?)
        }
        Some(Prompt::Tokens(tokens)) => ("text_completion", tokens.ids),
        Some(Prompt::Chat(chat)) => {
            let tokenizer = tokenizer("prompt.chat")?;
            let (rendered, ids) = encode_chat(tokenizer, chat, span, cancel)?;
            reasons = Reasons::after(tokenizer, &rendered);
            ("chat", ids)
        }
    };
    if let Some(keep) = keep {
        prompt.drain(..prompt.len().saturating_sub(keep));
    }
    // Checked before a grammar is compiled, which may take longer than everything else.
    fits(place.model(), prompt.len(), 1)?;
    let grammar = match message.constraint {
        None => None,
        Some(constraint) => {
            let ServedModel { name, info, text, .. } = place.model();
            let target =
                ConstrainedModel { name, text: text.as_deref(), vocabulary: info.vocabulary, eos_ids: &info.eos_ids };
            Some(start_grammar(target, constraint, reasons, stopping.ignore_eos, cancel)?)
        }
    };

    // Now that the tokens are known, prefers a replica that may have the beginning of the prompt in its cache.
    let several = place.model().replicas.len() > 1;
    let keys = if several { page_keys(&message.cache_salt, &prompt) } else { Vec::new() };
    let place = place.for_prompt(&keys, samples as usize)?;

    let defaults = Sampling::default();
    let mut logit_bias: Vec<(u32, f32)> = sampling.logit_bias.into_iter().collect();
    // Maps have no order; requests to the engine must be reproducible.
    logit_bias.sort_unstable_by_key(|(id, _)| *id);
    let request = Request {
        id: if message.request_id.is_empty() { fresh_id() } else { message.request_id },
        prompt,
        sampling: Sampling {
            temperature: sampling.temperature.unwrap_or(defaults.temperature),
            top_k: sampling.top_k.unwrap_or(defaults.top_k),
            top_p: sampling.top_p.unwrap_or(defaults.top_p),
            min_p: sampling.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: sampling.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: sampling.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: sampling.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            seed: sampling.seed,
            logit_bias,
        },
        limits: Limits {
            max_tokens: stopping.max_tokens,
            min_tokens: stopping.min_tokens.unwrap_or(0),
            stop_ids: stopping.ids,
            ignore_eos: stopping.ignore_eos,
        },
        logprobs: output.logprobs,
        prompt_logprobs: output.prompt_logprobs,
        pooling: None,
        allowed: None,
        dump_logits: false,
        grammar,
        priority: message.priority,
        cache_salt: message.cache_salt,
        deadline,
        span: Span::none(),
    };
    Ok(Prepared {
        place,
        request,
        samples,
        operation,
        stop_strings: stopping.strings,
        special_text: SpecialText::None,
        reasons,
        text,
        token_ids: output.token_ids.unwrap_or(true),
        input: None,
    })
}

/// Checks that a prompt of `prompt` tokens and an output of at least `output` tokens fit in the context of one of the
/// model's replicas.
pub fn fits(model: &ServedModel, prompt: usize, output: usize) -> Result<(), Refusal> {
    let context = model.replicas.iter().map(|replica| replica.bounds().context).max().unwrap_or(0) as usize;
    if prompt.saturating_add(output) <= context {
        return Ok(());
    }
    Err(SubmitError::Request(RequestError::ContextExceeded { prompt, output, context }).into())
}

/// The properties of a model that compiling a constraint needs.
#[derive(Clone, Copy, Debug)]
pub struct ConstrainedModel<'a> {
    /// The model's name, for errors.
    pub name: &'a str,
    /// Its tokenizer, if it has one.
    pub text: Option<&'a Text>,
    /// The number of tokens of its vocabulary.
    pub vocabulary: u32,
    /// The tokens that end a sequence.
    pub eos_ids: &'a [u32],
}

/// Returns the message field that contains a constraint.
fn constraint_field(kind: &Kind) -> &'static str {
    match kind {
        Kind::JsonSchema(_) => "constraint.json_schema",
        Kind::Regex(_) => "constraint.regex",
        Kind::Grammar(_) => "constraint.grammar",
        Kind::Choice(_) => "constraint.choice",
        Kind::JsonObject(_) => "constraint.json_object",
        Kind::StructuralTag(_) => "constraint.structural_tag",
    }
}

/// Refuses a constraint above the maximum number of bytes or choices, before it is copied or parsed.
pub(super) fn constraint_size(kind: &Kind) -> Result<(), Refusal> {
    let refuse = |source| Err(Refusal::Grammar { field: constraint_field(kind), source });
    let bytes = match kind {
        Kind::JsonSchema(text) | Kind::Regex(text) | Kind::Grammar(text) | Kind::StructuralTag(text) => text.len(),
        Kind::Choice(choice) if choice.texts.len() > MOST_CHOICES => {
            return refuse(GrammarError::Choices { choices: choice.texts.len() });
        }
        Kind::Choice(choice) => choice.texts.iter().map(String::len).sum(),
        Kind::JsonObject(_) => 0,
    };
    if bytes > MOST_BYTES { refuse(GrammarError::TooLong { bytes }) } else { Ok(()) }
}

/// Converts a constraint of a message, and returns it with the name of its field.
pub(super) fn named_constraint(kind: Kind) -> (&'static str, Constraint) {
    let field = constraint_field(&kind);
    let constraint = match kind {
        Kind::JsonSchema(schema) => Constraint::JsonSchema(schema),
        Kind::Regex(regex) => Constraint::Regex(regex),
        Kind::Grammar(grammar) => Constraint::Grammar(grammar),
        Kind::Choice(choice) => Constraint::Choice(choice.texts),
        Kind::JsonObject(_) => Constraint::JsonObject,
        Kind::StructuralTag(tag) => Constraint::StructuralTag(tag),
    };
    (field, constraint)
}

/// Compiles a constraint for a model. `reasons` says where the output may contain reasoning, for constraints that apply
/// only after it.
pub fn start_grammar(
    model: ConstrainedModel<'_>,
    constraint: proto::Constraint,
    reasons: Reasons,
    ignore_eos: bool,
    cancel: &Cancel,
) -> Result<StartedGrammar, Refusal> {
    let reasons = if constraint.after_reasoning { reasons } else { Reasons::Never };
    let Some(kind) = constraint.kind else {
        let rule = "one of json_schema, regex, grammar, choice, json_object and structural_tag";
        return Err(Refusal::Missing { field: "constraint.kind", rule });
    };
    constraint_size(&kind)?;
    let (field, constraint) = named_constraint(kind);
    let text = model.text.ok_or_else(|| Refusal::NoTokenizer { model: model.name.to_owned(), field })?;
    let started = reasons.before(constraint, text).and_then(|constraint| {
        let grammars = text.grammars(model.vocabulary, model.eos_ids)?;
        grammars.start_until(&constraint, ignore_eos, cancel)
    });
    started.map_err(|source| match source {
        GrammarError::Cancelled if cancel.is_late() => Refusal::Deadline { output_tokens: 0 },
        source => Refusal::Grammar { field, source },
    })
}

/// Renders a conversation with the model's chat template and encodes it. Returns the text and the tokens. The spans of
/// both steps are children of `span`.
pub fn encode_chat(
    text: &Text,
    chat: proto::Chat,
    span: &Span,
    cancel: &Cancel,
) -> Result<(String, Vec<u32>), Refusal> {
    if chat.messages.is_empty() {
        return Err(Refusal::Missing { field: "chat.messages", rule: "at least one message" });
    }
    let (template, style) = text.chat_style(!chat.tools.is_empty());
    if !chat.tools.is_empty() && !style.shows_tools && text.has_chat() {
        return Err(Refusal::NoTools);
    }
    let mut extra = match chat.template_arguments.as_str() {
        "" => Map::new(),
        object => json_object("chat.template_arguments", object)?,
    };
    // Template arguments must not override the request's own fields.
    for own in ["messages", "tools", "add_generation_prompt"] {
        if extra.contains_key(own) {
            let (field, rule) = ("chat.template_arguments", "without messages, tools and add_generation_prompt");
            return Err(Refusal::Value { field, value: format!("an object with {own}"), rule });
        }
    }
    if !chat.tools.is_empty() {
        let tools = chat.tools.iter().map(|tool| json_object("chat.tools", tool).map(Value::Object));
        extra.insert("tools".to_owned(), Value::Array(tools.collect::<Result<_, _>>()?));
    }
    let messages = chat.messages.into_iter().map(chat_message).collect::<Result<Vec<_>, _>>()?;
    let options = ChatOptions {
        add_generation_prompt: chat.add_generation_prompt.unwrap_or(true),
        template: Some(template.to_owned()),
        extra,
    };
    let render = tracing::info_span!(parent: span, names::SPAN_TEMPLATE);
    let rendered = match render.in_scope(|| text.chat_until(&messages, &options, cancel)) {
        Err(TextError::Cancelled) if cancel.is_late() => return Err(Refusal::Deadline { output_tokens: 0 }),
        rendered => rendered?,
    };
    drop(render);
    // The rendered text contains its special tokens, so none are added.
    let ids = tokenize_span(span).in_scope(|| text.encode(&rendered, false))?;
    Ok((rendered, ids))
}

fn tokenize_span(parent: &Span) -> Span {
    tracing::info_span!(parent: parent, names::SPAN_TOKENIZE)
}

fn chat_message(message: proto::ChatMessage) -> Result<ChatMessage, Refusal> {
    let call = |call: proto::chat_message::ToolCall| {
        let arguments = match call.arguments.trim() {
            "" => Map::new(),
            object => json_object("chat.messages.tool_calls.arguments", object)?,
        };
        let function = CalledFunction { name: call.name, arguments };
        Ok(ToolCall { id: call.id, r#type: "function".to_owned(), function })
    };
    Ok(ChatMessage {
        role: message.role,
        content: message.content,
        tool_calls: message.tool_calls.into_iter().map(call).collect::<Result<_, Refusal>>()?,
        tool_call_id: message.tool_call_id,
        name: message.name,
        reasoning_content: message.reasoning_content,
    })
}

/// Parses a text that must be a JSON object.
fn json_object(field: &'static str, text: &str) -> Result<Map<String, Value>, Refusal> {
    let refuse = |value: &str| Refusal::Value { field, value: value.to_owned(), rule: "a JSON object" };
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(refuse("other JSON")),
        Err(_) => Err(refuse("no JSON")),
    }
}

/// Returns a new request id. It is unique in this process and, because it contains the start time, very likely among
/// others.
pub(super) fn fresh_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    static START: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    let start = START.get_or_init(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |since| since.as_micros() as u64)
    });
    format!("gen-{start:x}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

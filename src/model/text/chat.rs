//! Chat templates: Jinja templates from checkpoints, rendered like transformers does. They are parsed and rendered in
//! worker processes (`actors::workers`), because a checkpoint's template is a program whose nesting, loops and output
//! nothing else limits.
//!
//! Not here: tokenizing the rendered text, and reading tool calls from a model's output.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Value as Jinja;
use minijinja::{Environment, Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{TextError, python};
use crate::actors::workers::{Cancel, Failure, Workers};

/// One message of a conversation, with the names of transformers. Members that are empty do not exist for the template,
/// except for the first two.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// The role, usually `system`, `user`, `assistant` or `tool`. The template decides which roles are valid.
    pub role: String,
    /// The message's text.
    pub content: String,
    /// The calls that the assistant made in this message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call, in a message with a tool's result.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tool_call_id: String,
    /// The name of the author or of the tool.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The assistant's reasoning before the message.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning_content: String,
}

/// A call of a tool in a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The id, which the message with the result repeats.
    pub id: String,
    /// Always `function`.
    pub r#type: String,
    /// The function and its arguments.
    pub function: CalledFunction,
}

/// The function of a [`ToolCall`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalledFunction {
    /// The name.
    pub name: String,
    /// The arguments by name, as transformers passes them to templates.
    pub arguments: Map<String, Value>,
}

/// The texts around a model's reasoning.
pub type Marks = [&'static str; 2];

/// How a model writes its reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reasoning {
    /// The template contains no marks of reasoning.
    #[default]
    None,
    /// The reasoning is between two marks, before the answer.
    Marked(&'static Marks),
    /// The model writes its reasoning as messages on a separate channel (see [`CallForm::Channels`]).
    Channel,
}

/// How a model writes what a chat template describes, as far as the template's source says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChatStyle {
    /// How the model reasons before it answers.
    pub reasoning: Reasoning,
    /// Whether the template shows tools to the model.
    pub shows_tools: bool,
    /// How the model writes calls of tools; `None` if the template has no tools, or a form of calls that is not known.
    pub tools: Option<CallForm>,
    /// Whether the template turns messages of the roles `query` and `document` into a reranker's prompt.
    pub pairs: bool,
}

/// The forms in which models write calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// Two marks around a JSON object of `name` and `arguments`, or a list of such objects (Hermes, Qwen2.5, Qwen3, Granite,
    /// Phi-4-mini, Nemotron). If the second mark is empty, there is none.
    TaggedJson(&'static Marks),
    /// Two marks around functions with tagged parameters (Qwen3-Coder, Qwen3.5, Seed-OSS, MiniMax-M2).
    TaggedParameters(&'static ParameterTags),
    /// Two marks around calls whose arguments have plain names, such as `f(a=1)` (Gemma 4, LFM2, OLMo 3).
    Named(&'static NamedTags),
    /// `<tool_call>` around a name, and `<arg_key>` and `<arg_value>` of each argument (GLM-4.5 and later).
    TaggedPairs,
    /// A bare JSON object of `name` and `parameters` (Llama 3).
    Json,
    /// `[TOOL_CALLS]` and a JSON list of objects of `name` and `arguments` (Mistral 7B v0.3, Nemo, Small 3).
    BracketList,
    /// `[TOOL_CALLS]NAME[ARGS]` and a JSON object, for each call (Mistral Small 3.2, Ministral 3, Magistral, Devstral).
    BracketArguments,
    /// A section of calls with the type, the name and the arguments in a block of code (DeepSeek V3, R1).
    SectionFenced,
    /// A section of calls with the name and the arguments (DeepSeek V3.1).
    Section,
    /// Messages on channels; a message to a function is a call (harmony: gpt-oss).
    Channels,
}

/// The texts of calls with tagged parameters.
#[derive(Debug, PartialEq, Eq)]
pub struct ParameterTags {
    /// Around one or several functions.
    pub calls: Marks,
    /// Before the name of a function, behind it, and behind the function's parameters.
    pub function: [&'static str; 3],
    /// Before the name of a parameter, behind it, and behind the parameter's value.
    pub parameter: [&'static str; 3],
    /// Whether values are on lines of their own.
    pub lines: bool,
}

/// The texts of calls whose arguments have plain names.
#[derive(Debug, PartialEq, Eq)]
pub struct NamedTags {
    /// Around one or several calls.
    pub calls: Marks,
    /// Before the name of a function.
    pub before: &'static str,
    /// Around the arguments of a function.
    pub around: [char; 2],
    /// Between the name of an argument and its value.
    pub between: char,
    /// Around a text; `None` if texts are in quotes, as in Python.
    pub quote: Option<&'static str>,
    /// What is before, between and behind several calls inside the marks; `None` if each call has marks of its own.
    pub list: Option<[&'static str; 3]>,
}

/// A form of calls, and how a chat template that has it is recognised.
#[derive(Debug)]
struct Form {
    form: CallForm,
    /// The template contains at least one text of each list.
    has: &'static [&'static [&'static str]],
    /// The template contains none of these texts: they are the marks of other forms, also of forms that are not read.
    lacks: &'static [&'static str],
    /// The marks that may be special tokens of the model, which the reader of the form has to see.
    marks: &'static [&'static str],
}

/// The marks of [`CallForm::Channels`].
pub mod channels {
    /// Begins a message; the role follows.
    pub const START: &str = "<|start|>";
    /// The name of a channel follows.
    pub const CHANNEL: &str = "<|channel|>";
    /// The type of the content follows.
    pub const CONSTRAIN: &str = "<|constrain|>";
    /// The content follows.
    pub const MESSAGE: &str = "<|message|>";
    /// Ends a message.
    pub const END: &str = "<|end|>";
    /// Ends a message that is a call.
    pub const CALL: &str = "<|call|>";
    /// Ends the last message.
    pub const RETURN: &str = "<|return|>";
}

/// The marks of [`CallForm::Section`] and [`CallForm::SectionFenced`].
pub mod section {
    /// Around all calls.
    pub const CALLS: [&str; 2] = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
    /// Around a call.
    pub const CALL: [&str; 2] = ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"];
    /// Between the parts of a call.
    pub const SEPARATOR: &str = "<｜tool▁sep｜>";
}

/// The marks of [`CallForm::BracketList`] and [`CallForm::BracketArguments`].
pub mod brackets {
    /// Begins calls.
    pub const CALLS: &str = "[TOOL_CALLS]";
    /// The arguments follow.
    pub const ARGUMENTS: &str = "[ARGS]";
    /// An id of the call follows.
    pub const ID: &str = "[CALL_ID]";
}

/// The marks around a call of [`CallForm::TaggedPairs`], and of most models with the other forms whose names begin with
/// `Tagged`.
pub const TAGS: Marks = ["<tool_call>", "</tool_call>"];
/// The marks around the name of an argument, of [`CallForm::TaggedPairs`].
pub const KEY: [&str; 2] = ["<arg_key>", "</arg_key>"];
/// The marks around the value of an argument, of [`CallForm::TaggedPairs`].
pub const VALUE: [&str; 2] = ["<arg_value>", "</arg_value>"];

/// Qwen3-Coder, Qwen3.5.
pub static QWEN_PARAMETERS: ParameterTags = ParameterTags {
    calls: TAGS,
    function: ["<function=", ">", "</function>"],
    parameter: ["<parameter=", ">", "</parameter>"],
    lines: true,
};
/// Seed-OSS.
pub static SEED_PARAMETERS: ParameterTags = ParameterTags {
    calls: ["<seed:tool_call>", "</seed:tool_call>"],
    function: QWEN_PARAMETERS.function,
    parameter: QWEN_PARAMETERS.parameter,
    lines: false,
};
/// MiniMax-M2.
pub static MINIMAX_PARAMETERS: ParameterTags = ParameterTags {
    calls: ["<minimax:tool_call>", "</minimax:tool_call>"],
    function: ["<invoke name=\"", "\">", "</invoke>"],
    parameter: ["<parameter name=\"", "\">", "</parameter>"],
    lines: false,
};
/// Gemma 4.
pub static GEMMA_CALLS: NamedTags = NamedTags {
    calls: ["<|tool_call>", "<tool_call|>"],
    before: "call:",
    around: ['{', '}'],
    between: ':',
    quote: Some("<|\"|>"),
    list: None,
};
/// FunctionGemma.
pub static FUNCTION_GEMMA_CALLS: NamedTags =
    NamedTags { calls: ["<start_function_call>", "<end_function_call>"], quote: Some("<escape>"), ..GEMMA_CALLS };
/// LFM2.
pub static LFM_CALLS: NamedTags = NamedTags {
    calls: ["<|tool_call_start|>", "<|tool_call_end|>"],
    before: "",
    around: ['(', ')'],
    between: '=',
    quote: None,
    list: Some(["[", ", ", "]"]),
};
/// OLMo 3.
pub static OLMO_CALLS: NamedTags =
    NamedTags { calls: ["<function_calls>", "</function_calls>"], list: Some(["\n", "\n", "\n"]), ..LFM_CALLS };
/// Phi-4-mini.
pub static PHI_TAGS: Marks = ["<|tool_call|>", "<|/tool_call|>"];
/// Nemotron-H and Nemotron Nano 2.
pub static NEMOTRON_TAGS: Marks = ["<TOOLCALL>", "</TOOLCALL>"];
/// Granite 3.
pub static GRANITE_TAGS: Marks = ["<|tool_call|>", ""];

/// Whether models with these marks around calls in JSON write a list of them.
pub fn are_around_lists(marks: &Marks) -> bool {
    [GRANITE_TAGS, NEMOTRON_TAGS].contains(marks)
}

/// The forms that are read. The first one that a template has is its form.
const FORMS: &[Form] = &[
    Form {
        form: CallForm::Channels,
        has: &[&[channels::CHANNEL], &[channels::MESSAGE], &["functions"]],
        lacks: &[],
        marks: &[
            channels::START,
            channels::CHANNEL,
            channels::CONSTRAIN,
            channels::MESSAGE,
            channels::END,
            channels::CALL,
            channels::RETURN,
        ],
    },
    Form {
        form: CallForm::TaggedPairs,
        has: &[&[TAGS[0]], &[KEY[0]], &[VALUE[0]]],
        // Hunyuan puts a mark between the name and the arguments.
        lacks: &["<tool_sep>"],
        marks: &[TAGS[0], TAGS[1], KEY[0], KEY[1], VALUE[0], VALUE[1]],
    },
    Form {
        form: CallForm::TaggedParameters(&SEED_PARAMETERS),
        has: &[&["<seed:tool_call>"], &["<function="]],
        lacks: &[],
        marks: &["<seed:tool_call>", "</seed:tool_call>"],
    },
    Form {
        form: CallForm::TaggedParameters(&MINIMAX_PARAMETERS),
        has: &[&["<minimax:tool_call>"], &["<invoke name="]],
        lacks: &[],
        marks: &["<minimax:tool_call>", "</minimax:tool_call>"],
    },
    Form {
        form: CallForm::TaggedParameters(&QWEN_PARAMETERS),
        has: &[&[TAGS[0]], &["<function="]],
        lacks: &[],
        marks: &TAGS,
    },
    Form {
        form: CallForm::Named(&GEMMA_CALLS),
        has: &[&["<|tool_call>call:"], &["<|\"|>", "<|\\\"|>"]],
        lacks: &[],
        marks: &["<|tool_call>", "<tool_call|>", "<|\"|>"],
    },
    Form {
        form: CallForm::Named(&FUNCTION_GEMMA_CALLS),
        has: &[&["<start_function_call>call:"], &["<escape>"]],
        lacks: &[],
        marks: &["<start_function_call>", "<end_function_call>", "<escape>"],
    },
    Form {
        form: CallForm::Named(&LFM_CALLS),
        // Some templates show only the list of tools.
        has: &[&["<|tool_call_start|>", "<|tool_list_start|>", "keep_past_thinking"]],
        lacks: &[],
        marks: &["<|tool_call_start|>", "<|tool_call_end|>"],
    },
    Form {
        form: CallForm::Named(&OLMO_CALLS),
        has: &[&["<function_calls>"]],
        lacks: &["<invoke", "DSML"],
        marks: &["<function_calls>", "</function_calls>"],
    },
    Form {
        form: CallForm::TaggedJson(&PHI_TAGS),
        has: &[&[PHI_TAGS[0]], &[PHI_TAGS[1]]],
        lacks: &[],
        marks: &PHI_TAGS,
    },
    Form {
        form: CallForm::TaggedJson(&NEMOTRON_TAGS),
        has: &[&[NEMOTRON_TAGS[0]], &[NEMOTRON_TAGS[1]]],
        lacks: &[],
        marks: &NEMOTRON_TAGS,
    },
    Form {
        form: CallForm::TaggedJson(&GRANITE_TAGS),
        has: &[&[GRANITE_TAGS[0]]],
        // Marks of other models that are not read.
        lacks: &["<|tool_call_end|>"],
        marks: &["<|tool_call|>"],
    },
    Form {
        form: CallForm::SectionFenced,
        has: &[&[section::CALLS[0]], &[section::SEPARATOR], &["```json"]],
        lacks: &[],
        marks: SECTION_MARKS,
    },
    Form {
        form: CallForm::Section,
        has: &[&[section::CALLS[0]], &[section::SEPARATOR]],
        lacks: &[],
        marks: SECTION_MARKS,
    },
    Form {
        form: CallForm::BracketArguments,
        has: &[&[brackets::CALLS], &[brackets::ARGUMENTS]],
        lacks: &[],
        marks: BRACKET_MARKS,
    },
    Form { form: CallForm::BracketList, has: &[&[brackets::CALLS]], lacks: &[], marks: BRACKET_MARKS },
    Form {
        form: CallForm::TaggedJson(&TAGS),
        // The template shows the object's members to the model, with the quotes escaped where it writes them in a text.
        has: &[&[TAGS[0]], &["\"name\"", "\\\"name\\\""], &["\"arguments\"", "\\\"arguments\\\""]],
        lacks: &[KEY[0], "<tool_sep>"],
        marks: &TAGS,
    },
    Form {
        form: CallForm::Json,
        has: &[&["\"parameters\""], &["\"name\""]],
        // Templates of any form may show the definitions of tools.
        lacks: &["_call>", "_call|>", "_calls>", "_calls|>", "tool_calls_section", "DSML", "ACTION|>"],
        marks: &[],
    },
];
const SECTION_MARKS: &[&str] =
    &[section::CALLS[0], section::CALLS[1], section::CALL[0], section::CALL[1], section::SEPARATOR];
const BRACKET_MARKS: &[&str] = &[brackets::CALLS, brackets::ARGUMENTS, brackets::ID];

/// The marks of reasoning that are read. A template that has the second one of a pair has the pair.
const REASONING: &[Marks] = &[
    ["<think>", "</think>"],
    ["[THINK]", "[/THINK]"],
    ["<seed:think>", "</seed:think>"],
    // Gemma 4: a channel.
    ["<|channel>", "<channel|>"],
];

/// Returns the name of the channel that follows the first one of a pair of marks of reasoning, and is no reasoning; empty if it is
/// not a channel.
pub fn channel_of(marks: &Marks) -> &'static str {
    if marks[0] == "<|channel>" { "thought" } else { "" }
}

impl CallForm {
    /// The marks that may be special tokens of a model, which the reader of the form has to see.
    pub fn marks(self) -> &'static [&'static str] {
        FORMS.iter().find(|form| form.form == self).map_or(&[], |form| form.marks)
    }
}

impl Reasoning {
    /// The marks that may be special tokens of a model, which the reader of the reasoning has to see.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            Reasoning::None => &[],
            Reasoning::Marked(marks) => marks,
            Reasoning::Channel => CallForm::Channels.marks(),
        }
    }
}

impl ChatStyle {
    fn of(source: &str) -> ChatStyle {
        let has = |text: &str| source.contains(text);
        let is = |form: &&Form| {
            form.has.iter().all(|any| any.iter().any(|text| has(text))) && !form.lacks.iter().any(|text| has(text))
        };
        let form = FORMS.iter().find(is).map(|form| form.form);
        let reasoning = match REASONING.iter().find(|marks| has(marks[1])) {
            // The template of such a model describes its channels also where it has no tools.
            _ if has(channels::CHANNEL) && has(channels::MESSAGE) => Reasoning::Channel,
            Some(marks) => Reasoning::Marked(marks),
            None => Reasoning::None,
        };
        let shows_tools = has("tools");
        let role = |name: &str| has(&format!("\"{name}\"")) || has(&format!("'{name}'"));
        ChatStyle {
            reasoning,
            shows_tools,
            tools: form.filter(|_| shows_tools),
            pairs: role("query") && role("document"),
        }
    }
}

/// Options for rendering a conversation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatOptions {
    /// Whether the beginning of the assistant's answer is added after the messages.
    pub add_generation_prompt: bool,
    /// The name of the template; `None` means `default`.
    pub template: Option<String>,
    /// Additional variables for the template, for example `enable_thinking`.
    pub extra: Map<String, Value>,
}

/// Adds the generation prompt and uses the default template without additional variables.
impl Default for ChatOptions {
    fn default() -> ChatOptions {
        ChatOptions { add_generation_prompt: true, template: None, extra: Map::new() }
    }
}

/// The maximum number of bytes that a template may render: more than any prompt that a server accepts.
const MOST_RENDERED: usize = 16 << 20;
/// The name of the template that is used unless another one is asked for.
const DEFAULT: &str = "default";
/// The name of the template for conversations with tools, if there is one.
const TOOL_USE: &str = "tool_use";
/// The first byte of the first frame sent to a template-rendering worker; it selects this service.
pub(crate) const WORKER: u8 = b't';

/// The chat templates of a checkpoint, and the pool of workers that render them.
pub(super) struct Templates {
    /// The name and the style of each template, sorted.
    styles: BTreeMap<String, ChatStyle>,
    workers: Workers,
}

/// The chat templates and special tokens of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
struct Sources {
    /// Each template's name and source.
    templates: Vec<(String, String)>,
    /// `bos_token` and the like, which are variables of the templates.
    tokens: Map<String, Value>,
}

/// The keys of tokenizer_config.json that name special tokens.
const TOKEN_KEYS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl Sources {
    /// Reads tokenizer_config.json. If given, `file` (the text of chat_template.jinja) replaces its default template.
    fn read(config: &Map<String, Value>, file: Option<&str>) -> Result<Sources, TextError> {
        let invalid = |reason: &str| TextError::Invalid { file: "tokenizer_config.json", reason: reason.to_owned() };
        let mut templates: Vec<(String, String)> = Vec::new();
        match config.get("chat_template") {
            None | Some(Value::Null) => {}
            Some(Value::String(source)) => templates.push(("default".to_owned(), source.clone())),
            Some(Value::Array(list)) => {
                for entry in list {
                    let part = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                    match (part("name"), part("template")) {
                        (Some(name), Some(source)) => templates.push((name, source)),
                        _ => return Err(invalid("chat_template has an entry without name and template")),
                    }
                }
            }
            Some(_) => return Err(invalid("chat_template is neither a text nor a list")),
        }
        if let Some(source) = file {
            templates.retain(|(name, _)| name != "default");
            templates.push(("default".to_owned(), source.to_owned()));
        }
        let mut tokens = Map::new();
        for key in TOKEN_KEYS {
            let token = match config.get(key) {
                Some(Value::Object(token)) => token.get("content").cloned(),
                token => token.cloned(),
            };
            if let Some(Value::String(token)) = token {
                tokens.insert(key.to_owned(), Value::String(token));
            }
        }
        Ok(Sources { templates, tokens })
    }
}

/// A request to a worker: render the template `name`.
#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    name: String,
    messages: Vec<ChatMessage>,
    options: ChatOptions,
}

/// A worker's answer.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Rendered(String),
    Failed(String),
    Refused(String),
    TooLarge(String),
}

/// The first byte of a worker's question. Template workers ask no questions, so none of their frames begins with it.
const QUESTION: u8 = 0;

impl Templates {
    /// Reads tokenizer_config.json. If given, `file` (the text of chat_template.jinja) replaces its default template.
    /// Templates are not parsed before they are rendered, so that a checkpoint with an unsupported template can still
    /// complete text.
    pub(super) fn new(config: &Map<String, Value>, file: Option<&str>) -> Result<Templates, TextError> {
        let sources = Sources::read(config, file)?;
        let styles = sources.templates.iter().map(|(name, source)| (name.clone(), ChatStyle::of(source))).collect();
        let mut first = vec![WORKER];
        serde_json::to_writer(&mut first, &sources)
            .map_err(|error| TextError::Invalid { file: "tokenizer_config.json", reason: error.to_string() })?;
        Ok(Templates { styles, workers: Workers::new("templates", first) })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.styles.is_empty()
    }

    /// Returns the name of the template that a conversation with or without tools uses, and its style. transformers
    /// prefers a template named `tool_use` for a conversation with tools.
    pub(super) fn style(&self, tools: bool) -> (&'static str, ChatStyle) {
        let named = |name: &'static str| self.styles.get(name).map(|style| (name, *style));
        let with_tools = if tools { named(TOOL_USE) } else { None };
        with_tools.or_else(|| named(DEFAULT)).unwrap_or((DEFAULT, ChatStyle::default()))
    }

    pub(super) fn render(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        cancel: &Cancel,
    ) -> Result<String, TextError> {
        let name = options.template.as_deref().unwrap_or(DEFAULT);
        known(self.styles.keys().map(String::as_str), name)?;
        let asked = Ask { name: name.to_owned(), messages: messages.to_vec(), options: options.clone() };
        let frame = serde_json::to_vec(&asked).map_err(|error| TextError::Template(error.to_string()))?;
        drop(asked);
        let most = self.workers.limits().memory / 4;
        let cancel = cancel.clone();
        let answered = self.workers.run(None, move |worker| {
            let alone = worker.calls() == 0;
            let mut call = || worker.call(&frame, &cancel, None, QUESTION, &mut |_| Vec::new());
            let answered = match call() {
                // The failure may be due to what earlier jobs left in the worker, so try once more in a new process.
                Err(failure) if failure.may_be_others(alone) && !cancel.is_cancelled() => call(),
                answered => answered,
            };
            if worker.grown() > most {
                worker.end();
            }
            answered
        });
        let answer = answered.map_err(|failure| match failure {
            Failure::Memory { .. } | Failure::Stack { .. } | Failure::Time { .. } => {
                TextError::TooLarge(failure.to_string())
            }
            Failure::Panicked => TextError::Template(failure.to_string()),
            Failure::Cancelled => TextError::Cancelled,
            Failure::Died(_) | Failure::Start(_) => TextError::Unavailable(failure.to_string()),
        })?;
        match serde_json::from_slice(&answer) {
            Ok(Answer::Rendered(text)) => Ok(text),
            Ok(Answer::Failed(reason)) => Err(TextError::Template(reason)),
            Ok(Answer::Refused(reason)) => Err(TextError::Refused(reason)),
            Ok(Answer::TooLarge(reason)) => Err(TextError::TooLarge(reason)),
            Err(error) => Err(TextError::Unavailable(format!("a worker process gave a strange answer: {error}"))),
        }
    }
}

/// Checks that a template with this name exists.
fn known<'a>(names: impl Iterator<Item = &'a str>, name: &str) -> Result<(), TextError> {
    let names: Vec<&str> = names.collect();
    match names.contains(&name) {
        true => Ok(()),
        false if names.is_empty() => Err(TextError::NoTemplate(String::new())),
        false => Err(TextError::NoTemplate(format!(" \"{name}\" (it has {})", names.join(", ")))),
    }
}

/// The worker's side: renders templates inside a worker process.
pub(crate) struct Service {
    environment: Environment<'static>,
    sources: BTreeMap<String, String>,
    /// The result of compiling each template used so far, by name. A failure keeps its error message.
    compiled: BTreeMap<String, Result<(), String>>,
    tokens: Map<String, Value>,
}

impl Service {
    /// Parses the first frame, without its first byte.
    pub(crate) fn new(first: &[u8]) -> serde_json::Result<Service> {
        Ok(Service::of(serde_json::from_slice(first)?))
    }

    fn of(Sources { templates, tokens }: Sources) -> Service {
        let sources = templates.into_iter().collect();
        Service { environment: environment(), sources, compiled: BTreeMap::new(), tokens }
    }

    /// Answers a request frame.
    pub(crate) fn answer(&mut self, frame: &[u8]) -> Vec<u8> {
        let answer = match serde_json::from_slice(frame) {
            Ok(Ask { name, messages, options }) => self.render(&name, &messages, &options),
            Err(error) => Answer::Failed(error.to_string()),
        };
        serde_json::to_vec(&answer).unwrap_or_default()
    }

    fn compile(&mut self, name: &str) -> Result<(), String> {
        if let Some(compiled) = self.compiled.get(name) {
            return compiled.clone();
        }
        let source = self.sources.get(name).map_or("", String::as_str);
        // Jinja has one kind of line end.
        let source = without_generation_tags(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let result = self.environment.add_template_owned(name.to_owned(), source);
        let result = result.map_err(|error| error.to_string());
        self.compiled.insert(name.to_owned(), result.clone());
        result
    }

    fn render(&mut self, name: &str, messages: &[ChatMessage], options: &ChatOptions) -> Answer {
        if let Err(reason) = self.compile(name) {
            return Answer::Failed(reason);
        }
        let mut variables: BTreeMap<&str, Jinja> = BTreeMap::new();
        for (key, value) in self.tokens.iter().chain(&options.extra) {
            variables.insert(key, python::of_json(value));
        }
        match serde_json::to_value(messages) {
            Ok(messages) => variables.insert("messages", python::of_json(&messages)),
            Err(error) => return Answer::Failed(error.to_string()),
        };
        variables.insert("add_generation_prompt", options.add_generation_prompt.into());
        // transformers defines both variables as None.
        variables.entry("tools").or_insert(Jinja::from(()));
        variables.entry("documents").or_insert(Jinja::from(()));
        let template = match self.environment.get_template(name) {
            Ok(template) => template,
            Err(error) => return Answer::Failed(error.to_string()),
        };
        match template.render(variables) {
            Ok(text) if text.len() > MOST_RENDERED => {
                Answer::TooLarge(format!("it has {} bytes, at most {MOST_RENDERED} are taken", text.len()))
            }
            Ok(text) => Answer::Rendered(text),
            Err(error) => match error.detail().and_then(|text| text.strip_prefix(RAISED)) {
                Some(message) => Answer::Refused(message.to_owned()),
                None => Answer::Failed(error.to_string()),
            },
        }
    }
}

/// The prefix of errors that the template raised on purpose, with `raise_exception`.
const RAISED: &str = "raised: ";

/// Creates a Jinja environment configured like that of transformers.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    python::install(&mut environment);
    environment.add_function("raise_exception", |message: String| -> Result<Jinja, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_function("strftime_now", |format: String| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        strftime(now, &format)
    });
    environment
}

/// Replaces `{% generation %}` blocks, which mark the assistant's text for training and render as their contents, by
/// `{% if true %}` blocks.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            out.push_str(tag);
            return out;
        };
        let (tag, after) = tag.split_at(end + 2);
        // The tag's text between the delimiters, without the whitespace-control signs.
        let word = tag[2..end].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats a time like C's `strftime`, in UTC and English. Supports the directives that templates use; others are left
/// unchanged.
fn strftime(seconds: u64, format: &str) -> String {
    let days = (seconds / 86_400) as i64;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    // Converts days since 1970 to a date in the proleptic Gregorian calendar, using years that begin in March.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = (from_march + 2) % 12 + 1;
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    let day_of_year = before + day + i64::from(leap && month > 2);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days + 4).rem_euclid(7) as usize]);
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let two = |n: i64| if padded { format!("{n:02}") } else { n.to_string() };
        let text = match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => {
                if padded {
                    format!("{day:2}")
                } else {
                    day.to_string()
                }
            }
            Some('H') => two(hour as i64),
            Some('I') => two(hour12 as i64),
            Some('M') => two(minute as i64),
            Some('S') => two(second as i64),
            Some('j') => {
                if padded {
                    format!("{day_of_year:03}")
                } else {
                    day_of_year.to_string()
                }
            }
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{}{other}", if padded { "" } else { "-" }),
            None => "%".to_owned(),
        };
        out.push_str(&text);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Renders templates in this process, like a worker does.
    struct Here(std::cell::RefCell<Service>);

    impl Here {
        fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TextError> {
            let mut service = self.0.borrow_mut();
            let name = options.template.as_deref().unwrap_or("default");
            known(service.sources.keys().map(String::as_str), name)?;
            match service.render(name, messages, options) {
                Answer::Rendered(text) => Ok(text),
                Answer::Failed(reason) => Err(TextError::Template(reason)),
                Answer::Refused(reason) => Err(TextError::Refused(reason)),
                Answer::TooLarge(reason) => Err(TextError::TooLarge(reason)),
            }
        }
    }

    fn here(config: &Map<String, Value>, file: Option<&str>) -> Here {
        Here(Service::of(Sources::read(config, file).unwrap()).into())
    }

    fn templates(source: &str) -> Here {
        let config: Map<String, Value> =
            serde_json::from_str(r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null}"#)
                .unwrap();
        here(&config, Some(source))
    }

    fn user(content: &str) -> Vec<ChatMessage> {
        vec![ChatMessage { role: "user".into(), content: content.into(), ..ChatMessage::default() }]
    }

    #[test]
    fn variables_blocks_and_python_methods() {
        let source = "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m['content'].strip().upper() }}]\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n>{{ eos_token }}{% endif %}{{ pad_token }}\n";
        let t = templates(source);
        assert_eq!(t.render(&user(" hi "), &ChatOptions::default()).unwrap(), "<s>[HI]\n></s>");
        let options = ChatOptions { add_generation_prompt: false, ..ChatOptions::default() };
        assert_eq!(t.render(&user("a"), &options).unwrap(), "<s>[A]\n");
    }

    #[test]
    fn loop_controls_and_extra_variables() {
        let t = templates(
            "{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ enable_thinking is defined and enable_thinking is false }}",
        );
        let mut options = ChatOptions::default();
        options.extra.insert("enable_thinking".into(), Value::Bool(false));
        assert_eq!(t.render(&[], &options).unwrap(), "012True");
        assert_eq!(t.render(&[], &ChatOptions::default()).unwrap(), "012False");
    }

    #[test]
    fn a_template_may_refuse() {
        let t = templates("{{ raise_exception('only user turns') }}");
        let error = t.render(&user("x"), &ChatOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), "the chat template refuses the messages: only user turns");
    }

    #[test]
    fn a_broken_template_fails_when_it_is_asked_for() {
        let error = templates("{% for %}").render(&[], &ChatOptions::default()).unwrap_err();
        assert!(matches!(error, TextError::Template(_)), "{error}");
    }

    #[test]
    fn named_templates() {
        let config = r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]}"#;
        let config: Map<String, Value> = serde_json::from_str(config).unwrap();
        let t = here(&config, None);
        let named = |name: &str| ChatOptions { template: Some(name.into()), ..ChatOptions::default() };
        assert_eq!(t.render(&[], &ChatOptions::default()).unwrap(), "d");
        assert_eq!(t.render(&[], &named("rag")).unwrap(), "r");
        let error = t.render(&[], &named("tools")).unwrap_err().to_string();
        assert_eq!(error, "the checkpoint has no chat template \"tools\" (it has default, rag)");
        let t = here(&config, Some("f"));
        assert_eq!(t.render(&[], &ChatOptions::default()).unwrap(), "f");
    }

    #[test]
    fn json_is_written_as_python_does() {
        let t = templates("{{ v | tojson }}|{{ v | tojson(indent=2) }}");
        let mut options = ChatOptions::default();
        options.extra.insert("v".into(), serde_json::json!({"z": "<é'>", "a": [1, 2.5, null, true]}));
        let expected = "{\"z\": \"<é'>\", \"a\": [1, 2.5, null, true]}|{\n  \"z\": \"<é'>\",\n  \"a\": [\n    1,\n    2.5,\n    null,\n    true\n  ]\n}";
        assert_eq!(t.render(&[], &options).unwrap(), expected);
    }

    #[test]
    fn generation_tags_vanish() {
        let t = templates("a{% generation %}b{% endgeneration %}c {%- generation -%} d {%- endgeneration -%} e");
        assert_eq!(t.render(&[], &ChatOptions::default()).unwrap(), "abcde");
    }

    /// Templates as small as possible that write calls in each form, and the form that is recognised.
    #[test]
    fn forms_are_recognised_by_what_the_template_writes() {
        use CallForm::*;
        let think = Reasoning::Marked(&["<think>", "</think>"]);
        let brackets = Reasoning::Marked(&["[THINK]", "[/THINK]"]);
        let harmony = "{% if tools %}namespace functions {{ tools }}{% endif %}{% for m in messages %}{% if m.tool_calls %}\
            <|start|>assistant to={{ 'functions.' + m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>\
            {{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% endif %}{% endfor %}<|start|>assistant";
        let glm = "{% if tools %}{{ tools | tojson }} <tool_call>{name}\n<arg_key>{key}</arg_key>\n\
            <arg_value>{value}</arg_value></tool_call> {\"name\", \"arguments\"}{% endif %}<|assistant|><think></think>";
        let coder = "{% if tools %}<tool_call>\n<function=name>\n<parameter=a>\n{% endif %}";
        let hermes = r#"{% if tools %}<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>{% endif %}"#;
        let qwen =
            r#"{% if tools %}{{ "<tool_call>\n{\"name\": <name>, \"arguments\": <object>}" }}{% endif %}</think>"#;
        let list =
            "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[TOOL_CALLS][{\"name\": \"parameters\"}]{% endif %}";
        let arguments = "{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}{% endif %}[THINK]x[/THINK]";
        let fenced = "{% if tools %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n\
            {{ arguments }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endif %}</think>";
        let section = "{% if tools %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments }}\
            <｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endif %}</think>";
        let llama = r#"{% if tools is not none %}{"name": function name, "parameters": dictionary}{{ m.tool_calls[0] }}{% endif %}"#;
        let seed =
            "{% if tools %}<seed:tool_call>\n<function=name>\n<parameter=a>1</parameter>{% endif %}</seed:think>";
        let minimax =
            "{% if tools %}<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">{% endif %}</think>";
        let gemma =
            "{% if tools %}{{ '<|tool_call>call:' + name + '{' }}<|\"|>x<|\"|>}<tool_call|>{% endif %}<channel|>";
        let function_gemma = "{% if tools %}<start_function_call>call:f{a:<escape>x<escape>}{% endif %}";
        let lfm = "{% if tools %}List of tools: {{ tools | tojson }}<|tool_call_start|>[]<|tool_call_end|>{% endif %}";
        let lfm_of_old = "{% if tools %}List of tools: <|tool_list_start|>{\"name\", \"parameters\"}{% endif %}";
        let olmo = "{% if tools %}<functions>{{ tools }}</functions><function_calls>{% endif %}";
        let phi = "{% if tools %}<|tool_call|>{\"name\": \"parameters\"}<|/tool_call|>{% endif %}";
        let nemotron = "{% if tools %}<AVAILABLE_TOOLS>{{ tools }}</AVAILABLE_TOOLS> <TOOLCALL>[{\"name\": f, \"arguments\": a}]\
            </TOOLCALL>{% endif %}</think>";
        let granite = "{% if tools %}write <|tool_call|> and a list: \"name\", \"parameters\"{% endif %}";
        let none = Reasoning::None;
        for (source, form, reasoning) in [
            (harmony, Channels, Reasoning::Channel),
            (glm, TaggedPairs, think),
            (coder, TaggedParameters(&QWEN_PARAMETERS), none),
            (hermes, TaggedJson(&TAGS), none),
            (qwen, TaggedJson(&TAGS), think),
            (seed, TaggedParameters(&SEED_PARAMETERS), Reasoning::Marked(&["<seed:think>", "</seed:think>"])),
            (minimax, TaggedParameters(&MINIMAX_PARAMETERS), think),
            (gemma, Named(&GEMMA_CALLS), Reasoning::Marked(&["<|channel>", "<channel|>"])),
            (function_gemma, Named(&FUNCTION_GEMMA_CALLS), none),
            (lfm, Named(&LFM_CALLS), none),
            (lfm_of_old, Named(&LFM_CALLS), none),
            (olmo, Named(&OLMO_CALLS), none),
            (phi, TaggedJson(&PHI_TAGS), none),
            (nemotron, TaggedJson(&NEMOTRON_TAGS), think),
            (granite, TaggedJson(&GRANITE_TAGS), none),
            (list, BracketList, none),
            (arguments, BracketArguments, brackets),
            (fenced, SectionFenced, think),
            (section, Section, think),
            (llama, Json, none),
        ] {
            let style = ChatStyle::of(source);
            assert_eq!((style.tools, style.reasoning, style.shows_tools), (Some(form), reasoning, true), "{source}");
        }
    }

    #[test]
    fn a_form_that_is_not_known_is_taken_for_none() {
        let definition = r#"{% if tools %}{"name": x, "parameters": y}"#;
        for call in [
            "<tool_call>name<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
            "<tool_call>name(key=value)</tool_call>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0",
            "<｜DSML｜function_calls>",
            "<|START_ACTION|>[]<|END_ACTION|>",
        ] {
            let style = ChatStyle::of(&format!("{definition}{call}{{% endif %}}"));
            assert_eq!((style.tools, style.shows_tools), (None, true), "{call}");
        }
        // A template without tools has no form, whatever it writes.
        let style = ChatStyle::of("<tool_call>{\"name\": x, \"arguments\": y}");
        assert_eq!((style.tools, style.shows_tools), (None, false));
        // Channels without functions: the reasoning is still told apart.
        assert_eq!(ChatStyle::of("<|channel|>final<|message|>").reasoning, Reasoning::Channel);
    }

    #[test]
    fn dates() {
        assert_eq!(strftime(0, "%Y-%m-%d %H:%M:%S %A %j"), "1970-01-01 00:00:00 Thursday 001");
        assert_eq!(strftime(951_782_400, "%d %b %Y|%-d %B|%j"), "29 Feb 2000|29 February|060");
        assert_eq!(strftime(1_795_199_461, "%a %F %T %I%p %y %% %Q %-m"), "Fri 2026-11-20 18:31:01 06PM 26 % %Q 11");
        assert_eq!(strftime(1_735_689_599, "%j %e"), "366 31");
    }
}

//! The tools of a request: their definitions, which of them the model may or must call, and the constraint that
//! enforces this in the model's syntax of calls.
//! Not here: parsing calls of an output (`output`).

use super::fields::{self, Fields, refuse};
use crate::model::grammar::{GrammarError, MOST_BYTES};
use crate::model::text::Text;
use crate::model::text::chat::{
    CallForm, KEY, Marks, NamedTags, ParameterTags, TAGS, VALUE, are_around_lists, brackets, channels, section,
};
use crate::service::bounds;
use crate::service::prepare::{channel, mark, until};
use crate::service::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// The maximum length of a function's name in bytes.
const MOST_NAME: usize = 128;

/// A function that the model may call.
#[derive(Clone, Debug)]
pub(super) struct Tool {
    pub(super) name: String,
    /// The JSON Schema of its arguments.
    pub(super) parameters: Value,
    /// Whether its calls must conform to the schema even if the model need not call a tool (`strict`).
    pub(super) strict: bool,
}

impl Tool {
    fn property(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }

    /// The names of its parameters.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let properties = self.parameters.get("properties").and_then(Value::as_object);
        properties.into_iter().flatten().map(|(name, _)| name.as_str())
    }

    /// Whether a parameter's value can only be a text.
    pub(super) fn is_text(&self, parameter: &str) -> bool {
        self.property(parameter).is_some() && !self.is_json(parameter)
    }

    /// Whether a parameter's value is written as JSON and not as plain text.
    pub(super) fn is_json(&self, parameter: &str) -> bool {
        self.property(parameter).is_some_and(|schema| {
            let kind = schema.get("type");
            let texts = kind.is_some_and(|kind| kind == "string");
            let all_texts = |values: &Vec<Value>| values.iter().all(Value::is_string);
            !texts && !schema.get("enum").and_then(Value::as_array).is_some_and(all_texts)
        })
    }

    /// Returns the JSON value of a parameter that is written as JSON ([`Tool::is_json`]) from what a model wrote for it.
    /// Models also write the words of Python that their templates show them, and texts without quotes where the schema
    /// allows a text among others.
    pub(super) fn json(&self, parameter: &str, written: &str) -> String {
        let types = self.property(parameter).and_then(types).unwrap_or_default();
        let allows = |kind: &str| types.contains(&kind);
        match (written.trim(), serde_json::from_str::<Value>(written)) {
            ("True", _) if allows("boolean") => "true".to_owned(),
            ("False", _) if allows("boolean") => "false".to_owned(),
            ("None", _) if allows("null") => "null".to_owned(),
            (trimmed, Ok(value)) if !allows("string") || kinds(&value).iter().any(|kind| allows(kind)) => {
                trimmed.to_owned()
            }
            _ => Value::from(written).to_string(),
        }
    }
}

/// Returns the types of the values that a schema allows; `None` if it does not say them in a simple way.
fn types(schema: &Value) -> Option<Vec<&str>> {
    if let Some(kind) = schema.get("type") {
        let kinds = kind.as_array().map_or(std::slice::from_ref(kind), Vec::as_slice);
        return kinds.iter().map(Value::as_str).collect();
    }
    let any = ["anyOf", "oneOf"].into_iter().find_map(|key| schema.get(key)?.as_array());
    match (any, schema.get("enum").and_then(Value::as_array)) {
        (Some(any), _) => Some(any.iter().map(types).collect::<Option<Vec<_>>>()?.concat()),
        (None, Some(values)) => Some(values.iter().flat_map(kinds).copied().collect()),
        (None, None) => None,
    }
}

/// Returns the names that schemas have for the type of a value.
fn kinds(value: &Value) -> &'static [&'static str] {
    match value {
        Value::Null => &["null"],
        Value::Bool(_) => &["boolean"],
        Value::Number(number) if number.is_f64() => &["number"],
        Value::Number(_) => &["integer", "number"],
        Value::String(_) => &["string"],
        Value::Array(_) => &["array"],
        Value::Object(_) => &["object"],
    }
}

/// Whether an output may or must contain calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Choice {
    /// It must not.
    #[default]
    None,
    /// It may contain any number.
    Auto,
    /// It must contain at least one.
    Required,
}

/// The tools of a request.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    /// The definitions for the chat template, as JSON.
    pub(super) shown: Vec<String>,
    /// The tools that may be called.
    pub(super) callable: Arc<[Tool]>,
    pub(super) choice: Choice,
    /// Whether an output may contain several calls.
    pub(super) parallel: bool,
}

/// Parses a function of `tools`; also returns its definition for chat templates.
fn function(mut function: Fields) -> Result<(Tool, String), Refusal> {
    let name = function.need_text("name")?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
    if name.is_empty() || name.len() > MOST_NAME || !name.bytes().all(plain) {
        let rule = "1 to 128 letters, digits and any of _ - . : /";
        return Err(refuse(function.at("name"), &Value::from(name), rule));
    }
    let strict = function.flag("strict")?.unwrap_or(false);
    let parameters = match function.any("parameters") {
        None => json!({"type": "object", "properties": {}}),
        Some(object @ Value::Object(_)) => object,
        Some(other) => return Err(refuse(function.at("parameters"), &other, "a JSON Schema")),
    };
    let mut shown = Map::new();
    shown.insert("name".to_owned(), Value::from(name.as_str()));
    if let Some(description) = function.text("description")? {
        shown.insert("description".to_owned(), Value::from(description));
    }
    shown.insert("parameters".to_owned(), parameters.clone());
    let shown = json!({"type": "function", "function": shown}).to_string();
    Ok((Tool { name, parameters, strict }, shown))
}

impl Tools {
    /// Parses `tools`, `tool_choice` and `parallel_tool_calls`. With `flat`, a tool contains the members of its
    /// function directly, as in the Responses API.
    pub(super) fn read(body: &mut Fields, flat: bool) -> Result<Tools, Refusal> {
        body.not_served(&["functions", "function_call"])?;
        let parallel = body.flag("parallel_tool_calls")?.unwrap_or(true);
        let (mut tools, mut shown) = (Vec::new(), Vec::new());
        let path = body.at("tools");
        let given = body.peek("tools").is_some();
        let list = body.list("tools")?.unwrap_or_default();
        bounds::tools(list.len())?;
        for (index, tool) in list.into_iter().enumerate() {
            let mut tool = Fields::of(format!("{path}[{index}]"), tool)?;
            let kind = tool.need_text("type")?;
            if kind != "function" {
                return Err(refuse(tool.at("type"), &Value::from(kind), "\"function\": no other tools are served"));
            }
            let function_fields = match flat {
                true => tool,
                false => tool.object("function")?.ok_or_else(|| tool.missing("function", "an object"))?,
            };
            let (tool, definition) = function(function_fields)?;
            tools.push(tool);
            shown.push(definition);
        }
        let choice_path = body.at("tool_choice");
        let (choice, named) = match body.any("tool_choice") {
            None if tools.is_empty() => (Choice::None, None),
            None => (Choice::Auto, None),
            Some(Value::String(word)) => match word.as_str() {
                "none" => (Choice::None, None),
                "auto" => (Choice::Auto, None),
                "required" => (Choice::Required, None),
                _ => {
                    let rule = "\"none\", \"auto\", \"required\" or a function";
                    return Err(refuse(choice_path, &Value::from(word), rule));
                }
            },
            Some(value) => {
                let mut choice = Fields::of(choice_path.clone(), value)?;
                let kind = choice.need_text("type")?;
                if kind != "function" {
                    return Err(refuse(choice.at("type"), &Value::from(kind), "\"function\""));
                }
                let mut function = match flat {
                    true => choice,
                    false => choice.object("function")?.ok_or_else(|| choice.missing("function", "an object"))?,
                };
                (Choice::Required, Some(function.need_text("name")?))
            }
        };
        if choice == Choice::Required && tools.is_empty() {
            let value = if given { "empty" } else { "missing" };
            let rule = "at least one tool, as tool_choice asks for a call";
            return Err(Refusal::Json { field: path, value: value.to_owned(), rule: rule.to_owned() });
        }
        if let Some(name) = &named {
            tools.retain(|tool| tool.name == *name);
            if tools.is_empty() {
                return Err(refuse(choice_path, &Value::from(name.as_str()), "a function of tools"));
            }
        }
        let choice = if tools.is_empty() { Choice::None } else { choice };
        if choice == Choice::None {
            // The template receives only the tools that may be called.
            shown.clear();
            tools.clear();
        }
        Ok(Tools { shown, callable: tools.into(), choice, parallel: parallel && named.is_none() })
    }

    /// Returns the format of a structural tag for the output; `None` if the output is unconstrained. `content` is the
    /// format of an answer without calls, if that is constrained.
    ///
    /// # Errors [`GrammarError::TooLong`] if the definitions of the schemas alone, with a copy for each parameter that
    /// refers to them, are longer than a constraint may be.
    pub(super) fn format(
        &self,
        form: CallForm,
        text: &Text,
        content: Option<Value>,
    ) -> Result<Option<Value>, GrammarError> {
        let tags = || -> Result<Vec<Value>, GrammarError> {
            if matches!(form, CallForm::TaggedParameters(_) | CallForm::TaggedPairs | CallForm::Named(_)) {
                let bytes = self.callable.iter().map(copied_definitions).fold(0, usize::saturating_add);
                if bytes > MOST_BYTES {
                    return Err(GrammarError::TooLong { bytes });
                }
            }
            Ok(self.callable.iter().map(|tool| call(form, text, tool)).collect())
        };
        let separated = |tags: Vec<Value>, separator: &str, one: bool| {
            json!({
                "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": true,
                "stop_after_first": one,
            })
        };
        // One call, or any number of calls.
        let several = |calls: Vec<Value>, newline: bool| {
            let call = json!({"type": "or", "elements": calls});
            match (self.parallel, newline) {
                (false, _) => call,
                (true, false) => json!({"type": "plus", "content": call}),
                (true, true) => json!({"type": "plus", "content": sequence(vec![call, optional_newline()])}),
            }
        };
        let calls = || -> Result<Value, GrammarError> {
            let calls = tags()?;
            Ok(match form {
                CallForm::Json => separated(calls, "; ", true),
                CallForm::TaggedJson(marks) | CallForm::TaggedParameters(ParameterTags { calls: marks, .. }) => {
                    match is_plain(text, marks) {
                        true => separated(calls, "\n", !self.parallel),
                        false => several(calls, true),
                    }
                }
                CallForm::Named(tags) => match tags.list {
                    Some([begin, between, end]) => {
                        let [open, close] = tags.calls;
                        let list = separated(calls, between, !self.parallel);
                        sequence(vec![mark(text, open), constant(begin), list, constant(end), mark(text, close)])
                    }
                    None => several(calls, false),
                },
                CallForm::TaggedPairs => several(calls, true),
                CallForm::BracketList => {
                    let list = separated(calls, ", ", !self.parallel);
                    sequence(vec![mark(text, brackets::CALLS), constant("["), list, constant("]")])
                }
                CallForm::BracketArguments => several(calls, false),
                CallForm::SectionFenced | CallForm::Section => {
                    let [open, close] = section::CALLS;
                    sequence(vec![mark(text, open), several(calls, true), mark(text, close)])
                }
                // A model with this syntax ends its turn with a call.
                CallForm::Channels => json!({"type": "or", "elements": calls}),
            })
        };
        let content = content.map(|content| match form {
            CallForm::Channels => {
                let mut message = channel(text, "final");
                message.push(content);
                sequence(message)
            }
            _ => content,
        });
        // Forms in which a constraint can begin at a mark of plain text in the middle of an output.
        let trigger = match form {
            CallForm::TaggedJson(marks) | CallForm::TaggedParameters(ParameterTags { calls: marks, .. }) => {
                Some(marks[0]).filter(|_| is_plain(text, marks))
            }
            _ => None,
        };
        Ok(match (self.choice, content) {
            (Choice::None, content) => content,
            (Choice::Required, _) => Some(calls()?),
            (Choice::Auto, Some(content)) => Some(json!({"type": "or", "elements": [calls()?, content]})),
            (Choice::Auto, None) => match trigger.filter(|_| self.callable.iter().any(|tool| tool.strict)) {
                Some(trigger) => Some(json!({
                    "type": "triggered_tags", "triggers": [trigger], "tags": tags()?,
                    "stop_after_first": !self.parallel,
                })),
                None => None,
            },
        })
    }
}

/// Returns the schema that constrained arguments conform to. It forbids properties that the schema does not name,
/// unless the schema allows them explicitly, because models invent some.
fn closed(parameters: &Value) -> Value {
    let mut closed = parameters.clone();
    const OTHERS: [&str; 7] =
        ["additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"];
    if let Value::Object(schema) = &mut closed
        && schema.contains_key("properties")
        && !OTHERS.iter().any(|key| schema.contains_key(*key))
    {
        schema.insert("additionalProperties".to_owned(), false.into());
    }
    closed
}

fn constant(text: &str) -> Value {
    json!({"type": "const_string", "value": text})
}

fn sequence(elements: Vec<Value>) -> Value {
    json!({"type": "sequence", "elements": elements})
}

/// A newline that some versions of a model write and others do not.
fn optional_newline() -> Value {
    json!({"type": "optional", "content": constant("\n")})
}

/// Whether marks are plain text for the model, not special tokens.
fn is_plain(text: &Text, marks: &Marks) -> bool {
    marks.iter().all(|mark| text.special_id(mark).is_none())
}

/// A format between two marks; a tag if they are plain text.
fn enclosed(text: &Text, [open, close]: &Marks, [begin, end]: [String; 2], content: Value) -> Value {
    if is_plain(text, &[open, close]) {
        return json!({"type": "tag", "begin": format!("{open}{begin}"), "content": content, "end": format!("{end}{close}")});
    }
    let call = json!({"type": "tag", "begin": begin, "content": content, "end": end});
    let close = (!close.is_empty()).then(|| mark(text, close));
    sequence([Some(mark(text, open)), Some(call), close].into_iter().flatten().collect())
}

/// A call of a tool, as a format of a structural tag: in the forms whose marks are plain text, and in lists, a tag.
fn call(form: CallForm, text: &Text, tool: &Tool) -> Value {
    let [open, close] = TAGS;
    let mark = |name: &str| mark(text, name);
    let name = Value::from(tool.name.as_str());
    let schema = json!({"type": "json_schema", "json_schema": closed(&tool.parameters)});
    match form {
        CallForm::BracketList => json!({
            "type": "tag", "begin": format!("{{\"name\": {name}, \"arguments\": "), "content": schema, "end": "}",
        }),
        CallForm::BracketArguments => {
            sequence(vec![mark(brackets::CALLS), constant(&tool.name), mark(brackets::ARGUMENTS), schema])
        }
        CallForm::SectionFenced => sequence(vec![
            mark(section::CALL[0]),
            constant("function"),
            mark(section::SEPARATOR),
            constant(&format!("{}\n```json\n", tool.name)),
            schema,
            constant("\n```"),
            mark(section::CALL[1]),
        ]),
        CallForm::Section => sequence(vec![
            mark(section::CALL[0]),
            constant(&tool.name),
            mark(section::SEPARATOR),
            schema,
            mark(section::CALL[1]),
        ]),
        CallForm::Channels => sequence(vec![
            mark(channels::CHANNEL),
            constant(&format!("commentary to=functions.{} ", tool.name)),
            mark(channels::CONSTRAIN),
            constant("json"),
            mark(channels::MESSAGE),
            schema,
        ]),
        CallForm::TaggedPairs => {
            let mut elements = vec![mark(open), constant(&tool.name), optional_newline()];
            elements.extend(parameters(tool, |name, schema| pair(text, name, schema, tool)));
            elements.push(mark(close));
            sequence(elements)
        }
        CallForm::TaggedJson(marks) => {
            let [list, end] = if are_around_lists(marks) { ["[", "]"] } else { ["\n", "\n"] };
            let around = [format!("{list}{{\"name\": {name}, \"arguments\": "), format!("}}{end}")];
            enclosed(text, marks, around, schema)
        }
        CallForm::Named(tags) => named_call(text, tool, tags),
        CallForm::Json => json!({
            "type": "tag", "begin": format!("{{\"name\": {name}, \"parameters\": "), "content": schema, "end": "}",
        }),
        CallForm::TaggedParameters(tags) => {
            let [before, behind, end] = tags.function;
            let around = [format!("\n{before}{}{behind}\n", tool.name), format!("{end}\n")];
            let elements =
                parameters(tool, |name, schema| parameter(tags, name, schema, tool.is_json(name), &tool.parameters));
            let content = if elements.is_empty() { constant("") } else { sequence(elements) };
            enclosed(text, &tags.calls, around, content)
        }
    }
}

/// A tool's parameters, each as `format` writes it; those that are not required are optional.
fn parameters(tool: &Tool, format: impl Fn(&str, &Value) -> Value) -> Vec<Value> {
    let required = tool.parameters.get("required").and_then(Value::as_array);
    let required: HashSet<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    let parameter = |(name, schema): (&String, &Value)| {
        let parameter = format(name, schema);
        if required.contains(name.as_str()) { parameter } else { json!({"type": "optional", "content": parameter}) }
    };
    properties.into_iter().flatten().map(parameter).collect()
}

/// The keywords of a schema that contain definitions.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Returns whether a schema contains references.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(refers),
        Value::Array(list) => list.iter().any(refers),
        _ => false,
    }
}

/// Returns the size in bytes of the definitions of a tool's schema, summed over all parameters that get a copy of them.
fn copied_definitions(tool: &Tool) -> usize {
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    let copies = properties.into_iter().flatten().filter(|(name, schema)| tool.is_json(name) && refers(schema)).count();
    if copies == 0 {
        return 0;
    }
    let definitions = DEFINITIONS.iter().filter_map(|key| tool.parameters.get(*key));
    let bytes: usize = definitions.map(|definitions| definitions.to_string().len()).sum();
    bytes.saturating_mul(copies)
}

/// A parameter of a tagged call.
fn parameter(tags: &ParameterTags, name: &str, schema: &Value, is_json: bool, whole: &Value) -> Value {
    let line = if tags.lines { "\n" } else { "" };
    let [before, behind, end] = tags.parameter;
    let (begin, end) = (format!("{before}{name}{behind}{line}"), format!("{line}{end}\n"));
    let content = value(schema, is_json, whole).unwrap_or_else(|| json!({"type": "any_text"}));
    json!({"type": "tag", "begin": begin, "content": content, "end": end})
}

/// A call whose arguments have plain names. In a list it is a tag without marks around it.
fn named_call(text: &Text, tool: &Tool, tags: &NamedTags) -> Value {
    let [open, close] = tags.around;
    let begin = format!("{}{}{open}", tags.before, tool.name);
    let required = tool.parameters.get("required").and_then(Value::as_array);
    let required: HashSet<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    let named =
        properties.into_iter().flatten().map(|(name, of)| Some((name, named_value(text, name, of, tool, tags)?)));
    let content = match named.collect::<Option<Vec<_>>>() {
        Some(named) => {
            let argument = |(name, value): &(&String, Value)| {
                sequence(vec![constant(&format!("{name}{}", tags.between)), value.clone()])
            };
            let (first, rest): (Vec<_>, Vec<_>) = named.iter().partition(|(name, _)| required.contains(name.as_str()));
            let comma = if tags.quote.is_some() { "," } else { ", " };
            let following = |argument: Value| sequence(vec![constant(comma), argument]);
            let optional = |rest: &[&(&String, Value)]| -> Vec<Value> {
                let element = |of: &&(&String, Value)| json!({"type": "optional", "content": following(argument(of))});
                rest.iter().map(element).collect()
            };
            match first.split_first() {
                Some((one, others)) => {
                    let mut elements = vec![argument(one)];
                    elements.extend(others.iter().map(|of| following(argument(of))));
                    elements.extend(optional(&rest));
                    sequence(elements)
                }
                // Any one of the arguments may be the first.
                None => {
                    let mut choices = vec![constant("")];
                    for (at, one) in rest.iter().enumerate() {
                        let mut elements = vec![argument(one)];
                        elements.extend(optional(&rest[at + 1..]));
                        choices.push(sequence(elements));
                    }
                    json!({"type": "or", "elements": choices})
                }
            }
        }
        // Values that no format describes between marks: any arguments.
        None => {
            let [_, mark_behind] = tags.calls;
            return sequence(vec![mark(text, tags.calls[0]), constant(&begin), until(text, mark_behind)]);
        }
    };
    let call = json!({"type": "tag", "begin": begin, "content": content, "end": close.to_string()});
    match tags.list {
        Some(_) => call,
        None => sequence(vec![mark(text, tags.calls[0]), call, mark(text, tags.calls[1])]),
    }
}

/// Returns the format of the value of an argument with a plain name; `None` if it cannot be described: lists and objects with
/// texts between marks.
fn named_value(text: &Text, name: &str, schema: &Value, tool: &Tool, tags: &NamedTags) -> Option<Value> {
    let Some(quote) = tags.quote else {
        // JSON, which readers of Python's literals take too.
        return value(schema, true, &tool.parameters);
    };
    if !tool.is_json(name) {
        let between = value(schema, false, &tool.parameters);
        return Some(sequence(match between {
            Some(texts) => vec![mark(text, quote), texts, mark(text, quote)],
            None => vec![mark(text, quote), until(text, quote)],
        }));
    }
    let types = types(schema)?;
    let plain = types.iter().all(|kind| ["integer", "number", "boolean", "null"].contains(kind));
    value(schema, true, &tool.parameters).filter(|_| plain)
}

/// Returns the format of a parameter's value; `None` for arbitrary text.
fn value(schema: &Value, is_json: bool, whole: &Value) -> Option<Value> {
    if !is_json {
        let texts = schema.get("enum").and_then(Value::as_array)?;
        let texts = texts.iter().map(|text| json!({"type": "const_string", "value": text}));
        return Some(json!({"type": "or", "elements": texts.collect::<Vec<_>>()}));
    }
    let mut schema = schema.clone();
    // References are resolved from the root of the schema.
    let definitions: &[&str] = if refers(&schema) { &DEFINITIONS } else { &[] };
    for definitions in definitions {
        if let (Some(found), Value::Object(schema)) = (whole.get(*definitions), &mut schema) {
            schema.entry(*definitions).or_insert_with(|| found.clone());
        }
    }
    Some(json!({"type": "json_schema", "json_schema": schema}))
}

/// Returns the format of an argument with a marked name and a marked value.
fn pair(text: &Text, name: &str, schema: &Value, tool: &Tool) -> Value {
    let mark = |name: &str| mark(text, name);
    let mut elements = vec![mark(KEY[0]), constant(name), mark(KEY[1]), optional_newline(), mark(VALUE[0])];
    match value(schema, tool.is_json(name), &tool.parameters) {
        Some(value) => elements.extend([value, mark(VALUE[1])]),
        None => elements.push(until(text, VALUE[1])),
    }
    elements.push(optional_newline());
    sequence(elements)
}

/// Parses the `arguments` of a call in a conversation: JSON as text, or an object.
pub(super) fn arguments(path: &str, value: Option<Value>) -> Result<String, Refusal> {
    match value {
        None => Ok(String::new()),
        Some(object @ Value::Object(_)) => Ok(object.to_string()),
        Some(other) => fields::text(path, other),
    }
}

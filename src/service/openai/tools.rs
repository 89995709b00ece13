//! Tools of a request: their definitions, which of them the model may or must call, and the constraint that holds the
//! output to that, in the form in which the model writes calls.
//! Not here: reading calls from an output (`output`).

use super::fields::{self, Fields, refuse};
use crate::model::grammar::{GrammarError, MOST_BYTES};
use crate::model::text::chat::CallForm;
use crate::service::bounds;
use crate::service::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// The marks around a call, in the forms that have them.
pub(super) const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];
/// The longest name of a function, bytes.
const MOST_NAME: usize = 128;

/// A function that the model may call.
#[derive(Clone, Debug)]
pub(super) struct Tool {
    pub(super) name: String,
    /// The JSON Schema of its arguments.
    pub(super) parameters: Value,
    /// Whether calls of it must conform to the schema even where the model may choose not to call.
    pub(super) strict: bool,
}

impl Tool {
    fn property(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
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
}

/// Which calls an output may and must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Choice {
    /// None.
    #[default]
    None,
    /// As many as the model likes.
    Auto,
    /// At least one.
    Required,
}

/// The tools of a request.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    /// As the template gets them, JSON.
    pub(super) shown: Vec<String>,
    /// Those that may be called.
    pub(super) callable: Arc<[Tool]>,
    pub(super) choice: Choice,
    /// Whether one output may have several calls.
    pub(super) parallel: bool,
}

/// Reads a function of `tools`, and its definition as templates expect it.
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
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`. With `flat`, the members of a function stand in the tool
    /// itself, as the Responses API has them.
    pub(super) fn read(body: &mut Fields, flat: bool) -> Result<Tools, Refusal> {
        body.not_served(&["functions", "function_call"])?;
        let parallel = body.flag("parallel_tool_calls")?.unwrap_or(true);
        let (mut tools, mut shown) = (Vec::new(), Vec::new());
        let path = body.at("tools");
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
        if let Some(name) = &named {
            tools.retain(|tool| tool.name == *name);
            if tools.is_empty() {
                return Err(refuse(choice_path, &Value::from(name.as_str()), "a function of tools"));
            }
        } else if choice == Choice::Required && tools.is_empty() {
            return Err(refuse(path, &Value::Array(Vec::new()), "at least one tool, as tool_choice is \"required\""));
        }
        let choice = if tools.is_empty() { Choice::None } else { choice };
        if choice == Choice::None {
            // The model is not shown what it may not call.
            shown.clear();
            tools.clear();
        }
        Ok(Tools { shown, callable: tools.into(), choice, parallel: parallel && named.is_none() })
    }

    /// The format of a structural tag that the output must have, and `None` if it is free. `content` is the format of
    /// an answer without calls, if that is constrained.
    ///
    /// # Errors [`GrammarError::TooLong`] if the definitions of the schemas alone, with a copy for each parameter that
    /// refers to them, are longer than a constraint may be.
    pub(super) fn format(&self, form: CallForm, content: Option<Value>) -> Result<Option<Value>, GrammarError> {
        let tags = || -> Result<Vec<Value>, GrammarError> {
            if form == CallForm::TaggedParameters {
                let bytes = self.callable.iter().map(copied_definitions).fold(0, usize::saturating_add);
                if bytes > MOST_BYTES {
                    return Err(GrammarError::TooLong { bytes });
                }
            }
            Ok(self.callable.iter().map(|tool| tag(form, tool)).collect())
        };
        let separator = if form == CallForm::Json { "; " } else { "\n" };
        let calls = || -> Result<Value, GrammarError> {
            Ok(json!({
                "type": "tags_with_separator", "tags": tags()?, "separator": separator, "at_least_one": true,
                "stop_after_first": !self.parallel || form == CallForm::Json,
            }))
        };
        Ok(match (self.choice, content) {
            (Choice::None, content) => content,
            (Choice::Required, _) => Some(calls()?),
            (Choice::Auto, Some(content)) => Some(json!({"type": "or", "elements": [calls()?, content]})),
            (Choice::Auto, None) if form != CallForm::Json && self.callable.iter().any(|tool| tool.strict) => {
                let (trigger, parallel) = (CALL[0], self.parallel);
                Some(json!({
                    "type": "triggered_tags", "triggers": [trigger], "tags": tags()?, "stop_after_first": !parallel,
                }))
            }
            (Choice::Auto, None) => None,
        })
    }
}

/// The schema that constrained arguments conform to: without properties that it does not name, unless it says that
/// there may be others. A model would invent some.
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

/// A call of a tool as a tag of a structural tag.
fn tag(form: CallForm, tool: &Tool) -> Value {
    let [open, close] = CALL;
    let name = Value::from(tool.name.as_str());
    let schema = json!({"type": "json_schema", "json_schema": closed(&tool.parameters)});
    match form {
        CallForm::TaggedJson => json!({
            "type": "tag", "begin": format!("{open}\n{{\"name\": {name}, \"arguments\": "),
            "content": schema, "end": format!("}}\n{close}"),
        }),
        CallForm::Json => json!({
            "type": "tag", "begin": format!("{{\"name\": {name}, \"parameters\": "), "content": schema, "end": "}",
        }),
        CallForm::TaggedParameters => {
            let begin = format!("{open}\n<function={}>\n", tool.name);
            let end = format!("</function>\n{close}");
            let required = tool.parameters.get("required").and_then(Value::as_array);
            let required: HashSet<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
            let properties = tool.parameters.get("properties").and_then(Value::as_object);
            let parameter = |(name, schema): (&String, &Value)| {
                let parameter = parameter(name, schema, tool.is_json(name), &tool.parameters);
                if required.contains(name.as_str()) {
                    parameter
                } else {
                    json!({"type": "optional", "content": parameter})
                }
            };
            let elements: Vec<Value> = properties.into_iter().flatten().map(parameter).collect();
            let content = match elements.is_empty() {
                true => json!({"type": "const_string", "value": ""}),
                false => json!({"type": "sequence", "elements": elements}),
            };
            json!({"type": "tag", "begin": begin, "content": content, "end": end})
        }
    }
}

/// The keywords of a schema that hold definitions for references.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Whether a schema refers to another one.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(refers),
        Value::Array(list) => list.iter().any(refers),
        _ => false,
    }
}

/// The bytes of the definitions of a tool's schema, for all of its parameters that get a copy of them.
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
fn parameter(name: &str, schema: &Value, is_json: bool, whole: &Value) -> Value {
    let begin = format!("<parameter={name}>\n");
    let end = "\n</parameter>\n";
    let texts = schema.get("enum").and_then(Value::as_array).filter(|_| !is_json);
    let content = match texts {
        Some(texts) => {
            let texts = texts.iter().map(|text| json!({"type": "const_string", "value": text}));
            json!({"type": "or", "elements": texts.collect::<Vec<_>>()})
        }
        None if is_json => {
            let mut schema = schema.clone();
            // References begin at the whole schema.
            let definitions: &[&str] = if refers(&schema) { &DEFINITIONS } else { &[] };
            for definitions in definitions {
                if let (Some(found), Value::Object(schema)) = (whole.get(*definitions), &mut schema) {
                    schema.entry(*definitions).or_insert_with(|| found.clone());
                }
            }
            json!({"type": "json_schema", "json_schema": schema})
        }
        None => json!({"type": "any_text"}),
    };
    json!({"type": "tag", "begin": begin, "content": content, "end": end})
}

/// Reads the `arguments` of a call in a conversation: a text of JSON, or an object.
pub(super) fn arguments(path: &str, value: Option<Value>) -> Result<String, Refusal> {
    match value {
        None => Ok(String::new()),
        Some(object @ Value::Object(_)) => Ok(object.to_string()),
        Some(other) => fields::text(path, other),
    }
}

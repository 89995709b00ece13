//! Translates structural tags, as vLLM and XGrammar define them, to Lark grammars for llguidance. A structural tag
//! describes text that is free until a trigger, then follows a tag's format until the tag's end, then is free again;
//! formats can be composed.
//!
//! Not here: tags that begin with a token, and parts whose end cannot be determined. Both are rejected with an error
//! that names them.

use super::compiled::with_bounded_space;
use super::{GrammarError, MOST_BYTES, MOST_CHOICES, ebnf};
use serde_json::{Map, Value};
use std::fmt::Write;

/// A Lark regular expression that matches any text.
const FREE: &str = "/(?s:.*)/";

/// Returns the Lark grammar that a structural tag describes: either `{"triggers": …, "structures": …}` or `{"type":
/// "structural_tag", "format": …}`. All texts in it are plain text: the name of a special token does not stand for that
/// token, which is `{"type": "token", "token": ID}`, as a format or as the end of a tag.
///
/// # Errors [`GrammarError::TooLong`], or [`GrammarError::Invalid`] with what is wrong.
pub fn structural_tag(text: &str) -> Result<String, GrammarError> {
    if text.len() > MOST_BYTES {
        return Err(GrammarError::TooLong { bytes: text.len() });
    }
    let invalid = |reason: String| GrammarError::Invalid(format!("the structural tag {reason}"));
    let tag: Value = serde_json::from_str(text).map_err(|error| invalid(format!("is not JSON: {error}")))?;
    Lark::default().whole(&tag).map_err(|wrong| invalid(wrong.0))
}

/// A message about a defect of a part, with the part's name.
struct Wrong(String);

type Part = Result<String, Wrong>;

fn wrong<T>(reason: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong(reason.into()))
}

/// How a part without an end of its own is terminated.
#[derive(Clone, Copy)]
enum End<'a> {
    /// By the end of the output.
    Output,
    /// By the first of these texts, which are included in the part.
    Texts(&'a [String]),
    /// By this special token, which is included in the part. Free text contains no special tokens.
    Token(u32),
    /// Unknown: the part is followed by something that could also be text of the part.
    Unknown,
}

/// The grammar under construction. A part is a Lark expression that refers to these rules.
#[derive(Default)]
struct Lark {
    rules: String,
    count: usize,
}

/// Access to an object of a structural tag. Records the keys that were read, so that unknown keys can be rejected.
struct Fields<'a> {
    what: &'a str,
    map: &'a Map<String, Value>,
    asked: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    fn of(what: &'a str, value: &'a Value) -> Result<Fields<'a>, Wrong> {
        match value.as_object() {
            Some(map) => Ok(Fields { what, map, asked: vec!["type"] }),
            None => wrong(format!("has {what} that is no object")),
        }
    }

    fn find(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.push(key);
        // Some clients write all fields and give omitted optional ones as `null`.
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn get(&mut self, key: &'static str) -> Result<&'a Value, Wrong> {
        let what = self.what;
        self.find(key).ok_or_else(|| Wrong(format!("has {what} without \"{key}\"")))
    }

    fn text(&mut self, key: &'static str) -> Result<&'a str, Wrong> {
        let what = self.what;
        self.get(key)?.as_str().ok_or_else(|| Wrong(format!("has {what} whose \"{key}\" is no text")))
    }

    fn flag(&mut self, key: &'static str) -> Result<bool, Wrong> {
        let what = self.what;
        match self.find(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| Wrong(format!("has {what} whose \"{key}\" is no boolean"))),
        }
    }

    fn number(&mut self, key: &'static str) -> Result<i64, Wrong> {
        let what = self.what;
        self.get(key)?.as_i64().ok_or_else(|| Wrong(format!("has {what} whose \"{key}\" is no number")))
    }

    /// Returns the id of `token`. Names of tokens are not looked up.
    fn token(&mut self) -> Result<u32, Wrong> {
        let what = self.what;
        let id = self.get("token")?.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| Wrong(format!("has {what} whose \"token\" is no id")))
    }

    fn list(&mut self, key: &'static str) -> Result<&'a [Value], Wrong> {
        let what = self.what;
        match self.get(key)?.as_array() {
            Some(list) if list.len() > MOST_CHOICES => {
                wrong(format!("has {what} whose \"{key}\" holds {}, at most {MOST_CHOICES} are taken", list.len()))
            }
            Some(list) if !list.is_empty() => Ok(list),
            _ => wrong(format!("has {what} whose \"{key}\" is no list of at least one")),
        }
    }

    /// Returns a list of texts, none of them empty.
    fn texts(&mut self, key: &'static str) -> Result<Vec<String>, Wrong> {
        let what = self.what;
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let texts: Option<Vec<String>> = self.list(key)?.iter().map(text).collect();
        texts.ok_or_else(|| Wrong(format!("has {what} whose \"{key}\" holds what is no text, or an empty one")))
    }

    fn optional_texts(&mut self, key: &'static str) -> Result<Vec<String>, Wrong> {
        match self.find(key) {
            Some(Value::Array(list)) if list.is_empty() => Ok(Vec::new()),
            Some(_) => self.texts(key),
            None => Ok(Vec::new()),
        }
    }

    /// Rejects keys that were not read.
    fn done(self) -> Result<(), Wrong> {
        match self.map.iter().find(|(key, value)| !self.asked.contains(&key.as_str()) && !value.is_null()) {
            Some((key, _)) => wrong(format!("has {} with \"{key}\", which is not served", self.what)),
            None => Ok(()),
        }
    }
}

/// A tag: its beginning, and the name of the rule for everything after it. It is a rule because it may be used more
/// than once.
struct Tag {
    begin: String,
    rest: String,
}

impl Tag {
    /// Returns the expression for the tag without the first `given.len()` bytes of its beginning.
    fn after(&self, given: &str) -> String {
        join([literal(&self.begin[given.len()..]), self.rest.clone()])
    }
}

/// Returns the Lark literal of a text, or nothing for an empty text.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::from(text).to_string() }
}

fn join(parts: impl IntoIterator<Item = String>) -> String {
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

/// Returns the expression for an alternative of the parts. An empty part matches the empty text.
fn any(parts: impl IntoIterator<Item = String>) -> String {
    let shown = |part: String| if part.is_empty() { "\"\"".to_owned() } else { part };
    let parts: Vec<String> = parts.into_iter().map(shown).collect();
    format!("({})", parts.join(" | "))
}

/// Escapes a text for a Lark regular expression.
fn escaped(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        // Written as a code point, so that the character has no special meaning.
        if c.is_ascii_alphanumeric() {
            shown.push(c);
        } else {
            write!(shown, "\\u{{{:x}}}", u32::from(c)).expect("a string takes what is written");
        }
    }
    shown
}

impl Lark {
    fn whole(mut self, tag: &Value) -> Part {
        let mut fields = Fields::of("a value", tag)?;
        match fields.find("type").map(Value::as_str) {
            None | Some(Some("structural_tag")) => {}
            _ => return wrong("is of a \"type\" that is not \"structural_tag\""),
        }
        let start = match fields.find("format") {
            Some(format) => self.part(format, End::Output)?,
            None => {
                let triggers = fields.texts("triggers")?;
                let tags = fields.list("structures")?.iter().map(|tag| self.structure(tag));
                let tags = tags.collect::<Result<Vec<Tag>, Wrong>>()?;
                self.dispatch(
                    &Dispatch { triggers, tags, excludes: &[], at_least_one: false, one: false },
                    End::Output,
                )?
            }
        };
        fields.done()?;
        // The first line marks the text as a Lark grammar, whatever it contains.
        Ok(format!("%llguidance {{}}\nstart: {}\n{}", any([start]), self.rules))
    }

    /// Adds a rule and returns its name. A prefix in capitals makes it a terminal.
    fn rule(&mut self, prefix: &str, options: &str, body: &str) -> String {
        self.count += 1;
        let name = format!("{prefix}{}", self.count);
        writeln!(self.rules, "{name}{options}: {body}").expect("a string takes what is written");
        name
    }

    /// Translates a structure of the older form: a tag around a JSON Schema.
    fn structure(&mut self, value: &Value) -> Result<Tag, Wrong> {
        let mut fields = Fields::of("a structure", value)?;
        let (begin, end) = (fields.text("begin")?.to_owned(), fields.text("end")?);
        let content = schema(fields.get("schema")?)?;
        fields.done()?;
        Ok(Tag { begin, rest: self.rule("rest_", "", &join([content, literal(end)])) })
    }

    fn tag(&mut self, value: &Value) -> Result<Tag, Wrong> {
        let mut fields = Fields::of("a tag", value)?;
        if fields.find("type").is_some_and(|kind| kind != "tag") {
            return wrong(format!("has \"{}\" where a tag must be", shown(&value["type"])));
        }
        if value["begin"].is_object() {
            return wrong("has a tag that begins with a token, which is not served");
        }
        let begin = fields.text("begin")?.to_owned();
        if let Some(end) = value["end"].as_object() {
            let mut end = Fields { what: "an end of a tag", map: end, asked: vec!["type"] };
            if end.find("type").is_none_or(|kind| kind != "token") {
                return wrong("has a tag whose end is neither a text nor a token");
            }
            let id = end.token()?;
            end.done()?;
            fields.find("end");
            let content = fields.get("content")?;
            fields.done()?;
            let rest = any([self.part(content, End::Token(id))?]);
            return Ok(Tag { begin, rest: self.rule("rest_", "", &rest) });
        }
        let ends = match fields.get("end")? {
            Value::String(end) if end.is_empty() => Vec::new(),
            Value::String(end) => vec![end.clone()],
            _ => fields.texts("end")?,
        };
        let content = fields.get("content")?;
        fields.done()?;
        // Without an end text, the content must have an end of its own.
        let end = if ends.is_empty() { End::Unknown } else { End::Texts(&ends) };
        let rest = any([self.part(content, end)?]);
        Ok(Tag { begin, rest: self.rule("rest_", "", &rest) })
    }

    fn tags(&mut self, fields: &mut Fields<'_>) -> Result<Vec<Tag>, Wrong> {
        fields.list("tags")?.iter().map(|tag| self.tag(tag)).collect()
    }

    /// Translates a format, given how it is terminated.
    fn part(&mut self, format: &Value, end: End<'_>) -> Part {
        let kind = format.get("type").and_then(Value::as_str);
        let Some(kind) = kind else { return wrong("has a format without a \"type\"") };
        let mut fields = Fields::of(kind, format)?;
        let part = match kind {
            "any_text" => {
                let excludes = fields.optional_texts("excludes")?;
                fields.done()?;
                return self.free(&excludes, end);
            }
            "triggered_tags" => {
                let (triggers, excludes) = (fields.texts("triggers")?, fields.optional_texts("excludes")?);
                let (at_least_one, one) = (fields.flag("at_least_one")?, fields.flag("stop_after_first")?);
                let tags = self.tags(&mut fields)?;
                fields.done()?;
                return self.dispatch(&Dispatch { triggers, tags, excludes: &excludes, at_least_one, one }, end);
            }
            "sequence" => {
                let [before @ .., last] = fields.list("elements")? else { return wrong("has an empty sequence") };
                fields.done()?;
                let mut parts =
                    before.iter().map(|part| self.part(part, End::Unknown)).collect::<Result<Vec<String>, Wrong>>()?;
                parts.push(self.part(last, end)?);
                return Ok(join(parts));
            }
            "or" => {
                let parts = fields.list("elements")?.iter().map(|part| self.part(part, end));
                let parts = parts.collect::<Result<Vec<String>, Wrong>>()?;
                fields.done()?;
                return Ok(any(parts));
            }
            "const_string" => literal(fields.text("value")?),
            "token" => token(fields.token()?),
            "json_schema" => {
                if let Some(style) = fields.find("style").filter(|style| *style != "json") {
                    return wrong(format!("has a json_schema of the style {}, which is not served", shown(style)));
                }
                if fields.flag("any_order")? {
                    return wrong("has a json_schema with \"any_order\", which is not served");
                }
                schema(fields.get("json_schema")?)?
            }
            "regex" => {
                let pattern = fields.text("pattern")?;
                self.rule("REGEX_", "", &format!("/(?:{})/", llguidance::regex_to_lark(pattern, "")))
            }
            "grammar" => {
                let text = fields.text("grammar")?;
                let lark = if ebnf::is_ebnf(text) { ebnf::to_lark(text).map_err(Wrong)? } else { text.to_owned() };
                self.rule("grammar_", "", &format!("%lark {{\n{lark}\n}}"))
            }
            "tag" => {
                let tag = self.tag(format)?;
                return Ok(join([tag.after(""), ends(end)]));
            }
            "tags_with_separator" => {
                let separator = fields.text("separator")?.to_owned();
                let (at_least_one, one) = (fields.flag("at_least_one")?, fields.flag("stop_after_first")?);
                let tag = any(self.tags(&mut fields)?.iter().map(|tag| tag.after("")));
                let tag = self.rule("tag_", "", &tag);
                let more = if one { String::new() } else { format!("({})*", join([literal(&separator), tag.clone()])) };
                format!("({}){}", join([tag, more]), if at_least_one { "" } else { "?" })
            }
            "optional" | "plus" | "star" => {
                let times = match kind {
                    "optional" => "?",
                    "plus" => "+",
                    _ => "*",
                };
                let content = self.part(fields.get("content")?, End::Unknown)?;
                format!("{}{times}", any([content]))
            }
            "repeat" => {
                let (least, most) = (fields.number("min")?, fields.number("max")?);
                let content = any([self.part(fields.get("content")?, End::Unknown)?]);
                match (least, most) {
                    (0.., -1) => format!("{content}{{{least},}}"),
                    (0.., 1..) if least <= most => format!("{content}{{{least},{most}}}"),
                    _ => return wrong(format!("has a repeat of {least} to {most}")),
                }
            }
            other => return wrong(format!("has the format \"{}\", which is not served", shown(&Value::from(other)))),
        };
        fields.done()?;
        Ok(join([part, ends(end)]))
    }

    /// Returns free text that contains none of the `excludes`.
    fn free(&mut self, excludes: &[String], end: End<'_>) -> Part {
        let free = self.text(excludes);
        match end {
            End::Output => Ok(free),
            End::Texts(texts) => Ok(self.until(&free, texts)),
            End::Token(id) => Ok(join([free, token(id)])),
            End::Unknown => wrong(
                "has free text before something else: only the last of a sequence may be free, or what a tag's end ends",
            ),
        }
    }

    /// Returns a terminal for free text that contains none of the `excludes`.
    fn text(&mut self, excludes: &[String]) -> String {
        if excludes.is_empty() {
            return self.rule("FREE_", "", FREE);
        }
        let excluded: Vec<String> = excludes.iter().map(|text| escaped(text)).collect();
        self.rule("FREE_", "", &format!("{FREE} & ~/(?s:.*)(?:{})(?s:.*)/", excluded.join("|")))
    }

    /// Returns the shortest free text that ends with one of the `texts`.
    fn until(&mut self, free: &str, texts: &[String]) -> String {
        self.rule("until_", "[lazy]", &join([free.to_owned(), any(texts.iter().map(|text| literal(text)))]))
    }

    /// Returns free text in which each trigger begins a tag.
    fn dispatch(&mut self, dispatch: &Dispatch<'_>, end: End<'_>) -> Part {
        let Dispatch { triggers, tags, excludes, at_least_one, one } = dispatch;
        for tag in tags {
            let begun = triggers.iter().filter(|trigger| tag.begin.starts_with(trigger.as_str())).count();
            if begun != 1 {
                let begin = shown(&Value::from(tag.begin.as_str()));
                return wrong(format!("has a tag that {begun} of the triggers begin, must be one: {begin}"));
            }
        }
        let free = self.text(excludes);
        let mut behind_text = Vec::new();
        for trigger in triggers {
            let tags: Vec<&Tag> = tags.iter().filter(|tag| tag.begin.starts_with(trigger.as_str())).collect();
            if tags.is_empty() {
                return wrong(format!("has a trigger that begins no tag: {}", shown(&Value::from(trigger.as_str()))));
            }
            let head = self.until(&free, std::slice::from_ref(trigger));
            behind_text.push(join([head, any(tags.into_iter().map(|tag| tag.after(trigger)))]));
        }
        let behind_text = self.rule("tagged_", "", &any(behind_text));
        // The remaining text contains no trigger, since a trigger would have begun a tag.
        let rest = match end {
            End::Output => free,
            End::Texts(texts) => self.until(&free, texts),
            End::Token(id) => join([free, token(id)]),
            End::Unknown if *one && *at_least_one => String::new(),
            End::Unknown => {
                return wrong(
                    "has triggered_tags before something else: only the last of a sequence may be free, or what a tag's end ends",
                );
            }
        };
        let first = if *at_least_one { any(tags.iter().map(|tag| tag.after(""))) } else { behind_text.clone() };
        Ok(match (*at_least_one, *one) {
            (false, false) => join([format!("{behind_text}*"), rest]),
            (true, false) => join([first, format!("{behind_text}*"), rest]),
            (false, true) => any([join([first, ends(end)]), rest]),
            (true, true) => join([first, ends(end)]),
        })
    }
}

/// The parameters of `triggered_tags`.
struct Dispatch<'a> {
    triggers: Vec<String>,
    tags: Vec<Tag>,
    excludes: &'a [String],
    at_least_one: bool,
    /// Whether nothing follows the first tag (`stop_after_first`).
    one: bool,
}

/// Returns the terminating texts, to append to a part that has an end of its own.
fn ends(end: End<'_>) -> String {
    match end {
        End::Texts([text]) => literal(text),
        End::Texts(texts) => any(texts.iter().map(|text| literal(text))),
        End::Token(id) => token(id),
        End::Output | End::Unknown => String::new(),
    }
}

/// Returns the Lark expression for a token.
fn token(id: u32) -> String {
    format!("<[{id}]>")
}

fn schema(schema: &Value) -> Part {
    let schema = with_bounded_space(schema.clone()).map_err(|error| Wrong(format!("has a schema: {error}")))?;
    Ok(format!("%json {schema}"))
}

/// Returns a value's beginning, at most 60 characters, for an error message.
fn shown(value: &Value) -> String {
    const MOST: usize = 60;
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.chars().take(MOST).collect()
}

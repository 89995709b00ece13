//! Parsers of the text between the marks of tool calls: the name before JSON arguments (Mistral, DeepSeek), incremental
//! arguments, arguments with marked names and values (GLM), and arguments with plain names (Gemma, LFM2, OLMo).
//! Not here: the text around calls, and text that turns out not to be a call (`output`).

use super::pieces::{Piece, argument, end_of_arguments};
use super::tools::Tool;
use crate::model::text::chat::{KEY, NamedTags, TAGS, VALUE, brackets, section};
use serde_json::{Map, Value};

/// The maximum length of the name of a function or an argument, in bytes.
pub(super) const MOST_NAME: usize = 1024;

/// Finds the end of a JSON object.
#[derive(Debug, Default)]
pub(super) struct Nesting {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    /// Scans text of the object up to its end; returns the number of bytes, and whether the object has ended.
    pub(super) fn take(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if std::mem::take(&mut self.escaped) => {}
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ => {}
            }
        }
        (text.len(), false)
    }
}

/// The text before the arguments of a call.
pub(super) enum Head {
    /// Incomplete.
    More,
    /// The name of the call; the arguments begin after this number of bytes.
    Call { name: String, used: usize },
    /// A list of calls, which begins after this number of bytes.
    List { used: usize },
    /// An object with a call's name and arguments, which begins after this number of bytes.
    Object { used: usize },
    /// The end of the calls; text follows after this number of bytes.
    End { used: usize },
    /// No call.
    Bad,
}

pub(super) fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-.:/".contains(c)
}

pub(super) fn is_name(text: &str) -> bool {
    (1..=MOST_NAME).contains(&text.len()) && text.chars().all(in_name)
}

/// Parses the text after `[TOOL_CALLS]`: a list, or a name and `[ARGS]`, with an id between them in some versions.
pub(super) fn bracket_head(text: &str) -> Head {
    let shown = text.trim_start();
    let used = |rest: &str| text.len() - rest.len();
    match shown.chars().next() {
        None => return Head::More,
        Some('[') => return Head::List { used: used(&shown[1..]) },
        Some('{') => return Head::Object { used: used(shown) },
        Some(_) => {}
    }
    let length = shown.find(|c| !in_name(c)).unwrap_or(shown.len());
    let (name, rest) = shown.split_at(length);
    let mut rest = rest.trim_start();
    if rest.is_empty() && name.len() <= MOST_NAME {
        return Head::More;
    }
    if !is_name(name) {
        return Head::Bad;
    }
    loop {
        if rest.is_empty() {
            return Head::More;
        } else if rest.starts_with('{') {
            return Head::Call { name: name.to_owned(), used: used(rest) };
        } else if let Some(behind) = rest.strip_prefix(brackets::ARGUMENTS) {
            rest = behind.trim_start();
        } else if let Some(behind) = rest.strip_prefix(brackets::ID) {
            rest = behind.trim_start_matches(in_name).trim_start();
        } else if brackets::ARGUMENTS.starts_with(rest) || brackets::ID.starts_with(rest) {
            return Head::More;
        } else {
            return Head::Bad;
        }
    }
}

/// Parses the text after the mark before a JSON object of a call, or a list of them.
pub(super) fn json_head(text: &str) -> Head {
    let shown = text.trim_start();
    let used = text.len() - shown.len();
    match shown.chars().next() {
        None => Head::More,
        Some('[') => Head::List { used: used + 1 },
        Some('{') => Head::Object { used },
        Some(_) => Head::Bad,
    }
}

/// Parses the text after the beginning of DeepSeek's calls, or after one of them: the next call, or the end. A call has
/// its type before its name and its arguments in a code block, or only its name.
pub(super) fn section_head(text: &str) -> Head {
    let shown = text.trim_start();
    let used = |rest: &str| text.len() - rest.len();
    if let Some(rest) = shown.strip_prefix(section::CALLS[1]) {
        return Head::End { used: used(rest) };
    }
    let Some(call) = shown.strip_prefix(section::CALL[0]) else {
        let begins = section::CALLS[1].starts_with(shown) || section::CALL[0].starts_with(shown);
        return if begins { Head::More } else { Head::Bad };
    };
    let more = |waits: &str| if waits.len() <= MOST_NAME { Head::More } else { Head::Bad };
    let Some((first, behind)) = call.split_once(section::SEPARATOR) else { return more(call) };
    let arguments = behind.trim_start();
    if arguments.is_empty() {
        return Head::More;
    }
    let (name, arguments) = match arguments.starts_with('{') {
        true => (first, arguments),
        false => {
            let Some((name, block)) = arguments.split_once('\n') else { return more(arguments) };
            let block = block.trim_start();
            if "```json".starts_with(block) {
                return Head::More;
            }
            let Some(inner) = block.strip_prefix("```") else { return Head::Bad };
            (name, inner.strip_prefix("json").unwrap_or(inner).trim_start())
        }
    };
    let name = name.trim();
    match arguments.chars().next() {
        _ if !is_name(name) => Head::Bad,
        None => Head::More,
        Some('{') => Head::Call { name: name.to_owned(), used: used(arguments) },
        Some(_) => Head::Bad,
    }
}

/// The text after the arguments of one of DeepSeek's calls.
pub(super) enum Tail {
    /// Incomplete.
    More,
    /// The end of the call, with this number of bytes.
    End { used: usize },
    /// Anything else.
    Bad,
}

/// Parses the text after the arguments of one of DeepSeek's calls.
pub(super) fn section_tail(text: &str) -> Tail {
    let shown = text.trim_start();
    let mark = shown.strip_prefix("```").map_or(shown, str::trim_start);
    match mark.strip_prefix(section::CALL[1]) {
        Some(rest) => Tail::End { used: text.len() - rest.len() },
        None if section::CALL[1].starts_with(mark) || "```".starts_with(shown) => Tail::More,
        None => Tail::Bad,
    }
}

/// The parser of a call whose arguments have marked names and values. Each argument is emitted when it is complete.
#[derive(Debug, Default)]
pub(super) struct PairsCall {
    /// The unparsed text.
    pub(super) kept: String,
    /// The position from which the end of a value is searched.
    looked: usize,
    /// The function, once it is known.
    pub(super) name: Option<String>,
    /// The argument whose value follows, and whether its value has begun.
    key: Option<(String, bool)>,
    /// The number of arguments that were emitted.
    count: usize,
}

impl PairsCall {
    /// Parses text; returns the text after the end of the call, or all of it if it is not a call.
    pub(super) fn push(
        &mut self,
        text: &str,
        index: usize,
        tools: &[Tool],
        pieces: &mut Vec<Piece>,
    ) -> Result<Option<String>, String> {
        self.kept.push_str(text);
        loop {
            let Some(name) = &self.name else {
                let at = self.kept.find('<').unwrap_or(self.kept.len());
                let (name, rest) = self.kept.split_at(at);
                let marks = [KEY[0], TAGS[1]];
                if rest.is_empty() || !marks.iter().any(|mark| rest.starts_with(mark)) {
                    let so_far = if rest.is_empty() { name.trim_start() } else { name.trim() };
                    // A new line may follow the name.
                    let may_be = so_far.trim_end().is_empty() && rest.is_empty() || is_name(so_far.trim_end());
                    return match may_be && (rest.is_empty() || marks.iter().any(|mark| mark.starts_with(rest))) {
                        true => Ok(None),
                        false => Err(std::mem::take(&mut self.kept)),
                    };
                }
                if !is_name(name.trim()) {
                    return Err(std::mem::take(&mut self.kept));
                }
                let name = name.trim().to_owned();
                pieces.push(Piece::Call { index, name: name.clone() });
                self.kept.drain(..at);
                self.name = Some(name);
                continue;
            };
            let shown = self.kept.trim_start();
            match &mut self.key {
                None => {
                    if let Some(rest) = shown.strip_prefix(TAGS[1]) {
                        let rest = rest.to_owned();
                        end_of_arguments(index, self.count, pieces);
                        return Ok(Some(rest));
                    }
                    let key = shown.strip_prefix(KEY[0]);
                    match key.map(|rest| rest.split_once(KEY[1])) {
                        Some(Some((key, rest))) => {
                            let rest = rest.to_owned();
                            self.key = Some((key.trim().to_owned(), false));
                            self.kept = rest;
                        }
                        Some(None) if shown.len() <= MOST_NAME => return Ok(None),
                        None if TAGS[1].starts_with(shown) || KEY[0].starts_with(shown) => return Ok(None),
                        _ => {
                            // The call ends here; the rest is returned.
                            let rest = shown.to_owned();
                            end_of_arguments(index, self.count, pieces);
                            return Ok(Some(rest));
                        }
                    }
                }
                Some((key, begun @ false)) => {
                    if let Some(rest) = shown.strip_prefix(VALUE[0]) {
                        *begun = true;
                        let rest = rest.to_owned();
                        (self.kept, self.looked) = (rest, 0);
                    } else if VALUE[0].starts_with(shown) {
                        return Ok(None);
                    } else {
                        let rest = format!("{}{key}{}{}", KEY[0], KEY[1], self.kept);
                        end_of_arguments(index, self.count, pieces);
                        return Ok(Some(rest));
                    }
                }
                Some((key, true)) => {
                    let from = self.kept.floor_char_boundary(self.looked);
                    let Some(at) = self.kept[from..].find(VALUE[1]).map(|at| at + from) else {
                        self.looked = self.kept.len().saturating_sub(VALUE[1].len());
                        return Ok(None);
                    };
                    let value = &self.kept[..at];
                    let tool = tools.iter().find(|tool| tool.name == *name);
                    let value = match tool {
                        Some(tool) if tool.is_json(key) => tool.json(key, value),
                        Some(tool) if tool.is_text(key) => Value::from(value).to_string(),
                        _ if serde_json::from_str::<Value>(value).is_ok() => value.trim().to_owned(),
                        _ => Value::from(value).to_string(),
                    };
                    argument(index, &mut self.count, key, &value, pieces);
                    self.kept.drain(..at + VALUE[1].len());
                    self.key = None;
                }
            }
        }
    }
}

/// The parser of a call whose arguments have plain names. Each argument is emitted when it is complete.
#[derive(Debug)]
pub(super) struct NamedCall {
    tags: &'static NamedTags,
    /// The unparsed text.
    pub(super) kept: String,
    /// The function, once it is known.
    pub(super) name: Option<String>,
    /// The argument whose value follows.
    key: Option<String>,
    /// How far the end of the value was searched.
    scan: Scan,
    /// The number of arguments that were emitted.
    count: usize,
}

/// Whether a character ends the name of an argument, which `between` follows.
fn stops(c: char, between: char) -> bool {
    c == between || ",()[]{}\"'<\n".contains(c)
}

/// What is known of the name of an argument.
enum Key {
    /// Incomplete.
    More,
    /// The name; the value begins after this number of bytes.
    Name(String, usize),
    /// No name.
    Bad,
}

impl NamedCall {
    pub(super) fn new(tags: &'static NamedTags) -> NamedCall {
        NamedCall { tags, kept: String::new(), name: None, key: None, scan: Scan::default(), count: 0 }
    }

    /// Parses text; returns the text after the end of the call, or all of it if it is not a call.
    pub(super) fn push(
        &mut self,
        text: &str,
        index: usize,
        tools: &[Tool],
        pieces: &mut Vec<Piece>,
    ) -> Result<Option<String>, String> {
        self.kept.push_str(text);
        let [open, close] = self.tags.around;
        let [_, calls_end] = self.tags.calls;
        loop {
            let Some(name) = &self.name else {
                let shown = self.kept.trim_start();
                let Some(shown) = shown.strip_prefix(self.tags.before) else {
                    return match self.tags.before.starts_with(shown) {
                        true => Ok(None),
                        false => Err(std::mem::take(&mut self.kept)),
                    };
                };
                let Some(at) = shown.find(open) else {
                    return match shown.trim().is_empty() || is_name(shown.trim()) {
                        true => Ok(None),
                        false => Err(std::mem::take(&mut self.kept)),
                    };
                };
                let name = shown[..at].trim().to_owned();
                if !is_name(&name) {
                    return Err(std::mem::take(&mut self.kept));
                }
                pieces.push(Piece::Call { index, name: name.clone() });
                self.kept = shown[at + open.len_utf8()..].to_owned();
                self.name = Some(name);
                continue;
            };
            let tool = tools.iter().find(|tool| tool.name == *name);
            let Some(key) = &self.key else {
                self.kept = self.kept.trim_start_matches(|c: char| c.is_whitespace() || c == ',').to_owned();
                let shown = self.kept.as_str();
                if let Some(rest) = shown.strip_prefix(close) {
                    let rest = rest.to_owned();
                    end_of_arguments(index, self.count, pieces);
                    return Ok(Some(rest));
                }
                match self.key(tool) {
                    _ if calls_end.starts_with(shown) && shown.len() < calls_end.len() => return Ok(None),
                    Key::More => return Ok(None),
                    Key::Name(key, used) => {
                        let value = shown[used..].to_owned();
                        (self.key, self.kept, self.scan) = (Some(key), value, Scan::default());
                    }
                    Key::Bad => {
                        // The call ends here, if its bracket is missing too; the rest is returned.
                        end_of_arguments(index, self.count, pieces);
                        return Ok(Some(std::mem::take(&mut self.kept)));
                    }
                }
                continue;
            };
            let Some(at) = self.scan.end(&self.kept, self.tags) else { return Ok(None) };
            let written = self.kept[..at].trim();
            let value = match (Literal { rest: written, quote: self.tags.quote }.whole(), tool) {
                (Some(Value::Null), _) => "null".to_owned(),
                (Some(value), Some(tool)) if tool.is_json(key) => tool.json(key, &value.to_string()),
                (Some(value), Some(tool)) if tool.is_text(key) && !value.is_string() => {
                    Value::from(written).to_string()
                }
                (Some(value), _) => value.to_string(),
                (None, _) => Value::from(written).to_string(),
            };
            argument(index, &mut self.count, key, &value, pieces);
            self.kept.drain(..at);
            self.key = None;
        }
    }

    /// Reads the name of the argument with which the unparsed text begins.
    fn key(&self, tool: Option<&Tool>) -> Key {
        let (shown, between) = (self.kept.as_str(), self.tags.between);
        // Names of the schema that hold what ends other names.
        let stops = |c: char| stops(c, between);
        let mut odd: Vec<&str> = tool.into_iter().flat_map(Tool::names).filter(|name| name.contains(stops)).collect();
        odd.sort_by_key(|name| std::cmp::Reverse(name.len()));
        for name in odd {
            match shown.strip_prefix(name) {
                Some(behind) if behind.starts_with(between) => {
                    return Key::Name(name.to_owned(), name.len() + between.len_utf8());
                }
                Some("") => return Key::More,
                None if name.starts_with(shown) => return Key::More,
                _ => {}
            }
        }
        // Some models write a name as a text.
        let quotes = self.tags.quote.into_iter().chain(["\"", "'"]);
        let (key, behind) = match quotes.clone().find_map(|quote| shown.strip_prefix(quote).map(|rest| (quote, rest))) {
            Some((quote, rest)) => match rest.split_once(quote) {
                Some((key, behind)) => (key, behind),
                None if rest.len() <= MOST_NAME => return Key::More,
                None => return Key::Bad,
            },
            None if quotes.clone().any(|quote| quote.starts_with(shown)) => return Key::More,
            None => shown.split_at(shown.find(stops).unwrap_or(shown.len())),
        };
        match behind.trim_start().strip_prefix(between) {
            Some(_) if key.trim().is_empty() => Key::Bad,
            Some(value) => Key::Name(key.trim().to_owned(), shown.len() - value.len()),
            None if behind.trim().is_empty() && shown.len() <= MOST_NAME => Key::More,
            None => Key::Bad,
        }
    }
}

/// Finds the end of the value of an argument.
#[derive(Debug, Default)]
struct Scan {
    /// The number of bytes that were searched.
    at: usize,
    /// The number of brackets that are open.
    depth: u32,
    /// What ends the text that is open.
    inside: Option<Inside>,
    escaped: bool,
    /// The number of bytes up to which white space behind a quote was seen.
    space: usize,
}

/// What ends a text.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Inside {
    /// The mark around texts.
    Mark,
    /// This quote.
    Quote(char),
}

impl Scan {
    /// Returns the position behind the value with which `text` begins: that of the comma, of the bracket that closes the call, or of
    /// the mark behind the calls.
    fn end(&mut self, text: &str, tags: &NamedTags) -> Option<usize> {
        let [_, close] = tags.around;
        while let Some(c) = text[self.at..].chars().next() {
            let rest = &text[self.at..];
            let marks = tags.quote.into_iter().chain([tags.calls[1]]);
            if marks.clone().any(|mark| mark.len() > rest.len() && mark.starts_with(rest)) {
                return None;
            }
            if rest.starts_with(tags.calls[1]) {
                return Some(self.at);
            }
            if let Some(mark) = tags.quote.filter(|mark| rest.starts_with(mark))
                && !matches!(self.inside, Some(Inside::Quote(_)))
            {
                self.inside = if self.inside.is_some() { None } else { Some(Inside::Mark) };
                self.at += mark.len();
                continue;
            }
            match (self.inside, c) {
                (Some(Inside::Mark), _) => {}
                (Some(_), _) if std::mem::take(&mut self.escaped) => {}
                (Some(_), '\\') => self.escaped = true,
                (Some(Inside::Quote(open)), _) if c == open => {
                    if self.closes(text, tags)? {
                        self.inside = None;
                    }
                }
                (Some(_), _) => {}
                (None, '"') => self.inside = Some(Inside::Quote(c)),
                (None, '\'') if tags.quote.is_none() => self.inside = Some(Inside::Quote(c)),
                (None, ',') if self.depth == 0 => return Some(self.at),
                (None, _) if self.depth == 0 && c == close => return Some(self.at),
                (None, '(' | '[' | '{') => self.depth += 1,
                (None, ')' | ']' | '}') => self.depth = self.depth.saturating_sub(1),
                (None, _) => {}
            }
            self.at += c.len_utf8();
        }
        None
    }

    /// Whether the quote at the present place ends a text; `None` if that is not known yet. Models write quotes inside of texts as
    /// they are, so a quote ends a text only before what can follow a value: in a list or an object a comma, a colon or a bracket,
    /// and otherwise the next argument or the end of the call.
    fn closes(&mut self, text: &str, tags: &NamedTags) -> Option<bool> {
        let from = self.space.max(self.at + 1);
        let behind = text[from..].trim_start();
        self.space = text.len() - behind.len();
        let next = behind.chars().next()?;
        if self.depth > 0 {
            return Some(",)]}:".contains(next));
        }
        let [_, close] = tags.around;
        let rest = &behind[next.len_utf8()..];
        match next {
            ',' => {
                let name = rest.trim_start();
                let behind = name.trim_start_matches(|c: char| !stops(c, tags.between));
                match behind.chars().next() {
                    Some(c) => Some(c == tags.between && behind.len() < name.len()),
                    None if rest.len() <= MOST_NAME => None,
                    None => Some(true),
                }
            }
            _ if next == close => {
                let rest = rest.trim_start_matches([' ', '\t']);
                match rest.chars().next() {
                    Some(',' | ']' | ';' | '\n') => Some(true),
                    Some(_) if tags.calls[1].starts_with(rest) && rest.len() < tags.calls[1].len() => None,
                    Some(_) => Some(rest.starts_with(tags.calls[1])),
                    None => None,
                }
            }
            // The bracket is missing.
            _ if tags.calls[1].starts_with(behind) && behind.len() < tags.calls[1].len() => None,
            _ => Some(behind.starts_with(tags.calls[1])),
        }
    }
}

/// The deepest nesting of a value; deeper ones are taken as texts.
const MOST_DEPTH: u32 = 64;

/// A reader of a value as models write it in calls with plain names: JSON, Python's literals, and texts between marks.
struct Literal<'a> {
    rest: &'a str,
    quote: Option<&'a str>,
}

impl<'a> Literal<'a> {
    /// Returns the value; `None` if the text is none.
    fn whole(mut self) -> Option<Value> {
        // A text that is no part of another value ends at the last quote, whatever quotes are in it.
        if let Some(open) = self.rest.chars().next().filter(|c| *c == '"' || *c == '\'' && self.quote.is_none())
            && let Some(inner) = self.rest[1..].strip_suffix(open)
        {
            return Some(serde_json::from_str(self.rest).unwrap_or_else(|_| Value::from(unescaped(inner))));
        }
        let value = self.value(0)?;
        self.rest.trim().is_empty().then_some(value)
    }

    fn value(&mut self, depth: u32) -> Option<Value> {
        self.rest = self.rest.trim_start();
        if let Some(text) = self.text() {
            return Some(Value::from(text));
        }
        let close = match self.rest.chars().next()? {
            _ if depth > MOST_DEPTH => return None,
            '[' => ']',
            '(' => ')',
            '{' => '}',
            _ => return self.word(),
        };
        self.rest = &self.rest[1..];
        let (mut list, mut map) = (Vec::new(), Map::new());
        loop {
            self.rest = self.rest.trim_start();
            if let Some(rest) = self.rest.strip_prefix(close) {
                self.rest = rest;
                return Some(if close == '}' { Value::Object(map) } else { Value::Array(list) });
            }
            if close == '}' {
                let key = match self.text() {
                    Some(key) => key,
                    None => {
                        let (key, _) = self.rest.split_once(':')?;
                        self.rest = &self.rest[key.len()..];
                        key.trim().to_owned()
                    }
                };
                self.rest = self.rest.trim_start().strip_prefix(':')?;
                map.insert(key, self.value(depth + 1)?);
            } else {
                list.push(self.value(depth + 1)?);
            }
            self.rest = self.rest.trim_start();
            match self.rest.strip_prefix(',') {
                Some(rest) => self.rest = rest,
                None if self.rest.starts_with(close) => {}
                None => return None,
            }
        }
    }

    /// Reads a text, if one follows.
    fn text(&mut self) -> Option<String> {
        if let Some(inner) = self.quote.and_then(|mark| self.rest.strip_prefix(mark)) {
            let (text, rest) = inner.split_once(self.quote?)?;
            self.rest = rest;
            return Some(text.to_owned());
        }
        let open = self.rest.chars().next().filter(|c| "\"'".contains(*c))?;
        let mut escaped = false;
        for (at, c) in self.rest.char_indices().skip(1) {
            let behind = &self.rest[at + c.len_utf8()..];
            let follows = || behind.trim_start().chars().next().is_none_or(|c| ",)]}:".contains(c));
            if std::mem::take(&mut escaped) {
                continue;
            } else if c == '\\' {
                escaped = true;
            } else if c == open && follows() {
                let written = &self.rest[..at + 1];
                self.rest = behind;
                // JSON writes some characters as two.
                return Some(serde_json::from_str(written).unwrap_or_else(|_| unescaped(&written[1..at])));
            }
        }
        None
    }

    /// Reads a number or one of the words of JSON and Python.
    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| ",)]}".contains(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim() {
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            "None" => Some(Value::Null),
            word => match serde_json::from_str(word).ok().filter(|value: &Value| !value.is_string()) {
                // Texts between marks are plain to see, so what has no marks is a word.
                None if self.quote.is_some() && !word.is_empty() => Some(Value::from(word)),
                value => value,
            },
        }
    }
}

/// Returns a text of Python without its quotes as it is read.
fn unescaped(written: &str) -> String {
    let (mut text, mut rest) = (String::new(), written);
    while let Some(at) = rest.find('\\') {
        text.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        rest = &rest[escape(rest, &mut text)..];
    }
    text + rest
}

/// Appends what a backslash before `behind` stands for in a text of Python; returns the number of bytes of `behind` in it.
fn escape(behind: &str, text: &mut String) -> usize {
    let Some(c) = behind.chars().next() else {
        text.push('\\');
        return 0;
    };
    let digits = match c {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    let code = behind.get(1..1 + digits).filter(|_| digits > 0).and_then(|code| u32::from_str_radix(code, 16).ok());
    if let Some(code) = code.and_then(char::from_u32) {
        text.push(code);
        return 1 + digits;
    }
    match c {
        'n' => text.push('\n'),
        't' => text.push('\t'),
        'r' => text.push('\r'),
        '\n' => {}
        '\\' | '\'' | '"' | '/' => text.push(c),
        other => text.extend(['\\', other]),
    }
    c.len_utf8()
}

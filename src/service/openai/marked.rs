//! Parsers of the text between the marks of tool calls: the name before JSON arguments (Mistral, DeepSeek), incremental
//! arguments, and arguments with marked names and values (GLM).
//! Not here: the text around calls, and text that turns out not to be a call (`output`).

use super::pieces::Piece;
use super::tools::Tool;
use crate::model::text::chat::{KEY, TAGS, VALUE, brackets, section};
use serde_json::Value;

/// The maximum length of the name of a function or an argument, in bytes.
const MOST_NAME: usize = 1024;

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

fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-.:/".contains(c)
}

fn is_name(text: &str) -> bool {
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
                        self.end(index, pieces);
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
                            self.end(index, pieces);
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
                        self.end(index, pieces);
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
                    let comma = if self.count == 0 { "{" } else { ", " };
                    let text = format!("{comma}{}: {value}", Value::from(key.as_str()));
                    pieces.push(Piece::Arguments { index, text });
                    self.kept.drain(..at + VALUE[1].len());
                    self.key = None;
                    self.count += 1;
                }
            }
        }
    }

    /// Handles the end of the call.
    fn end(&mut self, index: usize, pieces: &mut Vec<Piece>) {
        let text = if self.count == 0 { "{}" } else { "}" }.to_owned();
        pieces.push(Piece::Arguments { index, text });
    }
}

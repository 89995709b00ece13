//! The parser of outputs that consist of messages on channels (harmony, the format of gpt-oss): messages on the channel
//! `analysis` are reasoning, messages to a function are tool calls, and all others are content.
//! Not here: the other formats of tool calls and reasoning (`output`).

use super::marked::Nesting;
use super::pieces::{Piece, content, held_of};
use super::tools::Tool;
use crate::model::text::chat::channels::{CALL, CHANNEL, END, MESSAGE, RETURN, START};
use std::sync::Arc;

/// The maximum length of a message's header in bytes.
const MOST_HEADER: usize = 512;
/// The prefix of a message's recipient.
const RECIPIENT: &str = "to=";
/// The prefix of a recipient that is a function.
const FUNCTIONS: &str = "functions.";
/// The marks that end a message.
const ENDS: [&str; 3] = [END, CALL, RETURN];
/// The marks that begin a message, even if the mark that ends the previous message is missing.
const BEGINS: [&str; 2] = [START, CHANNEL];

/// The reader of an output of messages.
#[derive(Debug)]
pub(super) struct Channels {
    /// The tools that the output may call; `None` if calls are not parsed.
    tools: Option<Arc<[Tool]>>,
    /// The number of calls that have begun.
    count: usize,
    /// Whether nothing was parsed yet.
    first: bool,
    /// Whether previous messages contained reasoning, and content. A newline separates the texts of two messages.
    told: [bool; 2],
    separate: bool,
    at: At,
}

#[derive(Debug)]
enum At {
    /// In the header of a message; with the header so far.
    Header(String),
    /// In reasoning (`true`) or content; with the held-back text.
    Body(bool, String),
    /// In a message that is emitted unparsed, with its marks.
    Raw(String),
    /// Before the arguments of a call of this function; with the text since the beginning of the message.
    Call { name: String, raw: String, kept: String },
    /// In the arguments of a call.
    Arguments(Nesting),
    /// After the arguments.
    Behind(String),
    /// The output has no messages, for example because a constraint does not describe any.
    Plain,
}

/// The kind of message that a header announces.
enum Header {
    Reasoning,
    Content,
    Call(String),
    /// A message to another recipient, or of another role.
    Other,
}

/// Returns the first of `marks` in a text, and its position.
fn first_of(text: &str, marks: impl Iterator<Item = &'static str>) -> Option<(usize, &'static str)> {
    marks.filter_map(|mark| text.find(mark).map(|at| (at, mark))).min()
}

fn all_marks() -> impl Iterator<Item = &'static str> {
    ENDS.into_iter().chain(BEGINS)
}

/// Returns the word at the beginning of a text.
fn word(text: &str) -> &str {
    let end = text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len());
    &text[..end]
}

impl Channels {
    pub(super) fn new(tools: Option<Arc<[Tool]>>) -> Channels {
        Channels { tools, count: 0, first: true, told: [false; 2], separate: false, at: At::Header(String::new()) }
    }

    pub(super) fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        let mut rest = text.to_owned();
        // Each round consumes text or leaves a state.
        while !rest.is_empty() {
            rest = self.step(rest, pieces);
        }
    }

    /// Ends the output: emits the held-back text.
    pub(super) fn finish(&mut self, pieces: &mut Vec<Piece>) {
        match std::mem::replace(&mut self.at, At::Plain) {
            // The beginning of a header without a recipient is dropped.
            At::Header(kept) | At::Behind(kept)
                if kept.trim().is_empty()
                    || BEGINS.iter().any(|mark| kept.trim_start().starts_with(mark)) && !kept.contains(RECIPIENT) => {}
            At::Header(kept) | At::Behind(kept) | At::Raw(kept) => content(&kept, pieces),
            At::Body(reasoning, kept) => self.tell(reasoning, kept, pieces),
            At::Call { raw, kept, .. } => content(&format!("{raw}{kept}"), pieces),
            At::Arguments(_) | At::Plain => {}
        }
    }

    /// Parses some text and returns the rest of it.
    fn step(&mut self, text: String, pieces: &mut Vec<Piece>) -> String {
        match &mut self.at {
            At::Header(kept) => {
                kept.push_str(&text);
                let kept = std::mem::take(kept);
                self.header(kept, pieces)
            }
            At::Body(reasoning, kept) => {
                let reasoning = *reasoning;
                kept.push_str(&text);
                let mut shown = std::mem::take(kept);
                let Some((at, mark)) = first_of(&shown, all_marks()) else {
                    *kept = shown.split_off(shown.len() - held_of(&shown, all_marks()));
                    self.tell(reasoning, shown, pieces);
                    return String::new();
                };
                let rest = shown.split_off(at);
                self.tell(reasoning, shown, pieces);
                self.next(mark, rest)
            }
            At::Raw(kept) => {
                kept.push_str(&text);
                let mut shown = std::mem::take(kept);
                let Some((at, mark)) = first_of(&shown, all_marks()) else {
                    *kept = shown.split_off(shown.len() - held_of(&shown, all_marks()));
                    content(&shown, pieces);
                    return String::new();
                };
                let rest = shown.split_off(at + if ENDS.contains(&mark) { mark.len() } else { 0 });
                content(&shown, pieces);
                self.at = At::Header(String::new());
                rest
            }
            At::Call { name, raw, kept } => {
                kept.push_str(&text);
                let arguments = kept.trim_start();
                if arguments.is_empty() {
                    return String::new();
                }
                if arguments.starts_with('{') {
                    let rest = arguments.to_owned();
                    pieces.push(Piece::Call { index: self.count, name: std::mem::take(name) });
                    self.at = At::Arguments(Nesting::default());
                    return rest;
                }
                // The arguments are not a JSON object, so this is not a call.
                content(raw, pieces);
                let rest = std::mem::take(kept);
                self.at = At::Raw(String::new());
                rest
            }
            At::Arguments(nesting) => {
                let (used, ended) = nesting.take(&text);
                pieces.push(Piece::Arguments { index: self.count, text: text[..used].to_owned() });
                if ended {
                    self.count += 1;
                    self.at = At::Behind(String::new());
                }
                text[used..].to_owned()
            }
            At::Behind(kept) => {
                kept.push_str(&text);
                let rest = kept.trim_start().to_owned();
                if let Some(mark) = all_marks().find(|mark| rest.starts_with(mark)) {
                    return self.next(mark, rest);
                }
                if !all_marks().any(|mark| mark.starts_with(&rest)) {
                    self.begin(false);
                    return rest;
                }
                String::new()
            }
            At::Plain => {
                content(&text, pieces);
                String::new()
            }
        }
    }

    /// Parses the header of a message, or the beginning of one.
    fn header(&mut self, kept: String, pieces: &mut Vec<Piece>) -> String {
        let shown = kept.trim_start();
        let begins = || BEGINS.into_iter().chain([RECIPIENT]);
        if !begins().any(|mark| shown.starts_with(mark)) {
            if begins().any(|mark| mark.starts_with(shown)) {
                self.at = At::Header(kept);
                return String::new();
            }
            if self.first {
                self.at = At::Plain;
            } else {
                self.begin(false);
            }
            return kept;
        }
        let end = match shown.find(MESSAGE) {
            Some(at) if at <= MOST_HEADER => at,
            None if shown.len() < MOST_HEADER + MESSAGE.len() => {
                self.at = At::Header(kept);
                return String::new();
            }
            // This is not a header. Its first mark is emitted, so that it is not parsed as the beginning of a header
            // again.
            _ => {
                let mark = begins().find(|mark| shown.starts_with(mark)).map_or(0, str::len);
                content(&shown[..mark], pieces);
                let rest = shown[mark..].to_owned();
                (self.at, self.first) = (At::Raw(String::new()), false);
                return rest;
            }
        };
        self.first = false;
        let (header, rest) = (&shown[..end], &shown[end + MESSAGE.len()..]);
        let raw = format!("{header}{MESSAGE}");
        match self.read(header) {
            Header::Reasoning => self.begin(true),
            Header::Content => self.begin(false),
            Header::Call(name) => self.at = At::Call { name, raw, kept: String::new() },
            Header::Other => {
                content(&raw, pieces);
                self.at = At::Raw(String::new());
            }
        }
        rest.to_owned()
    }

    fn read(&self, header: &str) -> Header {
        if header.strip_prefix(START).is_some_and(|role| word(role) != "assistant") {
            return Header::Other;
        }
        let channel = header.split_once(CHANNEL).map_or("", |(_, rest)| word(rest));
        let recipient = header.split_once(RECIPIENT).map(|(_, rest)| word(rest));
        match (recipient, &self.tools) {
            (None, _) if channel == "analysis" => Header::Reasoning,
            (None, _) => Header::Content,
            (Some(recipient), Some(tools)) => {
                let name = recipient.strip_prefix(FUNCTIONS);
                let known = || tools.iter().any(|tool| tool.name == recipient).then_some(recipient);
                match name.filter(|name| !name.is_empty()).or_else(known) {
                    Some(name) => Header::Call(name.to_owned()),
                    None => Header::Other,
                }
            }
            (Some(_), None) => Header::Other,
        }
    }

    /// Begins the content of a message.
    fn begin(&mut self, reasoning: bool) {
        self.separate = self.told[usize::from(reasoning)];
        self.at = At::Body(reasoning, String::new());
    }

    /// Ends a message at this mark, with which `rest` begins.
    fn next(&mut self, mark: &str, rest: String) -> String {
        self.at = At::Header(String::new());
        if BEGINS.contains(&mark) { rest } else { rest[mark.len()..].to_owned() }
    }

    fn tell(&mut self, reasoning: bool, text: String, pieces: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        self.told[usize::from(reasoning)] = true;
        let text = if std::mem::take(&mut self.separate) { format!("\n{text}") } else { text };
        pieces.push(if reasoning { Piece::Reasoning(text) } else { Piece::Content(text) });
    }
}

//! Splits the text of an output, as it is generated, into reasoning, content and tool calls. Text that may be the
//! beginning of a mark is held back until that is known.
//! Not here: outputs that consist of messages (`channels`), the text of calls between marks (`marked`), constraining
//! calls (`tools`), and the JSON of answers.

use super::channels::Channels;
use super::marked::{
    Head, MOST_NAME, NamedCall, Nesting, PairsCall, Tail, bracket_head, in_name, is_name, json_head, section_head,
    section_tail,
};
use super::pieces::{Piece, argument, content, end_of_arguments, held};
use super::tools::Tool;
use crate::model::text::chat::{CallForm, Marks, NamedTags, ParameterTags, TAGS, brackets, channel_of, section};
use crate::service::prepare::Reasons;
use serde_json::Value;
use std::sync::Arc;

/// The parser of one output.
#[derive(Debug)]
pub(super) enum Output {
    /// Reasoning and tool calls are enclosed in marks.
    Marked(Box<Marked>),
    /// The output consists of messages (harmony).
    Channels(Box<Channels>),
}

/// The parser of an output whose reasoning and tool calls are enclosed in marks.
#[derive(Debug)]
pub(super) struct Marked {
    reasoning: ReasoningAt,
    calls: Option<Calls>,
}

#[derive(Debug)]
enum ReasoningAt {
    /// At the beginning, after this text, which may become the opening mark.
    Before(&'static Marks, String),
    /// In the reasoning; with the name of a channel that may come first, the closing mark, the held-back text, and whether a
    /// piece was emitted.
    Inside { channel: &'static str, close: &'static str, held: String, told: bool },
    /// After the reasoning, before the content: white space is dropped.
    Behind,
    /// In the content, or there is no reasoning.
    Content,
}

impl ReasoningAt {
    /// Behind the first one of these marks.
    fn inside(marks: &'static Marks) -> ReasoningAt {
        ReasoningAt::Inside { channel: channel_of(marks), close: marks[1], held: String::new(), told: false }
    }
}

impl Output {
    /// Creates the parser of an output with this reasoning. `tools` are the tools that the output may call, if any, and
    /// the syntax of the calls.
    pub(super) fn new(reasons: Reasons, form: Option<CallForm>, tools: &Arc<[Tool]>) -> Output {
        let reasoning = match reasons {
            Reasons::Never => ReasoningAt::Content,
            Reasons::IfOpened(marks) => ReasoningAt::Before(marks, String::new()),
            Reasons::Opened(marks) => ReasoningAt::inside(marks),
            Reasons::Channel => {
                let tools = form.map(|_| Arc::clone(tools));
                return Output::Channels(Box::new(Channels::new(tools)));
            }
        };
        // If the prompt ends inside the content of a message, the output contains no calls.
        let form = form.filter(|form| *form != CallForm::Channels);
        let calls = form.map(|form| Calls::new(form, tools));
        Output::Marked(Box::new(Marked { reasoning, calls }))
    }

    /// Takes more text.
    pub(super) fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        match self {
            Output::Marked(marked) => marked.push(text, pieces),
            Output::Channels(channels) => channels.push(text, pieces),
        }
    }

    /// Ends the output: emits the held-back text.
    pub(super) fn finish(&mut self, pieces: &mut Vec<Piece>) {
        match self {
            Output::Marked(marked) => marked.finish(pieces),
            Output::Channels(channels) => channels.finish(pieces),
        }
    }
}

impl Marked {
    fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        match &mut self.reasoning {
            ReasoningAt::Before(marks, begun) => {
                begun.push_str(text);
                let shown = begun.trim_start();
                if let Some(rest) = shown.strip_prefix(marks[0]) {
                    let rest = rest.to_owned();
                    self.reasoning = ReasoningAt::inside(marks);
                    self.push(&rest, pieces);
                } else if !marks[0].starts_with(shown) {
                    let begun = std::mem::take(begun);
                    self.reasoning = ReasoningAt::Content;
                    self.content(&begun, pieces);
                }
            }
            ReasoningAt::Inside { channel, close, held: kept, told } => {
                let close: &str = close;
                kept.push_str(text);
                if !channel.is_empty() {
                    let shown = kept.trim_start();
                    match shown.strip_prefix(*channel) {
                        Some("") => return,
                        Some(rest) if rest.starts_with(|c: char| c.is_whitespace() || c == '<') => {
                            *kept = rest.to_owned()
                        }
                        None if channel.starts_with(shown) => return,
                        _ => {}
                    }
                    *channel = "";
                }
                if let Some(at) = kept.find(close) {
                    let rest = kept.split_off(at).split_off(close.len());
                    let shown = if *told { kept.trim_end() } else { kept.trim() };
                    if !shown.is_empty() {
                        pieces.push(Piece::Reasoning(shown.to_owned()));
                    }
                    self.reasoning = ReasoningAt::Behind;
                    self.push(&rest, pieces);
                    return;
                }
                let rest = kept.split_off(kept.len() - held(kept, close, true));
                let shown = if *told { kept.as_str() } else { kept.trim_start() };
                if !shown.is_empty() {
                    pieces.push(Piece::Reasoning(shown.to_owned()));
                    *told = true;
                }
                *kept = rest;
            }
            ReasoningAt::Behind => {
                let shown = text.trim_start();
                if !shown.is_empty() {
                    self.reasoning = ReasoningAt::Content;
                    self.content(shown, pieces);
                }
            }
            ReasoningAt::Content => self.content(text, pieces),
        }
    }

    fn finish(&mut self, pieces: &mut Vec<Piece>) {
        match std::mem::replace(&mut self.reasoning, ReasoningAt::Content) {
            ReasoningAt::Before(_, begun) => self.content(&begun, pieces),
            ReasoningAt::Inside { held, .. } if !held.trim().is_empty() => pieces.push(Piece::Reasoning(held)),
            _ => {}
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(pieces);
        }
    }

    fn content(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        match &mut self.calls {
            Some(calls) => calls.push(text, pieces),
            None => content(text, pieces),
        }
    }
}

/// The parser of tool calls in a text.
#[derive(Debug)]
struct Calls {
    form: CallForm,
    tools: Arc<[Tool]>,
    /// The number of calls that were parsed.
    count: usize,
    /// The text since the mark that opened a call, or since the last call of a list. It becomes content if no call
    /// follows.
    opened: String,
    /// Whether calls are elements of a list.
    listed: bool,
    at: CallsAt,
}

#[derive(Debug)]
enum CallsAt {
    /// In content; with the held-back text.
    Content(String),
    /// The parser is at a place where a bare JSON object may begin. Holds the white space so far.
    Start(String),
    /// In a JSON object.
    Object(Box<CallObject>),
    /// In a call with tagged parameters.
    Tagged(TaggedCall),
    /// In a call with marked names and values of arguments.
    Pairs(PairsCall),
    /// In a call whose arguments have plain names.
    Named(NamedCall),
    /// Before, between or behind such calls; with the text so far.
    Between(&'static NamedTags, String),
    /// Before the arguments of a call; with the text so far.
    Head(String),
    /// In a call's arguments.
    Arguments(Nesting),
    /// After the arguments of a call; with the text so far.
    Tail(String),
    /// Between the elements of a list.
    List,
    /// After a call, before its closing mark; with the unparsed text.
    Close(String),
}

/// The mark that opens a call or a section of calls.
fn opening(form: CallForm) -> Option<&'static str> {
    match form {
        CallForm::TaggedJson([open, _]) => Some(open),
        CallForm::TaggedParameters(tags) => Some(tags.calls[0]),
        CallForm::Named(tags) => Some(tags.calls[0]),
        CallForm::TaggedPairs => Some(TAGS[0]),
        CallForm::BracketList | CallForm::BracketArguments => Some(brackets::CALLS),
        CallForm::SectionFenced | CallForm::Section => Some(section::CALLS[0]),
        CallForm::Json | CallForm::Channels => None,
    }
}

/// The mark behind a call, in the forms in which a call waits for it ([`CallsAt::Close`]).
fn closing(form: CallForm) -> &'static str {
    match form {
        CallForm::TaggedJson([_, close]) => close,
        CallForm::TaggedParameters(tags) => tags.calls[1],
        _ => TAGS[1],
    }
}

fn in_content() -> CallsAt {
    CallsAt::Content(String::new())
}

impl Calls {
    fn new(form: CallForm, tools: &Arc<[Tool]>) -> Calls {
        let at = if form == CallForm::Json { CallsAt::Start(String::new()) } else { in_content() };
        Calls { form, tools: Arc::clone(tools), count: 0, opened: String::new(), listed: false, at }
    }

    fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        let mut rest = text.to_owned();
        // Each round consumes text or leaves a state for good.
        while !rest.is_empty() {
            rest = self.step(rest, pieces);
        }
    }

    /// Parses some text and returns the rest of it.
    fn step(&mut self, text: String, pieces: &mut Vec<Piece>) -> String {
        match &mut self.at {
            CallsAt::Content(kept) => {
                let Some(open) = opening(self.form) else {
                    content(&text, pieces);
                    return String::new();
                };
                kept.push_str(&text);
                if let Some(at) = kept.find(open) {
                    let rest = kept.split_off(at).split_off(open.len());
                    let shown = kept.trim_end();
                    content(shown, pieces);
                    self.opened = format!("{}{open}", &kept[shown.len()..]);
                    self.at = match self.form {
                        CallForm::TaggedParameters(tags) => CallsAt::Tagged(TaggedCall::new(tags)),
                        CallForm::TaggedPairs => CallsAt::Pairs(PairsCall::default()),
                        CallForm::Named(tags) => CallsAt::Between(tags, String::new()),
                        CallForm::Json | CallForm::Channels => CallsAt::Object(self.object()),
                        CallForm::TaggedJson(_)
                        | CallForm::BracketList
                        | CallForm::BracketArguments
                        | CallForm::SectionFenced
                        | CallForm::Section => CallsAt::Head(String::new()),
                    };
                    return rest;
                }
                let rest = kept.split_off(kept.len() - held(kept, open, true));
                content(kept, pieces);
                *kept = rest;
                String::new()
            }
            CallsAt::Start(space) => {
                let shown = text.trim_start();
                if shown.is_empty() {
                    space.push_str(&text);
                    return String::new();
                }
                // Further calls are separated by semicolons.
                let shown = if self.count > 0 { shown.strip_prefix(';').unwrap_or(shown).trim_start() } else { shown };
                if shown.is_empty() || shown.starts_with('{') {
                    let shown = shown.to_owned();
                    if !shown.is_empty() {
                        // White space before an object that is no call is content like that.
                        if self.count == 0 {
                            self.opened = format!("{space}{}", &text[..text.len() - shown.len()]);
                        }
                        self.at = CallsAt::Object(self.object());
                    }
                    return shown;
                }
                let all = format!("{space}{text}");
                self.at = in_content();
                all
            }
            CallsAt::Object(object) => {
                let index = self.count;
                let used = object.push(&text, index, pieces);
                let rest = text[used..].to_owned();
                match object.state {
                    At::Done => self.called(),
                    // The beginning of the call was emitted, so the rest is dropped.
                    At::Bad if object.named() => self.called(),
                    At::Bad => {
                        let raw = std::mem::take(&mut object.raw);
                        return self.broken(raw + &rest, pieces);
                    }
                    _ => {}
                }
                rest
            }
            CallsAt::Tagged(call) => {
                let read = call.push(&text, self.count, &self.tools, pieces);
                self.after_call(read, pieces)
            }
            CallsAt::Pairs(call) => {
                let read = call.push(&text, self.count, &self.tools, pieces);
                self.after_call(read, pieces)
            }
            CallsAt::Named(call) => {
                let read = call.push(&text, self.count, &self.tools, pieces);
                self.after_call(read, pieces)
            }
            CallsAt::Between(tags, kept) => {
                kept.push_str(&text);
                let [_, close] = tags.calls;
                let lists = |c: char| tags.list.is_some() && ",;[]".contains(c);
                let begins = kept.find(|c: char| !c.is_whitespace() && !lists(c)).unwrap_or(kept.len());
                let dropped: String = kept.drain(..begins).collect();
                if !self.opened.is_empty() {
                    self.opened.push_str(&dropped);
                }
                let shown = kept.as_str();
                if close.starts_with(shown) && shown.len() < close.len() {
                    return String::new();
                }
                if shown.starts_with(tags.before) && shown.starts_with(in_name) {
                    let rest = shown.to_owned();
                    self.at = CallsAt::Named(NamedCall::new(tags));
                    return rest;
                }
                if tags.before.starts_with(shown) && shown.len() < tags.before.len() {
                    return String::new();
                }
                let rest = shown.strip_prefix(close).map(str::to_owned);
                let kept = std::mem::take(kept);
                let Some(rest) = rest else { return self.broken(kept, pieces) };
                // Marks without calls are emitted unchanged.
                if !self.opened.is_empty() {
                    content(&format!("{}{close}", self.opened), pieces);
                }
                self.opened.clear();
                self.at = in_content();
                rest
            }
            CallsAt::Head(kept) => {
                kept.push_str(&text);
                let head = match self.form {
                    CallForm::SectionFenced | CallForm::Section => section_head(kept),
                    CallForm::TaggedJson(_) => json_head(kept),
                    _ => bracket_head(kept),
                };
                if matches!(head, Head::More) {
                    return String::new();
                }
                let kept = std::mem::take(kept);
                match head {
                    Head::More | Head::Bad => self.broken(kept, pieces),
                    Head::Call { name, used } => {
                        pieces.push(Piece::Call { index: self.count, name });
                        self.opened.clear();
                        self.at = CallsAt::Arguments(Nesting::default());
                        kept[used..].to_owned()
                    }
                    Head::List { used } => {
                        self.opened.push_str(&kept[..used]);
                        (self.at, self.listed) = (CallsAt::List, true);
                        kept[used..].to_owned()
                    }
                    Head::Object { used } => {
                        self.opened.push_str(&kept[..used]);
                        self.at = CallsAt::Object(self.object());
                        kept[used..].to_owned()
                    }
                    Head::End { used } => {
                        // A section without calls is emitted unchanged.
                        if !self.opened.is_empty() {
                            content(&format!("{}{}", self.opened, &kept[..used]), pieces);
                        }
                        self.opened.clear();
                        self.at = in_content();
                        kept[used..].to_owned()
                    }
                }
            }
            CallsAt::Arguments(nesting) => {
                let (used, ended) = nesting.take(&text);
                pieces.push(Piece::Arguments { index: self.count, text: text[..used].to_owned() });
                if ended {
                    self.called();
                }
                text[used..].to_owned()
            }
            CallsAt::Tail(kept) => {
                kept.push_str(&text);
                match section_tail(kept) {
                    Tail::More => String::new(),
                    Tail::End { used } => {
                        let rest = kept.split_off(used);
                        self.at = CallsAt::Head(String::new());
                        rest
                    }
                    Tail::Bad => {
                        let rest = std::mem::take(kept);
                        self.at = in_content();
                        rest
                    }
                }
            }
            CallsAt::List => {
                let shown = text.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
                self.opened.push_str(&text[..text.len() - shown.len()]);
                if shown.is_empty() {
                    return String::new();
                }
                if shown.starts_with('{') {
                    let rest = shown.to_owned();
                    self.at = CallsAt::Object(self.object());
                    return rest;
                }
                let Some(rest) = shown.strip_prefix(']') else { return self.broken(shown.to_owned(), pieces) };
                let rest = rest.to_owned();
                // A list without calls is emitted unchanged.
                let empty = opening(self.form).is_some_and(|open| self.opened.contains(open));
                if empty {
                    content(&format!("{}]", self.opened), pieces);
                }
                self.opened.clear();
                let closes = matches!(self.form, CallForm::TaggedJson(_)) && !empty;
                self.at = if closes { CallsAt::Close(String::new()) } else { in_content() };
                self.listed = false;
                rest
            }
            CallsAt::Close(kept) => {
                let close = closing(self.form);
                // Another function may be inside the same marks.
                let another = match self.form {
                    CallForm::TaggedParameters(tags) => Some((tags, tags.function[0])),
                    _ => None,
                };
                let open = opening(self.form).unwrap_or(close);
                let longest = close.len().max(open.len()).max(another.map_or(0, |(_, begin)| begin.len()));
                let from = kept.floor_char_boundary(kept.len().saturating_sub(longest));
                kept.push_str(&text);
                let find = |mark: &str| kept[from..].find(mark).map(|at| from + at);
                let (end, next) = (find(close), find(open));
                let before = |at: &usize, others: [Option<usize>; 2]| others.iter().flatten().all(|other| at < other);
                if let Some((tags, begin)) = another
                    && let Some(at) = find(begin).filter(|at| before(at, [end, next]))
                {
                    let rest = kept.split_off(at);
                    self.at = CallsAt::Tagged(TaggedCall::new(tags));
                    return rest;
                }
                // A call whose closing mark is missing.
                if let Some(at) = next.filter(|at| before(at, [end, None])) {
                    let rest = kept.split_off(at);
                    self.at = in_content();
                    return rest;
                }
                if let Some(at) = end {
                    let rest = kept.split_off(at).split_off(close.len());
                    self.at = in_content();
                    return rest;
                }
                String::new()
            }
        }
    }

    fn object(&self) -> Box<CallObject> {
        // A bare object that names no tool is an answer in JSON.
        let only = (self.form == CallForm::Json).then(|| Arc::clone(&self.tools));
        Box::new(CallObject { only, ..CallObject::default() })
    }

    /// Handles the end of a call.
    fn called(&mut self) {
        self.count += 1;
        self.opened.clear();
        self.at = match self.form {
            CallForm::Json => CallsAt::Start(String::new()),
            CallForm::TaggedJson(_) if self.listed => CallsAt::List,
            CallForm::TaggedJson(_) | CallForm::TaggedParameters(_) => CallsAt::Close(String::new()),
            CallForm::Named(tags) => CallsAt::Between(tags, String::new()),
            CallForm::SectionFenced | CallForm::Section => CallsAt::Tail(String::new()),
            _ if self.listed => CallsAt::List,
            _ => in_content(),
        };
    }

    /// Handles the end of a call and returns the text after it. `read` is the result of the call's parser.
    fn after_call(&mut self, read: Result<Option<String>, String>, pieces: &mut Vec<Piece>) -> String {
        match read {
            Ok(None) => String::new(),
            Ok(Some(rest)) => {
                self.called();
                rest
            }
            Err(raw) => self.broken(raw, pieces),
        }
    }

    /// Handles text that looked like a call and is none: its opening mark becomes content, and the rest is parsed
    /// again.
    fn broken(&mut self, rest: String, pieces: &mut Vec<Piece>) -> String {
        content(&std::mem::take(&mut self.opened), pieces);
        (self.at, self.listed) = (in_content(), false);
        rest
    }

    fn finish(&mut self, pieces: &mut Vec<Piece>) {
        let opened = std::mem::take(&mut self.opened);
        let behind_a_call = self.count > 0;
        match std::mem::replace(&mut self.at, in_content()) {
            // White space after calls is dropped.
            CallsAt::Content(kept) | CallsAt::Start(kept) if behind_a_call && kept.trim().is_empty() => {}
            CallsAt::Content(kept) | CallsAt::Start(kept) => content(&kept, pieces),
            CallsAt::Object(object) if object.named() => {}
            CallsAt::Object(object) => content(&(opened + &object.raw), pieces),
            // A call behind others, of which nothing is known yet.
            CallsAt::Tagged(call) if call.named || opened.is_empty() => {}
            CallsAt::Tagged(call) => content(&(opened + &call.kept), pieces),
            CallsAt::Named(call) if call.name.is_some() || opened.is_empty() => {}
            CallsAt::Named(call) => content(&(opened + &call.kept), pieces),
            CallsAt::Between(_, kept) if !opened.is_empty() => content(&(opened + &kept), pieces),
            CallsAt::Pairs(call) if call.name.is_some() => {}
            CallsAt::Pairs(call) => content(&(opened + &call.kept), pieces),
            // A part of the closing mark of the last call.
            CallsAt::Head(kept) if opened.is_empty() && section::CALLS[1].starts_with(kept.trim()) => {}
            CallsAt::Head(kept) => content(&(opened + &kept), pieces),
            CallsAt::List if opening(self.form).is_some_and(|open| opened.contains(open)) => content(&opened, pieces),
            // Without a closing mark, what follows a call is content, unless it is a part of that mark.
            CallsAt::Close(kept) => {
                if !closing(self.form).starts_with(kept.trim()) {
                    content(&kept, pieces);
                }
            }
            CallsAt::Between(..) | CallsAt::List | CallsAt::Arguments(_) | CallsAt::Tail(_) => {}
        }
    }
}

/// An incremental parser of a JSON object with `name` and `arguments` (or `parameters`).
#[derive(Debug, Default)]
struct CallObject {
    state: At,
    /// The tools that the call may name; `None` for any name.
    only: Option<Arc<[Tool]>>,
    /// The whole text until the call is emitted.
    raw: String,
    /// The key or the value that is being read.
    token: String,
    key: String,
    depth: u32,
    in_string: bool,
    escaped: bool,
    name: Option<String>,
    /// Whether the call was emitted.
    told: bool,
    /// Arguments that came before the name.
    early: Option<String>,
    has_arguments: bool,
    /// Whether the characters of the arguments are emitted as they arrive.
    forward: bool,
}

/// The position of the next character in the object.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum At {
    #[default]
    Start,
    BeforeKey,
    Key,
    Colon,
    BeforeValue,
    Value,
    AfterValue,
    Done,
    Bad,
}

impl CallObject {
    fn named(&self) -> bool {
        self.told
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }

    /// Parses text up to the end of the object; returns the number of bytes.
    fn push(&mut self, text: &str, index: usize, pieces: &mut Vec<Piece>) -> usize {
        let mut forwarded = String::new();
        let mut used = text.len();
        for (at, c) in text.char_indices() {
            if !self.told {
                self.raw.push(c);
            }
            self.take(c, index, &mut forwarded, pieces);
            if matches!(self.state, At::Done | At::Bad) {
                used = at + c.len_utf8();
                break;
            }
        }
        tell(index, &mut forwarded, pieces);
        used
    }

    fn take(&mut self, c: char, index: usize, forwarded: &mut String, pieces: &mut Vec<Piece>) {
        let space = c.is_ascii_whitespace();
        self.state = match (self.state, c) {
            (At::Start | At::BeforeKey | At::Colon | At::BeforeValue | At::AfterValue, _) if space => self.state,
            (At::Start, '{') => At::BeforeKey,
            (At::BeforeKey, '"') => {
                self.token.clear();
                self.token.push(c);
                At::Key
            }
            (At::Key, _) => {
                self.token.push(c);
                match c {
                    _ if std::mem::take(&mut self.escaped) => At::Key,
                    '\\' => {
                        self.escaped = true;
                        At::Key
                    }
                    '"' => match serde_json::from_str(&self.token) {
                        Ok(key) => {
                            self.key = key;
                            At::Colon
                        }
                        Err(_) => At::Bad,
                    },
                    _ => At::Key,
                }
            }
            (At::Colon, ':') => At::BeforeValue,
            (At::BeforeValue, _) => {
                self.token.clear();
                (self.depth, self.in_string, self.escaped) = (0, false, false);
                self.forward = self.is_arguments() && c == '{' && self.told && !self.has_arguments;
                self.value(c, index, forwarded, pieces)
            }
            (At::Value, _) => self.value(c, index, forwarded, pieces),
            (At::AfterValue, ',') => At::BeforeKey,
            (At::AfterValue | At::BeforeKey, '}') => self.end(index, pieces),
            _ => At::Bad,
        };
    }

    /// Handles a character of a value, or the character after a number.
    fn value(&mut self, c: char, index: usize, forwarded: &mut String, pieces: &mut Vec<Piece>) -> At {
        let ends_scalar = !self.in_string && self.depth == 0 && (c.is_ascii_whitespace() || ",}]".contains(c));
        if ends_scalar {
            if self.token.is_empty() {
                return At::Bad;
            }
            let state = self.complete(index, forwarded, pieces);
            return match (state, c) {
                (At::AfterValue, ',') => At::BeforeKey,
                (At::AfterValue, '}') => self.end(index, pieces),
                (At::AfterValue, ']') => At::Bad,
                (state, _) => state,
            };
        }
        if self.forward {
            forwarded.push(c)
        } else {
            self.token.push(c)
        }
        let mut complete = false;
        if self.in_string {
            match c {
                _ if std::mem::take(&mut self.escaped) => {}
                '\\' => self.escaped = true,
                '"' => {
                    self.in_string = false;
                    complete = self.depth == 0;
                }
                _ => {}
            }
        } else {
            match c {
                '"' => self.in_string = true,
                '{' | '[' => self.depth += 1,
                '}' | ']' => {
                    self.depth -= 1;
                    complete = self.depth == 0;
                }
                _ => {}
            }
        }
        if complete { self.complete(index, forwarded, pieces) } else { At::Value }
    }

    /// Handles the end of the value of `key`.
    fn complete(&mut self, index: usize, forwarded: &mut String, pieces: &mut Vec<Piece>) -> At {
        if self.forward {
            self.forward = false;
            self.has_arguments = true;
            tell(index, forwarded, pieces);
            return At::AfterValue;
        }
        if self.key == "name" && self.name.is_none() {
            let Ok(Value::String(name)) = serde_json::from_str(&self.token) else { return At::Bad };
            if self.only.as_ref().is_some_and(|tools| tools.iter().all(|tool| tool.name != name)) {
                return At::Bad;
            }
            self.name = Some(name.clone());
            self.told = true;
            pieces.push(Piece::Call { index, name });
            if let Some(text) = self.early.take() {
                pieces.push(Piece::Arguments { index, text });
            }
        } else if self.is_arguments() && !self.has_arguments {
            let text = match serde_json::from_str(&self.token) {
                // Some models write the arguments as JSON in a string.
                Ok(Value::String(text)) if serde_json::from_str::<Value>(&text).is_ok() => text,
                Ok(Value::Null) => "{}".to_owned(),
                Ok(_) => self.token.clone(),
                Err(_) => return At::Bad,
            };
            self.has_arguments = true;
            if self.told {
                pieces.push(Piece::Arguments { index, text });
            } else {
                self.early = Some(text);
            }
        }
        At::AfterValue
    }

    fn end(&mut self, index: usize, pieces: &mut Vec<Piece>) -> At {
        if !self.told {
            return At::Bad;
        }
        if !self.has_arguments {
            pieces.push(Piece::Arguments { index, text: "{}".to_owned() });
        }
        At::Done
    }
}

fn tell(index: usize, text: &mut String, pieces: &mut Vec<Piece>) {
    if !text.is_empty() {
        pieces.push(Piece::Arguments { index, text: std::mem::take(text) });
    }
}

/// The parser of a call with tagged parameters, each of which is emitted when it is complete.
#[derive(Debug)]
struct TaggedCall {
    tags: &'static ParameterTags,
    /// The unparsed text.
    kept: String,
    /// The position from which the end of a value is searched.
    looked: usize,
    name: String,
    named: bool,
    /// The parameter whose value is being read.
    parameter: Option<String>,
    parameters: usize,
}

impl TaggedCall {
    fn new(tags: &'static ParameterTags) -> TaggedCall {
        TaggedCall {
            tags,
            kept: String::new(),
            looked: 0,
            name: String::new(),
            named: false,
            parameter: None,
            parameters: 0,
        }
    }

    /// Parses text; returns the text after the end of the call, or all of it if it is not a call.
    fn push(
        &mut self,
        text: &str,
        index: usize,
        tools: &[Tool],
        pieces: &mut Vec<Piece>,
    ) -> Result<Option<String>, String> {
        self.kept.push_str(text);
        loop {
            if let Some(parameter) = &self.parameter {
                let [.., close] = self.tags.parameter;
                let from = (0..=self.looked).rev().find(|at| self.kept.is_char_boundary(*at)).unwrap_or(0);
                let Some(at) = self.kept[from..].find(close).map(|at| at + from) else {
                    self.looked = self.kept.len().saturating_sub(close.len());
                    return Ok(None);
                };
                let value = &self.kept[..at];
                let inner = value.strip_prefix('\n').unwrap_or(value);
                let inner = inner.strip_suffix('\n').unwrap_or(inner);
                let value = if self.tags.lines { inner } else { value };
                let tool = tools.iter().find(|tool| tool.name == self.name);
                let value = match tool.filter(|tool| tool.is_json(parameter)) {
                    Some(tool) => tool.json(parameter, value),
                    None => Value::from(value).to_string(),
                };
                argument(index, &mut self.parameters, parameter, &value, pieces);
                self.kept.drain(..at + close.len());
                (self.parameter, self.looked) = (None, 0);
                continue;
            }
            let shown = self.kept.trim_start();
            let ([mark, behind, _], end) = match self.named {
                true => (self.tags.parameter, Some(self.tags.function[2])),
                false => (self.tags.function, None),
            };
            if let Some(rest) = shown.strip_prefix(mark) {
                let Some(at) = rest.find(behind) else {
                    return match self.named || rest.len() <= MOST_NAME {
                        true => Ok(None),
                        false => Err(std::mem::take(&mut self.kept)),
                    };
                };
                if !self.named && !is_name(rest[..at].trim()) {
                    return Err(std::mem::take(&mut self.kept));
                }
                let (name, rest) = (rest[..at].trim().to_owned(), rest[at + behind.len()..].to_owned());
                self.kept = rest;
                if self.named {
                    self.parameter = Some(name);
                } else {
                    (self.name, self.named) = (name.clone(), true);
                    pieces.push(Piece::Call { index, name });
                }
            } else if let Some(rest) = end.and_then(|end| shown.strip_prefix(end)) {
                end_of_arguments(index, self.parameters, pieces);
                return Ok(Some(rest.to_owned()));
            } else if self.named && shown.starts_with(self.tags.calls[1]) {
                // The function's closing mark is missing.
                end_of_arguments(index, self.parameters, pieces);
                return Ok(Some(shown.to_owned()));
            } else if [mark, end.unwrap_or(mark), self.tags.calls[1]].iter().any(|mark| mark.starts_with(shown)) {
                return Ok(None);
            } else if self.named {
                // Text between parameters is dropped.
                let skip = shown
                    .find('<')
                    .filter(|at| *at > 0)
                    .unwrap_or_else(|| shown.char_indices().nth(1).map_or(shown.len(), |(at, _)| at));
                self.kept = shown[skip..].to_owned();
            } else {
                return Err(std::mem::take(&mut self.kept));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::text::chat::{
        FUNCTION_GEMMA_CALLS, GEMMA_CALLS, GRANITE_TAGS, LFM_CALLS, MINIMAX_PARAMETERS, NEMOTRON_TAGS, OLMO_CALLS,
        PHI_TAGS, QWEN_PARAMETERS, SEED_PARAMETERS,
    };
    use serde_json::json;

    fn tools() -> Arc<[Tool]> {
        let parameters = json!({"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}});
        Arc::from([Tool { name: "f".to_owned(), parameters, strict: false }])
    }

    /// Reads an output that comes in these parts. Returns its reasoning, content and calls.
    fn read(reasons: Reasons, form: Option<CallForm>, parts: &[&str]) -> (String, String, Vec<(String, String)>) {
        let mut output = Output::new(reasons, form, &tools());
        let mut pieces = Vec::new();
        for part in parts {
            output.push(part, &mut pieces);
        }
        output.finish(&mut pieces);
        joined(pieces)
    }

    fn joined(pieces: Vec<Piece>) -> (String, String, Vec<(String, String)>) {
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => reasoning.push_str(&text),
                Piece::Content(text) => content.push_str(&text),
                Piece::Call { index, name } => {
                    assert_eq!(index, calls.len());
                    calls.push((name, String::new()));
                }
                Piece::Arguments { index, text } => {
                    assert_eq!(index + 1, calls.len());
                    calls[index].1.push_str(&text);
                }
            }
        }
        (reasoning, content, calls)
    }

    /// Checks what an output is, whole, character by character, and cut in two at each place.
    #[track_caller]
    fn check(
        reasons: Reasons,
        form: Option<CallForm>,
        text: &str,
        reasoning: &str,
        content: &str,
        calls: &[(&str, &str)],
    ) {
        let calls = calls.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let expected = (reasoning.to_owned(), content.to_owned(), calls);
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let characters: Vec<&str> = places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        assert_eq!(read(reasons, form, &characters), expected, "character by character: {text:?}");
        for at in places {
            let (first, second) = text.split_at(at);
            assert_eq!(read(reasons, form, &[first, second]), expected, "{first:?} and {second:?}");
        }
    }

    /// Checks that everything but the last character of an output's arguments is told before the output ends.
    #[track_caller]
    fn comes_in_parts(reasons: Reasons, form: CallForm, before: &str, arguments: &str) {
        let mut output = Output::new(reasons, Some(form), &tools());
        let mut pieces = Vec::new();
        output.push(before, &mut pieces);
        for (at, c) in arguments.char_indices() {
            output.push(&c.to_string(), &mut pieces);
            let (_, _, calls) = joined(pieces.clone());
            assert_eq!(calls, [("f".to_owned(), arguments[..at + c.len_utf8()].to_owned())]);
        }
    }

    #[test]
    fn reasoning_is_told_apart_wherever_it_begins() {
        const THINK: &Marks = &["<think>", "</think>"];
        use Reasons::Never;
        let (if_opened, opened) = (Reasons::IfOpened(THINK), Reasons::Opened(THINK));
        check(opened, None, "\nhm\n\nso\n</think>\n\nyes ", "hm\n\nso", "yes ", &[]);
        check(if_opened, None, "<think>\nhm\n</think>\n\nyes", "hm", "yes", &[]);
        check(if_opened, None, "\n<think></think>yes", "", "yes", &[]);
        check(if_opened, None, "<thin air", "", "<thin air", &[]);
        check(if_opened, None, " plain <think>x</think>", "", " plain <think>x</think>", &[]);
        check(opened, None, "never </thin", "never </thin", "", &[]);
        check(Never, None, "<think>x</think>y", "", "<think>x</think>y", &[]);
        check(if_opened, None, "", "", "", &[]);
        check(opened, None, "é </é </think>é", "é </é", "é", &[]);
    }

    #[test]
    fn tagged_json_becomes_calls() {
        let form = Some(CallForm::TaggedJson(&TAGS));
        let never = Reasons::Never;
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"a}\\\"</tool_call>é\", \"n\": [1, {}]}}\n</tool_call>";
        let arguments = "{\"s\": \"a}\\\"</tool_call>é\", \"n\": [1, {}]}";
        check(never, form, call, "", "", &[("f", arguments)]);
        check(never, form, &format!("I ask. \n{call}\n{call}\n"), "", "I ask.", &[("f", arguments), ("f", arguments)]);
        check(
            Reasons::Opened(&["<think>", "</think>"]),
            form,
            &format!("hm</think>\n\n{call}"),
            "hm",
            "",
            &[("f", arguments)],
        );
        check(never, form, "no < call <tool", "", "no < call <tool", &[]);
        // The arguments come first, are missing, or are written as a text.
        check(
            never,
            form,
            "<tool_call>{\"arguments\":{\"n\":1},\"name\":\"f\"}</tool_call>",
            "",
            "",
            &[("f", "{\"n\":1}")],
        );
        check(never, form, "<tool_call>{\"name\":\"f\"}</tool_call>", "", "", &[("f", "{}")]);
        check(
            never,
            form,
            "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"n\\\":1}\"}</tool_call>",
            "",
            "",
            &[("f", "{\"n\":1}")],
        );
        check(
            never,
            form,
            "<tool_call>{\"id\":7,\"x\":[{}],\"name\":\"f\",\"arguments\":null}",
            "",
            "",
            &[("f", "{}")],
        );
        // What is no call stays content.
        check(never, form, "<tool_call>oh</tool_call>", "", "<tool_call>oh</tool_call>", &[]);
        check(never, form, "<tool_call>{\"n", "", "<tool_call>{\"n", &[]);
        // An output that is cut has what it has.
        check(never, form, "<tool_call>{\"name\":\"f\",\"arguments\":{\"n\":1", "", "", &[("f", "{\"n\":1")]);
    }

    #[test]
    fn tagged_parameters_become_json() {
        let form = Some(CallForm::TaggedParameters(&QWEN_PARAMETERS));
        let call = "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\na\n\"b\" < c\n</parameter>\n</function>\n</tool_call>";
        let arguments = "{\"n\": 5, \"s\": \"a\\n\\\"b\\\" < c\"}";
        check(Reasons::Never, form, call, "", "", &[("f", arguments)]);
        check(Reasons::Never, form, &format!("So:\n{call}\n{call}"), "", "So:", &[("f", arguments), ("f", arguments)]);
        check(Reasons::Never, form, "<tool_call><function=g></function></tool_call>", "", "", &[("g", "{}")]);
        // What is allowed decides between a text and a value; words of Python are those of the model's template.
        let parameters = json!({"properties": {
            "b": {"type": "boolean"}, "t": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "e": {"enum": ["1", null]}, "u": {"type": ["string", "integer"]}, "o": {"type": "object"},
        }});
        let tools: Arc<[Tool]> = Arc::from([Tool { name: "f".to_owned(), parameters, strict: false }]);
        for (name, written, value) in [
            ("b", "True", "true"),
            ("b", "false", "false"),
            ("b", "maybe", "\"maybe\""),
            ("t", "94103", "\"94103\""),
            ("t", "\"94103\"", "\"94103\""),
            ("t", "None", "null"),
            ("t", "True", "\"True\""),
            ("e", "1", "\"1\""),
            ("e", "null", "null"),
            ("u", "5", "5"),
            ("u", "5.5", "\"5.5\""),
            ("o", "[1]", "[1]"),
        ] {
            let tagged = format!("<tool_call>\n<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>");
            let pairs = format!("<tool_call>f<arg_key>{name}</arg_key><arg_value>{written}</arg_value></tool_call>");
            for (form, text) in [(CallForm::TaggedParameters(&QWEN_PARAMETERS), tagged), (CallForm::TaggedPairs, pairs)]
            {
                let mut output = Output::new(Reasons::Never, Some(form), &tools);
                let mut pieces = Vec::new();
                output.push(&text, &mut pieces);
                assert_eq!(joined(pieces).2, [("f".to_owned(), format!("{{\"{name}\": {value}}}"))], "{text}");
            }
        }
        // A number that is none is a text, and so are values of unknown parameters.
        let odd =
            "<tool_call><function=f><parameter=n>five</parameter> <parameter=x>1</parameter></function></tool_call>";
        check(Reasons::Never, form, odd, "", "", &[("f", "{\"n\": \"five\", \"x\": \"1\"}")]);
        check(Reasons::Never, form, "<tool_call>oh</tool_call>", "", "<tool_call>oh</tool_call>", &[]);
    }

    #[test]
    fn bare_json_is_a_call_only_if_it_is_one() {
        let form = Some(CallForm::Json);
        let call = "{\"name\": \"f\", \"parameters\": {\"n\": 1}}";
        check(Reasons::Never, form, call, "", "", &[("f", "{\"n\": 1}")]);
        check(Reasons::Never, form, &format!(" {call}; {call}"), "", "", &[("f", "{\"n\": 1}"), ("f", "{\"n\": 1}")]);
        check(Reasons::Never, form, "{\"answer\": 5}", "", "{\"answer\": 5}", &[]);
        // An answer about something that has a name.
        for answer in ["{\"name\": \"Ada\", \"age\": 36}", "{\"parameters\": {}, \"name\": \"Ada\"}"] {
            check(Reasons::Never, form, answer, "", answer, &[]);
        }
        check(Reasons::Never, form, "It is {\"name\"", "", "It is {\"name\"", &[]);
    }

    /// A JSON object with everything that could be taken for its end.
    const TRICKY: &str = "{\"s\": \"a}\\\"]</tool_call><|end|>[TOOL_CALLS]<｜tool▁call▁end｜>é\", \"n\": [1, {}]}";

    #[test]
    fn messages_on_channels_are_reasoning_content_and_calls() {
        let (reasons, form) = (Reasons::Channel, Some(CallForm::Channels));
        let thought = "<|channel|>analysis<|message|>hm\n so <|end|>";
        let answer = "<|start|>assistant<|channel|>final<|message|>yes <b> ";
        let call = format!(
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{TRICKY}<|call|>"
        );
        let other = "<|start|>assistant to=functions.g<|channel|>commentary json<|message|> {}<|call|>";
        check(reasons, form, &format!("{thought}{answer}"), "hm\n so ", "yes <b> ", &[]);
        check(reasons, None, &format!("{thought}{answer}<|return|>"), "hm\n so ", "yes <b> ", &[]);
        check(reasons, form, &format!("{thought}{call}"), "hm\n so ", "", &[("f", TRICKY)]);
        check(
            reasons,
            form,
            &format!("{thought}{call}{other}{thought}{answer}"),
            "hm\n so \nhm\n so ",
            "yes <b> ",
            &[("f", TRICKY), ("g", "{}")],
        );
        // Commentary to nobody is content; the recipient may come first, and marks of an end may be missing.
        let preamble = "<|channel|>commentary<|message|>I look.";
        check(reasons, form, &format!("{preamble}<|end|>{call}"), "", "I look.", &[("f", TRICKY)]);
        check(reasons, form, &format!("{preamble}{other}"), "", "I look.", &[("g", "{}")]);
        check(reasons, form, " to=functions.g<|channel|>commentary<|message|>{}", "", "", &[("g", "{}")]);
        check(reasons, form, &format!("{preamble}<|end|>{answer}"), "", "I look.\nyes <b> ", &[]);
        // An output without messages, as a constraint may want it, is content; so are calls where no tools are given.
        check(reasons, None, "{\"a\": \"<|end|>\"}", "", "{\"a\": \"<|end|>\"}", &[]);
        check(reasons, None, " tomato", "", " tomato", &[]);
        check(reasons, None, &format!("{thought}{other}"), "hm\n so ", other, &[]);
        // What is no call, or is for someone else, is told as it is written.
        let bad = "<|start|>assistant<|channel|>commentary to=functions.f<|message|>oh no<|call|>";
        check(reasons, form, &format!("{thought}{bad}{other}"), "hm\n so ", bad, &[("g", "{}")]);
        let python = "<|channel|>analysis to=python<|message|>1 + 1<|end|>";
        check(reasons, form, &format!("{python}{answer}"), "", &format!("{python}yes <b> "), &[]);
        let role = "<|start|>user<|message|>x<|end|>";
        check(reasons, form, &format!("{thought}{role}"), "hm\n so ", role, &[]);
        let endless = format!("<|channel|>{}", "x".repeat(600));
        check(reasons, form, &endless, "", &endless, &[]);
        // An output that is cut has what it has.
        check(reasons, form, "<|channel|>analysis<|message|>hm <|e", "hm <|e", "", &[]);
        check(reasons, form, &format!("{thought}<|start|>assistant<|chan"), "hm\n so ", "", &[]);
        let cut = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
        check(reasons, form, cut, "", cut, &[]);
        check(reasons, form, &format!("{cut}{{\"n\": 1"), "", "", &[("f", "{\"n\": 1")]);
        check(reasons, form, &format!("{cut}{{}} and more<|call|>"), "", "and more", &[("f", "{}")]);
        comes_in_parts(reasons, CallForm::Channels, cut, TRICKY);
    }

    #[test]
    fn text_on_channels_comes_in_parts() {
        let mut output = Output::new(Reasons::Channel, None, &tools());
        let mut pieces = Vec::new();
        output.push("<|channel|>analysis<|message|>hm <", &mut pieces);
        assert_eq!(pieces, [Piece::Reasoning("hm ".to_owned())]);
        output.push("b<|end|><|start|>assistant<|channel|>final<|message|>so", &mut pieces);
        assert_eq!(pieces[1..], [Piece::Reasoning("<b".to_owned()), Piece::Content("so".to_owned())]);
    }

    #[test]
    fn pairs_of_names_and_values_become_json() {
        let (never, form) = (Reasons::Never, Some(CallForm::TaggedPairs));
        let call = "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n<arg_key>s</arg_key>\n\
            <arg_value>7</arg_value>\n<arg_key>x</arg_key>\n<arg_value>[\"a\", {}]</arg_value>\n</tool_call>";
        let arguments = "{\"n\": 5, \"s\": \"7\", \"x\": [\"a\", {}]}";
        check(never, form, call, "", "", &[("f", arguments)]);
        check(never, form, &format!("So: \n{call}\n{call}\n"), "", "So:", &[("f", arguments), ("f", arguments)]);
        check(never, form, &format!("{call}\nThat is it."), "", "\nThat is it.", &[("f", arguments)]);
        let think: &Marks = &["<think>", "</think>"];
        check(Reasons::IfOpened(think), form, &format!("<think>hm</think>\n{call}"), "hm", "", &[("f", arguments)]);
        // Without new lines, without arguments, with a text of several lines, and with a value that is no JSON.
        let tight = "<tool_call>f<arg_key>s</arg_key><arg_value> a\n\"b\" < c</arg_value><arg_key>n</arg_key>\
            <arg_value>five</arg_value></tool_call>";
        check(never, form, tight, "", "", &[("f", "{\"s\": \" a\\n\\\"b\\\" < c\", \"n\": \"five\"}")]);
        check(never, form, "<tool_call>g\n</tool_call>", "", "", &[("g", "{}")]);
        // What is no call is content, and a call after it is read.
        for bad in
            ["<tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>oh no</tool_call>", "<tool_call></tool_call>"]
        {
            check(never, form, &format!("{bad}{call}"), "", bad, &[("f", arguments)]);
        }
        // What follows an argument and is none ends the call.
        let odd = "<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value>hm</tool_call>";
        check(never, form, odd, "", "hm</tool_call>", &[("f", "{\"n\": 5}")]);
        let lost = "<tool_call>f<arg_key>n</arg_key>5</tool_call>";
        check(never, form, lost, "", "<arg_key>n</arg_key>5</tool_call>", &[("f", "{}")]);
        check(never, form, "<tool_call>f\n<arg", "", "<tool_call>f\n<arg", &[]);
        check(never, form, "a < b <tool", "", "a < b <tool", &[]);
        // Each argument is told when it is complete.
        let mut output = Output::new(never, form, &tools());
        let mut pieces = Vec::new();
        output.push("<tool_call>f\n<arg_key>n</arg_key><arg_value>5</arg_value>", &mut pieces);
        assert_eq!(joined(pieces).2, [("f".to_owned(), "{\"n\": 5".to_owned())]);
    }

    #[test]
    fn bracketed_calls_are_a_list_or_a_name_and_arguments() {
        let never = Reasons::Never;
        for form in [CallForm::BracketList, CallForm::BracketArguments].map(Some) {
            let one = format!("{{\"name\": \"f\", \"arguments\": {TRICKY}}}");
            let list = format!("[TOOL_CALLS][{one}, {{\"name\": \"g\", \"arguments\": {{}}, \"id\": \"abc\"}}]");
            check(never, form, &list, "", "", &[("f", TRICKY), ("g", "{}")]);
            check(never, form, &format!("So. [TOOL_CALLS] [ {one} ] And?"), "", "So. And?", &[("f", TRICKY)]);
            check(never, form, &format!("[TOOL_CALLS]{one}"), "", "", &[("f", TRICKY)]);
            let named = format!("[TOOL_CALLS]f[ARGS]{TRICKY}");
            check(never, form, &named, "", "", &[("f", TRICKY)]);
            check(never, form, &format!("So. {named}{named}\n"), "", "So.", &[("f", TRICKY), ("f", TRICKY)]);
            check(never, form, "[TOOL_CALLS]g[CALL_ID]a1b2[ARGS] {}", "", "", &[("g", "{}")]);
            check(never, form, "[TOOL_CALLS]g{} then", "", " then", &[("g", "{}")]);
            let think: &Marks = &["[THINK]", "[/THINK]"];
            check(Reasons::IfOpened(think), form, &format!("[THINK]hm[/THINK]{named}"), "hm", "", &[("f", TRICKY)]);
            // What is no call is content, and a call after it is read.
            for bad in
                ["[TOOL_CALLS]oh no", " [TOOL_CALLS][oh]", "[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]f[ARGS]x"]
            {
                check(never, form, bad, "", bad, &[]);
            }
            check(
                never,
                form,
                &format!("[TOOL_CALLS][{{\"n\": 1}}]{named}"),
                "",
                "[TOOL_CALLS][{\"n\": 1}]",
                &[("f", TRICKY)],
            );
            check(never, form, &format!("[TOOL_CALLS][{one}, oh]"), "", ", oh]", &[("f", TRICKY)]);
            // An output that is cut.
            check(never, form, "[TOOL_CALLS]f[AR", "", "[TOOL_CALLS]f[AR", &[]);
            check(never, form, "[TOOL_CALLS]f[ARGS]{\"n\": 1", "", "", &[("f", "{\"n\": 1")]);
        }
        comes_in_parts(never, CallForm::BracketArguments, "[TOOL_CALLS]f[ARGS]", TRICKY);
        let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": ";
        comes_in_parts(never, CallForm::BracketList, list, "{\"n\": [1, {}]}");
    }

    #[test]
    fn functions_of_other_tags_become_json() {
        let never = Reasons::Never;
        let seed = Some(CallForm::TaggedParameters(&SEED_PARAMETERS));
        let call = "<seed:tool_call>\n<function=f>\n<parameter=n>5</parameter>\n<parameter=s>a\nb\n</parameter>\n</function>\n\
            </seed:tool_call>";
        let arguments = "{\"n\": 5, \"s\": \"a\\nb\\n\"}";
        let think: &Marks = &["<seed:think>", "</seed:think>"];
        check(
            Reasons::IfOpened(think),
            seed,
            &format!("<seed:think>hm</seed:think>\nSo.\n{call}\n{call}"),
            "hm",
            "So.",
            &[("f", arguments), ("f", arguments)],
        );
        // MiniMax writes several functions between one pair of marks.
        let minimax = Some(CallForm::TaggedParameters(&MINIMAX_PARAMETERS));
        let one = "<invoke name=\"f\">\n<parameter name=\"n\">5</parameter>\n<parameter name=\"s\">a > \"b\"</parameter>\n</invoke>";
        let calls = format!("<minimax:tool_call>\n{one}\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>");
        let arguments = "{\"n\": 5, \"s\": \"a > \\\"b\\\"\"}";
        check(never, minimax, &format!("So.\n{calls} And"), "", "So. And", &[("f", arguments), ("g", "{}")]);
        check(never, minimax, "<minimax:tool_call>oh", "", "<minimax:tool_call>oh", &[]);
    }

    #[test]
    fn json_between_other_marks_is_an_object_or_a_list() {
        let never = Reasons::Never;
        let one = format!("{{\"name\": \"f\", \"arguments\": {TRICKY}}}");
        let granite = Some(CallForm::TaggedJson(&GRANITE_TAGS));
        let list = format!("<|tool_call|>[{one}, {{\"name\": \"g\", \"arguments\": {{}}}}]");
        check(never, granite, &list, "", "", &[("f", TRICKY), ("g", "{}")]);
        check(never, granite, &format!("So. {list} And"), "", "So. And", &[("f", TRICKY), ("g", "{}")]);
        check(never, granite, &format!("<|tool_call|> {one} And"), "", " And", &[("f", TRICKY)]);
        let phi = Some(CallForm::TaggedJson(&PHI_TAGS));
        check(never, phi, &format!("{list}<|/tool_call|> And"), "", " And", &[("f", TRICKY), ("g", "{}")]);
        let nemotron = Some(CallForm::TaggedJson(&NEMOTRON_TAGS));
        let calls = format!("So. <TOOLCALL>[{one}, {{\"name\": \"g\", \"arguments\": {{}}}}]</TOOLCALL> And");
        check(never, nemotron, &calls, "", "So. And", &[("f", TRICKY), ("g", "{}")]);
        let calls = format!("<|tool_call|>{one}<|/tool_call|><|tool_call|>{one}<|/tool_call|>");
        check(never, phi, &calls, "", "", &[("f", TRICKY), ("f", TRICKY)]);
        for bad in ["<|tool_call|>[]", "<|tool_call|>oh", "<|tool_call|>[oh]", "<|tool_call|>"] {
            check(never, phi, bad, "", bad, &[]);
            check(never, granite, bad, "", bad, &[]);
        }
    }

    #[test]
    fn calls_with_plain_names_become_json() {
        let never = Reasons::Never;
        let gemma = Some(CallForm::Named(&GEMMA_CALLS));
        let call =
            "<|tool_call>call:f{n:5,s:<|\"|>a, \"b}\": 'c'<|\"|>,x:{k:[1.5,<|\"|>y<|\"|>],z:null,b:true}}<tool_call|>";
        let arguments = "{\"n\": 5, \"s\": \"a, \\\"b}\\\": 'c'\", \"x\": {\"k\":[1.5,\"y\"],\"z\":null,\"b\":true}}";
        let think: &Marks = &["<|channel>", "<channel|>"];
        check(
            Reasons::IfOpened(think),
            gemma,
            &format!("<|channel>thought\nhm\n<channel|>So.{call}{call}"),
            "hm",
            "So.",
            &[("f", arguments), ("f", arguments)],
        );
        check(Reasons::IfOpened(think), gemma, "<|channel>though<channel|>So.", "though", "So.", &[]);
        check(never, gemma, "<|tool_call>call:g{}<tool_call|> And", "", " And", &[("g", "{}")]);
        // A text that the schema asks for is none without its marks.
        check(
            never,
            gemma,
            "<|tool_call>call:f{s:12, n: 3}<tool_call|>",
            "",
            "",
            &[("f", "{\"s\": \"12\", \"n\": 3}")],
        );
        let function_gemma = Some(CallForm::Named(&FUNCTION_GEMMA_CALLS));
        let call = "<start_function_call>call:f{s:<escape>a<escape>}<end_function_call>";
        check(never, function_gemma, call, "", "", &[("f", "{\"s\": \"a\"}")]);
        for bad in ["<|tool_call>oh", "<|tool_call>call:", "<|tool_call>call:a b{}", "<|tool_call><tool_call|>"] {
            check(never, gemma, bad, "", bad, &[]);
        }
        // Cut outputs have the arguments that were complete.
        check(never, gemma, "<|tool_call>call:f{n:5,s:<|\"|>a", "", "", &[("f", "{\"n\": 5")]);

        let lfm = Some(CallForm::Named(&LFM_CALLS));
        let calls = "<|tool_call_start|>[f(n=5, s='it\\'s \\\\ a, \"b\"', x=[1, {'k': None, \"m\": (True, -2.5e3)}]), g()]<|tool_call_end|>";
        let arguments = "{\"n\": 5, \"s\": \"it's \\\\ a, \\\"b\\\"\", \"x\": [1,{\"k\":null,\"m\":[true,-2500.0]}]}";
        check(never, lfm, &format!("So. {calls}And"), "", "So.And", &[("f", arguments), ("g", "{}")]);
        // Quotes that are not escaped, JSON's escapes, and words that are no value.
        let odd = "<|tool_call_start|>[f(s='it's (a) \"b\" so', x=\"\\ud83d\\ude00\\n\", y=Rome)]<|tool_call_end|>";
        let arguments = "{\"s\": \"it's (a) \\\"b\\\" so\", \"x\": \"😀\\n\", \"y\": \"Rome\"}";
        check(never, lfm, odd, "", "", &[("f", arguments)]);
        check(never, lfm, "<|tool_call_start|>[]<|tool_call_end|>", "", "<|tool_call_start|>[]<|tool_call_end|>", &[]);
        let deep = format!("<|tool_call_start|>[f(x={})]<|tool_call_end|>", "[".repeat(500) + &"]".repeat(500));
        assert_eq!(read(never, lfm, &[&deep]).2[0].0, "f");

        let olmo = Some(CallForm::Named(&OLMO_CALLS));
        let calls = "<function_calls>\nf(n=5, s=\"a\")\ng()\n</function_calls>\n";
        check(never, olmo, &format!("So.\n{calls}"), "", "So.", &[("f", "{\"n\": 5, \"s\": \"a\"}"), ("g", "{}")]);
        check(never, olmo, "<function_calls>\nf(1)\n</function_calls>", "", "1)\n</function_calls>", &[("f", "{}")]);
    }

    /// What models write that is not quite the form.
    #[test]
    fn calls_with_plain_names_are_read_as_they_are_meant() {
        let parameters = json!({"type": "object", "properties": {
            "n": {"type": "integer"}, "s": {"type": "string"}, "x": {"type": ["string", "null"]}, "filter[a]": {"type": "string"},
        }});
        let tools: Arc<[Tool]> = Arc::from([Tool { name: "f".to_owned(), parameters, strict: false }]);
        let all = |form: CallForm, text: &str| {
            let cut = |size: usize| {
                let mut output = Output::new(Reasons::Never, Some(form), &tools);
                let mut pieces = Vec::new();
                let characters: Vec<char> = text.chars().collect();
                for part in characters.chunks(size) {
                    output.push(&part.iter().collect::<String>(), &mut pieces);
                }
                output.finish(&mut pieces);
                let (_, content, calls) = joined(pieces);
                let calls = calls.into_iter().map(|(_, text)| serde_json::from_str(&text).expect("JSON"));
                (content, calls.collect::<Vec<Value>>())
            };
            assert_eq!(cut(1), cut(3), "{text}");
            cut(text.len())
        };
        let lfm = |inner: &str, content: &str, calls: &[Value]| {
            let text = format!("<|tool_call_start|>[{inner}<|tool_call_end|>Bye");
            assert_eq!(all(CallForm::Named(&LFM_CALLS), &text), (content.to_owned(), calls.to_vec()), "{text}");
        };
        // Quotes inside of a text.
        lfm(r#"f(s="{"k": "v"}", n=1)]"#, "Bye", &[json!({"s": "{\"k\": \"v\"}", "n": 1})]);
        lfm(r"f(s='d = {'a': 1}')]", "Bye", &[json!({"s": "d = {'a': 1}"})]);
        lfm(r#"f(s="print("a", "b")"), f(n=2)]"#, "Bye", &[json!({"s": "print(\"a\", \"b\")"}), json!({"n": 2})]);
        lfm(r"f(s='x IN ('y', 'z')', n=1)]", "Bye", &[json!({"s": "x IN ('y', 'z')", "n": 1})]);
        // Brackets and quotes that are missing: the mark behind the calls ends them.
        lfm("f(n=1]", "Bye", &[json!({"n": "1]"})]);
        lfm("f(s='a)]", "Bye", &[json!({"s": "'a)]"})]);
        lfm("f(", "Bye", &[json!({})]);
        lfm("f(n=1); f(n=2)]", "Bye", &[json!({"n": 1}), json!({"n": 2})]);
        // What the schema allows.
        lfm("f(s=None, x=94103)]", "Bye", &[json!({"s": null, "x": "94103"})]);
        lfm("f(filter[a]='b', n=1)]", "Bye", &[json!({"filter[a]": "b", "n": 1})]);
        let gemma = |inner: &str, content: &str, calls: &[Value]| {
            let text = format!("<|tool_call>call:{inner}<tool_call|>Bye");
            assert_eq!(all(CallForm::Named(&GEMMA_CALLS), &text), (content.to_owned(), calls.to_vec()), "{text}");
        };
        gemma("f{s:<|\"|>abc}", "Bye", &[json!({"s": "<|\"|>abc}"})]);
        gemma("f{s:\"hello, world\",n:3}", "Bye", &[json!({"s": "hello, world", "n": 3})]);
        gemma(
            "f{o:{\"a\":\"b:c\",d:foo},<|\"|>l<|\"|>:[a, b]}",
            "Bye",
            &[json!({"o": {"a": "b:c", "d": "foo"}, "l": ["a", "b"]})],
        );
        gemma("f{filter[a]:<|\"|>b<|\"|>}", "Bye", &[json!({"filter[a]": "b"})]);
        // Marks behind a function or a list that are missing.
        let minimax = CallForm::TaggedParameters(&MINIMAX_PARAMETERS);
        let call = "<minimax:tool_call><invoke name=\"f\"><parameter name=\"s\">v</parameter>";
        assert_eq!(
            all(minimax, &format!("{call}</minimax:tool_call>Bye")),
            ("Bye".to_owned(), vec![json!({"s": "v"})])
        );
        assert_eq!(all(minimax, &format!("{call}</invoke>\nBye")), ("\nBye".to_owned(), vec![json!({"s": "v"})]));
        let phi = CallForm::TaggedJson(&PHI_TAGS);
        let one = "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]";
        assert_eq!(all(phi, &format!("{one}\nBye")), ("\nBye".to_owned(), vec![json!({"n": 1})]));
        assert_eq!(all(phi, &format!("{one}{one}")), (String::new(), vec![json!({"n": 1}), json!({"n": 1})]));
        let text = "<|tool_call|>{\"name\": \"f\", \"arguments\": \"oops\"}";
        assert_eq!(all(phi, text), (String::new(), vec![json!("oops")]));
        // Long runs of white space and separators take linear time.
        for part in [" ", ", ", "\n"] {
            let long = part.repeat(100_000);
            for text in ["f(s=\"a\"", "f(n=1", "f(n=1)", ""] {
                all(CallForm::Named(&LFM_CALLS), &format!("<|tool_call_start|>[{text}{long})]<|tool_call_end|>"));
            }
        }
    }

    /// Goal: how an output is cut into parts changes nothing, whatever it holds. Method: random sequences of what forms of calls
    /// consist of, cut at random places.
    #[test]
    fn cuts_change_nothing() {
        const FORMS: [CallForm; 15] = [
            CallForm::TaggedJson(&TAGS),
            CallForm::TaggedJson(&NEMOTRON_TAGS),
            CallForm::TaggedJson(&PHI_TAGS),
            CallForm::TaggedJson(&GRANITE_TAGS),
            CallForm::TaggedParameters(&QWEN_PARAMETERS),
            CallForm::TaggedParameters(&SEED_PARAMETERS),
            CallForm::TaggedParameters(&MINIMAX_PARAMETERS),
            CallForm::TaggedPairs,
            CallForm::Named(&GEMMA_CALLS),
            CallForm::Named(&LFM_CALLS),
            CallForm::Named(&OLMO_CALLS),
            CallForm::Json,
            CallForm::BracketList,
            CallForm::Section,
            CallForm::SectionFenced,
        ];
        const PARTS: [&str; 24] = [
            " ",
            "\n",
            "f",
            "g",
            "1",
            "é",
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            ",",
            ":",
            "=",
            "\"",
            "'",
            "\\",
            "s=",
            "n:",
            "call:",
            "{\"name\": \"f\"",
            "\"arguments\": {\"n\": 1}",
            "<",
        ];
        let mut state = 7u64;
        let mut random = |most: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % most
        };
        for case in 0..20_000 {
            let form = FORMS[case % FORMS.len()];
            let mut marks = form.marks().to_vec();
            match form {
                CallForm::TaggedParameters(tags) => marks.extend(tags.function.into_iter().chain(tags.parameter)),
                CallForm::Named(tags) => marks.extend(tags.quote),
                _ => {}
            }
            let mut text = String::new();
            for _ in 0..random(24) {
                match random(3) {
                    0 if !marks.is_empty() => text.push_str(marks[random(marks.len())]),
                    _ => text.push_str(PARTS[random(PARTS.len())]),
                }
            }
            let whole = read(Reasons::Never, Some(form), &[&text]);
            let mut parts = Vec::new();
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let (part, behind) = rest.split_at(rest.ceil_char_boundary(1 + random(5)));
                parts.push(part);
                rest = behind;
            }
            assert_eq!(read(Reasons::Never, Some(form), &parts), whole, "{form:?}: {parts:?}");
            if whole.2.is_empty() {
                assert_eq!(whole.1, text, "{form:?}: content without calls");
            }
        }
    }

    #[test]
    fn sections_of_calls_are_read() {
        let never = Reasons::Never;
        let (begin, end) = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>");
        let fenced = |name: &str, arguments: &str| {
            format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>")
        };
        let plain = |name: &str, arguments: &str| {
            format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
        };
        for (form, call) in [
            (CallForm::SectionFenced, &fenced as &dyn Fn(&str, &str) -> String),
            (CallForm::Section, &plain as &dyn Fn(&str, &str) -> String),
        ] {
            let of = form;
            let form = Some(of);
            let (f, g) = (call("f", TRICKY), call("g", "{}"));
            check(never, form, &format!("{begin}{f}{end}"), "", "", &[("f", TRICKY)]);
            check(never, form, &format!("So.\n{begin}{f}\n{g}{end}\n"), "", "So.", &[("f", TRICKY), ("g", "{}")]);
            check(never, form, &format!("{begin}{g}{end} And"), "", " And", &[("g", "{}")]);
            let think: &Marks = &["<think>", "</think>"];
            check(Reasons::Opened(think), form, &format!("hm</think>{begin}{g}{end}"), "hm", "", &[("g", "{}")]);
            // What is no call is content, also behind a call.
            let bad = format!("{begin}<｜tool▁call▁begin｜>oh no");
            check(never, form, &bad, "", &bad, &[]);
            check(never, form, &format!("{begin}oh"), "", &format!("{begin}oh"), &[]);
            check(never, form, &format!(" {begin}{end}"), "", &format!(" {begin}{end}"), &[]);
            let no_object = format!("{begin}{}", call("f", "oh"));
            check(never, form, &no_object, "", &no_object, &[]);
            check(never, form, &format!("{begin}{g}oh{end}"), "", &format!("oh{end}"), &[("g", "{}")]);
            // An output that is cut, also in the marks behind a call.
            check(never, form, &format!("{begin}{g}<｜tool▁ca"), "", "", &[("g", "{}")]);
            let (cut, _) = g.split_once("{}").unwrap();
            check(never, form, &format!("{begin}{cut}{{\"n\": 1"), "", "", &[("g", "{\"n\": 1")]);
            let (cut, _) = f.split_once('{').unwrap();
            comes_in_parts(never, of, &format!("{begin}{cut}"), TRICKY);
        }
    }
}

//! The pieces of a parsed output, and how much of a text must be held back because it may be the beginning of a mark.
//! Not here: parsing outputs (`output`).

use serde_json::Value;

/// A piece of an output. Calls are numbered from 0, and the pieces of a call are consecutive.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Piece {
    /// A part of the reasoning.
    Reasoning(String),
    /// A part of the content.
    Content(String),
    /// The beginning of a call of this function.
    Call { index: usize, name: String },
    /// A part of the call's arguments, which form a JSON object.
    Arguments { index: usize, text: String },
}

/// Returns the length of the longest suffix of `text` that is a prefix of `mark`, or white space before one.
pub(super) fn held(text: &str, mark: &str, space: bool) -> usize {
    let most = text.len().min(mark.len() - 1);
    let part = (0..=most)
        .rev()
        .find(|&length| text.is_char_boundary(text.len() - length) && mark.starts_with(&text[text.len() - length..]));
    let part = part.unwrap_or(0);
    let before = &text[..text.len() - part];
    if space { text.len() - before.trim_end().len() } else { part }
}

/// Returns the length of the longest suffix of `text` that is a prefix of one of `marks`.
pub(super) fn held_of(text: &str, marks: impl Iterator<Item = &'static str>) -> usize {
    marks.map(|mark| held(text, mark, false)).max().unwrap_or(0)
}

pub(super) fn content(text: &str, pieces: &mut Vec<Piece>) {
    if !text.is_empty() {
        pieces.push(Piece::Content(text.to_owned()));
    }
}

/// Emits an argument of a call, of which `count` arguments were emitted before; `value` is JSON.
pub(super) fn argument(index: usize, count: &mut usize, name: &str, value: &str, pieces: &mut Vec<Piece>) {
    let comma = if *count == 0 { "{" } else { ", " };
    pieces.push(Piece::Arguments { index, text: format!("{comma}{}: {value}", Value::from(name)) });
    *count += 1;
}

/// Emits the end of the arguments of a call, of which `count` were emitted.
pub(super) fn end_of_arguments(index: usize, count: usize, pieces: &mut Vec<Piece>) {
    let text = if count == 0 { "{}" } else { "}" }.to_owned();
    pieces.push(Piece::Arguments { index, text });
}

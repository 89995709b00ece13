//! The parts of an output, and what is held back of a text that may end with the beginning of a mark.
//! Not here: how outputs are read (`output`).

/// A part of an output. Calls are numbered from 0; the pieces of one call follow each other.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Piece {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A call of this function begins.
    Call { index: usize, name: String },
    /// More of the call's arguments, a JSON object in pieces.
    Arguments { index: usize, text: String },
}

/// The length of the longest end of `text` that is a beginning of `mark`, or of white space before one.
pub(super) fn held(text: &str, mark: &str, space: bool) -> usize {
    let most = text.len().min(mark.len() - 1);
    let part = (0..=most)
        .rev()
        .find(|&length| text.is_char_boundary(text.len() - length) && mark.starts_with(&text[text.len() - length..]));
    let part = part.unwrap_or(0);
    let before = &text[..text.len() - part];
    if space { text.len() - before.trim_end().len() } else { part }
}

/// The length of the longest end of `text` that is a beginning of one of `marks`.
pub(super) fn held_of(text: &str, marks: impl Iterator<Item = &'static str>) -> usize {
    marks.map(|mark| held(text, mark, false)).max().unwrap_or(0)
}

pub(super) fn content(text: &str, pieces: &mut Vec<Piece>) {
    if !text.is_empty() {
        pieces.push(Piece::Content(text.to_owned()));
    }
}

//! From token ids to text, one id at a time, without ever splitting a character and without
//! decoding from the beginning. Deliberately absent: stop strings.

use super::Text;

/// What a decoder puts in place of bytes that are no (complete) character.
const REPLACEMENT: char = '\u{FFFD}';

/// A window that has not become complete after so many tokens holds damaged bytes, not the
/// beginning of a character; it is let go so that a step's work stays bounded.
const WINDOW_TOKENS: usize = 256;

/// Tokens of context at most. Context of white space alone is extended until it has something else, as decoders may
/// remove what a text begins with.
const CONTEXT_TOKENS: usize = 64;

/// Tokens of the prompt's end that are pushed first, at least: enough to find the beginning of a character, and some
/// that are not white space.
const PROMPT_TOKENS: usize = 8;

/// The longest character has as many bytes, and so many tokens at most.
const CHARACTER_TOKENS: usize = 4;

/// The detokenizer of one sequence.
///
/// Only a window of ids is decoded: those after the last point at which the text was complete,
/// and before them, as context, those of the last delta (decoders treat the first token of a
/// text differently: SentencePiece's remove its space). A delta is what the window's text has gained, without
/// replacement characters at its end: the next ids may turn those into a character. Joined, the deltas and
/// the rest from `finish` are the text of all ids, without the special ones where not asked for. Behind a prompt
/// ([`TextStream::after`]) they are what the text of the prompt and all ids has beyond the prompt's.
#[derive(Clone, Debug)]
pub struct TextStream {
    text: Text,
    /// Special tokens are text too.
    special: bool,
    /// Context, then what is not complete; grows by `push`, shrinks when complete.
    window: Vec<u32>,
    /// How many ids at the beginning of `window` are context.
    context: usize,
    /// The part of the window's text that is context or has been handed out.
    emitted: String,
}

impl TextStream {
    pub(super) fn new(text: Text, special: bool) -> TextStream {
        TextStream { text, special, window: Vec::new(), context: 0, emitted: String::new() }
    }

    /// The same for ids that follow a prompt: what they mean may depend on its last tokens. A character that the prompt
    /// has only the beginning of comes out whole with the first ids.
    pub fn after(mut self, prompt: &[u32]) -> TextStream {
        let tail = prompt.iter().rev().copied().filter(|id| self.text.is_text(*id, self.special));
        let mut tail: Vec<u32> = tail.take(CONTEXT_TOKENS).collect();
        tail.reverse();
        for id in &tail[self.beginning(&tail)..] {
            self.push(*id);
        }
        self
    }

    /// Where to begin in the last tokens of a prompt: far enough from their end, at something that is not white space,
    /// and not inside a character. (The bytes of one that lacks its beginning would spoil those that come.)
    fn beginning(&self, tail: &[u32]) -> usize {
        let begins = |at: usize| {
            (1..=CHARACTER_TOKENS.min(tail.len() - at))
                .map(|tokens| self.text.window(&tail[at..at + tokens], self.special))
                .any(|text| !text.trim_start().is_empty() && !text.starts_with(REPLACEMENT))
        };
        (0..=tail.len().saturating_sub(PROMPT_TOKENS)).rev().find(|at| *at < tail.len() && begins(*at)).unwrap_or(0)
    }

    /// Takes the next id; the text that it completes, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if !self.text.is_text(id, self.special) {
            return None;
        }
        self.window.push(id);
        let decoded = self.text.window(&self.window, self.special);
        let full = self.window.len() - self.context >= WINDOW_TOKENS;
        let stable = if full { &decoded[..] } else { decoded.trim_end_matches(REPLACEMENT) };
        let delta = gained(&self.emitted, stable).to_owned();
        if delta.is_empty() {
            return None;
        }
        if stable.len() == decoded.len() {
            self.shorten();
        } else {
            self.emitted = stable.to_owned();
        }
        Some(delta)
    }

    /// All of the window is context now: keeps the end of it, which begins where a delta has begun.
    fn shorten(&mut self) {
        let last = self.text.window(&self.window[self.context..], self.special);
        // By itself it may have lost its beginning: more than that must be left.
        if last.trim().is_empty() {
            self.window.drain(..if self.window.len() > CONTEXT_TOKENS { CONTEXT_TOKENS / 2 } else { 0 });
            self.emitted = self.text.window(&self.window, self.special);
        } else {
            self.window.drain(..self.context);
            self.emitted = last;
        }
        self.context = self.window.len();
    }

    /// The rest of the text: what never became a character is `U+FFFD`.
    pub fn finish(&mut self) -> String {
        let decoded = self.text.window(&self.window, self.special);
        let rest = gained(&self.emitted, &decoded).to_owned();
        self.window.clear();
        self.context = 0;
        self.emitted.clear();
        rest
    }
}

/// What `decoded` has beyond `emitted`. Text that was handed out cannot be taken back: where a
/// decoder has changed its mind about it, as many characters are skipped as were handed out.
fn gained<'a>(emitted: &str, decoded: &'a str) -> &'a str {
    decoded
        .strip_prefix(emitted)
        .unwrap_or_else(|| decoded.char_indices().nth(emitted.chars().count()).map_or("", |(at, _)| &decoded[at..]))
}

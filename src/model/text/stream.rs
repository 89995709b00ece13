//! Incremental detokenization: converts token ids to text one id at a time, without splitting a character and without
//! decoding from the beginning each time.
//!
//! Not here: stop strings.

use super::Text;
use std::sync::Arc;

/// The character that a decoder substitutes for bytes that are not a complete character.
const REPLACEMENT: char = '\u{FFFD}';

/// The maximum number of tokens in an incomplete window. A longer one contains invalid bytes rather than the beginning
/// of a character, and is emitted so that the work of a step stays bounded.
const WINDOW_TOKENS: usize = 256;

/// The maximum number of context tokens. Context that is only white space is extended until it contains something else,
/// because decoders may strip white space at the beginning of a text.
const CONTEXT_TOKENS: usize = 64;

/// The minimum number of tokens from the end of a prompt that are pushed first: enough to find the beginning of a
/// character, and some that are not white space.
const PROMPT_TOKENS: usize = 8;

/// The maximum number of bytes of a UTF-8 character, and so the maximum number of its tokens.
const CHARACTER_TOKENS: usize = 4;

/// The special tokens that are included in a text.
#[derive(Clone, Debug)]
pub(super) enum SpecialIds {
    None,
    These(Arc<[u32]>),
    All,
}

/// The incremental detokenizer of one sequence.
///
/// Only a window of ids is decoded: those after the last point at which the text was complete and, before them, the ids
/// of the last delta as context. (Decoders treat the first token of a text differently: those of SentencePiece remove
/// its leading space.) A delta is the text that the window has gained, without trailing replacement characters, because
/// the next ids may turn those into a character. The concatenation of all deltas and the rest from `finish` is the text
/// of all ids, without special tokens unless they were requested. After a prompt ([`TextStream::after`]), it is the
/// part of the text of prompt and ids together that follows the prompt's text.
#[derive(Clone, Debug)]
pub struct TextStream {
    text: Text,
    special: SpecialIds,
    /// The context ids followed by the ids whose text is incomplete. Grows with each `push`; shrinks when the text is
    /// complete.
    window: Vec<u32>,
    /// The number of context ids at the beginning of `window`.
    context: usize,
    /// The part of the window's text that is context or has already been returned.
    emitted: String,
    /// Whether an id that has text was taken since the prompt. Until then there is nothing to return, not even the
    /// bytes of a character in whose middle the prompt ends.
    begun: bool,
}

impl TextStream {
    pub(super) fn new(text: Text, special: SpecialIds) -> TextStream {
        TextStream { text, special, window: Vec::new(), context: 0, emitted: String::new(), begun: false }
    }

    /// Returns a detokenizer for ids that follow a prompt, because their text may depend on the prompt's last tokens. A
    /// character that the prompt ends in the middle of is returned whole with the first ids.
    pub fn after(mut self, prompt: &[u32]) -> TextStream {
        let tail = prompt.iter().rev().copied().filter(|id| self.is_text(*id));
        let mut tail: Vec<u32> = tail.take(CONTEXT_TOKENS).collect();
        tail.reverse();
        for id in &tail[self.beginning(&tail)..] {
            self.push(*id);
        }
        self.begun = false;
        self
    }

    /// Returns the index in `tail`, the last tokens of a prompt, at which to begin: at least PROMPT_TOKENS from the
    /// end, at text that is not white space, and not inside a character. (The bytes of a character without its
    /// beginning would spoil the ones that follow.) Returns 0 if there is no such index.
    fn beginning(&self, tail: &[u32]) -> usize {
        let begins = |at: usize| {
            (1..=CHARACTER_TOKENS.min(tail.len() - at))
                .map(|tokens| self.text.window(&tail[at..at + tokens]))
                .any(|text| !text.trim_start().is_empty() && !text.starts_with(REPLACEMENT))
        };
        (0..=tail.len().saturating_sub(PROMPT_TOKENS)).rev().find(|at| *at < tail.len() && begins(*at)).unwrap_or(0)
    }

    /// Whether the id is in the vocabulary and appears in the text.
    fn is_text(&self, id: u32) -> bool {
        let included = match &self.special {
            SpecialIds::All => true,
            SpecialIds::None => !self.text.is_special(id),
            SpecialIds::These(ids) => ids.contains(&id) || !self.text.is_special(id),
        };
        included && self.text.is_known(id)
    }

    /// Takes the next id and returns the text that it completes, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if !self.is_text(id) {
            return None;
        }
        self.begun = true;
        self.window.push(id);
        let decoded = self.text.window(&self.window);
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

    /// Makes the whole window context and trims it to its end, beginning where a delta began.
    fn shorten(&mut self) {
        let last = self.text.window(&self.window[self.context..]);
        // Text of only white space may be stripped when decoded by itself, so keep more context than that.
        if last.trim().is_empty() {
            self.window.drain(..if self.window.len() > CONTEXT_TOKENS { CONTEXT_TOKENS / 2 } else { 0 });
            self.emitted = self.text.window(&self.window);
        } else {
            self.window.drain(..self.context);
            self.emitted = last;
        }
        self.context = self.window.len();
    }

    /// Returns the rest of the text. Bytes that never became a character are `U+FFFD`.
    pub fn finish(&mut self) -> String {
        let decoded = self.text.window(&self.window);
        let rest = if self.begun { gained(&self.emitted, &decoded).to_owned() } else { String::new() };
        self.window.clear();
        self.context = 0;
        self.emitted.clear();
        rest
    }
}

/// Returns the part of `decoded` that follows `emitted`. Text that was already returned cannot be changed: if the
/// decoder now decodes it differently, the same number of characters is skipped.
fn gained<'a>(emitted: &str, decoded: &'a str) -> &'a str {
    decoded
        .strip_prefix(emitted)
        .unwrap_or_else(|| decoded.char_indices().nth(emitted.chars().count()).map_or("", |(at, _)| &decoded[at..]))
}

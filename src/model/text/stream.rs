//! From token ids to text, one id at a time, without ever splitting a character and without
//! decoding from the beginning. Deliberately absent: stop strings.

use super::Text;

/// What a decoder puts in place of bytes that are no (complete) character.
const REPLACEMENT: char = '\u{FFFD}';

/// A window that has not become complete after so many tokens holds damaged bytes, not the
/// beginning of a character; it is let go so that a step's work stays bounded.
const WINDOW_TOKENS: usize = 256;

/// The detokenizer of one sequence.
///
/// Only a window of ids is decoded: those after the last point at which the text was complete,
/// and before them, as context, those of the last delta (decoders treat the first token of a
/// text differently). A delta is what the window's text has gained, without replacement
/// characters at its end: the next ids may turn those into a character. Joined, the deltas and
/// the rest from `finish` are the text of all ids, without the special ones where not asked for.
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
            self.window.drain(..self.context);
            self.context = self.window.len();
            self.emitted = self.text.window(&self.window, self.special);
        } else {
            self.emitted = stable.to_owned();
        }
        Some(delta)
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

//! Converts token ids to the text of one sequence, up to its end or to its first stop string: the detokenizer combined
//! with stop string matching.
//!
//! Not here: end-of-sequence ids, which the engine handles.

use super::stop::{Passed, StopStrings};
use super::stream::TextStream;

/// The detokenizer and stop strings of one sequence.
#[derive(Clone, Debug)]
pub struct Assembler {
    stream: TextStream,
    stops: StopStrings,
    /// The number of further ids during which completed stop strings are ignored.
    unwatched: u32,
    /// The ids whose text is held back or still empty. They are returned with the next text.
    pending: Vec<u32>,
}

/// The text and ids that one pushed id releases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputText {
    /// Complete characters that precede any stop string.
    pub text: String,
    /// The ids that this output accounts for: all ids pushed since the previous non-empty output. Every pushed id is in
    /// exactly one output, in order.
    pub tokens: Vec<u32>,
    /// The stop string that was matched. No output follows it.
    pub stopped: Option<String>,
}

impl OutputText {
    /// Whether nothing can be passed on yet.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty() && self.stopped.is_none()
    }
}

impl Assembler {
    pub(super) fn new(stream: TextStream, stops: Vec<String>) -> Assembler {
        Assembler { stream, stops: StopStrings::new(stops), unwatched: 0, pending: Vec::new() }
    }

    /// Returns an assembler that ignores stop strings completed within the first `tokens` ids.
    pub fn not_before(self, tokens: u32) -> Assembler {
        Assembler { unwatched: tokens, ..self }
    }

    /// Returns an assembler for a sequence that follows a prompt, see [`TextStream::after`]. Stop strings are matched
    /// in the generated text only, not in the prompt.
    pub fn after(self, prompt: &[u32]) -> Assembler {
        Assembler { stream: self.stream.after(prompt), ..self }
    }

    /// Takes the next id. Ids after a stop string are ignored.
    pub fn push(&mut self, id: u32) -> OutputText {
        if self.stops.is_stopped() {
            return OutputText::default();
        }
        self.pending.push(id);
        let delta = self.stream.push(id);
        let output = delta.map_or_else(OutputText::default, |delta| self.pass(&delta));
        self.unwatched = self.unwatched.saturating_sub(1);
        output
    }

    /// Returns the remaining text when no more ids follow. It may still contain a stop string.
    pub fn finish(&mut self) -> OutputText {
        if self.stops.is_stopped() {
            return OutputText::default();
        }
        let rest = self.stream.finish();
        let mut output = self.pass(&rest);
        if output.stopped.is_none() {
            output.text.push_str(&self.stops.finish());
        }
        output.tokens.append(&mut self.pending);
        output
    }

    fn pass(&mut self, delta: &str) -> OutputText {
        let passed = match self.unwatched {
            0 => self.stops.push(delta),
            _ => Passed { text: self.stops.pass(delta), stopped: None },
        };
        if passed.text.is_empty() && passed.stopped.is_none() {
            return OutputText::default();
        }
        OutputText { text: passed.text, tokens: std::mem::take(&mut self.pending), stopped: passed.stopped }
    }
}

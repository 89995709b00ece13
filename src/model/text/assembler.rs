//! Ids in, text out, to the end of a sequence or to its first stop string: the detokenizer and
//! the stop strings as one. Deliberately absent: end-of-sequence ids, which are the engine's.

use super::stop::{Passed, StopStrings};
use super::stream::TextStream;

/// The text of one sequence.
#[derive(Clone, Debug)]
pub struct Assembler {
    stream: TextStream,
    stops: StopStrings,
    /// Ids that are still to come before a stop string counts.
    unwatched: u32,
    /// Ids whose text is held back or empty so far; handed out with the next text.
    pending: Vec<u32>,
}

/// What an id brought out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Complete characters, before any stop string.
    pub text: String,
    /// The ids that this output accounts for: all those pushed since the last output that was
    /// not empty. Every pushed id is in exactly one output, in order.
    pub tokens: Vec<u32>,
    /// The stop string that was met: nothing follows.
    pub stopped: Option<String>,
}

impl Output {
    /// Whether there is nothing to hand on yet.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty() && self.stopped.is_none()
    }
}

impl Assembler {
    pub(super) fn new(stream: TextStream, stops: Vec<String>) -> Assembler {
        Assembler { stream, stops: StopStrings::new(stops), unwatched: 0, pending: Vec::new() }
    }

    /// The same where no stop string counts that is complete within the first `tokens` ids.
    pub fn not_before(self, tokens: u32) -> Assembler {
        Assembler { unwatched: tokens, ..self }
    }

    /// The same for a sequence that follows a prompt, as [`TextStream::after`] says. Stop strings are looked for in what
    /// comes, not in the prompt.
    pub fn after(self, prompt: &[u32]) -> Assembler {
        Assembler { stream: self.stream.after(prompt), ..self }
    }

    /// Takes the next id. Ids after a stop string are ignored.
    pub fn push(&mut self, id: u32) -> Output {
        if self.stops.is_stopped() {
            return Output::default();
        }
        self.pending.push(id);
        let delta = self.stream.push(id);
        let output = delta.map_or_else(Output::default, |delta| self.pass(&delta));
        self.unwatched = self.unwatched.saturating_sub(1);
        output
    }

    /// The rest, now that no id follows; a stop string may still be met in it.
    pub fn finish(&mut self) -> Output {
        if self.stops.is_stopped() {
            return Output::default();
        }
        let rest = self.stream.finish();
        let mut output = self.pass(&rest);
        if output.stopped.is_none() {
            output.text.push_str(&self.stops.finish());
        }
        output.tokens.append(&mut self.pending);
        output
    }

    fn pass(&mut self, delta: &str) -> Output {
        let passed = match self.unwatched {
            0 => self.stops.push(delta),
            _ => Passed { text: self.stops.pass(delta), stopped: None },
        };
        if passed.text.is_empty() && passed.stopped.is_none() {
            return Output::default();
        }
        Output { text: passed.text, tokens: std::mem::take(&mut self.pending), stopped: passed.stopped }
    }
}

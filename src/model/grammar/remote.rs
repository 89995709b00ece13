//! The messages between [`Grammars`](super::Grammars) and its worker processes, and the worker's side: a cache of
//! compiled constraints and the outputs that follow them.
//!
//! Not here: process management and limits.

use super::compiled::{Compiled, Compiler, Follower};
use super::kept::Kept;
use super::vocabulary::Vocabulary;
use super::{Constraint, GrammarError, Next};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// A request to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Compile a constraint, and start an output that follows it.
    Start { output: u64, constraint: Constraint, ignore_eos: bool },
    /// Take tokens of an output that were generated before. The masks between them are not needed.
    Replay { output: u64, tokens: Vec<u32> },
    /// Take a token and return what may follow.
    Take { output: u64, token: u32 },
    /// Drop an output that has ended.
    Forget { output: u64 },
}

/// The first byte of a worker's answer.
pub(super) mod tag {
    /// Followed by the estimated size of the constraint in bytes (a little-endian u64) and the first mask.
    pub(in super::super) const STARTED: u8 = 1;
    /// Followed by a mask.
    pub(in super::super) const MASK: u8 = 2;
    /// The output is complete.
    pub(in super::super) const COMPLETE: u8 = 3;
    /// Followed by a [`GrammarError`](super::GrammarError) as JSON.
    pub(in super::super) const ERROR: u8 = 4;
    /// A question: tokenize the text that follows.
    pub(in super::super) const TOKENS: u8 = 5;
    /// Success without a result. Followed by the number of remaining outputs (a little-endian u64).
    pub(in super::super) const DONE: u8 = 6;
    /// The worker has no output with this number.
    pub(in super::super) const UNKNOWN: u8 = 7;
}

/// The worker's side: compiles constraints and follows them inside a worker process.
pub(crate) struct Service {
    compiler: Compiler,
    kept: Kept<Compiled>,
    outputs: HashMap<u64, Follower>,
}

/// The maximum length in bytes of a text to tokenize with the model's tokenizer. A longer one is tokenized greedily,
/// because a long forced text is tokenized again for each token.
const MOST_ASKED: usize = 4096;

impl Service {
    /// Parses the first frame, without its first byte. `ask` sends a question to the process that has the tokenizer and
    /// returns its answer.
    pub(crate) fn new(
        first: &[u8],
        ask: impl Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Result<Service, GrammarError> {
        let cut = || GrammarError::Invalid("the worker's vocabulary is cut".to_owned());
        let vocabulary = Vocabulary::read(first).ok_or_else(cut)?;
        let tokenize = move |text: &str| {
            if text.len() > MOST_ASKED {
                return None;
            }
            let answer = ask(&[&[tag::TOKENS], text.as_bytes()].concat())?;
            let ids = answer.strip_prefix(&[1])?.chunks_exact(4);
            Some(ids.map(|id| u32::from_le_bytes(id.try_into().expect("four bytes"))).collect())
        };
        let compiler = Compiler::new(&vocabulary, tokenize)?;
        Ok(Service { compiler, kept: Kept::default(), outputs: HashMap::new() })
    }

    /// Answers a request frame.
    pub(crate) fn answer(&mut self, frame: &[u8]) -> Vec<u8> {
        let asked = serde_json::from_slice(frame).map_err(|error| GrammarError::Invalid(error.to_string()));
        let answer = asked.and_then(|asked| self.take(asked));
        answer.unwrap_or_else(|error| {
            let words = serde_json::to_vec(&error).unwrap_or_default();
            [&[tag::ERROR][..], &words].concat()
        })
    }

    fn take(&mut self, asked: Ask) -> Result<Vec<u8>, GrammarError> {
        match asked {
            Ask::Start { output, constraint, ignore_eos } => {
                let compiled = match self.kept.find(&constraint, ignore_eos) {
                    Some(kept) => kept,
                    None => {
                        let compiled = Arc::new(self.compiler.compile(&constraint, ignore_eos)?);
                        self.kept.keep(&constraint, ignore_eos, compiled.bytes, &compiled);
                        compiled
                    }
                };
                self.outputs.insert(output, compiled.follower.clone());
                let bytes = (compiled.bytes as u64).to_le_bytes();
                Ok([&[tag::STARTED][..], &bytes, bytemuck::cast_slice(&compiled.mask)].concat())
            }
            Ask::Replay { output, tokens } => match self.outputs.get_mut(&output) {
                None => Ok(vec![tag::UNKNOWN]),
                Some(follower) => follower.replay(&tokens).map(|()| self.done()),
            },
            Ask::Take { output, token } => match self.outputs.get_mut(&output) {
                None => Ok(vec![tag::UNKNOWN]),
                Some(follower) => match follower.take(token)? {
                    Next::Mask(mask) => Ok([&[tag::MASK][..], bytemuck::cast_slice(&mask)].concat()),
                    Next::Complete => Ok(vec![tag::COMPLETE]),
                },
            },
            Ask::Forget { output } => {
                self.outputs.remove(&output);
                Ok(self.done())
            }
        }
    }

    fn done(&self) -> Vec<u8> {
        [&[tag::DONE][..], &(self.outputs.len() as u64).to_le_bytes()].concat()
    }
}

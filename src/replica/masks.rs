//! Requests the masks of constrained sequences from worker processes. A grammar can take milliseconds or more to
//! compute a mask, and the engine thread must not wait for it. Every request is answered.
//! Not here: the states of sequences, and the worker processes (`actors::workers`).

use crate::engine::sequence::SequenceId;
use crate::model::grammar::{Grammar, GrammarError, Next};
use crossbeam_channel::{Receiver, Sender, unbounded};

/// The channel for the workers' answers.
#[derive(Debug)]
pub(super) struct Masks {
    // Unbounded, but a sequence has one request at a time, so there are never more answers than sequences.
    answers: (Sender<Answer>, Receiver<Answer>),
}

/// The result of a grammar that took a token.
#[derive(Debug)]
pub(super) struct Answer {
    /// The sequence.
    pub id: SequenceId,
    /// Its grammar, which has taken the token.
    pub grammar: Box<Grammar>,
    /// The mask of the next token, the end of the output, or an error.
    pub next: Result<Next, GrammarError>,
}

impl Default for Masks {
    fn default() -> Masks {
        Masks { answers: unbounded() }
    }
}

impl Masks {
    /// Requests the mask of the tokens that may follow `token`; the answer comes through [`Masks::answers`].
    pub(super) fn take(&self, id: SequenceId, grammar: Box<Grammar>, token: u32) {
        let answers = self.answers.0.clone();
        grammar.take_then(token, move |grammar, next| {
            // The replica may have ended meanwhile.
            let _ = answers.send(Answer { id, grammar, next });
        });
    }

    /// Returns the channel of answers, which come in any order.
    pub(super) fn answers(&self) -> &Receiver<Answer> {
        &self.answers.1
    }
}

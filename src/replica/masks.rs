//! Has worker processes find out what constrained sequences may draw next: a grammar can take milliseconds, and more, for
//! what the engine's thread must not wait for. Does not know sequences' states, and never drops a question.

use crate::engine::sequence::SequenceId;
use crate::model::grammar::{Grammar, GrammarError, Next};
use crossbeam_channel::{Receiver, Sender, unbounded};

/// Where answers come in.
#[derive(Debug)]
pub(super) struct Masks {
    // A sequence has one question at a time: there are never more answers than sequences.
    answers: (Sender<Answer>, Receiver<Answer>),
}

/// What may follow a token.
#[derive(Debug)]
pub(super) struct Answer {
    /// Of which sequence.
    pub id: SequenceId,
    /// Its grammar, behind the token.
    pub grammar: Box<Grammar>,
    /// What follows.
    pub next: Result<Next, GrammarError>,
}

impl Default for Masks {
    fn default() -> Masks {
        Masks { answers: unbounded() }
    }
}

impl Masks {
    /// Asks what may follow `token`.
    pub(super) fn take(&self, id: SequenceId, grammar: Box<Grammar>, token: u32) {
        let answers = self.answers.0.clone();
        grammar.take_then(token, move |grammar, next| {
            // The replica may have ended meanwhile.
            let _ = answers.send(Answer { id, grammar, next });
        });
    }

    /// What was found out, in no order.
    pub(super) fn answers(&self) -> &Receiver<Answer> {
        &self.answers.1
    }
}

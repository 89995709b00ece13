//! Finds out what constrained sequences may draw next, on threads of its own: a grammar can take milliseconds for what
//! the engine's thread must not wait for. Does not know sequences' states, and never drops a question.

use super::sequence::SequenceId;
use crate::model::grammar::{Grammar, GrammarError, Next};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// Most threads of a replica: they serve steps whose rows all wait for the slowest.
const MOST_THREADS: usize = 8;

/// Handle of the threads; they begin with the first question.
#[derive(Debug)]
pub struct Masks {
    // Order matters: the inbox closes before the threads are joined.
    inbox: Option<Sender<Message>>,
    threads: Vec<JoinHandle<()>>,
    questions: Receiver<Message>,
    answers: (Sender<Answer>, Receiver<Answer>),
    name: String,
}

/// What may follow a token.
#[derive(Debug)]
pub struct Answer {
    /// Of which sequence.
    pub id: SequenceId,
    /// Its grammar, behind the token.
    pub grammar: Box<Grammar>,
    /// What follows.
    pub next: Result<Next, GrammarError>,
}

#[derive(Debug)]
enum Message {
    Take { id: SequenceId, grammar: Box<Grammar>, token: u32 },
}

impl Masks {
    /// For the replica of that name.
    pub fn new(name: &str) -> Masks {
        // A sequence has one question at a time: there are never more than sequences.
        let (inbox, questions) = unbounded();
        Masks { inbox: Some(inbox), threads: Vec::new(), questions, answers: unbounded(), name: name.to_owned() }
    }

    /// Asks what may follow `token`. Fails only where the system has no thread to give.
    pub fn take(&mut self, id: SequenceId, grammar: Box<Grammar>, token: u32) -> std::io::Result<()> {
        if self.threads.is_empty() {
            self.begin()?;
        }
        if let Some(inbox) = &self.inbox {
            // The threads live as long as the handle.
            let _ = inbox.send(Message::Take { id, grammar, token });
        }
        Ok(())
    }

    /// What was found out, in no order.
    pub fn answers(&self) -> &Receiver<Answer> {
        &self.answers.1
    }

    fn begin(&mut self) -> std::io::Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        for index in 0..(cores / 2).clamp(1, MOST_THREADS) {
            let actor = Actor { questions: self.questions.clone(), answers: self.answers.0.clone() };
            let thread = std::thread::Builder::new().name(format!("masks {} {index}", self.name));
            match thread.spawn(move || actor.run()) {
                Ok(thread) => self.threads.push(thread),
                // One is enough.
                Err(error) if self.threads.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }
}

impl Drop for Masks {
    fn drop(&mut self) {
        drop(self.inbox.take());
        for thread in self.threads.drain(..) {
            // It has ended, or panicked and said so.
            let _ = thread.join();
        }
    }
}

struct Actor {
    questions: Receiver<Message>,
    answers: Sender<Answer>,
}

impl Actor {
    fn run(self) {
        for Message::Take { id, mut grammar, token } in &self.questions {
            // Whoever waits for the answer must have one.
            let taken = catch_unwind(AssertUnwindSafe(|| grammar.take(token)));
            let next = taken.unwrap_or_else(|_| Err(GrammarError::Stuck("its parser has panicked".to_owned())));
            if self.answers.send(Answer { id, grammar, next }).is_err() {
                return;
            }
        }
    }
}

//! Structured output: what an output may look like (a JSON Schema, a regular expression, a grammar, one of several
//! texts), and from there, token after token, which tokens may be drawn next. The parsing is llguidance's, in worker
//! processes (`actors::workers`): neither its stack nor its memory nor its time can be bounded inside this process.
//! Deliberately absent: who draws, and when.

mod compiled;
mod ebnf;
mod kept;
mod remote;
mod structural;
mod vocabulary;

pub use kept::Uses;
pub use structural::structural_tag;

pub(crate) use remote::Service;

use crate::actors::workers::{Cancel, Failure, Home, Limits, Worker, Workers, limits};
use crate::kernels::sampling::mask_words;
use crate::model::text::{Text, Tokens};
use kept::Kept;
use remote::{Ask, tag};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vocabulary::Vocabulary;

/// A first mask and about how many bytes its parser takes, or what is wrong with the constraint.
type Begun = Result<(Arc<[u32]>, usize), GrammarError>;

/// Bytes of a schema, expression or grammar, or of all choices together.
pub const MOST_BYTES: usize = 256 << 10;
/// Choices of one constraint.
pub const MOST_CHOICES: usize = 1024;
/// White space that may stand between the parts of a JSON text: a space or two, or a new line and its indentation. No
/// more, since a model that has begun with it may never end.
const JSON_SPACE: &str = r"\x20{1,2}|\x0D?\x0A(\x20{0,24}|\x09{0,8})";
/// The first byte of the first frame of workers that follow constraints.
pub(crate) const WORKER: u8 = b'g';
/// Tokens that are replayed at once, so that no replay meets the limit of time by its length.
const REPLAYED: usize = 512;
/// A constraint whose first mask took longer is not waited for with a batch.
const SLOW: Duration = Duration::from_millis(50);

/// What an output must look like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Constraint {
    /// JSON that satisfies this JSON Schema.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// Text that this regular expression matches from its beginning to its end.
    Regex(String),
    /// Text derived from this grammar: EBNF as llama.cpp and XGrammar write it (`root ::= ...`), or Lark.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// What routers ask for with tool calls, see [`structural_tag`].
    StructuralTag(String),
}

impl Constraint {
    /// Of its texts.
    fn bytes(&self) -> usize {
        match self {
            Constraint::JsonSchema(text)
            | Constraint::Regex(text)
            | Constraint::Grammar(text)
            | Constraint::StructuralTag(text) => text.len(),
            Constraint::Choice(choices) => choices.iter().map(String::len).sum(),
            Constraint::JsonObject => 0,
        }
    }
}

/// Why an output cannot be constrained so, or not any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum GrammarError {
    /// The tokens' bytes are not known.
    #[error("constraints need a byte-level or byte-fallback tokenizer, this model's is neither")]
    Tokenizer,
    /// Too long.
    #[error("the constraint has {bytes} bytes, at most {MOST_BYTES} are taken")]
    TooLong {
        /// Given.
        bytes: usize,
    },
    /// Too many, or none.
    #[error("the constraint has {choices} choices, 1 to {MOST_CHOICES} are taken")]
    Choices {
        /// Given.
        choices: usize,
    },
    /// Not what it should be.
    #[error("the constraint cannot be used: {0}")]
    Invalid(String),
    /// The parser gave up.
    #[error("the constraint became too complex to follow: {0}")]
    Stuck(String),
    /// It meets a limit of its worker process: stack, memory or processor time.
    #[error("the constraint is too large to be followed: {0}")]
    TooLarge(String),
    /// Its call has ended.
    #[error("nobody waits for the constraint any more")]
    Cancelled,
    /// There is no worker process to follow it.
    #[error("no constraint can be followed now: {0}")]
    Unavailable(String),
}

impl From<Failure> for GrammarError {
    fn from(failure: Failure) -> GrammarError {
        match failure {
            Failure::Memory { .. } | Failure::Stack { .. } | Failure::Time { .. } => {
                GrammarError::TooLarge(failure.to_string())
            }
            Failure::Panicked => GrammarError::Invalid(failure.to_string()),
            Failure::Cancelled => GrammarError::Cancelled,
            Failure::Died(_) | Failure::Start(_) => GrammarError::Unavailable(failure.to_string()),
        }
    }
}

/// What a model's outputs can be constrained with: its tokens as bytes, and the workers that know them. Made once a
/// model.
pub struct Grammars {
    shared: Arc<Shared>,
    kept: Kept<Beginning>,
}

/// What all outputs of a model share.
struct Shared {
    workers: Workers,
    tokens: Tokens,
    vocabulary: u32,
    /// Numbers of outputs.
    outputs: AtomicU64,
}

/// What is known of a constraint's beginning without its worker.
#[derive(Clone)]
struct Beginning {
    mask: Arc<[u32]>,
    /// Who has compiled it, and likely still has it.
    home: Home,
    slow: bool,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocabulary", &self.shared.vocabulary).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model of `vocabulary` tokens that ends with any of `eos_ids`.
    pub fn new(text: &Text, vocabulary: u32, eos_ids: &[u32]) -> Result<Grammars, GrammarError> {
        Grammars::with(text, vocabulary, eos_ids, limits())
    }

    /// The same with limits of its own.
    pub fn with(text: &Text, vocabulary: u32, eos_ids: &[u32], limits: Limits) -> Result<Grammars, GrammarError> {
        let mut first = vec![WORKER];
        Vocabulary::of(text, vocabulary, eos_ids)?.write(&mut first);
        let workers = Workers::with("constraints", first, limits);
        let shared = Shared { workers, tokens: text.tokens(), vocabulary, outputs: AtomicU64::new(1) };
        Ok(Grammars { shared: Arc::new(shared), kept: Kept::default() })
    }

    /// A constraint at its beginning: compiled, or one of those that were compiled lately. With `ignore_eos` an output
    /// that could end goes on as long as it can.
    pub fn start(&self, constraint: &Constraint, ignore_eos: bool) -> Result<Started, GrammarError> {
        self.start_until(constraint, ignore_eos, &Cancel::default())
    }

    /// The same; gives up when nobody waits for it any more.
    pub fn start_until(
        &self,
        constraint: &Constraint,
        ignore_eos: bool,
        cancel: &Cancel,
    ) -> Result<Started, GrammarError> {
        let bytes = constraint.bytes();
        if bytes > MOST_BYTES {
            return Err(GrammarError::TooLong { bytes });
        }
        let constraint = Arc::new(constraint.clone());
        let output = |home| Output {
            shared: Arc::clone(&self.shared),
            constraint: Arc::clone(&constraint),
            ignore_eos,
            number: self.shared.outputs.fetch_add(1, Ordering::Relaxed),
            home,
            tokens: Vec::new(),
            cancel: Cancel::default(),
        };
        if let Some(kept) = self.kept.find(&constraint, ignore_eos) {
            let Beginning { mask, home, slow } = Beginning::clone(&kept);
            return Ok(Started { grammar: Box::new(Grammar(Some(Box::new(output(Some(home)))))), mask, slow });
        }
        let (mut output, cancel) = (output(None), cancel.clone());
        let begun = Instant::now();
        let (output, compiled) = self.shared.workers.run(None, move |worker| {
            let compiled = output.settled(worker, &cancel, |output, worker| output.begin(worker, &cancel));
            Ok((output, compiled))
        })?;
        let (mask, bytes) = compiled?;
        let slow = begun.elapsed() > SLOW;
        if let Some(home) = output.home {
            let beginning = Beginning { mask: Arc::clone(&mask), home, slow };
            self.kept.keep(&constraint, ignore_eos, bytes, &Arc::new(beginning));
        }
        Ok(Started { grammar: Box::new(Grammar(Some(Box::new(output)))), mask, slow })
    }

    /// The process ids of its workers, for those who watch them.
    pub fn workers(&self) -> Vec<u32> {
        self.shared.workers.processes()
    }

    /// The number of outputs that each worker holds, for those who watch them.
    pub fn held(&self) -> Vec<usize> {
        self.shared.workers.held()
    }

    /// How often constraints were asked for, and of which the work was already done.
    pub fn uses(&self) -> Uses {
        self.kept.uses()
    }
}

/// A constraint at its beginning.
#[derive(Clone, Debug)]
pub struct Started {
    /// To be told each token.
    pub grammar: Box<Grammar>,
    /// What the first token may be: [`Next::Mask`].
    pub mask: Arc<[u32]>,
    /// It took so long that its next masks are not to be waited for.
    pub slow: bool,
}

/// Where one output stands. What is known of it lives in a worker process, and is made again from the constraint and
/// the tokens where that is lost.
pub struct Grammar(Option<Box<Output>>);

struct Output {
    shared: Arc<Shared>,
    constraint: Arc<Constraint>,
    ignore_eos: bool,
    /// Its name among a worker's outputs.
    number: u64,
    /// The worker that has it, or has its constraint.
    home: Option<Home>,
    tokens: Vec<u32>,
    cancel: Cancel,
}

impl Clone for Grammar {
    /// Of its own from here on: nothing is shared that both would wait for.
    fn clone(&self) -> Grammar {
        Grammar(self.0.as_ref().map(|output| {
            Box::new(Output {
                shared: Arc::clone(&output.shared),
                constraint: Arc::clone(&output.constraint),
                ignore_eos: output.ignore_eos,
                number: output.shared.outputs.fetch_add(1, Ordering::Relaxed),
                home: output.home,
                tokens: output.tokens.clone(),
                cancel: Cancel::default(),
            })
        }))
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

/// What may follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// One of these tokens: bit `i % 32` of word `i / 32` stands for token `i`; `vocabulary / 32` words, rounded up.
    Mask(Arc<[u32]>),
    /// Nothing: the output is complete.
    Complete,
}

impl Grammar {
    /// Takes a token that was drawn; says what may follow. Tens of microseconds mostly, up to the limit of time. After
    /// an error there is nothing to go on with.
    pub fn take(&mut self, token: u32) -> Result<Next, GrammarError> {
        let Some(mut output) = self.0.take() else { return Err(ended()) };
        let shared = Arc::clone(&output.shared);
        let (output, next) = shared.workers.run(output.home, move |worker| {
            let next = output.take(worker, token);
            Ok((output, next))
        })?;
        self.0 = Some(output);
        next
    }

    /// The same without waiting: `answer` is called with the grammar, on a thread of the workers'.
    pub fn take_then(
        self: Box<Self>,
        token: u32,
        answer: impl FnOnce(Box<Grammar>, Result<Next, GrammarError>) + Send + 'static,
    ) {
        let Some(mut output) = self.0 else { return answer(self, Err(ended())) };
        let shared = Arc::clone(&output.shared);
        shared.workers.submit(
            output.home,
            Box::new(move |worker| {
                let next = match worker {
                    Ok(worker) => output.take(worker, token),
                    Err(failure) => Err(failure.into()),
                };
                answer(Box::new(Grammar(Some(output))), next);
            }),
        );
    }

    /// What to cancel when its output has ended: what is being found out for it then ends.
    pub fn cancel(&self) -> Cancel {
        self.0.as_ref().map(|output| output.cancel.clone()).unwrap_or_default()
    }
}

fn ended() -> GrammarError {
    GrammarError::Stuck("it has failed before".to_owned())
}

impl Output {
    /// Has `work` done by a worker. One that meets the limit of memory in a worker that holds other outputs has not met
    /// it alone, and is tried once more in a new one.
    fn settled<T>(
        &mut self,
        worker: &mut Worker,
        cancel: &Cancel,
        mut work: impl FnMut(&mut Output, &mut Worker) -> Result<Result<T, GrammarError>, Failure>,
    ) -> Result<T, GrammarError> {
        let alone = worker.calls() == 0;
        match work(self, worker) {
            Err(failure) if failure.may_be_others(alone) && !cancel.is_cancelled() => work(self, worker)?,
            worked => worked?,
        }
    }

    fn call(&self, worker: &mut Worker, asked: &Ask, cancel: &Cancel) -> Result<Vec<u8>, Failure> {
        let frame = serde_json::to_vec(asked).map_err(|error| Failure::Died(error.to_string()))?;
        let tokens = &self.shared.tokens;
        worker.call(&frame, cancel, Some(self.number), tag::TOKENS, &mut |text| {
            // A zero: there are none.
            let ids = std::str::from_utf8(text).ok().and_then(|text| tokens.of(text));
            ids.map_or(vec![0], |ids| [&[1][..], bytemuck::cast_slice(&ids)].concat())
        })
    }

    fn error<T>(&self, answer: &[u8]) -> Result<T, GrammarError> {
        let strange = || GrammarError::Unavailable("a worker process gave a strange answer".to_owned());
        match answer.split_first() {
            Some((&tag::ERROR, words)) => Err(serde_json::from_slice(words).unwrap_or_else(|_| strange())),
            _ => Err(strange()),
        }
    }

    fn mask(&self, bytes: &[u8]) -> Option<Arc<[u32]>> {
        let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
        let mask: Arc<[u32]> = words.collect();
        (mask.len() == mask_words(self.shared.vocabulary) as usize).then_some(mask)
    }

    /// At its beginning in this worker: the first mask, and about how many bytes it takes.
    fn begin(&mut self, worker: &mut Worker, cancel: &Cancel) -> Result<Begun, Failure> {
        let (constraint, ignore_eos) = (Constraint::clone(&self.constraint), self.ignore_eos);
        let asked = Ask::Start { output: self.number, constraint, ignore_eos };
        // Noted before the call: a call that is cancelled may have begun the output all the same.
        let here = worker.home();
        if let Some(before) = self.home.replace(here).filter(|before| *before != here) {
            self.leave(before);
        }
        worker.keep(self.number);
        let answer = self.call(worker, &asked, cancel)?;
        Ok(match answer.split_first_chunk::<9>() {
            Some(([tag::STARTED, bytes @ ..], mask)) => match self.mask(mask) {
                Some(mask) => Ok((mask, u64::from_le_bytes(*bytes) as usize)),
                None => self.error(&[]),
            },
            _ => self.error(&answer),
        })
    }

    fn take(&mut self, worker: &mut Worker, token: u32) -> Result<Next, GrammarError> {
        let cancel = self.cancel.clone();
        let next = self.settled(worker, &cancel, |output, worker| output.try_take(worker, token))?;
        self.tokens.push(token);
        Ok(next)
    }

    fn try_take(&mut self, worker: &mut Worker, token: u32) -> Result<Result<Next, GrammarError>, Failure> {
        let cancel = self.cancel.clone();
        let asked = Ask::Take { output: self.number, token };
        let mut answer = vec![tag::UNKNOWN];
        if self.home == Some(worker.home()) {
            answer = self.call(worker, &asked, &cancel)?;
        }
        if answer == [tag::UNKNOWN] {
            if let Err(error) = self.begin(worker, &cancel)? {
                return Ok(Err(error));
            }
            for tokens in self.tokens.chunks(REPLAYED) {
                let asked = Ask::Replay { output: self.number, tokens: tokens.to_vec() };
                let answer = self.call(worker, &asked, &cancel)?;
                if answer.first() != Some(&tag::DONE) {
                    return Ok(self.error(&answer));
                }
            }
            answer = self.call(worker, &asked, &cancel)?;
        }
        Ok(match answer.split_first() {
            Some((&tag::MASK, mask)) => match self.mask(mask) {
                Some(mask) => Ok(Next::Mask(mask)),
                None => self.error(&[]),
            },
            Some((&tag::COMPLETE, _)) => Ok(Next::Complete),
            _ => self.error(&answer),
        })
    }
}

impl Output {
    /// Has the worker at `home` forget the output, if it holds it. Only that worker can: the job is not for others, and
    /// goes with the worker if that ends.
    fn leave(&self, home: Home) {
        let workers = &self.shared.workers;
        if !workers.release(home, self.number) {
            return;
        }
        let Ok(frame) = serde_json::to_vec(&Ask::Forget { output: self.number }) else { return };
        let most = workers.limits().memory / 4;
        let forget = move |worker: &mut Worker| {
            if worker.calls() > 0
                && let Ok(answer) = worker.call(&frame, &Cancel::default(), None, tag::TOKENS, &mut |_| Vec::new())
                && answer == [&[tag::DONE][..], &0u64.to_le_bytes()].concat()
                && worker.grown() > most
            {
                // The worker holds no output and much memory, which is given back.
                worker.end();
            }
        };
        workers.submit_to(home, Box::new(forget));
    }
}

impl Drop for Output {
    /// Its worker forgets it.
    fn drop(&mut self) {
        if let Some(home) = self.home {
            self.leave(home);
        }
    }
}

/// Whether a mask allows a token.
pub fn bit(mask: &[u32], token: u32) -> bool {
    mask.get((token / 32) as usize).is_some_and(|word| word >> (token % 32) & 1 != 0)
}

//! Structured output: constraints on an output (a JSON Schema, a regular expression, a grammar, or a list of choices),
//! and for each generated token the mask of tokens that may follow. Parsing is done by llguidance in worker processes
//! (`actors::workers`), because its stack, memory and time cannot be bounded inside this process.
//!
//! Not here: sampling, and the scheduling of mask computations.

mod compiled;
mod ebnf;
mod kept;
mod remote;
mod structural;
mod vocabulary;

pub use kept::Uses;
pub use structural::structural_tag;

pub(crate) use remote::Service;

use crate::actors::workers::{Cancel, Failure, Home, Worker, WorkerLimits, Workers, limits};
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

/// The first mask and an estimate of the parser's size in bytes, or the reason why the constraint is invalid.
type Begun = Result<(Arc<[u32]>, usize), GrammarError>;

/// The maximum size in bytes of a schema, expression or grammar, or of all choices together.
pub const MOST_BYTES: usize = 256 << 10;
/// The maximum number of choices in one constraint.
pub const MOST_CHOICES: usize = 1024;
/// The white space allowed between the parts of a JSON text: one or two spaces, or a new line and its indentation. It
/// is bounded because a model that starts to generate white space may never stop.
const JSON_SPACE: &str = r"\x20{1,2}|\x0D?\x0A(\x20{0,24}|\x09{0,8})";
/// The first byte of the first frame sent to a constraint worker; it selects this service.
pub(crate) const WORKER: u8 = b'g';
/// The maximum number of tokens that one request replays, so that no replay exceeds the CPU time limit because of its
/// length.
const REPLAYED: usize = 512;
/// If the first mask takes longer than this, decode steps are not queued before the constraint's mask is available,
/// until masks have been in time for a while.
const SLOW: Duration = Duration::from_millis(50);

/// A constraint that an output must satisfy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Constraint {
    /// JSON that is valid under this JSON Schema.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// Text that this regular expression matches in full.
    Regex(String),
    /// Text that this grammar generates: EBNF as in llama.cpp and XGrammar (`root ::= ...`), or Lark.
    Grammar(String),
    /// The output is one of these texts.
    Choice(Vec<String>),
    /// A structural tag, the format that routers use for tool calls; see [`structural_tag`].
    StructuralTag(String),
}

impl Constraint {
    /// Returns the total length of the constraint's texts in bytes.
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

/// The reason why an output cannot be constrained, or can no longer be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum GrammarError {
    /// The bytes of the tokenizer's tokens are unknown.
    #[error("constraints need a byte-level or byte-fallback tokenizer, this model's is neither")]
    Tokenizer,
    /// The constraint is longer than [`MOST_BYTES`].
    #[error("the constraint has {bytes} bytes, at most {MOST_BYTES} are taken")]
    TooLong {
        /// The constraint's length in bytes.
        bytes: usize,
    },
    /// There are no choices, or more than [`MOST_CHOICES`].
    #[error("the constraint has {choices} choices, 1 to {MOST_CHOICES} are taken")]
    Choices {
        /// The number of choices.
        choices: usize,
    },
    /// The constraint is malformed or unsupported.
    #[error("the constraint cannot be used: {0}")]
    Invalid(String),
    /// The parser could not continue.
    #[error("the constraint became too complex to follow: {0}")]
    Stuck(String),
    /// The constraint exceeds a limit of its worker process: stack, memory or CPU time.
    #[error("the constraint is too large to be followed: {0}")]
    TooLarge(String),
    /// The caller cancelled the call.
    #[error("nobody waits for the constraint any more")]
    Cancelled,
    /// No worker process is available.
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

/// The constraint compiler of one model: the pool of workers that hold the model's vocabulary, and a cache of first
/// masks. Created once per model.
pub struct Grammars {
    shared: Arc<Shared>,
    kept: Kept<Beginning>,
}

/// The state that all of a model's outputs share.
struct Shared {
    workers: Workers,
    tokens: Tokens,
    vocabulary: u32,
    /// The number of the next output.
    outputs: AtomicU64,
}

/// The cached start of a constraint, which needs no worker.
#[derive(Clone)]
struct Beginning {
    mask: Arc<[u32]>,
    /// The worker that compiled the constraint and probably still caches it.
    home: Home,
    slow: bool,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocabulary", &self.shared.vocabulary).finish_non_exhaustive()
    }
}

impl Grammars {
    /// Creates the compiler for a model of `vocabulary` tokens that ends a sequence with any of `eos_ids`.
    ///
    /// # Errors [`GrammarError::Tokenizer`] if the bytes of the tokens are unknown.
    pub fn new(text: &Text, vocabulary: u32, eos_ids: &[u32]) -> Result<Grammars, GrammarError> {
        Grammars::with(text, vocabulary, eos_ids, limits())
    }

    /// Like [`Grammars::new`], with explicit limits for the workers.
    pub fn with(text: &Text, vocabulary: u32, eos_ids: &[u32], limits: WorkerLimits) -> Result<Grammars, GrammarError> {
        let mut first = vec![WORKER];
        Vocabulary::of(text, vocabulary, eos_ids)?.write(&mut first);
        let workers = Workers::with("constraints", first, limits);
        let shared = Shared { workers, tokens: text.tokens(), vocabulary, outputs: AtomicU64::new(1) };
        Ok(Grammars { shared: Arc::new(shared), kept: Kept::default() })
    }

    /// Starts an output that follows `constraint`. Uses the cache if the constraint was compiled recently. With
    /// `ignore_eos` the end-of-sequence tokens are not allowed while any other token is.
    pub fn start(&self, constraint: &Constraint, ignore_eos: bool) -> Result<StartedGrammar, GrammarError> {
        self.start_until(constraint, ignore_eos, &Cancel::default())
    }

    /// Like [`Grammars::start`], but returns [`GrammarError::Cancelled`] when `cancel` is cancelled.
    pub fn start_until(
        &self,
        constraint: &Constraint,
        ignore_eos: bool,
        cancel: &Cancel,
    ) -> Result<StartedGrammar, GrammarError> {
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
            return Ok(StartedGrammar { grammar: Box::new(Grammar(Some(Box::new(output(Some(home)))))), mask, slow });
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
        Ok(StartedGrammar { grammar: Box::new(Grammar(Some(Box::new(output)))), mask, slow })
    }

    /// Returns the process ids of the workers, for monitoring.
    pub fn workers(&self) -> Vec<u32> {
        self.shared.workers.processes()
    }

    /// The number of outputs that each worker holds, for those who watch them.
    pub fn held(&self) -> Vec<usize> {
        self.shared.workers.held()
    }

    /// Returns how often constraints were requested, and how often they were found in the cache.
    pub fn uses(&self) -> Uses {
        self.kept.uses()
    }
}

/// An output that is about to follow a constraint.
#[derive(Clone, Debug)]
pub struct StartedGrammar {
    /// The grammar; it takes each generated token.
    pub grammar: Box<Grammar>,
    /// The tokens that the first token may be, in the format of [`Next::Mask`].
    pub mask: Arc<[u32]>,
    /// Whether computing the first mask took longer than 50 ms. Steps of this output should then not be queued before
    /// its next masks are available.
    pub slow: bool,
}

/// The progress of one output through its constraint. Its parser state lives in a worker process. If it is lost, it is
/// rebuilt from the constraint and the tokens.
pub struct Grammar(Option<Box<Output>>);

struct Output {
    shared: Arc<Shared>,
    constraint: Arc<Constraint>,
    ignore_eos: bool,
    /// The output's identifier in the workers.
    number: u64,
    /// The worker that has the output's state, or has compiled its constraint.
    home: Option<Home>,
    tokens: Vec<u32>,
    cancel: Cancel,
}

impl Clone for Grammar {
    /// Returns an independent copy with its own output number and cancellation.
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

/// The possible continuations of the tokens so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A token of this mask follows. Bit `i % 32` of word `i / 32` stands for token `i`; there are `vocabulary / 32`
    /// words, rounded up.
    Mask(Arc<[u32]>),
    /// No token can follow: the output is complete.
    Complete,
}

impl Grammar {
    /// Takes a generated token and returns what may follow. Usually takes tens of microseconds, at most the workers'
    /// time limit. After an error the output cannot continue.
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

    /// Like [`Grammar::take`], but does not block: `answer` is called with the grammar and the result on a worker pool
    /// thread.
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

    /// Returns the handle that cancels running computations for this output when it has ended.
    pub fn cancel(&self) -> Cancel {
        self.0.as_ref().map(|output| output.cancel.clone()).unwrap_or_default()
    }
}

fn ended() -> GrammarError {
    GrammarError::Stuck("it has failed before".to_owned())
}

impl Output {
    /// Runs `work` on a worker. If it fails in a way that other jobs may have caused (the worker process met the memory
    /// limit after it had served other calls, or died), it is retried once in a new process.
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
            // A leading 0 means that the text cannot be tokenized.
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

    /// Starts the output in this worker. Returns the first mask and an estimate of the constraint's size in bytes.
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
    /// Makes the worker of this grammar drop its state.
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

//! What crosses between the engine and those who ask it: a request in, events out.
//! Deliberately absent: text (token ids only; `model::text` turns them into text).

use std::time::{Duration, Instant};

/// One generation asked of a replica.
#[derive(Clone, Debug)]
pub struct Request {
    /// Unique among the replica's live requests; `Replica::abort` names it.
    pub id: String,
    /// Prompt token ids; at least one.
    pub prompt: Vec<u32>,
    /// How the next token is drawn.
    pub sampling: Sampling,
    /// When it ends.
    pub limits: Limits,
    /// `Some(n)`: log probabilities of the chosen token and the `n` most probable (n <= 20).
    pub logprobs: Option<u32>,
    /// Whether every step's logits are handed back (tests and `--dump-logits`; one at a time).
    pub dump_logits: bool,
    /// Higher goes first.
    pub priority: i32,
    /// The request is aborted when this passes.
    pub deadline: Option<Instant>,
    /// The span under which the engine's spans are made.
    pub span: tracing::Span,
}

/// How the next token is drawn. Every value is finite and in range: `validate` says so.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1.0 keeps all.
    pub top_p: f32,
    /// 0.0 keeps all.
    pub min_p: f32,
    /// 1.0 changes nothing; over prompt and output.
    pub repetition_penalty: f32,
    /// 0.0 changes nothing; over the output.
    pub presence_penalty: f32,
    /// 0.0 changes nothing; over the output.
    pub frequency_penalty: f32,
    /// `None`: drawn by the engine.
    pub seed: Option<u64>,
    /// Added to logits; at most `MAX_LOGIT_BIAS` entries.
    pub logit_bias: Vec<(u32, f32)>,
}

/// The most logit-bias entries of a request.
pub const MAX_LOGIT_BIAS: usize = 300;
/// The most stop ids of a request, the model's own included.
pub const MAX_STOP_IDS: usize = 16;
/// The most alternatives of a logprob.
pub const MAX_LOGPROBS: u32 = 20;

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            logit_bias: Vec::new(),
        }
    }
}

/// When a generation ends. Stop strings are the text layer's: it aborts the request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// `None`: as many as the context holds.
    pub max_tokens: Option<u32>,
    /// No stop id counts before this many output tokens.
    pub min_tokens: u32,
    /// Beside the model's end-of-sequence ids.
    pub stop_ids: Vec<u32>,
    /// The model's end-of-sequence ids do not end it.
    pub ignore_eos: bool,
}

/// What a replica says about a request, in order: one `Started`, tokens, one `Finished`.
/// (A request that is refused or aborted in the queue gets only `Finished`.)
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt is about to run.
    Started(Started),
    /// A token was drawn.
    Token(Token),
    /// Nothing follows.
    Finished(Finished),
}

/// The prompt is about to run.
#[derive(Clone, Debug)]
pub struct Started {
    /// Name and UUID of the device.
    pub device_name: String,
    /// Lower-case hex with dashes.
    pub device_uuid: String,
    /// Name of the replica: `MODEL/0`.
    pub replica: String,
    /// Time from submission until now.
    pub queue: Duration,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Of them found in the prefix cache.
    pub cached_tokens: u32,
}

/// One drawn token.
#[derive(Clone, Debug)]
pub struct Token {
    /// Which sample of the request (0 until n > 1 exists).
    pub index: u32,
    /// The id.
    pub id: u32,
    /// Present if the request asked.
    pub logprobs: Option<TokenLogprobs>,
    /// Present if the request asked for a dump: `[vocabulary]` raw logits, before penalties.
    pub logits: Option<Vec<f32>>,
}

/// Log probabilities (natural) at one position, after bias and penalties, before temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most probable, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// A stop id; it is part of the tokens.
    Stop(u32),
    /// `max_tokens` or the end of the context.
    Length,
    /// The caller aborted, went away, or read too slowly.
    Aborted,
    /// The deadline passed.
    DeadlineExceeded,
    /// The device or the engine failed; the message says how.
    Error(String),
}

/// The end of a generation.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Which sample.
    pub index: u32,
    /// Why.
    pub reason: FinishReason,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Of them found in the prefix cache.
    pub cached_tokens: u32,
    /// Tokens handed out.
    pub output_tokens: u32,
    /// Phases.
    pub timings: Timings,
    /// Mean over the request's decode steps.
    pub per_token: PerToken,
}

/// Wall-clock phases of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// Submission to start.
    pub queue: Duration,
    /// Start to first token.
    pub prefill: Duration,
    /// First token to last.
    pub decode: Duration,
}

/// What a decoded token cost, as means over steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PerToken {
    /// Queue submissions.
    pub submits: f64,
    /// Dispatches.
    pub dispatches: f64,
    /// Pipeline barriers.
    pub barriers: f64,
    /// Descriptor updates (kernels take addresses: 0).
    pub descriptor_updates: f64,
    /// Submissions to the transfer queue.
    pub transfer_submits: f64,
    /// Blocking waits of the host.
    pub host_waits: f64,
    /// Host time spent on enqueueing, microseconds.
    pub enqueue_us: f64,
    /// Device time, microseconds; 0 where the queue has no timestamps.
    pub gpu_us: f64,
    /// Flushes by reason.
    pub flushes: Flushes,
}

/// Region ends by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flushes {
    /// load → prefill → decode.
    pub phase_boundary: f64,
    /// The host needs bytes now.
    pub readback: f64,
    /// A point of another queue must come first.
    pub cross_queue: f64,
}

/// What a request could not be: the caller's mistake, named with both numbers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// No prompt tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token id outside the vocabulary.
    #[error("token {token} at position {position} is outside the vocabulary of {vocabulary}")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Where in the prompt.
        position: usize,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// Prompt (and asked output) longer than the context.
    #[error("{prompt} prompt tokens and {output} to generate exceed the context of {context}")]
    ContextExceeded {
        /// Prompt tokens.
        prompt: usize,
        /// Asked output tokens.
        output: usize,
        /// The context's tokens.
        context: usize,
    },
    /// A value that is not finite or outside its range.
    #[error("{field} is {value}, must be {rule}")]
    Value {
        /// The request's field.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// Another live request has the same id.
    #[error("request id \"{0}\" is in use")]
    DuplicateId(String),
}

/// Receives a request's events on the engine's thread. It must not block; an error (closed
/// or full) aborts the request and nothing further is sent.
pub type Sink = Box<dyn FnMut(Event) -> Result<(), SinkClosed> + Send>;

/// The receiver is gone or does not keep up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the receiver is gone or too slow")]
pub struct SinkClosed;

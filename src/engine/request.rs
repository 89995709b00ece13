//! The interface between the engine and its callers: a request in, events out.
//! Not here: text. Requests have token ids only (`model::text` converts them).

use crate::model::embedding::Pooling;
use crate::model::grammar::{GrammarError, StartedGrammar};
use crate::model::split_mix::nth;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request for one generation, which a replica runs.
#[derive(Clone, Debug)]
pub struct Request {
    /// The id: unique among the replica's live requests, and without [`SAMPLE_MARK`]. `Replica::abort` takes it.
    pub id: String,
    /// The token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// The sampling parameters.
    pub sampling: Sampling,
    /// The stop conditions.
    pub limits: Limits,
    /// `Some(n)`: return the log probabilities of the chosen token and of the `n` most probable ones (n <= 20).
    pub logprobs: Option<u32>,
    /// `Some(n)`: return the log probabilities of the prompt's tokens and of the `n` most probable ones at each
    /// position (n <= 20). The whole prompt is then computed, even if the prefix cache holds pages of it. If there are
    /// several samples, only the first one returns them.
    pub prompt_logprobs: Option<u32>,
    /// `Some`: no token is drawn; the request ends with one vector of the prompt ([`Event::Embedding`]). Sampling, stop
    /// conditions, log probabilities and constraints then have no effect.
    pub pooling: Option<Pooling>,
    /// The only tokens that may be drawn, as a mask in the format of [`Executor::set_mask`]; only with `max_tokens` 1 and
    /// without a grammar. Log probabilities are then those among these tokens.
    ///
    /// [`Executor::set_mask`]: super::executor::Executor::set_mask
    pub allowed: Option<Arc<[u32]>>,
    /// Whether the logits of every step are returned (for tests and `--dump-logits`; one such request runs at a time).
    pub dump_logits: bool,
    /// The constraint on the output (structured output), at its start.
    pub grammar: Option<StartedGrammar>,
    /// The priority; higher goes first.
    pub priority: i32,
    /// The prefix cache salt: prompts reuse each other's pages only if their salts are equal.
    pub cache_salt: String,
    /// The request is ended when this time has passed.
    pub deadline: Option<Instant>,
    /// The parent of the engine's spans.
    pub span: tracing::Span,
}

impl Request {
    /// Returns a request for greedy sampling without limits of its own, constraints or log probabilities.
    pub fn new(id: impl Into<String>, prompt: Vec<u32>) -> Request {
        Request {
            id: id.into(),
            prompt,
            sampling: Sampling::default(),
            limits: Limits::default(),
            logprobs: None,
            prompt_logprobs: None,
            pooling: None,
            allowed: None,
            dump_logits: false,
            grammar: None,
            priority: 0,
            cache_salt: String::new(),
            deadline: None,
            span: tracing::Span::none(),
        }
    }
}

/// Sampling parameters. `validate` checks that every value is finite and in range.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The temperature; 0 selects greedy decoding.
    pub temperature: f32,
    /// The top-k limit; 0 keeps all tokens.
    pub top_k: u32,
    /// The top-p limit; 1.0 keeps all tokens.
    pub top_p: f32,
    /// The min-p limit; 0.0 keeps all tokens.
    pub min_p: f32,
    /// The repetition penalty, over prompt and output; 1.0 has no effect.
    pub repetition_penalty: f32,
    /// The presence penalty, over the output; 0.0 has no effect.
    pub presence_penalty: f32,
    /// The frequency penalty, over the output; 0.0 has no effect.
    pub frequency_penalty: f32,
    /// The seed; `None`: the engine draws one.
    pub seed: Option<u64>,
    /// Token ids and the values added to their logits; at most `MAX_LOGIT_BIAS` entries.
    pub logit_bias: Vec<(u32, f32)>,
}

/// The maximum number of samples of one prompt. Each sample is a request of its own to the engine and takes a place in
/// its queue.
pub const MAX_SAMPLES: u32 = 64;
/// Separates a request's id from the number of a sample in the sample's id; the first sample's id is the request's. It
/// is the smallest of all characters, so that the ids of one request's samples are adjacent in sorted order.
pub const SAMPLE_MARK: char = '\0';
/// The maximum number of logit-bias entries of a request.
pub const MAX_LOGIT_BIAS: usize = 300;
/// The maximum number of stop ids of a request, including the model's own.
pub const MAX_STOP_IDS: usize = 16;
/// The maximum number of logprob alternatives.
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

/// Stop conditions. Stop strings are handled by the service, which aborts the request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// The maximum number of output tokens; `None`: as many as fit in the context.
    pub max_tokens: Option<u32>,
    /// The number of output tokens before stop ids count.
    pub min_tokens: u32,
    /// Stop ids in addition to the model's end-of-sequence ids.
    pub stop_ids: Vec<u32>,
    /// Whether the model's end-of-sequence ids are ignored.
    pub ignore_eos: bool,
}

/// An event of a request. The order is: one `Started`, `Prompt` if asked for, tokens or an `Embedding`, one `Finished`. (A request that
/// is refused or aborted in the queue gets only `Finished`.) Events that occur once are boxed, so that tokens, of which
/// there can be hundreds per step, stay small.
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt is about to run.
    Started(Box<Started>),
    /// Scores of the next prompt tokens, from the second one on, if the request asked for them. All of them precede the
    /// first token.
    Prompt(Vec<Scored>),
    /// A token was drawn.
    Token(Token),
    /// The vector of the prompt, of as many values as the model's hidden states have, as pooled: neither scaled nor cut.
    Embedding(Box<[f32]>),
    /// The last event.
    Finished(Box<Finished>),
}

/// The prompt is about to run.
#[derive(Clone, Debug)]
pub struct Started {
    /// The name of the device.
    pub device_name: String,
    /// The UUID of the device, lower-case hex with dashes.
    pub device_uuid: String,
    /// The name of the replica: `MODEL/0`.
    pub replica: String,
    /// The time since submission.
    pub queue: Duration,
    /// The length of the prompt in tokens.
    pub prompt_tokens: u32,
    /// The number of prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
}

/// A drawn token.
#[derive(Clone, Debug)]
pub struct Token {
    /// The index of the sample.
    pub index: u32,
    /// The token id.
    pub id: u32,
    /// The log probabilities, if the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
    /// The logits, if the request asked for a dump: `[vocabulary]` raw values, before penalties.
    pub logits: Option<Vec<f32>>,
}

/// A scored token of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The token id.
    pub id: u32,
    /// Its log probabilities, given the tokens before it. Without bias and penalties, which apply to output only.
    pub logprobs: TokenLogprobs,
}

/// Natural log probabilities at one position. Those of drawn tokens are computed after bias and penalties and before
/// temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The log probability of the token at this position.
    pub chosen: f32,
    /// The most probable tokens and their log probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// A stop id was drawn; it is included in the output tokens.
    Stop(u32),
    /// The output satisfies its constraint, and no token may follow.
    Complete,
    /// The prompt's vector was returned.
    Embedded,
    /// `max_tokens` or the end of the context was reached.
    Length,
    /// The caller aborted the request, disconnected, or read too slowly.
    Aborted,
    /// The deadline passed.
    DeadlineExceeded,
    /// The constraint cannot be followed any further.
    Constraint(GrammarError),
    /// The device or the engine failed, as described by the message.
    Error(String),
}

/// The end of a generation.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The index of the sample.
    pub index: u32,
    /// Why it ended.
    pub reason: FinishReason,
    /// The length of the prompt in tokens.
    pub prompt_tokens: u32,
    /// The number of prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// The number of output tokens reported.
    pub output_tokens: u32,
    /// The number of draft tokens that were verified for this output.
    pub drafted_tokens: u32,
    /// The number of output tokens that were accepted drafts.
    pub accepted_tokens: u32,
    /// The durations of the phases.
    pub timings: Timings,
    /// The mean cost per output token after the first. Each decode step counts in full, regardless of how many rows
    /// shared it.
    pub per_token: PerToken,
}

/// The wall-clock durations of a request's phases.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// The time from submission to start.
    pub queue: Duration,
    /// The time from start to the first token.
    pub prefill: Duration,
    /// The time from the first token to the last.
    pub decode: Duration,
}

/// The cost of steps, as a sum or as a mean, depending on the field that holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PerToken {
    /// The number of queue submissions.
    pub submits: f64,
    /// The number of dispatches.
    pub dispatches: f64,
    /// The number of pipeline barriers.
    pub barriers: f64,
    /// The number of descriptor updates (always 0: kernels take buffer addresses).
    pub descriptor_updates: f64,
    /// The number of submissions to the transfer queue.
    pub transfer_submits: f64,
    /// The number of blocking waits of the host.
    pub host_waits: f64,
    /// Host time spent on enqueueing, in microseconds.
    pub enqueue_us: f64,
    /// Host time of the engine thread until the device has its next work, in microseconds: processing reports, planning
    /// and enqueueing.
    pub schedule_us: f64,
    /// Host time of the engine thread after that, in microseconds: taking the reported tokens into their sequences, and
    /// sending them to the clients' streams.
    pub deliver_us: f64,
    /// Device time in microseconds; 0 if the queue has no timestamps.
    pub gpu_us: f64,
    /// The number of submissions by flush reason.
    pub flushes: Flushes,
}

impl PerToken {
    /// Adds `other`, multiplied by `factor`.
    pub fn add(&mut self, other: &PerToken, factor: f64) {
        self.submits += other.submits * factor;
        self.dispatches += other.dispatches * factor;
        self.barriers += other.barriers * factor;
        self.descriptor_updates += other.descriptor_updates * factor;
        self.transfer_submits += other.transfer_submits * factor;
        self.host_waits += other.host_waits * factor;
        self.enqueue_us += other.enqueue_us * factor;
        self.schedule_us += other.schedule_us * factor;
        self.deliver_us += other.deliver_us * factor;
        self.gpu_us += other.gpu_us * factor;
        self.flushes.phase_boundary += other.flushes.phase_boundary * factor;
        self.flushes.readback += other.flushes.readback * factor;
        self.flushes.cross_queue += other.flushes.cross_queue * factor;
    }

    /// Returns this sum divided by `steps`; all zero for 0 steps.
    pub fn mean(&self, steps: u64) -> PerToken {
        let mut mean = PerToken::default();
        if steps > 0 {
            mean.add(self, 1.0 / steps as f64);
        }
        mean
    }
}

/// The number of submissions by the reason why they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flushes {
    /// The phase changes (load → prefill → decode).
    pub phase_boundary: f64,
    /// The host needs results now.
    pub readback: f64,
    /// A point of another queue must be reached first.
    pub cross_queue: f64,
}

/// The limits that requests are validated against.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// The size of the vocabulary.
    pub vocabulary: u32,
    /// The maximum length of prompt and output together, in tokens.
    pub context: u32,
    /// The model's end-of-sequence ids.
    pub eos_ids: Vec<u32>,
    /// Whether tokens can be drawn; otherwise prompts can only be embedded.
    pub draws: bool,
}

impl Request {
    /// Returns `count` samples of this request, at least one. Sample 0 is the request itself; each of the others has an
    /// id and a seed of its own, and no scores of the prompt.
    pub fn into_samples(self, count: u32) -> Vec<Request> {
        let others: Vec<Request> = (1..count).map(|index| self.other_sample(index)).collect();
        let mut samples = vec![self];
        samples.extend(others);
        samples
    }

    fn other_sample(&self, index: u32) -> Request {
        let mut sample = Request { prompt_logprobs: None, ..self.clone() };
        sample.id = sample_id(&self.id, index);
        sample.sampling.seed = self.sampling.seed.map(|seed| sample_seed(seed, index));
        sample
    }

    /// Checks whether a replica with these bounds can run the request. `max_tokens` may exceed the space that the
    /// context leaves (the output is cut), but the prompt must leave room for at least one token.
    pub fn validate(&self, bounds: &Bounds) -> Result<(), RequestError> {
        if self.id.contains(SAMPLE_MARK) {
            return Err(value("request_id", format!("{:?}", self.id), "without null characters"));
        }
        if self.pooling.is_none() && !bounds.draws {
            return Err(RequestError::EmbedsOnly);
        }
        if self.prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if let Some(position) = self.prompt.iter().position(|&token| token >= bounds.vocabulary) {
            return Err(RequestError::TokenOutOfRange {
                token: self.prompt[position],
                position,
                vocabulary: bounds.vocabulary,
            });
        }
        // Without an output, the prompt may fill the context.
        let output = usize::from(self.pooling.is_none());
        if self.prompt.len() + output > bounds.context as usize {
            let (prompt, context) = (self.prompt.len(), bounds.context as usize);
            return Err(RequestError::ContextExceeded { prompt, output, context });
        }
        self.sampling.validate(bounds.vocabulary)?;
        self.limits.validate(bounds)?;
        if let Some(allowed) = &self.allowed {
            let words = bounds.vocabulary.div_ceil(32) as usize;
            if allowed.len() != words || allowed.iter().all(|word| *word == 0) {
                return Err(value(
                    "allowed",
                    format!("a mask of {} words", allowed.len()),
                    "of the vocabulary, with a token",
                ));
            }
            if self.limits.max_tokens != Some(1) || self.grammar.is_some() {
                return Err(value("allowed", "set", "used for one token, without a constraint"));
            }
        }
        for (field, asked) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(asked) = asked.filter(|asked| *asked > MAX_LOGPROBS) {
                return Err(value(field, asked, "at most 20"));
            }
        }
        Ok(())
    }
}

/// Returns the id of a request's sample.
pub fn sample_id(request: &str, index: u32) -> String {
    if index == 0 { request.to_owned() } else { format!("{request}{SAMPLE_MARK}{index}") }
}

/// Returns the seed of a sample: the request's own for sample 0, else the `index`th number that SplitMix64 generates
/// from it. The seeds are not consecutive, because samplers increment the seed themselves from token to token.
pub fn sample_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    nth(seed, index)
}

impl Sampling {
    /// Whether tokens that occurred before change the logits.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks that every value is finite and in range.
    pub fn validate(&self, vocabulary: u32) -> Result<(), RequestError> {
        let check = |field, given: f32, ok: bool, rule| {
            if given.is_finite() && ok { Ok(()) } else { Err(value(field, given, rule)) }
        };
        let t = self.temperature;
        check("temperature", t, t >= 0.0, "finite and at least 0")?;
        let p = self.top_p;
        check("top_p", p, p > 0.0 && p <= 1.0, "above 0 and at most 1")?;
        let p = self.min_p;
        check("min_p", p, (0.0..=1.0).contains(&p), "from 0 to 1")?;
        let r = self.repetition_penalty;
        check("repetition_penalty", r, r > 0.0, "finite and above 0")?;
        let p = self.presence_penalty;
        check("presence_penalty", p, (-2.0..=2.0).contains(&p), "from -2 to 2")?;
        let f = self.frequency_penalty;
        check("frequency_penalty", f, (-2.0..=2.0).contains(&f), "from -2 to 2")?;
        if self.logit_bias.len() > MAX_LOGIT_BIAS {
            return Err(value("logit_bias", self.logit_bias.len(), "at most 300 entries"));
        }
        let mut ids = Vec::with_capacity(self.logit_bias.len());
        for &(id, bias) in &self.logit_bias {
            if id >= vocabulary {
                return Err(value("logit_bias", id, "for ids inside the vocabulary"));
            }
            check("logit_bias", bias, true, "finite")?;
            ids.push(id);
        }
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(value("logit_bias", twice[0], "given once an id"));
        }
        Ok(())
    }
}

impl Limits {
    /// Checks the numbers of tokens and the stop ids.
    pub fn validate(&self, bounds: &Bounds) -> Result<(), RequestError> {
        if self.max_tokens == Some(0) {
            return Err(value("max_tokens", 0, "at least 1"));
        }
        if let Some(most) = self.max_tokens.filter(|most| self.min_tokens > *most) {
            let given = format!("{} with max_tokens {most}", self.min_tokens);
            return Err(value("min_tokens", given, "at most max_tokens"));
        }
        if let Some(&id) = self.stop_ids.iter().find(|&&id| id >= bounds.vocabulary) {
            return Err(value("stop_ids", id, "inside the vocabulary"));
        }
        let stop_ids = self.resolve_stop_ids(&bounds.eos_ids).len();
        if stop_ids > MAX_STOP_IDS {
            return Err(value("stop_ids", stop_ids, "at most 16, the model's own included"));
        }
        Ok(())
    }

    /// Returns every id that ends the generation, each once, ascending.
    pub fn resolve_stop_ids(&self, eos_ids: &[u32]) -> Vec<u32> {
        let mut ids = self.stop_ids.clone();
        if !self.ignore_eos {
            ids.extend_from_slice(eos_ids);
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

fn value(field: &'static str, given: impl ToString, rule: &'static str) -> RequestError {
    RequestError::Value { field, value: given.to_string(), rule }
}

/// An invalid request: the caller's mistake. Messages contain the value given and the value allowed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The model draws no tokens, and the request is not for an embedding.
    #[error("the model gives embeddings only: its attention is not causal, so that it draws no tokens")]
    EmbedsOnly,
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token id is outside the vocabulary.
    #[error("token {token} at position {position} is outside the vocabulary of {vocabulary}")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Its position in the prompt.
        position: usize,
        /// The size of the vocabulary.
        vocabulary: u32,
    },
    /// The prompt (with the requested output) is longer than the context.
    #[error("{prompt} prompt tokens and {output} to generate exceed the context of {context}")]
    ContextExceeded {
        /// The number of prompt tokens.
        prompt: usize,
        /// The number of output tokens requested.
        output: usize,
        /// The context in tokens.
        context: usize,
    },
    /// A value is not finite or out of range.
    #[error("{field} is {value}, must be {rule}")]
    Value {
        /// The request's field.
        field: &'static str,
        /// The value given.
        value: String,
        /// The values allowed.
        rule: &'static str,
    },
    /// Another live request has the same id.
    #[error("request id \"{0}\" is in use")]
    DuplicateId(String),
}

/// Receives a request's events on the engine thread. It must not block. An error (closed or full) aborts the request,
/// and nothing further is sent.
pub type Sink = Box<dyn FnMut(Event) -> Result<(), SinkClosed> + Send>;

/// The receiver was dropped or does not keep up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the receiver is gone or too slow")]
pub struct SinkClosed;

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request::new("r", vec![1, 2, 3])
    }

    fn check(change: impl FnOnce(&mut Request)) -> Result<(), RequestError> {
        let mut request = request();
        change(&mut request);
        request.validate(&Bounds { vocabulary: 10, context: 8, eos_ids: vec![9, 8], draws: true })
    }

    #[test]
    fn what_can_run_is_accepted() {
        assert_eq!(check(|_| ()), Ok(()));
        assert_eq!(check(|r| r.prompt = vec![9; 7]), Ok(()));
        assert_eq!(check(|r| r.limits.max_tokens = Some(1_000_000)), Ok(()));
        assert_eq!(check(|r| r.logprobs = Some(20)), Ok(()));
        // The model's own ids count once, even if they are also given.
        assert_eq!(check(|r| r.limits.stop_ids = (0..10).chain(0..10).collect()), Ok(()));
    }

    #[test]
    fn samples_differ_in_id_and_seed_and_the_first_is_the_request() {
        let mut request = request();
        (request.sampling.seed, request.prompt_logprobs) = (Some(0), Some(2));
        let samples = request.clone().into_samples(4);
        assert_eq!((samples[0].id.as_str(), samples[0].sampling.seed), ("r", Some(0)));
        // The first published outputs of SplitMix64 for seed 0.
        let seeds: Vec<u64> = samples[1..].iter().map(|sample| sample.sampling.seed.unwrap()).collect();
        assert_eq!(seeds, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
        assert!(samples[1..].iter().all(|sample| sample.id.starts_with("r\0") && sample.prompt == request.prompt));
        let scored: Vec<bool> = samples.iter().map(|sample| sample.prompt_logprobs.is_some()).collect();
        assert_eq!(scored, [true, false, false, false], "they have one prompt");
        request.sampling.seed = None;
        assert_eq!(request.into_samples(4)[3].sampling.seed, None, "each is drawn by itself");
        assert!(check(|r| r.id = "a\0b".into()).unwrap_err().to_string().contains("request_id"));
    }

    #[test]
    fn prompts_outside_the_model_are_refused_with_both_numbers() {
        assert_eq!(check(|r| r.prompt.clear()), Err(RequestError::EmptyPrompt));
        assert_eq!(
            check(|r| r.prompt[2] = 10),
            Err(RequestError::TokenOutOfRange { token: 10, position: 2, vocabulary: 10 })
        );
        assert_eq!(
            check(|r| r.prompt = vec![0; 8]),
            Err(RequestError::ContextExceeded { prompt: 8, output: 1, context: 8 })
        );
        let embedding = |tokens| {
            check(|r| {
                r.prompt = vec![0; tokens];
                r.pooling = Some(Pooling::Last);
            })
        };
        assert_eq!(embedding(8), Ok(()));
        assert_eq!(embedding(9), Err(RequestError::ContextExceeded { prompt: 9, output: 0, context: 8 }));
    }

    #[test]
    fn a_model_that_draws_no_tokens_only_embeds() {
        let bounds = Bounds { vocabulary: 10, context: 8, eos_ids: Vec::new(), draws: false };
        assert_eq!(request().validate(&bounds), Err(RequestError::EmbedsOnly));
        let mut embedded = request();
        embedded.pooling = Some(Pooling::Mean);
        assert_eq!(embedded.validate(&bounds), Ok(()));
    }

    #[test]
    fn every_value_out_of_range_names_its_field() {
        type Change = fn(&mut Request, f32);
        let fields: [(&str, Change, &[f32]); 7] = [
            ("temperature", |r, v| r.sampling.temperature = v, &[-0.1]),
            ("top_p", |r, v| r.sampling.top_p = v, &[0.0, 1.1]),
            ("min_p", |r, v| r.sampling.min_p = v, &[-0.1, 1.1]),
            ("repetition_penalty", |r, v| r.sampling.repetition_penalty = v, &[0.0, -1.0]),
            ("presence_penalty", |r, v| r.sampling.presence_penalty = v, &[-2.1, 2.1]),
            ("frequency_penalty", |r, v| r.sampling.frequency_penalty = v, &[-2.1, 2.1]),
            ("logit_bias", |r, v| r.sampling.logit_bias = vec![(1, v)], &[]),
        ];
        for (name, change, bad) in fields {
            for &bad in bad.iter().chain(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
                match check(|r| change(r, bad)) {
                    Err(RequestError::Value { field, .. }) => assert_eq!(field, name),
                    other => panic!("{name} = {bad}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn counts_over_their_limits_are_refused() {
        let field = |result| match result {
            Err(RequestError::Value { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(check(|r| r.logprobs = Some(21))), "logprobs");
        assert_eq!(field(check(|r| r.prompt_logprobs = Some(21))), "prompt_logprobs");
        assert_eq!(field(check(|r| r.limits.max_tokens = Some(0))), "max_tokens");
        assert_eq!(
            field(check(|r| {
                r.limits.max_tokens = Some(3);
                r.limits.min_tokens = 4;
            })),
            "min_tokens"
        );
        assert_eq!(field(check(|r| r.limits.stop_ids = vec![10])), "stop_ids");
        assert_eq!(field(check(|r| r.sampling.logit_bias = vec![(10, 0.0)])), "logit_bias");
        assert_eq!(field(check(|r| r.sampling.logit_bias = vec![(1, 0.0), (1, 1.0)])), "logit_bias");
        let bounds = Bounds { vocabulary: 1000, context: 8, eos_ids: vec![999], draws: true };
        let mut many = request();
        many.sampling.logit_bias = (0..301).map(|id| (id, 0.0)).collect();
        assert_eq!(field(many.validate(&bounds)), "logit_bias");
        let mut many = request();
        many.limits.stop_ids = (0..16).collect();
        assert_eq!(field(many.validate(&bounds)), "stop_ids");
        many.limits.ignore_eos = true;
        assert_eq!(many.validate(&bounds), Ok(()));
    }

    #[test]
    fn a_mean_over_no_steps_is_zero() {
        let mut sum = PerToken::default();
        sum.add(&PerToken { submits: 3.0, gpu_us: 8.0, ..PerToken::default() }, 2.0);
        assert_eq!(sum.mean(4).submits, 1.5);
        assert_eq!(sum.mean(4).gpu_us, 4.0);
        assert_eq!(sum.mean(0), PerToken::default());
    }
}

//! Calls of several inputs and their answers, as plain data: texts or token ids to embed, pairs of texts to score.
//! Not here: running the calls (`embed`).

use super::refusal::Refusal;
use tonic::Status;

/// One input of a call.
#[derive(Clone, Debug)]
pub(super) enum Input {
    /// A text, to which the tokenizer adds its special tokens.
    Text(String),
    /// Token ids, which are used unchanged.
    Tokens(Vec<u32>),
}

impl Input {
    /// Returns its size in bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Input::Text(text) => text.len(),
            Input::Tokens(ids) => ids.len() * 4,
        }
    }
}

/// The common fields of calls of several inputs.
#[derive(Clone, Debug, Default)]
pub(super) struct Common {
    /// The call's id; if it is empty, the server generates one.
    pub(super) id: String,
    /// `priority` of `GenerateRequest`.
    pub(super) priority: i32,
    /// `cache_salt` of `GenerateRequest`.
    pub(super) cache_salt: String,
    /// The number of last tokens of each input that are kept; `None`: all.
    pub(super) keep: Option<usize>,
}

/// A call for embeddings.
#[derive(Clone, Debug, Default)]
pub(super) struct EmbedCall {
    pub(super) common: Common,
    pub(super) inputs: Vec<Input>,
    /// The name of the text that is prepended to each text; `None` for the model's default, which is usually none.
    pub(super) prompt: Option<String>,
    /// The number of leading values of each vector that are kept; `None` for all.
    pub(super) dimensions: Option<u32>,
    /// Whether vectors are normalized to unit length; `None` for the model's default.
    pub(super) normalize: Option<bool>,
}

/// A call for the relevance of documents.
#[derive(Clone, Debug, Default)]
pub(super) struct ScoreCall {
    pub(super) common: Common,
    /// Pairs of a query and a document.
    pub(super) pairs: Vec<(String, String)>,
    /// The instruction that defines relevance; `None` for a general one.
    pub(super) task: Option<String>,
}

/// The vector of an input, or its relevance.
#[derive(Clone, Debug)]
pub(super) struct Answer<T> {
    pub(super) value: T,
    /// The number of tokens of the input, and of those found in the prefix cache.
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
}

/// The answers of a call, in the order of its inputs.
#[derive(Clone, Debug)]
pub(super) struct Answers<T> {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) answers: Vec<Answer<T>>,
}

impl<T> Answers<T> {
    /// Returns the number of tokens of all inputs.
    pub(super) fn prompt_tokens(&self) -> u64 {
        self.answers.iter().map(|answer| u64::from(answer.prompt_tokens)).sum()
    }

    /// Returns the same answers with each value converted.
    pub(super) fn map<U>(self, mut convert: impl FnMut(T) -> U) -> Answers<U> {
        let Answers { id, model, answers } = self;
        let answers = answers.into_iter().map(|Answer { value, prompt_tokens, cached_tokens }| Answer {
            value: convert(value),
            prompt_tokens,
            cached_tokens,
        });
        Answers { id, model, answers: answers.collect() }
    }
}

/// The reason for which a call has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The call was refused. The refusal is neither counted nor set on the span yet.
    Refused(Refusal),
    /// An input of the call failed. The failure is already counted and set on the span.
    Ended(Status),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::Refused(refusal)
    }
}

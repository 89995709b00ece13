//! The events of the generations of one answer as frames: pieces of each choice's text, how each choice ended, and the
//! usage of all.
//! Not here: the JSON of the answers (`chat`, `completions`, `responses`), and HTTP.

use super::output::Output;
use super::pieces::Piece;
use super::request::Streaming;
use super::tools::Tool;
use crate::model::text::Text;
use crate::model::text::chat::CallForm;
use crate::service::prepare::Reasons;
use crate::service::proto;
use crate::service::rpc::Tracked;
use proto::generate_response::Event;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio_stream::Stream;

/// The properties that all parts of an answer share.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) text: Option<Arc<Text>>,
    pub(super) streaming: Streaming,
    /// Whether the answer contains reasoning.
    pub(super) reasoning: bool,
    /// Whether the answer contains log probabilities.
    pub(super) logprobs: bool,
}

/// A part of an answer.
#[derive(Debug)]
pub(super) enum Frame {
    /// The first prompt is about to be computed.
    Started,
    /// The prompt of these choices was computed, and can be repeated (`echo`).
    Prompt { prompt: usize },
    /// A further part of a choice's output, with the log probabilities of its tokens.
    Pieces { index: usize, pieces: Vec<Piece>, logprobs: Vec<proto::TokenLogprobs> },
    /// A choice has ended.
    Finished { index: usize },
    /// All choices have ended.
    Done,
}

/// The state of a choice.
#[derive(Debug)]
pub(super) struct Choice {
    output: Output,
    /// Whether calls after the first one are dropped.
    one_call: bool,
    called: bool,
    pub(super) reasoning: String,
    pub(super) content: String,
    /// The names and arguments of its tool calls.
    pub(super) calls: Vec<(String, String)>,
    pub(super) logprobs: Vec<proto::TokenLogprobs>,
    /// OpenAI's finish reason.
    pub(super) reason: &'static str,
    /// The stop string or token id that ended it.
    pub(super) stop: Value,
}

/// The token counts of an answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Used {
    pub(super) prompt: u32,
    pub(super) cached: u32,
    pub(super) output: u32,
}

/// The choices of an answer.
#[derive(Debug)]
pub(super) struct Choices {
    id: String,
    all: Vec<Choice>,
    used: Used,
    /// Whether outputs are kept, for an answer that is not streamed.
    keep: bool,
}

impl Choices {
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Returns a choice. Its kept output is complete once the choice has ended.
    pub(super) fn ended(&self, index: usize) -> &Choice {
        &self.all[index]
    }

    pub(super) fn usage(&self) -> Used {
        self.used
    }

    /// Returns the id of a tool call.
    pub(super) fn call_id(&self, index: usize, number: usize) -> String {
        let request = self.id.rsplit_once("gen-").map_or(self.id.as_str(), |(_, rest)| rest);
        format!("call_{}_{index}_{number}", request.replace('-', "_"))
    }

    fn take(&mut self, index: usize, mut pieces: Vec<Piece>, tokens: Vec<proto::TokenLogprobs>) -> Option<Frame> {
        let choice = &mut self.all[index];
        if choice.one_call {
            pieces
                .retain(|piece| !matches!(piece, Piece::Call { index: 1.., .. } | Piece::Arguments { index: 1.., .. }));
        }
        choice.called |= pieces.iter().any(|piece| matches!(piece, Piece::Call { .. }));
        if self.keep {
            for piece in &pieces {
                match piece {
                    Piece::Reasoning(text) => choice.reasoning.push_str(text),
                    Piece::Content(text) => choice.content.push_str(text),
                    Piece::Call { name, .. } => choice.calls.push((name.clone(), String::new())),
                    Piece::Arguments { text, .. } => {
                        if let Some((_, arguments)) = choice.calls.last_mut() {
                            arguments.push_str(text);
                        }
                    }
                }
            }
            choice.logprobs.extend(tokens.iter().cloned());
        }
        let nothing = pieces.is_empty() && tokens.is_empty();
        (!nothing).then_some(Frame::Pieces { index, pieces, logprobs: tokens })
    }
}

/// Returns the `usage` object.
pub(super) fn usage(used: Used) -> Value {
    json!({
        "prompt_tokens": used.prompt, "completion_tokens": used.output,
        "total_tokens": used.prompt.saturating_add(used.output),
        "prompt_tokens_details": {"cached_tokens": used.cached},
    })
}

/// Converts a log probability to JSON, which has no infinity.
pub(super) fn finite(logprob: f32) -> Value {
    // The value that OpenAI's API returns for tokens that cannot be sampled.
    f64::from(logprob.max(-9999.0)).into()
}

/// One generation of an answer.
struct Part {
    /// The stream; `None` once it has ended.
    stream: Option<Tracked>,
    /// Whether the prompt's frame was returned.
    echoed: bool,
    /// The log probabilities of the prompt's tokens, from the second token on.
    prompt: Vec<proto::TokenLogprobs>,
}

/// How the outputs of an answer are parsed.
pub(super) struct Reading<'a> {
    pub(super) reasons: Reasons,
    pub(super) form: Option<CallForm>,
    pub(super) tools: &'a Arc<[Tool]>,
    pub(super) one_call: bool,
    pub(super) keep: bool,
    /// The token ids that end an output, as the request lists them.
    pub(super) stop_ids: &'a [u32],
    /// Whether outputs are omitted: the request wants no output, but the engine generates at least one token.
    pub(super) hidden: bool,
}

/// The running generations of an answer. Dropping it aborts those that have not ended.
pub(super) struct Running {
    parts: Vec<Part>,
    /// The number of choices of each part.
    each: usize,
    pub(super) choices: Choices,
    hidden: bool,
    stop_ids: Vec<u32>,
    started: bool,
    done: bool,
    ready: VecDeque<Frame>,
    /// The part that is polled next, so that no part waits for another.
    next: usize,
}

impl Running {
    /// Creates it from streams of `each` choices each.
    pub(super) fn new(id: &str, streams: Vec<Tracked>, each: usize, reading: &Reading<'_>) -> Running {
        let Reading { reasons, form, tools, one_call, keep, stop_ids, hidden } = *reading;
        let choice = || Choice {
            output: Output::new(reasons, form, tools),
            one_call,
            called: false,
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
            logprobs: Vec::new(),
            reason: "stop",
            stop: Value::Null,
        };
        let all = (0..streams.len() * each).map(|_| choice()).collect();
        let part = |stream| Part { stream: Some(stream), echoed: false, prompt: Vec::new() };
        Running {
            parts: streams.into_iter().map(part).collect(),
            each,
            choices: Choices { id: id.to_owned(), all, used: Used::default(), keep },
            hidden,
            stop_ids: stop_ids.to_vec(),
            started: false,
            done: false,
            ready: VecDeque::new(),
            next: 0,
        }
    }

    /// Returns the log probabilities of a prompt's tokens, from the second token on.
    pub(super) fn prompt(&self, prompt: usize) -> &[proto::TokenLogprobs] {
        &self.parts[prompt].prompt
    }

    /// Returns the indices of a prompt's choices.
    pub(super) fn choices_of(&self, prompt: usize) -> std::ops::Range<usize> {
        prompt * self.each..(prompt + 1) * self.each
    }

    fn echo(&mut self, part: usize) {
        if !std::mem::replace(&mut self.parts[part].echoed, true) {
            self.ready.push_back(Frame::Prompt { prompt: part });
        }
    }

    fn take(&mut self, part: usize, event: Event) {
        let base = part * self.each;
        match event {
            Event::Started(started) => {
                self.choices.used.prompt = self.choices.used.prompt.saturating_add(started.prompt_tokens);
                self.choices.used.cached = self.choices.used.cached.saturating_add(started.cached_tokens);
                if !std::mem::replace(&mut self.started, true) {
                    self.ready.push_back(Frame::Started);
                }
            }
            Event::Prompt(prompt) => self.parts[part].prompt.extend(prompt.tokens),
            Event::Delta(delta) => {
                self.echo(part);
                if self.hidden {
                    return;
                }
                let index = base + delta.index as usize;
                let mut pieces = Vec::new();
                self.choices.all[index].output.push(&delta.text, &mut pieces);
                self.ready.extend(self.choices.take(index, pieces, delta.logprobs));
            }
            Event::Finished(finished) => {
                use proto::FinishReason as Reason;
                use proto::finished::StopMatch;
                self.echo(part);
                let index = base + finished.index as usize;
                let mut pieces = Vec::new();
                self.choices.all[index].output.finish(&mut pieces);
                self.ready.extend(self.choices.take(index, pieces, Vec::new()));
                let reason = finished.reason();
                let choice = &mut self.choices.all[index];
                choice.reason = match reason {
                    _ if self.hidden => "length",
                    Reason::Stop if choice.called => "tool_calls",
                    Reason::Stop => "stop",
                    Reason::Length => "length",
                    Reason::Aborted => "abort",
                    // The status of the stream reports the error.
                    Reason::DeadlineExceeded | Reason::Error | Reason::Unspecified => return,
                };
                if !self.hidden {
                    choice.stop = match finished.stop_match {
                        Some(StopMatch::StopString(text)) => text.into(),
                        Some(StopMatch::StopId(id)) if self.stop_ids.contains(&id) => id.into(),
                        // End-of-sequence ids of the model are not reported.
                        Some(StopMatch::StopId(_)) | None => Value::Null,
                    };
                    let drawn = finished.usage.unwrap_or_default().output_tokens;
                    self.choices.used.output = self.choices.used.output.saturating_add(drawn);
                }
                self.ready.push_back(Frame::Finished { index });
            }
        }
    }

    /// Returns the next frame. The last one is [`Frame::Done`], unless there is an error.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame, tonic::Status>>> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(frame)));
            }
            if self.done {
                return Poll::Ready(None);
            }
            let count = self.parts.len();
            let (mut open, mut took) = (false, false);
            for part in (0..count).map(|offset| (self.next + offset) % count) {
                let Some(stream) = &mut self.parts[part].stream else { continue };
                match Pin::new(stream).poll_next(context) {
                    Poll::Pending => open = true,
                    Poll::Ready(None) => self.parts[part].stream = None,
                    Poll::Ready(Some(Err(status))) => {
                        self.done = true;
                        // The other generations are not needed any more.
                        self.parts.iter_mut().for_each(|part| part.stream = None);
                        return Poll::Ready(Some(Err(status)));
                    }
                    Poll::Ready(Some(Ok(message))) => {
                        (open, took) = (true, true);
                        self.next = part + 1;
                        if let Some(event) = message.event {
                            self.take(part, event);
                        }
                        break;
                    }
                }
            }
            if !open {
                self.done = true;
                return Poll::Ready(Some(Ok(Frame::Done)));
            }
            if !took {
                return Poll::Pending;
            }
        }
    }
}

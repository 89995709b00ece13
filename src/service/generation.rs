//! A generation as a stream of messages: it receives the engine's events of all samples of a request, and produces text
//! and messages. Dropping the stream aborts the samples that still run. Not here: gRPC; `ostinato generate` reads the
//! stream within the process.

use super::clients::Places;
use super::convert;
use super::prepare::{Prepared, Target};
use super::proto;
use super::refusal::Refusal;
use crate::engine::request::{
    Event, FinishReason, Finished, PerToken, Request, SAMPLE_MARK, Sink, SinkClosed, Token, sample_id,
};
use crate::model::text::Text;
use crate::model::text::assembler::{Assembler, OutputText};
use crate::telemetry::clock::Moment;
use crate::telemetry::requests::EndedRequest;
use crate::telemetry::{names, spans};
use proto::generate_response::Event as Message;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tracing::Span;

/// The maximum number of tokens of one delta message, so that a client that fell behind gets messages of bounded size.
const DELTA_TOKENS: usize = 256;
/// The maximum number of tokens of a message with prompt log probabilities, as documented in `proto/`.
const PROMPT_TOKENS: usize = 1024;

/// The inputs of a generation apart from the request.
pub struct Delivery {
    /// The number of events of each sample that are buffered for a slow reader.
    pub buffer: usize,
    /// The span of the call, and the parent of the inference span. It is kept until the stream ends.
    pub rpc: Span,
    /// Whether the call came over gRPC, so that its span has a gRPC status.
    pub grpc: bool,
    /// Cancelled when the server's grace period is over.
    pub stop: CancellationToken,
    /// The client's places for the samples; each is given back when its sample ends.
    pub places: Option<Places>,
    /// Receives the logits of each step. The request must ask for them (`dump_logits`).
    pub logits: Option<LogitsSink>,
}

/// A function that receives the `[vocabulary]` logits of one step.
pub type LogitsSink = Box<dyn FnMut(Vec<f32>) + Send>;

impl std::fmt::Debug for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Delivery").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

/// A running generation.
pub struct Generation {
    events: mpsc::Receiver<Event>,
    place: Target,
    id: String,
    /// Set on the engine thread when the buffer of events is full. No sample continues then.
    slow: Arc<AtomicBool>,
    /// The capacity of the event buffer, over all samples.
    buffer: usize,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    places: Option<Places>,
    logits: Option<LogitsSink>,

    text: bool,
    token_ids: bool,
    /// The samples, by index.
    samples: Vec<Sample>,
    /// Whether the start of the first sample was reported; the starts of the others are not.
    started: bool,
    /// The finished messages, in the order in which they are sent.
    ready: VecDeque<Result<proto::GenerateResponse, tonic::Status>>,
    /// The first error of a sample, with which the call fails once all samples have ended.
    refusal: Option<Refusal>,
    /// Whether no message follows those in `ready`.
    ended: bool,

    rpc: Span,
    grpc: bool,
    /// The inference span. It ends with the stream, not with the call that started the generation.
    inference: Span,
    /// The operation's name, for the record of ended requests.
    operation: &'static str,
    submitted: Moment,
    last_finished: Option<Finished>,
    /// The vector of the prompt, if the request asks for an embedding.
    embedding: Option<Box<[f32]>>,
}

/// The state of one sample.
struct Sample {
    index: u32,
    /// Assembles text from tokens; `None` if the request wants neither text nor stop strings.
    assembler: Option<Assembler>,
    /// The log probabilities of tokens whose text the assembler still holds back.
    held_logprobs: VecDeque<proto::TokenLogprobs>,
    /// The delta under construction.
    delta: proto::Delta,
    /// The number of tokens in `delta`, even if the request wants no token ids.
    delta_tokens: usize,
    /// The number of output tokens, up to and including the stop string.
    output_tokens: u32,
    /// The stop string that ended the sample. Later tokens are dropped.
    stopped: Option<String>,
    /// The finish reason, and the cost per token of the sample's steps.
    finished: Option<(&'static str, PerToken)>,
    /// The numbers of drafted tokens and of accepted ones.
    drafts: (u32, u32),
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("id", &self.id)
            .field("replica", &self.place.replica().name)
            .field("samples", &self.samples.len())
            .field("output_tokens", &self.output_tokens())
            .finish_non_exhaustive()
    }
}

impl Generation {
    /// Submits the samples of a request: all of them or none.
    pub fn start(prepared: Prepared, delivery: Delivery) -> Result<Generation, Refusal> {
        let Prepared {
            place,
            mut request,
            samples,
            operation,
            stop_strings,
            special_text,
            text,
            token_ids,
            reasons: _,
            input,
        } = prepared;
        let inference = inference_span(&delivery.rpc, operation, &place, &request, samples);
        request.span = inference.clone();
        let min_tokens = request.limits.min_tokens;
        let assembler = match &place.model().text {
            Some(tokenizer) if text || !stop_strings.is_empty() => {
                let assembler = tokenizer.assembler_with(&special_text, stop_strings.clone());
                Some(assembler.not_before(min_tokens).after(&request.prompt))
            }
            _ => None,
        };
        let buffer = delivery.buffer.saturating_mul(samples as usize);
        let (sender, events) = mpsc::channel(buffer);
        let slow = Arc::new(AtomicBool::new(false));
        let sink = || -> Sink {
            let (slow, sender) = (Arc::clone(&slow), sender.clone());
            Box::new(move |event| {
                if slow.load(Ordering::Acquire) {
                    return Err(SinkClosed);
                }
                sender.try_send(event).map_err(|error| {
                    if matches!(error, mpsc::error::TrySendError::Full(_)) {
                        slow.store(true, Ordering::Release);
                    }
                    SinkClosed
                })
            })
        };
        let (submitted, mut id) = (Moment::now(), request.id.clone());
        let taken = match input {
            None => place.replica().submit_samples(request, (0..samples).map(|_| sink()).collect()),
            Some(input) => {
                id = sample_id(&id, input);
                place.replica().submit_input(request, input, sink())
            }
        };
        if let Err(error) = taken {
            let refusal = Refusal::from(error);
            spans::fail(&inference, refusal.kind(), &refusal.to_string());
            return Err(refusal);
        }
        let samples = (0..samples).map(|index| Sample {
            index,
            assembler: assembler.clone(),
            held_logprobs: VecDeque::new(),
            delta: proto::Delta::default(),
            delta_tokens: 0,
            output_tokens: 0,
            drafts: (0, 0),
            stopped: None,
            finished: None,
        });
        Ok(Generation {
            events,
            samples: samples.collect(),
            place,
            id,
            slow,
            buffer,
            stop: Box::pin(delivery.stop.cancelled_owned()),
            places: delivery.places,
            logits: delivery.logits,
            text,
            token_ids,
            started: false,
            ready: VecDeque::new(),
            refusal: None,
            ended: false,
            rpc: delivery.rpc,
            grpc: delivery.grpc,
            inference,
            operation,
            submitted,
            last_finished: None,
            embedding: None,
        })
    }

    /// Takes the vector of an embedded prompt, once it has arrived.
    pub fn take_embedding(&mut self) -> Option<Box<[f32]>> {
        self.embedding.take()
    }

    /// Returns the number of output tokens of all samples.
    fn output_tokens(&self) -> u32 {
        self.samples.iter().map(|sample| sample.output_tokens).sum()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Started(_) if self.started => {}
            Event::Started(started) => {
                self.started = true;
                let replica = self.place.replica();
                spans::set(&self.inference, names::REPLICA, started.replica.clone());
                spans::set(&self.inference, names::DEVICE_NAME, started.device_name.clone());
                spans::set(&self.inference, names::DEVICE_UUID, started.device_uuid.clone());
                let model = &self.place.model().name;
                let message = convert::started(&started, &self.id, model, replica);
                self.send(Message::Started(message));
            }
            Event::Prompt(tokens) => {
                for part in tokens.chunks(PROMPT_TOKENS) {
                    let text = self.texts();
                    let tokens = part.iter().map(|token| convert::logprobs(token.id, &token.logprobs, text)).collect();
                    self.send(Message::Prompt(proto::PromptLogprobs { tokens }));
                }
            }
            Event::Token(token) => self.take_token(token),
            Event::Embedding(vector) => self.embedding = Some(vector),
            Event::Finished(finished) => self.finish(*finished),
        }
    }

    /// Returns the tokenizer if the request wants text.
    fn texts(&self) -> Option<&Text> {
        self.place.model().text.as_deref().filter(|_| self.text)
    }

    fn take_token(&mut self, token: Token) {
        let logprobs = token.logprobs.as_ref().map(|known| convert::logprobs(token.id, known, self.texts()));
        let sample = &mut self.samples[token.index as usize];
        if sample.stopped.is_some() {
            // Generated before the abort reached the engine.
            return;
        }
        sample.output_tokens += 1;
        if let Some(places) = &self.places {
            places.drew_one();
        }
        if let (Some(sink), Some(logits)) = (&mut self.logits, token.logits) {
            sink(logits);
        }
        sample.held_logprobs.extend(logprobs);
        let output = match &mut sample.assembler {
            None => OutputText { tokens: vec![token.id], ..OutputText::default() },
            Some(assembler) => assembler.push(token.id),
        };
        sample.stopped.clone_from(&output.stopped);
        if sample.stopped.is_some() {
            self.place.replica().abort_sample(&self.id, token.index);
        }
        self.append(token.index, output);
    }

    fn append(&mut self, index: u32, output: OutputText) {
        let sample = &mut self.samples[index as usize];
        let tokens = output.tokens.len();
        // The log probabilities of each token were pushed with it, so both queues have the same order.
        let held = tokens.min(sample.held_logprobs.len());
        sample.delta.logprobs.extend(sample.held_logprobs.drain(..held));
        if self.token_ids {
            sample.delta.token_ids.extend(output.tokens);
        }
        if self.text {
            sample.delta.text.push_str(&output.text);
        }
        sample.delta_tokens += tokens;
        if sample.delta_tokens >= DELTA_TOKENS {
            self.flush(index);
        }
    }

    /// Sends a sample's delta under construction unless it is empty.
    fn flush(&mut self, index: u32) {
        let sample = &mut self.samples[index as usize];
        let mut delta = std::mem::take(&mut sample.delta);
        sample.delta_tokens = 0;
        if !(delta.token_ids.is_empty() && delta.text.is_empty() && delta.logprobs.is_empty()) {
            delta.index = sample.index;
            self.send(Message::Delta(delta));
        }
    }

    fn flush_all(&mut self) {
        for index in 0..self.samples.len() as u32 {
            self.flush(index);
        }
    }

    fn finish(&mut self, finished: Finished) {
        let index = finished.index;
        let sample = &mut self.samples[index as usize];
        if let Some(assembler) = &mut sample.assembler {
            let output = assembler.finish();
            if sample.stopped.is_none() {
                sample.stopped.clone_from(&output.stopped);
            }
            self.append(index, output);
        }
        self.flush(index);

        use proto::FinishReason as Reason;
        use proto::finished::StopMatch;
        let mut refusal = None;
        let sample = &mut self.samples[index as usize];
        let (reason, word, stop_match) = match (&sample.stopped, &finished.reason) {
            (Some(string), _) => (Reason::Stop, "stop", Some(StopMatch::StopString(string.clone()))),
            (None, FinishReason::Stop(id)) => (Reason::Stop, "stop", Some(StopMatch::StopId(*id))),
            (None, FinishReason::Complete | FinishReason::Embedded) => (Reason::Stop, "stop", None),
            (None, FinishReason::Length) => (Reason::Length, "length", None),
            (None, FinishReason::Aborted) => (Reason::Aborted, "aborted", None),
            (None, FinishReason::DeadlineExceeded) => {
                refusal = Some(Refusal::Deadline { output_tokens: sample.output_tokens });
                (Reason::DeadlineExceeded, "deadline_exceeded", None)
            }
            (None, FinishReason::Constraint(source)) => {
                refusal = Some(Refusal::Grammar { field: "constraint", source: source.clone() });
                (Reason::Error, "error", None)
            }
            (None, FinishReason::Error(why)) => {
                refusal = Some(self.place.failed(why));
                (Reason::Error, "error", None)
            }
        };
        sample.finished = Some((word, finished.per_token));
        sample.drafts = (finished.drafted_tokens, finished.accepted_tokens);
        let output_tokens = sample.output_tokens;
        self.refusal = self.refusal.take().or(refusal);
        // Before the client receives the message, because it may send its next request at once.
        if let Some(places) = &mut self.places {
            places.end_one();
        }
        let last = self.samples.iter().all(|sample| sample.finished.is_some());
        if last {
            self.describe(&finished);
        }
        self.last_finished = Some(finished.clone());
        self.send(Message::Finished(proto::Finished {
            index,
            reason: reason.into(),
            stop_match,
            usage: Some(proto::Usage {
                prompt_tokens: finished.prompt_tokens,
                cached_tokens: finished.cached_tokens,
                output_tokens,
                drafted_tokens: finished.drafted_tokens,
                accepted_tokens: finished.accepted_tokens,
            }),
            timings: Some(convert::timings(&finished)),
            per_token: Some(convert::cost(&finished.per_token)),
        }));
        if last {
            let refusal = self.refusal.take();
            self.end(refusal);
        }
    }

    /// Sets the attributes of the inference span that are known at the end: the samples' finish reasons, the token
    /// counts of all samples, and the mean cost of a step.
    fn describe(&self, finished: &Finished) {
        let span = &self.inference;
        if span.is_disabled() {
            return;
        }
        let mut cost = PerToken::default();
        let mut reasons = Vec::new();
        for (reason, per_token) in self.samples.iter().filter_map(|sample| sample.finished) {
            reasons.push(reason);
            cost.add(&per_token, 1.0 / self.samples.len() as f64);
        }
        spans::set_list(span, names::GEN_AI_RESPONSE_FINISH_REASONS, &reasons);
        spans::set(span, names::GEN_AI_USAGE_INPUT_TOKENS, i64::from(finished.prompt_tokens));
        spans::set(span, names::GEN_AI_USAGE_OUTPUT_TOKENS, i64::from(self.output_tokens()));
        spans::set(span, names::CACHED_TOKENS, i64::from(finished.cached_tokens));
        let [drafted, accepted] = self.samples.iter().fold([0, 0], |[drafted, accepted], sample| {
            [drafted + i64::from(sample.drafts.0), accepted + i64::from(sample.drafts.1)]
        });
        spans::set(span, names::DRAFTED_TOKENS, drafted);
        spans::set(span, names::ACCEPTED_TOKENS, accepted);
        spans::set(span, names::PER_TOKEN_SUBMITS, cost.submits);
        spans::set(span, names::PER_TOKEN_DISPATCHES, cost.dispatches);
        spans::set(span, names::PER_TOKEN_BARRIERS, cost.barriers);
        spans::set(span, names::PER_TOKEN_DESCRIPTOR_UPDATES, cost.descriptor_updates);
        spans::set(span, names::PER_TOKEN_TRANSFER_SUBMITS, cost.transfer_submits);
        spans::set(span, names::PER_TOKEN_HOST_WAITS, cost.host_waits);
        spans::set(span, names::PER_TOKEN_ENQUEUE_US, cost.enqueue_us);
        spans::set(span, names::PER_TOKEN_SCHEDULE_US, cost.schedule_us);
        spans::set(span, names::PER_TOKEN_DELIVER_US, cost.deliver_us);
        spans::set(span, names::PER_TOKEN_GPU_US, cost.gpu_us);
    }

    fn send(&mut self, event: Message) {
        self.ready.push_back(Ok(proto::GenerateResponse { event: Some(event) }));
    }

    /// Ends the stream with the status of `refusal`, or with OK.
    fn end(&mut self, refusal: Option<Refusal>) {
        self.ended = true;
        self.places = None;
        let code = refusal.as_ref().map_or(tonic::Code::Ok, Refusal::code);
        self.note_end(refusal.as_ref().map(Refusal::kind));
        self.set_status(code);
        if let Some(refusal) = refusal {
            let message = refusal.to_string();
            spans::fail(&self.inference, refusal.kind(), &message);
            spans::fail(&self.rpc, refusal.kind(), &message);
            self.ready.push_back(Err(super::refusal::status(&refusal)));
        }
        // Both spans end now and not when the transport drops the stream.
        self.inference = Span::none();
        self.rpc = Span::none();
    }

    /// Sets the gRPC status on the call's span, if the call came over gRPC.
    fn set_status(&self, code: tonic::Code) {
        if self.grpc {
            spans::set(&self.rpc, names::RPC_GRPC_STATUS_CODE, code as i64);
        }
    }

    /// Adds the request to the record of ended requests; `error` is its `error.type` if it failed.
    fn note_end(&self, error: Option<&'static str>) {
        let at = Moment::now();
        let first = self.samples.iter().find_map(|sample| sample.finished).map(|(word, _)| word);
        let finished = self.last_finished.as_ref();
        let timings = finished.map(|finished| finished.timings).unwrap_or_default();
        let drawn = finished.map_or(0, |finished| finished.output_tokens);
        self.place.host().ended.note(EndedRequest {
            at,
            id: self.id.split(SAMPLE_MARK).next().unwrap_or_default().to_owned(),
            trace: spans::trace_id(&self.inference),
            model: self.place.model().name.clone(),
            replica: self.place.replica().name.clone(),
            operation: self.operation,
            reason: first.unwrap_or("aborted"),
            error,
            input_tokens: finished.map_or(0, |finished| finished.prompt_tokens),
            cached_tokens: finished.map_or(0, |finished| finished.cached_tokens),
            output_tokens: self.output_tokens(),
            queue: timings.queue,
            first_token: (drawn > 0).then(|| timings.queue + timings.prefill),
            per_token: (drawn > 1).then(|| timings.decode / (drawn - 1)),
            whole: at.since(self.submitted),
        });
    }

    /// Handles the engine dropping a sink without a `Finished` event: the reader was too slow, or the engine thread
    /// ended.
    fn closed(&mut self) {
        self.flush_all();
        let refusal = if self.slow.load(Ordering::Acquire) {
            // Samples that are still queued must be aborted too.
            self.place.replica().abort(&self.id);
            Refusal::Slow { buffered: self.buffer }
        } else {
            self.place.failed("the engine ended before the request")
        };
        self.end(Some(refusal));
    }
}

impl Stream for Generation {
    type Item = Result<proto::GenerateResponse, tonic::Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Poll::Ready(Some(item));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            if self.stop.as_mut().poll(context).is_ready() {
                self.place.replica().abort(&self.id);
                self.flush_all();
                self.end(Some(Refusal::Stopping));
                continue;
            }
            match self.events.poll_recv(context) {
                // All buffered events were read, and later ones are lost, so the samples cannot be completed.
                Poll::Pending if self.slow.load(Ordering::Acquire) => self.closed(),
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => self.closed(),
                Poll::Ready(Some(event)) => {
                    self.take(event);
                    // What came together goes out together: fewer messages where the reader
                    // is behind, none later than it would be.
                    while !self.ended && self.ready.is_empty() {
                        match self.events.try_recv() {
                            Ok(event) => self.take(event),
                            Err(_) => break,
                        }
                    }
                    if !self.ended {
                        self.flush_all();
                    }
                }
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            // Frees the rows of running samples after the step in flight.
            self.place.replica().abort(&self.id);
            self.note_end(Some(super::refusal::code_name(tonic::Code::Cancelled)));
            let reasons: Vec<&str> =
                self.samples.iter().map(|sample| sample.finished.map_or("aborted", |(word, _)| word)).collect();
            spans::set_list(&self.inference, names::GEN_AI_RESPONSE_FINISH_REASONS, &reasons);
            let cancelled = tonic::Code::Cancelled;
            self.set_status(cancelled);
            let kind = super::refusal::code_name(cancelled);
            spans::fail(&self.inference, kind, "the client went away");
        }
    }
}

/// Creates the inference span with the attributes that are known before the generation runs. It contains no text.
fn inference_span(rpc: &Span, operation: &'static str, place: &Target, request: &Request, samples: u32) -> Span {
    let model = &place.model().name;
    let span = tracing::info_span!(
        parent: rpc,
        names::SPAN_INFERENCE,
        otel.name = format!("{operation} {model}"),
        otel.kind = "internal",
    );
    if span.is_disabled() {
        return span;
    }
    spans::set(&span, names::GEN_AI_OPERATION_NAME, operation);
    spans::set(&span, names::GEN_AI_PROVIDER_NAME, names::SERVICE);
    spans::set(&span, names::GEN_AI_REQUEST_MODEL, model.clone());
    spans::set(&span, names::GEN_AI_RESPONSE_MODEL, model.clone());
    spans::set(&span, names::GEN_AI_RESPONSE_ID, request.id.clone());
    spans::set(&span, names::GEN_AI_REQUEST_TEMPERATURE, f64::from(request.sampling.temperature));
    spans::set(&span, names::GEN_AI_REQUEST_TOP_P, f64::from(request.sampling.top_p));
    spans::set(&span, names::GEN_AI_REQUEST_TOP_K, i64::from(request.sampling.top_k));
    if samples != 1 {
        spans::set(&span, names::GEN_AI_REQUEST_CHOICE_COUNT, i64::from(samples));
    }
    if let Some(most) = request.limits.max_tokens {
        spans::set(&span, names::GEN_AI_REQUEST_MAX_TOKENS, i64::from(most));
    }
    if let Some(seed) = request.sampling.seed {
        // OpenTelemetry's integers are signed, so large seeds appear as negative numbers with the same bits.
        spans::set(&span, names::GEN_AI_REQUEST_SEED, seed as i64);
    }
    span
}

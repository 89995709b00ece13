//! Calls of several inputs: embeddings of texts, and the relevance of documents to a query. Each input is a separate
//! request to the engine under the call's id. At most as many inputs as the model has slots are in the engine at a
//! time, so that they share steps and leave room in the queue for other calls.
//! Not here: calls as plain data (`inputs`), and messages and bodies (`rpc`, `vllm`, `openai`).

use super::bounds;
use super::clients::Places;
use super::generation::{Delivery, Generation};
use super::inputs::{Answer, Answers, Common, EmbedCall, Failure, Input, ScoreCall};
use super::jobs::Size;
use super::prepare::{self, Prepared, Reasons, Target};
use super::proto::generate_response::Event;
use super::refusal::Refusal;
use super::rpc::{Caller, Rpc};
use crate::actors::workers::Cancel;
use crate::engine::prefix::page_keys;
use crate::engine::request::{Limits, Request, RequestError};
use crate::host::ServedModel;
use crate::model::embedding::Embedding;
use crate::model::text::chat::{ChatMessage, ChatOptions};
use crate::model::text::{SpecialText, Text};
use crate::replica::SubmitError;
use crate::telemetry::names;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use tokio_stream::StreamExt;
use tonic::Status;
use tracing::Span;

/// The maximum number of inputs of a call, the same as OpenAI's.
pub(super) const MOST_INPUTS: usize = 2048;
/// The maximum number of a call's inputs that are in the engine at a time.
const MOST_AT_ONCE: usize = 256;
/// The capacity of an input's event channel: the number of events of an input, so that the channel never overflows.
const EVENTS: usize = 8;
/// The answers of a reranker whose files do not name its answer tokens; the same default as in sentence-transformers.
const ANSWERS: [&str; 2] = ["yes", "no"];
/// The instruction to a reranker if the call has none.
const TASK: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// The task that the engine computes for each input.
enum Task {
    /// The embedding vector.
    Embed,
    /// The probability of `token` among the two tokens of `mask`.
    Answer { mask: Arc<[u32]>, token: u32 },
}

/// A call whose inputs have not been encoded yet.
struct Unencoded {
    place: Target,
    common: Common,
    /// The size of all inputs.
    bytes: usize,
    /// The operation's name in spans and metrics.
    operation: &'static str,
}

/// Inputs that are ready to be submitted.
struct Ready {
    place: Target,
    prompts: VecDeque<Vec<u32>>,
    task: Task,
    operation: &'static str,
    deadline: Option<Instant>,
}

fn check(common: &Common, inputs: usize, field: &'static str) -> Result<(), Refusal> {
    bounds::name("request_id", &common.id)?;
    bounds::name("cache_salt", &common.cache_salt)?;
    if inputs == 0 {
        return Err(Refusal::Missing { field, rule: "at least one" });
    }
    if inputs > MOST_INPUTS {
        let rule = const {
            assert!(MOST_INPUTS == 2048, "as the rule says");
            "at most 2048"
        };
        return Err(Refusal::Value { field, value: inputs.to_string(), rule });
    }
    Ok(())
}

fn tokenizer<'a>(model: &'a ServedModel, field: &'static str) -> Result<&'a Text, Refusal> {
    model.text.as_deref().ok_or_else(|| Refusal::NoTokenizer { model: model.name.clone(), field })
}

/// Returns the text that is prepended to each input: the one that the call names, or the model's default.
fn before<'a>(embedding: &'a Embedding, prompt: Option<&str>) -> Result<&'a str, Refusal> {
    let named = |name: &str| {
        embedding.prompts.get(name).map(String::as_str).ok_or_else(|| {
            let names: Vec<&str> = embedding.prompts.keys().map(String::as_str).collect();
            let rule = if names.is_empty() { "unset: the model has none".to_owned() } else { names.join(" or ") };
            Refusal::Json { field: "prompt_name".to_owned(), value: format!("{name:?}"), rule }
        })
    };
    match prompt.or(embedding.default_prompt.as_deref()) {
        None => Ok(""),
        Some(name) => named(name),
    }
}

/// Scales a vector to unit length, unless it is zero.
fn unit(values: &mut [f32]) {
    let square: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    if square > 0.0 {
        let factor = 1.0 / square.sqrt();
        values.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
    }
}

/// Truncates a vector to `dimensions` and then normalizes it.
fn shape(mut values: Vec<f32>, dimensions: Option<u32>, normalize: bool) -> Vec<f32> {
    values.truncate(dimensions.map_or(values.len(), |dimensions| dimensions as usize));
    if normalize {
        unit(&mut values);
    }
    values
}

/// Returns the messages for a reranker's chat template, with the roles `query` and `document`.
fn pair(query: String, document: String, task: Option<&str>) -> Vec<ChatMessage> {
    let message =
        |role: &str, content: String| ChatMessage { role: role.to_owned(), content, ..ChatMessage::default() };
    let task = task.map(|task| message("system", task.to_owned()));
    task.into_iter().chain([message("query", query), message("document", document)]).collect()
}

/// Returns the prompt of Qwen3's rerankers, for models with the same chat markers whose template does not take pairs.
fn qwen3_pair(query: &str, document: &str, task: &str) -> String {
    format!(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
         provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: {task}\n\
         <Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}

/// Returns the token ids of the prompt for a query and a document.
fn encode_pair(
    text: &Text,
    model: &ServedModel,
    (query, document): (String, String),
    task: Option<&str>,
    cancel: &Cancel,
) -> Result<Vec<u32>, Refusal> {
    let (template, style) = text.chat_style(false);
    if style.pairs {
        let options = ChatOptions { template: Some(template.to_owned()), ..ChatOptions::default() };
        let rendered = text.chat_until(&pair(query, document, task), &options, cancel)?;
        return Ok(text.encode(&rendered, false)?);
    }
    if text.id("<|im_start|>").is_none() {
        let rule = "a reranker: its chat template has neither the roles query and document nor <|im_start|>";
        return Err(Refusal::Value { field: "model", value: format!("{:?}", model.name), rule });
    }
    Ok(text.encode(&qwen3_pair(&query, &document, task.unwrap_or(TASK)), false)?)
}

/// Returns the tokens by which the model says that a document is relevant, or not.
fn answers(model: &ServedModel, text: &Text) -> Result<[u32; 2], Refusal> {
    if let Some(answers) = model.info.embedding.answers {
        return Ok(answers);
    }
    match ANSWERS.map(|answer| text.id(answer).filter(|id| *id < model.info.vocabulary)) {
        [Some(yes), Some(no)] => Ok([yes, no]),
        _ => {
            let rule = "a reranker: its tokenizer has no tokens \"yes\" and \"no\"";
            Err(Refusal::Value { field: "model", value: format!("{:?}", model.name), rule })
        }
    }
}

impl Rpc {
    /// Answers a call for embeddings on `place`.
    pub(super) async fn vectors(
        &self,
        span: &Span,
        caller: &Caller,
        place: Target,
        call: EmbedCall,
    ) -> Result<Answers<Vec<f32>>, Failure> {
        check(&call.common, call.inputs.len(), "inputs")?;
        for input in &call.inputs {
            if let Input::Text(text) = input {
                bounds::prompt("inputs.text", text.len(), self.most_text())?;
            }
        }
        let embedding = place.model().info.embedding.clone();
        let (size, normalize) = (embedding.size, call.normalize.unwrap_or(embedding.normalize));
        if let Some(dimensions) = call.dimensions.filter(|dimensions| !(1..=size).contains(dimensions)) {
            let rule = format!("from 1 to {size}, the size of the model's vectors");
            return Err(Refusal::Json { field: "dimensions".into(), value: dimensions.to_string(), rule }.into());
        }
        before(&embedding, call.prompt.as_deref())?;
        let bytes = call.inputs.iter().map(Input::bytes).sum();
        let EmbedCall { common, inputs, prompt, dimensions, .. } = call;
        let encode = move |model: &ServedModel, _: &Cancel| {
            let before = before(&model.info.embedding, prompt.as_deref())?;
            let ids = |input: Input| -> Result<Vec<u32>, Refusal> {
                let text = match input {
                    Input::Tokens(ids) => return Ok(ids),
                    Input::Text(text) if before.is_empty() => text,
                    Input::Text(text) => format!("{before}{text}"),
                };
                Ok(tokenizer(model, "inputs.text")?.encode(&text, true)?)
            };
            let prompts = inputs.into_iter().map(ids).collect::<Result<Vec<_>, Refusal>>()?;
            Ok((prompts, Task::Embed, 0))
        };
        let call = Unencoded { place, common, bytes, operation: names::OPERATION_EMBEDDINGS };
        let answers = self.run(span, caller, call, encode).await?;
        let projects = !embedding.dense.is_empty();
        let shaped = move || {
            let mut vectors = Vec::with_capacity(answers.answers.len());
            let answers = answers.map(|outcome| match outcome {
                Outcome::Vector(vector) => vectors.push(vector.into_vec()),
                Outcome::Probability(_) => vectors.push(Vec::new()),
            });
            let mut vectors = embedding.project(vectors).into_iter();
            answers.map(|()| shape(vectors.next().unwrap_or_default(), dimensions, normalize))
        };
        if !projects {
            return Ok(shaped());
        }
        // The vectors of a large call may take a second to project.
        let shaped = tokio::task::spawn_blocking(shaped).await;
        Ok(shaped.map_err(|error| Refusal::Failed(error.to_string()))?)
    }

    /// Answers a call for the relevance of documents, from 0 to 1: the probability of a reranker's positive answer, or
    /// the cosine of two vectors of an embedding model.
    pub(super) async fn relevance(
        &self,
        span: &Span,
        caller: &Caller,
        place: Target,
        call: ScoreCall,
    ) -> Result<Answers<f64>, Failure> {
        check(&call.common, call.pairs.len(), "documents")?;
        for (query, document) in &call.pairs {
            bounds::prompt("documents", query.len() + document.len(), self.most_text())?;
        }
        let embedding = &place.model().info.embedding;
        if embedding.declared && embedding.answers.is_none() {
            return self.cosines(span, caller, place, call).await;
        }
        let bytes = call.pairs.iter().map(|(query, document)| query.len() + document.len()).sum();
        let ScoreCall { common, pairs, task } = call;
        let encode = move |model: &ServedModel, cancel: &Cancel| {
            let text = tokenizer(model, "documents")?;
            let [yes, no] = answers(model, text)?;
            let mut mask = vec![0u32; model.info.vocabulary.div_ceil(32) as usize];
            [yes, no].into_iter().for_each(|token| mask[token as usize / 32] |= 1 << (token % 32));
            let ids = |pair| encode_pair(text, model, pair, task.as_deref(), cancel);
            let prompts = pairs.into_iter().map(ids).collect::<Result<Vec<_>, Refusal>>()?;
            Ok((prompts, Task::Answer { mask: Arc::from(mask), token: yes }, 1))
        };
        let call = Unencoded { place, common, bytes, operation: names::OPERATION_RERANK };
        let answers = self.run(span, caller, call, encode).await?;
        Ok(answers.map(|outcome| match outcome {
            Outcome::Probability(probability) => probability,
            Outcome::Vector(_) => f64::NAN,
        }))
    }

    /// Computes the cosines of pairs of texts. If consecutive pairs have the same query, it is embedded once.
    async fn cosines(
        &self,
        span: &Span,
        caller: &Caller,
        place: Target,
        call: ScoreCall,
    ) -> Result<Answers<f64>, Failure> {
        let mut inputs: Vec<Input> = Vec::new();
        let mut last: Option<(String, usize)> = None;
        let mut places = Vec::with_capacity(call.pairs.len());
        for (query, document) in call.pairs {
            let first = match &last {
                Some((text, at)) if *text == query => *at,
                _ => {
                    inputs.push(Input::Text(query.clone()));
                    last = Some((query, inputs.len() - 1));
                    inputs.len() - 1
                }
            };
            inputs.push(Input::Text(document));
            places.push((first, inputs.len() - 1));
        }
        check(&call.common, inputs.len().min(MOST_INPUTS), "documents")?;
        let mut vectors: Vec<Answer<Vec<f32>>> = Vec::new();
        let (mut id, mut model) = (String::new(), String::new());
        while !inputs.is_empty() {
            let rest = inputs.split_off(inputs.len().min(MOST_INPUTS));
            let part = EmbedCall {
                common: call.common.clone(),
                inputs: std::mem::replace(&mut inputs, rest),
                normalize: Some(true),
                ..EmbedCall::default()
            };
            let answers = Box::pin(self.vectors(span, caller, place.clone(), part)).await?;
            (id, model) = (answers.id, answers.model);
            vectors.extend(answers.answers);
        }
        let mut told = vec![false; vectors.len()];
        let answers = places.into_iter().map(|(query, document)| {
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let value = dot(&vectors[query].value, &vectors[document].value);
            // The tokens of a query that several pairs share count once.
            let own = if std::mem::replace(&mut told[query], true) { 0 } else { vectors[query].prompt_tokens };
            let prompt_tokens = own + vectors[document].prompt_tokens;
            Answer { value, prompt_tokens, cached_tokens: vectors[document].cached_tokens }
        });
        Ok(Answers { id, model, answers: answers.collect() })
    }

    /// Encodes the inputs of a call on a blocking thread, runs them on the engine, and collects the results. `encode`
    /// returns the prompts, what to compute for each, and the number of tokens that each generates.
    async fn run(
        &self,
        span: &Span,
        caller: &Caller,
        call: Unencoded,
        encode: impl FnOnce(&ServedModel, &Cancel) -> Result<(Vec<Vec<u32>>, Task, usize), Refusal> + Send + 'static,
    ) -> Result<Answers<Outcome>, Failure> {
        let Unencoded { place, common, bytes, operation } = call;
        let deadline = caller.deadline()?;
        let cancel = Cancel::until(deadline);
        let _waits = cancel.guard();
        let id = if common.id.is_empty() { prepare::fresh_id() } else { common.id.clone() };
        let (named, within, keep) = (id.clone(), span.clone(), common.keep);
        let work = move |mut places: Option<Places>| -> Result<(Ready, Option<Places>), Refusal> {
            let span = tracing::info_span!(parent: &within, names::SPAN_TOKENIZE);
            let (mut prompts, task, output) = span.in_scope(|| encode(place.model(), &cancel))?;
            let mut total = 0u32;
            for prompt in &mut prompts {
                if let Some(keep) = keep {
                    prompt.drain(..prompt.len().saturating_sub(keep));
                }
                prepare::fits(place.model(), prompt.len(), output)?;
                total = total.saturating_add(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
            }
            if let Some(places) = &mut places {
                places.admit(&named, total)?;
            }
            Ok((Ready { place, prompts: prompts.into(), task, operation, deadline }, places))
        };
        let worked = self.work(caller, 1, Size { bytes, constraint: false }, work).await;
        // The client's places stay reserved until all inputs have ended.
        let (ready, _places) = worked.map_err(|refusal| caller.scope.narrowed(self.host(), refusal))?;
        let model = ready.place.model().name.clone();
        let answers = self.collect(span, caller, &common, &id, ready).await?;
        Ok(Answers { id, model, answers })
    }

    /// Submits the inputs, a bounded number at a time, and returns the results in the order of the inputs.
    async fn collect(
        &self,
        span: &Span,
        caller: &Caller,
        common: &Common,
        id: &str,
        mut ready: Ready,
    ) -> Result<Vec<Answer<Outcome>>, Failure> {
        let slots: usize = ready.place.model().replicas.iter().map(|replica| replica.slots()).sum();
        let at_once = slots.clamp(1, MOST_AT_ONCE);
        let _open = self.open_call();
        let mut running: VecDeque<Generation> = VecDeque::new();
        let mut answers = Vec::with_capacity(ready.prompts.len());
        loop {
            while running.len() < at_once && !ready.prompts.is_empty() {
                match self.submit(span, caller, common, (id, answers.len() + running.len()), &mut ready) {
                    Ok(generation) => running.push_back(generation),
                    // Other calls fill the queue. There will be room at the latest when the inputs of this call that
                    // run have ended.
                    Err(Refusal::Submit(SubmitError::QueueFull { .. })) if !running.is_empty() => break,
                    Err(refusal) => {
                        if answers.is_empty() && running.is_empty() {
                            // Inputs that did not run are not charged.
                            let tokens =
                                ready.prompts.iter().map(|prompt| prompt.len() as u32).fold(0, u32::saturating_add);
                            self.give_back(caller, tokens);
                        }
                        return Err(refusal.into());
                    }
                }
            }
            let Some(mut first) = running.pop_front() else { return Ok(answers) };
            answers.push(outcome(&mut first, &ready.task).await?);
        }
    }

    /// Submits the next input. If the replica refuses it, it remains the next.
    fn submit(
        &self,
        span: &Span,
        caller: &Caller,
        common: &Common,
        (id, index): (&str, usize),
        ready: &mut Ready,
    ) -> Result<Generation, Refusal> {
        let Some(prompt) = ready.prompts.front() else {
            return Err(Refusal::Submit(SubmitError::Request(RequestError::EmptyPrompt)));
        };
        let several = ready.place.model().replicas.len() > 1;
        let keys = if several { page_keys(&common.cache_salt, prompt) } else { Vec::new() };
        let place = ready.place.clone().for_prompt(&keys, 1)?;
        let (pooling, allowed) = match &ready.task {
            Task::Embed => (Some(place.model().info.embedding.pooling), None),
            Task::Answer { mask, .. } => (None, Some(Arc::clone(mask))),
        };
        let request = Request {
            limits: Limits { max_tokens: Some(1), ignore_eos: true, ..Limits::default() },
            logprobs: allowed.is_some().then_some(2),
            pooling,
            allowed,
            priority: common.priority,
            cache_salt: common.cache_salt.clone(),
            deadline: ready.deadline,
            ..Request::new(id, prompt.clone())
        };
        let prepared = Prepared {
            place,
            request,
            samples: 1,
            operation: ready.operation,
            stop_strings: Vec::new(),
            special_text: SpecialText::None,
            reasons: Reasons::Never,
            text: false,
            token_ids: false,
            input: Some(u32::try_from(index).unwrap_or(u32::MAX)),
        };
        let delivery = Delivery {
            buffer: self.settings().stream_buffer.max(EVENTS),
            rpc: span.clone(),
            grpc: caller.is_grpc(),
            stop: self.stop().clone(),
            places: None,
            logits: None,
        };
        let generation = Generation::start(prepared, delivery)?;
        ready.prompts.pop_front();
        Ok(generation)
    }
}

/// The engine's result for an input.
#[derive(Debug)]
enum Outcome {
    Vector(Box<[f32]>),
    Probability(f64),
}

/// Waits for the result of an input.
async fn outcome(generation: &mut Generation, task: &Task) -> Result<Answer<Outcome>, Failure> {
    let mut usage = None;
    let mut probability = None;
    while let Some(message) = generation.next().await {
        match message.map_err(Failure::Ended)?.event {
            Some(Event::Delta(delta)) => {
                if let Task::Answer { token, .. } = task {
                    let top = delta.logprobs.first().map(|first| first.top.as_slice()).unwrap_or_default();
                    let found = top.iter().find(|other| other.token_id == *token);
                    // Tokens of probability 0 are not among the alternatives.
                    probability = Some(found.map_or(0.0, |found| f64::from(found.logprob).exp()));
                }
            }
            Some(Event::Finished(finished)) => usage = finished.usage,
            _ => {}
        }
    }
    let value = match task {
        Task::Embed => generation.take_embedding().map(Outcome::Vector),
        Task::Answer { .. } => probability.map(Outcome::Probability),
    };
    // Only an aborted input ends without a result.
    let value = value.ok_or_else(|| Failure::Ended(Status::cancelled("the call was aborted")))?;
    let usage = usage.unwrap_or_default();
    Ok(Answer { value, prompt_tokens: usage.prompt_tokens, cached_tokens: usage.cached_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_cut_and_then_scaled() {
        let vector = vec![3.0, 4.0, 12.0];
        assert_eq!(shape(vector.clone(), None, false), [3.0, 4.0, 12.0]);
        assert_eq!(shape(vector.clone(), Some(2), true), [0.6, 0.8]);
        assert_eq!(shape(vector.clone(), Some(2), false), [3.0, 4.0]);
        let unit = shape(vector, None, true);
        assert!((unit.iter().map(|value| value * value).sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(shape(vec![0.0, 0.0], None, true), [0.0, 0.0]);
    }

    #[test]
    fn texts_before_inputs_are_found_by_name_and_others_are_refused() {
        let mut embedding = Embedding::default();
        assert_eq!(before(&embedding, None).unwrap(), "");
        let error = before(&embedding, Some("query")).unwrap_err().to_string();
        assert_eq!(error, "prompt_name is \"query\", must be unset: the model has none");
        embedding.prompts =
            [("document", ""), ("query", "Q:")].map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        assert_eq!(before(&embedding, Some("query")).unwrap(), "Q:");
        embedding.default_prompt = Some("query".to_owned());
        assert_eq!(before(&embedding, None).unwrap(), "Q:");
        assert_eq!(before(&embedding, Some("document")).unwrap(), "");
        let error = before(&embedding, Some("other")).unwrap_err().to_string();
        assert_eq!(error, "prompt_name is \"other\", must be document or query");
    }
}

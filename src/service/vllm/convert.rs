//! Conversions between the contract's messages and ours. A request becomes a request of our own service, so that the
//! same code checks, routes and runs it; our stream of events becomes the contract's. No field is ignored: values that
//! are not supported are refused by name. Not here: gRPC.

use super::contract;
use crate::host::{Host, ServedModel};
use crate::model::python_json;
use crate::model::text::SpecialText;
use crate::replica::Replica;
use crate::service::inputs::{Answers, Common, EmbedCall, Input as Embedded};
use crate::service::prepare::Prepared;
use crate::service::proto;
use crate::service::refusal::Refusal;
use contract::generate_request::Input;
use contract::generate_response::Response;
use contract::sampling_params::Constraint;
use proto::generate_request::Prompt;
use proto::generate_response::Event;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Pairs of our field name and the contract's.
const NAMES: [(&str, &str); 12] = [
    ("sampling.n", "sampling_params.n"),
    ("stopping.strings", "sampling_params.stop"),
    ("stop_ids", "sampling_params.stop_token_ids"),
    ("constraint.json_schema", "sampling_params.json_schema"),
    ("constraint.regex", "sampling_params.regex"),
    ("constraint.grammar", "sampling_params.grammar"),
    ("constraint.choice", "sampling_params.choice"),
    ("constraint.json_object", "sampling_params.json_object"),
    ("constraint.structural_tag", "sampling_params.structural_tag"),
    ("constraint", "sampling_params.constraint"),
    ("prompt.text", "text"),
    ("prompt", "input"),
];
/// The path of the model and of its tokenizer that routers are told. They look for this path on their own disk, then
/// for a repository of this name in a public registry, and only then ask the server; the served name could bring them
/// another model's tokenizer. No file can exist under a device file.
const NOWHERE: &str = "/dev/null/ask-GetTokenizer";
/// The maximum absolute value of an entry of `logit_bias`.
const MAX_BIAS: f32 = 100.0;

/// Returns the only served model.
pub fn model(host: &Host) -> Result<Arc<ServedModel>, Refusal> {
    match host.models().as_slice() {
        [model] => Ok(Arc::clone(model)),
        [] => Err(Refusal::NoModel),
        models => {
            let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
            Err(Refusal::SeveralModels { served: names.join(", ") })
        }
    }
}

/// Returns the replica of a data-parallel rank.
pub fn replica<'a>(model: &'a ServedModel, field: &'static str, rank: i32) -> Result<&'a Replica, Refusal> {
    let replica = usize::try_from(rank).ok().and_then(|rank| model.replicas.get(rank)).map(|replica| &**replica);
    let rule = "the place of one of the model's replicas, from 0";
    replica.ok_or_else(|| Refusal::Value { field, value: rank.to_string(), rule })
}

/// Returns the refusal with the contract's field names.
pub fn with_contract_names(refusal: Refusal) -> Refusal {
    refusal.renamed(&NAMES)
}

/// A converted Generate request.
#[derive(Debug)]
pub struct Asked {
    /// Our message. Its `model` and `device` are unset.
    pub message: proto::GenerateRequest,
    /// The name of the replica of the requested rank; empty if any replica will do.
    pub replica: String,
    /// The settings that our message has no field for.
    pub rest: Rest,
    /// Whether tokens are sent as they are generated.
    pub stream: bool,
}

/// The settings of a request that our message has no field for.
#[derive(Clone, Copy, Debug)]
pub struct Rest {
    /// The number of last prompt tokens that are kept; `None` for all.
    pub keep: Option<usize>,
    special_text: bool,
}

impl Rest {
    /// Applies the settings to a prepared request. Returns the first token of the prompt if its log probabilities are
    /// requested.
    pub fn apply(self, prepared: &mut Prepared) -> Option<u32> {
        prepared.special_text = if self.special_text { SpecialText::All } else { SpecialText::None };
        let request = &prepared.request;
        request.prompt_logprobs.and_then(|_| request.prompt.first().copied())
    }
}

/// Converts a Generate request. Does not check the prompt.
pub fn request(model: &ServedModel, message: contract::GenerateRequest) -> Result<Asked, Refusal> {
    let not_served = [
        ("kv_transfer_params", message.kv_transfer_params.is_some()),
        ("kv_transfer_params_json", message.kv_transfer_params_json.is_some()),
        ("mm_inputs", message.mm_inputs.is_some()),
        ("extra_mm_inputs", !message.extra_mm_inputs.is_empty()),
        ("media_refs", message.media_refs.is_some()),
    ];
    if let Some((field, _)) = not_served.into_iter().find(|(_, set)| *set) {
        return Err(Refusal::NotServed { field });
    }
    let params = message.sampling_params.unwrap_or_default();
    let sampling = sampling(&params)?;
    let constraint = constraint(&params)?;
    let logprobs = at_least_zero("sampling_params.logprobs", params.logprobs)?;
    let prompt_logprobs = at_least_zero("sampling_params.prompt_logprobs", params.prompt_logprobs)?;
    let keep = match params.truncate_prompt_tokens {
        None => None,
        // As many tokens as fit in the context with one output token.
        Some(-1) => {
            let context = model.replicas.iter().map(|replica| replica.bounds().context).min().unwrap_or(0);
            Some(context.saturating_sub(1) as usize)
        }
        Some(most) if most > 0 => usize::try_from(most).ok(),
        Some(other) => {
            let (field, rule) = ("sampling_params.truncate_prompt_tokens", "at least 1, or -1");
            return Err(Refusal::Value { field, value: other.to_string(), rule });
        }
    };
    let replica = match message.data_parallel_rank {
        None => String::new(),
        Some(rank) => self::replica(model, "data_parallel_rank", rank)?.name.clone(),
    };
    let prompt = match message.input {
        None => return Err(Refusal::Missing { field: "input", rule: "one of tokenized and text" }),
        Some(Input::Text(text)) => Prompt::Text(text),
        Some(Input::Tokenized(mut tokens)) => {
            if let Some(keep) = keep {
                tokens.input_ids.drain(..tokens.input_ids.len().saturating_sub(keep));
            }
            Prompt::Tokens(proto::TokenIds { ids: tokens.input_ids })
        }
    };
    let message_of_ours = proto::GenerateRequest {
        request_id: message.request_id,
        prompt: Some(prompt),
        sampling: Some(sampling),
        stopping: Some(proto::Stopping {
            max_tokens: params.max_tokens,
            min_tokens: Some(params.min_tokens),
            strings: params.stop,
            ids: params.stop_token_ids,
            ignore_eos: params.ignore_eos,
        }),
        output: Some(proto::Output { text: Some(false), token_ids: Some(true), logprobs, prompt_logprobs }),
        constraint,
        ..Default::default()
    };
    let rest = Rest { keep, special_text: !params.skip_special_tokens };
    Ok(Asked { message: message_of_ours, replica, rest, stream: message.stream })
}

/// Converts the sampling parameters. In fields without presence, 0 means unset.
fn sampling(params: &contract::SamplingParams) -> Result<proto::Sampling, Refusal> {
    let bias = |(&id, &bias): (&i32, &f32)| {
        let field = "sampling_params.logit_bias";
        let refuse = |value: String, rule| Refusal::Value { field, value, rule };
        if bias.abs() > MAX_BIAS {
            return Err(refuse(bias.to_string(), "from -100 to 100"));
        }
        let id = u32::try_from(id).map_err(|_| refuse(id.to_string(), "for ids inside the vocabulary"))?;
        Ok((id, bias))
    };
    let unless_zero = |value: f32| (value != 0.0).then_some(value);
    Ok(proto::Sampling {
        temperature: Some(params.temperature.unwrap_or(1.0)),
        top_k: Some(params.top_k),
        top_p: unless_zero(params.top_p),
        min_p: Some(params.min_p),
        repetition_penalty: unless_zero(params.repetition_penalty),
        presence_penalty: Some(params.presence_penalty),
        frequency_penalty: Some(params.frequency_penalty),
        // A negative seed is sign-extended; our seeds have 64 bits.
        seed: params.seed.filter(|seed| *seed != -1).map(|seed| i64::from(seed) as u64),
        logit_bias: params.logit_bias.iter().map(bias).collect::<Result<_, _>>()?,
        n: Some(params.n.max(1)),
    })
}

/// Converts the constraint on the output.
fn constraint(params: &contract::SamplingParams) -> Result<Option<proto::Constraint>, Refusal> {
    use proto::constraint::{AnyJsonObject, Choice, Kind};
    let kind = match params.constraint.clone() {
        None | Some(Constraint::JsonObject(false)) => return Ok(None),
        Some(Constraint::JsonSchema(schema)) => Kind::JsonSchema(schema),
        Some(Constraint::Regex(regex)) => Kind::Regex(regex),
        Some(Constraint::Grammar(grammar)) => Kind::Grammar(grammar),
        Some(Constraint::StructuralTag(tag)) => Kind::StructuralTag(tag),
        Some(Constraint::JsonObject(true)) => Kind::JsonObject(AnyJsonObject {}),
        Some(Constraint::Choice(choice)) => Kind::Choice(Choice { texts: choice.choices }),
    };
    Ok(Some(proto::Constraint { kind: Some(kind), ..Default::default() }))
}

fn at_least_zero(field: &'static str, given: Option<i32>) -> Result<Option<u32>, Refusal> {
    let convert = |given: i32| {
        u32::try_from(given).map_err(|_| Refusal::Value { field, value: given.to_string(), rule: "from 0 to 20" })
    };
    given.map(convert).transpose()
}

/// Converts the events of one request to the contract's messages.
#[derive(Debug)]
pub struct EventConverter {
    stream: bool,
    /// The log probabilities of the prompt, if they are requested, until they are sent.
    prompt: Option<contract::InputLogProbs>,
    prompt_tokens: u32,
    cached_tokens: u32,
    /// The samples, by index.
    samples: Vec<Drawn>,
}

#[derive(Debug, Default)]
struct Drawn {
    ids: Vec<u32>,
    /// The log probabilities, unless they are sent as tokens are generated.
    logprobs: Vec<proto::TokenLogprobs>,
}

impl EventConverter {
    /// Creates the converter. `first` is the first token of the prompt if its log probabilities are requested.
    pub fn new(stream: bool, first: Option<u32>) -> EventConverter {
        let prompt = first.map(|token_id| {
            let mut told = contract::InputLogProbs::default();
            told.push(token_id, None);
            told
        });
        EventConverter { stream, prompt, prompt_tokens: 0, cached_tokens: 0, samples: Vec::new() }
    }

    /// Converts an event; returns `None` if no message is due.
    pub fn convert(&mut self, event: Event) -> Option<contract::GenerateResponse> {
        let response = match event {
            Event::Started(started) => {
                (self.prompt_tokens, self.cached_tokens) = (started.prompt_tokens, started.cached_tokens);
                return None;
            }
            Event::Prompt(prompt) => {
                let told = self.prompt.as_mut()?;
                prompt.tokens.iter().for_each(|token| told.push(token.token_id, Some(token)));
                return None;
            }
            Event::Delta(delta) => Response::Chunk(self.chunk(delta)?),
            Event::Finished(finished) => Response::Complete(self.complete(&finished)),
        };
        Some(contract::GenerateResponse { response: Some(response) })
    }

    fn sample(&mut self, index: u32) -> &mut Drawn {
        let index = index as usize;
        if self.samples.len() <= index {
            self.samples.resize_with(index + 1, Drawn::default);
        }
        &mut self.samples[index]
    }

    /// Takes the log probabilities of the prompt, which are sent once, with sample 0.
    fn input(&mut self, index: u32) -> Option<contract::InputLogProbs> {
        if index == 0 { self.prompt.take().map(contract::InputLogProbs::told) } else { None }
    }

    fn chunk(&mut self, delta: proto::Delta) -> Option<contract::GenerateStreamChunk> {
        let (stream, prompt_tokens, cached_tokens) = (self.stream, self.prompt_tokens, self.cached_tokens);
        let drawn = self.sample(delta.index);
        drawn.ids.extend(&delta.token_ids);
        if !stream {
            drawn.logprobs.extend(delta.logprobs);
            return None;
        }
        let input_logprobs = self.input(delta.index);
        Some(contract::GenerateStreamChunk {
            completion_tokens: delta.token_ids.len() as u32,
            token_ids: delta.token_ids,
            prompt_tokens,
            cached_tokens,
            output_logprobs: logprobs(&delta.logprobs),
            input_logprobs,
            index: delta.index,
        })
    }

    fn complete(&mut self, finished: &proto::Finished) -> contract::GenerateComplete {
        use contract::generate_complete::MatchedStop;
        use proto::FinishReason as Reason;
        use proto::finished::StopMatch;
        let drawn = std::mem::take(self.sample(finished.index));
        let input_logprobs = self.input(finished.index);
        let usage = finished.usage.unwrap_or_default();
        let finish_reason = match finished.reason() {
            Reason::Stop => "stop",
            Reason::Length => "length",
            Reason::Aborted | Reason::DeadlineExceeded => "abort",
            Reason::Error | Reason::Unspecified => "error",
        };
        contract::GenerateComplete {
            output_ids: drawn.ids,
            finish_reason: finish_reason.to_owned(),
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.output_tokens,
            cached_tokens: usage.cached_tokens,
            output_logprobs: logprobs(&drawn.logprobs),
            input_logprobs,
            index: finished.index,
            matched_stop: finished.stop_match.clone().map(|stop| match stop {
                StopMatch::StopString(string) => MatchedStop::MatchedStopStr(string),
                StopMatch::StopId(id) => MatchedStop::MatchedTokenId(id),
            }),
            spec_accepted_tokens: usage.accepted_tokens,
            spec_draft_tokens: usage.drafted_tokens,
            ..Default::default()
        }
    }
}

impl contract::InputLogProbs {
    /// Appends a token of the prompt. Every token but the first has log probabilities.
    fn push(&mut self, token_id: u32, known: Option<&proto::TokenLogprobs>) {
        self.token_ids.push(token_id);
        self.token_logprobs.push(contract::InputTokenLogProb { value: known.map(|token| token.logprob) });
        self.top_logprobs.push(known.map(top).unwrap_or_default());
    }

    /// Clears the lists of alternatives if all of them are empty.
    fn told(mut self) -> contract::InputLogProbs {
        if self.top_logprobs.iter().all(|top| top.values.is_empty()) {
            self.top_logprobs.clear();
        }
        self
    }
}

fn top(token: &proto::TokenLogprobs) -> contract::TopLogProbs {
    contract::TopLogProbs {
        values: token.top.iter().map(|other| other.logprob).collect(),
        token_ids: token.top.iter().map(|other| other.token_id).collect(),
    }
}

fn logprobs(tokens: &[proto::TokenLogprobs]) -> Option<contract::OutputLogProbs> {
    let any_top = tokens.iter().any(|token| !token.top.is_empty());
    (!tokens.is_empty()).then(|| contract::OutputLogProbs {
        token_logprobs: tokens.iter().map(|token| token.logprob).collect(),
        token_ids: tokens.iter().map(|token| token.token_id).collect(),
        top_logprobs: if any_top { tokens.iter().map(top).collect() } else { Vec::new() },
    })
}

/// Converts an Embed request, whose prompt must be token ids.
pub(in crate::service) fn embed_call(message: contract::EmbedRequest) -> Result<EmbedCall, Refusal> {
    let Some(tokenized) = message.tokenized else {
        return Err(Refusal::Missing { field: "tokenized", rule: "the prompt's token ids" });
    };
    let common = Common { id: message.request_id, ..Common::default() };
    Ok(EmbedCall { common, inputs: vec![Embedded::Tokens(tokenized.input_ids)], ..EmbedCall::default() })
}

/// Converts the answer of a call with one input.
pub(in crate::service) fn embedded(answers: Answers<Vec<f32>>) -> contract::EmbedResponse {
    let first = answers.answers.into_iter().next();
    first.map_or_else(contract::EmbedResponse::default, |answer| contract::EmbedResponse {
        embedding_dim: u32::try_from(answer.value.len()).unwrap_or(u32::MAX),
        prompt_tokens: answer.prompt_tokens,
        embedding: answer.value,
    })
}

/// Returns the description of a model.
pub fn model_info(model: &ServedModel) -> contract::GetModelInfoResponse {
    let object = |name: &str| -> serde_json::Map<String, serde_json::Value> {
        let files = model.text.iter().flat_map(|text| text.files());
        let bytes = files.into_iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes.as_slice());
        let text = bytes.and_then(|bytes| std::str::from_utf8(bytes).ok());
        match text.map(python_json::parse) {
            Some(Ok(serde_json::Value::Object(object))) => object,
            _ => serde_json::Map::new(),
        }
    };
    let (config, generation) = (object("config.json"), object("generation_config.json"));
    let id = |name: &str| config.get(name).and_then(|id| i32::try_from(id.as_i64()?).ok()).unwrap_or_default();
    let recommended: serde_json::Map<_, _> = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), generation.get(name).filter(|value| value.is_number())?.clone())))
        .collect();
    let context = model.info.context;
    let path = model.text.as_ref().map(|_| NOWHERE.to_owned()).unwrap_or_default();
    contract::GetModelInfoResponse {
        model_path: path.clone(),
        is_generation: !model.info.embedding.declared,
        max_context_length: context,
        vocab_size: model.info.vocabulary,
        supports_vision: false,
        served_model_name: model.name.clone(),
        tokenizer_path: path,
        model_type: config.get("model_type").and_then(|kind| kind.as_str()).unwrap_or_default().to_owned(),
        architectures: vec![model.info.architecture.clone()],
        eos_token_ids: model.info.eos_ids.iter().map(|&id| signed(id)).collect(),
        pad_token_id: id("pad_token_id"),
        bos_token_id: id("bos_token_id"),
        max_req_input_len: signed(context.saturating_sub(1)),
        default_sampling_params_json: match recommended.is_empty() {
            true => String::new(),
            false => serde_json::Value::Object(recommended).to_string(),
        },
    }
}

/// Converts a number to the contract's signed type, saturating.
pub fn signed(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Formats a time as RFC 3339, in UTC with milliseconds.
pub fn timestamp(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // The civil calendar, counted from the first of March of year 0 in eras of 400 years.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn moments_are_written_as_others_write_them() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.250Z"),
            (951_782_399, "2000-02-28T23:59:59.250Z"),
            (951_782_400, "2000-02-29T00:00:00.250Z"),
            (1_709_251_199, "2024-02-29T23:59:59.250Z"),
            (1_709_251_200, "2024-03-01T00:00:00.250Z"),
            (1_767_225_599, "2025-12-31T23:59:59.250Z"),
            (4_107_542_400, "2100-03-01T00:00:00.250Z"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 250)), text);
        }
    }

    #[test]
    fn zero_is_unset_where_a_field_cannot_say_so() {
        let unset = sampling(&contract::SamplingParams::default()).unwrap();
        assert_eq!((unset.temperature, unset.top_p, unset.repetition_penalty), (Some(1.0), None, None));
        assert_eq!((unset.top_k, unset.n, unset.seed), (Some(0), Some(1), None));
        let set = contract::SamplingParams {
            temperature: Some(0.0),
            top_p: 0.5,
            repetition_penalty: 1.5,
            seed: Some(-2),
            ..Default::default()
        };
        let set = sampling(&set).unwrap();
        assert_eq!((set.temperature, set.top_p, set.repetition_penalty), (Some(0.0), Some(0.5), Some(1.5)));
        assert_eq!(set.seed, Some(u64::MAX - 1));
        let drawn = contract::SamplingParams { seed: Some(-1), ..Default::default() };
        assert_eq!(sampling(&drawn).unwrap().seed, None);
    }
}

//! `/v1/embeddings`, `/v1/rerank` and `/v1/score`: converts bodies to calls of several inputs, and the results to the
//! answers of OpenAI, Jina and vLLM.
//! Not here: HTTP, and running the calls (`service::embed`).

use super::fields::{Fields, refuse};
use super::request;
use crate::host::ServedModel;
use crate::service::inputs::{Answers, Common, EmbedCall, Input, ScoreCall};
use crate::service::prepare::fresh_id;
use crate::service::refusal::Refusal;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

/// The encoding of vectors in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// A list of numbers.
    Float,
    /// Base64 of little-endian f32.
    Base64,
}

/// A parsed body of `/v1/embeddings`.
#[derive(Debug)]
pub(super) struct AskedVectors {
    pub(super) call: EmbedCall,
    pub(super) encoding: Encoding,
}

/// The fields of OpenAI's and vLLM's API that are refused unless they have no effect.
const NOT_SERVED: [&str; 4] = ["messages", "mm_processor_kwargs", "additional_data", "softmax"];

/// Parses the common fields of a body. `id` is the prefix of the call's id; each input generates `output` tokens.
fn common(body: &mut Fields, model: &ServedModel, id: &str, output: u32) -> Result<Common, Refusal> {
    body.not_served(&NOT_SERVED)?;
    let priority = body.signed("priority")?.unwrap_or(0);
    Ok(Common {
        id: format!("{id}-{}", fresh_id()),
        priority: i32::try_from(priority)
            .map_err(|_| refuse("priority", &priority.into(), "a whole number of 32 bits"))?,
        cache_salt: body.text("cache_salt")?.unwrap_or_default(),
        keep: request::kept(body, model, output)?,
    })
}

/// Parses `input`: a text, token ids, or a list of those.
fn inputs(value: Option<Value>) -> Result<Vec<Input>, Refusal> {
    const RULE: &str = "a text, token ids, or a list of those";
    match value {
        None => Err(refuse("input", &Value::Null, RULE)),
        Some(Value::String(text)) => Ok(vec![Input::Text(text)]),
        Some(Value::Array(list)) if list.is_empty() => Err(refuse("input", &json!("[]"), "not empty")),
        Some(Value::Array(list)) if list[0].is_number() => Ok(vec![Input::Tokens(request::ids("input", list)?)]),
        Some(Value::Array(list)) => {
            let one = |(index, value): (usize, Value)| {
                let path = format!("input[{index}]");
                match value {
                    Value::String(text) => Ok(Input::Text(text)),
                    Value::Array(list) => request::ids(&path, list).map(Input::Tokens),
                    other => Err(refuse(path, &other, "a text or token ids")),
                }
            };
            list.into_iter().enumerate().map(one).collect()
        }
        Some(other) => Err(refuse("input", &other, RULE)),
    }
}

/// Parses a body of `/v1/embeddings` for `model`.
pub(super) fn read(mut body: Fields, model: &ServedModel) -> Result<AskedVectors, Refusal> {
    let common = common(&mut body, model, "embd", 0)?;
    let encoding = match body.text("encoding_format")?.as_deref() {
        None | Some("float") => Encoding::Float,
        Some("base64") => Encoding::Base64,
        Some(other) => return Err(refuse("encoding_format", &other.into(), "\"float\" or \"base64\"")),
    };
    // Cohere's and NVIDIA's name of it, whose values are those of the prompts of most models.
    let prompt = match body.text("prompt_name")? {
        None => body.text("input_type")?,
        named => named,
    };
    let call = EmbedCall {
        common,
        inputs: inputs(body.any("input"))?,
        prompt,
        dimensions: body.whole("dimensions")?,
        // vLLM's names, older and newer.
        normalize: match body.flag("normalize")? {
            None => body.flag("use_activation")?,
            said => said,
        },
    };
    Ok(AskedVectors { call, encoding })
}

fn usage(tokens: u64) -> Value {
    json!({"prompt_tokens": tokens, "total_tokens": tokens})
}

/// Returns the answer of `/v1/embeddings`.
pub(super) fn vectors(answers: &Answers<Vec<f32>>, encoding: Encoding) -> Value {
    let told = |values: &[f32]| match encoding {
        Encoding::Float => Value::from(values.to_vec()),
        Encoding::Base64 => {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            BASE64_STANDARD.encode(bytes).into()
        }
    };
    let data = answers
        .answers
        .iter()
        .enumerate()
        .map(|(index, answer)| json!({"object": "embedding", "index": index, "embedding": told(&answer.value)}));
    json!({
        "object": "list", "data": data.collect::<Vec<_>>(), "model": answers.model,
        "usage": usage(answers.prompt_tokens()),
    })
}

/// A parsed body of `/v1/rerank`.
#[derive(Debug)]
pub(super) struct AskedRanks {
    pub(super) call: ScoreCall,
    /// The number of documents in the answer (`top_n`).
    pub(super) most: usize,
    /// Whether the answer repeats the documents.
    pub(super) echo: bool,
}

/// Parses a document: a text, or an object with a `text`.
fn document(path: String, value: Value) -> Result<String, Refusal> {
    match value {
        Value::String(text) => Ok(text),
        object @ Value::Object(_) => Fields::of(path, object)?.need_text("text"),
        other => Err(refuse(path, &other, "a text, or an object with a text")),
    }
}

fn texts(body: &mut Fields, key: &str) -> Result<Vec<String>, Refusal> {
    match body.any(key) {
        None => Err(body.missing(key, "a text or a list of texts")),
        Some(Value::Array(list)) => {
            let text = |(index, value)| document(format!("{key}[{index}]"), value);
            list.into_iter().enumerate().map(text).collect()
        }
        Some(one) => Ok(vec![document(key.to_owned(), one)?]),
    }
}

/// Parses a body of `/v1/rerank`.
pub(super) fn read_ranks(mut body: Fields, model: &ServedModel) -> Result<AskedRanks, Refusal> {
    let common = common(&mut body, model, "rerank", 1)?;
    let query = body.need_text("query")?;
    let documents = texts(&mut body, "documents")?;
    let most = body.whole("top_n")?.filter(|most| *most > 0).map_or(documents.len(), |most| most as usize);
    let echo = body.flag("return_documents")?.unwrap_or(true);
    let pairs = documents.into_iter().map(|document| (query.clone(), document)).collect();
    Ok(AskedRanks { call: ScoreCall { common, pairs, task: body.text("instruction")? }, most, echo })
}

/// Returns the answer of `/v1/rerank`: the documents by relevance, highest first.
pub(super) fn ranks(answers: &Answers<f64>, documents: &[String], most: usize, echo: bool) -> Value {
    let mut order: Vec<usize> = (0..answers.answers.len()).collect();
    order.sort_by(|a, b| answers.answers[*b].value.total_cmp(&answers.answers[*a].value));
    let told = order.into_iter().take(most).map(|index| {
        let mut result = json!({"index": index, "relevance_score": answers.answers[index].value});
        if echo {
            result["document"] = json!({"text": documents[index]});
        }
        result
    });
    json!({
        "id": answers.id, "model": answers.model, "results": told.collect::<Vec<_>>(),
        "usage": usage(answers.prompt_tokens()),
    })
}

/// Parses a body of `/v1/score`: one text and several others, or two lists of the same length.
pub(super) fn read_scores(mut body: Fields, model: &ServedModel) -> Result<ScoreCall, Refusal> {
    let common = common(&mut body, model, "score", 1)?;
    // The names of vLLM's first versions and of its later ones.
    let names = [["text_1", "text_2"], ["queries", "documents"], ["queries", "items"], ["data_1", "data_2"]];
    let found = names.into_iter().find(|names| names.iter().all(|name| body.peek(name).is_some()));
    let [first, second] = found.unwrap_or(names[0]);
    let (queries, documents) = (texts(&mut body, first)?, texts(&mut body, second)?);
    let pairs = match (queries.len(), documents.len()) {
        (1, _) => documents.into_iter().map(|document| (queries[0].clone(), document)).collect(),
        (a, b) if a == b => queries.into_iter().zip(documents).collect(),
        (a, b) => {
            return Err(refuse(first, &Value::from(a), format!("one text, or as many as {second}, which is {b}")));
        }
    };
    Ok(ScoreCall { common, pairs, task: body.text("instruction")? })
}

/// Returns the answer of `/v1/score`.
pub(super) fn scores(answers: &Answers<f64>, created: u64) -> Value {
    let data = answers
        .answers
        .iter()
        .enumerate()
        .map(|(index, answer)| json!({"object": "score", "index": index, "score": answer.value}));
    json!({
        "id": answers.id, "object": "list", "created": created, "model": answers.model,
        "data": data.collect::<Vec<_>>(), "usage": usage(answers.prompt_tokens()),
    })
}

//! Tests of calls of several inputs: vectors over gRPC, the routers' contract and HTTP, and the relevance of documents.
//! Method: fake devices, whose hidden states follow from the tokens, so that every value of an answer is known.

use crate::openai::{post, server};
use crate::serving::*;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ostinato::engine::fake::hidden;
use ostinato::host::ServedModel;
use ostinato::model::embedding::dense::Dense;
use ostinato::model::embedding::{Embedding, Pooling};
use ostinato::service::proto::vllm::grpc::engine as contract;
use ostinato::service::proto::{self, embed_input::Input};
use ostinato::service::server::Options;
use serde_json::{Value, json};
use std::time::Duration;
use tonic::Code;

const FAST: Duration = Duration::from_micros(100);

/// The vector of a prompt whose last state is pooled, cut and scaled.
fn vector(prompt: &[u32], dimensions: usize, normalize: bool) -> Vec<f32> {
    let values = hidden(prompt.iter().copied())[..dimensions].to_vec();
    let length = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    values.into_iter().map(|value| if normalize { (f64::from(value) / length) as f32 } else { value }).collect()
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// A model whose files say what `change` sets.
fn embedding_model(slots: u32, change: impl FnOnce(&mut Embedding)) -> ServedModel {
    let mut device = fake(FAST, b"x");
    device.capacity.slots = slots;
    let mut model = model("alpha", Some(tokenizer(true)), vec![(0, device)], 8);
    change(&mut model.info.embedding);
    model
}

fn text(text: &str) -> proto::EmbedInput {
    proto::EmbedInput { input: Some(Input::Text(text.to_owned())) }
}

fn tokens(ids: &[u32]) -> proto::EmbedInput {
    proto::EmbedInput { input: Some(Input::Tokens(proto::TokenIds { ids: ids.to_vec() })) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vectors_come_over_grpc_in_the_order_of_the_inputs() {
    let files = |embedding: &mut Embedding| {
        embedding.declared = true;
        embedding.prompts = [("query".to_owned(), "Q:".to_owned())].into();
    };
    let served = serve_models(vec![embedding_model(2, files)], Options::default()).await;
    let mut client = served.client().await;
    // Many more inputs than slots and places in the queue.
    let inputs: Vec<String> = (0..40).map(|i| format!("input {i}")).collect();
    let mut request =
        proto::EmbedRequest { inputs: inputs.iter().map(|input| text(input)).collect(), ..Default::default() };
    request.inputs.push(tokens(&[1, 2, 3]));
    request.request_id = "mine".to_owned();
    let response = client.embed(request.clone()).await.unwrap().into_inner();
    assert_eq!((response.request_id.as_str(), response.model.as_str()), ("mine", "alpha"));
    assert_eq!(response.embeddings.len(), 41);
    for (input, found) in inputs.iter().zip(&response.embeddings) {
        assert_eq!(found.values, vector(&ids(input), 4, true), "{input}");
        assert_eq!(found.prompt_tokens as usize, input.len());
    }
    assert_eq!(response.embeddings[40].values, vector(&[1, 2, 3], 4, true));
    // With a text before, cut, and not scaled.
    request.inputs = vec![text("find")];
    request.prompt_name = Some("query".to_owned());
    (request.dimensions, request.normalize) = (Some(3), Some(false));
    let response = client.embed(request.clone()).await.unwrap().into_inner();
    assert_eq!(response.embeddings[0].values, vector(&ids("Q:find"), 3, false));
    assert_eq!(served.host.unfinished(), 0);

    type Change = fn(&mut proto::EmbedRequest);
    let refused: [(Change, Code, &str); 8] = [
        (|r| r.inputs.clear(), Code::InvalidArgument, "inputs is missing"),
        (|r| r.inputs = vec![Default::default()], Code::InvalidArgument, "one of text and tokens"),
        (|r| r.inputs = vec![text("x"); 2049], Code::InvalidArgument, "inputs is 2049, must be at most 2048"),
        (|r| r.inputs = vec![tokens(&[])], Code::InvalidArgument, "the prompt is empty"),
        (|r| r.inputs = vec![tokens(&[7; 4097])], Code::InvalidArgument, "4097 prompt tokens and 0 to generate"),
        (|r| r.inputs = vec![tokens(&[300])], Code::InvalidArgument, "outside the vocabulary of 300"),
        (|r| r.dimensions = Some(5), Code::InvalidArgument, "dimensions is 5, must be from 1 to 4"),
        (|r| r.prompt_name = Some("other".into()), Code::InvalidArgument, "must be query"),
    ];
    for (change, code, message) in refused {
        let mut wrong = request.clone();
        change(&mut wrong);
        let status = client.embed(wrong).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(message), "{message}: {status}");
    }
}

/// A model whose tokens see later ones, with a dense module behind the pooling, and with a tokenizer but no chat template.
fn both_sides() -> ServedModel {
    let mut device = fake(FAST, b"x");
    (device.capacity.causal, device.capacity.prefill_chunk) = (false, 64);
    let mut model = model("alpha", Some(tokenizer(false)), vec![(0, device)], 8);
    let weight = (0..12).map(|i| i as f32 / 4.0 - 1.0).collect();
    let dense = Dense { inputs: 4, outputs: 3, weight, bias: Some(vec![0.5, 0.0, -0.5]), tanh: false };
    let embedding = &mut model.info.embedding;
    (embedding.declared, embedding.dense, embedding.size) = (true, [dense].into(), 3);
    model
}

/// Goal: vectors go through the dense modules before they are cut and scaled, in every API; a model whose tokens see later
/// ones says so, takes prompts as long as a step, and refuses to generate by the same words in every API.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_not_causal_gives_projected_vectors_and_no_tokens() {
    let served = serve_models(vec![both_sides()], Options::default()).await;
    let projected = |prompt: &[u32], dimensions: usize| {
        let input = hidden(prompt.iter().copied());
        let row = |row: usize| {
            let of = (0..4).map(|i| f64::from(input[i]) * ((row * 4 + i) as f64 / 4.0 - 1.0)).sum::<f64>();
            of + [0.5, 0.0, -0.5][row]
        };
        let values: Vec<f64> = (0..dimensions).map(row).collect();
        let length = values.iter().map(|value| value * value).sum::<f64>().sqrt();
        values.into_iter().map(|value| value / length).collect::<Vec<f64>>()
    };
    let same = |found: &[f32], wanted: &[f64]| {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((f64::from(*found) - wanted).abs() < 1e-6, "{found} instead of {wanted}");
        }
    };
    let mut client = served.client().await;
    let lengths = [1, 5, 16, 33, 64];
    let prompts: Vec<Vec<u32>> = lengths.iter().map(|length| (1..=*length).collect()).collect();
    let inputs = prompts.iter().map(|prompt| tokens(prompt)).collect();
    let mut request = proto::EmbedRequest { inputs, ..Default::default() };
    let response = client.embed(request.clone()).await.unwrap().into_inner();
    for (prompt, found) in prompts.iter().zip(&response.embeddings) {
        same(&found.values, &projected(prompt, 3));
        assert_eq!(found.cached_tokens, 0);
    }
    request.dimensions = Some(2);
    let response = client.embed(request.clone()).await.unwrap().into_inner();
    same(&response.embeddings[3].values, &projected(&prompts[3], 2));
    request.dimensions = Some(4);
    let status = client.embed(request.clone()).await.unwrap_err();
    assert!(status.message().contains("dimensions is 4, must be from 1 to 3"), "{status}");
    request.dimensions = None;
    request.inputs = vec![tokens(&[7; 65])];
    let status = client.embed(request).await.unwrap_err();
    assert!(status.message().contains("65 prompt tokens and 0 to generate exceed the context of 64"), "{status}");

    let mut router = contract::vllm_engine_client::VllmEngineClient::new(served.channel().await);
    let tokenized = || Some(contract::TokenizedInput { original_text: String::new(), input_ids: vec![5, 6] });
    let request = contract::EmbedRequest { request_id: "a".to_owned(), tokenized: tokenized() };
    let response = router.embed(request).await.unwrap().into_inner();
    assert_eq!(response.embedding_dim, 3);

    // Nothing is generated.
    const ONLY: &str = "the model gives embeddings only: its attention is not causal";
    let status = client.generate(token_request("alpha", &[1, 2], 3)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains(ONLY), "{status}");
    let request = contract::GenerateRequest {
        request_id: "b".to_owned(),
        input: Some(contract::generate_request::Input::Tokenized(tokenized().unwrap())),
        ..Default::default()
    };
    let status = router.generate(request).await.unwrap_err();
    assert!(status.message().contains(ONLY), "{status}");
    let listed = client.list_models(proto::ListModelsRequest {}).await.unwrap().into_inner();
    assert!(listed.models[0].embeddings_only);
    assert_eq!(served.host.unfinished(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_not_causal_refuses_completions_over_http() {
    let served = serve_models(vec![both_sides()], Options::default()).await;
    let chat = json!({"model": "alpha", "messages": [{"role": "user", "content": "hi"}]});
    let text = json!({"model": "alpha", "prompt": "hi", "stream": true});
    let input = json!({"model": "alpha", "input": "hi"});
    for (path, body) in [("/v1/chat/completions", &chat), ("/v1/completions", &text), ("/v1/responses", &input)] {
        let error = post(served.http, path, body).await.error(400);
        assert!(error["message"].as_str().unwrap().contains("gives embeddings only"), "{path}: {error}");
    }
    let answer = post(served.http, "/v1/embeddings", &input).await;
    assert_eq!(answer.json()["data"][0]["embedding"].as_array().unwrap().len(), 3);
}

/// Goal: the routers' contract has the model's own pooling, and says that the model does not generate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_routers_contract_embeds_token_ids() {
    let mean = |embedding: &mut Embedding| {
        (embedding.pooling, embedding.normalize, embedding.declared) = (Pooling::Mean, false, true)
    };
    let served = serve_models(vec![embedding_model(2, mean)], Options::default()).await;
    let mut client = contract::vllm_engine_client::VllmEngineClient::new(served.channel().await);
    let info = client.get_model_info(contract::GetModelInfoRequest {}).await.unwrap().into_inner();
    assert!(!info.is_generation);
    let tokenized = contract::TokenizedInput { original_text: String::new(), input_ids: vec![5, 6] };
    let request = contract::EmbedRequest { request_id: "a".to_owned(), tokenized: Some(tokenized) };
    let response = client.embed(request).await.unwrap().into_inner();
    let states = [hidden([5].into_iter()), hidden([5, 6].into_iter())];
    let mean: Vec<f32> = (0..4).map(|i| (states[0][i] + states[1][i]) / 2.0).collect();
    assert_eq!((response.embedding, response.prompt_tokens, response.embedding_dim), (mean, 2, 4));
    let error = client.embed(contract::EmbedRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_aborted_or_whose_caller_leaves_frees_its_places() {
    let mut device = fake(Duration::from_millis(50), b"x");
    device.capacity.prefill_chunk = 16;
    let served =
        serve_models(vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 8)], Options::default()).await;
    let inputs: Vec<_> = (0..30).map(|i| tokens(&[i; 64])).collect();
    let request = proto::EmbedRequest { request_id: "long".to_owned(), inputs, ..Default::default() };
    let (mut client, mut other) = (served.client().await, served.client().await);
    let running = {
        let request = request.clone();
        tokio::spawn(async move { client.embed(request).await })
    };
    let busy = async || {
        while served.host.unfinished() == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await
        }
    };
    tokio::time::timeout(Duration::from_secs(10), busy()).await.expect("it runs");
    other.abort(proto::AbortRequest { request_id: "long".to_owned() }).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap_err().code(), Code::Cancelled);
    let free = async || {
        while served.host.unfinished() > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await
        }
    };
    tokio::time::timeout(Duration::from_secs(10), free()).await.expect("nothing runs on");
    let mut client = served.client().await;
    let left = tokio::time::timeout(Duration::from_millis(200), client.embed(request)).await;
    assert!(left.is_err(), "it takes seconds");
    tokio::time::timeout(Duration::from_secs(10), free()).await.expect("nothing runs on for nobody");
    let late = {
        let mut late =
            tonic::Request::new(proto::EmbedRequest { inputs: vec![tokens(&[1; 640])], ..Default::default() });
        late.set_timeout(Duration::from_millis(120));
        client.embed(late).await.unwrap_err()
    };
    assert!(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), "{late}");
    tokio::time::timeout(Duration::from_secs(10), free()).await.expect("nothing runs on too late");
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vectors_come_over_http_as_openai_has_them() {
    let served = server(tokenizer(true), "x").await;
    let ask = async |body: Value| post(served.http, "/v1/embeddings", &body).await;
    let one = ask(json!({"model": "alpha", "input": "hello"})).await.json();
    assert_eq!((&one["object"], &one["model"]), (&json!("list"), &json!("alpha")));
    assert_eq!(one["usage"], json!({"prompt_tokens": 5, "total_tokens": 5}));
    assert_eq!((&one["data"][0]["object"], &one["data"][0]["index"]), (&json!("embedding"), &json!(0)));
    assert_eq!(floats(&one["data"][0]["embedding"]), vector(&ids("hello"), 4, true));
    let several =
        ask(json!({"input": ["a", [1, 2], "hello"], "encoding_format": "float", "dimensions": 2})).await.json();
    let found: Vec<Vec<f32>> = (0..3).map(|index| floats(&several["data"][index]["embedding"])).collect();
    assert_eq!(found, [vector(&[97], 2, true), vector(&[1, 2], 2, true), vector(&ids("hello"), 2, true)]);
    assert_eq!(several["usage"]["total_tokens"], 8);
    let ids_alone = ask(json!({"input": [1, 2]})).await.json();
    assert_eq!(floats(&ids_alone["data"][0]["embedding"]), vector(&[1, 2], 4, true));
    let base64 = ask(json!({"input": "hello", "encoding_format": "base64", "normalize": false})).await.json();
    let bytes = BASE64_STANDARD.decode(base64["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert_eq!(values, vector(&ids("hello"), 4, false));
    let cut = ask(json!({"input": "hello", "truncate_prompt_tokens": 2})).await.json();
    assert_eq!(floats(&cut["data"][0]["embedding"]), vector(&ids("lo"), 4, true));

    for (body, param, message) in [
        (json!({}), "input", "a text, token ids, or a list of those"),
        (json!({"input": []}), "input", "not empty"),
        (json!({"input": ["a", 1]}), "input[1]", "a text or token ids"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format", "\"float\" or \"base64\""),
        (json!({"input": "a", "dimensions": 0}), "dimensions", "from 1 to 4"),
        (json!({"input": "a", "prompt_name": "query"}), "prompt_name", "the model has none"),
        (json!({"input": "a", "messages": [{}]}), "messages", "not served"),
    ] {
        let error = ask(body).await.error(400);
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
    let long = ask(json!({"input": ["a", "x".repeat(4097)]})).await.error(400);
    assert_eq!(long["code"], "context_length_exceeded");
    assert_eq!(ask(json!({"model": "beta", "input": "a"})).await.error(404)["code"], "model_not_found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_are_ordered_by_the_cosines_of_an_embedding_model() {
    let served =
        serve_models(vec![embedding_model(4, |embedding| embedding.declared = true)], Options::default()).await;
    let documents = ["one", "two", "three", "four"];
    let cosine = |a: &str, b: &str| -> f64 {
        let (a, b) = (vector(&ids(a), 4, true), vector(&ids(b), 4, true));
        a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let mut wanted: Vec<(usize, f64)> =
        documents.iter().map(|document| cosine("query", document)).enumerate().collect();
    let scores = post(served.http, "/v1/score", &json!({"text_1": "query", "text_2": documents})).await.json();
    for (index, score) in &wanted {
        assert_eq!(scores["data"][*index]["score"], *score);
    }
    assert_eq!(scores["usage"]["prompt_tokens"], 5 + 3 + 3 + 5 + 4, "the query counts once");
    wanted.sort_by(|a, b| b.1.total_cmp(&a.1));
    for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
        let body = json!({"model": "alpha", "query": "query", "documents": documents, "top_n": 3});
        let ranked = post(served.http, path, &body).await.json();
        let results = ranked["results"].as_array().unwrap();
        assert_eq!(results.len(), 3);
        for (result, (index, score)) in results.iter().zip(&wanted) {
            let text = documents[*index];
            assert_eq!(*result, json!({"index": index, "relevance_score": score, "document": {"text": text}}));
        }
    }
    let plain = json!({"query": "query", "documents": [{"text": "one"}], "return_documents": false});
    let plain = post(served.http, "/v1/rerank", &plain).await.json();
    assert_eq!(plain["results"], json!([{"index": 0, "relevance_score": cosine("query", "one")}]));
    let pairs = json!({"queries": ["a", "b"], "documents": ["c", "d"]});
    let pairs = post(served.http, "/score", &pairs).await.json();
    assert_eq!(
        (&pairs["data"][0]["score"], &pairs["data"][1]["score"]),
        (&json!(cosine("a", "c")), &json!(cosine("b", "d")))
    );
    let uneven = post(served.http, "/v1/score", &json!({"text_1": ["a", "b"], "text_2": ["c"]})).await.error(400);
    assert_eq!(
        (&uneven["param"], &uneven["message"]),
        (&json!("text_1"), &json!("text_1 is 2, must be one text, or as many as text_2, which is 1"))
    );
    assert_eq!(post(served.http, "/v1/rerank", &json!({"documents": ["a"]})).await.error(400)["param"], "query");
}

/// Goal: a reranker is given each pair in its template, and its answer counts: the fake draws one of the two tokens and
/// says that it has the probability exp(-0.5).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reranker_answers_each_pair() {
    let template = "{% for m in messages %}{% if m.role == 'query' %}Q{{ m.content }}{% elif m.role == 'document' %}D{{ m.content }}{% else %}T{{ m.content }}{% endif %}{% endfor %}?";
    let reranker = |text| {
        let mut device = fake(FAST, b"");
        device.capacity.slots = 4;
        let mut model = model("alpha", Some(text), vec![(0, device)], 8);
        model.info.embedding.answers = Some([70, 80]);
        model
    };
    let served = serve_models(vec![reranker(tokenizer_of(Some(template)))], Options::default()).await;
    let documents: Vec<String> = (0..12).map(|i| format!("document {i}")).collect();
    let body = json!({"text_1": "query", "text_2": documents, "instruction": "task"});
    let scores = post(served.http, "/v1/score", &body).await.json();
    let found: Vec<f64> =
        scores["data"].as_array().unwrap().iter().map(|entry| entry["score"].as_f64().unwrap()).collect();
    let yes = f64::from(-0.5f32).exp();
    assert!(found.iter().all(|score| *score == 0.0 || *score == yes), "{found:?}");
    assert!(found.contains(&0.0) && found.contains(&yes), "both answers occur: {found:?}");
    let tokens: usize = documents.iter().map(|document| "TtaskQqueryD?".len() + document.len()).sum();
    assert_eq!(scores["usage"]["prompt_tokens"], tokens, "as the template has the pairs");
    let ranked =
        post(served.http, "/v1/rerank", &json!({"query": "query", "documents": documents, "instruction": "task"}))
            .await
            .json();
    let order: Vec<f64> = ranked["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| result["relevance_score"].as_f64().unwrap())
        .collect();
    assert!(order.is_sorted_by(|a, b| a >= b), "{order:?}");
    // A model whose files and template say nothing of pairs, and whose tokenizer has no such answers.
    let plain = server(tokenizer(true), "x").await;
    let error = post(plain.http, "/v1/rerank", &json!({"query": "a", "documents": ["b"]})).await.error(400);
    assert!(error["message"].as_str().unwrap().contains("no tokens \"yes\" and \"no\""), "{error}");
}

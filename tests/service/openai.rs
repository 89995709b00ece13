//! Tests of OpenAI's API over HTTP, with a real HTTP client against fake devices: the shapes of answers and of streams,
//! tools, reasoning and constraints, refusals in OpenAI's form, and that tokens, limits and counts are those of gRPC.

use crate::serving::certificates::Authority;
use crate::serving::{
    END, Served, fake, model, sentencepiece, serve_models, text_request, tokenizer, tokenizer_of, tokenizer_with,
};
use axum::body::{Body, to_bytes};
use http_body::Body as _;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use ostinato::config::TlsConfig;
use ostinato::engine::fake::FakeConfig;
use ostinato::model::text::Text;
use ostinato::service::auth::Tokens;
use ostinato::service::proto::ostinato_client::OstinatoClient;
use ostinato::service::server::Options;
use ostinato::service::tls::Tls;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::pem::PemObject;

/// A template with tools and reasoning, whose prompts leave the reasoning to the model.
const TEMPLATE: &str = "{% if tools %}<tool_call>{\"name\": x, \"arguments\": y}{{ tools | tojson }}{% endif %}\
    {% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\
    {% endfor %}[assistant]{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}";

/// An answer.
pub struct Answer {
    status: u16,
    headers: http::HeaderMap,
    body: String,
}

impl Answer {
    #[track_caller]
    pub fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        serde_json::from_str(&self.body).expect("JSON")
    }

    /// The error of a refusal with this status.
    #[track_caller]
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        let error = serde_json::from_str::<Value>(&self.body).expect("JSON")["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.body);
        assert!(error.get("param").is_some() && error.get("code").is_some(), "{}", self.body);
        error
    }

    /// The events of a stream; the last one must be `[DONE]` and is left out.
    #[track_caller]
    fn events(&self) -> Vec<Value> {
        assert_eq!((self.status, &self.headers["content-type"]), (200, &"text/event-stream".parse().unwrap()));
        let mut events: Vec<&str> = self.body.split("\n\n").filter(|event| !event.is_empty()).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(event.strip_prefix("data: ").expect("data")).unwrap()).collect()
    }
}

async fn connect(at: SocketAddr) -> http1::SendRequest<Body> {
    let stream = TcpStream::connect(at).await.unwrap();
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Sends a request on a new connection and reads the whole answer.
async fn send(at: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Body>) -> Answer {
    let mut sender = connect(at).await;
    let mut request = http::Request::builder().method(method).uri(path).header("host", at.to_string());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = sender.send_request(request.body(body.into()).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(Body::new(body), 1 << 26).await.unwrap();
    Answer { status: parts.status.as_u16(), headers: parts.headers, body: String::from_utf8(bytes.to_vec()).unwrap() }
}

pub async fn post(at: SocketAddr, path: &str, body: &Value) -> Answer {
    send(at, "POST", path, &[("content-type", "application/json")], body.to_string()).await
}

async fn chat(at: SocketAddr, body: Value) -> Answer {
    post(at, "/v1/chat/completions", &body).await
}

/// A server of one model whose outputs repeat `script`; an empty script draws what a constraint allows.
pub async fn server(text: Text, script: &str) -> Served {
    let device = fake(Duration::from_micros(200), script.as_bytes());
    serve_models(vec![model("alpha", Some(text), vec![(0, device)], 64)], Options::default()).await
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// The deltas of choice 0 put together: content, reasoning, and calls by index.
fn joined(events: &[Value]) -> (String, String, Vec<Value>) {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::<Value>::new());
    for delta in events.iter().flat_map(|event| event["choices"].as_array().unwrap()).map(|choice| &choice["delta"]) {
        content.push_str(delta["content"].as_str().unwrap_or(""));
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or(""));
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if call["id"].is_string() {
                assert_eq!(index, calls.len());
                calls.push(call.clone());
            } else {
                let more = call["function"]["arguments"].as_str().unwrap();
                let so_far = calls[index]["function"]["arguments"].as_str().unwrap().to_owned();
                calls[index]["function"]["arguments"] = json!(so_far + more);
            }
        }
    }
    (content, reasoning, calls)
}

#[tokio::test]
async fn a_chat_is_answered_whole_and_as_a_stream() {
    let served = server(tokenizer(true), "Hello").await;
    let asked = json!({"model": "alpha", "messages": user("hi"), "max_tokens": 7, "unknown_field": [1]});
    let answer = chat(served.http, asked.clone()).await;
    let id = answer.headers["x-request-id"].to_str().unwrap().to_owned();
    let whole = answer.json();
    assert_eq!(whole["id"], json!(id));
    assert!(id.starts_with("chatcmpl-"), "{id}");
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!("alpha")));
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["content"], "HelloHe");
    assert_eq!((&choice["message"]["role"], &choice["finish_reason"]), (&json!("assistant"), &json!("length")));
    assert_eq!(choice["logprobs"], Value::Null);
    let prompt = "[user]hi[assistant]".len();
    let usage = json!({
        "prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    });
    assert_eq!(whole["usage"], usage);

    let mut asked = asked;
    asked["stream"] = json!(true);
    let events = chat(served.http, asked.clone()).await.events();
    assert_eq!(joined(&events).0, "HelloHe");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk" && event["id"] == events[0]["id"]));
    assert!(events.iter().all(|event| event.get("usage").is_none()), "nobody asked for the usage");
    let finishes: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
    assert_eq!(finishes.last(), Some(&&json!("length")));
    assert!(finishes[..finishes.len() - 1].iter().all(|finish| finish.is_null()));

    asked["stream_options"] = json!({"include_usage": true});
    let events = chat(served.http, asked).await.events();
    let (last, others) = events.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(7)));
    assert!(others.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
    served.idle("alpha/0", Duration::from_secs(5)).await;
}

#[tokio::test]
async fn contents_are_texts_parts_or_null_and_media_are_refused_by_name() {
    let served = server(tokenizer(true), "ok").await;
    let ask = async |messages: Value| chat(served.http, json!({"messages": messages, "max_tokens": 2})).await;
    let parts = json!([
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "tool_calls": []},
    ]);
    let usage = ask(parts).await.json()["usage"]["prompt_tokens"].clone();
    assert_eq!(usage, json!("[system]be[user]a\nb[assistant][assistant]".len()));
    for (messages, param) in [
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0].type",
        ),
        (json!([{"role": "user", "content": null}]), "messages[0].content"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": 5, "content": "x"}]), "messages[0].role"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
        (json!(["x"]), "messages[0]"),
        (json!("x"), "messages"),
        (json!([]), "messages"),
        (Value::Null, "messages"),
    ] {
        assert_eq!(ask(messages).await.error(400)["param"], param);
    }
    let error = ask(json!([])).await.error(400);
    assert_eq!(error["message"], "messages is empty, must be at least one message");
    let asked = json!({"messages": user("x"), "modalities": ["audio"]});
    assert_eq!(chat(served.http, asked).await.error(400)["param"], "modalities");
    let error = chat(served.http, json!([])).await.error(400);
    assert_eq!((&error["param"], &error["message"]), (&Value::Null, &json!("the body is a list, must be an object")));
    let error = chat(served.http, json!({"messages": user("x"), "tool_choice": "required"})).await.error(400);
    assert!(error["param"] == "tools" && error["message"].as_str().unwrap().contains("tools is missing"), "{error}");
}

#[tokio::test]
async fn wrong_types_and_values_are_refused_by_name_and_others_ignored() {
    let served = server(tokenizer(true), "ok").await;
    for (path, prompt) in [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")] {
        for (field, value) in [
            ("temperature", json!("hot")),
            ("temperature", json!(-1)),
            ("top_p", json!([])),
            ("top_p", json!(2)),
            ("top_k", json!(1.5)),
            ("n", json!(0)),
            ("n", json!("2")),
            ("n", json!(65)),
            ("max_tokens", json!(-5)),
            ("seed", json!("x")),
            ("stop", json!(5)),
            ("stop", json!(["a", 5])),
            ("stop", json!(vec!["a"; 17])),
            ("stream", json!("yes")),
            ("stream_options", json!(5)),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"5": 101})),
            ("presence_penalty", json!(3)),
            ("response_format", json!("json")),
            ("response_format", json!({"type": "yaml"})),
            ("stop_token_ids", json!(["x"])),
            ("model", json!(5)),
            ("suffix", json!("x")),
            ("use_beam_search", json!(true)),
            ("best_of", json!(3)),
        ] {
            let mut body = json!({"max_tokens": 2, "seed": 1});
            body[prompt] = if prompt == "messages" { user("x") } else { json!("x") };
            body[field] = value.clone();
            let error = post(served.http, path, &body).await.error(400);
            let param = error["param"].as_str().unwrap_or_default();
            assert!(param.starts_with(field), "{field} = {value}: {error}");
        }
        let mut body =
            json!({"max_tokens": 2, "n": 1, "user": "me", "metadata": {"a": 1}, "store": false, "stop": null});
        body[prompt] = if prompt == "messages" { user("x") } else { json!("x") };
        post(served.http, path, &body).await.json();
    }
    // Nothing was left behind, and every refusal was counted.
    served.idle("alpha/0", Duration::from_secs(5)).await;
}

/// Goal: fields that clients send without effect on the output are accepted, and change nothing. Method: a request as
/// the clients of several projects write it, field by field, must have the answer of the plain one.
#[tokio::test]
async fn what_clients_send_beside_is_taken_and_changes_nothing() {
    let served = server(tokenizer_of(Some(TEMPLATE)), "Hello").await;
    let with = |plain: &Value, more: &Value| {
        let mut asked = plain.clone();
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        asked
    };
    let plain = json!({"messages": user("hi"), "max_tokens": 6});
    let text = chat(served.http, plain.clone()).await.json()["choices"][0]["message"]["content"].clone();
    assert_eq!(text, "HelloH");
    let nulls = json!({
        "stream": null, "stop": null, "tools": null, "tool_choice": null, "response_format": null, "logprobs": null,
        "top_logprobs": null, "n": null, "seed": null, "logit_bias": null, "presence_penalty": null, "top_p": null,
        "frequency_penalty": null, "stream_options": null, "user": null, "metadata": null, "temperature": null,
        "parallel_tool_calls": null, "max_completion_tokens": null, "functions": null, "function_call": null,
        "modalities": null, "audio": null, "prediction": null, "reasoning_effort": null, "service_tier": null,
        "store": null, "web_search_options": null, "suffix": null, "model": null,
    });
    for more in [
        nulls.clone(),
        json!({"max_tokens": null, "max_completion_tokens": 6}),
        json!({"user": "u", "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "safety_identifier": "x"}),
        json!({"parallel_tool_calls": true, "tools": [], "tool_choice": "none", "verbosity": "low"}),
        json!({"tools": [], "tool_choice": "auto", "functions": []}),
        json!({"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}),
        json!({"reasoning_effort": "low", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}),
        json!({"n": 1.0, "max_tokens": 6.0, "seed": -1, "logit_bias": {}, "logprobs": false, "top_logprobs": 0}),
        json!({"stop": [], "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0}),
        json!({"best_of": 1, "echo": false, "use_beam_search": false, "length_penalty": 1.0, "early_stopping": false}),
        json!({"stream_options": {"include_usage": true}, "add_generation_prompt": true, "continue_final_message": false}),
        json!({"options": {"num_ctx": 2048}, "keep_alive": "5m", "think": false, "guided_json": null, "bad_words": []}),
        json!({"stream": false, "request_id": "r", "chat_template": null, "documents": null, "add_special_tokens": false}),
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]}),
        json!({"messages": [{"role": "user", "name": "bob", "content": "hi"}]}),
    ] {
        let answer = chat(served.http, with(&plain, &more)).await.json();
        assert_eq!(answer["choices"][0]["message"]["content"], text, "{more}");
    }
    for messages in [
        json!([{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]),
        json!([{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, {"role": "user", "content": "hi"}]),
        // An answer as this server or another one gave it.
        json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes", "refusal": null, "audio": null, "function_call": null,
             "tool_calls": [], "annotations": [], "reasoning_content": "so"},
            {"role": "user", "content": ""},
        ]),
    ] {
        let answer = chat(served.http, with(&plain, &json!({"messages": messages}))).await.json();
        assert_eq!(answer["choices"][0]["message"]["content"], text, "{messages}");
    }
    let plain = json!({"prompt": "hi", "max_tokens": 6});
    for more in [nulls.clone(), json!({"suffix": "", "best_of": 1, "logprobs": null, "echo": null})] {
        let answer = post(served.http, "/v1/completions", &with(&plain, &more)).await.json();
        assert_eq!(answer["choices"][0]["text"], text, "{more}");
    }
    let plain = json!({"input": "hi", "max_output_tokens": 6});
    for more in [
        json!({"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}, "verbosity": "medium"}}),
        json!({"reasoning": null, "truncation": null, "include": [], "background": false, "conversation": null}),
        json!({"previous_response_id": null, "max_tool_calls": null, "prompt": null, "store": false, "metadata": {}}),
        json!({"reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled", "parallel_tool_calls": true}),
        json!({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}),
        json!({"input": [{"role": "user", "content": "hi"}, {"type": "reasoning", "id": "r", "summary": []}]}),
    ] {
        let answer = post(served.http, "/v1/responses", &with(&plain, &more)).await.json();
        assert_eq!(answer["output"][0]["content"][0]["text"], text, "{more}: {answer}");
    }
}

#[tokio::test]
async fn completions_take_texts_tokens_and_lists_and_echo_them() {
    let served = server(tokenizer(true), "abc").await;
    let ask = async |body: Value| post(served.http, "/v1/completions", &body).await;
    let whole = ask(json!({"prompt": "xy", "max_tokens": 4, "echo": true, "logprobs": 1})).await.json();
    assert_eq!(whole["object"], "text_completion");
    let choice = &whole["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("xyabca"), &json!("length")));
    let lists = &choice["logprobs"];
    assert_eq!(lists["tokens"], json!(["x", "y", "a", "b", "c", "a"]));
    assert_eq!(lists["text_offset"], json!([0, 1, 2, 3, 4, 5]));
    assert_eq!(lists["token_logprobs"][0], Value::Null);
    assert!(lists["token_logprobs"].as_array().unwrap()[1..].iter().all(Value::is_number), "{lists}");
    assert!(lists["top_logprobs"][2].get("a").is_some());

    // Several prompts and samples: choices in the order of the prompts.
    let whole = ask(json!({"prompt": ["p", "q"], "n": 2, "max_tokens": 3, "echo": true, "seed": 1})).await.json();
    let texts: Vec<&Value> = whole["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["pabc", "pabc", "qabc", "qabc"]);
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    let whole = ask(json!({"prompt": [120, 121], "max_tokens": 3})).await.json();
    assert_eq!((&whole["choices"][0]["text"], &whole["usage"]["prompt_tokens"]), (&json!("abc"), &json!(2)));
    let whole = ask(json!({"prompt": [[120], [121, 122]], "max_tokens": 1, "echo": true})).await.json();
    assert_eq!((&whole["choices"][0]["text"], &whole["choices"][1]["text"]), (&json!("xa"), &json!("yza")));

    // Only the prompt's probabilities.
    let whole = ask(json!({"prompt": "xyz", "max_tokens": 0, "echo": true, "logprobs": 0})).await.json();
    assert_eq!((&whole["choices"][0]["text"], &whole["usage"]["completion_tokens"]), (&json!("xyz"), &json!(0)));
    assert_eq!(whole["choices"][0]["logprobs"]["tokens"], json!(["x", "y", "z"]));

    // As a stream, with a stop text; 16 tokens unless more are asked for.
    let asked = json!({"prompt": "xy", "stream": true, "echo": true, "stop": "ca", "logprobs": 0});
    let events = ask(asked).await.events();
    let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, "xyab");
    let last = events.last().unwrap()["choices"][0].clone();
    assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&json!("stop"), &json!("ca")));
    let whole = ask(json!({"prompt": "x"})).await.json();
    assert_eq!(whole["usage"]["completion_tokens"], 16);
    for prompt in [json!([]), json!([5, "x"]), json!([["x"]]), json!({}), json!([{}]), json!(vec!["x"; 65])] {
        let error = ask(json!({"prompt": prompt})).await.error(400);
        assert!(error["param"].as_str().unwrap().starts_with("prompt"), "{error}");
    }
    served.idle("alpha/0", Duration::from_secs(5)).await;
}

/// Goal: the space of the first token after a prompt is part of a completion, whichever form the prompt has. Method: a
/// tokenizer whose decoder removes the first space of a text, as those of SentencePiece do. The device repeats " ab b".
#[tokio::test]
async fn completions_keep_the_space_that_they_begin_with() {
    let device = FakeConfig { script: vec![4, 3, 5], ..fake(Duration::from_micros(200), &[]) };
    let served =
        serve_models(vec![model("alpha", Some(sentencepiece()), vec![(0, device)], 8)], Options::default()).await;
    let ask = async |body: Value| post(served.http, "/v1/completions", &body).await;
    for (prompt, shown) in [(json!("a b"), "a b"), (json!([1, 4, 5]), "<s> a b"), (json!([[4, 5]]), "a b")] {
        let body = json!({"prompt": prompt, "max_tokens": 6, "logprobs": 0});
        let whole = ask(body.clone()).await.json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["text"], " ab b ab b", "{prompt}");
        assert_eq!(choice["logprobs"]["tokens"], json!([" a", "b", " b", " a", "b", " b"]), "{prompt}");
        assert_eq!(choice["logprobs"]["text_offset"], json!([0, 2, 3, 5, 7, 8]), "{prompt}");
        let with = |field: &str, value: Value| {
            let mut body = body.clone();
            body[field] = value;
            body
        };
        let events = ask(with("stream", true.into())).await.events();
        let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, " ab b ab b", "{prompt}");
        let echoed = ask(with("echo", true.into())).await.json();
        assert_eq!(echoed["choices"][0]["text"], format!("{shown} ab b ab b"), "{prompt}");
        let stopped = ask(with("stop", " a".into())).await.json();
        let choice = &stopped["choices"][0];
        assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!(""), &json!(" a")), "{prompt}");
    }
    // No text precedes the output, and decoders remove the space of a text's first token.
    let whole = ask(json!({"prompt": [1], "max_tokens": 3})).await.json();
    assert_eq!(whole["choices"][0]["text"], "ab b");
}

#[tokio::test]
async fn chats_have_log_probabilities_with_text_and_bytes() {
    let served = server(tokenizer(true), "é").await;
    let asked = json!({"messages": user("x"), "max_tokens": 2, "logprobs": true, "top_logprobs": 2, "n": 2, "seed": 3});
    let whole = chat(served.http, asked.clone()).await.json();
    for choice in whole["choices"].as_array().unwrap() {
        assert_eq!(choice["message"]["content"], "é");
        let content = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!((&content[0]["bytes"], &content[1]["bytes"]), (&json!([0xc3]), &json!([0xa9])));
        assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    }
    let mut asked = asked;
    asked["stream"] = json!(true);
    let events = chat(served.http, asked).await.events();
    let tokens = |index: u64| -> usize {
        let of = events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        of.filter_map(|choice| choice["logprobs"]["content"].as_array()).map(Vec::len).sum()
    };
    assert_eq!((tokens(0), tokens(1)), (2, 2));
    let error = chat(served.http, json!({"messages": user("x"), "top_logprobs": 2})).await.error(400);
    assert_eq!(error["param"], "top_logprobs");
    let error =
        chat(served.http, json!({"messages": user("x"), "logprobs": true, "top_logprobs": 21})).await.error(400);
    assert_eq!(error["param"], "top_logprobs");
}

fn tools() -> Value {
    let parameters = json!({
        "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": false,
    });
    json!([
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}},
        {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
    ])
}

#[tokio::test]
async fn calls_of_tools_and_reasoning_are_told_apart() {
    let output = "<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n\
        </tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
    let served = server(tokenizer_of(Some(TEMPLATE)), output).await;
    let asked = json!({"messages": user("x"), "tools": tools(), "max_tokens": output.len()});
    let whole = chat(served.http, asked.clone()).await.json();
    let message = &whole["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm"), &json!("Let me see.")));
    let functions: Vec<&Value> =
        message["tool_calls"].as_array().unwrap().iter().map(|call| &call["function"]).collect();
    let rome = json!({"name": "weather", "arguments": "{\"city\": \"Rome\"}"});
    assert_eq!(functions, [&rome, &json!({"name": "time", "arguments": "{}"})]);
    let ids: Vec<&str> = message["tool_calls"].as_array().unwrap().iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.starts_with("call_")), "{ids:?}");

    let mut streamed = asked.clone();
    streamed["stream"] = json!(true);
    let events = chat(served.http, streamed).await.events();
    let (content, reasoning, calls) = joined(&events);
    assert_eq!((content.as_str(), reasoning.as_str(), calls.len()), ("Let me see.", "hm", 2));
    assert_eq!(calls[0]["function"], rome);

    // Without parallel calls there is one; without tools the text is what it is.
    let mut one = asked.clone();
    one["parallel_tool_calls"] = json!(false);
    let whole = chat(served.http, one).await.json();
    assert_eq!(whole["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    let mut none = asked.clone();
    none["tool_choice"] = json!("none");
    let whole = chat(served.http, none).await.json();
    assert!(whole["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"));
    assert!(whole["choices"][0]["message"].get("tool_calls").is_none());
    // The prompt may end the reasoning.
    let mut closed = asked.clone();
    closed["chat_template_kwargs"] = json!({"enable_thinking": false});
    let whole = chat(served.http, closed).await.json();
    assert!(whole["choices"][0]["message"]["content"].as_str().unwrap().starts_with("<think>"));
    let mut hidden = asked;
    hidden["include_reasoning"] = json!(false);
    let whole = chat(served.http, hidden).await.json();
    assert!(whole["choices"][0]["message"].get("reasoning_content").is_none());
}

#[tokio::test]
async fn an_output_that_ends_with_a_call_says_so() {
    let call = "<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>";
    let mut device = fake(Duration::from_micros(200), call.as_bytes());
    device.script.push(END);
    let text = tokenizer_of(Some(TEMPLATE));
    let served = serve_models(vec![model("alpha", Some(text), vec![(0, device)], 64)], Options::default()).await;
    let whole = chat(served.http, json!({"messages": user("x"), "tools": tools()})).await.json();
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(whole["choices"][0]["message"]["content"], Value::Null);
}

#[tokio::test]
async fn required_and_named_calls_are_forced() {
    let served = server(tokenizer_of(Some(TEMPLATE)), "").await;
    let ask = async |choice: Value, seed: u32| {
        let asked = json!({
            "messages": user("x"), "tools": tools(), "tool_choice": choice, "seed": seed, "max_tokens": 2000,
            "temperature": 1, "parallel_tool_calls": false, "enable_thinking": false,
        });
        let whole = chat(served.http, asked).await.json();
        let calls =
            whole["choices"][0]["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{whole}")).clone();
        assert_eq!((calls.len(), &whole["choices"][0]["finish_reason"]), (1, &json!("tool_calls")), "{whole}");
        let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        (calls[0]["function"]["name"].as_str().unwrap().to_owned(), arguments)
    };
    for seed in 0..4 {
        let named = json!({"type": "function", "function": {"name": "weather"}});
        let (name, arguments) = ask(named, seed).await;
        assert_eq!(name, "weather");
        assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");
        let (name, arguments) = ask(json!("required"), seed).await;
        assert!(["weather", "time"].contains(&name.as_str()), "{name}");
        // Arguments that the schema does not name are not invented.
        assert_eq!(arguments.as_object().unwrap().len(), usize::from(name == "weather"), "{arguments}");
    }
    for (choice, param) in [
        (json!({"type": "function", "function": {"name": "other"}}), "tool_choice"),
        (json!("maybe"), "tool_choice"),
        (json!(5), "tool_choice"),
    ] {
        let asked = json!({"messages": user("x"), "tools": tools(), "tool_choice": choice});
        assert_eq!(chat(served.http, asked).await.error(400)["param"], param);
    }
    // A model without tools refuses them.
    let plain = server(tokenizer(true), "x").await;
    let error = chat(plain.http, json!({"messages": user("x"), "tools": tools()})).await.error(400);
    assert_eq!(error["param"], "tools");
}

/// A model of a form of calls whose marks are special tokens.
struct Special {
    template: &'static str,
    /// The first one ends outputs.
    tokens: &'static [&'static str],
    /// The special token with which a call begins.
    mark: &'static str,
    /// An output of reasoning, "So." and a call of `weather` for Rome. It ends with the model's end.
    output: &'static str,
}

const SPECIAL: [Special; 12] = [
    Special {
        template: "{% if tools %}{{ tools | tojson }}functions{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <|channel|> <|message|> #}<|start|>assistant",
        tokens: &["<|call|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"],
        mark: "<|constrain|>",
        output: "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>\
            <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# [TOOL_CALLS] [ARGS] [THINK] [/THINK] #}",
        tokens: &["</s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
        mark: "[TOOL_CALLS]",
        output: "[THINK]hm[/THINK]So.[TOOL_CALLS]weather[ARGS]{\"city\": \"Rome\"}",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <tool_call> <arg_key> <arg_value> </think> #}",
        mark: "<tool_call>",
        tokens: &["<|user|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        output: "<think>hm</think>So.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <｜tool▁calls▁begin｜> <｜tool▁sep｜> </think> #}",
        mark: "<｜tool▁calls▁begin｜>",
        tokens: &[
            "<｜end▁of▁sentence｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
        output: "<think>hm</think>So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Rome\"}\
            <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <seed:tool_call> <function= </seed:think> #}",
        mark: "<seed:tool_call>",
        tokens: &["<seed:eos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"],
        output: "<seed:think>hm</seed:think>So.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n\
            </function>\n</seed:tool_call>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <minimax:tool_call> <invoke name= </think> #}",
        mark: "<minimax:tool_call>",
        tokens: &["[e~[", "<minimax:tool_call>", "</minimax:tool_call>"],
        output: "<think>hm</think>So.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Rome</parameter>\n\
            </invoke>\n</minimax:tool_call>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <|tool_call>call: <|\"|> <channel|> #}",
        mark: "<|tool_call>",
        tokens: &["<turn|>", "<|tool_call>", "<tool_call|>", "<|\"|>", "<|channel>", "<channel|>"],
        output: "<|channel>thought\nhm\n<channel|>So.<|tool_call>call:weather{city:<|\"|>Rome<|\"|>}<tool_call|>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <|tool_call_start|> </think> #}",
        mark: "<|tool_call_start|>",
        tokens: &["<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"],
        output: "<think>hm</think>So.<|tool_call_start|>[weather(city='Rome')]<|tool_call_end|>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <function_calls> </think> #}",
        mark: "<function_calls>",
        tokens: &["<|im_end|>", "<function_calls>", "</function_calls>"],
        output: "<think>hm</think>So.\n<function_calls>\nweather(city=\"Rome\")\n</function_calls>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <|tool_call|> <|/tool_call|> </think> #}",
        mark: "<|tool_call|>",
        tokens: &["<|end|>", "<|tool_call|>", "<|/tool_call|>"],
        output: "<think>hm</think>So.<|tool_call|>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}<|/tool_call|>",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <|tool_call|> </think> #}",
        mark: "<|tool_call|>",
        tokens: &["<|end_of_text|>", "<|tool_call|>"],
        output: "<think>hm</think>So.<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}]",
    },
    Special {
        template: "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
            {# <TOOLCALL> </TOOLCALL> </think> #}",
        mark: "<TOOLCALL>",
        tokens: &["<|im_end|>", "<TOOLCALL>", "</TOOLCALL>"],
        output: "<think>hm</think>So.<TOOLCALL>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}]</TOOLCALL>",
    },
];

impl Special {
    async fn server(&self, output: &str) -> Served {
        let text = tokenizer_with(Some(self.template), self.tokens);
        let mut device = fake(Duration::from_micros(200), &[]);
        if !output.is_empty() {
            device.script = text.encode(output, false).unwrap();
            device.script.push(END);
        }
        serve_models(vec![model("alpha", Some(text), vec![(0, device)], 64)], Options::default()).await
    }
}

#[tokio::test]
async fn marks_that_are_special_tokens_are_read_and_not_told() {
    for special in SPECIAL {
        let served = special.server(special.output).await;
        let asked = json!({"messages": user("x"), "tools": tools()});
        let whole = chat(served.http, asked.clone()).await.json();
        let message = &whole["choices"][0]["message"];
        assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm"), &json!("So.")), "{whole}");
        let rome = json!({"name": "weather", "arguments": "{\"city\": \"Rome\"}"});
        assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1, "{whole}");
        assert_eq!(
            (&message["tool_calls"][0]["function"], &whole["choices"][0]["finish_reason"]),
            (&rome, &json!("tool_calls"))
        );
        let mut streamed = asked;
        streamed["stream"] = json!(true);
        let (content, reasoning, calls) = joined(&chat(served.http, streamed).await.events());
        assert_eq!((content.as_str(), reasoning.as_str(), calls.len()), ("So.", "hm", 1));
        assert_eq!(calls[0]["function"], rome);
        // A completion is plain text, in which special tokens do not occur.
        let length = special.output.len();
        let whole = post(served.http, "/v1/completions", &json!({"prompt": "x", "max_tokens": length})).await.json();
        let text = whole["choices"][0]["text"].as_str().unwrap();
        assert!(special.tokens.iter().all(|token| !text.contains(token)) && text.contains("Rome"), "{text}");
    }
}

#[tokio::test]
async fn calls_are_forced_in_the_models_own_form() {
    for special in SPECIAL {
        let served = special.server("").await;
        let mut ended = 0;
        for seed in 0..12 {
            let asked = json!({
                "messages": user("x"), "tools": tools(), "tool_choice": "required", "seed": seed, "max_tokens": 600,
                "temperature": 1, "parallel_tool_calls": seed % 2 == 1, "logprobs": true,
            });
            let whole = chat(served.http, asked).await.json();
            let choice = &whole["choices"][0];
            if choice["finish_reason"] == "length" {
                // Its reasoning has not ended.
                continue;
            }
            ended += 1;
            let told = (&choice["finish_reason"], &choice["message"]["content"]);
            assert_eq!(told, (&json!("tool_calls"), &Value::Null), "{whole}");
            // The mark is the special token, not its letters.
            let drawn = choice["logprobs"]["content"].as_array().unwrap();
            assert!(drawn.iter().any(|token| token["token"] == special.mark), "{whole}");
            // A model that writes a list writes one for a single call too.
            let text: String = drawn.iter().filter_map(|token| token["token"].as_str()).collect();
            let list = format!("{}[{{", special.mark);
            assert_eq!(text.contains(&list), special.output.contains(&list), "{whole}");
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert!(calls.len() == 1 || seed % 2 == 1 && !calls.is_empty(), "{whole}");
            for call in calls {
                let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
                match call["function"]["name"].as_str().unwrap() {
                    "weather" => assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()), "{whole}"),
                    name => assert_eq!((name, arguments), ("time", json!({}))),
                }
            }
        }
        assert!(ended > 0, "no output with {} ended", special.mark);
    }
}

/// Goal: arguments with plain names follow their schemas when a call is forced, whichever of the optional ones are there.
#[tokio::test]
async fn forced_calls_with_plain_names_follow_the_schema() {
    let tool = json!({"type": "function", "function": {"name": "set", "parameters": {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"}, "level": {"type": "integer", "minimum": 0, "maximum": 9},
            "kind": {"enum": ["a", "b"]},
        },
    }}});
    let mut with_list = tool.clone();
    with_list["function"]["parameters"]["properties"]["list"] =
        json!({"type": "array", "items": {"type": "boolean"}, "maxItems": 2});
    let marks = ["<|tool_call>", "<|tool_call_start|>", "<function_calls>"];
    for special in SPECIAL.iter().filter(|special| marks.contains(&special.mark)) {
        // Between marks of texts, no format describes a list.
        let tool = if special.mark == "<|tool_call>" { &tool } else { &with_list };
        let served = special.server("").await;
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..30 {
            let asked = json!({
                "messages": user("x"), "tools": [tool], "tool_choice": "required", "seed": seed, "max_tokens": 600,
                "temperature": 1, "parallel_tool_calls": false,
            });
            let whole = chat(served.http, asked).await.json();
            let choice = &whole["choices"][0];
            if choice["finish_reason"] == "length" {
                // Its reasoning has not ended.
                continue;
            }
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("set")), "{whole}");
            let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
            for (name, value) in arguments.as_object().unwrap() {
                let right = match name.as_str() {
                    "on" => value.is_boolean(),
                    "level" => value.as_u64().is_some_and(|level| level < 10),
                    "kind" => value == "a" || value == "b",
                    "list" => value.as_array().is_some_and(|list| list.len() < 3 && list.iter().all(Value::is_boolean)),
                    _ => false,
                };
                assert!(right, "{whole}");
                seen.insert(name.clone());
            }
            seen.insert(arguments.as_object().unwrap().len().to_string());
        }
        // No argument, and one of those that need not be there.
        assert!(["0", "1"].iter().all(|expected| seen.contains(*expected)), "{}: {seen:?}", special.mark);
    }
}

#[tokio::test]
async fn a_format_holds_for_the_content_behind_channels_and_special_marks() {
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    for special in &SPECIAL[..2] {
        let served = special.server("").await;
        let mut ended = 0;
        for seed in 0..12 {
            let asked = json!({
                "messages": user("x"), "response_format": format, "seed": seed, "max_tokens": 600, "temperature": 1,
                "logprobs": true,
            });
            let whole = chat(served.http, asked).await.json();
            let choice = &whole["choices"][0];
            if choice["finish_reason"] == "length" {
                continue;
            }
            ended += 1;
            let content: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
            assert!(content["ok"].is_boolean(), "{whole}");
            let drawn = choice["logprobs"]["content"].as_array().unwrap();
            let on_channel = drawn.iter().any(|token| token["token"] == "<|channel|>");
            assert_eq!(on_channel, special.tokens.contains(&"<|channel|>"), "{whole}");
        }
        assert!(ended > 0, "no output with {} ended", special.mark);
    }
}

#[tokio::test]
async fn an_unknown_form_of_calls_is_content_and_cannot_be_forced() {
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}{# \"name\" \"parameters\" <|tool_call>other: #}\
        {% for m in messages %}{{ m.content }}{% endfor %}";
    let output = "<|tool_call>other:time{}<tool_call|>";
    let served = server(tokenizer_of(Some(template)), output).await;
    let mut asked = json!({"messages": user("x"), "tools": tools(), "max_tokens": output.len()});
    let whole = chat(served.http, asked.clone()).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], output);
    assert!(whole["choices"][0]["message"].get("tool_calls").is_none());
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "time"}})] {
        asked["tool_choice"] = choice;
        assert_eq!(chat(served.http, asked.clone()).await.error(400)["param"], "tool_choice");
    }
}

#[tokio::test]
async fn outputs_follow_response_formats_and_vllms_constraints() {
    let served = server(tokenizer_of(Some(TEMPLATE)), "").await;
    let schema = json!({
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false,
    });
    let ask = async |extra: Value| {
        let mut asked = json!({"messages": user("x"), "max_tokens": 800, "seed": 5});
        asked.as_object_mut().unwrap().append(&mut extra.as_object().unwrap().clone());
        let whole = chat(served.http, asked).await.json();
        assert_eq!(whole["choices"][0]["finish_reason"], "stop", "{whole}");
        whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let ok =
        |text: String| serde_json::from_str::<Value>(&text).unwrap_or_else(|_| panic!("{text}"))["ok"].is_boolean();
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    // With thinking switched off the constraint holds from the first token on, else behind the reasoning.
    let thinking = json!({"enable_thinking": false});
    assert!(ok(ask(json!({"response_format": format, "chat_template_kwargs": thinking})).await));
    assert!(ok(ask(json!({"guided_json": schema, "chat_template_kwargs": thinking})).await));
    let pick = json!({"structured_outputs": {"choice": ["red", "blue"]}, "chat_template_kwargs": thinking});
    assert!(["red", "blue"].contains(&ask(pick).await.as_str()));
    let digits = ask(json!({"guided_regex": "[0-9]{4}", "chat_template_kwargs": thinking})).await;
    assert!(digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit()), "{digits}");
    let grammar = json!({"guided_grammar": "root ::= \"a\" \"b\"", "enable_thinking": false});
    assert_eq!(ask(grammar).await, "ab");
    for format in [
        json!({"type": "regex", "regex": "ab"}),
        json!({"type": "regex", "pattern": "ab"}),
        json!({"type": "grammar", "grammar": "root ::= \"a\" \"b\""}),
    ] {
        assert_eq!(ask(json!({"response_format": format, "enable_thinking": false})).await, "ab", "{format}");
    }
    // With tools the answer is a call or conforms to the format.
    for seed in 0..4 {
        let asked = json!({
            "messages": user("x"), "response_format": format, "tools": tools(), "seed": seed, "max_tokens": 2000,
            "parallel_tool_calls": false, "enable_thinking": false, "temperature": 1,
        });
        let whole = chat(served.http, asked).await.json();
        let message = &whole["choices"][0]["message"];
        assert!(message["tool_calls"].is_array() || ok(message["content"].as_str().unwrap().to_owned()), "{whole}");
    }
    let asked = json!({"messages": user("x"), "response_format": format, "guided_regex": "a"});
    assert_eq!(chat(served.http, asked).await.error(400)["param"], "structured_outputs");
    for (field, value, param) in [
        ("guided_regex", json!("("), "guided_regex"),
        ("structured_outputs", json!({"regex": "("}), "structured_outputs.regex"),
        ("response_format", json!({"type": "regex", "regex": "("}), "response_format"),
        ("response_format", json!({"type": "regex"}), "response_format.regex"),
    ] {
        let asked = json!({"messages": user("x"), field: value});
        assert_eq!(chat(served.http, asked).await.error(400)["param"], param);
    }
}

/// Goal: a constraint holds behind the reasoning, and the reasoning is free. Method: devices that draw what a script
/// says; an output that its constraint does not allow fails.
#[tokio::test]
async fn constraints_begin_behind_the_reasoning() {
    for (script, thinking, reasoning) in [
        ("<think>\na 5\n</think>\n\n1234", Value::Null, json!("a 5")),
        ("1234", Value::Null, Value::Null),
        ("a </thin 5</think>1234", json!(true), json!("a </thin 5")),
        ("1234", json!(false), Value::Null),
    ] {
        let served = server(tokenizer_of(Some(TEMPLATE)), script).await;
        let mut asked = json!({"messages": user("x"), "guided_regex": "[0-9]{4}", "enable_thinking": thinking});
        let whole = chat(served.http, asked.clone()).await.json();
        let choice = &whole["choices"][0];
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!("1234"), &json!("stop")),
            "{script}"
        );
        assert_eq!(choice["message"].get("reasoning_content").unwrap_or(&Value::Null), &reasoning, "{script}");
        asked["guided_regex"] = json!("[5-9]{4}");
        let error = chat(served.http, asked).await.error(400);
        assert_eq!(error["type"], "invalid_request_error", "{error}");
    }
}

#[tokio::test]
async fn models_health_and_unknown_paths() {
    let served = server(tokenizer(true), "x").await;
    let get = async |path: &str| send(served.http, "GET", path, &[], Body::empty()).await;
    let list = get("/v1/models").await.json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("alpha")));
    assert_eq!(list["data"][0]["max_model_len"], 4096);
    assert_eq!(get("/v1/models/alpha").await.json()["id"], "alpha");
    assert_eq!(get("/v1/models/beta").await.error(404)["code"], "model_not_found");
    assert_eq!(get("/health").await.status, 200);
    assert_eq!(get("/v1/nothing").await.error(404)["code"], "unknown_url");
    assert_eq!(get("/v1/chat/completions").await.error(404)["code"], "unknown_url");
    let error = chat(served.http, json!({"model": "beta", "messages": user("x")})).await.error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    let long = "x".repeat(5000);
    let error = chat(served.http, json!({"messages": user(&long)})).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    // LiteLLM and LangChain know the error by its message.
    let message = error["message"].as_str().unwrap();
    for words in ["this model's maximum context length is 4096 tokens", "context_length_exceeded", "5017 prompt tokens"]
    {
        assert!(message.contains(words), "{words}: {message}");
    }
    // Names may have slashes, as they are or encoded.
    let device = fake(Duration::from_micros(200), b"x");
    let named = vec![model("Qwen/Qwen3-8B", Some(tokenizer(true)), vec![(0, device)], 8)];
    let named = serve_models(named, Options::default()).await;
    for path in ["/v1/models/Qwen/Qwen3-8B", "/v1/models/Qwen%2FQwen3-8B"] {
        assert_eq!(send(named.http, "GET", path, &[], Body::empty()).await.json()["id"], "Qwen/Qwen3-8B");
    }
    let error = send(named.http, "GET", "/v1/models/Qwen/other", &[], Body::empty()).await.error(404);
    assert_eq!(error["code"], "model_not_found");
    let model = server(tokenizer(false), "x").await;
    chat(model.http, json!({"messages": user("x")})).await.error(400);
}

#[tokio::test]
async fn responses_are_items_whole_and_as_named_events() {
    let output = "<think>hm</think>So.<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": 1}}</tool_call>";
    let served = server(tokenizer_of(Some(TEMPLATE)), output).await;
    let tool = json!({"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}});
    let asked = json!({
        "model": "alpha", "instructions": "be", "input": "x", "tools": [tool], "max_output_tokens": output.len(),
        "reasoning": {"effort": "low"}, "store": false,
    });
    let ask = async |body: &Value| post(served.http, "/v1/responses", body).await;
    let whole = ask(&asked).await.json();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(whole["instructions"], "be");
    let kinds: Vec<&Value> = whole["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(whole["output"][0]["content"][0]["text"], "hm");
    assert_eq!(whole["output"][1]["content"][0]["text"], "So.");
    assert_eq!(whole["output"][2]["arguments"], "{\"a\": 1}");
    assert_eq!(whole["usage"]["output_tokens"], output.len());

    let mut streamed = asked.clone();
    streamed["stream"] = json!(true);
    let answer = ask(&streamed).await;
    let events: Vec<Value> = answer
        .body
        .split("\n\n")
        .filter(|event| !event.is_empty())
        .map(|event| {
            let (name, data) = event.split_once('\n').expect("a name and data");
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
            data
        })
        .collect();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let named = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!((named("response.output_item.added").len(), named("response.output_item.done").len()), (3, 3));
    let deltas = |kind: &str| named(kind).iter().map(|event| event["delta"].as_str().unwrap()).collect::<String>();
    assert_eq!(deltas("response.output_text.delta"), "So.");
    assert_eq!(deltas("response.reasoning_text.delta"), "hm");
    assert_eq!(deltas("response.function_call_arguments.delta"), "{\"a\": 1}");
    let last = &events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["output"][1]["content"][0]["text"], "So.");

    // A conversation with calls, their results and reasoning.
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ]);
    let whole = ask(&json!({"input": items, "max_output_tokens": 1})).await.json();
    let call = "[{\"id\": \"c1\", \"type\": \"function\", \"function\": {\"name\": \"time\", \"arguments\": {}}}]";
    let prompt = format!("[user]a[assistant]{call}[tool]noon[assistant]b[assistant]");
    // `tool_calls` is written by the template with the keys in their order.
    assert_eq!(whole["usage"]["input_tokens"], prompt.len());
    for (body, param) in [
        (json!({"input": "x", "previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"input": 5}), "input"),
        (json!({}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0].type"),
        (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format.schema"),
        (json!({"input": "x", "n": 2}), "n"),
    ] {
        let error = ask(&body).await.error(400);
        assert!(error["param"].as_str().unwrap().starts_with(param), "{param}: {error}");
    }
    served.idle("alpha/0", Duration::from_secs(5)).await;
}

/// Goal: a response repeats the fields of its request as they were read, within bounds.
#[tokio::test]
async fn responses_repeat_what_was_read_and_no_more() {
    let served = server(tokenizer_of(Some(TEMPLATE)), "5").await;
    let asked = json!({
        "input": "x", "max_output_tokens": 1, "metadata": {"a": "b"}, "user": "me", "truncation": "disabled",
        "reasoning": {"effort": "low", "unread": [1]}, "text": {"format": {"type": "text", "unread": {}}, "unread": 5},
    });
    let whole = post(served.http, "/v1/responses", &asked).await.json();
    assert_eq!((&whole["metadata"], &whole["user"]), (&json!({"a": "b"}), &json!("me")));
    assert_eq!(whole["reasoning"], json!({"effort": "low", "summary": null}));
    assert_eq!((&whole["text"], &whole["truncation"]), (&json!({"format": {"type": "text"}}), &json!("disabled")));
    let schema = json!({"type": "integer"});
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true, "unread": [[]]});
    let asked = json!({"input": "x", "max_output_tokens": 2, "text": {"format": format}});
    let whole = post(served.http, "/v1/responses", &asked).await.json();
    let again = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    assert_eq!(whole["text"], json!({"format": again}));

    let plain = json!({"input": "x", "max_output_tokens": 1});
    let whole = post(served.http, "/v1/responses", &plain).await.json();
    assert_eq!((&whole["metadata"], &whole["user"]), (&json!({}), &Value::Null));
    let many: serde_json::Map<String, Value> = (0..17).map(|key| (key.to_string(), json!("v"))).collect();
    for (field, value, param) in [
        ("metadata", json!(many), "metadata"),
        ("metadata", json!({"k": "v".repeat(513)}), "metadata.k"),
        ("metadata", json!({"k": [1]}), "metadata.k"),
        ("metadata", json!({"k".repeat(65): "v"}), "metadata"),
        ("metadata", json!([]), "metadata"),
        ("user", json!({}), "user"),
        ("user", json!("u".repeat(257)), "user"),
        ("truncation", json!("auto"), "truncation"),
        ("reasoning", json!({"summary": {}}), "reasoning.summary"),
        ("text", json!({"format": {"type": "json_schema", "name": [], "schema": {}}}), "text.format.name"),
    ] {
        let mut body = plain.clone();
        body[field] = value;
        assert_eq!(post(served.http, "/v1/responses", &body).await.error(400)["param"], param);
    }
    let most: serde_json::Map<String, Value> = (0..16).map(|key| (key.to_string(), json!("v".repeat(512)))).collect();
    let mut body = plain;
    body["metadata"] = json!(most);
    assert_eq!(post(served.http, "/v1/responses", &body).await.json()["metadata"], json!(most));
}

/// Goal: definitions are copied only for parameters that refer to them, and not beyond what a constraint may have.
#[tokio::test]
async fn definitions_of_tools_are_not_copied_without_bound() {
    // A template of calls with tagged parameters.
    let template = format!("{{# <function= #}}{TEMPLATE}");
    let served = server(tokenizer_of(Some(&template)), "").await;
    let ask = async |parameters: usize, definition: usize, schema: Value| {
        let properties: serde_json::Map<String, Value> =
            (0..parameters).map(|number| (format!("p{number}"), schema.clone())).collect();
        let description = "x".repeat(definition);
        let definitions = json!({"d": {"type": "integer", "maximum": 5, "minimum": 5, "description": description}});
        let parameters = json!({"type": "object", "properties": properties, "required": ["p0"], "$defs": definitions});
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        let asked = json!({
            "messages": user("x"), "tools": [tool], "tool_choice": "required", "max_tokens": 300, "seed": 1,
            "enable_thinking": false,
        });
        chat(served.http, asked).await
    };
    let refers = json!({"$ref": "#/$defs/d"});
    let whole = ask(1, 10, refers.clone()).await.json();
    let arguments = whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(arguments).unwrap()["p0"], 5, "{whole}");
    // With a copy for each parameter they are longer than a constraint may be.
    let error = ask(500, 1 << 10, refers).await.error(400);
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["param"], "tools");
    assert!(message.contains("262144") && message.contains("bytes"), "{message}");
    // Parameters that refer to nothing get no copy: only the prompt is too long.
    let error = ask(500, 1 << 10, json!({"type": "boolean"})).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded", "{error}");

    let tool = json!({"type": "function", "function": {"name": "f"}});
    let asked = json!({"messages": user("x"), "tools": vec![tool; 1025]});
    let error = chat(served.http, asked).await.error(400);
    assert_eq!(error["param"], "tools");
    assert!(error["message"].as_str().unwrap().contains("1025"), "{error}");
}

/// Goal: without marks around calls, an object that names no tool is the answer.
#[tokio::test]
async fn an_answer_in_json_with_a_name_is_no_call() {
    let template = "{% if tools %}{# \"name\" \"parameters\" #}{{ tools | tojson }}{% endif %}\
        {% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]";
    for (output, calls) in
        [("{\"name\": \"Ada\", \"age\": 36}", false), ("{\"name\": \"time\", \"parameters\": {}}", true)]
    {
        let served = server(tokenizer_of(Some(template)), output).await;
        let asked = json!({"messages": user("x"), "tools": tools(), "max_tokens": output.len()});
        let message = chat(served.http, asked).await.json()["choices"][0]["message"].clone();
        assert_eq!(message["content"], if calls { Value::Null } else { json!(output) });
        assert_eq!(message.get("tool_calls").is_some(), calls, "{message}");
    }
}

/// Goal: prompts that are told again are bounded over all choices, and truncation applies before the context does.
#[tokio::test]
async fn echoes_and_truncated_prompts_are_bounded() {
    let served = server(tokenizer(true), "abc").await;
    let ask = async |body: Value| post(served.http, "/v1/completions", &body).await;
    let prompt = "x".repeat(2000);
    let scored = |n: usize| json!({"prompt": prompt, "n": n, "max_tokens": 1, "echo": true, "logprobs": 0, "seed": 1});
    let error = ask(scored(33)).await.error(400);
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["param"], "echo");
    assert!(message.contains("66000") && message.contains("65536"), "{message}");
    // Over all prompts.
    let mut several = scored(11);
    several["prompt"] = json!([prompt, prompt, prompt]);
    assert_eq!(ask(several).await.error(400)["param"], "echo");
    // The samples of refused requests end behind their answers, and leave no room until then.
    served.idle("alpha/0", Duration::from_secs(5)).await;
    let whole = ask(scored(2)).await.json();
    assert_eq!(whole["choices"][1]["logprobs"]["tokens"].as_array().unwrap().len(), 2001);
    served.idle("alpha/0", Duration::from_secs(5)).await;

    let long = "x".repeat(5000);
    let ids = vec![120; 5000];
    for prompt in [json!(long), json!(ids)] {
        let whole = ask(json!({"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": 7})).await.json();
        assert_eq!(whole["usage"]["prompt_tokens"], 7);
        assert_eq!(ask(json!({"prompt": prompt})).await.error(400)["code"], "context_length_exceeded");
    }
    let asked = json!({"messages": user(&long), "max_tokens": 1, "truncate_prompt_tokens": 7});
    assert_eq!(chat(served.http, asked).await.json()["usage"]["prompt_tokens"], 7);
}

#[tokio::test]
async fn conversations_with_calls_are_rendered_with_objects() {
    let served = server(tokenizer_of(Some(TEMPLATE)), "ok").await;
    let conversation = |arguments: Value| {
        let call = json!({"id": "c1", "type": "function", "function": {"name": "time", "arguments": arguments}});
        let messages = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
        ]);
        json!({"messages": messages, "max_tokens": 1})
    };
    let call =
        "[{\"id\": \"c1\", \"type\": \"function\", \"function\": {\"name\": \"time\", \"arguments\": {\"z\": 1}}}]";
    let prompt = format!("[user]a[assistant]{call}[tool]noon[assistant]");
    for arguments in [json!("{\"z\":1}"), json!({"z": 1})] {
        let whole = chat(served.http, conversation(arguments)).await.json();
        assert_eq!(whole["usage"]["prompt_tokens"], prompt.len());
    }
    for arguments in [json!("{"), json!("[]"), json!(5)] {
        let error = chat(served.http, conversation(arguments)).await.error(400);
        assert!(error["param"].as_str().unwrap().contains("arguments"), "{error}");
    }
    let error = chat(served.http, json!({"messages": user("x"), "chat_template_kwargs": {"messages": []}})).await;
    assert_eq!(error.error(400)["param"], "chat_template_kwargs");
    let error = chat(served.http, json!({"messages": user("x"), "chat_template_kwargs": "no"})).await;
    assert_eq!(error.error(400)["param"], "chat_template_kwargs");
}

/// Goal: tokens and limits are those of gRPC, for the same clients.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rights_and_limits_are_shared_with_grpc() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.toml");
    let entry = |name: &str, more: &str| {
        let digest = Sha256::digest(name);
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[tokens]]\nname = \"{name}\"\nsha256 = \"{digest}\"\n{more}\n")
    };
    let entries = [
        entry("alice", "requests = 1"),
        entry("operator", "may = [\"admin\"]"),
        entry("other", "models = [\"beta\"]"),
        entry("metered", "tokens_per_minute = 30"),
    ];
    std::fs::write(&file, entries.concat()).unwrap();
    let options = Options { tokens: Some(Arc::new(Tokens::read(&file).unwrap())), ..Options::default() };
    let slow = || vec![(0, fake(Duration::from_millis(3), b"abc"))];
    let models =
        vec![model("alpha", Some(tokenizer(true)), slow(), 8), model("beta", Some(tokenizer(true)), slow(), 8)];
    let served = serve_models(models, options).await;
    let ask = async |token: &str, body: Value| {
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str())];
        let headers = if token.is_empty() { &headers[..0] } else { &headers[..] };
        send(served.http, "POST", "/v1/chat/completions", headers, body.to_string()).await
    };
    let asked = json!({"model": "alpha", "messages": user("x"), "max_tokens": 3});
    assert_eq!(ask("", asked.clone()).await.error(401)["code"], "invalid_api_key");
    assert_eq!(ask("nobody", asked.clone()).await.error(401)["code"], "invalid_api_key");
    assert_eq!(ask("operator", asked.clone()).await.error(403)["type"], "permission_error");
    ask("other", asked.clone()).await.error(403);
    assert_eq!(ask("alice", asked.clone()).await.json()["usage"]["completion_tokens"], 3);
    // One that names no model means the only one of its token; lists show it alone.
    let whole = ask("other", json!({"messages": user("x"), "max_tokens": 3})).await.json();
    assert_eq!(whole["model"], "beta");
    let list = send(served.http, "GET", "/v1/models", &[("authorization", "Bearer other")], Body::empty()).await.json();
    assert_eq!((list["data"].as_array().unwrap().len(), &list["data"][0]["id"]), (1, &json!("beta")));
    assert_eq!(send(served.http, "GET", "/v1/models", &[], Body::empty()).await.status, 401);
    assert_eq!(send(served.http, "GET", "/health", &[], Body::empty()).await.status, 200);

    // A request over gRPC takes the place of one over HTTP.
    let channel = served.channel().await;
    let mut client = OstinatoClient::with_interceptor(channel, |mut request: tonic::Request<()>| {
        request.metadata_mut().insert("authorization", "Bearer alice".parse().unwrap());
        Ok(request)
    });
    let mut stream = client.generate(text_request("alpha", "x", 2000)).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    let refused = ask("alice", asked.clone()).await;
    assert_eq!(refused.error(429)["code"], "rate_limit_exceeded");
    drop(stream);
    served.idle("alpha/0", Duration::from_secs(5)).await;
    ask("alice", asked.clone()).await.json();
    // The bucket of tokens is the same, and a refusal says when to come again.
    ask("metered", asked.clone()).await.json();
    let refused = loop {
        let answer = ask("metered", asked.clone()).await;
        if answer.status != 200 {
            break answer;
        }
    };
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(refused.error(429)["code"], "rate_limit_exceeded");
}

/// Goal: a client that goes away frees its row, before its answer began and in the middle of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_frees_its_row() {
    let device = fake(Duration::from_millis(5), b"abc");
    let served =
        serve_models(vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 8)], Options::default()).await;
    for stream in [true, false] {
        let mut sender = connect(served.http).await;
        let body = json!({"messages": user("x"), "max_tokens": 3500, "n": 2, "stream": stream});
        let request = http::Request::post("/v1/chat/completions").header("host", served.http.to_string());
        let answer = sender.send_request(request.body(Body::from(body.to_string())).unwrap());
        if stream {
            let mut body = Body::new(answer.await.unwrap().into_body());
            let first = std::future::poll_fn(|context| std::pin::Pin::new(&mut body).poll_frame(context)).await;
            assert!(first.unwrap().is_ok());
            served.busy("alpha/0", 2, 0).await;
        } else {
            let waiting = tokio::spawn(answer);
            served.busy("alpha/0", 2, 0).await;
            waiting.abort();
            let _ = waiting.await;
        }
        drop(sender);
        served.idle("alpha/0", Duration::from_secs(5)).await;
    }
}

/// Serves a device that draws faster than any client reads.
async fn fast(options: Options) -> Served {
    let mut device = fake(Duration::from_micros(20), b"abcdefgh");
    (device.capacity.slots, device.capacity.context, device.capacity.pages) = (16, 1 << 20, 1 << 16);
    device.capacity.buckets = vec![1, 2, 4, 8, 16];
    device.capacity.run_ahead = 32;
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 64)];
    serve_models(models, options).await
}

/// Events of [`long_stream`] whose bytes are several times what the buffers of two sockets hold (6 MiB at most by default).
const MORE_THAN_SOCKETS_HOLD: usize = 16_384;

/// Asks for a long stream of large events.
async fn long_stream(at: SocketAddr) -> TcpStream {
    let body = json!({"prompt": "x", "max_tokens": 1_000_000, "stream": true, "logprobs": 20}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut stream = TcpStream::connect(at).await.unwrap();
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

/// Goal: a client that does not read its events keeps neither its row nor its connection. Method: the request of a reader
/// that reads nothing is cancelled when its buffer is full, and its connection is closed when nothing could be sent for
/// the time of a keepalive and its answer; one that reads late is told why its stream has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_nobody_reads_are_cancelled_and_closed() {
    let wait = Duration::from_secs(1);
    let options =
        Options { stream_buffer: MORE_THAN_SOCKETS_HOLD, keepalive: wait, keepalive_wait: wait, ..Options::default() };
    let served = fast(options).await;
    let mut silent = long_stream(served.http).await;
    served.begun("alpha/0").await;
    served.idle("alpha/0", Duration::from_secs(20)).await;
    tokio::time::sleep(3 * wait).await;
    // What the system has buffered comes, and then the end, which is not that of the answer.
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(20), silent.read_to_end(&mut answer)).await.expect("it is closed");
    let answer = String::from_utf8_lossy(&answer);
    assert!(!answer.is_empty() && !answer.contains("[DONE]") && !answer.contains("resource"), "{}", answer.len());

    let served = fast(Options { stream_buffer: 64, ..Options::default() }).await;
    let mut late = long_stream(served.http).await;
    served.begun("alpha/0").await;
    served.idle("alpha/0", Duration::from_secs(20)).await;
    let mut answer = String::new();
    let mut bytes = vec![0; 1 << 16];
    while !answer.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n") {
        let read =
            tokio::time::timeout(Duration::from_secs(20), late.read(&mut bytes)).await.expect("in time").unwrap();
        assert!(read > 0, "it was closed after {} bytes", answer.len());
        answer.push_str(&String::from_utf8_lossy(&bytes[..read]));
    }
    assert!(answer.contains("64 events"), "the last event tells why: {}", &answer[answer.len() - 1000..]);
}

/// Goal: streams that nobody reads do not keep others out. Method: as many of them as there are places. As long as their
/// events still go into the sockets' buffers, every place has a call, and others are turned away; when nothing of them can
/// be sent, the health probe and a new client are answered, long before the connections would be closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_nobody_reads_give_up_their_places() {
    let served = fast(Options { connections: 4, stream_buffer: MORE_THAN_SOCKETS_HOLD, ..Options::default() }).await;
    let mut unread = Vec::new();
    for _ in 0..4 {
        unread.push(long_stream(served.http).await);
    }
    served.busy("alpha/0", 4, 0).await;
    let begun = std::time::Instant::now();
    let health = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let mut refused = 0;
    while !raw(served.http, health).await.starts_with("HTTP/1.1 200") {
        assert!(begun.elapsed() < Duration::from_secs(40), "{refused} probes were turned away");
        refused += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(refused > 0, "all places had calls");
    for _ in 0..20 {
        assert!(raw(served.http, health).await.starts_with("HTTP/1.1 200"));
        let whole = chat(served.http, json!({"messages": user("x"), "max_tokens": 3})).await.json();
        assert_eq!(whole["choices"][0]["message"]["content"], "abc");
    }
    drop(unread);
}

/// Goal: every request ends once, however many come. Method: 1,000 requests from 64 clients, whole and as streams.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_requests_of_64_clients_end_once_each() {
    let device = fake(Duration::from_micros(50), b"abc");
    let served =
        serve_models(vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 256)], Options::default()).await;
    let clients = (0..64u32).map(|client| {
        let at = served.http;
        tokio::spawn(async move {
            let mut ended = 0;
            for number in (client..1000).step_by(64) {
                let tokens = 1 + number % 9;
                let body = json!({
                    "messages": user(&format!("{number}")), "max_tokens": tokens, "stream": number % 2 == 0,
                    "stream_options": {"include_usage": true},
                });
                let answer = chat(at, body).await;
                let text: String = "abc".chars().cycle().take(tokens as usize).collect();
                if number % 2 == 0 {
                    let events = answer.events();
                    assert_eq!(joined(&events).0, text);
                    let finishes = events.iter().filter(|e| e["choices"][0]["finish_reason"].is_string()).count();
                    assert_eq!((finishes, &events.last().unwrap()["usage"]["completion_tokens"]), (1, &json!(tokens)));
                } else {
                    assert_eq!(answer.json()["choices"][0]["message"]["content"], json!(text));
                }
                ended += 1;
            }
            ended
        })
    });
    let mut ended = 0;
    for client in clients.collect::<Vec<_>>() {
        ended += client.await.unwrap();
    }
    assert_eq!(ended, 1000);
    served.idle("alpha/0", Duration::from_secs(5)).await;
}

/// Sends raw bytes and returns what comes back until the server closes the connection.
async fn raw(at: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(at).await.unwrap();
    // The server may close it before it has read anything.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    // A reset after the answer is as good as an end.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Goal: nothing that a client sends ends the server or is taken without bound. Method: bodies that are too long, slow,
/// cut, deep or of the wrong kind; then an ordinary request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_bodies_are_refused_and_others_are_served() {
    let options = Options {
        message_wait: Duration::from_millis(500),
        max_message_bytes: 100 << 10,
        max_prompt_bytes: 2 << 10,
        ..Options::default()
    };
    let device = fake(Duration::from_micros(200), b"abc");
    let served = serve_models(vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 8)], options).await;
    let at = served.http;
    let head = |length: usize| {
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n")
    };
    // A declared length is refused before the body comes, a real one as soon as it is too long.
    let answer = raw(at, format!("{}\r\n", head(1 << 30)).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    let long = send(at, "POST", "/v1/chat/completions", &[], "x".repeat((100 << 10) + 1)).await.error(413);
    assert!(long["message"].as_str().unwrap().contains("102400"), "{long}");
    // A body that does not come.
    let begun = std::time::Instant::now();
    let answer = raw(at, format!("{}connection: close\r\n\r\n{{", head(100)).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    // Half a request and rubbish.
    let mut stream = TcpStream::connect(at).await.unwrap();
    stream.write_all(b"POST /v1/chat/comp").await.unwrap();
    drop(stream);
    assert!(raw(at, b"\x16\x03\x01\x00\xff rubbish\r\n\r\n").await.starts_with("HTTP/1.1 400"));
    let huge = format!("GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(64 << 10));
    let answer = raw(at, huge.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431") || answer.is_empty(), "{answer}");
    let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000));
    for body in [
        String::new(),
        "{".to_owned(),
        "[]".to_owned(),
        "null".to_owned(),
        "5".to_owned(),
        "\u{0}".to_owned(),
        deep.clone(),
        format!("{{\"messages\": {deep}}}"),
        format!("{{\"messages\": [{}]}}", "{},".repeat(20_000) + "{}"),
        json!({"messages": vec![json!({"role": "user", "content": "x"}); 2000]}).to_string(),
        json!({"messages": user(&"x".repeat(4 << 10))}).to_string(),
        json!({"messages": user("x"), "stop": vec!["x"; 20_000]}).to_string(),
    ] {
        send(at, "POST", "/v1/chat/completions", &[], body).await.error(400);
    }
    let open = format!("{{\"messages\": {}", "[".repeat(70_000));
    let error = send(at, "POST", "/v1/chat/completions", &[], open).await.error(400);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("70001") && message.contains("65536"), "{message}");
    // Texts are not counted.
    let text =
        json!({"messages": user("x"), "unknown": "[{\\\"\\".repeat(2_000) + &"[".repeat(70_000), "max_tokens": 1});
    chat(at, text).await.json();
    let error = send(at, "POST", "/v1/chat/completions", &[("content-encoding", "gzip")], "x").await.error(400);
    assert_eq!(error["param"], "content-encoding");
    let whole = chat(at, json!({"messages": user("x"), "max_tokens": 3})).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], "abc");
    served.idle("alpha/0", Duration::from_secs(5)).await;
}

#[tokio::test]
async fn pages_of_other_origins_cannot_ask_a_server_without_tokens() {
    let served = server(tokenizer(true), "ok").await;
    let body = json!({"messages": user("x"), "max_tokens": 1}).to_string();
    let ask = async |host: &str, origin: Option<&str>| {
        let origin = origin.map(|origin| format!("origin: {origin}\r\n")).unwrap_or_default();
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n{origin}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        raw(served.http, request.as_bytes()).await.split(' ').nth(1).unwrap_or_default().to_owned()
    };
    assert_eq!(ask("localhost:8000", None).await, "200");
    assert_eq!(ask("127.0.0.1", Some("http://localhost:3000")).await, "200");
    assert_eq!(ask("evil.example", None).await, "403");
    assert_eq!(ask("localhost", Some("https://evil.example")).await, "403");
    assert_eq!(ask("localhost", Some("null")).await, "403");
    // Pages of this machine may read the answers, others are not told so.
    let preflight = async |origin: &str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "content-type"),
        ];
        send(served.http, "OPTIONS", "/v1/chat/completions", &headers, Body::empty()).await
    };
    let allowed = preflight("http://localhost:3000").await;
    assert_eq!(allowed.status, 204);
    assert_eq!(allowed.headers["access-control-allow-origin"], "http://localhost:3000");
    assert_eq!(allowed.headers["access-control-allow-headers"], "content-type");
    let denied = preflight("https://evil.example").await;
    assert!(denied.status != 204 && !denied.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_and_the_end_of_the_server_are_told() {
    let device = fake(Duration::from_millis(5), b"abc");
    let options = Options { drain: Duration::from_millis(300), ..Options::default() };
    let served = serve_models(vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 8)], options).await;
    let body = json!({"messages": user("x"), "max_tokens": 3000});
    let late = [("grpc-timeout", "200m")];
    let answer = send(served.http, "POST", "/v1/chat/completions", &late, body.to_string()).await;
    assert_eq!(answer.error(504)["code"], "timeout");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = send(served.http, "POST", "/v1/chat/completions", &late, streamed.to_string()).await.events();
    assert_eq!(events.last().unwrap()["error"]["code"], "timeout");
    // A stream that runs at the end is cut with a reason.
    served.idle("alpha/0", Duration::from_secs(5)).await;
    let at = served.http;
    let cut = tokio::spawn(async move { chat(at, streamed).await });
    served.busy("alpha/0", 1, 0).await;
    served.stop.cancel();
    let events = cut.await.unwrap().events();
    assert_eq!(events.last().unwrap()["error"]["code"], "unavailable");
    assert_eq!(served.server.await.unwrap().unwrap().cut, 1);
}

/// Goal: with certificates the endpoint is encrypted, whether or not a client names HTTP/1.1 in its handshake.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_those_of_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("a");
    let (certificate, key) = authority.issue_to(folder.path(), "server");
    let files = TlsConfig { certificate, key, client_ca: None };
    let options = Options { tls: Some(Arc::new(Tls::read(&files).unwrap())), ..Options::default() };
    let device = fake(Duration::from_micros(200), b"abc");
    let served = serve_models(vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 8)], options).await;
    for alpn in [&[][..], &[b"http/1.1".to_vec()][..]] {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(rustls::pki_types::CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = alpn.to_vec();
        let stream = TcpStream::connect(served.http).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
        stream.write_all(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    }
    assert!(!raw(served.http, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n").await.contains("200 OK"));
}

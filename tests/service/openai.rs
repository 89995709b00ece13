//! Tests of OpenAI's API over HTTP, with a real HTTP client against fake devices: the shapes of answers and of streams,
//! tools, reasoning and constraints, refusals in OpenAI's form, and that tokens, limits and counts are those of gRPC.

use crate::serving::{END, Served, fake, model, serve_models, tokenizer, tokenizer_of};
use axum::body::{Body, to_bytes};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use ostinato::model::text::Text;
use ostinato::service::server::Options;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;

/// A template with tools and reasoning, whose prompts leave the reasoning to the model.
const TEMPLATE: &str = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}\
    {% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\
    {% endfor %}[assistant]{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}";

/// An answer.
struct Answer {
    status: u16,
    headers: http::HeaderMap,
    body: String,
}

impl Answer {
    #[track_caller]
    fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        serde_json::from_str(&self.body).expect("JSON")
    }

    /// The error of a refusal with this status.
    #[track_caller]
    fn error(&self, status: u16) -> Value {
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

async fn post(at: SocketAddr, path: &str, body: &Value) -> Answer {
    send(at, "POST", path, &[("content-type", "application/json")], body.to_string()).await
}

async fn chat(at: SocketAddr, body: Value) -> Answer {
    post(at, "/v1/chat/completions", &body).await
}

/// A server of one model whose outputs repeat `script`; an empty script draws what a constraint allows.
async fn server(text: Text, script: &str) -> Served {
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
        (json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "content[0].type"),
        (json!([{"role": "user", "content": null}]), "messages[0].content"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": 5, "content": "x"}]), "messages[0].role"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!(["x"]), "messages[0]"),
        (json!("x"), "messages"),
        (json!([]), "messages"),
        (Value::Null, "messages"),
    ] {
        let error = ask(messages).await.error(400);
        assert!(error["param"].as_str().unwrap().contains(param), "{param}: {error}");
    }
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
            "temperature": 1, "parallel_tool_calls": false,
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
        let (name, _) = ask(json!("required"), seed).await;
        assert!(["weather", "time"].contains(&name.as_str()), "{name}");
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
    let asked = json!({"messages": user("x"), "response_format": format, "guided_regex": "a"});
    assert_eq!(chat(served.http, asked).await.error(400)["param"], "structured_outputs");
    let asked = json!({"messages": user("x"), "guided_regex": "("});
    assert_eq!(chat(served.http, asked).await.error(400)["param"], "structured_outputs.regex");
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
    let error = post(served.http, "/v1/embeddings", &json!({"model": "alpha", "input": "x"})).await.error(400);
    assert!(error["message"].as_str().unwrap().contains("not served"), "{error}");
    let error = chat(served.http, json!({"model": "beta", "messages": user("x")})).await.error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    let long = "x".repeat(5000);
    let error = chat(served.http, json!({"messages": user(&long)})).await.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    let model = server(tokenizer(false), "x").await;
    chat(model.http, json!({"messages": user("x")})).await.error(400);
}

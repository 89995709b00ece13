//! Tests of the gRPC service with a real client, a server on loopback and fake devices.

use crate::serving::*;
use ostinato::engine::fake::scored;
use ostinato::engine::request::Scored;
use ostinato::service::proto;
use ostinato::service::server::Options;
use proto::FinishReason as Reason;
use proto::finished::StopMatch;
use std::time::{Duration, Instant};
use tonic::{Code, Request};

const FAST: Duration = Duration::from_micros(100);

/// Serves two models on three devices: "alpha" with a tokenizer on two of them, "beta" with token ids only.
async fn two_models() -> Served {
    let alpha = vec![(0, fake(FAST, b"abcdefgh")), (1, fake(FAST, b"ABCDEFGH"))];
    let models = vec![
        model("alpha", Some(tokenizer(true)), alpha, 8),
        model("beta", None, vec![(2, fake(FAST, &[1, 2, 3]))], 8),
    ];
    serve_models(models, Options::default()).await
}

/// Serves one model whose fake device repeats `script` and takes `step` per step.
async fn one_model(step: Duration, script: &[u8]) -> Served {
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, fake(step, script))], 8)];
    serve_models(models, Options::default()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_goes_in_and_text_streams_out() {
    let served = two_models().await;
    let mut client = served.client().await;
    let mut request = text_request("alpha", "hello", 12);
    request.device = "alpha/0".to_owned();
    request.request_id = "mine".to_owned();
    let outcome = generate(&mut client, request).await;
    assert_eq!(outcome.text(), "abcdefghabcd");
    assert_eq!(outcome.ids(), b"abcdefghabcd".map(u32::from));
    let started = outcome.started.as_ref().unwrap();
    assert_eq!(started.request_id, "mine");
    assert_eq!(started.model, "alpha");
    assert_eq!(started.replica, "alpha/0");
    assert_eq!(started.prompt_tokens, 5);
    let device = started.device.as_ref().unwrap();
    assert_eq!(device.name, "Fake Apple");
    assert_eq!(device.uuid, "00000000-0000-4000-8000-000000000000");
    assert_eq!(device.pci, "0000:00:00.0");
    assert_eq!(outcome.reason(), Reason::Length);
    let finished = outcome.finished.unwrap();
    assert_eq!(finished.stop_match, None);
    let usage = finished.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.output_tokens), (5, 12));
    let timings = finished.timings.unwrap();
    assert!(timings.prefill_seconds > 0.0 && timings.decode_seconds > 0.0, "{timings:?}");
    let cost = finished.per_token.unwrap();
    assert!(cost.submits > 0.0 && cost.dispatches > 0.0, "{cost:?}");
    assert_eq!(cost.descriptor_updates, 0.0);
    assert!(outcome.error.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_rendered_by_the_models_template() {
    let served = two_models().await;
    let mut client = served.client().await;
    let message = |role: &str, content: &str| proto::ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..Default::default()
    };
    let chat = proto::Chat { messages: vec![message("system", "be"), message("user", "hi")], ..Default::default() };
    let rendered = "[system]be[user]hi[assistant]";

    let request = proto::TokenizeRequest {
        model: "alpha".to_owned(),
        input: Some(proto::tokenize_request::Input::Chat(chat.clone())),
    };
    let tokens = client.tokenize(request).await.unwrap().into_inner();
    assert_eq!(tokens.text, rendered);
    assert_eq!(tokens.token_ids, rendered.bytes().map(u32::from).collect::<Vec<_>>());

    let mut request = text_request("alpha", "", 1);
    request.prompt = Some(proto::generate_request::Prompt::Chat(chat));
    let outcome = generate(&mut client, request).await;
    assert_eq!(outcome.started.unwrap().prompt_tokens as usize, rendered.len());
}

/// Goal: a chat over gRPC has tools, calls, results and reasoning in its history, and arguments for the template, and the
/// template gets them as transformers passes them. What is no JSON object, or would override the request, is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_has_tools_results_and_template_arguments() {
    let template = "{# {\"name\": f, \"arguments\": a} <tool_call> </think> #}\
        {% for t in tools or [] %}({{ t.function.name }}:{{ t.function.parameters.properties | list | join(',') }}){% endfor %}\
        {% for m in messages %}[{{ m.role }}{% if m.name %}/{{ m.name }}{% endif %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}]\
        {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
        {%- for call in m.tool_calls or [] %}<{{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }}>{% endfor %}{% endfor %}\
        {%- if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}{{ style }}";
    let device = fake(Duration::from_millis(1), b"ok");
    let models = vec![model("alpha", Some(tokenizer_of(Some(template))), vec![(0, device)], 8)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let message = |role: &str, content: &str| proto::ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..Default::default()
    };
    let call = proto::chat_message::ToolCall {
        id: "c1".to_owned(),
        name: "weather".to_owned(),
        arguments: "{\"city\": \"Rome\"}".to_owned(),
    };
    let called = proto::ChatMessage {
        tool_calls: vec![call.clone()],
        reasoning_content: "hm".into(),
        ..message("assistant", "")
    };
    let result = proto::ChatMessage { tool_call_id: "c1".into(), name: "weather".into(), ..message("tool", "sunny") };
    let tool = serde_json::json!({"type": "function", "function": {
        "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }});
    let chat = proto::Chat {
        messages: vec![message("user", "hi"), called.clone(), result],
        tools: vec![tool.to_string()],
        template_arguments: "{\"enable_thinking\": false, \"style\": \"!\"}".to_owned(),
        add_generation_prompt: None,
    };
    let history = "(weather:city)[user]hi[assistant]<think>hm</think><c1 weather Rome>[tool/weather#c1]sunny";
    let rendered = async |client: &mut proto::ostinato_client::OstinatoClient<tonic::transport::Channel>,
                          chat: &proto::Chat| {
        let input = Some(proto::tokenize_request::Input::Chat(chat.clone()));
        let request = proto::TokenizeRequest { model: "alpha".to_owned(), input };
        client.tokenize(request).await.map(|answer| answer.into_inner().text)
    };
    assert_eq!(rendered(&mut client, &chat).await.unwrap(), format!("{history}[assistant]<think></think>!"));
    let plain = proto::Chat { template_arguments: String::new(), ..chat.clone() };
    assert_eq!(rendered(&mut client, &plain).await.unwrap(), format!("{history}[assistant]"));
    let ended = proto::Chat { add_generation_prompt: Some(false), ..plain };
    assert_eq!(rendered(&mut client, &ended).await.unwrap(), history);

    let mut request = text_request("alpha", "", 2);
    request.prompt = Some(proto::generate_request::Prompt::Chat(chat.clone()));
    let outcome = generate(&mut client, request).await;
    assert_eq!(outcome.text(), "ok");
    let tokens = outcome.started.unwrap().prompt_tokens as usize;
    assert_eq!(tokens, history.len() + "[assistant]<think></think>!".len());

    let wrong = |arguments: &str| proto::ChatMessage {
        tool_calls: vec![proto::chat_message::ToolCall { arguments: arguments.to_owned(), ..call.clone() }],
        ..called.clone()
    };
    for (chat, field) in [
        (proto::Chat { tools: vec!["[]".to_owned()], ..chat.clone() }, "chat.tools"),
        (proto::Chat { template_arguments: "{".to_owned(), ..chat.clone() }, "chat.template_arguments"),
        (proto::Chat { template_arguments: "{\"tools\": []}".to_owned(), ..chat.clone() }, "chat.template_arguments"),
        (proto::Chat { messages: vec![wrong("[1]")], ..chat.clone() }, "chat.messages.tool_calls.arguments"),
    ] {
        let status = rendered(&mut client, &chat).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
        assert!(status.message().contains(field), "{field}: {status:?}");
    }
    // A template without tools refuses them.
    let plain = one_model(Duration::from_millis(1), b"x").await;
    let status = rendered(&mut plain.client().await, &chat).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_delta_splits_a_character() {
    let text = "aé€𝄞z";
    let served = one_model(FAST, text.as_bytes()).await;
    let mut client = served.client().await;
    let repeated = text.repeat(20);
    let length = u32::try_from(repeated.len()).unwrap();
    let outcome = generate(&mut client, text_request("alpha", "x", length)).await;
    // Protobuf strings are valid UTF-8 in any case; an error would show as U+FFFD.
    assert_eq!(outcome.text(), repeated);
    assert_eq!(outcome.ids(), repeated.bytes().map(u32::from).collect::<Vec<_>>());
    for delta in &outcome.deltas {
        let bytes: Vec<u8> = delta.token_ids.iter().map(|id| *id as u8).collect();
        assert_eq!(bytes, delta.text.as_bytes(), "ids and text of a delta go together");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_over_several_tokens_ends_it_and_frees_the_row() {
    let served = one_model(Duration::from_millis(2), b"one two STOP three").await;
    let mut client = served.client().await;
    let mut request = text_request("alpha", "x", 4000);
    let stopping = request.stopping.as_mut().unwrap();
    stopping.strings = vec!["never".to_owned(), "STOP".to_owned()];
    let outcome = generate(&mut client, request).await;
    assert_eq!(outcome.text(), "one two ");
    assert_eq!(outcome.reason(), Reason::Stop);
    let finished = outcome.finished.as_ref().unwrap();
    assert_eq!(finished.stop_match, Some(StopMatch::StopString("STOP".to_owned())));
    assert_eq!(finished.usage.as_ref().unwrap().output_tokens, 12, "up to the match");
    assert_eq!(outcome.ids().len(), 12);
    served.idle("alpha/0", Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_ids_and_the_end_of_sequence_are_told_apart_from_length() {
    let served = one_model(FAST, b"abcdef").await;
    let mut client = served.client().await;
    let mut request = text_request("alpha", "x", 50);
    request.stopping.as_mut().unwrap().ids = vec![u32::from(b'd')];
    let outcome = generate(&mut client, request).await;
    assert_eq!(outcome.reason(), Reason::Stop);
    let finished = outcome.finished.unwrap();
    assert_eq!(finished.stop_match, Some(StopMatch::StopId(u32::from(b'd'))));

    let mut script = fake(FAST, b"xyz");
    script.script.push(END);
    let models = vec![model("gamma", Some(tokenizer(false)), vec![(0, script)], 8)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let outcome = generate(&mut client, text_request("gamma", "x", 50)).await;
    assert_eq!(outcome.text(), "xyz", "the end token has no text");
    assert_eq!(outcome.ids().last(), Some(&END), "and is part of the tokens");
    assert_eq!(outcome.finished.unwrap().stop_match, Some(StopMatch::StopId(END)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_stay_with_their_tokens_while_text_is_held_back() {
    let served = one_model(FAST, "€€".as_bytes()).await;
    let mut client = served.client().await;
    let mut request = text_request("alpha", "x", 12);
    request.output = Some(proto::Output { logprobs: Some(2), ..Default::default() });
    let outcome = generate(&mut client, request).await;
    assert_eq!(outcome.ids().len(), 12);
    for delta in &outcome.deltas {
        let of: Vec<u32> = delta.logprobs.iter().map(|logprobs| logprobs.token_id).collect();
        assert_eq!(of, delta.token_ids);
        assert!(delta.logprobs.iter().all(|logprobs| logprobs.top.len() == 2));
    }
    // Each token has its text, here one byte of a character of three.
    let texts: Vec<u8> =
        outcome.deltas.iter().flat_map(|delta| &delta.logprobs).flat_map(|of| of.text.clone()).collect();
    assert_eq!(texts, "€€€€".as_bytes());
    for other in outcome.deltas.iter().flat_map(|delta| &delta.logprobs).flat_map(|of| &of.top) {
        let wanted = u8::try_from(other.token_id).map_or_else(|_| other.text.clone(), |byte| vec![byte]);
        assert_eq!(other.text, wanted);
    }
    // Without `text`, tokens have no text.
    let mut request = text_request("alpha", "x", 2);
    request.output = Some(proto::Output { logprobs: Some(1), text: Some(false), ..Default::default() });
    let plain = generate(&mut client, request).await;
    let known: Vec<_> = plain.deltas.iter().flat_map(|delta| &delta.logprobs).collect();
    assert!(known.len() == 2 && known.iter().all(|of| of.text.is_empty() && of.top[0].text.is_empty()), "{known:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompts_log_probabilities_come_before_its_output_in_messages_of_bounded_size() {
    let served = one_model(FAST, b"abc").await;
    let mut client = served.client().await;
    let prompt: Vec<u32> = (0..3000).map(|at| at * 7 % 250).collect();
    let mut request = token_request("alpha", &prompt, 4);
    request.output = Some(proto::Output { prompt_logprobs: Some(3), ..Default::default() });
    let outcome = generate(&mut client, request.clone()).await;
    let wanted = |at: usize| scored(&prompt[..at], prompt[at], 3, VOCABULARY);
    assert_eq!((outcome.ids().len(), outcome.prompt.len()), (4, prompt.len() - 1));
    for (at, token) in (1..).zip(&outcome.prompt) {
        let Scored { id, logprobs } = wanted(at);
        assert_eq!((token.token_id, token.logprob), (id, logprobs.chosen), "position {at}");
        assert_eq!(token.top.iter().map(|other| (other.token_id, other.logprob)).collect::<Vec<_>>(), logprobs.top);
    }
    // A prompt that is already cached is computed again to be scored, and a request without scores finds it in the
    // cache.
    assert_eq!(generate(&mut client, request.clone()).await.started.unwrap().cached_tokens, 0);
    request.output = None;
    let plain = generate(&mut client, request.clone()).await;
    assert!(plain.prompt.is_empty() && plain.started.unwrap().cached_tokens > 2900);
    // Several samples share the scores of their one prompt.
    request.output = Some(proto::Output { prompt_logprobs: Some(0), ..Default::default() });
    request.sampling = Some(proto::Sampling { n: Some(3), ..Default::default() });
    let stream = client.generate(request.clone()).await.unwrap().into_inner();
    let samples = read_samples(stream, 3).await;
    assert_eq!(samples.prompt.len(), prompt.len() - 1);
    assert!(samples.prompt.iter().all(|token| token.top.is_empty()));
    assert!(samples.outputs.iter().all(|(ids, _)| ids.len() == 4));
    // A prompt of one token has no scores.
    request.sampling = None;
    request.prompt = token_request("alpha", &[5], 4).prompt;
    assert!(generate(&mut client, request).await.prompt.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_is_asked_for_comes_back() {
    let served = one_model(FAST, b"abc").await;
    let mut client = served.client().await;
    let mut request = text_request("alpha", "x", 6);
    request.output = Some(proto::Output { text: Some(false), ..Default::default() });
    let outcome = generate(&mut client, request.clone()).await;
    assert_eq!((outcome.text().as_str(), outcome.ids().len()), ("", 6));
    request.output = Some(proto::Output { token_ids: Some(false), ..Default::default() });
    let outcome = generate(&mut client, request.clone()).await;
    assert_eq!((outcome.text().as_str(), outcome.ids().len()), ("abcabc", 0));
    // Stop strings are also found in text that is not sent.
    request.output = Some(proto::Output { text: Some(false), ..Default::default() });
    request.stopping.as_mut().unwrap().strings = vec!["ca".to_owned()];
    let outcome = generate(&mut client, request).await;
    assert_eq!((outcome.text().as_str(), outcome.ids().len()), ("", 4));
    assert_eq!(outcome.reason(), Reason::Stop);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_to_the_model_and_the_device_that_they_name() {
    let served = two_models().await;
    let mut client = served.client().await;
    for (device, replica, text) in [
        ("alpha/1", "alpha/1", "ABC"),
        ("alpha/0", "alpha/0", "abc"),
        ("00000001-0000-4000-8000-000000000000", "alpha/1", "ABC"),
        ("0000:00:00.0", "alpha/0", "abc"),
        ("1", "alpha/1", "ABC"),
        ("banana", "alpha/1", "ABC"),
    ] {
        let mut request = text_request("alpha", "x", 3);
        request.device = device.to_owned();
        let outcome = generate(&mut client, request).await;
        assert_eq!(outcome.started.as_ref().unwrap().replica, replica, "{device}");
        assert_eq!(outcome.text(), text, "{device}");
    }
    let outcome = generate(&mut client, token_request("beta", &[7], 4)).await;
    assert_eq!(outcome.ids(), [1, 2, 3, 1]);
    assert_eq!(outcome.started.unwrap().device.unwrap().name, "Fake Cherry");

    // Without a selected device, two concurrent requests use both replicas.
    let slow = vec![(0, fake(Duration::from_millis(5), b"a")), (1, fake(Duration::from_millis(5), b"b"))];
    let models = vec![model("alpha", Some(tokenizer(true)), slow, 8)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let first = client.generate(text_request("", "x", 400)).await.unwrap();
    served.busy("alpha/0", 1, 0).await;
    let second = client.generate(text_request("", "x", 400)).await.unwrap();
    served.busy("alpha/1", 1, 0).await;
    drop((first, second));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_served_has_its_code_and_says_why() {
    let served = two_models().await;
    let mut client = served.client().await;
    type Change = fn(&mut proto::GenerateRequest);
    fn sampling(request: &mut proto::GenerateRequest) -> &mut proto::Sampling {
        request.sampling.get_or_insert_default()
    }
    fn stopping(request: &mut proto::GenerateRequest) -> &mut proto::Stopping {
        request.stopping.get_or_insert_default()
    }
    fn tokens(request: &mut proto::GenerateRequest, ids: Vec<u32>) {
        request.prompt = Some(proto::generate_request::Prompt::Tokens(proto::TokenIds { ids }));
    }
    let cases: Vec<(Change, Code, &str)> = vec![
        (|r| r.model = "gamma".into(), Code::NotFound, "gamma"),
        (|r| r.model = String::new(), Code::NotFound, "alpha, beta"),
        (|r| r.device = "7".into(), Code::NotFound, "alpha/0"),
        (|r| r.device = "cherry".into(), Code::NotFound, "cherry"),
        (|r| r.prompt = None, Code::InvalidArgument, "prompt"),
        (|r| tokens(r, vec![]), Code::InvalidArgument, "empty"),
        (|r| tokens(r, vec![1, 300]), Code::InvalidArgument, "token 300 at position 1"),
        (|r| tokens(r, vec![1; 5000]), Code::InvalidArgument, "4096"),
        (|r| stopping(r).max_tokens = Some(0), Code::InvalidArgument, "max_tokens is 0"),
        (|r| stopping(r).min_tokens = Some(9), Code::InvalidArgument, "min_tokens is 9"),
        (|r| stopping(r).ids = vec![300], Code::InvalidArgument, "300"),
        (|r| stopping(r).ids = (0..16).collect(), Code::InvalidArgument, "at most 16"),
        (|r| stopping(r).strings = vec![String::new()], Code::InvalidArgument, "empty"),
        (|r| stopping(r).strings = vec!["x".into(); 17], Code::InvalidArgument, "17"),
        (|r| sampling(r).temperature = Some(f32::NAN), Code::InvalidArgument, "NaN"),
        (|r| sampling(r).temperature = Some(-1.0), Code::InvalidArgument, "temperature is -1"),
        (|r| sampling(r).top_p = Some(0.0), Code::InvalidArgument, "top_p is 0"),
        (|r| sampling(r).min_p = Some(f32::INFINITY), Code::InvalidArgument, "min_p is inf"),
        (|r| sampling(r).repetition_penalty = Some(0.0), Code::InvalidArgument, "repetition"),
        (|r| sampling(r).presence_penalty = Some(3.0), Code::InvalidArgument, "presence"),
        (|r| sampling(r).logit_bias = [(300, 1.0)].into(), Code::InvalidArgument, "logit_bias"),
        (|r| sampling(r).n = Some(0), Code::InvalidArgument, "sampling.n is 0"),
        (|r| sampling(r).n = Some(65), Code::InvalidArgument, "sampling.n is 65, must be from 1 to 64"),
        (|r| r.request_id = "a\0b".into(), Code::InvalidArgument, "request_id"),
        (
            |r| r.output = Some(proto::Output { prompt_logprobs: Some(21), ..Default::default() }),
            Code::InvalidArgument,
            "prompt_logprobs is 21",
        ),
        (
            |r| r.output = Some(proto::Output { logprobs: Some(21), ..Default::default() }),
            Code::InvalidArgument,
            "logprobs is 21",
        ),
        (
            |r| {
                let kind = proto::constraint::Kind::Regex("(a+".into());
                r.constraint = Some(proto::Constraint { kind: Some(kind), ..Default::default() });
            },
            Code::InvalidArgument,
            "constraint.regex",
        ),
        (|r| r.constraint = Some(proto::Constraint::default()), Code::InvalidArgument, "constraint.kind"),
        (
            |r| r.prompt = Some(proto::generate_request::Prompt::Chat(proto::Chat::default())),
            Code::InvalidArgument,
            "chat.messages",
        ),
    ];
    for (index, (change, code, words)) in cases.into_iter().enumerate() {
        let mut request = text_request("alpha", "x", 3);
        change(&mut request);
        let status = generate(&mut client, request).await.error;
        let status = status.unwrap_or_else(|| panic!("case {index} ({words}) was served"));
        assert_eq!(status.code(), code, "case {index}: {status:?}");
        assert!(status.message().contains(words), "case {index}: {status:?}");
    }
    for replica in ["alpha/0", "alpha/1"] {
        served.idle(replica, Duration::from_secs(1)).await;
    }
    // Values at the limits are served. An output that exceeds the context ends there.
    let mut request = token_request("alpha", &[1; 4000], 1_000_000);
    request.device = "0".to_owned();
    let outcome = generate(&mut client, request).await;
    assert_eq!((outcome.ids().len(), outcome.reason()), (96, Reason::Length));
    let mut request = text_request("alpha", "x", 50);
    stopping(&mut request).strings = vec!["b".to_owned(); 16];
    request.device = "0".to_owned();
    sampling(&mut request).n = Some(1);
    assert_eq!(generate(&mut client, request).await.text(), "a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_without_a_tokenizer_serves_ids_and_says_so_otherwise() {
    let served = two_models().await;
    let mut client = served.client().await;
    let outcome = generate(&mut client, token_request("beta", &[1, 2], 5)).await;
    assert_eq!(outcome.ids(), [1, 2, 3, 1, 2]);
    assert_eq!(outcome.text(), "");

    let chat = proto::Chat {
        messages: vec![proto::ChatMessage { role: "user".into(), content: "x".into(), ..Default::default() }],
        ..Default::default()
    };
    let mut with_text = token_request("beta", &[1], 5);
    with_text.output = Some(proto::Output { text: Some(true), ..Default::default() });
    let mut with_stop = token_request("beta", &[1], 5);
    with_stop.stopping.as_mut().unwrap().strings = vec!["x".to_owned()];
    let mut with_chat = token_request("beta", &[1], 5);
    with_chat.prompt = Some(proto::generate_request::Prompt::Chat(chat.clone()));
    for (request, field) in [
        (text_request("beta", "x", 5), "prompt.text"),
        (with_chat, "prompt.chat"),
        (with_text, "output.text"),
        (with_stop, "stopping.strings"),
    ] {
        let status = generate(&mut client, request).await.error.expect(field);
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains(field) && status.message().contains("beta"));
    }
    let input = Some(proto::tokenize_request::Input::Text("x".to_owned()));
    let request = proto::TokenizeRequest { model: "beta".to_owned(), input };
    assert_eq!(client.tokenize(request).await.unwrap_err().code(), Code::FailedPrecondition);
    let request = proto::DetokenizeRequest { model: "beta".to_owned(), ..Default::default() };
    assert_eq!(client.detokenize(request).await.unwrap_err().code(), Code::FailedPrecondition);

    // A tokenizer without a chat template is a separate error.
    let models = vec![model("plain", Some(tokenizer(false)), vec![(0, fake(FAST, b"a"))], 8)];
    let served = serve_models(models, Options::default()).await;
    let mut request = text_request("plain", "", 5);
    request.prompt = Some(proto::generate_request::Prompt::Chat(chat));
    let status = generate(&mut served.client().await, request).await.error.unwrap();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("chat template"), "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_frees_its_row_and_its_place_in_the_queue() {
    let step = Duration::from_millis(20);
    let served = one_model(step, b"a").await;
    let mut client = served.client().await;
    // Two requests run, because the fake device has two slots; the third waits.
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(client.generate(text_request("alpha", "x", 4000)).await.unwrap().into_inner());
    }
    served.busy("alpha/0", 2, 1).await;
    assert!(streams[0].message().await.unwrap().is_some());
    // The waiting request is dropped first; it has never had a row.
    drop(streams.pop());
    served.busy("alpha/0", 2, 0).await;
    let dropped = Instant::now();
    drop(streams);
    served.idle("alpha/0", Duration::from_secs(5)).await;
    // The rows are free after the steps in flight (the fake device queues at most four ahead), not after whole streams.
    let took = dropped.elapsed();
    assert!(took < step * 10, "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_ends_a_stream_by_its_id_from_another_connection() {
    let served = one_model(Duration::from_millis(5), b"abc").await;
    let mut client = served.client().await;
    let mut request = text_request("alpha", "x", 4000);
    request.request_id = "long".to_owned();
    let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());

    // The id of a live request cannot be used again.
    let status = generate(&mut client, request).await.error.unwrap();
    assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");

    let mut other = served.client().await;
    let request = |id: &str| proto::AbortRequest { request_id: id.to_owned() };
    other.abort(request("unknown")).await.unwrap();
    assert_eq!(other.abort(request("")).await.unwrap_err().code(), Code::InvalidArgument);
    other.abort(request("long")).await.unwrap();
    let mut last = None;
    while let Some(message) = stream.message().await.unwrap() {
        last = message.event;
    }
    let Some(proto::generate_response::Event::Finished(finished)) = last else {
        panic!("the last event is {last:?}");
    };
    assert_eq!(finished.reason(), Reason::Aborted);
    served.idle("alpha/0", Duration::from_secs(1)).await;
}

/// Goal: a client that reads too slowly is cancelled and told. Method: the client has a small flow-control window and
/// never reads, and the server buffers only a limited number of events.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_is_cancelled_and_told() {
    let mut config = fake(Duration::from_micros(20), b"abcdefgh");
    config.capacity.context = 1 << 20;
    config.capacity.pages = 1 << 16;
    config.capacity.run_ahead = 32;
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, config)], 8)];
    let options = Options { stream_buffer: 64, ..Options::default() };
    let served = serve_models(models, options).await;
    let channel = tonic::transport::Endpoint::new(served.address.clone())
        .unwrap()
        .initial_stream_window_size(1024)
        .connect()
        .await
        .unwrap();
    let mut client = proto::ostinato_client::OstinatoClient::new(channel);
    let mut request = text_request("alpha", "x", 1_000_000);
    // Log probabilities make the messages large, so that the transport's buffers fill soon.
    request.output = Some(proto::Output { logprobs: Some(20), ..Default::default() });
    let stream = client.generate(request).await.unwrap().into_inner();
    served.begun("alpha/0").await;
    served.idle("alpha/0", Duration::from_secs(20)).await;

    let outcome = read(stream).await;
    let status = outcome.error.as_ref().expect("an error after what was buffered");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("64 events"), "{status:?}");
    assert!(outcome.finished.is_none());
    assert!(outcome.ids().len() < 100_000, "{} tokens were buffered", outcome.ids().len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_resource_exhausted_and_others_go_on() {
    let step = Duration::from_millis(5);
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, fake(step, b"a"))], 1)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let mut streams = Vec::new();
    for running in 1..=2 {
        streams.push(client.generate(text_request("", "x", 100)).await.unwrap().into_inner());
        served.busy("alpha/0", running, 0).await;
    }
    streams.push(client.generate(text_request("", "x", 100)).await.unwrap().into_inner());
    let status = generate(&mut client, text_request("", "x", 100)).await.error.unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("alpha/0") && status.message().contains("at most 1"));
    for stream in streams {
        assert_eq!(read(stream).await.reason(), Reason::Length);
    }
}

/// A body that never ends.
struct Endless;

impl http_body::Body for Endless {
    type Data = bytes::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, Self::Error>>> {
        std::task::Poll::Pending
    }
}

/// Goal: a call whose deadline passes before it has an answer is DEADLINE_EXCEEDED, whether client or server notices
/// first. Method: calls whose message never comes, over plain HTTP/2, since tonic's client answers its own timeouts
/// with CANCELLED.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_too_late_is_told_so_and_not_that_it_was_cancelled() {
    let served = one_model(Duration::from_millis(5), b"a").await;
    let stream = tokio::net::TcpStream::connect(served.address.trim_start_matches("http://")).await.unwrap();
    let executor = hyper_util::rt::TokioExecutor::new();
    let io = hyper_util::rt::TokioIo::new(stream);
    let (mut client, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    let connection = tokio::spawn(connection);
    for (number, method) in ["Tokenize", "Generate"].into_iter().cycle().take(60).enumerate() {
        let request = http::Request::post(format!("{}/ostinato.v1.Ostinato/{method}", served.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", format!("{}m", 1 + number % 15))
            .body(Endless)
            .unwrap();
        let response = client.send_request(request).await.unwrap();
        let status = response.headers().get("grpc-status").expect("nothing but a status");
        let words = response.headers().get("grpc-message");
        assert_eq!(status.to_str().unwrap(), (Code::DeadlineExceeded as i32).to_string(), "{words:?}");
    }
    connection.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_a_stream_that_runs_and_one_that_waits() {
    let step = Duration::from_millis(5);
    let served = one_model(step, b"a").await;
    let mut client = served.client().await;
    let timed = |max_tokens| {
        let mut request = Request::new(text_request("", "x", max_tokens));
        request.set_timeout(Duration::from_millis(150));
        request
    };
    let begun = Instant::now();
    let outcome = generate(&mut client, timed(4000)).await;
    let took = begun.elapsed();
    let status = outcome.error.as_ref().expect("a status");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert_eq!(outcome.reason(), Reason::DeadlineExceeded, "the usage is told all the same");
    assert!(outcome.ids().len() > 2);
    assert!(took >= Duration::from_millis(140) && took < Duration::from_secs(3), "{took:?}");
    served.idle("alpha/0", Duration::from_secs(1)).await;

    // A deadline that is long enough has no effect.
    assert_eq!(generate(&mut client, timed(3)).await.reason(), Reason::Length);

    // A request in the queue behind two that hold the rows.
    let first = client.generate(text_request("", "x", 4000)).await.unwrap();
    let second = client.generate(text_request("", "x", 4000)).await.unwrap();
    served.busy("alpha/0", 2, 0).await;
    let outcome = generate(&mut client, timed(10)).await;
    assert_eq!(outcome.error.expect("a status").code(), Code::DeadlineExceeded);
    assert!(outcome.started.is_none());
    drop((first, second));

    let mut request = Request::new(text_request("", "x", 3));
    request.metadata_mut().insert("grpc-timeout", "soon".parse().unwrap());
    let status = generate(&mut client, request).await.error.unwrap();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_device_ends_its_streams_with_the_cause() {
    let mut config = fake(FAST, b"a");
    config.lost_after = Some(5);
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, config)], 8)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let outcome = generate(&mut client, text_request("", "x", 4000)).await;
    let status = outcome.error.as_ref().expect("a status");
    assert_eq!(status.code(), Code::Internal, "{status:?}");
    assert!(status.message().contains("lost"), "{status:?}");
    assert_eq!(outcome.reason(), Reason::Error);
    let status = generate(&mut client, text_request("", "x", 1)).await.error.unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_loads_and_the_step_ring_name_what_runs_where() {
    let served = two_models().await;
    let mut client = served.client().await;
    let models = client.list_models(proto::ListModelsRequest {}).await.unwrap().into_inner().models;
    let names: Vec<_> = models.iter().map(|model| model.name.as_str()).collect();
    assert_eq!(names, ["alpha", "beta"]);
    assert!(models[0].has_tokenizer && models[0].has_chat_template && !models[1].has_tokenizer);
    assert_eq!(models[0].eos_ids, [END]);
    assert_eq!(models[0].replicas[1].name, "alpha/1");
    assert_eq!(models[0].replicas[1].device.as_ref().unwrap().name, "Fake Banana");

    let devices = client.list_devices(proto::ListDevicesRequest {}).await.unwrap().into_inner();
    let on: Vec<_> = devices.devices.iter().map(|device| device.replicas.clone()).collect();
    assert_eq!(on, [["alpha/0"], ["alpha/1"], ["beta/0"]]);

    let mut request = text_request("alpha", "x", 20);
    request.device = "alpha/1".to_owned();
    generate(&mut client, request).await;
    let profile = |device: &str, last| proto::ProfileRequest {
        model: "alpha".to_owned(),
        device: device.to_owned(),
        last,
        ..Default::default()
    };
    let ring = client.profile(profile("alpha/1", 0)).await.unwrap().into_inner();
    assert_eq!(ring.replica, "alpha/1");
    assert_eq!(ring.steps[0].phase, "prefill");
    assert!(ring.steps.iter().any(|step| step.phase == "decode"));
    let decoded: u32 = ring.steps.iter().filter(|step| step.phase == "decode").map(|step| step.steps).sum();
    assert!(decoded >= 19, "{decoded} steps for 20 tokens");
    assert!(ring.steps.windows(2).all(|pair| pair[0].number < pair[1].number));
    assert!(ring.steps[0].cost.as_ref().unwrap().submits > 0.0);
    assert_eq!(ring.steps.iter().map(|step| step.tokens).sum::<u32>(), 20);
    assert_eq!(ring.device.as_ref().unwrap().name, "Fake Banana");
    for step in &ring.steps {
        let [submission] = &step.submissions[..] else { panic!("a fake submits once: {step:?}") };
        let [region] = &submission.regions[..] else { panic!("{step:?}") };
        assert!(region.name.starts_with(&step.phase) && region.runs == step.steps, "{step:?}");
        assert!(step.planned_ns <= region.begin_ns && region.begin_ns <= region.end_ns, "{step:?}");
        assert!(region.end_ns <= step.taken_ns && step.taken_ns <= ring.now_ns, "{step:?}");
    }
    let last = client.profile(profile("alpha/1", 2)).await.unwrap().into_inner();
    assert_eq!(last.steps, ring.steps[ring.steps.len() - 2..]);
    let status = client.profile(profile("cherry", 2)).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let kernels = |last, wait_seconds| proto::ProfileRequest { kernels: true, wait_seconds, ..profile("", last) };
    for (request, message) in [
        (kernels(257, 0.1), "last is 257, must be at most 256 with kernels"),
        (kernels(1, 61.0), "wait_seconds is 61, must be from 0 to 60"),
        (kernels(1, -1.0), "wait_seconds is -1, must be from 0 to 60"),
        (kernels(1, f64::NAN), "wait_seconds is NaN, must be from 0 to 60"),
    ] {
        let status = client.profile(request).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, message));
    }
    // Nothing runs, so the call ends after `wait_seconds`.
    let begun = Instant::now();
    let none = client.profile(kernels(4, 0.2)).await.unwrap().into_inner();
    assert!(none.steps.is_empty() && begun.elapsed() >= Duration::from_millis(200), "{none:?}");

    let load = |model: &str| proto::GetLoadRequest { model: model.to_owned() };
    let all = client.get_load(load("")).await.unwrap().into_inner().replicas;
    let names: Vec<_> = all.iter().map(|replica| replica.replica.as_str()).collect();
    assert_eq!(names, ["alpha/0", "alpha/1", "beta/0"]);
    assert!(all.iter().all(|replica| replica.pages_total == 512));
    let one = client.get_load(load("beta")).await.unwrap().into_inner().replicas;
    assert_eq!(one.len(), 1);
    assert_eq!(client.get_load(load("x")).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_and_text_go_both_ways() {
    let served = two_models().await;
    let mut client = served.client().await;
    let text = "né<|end|>x";
    let input = Some(proto::tokenize_request::Input::Text(text.to_owned()));
    let request = proto::TokenizeRequest { model: "alpha".to_owned(), input };
    let tokens = client.tokenize(request).await.unwrap().into_inner();
    assert_eq!(tokens.token_ids, [110, 0xc3, 0xa9, END, 120]);
    assert_eq!(tokens.text, text);
    for (skip_special, expected) in [(false, text), (true, "néx")] {
        let request =
            proto::DetokenizeRequest { model: "alpha".to_owned(), token_ids: tokens.token_ids.clone(), skip_special };
        assert_eq!(client.detokenize(request).await.unwrap().into_inner().text, expected);
    }
    let request = proto::TokenizeRequest { model: "alpha".to_owned(), input: None };
    assert_eq!(client.tokenize(request).await.unwrap_err().code(), Code::InvalidArgument);
}

async fn health(
    client: &mut tonic_health::pb::health_client::HealthClient<tonic::transport::Channel>,
    service: &str,
) -> Result<i32, Code> {
    let request = tonic_health::pb::HealthCheckRequest { service: service.to_owned() };
    let answer = client.check(request).await;
    answer.map(|answer| answer.into_inner().status).map_err(|status| status.code())
}

const SERVING: i32 = tonic_health::pb::health_check_response::ServingStatus::Serving as i32;
const NOT_SERVING: i32 = tonic_health::pb::health_check_response::ServingStatus::NotServing as i32;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_says_so_refuses_and_lets_streams_end() {
    let served = one_model(Duration::from_millis(5), b"abc").await;
    let channel = served.channel().await;
    let mut probe = tonic_health::pb::health_client::HealthClient::new(channel);
    assert_eq!(health(&mut probe, "").await, Ok(SERVING));
    assert_eq!(health(&mut probe, "ostinato.v1.Ostinato").await, Ok(SERVING));
    assert_eq!(health(&mut probe, "other").await, Err(Code::NotFound));
    // A health watch must not keep the server from ending.
    let request = tonic_health::pb::HealthCheckRequest { service: String::new() };
    let mut watch = probe.watch(request).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status, SERVING);

    let mut client = served.client().await;
    let mut stream = client.generate(text_request("", "x", 100)).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    let stopped = Instant::now();
    served.stop.cancel();
    assert_eq!(watch.message().await.unwrap().unwrap().status, NOT_SERVING);
    assert_eq!(health(&mut probe, "").await, Ok(NOT_SERVING));
    assert_eq!(health(&mut probe, "ostinato.v1.Ostinato").await, Ok(NOT_SERVING));
    // New requests are refused on old and on new connections.
    let status = generate(&mut client, text_request("", "x", 1)).await.error.unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains("draining"), "{status:?}");
    let status = generate(&mut served.client().await, text_request("", "x", 1)).await.error;
    assert_eq!(status.unwrap().code(), Code::Unavailable);

    let mut tokens = 0;
    let mut reason = None;
    while let Some(message) = stream.message().await.unwrap() {
        match message.event.unwrap() {
            proto::generate_response::Event::Delta(delta) => tokens += delta.token_ids.len(),
            proto::generate_response::Event::Finished(finished) => reason = Some(finished.reason()),
            proto::generate_response::Event::Started(_) | proto::generate_response::Event::Prompt(_) => {}
        }
    }
    assert_eq!((tokens, reason), (100, Some(Reason::Length)), "it ran to its end");
    let ended = tokio::time::timeout(Duration::from_secs(5), served.server).await;
    assert_eq!(ended.expect("the server ends").unwrap().unwrap().cut, 0);
    assert!(stopped.elapsed() < Duration::from_secs(10));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_grace_period_is_bounded() {
    let step = Duration::from_millis(20);
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, fake(step, b"a"))], 8)];
    let options = Options { drain: Duration::from_millis(200), ..Options::default() };
    let served = serve_models(models, options).await;
    let mut client = served.client().await;
    let stream = client.generate(text_request("", "x", 4000)).await.unwrap().into_inner();
    served.busy("alpha/0", 1, 0).await;
    let stopped = Instant::now();
    served.stop.cancel();
    let outcome = read(stream).await;
    let took = stopped.elapsed();
    assert!(took >= Duration::from_millis(190) && took < Duration::from_secs(3), "{took:?}");
    assert_eq!(outcome.error.expect("a status").code(), Code::Unavailable);
    let ended = tokio::time::timeout(Duration::from_secs(5), served.server).await;
    assert_eq!(ended.expect("the server ends").unwrap().unwrap().cut, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_lists_the_services_and_describes_ours() {
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let served = two_models().await;
    let mut client = ServerReflectionClient::new(served.channel().await);
    let ask = [
        MessageRequest::ListServices(String::new()),
        MessageRequest::FileContainingSymbol("ostinato.v1.Ostinato.Generate".to_owned()),
    ];
    let ask = ask.map(|message_request| tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message_request),
    });
    let answers = client.server_reflection_info(tokio_stream::iter(ask)).await.unwrap();
    let mut answers = answers.into_inner();
    let mut next = async || answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = next().await else { panic!("a list") };
    let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    for name in ["ostinato.v1.Ostinato", "vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let MessageResponse::FileDescriptorResponse(file) = next().await else { panic!("a file") };
    let bytes = file.file_descriptor_proto.concat();
    let has = |words: &[u8]| bytes.windows(words.len()).any(|window| window == words);
    assert!(has(b"ostinato.v1") && has(b"GenerateRequest"));
}

// ---- several samples ----

/// Returns a request for `n` randomly sampled outputs.
fn samples_request(n: u32, seed: u64, max_tokens: u32) -> proto::GenerateRequest {
    let mut request = text_request("", "x", max_tokens);
    request.sampling =
        Some(proto::Sampling { temperature: Some(1.0), seed: Some(seed), n: Some(n), ..Default::default() });
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_are_what_single_requests_with_their_seeds_give() {
    let served = one_model(FAST, b"").await;
    let mut client = served.client().await;
    let mut request = samples_request(5, 11, 30);
    request.request_id = "five".to_owned();
    let stream = client.generate(request).await.unwrap().into_inner();
    let samples = read_samples(stream, 5).await;
    assert!(samples.error.is_none(), "{samples:?}");
    let started = samples.started.as_ref().expect("one says that it started");
    assert_eq!((started.request_id.as_str(), started.prompt_tokens), ("five", 1));
    for (index, (ids, _)) in samples.outputs.iter().enumerate() {
        let finished = samples.finished[index].as_ref().expect("each ends");
        let usage = finished.usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.output_tokens as usize), (1, ids.len()));
        let single = generate(&mut client, samples_request(1, sample_seed(11, index as u64), 30)).await;
        assert_eq!(&single.ids(), ids, "sample {index}");
        assert_eq!(single.text(), samples.outputs[index].1, "sample {index}");
        assert_eq!(single.reason(), finished.reason());
        assert!(samples.outputs[..index].iter().all(|(other, _)| other != ids), "sample {index} is another's");
    }
    served.idle("alpha/0", Duration::from_secs(1)).await;

    // Greedy samples are equal. Without a seed, random samples differ.
    let mut request = samples_request(3, 0, 20);
    request.sampling.as_mut().unwrap().seed = None;
    let ids = read_samples(client.generate(request.clone()).await.unwrap().into_inner(), 3).await.ids();
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    request.sampling.as_mut().unwrap().temperature = None;
    let ids = read_samples(client.generate(request).await.unwrap().into_inner(), 3).await.ids();
    assert!(ids[0] == ids[1] && ids[1] == ids[2], "{ids:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_the_sample_that_met_it() {
    let served = one_model(FAST, b"").await;
    let mut client = served.client().await;
    let whole = read_samples(client.generate(samples_request(4, 3, 60)).await.unwrap().into_inner(), 4).await.ids();
    // A character that some samples contain and others do not.
    let has = |byte: u32| whole.iter().filter(|ids| ids.contains(&byte)).count();
    let byte = (32..127).find(|byte| (1..4).contains(&has(*byte))).expect("a character that some have");
    let mut request = samples_request(4, 3, 60);
    request.stopping.as_mut().unwrap().strings = vec![char::from_u32(byte).unwrap().to_string()];
    let samples = read_samples(client.generate(request).await.unwrap().into_inner(), 4).await;
    for (index, ids) in whole.iter().enumerate() {
        let finished = samples.finished[index].as_ref().expect("each ends");
        match ids.iter().position(|id| *id == byte) {
            Some(at) => {
                assert_eq!(samples.outputs[index].0, ids[..=at], "sample {index}");
                assert_eq!(finished.reason(), Reason::Stop);
                assert_eq!(finished.usage.unwrap().output_tokens as usize, at + 1);
            }
            None => {
                assert_eq!(&samples.outputs[index].0, ids, "sample {index}");
                assert!(!matches!(finished.stop_match, Some(StopMatch::StopString(_))), "{finished:?}");
                assert_eq!(finished.usage.unwrap().output_tokens as usize, ids.len());
            }
        }
    }
    served.idle("alpha/0", Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_are_taken_all_or_none() {
    let step = Duration::from_millis(5);
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, fake(step, b"a"))], 2)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let running = client.generate(samples_request(1, 0, 4000)).await.unwrap();
    served.busy("alpha/0", 1, 0).await;
    // One of two slots and two places in the queue is taken, so four samples do not fit.
    let status = client.generate(samples_request(4, 0, 10)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("4 samples: 1 unfinished, at most 4"), "{status:?}");
    served.busy("alpha/0", 1, 0).await;
    let stream = client.generate(samples_request(3, 0, 10)).await.unwrap().into_inner();
    let samples = read_samples(stream, 3).await;
    assert_eq!(samples.reasons(), [Some(Reason::Length); 3]);
    drop(running);
    served.idle("alpha/0", Duration::from_secs(1)).await;
}

/// Goal: whatever ends a request ends all its samples. Method: of four samples two run and two wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ends_a_request_ends_all_its_samples() {
    let served = one_model(Duration::from_millis(5), b"abc").await;
    let mut client = served.client().await;
    let abort = |id: &str| proto::AbortRequest { request_id: id.to_owned() };
    let named = |max_tokens| {
        let mut request = samples_request(4, 0, max_tokens);
        request.request_id = "four".to_owned();
        request
    };

    let stream = client.generate(named(4000)).await.unwrap().into_inner();
    served.busy("alpha/0", 2, 2).await;
    client.abort(abort("four")).await.unwrap();
    let samples = read_samples(stream, 4).await;
    assert_eq!(samples.reasons(), [Some(Reason::Aborted); 4]);
    assert!(samples.error.is_none(), "{samples:?}");
    served.idle("alpha/0", Duration::from_secs(1)).await;

    // An abort works even after the first sample, which has the request's own id, has ended. Until all have ended, the
    // id cannot be used again.
    let stream = client.generate(named(60)).await.unwrap().into_inner();
    served.busy("alpha/0", 2, 0).await;
    let status = generate(&mut client, named(1)).await.error.unwrap();
    assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");
    client.abort(abort("four")).await.unwrap();
    let reasons = read_samples(stream, 4).await.reasons();
    assert_eq!(reasons[2..], [Some(Reason::Aborted); 2]);
    assert_eq!(reasons[..2], [Some(Reason::Length); 2]);

    let mut timed = Request::new(named(4000));
    timed.set_timeout(Duration::from_millis(100));
    let samples = read_samples(client.generate(timed).await.unwrap().into_inner(), 4).await;
    assert_eq!(samples.reasons(), [Some(Reason::DeadlineExceeded); 4]);
    assert_eq!(samples.error.expect("a status").code(), Code::DeadlineExceeded);
    served.idle("alpha/0", Duration::from_secs(1)).await;

    let stream = client.generate(named(4000)).await.unwrap();
    served.busy("alpha/0", 2, 2).await;
    drop(stream);
    served.idle("alpha/0", Duration::from_secs(1)).await;
}

/// Goal: a client that reads several samples too slowly loses all of them. Method: as with one sample; the number of
/// buffered events is multiplied by the number of samples.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_of_samples_loses_them_all() {
    let mut config = fake(Duration::from_micros(20), b"abcdefgh");
    config.capacity.context = 1 << 20;
    config.capacity.pages = 1 << 16;
    config.capacity.run_ahead = 32;
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, config)], 8)];
    let served = serve_models(models, Options { stream_buffer: 32, ..Options::default() }).await;
    let endpoint = tonic::transport::Endpoint::new(served.address.clone()).unwrap();
    let channel = endpoint.initial_stream_window_size(1024).connect().await.unwrap();
    let mut client = proto::ostinato_client::OstinatoClient::new(channel);
    let mut request = samples_request(4, 0, 500_000);
    request.output = Some(proto::Output { logprobs: Some(20), ..Default::default() });
    let stream = client.generate(request).await.unwrap().into_inner();
    served.idle("alpha/0", Duration::from_secs(20)).await;
    let samples = read_samples(stream, 4).await;
    let status = samples.error.as_ref().expect("an error after what was kept");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("128 events"), "{status:?}");
    assert_eq!(samples.reasons(), [None; 4]);
}

// ---- limits of a client, and where its prompts go ----

/// Serves one model of two slots with a limit of requests per client.
async fn limited(limit: u32, trust_client_header: bool) -> Served {
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, fake(Duration::from_millis(5), b"a"))], 8)];
    let options = Options { client_limit: Some(limit), trust_client_header, ..Options::default() };
    serve_models(models, options).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_may_have_so_many_requests_unfinished() {
    let served = limited(3, false).await;
    let (mut client, mut other) = (served.client().await, served.client().await);
    let first = client.generate(samples_request(2, 0, 4000)).await.unwrap();
    served.busy("alpha/0", 2, 0).await;
    // Another connection from the same address is the same client, whatever its header says.
    let mut request = Request::new(samples_request(2, 0, 4));
    request.metadata_mut().insert("ostinato-client", "somebody else".parse().unwrap());
    let status = other.generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    let words = "client at 127.0.0.1 has 2 unfinished requests and asks for 2 more; the limit is 3";
    assert_eq!(status.message(), words);
    let second = other.generate(samples_request(1, 0, 4000)).await.unwrap();
    let status = generate(&mut client, text_request("", "x", 1)).await.error.unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    // A request that is refused for another reason takes no place, and one whose client leaves frees its place.
    drop((first, second));
    served.idle("alpha/0", Duration::from_secs(1)).await;
    for _ in 0..5 {
        let status = generate(&mut client, text_request("", "x", 0)).await.error.unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    }
    let stream = client.generate(samples_request(3, 0, 4)).await.unwrap().into_inner();
    assert_eq!(read_samples(stream, 3).await.reasons(), [Some(Reason::Length); 3]);

    // After the last event of a stream, the client may send its next request at once.
    let served = limited(1, false).await;
    let mut client = served.client().await;
    for round in 0..30 {
        let outcome = generate(&mut client, text_request("", "x", 1)).await;
        assert!(outcome.error.is_none(), "round {round}: {:?}", outcome.error);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trusted_gateway_names_its_clients() {
    let served = limited(1, true).await;
    let mut client = served.client().await;
    let named = |name: &str| {
        let mut request = Request::new(samples_request(1, 0, 4000));
        request.metadata_mut().insert("ostinato-client", name.parse().unwrap());
        request
    };
    let anna = client.generate(named("anna")).await.unwrap();
    let berta = client.generate(named("berta")).await.unwrap();
    let nameless = client.generate(samples_request(1, 0, 4000)).await.unwrap();
    for (request, who) in [(named("anna"), "\"anna\""), (Request::new(samples_request(1, 0, 1)), "at 127.0.0.1")] {
        let status = client.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        assert!(status.message().contains(who), "{status:?}");
    }
    assert_eq!(client.generate(named("")).await.unwrap_err().code(), Code::InvalidArgument);
    drop(anna);
    let until = Instant::now() + Duration::from_secs(5);
    while let Err(status) = client.generate(named("anna")).await {
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(Instant::now() < until, "her place is not free");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop((berta, nameless));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_go_where_their_beginning_was_and_new_ones_take_turns() {
    let served = two_models().await;
    let mut client = served.client().await;
    let mut ask = async |ids: &[u32], device: &str, salt: &str| {
        let mut request = token_request("alpha", ids, 2);
        request.device = device.to_owned();
        request.cache_salt = salt.to_owned();
        let started = generate(&mut client, request).await.started.expect("it is served");
        // The request must not count as load when the next one is routed.
        served.idle(&started.replica, Duration::from_secs(1)).await;
        started.replica
    };
    let talk = |own: u32, length: usize| vec![own; length];
    assert_eq!(ask(&talk(1, 64), "", "").await, "alpha/0");
    assert_eq!(ask(&talk(2, 64), "", "").await, "alpha/1");
    for length in [80, 100, 130, 200] {
        assert_eq!(ask(&talk(2, length), "", "").await, "alpha/1");
        assert_eq!(ask(&talk(1, length), "", "").await, "alpha/0");
        assert_eq!(ask(&talk(1, length), "", "").await, "alpha/0");
    }
    // The same prompt under another cache salt counts as new, and a device selector overrides the affinity.
    assert_eq!(ask(&talk(1, 200), "", "other").await, "alpha/1");
    assert_eq!(ask(&talk(1, 200), "alpha/1", "").await, "alpha/1");
    assert_eq!(ask(&talk(2, 200), "0", "").await, "alpha/0");

    // If the preferred replica has no room, the request goes to the other one. It is refused only if neither has room.
    let step = Duration::from_millis(5);
    let both = vec![(0, fake(step, b"a")), (1, fake(step, b"b"))];
    let served = serve_models(vec![model("alpha", None, both, 1)], Options::default()).await;
    let mut client = served.client().await;
    let mut streams = Vec::new();
    let mut places = Vec::new();
    for _ in 0..6 {
        let mut stream = client.generate(token_request("", &[1; 2000], 1000)).await.unwrap().into_inner();
        if let Ok(Ok(Some(message))) = tokio::time::timeout(Duration::from_millis(300), stream.message()).await
            && let Some(proto::generate_response::Event::Started(started)) = message.event
        {
            places.push(started.replica);
        }
        streams.push(stream);
    }
    assert_eq!(places, ["alpha/0", "alpha/0", "alpha/1", "alpha/1"], "two run on each, and one waits");
    let status = client.generate(token_request("", &[1; 2000], 1000)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
}

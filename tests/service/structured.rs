//! Goal: constraints on outputs have the same effect through both gRPC contracts and for any number of samples. A
//! constraint that cannot be followed is INVALID_ARGUMENT with the contract's own field name and leaves nothing behind.
//! A large constraint of one request does not stop others. Method: servers on loopback with fake devices, which draw
//! any token that a mask allows.

use crate::serving::{END, Served, fake, model, serve_models, tokenizer};
use ostinato::service::proto::constraint::{AnyJsonObject, Choice, Kind};
use ostinato::service::proto::generate_response::Event;
use ostinato::service::proto::ostinato_client::OstinatoClient;
use ostinato::service::proto::vllm::grpc::engine as contract;
use ostinato::service::proto::vllm::grpc::engine::vllm_engine_client::VllmEngineClient;
use ostinato::service::proto::{self, FinishReason};
use ostinato::service::server::Options;
use std::time::Duration;
use tonic::{Code, Status};

const SCHEMA: &str = r#"{
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "count"],
    "additionalProperties": false
}"#;

async fn server() -> Served {
    // Without a script, the fake device's output depends on the allowed tokens.
    let device = fake(Duration::from_micros(300), b"");
    serve_models(vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 8)], Options::default()).await
}

fn ours(kind: Kind, samples: u32) -> proto::GenerateRequest {
    proto::GenerateRequest {
        prompt: Some(proto::generate_request::Prompt::Text("give me".to_owned())),
        sampling: Some(proto::Sampling {
            temperature: Some(1.0),
            seed: Some(5),
            n: Some(samples),
            ..Default::default()
        }),
        stopping: Some(proto::Stopping { max_tokens: Some(600), ..Default::default() }),
        constraint: Some(proto::Constraint { kind: Some(kind), ..Default::default() }),
        ..Default::default()
    }
}

fn theirs(constraint: contract::sampling_params::Constraint) -> contract::GenerateRequest {
    let tokens = contract::TokenizedInput {
        original_text: String::new(),
        input_ids: "give me".bytes().map(u32::from).collect(),
    };
    contract::GenerateRequest {
        input: Some(contract::generate_request::Input::Tokenized(tokens)),
        sampling_params: Some(contract::SamplingParams {
            max_tokens: Some(600),
            temperature: Some(1.0),
            seed: Some(5),
            constraint: Some(constraint),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Returns the texts of all samples, which must have finished with `Stop`.
async fn ask_ours(served: &Served, request: proto::GenerateRequest) -> Result<Vec<String>, Status> {
    let mut client = OstinatoClient::new(served.channel().await);
    let mut texts = vec![String::new(); request.sampling.as_ref().map_or(1, |sampling| sampling.n()) as usize];
    let mut stream = client.generate(request).await?.into_inner();
    while let Some(message) = stream.message().await? {
        match message.event {
            Some(Event::Delta(delta)) => texts[delta.index as usize].push_str(&delta.text),
            Some(Event::Finished(finished)) => assert_eq!(finished.reason(), FinishReason::Stop, "{texts:?}"),
            _ => {}
        }
    }
    Ok(texts)
}

async fn ask_theirs(served: &Served, request: contract::GenerateRequest) -> Result<String, Status> {
    let mut client = VllmEngineClient::new(served.channel().await);
    let mut stream = client.generate(request).await?.into_inner();
    let mut bytes = None;
    while let Some(message) = stream.message().await? {
        if let Some(contract::generate_response::Response::Complete(complete)) = message.response {
            assert_eq!(complete.finish_reason, "stop");
            let ids = complete.output_ids.into_iter().filter(|id| *id != END);
            bytes = Some(ids.map(|id| u8::try_from(id).expect("a byte")).collect::<Vec<u8>>());
        }
    }
    Ok(String::from_utf8(bytes.expect("a complete answer")).expect("text"))
}

fn is_answer(text: &str) -> bool {
    let Ok(serde_json::Value::Object(answer)) = serde_json::from_str(text) else { return false };
    answer.len() == 2 && answer["ok"].is_boolean() && answer["count"].as_u64().is_some_and(|count| count < 100)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_constraint_holds_through_both_contracts() {
    use contract::sampling_params::Constraint;
    let served = server().await;
    type Check = fn(&str) -> bool;
    let object: Check = |text| matches!(serde_json::from_str(text), Ok(serde_json::Value::Object(_)));
    let fruit: Check = |text| ["apple", "pear"].contains(&text);
    let grammar = "root ::= \"<\" [a-c]{2,4} \">\"".to_owned();
    let tagged: Check = |text| {
        let inside = text.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
        inside
            .is_some_and(|inside| (2..=4).contains(&inside.len()) && inside.bytes().all(|b| (b'a'..=b'c').contains(&b)))
    };
    let code: Check = |text| text.len() == 5 && text.starts_with("X-") && text[2..].bytes().all(|b| b.is_ascii_digit());
    let fruits = || vec!["apple".to_owned(), "pear".to_owned()];
    let kinds: Vec<(Kind, Constraint, Check)> = vec![
        (Kind::JsonSchema(SCHEMA.to_owned()), Constraint::JsonSchema(SCHEMA.to_owned()), is_answer),
        (Kind::Regex("X-[0-9]{3}".to_owned()), Constraint::Regex("X-[0-9]{3}".to_owned()), code),
        (Kind::Grammar(grammar.clone()), Constraint::Grammar(grammar), tagged),
        (
            Kind::Choice(Choice { texts: fruits() }),
            Constraint::Choice(contract::ChoiceConstraint { choices: fruits() }),
            fruit,
        ),
    ];
    for (kind, constraint, check) in kinds {
        let texts = ask_ours(&served, ours(kind, 6)).await.unwrap();
        assert!(texts.iter().all(|text| check(text)), "{texts:?}");
        let text = ask_theirs(&served, theirs(constraint)).await.unwrap();
        assert!(check(&text), "{text:?}");
        // The same prompt, seed and constraint give the same output.
        assert_eq!(text, texts[0]);
    }
    // For "any JSON object" only an output that is complete can be parsed.
    let mut any = ours(Kind::JsonObject(AnyJsonObject {}), 1);
    any.stopping.as_mut().unwrap().strings = vec!["}".to_owned()];
    let texts = ask_ours(&served, any).await.unwrap();
    assert!(texts[0].starts_with('{') || object(&texts[0]), "{texts:?}");
    served.idle("alpha/0", Duration::from_secs(2)).await;
}

/// Goal: structural tags constrain their parts of an output and leave the rest free. Method: every lower-case letter
/// begins a tag, so that a random output contains some.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn structural_tags_hold_through_both_contracts() {
    use contract::sampling_params::Constraint;
    use serde_json::json;
    let served = server().await;
    let schema: serde_json::Value = serde_json::from_str(SCHEMA).unwrap();
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let structure = |letter: &String| json!({"begin": format!("{letter}="), "schema": &schema, "end": ";"});
    let structures: Vec<_> = letters.iter().map(structure).collect();
    let older = json!({"triggers": &letters, "structures": structures});
    let content = json!({"type": "json_schema", "json_schema": &schema});
    let tag = |letter: &String| json!({"type": "tag", "begin": format!("{letter}="), "content": content, "end": ";"});
    let tags: Vec<_> = letters.iter().map(tag).collect();
    let format = json!({"type": "triggered_tags", "triggers": &letters, "tags": tags, "at_least_one": true});
    let newer = json!({"type": "structural_tag", "format": format});
    for (tag, begins) in [(older, false), (newer, true)] {
        let mut request = theirs(Constraint::StructuralTag(tag.to_string()));
        request.sampling_params.as_mut().unwrap().ignore_eos = true;
        let mut client = VllmEngineClient::new(served.channel().await);
        let mut stream = client.generate(request).await.unwrap().into_inner();
        let mut ids = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            if let Some(contract::generate_response::Response::Complete(complete)) = message.response {
                ids = complete.output_ids;
            }
        }
        let bytes: Vec<u8> = ids.into_iter().map(|id| u8::try_from(id).expect("a byte")).collect();
        let text = String::from_utf8_lossy(&bytes);
        let mut rest = &*text;
        let mut answers = 0;
        while let Some(at) = rest.find(|c: char| c.is_ascii_lowercase()) {
            assert!(at == 0 || answers > 0 || !begins, "{text:?}");
            // The last tag may be incomplete.
            let Some((answer, behind)) = rest[at + 1..].split_once(';') else { break };
            assert!(answer.strip_prefix('=').is_some_and(is_answer), "{answer:?} in {text:?}");
            rest = behind;
            answers += 1;
        }
        assert!(answers > 3, "{answers} tags in {text:?}");
    }
    // The same constraint through our own contract.
    let cut =
        json!({"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}});
    let texts = ask_ours(&served, ours(Kind::StructuralTag(cut.to_string()), 3)).await.unwrap();
    for text in &texts {
        let inside = text.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
        assert!(inside.is_some_and(is_answer), "{text:?}");
    }
    let tag = json!({"type": "structural_tag", "format": {"type": "dispatch"}});
    let status = ask_ours(&served, ours(Kind::StructuralTag(tag.to_string()), 1)).await.unwrap_err();
    assert!(status.message().starts_with("constraint.structural_tag: "), "{status:?}");
    let status = ask_theirs(&served, theirs(Constraint::StructuralTag(tag.to_string()))).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("sampling_params.structural_tag: "), "{status:?}");
    assert!(status.message().contains("\"dispatch\", which is not served"), "{status:?}");
    served.idle("alpha/0", Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_followed_is_refused_under_its_name() {
    use contract::sampling_params::Constraint;
    let served = server().await;
    let bombs = |depth: usize| format!("{}true{}", "{\"not\":".repeat(depth), "}".repeat(depth));
    let many: String = format!(
        "{{\"type\": \"object\", \"properties\": {{{}}}}}",
        (0..20_000).map(|i| format!("\"p{i}\": {{\"type\": \"integer\"}}")).collect::<Vec<_>>().join(", ")
    );
    let cases: Vec<(Kind, Constraint, &str, &str)> = vec![
        (Kind::JsonSchema("{".into()), Constraint::JsonSchema("{".into()), "json_schema", "not JSON"),
        (Kind::JsonSchema(bombs(100_000)), Constraint::JsonSchema(bombs(100_000)), "json_schema", "at most 262144"),
        (Kind::JsonSchema(bombs(3_000)), Constraint::JsonSchema(bombs(3_000)), "json_schema", "recursion"),
        (Kind::JsonSchema(many.clone()), Constraint::JsonSchema(many), "json_schema", "at most 262144"),
        (Kind::Regex("(a".into()), Constraint::Regex("(a".into()), "regex", ""),
        (
            Kind::Grammar("root ::= x".into()),
            Constraint::Grammar("root ::= x".into()),
            "grammar",
            "\"x\" is not defined",
        ),
        (
            Kind::Choice(Choice { texts: Vec::new() }),
            Constraint::Choice(contract::ChoiceConstraint { choices: Vec::new() }),
            "choice",
            "0 choices",
        ),
    ];
    for (kind, constraint, field, words) in cases {
        let status = ask_ours(&served, ours(kind, 1)).await.expect_err(words);
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with(&format!("constraint.{field}: ")), "{status:?}");
        assert!(status.message().contains(words), "{status:?}");
        let status = ask_theirs(&served, theirs(constraint)).await.expect_err(words);
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with(&format!("sampling_params.{field}: ")), "{status:?}");
        assert!(status.message().contains(words), "{status:?}");
    }
    let mut empty = ours(Kind::JsonObject(AnyJsonObject {}), 1);
    empty.constraint = Some(proto::Constraint::default());
    let status = ask_ours(&served, empty).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("constraint.kind is missing"), "{status:?}");
    served.idle("alpha/0", Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_without_a_tokenizer_says_that_it_cannot_follow() {
    let device = fake(Duration::from_micros(300), b"");
    let served = serve_models(vec![model("ids", None, vec![(0, device)], 8)], Options::default()).await;
    let mut request = ours(Kind::Regex("a".into()), 1);
    request.prompt = Some(proto::generate_request::Prompt::Tokens(proto::TokenIds { ids: vec![1, 2] }));
    let status = ask_ours(&served, request).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("constraint.regex"), "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_takes_its_constraint_with_it() {
    let served = server().await;
    for _ in 0..10 {
        let mut client = OstinatoClient::new(served.channel().await);
        let request = ours(Kind::Regex("[a-z]{550,}".into()), 2);
        let mut stream = client.generate(request).await.unwrap().into_inner();
        while let Some(message) = stream.message().await.unwrap() {
            if matches!(message.event, Some(Event::Delta(_))) {
                break;
            }
        }
        drop(stream);
    }
    served.idle("alpha/0", Duration::from_secs(2)).await;
    let texts = ask_ours(&served, ours(Kind::JsonSchema(SCHEMA.into()), 1)).await.unwrap();
    assert!(is_answer(&texts[0]));
}

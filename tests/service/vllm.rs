//! Tests of the routers' engine contract, `vllm.grpc.engine.VllmEngine`, with a real gRPC client, a server on loopback
//! and fake devices. `tests/program/fleet.rs` runs a real router in front of two servers.

use crate::serving::*;
use ostinato::engine::fake::{FakeConfig, FakeExecutor, scored};
use ostinato::engine::request::Scored;
use ostinato::host::ServedModel;
use ostinato::model::text::Text;
use ostinato::replica::rebuild::Rebuild;
use ostinato::service::proto;
use ostinato::service::proto::smg::grpc::common;
use ostinato::service::proto::vllm::grpc::engine as contract;
use ostinato::service::server::Options;
use ostinato::service::vllm::SERVICE;
use sha2::Digest;
use std::collections::BTreeMap;
use std::io::Read;
use std::time::{Duration, Instant};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use contract::generate_complete::MatchedStop;
use contract::generate_request::Input;
use contract::generate_response::Response;
use contract::sampling_params::Constraint;
use contract::vllm_engine_client::VllmEngineClient;
use proto::generate_request::Prompt;

const FAST: Duration = Duration::from_micros(100);

async fn client(served: &Served) -> VllmEngineClient<Channel> {
    VllmEngineClient::new(served.channel().await)
}

fn alpha(replicas: Vec<(usize, FakeConfig)>) -> ServedModel {
    model("alpha", Some(tokenizer(true)), replicas, 8)
}

/// Serves one model on one device.
async fn one(step: Duration, script: &[u8]) -> Served {
    serve_models(vec![alpha(vec![(0, fake(step, script))])], Options::default()).await
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Returns a request for `max_tokens` tokens after a prompt whose token ids are the bytes of a text.
fn request(prompt: &str, max_tokens: u32) -> contract::GenerateRequest {
    let tokens = contract::TokenizedInput { original_text: "not looked at".to_owned(), input_ids: ids(prompt) };
    contract::GenerateRequest {
        input: Some(Input::Tokenized(tokens)),
        sampling_params: Some(contract::SamplingParams { max_tokens: Some(max_tokens), ..Default::default() }),
        stream: true,
        ..Default::default()
    }
}

fn params(request: &mut contract::GenerateRequest) -> &mut contract::SamplingParams {
    request.sampling_params.as_mut().unwrap()
}

/// The contents of a response stream that was read to its end.
#[derive(Debug, Default)]
struct Told {
    chunks: Vec<contract::GenerateStreamChunk>,
    completes: BTreeMap<u32, contract::GenerateComplete>,
    error: Option<Status>,
}

impl Told {
    fn ids(&self, index: u32) -> Vec<u32> {
        let of = self.chunks.iter().filter(|chunk| chunk.index == index);
        of.flat_map(|chunk| chunk.token_ids.clone()).collect()
    }

    #[track_caller]
    fn complete(&self) -> &contract::GenerateComplete {
        assert!(self.error.is_none() && self.completes.len() == 1, "{self:?}");
        &self.completes[&0]
    }
}

/// Reads a stream to its end. Checks that each chunk has its own token count, and that nothing follows the end of a
/// sample.
async fn read_told(mut stream: tonic::Streaming<contract::GenerateResponse>) -> Told {
    let mut told = Told::default();
    loop {
        match stream.message().await {
            Ok(None) => return told,
            Err(status) => {
                told.error = Some(status);
                return told;
            }
            Ok(Some(message)) => match message.response.expect("a response") {
                Response::Chunk(chunk) => {
                    assert!(!told.completes.contains_key(&chunk.index), "{chunk:?}");
                    assert_eq!(chunk.completion_tokens as usize, chunk.token_ids.len());
                    assert!(!chunk.token_ids.is_empty());
                    let first = chunk.index == 0 && told.ids(0).is_empty();
                    assert!(first || chunk.input_logprobs.is_none(), "the prompt comes first: {chunk:?}");
                    told.chunks.push(chunk);
                }
                Response::Complete(complete) => {
                    assert_eq!(complete.completion_tokens as usize, complete.output_ids.len());
                    let before = told.completes.insert(complete.index, complete);
                    assert!(before.is_none(), "{before:?}");
                }
            },
        }
    }
}

async fn ask(
    client: &mut VllmEngineClient<Channel>,
    request: impl tonic::IntoRequest<contract::GenerateRequest>,
) -> Told {
    match client.generate(request).await {
        Ok(response) => read_told(response.into_inner()).await,
        Err(status) => Told { error: Some(status), ..Told::default() },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_come_in_chunks_and_one_end_or_all_at_once() {
    let served = one(FAST, b"abcdefgh").await;
    let mut client = client(&served).await;
    let streamed = ask(&mut client, request("hello", 12)).await;
    assert_eq!(streamed.ids(0), ids("abcdefghabcd"));
    assert!(streamed.chunks.iter().all(|chunk| chunk.prompt_tokens == 5 && chunk.output_logprobs.is_none()));
    let complete = streamed.complete();
    assert_eq!(complete.output_ids, ids("abcdefghabcd"));
    assert_eq!((complete.finish_reason.as_str(), &complete.matched_stop), ("length", &None));
    assert_eq!((complete.prompt_tokens, complete.completion_tokens), (5, 12));

    let mut whole = request("hello", 12);
    whole.stream = false;
    let whole = ask(&mut client, whole).await;
    assert!(whole.chunks.is_empty(), "{whole:?}");
    assert_eq!(whole.complete(), complete);

    // A text prompt is encoded as by our own service.
    let mut text = request("", 12);
    text.input = Some(Input::Text("hello".to_owned()));
    assert_eq!(ask(&mut client, text).await.complete(), complete);
}

/// Goal: requests through both contracts give the same tokens and usage. Method: the fake device derives tokens from
/// the prompt, the index and, unless it samples greedily, the seed. So equal tokens mean that seed and temperature
/// arrived.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_request_gives_the_same_tokens_and_usage_as_our_own_service() {
    let served = one(FAST, b"").await;
    let (mut theirs, mut ours) = (client(&served).await, served.client().await);
    let prompt = "the same prompt, long enough for pages of its own: ".repeat(3);
    // The routers' contract: temperature, seed; our own: temperature, seed.
    let cases: [(Option<f32>, i32, f32, u64); 4] =
        [(None, 7, 1.0, 7), (Some(0.5), 7, 0.5, 7), (Some(0.0), 7, 0.0, 0), (None, -5, 1.0, u64::MAX - 4)];
    let mut all = Vec::new();
    for (round, (temperature, seed, our_temperature, our_seed)) in cases.into_iter().enumerate() {
        let mut request = request(&prompt, 20);
        *params(&mut request) = contract::SamplingParams {
            temperature,
            seed: Some(seed),
            max_tokens: Some(20),
            ignore_eos: true,
            min_p: 0.1,
            presence_penalty: 0.5,
            ..Default::default()
        };
        let told = ask(&mut theirs, request).await;
        let mut request = token_request("alpha", &ids(&prompt), 20);
        request.sampling = Some(proto::Sampling {
            temperature: Some(our_temperature),
            seed: Some(our_seed),
            min_p: Some(0.1),
            presence_penalty: Some(0.5),
            ..Default::default()
        });
        request.stopping.as_mut().unwrap().ignore_eos = true;
        let outcome = generate(&mut ours, request).await;
        let (complete, usage) = (told.complete(), outcome.finished.as_ref().unwrap().usage.unwrap());
        assert_eq!(complete.output_ids, outcome.ids(), "round {round}");
        assert_eq!(complete.completion_tokens, usage.output_tokens);
        assert_eq!(complete.prompt_tokens, usage.prompt_tokens);
        assert_eq!((complete.spec_draft_tokens, complete.spec_accepted_tokens), (0, 0));
        // In the first round the routers' request is the first with this prompt; later ones find it in the prefix
        // cache.
        let cached = if round == 0 { 0 } else { usage.cached_tokens };
        assert_eq!(complete.cached_tokens, cached, "round {round}");
        assert!(usage.cached_tokens >= 144, "{usage:?}");
        assert!(told.chunks.iter().all(|chunk| chunk.cached_tokens == cached));
        all.push(outcome.ids());
    }
    assert!(all[0] == all[1] && all[0] != all[2] && all[0] != all[3], "the fake tells greedy and seeds apart");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_come_interleaved_and_each_ends_once() {
    let served = one(Duration::from_millis(1), b"").await;
    let (mut theirs, mut ours) = (client(&served).await, served.client().await);
    let mut message = request("x", 40);
    *params(&mut message) =
        contract::SamplingParams { n: 2, seed: Some(11), max_tokens: Some(40), ignore_eos: true, ..Default::default() };
    let told = ask(&mut theirs, message.clone()).await;
    assert_eq!(told.completes.keys().copied().collect::<Vec<_>>(), [0, 1]);
    let turns: Vec<u32> = told.chunks.iter().map(|chunk| chunk.index).collect();
    let changes = turns.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes > 2, "one came after the other: {turns:?}");
    message.stream = false;
    let whole = ask(&mut theirs, message).await;
    for index in 0..2 {
        let mut request = token_request("", &ids("x"), 40);
        let seed = Some(sample_seed(11, u64::from(index)));
        request.sampling = Some(proto::Sampling { temperature: Some(1.0), seed, ..Default::default() });
        request.stopping.as_mut().unwrap().ignore_eos = true;
        let single = generate(&mut ours, request).await.ids();
        assert_eq!((single.len(), &single), (40, &told.ids(index)));
        assert_eq!(&single, &told.completes[&index].output_ids);
        assert_eq!(&single, &whole.completes[&index].output_ids);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_strings_ids_and_the_end_of_sequence_end_it_and_say_so() {
    let served = one(Duration::from_millis(1), b"one two STOP three").await;
    let mut client = client(&served).await;
    for stream in [true, false] {
        let mut stopped = request("x", 4000);
        stopped.stream = stream;
        params(&mut stopped).stop = vec!["never".to_owned(), "STOP".to_owned()];
        let told = ask(&mut client, stopped).await;
        let complete = told.complete();
        assert_eq!(complete.output_ids, ids("one two STOP"), "up to the match");
        assert_eq!(complete.finish_reason, "stop");
        assert_eq!(complete.matched_stop, Some(MatchedStop::MatchedStopStr("STOP".to_owned())));
        assert_eq!(told.ids(0), if stream { ids("one two STOP") } else { vec![] });
        served.idle("alpha/0", Duration::from_secs(1)).await;
    }
    let mut stopped = request("x", 50);
    params(&mut stopped).stop_token_ids = vec![u32::from(b'n')];
    let told = ask(&mut client, stopped.clone()).await;
    assert_eq!((told.ids(0), told.complete().finish_reason.as_str()), (ids("on"), "stop"));
    assert_eq!(told.complete().matched_stop, Some(MatchedStop::MatchedTokenId(u32::from(b'n'))));
    // A stop id does not count before `min_tokens` tokens.
    params(&mut stopped).min_tokens = 5;
    assert_eq!(ask(&mut client, stopped).await.complete().completion_tokens, 20, "the n of the second \"one\"");

    let mut config = fake(FAST, b"xyz");
    config.script.push(END);
    let served = serve_models(vec![alpha(vec![(0, config)])], Options::default()).await;
    let mut client = VllmEngineClient::new(served.channel().await);
    let told = ask(&mut client, request("x", 50)).await;
    assert_eq!(told.complete().matched_stop, Some(MatchedStop::MatchedTokenId(END)));
    let mut on = request("x", 50);
    params(&mut on).ignore_eos = true;
    assert_eq!(ask(&mut client, on.clone()).await.complete().completion_tokens, 50);
    // Special tokens count as text for stop strings, unless they are to be skipped.
    params(&mut on).stop = vec!["z<|end|>x".to_owned()];
    let told = ask(&mut client, on.clone()).await;
    assert_eq!(told.complete().matched_stop, Some(MatchedStop::MatchedStopStr("z<|end|>x".to_owned())));
    assert_eq!(told.complete().completion_tokens, 5);
    params(&mut on).skip_special_tokens = true;
    assert_eq!(ask(&mut client, on.clone()).await.complete().completion_tokens, 50);
    params(&mut on).stop = vec!["zx".to_owned()];
    assert_eq!(ask(&mut client, on).await.complete().completion_tokens, 5);
}

/// Goal: the space of the first token after a prompt is part of the text, for clients of our own service and for stop
/// strings of both contracts. Method: a tokenizer whose decoder removes the first space of a text, as those of
/// SentencePiece do. The device repeats " ab b".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_keeps_the_space_that_it_begins_with() {
    let mut config = fake(FAST, &[]);
    config.script = vec![4, 3, 5];
    let served =
        serve_models(vec![model("alpha", Some(sentencepiece()), vec![(0, config)], 8)], Options::default()).await;
    let mut ours = served.client().await;
    let text = text_request("alpha", "a b", 6);
    let message = proto::ChatMessage { role: "user".to_owned(), content: "a".to_owned(), ..Default::default() };
    let chat = proto::Chat { messages: vec![message], ..Default::default() };
    let chat = proto::GenerateRequest { prompt: Some(Prompt::Chat(chat)), ..text.clone() };
    for (request, told) in [
        (text.clone(), " ab b ab b"),
        (chat, " ab b ab b"),
        (token_request("alpha", &[1, 4, 6], 6), " ab b ab b"),
        // No text precedes the output, and decoders remove the space of a text's first token.
        (token_request("alpha", &[1], 6), "ab b ab b"),
    ] {
        let outcome = generate(&mut ours, request.clone()).await;
        assert_eq!(outcome.text(), told, "{request:?}");
        let mut several = request;
        several.sampling = Some(proto::Sampling { n: Some(3), ..Default::default() });
        let samples = read_samples(ours.generate(several).await.unwrap().into_inner(), 3).await;
        assert!(samples.outputs.iter().all(|(_, text)| text == told), "{samples:?}");
    }
    let mut stopped = text;
    stopped.stopping.as_mut().unwrap().strings = vec![" a".to_owned()];
    let outcome = generate(&mut ours, stopped).await;
    assert_eq!((outcome.text().as_str(), outcome.reason()), ("", proto::FinishReason::Stop));

    let mut theirs = client(&served).await;
    for skip_special_tokens in [true, false] {
        let mut stopped = request("", 6);
        let tokens = contract::TokenizedInput { original_text: String::new(), input_ids: vec![1, 4, 5] };
        stopped.input = Some(Input::Tokenized(tokens));
        params(&mut stopped).stop = vec![" a".to_owned()];
        params(&mut stopped).skip_special_tokens = skip_special_tokens;
        let told = ask(&mut theirs, stopped).await;
        assert_eq!(told.complete().matched_stop, Some(MatchedStop::MatchedStopStr(" a".to_owned())));
        assert_eq!(told.complete().completion_tokens, 1);
    }
}

/// Goal: if stop strings are given, each chunk contains whole characters. Method: the contract returns ids, which are
/// then held back until their text is complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_chunk_splits_a_character_where_text_is_looked_at() {
    let text = "aé€𝄞z";
    let served = one(FAST, text.as_bytes()).await;
    let mut client = client(&served).await;
    let repeated = text.repeat(20);
    let mut message = request("x", repeated.len() as u32);
    params(&mut message).stop = vec!["never".to_owned()];
    let told = ask(&mut client, message).await;
    assert_eq!(told.ids(0), ids(&repeated));
    for chunk in &told.chunks {
        let bytes: Vec<u8> = chunk.token_ids.iter().map(|id| *id as u8).collect();
        assert!(String::from_utf8(bytes.clone()).is_ok(), "{bytes:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_go_with_their_tokens() {
    let served = one(FAST, b"abc").await;
    let mut client = client(&served).await;
    for top in [0, 3] {
        let mut message = request("x", 12);
        params(&mut message).logprobs = Some(top);
        let told = ask(&mut client, message.clone()).await;
        let mut streamed = contract::OutputLogProbs::default();
        for chunk in &told.chunks {
            let logprobs = chunk.output_logprobs.as_ref().expect("they were asked for");
            assert_eq!(logprobs.token_ids, chunk.token_ids);
            streamed.token_ids.extend(&logprobs.token_ids);
            streamed.token_logprobs.extend(&logprobs.token_logprobs);
            streamed.top_logprobs.extend(logprobs.top_logprobs.clone());
        }
        assert!(told.complete().output_logprobs.is_none(), "they were in the chunks");
        assert_eq!((streamed.token_ids.len(), streamed.token_logprobs.len()), (12, 12));
        assert_eq!(streamed.top_logprobs.len(), if top == 0 { 0 } else { 12 });
        assert!(streamed.top_logprobs.iter().all(|top| top.values.len() == 3 && top.token_ids.len() == 3));
        message.stream = false;
        assert_eq!(ask(&mut client, message).await.complete().output_logprobs, Some(streamed));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompts_log_probabilities_come_with_the_first_chunk_or_at_the_end() {
    let served = one(FAST, b"abc").await;
    let mut client = client(&served).await;
    let text = "what is probable";
    let prompt = ids(text);
    for top in [0, 2] {
        let mut message = request(text, 5);
        params(&mut message).prompt_logprobs = Some(top);
        params(&mut message).n = 2;
        let told = ask(&mut client, message.clone()).await;
        let first = told.chunks.iter().find(|chunk| chunk.index == 0).unwrap();
        let input = first.input_logprobs.clone().expect("it was asked for");
        assert!(told.completes.values().all(|complete| complete.input_logprobs.is_none()), "it was in a chunk");
        let wanted: Vec<Scored> =
            (1..prompt.len()).map(|at| scored(&prompt[..at], prompt[at], top as u32, VOCABULARY)).collect();
        assert_eq!(input.token_ids, prompt, "the first token is among them");
        assert_eq!(input.token_logprobs[0].value, None, "and nothing is known of it");
        let values: Vec<Option<f32>> = input.token_logprobs[1..].iter().map(|token| token.value).collect();
        assert_eq!(values, wanted.iter().map(|token| Some(token.logprobs.chosen)).collect::<Vec<_>>());
        if top == 0 {
            assert!(input.top_logprobs.is_empty());
        } else {
            assert_eq!((input.top_logprobs.len(), input.top_logprobs[0].values.len()), (prompt.len(), 0));
            for (told, wanted) in input.top_logprobs[1..].iter().zip(&wanted) {
                let told: Vec<(u32, f32)> = told.token_ids.iter().copied().zip(told.values.iter().copied()).collect();
                assert_eq!(told, wanted.logprobs.top);
            }
        }
        message.stream = false;
        let whole = ask(&mut client, message).await;
        assert_eq!(whole.completes[&0].input_logprobs, Some(input));
        assert!(whole.completes[&1].input_logprobs.is_none());
    }
    let mut message = request("x", 3);
    params(&mut message).prompt_logprobs = Some(1);
    let told = ask(&mut client, message).await;
    let input = told.chunks[0].input_logprobs.clone().expect("it was asked for");
    assert_eq!((input.token_ids, input.token_logprobs[0].value), (ids("x"), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_is_a_replica_by_its_place() {
    let replicas = vec![(0, fake(FAST, b"abc")), (1, fake(FAST, b"ABC"))];
    let served = serve_models(vec![alpha(replicas)], Options::default()).await;
    let mut client = client(&served).await;
    for (rank, text) in [(0, "abc"), (1, "ABC"), (0, "abc"), (1, "ABC")] {
        let mut message = request("x", 3);
        message.data_parallel_rank = Some(rank);
        assert_eq!(ask(&mut client, message).await.ids(0), ids(text));
    }
    for rank in [-1, 2] {
        let mut message = request("x", 3);
        message.data_parallel_rank = Some(rank);
        let status = ask(&mut client, message).await.error.unwrap();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(&format!("data_parallel_rank is {rank}")), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_cut_at_its_beginning_where_asked() {
    let served = one(FAST, b"").await;
    let mut client = client(&served).await;
    let mut plain = request("3456789", 8);
    params(&mut plain).temperature = Some(0.0);
    let plain = ask(&mut client, plain).await;
    let mut cut = request("123456789", 8);
    params(&mut cut).temperature = Some(0.0);
    params(&mut cut).truncate_prompt_tokens = Some(7);
    for text in [false, true] {
        if text {
            cut.input = Some(Input::Text("123456789".to_owned()));
        }
        let told = ask(&mut client, cut.clone()).await;
        assert_eq!((told.complete().prompt_tokens, told.ids(0)), (7, plain.ids(0)));
    }
    params(&mut cut).truncate_prompt_tokens = Some(100);
    assert_eq!(ask(&mut client, cut.clone()).await.complete().prompt_tokens, 9, "it is shorter");
    // -1 keeps as many prompt tokens as the context holds, minus one place for the output.
    let mut long = request(&"x".repeat(5000), 8);
    assert_eq!(ask(&mut client, long.clone()).await.error.unwrap().code(), Code::InvalidArgument);
    params(&mut long).truncate_prompt_tokens = Some(-1);
    let told = ask(&mut client, long).await;
    assert_eq!((told.complete().prompt_tokens, told.complete().completion_tokens), (4095, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_ends_streams_by_their_ids_from_another_connection() {
    let served = one(Duration::from_millis(5), b"abc").await;
    let mut first = client(&served).await;
    let mut streams = Vec::new();
    for (id, stream) in [("one", true), ("two", false)] {
        let mut message = request("x", 4000);
        message.request_id = id.to_owned();
        message.stream = stream;
        streams.push(first.generate(message.clone()).await.unwrap().into_inner());
        let status = first.generate(message).await.unwrap_err();
        assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");
    }
    served.busy("alpha/0", 2, 0).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut other = client(&served).await;
    let abort = |ids: &[&str]| contract::AbortRequest { request_ids: ids.iter().map(|id| id.to_string()).collect() };
    let status = other.abort(abort(&["one", ""])).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert!(status.message().contains("request_ids"), "{status:?}");
    served.busy("alpha/0", 2, 0).await;
    other.abort(abort(&["unknown", "one", "two"])).await.unwrap();
    for stream in streams {
        let told = read_told(stream).await;
        let complete = told.complete();
        assert_eq!(complete.finish_reason, "abort");
        assert!(complete.completion_tokens > 0 && complete.completion_tokens < 4000);
    }
    served.idle("alpha/0", Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_and_a_deadline_free_the_row() {
    let step = Duration::from_millis(10);
    let served = one(step, b"a").await;
    let mut client = client(&served).await;
    for stream in [true, false] {
        let mut message = request("x", 4000);
        message.stream = stream;
        let open = client.generate(message.clone()).await.unwrap();
        served.busy("alpha/0", 1, 0).await;
        drop(open);
        served.idle("alpha/0", Duration::from_secs(5)).await;

        let mut late = Request::new(message);
        late.set_timeout(Duration::from_millis(200));
        let told = ask(&mut client, late).await;
        let status = told.error.expect("the deadline is the call's status");
        // The client's own timer may expire first.
        assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&status.code()), "{status:?}");
        served.idle("alpha/0", Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_device_and_a_full_queue_have_their_codes() {
    let mut config = fake(Duration::from_millis(1), b"a");
    config.lost_after = Some(5);
    let served = serve_models(vec![alpha(vec![(0, config)])], Options::default()).await;
    let mut lost = client(&served).await;
    let told = ask(&mut lost, request("x", 4000)).await;
    assert_eq!(told.completes[&0].finish_reason, "error");
    assert_eq!(told.error.unwrap().code(), Code::Internal);
    let health = lost.health_check(contract::HealthCheckRequest {}).await.unwrap().into_inner();
    assert!(!health.healthy && health.message.contains("told to"), "{health:?}");

    let config = fake(Duration::from_millis(5), b"a");
    let models = vec![model("alpha", None, vec![(0, config)], 1)];
    let options = Options { client_limit: Some(4), ..Options::default() };
    let served = serve_models(models, options).await;
    let mut client = client(&served).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(client.generate(request("x", 4000)).await.unwrap());
    }
    let status = client.generate(request("x", 4)).await.unwrap_err();
    assert_eq!((status.code(), status.message().contains("queue")), (Code::ResourceExhausted, true), "{status:?}");
    // The limit per client also counts samples of this contract.
    let mut two = request("x", 4);
    params(&mut two).n = 2;
    let status = client.generate(two).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message().contains("asks for 2 more; the limit is 4")),
        (Code::ResourceExhausted, true)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_lost_device_is_built_anew_routers_hear_of_it_and_requests_wait() {
    let lost = FakeConfig { lost_after: Some(3), ..fake(FAST, b"abc") };
    let (open, gate) = crossbeam_channel::bounded::<()>(0);
    let rebuild = Rebuild::new(move |_, _| {
        gate.recv_timeout(Duration::from_secs(20))?;
        Ok(Box::new(FakeExecutor::realtime_with(fake(FAST, b"abc"))))
    });
    let replica = replica("alpha/0".to_owned(), 0, lost, 4, Some(rebuild));
    let served = serve_models(vec![model_of("alpha", Some(tokenizer(true)), vec![replica])], Options::default()).await;
    let mut healthy = client(&served).await;
    let [mut first, mut second] = [client(&served).await, client(&served).await];
    let first = tokio::spawn(async move { ask(&mut first, request("x", 60)).await });
    let replica = served.host.replicas().next().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !replica.rebuilding() {
        assert!(Instant::now() < until, "it is not lost");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let second = tokio::spawn(async move { ask(&mut second, request("y", 6)).await });
    served.busy("alpha/0", 0, 2).await;
    let health = healthy.health_check(contract::HealthCheckRequest {}).await.unwrap().into_inner();
    assert_eq!((health.healthy, &*health.message), (false, "the device of alpha/0 is being rebuilt"));
    open.send(()).unwrap();
    for (told, tokens) in [(first, 60), (second, 6)] {
        let told = told.await.unwrap();
        assert!(told.error.is_none(), "{:?}", told.error);
        assert_eq!((&*told.completes[&0].finish_reason, told.completes[&0].completion_tokens), ("length", tokens));
    }
    let health = healthy.health_check(contract::HealthCheckRequest {}).await.unwrap().into_inner();
    assert!(health.healthy && health.message.is_empty(), "{health:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_served_is_refused_by_name_and_takes_no_row() {
    let served = one(FAST, b"abc").await;
    let mut client = client(&served).await;
    type Change = fn(&mut contract::GenerateRequest);
    let unimplemented: Vec<(Change, &str)> = vec![
        (|r| r.mm_inputs = Some(Default::default()), "mm_inputs"),
        (|r| r.extra_mm_inputs = vec![Default::default()], "extra_mm_inputs"),
        (|r| r.media_refs = Some(Default::default()), "media_refs"),
        (|r| r.kv_transfer_params = Some(Default::default()), "kv_transfer_params"),
        (|r| r.kv_transfer_params_json = Some("{}".into()), "kv_transfer_params_json"),
    ];
    let asked = unimplemented.len();
    for (change, field) in unimplemented {
        let mut message = request("x", 3);
        change(&mut message);
        let status = ask(&mut client, message).await.error.unwrap_or_else(|| panic!("{field} was served"));
        assert_eq!((status.code(), status.message()), (Code::Unimplemented, &*format!("{field} is not served yet")));
    }
    // Refusals are counted like those of our own service.
    let metrics = ostinato::service::admin::metrics::render(Some(&served.host));
    let counted = format!("ostinato_requests_refused_total{{code=\"UNIMPLEMENTED\"}} {asked}");
    assert!(metrics.lines().any(|line| line == counted), "no {counted}");
    let invalid: Vec<(Change, &str)> = vec![
        (|r| r.input = None, "input is missing"),
        (|r| r.input = Some(Input::Tokenized(Default::default())), "the prompt is empty"),
        (
            |r| {
                let input_ids = vec![1, 300];
                r.input = Some(Input::Tokenized(contract::TokenizedInput { input_ids, ..Default::default() }));
            },
            "token 300 at position 1",
        ),
        (|r| r.request_id = "a\0b".into(), "request_id"),
        (|r| params(r).temperature = Some(-1.0), "temperature is -1"),
        (|r| params(r).temperature = Some(f32::NAN), "temperature is NaN"),
        (|r| params(r).top_p = 1.5, "top_p is 1.5"),
        (|r| params(r).min_p = -0.5, "min_p is -0.5"),
        (|r| params(r).repetition_penalty = -1.0, "repetition_penalty is -1"),
        (|r| params(r).presence_penalty = 3.0, "presence_penalty is 3"),
        (|r| params(r).frequency_penalty = 3.0, "frequency_penalty is 3"),
        (|r| params(r).max_tokens = Some(0), "max_tokens is 0"),
        (|r| params(r).min_tokens = 9, "min_tokens is 9"),
        (|r| params(r).n = 65, "sampling_params.n is 65, must be from 1 to 64"),
        (|r| params(r).logprobs = Some(-1), "sampling_params.logprobs is -1, must be from 0 to 20"),
        (|r| params(r).logprobs = Some(21), "logprobs is 21"),
        (|r| params(r).prompt_logprobs = Some(-1), "sampling_params.prompt_logprobs is -1, must be from 0 to 20"),
        (|r| params(r).prompt_logprobs = Some(21), "prompt_logprobs is 21"),
        (|r| params(r).stop = vec![String::new()], "sampling_params.stop is \"\""),
        (|r| params(r).stop = vec!["x".into(); 17], "sampling_params.stop is 17 strings"),
        (|r| params(r).stop_token_ids = vec![300], "sampling_params.stop_token_ids is 300"),
        (|r| params(r).logit_bias = [(-1, 1.0)].into(), "sampling_params.logit_bias is -1"),
        (|r| params(r).logit_bias = [(300, 1.0)].into(), "logit_bias is 300"),
        (|r| params(r).logit_bias = [(1, -100.5)].into(), "sampling_params.logit_bias is -100.5"),
        (|r| params(r).truncate_prompt_tokens = Some(0), "sampling_params.truncate_prompt_tokens is 0"),
        (|r| params(r).truncate_prompt_tokens = Some(-2), "sampling_params.truncate_prompt_tokens is -2"),
    ];
    for (change, words) in invalid {
        let mut message = request("x", 3);
        change(&mut message);
        let status = ask(&mut client, message).await.error.unwrap_or_else(|| panic!("{words} was served"));
        assert_eq!(status.code(), Code::InvalidArgument, "{words}: {status:?}");
        assert!(status.message().contains(words), "{words}: {status:?}");
    }
    served.idle("alpha/0", Duration::from_secs(1)).await;
    // Values at the limits of what is served.
    let mut message = request("x", 3);
    *params(&mut message) = contract::SamplingParams {
        max_tokens: Some(3),
        logprobs: Some(20),
        logit_bias: [(1, -100.0), (2, 100.0)].into(),
        constraint: Some(Constraint::JsonObject(false)),
        include_stop_str_in_output: true,
        spaces_between_special_tokens: true,
        grammar_from_first_token: true,
        ..Default::default()
    };
    assert_eq!(ask(&mut client, message).await.complete().output_ids, ids("abc"));
    // With only a prompt, the output may fill the context.
    let mut bare = request("x", 1);
    bare.sampling_params = None;
    assert_eq!(ask(&mut client, bare).await.complete().completion_tokens, 4095);

    // Routers look for the services of other engines first.
    let mut other = tonic::client::Grpc::new(served.channel().await);
    other.ready().await.unwrap();
    let path = "/sglang.grpc.scheduler.SglangScheduler/HealthCheck".parse().unwrap();
    let codec = tonic_prost::ProstCodec::<contract::HealthCheckRequest, contract::HealthCheckResponse>::default();
    let status = other.unary(Request::new(contract::HealthCheckRequest {}), path, codec).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_without_a_tokenizer_serves_ids_and_says_so_otherwise() {
    let served = serve_models(vec![model("beta", None, vec![(0, fake(FAST, &[1, 2]))], 8)], Options::default()).await;
    let mut client = client(&served).await;
    assert_eq!(ask(&mut client, request("x", 3)).await.ids(0), [1, 2, 1]);
    let mut text = request("x", 3);
    text.input = Some(Input::Text("x".to_owned()));
    let mut stop = request("x", 3);
    params(&mut stop).stop = vec!["x".to_owned()];
    for (message, field) in [(text, "and text needs text"), (stop, "sampling_params.stop")] {
        let status = ask(&mut client, message).await.error.unwrap();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains(field), "{status:?}");
    }
    let status = client.get_tokenizer(common::GetTokenizerRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    let info = client.get_model_info(contract::GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(
        (info.served_model_name.as_str(), info.tokenizer_path.as_str(), info.model_path.as_str()),
        ("beta", "", "")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_models_are_one_too_many_for_a_contract_that_names_none() {
    let models = vec![alpha(vec![(0, fake(FAST, b"a"))]), model("beta", None, vec![(1, fake(FAST, &[1]))], 8)];
    let served = serve_models(models, Options::default()).await;
    let mut client = client(&served).await;
    let health = client.health_check(contract::HealthCheckRequest {}).await.unwrap().into_inner();
    assert!(!health.healthy && health.message.contains("alpha, beta"), "{health:?}");
    let refusals = [
        ask(&mut client, request("x", 3)).await.error.unwrap(),
        client.get_model_info(contract::GetModelInfoRequest {}).await.unwrap_err(),
        client.get_server_info(contract::GetServerInfoRequest {}).await.unwrap_err(),
        client.get_loads(contract::GetLoadsRequest::default()).await.unwrap_err(),
        client.get_tokenizer(common::GetTokenizerRequest {}).await.unwrap_err(),
        client.flush_cache(common::FlushCacheRequest::default()).await.unwrap_err(),
        client.start_profile(common::StartProfileRequest::default()).await.unwrap_err(),
        client.stop_profile(common::StopProfileRequest {}).await.unwrap_err(),
        client.subscribe_kv_events(common::SubscribeKvEventsRequest::default()).await.unwrap_err(),
    ];
    for status in refusals {
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains("alpha, beta"), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_and_server_describe_themselves() {
    let files = |text: &Text| text.files().to_vec();
    let mut with_config = files(&tokenizer(true));
    with_config.push(("config.json", br#"{"model_type": "qwen3", "bos_token_id": 7, "pad_token_id": null}"#.to_vec()));
    let generation = br#"{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true}"#.to_vec();
    with_config.push(("generation_config.json", generation));
    let text = Text::from_files(with_config).unwrap();
    let replicas = vec![(0, fake(FAST, b"a")), (1, fake(FAST, b"a"))];
    let served = serve_models(vec![model("alpha", Some(text), replicas, 8)], Options::default()).await;
    let mut client = client(&served).await;
    let info = client.get_model_info(contract::GetModelInfoRequest {}).await.unwrap().into_inner();
    let wanted = contract::GetModelInfoResponse {
        model_path: "/dev/null/ask-GetTokenizer".to_owned(),
        is_generation: true,
        max_context_length: 4096,
        vocab_size: VOCABULARY,
        supports_vision: false,
        served_model_name: "alpha".to_owned(),
        tokenizer_path: "/dev/null/ask-GetTokenizer".to_owned(),
        model_type: "qwen3".to_owned(),
        architectures: vec!["Qwen3ForCausalLM".to_owned()],
        eos_token_ids: vec![END as i32],
        pad_token_id: 0,
        bos_token_id: 7,
        max_req_input_len: 4095,
        default_sampling_params_json: r#"{"temperature":0.6,"top_k":20}"#.to_owned(),
    };
    assert_eq!(info, wanted);

    let ask_server = contract::GetServerInfoRequest {};
    let info = client.get_server_info(ask_server).await.unwrap().into_inner();
    assert_eq!((info.data_parallel_size, info.max_num_seqs, info.block_size), (2, 2, 16));
    assert_eq!((info.active_requests, info.last_receive_timestamp), (0, 0.0));
    assert!(!info.is_paused && info.server_type == "ostinato");
    ask(&mut client, request("x", 3)).await;
    let later = client.get_server_info(ask_server).await.unwrap().into_inner();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((now - 60.0..=now).contains(&later.last_receive_timestamp), "{later:?}");
    assert!(later.uptime_seconds > info.uptime_seconds);

    let health = client.health_check(contract::HealthCheckRequest {}).await.unwrap().into_inner();
    assert_eq!((health.healthy, health.message.as_str()), (true, ""));
    let mut probe = tonic_health::pb::health_client::HealthClient::new(served.channel().await);
    let request = tonic_health::pb::HealthCheckRequest { service: SERVICE.to_owned() };
    let serving = tonic_health::pb::health_check_response::ServingStatus::Serving;
    assert_eq!(probe.check(request).await.unwrap().into_inner().status, serving as i32);
    served.host.drain();
    let health = client.health_check(contract::HealthCheckRequest {}).await.unwrap().into_inner();
    assert!(!health.healthy && health.message.contains("draining"), "{health:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_are_told_by_rank() {
    let step = Duration::from_millis(5);
    let replicas = vec![(0, fake(step, b"a")), (1, fake(step, b"b"))];
    let served = serve_models(vec![alpha(replicas)], Options::default()).await;
    let mut client = client(&served).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut message = request(&"p".repeat(100), 4000);
        message.data_parallel_rank = Some(1);
        open.push(client.generate(message).await.unwrap());
        if open.len() < 3 {
            served.busy("alpha/1", open.len() as u32, 0).await;
        }
    }
    served.busy("alpha/1", 2, 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let all = client.get_loads(contract::GetLoadsRequest::default()).await.unwrap().into_inner();
    assert_eq!((all.dp_rank_count, all.loads.len(), all.version.as_str()), (2, 2, env!("CARGO_PKG_VERSION")));
    assert!(all.timestamp.starts_with("20") && all.timestamp.ends_with('Z'), "{}", all.timestamp);
    let [idle, busy] = &all.loads[..] else { panic!("two") };
    let nothing = contract::SchedulerLoad {
        max_total_num_tokens: 512 * 16,
        max_running_requests: 2,
        ..contract::SchedulerLoad::default()
    };
    assert_eq!(idle, &nothing);
    assert_eq!((busy.dp_rank, busy.num_running_reqs, busy.num_waiting_reqs, busy.num_total_reqs), (1, 2, 1, 3));
    assert!(busy.num_used_tokens >= 2 * 100 && busy.num_used_tokens % 16 == 0, "{busy:?}");
    assert_eq!(busy.token_usage, f64::from(busy.num_used_tokens) / f64::from(512 * 16));
    assert_eq!((busy.utilization, busy.num_waiting_uncached_tokens), (1.0, 100));
    // The second prompt found all but its last page in the prefix cache.
    assert_eq!(busy.cache_hit_rate, 96.0 / 200.0);
    // Two rows with steps of 5 ms draw at most 400 tokens per second, and they have run for only a part of the
    // measuring window.
    assert!(busy.gen_throughput > 5.0 && busy.gen_throughput <= 400.0, "{busy:?}");

    // Routers ask for sections that not every engine provides.
    let of = |dp_rank| contract::GetLoadsRequest { dp_rank, include: vec!["core".to_owned(), "lora".to_owned()] };
    let one = client.get_loads(of(Some(1))).await.unwrap().into_inner();
    assert_eq!((one.dp_rank_count, one.loads[0].dp_rank), (1, 1));
    for rank in [-1, 2] {
        let status = client.get_loads(of(Some(rank))).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(&format!("dp_rank is {rank}")), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tokenizer_comes_as_a_zip_whose_hash_is_right() {
    let mut files = tokenizer(true).files().to_vec();
    // Large and hard to compress, so that the archive takes several chunks.
    let mut state = 1u64;
    let noise: String = (0..300_000)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            char::from(b'0' + (state >> 60) as u8)
        })
        .collect();
    files.push(("tokenizer_config.json", format!(r#"{{"noise": "{noise}"}}"#).into_bytes()));
    files.push(("generation_config.json", b"{}".to_vec()));
    let text = Text::from_files(files.clone()).unwrap();
    let served =
        serve_models(vec![model("alpha", Some(text), vec![(0, fake(FAST, b"a"))], 8)], Options::default()).await;
    let mut client = client(&served).await;
    let mut archives = Vec::new();
    for _ in 0..2 {
        let mut stream = client.get_tokenizer(common::GetTokenizerRequest {}).await.unwrap().into_inner();
        let (mut bytes, mut hashes, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(chunk) = stream.message().await.unwrap() {
            lengths.push(chunk.data.len());
            bytes.extend(chunk.data);
            hashes.push(chunk.sha256);
        }
        assert!(lengths.len() > 2, "{lengths:?}");
        let (last, rest) = lengths.split_last().unwrap();
        assert!(rest.iter().all(|length| *length == 65_536) && (1..=65_536).contains(last), "{lengths:?}");
        let digest: String = sha2::Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hashes.pop().unwrap(), digest, "the last piece has it");
        assert!(hashes.iter().all(String::is_empty), "and only the last");
        archives.push(bytes);
    }
    assert_eq!(archives[0], archives[1]);
    let mut zip = zip::ZipArchive::new(std::io::Cursor::new(&archives[0])).unwrap();
    assert_eq!(zip.len(), files.len());
    for (name, wanted) in &files {
        let mut got = Vec::new();
        zip.by_name(name).unwrap().read_to_end(&mut got).unwrap();
        assert_eq!(&got, wanted, "{name}");
    }
    let names: Vec<_> = files.iter().map(|(name, _)| *name).collect();
    for name in ["tokenizer.json", "chat_template.jinja"] {
        assert!(names.contains(&name), "{names:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_cache_knows_no_prompt_and_a_busy_one_is_not_flushed() {
    let step = Duration::from_millis(1);
    let replicas = vec![(0, fake(step, b"a")), (1, fake(step, b"b"))];
    let served = serve_models(vec![alpha(replicas)], Options::default()).await;
    let mut client = client(&served).await;
    let cached = async |client: &mut VllmEngineClient<Channel>, rank| {
        let mut message = request(&"p".repeat(100), 2);
        message.data_parallel_rank = Some(rank);
        let told = ask(client, message).await;
        served.idle(&format!("alpha/{rank}"), Duration::from_secs(1)).await;
        told.complete().cached_tokens
    };
    let flush = |timeout_s| common::FlushCacheRequest { timeout_s };
    for rank in [0, 1] {
        assert_eq!(cached(&mut client, rank).await, 0);
        assert_eq!(cached(&mut client, rank).await, 96);
    }
    assert!(client.flush_cache(flush(0.0)).await.unwrap().into_inner().success);
    assert!(served.host.replicas().all(|replica| replica.load().pages_used == 0));
    for rank in [0, 1] {
        assert_eq!(cached(&mut client, rank).await, 0);
        assert_eq!(cached(&mut client, rank).await, 96);
    }

    // A flush is refused while a request runs, and the request continues.
    let mut message = request("x", 400);
    message.data_parallel_rank = Some(0);
    let open = client.generate(message).await.unwrap().into_inner();
    served.busy("alpha/0", 1, 0).await;
    let refused = client.flush_cache(flush(0.0)).await.unwrap().into_inner();
    assert!(!refused.success && refused.message.contains("alpha/0"), "{refused:?}");
    let begun = Instant::now();
    let refused = client.flush_cache(flush(0.1)).await.unwrap().into_inner();
    assert!(!refused.success && begun.elapsed() >= Duration::from_millis(100), "{refused:?}");
    // With a longer timeout the flush succeeds once the request has ended.
    let flushed = tokio::spawn({
        let mut client = client.clone();
        async move { client.flush_cache(flush(60.0)).await.unwrap().into_inner() }
    });
    assert_eq!(read_told(open).await.complete().completion_tokens, 400);
    let flushed = tokio::time::timeout(Duration::from_secs(10), flushed).await.expect("it does not wait longer");
    assert!(flushed.unwrap().success);
    assert_eq!(cached(&mut client, 0).await, 0);
    for timeout in [-1.0, f32::NAN, f32::INFINITY] {
        let status = client.flush_cache(flush(timeout)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("timeout_s"), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_times_the_kernels_between_its_start_and_its_end() {
    let replicas = vec![(0, fake(FAST, b"a")), (1, fake(FAST, b"b"))];
    let served = serve_models(vec![alpha(replicas)], Options::default()).await;
    let mut client = client(&served).await;
    let run = async |client: &mut VllmEngineClient<Channel>| {
        for rank in [0, 1] {
            let mut message = request("x", 30);
            message.data_parallel_rank = Some(rank);
            ask(client, message).await.complete();
            served.idle(&format!("alpha/{rank}"), Duration::from_secs(1)).await;
        }
    };
    // Returns for each rank the number of plans with kernel times and the number of all plans.
    let timed = || -> Vec<(usize, usize)> {
        let count = |replica: std::sync::Arc<ostinato::replica::Replica>| {
            let steps = replica.steps(usize::MAX);
            let timed = steps.iter().filter(|step| !step.submissions[0].regions[0].kernels.is_empty()).count();
            (timed, steps.len())
        };
        served.host.replicas().map(count).collect()
    };
    run(&mut client).await;
    let before = timed();
    assert!(before.iter().all(|(timed, all)| *timed == 0 && *all > 3), "{before:?}");
    let start = common::StartProfileRequest { num_steps: Some(2), ..Default::default() };
    assert!(client.start_profile(start).await.unwrap().into_inner().success);
    run(&mut client).await;
    assert!(timed().iter().all(|(timed, _)| *timed == 2), "{:?}", timed());
    let start = common::StartProfileRequest { activities: vec!["GPU".into(), "cpu".into()], ..Default::default() };
    assert!(client.start_profile(start).await.unwrap().into_inner().success);
    let (from, _) = (timed(), run(&mut client).await);
    let until = timed();
    for ((was, all_before), (is, all)) in from.iter().zip(&until) {
        assert_eq!(is - was, all - all_before, "every plan is timed");
    }
    assert!(client.stop_profile(common::StopProfileRequest {}).await.unwrap().into_inner().success);
    run(&mut client).await;
    assert!(timed().iter().zip(&until).all(|((is, all), (was, before))| is == was && all > before));

    type Change = fn(&mut common::StartProfileRequest);
    let cases: [(Change, Code, &str); 9] = [
        (|r| r.output_dir = Some("/tmp".into()), Code::InvalidArgument, "output_dir is \"/tmp\""),
        (|r| r.num_steps = Some(0), Code::InvalidArgument, "num_steps is 0"),
        (|r| r.num_steps = Some(-1), Code::InvalidArgument, "num_steps is -1"),
        (|r| r.activities = vec!["MEM".into()], Code::InvalidArgument, "activities is \"MEM\""),
        (|r| r.start_step = Some(3), Code::Unimplemented, "start_step"),
        (|r| r.with_stack = Some(true), Code::Unimplemented, "with_stack"),
        (|r| r.record_shapes = Some(true), Code::Unimplemented, "record_shapes"),
        (|r| r.profile_by_stage = true, Code::Unimplemented, "profile_by_stage"),
        (|r| r.output_dir = Some(String::new()), Code::InvalidArgument, "output_dir"),
    ];
    for (change, code, words) in cases {
        let mut message = common::StartProfileRequest::default();
        change(&mut message);
        let status = client.start_profile(message).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(words), "{status:?}");
    }
}

/// The hash of a page's predecessor and the page's tokens.
type Known = (Option<i64>, Vec<u32>);

/// The cached pages of both ranks as a subscriber of events knows them.
#[derive(Debug, Default)]
struct Follower {
    /// By rank and page hash: the predecessor and the tokens.
    pages: [BTreeMap<i64, Known>; 2],
    /// The sequence number of each rank's last batch.
    last: [u64; 2],
    removed: usize,
}

impl Follower {
    /// Reads batches until `done` returns true. Checks that sequence numbers have no gaps, that no page is stored
    /// twice, and that only known pages are removed.
    async fn read(&mut self, stream: &mut tonic::Streaming<common::KvEventBatch>, done: impl Fn(&Follower) -> bool) {
        use common::kv_cache_event::Data;
        while !done(self) {
            let message = tokio::time::timeout(Duration::from_secs(10), stream.message()).await;
            let batch = message.unwrap_or_else(|_| panic!("nothing comes: {self:?}")).unwrap().expect("a batch");
            let rank = batch.dp_rank.unwrap() as usize;
            let last = std::mem::replace(&mut self.last[rank], batch.sequence_number);
            assert!(last == 0 || batch.sequence_number == last + 1, "{last} is followed by {batch:?}");
            let pages = &mut self.pages[rank];
            for event in batch.events {
                match event.data.unwrap() {
                    Data::Cleared(_) => pages.clear(),
                    Data::Stored(stored) => {
                        let mut before = stored.parent_block_hash;
                        for block in stored.blocks {
                            assert_eq!((block.block_size, block.token_ids.len()), (16, 16));
                            let known = pages.insert(block.block_hash, (before, block.token_ids));
                            assert_eq!(known, None, "it is stored twice");
                            before = Some(block.block_hash);
                        }
                    }
                    Data::Removed(removed) => {
                        self.removed += removed.block_hashes.len();
                        for hash in removed.block_hashes {
                            assert!(pages.remove(&hash).is_some(), "it was not known");
                        }
                    }
                }
            }
        }
    }

    /// Returns the number of tokens in known pages that a prompt of these tokens would find on a rank.
    fn finds(&self, rank: usize, tokens: &[u32]) -> usize {
        let (mut before, mut found) = (None, 0);
        for page in tokens.chunks_exact(16) {
            let next = self.pages[rank].iter().find(|(_, (behind, tokens))| *behind == before && tokens == page);
            let Some((hash, _)) = next else { break };
            before = Some(*hash);
            found += 16;
        }
        found
    }
}

/// Goal: a subscriber of page events knows which prompts are cached. Method: a workload on replicas with too few pages
/// for it. A subscriber from the beginning must know the same pages as one that subscribes at the end, and the same
/// that a prompt then finds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_of_pages_knows_what_prompts_find() {
    let few = |index| {
        let mut config = fake(FAST, b"");
        config.capacity.pages = 24;
        (index, config)
    };
    let served = serve_models(vec![alpha(vec![few(0), few(1)])], Options::default()).await;
    let mut client = client(&served).await;
    let subscribe =
        |start_sequence_number| common::SubscribeKvEventsRequest { start_sequence_number, ..Default::default() };
    let status = client.subscribe_kv_events(subscribe(5)).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    assert!(status.message().contains("start_sequence_number is 5"), "{status:?}");

    let prompt =
        |family: u64, length: usize| -> Vec<u32> { ids(&family.to_string().repeat(length))[..length].to_vec() };
    let mut run = async |rank: i32, tokens: &[u32]| {
        let mut message = request("", 20);
        params(&mut message).ignore_eos = true;
        let input_ids = tokens.to_vec();
        message.input = Some(Input::Tokenized(contract::TokenizedInput { input_ids, ..Default::default() }));
        message.data_parallel_rank = Some(rank);
        let told = ask(&mut client, message).await;
        served.idle(&format!("alpha/{rank}"), Duration::from_secs(1)).await;
        told.complete().cached_tokens as usize
    };
    // Some pages are cached before anyone subscribes.
    run(0, &prompt(3, 100)).await;
    let mut other = VllmEngineClient::new(served.channel().await);
    let mut stream = other.subscribe_kv_events(subscribe(0)).await.unwrap().into_inner();
    let mut early = Follower::default();
    early.read(&mut stream, |early| early.last.iter().all(|last| *last > 0)).await;
    assert_eq!((early.finds(0, &prompt(3, 100)), early.finds(1, &prompt(3, 100))), (96, 0));

    let mut state = 1u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..60 {
        let (rank, family, length) = (draw(2) as i32, draw(7), 20 + draw(120) as usize);
        run(rank, &prompt(family, length)).await;
    }
    // Pages with a cache salt are not announced.
    let mut salted = token_request("alpha", &prompt(8, 100), 4);
    salted.cache_salt = "tenant".to_owned();
    generate(&mut served.client().await, salted).await;
    for rank in [0, 1] {
        served.idle(&format!("alpha/{rank}"), Duration::from_secs(1)).await;
    }

    let mut later = other.subscribe_kv_events(subscribe(0)).await.unwrap().into_inner();
    let mut late = Follower::default();
    late.read(&mut later, |late| late.last.iter().all(|last| *last > 0)).await;
    early.read(&mut stream, |early| early.last == late.last).await;
    assert_eq!(early.pages, late.pages);
    assert!(early.removed > 20 && early.pages.iter().all(|pages| !pages.is_empty()), "{early:?}");
    assert_eq!((early.finds(0, &prompt(8, 100)), early.finds(1, &prompt(8, 100))), (0, 0));
    for rank in [0, 1] {
        for family in 0..7 {
            let tokens = prompt(family, 120);
            // At least the last token is computed, so the page that contains it is not found.
            let known = early.finds(rank as usize, &tokens).min(112);
            assert_eq!(run(rank, &tokens).await, known, "rank {rank}, family {family}");
            // This request has changed the cache. The sequence numbers of a new subscriber show how far to read.
            let mut now = other.subscribe_kv_events(subscribe(0)).await.unwrap().into_inner();
            let mut fresh = Follower::default();
            fresh.read(&mut now, |fresh| fresh.last.iter().all(|last| *last > 0)).await;
            early.read(&mut stream, |early| early.last == fresh.last).await;
        }
    }
    drop(later);

    let flushed = other.flush_cache(common::FlushCacheRequest { timeout_s: 1.0 }).await.unwrap().into_inner();
    assert!(flushed.success);
    early.read(&mut stream, |early| early.pages.iter().all(BTreeMap::is_empty)).await;

    // A subscription must not keep the server from ending.
    let stopped = Instant::now();
    served.stop.cancel();
    let end = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("an end without a word"),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::Unavailable, "{end:?}");
    tokio::time::timeout(Duration::from_secs(5), served.server).await.expect("the server ends").unwrap().unwrap();
    assert!(stopped.elapsed() < Duration::from_secs(5));
}

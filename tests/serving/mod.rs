//! A server on loopback whose replicas run on fake devices, for tests of the service.
#![allow(dead_code)] // each test file uses only some of these items

pub mod certificates;
pub mod collector;
pub mod raw;

use ostinato::engine::fake::{FakeConfig, FakeExecutor, HIDDEN};
use ostinato::engine::plan::Capacity;
use ostinato::host::{Host, ModelInfo, ServedModel};
use ostinato::model::embedding::Embedding;
use ostinato::model::text::Text;
use ostinato::replica::ReplicaConfig;
use ostinato::replica::rebuild::Rebuild;
use ostinato::replica::{DeviceInfo, Replica};
use ostinato::service::proto;
use ostinato::service::proto::generate_response::Event;
use ostinato::service::proto::ostinato_client::OstinatoClient;
use ostinato::service::server::{Options, ServeError, Stopped, serve_with_http};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

/// The id of the tokenizer's end-of-sequence token. Ids below it stand for the bytes 0 to 255.
pub const END: u32 = 256;
pub const VOCABULARY: u32 = 300;

/// Returns a byte-level tokenizer whose id equals the byte; id 256 is `<|end|>`. With `chat` it has a chat template.
pub fn tokenizer(chat: bool) -> Text {
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]";
    tokenizer_of(chat.then_some(template))
}

/// Returns the same tokenizer with this chat template.
pub fn tokenizer_of(template: Option<&str>) -> Text {
    tokenizer_with(template, &["<|end|>"])
}

/// Returns the same tokenizer with these special tokens. The first one is END, the ids of the others follow.
pub fn tokenizer_with(template: Option<&str>, special: &[&str]) -> Text {
    let special = special.iter().zip(END..).map(|(name, id)| {
        serde_json::json!({
            "id": id, "content": name, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        })
    });
    let special: Vec<serde_json::Value> = special.collect();
    // Byte-level tokenizers represent each byte by a printable character; these bytes represent themselves.
    let plain = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..256u32 {
        let code = if plain(byte) {
            byte
        } else {
            next += 1;
            next - 1
        };
        vocabulary.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false
    });
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": special,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": []
        }
    });
    Text::from_bytes(json.to_string().as_bytes(), None, template).unwrap()
}

/// Returns a tokenizer in the style of SentencePiece: `▁` is a space, and the decoder removes the one in front of the
/// first token. Ids: `a` 2, `b` 3, `▁a` 4, `▁b` 5, `▁` 6; 1 is `<s>`, which encoding puts first.
pub fn sentencepiece() -> Text {
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{
            "id": 1, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        },
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": false,
            "vocab": {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5, "▁": 6},
            "merges": [["▁", "a"], ["▁", "b"]]
        }
    });
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    Text::from_bytes(json.to_string().as_bytes(), None, Some(template)).unwrap()
}

/// Returns the configuration of a fake device whose steps and prompt chunks take `step` each. Its output repeats
/// `script`.
pub fn fake(step: Duration, script: &[u8]) -> FakeConfig {
    FakeConfig {
        capacity: Capacity {
            slots: 2,
            pages: 512,
            window: None,
            context: 4096,
            prefill_chunk: 128,
            causal: true,
            prompts: 8,
            sequences: 8,
            mixed_steps: None,
            buckets: vec![1, 2],
            run_ahead: 4,
            gates: true,
            vocabulary: VOCABULARY,
            drafts: Default::default(),
            snapshots: None,
            plan_limit: None,
        },
        step,
        chunk: step,
        script: script.iter().map(|byte| u32::from(*byte)).collect(),
        ..FakeConfig::default()
    }
}

pub fn device(index: usize) -> DeviceInfo {
    DeviceInfo {
        index,
        name: format!("Fake {}", ["Apple", "Banana", "Cherry"][index]),
        uuid: format!("0000000{index}-0000-4000-8000-000000000000"),
        pci: Some(format!("0000:0{index}:00.0")),
        is_cpu: false,
    }
}

/// Returns a replica on device `on`. After a device loss, `rebuild` rebuilds it; `None` disables rebuilding.
pub fn replica(name: String, on: usize, fake: FakeConfig, queue_limit: usize, rebuild: Option<Rebuild>) -> Replica {
    let config = ReplicaConfig {
        queue_limit,
        eos_ids: vec![END],
        context: fake.capacity.context,
        vocabulary: VOCABULARY,
        prefix_cache: true,
        rebuild,
    };
    Replica::spawn(name, device(on), Box::new(FakeExecutor::realtime_with(fake)), config).unwrap()
}

/// Returns a model with one replica per entry of `replicas`, each entry being a device index and the fake device.
pub fn model(name: &str, text: Option<Text>, replicas: Vec<(usize, FakeConfig)>, queue_limit: usize) -> ServedModel {
    let spawn = |(index, (on, fake))| replica(format!("{name}/{index}"), on, fake, queue_limit, None);
    model_of(name, text, replicas.into_iter().enumerate().map(spawn).collect())
}

/// Returns a model served by these replicas.
pub fn model_of(name: &str, text: Option<Text>, replicas: Vec<Replica>) -> ServedModel {
    let info = ModelInfo {
        architecture: "Qwen3ForCausalLM".to_owned(),
        context: 4096,
        vocabulary: VOCABULARY,
        eos_ids: vec![END],
        weight_bytes: 10,
        bytes_per_token: 8,
        parameters: 5,
        active_parameters: 4,
        embedding: Embedding { size: HIDDEN as u32, ..Embedding::default() },
    };
    ServedModel::new(name.to_owned(), info, text.map(Arc::new), replicas)
}

/// A running server.
pub struct Served {
    pub host: Arc<Host>,
    pub address: String,
    /// The address of the HTTP endpoint.
    pub http: std::net::SocketAddr,
    pub stop: CancellationToken,
    pub server: tokio::task::JoinHandle<Result<Stopped, ServeError>>,
}

pub async fn serve_models(models: Vec<ServedModel>, options: Options) -> Served {
    serve_host(Host::new(models), options).await
}

pub async fn serve_host(host: Host, options: Options) -> Served {
    let host = Arc::new(host);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let shutdown = stop.clone().cancelled_owned();
    let http = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = http.local_addr().unwrap();
    let server = tokio::spawn(serve_with_http(Arc::clone(&host), listener, Some(http), options, shutdown));
    Served { host, address, http: at, stop, server }
}

impl Served {
    pub async fn channel(&self) -> Channel {
        Endpoint::new(self.address.clone()).unwrap().connect().await.unwrap()
    }

    pub async fn client(&self) -> OstinatoClient<Channel> {
        OstinatoClient::new(self.channel().await)
    }

    /// Waits until a replica has no running, waiting or unfinished request.
    pub async fn idle(&self, replica: &str, within: Duration) {
        let until = Instant::now() + within;
        let replica = self.host.replicas().find(|other| other.name == replica).unwrap();
        loop {
            let load = replica.load();
            if load.running == 0 && load.waiting == 0 && replica.unfinished() == 0 {
                return;
            }
            assert!(Instant::now() < until, "{} is still busy: {load:?}", replica.name);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until a replica has begun a first request, which may have ended since.
    pub async fn begun(&self, replica: &str) {
        let until = Instant::now() + Duration::from_secs(10);
        let replica = self.host.replicas().find(|other| other.name == replica).unwrap();
        while replica.load().prompt_tokens == 0 {
            assert!(Instant::now() < until, "{}: {:?}", replica.name, replica.load());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until a replica has exactly `running` running and `waiting` queued requests.
    pub async fn busy(&self, replica: &str, running: u32, waiting: u32) {
        let until = Instant::now() + Duration::from_secs(10);
        let replica = self.host.replicas().find(|other| other.name == replica).unwrap();
        loop {
            let load = replica.load();
            if load.running == running && load.waiting == waiting {
                return;
            }
            assert!(Instant::now() < until, "{}: {load:?}", replica.name);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Returns a request for up to `max_tokens` tokens after the text `prompt`.
pub fn text_request(model: &str, prompt: &str, max_tokens: u32) -> proto::GenerateRequest {
    proto::GenerateRequest {
        model: model.to_owned(),
        prompt: Some(proto::generate_request::Prompt::Text(prompt.to_owned())),
        stopping: Some(proto::Stopping { max_tokens: Some(max_tokens), ..Default::default() }),
        ..Default::default()
    }
}

/// Returns the same request with a prompt of token ids.
pub fn token_request(model: &str, ids: &[u32], max_tokens: u32) -> proto::GenerateRequest {
    let tokens = proto::TokenIds { ids: ids.to_vec() };
    proto::GenerateRequest {
        prompt: Some(proto::generate_request::Prompt::Tokens(tokens)),
        ..text_request(model, "", max_tokens)
    }
}

/// The contents of a response stream that was read to its end.
#[derive(Debug, Default)]
pub struct Outcome {
    pub started: Option<proto::Started>,
    /// Log probabilities of the prompt's tokens, if they were requested.
    pub prompt: Vec<proto::TokenLogprobs>,
    pub deltas: Vec<proto::Delta>,
    pub finished: Option<proto::Finished>,
    pub error: Option<tonic::Status>,
}

impl Outcome {
    pub fn text(&self) -> String {
        self.deltas.iter().map(|delta| delta.text.as_str()).collect()
    }

    pub fn ids(&self) -> Vec<u32> {
        self.deltas.iter().flat_map(|delta| delta.token_ids.clone()).collect()
    }

    pub fn reason(&self) -> proto::FinishReason {
        self.finished.as_ref().expect("finished").reason()
    }
}

/// Reads a response stream to its end and checks the order of its events.
pub async fn read(mut stream: tonic::Streaming<proto::GenerateResponse>) -> Outcome {
    let mut outcome = Outcome::default();
    loop {
        match stream.message().await {
            Ok(None) => return outcome,
            Err(status) => {
                outcome.error = Some(status);
                return outcome;
            }
            Ok(Some(message)) => {
                assert!(outcome.finished.is_none(), "an event after the last: {message:?}");
                match message.event.expect("an event") {
                    Event::Started(started) => {
                        assert!(outcome.started.is_none() && outcome.deltas.is_empty());
                        outcome.started = Some(started);
                    }
                    Event::Prompt(prompt) => {
                        assert!(outcome.started.is_some() && outcome.deltas.is_empty());
                        outcome.prompt.extend(prompt.tokens);
                    }
                    Event::Delta(delta) => {
                        assert!(outcome.started.is_some());
                        outcome.deltas.push(delta);
                    }
                    Event::Finished(finished) => outcome.finished = Some(finished),
                }
            }
        }
    }
}

/// The contents of a response stream with several samples, read to its end.
#[derive(Debug)]
pub struct Samples {
    pub started: Option<proto::Started>,
    /// Log probabilities of the prompt's tokens, if they were requested.
    pub prompt: Vec<proto::TokenLogprobs>,
    /// Token ids and text of each sample.
    pub outputs: Vec<(Vec<u32>, String)>,
    /// The final event of each sample.
    pub finished: Vec<Option<proto::Finished>>,
    pub error: Option<tonic::Status>,
}

impl Samples {
    pub fn ids(&self) -> Vec<Vec<u32>> {
        self.outputs.iter().map(|(ids, _)| ids.clone()).collect()
    }

    pub fn reasons(&self) -> Vec<Option<proto::FinishReason>> {
        self.finished.iter().map(|finished| finished.as_ref().map(proto::Finished::reason)).collect()
    }
}

/// Reads a stream with `n` samples to its end. Checks that a single `Started` comes first and that no event of a sample
/// follows its `Finished`.
pub async fn read_samples(mut stream: tonic::Streaming<proto::GenerateResponse>, n: usize) -> Samples {
    let mut samples = Samples {
        started: None,
        prompt: Vec::new(),
        outputs: vec![Default::default(); n],
        finished: vec![None; n],
        error: None,
    };
    loop {
        match stream.message().await {
            Ok(None) => return samples,
            Err(status) => {
                samples.error = Some(status);
                return samples;
            }
            Ok(Some(message)) => match message.event.expect("an event") {
                Event::Started(started) => {
                    assert!(samples.started.is_none() && samples.outputs.iter().all(|(ids, _)| ids.is_empty()));
                    samples.started = Some(started);
                }
                Event::Prompt(prompt) => {
                    assert!(samples.started.is_some() && samples.outputs[0].0.is_empty());
                    samples.prompt.extend(prompt.tokens);
                }
                Event::Delta(delta) => {
                    let index = delta.index as usize;
                    assert!(samples.started.is_some() && samples.finished[index].is_none(), "{delta:?}");
                    samples.outputs[index].0.extend(delta.token_ids);
                    samples.outputs[index].1.push_str(&delta.text);
                }
                Event::Finished(finished) => {
                    let index = finished.index as usize;
                    assert!(samples.finished[index].is_none(), "{finished:?}");
                    samples.finished[index] = Some(finished);
                }
            },
        }
    }
}

/// Returns the seed of sample `index`, as the protocol defines it. This is a second implementation, independent of the
/// server's.
pub fn sample_seed(seed: u64, index: u64) -> u64 {
    let mut state = seed;
    let mut number = seed;
    for _ in 0..index {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        number = state;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^= number >> 31;
    }
    number
}

/// Sends a request and reads its stream. A request that is refused gives an outcome with an error.
pub async fn generate(
    client: &mut OstinatoClient<Channel>,
    request: impl tonic::IntoRequest<proto::GenerateRequest>,
) -> Outcome {
    match client.generate(request).await {
        Ok(response) => read(response.into_inner()).await,
        Err(status) => Outcome { error: Some(status), ..Outcome::default() },
    }
}

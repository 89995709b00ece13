//! Access to the committed checkpoints and their expected outputs, and helpers that submit requests to a replica.

use crossbeam_channel::Receiver;
use ostinato::engine::request::{Event, Finished, Limits, Request, Scored, SinkClosed, Started, Token};
use ostinato::engine::scheduler::EngineLoad;
use ostinato::host::progress::{Progress, Unit};
use ostinato::replica::Replica;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The output of transformers for a checkpoint.
pub struct Expected {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    /// Pairs of a step's number and the logits from which that step's token is drawn.
    pub logits: Vec<(usize, Vec<f32>)>,
    /// Relative norm of the error in transformers' logits when keys and values are rounded to f16; `None` if it was not
    /// measured.
    pub f16_kv: Option<f64>,
}

pub fn expected(name: &str) -> Expected {
    let text = std::fs::read_to_string(fixture(name).join("expected.json")).expect("expected.json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let ids = |key: &str| -> Vec<u32> { serde_json::from_value(json[key].clone()).expect(key) };
    let bytes = std::fs::read(fixture(name).join("expected.safetensors")).expect("expected.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let logits = tensors.tensor("logits").expect("logits");
    let values: Vec<f32> =
        logits.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let steps = ids("logit_steps").into_iter().map(|step| step as usize);
    Expected {
        prompt: ids("prompt"),
        greedy: ids("greedy"),
        logits: steps.zip(values.chunks_exact(logits.shape()[1]).map(<[f32]>::to_vec)).collect(),
        f16_kv: json["rounding"]["f16_kv"].as_f64(),
    }
}

/// A prompt with the greedy tokens behind it and, for each of them, the tokens that a draft head drafts behind it.
pub struct Drafted {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub drafts: Vec<Vec<u32>>,
}

/// Returns what PyTorch computes for a draft head (`tests/fixtures/make_eagle.py`), and the folder of its model.
pub fn drafted(name: &str) -> (PathBuf, Vec<Drafted>) {
    let text = std::fs::read_to_string(fixture(&format!("eagle/{name}/expected.json"))).expect("expected.json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
    let cases = json["cases"].as_array().expect("cases").iter().map(|case| Drafted {
        prompt: serde_json::from_value(case["prompt"].clone()).expect("a prompt"),
        greedy: serde_json::from_value(case["greedy"].clone()).expect("tokens"),
        drafts: serde_json::from_value(case["drafts"].clone()).expect("lists of drafts"),
    });
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(json["model"].as_str().expect("a folder"));
    (folder, cases.collect())
}

/// Returns a request for `tokens` greedily sampled tokens, in which an end-of-sequence token does not stop generation.
pub fn request(prompt: &[u32], tokens: u32) -> Request {
    Request {
        limits: Limits { max_tokens: Some(tokens), ignore_eos: true, ..Limits::default() },
        ..Request::new("test", prompt.to_vec())
    }
}

/// Everything that a finished generation returned.
#[derive(Debug)]
pub struct Generated {
    pub started: Started,
    /// Scores of the prompt's tokens; empty unless the request asked for `prompt_logprobs`.
    pub scored: Vec<Scored>,
    pub tokens: Vec<u32>,
    /// The tokens of `tokens` together with their log probabilities.
    pub drawn: Vec<Token>,
    pub finished: Finished,
}

/// Submits a request, which must be accepted, and returns its events.
pub fn submit(replica: &Replica, request: Request) -> Receiver<Event> {
    let (sender, events) = crossbeam_channel::unbounded();
    let sink = Box::new(move |event| sender.send(event).map_err(|_| SinkClosed));
    replica.submit(request, sink).expect("a good request is taken");
    events
}

/// Receives all events of a request until it has finished. Panics if the request ends without having started, if scores
/// of the prompt arrive after the first token, or if no event arrives for two minutes.
pub fn collect(events: &Receiver<Event>) -> Generated {
    let (mut started, mut scored, mut drawn) = (None, Vec::new(), Vec::new());
    loop {
        match events.recv_timeout(Duration::from_secs(120)).expect("the request goes on") {
            Event::Started(event) => started = Some(event),
            Event::Prompt(tokens) => {
                assert!(started.is_some() && drawn.is_empty(), "a prompt's probabilities after the first token");
                scored.extend(tokens);
            }
            Event::Token(token) => drawn.push(token),
            Event::Embedding(vector) => panic!("a vector of {} values that nobody asked for", vector.len()),
            Event::Finished(finished) => {
                let tokens = drawn.iter().map(|token| token.id).collect();
                let started = *started.expect("it started before it ended");
                return Generated { started, scored, tokens, drawn, finished: *finished };
            }
        }
    }
}

/// Submits a request and waits for its end.
pub fn generate(replica: &Replica, request: Request) -> Generated {
    collect(&submit(replica, request))
}

/// Waits until the replica has no running or waiting sequence and no page in use.
pub fn idle(replica: &Replica) {
    let start = Instant::now();
    // Pages are freed only after the step in flight has ended.
    let busy = |load: EngineLoad| (load.running, load.waiting, load.pages_used) != (0, 0, 0);
    while busy(replica.load()) || replica.unfinished() > 0 {
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}, {} unfinished", replica.load(), replica.unfinished());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Records the progress lines of a start.
#[derive(Default)]
pub struct Lines(pub Mutex<Vec<String>>);

impl Progress for Lines {
    fn line(&self, text: &str) {
        self.0.lock().expect("no panic").push(text.to_owned());
    }

    fn warning(&self, text: &str) {
        self.line(text);
    }

    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

/// Records the warnings of a start.
#[derive(Default)]
pub struct Warnings(pub Mutex<Vec<String>>);

impl Progress for Warnings {
    fn line(&self, _: &str) {}

    fn warning(&self, text: &str) {
        self.0.lock().expect("no panic").push(text.to_owned());
    }

    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

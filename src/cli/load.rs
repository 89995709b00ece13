//! `ostinato bench --server`: puts load on a server through gRPC and measures what its clients see. Requests arrive at
//! random at a given mean rate, or a fixed number of streams each send the next request when the previous one has
//! ended. Not here: the engine; everything measured has passed through gRPC.

use super::Usage;
use super::arrivals::{Arrivals, Percentiles, Window};
use super::connect::{self, Client, Reach};
use super::generate::Refused;
use crate::model::split_mix::split_mix;
use crate::service::proto;
use crate::service::proto::generate_request::Prompt;
use crate::service::proto::generate_response::Event;
use crate::service::refusal::code_name;
use anyhow::Context;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tonic::{Code, Status};

/// Streams per connection: a server processes each connection's bytes on one thread at a time, and accepts at most 200
/// streams per connection.
const STREAMS_PER_CONNECTION: u32 = 16;
/// The maximum number of connections, unless set by `--connections`.
const MOST_CONNECTIONS: u32 = 32;
/// The number of connections for requests at a rate, because the number of concurrent requests is not known in advance.
const RATE_CONNECTIONS: u32 = 8;
/// Duration of requests at a rate without `--requests`, seconds.
const RATE_SECONDS: f64 = 30.0;
/// HTTP/2 flow-control windows, large enough that no stream ever waits for its reader.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// Arguments for measuring a server. `--prompt`, `--decode`, `--streams`, `--repeat` and `--json` belong to `Bench`.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Load on a server")]
pub(super) struct Load {
    /// Measure the server at this address (HOST:PORT or a URI) through gRPC, instead of an engine in this process. The
    /// requests are random token ids with outputs of exactly --decode tokens.
    ///
    /// With --streams N, each of N streams sends its next request when its previous one has ended. With --rate R, R
    /// requests per second are sent on average, with exponentially distributed gaps, as if from many independent
    /// clients. They do not wait for the server, and times are measured from the moment at which a request should have
    /// been sent.
    ///
    /// The column "decode/s" is the speed while all N streams decode, which other benchmarks call batched decode: the
    /// tokens of each stream's first request between the last stream's first token and the first stream's end, divided
    /// by that time. Tokens that arrive within a millisecond count as one group; "gap" is the time between groups.
    #[arg(
        long,
        value_name = "ADDR",
        conflicts_with_all = ["model", "device", "split", "depth", "seen", "beside", "stages", "prefill_chunk", "drafts", "draft", "kv_format", "tune"]
    )]
    pub(super) server: Option<String>,
    #[command(flatten)]
    reach: Reach,
    /// Name of the served model. Default: the server's only model.
    #[arg(long, value_name = "NAME", requires = "server")]
    served_model: Option<String>,
    /// Mean request rate, requests per second. Several rates, separated by commas, are measured one after the other.
    #[arg(
        long,
        value_name = "R",
        value_delimiter = ',',
        requires = "server",
        conflicts_with = "streams",
        allow_negative_numbers = true
    )]
    rate: Vec<f64>,
    /// Requests per row. Default: one per stream, or 30 seconds' worth at --rate.
    #[arg(long, value_name = "M", requires = "server")]
    requests: Option<u32>,
    /// Vary the lengths of prompts and outputs: log-normal distributions with the means --prompt and --decode and this
    /// standard deviation of the logarithm, at least 1 token each and together within the context. With 0, all lengths
    /// are equal.
    #[arg(long, value_name = "SIGMA", default_value_t = 0.0, requires = "server")]
    spread: f64,
    /// Number of leading prompt tokens that all requests of a row share.
    #[arg(long, value_name = "T", default_value_t = 0, requires = "server")]
    shared_prefix: u32,
    /// Seed of prompts, lengths and gaps. The server's prefix cache never has the prompts from an earlier row, because
    /// each row uses a new random cache salt.
    #[arg(long, value_name = "S", default_value_t = 0, requires = "server")]
    seed: u64,
    /// Number of connections. Default: one per 16 streams, at most 32; 8 with --rate.
    #[arg(long, value_name = "C", requires = "server")]
    connections: Option<u32>,
}

/// The arguments of `Bench` that apply to a server too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape<'a> {
    pub(super) prompt: u32,
    pub(super) decode: u32,
    pub(super) streams: &'a [u32],
    pub(super) repeat: u32,
    pub(super) json: bool,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// This many streams, each of which sends its next request when its previous one has ended.
    Streams(u32),
    /// This many requests per second on average.
    Rate(f64),
}

/// All parameters that determine the requests of a row.
#[derive(Clone, Debug)]
struct Plan {
    mode: Mode,
    requests: u32,
    prompt: u32,
    decode: u32,
    spread: f64,
    shared_prefix: u32,
    seed: u64,
    model: String,
    vocabulary: u32,
    context: u32,
    salt: String,
}

/// One request as seen by its client.
#[derive(Debug)]
struct Served {
    /// When it was sent; with a rate, when it should have been sent.
    sent: Instant,
    ended: Instant,
    arrivals: Arrivals,
    started: Option<proto::Started>,
    usage: proto::Usage,
    /// Why it did not complete; `None` if it did.
    error: Option<Status>,
}

/// One row of results.
#[derive(Debug)]
struct Row {
    mode: Mode,
    requests: u32,
    completed: u32,
    /// Failed requests by the name of their gRPC code.
    errors: BTreeMap<&'static str, u32>,
    first_error: Option<Status>,
    seconds: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    /// The window in which all streams decode.
    window: Option<Window>,
    stream_rate: Option<Percentiles>,
    first_token: Option<Percentiles>,
    gap: Option<Percentiles>,
    per_token: Option<Percentiles>,
    queue: Option<Percentiles>,
    /// The number of requests by replica, device name and device UUID.
    replicas: BTreeMap<(String, String, String), u32>,
}

pub(super) fn run(load: &Load, shape: Shape, server: &str) -> anyhow::Result<()> {
    let usage = |text: &str| Err(Usage(text.to_owned()).into());
    if shape.prompt == 0 || shape.decode == 0 {
        return usage("prompt and decode must be at least 1 where a server is asked");
    }
    if load.requests == Some(0) || load.connections == Some(0) {
        return usage("requests and connections must be at least 1");
    }
    if let Some(rate) = load.rate.iter().find(|rate| !(rate.is_finite() && **rate > 0.0)) {
        return usage(&format!("a rate of {rate} requests/s is not above 0"));
    }
    if !(0.0..=4.0).contains(&load.spread) {
        return usage(&format!("a spread of {} is not from 0 to 4", load.spread));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start a runtime")?;
    let modes: Vec<Mode> = if load.rate.is_empty() {
        shape.streams.iter().map(|streams| Mode::Streams(*streams)).collect()
    } else {
        load.rate.iter().map(|rate| Mode::Rate(*rate)).collect()
    };
    let most = modes.iter().map(|mode| connections(load, *mode)).max().unwrap_or(1);
    let clients = runtime.block_on(connect(&load.reach, server, most))?;
    let model = runtime.block_on(model(&clients[0], load.served_model.as_deref().unwrap_or_default()))?;
    if load.spread == 0.0 && shape.prompt.saturating_add(shape.decode) > model.context {
        return usage(&format!(
            "prompt {} and decode {} need a context of {}, model \"{}\" has {}",
            shape.prompt,
            shape.decode,
            shape.prompt.saturating_add(shape.decode),
            model.name,
            model.context
        ));
    }
    let mut header = !shape.json;
    for mode in modes {
        let mut plan = Plan {
            mode,
            requests: load.requests.unwrap_or(match mode {
                Mode::Streams(streams) => streams,
                Mode::Rate(rate) => (rate * RATE_SECONDS).ceil().min(f64::from(u32::MAX)) as u32,
            }),
            prompt: shape.prompt,
            decode: shape.decode,
            spread: load.spread,
            shared_prefix: load.shared_prefix,
            seed: load.seed,
            model: model.name.clone(),
            vocabulary: model.vocabulary,
            context: model.context,
            salt: String::new(),
        };
        let mut rows = Vec::new();
        // If there are several runs, the first is a warm-up.
        for index in 0..shape.repeat + u32::from(shape.repeat > 1) {
            plan.salt = format!("bench-{:016x}", RandomState::new().hash_one(index));
            let row = once(&runtime, &clients[..connections(load, mode) as usize], &plan);
            if index > 0 || shape.repeat == 1 {
                rows.push(row);
            }
        }
        rows.sort_by(|a, b| a.output_rate().total_cmp(&b.output_rate()));
        let row = rows.swap_remove(rows.len() / 2);
        if shape.json {
            println!("{}", json_row(&row, &plan));
        } else {
            if std::mem::take(&mut header) {
                print_header(&model, server, &plan);
            }
            print_row(&row);
        }
        if let (0, Some(error)) = (row.completed, row.first_error) {
            return Err(anyhow::Error::from(Refused::from(error)).context("no request was served"));
        }
    }
    Ok(())
}

fn connections(load: &Load, mode: Mode) -> u32 {
    load.connections.unwrap_or(match mode {
        Mode::Streams(streams) => streams.div_ceil(STREAMS_PER_CONNECTION).clamp(1, MOST_CONNECTIONS),
        Mode::Rate(_) => RATE_CONNECTIONS,
    })
}

async fn connect(reach: &Reach, server: &str, count: u32) -> anyhow::Result<Vec<Client>> {
    let bearer = reach.bearer()?;
    let endpoint = reach
        .endpoint(server)?
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .tcp_nodelay(true);
    let mut clients = Vec::new();
    for index in 0..count {
        clients.push(match index {
            0 => connect::open_first(&endpoint, bearer.clone(), server).await?,
            _ => connect::open(&endpoint, bearer.clone(), server).await?,
        });
    }
    Ok(clients)
}

async fn model(client: &Client, name: &str) -> anyhow::Result<proto::Model> {
    let models = client.clone().list_models(proto::ListModelsRequest {}).await.map_err(Refused::from)?;
    let mut models = models.into_inner().models;
    models.retain(|model| model.state() == proto::ModelState::Serving);
    let served = models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ");
    let at = match models.as_slice() {
        [_] if name.is_empty() => Some(0),
        _ => models.iter().position(|model| model.name == name),
    };
    match at {
        Some(at) => Ok(models.swap_remove(at)),
        None if name.is_empty() && !served.is_empty() => {
            Err(Usage(format!("name one of {served}: --served-model")).into())
        }
        None => Err(Usage(format!("model \"{name}\" is not served; served are {served}")).into()),
    }
}

/// Sends the requests of a row and waits until all have ended.
fn once(runtime: &Runtime, clients: &[Client], plan: &Plan) -> Row {
    let shared = Arc::new(plan.clone());
    let client = |number: u32| clients[number as usize % clients.len()].clone();
    let mut tasks = Vec::new();
    let begin = Instant::now();
    match plan.mode {
        Mode::Streams(streams) => {
            // Each stream first sends the request with its own number, so requests `0..streams` are the wave whose
            // window is measured.
            let next = Arc::new(AtomicU32::new(streams));
            for stream in 0..streams.min(plan.requests) {
                let (plan, next, mut client) = (shared.clone(), next.clone(), client(stream));
                tasks.push(runtime.spawn(async move {
                    let mut served = Vec::new();
                    let mut number = stream;
                    while number < plan.requests {
                        let request = plan.request(number);
                        served.push((number, ask(&mut client, request, Instant::now()).await));
                        number = next.fetch_add(1, Ordering::Relaxed);
                    }
                    served
                }));
            }
        }
        Mode::Rate(rate) => {
            let mut gaps = Draw::new(plan.seed, u64::MAX);
            let mut at = Duration::ZERO;
            for number in 0..plan.requests {
                let due = begin + at;
                // Blocks this thread, which has nothing else to do, because its sleep is more precise than the
                // runtime's timers.
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                let (plan, mut client) = (shared.clone(), client(number));
                tasks.push(
                    runtime.spawn(async move { vec![(number, ask(&mut client, plan.request(number), due).await)] }),
                );
                at += Duration::from_secs_f64(gaps.exponential() / rate);
            }
        }
    }
    let mut served = Vec::with_capacity(plan.requests as usize);
    for task in tasks {
        // A panic in a task continues here.
        served.extend(runtime.block_on(task).unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic())));
    }
    served.sort_by_key(|(number, _)| *number);
    let served: Vec<Served> = served.into_iter().map(|(_, served)| served).collect();
    summarise(plan, begin, &served)
}

/// Sends one request and waits for its end.
async fn ask(client: &mut Client, request: proto::GenerateRequest, sent: Instant) -> Served {
    let mut served = Served {
        sent,
        ended: sent,
        arrivals: Arrivals::default(),
        started: None,
        usage: proto::Usage::default(),
        error: None,
    };
    if let Err(error) = listen(client, request, &mut served).await {
        served.error = Some(error);
    }
    served.ended = Instant::now();
    served
}

async fn listen(client: &mut Client, request: proto::GenerateRequest, served: &mut Served) -> Result<(), Status> {
    let asked = request.stopping.as_ref().and_then(|stopping| stopping.max_tokens).unwrap_or_default();
    let mut stream = client.generate(request).await?.into_inner();
    let mut finished = false;
    while let Some(message) = stream.message().await? {
        match message.event {
            Some(Event::Delta(delta)) => served.arrivals.push(Instant::now(), delta.token_ids.len() as u32),
            Some(Event::Prompt(_)) => {}
            Some(Event::Started(started)) => served.started = Some(started),
            Some(Event::Finished(end)) => {
                finished = true;
                served.usage = end.usage.unwrap_or_default();
            }
            None => {}
        }
    }
    let came = served.arrivals.tokens();
    if !finished || came != u64::from(asked) {
        return Err(Status::new(Code::DataLoss, format!("{came} tokens came of {asked}")));
    }
    Ok(())
}

impl Plan {
    /// Returns the request with this number. It depends only on the plan's seed, not on the stream that sends it.
    fn request(&self, number: u32) -> proto::GenerateRequest {
        let mut draw = Draw::new(self.seed, u64::from(number));
        let mut length = |mean: u32, most: u32| {
            let length = if self.spread == 0.0 { f64::from(mean) } else { draw.log_normal(mean.into(), self.spread) };
            // Lengths out of range become the nearest one in range.
            (length.round() as u32).clamp(1, most.max(1))
        };
        let prompt = length(self.prompt, self.context.saturating_sub(1));
        let decode = length(self.decode, self.context.saturating_sub(prompt));
        let mut same = Draw::new(self.seed, u64::MAX - 1);
        let ids = (0..prompt)
            .map(|at| if at < self.shared_prefix { same.below(self.vocabulary) } else { draw.below(self.vocabulary) })
            .collect();
        proto::GenerateRequest {
            model: self.model.clone(),
            prompt: Some(Prompt::Tokens(proto::TokenIds { ids })),
            stopping: Some(proto::Stopping { max_tokens: Some(decode), ignore_eos: true, ..Default::default() }),
            output: Some(proto::Output { text: Some(false), ..Default::default() }),
            cache_salt: self.salt.clone(),
            ..Default::default()
        }
    }
}

/// A seeded random number generator (SplitMix64).
struct Draw(u64);

impl Draw {
    fn new(seed: u64, stream: u64) -> Draw {
        // Mix `stream` first, so that different streams give independent sequences for the same seed.
        let mut apart = Draw(stream);
        Draw(seed ^ apart.next())
    }

    fn next(&mut self) -> u64 {
        split_mix(&mut self.0)
    }

    fn below(&mut self, bound: u32) -> u32 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u32
    }

    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Exponentially distributed with mean 1.
    fn exponential(&mut self) -> f64 {
        -self.unit().ln()
    }

    /// Log-normally distributed with this mean; `sigma` is the standard deviation of the logarithm.
    fn log_normal(&mut self, mean: f64, sigma: f64) -> f64 {
        let normal = (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp()
    }
}

fn summarise(plan: &Plan, begin: Instant, served: &[Served]) -> Row {
    let completed = || served.iter().filter(|one| one.error.is_none());
    let mut errors = BTreeMap::new();
    let mut replicas = BTreeMap::new();
    for one in served {
        if let Some(error) = &one.error {
            *errors.entry(code_name(error.code())).or_default() += 1;
        }
        if let Some(started) = &one.started {
            let device = started.device.clone().unwrap_or_default();
            *replicas.entry((started.replica.clone(), device.name, device.uuid)).or_default() += 1;
        }
    }
    let window = match plan.mode {
        Mode::Streams(streams) if served.len() >= streams as usize => {
            let wave = &served[..streams as usize];
            let all = wave.iter().all(|one| one.error.is_none());
            all.then(|| Window::of(wave.iter().map(|one| &one.arrivals))).flatten()
        }
        Mode::Streams(_) | Mode::Rate(_) => None,
    };
    let first_token = completed().filter_map(|one| Some((one.arrivals.first()? - one.sent).as_secs_f64()));
    let per_token: Vec<f64> = completed().filter_map(|one| one.arrivals.seconds_per_token()).collect();
    let end = served.iter().map(|one| one.ended).max().unwrap_or(begin);
    Row {
        mode: plan.mode,
        requests: served.len() as u32,
        completed: completed().count() as u32,
        errors,
        first_error: served.iter().find_map(|one| one.error.clone()),
        seconds: (end - begin).as_secs_f64(),
        prompt_tokens: completed().map(|one| u64::from(one.usage.prompt_tokens)).sum(),
        cached_tokens: completed().map(|one| u64::from(one.usage.cached_tokens)).sum(),
        // Includes the tokens of failed requests, because they were generated and delivered.
        output_tokens: served.iter().map(|one| one.arrivals.tokens()).sum(),
        window,
        stream_rate: Percentiles::of(per_token.iter().filter(|s| **s > 0.0).map(|seconds| 1.0 / seconds).collect()),
        first_token: Percentiles::of(first_token.collect()),
        gap: Percentiles::of(completed().flat_map(|one| one.arrivals.gaps()).collect()),
        per_token: Percentiles::of(per_token),
        queue: Percentiles::of(
            completed().filter_map(|one| one.started.as_ref()).map(|started| started.queue_seconds).collect(),
        ),
        replicas,
    }
}

impl Row {
    fn output_rate(&self) -> f64 {
        self.output_tokens as f64 / self.seconds.max(1e-9)
    }

    fn total_rate(&self) -> f64 {
        (self.prompt_tokens + self.output_tokens) as f64 / self.seconds.max(1e-9)
    }
}

fn json_row(row: &Row, plan: &Plan) -> Value {
    let ms = |values: &Option<Percentiles>| values.map(|values| values.json(1e3));
    let replica = |((replica, device, uuid), requests): (&(String, String, String), &u32)| json!({"replica": replica, "device": device, "uuid": uuid, "requests": requests});
    let (streams, rate) = match row.mode {
        Mode::Streams(streams) => (Some(streams), None),
        Mode::Rate(rate) => (None, Some(rate)),
    };
    json!({
        "test": "load",
        "model": plan.model,
        "streams": streams,
        "rate": rate,
        "requests": row.requests,
        "completed": row.completed,
        "errors": row.errors,
        "prompt": plan.prompt,
        "decode": plan.decode,
        "spread": plan.spread,
        "shared_prefix": plan.shared_prefix,
        "seed": plan.seed,
        "seconds": row.seconds,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
        "output_tokens_per_second": row.output_rate(),
        "total_tokens_per_second": row.total_rate(),
        "decode_tokens_per_second": row.window.map(|window| window.rate()),
        "decode_window_seconds": row.window.map(|window| window.seconds),
        "stream_tokens_per_second": row.stream_rate.map(|rates| rates.json(1.0)),
        "first_token_ms": ms(&row.first_token),
        "gap_ms": ms(&row.gap),
        "per_token_ms": ms(&row.per_token),
        "queue_ms": ms(&row.queue),
        "replicas": row.replicas.iter().map(replica).collect::<Vec<_>>(),
    })
}

fn print_header(model: &proto::Model, server: &str, plan: &Plan) {
    let lengths = if plan.spread == 0.0 {
        format!("prompt {}, decode {}", plan.prompt, plan.decode)
    } else {
        format!("prompt {}, decode {} on average (log-normal, sigma {})", plan.prompt, plan.decode, plan.spread)
    };
    println!("{} at {server}: {lengths}, {} tokens shared, seed {}", model.name, plan.shared_prefix, plan.seed);
    println!();
    println!(
        "{:<12} {:>8} {:>6} {:>9} {:>9} {:>9} {:>8} {:>8}   {:<11} {:>8} {:>8} {:>8} {:>8}",
        "load",
        "requests",
        "errors",
        "output/s",
        "total/s",
        "decode/s",
        "stream/s",
        "cached",
        "ms",
        "p50",
        "p95",
        "p99",
        "max"
    );
}

fn print_row(row: &Row) {
    let load = match row.mode {
        Mode::Streams(1) => "1 stream".to_owned(),
        Mode::Streams(streams) => format!("{streams} streams"),
        Mode::Rate(rate) => format!("{rate}/s"),
    };
    let rates = format!(
        "{:<12} {:>8} {:>6} {:>9.1} {:>9.1} {:>9} {:>8} {:>8}",
        load,
        row.requests,
        row.requests - row.completed,
        row.output_rate(),
        row.total_rate(),
        row.window.map_or("-".to_owned(), |window| format!("{:.1}", window.rate())),
        row.stream_rate.map_or("-".to_owned(), |rates| format!("{:.1}", rates.p50)),
        row.cached_tokens,
    );
    let times = [("first token", row.first_token), ("gap", row.gap), ("a token", row.per_token), ("queue", row.queue)];
    let width = rates.len();
    for (index, (name, values)) in times.into_iter().enumerate() {
        let shown = match values {
            None => format!("{:>8} {:>8} {:>8} {:>8}", "-", "-", "-", "-"),
            Some(p) => {
                format!("{:>8.1} {:>8.1} {:>8.1} {:>8.1}", p.p50 * 1e3, p.p95 * 1e3, p.p99 * 1e3, p.max * 1e3)
            }
        };
        println!("{:<width$}   {name:<11} {shown}", if index == 0 { rates.as_str() } else { "" });
    }
    for ((replica, device, uuid), requests) in &row.replicas {
        println!("{:<12} {requests} on {replica}, {device} ({uuid})", "");
    }
    for (code, count) in &row.errors {
        let first = row.first_error.as_ref().filter(|error| code_name(error.code()) == *code);
        println!("{:<12} {count} {code}{}", "", first.map_or(String::new(), |e| format!(", such as: {}", e.message())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(spread: f64) -> Plan {
        Plan {
            mode: Mode::Streams(4),
            requests: 4,
            prompt: 200,
            decode: 50,
            spread,
            shared_prefix: 30,
            seed: 7,
            model: "m".to_owned(),
            vocabulary: 1000,
            context: 600,
            salt: "s".to_owned(),
        }
    }

    fn ids(request: &proto::GenerateRequest) -> &[u32] {
        match &request.prompt {
            Some(Prompt::Tokens(tokens)) => &tokens.ids,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn requests_are_the_same_for_a_seed_and_differ_after_what_they_share() {
        let plan = plan(0.0);
        let (a, b) = (plan.request(0), plan.request(1));
        assert_eq!(a, plan.request(0));
        assert_eq!(ids(&a).len(), 200);
        assert_eq!(ids(&a)[..30], ids(&b)[..30]);
        let equal = ids(&a)[30..].iter().zip(&ids(&b)[30..]).filter(|(a, b)| a == b).count();
        assert!(equal < 5, "{equal} of 170 tokens are equal");
        assert!(ids(&a).iter().all(|id| *id < 1000));
        let other = Plan { seed: 8, ..plan };
        assert_ne!(ids(&other.request(0))[..30], ids(&a)[..30]);
    }

    #[test]
    fn spread_lengths_keep_their_means_and_the_context() {
        let plan = Plan { context: 100_000, ..plan(0.5) };
        let lengths: Vec<(f64, f64)> = (0..4000)
            .map(|number| {
                let request = plan.request(number);
                (ids(&request).len() as f64, f64::from(request.stopping.unwrap().max_tokens.unwrap()))
            })
            .collect();
        let mean = |of: fn(&(f64, f64)) -> f64| lengths.iter().map(of).sum::<f64>() / 4000.0;
        // The standard error of the mean is 0.53 / sqrt(4000) of the mean; five times that is 4.2 %.
        assert!((mean(|l| l.0) / 200.0 - 1.0).abs() < 0.042, "{}", mean(|l| l.0));
        assert!((mean(|l| l.1) / 50.0 - 1.0).abs() < 0.042, "{}", mean(|l| l.1));
        let narrow = Plan { context: 210, ..plan };
        for number in 0..500 {
            let request = narrow.request(number);
            let decode = request.stopping.as_ref().unwrap().max_tokens.unwrap();
            assert!(decode >= 1 && ids(&request).len() + decode as usize <= 210);
        }
    }

    #[test]
    fn gaps_are_those_of_independent_clients() {
        let mut draw = Draw::new(3, u64::MAX);
        let gaps: Vec<f64> = (0..10_000).map(|_| draw.exponential()).collect();
        let mean = gaps.iter().sum::<f64>() / 1e4;
        let square = gaps.iter().map(|gap| gap * gap).sum::<f64>() / 1e4;
        assert!((mean - 1.0).abs() < 0.05, "{mean}");
        assert!((square - 2.0).abs() < 0.3, "{square}: an exponential's second moment is 2");
    }

    #[test]
    fn a_summary_counts_failed_requests_by_code_and_measures_the_others() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let served = |sent: u64, tokens: &[u64], error: Option<Status>| {
            let mut arrivals = Arrivals::default();
            tokens.iter().for_each(|ms| arrivals.push(at(*ms), 2));
            let usage = proto::Usage {
                prompt_tokens: 10,
                cached_tokens: 3,
                output_tokens: arrivals.tokens() as u32,
                ..Default::default()
            };
            let started = proto::Started { replica: "m/0".to_owned(), queue_seconds: 0.004, ..Default::default() };
            Served { sent: at(sent), ended: at(500), arrivals, started: Some(started), usage, error }
        };
        let full = Status::resource_exhausted("the queue is full");
        let all = [
            served(0, &[100, 200, 300], None),
            served(0, &[110, 210, 310], None),
            served(50, &[], Some(full)),
            served(60, &[400, 500], None),
        ];
        let row = summarise(&Plan { mode: Mode::Streams(2), ..plan(0.0) }, begin, &all);
        assert_eq!((row.requests, row.completed), (4, 3));
        assert_eq!(row.errors, BTreeMap::from([("RESOURCE_EXHAUSTED", 1)]));
        assert_eq!((row.prompt_tokens, row.cached_tokens, row.output_tokens), (30, 9, 16));
        assert_eq!(row.output_rate().round(), 32.0);
        assert_eq!(row.total_rate().round(), 92.0);
        let first = row.first_token.unwrap();
        assert_eq!(((first.p50 * 1e3).round(), (first.max * 1e3).round()), (110.0, 340.0));
        assert_eq!((row.gap.unwrap().max * 1e3).round(), 100.0);
        assert_eq!((row.per_token.unwrap().p50 * 1e3).round(), 50.0);
        // Both streams deliver two tokens per 100 ms, from 110 to 300 ms. Later requests do not belong to the wave.
        let window = row.window.unwrap();
        assert_eq!(((window.seconds * 1e3).round(), window.rate().round()), (190.0, 40.0));
        assert_eq!(row.replicas.values().sum::<u32>(), 4);
        let json = json_row(&row, &plan(0.0));
        assert_eq!(json["errors"]["RESOURCE_EXHAUSTED"], 1);
        assert_eq!(json["rate"], Value::Null);
    }
}

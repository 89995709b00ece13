//! Goal: freed memory goes back to the system. Under mixed traffic the server's own memory does not grow, and after the
//! traffic has ended it is what it was at the start, apart from caches. Method: the program with its embedded models on
//! a CPU driver. Clients generate, cancel, exceed deadlines, send prompts that are too long, tokenize and compile
//! schemas. One client loads and unloads a model repeatedly; another one loads a model and cancels each load at another
//! moment, or replaces the model while it serves and cancels that. `RssAnon` of the process is read each second. The
//! growth is the slope of a least-squares line through the last two thirds of the readings.
//!
//! The test takes minutes and is run by `make test-soak`:
//!
//!     cargo test --release --test program -- soak --ignored --nocapture
//!     OSTINATO_SOAK_SECONDS=240      duration of the traffic (default 1080)
//!     OSTINATO_SOAK_PROGRAM=PATH     another build of the program, for comparison

use ostinato::actors::workers::KilledOnDrop;
use ostinato::service::proto;
use ostinato::service::proto::ostinato_client::OstinatoClient;
use proto::generate_request::Prompt;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio_stream::StreamExt;
use tonic::Request;
use tonic::transport::Channel;

const CLIENTS: u64 = 8;
/// Largest growth that is accepted of a run of [`SECONDS`], MiB per minute. Of a run in which nothing grew (-0.2), the slopes
/// through any 720 s had a standard deviation of 1.4; with glibc's allocator the process grew by 510.
const SLOPE: f64 = 4.0;
/// Duration of the traffic unless it is chosen. Of shorter runs the slope is noisier, with the power 1.5 of the ratio: its
/// standard deviation was 11.6 for 160 s.
const SECONDS: f64 = 1080.0;
/// Memory that may remain after the traffic above that at the start, MiB: prefix cache, compiled constraints, caches of
/// threads.
const KEPT: f64 = 120.0;

struct Server {
    child: KilledOnDrop,
    address: String,
}

impl Server {
    fn start(folder: &std::path::Path) -> Server {
        let program = std::env::var("OSTINATO_SOAK_PROGRAM");
        let program = program.unwrap_or_else(|_| env!("CARGO_BIN_EXE_ostinato").to_owned());
        let config = folder.join("ostinato.toml");
        let models = "[server]\nlisten = \"127.0.0.1:0\"\n[http]\nlisten = \"off\"\n[admin]\nlisten = \"off\"\n\
            [[models]]\nname = \"demo\"\npath = \"embedded:demo\"\nslots = 8\nreplicas = [{ device = \"cpu\" }]\n\
            [[models]]\nname = \"other\"\npath = \"embedded:demo-hybrid\"\nload = \"request\"\nreplicas = [{ device = \"cpu\" }]\n\
            [[models]]\nname = \"cancelled\"\npath = \"embedded:demo\"\nslots = 2\nload = \"request\"\nreplicas = [{ device = \"cpu\" }]\n";
        std::fs::write(&config, models).expect("the configuration");
        let mut child = Command::new(program)
            .args(["serve", "--config"])
            .arg(&config)
            .env("OSTINATO_RUNTIME__CACHE_DIRECTORY", folder)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let address = lines.find_map(|line| Some(line.split_once("listening on ")?.1.trim().to_owned()));
        let address = address.expect("it listens");
        std::thread::spawn(move || lines.for_each(drop));
        Server { child: KilledOnDrop(child), address: address.split([',', ' ']).next().expect("an address").to_owned() }
    }

    /// Returns the process's anonymous resident memory (RssAnon), MiB.
    fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel tells");
        line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") / 1024.0
    }

    async fn client(&self) -> OstinatoClient<Channel> {
        OstinatoClient::connect(format!("http://{}", self.address)).await.expect("a connection")
    }
}

/// Pseudo-random numbers that are the same in every run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }

    fn text(&mut self, words: u64) -> String {
        const WORDS: [&str; 10] =
            ["the ", "fox ", "river ", "lantern ", "story ", "Oscar ", "valley ", "of ", "was ", "and "];
        (0..words).map(|_| WORDS[self.below(10) as usize]).collect()
    }
}

async fn ask(client: &mut OstinatoClient<Channel>, chance: &mut Chance, drawn: &AtomicU64) {
    let kind = chance.below(20);
    if kind < 3 {
        let size = [20, 2_000, 12_000][chance.below(3) as usize];
        let input = Some(proto::tokenize_request::Input::Text(chance.text(size)));
        let _ = client.tokenize(proto::TokenizeRequest { model: "demo".to_owned(), input }).await;
        return;
    }
    if kind < 5 {
        let token_ids = (0..[100, 50_000][chance.below(2) as usize]).map(|_| chance.below(256) as u32).collect();
        let _ = client
            .detokenize(proto::DetokenizeRequest { model: "demo".to_owned(), token_ids, skip_special: true })
            .await;
        return;
    }
    // A prompt longer than the context is refused when its tokens are counted.
    let words = if kind == 5 { 60_000 } else { 3 + chance.below(60) };
    let mut request = proto::GenerateRequest {
        model: "demo".to_owned(),
        prompt: Some(Prompt::Text(chance.text(words))),
        stopping: Some(proto::Stopping { max_tokens: Some(1 + chance.below(16) as u32), ..Default::default() }),
        ..Default::default()
    };
    if kind < 8 {
        let properties: Vec<String> = (0..[3, 30, 300][chance.below(3) as usize])
            .map(|_| format!("\"k{}\":{{\"type\":\"string\"}}", chance.below(1_000_000)))
            .collect();
        let schema = format!("{{\"type\":\"object\",\"properties\":{{{}}}}}", properties.join(","));
        request.constraint =
            Some(proto::Constraint { kind: Some(proto::constraint::Kind::JsonSchema(schema)), ..Default::default() });
    }
    request.sampling = Some(proto::Sampling { n: Some(1 + chance.below(3) as u32), ..Default::default() });
    let mut request = Request::new(request);
    if kind == 8 {
        request.set_timeout(Duration::from_millis(300));
    }
    let Ok(response) = client.generate(request).await else { return };
    let mut stream = response.into_inner();
    while let Some(Ok(message)) = stream.next().await {
        if let Some(proto::generate_response::Event::Delta(delta)) = message.event {
            drawn.fetch_add(delta.token_ids.len() as u64, Relaxed);
        }
        // Dropping the stream in the middle cancels the request.
        if kind > 13 && chance.below(3) == 0 {
            return;
        }
    }
}

/// The numbers of loads that [`give_up_loads`] has begun, by their ends.
#[derive(Default)]
struct GivenUp {
    cancelled: AtomicU64,
    finished: AtomicU64,
}

/// Loads a model and cancels the load after up to 1.5 s, again and again. Every fourth time the model is first loaded to
/// its end and the load that is cancelled would have replaced it. Some callers leave before the load is cancelled.
async fn give_up_loads(server: Arc<Server>, stop: Arc<AtomicBool>, ends: Arc<GivenUp>) {
    let (mut client, mut chance) = (server.client().await, Chance(99));
    let load = || proto::LoadModelRequest { name: "cancelled".to_owned(), ..Default::default() };
    let unload = || proto::UnloadModelRequest { name: "cancelled".to_owned(), ..Default::default() };
    for round in 0.. {
        if stop.load(Relaxed) {
            return;
        }
        if round % 4 == 3 {
            let mut progress = client.load_model(load()).await.expect("a load").into_inner();
            while let Some(event) = progress.next().await {
                event.expect("a load that nobody cancels");
            }
        }
        let mut progress = client.load_model(load()).await.expect("a load").into_inner();
        let leaves = chance.below(2) == 0;
        let ended = tokio::spawn(async move {
            while let Some(event) = progress.next().await {
                match event {
                    Ok(_) if leaves => return None,
                    Ok(_) => {}
                    Err(status) => return Some(Err(status)),
                }
            }
            Some(Ok(()))
        });
        tokio::time::sleep(Duration::from_millis(chance.below(1_500))).await;
        client.unload_model(unload()).await.expect("a model that is being loaded, or is served");
        match ended.await.expect("no panic") {
            Some(Err(status)) => {
                assert_eq!(status.code(), tonic::Code::Aborted, "{status:?}");
                ends.cancelled.fetch_add(1, Relaxed);
            }
            Some(Ok(())) => {
                ends.finished.fetch_add(1, Relaxed);
            }
            None => {}
        }
        // Unloading a model whose replacement was being loaded cancels only the replacement.
        let _ = client.unload_model(unload()).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Returns the slope of memory (MiB) over time (seconds), in MiB per minute.
fn slope(samples: &[(f64, f64)]) -> f64 {
    let count = samples.len() as f64;
    let (x, y) = samples.iter().fold((0.0, 0.0), |(x, y), sample| (x + sample.0 / count, y + sample.1 / count));
    let over: f64 = samples.iter().map(|sample| (sample.0 - x) * (sample.1 - y)).sum();
    60.0 * over / samples.iter().map(|sample| (sample.0 - x).powi(2)).sum::<f64>()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes"]
async fn memory_that_is_freed_is_given_back() {
    let seconds: f64 =
        std::env::var("OSTINATO_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    let folder = tempfile::tempdir().expect("a folder");
    let server = Arc::new(Server::start(folder.path()));
    let begin = server.memory();
    let (stop, drawn, asked, loads) = <(Arc<AtomicBool>, Arc<AtomicU64>, Arc<AtomicU64>, Arc<AtomicU64>)>::default();
    let mut tasks = Vec::new();
    for seed in 0..CLIENTS {
        let (server, stop, drawn, asked) = (server.clone(), stop.clone(), drawn.clone(), asked.clone());
        tasks.push(tokio::spawn(async move {
            let mut chance = Chance(seed);
            while !stop.load(Relaxed) {
                let mut client = server.client().await;
                for _ in 0..20 {
                    if !stop.load(Relaxed) {
                        ask(&mut client, &mut chance, &drawn).await;
                        asked.fetch_add(1, Relaxed);
                    }
                }
            }
        }));
    }
    let (other, ended, counted) = (server.clone(), stop.clone(), loads.clone());
    tasks.push(tokio::spawn(async move {
        let mut client = other.client().await;
        while !ended.load(Relaxed) {
            let load = proto::LoadModelRequest { name: "other".to_owned(), ..Default::default() };
            let mut progress = client.load_model(load).await.expect("a load").into_inner();
            while let Some(Ok(_)) = progress.next().await {}
            let unload = proto::UnloadModelRequest { name: "other".to_owned(), ..Default::default() };
            client.unload_model(unload).await.expect("unloaded");
            counted.fetch_add(1, Relaxed);
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }));
    let given_up = Arc::<GivenUp>::default();
    tasks.push(tokio::spawn(give_up_loads(server.clone(), stop.clone(), given_up.clone())));
    let (started, mut samples) = (Instant::now(), Vec::new());
    while started.elapsed().as_secs_f64() < seconds {
        tokio::time::sleep(Duration::from_secs(1)).await;
        samples.push((started.elapsed().as_secs_f64(), server.memory()));
        if samples.len() % 30 == 0 {
            println!("{:4.0} s: {:.0} MB, {} requests", samples.len(), server.memory(), asked.load(Relaxed));
        }
    }
    stop.store(true, Relaxed);
    let rate = drawn.load(Relaxed) as f64 / started.elapsed().as_secs_f64();
    for task in tasks {
        task.await.expect("no panic");
    }
    let most = samples.iter().map(|sample| sample.1).fold(0.0, f64::max);
    let grows = slope(&samples[samples.len() / 3..]);
    tokio::time::sleep(Duration::from_secs(20)).await;
    let rest = server.memory();
    let cancelled = given_up.cancelled.load(Relaxed);
    println!(
        "at the start {begin:.0} MB, at most {most:.0} MB, after 20 s of rest {rest:.0} MB; {grows:.1} MB a minute; \
         {} requests, {} loads, {cancelled} loads cancelled and {} not in time, {rate:.1} tokens/s",
        asked.load(Relaxed),
        loads.load(Relaxed),
        given_up.finished.load(Relaxed)
    );
    assert!(cancelled > 0, "no load was cancelled");
    let accepted = SLOPE * (SECONDS / seconds).max(1.0).powf(1.5);
    assert!(grows < accepted, "it grows by {grows:.1} MB a minute, {accepted:.1} are noise");
    assert!(rest < begin + KEPT, "{rest:.0} MB stay, {begin:.0} MB were taken at the start");
}

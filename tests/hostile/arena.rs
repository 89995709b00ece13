//! Shared parts of the attacks: the server program, the client that must not be disturbed, and measurement of the
//! server's memory. Not here: the attacks.
#![allow(dead_code)] // each kind of attack uses only some of these items

use crate::common;
use crate::serving::certificates::Authority;
use ostinato::actors::workers::KilledOnDrop;
use ostinato::service::proto;
use ostinato::service::proto::generate_response::Event;
use ostinato::service::proto::ostinato_client::OstinatoClient;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

/// The name of an attack and its function. The attack panics if it finds a defect; otherwise it may end in any way.
pub type Attack = (&'static str, fn(&Target, &mut Random));

/// The prompt of the well-behaved client and the number of tokens that it requests.
const QUESTION: &str = "Tell me a story about a fox, a lantern and a river.";
pub const TOKENS: u32 = 12;
/// Time limit for the start of the server, for two busy cores.
const START: Duration = Duration::from_secs(180);
/// Time limit for the end of the server after SIGTERM.
const END: Duration = Duration::from_secs(60);

/// Options of the server that is started.
#[derive(Default)]
pub struct Setup {
    /// Lines of the section `[server]` besides `listen`.
    pub server: String,
    /// Names and contents of further files in the configuration's folder.
    pub files: Vec<(&'static str, String)>,
    /// If set, the server uses TLS with a certificate of this authority.
    pub authority: Option<Authority>,
    /// The well-behaved client's token, if the server requires tokens.
    pub token: Option<String>,
    /// Soft limit of open files.
    pub open_files: Option<u32>,
    /// Limit of the process's address space, KiB.
    pub address_space_kib: Option<u64>,
    /// Environment variables of the program.
    pub environment: Vec<(&'static str, String)>,
    /// Makes checkpoints in the configuration's folder. Returns the configuration's entries of further models; the
    /// second argument is the device.
    pub further: Option<fn(&Path, &str) -> String>,
}

/// Limits that must hold after an attack.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The longest time between two messages to the well-behaved client, and until its first.
    pub gap: Duration,
    /// Peak resident memory above that of the undisturbed server, MiB.
    pub peak_mib: u64,
    /// Address space after the attack above that of the undisturbed server, MiB.
    pub address_space_mib: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { gap: Duration::from_secs(10), peak_mib: 1024, address_space_mib: 8192 }
    }
}

/// The addresses and the process of a server under attack.
#[derive(Clone, Debug)]
pub struct Target {
    /// `HOST:PORT` of the gRPC endpoint.
    pub address: String,
    /// `HOST:PORT` of the admin endpoint.
    pub page: String,
    /// `HOST:PORT` of OpenAI's API.
    pub http: String,
    /// The process id.
    pub id: u32,
    /// The folder of the configuration, `ostinato.toml`.
    pub folder: PathBuf,
    authority: Option<String>,
}

/// A server under attack and the client that watches it. A test program has one at a time.
pub struct Arena {
    server: Server,
    target: Target,
    watch: Option<Watch>,
    expected: Vec<u32>,
    token: Option<String>,
    before: Memory,
    _turn: MutexGuard<'static, ()>,
}

/// The observations of the well-behaved client.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Requests that were answered completely.
    pub requests: usize,
    /// Tokens of all requests.
    pub tokens: usize,
    /// The longest wait for a message, including the first.
    pub longest_gap: Duration,
    /// Failed and wrong answers.
    pub problems: Vec<String>,
}

/// Memory of a process in KiB, and its numbers of threads and open files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    pub resident: u64,
    pub peak: u64,
    pub address_space: u64,
    pub threads: u64,
    pub open_files: u64,
}

impl Memory {
    /// Returns the current values of a running process.
    pub fn of(id: u32) -> Memory {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let open = std::fs::read_dir(format!("/proc/{id}/fd")).map_or(0, |files| files.count() as u64);
        Memory {
            resident: number("VmRSS"),
            peak: number("VmHWM"),
            address_space: number("VmSize"),
            threads: number("Threads"),
            open_files: open,
        }
    }
}

/// Seeded random number generator (SplitMix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    /// Returns a number from 0 to `bound` exclusive.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// Returns a number from `least` to `most` inclusive.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }
}

/// Adds a bearer token to each call.
#[derive(Clone)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

pub type Client = OstinatoClient<InterceptedService<Channel, Bearer>>;

impl Target {
    /// Opens a connection.
    pub async fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        let endpoint = match &self.authority {
            None => Endpoint::new(format!("http://{}", self.address))?,
            Some(authority) => {
                let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority));
                Endpoint::new(format!("https://{}", self.address))?.tls_config(tls)?
            }
        };
        endpoint.connect().await
    }

    /// Returns a client on its own connection.
    pub async fn client(&self, token: Option<&str>) -> Result<Client, tonic::transport::Error> {
        let token = token.map(|token| format!("Bearer {token}").parse().expect("a token in ASCII"));
        Ok(OstinatoClient::with_interceptor(self.channel().await?, Bearer(token)))
    }

    /// Connects five new gRPC clients, each of which must be answered.
    pub fn answers_new_clients(&self) {
        runtime().block_on(async {
            for _ in 0..5 {
                let connected = tokio::time::timeout(Duration::from_secs(10), self.client(None)).await;
                let mut client = connected.expect("in time").expect("a connection");
                let listed = client.list_models(proto::ListModelsRequest {});
                tokio::time::timeout(Duration::from_secs(10), listed).await.expect("in time").expect("an answer");
            }
        });
    }

    /// Sends a GET to the admin endpoint. Connecting, and each read and write, may take up to `wait`. Returns the head
    /// and body of the answer.
    pub fn get(&self, path: &str, wait: Duration) -> std::io::Result<String> {
        let host = &self.page;
        let address = host.parse().map_err(std::io::Error::other)?;
        let mut stream = TcpStream::connect_timeout(&address, wait)?;
        stream.set_read_timeout(Some(wait))?;
        stream.set_write_timeout(Some(wait))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }

    /// Returns the lines of a token in the file of tokens.
    pub fn token_entry(name: &str, secret: &str, more: &str) -> String {
        use sha2::{Digest, Sha256};
        let digest: String = Sha256::digest(secret).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[tokens]]\nname = \"{name}\"\nsha256 = \"{digest}\"\n{more}\n")
    }

    /// Returns the server's current memory.
    pub fn memory(&self) -> Memory {
        Memory::of(self.id)
    }
}

/// Returns a runtime with two threads for an attacker's calls.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

struct Server {
    child: KilledOnDrop,
    folder: tempfile::TempDir,
}

/// Returns the UUID of lavapipe as `ostinato devices --json` reports it.
pub fn lavapipe() -> &'static str {
    static UUID: OnceLock<String> = OnceLock::new();
    UUID.get_or_init(|| {
        common::layer();
        let output = Command::new(env!("CARGO_BIN_EXE_ostinato")).args(["devices", "--json"]).output().unwrap();
        let devices: serde_json::Value = serde_json::from_slice(&output.stdout).expect("devices as JSON");
        let lavapipe = |d: &&serde_json::Value| d["name"].as_str().is_some_and(|name| name.contains("llvmpipe"));
        let device = devices.as_array().expect("a list").iter().find(lavapipe).expect("lavapipe");
        device["uuid"].as_str().expect("a UUID").to_owned()
    })
}

/// Raises this process's soft limit of open files, because attacks open many connections.
fn many_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limits = getrlimit(Resource::Nofile);
    let current = limits.maximum.map_or(8192, |most| most.min(8192));
    if limits.current.is_some_and(|files| files < current) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limits }).expect("the limit of open files");
    }
}

/// Returns the program to attack: the one that was built, or another build for comparison.
pub fn program() -> std::ffi::OsString {
    std::env::var_os("OSTINATO_HOSTILE_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_ostinato").into())
}

impl Server {
    fn start(setup: &Setup) -> (Server, Target) {
        let uuid = lavapipe();
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let tls = match &setup.authority {
            None => String::new(),
            Some(authority) => {
                authority.issue_to(folder.path(), "server");
                "tls = { certificate = \"server.pem\", key = \"server.key\" }\n".to_owned()
            }
        };
        for (name, text) in &setup.files {
            std::fs::write(folder.path().join(name), text).expect("a file");
        }
        let file = folder.path().join("ostinato.toml");
        let text = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\n{tls}{}\n[http]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n\
             [runtime]\ncache_directory = {cache:?}\n\
             [[models]]\nname = \"demo\"\npath = \"embedded:demo\"\nreplicas = [{{ device = \"{uuid}\" }}]\n{}",
            setup.server,
            setup.further.map(|further| further(folder.path(), uuid)).unwrap_or_default()
        );
        std::fs::write(&file, text).expect("a configuration");
        // A shell sets the limits and then executes the program in its place.
        let mut limits = String::new();
        if let Some(files) = setup.open_files {
            limits.push_str(&format!("ulimit -n {files} && "));
        }
        if let Some(kib) = setup.address_space_kib {
            limits.push_str(&format!("ulimit -v {kib} && "));
        }
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{limits}exec \"$0\" \"$@\"")).arg(program());
        command.args(["serve", "--config"]).arg(&file).env_remove("OSTINATO_TOKEN");
        command.envs(setup.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().expect("a server");
        let output = child.stdout.take().expect("its output");
        let mut server = Server { child: KilledOnDrop(child), folder };
        // A thread reads the lines, so that waiting for a server that prints nothing has a time limit.
        let (sender, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
        });
        let mut line = |begin: &str| {
            let told = match lines.recv_timeout(START) {
                Ok(line) => line,
                Err(_) => panic!("it does not begin: {:?}\n{}", server.child.try_wait(), server.log()),
            };
            let rest = told.strip_prefix(begin).unwrap_or_else(|| panic!("{told}"));
            rest.trim_end_matches('/').to_owned()
        };
        let (address, page, http) = (line("listening on "), line("admin on http://"), line("OpenAI's API on "));
        let http =
            http.split_once("://").and_then(|(_, rest)| rest.strip_suffix("/v1")).expect("an address").to_owned();
        let authority = setup.authority.as_ref().map(Authority::pem);
        let target =
            Target { address, page, http, id: server.child.id(), folder: server.folder.path().to_owned(), authority };
        (server, target)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

/// Returns the well-behaved client's request. The salt differs each time, so that nothing is found in the prefix cache.
fn question(number: usize) -> proto::GenerateRequest {
    let message = proto::ChatMessage { role: "user".to_owned(), content: QUESTION.to_owned(), ..Default::default() };
    proto::GenerateRequest {
        model: "demo".to_owned(),
        prompt: Some(proto::generate_request::Prompt::Chat(proto::Chat {
            messages: vec![message],
            ..Default::default()
        })),
        sampling: Some(proto::Sampling { temperature: Some(0.0), ..Default::default() }),
        stopping: Some(proto::Stopping { max_tokens: Some(TOKENS), ignore_eos: true, ..Default::default() }),
        cache_salt: format!("watch {number}"),
        ..Default::default()
    }
}

/// Sends the request once. Returns the tokens and the longest wait for a message.
async fn ask(client: &mut Client, number: usize, wait: Duration) -> Result<(Vec<u32>, Duration), String> {
    let mut longest = Duration::ZERO;
    let mut last = Instant::now();
    let late = |_| format!("nothing came for {:.1} s", wait.as_secs_f64());
    let begun = tokio::time::timeout(wait, client.generate(question(number))).await.map_err(late)?;
    let mut stream = begun.map_err(|status| format!("refused: {status:?}"))?.into_inner();
    let (mut tokens, mut finished) = (Vec::new(), false);
    loop {
        let message = tokio::time::timeout(wait, stream.message()).await.map_err(late)?;
        longest = longest.max(last.elapsed());
        last = Instant::now();
        match message.map_err(|status| format!("ended: {status:?}"))? {
            None if finished => return Ok((tokens, longest)),
            None => return Err("the stream ended without a last message".to_owned()),
            Some(message) => match message.event {
                Some(Event::Delta(delta)) => tokens.extend(delta.token_ids),
                Some(Event::Finished(_)) => finished = true,
                _ => {}
            },
        }
    }
}

/// The client gives up after this time without a message.
const PATIENCE: Duration = Duration::from_secs(60);
/// The client's pause between two requests. Without it, its tokens would keep all cores of a CPU driver busy, and what runs
/// beside this program would take longer.
const PAUSE: Duration = Duration::from_millis(800);

struct Watch {
    stop: CancellationToken,
    thread: std::thread::JoinHandle<Seen>,
}

impl Watch {
    /// Repeats the request on a separate thread over one connection, until it is stopped. Returns after the first answer,
    /// with its tokens, which all later answers must equal: of several connections, the server closes one without any
    /// answered call first, so the client makes its first call before any attack.
    fn start(target: &Target, token: Option<String>) -> (Watch, Vec<u32>) {
        let stop = CancellationToken::new();
        let (stopped, target) = (stop.clone(), target.clone());
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let mut seen = Seen::default();
                let mut client = target.client(token.as_deref()).await.expect("a connection before any attack");
                let (expected, _) = ask(&mut client, 0, PATIENCE).await.expect("an answer before any attack");
                assert_eq!(expected.len(), TOKENS as usize);
                tell.send(expected.clone()).expect("the test waits for it");
                for number in 1.. {
                    // The last request begins after the attack.
                    let last = stopped.is_cancelled();
                    match ask(&mut client, number, PATIENCE).await {
                        Ok((tokens, gap)) => {
                            seen.requests += 1;
                            seen.tokens += tokens.len();
                            seen.longest_gap = seen.longest_gap.max(gap);
                            if tokens != expected {
                                seen.problems.push(format!("request {number} has drawn {tokens:?}, not {expected:?}"));
                            }
                        }
                        Err(why) => seen.problems.push(format!("request {number}: {why}")),
                    }
                    if last {
                        break;
                    }
                    tokio::select! {
                        () = tokio::time::sleep(PAUSE) => {}
                        () = stopped.cancelled() => {}
                    }
                }
                seen
            })
        });
        (Watch { stop, thread }, told.recv().expect("the well-behaved client's first answer"))
    }
}

impl Arena {
    /// Starts a server and the well-behaved client, whose first answer, before any attack, gives the expected tokens.
    pub fn enter(setup: Setup) -> Arena {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        many_files();
        let (server, target) = Server::start(&setup);
        let (watch, expected) = Watch::start(&target, setup.token.clone());
        let watch = Some(watch);
        // Resets the peak of resident memory (VmHWM), which is measured from here on.
        let _ = std::fs::write(format!("/proc/{}/clear_refs", target.id), "5");
        let before = target.memory();
        Arena { server, target, watch, expected, token: setup.token, before, _turn: turn }
    }

    /// Returns the target of attacks.
    pub fn target(&self) -> Target {
        self.target.clone()
    }

    /// Returns the memory of the undisturbed server.
    pub fn before(&self) -> Memory {
        self.before
    }

    /// Returns the server's log.
    pub fn log(&self) -> String {
        self.server.log()
    }

    /// Ends the attack. Returns the observations of the well-behaved client, or panics with everything that violates
    /// the limits.
    pub fn leave(mut self, bounds: Bounds) -> Seen {
        let mut problems = Vec::new();
        let watch = self.watch.take().expect("it is left once");
        watch.stop.cancel();
        let mut seen = watch.thread.join().expect("the well-behaved client");
        problems.append(&mut seen.problems);
        if seen.requests == 0 {
            problems.push("no request of the well-behaved client was answered".to_owned());
        }
        if seen.longest_gap > bounds.gap {
            problems.push(format!(
                "the well-behaved client waited {:.1} s for a message, at most {:.1} are allowed",
                seen.longest_gap.as_secs_f64(),
                bounds.gap.as_secs_f64()
            ));
        }
        match self.server.child.try_wait().expect("its status") {
            Some(status) => problems.push(format!("the server has ended: {status}")),
            None => {
                let after = self.target.memory();
                for (what, before, after, most) in [
                    ("resident memory at its height", self.before.resident, after.peak, bounds.peak_mib),
                    ("address space", self.before.address_space, after.address_space, bounds.address_space_mib),
                ] {
                    let more = after.saturating_sub(before) >> 10;
                    eprintln!("{what}: {more} MiB more than before");
                    if more > most {
                        problems.push(format!("{what} has grown by {more} MiB, at most {most} are allowed"));
                    }
                }
                problems.extend(self.new_client().err());
                problems.extend(self.end().err());
            }
        }
        assert!(
            problems.is_empty(),
            "{}\n{seen:?}\nthe log ends with:\n{}",
            problems.join("\n"),
            tail(&self.server.log())
        );
        seen
    }

    /// Checks that a new client is served.
    fn new_client(&self) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let client = tokio::time::timeout(PATIENCE, self.target.client(self.token.as_deref())).await;
            let client = client.map_err(|_| "a new client cannot connect".to_owned())?;
            let mut client = client.map_err(|error| format!("a new client cannot connect: {error}"))?;
            let (tokens, _) =
                ask(&mut client, usize::MAX, PATIENCE).await.map_err(|why| format!("a new client: {why}"))?;
            if tokens == self.expected { Ok(()) } else { Err(format!("a new client was told {tokens:?}")) }
        })
    }

    /// Checks that SIGTERM ends the server with status 0.
    fn end(&mut self) -> Result<(), String> {
        let id = self.server.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &id]).status().expect("kill");
        assert!(sent.success());
        let until = Instant::now() + END;
        loop {
            match self.server.child.try_wait().expect("its status") {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("after SIGTERM it ended with {status}")),
                None if Instant::now() > until => return Err(format!("it runs {} s after SIGTERM", END.as_secs())),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

/// Returns the last lines of a log.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

//! Hosts of a fleet on one machine: network namespaces behind a virtual switch, the programs that run in them, and the
//! Python client. It needs root and `ip`; without them a test fails with a message. Not here: the requests and the
//! expected answers.

use crate::python::python;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The names of our namespaces begin with this prefix, followed by the id of the process that created them.
const PREFIX: &str = "ostinato-test";
/// Runs `ip` and returns its standard output.
fn ip(arguments: &[&str]) -> String {
    let run = Command::new("ip").args(arguments).output();
    let output = run.unwrap_or_else(|e| panic!("ip does not run ({e}): install iproute2, or run deploy/setup.sh test"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "ip {}: {said}\nthe test makes its hosts of network namespaces and needs root for that",
        arguments.join(" ")
    );
    String::from_utf8(output.stdout).expect("text")
}

/// A virtual switch and the hosts connected to it. Dropping it ends every process in the hosts and removes everything.
#[derive(Debug)]
pub struct Network {
    name: String,
    /// The third octet of every address.
    net: u8,
    pub hosts: Vec<Host>,
}

/// A host: a network namespace with one address.
#[derive(Clone, Debug)]
pub struct Host {
    pub namespace: String,
    pub address: Ipv4Addr,
}

impl Network {
    /// Creates a network with this number of hosts.
    pub fn new(hosts: u8) -> Network {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        remove_abandoned();
        let pid = std::process::id();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The network is isolated from the outside, so its addresses may equal those of another one.
        let mut network =
            Network { name: format!("{PREFIX}-{pid}-{number}"), net: (number % 250) as u8, hosts: Vec::new() };
        let switch = network.switch();
        ip(&["netns", "add", &switch]);
        ip(&["-n", &switch, "link", "add", "switch", "type", "bridge"]);
        ip(&["-n", &switch, "link", "set", "switch", "up"]);
        for index in 0..hosts {
            let host = Host {
                namespace: format!("{}-host{index}", network.name),
                // 198.18.0.0/15 is reserved for network tests (RFC 2544).
                address: Ipv4Addr::new(198, 18, network.net, index + 1),
            };
            let (name, port) = (host.namespace.clone(), format!("port{index}"));
            ip(&["netns", "add", &name]);
            network.hosts.push(host);
            let address = format!("{}/24", network.hosts[usize::from(index)].address);
            ip(&["link", "add", "eth0", "netns", &name, "type", "veth", "peer", "name", &port, "netns", &switch]);
            ip(&["-n", &switch, "link", "set", &port, "master", "switch", "up"]);
            ip(&["-n", &name, "address", "add", &address, "dev", "eth0"]);
            ip(&["-n", &name, "link", "set", "lo", "up"]);
            ip(&["-n", &name, "link", "set", "eth0", "up"]);
        }
        network
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in &self.hosts {
            remove(&host.namespace);
        }
        remove(&self.switch());
    }
}

/// Kills the processes in a namespace and deletes it. It must not panic, because it also runs while a test is failing.
fn remove(namespace: &str) {
    let pids = Command::new("ip").args(["netns", "pids", namespace]).output();
    for pid in pids.iter().flat_map(|output| {
        String::from_utf8_lossy(&output.stdout).into_owned().lines().map(str::to_owned).collect::<Vec<_>>()
    }) {
        let own = std::process::id().to_string() == pid;
        if !own && !pid.is_empty() {
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
        }
    }
    let _ = Command::new("ip").args(["netns", "delete", namespace]).status();
}

/// Removes namespaces left by tests whose process was killed.
fn remove_abandoned() {
    for line in ip(&["netns", "list"]).lines() {
        let name = line.split(' ').next().unwrap_or("");
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.trim_start_matches('-').split('-').next());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(name);
        }
    }
}

impl Host {
    /// Returns a command that runs in the host's namespace. The started process is that of the program itself.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]).arg(program);
        command
    }

    /// Returns the socket address of a port of this host.
    pub fn at(&self, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(self.address, port)
    }

    /// Runs `work` on a thread of this process that is in the host's namespace, so that its sockets belong to the host.
    pub fn thread<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> std::thread::JoinHandle<T> {
        let namespace = File::open(Path::new("/run/netns").join(&self.namespace)).expect("a namespace");
        let enter = move || {
            rustix::thread::move_into_link_name_space(
                namespace.as_fd(),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .unwrap_or_else(|e| panic!("cannot enter a network namespace: {e}"));
            work()
        };
        std::thread::spawn(enter)
    }

    /// Returns whether a TCP connection to this address, made from this host, succeeds.
    pub fn answers(&self, at: SocketAddrV4) -> bool {
        let connect = move || TcpStream::connect_timeout(&at.into(), Duration::from_secs(1)).is_ok();
        self.thread(connect).join().expect("a connection is tried")
    }
}

/// A program on a host. It is killed when this is dropped.
#[derive(Debug)]
pub struct Program {
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts a program whose output is appended to a file.
    pub fn start(mut command: Command, log: PathBuf) -> Program {
        let file =
            File::options().create(true).append(true).open(&log).unwrap_or_else(|e| panic!("{}: {e}", log.display()));
        let child = command.stdin(Stdio::null()).stdout(file.try_clone().expect("a handle")).stderr(file).spawn();
        Program { child: child.unwrap_or_else(|e| panic!("{command:?}: {e}")), log }
    }

    /// Waits until `look` returns true. Panics with the program's log if it ends before that, or after 90 seconds.
    pub fn wait(&mut self, what: &str, mut look: impl FnMut() -> bool) {
        let until = Instant::now() + Duration::from_secs(90);
        while !look() {
            let ended = self.child.try_wait().expect("a state");
            assert!(ended.is_none() && Instant::now() < until, "{what}: {ended:?}\n{}", end_of(&self.log));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills the program with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), end_of(&self.log));
        }
    }
}

/// Returns the last lines of a file.
fn end_of(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Two workers with the demo model and a router, each on its own host. The router's host is the last one.
#[derive(Debug)]
pub struct Fleet {
    // Field order matters: the programs end before their hosts are removed.
    pub workers: Vec<Option<Program>>,
    _router: Program,
    folder: tempfile::TempDir,
    pub network: Network,
    traces: Option<String>,
}

/// The workers' gRPC port, the server's default.
const ENGINE_PORT: u16 = 50051;
/// The router's port, the default of SMG.
const ROUTER_PORT: u16 = 30000;
/// The number of workers.
const WORKERS: u8 = 2;

/// The configuration of a worker. It has more slots than the default for a CPU driver, because the many requests
/// would take too long in small batches.
const WORKER: &str = r#"
[[models]]
name = "demo"
path = "embedded:demo"
replicas = [{ device = "cpu" }]
slots = 16
"#;

/// The port of the trace collector on the router's host.
pub const COLLECTOR_PORT: u16 = 4317;

impl Fleet {
    /// Starts the workers and the router, which distributes requests by `policy`. With `traces` the workers and the
    /// router export spans to the router's host.
    pub fn start(network: Network, policy: &str, traces: bool) -> Fleet {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder for logs");
        let host = &network.hosts[usize::from(WORKERS)];
        let collector = host.at(COLLECTOR_PORT);
        let mut router = host.command(python().with_file_name("smg"));
        router.args(["launch", "--host", &host.address.to_string(), "--port", &ROUTER_PORT.to_string()]);
        router.args(["--backend", "vllm", "--policy", policy, "--log-level", "debug"]);
        // With these settings a worker that has come back is used within seconds.
        router.args(["--health-check-interval-secs", "1", "--health-check-timeout-secs", "5"]);
        router.args(["--health-failure-threshold", "2", "--health-success-threshold", "1"]);
        // A worker with more than 8 waiting requests would be left out until its load is polled again, 10 s later: all
        // streams would go to one worker, or to none while the other is down.
        router.arg("--disable-worker-overload-protection");
        if traces {
            router.args(["--enable-trace", "--otlp-traces-endpoint", &collector.to_string()]);
        }
        router.arg("--worker-urls");
        for worker in &network.hosts[..usize::from(WORKERS)] {
            router.arg(format!("grpc://{}", worker.at(ENGINE_PORT)));
        }
        let traces = traces.then(|| format!("http://{collector}"));
        let mut workers: Vec<Option<Program>> = (0..usize::from(WORKERS))
            .map(|index| Some(worker(&network, index, folder.path(), traces.as_deref())))
            .collect();
        for (index, program) in workers.iter_mut().enumerate() {
            let host = &network.hosts[index];
            let program = program.as_mut().expect("just started");
            program.wait("a worker's start", || host.answers(host.at(ENGINE_PORT)));
        }
        let mut router = Program::start(router, folder.path().join("router.log"));
        router.wait("the router's start", || host.answers(host.at(ROUTER_PORT)));
        Fleet { workers, _router: router, folder, network, traces }
    }

    /// Runs the named cases of the Python client and returns its output. The client may ask for a worker to be killed
    /// or restarted meanwhile.
    pub fn ask(&mut self, cases: &[&str]) -> String {
        let host = self.network.hosts[usize::from(WORKERS)].clone();
        let mut client = host.command(python());
        client.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/router/client.py"));
        client.args(["--program", env!("CARGO_BIN_EXE_ostinato")]);
        client.args(["--router", &format!("http://{}", host.at(ROUTER_PORT))]);
        for worker in &self.network.hosts[..usize::from(WORKERS)] {
            client.args(["--worker", &worker.at(ENGINE_PORT).to_string()]);
        }
        let errors = self.folder.path().join("client.log");
        client.args(cases).env("PYTHONUNBUFFERED", "1").stdin(Stdio::null()).stdout(Stdio::piped());
        client.stderr(File::create(&errors).expect("a log"));
        let mut client = client.spawn().expect("Python runs");
        let said = self.follow(client.stdout.take().expect("a pipe"));
        let status = client.wait().expect("it ends");
        assert!(status.success(), "{cases:?}: {status}\n{said}\n{}", end_of(&errors));
        said
    }

    /// Reads the client's output to its end and executes its requests to kill or start a worker.
    fn follow(&mut self, client: ChildStdout) -> String {
        let mut said = String::new();
        for line in BufReader::new(client).lines() {
            let line = line.expect("text");
            match line.split_once(' ') {
                Some(("kill", index)) => self.kill(index.parse().expect("a number")),
                Some(("start", index)) => self.restart(index.parse().expect("a number")),
                _ => {
                    println!("{line}");
                    said.push_str(&line);
                    said.push('\n');
                }
            }
        }
        said
    }

    fn kill(&mut self, index: usize) {
        self.workers[index].take().expect("it runs").kill();
    }

    fn restart(&mut self, index: usize) {
        let host = &self.network.hosts[index];
        let mut program = worker(&self.network, index, self.folder.path(), self.traces.as_deref());
        program.wait("a worker's second start", || host.answers(host.at(ENGINE_PORT)));
        self.workers[index] = Some(program);
    }

    /// Returns the router's log.
    pub fn router_log(&self) -> String {
        let mut text = Vec::new();
        let file = File::open(self.folder.path().join("router.log"));
        file.and_then(|mut file| file.read_to_end(&mut text)).expect("a log");
        String::from_utf8_lossy(&text).into_owned()
    }
}

fn worker(network: &Network, index: usize, folder: &Path, traces: Option<&str>) -> Program {
    let host = &network.hosts[index];
    let mut command = host.command(env!("CARGO_BIN_EXE_ostinato"));
    let config = folder.join("worker.toml");
    std::fs::write(&config, WORKER).expect("a configuration");
    command.args(["serve", "--insecure", "--listen", &host.at(ENGINE_PORT).to_string(), "--config"]).arg(config);
    command.env("OSTINATO_RUNTIME__CACHE_DIRECTORY", folder.join("pipelines"));
    // Other tests of this program restrict the loader to two CPU drivers, of which "cpu" would not choose one.
    command.env_remove("VK_DRIVER_FILES").env_remove("VK_ICD_FILENAMES");
    if let Some(endpoint) = traces {
        command.env("OSTINATO_TELEMETRY__OTLP_ENDPOINT", endpoint);
        // Only traces that a client has started are exported.
        command.env("OSTINATO_TELEMETRY__SAMPLE_RATIO", "0");
    }
    Program::start(command, folder.join(format!("worker-{index}.log")))
}

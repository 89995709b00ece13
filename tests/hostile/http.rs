//! Attacks on the port of OpenAI's API: requests that do not end, answers that nobody reads, heads that are too long, and
//! more connections than there are files. Each connection must be closed in time or refused, while the health probe of
//! the port and gRPC clients are answered.

use crate::arena::{Arena, Attack, Bounds, Random, Setup, Target, runtime};
use ostinato::service::proto;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The attacks that can be combined. None needs specific server options.
pub const ATTACKS: &[Attack] = &[
    ("unfinished HTTP requests", |target, random| {
        let unfinished = &UNFINISHED[random.below(UNFINISHED.len() as u64) as usize];
        drop(open(target, unfinished.bytes, random.between(1, 300) as usize));
        let bodies = bodies(random.below(2) == 0);
        drop(open(target, &bodies, random.between(1, 100) as usize));
    }),
    ("unread events", |target, random| {
        let held = unread_streams(target, random.between(1, 4) as usize);
        std::thread::sleep(Duration::from_millis(random.between(1, 2_000)));
        drop(held);
    }),
    ("long heads", |target, _| long_heads(target)),
    ("HTTP noise", noise),
];

/// From a connection's beginning until the head of its request is complete, as documented.
const HEAD_WAIT: Duration = Duration::from_secs(10);
/// From a head until its body is complete, as documented.
const BODY_WAIT: Duration = Duration::from_secs(30);
/// The additional time that a connection may take to be closed on a machine that is busy with other work.
const SLACK: Duration = Duration::from_secs(8);
/// The longest wait of the health probe for its answer. Kubernetes' probes have 1 s by default on an idle machine; here
/// two cores decode, too.
const PROBE: Duration = Duration::from_secs(5);
/// The server's default limit of a message, bytes.
const MESSAGE: usize = 16 << 20;

/// A request that does not end.
struct Unfinished {
    name: &'static str,
    bytes: &'static [u8],
    /// A byte that is sent each second, so that the connection is never silent.
    drip: Option<u8>,
    /// The time in which the server must close it.
    within: Duration,
}

const POST: &str = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";

const UNFINISHED: &[Unfinished] = &[
    Unfinished { name: "silence", bytes: b"", drip: None, within: HEAD_WAIT },
    Unfinished { name: "half a line", bytes: b"GET /v1/mod", drip: None, within: HEAD_WAIT },
    Unfinished { name: "half a head", bytes: b"GET /v1/models HTTP/1.1\r\nHost: loc", drip: None, within: HEAD_WAIT },
    Unfinished { name: "a slow head", bytes: b"GET /v1/models HTTP/1.1\r\nX: ", drip: Some(b'x'), within: HEAD_WAIT },
    Unfinished {
        name: "silence after an answer",
        bytes: b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        drip: None,
        within: HEAD_WAIT,
    },
    Unfinished {
        name: "half a body",
        bytes: b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{\"prompt\": \"",
        drip: None,
        within: BODY_WAIT,
    },
    Unfinished {
        name: "a slow body",
        bytes: b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{\"prompt\": \"",
        drip: Some(b'x'),
        within: BODY_WAIT,
    },
    Unfinished {
        name: "a declared length",
        bytes: b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16777216\r\n\r\n",
        drip: None,
        within: BODY_WAIT,
    },
    Unfinished {
        name: "half a chunk",
        bytes:
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n{\"prompt",
        drip: None,
        within: BODY_WAIT,
    },
];

/// Opens connections that send these bytes and stay open.
fn open(target: &Target, bytes: &[u8], connections: usize) -> Vec<TcpStream> {
    let open = (0..connections).filter_map(|_| {
        let mut stream = TcpStream::connect(&target.http).ok()?;
        stream.write_all(bytes).ok()?;
        Some(stream)
    });
    open.collect()
}

/// The beginning of a request of the largest size: half of its body, or nothing of it.
fn bodies(half: bool) -> Vec<u8> {
    let mut bytes = format!("{POST}Content-Length: {MESSAGE}\r\n\r\n").into_bytes();
    if half {
        bytes.extend(std::iter::repeat_n(b' ', 64 << 10));
    }
    bytes
}

/// Whether the server has closed a connection. What it has sent is read and discarded.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a mode");
    loop {
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            // It was reset, because it had unread data.
            Err(_) => return true,
        }
    }
}

/// Asks the health probe of the port repeatedly on a separate thread, from another address than the attacks: of the
/// connections from one address, any may have to give up its place to another one.
pub struct Probe {
    stop: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<(usize, Duration, Vec<String>)>,
}

impl Probe {
    pub fn start(target: &Target) -> Probe {
        let (stop, stopped) = mpsc::channel();
        let target = target.clone();
        let thread = std::thread::spawn(move || {
            let (mut asked, mut longest, mut problems) = (0, Duration::ZERO, Vec::new());
            while stopped.recv_timeout(Duration::from_millis(100)) == Err(mpsc::RecvTimeoutError::Timeout) {
                let begun = Instant::now();
                match health(&target.http) {
                    Ok(answer) if answer.starts_with("HTTP/1.1 200") => {}
                    other => problems.push(format!("after {asked} answers of the health probe: {other:?}")),
                }
                asked += 1;
                longest = longest.max(begun.elapsed());
            }
            (asked, longest, problems)
        });
        Probe { stop, thread }
    }

    /// Ends the probe. Panics if it was not always answered in time.
    pub fn end(self) {
        drop(self.stop);
        let (asked, longest, problems) = self.thread.join().expect("it only asks");
        eprintln!("{asked} health probes, the longest took {:.2} s", longest.as_secs_f64());
        assert!(asked > 0 && problems.is_empty() && longest < PROBE, "{longest:?}: {problems:?}");
    }
}

/// Returns the answer of the health probe at `http`, asked from 127.0.0.2.
fn health(http: &str) -> std::io::Result<String> {
    let connected = runtime().block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind(([127, 0, 0, 2], 0).into())?;
        let connecting = socket.connect(http.parse().map_err(std::io::Error::other)?);
        tokio::time::timeout(PROBE, connecting).await.map_err(|_| ErrorKind::TimedOut)??.into_std()
    });
    let mut stream = connected?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PROBE))?;
    stream.set_write_timeout(Some(PROBE))?;
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The short attacks. Each must be refused or held without harm; `all_are_closed` runs meanwhile.
pub fn short_attacks(arena: &Arena) {
    let target = arena.target();
    long_heads(&target);
    endless_body(&target);
    unread_events_hold_nothing(&target);
    pipelined_requests_are_not_buffered(arena);
    target.answers_new_clients();
}

/// Opens eight connections of each kind, and waits until the server has closed all of them. Panics if that takes longer
/// than the kind allows.
pub fn all_are_closed(target: &Target) {
    let begun = Instant::now();
    let mut held: Vec<(&Unfinished, Vec<TcpStream>)> =
        UNFINISHED.iter().map(|unfinished| (unfinished, open(target, unfinished.bytes, 8))).collect();
    assert!(held.iter().all(|(_, streams)| streams.len() == 8));
    let mut dripped = Instant::now();
    while held.iter().any(|(_, streams)| !streams.is_empty()) {
        let drip = dripped.elapsed() > Duration::from_secs(1);
        if drip {
            dripped = Instant::now();
        }
        for (unfinished, streams) in &mut held {
            let before = streams.len();
            streams.retain_mut(|stream| {
                if let (true, Some(byte)) = (drip, unfinished.drip) {
                    // The server may just have closed it.
                    let _ = stream.write(&[byte]);
                }
                !is_closed(stream)
            });
            let took = begun.elapsed();
            if before > 0 && streams.is_empty() {
                eprintln!("{}: closed after {:.1} s", unfinished.name, took.as_secs_f64());
            }
            let within = unfinished.within + SLACK;
            assert!(streams.is_empty() || took < within, "{}: open after {took:?}", unfinished.name);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Goal: connections to the port use up neither the files nor the places of others. Method: 2,400 connections to a
/// server that may open 1,024 files: of each kind of unfinished requests, and of the largest requests.
#[test]
fn more_connections_than_files_starve_nobody() {
    let arena = Arena::enter(Setup { open_files: Some(1024), ..Setup::default() });
    let target = arena.target();
    let probe = Probe::start(&target);
    let mut held = Vec::new();
    for _ in 0..2 {
        for unfinished in UNFINISHED {
            held.extend(open(&target, unfinished.bytes, 120));
        }
        held.extend(open(&target, &bodies(true), 60));
        held.extend(open(&target, &bodies(false), 60));
        target.answers_new_clients();
    }
    assert_eq!(held.len(), 2 * 120 * (UNFINISHED.len() + 1));
    // The probes go on for a while.
    std::thread::sleep(Duration::from_secs(2));
    let files = target.memory().open_files;
    eprintln!("{files} files are open");
    assert!(files < 1000, "{files} files are open");
    probe.end();
    drop(held);
    arena.leave(Bounds { peak_mib: 256, ..Bounds::default() });
}

/// Sends heads with one long line, many lines, and a long path. Each must be refused, or the connection closed.
fn long_heads(target: &Target) {
    let many: String = (0..500).map(|number| format!("X-{number}: {number}\r\n")).collect();
    for head in [
        format!("GET /health HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20)),
        format!("GET /health HTTP/1.1\r\n{many}\r\n"),
        format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20)),
        format!("{POST}{many}Content-Length: 2\r\n\r\n{{}}"),
    ] {
        let mut stream = TcpStream::connect(&target.http).expect("a connection");
        stream.set_read_timeout(Some(SLACK)).expect("a timeout");
        stream.set_write_timeout(Some(SLACK)).expect("a timeout");
        // The server refuses the head before it has read all of it.
        let _ = stream.write_all(head.as_bytes());
        let mut answer = Vec::new();
        let ended = stream.read_to_end(&mut answer);
        let late =
            ended.as_ref().is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
        let answer = String::from_utf8_lossy(&answer);
        assert!(!late && !answer.starts_with("HTTP/1.1 200"), "{ended:?}: {answer}");
    }
}

/// Sends a body in chunks without an end. It must be refused when it is longer than a message may be.
fn endless_body(target: &Target) {
    let mut stream = TcpStream::connect(&target.http).expect("a connection");
    stream.set_write_timeout(Some(SLACK)).expect("a timeout");
    stream.set_read_timeout(Some(SLACK)).expect("a timeout");
    stream.write_all(format!("{POST}Transfer-Encoding: chunked\r\n\r\n").as_bytes()).expect("a head");
    let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x10000], b"\r\n"].concat();
    let sent = (0..).take_while(|_| stream.write_all(&chunk).is_ok()).count() * 0x10000;
    assert!(sent < 2 * MESSAGE, "{sent} bytes of a body were taken");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    // The answer may be lost, because the connection is reset while the body is still being sent.
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
}

/// Asks for long streams of large events on connections whose receive buffers are small, and reads nothing.
fn unread_streams(target: &Target, connections: usize) -> Vec<TcpStream> {
    let body = serde_json::json!({
        "model": "demo", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": true, "stream": true,
        "logprobs": 20, "temperature": 1.0, "seed": 1,
    });
    let body = body.to_string();
    let request = format!("{POST}Content-Length: {}\r\n\r\n{body}", body.len());
    runtime().block_on(async {
        let mut open = Vec::new();
        for _ in 0..connections {
            let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
            socket.set_recv_buffer_size(4096).expect("a small buffer");
            let stream = socket.connect(target.http.parse().expect("an address")).await.expect("a connection");
            let mut stream = stream.into_std().expect("a socket");
            stream.set_nonblocking(false).expect("a mode");
            stream.write_all(request.as_bytes()).expect("a request");
            open.push(stream);
        }
        open
    })
}

/// The number of sequences that the server's replicas are running and holding waiting.
fn unfinished(target: &Target) -> u32 {
    runtime().block_on(async {
        let mut client = target.client(None).await.expect("a connection");
        let load = client.get_load(proto::GetLoadRequest::default()).await.expect("the load").into_inner();
        load.replicas.iter().map(|replica| replica.running + replica.waiting).sum()
    })
}

/// Streams that nobody reads end as others do: their tokens are drawn, and no row or page waits for their readers.
/// `tests/service/openai.rs` shows what happens to those that are longer than their buffers.
fn unread_events_hold_nothing(target: &Target) {
    let held = unread_streams(target, 3);
    let begun = Instant::now();
    std::thread::sleep(Duration::from_millis(500));
    while unfinished(target) > 1 {
        assert!(begun.elapsed() < BODY_WAIT, "{} sequences run for streams that nobody reads", unfinished(target));
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("streams that nobody reads ran for {:.1} s", begun.elapsed().as_secs_f64());
    drop(held);
}

/// Sends requests on one connection without reading their answers. The server must stop reading instead of buffering the
/// answers.
fn pipelined_requests_are_not_buffered(arena: &Arena) {
    let target = arena.target();
    let before = target.memory().resident;
    let mut stream = TcpStream::connect(&target.http).expect("a connection");
    stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a timeout");
    let requests = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(1_000);
    let sent = (0..400).take_while(|_| stream.write_all(&requests).is_ok()).count();
    let more = target.memory().resident.saturating_sub(before) >> 10;
    eprintln!("{sent} thousand pipelined requests were taken, {more} MiB more");
    assert!(sent < 400 && more < 64, "{sent} thousand requests were taken, {more} MiB more");
}

/// Sends random bytes, some after the beginning of a valid request.
fn noise(target: &Target, random: &mut Random) {
    for _ in 0..random.between(1, 20) {
        let mut bytes = match random.below(4) {
            0 => format!("{POST}Content-Length: {}\r\n\r\n", random.below(5_000)).into_bytes(),
            1 => format!("{POST}Transfer-Encoding: chunked\r\n\r\n").into_bytes(),
            2 => b"GET /v1/models HTTP/1.1\r\n".to_vec(),
            _ => Vec::new(),
        };
        bytes.extend((0..random.below(5_000)).map(|_| random.next() as u8));
        drop(open(target, &bytes, 1));
    }
}

//! Attacks on the resources that one client may take from others. Each of them once ended a server or starved its
//! clients.

use crate::arena::{Arena, Attack, Bounds, Random, Setup, Target, lavapipe, program, runtime};
use crate::serving::certificates::Authority;
use crate::serving::raw::Raw;
use ostinato::service::proto;
use std::io::Read;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tonic::Code;

/// The attacks that can be combined. None needs specific server options.
pub const ATTACKS: &[Attack] = &[
    ("declared lengths", |target, random| declared_lengths(target, random.between(1, 5) as usize)),
    ("prompts that are reset", |target, random| {
        let wait = Duration::from_millis(random.between(1, 500));
        reset_prompts(target, None, random.between(1, 10) as usize, wait);
    }),
    ("long lists of ids", |target, random| drop(long_ids(target, None, random.between(1, 3) as usize))),
    ("half a request to the page", |target, random| drop(half_requests(target, random.between(1, 200) as usize))),
    ("resets", |target, random| resets(target, random.between(1, 5) as usize)),
    ("silence", |target, random| drop(silent(target, random.between(1, 100) as usize, b""))),
    ("noise", noise),
];

const GENERATE: &str = "/ostinato.v1.Ostinato/Generate";
/// The server's default limits of a message and of a prompt's text, bytes.
const MESSAGE: u32 = 16 << 20;
const PROMPT: usize = 4 << 20;

/// Returns a prompt of this many bytes.
fn text(bytes: usize) -> String {
    let mut text = "the quick brown fox jumps over the lazy dog and goes on to the river, where a lantern is. "
        .repeat(bytes / 90 + 1);
    text.truncate(bytes);
    text
}

/// Returns a request for two tokens after a prompt of this many bytes.
fn request(bytes: usize) -> proto::GenerateRequest {
    proto::GenerateRequest {
        prompt: Some(proto::generate_request::Prompt::Text(text(bytes))),
        stopping: Some(proto::Stopping { max_tokens: Some(2), ..Default::default() }),
        ..Default::default()
    }
}

/// Opens connections with the largest allowed number of calls, each of which declares a message of the largest size and
/// never sends it.
fn declared_lengths(target: &Target, connections: usize) {
    runtime().block_on(async {
        let mut open = Vec::new();
        let mut prefix = vec![0];
        prefix.extend(MESSAGE.to_be_bytes());
        for _ in 0..connections {
            let mut raw = Raw::open(&target.address).await;
            raw.acknowledge().await;
            let last = raw.call(GENERATE, 200).await;
            for stream in (1..=last).step_by(2) {
                raw.data(stream, &prefix, false).await;
            }
            open.push(raw);
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    });
}

/// Goal: no memory is reserved for declared message lengths. Method: 15,000 messages of which only the 5-byte prefix is
/// sent, each declaring 16 MiB, to a server that may use 16 GiB of address space.
#[test]
fn what_a_message_says_that_it_is_long_takes_no_memory() {
    let arena = Arena::enter(Setup { address_space_kib: Some(16 << 20), ..Setup::default() });
    declared_lengths(&arena.target(), 75);
    let after = arena.target().memory();
    let more = after.address_space.saturating_sub(arena.before().address_space) >> 10;
    assert!(more < 2048, "address space has grown by {more} MiB: {after:?}");
    arena.leave(Bounds { peak_mib: 512, address_space_mib: 2048, ..Bounds::default() });
}

/// Goal: unfinished messages do not make the server refuse the messages of others. Method: twenty messages of the
/// largest size that never end; they use up the room for large messages, but small ones must still have room.
#[test]
fn messages_that_do_not_end_refuse_nobody_elses() {
    let arena = Arena::enter(Setup::default());
    let target = arena.target();
    runtime().block_on(async {
        let mut open = Vec::new();
        for _ in 0..20 {
            // A complete message would be answered, so less than the declared length is sent.
            let mut raw = Raw::open(&target.address).await;
            let mut framed = vec![0];
            framed.extend(MESSAGE.to_be_bytes());
            framed.resize(MESSAGE as usize - 100, 0);
            open.push(tokio::spawn(async move {
                raw.acknowledge().await;
                let call = raw.call("/ostinato.v1.Ostinato/Detokenize", 1).await;
                let _ = tokio::time::timeout(Duration::from_secs(25), raw.flood(call, &framed)).await;
                raw
            }));
        }
        let mut held = Vec::new();
        for task in open {
            held.push(task.await.expect("an attacker"));
        }
        let more = target.memory().peak.saturating_sub(arena.before().resident) >> 10;
        assert!(more > 64, "{more} MiB are held of messages: they have not come");
        tokio::time::sleep(Duration::from_secs(3)).await;
    });
    arena.leave(Bounds { peak_mib: 900, ..Bounds::default() });
}

/// Sends prompts of the largest size and cancels each after `wait`, before it can be answered. Returns the codes of
/// those that were refused at once.
fn reset_prompts(target: &Target, token: Option<&str>, calls: usize, wait: Duration) -> Vec<Code> {
    runtime().block_on(async {
        let mut refused = Vec::new();
        let Ok(mut client) = target.client(token).await else { return refused };
        let asked = request(PROMPT - 1);
        for _ in 0..calls {
            if let Ok(Err(status)) = tokio::time::timeout(wait, client.generate(asked.clone())).await {
                refused.push(status.code());
            }
        }
        refused
    })
}

/// Returns the setup of a server with two tokens, of which `hostile` may have one request at a time.
fn one_request() -> Setup {
    let tokens = Target::token_entry("watch", "w", "") + &Target::token_entry("hostile", "h", "requests = 1");
    Setup {
        server: "tokens = \"tokens.toml\"\n".to_owned(),
        files: vec![("tokens.toml", tokens)],
        token: Some("w".to_owned()),
        ..Setup::default()
    }
}

/// Goal: a cancelled request keeps its place while its prompt is being prepared, because cancelling does not end the
/// work that it has caused.
#[test]
fn a_cancelled_request_keeps_its_place_while_its_prompt_is_prepared() {
    let arena = Arena::enter(one_request());
    let target = arena.target();
    let refused = reset_prompts(&target, Some("h"), 40, Duration::from_millis(150));
    let busy = refused.iter().filter(|code| **code == Code::ResourceExhausted).count();
    eprintln!("of 40 requests {busy} were refused: {refused:?}");
    assert!(busy >= 20, "40 requests of a client that may have one: {refused:?}");
    let after = target.memory();
    assert!(after.threads < arena.before().threads + 20, "{:?} → {after:?}", arena.before());
    // Encoding one such text takes 0.4 GiB; without the limit, forty of them took 2.4 GiB and more.
    arena.leave(Bounds { peak_mib: 900, ..Bounds::default() });
}

/// Goal: cancelled requests with large prompts do not hold up others even without a limit per client, because other
/// clients' jobs run between theirs.
#[test]
fn prompts_that_are_reset_hold_up_nobody() {
    let arena = Arena::enter(Setup::default());
    let target = arena.target();
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| reset_prompts(&target, None, 10, Duration::from_millis(700)));
        }
    });
    // One such text is encoded at a time, which takes 0.4 to 0.6 GiB; what the allocator has not given back yet of the one
    // before comes on top: 0.6 to 0.75 GiB together, and 1.1 to 1.3 if it keeps freed memory for ten seconds instead of
    // one. Without the limit, six texts at once take 2.4 GiB and more.
    let seen = arena.leave(Bounds { peak_mib: 1000, ..Bounds::default() });
    eprintln!("{seen:?}");
}

/// Asks for the text of as many ids as a message can hold, in `calls` concurrent calls. Returns the status codes.
fn long_ids(target: &Target, token: Option<&str>, calls: usize) -> Vec<Code> {
    let runtime = runtime();
    let asked = proto::DetokenizeRequest { token_ids: vec![7; 16_700_000], ..Default::default() };
    let tasks: Vec<_> = (0..calls)
        .map(|_| {
            let (target, asked, token) = (target.clone(), asked.clone(), token.map(str::to_owned));
            runtime.spawn(async move {
                let Ok(mut client) = target.client(token.as_deref()).await else { return Code::Unavailable };
                client.detokenize(asked).await.map_or_else(|status| status.code(), |_| Code::Ok)
            })
        })
        .collect();
    runtime.block_on(async {
        let mut codes = Vec::new();
        for task in tasks {
            codes.push(task.await.unwrap_or(Code::Unknown));
        }
        codes
    })
}

/// Goal: Detokenize has the same limits as Tokenize on its input and on concurrent calls.
#[test]
fn ids_to_be_decoded_are_bounded_and_counted() {
    let arena = Arena::enter(one_request());
    let target = arena.target();
    let codes = long_ids(&target, Some("h"), 8);
    assert!(codes.iter().all(|code| *code == Code::InvalidArgument), "{codes:?}");
    let seen = arena.leave(Bounds { peak_mib: 1500, ..Bounds::default() });
    eprintln!("{seen:?}");
}

/// Opens connections that send these bytes and then nothing more.
fn silent(target: &Target, connections: usize, bytes: &[u8]) -> Vec<TcpStream> {
    connections_to(&target.address, connections, bytes)
}

fn connections_to(address: &str, connections: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let open = (0..connections).filter_map(|_| {
        let mut stream = TcpStream::connect(address).ok()?;
        std::io::Write::write_all(&mut stream, bytes).ok()?;
        Some(stream)
    });
    open.collect()
}

/// Opens connections to the admin endpoint with requests whose heads never end.
fn half_requests(target: &Target, connections: usize) -> Vec<TcpStream> {
    connections_to(&target.page, connections, b"GET /healthz HTTP/1.1\r\nHost: loc")
}

/// Goal: unfinished requests to the admin endpoint starve nobody. Method: 2,000 of them to a server that may open 1,024
/// files. The health probe must be answered, new gRPC clients must be served, and the silent connections must be
/// closed.
#[test]
fn half_requests_to_the_page_starve_nobody() {
    let arena = Arena::enter(Setup { open_files: Some(1024), ..Setup::default() });
    let target = arena.target();
    let mut open = Vec::new();
    let begin = Instant::now();
    for _ in 0..20 {
        open.extend(half_requests(&target, 100));
        let healthy = target.get("/healthz", Duration::from_secs(5)).expect("the probe is answered");
        assert!(healthy.starts_with("HTTP/1.1 200"), "{healthy}");
    }
    assert_eq!(open.len(), 2000);
    target.answers_new_clients();
    let files = target.memory().open_files;
    assert!(files < 1000, "{files} files are open");
    let until = Instant::now() + Duration::from_secs(40);
    for mut stream in open {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).expect("a timeout");
        // The connection was closed, or reset because it had unread data.
        let read = stream.read(&mut [0; 1024]);
        let late = read
            .as_ref()
            .is_err_and(|error| matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut));
        assert!(!late, "it is open after {:?}", begin.elapsed());
    }
    arena.leave(Bounds::default());
}

/// Goal: silent TLS handshakes do not delay new clients. Method: up to 60 connections a second that send nothing and as
/// many that stop after the first byte of the handshake, while new clients connect.
#[test]
fn silent_handshakes_delay_nobody() {
    let arena = Arena::enter(Setup { authority: Some(Authority::new("hostile")), ..Setup::default() });
    let target = arena.target();
    let begin = Instant::now();
    let mut open = Vec::new();
    let mut waits = Vec::new();
    let runtime = runtime();
    for round in 0.. {
        if begin.elapsed() > Duration::from_secs(14) {
            break;
        }
        open.extend(silent(&target, 6, b""));
        open.extend(silent(&target, 6, &[0x16]));
        if round % 10 == 9 && begin.elapsed() > Duration::from_secs(5) {
            let asked = Instant::now();
            let client =
                runtime.block_on(async { tokio::time::timeout(Duration::from_secs(30), target.client(None)).await });
            client.expect("a connection in time").expect("a connection");
            waits.push(asked.elapsed());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("{} silent connections; new clients waited {waits:?}", open.len());
    let longest = waits.iter().max().copied().unwrap_or_default();
    assert!(!waits.is_empty() && longest < Duration::from_secs(4), "new clients waited {waits:?}");
    drop(open);
    arena.leave(Bounds::default());
}

/// HTTP/2's preface, and settings without a setting.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// More connections than there are places, each of which speaks HTTP/2 and then says nothing: new clients are served, and
/// a client that has been there all the time keeps its connection.
#[test]
fn connections_that_say_nothing_keep_nobody_out() {
    let arena = Arena::enter(Setup { server: "connections = 200\n".to_owned(), ..Setup::default() });
    let target = arena.target();
    let open = silent(&target, 400, PREFACE);
    assert_eq!(open.len(), 400);
    std::thread::sleep(Duration::from_secs(2));
    target.answers_new_clients();
    let files = target.memory().open_files;
    assert!(files < 400, "{files} files are open");
    arena.leave(Bounds::default());
    drop(open);
}

/// A message whose elements are empty is small on the wire and large once decoded: it is refused before it is decoded.
#[test]
fn empty_elements_take_no_memory() {
    let arena = Arena::enter(Setup::default());
    let target = arena.target();
    runtime().block_on(async {
        let mut client = target.client(None).await.expect("a connection");
        for _ in 0..3 {
            let messages = vec![proto::ChatMessage::default(); 4_000_000];
            let asked = proto::GenerateRequest {
                prompt: Some(proto::generate_request::Prompt::Chat(proto::Chat { messages, ..Default::default() })),
                ..Default::default()
            };
            let status = client.generate(asked).await.expect_err("four million messages");
            assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
            let words = "Chat.messages has 4000000 elements; the maximum for one message is 16384";
            assert_eq!(status.message(), words);
        }
    });
    arena.leave(Bounds { peak_mib: 96, ..Bounds::default() });
}

/// A client that fills the room for messages that are coming in leaves enough to another one, for large messages too.
#[test]
fn a_client_that_fills_the_room_leaves_a_share_to_others() {
    const LARGEST: u32 = 2 << 20;
    let mut setup = one_request();
    setup.server.push_str("max_message_bytes = \"2MiB\"\nmax_prompt_bytes = \"1MiB\"\n");
    let arena = Arena::enter(setup);
    let target = arena.target();
    runtime().block_on(async {
        let mut flooding = Vec::new();
        for _ in 0..20 {
            let mut raw = Raw::open(&target.address).await.with_token("h");
            let mut framed = vec![0];
            framed.extend(LARGEST.to_be_bytes());
            framed.resize(LARGEST as usize - 100, 0);
            flooding.push(tokio::spawn(async move {
                raw.acknowledge().await;
                let call = raw.call("/ostinato.v1.Ostinato/Detokenize", 1).await;
                let _ = tokio::time::timeout(Duration::from_secs(10), raw.flood(call, &framed)).await;
                raw
            }));
        }
        let mut open = Vec::new();
        for task in flooding {
            open.push(task.await.expect("an attacker"));
        }
        let mut client = target.client(Some("w")).await.expect("a connection");
        let asked = proto::TokenizeRequest {
            input: Some(proto::tokenize_request::Input::Text(text(1_000_000))),
            ..Default::default()
        };
        client.tokenize(asked).await.expect("a large message of another client");
    });
    arena.leave(Bounds { peak_mib: 900, ..Bounds::default() });
}

/// Opens connections that open and reset many calls and send unsolicited PING acknowledgements, as no HTTP/2 library
/// allows.
fn resets(target: &Target, connections: usize) {
    runtime().block_on(async {
        for _ in 0..connections {
            let mut raw = Raw::open(&target.address).await;
            raw.acknowledge().await;
            let mut bytes = Vec::new();
            for call in 0..300 {
                bytes.extend(Raw::opened_and_reset(GENERATE, 1 + 2 * call));
            }
            bytes.extend(Raw::pong().repeat(300));
            // The server may already have closed the connection.
            let _ = raw.bytes(&bytes).await;
            let _ = tokio::time::timeout(Duration::from_millis(50), raw.frame()).await;
        }
    });
}

/// Goal: what clients do to their own connections does not write a log line for each connection.
#[test]
fn resets_write_no_lines() {
    let arena = Arena::enter(Setup::default());
    let before = arena.log().lines().count();
    resets(&arena.target(), 100);
    let log = arena.log();
    let lines: Vec<&str> = log.lines().skip(before).collect();
    assert!(lines.len() < 10, "{} lines for 100 connections, such as {:?}", lines.len(), lines.first());
    arena.leave(Bounds::default());
}

/// Sends random bytes, some after the beginning of a valid protocol.
fn noise(target: &Target, random: &mut Random) {
    for address in [&target.address, &target.page] {
        for _ in 0..random.between(1, 20) {
            let mut bytes = match random.below(3) {
                0 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
                1 => b"GET / HTTP/1.1\r\n".to_vec(),
                _ => Vec::new(),
            };
            bytes.extend((0..random.below(5000)).map(|_| random.next() as u8));
            drop(connections_to(address, 1, &bytes));
        }
    }
}

/// Fills a pipe until it accepts no more.
fn fill(pipe: &std::io::PipeWriter) {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    const NONBLOCK: i32 = 0o4000;
    // Opens the same pipe again without blocking.
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    let mut again = std::fs::OpenOptions::new().write(true).custom_flags(NONBLOCK).open(path).expect("the pipe");
    while std::io::Write::write_all(&mut again, &[b'\n'; 64]).is_ok() {}
}

/// Goal: the server handles SIGTERM before it prints its address, because a supervisor may end it as soon as the
/// address is known. Method: the address goes to a full pipe, so the server stops exactly at that line.
#[test]
fn sigterm_is_waited_for_before_the_address_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
    let address = format!("127.0.0.1:{port}");
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.path().join("ostinato.toml");
    let text = format!(
        "[server]\nlisten = \"{address}\"\n[http]\nlisten = \"off\"\n[admin]\nlisten = \"off\"\n[runtime]\ncache_directory = {cache:?}\n\
         [[models]]\nname = \"demo\"\npath = \"embedded:demo\"\nreplicas = [{{ device = \"{}\" }}]\n",
        lavapipe()
    );
    std::fs::write(&file, text).expect("a configuration");
    // The pipe is full, so the server blocks when it writes.
    let (mut output, input) = std::io::pipe().expect("a pipe");
    fill(&input);
    let mut child = Command::new(program())
        .args(["serve", "--config"])
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(input)
        .stderr(Stdio::null())
        .spawn()
        .expect("a server");
    let until = Instant::now() + Duration::from_secs(180);
    while TcpStream::connect(&address).is_err() {
        assert!(Instant::now() < until && child.try_wait().expect("its status").is_none(), "it does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The server listens but has not printed its address yet.
    std::thread::sleep(Duration::from_millis(200));
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).expect("its status");
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("the signals that it waits for");
    let caught = u64::from_str_radix(caught.trim(), 16).expect("a mask");
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill").success());
    let reader = std::thread::spawn(move || {
        let mut told = String::new();
        let _ = output.read_to_string(&mut told);
        told
    });
    let ended = child.wait().expect("its status");
    let told = reader.join().expect("what it told");
    assert!(caught >> 14 & 1 == 1, "SIGTERM is not waited for: {caught:x}; it ended with {ended}");
    assert!(ended.success() && told.contains("listening on"), "{ended}: {told:?}");
}

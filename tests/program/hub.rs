//! Goal: models of the Hugging Face hub are downloaded whole, continued where they were cut, and found again without a
//! network. Method: the program runs against a server in this process that has the hub's few routes.

use crate::cli::{Server, cpu, events};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

/// A commit's name.
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request that the server has received.
#[derive(Clone, Debug)]
struct Asked {
    path: String,
    /// The first byte of its range.
    from: u64,
    token: Option<String>,
}

/// The state of the server.
#[derive(Default)]
struct Shelf {
    /// Files by repository and name.
    files: BTreeMap<(String, String), Vec<u8>>,
    /// Bytes after which each answer is cut.
    cut: Option<usize>,
    /// Answers with other bytes than those that the hashes belong to.
    damage: bool,
    /// How many downloads are cut before their first byte.
    silent: usize,
    /// What its answers say in place of a file's own etag and commit.
    etag: Option<String>,
    commit: Option<String>,
    /// The location that requests for files are sent to, before their path; without one if it is empty.
    redirect: Option<String>,
    asked: Vec<Asked>,
}

/// A server with the hub's routes. It ends with the test's process.
struct Hub {
    address: String,
    shelf: Arc<Mutex<Shelf>>,
    home: tempfile::TempDir,
}

impl Hub {
    fn new(files: &[(&str, &str, &[u8])]) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(r, name, bytes)| (((*r).to_owned(), (*name).to_owned()), bytes.to_vec()));
        let shelf = Arc::new(Mutex::new(Shelf { files: files.collect(), ..Shelf::default() }));
        let shared = Arc::clone(&shelf);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shelf = Arc::clone(&shared);
                // A client may close its connection at any time.
                std::thread::spawn(move || drop(answer(&stream, &shelf)));
            }
        });
        Hub { address, shelf, home: tempfile::tempdir().unwrap() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = crate::cli::ostinato(arguments);
        command.env("HF_HOME", self.home.path()).env("HF_ENDPOINT", &self.address).env("HF_TOKEN", "hf_secret");
        for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "ALL_PROXY"]
        {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs the program without a network: the hub's address leads nowhere.
    fn apart(&self, arguments: &[&str]) -> Output {
        self.command(arguments).env("HF_ENDPOINT", "http://127.0.0.1:1").output().unwrap()
    }

    fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.shelf.lock().unwrap().asked)
    }

    fn folder(&self, repository: &str) -> PathBuf {
        self.home.path().join("hub").join(format!("models--{}", repository.replace('/', "--")))
    }
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn answer(stream: &TcpStream, shelf: &Mutex<Shelf>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let mut out = stream;
    loop {
        let Some(first) = lines.next().transpose()? else { return Ok(()) };
        let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = BTreeMap::new();
        for line in lines.by_ref() {
            let line = line?;
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.insert(name.to_lowercase(), value.to_owned());
        }
        let range = headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        let (from, to) = range.and_then(|range| range.split_once('-')).unwrap_or_default();
        let from: usize = from.parse().unwrap_or(0);
        let mut shelf = shelf.lock().unwrap();
        let token = headers.get("authorization").cloned();
        shelf.asked.push(Asked { path: path.clone(), from: from as u64, token });
        let json = |status: &str, text: &str| {
            format!(
                "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
                text.len()
            )
        };
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        if let ["api", "models", organisation, name, "revision", revision] = parts[..] {
            let repository = format!("{organisation}/{name}");
            let names = shelf.files.keys().filter(|(of, _)| *of == repository).map(|(_, name)| name);
            let siblings: Vec<_> = names.map(|name| serde_json::json!({ "rfilename": name })).collect();
            let text = serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string();
            let known = !siblings.is_empty() && ["main", COMMIT].contains(&revision);
            let reply = if known { json("200 OK", &text) } else { json("404 Not Found", "{}") };
            out.write_all(reply.as_bytes())?;
            continue;
        }
        let found = match parts[..] {
            [organisation, name, "resolve", _, ref file @ ..] => {
                shelf.files.get(&(format!("{organisation}/{name}"), file.join("/"))).cloned()
            }
            _ => None,
        };
        let Some(mut bytes) = found.filter(|bytes| from < bytes.len()) else {
            out.write_all(json("404 Not Found", "{}").as_bytes())?;
            continue;
        };
        let (etag, all) = (shelf.etag.clone().unwrap_or_else(|| hash(&bytes)), bytes.len());
        let commit = shelf.commit.as_deref().unwrap_or(COMMIT);
        if let Some(to) = &shelf.redirect {
            let location = if to.is_empty() { String::new() } else { format!("Location: {to}{path}\r\n") };
            let about = format!("X-Linked-Etag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\n");
            out.write_all(format!("HTTP/1.1 302 Found\r\n{location}{about}Content-Length: 0\r\n\r\n").as_bytes())?;
            continue;
        }
        if shelf.damage {
            bytes.iter_mut().for_each(|byte| *byte ^= 1);
        }
        let end = to.parse().map_or(all, |to: usize| to + 1).min(all);
        out.write_all(
            format!(
                "HTTP/1.1 206 Partial Content\r\nETag: \"{etag}\"\r\nX-Repo-Commit: {commit}\r\nContent-Length: {}\r\n\
                 Content-Range: bytes {from}-{}/{all}\r\n\r\n",
                end - from,
                end - 1
            )
            .as_bytes(),
        )?;
        let silent = to.is_empty() && shelf.silent > 0;
        shelf.silent -= usize::from(silent);
        let sent = if silent { from } else { shelf.cut.map_or(end, |cut| end.min(from + cut)) };
        out.write_all(&bytes[from..sent])?;
        if sent < end {
            return stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The files of the demo model.
fn demo() -> Vec<(&'static str, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model");
    let names =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    names.map(|name| (name, std::fs::read(folder.join(name)).unwrap())).to_vec()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_model_is_downloaded_continued_and_found_without_a_network() {
    let files = demo();
    let mut shelf: Vec<(&str, &str, &[u8])> =
        files.iter().map(|(name, bytes)| ("org/tiny", *name, &bytes[..])).collect();
    shelf.push(("org/tiny", "pytorch_model.bin", b"not read"));
    let hub = Hub::new(&shelf);
    let weights = files.iter().find(|(name, _)| *name == "model.safetensors").unwrap().1.len();

    // Every answer is cut: the program continues a few times and then gives up, with what has arrived kept.
    hub.shelf.lock().unwrap().cut = Some(weights / 10);
    let output = hub.run(&["pull", "org/tiny"]);
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    assert!(told(&output).contains("what has arrived is kept"), "{}", told(&output));
    let asked = hub.asked();
    let ranges = |asked: &[Asked]| -> Vec<u64> {
        asked.iter().filter(|asked| asked.path.ends_with("/model.safetensors")).map(|asked| asked.from).collect()
    };
    assert!(ranges(&asked).windows(2).any(|pair| pair[0] < pair[1]), "it continues: {asked:?}");
    assert!(asked.iter().all(|asked| asked.token.as_deref() == Some("Bearer hf_secret")), "{asked:?}");
    // Nothing that is incomplete is found.
    let output = hub.command(&["pull", "org/tiny"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", told(&output));

    hub.shelf.lock().unwrap().cut = None;
    let output = hub.run(&["pull", "org/tiny"]);
    assert!(output.status.success(), "{}", told(&output));
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    let asked = hub.asked();
    assert!(ranges(&asked).iter().any(|from| *from > weights as u64 / 3), "the second attempt continues: {asked:?}");
    assert!(!asked.iter().any(|asked| asked.path.contains("pytorch_model.bin")), "{asked:?}");
    assert_eq!(path, hub.folder("org/tiny").join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(hub.folder("org/tiny").join("refs/main")).unwrap(), COMMIT);
    for (name, bytes) in &files {
        assert!(path.join(name).is_symlink(), "the layout of the hub's cache: {name}");
        assert_eq!(std::fs::read(path.join(name)).unwrap(), *bytes, "{name}");
    }
    assert!(!hub.folder("org/tiny").join("refs").join(COMMIT).exists());

    // Again: nothing is downloaded a second time.
    assert!(hub.run(&["pull", "org/tiny"]).status.success());
    let asked = hub.asked();
    assert!(asked.iter().all(|asked| asked.path.starts_with("/api/")), "{asked:?}");

    // Without a network it is found by its name, by its commit, and offline.
    for model in ["org/tiny", "org/tiny@main", &format!("org/tiny@{COMMIT}")] {
        let output = hub.apart(&["inspect", "--json", model]);
        assert!(output.status.success(), "{model}: {}", told(&output));
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&found["architecture"], &found["runs"]), (&"Qwen3ForCausalLM".into(), &true.into()), "{found}");
    }
    let output = hub.command(&["pull", "org/tiny"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_eq!(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()), path);
    let output = hub.command(&["inspect", "org/other"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(told(&output).contains("HF_HUB_OFFLINE") && told(&output).contains("org/other"), "{}", told(&output));
    // Without a network and without the files, the reason is told.
    let output = hub.apart(&["pull", "org/other"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(told(&output).contains("no file or folder \"org/other\"") && told(&output).contains("127.0.0.1:1"));
}

/// Goal: `serve ORG/NAME` downloads the model once, and serves it under that name with the same outputs, also later and
/// without a network.
#[test]
fn a_model_is_served_by_its_name_on_the_hub() {
    let files = demo();
    let shelf: Vec<(&str, &str, &[u8])> = files.iter().map(|(name, bytes)| ("org/tiny", *name, &bytes[..])).collect();
    let hub = Hub::new(&shelf);
    let arguments =
        ["serve", "org/tiny", "--device", cpu(), "--listen", "127.0.0.1:0", "--http", "off", "--admin", "off"];
    let prompt = ["generate", "--json", "--prompt", "Once", "--temperature", "0", "--max-tokens", "8"];
    let text = |more: &[&str]| -> String {
        let output = crate::cli::run(&[&prompt[..], more].concat());
        assert!(output.status.success(), "{}", told(&output));
        events(&output).iter().filter_map(|event| event["text"].as_str()).collect()
    };
    let expected = text(&["--device", cpu()]);
    assert!(!expected.is_empty());
    for offline in [false, true] {
        let mut command = hub.command(&arguments);
        if offline {
            command.env("HF_HUB_OFFLINE", "1").env("HF_ENDPOINT", "http://127.0.0.1:1");
        }
        let server = Server::of(command);
        let listed = events(&crate::cli::run(&["models", "--server", &server.address, "--json"]));
        let names: Vec<&str> = listed.iter().map(|model| model["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["org/tiny"]);
        assert_eq!(text(&["--server", &server.address]), expected);
        let downloads = hub.asked().iter().filter(|asked| asked.path.contains("/resolve/")).count();
        assert_eq!(downloads > 0, !offline, "{downloads} downloads");
        assert_eq!(server.stop(), Some(0));
    }
    // A name that the hub does not have ends the program before it serves.
    let output = hub.run(&[&["serve", "org/other"], &arguments[2..]].concat());
    assert!(!output.status.success() && told(&output).contains("org/other"), "{}", told(&output));
}

#[test]
fn what_the_hub_has_not_and_what_is_damaged_is_told() {
    let weights = vec![7u8; 5000];
    let hub = Hub::new(&[
        ("org/tiny-GGUF", "tiny-Q8_0.gguf", &weights),
        ("org/tiny-GGUF", "tiny-Q4_0.gguf", b"other"),
        ("org/tiny-GGUF", "README.md", b"words"),
        ("org/old", "pytorch_model.bin", b"other"),
    ]);
    for (model, words) in [
        ("org/none", "has no model \"org/none\""),
        ("org/old@v9", "has no model \"org/old@v9\""),
        ("org/old", "neither safetensors nor GGUF files; it has pytorch_model.bin"),
        ("org/tiny-GGUF", "several GGUF files, select one with :FILE: tiny-Q4_0, tiny-Q8_0"),
        ("org/tiny-GGUF:Q5_K", "no GGUF file is \"Q5_K\"; there are tiny-Q4_0, tiny-Q8_0"),
        ("/no/such/folder", "is not ORG/NAME"),
    ] {
        let output = hub.run(&["pull", model]);
        assert_eq!(output.status.code(), Some(2), "{model}: {}", told(&output));
        assert!(told(&output).contains(words), "{model}: {}", told(&output));
    }
    hub.shelf.lock().unwrap().damage = true;
    let output = hub.run(&["pull", "org/tiny-GGUF:Q8_0"]);
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    assert!(told(&output).contains("SHA-256") && told(&output).contains(&hash(&weights)), "{}", told(&output));
    let snapshot = hub.folder("org/tiny-GGUF").join("snapshots").join(COMMIT);
    assert!(!snapshot.join("tiny-Q8_0.gguf").exists(), "what is damaged is removed");

    hub.shelf.lock().unwrap().damage = false;
    hub.asked();
    let output = hub.run(&["pull", "org/tiny-GGUF:q8_0"]);
    assert!(output.status.success(), "{}", told(&output));
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    assert_eq!(path, snapshot.join("tiny-Q8_0.gguf"));
    assert_eq!(std::fs::read(&path).unwrap(), weights);
    assert!(!hub.asked().iter().any(|asked| asked.path.contains("Q4_0")), "only the selected file");
}

/// The only file of these repositories.
const WEIGHTS: &str = "tiny-Q8_0.gguf";

/// All files under a folder but locks, with what they contain.
fn files_under(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files_under(&path)),
            false if path.extension().is_some_and(|ending| ending == "lock") => {}
            false => _ = found.insert(path.clone(), std::fs::read(&path).unwrap()),
        }
    }
    found
}

/// Goal: an address that answers with hostile headers gets no file written. Method: each header is changed alone.
#[test]
fn what_a_hub_says_names_no_file_outside_the_cache() {
    let weights = vec![7u8; 5000];
    let hub = Hub::new(&[("org/tiny", WEIGHTS, &weights)]);
    let outside = hub.home.path().join("outside");
    let refused = |words: &str| {
        let output = hub.run(&["pull", "org/tiny"]);
        assert_eq!(output.status.code(), Some(1), "{words}: {}", told(&output));
        assert!(told(&output).contains(words) && !told(&output).contains("panicked"), "{words}: {}", told(&output));
        assert_eq!(files_under(hub.home.path()), BTreeMap::new(), "{words}");
    };
    for etag in [outside.to_str().unwrap(), "../../../outside", "..", "", &"a".repeat(200)] {
        hub.shelf.lock().unwrap().etag = Some(etag.to_owned());
        refused("the etag");
    }
    hub.shelf.lock().unwrap().etag = None;
    for commit in ["../../outside", "fedcba9876543210fedcba9876543210fedcba98"] {
        hub.shelf.lock().unwrap().commit = Some(commit.to_owned());
        refused(commit);
    }
    hub.shelf.lock().unwrap().commit = None;
    for (location, words) in [("", "redirects to \"\""), ("file://", "file://"), (&*hub.address, "redirects")] {
        hub.shelf.lock().unwrap().redirect = Some(location.to_owned());
        refused(words);
    }
    hub.shelf.lock().unwrap().redirect = None;
    let named = "a\u{1b}[2J.json".to_owned();
    hub.shelf.lock().unwrap().files.insert(("org/tiny".to_owned(), named), b"{}".to_vec());
    refused("\\u{1b}");
}

#[test]
fn a_token_stays_with_the_hub_that_redirects() {
    let weights = vec![7u8; 5000];
    let files: [(&str, &str, &[u8]); 1] = [("org/tiny", WEIGHTS, &weights)];
    let (hub, store) = (Hub::new(&files), Hub::new(&files));
    hub.shelf.lock().unwrap().redirect = Some(store.address.clone());
    // What the other address says about the file is not believed.
    store.shelf.lock().unwrap().etag = Some("/outside".to_owned());
    store.shelf.lock().unwrap().commit = Some("other".to_owned());
    let output = hub.run(&["pull", "org/tiny"]);
    assert!(output.status.success(), "{}", told(&output));
    assert_eq!(std::fs::read(String::from_utf8(output.stdout).unwrap().trim()).unwrap(), weights);
    let (to_hub, to_store) = (hub.asked(), store.asked());
    assert!(to_hub.iter().all(|asked| asked.token.is_some()), "{to_hub:?}");
    assert!(!to_store.is_empty() && to_store.iter().all(|asked| asked.token.is_none()), "{to_store:?}");
}

/// Goal: what an earlier attempt left is continued or replaced, and never taken for the file. Method: the blob or its
/// part is there before the download, and the first answers have no bytes.
#[test]
fn what_is_left_of_an_earlier_download_is_continued_or_replaced() {
    let weights: Vec<u8> = (0..5000u32).map(|index| (index % 251) as u8).collect();
    for (ending, left, from) in [
        ("part", weights[..2000].to_vec(), Some(2000)),
        ("part", weights.clone(), None),
        ("part", vec![1; 5000], Some(0)),
        ("part", vec![1; 6000], Some(0)),
        ("", vec![1; 5000], Some(0)),
        ("", weights.clone(), None),
    ] {
        let hub = Hub::new(&[("org/tiny", WEIGHTS, &weights)]);
        hub.shelf.lock().unwrap().silent = 2;
        let blob = hub.folder("org/tiny").join("blobs").join(hash(&weights));
        std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
        std::fs::write(blob.with_extension(ending), &left).unwrap();
        let output = hub.run(&["pull", "org/tiny"]);
        assert!(output.status.success(), "{from:?}: {}", told(&output));
        let path = String::from_utf8(output.stdout).unwrap();
        assert_eq!(std::fs::read(path.trim()).unwrap(), weights, "{ending:?} of {} bytes", left.len());
        // The first request is for the file's size.
        let asked: Vec<u64> = hub.asked().iter().filter(|a| a.path.contains("resolve")).map(|a| a.from).collect();
        assert_eq!(asked[1..], from.map_or(Vec::new(), |from| vec![from; 3]), "{ending:?} of {} bytes", left.len());
    }
}

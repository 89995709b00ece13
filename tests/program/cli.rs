//! Tests of the program as scripts use it: its JSON output, its exit statuses, and that generation in process and
//! through a server give the same result. Runs on a CPU driver with the embedded demo model.

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub fn ostinato(arguments: &[&str]) -> Command {
    // The program inherits the environment variables that select the drivers.
    crate::common::layer();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ostinato"));
    command.args(arguments).stdin(Stdio::null());
    command
}

pub fn run(arguments: &[&str]) -> Output {
    ostinato(arguments).output().unwrap()
}

/// Returns the UUID of lavapipe as `devices --json` reports it.
pub fn cpu() -> &'static str {
    static UUID: OnceLock<String> = OnceLock::new();
    UUID.get_or_init(|| {
        let output = run(&["devices", "--json"]);
        let devices: Value = serde_json::from_slice(&output.stdout).unwrap();
        let devices = devices.as_array().unwrap();
        for device in devices {
            for key in ["index", "name", "uuid", "pci", "type", "driver", "usable", "reason"] {
                assert!(device.get(key).is_some(), "{key} in {device}");
            }
        }
        let lavapipe = |d: &&Value| d["name"].as_str().unwrap().contains("llvmpipe");
        devices.iter().find(lavapipe).unwrap()["uuid"].as_str().unwrap().to_owned()
    })
}

#[track_caller]
pub fn events(output: &Output) -> Vec<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the parts of a generation that do not depend on time: the device, the token ids (followed by the prompt's
/// scores), the text, the finish reason and the usage.
fn essence(events: &[Value]) -> (Value, Vec<Value>, String, Value, Value) {
    let (first, rest) = events.split_first().unwrap();
    let (last, deltas) = rest.split_last().unwrap();
    assert_eq!(first["event"], "started");
    assert_eq!(last["event"], "finished");
    let mut ids = Vec::new();
    let mut text = String::new();
    let (prompt, deltas) = deltas.split_at(deltas.iter().take_while(|event| event["event"] == "prompt").count());
    for delta in deltas {
        assert_eq!(delta["event"], "delta");
        ids.extend(delta["token_ids"].as_array().unwrap().iter().cloned());
        text.push_str(delta["text"].as_str().unwrap());
    }
    assert_eq!(last["usage"]["output_tokens"], ids.len());
    let scored: Vec<Value> = prompt.iter().flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
    assert!(scored.is_empty() || scored.len() + 1 == first["prompt_tokens"], "all but the first are scored");
    ids.extend(scored);
    (first["device"].clone(), ids, text, last["reason"].clone(), last["usage"].clone())
}

/// A server process that is killed when the test ends.
pub struct Server {
    child: Child,
    pub address: String,
}

impl Server {
    pub fn start(arguments: &[&str]) -> Server {
        let mut command = ostinato(&["serve", "--listen", "127.0.0.1:0", "--http", "off", "--admin", "off"]);
        command.args(arguments);
        Server::of(command)
    }

    /// Runs a command that serves.
    pub fn of(mut command: Command) -> Server {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}"));
        Server { address: address.trim().to_owned(), child }
    }

    /// Sends SIGTERM and returns the exit status.
    pub fn stop(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "it does not stop");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn in_process_and_against_a_server_are_the_same() {
    let server = Server::start(&["--model", &format!("demo=embedded:demo@{}", cpu())]);
    for arguments in [
        &["--chat", "Tell me a story about a fox.", "--max-tokens", "24"][..],
        &["--prompt", "Once", "--max-tokens", "9", "--stop", "zzz", "--logprobs", "2", "--prompt-logprobs", "1"],
        &["--tokens", "5,6,7", "--max-tokens", "8", "--temperature", "0.9", "--seed", "7", "--ignore-eos"],
    ] {
        let with = |more: &[&str]| {
            let all: Vec<&str> = ["generate", "--json"].iter().chain(arguments).chain(more).copied().collect();
            run(&all)
        };
        let alone = events(&with(&["--device", cpu()]));
        let served = events(&with(&["--server", &server.address]));
        assert_eq!(essence(&alone), essence(&served), "{arguments:?}");
        for (one, other) in [(&alone[0], &served[0]), (&alone[1], &served[1])] {
            let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(one), keys(other));
        }
        let last = alone.last().unwrap();
        for key in ["submits", "dispatches", "barriers", "enqueue_us"] {
            assert!(last["per_token"][key].as_f64().unwrap() > 0.0, "{key} in {last}");
        }
        // It is 0 if every point has already been reached when the host looks at it.
        assert!((0.0..=1.0).contains(&last["per_token"]["host_waits"].as_f64().unwrap()), "{last}");
        assert_eq!(last["per_token"]["descriptor_updates"], 0.0);
        assert_eq!(last["per_token"]["transfer_submits"], 0.0);
        assert!(last["per_token"]["submits"].as_f64().unwrap() <= 1.0);
    }

    // The text goes to standard output and the table to standard error.
    let output = run(&["generate", "--server", &server.address, "--chat", "Say hi.", "--max-tokens", "5"]);
    assert!(output.status.success());
    assert!(!output.stdout.is_empty() && output.stdout.ends_with(b"\n"));
    let table = String::from_utf8(output.stderr).unwrap();
    for row in ["device", "tokens/s", "submits", "barriers", "dispatches", "host waits"] {
        assert!(table.contains(row), "{row} in {table}");
    }

    // A request that the server refuses gives the same exit status as one refused in process.
    for (arguments, words) in [
        (&["--tokens", "1000000"][..], "token 1000000"),
        (&["--prompt", "x", "--top-p", "2"], "top_p"),
        (&["--prompt", ""], "empty"),
    ] {
        let alone: Vec<&str> = ["generate", "--device", cpu()].iter().chain(arguments).copied().collect();
        let served: Vec<&str> = ["generate", "--server", &server.address].iter().chain(arguments).copied().collect();
        for output in [run(&alone), run(&served)] {
            assert_eq!(output.status.code(), Some(2));
            let errors = String::from_utf8(output.stderr).unwrap();
            assert!(errors.contains(words) && errors.contains("INVALID_ARGUMENT"), "{errors}");
            assert!(output.stdout.is_empty());
        }
    }
    let output = run(&["generate", "--server", &server.address, "--model", "other", "--prompt", "x"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(server.stop(), Some(0), "SIGTERM ends it cleanly");
}

/// Runs `bench --json` and returns its rows.
#[track_caller]
fn rows(arguments: &[&str]) -> Vec<Value> {
    let all: Vec<&str> = ["bench", "--json"].iter().chain(arguments).copied().collect();
    let output = run(&all);
    // The facts of a load take --verbose.
    assert!(!String::from_utf8_lossy(&output.stderr).contains("memory plan"), "{output:?}");
    events(&output)
}

/// Arguments that split a model over both CPU drivers.
fn over_both(split: &'static str) -> [&'static str; 6] {
    static OTHER: OnceLock<String> = OnceLock::new();
    let other = OTHER.get_or_init(|| {
        let devices: Value = serde_json::from_slice(&run(&["devices", "--json"]).stdout).unwrap();
        let other = |device: &&Value| device["name"].as_str().unwrap().contains("SwiftShader");
        devices.as_array().unwrap().iter().find(other).unwrap()["uuid"].as_str().unwrap().to_owned()
    });
    ["--device", cpu(), "--device", other, "--split", split]
}

#[test]
fn a_split_model_is_measured_on_all_its_devices() {
    let split = over_both("layers");
    let rows = rows(&[&split[..], &["--prompt", "8", "--decode", "4", "--repeat", "1"]].concat());
    let tests: Vec<&Value> = rows.iter().map(|row| &row["test"]).collect();
    assert_eq!(tests, ["prefill", "decode"]);
    // A step is a submission on each device.
    assert_eq!(rows[1]["per_token"]["submits"], 2.0, "{}", rows[1]);
}

/// Goal: commands that load a model do with several devices what they do with one. Method: both CPU drivers with the demo
/// model, whose layers or parts of layers are divided.
#[test]
fn a_split_model_gives_what_it_gives_on_one_device() {
    let alone = ["--device", cpu()];
    let generated = |devices: &[&str], more: &[&str]| {
        let words = ["--chat", "Tell me a story about a fox.", "--max-tokens", "12"];
        run(&[&["generate"][..], devices, &words, more].concat())
    };
    let (device, tokens, text, reason, _) = essence(&events(&generated(&alone, &["--json"])));
    assert_eq!((tokens.len(), reason.as_str()), (12, Some("length")));
    let (first, parts, ..) = essence(&events(&generated(&over_both("tensor"), &["--json"])));
    assert_eq!((first, parts), (device, tokens));
    let layers = generated(&over_both("layers"), &[]);
    assert_eq!(String::from_utf8_lossy(&layers.stdout).trim_end(), text.trim_end());
    let table = String::from_utf8_lossy(&layers.stderr).into_owned();
    let line = table.lines().find(|line| line.trim_start().starts_with("device ")).expect("a line of the table");
    // Each with its layers.
    assert!(line.contains("llvmpipe") && line.contains(" + SwiftShader") && line.contains("(layers 0 to "), "{table}");

    let embedded = |devices: &[&str]| {
        let output = run(&[&["embed", "--json"][..], devices, &["A fox by the river."]].concat());
        let values: Vec<f64> = serde_json::from_value(events(&output)[0]["embedding"].clone()).expect("numbers");
        values
    };
    let (one, two) = (embedded(&alone), embedded(&over_both("layers")));
    let cosine: f64 = one.iter().zip(&two).map(|(a, b)| a * b).sum();
    assert!(one.len() == two.len() && (cosine - 1.0).abs() < 1e-3, "cosine {cosine} of {} values", one.len());
}

/// Goal: `serve` applies its arguments for a model's context and weights. Method: the model's facts as the server lists them,
/// beside those of the checkpoint.
#[test]
fn a_served_model_has_the_context_and_the_weights_that_arguments_ask_for() {
    let own: Value = serde_json::from_slice(&run(&["inspect", "demo", "--json"]).stdout).unwrap();
    let server = Server::start(&["demo", "--device", cpu(), "--context", "512", "--quantize", "int8"]);
    let model = events(&run(&["models", "--server", &server.address, "--json"])).remove(0);
    assert_eq!((&own["context"], &model["context"]), (&1024.into(), &512.into()));
    let (own, served) = (own["weight_bytes"].as_u64().unwrap(), model["weight_bytes"].as_u64().unwrap());
    assert!(served * 10 < own * 6, "8 bits a weight instead of 16: {served} of {own} bytes");
}

#[test]
fn exchanges_between_devices_are_measured() {
    let pairs: Value = serde_json::from_slice(&run(&["devices", "--pairs", "--json"]).stdout).unwrap();
    let pairs = pairs.as_array().unwrap();
    assert_eq!(pairs.len(), 1, "of two CPU drivers");
    assert_eq!(pairs[0]["devices"].as_array().unwrap().len(), 2);
    for time in pairs[0]["exchanges"].as_array().unwrap() {
        assert!(time["values"].as_u64().unwrap() >= 4096 && time["divided_us"].as_f64().unwrap() > 0.0, "{time}");
        // Threads of CPU drivers do not wait for each other.
        assert!(time["within_step_us"].is_null(), "{time}");
    }
}

#[test]
fn load_on_a_server_is_measured_as_its_clients_see_it() {
    let server = Server::start(&["--model", &format!("demo=embedded:demo@{}", cpu())]);
    let ask = |arguments: &[&str]| {
        let common = ["--server", &server.address, "--prompt", "40", "--decode", "6"];
        rows(&common.iter().chain(arguments).copied().collect::<Vec<_>>())
    };
    let streams = ask(&["--streams", "1,3", "--requests", "5", "--shared-prefix", "32"]);
    assert_eq!(streams.iter().map(|row| row["streams"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3]);
    let rate = ask(&["--rate", "50", "--requests", "8", "--spread", "0.4", "--served-model", "demo"]);
    assert_eq!((rate[0]["rate"].as_f64(), &rate[0]["streams"]), (Some(50.0), &Value::Null));
    for (row, requests) in [(&streams[0], 5), (&streams[1], 5), (&rate[0], 8)] {
        assert_eq!((&row["requests"], &row["completed"]), (&requests.into(), &requests.into()), "{row}");
        assert_eq!(row["errors"], serde_json::json!({}));
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        if row["spread"] == 0.0 {
            assert_eq!((number("prompt_tokens"), number("output_tokens")), (200.0, 30.0));
        }
        let output = number("output_tokens") / number("seconds");
        assert!((number("output_tokens_per_second") / output - 1.0).abs() < 1e-6);
        assert!(number("total_tokens_per_second") > number("output_tokens_per_second"));
        for key in ["first_token_ms", "gap_ms", "per_token_ms", "queue_ms"] {
            let of = |p: &str| row[key][p].as_f64().unwrap_or_else(|| panic!("{key}.{p} in {row}"));
            assert!(of("p50") <= of("p95") && of("p95") <= of("p99") && of("p99") <= of("max"), "{key} in {row}");
            assert!(of("max") > 0.0);
        }
        let replicas = row["replicas"].as_array().unwrap();
        assert_eq!(replicas.len(), 1);
        assert_eq!((&replicas[0]["replica"], &replicas[0]["requests"]), (&"demo/0".into(), &requests.into()));
        assert_eq!(replicas[0]["uuid"], cpu());
    }
    // The requests run one after the other, so the last four find the two shared pages in the prefix cache.
    assert_eq!(streams[0]["cached_tokens"], 4 * 32, "{}", streams[0]);
    assert_eq!(rate[0]["cached_tokens"], 0);
    // A single stream: the decode window is from its first token to its last.
    let alone = &streams[0];
    assert!(alone["decode_tokens_per_second"].as_f64().unwrap() > 0.0, "{alone}");
    assert_eq!(rate[0]["decode_tokens_per_second"], Value::Null);

    // Invalid arguments are refused before any request is sent.
    for (arguments, words) in [
        (&["--served-model", "other"][..], "served are demo"),
        (&["--prompt", "100000"], "context"),
        (&["--decode", "0"], "at least 1"),
        (&["--rate", "0"], "not above 0"),
    ] {
        let all: Vec<&str> = ["bench", "--server", &server.address].iter().chain(arguments).copied().collect();
        let output = run(&all);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert!(errors.contains(words), "{arguments:?}: {errors}");
    }
}

#[test]
fn several_streams_in_process_are_measured_as_through_a_server() {
    let arguments = ["--device", cpu(), "--streams", "1,2", "--prompt", "20", "--decode", "80", "--repeat", "1"];
    let rows = rows(&arguments);
    let decode: Vec<&Value> = rows.iter().filter(|row| row["test"] == "decode").collect();
    assert_eq!(decode.len(), 2);
    assert_eq!(decode[0]["total_tokens_per_second"], Value::Null, "one stream decodes without a prompt");
    let number = |key: &str| decode[1][key].as_f64().unwrap_or_else(|| panic!("{key} in {}", decode[1]));
    assert_eq!((number("streams"), number("prompt")), (2.0, 20.0));
    assert!((number("output_tokens_per_second") * number("seconds") - 160.0).abs() < 1e-6);
    assert!((number("total_tokens_per_second") * number("seconds") - 200.0).abs() < 1e-6);
    assert!(number("tokens_per_second") > 0.0);
    assert_ne!(number("tokens_per_second"), number("output_tokens_per_second"), "the window is not the whole");
}

#[test]
fn weights_that_are_quantised_at_load_have_their_error_told() {
    let told = |arguments: &[&str]| {
        let given = ["generate", "--device", cpu(), "--prompt", "Once", "--max-tokens", "2", "--quantize", "int4"];
        let output = run(&[&given, arguments].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stderr).unwrap().matches("relative error of the weights about 7.3 %").count()
    };
    assert_eq!((told(&[]), told(&["--verbose"]), told(&["--quiet"])), (1, 1, 0));
}

#[test]
fn logits_are_written_one_row_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("logits.safetensors");
    let path = file.to_str().unwrap();
    let output = run(&[
        "generate",
        "--device",
        cpu(),
        "--prompt",
        "Once",
        "--max-tokens",
        "4",
        "--ignore-eos",
        "--json",
        "--dump-logits",
        path,
    ]);
    let (_, ids, ..) = essence(&events(&output));
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let logits = tensors.tensor("logits").unwrap();
    let [steps, vocabulary] = logits.shape() else { panic!("{:?}", logits.shape()) };
    assert_eq!(*steps, ids.len());
    // Sampling is greedy, so each step's token is the one with the largest logit.
    let values: Vec<f32> = logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    for (row, id) in values.chunks_exact(*vocabulary).zip(&ids) {
        let most = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        assert_eq!(most as u64, id.as_u64().unwrap());
    }
}

#[test]
fn what_the_user_can_mend_ends_with_2_and_says_what() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("bad.toml");
    std::fs::write(&config, "[server]\nlisten = \"0.0.0.0:1\"\ncolour = 3\n").unwrap();
    let config = config.to_str().unwrap();
    let empty = folder.path().to_str().unwrap();
    let weights = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model/model.safetensors");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (arguments, words) in [
        (&["generate"][..], "--prompt"),
        (&["generate", "--prompt", "x", "--tokens", "1"], "cannot be used with"),
        (&["generate", "--prompt", "x", "--server", "not an address"], "not a server's address"),
        (&["generate", "--device", "no such thing", "--prompt", "x"], "no such thing"),
        (&["generate", "--device", cpu(), "--model", empty, "--prompt", "x"], "config.json"),
        (&["generate", "--device", cpu(), "--prompt", "x", "--memory-limit", "1KiB"], "does not fit"),
        (
            &["generate", "--device", cpu(), "--prompt", "x", "--draft", "/nowhere"],
            "cannot take its drafts from /nowhere",
        ),
        (&["generate", "--device", cpu(), "--prompt", "x", "--draft", ""], "neither lookup nor a draft model"),
        (&["generate", "--device", cpu(), "--prompt", "x", "--tune", "foo=1"], "\"foo=1\" is not KEY=VALUE"),
        (&["bench", "--device", cpu(), "--tune", "foo=1"], "\"foo=1\" is not KEY=VALUE"),
        (&["bench", "--device", cpu(), "--stages", "--try", "foo=1"], "\"foo=1\" is not KEY=VALUE"),
        (&["bench", "--stages", "--rows", "100000"], "100000 is not in 1..=1024"),
        (&["bench", "--device", cpu(), "--split", "layers"], "at least two devices"),
        (&["bench", "--device", cpu(), "--device", cpu(), "--split", "layers"], "each device once"),
        (&["bench", "--device", cpu(), "--device", "0"], "2 devices need --split layers"),
        (&["generate", "--prompt", "x", "--device", cpu(), "--device", cpu(), "--split", "tensor"], "each device once"),
        (&["generate", "--prompt", "x", "--device", cpu(), "--device", "cpu"], "2 devices need --split layers"),
        (
            &["generate", "--prompt", "x", "--server", "127.0.0.1:1", "--device", "0", "--device", "1"],
            "a request to a server names one --device, and 2 are given",
        ),
        (&["chat", "--split", "layers", "--device", "0"], "at least two devices"),
        (&["embed", "--split", "layers", "x"], "--device names 0"),
        (&["serve", "--config", config], "2 problems"),
        (&["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (&["serve", "--listen", "0.0.0.0:1"], "insecure"),
        (&["serve", "--listen", &taken, "--admin", "off"], "(server.listen): Address already in use"),
        (&["serve", "--listen", "127.0.0.1:0", "--http", &taken], "--http gives another address"),
        (&["serve", "--listen", "127.0.0.1:0", "--http", "off", "--admin", &taken], "(admin.listen)"),
        (&["serve", "--http", "0.0.0.0:1"], "insecure"),
        (&["serve", "--admin", "0.0.0.0:1"], "insecure"),
        (&["serve", "demo", "--split", "layers", "--device", "cpu"], "at least two devices, and --device names 1"),
        (&["serve", "--http", "8000"], "such as 127.0.0.1:8000, or \"off\""),
        (&["inspect", "nope"], "nope does not exist; a model is a folder, a GGUF file, demo, or ORG/NAME"),
        (&["inspect", "./nope.gguf"], "./nope.gguf does not exist"),
        (&["inspect", weights], "name its directory, "),
        (&["bench", "--prompt", "0", "--decode", "0"], "nothing to measure"),
        (&["synth", "--arch", "qwen3-0.6b", "--out", empty, "--shard-size", "0"], "--shard-size is 0"),
        (&["synth", "--arch", "unknown", "--out", empty], "qwen3-0.6b"),
    ] {
        let output = run(arguments);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert!(errors.contains(words), "{arguments:?}: {errors}");
        assert!(output.stdout.is_empty());
    }
    // An unreachable server is not an error in the arguments, so the status is 1.
    let output = run(&["generate", "--prompt", "x", "--server", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
}

/// Waits until a condition holds.
#[track_caller]
fn until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn models_are_loaded_and_a_changed_configuration_is_taken_up_while_a_stream_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (file, log) = (folder.path().join("ostinato.toml"), folder.path().join("log"));
    let model = |name: &str, more: &str| {
        let small = "slots = 2\ncontext = 1024\nprefill_chunk = 64\n";
        let place = format!("replicas = [{{ device = \"{}\" }}]", cpu());
        format!("[[models]]\nname = \"{name}\"\npath = \"embedded:demo\"\n{place}\n{small}{more}\n")
    };
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    let first = model("demo", "") + &model("other", "load = \"request\"");
    write(&first);
    let mut command = ostinato(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--http",
        "off",
        "--admin",
        "off",
        "--config",
        file.to_str().unwrap(),
    ]);
    let mut child = command.stdout(Stdio::piped()).stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).trim().to_owned();
    let server = Server { address, child };
    let models = |arguments: &[&str]| {
        let all: Vec<&str> =
            ["models", "--server", &server.address, "--json"].iter().chain(arguments).copied().collect();
        run(&all)
    };
    let states = || -> Vec<String> {
        let listed = events(&models(&[]));
        listed.iter().map(|model| format!("{} {}", model["name"], model["state"]).replace('"', "")).collect()
    };
    assert_eq!(states(), ["demo serving", "other unloaded"]);
    let asked = ["generate", "--json", "--server", &server.address, "--prompt", "Once upon a time", "--ignore-eos"];
    let generate = |tokens: &str| {
        let more = ["--model", "demo", "--max-tokens", tokens];
        let all: Vec<&str> = asked.iter().chain(&more).copied().collect();
        ostinato(&all).stdout(Stdio::piped()).spawn().unwrap()
    };
    let mut stream = generate("900");
    let loaded = events(&models(&["load", "other"]));
    assert_eq!(loaded.last().unwrap()["loaded"], "other");
    assert!(loaded.last().unwrap()["loads"][0]["gb_per_second"].as_f64().unwrap() > 0.0, "{loaded:?}");
    assert_eq!(states(), ["demo serving", "other serving"]);
    let unloaded = events(&models(&["unload", "other", "--grace", "1"]));
    assert!(unloaded[0]["freed_bytes"].as_u64().unwrap() > 1_000_000 && unloaded[0]["cut"] == 0, "{unloaded:?}");
    for (arguments, words) in [
        (&["unload", "other"][..], "cannot be unloaded: it is not loaded"),
        (&["load", "/etc/passwd"], "is not configured; configured are demo, other"),
    ] {
        let refused = models(arguments);
        let errors = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && errors.contains(words), "{errors}");
    }

    let hang_up = || {
        let id = server.child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &id]).status().unwrap().success());
    };
    let said = |words: &str| std::fs::read_to_string(&log).unwrap().contains(words);
    // A configuration with problems changes nothing, and every problem is reported.
    write("[server]\nqueue_limit = 0\ndrain_seconds = -1\n");
    hang_up();
    until("the problems are told", || said("server.queue_limit must") && said("server.drain_seconds must"));
    // The model `other` is renamed to `third` and the model `new` is added. The address in the file changes as well.
    let second = format!(
        "[server]\nlisten = \"127.0.0.1:1\"\n{}{}",
        first.replace("other", "third"),
        model("new", "listen = \"127.0.0.1:0\"\n")
    );
    write(&second);
    hang_up();
    until("the configuration is in force", || said("the configuration is in force"));
    assert_eq!(states(), ["demo serving", "third unloaded", "new serving"]);
    // The new model has an endpoint of its own, which serves no other.
    let endpoint = || {
        let listed = events(&models(&[]));
        listed.iter().find(|listed| listed["name"] == "new").unwrap()["endpoint"].as_str().map(str::to_owned)
    };
    let address = endpoint().expect("an endpoint of its own");
    let short = ["generate", "--server", &address, "--prompt", "Once", "--max-tokens", "1"];
    assert!(run(&short).status.success());
    let refused = run(&[&short[..], &["--model", "demo"]].concat());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("which serves only \"new\""), "{refused:?}");
    // `--listen` overrides the file, so the effective address has not changed and is not reported.
    assert!(!said("server.listen stays"));
    write(&second.replace("[server]", "[telemetry]\nlog = \"debug\"\n[server]"));
    hang_up();
    until("what stays is named", || said("telemetry.log stays \"info\": \"debug\" takes a new start"));
    // An endpoint that the configuration does not have any more is closed; its model is not loaded again for it.
    write(&second.replace("listen = \"127.0.0.1:0\"\n", ""));
    hang_up();
    until("the endpoint is closed", || endpoint().is_none());
    assert!(!run(&short).status.success());
    assert!(!said("replaced model"), "it serves on");
    // The stream's tokens equal those of the same request run alone. On a fast machine the stream has already ended.
    let _ = stream.kill();
    let said = String::from_utf8(stream.wait_with_output().unwrap().stdout).unwrap();
    let tokens = |lines: &mut dyn Iterator<Item = Value>| -> Vec<Value> {
        lines.filter_map(|event| Some(event.get("token_ids")?.as_array()?.clone())).flatten().collect()
    };
    // The process was killed, so the last line may be incomplete.
    let said = tokens(&mut said.lines().map_while(|line| serde_json::from_str(line).ok()));
    let some = said.len().min(100);
    assert!(some > 0);
    let alone = generate(&some.to_string()).wait_with_output().unwrap();
    assert_eq!(tokens(&mut events(&alone).into_iter()), said[..some]);
    assert_eq!(server.stop(), Some(0));
}

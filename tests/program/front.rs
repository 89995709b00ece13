//! Goal: the program's first commands do what a new user types. Method: the real program on a CPU driver, with pipes in
//! place of a terminal.

use crate::cli::{Server, cpu, events, ostinato, run};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a conversation with these lines as its input.
fn chat(arguments: &[&str], input: &str) -> Output {
    let all: Vec<&str> = ["chat"].iter().chain(arguments).copied().collect();
    let mut child = ostinato(&all).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Writes the demo model as a GGUF file.
fn gguf(folder: &Path) -> String {
    let file = folder.join("tiny.gguf").to_str().unwrap().to_owned();
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model/config.json");
    let output = run(&["synth", "--config", config.to_str().unwrap(), "--gguf", "Q8_0", "--out", &file]);
    assert!(output.status.success(), "{}", told(&output));
    // Tokenizers warn about each token that they do not like.
    assert!(output.stderr.len() < 2000, "{}", told(&output));
    file
}

/// Goal: a synthetic checkpoint is written with a few lines about it, not a warning for each of its tokens, in both
/// layouts, and the result is one that runs.
#[test]
fn synthetic_checkpoints_are_written_in_few_words() {
    let folder = tempfile::tempdir().unwrap();
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model/config.json");
    let path = folder.path().join("model");
    let out = path.to_str().unwrap();
    let output = run(&["synth", "--config", config.to_str().unwrap(), "--out", out]);
    assert!(output.status.success(), "{}", told(&output));
    let words = output.stderr.len() + output.stdout.len();
    assert!(words < 2000, "{words} bytes: {}", told(&output));
    // The other layout is checked where it is written.
    let file = gguf(folder.path());
    for model in [out, &file] {
        let output = run(&["inspect", "--json", model]);
        assert!(output.status.success() && output.stderr.len() < 2000, "{}", told(&output));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["runs"], true, "{found}");
    }
}

#[test]
fn models_are_served_by_their_paths_and_talked_to() {
    let folder = tempfile::tempdir().unwrap();
    let file = gguf(folder.path());
    let server = Server::start(&["demo", &file, "--device", cpu()]);
    let listed = events(&run(&["models", "--server", &server.address, "--json"]));
    let names: Vec<&str> = listed.iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["demo", "tiny"]);
    assert!(listed.iter().all(|model| model["state"] == "serving"), "{listed:?}");

    // A conversation of two turns is the same in this process and on the server.
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let turns = |name: &str| {
        format!(
            "/system \"\"\nTell me a story about a fox.\n\"\"\"Add\n2 and 3.\"\"\"\n/save {}\n/quit\nnot said\n",
            path(name)
        )
    };
    let greedy = ["--temperature", "0", "--max-tokens", "16"];
    let here = chat(&[&["demo", "--device", cpu()], &greedy[..]].concat(), &turns("here"));
    assert!(here.status.success(), "{}", told(&here));
    let there = chat(&[&["demo", "--server", &server.address], &greedy[..]].concat(), &turns("there"));
    assert!(there.status.success(), "{}", told(&there));
    let saved = std::fs::read_to_string(path("here")).unwrap();
    assert_eq!(saved, std::fs::read_to_string(path("there")).unwrap());
    assert_eq!(here.stdout, there.stdout);
    let messages: Vec<Value> = serde_json::from_str(&saved).unwrap();
    let roles: Vec<&str> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    assert_eq!(messages[2]["content"], "Add\n2 and 3.");
    // Answers alone are on standard output, as they were saved; what they took is on standard error.
    let text = |message: &Value| message["content"].as_str().unwrap().to_owned();
    assert_eq!(String::from_utf8_lossy(&here.stdout), format!("{}\n{}\n", text(&messages[1]), text(&messages[3])));
    assert!(told(&here).contains("the first after") && !told(&here).contains("memory plan"), "{}", told(&here));
    let alone = ["generate", "--device", cpu(), "--chat", "Tell me a story about a fox.", "--max-tokens", "16"];
    let alone = run(&alone);
    assert_eq!(String::from_utf8_lossy(&alone.stdout).trim_end(), text(&messages[1]));
    assert!(!told(&alone).contains("memory plan"), "{}", told(&alone));

    // A saved conversation is continued: the model is shown all of it.
    let more = format!("/load {}\n/retry\n/save {}\n", path("here"), path("here"));
    let more = chat(&[&["demo", "--server", &server.address, "--quiet"], &greedy[..]].concat(), &more);
    assert!(more.status.success(), "{}", told(&more));
    assert_eq!(String::from_utf8_lossy(&more.stdout).trim_end(), text(&messages[3]));
    assert_eq!(told(&more), "", "--quiet");
    assert_eq!(std::fs::read_to_string(path("here")).unwrap(), saved);

    for (arguments, input, words) in [
        (&["demo"][..], "/unknown\n", "no command /unknown"),
        (&["demo"], &*format!("/save {file}\n"), "exists, and is no file of this conversation"),
        (&["demo"], "/load /nowhere\n", "cannot read /nowhere"),
        (&["other"], "hello\n", "\"other\" is not served"),
        (&[], "hello\n", "serves several models"),
        (&["demo", "--temperature", "-1"], "", "temperature is -1"),
    ] {
        let output = chat(&[arguments, &["--server", &server.address]].concat(), input);
        assert_eq!(output.status.code(), Some(2), "{arguments:?} {input:?}: {}", told(&output));
        assert!(told(&output).contains(words), "{arguments:?} {input:?}: {}", told(&output));
    }
    assert!(std::fs::metadata(&file).unwrap().len() > 1_000_000, "nothing was written over");
    assert_eq!(server.stop(), Some(0));
}

/// Goal: keys that are pressed while an answer is printed appear at the next prompt and not within the answer. Method: a
/// pseudo-terminal on which a command is typed after the first words of an answer.
#[test]
fn keys_pressed_during_an_answer_appear_at_the_next_prompt() {
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    let folder = tempfile::tempdir().unwrap();
    let shaders = Path::new(&std::env::var_os("HOME").unwrap_or_default()).join(".cache").into_os_string();
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let terminal = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    let mut child = ostinato(&["chat", "demo", "--device", cpu(), "--temperature", "0", "--max-tokens", "60"])
        .env("TERM", "xterm")
        // The history of conversations is the test's own, the driver's compiled shaders are not.
        .env("XDG_CACHE_HOME", folder.path())
        .env("MESA_SHADER_CACHE_DIR", std::env::var_os("MESA_SHADER_CACHE_DIR").unwrap_or(shaders))
        .stdin(terminal.try_clone().unwrap())
        .stdout(terminal.try_clone().unwrap())
        .stderr(terminal)
        .spawn()
        .unwrap();
    // A program that does not go on is ended, and the terminal with it.
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let id = child.id().to_string();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(std::time::Duration::from_secs(60)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = std::process::Command::new("kill").args(["-KILL", &id]).status();
        }
    });
    let mut master = std::fs::File::from(master);
    let mut shown = String::new();
    let wait = |master: &mut std::fs::File, shown: &mut String, until: &dyn Fn(&str) -> bool| {
        let mut bytes = [0; 4096];
        while !until(shown) {
            let count = master.read(&mut bytes).unwrap_or(0);
            assert!(count > 0, "the program has ended: {shown:?}");
            shown.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    };
    wait(&mut master, &mut shown, &|shown| shown.contains("\n> ") || shown.contains("K> "));
    master.write_all(b"Tell me a story about a fox.\r").unwrap();
    let answer = |shown: &str| shown.rfind("a fox.").map_or(0, |at| shown[at..].matches(char::is_alphabetic).count());
    wait(&mut master, &mut shown, &|shown| answer(shown) > 20);
    master.write_all(b"/quit").unwrap();
    wait(&mut master, &mut shown, &|shown| shown.contains("/quit"));
    let at = |what: &str| shown.find(what).unwrap_or_else(|| panic!("{what} is not in {shown:?}"));
    assert!(at("/quit") > at("the first after"), "{shown:?}");
    master.write_all(b"\r").unwrap();
    assert!(child.wait().unwrap().success(), "{shown:?}");
    drop(end);
    watch.join().unwrap();
    // The terminal echoes again.
    let modes = rustix::termios::tcgetattr(&master).unwrap().local_modes;
    assert!(modes.contains(rustix::termios::LocalModes::ECHO));
}

/// Goal: an interrupt ends the answer and not the program. Method: the signal is sent after the first words.
#[test]
fn an_interrupt_ends_an_answer_and_the_conversation_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk");
    let arguments = ["chat", "demo", "--device", cpu(), "--temperature", "0"];
    let mut child =
        ostinato(&arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdin.write_all(b"Tell me a story about a fox, a lantern and a river.\n").unwrap();
    let mut first = [0; 1];
    stdout.read_exact(&mut first).unwrap();
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    stdin.write_all(format!("Add 2 and 3.\n/save {}\n/quit\n", file.display()).as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = told(&output);
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors.matches("stopped]").count(), 1, "{errors}");
    let messages: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(messages.len(), 4, "{messages:?}");
    assert!(!messages[1]["content"].as_str().unwrap().is_empty() && messages[3]["content"] != "", "{messages:?}");
}

#[test]
fn what_a_new_user_gets_wrong_is_told_before_anything_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let schema = folder.path().join("bad.json");
    std::fs::write(&schema, r#"{"type": "nothing"}"#).unwrap();
    let schema = schema.to_str().unwrap();
    // No device has this name: what is told earlier was found before a device was opened.
    let generate = |more: &[&str]| run(&[&["generate", "--device", "no such device", "--prompt", "x"], more].concat());
    for (output, words) in [
        (generate(&["--regex", "a(b"]), "unclosed group at character"),
        (generate(&["--json-schema", schema]), "constraint.json_schema"),
        (generate(&["--max-tokens", "0"]), "max_tokens is 0, must be at least 1"),
        (generate(&["--temperature", "-1"]), "temperature is -1, must be finite and at least 0"),
        (generate(&["--seed", "-1"]), "-1 is not a whole number from 0 to 18446744073709551615"),
        (generate(&["--top-k", "-1"]), "-1 is not in 0..=4294967295"),
        (run(&["bench", "--server", "127.0.0.1:1", "--rate", "-1"]), "a rate of -1 requests/s is not above 0"),
        (generate(&["--logit-bias", "99999=1"]), "logit_bias is 99999"),
        (generate(&["--stop-id", "999999"]), "stop_ids is 999999"),
        (generate(&["--min-tokens", "5", "--max-tokens", "3"]), "min_tokens is 5 with max_tokens 3"),
        (generate(&[]), "no such device"),
        (run(&["serve", "/a/x", "/b/x"]), "would both be served as \"x\""),
        (run(&["serve", "demo", "--model", "demo=/models/x"]), "would both be served as \"demo\""),
    ] {
        assert_eq!(output.status.code(), Some(2), "{words}: {}", told(&output));
        assert!(told(&output).contains(words), "{words}: {}", told(&output));
    }
    // With `OSTINATO_TEST_GPU` there is a GPU, and these are no mistakes.
    if std::env::var_os("OSTINATO_TEST_GPU").is_none() {
        for (output, words) in [
            (
                run(&["serve", "demo", "--listen", "127.0.0.1:0", "--admin", "off"]),
                "--device cpu chooses the CPU driver",
            ),
            (run(&["generate", "--device", "0", "--prompt", "x"]), "a CPU driver"),
        ] {
            assert_eq!(output.status.code(), Some(2), "{words}: {}", told(&output));
            assert!(told(&output).contains(words), "{words}: {}", told(&output));
        }
    }
}

#[test]
fn with_json_a_server_writes_json_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let arguments = ["serve", "demo", "--device", cpu(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--json"];
    let mut child =
        ostinato(&arguments).stdout(Stdio::piped()).stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let listening: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
    assert_eq!(listening["event"], "listening");
    let (grpc, admin) = (listening["grpc"].as_str().unwrap(), listening["admin"].as_str().unwrap());

    assert!(run(&["models", "--server", grpc]).status.success());
    // The address of the page is a common mistake.
    let output = run(&["models", "--server", admin]);
    assert_eq!(output.status.code(), Some(2), "{}", told(&output));
    assert!(told(&output).contains("answers HTTP/1 and not gRPC, as OpenAI's API (port 8000)"), "{}", told(&output));
    let output = run(&["bench", "--server", admin]);
    assert!(told(&output).contains("answers HTTP/1 and not gRPC"), "{}", told(&output));

    assert!(std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let written = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<Value> = rest
        .lines()
        .chain(written.lines())
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line:?}: {error}")))
        .collect();
    assert!(lines.iter().any(|line| line.to_string().contains("memory plan")), "progress is in the log: {written}");
    // So is an error.
    let output = run(&["serve", "--json", "--config", "/nowhere.toml"]);
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!((output.status.code(), &error["level"]), (Some(2), &"ERROR".into()));
}

#[test]
fn a_checkpoint_is_inspected_without_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let inspect = |arguments: &[&str]| run(&[&["inspect"], arguments].concat());
    let json = |arguments: &[&str]| -> Value {
        let output = inspect(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", told(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let demo = json(&["demo"]);
    assert_eq!((&demo["architecture"], &demo["runs"]), (&"Qwen3ForCausalLM".into(), &true.into()), "{demo}");
    assert_eq!((&demo["tokenizer"], &demo["chat_template"]), (&true.into(), &true.into()));
    let of = |model: &Value, kind: &str, key: &str| -> u64 {
        let rows = model["tensors"].as_array().unwrap().iter().filter(|row| row["kind"] == kind);
        rows.map(|row| row[key].as_u64().unwrap()).sum()
    };
    // 7 layers of q, k, v and o; 2,048 tokens of 256 numbers of 2 bytes.
    assert_eq!((of(&demo, "attention", "count"), of(&demo, "embedding", "bytes")), (28, 2048 * 256 * 2));
    assert_eq!(demo["memory"], Value::Null);
    let small = json(&["demo", "--memory", "70MiB", "--context", "1024"]);
    assert_eq!(small["memory"]["fits"], false, "64 MiB of it are kept back: {small}");
    let enough = json(&["demo", "--memory", "1GiB"]);
    assert_eq!((&enough["memory"]["fits"], &enough["memory"]["context"]), (&true.into(), &1024.into()));
    // The model's own context is reduced to what fits beside the weights, a context that is asked for is not.
    let less = json(&["demo", "--memory", "75MiB"]);
    let context = less["memory"]["context"].as_u64().unwrap();
    assert!(less["memory"]["fits"] == true && (256..1024).contains(&context), "{less}");
    assert_eq!(json(&["demo", "--memory", "75MiB", "--context", "1024"])["memory"]["fits"], false);
    let quantised = json(&["demo", "--quantize", "int8"]);
    assert!(quantised["weight_bytes"].as_u64() < demo["weight_bytes"].as_u64(), "{quantised}");
    // A draft model adds its weights, and its keys and values.
    let drafting = json(&["demo-hybrid", "--draft", "demo"]);
    let alone = json(&["demo-hybrid"]);
    assert_eq!(drafting["draft_weight_bytes"], demo["weight_bytes"]);
    let kv = |of: &Value| of["kv_bytes_per_token"].as_u64().unwrap();
    assert_eq!(kv(&drafting), kv(&alone) + kv(&demo));
    let refused = inspect(&["demo", "--draft", "demo-hybrid"]);
    assert_eq!(refused.status.code(), Some(2), "{}", told(&refused));
    assert!(told(&refused).contains("a draft model with recurrent layers is not supported"), "{}", told(&refused));

    // So does a draft head, which is no model of its own.
    let head = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/eagle/demo");
    let head = head.to_str().unwrap();
    let described = json(&[head]);
    let says = (&described["architecture"], &described["draft_head"], &described["runs"]);
    assert_eq!(says, (&"LlamaForCausalLMEagle3".into(), &true.into(), &false.into()), "{described}");
    assert!(described["reasons"][0].as_str().unwrap().contains("no model of its own"), "{described}");
    let text = String::from_utf8(inspect(&[head]).stdout).unwrap();
    assert!(text.contains("draft head     EAGLE-3, drafts 384 of 2048 tokens from 3 hidden states of 256\n"), "{text}");
    let drafting = json(&["demo", "--draft", head]);
    assert_eq!(drafting["draft_weight_bytes"], described["weight_bytes"]);
    assert_eq!(kv(&drafting), kv(&demo) + kv(&described));

    let quantised = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/bnb-nf4");
    let quantised = quantised.to_str().unwrap();
    let described = json(&[quantised]);
    assert_eq!(described["quantised"][0]["format"], "bitsandbytes nf4 with quantised scales", "{described}");
    let text = String::from_utf8(inspect(&[quantised]).stdout).unwrap();
    assert!(text.contains(" M in bitsandbytes nf4 with quantised scales\n"), "{text}");

    let file = gguf(folder.path());
    let packed = json(&[&file]);
    assert_eq!((&packed["format"], &packed["runs"]), (&"GGUF".into(), &true.into()), "{packed}");
    assert!(packed["tensors"].as_array().unwrap().iter().any(|row| row["type"] == "Q8_0"), "{packed}");
    assert_eq!(of(&packed, "attention", "count"), 28);
    let on_device = packed["on_device"].as_array().unwrap();
    assert!(on_device.iter().any(|row| row["format"] == "integers of 8 bits in groups of 32"), "{packed}");
    let text = inspect(&[&file]);
    let text = String::from_utf8(text.stdout).unwrap();
    for words in [
        "GGUF, 1 file",
        "attention",
        "Q8_0",
        "runs           yes",
        "integers of 8 bits in groups of 32, 8.50 bits each",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }

    // A model that is whole and is not supported is described, with the reason.
    let other = folder.path().join("other");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model");
    std::fs::create_dir(&other).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(own.join(name), other.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(own.join("config.json")).unwrap();
    let foreign = config.replace("Qwen3ForCausalLM", "MambaForCausalLM").replace("\"qwen3\"", "\"mamba\"");
    std::fs::write(other.join("config.json"), foreign).unwrap();
    let described = json(&[other.to_str().unwrap()]);
    assert_eq!((&described["runs"], &described["architecture"]), (&false.into(), &"MambaForCausalLM".into()));
    assert!(described["reasons"][0].as_str().unwrap().contains("MambaForCausalLM"), "{described}");
    assert_eq!(of(&described, "attention", "count"), 28);
    assert_eq!(described["tokenizer"], false);

    // Files that are damaged or missing are errors.
    let weights = std::fs::read(other.join("model.safetensors")).unwrap();
    std::fs::write(other.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let half = folder.path().join("half.gguf");
    std::fs::write(&half, &std::fs::read(&file).unwrap()[..2000]).unwrap();
    for (path, words) in [
        (other.to_str().unwrap(), "is truncated"),
        (half.to_str().unwrap(), "half.gguf"),
        ("/nowhere/at/all", "/nowhere/at/all"),
        (folder.path().to_str().unwrap(), "config.json"),
    ] {
        let output = inspect(&[path, "--json"]);
        assert_eq!(output.status.code(), Some(2), "{path}: {}", told(&output));
        assert!(told(&output).contains(words) && output.stdout.is_empty(), "{path}: {}", told(&output));
    }
}

#[test]
fn the_program_describes_itself() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("generate") && script.contains("inspect"), "{shell}");
    }
    let page = run(&["man"]);
    assert!(page.status.success() && page.stdout.starts_with(b".ie") || page.stdout.starts_with(b"."), "roff");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("man");
    assert!(run(&["man", "--out", out.to_str().unwrap()]).status.success());
    for name in ["ostinato.1", "ostinato-serve.1", "ostinato-chat.1"] {
        assert!(out.join(name).metadata().unwrap().len() > 100, "{name}");
    }
    assert!(!out.join("ostinato-worker.1").exists(), "it is not for users");
    let version = String::from_utf8(run(&["--version"]).stdout).unwrap();
    assert!(version.starts_with(concat!("ostinato ", env!("CARGO_PKG_VERSION"), " (")), "{version}");
    assert!(version.contains("rustc "), "{version}");
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = ostinato(&["--version"]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.code() == Some(1) && told(&output).contains("cannot print"), "{output:?}");
}

//! Goal: the commands of `README.md` and `docs/usage.md` work as they are written. Method: every line of their `sh`
//! blocks is run in the root of the tree with the program of this build, with other names in place of what a test does
//! not have (a checkpoint, a GPU, a fixed port); lines that are not run are listed with the reason and with what is
//! checked instead. The embedded demo model runs on a CPU driver. The README's speeds must be in `docs/performance.md`,
//! and links of all pages must lead to files and headings.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The pages, with their names.
const PAGES: [(&str, &str); 2] =
    [("README.md", include_str!("../../README.md")), ("docs/usage.md", include_str!("../../docs/usage.md"))];

/// Words of the commands that a test cannot use, and their replacements.
const INSTEAD: [(&str, &str); 4] = [
    // A checkpoint, on the only GPU.
    ("/models/Qwen3-8B", "demo"),
    // A checkpoint on a certain GPU.
    ("qwen=/models/Qwen3-8B@0000:65:00.0", "qwen=demo@cpu"),
    // The README's numbers of streams need a GPU.
    ("1,16,64", "1,2"),
    ("person.json", "tests/fixtures/readme/person.json"),
];

/// Arguments that are added to commands that begin like this, so that they end soon or find a device and a free port.
const ADDED: [(&str, &str); 7] = [
    ("ostinato serve", "--listen 127.0.0.1:0 --http 127.0.0.1:0 --admin 127.0.0.1:0"),
    ("ostinato serve /models", "--device cpu"),
    ("ostinato chat", "--device cpu --max-tokens 8"),
    ("ostinato embed --model", "--device cpu"),
    ("ostinato generate --model", "--device cpu --max-tokens 8"),
    ("ostinato generate --server", "--max-tokens 8"),
    ("ostinato bench --server", "--requests 2 --prompt 16 --decode 4"),
];

/// Beginnings of commands of the program whose arguments alone are checked, with the reason.
const ARGUMENTS_ONLY: [(&str, &str); 7] = [
    ("ostinato serve /models/Llama-3.3-70B --split", "it needs two GPUs; tests/model/split.rs has two CPU drivers"),
    ("ostinato chat Qwen/", "it needs a network; tests/program/hub.rs has a hub of its own"),
    ("ostinato pull", "it needs a network; as above"),
    ("ostinato bench --model", "it measures for minutes on a CPU driver"),
    ("ostinato tune", "it measures for minutes on a CPU driver"),
    ("ostinato profile", "it waits for the work of other clients"),
    ("ostinato synth", "it writes 15 GiB"),
];

/// Other commands, by how they begin, with the reason for which they are not run and the files that they need.
const NOT_RUN: [(&str, &str, &[&str]); 6] = [
    ("sudo apt-get install", "it changes the machine; `make test-newcomer` runs it", &["tests/install/run.sh"]),
    ("curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs", "it needs a network; as above", &[]),
    ("make demo", "it builds the program in release mode; as above", &["deploy/demo.sh", "deploy/setup.sh"]),
    ("export PATH=\"$PWD/target/release:$PATH\"", "the test has a program of its own", &[]),
    (
        "docker compose -f deploy/compose.yaml -f deploy/fleet.yaml --profile fleet up",
        "it needs containers; tests/tree/deploy.rs checks the files",
        &["deploy/compose.yaml", "deploy/fleet.yaml"],
    ),
    (
        "kubectl apply -k deploy",
        "it needs a cluster; tests/tree/deploy.rs checks the files",
        &["deploy/kustomization.yaml"],
    ),
];

/// Returns the commands of the `sh` blocks without their comments, each with its page.
fn commands() -> Vec<(&'static str, String)> {
    let mut commands = Vec::new();
    for (page, text) in PAGES {
        let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("\n```").next().expect("a block's end"));
        for line in blocks.flat_map(str::lines) {
            let command = line.split(" #").next().expect("a first part").trim();
            if !command.is_empty() {
                commands.push((page, command.to_owned()));
            }
        }
        // Commands of a page are in `sh` blocks, or they would not be found here.
        let mut fenced = false;
        for line in text.lines() {
            fenced ^= line.starts_with("```");
            assert!(fenced || !line.starts_with("    "), "{page}: a block without a fence: {line}");
        }
    }
    commands
}

/// Splits a command into words; a word may be in double quotes.
fn words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in command.split('"').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

fn ostinato(arguments: &[String]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ostinato"));
    command.args(arguments).stdin(Stdio::null()).current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

/// Runs the program with this standard input.
fn with_input(arguments: &[String], input: &str) -> Output {
    let mut command = ostinato(arguments);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    // A command that does not read its input may have ended.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    child.wait_with_output().expect("it runs")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned()
}

/// A server process that is killed when the test ends.
struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    fn start(arguments: &[String]) -> Server {
        let mut child = ostinato(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        output.read_line(&mut line).expect("a line");
        match line.strip_prefix("listening on ") {
            Some(address) => Server { address: address.trim().to_owned(), output, child },
            None => {
                let mut errors = String::new();
                child.stderr.take().expect("a pipe").read_to_string(&mut errors).expect("text");
                panic!("{arguments:?}: {line:?} {errors}")
            }
        }
    }

    /// Reads the address of OpenAI's API, which the server prints after the other one.
    fn http(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).expect("a line") > 0, "it prints no address of OpenAI's API");
            if let Some(address) = line.strip_prefix("OpenAI's API on http://") {
                return address.trim().trim_end_matches("/v1").to_owned();
            }
        }
    }

    /// Sends SIGTERM and returns the exit status.
    fn stop(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill runs").success());
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
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
fn every_command_of_the_pages_works() {
    let (mut used, mut run, mut servers) = (BTreeSet::new(), 0, 0);
    let serve = words("serve --model qwen=demo@cpu --listen 127.0.0.1:0 --http 127.0.0.1:0 --admin off");
    let mut server = Server::start(&serve);
    let http = server.http();
    let mut asked = 0;
    for (page, command) in commands() {
        if let Some((begin, _, files)) = NOT_RUN.iter().find(|(begin, ..)| command.starts_with(begin)) {
            used.insert(*begin);
            for file in *files {
                assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(file).is_file(), "{page}: {command} needs {file}");
            }
            if let Some(target) = command.strip_prefix("make ") {
                let makefile = include_str!("../../Makefile");
                assert!(makefile.lines().any(|line| line.starts_with(&format!("{target}:"))), "{page}: {command}");
            }
            continue;
        }
        // As a shell takes it, from the server that is there.
        if command.starts_with("curl ") {
            let command =
                command.replace("127.0.0.1:8000", &http).replacen("curl ", "curl --silent --fail-with-body ", 1);
            assert!(command.contains(&http), "{page}: {command} asks somebody else");
            let output = Command::new("sh").args(["-c", &command]).output().expect("a shell");
            assert!(output.status.success() && text(&output).contains("\"content\""), "{page}: {}", text(&output));
            asked += 1;
            continue;
        }
        let mut arguments = words(&command);
        assert_eq!(arguments.remove(0), "ostinato", "{page}: {command} is no command that this test knows");
        if let Some((begin, _)) = ARGUMENTS_ONLY.iter().find(|(begin, _)| command.starts_with(begin)) {
            used.insert(*begin);
            // Whatever is wrong with the arguments before `--help` is reported instead of the help.
            arguments.push("--help".to_owned());
            let output = ostinato(&arguments).output().expect("it runs");
            assert!(output.status.success(), "{page}: {command}: {}", text(&output));
            continue;
        }
        for word in &mut arguments {
            if let Some((name, instead)) = INSTEAD.iter().find(|(name, _)| name == word) {
                used.insert(*name);
                *word = (*instead).to_owned();
            } else if word == "127.0.0.1:50051" {
                *word = server.address.clone();
            }
        }
        for (begin, added) in ADDED.iter().filter(|(begin, _)| command.starts_with(begin)) {
            used.insert(*begin);
            arguments.extend(words(added));
        }
        run += 1;
        if arguments[0] == "serve" {
            servers += 1;
            assert_eq!(Server::start(&arguments).stop(), Some(0), "{page}: {command}");
            continue;
        }
        // A chat has a turn for each line.
        let input = if arguments[0] == "chat" { "Hello\n" } else { "" };
        let output = with_input(&arguments, input);
        assert!(output.status.success() && !output.stdout.is_empty(), "{page}: {command}: {}", text(&output));
    }
    assert_eq!(server.stop(), Some(0));
    let listed = INSTEAD.iter().chain(&ADDED).chain(&ARGUMENTS_ONLY).map(|(name, _)| *name);
    let unused: Vec<_> = listed.chain(NOT_RUN.iter().map(|(name, ..)| *name)).filter(|n| !used.contains(n)).collect();
    assert!(unused.is_empty(), "no command has {unused:?} any more");
    assert!(run >= 10 && servers >= 3 && asked > 0, "only {run} commands were run, and {asked} requests were sent");
}

#[test]
fn the_readmes_speeds_are_measurements() {
    let measured = include_str!("../../docs/performance.md");
    let numbers = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_digit() && c != ',' && c != '–');
        words.map(|word| word.trim_matches(',').to_owned()).filter(|word| !word.is_empty() && word != "–").collect()
    };
    let measured = numbers(measured);
    let table = include_str!("../../README.md").split("## Speed\n").nth(1).expect("a section about speed");
    let rows = table.split("\n## ").next().expect("a section").lines().filter(|line| line.starts_with('|')).skip(2);
    let mut count = 0;
    for row in rows {
        let (_, cells) = row.trim_start_matches('|').split_once('|').expect("cells");
        for number in numbers(cells) {
            assert!(measured.contains(&number), "{number} is not in docs/performance.md: {row}");
            count += 1;
        }
    }
    assert!(count > 20, "only {count} numbers were found");
}

/// The anchor that a heading has on a page.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_of_the_pages_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut open, mut pages) = (vec![root.join("docs")], vec![root.join("README.md"), root.join("CHANGELOG.md")]);
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => open.push(path),
                false if path.extension().is_some_and(|extension| extension == "md") => pages.push(path),
                false => {}
            }
        }
    }
    let (mut links, mut problems) = (0, Vec::new());
    for page in &pages {
        let text = std::fs::read_to_string(page).expect("text");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") {
                continue;
            }
            links += 1;
            let (path, place) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { page.clone() } else { page.parent().expect("a folder").join(path) };
            let there = match place {
                "" => target.exists(),
                _ => std::fs::read_to_string(&target)
                    .is_ok_and(|text| text.lines().any(|line| line.starts_with('#') && anchor(line) == place)),
            };
            if !there {
                problems.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
    assert!(links > 50, "only {links} links were found");
}

#[test]
fn an_argument_that_does_not_exist_is_noticed() {
    let output = ostinato(&words("tune --modle demo --help")).output().expect("it runs");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    assert_eq!(words("a \"b c\" d"), ["a", "b c", "d"]);
}

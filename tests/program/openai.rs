//! Goal: the official `openai` client works with `ostinato serve` as it comes: streams, tools, parsed outputs,
//! responses.
//! Method: the embedded demo model with a chat template that has tools and reasoning, on a CPU driver, and the checks
//! in `tests/python/api.py`. Needs the packages that `deploy/setup.sh test` installs; without them it fails.

use crate::cli::cpu;
use crate::python::python;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A chat template in the manner of Qwen3's, with tools and reasoning.
const TEMPLATE: &str = include_str!("../clients/chat_template.jinja");

/// A server process that is killed when the test ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_official_client_streams_calls_tools_and_parses() {
    let folder = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for entry in std::fs::read_dir(root.join("demo/model")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    std::fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let model = format!("tiny={}@{}", folder.path().display(), cpu());
    let mut command = Command::new(env!("CARGO_BIN_EXE_ostinato"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--admin", "off", "--model", &model]);
    let mut server = Server(command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap());
    let lines = BufReader::new(server.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.take(2).find_map(|line| line.strip_prefix("OpenAI's API on ").map(str::to_owned));
    let address = address.expect("the address of the HTTP endpoint");
    let script = root.join("tests/python/api.py");
    let status = Command::new(python()).arg(script).args([&address, "tiny"]).status().unwrap();
    assert!(status.success(), "{status}");
}

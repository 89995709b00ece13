//! Goal: the source tree keeps the structure that `docs/architecture.md` describes. Method: the sources are read as
//! text; every message gives the file, the line and what to do.

use std::path::{Path, PathBuf};

/// The folders under `src/` from the bottom up. A folder may import itself and those before it. `telemetry` may import
/// none of them, and all may import it.
const ORDER: [&str; 13] = [
    "config", "device", "memory", "kernels", "actors", "model", "engine", "replica", "host", "gpu", "service",
    "measure", "cli",
];

/// The places where `unsafe` is allowed.
const UNSAFE: [&str; 2] = ["src/device/", "src/memory/arena.rs"];

fn files(folder: &str, extension: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut open = vec![root.join(folder)];
    let mut found = Vec::new();
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())) {
            let path: PathBuf = entry.expect("a readable folder").path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                let name = path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
                found.push((name, std::fs::read_to_string(&path).expect("UTF-8 source")));
            }
        }
    }
    assert!(!found.is_empty(), "no .{extension} file under {folder}: the test looks in the wrong place");
    found.sort();
    found
}

/// Returns each `NAME` that a line of code uses as `crate::NAME`.
fn named(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("crate::").map(move |(at, _)| {
        let rest = &line[at + "crate::".len()..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        &rest[..end]
    })
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

#[test]
fn imports_point_one_way() {
    let mut problems = Vec::new();
    for (name, text) in files("src", "rs") {
        let folder = name.trim_start_matches("src/").split('/').next().expect("a path").trim_end_matches(".rs");
        let allowed: &[&str] = match ORDER.iter().position(|f| *f == folder) {
            Some(index) => &ORDER[..=index],
            None if folder == "telemetry" => &["telemetry"],
            None => continue,
        };
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !is_comment(line)) {
            for used in named(line).filter(|used| ORDER.contains(used)) {
                if !allowed.contains(&used) {
                    problems
                        .push(format!("{name}:{}: {folder} must not use {used}; move what it needs down", number + 1));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn the_import_test_would_notice() {
    assert_eq!(named("use crate::engine::host; crate::model::x").collect::<Vec<_>>(), ["engine", "model"]);
    assert_eq!(named("use std::crates").count(), 0);
}

#[test]
fn unsafe_has_its_places_and_its_reasons() {
    let mut problems = Vec::new();
    let mut seen = 0;
    for (name, text) in files("src", "rs") {
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate().filter(|(_, line)| !is_comment(line)) {
            let code = line.split("//").next().unwrap_or("");
            if !code.contains("unsafe {") && !code.contains("unsafe impl") {
                continue;
            }
            seen += 1;
            if !UNSAFE.iter().any(|place| name.starts_with(place)) {
                problems.push(format!("{name}:{}: unsafe belongs in device/ or memory/arena.rs", index + 1));
            }
            // A SAFETY comment must stand on the line of the block or on one of the 12 lines above it.
            let reason = lines[index.saturating_sub(12)..=index].iter().any(|l| l.contains("SAFETY:"));
            if !reason {
                problems
                    .push(format!("{name}:{}: say in a SAFETY comment which rule holds and who keeps it", index + 1));
            }
        }
    }
    assert!(seen > 50, "only {seen} unsafe blocks were found: the test looks in the wrong place");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Calls that open a file and could block until the other end of a pipe is opened, or read a device file endlessly.
const UNBOUNDED: [&str; 9] = [
    "fs::read(",
    "read_to_string(",
    "File::open(",
    "File::options(",
    "OpenOptions::new(",
    "from_pem_file(",
    "pem_file_iter(",
    "Toml::file",
    "Mmap",
];
/// Files in which those calls are allowed: the helper `config::file` itself, code that maps a file it has already
/// opened, a probe of device files, code that creates a file and only writes to it, and code that reads
/// `/proc/PID/stat` of the program's worker processes.
const OPENERS: [&str; 6] = [
    "src/config/file.rs",
    "src/memory/arena.rs",
    "src/device/visible.rs",
    "src/cli/token.rs",
    "src/actors/workers.rs",
    "src/model/worker.rs",
];

#[test]
fn files_are_opened_in_one_place() {
    for (name, text) in files("src", "rs") {
        let code = text.split("#[cfg(test)]").next().unwrap_or("");
        for (number, line) in code.lines().enumerate().filter(|(_, line)| !is_comment(line)) {
            let found = UNBOUNDED.iter().find(|word| line.contains(**word));
            if let Some(word) = found.filter(|_| !OPENERS.contains(&name.as_str())) {
                panic!("{name}:{}: {word} may wait or read without end: use config::file", number + 1);
            }
        }
    }
}

#[test]
fn tokio_lives_in_the_service() {
    for (name, text) in files("src", "rs") {
        // The telemetry exporter and the command-line client create their own runtimes.
        if ["src/service/", "src/telemetry/", "src/cli/"].iter().any(|place| name.starts_with(place)) {
            continue;
        }
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !is_comment(line)) {
            assert!(!line.contains("tokio::"), "{name}:{}: tokio belongs in service/", number + 1);
        }
    }
}

#[test]
fn files_open_with_what_they_own_and_nothing_is_left_undone() {
    let mut problems = Vec::new();
    let sources = files("src", "rs").into_iter().chain(files("tests", "rs")).chain(files("build", "rs"));
    for (name, text) in sources {
        if !text.starts_with("//!") {
            problems.push(format!("{name}:1: open with //! and say what the file owns and what is absent"));
        }
        for (number, line) in text.lines().enumerate() {
            let forbidden =
                [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("FIX", "ME"), concat!("dbg", "!(")];
            if let Some(word) = forbidden.iter().find(|word| line.contains(**word)) {
                problems.push(format!("{name}:{}: {word} is unfinished work", number + 1));
            }
        }
    }
    for (name, text) in files("shaders", "comp") {
        let head: String = text.lines().take(12).collect::<Vec<_>>().join("\n");
        if !text.starts_with("#version 460") || !head.contains("//") {
            problems.push(format!("{name}:1: open with #version 460, then the formula and the shapes of its buffers"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

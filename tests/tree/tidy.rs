//! Goal: the source tree keeps the structure that `docs/architecture.md` describes. Method: the sources are read as
//! text; every message gives the file, the line and what to do.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The folders under `src/` from the bottom up. A folder may import itself and those before it. `telemetry` may import
/// none of them, and all may import it.
const ORDER: [&str; 14] = [
    "config", "quant", "device", "memory", "kernels", "actors", "model", "engine", "replica", "host", "gpu", "service",
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

/// Returns the text with an empty line for each comment line.
fn uncommented(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(|line| if is_comment(line) { "" } else { line }).collect();
    lines.join("\n")
}

/// Returns the text without comment lines and without the items behind `#[cfg(test)]`, each replaced by an empty line.
fn code_of(text: &str) -> String {
    let mut code = uncommented(text);
    while let Some(start) = code.find("#[cfg(test)]") {
        let item = start + "#[cfg(test)]".len();
        let first = item + code[item..].find(['{', ';']).expect("an item ends");
        let mut depth = 0;
        let end = code[first..].char_indices().find_map(|(at, c)| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            (depth == 0).then_some(first + at + 1)
        });
        let end = end.unwrap_or(code.len());
        let blank = "\n".repeat(code[start..end].matches('\n').count());
        code.replace_range(start..end, &blank);
    }
    code
}

/// Returns the paths of a use tree, for example `a::{b, c::d}`, and the length of its text.
fn tree(text: &str) -> (Vec<Vec<&str>>, usize) {
    let skip = |at: usize| at + text[at..].len() - text[at..].trim_start().len();
    let (mut stem, mut at) = (Vec::new(), 0);
    loop {
        at = skip(at);
        if text[at..].starts_with('{') {
            let mut paths = Vec::new();
            while !text[at..].starts_with('}') && at < text.len() {
                at = skip(at + 1);
                let (inner, length) = tree(&text[at..]);
                paths.extend(inner.into_iter().map(|path| [stem.clone(), path].concat()));
                // Nothing else stands between two trees, but a renaming (`as`).
                at += length + text[at + length..].find([',', '}']).unwrap_or(text.len() - at - length);
            }
            return (paths, (at + 1).min(text.len()));
        }
        let end = text[at..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len() - at);
        stem.extend(Some(&text[at..at + end]).filter(|name| !name.is_empty()));
        at += end;
        if !text[at..].starts_with("::") {
            return (vec![stem], at);
        }
        at += 2;
    }
}

/// Returns the paths within the crate that the code of a module names, with the numbers of their lines: those that begin
/// with `crate::` or `super::`, with use trees taken apart.
fn paths(of: &str, code: &str) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let line = code[..at].matches('\n').count() + 1;
            for path in tree(&code[at..]).0 {
                let above = path.iter().take_while(|part| **part == "super").count();
                let own: Vec<&str> = of.split("::").collect();
                let base = if above > 0 { &own[..own.len().saturating_sub(above)] } else { &[] };
                let rest = path[above.max(1)..].iter();
                found.push((line, base.iter().chain(rest).map(|part| (*part).to_owned()).collect()));
            }
        }
    }
    found
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
        for (line, path) in paths(&module(&name), &uncommented(&text)) {
            let used = path.first().map_or("", String::as_str);
            if ORDER.contains(&used) && !allowed.contains(&used) {
                problems.push(format!("{name}:{line}: {folder} must not use {used}; move what it needs down"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Pairs of folders that stand beside each other: neither may import the other. `cli` composes them.
const APART: [(&str, &str); 1] = [("gpu", "service")];
/// The folders that may not know Vulkan, its memory, or more of the actors than [`KNOWN_ACTORS`].
const NO_VULKAN: [&str; 4] = ["engine", "replica", "host", "service"];
/// What those folders may import of `actors`: the records of submissions, copies and loads, points of timelines (which
/// `actors::timeline` takes over from `device`), an actor's inbox and thread, and the worker processes.
const KNOWN_ACTORS: [&str; 7] = [
    "timeline::",
    "mailbox::",
    "thread::",
    "workers::",
    "loader::LoadReport::",
    "loader::WorkerReport::",
    "transfer::TransferCounters::",
];

#[test]
fn gpu_and_service_do_not_know_each_other_and_the_engine_knows_no_vulkan() {
    let mut problems = Vec::new();
    for (name, text) in files("src", "rs") {
        let folder = name.trim_start_matches("src/").split('/').next().expect("a path").trim_end_matches(".rs");
        let code = uncommented(&text);
        let mut bad = |line: usize, what: &str| problems.push(format!("{name}:{line}: {folder} must not use {what}"));
        for (line, path) in paths(&module(&name), &code) {
            let used = path.first().map_or("", String::as_str);
            if APART.iter().any(|pair| *pair == (folder, used) || *pair == (used, folder)) {
                bad(line, used);
            }
            if !NO_VULKAN.contains(&folder) {
                continue;
            }
            let (whole, of_actors) = (path.join("::"), path.get(1..).unwrap_or(&[]).join("::"));
            let known = || KNOWN_ACTORS.iter().any(|known| format!("{of_actors}::").starts_with(known));
            if ["device", "memory"].contains(&used) || used == "actors" && !known() {
                bad(line, &whole);
            }
        }
        let is_ash = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        if let Some((at, _)) = code.match_indices("ash::").find(|(at, _)| NO_VULKAN.contains(&folder) && is_ash(*at)) {
            bad(code[..at].matches('\n').count() + 1, "ash");
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// The public types whose name is defined more than once, with the reason.
const SHARED_NAMES: [(&str, &str); 0] = [];

#[test]
fn a_public_types_name_is_defined_once() {
    let mut homes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, text) in files("src", "rs") {
        for line in text.lines() {
            let Some(rest) = line.strip_prefix("pub ") else { continue };
            let kinds = ["struct ", "enum ", "trait ", "type "];
            let Some(rest) = kinds.iter().find_map(|kind| rest.strip_prefix(kind)) else { continue };
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            homes.entry(rest[..end].to_owned()).or_default().push(name.clone());
        }
    }
    assert!(homes.len() > 300, "only {} public types were found: the test looks in the wrong place", homes.len());
    let listed = |name: &str| SHARED_NAMES.iter().any(|(shared, _)| *shared == name);
    let twice: Vec<_> = homes.iter().filter(|(name, homes)| homes.len() > 1 && !listed(name)).collect();
    assert!(twice.is_empty(), "give these types a name each: {twice:#?}");
}

/// Groups of files that import each other, each with the reason for which it stays one group.
const CYCLES: [(&[&str], &str); 14] = [
    (
        &["model::checkpoint::headers", "model::checkpoint::quantised"],
        "a head may be quantised: the names of such tensors are looked for in the headers",
    ),
    (&["kernels::recording", "kernels::shaders"], "generated argument structs are written into calls, which name them"),
    (
        &[
            "kernels::gemm::matmul",
            "kernels::gemm::panel",
            "kernels::gemm::tiled",
            "kernels::gemm::wgmma",
            "kernels::moe",
        ],
        "products share packed operands with the experts'",
    ),
    (&["model::grammar", "model::text"], "a tokenizer owns the compiler of constraints over its vocabulary"),
    (
        &["model::grammar::compiled", "model::grammar::structural"],
        "a structural tag is compiled, and the schemas in it have the compiler's bounds",
    ),
    (&["model::config::read", "model::config::rope"], "one parser in two files"),
    (&["replica", "replica::thread"], "an actor's handle and its thread"),
    (&["host", "host::catalogue", "host::lifecycle", "host::source"], "methods of one type, by topic"),
    (
        &[
            "gpu::build",
            "gpu::build::broken",
            "gpu::build::defaults",
            "gpu::build::format_test",
            "gpu::build::limits",
            "gpu::build::overlap_test",
            "gpu::build::ptx_test",
            "gpu::build::recordings",
            "gpu::build::reference_test",
            "gpu::build::speed",
            "gpu::build::split",
            "gpu::devices",
        ],
        "methods of one builder, by topic; devices own what it builds on",
    ),
    (&["service::bounds", "service::tls"], "a connection carries its peer's share of what arrives"),
    (
        &[
            "service::lifecycle",
            "service::openai",
            "service::rpc",
            "service::server",
            "service::vllm",
            "service::vllm::convert",
        ],
        "all contracts are served by one handler",
    ),
    (&["cli::reload", "cli::serve"], "serving takes in reloads, which apply what serving began"),
    (&["cli::bench", "cli::beside"], "one command in two files"),
    (
        &["device::diagnose", "device::error", "device::select"],
        "an error carries the diagnosis of why no GPU was found",
    ),
];

/// The group of the objects that a device creates and that hold it.
const DEVICE_OBJECTS: [&str; 8] = [
    "device::cache",
    "device::commands",
    "device::gate",
    "device::handle",
    "device::pipeline",
    "device::ptx",
    "device::queries",
    "device::queue",
];

/// The module of a source file, such as `gpu::build` for `src/gpu/build/mod.rs`.
fn module(file: &str) -> String {
    let path = file.trim_start_matches("src/").trim_end_matches(".rs");
    path.strip_suffix("/mod").unwrap_or(path).replace('/', "::")
}

/// The modules that a source file imports outside its tests: the longest known prefix of each path. What a module takes
/// from its own child modules does not count.
fn imports(of: &str, text: &str, known: &BTreeSet<String>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, mut path) in paths(of, &code_of(text)) {
        while !path.is_empty() && !known.contains(&path.join("::")) {
            path.pop();
        }
        found.insert(path.join("::"));
    }
    found.retain(|path| !path.is_empty() && path != of);
    found
}

/// The modules that can be reached from a module by imports.
fn reached<'a>(from: &'a str, imports: &'a BTreeMap<String, BTreeSet<String>>) -> BTreeSet<&'a str> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(next) = open.pop() {
        for to in imports.get(next).into_iter().flatten() {
            if seen.insert(to.as_str()) {
                open.push(to);
            }
        }
    }
    seen
}

#[test]
fn no_files_import_each_other_unless_they_are_listed() {
    let sources = files("src", "rs");
    let known: BTreeSet<String> = sources.iter().map(|(name, _)| module(name)).collect();
    let graph: BTreeMap<String, BTreeSet<String>> =
        sources.iter().map(|(name, text)| (module(name), imports(&module(name), text, &known))).collect();
    let edges: usize = graph.values().map(BTreeSet::len).sum();
    assert!(edges > 500, "only {edges} imports were found: the test looks in the wrong place");
    let reach: BTreeMap<&str, BTreeSet<&str>> = graph.keys().map(|of| (of.as_str(), reached(of, &graph))).collect();
    let mut groups: BTreeSet<Vec<&str>> = BTreeSet::new();
    for (of, to) in &reach {
        let group: Vec<&str> = to.iter().filter(|to| reach[**to].contains(of)).copied().collect();
        if group.len() > 1 {
            groups.insert(group);
        }
    }
    let listed: BTreeSet<Vec<&str>> =
        CYCLES.iter().map(|(group, _)| group.to_vec()).chain([DEVICE_OBJECTS.to_vec()]).collect();
    let unlisted: Vec<_> = groups.difference(&listed).collect();
    assert!(unlisted.is_empty(), "these files import each other: {unlisted:#?}");
    let gone: Vec<_> = listed.difference(&groups).collect();
    assert!(gone.is_empty(), "these are listed and do not import each other any more: {gone:#?}");
}

/// Words in backticks that look like a type or a path and are none of ours, as pages use them.
const FOREIGN: [&str; 0] = [];

#[test]
fn every_path_and_type_that_the_pages_name_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources: String =
        ["src", "tests", "build"].iter().flat_map(|folder| files(folder, "rs")).map(|(_, t)| t).collect();
    let shaders: String =
        files("shaders", "comp").into_iter().chain(files("shaders", "glsl")).map(|(_, t)| t).collect();
    let protos: String = files("proto", "proto").into_iter().map(|(_, text)| text).collect();
    let mut problems = Vec::new();
    for (name, text) in files("docs", "md") {
        for (number, line) in text.lines().enumerate() {
            for word in line.split('`').skip(1).step_by(2) {
                let place = format!("{name}:{}", number + 1);
                let ours = ["src/", "tests/", "shaders/", "docs/", "deploy/", "proto/", "demo/"];
                let path = word.split([' ', ':', '*', '{', '#']).next().unwrap_or("");
                if ours.iter().any(|folder| path.starts_with(folder)) {
                    if !root.join(path.trim_end_matches('/')).exists() {
                        problems.push(format!("{place}: {path} does not exist"));
                    }
                    continue;
                }
                // A type's name: capitals and small letters, nothing else.
                let ty = word.split("::").next().unwrap_or("");
                let camel = ty.starts_with(|c: char| c.is_ascii_uppercase())
                    && ty.chars().all(|c| c.is_ascii_alphanumeric())
                    && ty.chars().any(|c| c.is_ascii_lowercase())
                    && ty.chars().filter(char::is_ascii_uppercase).count() > 1;
                let is_word = |text: &str| {
                    text.match_indices(ty).any(|(at, _)| {
                        let end = text[at + ty.len()..].chars().next();
                        !end.is_some_and(|c| c.is_alphanumeric() || c == '_')
                    })
                };
                if camel && !FOREIGN.contains(&ty) && !is_word(&sources) && !is_word(&protos) && !is_word(&shaders) {
                    problems.push(format!("{place}: there is no {ty}"));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn no_test_ends_before_it_has_tested() {
    let mut problems = Vec::new();
    for (name, text) in files("tests", "rs").into_iter().filter(|(name, _)| !name.ends_with("tidy.rs")) {
        let lines: Vec<&str> = text.lines().collect();
        let told = |line: &str| line.contains("return eprintln!") || line.contains("return println!");
        for (index, line) in lines.iter().enumerate().filter(|(_, line)| line.trim() == "return;" || told(line)) {
            let before =
                lines[..index].iter().rev().find(|line| line.starts_with("fn ") || line.starts_with("async fn "));
            let test = lines[..index]
                .iter()
                .rposition(|line| line.starts_with("#[test]") || line.starts_with("#[tokio::test"));
            let opened =
                lines[..index].iter().rposition(|line| line.starts_with("fn ") || line.starts_with("async fn "));
            // A plain return is the test's own if it is four lines or fewer below its name.
            if let (Some(test), Some(opened)) = (test, opened)
                && test < opened
                && opened - test <= 3
                && (index - opened <= 4 || told(line))
                && !ENDS_EARLY.iter().any(|(file, _)| name.ends_with(file))
            {
                problems.push(format!(
                    "{name}:{}: {} returns: ignore it with a reason",
                    index + 1,
                    before.unwrap_or(line)
                ));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Files with a test that returns at once where it has nothing to test, with the reason.
const ENDS_EARLY: [(&str, &str); 2] = [
    ("device/handles.rs", "a GPU that is selected replaces the CPU drivers, of which the test needs two"),
    ("model/fallback.rs", "on a GPU that is selected, texts depend on how many rows a batch happens to have"),
];

#[test]
fn the_import_test_would_notice() {
    let code =
        "use crate::{engine::host, device::{Point, queue::Queue as Q}};\nuse super::super::actors; crate::model::x";
    let found = paths("service::openai::chat", code);
    let found: Vec<(usize, String)> = found.into_iter().map(|(line, path)| (line, path.join("::"))).collect();
    let wanted = [
        (1, "engine::host"),
        (1, "device::Point"),
        (1, "device::queue::Queue"),
        (2, "model::x"),
        (2, "service::actors"),
    ];
    assert_eq!(found, wanted.map(|(line, path)| (line, path.to_owned())));
    assert!(paths("a", "use std::crates; my_crate::b").is_empty());
    let code = code_of("a\n// b\n#[cfg(test)]\nmod tests {\n    c {}\n}\nd\n#[cfg(test)] use e;\nf");
    assert_eq!(code.split_whitespace().collect::<String>(), "adf");
    assert_eq!(code.matches('\n').count(), 8);
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
/// opened, a probe of device files, code that creates a file and only writes to it, a download that goes on with a part
/// under a lock, and code that reads `/proc/PID/stat` of the program's worker processes.
const OPENERS: [&str; 8] = [
    "src/config/file.rs",
    "src/memory/arena.rs",
    "src/device/diagnose.rs",
    "src/cli/token.rs",
    "src/cli/hub.rs",
    "src/actors/workers.rs",
    "src/model/worker.rs",
    "src/model/gguf/write/data.rs",
];

#[test]
fn files_are_opened_in_one_place() {
    for (name, text) in files("src", "rs") {
        if name.contains("/tests/") || name.ends_with("/tests.rs") {
            continue;
        }
        for (number, line) in code_of(&text).lines().enumerate() {
            let found = UNBOUNDED.iter().find(|word| line.contains(**word));
            if let Some(word) = found.filter(|_| !OPENERS.contains(&name.as_str())) {
                panic!("{name}:{}: {word} may wait or read without end: use config::file", number + 1);
            }
        }
    }
}

/// The calls that look up a model by name, and the files of the service that may contain them. All others take a target
/// that was found before (`Target` in `src/service/prepare.rs`).
const LOOK_UPS: [(&str, &[&str]); 3] = [
    ("host.model(", &["src/service/prepare.rs", "src/service/rpc.rs"]),
    ("host.route(", &[]),
    ("Target::find(", &["src/service/prepare.rs", "src/service/rpc.rs"]),
];

/// Goal: no stage of a call looks its model up again: by then another model may have the name, with another tokenizer.
#[test]
fn the_service_looks_up_models_in_one_place() {
    let mut found = 0;
    for (name, text) in files("src/service", "rs") {
        for (number, line) in code_of(&text).lines().enumerate() {
            let line = line.replace("host()", "host");
            for (_, allowed) in LOOK_UPS.iter().filter(|(call, _)| line.contains(call)) {
                found += 1;
                let known = allowed.contains(&name.as_str());
                assert!(known, "{name}:{}: take the call's Target instead of a second look-up", number + 1);
            }
        }
    }
    // `Target::find` itself and the service's inner `prepare`, and the two of `Scope`.
    assert_eq!(found, 4, "look-ups of models in prepare.rs and rpc.rs: each call must have one");
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

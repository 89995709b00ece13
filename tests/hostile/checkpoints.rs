//! Bad checkpoints that an operator's folder may hold, and changes of files and of the configuration while models load.
//! Each load must end with a typed error that names the file, or with a model that serves and can be unloaded; models
//! that serve must not notice.

use crate::arena::{Arena, Attack, Target, runtime};
use ostinato::service::proto::generate_response::Event;
use ostinato::service::proto::{self, ModelState, Replace, generate_request::Prompt};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// The attacks that can be combined. They need the models of [`further`].
pub const ATTACKS: &[Attack] = &[("bad checkpoints", |target, random| {
    let (name, said, _) = BAD[random.below(BAD.len() as u64) as usize];
    match runtime().block_on(load(target, name, Replace::Beside)) {
        // Another lane loads the same model.
        Err(status) if status.code() == Code::Aborted => {}
        other => refused_with(name, said, other),
    }
})];

/// The time limit of an operation on a model, for two busy cores.
const LONG: Duration = Duration::from_secs(120);

/// A change of a checkpoint's files.
type Change = fn(&Path);

/// The models that cannot be loaded: the name, a part of the error, and the change that makes a good checkpoint bad.
const BAD: &[(&str, &str, Change)] = &[
    ("cut", "is truncated", |folder| cut(&folder.join("model.safetensors"), 4096)),
    ("empty", "model.safetensors", |folder| std::fs::write(folder.join("model.safetensors"), b"").expect("a file")),
    ("huge-header", "model.safetensors", |folder| {
        std::fs::write(folder.join("model.safetensors"), [0xff; 4096]).expect("a file");
    }),
    ("pipe", "a named pipe", |folder| pipe(&folder.join("config.json"))),
    ("pipe-of-weights", "a named pipe", |folder| pipe(&folder.join("model.safetensors"))),
    ("zeroes", "a character device", |folder| link(&folder.join("model.safetensors"), "/dev/zero")),
    ("zero-tokenizer", "a character device", |folder| link(&folder.join("tokenizer.json"), "/dev/zero")),
    ("no-tokenizer", "a symbolic link to ../gone", |folder| link(&folder.join("tokenizer.json"), "../gone")),
    ("deep-config", "config.json", |folder| {
        std::fs::write(folder.join("config.json"), "[".repeat(1 << 20)).expect("a file");
    }),
];

/// The template that does not end by itself.
const ENDLESS: &str = "loops";

/// Chat templates that once ended the process, or went on without end.
fn templates() -> [(&'static str, String); 3] {
    [
        ("long-sum", format!("{{{{ 1{} }}}}", "+1".repeat(30_000))),
        ("deep-lists", format!("{{{{ {}{} }}}}", "[".repeat(30_000), "]".repeat(30_000))),
        (ENDLESS, "{% for a in range(100000) %}".repeat(5) + "x" + &"{% endfor %}".repeat(5)),
    ]
}

/// The good checkpoint that is loaded and changed.
const GOOD: &str = "good";

fn cut(file: &Path, bytes: u64) {
    let open = std::fs::OpenOptions::new().write(true).open(file).expect("the file");
    let length = open.metadata().expect("its length").len();
    open.set_len(length - bytes).expect("shorter");
}

fn pipe(file: &Path) {
    std::fs::remove_file(file).expect("the file was there");
    assert!(Command::new("mkfifo").arg(file).status().expect("mkfifo").success());
}

fn link(file: &Path, to: &str) {
    std::fs::remove_file(file).expect("the file was there");
    symlink(to, file).expect("a link");
}

/// Copies the demo model's checkpoint.
fn copy(to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model");
    for file in std::fs::read_dir(demo).expect("the demo model").flatten() {
        std::fs::copy(file.path(), to.join(file.file_name())).expect("a copy");
    }
}

/// The entry of a model that is loaded on request.
fn entry(folder: &Path, name: &str, device: &str) -> String {
    let path = folder.join(name);
    let small = "slots = 2\ncontext = 256\nprefill_chunk = 64\nload = \"request\"";
    format!("[[models]]\nname = \"{name}\"\npath = {path:?}\n{small}\nreplicas = [{{ device = \"{device}\" }}]\n")
}

/// Makes all checkpoints in the configuration's folder. Returns the entries of their models.
pub fn further(folder: &Path, device: &str) -> String {
    let mut entries = String::new();
    let mut make = |name: &str, change: &dyn Fn(&Path)| {
        copy(&folder.join(name));
        change(&folder.join(name));
        entries.push_str(&entry(folder, name, device));
    };
    make(GOOD, &|_| {});
    BAD.iter().for_each(|(name, _, change)| make(name, change));
    for (name, template) in templates() {
        make(name, &|folder| std::fs::write(folder.join("chat_template.jinja"), &template).expect("a template"));
    }
    entries
}

/// Loads a model and waits for the end of the load.
async fn load(target: &Target, name: &str, replace: Replace) -> Result<(), Status> {
    let mut client = target.client(None).await.map_err(|error| Status::unavailable(error.to_string()))?;
    let request = proto::LoadModelRequest { name: name.to_owned(), replace: replace.into() };
    let loading = async {
        let mut events = client.load_model(request).await?.into_inner();
        while events.message().await?.is_some() {}
        Ok(())
    };
    tokio::time::timeout(LONG, loading).await.unwrap_or_else(|_| panic!("{name} is loading after {LONG:?}"))
}

async fn unload(target: &Target, name: &str) -> Result<(), Status> {
    let mut client = target.client(None).await.map_err(|error| Status::unavailable(error.to_string()))?;
    let request = proto::UnloadModelRequest { name: name.to_owned(), grace_seconds: Some(0.0) };
    let unloading = client.unload_model(request);
    let ended = tokio::time::timeout(LONG, unloading).await;
    ended.unwrap_or_else(|_| panic!("{name} is unloading after {LONG:?}")).map(drop)
}

/// Panics unless a load has failed with a precondition and these words, and without a panic.
fn refused_with(name: &str, said: &str, ended: Result<(), Status>) {
    let Err(status) = ended else { panic!("{name} was loaded") };
    let message = status.message();
    assert!(status.code() == Code::FailedPrecondition && message.contains(said), "{name}: {status:?}");
    assert!(!message.contains("panic"), "{name}: {status:?}");
}

/// The state of a model; `None` if it is not configured.
async fn state(target: &Target, name: &str) -> Option<ModelState> {
    let mut client = target.client(None).await.expect("a connection");
    let listed = client.list_models(proto::ListModelsRequest {}).await.expect("the models").into_inner();
    listed.models.iter().find(|model| model.name == name).map(proto::Model::state)
}

/// Asks a model for tokens, greedily, after a text or a chat.
async fn ask(target: &Target, name: &str, chat: bool) -> Result<Vec<u32>, Status> {
    let mut client = target.client(None).await.map_err(|error| Status::unavailable(error.to_string()))?;
    let said = "Once upon a time".to_owned();
    let message = proto::ChatMessage { role: "user".to_owned(), content: said.clone(), ..Default::default() };
    let prompt = match chat {
        true => Prompt::Chat(proto::Chat { messages: vec![message], ..Default::default() }),
        false => Prompt::Text(said),
    };
    let request = proto::GenerateRequest {
        model: name.to_owned(),
        prompt: Some(prompt),
        sampling: Some(proto::Sampling { temperature: Some(0.0), ..Default::default() }),
        stopping: Some(proto::Stopping { max_tokens: Some(8), ignore_eos: true, ..Default::default() }),
        ..Default::default()
    };
    let mut stream = client.generate(request).await?.into_inner();
    let mut tokens = Vec::new();
    while let Some(message) = stream.message().await? {
        if let Some(Event::Delta(delta)) = message.event {
            tokens.extend(delta.token_ids);
        }
    }
    Ok(tokens)
}

/// Loads each bad checkpoint. The error must say what is wrong with which file; the model stays unloaded. Checkpoints with
/// hostile chat templates serve text, and a chat is rendered or refused within the limits of the template's worker.
pub fn bad_checkpoints_are_refused_by_name(arena: &Arena) {
    let target = arena.target();
    runtime().block_on(async {
        for (name, said, _) in BAD {
            let begun = Instant::now();
            let ended = load(&target, name, Replace::Beside).await;
            eprintln!("{name}: {:.2} s, {:?}", begun.elapsed().as_secs_f64(), ended.as_ref().map_err(Status::message));
            refused_with(name, said, ended);
            assert_eq!(state(&target, name).await, Some(ModelState::Unloaded), "{name}");
            let status = ask(&target, name, false).await.expect_err("it is not loaded");
            assert_eq!(status.code(), Code::NotFound, "{status:?}");
        }
        let expected = ask(&target, "demo", false).await.expect("tokens of the same weights");
        for (name, _) in templates() {
            load(&target, name, Replace::Beside).await.unwrap_or_else(|status| panic!("{name}: {status:?}"));
            assert_eq!(ask(&target, name, false).await.expect("tokens"), expected, "{name}");
            let begun = Instant::now();
            let ended = ask(&target, name, true).await;
            eprintln!("a chat by {name}: {:.2} s, {ended:?}", begun.elapsed().as_secs_f64());
            // Some are only long, and the worker has the stack for them.
            let typed = |status: &Status| matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition);
            assert!(ended.as_ref().map_or_else(typed, |_| name != ENDLESS), "{name}: {ended:?}");
            assert!(begun.elapsed() < LONG, "{name}");
            unload(&target, name).await.expect("unloaded");
        }
    });
}

/// Truncates weights at various moments of a load, which ends that load at most; then while their model serves. It draws
/// the same tokens as before, also after a replacement with the truncated file has failed.
pub fn weights_that_are_truncated_end_their_load_only(arena: &Arena) {
    let target = arena.target();
    let weights = target.folder.join(GOOD).join("model.safetensors");
    let kept = std::fs::read(&weights).expect("the weights");
    let (mut failed, mut loaded) = (0, 0);
    runtime().block_on(async {
        for round in 0..5 {
            let (loading, named) = (target.clone(), GOOD);
            let ended = tokio::spawn(async move { load(&loading, named, Replace::Beside).await });
            tokio::time::sleep(Duration::from_millis(20 * round * round)).await;
            cut(&weights, 8 << 20);
            match ended.await.expect("no panic") {
                Ok(()) => {
                    loaded += 1;
                    unload(&target, GOOD).await.expect("unloaded");
                }
                ended => {
                    failed += 1;
                    refused_with(GOOD, "model.safetensors", ended);
                }
            }
            std::fs::write(&weights, &kept).expect("the weights as they were");
        }
        eprintln!("of 5 loads {failed} failed and {loaded} ended before the file was truncated");
        assert!(failed > 0, "no load was in progress");
        load(&target, GOOD, Replace::Beside).await.expect("the whole file");
        let expected = ask(&target, GOOD, false).await.expect("tokens");
        cut(&weights, 8 << 20);
        assert_eq!(ask(&target, GOOD, false).await.expect("tokens of a model whose file has gone"), expected);
        refused_with(GOOD, "is truncated", load(&target, GOOD, Replace::Beside).await);
        assert_eq!(state(&target, GOOD).await, Some(ModelState::Serving));
        assert_eq!(ask(&target, GOOD, false).await.expect("the old one serves"), expected);
        unload(&target, GOOD).await.expect("unloaded");
    });
    std::fs::write(&weights, &kept).expect("the weights as they were");
}

/// Removes the entry of a model and adds it again, by SIGHUP, at various moments of its load, which leaves no model between
/// two states. Without an entry it must be gone; with it, it can be loaded, asked and unloaded. A configuration with
/// problems changes nothing.
pub fn configurations_that_change_beside_loads_leave_nothing_undone(arena: &Arena) {
    let target = arena.target();
    let file = target.folder.join("ostinato.toml");
    let with = std::fs::read_to_string(&file).expect("the configuration");
    let begin = with.find(&format!("[[models]]\nname = \"{GOOD}\"")).expect("its entry");
    let end = begin + 1 + with[begin + 1..].find("[[models]]").expect("another one");
    let without = format!("{}{}", &with[..begin], &with[end..]);
    let count = |words: &str| arena.log().matches(words).count();
    let changed = |text: &str, words: &str| {
        let before = count(words);
        std::fs::write(&file, text).expect("the configuration");
        let id = target.id.to_string();
        assert!(Command::new("kill").args(["-HUP", &id]).status().expect("kill").success());
        let until = Instant::now() + LONG;
        while count(words) == before {
            assert!(Instant::now() < until, "{words:?} is not logged:\n{}", arena.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    const IN_FORCE: &str = "the configuration is in force";
    let runtime = runtime();
    let mut cancelled = 0;
    for round in 0..3 {
        let loading = target.clone();
        let ended = runtime.spawn(async move { load(&loading, GOOD, Replace::Beside).await });
        std::thread::sleep(Duration::from_millis(200 * round));
        // The last time it is loaded and serves when its entry goes.
        let until = Instant::now() + LONG;
        while round == 2 && !ended.is_finished() {
            assert!(Instant::now() < until, "it is loading");
            std::thread::sleep(Duration::from_millis(20));
        }
        changed(&without, IN_FORCE);
        match runtime.block_on(ended).expect("no panic") {
            Ok(()) => {}
            Err(status) => {
                assert!(matches!(status.code(), Code::Aborted | Code::NotFound), "{status:?}");
                cancelled += 1;
            }
        }
        assert_eq!(runtime.block_on(state(&target, GOOD)), None, "round {round}");
        let status = runtime.block_on(ask(&target, GOOD, false)).expect_err("it is not there");
        assert_eq!(status.code(), Code::NotFound, "{status:?}");
        changed("[server]\nqueue_limit = 0\n", "server.queue_limit must");
        assert_eq!(runtime.block_on(state(&target, GOOD)), None, "a wrong configuration changes nothing");
        changed(&with, IN_FORCE);
        assert_eq!(runtime.block_on(state(&target, GOOD)), Some(ModelState::Unloaded), "round {round}");
    }
    eprintln!("of 3 loads {cancelled} were cancelled by the configuration");
    assert!((1..3).contains(&cancelled), "{cancelled} of 3 loads");
    runtime.block_on(async {
        load(&target, GOOD, Replace::Beside).await.expect("a load that nothing disturbs");
        ask(&target, GOOD, false).await.expect("tokens");
        unload(&target, GOOD).await.expect("unloaded");
    });
}

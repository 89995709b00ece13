//! Goal: on real devices, loading and unloading a model beside others affects neither their tokens nor their memory.
//! All memory of a model is freed, also after a failed load. Method: small checkpoints on lavapipe and SwiftShader
//! under the validation layer, while another model generates known tokens. Failures are caused in the middle of a load,
//! triggered by its progress lines.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{expected, fixture, generate, request};
use ostinato::config::{Bytes, Config, GpuTime, LoadWhen, Model};
use ostinato::gpu::devices::{start_on, start_with};
use ostinato::gpu::error::StartError;
use ostinato::host::Host;
use ostinato::host::catalogue::LoadState;
use ostinato::host::lifecycle::{LifecycleError, Replace};
use ostinato::host::progress::{Progress, Quiet, Unit};
use ostinato::telemetry::with_causes;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

const NOW: Duration = Duration::ZERO;

fn small(name: &str, path: &Path, device: &str, load: LoadWhen) -> Model {
    let mut model = Model::new(name, path, Some(device.parse().expect("a selector")));
    (model.load, model.slots, model.context, model.prefill_chunk) = (load, Some(2), Some(128), Some(64));
    model
}

fn serve(vulkan: &Vulkan, models: Vec<Model>) -> Host {
    start_on(&vulkan.instance, &Config { models, ..Config::default() }, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
}

/// Checks that a model generates the known tokens of its checkpoint.
fn answers(host: &Host, model: &str, checkpoint: &str) {
    let known = expected(checkpoint);
    let (_, replica) = host.route(model, "").unwrap_or_else(|e| panic!("{e}"));
    let generated = generate(&replica, request(&known.prompt, known.greedy.len() as u32));
    assert_eq!(generated.tokens, known.greedy, "{model}");
}

/// Returns the total bytes of buffers on every open device.
fn taken(host: &Host) -> Vec<u64> {
    host.devices().iter().map(|device| device.status.as_ref().expect("a real device").buffer_bytes()).collect()
}

/// Waits until the buffers have the wanted sizes. Memory is freed only after the watcher has seen the end of the work
/// that used it.
#[track_caller]
fn comes_back(host: &Host, wanted: &[u64], when: &str) {
    let until = Instant::now() + Duration::from_secs(2);
    while taken(host) != wanted {
        assert!(Instant::now() < until, "{when}: {:?} bytes are taken, {wanted:?} were before", taken(host));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn load(host: &Host, name: &str) -> Result<(), LifecycleError> {
    load_with(host, name, &Quiet)
}

fn load_with(host: &Host, name: &str, progress: &dyn Progress) -> Result<(), LifecycleError> {
    host.load(name, Replace::Beside, NOW, progress).map(|loaded| {
        if let Some(old) = loaded.old {
            let _ = host.retire(old, NOW);
        }
    })
}

/// Calls a function at each progress line of a load that begins with a prefix.
struct When<'a, F: Fn(&str) + Sync>(&'a str, F);

impl<F: Fn(&str) + Sync> Progress for When<'_, F> {
    fn line(&self, text: &str) {
        if text.starts_with(self.0) {
            self.1(text);
        }
    }

    fn warning(&self, _: &str) {}

    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

/// Records how many pipelines each load has to build.
#[derive(Default)]
struct Built(Mutex<Vec<u64>>);

impl Progress for Built {
    fn line(&self, _: &str) {}

    fn warning(&self, _: &str) {}

    fn step(&self, what: &str, done: u64, total: u64, _: Unit) {
        if what == "building pipelines" && done == 0 {
            self.0.lock().expect("no panic").push(total);
        }
    }
}

/// Goal: a model takes the pipelines that are built on its device, by another model, by itself before it was unloaded, or by
/// another host that uses the device in the same way; a host that uses it otherwise opens it for itself.
#[test]
fn models_of_a_device_share_its_pipelines() {
    let vulkan = Vulkan::new();
    let uuid = vulkan.adapter(Driver::first()).uuid;
    let built = Built::default();
    let take = || std::mem::take(&mut *built.0.lock().expect("no panic"));
    let models = ["a", "b"].map(|name| small(name, &fixture("llama-plain"), &uuid, LoadWhen::Request)).to_vec();
    let mut config = Config { models, ..Config::default() };
    let start = |config: &Config| start_with(&vulkan.devices, config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
    let loads = |host: &Host, name: &str| {
        load_with(host, name, &built).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        answers(host, name, "llama-plain");
        take()
    };
    let host = start(&config);
    let all = loads(&host, "a");
    assert!(matches!(all[..], [count] if count > 10), "{all:?} pipelines");
    assert_eq!(loads(&host, "b"), [0; 0], "those of \"a\"");
    for name in ["a", "b"] {
        host.unload(name, NOW).unwrap_or_else(|e| panic!("{name}: {e:?}"));
    }
    assert_eq!(loads(&host, "a"), [0; 0], "its own");
    let other = start(&config);
    assert_eq!(loads(&other, "a"), [0; 0], "those of the first host");
    config.telemetry.gpu_time = GpuTime::Off;
    let otherwise = start(&config);
    assert_eq!(loads(&otherwise, "a"), all, "on a device that it opens for itself");
    assert_eq!([&host, &other, &otherwise].map(|host| host.devices().len()), [1; 3]);
}

#[test]
fn models_come_and_go_beside_one_that_generates_and_leave_nothing() {
    let vulkan = Vulkan::new();
    let uuid = vulkan.adapter(Driver::first()).uuid;
    let models = vec![
        small("deep", &fixture("llama-deep"), &uuid, LoadWhen::Start),
        small("plain", &fixture("llama-plain"), &uuid, LoadWhen::Request),
    ];
    let host = serve(&vulkan, models);
    let done = AtomicBool::new(false);
    let before = taken(&host);
    let asked = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut asked = 0;
            while !done.load(SeqCst) || asked == 0 {
                answers(&host, "deep", "llama-deep");
                asked += 1;
            }
            asked
        });
        for round in 0..5 {
            load(&host, "plain").unwrap_or_else(|e| panic!("round {round}: {e:?}"));
            answers(&host, "plain", "llama-plain");
            let with = taken(&host);
            assert!(with[0] > before[0], "{with:?}");
            let planned: u64 = host.devices()[0].memory.iter().map(|line| line.bytes).sum();
            if round == 3 {
                // The model replaces itself: for a while both exist, then one.
                load(&host, "plain").unwrap_or_else(|e| panic!("{e:?}"));
                answers(&host, "plain", "llama-plain");
                comes_back(&host, &with, "what was replaced");
            }
            let unloaded = host.unload("plain", NOW).unwrap_or_else(|e| panic!("round {round}: {e:?}"));
            let left: u64 = host.devices()[0].memory.iter().map(|line| line.bytes).sum();
            assert!(unloaded.cut == 0 && unloaded.freed_bytes > 0 && unloaded.freed_bytes <= planned - left);
            comes_back(&host, &before, "what was unloaded");
        }
        done.store(true, SeqCst);
        asking.join().expect("its tokens were right")
    });
    assert!(asked > 0);
}

#[test]
fn a_load_that_fails_leaves_everything_as_it_was() {
    let vulkan = Vulkan::new();
    let uuid = vulkan.adapter(Driver::first()).uuid;
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(fixture("llama-plain")).expect("a checkpoint").flatten() {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
    }
    let mut tight = small("tight", &fixture("llama-plain"), &uuid, LoadWhen::Request);
    tight.memory_limit = Some(Bytes(4096));
    let models = vec![
        small("plain", &fixture("llama-plain"), &uuid, LoadWhen::Start),
        small("broken", folder.path(), &uuid, LoadWhen::Request),
        tight,
    ];
    let host = serve(&vulkan, models);
    let before = taken(&host);
    let fails = |name: &str, progress: &dyn Progress| -> StartError {
        let error = host.load(name, Replace::Beside, NOW, progress).map(|_| ()).expect_err(name);
        comes_back(&host, &before, name);
        assert_eq!((host.state(name), host.models().len()), (Some(LoadState::Unloaded), 1));
        assert_eq!(host.devices()[0].memory.iter().filter(|line| !line.replica.starts_with("plain/")).count(), 0);
        answers(&host, "plain", "llama-plain");
        let LifecycleError::Load { source, .. } = error else { panic!("{error:?}") };
        (*source).into()
    };
    let error = fails("tight", &Quiet);
    let StartError::Plan { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.to_string().contains("4.0 KiB"), "both numbers are told: {source}");

    // The load is cancelled while its memory is planned; the unload waits for the end of the load.
    let error = std::thread::scope(|scope| {
        let gives_up = When("memory of", |_: &str| {
            scope.spawn(|| host.unload("broken", NOW));
            std::thread::sleep(Duration::from_millis(200));
        });
        fails("broken", &gives_up)
    });
    assert!(matches!(error, StartError::Cancelled { .. }), "{error:?}");

    // The weights file is truncated after its header was read.
    let weights = folder.path().join("model.safetensors");
    let cut = When("memory of", |_: &str| {
        let file = std::fs::OpenOptions::new().write(true).open(&weights).expect("the weights");
        let bytes = file.metadata().expect("its length").len();
        file.set_len(bytes - 4096).expect("shorter");
    });
    let error = fails("broken", &cut);
    assert!(matches!(error, StartError::Load { .. }), "{error:?}");
    // The file is now truncated before the load begins.
    assert!(matches!(fails("broken", &Quiet), StartError::Checkpoint { .. }));
    load(&host, "plain").unwrap_or_else(|e| panic!("{e:?}"));
    answers(&host, "plain", "llama-plain");
}

/// The error message that a change of the file must cause, and the change.
type Change<'a> = (&'a str, &'a (dyn Fn(&str) + Sync + 'a));

/// Goal: weights that have changed since their header was read are not loaded. Method: the file is written to or
/// replaced between reading the header and loading, with the same length, once with the old modification time.
#[test]
fn weights_that_are_written_to_while_they_load_are_noticed() {
    let vulkan = Vulkan::new();
    let uuid = vulkan.adapter(Driver::first()).uuid;
    let folder = tempfile::tempdir().expect("a folder");
    let weights = folder.path().join("model.safetensors");
    let models = vec![small("m", folder.path(), &uuid, LoadWhen::Request)];
    let host = serve(&vulkan, models);
    let rewrite = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).expect("the weights");
        let end = file.metadata().expect("its length").len();
        file.write_all_at(&[0x3f; 512], end - 512).expect("written");
        file
    };
    let in_place = |_: &str| drop(rewrite(&weights));
    let time_kept = |_: &str| {
        let time = std::fs::metadata(&weights).and_then(|found| found.modified()).expect("its time");
        rewrite(&weights).set_modified(time).expect("set back");
    };
    let replaced = |_: &str| {
        let other = folder.path().join("other");
        std::fs::copy(&weights, &other).expect("a copy");
        rewrite(&other);
        std::fs::rename(&other, &weights).expect("in its place");
    };
    let changes: [Change<'_>; 3] = [("written at", &in_place), ("changed at", &time_kept), ("another file", &replaced)];
    for (how, change) in changes {
        for file in std::fs::read_dir(fixture("llama-plain")).expect("a checkpoint").flatten() {
            std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
        }
        let Err(error) = load_with(&host, "m", &When("memory of", change)) else { panic!("{how}: it was loaded") };
        let said = with_causes(&error);
        assert!(said.contains("model.safetensors was changed while it was loaded") && said.contains(how), "{said}");
        assert!(host.models().is_empty());
    }
    // The files in their current state can be loaded.
    load(&host, "m").unwrap_or_else(|e| panic!("{e:?}"));
}

#[test]
fn loads_on_one_device_take_turns_and_a_device_is_opened_when_it_is_needed() {
    let vulkan = Vulkan::new();
    let [first, second] = Driver::BOTH.map(|driver| vulkan.adapter(driver).uuid);
    let models = vec![
        small("a", &fixture("llama-plain"), &first, LoadWhen::Request),
        small("b", &fixture("qwen3-f16"), &first, LoadWhen::Request),
        small("far", &fixture("qwen3-f16"), &second, LoadWhen::Request),
    ];
    let host = serve(&vulkan, models);
    assert!(host.models().is_empty() && host.devices().is_empty(), "nobody has asked yet");
    // The first load continues when the second has reported that it waits.
    let (waits, heard) = (Mutex::new(0), Condvar::new());
    let say = |what: u32| {
        *waits.lock().expect("no panic") = what;
        heard.notify_all();
    };
    let wait_for = |what: u32| {
        let guard = waits.lock().expect("no panic");
        let limit = Duration::from_secs(60);
        let (_guard, late) = heard.wait_timeout_while(guard, limit, |now| *now < what).expect("no panic");
        assert!(!late.timed_out(), "the other load has not come so far");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let holds = When("memory of", |_: &str| {
                say(1);
                wait_for(2);
            });
            let loaded = host.load("a", Replace::Beside, NOW, &holds).unwrap_or_else(|e| panic!("{e:?}"));
            assert!(loaded.old.is_none());
        });
        wait_for(1);
        let says = When("\"b\" waits for another load on", |_: &str| say(2));
        let loaded = host.load("b", Replace::Beside, NOW, &says).unwrap_or_else(|e| panic!("{e:?}"));
        assert!(loaded.old.is_none());
    });
    answers(&host, "a", "llama-plain");
    answers(&host, "b", "qwen3-f16");
    assert_eq!(host.devices().len(), 1);
    load(&host, "far").unwrap_or_else(|e| panic!("{e:?}"));
    let devices: Vec<String> = host.devices().into_iter().map(|device| device.info.uuid).collect();
    assert!(devices.len() == 2 && devices.contains(&second), "{devices:?}");
    answers(&host, "far", "qwen3-f16");
    let names: Vec<String> = host.models().iter().map(|model| model.name.clone()).collect();
    assert_eq!(names, ["a", "b", "far"], "in the configuration's order");
}

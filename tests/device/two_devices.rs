//! Goal: one host with two devices of different drivers serves two models at once, each on its configured device, and
//! two replicas of one model, which can be selected in every supported way. Method: lavapipe and SwiftShader; the
//! tokens must be those of transformers on both.

use crate::common::{Driver, Vulkan};
use crate::harness::models::{Generated, collect, expected, fixture, generate, idle, request, submit};
use ostinato::actors::compute::{Gates, Submission};
use ostinato::actors::timeline::FlushReason;
use ostinato::actors::watcher::Outbox;
use ostinato::config::{Config, Model, Placement};
use ostinato::device::{DeviceError, Gate};
use ostinato::engine::request::{FinishReason, Request};
use ostinato::gpu::devices::{OpenDevice, start_with};
use ostinato::gpu::error::StartError;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::host::route::RouteError;
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn serve(vulkan: &Vulkan, models: Vec<Model>) -> Host {
    let config = Config { models, ..Config::default() };
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
}

fn on(device: &str) -> Placement {
    Placement::on(Some(device.parse().expect("a selector")))
}

/// Generates through the host all tokens that are known for a checkpoint, and checks them.
fn ask(host: &Host, model: &str, device: &str, checkpoint: &str) -> Generated {
    let known = expected(checkpoint);
    let (_, replica) = host.route(model, device).unwrap_or_else(|e| panic!("{e}"));
    let generated = generate(&replica, request(&known.prompt, known.greedy.len() as u32));
    assert_eq!(generated.tokens, known.greedy, "{checkpoint} on \"{device}\"");
    assert_eq!(generated.finished.reason, FinishReason::Length);
    generated
}

#[test]
fn two_models_run_on_two_devices_at_once() {
    let vulkan = Vulkan::shared();
    let [first, second] = Driver::BOTH.map(|driver| vulkan.adapter(driver));
    let host = serve(
        &vulkan,
        vec![
            Model::new("deep", fixture("llama-deep"), Some(first.selector())),
            Model::new("seven", fixture("qwen3-gqa7"), Some(second.selector())),
        ],
    );
    let barrier = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let (host, barrier) = (&host, &barrier);
        let run = move |model: &str, checkpoint: &str, uuid: &str| {
            barrier.wait();
            for _ in 0..2 {
                let started = ask(host, model, "", checkpoint).started;
                assert_eq!(started.device_uuid, uuid, "\"{model}\" runs where it was put");
                assert_eq!(started.replica, format!("{model}/0"));
            }
        };
        let uuid = &first.uuid;
        let other = scope.spawn(move || run("deep", "llama-deep", uuid));
        run("seven", "qwen3-gqa7", &second.uuid);
        other.join().expect("no panic");
    });
    // Each model is only on its own device.
    let error = host.route("deep", &second.uuid).map(|(served, _)| served.name.clone()).expect_err("it is elsewhere");
    assert!(matches!(&error, RouteError::UnknownDevice { model, .. } if model == "deep"), "{error}");
    for name in ["deep", "seven"] {
        let load = host.route(name, "").expect("served").1.load();
        assert_eq!((load.running, load.waiting), (0, 0), "{name}");
    }
}

#[test]
fn replicas_on_two_devices_are_found_by_uuid_name_index_and_replica_name() {
    let vulkan = Vulkan::shared();
    let adapters = Driver::BOTH.map(|driver| vulkan.adapter(driver));
    // The configuration selects one device by UUID and one by name; an index does not select a CPU driver.
    let places = vec![on(&adapters[0].uuid), on(&adapters[1].name)];
    let host = serve(&vulkan, vec![Model { replicas: places, ..Model::new("m", fixture("qwen3-f16"), None) }]);
    for (place, adapter) in adapters.iter().enumerate() {
        let selectors = [
            adapter.uuid.clone(),
            adapter.uuid.to_uppercase(),
            adapter.name.clone(),
            adapter.index.to_string(),
            format!("m/{place}"),
        ];
        for selector in selectors {
            let (served, replica) = host.route("", &selector).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(
                (served.name.as_str(), replica.name.as_str()),
                ("m", format!("m/{place}").as_str()),
                "by \"{selector}\""
            );
            assert_eq!(replica.device.uuid, adapter.uuid, "by \"{selector}\"");
            assert_eq!((replica.device.index, &replica.device.name), (adapter.index, &adapter.name));
        }
    }
    // Part of a name, in different case.
    let (_, replica) = host.route("m", "SWIFTSHADER").expect("found");
    assert_eq!(replica.device.uuid, adapters[1].uuid);
    // Both run at once; `ask` compares the tokens of each.
    std::thread::scope(|scope| {
        for adapter in &adapters {
            let host = &host;
            scope.spawn(move || {
                assert_eq!(ask(host, "m", &adapter.uuid, "qwen3-f16").started.device_uuid, adapter.uuid)
            });
        }
    });
}

#[test]
fn a_wrong_selector_of_a_request_lists_the_replicas() {
    let vulkan = Vulkan::shared();
    let adapters = Driver::BOTH.map(|driver| vulkan.adapter(driver));
    let replicas = adapters.iter().map(|adapter| on(&adapter.uuid)).collect();
    let host = serve(&vulkan, vec![Model { replicas, ..Model::new("m", fixture("llama-plain"), None) }]);
    for wrong in ["9", "RTX 4090", "m/2", "00000000-0000-0000-0000-000000000000", "0000:65:00.0"] {
        let error = host.route("m", wrong).map(|(_, replica)| replica.name.clone()).expect_err(wrong);
        let RouteError::UnknownDevice { model, asked, available } = &error else { panic!("{error}") };
        assert_eq!((model.as_str(), asked.as_str()), ("m", wrong));
        for (place, adapter) in adapters.iter().enumerate() {
            for part in [&format!("m/{place}"), &adapter.name, &adapter.uuid] {
                assert!(
                    available.contains(part.as_str()) && error.to_string().contains(part.as_str()),
                    "{error} does not name {part}"
                );
            }
        }
    }
    let error = host.route("n", "").map(|(served, _)| served.name.clone()).expect_err("not served");
    assert_eq!(error, RouteError::UnknownModel { asked: "n".to_owned(), served: "m".to_owned() });
}

#[test]
fn a_wrong_selector_of_a_configuration_lists_the_adapters() {
    let vulkan = Vulkan::shared();
    let adapters = Driver::BOTH.map(|driver| vulkan.adapter(driver));
    let start = |device: Option<&str>| {
        let device = device.map(|text| text.parse().expect("a selector"));
        let config = Config { models: vec![Model::new("m", fixture("llama-plain"), device)], ..Config::default() };
        start_with(&vulkan.devices, &config, &Quiet).map(|_| ()).expect_err("no such device")
    };
    let lists = |text: &str| {
        for part in adapters.iter().flat_map(|adapter| [&adapter.name, &adapter.uuid]) {
            assert!(text.contains(part.as_str()), "{text} does not name {part}");
        }
    };
    for wrong in ["9", "RTX 4090", "00000000-0000-0000-0000-000000000000", "0000:65:00.0"] {
        let error = start(Some(wrong));
        assert!(matches!(&error, StartError::Device(DeviceError::NoMatch { .. })), "{error:?}");
        assert!(error.is_users() && error.to_string().contains(wrong), "{error}");
        lists(&error.to_string());
    }
    // The selector "cpu" matches both CPU drivers, and a CPU driver is never chosen without being selected.
    let error = start(Some("cpu"));
    assert!(matches!(&error, StartError::Device(DeviceError::Ambiguous { count: 2, .. })), "{error:?}");
    lists(&error.to_string());
    let error = start(None);
    assert!(matches!(&error, StartError::Device(DeviceError::MustChoose { count: 0, .. })), "{error:?}");
    lists(&error.to_string());
}

/// Goal: an actor that has ended is treated as a lost device: its streams continue after the rebuild, and nobody waits
/// for an answer that never comes. Method: a submission that violates the rules of the compute actor, in the middle of
/// a stream.
#[test]
fn a_compute_actor_that_panics_is_a_lost_device() {
    let vulkan = Vulkan::without_validation();
    let adapter = vulkan.adapter(Driver::first());
    let replicas = vec![on(&adapter.uuid)];
    let model = Model { replicas, slots: Some(2), ..Model::new("m", fixture("llama-plain"), None) };
    let host = serve(&vulkan, vec![model]);
    let replica = host.replicas().next().expect("one");
    let named = |id: &str| Request { id: id.to_owned(), ..request(&expected("llama-plain").prompt, 40) };
    let undisturbed = generate(&replica, named("before")).tokens;
    let streams = ["a", "b"].map(|id| submit(&replica, named(id)));
    let served = host.devices().pop().expect("a device");
    let (reports, report) = crossbeam_channel::bounded(1);
    let (wake, _woken) = crossbeam_channel::bounded(1);
    let opened: Arc<dyn Any + Send + Sync> = served.status.expect("real");
    let opened = opened.downcast::<OpenDevice>().expect("opened by `gpu`");
    let (compute, device) = (Arc::clone(opened.compute()), Arc::clone(opened.device()));
    drop(opened);
    compute.submit(Submission {
        id: 7,
        ahead: None,
        entries: vec![Vec::new(), Vec::new()],
        waits: Vec::new(),
        gates: Gates::from([(2, (Arc::new(Gate::new(&device).expect("a gate")), 1))]),
        waits_within: false,
        flush: FlushReason::Readback,
        // Reports of single entries are not allowed for a submission behind a gate.
        report_after: vec![1],
        outbox: Outbox { reports: reports.clone(), wake },
        then: None,
    });
    let report = report.recv_timeout(Duration::from_secs(60)).expect("it is owed a report");
    assert!(report.last && report.id == 7 && report.result.is_err_and(|error| error.is_lost()));
    assert!(device.is_lost());
    drop((compute, device));
    for events in &streams {
        let generated = collect(events);
        assert_eq!((generated.tokens, generated.finished.reason), (undisturbed.clone(), FinishReason::Length));
    }
    assert_eq!(generate(&replica, named("after")).tokens, undisturbed);
    assert_eq!((replica.losses(), replica.failed(), replica.rebuilding()), (1, false, false));
    drop(reports);
}

/// Goal: a lost device is rebuilt automatically. Its streams continue with the tokens that they would have had,
/// requests that arrive meanwhile wait, and another device is not affected. Method: a replica on each driver; each
/// device is lost in the middle of its streams, the first one twice. Any validation message is an error.
#[test]
fn a_device_that_is_lost_comes_back_and_its_streams_go_on() {
    // On a GPU the streams must be long enough not to end before the loss. A prompt and output that are computed again
    // in chunks are rounded differently, so only the tokens from before the loss are known exactly.
    let (tokens, known) = if Driver::first() == Driver::Gpu { (450, 5) } else { (40, 40) };
    let vulkan = Vulkan::new();
    let places = Driver::all().iter().map(|driver| on(&vulkan.adapter(*driver).uuid)).collect();
    let model = Model {
        replicas: places,
        slots: Some(2),
        prefix_cache: Some(false),
        ..Model::new("m", fixture("qwen3-deep"), None)
    };
    let host = serve(&vulkan, vec![model]);
    let replicas: Vec<_> = host.replicas().collect();
    let prompt = expected("qwen3-deep").prompt;
    let named = |id: &str| Request { id: id.to_owned(), ..request(&prompt, tokens) };
    let undisturbed = generate(&replicas[0], named("before")).tokens;
    let as_undisturbed = |drawn: &[u32]| drawn.len() == tokens as usize && drawn[..known] == undisturbed[..known];
    assert!(replicas.iter().all(|replica| as_undisturbed(&generate(replica, named("before")).tokens)));
    let handle = |uuid: &str| {
        let served = host.devices().into_iter().find(|served| served.info.uuid == uuid).expect("it is served");
        served.status.expect("an open device")
    };
    for (lost, (replica, rounds)) in replicas.iter().zip([2, 1]).enumerate() {
        let elsewhere = replicas.iter().enumerate().find(|(other, _)| *other != lost).map(|(_, replica)| replica);
        let losses = elsewhere.map(|replica| replica.losses());
        for round in 1..=rounds {
            let device = handle(&replica.device.uuid);
            let there = elsewhere.map(|replica| submit(replica, named("elsewhere")));
            // One request more than there are slots.
            let streams = ["a", "b", "c"].map(|id| submit(replica, named(id)));
            let start = Instant::now();
            while streams[0].len() < 5 * round {
                assert!(start.elapsed() < Duration::from_secs(60), "it does not begin");
                std::thread::sleep(Duration::from_millis(1));
            }
            device.declare_lost("a test");
            let start = Instant::now();
            for (id, events) in ["a", "b", "c"].iter().zip(&streams) {
                let generated = collect(events);
                let drawn = &generated.tokens;
                assert!(
                    as_undisturbed(drawn),
                    "{id} on {}, round {round}: {drawn:?}, not {undisturbed:?}",
                    replica.name
                );
                assert_eq!(generated.finished.reason, FinishReason::Length);
            }
            eprintln!("{}: all streams ended {:?} after the loss", replica.name, start.elapsed());
            assert!(there.is_none_or(|events| as_undisturbed(&collect(&events).tokens)), "elsewhere, round {round}");
            assert_eq!((replica.losses(), replica.failed(), replica.rebuilding()), (round as u64, false, false));
            assert!(
                host.devices().iter().all(|served| served.status.as_ref().is_some_and(|status| !status.is_lost())),
                "the lost one is not served any more"
            );
            idle(replica);
        }
        assert_eq!(elsewhere.map(|replica| replica.losses()), losses, "it was not lost");
        elsewhere.iter().for_each(|replica| idle(replica));
    }
}

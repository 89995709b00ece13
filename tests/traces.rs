//! Goal: one trace leads from a client's own span to the work on the device, and a profile shows the same times with
//! every kernel. Method: the embedded demo model on lavapipe behind the real service, with an OTLP receiver in the
//! process; the program itself (`ostinato profile`) requests the profile and writes the trace file. There is one test
//! of spans, because a process has one tracing subscriber.

mod common;
mod harness;
mod serving;

use common::{Driver, Vulkan};
use opentelemetry_proto::tonic::trace::v1::Span;
use ostinato::config::{Config, DEMO_PATH, Model};
use ostinato::gpu::devices::start_on;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::service::proto;
use ostinato::service::server::Options;
use ostinato::telemetry::{self, Settings};
use serving::collector::*;
use serving::*;
use std::time::{Duration, Instant};
use tonic::Request;

fn demo(vulkan: &Vulkan, driver: Driver, name: &str) -> Host {
    let mut model = Model::new(name, DEMO_PATH, Some(vulkan.adapter(driver).selector()));
    model.context = Some(128);
    model.slots = Some(2);
    let config = Config { models: vec![model], ..Config::default() };
    start_on(&vulkan.instance, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"))
}

/// Returns a greedy request that generates all its tokens.
fn long(model: &str, id: &str, tokens: u32) -> proto::GenerateRequest {
    let mut request = token_request(model, &[5, 80, 300, 7, 1200], tokens);
    request.request_id = id.to_owned();
    request.stopping.as_mut().unwrap().ignore_eos = true;
    request
}

fn child<'a>(spans: &'a [Span], parent: &Span, name: &str) -> &'a Span {
    let found = spans.iter().find(|span| span.parent_span_id == parent.span_id && span.name == name);
    found.unwrap_or_else(|| panic!("no {name} below {} in {spans:#?}", parent.name))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_leads_from_the_client_to_the_device_and_a_load_shows_where_its_time_went() {
    let (collector, endpoint) = Collector::start().await;
    let settings = Settings { otlp_endpoint: Some(endpoint), log: "off".to_owned(), ..Settings::default() };
    let guard = telemetry::init(&settings).unwrap();
    let vulkan = Vulkan::new();
    let begun = Instant::now();
    let host = tokio::task::block_in_place(|| demo(&vulkan, Driver::first(), "traced"));
    let loaded = begun.elapsed();
    let served = serve_host(host, Options::default()).await;
    let mut client = served.client().await;
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let mut request = Request::new(long("traced", "one", 24));
    let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    request.metadata_mut().insert("traceparent", parent.parse().unwrap());
    let outcome = generate(&mut client, request).await;
    assert_eq!(outcome.ids().len(), 24);
    let until = Instant::now() + Duration::from_secs(10);
    let of = |trace: &str| -> Vec<Span> {
        let spans = collector.spans.lock().unwrap();
        spans.iter().filter(|span| hex(&span.trace_id) == trace).cloned().collect()
    };
    while !of(TRACE).iter().any(|span| span.name == "ostinato.v1.Ostinato/Generate") {
        tokio::task::block_in_place(|| guard.flush());
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let trace = of(TRACE);
    let rpc = one(&trace, "ostinato.v1.Ostinato/Generate");
    assert_eq!(hex(&rpc.parent_span_id), "00f067aa0ba902b7", "the client's own span");
    assert_eq!(child(&trace, rpc, "text_completion traced").parent_span_id, rpc.span_id);
    check_steps(&trace);
    // The names of the demo model's regions, and how their times were determined.
    let regions: Vec<&Span> =
        trace.iter().filter(|span| find(&span.attributes, "ostinato.region.runs").is_some()).collect();
    for name in ["prefill.16", "head.1", "decode.1"] {
        assert!(regions.iter().any(|span| span.name == name), "{name}: {regions:#?}");
    }
    let decoded: i64 = regions
        .iter()
        .filter(|span| span.name == "decode.1")
        .map(|span| {
            let clock = text(&span.attributes, "ostinato.gpu.clock");
            assert!(clock == "calibrated" || clock == "estimated", "{clock}");
            int(&span.attributes, "ostinato.region.runs")
        })
        .sum();
    assert!(decoded >= 23, "{decoded} steps for 24 tokens");
    // Regions on one queue do not overlap.
    let mut sorted = regions.clone();
    sorted.sort_by_key(|span| span.start_time_unix_nano);
    for pair in sorted.windows(2) {
        let slack = (double(&pair[1].attributes, "ostinato.gpu.clock.error_us") * 2e3) as u64 + 2;
        assert!(pair[0].end_time_unix_nano <= pair[1].start_time_unix_nano + slack, "{pair:#?}");
    }

    let all = collector.spans.lock().unwrap().clone();
    let load = one(&all, "load traced/0");
    let whole = load.end_time_unix_nano - load.start_time_unix_nano;
    assert!(whole <= loaded.as_nanos() as u64 + 1_000_000, "{whole} ns of {loaded:?}");
    for name in ["load.pipelines", "load.weights", "load.regions"] {
        let part = child(&all, load, name);
        assert!(part.start_time_unix_nano >= load.start_time_unix_nano, "{name}");
        assert!(part.end_time_unix_nano <= load.end_time_unix_nano, "{name}");
    }
    let weights = child(&all, load, "load.weights");
    assert!(int(&weights.attributes, "ostinato.load.bytes_written") > 1_000_000);
    let copy = child(&all, weights, "load.copy");
    assert!(int(&copy.attributes, "ostinato.transfer_submits") > 0);
    let worker = child(&all, weights, "load.worker");
    assert!(double(&worker.attributes, "ostinato.load.pack_us") > 0.0);
    drop(served);
    vulkan.assert_clean();
}

/// Checks that the kernels of a region follow each other without a gap and lie within it, and that regions lie between
/// submission and completion. Returns the number of regions with kernel times.
fn check_profile(profile: &proto::ProfileResponse) -> usize {
    let mut timed = 0;
    for step in &profile.steps {
        for submission in &step.submissions {
            let slack = (submission.clock_error_us * 1e3) as u64 + 1;
            assert!(submission.enqueue_begin_ns <= submission.enqueue_end_ns);
            assert!(step.planned_ns <= submission.enqueue_begin_ns && submission.seen_ns <= step.taken_ns, "{step:?}");
            for region in &submission.regions {
                assert!(region.begin_ns + slack >= submission.enqueue_begin_ns, "{submission:?}");
                assert!(region.end_ns <= submission.seen_ns + slack, "{submission:?}");
                let Some((first, last)) = region.kernels.first().zip(region.kernels.last()) else { continue };
                timed += 1;
                assert!(region.begin_ns <= first.begin_ns && last.end_ns <= region.end_ns, "{region:?}");
                assert!(region.kernels.windows(2).all(|pair| pair[0].end_ns == pair[1].begin_ns));
                assert!(region.kernels.iter().all(|kernel| kernel.begin_ns <= kernel.end_ns));
                assert_eq!(region.runs, 1, "a timed region stands alone");
            }
        }
    }
    timed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_has_every_kernel_of_the_steps_that_it_asked_for_and_of_no_others() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let host = tokio::task::block_in_place(|| demo(&vulkan, driver, "profiled"));
        let served = serve_host(host, Options::default()).await;
        let mut client = served.client().await;
        let alone = generate(&mut client, long("profiled", "alone", 24)).await.ids();
        let plain = client.profile(proto::ProfileRequest::default()).await.unwrap().into_inner();
        assert_eq!(check_profile(&plain), 0, "nobody has asked for kernels");
        assert!(plain.transfers.iter().any(|transfer| transfer.bytes > 0), "weights were copied");
        assert!(plain.transfers.iter().all(|t| t.end_ns == 0 || t.begin_ns <= t.end_ns));

        // The program requests the next plans while a request runs.
        let file = tempfile::NamedTempFile::new().unwrap();
        let profiler = std::process::Command::new(env!("CARGO_BIN_EXE_ostinato"))
            .args(["profile", "--server", &served.address, "--steps", "4", "--kernels", "--wait", "60", "-o"])
            .arg(file.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // A step record with kernels shows that the profile request has reached the engine.
        let until = Instant::now() + Duration::from_secs(120);
        let kernels = |step: &ostinato::replica::record::StepRecord| {
            step.submissions.iter().flat_map(|s| &s.regions).any(|region| !region.kernels.is_empty())
        };
        while !served.host.replicas().next().unwrap().steps(usize::MAX).iter().any(kernels) {
            assert!(Instant::now() < until);
            assert_eq!(
                generate(&mut client, long("profiled", "profiled", 24)).await.ids(),
                alone,
                "a profile changes no token"
            );
        }
        generate(&mut client, long("profiled", "more", 60)).await;
        let output = profiler.wait_with_output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{said}");
        for word in ["decode.1 with every kernel timed", "lm_head", "gate_up", "share", "ui.perfetto.dev"] {
            assert!(said.contains(word), "no \"{word}\" in\n{said}");
        }
        // A Perfetto trace file consists of fields with number 1.
        let mut rest: &[u8] = &std::fs::read(file.path()).unwrap();
        let mut packets = 0;
        while let Some((&tag, body)) = rest.split_first() {
            assert_eq!(tag, 0x0a);
            let length = prost::decode_length_delimiter(body).unwrap();
            rest = &body[prost::length_delimiter_len(length) + length..];
            packets += 1;
        }
        assert!(packets > 200, "{packets} packets");

        let after = client.profile(proto::ProfileRequest::default()).await.unwrap().into_inner();
        let timed = check_profile(&after);
        assert!(timed >= 4, "{timed} regions");
        let count = after.steps.iter().filter(|step| check_profile(&single(step)) > 0).count();
        assert_eq!(count, 4, "as many plans as were asked for");
        // The labels are those of the recording, from the first call to the last.
        let timed = |region: &&proto::RegionRun| region.name == "decode.1" && !region.kernels.is_empty();
        let regions = || after.steps.iter().flat_map(|step| &step.submissions).flat_map(|s| &s.regions);
        let labels: Vec<&str> = regions().find(timed).unwrap().kernels.iter().map(|k| k.label.as_str()).collect();
        assert_eq!(labels.first(), Some(&"embed"));
        assert!(labels.contains(&"layers.0.qkv") && labels.contains(&"lm_head"), "{labels:?}");
        drop(served);
    }
    vulkan.assert_clean();
}

fn single(step: &proto::Step) -> proto::ProfileResponse {
    proto::ProfileResponse { steps: vec![step.clone()], ..Default::default() }
}

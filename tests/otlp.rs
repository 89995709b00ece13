//! Tests of trace export with an OTLP receiver in this process: one trace from a client's `traceparent` to the engine's
//! phases. There is one test per process, because a process has one tracing subscriber; the other tests use child
//! processes.

mod serving;

use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use ostinato::config::{Sources, from_sources};
use ostinato::service::proto;
use ostinato::service::server::Options;
use ostinato::telemetry::{self, Settings};
use serving::collector::*;
use serving::*;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Request;

const SECRET: &str = "a prompt that nobody may see";

/// Sends a chat over HTTP under a trace, and returns the whole answer.
async fn post(at: std::net::SocketAddr, trace: &str) -> String {
    let body =
        format!(r#"{{"model": "alpha", "messages": [{{"role": "user", "content": "{SECRET}"}}], "max_tokens": 2}}"#);
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {at}\r\ntraceparent: 00-{trace}-00f067aa0ba902b7-01");
    let request = format!("{head}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let mut stream = TcpStream::connect(at).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_trace_from_the_client_to_the_steps() {
    let (collector, endpoint) = Collector::start().await;
    let guard = telemetry::init(&Settings {
        otlp_endpoint: Some(endpoint),
        // Traces that begin in the server are not sampled; those that a client asks for are.
        sample_ratio: 0.0,
        log: "off".to_owned(),
        ..Settings::default()
    })
    .unwrap();
    assert!(telemetry::init(&Settings::default()).is_err());

    let step = Duration::from_millis(2);
    let mut faulty = fake(step, b"abcdefgh");
    faulty.fault_every = Some(2);
    let models = vec![
        model("alpha", Some(tokenizer(true)), vec![(0, fake(step, b"abcdefgh"))], 8),
        model("faulty", Some(tokenizer(true)), vec![(1, faulty)], 8),
    ];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let trace = |trace: &str, request| {
        let mut request = Request::new(request);
        let parent = format!("00-{trace}-00f067aa0ba902b7-01");
        request.metadata_mut().insert("traceparent", parent.parse().unwrap());
        request
    };

    // A generation that runs to its end.
    const FIRST: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let mut request = text_request("alpha", SECRET, 40);
    request.request_id = "first".to_owned();
    request.sampling = Some(proto::Sampling {
        temperature: Some(0.5),
        top_p: Some(0.75),
        top_k: Some(7),
        seed: Some(11),
        ..Default::default()
    });
    let begun = Instant::now();
    let outcome = generate(&mut client, trace(FIRST, request)).await;
    let took = begun.elapsed();
    assert_eq!(outcome.ids().len(), 40);

    // A refused request, one whose client leaves, a chat, one with two samples, and one without a trace context.
    const REFUSED: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    let request = text_request("gamma", SECRET, 40);
    assert!(generate(&mut client, trace(REFUSED, request)).await.error.is_some());
    const DROPPED: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
    let request = trace(DROPPED, text_request("alpha", SECRET, 4000));
    let mut stream = client.generate(request).await.unwrap().into_inner();
    stream.message().await.unwrap();
    drop(stream);
    const CHAT: &str = "cccccccccccccccccccccccccccccccc";
    let mut request = text_request("alpha", "", 2);
    let message = proto::ChatMessage { role: "user".into(), content: SECRET.into(), ..Default::default() };
    let chat = proto::Chat { messages: vec![message], ..Default::default() };
    request.prompt = Some(proto::generate_request::Prompt::Chat(chat));
    generate(&mut client, trace(CHAT, request)).await;
    const SAMPLES: &str = "dddddddddddddddddddddddddddddddd";
    let mut request = text_request("alpha", SECRET, 9);
    request.sampling = Some(proto::Sampling { n: Some(2), ..Default::default() });
    let stream = client.generate(trace(SAMPLES, request)).await.unwrap().into_inner();
    assert_eq!(read_samples(stream, 2).await.reasons(), [Some(proto::FinishReason::Length); 2]);
    generate(&mut client, text_request("alpha", SECRET, 2)).await;
    const HTTP: &str = "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee";
    let answer = post(served.http, HTTP).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(&format!("traceparent: 00-{HTTP}-")), "{answer}");
    served.idle("alpha/0", Duration::from_secs(5)).await;

    let until = Instant::now() + Duration::from_secs(10);
    let of = |trace: &str| -> Vec<Span> {
        let spans = collector.spans.lock().unwrap();
        spans.iter().filter(|span| hex(&span.trace_id) == trace).cloned().collect()
    };
    // `flush` blocks until the batch is sent, so it must not run on a thread that drives the receiver.
    let (first, refused, dropped, chat, samples, http) = loop {
        tokio::task::block_in_place(|| guard.flush());
        let all = (of(FIRST), of(REFUSED), of(DROPPED), of(CHAT), of(SAMPLES), of(HTTP));
        // The span of the call of each request ends last.
        let ended = |spans: &[Span]| spans.iter().any(|span| span.name.contains('/'));
        if [&all.0, &all.1, &all.2, &all.3, &all.4, &all.5].into_iter().all(|spans| ended(spans)) {
            break all;
        }
        assert!(Instant::now() < until, "{all:#?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    for resource in collector.resources.lock().unwrap().iter() {
        assert_eq!(text(resource, "service.name"), "ostinato");
        assert_eq!(text(resource, "service.version"), env!("CARGO_PKG_VERSION"));
        let instance = text(resource, "service.instance.id");
        assert!(instance.len() == 36 && instance.as_bytes()[14] == b'4', "{instance}");
    }

    // RPC → inference → queue, prefill, decode. Step and region spans were checked above and are removed.
    check_steps(&first);
    let [first, refused, dropped, chat, samples, http] =
        [first, refused, dropped, chat, samples, http].map(without_steps);
    assert_eq!(first.len(), 6, "{first:#?}");
    let rpc = one(&first, "ostinato.v1.Ostinato/Generate");
    assert_eq!(hex(&rpc.parent_span_id), "00f067aa0ba902b7");
    assert_eq!(rpc.kind(), SpanKind::Server);
    assert_eq!(text(&rpc.attributes, "rpc.system"), "grpc");
    assert_eq!(text(&rpc.attributes, "rpc.service"), "ostinato.v1.Ostinato");
    assert_eq!(text(&rpc.attributes, "rpc.method"), "Generate");
    assert_eq!(int(&rpc.attributes, "rpc.grpc.status_code"), 0);
    let inference = one(&first, "text_completion alpha");
    assert_eq!(inference.parent_span_id, rpc.span_id);
    assert_eq!(inference.kind(), SpanKind::Internal);
    let attributes = &inference.attributes;
    for (key, value) in [
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.provider.name", "ostinato"),
        ("gen_ai.request.model", "alpha"),
        ("gen_ai.response.model", "alpha"),
        ("gen_ai.response.id", "first"),
        ("ostinato.replica", "alpha/0"),
        ("ostinato.device.name", "Fake Apple"),
        ("ostinato.device.uuid", "00000000-0000-4000-8000-000000000000"),
    ] {
        assert_eq!(text(attributes, key), value);
    }
    for (key, value) in [
        ("gen_ai.request.max_tokens", 40),
        ("gen_ai.request.top_k", 7),
        ("gen_ai.request.seed", 11),
        ("gen_ai.usage.input_tokens", SECRET.len() as i64),
        ("gen_ai.usage.output_tokens", 40),
    ] {
        assert_eq!(int(attributes, key), value, "{key}");
    }
    assert_eq!(double(attributes, "gen_ai.request.temperature"), 0.5);
    assert_eq!(double(attributes, "gen_ai.request.top_p"), 0.75);
    assert_eq!(words(attributes, "gen_ai.response.finish_reasons"), ["length"]);
    assert!(double(attributes, "ostinato.per_token.submits") > 0.0);
    assert_eq!(double(attributes, "ostinato.per_token.descriptor_updates"), 0.0);
    let mut at = inference.start_time_unix_nano;
    for name in ["queue", "prefill", "decode"] {
        let phase = one(&first, name);
        assert_eq!(phase.parent_span_id, inference.span_id, "{name}");
        assert!(phase.start_time_unix_nano >= at, "{name} begins before what it follows ends");
        assert!(phase.end_time_unix_nano >= phase.start_time_unix_nano);
        at = phase.start_time_unix_nano;
    }
    // The step counters are attributes of the phases.
    let decode = one(&first, "decode");
    assert!(find(&decode.attributes, "ostinato.submits").is_some(), "{:#?}", decode.attributes);
    // The inference span lasts as long as the stream, not only until the call's headers.
    let lasted = inference.end_time_unix_nano - inference.start_time_unix_nano;
    assert!(inference.end_time_unix_nano + 50_000_000 >= decode.end_time_unix_nano);
    assert!(lasted >= (step * 39).as_nanos() as u64, "{lasted} ns");
    assert!(lasted <= took.as_nanos() as u64 + 50_000_000, "{lasted} ns, client {took:?}");

    let rpc = one(&refused, "ostinato.v1.Ostinato/Generate");
    assert_eq!(refused.len(), 1, "{refused:#?}");
    assert_eq!(text(&rpc.attributes, "error.type"), "NOT_FOUND");
    assert_eq!(int(&rpc.attributes, "rpc.grpc.status_code"), 5);
    assert_eq!(rpc.status.as_ref().unwrap().code(), StatusCode::Error);

    let inference = one(&dropped, "text_completion alpha");
    assert_eq!(text(&inference.attributes, "error.type"), "CANCELLED");
    assert_eq!(words(&inference.attributes, "gen_ai.response.finish_reasons"), ["aborted"]);

    assert_eq!(text(&one(&chat, "chat alpha").attributes, "gen_ai.operation.name"), "chat");
    let rpc = one(&chat, "ostinato.v1.Ostinato/Generate");
    for name in ["template", "tokenize"] {
        assert_eq!(one(&chat, name).parent_span_id, rpc.span_id, "{name}");
    }

    // The same over HTTP.
    let server = one(&http, "POST /v1/chat/completions");
    assert_eq!((hex(&server.parent_span_id).as_str(), server.kind()), ("00f067aa0ba902b7", SpanKind::Server));
    assert_eq!(text(&server.attributes, "http.request.method"), "POST");
    assert_eq!(text(&server.attributes, "http.route"), "/v1/chat/completions");
    assert_eq!(int(&server.attributes, "http.response.status_code"), 200);
    assert!(find(&server.attributes, "rpc.grpc.status_code").is_none());
    for name in ["template", "tokenize", "chat alpha"] {
        assert_eq!(one(&http, name).parent_span_id, server.span_id, "{name}");
    }

    // The samples of a request share one inference span; each phase has the number of its sample.
    let inference = one(&samples, "text_completion alpha");
    assert_eq!(int(&inference.attributes, "gen_ai.request.choice.count"), 2);
    assert_eq!(words(&inference.attributes, "gen_ai.response.finish_reasons"), ["length"; 2]);
    assert_eq!(int(&inference.attributes, "gen_ai.usage.output_tokens"), 18);
    assert_eq!(samples.len(), 9, "{samples:#?}");
    for phase in ["queue", "prefill", "decode"] {
        let spans = samples.iter().filter(|span| span.name == phase);
        let mut whose: Vec<i64> = spans
            .map(|span| {
                assert_eq!(span.parent_span_id, inference.span_id);
                int(&span.attributes, "ostinato.sample")
            })
            .collect();
        whose.sort_unstable();
        assert_eq!(whose, [0, 1], "{phase}");
    }
    assert!(find(&decode.attributes, "ostinato.sample").is_none(), "an only sample needs no number");

    // The answer names its trace in `traceparent`.
    const NAMED: &str = "22222222222222222222222222222222";
    let answer = client.generate(trace(NAMED, text_request("alpha", "x", 1))).await.unwrap();
    let named = answer.metadata().get("traceparent").unwrap().to_str().unwrap().to_owned();
    assert!(named.starts_with(&format!("00-{NAMED}-")) && named.ends_with("-01"), "{named}");
    read(answer.into_inner()).await;

    // Two requests in a batch: their shared steps are spans of one trace with links to both, and the phases of the
    // other request link to those steps.
    const OLDER: &str = "0123456789abcdef0123456789abcdef";
    const YOUNGER: &str = "fedcba9876543210fedcba9876543210";
    let (mut one_client, mut other_client) = (client.clone(), client.clone());
    let older = generate(&mut one_client, trace(OLDER, text_request("alpha", SECRET, 60)));
    let younger = generate(&mut other_client, trace(YOUNGER, text_request("alpha", SECRET, 60)));
    let (older, younger) = tokio::join!(older, younger);
    assert_eq!((older.ids().len(), younger.ids().len()), (60, 60));
    // A long generation produces few spans.
    const LONG: &str = "11111111111111111111111111111111";
    let long = generate(&mut client, trace(LONG, text_request("alpha", "x", 3_000))).await;
    assert_eq!(long.ids().len(), 3_000);
    served.idle("alpha/0", Duration::from_secs(5)).await;
    let ended = |trace: &str| of(trace).iter().any(|span| span.name == "ostinato.v1.Ostinato/Generate");
    let until = Instant::now() + Duration::from_secs(10);
    while ![OLDER, YOUNGER, LONG].into_iter().all(ended) {
        tokio::task::block_in_place(|| guard.flush());
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (older, younger) = (of(OLDER), of(YOUNGER));
    let both: Vec<&Span> = older.iter().chain(&younger).filter(|span| is_step(span) && span.links.len() == 2).collect();
    assert!(!both.is_empty(), "no step of two requests");
    for step in &both {
        assert_eq!(int(&step.attributes, "ostinato.requests"), 2);
        let mut linked: Vec<String> = step.links.iter().map(|link| hex(&link.trace_id)).collect();
        linked.sort();
        assert_eq!(linked, [OLDER, YOUNGER]);
        let other = if hex(&step.trace_id) == OLDER { &younger } else { &older };
        let named = other.iter().flat_map(|span| &span.links).any(|link| link.span_id == step.span_id);
        assert!(named, "the other request's trace does not name {step:#?}");
    }
    let long = of(LONG);
    let steps = long.iter().filter(|span| span.name.ends_with(" step")).count();
    assert!((20..120).contains(&steps), "{steps} steps of 3,000 tokens are shown");
    check_steps(&long);

    // Faults of steps are attributes of the request, its phase and the step, and of no other span.
    const FAULTY: &str = "33333333333333333333333333333333";
    let faulty = generate(&mut client, trace(FAULTY, text_request("faulty", "x", 40))).await;
    assert_eq!(faulty.ids().len(), 40);
    let until = Instant::now() + Duration::from_secs(10);
    while !ended(FAULTY) {
        tokio::task::block_in_place(|| guard.flush());
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    const FAULTS: &str = "ostinato.overlap_faults";
    let faulty = of(FAULTY);
    let faults = int(&one(&faulty, "text_completion faulty").attributes, FAULTS);
    assert!(faults > 1, "{faults} faults");
    assert_eq!(int(&one(&faulty, "decode").attributes, FAULTS), faults);
    let steps = faulty.iter().filter(|span| is_step(span) && find(&span.attributes, FAULTS).is_some());
    assert_eq!(steps.map(|step| int(&step.attributes, FAULTS)).sum::<i64>(), faults, "each of them is shown");
    assert!(long.iter().all(|span| find(&span.attributes, FAULTS).is_none()));

    // Only the requests with a trace context were exported, because the sampling ratio is 0.
    let spans = collector.spans.lock().unwrap().clone();
    let mut traces: Vec<String> = spans.iter().map(|span| hex(&span.trace_id)).collect();
    traces.sort();
    traces.dedup();
    let asked = [FIRST, REFUSED, DROPPED, CHAT, SAMPLES, HTTP, NAMED, OLDER, YOUNGER, LONG, FAULTY];
    let mut asked = asked.map(str::to_owned);
    asked.sort();
    assert_eq!(traces, asked);
    let everything = format!("{spans:?}");
    assert!(!everything.contains("nobody"), "a prompt is in the trace");
    assert!(!everything.contains("abcdefgh"), "an output is in the trace");
}

/// Goal: a collector that refuses connections, or accepts them without answering, affects neither generations nor the
/// end of the program. Method: a child process for each case, because a process has one tracing subscriber.
#[test]
fn a_collector_that_is_down_or_does_not_answer_costs_nothing() {
    const CHILD: &str = "OTLP_TEST_CHILD";
    if let Ok(how) = std::env::var(CHILD) {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = match how.as_str() {
            "down" => "http://127.0.0.1:1".to_owned(),
            _ => format!("http://{}", silent.local_addr().unwrap()),
        };
        let settings = Settings { otlp_endpoint: Some(endpoint), log: "off".to_owned(), ..Settings::default() };
        let guard = telemetry::init(&settings).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let fast = fake(Duration::from_micros(100), b"abc");
            let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, fast)], 8)];
            let served = serve_models(models, Options::default()).await;
            let mut client = served.client().await;
            // More spans than the export queue holds; the excess is dropped.
            for _ in 0..1_500 {
                let outcome = generate(&mut client, text_request("", "x", 6)).await;
                assert_eq!(outcome.text(), "abcabc");
            }
        });
        let begun = Instant::now();
        drop(guard);
        println!("ended in {} ms", begun.elapsed().as_millis());
        return;
    }
    for how in ["down", "silent"] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_collector_that_is_down_or_does_not_answer_costs_nothing", "--nocapture"])
            .env(CHILD, how)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{how}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
        let ended = text.split("ended in ").nth(1).and_then(|rest| rest.split(' ').next());
        let ended: u64 = ended.unwrap_or_else(|| panic!("{text}")).parse().unwrap();
        assert!(ended < 4000, "{how}: {ended} ms");
    }
}

/// Goal: the standard `OTEL_*` variables configure the export, and every process has an instance of its own. Method: a
/// child process with these variables reads its configuration as `ostinato serve` does and exports one span.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_standard_variables_configure_the_export() {
    const CHILD: &str = "OTLP_VARIABLES_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let sources = Sources { environment: true, ..Sources::default() };
        let config = from_sources(&sources).unwrap_or_else(|e| panic!("{e}"));
        // The exporter waits for its own threads when it ends.
        tokio::task::block_in_place(|| {
            let guard = telemetry::init(&config.telemetry.settings(false)).unwrap();
            drop(tracing::info_span!(target: "ostinato", "probe").entered());
            drop(guard);
        });
        return;
    }
    let (collector, endpoint) = Collector::start().await;
    let run = |variables: &[(&str, &str)]| {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "the_standard_variables_configure_the_export", "--nocapture"]).env(CHILD, "1");
        child.env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint).envs(variables.iter().copied());
        let output = tokio::task::block_in_place(|| child.output()).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let resources = std::mem::take(&mut *collector.resources.lock().unwrap());
        let metadata = std::mem::take(&mut *collector.metadata.lock().unwrap());
        let spans = std::mem::take(&mut *collector.spans.lock().unwrap());
        assert!(spans.iter().all(|span| span.name == "probe") && spans.len() <= 1, "{spans:?}");
        (resources, metadata, String::from_utf8(output.stderr).unwrap())
    };
    let (resources, metadata, _) = run(&[
        ("OTEL_SERVICE_NAME", "chat"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=a%2Cb,service.version=2,service.name=no"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20key"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "5000"),
        ("OTEL_TRACES_SAMPLER", "always_on"),
        ("OSTINATO_TELEMETRY__LOG", "off"),
    ]);
    let [resource] = &resources[..] else { panic!("one export: {resources:?}") };
    for (key, value) in [("service.name", "chat"), ("service.version", "2"), ("deployment.environment.name", "a,b")] {
        assert_eq!(text(resource, key), value);
    }
    assert_eq!(metadata[0].get("api-key").unwrap(), "a key");
    let first = text(resource, "service.instance.id");
    let (resources, _, log) = run(&[]);
    let second = text(&resources[0], "service.instance.id");
    assert_ne!(first, second, "each process has its own");
    assert!(log.contains(&second) && log.contains(&endpoint), "the log names it: {log}");
    let (resources, ..) = run(&[("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=gpu-7")]);
    assert_eq!(text(&resources[0], "service.instance.id"), "gpu-7");
    for (name, value) in [
        ("OTEL_TRACES_SAMPLER", "always_off"),
        ("OSTINATO_TELEMETRY__SAMPLE_RATIO", "0"),
        ("OTEL_SDK_DISABLED", "true"),
        ("OSTINATO_TELEMETRY__OTLP_ENDPOINT", "http://127.0.0.1:1"),
    ] {
        let (resources, ..) = run(&[(name, value), ("OSTINATO_TELEMETRY__LOG", "off")]);
        assert!(resources.is_empty(), "{name}={value}: {resources:?}");
    }
}

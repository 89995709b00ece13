//! Goal: every declared metric is exported, changes and is documented in `docs/metrics.md`; no other metric is
//! exported; and the output is valid OpenMetrics. Method: two servers, one on fake devices and one with the embedded
//! demo model on a CPU driver (or the selected GPU), run requests through all their outcomes. Their scrapes before and
//! after are read by the test's own strict parser and compared with each other, with the constants of
//! `telemetry/names.rs` and with the page. One scrape goes over HTTP.

use crate::common::{Driver, Vulkan};
use crate::serving::{
    Served, fake, generate, model, read, serve_host, serve_models, text_request, token_request, tokenizer,
};
use ostinato::config::{Config, DEMO_PATH, Model};
use ostinato::engine::plan::Drafts;
use ostinato::gpu::devices::start_on;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::service::admin::Admin;
use ostinato::service::admin::metrics::render;
use ostinato::service::proto;
use ostinato::service::server::Options;
use proto::FinishReason as Reason;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request};

/// Counters and histograms that nothing in this test changes, each with the reason. One that does change must not be
/// listed.
const UNMOVED: [(&str, &str); 1] = [(
    "ostinato_transfer_barriers_total",
    "copies of a load never touch the same bytes, and nothing else is copied there",
)];

type Labels = BTreeMap<String, String>;

/// An exported metric family.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    help: String,
    /// Values by series name and labels.
    samples: BTreeMap<(String, Labels), f64>,
}

/// Metric families by the names that queries use; counters have their suffix `_total`.
#[derive(Debug, Default)]
struct Scrape(BTreeMap<String, Family>);

/// Parses the subset of OpenMetrics 1.0 that the server may use; everything else is an error.
fn parse(text: &str) -> Result<Scrape, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("the end is missing")?;
    let mut scrape = Scrape::default();
    let mut current: Option<(String, Family)> = None;
    let mut seen = BTreeSet::new();
    let mut lines = body.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or(format!("no help: {line}"))?;
            let kind =
                lines.next().and_then(|line| line.strip_prefix("# TYPE ")?.strip_prefix(name)?.strip_prefix(' '));
            let kind = kind.ok_or(format!("no type behind: {line}"))?;
            if !["counter", "gauge", "histogram"].contains(&kind) {
                return Err(format!("{name} is a {kind}"));
            }
            let letter = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
            if !name.chars().all(letter) || name.starts_with(|c: char| c.is_ascii_digit()) {
                return Err(format!("{name} is no name"));
            }
            if !seen.insert(name.to_owned()) {
                return Err(format!("{name} comes twice"));
            }
            close(&mut scrape, current.take())?;
            let family = Family { kind: kind.to_owned(), help: help.to_owned(), ..Family::default() };
            current = Some((name.to_owned(), family));
            continue;
        }
        let (of, family) = current.as_mut().ok_or(format!("no family: {line}"))?;
        let (name, labels, value) = sample(line)?;
        let suffix = name.strip_prefix(&**of).ok_or(format!("{name} among {of}"))?;
        let fits = match &*family.kind {
            "counter" => suffix == "_total" && value >= 0.0,
            "gauge" => suffix.is_empty(),
            _ => ["_bucket", "_sum", "_count"].contains(&suffix) && value >= 0.0,
        };
        if !fits || !value.is_finite() || (suffix == "_bucket") != labels.contains_key("le") {
            return Err(format!("not a {}'s: {line}", family.kind));
        }
        if family.samples.insert((name.clone(), labels), value).is_some() {
            return Err(format!("twice: {line}"));
        }
    }
    close(&mut scrape, current)?;
    Ok(scrape)
}

/// Checks a complete family and adds it to the scrape.
fn close(scrape: &mut Scrape, family: Option<(String, Family)>) -> Result<(), String> {
    let Some((name, family)) = family else { return Ok(()) };
    if family.samples.is_empty() {
        return Err(format!("{name} has no series"));
    }
    if family.kind == "histogram" {
        buckets(&name, &family)?;
    }
    let name = if family.kind == "counter" { format!("{name}_total") } else { name };
    scrape.0.insert(name, family);
    Ok(())
}

/// Checks that the buckets of a histogram are cumulative and that the last one counts everything.
fn buckets(name: &str, family: &Family) -> Result<(), String> {
    let mut series: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    for ((of, labels), value) in &family.samples {
        let mut labels = labels.clone();
        if let Some(bound) = labels.remove("le") {
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().map_err(|_| bound.clone())? };
            series.entry(labels).or_default().push((bound, *value));
        } else if of.ends_with("_count") {
            series.entry(labels).or_default();
        }
    }
    for (labels, mut buckets) in series {
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = family.samples.get(&(format!("{name}_count"), labels.clone()));
        let cumulative = buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        if !cumulative || buckets.last().map(|(bound, all)| (*bound, all)) != count.map(|count| (f64::INFINITY, count))
        {
            return Err(format!("buckets of {name}{labels:?}: {buckets:?}, count {count:?}"));
        }
        if !family.samples.contains_key(&(format!("{name}_sum"), labels.clone())) {
            return Err(format!("no sum of {name}{labels:?}"));
        }
    }
    Ok(())
}

/// Parses a line of the form `name{label="value",…} number`.
fn sample(line: &str) -> Result<(String, Labels, f64), String> {
    let wrong = |what: &str| format!("{what}: {line}");
    let end = line.find(['{', ' ']).ok_or_else(|| wrong("no value"))?;
    let name = line[..end].to_owned();
    let mut labels = Labels::new();
    let mut rest = &line[end..];
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"").ok_or_else(|| wrong("no label"))?;
            if label.is_empty() || !label.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(wrong("no label's name"));
            }
            let mut value = String::new();
            let mut chars = after.char_indices();
            let behind = loop {
                match chars.next().ok_or_else(|| wrong("an open value"))? {
                    (at, '"') => break at + 1,
                    (_, '\\') => value.push(match chars.next() {
                        Some((_, 'n')) => '\n',
                        Some((_, c @ ('\\' | '"'))) => c,
                        _ => return Err(wrong("an unknown escape")),
                    }),
                    (_, c) => value.push(c),
                }
            };
            if labels.insert(label.to_owned(), value).is_some() {
                return Err(wrong("a label twice"));
            }
            rest = &after[behind..];
            match rest.strip_prefix(',') {
                Some(more) if !more.starts_with('}') => rest = more,
                _ => break,
            }
        }
        rest = rest.strip_prefix('}').ok_or_else(|| wrong("no end of the labels"))?;
    }
    let value = rest.strip_prefix(' ').ok_or_else(|| wrong("no blank"))?;
    Ok((name, labels, value.parse().map_err(|_| wrong("no number"))?))
}

impl Scrape {
    fn of(host: &Host) -> Scrape {
        let text = render(Some(host));
        parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"))
    }

    /// Returns the sum of a metric's series that have these labels.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let family = self.0.get(name).unwrap_or_else(|| panic!("{name} is not shown"));
        let has = |of: &Labels| labels.iter().all(|(label, value)| of.get(*label).is_some_and(|v| v == value));
        let with: Vec<f64> = family.samples.iter().filter(|((_, of), _)| has(of)).map(|(_, value)| *value).collect();
        assert!(!with.is_empty(), "{name} has no series of {labels:?}: {family:?}");
        with.iter().sum()
    }

    /// Returns the names of counters and histograms that have counted something.
    fn moved(&self) -> BTreeSet<&str> {
        let counts = |family: &Family| {
            let named = |name: &str| family.kind == "counter" || name.ends_with("_count");
            family.kind != "gauge" && family.samples.iter().any(|((name, _), value)| named(name) && *value > 0.0)
        };
        self.0.iter().filter(|(_, family)| counts(family)).map(|(name, _)| name.as_str()).collect()
    }

    /// Checks that no counter or histogram has decreased or disappeared.
    fn follows(&self, before: &Scrape) {
        for (name, family) in before.0.iter().filter(|(_, family)| family.kind != "gauge") {
            for (series, value) in &family.samples {
                let now = self.0[name].samples.get(series);
                assert!(now.is_some_and(|now| now >= value), "{series:?} was {value} and is {now:?}");
            }
        }
    }
}

/// Returns the values of the constants in `telemetry/names.rs` whose names begin with `prefix`.
fn declared(prefix: &str) -> BTreeSet<String> {
    let prefix = format!("pub const {prefix}");
    let lines = include_str!("../../src/telemetry/names.rs").lines();
    lines.filter_map(|line| Some(line.strip_prefix(&prefix)?.split('"').nth(1)?.to_owned())).collect()
}

/// Returns the rows of the page's tables: type and labels by name.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let page = include_str!("../../docs/metrics.md");
    let mut rows = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 6, "name, type, labels, unit, meaning, what moves it: {line}");
        assert!(cells.iter().all(|cell| !cell.is_empty()), "an empty cell: {line}");
        let name = cells[0].trim_matches('`').to_owned();
        let labels = cells[2].split(',').map(|label| label.trim().trim_matches('`').to_owned());
        let labels = labels.filter(|label| label != "–").collect();
        let again = rows.insert(name, (cells[1].to_owned(), labels));
        assert!(again.is_none(), "twice: {line}");
    }
    rows
}

/// Metrics that only some drivers report. A unit test of `render` covers them.
const TOLD_BY_SOME: [&str; 2] = ["ostinato_device_memory_budget_bytes", "ostinato_device_memory_used_bytes"];

/// Runs requests through all their outcomes on fake devices: one replica that drafts, finds prompts in the prefix cache
/// and runs out of pages, and one whose device is lost. Returns the scrapes before and after.
async fn over_fakes() -> (Scrape, Scrape) {
    // Long enough for the requests that are sent while others run, even on a busy machine.
    let step = Duration::from_millis(2);
    let mut drafting = fake(step, b"abcdefgh");
    drafting.capacity.pages = 24;
    drafting.capacity.context = 320;
    drafting.capacity.drafts = Drafts { most: 3, sequences: 2, always: true, history: false, catches_up: false };
    let mut failing = fake(step, b"x");
    failing.lost_after = Some(6);
    let models = vec![
        model("alpha", Some(tokenizer(true)), vec![(0, drafting)], 2),
        model("beta", Some(tokenizer(true)), vec![(1, failing)], 2),
    ];
    let served = serve_models(models, Options::default()).await;
    let before = Scrape::of(&served.host);
    let mut client = served.client().await;

    let prompt = "a beginning that is as long as three pages and a little more, to be found again";
    assert_eq!(generate(&mut client, text_request("alpha", prompt, 20)).await.reason(), Reason::Length);
    let again = generate(&mut client, text_request("alpha", prompt, 1)).await;
    assert!(again.started.unwrap().cached_tokens >= 48);
    let mut stopped = text_request("alpha", "x", 40);
    stopped.stopping.as_mut().unwrap().strings = vec!["cd".to_owned()];
    assert_eq!(generate(&mut client, stopped).await.reason(), Reason::Stop);
    // The same constraint twice: once it is compiled, once taken from the cache.
    for _ in 0..2 {
        let kind = proto::constraint::Kind::Regex("[a-h]{100}".to_owned());
        let constraint = Some(proto::Constraint { kind: Some(kind), ..Default::default() });
        let constrained = proto::GenerateRequest { constraint, ..text_request("alpha", "x", 3) };
        assert_eq!(generate(&mut client, constrained).await.reason(), Reason::Length);
    }
    let status = generate(&mut client, token_request("gamma", &[1], 4)).await.error.unwrap();
    assert_eq!(status.code(), Code::NotFound);

    // Two requests that together need more pages than there are, two that wait, and one more than the queue limit
    // allows.
    let mut streams = Vec::new();
    for (index, length) in [250, 250, 4, 4].into_iter().enumerate() {
        let mut request = text_request("alpha", &format!("{index} of several"), length);
        request.request_id = format!("several {index}");
        streams.push(client.generate(request).await.unwrap().into_inner());
    }
    let status = generate(&mut client, text_request("alpha", "x", 4)).await.error.unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted);
    client.abort(proto::AbortRequest { request_id: "several 3".to_owned() }).await.unwrap();
    let mut reasons = Vec::new();
    for stream in streams {
        reasons.push(read(stream).await.reason());
    }
    assert_eq!(reasons, [Reason::Length, Reason::Length, Reason::Length, Reason::Aborted]);

    let mut late = Request::new(text_request("alpha", "x", 300));
    late.set_timeout(Duration::from_millis(100));
    let outcome = generate(&mut client, late).await;
    assert_eq!(outcome.error.unwrap().code(), Code::DeadlineExceeded);

    let lost = generate(&mut client, text_request("beta", "x", 4000)).await;
    assert_eq!(lost.reason(), Reason::Error);
    served.idle("alpha/0", Duration::from_secs(5)).await;
    let after = Scrape::of(&served.host);

    for (reason, count) in [("length", 7.0), ("stop", 1.0), ("aborted", 1.0), ("deadline_exceeded", 1.0)] {
        let of = [("replica", "alpha/0"), ("reason", reason)];
        assert_eq!(after.sum("ostinato_requests_total", &of), count, "{reason}");
    }
    assert_eq!(after.sum("ostinato_requests_total", &[("model", "beta"), ("reason", "error")]), 1.0);
    assert_eq!(after.sum("ostinato_requests_refused_total", &[("code", "NOT_FOUND")]), 1.0);
    assert_eq!(after.sum("ostinato_requests_refused_total", &[("code", "RESOURCE_EXHAUSTED")]), 1.0);
    assert_eq!(before.sum("ostinato_requests_refused_total", &[]), 0.0, "shown from the start");
    for from in ["compiled", "kept"] {
        assert_eq!(after.sum("ostinato_constraints_total", &[("model", "alpha"), ("from", from)]), 1.0);
    }
    let duration = &after.0["gen_ai_server_request_duration_seconds"].samples;
    let failed: Vec<_> = duration.keys().filter_map(|(_, labels)| labels.get("error_type")).collect();
    assert!(
        failed.contains(&&"DEADLINE_EXCEEDED".to_owned()) && failed.contains(&&"INTERNAL".to_owned()),
        "{failed:?}"
    );
    for (replica, up) in [("alpha/0", 1.0), ("beta/0", 0.0)] {
        assert_eq!(after.sum("ostinato_replica_up", &[("replica", replica)]), up);
        assert_eq!(after.sum("ostinato_replica_closed", &[("replica", replica)]), 1.0 - up);
    }
    assert_eq!(after.sum("ostinato_device_up", &[("device", "Fake Apple")]), 1.0);
    assert_eq!(after.sum("ostinato_device_up", &[("device", "Fake Banana")]), 0.0);
    assert_eq!(before.sum("ostinato_device_up", &[]), 2.0);

    // Quantities that are counted in two ways agree.
    let alpha = [("replica", "alpha/0")];
    let (output, drawn) =
        (after.sum("ostinato_output_tokens_total", &alpha), after.sum("ostinato_tokens_total", &alpha));
    assert!(output > 500.0 && drawn >= output, "{drawn} tokens drawn, {output} handed out");
    let prompts = after.sum("ostinato_prompt_tokens_total", &alpha);
    let found = after.sum("ostinato_prefix_hit_tokens_total", &alpha);
    let computed = after.sum("ostinato_prompt_tokens_computed_total", &alpha);
    assert!(
        found >= 48.0 && computed >= prompts - found,
        "{prompts} prompt tokens, {found} found, {computed} computed"
    );
    let (drafted, accepted) =
        (after.sum("ostinato_drafted_tokens_total", &alpha), after.sum("ostinato_accepted_tokens_total", &alpha));
    assert!(accepted > 0.0 && accepted < drafted, "{accepted} of {drafted} drafts");
    let gpu = after.sum("ostinato_step_seconds_total", &[("replica", "alpha/0"), ("part", "gpu")]);
    let steps = after.sum("ostinato_steps_total", &alpha) * step.as_secs_f64();
    assert!((gpu - steps).abs() < 0.01 * steps, "{gpu} s on the device, the fake's steps are {steps} s");
    drop(served);
    (before, after)
}

/// Runs a request on the demo model and makes one of its steps fail, so that later steps have barriers.
///
/// Returns the scrapes before and after, and whether the driver reports its memory budget.
async fn with_a_model() -> (Scrape, Scrape, bool) {
    let vulkan = Vulkan::without_validation();
    let driver = Driver::first();
    let mut demo = Model::new("demo", DEMO_PATH, Some(vulkan.adapter(driver).selector()));
    demo.context = Some(128);
    demo.slots = Some(1);
    let mut config = Config { models: vec![demo], ..Config::default() };
    config.runtime.cache_directory = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned());
    // A GPU uses its own choice of kernels.
    let fragments: &[&str] = if driver == Driver::Gpu { &[] } else { &["fragments=1"] };
    config.runtime.tune =
        fragments.iter().chain(&["tags=1", "fault_at=2", "retry_ms=60000"]).map(|c| (*c).to_owned()).collect();
    let host = start_on(&vulkan.instance, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
    let served: Served = serve_host(host, Options::default()).await;
    let before = Scrape::of(&served.host);
    let mut client = served.client().await;
    let mut request = text_request("demo", "Tell me a story", 40);
    request.stopping.as_mut().unwrap().ignore_eos = true;
    assert_eq!(generate(&mut client, request).await.reason(), Reason::Length);
    served.idle("demo/0", Duration::from_secs(30)).await;
    let after = Scrape::of(&served.host);

    let fallen = |scrape: &Scrape, what| scrape.sum("ostinato_fallbacks_total", &[("what", what)]);
    assert_eq!((fallen(&before, "overlap_fault"), fallen(&after, "overlap_fault")), (0.0, 1.0));
    let faults = |scrape: &Scrape| scrape.sum("ostinato_overlap_faults_total", &[("replica", "demo/0")]);
    assert_eq!((faults(&before), faults(&after)), (0.0, 1.0));
    for (what, wanted) in [("row_layout", 0.0), ("no_overlap", 0.0), ("overlap_test", 0.0)] {
        assert_eq!(fallen(&after, what), wanted, "{what}");
    }
    if driver != Driver::Gpu {
        assert_eq!(fallen(&after, "emulated"), 1.0);
    }
    let stage = |region, stage| {
        let of = [("replica", "demo/0"), ("region", region), ("stage", stage)];
        after.sum("ostinato_kernel_variant_info", &of)
    };
    assert_eq!(stage("decode.1", "qkv"), 1.0, "one kernel computes it in every layer");
    assert!(stage("prefill.64", "attention") >= 1.0);
    assert!(
        after.0["ostinato_kernel_variant_info"].samples.keys().all(|(_, labels)| !labels["stage"].contains("layers"))
    );
    let weights = after.sum("ostinato_memory_plan_bytes", &[("purpose", "weights"), ("side", "device")]);
    assert!(weights > 4e6 && weights == served.host.devices()[0].memory[0].bytes as f64, "{weights} bytes");
    assert!(after.sum("ostinato_transfer_bytes_total", &[]) >= weights, "weights cross the transfer queue");
    let (submits, flushes) = (after.sum("ostinato_submits_total", &[]), after.sum("ostinato_flushes_total", &[]));
    assert_eq!(submits, flushes, "every submission has a reason");
    assert_eq!(after.sum("vllm:kv_cache_usage_perc", &[("model_name", "demo")]), 0.0);
    let told = served.host.devices()[0].status.as_ref().expect("a device").memory().budget.is_some();
    (before, after, told)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_name_is_shown_moves_and_is_documented() {
    let fakes = over_fakes().await;
    let (before, after, told) = with_a_model().await;
    let model = (before, after);
    let declared = declared("METRIC_");
    assert!(declared.len() > 40, "{declared:?}");
    for (before, after) in [&fakes, &model] {
        after.follows(before);
    }
    let mut shown: BTreeSet<String> = fakes.1.0.keys().chain(model.1.0.keys()).cloned().collect();
    if !told {
        shown.extend(TOLD_BY_SOME.map(str::to_owned));
    }
    assert_eq!(shown, declared, "shown, and declared in names.rs");

    let moved: BTreeSet<&str> = fakes.1.moved().union(&model.1.moved()).copied().collect();
    let counts =
        |name: &&String| [&fakes.1, &model.1].iter().any(|s| s.0.get(*name).is_some_and(|f| f.kind != "gauge"));
    let unmoved: BTreeSet<&str> = shown.iter().filter(counts).map(|n| &**n).filter(|n| !moved.contains(n)).collect();
    let excused: BTreeSet<&str> = UNMOVED.iter().map(|(name, _)| *name).collect();
    assert_eq!(unmoved, excused, "what nothing moves, and what is said of it");

    let page = documented();
    assert_eq!(page.keys().cloned().collect::<BTreeSet<_>>(), shown, "in docs/metrics.md, and shown");
    for (name, (kind, labels)) in &page {
        let families = || [&fakes.1, &model.1].into_iter().filter_map(|scrape| scrape.0.get(name));
        let mut found = BTreeSet::new();
        if families().next().is_none() {
            assert!(!told && TOLD_BY_SOME.contains(&&**name), "{name} is not shown");
            continue;
        }
        for family in families() {
            assert_eq!(&family.kind, kind, "{name}");
            assert!(family.help.len() > 5, "{name}: {:?}", family.help);
            let all = family.samples.keys().flat_map(|(_, labels)| labels.keys());
            found.extend(all.filter(|label| *label != "le").cloned());
        }
        assert_eq!(&found, labels, "labels of {name}");
    }
    let labels: BTreeSet<String> = page.values().flat_map(|(_, labels)| labels.clone()).collect();
    assert_eq!(labels, self::declared("LABEL_"), "labels in docs/metrics.md, and declared in names.rs");
}

#[test]
fn a_server_that_loads_says_so_and_nothing_else() {
    let scrape = parse(&render(None)).unwrap();
    assert_eq!(scrape.0.keys().collect::<Vec<_>>(), ["ostinato_build_info", "ostinato_ready"]);
    assert_eq!(scrape.sum("ostinato_ready", &[]), 0.0);
    assert_eq!(scrape.sum("ostinato_build_info", &[("version", env!("CARGO_PKG_VERSION"))]), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scrape_over_http_is_told_its_format_before_and_after_loading() {
    let admin = Admin::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let server = tokio::spawn(ostinato::service::admin::serve(Arc::clone(&admin), listener, stop.clone()));
    let scrape = async || {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        let kind = head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-type: ").map(str::to_owned));
        assert_eq!(kind.as_deref(), Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
        parse(body).unwrap()
    };
    assert_eq!(scrape().await.sum("ostinato_ready", &[]), 0.0);
    let models = vec![model("alpha", None, vec![(0, fake(Duration::from_millis(1), b"a"))], 8)];
    admin.set_host(Arc::new(Host::new(models)));
    let loaded = scrape().await;
    assert_eq!(loaded.sum("ostinato_ready", &[]), 1.0);
    assert_eq!(loaded.sum("ostinato_slots", &[("replica", "alpha/0")]), 2.0);
    stop.cancel();
    server.await.unwrap();
}

/// Goal: endpoint pickers, which match a metric's name at the beginning of a line, find vLLM's metric names with sums
/// over replicas.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoint_pickers_find_their_names_and_sums_over_replicas() {
    let slow = |device| (device, fake(Duration::from_millis(20), b"a"));
    let models = vec![model("alpha", Some(tokenizer(true)), vec![slow(0), slow(1)], 8)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    let mut streams = Vec::new();
    for (device, running, waiting) in [("alpha/0", 1, 0), ("alpha/0", 2, 0), ("alpha/0", 2, 1), ("alpha/1", 1, 0)] {
        let mut request = text_request("alpha", "0123456789abcdef0123456789abcdef", 4000);
        request.device = device.to_owned();
        streams.push(client.generate(request).await.unwrap());
        served.busy(device, running, waiting).await;
    }
    let text = render(Some(&served.host));
    let value = |name: &str| -> f64 {
        let start = format!("{name}{{model_name=\"alpha\"}} ");
        let found: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(&start)).collect();
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        found[0].parse().unwrap()
    };
    assert_eq!((value("vllm:num_requests_running"), value("vllm:num_requests_waiting")), (3.0, 1.0));
    let used: u32 = served.host.replicas().map(|replica| replica.load().pages_used).sum();
    let usage = value("vllm:kv_cache_usage_perc");
    // Steps continue between the two readings.
    assert!(usage > 0.0 && (usage * 1024.0 - f64::from(used)).abs() < 8.0, "{usage} and {used} pages of 1,024");
    let config = r#"vllm:cache_config_info{model_name="alpha",block_size="16",num_gpu_blocks="1024"} 1"#;
    assert!(text.lines().any(|line| line.starts_with(config)), "{text}");
    let scrape = parse(&text).unwrap();
    assert_eq!(scrape.sum("ostinato_requests_running", &[("replica", "alpha/0")]), 2.0);
    assert_eq!(scrape.sum("ostinato_requests_room", &[("replica", "alpha/0")]), 7.0);
    served.host.drain();
    let drained = Scrape::of(&served.host);
    assert_eq!(drained.sum("ostinato_replica_closed", &[]), 2.0);
    assert_eq!(drained.sum("ostinato_replica_up", &[]), 2.0, "it drains and has not failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_with_quotes_come_out_as_they_went_in() {
    let name = r#"a"b\n\c"#;
    let models = vec![model(name, Some(tokenizer(true)), vec![(0, fake(Duration::from_micros(100), b"a"))], 8)];
    let served = serve_models(models, Options::default()).await;
    let mut client = served.client().await;
    assert_eq!(generate(&mut client, text_request(name, "x", 3)).await.reason(), Reason::Length);
    let scrape = Scrape::of(&served.host);
    assert_eq!(scrape.sum("ostinato_requests_total", &[("model", name), ("reason", "length")]), 1.0);
    assert_eq!(scrape.sum("ostinato_output_tokens_total", &[("model", name)]), 3.0);
}

#[test]
fn the_parser_is_strict() {
    let text = |body: &str| format!("{body}# EOF\n");
    let head = "# HELP a_b A.\n# TYPE a_b counter\n";
    assert!(parse(&text(&format!("{head}a_b_total{{x=\"1\"}} 2\n"))).is_ok());
    for (body, why) in [
        ("a_total 1\n".to_owned(), "no family"),
        (format!("{head}a_b 1\n"), "a counter without its end"),
        (format!("{head}a_b_total_total 1\n"), "twice _total"),
        (format!("{head}a_b_total -1\n"), "below 0"),
        (format!("{head}a_b_total NaN\n"), "no number"),
        (format!("{head}a_b_total 1\na_b_total 1\n"), "a series twice"),
        (format!("{head}a_b_total{{x=\"1\",x=\"2\"}} 1\n"), "a label twice"),
        (format!("{head}a_b_total{{x=\"\"\"}} 1\n"), "no escape"),
        (format!("{head}a_b_total{{x=\"\\t\"}} 1\n"), "an unknown escape"),
        (format!("{head}a_b_total 1\n{head}a_b_total{{x=\"1\"}} 1\n"), "a family twice"),
        (head.to_owned(), "no series"),
        ("# HELP a A.\n# TYPE b gauge\nb 1\n".to_owned(), "help and type differ"),
    ] {
        assert!(parse(&text(&body)).is_err(), "{why}: {body}");
    }
    assert!(parse("").is_err(), "no end");
    let histogram = |low: u32, all: u32, count: u32| {
        text(&format!(
            "# HELP h H.\n# TYPE h histogram\nh_sum 1.0\nh_count {count}\nh_bucket{{le=\"1.0\"}} {low}\nh_bucket{{le=\"+Inf\"}} {all}\n"
        ))
    };
    assert!(parse(&histogram(1, 2, 2)).is_ok());
    assert!(parse(&histogram(3, 2, 2)).is_err(), "not cumulative");
    assert!(parse(&histogram(1, 2, 3)).is_err(), "not all");
}

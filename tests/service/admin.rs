//! Tests of the admin endpoint over plain HTTP: which requests it answers, with which headers, and that its data
//! matches the host's state.

use crate::serving::{fake, generate, model, serve_models, text_request, tokenizer};
use ostinato::engine::fake::FakeConfig;
use ostinato::host::Host;
use ostinato::host::progress::{Progress, Unit};
use ostinato::replica::rebuild::Rebuild;
use ostinato::service::admin::{self, Admin};
use ostinato::service::model_endpoints::ModelEndpoints;
use ostinato::service::server::Options;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

struct Served {
    address: SocketAddr,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn start(admin: &Arc<Admin>, address: &str) -> Served {
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let task = tokio::spawn(admin::serve(Arc::clone(admin), listener, stop.clone()));
    Served { address, stop, task }
}

struct Answer {
    status: u16,
    headers: HashMap<String, String>,
    body: String,
}

impl Answer {
    #[track_caller]
    fn json(&self) -> Value {
        assert_eq!((self.status, self.headers["content-type"].as_str()), (200, "application/json"), "{}", self.body);
        serde_json::from_str(&self.body).unwrap()
    }
}

/// Sends a request and returns the answer. `head` is the request line and the headers without the final CRLF.
async fn send(address: SocketAddr, head: &str) -> Answer {
    let mut stream = TcpStream::connect(("127.0.0.1", address.port())).await.unwrap();
    stream.write_all(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let header =
        |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned())).unwrap();
    Answer { status, headers: lines.map(header).collect(), body: body.to_owned() }
}

async fn get(address: SocketAddr, path: &str) -> Answer {
    send(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}")).await
}

#[tokio::test]
async fn only_who_means_this_machine_and_only_gets() {
    let served = start(&Admin::new(), "127.0.0.1:0").await;
    let port = served.address.port();
    for host in
        [format!("localhost:{port}"), "localhost".to_owned(), format!("127.0.0.1:{port}"), "[::1]:80".to_owned()]
    {
        let answer = send(served.address, &format!("GET / HTTP/1.1\r\nHost: {host}")).await;
        assert_eq!(answer.status, 200, "{host}");
    }
    for head in [
        "GET /api/state HTTP/1.1\r\nHost: evil.example".to_owned(),
        format!("GET /api/state HTTP/1.1\r\nHost: localhost.evil.example:{port}"),
        format!("GET http://evil.example/api/state HTTP/1.1\r\nHost: localhost:{port}"),
        format!("GET /api/state HTTP/1.1\r\nHost: localhost:{port}\r\nHost: evil.example"),
        "GET /api/state HTTP/1.0".to_owned(),
    ] {
        let answer = send(served.address, &head).await;
        assert!([400, 403].contains(&answer.status), "{head}: {}", answer.status);
        assert!(!answer.body.contains("version"), "{}", answer.body);
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        let head = format!("{method} /api/state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0");
        let answer = send(served.address, &head).await;
        assert_eq!((answer.status, answer.headers["allow"].as_str()), (405, "GET, HEAD"), "{method}");
        assert!(!answer.headers.contains_key("access-control-allow-origin"));
    }
    let head = send(served.address, "HEAD / HTTP/1.1\r\nHost: localhost").await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    served.stop.cancel();
    served.task.await.unwrap();
    assert!(TcpStream::connect(served.address).await.is_err(), "it has let go of its port");
}

#[tokio::test]
async fn an_address_for_other_machines_is_answered_under_any_name() {
    let served = start(&Admin::new(), "0.0.0.0:0").await;
    let answer = send(served.address, "GET /api/state HTTP/1.1\r\nHost: gpu-7.example:9464").await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn files_and_refusals_have_their_headers() {
    let served = start(&Admin::new(), "127.0.0.1:0").await;
    for (path, status, kind) in [
        ("/", 200, "text/html; charset=utf-8"),
        ("/page.css", 200, "text/css; charset=utf-8"),
        ("/page.js", 200, "text/javascript; charset=utf-8"),
        ("/history.js", 200, "text/javascript; charset=utf-8"),
        ("/chat.js", 200, "text/javascript; charset=utf-8"),
        ("/api/history", 200, "application/json"),
        ("/favicon.svg", 200, "image/svg+xml"),
        ("/metrics", 200, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("/api/state", 200, "application/json"),
        ("/nowhere", 404, "text/plain; charset=utf-8"),
        ("/page.js/..", 404, "text/plain; charset=utf-8"),
    ] {
        let answer = get(served.address, path).await;
        assert_eq!((answer.status, answer.headers["content-type"].as_str()), (status, kind), "{path}");
        let policy = &answer.headers["content-security-policy"];
        for word in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"] {
            assert!(policy.contains(word), "{policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        assert_eq!(answer.headers["cache-control"], "no-store");
        assert_eq!(answer.headers["cross-origin-resource-policy"], "same-origin");
        assert!(!answer.headers.contains_key("access-control-allow-origin"));
    }
    let page = get(served.address, "/").await.body;
    assert!(
        !page.contains(" style=")
            && !page.contains("onclick")
            && !page.contains("http://")
            && !page.contains("https://")
    );
    let own = ["page.js", "history.js", "chat.js"].map(|name| format!("<script src=\"/{name}\" defer></script>"));
    assert!(own.iter().all(|script| page.contains(script)), "its own");
    assert_eq!(page.matches("<script").count(), own.len(), "and nothing in the text");
}

#[tokio::test]
async fn a_start_is_told_until_there_is_a_host() {
    let admin = Admin::new();
    let served = start(&admin, "127.0.0.1:0").await;
    admin.line("memory of \"demo/0\"");
    admin.step("loading weights", 3, 10, Unit::Bytes);
    let state = get(served.address, "/api/state").await.json();
    assert_eq!(state["status"], "loading");
    assert_eq!(state["loading"]["lines"], json!(["memory of \"demo/0\""]));
    let step = &state["loading"]["step"];
    assert_eq!((&step["what"], &step["done"], &step["total"]), (&json!("loading weights"), &json!(3), &json!(10)));
    assert_eq!(step["unit"], "bytes");
    assert!(step["begun"].as_f64().unwrap() <= state["now"].as_f64().unwrap());
    assert_eq!((&state["devices"], &state["models"], &state["endpoint"]), (&json!([]), &json!([]), &Value::Null));
    let health = get(served.address, "/healthz").await;
    assert_eq!((health.status, health.body.as_str()), (503, "loading\n"));
    for path in ["/api/steps?replica=demo/0", "/api/requests", "/api/transfers?device=0"] {
        assert_eq!(get(served.address, path).await.status, 503, "{path}");
    }
    let host = Arc::new(Host::new(vec![model("demo", None, vec![(0, fake(Duration::from_millis(1), b"x"))], 4)]));
    admin.set_host(Arc::clone(&host));
    admin.set_endpoint("127.0.0.1:50051".parse().unwrap());
    let health = get(served.address, "/healthz").await;
    assert_eq!((health.status, health.body.as_str()), (200, "serving\n"));
    let state = get(served.address, "/api/state").await.json();
    assert_eq!((&state["status"], &state["endpoint"]), (&json!("serving"), &json!("127.0.0.1:50051")));
    assert_eq!(state["loading"]["step"], Value::Null);
    host.drain();
    let health = get(served.address, "/healthz").await;
    assert_eq!((health.status, health.body.as_str()), (503, "closed\n"));
    let state = get(served.address, "/api/state").await.json();
    assert_eq!(state["models"][0]["replicas"][0]["closed"], "it is draining");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_data_is_what_the_host_says() {
    let name = "tales & \"sums\" +%";
    let fast = || fake(Duration::from_millis(1), b"abc");
    let models = vec![model(name, Some(tokenizer(true)), vec![(0, fast()), (1, fast())], 8)];
    let served = serve_models(models, Options::default()).await;
    let admin = Admin::new();
    admin.set_host(Arc::clone(&served.host));
    let page = start(&admin, "127.0.0.1:0").await;
    let mut client = served.client().await;
    for request in 0..3 {
        let mut message = text_request(name, "Hello", 40);
        message.request_id = format!("<b>{request}</b>");
        message.device = "0".to_owned();
        assert!(generate(&mut client, message).await.error.is_none());
    }
    served.idle(&format!("{name}/0"), Duration::from_secs(10)).await;

    let state = get(page.address, "/api/state").await.json();
    let replica = &served.host.replicas().next().unwrap();
    let (told, load) = (&state["models"][0]["replicas"][0], replica.load());
    assert_eq!(told["name"], json!(replica.name));
    assert_eq!(told["slots"], json!(replica.slots()));
    assert_eq!(told["pages_total"], json!(load.pages_total));
    assert_eq!(told["prompt_tokens"], json!(load.prompt_tokens));
    assert!(load.prompt_tokens > 0);
    assert_eq!(told["output_tokens"], 3 * 40);
    assert_eq!(state["devices"][1]["name"], "Fake Banana");
    assert_eq!(state["devices"][1]["heap_bytes"], Value::Null, "a fake has no memory");
    assert_eq!((&state["devices"][1]["path"], &state["devices"][1]["lacks"]), (&Value::Null, &json!([])));

    let asked = "tales%20%26%20%22sums%22%20%2B%25/0";
    let all = get(page.address, &format!("/api/steps?replica={asked}")).await.json();
    let records = replica.steps_from(0);
    let steps = all["steps"].as_array().unwrap();
    assert_eq!(steps.len(), records.len());
    assert_eq!(all["next"], json!(records.len()));
    let now = all["now"].as_f64().unwrap();
    for (step, record) in steps.iter().zip(&records) {
        assert_eq!(step["number"], json!(record.number));
        assert_eq!((&step["phase"], &step["rows"]), (&json!(record.phase), &json!(record.rows)));
        assert_eq!((&step["steps"], &step["tokens"]), (&json!(record.steps), &json!(record.tokens)));
        let us = |value: &Value| value.as_f64().unwrap();
        let took = us(&step["taken"]) - us(&step["planned"]);
        let really = record.taken.since(record.planned).as_nanos() as f64 / 1e3;
        assert!((took - really).abs() < 0.01, "{took} {really}");
        assert!(us(&step["taken"]) < now);
        assert!(!record.submissions.is_empty());
        for (told, record) in step["submissions"].as_array().unwrap().iter().zip(&record.submissions) {
            assert_eq!(told["point"], json!({ "queue": "compute", "value": record.point.value }));
            assert_eq!(told["flush"], json!(record.flush.name()));
            assert_eq!(told["clock"], json!({ "quality": "estimated", "error_us": 0.0 }));
            let (region, really) = (&told["regions"][0], &record.regions[0]);
            assert_eq!(region["name"], json!(&*really.name));
            assert_eq!(region["runs"], json!(really.runs));
            let took = us(&region["end"]) - us(&region["begin"]);
            assert!((took - really.end.since(really.begin).as_nanos() as f64 / 1e3).abs() < 0.01);
        }
    }
    assert_eq!(steps.iter().map(|step| step["tokens"].as_u64().unwrap()).sum::<u64>(), 3 * 40);
    let from = records.len() - 2;
    let later = get(page.address, &format!("/api/steps?replica={asked}&from={from}")).await.json();
    assert_eq!(later["steps"], json!(steps[from..]));
    let last = get(page.address, &format!("/api/steps?replica={asked}&last=2")).await.json();
    assert_eq!(last["steps"], later["steps"]);
    let none = get(page.address, &format!("/api/steps?replica={asked}&from=99999")).await.json();
    assert_eq!((&none["steps"], &none["next"]), (&json!([]), &Value::Null));

    let requests = get(page.address, "/api/requests").await.json();
    let ended = requests["ended"].as_array().unwrap();
    assert_eq!(requests["running"], json!([]));
    let ids: Vec<&str> = ended.iter().map(|ended| ended["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["<b>0</b>", "<b>1</b>", "<b>2</b>"]);
    for ended in ended {
        assert_eq!((&ended["reason"], &ended["output_tokens"]), (&json!("length"), &json!(40)));
        assert!(ended["first_token"].as_f64().unwrap() <= ended["whole"].as_f64().unwrap());
    }
    let after = ended[1]["at"].as_f64().unwrap() + 0.01;
    let later = get(page.address, &format!("/api/requests?since={after}")).await.json();
    assert_eq!(later["ended"], json!([ended[2]]));

    // A running request, which `/api/requests` must list.
    let mut message = text_request(name, "Hello", 2000);
    message.device = "1".to_owned();
    message.request_id = "long".to_owned();
    let stream = client.generate(message).await.unwrap();
    served.busy(&format!("{name}/1"), 1, 0).await;
    let requests = get(page.address, "/api/requests").await.json();
    let running = &requests["running"][0];
    assert_eq!((&running["id"], &running["max_tokens"]), (&json!("long"), &json!(2000)));
    assert_eq!(running["replica"], json!(format!("{name}/1")));
    drop(stream);

    let transfers = get(page.address, "/api/transfers?device=1&from=5").await.json();
    assert_eq!((&transfers["next"], &transfers["transfers"]), (&json!(5), &json!([])), "a fake has no transfer queue");
    for (path, status) in [
        ("/api/steps", 400),
        ("/api/steps?replica=nobody/0", 404),
        ("/api/steps?replica=nobody/0&from=x", 400),
        ("/api/transfers?device=9", 404),
        ("/api/transfers", 400),
        ("/api/requests?since=soon", 400),
    ] {
        assert_eq!(get(page.address, path).await.status, status, "{path}");
    }
    let odd = get(page.address, "/api/requests?since=NaN").await;
    assert_eq!(odd.status, 200, "{}", odd.body);
}

/// Goal: faults of decode steps are visible to operators: requests continue as if nothing had happened, health stays
/// 200 with a warning, and the page's data and the metrics count the faults. Method: a fake device on which every
/// second decode plan has a fault.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_while_serving_are_counted_and_warned_of() {
    let sound = fake(Duration::from_millis(1), b"abc");
    let faulty = FakeConfig { fault_every: Some(2), ..sound.clone() };
    let models = vec![
        model("sound", Some(tokenizer(true)), vec![(0, sound)], 8),
        model("faulty", Some(tokenizer(true)), vec![(1, faulty)], 8),
    ];
    let served = serve_models(models, Options::default()).await;
    let admin = Admin::new();
    admin.set_host(Arc::clone(&served.host));
    let page = start(&admin, "127.0.0.1:0").await;
    let mut client = served.client().await;
    let sound = generate(&mut client, text_request("sound", "Hello", 40)).await;
    let health = get(page.address, "/healthz").await;
    assert_eq!((health.status, health.body.as_str()), (200, "serving\n"));
    assert_eq!(generate(&mut client, text_request("faulty", "Hello", 40)).await.text(), sound.text());
    served.idle("faulty/0", Duration::from_secs(10)).await;

    let of = |name: &str| served.host.replicas().find(|replica| replica.name == name).unwrap();
    let faults = of("faulty/0").faults();
    assert!(faults > 1 && of("sound/0").faults() == 0, "{faults} faults");
    let health = get(page.address, "/healthz").await;
    assert_eq!(health.status, 200, "a warning is no failure");
    let [status, warning] = health.body.lines().collect::<Vec<_>>()[..] else { panic!("{}", health.body) };
    let wanted = format!("warning: faulty/0: a kernel of a decode step timed out {faults} times, last ");
    assert!(status == "serving" && warning.starts_with(&wanted), "{}", health.body);
    let state = get(page.address, "/api/state").await.json();
    assert_eq!(state["warnings"].as_array().unwrap().len(), 1);
    let [sound, faulty] = [0, 1].map(|model| &state["models"][model]["replicas"][0]);
    assert_eq!((&sound["faults"], &sound["last_fault"]), (&json!(0), &Value::Null));
    assert_eq!(faulty["faults"], json!(faults));
    assert!(faulty["last_fault"].as_f64().unwrap() <= state["now"].as_f64().unwrap());
    let steps = get(page.address, "/api/steps?replica=faulty/0").await.json();
    let of_steps: u64 = steps["steps"].as_array().unwrap().iter().map(|step| step["faults"].as_u64().unwrap()).sum();
    assert_eq!(of_steps, faults);
    let metrics = get(page.address, "/metrics").await.body;
    let line = format!("ostinato_overlap_faults_total{{model=\"faulty\",replica=\"faulty/0\"}} {faults}.0");
    assert!(metrics.lines().any(|found| found == line), "no {line} in {metrics}");
}

/// Goal: a lost device that is being rebuilt leaves health at 200, because restarting the process would not help, but
/// health shows a warning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_built_anew_is_warned_of() {
    let rebuild = Rebuild::new(|_, cancelled| {
        while !cancelled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err("nobody wants it".into())
    });
    let lost = FakeConfig { lost_after: Some(1), ..fake(Duration::from_millis(1), b"abc") };
    let replica = crate::serving::replica("gone/0".to_owned(), 0, lost, 4, Some(rebuild));
    let served =
        serve_models(vec![crate::serving::model_of("gone", Some(tokenizer(true)), vec![replica])], Options::default())
            .await;
    let admin = Admin::new();
    admin.set_host(Arc::clone(&served.host));
    let page = start(&admin, "127.0.0.1:0").await;
    let mut client = served.client().await;
    let waiting = tokio::spawn(async move { generate(&mut client, text_request("gone", "Hello", 4)).await });
    let until = Instant::now() + Duration::from_secs(20);
    while !served.host.replicas().next().unwrap().rebuilding() {
        assert!(Instant::now() < until, "it is not lost");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let health = get(page.address, "/healthz").await;
    let wanted = "serving\nwarning: gone/0: its device was lost and is being rebuilt; requests wait\n";
    assert_eq!((health.status, health.body.as_str()), (200, wanted));
    waiting.abort();
}

async fn until_not_serving(probe: &mut HealthClient<Channel>) {
    let until = Instant::now() + Duration::from_secs(20);
    while probe.check(HealthCheckRequest::default()).await.unwrap().into_inner().status() != ServingStatus::NotServing {
        assert!(Instant::now() < until, "gRPC health is still SERVING");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Goal: a replica that has failed for good is reported with its reason: as a warning while another model serves, and
/// with status 503 and NOT_SERVING once nothing takes requests, so that the process is restarted. The endpoint of the
/// failed model alone is NOT_SERVING at once. Method: fake devices
/// that are lost with the second plan, and that nothing rebuilds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_has_failed_for_good_is_reported_with_its_reason() {
    let lost = FakeConfig { lost_after: Some(1), ..fake(Duration::from_millis(1), b"abc") };
    let on = |name: &str, device: usize| model(name, Some(tokenizer(true)), vec![(device, lost.clone())], 4);
    let endpoints = ModelEndpoints::new();
    let first = endpoints.open("first", TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap();
    let options = Options { model_endpoints: Some(endpoints), ..Options::default() };
    let served = serve_models(vec![on("first", 0), on("second", 1)], options).await;
    let admin = Admin::new();
    admin.set_host(Arc::clone(&served.host));
    let page = start(&admin, "127.0.0.1:0").await;
    let mut client = served.client().await;
    let mut probe = HealthClient::new(served.channel().await);
    let mut health = async || {
        let health = probe.check(HealthCheckRequest::default()).await.unwrap().into_inner().status();
        (get(page.address, "/healthz").await, get(served.http, "/health").await.status, health)
    };
    let (admins, openais, grpcs) = health().await;
    assert_eq!((admins.status, admins.body.as_str(), openais), (200, "serving\n", 200));
    assert_eq!(grpcs, ServingStatus::Serving);

    let why = generate(&mut client, text_request("first", "Hello", 9)).await.error.expect("its device is lost");
    let reason = "device \"fake\" is lost: it was told to";
    let warning = |model: &str| format!("warning: {model}/0: it has failed and takes no requests: {reason}\n");
    assert!(why.message().contains(reason), "{why:?}");
    let own = Endpoint::new(format!("http://{first}")).unwrap().connect().await.unwrap();
    until_not_serving(&mut HealthClient::new(own)).await;
    let (admins, openais, grpcs) = health().await;
    assert_eq!((admins.status, admins.body, openais), (200, format!("serving\n{}", warning("first")), 200));
    assert_eq!(grpcs, ServingStatus::Serving);

    assert!(generate(&mut client, text_request("second", "Hello", 9)).await.error.is_some());
    until_not_serving(&mut HealthClient::new(served.channel().await)).await;
    let (admins, openais, _) = health().await;
    let body = format!("closed\n{}{}", warning("first"), warning("second"));
    assert_eq!((admins.status, admins.body, openais), (503, body, 503));
}

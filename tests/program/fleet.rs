//! Goal: an existing router in front of our workers serves a fleet of several machines, without any component of ours
//! in between. Method: three hosts as network namespaces. Two run the embedded demo model on a CPU driver. The third
//! runs SMG, which speaks the routers' engine contract, and the `openai` client that sends the requests
//! (`tests/router/client.py` defines the requests and the expected answers). Needs root, `ip` and the packages that
//! `deploy/setup.sh test` installs; without them it fails.

use crate::python::python;
use crate::router::{COLLECTOR_PORT, Fleet, Network, Program};
use crate::serving::collector::{Collector, find, hex, text};
use opentelemetry_proto::tonic::trace::v1::Span;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Two workers and a router.
const HOSTS: u8 = 3;

/// Allows one fleet at a time, because a test machine may have only two cores.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether `span` is a descendant of the span with this id.
fn is_below(spans: &[Span], span: &Span, id: &str) -> bool {
    let mut parent = hex(&span.parent_span_id);
    for _ in 0..spans.len() {
        if parent == id {
            return true;
        }
        match spans.iter().find(|other| hex(&other.span_id) == parent) {
            Some(above) => parent = hex(&above.parent_span_id),
            None => return false,
        }
    }
    false
}

#[test]
fn chat_and_structure_through_a_router_are_what_we_serve_and_one_trace_leads_to_the_device() {
    let _alone = alone();
    let network = Network::new(HOSTS);
    let host = network.hosts[usize::from(HOSTS) - 1].clone();
    let address = host.at(COLLECTOR_PORT);
    let (send, receive) = std::sync::mpsc::channel();
    // The thread ends with the process.
    host.thread(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            send.send(Collector::start_at(&address.to_string()).await.0).expect("the test waits");
            std::future::pending::<()>().await;
        });
    });
    let collector = receive.recv().expect("a collector");
    let mut fleet = Fleet::start(network, "cache_aware", true);
    fleet.ask(&["ready", "chat", "samples", "stops", "logprobs", "tools", "cancel", "turns", "structure", "trace"]);
    let log = fleet.router_log();
    assert!(log.matches("KV event stream connected").count() >= 2, "the router does not follow the pages:\n{log}");
    assert!(!log.contains("huggingface.co/api/models/demo"), "the router looked for the served name in a registry");

    // The client's own trace and span ids, as set in tests/router/client.py.
    let (trace, client) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let of = || -> Vec<Span> {
        let spans = collector.spans.lock().unwrap();
        spans.iter().filter(|span| hex(&span.trace_id) == trace).cloned().collect()
    };
    let is_region = |span: &&Span| find(&span.attributes, "ostinato.region.runs").is_some();
    let until = Instant::now() + Duration::from_secs(20);
    let spans = loop {
        let spans = of();
        let rpc = spans.iter().any(|span| span.name == "vllm.grpc.engine.VllmEngine/Generate");
        let root = spans.iter().any(|span| hex(&span.parent_span_id) == client);
        if rpc && root {
            break spans;
        }
        assert!(Instant::now() < until, "{spans:#?}");
        std::thread::sleep(Duration::from_millis(100));
    };
    for name in ["prefill", "decode.1"] {
        let region = spans.iter().filter(is_region).find(|span| span.name.starts_with(name));
        let region = region.unwrap_or_else(|| panic!("no {name} in {spans:#?}"));
        assert!(is_below(&spans, region, client), "{region:#?} in {spans:#?}");
    }
    // The router's own span stands between the client's and ours.
    let rpc = spans.iter().find(|span| span.name == "vllm.grpc.engine.VllmEngine/Generate").expect("it was waited for");
    assert_ne!(hex(&rpc.parent_span_id), client, "{rpc:#?}");
    let resources = collector.resources.lock().unwrap().clone();
    assert!(resources.iter().any(|resource| text(resource, "service.name") == "smg"), "the router exports spans");
}

/// Goal: many requests end once each and leave no page in use; then a worker that is killed costs its own streams only, and
/// is used again when it is back.
#[test]
fn many_requests_end_once_each_and_a_killed_worker_costs_its_own_streams() {
    let _alone = alone();
    let mut fleet = Fleet::start(Network::new(HOSTS), "round_robin", false);
    fleet.ask(&["ready", "many", "kill"]);
}

/// Goal: a router finds each of several models of one server by its name. Method: one host; each model has a port of its
/// own, which the router is given.
#[test]
fn two_models_of_one_server_stand_behind_a_router() {
    let _alone = alone();
    let network = Network::new(1);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder for logs");
    let host = &network.hosts[0];
    let at = |port: u16| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    let ports = [50061, 50062];
    let model = |name: &str, port: u16| {
        let place = "replicas = [{ device = \"cpu\" }]";
        format!("[[models]]\nname = \"{name}\"\npath = \"embedded:{name}\"\n{place}\nlisten = \"{}\"\n", at(port))
    };
    let config = folder.path().join("two.toml");
    std::fs::write(&config, model("demo", ports[0]) + &model("demo-hybrid", ports[1])).expect("a configuration");
    let mut server = host.command(env!("CARGO_BIN_EXE_ostinato"));
    server.args(["serve", "--config"]).arg(&config);
    server.env("OSTINATO_RUNTIME__CACHE_DIRECTORY", folder.path().join("pipelines"));
    // Other tests of this program restrict the loader to two CPU drivers, of which "cpu" would not choose one.
    server.env_remove("VK_DRIVER_FILES").env_remove("VK_ICD_FILENAMES");
    let mut server = Program::start(server, folder.path().join("server.log"));
    server.wait("the server's start", || ports.iter().all(|port| host.answers(at(*port))));
    let mut router = host.command(python().with_file_name("smg"));
    router.args(["launch", "--host", "127.0.0.1", "--port", "30000", "--backend", "vllm", "--enable-igw"]);
    let mut router = Program::start(router, folder.path().join("router.log"));
    router.wait("the router's start", || host.answers(at(30000)));
    let mut client = host.command(python());
    client.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/router/models.py"));
    client.args(["http://127.0.0.1:30000", "http://127.0.0.1:8000"]).args(ports.map(|port| at(port).to_string()));
    let output = client.output().expect("Python runs");
    let told = [&*output.stdout, &*output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&told));
}

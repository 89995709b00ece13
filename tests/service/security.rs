//! Goal: only clients with an accepted certificate and token may connect and send requests, before and after a renewal
//! of those files; and secrets leave the server only in answers to the client that they belong to. Method: real clients
//! on loopback with fake devices and certificates made here; the program itself where its arguments, logs and traces
//! are checked.

use crate::serving::certificates::Authority;
use crate::serving::*;
use ostinato::config::{self, ConfigError};
use ostinato::service::auth::Tokens;
use ostinato::service::proto;
use ostinato::service::proto::ostinato_client::OstinatoClient;
use ostinato::service::proto::smg::grpc::common as smg;
use ostinato::service::proto::vllm::grpc::engine as contract;
use ostinato::service::proto::vllm::grpc::engine::vllm_engine_client::VllmEngineClient;
use ostinato::service::server::Options;
use ostinato::service::tls::Tls;
use prost::Message;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

/// Time limit for a renewed file to take effect. The server checks its files once a second and reads a changed one when
/// two checks agree.
const RENEWED: Duration = Duration::from_secs(20);

/// Serves one model whose device takes 5 ms per step.
async fn slow(options: Options) -> Served {
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, fake(Duration::from_millis(5), b"abc"))], 8)];
    serve_models(models, options).await
}

// ---- certificates ----

fn certificates(certificate: &Path, key: &Path, client_ca: Option<PathBuf>) -> config::TlsConfig {
    config::TlsConfig { certificate: certificate.to_owned(), key: key.to_owned(), client_ca }
}

fn encrypted(files: &config::TlsConfig) -> Options {
    Options { tls: Some(Arc::new(Tls::read(files).unwrap())), ..Options::default() }
}

/// Opens a new connection from a client that trusts an authority and may have its own certificate, and makes a call.
async fn call(address: &str, trusts: &str, own: Option<&(String, String)>) -> Result<OstinatoClient<Channel>, String> {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(trusts));
    if let Some((certificate, key)) = own {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    let endpoint = Endpoint::new(address.replace("http://", "https://")).unwrap().tls_config(tls).unwrap();
    let channel = endpoint.connect().await.map_err(|error| format!("{error:?}"))?;
    let mut client = OstinatoClient::new(channel);
    // A client whose certificate is refused learns it with the first answer.
    client.list_models(proto::ListModelsRequest {}).await.map_err(|status| format!("{status:?}"))?;
    Ok(client)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_renewed_while_streams_go_on_and_bad_ones_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(Authority::new);
    let (certificate, key) = old.issue_to(folder.path(), "server");
    let served = slow(encrypted(&certificates(&certificate, &key, None))).await;
    let mut client = call(&served.address, &old.pem(), None).await.unwrap();
    assert!(call(&served.address, &new.pem(), None).await.is_err(), "its authority is another");
    let plain = Endpoint::new(served.address.clone()).unwrap().connect().await;
    let plain = async { OstinatoClient::new(plain?).list_models(proto::ListModelsRequest {}).await.map_err(Box::from) };
    let plain: Result<_, Box<dyn std::error::Error + Send + Sync>> = plain.await;
    assert!(plain.is_err(), "it is encrypted or nothing");

    let mut stream = client.generate(text_request("alpha", "x", 4000)).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    // A file that is not a certificate, and a certificate that does not match the key.
    let (other, _) = new.issue();
    for bad in ["nothing\n", &other] {
        std::fs::write(&certificate, bad).unwrap();
        tokio::time::sleep(Duration::from_millis(2500)).await;
        call(&served.address, &old.pem(), None).await.expect("the old ones are good");
    }
    new.issue_to(folder.path(), "server");
    let until = Instant::now() + RENEWED;
    while let Err(error) = call(&served.address, &new.pem(), None).await {
        assert!(Instant::now() < until, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(call(&served.address, &old.pem(), None).await.is_err(), "the old one is not used any more");
    // The existing connection continues, and so does the stream on it.
    client.list_models(proto::ListModelsRequest {}).await.unwrap();
    assert!(stream.message().await.unwrap().is_some());
    drop(stream);
    served.idle("alpha/0", Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_need_a_certificate_where_an_authority_of_theirs_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let [servers, clients, strangers] = ["servers", "clients", "strangers"].map(Authority::new);
    let (certificate, key) = servers.issue_to(folder.path(), "server");
    let client_ca = clients.write(folder.path(), "clients.pem");
    let served = slow(encrypted(&certificates(&certificate, &key, Some(client_ca.clone())))).await;
    for (own, why) in [
        (None, "without one"),
        (Some(strangers.issue()), "of a stranger"),
        // The authority of the server's certificate is not accepted for clients.
        (Some(servers.issue()), "of the server's authority"),
    ] {
        assert!(call(&served.address, &servers.pem(), own.as_ref()).await.is_err(), "{why}");
    }
    let own = clients.issue();
    let mut client = call(&served.address, &servers.pem(), Some(&own)).await.unwrap();
    assert_eq!(generate(&mut client, text_request("alpha", "x", 3)).await.text(), "abc");
    // After a change of the clients' authority, a certificate of the old one is no longer accepted.
    strangers.write(folder.path(), "clients.pem");
    let until = Instant::now() + RENEWED;
    while call(&served.address, &servers.pem(), Some(&strangers.issue())).await.is_err() {
        assert!(Instant::now() < until, "the new authority is not known");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(call(&served.address, &servers.pem(), Some(&own)).await.is_err());
}

#[test]
fn certificates_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("a");
    let (certificate, key) = authority.issue_to(folder.path(), "server");
    let (_, other_key) = authority.issue_to(folder.path(), "other");
    let empty = folder.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let pipe = folder.path().join("pipe.pem");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::from(0o600)).unwrap();
    for files in [
        certificates(&pipe, &key, None),
        certificates(&certificate, &pipe, None),
        certificates(&certificate, &key, Some(pipe.clone())),
    ] {
        let (said, heard) = std::sync::mpsc::channel();
        std::thread::spawn(move || said.send(ostinato::telemetry::with_causes(&Tls::read(&files).unwrap_err())));
        let error = heard.recv_timeout(Duration::from_secs(20)).expect("it waits for the other end of the pipe");
        assert!(error.contains("pipe.pem") && error.contains("a named pipe, not a regular file"), "{error}");
    }
    let nowhere = folder.path().join("nowhere.pem");
    Tls::read(&certificates(&certificate, &key, Some(authority.write(folder.path(), "ca.pem")))).unwrap();
    for (files, names) in [
        (certificates(&nowhere, &key, None), &["nowhere.pem"][..]),
        (certificates(&empty, &key, None), &["a certificate", "empty.pem"]),
        (certificates(&certificate, &empty, None), &["a private key", "empty.pem"]),
        (certificates(&certificate, &other_key, None), &["server.pem", "other.key"]),
        (certificates(&certificate, &key, Some(empty.clone())), &["authorities", "empty.pem"]),
    ] {
        let error = Tls::read(&files).unwrap_err().to_string();
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
    }
}

/// Waits until the peer closes the connection, with or without an error.
async fn closed_within(mut stream: TcpStream, within: Duration) {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(within, stream.read_to_end(&mut bytes)).await;
    assert!(read.is_ok(), "it is still open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_connections_end_and_leave_their_places() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("a");
    let (certificate, key) = authority.issue_to(folder.path(), "server");
    let wait = Duration::from_millis(500);
    let plain = Options { handshake_wait: wait, connections: 8, ..Options::default() };
    let secret = Options { tls: encrypted(&certificates(&certificate, &key, None)).tls, ..plain.clone() };
    for options in [plain, secret] {
        let is_secret = options.tls.is_some();
        let served = slow(options).await;
        let address = served.address.trim_start_matches("http://").to_owned();
        let client = async || match is_secret {
            true => call(&served.address, &authority.pem(), None).await,
            false => match Endpoint::new(served.address.clone()).unwrap().connect().await {
                Ok(channel) => Ok(OstinatoClient::new(channel)),
                Err(error) => Err(error.to_string()),
            },
        };
        // An established connection stays open however long it is idle.
        let mut good = client().await.unwrap();
        let mut silent = Vec::new();
        for _ in 0..7 {
            silent.push(TcpStream::connect(&address).await.unwrap());
        }
        // One connection has begun with HTTP/2's preface or with a TLS handshake record.
        let begin: &[u8] = if is_secret { &[0x16, 3, 1, 2] } else { b"PRI * HTTP/2.0\r\n" };
        silent[0].write_all(begin).await.unwrap();
        // All places are taken: one more takes the place of the oldest that has sent nothing.
        tokio::time::sleep(Duration::from_millis(100)).await;
        silent.push(TcpStream::connect(&address).await.unwrap());
        closed_within(silent.remove(1), Duration::from_millis(300)).await;
        assert_eq!(generate(&mut good, text_request("alpha", "x", 3)).await.text(), "abc");
        for stream in silent {
            closed_within(stream, Duration::from_secs(5)).await;
        }
        let until = Instant::now() + Duration::from_secs(5);
        while let Err(error) = client().await {
            assert!(Instant::now() < until, "{error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(generate(&mut good, text_request("alpha", "x", 3)).await.text(), "abc");
    }
}

// ---- tokens ----

fn entry(name: &str, secret: &str, more: &str) -> String {
    let digest: String = Sha256::digest(secret).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("[[tokens]]\nname = \"{name}\"\nsha256 = \"{digest}\"\n{more}\n")
}

struct Guarded {
    served: Served,
    folder: tempfile::TempDir,
}

/// Serves a model with a file of tokens.
async fn guarded(entries: &[String], options: Options) -> Guarded {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.toml");
    std::fs::write(&file, entries.concat()).unwrap();
    let tokens = Some(Arc::new(Tokens::read(&file).unwrap()));
    let fakes = |step| vec![(0, fake(step, b"abc"))];
    let models = vec![model("alpha", Some(tokenizer(true)), fakes(Duration::from_millis(5)), 8)];
    let served = serve_models(models, Options { tokens, ..options }).await;
    Guarded { served, folder }
}

type Bearing = InterceptedService<Channel, Box<dyn FnMut(Request<()>) -> Result<Request<()>, Status> + Send>>;

/// Adds a bearer token to each call, unless it is empty.
fn bearing(channel: Channel, token: &str) -> Bearing {
    let value: MetadataValue<Ascii> = format!("Bearer {token}").parse().unwrap();
    let some = !token.is_empty();
    InterceptedService::new(
        channel,
        Box::new(move |mut request: Request<()>| {
            if some {
                request.metadata_mut().insert("authorization", value.clone());
            }
            Ok(request)
        }),
    )
}

impl Guarded {
    async fn ours(&self, token: &str) -> OstinatoClient<Bearing> {
        OstinatoClient::new(bearing(self.served.channel().await, token))
    }

    async fn theirs(&self, token: &str) -> VllmEngineClient<Bearing> {
        VllmEngineClient::new(bearing(self.served.channel().await, token))
    }
}

async fn text_of(client: &mut OstinatoClient<Bearing>, request: proto::GenerateRequest) -> Result<String, Status> {
    let outcome = read(client.generate(request).await?.into_inner()).await;
    outcome.error.clone().map_or_else(|| Ok(outcome.text()), Err)
}

fn routers_request(max_tokens: u32) -> contract::GenerateRequest {
    let sampling = contract::SamplingParams { max_tokens: Some(max_tokens), ..Default::default() };
    let tokens = contract::TokenizedInput { input_ids: vec![1, 2, 3], ..Default::default() };
    contract::GenerateRequest {
        input: Some(contract::generate_request::Input::Tokenized(tokens)),
        sampling_params: Some(sampling),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_need_a_token_that_is_known_and_has_the_right() {
    let guarded = guarded(
        &[
            entry("user", "u", ""),
            entry("root", "r", "may = [\"admin\"]"),
            entry("both", "b", "may = [\"generate\", \"admin\"]"),
        ],
        Options::default(),
    )
    .await;
    let code = |result: Result<(), Status>| result.err().map_or(Code::Ok, |status| status.code());
    for (token, known, generates, administers) in [
        ("", false, false, false),
        ("x", false, false, false),
        ("u", true, true, false),
        ("r", true, false, true),
        ("b", true, true, true),
    ] {
        let expected = |right: bool| match (known, right) {
            (false, _) => Code::Unauthenticated,
            (true, false) => Code::PermissionDenied,
            (true, true) => Code::Ok,
        };
        let (mut ours, mut theirs) = (guarded.ours(token).await, guarded.theirs(token).await);
        let generated = text_of(&mut ours, text_request("", "x", 3)).await;
        assert_eq!(code(generated.map(|text| assert_eq!(text, "abc"))), expected(generates), "{token:?}");
        let generated = theirs.generate(routers_request(3)).await.map(drop);
        assert_eq!(code(generated), expected(generates), "{token:?}");
        let tokenized = ours.tokenize(proto::TokenizeRequest {
            input: Some(proto::tokenize_request::Input::Text("x".to_owned())),
            ..Default::default()
        });
        assert_eq!(code(tokenized.await.map(drop)), expected(generates), "{token:?}");
        assert_eq!(code(theirs.get_tokenizer(smg::GetTokenizerRequest {}).await.map(drop)), expected(generates));
        assert_eq!(code(ours.list_models(proto::ListModelsRequest {}).await.map(drop)), expected(true));
        assert_eq!(code(theirs.health_check(contract::HealthCheckRequest {}).await.map(drop)), expected(true));
        assert_eq!(code(ours.profile(proto::ProfileRequest::default()).await.map(drop)), expected(administers));
        assert_eq!(
            code(theirs.flush_cache(smg::FlushCacheRequest { timeout_s: 5.0 }).await.map(drop)),
            expected(administers)
        );
        assert_eq!(
            code(theirs.subscribe_kv_events(smg::SubscribeKvEventsRequest::default()).await.map(drop)),
            expected(administers)
        );
        // Health checks need no token. Reflection and unknown methods do.
        let channel = guarded.served.channel().await;
        let mut health = tonic_health::pb::health_client::HealthClient::new(bearing(channel.clone(), token));
        let service = String::new();
        health.check(tonic_health::pb::HealthCheckRequest { service }).await.expect("health needs no token");
        use tonic_reflection::pb::v1::ServerReflectionRequest;
        use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
        let mut reflection = ServerReflectionClient::new(bearing(channel.clone(), token));
        let message_request = Some(MessageRequest::ListServices(String::new()));
        let asked = tokio_stream::iter([ServerReflectionRequest { host: String::new(), message_request }]);
        assert_eq!(code(reflection.server_reflection_info(asked).await.map(drop)), expected(true), "{token:?}");
        let mut other = tonic::client::Grpc::new(bearing(channel, token));
        other.ready().await.unwrap();
        let path = "/ostinato.v1.Ostinato/NoSuchMethod".parse().unwrap();
        let codec = tonic_prost::ProstCodec::<contract::HealthCheckRequest, contract::HealthCheckResponse>::default();
        let status = other.unary(Request::new(contract::HealthCheckRequest {}), path, codec).await.unwrap_err();
        let wanted = if administers { Code::Unimplemented } else { expected(false) };
        assert_eq!(status.code(), wanted, "{token:?}");
        assert!(!status.message().contains("Bearer u"), "{status:?}");
    }
    let metrics = ostinato::service::admin::metrics::render(Some(&guarded.served.host));
    let counted = |code: &str| {
        metrics.lines().any(|line| line.starts_with(&format!("ostinato_requests_refused_total{{code=\"{code}\"}}")))
    };
    assert!(counted("UNAUTHENTICATED") && counted("PERMISSION_DENIED"), "{metrics}");
    guarded.served.idle("alpha/0", Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_for_its_models_and_its_number_of_requests() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.toml");
    let entries = [
        entry("narrow", "n", "models = [\"beta\"]\nrequests = 2"),
        entry("wide", "w", ""),
        entry("lost", "l", "models = [\"gamma\"]"),
    ];
    std::fs::write(&file, entries.concat()).unwrap();
    let tokens = Some(Arc::new(Tokens::read(&file).unwrap()));
    let one = |name: &str| model(name, Some(tokenizer(true)), vec![(0, fake(Duration::from_millis(5), b"abc"))], 8);
    let options = Options { tokens, client_limit: Some(1), ..Options::default() };
    let guarded = Guarded { served: serve_models(vec![one("alpha"), one("beta")], options).await, folder };
    let (mut narrow, mut wide) = (guarded.ours("n").await, guarded.ours("w").await);
    let status = text_of(&mut narrow, text_request("alpha", "x", 3)).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::PermissionDenied, "token \"narrow\" does not allow model \"alpha\"")
    );
    assert_eq!(text_of(&mut narrow, text_request("beta", "x", 3)).await.unwrap(), "abc");
    let input = || Some(proto::tokenize_request::Input::Text("x".to_owned()));
    let tokenize = |model: &str| proto::TokenizeRequest { model: model.to_owned(), input: input() };
    assert_eq!(narrow.tokenize(tokenize("alpha")).await.unwrap_err().code(), Code::PermissionDenied);
    narrow.tokenize(tokenize("beta")).await.unwrap();
    let load = |model: &str| proto::GetLoadRequest { model: model.to_owned() };
    assert_eq!(narrow.get_load(load("alpha")).await.unwrap_err().code(), Code::PermissionDenied);
    // Lists of all models contain only those that the token may use.
    let names = |models: Vec<proto::Model>| models.into_iter().map(|model| model.name).collect::<Vec<_>>();
    let models = narrow.list_models(proto::ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!(names(models), ["beta"]);
    let replicas = narrow.get_load(load("")).await.unwrap().into_inner().replicas;
    assert_eq!(replicas.iter().map(|replica| replica.replica.as_str()).collect::<Vec<_>>(), ["beta/0"]);
    assert_eq!(wide.list_models(proto::ListModelsRequest {}).await.unwrap().into_inner().models.len(), 2);

    // The token's own limit overrides the common one, and both count by token, not by address.
    let long = || text_request("beta", "x", 4000);
    let first = narrow.generate(long()).await.unwrap();
    let second = guarded.ours("n").await.generate(long()).await.unwrap();
    let status = narrow.generate(long()).await.unwrap_err();
    let words = "client with token \"narrow\" has 2 unfinished requests and asks for 1 more; the limit is 2";
    assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, words));
    let third = wide.generate(text_request("alpha", "x", 4000)).await.unwrap();
    assert_eq!(wide.generate(text_request("alpha", "x", 1)).await.unwrap_err().code(), Code::ResourceExhausted);
    // Tokenizing counts as a request.
    assert_eq!(wide.tokenize(tokenize("alpha")).await.unwrap_err().code(), Code::ResourceExhausted);
    drop((first, second, third));
    guarded.served.idle("beta/0", Duration::from_secs(5)).await;

    // The routers' contract serves the only model.
    let guarded = self::guarded(
        &[entry("lost", "l", "models = [\"gamma\"]"), entry("its", "i", "models = [\"alpha\"]")],
        Options::default(),
    )
    .await;
    let (mut lost, mut its) = (guarded.theirs("l").await, guarded.theirs("i").await);
    assert_eq!(lost.generate(routers_request(3)).await.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(lost.get_tokenizer(smg::GetTokenizerRequest {}).await.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(lost.get_model_info(contract::GetModelInfoRequest {}).await.unwrap_err().code(), Code::PermissionDenied);
    its.generate(routers_request(3)).await.unwrap();
    its.get_model_info(contract::GetModelInfoRequest {}).await.unwrap();
}

/// Goal: a token that is limited to some models learns nothing about others, neither from answers nor from refusals,
/// which are the same whether a model is served, unloaded or unknown. Permissions are checked before limits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_for_some_models_hears_of_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.toml");
    let both = "may = [\"generate\", \"admin\"]\n";
    let entries = [
        entry("one", "o", &format!("{both}models = [\"beta\"]\nrequests = 1")),
        entry("two", "t", &format!("{both}models = [\"beta\", \"gamma\", \"missing\"]")),
        entry("lost", "l", &format!("{both}models = [\"missing\"]")),
        entry("all", "a", both),
    ];
    std::fs::write(&file, entries.concat()).unwrap();
    let tokens = Some(Arc::new(Tokens::read(&file).unwrap()));
    let one = |name: &str| model(name, Some(tokenizer(true)), vec![(0, fake(Duration::from_millis(5), b"abc"))], 8);
    let models = vec![one("alpha-secret"), one("beta"), one("gamma")];
    let options = Options { tokens, ..Options::default() };
    let guarded = Guarded { served: serve_models(models, options).await, folder };
    // This takes the only place of token "one".
    let mut client = guarded.ours("o").await;
    let running = client.generate(text_request("beta", "x", 4000)).await.unwrap();

    let mut heard = Vec::new();
    for (token, own) in [("o", &["beta"][..]), ("t", &["beta", "gamma"]), ("l", &[])] {
        let (mut ours, mut theirs) = (guarded.ours(token).await, guarded.theirs(token).await);
        let mut refused = Vec::new();
        for name in ["alpha-secret", "nothing", ""] {
            let mut codes = Vec::new();
            let mut note = |what: &str, result: Result<(), Status>| {
                let status = result.err();
                codes.push((what.to_owned(), status.as_ref().map_or(Code::Ok, |status| status.code())));
                heard.extend(status.map(|status| format!("{token} {what}: {}", status.message())));
            };
            let input = || Some(proto::tokenize_request::Input::Text("x".to_owned()));
            let named = || name.to_owned();
            note("Generate", ours.generate(text_request(name, "x", 1)).await.map(drop));
            note("Tokenize", ours.tokenize(proto::TokenizeRequest { model: named(), input: input() }).await.map(drop));
            let ids = proto::DetokenizeRequest { model: named(), token_ids: vec![1], ..Default::default() };
            note("Detokenize", ours.detokenize(ids).await.map(drop));
            note(
                "Profile",
                ours.profile(proto::ProfileRequest { model: named(), ..Default::default() }).await.map(drop),
            );
            if !name.is_empty() {
                note("GetLoad", ours.get_load(proto::GetLoadRequest { model: named() }).await.map(drop));
                let load = proto::LoadModelRequest { name: named(), ..Default::default() };
                note("LoadModel", ours.load_model(load).await.map(drop));
                let unload = proto::UnloadModelRequest { name: named(), ..Default::default() };
                note("UnloadModel", ours.unload_model(unload).await.map(drop));
            }
            if name.is_empty() {
                continue;
            }
            // Permission is checked before the limit, which token "one" has already used up.
            assert!(codes.iter().all(|(_, code)| *code == Code::PermissionDenied), "{token} {name}: {codes:?}");
            refused.push(codes);
        }
        assert_eq!(refused[0], refused[1], "what is served and what is not there are told apart");
        // A model that these tokens may name but that is not served.
        if token != "o" {
            let status = ours.generate(text_request("missing", "x", 1)).await.unwrap_err();
            assert_eq!(status.code(), Code::NotFound);
            let names = if own.is_empty() { "none".to_owned() } else { own.join(", ") };
            assert!(status.message().ends_with(&format!("served are {names}")), "{status:?}");
            heard.push(status.message().to_owned());
            let missing = proto::LoadModelRequest { name: "missing".to_owned(), ..Default::default() };
            let status = match ours.load_model(missing).await {
                Err(status) => status,
                Ok(stream) => stream.into_inner().message().await.unwrap_err(),
            };
            heard.push(status.message().to_owned());
        }
        let devices = ours.list_devices(proto::ListDevicesRequest {}).await.unwrap().into_inner().devices;
        let listed: Vec<String> = devices.into_iter().flat_map(|device| device.replicas).collect();
        let expected: Vec<String> = own.iter().map(|name| format!("{name}/0")).collect();
        assert_eq!(listed, expected);
        for status in [
            theirs.generate(routers_request(1)).await.map(drop),
            theirs.get_model_info(contract::GetModelInfoRequest {}).await.map(drop),
            theirs.get_server_info(contract::GetServerInfoRequest {}).await.map(drop),
            theirs.get_loads(contract::GetLoadsRequest::default()).await.map(drop),
            theirs.get_tokenizer(smg::GetTokenizerRequest {}).await.map(drop),
            theirs.flush_cache(smg::FlushCacheRequest { timeout_s: 0.0 }).await.map(drop),
            theirs.start_profile(smg::StartProfileRequest::default()).await.map(drop),
            theirs.subscribe_kv_events(smg::SubscribeKvEventsRequest::default()).await.map(drop),
        ] {
            heard.extend(status.err().map(|status| format!("{token}: {}", status.message())));
        }
        let health = theirs.health_check(contract::HealthCheckRequest {}).await.unwrap().into_inner();
        heard.push(format!("{token}: {}", health.message));
    }
    assert!(heard.len() > 30, "{heard:?}");
    let leaks: Vec<_> =
        heard.iter().filter(|words| words.replace("\"alpha-secret\"", "").contains("alpha-secret")).collect();
    // The name in the request is repeated in quotes, so it does not count as a leak.
    assert!(leaks.is_empty(), "{leaks:#?}");
    // A token with one model of several may omit the model's name.
    drop(running);
    guarded.served.idle("beta/0", Duration::from_secs(5)).await;
    assert_eq!(text_of(&mut client, text_request("", "x", 3)).await.unwrap(), "abc");
    // A token for all models sees all names.
    let status = guarded.ours("a").await.generate(text_request("nothing", "x", 1)).await.unwrap_err();
    assert!(status.message().contains("alpha-secret, beta, gamma"), "{status:?}");
}

/// Goal: Detokenize limits the number of ids, and counts as a request as Tokenize does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_to_be_decoded_are_bounded_and_take_a_place() {
    let guarded =
        guarded(&[entry("a", "a", "requests = 1"), entry("b", "b", "tokens_per_minute = 60")], Options::default())
            .await;
    let asked = |ids: usize| proto::DetokenizeRequest { token_ids: vec![97; ids], ..Default::default() };
    let mut client = guarded.ours("a").await;
    assert_eq!(client.detokenize(asked(4096)).await.unwrap().into_inner().text.len(), 4096);
    let status = client.detokenize(asked(4097)).await.unwrap_err();
    let words = "token_ids has 4097 ids; the maximum is 4096, the model's context";
    assert_eq!((status.code(), status.message()), (Code::InvalidArgument, words));
    let running = client.generate(text_request("", "x", 4000)).await.unwrap();
    assert_eq!(client.detokenize(asked(1)).await.unwrap_err().code(), Code::ResourceExhausted);
    drop(running);
    guarded.served.idle("alpha/0", Duration::from_secs(5)).await;
    // A token that has overdrawn its tokens per minute must wait.
    let mut client = guarded.ours("b").await;
    assert_eq!(text_of(&mut client, text_request("", &"p".repeat(30), 100)).await.unwrap().len(), 100);
    assert_eq!(client.detokenize(asked(1)).await.unwrap_err().code(), Code::ResourceExhausted);
}

/// Goal: a prompt that is too long is refused before it takes a place and before its constraint is compiled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_is_too_long_is_refused_first() {
    let guarded = guarded(&[entry("a", "a", "requests = 1")], Options::default()).await;
    let mut client = guarded.ours("a").await;
    // A constraint that cannot be compiled.
    let broken =
        || Some(proto::Constraint { kind: Some(proto::constraint::Kind::Regex("(".to_owned())), ..Default::default() });
    let long = |ids: usize| proto::GenerateRequest { constraint: broken(), ..token_request("", &vec![97; ids], 1) };
    let status = client.generate(long(4096)).await.unwrap_err();
    assert!(status.message().contains("exceed the context of 4096"), "{status:?}");
    let status = client.generate(long(4095)).await.unwrap_err();
    assert!(status.message().starts_with("constraint.regex"), "{status:?}");
    let text = proto::GenerateRequest { constraint: broken(), ..text_request("", &"x".repeat(5000), 1) };
    let status = client.generate(text).await.unwrap_err();
    assert!(status.message().contains("exceed the context of 4096"), "{status:?}");
    // The only place is taken. A prompt that is too long must still be refused for its length, not for the limit.
    let running = client.generate(text_request("", "x", 4000)).await.unwrap();
    let status = client.generate(long(4096)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    drop(running);
    guarded.served.idle("alpha/0", Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_a_minute_are_counted_and_the_next_request_is_told_when_to_come() {
    let guarded = guarded(&[entry("a", "a", "tokens_per_minute = 60"), entry("b", "b", "")], Options::default()).await;
    let mut client = guarded.ours("a").await;
    // The first request takes 20 and 30 of the 60 tokens. With ten left, the second request takes 130 more and still
    // runs to its end.
    assert_eq!(text_of(&mut client, text_request("", &"p".repeat(20), 30)).await.unwrap().len(), 30);
    assert_eq!(text_of(&mut client, text_request("", &"p".repeat(30), 100)).await.unwrap().len(), 100);
    let status = text_of(&mut client, text_request("", "p", 1)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let message = status.message();
    assert!(message.starts_with("client with token \"a\" has used its 60 tokens per minute and 1"), "{message}");
    assert!(message.contains("try again in 1"), "{message}");
    let millis: u64 = status.metadata().get("grpc-retry-pushback-ms").unwrap().to_str().unwrap().parse().unwrap();
    assert!((100_000..=121_001).contains(&millis), "{millis}");
    let status = guarded.theirs("a").await.generate(routers_request(1)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "on both contracts: {status:?}");
    // Other tokens have their own budget.
    assert_eq!(text_of(&mut guarded.ours("b").await, text_request("", "p", 3)).await.unwrap(), "abc");

    // A refused request costs nothing.
    let guarded = self::guarded(&[entry("a", "a", "tokens_per_minute = 10")], Options::default()).await;
    let mut client = guarded.ours("a").await;
    for _ in 0..5 {
        let status = text_of(&mut client, text_request("", "pppppppp", 0)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    }
    assert_eq!(text_of(&mut client, text_request("", "p", 3)).await.unwrap(), "abc");
}

/// Goal: a call that is cancelled while its prompt is read pays for the prompt: the work is done all the same. Method: a
/// text of 900,000 tokens takes much longer to read than the client waits. Its sequence never starts, and the next request
/// is told of the debt. A call that is refused for its length has not been read and pays nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_cancelled_while_its_prompt_is_read_pays_for_it() {
    const TOKENS: usize = 900_000;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.toml");
    std::fs::write(&file, entry("a", "a", "tokens_per_minute = 1000")).unwrap();
    let tokens = Some(Arc::new(Tokens::read(&file).unwrap()));
    let mut device = fake(Duration::from_millis(5), b"abc");
    (device.capacity.context, device.capacity.pages) = (1 << 20, 1 << 17);
    let models = vec![model("alpha", Some(tokenizer(true)), vec![(0, device)], 8)];
    let served = serve_models(models, Options { tokens, ..Options::default() }).await;
    let mut client = OstinatoClient::new(bearing(served.channel().await, "a"));
    let long = text_request("", &"p".repeat(TOKENS), 1);
    // The connection is there before the time is measured.
    client.list_models(proto::ListModelsRequest {}).await.unwrap();
    let cancelled = tokio::time::timeout(Duration::from_millis(20), client.generate(long)).await;
    assert!(cancelled.is_err(), "the prompt was read before the call was cancelled: {cancelled:?}");
    let until = Instant::now() + Duration::from_secs(60);
    let status = loop {
        let asked = text_of(&mut client, text_request("", "p", 1)).await;
        match asked {
            Err(status) if status.message().contains("tokens per minute") => break status,
            other => assert!(Instant::now() < until, "nothing was charged: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let message = status.message();
    let debt: u64 = message.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).max().unwrap();
    assert!((TOKENS as u64 - 2000..=TOKENS as u64).contains(&debt), "{message}");
    let load = served.host.replicas().next().unwrap().load();
    assert!(load.prompt_tokens < 1000, "it has not run: {load:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_ends_another_tokens_requests() {
    let guarded = guarded(&[entry("a", "a", ""), entry("b", "b", "")], Options::default()).await;
    let (mut a, mut b) = (guarded.ours("a").await, guarded.ours("b").await);
    let mut message = text_request("", "x", 4000);
    message.request_id = "mine".to_owned();
    let mut stream = a.generate(message.clone()).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    let abort = || proto::AbortRequest { request_id: "mine".to_owned() };
    let theirs = || contract::AbortRequest { request_ids: vec!["mine".to_owned()] };
    b.abort(abort()).await.unwrap();
    guarded.theirs("b").await.abort(theirs()).await.unwrap();
    assert_eq!(b.generate(message).await.unwrap_err().code(), Code::AlreadyExists);
    tokio::time::sleep(Duration::from_millis(100)).await;
    guarded.served.busy("alpha/0", 1, 0).await;
    guarded.theirs("a").await.abort(theirs()).await.unwrap();
    assert_eq!(read_rest(stream).await, proto::FinishReason::Aborted);
    // The id is free again, for any token.
    let mut message = text_request("", "x", 3);
    message.request_id = "mine".to_owned();
    assert_eq!(text_of(&mut b, message).await.unwrap(), "abc");
}

async fn read_rest(mut stream: tonic::Streaming<proto::GenerateResponse>) -> proto::FinishReason {
    let mut last = None;
    while let Some(message) = stream.message().await.unwrap() {
        last = message.event;
    }
    match last {
        Some(proto::generate_response::Event::Finished(finished)) => finished.reason(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_file_of_tokens_counts_for_the_next_call() {
    let guarded = guarded(&[entry("a", "a", "")], Options::default()).await;
    let file = guarded.folder.path().join("tokens.toml");
    let (mut a, mut b) = (guarded.ours("a").await, guarded.ours("b").await);
    let asked = async |client: &mut OstinatoClient<Bearing>| {
        client.list_models(proto::ListModelsRequest {}).await.map(drop).map_err(|status| status.code())
    };
    let mut stream = a.generate(text_request("", "x", 4000)).await.unwrap().into_inner();
    // An invalid file leaves the old tokens in force.
    std::fs::write(&file, "[[tokens]]\nname = \"b\"\n").unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!((asked(&mut a).await, asked(&mut b).await), (Ok(()), Err(Code::Unauthenticated)));
    std::fs::write(&file, entry("b", "b", "")).unwrap();
    let until = Instant::now() + RENEWED;
    while asked(&mut b).await.is_err() {
        assert!(Instant::now() < until, "the new token is not known");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(asked(&mut a).await, Err(Code::Unauthenticated));
    assert!(stream.message().await.unwrap().is_some(), "what runs goes on");
}

#[test]
fn a_file_of_tokens_is_read_whole_or_not_at_all_and_never_quoted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.toml");
    let read = |text: &str| {
        std::fs::write(&file, text).unwrap();
        Tokens::read(&file).map(drop)
    };
    read("").unwrap();
    read(&entry("a", "s", "requests = 1\ntokens_per_minute = 5\nmodels = [\"m\"]\nmay = [\"generate\", \"admin\"]"))
        .unwrap();
    let good = entry("a", "s", "");
    for (text, key) in [
        ("[[tokens]]\nname = \"a\"\n".to_owned(), "tokens[0].sha256"),
        (entry("", "s", ""), "tokens[0].name"),
        (entry("a b", "s", ""), "tokens[0].name"),
        (good.clone() + &entry("a", "t", ""), "tokens[1].name must differ from tokens[0].name"),
        (good.clone() + &entry("b", "s", ""), "tokens[1].sha256 must differ from tokens[0].sha256"),
        (entry("a", "s", "token = \"SECRET\""), "tokens[0].token is not a key"),
        (format!("secret = \"SECRET\"\n{good}"), "secret is not a key"),
        ("[[tokens]]\nname = \"a\"\nsha256 = \"SECRET\"".to_owned(), "tokens[0].sha256"),
        (format!("[[tokens]]\nname = \"a\"\nsha256 = \"{}\"", "SECRETx+".repeat(8)), "64 hexadecimal digits"),
        (entry("a", "s", "may = [\"SECRET\"]"), "tokens[0].may"),
        (entry("a", "s", "may = []"), "tokens[0].may"),
        (entry("a", "s", "models = []"), "tokens[0].models"),
        (entry("a", "s", "requests = 0"), "tokens[0].requests"),
        (entry("a", "s", "tokens_per_minute = -1"), "tokens[0].tokens_per_minute"),
        ("[[tokens]]\nname = \"a\"\nsha256 = SECRET".to_owned(), "line 3"),
    ] {
        let error = read(&text).unwrap_err();
        let mut words = error.to_string();
        if let ConfigError::Syntax { source, .. } = &error {
            words += &source.to_string();
        }
        assert!(words.contains(key) && words.contains("tokens.toml"), "{text}: {words}");
        assert!(!words.contains("SECRET") && !format!("{error:?}").contains("SECRET"), "{words}");
    }
}

// ---- what no request reaches ----

/// A codec that passes messages through as raw bytes.
#[derive(Clone, Default)]
struct Bytes;

impl tonic::codec::Codec for Bytes {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Bytes;
    type Decoder = Bytes;

    fn encoder(&mut self) -> Bytes {
        Bytes
    }

    fn decoder(&mut self) -> Bytes {
        Bytes
    }
}

impl tonic::codec::Encoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, into: &mut tonic::codec::EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(into, &item);
        Ok(())
    }
}

impl tonic::codec::Decoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut tonic::codec::DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut item = vec![0; bytes::Buf::remaining(from)];
        bytes::Buf::copy_to_slice(from, &mut item);
        Ok(Some(item))
    }
}

fn varint(mut number: u64, into: &mut Vec<u8>) {
    while number >= 0x80 {
        into.push(number as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

/// Returns a field of type bytes in protobuf's wire format.
fn field(number: i32, bytes: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::new();
    varint((number as u64) << 3 | 2, &mut encoded);
    varint(bytes.len() as u64, &mut encoded);
    encoded.extend(bytes);
    encoded
}

/// Returns messages of a type, each with `text` in one of its string or bytes fields, including those of nested
/// messages up to `depth` levels.
fn leaves(messages: &HashMap<String, DescriptorProto>, name: &str, text: &str, depth: usize) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for of in &messages[name].field {
        match of.r#type() {
            Type::String | Type::Bytes => all.push(field(of.number(), text.as_bytes())),
            Type::Message if depth > 0 => {
                let below = leaves(messages, of.type_name(), text, depth - 1);
                all.extend(below.into_iter().map(|bytes| field(of.number(), &bytes)));
            }
            _ => {}
        }
    }
    all
}

fn nested(prefix: &str, message: &DescriptorProto, into: &mut HashMap<String, DescriptorProto>) {
    let name = format!("{prefix}.{}", message.name());
    message.nested_type.iter().for_each(|below| nested(&name, below, into));
    into.insert(name, message.clone());
}

/// Goal: no field of a request names a file that the server opens or creates. Method: in every string or bytes field of
/// every request of both contracts, one after the other, the path of a named pipe, which blocks a reader that opens it,
/// and the path of a file that does not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_field_of_a_request_reaches_the_file_system() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let made = folder.path().join("made");
    let served = slow(Options::default()).await;
    let set = FileDescriptorSet::decode(proto::descriptors()).unwrap();
    let mut messages = HashMap::new();
    for file in &set.file {
        file.message_type.iter().for_each(|message| nested(&format!(".{}", file.package()), message, &mut messages));
    }
    // A valid request, because an incomplete one would be refused earlier. The message with the path is appended, and
    // protobuf merges the two.
    let whole: HashMap<&str, Vec<u8>> = HashMap::from([
        ("/ostinato.v1.Ostinato/Generate", text_request("alpha", "x", 1).encode_to_vec()),
        ("/vllm.grpc.engine.VllmEngine/Generate", routers_request(1).encode_to_vec()),
    ]);
    let channel = served.channel().await;
    let mut calls = 0;
    for file in &set.file {
        for service in &file.service {
            for method in &service.method {
                let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                for name in [pipe.to_str().unwrap(), made.to_str().unwrap()] {
                    for leaf in leaves(&messages, method.input_type(), name, 3) {
                        for begin in [Some(Vec::new()), whole.get(&*path).cloned()].into_iter().flatten() {
                            let mut client = tonic::client::Grpc::new(channel.clone());
                            client.ready().await.unwrap();
                            let mut request = Request::new([begin, leaf.clone()].concat());
                            request.set_timeout(Duration::from_secs(2));
                            let answers = client.server_streaming(request, path.parse().unwrap(), Bytes).await;
                            if let Ok(answers) = answers {
                                let mut answers = answers.into_inner();
                                // The first answer shows whether the call was served. Subscriptions never end.
                                let _ = tokio::time::timeout(Duration::from_secs(2), answers.message()).await;
                            }
                            calls += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(calls > 100, "{calls}");
    // Opening a pipe for writing without blocking fails if it is not open for reading.
    use std::os::unix::fs::OpenOptionsExt;
    const NONBLOCK: i32 = 0o4000;
    let opened = std::fs::OpenOptions::new().write(true).custom_flags(NONBLOCK).open(&pipe);
    assert!(opened.is_err(), "somebody reads from {pipe:?}");
    assert!(!made.exists());
    served.idle("alpha/0", Duration::from_secs(5)).await;

    let mut client = served.client().await;
    for name in ["../x", "/etc/passwd", "alpha/../alpha", "./alpha"] {
        let status = generate(&mut client, text_request(name, "x", 1)).await.error.unwrap();
        assert_eq!(status.code(), Code::NotFound, "{name}: {status:?}");
    }
}

// ---- the program ----

fn ostinato(arguments: &[&str]) -> Command {
    // The program inherits the environment variables that select the drivers.
    crate::common::layer();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ostinato"));
    command.args(arguments).stdin(Stdio::null()).env_remove("OSTINATO_TOKEN");
    command
}

#[test]
fn a_drawn_token_is_told_once_and_known_by_its_entry() {
    let folder = tempfile::tempdir().unwrap();
    let output = ostinato(&["token", "alice"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).unwrap();
    let (secret, rest) = text.split_once("\n\n").unwrap();
    assert_eq!((secret.len(), &secret[..4]), (68, "ost_"));
    assert_eq!(rest, entry("alice", secret, "").trim_end().to_owned() + "\n");

    let file = folder.path().join("alice.token");
    let arguments = ["--may", "generate,admin", "--models", "m,n", "--requests", "3", "--tokens-per-minute", "1000"];
    let again = || ostinato(&["token", "alice", "--secret"]).arg(&file).args(arguments).output().unwrap();
    let output = again();
    assert!(output.status.success());
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let other = std::fs::read_to_string(&file).unwrap().trim().to_owned();
    assert_ne!(other, secret);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains(&other));
    let tokens = folder.path().join("tokens.toml");
    std::fs::write(&tokens, &text).unwrap();
    let read = config::tokens(&tokens).unwrap();
    let may = Some(vec![config::Right::Generate, config::Right::Admin]);
    let models = Some(vec!["m".to_owned(), "n".to_owned()]);
    let sha256 = Some(Sha256::digest(&other).into());
    let name = "alice".to_owned();
    let expected = config::AccessToken { name, sha256, requests: Some(3), tokens_per_minute: Some(1000), models, may };
    assert_eq!(read, [expected]);
    // An existing file is not overwritten, and an invalid name is refused.
    assert_eq!(again().status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), other);
    assert_eq!(ostinato(&["token", "a b"]).output().unwrap().status.code(), Some(2));
}

/// Returns the UUID of lavapipe as `ostinato devices --json` reports it.
fn lavapipe() -> String {
    let output = ostinato(&["devices", "--json"]).output().unwrap();
    let devices: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let named = |device: &&serde_json::Value| device["name"].as_str().is_some_and(|name| name.contains("llvmpipe"));
    devices.as_array().unwrap().iter().find(named).unwrap()["uuid"].as_str().unwrap().to_owned()
}

/// Sends a GET to the admin endpoint and returns the head and body of the answer.
async fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{path}: {text}");
    text
}

/// Goal: prompts, outputs and tokens appear in no log, trace or page. Method: the program with certificates and tokens,
/// called with its own client; then everything that it reports to anyone but the client is searched.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn prompts_outputs_and_tokens_are_in_no_log_no_trace_and_no_page() {
    const PROMPT: &str = "Tell me about Zanzibarquux the fox.";
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (collector, endpoint) = collector::Collector::start().await;
    let [servers, clients] = ["servers", "clients"].map(Authority::new);
    servers.issue_to(folder.path(), "server");
    clients.issue_to(folder.path(), "client");
    servers.write(folder.path(), "servers.pem");
    clients.write(folder.path(), "clients.pem");
    let secret = at("a.token");
    let drawn = ostinato(&["token", "a", "--secret"]).arg(&secret).output().unwrap();
    std::fs::write(at("tokens.toml"), drawn.stdout).unwrap();
    let token = std::fs::read_to_string(&secret).unwrap().trim().to_owned();
    std::fs::write(
        at("ostinato.toml"),
        format!(
            "[server]\nlisten = \"127.0.0.1:0\"\ntokens = \"tokens.toml\"\n\
             tls = {{ certificate = \"server.pem\", key = \"server.key\", client_ca = \"clients.pem\" }}\n\
             [http]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[telemetry]\nlog = \"debug\"\notlp_endpoint = \"{endpoint}\"\n\
             [[models]]\nname = \"demo\"\npath = \"embedded:demo\"\nreplicas = [{{ device = \"{}\" }}]\n",
            lavapipe()
        ),
    )
    .unwrap();
    let log = std::fs::File::create(at("log")).unwrap();
    let mut server = ostinato(&["serve", "--config"]);
    let mut server = server.arg(at("ostinato.toml")).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(server.stdout.take().unwrap()));
    let mut line = |begin: &str| {
        let told = || std::fs::read_to_string(at("log")).unwrap();
        let line = lines.next().unwrap_or_else(|| panic!("it has ended: {}", told())).unwrap();
        line.strip_prefix(begin).unwrap_or_else(|| panic!("{line}")).trim_end_matches('/').to_owned()
    };
    let (address, page) = tokio::task::block_in_place(|| (line("listening on "), line("admin on http://")));

    let ask = |arguments: &[&str], with: &[(&str, &str)], variable: Option<&str>| {
        let mut command = ostinato(&["generate", "--server", &address, "--json", "--max-tokens", "40"]);
        command.args(arguments);
        for (option, file) in with {
            command.arg(option).arg(at(file));
        }
        if let Some(token) = variable {
            command.env("OSTINATO_TOKEN", token);
        }
        tokio::task::block_in_place(|| command.output().unwrap())
    };
    let certified = [("--tls-ca", "servers.pem"), ("--tls-cert", "client.pem"), ("--tls-key", "client.key")];
    let all = [&certified[..], &[("--token-file", "a.token")]].concat();
    let mut secrets = vec![PROMPT.to_owned(), "Zanzibarquux".to_owned(), token.clone(), token[4..].to_owned()];
    for (arguments, with, variable) in
        [(["--chat", PROMPT], &all[..], None), (["--prompt", PROMPT], &certified[..], Some(&*token))]
    {
        let output = ask(&arguments, with, variable);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text: String = String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .filter_map(|event| Some(event["text"].as_str()?.to_owned()))
            .collect();
        assert!(text.len() > 20, "{text:?}");
        // Every sequence of three words of the output counts as a secret.
        let words: Vec<&str> = text.split_whitespace().collect();
        secrets.extend(words.windows(3).map(|words| words.join(" ")));
    }
    // A client that lacks one of token, client certificate and the server's authority is not served.
    let output = ask(&["--chat", PROMPT], &certified, None);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && errors.contains("UNAUTHENTICATED"), "{errors}");
    let output = ask(&["--chat", PROMPT], &certified, Some("ost_unknown"));
    assert!(!output.status.success());
    let output = ask(&["--chat", PROMPT], &[("--tls-ca", "servers.pem"), ("--token-file", "a.token")], None);
    assert!(!output.status.success(), "the server wants a certificate");
    let output = ask(&["--chat", PROMPT], &[("--token-file", "a.token")], None);
    assert!(!output.status.success(), "the server speaks TLS only");
    // Refusals whose message could quote the refused value.
    for arguments in [&["--prompt", PROMPT, "--top-p", "7"][..], &["--chat", PROMPT, "--stop", ""]] {
        assert_eq!(ask(arguments, &all, None).status.code(), Some(2));
    }

    let mut said = String::new();
    let state = get(&page, "/api/state").await;
    assert!(state.contains("demo/0"));
    for path in ["/metrics", "/", "/api/requests", "/api/steps?replica=demo/0"] {
        said += &get(&page, path).await;
    }
    said += &state;
    assert!(said.contains("text_completion") && said.contains("ostinato_requests_refused_total"));
    assert!(Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success());
    assert!(tokio::task::block_in_place(|| server.wait().unwrap()).success());
    let log = std::fs::read_to_string(at("log")).unwrap();
    assert!(log.contains("DEBUG") && log.contains("stopped"), "{log}");
    let spans = format!("{:?}", collector.spans.lock().unwrap());
    assert!(spans.contains("ostinato.v1.Ostinato/Generate") && spans.contains("INVALID_ARGUMENT"), "{spans}");
    for secret in secrets.iter().filter(|secret| secret.len() > 8) {
        for (place, text) in [("the log", &log), ("the spans", &spans), ("the page or the metrics", &said)] {
            assert!(!text.contains(secret.as_str()), "{secret:?} stands in {place}");
        }
    }
}

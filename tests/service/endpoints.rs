//! Goal: the gRPC endpoint of a model serves that model and no other, in both contracts, while the server's endpoint
//! serves all: a router whose contract names no model can stand before each of several models. Endpoints open and close
//! while the server runs, and are healthy while their model is served. Method: two models on fake devices that say
//! different things, behind the real endpoints.

use crate::lifecycle::{host, on_request};
use crate::serving::{Served, generate, read, serve_host, text_request};
use ostinato::config::Model;
use ostinato::host::progress::Quiet;
use ostinato::service::model_endpoints::ModelEndpoints;
use ostinato::service::proto::ostinato_client::OstinatoClient;
use ostinato::service::proto::vllm::grpc::engine as contract;
use ostinato::service::proto::{self, LoadModelRequest, UnloadModelRequest};
use ostinato::service::server::Options;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use contract::generate_request::Input;
use contract::generate_response::Response;
use contract::vllm_engine_client::VllmEngineClient;

/// A server of two models, `alpha`, which says "abc", and `beta`, which says "xyz", with an endpoint each.
struct Two {
    served: Served,
    endpoints: Arc<ModelEndpoints>,
}

async fn two() -> Two {
    let (host, _) = host(&[on_request("alpha", "abc"), Model::new("beta", "xyz", None)]);
    for name in ["alpha", "beta"] {
        assert!(host.load(name, Default::default(), Duration::ZERO, &Quiet).unwrap().old.is_none());
    }
    let endpoints = ModelEndpoints::new();
    let options = Options { model_endpoints: Some(Arc::clone(&endpoints)), ..Options::default() };
    for model in ["alpha", "beta"] {
        endpoints.open(model, TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap();
    }
    Two { served: serve_host(host, options).await, endpoints }
}

impl Two {
    /// A connection to the endpoint of a model.
    async fn channel(&self, model: &str) -> Channel {
        let address = self.endpoints.address(model).unwrap();
        Endpoint::new(format!("http://{address}")).unwrap().connect().await.unwrap()
    }
}

/// Returns the text of four tokens after a prompt, requested through the routers' contract on a connection.
async fn said(channel: Channel) -> Result<String, Status> {
    let input_ids = "hello".bytes().map(u32::from).collect();
    let request = contract::GenerateRequest {
        input: Some(Input::Tokenized(contract::TokenizedInput { original_text: String::new(), input_ids })),
        sampling_params: Some(contract::SamplingParams { max_tokens: Some(4), ..Default::default() }),
        ..Default::default()
    };
    let mut stream = VllmEngineClient::new(channel).generate(request).await?.into_inner();
    let mut text = String::new();
    while let Some(message) = stream.message().await? {
        if let Some(Response::Complete(complete)) = message.response {
            text.extend(complete.output_ids.iter().map(|id| char::from_u32(*id).unwrap()));
        }
    }
    Ok(text)
}

async fn health(channel: Channel, service: &str) -> ServingStatus {
    let request = HealthCheckRequest { service: service.to_owned() };
    HealthClient::new(channel).check(request).await.unwrap().into_inner().status()
}

async fn becomes(channel: Channel, status: ServingStatus) {
    let until = Instant::now() + Duration::from_secs(10);
    while health(channel.clone(), "").await != status {
        assert!(Instant::now() < until, "it does not become {status:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_model_is_served_alone_on_its_endpoint_in_both_contracts() {
    let two = two().await;
    let (alpha, beta) = (two.channel("alpha").await, two.channel("beta").await);
    // The routers' contract: of the server's endpoint it cannot say which model it means.
    assert_eq!(said(alpha.clone()).await.unwrap(), "abca");
    assert_eq!(said(beta.clone()).await.unwrap(), "xyzx");
    let refused = said(two.served.channel().await).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    for words in ["alpha, beta", "a listen address of its own"] {
        assert!(refused.message().contains(words), "{refused}");
    }
    let mut theirs = VllmEngineClient::new(alpha.clone());
    let info = theirs.get_model_info(contract::GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.served_model_name, "alpha");

    // Our contract: without a name the endpoint's model is meant, and another name is refused.
    for (channel, own, other, text) in [(&alpha, "alpha", "beta", "abca"), (&beta, "beta", "alpha", "xyzx")] {
        let mut client = OstinatoClient::new(channel.clone());
        for name in ["", own] {
            assert_eq!(generate(&mut client, text_request(name, "hello", 4)).await.text(), text, "{name:?}");
        }
        let refused = generate(&mut client, text_request(other, "hello", 4)).await.error.unwrap();
        assert_eq!(refused.code(), Code::NotFound);
        let words = format!("model \"{other}\" is not served at this address, which serves only \"{own}\"");
        assert_eq!(refused.message(), words);
        let refused = client.unload_model(UnloadModelRequest { name: other.to_owned(), grace_seconds: None }).await;
        assert_eq!(refused.unwrap_err().code(), Code::NotFound);
        let listed = client.list_models(proto::ListModelsRequest {}).await.unwrap().into_inner().models;
        assert_eq!(listed.iter().map(|model| &*model.name).collect::<Vec<_>>(), [own]);
        let loads = client.get_load(proto::GetLoadRequest::default()).await.unwrap().into_inner().replicas;
        assert_eq!(loads.iter().map(|load| &*load.replica).collect::<Vec<_>>(), [format!("{own}/0")]);
    }
    // The server's endpoint serves both, and says where each is alone.
    let mut client = two.served.client().await;
    for (name, text) in [("alpha", "abca"), ("beta", "xyzx")] {
        assert_eq!(generate(&mut client, text_request(name, "hello", 4)).await.text(), text);
    }
    let listed = client.list_models(proto::ListModelsRequest {}).await.unwrap().into_inner().models;
    for model in listed {
        assert_eq!(model.endpoint, two.endpoints.address(&model.name).unwrap().to_string());
    }
}

/// Goal: an Abort over the endpoint of a model ends only requests of that model. Method: both models run a request of
/// the same id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_over_an_endpoint_ends_no_request_of_another_model() {
    let two = two().await;
    let mut client = two.served.client().await;
    let mut streams = Vec::new();
    for name in ["alpha", "beta"] {
        let request = proto::GenerateRequest { request_id: "same".to_owned(), ..text_request(name, "hello", 2000) };
        streams.push(client.generate(request).await.unwrap().into_inner());
    }
    let mut theirs = VllmEngineClient::new(two.channel("alpha").await);
    theirs.abort(contract::AbortRequest { request_ids: vec!["same".to_owned()] }).await.unwrap();
    let (beta, alpha) = (streams.pop().unwrap(), streams.pop().unwrap());
    let ended = read(alpha).await;
    assert!(ended.ids().len() < 2000, "{:?}", ended.finished);
    assert_eq!(read(beta).await.ids().len(), 2000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_is_healthy_while_its_model_is_served() {
    let two = two().await;
    let (alpha, beta) = (two.channel("alpha").await, two.channel("beta").await);
    for service in ["", "ostinato.v1.Ostinato", "vllm.grpc.engine.VllmEngine"] {
        assert_eq!(health(alpha.clone(), service).await, ServingStatus::Serving, "{service}");
    }
    let mut client = two.served.client().await;
    client.unload_model(UnloadModelRequest { name: "alpha".to_owned(), grace_seconds: Some(0.0) }).await.unwrap();
    becomes(alpha.clone(), ServingStatus::NotServing).await;
    assert_eq!(health(beta.clone(), "").await, ServingStatus::Serving);
    assert_eq!(health(two.served.channel().await, "").await, ServingStatus::Serving);
    // Requests are told that the model is not loaded, and nothing of other models.
    let refused = said(alpha.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("\"alpha\" is not served: it is not loaded"), "{refused}");
    assert!(!refused.message().contains("beta"), "{refused}");
    let refused = OstinatoClient::new(alpha.clone()).generate(text_request("", "hello", 3)).await.unwrap_err();
    assert!(refused.message().contains("\"alpha\" is not served"), "{refused}");
    assert!(!refused.message().contains("beta"), "{refused}");
    let info = VllmEngineClient::new(alpha.clone()).health_check(contract::HealthCheckRequest {}).await.unwrap();
    assert!(!info.into_inner().healthy);
    // It can be loaded over its own endpoint.
    let request = LoadModelRequest { name: "alpha".to_owned(), ..Default::default() };
    let mut events = OstinatoClient::new(alpha.clone()).load_model(request).await.unwrap().into_inner();
    while events.message().await.unwrap().is_some() {}
    becomes(alpha.clone(), ServingStatus::Serving).await;
    assert_eq!(said(alpha).await.unwrap(), "abca");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_open_close_and_move_while_the_server_runs() {
    let two = two().await;
    let before = two.endpoints.address("alpha").unwrap();
    let mut client = OstinatoClient::new(two.channel("alpha").await);
    let stream = client.generate(text_request("", "hello", 300)).await.unwrap().into_inner();
    two.endpoints.close("alpha");
    two.endpoints.close("unheard");
    assert_eq!(two.endpoints.address("alpha"), None);
    // What runs goes on; nobody new is taken.
    assert_eq!(read(stream).await.ids().len(), 300);
    let until = Instant::now() + Duration::from_secs(10);
    while tokio::net::TcpStream::connect(before).await.is_ok() {
        assert!(Instant::now() < until, "{before} is still open");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // The same address again, for another model, which moves.
    let beta = two.channel("beta").await;
    two.endpoints.open("beta", TcpListener::bind(before).await.unwrap()).unwrap();
    assert_eq!(two.endpoints.address("beta"), Some(before));
    assert_eq!(said(two.channel("beta").await).await.unwrap(), "xyzx");
    let until = Instant::now() + Duration::from_secs(10);
    while said(beta.clone()).await.is_ok() {
        assert!(Instant::now() < until, "the endpoint before is still open");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_drains_the_endpoints_of_models() {
    let two = two().await;
    let alpha = two.channel("alpha").await;
    let stream = OstinatoClient::new(alpha.clone()).generate(text_request("", "hello", 500)).await.unwrap();
    two.served.stop.cancel();
    becomes(alpha.clone(), ServingStatus::NotServing).await;
    let refused = said(alpha).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert_eq!(read(stream.into_inner()).await.ids().len(), 500);
    let stopped = tokio::time::timeout(Duration::from_secs(10), two.served.server).await.unwrap().unwrap().unwrap();
    assert_eq!(stopped.cut, 0);
}

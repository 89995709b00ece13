//! Goal: models and replicas run on the devices to which the configuration binds them. Method: a configuration file,
//! two Vulkan drivers as two devices, the real engine and a gRPC client, under validation.

use crate::common::{Driver, Vulkan};
use crate::serving::{Outcome, generate, read, text_request, token_request};
use ostinato::config::{Sources, from_sources};
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::service::proto;
use ostinato::service::server::{Options, serve};
use proto::generate_response::Event;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use tonic::Code;

fn start(vulkan: &Vulkan, text: &str) -> Host {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ostinato.toml");
    std::fs::write(&file, text).unwrap();
    let mut config = from_sources(&Sources { file: Some(file), ..Sources::default() }).unwrap();
    config.runtime.cache_directory = Some(folder.path().to_owned());
    start_with(&vulkan.devices, &config, &Quiet).unwrap()
}

#[test]
fn models_and_replicas_run_on_the_devices_that_they_name() {
    let vulkan = Vulkan::shared();
    let devices = Driver::BOTH.map(|driver| vulkan.adapter(driver));
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen3-gqa7");
    // One model is on both devices, selected by UUID and by name; another is on the second, selected by its UUID
    // in upper case.
    let host = Arc::new(start(
        &vulkan,
        &format!(
            r#"
            [[models]]
            name = "demo"
            path = "embedded:demo"
            context = 128
            slots = 2
            replicas = [{{ device = "{}" }}, {{ device = "{}" }}]
            [[models]]
            name = "ids"
            path = "{fixture}"
            replicas = [{{ device = "{}" }}]
            "#,
            devices[0].uuid,
            devices[1].name,
            devices[1].uuid.to_uppercase()
        ),
    ));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(ask(Arc::clone(&host), [devices[0].uuid.clone(), devices[1].uuid.clone()]));
    drop(runtime);
    drop(host);
    vulkan.assert_clean();
}

async fn ask(host: Arc<Host>, uuids: [String; 2]) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let shutdown = stop.clone().cancelled_owned();
    let server = tokio::spawn(serve(host, listener, Options::default(), shutdown));
    let channel = tonic::transport::Endpoint::new(address).unwrap().connect().await.unwrap();
    let mut client = proto::ostinato_client::OstinatoClient::new(channel);

    let listed = client.list_devices(proto::ListDevicesRequest {}).await.unwrap().into_inner();
    let mut on: Vec<(String, Vec<String>)> =
        listed.devices.into_iter().map(|device| (device.device.unwrap().uuid, device.replicas)).collect();
    on.sort_by_key(|(uuid, _)| *uuid != uuids[0]);
    let replicas = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(on, [(uuids[0].clone(), replicas(&["demo/0"])), (uuids[1].clone(), replicas(&["demo/1", "ids/0"])),]);

    // Requests that select each device by its UUID. Both give the same text.
    let ran_on = |outcome: &Outcome| outcome.started.clone().unwrap().device.unwrap().uuid;
    let mut texts = Vec::new();
    for uuid in &uuids {
        let mut request = text_request("demo", "Once upon a time", 12);
        request.device = uuid.clone();
        let outcome = generate(&mut client, request).await;
        assert_eq!(ran_on(&outcome), *uuid);
        texts.push(outcome.text());
    }
    assert!(!texts[0].is_empty());
    assert_eq!(texts[0], texts[1]);
    let outcome = generate(&mut client, token_request("ids", &[1, 2, 3], 8)).await;
    assert_eq!((ran_on(&outcome), outcome.ids().len()), (uuids[1].clone(), 8));

    // Both devices and both models run at once: all have started before the first one ends.
    let mut streams = Vec::new();
    for (model, device) in [("demo", &uuids[0]), ("demo", &uuids[1])] {
        let mut request = text_request(model, "Once upon a time", 16);
        request.stopping.as_mut().unwrap().ignore_eos = true;
        request.device = device.clone();
        streams.push(client.generate(request).await.unwrap().into_inner());
    }
    streams.push(client.generate(token_request("ids", &[1, 2, 3], 16)).await.unwrap().into_inner());
    for stream in &mut streams {
        let first = stream.message().await.unwrap().unwrap().event;
        assert!(matches!(first, Some(Event::Started(_))), "{first:?}");
    }
    for stream in streams {
        // `Started` was already read, so `read` cannot check the order.
        let mut stream = stream;
        let mut tokens = 0;
        let mut finished = false;
        while let Some(message) = stream.message().await.unwrap() {
            match message.event.unwrap() {
                Event::Delta(delta) => tokens += delta.token_ids.len(),
                Event::Finished(_) => finished = true,
                other => panic!("{other:?}"),
            }
        }
        assert!(finished && tokens == 16, "{tokens} tokens");
    }

    // The device exists, but the model has no replica on it.
    let mut request = token_request("ids", &[1], 1);
    request.device = uuids[0].clone();
    let status = generate(&mut client, request).await.error.unwrap();
    assert_eq!(status.code(), Code::NotFound, "{status:?}");

    // Without a selected device, the second request goes to the device that the first does not use.
    let request = || {
        let mut request = text_request("demo", "Once upon a time", 24);
        request.stopping.as_mut().unwrap().ignore_eos = true;
        request
    };
    let first = client.generate(request()).await.unwrap().into_inner();
    let second = client.generate(request()).await.unwrap().into_inner();
    let (first, second) = tokio::join!(read(first), read(second));
    assert_ne!(ran_on(&first), ran_on(&second));

    stop.cancel();
    assert_eq!(server.await.unwrap().unwrap().cut, 0);
}

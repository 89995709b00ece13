//! Goal: many concurrent gRPC clients of a model on a real driver get correct results. Method: the demo model on
//! lavapipe without the validation layer (other tests run the same recordings under it), eight slots, a server on
//! loopback, one connection for all clients.

use crate::common::{Driver, Vulkan};
use crate::serving::*;
use ostinato::config::{Config, DEMO_PATH, Model};
use ostinato::gpu::devices::start_with;
use ostinato::host::progress::Quiet;
use ostinato::service::proto;
use ostinato::service::server::Options;
use proto::FinishReason as Reason;
use std::path::Path;
use std::time::Duration;

/// The range of token ids in prompts; ids below it are ordinary tokens.
const IDS: u32 = 1000;

/// Serves the demo model with eight slots. The returned instance must be dropped after the server.
async fn demo() -> (Served, Vulkan) {
    let vulkan = Vulkan::shared_without_validation();
    let mut model = Model::new("demo", DEMO_PATH, Some(vulkan.adapter(Driver::first()).selector()));
    model.slots = Some(8);
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.cache_directory = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned());
    let host = start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{e:?}"));
    (serve_host(host, Options::default()).await, vulkan)
}

/// Returns token ids that depend only on `seed`.
fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| (seed.wrapping_mul(7919) + at.wrapping_mul(104_729)) % IDS).collect()
}

fn drawn(ids: &[u32], max_tokens: u32, seed: u64, n: u32) -> proto::GenerateRequest {
    let mut request = token_request("demo", ids, max_tokens);
    request.sampling =
        Some(proto::Sampling { temperature: Some(0.9), seed: Some(seed), n: Some(n), ..Default::default() });
    request.stopping.as_mut().unwrap().ignore_eos = true;
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_on_a_driver_are_what_single_requests_with_their_seeds_give() {
    let (served, _vulkan) = demo().await;
    let mut client = served.client().await;
    let ids = prompt(3, 37);
    let stream = client.generate(drawn(&ids, 20, 42, 4)).await.unwrap().into_inner();
    let samples = read_samples(stream, 4).await;
    assert!(samples.error.is_none() && samples.started.is_some(), "{samples:?}");
    assert_eq!(samples.reasons(), [Some(Reason::Length); 4]);
    for (index, ids_of) in samples.ids().iter().enumerate() {
        let single = generate(&mut client, drawn(&ids, 20, sample_seed(42, index as u64), 1)).await;
        assert_eq!(&single.ids(), ids_of, "sample {index}");
        assert!(samples.ids()[..index].iter().all(|other| other != ids_of), "sample {index} is another's");
        // The samples arrived together, so the two full pages of the prompt are computed once.
        let usage = samples.finished[index].as_ref().unwrap().usage.unwrap();
        assert_eq!(usage.cached_tokens, if index == 0 { 0 } else { 32 }, "sample {index}");
    }

    // Each cache salt finds only pages that were computed under the same salt.
    let mut salted = drawn(&prompt(4, 40), 2, 0, 1);
    for (salt, cached) in [("a", 0), ("a", 32), ("b", 0), ("", 0), ("b", 32)] {
        salted.cache_salt = salt.to_owned();
        let outcome = generate(&mut client, salted.clone()).await;
        assert_eq!(outcome.started.as_ref().unwrap().cached_tokens, cached, "\"{salt}\"");
        assert_eq!(outcome.finished.unwrap().usage.unwrap().cached_tokens, cached, "\"{salt}\"");
    }
    let load = client.get_load(proto::GetLoadRequest::default()).await.unwrap().into_inner();
    let load = &load.replicas[0];
    // Two of the salted requests found 32 tokens each; before that, the samples found each other's pages.
    assert!(load.cached_tokens >= 64 && load.prompt_tokens >= load.cached_tokens + 3 * 40, "{load:?}");
    assert!(load.pages_cached > 0 && load.pages_used + load.pages_cached <= load.pages_total, "{load:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_streams_of_mixed_lengths_end_each_as_it_should_and_leave_nothing() {
    const STREAMS: u32 = 64;
    let (served, _vulkan) = demo().await;
    let channel = served.channel().await;
    let lengths = |stream: u32| (1 + stream * 13 % 40, 1 + stream * 7 % 12);
    let request = |stream: u32| {
        let (length, max_tokens) = lengths(stream);
        drawn(&prompt(stream, length), max_tokens, u64::from(stream), 1)
    };
    let mut tasks = Vec::new();
    for stream in 0..STREAMS {
        let mut client = proto::ostinato_client::OstinatoClient::new(channel.clone());
        let mut request = request(stream);
        request.request_id = format!("stream {stream}");
        tasks.push(tokio::spawn(async move {
            // One stream in four is dropped by its client, either before it starts or after a token.
            if stream % 8 == 1 {
                drop(client.generate(request).await.unwrap());
                return None;
            }
            if stream % 8 == 5 {
                request.stopping.as_mut().unwrap().max_tokens = Some(500);
                let mut events = client.generate(request).await.unwrap().into_inner();
                while let Some(message) = events.message().await.unwrap() {
                    if matches!(message.event, Some(proto::generate_response::Event::Delta(_))) {
                        break;
                    }
                }
                return None;
            }
            // One stream in sixteen is aborted by its id.
            if stream % 16 == 3 {
                request.stopping.as_mut().unwrap().max_tokens = Some(500);
                let mut other = client.clone();
                let id = request.request_id.clone();
                let events = client.generate(request).await.unwrap().into_inner();
                other.abort(proto::AbortRequest { request_id: id }).await.unwrap();
                assert_eq!(read(events).await.reason(), Reason::Aborted, "stream {stream}");
                return None;
            }
            Some(generate(&mut client, request).await)
        }));
    }
    let mut completed = Vec::new();
    for (stream, task) in (0..STREAMS).zip(tasks) {
        if let Some(outcome) = task.await.unwrap() {
            let (length, max_tokens) = lengths(stream);
            assert!(outcome.error.is_none(), "stream {stream}: {:?}", outcome.error);
            assert_eq!(outcome.reason(), Reason::Length, "stream {stream}");
            let usage = outcome.finished.as_ref().unwrap().usage.unwrap();
            assert_eq!((usage.prompt_tokens, usage.output_tokens), (length, max_tokens), "stream {stream}");
            assert_eq!(outcome.ids().len(), max_tokens as usize);
            completed.push((stream, outcome.ids()));
        }
    }
    assert_eq!(completed.len(), 44, "as many as nobody ended");
    served.idle("demo/0", Duration::from_secs(10)).await;
    let load = served.client().await.get_load(proto::GetLoadRequest::default()).await.unwrap().into_inner();
    let load = &load.replicas[0];
    assert_eq!((load.running, load.waiting, load.pages_used), (0, 0, 0), "{load:?}");

    // The outputs of concurrent streams equal those of the same requests alone.
    let mut client = served.client().await;
    for (stream, ids) in completed.iter().step_by(9) {
        assert_eq!(&generate(&mut client, request(*stream)).await.ids(), ids, "stream {stream}");
    }
}

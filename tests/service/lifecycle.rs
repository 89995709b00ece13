//! Goal: models can be loaded, unloaded and replaced while others serve, without effect on those. Requests of a model
//! continue, a failed load changes nothing, at most one operation runs on a model at a time, and a changed
//! configuration has exactly the specified effects. Method: fake devices behind the real endpoint, with a source that
//! builds a model when the test allows it. `tests/device/loading.rs` covers real devices.

use crate::openai::post;
use crate::serving::{Served, fake, generate, model, read, serve_host, text_request, tokenizer};
use ostinato::actors::workers::Cancel;
use ostinato::config::{LoadWhen, Model, Selector};
use ostinato::host::ServedDevice;
use ostinato::host::catalogue::LoadState;
use ostinato::host::lifecycle::{LifecycleError, ModelChange};
use ostinato::host::progress::{Quiet, Unit};
use ostinato::host::source::{BuildError, BuildErrorKind, LoadAttempt, ModelSource};
use ostinato::host::{Host, ServedModel};
use ostinato::service::admin::{self, Admin};
use ostinato::service::prepare::{Target, prepare_at};
use ostinato::service::proto::{self, ModelState, Replace, load_model_response::Event};
use ostinato::service::server::{Changeable, Options};
use proto::vllm;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tonic::Code;

const STEP: Duration = Duration::from_millis(2);

/// Shared state with which the test controls a source and observes it.
#[derive(Debug, Default)]
pub struct Control {
    /// Builds of a model with a path `slow:…` wait for this.
    go: AtomicBool,
    begun: AtomicUsize,
    /// The number of builds that were told that other models are serving.
    beside: AtomicUsize,
}

/// A source of fake models. A model's path is the text that its fake device repeats. With the prefix `slow:` the build
/// waits for the test; `broken` makes it fail; `embeds` is an embedding model.
#[derive(Debug)]
struct Fakes(Arc<Control>);

impl ModelSource for Fakes {
    fn check(&self, model: &Model) -> Result<(), BuildError> {
        match model.replicas[0].device.as_ref().map(Selector::to_string).as_deref() {
            Some("missing") => Err(BuildError::new(BuildErrorKind::Invalid, "no such device")),
            _ => Ok(()),
        }
    }

    fn build(&self, model: &Model, attempt: &LoadAttempt<'_>) -> Result<ServedModel, BuildError> {
        self.0.begun.fetch_add(1, SeqCst);
        self.0.beside.fetch_add(usize::from(attempt.beside), SeqCst);
        let path = model.path.to_str().expect("UTF-8");
        attempt.progress.line("a line");
        attempt.progress.step("loading weights", 1, 2, Unit::Bytes);
        let script = match path.strip_prefix("slow:") {
            Some(script) => {
                while !self.0.go.load(SeqCst) {
                    if attempt.cancelled.load(SeqCst) {
                        return Err(BuildError::cancelled(&model.name));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                script
            }
            None => path,
        };
        if script == "broken" {
            let why = format!("model \"{}\": 7 of 8 tensors are there", model.name);
            return Err(BuildError::new(BuildErrorKind::Invalid, why));
        }
        attempt.progress.step("loading weights", 2, 2, Unit::Bytes);
        let device = vec![(0, fake(STEP, script.as_bytes()))];
        let mut served = crate::serving::model(&model.name, Some(tokenizer(true)), device, attempt.queue_limit);
        served.info.embedding.declared = script == "embeds";
        Ok(served)
    }

    fn devices(&self) -> Vec<ServedDevice> {
        Vec::new()
    }
}

pub fn on_request(name: &str, path: &str) -> Model {
    Model { load: LoadWhen::Request, ..Model::new(name, path, None) }
}

pub fn host(models: &[Model]) -> (Host, Arc<Control>) {
    let control = Arc::new(Control::default());
    (Host::of(models, 8, Box::new(Fakes(Arc::clone(&control)))), control)
}

/// Returns a server of these models, with those of `load = "start"` loaded.
async fn serve(models: &[Model]) -> (Served, Arc<Control>) {
    let (host, control) = host(models);
    for model in models.iter().filter(|model| model.load == LoadWhen::Start) {
        assert!(host.load(&model.name, Default::default(), Duration::ZERO, &Quiet).unwrap().old.is_none());
    }
    (serve_host(host, Options { drain: Duration::from_secs(20), ..Options::default() }).await, control)
}

fn load_request(name: &str, replace: Replace) -> proto::LoadModelRequest {
    proto::LoadModelRequest { name: name.to_owned(), replace: replace.into() }
}

type Client = proto::ostinato_client::OstinatoClient<tonic::transport::Channel>;

/// Loads a model. Returns the numbers of lines and progress steps, and the loaded model.
async fn load(
    client: &mut Client,
    name: &str,
    replace: Replace,
) -> Result<(usize, usize, proto::Model), tonic::Status> {
    let mut events = client.load_model(load_request(name, replace)).await?.into_inner();
    let (mut lines, mut steps, mut loaded) = (0, 0, None);
    while let Some(message) = events.message().await? {
        assert!(loaded.is_none(), "nothing follows what was loaded");
        match message.event.unwrap() {
            Event::Line(_) => lines += 1,
            Event::Warning(text) => panic!("{text}"),
            Event::Progress(step) => {
                assert_eq!((step.what.as_str(), step.total), ("loading weights", 2));
                assert_eq!(step.unit(), proto::load_progress::Unit::Bytes);
                steps += 1;
            }
            Event::Loaded(model) => loaded = model.model,
        }
    }
    Ok((lines, steps, loaded.expect("a load that does not fail ends with what it loaded")))
}

async fn unload(client: &mut Client, name: &str, grace: f64) -> Result<proto::UnloadModelResponse, tonic::Status> {
    let request = proto::UnloadModelRequest { name: name.to_owned(), grace_seconds: Some(grace) };
    Ok(client.unload_model(request).await?.into_inner())
}

async fn states(client: &mut Client) -> Vec<(String, ModelState)> {
    let models = client.list_models(proto::ListModelsRequest {}).await.unwrap().into_inner().models;
    models.iter().map(|model| (model.name.clone(), model.state())).collect()
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds().await {
        assert!(Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn repeated(script: &str, tokens: usize) -> String {
    script.chars().cycle().take(tokens).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_loaded_used_and_unloaded_while_another_generates() {
    let (served, control) = serve(&[Model::new("one", "abc", None), on_request("two", "xyz")]).await;
    let mut client = served.client().await;
    let state = |one, two| vec![("one".to_owned(), one), ("two".to_owned(), two)];
    assert_eq!(states(&mut client).await, state(ModelState::Serving, ModelState::Unloaded));
    let refused = generate(&mut client, text_request("two", "x", 3)).await.error.unwrap();
    assert_eq!(refused.code(), Code::NotFound);
    assert_eq!(refused.message(), "model \"two\" is not served: it is not loaded; served are one");
    // The only served model needs no name, even if others are configured.
    let long = client.generate(text_request("", "x", 400)).await.unwrap().into_inner();
    let long = tokio::spawn(read(long));

    let (lines, steps, loaded) = load(&mut client, "two", Replace::Beside).await.unwrap();
    assert_eq!((lines, steps, loaded.name.as_str(), loaded.state()), (1, 2, "two", ModelState::Serving));
    assert_eq!((control.begun.load(SeqCst), control.beside.load(SeqCst)), (2, 1), "the second disturbs the first");
    assert_eq!(states(&mut client).await, state(ModelState::Serving, ModelState::Serving));
    assert_eq!(generate(&mut client, text_request("two", "x", 5)).await.text(), "xyzxy");
    assert_eq!(generate(&mut client, text_request("", "x", 5)).await.error.unwrap().code(), Code::NotFound);

    assert_eq!(unload(&mut client, "two", 5.0).await.unwrap().cut, 0);
    assert_eq!(states(&mut client).await, state(ModelState::Serving, ModelState::Unloaded));
    assert_eq!(generate(&mut client, text_request("two", "x", 5)).await.error.unwrap().code(), Code::NotFound);
    // Loading and unloading can be repeated.
    load(&mut client, "two", Replace::Beside).await.unwrap();
    assert_eq!(generate(&mut client, text_request("two", "x", 5)).await.text(), "xyzxy");
    assert_eq!(long.await.unwrap().text(), repeated("abc", 400));
}

/// Goal: a request never crosses from one model to another that has its name by now: its tokens are those of the first
/// one's tokenizer. Method: the model is replaced between the look-up, which checks rights, and the preparation.
#[test]
fn a_request_stays_on_the_model_that_it_was_looked_up_on() {
    let (host, _) = host(&[Model::new("one", "abc", None)]);
    let host = Arc::new(host);
    let load = || host.load("one", Default::default(), Duration::ZERO, &Quiet).unwrap();
    assert!(load().old.is_none());
    for named in ["one", ""] {
        let before = host.model(named).unwrap();
        let place = Target::find(&host, named, "").unwrap();
        let replaced = load();
        let request = text_request(named, "x", 3);
        let prepared = prepare_at(place, request, None, None, &tracing::Span::none(), &Cancel::default()).unwrap();
        assert!(std::ptr::eq(prepared.place.model(), &*before));
        assert!(std::ptr::eq(prepared.place.replica(), &*before.replicas[0]));
        assert!(!std::ptr::eq(prepared.place.model(), &*host.model(named).unwrap()));
        host.retire(replaced.old.expect("the first one"), Duration::ZERO);
    }
}

/// Goal: all parts of a call run on one model, even if another model has its name by now: vectors of two models cannot be
/// compared. Method: a call for scores needs two calls for vectors; the model is replaced during the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_of_several_parts_stays_on_one_model() {
    let (served, _) = serve(&[Model::new("one", "embeds", None)]).await;
    let old = served.host.model("one").unwrap();
    // Two texts of each of 1,100 pairs: one call for vectors has at most 2,048.
    let texts = |from: u32| -> Vec<String> { (from..from + 1100).map(|number| number.to_string()).collect() };
    let body = json!({"model": "one", "queries": texts(1000), "documents": texts(3000)});
    let http = served.http;
    let call = tokio::spawn(async move { post(http, "/v1/score", &body).await.json() });
    until("it runs", async || old.replicas[0].unfinished() > 0).await;
    let replaced = served.host.load("one", Default::default(), Duration::ZERO, &Quiet).unwrap();
    let answer = call.await.unwrap();
    assert_eq!(answer["data"].as_array().unwrap().len(), 1100);
    assert_eq!(replaced.model.replicas[0].load().prompt_tokens, 0, "the new model has run nothing");
    assert_eq!(old.replicas[0].load().prompt_tokens, 2200 * 4, "four bytes each");
    served.host.retire(replaced.old.expect("the first one"), Duration::ZERO);
}

/// Goal: as above, for the prompts of a completion, which become requests one after the other. Method: the model is
/// replaced while the second prompt, a long text of which the last tokens are kept, is encoded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_prompts_of_a_completion_run_on_one_model() {
    let (served, _) = serve(&[Model::new("one", "abc", None)]).await;
    let old = served.host.model("one").unwrap();
    let prompts = ["x".to_owned(), "y".repeat(500_000), "z".to_owned()];
    let body = json!({"model": "one", "prompt": prompts, "truncate_prompt_tokens": 5, "max_tokens": 100});
    let http = served.http;
    let call = tokio::spawn(async move { post(http, "/v1/completions", &body).await.json() });
    until("its first prompt runs", async || old.replicas[0].unfinished() > 0).await;
    let replaced = served.host.load("one", Default::default(), Duration::ZERO, &Quiet).unwrap();
    let answer = call.await.unwrap();
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], repeated("abc", 100), "{answer}");
    }
    assert_eq!(replaced.model.replicas[0].load().prompt_tokens, 0, "the new model has run nothing");
    assert_eq!(old.replicas[0].load().prompt_tokens, 1 + 5 + 1);
    served.host.retire(replaced.old.expect("the first one"), Duration::ZERO);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_loaded_or_unloaded_is_refused_and_changes_nothing() {
    let (served, control) = serve(&[Model::new("one", "abc", None), on_request("two", "broken")]).await;
    let mut client = served.client().await;
    let refused = |status: tonic::Status| (status.code(), status.message().to_owned());
    for (name, code, why) in [
        ("three", Code::NotFound, "model \"three\" is not configured; configured are one, two"),
        ("/etc", Code::NotFound, "model \"/etc\" is not configured; configured are one, two"),
        ("", Code::InvalidArgument, "name is missing: the name of a model of the configuration"),
        ("two", Code::FailedPrecondition, "model \"two\" could not be loaded: model \"two\": 7 of 8 tensors are there"),
    ] {
        let status = load(&mut client, name, Replace::Beside).await.unwrap_err();
        assert_eq!(refused(status), (code, why.to_owned()));
    }
    let unknown = proto::LoadModelRequest { name: "one".to_owned(), replace: 7 };
    let status = client.load_model(unknown).await.unwrap_err();
    assert_eq!(refused(status).1, "replace is 7, must be REPLACE_BESIDE or REPLACE_UNLOAD_FIRST");
    for (name, grace, code, why) in [
        ("three", 0.0, Code::NotFound, "model \"three\" is not configured; configured are one, two"),
        ("two", 0.0, Code::FailedPrecondition, "model \"two\" cannot be unloaded: it is not loaded"),
        ("one", -1.0, Code::InvalidArgument, "grace_seconds is -1, must be from 0 to 86400"),
        ("one", f64::NAN, Code::InvalidArgument, "grace_seconds is NaN, must be from 0 to 86400"),
    ] {
        let status = unload(&mut client, name, grace).await.unwrap_err();
        assert_eq!(refused(status), (code, why.to_owned()));
    }
    assert_eq!(control.begun.load(SeqCst), 2, "what is refused at once is not begun");
    assert_eq!(generate(&mut client, text_request("one", "x", 5)).await.text(), "abcab");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_thing_at_a_time_is_done_with_a_model_and_a_load_outlives_its_caller() {
    let (served, control) = serve(&[Model::new("one", "abc", None), on_request("two", "slow:xyz")]).await;
    let mut client = served.client().await;
    let mut events = client.load_model(load_request("two", Replace::Beside)).await.unwrap().into_inner();
    assert!(matches!(events.message().await.unwrap().unwrap().event, Some(Event::Line(_))));
    let status = load(&mut client, "two", Replace::Beside).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Aborted, "model \"two\" is busy: it is being loaded"));
    until("the load is shown", async || {
        let models = client.clone().list_models(proto::ListModelsRequest {}).await.unwrap().into_inner().models;
        models[1].state() == ModelState::Loading && models[1].loading.as_ref().is_some_and(|step| step.done == 1)
    })
    .await;
    let refused = generate(&mut client, text_request("two", "x", 3)).await.error.unwrap();
    assert_eq!(refused.message(), "model \"two\" is not served: it is being loaded; served are one");
    drop(events);
    control.go.store(true, SeqCst);
    until("it is loaded all the same", async || states(&mut client.clone()).await[1].1 == ModelState::Serving).await;
    assert_eq!(generate(&mut client, text_request("two", "x", 4)).await.text(), "xyzx");

    // Unloading cancels a load.
    unload(&mut client, "two", 1.0).await.unwrap();
    control.go.store(false, SeqCst);
    let mut events = client.load_model(load_request("two", Replace::Beside)).await.unwrap().into_inner();
    assert!(events.message().await.unwrap().is_some());
    assert_eq!(unload(&mut client, "two", 1.0).await.unwrap(), proto::UnloadModelResponse::default());
    let status = loop {
        match events.message().await {
            Ok(message) => assert!(message.is_some(), "it ends with a status"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::Aborted);
    assert!(status.message().contains("was cancelled"), "{status:?}");
    assert_eq!(states(&mut client).await[1].1, ModelState::Unloaded);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_leaves_lets_its_requests_end_or_ends_them_when_their_time_is_over() {
    let (served, _) = serve(&[Model::new("one", "abc", None), Model::new("two", "xyz", None)]).await;
    let mut client = served.client().await;
    let long = client.generate(text_request("two", "x", 300)).await.unwrap().into_inner();
    let long = tokio::spawn(read(long));
    let mut other = client.clone();
    let leaving = tokio::spawn(async move { unload(&mut other, "two", 30.0).await });
    until("it leaves", async || states(&mut client.clone()).await[1].1 == ModelState::Unloading).await;
    let refused = generate(&mut client, text_request("two", "x", 3)).await.error.unwrap();
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("it is being unloaded"), "{refused:?}");
    let status = unload(&mut client, "two", 0.0).await.unwrap_err();
    assert_eq!(status.code(), Code::Aborted);
    assert_eq!(leaving.await.unwrap().unwrap().cut, 0);
    assert_eq!(long.await.unwrap().text(), repeated("xyz", 300), "it ran to its end");

    load(&mut client, "two", Replace::Beside).await.unwrap();
    // Three requests on two slots: one waits and is ended as well. An abort still finds requests of a model that is
    // leaving.
    let mut streams = Vec::new();
    for id in ["a", "b", "c"] {
        let request = proto::GenerateRequest { request_id: id.to_owned(), ..text_request("two", "x", 4000) };
        streams.push(tokio::spawn(read(client.generate(request).await.unwrap().into_inner())));
    }
    served.busy("two/0", 2, 1).await;
    let mut other = client.clone();
    let leaving = tokio::spawn(async move { unload(&mut other, "two", 0.5).await });
    until("it leaves", async || states(&mut client.clone()).await[1].1 == ModelState::Unloading).await;
    client.abort(proto::AbortRequest { request_id: "a".to_owned() }).await.unwrap();
    assert_eq!(leaving.await.unwrap().unwrap().cut, 2);
    let mut outcomes = Vec::new();
    for stream in streams {
        outcomes.push(stream.await.unwrap());
    }
    assert_eq!(outcomes[0].reason(), proto::FinishReason::Aborted);
    for outcome in &outcomes[1..] {
        let status = outcome.error.as_ref().unwrap();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "model \"two\" has been unloaded"));
        assert_eq!(outcome.reason(), proto::FinishReason::Error);
    }
    assert!(repeated("xyz", 4000).starts_with(&outcomes[1].text()), "what came was right");
    assert_eq!(served.host.replicas().count(), 1, "nothing of it is left");
    assert_eq!(generate(&mut client, text_request("", "x", 5)).await.text(), "abcab");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_served_model_is_replaced_without_a_request_lost() {
    let (served, control) = serve(&[on_request("zero", "0"), on_request("one", "slow:abc")]).await;
    control.go.store(true, SeqCst);
    let mut client = served.client().await;
    load(&mut client, "one", Replace::Beside).await.unwrap();
    let long = client.generate(text_request("one", "x", 300)).await.unwrap().into_inner();
    let long = tokio::spawn(read(long));
    // Requests during the whole time must not be affected.
    let stop = Arc::new(AtomicBool::new(false));
    let (asker, stopped) = (client.clone(), Arc::clone(&stop));
    let asking = tokio::spawn(async move {
        let (mut client, mut answers) = (asker, 0);
        while !stopped.load(SeqCst) {
            let outcome = generate(&mut client, text_request("one", "x", 2)).await;
            assert!(outcome.error.is_none(), "{:?} after {answers}", outcome.error);
            assert_eq!(outcome.text(), "ab");
            answers += 1;
        }
        answers
    });
    for _ in 0..3 {
        load(&mut client, "one", Replace::Beside).await.unwrap();
        assert_eq!(states(&mut client).await[1], ("one".to_owned(), ModelState::Serving));
    }
    stop.store(true, SeqCst);
    assert!(asking.await.unwrap() > 0);
    assert!(served.host.replicas().count() > 1, "the first one still has its long request");
    assert_eq!(long.await.unwrap().text(), repeated("abc", 300));
    until("what was replaced goes", async || served.host.replicas().count() == 1).await;

    // If the new model needs the memory of the old one, the old one leaves first.
    control.go.store(false, SeqCst);
    let mut other = client.clone();
    let loading = tokio::spawn(async move { load(&mut other, "one", Replace::UnloadFirst).await });
    until("the old one has gone", async || served.host.replicas().count() == 0).await;
    control.go.store(true, SeqCst);
    assert_eq!(loading.await.unwrap().unwrap().0, 2, "a line says that the old one leaves");
    assert_eq!(generate(&mut client, text_request("one", "x", 3)).await.text(), "abc");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_configuration_does_what_it_says_and_no_stream_notices() {
    let first = [
        Model::new("stays", "stays", None),
        Model::new("goes", "goes", None),
        Model::new("changes", "before", None),
        on_request("idle", "idle"),
    ];
    let (served, control) = serve(&first).await;
    let mut client = served.client().await;
    let mut streams = Vec::new();
    for name in ["stays", "goes", "changes"] {
        let stream = client.generate(text_request(name, "x", 300)).await.unwrap().into_inner();
        streams.push(tokio::spawn(read(stream)));
    }
    let host = &served.host;
    let grace = Duration::from_secs(20);
    let configure = async |models: &[Model], limit: usize| {
        let (host, models) = (Arc::clone(host), models.to_vec());
        tokio::task::spawn_blocking(move || host.configure(&models, limit, grace, &Quiet, || {})).await.unwrap()
    };
    // With a device that does not exist, nothing changes.
    let missing = ["new", "other"].map(|name| Model::new(name, name, Some(Selector::Name("missing".to_owned()))));
    assert_eq!(configure(&missing, 8).await.unwrap_err().len(), 2, "all problems are told");
    assert_eq!(states(&mut client).await.len(), 4);

    let mut second = [
        Model::new("new", "new", None),
        Model::new("stays", "stays", None),
        Model::new("bad", "broken", None),
        Model::new("changes", "after", None),
        on_request("idle", "another"),
    ];
    // Changing `load` has no effect on a model that is already loaded.
    second[1].load = LoadWhen::Request;
    let changed = configure(&second, 5).await.unwrap();
    let told: Vec<(&str, ModelChange, bool)> =
        changed.iter().map(|changed| (changed.model.as_str(), changed.change, changed.result.is_ok())).collect();
    use ModelChange::{Added, Removed, Replaced};
    let expected = [("goes", Removed, true), ("new", Added, true), ("bad", Added, false), ("changes", Replaced, true)];
    assert_eq!(told, expected);
    for (stream, script) in streams.into_iter().zip(["stays", "goes", "before"]) {
        let outcome = stream.await.unwrap();
        assert!(outcome.error.is_none(), "{script}: {:?}", outcome.error);
        assert_eq!(outcome.text(), repeated(script, 300));
    }
    use ModelState::{Serving, Unloaded};
    let shown = [("new", Serving), ("stays", Serving), ("bad", Unloaded), ("changes", Serving), ("idle", Unloaded)];
    assert_eq!(states(&mut client).await, shown.map(|(name, state)| (name.to_owned(), state)));
    let served_names: Vec<String> = host.models().iter().map(|model| model.name.clone()).collect();
    assert_eq!(served_names, ["new", "stays", "changes"], "in the configuration's order");
    assert_eq!(generate(&mut client, text_request("changes", "x", 5)).await.text(), "after");
    assert_eq!(host.route("stays", "").unwrap().1.room(), 2 + 5, "slots and the new limit");

    // The same configuration again only retries what failed. A model that was unloaded on request stays unloaded until
    // its entry changes.
    unload(&mut client, "new", 0.0).await.unwrap();
    let begun = control.begun.load(SeqCst);
    let changed = configure(&second, 5).await.unwrap();
    assert_eq!(changed.len(), 1);
    assert!(matches!(&changed[0].result, Err(LifecycleError::Load { model, .. }) if model == "bad"));
    assert_eq!(control.begun.load(SeqCst), begun + 1);
    second[0].path = "newer".into();
    second[2].path = "good".into();
    let changed = configure(&second, 5).await.unwrap();
    assert!(changed.len() == 2 && changed.iter().all(|changed| changed.result.is_ok()), "{changed:?}");
    assert_eq!(generate(&mut client, text_request("new", "x", 5)).await.text(), "newer");
}

/// Goal: a model that a new configuration removes cannot be loaded again while the configuration is being applied.
/// Method: two models are removed. One of them leaves at once, the other still has a long request. Meanwhile loads of
/// both are requested.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_leaves_with_a_configuration_cannot_be_loaded_again_while_others_drain() {
    let stays = Model::new("stays", "stays", None);
    let (served, control) =
        serve(&[stays.clone(), on_request("goes", "slow:goes"), Model::new("drains", "drains", None)]).await;
    control.go.store(true, SeqCst);
    let mut client = served.client().await;
    load(&mut client, "goes", Replace::Beside).await.unwrap();
    let request = proto::GenerateRequest { request_id: "long".to_owned(), ..text_request("drains", "x", 4000) };
    let long = tokio::spawn(read(client.generate(request).await.unwrap().into_inner()));
    served.busy("drains/0", 1, 0).await;
    let host = Arc::clone(&served.host);
    let configuring = tokio::task::spawn_blocking(move || {
        host.configure(&[stays], 8, Duration::from_secs(60), &Quiet, || {}).unwrap()
    });
    let serving = |name: &str| served.host.models().iter().any(|model| model.name == name);
    until("both have left", async || !serving("goes") && !serving("drains")).await;
    until("nothing is done with the first", async || served.host.state("goes") != Some(LoadState::Unloading)).await;

    let begun = control.begun.load(SeqCst);
    for name in ["goes", "drains"] {
        let status = load(&mut client, name, Replace::Beside).await.unwrap_err();
        let wanted = format!("model \"{name}\" is not configured; configured are stays");
        assert_eq!((status.code(), status.message()), (Code::NotFound, &*wanted));
    }
    assert_eq!(control.begun.load(SeqCst), begun, "nothing is begun");
    assert_eq!(states(&mut client).await.len(), 2, "the one that drains is still shown");
    let refused = generate(&mut client, text_request("goes", "x", 3)).await.error.unwrap();
    assert_eq!(refused.message(), "model \"goes\" is not served; served are stays");
    client.abort(proto::AbortRequest { request_id: "long".to_owned() }).await.unwrap();
    assert_eq!(long.await.unwrap().reason(), proto::FinishReason::Aborted);
    let changed = configuring.await.unwrap();
    assert!(changed.len() == 2 && changed.iter().all(|changed| changed.result.is_ok()), "{changed:?}");
    assert_eq!(states(&mut client).await, [("stays".to_owned(), ModelState::Serving)]);
    assert_eq!(served.host.replicas().count(), 1, "nothing of them is left");
}

/// Goal: after a configuration has been applied, the loaded models are those of the new configuration. Method: loads
/// that wait for the test while their entry changes (of a model that is not served and of one that is), and a load
/// whose entry is removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_goes_on_when_its_entry_changes_ends_and_the_new_one_is_loaded() {
    let (served, control) = serve(&[on_request("idle", "slow:old"), on_request("gone", "slow:gone")]).await;
    let mut client = served.client().await;
    let grace = Duration::from_secs(20);
    for (round, path) in ["first", "second"].into_iter().enumerate() {
        control.go.store(false, SeqCst);
        let mut loads = Vec::new();
        for name in ["idle", "gone"].into_iter().take(2 - round) {
            let mut events = client.load_model(load_request(name, Replace::Beside)).await.unwrap().into_inner();
            assert!(events.message().await.unwrap().is_some());
            loads.push(events);
        }
        let (host, models) = (Arc::clone(&served.host), [on_request("idle", &format!("slow:{path}"))]);
        let configuring = tokio::task::spawn_blocking(move || host.configure(&models, 8, grace, &Quiet, || {}));
        for mut events in loads {
            let status = loop {
                match events.message().await {
                    Ok(message) => assert!(message.is_some(), "it ends with a status"),
                    Err(status) => break status,
                }
            };
            assert!(status.message().contains("was cancelled"), "{status:?}");
        }
        control.go.store(true, SeqCst);
        let changed = configuring.await.unwrap().unwrap();
        assert!(changed.iter().all(|changed| changed.result.is_ok()), "{changed:?}");
        assert_eq!(states(&mut client).await, [("idle".to_owned(), ModelState::Serving)]);
        assert_eq!(generate(&mut client, text_request("idle", "x", 5)).await.text(), repeated(path, 5));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_models_is_healthy_and_one_that_stops_loads_none() {
    let (served, control) = serve(&[on_request("one", "slow:abc")]).await;
    let host = Arc::clone(&served.host);
    let admin = Admin::new();
    admin.set_host(Arc::clone(&host));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let page = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let page_server = tokio::spawn(admin::serve(Arc::clone(&admin), listener, stop.clone()));
    let get = async |path: &str| -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(page).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {page}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    };
    let mut probe = tonic_health::pb::health_client::HealthClient::new(served.channel().await);
    let mut health = async |service: &str| {
        let request = tonic_health::pb::HealthCheckRequest { service: service.to_owned() };
        probe.check(request).await.unwrap().into_inner().status()
    };
    use tonic_health::pb::health_check_response::ServingStatus;
    for service in ["", "ostinato.v1.Ostinato", "vllm.grpc.engine.VllmEngine"] {
        assert_eq!(health(service).await, ServingStatus::Serving, "{service}: it takes calls");
    }
    let answer = get("/healthz").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("idle\n"), "{answer}");
    let mut client = served.client().await;
    let status = generate(&mut client, text_request("", "x", 1)).await.error.unwrap();
    assert_eq!((status.code(), status.message()), (Code::NotFound, "model \"\" is not served; served are none"));
    let mut theirs = vllm::grpc::engine::vllm_engine_client::VllmEngineClient::new(served.channel().await);
    let status = theirs.get_model_info(vllm::grpc::engine::GetModelInfoRequest {}).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "no model is served now"));
    let state = get("/api/state").await;
    assert!(
        state.contains(r#""configured":[{"name":"one","state":"unloaded","step":null,"endpoint":null}]"#),
        "{state}"
    );

    control.go.store(true, SeqCst);
    load(&mut client, "one", Replace::Beside).await.unwrap();
    assert!(get("/healthz").await.ends_with("serving\n"));
    let follow = ostinato::service::proto::smg::grpc::common::SubscribeKvEventsRequest::default();
    let mut pages = theirs.subscribe_kv_events(follow).await.unwrap().into_inner();
    assert!(pages.message().await.unwrap().is_some());
    assert_eq!(generate(&mut client, text_request("", "x", 4)).await.text(), "abca");
    let metrics = get("/metrics").await;
    assert!(metrics.contains("ostinato_replica_up{model=\"one\"") && metrics.contains("gen_ai_request_model=\"one\""));
    unload(&mut client, "one", 1.0).await.unwrap();
    let status = pages.message().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "model \"one\" has been unloaded"));
    let metrics = get("/metrics").await;
    assert!(!metrics.contains("\"one"), "its series have ended: {metrics}");

    // A load in progress does not delay the end of the server, and no other load begins.
    control.go.store(false, SeqCst);
    let mut events = client.load_model(load_request("one", Replace::Beside)).await.unwrap().into_inner();
    assert!(events.message().await.unwrap().is_some());
    served.stop.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(5), served.server).await;
    assert_eq!(ended.expect("the server ends").unwrap().unwrap().cut, 0);
    let error = host.load("one", Default::default(), Duration::ZERO, &Quiet).unwrap_err();
    assert!(matches!(error, LifecycleError::Stopping { .. }), "{error}");
    assert!(host.settle(Duration::from_secs(5)), "the load has ended");
    assert!(get("/healthz").await.starts_with("HTTP/1.1 503"));
    stop.cancel();
    page_server.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_endpoints_bounds_change_while_it_serves() {
    let (sender, changes) = tokio::sync::watch::channel(Options::default().changeable());
    let models = vec![model("one", Some(tokenizer(true)), vec![(0, fake(STEP, b"abc"))], 8)];
    let options = Options { changes: Some(changes), ..Options::default() };
    let served = serve_host(Host::new(models), options).await;
    let mut client = served.client().await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(client.generate(text_request("", "x", 1000)).await.unwrap().into_inner());
    }
    let before = *sender.borrow();
    sender.send_replace(Changeable { client_limit: Some(1), drain: Duration::ZERO, ..before });
    until("the limit is in force", async || {
        // Requests that were accepted without a limit are not counted.
        let held = client.clone().generate(text_request("", "x", 1000)).await.unwrap();
        let refused = client.clone().generate(text_request("", "x", 1)).await.is_err();
        drop(held);
        refused
    })
    .await;
    let begun = Instant::now();
    served.stop.cancel();
    let stopped = tokio::time::timeout(Duration::from_secs(5), served.server).await.unwrap().unwrap().unwrap();
    assert!(stopped.cut >= 2 && begun.elapsed() < Duration::from_secs(4), "{stopped:?}: the new drain is 0 s");
}

#[test]
fn only_what_a_configuration_names_is_loaded() {
    let host = Host::new(vec![model("one", None, vec![(0, fake(STEP, b"abc"))], 4)]);
    for name in ["one", "/", "embedded:demo"] {
        let error = host.load(name, Default::default(), Duration::ZERO, &Quiet).unwrap_err();
        assert!(matches!(&error, LifecycleError::NotConfigured { asked, .. } if asked == name), "{error}");
    }
}

//! The RPCs LoadModel and UnloadModel: they run the host's loads and unloads on blocking threads and stream the
//! progress. A load or unload continues if its caller disconnects. Not here: access rights.

use super::bounds;
use super::convert;
use super::proto;
use super::refusal::Refusal;
use super::rpc::{Scope, refused};
use crate::host::Host;
use crate::host::catalogue::{Listed, LoadState, Step};
use crate::host::lifecycle::{Loaded, Replace};
use crate::host::progress::{Progress, Unit};
use crate::telemetry::{names, spans};
use proto::load_model_response::Event;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tonic::Status;
use tracing::Span;

/// The number of events that are buffered for a slow caller. Events beyond that are dropped, except for the last one.
const EVENTS: usize = 256;
/// The minimum time between two progress events of the same activity.
const STEP_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum grace period of requests, in seconds.
const MOST_GRACE: f64 = 86_400.0;

type Message = Result<proto::LoadModelResponse, Status>;

/// The stream of events of a load.
#[derive(Debug)]
pub struct Loading(mpsc::Receiver<Message>);

impl Loading {
    /// Starts to load a model. Requests on a model that it replaces have the grace period `drain`.
    pub(super) fn start(
        host: &Arc<Host>,
        message: proto::LoadModelRequest,
        scope: Scope,
        drain: Duration,
        span: Span,
    ) -> Result<Loading, Refusal> {
        if message.name.is_empty() {
            return Err(Refusal::Missing { field: "name", rule: "the name of a model of the configuration" });
        }
        bounds::name("name", &message.name)?;
        scope.may_use(&message.name)?;
        let replace = match proto::Replace::try_from(message.replace) {
            Ok(proto::Replace::Beside) => Replace::Beside,
            Ok(proto::Replace::UnloadFirst) => Replace::UnloadFirst,
            Err(_) => {
                let (field, rule) = ("replace", "REPLACE_BESIDE or REPLACE_UNLOAD_FIRST");
                return Err(Refusal::Value { field, value: message.replace.to_string(), rule });
            }
        };
        let (sender, events) = mpsc::channel(EVENTS);
        // The channel is empty, so this cannot fail.
        let last = sender.clone().try_reserve_owned();
        let progress = ProgressSender { sender, last_step: Mutex::default() };
        let host = Arc::clone(host);
        tokio::task::spawn_blocking(move || {
            tracing::info!(model = message.name, "loading");
            let loaded = host.load(&message.name, replace, drain, &progress);
            let (answer, old) = match loaded {
                Ok(Loaded { model, old }) => {
                    spans::set(&span, names::RPC_GRPC_STATUS_CODE, tonic::Code::Ok as i64);
                    tracing::info!(model = message.name, "loaded");
                    let loads = model.replicas.iter().filter_map(|replica| replica.loaded.as_ref());
                    let loads = loads.map(convert::load_report).collect();
                    let loaded = proto::LoadedModel { model: Some(convert::model(&model)), loads };
                    (Ok(response(Event::Loaded(loaded))), old)
                }
                Err(error) => {
                    let refusal = scope.narrowed(&host, Refusal::Lifecycle(error));
                    tracing::warn!(model = message.name, error = %refusal, "not loaded");
                    (Err(refused(&span, &refusal)), None)
                }
            };
            drop(span);
            if let Ok(last) = last {
                // The caller may have disconnected.
                let _ = last.send(answer);
            }
            // The stream ends here; the replaced model is released without its caller.
            drop(progress);
            if let Some(old) = old {
                retired(&message.name, &host.retire(old, drain));
            }
        });
        Ok(Loading(events))
    }
}

fn retired(model: &str, unloaded: &crate::host::lifecycle::Unloaded) {
    tracing::info!(model, freed_bytes = unloaded.freed_bytes, cut = unloaded.cut, "unloaded");
}

impl tokio_stream::Stream for Loading {
    type Item = Message;

    fn poll_next(mut self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Message>> {
        self.0.poll_recv(context)
    }
}

fn response(event: Event) -> proto::LoadModelResponse {
    proto::LoadModelResponse { event: Some(event) }
}

/// Reports the progress of a load to its caller and to the log.
struct ProgressSender {
    sender: mpsc::Sender<Message>,
    /// The last reported activity, and when it was reported.
    last_step: Mutex<Option<(String, Instant)>>,
}

impl ProgressSender {
    fn send(&self, event: Event) {
        // The event is dropped if the buffer is full or the caller has disconnected.
        let _ = self.sender.try_send(Ok(response(event)));
    }
}

impl Progress for ProgressSender {
    fn line(&self, text: &str) {
        tracing::info!("{text}");
        self.send(Event::Line(text.to_owned()));
    }

    fn warning(&self, text: &str) {
        tracing::warn!("{text}");
        self.send(Event::Warning(text.to_owned()));
    }

    fn step(&self, what: &str, done: u64, total: u64, unit: Unit) {
        let now = Instant::now();
        {
            let mut last_step = self.last_step.lock().unwrap_or_else(PoisonError::into_inner);
            let soon = |(last, at): &(String, Instant)| last == what && now.duration_since(*at) < STEP_INTERVAL;
            if done < total && last_step.as_ref().is_some_and(soon) {
                return;
            }
            *last_step = Some((what.to_owned(), now));
        }
        self.send(Event::Progress(progress(&Step { what: what.to_owned(), done, total, unit })));
    }
}

fn progress(step: &Step) -> proto::LoadProgress {
    let unit = match step.unit {
        Unit::Bytes => proto::load_progress::Unit::Bytes,
        Unit::Count => proto::load_progress::Unit::Count,
    };
    proto::LoadProgress { what: step.what.clone(), done: step.done, total: step.total, unit: unit.into() }
}

/// Unloads a model. Its requests have the grace period of the message, or `drain` if the message has none.
pub(super) async fn unload(
    host: &Arc<Host>,
    message: proto::UnloadModelRequest,
    scope: &Scope,
    drain: Duration,
) -> Result<proto::UnloadModelResponse, Refusal> {
    if message.name.is_empty() {
        return Err(Refusal::Missing { field: "name", rule: "the name of a model" });
    }
    bounds::name("name", &message.name)?;
    scope.may_use(&message.name)?;
    let grace = match message.grace_seconds {
        None => drain,
        Some(seconds) if (0.0..=MOST_GRACE).contains(&seconds) => Duration::from_secs_f64(seconds),
        Some(other) => {
            let rule = const {
                assert!(MOST_GRACE == 86_400.0, "as the rule says");
                "from 0 to 86400"
            };
            return Err(Refusal::Value { field: "grace_seconds", value: other.to_string(), rule });
        }
    };
    let host = Arc::clone(host);
    super::rpc::on_blocking_thread(move || {
        let unloaded = host.unload(&message.name, grace).map_err(Refusal::Lifecycle)?;
        retired(&message.name, &unloaded);
        let cut = u32::try_from(unloaded.cut).unwrap_or(u32::MAX);
        Ok(proto::UnloadModelResponse { freed_bytes: unloaded.freed_bytes, cut })
    })
    .await
}

/// Converts a model of the configuration for ListModels; `endpoint` is the address of the model's own endpoint.
pub(super) fn listed(listed: &Listed, endpoint: Option<SocketAddr>) -> proto::Model {
    let mut model = match &listed.served {
        Some(served) => convert::model(served),
        None => proto::Model { name: listed.name.clone(), ..Default::default() },
    };
    let state = match listed.state {
        LoadState::Unloaded => proto::ModelState::Unloaded,
        LoadState::Loading => proto::ModelState::Loading,
        LoadState::Serving => proto::ModelState::Serving,
        LoadState::Unloading => proto::ModelState::Unloading,
    };
    model.state = state.into();
    model.loading = listed.step.as_ref().map(progress);
    model.endpoint = endpoint.map(|address| address.to_string()).unwrap_or_default();
    model
}

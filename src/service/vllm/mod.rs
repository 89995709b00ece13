//! The RPCs of `vllm.grpc.engine.VllmEngine`, the engine contract of existing routers: a thin adapter to the requests
//! of our own service. The contract has no model field, so it works on servers of one model and on the endpoints of
//! single models (`model_endpoints`). Its data-parallel ranks are the model's replicas.
//! Not here: anything that our own service does not support.

pub mod convert;
pub mod events;
pub mod tokenizer;

use super::bounds;
use super::inputs::Failure;
use super::prepare::{Prepared, Target};
use super::proto::{smg::grpc::common, vllm::grpc::engine as contract};
use super::refusal::Refusal;
use super::rpc::{Caller, Rpc, Scope, Tracked, answer, rpc_span};
use crate::host::{Host, ServedModel};
use crate::kernels::attention::PAGE_TOKENS;
use crate::model::text::Text;
use crate::replica::Replica;
use contract::vllm_engine_server::VllmEngine;
use convert::{EventConverter, signed, with_contract_names};
use events::PageEvents;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokenizer::{Archive, Chunks};
use tonic::{Request, Response, Status};

/// The package and the name of the service, as in spans and health checks.
pub const SERVICE: &str = "vllm.grpc.engine.VllmEngine";

/// The period over which throughput is averaged.
const THROUGHPUT_WINDOW: Duration = Duration::from_secs(2);
/// The interval at which a flush checks whether the replicas are idle.
const FLUSH_LOOK: Duration = Duration::from_millis(20);
/// The maximum time that a flush waits. The contract sets no limit.
const FLUSH_WAIT_MAX: Duration = Duration::from_secs(3600);

/// The implementation of the contract.
#[derive(Debug)]
pub struct VllmRpc {
    rpc: Rpc,
    began: Instant,
    /// The time of the last Generate call: the bits of a number of seconds since 1970.
    last_received: AtomicU64,
    /// The packed tokenizer, after the first request for it.
    archive: Arc<Mutex<Option<Packed>>>,
}

/// The archive of a tokenizer's files, and the tokenizer that it was made from.
type Packed = (Weak<Text>, Arc<Archive>);

impl VllmRpc {
    /// Creates the service with the host, clients and streams of our own service.
    pub fn new(rpc: Rpc) -> VllmRpc {
        VllmRpc { rpc, began: Instant::now(), last_received: AtomicU64::new(0), archive: Arc::default() }
    }

    fn host(&self) -> &Arc<Host> {
        self.rpc.host()
    }

    /// Looks up the only model that a caller may use.
    fn model(&self, scope: &Scope) -> Result<Arc<ServedModel>, Refusal> {
        scope.only_model(self.host())
    }

    /// Runs `work`, which may wait for the model's engine threads, on a thread that may block.
    async fn of_model<T: Send + 'static>(
        &self,
        scope: &Scope,
        work: impl FnOnce(&ServedModel) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let model = self.model(scope)?;
        self.rpc.ask(move || work(&model)).await
    }

    /// Returns the tokenizer's files as an archive, which is made once.
    async fn packed(&self, scope: &Scope) -> Result<Arc<Archive>, Refusal> {
        let model = self.model(scope)?;
        let no_tokenizer = || Refusal::NoTokenizer { model: model.name.clone(), field: "GetTokenizer" };
        let text = Arc::clone(model.text.as_ref().ok_or_else(no_tokenizer)?);
        let kept = Arc::clone(&self.archive);
        // Packed once, under the lock; other calls wait.
        let packed = move || {
            // Every change is complete, so a poisoned lock is harmless.
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((whose, archive)) = &*kept
                && Weak::as_ptr(whose) == Arc::as_ptr(&text)
            {
                return Ok(Arc::clone(archive));
            }
            let packed = Arc::new(Archive::of(text.files())?);
            *kept = Some((Arc::downgrade(&text), Arc::clone(&packed)));
            Ok(packed)
        };
        self.rpc.ask(packed).await
    }

    /// Clears the prefix caches of the model's replicas as soon as no request runs or waits; waits for that for at most
    /// `timeout` seconds.
    async fn flush(
        &self,
        scope: &Scope,
        timeout: f32,
        deadline: Option<Instant>,
    ) -> Result<common::FlushCacheResponse, Refusal> {
        if !timeout.is_finite() || timeout < 0.0 {
            let (field, rule) = ("timeout_s", "finite and at least 0");
            return Err(Refusal::Value { field, value: timeout.to_string(), rule });
        }
        let wait = Duration::try_from_secs_f32(timeout).unwrap_or(FLUSH_WAIT_MAX).min(FLUSH_WAIT_MAX);
        let until = Instant::now() + wait;
        let until = deadline.map_or(until, |deadline| deadline.min(until));
        let model = self.model(scope)?;
        loop {
            let asked = Arc::clone(&model);
            let busy = self.rpc.ask(move || {
                // The caches of a replica that has stopped are gone.
                let busy = asked.replicas.iter().filter(|replica| !replica.forget_prompts() && !replica.stopped());
                Ok(busy.map(|replica| replica.name.clone()).collect::<Vec<_>>())
            });
            let busy = busy.await?;
            if busy.is_empty() {
                model.forget_prompts();
                let message = "all pages and states that prompts could begin with are forgotten".to_owned();
                return Ok(common::FlushCacheResponse { success: true, message });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.rpc.stop().is_cancelled() {
                let message = format!("requests run or wait on {}", busy.join(", "));
                return Ok(common::FlushCacheResponse { success: false, message });
            }
            tokio::time::sleep(left.min(FLUSH_LOOK)).await;
        }
    }

    /// Times the kernels of the next `plans` plans of every replica.
    async fn profile(&self, scope: &Scope, plans: u32) -> Result<(), Refusal> {
        let ask = move |model: &ServedModel| {
            for replica in &model.replicas {
                replica.profile(plans);
            }
            Ok(())
        };
        self.of_model(scope, ask).await
    }
}

/// Returns the number of plans that a StartProfile message asks for.
fn plans(message: &common::StartProfileRequest) -> Result<u32, Refusal> {
    let not_served = [
        ("start_step", message.start_step.unwrap_or(0) != 0),
        ("with_stack", message.with_stack.unwrap_or(false)),
        ("record_shapes", message.record_shapes.unwrap_or(false)),
        ("profile_by_stage", message.profile_by_stage),
    ];
    if let Some((field, _)) = not_served.into_iter().find(|(_, set)| *set) {
        return Err(Refusal::NotServed { field });
    }
    let refuse = |field, value: String, rule| Err(Refusal::Value { field, value, rule });
    if let Some(folder) = &message.output_dir {
        return refuse("output_dir", format!("{folder:?}"), "unset: no request names a folder of the server");
    }
    let recorded = |activity: &&String| ["CPU", "GPU"].iter().any(|name| activity.eq_ignore_ascii_case(name));
    if let Some(other) = message.activities.iter().find(|activity| !recorded(activity)) {
        return refuse("activities", format!("{other:?}"), "CPU and GPU, which are both recorded");
    }
    match message.num_steps {
        None => Ok(u32::MAX),
        Some(steps) if steps > 0 => Ok(steps.unsigned_abs()),
        Some(other) => refuse("num_steps", other.to_string(), "at least 1"),
    }
}

/// Returns the load of a replica. Waits for its engine thread.
fn load(rank: usize, replica: &Replica) -> contract::SchedulerLoad {
    let load = replica.load();
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let tokens = |pages: u32| signed(pages.saturating_mul(PAGE_TOKENS));
    let waiting = replica.requests().into_iter().filter(|request| request.phase == "waiting");
    let slots = replica.slots();
    contract::SchedulerLoad {
        dp_rank: i32::try_from(rank).unwrap_or(i32::MAX),
        num_running_reqs: signed(load.running),
        num_waiting_reqs: signed(load.waiting),
        num_total_reqs: signed(load.running + load.waiting),
        num_used_tokens: tokens(load.pages_used),
        max_total_num_tokens: tokens(load.pages_total),
        token_usage: share(f64::from(load.pages_used), f64::from(load.pages_total)),
        gen_throughput: replica.tokens_per_second(THROUGHPUT_WINDOW),
        cache_hit_rate: share(load.cached_tokens as f64, load.prompt_tokens as f64),
        utilization: share(f64::from(load.running), slots as f64),
        max_running_requests: i32::try_from(slots).unwrap_or(i32::MAX),
        num_waiting_uncached_tokens: signed(waiting.map(|request| request.prompt_tokens).fold(0, u32::saturating_add)),
    }
}

fn since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[tonic::async_trait]
impl VllmEngine for VllmRpc {
    type GenerateStream = Answers;
    type GetTokenizerStream = Chunks;
    type SubscribeKvEventsStream = PageEvents;

    async fn generate(&self, request: Request<contract::GenerateRequest>) -> Result<Response<Answers>, Status> {
        let span = rpc_span(SERVICE, "Generate", request.metadata());
        self.last_received.store(since_1970().to_bits(), Ordering::Relaxed);
        let started = async {
            let caller = Caller::of(&request);
            let model = self.model(&caller.scope)?;
            let asked = convert::request(&model, request.into_inner())?;
            let place = Target::of(self.host(), model, &asked.replica)?;
            let rest = asked.rest;
            let adjust = move |prepared: &mut Prepared| rest.apply(prepared);
            let (stream, first) = self.rpc.open(&span, &caller, place, asked.message, rest.keep, adjust).await?;
            Ok(Answers { stream, converter: EventConverter::new(asked.stream, first) })
        };
        self.rpc.stream_response(&span, started.await.map_err(with_contract_names))
    }

    async fn embed(
        &self,
        request: Request<contract::EmbedRequest>,
    ) -> Result<Response<contract::EmbedResponse>, Status> {
        let span = rpc_span(SERVICE, "Embed", request.metadata());
        self.last_received.store(since_1970().to_bits(), Ordering::Relaxed);
        let caller = Caller::of(&request);
        let answered = async {
            let place = Target::of(self.host(), self.model(&caller.scope)?, "")?;
            let call = convert::embed_call(request.into_inner())?;
            self.rpc.vectors(&span, &caller, place, call).await.map(convert::embedded)
        };
        let answered = answered.await.map_err(|failure| match failure {
            Failure::Refused(refusal) => Failure::Refused(with_contract_names(refusal)),
            ended => ended,
        });
        self.rpc.unary_response(&span, answered)
    }

    async fn health_check(
        &self,
        request: Request<contract::HealthCheckRequest>,
    ) -> Result<Response<contract::HealthCheckResponse>, Status> {
        let span = rpc_span(SERVICE, "HealthCheck", request.metadata());
        let why = match self.model(&Caller::of(&request).scope) {
            Err(refusal) => Some(refusal.to_string()),
            Ok(model) => {
                let rebuilding = |replica: &Replica| {
                    replica.rebuilding().then(|| format!("the device of {} is being rebuilt", replica.name))
                };
                let closed =
                    model.replicas.iter().filter_map(|replica| replica.closed().or_else(|| rebuilding(replica)));
                let closed: Vec<_> = closed.collect();
                (closed.len() == model.replicas.len()).then(|| closed.join("; "))
            }
        };
        let response = contract::HealthCheckResponse { healthy: why.is_none(), message: why.unwrap_or_default() };
        answer(&span, Ok(response))
    }

    async fn flush_cache(
        &self,
        request: Request<common::FlushCacheRequest>,
    ) -> Result<Response<common::FlushCacheResponse>, Status> {
        let span = rpc_span(SERVICE, "FlushCache", request.metadata());
        let flushed = async {
            let caller = Caller::of(&request);
            self.flush(&caller.scope, request.into_inner().timeout_s, caller.deadline()?).await
        };
        answer(&span, flushed.await)
    }

    async fn start_profile(
        &self,
        request: Request<common::StartProfileRequest>,
    ) -> Result<Response<common::ProfileResponse>, Status> {
        let span = rpc_span(SERVICE, "StartProfile", request.metadata());
        let started = async {
            self.profile(&Caller::of(&request).scope, plans(request.get_ref())?).await?;
            let message = "kernels are timed; ostinato.v1.Ostinato/Profile shows them".to_owned();
            Ok(common::ProfileResponse { success: true, message })
        };
        answer(&span, started.await)
    }

    async fn stop_profile(
        &self,
        request: Request<common::StopProfileRequest>,
    ) -> Result<Response<common::ProfileResponse>, Status> {
        let span = rpc_span(SERVICE, "StopProfile", request.metadata());
        let stopped = self.profile(&Caller::of(&request).scope, 0).await.map(|()| {
            let message =
                "kernels are not timed any more; ostinato.v1.Ostinato/Profile shows those that were".to_owned();
            common::ProfileResponse { success: true, message }
        });
        answer(&span, stopped)
    }

    async fn abort(
        &self,
        request: Request<contract::AbortRequest>,
    ) -> Result<Response<contract::AbortResponse>, Status> {
        let span = rpc_span(SERVICE, "Abort", request.metadata());
        let caller = Caller::of(&request);
        let ids = request.into_inner().request_ids;
        if let Err(refusal) = bounds::aborts(ids.len()) {
            return answer(&span, Err(refusal));
        }
        if ids.iter().any(String::is_empty) {
            let rule = "the ids of the requests to end";
            return answer(&span, Err(Refusal::Missing { field: "request_ids", rule }));
        }
        ids.iter().for_each(|id| self.rpc.abort_request(&caller, id));
        answer(&span, Ok(contract::AbortResponse {}))
    }

    async fn get_model_info(
        &self,
        request: Request<contract::GetModelInfoRequest>,
    ) -> Result<Response<contract::GetModelInfoResponse>, Status> {
        let span = rpc_span(SERVICE, "GetModelInfo", request.metadata());
        let caller = Caller::of(&request);
        let info = self.model(&caller.scope).map(|model| convert::model_info(&model));
        answer(&span, info)
    }

    async fn get_server_info(
        &self,
        request: Request<contract::GetServerInfoRequest>,
    ) -> Result<Response<contract::GetServerInfoResponse>, Status> {
        let span = rpc_span(SERVICE, "GetServerInfo", request.metadata());
        let info = self.model(&Caller::of(&request).scope).map(|model| {
            let slots = model.replicas.iter().map(|replica| replica.slots()).min().unwrap_or(0);
            contract::GetServerInfoResponse {
                active_requests: model.replicas.iter().map(|replica| replica.unfinished()).sum::<usize>() as u32,
                last_receive_timestamp: f64::from_bits(self.last_received.load(Ordering::Relaxed)),
                uptime_seconds: self.began.elapsed().as_secs_f64(),
                server_type: "ostinato".to_owned(),
                data_parallel_size: model.replicas.len() as i32,
                block_size: signed(PAGE_TOKENS),
                max_num_seqs: i32::try_from(slots).unwrap_or(i32::MAX),
                ..Default::default()
            }
        });
        answer(&span, info)
    }

    async fn get_loads(
        &self,
        request: Request<contract::GetLoadsRequest>,
    ) -> Result<Response<contract::GetLoadsResponse>, Status> {
        let span = rpc_span(SERVICE, "GetLoads", request.metadata());
        let caller = Caller::of(&request);
        let message = request.into_inner();
        let loads = self.of_model(&caller.scope, move |model| {
            if let Some(rank) = message.dp_rank {
                convert::replica(model, "dp_rank", rank)?;
            }
            let asked = |rank: &usize| message.dp_rank.is_none_or(|asked| asked as usize == *rank);
            let ranks = (0..model.replicas.len()).filter(asked);
            Ok(ranks.map(|rank| load(rank, &model.replicas[rank])).collect::<Vec<_>>())
        });
        let response = loads.await.map(|loads| contract::GetLoadsResponse {
            timestamp: convert::timestamp(SystemTime::now()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            dp_rank_count: loads.len() as i32,
            loads,
        });
        answer(&span, response)
    }

    async fn get_tokenizer(&self, request: Request<common::GetTokenizerRequest>) -> Result<Response<Chunks>, Status> {
        let span = rpc_span(SERVICE, "GetTokenizer", request.metadata());
        let caller = Caller::of(&request);
        answer(&span, self.packed(&caller.scope).await.map(Chunks::of))
    }

    async fn subscribe_kv_events(
        &self,
        request: Request<common::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        let span = rpc_span(SERVICE, "SubscribeKvEvents", request.metadata());
        let caller = Caller::of(&request);
        let from = request.into_inner().start_sequence_number;
        if from != 0 {
            return answer(&span, Err(Refusal::Past { field: "start_sequence_number", value: from }));
        }
        let stop = self.rpc.stop().clone();
        let events = self.of_model(&caller.scope, move |model| Ok(PageEvents::of(model, stop)));
        answer(&span, events.await)
    }
}

/// The stream of a generation, in the contract's messages.
#[derive(Debug)]
pub struct Answers {
    stream: Tracked,
    converter: EventConverter,
}

impl tokio_stream::Stream for Answers {
    type Item = Result<contract::GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let told = match ready!(Pin::new(&mut self.stream).poll_next(context)) {
                None => return Poll::Ready(None),
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                Some(Ok(message)) => message.event.and_then(|event| self.converter.convert(event)),
            };
            if let Some(response) = told {
                return Poll::Ready(Some(Ok(response)));
            }
        }
    }
}

//! All metrics in the text format of OpenMetrics 1.0 (Prometheus). Counts and histograms of requests come from
//! `telemetry::requests`; everything else is read from the host at each scrape, without waiting for an engine thread.
//! Not here: HTTP, and the names (`telemetry::names`); `docs/metrics.md` explains each metric.

use crate::actors::transfer::TransferCounters;
use crate::engine::request::PerToken;
use crate::engine::scheduler::EngineLoad;
use crate::engine::variants::Fallback;
use crate::host::{DeviceMemory, ServedDevice};
use crate::host::{Host, ServedModel};
use crate::kernels::attention::PAGE_TOKENS;
use crate::replica::Replica;
use crate::replica::totals::PhaseTotals;
use crate::service::refusal::code_name;
use crate::telemetry::names::*;
use crate::telemetry::requests::{Labels, counter_family};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tonic::Code;

/// The `Content-Type` of the output of [`render`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The codes with which a request can be refused before it starts. Their counters exist from the start.
const CODES: [Code; 10] = [
    Code::InvalidArgument,
    Code::NotFound,
    Code::AlreadyExists,
    Code::ResourceExhausted,
    Code::FailedPrecondition,
    Code::Unimplemented,
    Code::Internal,
    Code::Unavailable,
    Code::Unauthenticated,
    Code::PermissionDenied,
];

/// The gauges that are computed at each scrape from values kept for other purposes.
#[derive(Default)]
struct Scrape(Registry);

impl Scrape {
    fn gauge(&mut self, name: &str, help: &str, series: impl IntoIterator<Item = (Labels, f64)>) {
        let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in series {
            family.get_or_create(&labels).set(value);
        }
        self.0.register(name, help, family);
    }

    fn counter(&mut self, name: &str, help: &str, series: impl IntoIterator<Item = (Labels, f64)>) {
        let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
        for (labels, value) in series {
            family.get_or_create(&labels).inc_by(value);
        }
        self.0.register(counter_family(name), help, family);
    }
}

/// Renders all metrics; with `None`, those of a server whose models are still loading.
pub fn render(host: Option<&Host>) -> String {
    let mut scrape = Scrape::default();
    let version = vec![(LABEL_VERSION, env!("CARGO_PKG_VERSION").to_owned())];
    scrape.gauge(METRIC_BUILD_INFO, "1, with the version", [(version, 1.0)]);
    let ready = f64::from(u8::from(host.is_some()));
    scrape.gauge(METRIC_READY, "1 once all models are loaded", [(Labels::new(), ready)]);
    if let Some(host) = host {
        let look = Look { host, models: host.models(), devices: host.devices() };
        requests(&mut scrape, &look);
        replicas(&mut scrape, &look);
        steps(&mut scrape, &look);
        kernels(&mut scrape, &look);
        devices(&mut scrape, &look);
        endpoint_pickers(&mut scrape, &look);
    }
    let mut text = String::new();
    encode(&mut text, &scrape.0).expect("a string takes all that is written to it");
    text
}

/// The served models at the time of a scrape, so that all series describe the same models.
struct Look<'a> {
    host: &'a Host,
    models: Arc<Vec<Arc<ServedModel>>>,
    devices: Vec<ServedDevice>,
}

impl Look<'_> {
    /// The replicas, model by model, each with its labels.
    fn all(&self) -> impl Iterator<Item = (Labels, &Replica)> {
        self.models.iter().flat_map(|model| {
            let labels = |of: &Replica| vec![(LABEL_MODEL, model.name.clone()), (LABEL_REPLICA, of.name.clone())];
            model.replicas.iter().map(move |replica| (labels(replica), &**replica))
        })
    }
}

fn with(labels: &Labels, more: &[(&'static str, &str)]) -> Labels {
    let more = more.iter().map(|(name, value)| (*name, (*value).to_owned()));
    labels.iter().cloned().chain(more).collect()
}

fn requests(scrape: &mut Scrape, look: &Look<'_>) {
    let ended = &look.host.ended;
    // A model that is being removed disappears from the metrics with its last request.
    let known: Vec<String> = look.host.models_and_leaving().iter().map(|model| model.name.clone()).collect();
    ended.keep_models(&|model| known.iter().any(|name| name == model));
    for model in &*look.models {
        model.replicas.iter().for_each(|replica| ended.expect_replica(&model.name, &replica.name));
    }
    CODES.into_iter().for_each(|code| ended.expect_code(code_name(code)));
    ended.register(&mut scrape.0);
    let texts = look.models.iter().filter_map(|model| Some((&model.name, model.text.as_ref()?.constraint_uses())));
    let constraints = texts.flat_map(|(model, uses)| {
        [("compiled", uses.compiled), ("kept", uses.kept)]
            .map(|(from, count)| (vec![(LABEL_MODEL, model.clone()), (LABEL_FROM, from.to_owned())], count as f64))
    });
    scrape.counter(METRIC_CONSTRAINTS, "Requests whose outputs were to be constrained", constraints);
}

fn replicas(scrape: &mut Scrape, look: &Look<'_>) {
    type Read = fn(&Replica) -> f64;
    let gauges: [(&str, &str, Read); 4] = [
        (
            METRIC_REPLICA_UP,
            "0 once the replica's device or engine has failed, and while a lost device is being rebuilt",
            |r| f64::from(u8::from(!r.failed() && !r.rebuilding())),
        ),
        (METRIC_REPLICA_CLOSED, "1 while the replica takes no requests", |r| f64::from(u8::from(r.closed().is_some()))),
        (METRIC_SLOTS, "Sequences that can run at once", |r| r.slots() as f64),
        (METRIC_ROOM, "Requests that would be taken now", |r| r.room() as f64),
    ];
    for (name, help, read) in gauges {
        scrape.gauge(name, help, look.all().map(|(labels, replica)| (labels, read(replica))));
    }
    // Reads each replica once, so that its numbers are consistent.
    let loads: Vec<(Labels, EngineLoad)> = look.all().map(|(labels, replica)| (labels, replica.load())).collect();
    type Of = fn(&EngineLoad) -> f64;
    let gauges: [(&str, &str, Of); 6] = [
        (METRIC_RUNNING, "Sequences that hold a slot", |l| f64::from(l.running)),
        (METRIC_WAITING, "Requests in the queue", |l| f64::from(l.waiting)),
        (METRIC_KV_PAGES, "KV pages in all", |l| f64::from(l.pages_total)),
        (METRIC_KV_PAGES_USED, "KV pages in use", |l| f64::from(l.pages_used)),
        (METRIC_KV_PAGES_CACHED, "Free KV pages that a prompt may still find", |l| f64::from(l.pages_cached)),
        (METRIC_SNAPSHOTS, "Snapshots of recurrent state that a prompt may find", |l| f64::from(l.snapshots)),
    ];
    let series = |read: Of| loads.iter().map(move |(labels, load)| (labels.clone(), read(load)));
    for (name, help, read) in gauges {
        scrape.gauge(name, help, series(read));
    }
    let losses = look.all().map(|(labels, replica)| (labels, replica.losses() as f64));
    scrape.counter(METRIC_LOSSES, "How often the replica's device was lost", losses);
    let faults = look.all().map(|(labels, replica)| (labels, replica.faults() as f64));
    scrape.counter(METRIC_OVERLAP_FAULTS, "Decode steps in which a kernel timed out, and that were run again", faults);
    let counters: [(&str, &str, Of); 5] = [
        (METRIC_PROMPT_TOKENS, "Tokens of prompts that started", |l| l.prompt_tokens as f64),
        (METRIC_PREFIX_HIT_TOKENS, "Of the prompts' tokens those found in pages", |l| l.cached_tokens as f64),
        (METRIC_PREEMPTIONS, "Sequences that lost their pages to others, or with their device", |l| {
            l.preemptions as f64
        }),
        (METRIC_DRAFTED_TOKENS, "Tokens that were drafted and verified", |l| l.drafted_tokens as f64),
        (METRIC_ACCEPTED_TOKENS, "Of the drafted tokens those that were right", |l| l.accepted_tokens as f64),
    ];
    for (name, help, read) in counters {
        scrape.counter(name, help, series(read));
    }
}

fn steps(scrape: &mut Scrape, look: &Look<'_>) {
    let mut phases: Vec<(Labels, PhaseTotals)> = Vec::new();
    let (mut rows, mut computed) = (Vec::new(), Vec::new());
    for (labels, replica) in look.all() {
        let totals = replica.totals();
        for (phase, of) in [("prefill", totals.prefill), ("decode", totals.decode)] {
            phases.push((with(&labels, &[(LABEL_PHASE, phase)]), of));
        }
        rows.push((labels.clone(), totals.decode.rows as f64));
        computed.push((labels, totals.prefill.rows as f64));
    }
    scrape.counter(METRIC_ROWS, "Rows of decode steps", rows);
    scrape.counter(METRIC_PROMPT_TOKENS_COMPUTED, "Prompt tokens that steps computed", computed);
    type Of = fn(&PhaseTotals) -> f64;
    let counters: [(&str, &str, Of); 7] = [
        (METRIC_PLANS, "Plans that the device finished", |t| t.plans as f64),
        (METRIC_STEPS, "Steps of finished plans", |t| t.steps as f64),
        (METRIC_TOKENS, "Tokens that steps drew", |t| t.tokens as f64),
        (METRIC_SUBMITS, "Submissions to the compute queue", |t| t.cost.submits),
        (METRIC_DISPATCHES, "Dispatches", |t| t.cost.dispatches),
        (METRIC_BARRIERS, "Pipeline barriers on the compute queue", |t| t.cost.barriers),
        (METRIC_HOST_WAITS, "Blocking waits of the host", |t| t.cost.host_waits),
    ];
    for (name, help, read) in counters {
        scrape.counter(name, help, phases.iter().map(|(labels, totals)| (labels.clone(), read(totals))));
    }
    let parts = phases.iter().flat_map(|(labels, totals)| {
        [("host", totals.host), ("gpu", totals.gpu), ("wait", totals.wait)]
            .map(|(part, time)| (with(labels, &[(LABEL_PART, part)]), time.as_secs_f64()))
    });
    scrape.counter(METRIC_STEP_SECONDS, "Time of steps: the host's work, the device's, waiting for the host", parts);
    let reasons = phases.iter().flat_map(|(labels, totals)| {
        let PerToken { flushes, .. } = totals.cost;
        [
            ("phase_boundary", flushes.phase_boundary),
            ("readback", flushes.readback),
            ("cross_queue", flushes.cross_queue),
        ]
        .map(|(reason, count)| (with(labels, &[(LABEL_REASON, reason)]), count))
    });
    scrape.counter(METRIC_FLUSHES, "Submissions by why they ended where they did", reasons);
}

fn kernels(scrape: &mut Scrape, look: &Look<'_>) {
    let variants = look.all().flat_map(|(labels, replica)| {
        let of = |variant: &crate::engine::variants::Variant| {
            [(LABEL_REGION, &*variant.region), (LABEL_STAGE, &*variant.stage), (LABEL_VARIANT, variant.kernel)]
                .map(|(name, value)| (name, value.to_owned()))
        };
        let variants = replica.variants();
        let calls = variants.calls().iter();
        let labelled = calls.map(|variant| (labels.iter().cloned().chain(of(variant)).collect(), 1.0));
        labelled.collect::<Vec<(Labels, f64)>>()
    });
    scrape.gauge(METRIC_KERNEL_VARIANT_INFO, "1, with the kernel that computes a stage of a region", variants);
    let fallbacks = look.all().flat_map(|(labels, replica)| {
        Fallback::ALL.map(|what| (with(&labels, &[(LABEL_WHAT, what.name())]), replica.variants().fallen(what) as f64))
    });
    scrape.counter(METRIC_FALLBACKS, "How often a slower way was taken than the program has", fallbacks);
}

fn device(of: &ServedDevice) -> Labels {
    vec![(LABEL_DEVICE, of.info.name.clone()), (LABEL_UUID, of.info.uuid.clone())]
}

/// Returns whether a device works. For a fake device, which has no live state, its replicas say so.
fn works(look: &Look<'_>, of: &ServedDevice) -> bool {
    match &of.status {
        Some(status) => !status.is_lost(),
        None => look
            .all()
            .filter(|(_, replica)| replica.devices().any(|device| *device == of.info))
            .all(|(_, replica)| !replica.failed()),
    }
}

/// Renders the memory of the devices as drivers report it.
fn memory(scrape: &mut Scrape, devices: &[(Labels, DeviceMemory)]) {
    let heaps = devices.iter().map(|(labels, memory)| (labels.clone(), memory.heap_bytes as f64));
    scrape.gauge(METRIC_DEVICE_MEMORY_HEAP, "Size of the device's own memory", heaps);
    // A driver may not report memory; then there is no series.
    let told = || devices.iter().filter_map(|(labels, memory)| Some((labels, memory.budget?)));
    let may = told().map(|(labels, budget)| (labels.clone(), budget.budget_bytes as f64));
    scrape.gauge(METRIC_DEVICE_MEMORY_BUDGET, "What this process may use of the device's memory in all", may);
    let does = told().map(|(labels, budget)| (labels.clone(), budget.used_bytes as f64));
    scrape.gauge(METRIC_DEVICE_MEMORY_USED, "What this process uses of the device's memory", does);
}

fn devices(scrape: &mut Scrape, look: &Look<'_>) {
    let up = look.devices.iter().map(|of| (device(of), f64::from(u8::from(works(look, of)))));
    scrape.gauge(METRIC_DEVICE_UP, "0 once the device is lost", up);
    let memories = look.devices.iter().filter_map(|of| Some((device(of), of.status.as_ref()?.memory())));
    memory(scrape, &memories.collect::<Vec<_>>());

    let plan = look.devices.iter().flat_map(|of| {
        of.memory.iter().map(move |line| {
            let side = if line.on_device { "device" } else { "host" };
            let purpose = line.purpose.replace(' ', "_");
            let more = [(LABEL_REPLICA, &*line.replica), (LABEL_PURPOSE, &*purpose), (LABEL_SIDE, side)];
            (with(&device(of), &more), line.bytes as f64)
        })
    });
    scrape.gauge(METRIC_MEMORY_PLAN, "What memory was planned for", plan);

    let transfers = look.devices.iter().filter_map(|of| Some((device(of), of.status.as_ref()?.transfer_counters())));
    let transfers: Vec<(Labels, TransferCounters)> = transfers.collect();
    type Of = fn(&TransferCounters) -> u64;
    let counters: [(&str, &str, Of); 4] = [
        (METRIC_TRANSFER_SUBMITS, "Submissions to the transfer queue", |t| t.submits),
        (METRIC_TRANSFER_COPIES, "Copy commands on the transfer queue", |t| t.copies),
        (METRIC_TRANSFER_BYTES, "Bytes copied on the transfer queue", |t| t.bytes),
        (METRIC_TRANSFER_BARRIERS, "Barriers on the transfer queue", |t| t.barriers),
    ];
    for (name, help, read) in counters {
        scrape.counter(name, help, transfers.iter().map(|(labels, of)| (labels.clone(), read(of) as f64)));
    }
}

/// Renders the metrics that endpoint pickers read, under vLLM's names.
fn endpoint_pickers(scrape: &mut Scrape, look: &Look<'_>) {
    let sums: Vec<(Labels, EngineLoad)> = look.models.iter().map(|model| (model_name(model), sum(model))).collect();
    type Of = fn(&EngineLoad) -> f64;
    let gauges: [(&str, &str, Of); 3] = [
        (METRIC_VLLM_WAITING, "Requests in the queues of the model's replicas", |l| f64::from(l.waiting)),
        (METRIC_VLLM_RUNNING, "Sequences of the model that hold a slot", |l| f64::from(l.running)),
        (METRIC_VLLM_KV_CACHE_USAGE, "KV pages in use, 0 to 1", |l| {
            f64::from(l.pages_used) / f64::from(l.pages_total.max(1))
        }),
    ];
    for (name, help, read) in gauges {
        scrape.gauge(name, help, sums.iter().map(|(labels, load)| (labels.clone(), read(load))));
    }
    let config = sums.iter().map(|(labels, load)| {
        let (tokens, pages) = (PAGE_TOKENS.to_string(), load.pages_total.to_string());
        (with(labels, &[(LABEL_BLOCK_SIZE, &tokens), (LABEL_NUM_GPU_BLOCKS, &pages)]), 1.0)
    });
    scrape.gauge(METRIC_VLLM_CACHE_CONFIG_INFO, "1, with the tokens of a KV page and the number of pages", config);
}

fn model_name(model: &ServedModel) -> Labels {
    vec![(LABEL_MODEL_NAME, model.name.clone())]
}

/// Returns the load of a model: the sum over its replicas.
fn sum(model: &ServedModel) -> EngineLoad {
    model.replicas.iter().map(|replica| replica.load()).fold(EngineLoad::default(), |sum, load| EngineLoad {
        running: sum.running + load.running,
        waiting: sum.waiting + load.waiting,
        pages_used: sum.pages_used + load.pages_used,
        pages_total: sum.pages_total + load.pages_total,
        ..sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::MemoryShare;

    #[test]
    fn memory_is_shown_as_far_as_the_driver_tells_of_it() {
        let labels = |device: &str| vec![(LABEL_DEVICE, device.to_owned()), (LABEL_UUID, format!("{device}-0"))];
        let share = MemoryShare { budget_bytes: 5000, used_bytes: 700 };
        let of = |reported: bool| DeviceMemory { heap_bytes: 1 << 34, budget: reported.then_some(share) };
        let mut scrape = Scrape::default();
        memory(&mut scrape, &[(labels("tells"), of(true)), (labels("silent"), of(false))]);
        let mut text = String::new();
        encode(&mut text, &scrape.0).unwrap();
        let mut lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            [
                r#"ostinato_device_memory_budget_bytes{device="tells",uuid="tells-0"} 5000.0"#,
                r#"ostinato_device_memory_heap_bytes{device="silent",uuid="silent-0"} 17179869184.0"#,
                r#"ostinato_device_memory_heap_bytes{device="tells",uuid="tells-0"} 17179869184.0"#,
                r#"ostinato_device_memory_used_bytes{device="tells",uuid="tells-0"} 700.0"#,
            ]
        );
    }
}

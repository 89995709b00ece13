//! The data of the admin endpoint as JSON. Not here: HTTP.
//!
//! All times are microseconds since the server's start, on the host's monotonic clock; lengths are microseconds, sizes
//! bytes. `null` stands for what is not known. Fields may be added.
//!
//! `/api/state` is answered without waiting for anything:
//!
//! - `version`; `now`; `status`: `loading`, `serving`, `idle` (no model is loaded, and one can be) or `closed` (no replica takes
//!   requests); `warnings[]` (sentences, as `/healthz` has them); `endpoint`: `ADDR` of gRPC
//! - `http`: the endpoint of OpenAI's API, `null` without one: `scheme`, `host` (`null`: the one under which the page was opened),
//!   `port`, `tokens` (whether requests need a token)
//! - `loading`: `step` (`what`, `done`, `total`, `unit`: `bytes` or `things`, `begun`; `null` when over), `lines`
//! - `devices[]`: `index`, `name`, `uuid`, `pci`; `driver`, `path` of its kernels, `lacks[]` (`what`, `cost`), as `check-device` has
//!   them; `heap_bytes`, `budget_bytes`, `used_bytes` of its own memory, as far as the driver says; `plan[]`: `replica`, `purpose`, `side` (`device` or `host`), `bytes`; `transfer`: `submits`, `copies`,
//!   `bytes`, `barriers` so far
//! - `models[]`: `name`, `architecture`, `context`, `vocabulary`, `parameters`, `active_parameters`, `weight_bytes`,
//!   `embeddings_only` (whether it draws no tokens), `bytes_per_token`; `replicas[]`: `name`, `device` (an index), `stages[]` of a split one (`device`, `first_layer`, `layers`), `slots`, `room`, `unfinished`, `closed` (why it takes no
//!   requests), `rebuilding` (its device was lost and is being rebuilt), `faults` (how often a kernel of a decode step timed
//!   out and the step was run again), `last_fault` (when; `null`: never), `running`, `waiting`, `pages_used`, `pages_cached`,
//!   `pages_total`, `snapshots`, `prompt_tokens`, `cached_tokens`, `preemptions`, `drafted_tokens`, of them
//!   `accepted_tokens`, and `output_tokens` so far
//! - `configured[]`: `name`, `state` (`unloaded`, `loading`, `serving` or `unloading`), of a load `step` as above without `begun`,
//!   and `endpoint`: `ADDR` of the gRPC endpoint that serves this model only (`null` without one)
//!
//! `/api/steps?replica=NAME[&from=NUMBER][&last=COUNT]` gives a replica's step ring: what is kept from NUMBER on, or the last
//! COUNT: `now`, `replica`, `next` (the number to ask from next), `steps[]`: `number`, `phase`, `rows`, `steps`, `tokens`,
//! `planned`, `taken`, `requests`, `running`, `waiting`, `pages_used`, `faults`, `cost` (per record: `submits`, `dispatches`, `barriers`,
//! `transfer_submits`, `host_waits`, `enqueue_us`, `schedule_us`, `deliver_us`, `gpu_us`) and `submissions[]`: `device` (an index), `enqueue` (begin,
//! end), `point`, `waits[]` and `flush`, `seen`, `host_waits`, `dispatches`, `barriers`, `clock` (`quality`, `error_us`) and
//! `regions[]`: `name`, `runs`, `begin`, `end`, `kernels` (how many were timed). A point is `queue` and `value`.
//!
//! `/api/transfers?device=INDEX[&from=NUMBER]`: `now`, `next`, `transfers[]` that have ended: `number`, `what`, `bytes`, `copies`,
//! `enqueue`, `begin` and `end` on the device (`null` where nothing is timed), `clock`, `seen`, `point`, `waits[]`.
//!
//! `/api/requests[?since=TIME]`: `now`, `running[]`: `replica`, `id`, `phase`, `prompt_tokens`, `prefilled_tokens`,
//! `cached_tokens`, `output_tokens`, `max_tokens`, `pages`, `preemptions`, `age`, `queued`, `first_token`; `ended[]` after TIME: `at`,
//! `id`, `trace` (the id of its trace; `null`: spans are not exported), `model`, `replica`, `operation`, `reason`, `error`, `input_tokens`, `cached_tokens`, `output_tokens`, `queue`,
//! `first_token`, `per_token`, `whole`.
//!
//! `/api/history[?since=TIME]`: `now`, `interval`, and of the last hour `samples[]` after TIME, each over the time since the one
//! before: `at` (its end), `length`, `prompt_tokens` (computed), `output_tokens`, `ended`, `failed` and `refused` requests,
//! `first_token` and `per_token` (`p50`, `p95`) of those that ended, `gap` (`p50`, `p95`) between tokens of a stream; and at
//! its end `running`, `waiting`, `pages_used`, `pages_total`. Quantiles of nothing are `null`.

use super::history::{Quantiles, Sample};
use super::{Admin, HttpEndpoint, Loading};
use crate::actors::timeline::Point;
use crate::actors::timeline::{ClockQuality, SubmissionRecord, TransferRecord};
use crate::host::ServedDevice;
use crate::host::catalogue::{Listed, LoadState};
use crate::host::progress::Unit;
use crate::host::{Host, ServedModel};
use crate::replica::record::StepRecord;
use crate::replica::{MemoryUse, Replica, ReplicaStage};
use crate::telemetry::clock::Moment;
use crate::telemetry::requests::EndedRequest;
use serde_json::{Value, json};
use std::time::Duration;

impl Admin {
    /// Returns the microseconds from the server's start to `moment`; negative before the start.
    fn us(&self, moment: Moment) -> f64 {
        (i128::from(moment.0) - i128::from(self.started.0)) as f64 / 1e3
    }

    fn now(&self) -> f64 {
        self.us(Moment::now())
    }

    /// Returns the moment `us` microseconds after the server's start.
    fn moment(&self, us: f64) -> Moment {
        Moment(self.started.0.saturating_add_signed((us * 1e3) as i64))
    }
}

fn micros(length: Duration) -> f64 {
    length.as_nanos() as f64 / 1e3
}

/// `/api/state`.
pub(super) fn state(admin: &Admin) -> Value {
    let host = admin.host();
    let devices = host.map(Host::devices).unwrap_or_default();
    let models = host.map(Host::models).unwrap_or_default();
    let configured = host.map(Host::listed).unwrap_or_default();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "now": admin.now(),
        "status": admin.status().name(),
        "warnings": admin.warnings(),
        "endpoint": admin.endpoint.get().map(ToString::to_string),
        "http": admin.http.get().map(http),
        "loading": loading(admin, &admin.loading()),
        "devices": devices.iter().map(device).collect::<Vec<_>>(),
        "models": models.iter().map(|served| model(admin, served)).collect::<Vec<_>>(),
        "configured": configured.iter().map(|of| listed(admin, of)).collect::<Vec<_>>(),
    })
}

fn http(http: &HttpEndpoint) -> Value {
    let address = http.address.ip();
    // For an unspecified address, the page uses the host name under which it was opened.
    let name = (!address.is_loopback() && !address.is_unspecified()).then(|| http.host());
    json!({ "host": name, "port": http.address.port(), "scheme": http.scheme(), "tokens": http.tokens })
}

fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::Bytes => "bytes",
        Unit::Count => "things",
    }
}

fn listed(admin: &Admin, listed: &Listed) -> Value {
    let state = match listed.state {
        LoadState::Unloaded => "unloaded",
        LoadState::Loading => "loading",
        LoadState::Serving => "serving",
        LoadState::Unloading => "unloading",
    };
    let step = listed
        .step
        .as_ref()
        .map(|step| json!({ "what": step.what, "done": step.done, "total": step.total, "unit": unit(step.unit) }));
    let endpoint = admin.models.get().and_then(|endpoints| endpoints.address(&listed.name));
    json!({ "name": listed.name, "state": state, "step": step, "endpoint": endpoint.map(|at| at.to_string()) })
}

fn loading(admin: &Admin, loading: &Loading) -> Value {
    let step = loading.step.as_ref().map(|step| {
        json!({
            "what": step.what,
            "done": step.done,
            "total": step.total,
            "unit": unit(step.unit),
            "begun": admin.us(step.begun),
        })
    });
    json!({ "step": step, "lines": loading.lines })
}

fn device(served: &ServedDevice) -> Value {
    let memory_now = served.status.as_ref().map(|status| status.memory());
    let share = memory_now.and_then(|memory| memory.budget);
    let transfer = served.status.as_ref().map(|status| {
        let counters = status.transfer_counters();
        json!({
            "submits": counters.submits,
            "copies": counters.copies,
            "bytes": counters.bytes,
            "barriers": counters.barriers,
        })
    });
    let report = served.status.as_ref().map(|status| status.report());
    let lacks = report.iter().flat_map(|report| &report.lacks);
    json!({
        "index": served.info.index,
        "name": served.info.name,
        "uuid": served.info.uuid,
        "pci": served.info.pci,
        "driver": report.as_ref().map(|report| &report.driver),
        "path": report.as_ref().map(|report| &report.path),
        "lacks": lacks.map(|(what, cost)| json!({ "what": what, "cost": cost })).collect::<Vec<_>>(),
        "heap_bytes": memory_now.map(|memory| memory.heap_bytes),
        "budget_bytes": share.map(|share| share.budget_bytes),
        "used_bytes": share.map(|share| share.used_bytes),
        "plan": served.memory.iter().map(memory).collect::<Vec<_>>(),
        "transfer": transfer,
    })
}

fn memory(line: &MemoryUse) -> Value {
    let side = if line.on_device { "device" } else { "host" };
    json!({ "replica": line.replica, "purpose": line.purpose, "side": side, "bytes": line.bytes })
}

fn model(admin: &Admin, served: &ServedModel) -> Value {
    json!({
        "name": served.name,
        "architecture": served.info.architecture,
        "context": served.info.context,
        "vocabulary": served.info.vocabulary,
        "parameters": served.info.parameters,
        "active_parameters": served.info.active_parameters,
        "weight_bytes": served.info.weight_bytes,
        "embeddings_only": !served.draws(),
        "bytes_per_token": served.info.bytes_per_token,
        "replicas": served.replicas.iter().map(|of| replica(admin, of)).collect::<Vec<_>>(),
    })
}

/// The part of a split replica on one device.
fn stage(stage: &ReplicaStage) -> Value {
    json!({ "device": stage.device.index, "first_layer": stage.layers.start, "layers": stage.layers.len() })
}

fn replica(admin: &Admin, replica: &Replica) -> Value {
    let (load, totals) = (replica.load(), replica.totals());
    json!({
        "name": replica.name,
        "device": replica.device.index,
        "stages": replica.stages.iter().map(stage).collect::<Vec<_>>(),
        "slots": replica.slots(),
        "room": replica.room(),
        "unfinished": replica.unfinished(),
        "closed": replica.closed(),
        "rebuilding": replica.rebuilding(),
        "faults": replica.faults(),
        "last_fault": replica.last_fault().map(|at| admin.us(at)),
        "running": load.running,
        "waiting": load.waiting,
        "pages_used": load.pages_used,
        "pages_cached": load.pages_cached,
        "pages_total": load.pages_total,
        "snapshots": load.snapshots,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "preemptions": load.preemptions,
        "drafted_tokens": load.drafted_tokens,
        "accepted_tokens": load.accepted_tokens,
        "output_tokens": totals.prefill.tokens + totals.decode.tokens,
    })
}

/// `/api/steps`.
pub(super) fn steps(admin: &Admin, replica: &Replica, steps: &[StepRecord]) -> Value {
    json!({
        "now": admin.now(),
        "replica": replica.name,
        "next": steps.last().map(|step| step.number + 1),
        "steps": steps.iter().map(|record| step(admin, record)).collect::<Vec<_>>(),
    })
}

fn step(admin: &Admin, record: &StepRecord) -> Value {
    let cost = &record.cost;
    json!({
        "number": record.number,
        "phase": record.phase,
        "rows": record.rows,
        "steps": record.steps,
        "tokens": record.tokens,
        "planned": admin.us(record.planned),
        "taken": admin.us(record.taken),
        "requests": record.requests.iter().map(|id| &**id).collect::<Vec<&str>>(),
        "running": record.running,
        "waiting": record.waiting,
        "pages_used": record.pages_used,
        "faults": record.faults,
        "cost": {
            "submits": cost.submits,
            "dispatches": cost.dispatches,
            "barriers": cost.barriers,
            "transfer_submits": cost.transfer_submits,
            "host_waits": cost.host_waits,
            "enqueue_us": cost.enqueue_us,
            "schedule_us": cost.schedule_us,
            "deliver_us": cost.deliver_us,
            "gpu_us": cost.gpu_us,
        },
        "submissions": record.submissions.iter().map(|record| submission(admin, record)).collect::<Vec<_>>(),
    })
}

fn point(point: &Point) -> Value {
    json!({ "queue": point.role.to_string(), "value": point.value })
}

fn clock(clock: ClockQuality) -> Value {
    json!({ "quality": clock.name(), "error_us": micros(clock.error()) })
}

fn submission(admin: &Admin, record: &SubmissionRecord) -> Value {
    let regions = record.regions.iter().map(|region| {
        json!({
            "name": &*region.name,
            "runs": region.runs,
            "begin": admin.us(region.begin),
            "end": admin.us(region.end),
            "kernels": region.kernels.len(),
        })
    });
    json!({
        "device": record.device.index,
        "enqueue": [admin.us(record.enqueue.0), admin.us(record.enqueue.1)],
        "point": point(&record.point),
        "waits": record.waits.iter().map(point).collect::<Vec<_>>(),
        "flush": record.flush.name(),
        "seen": admin.us(record.seen),
        "host_waits": record.host_waits,
        "dispatches": record.dispatches,
        "barriers": record.barriers,
        "clock": record.clock.map(clock),
        "regions": regions.collect::<Vec<_>>(),
    })
}

/// `/api/transfers`.
pub(super) fn transfers(admin: &Admin, device: &ServedDevice, from: u64) -> Value {
    let records = device.transfers(from);
    json!({
        "now": admin.now(),
        "next": records.last().map_or(from, |record| record.number + 1),
        "transfers": records.iter().map(|record| transfer(admin, record)).collect::<Vec<_>>(),
    })
}

fn transfer(admin: &Admin, record: &TransferRecord) -> Value {
    json!({
        "number": record.number,
        "what": record.what,
        "bytes": record.bytes,
        "copies": record.copies,
        "enqueue": [admin.us(record.enqueue.0), admin.us(record.enqueue.1)],
        "begin": record.device.map(|(begin, _)| admin.us(begin)),
        "end": record.device.map(|(_, end)| admin.us(end)),
        "clock": record.clock.map(clock),
        "seen": admin.us(record.seen),
        "point": point(&record.point),
        "waits": record.waits.iter().map(point).collect::<Vec<_>>(),
    })
}

/// `/api/requests`.
pub(super) fn requests(admin: &Admin, host: &Host, since: f64) -> Value {
    let mut running = Vec::new();
    for replica in host.replicas() {
        running.extend(replica.requests().into_iter().map(|view| {
            json!({
                "replica": replica.name,
                "id": view.id,
                "phase": view.phase,
                "prompt_tokens": view.prompt_tokens,
                "prefilled_tokens": view.prefilled_tokens,
                "cached_tokens": view.cached_tokens,
                "output_tokens": view.output_tokens,
                "max_tokens": view.max_tokens,
                "pages": view.pages,
                "preemptions": view.preemptions,
                "age": micros(view.age),
                "queued": micros(view.queued),
                "first_token": view.first_token.map(micros),
            })
        }));
    }
    let ended = host.ended.after(admin.moment(since));
    json!({
        "now": admin.now(),
        "running": running,
        "ended": ended.iter().map(|ended| self::ended(admin, ended)).collect::<Vec<_>>(),
    })
}

fn ended(admin: &Admin, ended: &EndedRequest) -> Value {
    json!({
        "at": admin.us(ended.at),
        "id": ended.id,
        "trace": ended.trace,
        "model": ended.model,
        "replica": ended.replica,
        "operation": ended.operation,
        "reason": ended.reason,
        "error": ended.error,
        "input_tokens": ended.input_tokens,
        "cached_tokens": ended.cached_tokens,
        "output_tokens": ended.output_tokens,
        "queue": micros(ended.queue),
        "first_token": ended.first_token.map(micros),
        "per_token": ended.per_token.map(micros),
        "whole": micros(ended.whole),
    })
}

/// `/api/history`.
pub(super) fn history(admin: &Admin, since: f64) -> Value {
    let samples = admin.history.after(admin.moment(since));
    json!({
        "now": admin.now(),
        "interval": micros(super::history::INTERVAL),
        "samples": samples.iter().map(|of| sample(admin, of)).collect::<Vec<_>>(),
    })
}

fn sample(admin: &Admin, sample: &Sample) -> Value {
    let quantiles = |of: Option<Quantiles>| of.map(|of| json!({ "p50": micros(of.p50), "p95": micros(of.p95) }));
    json!({
        "at": admin.us(sample.at),
        "length": micros(sample.length),
        "prompt_tokens": sample.prompt_tokens,
        "output_tokens": sample.output_tokens,
        "ended": sample.requests.ended,
        "failed": sample.requests.failed,
        "refused": sample.requests.refused,
        "first_token": quantiles(sample.first_token),
        "per_token": quantiles(sample.per_token),
        "gap": quantiles(sample.gap),
        "running": sample.running,
        "waiting": sample.waiting,
        "pages_used": sample.pages_used,
        "pages_total": sample.pages_total,
    })
}

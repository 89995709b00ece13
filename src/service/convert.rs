//! Conversions of the engine's and the host's values to protobuf messages. Not here: decisions.

use super::inputs::{Answers, Common, EmbedCall, Input};
use super::proto;
use super::refusal::Refusal;
use crate::actors::loader::{LoadReport, WorkerReport};
use crate::actors::timeline::Point;
use crate::actors::timeline::{ClockQuality, KernelSpan, RegionSpan, SubmissionRecord, TransferRecord};
use crate::engine::request::{Finished, PerToken, Started, TokenLogprobs};
use crate::host::{Host, ServedModel};
use crate::model::text::Text;
use crate::replica::record::StepRecord;
use crate::replica::{DeviceInfo, Replica, ReplicaStage};
use std::collections::BTreeMap;

/// Converts a device's identity.
pub fn device(device: &DeviceInfo) -> proto::Device {
    proto::Device {
        index: u32::try_from(device.index).unwrap_or(u32::MAX),
        name: device.name.clone(),
        uuid: device.uuid.clone(),
        pci: device.pci.clone().unwrap_or_default(),
    }
}

/// Converts an Embed message to a call.
pub(super) fn embed_call(message: proto::EmbedRequest) -> Result<EmbedCall, Refusal> {
    let input = |input: proto::EmbedInput| match input.input {
        Some(proto::embed_input::Input::Text(text)) => Ok(Input::Text(text)),
        Some(proto::embed_input::Input::Tokens(tokens)) => Ok(Input::Tokens(tokens.ids)),
        None => Err(Refusal::Missing { field: "inputs.input", rule: "one of text and tokens" }),
    };
    Ok(EmbedCall {
        common: Common {
            id: message.request_id,
            priority: message.priority,
            cache_salt: message.cache_salt,
            keep: None,
        },
        inputs: message.inputs.into_iter().map(input).collect::<Result<_, _>>()?,
        prompt: message.prompt_name,
        dimensions: message.dimensions,
        normalize: message.normalize,
    })
}

/// Converts the answer of a call for embeddings.
pub(super) fn embedded(answers: Answers<Vec<f32>>) -> proto::EmbedResponse {
    let embeddings = answers.answers.into_iter().map(|answer| proto::Embedding {
        values: answer.value,
        prompt_tokens: answer.prompt_tokens,
        cached_tokens: answer.cached_tokens,
    });
    proto::EmbedResponse { embeddings: embeddings.collect(), request_id: answers.id, model: answers.model }
}

/// Returns the first message of a stream.
pub fn started(started: &Started, id: &str, model: &str, replica: &Replica) -> proto::Started {
    proto::Started {
        request_id: id.to_owned(),
        model: model.to_owned(),
        device: Some(device(&replica.device)),
        replica: started.replica.clone(),
        queue_seconds: started.queue.as_secs_f64(),
        prompt_tokens: started.prompt_tokens,
        cached_tokens: started.cached_tokens,
    }
}

/// Converts the log probabilities of a token; with a tokenizer, also the texts of the tokens.
pub fn logprobs(token: u32, logprobs: &TokenLogprobs, text: Option<&Text>) -> proto::TokenLogprobs {
    let text = |token: u32| text.map(|text| text.bytes(token)).unwrap_or_default();
    proto::TokenLogprobs {
        token_id: token,
        text: text(token),
        logprob: logprobs.chosen,
        top: logprobs
            .top
            .iter()
            .map(|&(token_id, logprob)| proto::token_logprobs::Alternative { token_id, logprob, text: text(token_id) })
            .collect(),
    }
}

/// Converts the times of a request's phases. `gpu_seconds` is the device time of the decode steps: the mean per token,
/// times the number of tokens after the first.
pub fn timings(finished: &Finished) -> proto::Timings {
    let decoded = finished.output_tokens.saturating_sub(1);
    proto::Timings {
        queue_seconds: finished.timings.queue.as_secs_f64(),
        prefill_seconds: finished.timings.prefill.as_secs_f64(),
        decode_seconds: finished.timings.decode.as_secs_f64(),
        gpu_seconds: finished.per_token.gpu_us * f64::from(decoded) / 1e6,
    }
}

/// Converts the cost of steps, as means or sums.
pub fn cost(cost: &PerToken) -> proto::StepCost {
    proto::StepCost {
        submits: cost.submits,
        dispatches: cost.dispatches,
        barriers: cost.barriers,
        descriptor_updates: cost.descriptor_updates,
        transfer_submits: cost.transfer_submits,
        host_waits: cost.host_waits,
        enqueue_us: cost.enqueue_us,
        schedule_us: cost.schedule_us,
        deliver_us: cost.deliver_us,
        gpu_us: cost.gpu_us,
        flushes: Some(proto::Flushes {
            phase_boundary: cost.flushes.phase_boundary,
            readback: cost.flushes.readback,
            cross_queue: cost.flushes.cross_queue,
        }),
    }
}

/// Converts a record of the step ring.
pub fn step(step: &StepRecord) -> proto::Step {
    proto::Step {
        number: step.number,
        phase: step.phase.to_owned(),
        rows: step.rows,
        steps: step.steps,
        at_seconds: step.at.as_secs_f64(),
        cost: Some(cost(&step.cost)),
        tokens: step.tokens,
        planned_ns: step.planned.0,
        taken_ns: step.taken.0,
        requests: step.requests.len() as u32,
        running: step.running,
        waiting: step.waiting,
        pages_used: step.pages_used,
        submissions: step.submissions.iter().map(submission).collect(),
    }
}

fn submission(submission: &SubmissionRecord) -> proto::Submission {
    proto::Submission {
        enqueue_begin_ns: submission.enqueue.0.0,
        enqueue_end_ns: submission.enqueue.1.0,
        seen_ns: submission.seen.0,
        value: submission.point.value,
        waits: submission.waits.iter().map(Point::to_string).collect(),
        flush: submission.flush.name().to_owned(),
        dispatches: submission.dispatches,
        barriers: submission.barriers,
        host_waits: submission.host_waits,
        regions: submission.regions.iter().map(region).collect(),
        clock: submission.clock.map_or("", ClockQuality::name).to_owned(),
        clock_error_us: submission.clock.map_or(0.0, |clock| clock.error().as_secs_f64() * 1e6),
        device: submission.device.name.clone(),
        device_uuid: submission.device.uuid.clone(),
    }
}

fn region(region: &RegionSpan) -> proto::RegionRun {
    let kernel = |kernel: &KernelSpan| proto::KernelRun {
        label: kernel.label.to_string(),
        kernel: kernel.kernel.to_owned(),
        begin_ns: kernel.begin.0,
        end_ns: kernel.end.0,
    };
    proto::RegionRun {
        name: region.name.to_string(),
        runs: region.runs,
        begin_ns: region.begin.0,
        end_ns: region.end.0,
        kernels: region.kernels.iter().map(kernel).collect(),
    }
}

/// Converts the statistics of a weight load.
pub fn load_report(report: &LoadReport) -> proto::Load {
    let worker = |worker: &WorkerReport| proto::load::Worker {
        begin_ns: worker.begin.0,
        end_ns: worker.end.0,
        read_seconds: worker.read.as_secs_f64(),
        pack_seconds: worker.pack.as_secs_f64(),
        wait_seconds: worker.staging_wait.as_secs_f64(),
    };
    proto::Load {
        begin_ns: report.begin.0,
        end_ns: report.end.0,
        bytes_read: report.bytes_read,
        bytes_written: report.bytes_written,
        workers: report.workers.iter().map(worker).collect(),
    }
}

/// Converts a submission to the transfer queue.
pub fn transfer(transfer: &TransferRecord) -> proto::Transfer {
    proto::Transfer {
        number: transfer.number,
        what: transfer.what.to_owned(),
        bytes: transfer.bytes,
        copies: transfer.copies,
        enqueue_begin_ns: transfer.enqueue.0.0,
        enqueue_end_ns: transfer.enqueue.1.0,
        seen_ns: transfer.seen.0,
        begin_ns: transfer.device.map_or(0, |(begin, _)| begin.0),
        end_ns: transfer.device.map_or(0, |(_, end)| end.0),
        value: transfer.point.value,
        waits: transfer.waits.iter().map(Point::to_string).collect(),
    }
}

/// Converts a model and its replicas.
pub fn model(model: &ServedModel) -> proto::Model {
    proto::Model {
        name: model.name.clone(),
        architecture: model.info.architecture.clone(),
        context: model.info.context,
        vocabulary: model.info.vocabulary,
        eos_ids: model.info.eos_ids.clone(),
        weight_bytes: model.info.weight_bytes,
        embeddings_only: !model.draws(),
        bytes_per_token: model.info.bytes_per_token,
        parameters: model.info.parameters,
        active_parameters: model.info.active_parameters,
        has_tokenizer: model.text.is_some(),
        has_chat_template: model.text.as_ref().is_some_and(|text| text.has_chat()),
        replicas: model
            .replicas
            .iter()
            .map(|replica| proto::ModelReplica {
                name: replica.name.clone(),
                device: Some(device(&replica.device)),
                stages: replica.stages.iter().map(stage).collect(),
            })
            .collect(),
        state: proto::ModelState::Serving.into(),
        loading: None,
        endpoint: String::new(),
    }
}

/// Converts the part of a split replica on one device.
fn stage(stage: &ReplicaStage) -> proto::ReplicaStage {
    proto::ReplicaStage {
        device: Some(device(&stage.device)),
        first_layer: stage.layers.start,
        layers: stage.layers.len() as u32,
    }
}

/// Returns the devices that have a replica or a part of one, by index.
pub fn devices(host: &Host, may_know: impl Fn(&str) -> bool) -> Vec<proto::ServingDevice> {
    let mut devices: BTreeMap<usize, proto::ServingDevice> = BTreeMap::new();
    for model in &*host.models() {
        let known = may_know(&model.name);
        let placed = model.replicas.iter().flat_map(|replica| replica.devices().map(move |device| (replica, device)));
        for (replica, own) in placed {
            let entry = devices
                .entry(own.index)
                .or_insert_with(|| proto::ServingDevice { device: Some(device(own)), replicas: Vec::new() });
            entry.replicas.extend(known.then(|| replica.name.clone()));
        }
    }
    devices.into_values().collect()
}

/// Converts the load of a replica.
pub fn load(replica: &Replica) -> proto::ReplicaLoad {
    let load = replica.load();
    proto::ReplicaLoad {
        replica: replica.name.clone(),
        running: load.running,
        waiting: load.waiting,
        pages_used: load.pages_used,
        pages_total: load.pages_total,
        pages_cached: load.pages_cached,
        prompt_tokens: load.prompt_tokens,
        cached_tokens: load.cached_tokens,
        preemptions: load.preemptions,
        snapshots: load.snapshots,
    }
}

//! Every name that telemetry shows: spans, attributes, the service. Request-level ones take
//! OpenTelemetry's GenAI conventions (status "Development": they change here and nowhere
//! else); ours follow the module tree under `ostinato.`.

/// `service.name`, and the prefix of our spans' targets.
pub const SERVICE: &str = "ostinato";
/// `service.version`.
pub const SERVICE_VERSION: &str = "service.version";

/// Span: one RPC, as the server sees it. Shown as `PACKAGE.SERVICE/METHOD`.
pub const SPAN_RPC: &str = "rpc";
/// Span: one generation. Shown as `OPERATION MODEL`.
pub const SPAN_INFERENCE: &str = "inference";

/// Span: submission to start.
pub const SPAN_QUEUE: &str = "queue";
/// Span: start to first token.
pub const SPAN_PREFILL: &str = "prefill";
/// Span: first token to last.
pub const SPAN_DECODE: &str = "decode";

/// Span: a batched step or several, from its plan to its last token. Shown as `PHASE step`; what ran for it on the device
/// lies below it, under the names of regions (`decode.8`).
pub const SPAN_STEP: &str = "step";
/// Span: a model's way to its device.
pub const SPAN_LOAD: &str = "load";
/// Span: its weights, from the first look at them to the last byte on the device.
pub const SPAN_LOAD_WEIGHTS: &str = "load.weights";
/// Span: one packing thread's part of it.
pub const SPAN_LOAD_WORKER: &str = "load.worker";
/// Span: what the transfer queue copied meanwhile.
pub const SPAN_LOAD_COPY: &str = "load.copy";
/// Span: compiling pipelines, while weights are loaded.
pub const SPAN_LOAD_PIPELINES: &str = "load.pipelines";
/// Span: recording regions and trying them.
pub const SPAN_LOAD_REGIONS: &str = "load.regions";

/// The RPC system.
pub const RPC_SYSTEM: &str = "rpc.system";
/// Package and service of an RPC.
pub const RPC_SERVICE: &str = "rpc.service";
/// Method of an RPC.
pub const RPC_METHOD: &str = "rpc.method";
/// Numeric status of an RPC.
pub const RPC_GRPC_STATUS_CODE: &str = "rpc.grpc.status_code";

/// `chat` or `text_completion`.
pub const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
/// Who serves: `ostinato`.
pub const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
/// The served model's name.
pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// Output tokens at most.
pub const GEN_AI_REQUEST_MAX_TOKENS: &str = "gen_ai.request.max_tokens";
/// Temperature.
pub const GEN_AI_REQUEST_TEMPERATURE: &str = "gen_ai.request.temperature";
/// Top-p.
pub const GEN_AI_REQUEST_TOP_P: &str = "gen_ai.request.top_p";
/// Top-k.
pub const GEN_AI_REQUEST_TOP_K: &str = "gen_ai.request.top_k";
/// Seed, where one was given.
pub const GEN_AI_REQUEST_SEED: &str = "gen_ai.request.seed";
/// Samples asked for, where it is not one.
pub const GEN_AI_REQUEST_CHOICE_COUNT: &str = "gen_ai.request.choice.count";
/// The request's id.
pub const GEN_AI_RESPONSE_ID: &str = "gen_ai.response.id";
/// The served model's name.
pub const GEN_AI_RESPONSE_MODEL: &str = "gen_ai.response.model";
/// A list with one reason for each sample.
pub const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Prompt tokens.
pub const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
/// Output tokens.
pub const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// What kind of failure ended it.
pub const ERROR_TYPE: &str = "error.type";

/// The device's name, as its driver says.
pub const DEVICE_NAME: &str = "ostinato.device.name";
/// The device's UUID.
pub const DEVICE_UUID: &str = "ostinato.device.uuid";
/// `MODEL/INDEX`.
pub const REPLICA: &str = "ostinato.replica";
/// Prompt tokens that came from the prefix cache.
pub const CACHED_TOKENS: &str = "ostinato.cached_tokens";
/// Tokens that were drafted to follow those of the output.
pub const DRAFTED_TOKENS: &str = "ostinato.drafted_tokens";
/// Of the output: those that were drafted.
pub const ACCEPTED_TOKENS: &str = "ostinato.accepted_tokens";
/// Mean over the request's decode steps: submissions to the compute queue.
pub const PER_TOKEN_SUBMITS: &str = "ostinato.per_token.submits";
/// The same: dispatches.
pub const PER_TOKEN_DISPATCHES: &str = "ostinato.per_token.dispatches";
/// The same: pipeline barriers.
pub const PER_TOKEN_BARRIERS: &str = "ostinato.per_token.barriers";
/// The same: descriptor updates.
pub const PER_TOKEN_DESCRIPTOR_UPDATES: &str = "ostinato.per_token.descriptor_updates";
/// The same: submissions to the transfer queue.
pub const PER_TOKEN_TRANSFER_SUBMITS: &str = "ostinato.per_token.transfer_submits";
/// The same: blocking waits of the host.
pub const PER_TOKEN_HOST_WAITS: &str = "ostinato.per_token.host_waits";
/// The same: host time spent on enqueueing, microseconds.
pub const PER_TOKEN_ENQUEUE_US: &str = "ostinato.per_token.enqueue_us";
/// Microseconds of the engine's thread until the device has its next work.
pub const PER_TOKEN_SCHEDULE_US: &str = "ostinato.per_token.schedule_us";
/// Microseconds of the engine's thread for handing tokens out.
pub const PER_TOKEN_DELIVER_US: &str = "ostinato.per_token.deliver_us";
/// The same: device time, microseconds.
pub const PER_TOKEN_GPU_US: &str = "ostinato.per_token.gpu_us";

/// Which sample of its request a phase belongs to, where there are several.
pub const SAMPLE: &str = "ostinato.sample";
/// Steps (chunks of the prompt, or tokens after the first).
pub const STEPS: &str = "ostinato.steps";
/// Tokens taken in (prefill) or handed out (decode).
pub const TOKENS: &str = "ostinato.tokens";
/// Queue submissions, in all.
pub const SUBMITS: &str = "ostinato.submits";
/// Dispatches, in all.
pub const DISPATCHES: &str = "ostinato.dispatches";
/// Pipeline barriers, in all.
pub const BARRIERS: &str = "ostinato.barriers";
/// Blocking waits of the host, in all.
pub const HOST_WAITS: &str = "ostinato.host_waits";
/// Host time spent on enqueueing, microseconds in all.
pub const ENQUEUE_US: &str = "ostinato.enqueue_us";
/// Microseconds of the engine's thread until the device has its next work.
pub const SCHEDULE_US: &str = "ostinato.schedule_us";
/// Microseconds of the engine's thread for handing tokens out.
pub const DELIVER_US: &str = "ostinato.deliver_us";
/// Device time, microseconds in all.
pub const GPU_US: &str = "ostinato.gpu_us";
/// Flushes at a phase boundary, in all.
pub const FLUSHES_PHASE_BOUNDARY: &str = "ostinato.flushes.phase_boundary";
/// Flushes for a readback, in all.
pub const FLUSHES_READBACK: &str = "ostinato.flushes.readback";
/// Flushes for a point of another queue, in all.
pub const FLUSHES_CROSS_QUEUE: &str = "ostinato.flushes.cross_queue";
/// Rows of a batch (decode) or tokens of its prompts (prefill).
pub const ROWS: &str = "ostinato.rows";
/// The step record's number, as a profile has it.
pub const STEP_NUMBER: &str = "ostinato.step.number";
/// Why submissions ended where they did, in order.
pub const FLUSH_REASON: &str = "ostinato.flush.reason";
/// The last value that it reaches on the compute queue's timeline.
pub const TIMELINE_VALUE: &str = "ostinato.timeline.value";
/// Points of other queues that it waited for.
pub const TIMELINE_WAITS: &str = "ostinato.timeline.waits";
/// Requests that it was for; no more than a span can link to are linked.
pub const REQUESTS: &str = "ostinato.requests";
/// Sequences that held a slot when it ended.
pub const RUNNING: &str = "ostinato.running";
/// Requests in the queue when it ended.
pub const WAITING: &str = "ostinato.waiting";
/// KV pages in use when it ended.
pub const PAGES_USED: &str = "ostinato.kv.pages_used";
/// Runs of a region, one after the other, in one span.
pub const REGION_RUNS: &str = "ostinato.region.runs";
/// The queue that something ran on.
pub const QUEUE: &str = "ostinato.queue";
/// How a device's times were brought to the host's clock: `calibrated` or `estimated`.
pub const GPU_CLOCK: &str = "ostinato.gpu.clock";
/// How far off they may be, microseconds.
pub const GPU_CLOCK_ERROR_US: &str = "ostinato.gpu.clock.error_us";
/// Bytes of the checkpoint that were read.
pub const LOAD_BYTES_READ: &str = "ostinato.load.bytes_read";
/// Packed bytes that were copied to the device.
pub const LOAD_BYTES_WRITTEN: &str = "ostinato.load.bytes_written";
/// Time of reading files, microseconds.
pub const LOAD_READ_US: &str = "ostinato.load.read_us";
/// Time of packing, microseconds.
pub const LOAD_PACK_US: &str = "ostinato.load.pack_us";
/// Time of waiting for staging memory, microseconds.
pub const LOAD_STAGING_WAIT_US: &str = "ostinato.load.staging_wait_us";
/// Submissions to the transfer queue.
pub const TRANSFER_SUBMITS: &str = "ostinato.transfer_submits";
/// Pipelines that were built or found in the cache.
pub const LOAD_PIPELINES: &str = "ostinato.load.pipelines";

/// How often the sequence lost its pages and was recomputed.
pub const PREEMPTIONS: &str = "ostinato.preemptions";

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    /// `(constant, value)` of every name in this file.
    fn declared() -> Vec<(String, String)> {
        include_str!("names.rs")
            .lines()
            .filter_map(|line| {
                let (name, value) = line.strip_prefix("pub const ")?.split_once(": &str = \"")?;
                Some((name.to_owned(), value.strip_suffix("\";")?.to_owned()))
            })
            .collect()
    }

    fn sources(folder: &Path, text: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, text);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("names.rs") {
                text.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut seen = BTreeMap::new();
        assert!(declared().len() > 20);
        for (name, value) in declared() {
            if let Some(other) = seen.insert(value.clone(), name.clone()) {
                panic!("{name} and {other} are both \"{value}\"");
            }
        }
    }

    #[test]
    fn every_name_is_used() {
        let mut text = String::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
        let words: std::collections::BTreeSet<&str> =
            text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
        let unused: Vec<String> =
            declared().into_iter().map(|(name, _)| name).filter(|n| !words.contains(&**n)).collect();
        assert!(unused.is_empty(), "declared and never used: {unused:?}");
    }
}

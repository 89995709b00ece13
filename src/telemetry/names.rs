//! Every name that telemetry shows: spans, attributes, the service. Request-level ones take
//! OpenTelemetry's GenAI conventions (status "Development": they change here and nowhere
//! else); ours follow the module tree under `ostinato.`. Metrics are written as Prometheus shows them
//! (`docs/metrics.md` has their labels and units): counters end in `_total`, labels begin with `LABEL_` here.

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

/// On a request, a phase or a step: how often a kernel of its decode steps waited in vain for another's words, so that
/// steps were run again. Absent where that did not happen.
pub const OVERLAP_FAULTS: &str = "ostinato.overlap_faults";
/// How often the sequence lost its pages and was recomputed.
pub const PREEMPTIONS: &str = "ostinato.preemptions";

/// 1, with the version as a label.
pub const METRIC_BUILD_INFO: &str = "ostinato_build_info";
/// Whether models are loaded: 0 while they load.
pub const METRIC_READY: &str = "ostinato_ready";
/// Histogram: submission to end.
pub const METRIC_REQUEST_DURATION: &str = "gen_ai_server_request_duration_seconds";
/// Histogram: submission to first token.
pub const METRIC_TIME_TO_FIRST_TOKEN: &str = "gen_ai_server_time_to_first_token_seconds";
/// Histogram: mean time of a token after the first, a request each.
pub const METRIC_TIME_PER_OUTPUT_TOKEN: &str = "gen_ai_server_time_per_output_token_seconds";
/// Histogram: submission to start.
pub const METRIC_QUEUE: &str = "ostinato_queue_seconds";
/// Requests that were taken and have ended.
pub const METRIC_REQUESTS: &str = "ostinato_requests_total";
/// Requests that were not taken.
pub const METRIC_REQUESTS_REFUSED: &str = "ostinato_requests_refused_total";
/// Prompt tokens of ended requests.
pub const METRIC_INPUT_TOKENS: &str = "ostinato_input_tokens_total";
/// Output tokens of ended requests.
pub const METRIC_OUTPUT_TOKENS: &str = "ostinato_output_tokens_total";
/// Outputs that were to be constrained.
pub const METRIC_CONSTRAINTS: &str = "ostinato_constraints_total";
/// Whether a replica runs: 0 once its device or its engine failed.
pub const METRIC_REPLICA_UP: &str = "ostinato_replica_up";
/// Whether a replica takes no requests: it drains or has failed.
pub const METRIC_REPLICA_CLOSED: &str = "ostinato_replica_closed";
/// Sequences that can run at once.
pub const METRIC_SLOTS: &str = "ostinato_slots";
/// Sequences that hold a slot.
pub const METRIC_RUNNING: &str = "ostinato_requests_running";
/// Requests in the queue.
pub const METRIC_WAITING: &str = "ostinato_requests_waiting";
/// Requests that would be taken now.
pub const METRIC_ROOM: &str = "ostinato_requests_room";
/// KV pages in all.
pub const METRIC_KV_PAGES: &str = "ostinato_kv_pages";
/// KV pages in use.
pub const METRIC_KV_PAGES_USED: &str = "ostinato_kv_pages_used";
/// Free KV pages that a prompt may still find.
pub const METRIC_KV_PAGES_CACHED: &str = "ostinato_kv_pages_cached";
/// Snapshots of recurrent state that a prompt may find.
pub const METRIC_SNAPSHOTS: &str = "ostinato_snapshots";
/// Tokens of prompts that started.
pub const METRIC_PROMPT_TOKENS: &str = "ostinato_prompt_tokens_total";
/// Of the prompts' tokens: those found in pages.
pub const METRIC_PREFIX_HIT_TOKENS: &str = "ostinato_prefix_hit_tokens_total";
/// How often a replica's device was lost.
pub const METRIC_LOSSES: &str = "ostinato_device_losses_total";
/// Faults of decode steps without barriers.
pub const METRIC_OVERLAP_FAULTS: &str = "ostinato_overlap_faults_total";
/// Sequences that lost their pages to others, or with their device.
pub const METRIC_PREEMPTIONS: &str = "ostinato_preemptions_total";
/// Tokens that were drafted and verified.
pub const METRIC_DRAFTED_TOKENS: &str = "ostinato_drafted_tokens_total";
/// Of the drafted tokens: those that were right.
pub const METRIC_ACCEPTED_TOKENS: &str = "ostinato_accepted_tokens_total";
/// Plans that the engine made and the device finished.
pub const METRIC_PLANS: &str = "ostinato_plans_total";
/// Steps of those plans.
pub const METRIC_STEPS: &str = "ostinato_steps_total";
/// Rows of decode steps.
pub const METRIC_ROWS: &str = "ostinato_rows_total";
/// Prompt tokens that steps computed.
pub const METRIC_PROMPT_TOKENS_COMPUTED: &str = "ostinato_prompt_tokens_computed_total";
/// Tokens that steps drew.
pub const METRIC_TOKENS: &str = "ostinato_tokens_total";
/// Time of steps by part: the host's work, the device's, finished work that waits for the host.
pub const METRIC_STEP_SECONDS: &str = "ostinato_step_seconds_total";
/// Submissions to the compute queue.
pub const METRIC_SUBMITS: &str = "ostinato_submits_total";
/// Dispatches.
pub const METRIC_DISPATCHES: &str = "ostinato_dispatches_total";
/// Pipeline barriers on the compute queue.
pub const METRIC_BARRIERS: &str = "ostinato_barriers_total";
/// Blocking waits of the host.
pub const METRIC_HOST_WAITS: &str = "ostinato_host_waits_total";
/// Submissions by the reason for which they ended where they did.
pub const METRIC_FLUSHES: &str = "ostinato_flushes_total";
/// 1, with the kernel that computes a stage of a region as a label.
pub const METRIC_KERNEL_VARIANT_INFO: &str = "ostinato_kernel_variant_info";
/// How often a slower way was taken than the program has.
pub const METRIC_FALLBACKS: &str = "ostinato_fallbacks_total";
/// Whether a device works: 0 once it is lost.
pub const METRIC_DEVICE_UP: &str = "ostinato_device_up";
/// Size of a device's own memory.
pub const METRIC_DEVICE_MEMORY_HEAP: &str = "ostinato_device_memory_heap_bytes";
/// What this process may use of it in all, as the driver says.
pub const METRIC_DEVICE_MEMORY_BUDGET: &str = "ostinato_device_memory_budget_bytes";
/// What this process uses of it, as the driver says.
pub const METRIC_DEVICE_MEMORY_USED: &str = "ostinato_device_memory_used_bytes";
/// What memory was planned for.
pub const METRIC_MEMORY_PLAN: &str = "ostinato_memory_plan_bytes";
/// Submissions to the transfer queue.
pub const METRIC_TRANSFER_SUBMITS: &str = "ostinato_transfer_submits_total";
/// Copy commands on it.
pub const METRIC_TRANSFER_COPIES: &str = "ostinato_transfer_copies_total";
/// Bytes that they copied.
pub const METRIC_TRANSFER_BYTES: &str = "ostinato_transfer_bytes_total";
/// Barriers between them.
pub const METRIC_TRANSFER_BARRIERS: &str = "ostinato_transfer_barriers_total";
/// As endpoint pickers scrape it: requests in the queues of a model's replicas.
pub const METRIC_VLLM_WAITING: &str = "vllm:num_requests_waiting";
/// The same: sequences that hold a slot.
pub const METRIC_VLLM_RUNNING: &str = "vllm:num_requests_running";
/// The same: KV pages in use, 0 to 1.
pub const METRIC_VLLM_KV_CACHE_USAGE: &str = "vllm:kv_cache_usage_perc";
/// The same: 1, with the tokens of a page and the number of pages as labels.
pub const METRIC_VLLM_CACHE_CONFIG_INFO: &str = "vllm:cache_config_info";

/// `chat` or `text_completion`.
pub const LABEL_OPERATION: &str = "gen_ai_operation_name";
/// Who serves: `ostinato`.
pub const LABEL_PROVIDER: &str = "gen_ai_provider_name";
/// The served model's name, on metrics of the GenAI conventions.
pub const LABEL_REQUEST_MODEL: &str = "gen_ai_request_model";
/// gRPC code of a call that failed; absent on others.
pub const LABEL_ERROR_TYPE: &str = "error_type";
/// The served model's name.
pub const LABEL_MODEL: &str = "model";
/// `MODEL/INDEX`.
pub const LABEL_REPLICA: &str = "replica";
/// Why a request or a submission ended.
pub const LABEL_REASON: &str = "reason";
/// Whether a constraint was `compiled` or `kept`.
pub const LABEL_FROM: &str = "from";
/// gRPC code.
pub const LABEL_CODE: &str = "code";
/// `prefill` or `decode`.
pub const LABEL_PHASE: &str = "phase";
/// `host`, `gpu` or `wait`.
pub const LABEL_PART: &str = "part";
/// A recording's name, `decode.8` for example.
pub const LABEL_REGION: &str = "region";
/// What a call computes, `qkv` for example.
pub const LABEL_STAGE: &str = "stage";
/// The kernel and its variant, `skinny.bf16` for example.
pub const LABEL_VARIANT: &str = "variant";
/// Which way was not taken.
pub const LABEL_WHAT: &str = "what";
/// A device's name.
pub const LABEL_DEVICE: &str = "device";
/// A device's UUID.
pub const LABEL_UUID: &str = "uuid";
/// What memory is for.
pub const LABEL_PURPOSE: &str = "purpose";
/// Whose memory: `device` or `host`.
pub const LABEL_SIDE: &str = "side";
/// The program's version.
pub const LABEL_VERSION: &str = "version";
/// The served model's name, on metrics that endpoint pickers scrape.
pub const LABEL_MODEL_NAME: &str = "model_name";
/// Tokens of a KV page.
pub const LABEL_BLOCK_SIZE: &str = "block_size";
/// KV pages.
pub const LABEL_NUM_GPU_BLOCKS: &str = "num_gpu_blocks";

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
            // A label stands on metrics only: it may be called what a span is.
            let label = name.starts_with("LABEL_");
            if let Some(other) = seen.insert((label, value.clone()), name.clone()) {
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

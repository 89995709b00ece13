//! All names that telemetry uses: spans, attributes, metrics, labels, the service. Names of request-level data follow
//! OpenTelemetry's GenAI conventions (status "Development": if they change, only this file changes); the others follow
//! the module tree, with the prefix `ostinato.`. Metric names are written as Prometheus shows them, with `_total` at
//! the end of counters; `docs/metrics.md` lists their labels and units. The constants of labels begin with `LABEL_`.

/// The default of `service.name`, and the prefix of this program's span targets.
pub const SERVICE: &str = "ostinato";
/// The name of the service.
pub const SERVICE_NAME: &str = "service.name";
/// The id of this process of the service: by default a random UUID for each start.
pub const SERVICE_INSTANCE_ID: &str = "service.instance.id";
/// `service.version`.
pub const SERVICE_VERSION: &str = "service.version";

/// Span: one RPC on the server. Displayed as `PACKAGE.SERVICE/METHOD`.
pub const SPAN_RPC: &str = "rpc";
/// Span: one HTTP request on the server. Displayed as `METHOD ROUTE`.
pub const SPAN_HTTP: &str = "http";
/// Span: a conversation is rendered with the chat template.
pub const SPAN_TEMPLATE: &str = "template";
/// Span: a prompt's text is encoded to tokens.
pub const SPAN_TOKENIZE: &str = "tokenize";
/// Span: one generation. Displayed as `OPERATION MODEL`.
pub const SPAN_INFERENCE: &str = "inference";

/// Span: from submission to start.
pub const SPAN_QUEUE: &str = "queue";
/// Span: from start to the first token.
pub const SPAN_PREFILL: &str = "prefill";
/// Span: from the first token to the last.
pub const SPAN_DECODE: &str = "decode";

/// Span: one or several batched steps, from their plan to their last token. Displayed as `PHASE step`. Its children are
/// the regions that ran on the device, named after their recordings (such as `decode.8`).
pub const SPAN_STEP: &str = "step";
/// Span: the load of a model onto its device.
pub const SPAN_LOAD: &str = "load";
/// Span: the load of the weights, from the validation of the plan to the last byte on the device.
pub const SPAN_LOAD_WEIGHTS: &str = "load.weights";
/// Span: one packing thread's share of the load.
pub const SPAN_LOAD_WORKER: &str = "load.worker";
/// Span: the copies of the transfer queue during the load.
pub const SPAN_LOAD_COPY: &str = "load.copy";
/// Span: the compilation of pipelines, while weights are loaded.
pub const SPAN_LOAD_PIPELINES: &str = "load.pipelines";
/// Span: the recording and testing of regions.
pub const SPAN_LOAD_REGIONS: &str = "load.regions";

/// The RPC system.
pub const RPC_SYSTEM: &str = "rpc.system";
/// Package and service of an RPC.
pub const RPC_SERVICE: &str = "rpc.service";
/// Method of an RPC.
pub const RPC_METHOD: &str = "rpc.method";
/// Numeric status of an RPC.
pub const RPC_GRPC_STATUS_CODE: &str = "rpc.grpc.status_code";

/// The method of an HTTP request.
pub const HTTP_REQUEST_METHOD: &str = "http.request.method";
/// The route of an HTTP request: its path, with names in place of the parts that vary.
pub const HTTP_ROUTE: &str = "http.route";
/// The status of the answer to an HTTP request.
pub const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";

/// The operation of calls for vectors.
pub const OPERATION_EMBEDDINGS: &str = "embeddings";
/// The operation of calls for the relevance of documents by a reranker.
pub const OPERATION_RERANK: &str = "rerank";
/// `chat`, `text_completion`, `embeddings` or `rerank`.
pub const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
/// The provider: `ostinato`.
pub const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
/// Name of the served model.
pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// The maximum number of output tokens.
pub const GEN_AI_REQUEST_MAX_TOKENS: &str = "gen_ai.request.max_tokens";
/// Temperature.
pub const GEN_AI_REQUEST_TEMPERATURE: &str = "gen_ai.request.temperature";
/// Top-p.
pub const GEN_AI_REQUEST_TOP_P: &str = "gen_ai.request.top_p";
/// Top-k.
pub const GEN_AI_REQUEST_TOP_K: &str = "gen_ai.request.top_k";
/// The seed, if one was given.
pub const GEN_AI_REQUEST_SEED: &str = "gen_ai.request.seed";
/// The number of samples, if it is not 1.
pub const GEN_AI_REQUEST_CHOICE_COUNT: &str = "gen_ai.request.choice.count";
/// The request's id.
pub const GEN_AI_RESPONSE_ID: &str = "gen_ai.response.id";
/// Name of the served model.
pub const GEN_AI_RESPONSE_MODEL: &str = "gen_ai.response.model";
/// A list with the finish reason of each sample.
pub const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Prompt tokens.
pub const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
/// Output tokens.
pub const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// The kind of failure that ended the call.
pub const ERROR_TYPE: &str = "error.type";

/// The device's name as reported by its driver.
pub const DEVICE_NAME: &str = "ostinato.device.name";
/// The device's UUID.
pub const DEVICE_UUID: &str = "ostinato.device.uuid";
/// The replica, `MODEL/INDEX`.
pub const REPLICA: &str = "ostinato.replica";
/// Prompt tokens found in the prefix cache.
pub const CACHED_TOKENS: &str = "ostinato.cached_tokens";
/// Draft tokens that were proposed.
pub const DRAFTED_TOKENS: &str = "ostinato.drafted_tokens";
/// Output tokens that were accepted draft tokens.
pub const ACCEPTED_TOKENS: &str = "ostinato.accepted_tokens";
/// Mean over the request's decode steps: submissions to the compute queue.
pub const PER_TOKEN_SUBMITS: &str = "ostinato.per_token.submits";
/// Mean over the request's decode steps: dispatches.
pub const PER_TOKEN_DISPATCHES: &str = "ostinato.per_token.dispatches";
/// Mean over the request's decode steps: pipeline barriers.
pub const PER_TOKEN_BARRIERS: &str = "ostinato.per_token.barriers";
/// Mean over the request's decode steps: descriptor updates.
pub const PER_TOKEN_DESCRIPTOR_UPDATES: &str = "ostinato.per_token.descriptor_updates";
/// Mean over the request's decode steps: submissions to the transfer queue.
pub const PER_TOKEN_TRANSFER_SUBMITS: &str = "ostinato.per_token.transfer_submits";
/// Mean over the request's decode steps: blocking waits of the host.
pub const PER_TOKEN_HOST_WAITS: &str = "ostinato.per_token.host_waits";
/// Mean over the request's decode steps: host time spent enqueueing, microseconds.
pub const PER_TOKEN_ENQUEUE_US: &str = "ostinato.per_token.enqueue_us";
/// Mean over the request's decode steps: time of the engine thread until the device has its next work, microseconds.
pub const PER_TOKEN_SCHEDULE_US: &str = "ostinato.per_token.schedule_us";
/// Mean over the request's decode steps: time of the engine thread for taking and delivering tokens, microseconds.
pub const PER_TOKEN_DELIVER_US: &str = "ostinato.per_token.deliver_us";
/// Mean over the request's decode steps: device time, microseconds.
pub const PER_TOKEN_GPU_US: &str = "ostinato.per_token.gpu_us";

/// Index of the sample that a phase belongs to, if the request has several.
pub const SAMPLE: &str = "ostinato.sample";
/// The number of steps: prompt chunks (prefill) or decode steps.
pub const STEPS: &str = "ostinato.steps";
/// Tokens processed (prefill) or produced (decode).
pub const TOKENS: &str = "ostinato.tokens";
/// Total of queue submissions.
pub const SUBMITS: &str = "ostinato.submits";
/// Total of dispatches.
pub const DISPATCHES: &str = "ostinato.dispatches";
/// Total of pipeline barriers.
pub const BARRIERS: &str = "ostinato.barriers";
/// Total of the host's blocking waits.
pub const HOST_WAITS: &str = "ostinato.host_waits";
/// Total host time spent enqueueing, microseconds.
pub const ENQUEUE_US: &str = "ostinato.enqueue_us";
/// Total time of the engine thread until the device has its next work, microseconds.
pub const SCHEDULE_US: &str = "ostinato.schedule_us";
/// Total time of the engine thread for taking and delivering tokens, microseconds.
pub const DELIVER_US: &str = "ostinato.deliver_us";
/// Total device time, microseconds.
pub const GPU_US: &str = "ostinato.gpu_us";
/// Total of flushes at a phase boundary.
pub const FLUSHES_PHASE_BOUNDARY: &str = "ostinato.flushes.phase_boundary";
/// Total of flushes for a readback.
pub const FLUSHES_READBACK: &str = "ostinato.flushes.readback";
/// Total of flushes for a point of another queue.
pub const FLUSHES_CROSS_QUEUE: &str = "ostinato.flushes.cross_queue";
/// Batch rows (decode) or prompt tokens (prefill) of a step.
pub const ROWS: &str = "ostinato.rows";
/// The step record's number, as in a profile.
pub const STEP_NUMBER: &str = "ostinato.step.number";
/// Why the submissions ended where they did, in order.
pub const FLUSH_REASON: &str = "ostinato.flush.reason";
/// The last value that the step signals on the compute queue's timeline.
pub const TIMELINE_VALUE: &str = "ostinato.timeline.value";
/// Points of other queues that the step waited for.
pub const TIMELINE_WAITS: &str = "ostinato.timeline.waits";
/// The number of requests in the step. The span links to them up to the maximum number of links per span.
pub const REQUESTS: &str = "ostinato.requests";
/// Sequences that held a slot at the end of the step.
pub const RUNNING: &str = "ostinato.running";
/// Requests in the queue at the end of the step.
pub const WAITING: &str = "ostinato.waiting";
/// KV pages in use at the end of the step.
pub const PAGES_USED: &str = "ostinato.kv.pages_used";
/// The number of consecutive runs of a region in one span.
pub const REGION_RUNS: &str = "ostinato.region.runs";
/// The queue on which the work ran.
pub const QUEUE: &str = "ostinato.queue";
/// How device times were converted to the host's clock: `calibrated` or `estimated`.
pub const GPU_CLOCK: &str = "ostinato.gpu.clock";
/// The maximum error of the converted times, microseconds.
pub const GPU_CLOCK_ERROR_US: &str = "ostinato.gpu.clock.error_us";
/// Bytes read from the checkpoint.
pub const LOAD_BYTES_READ: &str = "ostinato.load.bytes_read";
/// Packed bytes copied to the device.
pub const LOAD_BYTES_WRITTEN: &str = "ostinato.load.bytes_written";
/// Time spent reading files, microseconds.
pub const LOAD_READ_US: &str = "ostinato.load.read_us";
/// Time spent packing, microseconds.
pub const LOAD_PACK_US: &str = "ostinato.load.pack_us";
/// Time spent waiting for staging slots, microseconds.
pub const LOAD_STAGING_WAIT_US: &str = "ostinato.load.staging_wait_us";
/// Submissions to the transfer queue.
pub const TRANSFER_SUBMITS: &str = "ostinato.transfer_submits";
/// Pipelines that were compiled, or found in the cache or with another model of the device.
pub const LOAD_PIPELINES: &str = "ostinato.load.pipelines";

/// On a request, a phase or a step: how often a kernel of a step without barriers timed out while it waited for
/// another kernel's tagged words, so that steps were run again. Absent if it never happened.
pub const OVERLAP_FAULTS: &str = "ostinato.overlap_faults";
/// How often the sequence lost its pages and was recomputed.
pub const PREEMPTIONS: &str = "ostinato.preemptions";

/// Always 1, with the version as a label.
pub const METRIC_BUILD_INFO: &str = "ostinato_build_info";
/// 1 once all models are loaded, 0 before.
pub const METRIC_READY: &str = "ostinato_ready";
/// Histogram: time from submission to end.
pub const METRIC_REQUEST_DURATION: &str = "gen_ai_server_request_duration_seconds";
/// Histogram: time from submission to the first token.
pub const METRIC_TIME_TO_FIRST_TOKEN: &str = "gen_ai_server_time_to_first_token_seconds";
/// Histogram: mean time per token after the first; one value per request.
pub const METRIC_TIME_PER_OUTPUT_TOKEN: &str = "gen_ai_server_time_per_output_token_seconds";
/// Histogram: time from submission to start.
pub const METRIC_QUEUE: &str = "ostinato_queue_seconds";
/// Accepted requests that have ended.
pub const METRIC_REQUESTS: &str = "ostinato_requests_total";
/// Refused requests.
pub const METRIC_REQUESTS_REFUSED: &str = "ostinato_requests_refused_total";
/// Prompt tokens of ended requests.
pub const METRIC_INPUT_TOKENS: &str = "ostinato_input_tokens_total";
/// Output tokens of ended requests.
pub const METRIC_OUTPUT_TOKENS: &str = "ostinato_output_tokens_total";
/// Requests with a constraint on their output.
pub const METRIC_CONSTRAINTS: &str = "ostinato_constraints_total";
/// Whether a replica runs: 0 after its device or its engine has failed.
pub const METRIC_REPLICA_UP: &str = "ostinato_replica_up";
/// Whether a replica accepts no requests, because it drains or has failed.
pub const METRIC_REPLICA_CLOSED: &str = "ostinato_replica_closed";
/// The maximum number of sequences that run at once.
pub const METRIC_SLOTS: &str = "ostinato_slots";
/// Sequences that hold a slot.
pub const METRIC_RUNNING: &str = "ostinato_requests_running";
/// Requests in the queue.
pub const METRIC_WAITING: &str = "ostinato_requests_waiting";
/// The number of requests that would be accepted now.
pub const METRIC_ROOM: &str = "ostinato_requests_room";
/// The total number of KV pages.
pub const METRIC_KV_PAGES: &str = "ostinato_kv_pages";
/// KV pages in use.
pub const METRIC_KV_PAGES_USED: &str = "ostinato_kv_pages_used";
/// Free KV pages that still hold a prefix that a prompt can reuse.
pub const METRIC_KV_PAGES_CACHED: &str = "ostinato_kv_pages_cached";
/// Snapshots of recurrent state that a prompt can reuse.
pub const METRIC_SNAPSHOTS: &str = "ostinato_snapshots";
/// Prompt tokens of sequences that have started.
pub const METRIC_PROMPT_TOKENS: &str = "ostinato_prompt_tokens_total";
/// The number of those prompt tokens found in the prefix cache.
pub const METRIC_PREFIX_HIT_TOKENS: &str = "ostinato_prefix_hit_tokens_total";
/// How often a replica's device was lost.
pub const METRIC_LOSSES: &str = "ostinato_device_losses_total";
/// Timeouts inside steps without barriers; the steps were run again.
pub const METRIC_OVERLAP_FAULTS: &str = "ostinato_overlap_faults_total";
/// Sequences that lost their pages to others or with their device, and are recomputed.
pub const METRIC_PREEMPTIONS: &str = "ostinato_preemptions_total";
/// Draft tokens that were verified.
pub const METRIC_DRAFTED_TOKENS: &str = "ostinato_drafted_tokens_total";
/// Draft tokens that were accepted.
pub const METRIC_ACCEPTED_TOKENS: &str = "ostinato_accepted_tokens_total";
/// Plans that the engine made and the device has finished.
pub const METRIC_PLANS: &str = "ostinato_plans_total";
/// Steps of finished plans.
pub const METRIC_STEPS: &str = "ostinato_steps_total";
/// Batch rows of decode steps.
pub const METRIC_ROWS: &str = "ostinato_rows_total";
/// Prompt tokens that prefill steps computed.
pub const METRIC_PROMPT_TOKENS_COMPUTED: &str = "ostinato_prompt_tokens_computed_total";
/// Tokens that steps sampled.
pub const METRIC_TOKENS: &str = "ostinato_tokens_total";
/// Time of steps by part: host work, device work, and finished work that waits for the host.
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
/// Always 1, with the kernel that computes a stage of a region as a label.
pub const METRIC_KERNEL_VARIANT_INFO: &str = "ostinato_kernel_variant_info";
/// How often a slower implementation was used than the best that the program has.
pub const METRIC_FALLBACKS: &str = "ostinato_fallbacks_total";
/// Whether a device works: 0 once it is lost.
pub const METRIC_DEVICE_UP: &str = "ostinato_device_up";
/// Size of a device's own memory.
pub const METRIC_DEVICE_MEMORY_HEAP: &str = "ostinato_device_memory_heap_bytes";
/// The device memory that this process may use in total, as reported by the driver.
pub const METRIC_DEVICE_MEMORY_BUDGET: &str = "ostinato_device_memory_budget_bytes";
/// The device memory that this process uses, as reported by the driver.
pub const METRIC_DEVICE_MEMORY_USED: &str = "ostinato_device_memory_used_bytes";
/// Planned memory by purpose.
pub const METRIC_MEMORY_PLAN: &str = "ostinato_memory_plan_bytes";
/// Submissions to the transfer queue.
pub const METRIC_TRANSFER_SUBMITS: &str = "ostinato_transfer_submits_total";
/// Copy commands on the transfer queue.
pub const METRIC_TRANSFER_COPIES: &str = "ostinato_transfer_copies_total";
/// Bytes copied on the transfer queue.
pub const METRIC_TRANSFER_BYTES: &str = "ostinato_transfer_bytes_total";
/// Barriers between copy commands on the transfer queue.
pub const METRIC_TRANSFER_BARRIERS: &str = "ostinato_transfer_barriers_total";
/// vLLM's name for endpoint pickers: requests in the queues of a model's replicas.
pub const METRIC_VLLM_WAITING: &str = "vllm:num_requests_waiting";
/// vLLM's name for endpoint pickers: sequences that hold a slot.
pub const METRIC_VLLM_RUNNING: &str = "vllm:num_requests_running";
/// vLLM's name for endpoint pickers: KV pages in use, as a fraction from 0 to 1.
pub const METRIC_VLLM_KV_CACHE_USAGE: &str = "vllm:kv_cache_usage_perc";
/// vLLM's name for endpoint pickers: always 1, with the tokens per page and the number of pages as labels.
pub const METRIC_VLLM_CACHE_CONFIG_INFO: &str = "vllm:cache_config_info";

/// `chat`, `text_completion`, `embeddings` or `rerank`.
pub const LABEL_OPERATION: &str = "gen_ai_operation_name";
/// The provider: `ostinato`.
pub const LABEL_PROVIDER: &str = "gen_ai_provider_name";
/// Name of the served model, on metrics of the GenAI conventions.
pub const LABEL_REQUEST_MODEL: &str = "gen_ai_request_model";
/// gRPC code of a failed call; absent otherwise.
pub const LABEL_ERROR_TYPE: &str = "error_type";
/// Name of the served model.
pub const LABEL_MODEL: &str = "model";
/// The replica, `MODEL/INDEX`.
pub const LABEL_REPLICA: &str = "replica";
/// Why a request or a submission ended.
pub const LABEL_REASON: &str = "reason";
/// Whether a constraint was `compiled` for the request or `kept` from an earlier one.
pub const LABEL_FROM: &str = "from";
/// gRPC code.
pub const LABEL_CODE: &str = "code";
/// `prefill` or `decode`.
pub const LABEL_PHASE: &str = "phase";
/// `host`, `gpu` or `wait`.
pub const LABEL_PART: &str = "part";
/// A recording's name, such as `decode.8`.
pub const LABEL_REGION: &str = "region";
/// The stage that a call computes, such as `qkv`.
pub const LABEL_STAGE: &str = "stage";
/// The kernel and its variant, such as `skinny.bf16`.
pub const LABEL_VARIANT: &str = "variant";
/// The reason for which a slower implementation was used, such as `no_overlap`.
pub const LABEL_WHAT: &str = "what";
/// A device's name.
pub const LABEL_DEVICE: &str = "device";
/// A device's UUID.
pub const LABEL_UUID: &str = "uuid";
/// The purpose of the memory.
pub const LABEL_PURPOSE: &str = "purpose";
/// The location of the memory: `device` or `host`.
pub const LABEL_SIDE: &str = "side";
/// The program's version.
pub const LABEL_VERSION: &str = "version";
/// Name of the served model, on metrics for endpoint pickers.
pub const LABEL_MODEL_NAME: &str = "model_name";
/// Tokens per KV page.
pub const LABEL_BLOCK_SIZE: &str = "block_size";
/// The number of KV pages.
pub const LABEL_NUM_GPU_BLOCKS: &str = "num_gpu_blocks";

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    /// Returns `(constant, value)` of every name in this file.
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
            // Labels occur only on metrics, so a label may have the same name as a span or an attribute.
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

//! `ostinato generate`: one generation, in this process or on a server. Both produce the same stream of messages, and
//! the same code prints them.

use super::arrivals::speed;
use super::placement::{DeviceArgs, placed};
use super::sampling::SamplingArgs;
use super::{Usage, cache_directory, named, progress};
use crate::actors::workers::Cancel;
use crate::config::{Bytes, Config, DEMO_PATH, Draft, KvFormat, Model, Quantize, file};
use crate::engine::request::{Bounds, Limits};
use crate::gpu::devices::start;
use crate::model::text::Text;
use crate::service::convert;
use crate::service::generation::{Delivery, Generation};
use crate::service::prepare::{ConstrainedModel, Reasons, prepare, start_grammar};
use crate::service::proto;
use crate::service::proto::generate_request::Prompt;
use crate::service::proto::generate_response::Event;
use crate::service::refusal::{Refusal, code_name, status};
use anyhow::Context;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

/// Capacity of the event buffer: enough for all events of a long output if the terminal is slow.
const BUFFER: usize = 1 << 16;

#[derive(Debug, clap::Args)]
pub(crate) struct Generate {
    /// Folder of a checkpoint, a GGUF file, ORG/NAME on the Hugging Face hub, or an embedded demo model: `demo` or
    /// `demo-hybrid`. With --server, the name of a served model. Default: `demo`, or the server's only model.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Send the request to this server (HOST:PORT or a URI) instead of loading the model.
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["split", "context", "memory_limit", "dump_logits", "tune", "prefill_chunk", "drafts"])]
    server: Option<String>,
    #[command(flatten)]
    reach: super::connect::Reach,
    #[command(flatten)]
    input: Input,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Do not stop at stop tokens or stop strings before this many output tokens.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    min_tokens: Option<u32>,
    /// Stop at this text. Can be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Stop at this token. Can be repeated.
    #[arg(long, value_name = "ID")]
    stop_id: Vec<u32>,
    /// Continue after the model's end-of-sequence tokens.
    #[arg(long)]
    ignore_eos: bool,
    #[command(flatten)]
    constraint: Constraint,
    /// Show log probabilities of each output token and of the N most probable tokens (requires --json).
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<u32>,
    /// Show log probabilities of each prompt token after the first and of the N most probable tokens in its place
    /// (requires --json).
    #[arg(long, value_name = "N", requires = "json")]
    prompt_logprobs: Option<u32>,
    /// Print one JSON object per event.
    #[arg(long)]
    json: bool,
    /// Maximum length of prompt and output together, in tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Maximum device memory to use, such as 8GiB.
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<Bytes>,
    /// Changes to the device's tuning: KEY=VALUE, separated by commas.
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
    tune: Vec<String>,
    #[command(flatten)]
    self_test: super::SelfTestArgs,
    /// Maximum number of tokens in a prompt chunk.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prefill_chunk: Option<u32>,
    /// Quantise 16-bit and 32-bit matrices at load: int8 (8.125 bits a weight, relative error 0.65 %) or int4 (5 bits,
    /// 7.3 %).
    #[arg(long, value_name = "int8|int4", conflicts_with = "server")]
    quantize: Option<Quantize>,
    /// Number format of keys and values in the KV cache: f16, f32 or int8. Default: f16.
    #[arg(long, value_name = "f16|f32|int8", conflicts_with = "server")]
    kv_format: Option<KvFormat>,
    /// With weights in FP8, round the inputs of products of 128 rows and more to FP8 too, where the device multiplies such
    /// numbers (NVIDIA's compute capability 9.0): faster prompts and batches, with a larger error.
    #[arg(long, conflicts_with = "server")]
    fp8_activations: bool,
    /// Number of draft tokens per step, for models that support speculative decoding; 0 disables it. Default: as many
    /// as are worthwhile.
    #[arg(long, value_name = "N")]
    drafts: Option<u32>,
    /// Source of draft tokens: `lookup` drafts the tokens that followed an earlier occurrence of the last tokens, and
    /// needs no drafting block in the model; or a smaller model with the same vocabulary, or a draft head (EAGLE-3), given
    /// like the model itself. Default: the model's own block, if it has one.
    #[arg(long, value_name = "lookup|MODEL", conflicts_with = "server")]
    draft: Option<Draft>,
    /// Write the logits of each step to a safetensors file: tensor `logits`, f32, [steps, vocabulary].
    #[arg(long, value_name = "FILE")]
    dump_logits: Option<PathBuf>,
}

/// Constraints on the output; at most one.
#[derive(Debug, clap::Args)]
#[group(required = false, multiple = false)]
struct Constraint {
    /// The output must be JSON that conforms to the JSON Schema in this file.
    #[arg(long, value_name = "FILE")]
    json_schema: Option<PathBuf>,
    /// The output must match this regular expression.
    #[arg(long, value_name = "REGEX")]
    regex: Option<String>,
    /// The output must match the grammar in this file: EBNF with a rule "root ::= ...", or Lark.
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
    /// Free text, except that tagged parts must follow the description in this file (JSON in the form of vLLM and
    /// XGrammar).
    #[arg(long, value_name = "FILE")]
    structural_tag: Option<PathBuf>,
    /// The output must be one of these texts; repeat the option for each text.
    #[arg(long, value_name = "TEXT")]
    choice: Vec<String>,
}

impl Constraint {
    fn message(&self) -> anyhow::Result<Option<proto::Constraint>> {
        use proto::constraint::{Choice, Kind};
        let read = |path: &PathBuf| {
            file::read_argument_text(path, file::SMALL)
                .map_err(|error| Usage(format!("cannot read {}: {error}", path.display())))
        };
        let kind = if let Some(path) = &self.json_schema {
            Kind::JsonSchema(read(path)?)
        } else if let Some(regex) = &self.regex {
            Kind::Regex(regex.clone())
        } else if let Some(path) = &self.grammar {
            Kind::Grammar(read(path)?)
        } else if let Some(path) = &self.structural_tag {
            Kind::StructuralTag(read(path)?)
        } else if !self.choice.is_empty() {
            Kind::Choice(Choice { texts: self.choice.clone() })
        } else {
            return Ok(None);
        };
        Ok(Some(proto::Constraint { kind: Some(kind), ..Default::default() }))
    }
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// Plain text to continue.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A user message, formatted with the model's chat template.
    #[arg(long, value_name = "TEXT")]
    chat: Option<String>,
    /// Token ids to continue.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    tokens: Vec<u32>,
}

/// A gRPC status with a readable message.
#[derive(Debug, thiserror::Error)]
#[error("{message} ({})", code_name(*.code))]
pub(crate) struct Refused {
    code: Code,
    message: String,
}

impl From<Status> for Refused {
    fn from(status: Status) -> Refused {
        Refused { code: status.code(), message: status.message().to_owned() }
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Refused {
        status(&refusal).into()
    }
}

impl Refused {
    /// Whether the user can correct the error by changing the request.
    pub(crate) fn is_users(&self) -> bool {
        matches!(
            self.code,
            Code::InvalidArgument
                | Code::NotFound
                | Code::AlreadyExists
                | Code::FailedPrecondition
                | Code::Unimplemented
        )
    }
}

pub(crate) fn run(args: &Generate) -> anyhow::Result<()> {
    args.sampling.check().map_err(Refused::from)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?;
    let mut printer = Printer::new(args.json);
    match &args.server {
        Some(address) => runtime.block_on(against_server(args, address, &mut printer))?,
        None => in_process(args, &runtime, &mut printer)?,
    }
    printer.table();
    Ok(())
}

/// Builds the request, which is the same in process and on a server.
fn request(args: &Generate) -> anyhow::Result<proto::GenerateRequest> {
    let prompt = if let Some(text) = &args.input.prompt {
        Prompt::Text(text.clone())
    } else if let Some(text) = &args.input.chat {
        let message = proto::ChatMessage { role: "user".to_owned(), content: text.clone(), ..Default::default() };
        Prompt::Chat(proto::Chat { messages: vec![message], ..Default::default() })
    } else {
        Prompt::Tokens(proto::TokenIds { ids: args.input.tokens.clone() })
    };
    Ok(proto::GenerateRequest {
        request_id: String::new(),
        model: args.model.clone().unwrap_or_default(),
        prompt: Some(prompt),
        sampling: Some(args.sampling.message()),
        stopping: Some(proto::Stopping {
            min_tokens: args.min_tokens,
            strings: args.stop.clone(),
            ids: args.stop_id.clone(),
            ignore_eos: args.ignore_eos,
            ..args.sampling.stopping()
        }),
        output: Some(proto::Output {
            text: None,
            token_ids: None,
            logprobs: args.logprobs,
            prompt_logprobs: args.prompt_logprobs,
        }),
        constraint: args.constraint.message()?,
        device: String::new(),
        priority: 0,
        cache_salt: String::new(),
    })
}

type Messages = Result<proto::GenerateResponse, Status>;

async fn against_server(args: &Generate, address: &str, printer: &mut Printer) -> anyhow::Result<()> {
    let request = proto::GenerateRequest { device: args.devices.of_request()?, ..request(args)? };
    let mut client = args.reach.connect(address).await?;
    if !args.json {
        let models = client.list_models(proto::ListModelsRequest {}).await;
        let models = models.map_err(Refused::from)?.into_inner().models;
        // If no model has that name, the server's answer says so.
        let mut serving = models.into_iter().filter(|model| model.state() == proto::ModelState::Serving);
        printer.model = serving.find(|model| request.model.is_empty() || model.name == request.model);
    }
    let mut request = tonic::Request::new(request);
    // The caller may pass a trace context in TRACEPARENT and TRACESTATE, OpenTelemetry's convention for programs.
    for name in ["traceparent", "tracestate"] {
        if let Some(value) = std::env::var(name.to_uppercase()).ok().and_then(|value| value.parse().ok()) {
            request.metadata_mut().insert(name, value);
        }
    }
    let answer = client.generate(request).await.map_err(Refused::from)?;
    print(answer.into_inner(), printer).await
}

fn in_process(args: &Generate, runtime: &tokio::runtime::Runtime, printer: &mut Printer) -> anyhow::Result<()> {
    let placement = args.devices.replica()?;
    let given = args.model.as_deref().unwrap_or(DEMO_PATH);
    let path = named::find(given, args.json)?;
    // Before the weights are loaded, which may take minutes.
    let constraint = args.constraint.message()?;
    if constraint.is_some() || args.min_tokens.is_some() || args.sampling.names_ids() || !args.stop_id.is_empty() {
        let (path, checkpoint) = named::opened(&path)?;
        let config = &checkpoint.config;
        let limits = Limits {
            min_tokens: args.min_tokens.unwrap_or(0),
            stop_ids: args.stop_id.clone(),
            ignore_eos: args.ignore_eos,
            ..Limits::default()
        };
        let bounds = Bounds {
            vocabulary: config.vocab,
            context: config.context,
            eos_ids: config.eos.clone(),
            draws: config.causal,
        };
        args.sampling.check_for(limits, &bounds).map_err(Refused::from)?;
        if let Some(constraint) = constraint {
            let text = Text::load(&path)?;
            let model =
                ConstrainedModel { name: given, text: text.as_ref(), vocabulary: config.vocab, eos_ids: &config.eos };
            start_grammar(model, constraint, Reasons::Never, args.ignore_eos, &Cancel::default())
                .map_err(Refused::from)?;
        }
    }
    let mut model = Model::new(&named::served_as(given), path, None);
    model.replicas = vec![placement];
    model.slots = Some(1);
    model.context = args.context;
    model.memory_limit = args.memory_limit;
    model.prefill_chunk = args.prefill_chunk;
    model.quantize = args.quantize;
    model.kv_format = args.kv_format;
    model.fp8_activations = args.fp8_activations.then_some(true);
    model.draft = named::draft(args.draft.as_ref(), args.json)?;
    model.drafts = args.drafts;
    model.drafts_always = args.drafts.map(|drafts| drafts > 0);
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.cache_directory = cache_directory();
    config.runtime.tune = args.tune.clone();
    config.runtime.self_test = args.self_test.wanted();
    let host = {
        let show = progress::Show::brief(args.json);
        args.quantize.iter().for_each(|to| show.notice(&format!("quantised to {to}")));
        Arc::new(start(&config, &show)?)
    };
    printer.model = host.models().first().map(|model| convert::model(model));
    // Empty names select the only model and its only replica.
    let request = proto::GenerateRequest { model: String::new(), ..request(args)? };
    let mut prepared = prepare(&host, request, None).map_err(Refused::from)?;
    let rows: Arc<Mutex<Vec<Vec<f32>>>> = Arc::default();
    prepared.request.dump_logits = args.dump_logits.is_some();
    let sink = Arc::clone(&rows);
    let delivery = Delivery {
        buffer: BUFFER,
        rpc: tracing::Span::none(),
        grpc: false,
        stop: CancellationToken::new(),
        places: None,
        logits: Some(Box::new(move |row| {
            sink.lock().unwrap_or_else(PoisonError::into_inner).push(row);
        })),
    };
    let generation = Generation::start(prepared, delivery).map_err(Refused::from)?;
    runtime.block_on(print(generation, printer))?;
    if let Some(file) = &args.dump_logits {
        let rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
        write_logits(file, &rows)?;
    }
    Ok(())
}

fn write_logits(file: &Path, rows: &[Vec<f32>]) -> anyhow::Result<()> {
    let vocabulary = rows.first().map_or(0, Vec::len);
    let bytes: Vec<u8> = rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    let shape = vec![rows.len(), vocabulary];
    let logits = TensorView::new(Dtype::F32, shape, &bytes).context("steps differ in size")?;
    safetensors::serialize_to_file([("logits", logits)], None, file)
        .map_err(|error| anyhow::Error::from(Usage(format!("cannot write {}: {error}", file.display()))))
}

async fn print(mut stream: impl Stream<Item = Messages> + Unpin, printer: &mut Printer) -> anyhow::Result<()> {
    while let Some(message) = stream.next().await {
        match message {
            Ok(message) => printer.event(&message.event.unwrap_or(Event::Delta(<_>::default())))?,
            Err(status) => {
                printer.end_line()?;
                return Err(Refused::from(status).into());
            }
        }
    }
    Ok(())
}

/// Prints events as they arrive, and keeps the data for the final table.
struct Printer {
    json: bool,
    /// In text mode: the model, with its replicas; `None` if the server has none of that name.
    model: Option<proto::Model>,
    started: Option<proto::Started>,
    finished: Option<proto::Finished>,
    /// In text mode: the current line is not yet terminated.
    open_line: bool,
}

impl Printer {
    fn new(json: bool) -> Printer {
        Printer { json, model: None, started: None, finished: None, open_line: false }
    }

    fn event(&mut self, event: &Event) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{}", object(event))?;
        } else if let Event::Delta(delta) = event {
            // Without a tokenizer, only ids can be shown.
            if self.model.as_ref().is_some_and(|model| !model.has_tokenizer) {
                for id in &delta.token_ids {
                    write!(out, "{}{id}", if self.open_line { " " } else { "" })?;
                    self.open_line = true;
                }
            }
            write!(out, "{}", delta.text)?;
            self.open_line |= !delta.text.is_empty();
        }
        // Flush after each event, so that it appears at once, also in a pipe.
        out.flush()?;
        drop(out);
        match event {
            Event::Started(started) => self.started = Some(started.clone()),
            Event::Prompt(_) | Event::Delta(_) => {}
            Event::Finished(finished) => {
                self.end_line()?;
                self.finished = Some(finished.clone());
            }
        }
        Ok(())
    }

    fn end_line(&mut self) -> std::io::Result<()> {
        if std::mem::take(&mut self.open_line) {
            writeln!(std::io::stdout().lock())?;
        }
        Ok(())
    }

    /// Prints the device, or all devices of a split model, and the cost per token to stderr.
    fn table(&self) {
        let (Some(started), Some(finished)) = (&self.started, &self.finished) else {
            return;
        };
        if self.json || progress::verbosity() == progress::Verbosity::Quiet {
            return;
        }
        let replicas = self.model.iter().flat_map(|model| &model.replicas);
        let device = replicas.filter(|replica| replica.name == started.replica).find_map(placed);
        // A model may have been loaded again since it was listed.
        let device = device.or_else(|| Some(started.device.as_ref()?.name.clone())).unwrap_or_default();
        let usage = finished.usage.unwrap_or_default();
        let timings = finished.timings.unwrap_or_default();
        let cost = finished.per_token.unwrap_or_default();
        // The first output token is computed by the prompt's last step.
        let decoded = usage.output_tokens.saturating_sub(1);
        let speed = speed(decoded, timings.decode_seconds).map_or("-".to_owned(), |speed| format!("{speed:.1}"));
        let read = usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens);
        eprintln!();
        eprintln!("  device                {device}");
        eprintln!(
            "  prompt                {} tokens, {} tokens/s",
            usage.prompt_tokens,
            rate(read, timings.prefill_seconds)
        );
        eprintln!("  output                {} tokens, {speed} tokens/s", usage.output_tokens);
        if usage.drafted_tokens > 0 {
            eprintln!("  drafts                {} tokens, {} right", usage.drafted_tokens, usage.accepted_tokens);
        }
        eprintln!("  submits/token         {:.3}", cost.submits);
        eprintln!("  barriers/token        {:.1}", cost.barriers);
        eprintln!("  dispatches/token      {:.1}", cost.dispatches);
        eprintln!("  host waits/token      {:.3}", cost.host_waits);
    }
}

fn rate(tokens: u32, seconds: f64) -> String {
    if tokens == 0 || seconds <= 0.0 {
        return "-".to_owned();
    }
    format!("{:.1}", f64::from(tokens) / seconds)
}

/// Formats an event as one JSON object. Scripts rely on this format.
fn object(event: &Event) -> Value {
    match event {
        Event::Started(started) => {
            let device = started.device.clone().unwrap_or_default();
            json!({
                "event": "started",
                "device": { "name": device.name, "uuid": device.uuid },
                "prompt_tokens": started.prompt_tokens,
                "cached_tokens": started.cached_tokens,
            })
        }
        Event::Prompt(prompt) => {
            let tokens: Vec<Value> = prompt.tokens.iter().map(logprobs).collect();
            json!({ "event": "prompt", "logprobs": tokens })
        }
        Event::Delta(delta) => {
            let mut object = json!({
                "event": "delta",
                "index": delta.index,
                "token_ids": delta.token_ids,
                "text": delta.text,
            });
            if !delta.logprobs.is_empty() {
                object["logprobs"] = delta.logprobs.iter().map(logprobs).collect();
            }
            object
        }
        Event::Finished(finished) => {
            let usage = finished.usage.unwrap_or_default();
            let timings = finished.timings.unwrap_or_default();
            let cost = finished.per_token.unwrap_or_default();
            let flushes = cost.flushes.unwrap_or_default();
            json!({
                "event": "finished",
                "index": finished.index,
                "reason": reason(finished.reason()),
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "output_tokens": usage.output_tokens,
                },
                "timings_ms": {
                    "queue": timings.queue_seconds * 1e3,
                    "prefill": timings.prefill_seconds * 1e3,
                    "decode": timings.decode_seconds * 1e3,
                },
                "per_token": {
                    "submits": cost.submits,
                    "dispatches": cost.dispatches,
                    "barriers": cost.barriers,
                    "descriptor_updates": cost.descriptor_updates,
                    "transfer_submits": cost.transfer_submits,
                    "host_waits": cost.host_waits,
                    "enqueue_us": cost.enqueue_us,
                    "gpu_us": cost.gpu_us,
                    "flushes": {
                        "phase_boundary": flushes.phase_boundary,
                        "readback": flushes.readback,
                        "cross_queue": flushes.cross_queue,
                    },
                },
            })
        }
    }
}

fn logprobs(logprobs: &proto::TokenLogprobs) -> Value {
    // Without a tokenizer there are no texts. Bytes that are a part of a character are shown as U+FFFD.
    let token = |id: u32, logprob: f32, text: &[u8]| {
        let mut object = json!({ "token_id": id, "logprob": logprob });
        if !text.is_empty() {
            object["text"] = String::from_utf8_lossy(text).into();
        }
        object
    };
    let top: Vec<Value> = logprobs.top.iter().map(|other| token(other.token_id, other.logprob, &other.text)).collect();
    let mut object = token(logprobs.token_id, logprobs.logprob, &logprobs.text);
    object["top"] = top.into();
    object
}

fn reason(reason: proto::FinishReason) -> &'static str {
    match reason {
        proto::FinishReason::Unspecified => "unspecified",
        proto::FinishReason::Stop => "stop",
        proto::FinishReason::Length => "length",
        proto::FinishReason::Aborted => "aborted",
        proto::FinishReason::DeadlineExceeded => "deadline_exceeded",
        proto::FinishReason::Error => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_each_event_is_the_contract() {
        let started = proto::Started {
            device: Some(proto::Device { name: "d".into(), uuid: "u".into(), index: 3, ..Default::default() }),
            prompt_tokens: 5,
            cached_tokens: 2,
            ..Default::default()
        };
        assert_eq!(
            object(&Event::Started(started)).to_string(),
            r#"{"event":"started","device":{"name":"d","uuid":"u"},"prompt_tokens":5,"cached_tokens":2}"#
        );
        let prompt = proto::TokenLogprobs { token_id: 7, logprob: -2.0, ..Default::default() };
        assert_eq!(
            object(&Event::Prompt(proto::PromptLogprobs { tokens: vec![prompt] })).to_string(),
            r#"{"event":"prompt","logprobs":[{"token_id":7,"logprob":-2.0,"top":[]}]}"#
        );
        let mut delta = proto::Delta { token_ids: vec![1, 2], text: "é\n".into(), ..Default::default() };
        assert_eq!(
            object(&Event::Delta(delta.clone())).to_string(),
            r#"{"event":"delta","index":0,"token_ids":[1,2],"text":"é\n"}"#
        );
        let other = proto::token_logprobs::Alternative { token_id: 9, logprob: -0.5, text: vec![0xc3] };
        delta.logprobs = vec![proto::TokenLogprobs { token_id: 1, logprob: -1.5, top: vec![other], text: " a".into() }];
        let text = object(&Event::Delta(delta)).to_string();
        let tail = r#","logprobs":[{"token_id":1,"logprob":-1.5,"text":" a","top":[{"token_id":9,"logprob":-0.5,"text":"�"}]}]}"#;
        assert!(text.ends_with(tail), "{text}");
        let finished = proto::Finished {
            reason: proto::FinishReason::Stop.into(),
            usage: Some(proto::Usage { prompt_tokens: 5, cached_tokens: 2, output_tokens: 7, ..Default::default() }),
            timings: Some(proto::Timings {
                queue_seconds: 0.001,
                prefill_seconds: 0.5,
                decode_seconds: 2.0,
                gpu_seconds: 1.0,
            }),
            ..Default::default()
        };
        assert_eq!(
            object(&Event::Finished(finished)).to_string(),
            concat!(
                r#"{"event":"finished","index":0,"reason":"stop","#,
                r#""usage":{"prompt_tokens":5,"output_tokens":7},"#,
                r#""timings_ms":{"queue":1.0,"prefill":500.0,"decode":2000.0},"#,
                r#""per_token":{"submits":0.0,"dispatches":0.0,"barriers":0.0,"#,
                r#""descriptor_updates":0.0,"transfer_submits":0.0,"host_waits":0.0,"#,
                r#""enqueue_us":0.0,"gpu_us":0.0,"#,
                r#""flushes":{"phase_boundary":0.0,"readback":0.0,"cross_queue":0.0}}}"#
            )
        );
    }
}

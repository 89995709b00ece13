//! `ostinato bench`: measures prompt and decode speed as llama-bench does, together with the device's maximum read
//! bandwidth in the same run. Not here: measuring through a server (`load`).

use super::arrivals::{Arrivals, Window};
use super::beside::{self, OWN_PROMPT, beside};
use super::load::{self, Load};
use super::named;
use super::placement::DeviceArgs;
use super::progress::Show;
use crate::config::{Config, Draft, GpuTime, KvFormat, Model, Quantize, file};
use crate::device::{Adapter, Instance, InstanceOptions, choose};
use crate::engine::request::{Event, FinishReason, Finished, Limits, PerToken, Request, RequestError, SinkClosed};
use crate::gpu::build::defaults::check_tuning;
use crate::gpu::build::limits::{MOST_CHUNK, MOST_SLOTS};
use crate::gpu::devices::start_on;
use crate::host::Host;
use crate::kernels::attention::PAGE_TOKENS;
use crate::measure::read_bandwidth::read_bandwidth;
use crate::measure::stages;
use crate::measure::stages::{Stage, stages};
use crate::model::checkpoint::Checkpoint;
use crate::model::decoder::StepShape;
use crate::model::grammar::{Constraint, Next, StartedGrammar, bit};
use crate::model::text::Text;
use crate::replica::Replica;
use anyhow::bail;
use crossbeam_channel::{Receiver, bounded};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The maximum context length before a test, in tokens: more than any model has.
const MOST_DEPTH: i64 = 1 << 24;

/// Arguments of `ostinato bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Bench {
    /// Folder of a checkpoint, a GGUF file, ORG/NAME on the Hugging Face hub, or an embedded demo model: `demo` or
    /// `demo-hybrid`.
    #[arg(long, default_value = "demo", value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Prompt tokens; 0 skips the prompt test.
    ///
    /// If there are several streams, each one decodes after a prompt of this length. Their row shows the decode speed
    /// while all streams decode ("tokens/s": from the last stream's first token to the first stream's end; other
    /// benchmarks call it batched decode). It also shows output tokens, and prompt plus output tokens, over the total
    /// time from the first submission to the last end, prompts included ("output/s", "total/s"). The rows of --server
    /// show the same quantities.
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt: u32,
    /// Tokens to decode; 0 skips the decode test.
    #[arg(long, value_name = "N", default_value_t = 128)]
    decode: u32,
    /// Context length before the test, in tokens.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=MOST_DEPTH))]
    depth: u32,
    /// Numbers of concurrent streams, separated by commas; each is measured separately.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "1")]
    streams: Vec<u32>,
    /// Runs of each test after one warm-up run; the median is shown. Default: 5; with --server 1 run and no warm-up.
    #[arg(long, value_name = "N")]
    repeat: Option<u32>,
    /// Maximum number of tokens in a prompt chunk.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prefill_chunk: Option<u32>,
    /// Number of draft tokens per step, for models that support speculative decoding; 0 disables it. Default: as many
    /// as are worthwhile.
    #[arg(long, value_name = "N")]
    drafts: Option<u32>,
    /// Source of draft tokens: `lookup` drafts the tokens that followed an earlier occurrence of the last tokens, and
    /// needs no drafting block in the model; or a smaller model with the same vocabulary, or a draft head (EAGLE-3), given
    /// like the model itself. Default: the model's own block, if it has one.
    #[arg(long, value_name = "lookup|MODEL", conflicts_with = "server")]
    draft: Option<Draft>,
    /// Number format of keys and values in the KV cache: f16, f32 or int8. Default: f16.
    #[arg(long, value_name = "f16|f32|int8")]
    kv_format: Option<KvFormat>,
    /// With weights in FP8, round the inputs of products of 128 rows and more to FP8 too, where the device multiplies such
    /// numbers (NVIDIA's compute capability 9.0): faster prompts and batches, with a larger error.
    #[arg(long, conflicts_with = "server")]
    fp8_activations: bool,
    /// Quantise 16-bit and 32-bit matrices at load: int8 (8.125 bits a weight, relative error 0.65 %) or int4 (5 bits,
    /// 7.3 %).
    #[arg(long, value_name = "int8|int4")]
    quantize: Option<Quantize>,
    /// Run the prompt test on prompts that are in the prefix cache except for their end.
    #[arg(long)]
    seen: bool,
    /// In the prompt test, also compute log probabilities of the prompt's tokens and of N alternatives for each.
    #[arg(long, value_name = "N")]
    prompt_logprobs: Option<u32>,
    /// In the decode test, constrain the output to the JSON Schema in this file; its output must take more than
    /// --decode tokens. The model needs a tokenizer.
    #[arg(long, value_name = "FILE")]
    json_schema: Option<PathBuf>,
    /// Number of streams that --json-schema applies to; the others are not constrained. Default: all.
    #[arg(long, value_name = "N", requires = "json_schema")]
    constrained: Option<u32>,
    /// Instead of the tests, measure how long decoding streams (--streams) wait for a token while a prompt (--prompt) is processed.
    #[arg(long)]
    beside: bool,
    /// Instead of the tests, time each stage of a decode step separately; with --chunk, the stages of a prompt chunk.
    #[arg(long, conflicts_with = "split")]
    stages: bool,
    /// With --stages: number of batch rows of the decode step.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_SLOTS)))]
    rows: u32,
    /// With --stages: number of tokens of the prompt chunk, which is timed instead of a decode step.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CHUNK)))]
    chunk: Option<u32>,
    /// With --stages: context length of the last row, if it differs from --depth.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=MOST_DEPTH))]
    last_depth: Option<u32>,
    /// With --stages: tuning changes to time separately: KEY=VALUE, separated by commas.
    #[arg(long = "try", value_name = "KEY=VALUE", value_delimiter = ',')]
    tries: Vec<String>,
    /// Changes to the device's tuning: KEY=VALUE, separated by commas.
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
    tune: Vec<String>,
    #[command(flatten)]
    self_test: super::SelfTestArgs,
    /// How finely device time is measured with timestamps.
    #[arg(long, value_enum, default_value = "phases")]
    gpu_time: GpuTime,
    /// Print one JSON object per row to standard output.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    load: Load,
}

/// One row of results.
struct Row {
    test: &'static str,
    tokens: u32,
    depth: u32,
    streams: u32,
    tokens_per_second: f64,
    bytes_per_token: f64,
    per_token: PerToken,
    wave: Option<Wave>,
}

impl Row {
    /// Returns the read rate of the row, in bytes per second.
    fn read_rate(&self) -> f64 {
        self.tokens_per_second * self.bytes_per_token
    }
}

/// Totals over several concurrent streams, prompts included.
#[derive(Clone, Copy)]
struct Wave {
    /// Prompt tokens of each stream.
    prompt: u32,
    /// Time from the first submission to the last end.
    seconds: f64,
    output_per_second: f64,
    total_per_second: f64,
}

pub(crate) fn run(args: &Bench, cache: Option<PathBuf>, progress: &Show) -> anyhow::Result<()> {
    if args.streams.is_empty() || args.streams.contains(&0) || args.repeat == Some(0) {
        bail!(super::Usage("streams and repeat must be at least 1".to_owned()));
    }
    if let Some(server) = &args.load.server {
        let (prompt, decode, streams) = (args.prompt, args.decode, &args.streams);
        let repeat = args.repeat.unwrap_or(1);
        return load::run(&args.load, load::Shape { prompt, decode, streams, repeat, json: args.json }, server);
    }
    if args.prompt == 0 && args.decode == 0 && !args.stages && !args.beside {
        bail!(super::Usage("prompt is 0 and decode is 0, which leaves nothing to measure".to_owned()));
    }
    let instance = Instance::new(&InstanceOptions { validation: false })?;
    let adapters = instance.adapters();
    let placement = args.devices.replica()?;
    let chosen = match placement.devices.as_slice() {
        [] => vec![choose(&adapters, placement.device.as_ref())?],
        devices => devices.iter().map(|device| choose(&adapters, Some(device))).collect::<Result<_, _>>()?,
    };
    for adapter in &chosen {
        check_tuning(adapter, &args.tune)?;
    }
    // The stages are those of a single device.
    let adapter = chosen[0];
    // Each is tried alone.
    for change in &args.tries {
        check_tuning(adapter, std::slice::from_ref(change))?;
    }
    let (path, mut checkpoint) = named::opened(&named::find(&args.model, args.json)?)?;
    // Before the weights are loaded, which may take minutes.
    if !checkpoint.config.causal && !args.stages {
        bail!(RequestError::EmbedsOnly);
    }
    let grammar = grammar(args, &path, &checkpoint)?;
    // Several devices can read at once.
    let mut bandwidth = Some(0.0);
    for adapter in &chosen {
        let own = read_bandwidth(&instance, adapter)?;
        bandwidth = bandwidth.zip(own).map(|(all, own)| all + own);
    }
    if let Some(to) = args.quantize {
        checkpoint.quantize(to);
    }
    if args.stages {
        return print_stages(args, &instance, adapter, &checkpoint, bandwidth);
    }
    let most = args.streams.iter().copied().max().unwrap_or(1);
    if most > MOST_SLOTS {
        bail!(super::Usage(format!("--streams has {most}, at most {MOST_SLOTS} streams can decode at once")));
    }
    // Lengths that add up to more than any context are refused with the greatest number.
    let sum = |lengths: &[u32]| lengths.iter().fold(0u32, |sum, length| sum.saturating_add(*length));
    let mut model = Model::new("bench", path.clone(), None);
    model.replicas = vec![placement];
    model.slots = Some(most + u32::from(args.beside));
    let (longest, how) = if args.beside {
        (sum(&[args.prompt, args.decode, beside::ROOM]), "and")
    } else if most > 1 && args.decode > 0 {
        (sum(&[args.depth, args.prompt, args.decode, 16]), "and")
    } else {
        (sum(&[args.depth, args.prompt.max(args.decode.saturating_add(1)), 16]), "or")
    };
    if longest > checkpoint.config.context {
        bail!(super::Usage(format!(
            "depth {} with prompt {} {how} decode {} needs a context of {longest}, the model has {}",
            args.depth, args.prompt, args.decode, checkpoint.config.context
        )));
    }
    // Every stream has its own pages, with one stream to spare; with --seen there is as much room again for cached
    // pages.
    model.kv_pages = Some((most + 1) * (longest.div_ceil(PAGE_TOKENS) + 1) * if args.seen { 2 } else { 1 });
    model.context = Some(longest);
    model.prefill_chunk = args.prefill_chunk;
    model.quantize = args.quantize;
    model.draft = named::draft(args.draft.as_ref(), args.json)?;
    model.drafts = args.drafts;
    model.drafts_always = args.drafts.map(|drafts| drafts > 0);
    model.kv_format = args.kv_format;
    model.fp8_activations = args.fp8_activations.then_some(true);
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.cache_directory = cache;
    config.runtime.tune = args.tune.clone();
    config.runtime.self_test = args.self_test.wanted();
    config.telemetry.gpu_time = args.gpu_time;
    config.server.queue_limit = config.server.queue_limit.max(most);
    args.quantize.iter().for_each(|to| progress.notice(&format!("quantised to {to}")));
    let host = start_on(&instance, &config, progress)?;

    if args.beside {
        return print_beside(args, &host);
    }
    let kv_token_bytes = checkpoint.config.kv_bytes_per_token(args.kv_format.unwrap_or(KvFormat::F16));
    let mut rows = Vec::new();
    for &streams in &args.streams {
        if args.prompt > 0 {
            let mut row = median(args, &host, None, Test::Prefill, streams)?;
            row.bytes_per_token = checkpoint.bytes_per_token() as f64 / f64::from(args.prompt);
            rows.push(row);
        }
        if args.decode > 0 {
            let mut row = median(args, &host, grammar.as_ref(), Test::Decode, streams)?;
            let prompt = row.wave.map_or(args.depth, |wave| wave.prompt);
            let context = f64::from(prompt) + f64::from(args.decode) / 2.0;
            row.bytes_per_token =
                checkpoint.bytes_per_token() as f64 / f64::from(streams) + kv_token_bytes as f64 * context;
            rows.push(row);
        }
    }
    let bandwidth = bandwidth.map(|measured| ReadBandwidth::new(measured, rows.iter().map(Row::read_rate)));
    if args.json {
        for row in &rows {
            println!("{}", json_row(row, bandwidth.as_ref()));
        }
    } else {
        let names: Vec<&str> = chosen.iter().map(|adapter| adapter.name.as_str()).collect();
        print_table(&rows, bandwidth.as_ref(), &names.join(" + "), &path, &host);
    }
    Ok(())
}

/// The read bandwidth of a device, or of all devices of a split model together, in bytes per second, as far as this run
/// knows it. Sweeps over a large buffer give a lower bound, and so does every row: a row may be faster, because caches
/// help it or because a sweep was disturbed. Rows are compared with the largest of these rates.
struct ReadBandwidth {
    /// The rate of the sweeps, of several devices their sum.
    measured: f64,
    /// The largest rate of the sweeps and all rows.
    most: f64,
}

impl ReadBandwidth {
    fn new(measured: f64, rates: impl Iterator<Item = f64>) -> ReadBandwidth {
        ReadBandwidth { measured, most: rates.filter(|rate| rate.is_finite()).fold(measured, f64::max) }
    }

    /// Returns `rate` as a share of the read bandwidth, at most 1.
    fn fraction(&self, rate: f64) -> f64 {
        rate / self.most
    }

    /// Returns a message that a row was faster than the sweep; `None` if no row was.
    fn exceeded(&self) -> Option<String> {
        (self.most > self.measured).then(|| {
            format!(
                "a row read {:.1} GB/s, more than the {:.1} GB/s of the measurement, which is a lower bound: caches may \
                 have helped, and this rate counts as 100 % here",
                self.most / 1e9,
                self.measured / 1e9
            )
        })
    }
}

fn print_stages(
    args: &Bench,
    instance: &Instance,
    adapter: &Adapter,
    checkpoint: &Checkpoint,
    bandwidth: Option<f64>,
) -> anyhow::Result<()> {
    let load = stages::StageLoad {
        shape: match args.chunk {
            Some(rows) => StepShape::Prefill { rows },
            None => StepShape::Decode { rows: args.rows },
        },
        position: args.depth,
        last_position: args.last_depth,
        kv_format: args.kv_format.unwrap_or(KvFormat::F16),
        tries: args.tries.clone(),
    };
    let stages = stages(instance, adapter, checkpoint, &load, |tuning| {
        tuning.fp8_activations = args.fp8_activations;
        for change in &args.tune {
            tuning.set(change);
        }
    })?;
    let rate = |stage: &Stage| stage.weight_bytes as f64 / (stage.us * 1e-6);
    let bandwidth = bandwidth.map(|measured| ReadBandwidth::new(measured, stages.iter().map(rate)));
    if let Some(exceeded) = bandwidth.as_ref().filter(|_| !args.json).and_then(ReadBandwidth::exceeded) {
        println!("{exceeded}");
    }
    let mut total = 0.0;
    for stage in &stages {
        let step_us = stage.us * f64::from(stage.calls);
        if stage.tried.is_none() && stage.name != "step" {
            total += step_us;
        }
        let rate = rate(stage);
        let fraction = bandwidth.as_ref().map_or(0.0, |bandwidth| bandwidth.fraction(rate));
        let flops = stage.operations as f64 / (stage.us * 1e-6);
        if args.json {
            println!(
                "{}",
                json!({"stage": stage.name, "tried": stage.tried, "rows": load.shape.rows(), "depth": args.depth,
                    "calls": stage.calls, "us": stage.us, "weight_bytes": stage.weight_bytes,
                    "ceiling_fraction": fraction, "operations": stage.operations})
            );
        } else {
            println!(
                "{:<11} {:>4} x {:>8.2} us = {:>9.1} us   {:>6.0} GB/s {:>4.0} % {:>7.1} TFLOP/s  {}",
                stage.name,
                stage.calls,
                stage.us,
                step_us,
                rate / 1e9,
                fraction * 100.0,
                flops / 1e12,
                stage.tried.as_deref().unwrap_or("")
            );
        }
    }
    if !args.json {
        let per_token = total / f64::from(load.shape.rows());
        println!("{:<11} {:>31.1} us   {:.1} tokens/s", "sum", total, 1e6 / per_token);
    }
    Ok(())
}

fn print_beside(args: &Bench, host: &Host) -> anyhow::Result<()> {
    let (model, replica) = host.route("", "")?;
    let room = model.info.context - OWN_PROMPT - 1;
    for &streams in &args.streams {
        let mut runs = Vec::new();
        for run in 0..=args.repeat.unwrap_or(5) {
            let found = beside(&replica, model.info.vocabulary, streams, args.prompt, room, run)?;
            if run > 0 {
                runs.push(found);
            }
        }
        runs.sort_by(|a, b| (a.longest / a.step).total_cmp(&(b.longest / b.step)));
        // Report the worst run, because the result is meant as an upper bound.
        let Some(worst) = runs.last() else { continue };
        let (step, longest, first) = (worst.step * 1e3, worst.longest * 1e3, worst.first_token * 1e3);
        if args.json {
            let row = json!({"test": "beside", "streams": streams, "prompt": args.prompt, "step_ms": step, "longest_gap_ms": longest, "first_token_ms": first});
            println!("{row}");
        } else {
            println!(
                "{streams} streams: {step:.2} ms a token; while a prompt of {} is taken in ({first:.1} ms), {longest:.2} ms at most ({:.1} times)",
                args.prompt,
                longest / step
            );
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Test {
    Prefill,
    Decode,
}

/// Compiles the output constraint, and prints how long compiling it and computing its token masks take.
fn grammar(args: &Bench, path: &Path, checkpoint: &Checkpoint) -> anyhow::Result<Option<StartedGrammar>> {
    let Some(schema) = &args.json_schema else { return Ok(None) };
    let usage = |why: String| super::Usage(why);
    let schema = file::read_argument_text(schema, file::SMALL)
        .map_err(|error| usage(format!("cannot read {}: {error}", schema.display())))?;
    let text = Text::load(path)?.ok_or_else(|| usage("--json-schema needs a model with a tokenizer".to_owned()))?;
    let vocabulary = checkpoint.config.vocab;
    let grammars = text.grammars(vocabulary, &checkpoint.config.eos)?;
    let begin = Instant::now();
    let started = grammars.start(&Constraint::JsonSchema(schema), true);
    let started = started.map_err(|error| usage(format!("--json-schema: {error}")))?;
    let compiled = begin.elapsed();
    let mut times = mask_times(started.clone(), vocabulary)?;
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    eprintln!(
        "the schema was compiled in {:.1} ms; what may follow a token is found in {:.0} us (median), {:.0} (95 %), {:.0} (all)",
        compiled.as_secs_f64() * 1e3,
        at(0.5),
        at(0.95),
        at(1.0)
    );
    Ok(Some(started))
}

/// Measures how long the mask of allowed tokens takes to compute after each token of a random text, on one thread.
fn mask_times(mut started: StartedGrammar, vocabulary: u32) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    for token in tokens(256, vocabulary, 1) {
        let allowed = |id: &u32| bit(&started.mask, *id);
        let Some(token) = (token..vocabulary).chain(0..token).find(allowed) else { break };
        let begin = Instant::now();
        let next = started.grammar.take(token)?;
        times.push(begin.elapsed());
        match next {
            Next::Mask(mask) => started.mask = mask,
            Next::Complete => break,
        }
    }
    Ok(times)
}

/// Runs a test several times after a warm-up and returns the run with the median speed.
fn median(
    args: &Bench,
    host: &Host,
    grammar: Option<&StartedGrammar>,
    test: Test,
    streams: u32,
) -> anyhow::Result<Row> {
    let (model, replica) = host.route("", "")?;
    // Run 0 is the warm-up.
    let mut runs = Vec::new();
    for index in 0..=args.repeat.unwrap_or(5) {
        let row = once(args, &replica, model.info.vocabulary, grammar, test, streams, index)?;
        if index > 0 {
            runs.push(row);
        }
    }
    runs.sort_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second));
    Ok(runs.swap_remove(runs.len() / 2))
}

fn once(
    args: &Bench,
    replica: &Replica,
    vocabulary: u32,
    grammar: Option<&StartedGrammar>,
    test: Test,
    streams: u32,
    seed: u32,
) -> anyhow::Result<Row> {
    let (prompt, output) = match (test, streams) {
        (Test::Prefill, _) => (args.depth + args.prompt, 1),
        (Test::Decode, 1) => (args.depth.max(1), args.decode + 1),
        // The same amounts as through a server, so that the results can be compared.
        (Test::Decode, _) => ((args.depth + args.prompt).max(1), args.decode),
    };
    let test_name = if test == Test::Prefill { "prefill" } else { "decode" };
    let seen = args.seen && test == Test::Prefill;
    let before = replica.steps(1).last().map(|record| record.number);
    let begin = Instant::now();
    let ends: Vec<Receiver<(Arrivals, Finished)>> = (0..streams)
        .map(|stream| {
            let (sender, ended) = bounded(1);
            let id = format!("bench-{test_name}-{streams}-{seed}-{stream}");
            let prompt = tokens(prompt, vocabulary, if seen { stream } else { seed * 1000 + stream });
            let mut request = request(id, prompt, output);
            request.grammar = grammar.filter(|_| args.constrained.is_none_or(|most| stream < most)).cloned();
            request.prompt_logprobs = args.prompt_logprobs.filter(|_| test == Test::Prefill);
            if seen {
                request.cache_salt = "seen".to_owned();
            }
            let mut arrivals = Arrivals::default();
            let sink = Box::new(move |event| {
                match event {
                    Event::Token(_) => arrivals.push(Instant::now(), 1),
                    Event::Finished(finished) => {
                        sender.send((std::mem::take(&mut arrivals), *finished)).map_err(|_| SinkClosed)?;
                    }
                    Event::Started(_) | Event::Prompt(_) | Event::Embedding(_) => {}
                }
                Ok(())
            });
            replica.submit(request, sink).map(|()| ended)
        })
        .collect::<Result<_, _>>()?;
    let ended: Vec<(Arrivals, Finished)> = ends.iter().map(wait).collect::<anyhow::Result<_>>()?;
    let seconds = begin.elapsed().as_secs_f64().max(1e-9);
    let first = &ended[0].1;
    let made = f64::from(streams) * f64::from(output);
    let (tokens, tokens_per_second) = match (test, streams) {
        (Test::Prefill, 1) => (args.prompt, f64::from(args.prompt) / first.timings.prefill.as_secs_f64().max(1e-9)),
        (Test::Prefill, _) => (args.prompt, f64::from(args.prompt) * f64::from(streams) / seconds),
        (Test::Decode, 1) => (args.decode, f64::from(args.decode) / first.timings.decode.as_secs_f64().max(1e-9)),
        (Test::Decode, _) => {
            let window = Window::of(ended.iter().map(|(arrivals, _)| arrivals));
            // If the streams never all decode at the same time, only the overall rate is known.
            (args.decode, window.map_or(made / seconds, |window| window.rate()))
        }
    };
    let wave = (test == Test::Decode && streams > 1).then(|| Wave {
        prompt,
        seconds,
        output_per_second: made / seconds,
        total_per_second: (made + f64::from(streams) * f64::from(prompt)) / seconds,
    });
    Ok(Row {
        test: test_name,
        tokens,
        depth: args.depth,
        streams,
        tokens_per_second,
        bytes_per_token: 0.0,
        per_token: match test {
            Test::Decode => first.per_token,
            Test::Prefill => prompt_cost(replica, before, prompt * streams),
        },
        wave,
    })
}

/// One greedy generation of `output` tokens. Its own cache salt keeps it from finding cached pages, so that its prompt
/// is computed.
pub(super) fn request(id: String, prompt: Vec<u32>, output: u32) -> Request {
    Request {
        limits: Limits { max_tokens: Some(output), ignore_eos: true, ..Limits::default() },
        cache_salt: id.clone(),
        ..Request::new(id, prompt)
    }
}

/// Mean cost per prompt token of the prefill steps after step `before`.
fn prompt_cost(replica: &Replica, before: Option<u64>, tokens: u32) -> PerToken {
    let mut cost = PerToken::default();
    for record in replica.steps(usize::MAX) {
        if record.phase == "prefill" && before.is_none_or(|before| record.number > before) {
            cost.add(&record.cost, 1.0);
        }
    }
    cost.mean(u64::from(tokens))
}

fn wait(ended: &Receiver<(Arrivals, Finished)>) -> anyhow::Result<(Arrivals, Finished)> {
    let (arrivals, finished) = ended.recv()?;
    match &finished.reason {
        FinishReason::Error(message) => bail!("the run failed: {message}"),
        FinishReason::Constraint(error) => bail!("{error}"),
        FinishReason::Embedded => bail!("a vector came instead of tokens"),
        FinishReason::Complete => bail!("the schema was satisfied after {} tokens", finished.output_tokens),
        _ => {}
    }
    Ok((arrivals, finished))
}

/// Pseudorandom token ids over the whole vocabulary; the same seed gives the same ids.
pub(super) fn tokens(count: u32, vocabulary: u32, seed: u32) -> Vec<u32> {
    let mut state = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % u64::from(vocabulary)) as u32
        })
        .collect()
}

fn per_token_json(p: &PerToken) -> Value {
    json!({
        "submits": p.submits,
        "dispatches": p.dispatches,
        "barriers": p.barriers,
        "descriptor_updates": p.descriptor_updates,
        "transfer_submits": p.transfer_submits,
        "host_waits": p.host_waits,
        "enqueue_us": p.enqueue_us,
        "schedule_us": p.schedule_us,
        "deliver_us": p.deliver_us,
        "gpu_us": p.gpu_us,
        "flushes": {
            "phase_boundary": p.flushes.phase_boundary,
            "readback": p.flushes.readback,
            "cross_queue": p.flushes.cross_queue,
        },
    })
}

fn json_row(row: &Row, bandwidth: Option<&ReadBandwidth>) -> Value {
    json!({
        "test": row.test,
        "tokens": row.tokens,
        "depth": row.depth,
        "streams": row.streams,
        "tokens_per_second": row.tokens_per_second,
        "bytes_per_token": row.bytes_per_token,
        "ceiling_gb_per_second": bandwidth.map(|c| c.most / 1e9),
        "ceiling_measured_gb_per_second": bandwidth.map(|c| c.measured / 1e9),
        "ceiling_fraction": bandwidth.map(|c| c.fraction(row.read_rate())),
        "per_token": per_token_json(&row.per_token),
        "prompt": row.wave.map(|wave| wave.prompt),
        "seconds": row.wave.map(|wave| wave.seconds),
        "output_tokens_per_second": row.wave.map(|wave| wave.output_per_second),
        "total_tokens_per_second": row.wave.map(|wave| wave.total_per_second),
    })
}

fn print_table(rows: &[Row], bandwidth: Option<&ReadBandwidth>, device: &str, path: &Path, host: &Host) {
    let models = host.models();
    let info = &models[0].info;
    println!(
        "{} from {}, {:.1} million parameters, {:.1} MB a token at batch 1",
        info.architecture,
        path.display(),
        info.parameters as f64 / 1e6,
        info.bytes_per_token as f64 / 1e6
    );
    match bandwidth {
        Some(bandwidth) => match bandwidth.exceeded() {
            None => println!("{device}: reads {:.1} GB/s at most (measured now)", bandwidth.measured / 1e9),
            Some(exceeded) => println!("{device}: {exceeded}"),
        },
        None => println!("{device}: its queue has no timestamps, so its read bandwidth is unknown"),
    }
    println!();
    println!(
        "{:<8} {:>7} {:>7} {:>8} {:>11} {:>10} {:>8} {:>8} {:>10} {:>9} {:>11} {:>10} {:>9} {:>10} {:>10}",
        "test",
        "tokens",
        "depth",
        "streams",
        "tokens/s",
        "ms/token",
        "read bw",
        "submits",
        "dispatches",
        "barriers",
        "host waits",
        "enqueue us",
        "gpu us",
        "output/s",
        "total/s"
    );
    for row in rows {
        let fraction = match (bandwidth, row.test) {
            (Some(bandwidth), "decode") => {
                format!("{:.0} %", 100.0 * bandwidth.fraction(row.read_rate()))
            }
            _ => "-".to_owned(),
        };
        let p = &row.per_token;
        println!(
            "{:<8} {:>7} {:>7} {:>8} {:>11.1} {:>10.3} {:>8} {:>8.3} {:>10.1} {:>9.1} {:>11.3} {:>10.2} {:>9.1} {:>10} {:>10}",
            row.test,
            row.tokens,
            row.depth,
            row.streams,
            row.tokens_per_second,
            1e3 / row.tokens_per_second,
            fraction,
            p.submits,
            p.dispatches,
            p.barriers,
            p.host_waits,
            p.enqueue_us,
            p.gpu_us,
            row.wave.map_or("-".to_owned(), |wave| format!("{:.1}", wave.output_per_second)),
            row.wave.map_or("-".to_owned(), |wave| format!("{:.1}", wave.total_per_second))
        );
    }
    println!(
        "\nper token: {:.0} descriptor updates, {:.0} transfer submits; flushes a token by reason:",
        rows.iter().map(|row| row.per_token.descriptor_updates).fold(0.0, f64::max),
        rows.iter().map(|row| row.per_token.transfer_submits).fold(0.0, f64::max)
    );
    for row in rows {
        let flushes = &row.per_token.flushes;
        println!(
            "{:<8} phase boundary {:.3}, readback {:.3}, cross queue {:.3}",
            row.test, flushes.phase_boundary, flushes.readback, flushes.cross_queue
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rate_is_above_the_read_bandwidth() {
        let bandwidth = ReadBandwidth::new(100e9, [50e9, f64::NAN, 90e9].into_iter());
        assert_eq!((bandwidth.fraction(50e9), bandwidth.exceeded()), (0.5, None));
        let bandwidth = ReadBandwidth::new(100e9, [50e9, 106e9].into_iter());
        assert_eq!(bandwidth.fraction(106e9), 1.0);
        let told = bandwidth.exceeded().expect("a row was faster");
        assert!(told.contains("106.0 GB/s") && told.contains("100.0 GB/s"), "{told}");
    }
}

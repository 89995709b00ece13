//! The command line: one module for each command, and what they share. Not here: anything that the service needs too.

mod arrivals;
mod bench;
mod beside;
mod chat;
mod check_device;
mod connect;
mod devices;
mod embed;
mod generate;
mod hub;
mod inspect;
mod load;
mod manual;
mod models;
mod named;
mod perfetto;
mod placement;
mod profile;
mod progress;
mod reload;
mod sampling;
mod serve;
mod synth;
mod token;
mod tune;

use crate::config::{self, ConfigError, SelectorError};
use crate::device::DeviceError;
use crate::gpu::error::StartError;
use crate::host::source::BuildError;
use crate::model::checkpoint::CheckpointError;
use crate::model::config::Dtype;
use crate::model::synth::SynthError;
use crate::model::text::TextError;
use crate::service::tls::TlsError;
use crate::telemetry::TelemetryError;
use clap::{CommandFactory, Parser, Subcommand};
use progress::Verbosity;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// The place of options of all commands in `--help`: behind those of a command.
const LAST: usize = 900;

/// The program's arguments. `--help` shows the package description from Cargo.toml instead of this text.
#[derive(Debug, Parser)]
#[command(name = "ostinato", version = manual::version(), about, max_term_width = 100)]
struct Cli {
    /// Print results, warnings and errors only.
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = LAST)]
    quiet: bool,
    /// Also print the facts of a load: its memory plan, speed and kernels.
    #[arg(short, long, global = true, display_order = LAST)]
    verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all Vulkan adapters with their identifiers, and why an adapter cannot be used.
    Devices {
        /// Print one JSON array to standard output.
        #[arg(long)]
        json: bool,
        /// Measure how fast each two devices exchange sums, which tensor parallelism does twice a layer, instead.
        #[arg(long)]
        pairs: bool,
    },
    /// Report what a device gets and lacks, build every pipeline of a model on it, and run the tests at start: for bug
    /// reports. The exit status is 1 if something fails.
    CheckDevice(check_device::CheckDevice),
    /// Serve models over OpenAI's HTTP API and gRPC.
    Serve(Box<serve::Serve>),
    /// Talk to a model in the terminal, in this process or on a server.
    Chat(Box<chat::Chat>),
    /// Download a model from the Hugging Face hub into its cache.
    Pull(hub::Pull),
    /// Show what a checkpoint contains, whether it can be run and what memory it needs, without loading it.
    Inspect(inspect::Inspect),
    /// List the models of a running server, or load or unload one while it serves the others.
    Models(models::Models),
    /// Create an access token for a client, and print the entry for the server's token file.
    Token(token::TokenArgs),
    /// Generate text once, in this process or on a server.
    Generate(Box<generate::Generate>),
    /// Make vectors (embeddings) of texts, in this process or on a server.
    Embed(Box<embed::Embed>),
    /// Measure prompt and decode speed, compared with the device's maximum read bandwidth, or measure a server under
    /// load.
    Bench(Box<bench::Bench>),
    /// Show where a server spends the time of its steps, down to single kernels.
    Profile(profile::Profile),
    /// Find the workgroup shapes with the fastest steps on a device, and save them for later starts.
    Tune(tune::Tune),
    /// Write a checkpoint with random weights, in the file layout of Hugging Face.
    Synth(Synth),
    /// Print a script that completes this program's arguments in a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page of this program, or write the pages of all commands.
    Man {
        /// The folder for the pages of all commands.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Compile and follow constraints, or render chat templates, for the process that started this one.
    #[command(hide = true)]
    Worker,
}

#[derive(Debug, clap::Args)]
struct Synth {
    #[command(flatten)]
    shape: Shape,
    /// The folder to write; with --gguf, the file.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write a GGUF file with weights of this type, such as Q4_K_M, Q8_0 or BF16. An unknown type lists all of them.
    #[arg(long, value_name = "TYPE")]
    gguf: Option<String>,
    /// Write quantised safetensors of this type, such as fp8-block, gptq4 or awq. An unknown type lists all of them.
    #[arg(long, value_name = "TYPE", conflicts_with = "gguf")]
    quantize: Option<String>,
    /// Seed of the random weights; the same seed gives the same weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Number format of the weights: bf16, f16 or f32. Default: the one in the shape's configuration.
    #[arg(long, value_name = "bf16|f16|f32")]
    dtype: Option<Dtype>,
    /// Number of layers, with unchanged widths. Default: the one in the shape's configuration.
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Maximum size of one weight file, such as 5GB.
    #[arg(long, value_name = "BYTES")]
    shard_size: Option<config::Bytes>,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Shape {
    /// Name of a built-in shape, such as qwen3-0.6b. An unknown name lists all of them.
    #[arg(long, value_name = "NAME")]
    arch: Option<String>,
    /// A config.json that describes the shape.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// An error in the arguments: a value that is not allowed, or arguments that cannot be combined.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// Runs the program. The exit status is 2 for errors that the user can correct, 1 for all other errors.
pub fn main() -> ExitCode {
    // The status is 2 if the arguments have an error, and 0 for `--help`.
    let Cli { command, quiet, verbose } = match Cli::try_parse() {
        Ok(given) => given,
        Err(text) => return described(&text),
    };
    progress::set_verbosity(match (quiet, verbose) {
        (true, _) => Verbosity::Quiet,
        (_, true) => Verbosity::Verbose,
        _ => Verbosity::Normal,
    });
    let json = matches!(&command, Command::Serve(args) if args.json);
    // Names the running executable, even if its file has been replaced since the start.
    crate::actors::workers::use_program("/proc/self/exe");
    if !matches!(command, Command::Serve(_) | Command::Worker) {
        crate::telemetry::warnings();
    }
    let result = match command {
        Command::Devices { json, pairs } => devices::run(json, pairs),
        Command::CheckDevice(args) => match check_device::run(&args) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::from(1),
            Err(error) => Err(error),
        },
        Command::Serve(args) => serve::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Pull(args) => hub::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Completions { shell } => manual::completions(shell, &mut Cli::command()),
        Command::Man { out } => manual::pages(Cli::command(), out.as_deref()),
        Command::Models(args) => models::run(&args),
        Command::Token(args) => token::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Embed(args) => embed::run(&args),
        Command::Bench(args) => bench::run(&args, cache_directory(), &progress::Show::brief(args.json)),
        Command::Profile(args) => profile::run(&args),
        Command::Worker => return crate::model::worker::serve(),
        Command::Tune(args) => tune::run(&args, cache_directory(), &progress::Show::brief(args.json)),
        Command::Synth(args) => {
            let Synth { shape: Shape { arch, config }, out, gguf, quantize, seed, dtype, layers, shard_size } = args;
            let shard_bytes = shard_size.map(|bytes| bytes.0);
            if shard_bytes == Some(0) {
                return failed(&Usage("--shard-size is 0, must be above 0".to_owned()).into(), false);
            }
            let shape = (arch.as_deref(), config.as_deref(), layers);
            let quantised = (gguf.as_deref(), quantize.as_deref());
            synth::run(shape, &out, quantised, seed, dtype, shard_bytes).map_err(anyhow::Error::from)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&error, json),
    }
}

/// Prints an error and returns the exit status.
fn failed(error: &anyhow::Error, json: bool) -> ExitCode {
    let text = told(error);
    match json {
        // As log lines are written.
        true => eprintln!("{}", json!({"level": "ERROR", "fields": {"message": text}, "target": "ostinato"})),
        false => eprintln!("error: {text}"),
    }
    ExitCode::from(if is_users(error) { 2 } else { 1 })
}

/// Prints what the arguments ask for in place of a command: help, the version, or what is wrong with them. Returns the
/// exit status.
fn described(text: &clap::Error) -> ExitCode {
    let printed = text.print().and_then(|()| std::io::stdout().flush());
    match printed.map_err(anyhow::Error::from) {
        Err(error) if !closed_pipe(&error) => failed(&error.context("cannot print"), false),
        _ => ExitCode::from(u8::try_from(text.exit_code()).unwrap_or(2)),
    }
}

/// Formats an error with its causes, one per line.
fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    let mut above = text.clone();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // Some errors already include the text of their cause.
        if !above.contains(&cause) {
            text.push_str(&format!("\n  caused by: {cause}"));
        }
        above = cause;
    }
    // Errors quote files and servers.
    chat::visible(&text).into_owned()
}

/// Whether the user can correct the error: arguments, files, configuration, a missing device.
fn is_users(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        if let Some(error) = cause.downcast_ref::<StartError>() {
            return error.is_users();
        }
        if let Some(error) = cause.downcast_ref::<BuildError>() {
            return error.is_users();
        }
        if let Some(error) = cause.downcast_ref::<DeviceError>() {
            return error.is_users();
        }
        if let Some(error) = cause.downcast_ref::<SynthError>() {
            return error.is_callers();
        }
        if let Some(error) = cause.downcast_ref::<generate::Refused>() {
            return error.is_users();
        }
        if let Some(error) = cause.downcast_ref::<TelemetryError>() {
            return !matches!(error, TelemetryError::Twice(_));
        }
        if let Some(error) = cause.downcast_ref::<TextError>() {
            return !matches!(error, TextError::Cancelled | TextError::Unavailable(_));
        }
        cause.is::<Usage>()
            || cause.is::<SelectorError>()
            || cause.is::<ConfigError>()
            || cause.is::<CheckpointError>()
            || cause.is::<TlsError>()
            || cause.downcast_ref::<hub::HubError>().is_some_and(hub::HubError::is_users)
    })
}

/// Whether the reader of our output closed the pipe, which is not an error.
fn closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The argument that leaves a test at start out.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(super) struct SelfTestArgs {
    /// Start without comparing the results of a small model of the same kind on the device with those of plain Rust. If
    /// the device's driver is wrong, texts may be wrong.
    #[arg(long)]
    skip_self_test: bool,
}

impl SelfTestArgs {
    fn wanted(self) -> bool {
        !self.skip_self_test
    }
}

/// The default folder for compiled pipelines: `ostinato` in the user's cache folder. `None` if neither XDG_CACHE_HOME
/// nor HOME is an absolute path.
fn cache_directory() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    base.map(|base| base.join("ostinato"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_of_the_arguments_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_documented_arguments_are_read() {
        for line in [
            "devices --json",
            "check-device",
            "check-device --device cpu --model dir --compile-only --tune fragments=0,tags=0 --validation --json",
            "serve --config f.toml --model a=/b@0 --model c=/d --listen 127.0.0.1:1 --insecure",
            "generate --model dir --device cpu --prompt text --max-tokens 5 --temperature 0.7 \
             --top-k 5 --top-p 0.9 --min-p 0.1 --seed 7 --stop a --stop b --logprobs 3 \
             --prompt-logprobs 2 --json",
            "models --server 127.0.0.1:50051",
            "models",
            "serve demo /models/Qwen3-8B model.gguf --device cpu --listen 127.0.0.1:1 --json --quiet",
            "serve Qwen/Qwen3-8B --device 0 --device 1",
            "serve demo --device 0 --device 1 --split layers",
            "serve /models/Qwen3-8B --context 8192 --quantize int4 --memory-limit 10GiB",
            "chat demo --device 0 --device 1 --split layers",
            "generate --model dir --prompt a --device 0 --device 1 --split tensor",
            "generate --server a:1 --prompt a --device demo/0",
            "embed --device 0 --device 1 --split layers text",
            "bench --device 0 --device 1 --split tensor",
            "chat",
            "chat demo --device cpu --system text --temperature 0.7 --max-tokens 5 --context 4096",
            "chat --server 127.0.0.1:50051 name",
            "inspect /models/Qwen3-8B --context 4096 --memory 24GiB --quantize int4 --json",
            "pull Qwen/Qwen3-8B@main",
            "-q pull unsloth/Qwen3-8B-GGUF:Q4_K_M",
            "completions bash",
            "man --out dir",
            "generate --prompt a --temperature -1 --verbose",
            "models list --server 127.0.0.1:50051 --json",
            "models --server 127.0.0.1:50051 load name --unload-first",
            "models unload --server 127.0.0.1:50051 name --grace 0.5",
            "generate --server 127.0.0.1:50051 --chat hello",
            "generate --tokens 1,2,3 --dump-logits file",
            "generate --server a:1 --prompt x --tls-ca ca.pem --tls-cert c.pem --tls-key c.key --token-file t",
            "bench --server a:1 --tls-ca ca.pem --token-file t",
            "profile --server a:1 --tls-ca ca.pem",
            "profile --kernels",
            "token alice --may generate,admin --models a,b --requests 4 --tokens-per-minute 1000 --secret file",
            "bench --model dir --device 0 --prompt 512 --decode 128 --streams 1,16 --json",
            "bench --server 127.0.0.1:50051 --served-model m --streams 1,16,64 --requests 100 --prompt 512 \
             --decode 128 --spread 0.5 --shared-prefix 64 --seed 3 --connections 2 --repeat 3 --json",
            "bench --server 127.0.0.1:50051 --rate 0.5,20",
            "tune --model dir --device 0 --depth 512 --seconds 30 --tune fragments=1,tags=0 --json",
            "synth --arch qwen3-0.6b --out dir --shard-size 5GB --dtype f16",
            "synth --config config.json --out dir",
        ] {
            let words = std::iter::once("ostinato").chain(line.split_whitespace());
            Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn arguments_that_contradict_each_other_are_refused() {
        for line in [
            "check-device demo",
            "generate",
            "generate --prompt a --chat b",
            "generate --tokens 1,x",
            "generate --tokens 1 --server a:1 --dump-logits f",
            "generate --prompt a --server a:1 --memory-limit 1GiB",
            "generate --prompt a --temperature warm",
            "generate --prompt a --token-file t",
            "generate --prompt a --server a:1 --tls-ca ca --tls-cert c",
            "bench --tls-ca ca",
            "token",
            "token a --may everything",
            "token a --requests 0",
            "serve --model nothing",
            "serve demo --device uuid:1",
            "serve demo --context 0",
            "serve demo --quantize int2",
            "chat --server a:1 --context 5",
            "chat --server a:1 --device 0 --device 1 --split layers",
            "generate --prompt a --server a:1 --device 0 --device 1 --split layers",
            "generate --prompt a --device 0 --device 1 --split rows",
            "embed --server a:1 --split layers text",
            "bench --server a:1 --split layers",
            "bench --stages --device 0 --device 1 --split layers",
            "inspect",
            "inspect demo --context 0",
            "generate --prompt a --context 0",
            "generate --prompt a --prefill-chunk 0",
            "chat --context 0",
            "bench --prefill-chunk 0",
            "bench --stages --rows 0",
            "bench --stages --chunk 0",
            "pull",
            "completions dos",
            "models --quiet --verbose",
            "models --server a:1 load",
            "bench --rate 5",
            "bench --served-model m",
            "bench --server a:1 --rate 5 --streams 2",
            "bench --server a:1 --model dir",
            "bench --server a:1 --beside",
            "synth --out dir",
            "synth --arch a --config b --out dir",
        ] {
            let words = std::iter::once("ostinato").chain(line.split_whitespace());
            let error = Cli::try_parse_from(words).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn what_the_user_can_mend_is_told_apart() {
        let usage = anyhow::Error::from(Usage("no".to_owned()));
        assert!(is_users(&usage.context("while starting")));
        assert!(!is_users(&anyhow::anyhow!("a bug")));
        for (code, users) in [
            (tonic::Code::InvalidArgument, true),
            (tonic::Code::NotFound, true),
            (tonic::Code::Unavailable, false),
            (tonic::Code::Internal, false),
        ] {
            let refused = generate::Refused::from(tonic::Status::new(code, "words"));
            assert_eq!(is_users(&refused.into()), users, "{code:?}");
        }
    }
}

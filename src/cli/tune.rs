//! `ostinato tune`: finds the fastest workgroup shapes for a model on a device, and reports where they are saved. Not
//! here: the search (`measure::tune`).

use super::named;
use super::progress::Show;
use crate::config::Selector;
use crate::device::{Instance, InstanceOptions, choose};
use crate::gpu::build::defaults::check_tuning;
use crate::measure::tune;
use crate::measure::tune::{TuneEvent, TuneOptions};
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Arguments of `ostinato tune`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Tune {
    /// Folder of a checkpoint, a GGUF file, ORG/NAME on the Hugging Face hub, or an embedded demo model: `demo` or
    /// `demo-hybrid`.
    #[arg(long, default_value = "demo", value_name = "MODEL")]
    model: String,
    /// The device: UUID, PCI address, name, index, or `cpu`. Default: the only GPU.
    #[arg(long)]
    device: Option<Selector>,
    /// Context length before the timed step, in tokens.
    #[arg(long, default_value_t = 256)]
    depth: u32,
    /// Duration of the search in seconds, without the time to load the model.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Tuning values that the search keeps fixed: KEY=VALUE, separated by commas.
    #[arg(long, value_delimiter = ',')]
    tune: Vec<String>,
    /// Maximum number of values that one pass tries for a choice.
    #[arg(long, hide = true)]
    candidates: Option<usize>,
    /// Print one JSON object per event to standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &Tune, cache: Option<PathBuf>, progress: &Show) -> anyhow::Result<()> {
    let instance = Instance::new(&InstanceOptions { validation: false })?;
    let adapters = instance.adapters();
    let adapter = choose(&adapters, args.device.as_ref())?.clone();
    check_tuning(&adapter, &args.tune)?;
    let (_, checkpoint) = named::opened(&named::find(&args.model, args.json)?)?;
    let options = TuneOptions {
        depth: args.depth,
        time: Duration::from_secs(args.seconds),
        candidates: args.candidates.unwrap_or(usize::MAX),
        tune: &args.tune,
        cache: cache.as_deref(),
    };
    let started = Instant::now();
    let mut say = |event: &TuneEvent| {
        progress.beside(|| match args.json {
            true => println!("{}", json_of(event)),
            false => println!("{}", text_of(event, &adapter.name, args.depth)),
        });
    };
    let outcome = tune::tune(&instance, &adapter, &checkpoint, &options, progress, &mut say)?;
    let gain = 100.0 * (1.0 - outcome.after_us / outcome.before_us);
    if args.json {
        println!(
            "{}",
            json!({
                "event": "finished",
                "before_us": outcome.before_us,
                "after_us": outcome.after_us,
                "tried": outcome.tried,
                "complete": outcome.complete,
                "file": outcome.file,
            })
        );
        return Ok(());
    }
    println!(
        "a step takes {:.1} us, by the rules {:.1} us ({gain:.1} % less); {} values tried in {:.0} s{}",
        outcome.after_us,
        outcome.before_us,
        outcome.tried,
        started.elapsed().as_secs_f64(),
        if outcome.complete { "" } else { ", not all: --seconds allows for more" }
    );
    match outcome.file {
        Some(file) => println!("kept in {}", file.display()),
        None => println!("nothing is kept"),
    }
    Ok(())
}

fn text_of(event: &TuneEvent, device: &str, depth: u32) -> String {
    match event {
        TuneEvent::Began { variant, us } => {
            format!("{device}, {variant}: a step takes {us:.1} us by the rules, {depth} tokens of context before it")
        }
        TuneEvent::Improved { name, old, new, before_us, after_us } => {
            format!("{name:<22} {old:>8} -> {new:<8} {before_us:>9.1} -> {after_us:.1} us a step")
        }
        TuneEvent::Wrong { name, value, what } => format!("{name:<22} {value} is not taken: {what}"),
    }
}

fn json_of(event: &TuneEvent) -> serde_json::Value {
    match event {
        TuneEvent::Began { variant, us } => json!({"event": "began", "variant": variant, "us": us}),
        TuneEvent::Improved { name, old, new, before_us, after_us } => json!({
            "event": "improved", "name": name, "old": old, "new": new, "before_us": before_us, "after_us": after_us,
        }),
        TuneEvent::Wrong { name, value, what } => {
            json!({"event": "wrong", "name": name, "value": value, "what": what})
        }
    }
}

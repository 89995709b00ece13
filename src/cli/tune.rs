//! `ostinato tune`: finds the fastest workgroup shapes for a model on a device, and reports where they are saved. Not
//! here: the search (`measure::tune`).

use super::named;
use super::progress::Show;
use crate::config::Selector;
use crate::device::{Instance, InstanceOptions, choose};
use crate::gpu::build::defaults::check_tuning;
use crate::measure::tune;
use crate::measure::tune::{MOST_PROMPT, MOST_ROWS, StepOutcome, TuneEvent, TuneOptions};
use crate::model::decoder::StepShape;
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
    #[arg(long, value_name = "SEL")]
    device: Option<Selector>,
    /// Context length before the timed steps, in tokens. Sequences of a batch share its whole pages.
    #[arg(long, value_name = "N", default_value_t = 256)]
    depth: u32,
    /// Numbers of rows (sequences) of the decode steps to search, powers of two, separated by commas. Default: 1 on GPUs that
    /// take weights in fragments, 1,4,16,64 on others, 1,4 on CPU drivers.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = rows_of_step)]
    rows: Option<Vec<u32>>,
    /// Numbers of rows (tokens) of the prompt chunks to search, separated by commas; 0 for none. Default: none on GPUs that
    /// take weights in fragments, 512 on others, 64 on CPU drivers. A GPU that computes a chunk for seconds may meet its
    /// driver's watchdog: give fewer rows there.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=i64::from(MOST_PROMPT)))]
    prompt: Option<Vec<u32>>,
    /// Duration of the search in seconds, without the time to load the model. The kinds of steps share it equally; what one
    /// leaves is for the next ones. Default: 60 for each.
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Tuning values that the search keeps fixed: KEY=VALUE, separated by commas.
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
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
        rows: args.rows.as_deref(),
        prompts: args.prompt.as_deref(),
        time: args.seconds.map(Duration::from_secs),
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
    if args.json {
        let steps: Vec<serde_json::Value> = outcome.steps.iter().map(json_of_step).collect();
        println!("{}", json!({"event": "finished", "steps": steps, "file": outcome.file}));
        return Ok(());
    }
    for step in &outcome.steps {
        println!("{}", text_of_step(step));
    }
    let tried: usize = outcome.steps.iter().map(|step| step.tried).sum();
    println!("{tried} values tried in {:.0} s", started.elapsed().as_secs_f64());
    match outcome.file {
        Some(file) => println!("kept in {}", file.display()),
        None => println!("nothing is kept"),
    }
    Ok(())
}

/// Parses the number of rows of a decode step.
fn rows_of_step(text: &str) -> Result<u32, String> {
    let rows = text.parse().ok().filter(|rows: &u32| rows.is_power_of_two() && *rows <= MOST_ROWS);
    rows.ok_or_else(|| format!("decode steps have a power of two as their number of rows, at most {MOST_ROWS}"))
}

/// Returns what a line is about.
fn name_of(step: StepShape) -> String {
    match step {
        StepShape::Decode { rows: 1 } => "1 row".to_owned(),
        StepShape::Decode { rows } => format!("{rows} rows"),
        other => format!("prompt of {}", other.rows()),
    }
}

fn text_of_step(of: &StepOutcome) -> String {
    let gain = 100.0 * (1.0 - of.after_us / of.before_us);
    format!(
        "{}: a step takes {:.1} us, by the rules {:.1} us ({gain:.1} % less); {} values tried{}",
        name_of(of.step),
        of.after_us,
        of.before_us,
        of.tried,
        if of.complete { "" } else { ", not all: --seconds allows for more" }
    )
}

fn json_of_step(of: &StepOutcome) -> serde_json::Value {
    json!({
        "step": of.step.name(), "before_us": of.before_us, "after_us": of.after_us, "tried": of.tried,
        "complete": of.complete,
    })
}

fn text_of(event: &TuneEvent, device: &str, depth: u32) -> String {
    match event {
        TuneEvent::Began { step, variant, us } => {
            let step = name_of(*step);
            format!(
                "{step}: {device}, {variant}: a step takes {us:.1} us by the rules, {depth} tokens of context before it"
            )
        }
        TuneEvent::Improved { step, name, old, new, before_us, after_us } => {
            let step = name_of(*step);
            format!("{step}: {name:<22} {old:>8} -> {new:<8} {before_us:>9.1} -> {after_us:.1} us a step")
        }
        TuneEvent::Wrong { step, name, value, what } => {
            format!("{}: {name:<22} {value} is not taken: {what}", name_of(*step))
        }
    }
}

fn json_of(event: &TuneEvent) -> serde_json::Value {
    match event {
        TuneEvent::Began { step, variant, us } => {
            json!({"event": "began", "step": step.name(), "variant": variant, "us": us})
        }
        TuneEvent::Improved { step, name, old, new, before_us, after_us } => json!({
            "event": "improved", "step": step.name(), "name": name, "old": old, "new": new, "before_us": before_us,
            "after_us": after_us,
        }),
        TuneEvent::Wrong { step, name, value, what } => {
            json!({"event": "wrong", "step": step.name(), "name": name, "value": value, "what": what})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_steps_are_powers_of_two() {
        assert_eq!(["1", "16", "256"].map(rows_of_step), [Ok(1), Ok(16), Ok(256)]);
        for bad in ["0", "3", "512", "-1", "x", ""] {
            assert!(rows_of_step(bad).is_err_and(|why| why.contains("power of two")), "{bad}");
        }
    }

    #[test]
    fn each_line_and_object_says_which_step_it_is_about() {
        for (step, text, name) in [
            (StepShape::Decode { rows: 1 }, "1 row: ", "decode.1"),
            (StepShape::Decode { rows: 16 }, "16 rows: ", "decode.16"),
            (StepShape::Prefill { rows: 512 }, "prompt of 512: ", "prefill.512"),
        ] {
            let events = [
                TuneEvent::Began { step, variant: "rows".to_owned(), us: 1.0 },
                TuneEvent::Improved {
                    step,
                    name: "gemv_most".to_owned(),
                    old: "16".to_owned(),
                    new: "3".to_owned(),
                    before_us: 2.0,
                    after_us: 1.0,
                },
                TuneEvent::Wrong { step, name: "splits".to_owned(), value: "8".to_owned(), what: "wrong".to_owned() },
            ];
            for event in events {
                assert!(text_of(&event, "Some GPU", 256).starts_with(text), "{event:?}");
                assert_eq!(json_of(&event)["step"], name, "{event:?}");
            }
            let outcome = StepOutcome { step, before_us: 2.0, after_us: 1.0, tried: 3, complete: true };
            let line = text_of_step(&outcome);
            assert!(line.starts_with(text) && line.contains("by the rules 2.0 us (50.0 % less)"), "{line}");
            assert_eq!(json_of_step(&outcome)["step"], name);
        }
    }
}

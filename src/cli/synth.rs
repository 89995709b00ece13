//! `ostinato synth`: writes a checkpoint with random weights and shows its progress.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::progress::{Verbosity, verbosity};
use crate::config::file;
use crate::model::config::Dtype;
use crate::model::gguf::write::{FileType, convert_outline};
use crate::model::synth::{self, RandomWeights, SynthError, SynthOptions};
use crate::quant::store::StoredType;

/// Minimum interval between two plain lines of progress.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Writes the checkpoint of a built-in shape (`arch`) or of a config.json (`config`) into the folder `out`, with
/// `layers` layers if given; with `gguf`, as a GGUF file `out` of that type; with `quantize`, with quantised weights. Shows progress on stderr and prints one
/// line with the result to stdout.
pub(crate) fn run(
    shape: (Option<&str>, Option<&Path>, Option<u32>),
    out: &Path,
    (gguf, quantize): (Option<&str>, Option<&str>),
    seed: u64,
    dtype: Option<Dtype>,
    shard_bytes: Option<u64>,
) -> Result<(), SynthError> {
    let Some(kind) = gguf else {
        return match quantize {
            None => folder(shape, out, seed, dtype, shard_bytes),
            Some(kind) => quantised(shape, out, kind, seed, dtype, shard_bytes),
        };
    };
    let kind = FileType::from_name(kind)?;
    // The folder of the same weights, beside the file.
    let between = out.with_extension("safetensors.tmp");
    let written = outline(shape, &between, seed, dtype).and_then(|weights| {
        let read = |tensor: &str, begin: u64, bytes: &mut [u8]| weights.read(tensor, begin, bytes);
        Ok(convert_outline(&between, &read, out, kind, threads())?)
    });
    // What could not be removed is named after the file, so that it can be found.
    let _ = std::fs::remove_dir_all(&between);
    let written = written?;
    let why = written.no_text.map(|why| format!("; without a tokenizer: {why}")).unwrap_or_default();
    println!("{}: {} in {} tensors{why}", out.display(), bytes(written.bytes), written.tensors);
    Ok(())
}

/// Writes the folder `out` with weights of the quantised type `kind`.
fn quantised(
    shape: (Option<&str>, Option<&Path>, Option<u32>),
    out: &Path,
    kind: &str,
    seed: u64,
    dtype: Option<Dtype>,
    shard_bytes: Option<u64>,
) -> Result<(), SynthError> {
    let kind = StoredType::from_name(kind).ok_or_else(|| SynthError::UnknownType(kind.to_owned()))?;
    // The folder of the same weights, beside the result.
    let between = out.with_extension("numbers.tmp");
    let shard = shard_bytes.unwrap_or(SynthOptions::default().shard_bytes);
    let written = outline(shape, &between, seed, dtype).and_then(|weights| {
        let last = Mutex::new(Instant::now());
        synth::quantise(&between, Some(&weights), out, kind, shard, threads(), &|done, total| {
            let Ok(mut last) = last.try_lock() else { return };
            if last.elapsed() >= LINE_INTERVAL {
                *last = Instant::now();
                eprintln!("quantising: {} of {}", bytes(done), bytes(total));
            }
        })
    });
    // What could not be removed is named after the folder, so that it can be found.
    let _ = std::fs::remove_dir_all(&between);
    let written = written?;
    println!("{}: {} of {} in {} files", out.display(), bytes(written.bytes), kind.name(), written.shards.len());
    Ok(())
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Returns the text of the shape's config.json, and where it is from.
fn config_of<'a>(
    (arch, config, layers): (Option<&'a str>, Option<&'a Path>, Option<u32>),
) -> Result<(String, &'a Path), SynthError> {
    let (text, origin) = match (arch, config) {
        (Some(name), None) => (synth::preset(name)?, Path::new(name)),
        (None, Some(path)) => {
            let text = file::read_argument_text(path, file::SMALL);
            (text.map_err(|source| SynthError::Read { path: path.to_owned(), source })?, path)
        }
        _ => return Err(SynthError::Shape),
    };
    Ok((layers.map_or(text.clone(), |layers| synth::with_layers(&text, layers)), origin))
}

/// Names the origin of a shape in an error of its configuration.
fn at(origin: &Path) -> impl FnOnce(SynthError) -> SynthError {
    move |error| match error {
        SynthError::Config { source, .. } => SynthError::Config { path: origin.to_owned(), source },
        other => other,
    }
}

/// Writes the folder `out` with everything but the weights, which are computed where they are read.
fn outline(
    shape: (Option<&str>, Option<&Path>, Option<u32>),
    out: &Path,
    seed: u64,
    dtype: Option<Dtype>,
) -> Result<RandomWeights, SynthError> {
    let (text, origin) = config_of(shape)?;
    let options = SynthOptions { seed, dtype, ..SynthOptions::default() };
    synth::outline(&text, out, &options).map(|(_, weights)| weights).map_err(at(origin))
}

fn folder(
    shape: (Option<&str>, Option<&Path>, Option<u32>),
    out: &Path,
    seed: u64,
    dtype: Option<Dtype>,
    shard_bytes: Option<u64>,
) -> Result<(), SynthError> {
    let (text, origin) = config_of(shape)?;
    let defaults = SynthOptions::default();
    let options = SynthOptions { seed, dtype, shard_bytes: shard_bytes.unwrap_or(defaults.shard_bytes), ..defaults };
    let begun = Instant::now();
    let mut progress = Progress::new();
    let written = synth::write(&text, out, &options, &mut |done, total| progress.show(done, total));
    progress.clear();
    let written = written.map_err(at(origin))?;
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{}: {:.1} M parameters, {} in {} {}, {seconds:.1} s, {}/s{}",
        out.display(),
        written.parameters as f64 / 1e6,
        bytes(written.bytes),
        written.shards.len(),
        if written.shards.len() == 1 { "file" } else { "files" },
        bytes((written.bytes as f64 / seconds.max(1e-9)) as u64),
        if written.tokenizer { "" } else { "; the vocabulary has no room for a tokenizer" },
    );
    Ok(())
}

/// Progress display: a bar on a terminal, plain lines otherwise.
struct Progress {
    bar: Option<ProgressBar>,
    begun: Instant,
    /// When the last plain line was written.
    line: Instant,
}

impl Progress {
    fn new() -> Progress {
        let bar = (!quiet() && std::io::stderr().is_terminal()).then(|| {
            let style =
                ProgressStyle::with_template("writing {bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
            // The template is a constant. If it had an error, the default bar would be shown.
            ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Progress { bar, begun: Instant::now(), line: Instant::now() }
    }

    fn show(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        } else if !quiet() && self.line.elapsed() >= LINE_INTERVAL {
            self.line = Instant::now();
            let rate = done as f64 / self.begun.elapsed().as_secs_f64();
            let left = (total - done) as f64 / rate.max(1.0);
            eprintln!("writing: {} of {}, {left:.0} s left", bytes(done), bytes(total));
        }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn quiet() -> bool {
    verbosity() == Verbosity::Quiet
}

/// Formats bytes with decimal units (kB, MB, GB), as for disks.
fn bytes(n: u64) -> String {
    match n {
        0..1_000_000 => format!("{:.1} kB", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.2} GB", n as f64 / 1e9),
    }
}

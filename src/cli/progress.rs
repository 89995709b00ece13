//! Shows the progress of a start or a load on stderr: a progress bar on a terminal, plain lines otherwise; or writes it
//! to the log.

use crate::host::progress::{Progress, Unit};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum interval between two plain lines of one task.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// The verbosity of this process: how much commands print beside their results (`--quiet`, `--verbose`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Verbosity {
    /// Results, warnings and errors only.
    Quiet,
    /// Also progress, and facts if the command is about them.
    Normal,
    /// All facts.
    Verbose,
}

static VERBOSITY: AtomicU8 = AtomicU8::new(Verbosity::Normal as u8);

/// Sets the verbosity of this process.
pub(crate) fn set_verbosity(verbosity: Verbosity) {
    VERBOSITY.store(verbosity as u8, Ordering::Relaxed);
}

/// Returns the verbosity of this process.
pub(crate) fn verbosity() -> Verbosity {
    match VERBOSITY.load(Ordering::Relaxed) {
        0 => Verbosity::Quiet,
        1 => Verbosity::Normal,
        _ => Verbosity::Verbose,
    }
}

/// The place where progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A bar, and lines above it.
    Terminal,
    /// Lines on stderr.
    Lines,
    /// The log.
    Log,
    Nowhere,
}

/// Shows progress on stderr.
pub(crate) struct Show {
    place: Place,
    /// Whether facts are shown, and not steps alone.
    facts: bool,
    /// The current task.
    current: Mutex<Option<Current>>,
}

struct Current {
    what: String,
    begun: Instant,
    line: Instant,
    bar: Option<ProgressBar>,
}

impl Show {
    /// Creates the display. With `plain` it shows no bar even on a terminal.
    pub(crate) fn new(plain: bool) -> Show {
        let place = match verbosity() {
            Verbosity::Quiet => Place::Nowhere,
            _ if !plain && std::io::stderr().is_terminal() => Place::Terminal,
            _ => Place::Lines,
        };
        Show { place, facts: true, current: Mutex::new(None) }
    }

    /// Creates the display of a command whose user wants an answer and not the facts of a load, such as its memory
    /// plan: they are shown with `--verbose`.
    pub(crate) fn brief(plain: bool) -> Show {
        let mut show = Show::new(plain);
        show.facts = verbosity() == Verbosity::Verbose;
        show
    }

    /// Writes a line that a user who does not want the facts of a load should still see.
    pub(crate) fn notice(&self, text: &str) {
        if !self.facts && self.place != Place::Nowhere {
            self.beside(|| eprintln!("{text}"));
        }
    }

    /// Creates a display that writes everything to the log, for programs that read JSON lines.
    pub(crate) fn log() -> Show {
        Show { place: Place::Log, facts: true, current: Mutex::new(None) }
    }

    /// Runs `print`, which may write lines to the terminal, without disturbing the bar.
    pub(crate) fn beside(&self, print: impl FnOnce()) {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        match current.as_ref().and_then(|current| current.bar.as_ref()) {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

impl Drop for Show {
    fn drop(&mut self) {
        let current = self.current.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(bar) = current.take().and_then(|current| current.bar) {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Show {
    fn line(&self, text: &str) {
        match self.place {
            Place::Log => tracing::info!("{text}"),
            Place::Terminal | Place::Lines if self.facts => self.beside(|| eprintln!("{text}")),
            _ => {}
        }
    }

    fn warning(&self, text: &str) {
        match self.place {
            Place::Log => tracing::warn!("{text}"),
            // Also for those who want results only.
            Place::Terminal | Place::Lines | Place::Nowhere => self.beside(|| eprintln!("warning: {text}")),
        }
    }

    fn step(&self, what: &str, done: u64, total: u64, unit: Unit) {
        if self.place == Place::Nowhere {
            return;
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if current.as_ref().is_none_or(|current| current.what != what) {
            if let Some(bar) = current.take().and_then(|current| current.bar) {
                bar.finish_and_clear();
            }
            let bar = (self.place == Place::Terminal).then(|| bar(what, total, unit));
            *current = Some(Current { what: what.to_owned(), begun: now, line: now, bar });
        }
        let Some(current) = current.as_mut() else {
            return;
        };
        if let Some(bar) = &current.bar {
            bar.set_length(total);
            bar.set_position(done);
            if done >= total {
                bar.finish_and_clear();
            }
        } else if now.duration_since(current.line) >= LINE_INTERVAL && done < total {
            current.line = now;
            let rate = done as f64 / current.begun.elapsed().as_secs_f64();
            let left = (total - done) as f64 / rate.max(f64::MIN_POSITIVE);
            let (done, total) = match unit {
                Unit::Bytes => (gigabytes(done), gigabytes(total)),
                Unit::Count => (done.to_string(), total.to_string()),
            };
            // With nothing done yet, the remaining time cannot be estimated.
            let left = if left < 1e6 { format!(", {left:.0} s left") } else { String::new() };
            match self.place {
                Place::Log => tracing::info!("{what}: {done} of {total}{left}"),
                _ => eprintln!("{what}: {done} of {total}{left}"),
            }
        }
    }
}

fn bar(what: &str, total: u64, unit: Unit) -> ProgressBar {
    let template = match unit {
        Unit::Bytes => "{msg} {bar:32} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left",
        Unit::Count => "{msg} {bar:32} {pos} of {len}, {eta} left",
    };
    // The templates are constants. If one had an error, the default bar would be shown.
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style).with_message(what.to_owned())
}

/// Formats bytes in GB of 10⁹ bytes, as bandwidths are stated.
fn gigabytes(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

//! `ostinato token`: creates a random access token and prints the entry that the server needs to recognize it. The
//! token itself is shown once and not stored. Not here: editing the token file.

use super::Usage;
use crate::config::Right;
use anyhow::Context;
use clap::ValueEnum;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// Random bytes per token.
const CHANCE: usize = 32;
/// Prefix of every token, by which scanners for leaked secrets recognize it.
const PREFIX: &str = "ost_";

#[derive(Debug, clap::Args)]
pub(crate) struct TokenArgs {
    /// Name of the client that the token is for.
    name: String,
    /// Write the token to a new file that only its owner can read, instead of to the first line of standard output.
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
    /// Rights of the token, separated by commas. Default: generate.
    #[arg(long, value_name = "RIGHT", value_delimiter = ',')]
    may: Vec<Right>,
    /// Served models that the token may use, separated by commas. Default: all.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    models: Vec<String>,
    /// Maximum number of unfinished requests.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Maximum number of prompt and output tokens per minute.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens_per_minute: Option<u32>,
}

pub(crate) fn run(args: &TokenArgs) -> anyhow::Result<()> {
    let named = |name: &str| !name.is_empty() && name.len() <= 128 && name.bytes().all(|byte| byte.is_ascii_graphic());
    if let Some(wrong) = std::iter::once(&args.name).chain(&args.models).find(|name| !named(name)) {
        return Err(Usage(format!("{wrong:?} is not a name: at most 128 printable ASCII characters, no spaces")).into());
    }
    let mut chance = [0; CHANCE];
    let mut filled = 0;
    while filled < CHANCE {
        filled += rustix::rand::getrandom(&mut chance[filled..], rustix::rand::GetRandomFlags::empty())
            .context("the system gives no random numbers")?;
    }
    let secret = format!("{PREFIX}{}", hex(&chance));
    let mut out = std::io::stdout().lock();
    match &args.secret {
        Some(path) => {
            let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            let mut file = file.map_err(|error| Usage(format!("cannot make \"{}\": {error}", path.display())))?;
            writeln!(file, "{secret}").with_context(|| format!("cannot write \"{}\"", path.display()))?;
        }
        None => writeln!(out, "{secret}\n")?,
    }
    write!(out, "{}", entry(args, &secret))?;
    Ok(())
}

/// Formats the token's entry for the server's token file.
fn entry(args: &TokenArgs, secret: &str) -> String {
    let list = |words: Vec<&str>| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(", ");
    let mut text =
        format!("[[tokens]]\nname = {}\nsha256 = \"{}\"\n", quoted(&args.name), hex(&Sha256::digest(secret)));
    let mut line = |key: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{key} = {value}");
    };
    if !args.may.is_empty() {
        let rights: Vec<_> = args.may.iter().filter_map(ValueEnum::to_possible_value).collect();
        line("may", format!("[{}]", list(rights.iter().map(|right| right.get_name()).collect())));
    }
    if !args.models.is_empty() {
        line("models", format!("[{}]", list(args.models.iter().map(String::as_str).collect())));
    }
    for (key, value) in [("requests", args.requests), ("tokens_per_minute", args.tokens_per_minute)] {
        if let Some(value) = value {
            line(key, value.to_string());
        }
    }
    text
}

/// Quotes text as a TOML string. Names contain no control characters.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

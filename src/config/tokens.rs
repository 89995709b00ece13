//! The file that `server.tokens` names: who may send requests, for what, and how much. It holds the digests of tokens,
//! never the tokens themselves. Error messages do not quote a value where a token could have been written by mistake.
//! Not here: comparing tokens, counting requests, watching the file.

use super::file;
use super::load::{ConfigError, Problem, syntax, typed};
use figment::Figment;
use figment::providers::{Format, Toml};
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use std::path::Path;

/// The maximum length of a name in bytes; names are kept in memory and appear in messages.
const MAX_NAME: usize = 128;

/// One `[[tokens]]` entry.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccessToken {
    /// The name of the client that uses the token: limits count per name, and messages contain it.
    pub name: String,
    /// The SHA-256 digest of the token's bytes.
    #[serde(deserialize_with = "digest")]
    pub sha256: Option<[u8; 32]>,
    /// The maximum number of unfinished requests, running or waiting; by default `server.client_limit`.
    pub requests: Option<u32>,
    /// The maximum number of prompt and output tokens per minute; by default unlimited.
    pub tokens_per_minute: Option<u32>,
    /// The names of the served models that the token may use; by default all.
    pub models: Option<Vec<String>>,
    /// The rights of the token; by default `generate`.
    #[serde(deserialize_with = "rights")]
    pub may: Option<Vec<Right>>,
}

/// A right of a token, beyond reading what is served, which every token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Right {
    /// Generate tokens from prompts.
    Generate,
    /// Actions that affect all users of the server.
    Admin,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    tokens: Vec<AccessToken>,
}

fn digest<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<[u8; 32]>, D::Error> {
    let text = String::deserialize(deserializer)?;
    // The value is not quoted, because it may be the token itself.
    parse(&text).map(Some).ok_or_else(|| D::Error::custom("not 64 hexadecimal digits"))
}

fn rights<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Right>>, D::Error> {
    let right = |word: String| match word.as_str() {
        "generate" => Ok(Right::Generate),
        "admin" => Ok(Right::Admin),
        _ => Err(D::Error::custom("not a list of \"generate\" and \"admin\"")),
    };
    Vec::<String>::deserialize(deserializer)?.into_iter().map(right).collect::<Result<_, _>>().map(Some)
}

fn parse(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut digest = [0; 32];
    for (index, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(digest)
}

/// Reads the file and reports all its problems at once.
pub fn tokens(path: &Path) -> Result<Vec<AccessToken>, ConfigError> {
    let read = |source| ConfigError::Read { path: path.to_owned(), source };
    let text = file::read_text(path, file::SMALL).map_err(read)?;
    let toml = Toml::string(&text);
    syntax(path, &toml).map_err(|error| match error {
        ConfigError::Syntax { path, source } => {
            // The first line states the place; the following lines quote the file.
            let place = source.to_string().lines().next().unwrap_or_default().to_owned();
            ConfigError::Syntax { path, source: place.into() }
        }
        other => other,
    })?;
    let (file, mut problems) = typed::<File>(&Figment::from(toml), |_, _| Vec::new());
    problems.iter_mut().for_each(|problem| problem.value = None);
    if problems.is_empty() {
        problems = file.problems();
    }
    problems.iter_mut().for_each(|problem| problem.source = Some(path.display().to_string()));
    if problems.is_empty() { Ok(file.tokens) } else { Err(ConfigError::Problems(problems)) }
}

impl File {
    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (index, token) in self.tokens.iter().enumerate() {
            let key = |key: &str| format!("tokens[{index}].{key}");
            let earlier = |same: &dyn Fn(&AccessToken) -> bool| self.tokens[..index].iter().position(same);
            let words = !token.name.is_empty() && token.name.len() <= MAX_NAME;
            if token.name.is_empty() {
                problems.push(Problem::missing(key("name")));
            } else if !words || token.name.chars().any(|c| c.is_control() || c.is_whitespace()) {
                let rule = "must be at most 128 bytes without spaces";
                problems.push(Problem::new(key("name"), rule, format!("{:?}", token.name)));
            } else if let Some(earlier) = earlier(&|other| other.name == token.name) {
                let rule = format!("must differ from tokens[{earlier}].name");
                problems.push(Problem::new(key("name"), &rule, format!("{:?}", token.name)));
            }
            match token.sha256 {
                None => problems.push(Problem::missing(key("sha256"))),
                Some(digest) => {
                    if let Some(earlier) = earlier(&|other| other.sha256 == Some(digest)) {
                        let rule = format!("must differ from tokens[{earlier}].sha256");
                        problems.push(Problem { value: None, ..Problem::new(key("sha256"), &rule, "") });
                    }
                }
            }
            for (name, value) in [("requests", token.requests), ("tokens_per_minute", token.tokens_per_minute)] {
                if value == Some(0) {
                    problems.push(Problem::new(key(name), "must be at least 1, or left out for no limit", 0));
                }
            }
            if token.models.as_ref().is_some_and(Vec::is_empty) {
                problems.push(Problem::new(key("models"), "must name a model, or be left out for all", "[]"));
            }
            if token.may.as_ref().is_some_and(Vec::is_empty) {
                problems.push(Problem::new(key("may"), "must have a right, or be left out for \"generate\"", "[]"));
            }
        }
        problems
    }
}

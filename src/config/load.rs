//! Builds a `Config` from a file, the environment and command-line arguments, or reports all problems at once.

use super::{Config, Draft, Model, file};
use figment::error::Kind;
use figment::providers::{Env, Format, Serialized, Toml};
use figment::value::{Dict, Map, Tag, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::{Path, PathBuf};

/// The sources of a configuration; later ones take precedence.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The path of a TOML file.
    pub file: Option<PathBuf>,
    /// Whether to read environment variables: `OSTINATO_SECTION__KEY`, such as `OSTINATO_SERVER__LISTEN`, and the
    /// standard ones for the export of spans ([`super::OTEL_VARIABLES`]), over which the former take precedence.
    pub environment: bool,
    /// The argument `--listen`.
    pub listen: Option<String>,
    /// The argument `--http`.
    pub http: Option<String>,
    /// The argument `--admin`.
    pub admin: Option<String>,
    /// The argument `--insecure`, which applies to all endpoints.
    pub insecure: bool,
    /// The arguments `--model`. Each replaces path and replicas of the file's model of that name, or adds a model. Two
    /// arguments with the same name and path make two replicas.
    pub models: Vec<Model>,
}

/// A problem of the configuration: the key, the rule that it breaks, the value, and the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The path of the key, such as `models[0].replicas[1].device`.
    pub key: String,
    /// The rule that must hold.
    pub rule: String,
    /// The value that was found, if any.
    pub value: Option<String>,
    /// The file or environment variable, if known.
    pub source: Option<String>,
}

impl Problem {
    pub(super) fn new(key: impl Into<String>, rule: &str, value: impl fmt::Display) -> Problem {
        Problem { key: key.into(), rule: rule.to_owned(), value: Some(value.to_string()), source: None }
    }

    pub(super) fn missing(key: impl Into<String>) -> Problem {
        Problem { key: key.into(), rule: "must be given".to_owned(), value: None, source: None }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.key, self.rule)?;
        if let Some(value) = &self.value {
            write!(f, ", is {value}")?;
        }
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        Ok(())
    }
}

/// The reason for which there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration \"{}\"", path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not valid TOML; the cause states line and column.
    #[error("\"{}\" is not TOML", path.display())]
    Syntax {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// All problems of the values.
    #[error("{}", list(.0))]
    Problems(Vec<Problem>),
}

fn list(problems: &[Problem]) -> String {
    let mut text = match problems.len() {
        1 => "the configuration has a problem:".to_owned(),
        n => format!("the configuration has {n} problems:"),
    };
    for problem in problems {
        text.push_str(&format!("\n  {problem}"));
    }
    text
}

/// Reads the sources, with later ones overriding earlier ones, and checks the result.
pub fn from_sources(sources: &Sources) -> Result<Config, ConfigError> {
    let mut figment = Figment::new();
    if let Some(path) = &sources.file {
        let read = |source| ConfigError::Read { path: path.clone(), source };
        let text = file::read_text(path, file::SMALL).map_err(read)?;
        let toml = Toml::string(&text);
        syntax(path, &toml)?;
        figment = figment.merge(FromFile { path, toml });
    }
    let mut ours = Figment::new();
    if sources.environment {
        // Only names with a section are read: OSTINATO_X without one may mean something else.
        let keyed = |key: &figment::value::UncasedStr| key.as_str().contains("__");
        ours = ours.merge(Env::prefixed("OSTINATO_").filter(keyed).split("__"));
        figment = figment.merge(&ours);
    }
    if let Some(listen) = &sources.listen {
        figment = figment.merge(Serialized::default("server.listen", listen));
    }
    if let Some(admin) = &sources.admin {
        figment = figment.merge(Serialized::default("admin.listen", admin));
    }
    if let Some(http) = &sources.http {
        figment = figment.merge(Serialized::default("http.listen", http));
    }
    if sources.insecure {
        figment = figment.merge(Serialized::default("http.insecure", true));
        figment = figment.merge(Serialized::default("server.insecure", true));
        figment = figment.merge(Serialized::default("admin.insecure", true));
    }
    let (mut config, mut problems) = typed::<Config>(&figment, not_tables);
    if sources.environment {
        problems.extend(config.apply_otel(|key| ours.contains(key), |name| std::env::var(name).ok()));
    }
    if let Some(folder) = sources.file.as_deref().and_then(Path::parent) {
        for model in &mut config.models {
            resolve(folder, model);
        }
        for path in config.server.files() {
            *path = folder.join(&*path);
        }
    }
    add_models(&mut config.models, &sources.models);
    problems.extend(config.problems());
    if problems.is_empty() { Ok(config) } else { Err(ConfigError::Problems(problems)) }
}

/// A file's content together with its path, so that problems name the file.
struct FromFile<'a> {
    path: &'a Path,
    toml: figment::providers::Data<Toml>,
}

impl Provider for FromFile<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::from("TOML file", self.path)
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        self.toml.data()
    }
}

/// Parses the TOML once, so that a syntax error is distinguished from a wrong value.
pub(super) fn syntax(path: &Path, toml: &figment::providers::Data<Toml>) -> Result<(), ConfigError> {
    match toml.data() {
        Ok(_) => Ok(()),
        Err(error) => Err(ConfigError::Syntax { path: path.to_owned(), source: error.to_string().into() }),
    }
}

/// Makes the paths of a model in a file, and of its draft model, relative to that file's directory.
fn resolve(folder: &Path, model: &mut Model) {
    let draft = match &mut model.draft {
        Some(Draft::Model(path)) => Some(path),
        Some(Draft::Lookup) | None => None,
    };
    for path in [&mut model.path].into_iter().chain(draft) {
        if !path.as_os_str().is_empty() && super::embedded(path).is_none() {
            *path = folder.join(&*path);
        }
    }
}

/// Merges model arguments into the file's models. The first argument of a name replaces path and replicas of the file's
/// model; further ones with the same path add replicas.
fn add_models(models: &mut Vec<Model>, arguments: &[Model]) {
    for (index, argument) in arguments.iter().enumerate() {
        let repeated = arguments[..index].iter().any(|earlier| earlier.name == argument.name);
        match models.iter_mut().find(|model| model.name == argument.name) {
            Some(model) if repeated && model.path == argument.path => {
                model.replicas.extend(argument.replicas.iter().cloned());
            }
            // Another path under the same name: kept as a second model, which `problems` reports as a duplicate.
            Some(_) if repeated => models.push(argument.clone()),
            Some(model) => {
                model.path = argument.path.clone();
                model.replicas = argument.replicas.clone();
            }
            None => models.push(argument.clone()),
        }
    }
}

/// Deserialises a configuration and reports every value that does not fit. After each such value it removes the value
/// and tries again, so one run reports all of them, and the typed tree remains the only definition of what is valid.
pub(super) fn typed<T: DeserializeOwned + Default>(
    figment: &Figment,
    not_tables: fn(&Figment, &mut Value) -> Vec<Problem>,
) -> (T, Vec<Problem>) {
    let mut problems = Vec::new();
    let mut value = match figment.data() {
        Ok(mut profiles) => Value::Dict(Tag::Default, profiles.remove(&Profile::Default).unwrap_or_default()),
        Err(error) => {
            problems.push(problem(figment, &error, None));
            Value::Dict(Tag::Default, Dict::new())
        }
    };
    problems.extend(not_tables(figment, &mut value));
    loop {
        match value.deserialize::<T>() {
            Ok(config) => return (config, problems),
            Err(error) => {
                let removed = remove(&mut value, &error.path);
                problems.push(problem(figment, &error, removed.as_ref()));
                if removed.is_none() {
                    return (T::default(), problems);
                }
            }
        }
    }
}

/// Checks that the sections are tables; serde would also accept a list, by position.
fn not_tables(figment: &Figment, value: &mut Value) -> Vec<Problem> {
    fn list(value: Option<&mut Value>) -> impl Iterator<Item = (usize, &mut Value)> {
        let list = match value {
            Some(Value::Array(_, list)) => Some(list.iter_mut().enumerate()),
            _ => None,
        };
        list.into_iter().flatten()
    }
    let Value::Dict(_, sections) = value else {
        return Vec::new();
    };
    let mut problems = Vec::new();
    let mut check = |key: String, value: &mut Value| {
        if !matches!(value, Value::Dict(..)) {
            let mut problem = Problem::new(key, "must be a table", show(value));
            problem.source = source(figment, value);
            problems.push(problem);
            *value = Value::Dict(value.tag(), Dict::new());
        }
    };
    for key in ["server", "http", "admin", "telemetry", "runtime"] {
        if let Some(section) = sections.get_mut(key) {
            check(key.to_owned(), section);
        }
    }
    if let Some(Value::Dict(_, server)) = sections.get_mut("server")
        && let Some(tls) = server.get_mut("tls")
    {
        check("server.tls".to_owned(), tls);
    }
    for (index, model) in list(sections.get_mut("models")) {
        check(format!("models[{index}]"), model);
        let Value::Dict(_, model) = model else {
            continue;
        };
        for (replica, value) in list(model.get_mut("replicas")) {
            check(format!("models[{index}].replicas[{replica}]"), value);
        }
    }
    problems
}

fn source(figment: &Figment, value: &Value) -> Option<String> {
    let metadata = figment.get_metadata(value.tag())?;
    Some(match &metadata.source {
        // Values that code in this file merges come from the command line.
        Some(figment::Source::Code(_)) => "the command line".to_owned(),
        Some(source) => source.to_string(),
        None => metadata.name.to_string(),
    })
}

fn problem(figment: &Figment, error: &figment::Error, found: Option<&Value>) -> Problem {
    let mut key = String::new();
    for part in &error.path {
        match part.parse::<usize>() {
            Ok(index) => key.push_str(&format!("[{index}]")),
            Err(_) if key.is_empty() => key.push_str(part),
            Err(_) => key.push_str(&format!(".{part}")),
        }
    }
    let (rule, value) = match &error.kind {
        Kind::UnknownField(_, known) => {
            let mut known: Vec<&str> = known.to_vec();
            known.sort_unstable();
            (format!("is not a key; known here are {}", known.join(", ")), None)
        }
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) => {
            (format!("must be {expected}"), found.map(show))
        }
        other => (format!("cannot be used: {other}"), found.map(show)),
    };
    let source = found.and_then(|value| source(figment, value));
    Problem { key, rule, value, source }
}

/// Formats a value approximately as it was written; tables and lists are only named by kind.
fn show(value: &Value) -> String {
    match value {
        Value::String(_, text) => format!("{text:?}"),
        Value::Char(_, c) => format!("{:?}", c.to_string()),
        Value::Bool(_, b) => b.to_string(),
        Value::Num(_, number) => number
            .to_i128()
            .map(|n| n.to_string())
            .or_else(|| number.to_u128().map(|n| n.to_string()))
            .or_else(|| number.to_f64().map(|n| n.to_string()))
            .unwrap_or_default(),
        Value::Empty(..) => "nothing".to_owned(),
        Value::Dict(..) => "a table".to_owned(),
        Value::Array(..) => "a list".to_owned(),
    }
}

/// Removes the value at a path from the tree. A list element is replaced with an empty table, because a shorter list
/// would shift the paths of the elements after it.
fn remove(value: &mut Value, path: &[String]) -> Option<Value> {
    let (first, rest) = path.split_first()?;
    match value {
        Value::Dict(_, dict) if rest.is_empty() => dict.remove(first),
        Value::Dict(_, dict) => remove(dict.get_mut(first)?, rest),
        Value::Array(_, list) => {
            let element = list.get_mut(first.parse::<usize>().ok()?)?;
            if !rest.is_empty() {
                return remove(element, rest);
            }
            // An element that is already an empty table and still fails as a whole cannot be fixed by emptying it
            // again.
            if matches!(element, Value::Dict(_, dict) if dict.is_empty()) {
                return None;
            }
            let emptied = Value::Dict(element.tag(), Dict::new());
            Some(std::mem::replace(element, emptied))
        }
        _ => None,
    }
}

//! From a file, the environment and arguments to a `Config`, or to every problem at once.

use super::{Config, Model, file};
use figment::error::Kind;
use figment::providers::{Env, Format, Serialized, Toml};
use figment::value::{Dict, Map, Tag, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::{Path, PathBuf};

/// Where a configuration comes from; later ones win.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// A TOML file.
    pub file: Option<PathBuf>,
    /// Variables `OSTINATO_SECTION__KEY`, such as `OSTINATO_SERVER__LISTEN`.
    pub environment: bool,
    /// `--listen`.
    pub listen: Option<String>,
    /// `--admin`.
    pub admin: Option<String>,
    /// `--insecure`: of both endpoints.
    pub insecure: bool,
    /// `--model`, each replacing the file's model of that name or adding one. The same name
    /// twice is two replicas.
    pub models: Vec<Model>,
}

/// One thing that is wrong: which key, what must hold, what was found, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// `models[0].replicas[1].device`.
    pub key: String,
    /// What must hold.
    pub rule: String,
    /// What was found, if anything was.
    pub value: Option<String>,
    /// The file or variable, where it is known.
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

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration \"{}\"", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not TOML; the cause has line and column.
    #[error("\"{}\" is not TOML", path.display())]
    Syntax {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Everything that is wrong with what it says.
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

/// Reads the sources, later ones over earlier ones, and checks the result.
pub fn from_sources(sources: &Sources) -> Result<Config, ConfigError> {
    let mut figment = Figment::new();
    if let Some(path) = &sources.file {
        let read = |source| ConfigError::Read { path: path.clone(), source };
        let text = file::read_text(path, file::SMALL).map_err(read)?;
        let toml = Toml::string(&text);
        syntax(path, &toml)?;
        figment = figment.merge(FromFile { path, toml });
    }
    if sources.environment {
        // Only names with a section: OSTINATO_X without one may mean something else.
        let keyed = |key: &figment::value::UncasedStr| key.as_str().contains("__");
        figment = figment.merge(Env::prefixed("OSTINATO_").filter(keyed).split("__"));
    }
    if let Some(listen) = &sources.listen {
        figment = figment.merge(Serialized::default("server.listen", listen));
    }
    if let Some(admin) = &sources.admin {
        figment = figment.merge(Serialized::default("admin.listen", admin));
    }
    if sources.insecure {
        figment = figment.merge(Serialized::default("server.insecure", true));
        figment = figment.merge(Serialized::default("admin.insecure", true));
    }
    let (mut config, mut problems) = typed::<Config>(&figment, not_tables);
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

/// What was read of a file, so that problems name it.
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

/// Asks for the data, so that a syntax error is told apart from a wrong value.
pub(super) fn syntax(path: &Path, toml: &figment::providers::Data<Toml>) -> Result<(), ConfigError> {
    match toml.data() {
        Ok(_) => Ok(()),
        Err(error) => Err(ConfigError::Syntax { path: path.to_owned(), source: error.to_string().into() }),
    }
}

/// A model's folder in a file is relative to that file.
fn resolve(folder: &Path, model: &mut Model) {
    if !model.path.as_os_str().is_empty() && super::embedded(&model.path).is_none() {
        model.path = folder.join(&model.path);
    }
}

/// A first argument of a name replaces the file's model, further ones add replicas.
fn add_models(models: &mut Vec<Model>, arguments: &[Model]) {
    for (index, argument) in arguments.iter().enumerate() {
        let repeated = arguments[..index].iter().any(|earlier| earlier.name == argument.name);
        match models.iter_mut().find(|model| model.name == argument.name) {
            Some(model) if repeated && model.path == argument.path => {
                model.replicas.extend(argument.replicas.iter().cloned());
            }
            // Another folder under the same name: left in, and reported as a duplicate.
            Some(_) if repeated => models.push(argument.clone()),
            Some(model) => {
                model.path = argument.path.clone();
                model.replicas = argument.replicas.clone();
            }
            None => models.push(argument.clone()),
        }
    }
}

/// Deserialises; each key that does not fit is reported, taken out, and it is tried again:
/// so one run reports them all, and the typed tree is the only place that says what is right.
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

/// Sections must be tables: serde would also take a list, by position.
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
    for key in ["server", "admin", "telemetry", "runtime"] {
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

/// A value as its owner wrote it, near enough; tables and lists only by kind.
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

/// Takes the value at a path out of the tree. List elements are emptied in place, as a
/// shorter list would shift the paths of those behind.
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
            // An element that is a table already and still fails as a whole cannot be
            // mended by emptying it again.
            if matches!(element, Value::Dict(_, dict) if dict.is_empty()) {
                return None;
            }
            let emptied = Value::Dict(element.tag(), Dict::new());
            Some(std::mem::replace(element, emptied))
        }
        _ => None,
    }
}

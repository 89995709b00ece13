//! Models of the Hugging Face hub: `ostinato pull`, and the hub's cache, in which models that were downloaded before
//! are found without a network. The cache's layout is that of the hub's own programs. Not here: which files of a
//! repository make up a model (`choice`), the environment variables (`settings`), and HTTP (`transfer`).

mod choice;
mod settings;
mod transfer;

use super::progress::Show;
use crate::config::file;
use crate::host::progress::{Progress, Unit};
use crate::memory::plan::HumanBytes;
use hf_hub::{Cache, Repo, RepoType};
use serde_json::Value;
use settings::Settings;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use transfer::{Client, RequestError};

/// Bytes between two reports of a download's progress.
const REPORTED: u64 = 4 << 20;
/// The most characters of an etag.
const MAX_ETAG: usize = 128;
/// How often another program's lock of a file is waited for, a second each.
const LOCKED: u32 = 5;
/// Bytes of a file that are read at once to check its hash.
const HASHED: usize = 4 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Pull {
    /// The repository, ORG/NAME. `@REVISION` selects a branch, tag or commit, and `:FILE` one GGUF file by its name or
    /// quantisation, such as `ORG/NAME:Q4_K_M`. Default: `main`; among several GGUF files Q4_K_M.
    ///
    /// Files go to the hub's cache, which other programs share: HF_HUB_CACHE, or `hub` in HF_HOME. HF_ENDPOINT names
    /// another hub, HF_TOKEN has the access token, and with HF_HUB_OFFLINE=1 the cache alone is used. A download that
    /// was interrupted is continued.
    #[arg(value_name = "MODEL")]
    model: String,
}

/// A model of the hub as the user writes it: `ORG/NAME[@REVISION][:FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reference {
    /// `ORG/NAME`.
    repository: String,
    /// A branch, tag or commit; `None` means `main`.
    revision: Option<String>,
    /// A GGUF file's name or quantisation.
    file: Option<String>,
}

impl Reference {
    /// Parses a reference; `None` if the text cannot be one, such as a path with another number of parts.
    pub(super) fn parse(text: &str) -> Option<Reference> {
        let (rest, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (repository, revision) = match rest.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (rest, None),
        };
        let (organisation, name) = repository.split_once('/')?;
        let part = |text: &str| {
            (1..=96).contains(&text.len())
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
                && !text.starts_with(['-', '.'])
                && !text.ends_with(['-', '.'])
                && !text.contains("--")
                && !text.contains("..")
        };
        let given = |text: Option<&str>| text.is_none_or(|text| plain(text) && !text.starts_with('-'));
        let valid = part(organisation) && part(name) && !name.to_ascii_lowercase().ends_with(".gguf");
        (valid && given(revision) && given(file)).then(|| Reference {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// The name under which the model is served: all but the revision.
    pub(super) fn name(&self) -> String {
        let file = self.file.as_ref().map(|file| format!(":{file}")).unwrap_or_default();
        format!("{}{file}", self.repository)
    }

    fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// The repository at a revision.
    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repository.clone(), RepoType::Model, revision.to_owned())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let revision = self.revision.as_ref().map(|revision| format!("@{revision}")).unwrap_or_default();
        let file = self.file.as_ref().map(|file| format!(":{file}")).unwrap_or_default();
        write!(f, "{}{revision}{file}", self.repository)
    }
}

/// Whether a text is a relative path without `.` and `..`, so that nothing outside its folder can be named with it, and
/// without control characters.
fn plain(text: &str) -> bool {
    !text.is_empty()
        && !text.contains(|c: char| c == '\\' || c.is_control())
        && Path::new(text).components().all(|part| matches!(part, Component::Normal(_)))
}

/// The reason why a model of the hub cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// The text is not a reference.
    #[error("\"{0}\" is not ORG/NAME[@REVISION][:FILE], a repository of the Hugging Face hub")]
    NotReference(String),
    /// There is no such repository, revision or file.
    #[error("{endpoint} has no model \"{model}\", and there is no file or folder of that name")]
    NotFound {
        /// The model's name, as the user wrote it.
        model: String,
        /// The hub's address.
        endpoint: String,
    },
    /// The hub refuses access.
    #[error(
        "{endpoint} refuses \"{model}\" (status {status}): it does not exist, or needs a token that may read it; {token}"
    )]
    Denied {
        /// The model's name, as the user wrote it.
        model: String,
        /// The hub's address.
        endpoint: String,
        /// The HTTP status.
        status: u16,
        /// A text that says which token was sent.
        token: &'static str,
    },
    /// The model is not in the cache, and the network may not be used.
    #[error("\"{model}\" is not in {}, and HF_HUB_OFFLINE forbids a download", cache.display())]
    Offline {
        /// The model's name, as the user wrote it.
        model: String,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// The repository has no files of a model that can be run.
    #[error("\"{model}\" has neither safetensors nor GGUF files; it has {found}")]
    NoWeights {
        /// The model's name, as the user wrote it.
        model: String,
        /// Some of its files.
        found: String,
    },
    /// The GGUF file is not clear.
    #[error(transparent)]
    Choice(#[from] choice::ChoiceError),
    /// The disk has too little room.
    #[error("\"{model}\" needs {} in {}, which has {} free", HumanBytes(*.needed), cache.display(), HumanBytes(*.free))]
    Disk {
        /// The model's name, as the user wrote it.
        model: String,
        /// The folder of the cache.
        cache: PathBuf,
        /// The bytes that are still to be downloaded.
        needed: u64,
        /// The free bytes of the file system.
        free: u64,
    },
    /// The hub's answer cannot be used.
    #[error("{endpoint} answers \"{model}\" with {what}")]
    Answer {
        /// The model's name, as the user wrote it.
        model: String,
        /// The hub's address.
        endpoint: String,
        /// A description of the answer.
        what: String,
    },
    /// A file is not what the hub says. It was removed.
    #[error("the download of \"{file}\" is damaged and was removed: {what}")]
    Damaged {
        /// The file's name in the repository.
        file: String,
        /// Both sizes or hashes.
        what: String,
    },
    /// The hub cannot be asked for the model.
    #[error(
        "there is no file or folder \"{model}\", and {endpoint} cannot be asked for a model of that name: where there is \
         a network, `ostinato pull {model}` downloads it; HF_ENDPOINT names another hub, and a path names a local folder"
    )]
    Unreachable {
        /// The model's name, as the user wrote it.
        model: String,
        /// The hub's address.
        endpoint: String,
        /// The cause.
        #[source]
        source: Box<RequestError>,
    },
    /// A file could not be downloaded.
    #[error(
        "cannot download \"{what}\" from {endpoint}; what has arrived is kept, and the next attempt continues there"
    )]
    Request {
        /// The file.
        what: String,
        /// The hub's address.
        endpoint: String,
        /// The cause.
        #[source]
        source: Box<RequestError>,
    },
    /// Another program downloads the file.
    #[error("another program downloads \"{file}\": it has locked {}", lock.display())]
    Busy {
        /// The file's name in the repository.
        file: String,
        /// The lock's file.
        lock: PathBuf,
    },
    /// The cache cannot be read or written.
    #[error("cannot use {}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// No variable says where the cache is.
    #[error("there is no folder for the hub's cache: HF_HUB_CACHE, HF_HOME and HOME are not set")]
    NoCache,
}

impl HubError {
    /// Whether the user can correct the error.
    pub(super) fn is_users(&self) -> bool {
        use HubError::{Answer, Busy, Damaged, Request, Unreachable};
        !matches!(self, Unreachable { .. } | Request { .. } | Damaged { .. } | Answer { .. } | Busy { .. })
    }
}

/// `ostinato pull`: downloads what is missing and prints the path.
pub(super) fn run(args: &Pull) -> anyhow::Result<()> {
    let reference = Reference::parse(&args.model).ok_or_else(|| HubError::NotReference(args.model.clone()))?;
    let settings = Settings::of_process()?;
    let path = match settings.offline {
        true => Hub { settings: &settings, reference: &reference }
            .cached()?
            .ok_or_else(|| HubError::Offline { model: reference.to_string(), cache: settings.cache.clone() })?,
        false => Hub { settings: &settings, reference: &reference }.pull(&Show::new(false))?,
    };
    writeln!(std::io::stdout().lock(), "{}", path.display())?;
    Ok(())
}

/// Returns the path of a model in the cache: of a folder or a GGUF file. Downloads it if it is not there.
pub(super) fn find(reference: &Reference, show: &Show) -> anyhow::Result<PathBuf> {
    let settings = Settings::of_process()?;
    let hub = Hub { settings: &settings, reference };
    if let Some(path) = hub.cached()? {
        return Ok(path);
    }
    if settings.offline {
        return Err(HubError::Offline { model: reference.to_string(), cache: settings.cache }.into());
    }
    Ok(hub.pull(show)?)
}

/// One model of the hub.
struct Hub<'a> {
    settings: &'a Settings,
    reference: &'a Reference,
}

/// A file of a repository, before its download.
struct Wanted {
    name: String,
    url: String,
    bytes: u64,
    etag: String,
}

impl Hub<'_> {
    fn cache(&self) -> Cache {
        Cache::new(self.settings.cache.clone())
    }

    /// Returns the folder of a commit's files.
    fn snapshot(&self, commit: &str) -> PathBuf {
        self.cache().repo(self.reference.at(commit)).pointer_path(commit)
    }

    /// The folder of the repository in the cache.
    fn folder(&self) -> PathBuf {
        self.settings.cache.join(self.reference.at("main").folder_name())
    }

    /// Returns the model's path in the cache; `None` if any of its files is missing.
    fn cached(&self) -> Result<Option<PathBuf>, HubError> {
        let named = self.folder().join("refs").join(self.reference.revision());
        let commit = file::read_text(&named, file::SMALL).unwrap_or_default();
        let commit = match commit.trim() {
            // A revision may also be a commit itself.
            "" => self.reference.revision(),
            commit => commit,
        };
        if !plain(commit) {
            return Ok(None);
        }
        let snapshot = self.snapshot(commit);
        let names = names_under(&snapshot);
        let there = |name: &String| snapshot.join(name).exists();
        let chosen = choice::files(&names, self.reference.file.as_deref(), |index| {
            file::read_text(&snapshot.join(index), file::LARGE).ok()
        });
        match chosen {
            Ok(Some(files)) if files.is_whole() && files.names.iter().all(there) => Ok(Some(files.path(&snapshot))),
            // Several files, of which none is selected, are a mistake that a download would not mend; but a selected
            // one may be missing here alone.
            Err(error @ choice::ChoiceError::Several { .. }) => Err(error.into()),
            _ => Ok(None),
        }
    }

    /// Downloads the files that are missing and returns the model's path.
    fn pull(&self, show: &Show) -> Result<PathBuf, HubError> {
        let Settings { cache, .. } = self.settings;
        let model = self.reference.to_string();
        let client = Client::new(self.settings);
        let info = client.describe(&self.reference.repository, self.reference.revision());
        let info = info.map_err(|error| match self.failed(&model, error) {
            HubError::Request { source, endpoint, .. } => {
                HubError::Unreachable { model: model.clone(), endpoint, source }
            }
            told => told,
        })?;
        let (commit, names) = (info.commit, info.names);
        if commit.is_empty() || !commit.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(self.answer(format!("the commit {commit:?}")));
        }
        if let Some(name) = names.iter().find(|name| !plain(name)) {
            return Err(self.answer(format!("the file name {name:?}")));
        }
        // All files are of this commit, even if the branch moves meanwhile.
        let snapshot = self.snapshot(&commit);
        let mut index_problem = None;
        let chosen = choice::files(&names, self.reference.file.as_deref(), |index| {
            let read = self.fetch(&client, &commit, &[index.to_owned()], show).and_then(|()| {
                let path = snapshot.join(index);
                file::read_text(&path, file::LARGE).map_err(|source| HubError::Cache { path, source })
            });
            read.map_err(|error| index_problem = Some(error)).ok()
        });
        if let Some(error) = index_problem {
            return Err(error);
        }
        let Some(files) = chosen? else {
            let some: Vec<&str> = names.iter().take(8).map(String::as_str).collect();
            let more = if names.len() > some.len() { ", …" } else { "" };
            return Err(HubError::NoWeights { model, found: format!("{}{more}", some.join(", ")) });
        };
        if let Some(missing) = files.names.iter().find(|name| !names.contains(name)) {
            return Err(self.answer(format!("no file \"{missing}\", which its index names")));
        }
        self.fetch(&client, &commit, &files.names, show)?;
        // Written last, so that a revision's name leads to complete models only.
        let cached = self.cache().repo(self.reference.at(self.reference.revision()));
        if self.reference.revision() != commit {
            cached.create_ref(&commit).map_err(io(cache))?;
        }
        Ok(files.path(&snapshot))
    }

    /// Downloads the named files that are not in the commit's snapshot.
    fn fetch(&self, client: &Client<'_>, commit: &str, names: &[String], show: &Show) -> Result<(), HubError> {
        let Settings { cache, .. } = self.settings;
        let snapshot = self.snapshot(commit);
        let mut wanted = Vec::new();
        for name in names.iter().filter(|name| !snapshot.join(name).exists()) {
            let url = client.url(&self.reference.repository, commit, name);
            let about = client.about(&url).map_err(|error| self.failed(name, error))?;
            let part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            // The etag becomes the name of a file.
            if !(1..=MAX_ETAG).contains(&about.etag.len()) || !about.etag.bytes().all(part) {
                return Err(self.answer(format!("the etag {:?} of \"{name}\"", about.etag)));
            }
            if about.commit != commit {
                return Err(self.answer(format!("\"{name}\" of commit {:?} instead of {commit}", about.commit)));
            }
            wanted.push(Wanted { name: name.clone(), url, bytes: about.bytes, etag: about.etag });
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let blobs = self.folder().join("blobs");
        std::fs::create_dir_all(&blobs).map_err(io(&blobs))?;
        let length = |path: PathBuf| path.metadata().map_or(0, |metadata| metadata.len());
        let here =
            |file: &Wanted| length(blobs.join(&file.etag)).max(length(blobs.join(&file.etag).with_extension("part")));
        let needed = wanted.iter().map(|file| file.bytes.saturating_sub(here(file))).fold(0, u64::saturating_add);
        let free = rustix::fs::statvfs(&blobs).map_or(u64::MAX, |stat| stat.f_bavail * stat.f_frsize);
        if needed > free {
            return Err(HubError::Disk { model: self.reference.to_string(), cache: cache.clone(), needed, free });
        }
        let total = wanted.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
        let mut before = 0;
        for file in &wanted {
            self.fetch_one(client, &snapshot, &blobs, file, &mut Meter::new(show, before, total))?;
            before += file.bytes;
        }
        show.step(Meter::WHAT, total, total, Unit::Bytes);
        Ok(())
    }

    /// Downloads a file to `blobs` unless it is there, and links it into the snapshot once it is known to be what the
    /// hub says.
    fn fetch_one(
        &self,
        client: &Client<'_>,
        snapshot: &Path,
        blobs: &Path,
        file: &Wanted,
        meter: &mut Meter<'_>,
    ) -> Result<(), HubError> {
        let blob = blobs.join(&file.etag);
        let _lock = lock(&blob.with_extension("lock"), &file.name)?;
        // Another revision may have the same file.
        let there = blob.exists() && damage(&blob, file).map_err(io(&blob))?.is_none();
        if !there {
            let part = blob.with_extension("part");
            let mut open = File::options();
            let mut to = open.read(true).write(true).create(true).truncate(false).open(&part).map_err(io(&part))?;
            // A longer part belongs to another file, and one of the same length may be damaged.
            let has = to.metadata().map_err(io(&part))?.len();
            if has > file.bytes || has == file.bytes && damage(&part, file).map_err(io(&part))?.is_some() {
                to.set_len(0).map_err(io(&part))?;
            }
            let fetched = client.download(&file.url, &mut to, file.bytes, |has| meter.at(has));
            fetched.map_err(|error| self.failed(&file.name, error))?;
            to.sync_all().map_err(io(&part))?;
            if let Some(what) = damage(&part, file).map_err(io(&part))? {
                std::fs::remove_file(&part).map_err(io(&part))?;
                return Err(HubError::Damaged { file: file.name.clone(), what });
            }
            std::fs::rename(&part, &blob).map_err(io(&blob))?;
        }
        let link = snapshot.join(&file.name);
        if link.is_symlink() {
            // The file that the link pointed to was removed.
            std::fs::remove_file(&link).map_err(io(&link))?;
        }
        let depth = Path::new(&file.name).components().count() + 1;
        let target = (0..depth).map(|_| "..").chain(["blobs", &file.etag]).collect::<PathBuf>();
        let folder = link.parent().unwrap_or(snapshot);
        std::fs::create_dir_all(folder).map_err(io(folder))?;
        match std::os::unix::fs::symlink(target, &link) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(io(&link)(error)),
            _ => Ok(()),
        }
    }

    /// Returns the error of an answer that cannot be used.
    fn answer(&self, what: String) -> HubError {
        HubError::Answer { model: self.reference.to_string(), endpoint: self.settings.endpoint.clone(), what }
    }

    /// Returns the error of a failed request for a model or file.
    fn failed(&self, what: &str, error: RequestError) -> HubError {
        let (model, endpoint) = (self.reference.to_string(), self.settings.endpoint.clone());
        match error {
            RequestError::Status(404) => HubError::NotFound { model, endpoint },
            RequestError::Status(status @ (401 | 403)) => {
                let token = match self.settings.token {
                    Some(_) => "a token was sent",
                    None => "HF_TOKEN is not set",
                };
                HubError::Denied { model, endpoint, status, token }
            }
            error => HubError::Request { what: what.to_owned(), endpoint, source: Box::new(error) },
        }
    }
}

/// Makes the error of a path.
fn io(path: &Path) -> impl FnOnce(std::io::Error) -> HubError {
    let path = path.to_owned();
    move |source| HubError::Cache { path, source }
}

/// Locks a file for as long as the result exists, so that one program at a time writes what it stands for.
fn lock(path: &Path, name: &str) -> Result<File, HubError> {
    let file = File::create(path).map_err(io(path))?;
    for _ in 0..LOCKED {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_secs(1)),
            Err(TryLockError::Error(source)) => return Err(io(path)(source)),
        }
    }
    Err(HubError::Busy { file: name.to_owned(), lock: path.to_owned() })
}

/// Returns how a downloaded file differs from what the hub says about it; `None` if it does not. The hub names large
/// files by their SHA-256.
fn damage(blob: &Path, wanted: &Wanted) -> std::io::Result<Option<String>> {
    let (mut file, metadata) = file::open(blob)?;
    if metadata.len() != wanted.bytes {
        return Ok(Some(format!("it has {} bytes, the hub says {}", metadata.len(), wanted.bytes)));
    }
    if wanted.etag.len() != 64 || !wanted.etag.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(None);
    }
    let mut hash = Sha256::new();
    let mut buffer = vec![0; HASHED];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
    }
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((found != wanted.etag.to_ascii_lowercase())
        .then(|| format!("its SHA-256 is {found}, the hub says {}", wanted.etag)))
}

/// The names of all files under a folder, relative to it, sorted; empty if there is no such folder.
fn names_under(folder: &Path) -> Vec<String> {
    let mut names = BTreeSet::new();
    let mut open = vec![folder.to_owned()];
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
            let path = entry.path();
            // Links to folders are not followed.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                open.push(path);
            } else if let Some(name) = path.strip_prefix(folder).ok().and_then(Path::to_str) {
                names.insert(name.to_owned());
            }
        }
    }
    names.into_iter().collect()
}

/// Returns the files that an index of shards names.
fn shards(index: &str) -> Option<BTreeSet<String>> {
    let index: Value = serde_json::from_str(index).ok()?;
    let names = index.get("weight_map")?.as_object()?.values().map(|name| name.as_str().map(str::to_owned));
    names.collect::<Option<BTreeSet<String>>>().filter(|names| names.iter().all(|name| plain(name)))
}

/// Reports the progress of one file's download as a part of all.
struct Meter<'a> {
    show: &'a Show,
    /// The bytes of the files before it.
    before: u64,
    total: u64,
    reported: u64,
}

impl Meter<'_> {
    const WHAT: &'static str = "downloading";

    fn new(show: &Show, before: u64, total: u64) -> Meter<'_> {
        Meter { show, before, total, reported: 0 }
    }

    /// Takes the number of the file's bytes that are there.
    fn at(&mut self, has: u64) {
        if has.abs_diff(self.reported) >= REPORTED {
            self.reported = has;
            self.show.step(Meter::WHAT, self.before + has, self.total, Unit::Bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_told_from_a_path() {
        let parse = |text: &str| Reference::parse(text).map(|reference| (reference.to_string(), reference.name()));
        for (text, name) in [
            ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
            ("Qwen/Qwen3-8B@main", "Qwen/Qwen3-8B"),
            ("a/b@refs/pr/1", "a/b"),
            ("a/b:Q4_K_M", "a/b:Q4_K_M"),
            ("a/b@v1:sub/x.gguf", "a/b:sub/x.gguf"),
        ] {
            assert_eq!(parse(text), Some((text.to_owned(), name.to_owned())), "{text}");
        }
        for text in [
            "demo",
            "/a/b",
            "./a/b",
            "../b",
            "a/b/c",
            "a/",
            "/b",
            "~/b",
            "a b/c",
            "a/x.gguf",
            "a/b@",
            "a/b:",
            "-a/b",
            "a/b@../../c",
            "a/b:../x",
            "a/b:/etc/x",
            "a--b/c",
            "a/b@-x",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn an_index_that_leaves_its_folder_names_nothing() {
        let names = shards(r#"{"weight_map": {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"}}"#);
        assert_eq!(names, Some(["x.safetensors", "y.safetensors"].map(str::to_owned).into()));
        for index in [r#"{"weight_map": {"a": "../x"}}"#, r#"{"weight_map": {"a": 1}}"#, "[]", "x"] {
            assert_eq!(shards(index), None, "{index}");
        }
    }
}

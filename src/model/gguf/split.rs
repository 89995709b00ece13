//! Models that are split into several GGUF files, `NAME-00001-of-00003.gguf` and so on: finds the files that belong to
//! one of them, reads their headers and checks that they form one model. A model in one file is the simplest case.
//!
//! Not here: how files are opened, which the caller decides, and the tensors' data.

use std::collections::BTreeMap;
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::container::{ContainerError, GgufTensor, Header, Value};

/// The maximum number of files of a model.
pub const MAX_PARTS: u64 = 1000;

/// The metadata keys of a split model: the number of this file, counted from 0, that of all files, and the number of
/// tensors in all files.
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// One file of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufFile {
    /// The file's path.
    pub path: PathBuf,
    /// The file's length in bytes.
    pub bytes: u64,
    /// The file's header.
    pub header: Header,
}

/// The place of a tensor: the index of its file in [`GgufFiles::files`], and its index in that file's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorRef {
    /// Index of the file.
    pub file: usize,
    /// Index in the file's list of tensors.
    pub index: usize,
}

/// All files of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufFiles {
    /// The files in order; at least one. The first holds the model's metadata.
    pub files: Vec<GgufFile>,
    /// The place of every tensor, by name.
    pub tensors: BTreeMap<String, TensorRef>,
}

impl GgufFiles {
    /// Opens the model that the file `path` belongs to, with all of its files. `open` opens a file for reading and
    /// returns its length; it is called for each file once and in order.
    ///
    /// # Errors The first problem found, but all missing files together.
    pub fn open<R: Read>(
        path: &Path,
        mut open: impl FnMut(&Path) -> std::io::Result<(R, u64)>,
    ) -> Result<GgufFiles, SplitError> {
        let paths = siblings(path)?;
        let mut files = Vec::new();
        let mut missing = Vec::new();
        for path in paths {
            let (reader, bytes) = match open(&path) {
                Ok(opened) => opened,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    missing.push(path);
                    continue;
                }
                Err(error) => return Err(SplitError::Unreadable { path, reason: error.to_string() }),
            };
            // Headers are read only as long as the model can still be complete.
            if missing.is_empty() {
                let header = Header::read(&mut BufReader::new(reader), bytes)
                    .map_err(|source| SplitError::Container { path: path.clone(), source })?;
                files.push(GgufFile { path, bytes, header });
            }
        }
        if !missing.is_empty() {
            return Err(SplitError::Missing { paths: missing });
        }
        GgufFiles::new(files)
    }

    /// Combines the files of a model, given in order.
    ///
    /// # Errors The first problem found.
    pub fn new(files: Vec<GgufFile>) -> Result<GgufFiles, SplitError> {
        let parts = files.len() as u64;
        for (index, part) in (0..).zip(&files) {
            let claim = |key: &'static str, default: u64, expected: u64| match number(part, key, default)? {
                has if has == expected => Ok(()),
                has => Err(SplitError::Claim { path: part.path.clone(), key, has, expected }),
            };
            claim(COUNT, 1, parts)?;
            claim(NUMBER, 0, index)?;
        }
        let mut tensors = BTreeMap::new();
        for (file, part) in files.iter().enumerate() {
            for (index, tensor) in part.header.tensors.iter().enumerate() {
                if let Some(TensorRef { file, .. }) = tensors.insert(tensor.name.clone(), TensorRef { file, index }) {
                    let (tensor, first) = (tensor.name.clone(), files[file].path.clone());
                    return Err(SplitError::Duplicate { tensor, first, second: part.path.clone() });
                }
            }
        }
        let has = tensors.len() as u64;
        for part in &files {
            let expected = number(part, TENSORS, has)?;
            if has != expected {
                return Err(SplitError::Tensors { path: part.path.clone(), has, expected });
            }
        }
        match files.is_empty() {
            true => Err(SplitError::Missing { paths: Vec::new() }),
            false => Ok(GgufFiles { files, tensors }),
        }
    }

    /// Returns the header that holds the model's metadata.
    pub fn header(&self) -> &Header {
        &self.files[0].header
    }

    /// Returns the metadata value of this key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.header().get(key)
    }

    /// Returns the place of the tensor with this name.
    pub fn find(&self, name: &str) -> Option<TensorRef> {
        self.tensors.get(name).copied()
    }

    /// Whether there is a tensor with this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the description of the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.find(name).map(|at| self.at(at))
    }

    /// Returns the description of the tensor at this place.
    pub fn at(&self, at: TensorRef) -> &GgufTensor {
        &self.files[at.file].header.tensors[at.index]
    }
}

/// The reason why the files of a model cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SplitError {
    /// The operating system could not open the file.
    #[error("cannot read {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error message.
        reason: String,
    },
    /// A file is not a usable GGUF file.
    #[error("{} cannot be used: {source}", path.display())]
    Container {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: ContainerError,
    },
    /// Files of the model do not exist.
    #[error("{}", missing(paths))]
    Missing {
        /// The paths at which they are expected.
        paths: Vec<PathBuf>,
    },
    /// A file's name gives it a number that does not exist.
    #[error("{} is named as file {number} of {count}, must be 1 to {count} of at most {MAX_PARTS}", path.display())]
    Name {
        /// The file.
        path: PathBuf,
        /// Its number, counted from 1.
        number: u64,
        /// The number of files.
        count: u64,
    },
    /// A file's metadata does not agree with its name.
    #[error("{}: {key} is {has}, must be {expected} by the names of the files", path.display())]
    Claim {
        /// The file.
        path: PathBuf,
        /// The metadata key.
        key: &'static str,
        /// The value in the file.
        has: u64,
        /// The value by the names of the files.
        expected: u64,
    },
    /// A metadata value of a split model is not a number.
    #[error("{}: {key} is {value}, must be a number", path.display())]
    NotNumber {
        /// The file.
        path: PathBuf,
        /// The metadata key.
        key: &'static str,
        /// The value in the file.
        value: String,
    },
    /// The files do not hold as many tensors as they claim.
    #[error("{}: {TENSORS} is {expected}, the files of the model hold {has} tensors", path.display())]
    Tensors {
        /// The file that makes the claim.
        path: PathBuf,
        /// The number of tensors in all files.
        has: u64,
        /// The number that the file claims.
        expected: u64,
    },
    /// A tensor stands in two files.
    #[error("tensor {tensor} is in {} and in {}", first.display(), second.display())]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// The file that comes first.
        first: PathBuf,
        /// The file that comes second.
        second: PathBuf,
    },
}

/// Says which files of a model do not exist; the only file of a model is alone.
fn missing(paths: &[PathBuf]) -> String {
    match paths {
        [only] if only.file_name().is_some_and(|name| split_name(&name.to_string_lossy()).is_none()) => {
            format!("{} does not exist", only.display())
        }
        paths => format!("files of the model are missing: {}", names(paths)),
    }
}

fn names(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn number(part: &GgufFile, key: &'static str, default: u64) -> Result<u64, SplitError> {
    match part.header.get(key) {
        None => Ok(default),
        Some(value) => value.unsigned().ok_or_else(|| SplitError::NotNumber {
            path: part.path.clone(),
            key,
            value: value.to_string(),
        }),
    }
}

/// Returns the paths of all files of the model that `path` belongs to, by its name.
fn siblings(path: &Path) -> Result<Vec<PathBuf>, SplitError> {
    let Some((prefix, number, count)) = path.file_name().and_then(|name| name.to_str()).and_then(split_name) else {
        return Ok(vec![path.to_owned()]);
    };
    if number == 0 || number > count || count > MAX_PARTS {
        return Err(SplitError::Name { path: path.to_owned(), number, count });
    }
    Ok((1..=count).map(|number| path.with_file_name(format!("{prefix}-{number:05}-of-{count:05}.gguf"))).collect())
}

/// Splits a file name of the form `NAME-00001-of-00003.gguf` into name, number and count; `None` for any other name.
pub fn split_name(name: &str) -> Option<(&str, u64, u64)> {
    let number = |text: &str| match text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse().ok(),
        false => None,
    };
    let rest = name.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (prefix, index) = rest.rsplit_once('-')?;
    Some((prefix, number(index)?, number(count)?))
}

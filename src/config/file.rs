//! Opens and reads the files that the program is given: only regular files, each up to the maximum size of its kind. A
//! named pipe, a device or a directory in place of a file is refused before anything is read, and neither `open` nor
//! `read` can block on it. They check the opened file itself and do not look its name up again.
//! Not here: the content of the files.

use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The maximum size in bytes of a small file: a configuration, a model's `config.json`, a chat template, a certificate.
pub const SMALL: u64 = 16 << 20;
/// The maximum size in bytes of a large file: a tokenizer, an index of shards.
pub const LARGE: u64 = 256 << 20;

/// An upper bound of one step of the clock for file times. The system advances that clock in steps of up to 10 ms, so
/// two writes within one step get the same time.
const CLOCK_STEP: Duration = Duration::from_millis(20);

/// The reason for which an existing file is not read. The functions here return it as the inner error of an [`Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The path names something other than a regular file.
    #[error("it is {0}, not a regular file")]
    NotRegular(&'static str),
    /// The file is larger than its kind may be.
    #[error("it has {has} bytes, at most {most} are read")]
    TooLarge {
        /// The file's size in bytes; for a file that grew while it was read, the bytes that were read.
        has: u64,
        /// The maximum size in bytes.
        most: u64,
    },
    /// The path is a symbolic link whose target does not exist.
    #[error("it is a symbolic link to {}, which does not exist", to.display())]
    Dangling {
        /// The link's target.
        to: PathBuf,
    },
}

impl Unfit {
    /// Returns the `Unfit` inside an error, if there is one.
    pub fn of(error: &Error) -> Option<&Unfit> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<Unfit> for Error {
    fn from(unfit: Unfit) -> Error {
        Error::new(ErrorKind::InvalidInput, unfit)
    }
}

/// Opens a regular file for reading. [`ErrorKind::NotFound`] means that no directory entry has this name; a symbolic
/// link without a target is [`Unfit::Dangling`].
pub fn open(path: &Path) -> Result<(File, Metadata)> {
    let (file, metadata) = open_any(path)?;
    if !metadata.is_file() {
        return Err(Unfit::NotRegular(kind(&metadata)).into());
    }
    Ok((file, metadata))
}

/// Reads a whole regular file of at most `most` bytes. Fails as [`open`] does, and with [`Unfit::TooLarge`].
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, metadata) = open(path)?;
    read_bounded(file, metadata.len(), most)
}

/// Reads a file as [`read`] does; a content that is not UTF-8 is [`ErrorKind::InvalidData`].
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    String::from_utf8(read(path, most)?).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// Reads a file named on the command line, at most `most` bytes. It may also be a pipe (`<(command)`) or a terminal,
/// which is opened a second time, blocking. The call waits for the end of a pipe, because a user can interrupt it;
/// files of a server are read with [`read`] instead.
pub fn read_argument(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, metadata) = match open(path) {
        Err(error) if matches!(Unfit::of(&error), Some(Unfit::NotRegular("a named pipe" | "a character device"))) => {
            let file = File::open(path)?;
            let metadata = file.metadata()?;
            (file, metadata)
        }
        other => other?,
    };
    read_bounded(file, metadata.len(), most)
}

/// Reads a file as [`read_argument`] does; a content that is not UTF-8 is [`ErrorKind::InvalidData`].
pub fn read_argument_text(path: &Path, most: u64) -> Result<String> {
    String::from_utf8(read_argument(path, most)?).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// Whether a directory entry has this name, also if it is a symbolic link without a target. If the system does not
/// tell, the result is true: opening the file then reports the reason.
pub fn is_named(path: &Path) -> bool {
    !matches!(std::fs::symlink_metadata(path), Err(error) if error.kind() == ErrorKind::NotFound)
}

/// Opens a path of any file type, without waiting for the other end of a pipe.
fn open_any(path: &Path) -> Result<(File, Metadata)> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|error| match std::fs::read_link(path) {
        Ok(to) if error.kind() == ErrorKind::NotFound => Unfit::Dangling { to }.into(),
        // A socket cannot be opened.
        _ => match std::fs::metadata(path) {
            Ok(metadata) if metadata.file_type().is_socket() => Unfit::NotRegular(kind(&metadata)).into(),
            _ => error,
        },
    })?;
    let metadata = file.metadata()?;
    Ok((file, metadata))
}

fn read_bounded(file: File, len: u64, most: u64) -> Result<Vec<u8>> {
    if len > most {
        return Err(Unfit::TooLarge { has: len, most }.into());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
    // Bounded by `take`: files of the kernel report a length of 0, and other files may grow.
    file.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 {
        has if has > most => Err(Unfit::TooLarge { has, most }.into()),
        _ => Ok(bytes),
    }
}

fn kind(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_char_device() => "a character device",
        () if kind.is_block_device() => "a block device",
        () if kind.is_socket() => "a socket",
        () => "something else",
    }
}

/// The state of a file: its identity, its length, and its modification and change times in nanoseconds. Two stamps of
/// an open file are equal if it was not written to in between. Writes through a memory map are an exception, because
/// some file systems do not record them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// The length in bytes.
    pub len: u64,
    inode: (u64, u64),
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// Creates a stamp from a file's metadata.
    pub fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            len: metadata.len(),
            inode: (metadata.dev(), metadata.ino()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns a stamp of an open file that any later write changes. If the last write is very recent, waits at most 20
    /// ms, until the clock for file times has advanced.
    pub fn settled(file: &File) -> Result<Stamp> {
        let stamp = Stamp::of(&file.metadata()?);
        let age = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok().and_then(|now| {
            let changed = Duration::new(stamp.changed.0.try_into().ok()?, stamp.changed.1.try_into().ok()?);
            now.checked_sub(changed)
        });
        match age.and_then(|age| CLOCK_STEP.checked_sub(age)) {
            None => Ok(stamp),
            Some(wait) => {
                std::thread::sleep(wait);
                Ok(Stamp::of(&file.metadata()?))
            }
        }
    }

    /// Describes how a later stamp of the same path differs; `None` if it does not.
    pub fn difference(&self, now: &Stamp) -> Option<String> {
        let times = |what: &str, (was, is): ((i64, i64), (i64, i64))| {
            format!("{what} at {}.{:09}, before at {}.{:09} (seconds since 1970)", is.0, is.1, was.0, was.1)
        };
        if self.inode != now.inode {
            Some(format!("another file (inode {}, before {})", now.inode.1, self.inode.1))
        } else if self.len != now.len {
            Some("another length".to_owned())
        } else if self.modified != now.modified {
            Some(times("written", (self.modified, now.modified)))
        } else if self.changed != now.changed {
            Some(times("changed", (self.changed, now.changed)))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Instant;

    fn unfit<T: std::fmt::Debug>(result: Result<T>) -> Unfit {
        let error = result.expect_err("it is refused");
        Unfit::of(&error).unwrap_or_else(|| panic!("{error:?}")).clone()
    }

    fn fifo(path: &Path) {
        rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::from(0o600)).unwrap();
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fifo(&at("pipe"));
        std::os::unix::fs::symlink("pipe", at("link to pipe")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("link to zero")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let begin = Instant::now();
        for (path, kind) in [
            (at("pipe"), "a named pipe"),
            (at("link to pipe"), "a named pipe"),
            (at("link to zero"), "a character device"),
            ("/dev/zero".into(), "a character device"),
            (folder.path().to_owned(), "a directory"),
            (at("socket"), "a socket"),
        ] {
            assert_eq!(unfit(read(&path, SMALL)), Unfit::NotRegular(kind), "{}", path.display());
            assert_eq!(unfit(open(&path)), Unfit::NotRegular(kind), "{}", path.display());
        }
        // Without the check, reading a pipe that has no writer would never end.
        assert!(begin.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_file_has_as_many_bytes_as_its_kind_may_have() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"12345").unwrap();
        assert_eq!(read(file.path(), 5).unwrap(), b"12345");
        let error = read(file.path(), 4).unwrap_err();
        assert_eq!(Unfit::of(&error), Some(&Unfit::TooLarge { has: 5, most: 4 }));
        assert_eq!(error.to_string(), "it has 5 bytes, at most 4 are read");
        // This file of the kernel reports a length of 0.
        assert_eq!(unfit(read(Path::new("/proc/self/maps"), 10)), Unfit::TooLarge { has: 11, most: 10 });
        // No memory is reserved for the length that a sparse file reports.
        file.as_file().set_len(1 << 40).unwrap();
        assert_eq!(unfit(read(file.path(), LARGE)), Unfit::TooLarge { has: 1 << 40, most: LARGE });
        file.as_file().set_len(3).unwrap();
        file.as_file().write_all(b"\xff").unwrap();
        assert_eq!(read_text(file.path(), SMALL).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn only_a_name_that_is_not_there_is_not_found() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        assert_eq!(read(&link, SMALL).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(!is_named(&link));
        std::os::unix::fs::symlink("../blobs/0a1b", &link).unwrap();
        assert!(is_named(&link));
        assert_eq!(unfit(read(&link, SMALL)), Unfit::Dangling { to: "../blobs/0a1b".into() });
    }

    #[test]
    fn an_argument_may_be_a_pipe_and_is_bounded_too() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        fifo(&pipe);
        let writer = |bytes: &'static [u8]| {
            let pipe = pipe.clone();
            std::thread::spawn(move || OpenOptions::new().write(true).open(pipe).unwrap().write_all(bytes))
        };
        let written = writer(b"token");
        assert_eq!(read_argument_text(&pipe, SMALL).unwrap(), "token");
        written.join().unwrap().unwrap();
        assert_eq!(unfit(read_argument(Path::new("/dev/zero"), 100)), Unfit::TooLarge { has: 101, most: 100 });
        assert_eq!(unfit(read_argument(folder.path(), 100)), Unfit::NotRegular("a directory"));
    }

    #[test]
    fn a_stamp_tells_every_write_even_at_once_and_of_the_same_length() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for round in 0..20u8 {
            file.write_all(&[round; 10]).unwrap();
            let stamp = Stamp::settled(file.as_file()).unwrap();
            assert_eq!(stamp.difference(&Stamp::of(&file.as_file().metadata().unwrap())), None);
            let (modified, same) = (file.as_file().metadata().unwrap().modified().unwrap(), [round + 1; 10]);
            std::os::unix::fs::FileExt::write_all_at(file.as_file(), &same, 0).unwrap();
            let now = Stamp::of(&file.as_file().metadata().unwrap());
            assert!(stamp.difference(&now).is_some_and(|how| how.starts_with("written")), "round {round}");
            // A modification time that is set back, as by copies that preserve times, is detected by the change time.
            file.as_file().set_modified(modified).unwrap();
            let now = Stamp::of(&file.as_file().metadata().unwrap());
            assert!(stamp.difference(&now).is_some_and(|how| how.starts_with("changed")), "round {round}");
            file.as_file().set_len(0).unwrap();
            file = tempfile::NamedTempFile::new().unwrap();
        }
    }
}

//! The demo models that are part of the program, packed, so that a first run needs no download.
//! Not here: how they were trained (`demo/`).

use crate::config;
use flate2::read::DeflateDecoder;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// An embedded checkpoint.
struct Files {
    /// FNV-1a of the bytes of all files: the same content has the same folder.
    hash: u64,
    files: [Packed; 5],
}

/// A file as the build packed it (`build/demo.rs`): three deflate streams.
struct Packed {
    name: &'static str,
    /// The length of the file.
    bytes: u64,
    /// The bytes before the weights; the whole file if it has no weights.
    head: &'static [u8],
    /// The low byte of each weight.
    low: &'static [u8],
    /// The high byte of each weight.
    high: &'static [u8],
}

include!(concat!(env!("OUT_DIR"), "/demo.rs"));

/// By the path that stands for the model.
static MODELS: &[(&str, &str, &Files)] = &[
    (config::DEMO_PATH, "demo", &DEMO),
    #[cfg(feature = "demo-hybrid")]
    (config::DEMO_HYBRID_PATH, "demo-hybrid", &DEMO_HYBRID),
];

/// Said of a model that the program was built without.
const LEFT_OUT: &str =
    "this program was built without it (cargo feature demo-hybrid); its files are in demo/hybrid of the source";
/// Weights that are unpacked at a time.
const CHUNK: usize = 32 << 10;

impl Packed {
    /// Writes the file's bytes.
    fn unpack(&self, to: &mut impl Write) -> io::Result<()> {
        let head = io::copy(&mut DeflateDecoder::new(self.head), to)?;
        let (mut low, mut high) = (DeflateDecoder::new(self.low), DeflateDecoder::new(self.high));
        let (mut lows, mut highs, mut both) = (vec![0; CHUNK], vec![0; CHUNK], vec![0; 2 * CHUNK]);
        let mut left = usize::try_from(self.bytes - head).expect("it was in memory") / 2;
        while left > 0 {
            let weights = left.min(CHUNK);
            low.read_exact(&mut lows[..weights])?;
            high.read_exact(&mut highs[..weights])?;
            for (pair, bytes) in both.chunks_exact_mut(2).zip(lows.iter().zip(&highs)) {
                (pair[0], pair[1]) = (*bytes.0, *bytes.1);
            }
            to.write_all(&both[..2 * weights])?;
            left -= weights;
        }
        Ok(())
    }
}

/// The folder of the checkpoint that `path` stands for: the path itself, but where it is [`config::embedded`], that model's files
/// are written under `cache` (or the system's temporary folder: also where the other cannot be written), unless they are
/// there already. An error names the path.
pub fn unpack(path: &Path, cache: Option<&Path>) -> Result<PathBuf, (PathBuf, io::Error)> {
    let unpacked = unpack_to(path, cache.map_or_else(std::env::temp_dir, Path::to_owned));
    match (unpacked, cache) {
        (Err((folder, error)), Some(_)) if folder != path => {
            tracing::warn!(%error, folder = %folder.display(), "the demo model goes to the system's temporary folder");
            unpack_to(path, std::env::temp_dir()).map_err(|_| (folder, error))
        }
        (unpacked, _) => unpacked,
    }
}

fn unpack_to(path: &Path, base: PathBuf) -> Result<PathBuf, (PathBuf, io::Error)> {
    let embedded = config::embedded(path);
    let Some((_, name, files)) = MODELS.iter().find(|(path, ..)| embedded == Some(*path)) else {
        return match embedded {
            None => Ok(path.to_owned()),
            Some(_) => Err((path.to_owned(), io::Error::other(LEFT_OUT))),
        };
    };
    let folder = base.join(format!("ostinato-{name}-{:016x}", files.hash));
    let write = || files.files.iter().try_for_each(|file| put(&folder, file.name, file.bytes, |to| file.unpack(to)));
    match std::fs::create_dir_all(&folder).and_then(|()| write()) {
        Ok(()) => Ok(folder),
        Err(error) => Err((folder, error)),
    }
}

/// Writes the file `name` of `folder`, which has `bytes` bytes and which `write` writes, unless a file of that length is
/// there. Other processes and threads may
/// do the same at the same time and read the file as soon as it is there: it appears whole, and a whole file is never
/// replaced, because a load fails if its file becomes another one.
fn put(
    folder: &Path,
    name: &str,
    bytes: u64,
    write: impl Fn(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let target = folder.join(name);
    let whole = || target.metadata().is_ok_and(|m| m.len() == bytes);
    if whole() {
        return Ok(());
    }
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let aside = folder.join(format!(".{name}.{}.{call}", std::process::id()));
    // A hard link is only made where nothing has the name; `rename` replaces a damaged file, and stands in on file
    // systems without links.
    let written = File::create(&aside).and_then(|file| {
        let mut file = BufWriter::new(file);
        write(&mut file)?;
        file.flush()
    });
    let placed = written.and_then(|()| match std::fs::hard_link(&aside, &target) {
        Err(_) if !whole() => std::fs::rename(&aside, &target),
        _ => Ok(()),
    });
    // Gone if it was renamed; what is left of a failed write has no use.
    let _ = std::fs::remove_file(&aside);
    placed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::checkpoint::Checkpoint;
    use crate::model::config::Architecture;

    #[test]
    fn threads_that_unpack_at_once_all_find_whole_files() {
        let cache = tempfile::tempdir().expect("a folder");
        for ((path, name, files), source) in MODELS.iter().zip(["demo/model", "demo/hybrid"]) {
            let folders: Vec<PathBuf> = std::thread::scope(|scope| {
                let unpack = || unpack(Path::new(path), Some(cache.path()));
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(unpack)).collect();
                threads.into_iter().map(|t| t.join().expect("no panic").expect("unpacked")).collect()
            });
            for folder in folders {
                for file in files.files.iter().map(|file| file.name) {
                    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source).join(file);
                    let (found, wanted) = (std::fs::read(folder.join(file)), std::fs::read(source));
                    assert!(found.expect(file) == wanted.expect(file), "{file} of {name} is not as it was packed");
                }
            }
        }
    }

    /// Goal: a file that one process loads stays that file while others unpack. Method: threads put a file again and
    /// again into a folder that is emptied before each round, and look at its inode as soon as their call ends.
    #[test]
    fn a_whole_file_is_never_replaced() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().expect("a folder");
        let seven = |to: &mut BufWriter<File>| to.write_all(&[7; 5000]);
        for round in 0..200u32 {
            let start = std::sync::Barrier::new(4);
            let inodes: Vec<u64> = std::thread::scope(|scope| {
                let unpack = || {
                    start.wait();
                    put(folder.path(), "file", 5000, seven).expect("written");
                    folder.path().join("file").metadata().expect("a file").ino()
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(unpack)).collect();
                threads.into_iter().map(|t| t.join().expect("no panic")).collect()
            });
            assert!(inodes.iter().all(|inode| *inode == inodes[0]), "round {round}: {inodes:?}");
            assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "files aside are left");
            // A damaged file is replaced.
            std::fs::write(folder.path().join("file"), [8; 4999]).expect("damaged");
            put(folder.path(), "file", 5000, seven).expect("written");
            assert_eq!(std::fs::read(folder.path().join("file")).expect("a file"), [7; 5000]);
            std::fs::remove_file(folder.path().join("file")).expect("removed");
        }
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_done_without() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a file");
        std::fs::write(&file, b"in the way").expect("written");
        let unpacked = unpack(Path::new("demo"), Some(&file)).expect("unpacked elsewhere");
        assert!(unpacked.starts_with(std::env::temp_dir()) && unpacked.join("config.json").is_file());
    }

    #[test]
    fn each_name_is_its_model_and_a_folder_is_itself() {
        let cache = tempfile::tempdir().expect("a folder");
        let open = |path: &str| {
            let folder = unpack(Path::new(path), Some(cache.path())).expect("unpacked");
            (Checkpoint::open(&folder).expect("a checkpoint"), folder)
        };
        for (names, architecture, drafts) in [
            (["demo", config::DEMO_PATH], Architecture::Qwen3, false),
            (["demo-hybrid", config::DEMO_HYBRID_PATH], Architecture::Qwen35, true),
        ] {
            let [(checkpoint, folder), (_, other)] = names.map(open);
            assert_eq!(folder, other);
            assert!(folder.starts_with(cache.path()), "{}", folder.display());
            assert_eq!((checkpoint.config.architecture, checkpoint.has_mtp()), (architecture, drafts), "{names:?}");
        }
        for path in ["./demo", "/models/demo-hybrid", "elsewhere"] {
            assert_eq!(unpack(Path::new(path), Some(cache.path())).expect("nothing to do"), Path::new(path));
        }
    }
}

//! The demo models that are part of the program, so that a first run needs no download.
//! Deliberately absent: how they were trained (`demo/`).

use crate::config;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A checkpoint's files by name.
type Files = [(&'static str, &'static [u8]); 5];

/// The files in a folder of `demo/`.
macro_rules! files {
    ($folder:literal) => {
        [
            ("config.json", include_bytes!(concat!("../../demo/", $folder, "/config.json"))),
            ("generation_config.json", include_bytes!(concat!("../../demo/", $folder, "/generation_config.json"))),
            ("model.safetensors", include_bytes!(concat!("../../demo/", $folder, "/model.safetensors"))),
            ("tokenizer.json", include_bytes!(concat!("../../demo/", $folder, "/tokenizer.json"))),
            ("tokenizer_config.json", include_bytes!(concat!("../../demo/", $folder, "/tokenizer_config.json"))),
        ]
    };
}

/// By the path that stands for the model.
const MODELS: [(&str, &str, Files); 2] =
    [(config::DEMO_PATH, "demo", files!("model")), (config::DEMO_HYBRID_PATH, "demo-hybrid", files!("hybrid"))];

/// The folder of the checkpoint that `path` stands for: the path itself, but where it is [`config::embedded`], that model's files
/// are written under `cache` (or the system's temporary folder: also where the other cannot be written), unless they are
/// there already. An error names the path.
pub fn unpack(path: &Path, cache: Option<&Path>) -> Result<PathBuf, (PathBuf, io::Error)> {
    let unpacked = unpack_to(path, cache.map_or_else(std::env::temp_dir, Path::to_owned));
    match (unpacked, cache) {
        (Err((folder, error)), Some(_)) => {
            tracing::warn!(%error, folder = %folder.display(), "the demo model goes to the system's temporary folder");
            unpack_to(path, std::env::temp_dir()).map_err(|_| (folder, error))
        }
        (unpacked, _) => unpacked,
    }
}

fn unpack_to(path: &Path, base: PathBuf) -> Result<PathBuf, (PathBuf, io::Error)> {
    let embedded = config::embedded(path);
    let Some((_, name, files)) = MODELS.iter().find(|(path, ..)| embedded == Some(*path)) else {
        return Ok(path.to_owned());
    };
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in files.iter().flat_map(|(_, bytes)| bytes.iter()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let folder = base.join(format!("ostinato-{name}-{hash:016x}"));
    let write = || files.iter().try_for_each(|(name, bytes)| put(&folder, name, bytes));
    match std::fs::create_dir_all(&folder).and_then(|()| write()) {
        Ok(()) => Ok(folder),
        Err(error) => Err((folder, error)),
    }
}

/// Writes `bytes` to the file `name` of `folder`, unless a file of that length is there. Other processes and threads may
/// do the same at the same time and read the file as soon as it is there: it appears whole, and a whole file is never
/// replaced, because a load fails if its file becomes another one.
fn put(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let target = folder.join(name);
    let whole = || target.metadata().is_ok_and(|m| m.len() == bytes.len() as u64);
    if whole() {
        return Ok(());
    }
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let aside = folder.join(format!(".{name}.{}.{call}", std::process::id()));
    // A hard link is only made where nothing has the name; `rename` replaces a damaged file, and stands in on file
    // systems without links.
    let placed = std::fs::write(&aside, bytes).and_then(|()| match std::fs::hard_link(&aside, &target) {
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
        for (path, name, files) in MODELS {
            let folders: Vec<PathBuf> = std::thread::scope(|scope| {
                let unpack = || unpack(Path::new(path), Some(cache.path()));
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(unpack)).collect();
                threads.into_iter().map(|t| t.join().expect("no panic").expect("unpacked")).collect()
            });
            for folder in folders {
                for (file, bytes) in files {
                    assert_eq!(std::fs::read(folder.join(file)).expect(file), bytes, "{file} of {name}");
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
        for round in 0..200u32 {
            let start = std::sync::Barrier::new(4);
            let inodes: Vec<u64> = std::thread::scope(|scope| {
                let unpack = || {
                    start.wait();
                    put(folder.path(), "file", &[7; 5000]).expect("written");
                    folder.path().join("file").metadata().expect("a file").ino()
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(unpack)).collect();
                threads.into_iter().map(|t| t.join().expect("no panic")).collect()
            });
            assert!(inodes.iter().all(|inode| *inode == inodes[0]), "round {round}: {inodes:?}");
            assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "files aside are left");
            // A damaged file is replaced.
            std::fs::write(folder.path().join("file"), [8; 4999]).expect("damaged");
            put(folder.path(), "file", &[7; 5000]).expect("written");
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

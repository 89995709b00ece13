//! The demo model that is part of the program, so that a first run needs no download.
//! Deliberately absent: how it was trained (`demo/`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The files of the checkpoint.
const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../demo/model/config.json")),
    ("generation_config.json", include_bytes!("../../demo/model/generation_config.json")),
    ("model.safetensors", include_bytes!("../../demo/model/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../demo/model/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../demo/model/tokenizer_config.json")),
];

/// Writes the checkpoint under `cache` (or the system's temporary folder), unless it is there
/// already, and gives its folder. An error names the path.
pub fn unpack(cache: Option<&Path>) -> Result<PathBuf, (PathBuf, io::Error)> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in FILES.iter().flat_map(|(_, bytes)| bytes.iter()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let base = cache.map_or_else(std::env::temp_dir, Path::to_owned);
    let folder = base.join(format!("ostinato-demo-{hash:016x}"));
    let whole =
        FILES.iter().all(|(name, bytes)| folder.join(name).metadata().is_ok_and(|m| m.len() == bytes.len() as u64));
    if whole {
        return Ok(folder);
    }
    // Written aside and renamed file by file: a process or thread beside this one sees whole files only.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let write = || -> io::Result<()> {
        std::fs::create_dir_all(&folder)?;
        for (name, bytes) in FILES {
            let aside = folder.join(format!(".{name}.{}.{call}", std::process::id()));
            std::fs::write(&aside, bytes)?;
            std::fs::rename(&aside, folder.join(name))?;
        }
        Ok(())
    };
    write().map_err(|error| (folder.clone(), error))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_unpack_at_once_all_find_whole_files() {
        let cache = tempfile::tempdir().expect("a folder");
        let folders: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| unpack(Some(cache.path())))).collect();
            threads.into_iter().map(|t| t.join().expect("no panic").expect("unpacked")).collect()
        });
        for folder in folders {
            for (name, bytes) in FILES {
                assert_eq!(std::fs::read(folder.join(name)).expect(name), bytes, "{name}");
            }
        }
    }
}

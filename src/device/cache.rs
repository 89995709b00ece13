//! The pipeline cache and its file. A file that is truncated, belongs to another device or driver, or was written for
//! another shader set is ignored: the cache then starts empty and is written anew.

use crate::config::file;
use crate::device::adapter::Adapter;
use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use ash::vk;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MAGIC: [u8; 8] = *b"ostpipe1";
/// The file header: magic, key, data length and data checksum, 8 bytes each.
const HEADER_BYTES: usize = 32;
/// The size above which a file is not read, because this program does not write such a file.
const MAX_BYTES: u64 = 1 << 30;

/// A pipeline cache, on disk or only in memory. Threads may share it.
pub struct PipelineCache {
    raw: vk::PipelineCache,
    file: Option<PathBuf>,
    key: u64,
    /// The number of bytes of the driver's data that came from the file.
    loaded_bytes: usize,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for PipelineCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PipelineCache").field("file", &self.file).field("loaded_bytes", &self.loaded_bytes).finish()
    }
}

impl PipelineCache {
    /// Opens the cache of this device, driver and shader set in the directory `dir`, which need not exist yet.
    /// `shader_set` is a hash over all shaders; each shader set has its own file.
    pub fn open(dir: &Path, device: &Device, shader_set: u64) -> Result<PipelineCache, DeviceError> {
        let adapter = device.adapter();
        let key = driver_key(adapter, shader_set);
        let file = dir.join(format!("{}-{key:016x}.pipelines", adapter.file_stem()));
        let bytes = match file::read(&file, MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != ErrorKind::NotFound {
                    tracing::warn!(%error, "the pipeline cache \"{}\" is not read", file.display());
                }
                Vec::new()
            }
        };
        let data = unpack(&bytes, key).filter(|data| is_drivers(data, adapter)).unwrap_or_default();
        PipelineCache::create(device, Some(file), key, data)
    }

    /// Returns a cache that is never written to disk.
    pub fn in_memory(device: &Device) -> Result<PipelineCache, DeviceError> {
        PipelineCache::create(device, None, 0, &[])
    }

    fn create(device: &Device, file: Option<PathBuf>, key: u64, data: &[u8]) -> Result<PipelineCache, DeviceError> {
        let logical = device.logical();
        let info = vk::PipelineCacheCreateInfo::default().initial_data(data);
        // SAFETY: the data is empty, or it was written by this same driver: `unpack` checked our key and checksum, and
        // `is_drivers` checked the driver's own header.
        let raw = logical.check("vkCreatePipelineCache", unsafe { logical.raw.create_pipeline_cache(&info, None) })?;
        Ok(PipelineCache { raw, file, key, loaded_bytes: data.len(), logical: logical.clone() })
    }

    /// The number of bytes of the driver's data that came from the file; 0 if the file was ignored.
    pub fn loaded_bytes(&self) -> usize {
        self.loaded_bytes
    }

    /// The path of the cache file; `None` if the cache is only in memory.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Writes the cache to its file with [`write_atomically`], so that a reader sees either the old file or the new
    /// one. Does nothing for a cache in memory.
    pub fn save(&self) -> Result<(), DeviceError> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        // SAFETY: the cache is alive, and Vulkan synchronises access to it internally.
        let data = unsafe { self.logical.raw.get_pipeline_cache_data(self.raw) };
        let data = self.logical.check("vkGetPipelineCacheData", data)?;
        write_atomically(file, &pack(&data, self.key))
            .map_err(|source| DeviceError::CacheWrite { path: file.clone(), source })
    }

    pub(super) fn raw(&self) -> vk::PipelineCache {
        self.raw
    }

    pub(super) fn assert_of(&self, logical: &Arc<Logical>) {
        assert!(Arc::ptr_eq(&self.logical, logical), "a pipeline cache of another device");
    }
}

impl Drop for PipelineCache {
    fn drop(&mut self) {
        // SAFETY: pipelines do not need their cache after creation, and creation borrows the cache, so none is in
        // progress.
        unsafe { self.logical.raw.destroy_pipeline_cache(self.raw, None) };
    }
}

/// Writes `bytes` to a temporary file in the same directory and renames it to `file`, so that a reader sees either the
/// old file or the new one. Creates the directory if it does not exist.
pub fn write_atomically(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static SERIAL: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    if let Some(dir) = file.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let serial = SERIAL.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let temporary = file.with_extension(format!("{}-{serial}.tmp", std::process::id()));
    let written = std::fs::File::create(&temporary)
        .and_then(|mut f| f.write_all(bytes).and_then(|()| f.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, file));
    if written.is_err() {
        // `written` holds the first error, which is the one to report.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// Returns a hash that changes with the device, the driver or the shader set. Data stored under one key is not valid
/// under another.
pub fn driver_key(adapter: &Adapter, shader_set: u64) -> u64 {
    let (vendor, device, driver) = adapter.ids;
    let mut bytes = Vec::new();
    for id in [vendor, device, driver] {
        bytes.extend(id.to_le_bytes());
    }
    bytes.extend(adapter.cache_uuid);
    bytes.extend(adapter.driver.as_bytes());
    bytes.extend(shader_set.to_le_bytes());
    fnv(&bytes)
}

/// FNV-1a. It detects truncated and stale files; it does not protect against an attacker.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

fn pack(data: &[u8], key: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + data.len());
    out.extend(MAGIC);
    for word in [key, data.len() as u64, fnv(data)] {
        out.extend(word.to_le_bytes());
    }
    out.extend(data);
    out
}

fn unpack(bytes: &[u8], key: u64) -> Option<&[u8]> {
    let (header, data) = bytes.split_at_checked(HEADER_BYTES)?;
    let (magic, words) = header.split_at(8);
    let expected: Vec<u8> = [key, data.len() as u64, fnv(data)].iter().flat_map(|w| w.to_le_bytes()).collect();
    (magic == MAGIC && words == expected).then_some(data)
}

/// Whether the driver's own header in the data names this adapter. Drivers have crashed on data of other adapters.
fn is_drivers(data: &[u8], adapter: &Adapter) -> bool {
    let word = |at: usize| data.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    word(0).is_some_and(|length| length >= 32)
        && word(4) == Some(vk::PipelineCacheHeaderVersion::ONE.as_raw().cast_unsigned())
        && word(8) == Some(adapter.ids.0)
        && word(12) == Some(adapter.ids.1)
        && data.get(16..32) == Some(&adapter.cache_uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked_under_the_same_key_only() {
        let packed = pack(b"pipelines", 7);
        assert_eq!(unpack(&packed, 7), Some(&b"pipelines"[..]));
        assert_eq!(unpack(&packed, 8), None);
    }

    /// Goal: a failed write is an error, changes nothing and leaves no temporary file. Method: the folder cannot be made,
    /// or the file not replaced, because something else has its name; modes would not stop a test that runs as root.
    #[test]
    fn a_file_that_cannot_be_written_is_an_error_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let names = || {
            let entries = std::fs::read_dir(folder.path()).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let file = folder.path().join("a file");
        std::fs::write(&file, b"in the way").unwrap();
        std::fs::create_dir(folder.path().join("a folder")).unwrap();
        for (path, kinds) in [
            (file.join("of.pipelines"), vec![ErrorKind::AlreadyExists, ErrorKind::NotADirectory]),
            (file.join("below/of.pipelines"), vec![ErrorKind::NotADirectory]),
            (folder.path().join("a folder"), vec![ErrorKind::IsADirectory]),
        ] {
            let error = write_atomically(&path, b"pipelines").unwrap_err();
            assert!(kinds.contains(&error.kind()), "{}: {error:?}", path.display());
            assert_eq!(names(), ["a file", "a folder"], "after {}", path.display());
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"in the way");
        write_atomically(&file, b"pipelines").unwrap();
        assert_eq!((std::fs::read(&file).unwrap().as_slice(), names().len()), (&b"pipelines"[..], 2));
    }

    #[test]
    fn every_torn_or_changed_file_is_ignored() {
        let packed = pack(b"pipelines of a driver", 7);
        for length in 0..packed.len() {
            assert_eq!(unpack(&packed[..length], 7), None, "torn at {length}");
        }
        for at in 0..packed.len() {
            let mut changed = packed.clone();
            changed[at] ^= 0x10;
            assert_eq!(unpack(&changed, 7), None, "byte {at} changed");
        }
        let longer = [packed.as_slice(), b"x"].concat();
        assert_eq!(unpack(&longer, 7), None);
    }
}

//! The shards of a checkpoint: open files that are mapped into memory if possible, and otherwise read by position. If a
//! file changes or fails meanwhile, the load returns an error; the process continues.
//! Not here: the content of the files.

use super::MemoryError;
use super::arena::FileMap;
use crate::config::file::{self, Stamp};
use rustix::fs::Advice;
use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The number of bytes of a map that are unmapped at a time; this takes about a millisecond.
#[cfg(target_os = "linux")]
const END_STEP: usize = 64 << 20;

/// A regular file that is open for reading, and its state when it was opened. After a write to the file,
/// [`WeightFile::unchanged`] fails.
pub struct WeightFile {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    /// `None` if the file is read instead of mapped.
    map: Option<FileMap>,
}

impl std::fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mapped = self.map.is_some();
        f.debug_struct("WeightFile")
            .field("path", &self.path)
            .field("stamp", &self.stamp)
            .field("mapped", &mapped)
            .finish()
    }
}

impl WeightFile {
    /// Opens a file. An empty file is an error (`Truncated`).
    pub fn open(path: &Path) -> Result<WeightFile, MemoryError> {
        let failed = |source| MemoryError::File { path: path.to_owned(), source };
        let (file, _) = file::open(path).map_err(failed)?;
        let stamp = Stamp::settled(&file).map_err(failed)?;
        if stamp.len == 0 {
            let path = path.to_owned();
            return Err(MemoryError::Truncated { path, what: "its header".to_owned(), wanted: 8, has: 0 });
        }
        Ok(WeightFile::of(path, file, stamp))
    }

    fn of(path: &Path, file: File, stamp: Stamp) -> WeightFile {
        let map = FileMap::of(&file).filter(|map| map.bytes().len() as u64 == stamp.len);
        WeightFile { path: path.to_owned(), file, stamp, map }
    }

    /// Returns the same file without a map.
    pub fn unmapped(self) -> WeightFile {
        WeightFile {
            path: self.path.clone(),
            file: self.file.try_clone().expect("a descriptor"),
            stamp: self.stamp,
            map: None,
        }
    }

    /// Opens a file as [`WeightFile::open`] does. Fails if it is not the file of `stamp`, or has changed since `stamp`
    /// was taken.
    pub fn open_as(path: &Path, stamp: &Stamp) -> Result<WeightFile, MemoryError> {
        let failed = |source| MemoryError::File { path: path.to_owned(), source };
        let (file, metadata) = file::open(path).map_err(failed)?;
        compare(path, stamp, &Stamp::of(&metadata))?;
        Ok(WeightFile::of(path, file, *stamp))
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The length in bytes when the file was opened.
    pub fn len(&self) -> u64 {
        self.stamp.len
    }

    /// Whether the file is mapped, so that [`WeightFile::bytes`] needs no room.
    pub fn is_mapped(&self) -> bool {
        self.map.is_some()
    }

    /// Always `false`: an empty file is not opened.
    pub fn is_empty(&self) -> bool {
        self.stamp.len == 0
    }

    /// Returns the bytes `part` of the file; errors call it `what`. The result is a slice of the map, or `room` after
    /// the bytes were read into it; `room` must have the length of `part`. Bytes that a map cannot read are zeros: only
    /// [`WeightFile::unchanged`], called after all use, tells whether the bytes are valid.
    ///
    /// # Errors
    /// If the file ends before `part` does, or if reading fails.
    pub fn bytes<'a>(&'a self, part: Range<u64>, room: &'a mut [u8], what: &str) -> Result<&'a [u8], MemoryError> {
        self.holds(&part, what)?;
        if let Some(map) = &self.map {
            return Ok(&map.bytes()[part.start as usize..part.end as usize]);
        }
        self.file.read_exact_at(room, part.start).map_err(|source| self.failed(source))?;
        Ok(room)
    }

    /// Returns the error of a failed read: that the file was changed, otherwise the system's error.
    fn failed(&self, source: std::io::Error) -> MemoryError {
        let changed = self.unchanged().err();
        changed.unwrap_or_else(|| MemoryError::File { path: self.path.clone(), source })
    }

    /// Returns an error if `part` is not inside the file as it was when opened.
    pub fn holds(&self, part: &Range<u64>, what: &str) -> Result<(), MemoryError> {
        if part.start <= part.end && part.end <= self.len() {
            return Ok(());
        }
        Err(MemoryError::Truncated {
            path: self.path.clone(),
            what: what.to_owned(),
            wanted: part.end.max(part.start),
            has: self.len(),
        })
    }

    /// Returns an error if the file was written to since it was opened or, with [`WeightFile::open_as`], since the
    /// stamp was taken, or if a part of the map could not be read.
    pub fn unchanged(&self) -> Result<(), MemoryError> {
        let failed = |source| MemoryError::File { path: self.path.clone(), source };
        let now = self.file.metadata().map_err(failed)?;
        compare(&self.path, &self.stamp, &Stamp::of(&now))?;
        match &self.map {
            Some(map) if map.is_lost() => Err(failed(std::io::Error::other("a part of its map could not be read"))),
            _ => Ok(()),
        }
    }

    /// Asks the system to read a part into memory at once instead of page by page. A disk error is reported here or
    /// when the part is read.
    pub fn announce(&self, part: &Range<u64>) -> Result<(), MemoryError> {
        let Some(len) = NonZeroU64::new(part.end.saturating_sub(part.start)) else { return Ok(()) };
        match &self.map {
            None => {
                // This is only a hint; reads work without it.
                let _ = rustix::fs::fadvise(&self.file, part.start, Some(len), Advice::WillNeed);
                Ok(())
            }
            Some(map) => match map.populate(part.start as usize, len.get() as usize) {
                // Kernels before 5.14 do not support this advice; the pages are then read on first access.
                Err(source) if source.kind() != std::io::ErrorKind::InvalidInput => Err(self.failed(source)),
                _ => Ok(()),
            },
        }
    }
}

/// Unmaps a whole checkpoint in steps. Removing the pages from the page tables takes a quarter of a second for 15 GiB,
/// and until it is done no other thread of the process can map memory.
#[cfg(target_os = "linux")]
impl Drop for WeightFile {
    fn drop(&mut self) {
        let Some(map) = &self.map else { return };
        let len = map.bytes().len();
        for start in (0..len).step_by(END_STEP) {
            // If this fails, the rest is unmapped with the map.
            let _ = map.let_go(start, END_STEP.min(len - start));
        }
    }
}

fn compare(path: &Path, was: &Stamp, is: &Stamp) -> Result<(), MemoryError> {
    match was.difference(is) {
        None => Ok(()),
        Some(how) => Err(MemoryError::FileChanged { path: path.to_owned(), how, was: was.len, is: is.len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file_of(bytes: &[u8]) -> (tempfile::NamedTempFile, WeightFile) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let opened = WeightFile::open(file.path()).unwrap();
        (file, opened)
    }

    /// Runs `test` on a mapped file and on one that is read.
    fn both(bytes: &[u8], test: impl Fn(&tempfile::NamedTempFile, WeightFile)) {
        let (keep, file) = file_of(bytes);
        assert!(file.map.is_some() || cfg!(not(target_os = "linux")));
        test(&keep, file);
        let (keep, file) = file_of(bytes);
        test(&keep, file.unmapped());
    }

    #[test]
    fn a_part_beyond_the_end_is_truncated_by_name_and_numbers() {
        both(&[7; 100], |_, file| {
            assert_eq!(file.bytes(90..100, &mut [0; 10], "x").unwrap(), [7; 10]);
            let error = file.bytes(90..101, &mut [0; 11], "layers.0.q").unwrap_err().to_string();
            assert!(error.ends_with("is truncated: layers.0.q ends at byte 101, the file has 100"), "{error}");
            file.announce(&(0..100)).unwrap();
            file.announce(&(7..7)).unwrap();
        });
    }

    /// Goal: after a file is truncated, a read does not end the process, and the bytes that were read are reported as
    /// invalid.
    #[test]
    fn a_file_that_shrinks_is_an_error_and_not_the_end_of_the_process() {
        both(&[7; 1_000_000], |keep, file| {
            let mut room = vec![0; 1_000_000];
            assert_eq!(file.bytes(0..1_000_000, &mut room, "x").unwrap(), [7; 1_000_000]);
            keep.as_file().set_len(5_000).unwrap();
            match file.bytes(0..1_000_000, &mut room, "x") {
                // In a map, the rest of the last page of the file and the pages after it read as zeros.
                Ok(bytes) => {
                    assert!(file.map.is_some());
                    assert!(bytes.iter().zip(0..).all(|(byte, at)| *byte == if at < 5_000 { 7 } else { 0 }));
                }
                Err(error) => {
                    assert!(matches!(error, MemoryError::FileChanged { was: 1_000_000, is: 5_000, .. }), "{error:?}")
                }
            }
            assert!(file.map.as_ref().is_none_or(FileMap::is_lost));
            let changed = |result: Result<(), MemoryError>| {
                matches!(result, Err(MemoryError::FileChanged { was: 1_000_000, is: 5_000, .. }))
            };
            assert!(changed(file.unchanged()));
            if file.map.is_some() {
                assert!(changed(file.announce(&(0..1_000_000))) || file.announce(&(0..1_000_000)).is_ok());
            }
        });
        // Other maps are still guarded.
        both(&[7; 10_000], |_, file| {
            assert_eq!(file.bytes(0..10_000, &mut [0; 10_000], "x").unwrap(), [7; 10_000]);
            file.unchanged().unwrap();
        });
    }

    #[test]
    fn a_file_that_was_written_to_or_replaced_is_not_the_one_of_its_stamp() {
        let (keep, file) = file_of(&[7; 1000]);
        file.unchanged().unwrap();
        let stamp = file.stamp;
        drop(WeightFile::open_as(keep.path(), &stamp).unwrap());
        // Written in place, with the length unchanged.
        keep.as_file().write_all_at(&[8], 999).unwrap();
        for error in [file.unchanged().unwrap_err(), WeightFile::open_as(keep.path(), &stamp).unwrap_err()] {
            assert!(matches!(&error, MemoryError::FileChanged { was: 1000, is: 1000, .. }), "{error:?}");
            assert!(error.to_string().contains("was changed while it was loaded: written at "), "{error}");
        }
        let (other, _open) = file_of(&[7; 1000]);
        std::fs::rename(other.path(), keep.path()).unwrap();
        let error = WeightFile::open_as(keep.path(), &stamp).unwrap_err().to_string();
        assert!(error.contains("another file (inode "), "{error}");
        // The file was renamed, so there is nothing for `other` to remove.
        std::mem::forget(other);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_was_let_go_is_there_when_it_is_read_again() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i / 7) as u8).collect();
        let (_keep, file) = file_of(&bytes);
        let before = file.bytes(0..100_000, &mut [], "x").unwrap();
        assert_eq!(before, bytes);
        file.map.as_ref().unwrap().let_go(0, 85_001).unwrap();
        assert_eq!(before, bytes);
    }

    #[test]
    fn what_cannot_be_read_is_an_error_that_names_it() {
        let missing = WeightFile::open(Path::new("/nowhere/model.safetensors")).unwrap_err();
        assert_eq!(missing.to_string(), "cannot read /nowhere/model.safetensors");
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(WeightFile::open(folder.path()), Err(MemoryError::File { .. })));
        assert!(matches!(WeightFile::open(Path::new("/dev/zero")), Err(MemoryError::File { .. })));
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(WeightFile::open(empty.path()), Err(MemoryError::Truncated { .. })));
    }
}

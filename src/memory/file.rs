//! Files that are read as memory: the shards of a checkpoint.
//! Deliberately absent: what is in them.

use super::MemoryError;
use super::arena;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Bytes of a map that end at once: a millisecond's work.
#[cfg(target_os = "linux")]
const END_STEP: usize = 64 << 20;

/// A file mapped to read. It must be left alone meanwhile: one that shrinks under the map ends
/// the process (the operating system has no other way to say it), which
/// [`MappedFile::bytes`] makes unlikely by looking at the length each time.
pub struct MappedFile {
    path: PathBuf,
    file: File,
    /// When opened.
    modified: Option<SystemTime>,
    map: memmap2::Mmap,
}

impl std::fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MappedFile").field("path", &self.path).field("len", &self.map.len()).finish()
    }
}

impl MappedFile {
    /// Opens and maps a file. An empty one is truncated.
    pub fn open(path: &Path) -> Result<MappedFile, MemoryError> {
        let failed = |source| MemoryError::File { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(failed(std::io::Error::other("not a regular file")));
        }
        if metadata.len() == 0 {
            let path = path.to_owned();
            return Err(MemoryError::Truncated { path, what: "its header".to_owned(), wanted: 8, has: 0 });
        }
        let map = arena::map_file(&file).map_err(failed)?;
        Ok(MappedFile { path: path.to_owned(), file, modified: metadata.modified().ok(), map })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length when it was opened.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Never: an empty file is not opened.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// A part of it, called `what` in errors. Errors: the file ends before, or was changed
    /// since it was opened.
    pub fn bytes(&self, part: Range<u64>, what: &str) -> Result<&[u8], MemoryError> {
        self.holds(&part, what)?;
        self.unchanged()?;
        Ok(&self.map[part.start as usize..part.end as usize])
    }

    /// Whether `part` is inside the file, as an error if not.
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

    /// An error if the file was written to since it was opened.
    pub fn unchanged(&self) -> Result<(), MemoryError> {
        let now = self.file.metadata().map_err(|source| MemoryError::File { path: self.path.clone(), source })?;
        if now.len() == self.len() && now.modified().ok() == self.modified {
            return Ok(());
        }
        Err(MemoryError::FileChanged { path: self.path.clone(), was: self.len(), is: now.len() })
    }

    /// Brings a part into memory at once instead of page by page as it is touched. An error of
    /// the disk is reported here; without this it would end the process at the touch.
    pub fn populate(&self, part: Range<u64>, what: &str) -> Result<(), MemoryError> {
        self.holds(&part, what)?;
        self.unchanged()?;
        #[cfg(target_os = "linux")]
        {
            let (start, len) = (part.start as usize, (part.end - part.start) as usize);
            let advised = self.map.advise_range(memmap2::Advice::PopulateRead, start, len);
            // Kernels before 5.14 do not know this advice: then the touch does it.
            if let Err(source) = advised
                && source.kind() != std::io::ErrorKind::InvalidInput
            {
                return Err(MemoryError::File { path: self.path.clone(), source });
            }
        }
        Ok(())
    }
}

/// A whole checkpoint's map ends in steps: until the system has taken its pages out of the page tables one by one, a quarter
/// of a second for 15 GiB, nobody else in the process maps memory.
#[cfg(target_os = "linux")]
impl Drop for MappedFile {
    fn drop(&mut self) {
        for start in (0..self.map.len()).step_by(END_STEP) {
            // What is still there ends with the map.
            let _ = arena::let_go(&self.map, start, END_STEP.min(self.map.len() - start));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_part_beyond_the_end_is_truncated_by_name_and_numbers() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 100]).unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        assert_eq!(mapped.bytes(90..100, "x").unwrap(), &[7; 10]);
        let error = mapped.bytes(90..101, "layers.0.q").unwrap_err().to_string();
        assert!(error.ends_with("is truncated: layers.0.q ends at byte 101, the file has 100"), "{error}");
    }

    #[test]
    fn a_file_that_shrank_is_noticed_before_it_is_read() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 10_000]).unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        file.as_file().set_len(100).unwrap();
        assert!(matches!(mapped.bytes(9000..9001, "x"), Err(MemoryError::FileChanged { was: 10_000, is: 100, .. })));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_was_let_go_is_there_when_it_is_read_again() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i / 7) as u8).collect();
        file.write_all(&bytes).unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        let before = mapped.bytes(0..100_000, "x").unwrap();
        assert_eq!(before, bytes);
        arena::let_go(&mapped.map, 5_000, 85_001).unwrap();
        assert_eq!(before, bytes);
    }

    #[test]
    fn what_cannot_be_mapped_is_an_error_that_names_it() {
        let missing = MappedFile::open(Path::new("/nowhere/model.safetensors")).unwrap_err();
        assert_eq!(missing.to_string(), "cannot read /nowhere/model.safetensors");
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(MappedFile::open(folder.path()), Err(MemoryError::File { .. })));
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(MappedFile::open(empty.path()), Err(MemoryError::Truncated { .. })));
    }
}

//! Values that are read from files and reloaded when the files change: certificates, tokens. If a new version cannot be
//! used, the error is logged and the old value stays. Not here: the content of the files.

use crate::telemetry::with_causes;
use arc_swap::ArcSwap;
use std::error::Error;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The interval at which files are checked. Changed files are read once they have not changed for one interval, so that
/// several files that change one after the other (a certificate, then its key) are read once.
const PERIOD: Duration = Duration::from_secs(1);

/// The cause of a failed read, of any type.
pub type BoxError = Box<dyn Error + Send + Sync>;
/// Reads the files; receives the previous value.
type Load<T> = Box<dyn Fn(Option<&T>) -> Result<T, BoxError> + Send + Sync>;

/// The identity, size and change times of a file; `None` if the file is missing.
type Stamp = Option<(u64, u64, i64, i64, i64, i64)>;

/// The last usable value of some files.
pub struct Watched<T> {
    /// The name of the value in log messages.
    what: &'static str,
    files: Vec<PathBuf>,
    load: Load<T>,
    current: ArcSwap<T>,
    /// The stamps of the files when they were last read.
    read: Mutex<Vec<Stamp>>,
}

impl<T> fmt::Debug for Watched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("what", &self.what).field("files", &self.files).finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Watched<T> {
    /// Reads the files. Fails if they cannot be used.
    pub fn new<E: Into<BoxError>>(
        what: &'static str,
        files: Vec<PathBuf>,
        load: impl Fn(Option<&T>) -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Watched<T>, E> {
        // Taken before the files are read, so that a change during the read causes another read.
        let read = Mutex::new(stamps(&files));
        let current = ArcSwap::from_pointee(load(None)?);
        Ok(Watched { what, files, load: Box::new(move |before| load(before).map_err(Into::into)), current, read })
    }

    /// Returns the current value.
    pub fn current(&self) -> Arc<T> {
        self.current.load_full()
    }

    /// Reloads the files when they change, until `stop` is cancelled.
    pub async fn follow(self: Arc<Watched<T>>, stop: CancellationToken) {
        let mut seen = self.read.lock().unwrap_or_else(PoisonError::into_inner).clone();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(PERIOD) => {}
            }
            let (watched, before) = (Arc::clone(&self), seen);
            // On a blocking thread, because the files may be on a slow or remote disk.
            let looked = tokio::task::spawn_blocking(move || {
                let now = stamps(&watched.files);
                if now == before {
                    watched.read(&now);
                }
                now
            });
            match looked.await {
                Ok(now) => seen = now,
                // The runtime is shutting down.
                Err(_) => return,
            }
        }
    }

    /// Reads the files unless they have the stamps of the last read.
    fn read(&self, now: &[Stamp]) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if *read == now {
            return;
        }
        now.clone_into(&mut read);
        match (self.load)(Some(&self.current())) {
            Ok(new) => {
                self.current.store(Arc::new(new));
                tracing::info!("{} read again", self.what);
            }
            Err(error) => {
                tracing::error!(error = with_causes(&*error), "new {} cannot be used, the old stay", self.what)
            }
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |file: &PathBuf| {
        let found = std::fs::metadata(file).ok()?;
        Some((found.ino(), found.len(), found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()))
    };
    files.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_once_and_a_bad_one_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("number");
        std::fs::write(&file, "1").unwrap();
        let path = file.clone();
        let load = move |before: Option<&(u32, u32)>| -> Result<(u32, u32), BoxError> {
            let number = std::fs::read_to_string(&path)?.parse()?;
            Ok((number, before.map_or(0, |before| before.1 + 1)))
        };
        let watched = Watched::new("numbers", vec![file.clone()], load).unwrap();
        let look = || {
            watched.read(&stamps(&watched.files));
            *watched.current()
        };
        assert_eq!(look(), (1, 0), "nothing has changed");
        std::fs::write(&file, "22").unwrap();
        assert_eq!((look(), look()), ((22, 1), (22, 1)));
        std::fs::write(&file, "many").unwrap();
        assert_eq!(look(), (22, 1));
        std::fs::remove_file(&file).unwrap();
        assert_eq!(look(), (22, 1));
        std::fs::write(&file, "3").unwrap();
        assert_eq!(look(), (3, 2));
        // Another file of the same length in its place, as renewals put them.
        std::fs::write(folder.path().join("new"), "4").unwrap();
        std::fs::rename(folder.path().join("new"), &file).unwrap();
        assert_eq!(look(), (4, 3));
        assert!(Watched::new("none", vec![], |_: Option<&()>| Err::<(), BoxError>("no".into())).is_err());
    }
}

//! Turns of processes on one GPU: a file lock that at most one process of this program holds while its work is on the
//! device. A driver gives the contexts of several processes time slices of a few milliseconds, and each change of the
//! context costs a part of a slice; a turn lasts a whole submission. Turns are advice: a process that gets none in time,
//! or that finds no directory for the lock files, submits without one, and the driver shares the device.
//! Not here: the order of submissions within a process (`compute`), and the completion that ends a turn (`watcher`).

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, fchmod, flock, openat};
use rustix::io::Errno;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The maximum wait for a turn. A submission lasts a few tens of milliseconds, so that a longer wait means a process
/// that was stopped, or many processes.
const PATIENCE: Duration = Duration::from_millis(250);

/// The time for which a process submits without turns after it got none in [`PATIENCE`].
const WITHOUT: Duration = Duration::from_secs(10);

/// The interval at which a waiting process tries a lock again. Between two turns the device is idle for about this long.
const LOOK_EVERY: Duration = Duration::from_micros(30);

/// The directory for lock files that all users share, if the system has it; otherwise the directory for temporary files
/// is used.
const SHARED: &str = "/run/lock";

/// The turns of this process on a device.
///
/// There are two locks: who holds `turn` uses the device, and who holds `next` is the first to wait for `turn`. The
/// second one makes two processes alternate, and tells the process whose turn it is that another one waits.
#[derive(Debug)]
pub struct Turns {
    turn: PathBuf,
    next: PathBuf,
    /// The lock file of `next`, opened to look whether it is locked.
    looked_at: File,
    /// The current turn, as long as submissions of it are unfinished.
    held: Weak<Turn>,
    /// The time until which this process submits without turns.
    without: Option<Instant>,
}

/// A turn: the device is this process's until the last clone is dropped, which is when the turn's last submission has
/// finished.
#[derive(Debug)]
pub struct Turn(#[expect(dead_code, reason = "the lock ends when the file is closed")] File);

impl Turns {
    /// Returns the turns on the device with this UUID. `None` if the lock files cannot be opened, or if the UUID is zero: a
    /// driver without UUIDs gives all of its devices that one.
    pub fn of_device(device: &str) -> Option<Turns> {
        if device.trim_matches(['0', '-']).is_empty() {
            return None;
        }
        let temporary = std::env::temp_dir();
        [Path::new(SHARED), &temporary].into_iter().find_map(|directory| Turns::within(directory, device))
    }

    /// Returns the turns whose lock files are in a directory.
    fn within(directory: &Path, device: &str) -> Option<Turns> {
        let path = |kind: &str| directory.join(format!("ostinato-{device}.{kind}"));
        let (turn, next) = (path("turn"), path("next"));
        lock_file(&turn).ok()?;
        let looked_at = lock_file(&next).ok()?;
        Some(Turns { turn, next, looked_at, held: Weak::new(), without: None })
    }

    /// Waits until the device is this process's, and returns the turn for the next submission. It is the current turn
    /// while no other process waits; otherwise the current turn ends first. `None` if it takes too long.
    pub(super) fn take(&mut self) -> Option<Arc<Turn>> {
        let now = Instant::now();
        if self.without.is_some_and(|until| now < until) {
            return None;
        }
        if let Some(held) = self.held.upgrade()
            && !self.another_waits()
        {
            return Some(held);
        }
        let taken = self.wait(now + PATIENCE);
        self.without = taken.is_none().then(|| Instant::now() + WITHOUT);
        let turn = Arc::new(Turn(taken?));
        self.held = Arc::downgrade(&turn);
        Some(turn)
    }

    fn another_waits(&self) -> bool {
        match flock(&self.looked_at, FlockOperation::NonBlockingLockExclusive) {
            // The lock was free. A failure to unlock would let all processes wait in vain for [`PATIENCE`] each.
            Ok(()) => flock(&self.looked_at, FlockOperation::Unlock).is_err(),
            Err(_) => true,
        }
    }

    /// Waits for the device until `deadline`, behind the processes that wait already and behind this process's own turn.
    fn wait(&self, deadline: Instant) -> Option<File> {
        // Each turn locks a file of its own: the lock of a turn that is just ending is another one's.
        let next = lock_file(&self.next).ok()?;
        lock(&next, deadline)?;
        let turn = lock_file(&self.turn).ok()?;
        lock(&turn, deadline)?;
        Some(turn)
    }
}

/// Opens a lock file, and creates it if it does not exist. Nothing is ever read from it or written to it, and all users
/// may open it.
fn lock_file(path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match openat(CWD, path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            match openat(CWD, path, flags | OFlags::CREATE | OFlags::EXCL, Mode::from(0o444)) {
                Ok(file) => {
                    // The process's mask may have taken the others' right to open it.
                    fchmod(&file, Mode::from(0o444))?;
                    file
                }
                // Another process was faster.
                Err(Errno::EXIST) => openat(CWD, path, flags, Mode::empty())?,
                Err(error) => return Err(error),
            }
        }
        other => other?,
    };
    Ok(File::from(file))
}

/// Locks a file, or returns `None` at `deadline`.
fn lock(file: &File, deadline: Instant) -> Option<()> {
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(()),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn two() -> (tempfile::TempDir, Turns, Turns) {
        let directory = tempfile::tempdir().unwrap();
        let turns = || Turns::within(directory.path(), "gpu").unwrap();
        let (a, b) = (turns(), turns());
        (directory, a, b)
    }

    /// Goal: a process alone keeps its turn, and one whose turn has ended leaves the device to others.
    #[test]
    fn a_turn_lasts_until_its_last_submission_has_finished() {
        let (_directory, mut a, mut b) = two();
        let first = a.take().unwrap();
        let second = a.take().unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        drop(first);
        assert!(b.take().is_none(), "a submission of the turn is unfinished");
        drop(second);
        // It does without turns for a while, and may also submit beside others meanwhile.
        assert!(b.take().is_none());
        b.without = None;
        assert!(b.take().is_some());
        assert!(a.take().is_some(), "b's turn has ended");
    }

    /// Goal: two processes that always have work alternate, and never have the device at the same time. Method: two
    /// threads with lock files of their own, each of which keeps two submissions in flight, as an executor does.
    #[test]
    fn two_processes_alternate() {
        let (_directory, a, b) = two();
        let (on_device, changes) = (AtomicU32::new(0), AtomicU32::new(0));
        let last = AtomicU32::new(0);
        let run = |mut turns: Turns, own: u32| {
            let mut in_flight = None;
            for _ in 0..50 {
                let turn = turns.take().expect("a turn in time");
                drop(in_flight.replace(turn));
                assert_eq!(on_device.swap(own, Ordering::SeqCst) & !own, 0, "both have the device");
                changes.fetch_add(u32::from(last.swap(own, Ordering::SeqCst) != own), Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(500));
                on_device.store(0, Ordering::SeqCst);
                // The watcher ends the submission while the next one is being prepared.
                in_flight = None;
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(a, 1));
            scope.spawn(|| run(b, 2));
        });
        assert!(changes.into_inner() >= 20, "one process had nearly all turns before the other");
    }

    /// Goal: a lock file that is not a plain file of this kind, or that cannot be opened, means no turns.
    #[test]
    fn without_lock_files_there_are_no_turns() {
        assert!(Turns::of_device("00000000-0000-0000-0000-000000000000").is_none());
        let directory = tempfile::tempdir().unwrap();
        assert!(Turns::within(&directory.path().join("missing"), "gpu").is_none());
        std::os::unix::fs::symlink("/dev/zero", directory.path().join("ostinato-gpu.turn")).unwrap();
        assert!(Turns::within(directory.path(), "gpu").is_none(), "a link is not followed");
    }
}

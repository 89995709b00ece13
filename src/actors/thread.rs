//! The thread of an actor. Not here: its inbox (`mailbox`) and what it does.

use crate::device::DeviceError;
use crate::memory::MemoryError;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// Why an actor was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// A Vulkan object of the actor was not created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Memory of the actor was not allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The system has no thread left.
    #[error("the system did not start the thread \"{name}\"")]
    Thread {
        /// The thread's name.
        name: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// The thread of an actor. Dropping it joins the thread, so a handle declares it after the inbox whose end is the
/// thread's end.
#[derive(Debug)]
pub struct ActorThread(Mutex<Option<JoinHandle<()>>>);

impl ActorThread {
    /// Starts a thread that runs `run`.
    pub fn spawn(name: impl Into<String>, run: impl FnOnce() + Send + 'static) -> Result<ActorThread, SpawnError> {
        let name = name.into();
        match std::thread::Builder::new().name(name.clone()).spawn(run) {
            Ok(thread) => Ok(ActorThread(Mutex::new(Some(thread)))),
            Err(source) => Err(SpawnError::Thread { name, source }),
        }
    }

    /// Waits for the end of the thread. A second caller returns after the end too.
    pub fn join(&self) {
        // The lock guards nothing but the handle, which is taken whole.
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // A panic was logged where it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for ActorThread {
    fn drop(&mut self) {
        self.join();
    }
}

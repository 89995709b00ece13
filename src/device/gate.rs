//! Gates: timelines that the host advances, for work that is queued before its input has been written. Not here: who
//! opens a gate. Code that submits work behind a gate must make sure that the gate is opened, otherwise the queue
//! stalls.

use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use ash::vk;
use std::sync::{Arc, Mutex, PoisonError};

/// A timeline semaphore that only the host signals. Submissions that wait for it keep it alive.
pub struct Gate {
    raw: vk::Semaphore,
    logical: Arc<Logical>,
    /// Locked while a value is signaled, so that the values grow.
    opened: Mutex<u64>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("opened", &self.opened()).finish()
    }
}

impl Gate {
    /// Creates a gate with value 0.
    pub fn new(device: &Device) -> Result<Gate, DeviceError> {
        let logical = device.logical();
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE).initial_value(0);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: timeline semaphores are a required feature and enabled.
        let raw = logical.check("vkCreateSemaphore", unsafe { logical.raw.create_semaphore(&info, None) })?;
        logical.name(raw, "gate");
        Ok(Gate { raw, logical: logical.clone(), opened: Mutex::new(0) })
    }

    /// Signals `value`: submissions that wait for `value` or less may proceed. They see what the host wrote before this
    /// call only after a barrier that covers host writes ([`crate::device::Encoder::barrier_full`]). A value that is
    /// already open changes nothing.
    pub fn open(&self, value: u64) -> Result<(), DeviceError> {
        // The number is set after the signal, so a panic leaves it valid.
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if *opened >= value {
            return Ok(());
        }
        let info = vk::SemaphoreSignalInfo::default().semaphore(self.raw).value(value);
        // SAFETY: the semaphore lives as long as `self`. The values grow, as just checked under the lock, and nothing else
        // signals the semaphore.
        self.logical.check("vkSignalSemaphore", unsafe { self.logical.raw.signal_semaphore(&info) })?;
        *opened = value;
        Ok(())
    }

    /// The largest value that has been opened.
    pub fn opened(&self) -> u64 {
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn raw(&self) -> vk::Semaphore {
        self.raw
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: every submission that waits for the gate holds it until the submission has finished (see `Queue`).
        unsafe { self.logical.raw.destroy_semaphore(self.raw, None) };
    }
}

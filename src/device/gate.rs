//! Gates: points that the host reaches, for work that is queued before what it reads has been written. Deliberately
//! absent: who opens one; whoever has submitted behind a gate owes its opening, or the queue stands still.

use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use ash::vk;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A timeline that only the host advances. Submissions that wait for it keep it alive.
pub struct Gate {
    raw: vk::Semaphore,
    logical: Arc<Logical>,
    opened: AtomicU64,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("opened", &self.opened()).finish()
    }
}

impl Gate {
    /// Open up to 0.
    pub fn new(device: &Device) -> Result<Gate, DeviceError> {
        let logical = device.logical();
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE).initial_value(0);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: timeline semaphores are part of the baseline and switched on.
        let raw = logical.check("vkCreateSemaphore", unsafe { logical.raw.create_semaphore(&info, None) })?;
        logical.name(raw, "gate");
        Ok(Gate { raw, logical: logical.clone(), opened: AtomicU64::new(0) })
    }

    /// Lets all go on that waits for `value` or less; what the host has written before is seen behind a barrier against
    /// host writes. From one thread. A value that was opened already changes nothing.
    pub fn open(&self, value: u64) -> Result<(), DeviceError> {
        if self.opened.fetch_max(value, Ordering::AcqRel) >= value {
            return Ok(());
        }
        let info = vk::SemaphoreSignalInfo::default().semaphore(self.raw).value(value);
        // SAFETY: the semaphore lives as long as self; values grow, as just checked, and nobody else signals it.
        self.logical.check("vkSignalSemaphore", unsafe { self.logical.raw.signal_semaphore(&info) })
    }

    /// The value up to which it is open.
    pub fn opened(&self) -> u64 {
        self.opened.load(Ordering::Acquire)
    }

    pub(super) fn raw(&self) -> vk::Semaphore {
        self.raw
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: whatever waits for it holds it until it has finished (`Queue`).
        unsafe { self.logical.raw.destroy_semaphore(self.raw, None) };
    }
}

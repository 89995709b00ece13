//! An opened device: its queues, its two timelines, waiting for them, and the raw buffers to which `memory` binds
//! memory. Not here: memory, and which work waits for what.

use crate::device::adapter::Adapter;
use crate::device::budget::MemoryBudget;
use crate::device::error::DeviceError;
use crate::device::families;
use crate::device::instance::Instance;
use crate::device::logical::Logical;
use crate::device::point::{Point, Role};
use crate::device::probe;
use crate::device::queue::{Hardware, Queue, Timelines};
use ash::vk;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The maximum length of one `vkWaitSemaphores` call. Longer waits are split into such slices, so that they notice a
/// device that was declared lost meanwhile: the value of a failed submission is never signalled.
const WAIT_SLICE: Duration = Duration::from_millis(250);

/// A reading of the device's clock and of the host's clock at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calibration {
    /// The device's timestamp in nanoseconds, on the same scale as [`crate::device::Queries`].
    pub device_ns: u64,
    /// The host's `CLOCK_MONOTONIC` in nanoseconds.
    pub host_ns: u64,
    /// The maximum distance in time between the two readings, in nanoseconds.
    pub deviation_ns: u64,
}

/// An opened device. Dropping it waits until the device is idle.
pub struct Device {
    queues: [Queue; 2],
    hardware: Vec<Arc<Hardware>>,
    timelines: Arc<Timelines>,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("adapter", &self.adapter().name).field("queues", &self.queues).finish()
    }
}

impl Device {
    /// Opens an adapter and enables every optional feature that the program knows and the adapter supports.
    pub fn open(instance: &Instance, adapter: &Adapter) -> Result<Arc<Device>, DeviceError> {
        Device::with(instance, adapter, false, true)
    }

    /// Like [`Device::open`], without programs in PTX.
    pub fn open_without_ptx(instance: &Instance, adapter: &Adapter) -> Result<Arc<Device>, DeviceError> {
        Device::with(instance, adapter, false, false)
    }

    /// Like [`Device::open`]; pipelines of this device report what the driver's compiler made of them, if the driver
    /// tells ([`crate::device::Pipeline::executables`]). Building them may take longer. It takes no programs in PTX.
    pub fn open_with_statistics(instance: &Instance, adapter: &Adapter) -> Result<Arc<Device>, DeviceError> {
        Device::with(instance, adapter, true, false)
    }

    fn with(instance: &Instance, adapter: &Adapter, statistics: bool, ptx: bool) -> Result<Arc<Device>, DeviceError> {
        let refused = |reason: &str| DeviceError::Refused { name: adapter.name.clone(), reason: reason.to_owned() };
        if let Some(reason) = &adapter.refused {
            return Err(refused(reason));
        }
        let choice = families::choose(&adapter.queue_families).ok_or_else(|| refused("it has no compute queue"))?;
        let logical = Arc::new(Logical::create(instance, adapter, choice, statistics, ptx)?);
        let compute = timeline(&logical, Role::Compute)?;
        let transfer = timeline(&logical, Role::Transfer).inspect_err(|_| {
            // SAFETY: the semaphore was created above and never used.
            unsafe { logical.raw.destroy_semaphore(compute, None) };
        })?;
        let timelines = Arc::new(Timelines::new([compute, transfer]));
        let hardware_of = |role: Role, served: &[Role]| {
            let slot = logical.slot(role);
            // SAFETY: `Logical::create` created the device with this queue.
            let raw = unsafe { logical.raw.get_device_queue(slot.family, slot.index) };
            Arc::new(Hardware::new(raw, served))
        };
        let hardware = if logical.aliased() {
            vec![hardware_of(Role::Compute, &Role::ALL)]
        } else {
            vec![hardware_of(Role::Compute, &[Role::Compute]), hardware_of(Role::Transfer, &[Role::Transfer])]
        };
        let queues = Role::ALL.map(|role| {
            let own = &hardware[role.index().min(hardware.len() - 1)];
            Queue::new(role, own.clone(), timelines.clone(), logical.clone())
        });
        Ok(Arc::new(Device { queues, hardware, timelines, logical }))
    }

    /// The adapter that was opened.
    pub fn adapter(&self) -> &Adapter {
        &self.logical.adapter
    }

    /// The device-level Vulkan functions, for allocators.
    pub fn raw(&self) -> &ash::Device {
        &self.logical.raw
    }

    /// The instance that the device was opened from.
    pub fn instance(&self) -> &Instance {
        &self.logical.instance
    }

    /// The physical device, for allocators.
    pub fn physical(&self) -> vk::PhysicalDevice {
        self.logical.adapter.physical
    }

    /// The queue of a role.
    pub fn queue(&self, role: Role) -> &Queue {
        &self.queues[role.index()]
    }

    /// Returns why the device takes no programs in PTX ([`crate::device::Program`]), or nothing if it takes them.
    pub fn takes_ptx(&self) -> Result<(), &'static str> {
        self.logical.binary_import.as_ref().map(|_| ()).map_err(|why| *why)
    }

    pub(super) fn logical(&self) -> &Arc<Logical> {
        &self.logical
    }

    /// Returns the timeline's current value: every point of the role up to it is reached. A value that was never
    /// submitted comes from a driver that signals all semaphores on a reset, and is reported as `DeviceLost`.
    pub fn progress(&self, role: Role) -> Result<u64, DeviceError> {
        self.logical.alive()?;
        let semaphore = self.timelines.semaphores[role.index()];
        // SAFETY: the semaphore lives as long as `self`.
        let value = unsafe { self.logical.raw.get_semaphore_counter_value(semaphore) };
        let value = self.logical.check("vkGetSemaphoreCounterValue", value)?;
        if value > self.timelines.reserved(role) {
            return Err(self.logical.lose("vkGetSemaphoreCounterValue (a value that was never submitted)"));
        }
        Ok(value)
    }

    /// Whether a point is reached. Does not wait.
    pub fn reached(&self, point: Point) -> Result<bool, DeviceError> {
        Ok(self.progress(point.role)? >= point.value)
    }

    /// Waits for a point; returns `false` after `timeout`. Callers that report the number of host waits count their own
    /// calls.
    pub fn wait(&self, point: Point, timeout: Duration) -> Result<bool, DeviceError> {
        self.wait_for(&[point], timeout, vk::SemaphoreWaitFlags::empty())
    }

    /// Waits for a point for as long as its timeline advances. Returns `false` once the timeline has not advanced for
    /// `patience`. On a CPU driver the wait is unlimited: its speed depends on the load of the machine, so slow cannot
    /// be distinguished from stuck.
    pub fn wait_while_moving(&self, point: Point, patience: Duration) -> Result<bool, DeviceError> {
        let mut seen = self.progress(point.role)?;
        while !self.wait(point, patience)? {
            let now = self.progress(point.role)?;
            if now == seen && !self.adapter().is_cpu() {
                return Ok(false);
            }
            seen = now;
        }
        Ok(true)
    }

    /// Waits until at least one of the points is reached; returns `false` after `timeout`.
    pub fn wait_any(&self, points: &[Point], timeout: Duration) -> Result<bool, DeviceError> {
        self.wait_for(points, timeout, vk::SemaphoreWaitFlags::ANY)
    }

    fn wait_for(
        &self,
        points: &[Point],
        timeout: Duration,
        flags: vk::SemaphoreWaitFlags,
    ) -> Result<bool, DeviceError> {
        assert!(!points.is_empty(), "a wait needs a point");
        let semaphores: Vec<_> = points.iter().map(|p| self.timelines.semaphores[p.role.index()]).collect();
        let values: Vec<_> = points.iter().map(|p| p.value).collect();
        let info = vk::SemaphoreWaitInfo::default().flags(flags).semaphores(&semaphores).values(&values);
        let start = Instant::now();
        loop {
            self.logical.alive()?;
            let left = timeout.saturating_sub(start.elapsed());
            let slice = left.min(WAIT_SLICE);
            // SAFETY: the semaphores live as long as `self`.
            let result = unsafe { self.logical.raw.wait_semaphores(&info, slice.as_nanos() as u64) };
            match result {
                Err(vk::Result::TIMEOUT) if slice == left => return Ok(false),
                Err(vk::Result::TIMEOUT) => {}
                result => {
                    self.logical.check("vkWaitSemaphores", result)?;
                    for point in points {
                        self.progress(point.role)?;
                    }
                    return Ok(true);
                }
            }
        }
    }

    /// Waits until the queues are idle. For teardown only. A queue with batches that are still held back on the host is
    /// not waited for.
    pub fn wait_idle(&self) -> Result<(), DeviceError> {
        self.logical.alive()?;
        // Waits for the timelines instead of calling vkDeviceWaitIdle, which requires the lock of every queue.
        for queue in &self.queues {
            let held = queue.deferred() > 0;
            while !held && !self.wait(queue.last(), Duration::from_secs(1))? {}
            queue.collect()?;
        }
        Ok(())
    }

    /// Whether the device is known to be lost.
    pub fn is_lost(&self) -> bool {
        self.logical.alive().is_err()
    }

    /// Treats the device as lost from now on, for a watchdog that detected a hang. Waits end and submissions are
    /// refused with `DeviceLost`, which contains `why`.
    pub fn declare_lost(&self, why: &str) {
        // Later calls return the error; nothing is reported here.
        let _ = self.logical.lose(why);
    }

    /// Waits until nothing runs on the device any more. To be called after a loss and before memory is freed, because a
    /// device that was only declared lost may still be running.
    pub fn wait_stopped(&self) {
        let _no_submissions: Vec<_> = self.hardware.iter().map(|h| h.lock()).collect();
        // SAFETY: the lock of every queue is held. An error means that the device is lost and has therefore stopped.
        let _ = unsafe { self.logical.raw.device_wait_idle() };
    }

    /// Returns the state of the largest device-local heap as the driver currently reports it.
    pub fn budget(&self) -> MemoryBudget {
        let adapter = self.adapter();
        let heap = probe::device_heap(&adapter.memory_heaps).unwrap_or(0);
        let heap_bytes = adapter.memory_heaps.get(heap).map_or(0, |h| h.bytes);
        if !adapter.capabilities.memory_budget {
            return MemoryBudget { heap_bytes, budget_bytes: heap_bytes, used_bytes: 0, reported: false };
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the adapter supports the extension of the chained structure.
        unsafe { self.instance().raw().get_physical_device_memory_properties2(self.physical(), &mut memory) };
        MemoryBudget {
            heap_bytes,
            budget_bytes: budget.heap_budget[heap],
            used_bytes: budget.heap_usage[heap],
            reported: true,
        }
    }

    /// The number of valid bits of a timestamp on a role's queue; 0 if the queue has no timestamps.
    pub fn timestamp_bits(&self, role: Role) -> u32 {
        self.logical.timestamp_bits(role)
    }

    /// Reads the device's clock together with the host's. Returns `Unsupported` if the device has no calibrated
    /// timestamps.
    pub fn calibrate(&self) -> Result<Calibration, DeviceError> {
        let unsupported =
            || DeviceError::Unsupported { device: self.adapter().name.clone(), what: "calibrated timestamps" };
        let read = self.logical.calibrated.ok_or_else(unsupported)?;
        let infos = [vk::TimeDomainKHR::DEVICE, vk::TimeDomainKHR::CLOCK_MONOTONIC]
            .map(|domain| vk::CalibratedTimestampInfoKHR::default().time_domain(domain));
        let (mut stamps, mut deviation_ns) = ([0u64; 2], 0u64);
        // SAFETY: the driver lists both time domains. The arrays have two elements each.
        let result =
            unsafe { read(self.raw().handle(), 2, infos.as_ptr(), stamps.as_mut_ptr(), &raw mut deviation_ns) };
        self.logical.check("vkGetCalibratedTimestamps", result.result())?;
        let capabilities = &self.adapter().capabilities;
        let device_ns = crate::device::queries::nanoseconds(
            stamps[0],
            capabilities.timestamp_bits,
            capabilities.timestamp_period_ns,
        );
        Ok(Calibration { device_ns, host_ns: stamps[1], deviation_ns })
    }

    /// Creates a buffer without memory, for access by device address, copies and indirect dispatches. Both roles may
    /// use it. `memory` binds memory to it and destroys it.
    pub fn create_buffer(&self, bytes: u64, name: &str) -> Result<vk::Buffer, DeviceError> {
        let limit = self.adapter().capabilities.max_buffer_bytes;
        if bytes > limit {
            return Err(DeviceError::Limit {
                what: format!("buffer \"{name}\""),
                wanted: bytes,
                unit: "bytes",
                device: self.adapter().name.clone(),
                limit,
            });
        }
        let families = [self.queues[0].family(), self.queues[1].family()];
        let info = vk::BufferCreateInfo::default().size(bytes).usage(
            vk::BufferUsageFlags::STORAGE_BUFFER
                | vk::BufferUsageFlags::TRANSFER_SRC
                | vk::BufferUsageFlags::TRANSFER_DST
                | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS
                | vk::BufferUsageFlags::INDIRECT_BUFFER,
        );
        let info = if families[0] == families[1] {
            info.sharing_mode(vk::SharingMode::EXCLUSIVE)
        } else {
            info.sharing_mode(vk::SharingMode::CONCURRENT).queue_family_indices(&families)
        };
        // SAFETY: the size is within the driver's limit, and the queue families are this device's.
        let result = unsafe { self.raw().create_buffer(&info, None) };
        let buffer = self.logical.check(&format!("vkCreateBuffer (\"{name}\", {bytes} bytes)"), result)?;
        self.logical.name(buffer, name);
        Ok(buffer)
    }

    /// Destroys a buffer that [`Device::create_buffer`] returned.
    ///
    /// # Safety
    /// The buffer belongs to this device, is destroyed only once, and every point that uses it is reached.
    pub unsafe fn destroy_buffer(&self, buffer: vk::Buffer) {
        // SAFETY: the caller upholds the rule above.
        unsafe { self.raw().destroy_buffer(buffer, None) };
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: `&mut self` shows that no other thread submits any more. A lost device returns an error and counts as
        // idle. Batches that are held back were never submitted.
        let _ = unsafe { self.logical.raw.device_wait_idle() };
        for hardware in &self.hardware {
            hardware.clear();
        }
        for semaphore in self.timelines.semaphores {
            // SAFETY: the device is idle, and nothing else owns the semaphores.
            unsafe { self.logical.raw.destroy_semaphore(semaphore, None) };
        }
    }
}

fn timeline(logical: &Logical, role: Role) -> Result<vk::Semaphore, DeviceError> {
    let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE).initial_value(0);
    let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
    // SAFETY: timeline semaphores are a required feature and enabled.
    let result = unsafe { logical.raw.create_semaphore(&info, None) };
    let semaphore = logical.check("vkCreateSemaphore", result)?;
    logical.name(semaphore, &format!("timeline.{role}"));
    Ok(semaphore)
}

//! An adapter (Vulkan physical device) as the driver describes it, and the reason for which it may be refused. Plain
//! data apart from the handle. Not here: the queries to the driver (`probe`).

use crate::config::Selector;
use crate::device::capabilities::Capabilities;
use ash::vk;
use std::fmt;

/// The kind of device that an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AdapterKind {
    /// A GPU with memory of its own.
    Discrete,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A GPU behind a hypervisor.
    Virtual,
    /// A driver that runs on the CPU.
    Cpu,
    /// Something else.
    Other,
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdapterKind::Discrete => "discrete",
            AdapterKind::Integrated => "integrated",
            AdapterKind::Virtual => "virtual",
            AdapterKind::Cpu => "cpu",
            AdapterKind::Other => "other",
        })
    }
}

/// A queue family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFamilyInfo {
    /// The family's index in the driver's list.
    pub index: u32,
    /// The number of queues in the family.
    pub count: u32,
    /// The operations that the family's queues support.
    pub flags: vk::QueueFlags,
    /// The number of valid bits of a timestamp; 0 if the family has no timestamps.
    pub timestamp_bits: u32,
}

impl QueueFamilyInfo {
    /// Whether the family's queues support compute dispatches.
    pub fn compute(&self) -> bool {
        self.flags.contains(vk::QueueFlags::COMPUTE)
    }

    /// Whether the family's queues support graphics.
    pub fn graphics(&self) -> bool {
        self.flags.contains(vk::QueueFlags::GRAPHICS)
    }

    /// Whether the family's queues support copies. Vulkan lets compute and graphics families omit the `TRANSFER` flag.
    pub fn transfer(&self) -> bool {
        self.flags.intersects(vk::QueueFlags::TRANSFER | vk::QueueFlags::COMPUTE | vk::QueueFlags::GRAPHICS)
    }
}

/// A memory heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapInfo {
    /// The size in bytes.
    pub bytes: u64,
    /// Whether the heap is device-local.
    pub device_local: bool,
    /// Whether the host can map at least one memory type of the heap.
    pub host_visible: bool,
}

/// A Vulkan physical device, usable or refused.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The index in the driver's list; stable only as long as no driver or device is added or removed.
    pub index: usize,
    /// The name, for example `NVIDIA GeForce RTX 4090`.
    pub name: String,
    /// The device UUID in lower case with dashes; a GPU has the same UUID in every process.
    pub uuid: String,
    /// The PCI address `domain:bus:device.function`, for example `0000:65:00.0`; `None` if the driver does not report
    /// it.
    pub pci: Option<String>,
    /// The kind of device.
    pub kind: AdapterKind,
    /// The driver's name and version as the driver writes them.
    pub driver: String,
    /// The Vulkan version that the driver supports: major, minor, patch.
    pub api: (u32, u32, u32),
    /// The queue families.
    pub queue_families: Vec<QueueFamilyInfo>,
    /// The memory heaps.
    pub memory_heaps: Vec<HeapInfo>,
    /// The device's limits and features.
    pub capabilities: Capabilities,
    /// Every required feature that the adapter lacks, as one text; `None` if the adapter is usable.
    pub refused: Option<String>,
    /// The vendor, device and driver version numbers, which are part of a pipeline cache's key.
    pub(super) ids: (u32, u32, u32),
    /// The driver's `pipelineCacheUUID`.
    pub(super) cache_uuid: [u8; 16],
    /// The Vulkan handle; valid as long as the instance lives.
    pub(super) physical: vk::PhysicalDevice,
}

impl Adapter {
    /// Returns the selector of this adapter alone.
    pub fn selector(&self) -> Selector {
        Selector::Uuid(self.uuid.replace('-', "").to_lowercase())
    }

    /// Whether the PCI vendor number is NVIDIA's.
    pub fn is_nvidia(&self) -> bool {
        self.ids.0 == 0x10de
    }

    /// Whether the adapter is a driver that runs on the CPU.
    pub fn is_cpu(&self) -> bool {
        self.kind == AdapterKind::Cpu
    }

    /// Returns the prefix of the names of files about this adapter: vendor and device number, independent of the
    /// driver.
    pub fn file_stem(&self) -> String {
        format!("{:04x}-{:04x}", self.ids.0, self.ids.1)
    }

    /// Whether limits and features are known: a driver older than Vulkan 1.3 is not asked for them.
    pub fn described(&self) -> bool {
        (self.api.0, self.api.1) >= (1, 3)
    }

    /// Whether the adapter can be opened.
    pub fn usable(&self) -> bool {
        self.refused.is_none()
    }

    /// Returns an adapter without a driver, for tests of code that depends only on an adapter's description.
    #[cfg(test)]
    pub(crate) fn made_up(index: usize, name: &str, kind: AdapterKind) -> Adapter {
        Adapter {
            index,
            name: name.to_owned(),
            uuid: format!("0000000{index}-aaaa-bbbb-cccc-0123456789ab"),
            pci: None,
            kind,
            driver: "test 1.0".to_owned(),
            api: (1, 3, 0),
            queue_families: Vec::new(),
            memory_heaps: Vec::new(),
            capabilities: Capabilities::default(),
            refused: None,
            ids: (0, 0, 0),
            cache_uuid: [0; 16],
            physical: vk::PhysicalDevice::null(),
        }
    }
}

impl fmt::Display for Adapter {
    /// Writes one line: index, name, kind, UUID, PCI address, driver, and the reason for a refusal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}), uuid {}", self.index, self.name, self.kind, self.uuid)?;
        if let Some(pci) = &self.pci {
            write!(f, ", pci {pci}")?;
        }
        write!(f, ", {}", self.driver)?;
        if let Some(reason) = &self.refused {
            write!(f, ", refused: {reason}")?;
        }
        Ok(())
    }
}

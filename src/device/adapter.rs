//! One adapter as the driver describes it, and why it may be refused. Plain data apart from
//! the handle; the questions to the driver are in `probe`.

use crate::device::capabilities::Capabilities;
use ash::vk;
use std::fmt;

/// What kind of device an adapter is.
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

/// One queue family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFamilyInfo {
    /// Its index in the driver's list.
    pub index: u32,
    /// How many queues it has.
    pub count: u32,
    /// What its queues can do.
    pub flags: vk::QueueFlags,
    /// Valid bits of a timestamp; 0 where it has none.
    pub timestamp_bits: u32,
}

impl QueueFamilyInfo {
    /// Whether its queues run dispatches.
    pub fn compute(&self) -> bool {
        self.flags.contains(vk::QueueFlags::COMPUTE)
    }

    /// Whether its queues draw.
    pub fn graphics(&self) -> bool {
        self.flags.contains(vk::QueueFlags::GRAPHICS)
    }

    /// Whether its queues copy. Those that compute or draw do so without saying it.
    pub fn transfer(&self) -> bool {
        self.flags.intersects(vk::QueueFlags::TRANSFER | vk::QueueFlags::COMPUTE | vk::QueueFlags::GRAPHICS)
    }
}

/// One memory heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapInfo {
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it is the device's own memory.
    pub device_local: bool,
    /// Whether the host can map some of it.
    pub host_visible: bool,
}

/// A Vulkan physical device, usable or not.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Place in the driver's list; stable only as long as no driver or device comes or goes.
    pub index: usize,
    /// For example `NVIDIA GeForce RTX 4090`.
    pub name: String,
    /// The device UUID in lower case with dashes; the same for a GPU in every process.
    pub uuid: String,
    /// `domain:bus:device.function`, for example `0000:65:00.0`, where the driver tells.
    pub pci: Option<String>,
    /// What it is.
    pub kind: AdapterKind,
    /// The driver's name and version as the driver writes them.
    pub driver: String,
    /// The Vulkan version: major, minor, patch.
    pub api: (u32, u32, u32),
    /// Its queue families.
    pub queue_families: Vec<QueueFamilyInfo>,
    /// Its memory heaps.
    pub memory_heaps: Vec<HeapInfo>,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Everything that it lacks; `None` where it is usable.
    pub refused: Option<String>,
    /// Vendor, device and driver version numbers: the keys of a pipeline cache.
    pub(super) ids: (u32, u32, u32),
    /// The driver's own key of a pipeline cache.
    pub(super) cache_uuid: [u8; 16],
    /// The handle; lives as long as the instance.
    pub(super) physical: vk::PhysicalDevice,
}

impl Adapter {
    /// Whether NVIDIA made it, by the PCI vendor number.
    pub fn is_nvidia(&self) -> bool {
        self.ids.0 == 0x10de
    }

    /// Whether a driver on the CPU stands behind it.
    pub fn is_cpu(&self) -> bool {
        self.kind == AdapterKind::Cpu
    }

    /// What the names of files about it begin with: vendor and device number, whatever the driver.
    pub fn file_stem(&self) -> String {
        format!("{:04x}-{:04x}", self.ids.0, self.ids.1)
    }

    /// Whether it can be opened.
    pub fn usable(&self) -> bool {
        self.refused.is_none()
    }

    /// An adapter that no driver has, for tests of what is decided by its description.
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
    /// One line: index, name, kind, UUID, PCI address, driver, and why it is refused.
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

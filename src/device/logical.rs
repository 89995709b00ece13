//! Owns the VkDevice. Every object created from the device holds a reference to this, so the device is destroyed last.
//! Translates result codes into errors and remembers the loss of the device. Not here: queues (`handle`, `queue`).

use crate::device::adapter::Adapter;
use crate::device::error::DeviceError;
use crate::device::families::{Choice, QueueSlot};
use crate::device::features::{BINARY_IMPORT, FeatureSet};
use crate::device::instance::Instance;
use crate::device::point::Role;
use crate::device::probe;
use ash::prelude::VkResult;
use ash::{ext, khr, nvx, vk};
use std::ffi::{CStr, CString, c_char};
use std::sync::OnceLock;

/// The logical device with the functions of its extensions.
pub(super) struct Logical {
    pub(super) raw: ash::Device,
    pub(super) adapter: Adapter,
    pub(super) choice: Choice,
    /// `vkGetCalibratedTimestamps`, from the KHR or the EXT extension.
    pub(super) calibrated: Option<vk::PFN_vkGetCalibratedTimestampsKHR>,
    /// The functions that report what the compiler made of a pipeline, if this was asked for.
    pub(super) executables: Option<khr::pipeline_executable_properties::Device>,
    /// The functions for programs in PTX, or why there are none.
    pub(super) binary_import: Result<nvx::binary_import::Device, &'static str>,
    names: Option<ext::debug_utils::Device>,
    /// The call that reported the loss of the device; set once.
    lost: OnceLock<String>,
    /// Keeps the instance alive until the device is destroyed.
    pub(super) instance: Instance,
}

impl Logical {
    /// Creates the device; with `statistics`, pipelines report what the driver's compiler made of them; with `ptx`, it
    /// takes programs in PTX if the adapter does.
    pub(super) fn create(
        instance: &Instance,
        adapter: &Adapter,
        choice: Choice,
        statistics: bool,
        ptx: bool,
    ) -> Result<Logical, DeviceError> {
        let there = probe::features(instance.raw(), adapter.physical);
        let mut on = there.enabled();
        if statistics {
            on.enable_pipeline_statistics(&there);
        }
        // The length of the priorities is the number of queues: 2 if the transfer queue is the second queue of the
        // compute family.
        let priorities = [1.0f32, 1.0];
        let of_family = |slot: QueueSlot, count: usize| {
            vk::DeviceQueueCreateInfo::default().queue_family_index(slot.family).queue_priorities(&priorities[..count])
        };
        let queues = if choice.compute.family == choice.transfer.family {
            vec![of_family(choice.compute, 1 + choice.transfer.index as usize)]
        } else {
            vec![of_family(choice.compute, 1), of_family(choice.transfer, 1)]
        };
        let create = |on: &mut FeatureSet| {
            let extensions: Vec<CString> = on.extensions.iter().cloned().collect();
            let names: Vec<*const c_char> = extensions.iter().map(|e| e.as_ptr()).collect();
            on.chained(|features| {
                let mut info =
                    vk::DeviceCreateInfo::default().queue_create_infos(&queues).enabled_extension_names(&names);
                info.p_next = std::ptr::from_mut(features).cast();
                // SAFETY: `features` is the head of a chain of structures that live until `chained` returns. Only
                // features and extensions that the driver reported are enabled.
                unsafe { instance.raw().create_device(adapter.physical, &info, None) }
            })
        };
        let mut no_ptx = match (ptx, adapter.capabilities.ptx) {
            (false, _) => Some("it is switched off"),
            (true, false) => {
                Some("the driver does not offer VK_NVX_binary_import on a compute family without graphics")
            }
            (true, true) => None,
        };
        if no_ptx.is_none() {
            on.extensions.insert(BINARY_IMPORT.to_owned());
        }
        let mut raw = create(&mut on);
        // Without CUDA's library or its device file the driver lists the extension and refuses a device with it.
        if no_ptx.is_none() && matches!(raw, Err(vk::Result::ERROR_INITIALIZATION_FAILED)) {
            no_ptx = Some("the driver cannot load CUDA's library (libcuda, /dev/nvidia-uvm; containers: compute)");
            on.extensions.remove(BINARY_IMPORT);
            raw = create(&mut on);
        }
        let raw = raw.map_err(|source| match source {
            vk::Result::ERROR_DEVICE_LOST => {
                DeviceError::DeviceLost { device: adapter.name.clone(), call: "vkCreateDevice".to_owned() }
            }
            source => DeviceError::Vulkan { call: "vkCreateDevice".to_owned(), device: adapter.name.clone(), source },
        })?;
        let calibrated = match on.calibrated_timestamps() {
            Some(name) if adapter.capabilities.calibrated_timestamps => calibrated(instance, &raw, name),
            _ => None,
        };
        let names = instance.validates().then(|| ext::debug_utils::Device::new(instance.raw(), &raw));
        let executables =
            on.pipeline_statistics().then(|| khr::pipeline_executable_properties::Device::new(instance.raw(), &raw));
        let binary_import = match no_ptx {
            None => Ok(nvx::binary_import::Device::new(instance.raw(), &raw)),
            Some(why) => Err(why),
        };
        Ok(Logical {
            raw,
            adapter: adapter.clone(),
            choice,
            calibrated,
            executables,
            binary_import,
            names,
            lost: OnceLock::new(),
            instance: instance.clone(),
        })
    }

    /// The hardware queue that serves a role.
    pub(super) fn slot(&self, role: Role) -> QueueSlot {
        match role {
            Role::Compute => self.choice.compute,
            Role::Transfer => self.choice.transfer,
        }
    }

    /// Whether both roles share one hardware queue.
    pub(super) fn aliased(&self) -> bool {
        self.choice.compute == self.choice.transfer
    }

    /// The number of valid timestamp bits on a role's queue.
    pub(super) fn timestamp_bits(&self, role: Role) -> u32 {
        let family = self.slot(role).family;
        self.adapter.queue_families.iter().find(|f| f.index == family).map_or(0, |f| f.timestamp_bits)
    }

    /// Converts a result code into an error that names `call`. A lost device is remembered.
    pub(super) fn check<T>(&self, call: &str, result: VkResult<T>) -> Result<T, DeviceError> {
        result.map_err(|source| match source {
            vk::Result::ERROR_DEVICE_LOST => self.lose(call),
            source => DeviceError::Vulkan { call: call.to_owned(), device: self.adapter.name.clone(), source },
        })
    }

    /// Marks the device as lost, so that no submission is expected to complete, and returns the error. The error names
    /// the first call that reported the loss.
    pub(super) fn lose(&self, call: &str) -> DeviceError {
        let first = self.lost.get_or_init(|| call.to_owned());
        DeviceError::DeviceLost { device: self.adapter.name.clone(), call: first.clone() }
    }

    /// Returns an error if the device is known to be lost.
    pub(super) fn alive(&self) -> Result<(), DeviceError> {
        match self.lost.get() {
            None => Ok(()),
            Some(call) => Err(DeviceError::DeviceLost { device: self.adapter.name.clone(), call: call.clone() }),
        }
    }

    /// Sets the name that the validation layer and debuggers show for an object. Does nothing without validation.
    pub(super) fn name(&self, object: impl vk::Handle, name: &str) {
        let Some(names) = &self.names else { return };
        let text = CString::new(name.replace('\0', " ")).unwrap_or_default();
        let info = vk::DebugUtilsObjectNameInfoEXT::default().object_handle(object).object_name(&text);
        // SAFETY: the debug-utils extension is enabled whenever `names` is set, and the caller has just created the
        // object from this device. A failure to set a name is ignored.
        let _ = unsafe { names.set_debug_utils_object_name(&info) };
    }
}

impl Drop for Logical {
    fn drop(&mut self) {
        // SAFETY: every object created from the device held an `Arc` of this and is gone, and the owner of the queues
        // waited until the device was idle.
        unsafe { self.raw.destroy_device(None) };
    }
}

fn calibrated(instance: &Instance, raw: &ash::Device, name: &CStr) -> Option<vk::PFN_vkGetCalibratedTimestampsKHR> {
    Some(if name == khr::calibrated_timestamps::NAME {
        khr::calibrated_timestamps::Device::new(instance.raw(), raw).fp().get_calibrated_timestamps_khr
    } else {
        ext::calibrated_timestamps::Device::new(instance.raw(), raw).fp().get_calibrated_timestamps_ext
    })
}

//! Errors of the layers below `memory`, with one variant per case that a caller may handle differently. An error's
//! cause is its `source()` and is not repeated in its text.

use crate::device::diagnose::NoGpuDiagnosis;
use crate::device::point::{Point, Role};
use ash::vk;
use std::path::PathBuf;

/// Says how many GPUs can be chosen.
fn usable_gpus(count: usize) -> String {
    match count {
        0 => "there is no usable GPU".to_owned(),
        count => format!("a device must be chosen: there are {count} usable GPUs"),
    }
}

/// An error of the device layer.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The Vulkan loader library is not installed.
    #[error("cannot load the Vulkan loader (libvulkan.so.1): install it, for example the package libvulkan1")]
    Loader(#[source] ash::LoadingError),
    /// The loader is older than Vulkan 1.3.
    #[error("Vulkan 1.3 is needed, the loader has {major}.{minor}")]
    OldLoader {
        /// The loader's major version.
        major: u32,
        /// The loader's minor version.
        minor: u32,
    },
    /// No Vulkan driver is installed.
    #[error("no Vulkan driver is installed: install the GPU's, or mesa-vulkan-drivers for a driver on the CPU")]
    NoDriver(#[source] NoGpuDiagnosis),
    /// Validation was requested, but the layer is not installed.
    #[error("validation was asked for, but the layer {layer} is not installed")]
    NoValidation {
        /// The layer's name.
        layer: &'static str,
    },
    /// No adapter matches the selector.
    #[error("no device matches {selector}; {hint}the adapters are:{adapters}")]
    NoMatch {
        /// The selector as the user would write it.
        selector: String,
        /// Empty, or a clause that ends in "; ".
        hint: String,
        /// All adapters; each starts with a line feed.
        adapters: String,
        /// Why no GPU is among the adapters; `None` if there is one, or if this was not diagnosed.
        #[source]
        no_gpu: Option<Box<NoGpuDiagnosis>>,
    },
    /// Several adapters match the selector.
    #[error("{count} devices match {selector}; choose one by its UUID{}:{adapters}",
        if *.cpu { " or its whole name" } else { ", PCI address or index" })]
    Ambiguous {
        /// The selector as the user would write it.
        selector: String,
        /// The number of adapters that match.
        count: usize,
        /// Whether all of them are CPU drivers.
        cpu: bool,
        /// The adapters that match; each starts with a line feed.
        adapters: String,
    },
    /// No selector was given and the number of usable GPUs is not one.
    #[error("{}{hint}; the adapters are:{adapters}", usable_gpus(*.count))]
    MustChoose {
        /// The number of usable adapters that are not CPU drivers.
        count: usize,
        /// Empty, or a clause that begins with a comma and says what to type.
        hint: String,
        /// All adapters; each starts with a line feed.
        adapters: String,
        /// Why no GPU is among the adapters; `None` if there is one, or if this was not diagnosed.
        #[source]
        no_gpu: Option<Box<NoGpuDiagnosis>>,
    },
    /// An index selects a CPU driver, which must be selected by `cpu`, UUID or name: an index means another adapter
    /// once a GPU's driver is installed or fails.
    #[error(
        "device {index} is a CPU driver, \"{name}\", which no index selects: select it by cpu, its UUID {uuid} \
        or its whole name"
    )]
    CpuByIndex {
        /// The index.
        index: usize,
        /// The adapter's name.
        name: String,
        /// The adapter's UUID.
        uuid: String,
    },
    /// The selected adapter cannot be used.
    #[error("device \"{name}\" cannot be used: {reason}")]
    Refused {
        /// The adapter's name.
        name: String,
        /// Every required feature that the adapter lacks.
        reason: String,
    },
    /// The device is lost: no submission to it will complete. The caller must open the device again.
    #[error("device \"{device}\" is lost, noticed in {call}")]
    DeviceLost {
        /// The adapter's name.
        device: String,
        /// The Vulkan call that first reported the loss, or the reason given to
        /// [`crate::device::Device::declare_lost`].
        call: String,
    },
    /// A batch waits for a point that can never be reached: the batch's own point or a later one of its role, or a
    /// point that itself waits for the batch.
    #[error("a {role} batch that waits for {wait} can never run: {reason}")]
    NeverRuns {
        /// The batch's role.
        role: Role,
        /// The wait that cannot be satisfied.
        wait: Point,
        /// The reason.
        reason: &'static str,
    },
    /// Something needs more than the device's limit.
    #[error("{what} needs {wanted} {unit}, device \"{device}\" has {limit}")]
    Limit {
        /// The thing that needs more.
        what: String,
        /// The amount that is needed.
        wanted: u64,
        /// The unit of `wanted` and `limit`.
        unit: &'static str,
        /// The adapter's name.
        device: String,
        /// The device's limit.
        limit: u64,
    },
    /// A kernel uses what the device does not offer.
    #[error("kernel \"{kernel}\" needs {needs}, which device \"{device}\" does not offer")]
    Kernel {
        /// The kernel's name.
        kernel: String,
        /// The SPIR-V capabilities that the device lacks.
        needs: String,
        /// The adapter's name.
        device: String,
    },
    /// The driver does not compile or load a program in PTX.
    #[error("device \"{device}\" does not take the program of kernel \"{kernel}\"")]
    Program {
        /// The kernel's name.
        kernel: String,
        /// The adapter's name.
        device: String,
        /// The result code.
        source: vk::Result,
    },
    /// The device does not support the operation.
    #[error("device \"{device}\" has no {what}")]
    Unsupported {
        /// The adapter's name.
        device: String,
        /// The missing operation.
        what: &'static str,
    },
    /// The pipeline cache cannot be written.
    #[error("cannot write the pipeline cache {}", path.display())]
    CacheWrite {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A Vulkan call failed.
    #[error("{call} failed on \"{device}\"")]
    Vulkan {
        /// The Vulkan function and its purpose.
        call: String,
        /// The adapter's name, or "the instance".
        device: String,
        /// The result code.
        source: vk::Result,
    },
}

impl DeviceError {
    /// Whether the user can resolve the error by changing arguments or by installing something (exit status 2), as
    /// opposed to a fault at run time.
    pub fn is_users(&self) -> bool {
        matches!(
            self,
            DeviceError::Loader(_)
                | DeviceError::OldLoader { .. }
                | DeviceError::NoDriver(_)
                | DeviceError::NoValidation { .. }
                | DeviceError::NoMatch { .. }
                | DeviceError::Ambiguous { .. }
                | DeviceError::MustChoose { .. }
                | DeviceError::CpuByIndex { .. }
                | DeviceError::Refused { .. }
                | DeviceError::Kernel { .. }
        )
    }

    /// Whether the device is lost and must be opened again.
    pub fn is_lost(&self) -> bool {
        matches!(self, DeviceError::DeviceLost { .. })
    }
}

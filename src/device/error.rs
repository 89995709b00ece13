//! What can go wrong below `memory`, one variant for each thing that a caller may treat
//! differently. The cause is `source()`, not part of the text.

use crate::device::point::{Point, Role};
use crate::device::visible::Unseen;
use ash::vk;
use std::path::PathBuf;

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
    NoDriver(#[source] Unseen),
    /// Validation was asked for and is not installed.
    #[error("validation was asked for, but the layer {layer} is not installed")]
    NoValidation {
        /// The layer's name.
        layer: &'static str,
    },
    /// The text is not a selector.
    #[error("\"{text}\" does not select a device: {reason}")]
    BadSelector {
        /// What the user wrote.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No adapter matches the selector.
    #[error("no device matches {selector}; {hint}the adapters are:{adapters}")]
    NoMatch {
        /// The selector as the user would write it.
        selector: String,
        /// Empty, or a clause that ends in "; ".
        hint: String,
        /// The adapters, each on a line of its own that begins with a line feed.
        adapters: String,
        /// Why no GPU is among them, if none is and that was looked into.
        #[source]
        unseen: Option<Box<Unseen>>,
    },
    /// Several adapters match the selector.
    #[error("{count} devices match {selector}; choose one by its UUID, PCI address or index:{adapters}")]
    Ambiguous {
        /// The selector as the user would write it.
        selector: String,
        /// How many match.
        count: usize,
        /// Those that match, each on a line of its own that begins with a line feed.
        adapters: String,
    },
    /// Nothing was selected and there is not exactly one usable GPU.
    #[error(
        "a device must be chosen: there are {count} usable GPUs (CPU drivers are used only when selected); the adapters are:{adapters}"
    )]
    MustChoose {
        /// How many usable adapters are not CPU drivers.
        count: usize,
        /// All adapters, each on a line of its own that begins with a line feed.
        adapters: String,
        /// Why no GPU is among them, if none is and that was looked into.
        #[source]
        unseen: Option<Box<Unseen>>,
    },
    /// The adapter that was selected cannot be used.
    #[error("device \"{name}\" cannot be used: {reason}")]
    Refused {
        /// The adapter's name.
        name: String,
        /// Everything that it lacks.
        reason: String,
    },
    /// The device is lost: nothing submitted to it will be completed. Open it again.
    #[error("device \"{device}\" is lost, noticed in {call}")]
    DeviceLost {
        /// The adapter's name.
        device: String,
        /// The call that said so first.
        call: String,
    },
    /// Two queues wait for each other.
    #[error("a {role} batch that waits for {wait} can never run: {reason}")]
    NeverRuns {
        /// The batch's role.
        role: Role,
        /// The wait that cannot be satisfied.
        wait: Point,
        /// Why.
        reason: &'static str,
    },
    /// More was asked for than the device has.
    #[error("{what} needs {wanted} {unit}, device \"{device}\" has {limit}")]
    Limit {
        /// The thing by name.
        what: String,
        /// What it needs.
        wanted: u64,
        /// The unit of both numbers.
        unit: &'static str,
        /// The adapter's name.
        device: String,
        /// What the device has.
        limit: u64,
    },
    /// The device cannot do this at all.
    #[error("device \"{device}\" has no {what}")]
    Unsupported {
        /// The adapter's name.
        device: String,
        /// What is missing.
        what: &'static str,
    },
    /// The pipeline cache cannot be written.
    #[error("cannot write the pipeline cache {}", path.display())]
    CacheWrite {
        /// The file or its folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A Vulkan call failed.
    #[error("{call} failed on \"{device}\"")]
    Vulkan {
        /// The function, and what it was for.
        call: String,
        /// The adapter's name, or "the instance".
        device: String,
        /// The result code.
        source: vk::Result,
    },
}

impl DeviceError {
    /// Whether the user can mend it by other arguments or by installing something
    /// (exit status 2), as opposed to a fault while running.
    pub fn is_users(&self) -> bool {
        matches!(
            self,
            DeviceError::Loader(_)
                | DeviceError::OldLoader { .. }
                | DeviceError::NoDriver(_)
                | DeviceError::NoValidation { .. }
                | DeviceError::BadSelector { .. }
                | DeviceError::NoMatch { .. }
                | DeviceError::Ambiguous { .. }
                | DeviceError::MustChoose { .. }
                | DeviceError::Refused { .. }
        )
    }

    /// Whether the device is gone and must be opened again.
    pub fn is_lost(&self) -> bool {
        matches!(self, DeviceError::DeviceLost { .. })
    }
}

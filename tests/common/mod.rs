//! What tests on real drivers share: the drivers, the newest validation layer there is, and
//! the promise that it had nothing to say. Deliberately absent: what is tested.
//!
//! The drivers are the two on the CPU, lavapipe and SwiftShader. With `OSTINATO_TEST_GPU` set
//! to a device selector the same tests run on that GPU instead; what they say only of the two
//! drivers is then left out.
//!
//! The drivers and the layer are chosen through the environment, which the Vulkan loader reads
//! when an instance is made. It is set once in a process, before the first instance, and every
//! instance of a test is made by [`Vulkan::new`]; so tests may run on several threads.
#![allow(dead_code)]

use ostinato::device::{Adapter, Device, Instance, InstanceOptions, Selector, select};
use ostinato::telemetry::with_causes;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A test program that has not ended by then waits for what will not come: the longest takes three minutes on two cores.
const LONGEST: Duration = Duration::from_secs(20 * 60);

/// What a test runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Mesa's on the CPU: subgroups of 8, every optional integer and float type.
    Lavapipe,
    /// Chromium's on the CPU: subgroups of 4, the bare baseline.
    SwiftShader,
    /// The one that `OSTINATO_TEST_GPU` selects.
    Gpu,
}

impl Driver {
    /// The two on the CPU, for what is tested only there.
    pub const BOTH: [Driver; 2] = [Driver::Lavapipe, Driver::SwiftShader];

    /// The two on the CPU, or the selected GPU.
    pub fn all() -> &'static [Driver] {
        if gpu().is_some() { &[Driver::Gpu] } else { &Driver::BOTH }
    }

    /// The first of them, for what one driver is enough for.
    pub fn first() -> Driver {
        Driver::all()[0]
    }
}

/// The GPU to test on instead of the CPU drivers.
fn gpu() -> Option<String> {
    std::env::var("OSTINATO_TEST_GPU").ok().filter(|text| !text.is_empty())
}

/// The validation layer in use.
#[derive(Debug)]
pub struct Layer {
    /// Its library, or the system's manifest.
    pub path: PathBuf,
    /// Whether it follows hazards across submissions and timeline semaphores.
    pub submit_time: bool,
}

/// An instance over the drivers with validation on. When it is dropped, the test fails if
/// the layer had anything to say.
pub struct Vulkan {
    pub instance: Instance,
    clean: bool,
}

impl Vulkan {
    pub fn new() -> Vulkan {
        let layer = layer();
        let instance = Instance::new(&InstanceOptions { validation: true })
            .unwrap_or_else(|e| panic!("no instance with {}: {}", layer.path.display(), with_causes(&e)));
        Vulkan { instance, clean: true }
    }

    /// The same drivers without the layer, for tests of whole models that are slow under it.
    pub fn without_validation() -> Vulkan {
        layer();
        let instance = Instance::new(&InstanceOptions { validation: false })
            .unwrap_or_else(|e| panic!("no instance: {}", with_causes(&e)));
        Vulkan { instance, clean: true }
    }

    pub fn adapter(&self, driver: Driver) -> Adapter {
        let adapters = self.instance.adapters();
        let named = |part: &str| adapters.iter().find(|a| a.name.contains(part)).cloned();
        let found = match driver {
            Driver::Lavapipe => named("llvmpipe"),
            Driver::SwiftShader => named("SwiftShader"),
            Driver::Gpu => {
                let selector: Selector = gpu().unwrap_or_default().parse().expect("OSTINATO_TEST_GPU");
                Some(select(&adapters, Some(&selector)).unwrap_or_else(|e| panic!("{e}")).clone())
            }
        };
        found.unwrap_or_else(|| panic!("{driver:?} is not among {adapters:?}"))
    }

    pub fn device(&self, driver: Driver) -> Arc<Device> {
        let adapter = self.adapter(driver);
        Device::open(&self.instance, &adapter).unwrap_or_else(|e| panic!("{driver:?}: {e}"))
    }

    /// What the layer has said, for a test that provokes it; the test then isn't failed for it.
    pub fn provoked(mut self) -> Vec<String> {
        self.clean = false;
        self.instance.validation_messages()
    }

    /// Fails the test if the layer has said anything.
    pub fn assert_clean(&self) {
        let messages = self.instance.validation_messages();
        assert!(messages.is_empty(), "{} validation messages:\n{}", messages.len(), messages.join("\n"));
    }
}

impl Drop for Vulkan {
    fn drop(&mut self) {
        // A test that fails already says why by itself.
        if self.clean && !std::thread::panicking() {
            self.assert_clean();
        }
    }
}

/// Prepares the environment once and says which layer was found.
pub fn layer() -> &'static Layer {
    static LAYER: OnceLock<Layer> = OnceLock::new();
    LAYER.get_or_init(|| {
        end_in_time();
        let drivers = match gpu() {
            Some(_) => None,
            None => Some(std::env::join_paths([lavapipe(), swiftshader()]).expect("driver paths have no colon")),
        };
        let (layer, manifests) = find_layer();
        // SAFETY: Rust's own readers of the environment take its lock, and the one C library
        // here that reads it is the Vulkan loader, called only after this by `Vulkan::new`.
        unsafe {
            if let Some(drivers) = &drivers {
                std::env::set_var("VK_ICD_FILENAMES", drivers);
                std::env::set_var("VK_DRIVER_FILES", drivers);
            }
            match manifests {
                Some(folder) => std::env::set_var("VK_LAYER_PATH", folder),
                None => std::env::remove_var("VK_LAYER_PATH"),
            }
            // Settings from a developer's shell or folder must not soften the checks.
            for name in ["VK_INSTANCE_LAYERS", "VK_LAYER_ENABLES", "VK_LAYER_DISABLES", "VK_LAYER_SETTINGS_PATH"] {
                std::env::remove_var(name);
            }
        }
        eprintln!(
            "validation layer: {}, synchronisation validation {}",
            layer.path.display(),
            if layer.submit_time { "of recordings and submissions" } else { "of recordings only" }
        );
        layer
    })
}

/// Ends a program that hangs, and says in what: who runs the tests should not have to find out.
fn end_in_time() {
    std::thread::spawn(|| {
        std::thread::sleep(LONGEST);
        eprintln!(
            "after {} minutes it still runs; its threads, and what they wait for in the system:",
            LONGEST.as_secs() / 60
        );
        for thread in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            let read = |name: &str| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            eprintln!("  {:<16} {}", read("comm").trim_end(), read("wchan").trim_end());
        }
        std::process::abort();
    });
}

/// Chromium's layer is current; the distribution's own is the second choice.
fn find_layer() -> (Layer, Option<PathBuf>) {
    let library = chromium().into_iter().map(|d| d.join("libVkLayer_khronos_validation.so")).find(|p| p.exists());
    if let Some(library) = library {
        let folder = write_manifest(&library);
        return (Layer { path: library, submit_time: true }, Some(folder));
    }
    let folders = ["/usr/share/vulkan/explicit_layer.d", "/usr/local/share/vulkan/explicit_layer.d"];
    let manifest = folders.iter().map(|f| Path::new(f).join("VkLayer_khronos_validation.json")).find(|p| p.exists());
    let path = manifest.expect("a Khronos validation layer: install vulkan-validationlayers");
    (Layer { path, submit_time: false }, None)
}

/// A manifest for a library that has none, in a folder of its own. Written under another name
/// and renamed: test programs run at the same time.
fn write_manifest(library: &Path) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("validation-layer");
    std::fs::create_dir_all(&folder).expect("a folder for the layer's manifest");
    let extensions =
        ["VK_EXT_debug_report", "VK_EXT_debug_utils", "VK_EXT_validation_features", "VK_EXT_layer_settings"]
            .map(|name| serde_json::json!({ "name": name, "spec_version": "1" }));
    let manifest = serde_json::json!({
        "file_format_version": "1.2.0",
        "layer": {
            "name": "VK_LAYER_KHRONOS_validation",
            "type": "GLOBAL",
            "library_path": library,
            "api_version": "1.4.0",
            "implementation_version": "1",
            "description": "Khronos validation layer",
            "instance_extensions": extensions,
            "device_extensions": [{
                "name": "VK_EXT_tooling_info",
                "spec_version": "1",
                "entrypoints": ["vkGetPhysicalDeviceToolPropertiesEXT"],
            }],
        },
    });
    let temporary = folder.join(format!("manifest-{}.tmp", std::process::id()));
    std::fs::write(&temporary, manifest.to_string()).expect("the layer's manifest");
    std::fs::rename(&temporary, folder.join("VkLayer_khronos_validation.json")).expect("the layer's manifest");
    folder
}

fn chromium() -> Vec<PathBuf> {
    ["/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/google/chrome"].map(PathBuf::from).to_vec()
}

fn lavapipe() -> PathBuf {
    let folders = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
    let files = folders.iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten().map(|e| e.path());
    let mut found: Vec<PathBuf> = files
        .filter(|p| {
            let name = p.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with("lvp_icd") && name.ends_with(".json")
        })
        .collect();
    // A machine may have a foreign architecture's too; the loader skips what it can't load.
    let own = |p: &PathBuf| !p.to_string_lossy().contains(std::env::consts::ARCH);
    found.sort_by_key(own);
    found.into_iter().next().expect("lavapipe: install mesa-vulkan-drivers")
}

fn swiftshader() -> PathBuf {
    let found = chromium().into_iter().map(|d| d.join("vk_swiftshader_icd.json")).find(|p| p.exists());
    found.expect("SwiftShader: install chromium")
}

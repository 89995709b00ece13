//! Shared setup for tests on real Vulkan drivers: it finds the drivers and the newest installed validation layer, and
//! fails a test for which that layer reported any message. Not here: the tests themselves.
//!
//! The drivers are the two CPU drivers, lavapipe and SwiftShader. With `OSTINATO_TEST_GPU` set to a device selector the
//! same tests run on that GPU instead, and checks that hold only for the two CPU drivers are skipped. With
//! `OSTINATO_TEST_DRIVER=SwiftShader` they run on that CPU driver alone.
//!
//! Drivers and layer are chosen through environment variables, which the Vulkan loader reads when an instance is
//! created. They are set once per process, before the first instance. Every instance of a test is created by
//! [`Vulkan::new`] or [`Vulkan::without_validation`], so tests may run on several threads.
#![allow(dead_code)]

use ostinato::config::Selector;
use ostinato::device::{Adapter, Device, Instance, InstanceOptions, select};
use ostinato::gpu::devices::OpenDevices;
use ostinato::telemetry::with_causes;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Time limit of a test program. One that still runs after it is considered hung: the longest takes a quarter of an hour on
/// two cores.
const LONGEST: Duration = Duration::from_secs(75 * 60);

/// A Vulkan driver to test on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Mesa's CPU driver: subgroups of 8, every optional integer and float type.
    Lavapipe,
    /// Chromium's CPU driver: subgroups of 4, only the features that the baseline kernels need.
    SwiftShader,
    /// The device that `OSTINATO_TEST_GPU` selects.
    Gpu,
}

impl Driver {
    /// The two CPU drivers, for tests that run only there.
    pub const BOTH: [Driver; 2] = [Driver::Lavapipe, Driver::SwiftShader];

    /// Returns the two CPU drivers, or the one that `OSTINATO_TEST_DRIVER` names, or the selected GPU.
    pub fn all() -> &'static [Driver] {
        if gpu().is_some() {
            return &[Driver::Gpu];
        }
        match std::env::var("OSTINATO_TEST_DRIVER").as_deref() {
            Err(_) | Ok("") => &Driver::BOTH,
            Ok("lavapipe") => &[Driver::Lavapipe],
            Ok("SwiftShader") => &[Driver::SwiftShader],
            Ok(other) => panic!("OSTINATO_TEST_DRIVER is {other:?}, neither \"lavapipe\" nor \"SwiftShader\""),
        }
    }

    /// Returns the first of [`Driver::all`], for tests that need only one driver.
    pub fn first() -> Driver {
        Driver::all()[0]
    }
}

/// Returns the selector of the GPU to test on instead of the CPU drivers, if `OSTINATO_TEST_GPU` is set.
fn gpu() -> Option<String> {
    std::env::var("OSTINATO_TEST_GPU").ok().filter(|text| !text.is_empty())
}

/// The validation layer in use.
#[derive(Debug)]
pub struct Layer {
    /// Path of the layer's library, or of its installed manifest.
    pub path: PathBuf,
    /// Whether its synchronization validation follows hazards across submissions and timeline semaphores.
    pub submit_time: bool,
}

/// A Vulkan instance with the chosen drivers. Dropping it fails the test if the validation layer reported any message.
pub struct Vulkan {
    pub instance: Instance,
    /// The devices of the hosts that a test starts: a later host finds the pipelines of an earlier one.
    pub devices: Arc<OpenDevices>,
    clean: bool,
    /// Whether it is that of the process: see [`Vulkan::shared`].
    shared: bool,
}

/// The instances that the tests of a process share, with and without the validation layer.
static SHARED: Mutex<[Option<Vulkan>; 2]> = Mutex::new([None, None]);

unsafe extern "C" {
    /// Has the process call a function before those that were registered earlier, when it exits.
    fn atexit(end: extern "C" fn()) -> std::ffi::c_int;
}

/// Ends the instances that tests share, with all their devices.
extern "C" fn end_shared() {
    let ended = std::mem::take(&mut *shared());
    drop(ended);
}

fn shared() -> MutexGuard<'static, [Option<Vulkan>; 2]> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vulkan {
    pub fn new() -> Vulkan {
        let layer = layer();
        let instance = Instance::new(&InstanceOptions { validation: true })
            .unwrap_or_else(|e| panic!("no instance with {}: {}", layer.path.display(), with_causes(&e)));
        Vulkan::of(instance)
    }

    /// Creates an instance without the validation layer, for tests of whole models that are slow under it.
    pub fn without_validation() -> Vulkan {
        layer();
        let instance = Instance::new(&InstanceOptions { validation: false })
            .unwrap_or_else(|e| panic!("no instance: {}", with_causes(&e)));
        Vulkan::of(instance)
    }

    /// Returns the process's instance with the validation layer, for tests that start hosts: most of their time is that of
    /// compiling pipelines, many of which another test has needed too. Its devices stay open until the process exits,
    /// which then fails if they still own anything.
    pub fn shared() -> Vulkan {
        shared()[0].get_or_insert_with(Vulkan::new).again()
    }

    /// Like [`Vulkan::shared`], without the validation layer.
    pub fn shared_without_validation() -> Vulkan {
        shared()[1].get_or_insert_with(Vulkan::without_validation).again()
    }

    fn of(instance: Instance) -> Vulkan {
        Vulkan { devices: Arc::new(OpenDevices::new(&instance)), instance, clean: true, shared: false }
    }

    fn again(&self) -> Vulkan {
        Vulkan { instance: self.instance.clone(), devices: Arc::clone(&self.devices), clean: true, shared: true }
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

    /// Returns the layer's messages, for a test that provokes them. Dropping the instance then does not fail the test.
    pub fn provoked(mut self) -> Vec<String> {
        self.clean = false;
        self.instance.validation_messages()
    }

    /// Fails the test if the layer has reported any message.
    pub fn assert_clean(&self) {
        let mut messages = self.instance.validation_messages();
        // With GPU-assisted validation, the layer tells what it changes for its own sake.
        messages.retain(|message| !gpu_assisted() || !message.contains("validation is adjusting settings"));
        assert!(messages.is_empty(), "{} validation messages:\n{}", messages.len(), messages.join("\n"));
    }
}

impl Drop for Vulkan {
    fn drop(&mut self) {
        if self.shared {
            // Drivers register functions too, some of them late. The devices are closed before any of those.
            // SAFETY: the function needs no other state than Rust's own statics, which no exit destroys.
            assert_eq!(unsafe { atexit(end_shared) }, 0, "no function is called at exit");
        } else {
            // Closes the devices: what they still own is reported now.
            self.devices = Arc::new(OpenDevices::new(&self.instance));
        }
        // A test that is already failing reports its own reason.
        if self.clean && !std::thread::panicking() {
            self.assert_clean();
        }
    }
}

/// Whether the layer checks in the shaders that each access is to a buffer: for `make test-full`, because instrumented shaders
/// take minutes to compile.
pub fn gpu_assisted() -> bool {
    std::env::var_os("OSTINATO_TEST_GPU_ASSISTED").is_some()
}

/// Sets the environment on the first call and returns the layer that was found.
pub fn layer() -> &'static Layer {
    static LAYER: OnceLock<Layer> = OnceLock::new();
    LAYER.get_or_init(|| {
        end_in_time();
        let drivers = match gpu() {
            Some(_) => None,
            None => Some(std::env::join_paths([lavapipe(), swiftshader()]).expect("driver paths have no colon")),
        };
        let (layer, manifests) = find_layer();
        // SAFETY: setting environment variables is sound while no other thread reads them without Rust's lock. Rust's
        // own readers take that lock. The one C library here that reads the environment is the Vulkan loader, which
        // `Vulkan::new` and `Vulkan::without_validation` call only after this function.
        unsafe {
            if let Some(drivers) = &drivers {
                std::env::set_var("VK_ICD_FILENAMES", drivers);
                std::env::set_var("VK_DRIVER_FILES", drivers);
            }
            match manifests {
                Some(folder) => std::env::set_var("VK_LAYER_PATH", folder),
                None => std::env::remove_var("VK_LAYER_PATH"),
            }
            // Settings from a developer's shell or working directory must not weaken the validation.
            for name in ["VK_INSTANCE_LAYERS", "VK_LAYER_ENABLES", "VK_LAYER_DISABLES", "VK_LAYER_SETTINGS_PATH"] {
                std::env::remove_var(name);
            }
            if gpu_assisted() {
                std::env::set_var("VK_LAYER_GPUAV_ENABLE", "1");
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

/// Starts a watchdog that aborts the test program after [`LONGEST`] and prints what each thread waits for.
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

/// Prefers the layer that comes with Chromium, which is newer; the distribution's package is the fallback.
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

/// Writes a manifest into a new folder for a library that comes without one. The file is written under a temporary name
/// and then renamed, because test programs run concurrently.
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
    // Manifests of foreign architectures may be installed as well, so the native one is preferred.
    let own = |p: &PathBuf| !p.to_string_lossy().contains(std::env::consts::ARCH);
    found.sort_by_key(own);
    found.into_iter().next().expect("lavapipe: install mesa-vulkan-drivers")
}

fn swiftshader() -> PathBuf {
    let found = chromium().into_iter().map(|d| d.join("vk_swiftshader_icd.json")).find(|p| p.exists());
    found.expect("SwiftShader: install chromium")
}

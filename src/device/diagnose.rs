//! Diagnosis of why no GPU is found. It looks at the Vulkan loader's manifests, the drivers' libraries and the device
//! files, and names what is missing and how to fix it, inside a container or outside. Its only input is [`View`]. Not
//! here: Vulkan calls; what the drivers themselves report is in the list of adapters.

use crate::config::Selector;
use crate::config::file;
use crate::device::adapter::Adapter;
use crate::device::error::DeviceError;
use crate::device::select::select;
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The parts of a machine that decide whether a driver is found.
trait View {
    /// Returns an environment variable; `None` if it is unset or empty.
    fn variable(&self, name: &str) -> Option<String>;
    /// Returns the paths of a directory's entries, sorted by name; empty if there is no such directory.
    fn list(&self, folder: &Path) -> Vec<PathBuf>;
    /// Whether the path exists.
    fn exists(&self, path: &Path) -> bool;
    /// Returns the content of a file; `None` if it cannot be read.
    fn read(&self, path: &Path) -> Option<Vec<u8>>;
    /// Opens a device file for reading and writing, as drivers do, and returns the outcome.
    fn device(&self, path: &Path) -> Access;
}

/// The outcome of opening a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Granted,
    Absent,
    /// Permission denied, by the file's mode or by a container's device rules; `group` owns the file.
    Denied {
        group: u32,
    },
    /// Opening failed with another error, as it does when the kernel has no device behind the file.
    Dead,
}

/// The machine on which the program runs.
struct Machine;

impl View for Machine {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    fn list(&self, folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn read(&self, path: &Path) -> Option<Vec<u8>> {
        file::read(path, file::SMALL).ok()
    }

    fn device(&self, path: &Path) -> Access {
        let Ok(about) = std::fs::metadata(path) else {
            return Access::Absent;
        };
        match File::options().read(true).write(true).open(path) {
            Ok(_) => Access::Granted,
            // A container's device rules cause the same kind of error as the file's mode does.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Access::Denied { group: about.gid() },
            Err(_) => Access::Dead,
        }
    }
}

/// The reasons for which no GPU is found, as far as they can be determined from outside the drivers. It is the source
/// of errors about devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoGpuDiagnosis {
    /// The kind of container; `None` outside a container.
    container: Option<&'static str>,
    /// The missing features and limits, one sentence each.
    findings: Vec<String>,
}

impl std::error::Error for NoGpuDiagnosis {}

impl fmt::Display for NoGpuDiagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.container.map(|kind| format!(" in this container ({kind})")).unwrap_or_default();
        if self.findings.is_empty() {
            return write!(
                f,
                "no GPU driver could be used{place}, though its files are there: a library that it needs may be missing; \
                 VK_LOADER_DEBUG=error,driver shows what the Vulkan loader says"
            );
        }
        write!(f, "no GPU driver could be used{place}:")?;
        self.findings.iter().try_for_each(|finding| write!(f, "\n  {finding}"))
    }
}

/// Returns why no adapter is a GPU; `None` if at least one is, even a refused one.
pub fn diagnose_no_gpu(adapters: &[Adapter]) -> Option<NoGpuDiagnosis> {
    let gpu = adapters.iter().any(|adapter| !adapter.is_cpu());
    // A refused GPU states its own reason.
    (!gpu).then(|| look(&Machine))
}

/// Selects an adapter as [`select`] does. If that fails and there is no GPU among the adapters, the error's source says
/// why that may be.
pub fn choose<'a>(adapters: &'a [Adapter], selector: Option<&Selector>) -> Result<&'a Adapter, DeviceError> {
    select(adapters, selector).map_err(|mut error| {
        if let DeviceError::NoMatch { no_gpu: cause, .. } | DeviceError::MustChoose { no_gpu: cause, .. } = &mut error {
            *cause = diagnose_no_gpu(adapters).map(Box::new);
        }
        error
    })
}

/// Returns the diagnosis for the case that no driver could be loaded, so that there is no list of adapters.
pub(super) fn no_driver() -> NoGpuDiagnosis {
    look(&Machine)
}

fn look(view: &dyn View) -> NoGpuDiagnosis {
    let container = container(view);
    let inside = container.is_some();
    let mut findings = Vec::new();
    let nvidia = Path::new("/dev/nvidiactl");
    let (manifests, folders) = manifests(view);
    let mut gpu_manifest = false;
    let mut nvidia_manifest = false;
    for path in &manifests {
        let Some(library) = library(view, path) else {
            let problem = if view.exists(path) { "is no manifest of a driver" } else { "is not there" };
            findings.push(format!("{} {problem}", path.display()));
            continue;
        };
        if ["lvp", "swiftshader"].iter().any(|cpu| library.to_lowercase().contains(cpu)) {
            continue;
        }
        gpu_manifest = true;
        let of_nvidia = library.contains("nvidia");
        nvidia_manifest |= of_nvidia;
        if !found(view, path, &library) {
            let hint =
                if of_nvidia { nvidia_hint(view, inside) } else { "install the package that it is part of".to_owned() };
            findings.push(format!("{} names {library}, which is not found: {hint}", path.display()));
        }
    }
    if !gpu_manifest {
        let what = if manifests.is_empty() { "no driver's manifest" } else { "no GPU driver's manifest" };
        let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let hint = if inside && !view.exists(nvidia) {
            "install the driver of the host's GPU in the image (mesa-vulkan-drivers for AMD and Intel); NVIDIA's comes from \
             the host, by its container runtime"
        } else {
            "install the GPU's driver (mesa-vulkan-drivers for AMD and Intel)"
        };
        findings.push(format!("{what} (*.json) in {}: {hint}", folders.join(", ")));
    }
    if view.exists(nvidia) && !nvidia_manifest {
        findings.push(format!(
            "{} is there, NVIDIA's Vulkan driver is not: {}",
            nvidia.display(),
            nvidia_hint(view, inside)
        ));
    }
    findings.extend(devices(view, inside));
    NoGpuDiagnosis { container, findings }
}

fn container(view: &dyn View) -> Option<&'static str> {
    if view.variable("KUBERNETES_SERVICE_HOST").is_some() {
        return Some("kubernetes");
    }
    if view.exists(Path::new("/.dockerenv")) {
        return Some("docker");
    }
    if view.exists(Path::new("/run/.containerenv")) {
        return Some("podman");
    }
    let groups = view.read(Path::new("/proc/1/cgroup")).unwrap_or_default();
    let groups = String::from_utf8_lossy(&groups);
    let marks = [
        ("kubepods", "kubernetes"),
        ("docker", "docker"),
        ("libpod", "podman"),
        ("containerd", "containerd"),
        ("lxc", "lxc"),
    ];
    marks.into_iter().find(|(mark, _)| groups.contains(mark)).map(|(_, kind)| kind)
}

/// Returns the manifests that the Vulkan loader reads, and the directories in which it looks for them.
fn manifests(view: &dyn View) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let paths = |text: String| text.split(':').filter(|part| !part.is_empty()).map(PathBuf::from).collect::<Vec<_>>();
    let in_folder = |folder: &PathBuf| {
        let files = view.list(folder).into_iter();
        files.filter(|file| file.extension().is_some_and(|extension| extension == "json")).collect::<Vec<_>>()
    };
    // If one of these variables is set, the loader reads only what it names; each part may be a file or a directory.
    if let Some(named) = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].into_iter().find_map(|name| view.variable(name)) {
        let named = paths(named);
        let files = named.iter().flat_map(|path| {
            if path.extension().is_some_and(|extension| extension == "json") {
                vec![path.clone()]
            } else {
                in_folder(path)
            }
        });
        return (files.collect(), named);
    }
    let home = |variable: &str, below: &str| {
        let home = || Some(PathBuf::from(view.variable("HOME")?).join(below));
        view.variable(variable).map(PathBuf::from).or_else(home).into_iter()
    };
    let several =
        |variable: &str, otherwise: &str| paths(view.variable(variable).unwrap_or_else(|| otherwise.to_owned()));
    let mut folders: Vec<PathBuf> = home("XDG_CONFIG_HOME", ".config")
        .chain(several("XDG_CONFIG_DIRS", "/etc/xdg"))
        .chain([PathBuf::from("/etc")])
        .chain(home("XDG_DATA_HOME", ".local/share"))
        .chain(several("XDG_DATA_DIRS", "/usr/local/share:/usr/share"))
        .map(|base| base.join("vulkan/icd.d"))
        .collect();
    let mut files: Vec<PathBuf> = folders.iter().flat_map(in_folder).collect();
    files.extend(view.variable("VK_ADD_DRIVER_FILES").map(paths).unwrap_or_default());
    // The message lists only the system directories; per-user directories rarely exist.
    folders.retain(|folder| ["/etc/vulkan", "/usr"].iter().any(|base| folder.starts_with(base)));
    (files, folders)
}

/// Returns the library that a manifest names.
fn library(view: &dyn View, manifest: &Path) -> Option<String> {
    let json: serde_json::Value = serde_json::from_slice(&view.read(manifest)?).ok()?;
    json["ICD"]["library_path"].as_str().map(str::to_owned)
}

/// Whether the dynamic linker would find the library. A library of another architecture counts as found.
fn found(view: &dyn View, manifest: &Path, library: &str) -> bool {
    if library.contains('/') {
        // A relative path starts at the manifest's directory.
        return view.exists(&manifest.parent().unwrap_or(Path::new("/")).join(library));
    }
    let cache = view.read(Path::new("/etc/ld.so.cache")).unwrap_or_default();
    let name = [b"\0", library.as_bytes(), b"\0"].concat();
    let path = [b"/", library.as_bytes(), b"\0"].concat();
    let cached = cache.windows(name.len()).any(|bytes| bytes == name || bytes == path);
    let more = view.variable("LD_LIBRARY_PATH").unwrap_or_default();
    let folders =
        more.split(':').filter(|folder| !folder.is_empty()).chain(["/lib", "/usr/lib", "/lib64", "/usr/lib64"]);
    cached || folders.into_iter().any(|folder| view.exists(&Path::new(folder).join(library)))
}

/// Returns the advice for a missing NVIDIA Vulkan driver.
fn nvidia_hint(view: &dyn View, inside: bool) -> String {
    if !inside {
        return "install the part of NVIDIA's driver that has libGLX_nvidia.so.0 (libnvidia-gl)".to_owned();
    }
    let given = view.variable("NVIDIA_DRIVER_CAPABILITIES");
    let given_text = given.as_deref().map_or_else(|| "unset".to_owned(), |given| format!("\"{given}\""));
    let has = given.iter().flat_map(|given| given.split(',')).any(|one| matches!(one.trim(), "graphics" | "all"));
    if has {
        "start the container with NVIDIA's runtime (docker run --gpus all), and have the host's driver complete (libnvidia-gl)"
            .to_owned()
    } else {
        format!("NVIDIA_DRIVER_CAPABILITIES must include graphics when the container is made, it is {given_text}")
    }
}

/// Returns the problems of the device files that drivers open.
fn devices(view: &dyn View, inside: bool) -> Vec<String> {
    let named = |folder: &str, prefix: &str| {
        let name =
            |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let numbered = |path: &PathBuf| {
            let number = name(path).strip_prefix(prefix).map(str::to_owned);
            number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        };
        view.list(Path::new(folder)).into_iter().filter(numbered).collect::<Vec<_>>()
    };
    let mut files = named("/dev/dri", "renderD");
    let nvidia = named("/dev", "nvidia");
    if files.is_empty() && nvidia.is_empty() {
        let hint = if inside {
            "give it to the container (docker run --gpus all, or --device /dev/dri; in Kubernetes a resource such as \
             nvidia.com/gpu)"
        } else {
            "the kernel has no driver of one loaded, or the machine has none"
        };
        return vec![format!("no GPU's device file, neither /dev/nvidia0 nor /dev/dri/renderD128 nor another: {hint}")];
    }
    if !nvidia.is_empty() {
        files.extend(nvidia);
        files.push(PathBuf::from("/dev/nvidiactl"));
    }
    files.iter().filter_map(|path| problem(view, path, inside)).collect()
}

fn problem(view: &dyn View, path: &Path, inside: bool) -> Option<String> {
    let path_text = path.display();
    match view.device(path) {
        Access::Granted => None,
        Access::Absent => Some(format!("{path_text} is not there: NVIDIA's driver needs it")),
        Access::Dead => Some(format!("{path_text} has no device behind it")),
        Access::Denied { group } => {
            let name = group_name(view, group).map(|name| format!(" ({name})")).unwrap_or_default();
            let hint = if inside {
                format!("docker run --group-add {group}, or supplementalGroups in Kubernetes")
            } else {
                "make the user a member".to_owned()
            };
            Some(format!("{path_text} may not be opened, it is for group {group}{name}: {hint}"))
        }
    }
}

fn group_name(view: &dyn View, group: u32) -> Option<String> {
    let groups = view.read(Path::new("/etc/group"))?;
    let groups = String::from_utf8_lossy(&groups).into_owned();
    groups.lines().find_map(|line| {
        let mut parts = line.split(':');
        let (name, _, id) = (parts.next()?, parts.next()?, parts.next()?);
        (id.parse() == Ok(group)).then(|| name.to_owned())
    })
}

#[cfg(test)]
#[path = "diagnose_tests.rs"]
mod tests;

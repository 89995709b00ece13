//! Tests of the diagnosis on invented machines.

use super::*;
use std::collections::BTreeMap;

/// A machine described by environment variables, files and device files.
#[derive(Default)]
struct MadeUp {
    variables: BTreeMap<&'static str, &'static str>,
    files: BTreeMap<&'static str, &'static str>,
    devices: BTreeMap<&'static str, Access>,
}

impl MadeUp {
    fn with(mut self, path: &'static str, text: &'static str) -> MadeUp {
        self.files.insert(path, text);
        self
    }

    fn device(mut self, path: &'static str, access: Access) -> MadeUp {
        self.devices.insert(path, access);
        self
    }

    fn set(mut self, name: &'static str, value: &'static str) -> MadeUp {
        self.variables.insert(name, value);
        self
    }

    /// Adds NVIDIA's device files, without its user-space driver.
    fn nvidia_devices(self) -> MadeUp {
        self.device("/dev/nvidia0", Access::Granted).device("/dev/nvidiactl", Access::Granted)
    }
}

impl View for MadeUp {
    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).map(|value| (*value).to_owned())
    }

    fn list(&self, folder: &Path) -> Vec<PathBuf> {
        let all = self.files.keys().chain(self.devices.keys()).map(PathBuf::from);
        all.filter(|path| path.parent() == Some(folder)).collect()
    }

    fn exists(&self, path: &Path) -> bool {
        let path = path.to_str().unwrap();
        self.files.contains_key(path) || self.devices.contains_key(path)
    }

    fn read(&self, path: &Path) -> Option<Vec<u8>> {
        self.files.get(path.to_str().unwrap()).map(|text| text.as_bytes().to_vec())
    }

    fn device(&self, path: &Path) -> Access {
        self.devices.get(path.to_str().unwrap()).copied().unwrap_or(Access::Absent)
    }
}

const NVIDIA: &str = r#"{"ICD": {"library_path": "libGLX_nvidia.so.0", "api_version": "1.4.303"}}"#;
const RADEON: &str = r#"{"ICD": {"library_path": "/usr/lib/x86_64-linux-gnu/libvulkan_radeon.so"}}"#;
const LAVAPIPE: &str = r#"{"ICD": {"library_path": "/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so"}}"#;
const NVIDIA_AT: &str = "/etc/vulkan/icd.d/nvidia_icd.json";
const RADEON_AT: &str = "/usr/share/vulkan/icd.d/radeon_icd.json";
const LAVAPIPE_AT: &str = "/usr/share/vulkan/icd.d/lvp_icd.json";

fn findings(machine: &MadeUp) -> Vec<String> {
    look(machine).findings
}

#[track_caller]
fn only<'a>(findings: &'a [String], words: &[&str]) -> &'a str {
    assert_eq!(findings.len(), 1, "{findings:#?}");
    for word in words {
        assert!(findings[0].contains(word), "no {word} in {}", findings[0]);
    }
    &findings[0]
}

#[test]
fn an_empty_machine_lacks_driver_and_device() {
    let found = look(&MadeUp::default());
    assert_eq!(found.container, None);
    assert_eq!(found.findings.len(), 2, "{found:#?}");
    assert!(found.findings[0].starts_with("no driver's manifest (*.json) in /etc/vulkan/icd.d, "), "{found:#?}");
    assert!(found.findings[0].contains("/usr/share/vulkan/icd.d"));
    assert!(found.findings[1].contains("neither /dev/nvidia0 nor /dev/dri/renderD128"));
    assert!(found.to_string().starts_with("no GPU driver could be used:\n  no driver's manifest"));
}

#[test]
fn a_driver_on_the_cpu_is_no_gpus() {
    let machine = MadeUp::default()
        .with(LAVAPIPE_AT, LAVAPIPE)
        .with("/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so", "")
        .device("/dev/dri/renderD128", Access::Granted);
    only(&findings(&machine), &["no GPU driver's manifest", "mesa-vulkan-drivers"]);
}

#[test]
fn containers_are_told_apart() {
    let docker = MadeUp::default().with("/.dockerenv", "");
    let podman = MadeUp::default().with("/run/.containerenv", "");
    let cgroup = MadeUp::default().with("/proc/1/cgroup", "0::/kubepods/besteffort/pod1");
    let cluster = MadeUp::default().with("/.dockerenv", "").set("KUBERNETES_SERVICE_HOST", "10.0.0.1");
    let host = MadeUp::default().with("/proc/1/cgroup", "0::/init.scope");
    for (machine, kind) in [
        (docker, Some("docker")),
        (podman, Some("podman")),
        (cgroup, Some("kubernetes")),
        (cluster, Some("kubernetes")),
        (host, None),
    ] {
        let found = look(&machine);
        assert_eq!(found.container, kind);
        let gpus = found.findings.iter().any(|finding| finding.contains("--gpus all"));
        assert_eq!(gpus, kind.is_some(), "{found:#?}");
        assert_eq!(found.to_string().contains(" in this container ("), kind.is_some());
    }
}

#[test]
fn nvidias_runtime_without_graphics_is_the_capabilities_fault() {
    // NVIDIA's container runtime mounts the device files and CUDA; the image may contain the manifest.
    let inside = || MadeUp::default().with("/.dockerenv", "").nvidia_devices();
    let without = inside().set("NVIDIA_DRIVER_CAPABILITIES", "compute,utility");
    let said = findings(&without);
    assert!(said.iter().any(|f| f.contains("must include graphics") && f.contains("\"compute,utility\"")), "{said:#?}");
    let manifest = inside().with(NVIDIA_AT, NVIDIA);
    only(&findings(&manifest), &[NVIDIA_AT, "libGLX_nvidia.so.0", "which is not found", "graphics", "it is unset"]);
    let with = inside().with(NVIDIA_AT, NVIDIA).set("NVIDIA_DRIVER_CAPABILITIES", "graphics,compute");
    only(&findings(&with), &["libGLX_nvidia.so.0", "--gpus all", "libnvidia-gl"]);
    let host = MadeUp::default().nvidia_devices().with(NVIDIA_AT, NVIDIA);
    assert!(!only(&findings(&host), &["libnvidia-gl"]).contains("CAPABILITIES"));
}

#[test]
fn a_library_is_where_the_linker_finds_it() {
    let machine = || MadeUp::default().nvidia_devices().with(NVIDIA_AT, NVIDIA);
    // The linker's cache contains names and paths.
    let cached = machine().with("/etc/ld.so.cache", "glibc\0libGLX_nvidia.so.0\0/usr/lib/libGLX_nvidia.so.0\0");
    assert_eq!(findings(&cached), Vec::<String>::new());
    assert!(look(&cached).to_string().contains("VK_LOADER_DEBUG"));
    let like = machine().with("/etc/ld.so.cache", "libGLX_nvidia.so.0.1\0xlibGLX_nvidia.so.0\0");
    assert_eq!(findings(&like).len(), 1);
    let folder = machine().with("/opt/nvidia/libGLX_nvidia.so.0", "").set("LD_LIBRARY_PATH", "/nowhere:/opt/nvidia");
    assert_eq!(findings(&folder), Vec::<String>::new());
    let relative = r#"{"ICD": {"library_path": "../libvulkan_x.so"}}"#;
    let beside = MadeUp::default()
        .with("/opt/vulkan/icd.d/x.json", relative)
        .set("VK_DRIVER_FILES", "/opt/vulkan/icd.d/x.json")
        .device("/dev/dri/renderD128", Access::Granted);
    only(&findings(&beside), &["../libvulkan_x.so, which is not found: install"]);
    let there = MadeUp {
        files: [("/opt/vulkan/icd.d/x.json", relative), ("/opt/vulkan/icd.d/../libvulkan_x.so", "")].into(),
        ..beside
    };
    assert_eq!(findings(&there), Vec::<String>::new());
}

#[test]
fn what_the_environment_names_is_all_that_counts() {
    let machine = MadeUp::default()
        .with(RADEON_AT, RADEON)
        .with("/usr/lib/x86_64-linux-gnu/libvulkan_radeon.so", "")
        .with("/broken/b.json", "{")
        .device("/dev/dri/renderD128", Access::Granted);
    assert_eq!(findings(&machine), Vec::<String>::new());
    let named = machine.set("VK_ICD_FILENAMES", "/gone.json:/broken");
    let said = findings(&named);
    assert_eq!(said[0], "/gone.json is not there");
    assert_eq!(said[1], "/broken/b.json is no manifest of a driver");
    assert!(said[2].starts_with("no GPU driver's manifest (*.json) in /gone.json, /broken: "), "{said:#?}");
}

#[test]
fn a_device_file_that_is_not_ours_names_its_group() {
    let machine = || {
        MadeUp::default()
            .with(RADEON_AT, RADEON)
            .with("/usr/lib/x86_64-linux-gnu/libvulkan_radeon.so", "")
            .with("/etc/group", "root:x:0:\nrender:x:992:somebody\n")
            .device("/dev/dri/card0", Access::Denied { group: 44 })
    };
    let denied = machine().device("/dev/dri/renderD128", Access::Denied { group: 992 });
    only(&findings(&denied), &["/dev/dri/renderD128 may not be opened, it is for group 992 (render)", "member"]);
    let inside = machine().with("/.dockerenv", "").device("/dev/dri/renderD128", Access::Denied { group: 105 });
    only(&findings(&inside), &["for group 105:", "--group-add 105"]);
    let dead = machine().device("/dev/dri/renderD129", Access::Dead);
    only(&findings(&dead), &["/dev/dri/renderD129 has no device behind it"]);
    let control =
        machine().device("/dev/nvidia3", Access::Granted).with(NVIDIA_AT, NVIDIA).with("/lib/libGLX_nvidia.so.0", "");
    only(&findings(&control), &["/dev/nvidiactl is not there"]);
}

#[test]
fn the_cause_is_told_where_there_is_no_gpu_only() {
    use crate::device::adapter::AdapterKind;
    let cpu = [Adapter::made_up(0, "llvmpipe", AdapterKind::Cpu)];
    let told = |error: DeviceError| std::error::Error::source(&error).map(ToString::to_string);
    let cause = told(choose(&cpu, None).expect_err("no GPU")).expect("a cause");
    assert!(cause.starts_with("no GPU driver could be used"), "{cause}");
    let wanted: Selector = "H200".parse().expect("a name");
    assert!(told(choose(&cpu, Some(&wanted)).expect_err("no GPU")).is_some());
    let mut old = Adapter::made_up(0, "Old", AdapterKind::Discrete);
    old.refused = Some("it has no timelineSemaphore".to_owned());
    assert_eq!(told(choose(&[old], None).expect_err("refused")), None);
    assert!(choose(&cpu, Some(&Selector::Cpu)).is_ok());
}

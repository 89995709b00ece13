//! Queries the drivers for their adapters and the adapters' limits and features. No device is opened here.

use crate::device::adapter::{Adapter, AdapterKind, HeapInfo, QueueFamilyInfo};
use crate::device::capabilities::{Capabilities, Component, MatrixShape};
use crate::device::error::DeviceError;
use crate::device::families;
use crate::device::features::{BINARY_IMPORT, FeatureSet};
use crate::device::module::{self, NEEDED_INVOCATIONS, NEEDED_SHARED_BYTES};
use ash::{amd, arm, ext, khr, nv, vk};
use std::ffi::CStr;

/// Returns every adapter in the drivers' order.
pub(super) fn adapters(entry: &ash::Entry, instance: &ash::Instance) -> Result<Vec<Adapter>, DeviceError> {
    // SAFETY: the instance is alive.
    let physical = unsafe { instance.enumerate_physical_devices() }.map_err(|source| DeviceError::Vulkan {
        call: "vkEnumeratePhysicalDevices".to_owned(),
        device: "the instance".to_owned(),
        source,
    })?;
    Ok(physical.iter().enumerate().map(|(index, &device)| adapter(entry, instance, index, device)).collect())
}

/// Returns the features of one adapter, which must support Vulkan 1.3.
pub(super) fn features(instance: &ash::Instance, physical: vk::PhysicalDevice) -> FeatureSet {
    // SAFETY: the physical device belongs to this instance, which is alive. A driver that cannot list its extensions is
    // treated as having none.
    let listed = unsafe { instance.enumerate_device_extension_properties(physical) }.unwrap_or_default();
    let mut set = FeatureSet::default();
    set.extensions = listed.iter().filter_map(|e| e.extension_name_as_c_str().ok()).map(CStr::to_owned).collect();
    // SAFETY: the chain holds only structures of Vulkan 1.3 and of extensions that the adapter supports.
    set.chained(|root| unsafe { instance.get_physical_device_features2(physical, root) });
    set
}

fn adapter(entry: &ash::Entry, instance: &ash::Instance, index: usize, physical: vk::PhysicalDevice) -> Adapter {
    // SAFETY: the physical device belongs to this instance, which is alive.
    let (basic, memory, family_list) = unsafe {
        (
            instance.get_physical_device_properties(physical),
            instance.get_physical_device_memory_properties(physical),
            instance.get_physical_device_queue_family_properties(physical),
        )
    };
    let queue_families: Vec<QueueFamilyInfo> = (0u32..)
        .zip(&family_list)
        .map(|(index, f)| QueueFamilyInfo {
            index,
            count: f.queue_count,
            flags: f.queue_flags,
            timestamp_bits: f.timestamp_valid_bits,
        })
        .collect();
    let version = basic.api_version;
    let api = (vk::api_version_major(version), vk::api_version_minor(version), vk::api_version_patch(version));
    let kind = match basic.device_type {
        vk::PhysicalDeviceType::DISCRETE_GPU => AdapterKind::Discrete,
        vk::PhysicalDeviceType::INTEGRATED_GPU => AdapterKind::Integrated,
        vk::PhysicalDeviceType::VIRTUAL_GPU => AdapterKind::Virtual,
        vk::PhysicalDeviceType::CPU => AdapterKind::Cpu,
        _ => AdapterKind::Other,
    };
    let mut adapter = Adapter {
        index,
        name: string(&basic.device_name),
        uuid: dashed(&[0; 16]),
        pci: None,
        kind,
        driver: format!("driver version {:#x}", basic.driver_version),
        api,
        queue_families,
        memory_heaps: heaps(&memory),
        capabilities: Capabilities::default(),
        refused: None,
        ids: (basic.vendor_id, basic.device_id, basic.driver_version),
        cache_uuid: basic.pipeline_cache_uuid,
        physical,
    };
    if !adapter.described() {
        // A driver older than 1.3 must not be given structures of 1.3, so nothing more can be queried.
        adapter.refused = Some(format!("Vulkan 1.3 is needed, its driver has {}.{}.{}", api.0, api.1, api.2));
        return adapter;
    }
    let features = features(instance, physical);
    describe(&mut adapter, entry, instance, &basic.limits, &memory, &features);
    let missing = lacks(&adapter, &features);
    adapter.refused = (!missing.is_empty()).then(|| format!("it has no {}", missing.join(", no ")));
    adapter
}

fn lacks(adapter: &Adapter, features: &FeatureSet) -> Vec<&'static str> {
    let mut missing = features.missing();
    let capabilities = &adapter.capabilities;
    missing.extend(module::lacking(capabilities));
    if capabilities.max_invocations.min(capabilities.max_workgroup_size[0]) < NEEDED_INVOCATIONS {
        missing.push("workgroups of 256 invocations");
    }
    if capabilities.max_shared_bytes < NEEDED_SHARED_BYTES {
        missing.push("32 KiB of shared memory");
    }
    if families::choose(&adapter.queue_families).is_none() {
        missing.push("compute queue");
    }
    if !adapter.memory_heaps.iter().any(|h| h.device_local) {
        missing.push("device-local memory");
    }
    missing
}

fn describe(
    adapter: &mut Adapter,
    entry: &ash::Entry,
    instance: &ash::Instance,
    limits: &vk::PhysicalDeviceLimits,
    memory: &vk::PhysicalDeviceMemoryProperties,
    features: &FeatureSet,
) {
    let physical = adapter.physical;
    let mut v11 = vk::PhysicalDeviceVulkan11Properties::default();
    let mut v12 = vk::PhysicalDeviceVulkan12Properties::default();
    let mut v13 = vk::PhysicalDeviceVulkan13Properties::default();
    let mut pci = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
    let has_pci = features.has(ext::pci_bus_info::NAME);
    let mut root = vk::PhysicalDeviceProperties2::default().push_next(&mut v11).push_next(&mut v12).push_next(&mut v13);
    if has_pci {
        root = root.push_next(&mut pci);
    }
    // SAFETY: the adapter supports Vulkan 1.3, and an extension's structure is chained only if the adapter supports the
    // extension.
    unsafe { instance.get_physical_device_properties2(physical, &mut root) };

    adapter.uuid = dashed(&v11.device_uuid);
    adapter.driver = format!("{} {}", string(&v12.driver_name), string(&v12.driver_info)).trim().to_owned();
    adapter.pci = has_pci
        .then(|| format!("{:04x}:{:02x}:{:02x}.{:x}", pci.pci_domain, pci.pci_bus, pci.pci_device, pci.pci_function));
    let in_compute = v11.subgroup_supported_stages.contains(vk::ShaderStageFlags::COMPUTE);
    let sized = v13.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE);
    let choice = families::choose(&adapter.queue_families);
    let timestamp_bits = choice
        .and_then(|c| adapter.queue_families.iter().find(|f| f.index == c.compute.family))
        .map_or(0, |f| f.timestamp_bits);
    let on = |flag: vk::Bool32| flag == vk::TRUE;
    adapter.capabilities = Capabilities {
        subgroup_size: v11.subgroup_size,
        subgroup_min: v13.min_subgroup_size,
        subgroup_max: v13.max_subgroup_size,
        subgroup_operations: if in_compute {
            v11.subgroup_supported_operations
        } else {
            vk::SubgroupFeatureFlags::empty()
        },
        subgroup_size_control: on(features.v13.subgroup_size_control) && sized,
        full_subgroups: on(features.v13.compute_full_subgroups),
        max_shared_bytes: limits.max_compute_shared_memory_size,
        max_invocations: limits.max_compute_work_group_invocations,
        max_workgroup_size: limits.max_compute_work_group_size,
        max_groups: limits.max_compute_work_group_count,
        max_push_bytes: limits.max_push_constants_size,
        max_allocation_bytes: v11.max_memory_allocation_size,
        max_buffer_bytes: v13.max_buffer_size,
        storage_16: on(features.v11.storage_buffer16_bit_access),
        storage_8: on(features.v12.storage_buffer8_bit_access),
        float16: on(features.v12.shader_float16),
        int8: on(features.v12.shader_int8),
        int16: on(features.core.shader_int16),
        int64: on(features.core.shader_int64),
        int64_atomics: on(features.v12.shader_buffer_int64_atomics),
        subgroup_extended_types: on(features.v12.shader_subgroup_extended_types),
        int_dot: on(features.v13.shader_integer_dot_product),
        int_dot_accelerated: on(features.v13.shader_integer_dot_product)
            && on(v13.integer_dot_product4x8_bit_packed_signed_accelerated)
            && on(v13.integer_dot_product4x8_bit_packed_unsigned_accelerated),
        scalar_block_layout: on(features.v12.scalar_block_layout),
        device_scope: on(features.v12.vulkan_memory_model_device_scope),
        cooperative_matrix: features.cooperative_matrix(),
        matrix_shapes: if features.cooperative_matrix() { shapes(entry, instance, physical) } else { Vec::new() },
        cooperative_matrix2: features.cooperative_matrix2(),
        bfloat16: features.bfloat16(),
        denorm_preserve_16: on(v12.shader_denorm_preserve_float16),
        pipeline_statistics: features.pipeline_statistics(),
        memory_budget: features.has(ext::memory_budget::NAME),
        calibrated_timestamps: timestamp_bits > 0 && calibrates(entry, instance, physical, features),
        host_query_reset: on(features.v12.host_query_reset),
        timestamp_period_ns: limits.timestamp_period,
        timestamp_bits,
        unified_memory: adapter.kind == AdapterKind::Cpu || adapter.memory_heaps.iter().all(|h| h.device_local),
        bar: bar(memory),
        ptx: features.has(BINARY_IMPORT)
            && v12.driver_id == vk::DriverId::NVIDIA_PROPRIETARY
            && choice
                .is_some_and(|c| adapter.queue_families.iter().any(|f| f.index == c.compute.family && !f.graphics())),
        processors: processors(instance, physical, features),
    };
}

/// Returns the number of processors that an extension of NVIDIA, AMD or Arm reports.
fn processors(instance: &ash::Instance, physical: vk::PhysicalDevice, features: &FeatureSet) -> Option<u32> {
    let mut nvidia = vk::PhysicalDeviceShaderSMBuiltinsPropertiesNV::default();
    let mut amd = vk::PhysicalDeviceShaderCorePropertiesAMD::default();
    let mut active = vk::PhysicalDeviceShaderCoreProperties2AMD::default();
    let mut arm = vk::PhysicalDeviceShaderCoreBuiltinsPropertiesARM::default();
    let mut root = vk::PhysicalDeviceProperties2::default();
    if features.has(nv::shader_sm_builtins::NAME) {
        root = root.push_next(&mut nvidia);
    }
    if features.has(amd::shader_core_properties::NAME) {
        root = root.push_next(&mut amd);
    }
    if features.has(amd::shader_core_properties2::NAME) {
        root = root.push_next(&mut active);
    }
    if features.has(arm::shader_core_builtins::NAME) {
        root = root.push_next(&mut arm);
    }
    // SAFETY: the adapter supports Vulkan 1.3, and an extension's structure is chained only if the adapter supports the
    // extension.
    unsafe { instance.get_physical_device_properties2(physical, &mut root) };
    // A structure that was not chained, or a driver that does not know, leaves zeros.
    let all = amd.shader_engine_count * amd.shader_arrays_per_engine_count * amd.compute_units_per_shader_array;
    [nvidia.shader_sm_count, active.active_compute_unit_count, all, arm.shader_core_count]
        .into_iter()
        .find(|count| *count > 0)
}

/// Whether the device's clock can be read together with `CLOCK_MONOTONIC`.
fn calibrates(
    entry: &ash::Entry,
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    features: &FeatureSet,
) -> bool {
    // SAFETY: the functions belong to an extension that the adapter supports.
    let domains = unsafe {
        match features.calibrated_timestamps() {
            Some(name) if name == khr::calibrated_timestamps::NAME => {
                khr::calibrated_timestamps::Instance::new(entry, instance)
                    .get_physical_device_calibrateable_time_domains(physical)
            }
            Some(_) => ext::calibrated_timestamps::Instance::new(entry, instance)
                .get_physical_device_calibrateable_time_domains(physical),
            None => return false,
        }
    };
    domains.is_ok_and(|domains| {
        domains.contains(&vk::TimeDomainKHR::DEVICE) && domains.contains(&vk::TimeDomainKHR::CLOCK_MONOTONIC)
    })
}

fn shapes(entry: &ash::Entry, instance: &ash::Instance, physical: vk::PhysicalDevice) -> Vec<MatrixShape> {
    let functions = khr::cooperative_matrix::Instance::new(entry, instance);
    // SAFETY: the adapter supports the extension.
    let listed = unsafe { functions.get_physical_device_cooperative_matrix_properties(physical) };
    let mut shapes: Vec<MatrixShape> = listed
        .unwrap_or_default()
        .iter()
        .filter(|p| p.scope == vk::ScopeKHR::SUBGROUP && p.a_type == p.b_type && p.c_type == p.result_type)
        .filter_map(|p| {
            Some(MatrixShape {
                m: p.m_size,
                n: p.n_size,
                k: p.k_size,
                input: component(p.a_type)?,
                accumulator: component(p.result_type)?,
            })
        })
        .collect();
    // Drivers list a shape twice, with and without saturation.
    let mut seen = std::collections::HashSet::new();
    shapes.retain(|shape| seen.insert(*shape));
    shapes
}

fn component(kind: vk::ComponentTypeKHR) -> Option<Component> {
    const BFLOAT16: vk::ComponentTypeKHR = vk::ComponentTypeKHR::from_raw(1_000_141_000);
    Some(match kind {
        vk::ComponentTypeKHR::FLOAT16 => Component::F16,
        BFLOAT16 => Component::Bf16,
        vk::ComponentTypeKHR::FLOAT32 => Component::F32,
        vk::ComponentTypeKHR::FLOAT64 => Component::F64,
        vk::ComponentTypeKHR::SINT8 => Component::I8,
        vk::ComponentTypeKHR::UINT8 => Component::U8,
        vk::ComponentTypeKHR::SINT32 => Component::I32,
        vk::ComponentTypeKHR::UINT32 => Component::U32,
        _ => return None,
    })
}

fn heaps(memory: &vk::PhysicalDeviceMemoryProperties) -> Vec<HeapInfo> {
    (0u32..)
        .zip(memory.memory_heaps_as_slice())
        .map(|(index, heap)| HeapInfo {
            bytes: heap.size,
            device_local: heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
            host_visible: memory
                .memory_types_as_slice()
                .iter()
                .any(|t| t.heap_index == index && t.property_flags.contains(vk::MemoryPropertyFlags::HOST_VISIBLE)),
        })
        .collect()
}

/// Whether the host can map the largest device-local heap.
fn bar(memory: &vk::PhysicalDeviceMemoryProperties) -> bool {
    heaps(memory).into_iter().filter(|h| h.device_local).max_by_key(|h| h.bytes).is_some_and(|h| h.host_visible)
}

/// Returns the index of the largest device-local heap.
pub(super) fn device_heap(heaps: &[HeapInfo]) -> Option<usize> {
    heaps.iter().enumerate().filter(|(_, h)| h.device_local).max_by_key(|(_, h)| h.bytes).map(|(index, _)| index)
}

fn string(chars: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().take_while(|&&c| c != 0).map(|&c| c.cast_unsigned()).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// Formats a UUID as groups of 8-4-4-4-12 hexadecimal digits in lower case.
fn dashed(uuid: &[u8; 16]) -> String {
    let mut out = String::with_capacity(36);
    for (i, byte) in uuid.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            out.push('-');
        }
        out.push_str(&format!("{byte:02x}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_has_its_dashes() {
        let bytes = std::array::from_fn(|i| i as u8 * 0x11);
        assert_eq!(dashed(&bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn the_bar_must_cover_the_largest_device_heap() {
        let gib = 1 << 30;
        let properties = |host_visible_heap: u32| {
            let mut memory =
                vk::PhysicalDeviceMemoryProperties { memory_heap_count: 2, memory_type_count: 1, ..Default::default() };
            memory.memory_heaps[0] = vk::MemoryHeap { size: 24 * gib, flags: vk::MemoryHeapFlags::DEVICE_LOCAL };
            memory.memory_heaps[1] = vk::MemoryHeap { size: gib / 4, flags: vk::MemoryHeapFlags::DEVICE_LOCAL };
            memory.memory_types[0] = vk::MemoryType {
                property_flags: vk::MemoryPropertyFlags::DEVICE_LOCAL | vk::MemoryPropertyFlags::HOST_VISIBLE,
                heap_index: host_visible_heap,
            };
            memory
        };
        assert!(bar(&properties(0)));
        assert!(!bar(&properties(1)), "a 256 MiB window is not the whole memory");
    }
}

//! The Vulkan features that the program uses: which features a driver supports, which required ones (the baseline) it
//! lacks, and which are enabled. Structures that are newer than the `ash` bindings are declared here.

use ash::vk;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_void};

/// `VK_NV_cooperative_matrix2`.
pub(super) const COOPERATIVE_MATRIX_2: &CStr = c"VK_NV_cooperative_matrix2";
/// `VK_KHR_shader_bfloat16`.
pub(super) const BFLOAT16: &CStr = c"VK_KHR_shader_bfloat16";
/// `VK_NVX_binary_import`. It has no features; [`crate::device::Capabilities::ptx`] says where it is enabled.
pub(super) const BINARY_IMPORT: &CStr = ash::nvx::binary_import::NAME;

/// `VkPhysicalDeviceCooperativeMatrix2FeaturesNV`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CooperativeMatrix2Features {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    workgroup_scope: vk::Bool32,
    flexible_dimensions: vk::Bool32,
    reductions: vk::Bool32,
    conversions: vk::Bool32,
    per_element_operations: vk::Bool32,
    tensor_addressing: vk::Bool32,
    block_loads: vk::Bool32,
}

impl Default for CooperativeMatrix2Features {
    fn default() -> Self {
        CooperativeMatrix2Features {
            s_type: vk::StructureType::from_raw(1_000_593_000),
            p_next: std::ptr::null_mut(),
            workgroup_scope: 0,
            flexible_dimensions: 0,
            reductions: 0,
            conversions: 0,
            per_element_operations: 0,
            tensor_addressing: 0,
            block_loads: 0,
        }
    }
}

/// `VkPhysicalDeviceShaderBfloat16FeaturesKHR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Bfloat16Features {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    type_: vk::Bool32,
    dot_product: vk::Bool32,
    cooperative_matrix: vk::Bool32,
}

impl Default for Bfloat16Features {
    fn default() -> Self {
        Bfloat16Features {
            s_type: vk::StructureType::from_raw(1_000_141_000),
            p_next: std::ptr::null_mut(),
            type_: 0,
            dot_product: 0,
            cooperative_matrix: 0,
        }
    }
}

// SAFETY: both structures begin with sType and pNext in C layout and, according to the Vulkan registry, extend
// VkPhysicalDeviceFeatures2 and VkDeviceCreateInfo.
unsafe impl vk::ExtendsPhysicalDeviceFeatures2 for CooperativeMatrix2Features {}
// SAFETY: as above.
unsafe impl vk::ExtendsPhysicalDeviceFeatures2 for Bfloat16Features {}

/// The features that a driver supports, or those to enable. The `p_next` of every member is null outside
/// [`FeatureSet::chained`].
#[derive(Clone, Default)]
pub(super) struct FeatureSet {
    /// The names of the extensions.
    pub(super) extensions: BTreeSet<CString>,
    /// Features of Vulkan 1.0.
    pub(super) core: vk::PhysicalDeviceFeatures,
    /// Features of Vulkan 1.1.
    pub(super) v11: vk::PhysicalDeviceVulkan11Features<'static>,
    /// Features of Vulkan 1.2.
    pub(super) v12: vk::PhysicalDeviceVulkan12Features<'static>,
    /// Features of Vulkan 1.3.
    pub(super) v13: vk::PhysicalDeviceVulkan13Features<'static>,
    cooperative: vk::PhysicalDeviceCooperativeMatrixFeaturesKHR<'static>,
    cooperative2: CooperativeMatrix2Features,
    bfloat16: Bfloat16Features,
    executables: vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR<'static>,
}

impl FeatureSet {
    /// Whether the set contains an extension.
    pub(super) fn has(&self, name: &CStr) -> bool {
        self.extensions.contains(name)
    }

    /// Calls `use_chain` with all members chained to one `VkPhysicalDeviceFeatures2`. An extension's structure is
    /// chained only if the set contains the extension.
    pub(super) fn chained<T>(&mut self, use_chain: impl FnOnce(&mut vk::PhysicalDeviceFeatures2<'_>) -> T) -> T {
        let cooperative = self.has(ash::khr::cooperative_matrix::NAME);
        let cooperative2 = self.has(COOPERATIVE_MATRIX_2);
        let bfloat16 = self.has(BFLOAT16);
        let executables = self.has(ash::khr::pipeline_executable_properties::NAME);
        let mut root = vk::PhysicalDeviceFeatures2::default().features(self.core);
        root = root.push_next(&mut self.v11).push_next(&mut self.v12).push_next(&mut self.v13);
        if cooperative {
            root = root.push_next(&mut self.cooperative);
        }
        if cooperative2 {
            root = root.push_next(&mut self.cooperative2);
        }
        if bfloat16 {
            root = root.push_next(&mut self.bfloat16);
        }
        if executables {
            root = root.push_next(&mut self.executables);
        }
        let out = use_chain(&mut root);
        self.core = root.features;
        self.v11.p_next = std::ptr::null_mut();
        self.v12.p_next = std::ptr::null_mut();
        self.v13.p_next = std::ptr::null_mut();
        self.cooperative.p_next = std::ptr::null_mut();
        self.cooperative2.p_next = std::ptr::null_mut();
        self.bfloat16.p_next = std::ptr::null_mut();
        self.executables.p_next = std::ptr::null_mut();
        out
    }

    /// Returns the names of the required features that are missing.
    pub(super) fn missing(&self) -> Vec<&'static str> {
        [
            (self.v12.buffer_device_address, "bufferDeviceAddress"),
            (self.v12.timeline_semaphore, "timelineSemaphore"),
            (self.v12.vulkan_memory_model, "vulkanMemoryModel"),
            (self.v12.host_query_reset, "hostQueryReset"),
            (self.v13.synchronization2, "synchronization2"),
            (self.v13.maintenance4, "maintenance4"),
        ]
        .into_iter()
        .filter_map(|(there, name)| (there == vk::FALSE).then_some(name))
        .collect()
    }

    /// Whether the set has `VK_KHR_cooperative_matrix` and its feature.
    pub(super) fn cooperative_matrix(&self) -> bool {
        self.has(ash::khr::cooperative_matrix::NAME) && self.cooperative.cooperative_matrix == vk::TRUE
    }

    /// Whether the set has `VK_NV_cooperative_matrix2` and the features of it that our shader variants use.
    pub(super) fn cooperative_matrix2(&self) -> bool {
        let f = &self.cooperative2;
        self.cooperative_matrix()
            && self.has(COOPERATIVE_MATRIX_2)
            && [f.workgroup_scope, f.flexible_dimensions, f.conversions, f.per_element_operations, f.tensor_addressing]
                .iter()
                .all(|&there| there == vk::TRUE)
    }

    /// Whether the set has `VK_KHR_shader_bfloat16` and, if it has cooperative matrices, their bfloat16 feature.
    pub(super) fn bfloat16(&self) -> bool {
        self.has(BFLOAT16)
            && self.bfloat16.type_ == vk::TRUE
            && (!self.cooperative_matrix() || self.bfloat16.cooperative_matrix == vk::TRUE)
    }

    /// Whether the set has `VK_KHR_pipeline_executable_properties` and its feature.
    pub(super) fn pipeline_statistics(&self) -> bool {
        self.has(ash::khr::pipeline_executable_properties::NAME)
            && self.executables.pipeline_executable_info == vk::TRUE
    }

    /// Adds what statistics of pipelines need, if `there`, the driver's features, have it.
    pub(super) fn enable_pipeline_statistics(&mut self, there: &FeatureSet) {
        if there.pipeline_statistics() {
            self.extensions.insert(ash::khr::pipeline_executable_properties::NAME.to_owned());
            self.executables.pipeline_executable_info = vk::TRUE;
        }
    }

    /// Returns the extension for calibrated timestamps; the ratified (KHR) name is preferred.
    pub(super) fn calibrated_timestamps(&self) -> Option<&'static CStr> {
        [ash::khr::calibrated_timestamps::NAME, ash::ext::calibrated_timestamps::NAME]
            .into_iter()
            .find(|name| self.has(name))
    }

    /// Returns the features to enable: the required ones, and every optional one that the program knows and the set
    /// has.
    pub(super) fn enabled(&self) -> FeatureSet {
        let mut on = FeatureSet::default();
        let mut extension = |name: &CStr, wanted: bool| {
            if wanted {
                on.extensions.insert(name.to_owned());
            }
        };
        extension(ash::khr::cooperative_matrix::NAME, self.cooperative_matrix());
        extension(COOPERATIVE_MATRIX_2, self.cooperative_matrix2());
        extension(BFLOAT16, self.bfloat16());
        // A driver that lists it implements Vulkan on another interface, and requires that it is enabled.
        extension(ash::khr::portability_subset::NAME, self.has(ash::khr::portability_subset::NAME));
        extension(ash::ext::memory_budget::NAME, self.has(ash::ext::memory_budget::NAME));
        if let Some(name) = self.calibrated_timestamps() {
            extension(name, true);
        }
        on.core.shader_int16 = self.core.shader_int16;
        on.core.shader_int64 = self.core.shader_int64;
        on.v11.storage_buffer16_bit_access = self.v11.storage_buffer16_bit_access;
        on.v12.storage_buffer8_bit_access = self.v12.storage_buffer8_bit_access;
        on.v12.shader_float16 = self.v12.shader_float16;
        on.v12.shader_int8 = self.v12.shader_int8;
        on.v12.shader_buffer_int64_atomics = self.v12.shader_buffer_int64_atomics;
        on.v12.shader_subgroup_extended_types = self.v12.shader_subgroup_extended_types;
        on.v12.scalar_block_layout = self.v12.scalar_block_layout;
        on.v12.vulkan_memory_model_device_scope = self.v12.vulkan_memory_model_device_scope;
        on.v12.buffer_device_address = vk::TRUE;
        on.v12.timeline_semaphore = vk::TRUE;
        on.v12.vulkan_memory_model = vk::TRUE;
        on.v12.host_query_reset = vk::TRUE;
        on.v13.synchronization2 = vk::TRUE;
        on.v13.maintenance4 = vk::TRUE;
        on.v13.subgroup_size_control = self.v13.subgroup_size_control;
        on.v13.compute_full_subgroups = self.v13.compute_full_subgroups;
        on.v13.shader_integer_dot_product = self.v13.shader_integer_dot_product;
        on.cooperative.cooperative_matrix = vk::TRUE;
        // Copied whole: every supported feature of these structures is enabled. Their `p_next` is null here.
        on.cooperative2 = self.cooperative2;
        on.bfloat16 = self.bfloat16;
        on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn baseline() -> FeatureSet {
        FeatureSet::default().enabled()
    }

    #[test]
    fn every_missing_feature_is_named() {
        assert_eq!(
            FeatureSet::default().missing(),
            [
                "bufferDeviceAddress",
                "timelineSemaphore",
                "vulkanMemoryModel",
                "hostQueryReset",
                "synchronization2",
                "maintenance4"
            ]
        );
        assert!(baseline().missing().is_empty());
    }

    #[test]
    fn nothing_optional_is_switched_on_that_is_not_there() {
        let on = baseline();
        assert!(on.extensions.is_empty());
        assert_eq!((on.core.shader_int64, on.v12.shader_float16, on.v13.subgroup_size_control), (0, 0, 0));
    }

    #[test]
    fn a_portability_driver_gets_the_extension_that_it_requires() {
        let mut there = FeatureSet::default();
        there.extensions.insert(ash::khr::portability_subset::NAME.to_owned());
        assert!(there.enabled().has(ash::khr::portability_subset::NAME));
    }

    #[test]
    fn statistics_of_pipelines_are_enabled_only_where_the_driver_has_them() {
        let mut there = FeatureSet::default();
        let mut on = there.enabled();
        on.enable_pipeline_statistics(&there);
        assert!(!on.pipeline_statistics());
        there.extensions.insert(ash::khr::pipeline_executable_properties::NAME.to_owned());
        there.executables.pipeline_executable_info = vk::TRUE;
        assert!(!there.enabled().pipeline_statistics());
        on.enable_pipeline_statistics(&there);
        assert!(on.pipeline_statistics());
    }

    #[test]
    fn the_chain_holds_extension_structures_only_with_their_extension_and_leaves_no_pointer() {
        fn length(set: &mut FeatureSet) -> usize {
            set.chained(|root| {
                let mut count = 0;
                let mut next = root.p_next.cast::<vk::BaseOutStructure<'_>>();
                while !next.is_null() {
                    count += 1;
                    // SAFETY: every member of the chain is alive while `chained` runs.
                    next = unsafe { (*next).p_next };
                }
                count
            })
        }
        let mut set = baseline();
        assert_eq!(length(&mut set), 3);
        set.extensions.insert(BFLOAT16.to_owned());
        set.extensions.insert(COOPERATIVE_MATRIX_2.to_owned());
        assert_eq!(length(&mut set), 5);
        assert!(set.v11.p_next.is_null() && set.bfloat16.p_next.is_null() && set.cooperative2.p_next.is_null());
    }
}

//! Compute pipelines with specialization constants and push constants, without descriptors.

use crate::device::cache::PipelineCache;
use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use crate::device::module::Module;
use ash::vk;
use std::sync::Arc;

/// The description of a pipeline.
#[derive(Clone, Copy, Debug)]
pub struct PipelineDesc<'a> {
    /// The name of the kernel and its variant, for messages and debuggers.
    pub name: &'a str,
    /// The SPIR-V module; its entry point is `main`.
    pub spirv: &'a [u32],
    /// The values of the specialization constants with ids from 0 on. Ids that the module does not declare are ignored.
    pub constants: &'a [u32],
    /// The size of the push constants in bytes, a multiple of 4.
    pub push_bytes: u32,
    /// The subgroup size that the kernel requires; `None` if it runs with any size.
    pub required_subgroup: Option<u32>,
    /// Requires every subgroup to be full; ignored if the device does not support that feature. If set, the workgroup's
    /// x size must be a multiple of the subgroup size.
    pub full_subgroups: bool,
}

/// A compute pipeline; clones share it. Recorded commands and submissions keep it alive.
#[derive(Clone)]
pub struct Pipeline(Arc<Inner>);

struct Inner {
    raw: vk::Pipeline,
    layout: vk::PipelineLayout,
    name: String,
    push_bytes: u32,
    logical: Arc<Logical>,
}

/// A program that the driver's compiler made of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Executable {
    /// The driver's name for it.
    pub name: String,
    /// The program's subgroup size; 0 if the driver does not report it.
    pub subgroup_size: u32,
    /// The statistics that the driver reports for the program, in its order.
    pub statistics: Vec<Statistic>,
}

/// A statistic that a driver reports for a program. Names and units are the driver's own.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistic {
    /// The driver's name for it.
    pub name: String,
    /// The value; a truth value is 0 or 1.
    pub value: f64,
}

impl Statistic {
    fn of(raw: &vk::PipelineExecutableStatisticKHR<'_>) -> Statistic {
        // SAFETY: the driver wrote the member of the union that `format` names.
        let value = unsafe {
            match raw.format {
                vk::PipelineExecutableStatisticFormatKHR::BOOL32 => f64::from(raw.value.b32),
                vk::PipelineExecutableStatisticFormatKHR::INT64 => raw.value.i64 as f64,
                vk::PipelineExecutableStatisticFormatKHR::UINT64 => raw.value.u64 as f64,
                _ => raw.value.f64,
            }
        };
        Statistic { name: text(raw.name_as_c_str()), value }
    }
}

fn text(name: Result<&std::ffi::CStr, std::ffi::FromBytesUntilNulError>) -> String {
    name.map_or_else(|_| "?".to_owned(), |name| name.to_string_lossy().into_owned())
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline").field("name", &self.0.name).field("push_bytes", &self.0.push_bytes).finish()
    }
}

impl Pipeline {
    /// Creates a pipeline. Several threads may create pipelines with one cache at the same time.
    ///
    /// # Errors
    /// `Limit` if there are too many push constants, the device does not support the required subgroup size, or a
    /// workgroup is too large or has too much shared memory; `Kernel` if the device lacks a capability of the module.
    pub fn new(device: &Device, cache: &PipelineCache, desc: &PipelineDesc<'_>) -> Result<Pipeline, DeviceError> {
        let logical = device.logical();
        let capabilities = &device.adapter().capabilities;
        cache.assert_of(logical);
        assert!(desc.push_bytes.is_multiple_of(4), "push constants of {} bytes", desc.push_bytes);
        let limit = |what: &str, wanted: u32, unit: &'static str, limit: u32| DeviceError::Limit {
            what: format!("kernel \"{}\": {what}", desc.name),
            wanted: wanted.into(),
            unit,
            device: device.adapter().name.clone(),
            limit: limit.into(),
        };
        if desc.push_bytes > capabilities.max_push_bytes {
            return Err(limit("push constants", desc.push_bytes, "bytes", capabilities.max_push_bytes));
        }
        let mut required = None;
        if let Some(size) = desc.required_subgroup {
            let sizes = capabilities.subgroup_min..=capabilities.subgroup_max;
            if capabilities.subgroup_size_control && size.is_power_of_two() && sizes.contains(&size) {
                required =
                    Some(vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default().required_subgroup_size(size));
            } else if size != capabilities.subgroup_size {
                return Err(limit("subgroup", size, "invocations", capabilities.subgroup_size));
            }
        }

        let module = Module::read(desc.spirv, desc.constants);
        let lacks = module.lacks(capabilities);
        if !lacks.is_empty() {
            let (kernel, device) = (desc.name.to_owned(), device.adapter().name.clone());
            return Err(DeviceError::Kernel { kernel, needs: lacks.join(", "), device });
        }
        let dimensions = module.group.iter().zip(capabilities.max_workgroup_size);
        if let Some((size, most)) = dimensions.map(|(size, most)| (*size, most)).find(|(size, most)| size > most) {
            return Err(limit("a dimension of a workgroup", size, "invocations", most));
        }
        if module.invocations() > capabilities.max_invocations {
            return Err(limit("a workgroup", module.invocations(), "invocations", capabilities.max_invocations));
        }
        if let Some(bytes) = module.shared_bytes.filter(|bytes| *bytes > capabilities.max_shared_bytes) {
            return Err(limit("shared memory", bytes, "bytes", capabilities.max_shared_bytes));
        }

        // SAFETY: the words are SPIR-V that the build compiled for Vulkan 1.3; the caller passes no other in `desc`.
        let module =
            unsafe { logical.raw.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(desc.spirv), None) };
        let module = logical.check(&format!("vkCreateShaderModule (\"{}\")", desc.name), module)?;
        let made = layout(logical, desc.push_bytes).and_then(|layout| {
            raw_pipeline(logical, cache, desc, capabilities.full_subgroups, module, layout, required)
                .map(|raw| (raw, layout))
                .inspect_err(|_| {
                    // SAFETY: the layout was created above, and the pipeline that would have used it was not.
                    unsafe { logical.raw.destroy_pipeline_layout(layout, None) };
                })
        });
        // SAFETY: a module may be destroyed once its pipelines are created.
        unsafe { logical.raw.destroy_shader_module(module, None) };
        let (raw, layout) = made?;
        logical.name(raw, desc.name);
        Ok(Pipeline(Arc::new(Inner {
            raw,
            layout,
            name: desc.name.to_owned(),
            push_bytes: desc.push_bytes,
            logical: logical.clone(),
        })))
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The size of the push constants in bytes.
    pub fn push_bytes(&self) -> u32 {
        self.0.push_bytes
    }

    /// Returns the programs that the driver's compiler made of the pipeline: some drivers compile one for each subgroup
    /// size. Empty unless the device was opened with statistics and its driver reports them.
    pub fn executables(&self) -> Result<Vec<Executable>, DeviceError> {
        let logical = &self.0.logical;
        let Some(functions) = &logical.executables else {
            return Ok(Vec::new());
        };
        let info = vk::PipelineInfoKHR::default().pipeline(self.0.raw);
        // SAFETY: the pipeline is alive, and its device has the extension and its feature enabled.
        let programs = unsafe { functions.get_pipeline_executable_properties(&info) };
        let programs = logical.check("vkGetPipelineExecutablePropertiesKHR", programs)?;
        let mut executables = Vec::new();
        for (index, program) in (0u32..).zip(&programs) {
            let info = vk::PipelineExecutableInfoKHR::default().pipeline(self.0.raw).executable_index(index);
            // SAFETY: as above; the pipeline was created with CAPTURE_STATISTICS, and it has this program.
            let statistics = unsafe { functions.get_pipeline_executable_statistics(&info) };
            let statistics = logical.check("vkGetPipelineExecutableStatisticsKHR", statistics)?;
            executables.push(Executable {
                name: text(program.name_as_c_str()),
                subgroup_size: program.subgroup_size,
                statistics: statistics.iter().map(Statistic::of).collect(),
            });
        }
        Ok(executables)
    }

    /// Whether there is a clone of it.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(super) fn raw(&self) -> vk::Pipeline {
        self.0.raw
    }

    pub(super) fn layout(&self) -> vk::PipelineLayout {
        self.0.layout
    }

    pub(super) fn assert_of(&self, logical: &Arc<Logical>) {
        assert!(Arc::ptr_eq(&self.0.logical, logical), "pipeline \"{}\" of another device", self.0.name);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: recorded commands hold clones, and queues keep those while they are in flight, so no use is left.
        unsafe {
            self.logical.raw.destroy_pipeline(self.raw, None);
            self.logical.raw.destroy_pipeline_layout(self.layout, None);
        }
    }
}

fn layout(logical: &Logical, push_bytes: u32) -> Result<vk::PipelineLayout, DeviceError> {
    let ranges = [vk::PushConstantRange { stage_flags: vk::ShaderStageFlags::COMPUTE, offset: 0, size: push_bytes }];
    let info = vk::PipelineLayoutCreateInfo::default();
    let info = if push_bytes == 0 { info } else { info.push_constant_ranges(&ranges) };
    // SAFETY: the only range is within the device's limit, which the caller checked.
    logical.check("vkCreatePipelineLayout", unsafe { logical.raw.create_pipeline_layout(&info, None) })
}

fn raw_pipeline(
    logical: &Logical,
    cache: &PipelineCache,
    desc: &PipelineDesc<'_>,
    full_subgroups: bool,
    module: vk::ShaderModule,
    layout: vk::PipelineLayout,
    mut required: Option<vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo<'_>>,
) -> Result<vk::Pipeline, DeviceError> {
    let entries: Vec<vk::SpecializationMapEntry> = (0u32..)
        .zip(desc.constants)
        .map(|(id, _)| vk::SpecializationMapEntry { constant_id: id, offset: 4 * id, size: 4 })
        .collect();
    let specialization =
        vk::SpecializationInfo::default().map_entries(&entries).data(bytemuck::cast_slice(desc.constants));
    let mut stage = vk::PipelineShaderStageCreateInfo::default()
        .stage(vk::ShaderStageFlags::COMPUTE)
        .module(module)
        .name(c"main")
        .specialization_info(&specialization);
    if desc.full_subgroups && full_subgroups {
        stage = stage.flags(vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS);
    }
    if let Some(required) = &mut required {
        stage = stage.push_next(required);
    }
    let mut info = vk::ComputePipelineCreateInfo::default().stage(stage).layout(layout);
    if logical.executables.is_some() {
        info = info.flags(vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR);
    }
    let info = [info];
    // SAFETY: module and layout live during the call, and Vulkan synchronises access to the cache internally. A
    // subgroup size and full subgroups are required only if the device supports the features.
    let result = unsafe { logical.raw.create_compute_pipelines(cache.raw(), &info, None) };
    let made = result.map_err(|(_, e)| e);
    Ok(logical.check(&format!("vkCreateComputePipelines (\"{}\")", desc.name), made)?[0])
}

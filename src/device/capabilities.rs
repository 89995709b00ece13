//! The limits and features of an adapter, as plain values by which kernels and memory plans are chosen.

use ash::vk;

/// The element type of a cooperative matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// 16-bit float.
    F16,
    /// bfloat16.
    Bf16,
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
}

/// A matrix shape for which a subgroup can compute `result = a × b + c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixShape {
    /// Rows of a and of the result.
    pub m: u32,
    /// Columns of b and of the result.
    pub n: u32,
    /// Columns of a, rows of b.
    pub k: u32,
    /// The element type of a and b.
    pub input: Component,
    /// The element type of c and the result.
    pub accumulator: Component,
}

/// The limits and features of an adapter. A field that names an optional feature is true if the adapter supports the
/// feature; a [`crate::device::Device`] of that adapter then has the feature enabled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capabilities {
    /// The number of invocations in a subgroup, unless a pipeline requires another size.
    pub subgroup_size: u32,
    /// The smallest subgroup size that a pipeline may require.
    pub subgroup_min: u32,
    /// The largest subgroup size that a pipeline may require.
    pub subgroup_max: u32,
    /// The subgroup operations that are supported in compute shaders.
    pub subgroup_operations: vk::SubgroupFeatureFlags,
    /// Whether a compute pipeline may require a subgroup size.
    pub subgroup_size_control: bool,
    /// Whether a compute pipeline may require full subgroups.
    pub full_subgroups: bool,
    /// The maximum shared memory of a workgroup, in bytes.
    pub max_shared_bytes: u32,
    /// The maximum number of invocations of a workgroup.
    pub max_invocations: u32,
    /// The maximum workgroup size in x, y and z.
    pub max_workgroup_size: [u32; 3],
    /// The maximum number of workgroups of a dispatch in x, y and z.
    pub max_groups: [u32; 3],
    /// The maximum size of the push constants, in bytes.
    pub max_push_bytes: u32,
    /// The maximum size of one memory allocation (`maxMemoryAllocationSize`), in bytes.
    pub max_allocation_bytes: u64,
    /// The maximum size of one buffer, in bytes.
    pub max_buffer_bytes: u64,
    /// 16-bit loads and stores in storage buffers.
    pub storage_16: bool,
    /// 8-bit loads and stores in storage buffers.
    pub storage_8: bool,
    /// Arithmetic on 16-bit floats.
    pub float16: bool,
    /// Arithmetic on 8-bit integers.
    pub int8: bool,
    /// Arithmetic on 16-bit integers.
    pub int16: bool,
    /// Arithmetic on 64-bit integers.
    pub int64: bool,
    /// Atomics on 64-bit integers in buffers.
    pub int64_atomics: bool,
    /// Subgroup operations on 8-, 16- and 64-bit types.
    pub subgroup_extended_types: bool,
    /// Integer dot products.
    pub int_dot: bool,
    /// Whether the device has instructions for dot products of four 8-bit integers in a word, signed and unsigned.
    pub int_dot_accelerated: bool,
    /// Scalar block layout.
    pub scalar_block_layout: bool,
    /// Device scope in the Vulkan memory model, needed for ordered atomics between workgroups.
    pub device_scope: bool,
    /// `VK_KHR_cooperative_matrix`.
    pub cooperative_matrix: bool,
    /// The matrix shapes that subgroups can multiply; empty without cooperative matrices.
    pub matrix_shapes: Vec<MatrixShape>,
    /// `VK_NV_cooperative_matrix2` with every feature that our shader variants use.
    pub cooperative_matrix2: bool,
    /// `VK_KHR_shader_bfloat16`: the type itself and, if the adapter has cooperative matrices, its use in them.
    pub bfloat16: bool,
    /// Subnormal 16-bit floats are kept if a shader asks for it.
    pub denorm_preserve_16: bool,
    /// `VK_KHR_pipeline_executable_properties`: the driver tells what its compiler made of a pipeline. Enabled only by
    /// [`crate::device::Device::open_with_statistics`].
    pub pipeline_statistics: bool,
    /// `VK_EXT_memory_budget`.
    pub memory_budget: bool,
    /// Timestamps that can be calibrated against the host's `CLOCK_MONOTONIC`.
    pub calibrated_timestamps: bool,
    /// The host may reset query pools.
    pub host_query_reset: bool,
    /// The length of one timestamp tick, in nanoseconds.
    pub timestamp_period_ns: f32,
    /// The number of valid bits of a timestamp on the compute queue; 0 if that queue has no timestamps.
    pub timestamp_bits: u32,
    /// The device and the host share their memory: every heap is device-local, or the adapter is a CPU driver.
    pub unified_memory: bool,
    /// The largest device-local heap is host-visible (resizable BAR), so the host can map all of it.
    pub bar: bool,
    /// `VK_NVX_binary_import` on NVIDIA's own driver, with a compute family without graphics: programs in PTX can be
    /// launched from command buffers. A driver that cannot load CUDA's library refuses a device with the extension; it
    /// is then opened without ([`crate::device::Device::takes_ptx`]).
    pub ptx: bool,
    /// The number of processors that run workgroups (NVIDIA's streaming multiprocessors, AMD's compute units, Arm's shader
    /// cores), if an extension reports it. Intel, Qualcomm and Apple have no such extension.
    pub processors: Option<u32>,
}

impl Capabilities {
    /// Returns the names of the optional features that the adapter supports. All of them are enabled when
    /// it is opened, except for statistics of pipelines.
    pub fn optional(&self) -> Vec<&'static str> {
        [
            (self.storage_16, "storage_16bit"),
            (self.storage_8, "storage_8bit"),
            (self.float16, "float16"),
            (self.int8, "int8"),
            (self.int16, "int16"),
            (self.int64, "int64"),
            (self.int64_atomics, "int64_atomics"),
            (self.subgroup_extended_types, "subgroup_extended_types"),
            (self.subgroup_size_control, "subgroup_size_control"),
            (self.full_subgroups, "full_subgroups"),
            (self.int_dot, "integer_dot_product"),
            (self.int_dot_accelerated, "integer_dot_product_accelerated"),
            (self.scalar_block_layout, "scalar_block_layout"),
            (self.device_scope, "memory_model_device_scope"),
            (self.cooperative_matrix, "cooperative_matrix"),
            (self.cooperative_matrix2, "cooperative_matrix2"),
            (self.bfloat16, "bfloat16"),
            (self.denorm_preserve_16, "denorm_preserve_16"),
            (self.pipeline_statistics, "pipeline_statistics"),
            (self.memory_budget, "memory_budget"),
            (self.calibrated_timestamps, "calibrated_timestamps"),
            (self.timestamp_bits > 0, "timestamps"),
            (self.bar, "resizable_bar"),
            (self.ptx, "ptx"),
        ]
        .into_iter()
        .filter_map(|(there, name)| there.then_some(name))
        .collect()
    }
}

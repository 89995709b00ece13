//! What an adapter can do, as plain values that kernels and plans choose by.

use ash::vk;

/// The type of a cooperative matrix's elements.
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

/// One shape of `result = a × b + c` that a subgroup can multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixShape {
    /// Rows of a and of the result.
    pub m: u32,
    /// Columns of b and of the result.
    pub n: u32,
    /// Columns of a, rows of b.
    pub k: u32,
    /// Elements of a and b.
    pub input: Component,
    /// Elements of c and of the result.
    pub accumulator: Component,
}

/// What an adapter can do. A field that names an optional feature is true where the feature is
/// there, and a [`crate::device::Device`] of the adapter then has it enabled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capabilities {
    /// Invocations in a subgroup unless a pipeline asks for another number.
    pub subgroup_size: u32,
    /// Least number a pipeline may ask for.
    pub subgroup_min: u32,
    /// Greatest number a pipeline may ask for.
    pub subgroup_max: u32,
    /// What subgroups can do in compute shaders.
    pub subgroup_operations: vk::SubgroupFeatureFlags,
    /// Whether a pipeline may ask for a subgroup size.
    pub subgroup_size_control: bool,
    /// Whether a pipeline may ask for full subgroups.
    pub full_subgroups: bool,
    /// Shared memory of a workgroup in bytes.
    pub max_shared_bytes: u32,
    /// Invocations of a workgroup.
    pub max_invocations: u32,
    /// Workgroup size in x, y, z.
    pub max_workgroup_size: [u32; 3],
    /// Workgroups of a dispatch in x, y, z.
    pub max_groups: [u32; 3],
    /// Push constants in bytes.
    pub max_push_bytes: u32,
    /// One allocation of memory in bytes.
    pub max_allocation_bytes: u64,
    /// One buffer in bytes.
    pub max_buffer_bytes: u64,
    /// 16-bit loads and stores.
    pub storage_16: bool,
    /// 8-bit loads and stores.
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
    /// Scalar block layout.
    pub scalar_block_layout: bool,
    /// Device scope in the Vulkan memory model (atomics between workgroups with ordering).
    pub device_scope: bool,
    /// `VK_KHR_cooperative_matrix`.
    pub cooperative_matrix: bool,
    /// The shapes that subgroups can multiply; empty without cooperative matrices.
    pub matrix_shapes: Vec<MatrixShape>,
    /// `VK_NV_cooperative_matrix2`: every feature that our variants use.
    pub cooperative_matrix2: bool,
    /// `VK_KHR_shader_bfloat16`: the type, and in cooperative matrices where these are there.
    pub bfloat16: bool,
    /// `VK_EXT_memory_budget`.
    pub memory_budget: bool,
    /// Calibrated timestamps against the host's monotonic clock.
    pub calibrated_timestamps: bool,
    /// Query pools may be reset by the host.
    pub host_query_reset: bool,
    /// Nanoseconds of one timestamp tick.
    pub timestamp_period_ns: f32,
    /// Valid bits of a timestamp on the compute queue; 0 where it has none.
    pub timestamp_bits: u32,
    /// The device and the host share their memory: every heap is device-local, or it is a CPU.
    pub unified_memory: bool,
    /// The host can map all of the device's memory.
    pub bar: bool,
    /// Streaming multiprocessors, where `VK_NV_shader_sm_builtins` tells.
    pub sm_count: Option<u32>,
}

impl Capabilities {
    /// The names of the optional features that are there, and so used.
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
            (self.scalar_block_layout, "scalar_block_layout"),
            (self.device_scope, "memory_model_device_scope"),
            (self.cooperative_matrix, "cooperative_matrix"),
            (self.cooperative_matrix2, "cooperative_matrix2"),
            (self.bfloat16, "bfloat16"),
            (self.memory_budget, "memory_budget"),
            (self.calibrated_timestamps, "calibrated_timestamps"),
            (self.timestamp_bits > 0, "timestamps"),
            (self.bar, "resizable_bar"),
        ]
        .into_iter()
        .filter_map(|(there, name)| there.then_some(name))
        .collect()
    }
}

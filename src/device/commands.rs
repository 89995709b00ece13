//! Command buffers that are recorded once and submitted many times. Not here: where a barrier is needed (`kernels`
//! derives that).

use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use crate::device::pipeline::Pipeline;
use crate::device::point::Role;
use crate::device::ptx::Program;
use crate::device::queries::Queries;
use ash::vk;
use std::sync::Arc;

/// A recorded command buffer; clones share it. It may be pending in several submissions at once. It keeps its pipelines,
/// programs and query pools alive; the buffers that it uses are kept alive by their owner.
#[derive(Clone)]
pub struct Commands(Arc<Inner>);

struct Inner {
    raw: vk::CommandBuffer,
    pool: vk::CommandPool,
    family: u32,
    _pipelines: Vec<Pipeline>,
    _programs: Vec<Program>,
    _queries: Vec<Queries>,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Commands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Commands").field("raw", &self.0.raw).field("family", &self.0.family).finish()
    }
}

/// Encodes commands into a [`Commands`]. Buffers and device addresses passed to it must stay valid for as long as the
/// commands are submitted; their owner in `memory` ensures that.
pub struct Encoder {
    raw: vk::CommandBuffer,
    role: Role,
    /// Whether the queue family supports dispatches; a pure copy engine does not.
    computes: bool,
    pipelines: Vec<Pipeline>,
    programs: Vec<Program>,
    queries: Vec<Queries>,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("raw", &self.raw).field("role", &self.role).finish()
    }
}

impl Commands {
    /// Records the commands that `record` encodes, for the queue of `role`.
    pub fn record(device: &Device, role: Role, record: impl FnOnce(&mut Encoder)) -> Result<Commands, DeviceError> {
        let logical = device.logical();
        let family = device.queue(role).family();
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the device was created with this queue family.
        let pool = logical.check("vkCreateCommandPool", unsafe { logical.raw.create_command_pool(&info, None) })?;
        // From here on `inner` owns the pool: on any error, dropping it destroys the pool and everything allocated from
        // it.
        let mut inner = Inner {
            raw: vk::CommandBuffer::null(),
            pool,
            family,
            _pipelines: Vec::new(),
            _programs: Vec::new(),
            _queries: Vec::new(),
            logical: logical.clone(),
        };
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: the pool is new and only this thread uses it.
        let buffers = unsafe { logical.raw.allocate_command_buffers(&info) };
        inner.raw = logical.check("vkAllocateCommandBuffers", buffers)?[0];
        inner.record(device, role, record)?;
        Ok(Commands(Arc::new(inner)))
    }

    /// Records new commands into the memory of `self`. If a clone or a queue still holds the old commands, records into
    /// new memory instead; [`crate::device::Queue::collect`] releases finished submissions.
    pub fn record_again(
        mut self,
        device: &Device,
        role: Role,
        record: impl FnOnce(&mut Encoder),
    ) -> Result<Commands, DeviceError> {
        let logical = device.logical();
        self.assert_for(logical, device.queue(role).family());
        let Some(inner) = Arc::get_mut(&mut self.0) else {
            return Commands::record(device, role, record);
        };
        let flags = vk::CommandPoolResetFlags::empty();
        // SAFETY: a queue holds a clone until the submission's value is reached, and `get_mut` showed that no clone
        // exists, so the only command buffer of the pool is not pending.
        let reset = unsafe { logical.raw.reset_command_pool(inner.pool, flags) };
        logical.check("vkResetCommandPool", reset)?;
        inner.record(device, role, record)?;
        Ok(self)
    }

    pub(super) fn raw(&self) -> vk::CommandBuffer {
        self.0.raw
    }

    pub(super) fn assert_for(&self, logical: &Arc<Logical>, family: u32) {
        assert!(Arc::ptr_eq(&self.0.logical, logical), "commands of another device");
        assert_eq!(self.0.family, family, "commands of another queue family");
    }
}

impl Inner {
    /// Records into the command buffer, which must be new or reset.
    fn record(&mut self, device: &Device, role: Role, record: impl FnOnce(&mut Encoder)) -> Result<(), DeviceError> {
        let logical = device.logical();
        let family = self.family;
        let info = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::SIMULTANEOUS_USE);
        // SAFETY: the command buffer is new or reset, and only this thread uses it.
        logical.check("vkBeginCommandBuffer", unsafe { logical.raw.begin_command_buffer(self.raw, &info) })?;
        let computes = device.adapter().queue_families.iter().any(|f| f.index == family && f.compute());
        let mut encoder = Encoder {
            raw: self.raw,
            role,
            computes,
            pipelines: Vec::new(),
            programs: Vec::new(),
            queries: Vec::new(),
            logical: logical.clone(),
        };
        record(&mut encoder);
        self._pipelines = encoder.pipelines;
        self._programs = encoder.programs;
        self._queries = encoder.queries;
        // SAFETY: this thread is recording the command buffer.
        logical.check("vkEndCommandBuffer", unsafe { logical.raw.end_command_buffer(self.raw) })?;
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: a queue holds a clone until the submission's value is reached, so the command buffer is not pending.
        // The pool belongs to `self` alone.
        unsafe { self.logical.raw.destroy_command_pool(self.pool, None) };
    }
}

const STORAGE: vk::AccessFlags2 = vk::AccessFlags2::from_raw(
    vk::AccessFlags2::SHADER_STORAGE_READ.as_raw() | vk::AccessFlags2::SHADER_STORAGE_WRITE.as_raw(),
);
const COPIES: vk::AccessFlags2 =
    vk::AccessFlags2::from_raw(vk::AccessFlags2::TRANSFER_READ.as_raw() | vk::AccessFlags2::TRANSFER_WRITE.as_raw());

impl Encoder {
    /// The role whose queue the commands are recorded for.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Sets the name that the validation layer and debuggers show for the commands.
    pub fn name(&mut self, name: &str) {
        self.logical.name(self.raw, name);
    }

    /// Binds a pipeline for the commands that follow.
    pub fn bind(&mut self, pipeline: &Pipeline) {
        pipeline.assert_of(&self.logical);
        // SAFETY: the command buffer is being recorded. The pipeline is of this device, and the commands keep it alive.
        unsafe {
            self.logical.raw.cmd_bind_pipeline(self.raw, vk::PipelineBindPoint::COMPUTE, pipeline.raw());
        }
        self.pipelines.push(pipeline.clone());
    }

    fn bound(&self) -> &Pipeline {
        self.pipelines.last().expect("a pipeline is bound before it is used")
    }

    /// Sets the bound pipeline's push constants, starting at offset 0.
    ///
    /// # Panics
    /// If no pipeline is bound, if `bytes` is longer than the pipeline's push constants, or if its length is not a
    /// multiple of 4.
    pub fn push(&mut self, bytes: &[u8]) {
        let pipeline = self.bound();
        let room = pipeline.push_bytes();
        assert!(
            bytes.len() <= room as usize && bytes.len().is_multiple_of(4),
            "{} bytes of push constants for \"{}\", which has {room}",
            bytes.len(),
            pipeline.name()
        );
        if bytes.is_empty() {
            return;
        }
        // SAFETY: the command buffer is being recorded. The range lies within the pipeline layout's range, checked
        // above.
        unsafe {
            self.logical.raw.cmd_push_constants(self.raw, pipeline.layout(), vk::ShaderStageFlags::COMPUTE, 0, bytes);
        }
    }

    /// Dispatches the bound pipeline on `groups` workgroups in x, y and z.
    ///
    /// # Panics
    /// If no pipeline is bound, or if `groups` exceeds the device's limit.
    pub fn dispatch(&mut self, groups: [u32; 3]) {
        let limit = self.logical.adapter.capabilities.max_groups;
        let name = self.bound().name();
        assert!(
            groups.iter().zip(&limit).all(|(n, max)| n <= max),
            "\"{name}\" on {groups:?} workgroups, the device has {limit:?}"
        );
        // SAFETY: the command buffer is being recorded. A pipeline is bound, and the counts are within the device's
        // limits.
        unsafe { self.logical.raw.cmd_dispatch(self.raw, groups[0], groups[1], groups[2]) };
    }

    /// Launches a program on `groups` workgroups in x, y and z, with the argument block `args`. Barriers treat it as a
    /// dispatch. The bound pipeline and its push constants stay.
    ///
    /// # Panics
    /// If the role is not compute, or [`Program`]'s argument block has another size.
    pub fn launch(&mut self, program: &Program, groups: [u32; 3], args: &[u8]) {
        assert!(self.role == Role::Compute, "programs are launched on the compute queue");
        // SAFETY: the command buffer is being recorded, for the compute role.
        unsafe { program.record(self.raw, &self.logical, groups, args) };
        self.programs.push(program.clone());
    }

    /// Dispatches the bound pipeline on a number of workgroups that is read from the buffer when the command executes:
    /// three 32-bit words at `offset`, a multiple of 4.
    pub fn dispatch_indirect(&mut self, buffer: vk::Buffer, offset: u64) {
        assert!(offset.is_multiple_of(4), "indirect dispatch at offset {offset}, not a multiple of 4");
        let _ = self.bound();
        // SAFETY: the command buffer is being recorded and a pipeline is bound. The buffer's owner keeps it alive (see
        // [`Encoder`]).
        unsafe { self.logical.raw.cmd_dispatch_indirect(self.raw, buffer, offset) };
    }

    /// Orders dispatches: later dispatches see what earlier ones stored and may overwrite it. This is the cheapest
    /// barrier; it covers neither copies, indirect reads nor the host.
    pub fn barrier_compute(&mut self) {
        let stage = vk::PipelineStageFlags2::COMPUTE_SHADER;
        self.barrier(stage, STORAGE, stage, STORAGE);
    }

    /// Orders everything: later dispatches, copies, indirect reads and host reads see what earlier dispatches, copies
    /// and host writes wrote.
    pub fn barrier_full(&mut self) {
        let (stages, access) = self.device_scope();
        let (host, host_access) =
            (vk::PipelineStageFlags2::HOST, vk::AccessFlags2::HOST_READ | vk::AccessFlags2::HOST_WRITE);
        let (indirect, indirect_access) = if self.computes {
            (vk::PipelineStageFlags2::DRAW_INDIRECT, vk::AccessFlags2::INDIRECT_COMMAND_READ)
        } else {
            (vk::PipelineStageFlags2::NONE, vk::AccessFlags2::NONE)
        };
        self.barrier(
            stages | host,
            access | vk::AccessFlags2::HOST_WRITE,
            stages | host | indirect,
            access | host_access | indirect_access,
        );
    }

    /// Makes the writes of earlier dispatches and copies visible to the host once a later point is reached. Use it at
    /// the end of commands whose results the host reads.
    pub fn barrier_host(&mut self) {
        let (stages, access) = self.device_scope();
        self.barrier(stages, access, vk::PipelineStageFlags2::HOST, vk::AccessFlags2::HOST_READ);
    }

    fn device_scope(&self) -> (vk::PipelineStageFlags2, vk::AccessFlags2) {
        if self.computes {
            (vk::PipelineStageFlags2::COMPUTE_SHADER | vk::PipelineStageFlags2::ALL_TRANSFER, STORAGE | COPIES)
        } else {
            (vk::PipelineStageFlags2::ALL_TRANSFER, COPIES)
        }
    }

    fn barrier(
        &mut self,
        src_stage: vk::PipelineStageFlags2,
        src_access: vk::AccessFlags2,
        dst_stage: vk::PipelineStageFlags2,
        dst_access: vk::AccessFlags2,
    ) {
        let barriers = [vk::MemoryBarrier2::default()
            .src_stage_mask(src_stage)
            .src_access_mask(src_access)
            .dst_stage_mask(dst_stage)
            .dst_access_mask(dst_access)];
        let info = vk::DependencyInfo::default().memory_barriers(&barriers);
        // SAFETY: the command buffer is being recorded. The queue family supports these stages (see `device_scope`).
        unsafe { self.logical.raw.cmd_pipeline_barrier2(self.raw, &info) };
    }

    /// Copies `bytes` bytes between buffers. The ranges must not overlap within one buffer.
    pub fn copy(&mut self, source: vk::Buffer, source_offset: u64, target: vk::Buffer, target_offset: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let region = [vk::BufferCopy { src_offset: source_offset, dst_offset: target_offset, size: bytes }];
        // SAFETY: the command buffer is being recorded. The buffers' owner keeps them alive and ensures their sizes
        // (see [`Encoder`]).
        unsafe { self.logical.raw.cmd_copy_buffer(self.raw, source, target, &region) };
    }

    /// Fills a range with a repeated 32-bit word. `offset` and `bytes` must be multiples of 4.
    pub fn fill(&mut self, target: vk::Buffer, offset: u64, bytes: u64, word: u32) {
        assert!(
            offset.is_multiple_of(4) && bytes.is_multiple_of(4),
            "fill of {bytes} bytes at offset {offset}, not multiples of 4"
        );
        if bytes == 0 {
            return;
        }
        // SAFETY: the command buffer is being recorded. The buffer's owner keeps it alive and ensures its size (see
        // [`Encoder`]).
        unsafe { self.logical.raw.cmd_fill_buffer(self.raw, target, offset, bytes, word) };
    }

    /// Resets `count` timestamps from `first` on, in command order, so that they can be written again.
    ///
    /// # Panics
    /// If the queue family has no compute support: a transfer-only queue cannot reset queries.
    pub fn reset(&mut self, queries: &Queries, first: u32, count: u32) {
        queries.assert_of(&self.logical);
        queries.assert_has(first, count);
        assert!(self.computes, "a copy engine cannot reset timestamps");
        // SAFETY: the command buffer is being recorded. The range lies in the pool, and the commands keep the pool
        // alive.
        unsafe { self.logical.raw.cmd_reset_query_pool(self.raw, queries.raw(), first, count) };
        self.keep(queries);
    }

    /// Writes a timestamp once all earlier commands have finished.
    ///
    /// # Panics
    /// If the role's queue has no timestamps, or if the pool has no such index.
    pub fn timestamp(&mut self, queries: &Queries, index: u32) {
        queries.assert_of(&self.logical);
        queries.assert_has(index, 1);
        assert!(self.logical.timestamp_bits(self.role) > 0, "the {} queue has no timestamps", self.role);
        // SAFETY: the command buffer is being recorded. The query is in the pool, and the commands keep the pool alive.
        unsafe {
            self.logical.raw.cmd_write_timestamp2(
                self.raw,
                vk::PipelineStageFlags2::ALL_COMMANDS,
                queries.raw(),
                index,
            );
        }
        self.keep(queries);
    }

    fn keep(&mut self, queries: &Queries) {
        if !self.queries.iter().any(|q| q.raw() == queries.raw()) {
            self.queries.push(queries.clone());
        }
    }
}

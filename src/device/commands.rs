//! Command buffers that are recorded once and submitted many times. Deliberately absent:
//! when a barrier is needed (`kernels` derives that).

use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use crate::device::pipeline::Pipeline;
use crate::device::point::Role;
use crate::device::queries::Queries;
use ash::vk;
use std::sync::Arc;

/// A recorded command buffer; clones share it. It may be in flight many times at once. It
/// keeps its pipelines and query pools; its buffers are kept by their owner.
#[derive(Clone)]
pub struct Commands(Arc<Inner>);

struct Inner {
    raw: vk::CommandBuffer,
    pool: vk::CommandPool,
    family: u32,
    _pipelines: Vec<Pipeline>,
    _queries: Vec<Queries>,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Commands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Commands").field("raw", &self.0.raw).field("family", &self.0.family).finish()
    }
}

/// Writes commands into a [`Commands`]. Buffers and addresses given to it must stay valid for
/// as long as the commands are submitted: their owner in `memory` sees to that.
pub struct Encoder {
    raw: vk::CommandBuffer,
    role: Role,
    /// The family has dispatches; a copy engine has none.
    computes: bool,
    pipelines: Vec<Pipeline>,
    queries: Vec<Queries>,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("raw", &self.raw).field("role", &self.role).finish()
    }
}

impl Commands {
    /// Records what `record` encodes, for the queue of `role`.
    pub fn record(device: &Device, role: Role, record: impl FnOnce(&mut Encoder)) -> Result<Commands, DeviceError> {
        let logical = device.logical();
        let family = device.queue(role).family();
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the family is one that the device was made with.
        let pool = logical.check("vkCreateCommandPool", unsafe { logical.raw.create_command_pool(&info, None) })?;
        // From here the pool is owned, and goes with everything in it on any error.
        let mut inner = Inner {
            raw: vk::CommandBuffer::null(),
            pool,
            family,
            _pipelines: Vec::new(),
            _queries: Vec::new(),
            logical: logical.clone(),
        };
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: the pool is new and used by this thread alone.
        let buffers = unsafe { logical.raw.allocate_command_buffers(&info) };
        inner.raw = logical.check("vkAllocateCommandBuffers", buffers)?[0];
        inner.record(device, role, record)?;
        Ok(Commands(Arc::new(inner)))
    }

    /// Records anew into these commands' memory, or into new memory where a clone or a queue
    /// still holds them ([`crate::device::Queue::collect`] lets go of finished ones).
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
        // SAFETY: a queue holds a clone until the submission's value is reached, and there is
        // none (`get_mut`), so the only buffer of the pool is not pending.
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
    /// Records into the buffer, which is new or reset.
    fn record(&mut self, device: &Device, role: Role, record: impl FnOnce(&mut Encoder)) -> Result<(), DeviceError> {
        let logical = device.logical();
        let family = self.family;
        let info = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::SIMULTANEOUS_USE);
        // SAFETY: the buffer is new or reset, and used by this thread alone.
        logical.check("vkBeginCommandBuffer", unsafe { logical.raw.begin_command_buffer(self.raw, &info) })?;
        let computes = device.adapter().queue_families.iter().any(|f| f.index == family && f.compute());
        let mut encoder = Encoder {
            raw: self.raw,
            role,
            computes,
            pipelines: Vec::new(),
            queries: Vec::new(),
            logical: logical.clone(),
        };
        record(&mut encoder);
        self._pipelines = encoder.pipelines;
        self._queries = encoder.queries;
        // SAFETY: the buffer is being recorded by this thread.
        logical.check("vkEndCommandBuffer", unsafe { logical.raw.end_command_buffer(self.raw) })?;
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: queues hold clones until the submission's value is reached, so the buffer is
        // not pending; nobody else has the pool.
        unsafe { self.logical.raw.destroy_command_pool(self.pool, None) };
    }
}

const STORAGE: vk::AccessFlags2 = vk::AccessFlags2::from_raw(
    vk::AccessFlags2::SHADER_STORAGE_READ.as_raw() | vk::AccessFlags2::SHADER_STORAGE_WRITE.as_raw(),
);
const COPIES: vk::AccessFlags2 =
    vk::AccessFlags2::from_raw(vk::AccessFlags2::TRANSFER_READ.as_raw() | vk::AccessFlags2::TRANSFER_WRITE.as_raw());

impl Encoder {
    /// The role that it records for.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Names the commands for the validation layer and debuggers.
    pub fn name(&mut self, name: &str) {
        self.logical.name(self.raw, name);
    }

    /// Uses a pipeline from here on.
    pub fn bind(&mut self, pipeline: &Pipeline) {
        pipeline.assert_of(&self.logical);
        // SAFETY: recording; the pipeline is of this device and kept with the commands.
        unsafe {
            self.logical.raw.cmd_bind_pipeline(self.raw, vk::PipelineBindPoint::COMPUTE, pipeline.raw());
        }
        self.pipelines.push(pipeline.clone());
    }

    fn bound(&self) -> &Pipeline {
        self.pipelines.last().expect("a pipeline is bound before it is used")
    }

    /// Sets the bound pipeline's push constants from their start.
    ///
    /// # Panics
    /// Without a pipeline, or with more bytes than it declares or not a multiple of 4.
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
        // SAFETY: recording; the range lies in the layout's, checked above.
        unsafe {
            self.logical.raw.cmd_push_constants(self.raw, pipeline.layout(), vk::ShaderStageFlags::COMPUTE, 0, bytes);
        }
    }

    /// Runs the bound pipeline on that many workgroups.
    ///
    /// # Panics
    /// Without a pipeline or beyond the device's limit.
    pub fn dispatch(&mut self, groups: [u32; 3]) {
        let limit = self.logical.adapter.capabilities.max_groups;
        let name = self.bound().name();
        assert!(
            groups.iter().zip(&limit).all(|(n, max)| n <= max),
            "\"{name}\" on {groups:?} workgroups, the device has {limit:?}"
        );
        // SAFETY: recording; a pipeline is bound and the counts are within the limits.
        unsafe { self.logical.raw.cmd_dispatch(self.raw, groups[0], groups[1], groups[2]) };
    }

    /// Runs the bound pipeline on as many workgroups as three words in a buffer say.
    pub fn dispatch_indirect(&mut self, buffer: vk::Buffer, offset: u64) {
        assert!(offset.is_multiple_of(4), "indirect dispatch at offset {offset}, not a multiple of 4");
        let _ = self.bound();
        // SAFETY: recording; a pipeline is bound; the buffer's owner keeps it (type's rule).
        unsafe { self.logical.raw.cmd_dispatch_indirect(self.raw, buffer, offset) };
    }

    /// What dispatches before it stored, dispatches after it read and overwrite. Nothing else:
    /// this is the cheap one.
    pub fn barrier_compute(&mut self) {
        let stage = vk::PipelineStageFlags2::COMPUTE_SHADER;
        self.barrier(stage, STORAGE, stage, STORAGE);
    }

    /// Everything before it, by dispatch, copy or host, is seen by every dispatch, copy,
    /// indirect read and host read after it.
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

    /// What dispatches and copies before it wrote is seen by the host once a point after it is
    /// reached. Belongs at the end of what the host reads back.
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
        // SAFETY: recording; the stages are those of the queue family (`device_scope`).
        unsafe { self.logical.raw.cmd_pipeline_barrier2(self.raw, &info) };
    }

    /// Copies `bytes` between buffers; between overlapping ranges of one buffer it must not be.
    pub fn copy(&mut self, source: vk::Buffer, source_offset: u64, target: vk::Buffer, target_offset: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let region = [vk::BufferCopy { src_offset: source_offset, dst_offset: target_offset, size: bytes }];
        // SAFETY: recording; the buffers' owner keeps them and their sizes (type's rule).
        unsafe { self.logical.raw.cmd_copy_buffer(self.raw, source, target, &region) };
    }

    /// Fills a range with a repeated word; offset and length are multiples of 4.
    pub fn fill(&mut self, target: vk::Buffer, offset: u64, bytes: u64, word: u32) {
        assert!(
            offset.is_multiple_of(4) && bytes.is_multiple_of(4),
            "fill of {bytes} bytes at offset {offset}, not multiples of 4"
        );
        if bytes == 0 {
            return;
        }
        // SAFETY: recording; the buffer's owner keeps it and its size (type's rule).
        unsafe { self.logical.raw.cmd_fill_buffer(self.raw, target, offset, bytes, word) };
    }

    /// Makes timestamps ready to be written again, in the order of the commands.
    ///
    /// # Panics
    /// For a copy engine's commands, which can't.
    pub fn reset(&mut self, queries: &Queries, first: u32, count: u32) {
        queries.assert_of(&self.logical);
        queries.assert_has(first, count);
        assert!(self.computes, "a copy engine cannot reset timestamps");
        // SAFETY: recording; the range lies in the pool; the pool is kept with the commands.
        unsafe { self.logical.raw.cmd_reset_query_pool(self.raw, queries.raw(), first, count) };
        self.keep(queries);
    }

    /// Writes the time at which everything before it has finished.
    ///
    /// # Panics
    /// Where the role's queue has no timestamps or the pool no such index.
    pub fn timestamp(&mut self, queries: &Queries, index: u32) {
        queries.assert_of(&self.logical);
        queries.assert_has(index, 1);
        assert!(self.logical.timestamp_bits(self.role) > 0, "the {} queue has no timestamps", self.role);
        // SAFETY: recording; the query is in the pool; the pool is kept with the commands.
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

//! Buffers: their allocation, host access and release. This is the only file of `memory` with `unsafe` code, so it also
//! contains the memory map of a file for [`super::file`].
//! Not here: the content of a buffer, and commands that fill one. New memory has undefined content; the transfer actor
//! clears it where zeros are needed.
#![allow(unsafe_code)]

use super::MemoryError;
use super::place::{Place, choose};
use super::plan::{MemoryLimits, default_reserve};
use crate::device::{AdapterKind, Device, Point, Role};
use ash::vk;
use gpu_allocator::vulkan::{Allocation, AllocationCreateDesc, AllocationScheme, Allocator, AllocatorCreateDesc};
use gpu_allocator::{AllocationSizes, AllocatorDebugSettings, MemoryLocation};
use std::fmt;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The size of the device-memory blocks that small buffers share.
const DEVICE_BLOCK_BYTES: u64 = 64 << 20;
/// The size of the host-visible memory blocks that small buffers share.
const HOST_BLOCK_BYTES: u64 = 16 << 20;
/// Buffers of at least this size get a dedicated allocation, so that no block is left with a large hole. Every driver
/// allows at least 4,096 allocations, which is enough for many models.
const DEDICATED_BYTES: u64 = 8 << 20;
/// The minimum alignment of every buffer, also if the driver requires less: kernels load 16 bytes at a time, and a
/// cache line has 128 bytes.
const ALIGNMENT: u64 = 256;
/// How long dropping a buffer waits for the device's last use of it while the queue makes no progress; on a CPU driver
/// the wait is unlimited. After that the device is considered broken, and the memory is leaked rather than freed while
/// the device may use it.
const LAST_USE_WAIT: Duration = Duration::from_secs(20);

/// The allocator of a device's buffers. Clones share it; it lives until its last buffer is dropped.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    // The field order matters: the allocator must free its blocks before the device is destroyed.
    allocator: Mutex<Allocator>,
    types: Vec<vk::MemoryType>,
    /// Set when the device did not finish with a buffer in time; later drops do not wait again.
    stuck: AtomicBool,
    device: Arc<Device>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("device", &self.0.name()).field("use", &self.usage()).finish()
    }
}

/// The memory that an arena uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The bytes of live buffers, including alignment.
    pub buffers_bytes: u64,
    /// The bytes allocated from the driver for them.
    pub reserved_bytes: u64,
}

impl Arena {
    /// Creates an empty arena on a device.
    pub fn new(device: &Arc<Device>) -> Result<Arena, MemoryError> {
        let allocator = Allocator::new(&AllocatorCreateDesc {
            instance: device.instance().raw().clone(),
            device: device.raw().clone(),
            physical_device: device.physical(),
            // The only leaks are those that `Buffer` makes on purpose and logs itself.
            debug_settings: {
                let mut settings = AllocatorDebugSettings::default();
                settings.log_leaks_on_shutdown = false;
                settings
            },
            buffer_device_address: true,
            allocation_sizes: AllocationSizes::new(DEVICE_BLOCK_BYTES, HOST_BLOCK_BYTES),
        })
        .map_err(|source| MemoryError::Allocator { name: "arena".to_owned(), source })?;
        // SAFETY: the physical device belongs to this instance, which the device keeps alive.
        let properties = unsafe { device.instance().raw().get_physical_device_memory_properties(device.physical()) };
        let types = properties.memory_types_as_slice().to_vec();
        Ok(Arena(Arc::new(Inner {
            allocator: Mutex::new(allocator),
            types,
            stuck: AtomicBool::new(false),
            device: device.clone(),
        })))
    }

    /// The device that the memory is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    /// Allocates a buffer of `bytes` bytes (at least 1). A buffer is never split: more than the driver's largest
    /// allocation is an error that names both numbers. On a discrete GPU, [`Place::DeviceLocal`] is device-local memory
    /// or an error.
    pub fn buffer(&self, name: &str, bytes: u64, place: Place) -> Result<Arc<Buffer>, MemoryError> {
        let host_access = !matches!(place, Place::DeviceLocal);
        self.0.create(name, bytes, place, host_access).map(|(buffer, _)| buffer)
    }

    /// Allocates a host-visible buffer of `count × bytes_each` bytes that the host accesses only through the returned
    /// slices. The owner of a slice has exclusive host access to its bytes; the buffer itself has no host access.
    /// [`super::StagingRing`] ensures that device and host do not use a slice at the same time.
    pub fn sliced(
        &self,
        name: &str,
        bytes_each: usize,
        count: usize,
        place: Place,
    ) -> Result<(Arc<Buffer>, Vec<HostSlice>), MemoryError> {
        assert!(place != Place::DeviceLocal, "slices are for the host");
        assert!(bytes_each > 0 && count > 0, "slices have bytes");
        let (buffer, base) = self.0.create(name, (bytes_each * count) as u64, place, false)?;
        let base = base.expect("host-visible memory is mapped, `create` checks it");
        let slices = (0..count)
            .map(|i| HostSlice {
                // SAFETY: `i * bytes_each` is inside the buffer, whose mapping is `base`.
                start: HostPointer(unsafe { base.0.add(i * bytes_each) }),
                offset: (i * bytes_each) as u64,
                bytes: bytes_each,
                buffer: buffer.clone(),
            })
            .collect();
        Ok((buffer, slices))
    }

    /// Returns the limits that a plan is compared with: the driver's current budget and the operator's limit.
    pub fn limits(&self, limit_bytes: Option<u64>) -> MemoryLimits {
        let (budget, adapter) = (self.0.device.budget(), self.0.device.adapter());
        MemoryLimits {
            device: adapter.name.clone(),
            free_bytes: budget.free_bytes(),
            total_bytes: budget.heap_bytes,
            limit_bytes,
            max_allocation_bytes: adapter.capabilities.max_allocation_bytes,
            unified: adapter.capabilities.unified_memory,
            reserve_bytes: default_reserve(budget.heap_bytes),
        }
    }

    /// Returns the memory in use.
    pub fn usage(&self) -> Usage {
        let allocator = self.0.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        let report = allocator.generate_report();
        Usage { buffers_bytes: report.total_allocated_bytes, reserved_bytes: report.total_capacity_bytes }
    }
}

impl Inner {
    fn name(&self) -> &str {
        &self.device.adapter().name
    }

    /// Creates a buffer and returns it with its mapping if `place` is host-visible. The buffer itself keeps the mapping
    /// only with `host_access`.
    fn create(
        self: &Arc<Inner>,
        name: &str,
        bytes: u64,
        place: Place,
        host_access: bool,
    ) -> Result<(Arc<Buffer>, Option<HostPointer>), MemoryError> {
        assert!(bytes > 0, "buffer {name:?} has no bytes");
        let adapter = self.device.adapter();
        let allowed = adapter.capabilities.max_allocation_bytes;
        if bytes > allowed {
            let (name, device) = (name.to_owned(), adapter.name.clone());
            return Err(MemoryError::TooLarge { name, asked: bytes, allowed, device });
        }
        // A multiple of 16 bytes, so that fills and vector loads may access the last 16-byte word as a whole.
        let raw = self.device.create_buffer(bytes.next_multiple_of(16), name)?;
        let destroy = |error: MemoryError| {
            // SAFETY: the buffer was just created from this device, and no command uses it.
            unsafe { self.device.destroy_buffer(raw) };
            error
        };
        // SAFETY: `raw` is a live buffer of this device.
        let mut requirements = unsafe { self.device.raw().get_buffer_memory_requirements(raw) };
        requirements.alignment = requirements.alignment.max(ALIGNMENT);
        let must_be_local = adapter.kind == AdapterKind::Discrete;
        let Some(chosen) = choose(&self.types, requirements.memory_type_bits, place, must_be_local) else {
            let (name, device) = (name.to_owned(), adapter.name.clone());
            return Err(destroy(MemoryError::NoMemoryType { name, place, device }));
        };
        // Restricts the allocator to the chosen memory type.
        requirements.memory_type_bits = 1 << chosen;
        let desc = AllocationCreateDesc {
            name,
            requirements,
            location: MemoryLocation::Unknown,
            linear: true,
            allocation_scheme: if requirements.size >= DEDICATED_BYTES {
                AllocationScheme::DedicatedBuffer(raw)
            } else {
                AllocationScheme::GpuAllocatorManaged
            },
        };
        let mut allocator = self.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        let allocation = match allocator.allocate(&desc) {
            Ok(allocation) => allocation,
            Err(source) => {
                drop(allocator);
                return Err(destroy(self.failed_allocation(name, requirements.size, place, source)));
            }
        };
        drop(allocator);
        let mapped = allocation.mapped_ptr().map(|p| HostPointer(p.cast()));
        // From here on dropping `buffer` frees the Vulkan buffer and the allocation, also on the error paths.
        let mut buffer = Buffer {
            name: name.to_owned(),
            raw,
            address: 0,
            bytes,
            device_local: self.types[chosen].property_flags.contains(vk::MemoryPropertyFlags::DEVICE_LOCAL),
            host: mapped.filter(|_| host_access),
            last_use: [AtomicU64::new(0), AtomicU64::new(0)],
            last_write: [AtomicU64::new(0), AtomicU64::new(0)],
            allocation: ManuallyDrop::new(allocation),
            arena: self.clone(),
        };
        // SAFETY: buffer and memory belong to this device and neither is bound yet. The allocator reserved the range
        // for this buffer, with the size and alignment that the requirements state.
        unsafe { self.device.raw().bind_buffer_memory(raw, buffer.allocation.memory(), buffer.allocation.offset()) }
            .map_err(|source| MemoryError::Bind { name: name.to_owned(), source })?;
        let info = vk::BufferDeviceAddressInfo::default().buffer(raw);
        // SAFETY: `create_buffer` sets SHADER_DEVICE_ADDRESS, the allocator sets DEVICE_ADDRESS for the memory, and the
        // buffer is bound.
        buffer.address = unsafe { self.device.raw().get_buffer_device_address(&info) };
        if place != Place::DeviceLocal && mapped.is_none() {
            let (name, device) = (name.to_owned(), adapter.name.clone());
            return Err(MemoryError::NoMemoryType { name, place, device });
        }
        Ok((Arc::new(buffer), mapped))
    }

    fn failed_allocation(
        &self,
        name: &str,
        asked: u64,
        place: Place,
        source: gpu_allocator::AllocationError,
    ) -> MemoryError {
        let name = name.to_owned();
        match source {
            gpu_allocator::AllocationError::OutOfMemory => MemoryError::OutOfMemory {
                name,
                asked,
                place,
                free: self.device.budget().free_bytes(),
                device: self.name().to_owned(),
            },
            source => MemoryError::Allocator { name, source },
        }
    }
}

/// A pointer into mapped memory, which stays mapped as long as the buffer's memory lives.
#[derive(Clone, Copy)]
struct HostPointer(NonNull<u8>);

// SAFETY: the memory is not bound to a thread. `Buffer` accesses it only atomically, apart from `load_quads` and
// `store_quads`, whose accesses are volatile, each of one aligned instruction, as of a word that a device writes meanwhile;
// a `HostSlice` is the only owner of its part.
unsafe impl Send for HostPointer {}
// SAFETY: as above.
unsafe impl Sync for HostPointer {}

/// A named buffer with its memory. Dropping it waits for the device's last use, then frees the memory.
///
/// Host accesses are bounds-checked. An access outside the buffer, or any access to a buffer without host access, is a
/// bug of the caller and panics.
pub struct Buffer {
    name: String,
    raw: vk::Buffer,
    address: u64,
    bytes: u64,
    device_local: bool,
    host: Option<HostPointer>,
    /// By role: the value of the last submission that uses the buffer. Set by the code that submits copies, and by a
    /// kernel region when it is dropped.
    last_use: [AtomicU64; 2],
    /// By role: the value of the last submission that writes the buffer. Set in the same places.
    last_write: [AtomicU64; 2],
    /// Moved out by `drop` only.
    allocation: ManuallyDrop<Allocation>,
    arena: Arc<Inner>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("name", &self.name)
            .field("bytes", &self.bytes)
            .field("address", &format_args!("{:#x}", self.address))
            .field("host", &self.host.is_some())
            .finish()
    }
}

impl Buffer {
    /// The buffer's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The Vulkan handle, for commands.
    pub fn raw(&self) -> vk::Buffer {
        self.raw
    }

    /// The device address of the first byte; at least a multiple of 16.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the buffer is in device-local memory.
    pub fn device_local(&self) -> bool {
        self.device_local
    }

    /// Whether `read`, `write`, `load_u32` and `store_u32` may be called.
    pub fn host_visible(&self) -> bool {
        self.host.is_some()
    }

    /// Records that the submission with this point reads the buffer.
    pub fn mark_read(&self, point: Point) {
        self.last_use[point.role.index()].fetch_max(point.value, Ordering::AcqRel);
    }

    /// Records that the submission with this point writes the buffer.
    pub fn mark_written(&self, point: Point) {
        self.last_write[point.role.index()].fetch_max(point.value, Ordering::AcqRel);
        self.mark_read(point);
    }

    /// Returns the points of the last submissions that read or write the buffer, at most one per role.
    pub fn last_use(&self) -> impl Iterator<Item = Point> + use<> {
        points(&self.last_use)
    }

    /// Returns the points of the last submissions that write the buffer, at most one per role. A readback waits for
    /// them.
    pub fn last_write(&self) -> impl Iterator<Item = Point> + use<> {
        points(&self.last_write)
    }

    /// Copies `data` into the buffer at `offset`. Work submitted later sees the bytes; the device must not be using the
    /// range. Each aligned 4-byte word is stored atomically.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let at = self.at(offset, data.len());
        let (head, words, tail) = split(at, data.len());
        for (i, byte) in data.iter().enumerate().take(head).chain(data.iter().enumerate().skip(data.len() - tail)) {
            // SAFETY: `at` checked that `i` is inside the mapping, which `self` keeps alive. Every host access is
            // atomic, so threads cannot race.
            unsafe { AtomicU8::from_ptr(at.add(i)) }.store(*byte, Ordering::Relaxed);
        }
        for (i, word) in data[head..].as_chunks::<4>().0.iter().enumerate().take(words) {
            // SAFETY: as above; `split` places the words at multiples of 4.
            unsafe { AtomicU32::from_ptr(at.add(head + 4 * i).cast()) }
                .store(u32::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }

    /// Copies bytes at `offset` out of the buffer: those that the device wrote in work whose point is reached, or that
    /// the host wrote. Slow for memory other than [`Place::Readback`].
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let at = self.at(offset, data.len());
        let len = data.len();
        let (head, words, tail) = split(at, len);
        let (first, last) = (0..head, len - tail..len);
        for i in first.chain(last) {
            // SAFETY: `at` checked that `i` is inside the mapping, which `self` keeps alive. Every host access is
            // atomic, so threads cannot race.
            data[i] = unsafe { AtomicU8::from_ptr(at.add(i)) }.load(Ordering::Relaxed);
        }
        for (i, word) in data[head..].as_chunks_mut::<4>().0.iter_mut().enumerate().take(words) {
            // SAFETY: as above; `split` places the words at multiples of 4.
            *word = unsafe { AtomicU32::from_ptr(at.add(head + 4 * i).cast()) }.load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    /// Stores a 32-bit word with release ordering; a running kernel or another thread may be polling it. `offset` must
    /// be a multiple of 4.
    pub fn store_u32(&self, offset: u64, value: u32) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// Loads a 32-bit word with acquire ordering; a running kernel or another thread may be writing it. `offset` must
    /// be a multiple of 4.
    pub fn load_u32(&self, offset: u64) -> u32 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Loads groups of four words, each at once where the processor can; a running kernel or another thread may be writing
    /// them, so that some may be older than others. `offset` must be a multiple of 16.
    pub fn load_quads(&self, offset: u64, quads: &mut [[u32; 4]]) {
        assert!(offset.is_multiple_of(16), "words at {offset} of {:?}", self.name);
        let at = self.at(offset, quads.len() * 16);
        for (index, quad) in quads.iter_mut().enumerate() {
            // SAFETY: `at` checks the bounds, and buffers start at multiples of 16. The mapping lives as long as `self`.
            *quad = unsafe { quad::load(at.add(16 * index)) };
        }
    }

    /// Stores groups of four words, each at once where the processor can; a running kernel or another thread may be polling
    /// them. They leave the processor's write buffers with the next sequentially consistent fence at the latest. `offset`
    /// must be a multiple of 16.
    pub fn store_quads(&self, offset: u64, quads: &[[u32; 4]]) {
        assert!(offset.is_multiple_of(16), "words at {offset} of {:?}", self.name);
        let at = self.at(offset, quads.len() * 16);
        for (index, quad) in quads.iter().enumerate() {
            // SAFETY: as in `load_quads`.
            unsafe { quad::store(at.add(16 * index), *quad) };
        }
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "word at {offset} of {:?}", self.name);
        // SAFETY: `at` checks the bounds, and buffers and words start at multiples of 4. The mapping lives as long as
        // `self`, and every host access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// Returns the host address of `len` bytes at `offset`. Panics if the range is outside the buffer or the buffer has
    /// no host access.
    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let host = self.host.unwrap_or_else(|| panic!("the host does not see {:?}", self.name));
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of {:?}, which has {}",
            self.name,
            self.bytes
        );
        // SAFETY: inside the mapping, by the assertion above.
        unsafe { host.0.add(offset as usize).as_ptr() }
    }
}

/// Splits `len` bytes at an address: returns the number of bytes before the first multiple of 4, the number of whole
/// 4-byte words from there, and the number of bytes after them.
fn split(at: *const u8, len: usize) -> (usize, usize, usize) {
    let head = (at.addr().wrapping_neg() % 4).min(len);
    (head, (len - head) / 4, (len - head) % 4)
}

fn points(values: &[AtomicU64; 2]) -> impl Iterator<Item = Point> + use<> {
    Role::ALL
        .map(|role| Point { role, value: values[role.index()].load(Ordering::Acquire) })
        .into_iter()
        .filter(|point| point.value > 0)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the value is taken only once, here; nothing reads the field afterwards.
        let allocation = unsafe { ManuallyDrop::take(&mut self.allocation) };
        for point in self.last_use() {
            let patience = if self.arena.stuck.load(Ordering::Relaxed) { Duration::ZERO } else { LAST_USE_WAIT };
            match self.arena.device.wait_while_moving(point, patience) {
                Ok(true) => {}
                Err(error) if error.is_lost() => self.arena.device.wait_stopped(),
                Ok(false) | Err(_) => {
                    self.arena.stuck.store(true, Ordering::Relaxed);
                    tracing::error!(
                        buffer = self.name,
                        bytes = self.bytes,
                        %point,
                        "memory is leaked: the device did not finish with it"
                    );
                    std::mem::forget(allocation);
                    // Keeps the memory block and the device alive, because the device may still use the buffer.
                    std::mem::forget(self.arena.clone());
                    return;
                }
            }
        }
        // SAFETY: the device has reached the last point that uses the buffer, or it is lost and has stopped (above).
        // The points cover every use: transfers mark what they submit, and each kernel region marks its buffers when it
        // is dropped, before it releases its share of them. `raw` only lends the handle, and no reference to the buffer
        // is left that could lend it again.
        unsafe { self.arena.device.destroy_buffer(self.raw) };
        let mut allocator = self.arena.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = allocator.free(allocation) {
            tracing::error!(buffer = self.name, %error, "the allocator did not take memory back");
        }
    }
}

/// A part of a buffer to which its owner has exclusive host access.
pub struct HostSlice {
    start: HostPointer,
    offset: u64,
    bytes: usize,
    buffer: Arc<Buffer>,
}

impl fmt::Debug for HostSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSlice")
            .field("buffer", &self.buffer.name)
            .field("offset", &self.offset)
            .field("bytes", &self.bytes)
            .finish()
    }
}

impl HostSlice {
    /// The buffer that contains the slice.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// The slice's offset in the buffer, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The slice's length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Always `false`: a slice has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The slice's bytes. The caller must make sure that the device is not writing them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is in the mapping, which `buffer` keeps alive. Only this slice accesses these bytes on the
        // host. The device writes them only for the actor that reads back, which waits for the point of its copy first.
        unsafe { std::slice::from_raw_parts(self.start.0.as_ptr(), self.bytes) }
    }

    /// The slice's bytes for writing. The caller must make sure that the device is not using them: a staging slot is
    /// handed out only after the point of its last copy is reached.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.0.as_ptr(), self.bytes) }
    }

    /// Copies bytes to `offset` in the slice with stores that bypass the host's caches, if the processor supports them:
    /// only the device reads the bytes, and a cache line that is written completely need not be read first. The caller
    /// has the same obligations as with [`HostSlice::bytes_mut`].
    ///
    /// # Panics
    /// If the bytes do not fit in the slice: a bug of the caller.
    pub fn stream(&mut self, offset: usize, from: &[u8]) {
        stream(&mut self.bytes_mut()[offset..][..from.len()], from);
    }
}

/// Accesses to 16 bytes of mapped memory that a device, or another thread by these functions, may access meanwhile.
#[cfg(target_arch = "x86_64")]
mod quad {
    use std::arch::x86_64::__m128i;

    /// Loads 16 bytes.
    ///
    /// # Safety
    /// `at` is a multiple of 16, and the 16 bytes from there on are mapped.
    pub(super) unsafe fn load(at: *const u8) -> [u32; 4] {
        // SAFETY: the caller keeps the address valid and aligned. A volatile load of this type is one instruction, which the
        // compiler neither repeats nor leaves out.
        bytemuck::cast(unsafe { at.cast::<__m128i>().read_volatile() })
    }

    /// Stores 16 bytes.
    ///
    /// # Safety
    /// As for `load`.
    pub(super) unsafe fn store(at: *mut u8, words: [u32; 4]) {
        let words: __m128i = bytemuck::cast(words);
        // SAFETY: as in `load`.
        unsafe { at.cast::<__m128i>().write_volatile(words) };
    }
}

/// Loads and stores of 16 bytes, word by word, on processors other than x86-64.
#[cfg(not(target_arch = "x86_64"))]
mod quad {
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Loads 16 bytes.
    ///
    /// # Safety
    /// `at` is a multiple of 16, and the 16 bytes from there on are mapped.
    pub(super) unsafe fn load(at: *const u8) -> [u32; 4] {
        // SAFETY: the caller keeps the address valid and aligned.
        std::array::from_fn(|i| unsafe { AtomicU32::from_ptr(at.cast_mut().add(4 * i).cast()) }.load(Ordering::Relaxed))
    }

    /// Stores 16 bytes.
    ///
    /// # Safety
    /// As for `load`.
    pub(super) unsafe fn store(at: *mut u8, words: [u32; 4]) {
        for (i, word) in words.into_iter().enumerate() {
            // SAFETY: as in `load`.
            unsafe { AtomicU32::from_ptr(at.add(4 * i).cast()) }.store(word, Ordering::Relaxed);
        }
    }
}

/// Copies bytes with non-temporal stores. Bytes that do not fill a whole cache line are copied normally.
#[cfg(target_arch = "x86_64")]
fn stream(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    assert_eq!(to.len(), from.len(), "lengths of a copy");
    let head = (to.as_ptr().addr().wrapping_neg() % LINE).min(to.len());
    let lines = head + (to.len() - head) / LINE * LINE;
    to[..head].copy_from_slice(&from[..head]);
    to[lines..].copy_from_slice(&from[lines..]);
    let words = to[head..lines].as_chunks_mut::<16>().0.iter_mut().zip(from[head..lines].as_chunks::<16>().0);
    for (to, from) in words {
        // SAFETY: every x86-64 processor has these instructions. Both operands have 16 bytes, and `head` aligns `to` to
        // 16 bytes.
        unsafe { _mm_stream_si128(to.as_mut_ptr().cast(), _mm_loadu_si128(from.as_ptr().cast())) };
    }
    // Non-temporal stores are not ordered with other stores. The fence makes the bytes visible before any later store
    // that announces them.
    // SAFETY: as above.
    unsafe { _mm_sfence() };
}

/// Copies bytes with ordinary stores, on processors without an implementation of the above.
#[cfg(not(target_arch = "x86_64"))]
fn stream(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
}

/// A read-only memory map of a whole file. Used only by [`super::file::WeightFile`].
///
/// The system raises SIGBUS when a page of a map cannot be read: the page is beyond the end of a file that was
/// truncated, or its disk fails. By default SIGBUS ends the process. A signal handler therefore checks whether the
/// address is in one of these maps. If it is, the handler replaces the map from that page on with zeros, the reader
/// continues with these zeros, and [`FileMap::is_lost`] returns true afterwards.
pub(super) struct FileMap {
    map: memmap2::Mmap,
    /// The map's entry in [`MAPS`].
    #[cfg(target_os = "linux")]
    place: &'static guard::Place,
}

impl FileMap {
    /// Maps a file. Returns `None` if the file cannot be mapped, or if the map cannot be guarded against SIGBUS.
    #[cfg(target_os = "linux")]
    pub(super) fn of(file: &File) -> Option<FileMap> {
        guard::install()?;
        // SAFETY: the map is private and only read. Rust cannot know that nothing else changes the file meanwhile. If
        // something does, the bytes may have any value, and `WeightFile::unchanged`, called after every use, reports
        // that they are invalid.
        let map = unsafe { memmap2::Mmap::map(file) }.ok()?;
        let place = guard::enter(map.as_ptr().addr(), map.len())?;
        Some(FileMap { map, place })
    }

    /// Always returns `None`: on other systems files are read instead.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn of(_: &File) -> Option<FileMap> {
        None
    }

    /// The file's bytes, with zeros in place of bytes that could not be read.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Whether some bytes could not be read.
    pub(super) fn is_lost(&self) -> bool {
        #[cfg(target_os = "linux")]
        return self.place.lost.load(Ordering::Acquire);
        #[cfg(not(target_os = "linux"))]
        false
    }

    /// Reads a part into memory at once, instead of page by page on first access.
    pub(super) fn populate(&self, start: usize, len: usize) -> std::io::Result<()> {
        #[cfg(target_os = "linux")]
        return self.map.advise_range(memmap2::Advice::PopulateRead, start, len);
        #[cfg(not(target_os = "linux"))]
        Ok(())
    }

    /// Removes a part from the process's page tables.
    #[cfg(target_os = "linux")]
    pub(super) fn let_go(&self, start: usize, len: usize) -> std::io::Result<()> {
        // SAFETY: this advice discards what was written to a private map. This map is only read, so a later access,
        // also through an existing reference, finds the file's bytes as before.
        unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for FileMap {
    fn drop(&mut self) {
        // The map itself is unmapped after this; nothing reads it any more.
        self.place.leave();
    }
}

/// The SIGBUS guard: keeps unreadable pages of a registered map from ending the process.
#[cfg(target_os = "linux")]
mod guard {
    use std::ffi::{c_int, c_void};
    use std::mem;
    use std::ptr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// The maximum number of maps at the same time; further files are read instead.
    const MOST: usize = 1024;

    /// The address range of one map. The range is empty while `start` is the largest address.
    pub(super) struct Place {
        taken: AtomicBool,
        start: AtomicUsize,
        end: AtomicUsize,
        pub(super) lost: AtomicBool,
    }

    static MAPS: [Place; MOST] = [const {
        Place {
            taken: AtomicBool::new(false),
            start: AtomicUsize::new(usize::MAX),
            end: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }; MOST];
    /// The previous action for SIGBUS; `None` if the handler could not be installed.
    static BEFORE: OnceLock<Option<libc::sigaction>> = OnceLock::new();
    static PAGE: AtomicUsize = AtomicUsize::new(0);

    /// Installs the signal handler, once per process. Returns `None` if that failed.
    pub(super) fn install() -> Option<()> {
        let before = BEFORE.get_or_init(|| {
            PAGE.store(rustix::param::page_size(), Ordering::Release);
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
            // SAFETY: a `sigaction` of all zeros is valid: it is the default action. The system fills `before`. The
            // handler has the signature that SA_SIGINFO requires, and runs on the alternate signal stack that Rust
            // gives each thread.
            unsafe {
                let mut action: libc::sigaction = mem::zeroed();
                action.sa_sigaction = handler as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                let mut before: libc::sigaction = mem::zeroed();
                (libc::sigaction(libc::SIGBUS, &action, &mut before) == 0).then_some(before)
            }
        });
        before.as_ref().map(|_| ())
    }

    /// Registers a map with the handler. Returns `None` if all entries are in use.
    pub(super) fn enter(start: usize, len: usize) -> Option<&'static Place> {
        let free =
            |place: &&Place| place.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let place = MAPS.iter().find(free)?;
        place.lost.store(false, Ordering::Release);
        // `end` is stored before `start`, so that the range never contains addresses that are not this map's.
        place.end.store(start + len.next_multiple_of(PAGE.load(Ordering::Acquire)), Ordering::Release);
        place.start.store(start, Ordering::Release);
        Some(place)
    }

    /// Returns the map that contains an address, and the end of that map.
    pub(super) fn knows(address: usize) -> Option<(&'static Place, usize)> {
        MAPS.iter().find_map(|place| {
            let (start, end) = (place.start.load(Ordering::Acquire), place.end.load(Ordering::Acquire));
            // Another map may have taken the entry between the two loads.
            let same = place.start.load(Ordering::Acquire) == start;
            (same && (start..end).contains(&address)).then_some((place, end))
        })
    }

    impl Place {
        pub(super) fn leave(&self) {
            self.start.store(usize::MAX, Ordering::Release);
            self.end.store(0, Ordering::Release);
            self.taken.store(false, Ordering::Release);
        }

        /// Replaces the pages of this map with zeros, from the page of `address` up to `end`. Returns whether that
        /// succeeded.
        fn lose(&self, address: usize, end: usize) -> bool {
            self.lost.store(true, Ordering::Release);
            let from = address & !(PAGE.load(Ordering::Acquire) - 1);
            let (access, kind) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
            // SAFETY: the pages belong to one of our maps, which lives as long as its entry is taken, and they are only
            // read. `mmap` is a plain system call and may be made in a signal handler.
            let mapped = unsafe { libc::mmap(ptr::without_provenance_mut(from), end - from, access, kind, -1, 0) };
            mapped != libc::MAP_FAILED
        }
    }

    extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the system passes the arguments that SA_SIGINFO specifies.
        let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
        // BUS_ADRERR excludes hardware memory errors and signals that another process sent.
        if code == libc::BUS_ADRERR && knows(address).is_some_and(|(place, end)| place.lose(address, end)) {
            return;
        }
        // The address is in none of our maps: do what would have happened without this handler.
        let before = BEFORE.get().and_then(Option::as_ref);
        match before {
            Some(before) if ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) => {
                let handler = before.sa_sigaction;
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    // SAFETY: SA_SIGINFO is set, so the handler has this signature.
                    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                        unsafe { mem::transmute(handler) };
                    handler(signal, info, context);
                } else {
                    // SAFETY: SA_SIGINFO is not set, so the handler has this signature.
                    let handler: extern "C" fn(c_int) = unsafe { mem::transmute(handler) };
                    handler(signal);
                }
            }
            _ => {
                // SAFETY: as in `install`. The faulting instruction runs again and ends the process.
                unsafe {
                    let default: libc::sigaction = mem::zeroed();
                    libc::sigaction(libc::SIGBUS, &default, ptr::null_mut());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: only maps of weight files are guarded; an unreadable page of any other map still ends the process. Method:
    /// the test runs itself again as a child process.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_lost_page_of_another_map_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        const NAME: &str = "memory::arena::tests::a_lost_page_of_another_map_still_ends_the_process";
        const CHILD: &str = "OSTINATO_TEST_SIGBUS";
        if std::env::var_os(CHILD).is_some() {
            let file = tempfile::tempfile().unwrap();
            file.set_len(100_000).unwrap();
            let guarded = FileMap::of(&file).unwrap();
            // SAFETY: only this test uses the map.
            let other = unsafe { memmap2::Mmap::map(&file) }.unwrap();
            file.set_len(0).unwrap();
            assert_eq!((guarded.bytes()[50_000], guarded.is_lost()), (0, true));
            let start = guarded.bytes().as_ptr().addr();
            drop(guarded);
            assert!(guard::knows(start).is_none(), "it has left");
            println!("{}", other[50_000]);
            return;
        }
        let own = std::env::current_exe().unwrap();
        let output = std::process::Command::new(own).args(["--exact", NAME]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{:?}: {said}", output.status);
    }

    #[test]
    fn what_is_streamed_arrives_whole_from_any_address_to_any() {
        let from: Vec<u8> = (0..=255).cycle().skip(1).take(400).collect();
        for start in 0..70 {
            for len in [0, 1, 15, 16, 63, 64, 65, 127, 128, 200] {
                let mut to = [0u8; 300];
                stream(&mut to[start..start + len], &from[start / 3..start / 3 + len]);
                let mut want = [0u8; 300];
                want[start..start + len].copy_from_slice(&from[start / 3..start / 3 + len]);
                assert_eq!(to, want, "{len} bytes at {start}");
            }
        }
    }
}

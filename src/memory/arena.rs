//! Buffers: their memory, their host view, their end. The one file of `memory` with
//! `unsafe`, so it also makes the map of a file for [`super::file`].
//! Deliberately absent: what is in a buffer, and commands that fill one. Fresh memory holds
//! whatever was there: the transfer actor fills it where zeros are needed.
#![allow(unsafe_code)]

use super::MemoryError;
use super::place::{Place, choose};
use super::plan::{Limits, default_reserve};
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

/// Small buffers share blocks of this size.
const DEVICE_BLOCK_BYTES: u64 = 64 << 20;
/// The same for memory that the host can map.
const HOST_BLOCK_BYTES: u64 = 16 << 20;
/// Buffers from this size on get memory of their own, so that no block is left with a large
/// hole; the 4,096 allocations that every driver has suffice for many models.
const DEDICATED_BYTES: u64 = 8 << 20;
/// Every buffer starts on such an address, whatever the driver asks for less: kernels load 16
/// bytes at a time, and a cache line is 128.
const ALIGNMENT: u64 = 256;
/// How long the device's last use of a buffer that is dropped is waited for while its queue does not move (a CPU driver:
/// however long). Past it something is badly wrong, and the memory is leaked rather than freed under the device.
const LAST_USE_WAIT: Duration = Duration::from_secs(20);

/// Where a device's buffers come from. Clones share it; it lives until its last buffer is gone.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    // Order matters: the allocator frees its blocks before the device goes.
    allocator: Mutex<Allocator>,
    types: Vec<vk::MemoryType>,
    /// The device did not finish with a buffer in time: others are not waited for again.
    stuck: AtomicBool,
    device: Arc<Device>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("device", &self.0.name()).field("use", &self.usage()).finish()
    }
}

/// What an arena has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of live buffers, alignment included.
    pub buffers_bytes: u64,
    /// Bytes taken from the driver for them.
    pub reserved_bytes: u64,
}

impl Arena {
    /// An empty arena on a device.
    pub fn new(device: &Arc<Device>) -> Result<Arena, MemoryError> {
        let allocator = Allocator::new(&AllocatorCreateDesc {
            instance: device.instance().raw().clone(),
            device: device.raw().clone(),
            physical_device: device.physical(),
            // What it would report as leaked is what `Buffer` leaks on purpose, and says so.
            debug_settings: {
                let mut settings = AllocatorDebugSettings::default();
                settings.log_leaks_on_shutdown = false;
                settings
            },
            buffer_device_address: true,
            allocation_sizes: AllocationSizes::new(DEVICE_BLOCK_BYTES, HOST_BLOCK_BYTES),
        })
        .map_err(|source| MemoryError::Allocator { name: "arena".to_owned(), source })?;
        // SAFETY: the physical device is of this instance, which the device keeps alive.
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

    /// A buffer of `bytes` (at least 1), never split: one above the driver's largest
    /// allocation is an error that names both numbers. On a discrete GPU
    /// [`Place::DeviceLocal`] is in the device's own memory or refused.
    pub fn buffer(&self, name: &str, bytes: u64, place: Place) -> Result<Arc<Buffer>, MemoryError> {
        let host_access = !matches!(place, Place::DeviceLocal);
        self.0.create(name, bytes, place, host_access).map(|(buffer, _)| buffer)
    }

    /// A host-visible buffer of `count × bytes_each`, of which the host sees only the slices:
    /// each is exclusively its owner's to write or read, while the buffer itself has no host
    /// view. [`super::StagingRing`] keeps device and host from using one at the same time.
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

    /// What a plan is held against: the driver's budget as it is now, and the operator's limit.
    pub fn limits(&self, limit_bytes: Option<u64>) -> Limits {
        let (budget, adapter) = (self.0.device.budget(), self.0.device.adapter());
        Limits {
            device: adapter.name.clone(),
            free_bytes: budget.free_bytes(),
            total_bytes: budget.heap_bytes,
            limit_bytes,
            max_allocation_bytes: adapter.capabilities.max_allocation_bytes,
            unified: adapter.capabilities.unified_memory,
            reserve_bytes: default_reserve(budget.heap_bytes),
        }
    }

    /// What has been taken so far.
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

    /// The buffer and, for host-visible places, its mapping; the buffer keeps the latter for
    /// itself only with `host_access`.
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
        // Whole 16-byte words, so that fills and vector loads may take the last one whole.
        let raw = self.device.create_buffer(bytes.next_multiple_of(16), name)?;
        let destroy = |error: MemoryError| {
            // SAFETY: the buffer was just made from this device and no command names it.
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
        // The choice is made; the allocator gets no other.
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
        // From here on the buffer frees both, on the error path too.
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
        // SAFETY: buffer and memory are of this device, neither is bound yet, the range is the
        // allocator's own for this buffer and as large and aligned as the requirements say.
        unsafe { self.device.raw().bind_buffer_memory(raw, buffer.allocation.memory(), buffer.allocation.offset()) }
            .map_err(|source| MemoryError::Bind { name: name.to_owned(), source })?;
        let info = vk::BufferDeviceAddressInfo::default().buffer(raw);
        // SAFETY: `create_buffer` asks for SHADER_DEVICE_ADDRESS, the allocator for
        // DEVICE_ADDRESS memory, and the buffer is bound.
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

// SAFETY: the memory belongs to no thread. `Buffer` reaches it by atomic accesses only,
// `HostSlice` is the only owner of its part.
unsafe impl Send for HostPointer {}
// SAFETY: as above.
unsafe impl Sync for HostPointer {}

/// Device memory under a name. Dropping it waits for the device's last use, then frees it.
///
/// The host's accesses are bounds-checked; one outside the buffer, or any to a buffer that the
/// host does not see, is a bug and panics.
pub struct Buffer {
    name: String,
    raw: vk::Buffer,
    address: u64,
    bytes: u64,
    device_local: bool,
    host: Option<HostPointer>,
    /// By role: the last submission that uses it; written by whoever submits copies, and by a region when it goes.
    last_use: [AtomicU64; 2],
    /// By role: the last submission that writes it; written by the same.
    last_write: [AtomicU64; 2],
    /// Taken by `drop` only.
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
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The handle, for commands.
    pub fn raw(&self) -> vk::Buffer {
        self.raw
    }

    /// The device address of its first byte; a multiple of 16 at least.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is in the device's own memory.
    pub fn device_local(&self) -> bool {
        self.device_local
    }

    /// Whether `read`, `write`, `load_u32` and `store_u32` are possible.
    pub fn host_visible(&self) -> bool {
        self.host.is_some()
    }

    /// Notes that the submission with this point reads the buffer.
    pub fn mark_read(&self, point: Point) {
        self.last_use[point.role.index()].fetch_max(point.value, Ordering::AcqRel);
    }

    /// Notes that the submission with this point writes the buffer.
    pub fn mark_written(&self, point: Point) {
        self.last_write[point.role.index()].fetch_max(point.value, Ordering::AcqRel);
        self.mark_read(point);
    }

    /// The last submissions that read or write it, at most one a role.
    pub fn last_use(&self) -> impl Iterator<Item = Point> + use<> {
        points(&self.last_use)
    }

    /// The last submissions that write it, at most one a role: what a readback waits for.
    pub fn last_write(&self) -> impl Iterator<Item = Point> + use<> {
        points(&self.last_write)
    }

    /// Copies bytes in. The device sees them in work submitted afterwards; they must not be in
    /// use there. Each aligned word arrives whole.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let at = self.at(offset, data.len());
        let (head, words, tail) = split(at, data.len());
        for (i, byte) in data.iter().enumerate().take(head).chain(data.iter().enumerate().skip(data.len() - tail)) {
            // SAFETY: `at` checked that `i` is inside the mapping, which `self` keeps; every
            // host access goes through an atomic, so threads cannot race.
            unsafe { AtomicU8::from_ptr(at.add(i)) }.store(*byte, Ordering::Relaxed);
        }
        for (i, word) in data[head..].as_chunks::<4>().0.iter().enumerate().take(words) {
            // SAFETY: as above, and `split` puts the words on multiples of 4.
            unsafe { AtomicU32::from_ptr(at.add(head + 4 * i).cast()) }
                .store(u32::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }

    /// Copies bytes out: what the device wrote in work whose point was reached, or what the
    /// host wrote. Slow from memory that is not [`Place::Readback`].
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let at = self.at(offset, data.len());
        let len = data.len();
        let (head, words, tail) = split(at, len);
        let (first, last) = (0..head, len - tail..len);
        for i in first.chain(last) {
            // SAFETY: `at` checked that `i` is inside the mapping, which `self` keeps; every
            // host access goes through an atomic, so threads cannot race.
            data[i] = unsafe { AtomicU8::from_ptr(at.add(i)) }.load(Ordering::Relaxed);
        }
        for (i, word) in data[head..].as_chunks_mut::<4>().0.iter_mut().enumerate().take(words) {
            // SAFETY: as above, and `split` puts the words on multiples of 4.
            *word = unsafe { AtomicU32::from_ptr(at.add(head + 4 * i).cast()) }.load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    /// Stores a word that a running kernel or another thread may be waiting for (release).
    /// `offset` is a multiple of 4.
    pub fn store_u32(&self, offset: u64, value: u32) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// Loads a word that a running kernel or another thread may be writing (acquire).
    /// `offset` is a multiple of 4.
    pub fn load_u32(&self, offset: u64) -> u32 {
        self.word(offset).load(Ordering::Acquire)
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "word at {offset} of {:?}", self.name);
        // SAFETY: `at` checks the bounds; buffers start on multiples of 4 and so do words; the
        // mapping lives as long as `self`, and every host access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// The host address of `len` bytes at `offset`, checked.
    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let host = self.host.unwrap_or_else(|| panic!("the host does not see {:?}", self.name));
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of {:?}, which has {}",
            self.name,
            self.bytes
        );
        // SAFETY: inside the mapping, by the assertion.
        unsafe { host.0.add(offset as usize).as_ptr() }
    }
}

/// Of `len` bytes at an address: how many before the first multiple of 4, whole words after
/// it, and bytes after these.
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
        // SAFETY: taken once, here; nothing reads the field afterwards.
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
                    // Keeps the block and the device from being destroyed under the use.
                    std::mem::forget(self.arena.clone());
                    return;
                }
            }
        }
        // SAFETY: the device has reached the last point that uses the buffer, or is lost and has stopped (above). Every use
        // is among the points: transfers mark what they submit, and what regions submit is marked by each region when it
        // goes, which is before its share of the buffer does. Handles are only lent by `raw`, and nobody can lend one any
        // more.
        unsafe { self.arena.device.destroy_buffer(self.raw) };
        let mut allocator = self.arena.allocator.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = allocator.free(allocation) {
            tracing::error!(buffer = self.name, %error, "the allocator did not take memory back");
        }
    }
}

/// A part of a buffer that is its owner's alone on the host's side.
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
    /// The buffer that it is a part of.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Where in the buffer it starts.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: slices have bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its bytes. Whoever holds them sees to it that the device is not writing them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: in the mapping that `buffer` keeps; only this slice reaches these bytes on
        // the host, and the device does not write them while the slice is held by anyone but
        // the actor that reads back (it waits for the point of its copy first).
        unsafe { std::slice::from_raw_parts(self.start.0.as_ptr(), self.bytes) }
    }

    /// Its bytes, to write. Whoever holds them sees to it that the device is not using them:
    /// a staging slot is handed out only after the point of its last copy was reached.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.0.as_ptr(), self.bytes) }
    }

    /// Copies bytes to `offset`, past the host's caches where its processor can do that: only the device reads them, and
    /// a line that is written whole need not be read first. The caller sees to the same as with
    /// [`HostSlice::bytes_mut`].
    ///
    /// # Panics
    /// If they do not fit in the slice: a bug of the caller.
    pub fn stream(&mut self, offset: usize, from: &[u8]) {
        stream(&mut self.bytes_mut()[offset..][..from.len()], from);
    }
}

/// Copies past the caches; what is of no whole cache line goes through them.
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
        // SAFETY: every x86-64 has these instructions; both are 16 bytes, and `head` puts `to` on a multiple of 16.
        unsafe { _mm_stream_si128(to.as_mut_ptr().cast(), _mm_loadu_si128(from.as_ptr().cast())) };
    }
    // Such stores are in no order with others: whoever hears of these bytes finds them only behind a fence.
    // SAFETY: as above.
    unsafe { _mm_sfence() };
}

/// As above, on processors whose plain stores are all there is.
#[cfg(not(target_arch = "x86_64"))]
fn stream(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
}

/// A whole file mapped to read. Used by [`super::file::WeightFile`] only.
///
/// The system raises SIGBUS where a page of a map cannot be read: beyond the end of a file that was cut, or because
/// its disk fails. That ends a process, so a handler looks whether the address is in one of these maps: then the map
/// from there on becomes zeroes, whoever reads goes on with these, and [`FileMap::is_lost`] says so afterwards.
pub(super) struct FileMap {
    map: memmap2::Mmap,
    /// Its place in [`MAPS`].
    #[cfg(target_os = "linux")]
    place: &'static guard::Place,
}

impl FileMap {
    /// Maps a file; `None` where that cannot be done, or not be guarded.
    #[cfg(target_os = "linux")]
    pub(super) fn of(file: &File) -> Option<FileMap> {
        guard::install()?;
        // SAFETY: the map is private and only read. What Rust cannot know is that nobody else changes the file
        // meanwhile: numbers may then be any, and `WeightFile::unchanged` is asked behind every use whether they count.
        let map = unsafe { memmap2::Mmap::map(file) }.ok()?;
        let place = guard::enter(map.as_ptr().addr(), map.len())?;
        Some(FileMap { map, place })
    }

    /// Elsewhere files are read.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn of(_: &File) -> Option<FileMap> {
        None
    }

    /// The file's bytes, zeroes where they could not be read.
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

    /// Brings a part into memory at once instead of page by page as it is touched.
    pub(super) fn populate(&self, start: usize, len: usize) -> std::io::Result<()> {
        #[cfg(target_os = "linux")]
        return self.map.advise_range(memmap2::Advice::PopulateRead, start, len);
        #[cfg(not(target_os = "linux"))]
        Ok(())
    }

    /// Takes a part out of the process's page tables.
    #[cfg(target_os = "linux")]
    pub(super) fn let_go(&self, start: usize, len: usize) -> std::io::Result<()> {
        // SAFETY: the advice loses what was written to a map. This one is only read: whoever touches the part again, or
        // has a reference into it, finds the file's bytes as before.
        unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for FileMap {
    fn drop(&mut self) {
        // The map itself ends behind this: nobody reads it any more.
        self.place.leave();
    }
}

/// What keeps a map's missing pages from ending the process.
#[cfg(target_os = "linux")]
mod guard {
    use std::ffi::{c_int, c_void};
    use std::mem;
    use std::ptr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Maps at once; further files are read instead.
    const MOST: usize = 1024;

    /// The addresses of one map. Empty while `start` is the largest address.
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
    /// What SIGBUS did before; `None`: it could not be changed.
    static BEFORE: OnceLock<Option<libc::sigaction>> = OnceLock::new();
    static PAGE: AtomicUsize = AtomicUsize::new(0);

    /// Sees to the handler, once a process.
    pub(super) fn install() -> Option<()> {
        let before = BEFORE.get_or_init(|| {
            PAGE.store(rustix::param::page_size(), Ordering::Release);
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
            // SAFETY: all zeroes are a valid `sigaction`, the default one; the system fills `before`. The handler is of
            // the form that SA_SIGINFO asks for, and runs on the stack of its own that Rust gives each thread.
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

    /// Has the handler know a map.
    pub(super) fn enter(start: usize, len: usize) -> Option<&'static Place> {
        let free =
            |place: &&Place| place.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let place = MAPS.iter().find(free)?;
        place.lost.store(false, Ordering::Release);
        // In an order in which the addresses between are never others'.
        place.end.store(start + len.next_multiple_of(PAGE.load(Ordering::Acquire)), Ordering::Release);
        place.start.store(start, Ordering::Release);
        Some(place)
    }

    /// The map that an address is in, and that map's end.
    pub(super) fn knows(address: usize) -> Option<(&'static Place, usize)> {
        MAPS.iter().find_map(|place| {
            let (start, end) = (place.start.load(Ordering::Acquire), place.end.load(Ordering::Acquire));
            // Another map may have taken the place between the two loads.
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

        /// From a page of this map on there are zeroes.
        fn lose(&self, address: usize, end: usize) -> bool {
            self.lost.store(true, Ordering::Release);
            let from = address & !(PAGE.load(Ordering::Acquire) - 1);
            let (access, kind) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
            // SAFETY: the pages are those of a map of ours, which lives as long as its place is taken, and they are only
            // read. A system call by itself: it may be made in a handler.
            let mapped = unsafe { libc::mmap(ptr::without_provenance_mut(from), end - from, access, kind, -1, 0) };
            mapped != libc::MAP_FAILED
        }
    }

    extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the system gives what SA_SIGINFO asks for.
        let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
        // Not an error of the machine's memory, nor a signal that somebody sent.
        if code == libc::BUS_ADRERR && knows(address).is_some_and(|(place, end)| place.lose(address, end)) {
            return;
        }
        // Nobody's of ours: what would have happened without this handler.
        let before = BEFORE.get().and_then(Option::as_ref);
        match before {
            Some(before) if ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) => {
                let handler = before.sa_sigaction;
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    // SAFETY: it was set as a handler of this form.
                    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                        unsafe { mem::transmute(handler) };
                    handler(signal, info, context);
                } else {
                    // SAFETY: as above.
                    let handler: extern "C" fn(c_int) = unsafe { mem::transmute(handler) };
                    handler(signal);
                }
            }
            _ => {
                // SAFETY: as in `install`. The instruction is run again and ends the process.
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

    /// Goal: only maps of weights are guarded: a page of another that cannot be read ends the process as ever. Method: this
    /// test again as a process of its own.
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
            // SAFETY: nobody looks at what becomes of it but this test.
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

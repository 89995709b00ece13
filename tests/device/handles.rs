//! Tests of the device layer on real drivers under validation: submission, points, batches held back until their waits
//! can be satisfied, gates, pipelines and their cache, timestamps.

use crate::common::{Driver, Vulkan};
use ash::vk;
use ostinato::config::Selector;
use ostinato::device::{
    Batch, Commands, Device, DeviceError, Gate, Pipeline, PipelineCache, PipelineDesc, Point, Queries, QueueEntry,
    Role, select,
};
use ostinato::telemetry::with_causes;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);

/// Computes `words[x] += amount * factor`, where x is the global invocation id. A workgroup has 32 invocations.
///
/// This is the source in GLSL. The words were assembled by hand, independently of the tools that compile the program's
/// own shaders:
/// ```glsl
/// layout(local_size_x = 32) in;
/// layout(constant_id = 0) const uint factor = 1;
/// layout(buffer_reference) buffer Buffer { uint words[]; };
/// layout(push_constant) uniform Args { Buffer buf; uint amount; };
/// void main() { buf.words[gl_GlobalInvocationID.x] += amount * factor; }
/// ```
#[rustfmt::skip]
const ADD: &[u32] = &[
    0x07230203, 0x00010600, 0x00070000, 32, 0, 0x00020011, 1, 0x00020011, 5347, 0x00020011, 5345, 0x0003000e,
    5348, 3, 0x0007000f, 5, 1, 0x6e69616d, 0, 2, 3, 0x00060010, 1, 17,
    32, 1, 1, 0x00040047, 2, 11, 28, 0x00040047, 4, 1, 0, 0x00040047,
    5, 6, 4, 0x00030047, 6, 2, 0x00050048, 6, 0, 35, 0, 0x00030047,
    7, 2, 0x00050048, 7, 0, 35, 0, 0x00050048, 7, 1, 35, 8,
    0x00020013, 8, 0x00030021, 9, 8, 0x00040015, 10, 32, 0, 0x00040017, 11, 10,
    3, 0x00040015, 12, 32, 1, 0x0004002b, 12, 13, 0, 0x0004002b, 12, 14,
    1, 0x00040032, 10, 4, 1, 0x0003001d, 5, 10, 0x0003001e, 6, 5, 0x00040020,
    15, 5349, 6, 0x00040020, 16, 5349, 10, 0x0004001e, 7, 15, 10, 0x00040020,
    17, 9, 7, 0x00040020, 18, 9, 15, 0x00040020, 19, 9, 10, 0x00040020,
    20, 1, 11, 0x0004003b, 20, 2, 1, 0x0004003b, 17, 3, 9, 0x00050036,
    8, 1, 0, 9, 0x000200f8, 21, 0x0004003d, 11, 22, 2, 0x00050051, 10,
    23, 22, 0, 0x00050041, 18, 24, 3, 13, 0x0004003d, 15, 25, 24,
    0x00050041, 19, 26, 3, 14, 0x0004003d, 10, 27, 26, 0x00050084, 10, 28,
    27, 4, 0x00060041, 16, 29, 25, 13, 23, 0x0006003d, 10, 30, 29,
    2, 4, 0x00050080, 10, 31, 30, 28, 0x0005003e, 29, 31, 2, 4,
    0x000100fd, 0x00010038,
];

/// A mapped buffer with its own memory allocation.
struct Words {
    device: Arc<Device>,
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    mapped: *mut u32,
    count: usize,
}

// SAFETY: a raw pointer may be sent to another thread as long as its memory stays valid. `Words` owns the mapped
// memory, and any thread may read and write it.
unsafe impl Send for Words {}

impl Words {
    fn new(device: &Arc<Device>, count: usize, name: &str) -> Words {
        let buffer = device.create_buffer(4 * count as u64, name).expect("a buffer");
        let raw = device.raw();
        // SAFETY: the buffer is new and not bound; the memory type is one that the buffer's requirements allow; the
        // mapping has at least `count` words. Nobody else has the handles yet.
        unsafe {
            let needs = raw.get_buffer_memory_requirements(buffer);
            let memory = device.instance().raw().get_physical_device_memory_properties(device.physical());
            let wanted = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
            let kind = (0..memory.memory_type_count)
                .find(|&i| {
                    needs.memory_type_bits & (1 << i) != 0
                        && memory.memory_types[i as usize].property_flags.contains(wanted)
                })
                .expect("host-visible memory");
            let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
            let info = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(kind)
                .push_next(&mut flags);
            let memory = raw.allocate_memory(&info, None).expect("memory");
            raw.bind_buffer_memory(buffer, memory, 0).expect("bound");
            let mapped = raw.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()).expect("mapped");
            std::ptr::write_bytes(mapped.cast::<u32>(), 0, count);
            Words { device: device.clone(), buffer, memory, mapped: mapped.cast(), count }
        }
    }

    fn address(&self) -> u64 {
        let info = vk::BufferDeviceAddressInfo::default().buffer(self.buffer);
        // SAFETY: the buffer is bound to memory allocated with the device-address flag, in `Words::new`.
        unsafe { self.device.raw().get_buffer_device_address(&info) }
    }

    /// Returns the contents. The caller must have waited for the point of the last write.
    fn read(&self) -> Vec<u32> {
        // SAFETY: the memory is mapped, coherent and `count` words long; the caller has waited for the last write.
        (0..self.count).map(|i| unsafe { self.mapped.add(i).read_volatile() }).collect()
    }

    fn arguments(&self, amount: u32) -> Vec<u8> {
        let mut bytes = self.address().to_le_bytes().to_vec();
        bytes.extend(amount.to_le_bytes());
        bytes.extend([0; 4]);
        bytes
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the buffer and the memory are no longer in use, because every test waits for their last use before it
        // drops them.
        unsafe {
            self.device.destroy_buffer(self.buffer);
            self.device.raw().free_memory(self.memory, None);
        }
    }
}

fn desc<'a>(name: &'a str, constants: &'a [u32]) -> PipelineDesc<'a> {
    PipelineDesc { name, spirv: ADD, constants, push_bytes: 16, required_subgroup: None, full_subgroups: true }
}

fn adder(device: &Device, factor: u32) -> Pipeline {
    let cache = PipelineCache::in_memory(device).expect("a cache");
    Pipeline::new(device, &cache, &desc("add", &[factor])).expect("a pipeline")
}

/// Records commands that add `amount` times the pipeline's factor to every word. Barriers on both sides allow the
/// commands to be submitted repeatedly.
fn add(words: &Words, pipeline: &Pipeline, amount: u32) -> Commands {
    Commands::record(&words.device, Role::Compute, |encoder| {
        encoder.name("add");
        encoder.barrier_full();
        encoder.bind(pipeline);
        encoder.push(&words.arguments(amount));
        encoder.dispatch([words.count as u32 / 32, 1, 1]);
        encoder.barrier_host();
    })
    .expect("commands")
}

fn wait(device: &Device, point: Point) {
    assert!(device.wait(point, LONG).unwrap_or_else(|e| panic!("{}", with_causes(&e))), "{point} in {LONG:?}");
}

#[test]
fn both_drivers_are_two_devices_that_compute_at_once() {
    let vulkan = Vulkan::new();
    let results: Vec<(String, Vec<u32>)> = std::thread::scope(|scope| {
        let run = |driver: Driver| {
            let vulkan = &vulkan;
            move || {
                let device = vulkan.device(driver);
                let words = Words::new(&device, 256, "words");
                let point = device.queue(Role::Compute).submit(Batch::one(add(&words, &adder(&device, 3), 7), vec![]));
                wait(&device, point.expect("submitted"));
                (device.adapter().uuid.clone(), words.read())
            }
        };
        let threads: Vec<_> = Driver::all().iter().map(|&driver| scope.spawn(run(driver))).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    let uuids: std::collections::HashSet<_> = results.iter().map(|(uuid, _)| uuid).collect();
    assert_eq!(uuids.len(), Driver::all().len(), "each device has its UUID");
    for (uuid, words) in results {
        assert_eq!(words, vec![21; 256], "on {uuid}");
    }
}

#[test]
fn adapters_tell_what_they_are() {
    if Driver::first() == Driver::Gpu {
        return a_gpu_is_found_by_each_of_its_names();
    }
    let vulkan = Vulkan::new();
    let lavapipe = vulkan.adapter(Driver::Lavapipe);
    let swiftshader = vulkan.adapter(Driver::SwiftShader);
    for adapter in [&lavapipe, &swiftshader] {
        assert!(adapter.usable() && adapter.is_cpu(), "{adapter}");
        assert!(adapter.capabilities.unified_memory && adapter.capabilities.host_query_reset);
        assert_eq!(adapter.uuid.len(), 36, "{}", adapter.uuid);
        assert_eq!(adapter.pci, None, "a CPU driver is on no bus");
        assert!(!adapter.driver.is_empty() && !adapter.memory_heaps.is_empty());
    }
    assert_eq!((lavapipe.capabilities.subgroup_size, swiftshader.capabilities.subgroup_size), (8, 4));
    assert!(lavapipe.capabilities.float16 && lavapipe.capabilities.int64);
    assert!(!swiftshader.capabilities.float16 && !swiftshader.capabilities.int64);
}

fn a_gpu_is_found_by_each_of_its_names() {
    let vulkan = Vulkan::new();
    let adapter = vulkan.adapter(Driver::Gpu);
    eprintln!("{adapter:#?}");
    let device = vulkan.device(Driver::Gpu);
    eprintln!("{device:?}, {:?}", device.budget());
    assert!(adapter.usable() && !adapter.is_cpu());
    let adapters = vulkan.instance.adapters();
    for text in [adapter.pci.clone().expect("a GPU is on a bus"), adapter.uuid.clone(), adapter.index.to_string()] {
        let selector: Selector = text.parse().expect("a selector");
        assert_eq!(select(&adapters, Some(&selector)).expect("chosen").index, adapter.index, "by {text}");
    }
}

#[test]
fn a_cpu_driver_is_never_chosen_by_itself_and_two_are_ambiguous() {
    if Driver::first() == Driver::Gpu {
        return;
    }
    let vulkan = Vulkan::new();
    let adapters = vulkan.instance.adapters();
    assert!(matches!(select(&adapters, None), Err(DeviceError::MustChoose { count: 0, .. })));
    assert!(matches!(select(&adapters, Some(&Selector::Cpu)), Err(DeviceError::Ambiguous { count: 2, .. })));
    for adapter in &adapters {
        for text in [adapter.uuid.to_uppercase(), adapter.name.clone()] {
            let selector: Selector = text.parse().expect("a selector");
            assert_eq!(select(&adapters, Some(&selector)).expect("chosen").uuid, adapter.uuid, "by {text}");
        }
        let by_index = select(&adapters, Some(&Selector::Index(adapter.index)));
        assert!(matches!(by_index, Err(DeviceError::CpuByIndex { .. })), "{by_index:?}");
    }
}

/// Goal: in a submission of several entries every entry signals its own value, and commands that were recorded once may
/// occur in it several times.
#[test]
fn a_batch_signals_every_value_and_replays_its_commands() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let device = vulkan.device(driver);
        let words = Words::new(&device, 64, "words");
        let commands = add(&words, &adder(&device, 1), 1);
        let queue = device.queue(Role::Compute);
        let twice = || QueueEntry { commands: vec![commands.clone(), commands.clone()], gate: None };
        let last = queue.submit(Batch { entries: vec![twice(), twice(), twice()], waits: vec![] }).expect("submitted");
        assert_eq!(last, Point { role: Role::Compute, value: 3 });
        for value in 1..=3 {
            wait(&device, Point { role: Role::Compute, value });
        }
        assert_eq!(words.read(), vec![6; 64], "{driver:?}");
        let again = queue.submit(Batch { entries: vec![twice()], waits: vec![last] }).expect("submitted");
        assert_eq!((again.value, queue.last()), (4, again));
        wait(&device, again);
        assert_eq!(words.read(), vec![8; 64], "{driver:?}");
        assert_eq!(device.progress(Role::Compute).expect("alive"), 4);
        assert_eq!(device.progress(Role::Transfer).expect("alive"), 0, "its own timeline");
    }
}

/// Goal: an entry behind a gate, and everything submitted after it, runs only after the host has opened the gate.
/// Entries before it do not wait.
#[test]
fn work_behind_a_gate_waits_for_the_host() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let device = vulkan.device(driver);
        let words = Words::new(&device, 64, "words");
        let commands = add(&words, &adder(&device, 1), 1);
        let queue = device.queue(Role::Compute);
        let gate = Arc::new(Gate::new(&device).expect("a gate"));
        let entry = |gate| QueueEntry { commands: vec![commands.clone()], gate };
        let at = |value| Some((Arc::clone(&gate), value));
        let first = Batch { entries: vec![entry(None), entry(at(1)), entry(None)], waits: vec![] };
        let last = queue.submit(first).expect("submitted");
        let behind = queue.submit(Batch { entries: vec![entry(at(2))], waits: vec![] }).expect("submitted");
        let value = |value| Point { role: Role::Compute, value };
        wait(&device, value(1));
        assert!(!device.wait(value(2), Duration::from_millis(200)).expect("alive"), "{driver:?}: it ran");
        assert_eq!(device.progress(Role::Compute).expect("alive"), 1);
        gate.open(1).expect("opened");
        wait(&device, last);
        assert!(!device.wait(behind, Duration::from_millis(100)).expect("alive"), "{driver:?}: it ran");
        assert_eq!(words.read(), vec![3; 64], "{driver:?}");
        // Opening to 3 opens 2 as well. An entry behind a gate that is already open runs at once.
        gate.open(3).expect("opened");
        gate.open(2).expect("a value that is open already");
        wait(&device, behind);
        let open = queue.submit(Batch { entries: vec![entry(at(3))], waits: vec![] }).expect("submitted");
        wait(&device, open);
        assert_eq!(words.read(), vec![5; 64], "{driver:?}");
    }
}

#[test]
fn an_unreached_point_is_not_reached_and_a_wait_for_it_ends_in_time() {
    let vulkan = Vulkan::new();
    let device = vulkan.device(Driver::first());
    let never = Point { role: Role::Transfer, value: 1 };
    let start = std::time::Instant::now();
    assert!(!device.reached(never).expect("alive"));
    assert!(!device.wait(never, Duration::from_millis(300)).expect("alive"));
    assert!(start.elapsed() >= Duration::from_millis(300), "a whole wait, though it is cut into slices");
    let zero = Point { role: Role::Compute, value: 0 };
    assert!(device.reached(zero).expect("alive"), "0 was reached before anything ran");
    assert!(device.wait_any(&[never, zero], LONG).expect("alive"));
}

/// Goal: a submission that waits for a later submission of the other role on the same hardware queue neither deadlocks
/// nor runs too early. Method: two threads; the one that waits submits first; the result shows the order of execution.
#[test]
fn a_wait_submitted_before_its_signal_on_a_shared_queue_is_held_back() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let device = vulkan.device(driver);
        let (compute, transfer) = (device.queue(Role::Compute), device.queue(Role::Transfer));
        assert!(compute.aliased() || driver == Driver::Gpu, "CPU drivers have one queue");
        let keeps = if compute.aliased() { 2 } else { 0 };
        let words = Words::new(&device, 64, "words");
        let pipeline = adder(&device, 1);
        let fill = Commands::record(&device, Role::Transfer, |e| {
            e.barrier_full();
            e.fill(words.buffer, 0, 256, 40);
            e.barrier_host();
        })
        .expect("commands");
        let loaded = Point { role: Role::Transfer, value: 1 };
        let (first, second) = (add(&words, &pipeline, 1), add(&words, &pipeline, 1));
        let (held, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let a = compute.submit(Batch::one(first, vec![loaded])).expect("accepted");
                let b = compute.submit(Batch::one(second, vec![])).expect("accepted");
                held.send(compute.deferred()).expect("the other thread listens");
                wait(&device, b);
                (a.value, b.value)
            });
            assert_eq!(told.recv_timeout(LONG).expect("no deadlock in submit"), keeps, "held back");
            assert!(!device.wait(compute.last(), Duration::from_millis(50)).expect("alive"), "nothing ran early");
            assert_eq!(transfer.submit(Batch::one(fill, vec![])).expect("submitted"), loaded);
            assert_eq!(waiting.join().expect("no panic"), (1, 2));
        });
        assert_eq!(compute.deferred(), 0);
        assert_eq!(words.read(), vec![42; 64], "filled first, then added to twice, on {driver:?}");
    }
}

#[test]
fn waits_that_can_never_end_are_refused() {
    let vulkan = Vulkan::new();
    let device = vulkan.device(Driver::first());
    let only_signal = |waits| Batch { entries: vec![QueueEntry::default()], waits };
    let (compute, transfer) = (device.queue(Role::Compute), device.queue(Role::Transfer));
    let own = Point { role: Role::Compute, value: 1 };
    assert!(matches!(compute.submit(only_signal(vec![own])), Err(DeviceError::NeverRuns { .. })));
    let theirs = Point { role: Role::Transfer, value: 1 };
    let held = compute.submit(only_signal(vec![theirs])).expect("held back");
    if compute.aliased() {
        assert!(matches!(transfer.submit(only_signal(vec![held])), Err(DeviceError::NeverRuns { .. })));
    }
    transfer.submit(only_signal(vec![])).expect("releases it");
    wait(&device, held);
    assert_eq!(transfer.last(), theirs, "a refused batch takes no value");
}

/// Goal: handles may be dropped while their work is in flight, and a device may be dropped while batches are held back.
/// Method: the validation layer.
#[test]
fn everything_may_be_let_go_early() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let device = vulkan.device(driver);
        let words = Words::new(&device, 1 << 16, "words");
        for _ in 0..8 {
            let queries = Queries::new(&device, 1).expect("timestamps");
            let pipeline = adder(&device, 1);
            let commands = Commands::record(&device, Role::Compute, |e| {
                e.barrier_full();
                e.bind(&pipeline);
                e.push(&words.arguments(1));
                e.dispatch([words.count as u32 / 32, 1, 1]);
                e.timestamp(&queries, 0);
                e.barrier_host();
            })
            .expect("commands");
            device.queue(Role::Compute).submit(Batch::one(commands, vec![])).expect("submitted");
        }
        wait(&device, device.queue(Role::Compute).last());
        assert_eq!(words.read()[..4], [8; 4]);
        device.queue(Role::Compute).collect().expect("alive");
        let never = Point { role: Role::Transfer, value: 9 };
        if device.queue(Role::Compute).aliased() {
            let late = Batch::one(add(&words, &adder(&device, 1), 1), vec![never]);
            device.queue(Role::Compute).submit(late).expect("held");
        }
        device.wait_idle().expect("what is held back is not waited for");
    }
}

#[test]
fn timestamps_grow_and_can_be_set_beside_the_hosts_clock() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let device = vulkan.device(driver);
        let words = Words::new(&device, 1 << 14, "words");
        let pipeline = adder(&device, 1);
        let queries = Queries::new(&device, 4).expect("timestamps");
        let commands = Commands::record(&device, Role::Compute, |e| {
            e.barrier_full();
            e.reset(&queries, 0, 2);
            e.timestamp(&queries, 0);
            e.bind(&pipeline);
            e.push(&words.arguments(1));
            e.dispatch([words.count as u32 / 32, 1, 1]);
            e.timestamp(&queries, 1);
        })
        .expect("commands");
        let mut before = 0;
        for _ in 0..3 {
            let point = device.queue(Role::Compute).submit(Batch::one(commands.clone(), vec![])).expect("submitted");
            wait(&device, point);
            let stamps = queries.read(0, 3).expect("read");
            let (begin, end) = (stamps[0].expect("written"), stamps[1].expect("written"));
            assert!(before <= begin && begin <= end, "{driver:?}: {before} {begin} {end}");
            assert_eq!(stamps[2], None, "never written");
            before = end;
        }
        queries.reset();
        assert_eq!(queries.read(0, 2).expect("read"), [None, None]);
        match device.calibrate() {
            Ok(calibration) => {
                assert!(device.adapter().capabilities.calibrated_timestamps);
                assert!(calibration.host_ns > 0 && calibration.device_ns >= before, "{calibration:?}");
            }
            Err(e) => {
                assert!(!device.adapter().capabilities.calibrated_timestamps, "{e}");
                assert!(matches!(e, DeviceError::Unsupported { .. }));
            }
        }
    }
}

#[test]
fn a_pipeline_that_the_device_cannot_run_is_an_error_with_both_numbers() {
    let vulkan = Vulkan::new();
    let device = vulkan.device(Driver::first());
    let cache = PipelineCache::in_memory(&device).expect("a cache");
    let wide = PipelineDesc { required_subgroup: Some(64), ..desc("wide", &[]) };
    let text = Pipeline::new(&device, &cache, &wide).expect_err("too wide").to_string();
    let own = device.adapter().capabilities.subgroup_size;
    assert!(text.contains("64") && text.contains(&format!("has {own}")), "{text}");
    let fitting = PipelineDesc { required_subgroup: Some(own), ..desc("fitting", &[]) };
    Pipeline::new(&device, &cache, &fitting).expect("the driver's own size");
    let pushing = PipelineDesc { push_bytes: 4096, ..desc("pushing", &[]) };
    let text = Pipeline::new(&device, &cache, &pushing).expect_err("too many").to_string();
    let room = device.adapter().capabilities.max_push_bytes;
    assert!(text.contains("4096") && text.contains(&room.to_string()), "{text}");
    let text = device.create_buffer(1 << 60, "weights").expect_err("too large").to_string();
    assert!(text.contains("\"weights\"") && text.contains(&(1u64 << 60).to_string()), "{text}");
}

/// Goal: a valid cache file is used. A truncated, modified or foreign one is ignored and replaced.
#[test]
fn the_pipeline_cache_survives_torn_and_foreign_files() {
    let vulkan = Vulkan::new();
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path().join("not").join("there").join("yet");
    let devices: Vec<_> = Driver::all().iter().map(|&driver| vulkan.device(driver)).collect();
    let open = |device: &Device, set: u64| PipelineCache::open(&dir, device, set).expect("a cache");
    for device in &devices {
        let cache = open(device, 1);
        assert_eq!(cache.loaded_bytes(), 0, "nothing there yet");
        // Several threads add pipelines to one cache.
        std::thread::scope(|scope| {
            for factor in 0..4 {
                let cache = &cache;
                scope.spawn(move || Pipeline::new(device, cache, &desc("add", &[factor])).expect("a pipeline"));
            }
        });
        cache.save().expect("written");
        assert!(open(device, 1).loaded_bytes() > 0, "the file is used");
        assert_eq!(open(device, 2).loaded_bytes(), 0, "another shader set has another file");
    }
    let file = |device: &Arc<Device>| open(device, 1).file().expect("on disk").to_owned();
    let own = file(&devices[0]);
    let others: Vec<_> = devices[1..].iter().map(file).collect();
    assert!(!others.contains(&own), "each driver has its own file");

    let good = std::fs::read(&own).expect("the file");
    let mut changed = good.clone();
    *changed.last_mut().expect("not empty") ^= 1;
    let mut bad = vec![("torn", good[..good.len() / 2].to_vec()), ("empty", Vec::new()), ("changed", changed)];
    bad.extend(others.iter().map(|path| ("foreign", std::fs::read(path).expect("the file"))));
    for (what, bytes) in bad {
        std::fs::write(&own, bytes).expect("written");
        let cache = open(&devices[0], 1);
        assert_eq!(cache.loaded_bytes(), 0, "{what}");
        Pipeline::new(&devices[0], &cache, &desc("add", &[1])).expect("built anew");
        cache.save().expect("written");
        assert!(open(&devices[0], 1).loaded_bytes() > 0, "{what}: replaced");
    }
    let names: Vec<_> = std::fs::read_dir(&dir).expect("the folder").flatten().map(|e| e.file_name()).collect();
    assert_eq!(names.len(), devices.len(), "no temporary file is left: {names:?}");
}

/// Goal: if the name of the cache file belongs to something other than a regular file, the start neither blocks nor
/// fills memory.
#[test]
fn the_pipeline_cache_reads_regular_files_only() {
    let vulkan = Vulkan::new();
    let folder = tempfile::tempdir().expect("a folder");
    let device = vulkan.device(Driver::first());
    let (said, opened) = std::sync::mpsc::channel();
    let dir = folder.path().to_owned();
    let thread = std::thread::spawn(move || {
        let open = || PipelineCache::open(&dir, &device, 1).expect("a cache");
        let file = open().file().expect("on disk").to_owned();
        for place in ["pipe", "zeroes", "nothing"] {
            match place {
                "pipe" => assert!(Command::new("mkfifo").arg(&file).status().expect("mkfifo").success()),
                "zeroes" => std::os::unix::fs::symlink("/dev/zero", &file).expect("a link"),
                _ => std::os::unix::fs::symlink("/nowhere/pipelines", &file).expect("a link"),
            }
            let cache = open();
            assert_eq!(cache.loaded_bytes(), 0, "{place}");
            // Saving replaces it by a regular file.
            Pipeline::new(&device, &cache, &desc("add", &[1])).expect("built anew");
            cache.save().expect("written");
            assert!(open().loaded_bytes() > 0, "{place}");
            std::fs::remove_file(&file).expect("removed");
        }
        said.send(()).expect("the test waits");
    });
    opened.recv_timeout(LONG).expect("it waits for the other end of a pipe, or has failed");
    // It has the device, which must be gone before the validation layer ends with the process.
    thread.join().expect("no panic");
}

#[test]
fn a_lost_device_ends_waits_and_refuses_work() {
    let vulkan = Vulkan::new();
    let device = vulkan.device(Driver::first());
    let never = Point { role: Role::Transfer, value: 1 };
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| device.wait(never, LONG));
        std::thread::sleep(Duration::from_millis(20));
        device.declare_lost("a watchdog");
        let error = waiting.join().expect("no panic").expect_err("lost, not timed out");
        assert!(error.is_lost() && error.to_string().contains("a watchdog"), "{error}");
    });
    let batch = Batch { entries: vec![QueueEntry::default()], waits: vec![] };
    assert!(device.queue(Role::Compute).submit(batch).is_err_and(|e| e.is_lost()));
    assert!(device.reached(never).is_err_and(|e| e.is_lost()));
    assert!(device.is_lost());
    drop(device);
    // The same adapter can be opened again.
    let again = vulkan.device(Driver::first());
    let batch = Batch { entries: vec![QueueEntry::default()], waits: vec![] };
    wait(&again, again.queue(Role::Compute).submit(batch).expect("a new device"));
}

#[test]
fn the_budget_is_that_of_the_device_heap() {
    let vulkan = Vulkan::new();
    for &driver in Driver::all() {
        let device = vulkan.device(driver);
        let budget = device.budget();
        let heap = device.adapter().memory_heaps.iter().filter(|h| h.device_local).map(|h| h.bytes).max();
        assert_eq!(Some(budget.heap_bytes), heap);
        assert_eq!(budget.reported, device.adapter().capabilities.memory_budget);
        assert!(budget.free_bytes() > 0 && budget.free_bytes() <= budget.heap_bytes, "{budget:?}");
    }
}

/// Goal: the validation on which every other test relies does report hazards. Method: two fills of the same buffer
/// without a barrier between them, once in one recording and, if the layer tracks submissions, in two entries of a
/// batch.
#[test]
fn validation_reports_a_missing_barrier() {
    let submit_time = crate::common::layer().submit_time;
    for apart in [false, true] {
        let vulkan = Vulkan::new();
        let device = vulkan.device(Driver::first());
        let words = Words::new(&device, 64, "words");
        let fill = |e: &mut ostinato::device::Encoder| e.fill(words.buffer, 0, 256, 1);
        let record = |times: usize| {
            Commands::record(&device, Role::Compute, |e| (0..times).for_each(|_| fill(e))).expect("commands")
        };
        let recordings = if apart { vec![record(1), record(1)] } else { vec![record(2)] };
        // Both are in one batch. Between two batches the queue could observe that the first has finished, and the layer
        // would count that as ordering.
        let entries = recordings.into_iter().map(|c| QueueEntry { commands: vec![c], gate: None }).collect();
        device.queue(Role::Compute).submit(Batch { entries, waits: vec![] }).expect("submitted");
        wait(&device, device.queue(Role::Compute).last());
        drop((words, device));
        let messages = vulkan.provoked();
        let hazards = messages.iter().filter(|m| m.contains("SYNC-HAZARD-WRITE-AFTER-WRITE")).count();
        if !apart || submit_time {
            assert!(hazards > 0, "apart: {apart}, {messages:?}");
            assert!(messages.iter().any(|m| m.contains("words")), "objects carry their names: {messages:?}");
        }
    }
}

/// Runs `ostinato devices` with the drivers of these tests, or with the given ones.
fn devices(arguments: &[&str], drivers: Option<&str>) -> std::process::Output {
    crate::common::layer();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ostinato"));
    command.arg("devices").args(arguments);
    if let Some(drivers) = drivers {
        command.env("VK_ICD_FILENAMES", drivers).env("VK_DRIVER_FILES", drivers);
    }
    command.output().expect("the program runs")
}

#[test]
fn the_program_lists_the_adapters_that_the_layer_sees() {
    let vulkan = Vulkan::new();
    let output = devices(&["--json"], None);
    assert!(output.status.success(), "{output:?}");
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("one array");
    let text = String::from_utf8(devices(&[], None).stdout).expect("text");
    let adapters = vulkan.instance.adapters();
    let explained = String::from_utf8_lossy(&output.stderr).contains("no GPU driver could be used");
    assert_eq!(explained, adapters.iter().all(|adapter| adapter.is_cpu()), "{output:?}");
    assert_eq!(rows.len(), adapters.len());
    for (row, adapter) in rows.iter().zip(&adapters) {
        assert_eq!(row["index"], adapter.index);
        assert_eq!(row["name"], adapter.name.as_str());
        assert_eq!(row["uuid"], adapter.uuid.as_str());
        assert_eq!(row["type"], adapter.kind.to_string());
        assert_eq!(row["usable"], adapter.usable());
        assert!(text.contains(&adapter.name) && text.contains(&adapter.uuid), "{text}");
    }
}

#[test]
fn without_a_driver_the_program_says_so_and_that_the_user_can_mend_it() {
    let output = devices(&["--json"], Some("/nonexistent/driver.json"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("no Vulkan driver is installed"), "{text}");
    // The message names the manifest that was looked for.
    assert!(text.contains("/nonexistent/driver.json is not there"), "{text}");
}

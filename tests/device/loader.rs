//! Tests of memory, the transfer actor and the loader on both CPU drivers under validation. Loaded data is read back
//! and compared with its definition, and loads that fail or are cancelled leave nothing behind. Both drivers have one
//! queue, so transfers share it with compute.

use crate::common::{Driver, Vulkan};
use ostinato::actors::compute::{Compute, GpuTime};
use ostinato::actors::loader::{LoadError, LoadPlan, LoadTensor, Loader, MatrixRows, TensorSource, WeightLoad};
use ostinato::actors::packer::{DevicePacker, RawSlots};
use ostinato::actors::transfer::{Piece, Transfer, TransferError};
use ostinato::device::{Batch, Device, Point, QueueEntry, Role};
use ostinato::kernels::pack_codes::PackVariant;
use ostinato::kernels::region::Pipelines;
use ostinato::memory::pack::{Format, Layout, Packing, RowMap, Rows, SourceFormat, Transposed, fragment_index, pack};
use ostinato::memory::{Arena, Buffer, MemoryError, Place, StagingRing, WeightFile};
use ostinato::model::checkpoint::{Checkpoint, SourceRef, WeightKind, WeightSpec};
use ostinato::quant::blocks::BlockType;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);

/// A device with its actors and a staging ring of 3 slots of 8 KiB, which a few rows fill.
struct Host {
    // Field order matters: the actors end before the memory and the device are dropped.
    loader: Loader,
    transfer: Arc<Transfer>,
    ring: StagingRing,
    arena: Arena,
    device: Arc<Device>,
}

impl Host {
    fn new(vulkan: &Vulkan, driver: Driver) -> Host {
        Host::with_slots(vulkan, driver, 8 << 10)
    }

    fn with_slots(vulkan: &Vulkan, driver: Driver, bytes: usize) -> Host {
        let device = vulkan.device(driver);
        let arena = Arena::new(&device).unwrap();
        let ring = StagingRing::new(&arena, 3, bytes).unwrap();
        let transfer = Arc::new(Transfer::spawn(&arena).unwrap());
        let loader = Loader::spawn(Arc::clone(&transfer), ring.clone(), Some(4)).unwrap();
        Host { loader, transfer, ring, arena, device }
    }

    fn load(&self, tensors: Vec<LoadTensor>) -> WeightLoad {
        self.loader.load(LoadPlan { tensors, packer: None }).unwrap()
    }

    /// Submits an empty batch that signals the next compute point.
    fn compute_step(&self) -> Point {
        let batch = Batch { entries: vec![QueueEntry::default()], waits: Vec::new() };
        self.device.queue(Role::Compute).submit(batch).unwrap()
    }
}

/// Returns a file of bf16 numbers after a header of 7 bytes. Number `i` has the bits `i * 40503`, so that every bit
/// pattern occurs.
fn shard(numbers: usize) -> (tempfile::NamedTempFile, Arc<WeightFile>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..numbers).flat_map(|i| bits(i).to_le_bytes()).collect();
    // The header has an odd length, because tensors need no alignment.
    std::fs::write(file.path(), [&[0xff; 7][..], &bytes].concat()).unwrap();
    let opened = Arc::new(WeightFile::open(file.path()).unwrap());
    (file, opened)
}

fn bits(i: usize) -> u16 {
    (i as u32).wrapping_mul(40503) as u16
}

/// Returns a source of `rows` rows that begins at number `first` of the shard.
fn source(file: &Arc<WeightFile>, first: usize, rows: u32, cols: u32, first_row: u32, row_step: u32) -> TensorSource {
    let offset = 7 + 2 * first as u64;
    let map = RowMap { first_row, row_step, ..RowMap::whole(SourceFormat::Numbers(Format::Bf16), rows, cols) };
    TensorSource { file: Arc::clone(file), offset, map, transposed: None, matrix: None }
}

fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}

fn each_driver(test: impl Fn(&Vulkan, Driver)) {
    for driver in Driver::BOTH {
        let vulkan = Vulkan::new();
        test(&vulkan, driver);
        vulkan.assert_clean();
    }
}

/// Goal: every kind of tensor of a model arrives as defined through a ring much smaller than the data. Method: gate and
/// up interleaved and q, k, v in ranges, both in fragment order with ragged sizes; an embedding in row-major order with
/// padding; a norm widened to f32; two tensors in one buffer.
#[test]
fn a_plan_arrives_as_defined() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        let (_keep, file) = shard(200_000);
        let local = |name: &str, bytes| host.arena.buffer(name, bytes, Place::DeviceLocal).unwrap();
        let fragments = |rows, cols| Packing { rows, cols, layout: Layout::Fragments, format: Format::Bf16 };

        let gate_up = fragments(2 * 100, 72);
        let qkv = fragments(37 + 5 + 5, 300);
        let embed =
            Packing { rows: 301, cols: 72, layout: Layout::RowMajor { columns_multiple: 16 }, format: Format::Bf16 };
        let norm = Packing { rows: 1, cols: 72, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::F32 };
        let matrices = local("matrices", gate_up.bytes() + qkv.bytes());
        let rest = local("rest", norm.bytes() + embed.bytes());
        let tensor = |name: &str, target, offset, packing, sources| LoadTensor {
            name: name.to_owned(),
            target: Arc::clone(target),
            offset,
            packing,
            sources,
        };
        let (gate, up, q, k, v, table, scale) = (0, 10_000, 20_000, 40_000, 50_000, 60_000, 199_000);
        let load = host.load(vec![
            tensor(
                "gate_up",
                &matrices,
                0,
                gate_up,
                vec![source(&file, gate, 100, 72, 0, 2), source(&file, up, 100, 72, 1, 2)],
            ),
            tensor(
                "qkv",
                &matrices,
                gate_up.bytes(),
                qkv,
                vec![source(&file, q, 37, 300, 0, 1), source(&file, k, 5, 300, 37, 1), source(&file, v, 5, 300, 42, 1)],
            ),
            tensor("norm", &rest, 0, norm, vec![source(&file, scale, 1, 72, 0, 1)]),
            tensor("embed", &rest, norm.bytes(), embed, vec![source(&file, table, 301, 72, 0, 1)]),
        ]);
        let mut said = Vec::new();
        let report = load.wait_with(|p| said.push(p)).unwrap();
        let total = matrices.bytes() + rest.bytes();
        assert_eq!(report.bytes_written, total);
        assert_eq!(report.bytes_read, 2 * (200 * 72 + 47 * 300 + 72 + 301 * 72));
        assert!(report.slots > 3 * host.ring.slots() as u64, "{} slots: the ring was not reused", report.slots);
        assert!(said.iter().all(|p| p.bytes_total == total && p.bytes_done <= total));
        assert!(!said.is_empty());

        let got = words(&host.transfer.read(&matrices, 0, matrices.bytes()).unwrap());
        let mut want = vec![0u16; (gate_up.bytes() / 2) as usize];
        for row in 0..200u32 {
            for col in 0..72u32 {
                let first = if row % 2 == 0 { gate } else { up };
                want[fragment_index(row, col, gate_up.padded_cols())] = bits(first + (row / 2 * 72 + col) as usize);
            }
        }
        let mut want_qkv = vec![0u16; (qkv.bytes() / 2) as usize];
        for row in 0..47u32 {
            for col in 0..300u32 {
                let (first, row_there) = match row {
                    0..37 => (q, row),
                    37..42 => (k, row - 37),
                    _ => (v, row - 42),
                };
                want_qkv[fragment_index(row, col, qkv.padded_cols())] = bits(first + (row_there * 300 + col) as usize);
            }
        }
        want.extend(want_qkv);
        assert!(got == want, "fragments");

        let got = host.transfer.read(&rest, 0, rest.bytes()).unwrap();
        for col in 0..72 {
            let word = u32::from_le_bytes(got[4 * col..4 * col + 4].try_into().unwrap());
            assert_eq!(word, u32::from(bits(scale + col)) << 16, "norm {col}");
        }
        let rows = words(&got[norm.bytes() as usize..]);
        for (row, numbers) in rows.chunks(80).enumerate() {
            let want: Vec<u16> = (0..72).map(|c| bits(table + row * 72 + c)).chain([0; 8]).collect();
            assert_eq!(numbers, want, "embed {row}");
        }
    });
}

/// Goal: in a tensor of many experts, where each comes from two places in a shard, every row arrives in its place
/// although each part of the tensor is packed from only a few of its sources; and a norm stored minus one arrives with
/// the one added. Method: slots that hold less than two experts, and sources in no particular order.
#[test]
fn experts_and_norms_around_zero_arrive_as_defined() {
    let (experts, inner, cols) = (40u32, 24u32, 72u32);
    let vulkan = Vulkan::new();
    let host = Host::new(&vulkan, Driver::first());
    let (_keep, file) = shard(200_000);
    let packing = Packing { rows: experts * 2 * inner, cols, layout: Layout::Fragments, format: Format::Bf16 };
    let norm = Packing { rows: 96, cols: 1, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::F32 };
    let matrices = host.arena.buffer("experts", packing.bytes(), Place::DeviceLocal).unwrap();
    let vector = host.arena.buffer("norm", norm.bytes(), Place::DeviceLocal).unwrap();
    // Returns the shard's number at which an expert's gate (part 0) or up projection (part 1) begins.
    let first = |expert: u32, part: u32| ((2 * (expert * 17 % experts) + part) * inner * cols) as usize;
    let sources = (0..experts).rev().flat_map(|expert| {
        [1, 0].map(|part| source(&file, first(expert, part), inner, cols, 2 * inner * expert + part, 2))
    });
    let tensor = |name: &str, target: &Arc<_>, packing, sources| LoadTensor {
        name: name.to_owned(),
        target: Arc::clone(target),
        offset: 0,
        packing,
        sources,
    };
    let scale = 150_000;
    let mut around_zero = source(&file, scale, 90, 1, 0, 1);
    around_zero.map.plus = 1.0;
    let load = host.load(vec![
        tensor("experts", &matrices, packing, sources.collect()),
        tensor("norm", &vector, norm, vec![around_zero]),
    ]);
    load.wait().unwrap();

    let mut want = vec![0u16; (packing.bytes() / 2) as usize];
    for row in 0..packing.rows {
        let (expert, part, of_part) = (row / (2 * inner), row % 2, row % (2 * inner) / 2);
        for col in 0..cols {
            let number = first(expert, part) + (of_part * cols + col) as usize;
            want[fragment_index(row, col, packing.padded_cols())] = bits(number);
        }
    }
    assert!(words(&host.transfer.read(&matrices, 0, matrices.bytes()).unwrap()) == want, "experts");
    let got = host.transfer.read(&vector, 0, vector.bytes()).unwrap();
    for (i, word) in got.chunks_exact(4).enumerate() {
        let found = f32::from_le_bytes(word.try_into().unwrap());
        let stored = f32::from_bits(u32::from(bits(scale + i)) << 16);
        let wanted = if i < 90 { stored + 1.0 } else { 0.0 };
        assert!(found == wanted || found.is_nan() && wanted.is_nan(), "norm {i}: {found}, not {wanted}");
    }
    drop(host);
    vulkan.assert_clean();
}

/// Goal: rows that are columns of stored matrices arrive in their places, from a file that is mapped and from one that is
/// read. Method: matrices of two experts, the second in two sources, through slots smaller than one.
#[test]
fn transposed_matrices_arrive_as_defined() {
    let (rows, cols) = (90u32, 72u32);
    for mapped in [true, false] {
        let vulkan = Vulkan::new();
        let host = Host::new(&vulkan, Driver::first());
        let (_keep, file) = shard(100_000);
        let file = if mapped { file } else { Arc::new(Arc::try_unwrap(file).expect("the only reference").unmapped()) };
        let packing = Packing { rows: 2 * rows, cols, layout: Layout::Fragments, format: Format::Bf16 };
        let target = host.arena.buffer("experts", packing.bytes(), Place::DeviceLocal).unwrap();
        let first = |expert: u32| (1000 + expert * rows * cols) as usize;
        let columns = |expert: u32, from: u32, count: u32| TensorSource {
            transposed: Some(Transposed { width: rows, first: from }),
            ..source(&file, first(expert), count, cols, expert * rows + from, 1)
        };
        let tensor = LoadTensor {
            name: "experts".to_owned(),
            target: Arc::clone(&target),
            offset: 0,
            packing,
            sources: vec![columns(1, 37, 53), columns(0, 0, rows), columns(1, 0, 37)],
        };
        let report = host.load(vec![tensor]).wait().unwrap();
        assert_eq!(report.bytes_read, u64::from(2 * 2 * rows * cols));
        let mut want = vec![0u16; (packing.bytes() / 2) as usize];
        for row in 0..2 * rows {
            for col in 0..cols {
                let number = first(row / rows) + (col * rows + row % rows) as usize;
                want[fragment_index(row, col, packing.padded_cols())] = bits(number);
            }
        }
        assert!(words(&host.transfer.read(&target, 0, target.bytes()).unwrap()) == want, "mapped: {mapped}");
        // The last column ends with the file.
        let beyond = TensorSource { offset: 7 + 2 * (100_000 - 72 * 90 + 1), ..columns(0, 0, rows) };
        let tensor = LoadTensor {
            name: "beyond".to_owned(),
            target: Arc::clone(&target),
            offset: 0,
            packing,
            sources: vec![beyond],
        };
        let error = host.load(vec![tensor]).wait().unwrap_err();
        assert!(matches!(error, LoadError::Memory(MemoryError::Truncated { .. })), "{error:?}");
        drop(host);
        vulkan.assert_clean();
    }
}

/// Goal: columns of quantised blocks arrive as numbers in their places, from a file that is mapped and from one that is
/// read. Method: matrices of two heads as GGUF files of latent attention have them, in a type of one and of several blocks
/// a row, one also with a factor and in two sources, through slots smaller than one, against decoded blocks.
#[test]
fn transposed_blocks_arrive_as_numbers() {
    let (rows, cols) = (64u32, 72u32);
    for (blocks, factor) in [(BlockType::Q8_0, None), (BlockType::Q4_1, Some(0.5f32)), (BlockType::Q5_0, None)] {
        let of_matrix = (rows * cols) as usize / blocks.elements() * blocks.bytes();
        // Scales are halves of moderate size: their bytes are those of every block's beginning.
        let mut bytes: Vec<u8> = (0..2 * of_matrix).map(|i| bits(i) as u8).collect();
        for (i, block) in bytes.chunks_exact_mut(blocks.bytes()).enumerate() {
            for half in 0..if blocks == BlockType::Q4_1 { 2 } else { 1 } {
                let scale = half::f16::from_f32((1 + i % 7 + half) as f32 / 64.0);
                block[2 * half..2 * half + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        let mut numbers = vec![0.0; (2 * rows * cols) as usize];
        blocks.dequantize(&bytes, &mut numbers);
        let format = match factor {
            None => SourceFormat::Blocks(blocks),
            Some(factor) => SourceFormat::ScaledBlocks(blocks, factor.to_bits()),
        };
        let keep = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(keep.path(), [&[0xff; 7][..], &bytes].concat()).unwrap();
        for mapped in [true, false] {
            let vulkan = Vulkan::new();
            let host = Host::new(&vulkan, Driver::first());
            let file = WeightFile::open(keep.path()).unwrap();
            let file = Arc::new(if mapped { file } else { file.unmapped() });
            let packing =
                Packing { rows: 2 * rows, cols, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::F32 };
            let target = host.arena.buffer("keys", packing.bytes(), Place::DeviceLocal).unwrap();
            let columns = |head: u32, from: u32, count: u32| TensorSource {
                offset: 7 + u64::from(head) * of_matrix as u64,
                map: RowMap { first_row: head * rows + from, ..RowMap::whole(format, count, cols) },
                transposed: Some(Transposed { width: rows, first: from }),
                ..source(&file, 0, count, cols, 0, 1)
            };
            let tensor = LoadTensor {
                name: "keys".to_owned(),
                target: Arc::clone(&target),
                offset: 0,
                packing,
                sources: vec![columns(1, 37, 27), columns(0, 0, rows), columns(1, 0, 37)],
            };
            host.load(vec![tensor]).wait().unwrap();
            let read = host.transfer.read(&target, 0, target.bytes()).unwrap();
            for (i, found) in read.chunks_exact(4).enumerate() {
                let (row, col) = (i as u32 / cols, i as u32 % cols);
                let stored = numbers[((row / rows * cols + col) * rows + row % rows) as usize];
                let (found, wanted) = (f32::from_le_bytes(found.try_into().unwrap()), stored * factor.unwrap_or(1.0));
                assert!(found == wanted, "{blocks}, mapped: {mapped}, {row}, {col}: {found}, not {wanted}");
            }
            drop(host);
            vulkan.assert_clean();
        }
    }
}

/// Returns a weight of a checkpoint as the loader gets it; `open` opens the files of its sources.
fn tensor_of(
    weight: &WeightSpec,
    target: &Arc<Buffer>,
    packing: Packing,
    open: impl Fn(&Path) -> Arc<WeightFile>,
) -> LoadTensor {
    let source = |source: &SourceRef| TensorSource {
        file: open(&source.path),
        offset: source.offset,
        map: source.map,
        transposed: source.transposed,
        matrix: source.matrix.as_ref().map(|of| MatrixRows {
            description: Arc::clone(&of.matrix.description),
            tensors: of.matrix.places.iter().map(|place| (open(&place.path), place.range())).collect(),
            first: of.first,
            ordered: weight.order.is_some(),
        }),
    };
    LoadTensor {
        name: weight.name.clone(),
        target: Arc::clone(target),
        offset: 0,
        packing,
        sources: weight.sources.iter().map(source).collect(),
    }
}

/// Goal: files that cannot be mapped give the same weights as those that are. Method: the weights of quantised checkpoints
/// are loaded from both through slots that hold a few rows, so that parts of each weight are read.
#[test]
fn quantised_weights_that_are_read_are_those_that_are_mapped() {
    let vulkan = Vulkan::new();
    let host = Host::new(&vulkan, Driver::first());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
    let mut compared = 0;
    for fixture in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let file = fixture.join("model.gguf");
        let checkpoint = Checkpoint::open(if file.is_file() { &file } else { &fixture }).unwrap();
        for weight in checkpoint.weights().iter().filter(|weight| weight.kind == WeightKind::Matrix) {
            let packing = Packing {
                rows: weight.rows,
                cols: weight.cols,
                layout: Layout::RowMajor { columns_multiple: 8 },
                format: weight.format,
            };
            let target = host.arena.buffer("weight", packing.bytes(), Place::DeviceLocal).unwrap();
            let load = |mapped: bool| {
                let open = |path: &Path| {
                    let file = WeightFile::open(path).unwrap();
                    Arc::new(if mapped { file } else { file.unmapped() })
                };
                let tensor = tensor_of(weight, &target, packing, open);
                host.load(vec![tensor]).wait().unwrap();
                host.transfer.read(&target, 0, target.bytes()).unwrap()
            };
            assert!(load(true) == load(false), "{}: {}", fixture.display(), weight.name);
            compared += 1;
        }
    }
    assert!(compared > 100, "only {compared} weights were compared");
    drop(host);
    vulkan.assert_clean();
}

/// Goal: a shard that is too short is detected before anything is copied. The error names the file and both numbers,
/// and all memory is freed.
#[test]
fn a_truncated_shard_is_refused() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        let before = host.arena.usage();
        let (_keep, file) = shard(1000);
        let packing =
            Packing { rows: 10, cols: 101, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::Bf16 };
        let target = host.arena.buffer("t", packing.bytes(), Place::DeviceLocal).unwrap();
        let tensor = LoadTensor {
            name: "layers.0.mlp".to_owned(),
            target,
            offset: 0,
            packing,
            sources: vec![source(&file, 0, 10, 101, 0, 1)],
        };
        let submits = host.transfer.counters().submits;
        let error = host.load(vec![tensor]).wait().unwrap_err();
        assert!(matches!(error, LoadError::Memory(MemoryError::Truncated { .. })), "{error:?}");
        let text = error.to_string();
        assert!(text.ends_with("is truncated: layers.0.mlp ends at byte 2027, the file has 2007"), "{text}");
        assert_eq!(host.transfer.counters().submits, submits, "nothing was copied");
        assert_eq!(host.arena.usage().buffers_bytes, before.buffers_bytes);
    });
}

/// Goal: each other inconsistency in a plan has its own error, and the loader continues afterwards.
#[test]
fn contradictions_are_errors_and_the_loader_survives_them() {
    let vulkan = Vulkan::new();
    let host = Host::new(&vulkan, Driver::Lavapipe);
    let (_keep, file) = shard(1000);
    let target = host.arena.buffer("t", 200, Place::DeviceLocal).unwrap();
    let row_major = Layout::RowMajor { columns_multiple: 1 };
    let packing = Packing { rows: 10, cols: 10, layout: row_major, format: Format::Bf16 };
    let good = LoadTensor {
        name: "w".to_owned(),
        target: Arc::clone(&target),
        offset: 0,
        packing,
        sources: vec![source(&file, 0, 10, 10, 0, 1)],
    };
    let too_far = LoadTensor { offset: 4, ..good.clone() };
    let error = host.load(vec![too_far]).wait().unwrap_err();
    assert_eq!(error.to_string(), "w needs 200 bytes at 4 of \"t\", which has 200");
    let outside = LoadTensor { sources: vec![source(&file, 0, 5, 10, 2, 2)], ..good.clone() };
    assert!(matches!(host.load(vec![outside]).wait(), Err(LoadError::Outside { .. })));
    let wide = Packing { layout: Layout::Fragments, format: Format::F32, rows: 1, cols: 1 };
    let wide = LoadTensor { packing: wide, sources: vec![], ..good.clone() };
    assert!(matches!(host.load(vec![wide]).wait(), Err(LoadError::NotPackable { .. })));

    let report = host.load(vec![good]).wait().unwrap();
    assert_eq!(report.bytes_written, 200);
    let got = words(&host.transfer.read(&target, 0, 200).unwrap());
    assert_eq!(got, (0..100).map(bits).collect::<Vec<_>>());
    assert_eq!(host.load(vec![]).wait().unwrap().point, None);
}

/// Goal: a dropped load ends early without harm. Method: the test holds every staging slot, so that the load is
/// certainly in progress when it is dropped.
#[test]
fn a_dropped_load_is_cancelled() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        let (_keep, file) = shard(100_000);
        let packing =
            Packing { rows: 1000, cols: 100, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::Bf16 };
        let tensor = || LoadTensor {
            name: "w".to_owned(),
            target: host.arena.buffer("w", packing.bytes(), Place::DeviceLocal).unwrap(),
            offset: 0,
            packing,
            sources: vec![source(&file, 0, 1000, 100, 0, 1)],
        };
        let slots: Vec<_> = (0..3).map(|_| host.ring.acquire().unwrap()).collect();
        let full = host.ring.acquire_within(Duration::from_millis(20)).unwrap_err();
        assert!(matches!(full, MemoryError::StagingTimeout { .. }), "{full}");
        let load = host.load(vec![tensor()]);
        let done = load.done().clone();
        assert!(done.recv_timeout(Duration::from_millis(50)).is_err(), "it waits for a slot");
        drop(load);
        drop(slots);
        let result = done.recv_timeout(LONG).unwrap();
        assert!(matches!(result, Err(LoadError::Cancelled)), "{result:?}");
        host.load(vec![tensor()]).wait().unwrap();
        // Dropping the loader cancels a load as well.
        let slots: Vec<_> = (0..3).map(|_| host.ring.acquire().unwrap()).collect();
        let load = host.load(vec![tensor()]);
        let release = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(slots);
        });
        let Host { loader, transfer, ring, .. } = host;
        drop(loader);
        assert!(matches!(load.wait(), Err(LoadError::Cancelled)));
        release.join().unwrap();
        drop((transfer, ring));
    });
}

/// Goal: if a file shrinks while it is loaded, that load fails and nothing else. Method: first the test holds every
/// staging slot, so that the load is certainly in progress when the file is truncated; then files are truncated at
/// various moments of a load, including while their memory map is read.
#[test]
fn a_file_that_shrinks_ends_its_load_only() {
    let vulkan = Vulkan::new();
    let host = Host::new(&vulkan, Driver::first());
    let (keep, file) = shard(100_000);
    let packing =
        Packing { rows: 1000, cols: 100, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::Bf16 };
    let target = host.arena.buffer("w", packing.bytes(), Place::DeviceLocal).unwrap();
    let sources = vec![source(&file, 0, 1000, 100, 0, 1)];
    let tensor = LoadTensor { name: "w".to_owned(), target, offset: 0, packing, sources };
    let slots: Vec<_> = (0..3).map(|_| host.ring.acquire().unwrap()).collect();
    let load = host.load(vec![tensor]);
    assert!(load.done().recv_timeout(Duration::from_millis(50)).is_err(), "it waits for a slot");
    keep.as_file().set_len(50_000).unwrap();
    drop(slots);
    let result = load.wait();
    let Err(LoadError::Memory(MemoryError::FileChanged { was: 200_007, is: 50_000, .. })) = result else {
        panic!("{result:?}")
    };
    let mut cut_short = 0;
    for round in 0..60 {
        let (keep, file) = shard(1_000_000);
        let packing = Packing { rows: 10_000, ..packing };
        let target = host.arena.buffer("w", packing.bytes(), Place::DeviceLocal).unwrap();
        let sources = vec![source(&file, 0, 10_000, 100, 0, 1)];
        let load = host.load(vec![LoadTensor { name: "w".to_owned(), target, offset: 0, packing, sources }]);
        std::thread::sleep(Duration::from_micros(100 * round));
        keep.as_file().set_len(100).unwrap();
        match load.wait() {
            Ok(report) => assert_eq!(report.bytes_written, 2_000_000),
            Err(LoadError::Memory(MemoryError::FileChanged { was: 2_000_007, is: 100, .. })) => cut_short += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(cut_short > 0, "no load was in progress");
    vulkan.assert_clean();
}

/// Goal: transfers happen in the order of their requests, even where they overlap, and a readback larger than the
/// actor's memory is complete.
#[test]
fn overlapping_transfers_keep_their_order() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        let bytes = 9 << 20 | 12;
        let buffer = host.arena.buffer("b", bytes, Place::DeviceLocal).unwrap();
        host.transfer.clear(&buffer).unwrap();
        let (submitted, points) = crossbeam_channel::bounded(64);
        // Each transfer overlaps a part of the one before.
        for i in 0..40u64 {
            let (offset, word) = (i * 1000, 0x0101_0101 * (i as u32 + 1));
            let waits = Vec::new();
            if i % 2 == 0 {
                host.transfer.fill(Arc::clone(&buffer), offset, 4000, word, waits, submitted.clone()).unwrap();
            } else {
                let mut slot = host.ring.acquire().unwrap();
                slot.bytes_mut()[..4000].fill(word as u8);
                let piece = Piece { from: 0, to: Arc::clone(&buffer), to_offset: offset, bytes: 4000 };
                host.transfer.copy(slot, vec![piece], waits, submitted.clone()).unwrap();
            }
        }
        host.transfer.upload(&host.ring, &buffer, bytes - 20_001, &[0xee; 20_001]).unwrap();
        let got = host.transfer.read(&buffer, 0, bytes).unwrap();
        let mut want = vec![0u8; bytes as usize];
        for i in 0..40usize {
            want[i * 1000..i * 1000 + 4000].fill(i as u8 + 1);
        }
        let end = want.len();
        want[end - 20_001..].fill(0xee);
        assert!(got == want, "order was not kept");
        let points: Vec<Point> = points.try_iter().map(Result::unwrap).collect();
        assert!(points.len() == 40 && points.is_sorted_by_key(|p| p.value), "{points:?}");
        let counters = host.transfer.counters();
        assert!(counters.barriers >= 39 && counters.submits <= 50 + 3 + 3, "{counters:?}");
        assert!(host.transfer.read(&buffer, 5, 0).unwrap().is_empty());
        assert_eq!(host.transfer.read(&buffer, bytes - 3, 3).unwrap(), [0xee; 3]);
    });
}

/// Goal: on a queue shared by both roles, a copy may be requested before the compute work for which it waits is
/// submitted; it is held back and then runs. Compute waits for copies in the same way.
#[test]
fn a_copy_waits_for_compute_that_is_not_submitted_yet() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        assert!(host.device.queue(Role::Transfer).aliased());
        let buffer = host.arena.buffer("b", 64, Place::DeviceLocal).unwrap();
        let next = Point { role: Role::Compute, value: host.device.queue(Role::Compute).last().value + 1 };
        let (submitted, points) = crossbeam_channel::bounded(1);
        host.transfer.fill(Arc::clone(&buffer), 0, 64, 7, vec![next], submitted).unwrap();
        let point = points.recv_timeout(LONG).unwrap().unwrap();
        assert!(!host.device.wait(point, Duration::from_millis(20)).unwrap(), "it ran too early");
        // A compute step that waits for the copy is submitted after the step for which the copy waits.
        assert_eq!(host.compute_step(), next);
        let batch = Batch { entries: vec![QueueEntry::default()], waits: vec![point] };
        let last = host.device.queue(Role::Compute).submit(batch).unwrap();
        assert!(host.device.wait(last, LONG).unwrap());
        assert!(host.device.reached(point).unwrap());
        let got = host.transfer.read(&buffer, 0, 64).unwrap();
        assert_eq!(got, [7, 0, 0, 0].repeat(16));
        // The copy also waits for marked compute use of the buffer, without an explicit wait.
        let used = Point { role: Role::Compute, value: last.value + 1 };
        buffer.mark_read(used);
        let (submitted, points) = crossbeam_channel::bounded(1);
        host.transfer.fill(Arc::clone(&buffer), 0, 64, 8, Vec::new(), submitted).unwrap();
        let point = points.recv_timeout(LONG).unwrap().unwrap();
        assert!(!host.device.wait(point, Duration::from_millis(20)).unwrap(), "the buffer was in use");
        host.compute_step();
        assert!(host.device.wait(point, LONG).unwrap());
    });
}

/// Goal: host access to a mapped buffer is exact at any alignment, and access outside of it is refused.
#[test]
fn the_host_sees_exactly_its_buffer() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        for place in [Place::Upload { bar: false }, Place::Upload { bar: true }, Place::Readback] {
            let buffer = host.arena.buffer("mapped", 37, place).unwrap();
            assert!(buffer.host_visible() && buffer.address().is_multiple_of(16) && buffer.address() > 0);
            buffer.write(0, &[0; 37]);
            for start in 0..8usize {
                for len in 0..20usize {
                    let data: Vec<u8> = (0..len).map(|i| (start * 20 + i + len) as u8).collect();
                    buffer.write(start as u64, &data);
                    let mut back = vec![0; len];
                    buffer.read(start as u64, &mut back);
                    assert_eq!(back, data, "{len} bytes at {start}");
                }
            }
            buffer.store_u32(8, 0xdead_beef);
            assert_eq!(buffer.load_u32(8), 0xdead_beef);
            let mut word = [0; 4];
            buffer.read(8, &mut word);
            assert_eq!(u32::from_ne_bytes(word), 0xdead_beef);
            let panics = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
            assert!(panics(&|| buffer.write(37, &[1])));
            assert!(panics(&|| buffer.read(u64::MAX, &mut [0])));
            assert!(panics(&|| buffer.store_u32(36, 1)));
            assert!(panics(&|| buffer.store_u32(2, 1)));
        }
        let hidden = host.arena.buffer("hidden", 16, Place::DeviceLocal).unwrap();
        assert!(!hidden.host_visible());
    });
}

/// Goal: a buffer that the driver cannot allocate in one piece is refused with both numbers, and memory that is dropped
/// is freed.
#[test]
fn a_buffer_above_the_drivers_limit_is_refused() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        let before = host.arena.usage();
        let allowed = host.device.adapter().capabilities.max_allocation_bytes;
        let error = host.arena.buffer("lm_head", allowed + 1, Place::DeviceLocal).unwrap_err();
        match error {
            MemoryError::TooLarge { name, asked, allowed: said, .. } => {
                assert_eq!((name.as_str(), asked, said), ("lm_head", allowed + 1, allowed));
            }
            other => panic!("{other}"),
        }
        let large = host.arena.buffer("large", 20 << 20, Place::DeviceLocal).unwrap();
        let small = host.arena.buffer("small", 100, Place::DeviceLocal).unwrap();
        assert!(host.arena.usage().buffers_bytes >= before.buffers_bytes + (20 << 20) + 100);
        drop((large, small));
        assert_eq!(host.arena.usage().buffers_bytes, before.buffers_bytes);
        assert_eq!(host.arena.limits(None).max_allocation_bytes, allowed);
        assert!(host.arena.limits(None).unified, "{driver:?} shares the host's memory");
    });
}

/// Goal: when the device is lost, everyone waiting gets an error and every thread ends.
#[test]
fn a_lost_device_ends_the_actors() {
    each_driver(|vulkan, driver| {
        let host = Host::new(vulkan, driver);
        let (_keep, file) = shard(10_000);
        let buffer = host.arena.buffer("b", 20_000, Place::DeviceLocal).unwrap();
        host.transfer.clear(&buffer).unwrap();
        host.device.declare_lost("a test");
        let packing =
            Packing { rows: 100, cols: 100, layout: Layout::RowMajor { columns_multiple: 1 }, format: Format::Bf16 };
        let tensor = LoadTensor {
            name: "w".to_owned(),
            target: Arc::clone(&buffer),
            offset: 0,
            packing,
            sources: vec![source(&file, 0, 100, 100, 0, 1)],
        };
        let error = host.load(vec![tensor]).wait().unwrap_err();
        assert!(matches!(error, LoadError::Transfer(_) | LoadError::Device(_) | LoadError::Memory(_)), "{error:?}");
        let error = host.transfer.read(&buffer, 0, 4).unwrap_err();
        assert!(matches!(error, TransferError::Device(_) | TransferError::Ended), "{error:?}");
    });
}

/// Runs a test on both CPU drivers, or on the GPU that is selected.
fn each_device(test: impl Fn(&Vulkan, Driver)) {
    for driver in Driver::all() {
        let vulkan = Vulkan::new();
        test(&vulkan, *driver);
        vulkan.assert_clean();
    }
}

/// The size of slots that hold a block of 16 rows of 512 columns.
const SLOT: usize = 12 << 10;

/// Returns a packer of two slots for rows of some types in the codes that they have in common with others, in both layouts.
fn packer(host: &Host, kinds: &[(BlockType, BlockType)]) -> Arc<DevicePacker> {
    let of = |(kind, other): &(BlockType, BlockType), layout| {
        let codes = kind.codes().common(other.codes()).unwrap();
        PackVariant::of(*kind, &Packing { rows: 1, cols: 256, layout, format: Format::Codes(codes) }).unwrap()
    };
    let both = |kinds| LAYOUTS.map(|layout| of(kinds, layout));
    packer_of(host, kinds.iter().flat_map(both).collect(), RawSlots { count: 2, bytes: SLOT as u64 })
}

fn packer_of(host: &Host, variants: HashSet<PackVariant>, slots: RawSlots) -> Arc<DevicePacker> {
    let probes: Vec<_> = variants.iter().map(|variant| variant.probe(128, 1)).collect();
    let recordings: Vec<_> = probes.iter().map(|probe| &probe.recording).collect();
    let pipelines = Pipelines::build(&host.device, None, &recordings, &|_, _| {}).unwrap();
    let compute = Arc::new(Compute::spawn(Arc::clone(&host.device), GpuTime::Phases, None).unwrap());
    Arc::new(DevicePacker::new(&host.arena, compute, pipelines, (variants, 128), slots).unwrap())
}

const LAYOUTS: [Layout; 2] = [Layout::Fragments, Layout::RowMajor { columns_multiple: 8 }];

/// The types of the tests' blocks.
const PACKED: [BlockType; 3] = [BlockType::Q4_K, BlockType::Q6_K, BlockType::Q8_0];

/// Returns a file of rows of blocks of some types, each with as many rows, behind a header of 7 bytes, and the offsets of the
/// types' rows. The f16s of the blocks are finite.
fn blocks_file(kinds: &[BlockType], rows: u32, cols: u32) -> (tempfile::NamedTempFile, Arc<WeightFile>, Vec<u64>) {
    let mut bytes = vec![0xff; 7];
    let mut offsets = Vec::new();
    for (index, kind) in kinds.iter().enumerate() {
        offsets.push(bytes.len() as u64);
        let number = |i: u32| (i.wrapping_mul(7919).wrapping_add(index as u32 * 31) % 1009) as f32 / 504.0 - 1.0;
        let numbers: Vec<f32> = (0..rows * cols).map(number).collect();
        let mut blocks = vec![0; numbers.len() / kind.elements() * kind.bytes()];
        kind.quantize(&numbers, &mut blocks);
        bytes.extend(blocks);
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let opened = Arc::new(WeightFile::open(file.path()).unwrap());
    (file, opened, offsets)
}

fn blocks_of(file: &Arc<WeightFile>, offset: u64, map: RowMap) -> TensorSource {
    TensorSource { file: Arc::clone(file), offset, map, transposed: None, matrix: None }
}

/// Returns what the host packs of a tensor's sources.
fn packed_by_host(tensor: &LoadTensor) -> Vec<u8> {
    let sources = tensor.sources.iter();
    let bytes: Vec<Vec<u8>> = sources
        .map(|source| {
            let all = std::fs::read(source.file.path()).unwrap();
            let last = u64::from(source.map.rows - 1) * u64::from(source.map.stride);
            let end = source.offset + (last + 1) * source.map.format.row_bytes(source.map.cols);
            all[source.offset as usize..end as usize].to_vec()
        })
        .collect();
    let rows = tensor.sources.iter().zip(&bytes);
    let rows: Vec<Rows<'_>> = rows.map(|(source, bytes)| Rows { bytes, map: source.map }).collect();
    let mut out = vec![0; tensor.packing.bytes() as usize];
    pack(&tensor.packing, &rows, 0..tensor.packing.bytes(), &mut out).unwrap();
    out
}

/// Goal: weights that the device packs are those that the host packs, byte for byte. Method: tensors of every kind of map are
/// loaded through slots that hold a few rows, from files that are mapped and that are not: q, k and v in ranges of two types,
/// which have codes in common; gate and up interleaved; rows in another order (a stride); some of a row's columns; rows
/// without a source; rows of two types within a block of 16, and columns that are no whole blocks, which the host packs; two
/// tensors in one buffer; plain numbers beside them.
#[test]
fn rows_that_the_device_packs_are_those_that_the_host_packs() {
    each_device(|vulkan, driver| {
        let host = Host::with_slots(vulkan, driver, SLOT);
        let [four, six, eight] = PACKED;
        let (cols, rows) = (512, 96);
        let (_keep, mapped, at) = blocks_file(&PACKED, rows, cols);
        let unmapped = Arc::new(WeightFile::open(mapped.path()).unwrap().unmapped());
        let packer = packer(&host, &[(four, four), (four, six), (six, four), (six, six), (eight, eight)]);
        let both = four.codes().common(six.codes()).unwrap();
        for (file, layout) in [&mapped, &unmapped].into_iter().flat_map(|file| LAYOUTS.map(|layout| (file, layout))) {
            let whole = |kind, rows| RowMap::whole(SourceFormat::Blocks(kind), rows, cols);
            let packing = |rows, cols, codes| Packing { rows, cols, layout, format: Format::Codes(codes) };
            let of = |kind: usize, map: RowMap| blocks_of(file, at[kind], map);
            let qkv = vec![
                of(0, whole(four, 48)),
                of(0, RowMap { first_row: 48, ..whole(four, 16) }),
                of(1, RowMap { first_row: 64, ..whole(six, 21) }),
            ];
            let gate_up = vec![
                of(0, RowMap { row_step: 2, ..whole(four, 50) }),
                of(0, RowMap { row_step: 2, first_row: 1, ..whole(four, 50) }),
            ];
            let ordered = vec![
                of(1, RowMap { stride: 2, ..whole(six, 20) }),
                of(1, RowMap { stride: 2, first_row: 20, ..whole(six, 20) }),
                // Rows 40 to 44 have no source.
                of(1, RowMap { stride: 3, first_row: 45, ..whole(six, 8) }),
            ];
            let columns = vec![of(0, RowMap { first_col: 256, used_cols: 256, ..whole(four, 40) })];
            let eights = vec![of(2, RowMap { first_col: 32, used_cols: 416, ..whole(eight, 33) })];
            let mixed = vec![of(0, whole(four, 24)), of(1, RowMap { first_row: 24, ..whole(six, 40) })];
            let within = vec![of(0, RowMap { first_col: 32, used_cols: 320, ..whole(four, 40) })];
            let plan = [
                ("qkv", packing(85, cols, both), qkv, true),
                ("gate_up", packing(100, cols, four.codes()), gate_up, true),
                ("ordered", packing(53, cols, six.codes()), ordered, true),
                ("columns", packing(40, 256, four.codes()), columns, true),
                ("eights", packing(35, 416, eight.codes()), eights, true),
                // In a block of 16 rows, of two types.
                ("mixed", packing(64, cols, both), mixed, true),
                ("within", packing(40, 320, four.codes()), within, false),
            ];
            let total: u64 = plan.iter().map(|(_, packing, ..)| packing.bytes()).sum();
            let target = host.arena.buffer("weights", total, Place::DeviceLocal).unwrap();
            let clear = host.transfer.clear(&target).unwrap();
            assert!(host.device.wait(clear, LONG).unwrap());
            let mut offset = 0;
            let mut tensors = Vec::new();
            let mut by_device = Vec::new();
            for (name, packing, sources, on_device) in plan {
                let (name, target) = (name.to_owned(), Arc::clone(&target));
                tensors.push(LoadTensor { name, target, offset, packing, sources });
                by_device.push(on_device);
                offset += packing.bytes();
            }
            for (tensor, on_device) in tensors.iter().zip(by_device) {
                let load = LoadPlan { tensors: vec![tensor.clone()], packer: Some(Arc::clone(&packer)) };
                let report = host.loader.load(load).unwrap().wait().unwrap();
                let name = &tensor.name;
                assert_eq!(report.packed_on_device > 0, on_device, "{driver:?} {layout:?} {name}");
                if on_device && !(name == "mixed" && layout == Layout::Fragments) {
                    assert_eq!(report.packed_on_device, tensor.packing.bytes(), "{driver:?} {layout:?} {name}");
                }
            }
            let check = |what: &str| {
                let found = host.transfer.read(&target, 0, total).unwrap();
                for tensor in &tensors {
                    let found = &found[tensor.offset as usize..][..tensor.packing.bytes() as usize];
                    let wanted = packed_by_host(tensor);
                    let differs = found.iter().zip(&wanted).position(|(a, b)| a != b);
                    assert_eq!(differs, None, "{driver:?} {layout:?} {}, {what}", tensor.name);
                }
            };
            check("one after the other");
            // Of one load, beside plain numbers, whose slots the host fills.
            let clear = host.transfer.clear(&target).unwrap();
            assert!(host.device.wait(clear, LONG).unwrap());
            let (_keep, numbers) = shard(40_000);
            let norms = Packing {
                rows: 300,
                cols: 100,
                layout: Layout::RowMajor { columns_multiple: 1 },
                format: Format::Bf16,
            };
            let other = host.arena.buffer("norms", norms.bytes(), Place::DeviceLocal).unwrap();
            let plain = LoadTensor {
                name: "norms".to_owned(),
                target: Arc::clone(&other),
                offset: 0,
                packing: norms,
                sources: vec![source(&numbers, 5, 300, 100, 0, 1)],
            };
            let all = tensors.iter().cloned().chain([plain]).collect();
            let load = host.loader.load(LoadPlan { tensors: all, packer: Some(Arc::clone(&packer)) }).unwrap();
            let mut last = None;
            let report = load.wait_with(|progress| last = Some(progress)).unwrap();
            assert_eq!(report.bytes_written, total + norms.bytes());
            assert!(last.is_some_and(|last| last.bytes_done <= last.bytes_total));
            check("together");
            let found = words(&host.transfer.read(&other, 0, norms.bytes()).unwrap());
            assert!((0..30_000).all(|i| found[i] == bits(i + 5)), "plain numbers");
        }
    });
}

/// Goal: a scale that is not finite ends a load that the device packs as it ends one that the host packs: with the weight,
/// the row and the group.
#[test]
fn a_bad_scale_is_found_where_the_device_packs() {
    each_device(|vulkan, driver| {
        let host = Host::with_slots(vulkan, driver, SLOT);
        let packer = packer(&host, &[(BlockType::Q6_K, BlockType::Q6_K)]);
        let (rows, cols) = (64, 512);
        let (keep, _, at) = blocks_file(&[BlockType::Q6_K], rows, cols);
        let mut bytes = std::fs::read(keep.path()).unwrap();
        // The scale of the second block of row 37.
        let bad = at[0] as usize + (37 * 2 + 1) * 210 + 208;
        bytes[bad..bad + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
        std::fs::write(keep.path(), &bytes).unwrap();
        let file = Arc::new(WeightFile::open(keep.path()).unwrap());
        for layout in LAYOUTS {
            let packing = Packing { rows, cols, layout, format: Format::Codes(BlockType::Q6_K.codes()) };
            let target = host.arena.buffer("w", packing.bytes(), Place::DeviceLocal).unwrap();
            let map = RowMap::whole(SourceFormat::Blocks(BlockType::Q6_K), rows, cols);
            let sources = vec![blocks_of(&file, at[0], map)];
            let tensor = LoadTensor { name: "ffn_down".to_owned(), target, offset: 0, packing, sources };
            let errors = [None, Some(Arc::clone(&packer))].map(|packer| {
                let load = host.loader.load(LoadPlan { tensors: vec![tensor.clone()], packer }).unwrap();
                load.wait().unwrap_err().to_string()
            });
            assert!(errors[0].contains("ffn_down: row 37, group 16, has scale "), "{}", errors[0]);
            assert_eq!(errors[0], errors[1], "{driver:?} {layout:?}");
        }
    });
}

/// Goal: loads that the device packs end as others do: cancelled, with a file that was cut, and with a lost device; nothing
/// hangs, and their memory is freed when their end is known.
#[test]
fn loads_that_the_device_packs_end_early_without_harm() {
    each_device(|vulkan, driver| {
        let host = Host::with_slots(vulkan, driver, SLOT);
        let packer = packer(&host, &[(BlockType::Q4_K, BlockType::Q4_K)]);
        let (rows, cols) = (2048, 512);
        let packing = Packing { rows, cols, layout: Layout::Fragments, format: Format::Codes(BlockType::Q4_K.codes()) };
        let (keep, file, at) = blocks_file(&[BlockType::Q4_K], rows, cols);
        let map = RowMap::whole(SourceFormat::Blocks(BlockType::Q4_K), rows, cols);
        let before = host.arena.usage().buffers_bytes;
        let start = |file: &Arc<WeightFile>| {
            let target = host.arena.buffer("w", packing.bytes(), Place::DeviceLocal).unwrap();
            let sources = vec![blocks_of(file, at[0], map)];
            let tensor = LoadTensor { name: "w".to_owned(), target, offset: 0, packing, sources };
            host.loader.load(LoadPlan { tensors: vec![tensor], packer: Some(Arc::clone(&packer)) }).unwrap()
        };
        let mut cancelled = 0;
        for round in 0..12 {
            let load = start(&file);
            let done = load.done().clone();
            std::thread::sleep(Duration::from_micros(300 * round));
            drop(load);
            match done.recv_timeout(LONG).unwrap() {
                Ok(report) => assert_eq!(report.packed_on_device, packing.bytes()),
                Err(LoadError::Cancelled) => cancelled += 1,
                Err(other) => panic!("{other:?}"),
            }
            assert_eq!(host.arena.usage().buffers_bytes, before, "{driver:?}: round {round}");
        }
        assert!(cancelled > 0, "no load was in progress");
        // The packer's slots serve later loads.
        assert_eq!(start(&file).wait().unwrap().packed_on_device, packing.bytes());
        let was = file.len();
        let load = start(&file);
        keep.as_file().set_len(1000).unwrap();
        match load.wait() {
            Ok(report) => assert_eq!(report.packed_on_device, packing.bytes()),
            Err(LoadError::Memory(MemoryError::FileChanged { was: found, is: 1000, .. })) => assert_eq!(found, was),
            Err(other) => panic!("{other:?}"),
        }
        let error = start(&file).wait().unwrap_err();
        assert!(matches!(error, LoadError::Memory(MemoryError::FileChanged { .. })), "{error:?}");
        let (_keep, file, _) = blocks_file(&[BlockType::Q4_K], rows, cols);
        let load = start(&file);
        host.device.declare_lost("a test");
        match load.wait() {
            Ok(_) => {}
            Err(LoadError::Transfer(_) | LoadError::Device(_) | LoadError::Memory(_) | LoadError::Packer(_)) => {}
            Err(other) => panic!("{other:?}"),
        }
        let error = start(&file).wait().unwrap_err();
        let expected = matches!(
            error,
            LoadError::Transfer(_) | LoadError::Device(_) | LoadError::Memory(_) | LoadError::Packer(_)
        );
        assert!(expected, "{error:?}");
    });
}

/// Goal: weights of quantised checkpoints that the device packs are those that the host packs, byte for byte. Method: each
/// matrix of the fixtures, merged and divided as a model has it, is loaded in both layouts by a device that packs what it can,
/// through slots that hold a part of a matrix, and by the host. All weights of AWQ and of GPTQ in 4 bits whose columns are in
/// their own order are packed by the device, but for those whose columns are no whole groups.
#[test]
fn matrices_that_the_device_packs_are_those_that_the_host_packs() {
    let vulkan = Vulkan::new();
    let host = Host::with_slots(&vulkan, Driver::first(), 96 << 10);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
    let mut on_device: BTreeMap<String, usize> = BTreeMap::new();
    for fixture in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = fixture.file_name().unwrap().to_string_lossy().into_owned();
        let Ok(checkpoint) = Checkpoint::open(&fixture) else { continue };
        let of_matrices = |weight: &&WeightSpec| {
            weight.kind == WeightKind::Matrix && weight.sources.iter().all(|source| source.matrix.is_some())
        };
        for layout in LAYOUTS {
            let packing =
                |weight: &WeightSpec| Packing { rows: weight.rows, cols: weight.cols, layout, format: weight.format };
            let mut variants = HashSet::new();
            for weight in checkpoint.weights().iter().filter(of_matrices) {
                let of = |source: &SourceRef| {
                    let matrix = &source.matrix.as_ref()?.matrix;
                    PackVariant::of_matrix(&matrix.description, &packing(weight)).filter(|_| matrix.order.is_none())
                };
                variants.extend(weight.sources.iter().filter_map(of));
            }
            if variants.is_empty() {
                continue;
            }
            let packer = packer_of(&host, variants, RawSlots { count: 2, bytes: 64 << 10 });
            for weight in checkpoint.weights().iter().filter(of_matrices) {
                let packing = packing(weight);
                let target = host.arena.buffer("weight", packing.bytes(), Place::DeviceLocal).unwrap();
                let open = |path: &Path| Arc::new(WeightFile::open(path).unwrap());
                let tensor = tensor_of(weight, &target, packing, open);
                let mut load = |packer: Option<Arc<DevicePacker>>| {
                    let load = host.loader.load(LoadPlan { tensors: vec![tensor.clone()], packer }).unwrap();
                    let report = load.wait().unwrap_or_else(|error| panic!("{name}: {}: {error}", weight.name));
                    if report.packed_on_device > 0 {
                        assert_eq!(report.packed_on_device, packing.bytes(), "{name}: {}", weight.name);
                        *on_device.entry(name.clone()).or_default() += 1;
                    }
                    host.transfer.read(&target, 0, target.bytes()).unwrap()
                };
                let found = load(Some(Arc::clone(&packer)));
                let cleared = host.transfer.clear(&target).unwrap();
                assert!(host.device.wait(cleared, LONG).unwrap());
                let wanted = load(None);
                let differs = found.iter().zip(&wanted).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{name}: {} {layout:?}", weight.name);
            }
        }
    }
    println!("{on_device:?}");
    let of =
        |part: &str| on_device.iter().filter(|(name, _)| name.contains(part)).map(|(_, count)| count).sum::<usize>();
    assert!(of("awq") > 8 && of("gptq") > 8, "{on_device:?}");
    drop(host);
    vulkan.assert_clean();
}

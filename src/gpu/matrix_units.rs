//! Determines how a device multiplies: blocks of weights in fragments on its matrix units (cooperative matrices), if it has
//! them and stores the elements where the kernels expect them; and row-major weights in the fastest arithmetic that gives
//! right results.
//! Not here: the choice of kernels (`model::decoder`).

use crate::config::KvFormat;
use crate::device::{Adapter, Capabilities, Component, Device, MatrixShape, Program, ProgramDesc};
use crate::gpu::error::StartError;
use crate::gpu::timing::time_regions;
use crate::kernels::attention::flash::{FlashF32Shape, FlashShape, FlashWay};
use crate::kernels::attention::probe::{self, AttentionProbe};
use crate::kernels::attention::{HeadNorm, Heads, Scores};
use crate::kernels::delta::{DeltaHeads, DeltaRule, DeltaShape, DeltaWay};
use crate::kernels::delta_probe::{self, DeltaProbe};
use crate::kernels::gemm::fragment_layout::{self, FOUND};
use crate::kernels::gemm::matmul::{Arithmetic, Blocked, MatmulConfig, MatmulRows, MatrixUnits, Scratch, block_rows};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::gemm::{Activations, Epilogue, Matrix, Product};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::interpreter;
use crate::kernels::recording::{Range, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::memory::pack::Format;
use crate::memory::{Arena, BufferTable, Place};
use crate::telemetry::with_causes;
use std::path::Path;
use std::sync::Arc;

/// Returns what a device does not promise of what the kernels for matrix units need; empty if it promises all of it.
pub(crate) fn unpromised(capabilities: &Capabilities) -> Vec<&'static str> {
    let shape = |n, input| {
        let shape = MatrixShape { m: 16, n, k: 16, input, accumulator: Component::F32 };
        capabilities.matrix_shapes.contains(&shape)
    };
    // Without matrices there are no shapes to speak of.
    let none = !capabilities.cooperative_matrix;
    let subgroups_of_32 = (capabilities.subgroup_min..=capabilities.subgroup_max).contains(&32);
    [
        (capabilities.cooperative_matrix, "cooperative matrices"),
        (none || shape(16, Component::Bf16), "matrices of 16x16x16 in bf16 with sums in f32"),
        (none || shape(16, Component::F16), "matrices of 16x16x16 in f16 with sums in f32"),
        (none || shape(8, Component::F16), "matrices of 16x8x16 in f16 with sums in f32"),
        (capabilities.bfloat16, "bf16 in shaders"),
        (capabilities.float16, "arithmetic in f16"),
        (capabilities.int16, "arithmetic on 16-bit integers"),
        (capabilities.full_subgroups, "full subgroups"),
        (subgroups_of_32, "subgroups of 32"),
    ]
    .into_iter()
    .filter_map(|(there, what)| (!there).then_some(what))
    .collect()
}

/// A program for compute capability 9.0 alone that does nothing.
const EMPTY: &str = ".version 8.0
.target sm_90a
.address_size 64
.visible .entry empty(.param .align 8 .b8 args[8])
{
ret;
}
";

/// Returns why a device does not run `wgmma`, or nothing if it does: programs in PTX, on compute capability 9.0. Only such
/// a device has a driver that compiles a program for `sm_90a`.
pub(crate) fn runs_wgmma(device: &Device) -> Result<(), String> {
    device.takes_ptx().map_err(str::to_owned)?;
    let desc = ProgramDesc { name: "empty", text: EMPTY, entry: "empty", threads: 32, shared_bytes: 0, args_bytes: 8 };
    match Program::new(device, &desc) {
        Ok(_) => Ok(()),
        Err(_) => Err("the driver does not compile PTX for compute capability 9.0".to_owned()),
    }
}

/// Tests the layout of cooperative matrices, if the device's capabilities offer the required ones. Returns `None` if
/// the kernels cannot use them; then the weights are stored row-major.
pub(crate) fn probe(device: &Arc<Device>, arena: &Arena, cache: Option<&Path>) -> Result<Option<Matrices>, StartError> {
    if !unpromised(&device.adapter().capabilities).is_empty() {
        return Ok(None);
    }
    let mut recording = Recording::new("fragment_layout");
    let mut table = BufferTable::new();
    let mut found = Vec::new();
    for format in [Format::Bf16, Format::F16] {
        let name = format!("fragment_layout.{format:?}");
        let range = recording.buffer(&name, u64::from(FOUND) * 4);
        recording.call(fragment_layout::fragment_layout(format, range));
        let buffer = arena.buffer(&name, range.bytes, Place::Readback)?;
        found.push((format, Arc::clone(&buffer)));
        table.add(buffer)?;
    }
    let pipelines = Pipelines::build(device, cache, &[&recording], &|_, _| {})?;
    let region = Arc::new(Region::build(device, &recording, &table, &pipelines)?);
    time_regions(device, &[region], 1)?;
    let as_expected = found.iter().all(|(format, buffer)| {
        let mut values = vec![0f32; FOUND as usize];
        buffer.read(0, bytemuck::cast_slice_mut(&mut values));
        values == fragment_layout::expected(*format)
    });
    if !as_expected {
        tracing::warn!(device = device.adapter().name, "matrix units keep elements elsewhere: they are not used");
    }
    Ok(as_expected.then_some(Matrices::Cooperative))
}

/// Returns the arithmetic that an adapter promises for row-major weights, the fastest first. CPU drivers compute in f32.
pub(crate) fn promised(adapter: &Adapter) -> Vec<Arithmetic> {
    if adapter.is_cpu() {
        return vec![Arithmetic::F32];
    }
    let matrices = MatrixUnits::of(&adapter.capabilities).map(Arithmetic::Matrices);
    let half = adapter.capabilities.float16.then_some(Arithmetic::F16);
    matrices.into_iter().chain(half).chain([Arithmetic::F32]).collect()
}

/// How a device multiplies matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Multiplies {
    /// How it multiplies blocks of weights in fragments; `None` if weights are stored row-major.
    pub(crate) matrices: Option<Matrices>,
    /// The arithmetic of products of many rows with row-major weights.
    pub(crate) arithmetic: Arithmetic,
    /// Whether prompts' attention with row-major weights is right on the cooperative matrices of `arithmetic`, if it is that.
    pub(crate) attention: bool,
    /// Whether prompts' delta rule with row-major weights is right on these matrices, likewise.
    pub(crate) recurrence: bool,
    /// Whether prompts' attention with row-major weights is right in tiles in f32. CPU drivers do not use it and are not tested.
    pub(crate) attention_in_f32: bool,
}

impl Multiplies {
    /// Returns what an adapter promises, without a test.
    pub(crate) fn promised(adapter: &Adapter) -> Multiplies {
        let matrices = unpromised(&adapter.capabilities).is_empty().then_some(Matrices::Cooperative);
        Multiplies {
            matrices,
            arithmetic: promised(adapter)[0],
            attention: true,
            attention_in_f32: true,
            recurrence: true,
        }
    }

    /// Tests a device: the order of elements of its matrices, and the fastest promised arithmetic whose results are right for
    /// row-major weights. A device that multiplies weights in fragments on matrix units has row-major weights in exceptions
    /// only; their arithmetic is not tested there.
    pub(crate) fn tested(device: &Arc<Device>, arena: &Arena, cache: Option<&Path>) -> Result<Multiplies, StartError> {
        let adapter = device.adapter();
        let promise = Multiplies::promised(adapter);
        let matrices = probe(device, arena, cache)?;
        if matrices.is_some() {
            return Ok(Multiplies { matrices, ..promise });
        }
        let mut arithmetic = Arithmetic::F32;
        for promised in promised(adapter) {
            if promised == Arithmetic::F32 || products_are_right(device, arena, cache, promised)? {
                arithmetic = promised;
                break;
            }
            tracing::warn!(device = adapter.name, arithmetic = ?promised, "products in this arithmetic are wrong: it is not used");
        }
        let shared = adapter.capabilities.max_shared_bytes;
        let in_f32 = |heads| FlashF32Shape::choose(heads, shared).map(FlashWay::F32);
        let attention_in_f32 = adapter.is_cpu() || attention_is_right(device, arena, cache, &in_f32)?;
        if !attention_in_f32 {
            tracing::warn!(device = adapter.name, "attention in tiles in f32 is wrong: prompts take another kernel");
        }
        let Arithmetic::Matrices(units) = arithmetic else {
            let (attention, recurrence) = (false, false);
            return Ok(Multiplies { matrices, arithmetic, attention, attention_in_f32, recurrence });
        };
        let by_loads = |heads| FlashShape::choose(heads, units, shared).map(FlashWay::Loads);
        let attention = attention_is_right(device, arena, cache, &by_loads)?;
        if !attention {
            tracing::warn!(device = adapter.name, "attention on matrix units is wrong: prompts take another kernel");
        }
        let recurrence = recurrence_is_right(device, arena, cache, units)?;
        if !recurrence {
            tracing::warn!(
                device = adapter.name,
                "the delta rule on matrix units is wrong: prompts of recurrent layers take another kernel"
            );
        }
        Ok(Multiplies { matrices, arithmetic, attention, attention_in_f32, recurrence })
    }
}

/// Multiplies small matrices, whose sizes are no multiples of a tile's, with each tile that the rule chooses, and compares
/// with the reference. All tiles are tested: where a driver places what it shares depends on the tile.
fn products_are_right(
    device: &Arc<Device>,
    arena: &Arena,
    cache: Option<&Path>,
    arithmetic: Arithmetic,
) -> Result<bool, StartError> {
    // The tile depends on the rows and, for 50 rows, on how many compute units it has to keep busy.
    for (rows, processors) in [(9, 64), (21, 64), (50, 1), (50, 64), (131, 64)] {
        if !multiplies(device, arena, cache, arithmetic, (rows, processors))? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Tests prompts' attention with heads of each size class for which there is a way, and with the largest of them over codes.
fn attention_is_right(
    device: &Arc<Device>,
    arena: &Arena,
    cache: Option<&Path>,
    way: &dyn Fn(Heads) -> Option<FlashWay>,
) -> Result<bool, StartError> {
    let heads = |dim, kv_format| Heads {
        q: 16,
        kv: 1,
        dim,
        rot: dim,
        qk_norm: HeadNorm::None,
        v_norm: false,
        gated: false,
        scores: Scores::default(),
        kv_format,
    };
    let served = |heads| Some((heads, way(heads)?));
    let all: Vec<_> = [64, 128, 256].into_iter().filter_map(|dim| served(heads(dim, KvFormat::F16))).collect();
    let codes = all.last().and_then(|(largest, _)| served(heads(largest.dim, KvFormat::Int8)));
    for (heads, way) in all.into_iter().chain(codes) {
        // Few rows, whose heads are two tiles, and tokens for two workgroups a tile: the reference takes time.
        let AttentionProbe { recording, memory, results, .. } = probe::probe(heads, (260, 5), way, 2);
        // The allowed difference of averages of values from -1 to 1: rounding changes them by about 1e-3.
        if !agrees(device, arena, cache, &recording, memory, (probe::RESULTS, results), 1e-2)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Tests prompts' delta rule with heads of two sizes: where a driver places what the kernels share depends on the size.
fn recurrence_is_right(
    device: &Arc<Device>,
    arena: &Arena,
    cache: Option<&Path>,
    units: MatrixUnits,
) -> Result<bool, StartError> {
    let shared = device.adapter().capabilities.max_shared_bytes;
    for dim in [64, 128] {
        let heads = DeltaHeads { key: 1, value: 2, tiled: false, key_dim: dim, value_dim: dim, rule: DeltaRule::Delta };
        let Some(shape) = DeltaShape::choose(heads, units, shared) else { continue };
        // Three blocks, the last of which is not full.
        let DeltaProbe { recording, memory, results } = delta_probe::probe(heads, 131, DeltaWay::Loads(shape));
        let limit = delta_probe::LIMIT;
        if !agrees(device, arena, cache, &recording, memory, (delta_probe::RESULTS, results), limit)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Multiplies `rows` rows by a small matrix in the tile for a device of `processors` compute units, with columns divided
/// between two workgroups, and compares with the reference.
fn multiplies(
    device: &Arc<Device>,
    arena: &Arena,
    cache: Option<&Path>,
    arithmetic: Arithmetic,
    (rows, processors): (u32, u32),
) -> Result<bool, StartError> {
    /// The allowed difference of sums of up to about 2: rounding changes them by less than 4e-3.
    const LIMIT: f32 = 2e-2;
    let (n, k) = (146, 104);
    let mut recording = Recording::new("arithmetic");
    let r = &mut recording;
    let stride = 160;
    let config = MatmulConfig { splits: 2, ..MatmulConfig::choose(arithmetic, rows, (n, k), processors, false) };
    let x = Activations { range: r.buffer("x", u64::from(rows * k) * 4), stride: k };
    let product = Product {
        label: "arithmetic".to_owned(),
        weight: Matrix { range: r.buffer("weight", u64::from(n * k) * 2), format: Format::F16, rows: n, cols: k },
        x,
        norm: None,
        bias: None,
        epilogue: Epilogue::Store,
        y: Activations { range: r.buffer("y", u64::from(rows * stride) * 4), stride },
    };
    let blocked = Blocked::declare(r, "blocked", arithmetic, rows, k);
    let scratch = Scratch::declare(r, config, rows, n);
    r.call(block_rows("block".to_owned(), x, None, blocked, MatmulRows::All(rows)));
    r.call(product.matmul(blocked, MatmulRows::All(rows), 0, config, scratch));

    let mut memory = HostMemory::new(r);
    for i in 0..rows * k {
        // Pseudo-random values between -1 and 1.
        memory.set_f32(x.range, i, (i.wrapping_mul(2_654_435_761) >> 16 & 0xff) as f32 / 128.0 - 1.0);
    }
    for i in 0..n * k {
        memory.set_f16(product.weight.range, i, (i.wrapping_mul(2_246_822_519) >> 16 & 0xff) as f32 / 1024.0 - 0.125);
    }
    agrees(device, arena, cache, &recording, memory, ("y", product.y.range), LIMIT)
}

/// Runs a recording on a device and in plain Rust, and returns whether the floats of its result, a buffer, differ by no more
/// than `limit`.
fn agrees(
    device: &Arc<Device>,
    arena: &Arena,
    cache: Option<&Path>,
    recording: &Recording,
    mut memory: HostMemory,
    (name, result): (&str, Range),
    limit: f32,
) -> Result<bool, StartError> {
    let mut table = BufferTable::new();
    for (decl, words) in recording.buffers.iter().zip(&memory.buffers) {
        let buffer = arena.buffer(&decl.name, decl.bytes, Place::Readback)?;
        buffer.write(0, &bytemuck::cast_slice(words)[..decl.bytes as usize]);
        table.add(buffer)?;
    }
    let pipelines = match Pipelines::build(device, cache, &[recording], &|_, _| {}) {
        Ok(pipelines) => pipelines,
        Err(error) if device.is_lost() => return Err(error.into()),
        // What a driver does not compile is not used.
        Err(error) => {
            tracing::warn!(device = device.adapter().name, what = recording.name, "{}", with_causes(&error));
            return Ok(false);
        }
    };
    let region = Arc::new(Region::build(device, recording, &table, &pipelines)?);
    time_regions(device, &[region], 1)?;
    let mut found = vec![0f32; (result.bytes / 4) as usize];
    table.require(name)?.read(0, bytemuck::cast_slice_mut(&mut found));
    interpreter::run(recording, &mut memory);
    let wanted = memory.floats(result);
    Ok(wanted.iter().zip(&found).all(|(wanted, found)| (wanted - found).abs() <= limit))
}

//! How fast devices read weights in decode steps, for a division of layers by time: each device multiplies some of the
//! model's matrices with one row, in the kernels of a decode step. A GPU takes as long as it reads them, a CPU driver as long
//! as it computes.
//! Not here: the division (`model::decoder::stage`), and its memory (`gpu::build::split`).

use crate::device::fnv;
use crate::gpu::build::Build;
use crate::gpu::build::split::StagePart;
use crate::gpu::error::StartError;
use crate::kernels::gemm::weight_bytes;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::memory::{BufferTable, MemoryError, Place};
use crate::model::checkpoint::{WeightKind, WeightSpec};
use crate::model::decoder::StepShape;
use crate::model::decoder::stage::LayerStage;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The bytes of matrices that a GPU reads in a run: more than caches hold.
const GPU_BYTES: u64 = 256 << 20;
/// The bytes of matrices that a CPU driver reads in a run.
const CPU_BYTES: u64 = 16 << 20;
/// The time after which no further run begins: long enough for a GPU to raise its clocks.
const RUNS_FOR: Duration = Duration::from_millis(150);
/// The maximum number of runs.
const MOST_RUNS: u32 = 256;
/// The part of free device memory that a measurement may take.
const OF_FREE: u64 = 2;
/// A device that is slower by at most this part counts as fast as the other: measured times differ by as much.
const ALIKE: f64 = 0.05;

/// What a measured speed is of: a device's name, its driver, and a hash of the kinds of products.
type Measured = (String, String, u64);

/// The speeds that were measured in this process, in bytes per second. They are kept, so that devices of one kind have the
/// same speed, and a replica that is loaded again is divided like before.
#[derive(Debug, Default)]
pub(crate) struct Speeds(Mutex<HashMap<Measured, f64>>);

impl Speeds {
    /// Returns the speed of each build's device in bytes of weights per second, all of them in decode steps of the model; `None`
    /// if a device has too little free memory to be measured. Speeds that hardly differ are equal.
    pub(crate) fn of(&self, builds: &[Build<'_>], cache: Option<&Path>) -> Result<Option<Vec<f64>>, StartError> {
        let mut speeds = Vec::with_capacity(builds.len());
        for build in builds {
            build.wanted()?;
            match self.of_device(build, cache)? {
                Some(speed) => speeds.push(speed),
                None => return Ok(None),
            }
        }
        Ok(Some(level(&speeds)))
    }

    fn of_device(&self, build: &Build<'_>, cache: Option<&Path>) -> Result<Option<f64>, StartError> {
        let (products, bytes) = products(build);
        let key = (build.adapter.name.clone(), build.adapter.driver.clone(), key(&products));
        // No change of the table panics halfway.
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(speed) = known().get(&key) {
            return Ok(Some(*speed));
        }
        let free = build.opened.free_bytes(&build.opened.device.budget());
        let free = build.limit.map_or(free, |limit| limit.min(free));
        if bytes > free / OF_FREE {
            return Ok(None);
        }
        let seconds = match time(build, &products, cache) {
            Err(StartError::Memory(MemoryError::OutOfMemory { .. })) => return Ok(None),
            seconds => seconds?.as_secs_f64(),
        };
        let speed = bytes as f64 / seconds.max(1e-9);
        known().insert(key, speed);
        Ok(Some(speed))
    }
}

/// Returns the speeds, each that is at most [`ALIKE`] below a faster one raised to that.
fn level(speeds: &[f64]) -> Vec<f64> {
    let mut descending = speeds.to_vec();
    descending.sort_by(|a, b| b.total_cmp(a));
    // The fastest of each group.
    let mut fastest: Vec<f64> = Vec::new();
    for speed in descending {
        if fastest.last().is_none_or(|of| speed < of * (1.0 - ALIKE)) {
            fastest.push(speed);
        }
    }
    let group = |speed: &f64| fastest.iter().copied().filter(|of| of >= speed).fold(f64::INFINITY, f64::min);
    speeds.iter().map(group).collect()
}

/// Returns the products of a decode step of one row with matrices of the model's first layers, and the bytes of the matrices.
/// Those of experts are left out: which of them a step reads is not known.
fn products(build: &Build<'_>) -> (Recording, u64) {
    let (config, all) = (&build.checkpoint.config, build.all_weights());
    let wanted = if build.adapter.is_cpu() { CPU_BYTES } else { GPU_BYTES };
    // Neither the embedding nor the LM head: those are on one of the devices.
    let stage =
        |layers: u32| LayerStage { layers: 0..layers, of: config.layers + 1, stages: 2, ..LayerStage::whole(config) };
    let is_dense = |weight: &&WeightSpec| {
        weight.kind == WeightKind::Matrix && weight.merged.starts_with("layers.") && !weight.is_of_experts()
    };
    let of_first = stage(1).weights(config, all);
    let each: u64 = of_first.iter().filter(is_dense).map(WeightSpec::bytes).sum();
    let layers = wanted.div_ceil(each.max(1)).clamp(1, config.layers.into()) as u32;
    let part = StagePart::of(stage(layers), config, all);
    let step = {
        let of_part = build.of_part(&part);
        of_part.probe(of_part.wanted_context()).record(StepShape::Decode { rows: 1 }).without_tags()
    };
    let mut bytes = 0;
    let products = step.calls("products", |call| {
        let own = weight_bytes(call).filter(|_| bytes < wanted);
        bytes += own.unwrap_or(0);
        own.is_some()
    });
    (products, bytes)
}

/// Returns a hash of the kinds of products in a recording: their kernels with the constants, and the sizes of their matrices.
fn key(products: &Recording) -> u64 {
    let kind = |op: &Op| match op {
        Op::Call(call) => Some((call.kernel, call.constants.clone(), call.args[0].range().bytes)),
        Op::Copy { .. } | Op::Fill { .. } => None,
    };
    let kinds: BTreeSet<(&str, Vec<u32>, u64)> = products.ops.iter().filter_map(kind).collect();
    let mut bytes: Vec<u8> = Vec::new();
    for (kernel, constants, size) in kinds {
        bytes.extend(kernel.as_bytes());
        bytes.extend_from_slice(bytemuck::cast_slice(&constants));
        bytes.extend(size.to_le_bytes());
    }
    fnv(&bytes)
}

/// Runs products on scratch memory, one after the other, and returns the least time of several runs: other work on the device
/// makes a run longer, and nothing makes it shorter.
fn time(build: &Build<'_>, products: &Recording, cache: Option<&Path>) -> Result<Duration, StartError> {
    let opened = build.opened;
    let mut table = BufferTable::new();
    let mut init = Recording::new("init");
    for decl in &products.buffers {
        table.add(opened.arena.buffer(&decl.name, decl.bytes, Place::DeviceLocal)?)?;
        let to = init.buffer(&decl.name, decl.bytes);
        init.ops.push(Op::Fill { to, word: 0 });
    }
    // The model's own pipelines will be found in the table.
    let threads = Some(build.threads());
    let recordings = [products, &init];
    let pipelines = Pipelines::build_for(&opened.device, &opened.pipelines, cache, &recordings, threads, &|_, _| {})?;
    build.run_all(vec![vec![Arc::new(Region::build(&opened.device, &init, &table, &pipelines)?)]], &[])?;
    let region = Arc::new(Region::build_serial(&opened.device, products, &table, &pipelines)?);
    let run = || -> Result<Duration, StartError> {
        let begin = Instant::now();
        let reported = build.run_timed(vec![vec![Arc::clone(&region)]], &[])?;
        Ok(if reported.is_zero() { begin.elapsed() } else { reported })
    };
    // The first run may compile.
    run()?;
    let (begin, mut least) = (Instant::now(), Duration::MAX);
    for _ in 0..MOST_RUNS {
        build.wanted()?;
        least = least.min(run()?);
        if begin.elapsed() > RUNS_FOR {
            break;
        }
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_that_hardly_differ_are_equal() {
        assert_eq!(level(&[100.0, 96.0]), [100.0, 100.0]);
        assert_eq!(level(&[96.0, 100.0, 30.0, 31.0]), [100.0, 100.0, 31.0, 31.0]);
        assert_eq!(level(&[100.0, 94.0]), [100.0, 94.0]);
        // Not from one to the next without end: the fastest of a group decides.
        assert_eq!(level(&[100.0, 96.0, 93.0, 90.0]), [100.0, 100.0, 93.0, 93.0]);
    }
}

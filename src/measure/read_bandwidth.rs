//! Measures the read bandwidth of a device's memory, the upper bound that `bench` compares its results with.
//! Not here: models.

use crate::device::{Adapter, Device, Instance};
use crate::gpu::error::StartError;
use crate::gpu::timing::time_regions;
use crate::kernels::bench;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::memory::{Arena, BufferTable, Place};
use std::sync::Arc;

/// Returns the read bandwidth in bytes per second, as the median of several sweeps over a buffer far larger than the
/// caches; `None` if the device's queue has no timestamps.
pub fn read_bandwidth(instance: &Instance, adapter: &Adapter) -> Result<Option<f64>, StartError> {
    const SWEEPS: usize = 9;
    let device = Device::open(instance, adapter)?;
    let arena = Arena::new(&device)?;
    let threads = if adapter.is_cpu() { 64 } else { 256 };
    let wanted: u64 = if adapter.is_cpu() { 256 << 20 } else { 3 << 30 };
    let bytes = wanted.min(adapter.capabilities.max_allocation_bytes / 2).min(device.budget().free_bytes() / 2);
    let recording = bench::read_bandwidth(bytes, threads);
    let data_bytes = recording.buffers[0].bytes;
    let mut table = BufferTable::new();
    let mut init = Recording::new("init");
    for decl in &recording.buffers {
        table.add(arena.buffer(&decl.name, decl.bytes, Place::DeviceLocal)?)?;
        let to = init.buffer(&decl.name, decl.bytes);
        init.ops.push(Op::Fill { to, word: 1 });
    }
    let pipelines = Pipelines::build(&device, None, &[&recording, &init], &|_, _| {})?;
    let init = Arc::new(Region::build(&device, &init, &table, &pipelines)?);
    let sweep = Arc::new(Region::build(&device, &recording, &table, &pipelines)?);
    let times = time_regions(&device, &[init, sweep], SWEEPS)?;
    Ok(times.get(1).filter(|time| **time > 0.0).map(|time| data_bytes as f64 / time))
}

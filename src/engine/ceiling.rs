//! Measures how fast a device reads its memory: the ceiling that `bench` sets its figures against.
//! Deliberately absent: models.

use super::start::StartError;
use crate::actors::compute::{Compute, GpuTime, Submission};
use crate::actors::timeline::FlushReason;
use crate::actors::watcher::Outbox;
use crate::device::{Adapter, Device, Instance};
use crate::kernels::bench;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::memory::{Arena, Place, Table};
use std::sync::Arc;
use std::time::Duration;

/// A GPU that finishes nothing for so long is stuck.
const STEP_WAIT: Duration = Duration::from_secs(120);

/// Bytes a second that the device reads, median of several sweeps over a buffer far larger than
/// its caches; `None` where its queue has no timestamps.
pub fn read_ceiling(instance: &Instance, adapter: &Adapter) -> Result<Option<f64>, StartError> {
    const SWEEPS: usize = 9;
    let device = Device::open(instance, adapter)?;
    let arena = Arena::new(&device)?;
    let threads = if adapter.is_cpu() { 64 } else { 256 };
    let wanted: u64 = if adapter.is_cpu() { 256 << 20 } else { 3 << 30 };
    let bytes = wanted.min(adapter.capabilities.max_allocation_bytes / 2).min(device.budget().free_bytes() / 2);
    let recording = bench::read_ceiling(bytes, threads);
    let data_bytes = recording.buffers[0].bytes;
    let mut table = Table::new();
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

/// Seconds that each region takes on the device, median of `repeats` after two to warm up; 0 where the
/// queue has no timestamps.
pub(super) fn time_regions(
    device: &Arc<Device>,
    regions: &[Arc<Region>],
    repeats: usize,
) -> Result<Vec<f64>, StartError> {
    const WARM: usize = 2;
    let compute = Compute::spawn(Arc::clone(device), GpuTime::Phases)?;
    let mut medians = Vec::new();
    for region in regions {
        let (reports, done) = crossbeam_channel::bounded(repeats + WARM);
        let (wake, _woken) = crossbeam_channel::bounded(1);
        let mut times = Vec::new();
        for id in 0..(repeats + WARM) as u64 {
            compute.submit(Submission {
                id,
                entries: vec![vec![Arc::clone(region)]],
                waits: Vec::new(),
                gate: None,
                flush: FlushReason::PhaseBoundary,
                report_after: Vec::new(),
                outbox: Outbox { reports: reports.clone(), wake: wake.clone() },
            });
        }
        for id in 0..repeats + WARM {
            let Some(report) = compute.report(&done, STEP_WAIT) else { break };
            report.result?;
            if id >= WARM {
                times.extend(report.device_time.map(|time| time.as_secs_f64()));
            }
        }
        times.sort_by(f64::total_cmp);
        medians.push(times.get(times.len() / 2).copied().unwrap_or(0.0));
    }
    Ok(medians)
}

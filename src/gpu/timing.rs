//! Measures the device time of recorded regions.

use crate::actors::compute::{Compute, Gates, GpuTime, Submission};
use crate::actors::timeline::FlushReason;
use crate::actors::watcher::Outbox;
use crate::device::Device;
use crate::gpu::error::StartError;
use crate::kernels::region::Region;
use std::sync::Arc;
use std::time::Duration;

/// A GPU that finishes nothing for this long counts as stuck.
const STEP_WAIT: Duration = Duration::from_secs(120);

/// Returns the device time of each region in seconds, as the median of `repeats` runs after two warm-up runs; 0 if the
/// queue has no timestamps.
pub(crate) fn time_regions(
    device: &Arc<Device>,
    regions: &[Arc<Region>],
    repeats: usize,
) -> Result<Vec<f64>, StartError> {
    const WARM: usize = 2;
    let compute = Compute::spawn(Arc::clone(device), GpuTime::Phases, None)?;
    let mut medians = Vec::new();
    for region in regions {
        let (reports, done) = crossbeam_channel::bounded(repeats + WARM);
        let (wake, _woken) = crossbeam_channel::bounded(1);
        let mut times = Vec::new();
        for id in 0..(repeats + WARM) as u64 {
            compute.submit(Submission {
                id,
                ahead: None,
                entries: vec![vec![Arc::clone(region)]],
                waits: Vec::new(),
                gates: Gates::new(),
                waits_within: false,
                flush: FlushReason::PhaseBoundary,
                report_after: Vec::new(),
                outbox: Outbox { reports: reports.clone(), wake: wake.clone() },
                then: None,
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

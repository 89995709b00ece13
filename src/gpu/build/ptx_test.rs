//! The test at start of the programs in PTX: each that the model's recordings launch runs on random numbers and must give
//! the reference's results. Otherwise the model runs without them.
//! Not here: the probes and their references (`kernels::gemm::wgmma::probe`).

use crate::gpu::build::Build;
use crate::gpu::build::recordings::Recordings;
use crate::gpu::error::StartError;
use crate::kernels::gemm::wgmma::probe::{RESULTS, WgmmaProbe, probe};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::Op;
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::shaders;
use crate::memory::{BufferTable, Place};
use crate::model::decoder::Tuning;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Tests the programs in PTX that a model's recordings launch. Returns their number, or a description of the first
/// failure.
pub(crate) fn test_ptx(
    build: &Build<'_>,
    tuning: &Tuning,
    recordings: &Recordings,
    pipelines: &Pipelines,
) -> Result<Result<usize, String>, StartError> {
    let mut programs: BTreeSet<&[u32]> = BTreeSet::new();
    for op in recordings.all().into_iter().flat_map(|recording| &recording.ops) {
        if let Op::Call(call) = op
            && shaders::find(call.kernel).is_ptx()
        {
            programs.insert(&call.constants);
        }
    }
    for constants in &programs {
        build.wanted()?;
        let probe = probe(constants, tuning.processors);
        let found = run(build, &probe, pipelines)?;
        let broken = (tuning.broken_ptx > 0).then(|| "an injected failure".to_owned());
        if let Some(why) = broken.or_else(|| probe.difference(&found)) {
            return Ok(Err(format!("{constants:?}: {why}")));
        }
    }
    Ok(Ok(programs.len()))
}

/// Runs a probe on the device and returns the memory after it.
fn run(build: &Build<'_>, probe: &WgmmaProbe, pipelines: &Pipelines) -> Result<HostMemory, StartError> {
    let mut table = BufferTable::new();
    for (decl, words) in probe.recording.buffers.iter().zip(&probe.memory.buffers) {
        // Operands lie in the device's memory, as a model's do, where the host can write it.
        let place = if decl.name == RESULTS { Place::Readback } else { Place::Upload { bar: true } };
        let buffer = build.opened.arena.buffer(&decl.name, decl.bytes, place)?;
        buffer.write(0, bytemuck::cast_slice(words));
        table.add(buffer)?;
    }
    let region = Region::build(&build.opened.device, &probe.recording, &table, pipelines)?;
    build.run_all(vec![vec![Arc::new(region)]], &[])?;
    let mut found = probe.memory.clone();
    for (decl, words) in probe.recording.buffers.iter().zip(&mut found.buffers) {
        if decl.name == RESULTS {
            table.require(&decl.name)?.read(0, bytemuck::cast_slice_mut(words));
        }
    }
    Ok(found)
}

//! The test at start of the kernels that read quantised weights: each kernel and format that the model's recordings use
//! runs on weights in which every code occurs, and must give the reference's results. Some drivers compile some formats
//! to garbage; a model must not be served on them.
//! Not here: the probes and their references (`kernels::code_probe`).

use crate::gpu::build::Build;
use crate::gpu::build::recordings::Recordings;
use crate::gpu::error::StartError;
use crate::kernels::code_probe::{CodeKernel, CodeProbe, WEIGHTS, code_kernel, probe};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Op};
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::shaders;
use crate::memory::{BufferTable, Place};
use crate::model::decoder::Tuning;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tests the kernels of quantised weights in a model's recordings, of each kernel and format those for the fewest and
/// for the most rows; not programs in PTX (`ptx_test`). Returns a description of the first failure; `None` if all results are
/// right.
pub(crate) fn test_formats(
    build: &Build<'_>,
    tuning: &Tuning,
    recordings: &Recordings,
    pipelines: &Pipelines,
) -> Result<Option<String>, StartError> {
    let mut calls: BTreeMap<CodeKernel, BTreeMap<u32, &Call>> = BTreeMap::new();
    for op in recordings.all().into_iter().flat_map(|recording| &recording.ops) {
        if let Op::Call(call) = op
            && !shaders::find(call.kernel).is_ptx()
            && let Some((kernel, rows)) = code_kernel(call)
        {
            calls.entry(kernel).or_default().entry(rows).or_insert(call);
        }
    }
    for by_rows in calls.values() {
        let ends = [by_rows.first_key_value(), by_rows.last_key_value()];
        for (_, call) in ends.into_iter().flatten().take(by_rows.len().min(2)) {
            build.wanted()?;
            let Some(probe) = probe(call) else { continue };
            if let Some(why) = run(build, &probe, tuning, pipelines)? {
                return Ok(Some(why));
            }
        }
    }
    Ok(None)
}

/// Runs a probe on the device. Returns a description of the difference from the reference; `None` if the results are
/// equal.
fn run(
    build: &Build<'_>,
    probe: &CodeProbe,
    tuning: &Tuning,
    pipelines: &Pipelines,
) -> Result<Option<String>, StartError> {
    let broken = match tuning.broken_codes {
        0 => false,
        1 => tuning.fragments.is_some(),
        2 => true,
        _ => tuning.fragments.is_some() || tuning.dots.is_some(),
    };
    let mut table = BufferTable::new();
    for (decl, words) in probe.recording.buffers.iter().zip(&probe.memory.buffers) {
        let buffer = build.opened.arena.buffer(&decl.name, decl.bytes, Place::Readback)?;
        buffer.write(0, bytemuck::cast_slice(words));
        if broken && decl.name == WEIGHTS {
            let wrong: Vec<u32> = words.iter().map(|word| word ^ 0x8888_8888).collect();
            buffer.write(0, bytemuck::cast_slice(&wrong));
        }
        table.add(buffer)?;
    }
    let region = Region::build(&build.opened.device, &probe.recording, &table, pipelines)?;
    build.run_all(vec![vec![Arc::new(region)]], &[])?;
    let mut found = HostMemory::new(&probe.recording);
    for (decl, words) in probe.recording.buffers.iter().zip(&mut found.buffers) {
        table.require(&decl.name)?.read(0, bytemuck::cast_slice_mut(words));
    }
    Ok(probe.difference(&found))
}

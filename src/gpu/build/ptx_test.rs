//! The test at start of the programs in PTX: each that the model's recordings launch runs on random numbers and must give
//! the reference's results. Otherwise the model runs without them.
//! Not here: the probes and their references (`kernels::gemm::wgmma::probe`, `kernels::attention::probe`,
//! `kernels::code_probe`).

use crate::gpu::build::Build;
use crate::gpu::build::recordings::Recordings;
use crate::gpu::error::StartError;
use crate::kernels::attention;
use crate::kernels::code_probe::{self, CodeProbe};
use crate::kernels::gemm::wgmma::probe;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::programs;
use crate::kernels::recording::{Call, Op, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::shaders::{self, EXPERT_SKINNY_PTX, FLASH_WGMMA, SKINNY_CODES_PTX};
use crate::memory::{BufferTable, Place};
use crate::model::decoder::Tuning;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The numbers of programs in PTX that passed their tests.
pub(crate) struct TestedPtx {
    /// Those of products.
    pub(crate) products: usize,
    /// Those of prompts' attention.
    pub(crate) attention: usize,
    /// Those of products of codes with few rows of x.
    pub(crate) codes: usize,
    /// Those of experts of codes with few rows of x.
    pub(crate) experts: usize,
}

/// A program in PTX that failed its test.
pub(crate) struct FailedPtx {
    /// Its kernel.
    pub(crate) kernel: &'static str,
    /// The constants of its call, and what it computes wrongly.
    pub(crate) why: String,
}

/// Tests the programs in PTX that a model's recordings launch. Returns their numbers, or the first failure.
pub(crate) fn test_ptx(
    build: &Build<'_>,
    tuning: &Tuning,
    recordings: &Recordings,
    pipelines: &Pipelines,
) -> Result<Result<TestedPtx, FailedPtx>, StartError> {
    let mut programs: BTreeMap<(&'static str, &[u32]), &Call> = BTreeMap::new();
    for op in recordings.all().into_iter().flat_map(|recording| &recording.ops) {
        if let Op::Call(call) = op
            && shaders::find(call.kernel).is_ptx()
        {
            programs.entry((call.kernel, &call.constants)).or_insert(call);
        }
    }
    let broken = || (tuning.broken_ptx > 0).then(|| "an injected failure".to_owned());
    for (kernel, constants) in programs.keys().filter(|(kernel, _)| !programs::is_of_codes(kernel)) {
        build.wanted()?;
        let found = if *kernel == FLASH_WGMMA.name {
            let probe = attention::probe::wgmma_probe(constants);
            let found = run(build, &probe.recording, &probe.memory, &[attention::probe::RESULTS], pipelines)?;
            probe.difference(&found)
        } else {
            let probe = probe::probe(constants, tuning.processors);
            let found = run(build, &probe.recording, &probe.memory, &probe::RESULTS, pipelines)?;
            probe.difference(&found)
        };
        if let Some(why) = broken().or(found) {
            return Ok(Err(FailedPtx { kernel, why: format!("{constants:?}: {why}") }));
        }
    }
    // The references of products of codes decode all weights of a probe on the host, so that several threads compute them.
    let of_codes: Vec<&Call> = programs.values().copied().filter(|call| programs::is_of_codes(call.kernel)).collect();
    for calls in of_codes.chunks(build.threads()) {
        build.wanted()?;
        let probes = side_by_side(calls, |call| code_probe::probe(call).expect("it reads codes"));
        let run = |probe: CodeProbe| {
            let found = run(build, &probe.recording, &probe.memory, &[code_probe::RESULTS], pipelines)?;
            Ok((probe, found))
        };
        let found: Vec<(CodeProbe, HostMemory)> = probes.into_iter().map(run).collect::<Result<_, StartError>>()?;
        let differences = side_by_side(&found, |(probe, found)| probe.difference(found));
        for (call, difference) in calls.iter().zip(differences) {
            if let Some(why) = broken().or(difference) {
                return Ok(Err(FailedPtx { kernel: call.kernel, why: format!("{:?}: {why}", call.constants) }));
            }
        }
    }
    let count = |name: &str| programs.keys().filter(|(kernel, _)| *kernel == name).count();
    let attention = count(FLASH_WGMMA.name);
    let [codes, experts] = [&SKINNY_CODES_PTX, &EXPERT_SKINNY_PTX].map(|shader| count(shader.name));
    Ok(Ok(TestedPtx { products: programs.len() - attention - codes - experts, attention, codes, experts }))
}

/// Computes the results of all items, each by a thread of its own.
fn side_by_side<T: Sync, R: Send>(items: &[T], result: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(|| result(item))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|joined| joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Runs a probe's recording on the device, from `memory`, and returns the memory after it: its buffers named in `results`, and
/// the others as they were.
fn run(
    build: &Build<'_>,
    recording: &Recording,
    memory: &HostMemory,
    results: &[&str],
    pipelines: &Pipelines,
) -> Result<HostMemory, StartError> {
    let mut table = BufferTable::new();
    for (decl, words) in recording.buffers.iter().zip(&memory.buffers) {
        // Operands lie in the device's memory, as a model's do, where the host can write it.
        let place = if results.contains(&&*decl.name) { Place::Readback } else { Place::Upload { bar: true } };
        let buffer = build.opened.arena.buffer(&decl.name, decl.bytes, place)?;
        buffer.write(0, &bytemuck::cast_slice(words)[..decl.bytes as usize]);
        table.add(buffer)?;
    }
    let region = Region::build(&build.opened.device, recording, &table, pipelines)?;
    build.run_all(vec![vec![Arc::new(region)]], &[])?;
    let mut found = memory.clone();
    for (decl, words) in recording.buffers.iter().zip(&mut found.buffers) {
        if results.contains(&&*decl.name) {
            table.require(&decl.name)?.read(0, &mut bytemuck::cast_slice_mut(words)[..decl.bytes as usize]);
        }
    }
    Ok(found)
}

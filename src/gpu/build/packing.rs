//! Whether the quantised weights of a load are packed on the device, and the test of the kernels that do so: each variant
//! packs rows in which every code occurs and must give the bytes of the Rust packer, or the host packs what it would pack.
//! Not here: the packing (`actors::packer`), and the probes and their reference (`kernels::pack_codes`).

use crate::actors::packer::{DevicePacker, RawSlots};
use crate::gpu::build::Build;
use crate::gpu::devices::staging;
use crate::gpu::error::StartError;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::pack_codes::{PackProbe, PackVariant};
use crate::kernels::recording::Recording;
use crate::kernels::region::{Pipelines, Region};
use crate::memory::pack::SourceFormat;
use crate::memory::{BufferTable, MemoryError, Place};
use crate::model::decoder::Tuning;
use crate::model::decoder::drafter::PlacedWeight;
use crate::telemetry::with_causes;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// The fewest bytes of quantised rows for which a load packs on the device: the host packs fewer before the kernels are
/// there.
const LEAST_BYTES: u64 = 128 << 20;
/// The number of slots for rows before they are packed, each as large as a staging slot: a slot is copied, another one is
/// packed, and the threads between the two queues take as long as both.
const SLOTS: usize = 6;
const SLOTS_CPU: usize = 3;

/// Returns the variants of the kernel that pack rows of these weights, by name, and the bytes of the rows.
fn variants(weights: &[PlacedWeight<'_>]) -> (BTreeMap<String, PackVariant>, u64) {
    let (mut variants, mut bytes) = (BTreeMap::new(), 0);
    for PlacedWeight { spec, packing, .. } in weights {
        for source in spec.sources.iter().filter(|source| source.transposed.is_none()) {
            let variant = match (source.map.format, &source.matrix) {
                (SourceFormat::Blocks(kind), None) => PackVariant::of(kind, packing),
                (SourceFormat::Canonical(_), Some(of)) if of.matrix.order.is_none() => {
                    PackVariant::of_matrix(&of.matrix.description, packing)
                }
                _ => None,
            };
            if let Some(variant) = variant {
                bytes += source.map.bytes();
                variants.insert(variant.to_string(), variant);
            }
        }
    }
    (variants, bytes)
}

impl Build<'_> {
    /// Returns the variants of the kernel by which the load's weights are packed on the device, by name; empty if the host
    /// packs all. Loads beside other models leave the compute queue to these.
    fn packed_variants(&self, weights: &[PlacedWeight<'_>], tuning: &Tuning) -> BTreeMap<String, PackVariant> {
        let (variants, bytes) = variants(weights);
        let packs = match tuning.device_packing {
            0 => false,
            _ if self.fallbacks.no_device_packing.load(Ordering::Relaxed) => false,
            1 => !self.beside && !self.adapter.is_cpu() && bytes >= LEAST_BYTES,
            _ => true,
        };
        if packs { variants } else { BTreeMap::new() }
    }

    /// Returns the probes of all variants that pack rows of these weights, however few or many these are; none if the device is
    /// not to pack.
    pub(crate) fn packing_probes(
        &self,
        weights: &[PlacedWeight<'_>],
        tuning: &Tuning,
    ) -> Vec<(PackVariant, PackProbe)> {
        self.probes(if tuning.device_packing == 0 { BTreeMap::new() } else { variants(weights).0 })
    }

    fn probes(&self, variants: BTreeMap<String, PackVariant>) -> Vec<(PackVariant, PackProbe)> {
        let most_threads = self.most_threads();
        variants.into_values().map(|variant| (variant, variant.probe(most_threads, 1))).collect()
    }

    /// Returns the maximum number of invocations of a workgroup.
    fn most_threads(&self) -> u32 {
        let capabilities = &self.adapter.capabilities;
        capabilities.max_invocations.min(capabilities.max_workgroup_size[0])
    }

    fn raw_slots(&self) -> RawSlots {
        let (_, bytes) = staging(self.adapter);
        RawSlots { count: if self.adapter.is_cpu() { SLOTS_CPU } else { SLOTS }, bytes: bytes as u64 }
    }

    /// Returns the device memory that packing on the device takes during the load; `None` if the host packs all.
    pub(crate) fn packer_bytes(&self, weights: &[PlacedWeight<'_>], tuning: &Tuning) -> Option<u64> {
        let packs = !self.packed_variants(weights, tuning).is_empty();
        packs.then(|| self.raw_slots().total_bytes())
    }

    /// Returns what packs the load's weights on the device, with the kernels that have passed their test; `None` if the host
    /// packs all.
    pub(crate) fn packer(
        &self,
        weights: &[PlacedWeight<'_>],
        tuning: &Tuning,
        cache: Option<&Path>,
    ) -> Result<Option<Arc<DevicePacker>>, StartError> {
        let variants = self.packed_variants(weights, tuning);
        if variants.is_empty() {
            return Ok(None);
        }
        let says = |what: &str| self.progress.line(&format!("\"{}\": {what}", self.name));
        let probes = self.probes(variants);
        let recordings: Vec<&Recording> = probes.iter().map(|(_, probe)| &probe.recording).collect();
        let cores = Some(self.threads());
        let (device, table) = (&self.opened.device, &self.opened.pipelines);
        let pipelines = match Pipelines::build_for(device, table, cache, &recordings, cores, &|_, _| {}) {
            Ok(pipelines) => pipelines,
            Err(error) if device.is_lost() => return Err(error.into()),
            Err(error) => {
                let why = with_causes(&error);
                self.progress.warning(&format!("\"{}\": the host packs the weights: {why}", self.name));
                return Ok(None);
            }
        };
        let mut right = HashSet::new();
        for (variant, probe) in &probes {
            self.wanted()?;
            let fault = match self.packing_fault(*variant, probe, tuning, &pipelines) {
                Err(error) if !device.is_lost() => Some(with_causes(&error)),
                fault => fault?,
            };
            match fault {
                None => drop(right.insert(*variant)),
                Some(why) => self.progress.warning(&format!(
                    "\"{}\": device \"{}\" packs {variant} wrongly ({why}): the host packs them",
                    self.name, self.adapter.name
                )),
            }
        }
        if right.is_empty() {
            return Ok(None);
        }
        let compute = Arc::clone(&self.opened.compute);
        let of = (right, self.most_threads());
        match DevicePacker::new(&self.opened.arena, compute, pipelines, of, self.raw_slots()) {
            Ok(packer) => Ok(Some(Arc::new(packer))),
            Err(error @ MemoryError::OutOfMemory { .. }) => {
                says(&format!("the host packs the weights: {}", with_causes(&error)));
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the first difference of a variant's results from the reference; `None` if they are equal. A device is asked
    /// once.
    pub(crate) fn packing_fault(
        &self,
        variant: PackVariant,
        probe: &PackProbe,
        tuning: &Tuning,
        pipelines: &Pipelines,
    ) -> Result<Option<String>, StartError> {
        if tuning.broken_packing > 0 {
            return Ok(Some("an injected failure".to_owned()));
        }
        // No change of the map panics halfway.
        let known = || self.opened.packing_faults.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known().get(&variant) {
            return Ok(found.clone());
        }
        let mut table = BufferTable::new();
        for (decl, words) in probe.recording.buffers.iter().zip(&probe.memory.buffers) {
            let buffer = self.opened.arena.buffer(&decl.name, decl.bytes, Place::Readback)?;
            buffer.write(0, bytemuck::cast_slice(words));
            table.add(buffer)?;
        }
        let region = Region::build(&self.opened.device, &probe.recording, &table, pipelines)?;
        self.run_all(vec![vec![Arc::new(region)]], &[])?;
        let mut found = HostMemory::new(&probe.recording);
        for (decl, words) in probe.recording.buffers.iter().zip(&mut found.buffers) {
            table.require(&decl.name)?.read(0, bytemuck::cast_slice_mut(words));
        }
        let fault = probe.difference(&found);
        known().insert(variant, fault.clone());
        Ok(fault)
    }
}

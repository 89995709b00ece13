//! Determines how a device multiplies matrix blocks: on its matrix units (cooperative matrices), if it has them and
//! stores the elements where the kernels expect them.
//! Not here: the choice of kernels (`model::decoder`).

use crate::device::{Capabilities, Component, Device, MatrixShape};
use crate::gpu::error::StartError;
use crate::gpu::timing::time_regions;
use crate::kernels::gemm::fragment_layout::{self, FOUND};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::recording::Recording;
use crate::kernels::region::{Pipelines, Region};
use crate::memory::pack::Format;
use crate::memory::{Arena, BufferTable, Place};
use std::path::Path;
use std::sync::Arc;

/// Returns what a device does not promise of what the kernels for matrix units need; empty if it promises all of it.
pub(crate) fn unpromised(capabilities: &Capabilities) -> Vec<&'static str> {
    let shape = |input| {
        let shape = MatrixShape { m: 16, n: 16, k: 16, input, accumulator: Component::F32 };
        capabilities.matrix_shapes.contains(&shape)
    };
    // Without matrices there are no shapes to speak of.
    let none = !capabilities.cooperative_matrix;
    let subgroups_of_32 = (capabilities.subgroup_min..=capabilities.subgroup_max).contains(&32);
    [
        (capabilities.cooperative_matrix, "cooperative matrices"),
        (none || shape(Component::Bf16), "matrices of 16x16x16 in bf16 with sums in f32"),
        (none || shape(Component::F16), "matrices of 16x16x16 in f16 with sums in f32"),
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
        found.push(Arc::clone(&buffer));
        table.add(buffer)?;
    }
    let pipelines = Pipelines::build(device, cache, &[&recording], &|_, _| {})?;
    let region = Arc::new(Region::build(device, &recording, &table, &pipelines)?);
    time_regions(device, &[region], 1)?;
    let expected = fragment_layout::expected();
    let as_expected = found.iter().all(|buffer| {
        let mut values = vec![0f32; FOUND as usize];
        buffer.read(0, bytemuck::cast_slice_mut(&mut values));
        values == expected
    });
    if !as_expected {
        tracing::warn!(device = device.adapter().name, "matrix units keep elements elsewhere: they are not used");
    }
    Ok(as_expected.then_some(Matrices::Cooperative))
}

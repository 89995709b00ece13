//! Times the stages of a decode step one by one: every call of a kind over all layers, as the step
//! runs them, alone on the device. For `bench --stages`. Deliberately absent: loading; the
//! numbers do not depend on the weights' values.

use super::ceiling::time_regions;
use super::start::{StartError, tuning};
use crate::device::{Adapter, Device, Instance};
use crate::kernels::layout::StateLayout;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region, buffer_sizes};
use crate::memory::pack::Format;
use crate::memory::{Arena, Place, Table};
use crate::model::checkpoint::Checkpoint;
use crate::model::dense::{Dense, RingLayout, Shape, Tuning};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Time of one kind of call.
#[derive(Clone, Debug)]
pub struct Stage {
    /// The call's label without its layer, `qkv` for example; `step` is the whole step.
    pub name: String,
    /// Calls of a step.
    pub calls: u32,
    /// Microseconds of one call with the barrier before it, median.
    pub us: f64,
    /// Weight bytes of one call.
    pub weight_bytes: u64,
}

/// Times the stages of `decode.1` at `position`, with the device's tuning changed by `change`.
pub fn stages(
    instance: &Instance,
    adapter: &Adapter,
    checkpoint: &Checkpoint,
    position: u32,
    change: impl FnOnce(&mut Tuning),
) -> Result<Vec<Stage>, StartError> {
    let device = Device::open(instance, adapter)?;
    let arena = Arena::new(&device)?;
    let capabilities = &adapter.capabilities;
    let config = &checkpoint.config;
    let matrices = super::matrices::probe(&device, &arena, None)?;
    let mut tuning = tuning(adapter, matrices, config.kv_heads, position + 1);
    change(&mut tuning);
    let max_pages = (position + 1).div_ceil(16);
    let dense = Dense {
        config,
        weights: checkpoint.weights(),
        max_buffer_bytes: capabilities.max_allocation_bytes.min(capabilities.max_buffer_bytes),
        state: StateLayout { slots: 2, rows: 1, chunk: 16, prompts: 1, max_pages },
        pages: max_pages,
        kv_format: Format::F16,
        ring: RingLayout { steps: 16, rows: 1 },
        context: position + 1,
        tuning,
    };
    let step = dense.record(Shape::Decode { rows: 1 }).with_barriers();
    let mut init = Recording::new("init");
    let mut table = Table::new();
    for (name, bytes) in buffer_sizes(&[&step]) {
        let place = if name == "rows" { Place::Upload { bar: true } } else { Place::DeviceLocal };
        let buffer = arena.buffer(&name, bytes, place)?;
        if name == "rows" {
            buffer.write(0, bytemuck::cast_slice(&[1u32, position, 0, 1]));
        } else {
            let to = init.buffer(&name, bytes);
            init.ops.push(Op::Fill { to, word: 0 });
        }
        table.add(buffer)?;
    }
    let mut groups: BTreeMap<String, Recording> = BTreeMap::new();
    let mut names = Vec::new();
    for op in &step.ops {
        let Op::Call(call) = op else { continue };
        let name = call.label.rsplit('.').next().unwrap_or(&call.label).to_owned();
        let group = groups.entry(name.clone()).or_insert_with(|| {
            names.push(name.clone());
            Recording { name, buffers: step.buffers.clone(), ops: Vec::new() }
        });
        group.ops.push(op.clone());
    }
    // The first call of a step writes `rows`, which here says where the sequence stands.
    names.retain(|name| name != "embed");
    let pipelines = Pipelines::build(&device, None, &[&step, &init], &|_, _| {})?;
    let build = |recording: &Recording| Region::build_serial(&device, recording, &table, &pipelines).map(Arc::new);
    let mut regions = vec![build(&init)?];
    for name in &names {
        regions.push(build(&groups[name])?);
    }
    let times = time_regions(&device, &regions, 9)?;
    Ok(names
        .iter()
        .zip(times.into_iter().skip(1))
        .map(|(name, seconds)| {
            let recording = &groups[name];
            let calls = recording.ops.len() as u32;
            let weight_bytes = recording.ops.first().map_or(0, |op| match op {
                Op::Call(call) if call.kernel.starts_with("gemv") || call.kernel.starts_with("skinny") => {
                    call.args[0].range().bytes
                }
                _ => 0,
            });
            Stage { name: name.clone(), calls, us: seconds * 1e6 / f64::from(calls), weight_bytes }
        })
        .collect())
}

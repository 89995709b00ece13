//! Times the stages of a step separately, for `bench --stages`: all calls of a kind over all layers, with the arguments
//! that they have in the step, alone on the device.
//! Not here: loading weights. The buffers are zero; times do not depend on the values of the weights, except through
//! the power that long products draw.

use crate::config::KvFormat;
use crate::device::{Adapter, Device, Instance};
use crate::gpu::build::defaults::{PTX, most_weight_bytes, tuning};
use crate::gpu::error::StartError;
use crate::gpu::timing::time_regions;
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::embed::PromptRows;
use crate::kernels::gemm::weight_bytes;
use crate::kernels::layout::StateLayout;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region, buffer_sizes};
use crate::kernels::state;
use crate::memory::{Arena, BufferTable, Place};
use crate::model::checkpoint::{Checkpoint, WeightKind, WeightSpec};
use crate::model::decoder::stage::LayerStage;
use crate::model::decoder::{Decoder, RingLayout, StepShape, Tuning};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The step to time.
#[derive(Clone, Debug)]
pub struct StageLoad {
    /// The kind of step: one token of each of a number of sequences, or a chunk of one sequence's prompt.
    pub shape: StepShape,
    /// The position of the sequences.
    pub position: u32,
    /// The position of the last sequence, if it differs.
    pub last_position: Option<u32>,
    /// The number format of keys and values.
    pub kv_format: KvFormat,
    /// Changes of the tuning, each of which is timed separately.
    pub tries: Vec<String>,
}

/// The time of one kind of call.
#[derive(Clone, Debug)]
pub struct Stage {
    /// The label of the calls without the layer, for example `qkv`; `step` is the whole step as in normal operation.
    pub name: String,
    /// The tuning change that was tried; `None` for the unchanged stage.
    pub tried: Option<String>,
    /// The number of calls per step.
    pub calls: u32,
    /// The median time of one call, including the barrier before it, in microseconds.
    pub us: f64,
    /// The number of weight bytes of one call.
    pub weight_bytes: u64,
    /// The number of multiplications and additions of one call's weights with its rows.
    pub operations: u64,
}

/// Groups the calls of a step by kind, in the order of each kind's first call.
fn groups(step: &Recording) -> Vec<Recording> {
    let mut groups: Vec<Recording> = Vec::new();
    for op in &step.ops {
        let Op::Call(call) = op else { continue };
        let name = match call.label.rsplit('.').next().unwrap_or(&call.label) {
            "lm_head" => "head",
            name => name,
        };
        let at = groups.iter().position(|group| group.name == name).unwrap_or_else(|| {
            groups.push(Recording { name: name.to_owned(), buffers: step.buffers.clone(), ..Recording::default() });
            groups.len() - 1
        });
        groups[at].ops.push(op.clone());
    }
    groups
}

/// Returns the words of the device state for a step: the positions of the sequences and their page tables.
fn state_words(layout: &StateLayout, load: &StageLoad, positions: &[u32]) -> Vec<u32> {
    let mut words = vec![0u32; (layout.bytes() / 4) as usize];
    let mut set = |at: u32, value: u32| words[at as usize] = value;
    let mut page = 0;
    for (slot, position) in (0..).zip(positions) {
        for (word, value) in [
            (state::SLOT_ACTIVE, state::ACTIVE_RUNNING),
            (state::SLOT_POSITION, *position),
            (state::SLOT_SETTLED, *position),
            (state::SLOT_REMAINING, u32::MAX / 2),
            (state::SLOT_TOKEN, 1),
        ] {
            set(layout.slot_word(slot, word), value);
        }
        for index in 0..pages_of(*position, load) {
            set(layout.page_word(slot, index), page);
            page += 1;
        }
    }
    for row in 0..layout.rows {
        set(layout.batch_word(row), row);
    }
    if let StepShape::Prefill { rows } = load.shape {
        let tokens = vec![0; rows as usize];
        let from = (load.position > 0).then_some(0);
        let prompt =
            PromptRows { slot: 0, start: load.position, tokens: &tokens, last: true, next: None, from, keeps: &[] };
        for (word, words) in layout.chunk_layout().describe(&[prompt]) {
            for (at, value) in (layout.chunk_word(word)..).zip(words) {
                set(at, value);
            }
        }
    }
    words
}

/// The maximum number of times that a timing runs the step; each run advances the sequences by a token.
const RUNS: u32 = 32;

/// Returns the number of pages of a sequence at `position`.
fn pages_of(position: u32, load: &StageLoad) -> u32 {
    let tokens = match load.shape {
        StepShape::Prefill { rows } => rows,
        _ => RUNS,
    };
    (position + tokens).div_ceil(PAGE_TOKENS)
}

/// Times the stages of a step. `change` changes the device's tuning first.
pub fn stages(
    instance: &Instance,
    adapter: &Adapter,
    checkpoint: &Checkpoint,
    load: &StageLoad,
    change: impl FnOnce(&mut Tuning),
) -> Result<Vec<Stage>, StartError> {
    let device = Device::open(instance, adapter)?;
    let arena = Arena::new(&device)?;
    let config = &checkpoint.config;
    let matrices = crate::gpu::matrix_units::probe(&device, &arena, None)?;
    let (rows, chunk) = match load.shape {
        StepShape::Decode { rows } => (rows, 16),
        other => (1, other.rows()),
    };
    let mut positions = vec![load.position; rows as usize];
    if let (Some(last), Some(position)) = (load.last_position, positions.last_mut()) {
        *position = last;
    }
    let max_pages = positions.iter().map(|position| pages_of(*position, load)).max().unwrap_or(1);
    let mut tuning = tuning(adapter, matrices, config.least_kv_heads(), max_pages * PAGE_TOKENS);
    let runs_ptx = matrices.is_some() && crate::gpu::matrix_units::runs_wgmma(&device).is_ok();
    tuning.ptx = PTX;
    change(&mut tuning);
    tuning.ptx &= runs_ptx;
    let decoder = Decoder {
        input_tags: BTreeMap::new(),
        config,
        weights: checkpoint.weights_without_mtp(),
        stage: LayerStage::whole(config),
        max_buffer_bytes: most_weight_bytes(&adapter.capabilities, &tuning),
        state: StateLayout {
            slots: rows,
            rows,
            chunk,
            prompts: 1,
            sequences: 1,
            max_pages,
            cells: config.is_recurrent(),
            windows: false,
        },
        cells: rows,
        drafts: 0,
        drafter: None,
        pages: positions.iter().map(|position| pages_of(*position, load)).sum(),
        window_pages: None,
        kv_format: load.kv_format,
        ring: RingLayout { steps: 16, rows },
        context: max_pages * PAGE_TOKENS,
        tuning,
    };
    let is_matrix = |w: &&WeightSpec| matches!(w.kind, WeightKind::Matrix);
    // Bytes per weight of the first matrix; less than 1 for codes.
    let weight_value_bytes =
        checkpoint.weights().iter().find(is_matrix).map_or(1.0, |w| w.bytes() as f64 / w.elements() as f64);
    let whole = decoder.record(load.shape);
    let step = whole.without_tags();
    let base = groups(&step);
    let mut tried = Vec::new();
    for change in &load.tries {
        let mut decoder = decoder.clone();
        decoder.tuning.set(change);
        decoder.tuning.ptx &= runs_ptx;
        let step = decoder.record(load.shape).without_tags();
        // Stages that a change does not affect are already timed.
        for group in groups(&step) {
            if base.iter().all(|old| old.name != group.name || old.to_string() != group.to_string()) {
                tried.push((change.clone(), group));
            }
        }
    }

    let mut recordings: Vec<&Recording> = vec![&whole, &step];
    recordings.extend(tried.iter().map(|(_, group)| group));
    let mut init = Recording::new("init");
    let mut table = BufferTable::new();
    for (name, bytes) in buffer_sizes(&recordings) {
        let place = if name == "state" { Place::Upload { bar: true } } else { Place::DeviceLocal };
        let buffer = arena.buffer(&name, bytes, place)?;
        if name == "state" {
            buffer.write(0, bytemuck::cast_slice(&state_words(&decoder.state, load, &positions)));
        } else {
            let to = init.buffer(&name, bytes);
            init.ops.push(Op::Fill { to, word: 0 });
        }
        table.add(buffer)?;
    }
    recordings.push(&init);
    let pipelines = Pipelines::build(&device, None, &recordings, &|_, _| {})?;
    let serial = |recording: &Recording| Region::build_serial(&device, recording, &table, &pipelines).map(Arc::new);
    let mut regions = vec![serial(&init)?, Arc::new(Region::build(&device, &whole, &table, &pipelines)?)];
    let mut names = vec![(whole.name.clone(), None, None)];
    let all = base.iter().map(|group| (None, group)).chain(tried.iter().map(|(change, group)| (Some(change), group)));
    for (change, group) in all {
        regions.push(serial(group)?);
        names.push((group.name.clone(), change.cloned(), Some(group)));
    }
    let times = time_regions(&device, &regions, 9)?;
    Ok(names
        .into_iter()
        .zip(times.into_iter().skip(1))
        .map(|((name, tried, group), seconds)| {
            let Some(group) = group else {
                let name = "step".to_owned();
                return Stage { name, tried, calls: 1, us: seconds * 1e6, weight_bytes: 0, operations: 0 };
            };
            let calls = group.ops.len() as u32;
            // A weight that is stored in several parts has several calls with the same label.
            let bytes: u64 = group
                .ops
                .iter()
                .map(|op| match op {
                    Op::Call(call) => weight_bytes(call).unwrap_or(0),
                    Op::Copy { .. } | Op::Fill { .. } => 0,
                })
                .sum();
            let weight_bytes = bytes / u64::from(calls);
            // The LM head of a prefill runs for one row only, the prompt's last token.
            let rows = if name == "head" { rows } else { load.shape.rows() };
            let weights = (weight_bytes as f64 / weight_value_bytes) as u64;
            let operations = 2 * weights * u64::from(rows);
            Stage { name, tried, calls, us: seconds * 1e6 / f64::from(calls), weight_bytes, operations }
        })
        .collect())
}

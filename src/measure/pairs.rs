//! Measures how fast two devices exchange sums by way of the host, as tensor parallelism does (`gpu::executor::split`).
//! Not here: models.

use crate::actors::compute::{Compute, Gates, GpuTime, Submission};
use crate::actors::proxy::{ExchangeMemory, Exchanges, Proxies};
use crate::actors::timeline::FlushReason;
use crate::actors::watcher::Outbox;
use crate::device::{Adapter, Device, Gate, Instance};
use crate::gpu::build::defaults::tuning;
use crate::gpu::error::StartError;
use crate::kernels::exchange::{
    Blocks, ExchangeBuffers, ExchangeShape, Phase, Rank, Summed, all_reduce, inbox_bytes, outbox_bytes, words_of,
};
use crate::kernels::gemm::Activations;
use crate::kernels::recording::Recording;
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::tags::Flow;
use crate::memory::{Arena, Buffer, BufferTable, Place};
use crate::model::decoder::parallel::pieces;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The numbers of f32 values that are exchanged: one row of an 8B and of a 70B model, 16 rows, and a prompt's 512 rows.
const SIZES: [u32; 4] = [4096, 8192, 65_536, 2_097_152];
/// The number of exchanges of a measured step.
const EXCHANGES: u32 = 64;
/// The number of measured steps, after one that is not.
const STEPS: u32 = 5;
/// The time that a step may take: exchanges end after less without a word.
const PATIENCE: Duration = Duration::from_secs(300);

/// The time of an exchange of sums between two devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeTime {
    /// The number of f32 values that each device has.
    pub values: u32,
    /// The seconds of an exchange if kernels wait for words; `None` if they cannot.
    pub within: Option<f64>,
    /// The same if they are rounded to bfloat16 and pass in blocks, as those of prompts.
    pub halves: Option<f64>,
    /// The seconds of an exchange if the step is divided there.
    pub divided: f64,
}

/// Returns the times of exchanges between two devices.
pub fn exchange_times(instance: &Instance, adapters: [&Adapter; 2]) -> Result<Vec<ExchangeTime>, StartError> {
    let mut devices = Vec::new();
    for adapter in adapters {
        devices.push(Device::open(instance, adapter)?);
    }
    let on_cpu = adapters.iter().any(|adapter| adapter.is_cpu());
    let sizes = if on_cpu { &SIZES[..2] } else { &SIZES[..] };
    let mut times = Vec::new();
    for &values in sizes {
        let within = |halves| if on_cpu { Ok(None) } else { time(&devices, adapters, (values, halves), true) };
        let (within, halves) = (within(false)?, within(true)?);
        if let Some(divided) = time(&devices, adapters, (values, false), false)? {
            times.push(ExchangeTime { values, within, halves, divided });
        }
    }
    Ok(times)
}

/// A device with a step of exchanges.
struct Side {
    compute: Compute,
    /// The parts of the step; one if kernels wait for words.
    regions: Vec<Arc<Region>>,
    number: Arc<Buffer>,
    gate: Arc<Gate>,
}

/// Returns the seconds of an exchange of so many values, rounded to bfloat16 or not; `None` if it does not work.
fn time(
    devices: &[Arc<Device>],
    adapters: [&Adapter; 2],
    (values, halves): (u32, bool),
    polls: bool,
) -> Result<Option<f64>, StartError> {
    let slot_words = slot_words(values, halves);
    let mut memory = ExchangeMemory {
        outboxes: Vec::new(),
        inboxes: Vec::new(),
        gates: Vec::new(),
        slot_words,
        best_words: 0,
        on_cpu: adapters.iter().any(|adapter| adapter.is_cpu()),
    };
    let mut sides = Vec::new();
    for ((device, adapter), index) in devices.iter().zip(adapters).zip(0..) {
        let arena = Arena::new(device)?;
        let recording = record(adapter, Rank { index, of: 2 }, (values, halves), polls);
        let mut table = BufferTable::new();
        for decl in &recording.buffers {
            let place = match decl.name.as_str() {
                "outbox" => Place::Readback,
                "inbox" | "number" | "fault" => Place::Upload { bar: true },
                _ => Place::DeviceLocal,
            };
            let buffer = arena.buffer(&decl.name, decl.bytes, place)?;
            if place != Place::DeviceLocal {
                buffer.write(0, &vec![0; decl.bytes as usize]);
            }
            table.add(buffer)?;
        }
        let parts = pieces(&recording);
        let pipelines = Pipelines::build(device, None, &parts.iter().collect::<Vec<_>>(), &|_, _| {})?;
        let gated = |part: &Recording| Region::build_gated(device, part, &table, &pipelines).map(Arc::new);
        let regions = parts.iter().map(gated).collect::<Result<Vec<_>, _>>()?;
        let gate = Arc::new(Gate::new(device)?);
        memory.outboxes.push(Arc::clone(table.require("outbox")?));
        memory.inboxes.push(Arc::clone(table.require("inbox")?));
        if !polls {
            memory.gates.push(Arc::clone(&gate));
        }
        let number = Arc::clone(table.require("number")?);
        sides.push(Side { compute: Compute::spawn(Arc::clone(device), GpuTime::Off, None)?, regions, number, gate });
    }
    if polls && memory.inboxes.iter().zip(adapters).any(|(inbox, of)| !inbox.device_local() && !of.is_cpu()) {
        return Ok(None);
    }
    let proxies = Proxies::spawn(memory)?;
    let mut best = None::<f64>;
    for step in 0..=STEPS {
        let first = 1 + u64::from(step * EXCHANGES);
        proxies.carry(Exchanges { first, count: EXCHANGES, floats: [values; 2], halves, turns: 0, of_head: 0 });
        let begun = Instant::now();
        let (reports, done) = crossbeam_channel::bounded(sides.len());
        let (wake, _woken) = crossbeam_channel::bounded(1);
        for side in &sides {
            side.number.write(0, &(first as u32).to_le_bytes());
            let gates = (2..).zip(first..).take(side.regions.len() - 1);
            side.compute.submit(Submission {
                id: u64::from(step),
                ahead: None,
                entries: side.regions.iter().map(|region| vec![Arc::clone(region)]).collect(),
                waits: Vec::new(),
                gates: gates.map(|(entry, number)| (entry, (Arc::clone(&side.gate), number))).collect::<Gates>(),
                waits_within: polls,
                flush: FlushReason::PhaseBoundary,
                report_after: Vec::new(),
                outbox: Outbox { reports: reports.clone(), wake: wake.clone() },
                then: None,
            });
        }
        for side in &sides {
            let Some(report) = side.compute.report(&done, PATIENCE) else { return Ok(None) };
            report.result?;
        }
        if proxies.has_stopped() {
            return Ok(None);
        }
        let seconds = begun.elapsed().as_secs_f64() / f64::from(EXCHANGES);
        // The first step compiles and warms caches.
        if step > 0 {
            best = Some(best.map_or(seconds, |best| best.min(seconds)));
        }
    }
    Ok(best)
}

/// Returns the number of words of a slot, which begins with a cache line. All of them are for blocks, or none.
fn slot_words(values: u32, halves: bool) -> u32 {
    match halves {
        true => Blocks::of(values).slot_words(),
        false => (words_of(values.into()) as u32).next_multiple_of(4),
    }
}

/// Returns a step of exchanges.
fn record(adapter: &Adapter, rank: Rank, (values, halves): (u32, bool), polls: bool) -> Recording {
    let mut recording = Recording::new("exchanges");
    let slot_words = slot_words(values, halves);
    let r = &mut recording;
    let floats =
        |r: &mut Recording, name: &str| Activations { range: r.buffer(name, u64::from(values) * 4), stride: values };
    let (x, y) = (floats(r, "x"), floats(r, "y"));
    let buffers = ExchangeBuffers {
        outbox: r.buffer("outbox", outbox_bytes(slot_words)),
        inbox: r.buffer("inbox", inbox_bytes(slot_words, rank.of)),
        number: r.buffer("number", 4),
        fault: r.buffer("fault", 8),
        slot_words,
        block_words: if halves { slot_words } else { 0 },
        best_words: 0,
    };
    let tuning = tuning(adapter, None, 1, 1);
    let shape = ExchangeShape {
        rank,
        workgroups: tuning.exchange_workgroups,
        most_polls: if polls { tuning.exchange_polls.max(1) } else { 1 },
    };
    let summed = Summed { rows: 1, count: None, x, y, adds: false, halves, flow: Flow::NONE };
    let phases: &[Phase] = if polls { &[Phase::Both] } else { &[Phase::Send, Phase::Receive] };
    for index in 0..EXCHANGES {
        for phase in phases {
            r.call(all_reduce(format!("sum.{index}"), summed, (shape, *phase), index, buffers));
        }
    }
    recording
}

//! Converts a profile to a Perfetto trace (for ui.perfetto.dev): the subset of its format that is written here,
//! and the assignment of the profile's data to tracks. Not here: requesting a profile.
//!
//! Tracks: plans of the engine, submissions of the compute actor, completions seen by the watcher, submissions of the
//! transfer actor, threads of the loader; both queues as the device ran them, with kernels below regions; counters of
//! both timelines' values, KV pages and sequences. A flow arrow connects a plan with its submissions, their first
//! regions and its end.

use crate::service::proto;
use prost::Message;
use std::collections::BTreeSet;

/// The file: a sequence of packets.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Trace {
    #[prost(message, repeated, tag = "1")]
    pub(super) packet: Vec<Packet>,
}

/// `TracePacket`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Packet {
    #[prost(uint64, optional, tag = "8")]
    pub(super) timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    pub(super) trusted_packet_sequence_id: u32,
    #[prost(message, optional, tag = "6")]
    pub(super) clock_snapshot: Option<ClockSnapshot>,
    #[prost(message, optional, tag = "11")]
    pub(super) track_event: Option<TraceEvent>,
    #[prost(message, optional, tag = "60")]
    pub(super) track_descriptor: Option<Track>,
}

/// Simultaneous readings of several clocks.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ClockSnapshot {
    #[prost(message, repeated, tag = "1")]
    pub(super) clocks: Vec<Clock>,
}

/// One clock reading. Clock 6 is the default clock of packet timestamps; clock 1 is the wall clock.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Clock {
    #[prost(uint32, tag = "1")]
    pub(super) clock_id: u32,
    #[prost(uint64, tag = "2")]
    pub(super) timestamp: u64,
}

/// `TrackDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Track {
    #[prost(uint64, tag = "1")]
    pub(super) uuid: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(message, optional, tag = "3")]
    pub(super) process: Option<Process>,
    #[prost(uint64, optional, tag = "5")]
    pub(super) parent_uuid: Option<u64>,
    #[prost(message, optional, tag = "8")]
    pub(super) counter: Option<Counter>,
}

/// `ProcessDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Process {
    #[prost(int32, tag = "1")]
    pub(super) pid: i32,
    #[prost(string, tag = "6")]
    pub(super) process_name: String,
}

/// `CounterDescriptor`; unit 2 is a count.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Counter {
    #[prost(int32, tag = "3")]
    pub(super) unit: i32,
}

/// `TrackEvent`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TraceEvent {
    #[prost(message, repeated, tag = "4")]
    pub(super) debug_annotations: Vec<Annotation>,
    #[prost(int32, tag = "9")]
    pub(super) kind: i32,
    #[prost(uint64, tag = "11")]
    pub(super) track_uuid: u64,
    #[prost(string, optional, tag = "23")]
    pub(super) name: Option<String>,
    #[prost(int64, optional, tag = "30")]
    pub(super) counter_value: Option<i64>,
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    pub(super) flow_ids: Vec<u64>,
}

/// `DebugAnnotation`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Annotation {
    #[prost(string, tag = "10")]
    pub(super) name: String,
    #[prost(double, optional, tag = "5")]
    pub(super) double_value: Option<f64>,
    #[prost(string, optional, tag = "6")]
    pub(super) string_value: Option<String>,
}

/// `TrackEvent.Type`: begin of a slice.
pub(super) const SLICE_BEGIN: i32 = 1;
/// `TrackEvent.Type`: end of a slice.
pub(super) const SLICE_END: i32 = 2;
/// `TrackEvent.Type`: an instant.
pub(super) const INSTANT: i32 = 3;
/// `TrackEvent.Type`: a counter's value.
pub(super) const COUNTER: i32 = 4;

const PROCESS: u64 = 1;
/// Track id of the loader's first thread.
const LOADER: u64 = 100;
/// The maximum number of loader threads in the trace.
const LOADERS: u64 = 64;
/// The fixed tracks: id, name, and whether the track is a counter.
const TRACKS: [(u64, &str, bool); 12] = [
    (ENGINE, "engine: plans", false),
    (COMPUTE, "compute actor: submissions", false),
    (WATCHER, "watcher: ends seen", false),
    (TRANSFER, "transfer actor: submissions", false),
    (COMPUTE_QUEUE, "compute queue", false),
    (TRANSFER_QUEUE, "transfer queue", false),
    (COMPUTE_VALUE, "compute timeline value", true),
    (TRANSFER_VALUE, "transfer timeline value", true),
    (PAGES, "KV pages in use", true),
    (RUNNING, "sequences running", true),
    (WAITING, "requests waiting", true),
    (ROWS, "rows or prompt tokens of the step", true),
];
const ENGINE: u64 = 10;
const COMPUTE: u64 = 11;
const WATCHER: u64 = 12;
const TRANSFER: u64 = 13;
const COMPUTE_QUEUE: u64 = 20;
const TRANSFER_QUEUE: u64 = 21;
const COMPUTE_VALUE: u64 = 30;
const TRANSFER_VALUE: u64 = 31;
const PAGES: u64 = 32;
const RUNNING: u64 = 33;
const WAITING: u64 = 34;
const ROWS: u64 = 35;

/// The distance between the ids of the same track of two adjacent devices of a split replica; the first device has the
/// ids above.
const DEVICES: u64 = 1000;

/// The sequence id of all packets, because there is only one writer.
const SEQUENCE: u32 = 1;

enum Value<'a> {
    Number(f64),
    Text(&'a str),
}

fn annotation(name: &str, value: Value<'_>) -> Annotation {
    let (double_value, string_value) = match value {
        Value::Number(number) => (Some(number), None),
        Value::Text(text) => (None, Some(text.to_owned())),
    };
    Annotation { name: name.to_owned(), double_value, string_value }
}

/// Collects events, to be sorted by time at the end.
#[derive(Default)]
struct Writer {
    /// Events with their sort key: the time, and a rank among events of the same time. Ends come first (inner before
    /// outer), then instants and counters, then begins (outer before inner).
    events: Vec<((u64, i32), TraceEvent)>,
    /// The devices with tracks of their own, by name and UUID: the replica's first device, then others.
    devices: Vec<(String, String)>,
}

impl Writer {
    fn slice(&mut self, track: u64, depth: i32, name: &str, (begin, end): (u64, u64), extra: TraceEvent) {
        let open = TraceEvent { kind: SLICE_BEGIN, track_uuid: track, name: Some(name.to_owned()), ..extra };
        let close = TraceEvent { kind: SLICE_END, track_uuid: track, ..TraceEvent::default() };
        // An estimated clock can place the end before the begin, which the format does not allow.
        let end = end.max(begin + 1);
        self.events.push(((begin, 10 + depth), open));
        self.events.push(((end, -depth), close));
    }

    fn instant(&mut self, track: u64, name: &str, at: u64, extra: TraceEvent) {
        let event = TraceEvent { kind: INSTANT, track_uuid: track, name: Some(name.to_owned()), ..extra };
        self.events.push(((at, 5), event));
    }

    /// Returns the id of the track of this kind of the device of a submission.
    fn track(&mut self, kind: u64, submission: &proto::Submission) -> u64 {
        let of = (submission.device.clone(), submission.device_uuid.clone());
        let at = self.devices.iter().position(|device| *device == of).unwrap_or_else(|| {
            self.devices.push(of);
            self.devices.len() - 1
        });
        kind + DEVICES * at as u64
    }

    fn counter(&mut self, track: u64, at: u64, value: u64) {
        let counter_value = Some(i64::try_from(value).unwrap_or(i64::MAX));
        self.events
            .push(((at, 5), TraceEvent { kind: COUNTER, track_uuid: track, counter_value, ..TraceEvent::default() }));
    }
}

/// Converts a profile to a trace. Includes the weight load, and transfers from before the first step, only if `load` is
/// set.
pub(super) fn trace(profile: &proto::ProfileResponse, load: bool) -> Trace {
    let device = profile.device.clone().unwrap_or_default();
    let mut writer = Writer { devices: vec![(device.name, device.uuid)], ..Writer::default() };
    for step in &profile.steps {
        plan(&mut writer, step);
    }
    let first = profile.steps.iter().map(|step| step.planned_ns).min().unwrap_or(0);
    for transfer in profile.transfers.iter().filter(|transfer| load || transfer.seen_ns >= first) {
        copies(&mut writer, transfer);
    }
    let workers = profile.load.iter().filter(|_| load).flat_map(|load| &load.workers);
    for (worker, track) in workers.zip(LOADER..LOADER + LOADERS) {
        let number = |name, value| annotation(name, Value::Number(value));
        let debug_annotations = vec![
            number("read, s", worker.read_seconds),
            number("pack, s", worker.pack_seconds),
            number("wait for staging, s", worker.wait_seconds),
        ];
        let extra = TraceEvent { debug_annotations, ..TraceEvent::default() };
        writer.slice(track, 0, "read, pack, wait", (worker.begin_ns, worker.end_ns), extra);
    }
    let packet = |timestamp| Packet { timestamp, trusted_packet_sequence_id: SEQUENCE, ..Packet::default() };
    let clocks = [(6, profile.now_ns), (1, profile.now_unix_ns)];
    let clocks = clocks.into_iter().map(|(clock_id, timestamp)| Clock { clock_id, timestamp }).collect();
    let device = profile.device.clone().unwrap_or_default().name;
    let process = Process { pid: 1, process_name: format!("ostinato: {} on {device}", profile.replica) };
    let mut packets = vec![
        Packet { clock_snapshot: Some(ClockSnapshot { clocks }), ..packet(Some(profile.now_ns)) },
        Packet {
            track_descriptor: Some(Track { uuid: PROCESS, process: Some(process), ..Track::default() }),
            ..packet(None)
        },
    ];
    let used: BTreeSet<u64> = writer.events.iter().map(|(_, event)| event.track_uuid).collect();
    packets.extend(TRACKS.iter().filter(|(uuid, ..)| used.contains(uuid)).map(|&(uuid, name, counts)| {
        let counter = counts.then_some(Counter { unit: 2 });
        let track = Track { uuid, name: name.to_owned(), process: None, parent_uuid: Some(PROCESS), counter };
        Packet { track_descriptor: Some(track), ..packet(None) }
    }));
    for (at, (device, _)) in writer.devices.iter().enumerate().skip(1) {
        let of_device = |uuid: u64| uuid + DEVICES * at as u64;
        packets.extend(TRACKS.iter().filter(|(uuid, ..)| used.contains(&of_device(*uuid))).map(
            |&(uuid, name, counts)| {
                let (uuid, name) = (of_device(uuid), format!("{name} of {device}"));
                let counter = counts.then_some(Counter { unit: 2 });
                let track = Track { uuid, name, process: None, parent_uuid: Some(PROCESS), counter };
                Packet { track_descriptor: Some(track), ..packet(None) }
            },
        ));
    }
    packets.extend(used.iter().filter(|uuid| (LOADER..DEVICES).contains(*uuid)).map(|&uuid| {
        let name = format!("loader.{}", uuid - LOADER);
        let track = Track { uuid, name, process: None, parent_uuid: Some(PROCESS), counter: None };
        Packet { track_descriptor: Some(track), ..packet(None) }
    }));
    writer.events.sort_by_key(|(order, _)| *order);
    let events = writer.events.into_iter();
    packets.extend(events.map(|((at, _), event)| Packet { track_event: Some(event), ..packet(Some(at)) }));
    Trace { packet: packets }
}

fn plan(writer: &mut Writer, step: &proto::Step) {
    let cost = step.cost.unwrap_or_default();
    let name = format!("{} {} × {} rows", step.phase, step.steps, step.rows);
    let flow = || vec![step.number + 1];
    let number = |name, value| annotation(name, Value::Number(value));
    let debug_annotations = vec![
        number("number", step.number as f64),
        number("requests", f64::from(step.requests)),
        number("tokens", f64::from(step.tokens)),
        number("schedule_us", cost.schedule_us),
        number("deliver_us", cost.deliver_us),
    ];
    let of_plan = TraceEvent { debug_annotations, flow_ids: flow(), ..TraceEvent::default() };
    writer.instant(ENGINE, &format!("planned: {name}"), step.planned_ns, of_plan);
    writer.instant(
        ENGINE,
        &format!("taken: {name}"),
        step.taken_ns,
        TraceEvent { flow_ids: flow(), ..TraceEvent::default() },
    );
    for (track, value) in
        [(PAGES, step.pages_used), (RUNNING, step.running), (WAITING, step.waiting), (ROWS, step.rows)]
    {
        writer.counter(track, step.taken_ns, u64::from(value));
    }
    for submission in &step.submissions {
        let [compute, watcher, queue, value] =
            [COMPUTE, WATCHER, COMPUTE_QUEUE, COMPUTE_VALUE].map(|kind| writer.track(kind, submission));
        let mut debug_annotations = vec![
            number("timeline value", submission.value as f64),
            number("dispatches", f64::from(submission.dispatches)),
            number("barriers", f64::from(submission.barriers)),
            annotation("flush", Value::Text(&submission.flush)),
        ];
        if !submission.waits.is_empty() {
            debug_annotations.push(annotation("waits for", Value::Text(&submission.waits.join(", "))));
        }
        let enqueue = (submission.enqueue_begin_ns, submission.enqueue_end_ns);
        let submit = TraceEvent { debug_annotations, flow_ids: flow(), ..TraceEvent::default() };
        writer.slice(compute, 0, &format!("submit: {}", submission.flush), enqueue, submit);
        let seen = TraceEvent {
            debug_annotations: vec![number("blocking waits", f64::from(submission.host_waits))],
            flow_ids: flow(),
            ..TraceEvent::default()
        };
        writer.instant(watcher, &format!("seen: compute {}", submission.value), submission.seen_ns, seen);
        let end = submission.regions.last().map_or(submission.seen_ns, |region| region.end_ns);
        writer.counter(value, end, submission.value);
        for (index, region) in submission.regions.iter().enumerate() {
            let mut debug_annotations = vec![
                number("runs", f64::from(region.runs)),
                annotation("clock", Value::Text(&submission.clock)),
                number("clock error, us", submission.clock_error_us),
            ];
            if region.runs > 1 {
                let each = (region.end_ns - region.begin_ns) as f64 / 1e3 / f64::from(region.runs);
                debug_annotations.push(number("us each", each));
            }
            let flow_ids = if index == 0 { flow() } else { Vec::new() };
            let title =
                if region.runs > 1 { format!("{} × {}", region.name, region.runs) } else { region.name.clone() };
            let extra = TraceEvent { debug_annotations, flow_ids, ..TraceEvent::default() };
            writer.slice(queue, 0, &title, (region.begin_ns, region.end_ns), extra);
            for kernel in &region.kernels {
                let extra = TraceEvent {
                    debug_annotations: vec![annotation("shader", Value::Text(&kernel.kernel))],
                    ..TraceEvent::default()
                };
                // Timestamps inside a region lie between those around it, except for rounding.
                let begin = kernel.begin_ns.clamp(region.begin_ns, region.end_ns);
                let span = (begin, kernel.end_ns.clamp(begin, region.end_ns));
                if span.0 < span.1 {
                    writer.slice(queue, 1, &kernel.label, span, extra);
                }
            }
        }
    }
}

fn copies(writer: &mut Writer, transfer: &proto::Transfer) {
    let mut debug_annotations = vec![
        annotation("bytes", Value::Number(transfer.bytes as f64)),
        annotation("copies", Value::Number(f64::from(transfer.copies))),
    ];
    if !transfer.waits.is_empty() {
        debug_annotations.push(annotation("waits for", Value::Text(&transfer.waits.join(", "))));
    }
    let extra = TraceEvent { debug_annotations, ..TraceEvent::default() };
    let enqueue = (transfer.enqueue_begin_ns, transfer.enqueue_end_ns);
    writer.slice(TRANSFER, 0, transfer.what.as_str(), enqueue, extra.clone());
    // Without timestamps it is only known that the transfer had ended when its end was seen.
    let timed = transfer.end_ns > 0;
    let end = if timed { transfer.end_ns } else { transfer.seen_ns };
    if timed {
        writer.slice(TRANSFER_QUEUE, 0, transfer.what.as_str(), (transfer.begin_ns, end), extra);
    } else {
        writer.instant(TRANSFER_QUEUE, &format!("{} over", transfer.what), end, extra);
    }
    writer.counter(TRANSFER_VALUE, end, transfer.value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> proto::ProfileResponse {
        let kernel = |label: &str, begin_ns, end_ns| proto::KernelRun {
            label: label.to_owned(),
            kernel: "skinny".to_owned(),
            begin_ns,
            end_ns,
        };
        let regions = vec![
            proto::RegionRun { name: "patch".into(), runs: 1, begin_ns: 1_000, end_ns: 1_100, kernels: Vec::new() },
            proto::RegionRun {
                name: "decode.8".into(),
                runs: 1,
                begin_ns: 1_100,
                end_ns: 1_900,
                kernels: vec![kernel("layers.0.qkv", 1_110, 1_500), kernel("layers.0.o", 1_500, 1_950)],
            },
            proto::RegionRun { name: "decode.8".into(), runs: 15, begin_ns: 1_900, end_ns: 9_000, kernels: Vec::new() },
        ];
        let submission = proto::Submission {
            enqueue_begin_ns: 900,
            enqueue_end_ns: 950,
            seen_ns: 9_100,
            value: 7,
            flush: "readback".into(),
            regions,
            ..Default::default()
        };
        let step = proto::Step {
            phase: "decode".into(),
            rows: 8,
            steps: 16,
            planned_ns: 850,
            taken_ns: 9_200,
            submissions: vec![submission],
            ..Default::default()
        };
        let transfer =
            proto::Transfer { what: "copy".into(), begin_ns: 10, end_ns: 20, value: 3, ..Default::default() };
        let worker = proto::load::Worker { begin_ns: 5, end_ns: 25, ..Default::default() };
        let load = proto::Load { begin_ns: 4, end_ns: 30, workers: vec![worker; 2], ..Default::default() };
        proto::ProfileResponse {
            steps: vec![step],
            transfers: vec![transfer],
            now_ns: 10_000,
            load: Some(load),
            ..Default::default()
        }
    }

    #[test]
    fn slices_nest_on_every_track_and_time_never_falls() {
        let trace = trace(&profile(), true);
        let decoded = Trace::decode(trace.encode_to_vec().as_slice()).unwrap();
        assert_eq!(decoded, trace);
        let mut open: std::collections::BTreeMap<u64, Vec<String>> = std::collections::BTreeMap::new();
        let (mut last, mut deepest) = (0, 0);
        for packet in &trace.packet {
            let Some(event) = &packet.track_event else { continue };
            assert!(packet.timestamp.unwrap() >= last);
            last = packet.timestamp.unwrap();
            let stack = open.entry(event.track_uuid).or_default();
            match event.kind {
                SLICE_BEGIN => stack.push(event.name.clone().unwrap()),
                SLICE_END => assert!(stack.pop().is_some(), "an end without a begin"),
                _ => {}
            }
            deepest = deepest.max(stack.len());
        }
        assert!(open.values().all(Vec::is_empty), "{open:?}");
        assert_eq!(deepest, 2, "kernels lie below their region");
        let tracks: BTreeSet<u64> =
            trace.packet.iter().filter_map(|p| p.track_descriptor.as_ref()).map(|track| track.uuid).collect();
        for packet in trace.packet.iter().filter_map(|packet| packet.track_event.as_ref()) {
            assert!(tracks.contains(&packet.track_uuid), "{packet:?}");
        }
        assert!(tracks.contains(&TRANSFER_QUEUE) && tracks.contains(&(LOADER + 1)));
        let without = super::trace(&profile(), false);
        let events = without.packet.iter().filter_map(|packet| packet.track_event.as_ref());
        let used: BTreeSet<u64> = events.map(|event| event.track_uuid).collect();
        assert!(!used.contains(&TRANSFER_QUEUE) && !used.contains(&LOADER), "the load was before the first step");
    }
}

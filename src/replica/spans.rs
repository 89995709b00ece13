//! The spans of one request: `queue`, `prefill` and `decode` under the request's own, and those of steps with what ran
//! on the device. None is made per token: of a long decode's steps ever fewer are shown.

use crate::engine::sequence::PhaseCost;
use crate::replica::observer::StepRecord;
use crate::telemetry::names;
use crate::telemetry::spans::{self, Past, SpanName};
use opentelemetry::{KeyValue, StringValue, Value};
use tracing::{Span, field::Empty, info_span};

/// The `queue` span under a request's.
pub fn queue(request: &Span) -> Span {
    info_span!(parent: request, names::SPAN_QUEUE, { names::SAMPLE } = Empty)
}

/// Says of a `queue`, `prefill` or `decode` span which sample of its request it belongs to.
pub fn sample(span: &Span, index: u32) {
    // Unsigned numbers would be exported as text.
    span.record(names::SAMPLE, i64::from(index));
}

macro_rules! phase_span {
    ($request:expr, $name:expr) => {
        info_span!(
            parent: $request,
            $name,
            { names::SAMPLE } = Empty,
            { names::STEPS } = Empty,
            { names::TOKENS } = Empty,
            { names::SUBMITS } = Empty,
            { names::DISPATCHES } = Empty,
            { names::BARRIERS } = Empty,
            { names::HOST_WAITS } = Empty,
            { names::ENQUEUE_US } = Empty,
            { names::SCHEDULE_US } = Empty,
            { names::DELIVER_US } = Empty,
            { names::GPU_US } = Empty,
            { names::FLUSHES_PHASE_BOUNDARY } = Empty,
            { names::FLUSHES_READBACK } = Empty,
            { names::FLUSHES_CROSS_QUEUE } = Empty,
            { names::PREEMPTIONS } = Empty,
        )
    };
}

/// The `prefill` span under a request's.
pub fn prefill(request: &Span) -> Span {
    phase_span!(request, names::SPAN_PREFILL)
}

/// The `decode` span under a request's.
pub fn decode(request: &Span) -> Span {
    phase_span!(request, names::SPAN_DECODE)
}

/// Says of a request's or a phase's span, once, how many faults its steps have met with, if any.
pub fn faults(span: &Span, faults: u32) {
    if faults > 0 {
        spans::set(span, names::OVERLAP_FAULTS, i64::from(faults));
    }
}

/// Writes what a phase cost to its span.
pub fn record(span: &Span, cost: &PhaseCost) {
    if span.is_disabled() {
        return;
    }
    span.record(names::STEPS, cost.steps);
    span.record(names::TOKENS, cost.tokens);
    span.record(names::SUBMITS, cost.sum.submits);
    span.record(names::DISPATCHES, cost.sum.dispatches);
    span.record(names::BARRIERS, cost.sum.barriers);
    span.record(names::HOST_WAITS, cost.sum.host_waits);
    span.record(names::ENQUEUE_US, cost.sum.enqueue_us);
    span.record(names::SCHEDULE_US, cost.sum.schedule_us);
    span.record(names::DELIVER_US, cost.sum.deliver_us);
    span.record(names::GPU_US, cost.sum.gpu_us);
    span.record(names::FLUSHES_PHASE_BOUNDARY, cost.sum.flushes.phase_boundary);
    span.record(names::FLUSHES_READBACK, cost.sum.flushes.readback);
    span.record(names::FLUSHES_CROSS_QUEUE, cost.sum.flushes.cross_queue);
    span.record(names::PREEMPTIONS, cost.preemptions);
}

/// Of a request's first steps so many are shown, of the following ones half as many for each that many again.
const SHOWN_STEPS: u32 = 16;
/// What is shown of each doubling after them.
const SHOWN_PER_DOUBLING: u32 = 8;
/// Links that a span keeps, as OpenTelemetry's default is.
const MOST_LINKS: usize = 128;

/// Whether a request's `index`th plan is shown as a span: the first ones all, then ever fewer, so that 32,000 tokens
/// make about a hundred.
pub fn shows_step(index: u32) -> bool {
    if index < SHOWN_STEPS {
        return true;
    }
    let every = (1u32 << index.ilog2()) / SHOWN_PER_DOUBLING;
    index.is_multiple_of(every)
}

/// A request that a plan was for, whose trace is exported.
#[derive(Debug)]
pub struct Traced<'a> {
    /// Its inference span.
    pub request: SpanName,
    /// Its `queue`, `prefill` or `decode` span.
    pub phase: &'a Span,
}

/// Each request once: samples share their request's span.
fn links(shown: &[Traced<'_>]) -> Vec<SpanName> {
    let mut links: Vec<SpanName> = Vec::new();
    for traced in shown {
        if links.len() < MOST_LINKS && !links.contains(&traced.request) {
            links.push(traced.request.clone());
        }
    }
    links
}

/// Exports a plan: one span, under the oldest of the requests that it is shown for and linked to all, and what ran on
/// the device below it. The other requests' phases are linked to it.
pub fn step(record: &StepRecord, replica: &str, shown: &[Traced<'_>]) {
    let Some(first) = shown.first() else { return };
    let reasons: Vec<StringValue> = record.submissions.iter().map(|s| StringValue::from(s.flush.name())).collect();
    let waits: Vec<StringValue> =
        record.submissions.iter().flat_map(|s| &s.waits).map(|wait| StringValue::from(wait.to_string())).collect();
    let mut attributes = vec![
        KeyValue::new(names::REPLICA, replica.to_owned()),
        KeyValue::new(names::STEP_NUMBER, record.number as i64),
        KeyValue::new(names::STEPS, i64::from(record.steps)),
        KeyValue::new(names::ROWS, i64::from(record.rows)),
        KeyValue::new(names::TOKENS, i64::from(record.tokens)),
        KeyValue::new(names::REQUESTS, record.requests.len() as i64),
        KeyValue::new(names::RUNNING, i64::from(record.running)),
        KeyValue::new(names::WAITING, i64::from(record.waiting)),
        KeyValue::new(names::PAGES_USED, i64::from(record.pages_used)),
        KeyValue::new(names::SUBMITS, record.cost.submits),
        KeyValue::new(names::DISPATCHES, record.cost.dispatches),
        KeyValue::new(names::BARRIERS, record.cost.barriers),
        KeyValue::new(names::HOST_WAITS, record.cost.host_waits),
        KeyValue::new(names::ENQUEUE_US, record.cost.enqueue_us),
        KeyValue::new(names::SCHEDULE_US, record.cost.schedule_us),
        KeyValue::new(names::DELIVER_US, record.cost.deliver_us),
        KeyValue::new(names::GPU_US, record.cost.gpu_us),
        KeyValue::new(names::FLUSH_REASON, Value::Array(reasons.into())),
    ];
    if record.faults > 0 {
        attributes.push(KeyValue::new(names::OVERLAP_FAULTS, i64::from(record.faults)));
    }
    if let Some(last) = record.submissions.last() {
        attributes.push(KeyValue::new(names::TIMELINE_VALUE, last.point.value as i64));
    }
    if !waits.is_empty() {
        attributes.push(KeyValue::new(names::TIMELINE_WAITS, Value::Array(waits.into())));
    }
    let past = Past {
        name: format!("{} {}", record.phase, names::SPAN_STEP).into(),
        begin: record.planned,
        end: record.taken,
        attributes,
        links: links(shown),
    };
    let Some(step) = spans::export(&first.request, past) else { return };
    for traced in &shown[1..] {
        spans::link(traced.phase, &step);
    }
    for submission in &record.submissions {
        for region in &submission.regions {
            let mut attributes = vec![
                KeyValue::new(names::QUEUE, submission.point.role.to_string()),
                KeyValue::new(names::REGION_RUNS, i64::from(region.runs)),
            ];
            if let Some(clock) = submission.clock {
                attributes.push(KeyValue::new(names::GPU_CLOCK, clock.name()));
                attributes.push(KeyValue::new(names::GPU_CLOCK_ERROR_US, clock.error().as_secs_f64() * 1e6));
            }
            let (name, begin, end) = (region.name.to_string().into(), region.begin, region.end);
            spans::export(&step, Past { name, begin, end, attributes, links: Vec::new() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_decode_ever_fewer_steps_are_shown() {
        let shown = |steps: u32| (0..steps).filter(|step| shows_step(*step)).count();
        assert_eq!(shown(16), 16);
        assert_eq!(shown(32), 24);
        // 32,000 tokens in plans of 16 steps, and in plans of one.
        assert_eq!(shown(2_000), 16 + 7 * 8);
        assert!(shown(32_000) < 110, "{}", shown(32_000));
        assert!((16..10_000).step_by(500).all(|from| (from..2 * from).any(shows_step)), "none is long without one");
    }
}

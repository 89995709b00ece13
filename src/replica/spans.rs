//! The spans of a request: `queue`, `prefill` and `decode` under the request's own span, and spans of plans with what
//! ran on the device. There is no span per token: the longer a decode phase, the fewer of its plans get a span.
//! Not here: the names of spans and attributes, and their export (`telemetry`).

use crate::engine::sequence::PhaseCost;
use crate::replica::record::StepRecord;
use crate::telemetry::names;
use crate::telemetry::spans::{self, Past, SpanName};
use opentelemetry::{KeyValue, StringValue, Value};
use tracing::{Span, field::Empty, info_span};

/// Creates the `queue` span under a request's span.
pub fn queue(request: &Span) -> Span {
    info_span!(parent: request, names::SPAN_QUEUE, { names::SAMPLE } = Empty)
}

/// Sets the sample's index on a `queue`, `prefill` or `decode` span.
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

/// Creates the `prefill` span under a request's span.
pub fn prefill(request: &Span) -> Span {
    phase_span!(request, names::SPAN_PREFILL)
}

/// Creates the `decode` span under a request's span.
pub fn decode(request: &Span) -> Span {
    phase_span!(request, names::SPAN_DECODE)
}

/// Sets the number of faults on a request's or a phase's span, if there were any. To be called once per span.
pub fn faults(span: &Span, faults: u32) {
    if faults > 0 {
        spans::set(span, names::OVERLAP_FAULTS, i64::from(faults));
    }
}

/// Sets the cost of a phase on its span.
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

/// The number of plans of a request, from its first on, that all get spans. Of the following plans,
/// [`SHOWN_PER_DOUBLING`] get a span each time that the number of plans doubles.
const SHOWN_STEPS: u32 = 16;
/// The number of plans that get a span in each doubling after the first [`SHOWN_STEPS`].
const SHOWN_PER_DOUBLING: u32 = 8;
/// The maximum number of links of a span, which is OpenTelemetry's default.
const MOST_LINKS: usize = 128;

/// Whether a request's plan number `index` gets a span: the first ones all do, later ones less and less often, so that
/// 32,000 plans make about a hundred spans.
pub fn shows_step(index: u32) -> bool {
    if index < SHOWN_STEPS {
        return true;
    }
    let every = (1u32 << index.ilog2()) / SHOWN_PER_DOUBLING;
    index.is_multiple_of(every)
}

/// A request with a row in a plan, whose trace is exported.
#[derive(Debug)]
pub struct Traced<'a> {
    /// The request's inference span.
    pub request: SpanName,
    /// The request's `queue`, `prefill` or `decode` span.
    pub phase: &'a Span,
}

/// Returns the span of each request once: samples share their request's span.
fn links(shown: &[Traced<'_>]) -> Vec<SpanName> {
    let mut links: Vec<SpanName> = Vec::new();
    for traced in shown {
        if links.len() < MOST_LINKS && !links.contains(&traced.request) {
            links.push(traced.request.clone());
        }
    }
    links
}

/// Exports a plan as one span, with a child span for each region that ran on the device. Its parent is the first
/// request of `shown`, and it links to all of them. The phase spans of the other requests link to it.
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
                KeyValue::new(names::DEVICE_NAME, submission.device.name.clone()),
                KeyValue::new(names::DEVICE_UUID, submission.device.uuid.clone()),
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
        // 32,000 tokens in plans of 16 steps, and in plans of one step.
        assert_eq!(shown(2_000), 16 + 7 * 8);
        assert!(shown(32_000) < 110, "{}", shown(32_000));
        assert!((16..10_000).step_by(500).all(|from| (from..2 * from).any(shows_step)), "none is long without one");
    }
}

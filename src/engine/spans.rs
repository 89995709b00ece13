//! The spans of one request: `queue`, `prefill` and `decode` under the request's own. None is
//! made per token.

use super::sequence::PhaseCost;
use crate::telemetry::names;
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

//! Names of the engine's spans and their attributes, and the spans of one request: `queue`,
//! `prefill` and `decode` under the request's own. None is made per token.

use super::sequence::PhaseCost;
use tracing::{Span, field::Empty, info_span};

/// Submission to start.
pub const QUEUE: &str = "queue";
/// Start to first token.
pub const PREFILL: &str = "prefill";
/// First token to last.
pub const DECODE: &str = "decode";

/// Steps (chunks of the prompt, or tokens after the first).
pub const STEPS: &str = "ostinato.steps";
/// Tokens taken in (prefill) or handed out (decode).
pub const TOKENS: &str = "ostinato.tokens";
/// Queue submissions, in all.
pub const SUBMITS: &str = "ostinato.submits";
/// Dispatches, in all.
pub const DISPATCHES: &str = "ostinato.dispatches";
/// Pipeline barriers, in all.
pub const BARRIERS: &str = "ostinato.barriers";
/// Blocking waits of the host, in all.
pub const HOST_WAITS: &str = "ostinato.host_waits";
/// Host time spent on enqueueing, microseconds in all.
pub const ENQUEUE_US: &str = "ostinato.enqueue_us";
/// Device time, microseconds in all.
pub const GPU_US: &str = "ostinato.gpu_us";
/// Flushes at a phase boundary, in all.
pub const FLUSHES_PHASE_BOUNDARY: &str = "ostinato.flushes.phase_boundary";
/// Flushes for a readback, in all.
pub const FLUSHES_READBACK: &str = "ostinato.flushes.readback";
/// Flushes for a point of another queue, in all.
pub const FLUSHES_CROSS_QUEUE: &str = "ostinato.flushes.cross_queue";
/// How often the sequence lost its pages and was recomputed.
pub const PREEMPTIONS: &str = "ostinato.preemptions";

/// The `queue` span under a request's.
pub fn queue(request: &Span) -> Span {
    info_span!(parent: request, QUEUE)
}

macro_rules! phase_span {
    ($request:expr, $name:expr) => {
        info_span!(
            parent: $request,
            $name,
            { STEPS } = Empty,
            { TOKENS } = Empty,
            { SUBMITS } = Empty,
            { DISPATCHES } = Empty,
            { BARRIERS } = Empty,
            { HOST_WAITS } = Empty,
            { ENQUEUE_US } = Empty,
            { GPU_US } = Empty,
            { FLUSHES_PHASE_BOUNDARY } = Empty,
            { FLUSHES_READBACK } = Empty,
            { FLUSHES_CROSS_QUEUE } = Empty,
            { PREEMPTIONS } = Empty,
        )
    };
}

/// The `prefill` span under a request's.
pub fn prefill(request: &Span) -> Span {
    phase_span!(request, PREFILL)
}

/// The `decode` span under a request's.
pub fn decode(request: &Span) -> Span {
    phase_span!(request, DECODE)
}

/// Writes what a phase cost to its span.
pub fn record(span: &Span, cost: &PhaseCost) {
    if span.is_disabled() {
        return;
    }
    span.record(STEPS, cost.steps);
    span.record(TOKENS, cost.tokens);
    span.record(SUBMITS, cost.sum.submits);
    span.record(DISPATCHES, cost.sum.dispatches);
    span.record(BARRIERS, cost.sum.barriers);
    span.record(HOST_WAITS, cost.sum.host_waits);
    span.record(ENQUEUE_US, cost.sum.enqueue_us);
    span.record(GPU_US, cost.sum.gpu_us);
    span.record(FLUSHES_PHASE_BOUNDARY, cost.sum.flushes.phase_boundary);
    span.record(FLUSHES_READBACK, cost.sum.flushes.readback);
    span.record(FLUSHES_CROSS_QUEUE, cost.sum.flushes.cross_queue);
    span.record(PREEMPTIONS, cost.preemptions);
}

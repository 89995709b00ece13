//! The trace spans of a replica's load.

use crate::actors::loader::LoadReport;
use crate::telemetry::clock::Moment;
use crate::telemetry::names;
use crate::telemetry::spans::{self, Past, SpanName};
use opentelemetry::KeyValue;
use std::time::Duration;
use tracing::{Span, info_span};

/// Starts the span of a replica's load onto its device; the span ends when it is dropped.
pub(super) fn load(replica: &str) -> Span {
    let span = info_span!(parent: None, names::SPAN_LOAD, otel.name = format!("{} {replica}", names::SPAN_LOAD));
    spans::set(&span, names::REPLICA, replica.to_owned());
    span
}

/// Exports the child spans of a finished load: building pipelines, loading the weights with each packing thread below
/// it, and the copies on the transfer queue.
pub(super) fn loaded(load: &Span, report: &LoadReport, (pipelines, begin, end): (usize, Moment, Moment)) {
    let Some(load) = SpanName::of(load) else { return };
    let us = |name, time: Duration| KeyValue::new(name, time.as_secs_f64() * 1e6);
    let past = |name: &'static str, (begin, end), attributes| Past {
        name: name.into(),
        begin,
        end,
        attributes,
        links: Vec::new(),
    };
    let attributes = vec![KeyValue::new(names::LOAD_PIPELINES, pipelines as i64)];
    spans::export(&load, past(names::SPAN_LOAD_PIPELINES, (begin, end), attributes));
    let attributes = vec![
        KeyValue::new(names::LOAD_BYTES_READ, report.bytes_read as i64),
        KeyValue::new(names::LOAD_BYTES_WRITTEN, report.bytes_written as i64),
        us(names::LOAD_READ_US, report.read),
        us(names::LOAD_PACK_US, report.pack),
        us(names::LOAD_STAGING_WAIT_US, report.staging_wait),
    ];
    let weights = past(names::SPAN_LOAD_WEIGHTS, (report.begin, report.end), attributes);
    let Some(weights) = spans::export(&load, weights) else { return };
    for worker in &report.workers {
        let attributes = vec![
            us(names::LOAD_READ_US, worker.read),
            us(names::LOAD_PACK_US, worker.pack),
            us(names::LOAD_STAGING_WAIT_US, worker.staging_wait),
        ];
        spans::export(&weights, past(names::SPAN_LOAD_WORKER, (worker.begin, worker.end), attributes));
    }
    let first = report.workers.iter().map(|worker| worker.begin).min().unwrap_or(report.begin);
    let attributes = vec![
        KeyValue::new(names::QUEUE, "transfer"),
        KeyValue::new(names::LOAD_BYTES_WRITTEN, report.bytes_written as i64),
        KeyValue::new(names::TRANSFER_SUBMITS, report.submits as i64),
    ];
    spans::export(&weights, past(names::SPAN_LOAD_COPY, (first, report.end), attributes));
}

/// Exports the span of recording and testing regions, from `begin` until now.
pub(super) fn recorded(load: &Span, begin: Moment) {
    if let Some(load) = SpanName::of(load) {
        let (name, end) = (names::SPAN_LOAD_REGIONS.into(), Moment::now());
        spans::export(&load, Past { name, begin, end, attributes: Vec::new(), links: Vec::new() });
    }
}

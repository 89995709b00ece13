//! What is done to a span beyond `tracing`: W3C trace context in and out of string headers,
//! attributes, failure; spans that are made of records. Deliberately absent: gRPC; whoever has metadata hands in a way to
//! read it.

use super::clock::Moment;
use super::names;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::{Link, Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _};
use opentelemetry::{Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracer;
use std::borrow::Cow;
use std::sync::OnceLock;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Makes `span` a child of the trace that the headers name, if they name one. To be called
/// before the span is entered or has children.
pub fn set_remote_parent<'a>(span: &Span, header: impl Fn(&str) -> Option<&'a str>) {
    struct Headers<'h, 'a>(&'h (dyn Fn(&str) -> Option<&'a str> + 'h));
    impl Extractor for Headers<'_, '_> {
        fn get(&self, key: &str) -> Option<&str> {
            self.0(key)
        }

        fn keys(&self) -> Vec<&str> {
            // The W3C propagator asks by name only.
            Vec::new()
        }
    }
    if span.is_disabled() {
        return;
    }
    let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(&header));
    if parent.span().span_context().is_valid() {
        // Fails only where no span is exported.
        let _ = span.set_parent(parent);
    }
}

/// Hands the headers that name `span` to `set`; none where no span is exported.
pub fn inject(span: &Span, set: impl FnMut(&str, String)) {
    struct Headers<F>(F);
    impl<F: FnMut(&str, String)> Injector for Headers<F> {
        fn set(&mut self, key: &str, value: String) {
            self.0(key, value);
        }
    }
    TraceContextPropagator::new().inject_context(&span.context(), &mut Headers(set));
}

/// Sets an attribute whose name is one of `names`.
pub fn set(span: &Span, name: &'static str, value: impl Into<opentelemetry::Value>) {
    span.set_attribute(name, value);
}

/// Sets an attribute that is a list of words.
pub fn set_list(span: &Span, name: &'static str, words: &[&'static str]) {
    let words: Vec<StringValue> = words.iter().map(|word| StringValue::from(*word)).collect();
    span.set_attribute(name, Value::Array(words.into()));
}

/// Marks the span as failed; `kind` is its `error.type`.
pub fn fail(span: &Span, kind: &'static str, message: &str) {
    span.set_attribute(names::ERROR_TYPE, kind);
    span.set_status(Status::error(message.to_owned()));
}

/// Where spans with times of their own go: set once, with the exporter.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Spans that are made of records go to the same exporter as those of `tracing`.
pub(super) fn export_with(tracer: SdkTracer) {
    // A second exporter is refused before this is reached.
    let _ = TRACER.set(tracer);
}

/// Whether spans of records are exported.
pub fn exports() -> bool {
    TRACER.get().is_some()
}

/// Names a span that is exported: what others are made under, or linked to.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanName(SpanContext);

impl SpanName {
    /// Of a span of `tracing`; `None` where it is not exported, because nothing is or its trace was not chosen.
    pub fn of(span: &Span) -> Option<SpanName> {
        TRACER.get()?;
        let context = span.context().span().span_context().clone();
        (context.is_valid() && context.is_sampled()).then_some(SpanName(context))
    }
}

/// A span of which everything is known: it is made when it has ended.
#[derive(Debug)]
pub struct Past {
    /// As shown.
    pub name: Cow<'static, str>,
    /// Its begin.
    pub begin: Moment,
    /// Its end.
    pub end: Moment,
    /// Names of `names`, and values.
    pub attributes: Vec<KeyValue>,
    /// Other spans that it was for.
    pub links: Vec<SpanName>,
}

/// Exports a span under another; gives its name. Costs a few microseconds and never waits: what the exporter's queue
/// has no room for is dropped.
pub fn export(parent: &SpanName, past: Past) -> Option<SpanName> {
    let tracer = TRACER.get()?;
    let links = past.links.into_iter().map(|link| Link::with_context(link.0)).collect();
    let builder = SpanBuilder::from_name(past.name)
        .with_kind(SpanKind::Internal)
        .with_start_time(past.begin.wall())
        .with_attributes(past.attributes)
        .with_links(links);
    let under = Context::new().with_remote_span_context(parent.0.clone());
    let mut span = tracer.build_with_context(builder, &under);
    let name = SpanName(span.span_context().clone());
    span.end_with_timestamp(past.end.wall());
    Some(name)
}

/// Links a span that goes on to one that has ended.
pub fn link(span: &Span, to: &SpanName) {
    span.add_link(to.0.clone());
}

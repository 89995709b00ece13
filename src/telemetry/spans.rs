//! Operations on spans that `tracing` does not offer: W3C trace context from and to string headers, attributes,
//! failure, and spans created afterwards from records. Not here: gRPC; callers pass a function that reads or writes a
//! header.

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

/// Makes `span` a child of the trace named in the headers, if they name one. Must be called before the span is entered
/// or has children.
pub fn set_remote_parent<'a>(span: &Span, header: impl Fn(&str) -> Option<&'a str>) {
    struct Headers<'h, 'a>(&'h (dyn Fn(&str) -> Option<&'a str> + 'h));
    impl Extractor for Headers<'_, '_> {
        fn get(&self, key: &str) -> Option<&str> {
            self.0(key)
        }

        fn keys(&self) -> Vec<&str> {
            // The W3C propagator only gets headers by name.
            Vec::new()
        }
    }
    if span.is_disabled() {
        return;
    }
    let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(&header));
    if parent.span().span_context().is_valid() {
        // Fails only if spans are not exported.
        let _ = span.set_parent(parent);
    }
}

/// Calls `set` with each header that identifies `span`; with none if spans are not exported.
pub fn inject(span: &Span, set: impl FnMut(&str, String)) {
    struct Headers<F>(F);
    impl<F: FnMut(&str, String)> Injector for Headers<F> {
        fn set(&mut self, key: &str, value: String) {
            self.0(key, value);
        }
    }
    TraceContextPropagator::new().inject_context(&span.context(), &mut Headers(set));
}

/// Returns the id of the span's trace in hexadecimal; `None` if spans are not exported.
pub fn trace_id(span: &Span) -> Option<String> {
    let context = span.context().span().span_context().clone();
    context.is_valid().then(|| context.trace_id().to_string())
}

/// Sets an attribute. `name` is a constant of `names`.
pub fn set(span: &Span, name: &'static str, value: impl Into<opentelemetry::Value>) {
    span.set_attribute(name, value);
}

/// Sets an attribute to a list of strings.
pub fn set_list(span: &Span, name: &'static str, words: &[&'static str]) {
    let words: Vec<StringValue> = words.iter().map(|word| StringValue::from(*word)).collect();
    span.set_attribute(name, Value::Array(words.into()));
}

/// Marks the span as failed; `kind` becomes its `error.type`.
pub fn fail(span: &Span, kind: &'static str, message: &str) {
    span.set_attribute(names::ERROR_TYPE, kind);
    span.set_status(Status::error(message.to_owned()));
}

/// The tracer for spans with explicit times; set once, together with the exporter.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Makes spans created from records go to the same exporter as those of `tracing`.
pub(super) fn export_with(tracer: SdkTracer) {
    // `init` fails before this line if it is called a second time.
    let _ = TRACER.set(tracer);
}

/// Whether spans created from records are exported.
pub fn exports() -> bool {
    TRACER.get().is_some()
}

/// Identifies an exported span, as the parent or link target of other spans.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanName(SpanContext);

impl SpanName {
    /// Identifies a span of `tracing`; `None` if it is not exported, because nothing is or its trace is not sampled.
    pub fn of(span: &Span) -> Option<SpanName> {
        TRACER.get()?;
        let context = span.context().span().span_context().clone();
        (context.is_valid() && context.is_sampled()).then_some(SpanName(context))
    }
}

/// A span that has already ended. It is created from a record with explicit times.
#[derive(Debug)]
pub struct Past {
    /// The displayed name.
    pub name: Cow<'static, str>,
    /// When it began.
    pub begin: Moment,
    /// When it ended.
    pub end: Moment,
    /// Attributes, whose names are constants of `names`.
    pub attributes: Vec<KeyValue>,
    /// Other spans that this one is linked to.
    pub links: Vec<SpanName>,
}

/// Exports a span as a child of `parent` and returns its identity; `None` if nothing is exported. Takes a few
/// microseconds and never blocks: if the exporter's queue is full, the span is dropped.
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

/// Links a running span to one that has ended.
pub fn link(span: &Span, to: &SpanName) {
    span.add_link(to.0.clone());
}

//! What is done to a span beyond `tracing`: W3C trace context in and out of string headers,
//! attributes, failure. Deliberately absent: gRPC; whoever has metadata hands in a way to
//! read it.

use super::names;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::{Status, TraceContextExt};
use opentelemetry::{Context, StringValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
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

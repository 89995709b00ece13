//! An OTLP trace receiver inside the test process, and helpers for checking the spans that it received.

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use std::sync::{Arc, Mutex};
use tonic::{Request, Response, Status};

#[derive(Clone, Debug, Default)]
pub struct Collector {
    pub spans: Arc<Mutex<Vec<Span>>>,
    /// The attributes of each resource that sent spans.
    pub resources: Arc<Mutex<Vec<Vec<KeyValue>>>>,
    /// The metadata of each export.
    pub metadata: Arc<Mutex<Vec<tonic::metadata::MetadataMap>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.metadata.lock().unwrap().push(request.metadata().clone());
        for resource in request.into_inner().resource_spans {
            self.resources.lock().unwrap().push(resource.resource.unwrap().attributes);
            for scope in resource.scope_spans {
                self.spans.lock().unwrap().extend(scope.spans);
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

pub fn find<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref()?.value.as_ref()
}

#[track_caller]
pub fn text(attributes: &[KeyValue], key: &str) -> String {
    match find(attributes, key) {
        Some(Value::StringValue(text)) => text.clone(),
        other => panic!("{key} is {other:?} in {attributes:#?}"),
    }
}

#[track_caller]
pub fn int(attributes: &[KeyValue], key: &str) -> i64 {
    match find(attributes, key) {
        Some(Value::IntValue(number)) => *number,
        other => panic!("{key} is {other:?} in {attributes:#?}"),
    }
}

#[track_caller]
pub fn double(attributes: &[KeyValue], key: &str) -> f64 {
    match find(attributes, key) {
        Some(Value::DoubleValue(number)) => *number,
        other => panic!("{key} is {other:?} in {attributes:#?}"),
    }
}

pub fn words(attributes: &[KeyValue], key: &str) -> Vec<String> {
    let Some(Value::ArrayValue(array)) = find(attributes, key) else { panic!("no list {key}") };
    let word = |value: &AnyValue| match &value.value {
        Some(Value::StringValue(word)) => word.clone(),
        other => panic!("{other:?}"),
    };
    array.values.iter().map(word).collect()
}

#[track_caller]
pub fn one<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let found: Vec<&Span> = spans.iter().filter(|span| span.name == name).collect();
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(found.len(), 1, "{name} in {names:?}");
    found[0]
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns whether a span is that of an engine step or of a region, which is the child of a step.
pub fn is_step(span: &Span) -> bool {
    span.name.ends_with(" step") || find(&span.attributes, "ostinato.region.runs").is_some()
}

pub fn without_steps(spans: Vec<Span>) -> Vec<Span> {
    spans.into_iter().filter(|span| !is_step(span)).collect()
}

/// Checks that every step lies within its request's span and has at least one region as a child, which lies within the
/// step up to the error of the GPU clock.
pub fn check_steps(trace: &[Span]) {
    let inference = trace.iter().find(|span| span.name.starts_with("text_completion")).unwrap();
    for name in ["prefill step", "decode step"] {
        assert!(trace.iter().any(|span| span.name == name), "no {name} in {trace:#?}");
    }
    for step in trace.iter().filter(|span| span.name.ends_with(" step")) {
        assert_eq!(step.parent_span_id, inference.span_id);
        assert!(step.start_time_unix_nano >= inference.start_time_unix_nano, "{step:#?}");
        assert!(step.end_time_unix_nano <= inference.end_time_unix_nano, "{step:#?}");
        assert!(int(&step.attributes, "ostinato.steps") > 0 && int(&step.attributes, "ostinato.rows") > 0);
        assert!(!words(&step.attributes, "ostinato.flush.reason").is_empty());
        assert_eq!(step.links.len(), 1, "one request: {step:#?}");
        let regions: Vec<&Span> = trace.iter().filter(|span| span.parent_span_id == step.span_id).collect();
        assert!(!regions.is_empty(), "{step:#?}");
        for region in regions {
            let slack = (double(&region.attributes, "ostinato.gpu.clock.error_us") * 1e3) as u64 + 1;
            assert!(region.start_time_unix_nano + slack >= step.start_time_unix_nano, "{region:#?} {step:#?}");
            assert!(region.end_time_unix_nano <= step.end_time_unix_nano + slack, "{region:#?} {step:#?}");
            assert!(region.end_time_unix_nano >= region.start_time_unix_nano);
            assert_eq!(text(&region.attributes, "ostinato.queue"), "compute");
        }
    }
}

impl Collector {
    /// Starts a collector on a free loopback port and returns it with its URL.
    pub async fn start() -> (Collector, String) {
        Collector::start_at("127.0.0.1:0").await
    }

    /// Starts a collector on `address` and returns it with its URL.
    pub async fn start_at(address: &str) -> (Collector, String) {
        let collector = Collector::default();
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let receiver = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(collector.clone()))
            .serve_with_incoming(tonic::transport::server::TcpIncoming::from(listener));
        tokio::spawn(receiver);
        (collector, endpoint)
    }
}

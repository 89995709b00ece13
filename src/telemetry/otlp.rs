//! Exports spans in batches to a collector, OTLP over gRPC, from its own thread and runtime. If the collector is down,
//! only spans are lost: the queue is bounded, and spans that do not fit are dropped. Not here: the contents of spans.

use super::{Settings, TelemetryError, names};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, SpanData, SpanExporter,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::Subscriber;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, layer};

/// Default timeout of one export; a slower collector is treated as down.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for exporting all remaining spans when the program ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest time that a span waits for its batch.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// Capacity of the span queue: several times the number of spans that 128 streams, ending at once with five spans each,
/// produce in about a second. It takes 4 MB at most.
const QUEUE: usize = 4096;

/// Owns the batch thread and the runtime of its connection.
#[derive(Debug)]
pub struct Exporter {
    /// The collector's address.
    pub(super) endpoint: String,
    resource: Resource,
    provider: SdkTracerProvider,
    /// Dropped after the provider has shut down.
    runtime: Option<tokio::runtime::Runtime>,
}

impl Exporter {
    /// Creates the exporter. It does not connect yet, because the collector may start later.
    pub(super) fn new(endpoint: &str, settings: &Settings) -> Result<Exporter, TelemetryError> {
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| TelemetryError::Exporter {
            endpoint: endpoint.to_owned(),
            source,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("ostinato-otlp")
            .enable_all()
            .build()
            .map_err(|error| wrong(error.into()))?;
        let timeout = settings.export_timeout.unwrap_or(EXPORT_TIMEOUT);
        let inner = {
            let _context = runtime.enter();
            opentelemetry_otlp::SpanExporter::builder()
                .with_tonic()
                .with_endpoint(endpoint)
                .with_timeout(timeout)
                .build()
                .map_err(|error| wrong(error.into()))?
        };
        let exporter = OnRuntime {
            inner: Arc::new(inner),
            runtime: runtime.handle().clone(),
            endpoint: endpoint.to_owned(),
            timeout,
            failing: AtomicBool::new(false),
        };
        let batches = BatchSpanProcessor::builder(exporter)
            .with_batch_config(
                BatchConfigBuilder::default().with_max_queue_size(QUEUE).with_scheduled_delay(BATCH_DELAY).build(),
            )
            .build();
        let instance = instance_id().map_err(|error| wrong(error.into()))?;
        let own = [
            KeyValue::new(names::SERVICE_NAME, names::SERVICE),
            KeyValue::new(names::SERVICE_VERSION, env!("CARGO_PKG_VERSION")),
            KeyValue::new(names::SERVICE_INSTANCE_ID, instance),
        ];
        let given = settings.resource.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone()));
        let resource = Resource::builder().with_attributes(own.into_iter().chain(given)).build();
        let ratio = Sampler::TraceIdRatioBased(settings.sample_ratio);
        let sampler = if settings.parent_based { Sampler::ParentBased(Box::new(ratio)) } else { ratio };
        let provider = SdkTracerProvider::builder()
            .with_span_processor(batches)
            .with_sampler(sampler)
            .with_resource(resource.clone())
            .build();
        Ok(Exporter { endpoint: endpoint.to_owned(), resource, provider, runtime: Some(runtime) })
    }

    /// Returns an attribute of the resource, or an empty text.
    pub(super) fn resource(&self, key: &'static str) -> String {
        self.resource.get(&key.into()).map(|value| value.to_string()).unwrap_or_default()
    }

    /// A `tracing` layer that exports this program's spans and no others. It does not export log events, which might
    /// contain users' text.
    pub(super) fn layer<S>(&self) -> impl layer::Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer(names::SERVICE))
            .with_threads(false)
            .with_location(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(filter_fn(|metadata| metadata.is_span() && metadata.target().starts_with(names::SERVICE)))
    }

    /// The tracer for spans created from records.
    pub(super) fn tracer(&self) -> SdkTracer {
        self.provider.tracer(names::SERVICE)
    }

    pub(super) fn flush(&self) {
        // `OnRuntime` logs a failure.
        let _ = self.provider.force_flush();
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT);
        if let Some(runtime) = self.runtime.take() {
            // Does not wait for its tasks: dropping a runtime blocks, which is not allowed inside another runtime.
            runtime.shutdown_background();
        }
    }
}

/// Returns a random UUID (version 4), as the conventions recommend for a process that has no other name.
fn instance_id() -> rustix::io::Result<String> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

/// Runs each export on the runtime that owns the connection, because the batch thread has no runtime. Logs once when
/// the collector becomes unreachable and once when it is back.
#[derive(Debug)]
struct OnRuntime {
    inner: Arc<opentelemetry_otlp::SpanExporter>,
    runtime: tokio::runtime::Handle,
    endpoint: String,
    timeout: Duration,
    failing: AtomicBool,
}

impl SpanExporter for OnRuntime {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let inner = Arc::clone(&self.inner);
        let (spans, timeout) = (batch.len(), self.timeout);
        let exported = self
            .runtime
            .spawn(async move {
                tokio::time::timeout(timeout, inner.export(batch)).await.unwrap_or(Err(OTelSdkError::Timeout(timeout)))
            })
            .await
            .unwrap_or_else(|error| Err(OTelSdkError::InternalFailure(error.to_string())));
        let failing = exported.is_err();
        if self.failing.swap(failing, Ordering::Relaxed) != failing {
            match &exported {
                Ok(()) => tracing::info!(endpoint = self.endpoint, "spans are exported again"),
                Err(error) => tracing::warn!(
                    endpoint = self.endpoint,
                    spans,
                    %error,
                    "spans are dropped until the collector answers"
                ),
            }
        }
        exported
    }

    fn set_resource(&mut self, resource: &Resource) {
        // Nothing else holds a reference yet: exports begin after the provider was built.
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.set_resource(resource);
        }
    }
}

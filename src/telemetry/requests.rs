//! Ended requests: a list of the last ones, for the admin page, and their metrics. Not here: running requests, which
//! the engine owns.

use super::clock::Moment;
use super::names;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The number of ended requests that are kept.
pub const KEPT: usize = 512;

/// One ended request with all its samples.
#[derive(Clone, Debug)]
pub struct EndedRequest {
    /// When it ended.
    pub at: Moment,
    /// The request's id.
    pub id: String,
    /// The id of its trace, 32 hexadecimal digits; `None` if spans are not exported.
    pub trace: Option<String>,
    /// Name of the served model.
    pub model: String,
    /// The replica, `MODEL/INDEX`.
    pub replica: String,
    /// `chat`, `text_completion`, `embeddings` or `rerank`.
    pub operation: &'static str,
    /// How its first sample ended: `stop`, `length`, `aborted`, `deadline_exceeded` or `error`.
    pub reason: &'static str,
    /// The `error.type` of a failed call.
    pub error: Option<&'static str>,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// The number of prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Output tokens of all samples.
    pub output_tokens: u32,
    /// Time from submission to start.
    pub queue: Duration,
    /// Time from submission to the first token; `None` if there was no token.
    pub first_token: Option<Duration>,
    /// Time from the first token to the last, divided by the number of tokens after the first; `None` with fewer than
    /// two tokens.
    pub per_token: Option<Duration>,
    /// Time from submission to end.
    pub whole: Duration,
}

/// Names and values of a series' labels, always in the same order.
pub type Labels = Vec<(&'static str, String)>;

/// Histogram bounds of the request duration, seconds: those of OpenTelemetry's GenAI conventions.
const DURATION: [f64; 14] = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
/// Histogram bounds of the time to the first token and of the time in the queue, seconds: those of the conventions.
const FIRST_TOKEN: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// Histogram bounds of the time per output token, seconds: those of the conventions, and four smaller ones for small
/// models.
const PER_TOKEN: [f64; 17] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

/// The possible values of [`EndedRequest::reason`].
pub const REASONS: [&str; 5] = ["stop", "length", "aborted", "deadline_exceeded", "error"];

type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

/// Counters and histograms of ended and refused requests. The number of series is bounded: their labels are models,
/// replicas, operations, reasons and codes, but never ids or clients.
#[derive(Debug)]
struct Metrics {
    duration: Histograms,
    first_token: Histograms,
    per_token: Histograms,
    queue: Histograms,
    requests: Family<Labels, Counter>,
    refused: Family<Labels, Counter>,
    input_tokens: Family<Labels, Counter>,
    output_tokens: Family<Labels, Counter>,
    /// The label sets in use, by model, so that a model's series can be removed with it.
    series: Mutex<BTreeMap<String, BTreeSet<Labels>>>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            duration: Family::new_with_constructor(|| Histogram::new(DURATION)),
            first_token: Family::new_with_constructor(|| Histogram::new(FIRST_TOKEN)),
            per_token: Family::new_with_constructor(|| Histogram::new(PER_TOKEN)),
            queue: Family::new_with_constructor(|| Histogram::new(FIRST_TOKEN)),
            requests: Family::default(),
            refused: Family::default(),
            input_tokens: Family::default(),
            output_tokens: Family::default(),
            series: Mutex::default(),
        }
    }
}

impl Metrics {
    fn series(&self) -> MutexGuard<'_, BTreeMap<String, BTreeSet<Labels>>> {
        // Every update of the map is complete, so a poisoned lock is harmless.
        self.series.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers label sets as belonging to a model.
    fn begin(&self, model: &str, labels: impl IntoIterator<Item = Labels>) {
        let mut series = self.series();
        match series.get_mut(model) {
            Some(known) => known.extend(labels),
            None => _ = series.insert(model.to_owned(), labels.into_iter().collect()),
        }
    }

    /// Removes all series of models for which `keeps` is false.
    fn keep(&self, keeps: &dyn Fn(&str) -> bool) {
        self.series().retain(|model, all| {
            let kept = keeps(model);
            for labels in all.iter().filter(|_| !kept) {
                for family in [&self.duration, &self.first_token, &self.per_token, &self.queue] {
                    family.remove(labels);
                }
                for family in [&self.requests, &self.input_tokens, &self.output_tokens] {
                    family.remove(labels);
                }
            }
            kept
        });
    }

    fn note(&self, ended: &EndedRequest) {
        let conventional = conventional(ended);
        let by_model = vec![(names::LABEL_MODEL, ended.model.clone())];
        let by_reason = by_reason(&ended.model, &ended.replica, ended.reason);
        let replica = replica(&ended.model, &ended.replica);
        self.begin(&ended.model, [&conventional, &by_model, &by_reason, &replica].map(Clone::clone));
        let observe = |of: &Histograms, labels: &Labels, time: Duration| {
            of.get_or_create(labels).observe(time.as_secs_f64());
        };
        observe(&self.duration, &conventional, ended.whole);
        if let Some(time) = ended.first_token {
            observe(&self.first_token, &conventional, time);
        }
        if let Some(time) = ended.per_token {
            observe(&self.per_token, &conventional, time);
        }
        // It is unknown how long a client waited that left before the first token.
        if ended.first_token.is_some() || !ended.queue.is_zero() {
            observe(&self.queue, &by_model, ended.queue);
        }
        self.requests.get_or_create(&by_reason).inc();
        self.input_tokens.get_or_create(&replica).inc_by(ended.input_tokens.into());
        self.output_tokens.get_or_create(&replica).inc_by(ended.output_tokens.into());
    }
}

fn conventional(ended: &EndedRequest) -> Labels {
    let mut labels = vec![
        (names::LABEL_OPERATION, ended.operation.to_owned()),
        (names::LABEL_PROVIDER, names::SERVICE.to_owned()),
        (names::LABEL_REQUEST_MODEL, ended.model.clone()),
    ];
    labels.extend(ended.error.map(|error| (names::LABEL_ERROR_TYPE, error.to_owned())));
    labels
}

fn replica(model: &str, replica: &str) -> Labels {
    vec![(names::LABEL_MODEL, model.to_owned()), (names::LABEL_REPLICA, replica.to_owned())]
}

fn by_reason(model: &str, of: &str, reason: &str) -> Labels {
    let mut labels = replica(model, of);
    labels.push((names::LABEL_REASON, reason.to_owned()));
    labels
}

fn by_code(code: &str) -> Labels {
    vec![(names::LABEL_CODE, code.to_owned())]
}

/// The name of a counter's family: the series' name without the suffix `_total`, which the encoder appends again.
pub fn counter_family(name: &str) -> &str {
    name.strip_suffix("_total").unwrap_or(name)
}

impl EndedRequest {
    /// Whether it failed, rather than ending by itself or by its client.
    fn failed(&self) -> bool {
        self.reason == "error" || self.reason == "deadline_exceeded"
    }
}

/// Numbers of requests since the server's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that were taken and have ended.
    pub ended: u64,
    /// The requests among them that ended with an error or at their deadline.
    pub failed: u64,
    /// Requests that were not taken.
    pub refused: u64,
}

impl Counts {
    /// Returns how many there were after `before`.
    pub fn since(self, before: Counts) -> Counts {
        Counts {
            ended: self.ended - before.ended,
            failed: self.failed - before.failed,
            refused: self.refused - before.refused,
        }
    }
}

/// The last ended requests of a server, and the metrics of all its requests.
#[derive(Debug, Default)]
pub struct Requests {
    last: Mutex<VecDeque<EndedRequest>>,
    metrics: Metrics,
    ended: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
}

impl Requests {
    fn last(&self) -> MutexGuard<'_, VecDeque<EndedRequest>> {
        // Every update of the list is complete, so a poisoned lock is harmless.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an ended request.
    pub fn note(&self, ended: EndedRequest) {
        self.metrics.note(&ended);
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.failed.fetch_add(u64::from(ended.failed()), Ordering::Relaxed);
        let mut last = self.last();
        if last.len() == KEPT {
            last.pop_front();
        }
        last.push_back(ended);
    }

    /// Returns the kept requests that ended after `moment`, oldest first.
    pub fn after(&self, moment: Moment) -> Vec<EndedRequest> {
        self.last().iter().filter(|ended| ended.at > moment).cloned().collect()
    }

    /// Returns how many requests ended, failed and were refused since the server's start.
    pub fn counts(&self) -> Counts {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts { ended: read(&self.ended), failed: read(&self.failed), refused: read(&self.refused) }
    }

    /// Counts a refused request by its gRPC code.
    pub fn refuse(&self, code: &'static str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.metrics.refused.get_or_create(&by_code(code)).inc();
    }

    /// Creates a replica's counters with value 0, so that the first request is visible as an increase.
    pub fn expect_replica(&self, model: &str, of: &str) {
        for reason in REASONS {
            let labels = by_reason(model, of, reason);
            drop(self.metrics.requests.get_or_create(&labels));
            self.metrics.begin(model, [labels]);
        }
        self.metrics.begin(model, [replica(model, of)]);
        drop(self.metrics.input_tokens.get_or_create(&replica(model, of)));
        drop(self.metrics.output_tokens.get_or_create(&replica(model, of)));
    }

    /// Creates the counter of a refusal code with value 0, for the same reason.
    pub fn expect_code(&self, code: &str) {
        drop(self.metrics.refused.get_or_create(&by_code(code)));
    }

    /// Removes the series of models for which `keeps` is false.
    pub fn keep_models(&self, keeps: &dyn Fn(&str) -> bool) {
        self.metrics.keep(keeps);
    }

    /// Adds the metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        let metrics = &self.metrics;
        for (name, help, of) in [
            (names::METRIC_REQUEST_DURATION, "Submission to end of a request", &metrics.duration),
            (names::METRIC_TIME_TO_FIRST_TOKEN, "Submission to first token", &metrics.first_token),
            (names::METRIC_TIME_PER_OUTPUT_TOKEN, "Mean time of a token after the first", &metrics.per_token),
            (names::METRIC_QUEUE, "Submission to start", &metrics.queue),
        ] {
            registry.register(name, help, of.clone());
        }
        for (name, help, of) in [
            (names::METRIC_REQUESTS, "Requests that were taken and have ended", &metrics.requests),
            (names::METRIC_REQUESTS_REFUSED, "Requests that were not taken", &metrics.refused),
            (names::METRIC_INPUT_TOKENS, "Prompt tokens of ended requests", &metrics.input_tokens),
            (names::METRIC_OUTPUT_TOKENS, "Output tokens of ended requests", &metrics.output_tokens),
        ] {
            registry.register(counter_family(name), help, of.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    fn ended() -> EndedRequest {
        EndedRequest {
            at: Moment(5),
            id: "request".to_owned(),
            trace: None,
            model: "m".to_owned(),
            replica: "m/0".to_owned(),
            operation: "chat",
            reason: "stop",
            error: None,
            input_tokens: 7,
            cached_tokens: 0,
            output_tokens: 3,
            queue: Duration::ZERO,
            first_token: Some(Duration::from_millis(30)),
            per_token: Some(Duration::from_micros(700)),
            whole: Duration::from_millis(90),
        }
    }

    fn shown(requests: &Requests) -> String {
        let mut registry = Registry::default();
        requests.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn what_ended_is_counted_once_and_never_by_id() {
        let requests = Requests::default();
        requests.expect_replica("m", "m/0");
        requests.note(ended());
        let unfinished =
            EndedRequest { reason: "aborted", error: Some("CANCELLED"), first_token: None, per_token: None, ..ended() };
        requests.note(unfinished);
        requests.refuse("NOT_FOUND");
        assert_eq!(requests.counts(), Counts { ended: 2, failed: 0, refused: 1 }, "who hangs up does not fail");
        let text = shown(&requests);
        for line in [
            "ostinato_requests_total{model=\"m\",replica=\"m/0\",reason=\"stop\"} 1",
            "ostinato_requests_total{model=\"m\",replica=\"m/0\",reason=\"aborted\"} 1",
            "ostinato_requests_total{model=\"m\",replica=\"m/0\",reason=\"length\"} 0",
            "ostinato_requests_refused_total{code=\"NOT_FOUND\"} 1",
            "ostinato_input_tokens_total{model=\"m\",replica=\"m/0\"} 14",
            "ostinato_queue_seconds_count{model=\"m\"} 1",
            "gen_ai_server_time_per_output_token_seconds_bucket{le=\"0.001\",gen_ai_operation_name=\"chat\",\
             gen_ai_provider_name=\"ostinato\",gen_ai_request_model=\"m\"} 1",
            "gen_ai_server_request_duration_seconds_count{gen_ai_operation_name=\"chat\",\
             gen_ai_provider_name=\"ostinato\",gen_ai_request_model=\"m\",error_type=\"CANCELLED\"} 1",
        ] {
            assert!(text.lines().any(|shown| shown == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("request\""), "an id is a label:\n{text}");
        assert_eq!(requests.after(Moment(0)).len(), 2);

        // Removing a model removes all its series and no others.
        requests.note(EndedRequest { model: "n".to_owned(), replica: "n/0".to_owned(), ..ended() });
        requests.note(EndedRequest { reason: "deadline_exceeded", model: "n".to_owned(), ..ended() });
        assert_eq!(requests.counts(), Counts { ended: 4, failed: 1, refused: 1 });
        requests.keep_models(&|model| model == "n");
        let text = shown(&requests);
        assert!(!text.contains("model=\"m\""), "{text}");
        let other = "ostinato_requests_total{model=\"n\",replica=\"n/0\",reason=\"stop\"} 1";
        assert!(text.lines().any(|line| line == other), "{text}");
        assert!(text.contains("ostinato_requests_refused_total{code=\"NOT_FOUND\"} 1"), "{text}");
    }
}

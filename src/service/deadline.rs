//! The deadline that a caller sets for its call (`grpc-timeout`): reading it, and answering DEADLINE_EXCEEDED when it
//! has passed and the call has no answer yet. tonic drops such a call as well, but answers CANCELLED; the layer here is
//! inside tonic's and decides by the clock, so that its answer is always there first.
//! Not here: the deadline of a stream that has begun, which the engine keeps.

use super::refusal::{Refusal, status};
use crate::host::Host;
use http::HeaderMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::time::Sleep;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// gRPC's header of a call's timeout.
const HEADER: &str = "grpc-timeout";
/// The method whose refusals the host counts, of both contracts.
const COUNTED: &str = "/Generate";

/// The deadline of a call that was received at `now`: up to eight digits and a unit in `grpc-timeout`. `None` without
/// the header, and for a deadline that the clock cannot represent.
pub fn deadline(headers: &HeaderMap, now: Instant) -> Result<Option<Instant>, Refusal> {
    let Some(header) = headers.get(HEADER) else {
        return Ok(None);
    };
    let text = header.to_str().unwrap_or_default();
    let timeout = parse_timeout(text).ok_or_else(|| Refusal::Value {
        field: HEADER,
        value: format!("{text:?}"),
        rule: "up to eight digits and one of H, M, S, m, u, n",
    })?;
    Ok(now.checked_add(timeout))
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let unit = text.chars().next_back()?;
    let digits = text.strip_suffix(unit)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(number * 3600),
        'M' => Duration::from_secs(number * 60),
        'S' => Duration::from_secs(number),
        'm' => Duration::from_millis(number),
        'u' => Duration::from_micros(number),
        'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

/// A layer that answers calls whose deadline has passed. It must be the outermost layer.
#[derive(Clone, Debug)]
pub struct Deadlines {
    host: Arc<Host>,
}

impl Deadlines {
    /// Counts the refused generations in `host`.
    pub fn new(host: Arc<Host>) -> Deadlines {
        Deadlines { host }
    }
}

impl<S> Layer<S> for Deadlines {
    type Service = Timed<S>;

    fn layer(&self, inner: S) -> Timed<S> {
        Timed { host: Arc::clone(&self.host), inner }
    }
}

/// A service behind [`Deadlines`].
#[derive(Clone, Debug)]
pub struct Timed<S> {
    host: Arc<Host>,
    inner: S,
}

impl<S> Service<http::Request<Body>> for Timed<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        // The service refuses a header that cannot be read, with its value.
        let until = deadline(request.headers(), Instant::now()).ok().flatten();
        let counted = request.uri().path().ends_with(COUNTED).then(|| Arc::clone(&self.host));
        let inner = self.inner.call(request);
        let Some(until) = until else { return Box::pin(inner) };
        Box::pin(async move {
            let answered = Until { inner: Box::pin(inner), until, sleep: None }.await;
            answered.unwrap_or_else(|Late| {
                let refusal = Refusal::Deadline { output_tokens: 0 };
                counted.iter().for_each(|host| host.ended.refuse(refusal.kind()));
                Ok(status(&refusal).into_http())
            })
        })
    }
}

/// The deadline has passed.
#[derive(Debug)]
struct Late;

/// A future that is given up at a deadline.
struct Until<F> {
    inner: Pin<Box<F>>,
    until: Instant,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<F: Future> Future for Until<F> {
    type Output = Result<F::Output, Late>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Poll::Ready(answer) = this.inner.as_mut().poll(context) {
            return Poll::Ready(Ok(answer));
        }
        // By the clock, not only by the timer: tonic's timer for the same deadline may fire before this one, but not
        // before the deadline, and tonic polls this future first.
        if Instant::now() >= this.until {
            return Poll::Ready(Err(Late));
        }
        let until = this.until;
        let sleep = this.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until.into())));
        sleep.as_mut().poll(context).map(|()| Err(Late))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        for (text, timeout) in [
            ("1H", Duration::from_secs(3600)),
            ("2M", Duration::from_secs(120)),
            ("99999999S", Duration::from_secs(99_999_999)),
            ("100m", Duration::from_millis(100)),
            ("5u", Duration::from_micros(5)),
            ("0n", Duration::ZERO),
        ] {
            assert_eq!(parse_timeout(text), Some(timeout), "{text}");
        }
        for text in ["", "S", "5", "5s", "-1S", "1.5S", "123456789S", " 1S", "1é"] {
            assert_eq!(parse_timeout(text), None, "{text}");
        }
    }
}

//! The client side of a sequence: its sink, its spans, and counts of what was sent to it.
//! Not here: the sequence's scheduling state (`engine::sequence`).

use crate::engine::request::{Event, FinishReason, Finished, PerToken, Request, Sink, Timings};
use crate::replica::gaps::Gaps;
use crate::replica::spans;
use crate::telemetry::spans::SpanName;
use std::sync::Arc;
use std::time::Instant;

/// The sample of a request that a sequence computes.
#[derive(Clone, Copy)]
pub(super) struct Sample {
    pub(super) index: u32,
    pub(super) one_of_several: bool,
}

impl Sample {
    /// Sets the sample's index on one of its spans, if the request has several samples.
    pub(super) fn name(self, span: &tracing::Span) {
        if self.one_of_several {
            spans::sample(span, self.index);
        }
    }
}

pub(super) struct Submission {
    pub(super) request: Request,
    pub(super) sample: Sample,
    pub(super) sink: Sink,
    /// The request's `queue` span, open.
    pub(super) queue: tracing::Span,
    pub(super) at: Instant,
}

/// The receiver of a sequence's events.
pub(super) struct Client {
    pub(super) id: String,
    /// The id again, for step records.
    pub(super) name: Arc<str>,
    pub(super) sample: Sample,
    pub(super) sink: Sink,
    /// The sink has failed: nothing further is sent.
    pub(super) gone: bool,
    pub(super) request: tracing::Span,
    /// The span of the current phase: `queue`, `prefill` or `decode`.
    pub(super) phase: tracing::Span,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    /// When the last token was sent.
    last_token: Option<Instant>,
    /// The request's span, if its trace is exported.
    pub(super) traced: Option<SpanName>,
    /// The number of finished plans in which the sequence had a row.
    pub(super) plans: u32,
    /// The number of faults of these plans: in total, and in the current phase.
    pub(super) faults: (u32, u32),
}

impl Client {
    pub(super) fn new(submission: Submission) -> (Request, Client) {
        let Submission { request, sample, sink, queue, .. } = submission;
        let client = Client {
            id: request.id.clone(),
            name: request.id.as_str().into(),
            sample,
            sink,
            gone: false,
            request: request.span.clone(),
            phase: queue,
            prompt_tokens: request.prompt.len() as u32,
            output_tokens: 0,
            last_token: None,
            traced: SpanName::of(&request.span),
            plans: 0,
            faults: (0, 0),
        };
        (request, client)
    }

    /// Sends an event at `now`, the same for all that are sent in one turn, and counts the gap before a token. Returns
    /// false if the sink has failed with this event.
    pub(super) fn tell(&mut self, mut event: Event, now: Instant, gaps: &Gaps) -> bool {
        match &mut event {
            Event::Started(_) => {
                self.begin(spans::prefill(&self.request));
                self.sample.name(&self.phase);
            }
            Event::Token(token) => {
                token.index = self.sample.index;
                if self.output_tokens == 0 {
                    self.begin(spans::decode(&self.request));
                    self.sample.name(&self.phase);
                }
                self.output_tokens += 1;
                if let Some(last) = self.last_token.replace(now).filter(|last| *last < now) {
                    gaps.add(now - last);
                }
            }
            Event::Prompt(_) | Event::Embedding(_) | Event::Finished(_) => {}
        }
        if self.gone {
            return true;
        }
        self.gone = (self.sink)(event).is_err();
        !self.gone
    }

    /// Adds faults of a plan in which the sequence had a row.
    pub(super) fn note_faults(&mut self, faults: u32) {
        self.faults.0 += faults;
        self.faults.1 += faults;
    }

    /// Ends the current phase and begins `next`.
    fn begin(&mut self, next: tracing::Span) {
        spans::faults(&self.phase, std::mem::take(&mut self.faults.1));
        self.phase = next;
    }

    pub(super) fn finish(mut self, mut event: Event) {
        if let Event::Finished(finished) = &mut event {
            finished.index = self.sample.index;
        }
        // The spans end before the client is notified of the end.
        self.begin(tracing::Span::none());
        // Samples share the request's span; their phase spans have the faults.
        if !self.sample.one_of_several {
            spans::faults(&self.request, self.faults.0);
        }
        self.request = tracing::Span::none();
        if !self.gone {
            // This is the last event, so a failure of the sink does not matter.
            let _ = (self.sink)(event);
        }
    }

    /// Ends a request that the scheduler does not know, or no longer knows.
    pub(super) fn end(self, reason: FinishReason) {
        let finished = Finished {
            index: 0,
            reason,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: 0,
            output_tokens: self.output_tokens,
            drafted_tokens: 0,
            accepted_tokens: 0,
            timings: Timings::default(),
            per_token: PerToken::default(),
        };
        self.finish(Event::Finished(Box::new(finished)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::Token;
    use std::time::Duration;

    fn submission() -> Submission {
        let request = Request::new("a", vec![1]);
        let sample = Sample { index: 0, one_of_several: false };
        Submission { request, sample, sink: Box::new(|_| Ok(())), queue: tracing::Span::none(), at: Instant::now() }
    }

    #[test]
    fn a_gap_is_the_time_between_tokens_that_are_not_sent_together() {
        let (gaps, begin) = (Gaps::default(), Instant::now());
        let token = || Event::Token(Token { index: 0, id: 7, logprobs: None, logits: None });
        let (mut one, mut other) = (Client::new(submission()).1, Client::new(submission()).1);
        let at = |ms| begin + Duration::from_millis(ms);
        assert!(one.tell(token(), at(0), &gaps) && other.tell(token(), at(1), &gaps));
        assert_eq!(gaps.read().count(), 0, "the first token of a stream ends no gap, and each has its own");
        for ms in [20, 20, 20, 40] {
            assert!(one.tell(token(), at(ms), &gaps));
        }
        let counts = gaps.read();
        assert_eq!(counts.count(), 2, "three came together");
        let (p50, wanted) = (counts.percentile(50).unwrap(), Duration::from_millis(20));
        assert!(p50.abs_diff(wanted) <= wanted / 32, "{p50:?}");
    }
}

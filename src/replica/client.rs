//! The client of a sequence: its sink, its spans and what it was told.

use crate::engine::request::{Event, FinishReason, Finished, PerToken, Request, Sink, Timings};
use crate::replica::spans;
use crate::telemetry::spans::SpanName;
use std::sync::Arc;
use std::time::Instant;

/// Which sample of its request it is.
#[derive(Clone, Copy)]
pub(super) struct Sample {
    pub(super) index: u32,
    pub(super) one_of_several: bool,
}

impl Sample {
    /// Writes it to one of its spans, where there are others that it could be taken for.
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

/// Who asked, and hears of it.
pub(super) struct Client {
    pub(super) id: String,
    /// The same, for records.
    pub(super) name: Arc<str>,
    pub(super) sample: Sample,
    pub(super) sink: Sink,
    /// The sink has failed: nothing further is sent.
    pub(super) gone: bool,
    pub(super) request: tracing::Span,
    /// `queue`, `prefill` or `decode`.
    pub(super) phase: tracing::Span,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    /// Its request's span, where its trace is exported.
    pub(super) traced: Option<SpanName>,
    /// Finished plans that it had rows in.
    pub(super) plans: u32,
    /// Faults of those plans: in all, and in its present phase.
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
            traced: SpanName::of(&request.span),
            plans: 0,
            faults: (0, 0),
        };
        (request, client)
    }

    /// Hands an event on; false if the client has just gone.
    pub(super) fn tell(&mut self, mut event: Event) -> bool {
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
            }
            Event::Prompt(_) | Event::Finished(_) => {}
        }
        if self.gone {
            return true;
        }
        self.gone = (self.sink)(event).is_err();
        !self.gone
    }

    /// Steps of a plan that it had rows in drew nothing at first.
    pub(super) fn note_faults(&mut self, faults: u32) {
        self.faults.0 += faults;
        self.faults.1 += faults;
    }

    /// The present phase ends, and `next` begins.
    fn begin(&mut self, next: tracing::Span) {
        spans::faults(&self.phase, std::mem::take(&mut self.faults.1));
        self.phase = next;
    }

    pub(super) fn finish(mut self, mut event: Event) {
        if let Event::Finished(finished) = &mut event {
            finished.index = self.sample.index;
        }
        // The spans end before the client hears of it.
        self.begin(tracing::Span::none());
        // Samples share the span: their phases say it.
        if !self.sample.one_of_several {
            spans::faults(&self.request, self.faults.0);
        }
        self.request = tracing::Span::none();
        if !self.gone {
            // Nothing follows, whether it is heard or not.
            let _ = (self.sink)(event);
        }
    }

    /// Ends a request that the scheduler does not know (any more).
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

//! What ended requests were like: the last ones, for whoever looks at them. Deliberately absent: running requests,
//! which the engine knows.

use super::clock::Moment;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Requests that are remembered.
pub const KEPT: usize = 512;

/// One ended request, all its samples together.
#[derive(Clone, Debug)]
pub struct Ended {
    /// When it ended.
    pub at: Moment,
    /// The request's id.
    pub id: String,
    /// The served model.
    pub model: String,
    /// `MODEL/INDEX`.
    pub replica: String,
    /// `chat` or `text_completion`.
    pub operation: &'static str,
    /// How its first sample ended: `stop`, `length`, `aborted`, `deadline_exceeded` or `error`.
    pub reason: &'static str,
    /// The `error.type` of a call that failed.
    pub error: Option<&'static str>,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Of them found in the prefix cache.
    pub cached_tokens: u32,
    /// Output tokens of all samples.
    pub output_tokens: u32,
    /// Submission to start.
    pub queue: Duration,
    /// Submission to the first token; `None`: there was none.
    pub first_token: Option<Duration>,
    /// From the first token to the last, divided by the tokens after the first; `None` with fewer than two.
    pub per_token: Option<Duration>,
    /// Submission to end.
    pub whole: Duration,
}

/// The last ended requests of a server.
#[derive(Debug, Default)]
pub struct Requests {
    last: Mutex<VecDeque<Ended>>,
}

impl Requests {
    fn last(&self) -> MutexGuard<'_, VecDeque<Ended>> {
        // Each change of it is whole.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes one that has ended.
    pub fn note(&self, ended: Ended) {
        let mut last = self.last();
        if last.len() == KEPT {
            last.pop_front();
        }
        last.push_back(ended);
    }

    /// Those that ended after `moment`, oldest first.
    pub fn after(&self, moment: Moment) -> Vec<Ended> {
        self.last().iter().filter(|ended| ended.at > moment).cloned().collect()
    }
}

//! Scores the tokens of a prompt: applies the LM head to rows of the prompt's chunk, as many at a time as there is room
//! for logits. And pools rows of prompts that are embedded, after the final norm.
//!
//! Not here: the layers before it, which are those of any prefill step.

use super::{Decoder, Step, StepShape, stride};
use crate::kernels::recording::Recording;
use crate::kernels::sampling::{self, score};
use crate::kernels::shaders::{AdvanceArgs, JoinScoresArgs, PoolRowsArgs, RowScalesArgs, ScoreArgs, TakeRowsArgs};
use crate::kernels::stream;

/// The minimum and maximum number of rows scored at a time, and so of rows in the logits buffer. Between these bounds,
/// the number is the size of the largest decode bucket, whose logits need the room anyway. Fewer rows would read the LM
/// head's weights too often; more gain little.
const ROWS: (u32, u32) = (64, 256);

impl Decoder<'_> {
    /// Returns the number of rows that are scored at a time; at most a chunk.
    pub fn score_rows(&self) -> u32 {
        self.state.rows.clamp(ROWS.0, ROWS.1).min(self.state.chunk)
    }

    /// Returns the number of floats per row of the buffer `pooled`.
    pub fn pooled_stride(&self) -> u32 {
        stride(self.config.hidden)
    }

    pub(super) fn pool(&self, r: &mut Recording, step: &Step) {
        let (c, rows, prompts) = (self.config, self.state.chunk, self.state.prompts);
        let scales = r.buffer("row_scales", u64::from(rows) * 4);
        let (x, x_stride, columns) = (step.x.range, step.x.stride, c.hidden);
        let args = RowScalesArgs { x, chunk: step.chunk, scales, columns, x_stride, epsilon: c.rms_eps };
        r.call(stream::row_scales("row_scales".to_owned(), (rows, columns), args));
        let pooled_stride = self.pooled_stride();
        let args = PoolRowsArgs {
            x,
            scales,
            norm: self.vector(r, "final_norm").expect("every model has a final norm"),
            pool: self.state.pool(r),
            pooled: r.buffer("pooled", stream::pooled_bytes(prompts, pooled_stride)),
            columns,
            x_stride,
            pooled_stride,
        };
        r.call(stream::pool_rows("pool_rows".to_owned(), prompts, args));
    }

    pub(super) fn score(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        let (rows, chunk, words) = (shape.rows(), step.chunk, self.state.score(r));
        let head_x = Self::activations(r, "head.x", rows, self.config.hidden);
        let (x, x_stride) = (step.x.range, step.x.stride);
        let args = TakeRowsArgs { x, chunk, score: words, head_x: head_x.range, x_stride };
        r.call(score::take_rows("take_rows".to_owned(), rows, args));
        let logits = step.logits;
        self.lm_head(r, shape, step, head_x, "final_norm", self.own_logits(logits));
        let scores = match self.stage.is_last() {
            true => r.buffer("scores", score::scores_bytes(self.state.chunk)),
            false => words.none(),
        };
        let vocabulary = self.config.vocab;
        if self.stage.vocabulary.is_some() {
            let parts = self.gather_scores(r, step, rows);
            let args = JoinScoresArgs { parts, rows: step.rows, chunk, score: words, scores, vocabulary };
            if let Some(rank) = self.stage.rank.filter(|_| self.stage.is_last()) {
                r.call(score::join_scores("score".to_owned(), rows, rank.of, args));
            }
        } else {
            let (logits, row_stride) = (logits.range, logits.stride);
            let args = ScoreArgs { logits, rows: step.rows, chunk, score: words, scores, vocabulary, row_stride };
            r.call(score::score("score".to_owned(), rows, self.tuning.sample_threads, args));
        }
        r.call(sampling::advance("next_rows".to_owned(), AdvanceArgs { step_number: words.part(0, 4) }));
    }
}

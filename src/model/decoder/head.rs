//! The two ends of a step: the row table with the embeddings, and the LM head with the sampler.
//!
//! Not here: the layers between them.

use super::products::{Operands, Unpacked};
use super::{Decoder, Step, StepShape, floats_from};
use crate::kernels::attention::flash::FlashWay;
use crate::kernels::embed::{self, RowsFrom, Table};
use crate::kernels::gemm::panel::Fold;
use crate::kernels::gemm::tiled::Output;
use crate::kernels::gemm::{Activations, Epilogue, take_last};
use crate::kernels::recording::{Range, Recording};
use crate::kernels::sampling::{self, SampledStep, shared};
use crate::kernels::shaders::{
    AdvanceArgs, ArgmaxArgs, DecodeRowsArgs, EmbedRowsArgs, MarkPromptArgs, SampleArgs, TakeLastArgs,
};
use crate::kernels::stream;
use std::time::Duration;

/// The time of a decode step in microseconds from which sequences decode in the steps of prompts: shorter steps share little
/// with those of prompts.
const MIXED_STEP_US: u32 = 2000;

impl Decoder<'_> {
    /// Records the row table of a step and the rows' embeddings.
    pub(super) fn embed(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        self.embed_into(r, shape, step, step.x, "embed");
    }

    /// Records the row table of a step, and the rows' embeddings into `x`.
    pub(super) fn embed_into(&self, r: &mut Recording, shape: StepShape, step: &Step, x: Activations, label: &str) {
        let c = self.config;
        self.look_up(r, shape, step, ("embed", c.hidden, c.embedding_scale), x, label);
    }

    /// Records the row table of a step, and into `x` the rows' embeddings in a table of `width` columns, times `scale`.
    pub(super) fn look_up(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        (name, width, scale): (&str, u32, f32),
        x: Activations,
        label: &str,
    ) {
        let decode = matches!(shape, StepShape::Decode { .. });
        let from = if decode { RowsFrom::Batch } else { RowsFrom::Chunk };
        let flow = step.flow(None, Some(x.range));
        let fragments = self.named_in_fragments(name);
        for (first, table) in self.matrix(r, name) {
            let (slots, batch) = (self.state.slots(r), self.state.batch(r));
            let args = EmbedRowsArgs {
                embedding: table.range,
                slots: if decode { slots } else { slots.none() },
                batch: if decode { batch } else { batch.none() },
                chunk: if decode { step.chunk.none() } else { step.chunk },
                x: x.range,
                rows: step.rows,
                chunks: width.div_ceil(8),
                x_stride: x.stride,
                part_first: first,
                part_rows: table.rows,
                x_tag: 0,
                tokens_at: self.state.chunk_layout().token(0),
                scale,
            };
            let layout = Table { format: table.format, fragments };
            r.call(embed::embed_rows(label.to_owned(), layout, from, shape.rows(), width, flow, args));
        }
    }

    /// Returns the time of a decode step from which sequences decode in prompt steps; `None` if they never do. A model whose
    /// prompts cannot be divided does not decode. Where layers are on several devices, a mixed step would wait on each of them for
    /// the tokens of the one before, while a prompt's step and a decode step run on different devices at a time: only if
    /// `tuning` asks for it.
    pub fn mixed_steps(&self) -> Option<Duration> {
        let c = self.config;
        // Without matrices, a row would cost as much attention as a whole tile, or one workgroup would compute all of it.
        let on_matrices = |heads| self.flashes(heads).is_some_and(|way| !matches!(way, FlashWay::F32(_)));
        let pays = || self.stage.stages == 1 && self.all_heads().into_iter().all(on_matrices);
        let rule = || if pays() { MIXED_STEP_US } else { 0 };
        let least = self.tuning.mixed_steps.unwrap_or_else(rule);
        let mixes = least > 0 && c.causal;
        mixes.then(|| Duration::from_micros(u64::from(least)))
    }

    /// Returns the recording that completes the descriptor of a prompt step in which slots decode.
    pub fn decode_rows(&self) -> Recording {
        let mut recording = Recording::new("decode_rows");
        let r = &mut recording;
        let (slots, chunk) = (self.state.slots(r), self.state.chunk(r));
        let args = DecodeRowsArgs { slots, chunk, tokens_at: self.state.chunk_layout().token(0) };
        r.call(embed::decode_rows("decode_rows".to_owned(), args));
        recording
    }

    /// Returns the buffer that counts how often each slot has seen each token, for penalties.
    fn counts(&self, r: &mut Recording) -> Range {
        r.buffer("sampling.counts", u64::from(self.state.slots) * u64::from(self.config.vocab) * 4)
    }

    pub(super) fn mark(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        let (state, counts) = (self.state.slots(r), self.counts(r));
        let vocabulary = self.config.vocab;
        let args = MarkPromptArgs { rows: step.rows, state, counts, row_count: shape.rows(), vocabulary };
        r.call(sampling::mark_prompt("mark_prompt".to_owned(), args));
    }

    /// Returns the part of a step's logits that the device computes.
    pub(super) fn own_logits(&self, logits: Activations) -> Activations {
        match self.stage.own_vocabulary().filter(|_| self.stage.is_last()) {
            Some((.., own)) => Activations { range: floats_from(logits.range, own.start), ..logits },
            None => logits,
        }
    }

    /// Records the logits of the rows of `x` after the norm with the given name; if the LM head is divided, the device's part
    /// of them.
    pub(super) fn lm_head(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        x: Activations,
        norm: &str,
        logits: Activations,
    ) {
        let c = self.config;
        let norm = self.vector(r, norm);
        let name = if c.tied { "embed" } else { "lm_head" };
        if self.packs_for(shape, name) {
            let order = self.packed_order(shape, name);
            let rows = Unpacked { label: "head_pack".to_owned(), x, cols: c.hidden, norm, order };
            let x = self.pack(r, shape, step, rows);
            let operands = Operands { weight: name, x, y: Output::Rows(logits), epilogue: Epilogue::Store };
            self.tiled(r, shape, step, operands, Fold::None);
        } else {
            let operands = Operands { weight: name, x, y: logits, epilogue: Epilogue::Store };
            self.product(r, shape, step, operands, norm);
        }
        if c.logit_scale != 1.0 || c.logit_cap.is_some() {
            let own = self.stage.own_vocabulary();
            let size = (shape.rows(), own.map_or(c.vocab, |(.., own)| own.len() as u32));
            r.call(stream::bound_logits("bound_logits".to_owned(), size, logits, c.logit_scale, c.logit_cap));
        }
    }

    /// Records the search for the best token in each part of each row of logits, and returns the buffer with the
    /// results.
    pub(super) fn best(&self, r: &mut Recording, rows: u32, logits: Activations, name: &str, label: &str) -> Range {
        let partials = r.buffer(name, sampling::partials_bytes(rows));
        let own = self.stage.own_vocabulary().map(|(_, rank, own)| (own, shared::parts_each(rank.of)));
        let (tokens, parts) = own.unwrap_or((0..self.config.vocab, sampling::ARGMAX_PARTS));
        let args = ArgmaxArgs {
            logits: logits.range,
            partials,
            vocabulary: tokens.len() as u32,
            row_stride: logits.stride,
            parts,
            first: tokens.start,
        };
        r.call(sampling::argmax(label.to_owned(), rows, self.tuning.argmax_threads, args));
        partials
    }

    pub(super) fn head(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        let c = self.config;
        let slots = self.state.slots(r);
        let rows = shape.rows();
        let (x, rows_range) = match shape {
            StepShape::Decode { .. } | StepShape::Verify { .. } => (step.x, step.rows),
            _ => {
                let head_x = Self::activations(r, "head.x", rows, c.hidden);
                let head_rows = r.buffer("head.rows", embed::rows_bytes(rows));
                let args = TakeLastArgs {
                    x: step.x.range,
                    rows: step.rows,
                    chunk: step.chunk,
                    head_x: head_x.range,
                    head_rows,
                    x_stride: step.x.stride,
                    last_at: self.state.chunk_layout().last(0),
                };
                r.call(take_last("take_last".to_owned(), rows, args));
                (head_x, head_rows)
            }
        };
        let shared_draw = self.stage.vocabulary.map(|_| self.list_rows(r, rows, rows_range));
        let (logits, own) = (step.logits, self.own_logits(step.logits));
        self.lm_head(r, shape, step, x, "final_norm", own);
        let (mut partials, mut parts) =
            (self.best(r, rows, own, "sampling.partials", "argmax"), sampling::ARGMAX_PARTS);
        if let (Some(draw), Some(rank)) = (shared_draw, self.stage.rank) {
            let every = if let StepShape::Verify { drafts, .. } = shape { drafts + 1 } else { 1 };
            partials = self.draw_together(r, step, every, draw, partials);
            parts = rank.of * shared::parts_each(rank.of);
        }
        if !self.stage.is_last() {
            return;
        }
        let (bias, counts) = (self.state.bias(r), self.counts(r));
        let keys = r.buffer("sampling.keys", logits.range.bytes);
        let step_number = r.buffer("step", 4);
        let ring = r.buffer("ring", self.ring.bytes());
        let masks = r.buffer("masks", sampling::masks_bytes(self.state.slots, c.vocab));
        let args = SampleArgs {
            logits: logits.range,
            partials,
            rows: rows_range,
            state: slots,
            counts,
            bias,
            keys,
            step_number,
            ring,
            vocabulary: c.vocab,
            row_stride: logits.stride,
            partial_count: parts,
            ring_steps: self.ring.steps,
            ring_rows: self.ring.rows,
            // A kernel that sets the fault word runs before the last barrier.
            fault: step.fault,
            masks,
            every: 1,
            first: 0,
            options: 0,
        };
        let (threads, shared) = (self.tuning.sample_threads, self.stage.vocabulary.is_some());
        // A step without tags may be queued after one that faults. It samples nothing either, because both are run again. So does
        // any step after an exchange with other devices that did not end.
        let decodes = match shape {
            StepShape::Verify { .. } => self.stage.is_whole(),
            shape => matches!(shape, StepShape::Decode { .. }),
        };
        let heeds_fault = decodes && self.tuning.tags || self.stage.rank.is_some();
        let advance = AdvanceArgs { step_number };
        match shape {
            StepShape::Verify { sequences, drafts } => {
                let each = drafts + 1;
                for first in 0..each {
                    let label = format!("sample.{first}");
                    let of = SampledStep { heeds_fault, lags: true, shared };
                    r.call(sampling::sample_drafts(label, sequences, (each, first), threads, of, args));
                }
                r.call(sampling::advance("advance".to_owned(), advance));
                if self.looks_up() {
                    self.draft_by_look_up(r, rows_range, (sequences, each), drafts);
                } else if self.drafts() {
                    self.draft(r, step, x, rows_range, (sequences, each), drafts);
                }
                self.run_draft_head(r, shape);
                self.run_drafter_behind(r, shape);
            }
            _ => {
                let decode = matches!(shape, StepShape::Decode { .. });
                let of = SampledStep { heeds_fault, lags: decode && c.delta.is_some(), shared };
                r.call(sampling::sample("sample".to_owned(), rows, threads, of, args));
                if rows > 1 {
                    r.call(sampling::advance("advance".to_owned(), advance));
                }
                if matches!(shape, StepShape::Head { .. }) && self.drafts() {
                    self.draft(r, step, x, rows_range, (rows, 1), self.drafts);
                } else if matches!(shape, StepShape::Head { .. }) && self.looks_up() {
                    self.draft_by_look_up(r, rows_range, (rows, 1), self.drafts);
                }
                self.run_draft_head(r, shape);
                self.run_drafter_behind(r, shape);
            }
        }
    }
}

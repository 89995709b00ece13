//! Multi-token prediction (MTP): the block that drafts tokens after those that the model has sampled.
//!
//! Not here: whether a draft is accepted, which the sampler decides, and whether to draft.

use super::{Block, Decoder, Step, StepShape, stride};
use crate::kernels::attention;
use crate::kernels::attention::flash::flash_tiles;
use crate::kernels::draft::{self, VerifyRows};
use crate::kernels::embed;
use crate::kernels::gemm::panel::Fold;
use crate::kernels::gemm::tiled::Output;
use crate::kernels::gemm::{Activations, Epilogue, take_last};
use crate::kernels::recording::{Range, Recording};
use crate::kernels::sampling;
use crate::kernels::shaders::{
    JoinNormsArgs, NextTokensArgs, ShiftTokensArgs, StoreDraftArgs, TakeLastArgs, VerifyRowsArgs,
};

/// The prefix of the names of the block's weights.
const PREFIX: &str = "mtp";
/// The prefix of the names of the block's KV page buffers.
pub(super) const CACHE: &str = "kv.mtp";

impl Decoder<'_> {
    /// Whether draft tokens are generated.
    pub fn drafts(&self) -> bool {
        self.drafts > 0 && self.weight("mtp.fc").is_some()
    }

    /// Returns the chunk descriptor of a verification step or of a drafting pass.
    fn descriptor(&self, r: &mut Recording, name: &str) -> Range {
        r.buffer(name, self.state.chunk_layout().bytes(self.state.chunk))
    }

    fn verify(&self, sequences: u32, each: u32) -> VerifyRows {
        VerifyRows { sequences, each, tiles: flash_tiles(self.heads(0), each) }
    }

    /// Records the kernel that describes the rows of a verification step, and returns the descriptor.
    pub(super) fn verify_rows(&self, r: &mut Recording, sequences: u32, each: u32) -> Range {
        let chunk = self.descriptor(r, "verify.chunk");
        let (slots, batch) = (self.state.slots(r), self.state.batch(r));
        let args = VerifyRowsArgs { slots, batch, chunk, tokens_at: self.state.chunk_layout().token(0) };
        r.call(draft::verify_rows("verify_rows".to_owned(), self.verify(sequences, each), args));
        chunk
    }

    /// Returns the buffers of a drafting pass of `rows` rows; those not replaced here are shared with the model's step.
    fn draft_step(&self, r: &mut Recording, of: &Step, rows: u32) -> Step {
        let hidden = self.config.hidden;
        Step {
            rows: r.buffer("draft.rows", embed::rows_bytes(rows)),
            x: Self::activations(r, "draft.x", rows, hidden),
            chunk: self.descriptor(r, "draft.chunk"),
            logits: Self::activations(r, "draft.logits", rows, self.config.vocab),
            generations: None,
            ..*of
        }
    }

    /// Records the computation of the block's input from the tokens of a drafting pass's descriptor and the model's
    /// rows `h`.
    fn draft_input(&self, r: &mut Recording, shape: StepShape, step: &Step, h: Activations, final_norm: &str) {
        let c = self.config;
        let rows = shape.rows();
        let embedded = Self::activations(r, "draft.embedded", rows, c.hidden);
        self.embed_into(r, shape, step, embedded, "draft_embed");
        let joined = Self::activations(r, "draft.joined", rows, 2 * c.hidden);
        let mut norm =
            |name: &str| self.vector(r, name).unwrap_or_else(|| panic!("the checkpoint was opened with \"{name}\""));
        let (e_norm, final_norm, h_norm) = (norm("mtp.embed_norm"), norm(final_norm), norm("mtp.hidden_norm"));
        let args = JoinNormsArgs {
            e: embedded.range,
            h: h.range,
            e_norm,
            final_norm,
            h_norm,
            y: joined.range,
            width: c.hidden,
            stride: stride(c.hidden),
            y_stride: joined.stride,
            epsilon: c.rms_eps,
        };
        r.call(draft::join_norms("draft_norms".to_owned(), rows, args));
        if self.packs_for(shape, "mtp.fc") {
            let x = self.pack(r, shape, step, "mtp.fc_pack".to_owned(), joined, 2 * c.hidden, None);
            self.tiled(r, shape, "mtp.fc", step, x, Output::Rows(step.x), Epilogue::Store, Fold::None);
        } else {
            self.product(r, shape, "mtp.fc", step, joined, step.x, None, Epilogue::Store);
        }
    }

    fn draft_block(&self) -> Block {
        Block { prefix: PREFIX.to_owned(), follows: false, next_norm: String::new(), first: false, attention: 0 }
    }

    /// Records the computation of the drafting block's keys and values for the rows of a prefill step.
    pub(super) fn draft_prompts(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        let layout = self.state.chunk_layout();
        let draft = self.draft_step(r, step, shape.rows());
        let args = ShiftTokensArgs {
            chunk: step.chunk,
            next: draft.chunk,
            cells_at: layout.cells(0),
            last_at: layout.last(0),
            tokens_at: layout.token(0),
            rows: shape.rows(),
        };
        r.call(draft::shift_tokens("shift_tokens".to_owned(), args));
        self.draft_input(r, shape, &draft, step.x, "final_norm");
        let block = self.draft_block();
        self.mixer_input(r, shape, &draft, &block, "qkv", draft.qkv);
        let args = self.append_args(r, &draft, &block, CACHE);
        r.call(attention::append(block.name("append"), self.heads(block.attention), shape.rows(), args));
    }

    /// Records the drafting of `drafts` tokens after those that were sampled from the rows `x` of `sequences` sequences
    /// with `each` rows per sequence.
    pub(super) fn draft(
        &self,
        r: &mut Recording,
        step: &Step,
        x: Activations,
        rows: Range,
        (sequences, each): (u32, u32),
        drafts: u32,
    ) {
        let c = self.config;
        let layout = self.state.chunk_layout();
        let slots = self.state.slots(r);
        let head_x = Self::activations(r, "draft.head", sequences, c.hidden);
        let head_rows = r.buffer("draft.head_rows", embed::rows_bytes(sequences));
        let (mut h, mut rows, mut each, mut norm) = (x, rows, each, "final_norm");
        for index in 0..drafts {
            let shape = StepShape::Head { rows: sequences * each };
            let draft = self.draft_step(r, step, shape.rows());
            let args =
                NextTokensArgs { rows, slots, next: draft.chunk, last_at: layout.last(0), tokens_at: layout.token(0) };
            r.call(draft::next_tokens("next_tokens".to_owned(), self.verify(sequences, each), index, args));
            self.draft_input(r, shape, &draft, h, norm);
            let block = self.draft_block();
            let mixed = self.attention(r, shape, &draft, &block, CACHE);
            self.mixer_output(r, shape, &draft, &block, mixed);
            match self.weight("mtp.router") {
                Some(_) => self.experts(r, shape, &draft, &block),
                None => self.mlp(r, shape, &draft, &block),
            }
            let args = TakeLastArgs {
                x: draft.x.range,
                rows: draft.rows,
                chunk: draft.chunk,
                head_x: head_x.range,
                head_rows,
                x_stride: draft.x.stride,
                last_at: layout.last(0),
            };
            r.call(take_last("draft_last".to_owned(), sequences, args));
            let shape = StepShape::Head { rows: sequences };
            let logits = Self::activations(r, "draft.logits", sequences, c.vocab);
            self.lm_head(r, shape, &draft, head_x, "mtp.final_norm", logits);
            let partials = self.best(r, sequences, logits, "draft.partials", "draft_argmax");
            let args = StoreDraftArgs {
                partials,
                rows: head_rows,
                slots,
                row_count: sequences,
                parts: sampling::ARGMAX_PARTS,
            };
            r.call(draft::store_draft("store_draft".to_owned(), index, args));
            (h, rows, each, norm) = (head_x, head_rows, 1, "mtp.final_norm");
        }
    }
}

//! A draft head of the EAGLE-3 kind: one layer that drafts tokens from hidden states of the model. A row's features, the
//! model's hidden states between three of its layers, are projected to the head's width; beside the embedding of the token
//! that follows the row they are the input of the layer, whose output is the features of the token that it drafts.
//!
//!   g = fc · [h_a ; h_b ; h_c],  y = g + layer([norm(embed(token)) ; norm(g)]),  draft = argmax(lm_head · norm(y)),  g' = y
//!
//! As the drafting block of multi-token prediction (`mtp`), the head computes the rows of a prompt's step up to its keys and
//! values, and drafts behind the draw of a token, in a verification step over all of its rows. Its recordings are appended to
//! the model's like those of a draft model (`drafter`).
//!
//! Not here: whether a draft is accepted, which the sampler decides, and whether to draft.

use super::drafter::{DrafterKind, MODEL, TOKEN_IDS, drafter_name};
use super::{Block, Decoder, Step, StepShape};
use crate::kernels::attention;
use crate::kernels::draft::{self, VerifyRows};
use crate::kernels::embed;
use crate::kernels::gemm::{Activations, take_last};
use crate::kernels::recording::{Range, Recording};
use crate::kernels::sampling;
use crate::kernels::shaders::{NextTokensArgs, ShiftTokensArgs, StoreDraftArgs, TakeLastArgs};
use crate::kernels::stream;
use crate::model::config::DraftHead;

/// The name of the buffer of the model with the features of a step's rows.
const FEATURES: &str = "draft.features";
/// The prefix of the names of the weights of a head's layer.
const LAYER: &str = "layers.0";
/// The prefix of the names of a head's KV page buffers.
const CACHE: &str = "kv.0";

/// A decoder with a draft head.
#[derive(Clone, Copy)]
struct Headed<'d, 'a> {
    /// The model's decoder.
    model: &'d Decoder<'a>,
    /// The head's decoder.
    own: &'d Decoder<'a>,
    head: &'d DraftHead,
    /// The tokens that the head's vocabulary stands for.
    token_ids: &'a [u32],
}

impl<'a> Decoder<'a> {
    /// Returns the decoder of the model's draft head, with what its configuration says about it.
    pub(super) fn draft_head(&self) -> Option<(&Decoder<'a>, &DraftHead)> {
        let own: &Decoder<'a> = &self.drafter.as_ref()?.decoder;
        Some((own, own.config.draft_head.as_ref()?))
    }

    fn headed(&self) -> Option<Headed<'_, 'a>> {
        let (own, head) = self.draft_head()?;
        match self.drafter.as_ref()?.kind {
            DrafterKind::Head { token_ids } => Some(Headed { model: self, own, head, token_ids }),
            DrafterKind::Model => None,
        }
    }

    /// Records that the input of layer `layer` is kept, in a step that a draft head follows, if it is one of the head's
    /// features. The number of layers stands for the last layer's output.
    pub(super) fn keep_features(&self, r: &mut Recording, shape: StepShape, step: &Step, layer: u32) {
        let follows = matches!(shape, StepShape::Prefill { .. } | StepShape::Verify { .. });
        let Some(of) = self.headed().filter(|_| follows) else { return };
        let hidden = self.config.hidden;
        for (index, _) in (0..).zip(of.head.features(self.config.layers)).filter(|(_, input)| *input == layer) {
            let to = of.features(r, FEATURES, shape.rows());
            let label = format!("{FEATURES}.{index}");
            r.call(draft::join_rows(label, (shape.rows(), hidden), step.x, None, (to, index * hidden)));
        }
    }

    /// Records what a draft head does behind a step: drafts behind the draw of tokens, and its keys and values behind the
    /// layers of a prompt's step. Nothing without a head.
    pub(super) fn run_draft_head(&self, r: &mut Recording, shape: StepShape) {
        let Some(of) = self.headed() else { return };
        let mut pass = Recording::new(shape.name());
        match shape {
            StepShape::Prefill { .. } => of.follow_prompts(&mut pass, shape),
            StepShape::Head { rows } => {
                let drawn = of.last_rows(&mut pass, rows);
                of.draft(&mut pass, drawn, (rows, 1), self.drafts);
            }
            StepShape::Verify { sequences, drafts } => {
                let rows = shape.rows();
                let g = of.project(&mut pass, shape, rows);
                let drawn = (g, pass.buffer(&format!("{MODEL}rows"), embed::rows_bytes(rows)));
                of.draft(&mut pass, drawn, (sequences, drafts + 1), drafts);
            }
            StepShape::Decode { .. } | StepShape::Score { .. } | StepShape::Pool { .. } => {}
        }
        let shared = of.shared_embedding();
        r.append(pass, |name| if shared.iter().any(|of| of == name) { name.to_owned() } else { drafter_name(name) });
    }
}

impl<'d> Headed<'d, '_> {
    /// Returns the buffer of the features of `rows` rows, under a name in the recording.
    fn features(&self, r: &mut Recording, name: &str, rows: u32) -> Activations {
        Decoder::activations(r, name, rows, self.head.feature_count() * self.head.target_hidden)
    }

    /// Returns the names of the buffers of the model's embedding, if the head has none of its own.
    fn shared_embedding(&self) -> Vec<String> {
        let weights = self.model.weights.iter().filter(|weight| weight.merged == "embed");
        let parts = weights.flat_map(|weight| self.model.parts(weight)).map(|part| part.name);
        parts.filter(|_| !self.has_embedding()).collect()
    }

    fn has_embedding(&self) -> bool {
        self.own.weight("embed").is_some()
    }

    /// Returns the head's projected features of a prompt's step, or of a step's rows.
    fn projected(&self, r: &mut Recording, rows: u32) -> Activations {
        Decoder::activations(r, "draft.projected", rows, self.own.config.hidden)
    }

    fn norm(&self, r: &mut Recording, name: &str) -> (Range, f32) {
        let norm = self.own.vector(r, name);
        let norm = norm.unwrap_or_else(|| panic!("the checkpoint was opened with \"{name}\""));
        (norm, self.own.config.rms_eps)
    }

    /// Returns the buffers of a pass of the head over the rows of `chunk`.
    fn step(&self, r: &mut Recording, shape: StepShape, chunk: Range) -> Step {
        let step = self.own.buffers(r, shape, shape.rows(), chunk, false);
        let joined = Decoder::activations(r, "draft.joined", shape.rows(), self.own.config.qkv_cols());
        Step { joined: Some(joined), unscaled: None, ..step }
    }

    /// Records the projection of the features of a step's rows.
    fn project(&self, r: &mut Recording, shape: StepShape, rows: u32) -> Activations {
        let features = self.features(r, &format!("{MODEL}{FEATURES}"), rows);
        let width = self.head.feature_count() * self.head.target_hidden;
        if self.head.norms_features {
            let (norm, epsilon) = self.norm(r, "feature_norm");
            r.call(stream::norm_heads("feature_norm".to_owned(), rows, features, (0, 1, width), (Some(norm), epsilon)));
        }
        let projected = self.projected(r, rows);
        let chunk = self.own.state.chunk(r);
        let step = self.own.buffers(r, shape, rows, chunk, false);
        self.own.linear(r, shape, &step, "fc", (features, width), projected);
        projected
    }

    /// Records the input of the layer: the embeddings of the tokens in the step's descriptor, and the features `g`.
    fn join(&self, r: &mut Recording, shape: StepShape, step: &Step, g: Activations) {
        let (rows, hidden) = (shape.rows(), self.own.config.hidden);
        let joined = step.joined.expect("it is the step of a head");
        let embedded = Decoder::activations(r, "draft.embedded", rows, hidden);
        let embedding = if self.has_embedding() { self.own } else { self.model };
        embedding.look_up(r, shape, step, ("embed", hidden, 1.0), embedded, "draft_embed");
        let norms = [(embedded, format!("{LAYER}.attn_norm"), 0), (g, "hidden_norm".to_owned(), hidden)];
        for (x, name, first) in norms {
            let norm = self.norm(r, &name);
            r.call(draft::join_rows(name, (rows, hidden), x, Some(norm), (joined, first)));
        }
    }

    fn block(&self) -> Block {
        Block {
            prefix: LAYER.to_owned(),
            follows: false,
            next_norm: String::new(),
            first: true,
            attention: 0,
            owns_cache: true,
            inner: self.own.config.intermediate,
            experts: None,
        }
    }

    /// Records the head's keys and values of the rows of a prompt's step.
    fn follow_prompts(&self, r: &mut Recording, shape: StepShape) {
        let own = self.own;
        let layout = own.state.chunk_layout();
        let (chunk, next) = (own.state.chunk(r), own.descriptor(r, "draft.chunk"));
        let args = ShiftTokensArgs {
            chunk,
            next,
            cells_at: layout.cells(0),
            last_at: layout.last(0),
            tokens_at: layout.token(0),
            rows: shape.rows(),
        };
        r.call(draft::shift_tokens("shift_tokens".to_owned(), args));
        let g = self.project(r, shape, shape.rows());
        let (step, block) = (self.step(r, shape, next), self.block());
        self.join(r, shape, &step, g);
        own.mixer_input(r, shape, &step, &block, "qkv", step.qkv);
        let args = own.append_args(r, &step, &block, CACHE);
        r.call(attention::append(block.name("append"), own.heads(block.attention), shape.rows(), true, args));
    }

    /// Records that the projected features of the last rows of `rows` prompts are taken from those of their step. Returns them
    /// and their row table.
    fn last_rows(&self, r: &mut Recording, rows: u32) -> (Activations, Range) {
        let state = self.own.state;
        let projected = self.projected(r, state.chunk);
        let head_x = Decoder::activations(r, "head.x", rows, self.own.config.hidden);
        let head_rows = r.buffer("head.rows", embed::rows_bytes(rows));
        let args = TakeLastArgs {
            x: projected.range,
            rows: r.buffer(&format!("{MODEL}rows"), embed::rows_bytes(state.chunk)),
            chunk: state.chunk(r),
            head_x: head_x.range,
            head_rows,
            x_stride: projected.stride,
            last_at: state.chunk_layout().last(0),
        };
        r.call(take_last("draft_first".to_owned(), rows, args));
        (head_x, head_rows)
    }

    /// Records the drafting of `drafts` tokens after those that were drawn from rows with projected features and a row table,
    /// `each` rows of each of `sequences` sequences.
    fn draft(
        &self,
        r: &mut Recording,
        (mut g, mut rows): (Activations, Range),
        (sequences, mut each): (u32, u32),
        drafts: u32,
    ) {
        let (own, block) = (self.own, self.block());
        let c = own.config;
        let layout = own.state.chunk_layout();
        let slots = own.state.slots(r);
        let token_ids = r.buffer(TOKEN_IDS, 4 * self.token_ids.len() as u64);
        for index in 0..drafts {
            let shape = StepShape::Head { rows: sequences * each };
            let next = own.descriptor(r, "draft.chunk");
            let args = NextTokensArgs { rows, slots, next, last_at: layout.last(0), tokens_at: layout.token(0) };
            r.call(draft::next_tokens("next_tokens".to_owned(), VerifyRows { sequences, each }, index, args));
            let step = self.step(r, shape, next);
            self.join(r, shape, &step, g);
            let norm = self.head.stream_is_normed.then(|| self.norm(r, "hidden_norm"));
            r.call(draft::join_rows("draft_stream".to_owned(), (shape.rows(), c.hidden), g, norm, (step.x, 0)));
            let mixed = own.attention(r, shape, &step, &block, CACHE);
            own.mixer_output(r, shape, &step, &block, mixed);
            own.mlp(r, shape, &step, &block);
            let output = Decoder::activations(r, "draft.output", sequences, c.hidden);
            let output_rows = r.buffer("draft.rows", embed::rows_bytes(sequences));
            let args = TakeLastArgs {
                x: step.x.range,
                rows: step.rows,
                chunk: next,
                head_x: output.range,
                head_rows: output_rows,
                x_stride: step.x.stride,
                last_at: layout.last(0),
            };
            r.call(take_last("draft_last".to_owned(), sequences, args));
            let shape = StepShape::Head { rows: sequences };
            let logits = Decoder::activations(r, "logits", sequences, c.vocab);
            own.lm_head(r, shape, &step, output, "final_norm", logits);
            let partials = own.best(r, sequences, logits, "draft.partials", "draft_argmax");
            let parts = sampling::ARGMAX_PARTS;
            let args = StoreDraftArgs { partials, rows: output_rows, slots, token_ids, row_count: sequences, parts };
            r.call(draft::store_draft("store_draft".to_owned(), index, args));
            (g, rows, each) = (output, output_rows, 1);
        }
    }
}

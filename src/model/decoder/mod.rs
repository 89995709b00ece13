//! Decoders: turn a batch shape into a `Recording`. A layer consists of a mixer (full attention, the gated delta rule or a
//! short convolution) and an MLP (dense or MoE), each in a file of its own. The configuration selects them, never a model's name.
//!
//! Not here: memory, devices, and which queue runs what.

mod attention;
mod delta;
mod draft_head;
pub mod drafter;
mod experts;
mod head;
mod inputs;
mod latent;
mod mlp;
mod mtp;
pub mod parallel;
mod products;
mod score;
mod short_conv;
pub mod stage;
mod tuning;
mod weights;

pub use attention::ROPE;
use drafter::Drafter;
use products::{Operands, Unpacked};
use stage::LayerStage;
pub use tuning::{Tuning, most_dots_rows, most_gemv_rows};

use super::checkpoint::{WeightKind, WeightSpec};
use super::config::{Attention, Experts, LayerKind, MlpKind, ModelConfig, QkNorm};
use crate::config::KvFormat;
use crate::kernels::attention::flash_decode;
use crate::kernels::embed;
use crate::kernels::gemm::panel::{Fold, Unscaled};
use crate::kernels::gemm::tiled::{Output, Packed};
use crate::kernels::gemm::{Activations, Epilogue};
use crate::kernels::layout::StateLayout;
use crate::kernels::recording::{Range, Recording};
use crate::kernels::sampling;
use crate::kernels::state::MOST_DRAFTS;
use crate::kernels::stream::{self, Branch, BranchFlow};
use crate::kernels::tags::{self, Flow, Generations};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The kind of step that a recording runs, with its bucket sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepShape {
    /// A decode step: one token of each of up to `rows` slots.
    Decode {
        /// The bucket's number of rows.
        rows: u32,
    },
    /// A prefill step: the layers over up to `rows` tokens of one or more prompts.
    Prefill {
        /// The bucket's number of rows.
        rows: u32,
    },
    /// Samples the first output token of each of up to `rows` prompts from their last rows, after a prefill. Draft
    /// tokens follow if drafting is enabled.
    Head {
        /// The bucket's number of rows.
        rows: u32,
    },
    /// Scores prompt tokens after a prefill: computes the log probabilities of the tokens that follow `rows` rows of
    /// the chunk. The first run scores the chunk's first rows; each repetition scores the next ones.
    Score {
        /// The number of rows scored per run.
        rows: u32,
    },
    /// Pools the hidden states of rows of prompts that are embedded, after a prefill.
    Pool {
        /// The maximum number of prompts.
        prompts: u32,
    },
    /// A verification step of speculative decoding: runs the next token and the draft tokens of each of `sequences`
    /// slots. For each sequence, samples one token more than the number of leading drafts that are correct.
    Verify {
        /// The bucket's number of sequences.
        sequences: u32,
        /// The number of draft tokens per sequence.
        drafts: u32,
    },
}

impl StepShape {
    /// Returns the recording's name.
    pub fn name(self) -> String {
        match self {
            StepShape::Decode { rows } => format!("decode.{rows}"),
            StepShape::Prefill { rows } => format!("prefill.{rows}"),
            StepShape::Head { rows } => format!("head.{rows}"),
            StepShape::Score { rows } => format!("score.{rows}"),
            StepShape::Pool { prompts } => format!("pool.{prompts}"),
            StepShape::Verify { sequences, drafts } => format!("verify.{sequences}.{drafts}"),
        }
    }

    /// Returns the number of rows of each sequence in a step of decoding.
    fn rows_of_sequence(self) -> u32 {
        if let StepShape::Verify { drafts, .. } = self { drafts + 1 } else { 1 }
    }

    /// Returns the number of rows of activations.
    pub fn rows(self) -> u32 {
        match self {
            StepShape::Decode { rows }
            | StepShape::Prefill { rows }
            | StepShape::Head { rows }
            | StepShape::Score { rows }
            | StepShape::Pool { prompts: rows } => rows,
            StepShape::Verify { sequences, drafts } => sequences * (drafts + 1),
        }
    }
}

/// The prefix of the names of recurrent-state buffers.
pub const RECURRENT: &str = "recurrent.";
/// The prefix of the names of buffers with tagged words; see `kernels::tags`.
pub const TAGGED: &str = "tagged.";

/// Returns the size in bytes of the recurrent state of one sequence in all layers: what a cell holds.
pub fn cell_bytes(config: &ModelConfig) -> u64 {
    let layers = |kind| config.layers_of(kind).count() as u64;
    let delta = config.delta.map_or(0, |net| {
        let heads = delta::delta_heads(net);
        layers(LayerKind::GatedDelta) * (heads.state_bytes(1) + heads.window_bytes(1))
    });
    let conv =
        config.short_conv.map_or(0, |conv| layers(LayerKind::ShortConv) * short_conv::conv_shape(conv).window_bytes(1));
    delta + conv
}

/// The dimensions of the ring buffer from which the host reads sampled tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// The number of steps after which an entry is reused.
    pub steps: u32,
    /// The number of rows per step.
    pub rows: u32,
}

impl RingLayout {
    /// Returns the size of the ring buffer in bytes.
    pub fn bytes(self) -> u64 {
        sampling::ring_bytes(self.steps, self.rows)
    }
}

/// A buffer of weights in memory: a whole weight, or a range of its rows if one allocation cannot hold the weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The buffer's name.
    pub name: String,
    /// The first row of the weight in this buffer.
    pub first_row: u32,
    /// The number of rows.
    pub rows: u32,
    /// The size in bytes, including padding.
    pub bytes: u64,
}

/// Returns the number of floats per row of activations: `width` padded for kernels, which read at most 32 floats at a
/// time.
pub fn stride(width: u32) -> u32 {
    width.next_multiple_of(32)
}

/// Returns the number of elements per row of weights: `elements` padded for kernels, which read eight values at a time.
pub fn padded(elements: u32) -> u32 {
    elements.next_multiple_of(8)
}

/// Returns the rest of the range, starting at float `first`.
fn floats_from(range: Range, first: u32) -> Range {
    let offset = u64::from(first) * 4;
    range.part(offset, range.bytes - offset)
}

/// Returns the part of `y` that receives the product with W's rows from `first` on. A gated linear unit makes one output
/// of two rows of W.
fn outputs_from(y: Activations, first: u32, epilogue: Epilogue) -> Activations {
    let first = if epilogue.halves() { first / 2 } else { first };
    Activations { range: floats_from(y.range, first), ..y }
}

/// The parameters that determine a replica's recordings.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    /// The model's configuration.
    pub config: &'a ModelConfig,
    /// The weights of the stage; their names and formats are used.
    pub weights: &'a [WeightSpec],
    /// The layers that the device computes: all of them, unless the model is split over several devices.
    pub stage: LayerStage,
    /// For a stage behind another one: the tag of the residual stream's words that a decode step takes over, by number
    /// of rows. Numbers of rows whose steps take over plain words are missing.
    pub input_tags: BTreeMap<u32, u32>,
    /// The maximum size in bytes of a buffer of weights: of the device's buffers.
    pub max_buffer_bytes: u64,
    /// The layout of the device state.
    pub state: StateLayout,
    /// The number of KV cache pages.
    pub pages: u32,
    /// The number of pages of layers with a sliding window, if these have pages of their own.
    pub window_pages: Option<u32>,
    /// The format of cached keys and values: f16 or f32.
    pub kv_format: KvFormat,
    /// The number of cells of recurrent state: one per slot, followed by those of snapshots.
    pub cells: u32,
    /// The maximum number of draft tokens per sequence and step; 0 disables drafting. Without a draft model and the weights
    /// of a drafting block, drafts are looked up.
    pub drafts: u32,
    /// The draft model or draft head, if there is one.
    pub drafter: Option<Drafter<'a>>,
    /// The dimensions of the token ring buffer.
    pub ring: RingLayout,
    /// The maximum context length in tokens.
    pub context: u32,
    /// The choices that depend on the device.
    pub tuning: Tuning,
}

/// The buffers that the layers of a step share.
struct Step {
    rows: Range,
    x: Activations,
    qkv: Activations,
    /// The input of the projection of queries, keys and values, if it is not the norm of x.
    joined: Option<Activations>,
    attention: Activations,
    /// The output of a recurrent layer's input projection, and the mixer's output before the output projection; its norm, if
    /// groups of heads have one.
    projected: Activations,
    mixed: Activations,
    normed: Activations,
    mlp: Activations,
    /// The output of a mixer or an MLP before it is added to x, if it is changed before.
    branch: Activations,
    /// Its sum over all devices, if it is changed then: `branch`, or of tagged words a buffer of its own, because no call
    /// overwrites words that another one has just written.
    summed: Activations,
    /// The inputs of all layers that depend on the tokens, if the model has them.
    inputs: Activations,
    /// With latent attention: the projections of the input, the queries, and the heads' values.
    latent: [Activations; 3],
    /// The router's logits, and the experts' activations between their two matrix products.
    router: Activations,
    middle: Activations,
    /// With experts beside a dense MLP: the experts' output.
    of_experts: Activations,
    /// The shared expert's output, if products of its own compute it.
    of_shared: Activations,
    /// The sums that workgroups of one product pass on to those with the next part of the columns.
    column_sums: Activations,
    /// The partial results of splits of attention, by kind of attention layers. Kinds with the same plan of splits share
    /// them.
    partials: Vec<Range>,
    counters: Range,
    chunk: Range,
    logits: Activations,
    /// The rows between products that fold the norms; `None` if norms are stages of their own.
    unscaled: Option<Unscaled>,
    fault: Range,
    /// The index of the microbatch, if the step's rows are those of one of two microbatches of a prompt step.
    microbatch: Option<u32>,
    /// The generation numbers of the tagged buffers; `None` if the step's activations are not tagged.
    generations: Option<RefCell<Generations>>,
}

impl Step {
    fn is_logits(&self, range: Range) -> bool {
        range.buffer == self.logits.range.buffer
    }

    /// Returns the tags of a call that reads `input` and writes `output`, and counts the write.
    fn flow(&self, input: Option<Range>, output: Option<Range>) -> Flow {
        let Some(generations) = &self.generations else { return Flow::NONE };
        let mut generations = generations.borrow_mut();
        Flow {
            input_carried: input.is_some(),
            input: input.map_or(0, |range| generations.now(range)),
            old: output.map_or(0, |range| generations.now(range)),
            output: output.map(|range| generations.next(range)),
        }
    }
}

/// A layer within a decoder.
struct Block {
    /// The prefix of the names of the layer's weights.
    prefix: String,
    /// Whether, with folded norms, a preceding layer's product has left this layer's input unscaled. False for the
    /// first layer of a stage only, and for the drafting block.
    follows: bool,
    /// The name of the norm that follows the layer; a weight of this name exists only if another layer follows.
    next_norm: String,
    /// Whether the layer is the first of its kind in the step: of those whose attention has the same plan of splits, or of
    /// those without attention.
    first: bool,
    /// The index of the layer's kind of attention; 0 for layers without.
    attention: usize,
    /// Whether the layer has keys and values of its own.
    owns_cache: bool,
    /// The width of the layer's dense MLP.
    inner: u32,
    /// The dimensions of the layer's experts, if it has any.
    experts: Option<Experts>,
}

impl Block {
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }
}

/// The last product of a mixer or an MLP.
struct LastProduct<'a> {
    /// The name of its weight.
    weight: &'a str,
    x: Mixed,
    /// A norm of x, which is rows of floats then.
    norm: Option<Range>,
    /// The norm of the product, before it is added to the residual stream.
    after: Option<Range>,
    /// The norm of the residual stream that follows.
    next: Option<Range>,
    /// The layer's factor of the residual stream.
    factor: Option<Range>,
}

/// A mixer's output.
enum Mixed {
    /// Rows of floats.
    Rows(Activations),
    /// Rows that are already packed for the next product.
    Packed(Packed),
}

impl Decoder<'_> {
    /// Returns a buffer of `rows` rows of `width` floats. With a width of 0, for models without such activations, it
    /// takes no memory.
    fn activations(recording: &mut Recording, name: &str, rows: u32, width: u32) -> Activations {
        if width == 0 {
            return Activations { range: recording.buffer("step", 4).none(), stride: 0 };
        }
        let stride = stride(width);
        Activations { range: recording.buffer(name, u64::from(rows) * u64::from(stride) * 4), stride }
    }

    /// Whether the activations of a step of this shape are tagged. It requires widths that are multiples of 32, because
    /// products wait for whole chunks of 32 columns, and inputs in the order of the columns. It also requires that no
    /// attention layer is the only one with its heads and window: the partial results of splits are not cleared, so that
    /// those of a single layer could not be distinguished from its own of the previous step.
    fn carries(&self, shape: StepShape) -> bool {
        let c = self.config;
        let own = c.layers_of(LayerKind::Attention).filter(|layer| self.stage.layers.contains(layer));
        let plans: Vec<usize> = own.map(|layer| self.plan_kind(c.attention_of[layer as usize])).collect();
        let alone = plans.iter().any(|plan| plans.iter().filter(|other| *other == plan).count() == 1);
        let mut widths = vec![c.hidden];
        for kind in c.attention_kinds.iter().filter(|_| !plans.is_empty()) {
            widths.extend([kind.q_rows(), c.qkv_rows(kind)]);
        }
        // The stages of `kernels::stream` but `add_branch` and `norm_groups`, and experts that a kernel of its own chooses, use barriers.
        let routed = c.experts.is_some() && !self.chooses_alone();
        let shared = c.layers_of(LayerKind::Attention).any(|layer| !c.owns_cache(layer));
        let shared = shared || c.latent.is_some() || c.layer_inputs.is_some();
        let staged = c.qk_norm == QkNorm::Rows || routed || shared;
        if let Some(net) = c.delta {
            widths.push(net.value_rows());
        }
        if let Some(conv) = c.short_conv {
            widths.push(conv.channels);
        }
        if (0..c.layers).any(|layer| c.has_dense_mlp(layer)) {
            widths.push(c.intermediate);
        }
        widths.extend(c.experts.and_then(|experts| experts.shared_inner).filter(|_| self.shared_is_apart()));
        let whole = c.experts.is_none_or(|experts| self.expert_shape(experts).middle_is_whole());
        // Where a step is divided, words would have to be carried from one part to the next. Without barriers, each exchange must
        // depend on all words of the one before it; the two of experts beside a dense MLP do not.
        let beside = c.experts.is_some_and(|experts| experts.beside_dense);
        let divided = self.stage.rank.is_some() && (self.tuning.exchange_polls == 0 || beside);
        self.tuning.tags
            && !divided
            && match shape {
                StepShape::Decode { .. } => true,
                StepShape::Verify { .. } => self.verifies_beside(),
                _ => false,
            }
            && (self.stage.is_first() || self.input_tags.contains_key(&shape.rows()))
            && !self.packs(shape)
            && whole
            && !staged
            && !alone
            && widths.iter().all(|width| width.is_multiple_of(32))
            // No product waits for these rows, and `delta_step` does for words of four columns.
            && c.delta.is_none_or(|net| net.projected_rows().is_multiple_of(4))
            && self.weights.iter().all(|w| matches!(w.kind, WeightKind::Vector) || self.in_fragments(w))
            && self.weights.iter().all(|w| w.order.is_none())
    }

    /// Whether the activations of verification steps may be tagged: where a row's attention takes in the keys of those before it
    /// in the step, as `flash_decode` does, for which it needs shared memory. Steps of several devices pass other buffers on.
    fn verifies_beside(&self) -> bool {
        self.stage.is_whole()
            && self.tuning.fragments.is_some_and(|matrices| {
                let bytes = |heads| flash_decode::shared_bytes(heads, 32, MOST_DRAFTS + 1, matrices);
                let served = |heads| flash_decode::serves(heads) && bytes(heads) <= self.tuning.shared_bytes;
                self.all_heads().into_iter().all(served)
            })
    }

    /// Returns the recording of a step.
    pub fn record(&self, shape: StepShape) -> Recording {
        self.recorded(shape, false)
    }

    /// Returns the recording of a step, whose layers are computed in microbatches or not.
    fn recorded(&self, shape: StepShape, in_microbatches: bool) -> Recording {
        let mut recording = Recording::new(shape.name());
        let r = &mut recording;
        let rows = shape.rows();
        let carries = self.carries(shape);
        // Head, Score and Pool recordings read the activations that a prefill step left, so their buffers are sized for the
        // largest one.
        let behind = matches!(shape, StepShape::Head { .. } | StepShape::Score { .. } | StepShape::Pool { .. });
        // Before the descriptor of a verification step, which contains the drafts.
        self.run_drafter(r, shape);
        let chunk = match shape {
            StepShape::Verify { sequences, drafts } => self.verify_rows(r, sequences, drafts + 1),
            _ => self.state.chunk(r),
        };
        let step = self.buffers(r, shape, if behind { self.state.chunk } else { rows }, chunk, carries);
        if let Some(tag) = self.input_tags.get(&rows).filter(|_| carries) {
            r.tagged_inputs = vec![(step.x.range.buffer, *tag)];
        }
        if !behind {
            if carries {
                self.clear_tags(r, &step);
            }
            // Later stages take over the rows and their activations from the stage before them.
            if self.stage.is_first() {
                self.embed(r, shape, &step);
            }
            if self.keeps_tokens() {
                self.note_tokens(r, step.rows, rows);
            }
            match in_microbatches {
                true => self.microbatches(r, shape, &step),
                false => self.layers(r, shape, &step),
            }
        }
        match shape {
            _ if !self.stage.has_logits() => assert!(!behind, "only the last stage draws tokens"),
            StepShape::Prefill { .. } | StepShape::Pool { .. } if !self.stage.is_last() => {}
            StepShape::Prefill { .. } => {
                self.mark(r, shape, &step);
                if self.drafts() {
                    self.draft_prompts(r, shape, &step);
                }
                self.run_draft_head(r, shape);
            }
            StepShape::Score { .. } => self.score(r, shape, &step),
            StepShape::Pool { .. } => self.pool(r, &step),
            StepShape::Decode { .. } | StepShape::Head { .. } | StepShape::Verify { .. } => self.head(r, shape, &step),
        }
        tags::number_calls(&mut recording);
        debug_assert_eq!(tags::check(&recording), Ok(()));
        recording
    }

    /// Returns the maximum number of rows of a decode or verification step.
    pub(super) fn decoding_rows(&self) -> u32 {
        self.state.rows.max(self.ring.rows)
    }

    /// Returns the buffers of a step: for `x_rows` rows of the residual stream, with the descriptor `chunk`. `carries`:
    /// whether the activations are tagged.
    fn buffers(&self, r: &mut Recording, shape: StepShape, x_rows: u32, chunk: Range, carries: bool) -> Step {
        let c = self.config;
        let rows = shape.rows();
        let prefill = matches!(shape, StepShape::Prefill { .. });
        let heads = self.all_heads();
        // Tagged and plain words never share memory, because a plain word's low bits could equal any tag.
        let named = |name: &str| if carries { format!("{TAGGED}{name}") } else { name.to_owned() };
        let most = |of: &dyn Fn(&Attention) -> u32| c.attention_kinds.iter().map(of).max().unwrap_or(0);
        let of_delta = c.delta.map_or([0, 0], |net| [net.projected_rows(), net.value_rows()]);
        let of_conv = c.short_conv.map_or([0, 0], |conv| [conv.projected_rows(), conv.channels]);
        let [projected, mixed] = [0, 1].map(|of| of_delta[of].max(of_conv[of]));
        let experts = c.experts.map(|experts| self.expert_shape(experts));
        let of_block = c.mtp_experts.filter(|_| self.drafts()).map(|experts| self.expert_shape(experts));
        let middle = experts.iter().chain(&of_block).map(|experts| experts.middle_stride()).max();
        let beside = c.experts.is_some_and(|experts| experts.beside_dense);
        let latent = c.latent.map_or([0; 3], |of| {
            let heads = c.attention_kinds[0].heads;
            [of.input_rows(), heads * (of.rope + of.nope), heads * of.value_dim]
        });
        let names = ["latent.input", "latent.queries", "latent.mixed"];
        let latent = std::array::from_fn(|at| Self::activations(r, names[at], rows, latent[at]));
        let apart = self.shared_is_apart();
        let with_experts = c.experts.iter().chain(c.mtp_experts.iter().filter(|_| self.drafts()));
        let shared = with_experts.filter_map(|experts| experts.shared_inner).filter(|_| apart).max().unwrap_or(0);
        let inner = c.intermediate.max(shared).max(if self.drafts() { c.mtp_width } else { 0 });
        let x = Self::activations(r, &named("x"), x_rows, c.hidden);
        let width = if c.has_branch_stages() || self.stage.rank.is_some() { c.hidden } else { 0 };
        let branch = Self::activations(r, &named("branch"), rows, width);
        let summed = match self.stage.rank.filter(|_| carries && c.has_branch_stages()) {
            Some(_) => Self::activations(r, &named("branch.sum"), rows, c.hidden),
            None => branch,
        };
        let taken_over = |tag: &u32| Generations::beginning(x.range, *tag);
        let generations = carries.then(|| RefCell::new(self.input_tags.get(&rows).map(taken_over).unwrap_or_default()));
        Step {
            rows: r.buffer("rows", embed::rows_bytes(x_rows)),
            x,
            joined: None,
            qkv: Self::activations(r, &named("qkv"), rows, most(&|kind| c.qkv_rows(kind))),
            attention: Self::activations(r, &named("attention.output"), rows, most(&Attention::q_rows)),
            projected: Self::activations(r, &named("in_proj.output"), rows, projected),
            mixed: Self::activations(r, &named("mixer.output"), rows, mixed),
            normed: {
                let grouped = c.delta.filter(|net| net.space.is_some_and(|space| space.norm_groups > 1));
                Self::activations(r, &named("mixer.normed"), rows, grouped.map_or(0, |net| net.value_rows()))
            },
            mlp: Self::activations(r, &named("mlp.hidden"), rows, inner),
            branch,
            summed,
            inputs: Self::activations(r, "layer_inputs", rows, c.layer_inputs.map_or(0, |of| of.width * c.layers)),
            router: Self::activations(r, &named("router.logits"), rows, experts.map_or(0, |e| e.logits())),
            middle: Self::activations(r, &named("experts.middle"), rows, middle.unwrap_or(0)),
            column_sums: {
                let width = if carries { self.column_sums(shape) } else { 0 };
                Self::activations(r, &named("column_sums"), rows, width)
            },
            latent,
            logits: {
                // The last device has room for those of the others.
                let own = self.stage.own_vocabulary().filter(|_| !self.stage.is_last());
                let width = own.map_or(c.vocab, |(.., own)| own.len() as u32);
                Self::activations(r, "logits", if prefill { 1 } else { rows }, width)
            },
            unscaled: self.unscaled(r, shape),
            fault: self.state.fault(r),
            microbatch: None,
            generations,
            of_experts: Self::activations(r, &named("experts.output"), rows, if beside { c.hidden } else { 0 }),
            of_shared: Self::activations(r, &named("shared.output"), rows, if apart { c.hidden } else { 0 }),
            partials: (0..)
                .zip(&heads)
                .map(|(kind, heads)| {
                    let name = attention::name_of_kind("attention.partials", self.plan_kind(kind));
                    let floats = heads.partial_floats(self.tuning.splits) * u64::from(self.decoding_rows());
                    r.buffer(&named(&name), floats * 4)
                })
                .collect(),
            counters: r.buffer("attention.counters", self.counter_bytes()),
            chunk,
        }
    }

    /// Records the layers of a step behind its embedding.
    fn layers(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        if self.stage.is_first() {
            self.layer_inputs(r, shape, step);
        }
        for layer in self.stage.layers.clone() {
            self.keep_features(r, shape, step, layer);
            self.layer(r, shape, step, layer);
        }
        self.keep_features(r, shape, step, self.stage.layers.end);
    }

    /// Zeroes the step's tagged activations except x, whose first write has a tag that no other write has, or which a
    /// stage has taken over. This is one call before a barrier that the first stage needs anyway, since the mixers read the
    /// row table that the embedding writes.
    fn clear_tags(&self, r: &mut Recording, step: &Step) {
        let layer =
            [step.qkv, step.attention, step.projected, step.mixed, step.normed, step.mlp, step.router, step.middle];
        // Tagged words are never both of experts beside a dense MLP and summed over devices.
        let summed = if step.summed.range == step.branch.range { step.of_experts } else { step.summed };
        let all = layer.into_iter().chain([step.branch, summed, step.column_sums, step.of_shared]);
        let buffers: Vec<Range> = all.map(|of| of.range).filter(|range| range.bytes > 0).collect();
        for buffers in buffers.chunks(tags::MOST_CLEARED) {
            r.call(tags::clear_tags("clear_tags".to_owned(), buffers));
        }
    }

    fn layer(&self, r: &mut Recording, shape: StepShape, step: &Step, layer: u32) {
        let c = self.config;
        let at = layer as usize;
        let kind = c.layer_kinds[at];
        let plan = |layer: u32| self.plan_kind(c.attention_of[layer as usize]);
        let alike = |other: u32| {
            c.layer_kinds[other as usize] == kind && (kind != LayerKind::Attention || plan(other) == plan(layer))
        };
        let block = Block {
            prefix: format!("layers.{layer}"),
            follows: layer > self.stage.layers.start,
            next_norm: format!("layers.{}.attn_norm", layer + 1),
            first: self.stage.layers.clone().find(|other| alike(*other)) == Some(layer),
            attention: c.attention_of[at],
            owns_cache: c.owns_cache(layer),
            inner: c.dense_widths[at],
            experts: c.experts.filter(|_| c.mlp_kinds[at] == MlpKind::Experts),
        };
        let mixed = match kind {
            LayerKind::Attention => Some(self.attention(r, shape, step, &block, &format!("kv.{}", c.cache_of[at]))),
            LayerKind::GatedDelta => Some(self.delta(r, shape, step, &block, &format!("{RECURRENT}{layer}"))),
            LayerKind::ShortConv => Some(self.short_conv(r, shape, step, &block, &format!("{RECURRENT}{layer}"))),
            LayerKind::None => None,
        };
        if let Some(mixed) = mixed {
            self.mixer_output(r, shape, step, &block, mixed);
        }
        match (c.mlp_kinds[at], block.experts) {
            (MlpKind::None, _) => {}
            (_, Some(experts)) if experts.beside_dense => self.experts_beside_dense(r, shape, step, &block),
            (_, Some(_)) => self.add_experts(r, shape, step, &block),
            (_, None) => self.mlp(r, shape, step, &block),
        }
        if c.layer_inputs.is_some() {
            self.layer_input(r, shape, step, &block, layer);
        }
    }

    /// Records a mixer's input projection, including the norm before it.
    fn mixer_input(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, part: &str, y: Activations) {
        let c = self.config;
        let name = block.name(part);
        if let Some(joined) = step.joined {
            return self.linear(r, shape, step, &name, (joined, c.qkv_cols()), y);
        }
        let norm = self.vector(r, &block.name("attn_norm"));
        if !self.packs_for(shape, &name) {
            let operands = Operands { weight: &name, x: step.x, y, epilogue: Epilogue::Store };
            self.product(r, shape, step, operands, norm);
            return;
        }
        let (x, fold) = match step.unscaled.filter(|_| block.follows) {
            Some(x) => (x.rows, Fold::Scale(x, c.rms_eps)),
            None => {
                let order = self.packed_order(shape, &name);
                let rows = Unpacked { label: block.name("attn_pack"), x: step.x, cols: c.hidden, norm, order };
                (self.pack(r, shape, step, rows), Fold::None)
            }
        };
        let operands = Operands { weight: &name, x, y: Output::Rows(y), epilogue: Epilogue::Store };
        self.tiled(r, shape, step, operands, fold);
    }

    /// Returns the buffer of a recurrent layer's output packed for the output projection, if that takes packed rows and they
    /// consist of whole blocks of columns.
    fn packed_mixed(&self, r: &mut Recording, shape: StepShape, block: &Block, width: u32) -> Option<Packed> {
        let (rows, order) = (shape.rows(), self.packed_order(shape, &block.name("o")));
        let packs = self.packs_for(shape, &block.name("o"))
            && order.is_written_by_products()
            && width.is_multiple_of(order.block_cols());
        packs.then(|| Packed { order, ..Self::packed(r, &format!("packed.{width}"), rows, width) })
    }

    /// Records a mixer's output projection, which is added to x.
    fn mixer_output(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, mixed: Mixed) {
        let name = block.name("o");
        let norm = self.row_norm(r, block);
        let (mixed, norm) = match mixed {
            Mixed::Rows(y) if self.packs_for(shape, &name) => {
                let cols = self.weight(&name).map_or(0, |w| w.cols);
                let order = self.packed_order(shape, &name);
                let rows = Unpacked { label: block.name("o_pack"), x: y, cols, norm, order };
                (Mixed::Packed(self.pack(r, shape, step, rows)), None)
            }
            mixed => (mixed, norm),
        };
        let after = self.vector(r, &block.name("attn_post_norm"));
        let next = self.vector(r, &block.name("mlp_norm"));
        self.add_output(r, shape, step, LastProduct { weight: &name, x: mixed, norm, after, next, factor: None });
    }

    /// Returns the norm of a mixer's output before its projection: that of state spaces which norm all heads together.
    fn row_norm(&self, r: &mut Recording, block: &Block) -> Option<Range> {
        let whole = self.config.delta.is_some_and(|net| net.norms_rows());
        self.vector(r, &block.name("delta_norm")).filter(|_| whole)
    }

    /// Records the last product of a mixer or an MLP, whose output is added to the residual stream: directly, or after a
    /// norm and the model's factor.
    fn add_output(&self, r: &mut Recording, shape: StepShape, step: &Step, product: LastProduct<'_>) {
        let LastProduct { weight, x, norm, after, next, factor } = product;
        let c = self.config;
        let staged = after.is_some() || factor.is_some() || c.residual_scale != 1.0;
        // Other products of this kind, and the block that drafts, are computed whole by each device that has them.
        let of_layer = weight.starts_with("layers.") && [".o", ".down"].iter().any(|end| weight.ends_with(end));
        let shared = self.stage.rank.is_some() && of_layer;
        let direct = !staged && !shared;
        let (y, epilogue) = if direct { (step.x, Epilogue::Residual) } else { (step.branch, Epilogue::Store) };
        let fold = if direct { Self::leaves(step.unscaled, next) } else { Fold::None };
        self.output(r, shape, step, Operands { weight, x, y, epilogue }, (norm, fold));
        if shared {
            self.all_reduce(r, shape, step, weight, (step.branch, if staged { step.summed } else { step.x }));
        }
        if staged {
            let x = if shared { step.summed } else { step.branch };
            self.add_branch(r, shape, step, format!("{weight}_add"), (x, after, factor));
        }
    }

    /// Records the addition of a branch's output `x` to the residual stream: after an optional norm, times the model's factor
    /// and an optional one of the layer.
    fn add_branch(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        label: String,
        (x, norm, factor): (Activations, Option<Range>, Option<Range>),
    ) {
        let c = self.config;
        let branch = Branch { x, norm, beside: None, epsilon: c.rms_eps, scale: c.residual_scale };
        let flow = step.flow(Some(x.range), Some(step.x.range));
        let tags = BranchFlow { flow, ..BranchFlow::NONE };
        r.call(stream::add_branch(label, (shape.rows(), c.hidden), branch, (step.x, factor), tags, step.fault));
    }

    /// Records the product of rows that are packed or not. The norm is for rows of floats, the fold for packed rows.
    fn output(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        operands: Operands<'_, Mixed, Activations>,
        (norm, fold): (Option<Range>, Fold),
    ) {
        let Operands { weight, x, y, epilogue } = operands;
        match x {
            Mixed::Rows(x) => self.product(r, shape, step, Operands { weight, x, y, epilogue }, norm),
            Mixed::Packed(x) => {
                let operands = Operands { weight, x, y: Output::Rows(y), epilogue };
                self.tiled(r, shape, step, operands, fold);
            }
        }
    }

    /// Returns a layer's factor of the residual stream for the stage that ends the layer: its MLP, or what follows it if the
    /// layer has inputs that depend on the token.
    fn layer_factor(&self, r: &mut Recording, block: &Block, ends_with_mlp: bool) -> Option<Range> {
        let ends = self.config.layer_inputs.is_none() == ends_with_mlp;
        self.vector(r, &block.name("layer_scale")).filter(|_| ends)
    }
}

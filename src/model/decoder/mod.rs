//! Decoders: a batch shape in, a `Recording` out. Layers are made of a mixer (attention or a gated delta net) and an
//! MLP (dense or of experts), each in a file of its own, by what the configuration says and never by a model's name.
//! Deliberately absent: memory, devices, and which queue runs what.

mod attention;
mod delta;
mod experts;
mod head;
mod mlp;
mod mtp;
mod products;
mod score;
mod tuning;
mod weights;

pub use delta::delta_heads;
pub use tuning::Tuning;

use super::checkpoint::{WeightKind, WeightSpec};
use super::config::{Dtype, LayerKind, MlpKind, ModelConfig};
use crate::kernels::embed;
use crate::kernels::gemm::{Activations, Epilogue};
use crate::kernels::layout::StateLayout;
use crate::kernels::panel::Fold;
use crate::kernels::recording::{Range, Recording};
use crate::kernels::sampling;
use crate::kernels::tags::{self, Flow, Generations};
use crate::kernels::tiled::{Output, Packed};
use crate::memory::pack::Format;
use std::cell::RefCell;

/// What a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// One token of each of `rows` slots.
    Decode {
        /// Rows of the bucket.
        rows: u32,
    },
    /// The layers over up to `rows` tokens of one prompt or several.
    Prefill {
        /// Rows of the bucket.
        rows: u32,
    },
    /// A token of each of up to `rows` prompts, drawn from their last rows after a prefill; with drafts behind it where
    /// tokens are drafted.
    Head {
        /// Rows of the bucket.
        rows: u32,
    },
    /// How probable the tokens behind up to `rows` rows of a prompt are, after a prefill: of its first rows, and run again
    /// of those behind them.
    Score {
        /// Rows at a time.
        rows: u32,
    },
    /// The next token of each of `sequences` slots and those drafted behind it: as many are drawn as the drafts are
    /// right, and one more.
    Verify {
        /// Sequences of the bucket.
        sequences: u32,
        /// Drafts of each.
        drafts: u32,
    },
}

impl Shape {
    /// The recording's name.
    pub fn name(self) -> String {
        match self {
            Shape::Decode { rows } => format!("decode.{rows}"),
            Shape::Prefill { rows } => format!("prefill.{rows}"),
            Shape::Head { rows } => format!("head.{rows}"),
            Shape::Score { rows } => format!("score.{rows}"),
            Shape::Verify { sequences, drafts } => format!("verify.{sequences}.{drafts}"),
        }
    }

    /// Rows of activations.
    pub fn rows(self) -> u32 {
        match self {
            Shape::Decode { rows } | Shape::Prefill { rows } | Shape::Head { rows } | Shape::Score { rows } => rows,
            Shape::Verify { sequences, drafts } => sequences * (drafts + 1),
        }
    }
}

/// What names of buffers of recurrent state begin with.
pub const RECURRENT: &str = "delta.";
/// What names of buffers of tagged words begin with.
pub const TAGGED: &str = "tagged.";

/// Sizes of the ring that tokens are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Steps before an entry is used again.
    pub steps: u32,
    /// Rows of a step.
    pub rows: u32,
}

impl RingLayout {
    /// Bytes of the ring.
    pub fn bytes(self) -> u64 {
        sampling::ring_bytes(self.steps, self.rows)
    }
}

/// A weight as it lies in memory: whole, or in row ranges where one allocation cannot hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Buffer name.
    pub name: String,
    /// First row of the weight.
    pub first_row: u32,
    /// Rows.
    pub rows: u32,
    /// Bytes, padding included.
    pub bytes: u64,
}

/// Floats of a row of activations: kernels read them 32 at a time at most.
pub fn stride(width: u32) -> u32 {
    width.next_multiple_of(32)
}

/// Elements of a padded row of weights: kernels read eight values at a time.
pub fn padded(elements: u32) -> u32 {
    elements.next_multiple_of(8)
}

/// The storage format of a weight.
pub fn format(dtype: Dtype) -> Format {
    match dtype {
        Dtype::Bf16 => Format::Bf16,
        Dtype::F16 => Format::F16,
        Dtype::F32 => Format::F32,
    }
}

/// The range from float `first` on.
fn floats_from(range: Range, first: u32) -> Range {
    let offset = u64::from(first) * 4;
    range.part(offset, range.bytes - offset)
}

/// Where the product of the rows of W from `first` on goes.
fn outputs_from(y: Activations, first: u32, epilogue: Epilogue) -> Activations {
    let first = if epilogue == Epilogue::SwiGlu { first / 2 } else { first };
    Activations { range: floats_from(y.range, first), ..y }
}

/// Everything that recordings of a replica depend on.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// Its weights, for formats and names.
    pub weights: &'a [WeightSpec],
    /// Largest buffer of the device.
    pub max_buffer_bytes: u64,
    /// Device state.
    pub state: StateLayout,
    /// KV pages.
    pub pages: u32,
    /// Of keys and values: f16 or f32.
    pub kv_format: Format,
    /// Cells of recurrent state: one a slot, then those of snapshots.
    pub cells: u32,
    /// Tokens that are drafted at a time, at most; 0: none.
    pub drafts: u32,
    /// Token ring.
    pub ring: RingLayout,
    /// Longest context, tokens.
    pub context: u32,
    /// Device choices.
    pub tuning: Tuning,
}

/// Buffers that the layers of a step share.
struct Step {
    rows: Range,
    x: Activations,
    qkv: Activations,
    attention: Activations,
    /// What a gated delta net's merged projection makes, and what the net makes of it.
    projected: Activations,
    mixed: Activations,
    mlp: Activations,
    /// The router's logits, and what experts have between their products.
    router: Activations,
    middle: Activations,
    partials: Range,
    counters: Range,
    rope: Range,
    pages: Range,
    chunk: Range,
    logits: Activations,
    fault: Range,
    /// Of the tagged buffers; `None` where nothing is tagged.
    generations: Option<RefCell<Generations>>,
}

impl Step {
    fn is_logits(&self, range: Range) -> bool {
        range.buffer == self.logits.range.buffer
    }

    /// The tags of a call that reads `input` and writes `output`.
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

/// A layer within its decoder.
struct Block {
    /// What its weights' names begin with.
    prefix: String,
    /// Whether the rows it reads were left unscaled by the product before, where norms are folded: all but the first.
    follows: bool,
    /// The norm behind it, if another layer follows.
    next_norm: String,
    /// Whether it is the first of its kind in the step.
    first: bool,
}

impl Block {
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }
}

/// A mixer's output.
enum Mixed {
    /// Rows of floats.
    Rows(Activations),
    /// Packed for the next product already.
    Packed(Packed),
}

impl Decoder<'_> {
    /// Rows of so many floats; no memory where a model has none of them.
    fn activations(recording: &mut Recording, name: &str, rows: u32, width: u32) -> Activations {
        if width == 0 {
            return Activations { range: recording.buffer("step", 4).none(), stride: 0 };
        }
        let stride = stride(width);
        Activations { range: recording.buffer(name, u64::from(rows) * u64::from(stride) * 4), stride }
    }

    /// Whether the activations of a shape's step are tagged. Products wait for whole chunks of 32 columns. With a single
    /// layer of attention, splits' partial results, which are not cleared, could not be told from those of the step before.
    fn carries(&self, shape: Shape) -> bool {
        let c = self.config;
        let attention = c.layers_of(LayerKind::FullAttention).count();
        let heads = self.heads();
        let mut widths = vec![c.hidden];
        if attention > 0 {
            widths.extend([heads.q * heads.dim, c.qkv_rows()]);
        }
        if let Some(net) = c.delta {
            widths.extend([net.projected_rows(), net.value_rows()]);
        }
        if c.mlp_kinds.contains(&MlpKind::Dense) {
            widths.push(c.intermediate);
        }
        let whole = c.experts.is_none_or(|experts| self.expert_shape(experts).middle_is_whole());
        self.tuning.tags
            && matches!(shape, Shape::Decode { .. })
            && !self.packs(shape)
            && whole
            && attention != 1
            && widths.iter().all(|width| width.is_multiple_of(32))
            && self.weights.iter().all(|w| matches!(w.kind, WeightKind::Vector) || self.in_fragments(w))
    }

    /// The recording of a step.
    pub fn record(&self, shape: Shape) -> Recording {
        let c = self.config;
        let mut recording = Recording::new(shape.name());
        let r = &mut recording;
        let rows = shape.rows();
        let prefill = matches!(shape, Shape::Prefill { .. });
        let heads = self.heads();
        // Tagged words and plain ones never share memory: any plain word has some tag.
        let carries = self.carries(shape);
        let named = |name: &str| if carries { format!("{TAGGED}{name}") } else { name.to_owned() };
        // Who comes behind the layers of a step of prompts reads what the largest one has left.
        let behind = matches!(shape, Shape::Head { .. } | Shape::Score { .. });
        let x_rows = if behind { self.state.chunk } else { rows };
        let (projected, mixed) = c.delta.map_or((0, 0), |net| (net.projected_rows(), net.value_rows()));
        let experts = c.experts.map(|experts| self.expert_shape(experts));
        let chunk = match shape {
            Shape::Verify { sequences, drafts } => self.verify_rows(r, sequences, drafts + 1),
            _ => self.state.chunk(r),
        };
        let step = Step {
            rows: r.buffer("rows", embed::rows_bytes(x_rows)),
            x: Self::activations(r, &named("x"), x_rows, c.hidden),
            qkv: Self::activations(r, &named("qkv"), rows, c.qkv_rows()),
            attention: Self::activations(r, &named("attention.output"), rows, heads.q * heads.dim),
            projected: Self::activations(r, &named("in_proj.output"), rows, projected),
            mixed: Self::activations(r, &named("mixer.output"), rows, mixed),
            mlp: Self::activations(r, &named("mlp.hidden"), rows, c.intermediate),
            router: Self::activations(r, &named("router.logits"), rows, experts.map_or(0, |e| e.logits())),
            middle: Self::activations(r, &named("experts.middle"), rows, experts.map_or(0, |e| e.middle_stride())),
            logits: Self::activations(r, "logits", if prefill { 1 } else { rows }, c.vocab),
            fault: self.state.fault(r),
            generations: carries.then(RefCell::default),
            partials: r.buffer(
                &named("attention.partials"),
                heads.partial_floats(self.tuning.splits) * 4 * u64::from(self.state.rows),
            ),
            counters: r.buffer("attention.counters", u64::from(heads.kv) * u64::from(self.state.rows) * 4),
            rope: r.buffer("rope", self.rope_bytes()),
            pages: self.state.pages(r),
            chunk,
        };
        if !behind {
            if carries {
                self.clear_tags(r, &step);
            }
            self.embed(r, shape, &step);
            for layer in 0..c.layers {
                self.layer(r, shape, &step, layer);
            }
        }
        match shape {
            Shape::Prefill { .. } => {
                self.mark(r, shape, &step);
                if self.drafts() {
                    self.draft_prompts(r, shape, &step);
                }
            }
            Shape::Score { .. } => self.score(r, shape, &step),
            Shape::Decode { .. } | Shape::Head { .. } | Shape::Verify { .. } => self.head(r, shape, &step),
        }
        tags::number_calls(&mut recording);
        debug_assert_eq!(tags::check(&recording), Ok(()));
        recording
    }

    /// Zeroes the step's tagged activations but for x, whose first words have a tag that no others have. It is one call
    /// before a barrier that stands there anyway: attention reads which rows there are.
    fn clear_tags(&self, r: &mut Recording, step: &Step) {
        let all = [step.qkv, step.attention, step.projected, step.mixed, step.mlp, step.router, step.middle];
        let buffers: Vec<Range> = all.iter().map(|of| of.range).filter(|range| range.bytes > 0).collect();
        r.call(tags::clear_tags("clear_tags".to_owned(), &buffers));
    }

    fn layer(&self, r: &mut Recording, shape: Shape, step: &Step, layer: u32) {
        let c = self.config;
        let at = layer as usize;
        let kind = c.layer_kinds[at];
        let block = Block {
            prefix: format!("layers.{layer}"),
            follows: layer > 0,
            next_norm: format!("layers.{}.attn_norm", layer + 1),
            first: c.layer_kinds.iter().position(|other| *other == kind) == Some(at),
        };
        let mixed = match kind {
            LayerKind::FullAttention => self.attention(r, shape, step, &block, &format!("kv.{layer}")),
            LayerKind::GatedDelta => self.delta(r, shape, step, &block, &format!("{RECURRENT}{layer}")),
        };
        self.mixer_output(r, shape, step, &block, mixed);
        match c.mlp_kinds[at] {
            MlpKind::Dense => self.mlp(r, shape, step, &block),
            MlpKind::Experts => self.experts(r, shape, step, &block),
        }
    }

    /// The product behind a layer's first norm.
    fn mixer_input(&self, r: &mut Recording, shape: Shape, step: &Step, block: &Block, part: &str, y: Activations) {
        let c = self.config;
        let name = block.name(part);
        let norm = self.vector(r, &block.name("attn_norm"));
        if !self.packs_for(shape, &name) {
            self.product(r, shape, &name, step, step.x, y, norm, Epilogue::Store);
            return;
        }
        match self.unscaled(r, shape).filter(|_| block.follows) {
            Some(x) => {
                let fold = Fold::Scale(x, c.rms_eps);
                self.tiled(r, shape, &name, step, x.rows, Output::Rows(y), Epilogue::Store, fold);
            }
            None => {
                let x = self.pack(r, shape, step, block.name("attn_pack"), step.x, c.hidden, norm);
                self.tiled(r, shape, &name, step, x, Output::Rows(y), Epilogue::Store, Fold::None);
            }
        }
    }

    /// The product behind a layer's mixer, added to x.
    fn mixer_output(&self, r: &mut Recording, shape: Shape, step: &Step, block: &Block, mixed: Mixed) {
        let name = block.name("o");
        let packed = match mixed {
            Mixed::Rows(y) if !self.packs_for(shape, &name) => {
                self.product(r, shape, &name, step, y, step.x, None, Epilogue::Residual);
                return;
            }
            Mixed::Rows(y) => {
                let cols = self.weight(&name).map_or(0, |w| w.cols);
                self.pack(r, shape, step, block.name("o_pack"), y, cols, None)
            }
            Mixed::Packed(packed) => packed,
        };
        let next = self.vector(r, &block.name("mlp_norm"));
        let fold = Self::leaves(self.unscaled(r, shape), next);
        self.tiled(r, shape, &name, step, packed, Output::Rows(step.x), Epilogue::Residual, fold);
    }
}

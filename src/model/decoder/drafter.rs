//! A draft model: a second, smaller model of the same vocabulary that drafts tokens for the model that verifies them, or a
//! draft head (`draft_head`). Its keys and values are in the same pages as further layers, so it computes the tokens of every
//! prompt's step, and those of steps that may be followed by drafts.
//!
//! Not here: which models can draft for which (`model::draft`), and the model's own drafting block (`mtp`).

use super::weights::ORDERS;
use super::{Decoder, Part, StepShape};
use crate::kernels::draft::{self, SlotsFrom};
use crate::kernels::embed;
use crate::kernels::gemm::take_last;
use crate::kernels::recording::{Op, Range, Recording};
use crate::kernels::sampling;
use crate::kernels::shaders::{DraftRowsArgs, StoreDraftArgs, TakeLastArgs};
use crate::kernels::tags;
use crate::memory::pack::Packing;
use crate::model::checkpoint::WeightSpec;

/// The prefix of the names of a draft model's buffers. What it shares with the model has no prefix.
pub const DRAFTER: &str = "drafter.";

/// The names of the buffers that a draft model shares with the model: slots and page tables, tokens by position, and the
/// number of the step.
const SHARED: [&str; 3] = ["state", "history", "step"];

/// In a drafter's own recording: the prefix of the names of the model's buffers.
pub(super) const MODEL: &str = "model.";

/// The name of the buffer with the tokens of a draft head's vocabulary.
pub const TOKEN_IDS: &str = "token_ids";

/// What a drafter drafts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrafterKind<'a> {
    /// The sequence's tokens: a model of its own.
    Model,
    /// Hidden states of the model that it drafts for.
    Head {
        /// The tokens of that model that the head's vocabulary stands for.
        token_ids: &'a [u32],
    },
}

/// A draft model or a draft head within a decoder.
#[derive(Clone, Debug)]
pub struct Drafter<'a> {
    /// What it drafts from.
    pub kind: DrafterKind<'a>,
    /// The drafter's decoder. It has the state, number of pages, KV format and context of the model that it drafts
    /// for.
    pub decoder: Box<Decoder<'a>>,
    /// The maximum number of sequences of a verification step.
    pub sequences: u32,
}

/// A weight of a model or of its draft model, with its place in memory.
#[derive(Clone, Debug)]
pub struct PlacedWeight<'a> {
    /// The weight.
    pub spec: &'a WeightSpec,
    /// Its packing.
    pub packing: Packing,
    /// Its buffers.
    pub parts: Vec<Part>,
}

/// Returns the name of a buffer of a drafter's own recording beside those of the model.
pub fn drafter_name(name: &str) -> String {
    match name.strip_prefix(MODEL) {
        Some(of_model) => of_model.to_owned(),
        None if SHARED.contains(&name) => name.to_owned(),
        None => format!("{DRAFTER}{name}"),
    }
}

impl<'a> Decoder<'a> {
    /// Returns the weights of the model and of its draft model.
    pub fn placed_weights(&self) -> Vec<PlacedWeight<'a>> {
        let of = |decoder: &Decoder<'a>, spec: &'a WeightSpec| PlacedWeight {
            spec,
            packing: decoder.packing(spec),
            parts: decoder.parts(spec),
        };
        let mut placed: Vec<PlacedWeight<'a>> = self.weights.iter().map(|spec| of(self, spec)).collect();
        if let Some(drafter) = &self.drafter {
            placed.extend(drafter.decoder.weights.iter().map(|spec| {
                let mut placed = of(&drafter.decoder, spec);
                placed.parts.iter_mut().for_each(|part| part.name = drafter_name(&part.name));
                placed
            }));
        }
        placed
    }
}

impl Decoder<'_> {
    /// Returns the rotary tables of the model and of its draft model, by the names of their buffers.
    pub fn placed_rope_tables(&self) -> Vec<(String, Vec<f32>)> {
        let drafting = self.drafter.iter().flat_map(|drafter| drafter.decoder.rope_tables());
        let drafting = drafting.map(|(name, table)| (drafter_name(&name), table));
        self.rope_tables().into_iter().chain(drafting).collect()
    }

    /// Returns the tables of words of the model and of its drafter, by the names of their buffers: the orders of columns, and
    /// the tokens of a draft head's vocabulary.
    pub fn placed_tables(&self) -> Vec<(String, Vec<u32>)> {
        let drafting = self.drafter.iter().flat_map(|drafter| {
            let token_ids = match drafter.kind {
                DrafterKind::Head { token_ids } => token_ids.to_vec(),
                DrafterKind::Model => Vec::new(),
            };
            [(ORDERS, drafter.decoder.orders()), (TOKEN_IDS, token_ids)]
                .map(|(name, table)| (drafter_name(name), table))
        });
        [(ORDERS.to_owned(), self.orders())].into_iter().chain(drafting).collect()
    }

    /// Returns the bytes of a page of keys, which equal those of its values, of each layer with keys of its own.
    pub fn cache_page_bytes(&self) -> Vec<u64> {
        let layers = self.config.cached_layers();
        layers.map(|layer| self.heads(self.config.attention_of[layer as usize]).page_bytes()).collect()
    }

    /// Returns the draft model of the decoder, if it has one.
    fn draft_model(&self) -> Option<&Drafter<'_>> {
        self.drafter.as_ref().filter(|drafter| drafter.kind == DrafterKind::Model)
    }

    /// Whether a draft model leaves out decode steps, and computes their tokens later ([`Decoder::catch_up`]), so that it
    /// costs nothing while nothing is drafted. If the model is split over several devices, it computes them before each step.
    pub fn drafter_catches_up(&self) -> bool {
        self.stage.is_whole() && self.draft_model().is_some()
    }

    /// Returns the recording of a draft model's layers over up to `rows` tokens of sequences that decode, described like a
    /// prompt's step; `None` if it does not catch up.
    pub fn catch_up(&self, rows: u32) -> Option<Recording> {
        let drafter = self.draft_model().filter(|_| self.drafter_catches_up())?;
        let shape = StepShape::Prefill { rows };
        let mut pass = Recording::new(shape.name());
        drafter.decoder.follow_prompts(&mut pass, shape);
        let mut recording = Recording::new(format!("catch_up.{rows}"));
        recording.append(pass, drafter_name);
        tags::number_calls(&mut recording);
        Some(recording)
    }

    /// Records what a draft model does before the layers of a step: drafts before a verification step, unless it has drafted
    /// behind the step before ([`Decoder::run_drafter_behind`]). In a prompt's step it only computes its keys and values, and
    /// also before a decode step that a verification step may follow, unless it catches up.
    pub(super) fn run_drafter(&self, r: &mut Recording, shape: StepShape) {
        let Some(drafter) = self.draft_model() else { return };
        let own = &drafter.decoder;
        let mut pass = Recording::new(shape.name());
        let batch = (own.state.batch(&mut pass), SlotsFrom::Batch);
        match shape {
            StepShape::Prefill { .. } => own.follow_prompts(&mut pass, shape),
            StepShape::Decode { rows } if !self.drafter_catches_up() && rows <= drafter.sequences => {
                own.draft_alone(&mut pass, batch, rows, 0);
            }
            StepShape::Verify { sequences, drafts } if self.stage.is_whole() => {
                own.draft_alone(&mut pass, batch, sequences, drafts);
            }
            StepShape::Verify { .. } | StepShape::Decode { .. } => {}
            StepShape::Head { .. } | StepShape::Score { .. } | StepShape::Pool { .. } => {}
        }
        r.append(pass, drafter_name);
    }

    /// Records what a draft model does behind the draw of tokens if the model is split over several devices: it drafts for the
    /// next verification step. The first device embeds the drafts before the device of the draft model begins that step, so
    /// they must be in the slots by then.
    pub(super) fn run_drafter_behind(&self, r: &mut Recording, shape: StepShape) {
        let Some(drafter) = self.draft_model().filter(|_| !self.stage.is_whole()) else { return };
        let (rows, sequences, each, drafts) = match shape {
            StepShape::Head { rows } => ("head.rows", rows, 1, self.drafts),
            StepShape::Verify { sequences, drafts } => ("rows", sequences, drafts + 1, drafts),
            StepShape::Prefill { .. } | StepShape::Decode { .. } => return,
            StepShape::Score { .. } | StepShape::Pool { .. } => return,
        };
        // No verification step has more sequences.
        if sequences > drafter.sequences {
            return;
        }
        let mut pass = Recording::new(shape.name());
        let table = pass.buffer(&format!("{MODEL}{rows}"), embed::rows_bytes(sequences * each));
        drafter.decoder.draft_alone(&mut pass, (table, SlotsFrom::Rows { each }), sequences, drafts);
        r.append(pass, drafter_name);
    }

    /// Records a draft model's layers over the rows of a prompt's step.
    fn follow_prompts(&self, r: &mut Recording, shape: StepShape) {
        let chunk = self.state.chunk(r);
        let step = self.buffers(r, shape, shape.rows(), chunk, false);
        self.embed(r, shape, &step);
        self.layers(r, shape, &step);
    }

    /// Records a draft model's passes over the last two tokens of each of `sequences` sequences, whose slots are in the table
    /// `batch`, and over its own drafts. The last draft itself is not computed here, but in the next step if it was accepted.
    fn draft_alone(&self, r: &mut Recording, (batch, from): (Range, SlotsFrom), sequences: u32, drafts: u32) {
        let c = self.config;
        let layout = self.state.chunk_layout();
        let (history, stride) = self.history(r);
        for index in 0..drafts.max(1) {
            let first = r.ops.len();
            let slots = self.state.slots(r);
            let next = self.descriptor(r, "draft.chunk");
            let (last_at, tokens_at) = (layout.last(0), layout.token(0));
            let args = DraftRowsArgs { slots, batch, history, next, stride, last_at, tokens_at };
            r.call(draft::draft_rows("draft_rows".to_owned(), sequences, index, from, args));
            // Like rows to verify, whose activations can be tagged.
            let each = if index == 0 { 2 } else { 1 };
            let shape = StepShape::Verify { sequences, drafts: each - 1 };
            let carries = self.carries(shape);
            let shape = if carries { shape } else { StepShape::Head { rows: sequences * each } };
            let step = self.buffers(r, shape, shape.rows(), next, carries);
            if carries {
                self.clear_tags(r, &step);
            }
            self.embed(r, shape, &step);
            self.layers(r, shape, &step);
            if drafts == 0 {
                return name_pass(&mut r.ops[first..], index);
            }
            let head_x = Self::activations(r, "head.x", sequences, c.hidden);
            let head_rows = r.buffer("head.rows", embed::rows_bytes(sequences));
            let args = TakeLastArgs {
                x: step.x.range,
                rows: step.rows,
                chunk: step.chunk,
                head_x: head_x.range,
                head_rows,
                x_stride: step.x.stride,
                last_at,
            };
            r.call(take_last("draft_last".to_owned(), sequences, args));
            let shape = StepShape::Head { rows: sequences };
            let step = self.buffers(r, shape, sequences, next, false);
            let logits = Self::activations(r, "logits", sequences, c.vocab);
            self.lm_head(r, shape, &step, head_x, "final_norm", logits);
            let partials = self.best(r, sequences, logits, "draft.partials", "draft_argmax");
            let parts = sampling::ARGMAX_PARTS;
            let token_ids = slots.none();
            let args = StoreDraftArgs { partials, rows: head_rows, slots, token_ids, row_count: sequences, parts };
            r.call(draft::store_draft("store_draft".to_owned(), index, args));
            name_pass(&mut r.ops[first..], index);
        }
    }
}

/// Names the calls of a draft model's pass, so that they are told from those of the model and of its other passes.
fn name_pass(ops: &mut [Op], index: u32) {
    for op in ops {
        if let Op::Call(call) = op {
            call.label = format!("{DRAFTER}{index}.{}", call.label);
        }
    }
}

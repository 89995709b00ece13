//! Dense decoders (Qwen3, Llama 3): a batch shape in, a `Recording` out.
//! Deliberately absent: memory, devices, and which queue runs what.

use super::checkpoint::{WeightKind, WeightSpec};
use super::config::{Dtype, ModelConfig};
use crate::kernels::attention::{self, Heads};
use crate::kernels::embed::{self, RowsFrom, Table};
use crate::kernels::flash;
use crate::kernels::flash_decode::{self, Split};
use crate::kernels::gemm::{Activations, Epilogue, Matrix, Product, take_last};
use crate::kernels::layout::StateLayout;
use crate::kernels::panel::{self, Fold, Unscaled};
use crate::kernels::recording::{Range, Recording};
use crate::kernels::sampling;
use crate::kernels::shaders::{
    AdvanceArgs, AppendArgs, ArgmaxArgs, AttentionArgs, EmbedRowsArgs, FlashArgs, MarkPromptArgs, SampleArgs,
    TakeLastArgs,
};
use crate::kernels::skinny::{self, Matrices};
use crate::kernels::tags::{Flow, Generations};
use crate::kernels::tiled::{self, Output, Packed, Tile, Tiled};
use crate::memory::pack::{Format, Layout, Packing};
use std::cell::RefCell;
use std::collections::BTreeMap;

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
    /// A token of each of up to `rows` prompts, drawn from their last rows after a prefill.
    Head {
        /// Rows of the bucket.
        rows: u32,
    },
}

impl Shape {
    /// The recording's name.
    pub fn name(self) -> String {
        match self {
            Shape::Decode { rows } => format!("decode.{rows}"),
            Shape::Prefill { rows } => format!("prefill.{rows}"),
            Shape::Head { rows } => format!("head.{rows}"),
        }
    }

    /// Rows of activations.
    pub fn rows(self) -> u32 {
        match self {
            Shape::Decode { rows } | Shape::Prefill { rows } | Shape::Head { rows } => rows,
        }
    }
}

/// What names of buffers of tagged words begin with.
pub const TAGGED: &str = "tagged.";

/// Rows up to which products take rows of floats: every workgroup reads all of them, which narrow models
/// bear longer than the packing of rows as a stage of its own.
const MOST_SKINNY_ROWS: u32 = 8;
/// As [`MOST_SKINNY_ROWS`], for models of at most [`NARROW`] hidden values.
const MOST_SKINNY_ROWS_NARROW: u32 = 16;
/// See [`MOST_SKINNY_ROWS_NARROW`].
const NARROW: u32 = 2048;
/// Workgroups that share a tile of a prompt's attention, at most.
const MOST_PROMPT_SPLITS: u32 = 16;
/// Rows of a prompt chunk up to which its products are those of a decode batch.
const MOST_PANEL_ROWS: u32 = 64;

/// Choices that depend on the device and not on the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Most threads of a `gemv` workgroup.
    pub gemv_threads: u32,
    /// Rows of a weight matrix from which on a `gemv` workgroup computes four of them, not two.
    pub gemv_wide_from: u32,
    /// Most threads of an `attention` workgroup.
    pub attention_threads: u32,
    /// Most threads of a `flash_decode` workgroup, a multiple of 32.
    pub flash_threads: u32,
    /// As `flash_threads`, for batches that give every processor a workgroup.
    pub flash_threads_many: u32,
    /// Workgroups a processor that a batch's attention is split in along its contexts, where they are long enough.
    pub spread: u32,
    /// Pages for each 32 invocations of a `flash_decode` workgroup that a split along a context leaves it, at least.
    pub spread_pages: u32,
    /// Processors that run workgroups side by side.
    pub processors: u32,
    /// Shared memory of a workgroup, bytes.
    pub shared_bytes: u32,
    /// Workgroups that a decoding sequence's attention is split in along its context.
    pub splits: u32,
    /// Threads of an `argmax` workgroup.
    pub argmax_threads: u32,
    /// Threads of the sampler.
    pub sample_threads: u32,
    /// Weights in fragment order, and how their blocks are multiplied; `None`: row after row.
    pub fragments: Option<Matrices>,
    /// Shapes of `skinny`'s workgroups for one row, by rows and columns of W, where the rule's are not the best.
    pub skinny: BTreeMap<(u32, u32), skinny::Config>,
    /// Shapes of `panel`'s workgroups by rows and columns of W, where the rule's are not the best.
    pub panel: BTreeMap<(u32, u32), panel::Config>,
    /// Tiles of `tiled` for a batch, by rows and columns of W, in place of `panel`.
    pub tiles: BTreeMap<(u32, u32), Tile>,
    /// Rows of a batch up to which norms are folded into the products around them; narrow models take twice as many.
    pub fold_rows: u32,
    /// Whether a decode step's activations carry their readiness instead of waiting at barriers.
    pub tags: bool,
    /// For tests: the last product of the layers waits for words that are never written.
    pub wrong_tag: bool,
    /// For tests: the fault word is set before this decode plan, counted from 1; 0 never.
    pub fault_at: u32,
}

impl Tuning {
    /// Applies `key=value`; false if there is no such key or the value is no number. The key
    /// `skinny.ROWSxCOLUMNS` of W takes `threads/tiles/ahead`, `panel.ROWSxCOLUMNS` takes
    /// `threads/tiles/ahead/blocks`, `tiles.ROWSxCOLUMNS` a tile's name.
    pub fn set(&mut self, change: &str) -> bool {
        let Some((key, value)) = change.split_once('=') else { return false };
        if let Some((rows, cols)) = key.strip_prefix("tiles.").and_then(|shape| shape.split_once('x')) {
            let tile = match value {
                "wide" => Tile::Wide,
                "half" => Tile::Half,
                "square" => Tile::Square,
                _ => return false,
            };
            let (Ok(rows), Ok(cols)) = (rows.parse(), cols.parse()) else { return false };
            self.tiles.insert((rows, cols), tile);
            return true;
        }
        if let Some((rows, cols)) = key.strip_prefix("panel.").and_then(|shape| shape.split_once('x')) {
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let (Ok(rows), Ok(cols), &[threads, tiles, ahead, blocks]) = (rows.parse(), cols.parse(), &numbers[..])
            else {
                return false;
            };
            if threads % 32 != 0 || [threads, tiles, ahead, blocks].contains(&0) {
                return false;
            }
            self.panel.insert((rows, cols), panel::Config { threads, tiles, ahead, blocks });
            return true;
        }
        if let Some((rows, cols)) = key.strip_prefix("skinny.").and_then(|shape| shape.split_once('x')) {
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let (Ok(rows), Ok(cols), &[threads, tiles, ahead]) = (rows.parse(), cols.parse(), &numbers[..]) else {
                return false;
            };
            if threads % 32 != 0 || [threads, tiles, ahead].contains(&0) {
                return false;
            }
            self.skinny.insert((rows, cols), skinny::Config { threads, tiles, ahead });
            return true;
        }
        let Ok(value) = value.parse() else { return false };
        let place = match key {
            "gemv_threads" => &mut self.gemv_threads,
            "gemv_wide_from" => &mut self.gemv_wide_from,
            "attention_threads" => &mut self.attention_threads,
            "flash_threads" => &mut self.flash_threads,
            "flash_threads_many" => &mut self.flash_threads_many,
            "spread" => &mut self.spread,
            "fold_rows" => &mut self.fold_rows,
            "spread_pages" => &mut self.spread_pages,
            "splits" => &mut self.splits,
            "sample_threads" => &mut self.sample_threads,
            "fault_at" => &mut self.fault_at,
            "tags" => {
                self.tags = value != 0;
                return true;
            }
            "wrong_tag" => {
                self.wrong_tag = value != 0;
                return true;
            }
            "fragments" => {
                self.fragments = match value {
                    0 => None,
                    1 => Some(Matrices::ByHand),
                    _ => Some(Matrices::Cooperative),
                };
                return true;
            }
            _ => return false,
        };
        *place = value;
        true
    }
}

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
pub struct Dense<'a> {
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
    mlp: Activations,
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

impl Dense<'_> {
    /// Whether a weight is packed in fragment order, as all matrices of a checkpoint in bfloat16 are where the
    /// device reads that.
    fn in_fragments(&self, weight: &WeightSpec) -> bool {
        let is_matrix = |w: &WeightSpec| matches!(w.kind, WeightKind::Matrix);
        self.tuning.fragments.is_some()
            && is_matrix(weight)
            && self.weights.iter().all(|w| !is_matrix(w) || w.dtype == Dtype::Bf16)
    }

    /// How a weight is packed.
    pub fn packing(&self, weight: &WeightSpec) -> Packing {
        let row_major = |columns_multiple| Layout::RowMajor { columns_multiple };
        let (rows, cols, layout, format) = match weight.kind {
            WeightKind::Matrix if self.in_fragments(weight) => {
                (weight.rows, weight.cols, Layout::Fragments, Format::Bf16)
            }
            WeightKind::Matrix => (weight.rows, weight.cols, row_major(8), format(weight.dtype)),
            // A value a row, so that sources can interleave; the padding, as far as that of activations goes,
            // becomes zero.
            WeightKind::Vector => (stride(weight.rows), 1, row_major(1), Format::F32),
        };
        Packing { rows, cols, layout, format }
    }

    /// The buffers of a weight, none larger than the device's largest.
    pub fn parts(&self, weight: &WeightSpec) -> Vec<Part> {
        let packing = self.packing(weight);
        // Whole fragments, and an even number of rows, so that gate and up stay together.
        let unit = packing.rows_of_unit().max(2);
        let fit = u32::try_from(self.max_buffer_bytes / packing.row_bytes()).unwrap_or(u32::MAX) / unit * unit;
        let fit = fit.max(unit);
        let part = |name: String, first_row: u32, rows: u32| {
            let bytes = Packing { rows, ..packing }.bytes();
            Part { name, first_row, rows, bytes }
        };
        if packing.rows <= fit {
            return vec![part(weight.name.clone(), 0, packing.rows)];
        }
        (0..packing.rows.div_ceil(fit))
            .map(|i| part(format!("{}.part{i}", weight.name), i * fit, fit.min(packing.rows - i * fit)))
            .collect()
    }

    /// The heads of every attention layer.
    pub fn heads(&self) -> Heads {
        let c = self.config;
        Heads {
            q: c.heads,
            kv: c.kv_heads,
            dim: c.head_dim,
            rot: c.rope.rotary_dim,
            qk_norm: c.qk_norm,
            kv_format: self.kv_format,
        }
    }

    /// Bytes of the K (and of the V) pages of one layer.
    pub fn kv_bytes(&self) -> u64 {
        u64::from(self.pages) * self.heads().page_bytes()
    }

    /// Bytes of the table of cos and sin: `[context][rot / 2][2]` f32.
    pub fn rope_bytes(&self) -> u64 {
        u64::from(self.context) * u64::from(self.config.rope.rotary_dim) * 4
    }

    /// The table of cos and sin, scaled as the model's rope asks.
    pub fn rope_table(&self) -> Vec<f32> {
        let inv_freq = self.config.rope.inv_freq();
        let scale = self.config.rope.attention_scale();
        (0..self.context)
            .flat_map(|p| {
                inv_freq
                    .iter()
                    .flat_map(move |f| {
                        // The angle is rounded to f32 as transformers does; its cosine is not.
                        let angle = f64::from(p as f32 * f);
                        [angle.cos() as f32 * scale, angle.sin() as f32 * scale]
                    })
                    .collect::<Vec<f32>>()
            })
            .collect()
    }

    /// Threads of an attention workgroup: the most that the tuning and shared memory allow.
    fn attention_threads(&self) -> u32 {
        let heads = self.heads();
        // The last of several splits to arrive weighs all of them with a thread each.
        let least = (heads.dim / 8).next_power_of_two().max(self.tuning.splits).max(16);
        let mut threads = self.tuning.attention_threads.max(least);
        while threads > least && heads.shared_bytes(threads) > self.tuning.shared_bytes {
            threads /= 2;
        }
        threads
    }

    /// Whether prompts' attention runs on blocks.
    fn flashes(&self, matrices: Matrices) -> bool {
        flash::flash_serves(self.heads())
            && (matrices == Matrices::ByHand || self.tuning.shared_bytes >= flash::SHARED_BYTES)
    }

    /// Threads of a `flash_decode` workgroup.
    fn flash_threads(&self, rows: u32, matrices: Matrices) -> u32 {
        let many = rows * self.config.kv_heads > self.tuning.processors;
        let mut threads = if many { self.tuning.flash_threads_many } else { self.tuning.flash_threads };
        while threads > 32 && flash_decode::shared_bytes(self.heads(), threads, matrices) > self.tuning.shared_bytes {
            threads /= 2;
        }
        threads
    }

    /// How a batch's attention is shared out among its rows; a single row has it to itself.
    fn spread(&self, rows: u32, threads: u32) -> Option<flash_decode::Spread> {
        // The partial results have room for as many.
        let room = (self.tuning.splits.min(flash_decode::MOST_SPLITS) - 1) * rows;
        let units = (self.tuning.spread * self.tuning.processors / self.config.kv_heads).min(room);
        (rows > 1).then_some(flash_decode::Spread { units, least: (threads / 32 * self.tuning.spread_pages).max(1) })
    }

    fn weight(&self, name: &str) -> Option<&WeightSpec> {
        self.weights.iter().find(|w| w.name == name)
    }

    fn vector(&self, recording: &mut Recording, name: &str) -> Option<Range> {
        self.weight(name).map(|w| recording.buffer(name, u64::from(stride(w.rows)) * 4))
    }

    /// The parts of a matrix, each with its first row.
    fn matrix(&self, recording: &mut Recording, name: &str) -> Vec<(u32, Matrix)> {
        let weight = self.weight(name).unwrap_or_else(|| panic!("the checkpoint was opened with \"{name}\""));
        self.parts(weight)
            .into_iter()
            .map(|part| {
                let range = recording.buffer(&part.name, part.bytes);
                (part.first_row, Matrix { range, format: format(weight.dtype), rows: part.rows, cols: weight.cols })
            })
            .collect()
    }

    fn activations(recording: &mut Recording, name: &str, rows: u32, width: u32) -> Activations {
        let stride = stride(width);
        Activations { range: recording.buffer(name, u64::from(rows) * u64::from(stride) * 4), stride }
    }

    fn gemv_threads(&self, cols: u32) -> u32 {
        cols.div_ceil(8).next_power_of_two().clamp(32.min(self.tuning.gemv_threads), self.tuning.gemv_threads)
    }

    /// Rows of W a workgroup: four share each load of x, and of the norm's weights, where there are enough of
    /// them to fill the device.
    fn gemv_rows(&self, rows: u32, norm: bool) -> u32 {
        let from = if norm { self.tuning.gemv_wide_from / 4 } else { self.tuning.gemv_wide_from };
        if rows >= from { 4 } else { 2 }
    }

    /// Whether the activations of a shape's step carry their readiness: products wait for whole chunks of 32
    /// columns, and with a single layer a step's words could not be told from those of the step before.
    fn carries(&self, shape: Shape) -> bool {
        let c = self.config;
        let heads = self.heads();
        let widths = [c.hidden, heads.q * heads.dim, (heads.q + 2 * heads.kv) * heads.dim, c.intermediate];
        self.tuning.tags
            && matches!(shape, Shape::Decode { .. })
            && !self.packs(shape)
            && c.layers >= 2
            && widths.iter().all(|width| width.is_multiple_of(32))
            && self.weights.iter().all(|w| matches!(w.kind, WeightKind::Vector) || self.in_fragments(w))
    }

    /// The shape of `skinny`'s workgroups for a product.
    fn skinny_config(&self, weight: &Matrix, rows: u32, matrices: Matrices) -> skinny::Config {
        if let (1, Some(config)) = (rows, self.tuning.skinny.get(&(weight.rows, weight.cols))) {
            return *config;
        }
        let chunks = weight.cols.div_ceil(32);
        let blocks = weight.rows.div_ceil(16);
        let (threads, tiles, ahead) = match (matrices, rows) {
            // No more threads than every device runs.
            (Matrices::ByHand, _) => (128, if blocks >= 256 { 2 } else { 1 }, 2),
            (Matrices::Cooperative, 1) => match (chunks, blocks) {
                (256.., _) => (512, 1, 8),
                (128.., ..4096) => (512, 1, 4),
                (128.., _) => (512, 2, 4),
                (_, 512..) => (256, 2, 4),
                // About as many workgroups as there are processors, with all of K in flight.
                (_, 170..) => (512, (blocks / 85).min(4), 2),
                _ => (512, 1, 4),
            },
            // Several rows of x are read again by every workgroup: the more rows of W it has, the better.
            (Matrices::Cooperative, 2..) => {
                let (threads, tiles) = match blocks {
                    1024.. => (256, 4),
                    512.. => (256, 2),
                    256.. => (512, 2),
                    _ => (512, 1),
                };
                (threads, tiles, if rows <= 8 { 2 } else { 1 })
            }
            (Matrices::Cooperative, 0) => unreachable!("a step has rows"),
        };
        let ahead = ahead.min(chunks.div_ceil(threads / 32).next_power_of_two());
        let mut config = skinny::Config { threads, tiles, ahead };
        while config.shared_bytes(rows, matrices) > self.tuning.shared_bytes && config.threads > 32 {
            match config.ahead {
                1 => config.threads /= 2,
                _ => config.ahead /= 2,
            }
        }
        config
    }

    /// A product with every part of a weight.
    #[expect(clippy::too_many_arguments, reason = "a matrix product's operands; each call names all of them")]
    fn product(
        &self,
        recording: &mut Recording,
        shape: Shape,
        name: &str,
        step: &Step,
        x: Activations,
        y: Activations,
        norm: Option<Range>,
        epilogue: Epilogue,
    ) {
        let bias = self.vector(recording, &format!("{name}.bias"));
        let fragments = self.weight(name).is_some_and(|w| self.in_fragments(w));
        // Logits are for kernels that wait at barriers.
        let mut flow = step.flow(Some(x.range), (!step.is_logits(y.range)).then_some(y.range));
        if self.tuning.wrong_tag && name == format!("layers.{}.down", self.config.layers - 1) {
            flow.input = 0;
        }
        for (first, weight) in self.matrix(recording, name) {
            let product = Product {
                label: name.to_owned(),
                weight,
                x,
                norm: norm.map(|n| (n, self.config.rms_eps)),
                bias: bias.map(|bias| floats_from(bias, first)),
                epilogue,
                y: outputs_from(y, first, epilogue),
            };
            recording.call(match (shape, self.tuning.fragments.filter(|_| fragments)) {
                (_, Some(matrices)) if !self.packs(shape) => {
                    let config = self.skinny_config(&weight, shape.rows(), matrices);
                    skinny::skinny(&product, shape.rows(), matrices, config, flow, step.fault)
                }
                (Shape::Decode { rows } | Shape::Head { rows }, _) => {
                    product.gemv(rows, self.gemv_threads(weight.cols), self.gemv_rows(weight.rows, norm.is_some()))
                }
                (Shape::Prefill { rows }, _) => product.matmul(rows, step.chunk),
            });
        }
    }

    /// Whether a shape's products take rows of activations that are packed for them.
    fn packs(&self, shape: Shape) -> bool {
        let narrow = self.config.hidden <= NARROW;
        let most = if narrow { MOST_SKINNY_ROWS_NARROW } else { MOST_SKINNY_ROWS };
        self.tuning.fragments.is_some() && shape.rows() > most
    }

    /// The shape of `panel`'s workgroups for a product.
    fn panel_config(&self, weight: &Matrix, rows: u32, matrices: Matrices) -> panel::Config {
        if let Some(config) = self.tuning.panel.get(&(weight.rows, weight.cols)) {
            return *config;
        }
        let (n, long) = (weight.rows, weight.cols >= 8192);
        // As `bench --stages --try` found them for the products of an 8B model; by hand, what every device runs.
        let (threads, tiles, ahead, blocks) = match (matrices, rows) {
            (Matrices::ByHand, _) => (256, if n < 2048 || rows <= 32 { 1 } else { 2 }, 1, rows.div_ceil(16).min(4)),
            (_, ..=16) => (if n <= 8192 { 512 } else { 256 }, 1, 4, 1),
            (_, ..=32) => (256, 1, 4, 2),
            (_, ..=64) if n >= 65_536 => (128, 2, 1, 4),
            (_, ..=64) => (256, 1, 2, 4),
            _ if n < 2048 => (256, 1, 2, 4),
            (_, ..=128) if long => (256, 4, 2, 4),
            (_, ..=128) if n <= 4096 => (128, 2, 2, 4),
            (_, ..=128) if n <= 8192 => (128, 3, 2, 4),
            (_, 129..) if n <= 4096 => (128, 4, 2, 4),
            (_, 129..) if n <= 8192 => (64, 3, 2, 4),
            _ => (128, 2, 1, 8),
        };
        let ahead = ahead.min(weight.cols.div_ceil(32).div_ceil(threads / 32).next_power_of_two());
        let mut config = panel::Config { threads, tiles, ahead, blocks };
        while config.threads > 32 && config.shared_bytes(matrices) > self.tuning.shared_bytes {
            config.threads /= 2;
        }
        config
    }

    /// The tile of a batch's product, where that is `tiled` and not `panel`.
    fn batch_tile(&self, weight: &Matrix, rows: u32, fold: Fold) -> Option<Tile> {
        if !matches!(fold, Fold::None) {
            return None;
        }
        if let Some(tile) = self.tuning.tiles.get(&(weight.rows, weight.cols)) {
            return Some(*tile);
        }
        // As `bench --stages --try` found them for the products of an 8B model.
        match (self.tuning.fragments, rows, weight.rows) {
            (Some(Matrices::Cooperative), 65.., 65_536..) => Some(Tile::Wide),
            (Some(Matrices::Cooperative), 65..=128, 16_384..) => Some(Tile::Square),
            (Some(Matrices::Cooperative), 129.., 16_384..) => Some(Tile::Half),
            _ => None,
        }
    }

    /// A product of packed rows with every part of a weight; `fold`: a norm before or behind it that is no stage of its own.
    #[expect(clippy::too_many_arguments, reason = "a matrix product's operands; each call names all of them")]
    fn tiled(
        &self,
        recording: &mut Recording,
        shape: Shape,
        name: &str,
        step: &Step,
        x: Packed,
        y: Output,
        epilogue: Epilogue,
        fold: Fold,
    ) {
        let rows = shape.rows();
        let matrices = self.tuning.fragments.unwrap_or(Matrices::ByHand);
        let bias = self.vector(recording, &format!("{name}.bias"));
        for (first, weight) in self.matrix(recording, name) {
            let product = Tiled {
                label: name.to_owned(),
                weight,
                x,
                bias: bias.map(|bias| floats_from(bias, first)),
                epilogue,
                y: match y {
                    Output::Rows(y) => Output::Rows(outputs_from(y, first, epilogue)),
                    packed => packed,
                },
            };
            let batch_tile = self.batch_tile(&weight, rows, fold);
            recording.call(match (shape, batch_tile) {
                (Shape::Prefill { .. }, _) if rows > MOST_PANEL_ROWS => {
                    let tile = match matrices {
                        Matrices::Cooperative => tiled::choose(rows, weight.rows, self.tuning.processors),
                        Matrices::ByHand => Tile::Plain,
                    };
                    product.call(tile, rows, step.chunk)
                }
                (Shape::Decode { .. }, Some(tile)) => product.batch(tile, rows),
                // Rows behind a chunk's end are zero.
                _ => panel::panel(&product, rows, matrices, self.panel_config(&weight, rows, matrices), fold),
            });
        }
    }

    /// Rows packed for the next products.
    #[expect(clippy::too_many_arguments, reason = "what is packed, how, and where from")]
    fn pack(
        &self,
        recording: &mut Recording,
        shape: Shape,
        step: &Step,
        label: String,
        x: Activations,
        cols: u32,
        norm: Option<Range>,
    ) -> Packed {
        let packed = Self::packed(recording, &format!("packed.{cols}"), shape.rows(), cols);
        let norm = norm.map(|norm| (norm, self.config.rms_eps));
        let count = matches!(shape, Shape::Prefill { .. }).then_some(step.chunk);
        recording.call(tiled::pack_rows(label, x, norm, packed, shape.rows(), count));
        packed
    }

    fn packed(recording: &mut Recording, name: &str, rows: u32, cols: u32) -> Packed {
        Packed { range: recording.buffer(name, Packed::bytes(rows, cols)), format: Format::Bf16, cols }
    }

    /// The products of a layer whose weights are in fragment order, for many rows.
    fn mlp_of_packed(&self, r: &mut Recording, shape: Shape, step: &Step, layer: u32) {
        let c = self.config;
        let name = |part: &str| format!("layers.{layer}.{part}");
        let norm = self.vector(r, &name("mlp_norm"));
        let unscaled = self.unscaled(r, shape);
        let (x, fold) = match unscaled {
            Some(unscaled) => (unscaled.rows, Fold::Scale(unscaled, c.rms_eps)),
            None => (self.pack(r, shape, step, name("mlp_pack"), step.x, c.hidden, norm), Fold::None),
        };
        // A weight in several parts leaves its results where each part finds its columns.
        let whole = self.weight(&name("gate_up")).is_none_or(|w| self.parts(w).len() == 1);
        let hidden = if whole {
            let hidden = Self::packed(r, "packed.mlp", shape.rows(), c.intermediate);
            self.tiled(r, shape, &name("gate_up"), step, x, Output::Packed(hidden), Epilogue::SwiGlu, fold);
            hidden
        } else {
            self.tiled(r, shape, &name("gate_up"), step, x, Output::Rows(step.mlp), Epilogue::SwiGlu, fold);
            self.pack(r, shape, step, name("down_pack"), step.mlp, c.intermediate, None)
        };
        let next = self.vector(r, &format!("layers.{}.attn_norm", layer + 1));
        let fold = Self::leaves(unscaled, next);
        self.tiled(r, shape, &name("down"), step, hidden, Output::Rows(step.x), Epilogue::Residual, fold);
    }

    /// Where the rows of a decode step wait for a norm that the products around it fold in: each workgroup sums the
    /// squares of all its rows again, which costs more than a stage where there are many.
    fn unscaled(&self, r: &mut Recording, shape: Shape) -> Option<Unscaled> {
        let (rows, hidden) = (shape.rows(), self.config.hidden);
        let normed = |name: &str| self.weight(name).is_some_and(|w| w.rows == hidden);
        let whole = |name: &str| self.weight(name).is_some_and(|w| self.in_fragments(w) && self.parts(w).len() == 1);
        let folds = matches!(shape, Shape::Decode { .. })
            && self.packs(shape)
            && rows <= if hidden <= NARROW { 2 * self.tuning.fold_rows } else { self.tuning.fold_rows }
            && hidden.is_multiple_of(32)
            && normed("layers.0.attn_norm")
            && normed("layers.0.mlp_norm")
            && whole("layers.0.o")
            && whole("layers.0.down");
        folds.then(|| Unscaled {
            rows: Self::packed(r, "unscaled", rows, hidden),
            squares: r.buffer("unscaled.squares", Unscaled::square_bytes(rows, hidden)),
        })
    }

    /// What a product leaves to the norm behind it.
    fn leaves(unscaled: Option<Unscaled>, norm: Option<Range>) -> Fold {
        match (unscaled, norm) {
            (Some(unscaled), Some(norm)) => Fold::Next(unscaled, norm),
            _ => Fold::None,
        }
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
        // A head reads what the largest step of prompts has left.
        let x_rows = if matches!(shape, Shape::Head { .. }) { self.state.chunk } else { rows };
        let step = Step {
            rows: r.buffer("rows", embed::rows_bytes(x_rows)),
            x: Self::activations(r, &named("x"), x_rows, c.hidden),
            qkv: Self::activations(r, &named("qkv"), rows, (heads.q + 2 * heads.kv) * heads.dim),
            attention: Self::activations(r, &named("attention.output"), rows, heads.q * heads.dim),
            mlp: Self::activations(r, &named("mlp.hidden"), rows, c.intermediate),
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
            chunk: self.state.chunk(r),
        };
        if !matches!(shape, Shape::Head { .. }) {
            self.embed(r, shape, &step);
            for layer in 0..c.layers {
                self.layer(r, shape, &step, layer);
            }
        }
        if prefill {
            self.mark(r, shape, &step);
        } else {
            self.head(r, shape, &step);
        }
        recording
    }

    fn embed(&self, r: &mut Recording, shape: Shape, step: &Step) {
        let from = match shape {
            Shape::Decode { .. } => RowsFrom::Batch,
            _ => RowsFrom::Chunk,
        };
        let flow = step.flow(None, Some(step.x.range));
        let fragments = self.weight("embed").is_some_and(|w| self.in_fragments(w));
        for (first, table) in self.matrix(r, "embed") {
            let (slots, batch) = (self.state.slots(r), self.state.batch(r));
            let decode = from == RowsFrom::Batch;
            let args = EmbedRowsArgs {
                embedding: table.range,
                slots: if decode { slots } else { slots.none() },
                batch: if decode { batch } else { batch.none() },
                chunk: if decode { step.chunk.none() } else { step.chunk },
                x: step.x.range,
                rows: step.rows,
                chunks: self.config.hidden.div_ceil(8),
                x_stride: step.x.stride,
                part_first: first,
                part_rows: table.rows,
                x_tag: 0,
                tokens_at: self.state.chunk_layout().token(0),
            };
            let layout = Table { format: table.format, fragments };
            let label = "embed".to_owned();
            r.call(embed::embed_rows(label, layout, from, shape.rows(), self.config.hidden, flow, args));
        }
    }

    fn layer(&self, r: &mut Recording, shape: Shape, step: &Step, layer: u32) {
        let c = self.config;
        let heads = self.heads();
        let name = |part: &str| format!("layers.{layer}.{part}");
        let attn_norm = self.vector(r, &name("attn_norm"));
        let packs = self.packs(shape) && self.weight(&name("qkv")).is_some_and(|w| self.in_fragments(w));
        let unscaled = if packs { self.unscaled(r, shape) } else { None };
        if let (Some(x), 1..) = (unscaled, layer) {
            let fold = Fold::Scale(x, c.rms_eps);
            let y = Output::Rows(step.qkv);
            self.tiled(r, shape, &name("qkv"), step, x.rows, y, Epilogue::Store, fold);
        } else if packs {
            let x = self.pack(r, shape, step, name("attn_pack"), step.x, c.hidden, attn_norm);
            self.tiled(r, shape, &name("qkv"), step, x, Output::Rows(step.qkv), Epilogue::Store, Fold::None);
        } else {
            self.product(r, shape, &name("qkv"), step, step.x, step.qkv, attn_norm, Epilogue::Store);
        }

        let k = r.buffer(&format!("kv.{layer}.k"), self.kv_bytes());
        let v = r.buffer(&format!("kv.{layer}.v"), self.kv_bytes());
        let q_norm = self.vector(r, &name("q_norm")).unwrap_or(step.rope.none());
        let k_norm = self.vector(r, &name("k_norm")).unwrap_or(step.rope.none());
        let fused = matches!(shape, Shape::Decode { .. });
        if !fused {
            let args = AppendArgs {
                qkv: step.qkv.range,
                rows: step.rows,
                q_norm,
                k_norm,
                rope: step.rope,
                pages: step.pages,
                k,
                v,
                stride: step.qkv.stride,
                max_pages: self.state.max_pages,
                epsilon: c.rms_eps,
            };
            r.call(attention::append(name("append"), heads, shape.rows(), args));
        }
        let args = AttentionArgs {
            qkv: step.qkv.range,
            rows: step.rows,
            q_norm: if fused { q_norm } else { q_norm.none() },
            k_norm: if fused { k_norm } else { k_norm.none() },
            rope: if fused { step.rope } else { step.rope.none() },
            pages: step.pages,
            k,
            v,
            partials: step.partials,
            counters: step.counters,
            o: step.attention.range,
            fault: step.fault,
            stride: step.qkv.stride,
            output_stride: step.attention.stride,
            max_pages: self.state.max_pages,
            epsilon: c.rms_eps,
            qkv_tag: 0,
            o_tag: 0,
        };
        let flow = step.flow(Some(step.qkv.range), Some(step.attention.range));
        // Attention on blocks packs what it makes for the next product itself.
        let width = heads.q * heads.dim;
        let direct = (packs && fused && flash_decode::serves(heads))
            .then(|| Self::packed(r, &format!("packed.{width}"), shape.rows(), width));
        let call = match self.tuning.fragments.filter(|_| fused && flash_decode::serves(heads)) {
            Some(matrices) => {
                let rows = shape.rows();
                let threads = self.flash_threads(rows, matrices);
                let (split, table) = match self.spread(rows, threads) {
                    Some(spread) => {
                        let work = r.buffer("attention.work", spread.bytes(rows));
                        if layer == 0 {
                            r.call(flash_decode::plan_splits("plan".to_owned(), rows, spread, step.rows, work));
                        }
                        (Split::Planned { units: spread.most(rows) }, work)
                    }
                    None => {
                        let splits = self.tuning.splits.min(flash_decode::MOST_SPLITS);
                        (Split::Evenly { rows, splits }, step.rows)
                    }
                };
                let label = name("attention");
                let args = match direct {
                    Some(packed) => AttentionArgs { o: packed.range, output_stride: packed.cols.div_ceil(32), ..args },
                    None => args,
                };
                let args = AttentionArgs { rows: table, ..args };
                let packed = direct.is_some();
                flash_decode::flash_decode(label, heads, split, threads, packed, matrices, flow, args)
            }
            None => {
                let splits = if fused { self.tuning.splits } else { 1 };
                let threads = self.attention_threads();
                attention::attention(name("attention"), heads, shape.rows(), splits, threads, fused, flow, args)
            }
        };
        let flashes = self.tuning.fragments.filter(|matrices| !fused && self.flashes(*matrices));
        let call = match flashes {
            Some(matrices) => {
                // Few tiles of long contexts would leave processors idle.
                let tiles = flash::flash_tiles(heads, shape.rows()) * heads.kv;
                let splits = match matrices {
                    Matrices::ByHand => 1,
                    Matrices::Cooperative => (2 * self.tuning.processors / tiles).clamp(1, MOST_PROMPT_SPLITS),
                };
                let args = FlashArgs {
                    qkv: step.qkv.range,
                    chunk: step.chunk,
                    pages: step.pages,
                    k,
                    v,
                    o: step.attention.range,
                    partials: r.buffer("flash.partials", flash::partials_bytes(heads)),
                    counters: r.buffer("flash.counters", flash::counters_bytes(heads)),
                    stride: step.qkv.stride,
                    output_stride: step.attention.stride,
                    max_pages: self.state.max_pages,
                    parts: flash::PARTS,
                };
                let size = (shape.rows(), self.state.prompts, splits);
                flash::flash(name("attention"), heads, size, matrices, args)
            }
            None => call,
        };
        r.call(call);

        if packs {
            let x = match direct {
                Some(packed) => packed,
                None => self.pack(r, shape, step, name("o_pack"), step.attention, width, None),
            };
            let next = self.vector(r, &name("mlp_norm"));
            let fold = Self::leaves(unscaled, next);
            self.tiled(r, shape, &name("o"), step, x, Output::Rows(step.x), Epilogue::Residual, fold);
            self.mlp_of_packed(r, shape, step, layer);
            return;
        }
        self.product(r, shape, &name("o"), step, step.attention, step.x, None, Epilogue::Residual);
        let mlp_norm = self.vector(r, &name("mlp_norm"));
        self.product(r, shape, &name("gate_up"), step, step.x, step.mlp, mlp_norm, Epilogue::SwiGlu);
        self.product(r, shape, &name("down"), step, step.mlp, step.x, None, Epilogue::Residual);
    }

    /// Times that each token was seen, for penalties.
    fn counts(&self, r: &mut Recording) -> Range {
        r.buffer("sampling.counts", u64::from(self.state.slots) * u64::from(self.config.vocab) * 4)
    }

    fn mark(&self, r: &mut Recording, shape: Shape, step: &Step) {
        let (state, counts) = (self.state.slots(r), self.counts(r));
        let vocabulary = self.config.vocab;
        let args = MarkPromptArgs { rows: step.rows, state, counts, row_count: shape.rows(), vocabulary };
        r.call(sampling::mark_prompt("mark_prompt".to_owned(), args));
    }

    fn head(&self, r: &mut Recording, shape: Shape, step: &Step) {
        let c = self.config;
        let (slots, bias, counts) = (self.state.slots(r), self.state.bias(r), self.counts(r));
        let rows = shape.rows();
        let (x, rows_range) = match shape {
            Shape::Decode { .. } => (step.x, step.rows),
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
        let logits = step.logits;
        let norm = self.vector(r, "final_norm");
        let name = if c.tied { "embed" } else { "lm_head" };
        if self.packs(shape) && self.weight(name).is_some_and(|w| self.in_fragments(w)) {
            let x = self.pack(r, shape, step, "head_pack".to_owned(), x, c.hidden, norm);
            self.tiled(r, shape, name, step, x, Output::Rows(logits), Epilogue::Store, Fold::None);
        } else {
            self.product(r, shape, name, step, x, logits, norm, Epilogue::Store);
        }
        let keys = r.buffer("sampling.keys", logits.range.bytes);
        let step_number = r.buffer("step", 4);
        let ring = r.buffer("ring", self.ring.bytes());
        let partials = r.buffer("sampling.partials", sampling::partials_bytes(rows));
        let args = ArgmaxArgs {
            logits: logits.range,
            partials,
            vocabulary: c.vocab,
            row_stride: logits.stride,
            parts: sampling::ARGMAX_PARTS,
        };
        r.call(sampling::argmax("argmax".to_owned(), rows, self.tuning.argmax_threads, args));
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
            partial_count: sampling::ARGMAX_PARTS,
            ring_steps: self.ring.steps,
            ring_rows: self.ring.rows,
            // Set before the last barrier by whoever sets it.
            fault: step.fault,
        };
        let carried = step.generations.is_some();
        r.call(sampling::sample("sample".to_owned(), rows, self.tuning.sample_threads, carried, args));
        if rows > 1 {
            r.call(sampling::advance("advance".to_owned(), AdvanceArgs { step_number }));
        }
    }
}

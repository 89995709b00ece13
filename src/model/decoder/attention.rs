//! Full-attention layers: their heads, KV cache and rotary table, and the stages of a step.
//!
//! Not here: the layers' MLPs (`mlp`).

use super::{Block, Decoder, Mixed, Step, StepShape};
use crate::kernels::attention::flash::{self, FlashF32Shape, FlashShape, FlashWay};
use crate::kernels::attention::flash_decode::{self, FlashDecodeShape, Split, SpreadBy};
use crate::kernels::attention::{self, AttentionShape, Heads, Scores, flash_wgmma};
use crate::kernels::gemm::Activations;
use crate::kernels::gemm::matmul::Arithmetic;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::gemm::tiled::{Packed, PackedOrder};
use crate::kernels::recording::{Range, Recording};
use crate::kernels::shaders::{AppendArgs, AttentionArgs, FlashArgs};
use crate::kernels::stream;
use crate::model::config::{QkNorm, Rope};
use std::collections::BTreeMap;

/// The maximum number of workgroups that share a tile of a prompt's attention.
const MOST_PROMPT_SPLITS: u32 = 16;
/// The same, at least, where sequences decode in prompt steps.
const LEAST_MIXED_SPLITS: u32 = 4;
/// The number of `flash_decode` workgroups of 128 and of more invocations that share a processor, for heads of up to 128
/// dimensions.
const SMALL_RESIDENT: u32 = 3;
const LARGE_RESIDENT: u32 = 1;
/// The name of the rotary table of the first kind of attention layers, and the beginning of the others' names.
pub const ROPE: &str = "rope";

/// Returns the name of a buffer that a kind of attention layers has for itself; that of the first kind is `base`.
pub(super) fn name_of_kind(base: &str, kind: usize) -> String {
    if kind == 0 { base.to_owned() } else { format!("{base}.{kind}") }
}

impl Decoder<'_> {
    /// Returns the heads of a kind of attention layers.
    pub fn heads(&self, kind: usize) -> Heads {
        let c = self.config;
        let of = &c.attention_kinds[kind];
        let grows = of.rope.as_ref().is_some_and(|rope| rope.query_growth.is_some());
        Heads {
            q: of.heads,
            kv: of.kv_heads,
            dim: of.head_dim,
            rot: of.rotary_dim(),
            qk_norm: c.qk_norm.of_heads(),
            v_norm: c.v_norm,
            gated: c.attention_gate,
            scores: Scores {
                scale: c.score_scale,
                window: of.window,
                both: !c.causal,
                soft_cap: c.score_cap,
                sinks: c.sinks,
                query_scales: grows.then(|| self.context * of.rotary_dim()),
            },
            kv_format: self.kv_format,
        }
    }

    /// Returns the heads of each kind of attention layers.
    pub fn all_heads(&self) -> Vec<Heads> {
        (0..self.config.attention_kinds.len()).map(|kind| self.heads(kind)).collect()
    }

    /// Returns the size in bytes of the K pages of a layer of a kind, which equals that of its V pages.
    pub fn kv_bytes(&self, kind: usize) -> u64 {
        let windowed = self.config.attention_kinds[kind].window.is_some();
        let pages = self.window_pages.filter(|_| windowed).unwrap_or(self.pages);
        u64::from(pages) * self.heads(kind).page_bytes()
    }

    /// Returns the page tables of a kind of attention layers.
    fn page_tables(&self, r: &mut Recording, kind: usize) -> Range {
        // A draft model's windows have no pages of their own, even if the model's have.
        match self.config.attention_kinds[kind].window.and(self.window_pages) {
            Some(_) => self.state.window_pages(r),
            None => self.state.pages(r),
        }
    }

    /// Returns the name of the rotary table of a kind of attention layers: kinds with the same rotary embedding share it.
    /// `None` for layers without rotary embedding.
    fn rope_name(&self, kind: usize) -> Option<String> {
        let kinds = &self.config.attention_kinds;
        let rope = kinds[kind].rope.as_ref()?;
        let first = kinds.iter().position(|other| other.rope.as_ref() == Some(rope))?;
        Some(name_of_kind(ROPE, first))
    }

    /// Returns the rotary tables with their buffers' names: `[context][rot / 2][2]` cos and sin, multiplied by the RoPE
    /// attention scale; then, if queries grow with their position, the factor of each position's query, `[context]`.
    pub fn rope_tables(&self) -> Vec<(String, Vec<f32>)> {
        let kinds = 0..self.config.attention_kinds.len();
        let named =
            kinds.filter_map(|kind| Some((self.rope_name(kind)?, self.config.attention_kinds[kind].rope.as_ref()?)));
        let tables: BTreeMap<String, &Rope> = named.collect();
        tables.into_iter().map(|(name, rope)| (name, self.rope_table(rope))).collect()
    }

    fn rope_table(&self, rope: &Rope) -> Vec<f32> {
        let inv_freq = rope.inv_freq(self.context);
        let scale = rope.attention_scale();
        let mut table: Vec<f32> = (0..self.context)
            .flat_map(|p| {
                inv_freq
                    .iter()
                    .flat_map(move |f| {
                        // The angle is rounded to f32 like in transformers. Its cosine is computed in f64.
                        let angle = f64::from(p as f32 * f);
                        [angle.cos() as f32 * scale, angle.sin() as f32 * scale]
                    })
                    .collect::<Vec<f32>>()
            })
            .collect();
        if let Some(growth) = rope.query_growth {
            table.extend((0..self.context).map(|position| growth.factor(position)));
        }
        table
    }

    /// Returns the rotary table of a kind of attention layers, if it has one.
    fn rope(&self, r: &mut Recording, kind: usize) -> Option<Range> {
        let name = self.rope_name(kind)?;
        let rope = self.config.attention_kinds[kind].rope.as_ref()?;
        let floats = rope.rotary_dim + u32::from(rope.query_growth.is_some());
        Some(r.buffer(&name, u64::from(self.context) * u64::from(floats) * 4))
    }

    /// Returns the number of threads of an `attention` workgroup, the maximum that the tuning and shared memory allow, and
    /// the number of workgroups that share the query heads of a KV head, the minimum that shared memory allows.
    pub(super) fn attention_size(&self, heads: Heads) -> (u32, u32) {
        // The last split to finish combines all splits, with one thread per split.
        let least = (heads.dim / 8).next_power_of_two().max(self.tuning.splits.next_power_of_two()).max(16);
        let fits = |parts: u32, threads: u32| heads.shared_bytes(parts, threads) <= self.tuning.shared_bytes;
        let group = heads.group();
        let mut divisors = (1..=group).filter(|parts| group.is_multiple_of(*parts));
        let parts = divisors.find(|parts| fits(*parts, least)).unwrap_or(group);
        let mut threads = self.tuning.attention_threads.max(least);
        while threads > least && !fits(parts, threads) {
            threads /= 2;
        }
        (threads, parts)
    }

    /// Returns the size of the buffer of the counters of attention in bytes, for the steps of most rows.
    pub(super) fn counter_bytes(&self) -> u64 {
        let parts = |heads: Heads| heads.kv * self.attention_size(heads).1.max(flash_decode::parts(heads));
        let most = self.all_heads().into_iter().map(parts).max();
        u64::from(most.unwrap_or(0)) * u64::from(self.decoding_rows()) * 4
    }

    /// Returns the number of splits of each row's attention with the `attention` kernel: no more than the device can run
    /// at once together with those of the other rows.
    fn attention_splits(&self, heads: Heads, rows: u32) -> u32 {
        self.tuning.splits.min((8 * self.tuning.processors / (rows * heads.kv)).max(1))
    }

    /// Returns how prompts' attention is computed in tiles; `None` for the row-by-row kernel.
    pub(super) fn flashes(&self, heads: Heads) -> Option<FlashWay> {
        let shared = self.tuning.shared_bytes;
        let in_f32 = || FlashF32Shape::choose(heads, shared).filter(|_| self.tuning.flash_f32).map(FlashWay::F32);
        let way = match (self.tuning.fragments, self.tuning.arithmetic) {
            (Some(matrices), _) => Some(FlashWay::Fragments(matrices)),
            (None, Arithmetic::Matrices(units)) if self.tuning.flash_matrix => {
                FlashShape::choose(heads, units, shared).map(FlashWay::Loads).or_else(in_f32)
            }
            (None, _) => in_f32(),
        };
        way.filter(|way| way.serves(heads, shared))
    }

    /// Whether the attention of a prompt step's rows uses `flash_wgmma`: if its tiles, each of which has one workgroup, keep most
    /// processors busy.
    fn flashes_by_wgmma(&self, heads: Heads, rows: u32) -> bool {
        let workgroups = FlashWay::Wgmma { packed: false }.tiles(heads, rows) * heads.kv;
        self.tuning.ptx
            && self.tuning.flash_wgmma
            && flash_wgmma::serves(heads)
            && 4 * workgroups >= 3 * self.tuning.processors
    }

    /// Whether the attention of `rows` rows has more workgroups than there are processors, also if no context is split.
    fn has_many(&self, heads: Heads, rows: u32) -> bool {
        rows * heads.kv * flash_decode::parts(heads) > self.tuning.processors
    }

    /// Returns the number of threads of a `flash_decode` workgroup for `rows` rows, of which each sequence has `new_tokens`.
    pub(super) fn flash_threads(&self, heads: Heads, (rows, new_tokens): (u32, u32), matrices: Matrices) -> u32 {
        let mut threads =
            if self.has_many(heads, rows) { self.tuning.flash_threads_many } else { self.tuning.flash_threads };
        while threads > 32
            && flash_decode::shared_bytes(heads, threads, new_tokens, matrices) > self.tuning.shared_bytes
        {
            threads /= 2;
        }
        threads
    }

    /// Returns the first kind of attention layers that shares its plan of splits with `kind`: one with the same heads
    /// and window.
    pub(super) fn plan_kind(&self, kind: usize) -> usize {
        let kinds = &self.config.attention_kinds;
        let of = |kind: usize| (kinds[kind].heads, kinds[kind].kv_heads, kinds[kind].head_dim, kinds[kind].window);
        (0..kind).find(|other| of(*other) == of(kind)).unwrap_or(kind)
    }

    /// Returns how the workgroups of a batch's attention are shared among its rows, or `None` for a single row, which
    /// has all of them. `waits`: whether workgroups may wait for others that were launched before them.
    fn spread(
        &self,
        heads: Heads,
        rows: u32,
        (threads, matrices): (u32, Matrices),
        waits: bool,
    ) -> Option<flash_decode::Spread> {
        // The buffer of partial results has room for this many units in addition to one per row.
        let room = (self.tuning.splits.min(flash_decode::MOST_SPLITS) - 1) * rows;
        let workgroups = heads.kv * flash_decode::parts(heads);
        // Heads of 256 dimensions take more registers, and CPU drivers do not run workgroups side by side.
        let by_turns = matrices == Matrices::Cooperative && heads.dim <= 128;
        let resident = if threads <= 128 { SMALL_RESIDENT } else { LARGE_RESIDENT };
        let turn = (resident * self.tuning.processors / workgroups).max(1);
        let (units, by) = match (by_turns, self.has_many(heads, rows)) {
            (false, _) => (self.tuning.spread * self.tuning.processors / workgroups, SpreadBy::Shares),
            // Units without work take some time too.
            (true, many) => (if many { 3 * rows } else { 2 * turn }, SpreadBy::Turns { turn, groups: threads / 32 }),
        };
        // More than there are processors take longer to launch than one workgroup takes to combine.
        let most = self.tuning.processors / (rows * workgroups);
        // Measured for heads of 256 dimensions only.
        let combines = waits && heads.dim >= 256;
        let combiners = if combines { flash_decode::combiners(heads, threads, most) } else { 0 };
        // Where splits are combined by several workgroups, smaller ones pay.
        let pages = if combiners > 0 { self.tuning.spread_pages.div_ceil(2) } else { self.tuning.spread_pages };
        let least = (threads / 32 * pages).max(1);
        (rows > 1).then_some(flash_decode::Spread { units: units.min(room), least, by, combiners })
    }

    /// Records the stages of the mixer except its output projection. `cache` is the prefix of the names of the layer's
    /// page buffers.
    pub(super) fn attention(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        block: &Block,
        cache: &str,
    ) -> Mixed {
        let mixed = self.attend(r, shape, step, block, cache);
        match self.config.latent {
            Some(latent) => self.latent_output(r, shape, step, block, latent),
            None => mixed,
        }
    }

    fn attend(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, cache: &str) -> Mixed {
        let c = self.config;
        let heads = self.heads(block.attention);
        match c.latent {
            Some(latent) => self.latent_input(r, shape, step, block, latent),
            None => self.mixer_input(r, shape, step, block, "qkv", step.qkv),
        }
        self.norm_rows(r, shape, step, block);
        let o = block.name("o");
        let packs = self.packs_for(shape, &o).then(|| self.packed_order(shape, &o));
        // What follows latent attention reads rows of floats.
        let packs = packs.filter(|order| order.is_written_by_products() && c.latent.is_none());
        let AppendArgs { k, v, q_norm, k_norm, rope, .. } = self.append_args(r, step, block, cache);
        // Rows of a decode step are prepared and appended by the attention itself, if the layer has keys of its own. So are those
        // of a verification step without barriers.
        let decode = matches!(shape, StepShape::Decode { .. }) || step.generations.is_some();
        let fused = decode && block.owns_cache;
        if !fused {
            let args = self.append_args(r, step, block, cache);
            let args = match block.owns_cache {
                true => args,
                false => AppendArgs { k: args.k.none(), v: args.v.none(), ..args },
            };
            r.call(attention::append(block.name("append"), heads, shape.rows(), block.owns_cache, args));
        }
        if let Some(way) = self.flashes(heads).filter(|_| !decode) {
            if !self.flashes_by_wgmma(heads, shape.rows()) {
                self.flash(r, shape, step, block, (k, v), (way, step.attention));
                return Mixed::Rows(step.attention);
            }
            let (rows, width) = (shape.rows(), heads.q * heads.dim);
            let packed = packs.filter(|order| *order == PackedOrder::Swizzled);
            let packed =
                packed.map(|order| Packed { order, ..Self::packed(r, &format!("packed.{width}"), rows, width) });
            let output = packed.map_or(step.attention, |packed| Activations {
                range: packed.used(Packed::padded_rows(rows)),
                stride: packed.stride(rows),
            });
            let way = FlashWay::Wgmma { packed: packed.is_some() };
            self.flash(r, shape, step, block, (k, v), (way, output));
            return packed.map_or(Mixed::Rows(step.attention), Mixed::Packed);
        }
        let sinks = self.vector(r, &block.name("sinks")).unwrap_or(step.fault.none());
        let args = AttentionArgs {
            qkv: step.qkv.range,
            rows: step.rows,
            q_norm: if fused { q_norm } else { q_norm.none() },
            k_norm: if fused { k_norm } else { k_norm.none() },
            rope: if fused { rope } else { rope.none() },
            pages: self.page_tables(r, block.attention),
            k,
            v,
            partials: step.partials[self.plan_kind(block.attention)],
            counters: step.counters,
            o: step.attention.range,
            fault: step.fault,
            sinks,
            stride: step.qkv.stride,
            output_stride: step.attention.stride,
            max_pages: self.state.max_pages,
            epsilon: c.rms_eps,
            qkv_tag: 0,
            o_tag: 0,
        };
        let flow = step.flow(Some(step.qkv.range), Some(step.attention.range));
        let rows = shape.rows();
        let Some(matrices) = self.tuning.fragments.filter(|_| fused && flash_decode::serves(heads)) else {
            let splits = if decode { self.attention_splits(heads, rows) } else { 1 };
            let (threads, parts) = self.attention_size(heads);
            let shape = AttentionShape { rows, splits, threads, parts, fused };
            r.call(attention::attention(block.name("attention"), heads, shape, flow, args));
            return Mixed::Rows(step.attention);
        };
        let new_tokens = shape.rows_of_sequence();
        let threads = self.flash_threads(heads, (rows, new_tokens), matrices);
        let waits = step.generations.is_some() && matrices == Matrices::Cooperative;
        let (split, table) = match self.spread(heads, rows, (threads, matrices), waits) {
            Some(spread) => {
                let window = heads.scores.window;
                let name = name_of_kind("attention.work", self.plan_kind(block.attention));
                let work = r.buffer(&name, spread.bytes(rows));
                if block.first {
                    r.call(flash_decode::plan_splits("plan".to_owned(), rows, spread, window, step.rows, work));
                }
                (Split::Planned { rows, spread }, work)
            }
            None => {
                let splits = self.tuning.splits.min(flash_decode::MOST_SPLITS);
                (Split::Evenly { rows, splits }, step.rows)
            }
        };
        // `flash_decode` packs its output for the next product itself.
        let width = heads.q * heads.dim;
        let direct = packs.map(|order| Packed { order, ..Self::packed(r, &format!("packed.{width}"), rows, width) });
        let args = match direct {
            Some(packed) => AttentionArgs { o: packed.range, output_stride: packed.stride(rows), ..args },
            None => args,
        };
        let args = AttentionArgs { rows: table, ..args };
        let label = block.name("attention");
        let shape = FlashDecodeShape { split, threads, new_tokens, packed: packs, matrices };
        r.call(flash_decode::flash_decode(label, heads, shape, flow, args));
        direct.map_or(Mixed::Rows(step.attention), Mixed::Packed)
    }

    /// Records the norms over all query heads and over all key heads, if the model has them.
    fn norm_rows(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block) {
        let c = self.config;
        if c.qk_norm != QkNorm::Rows {
            return;
        }
        let of = &c.attention_kinds[block.attention];
        // Heads of other devices are behind all rows of this one.
        let [queries, keys] = [of.normed_with.queries, of.normed_with.keys].map(|heads| heads * of.head_dim);
        let first_key = c.qkv_rows(of) - keys;
        for (name, own, further) in [
            ("q_norm", (0, of.q_rows()), (first_key - queries, queries)),
            ("k_norm", (of.q_rows(), of.kv_rows()), (first_key, keys)),
        ] {
            let norm = (self.vector(r, &block.name(name)), c.rms_eps);
            r.call(stream::norm_with(block.name(name), shape.rows(), step.qkv, own, further, norm));
        }
    }

    /// Returns the arguments of `append`, which writes a layer's keys and values to its pages. `cache` is the prefix of
    /// the names of the page buffers.
    pub(super) fn append_args(&self, r: &mut Recording, step: &Step, block: &Block, cache: &str) -> AppendArgs {
        let none = step.rows.none();
        let bytes = self.kv_bytes(block.attention);
        let norms = ["q_norm", "k_norm"].map(|name| match self.config.qk_norm {
            QkNorm::Heads | QkNorm::RotatedHeads => self.vector(r, &block.name(name)).unwrap_or(none),
            QkNorm::None | QkNorm::Rows => none,
        });
        AppendArgs {
            qkv: step.qkv.range,
            rows: step.rows,
            q_norm: norms[0],
            k_norm: norms[1],
            rope: self.rope(r, block.attention).unwrap_or(none),
            pages: self.page_tables(r, block.attention),
            k: r.buffer(&format!("{cache}.k"), bytes),
            v: r.buffer(&format!("{cache}.v"), bytes),
            stride: step.qkv.stride,
            max_pages: self.state.max_pages,
            epsilon: self.config.rms_eps,
        }
    }

    /// Records the attention of prompts' rows on matrices, over the pages `k` and `v`.
    fn flash(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        block: &Block,
        (k, v): (Range, Range),
        (way, output): (FlashWay, Activations),
    ) {
        let heads = self.heads(block.attention);
        // With few tiles and long contexts, one workgroup per tile would leave compute units idle; and so would a sequence
        // with a long context that decodes in the step, whatever the number of tiles is.
        let tiles = way.tiles(heads, shape.rows()) * heads.kv;
        let least = if self.mixed_steps().is_some() { LEAST_MIXED_SPLITS } else { 1 };
        let splits = match way {
            FlashWay::Fragments(Matrices::Emulated) | FlashWay::Wgmma { .. } => 1,
            _ => (2 * self.tuning.processors / tiles).clamp(least, MOST_PROMPT_SPLITS),
        };
        let (whole, none) = (matches!(way, FlashWay::Wgmma { .. }), step.fault.none());
        let args = FlashArgs {
            qkv: step.qkv.range,
            chunk: step.chunk,
            pages: self.page_tables(r, block.attention),
            k,
            v,
            o: output.range,
            partials: if whole { none } else { r.buffer("flash.partials", flash::partials_bytes(heads)) },
            counters: if whole { none } else { r.buffer("flash.counters", flash::counters_bytes(heads)) },
            sinks: self.vector(r, &block.name("sinks")).unwrap_or(step.fault.none()),
            stride: step.qkv.stride,
            output_stride: output.stride,
            max_pages: self.state.max_pages,
            parts: flash::parts(heads),
        };
        let size = (shape.rows(), self.state.prompts, splits);
        r.call(flash::flash(block.name("attention"), heads, size, way, args));
    }
}

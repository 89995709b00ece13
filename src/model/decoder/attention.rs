//! Full-attention layers: their heads, KV cache and rotary table, and the stages of a step.
//!
//! Not here: the layers' MLPs (`mlp`).

use super::{Block, Decoder, Mixed, Step, StepShape};
use crate::kernels::attention::flash;
use crate::kernels::attention::flash_decode::{self, Split};
use crate::kernels::attention::{self, Heads};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::recording::{Range, Recording};
use crate::kernels::shaders::{AppendArgs, AttentionArgs, FlashArgs};

/// The maximum number of workgroups that share a tile of a prompt's attention.
const MOST_PROMPT_SPLITS: u32 = 16;

impl Decoder<'_> {
    /// Returns the head configuration of every full-attention layer.
    pub fn heads(&self) -> Heads {
        let c = self.config;
        Heads {
            q: c.heads,
            kv: c.kv_heads,
            dim: c.head_dim,
            rot: c.rope.rotary_dim,
            qk_norm: c.qk_norm,
            gated: c.attention_gate,
            kv_format: self.kv_format,
        }
    }

    /// Returns the size in bytes of one layer's K pages, which equals that of its V pages.
    pub fn kv_bytes(&self) -> u64 {
        u64::from(self.pages) * self.heads().page_bytes()
    }

    /// Returns the size in bytes of the cos and sin table: `[context][rot / 2][2]` f32.
    pub fn rope_bytes(&self) -> u64 {
        u64::from(self.context) * u64::from(self.config.rope.rotary_dim) * 4
    }

    /// Returns the cos and sin table, multiplied by the RoPE attention scale.
    pub fn rope_table(&self) -> Vec<f32> {
        let inv_freq = self.config.rope.inv_freq();
        let scale = self.config.rope.attention_scale();
        (0..self.context)
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
            .collect()
    }

    /// Returns the number of threads of an `attention` workgroup: the maximum that the tuning and shared memory allow.
    pub(super) fn attention_threads(&self) -> u32 {
        let heads = self.heads();
        // The last split to finish combines all splits, with one thread per split.
        let least = (heads.dim / 8).next_power_of_two().max(self.tuning.splits).max(16);
        let mut threads = self.tuning.attention_threads.max(least);
        while threads > least && heads.shared_bytes(threads) > self.tuning.shared_bytes {
            threads /= 2;
        }
        threads
    }

    /// Whether prompts' attention uses the `flash` kernel.
    pub(super) fn flashes(&self, matrices: Matrices) -> bool {
        flash::flash_serves(self.heads())
            && (matrices == Matrices::Emulated || self.tuning.shared_bytes >= flash::SHARED_BYTES)
    }

    /// Returns the number of threads of a `flash_decode` workgroup.
    pub(super) fn flash_threads(&self, rows: u32, matrices: Matrices) -> u32 {
        let many = rows * self.config.kv_heads > self.tuning.processors;
        let mut threads = if many { self.tuning.flash_threads_many } else { self.tuning.flash_threads };
        while threads > 32 && flash_decode::shared_bytes(self.heads(), threads, matrices) > self.tuning.shared_bytes {
            threads /= 2;
        }
        threads
    }

    /// Returns how the workgroups of a batch's attention are shared among its rows, or `None` for a single row, which
    /// has all of them.
    pub(super) fn spread(&self, rows: u32, threads: u32) -> Option<flash_decode::Spread> {
        // The buffer of partial results has room for this many units in addition to one per row.
        let room = (self.tuning.splits.min(flash_decode::MOST_SPLITS) - 1) * rows;
        let units = (self.tuning.spread * self.tuning.processors / self.config.kv_heads).min(room);
        (rows > 1).then_some(flash_decode::Spread { units, least: (threads / 32 * self.tuning.spread_pages).max(1) })
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
        let c = self.config;
        let heads = self.heads();
        self.mixer_input(r, shape, step, block, "qkv", step.qkv);
        let packs = self.packs_for(shape, &block.name("qkv"));
        let AppendArgs { k, v, q_norm, k_norm, .. } = self.append_args(r, step, block, cache);
        let fused = matches!(shape, StepShape::Decode { .. });
        if !fused {
            let args = self.append_args(r, step, block, cache);
            r.call(attention::append(block.name("append"), heads, shape.rows(), args));
            if let Some(matrices) = self.tuning.fragments.filter(|matrices| self.flashes(*matrices)) {
                self.flash(r, shape, step, block, (k, v), matrices);
                return Mixed::Rows(step.attention);
            }
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
        let rows = shape.rows();
        let Some(matrices) = self.tuning.fragments.filter(|_| fused && flash_decode::serves(heads)) else {
            let splits = if fused { self.tuning.splits } else { 1 };
            let threads = self.attention_threads();
            r.call(attention::attention(block.name("attention"), heads, rows, splits, threads, fused, flow, args));
            return Mixed::Rows(step.attention);
        };
        let threads = self.flash_threads(rows, matrices);
        let (split, table) = match self.spread(rows, threads) {
            Some(spread) => {
                let work = r.buffer("attention.work", spread.bytes(rows));
                if block.first {
                    r.call(flash_decode::plan_splits("plan".to_owned(), rows, spread, step.rows, work));
                }
                (Split::Planned { units: spread.most(rows) }, work)
            }
            None => {
                let splits = self.tuning.splits.min(flash_decode::MOST_SPLITS);
                (Split::Evenly { rows, splits }, step.rows)
            }
        };
        // `flash_decode` packs its output for the next product itself.
        let width = heads.q * heads.dim;
        let direct = packs.then(|| Self::packed(r, &format!("packed.{width}"), rows, width));
        let args = match direct {
            Some(packed) => AttentionArgs { o: packed.range, output_stride: packed.cols.div_ceil(32), ..args },
            None => args,
        };
        let args = AttentionArgs { rows: table, ..args };
        let label = block.name("attention");
        r.call(flash_decode::flash_decode(label, heads, split, threads, packs, matrices, flow, args));
        direct.map_or(Mixed::Rows(step.attention), Mixed::Packed)
    }

    /// Returns the arguments of `append`, which writes a layer's keys and values to its pages. `cache` is the prefix of
    /// the names of the page buffers.
    pub(super) fn append_args(&self, r: &mut Recording, step: &Step, block: &Block, cache: &str) -> AppendArgs {
        AppendArgs {
            qkv: step.qkv.range,
            rows: step.rows,
            q_norm: self.vector(r, &block.name("q_norm")).unwrap_or(step.rope.none()),
            k_norm: self.vector(r, &block.name("k_norm")).unwrap_or(step.rope.none()),
            rope: step.rope,
            pages: step.pages,
            k: r.buffer(&format!("{cache}.k"), self.kv_bytes()),
            v: r.buffer(&format!("{cache}.v"), self.kv_bytes()),
            stride: step.qkv.stride,
            max_pages: self.state.max_pages,
            epsilon: self.config.rms_eps,
        }
    }

    /// Records the attention of prompts' rows with the `flash` kernel, over the pages `k` and `v`.
    fn flash(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        block: &Block,
        (k, v): (Range, Range),
        matrices: Matrices,
    ) {
        let heads = self.heads();
        // With few tiles and long contexts, one workgroup per tile would leave compute units idle.
        let tiles = flash::flash_tiles(heads, shape.rows()) * heads.kv;
        let splits = match matrices {
            Matrices::Emulated => 1,
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
        r.call(flash::flash(block.name("attention"), heads, size, matrices, args));
    }
}

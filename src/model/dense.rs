//! Dense decoders (Qwen3, Llama 3): a batch shape in, a `Recording` out.
//! Deliberately absent: memory, devices, and which queue runs what.

use super::checkpoint::{WeightKind, WeightSpec};
use super::config::{Dtype, ModelConfig};
use crate::kernels::attention::{self, Heads};
use crate::kernels::embed::{self, RowsFrom};
use crate::kernels::gemm::{Activations, Epilogue, Matrix, Product, take_last};
use crate::kernels::layout::StateLayout;
use crate::kernels::recording::{Range, Recording};
use crate::kernels::sampling;
use crate::kernels::shaders::{
    AdvanceArgs, AppendArgs, ArgmaxArgs, AttentionArgs, EmbedRowsArgs, MarkPromptArgs, SampleArgs, TakeLastArgs,
};
use crate::memory::pack::{Format, Layout, Packing};

/// What a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// One token of each of `rows` slots.
    Decode {
        /// Rows of the bucket.
        rows: u32,
    },
    /// Up to `rows` tokens of one prompt.
    Prefill {
        /// Rows of the bucket.
        rows: u32,
        /// Whether a token is drawn from the last of them.
        head: bool,
    },
}

impl Shape {
    /// The recording's name.
    pub fn name(self) -> String {
        match self {
            Shape::Decode { rows } => format!("decode.{rows}"),
            Shape::Prefill { rows, head: true } => format!("prefill.{rows}"),
            Shape::Prefill { rows, head: false } => format!("prefill.{rows}.part"),
        }
    }

    /// Rows of activations.
    pub fn rows(self) -> u32 {
        match self {
            Shape::Decode { rows } | Shape::Prefill { rows, .. } => rows,
        }
    }
}

/// Choices that depend on the device and not on the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Most threads of a `gemv` workgroup.
    pub gemv_threads: u32,
    /// Rows of a weight matrix from which on a `gemv` workgroup computes four of them, not two.
    pub gemv_wide_from: u32,
    /// Most threads of an `attention` workgroup.
    pub attention_threads: u32,
    /// Shared memory of a workgroup, bytes.
    pub shared_bytes: u32,
    /// Workgroups that a decoding sequence's attention is split in along its context.
    pub splits: u32,
    /// Threads of an `argmax` workgroup.
    pub argmax_threads: u32,
    /// Threads of the sampler.
    pub sample_threads: u32,
}

impl Tuning {
    /// Applies `key=value`; false if there is no such key or the value is no number.
    pub fn set(&mut self, change: &str) -> bool {
        let Some((key, value)) = change.split_once('=') else { return false };
        let Ok(value) = value.parse() else { return false };
        let place = match key {
            "gemv_threads" => &mut self.gemv_threads,
            "gemv_wide_from" => &mut self.gemv_wide_from,
            "attention_threads" => &mut self.attention_threads,
            "splits" => &mut self.splits,
            "sample_threads" => &mut self.sample_threads,
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

/// Elements of a padded row: kernels read eight values at a time.
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

/// How a weight is packed.
pub fn packing(weight: &WeightSpec) -> Packing {
    let row_major = |columns_multiple| Layout::RowMajor { columns_multiple };
    match weight.kind {
        WeightKind::Matrix => {
            Packing { rows: weight.rows, cols: weight.cols, layout: row_major(8), format: format(weight.dtype) }
        }
        // A value a row, so that sources can interleave; the padding becomes zero.
        WeightKind::Vector => Packing { rows: padded(weight.rows), cols: 1, layout: row_major(1), format: Format::F32 },
    }
}

/// The buffers of a weight, none larger than `max_bytes`.
pub fn parts(weight: &WeightSpec, max_bytes: u64) -> Vec<Part> {
    let packing = packing(weight);
    let row_bytes = packing.row_bytes();
    // An even number of rows, so that gate and up stay together.
    let fit = u32::try_from(max_bytes / row_bytes).unwrap_or(u32::MAX).max(2) & !1;
    if packing.rows <= fit {
        return vec![Part { name: weight.name.clone(), first_row: 0, rows: packing.rows, bytes: packing.bytes() }];
    }
    (0..packing.rows.div_ceil(fit))
        .map(|i| {
            let rows = fit.min(packing.rows - i * fit);
            Part {
                name: format!("{}.part{i}", weight.name),
                first_row: i * fit,
                rows,
                bytes: u64::from(rows) * row_bytes,
            }
        })
        .collect()
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
}

impl Dense<'_> {
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

    fn weight(&self, name: &str) -> Option<&WeightSpec> {
        self.weights.iter().find(|w| w.name == name)
    }

    fn vector(&self, recording: &mut Recording, name: &str) -> Option<Range> {
        self.weight(name).map(|w| recording.buffer(name, u64::from(padded(w.rows)) * 4))
    }

    /// The parts of a matrix, each with its first row.
    fn matrix(&self, recording: &mut Recording, name: &str) -> Vec<(u32, Matrix)> {
        let weight = self.weight(name).unwrap_or_else(|| panic!("the checkpoint was opened with \"{name}\""));
        parts(weight, self.max_buffer_bytes)
            .into_iter()
            .map(|part| {
                let range = recording.buffer(&part.name, part.bytes);
                (part.first_row, Matrix { range, format: format(weight.dtype), rows: part.rows, cols: weight.cols })
            })
            .collect()
    }

    fn activations(recording: &mut Recording, name: &str, rows: u32, width: u32) -> Activations {
        let stride = padded(width);
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

    /// A product with every part of a weight.
    #[expect(clippy::too_many_arguments, reason = "a matrix product's operands; each call names all of them")]
    fn product(
        &self,
        recording: &mut Recording,
        shape: Shape,
        name: &str,
        chunk: Range,
        x: Activations,
        y: Activations,
        norm: Option<Range>,
        epilogue: Epilogue,
    ) {
        let bias = self.vector(recording, &format!("{name}.bias"));
        for (first, weight) in self.matrix(recording, name) {
            let first_output = if epilogue == Epilogue::SwiGlu { first / 2 } else { first };
            let offset = u64::from(first_output) * 4;
            let product = Product {
                label: name.to_owned(),
                weight,
                x,
                norm: norm.map(|n| (n, self.config.rms_eps)),
                bias: bias.map(|b| b.part(u64::from(first) * 4, b.bytes - u64::from(first) * 4)),
                epilogue,
                y: Activations { range: y.range.part(offset, y.range.bytes - offset), stride: y.stride },
            };
            recording.call(match shape {
                Shape::Decode { rows } => {
                    product.gemv(rows, self.gemv_threads(weight.cols), self.gemv_rows(weight.rows, norm.is_some()))
                }
                Shape::Prefill { rows, .. } => product.matmul(rows, chunk),
            });
        }
    }

    /// The recording of a step.
    pub fn record(&self, shape: Shape) -> Recording {
        let c = self.config;
        let mut recording = Recording::new(shape.name());
        let r = &mut recording;
        let rows = shape.rows();
        let heads = self.heads();
        let step = Step {
            rows: r.buffer("rows", embed::rows_bytes(rows)),
            x: Self::activations(r, "x", rows, c.hidden),
            qkv: Self::activations(r, "qkv", rows, (heads.q + 2 * heads.kv) * heads.dim),
            attention: Self::activations(r, "attention.output", rows, heads.q * heads.dim),
            mlp: Self::activations(r, "mlp.hidden", rows, c.intermediate),
            partials: r.buffer(
                "attention.partials",
                heads.partial_floats(self.tuning.splits) * 4 * u64::from(self.state.rows),
            ),
            counters: r.buffer("attention.counters", u64::from(heads.kv) * u64::from(self.state.rows) * 4),
            rope: r.buffer("rope", self.rope_bytes()),
            pages: self.state.pages(r),
            chunk: self.state.chunk(r),
        };
        self.embed(r, shape, &step);
        for layer in 0..c.layers {
            self.layer(r, shape, &step, layer);
        }
        self.head(r, shape, &step);
        recording
    }

    fn embed(&self, r: &mut Recording, shape: Shape, step: &Step) {
        let from = match shape {
            Shape::Decode { .. } => RowsFrom::Batch,
            Shape::Prefill { .. } => RowsFrom::Chunk,
        };
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
            };
            r.call(embed::embed_rows("embed".to_owned(), table.format, from, shape.rows(), self.config.hidden, args));
        }
    }

    fn layer(&self, r: &mut Recording, shape: Shape, step: &Step, layer: u32) {
        let c = self.config;
        let heads = self.heads();
        let name = |part: &str| format!("layers.{layer}.{part}");
        let attn_norm = self.vector(r, &name("attn_norm"));
        self.product(r, shape, &name("qkv"), step.chunk, step.x, step.qkv, attn_norm, Epilogue::Store);

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
            stride: step.qkv.stride,
            output_stride: step.attention.stride,
            max_pages: self.state.max_pages,
            epsilon: c.rms_eps,
        };
        let splits = if fused { self.tuning.splits } else { 1 };
        r.call(attention::attention(
            name("attention"),
            heads,
            shape.rows(),
            splits,
            self.attention_threads(),
            fused,
            args,
        ));

        self.product(r, shape, &name("o"), step.chunk, step.attention, step.x, None, Epilogue::Residual);
        let mlp_norm = self.vector(r, &name("mlp_norm"));
        self.product(r, shape, &name("gate_up"), step.chunk, step.x, step.mlp, mlp_norm, Epilogue::SwiGlu);
        self.product(r, shape, &name("down"), step.chunk, step.mlp, step.x, None, Epilogue::Residual);
    }

    fn head(&self, r: &mut Recording, shape: Shape, step: &Step) {
        let c = self.config;
        let (slots, bias) = (self.state.slots(r), self.state.bias(r));
        let counts = r.buffer("sampling.counts", u64::from(self.state.slots) * u64::from(c.vocab) * 4);
        if let Shape::Prefill { rows, head } = shape {
            let args = MarkPromptArgs { rows: step.rows, state: slots, counts, row_count: rows, vocabulary: c.vocab };
            r.call(sampling::mark_prompt("mark_prompt".to_owned(), args));
            if !head {
                return;
            }
        }
        let (x, rows_range, rows) = match shape {
            Shape::Decode { rows } => (step.x, step.rows, rows),
            Shape::Prefill { .. } => {
                let head_x = Self::activations(r, "head.x", 1, c.hidden);
                let head_rows = r.buffer("head.rows", embed::rows_bytes(1));
                let args = TakeLastArgs {
                    x: step.x.range,
                    rows: step.rows,
                    count: step.chunk,
                    head_x: head_x.range,
                    head_rows,
                    x_stride: step.x.stride,
                };
                r.call(take_last("take_last".to_owned(), args));
                (head_x, head_rows, 1)
            }
        };
        let logits = Self::activations(r, "logits", rows, c.vocab);
        let norm = self.vector(r, "final_norm");
        let name = if c.tied { "embed" } else { "lm_head" };
        self.product(r, Shape::Decode { rows }, name, step.chunk, x, logits, norm, Epilogue::Store);
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
        };
        r.call(sampling::sample("sample".to_owned(), rows, self.tuning.sample_threads, args));
        r.call(sampling::advance("advance".to_owned(), AdvanceArgs { step_number }));
    }
}

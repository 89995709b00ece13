//! `attention` over the KV cache pages of each row, and `append`, which writes the pages for a prompt chunk. In decode,
//! one `attention` call does both. Not here: attention on matrix blocks (`flash`, `flash_decode`).

pub mod cache;
pub mod flash;
pub mod flash_decode;
pub mod flash_wgmma;
pub mod latent;
pub mod probe;

use crate::config::KvFormat;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{AppendArgs, AppendConstants, AttentionArgs, AttentionConstants};
use crate::kernels::tags::{Flow, tagged};
use cache::{CachePages, Half, TokenPlace, hadamard, kv_format_of};

/// The number of tokens in a KV cache page.
pub const PAGE_TOKENS: u32 = cache::TOKENS;

/// Variants of attention scores, `scores.glsl`. The default is that of Llama: q · k / sqrt(D) over all earlier tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// The factor of q · k; `None` for 1 / sqrt(D).
    pub scale: Option<f32>,
    /// The number of tokens that a token sees, itself included (sliding window). If it also sees later ones: the least
    /// distance of a token that it does not see, on either side.
    pub window: Option<u32>,
    /// Whether a token also sees later tokens: those of its prompt whose rows are in the same step.
    pub both: bool,
    /// The bound c of `c * tanh(score / c)`.
    pub soft_cap: Option<f32>,
    /// Whether each query head has an attention sink: a score without a value.
    pub sinks: bool,
    /// The offset of each position's query factor in the rotary table, in floats.
    pub query_scales: Option<u32>,
}

impl Scores {
    /// Returns the constants SCALE, WINDOW and SOFT_CAP of kernels.
    fn words(self) -> [u32; 3] {
        [self.scale.map_or(0, f32::to_bits), self.window.unwrap_or(0), self.soft_cap.map_or(0, f32::to_bits)]
    }
}

/// The first token that the token at `position` sees through a window of a kernel's constants.
fn first_visible(window: u32, position: u32) -> u32 {
    if window > 0 { (position + 1).saturating_sub(window) } else { 0 }
}

/// The last token that the token at `position` sees, if its prompt's last row of the step is at `end`.
fn last_visible(both: u32, window: u32, position: u32, end: u32) -> u32 {
    match (both, window) {
        (0, _) => position,
        (_, 0) => end,
        (_, window) => end.min(position + window - 1),
    }
}

/// Returns q · k with the scale and the soft cap of a kernel's constants.
fn score(dot: f64, d: u32, scale: u32, soft_cap: u32) -> f64 {
    let scaled = match scale {
        0 => dot / f64::from(d).sqrt(),
        bits => dot * f64::from(f32::from_bits(bits)),
    };
    match soft_cap {
        0 => scaled,
        bits => {
            let cap = f64::from(f32::from_bits(bits));
            cap * (scaled / cap).tanh()
        }
    }
}

/// The RMS norm of each query and key head. The values are those of the kernels' constant `QK_NORM`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadNorm {
    /// None.
    None = 0,
    /// A norm before RoPE.
    Before = 1,
    /// A norm after RoPE.
    After = 2,
}

/// The heads of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// The number of query heads.
    pub q: u32,
    /// The number of KV heads; divides `q`.
    pub kv: u32,
    /// The number of dimensions of a head; a multiple of 8.
    pub dim: u32,
    /// The number of rotated dimensions (RoPE).
    pub rot: u32,
    /// The norm of q and k (QK-norm).
    pub qk_norm: HeadNorm,
    /// Whether v is normalized per head, without weights.
    pub v_norm: bool,
    /// Whether each value of the output is multiplied by the sigmoid of a gate. The gates follow the v heads in qkv.
    pub gated: bool,
    /// The variant of the scores.
    pub scores: Scores,
    /// The format of cached keys and values.
    pub kv_format: KvFormat,
}

impl Heads {
    /// The number of query heads that share a KV head (GQA).
    pub fn group(self) -> u32 {
        self.q / self.kv
    }

    /// The size of a page of K, or of V, in bytes.
    pub fn page_bytes(self) -> u64 {
        CachePages { format: self.kv_format, kv_heads: self.kv, dim: self.dim }.page_bytes()
    }

    fn kernel(self, f16: &'static str, f32: &'static str, int8: &'static str) -> &'static str {
        match self.kv_format {
            KvFormat::F16 => f16,
            KvFormat::F32 => f32,
            KvFormat::Int8 => int8,
        }
    }

    /// Returns the shared memory that `attention` uses with `threads` invocations, in bytes, if `parts` workgroups share
    /// the query heads of a KV head.
    pub fn shared_bytes(self, parts: u32, threads: u32) -> u32 {
        let (g, d) = (self.group() / parts, self.dim);
        let lanes = threads / (d / 8);
        let scales = if self.kv_format == KvFormat::Int8 { threads } else { 0 };
        4 * (g * d + 2 * d + g * threads + lanes * g * d + 4 * g + 1 + threads.div_ceil(16) + 1 + scales)
    }

    /// Returns the number of floats of a row's partial results.
    pub fn partial_floats(self, splits: u32) -> u64 {
        u64::from(self.kv) * u64::from(splits) * u64::from(self.group()) * u64::from(self.dim + 4)
    }
}

/// The shape of an `attention` call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// The number of rows.
    pub rows: u32,
    /// The maximum number of splits of a row along its context (split-K).
    pub splits: u32,
    /// The number of invocations of a workgroup.
    pub threads: u32,
    /// The number of workgroups that share the query heads of a KV head; divides their number.
    pub parts: u32,
    /// Whether the call also normalizes, rotates and appends.
    pub fused: bool,
}

/// Returns the call for the attention of rows.
pub fn attention(label: String, heads: Heads, shape: AttentionShape, flow: Flow, args: AttentionArgs) -> Call {
    let AttentionShape { rows, splits, threads, parts, fused } = shape;
    assert!(heads.group().is_multiple_of(parts), "{parts} parts of {heads:?}");
    let [scale, window, soft_cap] = heads.scores.words();
    let constants = AttentionConstants {
        threads,
        d: heads.dim,
        rot: heads.rot,
        g: heads.group() / parts,
        kv_heads: heads.kv,
        qk_norm: heads.qk_norm as u32,
        fused: u32::from(fused),
        workers: threads,
        tagged: flow.code(),
        gated: u32::from(heads.gated),
        scale,
        window,
        soft_cap,
        sinks: u32::from(heads.scores.sinks),
        query_scales: if fused { heads.scores.query_scales.unwrap_or(0) } else { 0 },
        parts,
        v_norm: u32::from(heads.v_norm),
        devices: 0,
        both: u32::from(heads.scores.both),
    };
    let args = AttentionArgs { qkv_tag: flow.input, o_tag: flow.output.unwrap_or(0), fault: args.fault.none(), ..args };
    let (qkv, o, partials, counters) = (args.qkv, args.o, args.partials, args.counters);
    let call = Call {
        kernel: heads.kernel("attention.f16", "attention.f32", "attention.int8"),
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [splits, heads.kv * parts, rows],
    };
    // The splits' scratch buffers bypass the L1 cache, and the output's tags order their next use.
    let call = if flow.output.is_some() { call.carry(partials).carry(counters) } else { call };
    flow.mark(call, qkv, o)
}

/// Returns the call that normalizes and rotates `rows` rows of a prompt chunk, and appends their keys and values if they
/// have any.
pub fn append(label: String, heads: Heads, rows: u32, keys: bool, args: AppendArgs) -> Call {
    let constants = AppendConstants {
        threads: 64,
        d: heads.dim,
        rot: heads.rot,
        q_heads: heads.q,
        kv_heads: heads.kv,
        qk_norm: heads.qk_norm as u32,
        query_scales: heads.scores.query_scales.unwrap_or(0),
        v_norm: u32::from(heads.v_norm),
    };
    Call {
        kernel: heads.kernel("append.f16", "append.f32", "append.int8"),
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [heads.q + if keys { 2 * heads.kv } else { 0 }, rows, 1],
    }
}

/// Normalizes a head of values in place, without weights.
fn norm_value(head: &mut [f64], epsilon: f32) {
    norm_rope(head, (HeadNorm::Before as u32, &|_| 1.0), epsilon, 0, |_| (1.0, 0.0));
}

/// Normalizes and rotates one head in place. `qk_norm` is the kernels' constant. All references compute in f64, so that any difference to a device's result
/// is the device's.
fn norm_rope(
    head: &mut [f64],
    (qk_norm, weight): (u32, &dyn Fn(u32) -> f32),
    epsilon: f32,
    rot: u32,
    rope: impl Fn(u32) -> (f32, f32),
) {
    let norm = |head: &mut [f64]| {
        let scale = 1.0 / (head.iter().map(|v| v * v).sum::<f64>() / head.len() as f64 + f64::from(epsilon)).sqrt();
        for (i, value) in head.iter_mut().enumerate() {
            *value *= scale * f64::from(weight(i as u32));
        }
    };
    if qk_norm == HeadNorm::Before as u32 {
        norm(head);
    }
    let half = (rot / 2) as usize;
    for j in 0..half {
        let (c, s) = rope(j as u32);
        let (c, s) = (f64::from(c), f64::from(s));
        let (a, b) = (head[j], head[j + half]);
        head[j] = a * c - b * s;
        head[j + half] = b * c + a * s;
    }
    if qk_norm == HeadNorm::After as u32 {
        norm(head);
    }
}

/// Returns the factor of an output whose gate is float `at` of `gates`, its sigmoid; 1 if there are no gates.
pub(super) fn gate(gated: u32, memory: &HostMemory, gates: Range, at: u32) -> f64 {
    match gated {
        0 => 1.0,
        _ => 1.0 / (1.0 + (-f64::from(memory.f32(gates, at))).exp()),
    }
}

pub(crate) fn reference_append(call: &Call, memory: &mut HostMemory) {
    let format = kv_format_of(call.kernel);
    let a = AppendArgs::from_args(&call.args);
    let c = AppendConstants::from_values(&call.constants);
    for row in 0..call.groups[1] {
        let [_, position, slot, valid] = std::array::from_fn(|i| memory.u32(a.rows, row * 4 + i as u32));
        if valid == 0 {
            continue;
        }
        let page = memory.u32(a.pages, slot * a.max_pages + position / PAGE_TOKENS);
        for h in 0..call.groups[0] {
            let base = row * a.stride + h * c.d;
            let mut head: Vec<f64> = (0..c.d).map(|i| f64::from(memory.f32(a.qkv, base + i))).collect();
            let is_v = h >= c.q_heads + c.kv_heads;
            if !is_v {
                let weight = if h < c.q_heads { a.q_norm } else { a.k_norm };
                let norm = |i: u32| memory.f32(weight, i);
                let rope = |j: u32| rope_at(memory, a.rope, position, c.rot, j);
                norm_rope(&mut head, (c.qk_norm, &norm), a.epsilon, c.rot, rope);
            } else if c.v_norm == 1 {
                norm_value(&mut head, a.epsilon);
            }
            if format == KvFormat::Int8 && !is_v {
                hadamard(&mut head);
            }
            if h < c.q_heads {
                let factor = query_scale(c.query_scales, memory, a.rope, position);
                for (i, value) in (0..).zip(head) {
                    memory.set_f32(a.qkv, base + i, (value * factor) as f32);
                }
                continue;
            }
            let kvh = h - c.q_heads - if is_v { c.kv_heads } else { 0 };
            let (range, half) = if is_v { (a.v, Half::Values) } else { (a.k, Half::Keys) };
            let at = TokenPlace { page, head: kvh, token: position % PAGE_TOKENS };
            CachePages { format, kv_heads: c.kv_heads, dim: c.d }.set_head(memory, range, half, at, &head);
        }
    }
}

/// Returns the factor of the query at a position.
fn query_scale(query_scales: u32, memory: &HostMemory, rope: Range, position: u32) -> f64 {
    if query_scales > 0 { f64::from(memory.f32(rope, query_scales + position)) } else { 1.0 }
}

fn rope_at(memory: &HostMemory, rope: Range, position: u32, rot: u32, j: u32) -> (f32, f32) {
    let at = (position * (rot / 2) + j) * 2;
    (memory.f32(rope, at), memory.f32(rope, at + 1))
}

pub(crate) fn reference_attention(call: &Call, memory: &mut HostMemory) {
    let (args, constants) = (AttentionArgs::from_args(&call.args), AttentionConstants::from_values(&call.constants));
    let rows: Vec<[u32; 4]> = (0..call.groups[2])
        .map(|row| {
            let [_, position, slot, valid] = std::array::from_fn(|i| memory.u32(args.rows, row * 4 + i as u32));
            [row, position, slot, valid]
        })
        .collect();
    let put = |memory: &mut HostMemory, row, column, value| put_row(&args, &constants, memory, row, column, value);
    attend(kv_format_of(call.kernel), &rows, &args, &constants, memory, &put);
}

/// Writes one value of the output to rows of floats.
pub(super) fn put_row(
    a: &AttentionArgs,
    c: &AttentionConstants,
    memory: &mut HostMemory,
    row: u32,
    column: u32,
    value: f32,
) {
    let at = row * a.output_stride + column;
    match c.tagged {
        0 => memory.set_f32(a.o, at, value),
        _ => memory.set_u32(a.o, at, tagged(value, a.o_tag)),
    }
}

/// The common reference of `attention` and its variants, for rows of {row, position, slot, valid}; `valid` is 0 or the
/// number of rows from this one to its prompt's last in the step. `put` receives the row, the column and the value of each
/// output.
pub(super) fn attend(
    format: KvFormat,
    rows: &[[u32; 4]],
    a: &AttentionArgs,
    c: &AttentionConstants,
    memory: &mut HostMemory,
    put: &dyn Fn(&mut HostMemory, u32, u32, f32),
) {
    let group = c.g * c.parts;
    for &[row, position, slot, valid] in rows {
        if valid == 0 {
            if c.tagged != 0 {
                (0..c.kv_heads * group * c.d).for_each(|i| put(memory, row, i, 0.0));
            }
            continue;
        }
        let cache = CachePages { format, kv_heads: c.kv_heads, dim: c.d };
        for kvh in 0..c.kv_heads {
            let place = |memory: &HostMemory, token: u32| TokenPlace {
                page: memory.u32(a.pages, slot * a.max_pages + token / PAGE_TOKENS),
                head: kvh,
                token: token % PAGE_TOKENS,
            };
            if c.fused == 1 {
                let k_base = row * a.stride + (c.kv_heads * group + kvh) * c.d;
                let mut key: Vec<f64> = (0..c.d).map(|i| f64::from(memory.f32(a.qkv, k_base + i))).collect();
                let norm = |i: u32| memory.f32(a.k_norm, i);
                norm_rope(&mut key, (c.qk_norm, &norm), a.epsilon, c.rot, |j| {
                    rope_at(memory, a.rope, position, c.rot, j)
                });
                if format == KvFormat::Int8 {
                    hadamard(&mut key);
                }
                let mut value: Vec<f64> =
                    (0..c.d).map(|i| f64::from(memory.f32(a.qkv, k_base + c.kv_heads * c.d + i))).collect();
                if c.v_norm == 1 {
                    norm_value(&mut value, a.epsilon);
                }
                let at = place(memory, position);
                cache.set_head(memory, a.k, Half::Keys, at, &key);
                cache.set_head(memory, a.v, Half::Values, at, &value);
            }
            let first = first_visible(c.window, position);
            let last = last_visible(c.both, c.window, position, position + valid - 1);
            let of = |range: Range, half: Half| -> Vec<Vec<f64>> {
                (first..=last).map(|t| cache.head(memory, range, half, place(memory, t))).collect()
            };
            let (keys, values) = (of(a.k, Half::Keys), of(a.v, Half::Values));
            for g in 0..group {
                let h = kvh * group + g;
                let mut query: Vec<f64> =
                    (0..c.d).map(|i| f64::from(memory.f32(a.qkv, row * a.stride + h * c.d + i))).collect();
                if c.fused == 1 {
                    let norm = |i: u32| memory.f32(a.q_norm, i);
                    norm_rope(&mut query, (c.qk_norm, &norm), a.epsilon, c.rot, |j| {
                        rope_at(memory, a.rope, position, c.rot, j)
                    });
                    let factor = query_scale(c.query_scales, memory, a.rope, position);
                    query.iter_mut().for_each(|value| *value *= factor);
                    if format == KvFormat::Int8 {
                        hadamard(&mut query);
                    }
                }
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|key| score(query.iter().zip(key).map(|(q, k)| q * k).sum(), c.d, c.scale, c.soft_cap))
                    .collect();
                let sink = if c.sinks == 1 { f64::from(memory.f32(a.sinks, h)) } else { f64::NEG_INFINITY };
                let top = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum::<f64>() + (sink - top).exp();
                for i in 0..c.d {
                    let mixed: f64 = values.iter().zip(&weights).map(|(value, w)| w * value[i as usize]).sum();
                    let at = row * a.stride + (c.kv_heads * (group + 2) + h) * c.d + i;
                    let gate = gate(c.gated, memory, a.qkv, at);
                    put(memory, row, h * c.d + i, (mixed / sum * gate) as f32);
                }
            }
        }
    }
}

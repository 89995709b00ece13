//! `flash`, the prefill attention: causal attention of a prompt chunk's rows over keys and values of f16 or of codes,
//! after `append` has prepared them; the same result as `attention` without `fused`. Not here: decode steps
//! (`flash_decode`) and f32 caches (`attention`).

use crate::config::KvFormat;
use crate::kernels::attention::cache::{CachePages, Half, TokenPlace, kv_format_of};
use crate::kernels::attention::{Heads, PAGE_TOKENS, first_visible, gate, score};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::Call;
use crate::kernels::shaders::{FlashArgs, FlashConstants};

/// The number of invocations of a workgroup. A tile has half as many (row, query head) pairs.
const THREADS: u32 = 128;

/// The maximum shared memory of a workgroup in bytes, for `flash` with matrix units.
pub const SHARED_BYTES: u32 = 48 * 1024;

/// Returns whether `flash` supports these heads: caches of f16 or of codes, and dimensions that are a multiple of 32 up to
/// 256. It is tuned for 64 and 128 dimensions.
pub fn flash_serves(heads: Heads) -> bool {
    heads.kv_format != KvFormat::F32 && heads.dim.is_multiple_of(32) && (32..=256).contains(&heads.dim)
}

/// Returns the number of tiles of a prompt's `rows` rows. Per KV head, one workgroup or several serve a tile.
pub fn flash_tiles(heads: Heads, rows: u32) -> u32 {
    (rows * heads.group()).div_ceil(THREADS / 2)
}

/// The maximum number of tiles times workgroups per tile for which `partials` and `counters` have room, per KV head.
pub const PARTS: u32 = 32;

/// Returns the size of `partials` in bytes.
pub fn partials_bytes(heads: Heads) -> u64 {
    u64::from(heads.kv * PARTS) * u64::from((heads.dim / 8 + 1) * THREADS) * 16
}

/// Returns the size of `counters` in bytes.
pub fn counters_bytes(heads: Heads) -> u64 {
    u64::from(heads.kv * PARTS) * 4
}

/// Returns the call for the attention of up to `rows` rows of up to `prompts` prompts; `splits` is the maximum number
/// of workgroups that share a tile.
///
/// # Panics
/// If [`flash_serves`] rejects the heads, or rows are not aligned to 16 bytes.
pub fn flash(
    label: String,
    heads: Heads,
    (rows, prompts, splits): (u32, u32, u32),
    matrices: Matrices,
    args: FlashArgs,
) -> Call {
    assert!(flash_serves(heads), "flash does not serve {heads:?}");
    assert!(
        args.stride.is_multiple_of(4) && args.output_stride.is_multiple_of(4),
        "rows of {} and {} floats are not aligned",
        args.stride,
        args.output_stride
    );
    let [scale, window, soft_cap] = heads.scores.words();
    let constants = FlashConstants {
        threads: THREADS,
        d: heads.dim,
        g: heads.group(),
        kv_heads: heads.kv,
        lanes: THREADS,
        splits,
        gated: u32::from(heads.gated),
        scale,
        window,
        soft_cap,
        sinks: u32::from(heads.scores.sinks),
    };
    Call {
        kernel: match (matrices, heads.kv_format) {
            (Matrices::Emulated, KvFormat::Int8) => "flash.int8.plain",
            (Matrices::Emulated, _) => "flash.plain",
            (Matrices::Cooperative, KvFormat::Int8) => "flash.int8",
            (Matrices::Cooperative, _) => "flash",
        },
        label,
        constants: constants.into_values(),
        args: FlashArgs { parts: PARTS, ..args }.into_args(),
        // Each prompt but one may add a tile that is not full.
        groups: [heads.kv, flash_tiles(heads, rows) + prompts.min(rows) - 1, splits],
    }
}

/// The reference computes in f64 and rounds nothing but the result.
pub(crate) fn reference_flash(call: &Call, memory: &mut HostMemory) {
    let a = FlashArgs::from_args(&call.args);
    let c = FlashConstants::from_values(&call.constants);
    let cache = CachePages { format: kv_format_of(call.kernel), kv_heads: c.kv_heads, dim: c.d };
    let d = c.d as usize;
    let [prompts, _, in_use, _] = std::array::from_fn(|i| memory.u32(a.chunk, i as u32));
    for (index, kvh) in (0..prompts).flat_map(|index| (0..c.kv_heads).map(move |kvh| (index, kvh))) {
        let [slot, start, first, _] = std::array::from_fn(|i| memory.u32(a.chunk, 4 + 4 * index + i as u32));
        let end = if index + 1 < prompts { memory.u32(a.chunk, 4 + 4 * (index + 1) + 2) } else { in_use };
        if slot == u32::MAX {
            continue;
        }
        // The keys and values of the tokens so far, in order.
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for row in first..end {
            let position = start + row - first;
            for t in (keys.len() / d) as u32..=position {
                let page = memory.u32(a.pages, slot * a.max_pages + t / PAGE_TOKENS);
                let at = TokenPlace { page, head: kvh, token: t % PAGE_TOKENS };
                keys.extend(cache.head(memory, a.k, Half::Keys, at));
                values.extend(cache.head(memory, a.v, Half::Values, at));
            }
            for h in kvh * c.g..(kvh + 1) * c.g {
                let query: Vec<f64> =
                    (0..c.d).map(|i| f64::from(memory.f32(a.qkv, row * a.stride + h * c.d + i))).collect();
                let of_key = |key: &[f64]| {
                    let dot = key.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>();
                    score(dot, c.d, c.scale, c.soft_cap)
                };
                let first = first_visible(c.window, position) as usize;
                let scores: Vec<f64> = keys.chunks_exact(d).skip(first).map(of_key).collect();
                let sink = if c.sinks == 1 { f64::from(memory.f32(a.sinks, h)) } else { f64::NEG_INFINITY };
                let top = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum::<f64>() + (sink - top).exp();
                let mut sums = vec![0.0; d];
                for (weight, value) in weights.iter().zip(values.chunks_exact(d).skip(first)) {
                    sums.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
                }
                for (i, sum) in (0..).zip(sums) {
                    let gate = gate(c.gated, memory, a.qkv, row * a.stride + (c.kv_heads * (c.g + 2) + h) * c.d + i);
                    memory.set_f32(a.o, row * a.output_stride + h * c.d + i, (sum / total * gate) as f32);
                }
            }
        }
    }
}

//! `flash_decode`: attention of one new token a row on blocks of 16 × 16; the same meaning as `attention`
//! in decode. Deliberately absent: prompts, and keys and values in other formats than f16.

use super::Format;
use super::attention::{Heads, attend};
use super::host_memory::HostMemory;
use super::recording::Call;
use super::shaders::{AttentionArgs, AttentionConstants, FlashDecodeArgs, FlashDecodeConstants};
use super::skinny::Matrices;
use super::tags::Flow;

/// Most splits along a context.
pub const MOST_SPLITS: u32 = 32;

/// Whether the kernel serves such heads.
pub fn serves(heads: Heads) -> bool {
    heads.kv_format == Format::F16 && heads.dim.is_multiple_of(32) && heads.dim <= 256 && heads.group() <= 8
}

/// Shared memory of a workgroup of so many threads, bytes.
pub fn shared_bytes(heads: Heads, threads: u32, matrices: Matrices) -> u32 {
    let (g, d, groups) = (heads.group(), heads.dim, threads / 32);
    let exchange = if matrices == Matrices::ByHand { threads * 32 } else { 0 };
    // Without shuffles wide enough, a value for each four dims.
    let joined = if matrices == Matrices::ByHand { 1 } else { 8 };
    let sums = ((g + 2) + g) * (d / 4) / joined * 4;
    let combined = 2 * g * MOST_SPLITS * 4 + (g * d / 4 + MOST_SPLITS) * 16;
    4 * ((g + 2) * d + g * d + d + g + 1) + combined + groups * (16 * (d / 8 + 1) * 16 + g * 8) + sums + exchange
}

/// Attention of `rows` rows, each split in up to `splits` along its context, by workgroups of `threads`.
#[expect(clippy::too_many_arguments, reason = "a call's shape and operands; each call names all of them")]
pub fn flash_decode(
    label: String,
    heads: Heads,
    rows: u32,
    splits: u32,
    threads: u32,
    matrices: Matrices,
    flow: Flow,
    args: AttentionArgs,
) -> Call {
    assert!(serves(heads) && splits <= MOST_SPLITS, "{splits} splits of {heads:?}");
    let constants = FlashDecodeConstants {
        threads,
        lanes: threads,
        d: heads.dim,
        rot: heads.rot,
        g: heads.group(),
        kv_heads: heads.kv,
        qk_norm: u32::from(heads.qk_norm),
        tagged: flow.code(),
    };
    let a = args;
    let args = FlashDecodeArgs {
        qkv: a.qkv,
        rows: a.rows,
        q_norm: a.q_norm,
        k_norm: a.k_norm,
        rope: a.rope,
        pages: a.pages,
        k: a.k,
        v: a.v,
        partials: a.partials,
        counters: a.counters,
        o: a.o,
        fault: a.fault.none(),
        stride: a.stride,
        output_stride: a.output_stride,
        max_pages: a.max_pages,
        epsilon: a.epsilon,
        qkv_tag: flow.input,
        o_tag: flow.output.unwrap_or(0),
    };
    let call = Call {
        kernel: match matrices {
            Matrices::ByHand => "flash_decode.plain",
            Matrices::Cooperative => "flash_decode",
        },
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [splits, heads.kv, rows],
    };
    // The scratch of the splits is read and written past the near caches and handed on with the output.
    let call = if flow.output.is_some() { call.carry(a.partials).carry(a.counters) } else { call };
    flow.mark(call, a.qkv, a.o)
}

pub(super) fn reference_flash_decode(call: &Call, memory: &mut HostMemory) {
    let a = FlashDecodeArgs::from_args(&call.args);
    let c = FlashDecodeConstants::from_values(&call.constants);
    let args = AttentionArgs {
        qkv: a.qkv,
        rows: a.rows,
        q_norm: a.q_norm,
        k_norm: a.k_norm,
        rope: a.rope,
        pages: a.pages,
        k: a.k,
        v: a.v,
        partials: a.partials,
        counters: a.counters,
        o: a.o,
        fault: a.fault,
        stride: a.stride,
        output_stride: a.output_stride,
        max_pages: a.max_pages,
        epsilon: a.epsilon,
        qkv_tag: a.qkv_tag,
        o_tag: a.o_tag,
    };
    let constants = AttentionConstants {
        threads: c.threads,
        d: c.d,
        rot: c.rot,
        g: c.g,
        kv_heads: c.kv_heads,
        qk_norm: c.qk_norm,
        fused: 1,
        workers: c.threads,
        tagged: c.tagged,
    };
    attend(Format::F16, call.groups[2], &args, &constants, memory);
}

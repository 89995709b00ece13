//! `flash_decode`: attention of one new token a row on blocks of 16 × 16; the same meaning as `attention`
//! in decode. Deliberately absent: prompts, and keys and values in other formats than f16.

use super::Format;
use super::attention::{Heads, attend};
use super::host_memory::HostMemory;
use super::recording::Call;
use super::shaders::{AttentionArgs, AttentionConstants, FlashDecodeConstants};
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
    // The block is `attention`'s, field for field.
    let args = AttentionArgs { fault: args.fault.none(), qkv_tag: flow.input, o_tag: flow.output.unwrap_or(0), ..args };
    let AttentionArgs { qkv, o, partials, counters, .. } = args;
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
    let call = if flow.output.is_some() { call.carry(partials).carry(counters) } else { call };
    flow.mark(call, qkv, o)
}

pub(super) fn reference_flash_decode(call: &Call, memory: &mut HostMemory) {
    let args = AttentionArgs::from_args(&call.args);
    let c = FlashDecodeConstants::from_values(&call.constants);
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

#[cfg(test)]
mod tests {
    use crate::kernels::shaders::find;

    #[test]
    fn the_argument_block_is_that_of_attention() {
        let block = |name| find(name).fields.iter().map(|f| (f.name, f.offset, f.bytes)).collect::<Vec<_>>();
        assert_eq!(block("flash_decode"), block("attention.f16"));
        assert_eq!(block("flash_decode.plain"), block("attention.f16"));
    }
}

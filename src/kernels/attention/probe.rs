//! Probes of prompts' attention: for heads and a kernel, a small recording of one call on numbers that look random, the memory
//! that it starts from, and the comparison of a device's results with the reference's. They show at start that a device
//! computes attention as documented here.
//!
//! Not here: running a probe on a device (`gpu::matrix_units`, `gpu::build`).

use super::cache::{CachePages, Half, TokenPlace};
use super::flash::{self, FlashWay};
use super::{HeadNorm, Heads, PAGE_TOKENS, Scores, flash_wgmma};
use crate::config::KvFormat;
use crate::kernels::gemm::tiled::Packed;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::interpreter;
use crate::kernels::recording::{Range, Recording};
use crate::kernels::shaders::{FlashArgs, FlashConstants};
use crate::memory::pack::Format;

/// The name of the buffer of a probe's results.
pub const RESULTS: &str = "o";

/// The maximum error of averages of values from -1 to 1: rounding changes them by about 1e-3, and that to bfloat16 by 4e-3.
const LIMIT: f32 = 1e-2;

/// A recording of one call, and the memory that it starts from.
#[derive(Clone, Debug)]
pub struct AttentionProbe {
    /// The call, and its buffers.
    pub recording: Recording,
    /// The contents of the buffers before the call.
    pub memory: HostMemory,
    /// Where the results are.
    pub results: Range,
    packed: bool,
}

/// Returns the probe of `rows` rows of a prompt behind `start` tokens that are cached already, with at most `splits`
/// workgroups for a tile.
pub fn probe(heads: Heads, (start, rows): (u32, u32), way: FlashWay, splits: u32) -> AttentionProbe {
    let pages = (start + rows).div_ceil(PAGE_TOKENS);
    let gates = if heads.gated { heads.q } else { 0 };
    let packed = way == FlashWay::Wgmma { packed: true };
    let (stride, width) = ((heads.q + 2 * heads.kv + gates) * heads.dim, heads.q * heads.dim);
    let mut recording = Recording::new("attention");
    let r = &mut recording;
    // A kernel whose tiles have one workgroup each joins no results.
    let whole = matches!(way, FlashWay::Wgmma { .. });
    let none = r.buffer("none", 16).none();
    let args = FlashArgs {
        qkv: r.buffer("qkv", u64::from(rows * stride) * 4),
        chunk: r.buffer("chunk", 32),
        pages: r.buffer("pages", u64::from(pages) * 4),
        k: r.buffer("k", u64::from(pages) * heads.page_bytes()),
        v: r.buffer("v", u64::from(pages) * heads.page_bytes()),
        o: r.buffer(RESULTS, if packed { Packed::bytes(rows, width) } else { u64::from(rows * width) * 4 }),
        partials: if whole { none } else { r.buffer("partials", flash::partials_bytes(heads)) },
        counters: if whole { none } else { r.buffer("counters", flash::counters_bytes(heads)) },
        sinks: r.buffer("sinks", u64::from(heads.q) * 4),
        stride,
        output_stride: if packed { Packed::padded_rows(rows) } else { width },
        max_pages: pages,
        parts: 0,
    };
    r.call(flash::flash("attention".to_owned(), heads, (rows, 1, splits), way, args));
    let mut memory = HostMemory::new(r);
    // Numbers between -1 and 1; scores between about -3 and 3, whatever the scale.
    let value = |i: u32, factor: u32| (i.wrapping_mul(factor) >> 16 & 0xff) as f32 / 128.0 - 1.0;
    let size = heads.scores.scale.map_or(3.0, |scale| 3.0 / (scale * (heads.dim as f32).sqrt()));
    for i in 0..rows * stride {
        memory.set_f32(args.qkv, i, size * value(i, 2_654_435_761));
    }
    for i in 0..heads.q {
        memory.set_f32(args.sinks, i, 3.0 * value(i, 2_654_435_761));
    }
    let cache = CachePages { format: heads.kv_format, kv_heads: heads.kv, dim: heads.dim };
    for (range, half, factor) in [(args.k, Half::Keys, 2_246_822_519), (args.v, Half::Values, 3_266_489_917)] {
        for at in 0..pages * PAGE_TOKENS * heads.kv {
            let place = TokenPlace {
                page: at / heads.kv / PAGE_TOKENS,
                head: at % heads.kv,
                token: at / heads.kv % PAGE_TOKENS,
            };
            let all: Vec<f64> = (0..heads.dim).map(|i| f64::from(value(at * heads.dim + i, factor))).collect();
            cache.set_head(&mut memory, range, half, place, &all);
        }
    }
    for (i, word) in (0..).zip([1, 0, rows, 0, 0, start, 0, 0]) {
        memory.set_u32(args.chunk, i, word);
    }
    for page in 0..pages {
        memory.set_u32(args.pages, page, pages - 1 - page);
    }
    AttentionProbe { recording, memory, results: args.o, packed }
}

/// Returns the probe of the program of `flash_wgmma` with these constants: rows for more than one of its warpgroups, and more
/// blocks of tokens than it has places, unless a window hides them.
pub fn wgmma_probe(constants: &[u32]) -> AttentionProbe {
    let FlashConstants { d, g, kv_heads, gated, scale, window, sinks, .. } = FlashConstants::from_values(constants);
    let heads = Heads {
        q: g * kv_heads,
        kv: kv_heads,
        dim: d,
        rot: d,
        qk_norm: HeadNorm::None,
        v_norm: false,
        gated: gated == 1,
        scores: Scores {
            scale: (scale != 0).then(|| f32::from_bits(scale)),
            window: (window != 0).then_some(window),
            sinks: sinks == 1,
            ..Scores::default()
        },
        kv_format: KvFormat::F16,
    };
    let packed = flash_wgmma::packs(constants);
    // A window hides the first tokens, if it is not so long that the reference would take long.
    let start = 540 + if window <= 1024 { window } else { 0 };
    probe(heads, (start, 72u32.div_ceil(g)), FlashWay::Wgmma { packed }, 1)
}

impl AttentionProbe {
    /// Returns a description of the first result in which `found`, the memory after the call on a device, differs from the
    /// reference; `None` if they agree.
    pub fn difference(&self, found: &HostMemory) -> Option<String> {
        let mut wanted = self.memory.clone();
        interpreter::run(&self.recording, &mut wanted);
        let values = |memory: &HostMemory| -> Vec<f32> {
            let numbers = 0..self.results.bytes as u32 / 2;
            match self.packed {
                true => numbers.map(|i| memory.weight(Format::Bf16, self.results, i)).collect(),
                false => memory.floats(self.results),
            }
        };
        let [wanted, found] = [&wanted, found].map(values);
        let mut all = wanted.iter().zip(&found).enumerate();
        let differs = |difference: f32| difference.is_nan() || difference.abs() > LIMIT;
        all.find(|(_, (wanted, found))| differs(*wanted - *found))
            .map(|(at, (wanted, found))| format!("value {at} is {found}, not {wanted}"))
    }
}

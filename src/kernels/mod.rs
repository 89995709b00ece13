//! The host half of each shader: its arguments, its dispatch size, and a `reference()` in plain Rust; and the
//! `Recording`, a list of kernel calls. Not here: the order of a model's layers.

pub mod attention;
pub mod barriers;
pub mod bench;
pub mod code_probe;
pub mod delta;
pub mod delta_probe;
pub mod deterministic;
pub mod draft;
pub mod embed;
pub mod exchange;
pub mod gemm;
pub mod host_memory;
pub mod interpreter;
pub mod layout;
pub mod moe;
pub mod pack_codes;
pub mod programs;
pub mod ptx;
pub mod recording;
pub mod region;
pub mod sampling;
pub mod shaders;
pub mod short_conv;
pub mod state;
pub mod stream;
pub mod tags;

use crate::memory::pack::Format;
use crate::quant::number::Number;
use crate::quant::{Codes, Minimum};
use host_memory::HostMemory;
use recording::Call;

/// Returns the number format in a kernel's variant name, for example `gemv.bf16` or `tiled.f16.plain`. Names without
/// one mean bfloat16. `codes` is the value of the constant of that name, for variants with codes.
pub fn format_of(kernel: &str, codes: u32) -> Format {
    let format = |part: &str| match part {
        "f16" => Some(Format::F16),
        "f32" => Some(Format::F32),
        "codes" => Some(Format::Codes(codes_of(codes))),
        _ => None,
    };
    kernel.split('.').find_map(format).unwrap_or(Format::Bf16)
}

/// Returns the value of a kernel's constant `codes` for weights in a format: `codes.glsl` describes it. 0 for formats
/// without codes.
pub fn codes_word(format: Format) -> u32 {
    let Format::Codes(codes) = format else { return 0 };
    let number = match codes.number {
        Number::Affine => 0,
        Number::E4m3 => 1,
        Number::E2m1 => 2,
        Number::E5m2 => 3,
    };
    let minimum = match codes.minimum {
        Minimum::Stored => 1 << 14,
        Minimum::Zero { halves } => u32::from(halves) << 16,
    };
    codes.bits | codes.group << 4 | number << 12 | minimum
}

/// Returns the value of a kernel's constant for weights of any format: the bits of [`codes_word`], or of numbers 0 in the
/// lowest four bits and the format above them.
pub fn format_word(format: Format) -> u32 {
    match format {
        Format::Bf16 => 0,
        Format::F16 => 1 << 4,
        Format::F32 => 2 << 4,
        Format::Codes(_) => codes_word(format),
    }
}

/// Returns the format of a constant that [`format_word`] gives.
pub(crate) fn format_of_word(word: u32) -> Format {
    match (word & 15, word >> 4) {
        (0, 0) => Format::Bf16,
        (0, 1) => Format::F16,
        (0, _) => Format::F32,
        _ => Format::Codes(codes_of(word)),
    }
}

/// Returns the format of a constant `codes`.
pub(crate) fn codes_of(word: u32) -> Codes {
    Codes {
        bits: word & 15,
        group: word >> 4 & 255,
        number: match word >> 12 & 3 {
            0 => Number::Affine,
            1 => Number::E4m3,
            2 => Number::E2m1,
            _ => Number::E5m2,
        },
        minimum: match word >> 14 & 1 {
            1 => Minimum::Stored,
            _ => Minimum::Zero { halves: (word >> 16) as u16 },
        },
    }
}

/// A plain-Rust implementation of a kernel over the buffers of a recording, which defines what the kernel computes.
pub type Reference = fn(&Call, &mut HostMemory);

/// Returns the reference of a kernel's family (the name up to the first dot).
///
/// # Panics
/// If no such kernel exists. Recordings name compiled shaders only.
pub fn reference(kernel: &str) -> Reference {
    match kernel.split('.').next().unwrap_or(kernel) {
        "clear_tags" => tags::reference_clear_tags,
        "embed_rows" => embed::reference_embed_rows,
        "gemv" => gemm::reference_gemv,
        "gemv_dots" => gemm::gemv_dots::reference_gemv_dots,
        "skinny" => gemm::skinny::reference_skinny,
        "skinny_codes" => gemm::codes::reference_skinny_codes,
        "expand_codes" => gemm::codes::reference_expand_codes,
        "matmul" => gemm::matmul::reference_matmul,
        "block_rows" => gemm::matmul::reference_block_rows,
        "pack_rows" => gemm::tiled::reference_pack_rows,
        "order_rows" => gemm::order::reference_order_rows,
        "order_packed" => gemm::order::reference_order_packed,
        "panel" => gemm::panel::reference_panel,
        "tiled" => gemm::tiled::reference_tiled,
        "wgmma" => gemm::wgmma::reference_wgmma,
        "flash_wgmma" => attention::flash::reference_flash,
        "take_last" => gemm::reference_take_last,
        "all_reduce" => exchange::reference_all_reduce,
        "all_gather" => exchange::reference_all_gather,
        "await_gate" => exchange::reference_await_gate,
        "add_branch" => stream::reference_add_branch,
        "norm_groups" => stream::reference_norm_groups,
        "norm_heads" => stream::reference_norm_heads,
        "bound_logits" => stream::reference_bound_logits,
        "row_scales" => stream::reference_row_scales,
        "pool_rows" => stream::reference_pool_rows,
        "gate_rows" => stream::reference_gate_rows,
        "flash_decode" => attention::flash_decode::reference_flash_decode,
        "plan_splits" => attention::flash_decode::reference_plan_splits,
        "delta_step" => delta::reference_delta_step,
        "delta_blocks" | "delta_blocks_matrix" => delta::reference_delta_blocks,
        "delta_scan" | "delta_scan_matrix" => delta::reference_delta_scan,
        "delta_gate" => delta::reference_delta_gate,
        "short_conv_step" => short_conv::reference_short_conv_step,
        "short_conv_prompts" => short_conv::reference_short_conv_prompts,
        "verify_rows" => draft::reference_verify_rows,
        "decode_rows" => embed::reference_decode_rows,
        "next_tokens" => draft::reference_next_tokens,
        "draft_rows" => draft::reference_draft_rows,
        "shift_tokens" => draft::reference_shift_tokens,
        "join_norms" => draft::reference_join_norms,
        "join_rows" => draft::reference_join_rows,
        "store_draft" => draft::reference_store_draft,
        "note_tokens" => draft::reference_note_tokens,
        "look_up" => draft::reference_look_up,
        "append" => attention::reference_append,
        "latent_rows" => attention::latent::reference_latent_rows,
        "latent_values" => attention::latent::reference_latent_values,
        "attention" => attention::reference_attention,
        "flash" | "flash_f32" | "flash_matrix" => attention::flash::reference_flash,
        "pack_codes" => pack_codes::reference_pack_codes,
        "expert_skinny" => moe::reference_expert_skinny,
        "expert_choose" => moe::reference_expert_choose,
        "expert_route" => moe::reference_expert_route,
        "expert_gemv" => moe::reference_expert_gemv,
        "expert_plan" => moe::reference_expert_plan,
        "expert_combine" => moe::reference_expert_combine,
        "fragment_layout" => gemm::fragment_layout::reference_fragment_layout,
        "read_bandwidth" => bench::reference_read_bandwidth,
        "argmax" => sampling::reference_argmax,
        "shared_rows" => sampling::shared::reference_shared_rows,
        "shortlist" => sampling::shared::reference_shortlist,
        "draw_shortlisted" => sampling::shared::reference_draw_shortlisted,
        "sample" => sampling::reference_sample,
        "advance" => sampling::reference_advance,
        "patch" => sampling::reference_patch,
        "clear_counts" => sampling::reference_clear_counts,
        "mark_prompt" => sampling::reference_mark_prompt,
        "take_rows" => sampling::score::reference_take_rows,
        "score" => sampling::score::reference_score,
        "score_part" => sampling::score::reference_score_part,
        "join_scores" => sampling::score::reference_join_scores,
        other => panic!("kernel \"{other}\" has no reference"),
    }
}

/// Returns whether each workgroup of a call polls all of the tagged words that the call reads, not only a part of them.
pub fn waits_for_all(call: &Call) -> bool {
    if call.kernel.starts_with("expert_skinny") {
        // A workgroup of the first stage does not poll the rows of x that did not choose its expert. But it polls every
        // word of the router's logits, and the router's product has polled all of x, so all of x is complete. A workgroup of
        // the second stage polls what its experts read: all values, unless other calls have the other experts. Of a shared
        // expert's output it polls only the words of its own rows, before it writes those: they are behind whoever has all of y.
        let c = shaders::ExpertSkinnyConstants::from_values(&call.constants);
        return c.stage == 0 || c.part_experts == 0;
    }
    // With parts of the columns side by side, a workgroup that writes y has polled for its part of x, and for sums of a
    // workgroup of each other part, which has polled for that part of x. Of a part alone, nobody polls for the rest of x.
    if call.kernel.starts_with("skinny_codes") {
        let c = shaders::SkinnyCodesConstants::from_values(&call.constants);
        return c.column_parts > 1 || c.own_units == c.units;
    }
    call.kernel.starts_with("skinny")
}

/// Returns the dispatch size for `blocks` × `rows` workgroups, with no dimension above 65,535, which every driver
/// allows: x and z together count the blocks, as `block = z * groups.x + x`.
pub fn fold(blocks: u32, rows: u32) -> [u32; 3] {
    const LIMIT: u32 = 65_535;
    if blocks <= LIMIT {
        [blocks, rows, 1]
    } else {
        let z = blocks.div_ceil(LIMIT);
        [blocks.div_ceil(z), rows, z]
    }
}

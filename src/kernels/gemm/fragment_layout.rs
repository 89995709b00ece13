//! `fragment_layout`, the probe of the cooperative matrix layout: which elements of blocks of 16 × 16 and 16 × 8 each lane of
//! a device holds, and the layout that the kernels which fill blocks element by element require. Not here: running the
//! probe (`gpu::matrix_units`).

use super::Format;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{FragmentLayoutArgs, FragmentLayoutConstants};

/// The number of floats that the kernel writes for 32 lanes: 8 for each of three blocks of 16 × 16, and 4 for each of two
/// blocks of 16 × 8.
pub const FOUND: u32 = 32 * 32;

/// Returns the call that writes the element numbers, [`FOUND`] floats, for blocks of bfloat16 or f16.
///
/// # Panics
/// For f32: blocks consist of 16-bit numbers.
pub fn fragment_layout(format: Format, found: Range) -> Call {
    Call {
        kernel: match format {
            Format::Bf16 => "fragment_layout.bf16",
            Format::F16 => "fragment_layout.f16",
            Format::F32 | Format::Codes(_) => panic!("blocks are of 16-bit numbers"),
        },
        label: "fragment_layout".to_owned(),
        constants: FragmentLayoutConstants { threads: 32 }.into_values(),
        args: FragmentLayoutArgs { found }.into_args(),
        groups: [1, 1, 1],
    }
}

/// Returns the layout that the kernels require of blocks of `format`: lane 4g + t has rows g and g + 8 of tokens and sums,
/// columns g and g + 8 of weights, and in the other dimension 2t, 2t + 1, 2t + 8 and 2t + 9. In blocks of 16 × 8, which
/// exist for f16 only, it has those rows of column g of tokens, and columns 2t and 2t + 1 of rows g and g + 8 of sums.
pub fn expected(format: Format) -> Vec<f32> {
    let along = |t: u32| [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9];
    let mut all = Vec::new();
    for (g, t) in (0..32).map(|lane| (lane / 4, lane % 4)) {
        let rows = || [g, g + 8].into_iter().flat_map(|row| along(t).map(|column| row * 16 + column));
        let columns = [g, g + 8].into_iter().flat_map(|column| along(t).map(|row| row * 16 + column));
        let few = along(t).into_iter().map(|row| row * 8 + g);
        let few_sums = [g, g + 8].into_iter().flat_map(|row| [2 * t, 2 * t + 1].map(|column| row * 8 + column));
        let there = u32::from(format == Format::F16);
        let few = few.chain(few_sums).map(|number| number * there);
        all.extend(rows().chain(columns).chain(rows()).chain(few).map(|number| number as f32));
    }
    all
}

pub(crate) fn reference_fragment_layout(call: &Call, memory: &mut HostMemory) {
    let found = FragmentLayoutArgs::from_args(&call.args).found;
    let format = if call.kernel == "fragment_layout.f16" { Format::F16 } else { Format::Bf16 };
    for (i, value) in (0..).zip(expected(format)) {
        memory.set_f32(found, i, value);
    }
}

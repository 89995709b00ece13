//! Gated short convolutions: `short_conv_step` for rows that decode and verification, and `short_conv_prompts` for prefill.
//! Not here: the projections before and after, and the assignment of cells.

use super::Format;
use super::delta::{NO_CELL, RING};
use super::embed::CELL_WORDS;
use super::gemm::tiled::{PackedOrder, TILE_TOKENS};
use super::host_memory::HostMemory;
use super::recording::{Call, Range};
use super::shaders::{ShortConvPromptsArgs, ShortConvPromptsConstants, ShortConvStepArgs, ShortConvStepConstants};
use super::tags::{Flow, tagged};
use crate::memory::pack::FRAGMENT_COLS;

/// The number of taps that the kernels support. A window holds the inputs before a step and those of up to
/// [`MOST_TOKENS`] tokens of the step, so that the step can be run again.
pub const TAPS: std::ops::RangeInclusive<u32> = 2..=RING - MOST_TOKENS + 1;
/// The maximum number of tokens of a sequence in a step.
pub const MOST_TOKENS: u32 = super::delta::MOST_PENDING;
/// The number of channels of a layer is a multiple of this.
pub const CHANNEL_MULTIPLE: u32 = 4;
/// The number of rows that an invocation of `short_conv_prompts` computes.
const BLOCK: u32 = 16;
/// The number of invocations of a workgroup.
const THREADS: u32 = 64;

/// The dimensions of a short-convolution layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvShape {
    /// The number of channels.
    pub channels: u32,
    /// The number of taps.
    pub taps: u32,
    /// Whether a bias is added to the convolution's result.
    pub bias: bool,
}

impl ConvShape {
    /// Returns the size of the windows of `cells` cells in bytes.
    pub fn window_bytes(self, cells: u32) -> u64 {
        4 * u64::from(cells) * u64::from(RING * self.channels)
    }

    fn check(self, packed: Option<PackedOrder>, stride: u32, y_stride: u32) {
        assert!(TAPS.contains(&self.taps) && self.channels.is_multiple_of(CHANNEL_MULTIPLE), "{self:?}");
        assert!(stride >= 3 * self.channels && stride.is_multiple_of(4), "rows of {stride} floats for {self:?}");
        let fits = match packed {
            Some(PackedOrder::Fragments) => self.channels == y_stride * FRAGMENT_COLS,
            Some(order) => self.channels.is_multiple_of(order.block_cols()) && y_stride.is_multiple_of(TILE_TOKENS),
            None => y_stride >= self.channels && y_stride.is_multiple_of(4),
        };
        assert!(fits, "output rows of {y_stride} for {self:?}, packed {packed:?}");
    }

    /// The number of workgroups that serve all channels of a row.
    fn groups(self) -> u32 {
        (self.channels / 4).div_ceil(THREADS)
    }
}

/// Returns the call that processes `tokens` tokens, of which some may be rejected later, of each of `sequences` sequences of a
/// step. A sequence's tokens are consecutive rows at consecutive positions; rows without a token follow the others. With
/// `packed`, the output is packed for the next product in this order, and its stride is
/// [`Packed::stride`](super::gemm::tiled::Packed::stride). Only rows with a token are written; with tagged operands, all rows are.
///
/// # Panics
/// If there are not 1 to [`MOST_TOKENS`] tokens, dimensions or strides are not supported, or the output is both packed and
/// tagged.
pub fn short_conv_step(
    label: String,
    shape: ConvShape,
    (sequences, tokens): (u32, u32),
    packed: Option<PackedOrder>,
    flow: Flow,
    args: ShortConvStepArgs,
) -> Call {
    shape.check(packed, args.stride, args.y_stride);
    assert!((1..=MOST_TOKENS).contains(&tokens), "{tokens} tokens of a sequence");
    assert!(packed.is_none() || flow.output.is_none(), "packed words carry no tags");
    let constants = ShortConvStepConstants {
        threads: THREADS,
        channels: shape.channels,
        taps: shape.taps,
        bias: u32::from(shape.bias),
        tagged: flow.code(),
        packed: PackedOrder::word(packed),
        tokens,
        devices: 0,
    };
    let args =
        ShortConvStepArgs { fault: args.fault.none(), x_tag: flow.input, y_tag: flow.output.unwrap_or(0), ..args };
    let (x, y) = (args.x, args.y);
    let call = Call {
        kernel: "short_conv_step",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [shape.groups(), sequences, 1],
    };
    flow.mark(call, x, y)
}

/// Returns the call that processes up to `rows` rows of a prompt step: those of its prompts and of the slots that decode in it.
/// With `packed`, the output is packed for the next product in this order, and rows beyond the last are zero up to a multiple
/// of 64.
///
/// # Panics
/// If dimensions or strides are not supported.
pub fn short_conv_prompts(
    label: String,
    shape: ConvShape,
    rows: u32,
    packed: Option<PackedOrder>,
    args: ShortConvPromptsArgs,
) -> Call {
    shape.check(packed, args.stride, args.y_stride);
    let constants = ShortConvPromptsConstants {
        threads: THREADS,
        channels: shape.channels,
        taps: shape.taps,
        bias: u32::from(shape.bias),
        packed: PackedOrder::word(packed),
        rows: BLOCK,
    };
    Call {
        kernel: "short_conv_prompts",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [shape.groups(), rows.next_multiple_of(TILE_TOKENS) / BLOCK, 1],
    }
}

/// The weights of a layer, in memory.
#[derive(Clone, Copy)]
struct Weights {
    conv: Range,
    bias: Option<Range>,
    channels: u32,
    taps: u32,
}

impl Weights {
    /// Returns a channel's result for a token, `back` of which returns the input of the token so many tokens before it.
    fn convolved(self, memory: &HostMemory, channel: u32, back: impl Fn(u32) -> f64) -> f64 {
        let tap = |j: u32| f64::from(memory.f32(self.conv, channel * self.taps + j)) * back(self.taps - 1 - j);
        let bias = self.bias.map_or(0.0, |bias| f64::from(memory.f32(bias, channel)));
        (0..self.taps).map(tap).sum::<f64>() + bias
    }
}

fn put(memory: &mut HostMemory, y: Range, packed: u32, (row, column, y_stride): (u32, u32, u32), value: f32) {
    match PackedOrder::of_word(packed) {
        None => memory.set_f32(y, row * y_stride + column, value),
        Some(order) => memory.set_number(Format::Bf16, y, order.index(row, column, y_stride) as u32, value),
    }
}

/// Computes in f64, from inputs of the convolution that are rounded to f32 as they are stored.
pub(super) fn reference_short_conv_step(call: &Call, memory: &mut HostMemory) {
    let a = ShortConvStepArgs::from_args(&call.args);
    let c = ShortConvStepConstants::from_values(&call.constants);
    let channels = c.channels;
    let weights = Weights { conv: a.conv, bias: (c.bias == 1).then_some(a.bias), channels, taps: c.taps };
    for first_row in (0..call.groups[1] * c.tokens).step_by(c.tokens as usize) {
        let mut rows = first_row..first_row + c.tokens;
        let valid = rows.clone().take_while(|row| memory.u32(a.rows, row * 4 + 3) != 0).count() as u32;
        let [start, cell] = [1, 2].map(|word| memory.u32(a.rows, first_row * 4 + word));
        let place = |position: u32, channel: u32| (cell * RING + position % RING) * channels + channel;
        for (token, row) in (0..).zip(rows.by_ref().take(valid as usize)) {
            for channel in 0..weights.channels {
                let [gate, output, x] = [0, 1, 2].map(|n| memory.f32(a.x, row * a.stride + n * channels + channel));
                memory.set_f32(a.window, place(start + token, channel), gate * x);
                let back = |n: u32| match (start + token).checked_sub(n) {
                    Some(position) => f64::from(memory.f32(a.window, place(position, channel))),
                    None => 0.0,
                };
                let value = (f64::from(output) * weights.convolved(memory, channel, back)) as f32;
                match c.tagged {
                    3 => memory.set_u32(a.y, row * a.y_stride + channel, tagged(value, a.y_tag)),
                    _ => put(memory, a.y, c.packed, (row, channel, a.y_stride), value),
                }
            }
        }
        for (row, channel) in rows.filter(|_| c.tagged > 0).flat_map(|row| (0..channels).map(move |c| (row, c))) {
            match c.tagged {
                3 => memory.set_u32(a.y, row * a.y_stride + channel, tagged(0.0, a.y_tag)),
                _ => put(memory, a.y, c.packed, (row, channel, a.y_stride), 0.0),
            }
        }
    }
}

/// Computes in f64, from inputs of the convolution that are rounded to f32 as they are stored.
pub(super) fn reference_short_conv_prompts(call: &Call, memory: &mut HostMemory) {
    let a = ShortConvPromptsArgs::from_args(&call.args);
    let c = ShortConvPromptsConstants::from_values(&call.constants);
    let (channels, taps) = (c.channels, c.taps);
    let weights = Weights { conv: a.conv, bias: (c.bias == 1).then_some(a.bias), channels, taps };
    let [prompts, _, used, decoding] = std::array::from_fn(|word| memory.u32(a.chunk, word as u32));
    for index in 0..prompts {
        let [slot, start, first_row, _] = std::array::from_fn(|word| memory.u32(a.chunk, 4 + 4 * index + word as u32));
        let end_row = if index + 1 < prompts { memory.u32(a.chunk, 4 + 4 * (index + 1) + 2) } else { used };
        let [own_cell, at0, keep0, at1, keep1] =
            std::array::from_fn(|word| memory.u32(a.cells, CELL_WORDS * index + word as u32));
        let (from, keeps) = match index + decoding >= prompts {
            true => (slot, [(0, NO_CELL); 2]),
            false => (own_cell, [(at0, keep0), (at1, keep1)]),
        };
        let place = |cell: u32, position: u32, channel: u32| (cell * RING + position % RING) * channels + channel;
        let rows = end_row - first_row;
        for channel in 0..channels {
            // The inputs before the prompt's rows, then theirs.
            let before = (1..taps).rev().map(|n| match (start.checked_sub(n), from) {
                (None, _) | (_, NO_CELL) => 0.0,
                (Some(position), cell) => memory.f32(a.window, place(cell, position, channel)),
            });
            let of_row = |row: u32| {
                let at = row * a.stride + channel;
                memory.f32(a.x, at) * memory.f32(a.x, at + 2 * channels)
            };
            let inputs: Vec<f32> = before.chain((first_row..end_row).map(of_row)).collect();
            for row in 0..rows {
                let back = |n: u32| f64::from(inputs[(row + taps - 1 - n) as usize]);
                let output = f64::from(memory.f32(a.x, (first_row + row) * a.stride + channels + channel));
                let value = (output * weights.convolved(memory, channel, back)) as f32;
                put(memory, a.y, c.packed, (first_row + row, channel, a.y_stride), value);
            }
            let ends = [(rows, slot)].into_iter().chain(keeps).filter(|(end, _)| *end > 0 && slot != NO_CELL);
            for ((end, cell), n) in ends.flat_map(|end| (1..taps).map(move |n| (end, n))) {
                let Some(position) = (start + end).checked_sub(n) else { continue };
                if end >= n || from != cell {
                    memory.set_f32(a.window, place(cell, position, channel), inputs[(end + taps - 1 - n) as usize]);
                }
            }
        }
    }
    if c.packed > 0 {
        for row in used..used.next_multiple_of(TILE_TOKENS) {
            (0..channels).for_each(|column| put(memory, a.y, c.packed, (row, column, a.y_stride), 0.0));
        }
    }
}

//! The probe of prompts' delta rule: for heads and a way to multiply, a small recording of its three calls on numbers that look
//! random, and the memory that it starts from. It shows at start that a device computes what is documented.
//!
//! Not here: running a probe on a device, and the comparison with the reference (`gpu::matrix_units`).

use super::delta::{DeltaHeads, DeltaWay, PromptOperands, delta_prompts, scratch_bytes};
use super::host_memory::HostMemory;
use super::recording::{Range, Recording};

/// The name of the buffer of a probe's results.
pub const RESULTS: &str = "results";
/// The maximum error of outputs of a root mean square near 1, and of states of elements up to about 1. Sums of f32 are wrong by
/// about 2e-6, and a state that is a hundredth larger changes results by 1e-2.
pub const LIMIT: f32 = 1e-3;

/// A recording of the calls of one prompt, and the memory that it starts from.
#[derive(Clone, Debug)]
pub struct DeltaProbe {
    /// The calls, and their buffers.
    pub recording: Recording,
    /// The contents of the buffers before the calls.
    pub memory: HostMemory,
    /// Where the results are: the outputs, then the states.
    pub results: Range,
}

/// Returns the probe of `rows` rows of a prompt that continues a sequence of 5 tokens.
pub fn probe(heads: DeltaHeads, rows: u32, way: DeltaWay) -> DeltaProbe {
    const START: u32 = 5;
    let mut recording = Recording::new("delta rule");
    let r = &mut recording;
    let stride = heads.projected().next_multiple_of(4);
    let floats = |count: u32| u64::from(count) * 4;
    let (outputs, states) = (floats(rows * heads.output()), heads.state_bytes(1));
    let results = r.buffer(RESULTS, outputs + states);
    let chunk = r.buffer("chunk", 64);
    let operands = PromptOperands {
        x: r.buffer("x", floats(rows * stride)),
        stride,
        chunk: chunk.part(0, 32),
        cells: chunk.part(32, 32),
        conv: r.buffer("conv", floats(heads.channels() * 4)),
        a_log: r.buffer("a_log", floats(heads.value)),
        dt_bias: r.buffer("dt_bias", floats(heads.value)),
        norm: r.buffer("norm", floats(heads.value_dim)),
        epsilon: 1e-6,
        state: results.part(outputs, states),
        window: r.buffer("window", heads.window_bytes(1)),
        scratch: r.buffer("scratch", scratch_bytes(heads, rows, 1, way)),
        y: results.part(0, outputs),
        y_stride: heads.output(),
    };
    delta_prompts("delta", heads, (rows, 1), None, way, operands, None).into_iter().for_each(|call| r.call(call));

    let mut memory = HostMemory::new(r);
    // Numbers between -1 and 1, as a function of their place and a factor that differs from buffer to buffer.
    let value = |i: u32, factor: u32| (i.wrapping_mul(factor) >> 16 & 0xff) as f32 / 128.0 - 1.0;
    let PromptOperands { x, conv, a_log, dt_bias, norm, state, window, .. } = operands;
    for (range, factor, scale, offset) in [
        (x, 2_654_435_761, 2.0, 0.0),
        (conv, 2_246_822_519, 1.0, 0.0),
        (a_log, 3_266_489_917, 1.0, -1.5),
        (dt_bias, 668_265_263, 1.0, -1.0),
        (norm, 374_761_393, 0.5, 1.0),
        (state, 2_654_435_761, 0.5, 0.0),
        (window, 3_266_489_917, 2.0, 0.0),
    ] {
        for i in 0..range.bytes as u32 / 4 {
            memory.set_f32(range, i, scale * value(i, factor) + offset);
        }
    }
    // One prompt with slot and cell 0, and what `delta_blocks` says of its cells.
    for (i, word) in (0..).zip([1, 0, rows, 0, 0, START, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) {
        memory.set_u32(chunk, i, word);
    }
    DeltaProbe { recording, memory, results }
}

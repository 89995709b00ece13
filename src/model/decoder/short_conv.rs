//! Short-convolution layers: their windows, and the stages of a step.
//!
//! Not here: the layers' MLPs (`mlp`).

use super::{Block, Decoder, Mixed, Step, StepShape};
use crate::kernels::recording::Recording;
use crate::kernels::shaders::{ShortConvPromptsArgs, ShortConvStepArgs};
use crate::kernels::short_conv::{self, ConvShape};
use crate::model::config::ShortConv;

/// Returns the dimensions of a configuration's short-convolution layers.
pub(super) fn conv_shape(conv: ShortConv) -> ConvShape {
    ConvShape { channels: conv.channels, taps: conv.taps, bias: conv.bias }
}

impl Decoder<'_> {
    /// Records the stages of the mixer except its output projection. `cells` is the prefix of the names of the layer's state
    /// buffers.
    pub(super) fn short_conv(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        block: &Block,
        cells: &str,
    ) -> Mixed {
        let own = conv_shape(self.config.short_conv.expect("a layer of this kind has a configuration"));
        self.mixer_input(r, shape, step, block, "conv_in", step.projected);
        let (rows, width) = (shape.rows(), own.channels);
        let packed = self.packed_mixed(r, shape, block, width);
        let (y, y_stride) = match packed {
            Some(packed) => (packed.range, packed.stride(rows)),
            None => (step.mixed.range, step.mixed.stride),
        };
        let order = packed.map(|packed| packed.order);
        let conv = self.vector(r, &block.name("conv")).expect("the checkpoint was opened with the weight");
        let bias = self.vector(r, &block.name("conv.bias")).unwrap_or(conv.none());
        let window = r.buffer(&format!("{cells}.window"), own.window_bytes(self.cells));
        let (x, stride) = (step.projected.range, step.projected.stride);
        let label = block.name("short_conv");
        let step_of = |(sequences, tokens): (u32, u32)| {
            let flow = step.flow(Some(x), packed.is_none().then_some(y));
            let (rows, fault) = (step.rows, step.fault);
            let args =
                ShortConvStepArgs { x, rows, conv, bias, window, y, fault, stride, y_stride, x_tag: 0, y_tag: 0 };
            short_conv::short_conv_step(label.clone(), own, (sequences, tokens), order, flow, args)
        };
        let call = match shape {
            StepShape::Decode { rows } => step_of((rows, 1)),
            StepShape::Verify { sequences, drafts } => step_of((sequences, drafts + 1)),
            _ => {
                let (chunk, cells) = (step.chunk, self.state.cells(r));
                let args = ShortConvPromptsArgs { x, chunk, cells, conv, bias, window, y, stride, y_stride };
                short_conv::short_conv_prompts(label, own, rows, order, args)
            }
        };
        r.call(call);
        packed.map_or(Mixed::Rows(step.mixed), Mixed::Packed)
    }
}

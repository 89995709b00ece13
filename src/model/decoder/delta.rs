//! Gated-delta-rule layers (linear attention) and state spaces (Mamba-2): their recurrent state and convolution window, and the stages of a step.
//!
//! Not here: the layers' MLPs (`mlp`).

use super::{Block, Decoder, Mixed, Step, StepShape};
use crate::kernels::delta::{
    self, DecodingRows, DeltaHeads, DeltaRule, DeltaShape, DeltaWay, MOST_PENDING, PromptOperands,
};
use crate::kernels::gemm::matmul::Arithmetic;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::recording::Recording;
use crate::kernels::shaders::DeltaStepArgs;
use crate::kernels::stream;
use crate::model::config::{DeltaNet, StateSpace};

/// Returns the heads of a configuration's gated-delta-rule layers.
pub(super) fn delta_heads(net: DeltaNet) -> DeltaHeads {
    DeltaHeads {
        key: net.key_heads,
        value: net.value_heads,
        key_dim: net.key_dim,
        value_dim: net.value_dim,
        tiled: net.tiled,
        rule: match net.space {
            Some(StateSpace { conv_bias, .. }) => DeltaRule::StateSpace { conv_bias },
            None => DeltaRule::Delta,
        },
    }
}

impl Decoder<'_> {
    /// Returns how the products of prompts' delta rule are computed.
    fn delta_way(&self, heads: DeltaHeads) -> DeltaWay {
        let by_loads = match (self.tuning.fragments, self.tuning.arithmetic) {
            (None, Arithmetic::Matrices(units)) if self.tuning.delta_matrix => {
                DeltaShape::choose(heads, units, self.tuning.shared_bytes)
            }
            _ => None,
        };
        match by_loads {
            Some(shape) => DeltaWay::Loads(shape),
            None => DeltaWay::Fragments(self.tuning.fragments.unwrap_or(Matrices::Emulated)),
        }
    }

    /// Records the stages of the mixer except its output projection. `cells` is the prefix of the names of the layer's
    /// state buffers.
    pub(super) fn delta(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, cells: &str) -> Mixed {
        let c = self.config;
        let heads = delta_heads(c.delta.expect("a layer of this kind has a configuration"));
        self.mixer_input(r, shape, step, block, "in_proj", step.projected);
        let rows = shape.rows();
        let width = heads.output();
        // Each head has a norm here; a state space's output has one over all heads, in its projection, or over groups of them.
        let normed = heads.rule == DeltaRule::Delta;
        let packed = if normed { self.packed_mixed(r, shape, block, width) } else { None };
        let (y, y_stride) = match packed {
            Some(packed) => (packed.range, packed.stride(rows)),
            None => (step.mixed.range, step.mixed.stride),
        };
        let mut vector = |part: &str| {
            let name = block.name(part);
            self.vector(r, &name).unwrap_or_else(|| panic!("the checkpoint was opened with \"{name}\""))
        };
        let [conv, a_log, dt_bias] = ["conv", "a_log", "dt_bias"].map(&mut vector);
        let norm = vector(if normed { "delta_norm" } else { "skip" });
        let state = r.buffer(&format!("{cells}.state"), heads.state_bytes(self.cells));
        let window = r.buffer(&format!("{cells}.window"), heads.window_bytes(self.cells));
        let (x, stride, epsilon) = (step.projected.range, step.projected.stride, c.rms_eps);
        let slots = self.state.slots(r);
        let entries = if self.drafts > 0 { MOST_PENDING } else { 1 };
        let pending = r.buffer(&format!("{cells}.pending"), heads.pending_bytes(self.state.slots, entries));
        if let StepShape::Decode { .. } | StepShape::Verify { .. } = shape {
            let flow = step.flow(Some(x), packed.is_none().then_some(y));
            let args = DeltaStepArgs {
                x,
                rows: step.rows,
                conv,
                a_log,
                dt_bias,
                norm,
                state,
                window,
                slots,
                pending,
                y,
                fault: step.fault,
                chunk: step.chunk.none(),
                stride,
                y_stride,
                epsilon,
                x_tag: 0,
                y_tag: 0,
            };
            let (label, order) = (block.name("delta"), packed.map(|packed| packed.order));
            r.call(match shape {
                StepShape::Verify { sequences, drafts } => {
                    delta::delta_verify(label, heads, (sequences, drafts + 1, entries), order, flow, args)
                }
                _ => delta::delta_step(label, heads, (rows, entries), order, flow, args),
            });
        } else {
            let prompts = self.state.prompts.min(rows);
            let way = self.delta_way(heads);
            let operands = PromptOperands {
                x,
                stride,
                chunk: step.chunk,
                cells: self.state.cells(r),
                conv,
                a_log,
                dt_bias,
                norm,
                epsilon,
                state,
                window,
                scratch: r.buffer("scan", delta::scratch_bytes(heads, rows, prompts, way)),
                y,
                y_stride,
            };
            let decoding = self.mixed_steps().map(|_| DecodingRows {
                most: self.state.prompts.min(rows),
                rows: step.rows,
                slots,
                pending,
                entries,
            });
            let calls = delta::delta_prompts(
                &block.name("delta"),
                heads,
                (rows, prompts),
                packed.map(|packed| packed.order),
                way,
                operands,
                decoding,
            );
            calls.into_iter().for_each(|call| r.call(call));
        }
        match c.delta.and_then(|net| net.space) {
            Some(StateSpace { norm_groups: groups, .. }) if groups > 1 => {
                let weight = self.vector(r, &block.name("delta_norm")).expect("a state space has a norm");
                let flow = step.flow(Some(step.mixed.range), Some(step.normed.range));
                let (label, ends) = (block.name("group_norm"), (step.mixed, step.normed));
                let norm = (weight, epsilon);
                r.call(stream::norm_groups(label, rows, (groups, width / groups), ends, norm, (flow, step.fault)));
                Mixed::Rows(step.normed)
            }
            _ => packed.map_or(Mixed::Rows(step.mixed), Mixed::Packed),
        }
    }
}

//! Dense MLPs: two matrix products with SwiGLU between them.
//!
//! Not here: experts (`experts`).

use super::{Block, Decoder, Step, StepShape};
use crate::kernels::gemm::Epilogue;
use crate::kernels::gemm::panel::Fold;
use crate::kernels::gemm::tiled::Output;
use crate::kernels::recording::Recording;

impl Decoder<'_> {
    pub(super) fn mlp(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block) {
        let c = self.config;
        let (gate_up, down) = (block.name("gate_up"), block.name("down"));
        let norm = self.vector(r, &block.name("mlp_norm"));
        if !self.packs_for(shape, &gate_up) {
            self.product(r, shape, &gate_up, step, step.x, step.mlp, norm, Epilogue::SwiGlu);
            self.product(r, shape, &down, step, step.mlp, step.x, None, Epilogue::Residual);
            return;
        }
        let unscaled = self.unscaled(r, shape);
        let (x, fold) = match unscaled {
            Some(unscaled) => (unscaled.rows, Fold::Scale(unscaled, c.rms_eps)),
            None => (self.pack(r, shape, step, block.name("mlp_pack"), step.x, c.hidden, norm), Fold::None),
        };
        // A weight in several parts writes rows of floats, in which each part has its own columns. Codes are expanded in
        // parts.
        let whole = self.weight(&gate_up).is_none_or(|w| self.parts(w).len() == 1 && !self.in_code_fragments(w));
        let hidden = if whole {
            let hidden = Self::packed(r, "packed.mlp", shape.rows(), c.intermediate);
            self.tiled(r, shape, &gate_up, step, x, Output::Packed(hidden), Epilogue::SwiGlu, fold);
            hidden
        } else {
            self.tiled(r, shape, &gate_up, step, x, Output::Rows(step.mlp), Epilogue::SwiGlu, fold);
            self.pack(r, shape, step, block.name("down_pack"), step.mlp, c.intermediate, None)
        };
        let next = self.vector(r, &block.next_norm);
        let fold = Self::leaves(unscaled, next);
        self.tiled(r, shape, &down, step, hidden, Output::Rows(step.x), Epilogue::Residual, fold);
    }
}

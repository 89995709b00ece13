//! Dense MLPs: two matrix products with a gated linear unit between them.
//!
//! Not here: experts (`experts`).

use super::products::{Operands, Unpacked};
use super::{Block, Decoder, LastProduct, Mixed, Step, StepShape};
use crate::kernels::gemm::panel::Fold;
use crate::kernels::gemm::tiled::{Output, Packed, PackedOrder};
use crate::kernels::gemm::wgmma;
use crate::kernels::gemm::{Epilogue, Glu};
use crate::kernels::recording::Recording;
use crate::model::config::Activation;

impl Decoder<'_> {
    pub(super) fn mlp(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block) {
        let hidden = self.mlp_hidden(r, shape, step, block);
        let after = self.vector(r, &block.name("mlp_post_norm"));
        let next = self.vector(r, &block.next_norm);
        let factor = self.layer_factor(r, block, true);
        self.add_output(
            r,
            shape,
            step,
            LastProduct { weight: &block.name("down"), x: hidden, norm: None, after, next, factor },
        );
    }

    /// Records a dense MLP up to its second product, and returns that product's input.
    pub(super) fn mlp_hidden(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block) -> Mixed {
        let c = self.config;
        let gate_up = block.name("gate_up");
        let norm = self.vector(r, &block.name("mlp_norm"));
        if !self.packs_for(shape, &gate_up) {
            let operands = Operands { weight: &gate_up, x: step.x, y: step.mlp, epilogue: self.activated() };
            self.product(r, shape, step, operands, norm);
            return Mixed::Rows(step.mlp);
        }
        let [order, next_order] = [&gate_up, &block.name("down")].map(|name| self.packed_order(shape, name));
        let (x, fold) = match step.unscaled {
            Some(unscaled) => (unscaled.rows, Fold::Scale(unscaled, c.rms_eps)),
            None => {
                let rows = Unpacked { label: block.name("mlp_pack"), x: step.x, cols: c.hidden, norm, order };
                (self.pack(r, shape, step, rows), Fold::None)
            }
        };
        // A weight in several parts writes rows of floats, in which each part has its own columns. Codes are expanded in
        // parts, unless the product dequantises them itself.
        let expands = Self::expands(shape) && order == PackedOrder::Fragments;
        let whole = |w| self.parts(w).len() == 1 && !(expands && self.in_code_fragments(w));
        let whole = self.weight(&gate_up).is_none_or(whole);
        let packs = match order {
            _ if !self.activated().halves() => false,
            PackedOrder::Fragments => true,
            PackedOrder::Swizzled => wgmma::packs(2 * block.inner),
            PackedOrder::HalfFragments | PackedOrder::HalfSwizzled | PackedOrder::E4m3 => false,
        };
        let whole = whole && order == next_order && packs;
        let hidden = if whole {
            let hidden = Packed { order, ..Self::packed(r, "packed.mlp", shape.rows(), block.inner) };
            let operands = Operands { weight: &gate_up, x, y: Output::Packed(hidden), epilogue: self.activated() };
            self.tiled(r, shape, step, operands, fold);
            hidden
        } else {
            let operands = Operands { weight: &gate_up, x, y: Output::Rows(step.mlp), epilogue: self.activated() };
            self.tiled(r, shape, step, operands, fold);
            let label = block.name("down_pack");
            self.pack(r, shape, step, Unpacked { label, x: step.mlp, cols: block.inner, norm: None, order: next_order })
        };
        Mixed::Packed(hidden)
    }

    /// Returns the gated linear unit of the MLPs, which have a gate.
    pub(super) fn gated(&self) -> Glu {
        match self.activated() {
            Epilogue::Gated(unit) => unit,
            other => panic!("MLPs with {other:?} have no gate"),
        }
    }

    /// Returns the epilogue of the first product of MLPs and experts.
    pub(super) fn activated(&self) -> Epilogue {
        match self.config.activation {
            Activation::Silu => Epilogue::Gated(Glu::Silu),
            Activation::GeluTanh => Epilogue::Gated(Glu::GeluTanh),
            Activation::ClampedSilu { limit } => Epilogue::Gated(Glu::Clamped { limit }),
            Activation::SquaredRelu => Epilogue::SquaredRelu,
        }
    }
}

//! The inputs of layers that depend on the tokens: computed once a step for all layers, and added at the end of each.
//!
//! Not here: the embeddings of the residual stream (`head`).

use super::products::{Operands, Unpacked};
use super::{Block, Decoder, LastProduct, Mixed, Step, StepShape};
use crate::kernels::gemm::panel::Fold;
use crate::kernels::gemm::tiled::Output;
use crate::kernels::gemm::{Activations, Epilogue};
use crate::kernels::recording::Recording;
use crate::kernels::stream;

impl Decoder<'_> {
    /// Records the inputs of all layers: `(norm(P · x · H^-½) + embedding · √width) / √2`, where x are the rows' embeddings,
    /// and the norm is of each layer's `width` values.
    pub(super) fn layer_inputs(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        let c = self.config;
        let Some(of) = c.layer_inputs else { return };
        let all = of.width * c.layers;
        self.linear(r, shape, step, "layer_inputs.projection", (step.x, c.hidden), step.inputs);
        let embedded = Self::activations(r, "layer_inputs.embedded", shape.rows(), all);
        self.look_up(r, shape, step, ("layer_inputs.embed", all, of.scale), embedded, "layer_inputs.embed");
        let norm = self.vector(r, "layer_inputs.norm");
        // The norm of values that are divided by √H is that of the values with H times its epsilon.
        let epsilon = c.rms_eps * c.hidden as f32;
        let parts = (0, c.layers, of.width);
        let (label, added) = ("layer_inputs".to_owned(), (embedded, 1.0));
        r.call(stream::norm_and_add(label, shape.rows(), step.inputs, parts, (norm, epsilon), added));
    }

    /// Records the end of a layer: x += norm(O · (gelu(G · x) ⊙ input)), times the layer's factor.
    pub(super) fn layer_input(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, layer: u32) {
        let c = self.config;
        let Some(of) = c.layer_inputs else { return };
        let gate = Self::activations(r, "layer_input.gate", shape.rows(), of.width);
        self.linear(r, shape, step, &block.name("layer_input.gate"), (step.x, c.hidden), gate);
        let (label, size) = (block.name("layer_input"), (shape.rows(), of.width));
        r.call(stream::gate_rows(label, size, gate, (step.inputs, layer * of.width), self.gated()));
        let name = block.name("layer_input.output");
        let mixed = match self.packs_for(shape, &name) {
            true => {
                let (label, order) = (block.name("layer_input.pack"), self.packed_order(shape, &name));
                let rows = Unpacked { label, x: gate, cols: of.width, norm: None, order };
                Mixed::Packed(self.pack(r, shape, step, rows))
            }
            false => Mixed::Rows(gate),
        };
        let after = self.vector(r, &block.name("layer_input.norm"));
        let factor = self.layer_factor(r, block, false);
        self.add_output(r, shape, step, LastProduct { weight: &name, x: mixed, norm: None, after, next: None, factor });
    }

    /// Records a product of rows of `columns` floats, without a norm.
    pub(super) fn linear(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        name: &str,
        (x, columns): (Activations, u32),
        y: Activations,
    ) {
        match self.packs_for(shape, name) {
            true => {
                let order = self.packed_order(shape, name);
                let rows = Unpacked { label: format!("{name}_pack"), x, cols: columns, norm: None, order };
                let x = self.pack(r, shape, step, rows);
                let operands = Operands { weight: name, x, y: Output::Rows(y), epilogue: Epilogue::Store };
                self.tiled(r, shape, step, operands, Fold::None);
            }
            false => {
                let operands = Operands { weight: name, x, y, epilogue: Epilogue::Store };
                self.product(r, shape, step, operands, None);
            }
        }
    }
}

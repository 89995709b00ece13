//! The projections of latent attention (MLA). Between them, attention has one key head: the latent vector with the
//! rotated part before it, as key and as value.
//!
//! Not here: the attention (`attention`).

use super::{Block, Decoder, Mixed, Step, StepShape};
use crate::kernels::attention::latent::{LatentShape, latent_rows, latent_values};
use crate::kernels::recording::Recording;
use crate::kernels::stream;
use crate::model::config::Latent;

/// The epsilon of the norms of the projections, which no key changes.
const EPSILON: f32 = 1e-6;

impl Decoder<'_> {
    fn latent_shape(&self, latent: Latent) -> LatentShape {
        LatentShape {
            heads: self.config.attention_kinds[0].heads,
            rope: latent.rope,
            nope: latent.nope,
            rank: latent.kv_rank,
            values: latent.value_dim,
        }
    }

    /// Records the projections of a layer's input up to the rows of queries, key and value in `step.qkv`.
    pub(super) fn latent_input(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, latent: Latent) {
        let [input, queries, _] = step.latent;
        let (rows, first) = (shape.rows(), latent.q_rank.unwrap_or(0));
        self.mixer_input(r, shape, step, block, "latent.input", input);
        let norms = [("latent.q_norm", 0, first), ("latent.kv_norm", first + latent.rope, latent.kv_rank)];
        for (name, from, width) in norms.into_iter().filter(|(.., width)| *width > 0) {
            let norm = (self.vector(r, &block.name(name)), EPSILON);
            r.call(stream::norm_heads(block.name(name), rows, input, (from, 1, width), norm));
        }
        match latent.q_rank {
            None => self.mixer_input(r, shape, step, block, "latent.q", queries),
            Some(rank) => self.linear(r, shape, step, &block.name("latent.q"), (input, rank), queries),
        }
        let weights = self.vector(r, &block.name("latent.keys")).expect("a layer has keys");
        let label = block.name("latent.keys");
        let key = (input, first);
        r.call(latent_rows(label, self.latent_shape(latent), rows, queries, key, weights, step.qkv));
    }

    /// Records the heads' values of what attention has mixed, and returns them.
    pub(super) fn latent_output(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        block: &Block,
        latent: Latent,
    ) -> Mixed {
        let [.., values] = step.latent;
        let weights = self.vector(r, &block.name("latent.values")).expect("a layer has values");
        let (label, of) = (block.name("latent.values"), self.latent_shape(latent));
        r.call(latent_values(label, of, shape.rows(), step.attention, weights, values));
        Mixed::Rows(values)
    }
}

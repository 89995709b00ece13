//! The tensors of a model in the layout of released checkpoints, and the distribution of each tensor's elements. The
//! standard deviations keep activations near 1: `1 / sqrt(inputs)` for projections, and more for the LM head, so that
//! one token's logit stands out.

use crate::model::config::{
    Architecture, Attention, BESIDE_DENSE, DeltaNet, Experts, Latent, LayerKind, MlpKind, ModelConfig, NormKind,
    QkNorm, ShortConv, StateSpace,
};

/// The distribution of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Distribution {
    /// The normal distribution.
    Normal { mean: f32, deviation: f32 },
    /// The logarithm of a number that is uniformly distributed between `low` and `high`.
    LogOfUniform { low: f32, high: f32 },
}

/// The standard deviation of norm weights around their mean, and of biases around zero.
const VECTOR_DEVIATION: f32 = 0.1;
/// The standard deviation of the router's logits for a normalised input. With a gain of 1, the least of the chosen
/// experts weighs nearly as much as the greatest, so that a rounding error that changes the choice changes much of the
/// text. With both gains at 1, keeping keys and values in f16 moves the logits of 24 layers (128 experts, 8 chosen) by
/// 5e-2; with these values by 1e-3.
const ROUTER_GAIN: f32 = 4.0;
/// The gain of the experts' down projections. It is below that of other blocks for the reason given at [`ROUTER_GAIN`].
const EXPERT_GAIN: f32 = 0.25;

/// A tensor's name, shape and distribution.
pub(super) type Tensor = (String, Vec<u64>, Distribution);

/// Returns every tensor of the model in the order of a Hugging Face file: matrices, then vectors. `root` is the prefix
/// of all names except those of the LM head and of the multi-token-prediction (MTP) blocks.
pub(super) fn tensors_of(c: &ModelConfig, root: &str) -> Vec<Tensor> {
    let mut list = List { config: c, matrices: Vec::new(), vectors: Vec::new() };
    let single = c.has_single_blocks();
    let [embedding, norm] = if single { ["embeddings", "norm_f"] } else { ["embed_tokens", "norm"] };
    list.matrix(format!("{root}{embedding}.weight"), c.vocab, c.hidden, 2.0);
    for ((layer, kind), mlp) in (0..c.layers).zip(&c.layer_kinds).zip(&c.mlp_kinds) {
        let at = format!("{root}layers.{layer}.");
        list.layer(&at, *kind, (c.attention(layer), c.owns_cache(layer)), (*mlp, c.dense_widths[layer as usize]));
        list.layer_end(&at);
    }
    if let Some(of) = c.layer_inputs {
        let all = of.width * c.layers;
        list.matrix(format!("{root}embed_tokens_per_layer.weight"), of.vocab, all, 1.0);
        list.matrix(format!("{root}per_layer_model_projection.weight"), all, c.hidden, 1.0);
        list.norm(format!("{root}per_layer_projection_norm.weight"), of.width);
    }
    if !c.tied {
        list.matrix("lm_head.weight".to_owned(), c.vocab, c.hidden, 2.0);
    }
    list.norm(format!("{root}{norm}.weight"), c.hidden);
    if c.mtp_layers > 0 {
        list.matrix("mtp.fc.weight".to_owned(), c.hidden, 2 * c.hidden, 1.0);
        let mlp = if c.experts.is_some() { MlpKind::Experts } else { MlpKind::Dense };
        for layer in 0..c.mtp_layers {
            list.layer(
                &format!("mtp.layers.{layer}."),
                LayerKind::Attention,
                (&c.attention_kinds[0], true),
                (mlp, c.intermediate),
            );
        }
        for norm in ["mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"] {
            list.norm(norm.to_owned(), c.hidden);
        }
    }
    list.matrices.append(&mut list.vectors);
    list.matrices
}

struct List<'a> {
    config: &'a ModelConfig,
    matrices: Vec<Tensor>,
    vectors: Vec<Tensor>,
}

impl List<'_> {
    fn matrix(&mut self, name: String, rows: u32, cols: u32, gain: f32) {
        let shape = [rows, cols].map(u64::from).to_vec();
        self.matrices.push((name, shape, projection(cols, gain)));
    }

    fn vector(&mut self, name: String, length: u32, mean: f32) {
        let spread = Distribution::Normal { mean, deviation: VECTOR_DEVIATION };
        self.vectors.push((name, vec![length.into()], spread));
    }

    /// Adds a norm's weights. Their mean is 1, or 0 if they are stored zero-centred.
    fn norm(&mut self, name: String, length: u32) {
        let mean = match self.config.norm {
            NormKind::Plain => 1.0,
            NormKind::ZeroCentred => 0.0,
        };
        self.vector(name, length, mean);
    }

    /// Adds one layer, whose names begin with `at`: its attention, and whether it has keys and values of its own; the kind of
    /// its MLP, and the width of a dense one.
    fn layer(&mut self, at: &str, kind: LayerKind, (attention, own): (&Attention, bool), (mlp, inner): (MlpKind, u32)) {
        let c = self.config;
        match (kind, c.delta, c.short_conv) {
            (LayerKind::None, ..) => {}
            (LayerKind::GatedDelta, Some(delta), _) => self.gated_delta(at, delta),
            (LayerKind::ShortConv, _, Some(conv)) => self.short_conv(at, conv),
            _ => match c.latent {
                Some(latent) => self.latent_attention(at, attention.heads, latent),
                None => self.attention(at, attention, own),
            },
        }
        let experts = c.experts.filter(|_| mlp == MlpKind::Experts);
        let own = format!("{at}{}.", c.module("mlp"));
        if mlp == MlpKind::Dense || experts.is_some_and(|experts| experts.beside_dense) {
            self.dense(&own, inner, c.mlp_bias);
        }
        match experts {
            Some(experts) if experts.beside_dense => self.experts_beside(at, experts),
            Some(experts) => self.experts(&own, experts),
            None => {}
        }
        let norms = c.norms;
        let of_mlp = if c.has_single_blocks() { None } else { norms.mlp };
        for norm in [norms.mixer, norms.after_mixer, of_mlp, norms.after_mlp].into_iter().flatten() {
            self.norm(format!("{at}{norm}.weight"), c.hidden);
        }
    }

    /// Adds what follows a layer's MLP.
    fn layer_end(&mut self, at: &str) {
        let c = self.config;
        if let Some(of) = c.layer_inputs {
            self.matrix(format!("{at}per_layer_input_gate.weight"), of.width, c.hidden, 1.0);
            self.matrix(format!("{at}per_layer_projection.weight"), c.hidden, of.width, 1.0);
            self.norm(format!("{at}post_per_layer_input_norm.weight"), c.hidden);
        }
        if c.layer_scale {
            self.vector(format!("{at}layer_scalar"), 1, 0.8);
        }
    }

    /// Adds experts beside a dense MLP.
    fn experts_beside(&mut self, at: &str, experts: Experts) {
        let hidden = self.config.hidden;
        let (count, inner) = (experts.count, experts.inner);
        self.matrix(format!("{at}router.proj.weight"), count, hidden, ROUTER_GAIN * (hidden as f32).sqrt());
        self.vector(format!("{at}router.scale"), hidden, 1.0);
        self.vector(format!("{at}router.per_expert_scale"), count, 1.0);
        self.fused_experts(at, [count, inner, hidden]);
        for norm in BESIDE_DENSE {
            self.norm(format!("{at}{norm}.weight"), hidden);
        }
    }

    /// Adds all experts as two tensors. Each expert has the rows of its gate projection, then those of its up projection.
    fn fused_experts(&mut self, at: &str, [count, inner, hidden]: [u32; 3]) {
        let parts = [
            ("gate_up_proj", [count, 2 * inner, hidden], projection(hidden, 1.0)),
            ("down_proj", [count, hidden, inner], projection(inner, EXPERT_GAIN)),
        ];
        for (part, shape, spread) in parts {
            self.matrices.push((format!("{at}experts.{part}"), shape.map(u64::from).to_vec(), spread));
        }
    }

    /// Adds latent attention.
    fn latent_attention(&mut self, at: &str, heads: u32, latent: Latent) {
        let hidden = self.config.hidden;
        let Latent { q_rank, kv_rank, nope, rope, value_dim } = latent;
        let name = |part: &str| format!("{at}self_attn.{part}.weight");
        match q_rank {
            None => self.matrix(name("q_proj"), heads * (nope + rope), hidden, 1.0),
            Some(rank) => {
                self.matrix(name("q_a_proj"), rank, hidden, 1.0);
                self.norm(name("q_a_layernorm"), rank);
                self.matrix(name("q_b_proj"), heads * (nope + rope), rank, 1.0);
            }
        }
        self.matrix(name("kv_a_proj_with_mqa"), kv_rank + rope, hidden, 1.0);
        self.norm(name("kv_a_layernorm"), kv_rank);
        self.matrix(name("kv_b_proj"), heads * (nope + value_dim), kv_rank, 1.0);
        self.matrix(name("o_proj"), hidden, heads * value_dim, 1.0);
    }

    /// Adds attention; `own`: also its key and value projections.
    fn attention(&mut self, at: &str, of: &Attention, own: bool) {
        let c = self.config;
        let (q, kv) = (of.q_rows(), of.kv_rows());
        // Each head has the rows of its query, then those of its gate.
        let q_and_gate = if c.attention_gate { 2 * q } else { q };
        let module = c.module("self_attn");
        let name = |part: &str| format!("{at}{module}.{part}");
        self.matrix(name("q_proj.weight"), q_and_gate, c.hidden, 1.0);
        if own {
            self.matrix(name("k_proj.weight"), kv, c.hidden, 1.0);
        }
        if own && !of.values_are_keys {
            self.matrix(name("v_proj.weight"), kv, c.hidden, 1.0);
        }
        self.matrix(name("o_proj.weight"), c.hidden, q, 1.0);
        let norms = match c.qk_norm {
            QkNorm::None => None,
            QkNorm::Heads | QkNorm::RotatedHeads => Some([of.head_dim; 2]),
            QkNorm::Rows => Some([q, kv]),
        };
        let parts = match c.qk_norm {
            QkNorm::RotatedHeads => ["query_layernorm.weight", "key_layernorm.weight"],
            _ => ["q_norm.weight", "k_norm.weight"],
        };
        let parts = parts.into_iter().take(if own { 2 } else { 1 });
        for (part, length) in parts.zip(norms.into_iter().flatten()) {
            self.norm(name(part), length);
        }
        if c.qkv_bias {
            self.vector(name("q_proj.bias"), q_and_gate, 0.0);
            if own {
                self.vector(name("k_proj.bias"), kv, 0.0);
                self.vector(name("v_proj.bias"), kv, 0.0);
            }
        }
        if c.o_bias {
            self.vector(name("o_proj.bias"), c.hidden, 0.0);
        }
        if c.sinks {
            self.vector(name("sinks"), of.heads, 0.0);
        }
    }

    /// Adds a gated-delta-rule layer. The fraction of the state that a step forgets is about `exp(A_log + a +
    /// dt_bias)`. Its logarithm is normally distributed with a standard deviation near 1, so that nine heads in ten
    /// keep between 0.83 and 0.996 of their state per step.
    fn gated_delta(&mut self, at: &str, delta: DeltaNet) {
        let hidden = self.config.hidden;
        if let Some(space) = delta.space {
            return self.state_space(at, (delta, space));
        }
        let name = |part: &str| format!("{at}linear_attn.{part}");
        let (values, heads) = (delta.value_rows(), delta.value_heads);
        if self.config.architecture == Architecture::Qwen3Next {
            // Each key head has its q and k, and the v and z of its value heads. The second tensor has the b and a of
            // those value heads.
            self.matrix(name("in_proj_qkvz.weight"), delta.channels() + values, hidden, 1.0);
            self.matrix(name("in_proj_ba.weight"), 2 * heads, hidden, 0.5);
        } else {
            self.matrix(name("in_proj_qkv.weight"), delta.channels(), hidden, 1.0);
            self.matrix(name("in_proj_z.weight"), values, hidden, 1.0);
            self.matrix(name("in_proj_b.weight"), heads, hidden, 1.0);
            self.matrix(name("in_proj_a.weight"), heads, hidden, 0.5);
        }
        let taps = delta.conv_kernel;
        let shape = [delta.channels(), 1, taps].map(u64::from).to_vec();
        self.matrices.push((name("conv1d.weight"), shape, projection(taps, 1.0)));
        self.matrix(name("out_proj.weight"), hidden, values, 1.0);
        let length = vec![u64::from(heads)];
        self.vectors.push((name("A_log"), length.clone(), Distribution::LogOfUniform { low: 1.0, high: 16.0 }));
        self.vectors.push((name("dt_bias"), length, Distribution::Normal { mean: -5.5, deviation: 0.8 }));
        self.vector(name("norm.weight"), delta.value_dim, 1.0);
    }

    fn short_conv(&mut self, at: &str, conv: ShortConv) {
        let hidden = self.config.hidden;
        let ShortConv { channels, taps, bias } = conv;
        let name = |part: &str| format!("{at}conv.{part}");
        self.matrix(name("in_proj.weight"), conv.projected_rows(), hidden, 1.0);
        let shape = [channels, 1, taps].map(u64::from).to_vec();
        self.matrices.push((name("conv.weight"), shape, projection(taps, 1.0)));
        self.matrix(name("out_proj.weight"), hidden, channels, 1.0);
        if bias {
            self.vector(name("in_proj.bias"), conv.projected_rows(), 0.0);
            self.vector(name("conv.bias"), channels, 0.0);
            self.vector(name("out_proj.bias"), hidden, 0.0);
        }
    }

    /// Adds a state space, which forgets as the layers of [`Self::gated_delta`] do.
    fn state_space(&mut self, at: &str, (delta, space): (DeltaNet, StateSpace)) {
        let hidden = self.config.hidden;
        let module = self.config.module("mamba");
        let name = |part: &str| format!("{at}{module}.{part}");
        let (values, heads, taps) = (delta.value_rows(), delta.value_heads, delta.conv_kernel);
        self.matrix(name("in_proj.weight"), delta.projected_rows(), hidden, 1.0);
        let shape = [delta.channels(), 1, taps].map(u64::from).to_vec();
        self.matrices.push((name("conv1d.weight"), shape, projection(taps, 1.0)));
        if space.conv_bias {
            self.vector(name("conv1d.bias"), delta.channels(), 0.0);
        }
        self.matrix(name("out_proj.weight"), hidden, values, 1.0);
        let length = vec![u64::from(heads)];
        self.vectors.push((name("A_log"), length.clone(), Distribution::LogOfUniform { low: 1.0, high: 16.0 }));
        self.vectors.push((name("dt_bias"), length, Distribution::Normal { mean: -5.5, deviation: 0.8 }));
        self.vector(name("D"), heads, 1.0);
        self.vector(name("norm.weight"), values, 1.0);
    }

    fn dense(&mut self, at: &str, inner: u32, bias: bool) {
        let hidden = self.config.hidden;
        let name = |part: &str| format!("{at}{part}");
        let gated = self.config.activation.has_gate();
        if gated {
            self.matrix(name("gate_proj.weight"), inner, hidden, 1.0);
        }
        self.matrix(name("up_proj.weight"), inner, hidden, 1.0);
        self.matrix(name("down_proj.weight"), hidden, inner, 1.0);
        if bias {
            if gated {
                self.vector(name("gate_proj.bias"), inner, 0.0);
            }
            self.vector(name("up_proj.bias"), inner, 0.0);
            self.vector(name("down_proj.bias"), hidden, 0.0);
        }
    }

    fn experts(&mut self, at: &str, experts: Experts) {
        let hidden = self.config.hidden;
        let (count, inner) = (experts.count, experts.inner);
        self.matrix(format!("{at}gate.weight"), count, hidden, ROUTER_GAIN);
        if self.config.architecture == Architecture::Qwen35Moe {
            self.fused_experts(at, [count, inner, hidden]);
        } else {
            for expert in 0..count {
                let name = |part: &str| format!("{at}experts.{expert}.{part}.weight");
                if self.config.activation.has_gate() {
                    self.matrix(name("gate_proj"), inner, hidden, 1.0);
                }
                self.matrix(name("up_proj"), inner, hidden, 1.0);
                self.matrix(name("down_proj"), hidden, inner, EXPERT_GAIN);
            }
        }
        if let Some(inner) = experts.shared_inner {
            let shared = if self.config.has_single_blocks() { "shared_experts" } else { "shared_expert" };
            self.dense(&format!("{at}{shared}."), inner, false);
            if experts.shared_gate {
                self.matrix(format!("{at}shared_expert_gate.weight"), 1, hidden, 1.0);
            }
        }
        if experts.routing.is_some_and(|routing| routing.choice_bias) {
            self.vector(format!("{at}gate.e_score_correction_bias"), count, 0.0);
        }
        if experts.bias {
            self.vector(format!("{at}gate.bias"), count, 0.0);
            let spread = Distribution::Normal { mean: 0.0, deviation: VECTOR_DEVIATION };
            for (part, rows) in [("gate_up_proj_bias", 2 * inner), ("down_proj_bias", hidden)] {
                let shape = [count, rows].map(u64::from).to_vec();
                self.vectors.push((format!("{at}experts.{part}"), shape, spread));
            }
        }
    }
}

/// Returns the distribution of a projection matrix with `cols` columns.
fn projection(cols: u32, gain: f32) -> Distribution {
    Distribution::Normal { mean: 0.0, deviation: gain / (cols as f32).sqrt() }
}

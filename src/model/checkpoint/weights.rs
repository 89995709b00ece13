//! Builds the list of a model's packed weights and locates each of their rows in the checkpoint's tensors, for all
//! published tensor layouts.
//!
//! Not here: reading the rows' data.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::headers::{self, Headers};
use super::quantised::{self, MatrixRef, Names, QuantisedWeight};
use super::{CheckpointProblem, SourceRef, TensorInfo, WeightKind, WeightSpec};
use crate::memory::pack::{Format, RowMap, SourceFormat, Transposed};
use crate::model::config::{
    Architecture, Attention, BESIDE_DENSE, DeltaNet, DraftHead, Experts, Latent, LayerKind, MlpKind, ModelConfig,
    NormKind, QkNorm, Rope, ShortConv, StateSpace,
};
use crate::model::gguf::tensors::StoredAs;

/// Returns the packed weights. Missing or unsuitable tensors are added to `problems`.
pub(super) fn build(config: &ModelConfig, headers: &Headers, problems: &mut Vec<CheckpointProblem>) -> Vec<WeightSpec> {
    Specs { config, headers, problems, specs: Vec::new(), used: BTreeSet::new() }.build()
}

/// A run of adjacent rows of a tensor and their destination in the packed weight.
#[derive(Clone, Copy)]
struct Slice {
    /// The first row in the tensor.
    from: u32,
    rows: u32,
    /// The packed row of that first row, and the distance in packed rows between consecutive rows.
    first_row: u32,
    row_step: u32,
}

/// A range of a merged weight's rows begins at a multiple of this: kernels write whole chunks of this many outputs.
const RANGE_ROWS: u32 = 32;

/// The place of an origin's rows.
enum Stored<'a> {
    /// The rows are stored in a tensor, row by row.
    Numbers(String, &'a TensorInfo, SourceFormat),
    /// The rows are part of a quantised weight of several tensors.
    Quantised(Arc<QuantisedWeight>),
}

/// Returns the source of a slice of a quantised weight.
fn quantised_source(matrix: &Arc<QuantisedWeight>, slice: &Slice, cols: u32) -> SourceRef {
    let (codes, place) = (&matrix.description.tensors[0], &matrix.places[0]);
    SourceRef {
        tensor: codes.name.clone(),
        path: Arc::clone(&place.path),
        offset: 0,
        map: RowMap {
            first_row: slice.first_row,
            row_step: slice.row_step,
            ..RowMap::whole(SourceFormat::Canonical(matrix.codes), slice.rows, cols)
        },
        transposed: None,
        matrix: Some(MatrixRef { matrix: Arc::clone(matrix), first: slice.from }),
    }
}

/// Returns the format that represents the numbers of two formats exactly, if there is one.
fn both(a: Format, b: Format) -> Option<Format> {
    match (a, b) {
        (Format::Codes(a), Format::Codes(b)) => a.common(b).map(Format::Codes),
        (Format::Codes(_), _) | (_, Format::Codes(_)) => None,
        (a, b) => Some(if a == b { a } else { Format::F32 }),
    }
}

/// The format of numbers that quantised weights are expanded to, if they cannot be packed as codes. Their codes have few
/// bits and their scales are mostly f16.
const EXPANDED: Format = Format::F16;

/// Returns the order of a source's columns, if it is not that of the checkpoint.
fn order_of(source: &SourceRef) -> Option<&Arc<[u32]>> {
    let SourceFormat::Canonical(_) = source.map.format else { return None };
    source.matrix.as_ref().and_then(|of| of.matrix.order.as_ref())
}

/// Returns the sources with quantised ones expanded to numbers.
fn expanded(sources: Vec<SourceRef>) -> Vec<SourceRef> {
    let expand = |source: SourceRef| match &source.matrix {
        Some(_) => SourceRef { map: RowMap { format: SourceFormat::Numbers(Format::F32), ..source.map }, ..source },
        None => source,
    };
    sources.into_iter().map(expand).collect()
}

/// Returns the format that represents the numbers of all sources of a matrix exactly, if there is one; except for those
/// of expanded sources.
fn common(sources: &[SourceRef]) -> Option<Format> {
    let packed = |source: &SourceRef| match source.map.format {
        SourceFormat::Numbers(_) if source.matrix.is_some() => EXPANDED,
        SourceFormat::Numbers(format) => format,
        SourceFormat::NegatedExp => Format::F32,
        SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _) => Format::Codes(blocks.codes()),
        SourceFormat::Canonical(codes) => Format::Codes(codes),
    };
    let formats = sources.iter().map(packed).map(Some);
    formats.reduce(|a, b| both(a?, b?)).unwrap_or(Some(Format::F32))
}

/// Whether the products with a weight can take their inputs in another order. The kernels of experts cannot.
fn takes_order(name: &str) -> bool {
    ![".experts.", ".shared."].iter().any(|part| name.contains(part))
}

/// A tensor that supplies rows of a packed weight. Whatever its shape, it is treated as rows with as many columns as
/// the packed weight has.
struct Origin {
    tensor: String,
    shape: Vec<u64>,
    slices: Vec<Slice>,
    /// The number of rows of each matrix of the tensor if these are stored as its columns. No slice has rows of two
    /// matrices.
    transposed: Option<u32>,
}

/// The names of an expert's matrices: gate, up and down.
const EXPERT_PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// The names of these matrices in Mixtral's experts and in LFM2's MLPs and experts.
const W_PARTS: [&str; 3] = ["w1", "w3", "w2"];

/// The name of the bias that counts for the choice of experts only.
const CHOICE_BIAS: &str = "e_score_correction_bias";
/// Granite's names of the matrices of a shared MLP, and of those of all experts.
const GRANITE_GATE_UP: &str = "input_linear.weight";
const GRANITE_DOWN: &str = "output_linear.weight";

/// How tensors of all experts hold the experts' matrices.
#[derive(Clone, Copy)]
struct Fused {
    /// Whether rows of gate and up alternate. Otherwise all rows of up follow those of gate.
    alternate: bool,
    /// Whether each matrix is stored as its transpose.
    transposed: bool,
}

impl Origin {
    /// All `rows` rows of a matrix with `cols` columns (a vector if `None`), placed at packed row `first_row` and
    /// following.
    fn whole(tensor: String, rows: u32, cols: Option<u32>, first_row: u32) -> Origin {
        Origin::cut(tensor, rows, cols, vec![Slice { from: 0, rows, first_row, row_step: 1 }])
    }

    fn cut(tensor: String, rows: u32, cols: Option<u32>, slices: Vec<Slice>) -> Origin {
        let shape = [Some(rows), cols].into_iter().flatten().map(u64::from).collect();
        Origin { tensor, shape, slices, transposed: None }
    }

    /// The taps of a convolution for each of its channels; `slices` are of the channels' taps, one after the other.
    fn taps(tensor: String, [channels, taps]: [u32; 2], slices: Vec<Slice>) -> Origin {
        Origin { tensor, shape: [channels, 1, taps].map(u64::from).to_vec(), slices, transposed: None }
    }

    /// The matrices of all experts in one tensor; `slices` are of their stacked rows.
    fn fused(tensor: String, [count, rows, cols]: [u32; 3], transposed: bool, slices: Vec<Slice>) -> Origin {
        let shape = if transposed { [count, cols, rows] } else { [count, rows, cols] };
        let transposed = transposed.then_some(rows);
        Origin { tensor, shape: shape.map(u64::from).to_vec(), slices, transposed }
    }
}

/// The builder of the packed-weight list, which also collects problems.
struct Specs<'a> {
    config: &'a ModelConfig,
    headers: &'a Headers,
    problems: &'a mut Vec<CheckpointProblem>,
    specs: Vec<WeightSpec>,
    /// The names in the files of the tensors of numbers that weights are made of.
    used: BTreeSet<&'a str>,
}

impl<'a> Specs<'a> {
    fn build(mut self) -> Vec<WeightSpec> {
        let c = self.config;
        if let Some(head) = &c.draft_head {
            self.draft_head(head);
            return self.specs;
        }
        for (layer, (kind, mlp)) in c.layer_kinds.iter().zip(&c.mlp_kinds).enumerate() {
            let (to, from) = (format!("layers.{layer}."), format!("model.layers.{layer}."));
            match (kind, c.delta, c.short_conv) {
                (LayerKind::None, ..) => {}
                (LayerKind::GatedDelta, Some(delta), _) => self.gated_delta(&to, &from, delta),
                (LayerKind::ShortConv, _, Some(conv)) => self.short_conv(&to, &from, conv),
                _ => match c.latent {
                    Some(latent) => self.latent_attention(&to, &from, c.attention(layer as u32), latent),
                    None => self.attention(&to, &from, c.attention(layer as u32), c.owns_cache(layer as u32)),
                },
            }
            if *mlp != MlpKind::None {
                self.mlp(*mlp, &to, &from, c.dense_widths[layer]);
            }
            self.layer_end(&to, &from);
        }
        if let Some(of) = c.layer_inputs {
            let all = of.width * c.layers;
            self.stacked("layer_inputs.embed", &[("model.embed_tokens_per_layer.weight", of.vocab)], Some(all));
            let projection = ("model.per_layer_model_projection.weight", all);
            self.stacked("layer_inputs.projection", &[projection], Some(c.hidden));
            self.norm("layer_inputs.norm", "model.per_layer_projection_norm.weight", of.width);
        }
        // The second names are those of Nemotron-H.
        let embedding = self.first(["model.embed_tokens.weight", "model.embeddings.weight"]);
        self.stacked("embed", &[(embedding, c.vocab)], Some(c.hidden));
        // LFM2's name.
        let names = ["model.norm.weight", "model.norm_f.weight", "model.embedding_norm.weight"];
        let final_norm = self.first(names);
        self.norm("final_norm", final_norm, c.hidden);
        if !c.tied {
            self.stacked("lm_head", &[("lm_head.weight", c.vocab)], Some(c.hidden));
        }
        if c.mtp_layers > 0 && self.has("mtp.fc.weight") {
            self.mtp();
        }
        self.refuse_unused();
        self.specs
    }

    /// Refuses biases and norms of the layers that no weight is made of: the model was trained with them, and would silently
    /// give other tokens without them. Biases of zeros change nothing; some tools write them beside every quantised matrix.
    /// Other tensors may be left over: layers behind the last one hold multi-token-prediction blocks, and layers that read
    /// the keys and values of others keep their own unused.
    fn refuse_unused(&mut self) {
        let (c, headers) = (self.config, self.headers);
        for (tensor, info) in &headers.tensors {
            let Some((layer, part)) = headers::layer_of(tensor).filter(|(layer, _)| *layer < c.layers) else {
                continue;
            };
            let last = |module: &str| module.rsplit('.').next().is_some_and(|name| name.contains("norm"));
            let what = match part.strip_suffix(".weight") {
                Some(module) if last(module) => "norm",
                None if part.ends_with(".bias") => "bias",
                _ => continue,
            };
            let of_keys = ["k_proj.", "v_proj.", "k_norm.", "v_norm."];
            let shared = !c.owns_cache(layer)
                && part
                    .strip_prefix("self_attn.")
                    .is_some_and(|part| of_keys.iter().any(|name| part.starts_with(name)));
            if shared || self.used.contains(tensor.as_str()) {
                continue;
            }
            match (what, headers.place(info).read()) {
                ("bias", Ok(bytes)) if bytes.iter().all(|byte| *byte == 0) => {}
                ("bias", Err(problem)) => self.problems.push(problem),
                _ => self.problems.push(CheckpointProblem::UnusedTensor { tensor: tensor.clone(), what }),
            }
        }
    }

    /// Whether the tensor exists, as numbers or quantised, or may have existed in a file that could not be read.
    fn has(&self, tensor: &str) -> bool {
        let found = |name: &str| self.headers.find(name).is_some() || self.headers.is_lost(name);
        found(tensor) || Names::new(tensor).codes().iter().any(|name| found(name))
    }

    /// Returns the first of these tensors that exists; the first of all if none does.
    fn first<N: AsRef<str>, const COUNT: usize>(&self, names: [N; COUNT]) -> N {
        let found = names.iter().position(|name| self.has(name.as_ref())).unwrap_or(0);
        names.into_iter().nth(found).expect("there is a name")
    }

    /// Adds the weights of the multi-token-prediction (MTP) block.
    fn mtp(&mut self) {
        let c = self.config;
        self.norm("mtp.embed_norm", "mtp.pre_fc_norm_embedding.weight", c.hidden);
        self.norm("mtp.hidden_norm", "mtp.pre_fc_norm_hidden.weight", c.hidden);
        self.stacked("mtp.fc", &[("mtp.fc.weight", c.hidden)], Some(2 * c.hidden));
        let mlp = if c.experts.is_some() { MlpKind::Experts } else { MlpKind::Dense };
        self.attention("mtp.", "mtp.layers.0.", &c.attention_kinds[c.mtp_attention], true);
        self.mlp(mlp, "mtp.", "mtp.layers.0.", c.mtp_width);
        self.norm("mtp.final_norm", "mtp.norm.weight", c.hidden);
    }

    /// Adds the weights of a draft head. Its layer may be called `midlayer` in the file. A tensor that would be left out is
    /// refused: the head was trained with it.
    fn draft_head(&mut self, head: &DraftHead) {
        let c = self.config;
        let named = self.headers.tensors.keys().any(|tensor| tensor.contains("midlayer."));
        let from = if named { "model.midlayer." } else { "model.layers.0." };
        self.attention("layers.0.", from, c.attention(0), true);
        self.mlp(MlpKind::Dense, "layers.0.", from, c.intermediate);
        self.norm("hidden_norm", &format!("{from}hidden_norm.weight"), c.hidden);
        let features = head.feature_count() * head.target_hidden;
        if head.norms_features {
            self.norm("feature_norm", "model.input_norm.weight", features);
        }
        self.stacked("fc", &[("model.fc.weight", c.hidden)], Some(features));
        if self.has("model.fc.bias") {
            self.stacked("fc.bias", &[("model.fc.bias", c.hidden)], None);
        }
        // Without an embedding of its own, a head uses that of the model.
        if self.has("model.embed_tokens.weight") || head.target_hidden != c.hidden {
            self.stacked("embed", &[("model.embed_tokens.weight", head.target_vocab)], Some(c.hidden));
        }
        self.norm("final_norm", "model.norm.weight", c.hidden);
        self.stacked("lm_head", &[("lm_head.weight", c.vocab)], Some(c.hidden));
        // The vocabulary's map is read apart, its inverse is for training, and frequencies follow from the configuration.
        let aside = |tensor: &str| tensor.rsplit('.').next().is_some_and(|of| ["d2t", "t2d", "inv_freq"].contains(&of));
        let left = self.headers.tensors.keys().filter(|tensor| !aside(tensor) && !self.used.contains(tensor.as_str()));
        if c.quantization.is_none() {
            let unused = |tensor: &String| CheckpointProblem::UnusedTensor { tensor: tensor.clone(), what: "weight" };
            self.problems.extend(left.map(unused));
        }
    }

    /// Adds the weights of what follows a layer's MLP.
    fn layer_end(&mut self, to: &str, from: &str) {
        let c = self.config;
        if let Some(of) = c.layer_inputs {
            let tensor = |part: &str| format!("{from}{part}.weight");
            let (gate, output) = (tensor("per_layer_input_gate"), tensor("per_layer_projection"));
            self.stacked(&format!("{to}layer_input.gate"), &[(&gate, of.width)], Some(c.hidden));
            self.stacked(&format!("{to}layer_input.output"), &[(&output, c.hidden)], Some(of.width));
            self.norm(&format!("{to}layer_input.norm"), &tensor("post_per_layer_input_norm"), c.hidden);
        }
        if c.layer_scale {
            self.stacked(&format!("{to}layer_scale"), &[(&format!("{from}layer_scalar"), 1)], None);
        }
    }

    /// Adds an attention layer's weights; `own`: those of its keys and values too. `to` is the prefix of the packed weights'
    /// names and `from` the prefix of the tensors' names, here and in the functions below.
    fn attention(&mut self, to: &str, from: &str, of: &Attention, own: bool) {
        let c = self.config;
        let name = |part: &str| format!("{to}{part}");
        let module = c.module("self_attn");
        let attention = |part: &str| format!("{from}{module}.{part}");

        self.block_norm(&name("attn_norm"), from, c.norms.mixer);
        self.qkv(&name("qkv"), from, "weight", Some(c.qkv_cols()), of, own);
        if c.qkv_bias {
            self.qkv(&name("qkv.bias"), from, "bias", None, of, own);
        }
        for (part, rotated, lfm2, heads) in [
            ("q_norm", "query_layernorm", "q_layernorm", of.heads),
            ("k_norm", "key_layernorm", "k_layernorm", of.kv_heads),
        ]
        .into_iter()
        .take(if own { 2 } else { 1 })
        {
            let (names, heads, dim) = match c.qk_norm {
                QkNorm::None => continue,
                QkNorm::Heads => ([part, lfm2], 1, of.head_dim),
                QkNorm::RotatedHeads => ([rotated; 2], 1, of.head_dim),
                QkNorm::Rows => ([part; 2], heads, of.head_dim),
            };
            let tensor = self.first(names.map(|name| attention(&format!("{name}.weight"))));
            let slices = head_slices(heads, dim, of.rope.as_ref(), |head| head * dim, |head| head * dim);
            let origin = Origin::cut(tensor, heads * dim, None, slices);
            self.push(&name(part), None, vec![origin], self.plus());
        }
        if c.sinks {
            self.stacked(&name("sinks"), &[(&attention("sinks"), of.heads)], None);
        }
        let output = self.first(["o_proj.weight", "out_proj.weight"].map(attention));
        self.stacked(&name("o"), &[(&output, c.hidden)], Some(of.q_rows()));
        if c.o_bias {
            self.stacked(&name("o.bias"), &[(&attention("o_proj.bias"), c.hidden)], None);
        }
        self.block_norm(&name("attn_post_norm"), from, c.norms.after_mixer);
    }

    /// Adds the weights of a layer with latent attention. The rotated rows of each head's query, and of the key, come before
    /// the others, in the order that kernels rotate.
    fn latent_attention(&mut self, to: &str, from: &str, of: &Attention, latent: Latent) {
        let c = self.config;
        let Latent { q_rank, kv_rank, nope, rope, value_dim } = latent;
        let name = |part: &str| format!("{to}{part}");
        let tensor = |part: &str| format!("{from}self_attn.{part}");
        self.block_norm(&name("attn_norm"), from, c.norms.mixer);
        let first = q_rank.unwrap_or(0);
        let mut origins = Vec::new();
        if let Some(rank) = q_rank {
            origins.push(Origin::whole(tensor("q_a_proj.weight"), rank, Some(c.hidden), 0));
        }
        let mut slices = head_slices(1, rope, of.rope.as_ref(), |_| kv_rank, |_| first);
        slices.push(Slice { from: 0, rows: kv_rank, first_row: first + rope, row_step: 1 });
        origins.push(Origin::cut(tensor("kv_a_proj_with_mqa.weight"), kv_rank + rope, Some(c.hidden), slices));
        self.push(&name("latent.input"), Some(c.hidden), origins, 0.0);
        if let Some(rank) = q_rank {
            self.norm(&name("latent.q_norm"), &tensor("q_a_layernorm.weight"), rank);
        }
        self.norm(&name("latent.kv_norm"), &tensor("kv_a_layernorm.weight"), kv_rank);
        let each = rope + nope;
        let mut slices = head_slices(of.heads, rope, of.rope.as_ref(), |head| head * each + nope, |head| head * each);
        slices.extend((0..of.heads).map(|head| Slice {
            from: head * each,
            rows: nope,
            first_row: head * each + rope,
            row_step: 1,
        }));
        let (queries, cols) = match q_rank {
            Some(rank) => ("q_b_proj.weight", rank),
            None => ("q_proj.weight", c.hidden),
        };
        let origin = Origin::cut(tensor(queries), of.heads * each, Some(cols), slices);
        self.push(&name("latent.q"), Some(cols), vec![origin], 0.0);
        // As numbers: each head's keys and values are products of their own.
        let split = self.has(&tensor("k_b_proj.weight"));
        let rows = nope + value_dim;
        for (part, alone, first, count) in
            [("latent.keys", "k_b_proj.weight", 0, nope), ("latent.values", "v_b_proj.weight", nope, value_dim)]
        {
            let slices = |each: u32, first: u32| {
                let slice =
                    |head: u32| Slice { from: head * each + first, rows: count, first_row: head * count, row_step: 1 };
                (0..of.heads).map(slice).collect()
            };
            let origin = match split {
                false => Origin::cut(tensor("kv_b_proj.weight"), of.heads * rows, Some(kv_rank), slices(rows, first)),
                // Each head's keys are stored transposed.
                true => Origin::fused(tensor(alone), [of.heads, count, kv_rank], first == 0, slices(count, 0)),
            };
            self.push_as(WeightKind::Vector, &name(part), Some(kv_rank), vec![origin], 0.0);
        }
        self.stacked(&name("o"), &[(&tensor("o_proj.weight"), c.hidden)], Some(of.heads * value_dim));
        self.block_norm(&name("attn_post_norm"), from, c.norms.after_mixer);
    }

    /// Adds the rows of q, k, v and, if the model has one, the attention output gate. The checkpoint interleaves the
    /// gate with q head by head in q's tensor: `head_dim` rows of the query, then `head_dim` rows of its gate. Some
    /// checkpoints have one tensor with the rows of q, k and v one after the other. Without keys and values of its own, a
    /// layer has the rows of q only.
    fn qkv(&mut self, name: &str, from: &str, part: &str, cols: Option<u32>, of: &Attention, own: bool) {
        let module = self.config.module("self_attn");
        let tensor = |projection: &str| format!("{from}{module}.{projection}.{part}");
        let (q, kv, dim) = (of.q_rows(), of.kv_rows(), of.head_dim);
        let rope = of.rope.as_ref();
        // Where each head's rows are in q's tensor, and in the packed weight.
        let each = if self.config.attention_gate { 2 * dim } else { dim };
        let mut queries = head_slices(of.heads, dim, rope, |head| head * each, |head| head * dim);
        if self.config.attention_gate {
            let gates = q + 2 * kv;
            queries.extend((0..of.heads).map(|head| Slice {
                from: head * each + dim,
                rows: dim,
                first_row: gates + head * dim,
                row_step: 1,
            }));
        }
        let keys = head_slices(of.kv_heads, dim, rope, |head| head * dim, |head| q + head * dim);
        let values = vec![Slice { from: 0, rows: kv, first_row: q + kv, row_step: 1 }];
        let fused = tensor("qkv_proj");
        let origins = if !own {
            vec![Origin::cut(tensor("q_proj"), of.heads * each, cols, queries)]
        } else if self.has(&fused) && !self.has(&tensor("q_proj")) {
            let at = |slices: Vec<Slice>, first: u32| {
                slices.into_iter().map(move |slice| Slice { from: slice.from + first, ..slice })
            };
            let slices = at(queries, 0).chain(at(keys, q)).chain(at(values, q + kv)).collect();
            vec![Origin::cut(fused, q + 2 * kv, cols, slices)]
        } else {
            vec![
                Origin::cut(tensor("q_proj"), of.heads * each, cols, queries),
                Origin::cut(tensor("k_proj"), kv, cols, keys),
                Origin::cut(tensor(if of.values_are_keys { "k_proj" } else { "v_proj" }), kv, cols, values),
            ]
        };
        self.push(name, cols, origins, 0.0);
    }

    /// Adds the weights of a state space. Its input projection has z, then the convolution's channels x, B and C, then the time
    /// steps, which become C, B, x, z and the time steps.
    fn state_space(&mut self, to: &str, from: &str, (delta, space): (DeltaNet, StateSpace)) {
        let c = self.config;
        let name = |part: &str| format!("{to}{part}");
        let module = c.module("mamba");
        let tensor = |part: &str| format!("{from}{module}.{part}");
        let (values, keys, channels, heads) =
            (delta.value_rows(), delta.key_rows(), delta.channels(), delta.value_heads);
        // For each part of the channels: its first one in the file, their number, and the first one's place.
        let parts = [(0, values, 2 * keys), (values, keys, keys), (values + keys, keys, 0)];
        let slices = |before: u32, each: u32| -> Vec<Slice> {
            let slice = |(from, rows, to)| Slice {
                from: (before + from) * each,
                rows: rows * each,
                first_row: to * each,
                row_step: 1,
            };
            parts.map(slice).into()
        };

        self.block_norm(&name("attn_norm"), from, c.norms.mixer);
        let whole = |from: u32, rows: u32, to: u32| Slice { from, rows, first_row: to, row_step: 1 };
        let mut rows = slices(values, 1);
        rows.push(whole(0, values, channels));
        rows.push(whole(values + channels, heads, channels + values));
        let projection = Origin::cut(tensor("in_proj.weight"), delta.projected_rows(), Some(c.hidden), rows);
        self.push(&name("in_proj"), Some(c.hidden), vec![projection], 0.0);
        let taps = delta.conv_kernel;
        let mut conv = vec![Origin::taps(tensor("conv1d.weight"), [channels, taps], slices(0, taps))];
        if space.conv_bias {
            let behind = |slice: Slice| Slice { first_row: slice.first_row + channels * taps, ..slice };
            let biases = slices(0, 1).into_iter().map(behind).collect();
            conv.push(Origin::cut(tensor("conv1d.bias"), channels, None, biases));
        }
        self.push(&name("conv"), None, conv, 0.0);
        for (to, from) in [("a_log", "A_log"), ("dt_bias", "dt_bias"), ("skip", "D")] {
            self.stacked(&name(to), &[(&tensor(from), heads)], None);
        }
        self.stacked(&name("delta_norm"), &[(&tensor("norm.weight"), values)], None);
        self.stacked(&name("o"), &[(&tensor("out_proj.weight"), c.hidden)], Some(values));
    }

    fn gated_delta(&mut self, to: &str, from: &str, delta: DeltaNet) {
        if let Some(space) = delta.space {
            return self.state_space(to, from, (delta, space));
        }
        let c = self.config;
        let name = |part: &str| format!("{to}{part}");
        let tensor = |part: &str| format!("{from}linear_attn.{part}");

        self.block_norm(&name("attn_norm"), from, c.norms.mixer);
        let grouped = self.has(&tensor("in_proj_qkvz.weight"))
            || c.architecture == Architecture::Qwen3Next && !self.has(&tensor("in_proj_qkv.weight"));
        let origins =
            if grouped { grouped_projections(&tensor, delta, c.hidden) } else { projections(&tensor, delta, c.hidden) };
        self.push(&name("in_proj"), Some(c.hidden), origins, 0.0);
        let (channels, taps) = (delta.channels(), delta.conv_kernel);
        let all = vec![Slice { from: 0, rows: channels * taps, first_row: 0, row_step: 1 }];
        let conv = Origin::taps(tensor("conv1d.weight"), [channels, taps], all);
        self.push(&name("conv"), None, vec![conv], 0.0);
        self.stacked(&name("a_log"), &[(&tensor("A_log"), delta.value_heads)], None);
        self.stacked(&name("dt_bias"), &[(&tensor("dt_bias"), delta.value_heads)], None);
        // This is the only norm of a hybrid model that is not stored zero-centred.
        self.stacked(&name("delta_norm"), &[(&tensor("norm.weight"), delta.value_dim)], None);
        self.stacked(&name("o"), &[(&tensor("out_proj.weight"), c.hidden)], Some(delta.value_rows()));
    }

    fn short_conv(&mut self, to: &str, from: &str, conv: ShortConv) {
        let c = self.config;
        let name = |part: &str| format!("{to}{part}");
        let tensor = |part: &str| format!("{from}conv.{part}");
        let ShortConv { channels, taps, bias } = conv;
        self.block_norm(&name("attn_norm"), from, c.norms.mixer);
        self.stacked(&name("conv_in"), &[(&tensor("in_proj.weight"), conv.projected_rows())], Some(c.hidden));
        let all = vec![Slice { from: 0, rows: channels * taps, first_row: 0, row_step: 1 }];
        let origin = Origin::taps(tensor("conv.weight"), [channels, taps], all);
        self.push(&name("conv"), None, vec![origin], 0.0);
        self.stacked(&name("o"), &[(&tensor("out_proj.weight"), c.hidden)], Some(channels));
        if bias {
            self.stacked(&name("conv_in.bias"), &[(&tensor("in_proj.bias"), conv.projected_rows())], None);
            self.stacked(&name("conv.bias"), &[(&tensor("conv.bias"), channels)], None);
            self.stacked(&name("o.bias"), &[(&tensor("out_proj.bias"), c.hidden)], None);
        }
    }

    /// Adds an MLP's weights. `inner` is the width of a dense one.
    fn mlp(&mut self, kind: MlpKind, to: &str, from: &str, inner: u32) {
        let c = self.config;
        self.block_norm(&format!("{to}mlp_norm"), from, c.norms.mlp);
        let experts = c.experts.filter(|_| kind == MlpKind::Experts);
        if experts.is_none_or(|experts| experts.beside_dense) {
            // Granite 4 names its dense MLPs like the shared experts of other sizes.
            let shared = format!("{from}shared_mlp.");
            let lfm2 = format!("{from}feed_forward.");
            let own = match () {
                () if self.has(&format!("{shared}{GRANITE_DOWN}")) => shared,
                () if self.has(&format!("{lfm2}{}.weight", W_PARTS[2])) => lfm2,
                () => format!("{from}{}.", c.module("mlp")),
            };
            self.dense(to, &own, inner, c.mlp_bias);
        }
        if let Some(experts) = experts {
            self.experts(experts, to, from);
        }
        self.block_norm(&format!("{to}mlp_post_norm"), from, c.norms.after_mlp);
    }

    fn dense(&mut self, to: &str, from: &str, inner: u32, bias: bool) {
        let hidden = self.config.hidden;
        let name = |part: &str| format!("{to}{part}");
        let mlp = |part: &str| format!("{from}{part}");
        // Some checkpoints have one tensor with the rows of the gate projection, then those of the up projection.
        let granite = self.has(&mlp(GRANITE_DOWN));
        let [_, _, last] = W_PARTS.map(|part| format!("{part}.weight"));
        let [gate, up, down] = if self.has(&mlp(&last)) { W_PARTS } else { EXPERT_PARTS };
        let (fused, down) = match granite {
            true => (mlp(GRANITE_GATE_UP), mlp(GRANITE_DOWN)),
            false => (mlp("gate_up_proj.weight"), mlp(&format!("{down}.weight"))),
        };
        let gated = self.config.activation.has_gate();
        if !gated {
            self.stacked(&name("gate_up"), &[(&mlp(&format!("{up}.weight")), inner)], Some(hidden));
        } else if granite || self.has(&fused) && !self.has(&mlp("gate_proj.weight")) {
            let slices = [0, 1].map(|part| Slice { from: part * inner, rows: inner, first_row: part, row_step: 2 });
            let origin = Origin::cut(fused, 2 * inner, Some(hidden), slices.into());
            self.push(&name("gate_up"), Some(hidden), vec![origin], 0.0);
        } else {
            let parts = [gate, up].map(|part| (mlp(&format!("{part}.weight")), inner));
            self.interleaved(&name("gate_up"), &borrowed(&parts), Some(hidden));
        }
        if bias {
            let parts = ["gate_proj.bias", "up_proj.bias"].map(|part| (mlp(part), inner));
            match gated {
                true => self.interleaved(&name("gate_up.bias"), &borrowed(&parts), None),
                false => self.stacked(&name("gate_up.bias"), &borrowed(&parts)[1..], None),
            }
        }
        self.stacked(&name("down"), &[(&down, hidden)], Some(inner));
        if bias {
            self.stacked(&name("down.bias"), &[(&mlp("down_proj.bias"), hidden)], None);
        }
    }

    fn experts(&mut self, experts: Experts, to: &str, from: &str) {
        let hidden = self.config.hidden;
        let name = |part: &str| format!("{to}{part}");
        // Mixtral's names, which others have taken over.
        let (other, lfm2) = (format!("{from}block_sparse_moe."), format!("{from}feed_forward."));
        let (root, parts) = match experts.beside_dense {
            true => (from.to_owned(), EXPERT_PARTS),
            false if self.has(&format!("{other}gate.weight")) => (other, W_PARTS),
            false if self.has(&format!("{lfm2}gate.weight")) => (lfm2, W_PARTS),
            false if self.has(&format!("{other}{GRANITE_DOWN}")) => (other, EXPERT_PARTS),
            false => (format!("{from}{}.", self.config.module("mlp")), EXPERT_PARTS),
        };
        let tensor = |part: &str| format!("{root}{part}");

        let own = match experts.beside_dense {
            true => "router.proj",
            false => ["router", "router.layer", "gate.wg"]
                .into_iter()
                .find(|own| self.has(&tensor(&format!("{own}.weight"))))
                .unwrap_or("gate"),
        };
        if experts.beside_dense {
            let names = ["dense_post_norm", "experts.norm", "experts.post_norm"];
            for (to, norm) in names.into_iter().zip(BESIDE_DENSE) {
                self.norm(&name(to), &tensor(&format!("{norm}.weight")), hidden);
            }
        }
        if experts.routing.is_some_and(|routing| routing.own_norm) {
            self.stacked(&name("router.norm"), &[(&tensor("router.scale"), hidden)], None);
        }
        if experts.routing.is_some_and(|routing| routing.expert_scales) {
            self.stacked(&name("router.scales"), &[(&tensor("router.per_expert_scale"), experts.count)], None);
        }
        let (router, gate) = (tensor(&format!("{own}.weight")), tensor("shared_expert_gate.weight"));
        let mut rows = vec![(router.as_str(), experts.count)];
        if experts.shared_inner.is_some() && experts.shared_gate {
            rows.push((gate.as_str(), 1));
        }
        self.stacked(&name("router"), &rows, Some(hidden));
        let (count, inner) = (experts.count, experts.inner);
        if experts.routing.is_some_and(|routing| routing.choice_bias) {
            let places = [CHOICE_BIAS.to_owned(), format!("moe_statics.{CHOICE_BIAS}"), "expert_bias".to_owned()]
                .map(|place| tensor(&place));
            let bias = places.into_iter().find(|place| self.has(place));
            let bias = bias.unwrap_or_else(|| tensor(&format!("{own}.{CHOICE_BIAS}")));
            let slices = vec![Slice { from: 0, rows: count, first_row: 0, row_step: 1 }];
            // ERNIE's is of one group of experts.
            let shape = match self.headers.find(&bias).is_some_and(|(_, info)| info.shape.len() == 2) {
                true => vec![1, u64::from(count)],
                false => vec![u64::from(count)],
            };
            let bias = Origin { tensor: bias, shape, slices, transposed: None };
            self.push(&name("router.choice_bias"), None, vec![bias], 0.0);
        }
        if experts.bias {
            self.stacked(&name("router.bias"), &[(&tensor(&format!("{own}.bias")), count)], None);
            let biases = |part: &str, rows: u32, slices: Vec<Slice>| {
                let shape = [count, rows].map(u64::from).to_vec();
                Origin { tensor: tensor(&format!("experts.{part}_proj_bias")), shape, slices, transposed: None }
            };
            let all = |rows: u32| vec![Slice { from: 0, rows: count * rows, first_row: 0, row_step: 1 }];
            // In the order of the packed rows. GGUF files have the biases of gate and of up in tensors of their own.
            let alone = |(part, index)| {
                let slice = |e| Slice { from: inner * e, rows: inner, first_row: 2 * inner * e + index, row_step: 2 };
                biases(part, inner, (0..count).map(slice).collect())
            };
            let gate_up = match self.has(&tensor("experts.gate_proj_bias")) {
                true => [("gate", 0), ("up", 1)].map(alone).into(),
                false => vec![biases("gate_up", 2 * inner, all(2 * inner))],
            };
            let down = vec![biases("down", hidden, all(hidden))];
            for (part, origins) in [("gate_up", gate_up), ("down", down)] {
                self.push(&name(&format!("experts.{part}.bias")), None, origins, 0.0);
            }
        }
        // The rows of an expert's gate projection and of its up projection alternate in the packed weight; without a gate it has
        // those of the up projection.
        let step = if self.config.activation.has_gate() { 2 } else { 1 };
        let slice = |from: u32, expert: u32, part: u32| Slice {
            from,
            rows: inner,
            first_row: step * inner * expert + part,
            row_step: step,
        };
        let (gate_up, down) = if let Some(Fused { alternate, transposed }) = self.fused(&tensor, experts) {
            let halves = |e: u32| [slice(2 * inner * e, e, 0), slice(2 * inner * e + inner, e, 1)];
            // A slice has columns of one stored matrix.
            let whole = |rows: u32| -> Vec<Slice> {
                let (rows, count) = if transposed { (rows, count) } else { (rows * count, 1) };
                (0..count).map(|e| Slice { from: rows * e, rows, first_row: rows * e, row_step: 1 }).collect()
            };
            // Rows that alternate are in the packed order.
            let gate_up = if alternate { whole(step * inner) } else { (0..count).flat_map(halves).collect() };
            let down = whole(hidden);
            let origin = |tensor: String, rows: u32, cols: u32, slices: Vec<Slice>| {
                vec![Origin::fused(tensor, [count, rows, cols], transposed, slices)]
            };
            let [both, last] = self.fused_names(&tensor);
            (origin(both, step * inner, hidden, gate_up), origin(last, hidden, inner, down))
        } else {
            let of = |expert: u32, part: &str| tensor(&format!("experts.{expert}.{part}.weight"));
            let [gate, up, down] = parts;
            let first: &[(u32, &str)] = if step == 2 { &[(0, gate), (1, up)] } else { &[(0, up)] };
            let places = (0..count).flat_map(|e| first.iter().map(move |(i, part)| (e, *i, *part)));
            let gate_up =
                places.map(|(e, i, part)| Origin::cut(of(e, part), inner, Some(hidden), vec![slice(0, e, i)]));
            let down = (0..count).map(|e| Origin::whole(of(e, down), hidden, Some(inner), e * hidden));
            (gate_up.collect(), down.collect())
        };
        self.push(&name("experts.gate_up"), Some(hidden), gate_up, 0.0);
        self.push(&name("experts.down"), Some(inner), down, 0.0);
        if let Some(inner) = experts.shared_inner {
            let granite = format!("{from}shared_mlp.");
            let shared = ["shared_experts.", "shared_mlp."].map(tensor);
            let shared = match shared.into_iter().find(|shared| self.has(&format!("{shared}down_proj.weight"))) {
                Some(shared) => shared,
                None if self.has(&format!("{granite}{GRANITE_DOWN}")) => granite,
                None => tensor("shared_expert."),
            };
            self.dense(&name("shared."), &shared, inner, false);
            for part in ["gate_up", "down"] {
                self.match_numbers([name(&format!("experts.{part}")), name(&format!("shared.{part}"))]);
            }
        }
    }

    /// Returns the names of the tensors of all experts: gate and up projections, and down projections.
    fn fused_names(&self, tensor: &dyn Fn(&str) -> String) -> [String; 2] {
        match self.has(&tensor(GRANITE_DOWN)) {
            true => [GRANITE_GATE_UP, GRANITE_DOWN].map(tensor),
            false if !self.config.activation.has_gate() => ["experts.up_proj", "experts.down_proj"].map(tensor),
            false => ["experts.gate_up_proj", "experts.down_proj"].map(tensor),
        }
    }

    /// Returns how the experts' matrices are stored in tensors of all experts; `None` if each expert has its own tensors.
    fn fused(&self, tensor: &dyn Fn(&str) -> String, experts: Experts) -> Option<Fused> {
        let [gate_up, down] = self.fused_names(tensor);
        if !self.has(&gate_up) {
            let alone = self.has(&tensor("experts.0.gate_proj.weight"));
            let fused = self.config.architecture == Architecture::Qwen35Moe && !alone;
            return fused.then_some(Fused { alternate: false, transposed: false });
        }
        if !self.config.activation.has_gate() {
            // Up projections only, whose rows are in the packed order.
            return Some(Fused { alternate: true, transposed: false });
        }
        // gpt-oss: rows alternate, of MXFP4 as they are multiplied, of numbers as their transpose. Qwen3-VL: the transpose,
        // whose rows do not alternate. At least one of the two matrices of an expert is not square.
        let [.., blocks] = Names::new(&gate_up).codes();
        let (count, inner, hidden) = (experts.count, experts.inner, self.config.hidden);
        let has_shape = |name: &str, shape: [u32; 3]| {
            self.headers.find(name).is_some_and(|(_, info)| info.shape == shape.map(u64::from))
        };
        let transposed = match 2 * inner == hidden {
            true => has_shape(&down, [count, inner, hidden]),
            false => has_shape(&gate_up, [count, hidden, 2 * inner]),
        };
        let halves = self.config.architecture == Architecture::Qwen3VlMoe;
        Some(Fused { alternate: transposed && !halves || self.headers.find(&blocks).is_some(), transposed })
    }

    /// Gives the routed experts' and the shared expert's matrix, which one kernel reads, the same format of numbers, which
    /// represents both exactly. Beside experts of codes, the shared expert keeps its format; a shared expert of codes
    /// beside experts of numbers is expanded to their format.
    fn match_numbers(&mut self, names: [String; 2]) {
        let found = names.each_ref().map(|name| self.specs.iter().position(|spec| spec.name == *name));
        let [Some(a), Some(b)] = found else { return };
        match [a, b].map(|at| self.specs[at].format) {
            [Format::Codes(_), _] => {}
            [x, y] if x == y => {}
            [numbers, Format::Codes(_)] => {
                let shared = &mut self.specs[b];
                shared.format = numbers;
                shared.sources = expanded(std::mem::take(&mut shared.sources));
            }
            _ => [a, b].into_iter().for_each(|at| self.specs[at].format = Format::F32),
        }
    }

    /// Returns what is added to a norm's weights to get the actual multipliers.
    fn plus(&self) -> f32 {
        match self.config.norm {
            NormKind::Plain => 0.0,
            NormKind::ZeroCentred => 1.0,
        }
    }

    /// Adds a norm's weights, converted to the actual multipliers.
    fn norm(&mut self, name: &str, tensor: &str, rows: u32) {
        self.push(name, None, vec![Origin::whole(tensor.to_owned(), rows, None, 0)], self.plus());
    }

    /// Adds a layer's norm over the residual stream's width, if the model has it.
    fn block_norm(&mut self, name: &str, from: &str, tensor: Option<&str>) {
        if let Some(tensor) = tensor {
            self.norm(name, &format!("{from}{tensor}.weight"), self.config.hidden);
        }
    }

    /// Adds a weight whose parts are stacked one after the other. `cols` is `None` for a vector.
    fn stacked(&mut self, name: &str, parts: &[(&str, u32)], cols: Option<u32>) {
        let mut first_row = 0;
        let origins = parts.iter().map(|&(tensor, rows)| {
            let origin = Origin::whole(tensor.to_owned(), rows, cols, first_row);
            first_row += rows;
            origin
        });
        let origins = origins.collect();
        self.push(name, cols, origins, 0.0);
    }

    /// Adds a weight whose parts are interleaved row by row. All parts have the same number of rows.
    fn interleaved(&mut self, name: &str, parts: &[(&str, u32)], cols: Option<u32>) {
        let row_step = parts.len() as u32;
        let origins = parts.iter().zip(0..).map(|(&(tensor, rows), first_row)| {
            Origin::cut(tensor.to_owned(), rows, cols, vec![Slice { from: 0, rows, first_row, row_step }])
        });
        self.push(name, cols, origins.collect(), 0.0);
    }

    fn push(&mut self, name: &str, cols: Option<u32>, origins: Vec<Origin>, plus: f32) {
        let kind = if cols.is_some() { WeightKind::Matrix } else { WeightKind::Vector };
        self.push_as(kind, name, cols, origins, plus);
    }

    /// Adds a weight. A vector with columns is made of the rows of matrices, which may be quantised.
    fn push_as(&mut self, kind: WeightKind, name: &str, cols: Option<u32>, origins: Vec<Origin>, plus: f32) {
        let width = cols.unwrap_or(1);
        let rows = origins.iter().flat_map(|origin| &origin.slices).map(|slice| slice.rows).sum();
        let mut sources = Vec::with_capacity(origins.len());
        for origin in origins {
            let (tensor, info, format) = match self.resolve(&origin, cols.is_some()) {
                None => continue,
                Some(Stored::Numbers(tensor, info, format)) => (tensor, info, format),
                Some(Stored::Quantised(matrix)) => {
                    sources.extend(origin.slices.iter().map(|slice| quantised_source(&matrix, slice, width)));
                    continue;
                }
            };
            let path = &self.headers.files[info.file].path;
            let (plus, format) = match (self.headers.change(&tensor), format) {
                (StoredAs::None, format) => (plus, format),
                // The file holds what a zero-centred norm multiplies with.
                (StoredAs::PlusOne, format) => (plus - 1.0, format),
                (StoredAs::NegativeExp, SourceFormat::Numbers(Format::F32)) => (plus, SourceFormat::NegatedExp),
                (StoredAs::NegativeExp, _) => {
                    let dtype = info.dtype.clone();
                    self.problems.push(CheckpointProblem::UnsupportedDtype { tensor, dtype });
                    continue;
                }
            };
            let format = match (format, self.headers.factor(&tensor)) {
                (SourceFormat::Blocks(blocks), Some(Ok(factor))) => {
                    SourceFormat::ScaledBlocks(blocks, factor.to_bits())
                }
                (_, Some(Ok(_))) => {
                    self.problems.push(CheckpointProblem::Stored { tensor, what: "numbers that have a factor" });
                    continue;
                }
                (_, Some(Err(problem))) => {
                    self.problems.push(problem);
                    continue;
                }
                (format, _) => format,
            };
            if let Some(what) = self.headers.stored_specially(&tensor) {
                self.problems.push(CheckpointProblem::Stored { tensor, what });
                continue;
            }
            for slice in &origin.slices {
                let runs = match origin.transposed {
                    None => self.headers.runs(&tensor, slice.from, slice.rows, width),
                    Some(_) => self.headers.runs_of_columns(&tensor, slice.from, slice.rows),
                };
                if runs.iter().map(|run| run.rows).sum::<u64>() != u64::from(slice.rows) {
                    let what = "other rows than its shape says";
                    self.problems.push(CheckpointProblem::Stored { tensor: tensor.clone(), what });
                    continue;
                }
                for run in runs {
                    let (offset, transposed) = match origin.transposed {
                        None => (run.stored * format.row_bytes(width), None),
                        Some(rows) => {
                            let (matrix, column) = (run.stored / u64::from(rows), run.stored % u64::from(rows));
                            let offset = matrix * u64::from(width) * format.row_bytes(rows);
                            (offset, Some(Transposed { width: rows, first: column as u32 }))
                        }
                    };
                    sources.push(SourceRef {
                        tensor: tensor.clone(),
                        path: path.clone(),
                        offset: info.offset + offset,
                        map: RowMap {
                            format,
                            rows: run.rows as u32,
                            cols: width,
                            first_col: 0,
                            used_cols: width,
                            first_row: slice.first_row + (run.row as u32 - slice.from) * slice.row_step,
                            row_step: slice.row_step,
                            stride: run.stored_step as u32,
                            plus,
                        },
                        transposed,
                        matrix: None,
                    });
                }
            }
        }
        let merged = name.to_owned();
        let order = sources.first().and_then(order_of).cloned();
        let mut whole = WeightSpec {
            name: name.to_owned(),
            merged,
            first_row: 0,
            rows,
            cols: width,
            kind,
            order,
            format: Format::F32,
            sources,
        };
        if kind == WeightKind::Vector {
            whole.sources = expanded(whole.sources);
            whole.order = None;
            self.specs.push(whole);
            return;
        }
        let one_order = whole.sources.iter().all(|source| order_of(source) == whole.order.as_ref());
        if !one_order || whole.order.is_some() && !takes_order(name) {
            if takes_order(name) && self.push_ranges(&whole, both) {
                return;
            }
            whole.sources = expanded(whole.sources);
            whole.order = None;
        }
        // A format that represents all rows would have more bits than some of them need.
        let same = |a: Format, b: Format| (a == b).then_some(a);
        let codes = |source: &SourceRef| matches!(common(std::slice::from_ref(source)), Some(Format::Codes(_)));
        if whole.sources.iter().all(codes) && self.push_ranges(&whole, same) {
            return;
        }
        match common(&whole.sources) {
            Some(format) => self.specs.push(WeightSpec { format, ..whole }),
            // A missing tensor was reported.
            None if whole.sources.iter().map(|source| source.map.rows).sum::<u32>() < rows => {}
            None if self.push_ranges(&whole, both) => {}
            None => {
                let formats: Vec<String> =
                    whole.sources.iter().map(|source| format!("{} {}", source.tensor, source.map.format)).collect();
                let (weight, formats) = (whole.name, formats.join(", "));
                self.problems.push(CheckpointProblem::MixedFormats { weight, formats });
            }
        }
    }

    /// Adds a matrix as ranges of rows, each of one format and with one order of columns, and returns whether that is
    /// possible: a range begins at a multiple of [`RANGE_ROWS`], and its rows do not alternate with those of another one.
    /// `joined` returns the format of a range that has rows of two formats, if they may be in one range.
    fn push_ranges(&mut self, whole: &WeightSpec, joined: impl Fn(Format, Format) -> Option<Format>) -> bool {
        let mut sources = whole.sources.clone();
        sources.sort_by_key(|source| source.map.first_row);
        let mut ranges: Vec<(Format, Vec<SourceRef>)> = Vec::new();
        for source in sources {
            let alone = common(std::slice::from_ref(&source));
            let same_order = |of: &[SourceRef]| of.first().and_then(order_of) == order_of(&source);
            match (ranges.last_mut(), alone) {
                (Some((format, of)), Some(alone)) if joined(*format, alone).is_some() && same_order(of) => {
                    *format = joined(*format, alone).unwrap_or(*format);
                    of.push(source);
                }
                (_, Some(alone)) => ranges.push((alone, vec![source])),
                (_, None) => {}
            }
        }
        let mut next = 0;
        let mut fits = true;
        let mut specs = Vec::new();
        for (format, mut sources) in ranges {
            let first_row = sources.first().map_or(0, |source| source.map.first_row);
            let rows: u32 = sources.iter().map(|source| source.map.rows).sum();
            fits &= first_row == next && first_row.is_multiple_of(RANGE_ROWS);
            fits &= sources.iter().all(|source| source.map.row_step == 1 || source.map.rows == 1);
            next += rows;
            sources.iter_mut().for_each(|source| source.map.first_row -= first_row);
            let name = if first_row == 0 { whole.name.clone() } else { format!("{}.from{first_row}", whole.name) };
            let order = sources.first().and_then(order_of).cloned();
            specs.push(WeightSpec { name, first_row, rows, format, order, sources, ..whole.clone() });
        }
        // The kernels of experts read matrices of one format.
        let fits = fits && next == whole.rows && !whole.is_of_experts();
        if fits {
            self.specs.extend(specs);
        }
        fits
    }

    /// Returns the tensor, or the quantised weight in its place, if it exists with the expected shape and supported
    /// element types. Otherwise reports the problem. Only matrices are quantised.
    fn resolve(&mut self, origin: &Origin, is_matrix: bool) -> Option<Stored<'a>> {
        let headers: &'a Headers = self.headers;
        let name = &origin.tensor;
        let quantization = self.config.quantization.as_ref();
        let numbers = headers.find(name).filter(|(_, info)| info.format.is_some() || !headers.may_be_quantised(info));
        let numbers = numbers.filter(|_| !is_matrix || !quantised::has_quant_state(headers, name));
        if is_matrix && !headers.is_gguf() {
            if let Some((tensor, info)) = numbers
                && quantization.is_some()
                && let Some(scale) = quantised::scale_beside(headers, name)
            {
                let (tensor, dtype) = (tensor.to_owned(), info.dtype.clone());
                self.problems.push(CheckpointProblem::ScaleBeside { tensor, dtype, scale });
                return None;
            }
            if numbers.is_none()
                && let Some(found) = quantised::find(headers, quantization, name, &origin.shape)
            {
                return match found {
                    Ok(matrix) => Some(Stored::Quantised(Arc::new(matrix))),
                    // A file that could not be read was reported before.
                    Err(CheckpointProblem::MissingTensor { .. }) if headers.is_lost(name) => None,
                    Err(problem) => {
                        self.problems.push(problem);
                        None
                    }
                };
            }
        }
        let Some((tensor, info)) = headers.find(name) else {
            if !self.headers.is_lost(name) {
                self.problems.push(CheckpointProblem::MissingTensor { tensor: name.clone() });
            }
            return None;
        };
        self.used.insert(tensor);
        let fits = info.shape == origin.shape;
        if !fits {
            let (tensor, shape, expected) = (tensor.to_owned(), info.shape.clone(), origin.shape.clone());
            self.problems.push(CheckpointProblem::Shape { tensor, shape, expected });
        }
        match info.format {
            Some(format) => fits.then(|| Stored::Numbers(tensor.to_owned(), info, format)),
            None => {
                let (tensor, dtype) = (tensor.to_owned(), info.dtype.clone());
                self.problems.push(CheckpointProblem::UnsupportedDtype { tensor, dtype });
                None
            }
        }
    }
}

/// Returns the slices of heads of `dim` rows, whose first rows in the tensor and in the packed weight the functions give.
/// The rows of each head are reordered so that kernels rotate the halves of the first ones.
fn head_slices(
    heads: u32,
    dim: u32,
    rope: Option<&Rope>,
    from: impl Fn(u32) -> u32,
    to: impl Fn(u32) -> u32,
) -> Vec<Slice> {
    let places = rope.map_or_else(|| (0..dim).collect(), |rope| rope.pairs.places(dim, rope.rotary_dim));
    // Runs of rows that stay adjacent: the first row, its place, and their number.
    let mut runs: Vec<(u32, u32, u32)> = Vec::new();
    for (row, place) in (0..).zip(places) {
        match runs.last_mut() {
            Some((_, first, rows)) if *first + *rows == place => *rows += 1,
            _ => runs.push((row, place, 1)),
        }
    }
    let slice = |head: u32, (row, place, rows): (u32, u32, u32)| Slice {
        from: from(head) + row,
        rows,
        first_row: to(head) + place,
        row_step: 1,
    };
    (0..heads).flat_map(|head| runs.iter().map(move |run| (head, *run))).map(|(head, run)| slice(head, run)).collect()
}

/// The rows of `in_proj` as Qwen3.5 stores them: q, k and v in one tensor, and one tensor each for z, b and a.
fn projections(tensor: &dyn Fn(&str) -> String, delta: DeltaNet, hidden: u32) -> Vec<Origin> {
    let parts = [
        ("in_proj_qkv.weight", delta.channels()),
        ("in_proj_z.weight", delta.value_rows()),
        ("in_proj_b.weight", delta.value_heads),
        ("in_proj_a.weight", delta.value_heads),
    ];
    let mut first_row = 0;
    let origin = |(part, rows): (&str, u32)| {
        let origin = Origin::whole(tensor(part), rows, Some(hidden), first_row);
        first_row += rows;
        origin
    };
    parts.map(origin).into()
}

/// The rows of `in_proj` as Qwen3-Next stores them. One tensor holds, for each key head, its q, its k, and the v and z
/// of the value heads that share it; another holds, for each key head, the b and a of those value heads.
fn grouped_projections(tensor: &dyn Fn(&str) -> String, delta: DeltaNet, hidden: u32) -> Vec<Origin> {
    let heads = delta.value_heads / delta.key_heads;
    let (keys, values) = (delta.key_dim, heads * delta.value_dim);
    // For each part: its rows per group, and the packed row at which the part begins for all groups together.
    let qkvz = [(keys, 0), (keys, delta.key_rows()), (values, 2 * delta.key_rows()), (values, delta.channels())];
    let b = delta.channels() + delta.value_rows();
    let ba = [(heads, b), (heads, b + delta.value_heads)];
    let slices = |parts: &[(u32, u32)]| {
        let mut from = 0;
        let mut slices = Vec::new();
        for group in 0..delta.key_heads {
            for &(rows, begin) in parts {
                slices.push(Slice { from, rows, first_row: begin + group * rows, row_step: 1 });
                from += rows;
            }
        }
        slices
    };
    let origin = |part: &str, rows: u32, slices: Vec<Slice>| Origin::cut(tensor(part), rows, Some(hidden), slices);
    vec![
        origin("in_proj_qkvz.weight", b, slices(&qkvz)),
        origin("in_proj_ba.weight", 2 * delta.value_heads, slices(&ba)),
    ]
}

fn borrowed<const N: usize>(parts: &[(String, u32); N]) -> [(&str, u32); N] {
    parts.each_ref().map(|(name, rows)| (name.as_str(), *rows))
}

//! Maps each tensor of the Hugging Face layout to its place in a GGUF model, with the changes that the conversion to
//! GGUF made. The names are those under which released checkpoints store their tensors, with experts one by one.
//!
//! Not here: the tensors' data and the meaning of their element types.

use std::collections::{BTreeMap, BTreeSet};

use super::config::GgufArchitecture::{
    Ernie45, Ernie45Moe, Exaone4, Gemma2, Gemma3, Gemma4, GemmaEmbedding, Glm4, Glm4Moe, GptOss, Granite,
    GraniteHybrid, GraniteMoe, HunYuanDense, HunYuanMoe, Lfm2, Lfm2Moe, Llama, MiniMaxM2, Mistral3, NemotronH,
    NemotronHMoe, Olmo2, Olmoe, Phi3, Qwen2, Qwen2Moe, Qwen2Vl, Qwen3Next, SeedOss, SmolLm3,
};
use super::config::{
    CHOICE_BIAS, Delta, GgufBlock, GgufExperts, GgufLatent, GgufLayerHeads, GgufModel, GgufSpace, LAYER_INPUTS,
    dense_modules,
};
use super::container::{GgufTensor, TensorType};
use super::split::{GgufFiles, TensorRef};

/// The order in which rows of a Hugging Face tensor stand in the GGUF tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// In the same order.
    Same,
    /// The rows of each head are reordered so that the two dimensions that are rotated together are neighbours: stored
    /// row `head * head_dim + 2 * i + j` is row `head * head_dim + j * head_dim / 2 + i`, with j = 0 or 1.
    RotaryPairs {
        /// The number of heads.
        heads: u64,
        /// The number of rows of a head; even.
        head_dim: u64,
    },
    /// The rows of value heads are tiled over the key heads instead of grouped by them: stored head `r * key_heads + k`
    /// is head `k * per_key + r`. The first `lead` rows stand in the same order.
    TiledHeads {
        /// The number of leading rows that are not reordered.
        lead: u64,
        /// The number of key heads.
        key_heads: u64,
        /// The number of value heads of a key head.
        per_key: u64,
        /// The number of rows of a head.
        head_rows: u64,
    },
    /// The rows come in groups with rows of other tensors in between: row `g * rows + i` is stored at `g * stride + i`.
    Groups {
        /// The number of rows of a group.
        rows: u64,
        /// The distance in stored rows between the beginnings of two groups.
        stride: u64,
    },
}

/// The order in which columns of a Hugging Face tensor stand in the GGUF tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnOrder {
    /// In the same order.
    Same,
    /// Heads in the order of [`RowOrder::TiledHeads`]: stored head `r * key_heads + k` is head `k * per_key + r`.
    TiledHeads {
        /// The number of key heads.
        key_heads: u64,
        /// The number of value heads of a key head.
        per_key: u64,
        /// The number of columns of a head.
        head_cols: u64,
    },
}

impl ColumnOrder {
    /// Returns the stored column of a column of the Hugging Face tensor.
    pub fn stored_column(self, column: u64) -> u64 {
        match self {
            ColumnOrder::Same => column,
            ColumnOrder::TiledHeads { key_heads, per_key, head_cols } => {
                let (head, within) = (column / head_cols, column % head_cols);
                (head % per_key * key_heads + head / per_key) * head_cols + within
            }
        }
    }
}

/// How the stored values differ from those of the Hugging Face tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredAs {
    /// The values are unchanged.
    None,
    /// The file stores `w + 1`: subtract 1.
    PlusOne,
    /// The file stores `-exp(w)`: take the logarithm of the negated value.
    NegativeExp,
}

/// A run of rows: row `row + i` of the Hugging Face tensor is row `stored + i * stored_step` of the GGUF tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRun {
    /// The first row in the Hugging Face tensor.
    pub row: u64,
    /// The row in the GGUF tensor that it stands in.
    pub stored: u64,
    /// The distance between two stored rows of the run.
    pub stored_step: u64,
    /// The number of rows.
    pub rows: u64,
}

/// The origin of one tensor of the Hugging Face layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// The place of the GGUF tensor.
    pub at: TensorRef,
    /// The shape of the Hugging Face tensor, outermost dimension first.
    pub shape: Vec<u64>,
    /// The number of rows that this tensor takes from the GGUF tensor.
    pub rows: u64,
    /// The number of elements of a row. A vector has rows of one element, also in the GGUF tensor.
    pub cols: u64,
    /// The first of the stored rows; the rows in [`Source::order`] count from there.
    pub first: u64,
    /// The order of the rows.
    pub order: RowOrder,
    /// The order of the columns.
    pub columns: ColumnOrder,
    /// The change of the values.
    pub change: StoredAs,
    /// The tensor of factors that belongs to the tensor, one for all values or one for each expert. Tensors of NVFP4
    /// have one.
    pub scale: Option<TensorRef>,
    /// The expert whose rows these are, if the GGUF tensor holds those of all experts. It is also the index of its
    /// factor in [`Source::scale`], if there are several.
    pub expert: Option<u64>,
}

impl Source {
    /// Returns the rows as runs, in the order of the Hugging Face tensor.
    pub fn runs(&self) -> Vec<RowRun> {
        let run = |row: u64, stored: u64, stored_step: u64, rows: u64| RowRun {
            row,
            stored: self.first + stored,
            stored_step,
            rows,
        };
        match self.order {
            RowOrder::Same => vec![run(0, 0, 1, self.rows)],
            RowOrder::RotaryPairs { heads, head_dim } => {
                let half = head_dim / 2;
                let of_head = |head: u64| {
                    let begin = head * head_dim;
                    [run(begin, begin, 2, half), run(begin + half, begin + 1, 2, half)]
                };
                (0..heads).flat_map(of_head).collect()
            }
            RowOrder::TiledHeads { lead, key_heads, per_key, head_rows: 1 } => {
                let begin = (lead > 0).then(|| run(0, 0, 1, lead));
                let heads = (0..key_heads).map(|k| run(lead + k * per_key, lead + k, key_heads, per_key));
                begin.into_iter().chain(heads).collect()
            }
            RowOrder::TiledHeads { lead, key_heads, per_key, head_rows } => {
                let begin = (lead > 0).then(|| run(0, 0, 1, lead));
                let heads = (0..key_heads * per_key).map(|head| {
                    let (k, r) = (head / per_key, head % per_key);
                    run(lead + head * head_rows, lead + (r * key_heads + k) * head_rows, 1, head_rows)
                });
                begin.into_iter().chain(heads).collect()
            }
            RowOrder::Groups { rows, stride } => {
                (0..self.rows / rows).map(|g| run(g * rows, g * stride, 1, rows)).collect()
            }
        }
    }

    /// Returns the runs of `rows` rows from row `row` on, in the order of the Hugging Face tensor. Rows that the tensor
    /// does not have are left out.
    pub fn runs_of(&self, row: u64, rows: u64) -> Vec<RowRun> {
        let end = row.saturating_add(rows);
        let cut = |run: RowRun| {
            let (begin, end) = (run.row.max(row), (run.row + run.rows).min(end));
            let stored = run.stored + begin.saturating_sub(run.row) * run.stored_step;
            (begin < end).then(|| RowRun { row: begin, stored, rows: end - begin, ..run })
        };
        self.runs().into_iter().filter_map(cut).collect()
    }

    /// Whether the Hugging Face tensor is a run of the GGUF tensor's bytes as they are.
    pub fn is_plain(&self) -> bool {
        self.order == RowOrder::Same && self.columns == ColumnOrder::Same && self.change == StoredAs::None
    }

    /// Returns the number of bytes of a stored row, given the GGUF tensor. The stored rows of [`Source::runs`] count
    /// from the beginning of the GGUF tensor: row `r` begins at byte `info.offset + r * row_bytes` of the file.
    pub fn row_bytes(&self, info: &GgufTensor) -> u64 {
        self.cols / info.kind.block_elements() * info.kind.block_bytes()
    }

    /// Returns the value of the Hugging Face tensor for a stored one.
    pub fn value(&self, stored: f32) -> f32 {
        match self.change {
            StoredAs::None => stored,
            StoredAs::PlusOne => stored - 1.0,
            StoredAs::NegativeExp => (-stored).ln(),
        }
    }

    /// Returns the values of the Hugging Face tensor, given all values of the GGUF tensor in the order of the file.
    /// This is the definition of the fields above; a loader does the same in larger steps. Panics if `stored` is
    /// shorter than the GGUF tensor.
    pub fn restore(&self, stored: &[f32]) -> Vec<f32> {
        let mut out = Vec::with_capacity((self.rows * self.cols) as usize);
        for run in self.runs() {
            for i in 0..run.rows {
                let begin = (run.stored + i * run.stored_step) * self.cols;
                out.extend(
                    (0..self.cols).map(|col| self.value(stored[(begin + self.columns.stored_column(col)) as usize])),
                );
            }
        }
        out
    }
}

/// One reason why the tensors of a model cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TensorProblem {
    /// The model requires a tensor that the files do not hold.
    #[error("tensor {tensor} is missing")]
    Missing {
        /// The GGUF name.
        tensor: String,
    },
    /// A layer has a bias, a norm or a projection around the experts that the model does not have by its metadata and its
    /// last layer.
    #[error("tensor {tensor} would not be used: the architecture, or the last layer, has no such tensor")]
    Unused {
        /// The GGUF name.
        tensor: String,
    },
    /// A tensor's shape differs from the model's metadata.
    #[error("tensor {tensor} has the dimensions {dims:?}, must have {expected:?}")]
    Shape {
        /// The GGUF name.
        tensor: String,
        /// The dimensions in the file, the contiguous one first.
        dims: Vec<u64>,
        /// The dimensions by the metadata.
        expected: Vec<u64>,
    },
    /// The model has too many experts.
    #[error("{layers} layers of {experts} experts are too many, at most {MAX_EXPERT_SOURCES} tensors are supported")]
    TooMany {
        /// The number of layers.
        layers: u64,
        /// The number of experts of a layer.
        experts: u64,
    },
    /// The factors of a quantised tensor are of another type than F32.
    #[error("tensor {tensor} of factors is of type {kind}, must be F32")]
    Factors {
        /// The GGUF name.
        tensor: String,
        /// The name of its type.
        kind: &'static str,
    },
    /// A vector has a quantised type.
    #[error("tensor {tensor} is a vector of type {kind}, must not be quantised")]
    QuantisedVector {
        /// The GGUF name.
        tensor: String,
        /// The name of its type.
        kind: &'static str,
    },
}

/// The maximum number of experts' tensors in all layers; Qwen3-Next has 73,728.
pub const MAX_EXPERT_SOURCES: u64 = 1 << 20;

/// Returns the origin of each tensor that a model of this configuration has, by its name in Hugging Face checkpoints.
///
/// # Errors Every problem found, if there is any. A missing MTP block is no problem.
pub fn map(model: &GgufModel, parts: &GgufFiles) -> Result<BTreeMap<String, Source>, Vec<TensorProblem>> {
    let (sources, used, problems) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
    let mut builder = Builder { model, parts, sources, used, problems };
    builder.model();
    if builder.problems.is_empty() { Ok(builder.sources) } else { Err(builder.problems) }
}

/// The tensors of Gemma 4 whose factors are tensors of the model.
const OWN_SCALES: [&str; 2] = [".ffn_gate_inp.weight", ".ffn_down_exps.weight"];

/// Collects the origins and the problems.
struct Builder<'a> {
    model: &'a GgufModel,
    parts: &'a GgufFiles,
    sources: BTreeMap<String, Source>,
    /// The names of the GGUF tensors that were asked for.
    used: BTreeSet<String>,
    problems: Vec<TensorProblem>,
}

/// A part of a GGUF tensor that becomes a Hugging Face tensor.
struct Piece {
    shape: Vec<u64>,
    first: u64,
    rows: u64,
    order: RowOrder,
    columns: ColumnOrder,
    change: StoredAs,
    expert: Option<u64>,
}

impl Piece {
    /// `rows` rows of `cols` columns from the stored row `first` on.
    fn matrix(first: u64, rows: u64, cols: u64) -> Piece {
        let (order, columns) = (RowOrder::Same, ColumnOrder::Same);
        Piece { shape: vec![rows, cols], first, rows, order, columns, change: StoredAs::None, expert: None }
    }

    fn vector(first: u64, rows: u64) -> Piece {
        Piece { shape: vec![rows], ..Piece::matrix(first, rows, 1) }
    }

    fn order(self, order: RowOrder) -> Piece {
        Piece { order, ..self }
    }
}

impl Builder<'_> {
    fn model(&mut self) {
        let m = self.model;
        if let Some(experts) = m.experts.filter(|experts| 3 * experts.count * m.layers > MAX_EXPERT_SOURCES) {
            self.problems.push(TensorProblem::TooMany { layers: m.layers, experts: experts.count });
            return;
        }
        self.matrix("model.embed_tokens.weight", "token_embd.weight", m.vocab, m.hidden);
        // LFM2's final norm has the name of another family's norm of embeddings.
        let final_norm = match m.architecture.has_short_convs() && self.parts.has("token_embd_norm.weight") {
            true => "token_embd_norm.weight",
            false => "output_norm.weight",
        };
        self.norm("model.norm.weight", final_norm, m.hidden);
        if !m.tied {
            self.matrix("lm_head.weight", "output.weight", m.vocab, m.hidden);
        }
        for (layer, full) in (0..m.layers).zip(&m.full_attention) {
            self.block(&format!("model.layers.{layer}."), &format!("blk.{layer}."), layer, *full);
        }
        // What reads the settings checks the shapes. A vector has no rows.
        for ((folder, name, _), tensor) in dense_modules(self.parts) {
            self.matrix(&format!("{folder}/linear.weight"), &format!("{name}.weight"), tensor.rows(), tensor.cols());
        }
        if let Some([width, rows]) = m.layer_inputs {
            let all = width * m.layers;
            self.matrix("model.embed_tokens_per_layer.weight", LAYER_INPUTS, rows, all);
            self.matrix("model.per_layer_model_projection.weight", "per_layer_model_proj.weight", all, m.hidden);
            self.norm("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight", width);
        }
        // Only the first MTP block has a name in the Hugging Face layout that readers use, and only those of hybrids are
        // used.
        let from = format!("blk.{}.", m.layers);
        if m.mtp_layers > 0 && m.architecture.is_hybrid() && self.parts.has(&format!("{from}nextn.eh_proj.weight")) {
            let nextn = |part: &str| format!("{from}nextn.{part}.weight");
            self.matrix("mtp.fc.weight", &nextn("eh_proj"), m.hidden, 2 * m.hidden);
            self.norm("mtp.pre_fc_norm_embedding.weight", &nextn("enorm"), m.hidden);
            self.norm("mtp.pre_fc_norm_hidden.weight", &nextn("hnorm"), m.hidden);
            self.norm("mtp.norm.weight", &nextn("shared_head_norm"), m.hidden);
            self.block("mtp.layers.0.", &from, m.layers, true);
        }
        self.refuse_unused();
    }

    /// Refuses biases, norms and projections around experts of the layers that nobody asked for, as llama.cpp refuses all
    /// tensors of the kind: the model would silently give other tokens without them. Layers behind the last one hold
    /// multi-token-prediction blocks, and layers that read the keys and values of others may keep their own unused.
    fn refuse_unused(&mut self) {
        let m = self.model;
        for tensor in self.parts.tensors.keys() {
            let Some((layer, part)) = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
                continue;
            };
            let Some(layer) = layer.parse::<u64>().ok().filter(|layer| *layer < m.layers) else { continue };
            let counts = match part.strip_suffix(".weight") {
                Some(module) => {
                    module.contains("norm") && !module.starts_with("nextn.") || module.starts_with("ffn_latent_")
                }
                None => part.ends_with(".bias"),
            };
            let of_keys = ["attn_k.", "attn_v.", "attn_k_norm.", "attn_v_norm."];
            let shared = layer >= m.own_caches && of_keys.iter().any(|name| part.starts_with(name));
            if counts && !shared && !self.used.contains(tensor) {
                self.problems.push(TensorProblem::Unused { tensor: tensor.clone() });
            }
        }
    }

    /// Adds a layer. `to` is the prefix of the Hugging Face names and `from` that of the GGUF names, here and below. An MTP
    /// block has the number behind that of the last layer.
    fn block(&mut self, to: &str, from: &str, layer: u64, full_attention: bool) {
        let m = self.model;
        let norms: &[(&str, &str)] = match m.architecture {
            Gemma2 | Gemma3 | GemmaEmbedding | Gemma4 => &[
                ("input_layernorm", "attn_norm"),
                ("post_attention_layernorm", "post_attention_norm"),
                ("pre_feedforward_layernorm", "ffn_norm"),
                ("post_feedforward_layernorm", "post_ffw_norm"),
            ],
            Glm4 => &[
                ("input_layernorm", "attn_norm"),
                ("post_self_attn_layernorm", "post_attention_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("post_mlp_layernorm", "post_ffw_norm"),
            ],
            Olmo2 | Exaone4 => {
                &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")]
            }
            GptOss | Glm4Moe | SeedOss => {
                &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm")]
            }
            Lfm2 | Lfm2Moe => &[("operator_norm", "attn_norm"), ("ffn_norm", "ffn_norm")],
            NemotronH | NemotronHMoe => &[("norm", "attn_norm")],
            other if other.is_hybrid() => {
                &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm")]
            }
            _ => &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")],
        };
        for (name, stored) in norms {
            self.norm(&format!("{to}{name}.weight"), &format!("{from}{stored}.weight"), m.hidden);
        }
        if let Some(block) = m.blocks.as_ref().and_then(|blocks| blocks.get(layer as usize)) {
            return self.single_block(&format!("{to}mixer."), from, layer, *block);
        }
        if let (false, Some(space)) = (full_attention, m.space) {
            self.state_space(&format!("{to}mamba."), from, space);
            return self.mlp(to, from, layer);
        }
        match (full_attention, m.delta, m.conv_taps, m.latent) {
            (false, Some(delta), ..) => self.gated_delta(&format!("{to}linear_attn."), from, delta),
            (false, None, Some(taps), _) => self.short_conv(&format!("{to}conv."), from, taps),
            (.., Some(latent)) => self.latent_attention(&format!("{to}self_attn."), from, latent),
            _ => {
                // That of an MTP block is an ordinary one.
                let ordinary = GgufLayerHeads { kv_heads: m.kv_heads, head_dim: m.head_dim, own: true, values: true };
                let heads = if layer < m.layers { m.heads_of(layer) } else { ordinary };
                self.attention(&format!("{to}self_attn."), from, heads);
            }
        }
        self.mlp(to, from, layer);
    }

    /// Adds a layer that is either a mixer or an MLP, without its norm.
    fn single_block(&mut self, to: &str, from: &str, layer: u64, block: GgufBlock) {
        let m = self.model;
        match (block, m.space, m.experts) {
            (GgufBlock::StateSpace, Some(space), _) => self.state_space(to, from, space),
            (GgufBlock::Mlp, _, Some(experts)) => self.experts(to, from, experts),
            (GgufBlock::Mlp, _, None) => self.dense(to, from, m.intermediate),
            (GgufBlock::Attention | GgufBlock::StateSpace, ..) => self.attention(to, from, m.heads_of(layer)),
        }
    }

    fn mlp(&mut self, to: &str, from: &str, layer: u64) {
        let m = self.model;
        let beside = m.architecture == Gemma4;
        let experts = m.experts.filter(|experts| experts.has(layer));
        if experts.is_none() || beside {
            self.dense(&format!("{to}mlp."), from, m.dense_width(layer));
        }
        if let Some(experts) = experts {
            let root = if beside { to.to_owned() } else { format!("{to}mlp.") };
            self.experts(&root, from, experts);
        }
        if beside {
            self.around_mlp(to, from);
        }
    }

    /// Adds what Gemma 4's layers have beside norms, attention and matrices of the MLP.
    fn around_mlp(&mut self, to: &str, from: &str) {
        let m = self.model;
        if m.experts.is_some() {
            for (name, stored) in [
                ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
                ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
                ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
            ] {
                self.norm(&format!("{to}{name}.weight"), &format!("{from}{stored}.weight"), m.hidden);
            }
        }
        if let Some([width, _]) = m.layer_inputs {
            self.matrix(
                &format!("{to}per_layer_input_gate.weight"),
                &format!("{from}inp_gate.weight"),
                width,
                m.hidden,
            );
            self.matrix(&format!("{to}per_layer_projection.weight"), &format!("{from}proj.weight"), m.hidden, width);
            let (norm, stored) = (format!("{to}post_per_layer_input_norm.weight"), format!("{from}post_norm.weight"));
            self.norm(&norm, &stored, m.hidden);
        }
        self.vector(&format!("{to}layer_scalar"), &format!("{from}layer_output_scale.weight"), 1);
    }

    /// Adds latent attention. Most files have the rows of keys and of values of the latent vector's projection in tensors
    /// of their own, that of keys transposed for each head: their names here are the converter's.
    fn latent_attention(&mut self, to: &str, from: &str, latent: GgufLatent) {
        let m = self.model;
        let GgufLatent { q_rank, kv_rank, nope, rope, values } = latent;
        let name = |part: &str| format!("{to}{part}.weight");
        let stored = |part: &str| format!("{from}{part}.weight");
        let queries = m.heads * (nope + rope);
        match q_rank {
            None => self.matrix(&name("q_proj"), &stored("attn_q"), queries, m.hidden),
            Some(rank) => {
                self.matrix(&name("q_a_proj"), &stored("attn_q_a"), rank, m.hidden);
                self.norm(&name("q_a_layernorm"), &stored("attn_q_a_norm"), rank);
                self.matrix(&name("q_b_proj"), &stored("attn_q_b"), queries, rank);
            }
        }
        self.matrix(&name("kv_a_proj_with_mqa"), &stored("attn_kv_a_mqa"), kv_rank + rope, m.hidden);
        self.norm(&name("kv_a_layernorm"), &stored("attn_kv_a_norm"), kv_rank);
        if self.parts.has(&stored("attn_kv_b")) {
            self.matrix(&name("kv_b_proj"), &stored("attn_kv_b"), m.heads * (nope + values), kv_rank);
        } else {
            for (part, from, rows, cols) in
                [("k_b_proj", "attn_k_b", kv_rank, nope), ("v_b_proj", "attn_v_b", values, kv_rank)]
            {
                let piece = Piece::matrix(0, m.heads * rows, cols);
                let piece = Piece { shape: vec![m.heads, rows, cols], ..piece };
                self.put(name(part), &stored(from), &[cols, rows, m.heads], piece);
            }
        }
        self.matrix(&name("o_proj"), &stored("attn_output"), m.hidden, m.heads * values);
    }

    fn attention(&mut self, to: &str, from: &str, heads: GgufLayerHeads) {
        let m = self.model;
        let GgufLayerHeads { kv_heads, head_dim, own, values } = heads;
        let (q, kv) = (m.heads * head_dim, kv_heads * head_dim);
        // The queries of hybrids have a gate of the same width, interleaved head by head.
        let q_rows = if m.architecture.is_hybrid() { 2 * q } else { q };
        let permuted = |heads: u64| match m.architecture {
            Llama | Granite | GraniteMoe | GraniteHybrid | SmolLm3 | Mistral3 => {
                RowOrder::RotaryPairs { heads, head_dim }
            }
            // The converter also reorders the rows of Nemotron-H, which has no rotary embedding: queries and keys in the
            // same order have the same products in any order.
            _ => RowOrder::Same,
        };
        let projections = [
            ("q", 0, q_rows, permuted(m.heads), true),
            ("k", q_rows, kv, permuted(kv_heads), own),
            ("v", q_rows + kv, kv, RowOrder::Same, own && values),
        ];
        for part in ["weight", "bias"] {
            if part == "bias" && !m.attention_bias {
                continue;
            }
            let fused = format!("{from}attn_qkv.{part}");
            let is_fused = self.parts.has(&fused);
            let dims = |rows: u64| if part == "bias" { vec![rows] } else { vec![m.hidden, rows] };
            for (name, first, rows, order, _) in projections.into_iter().filter(|(.., has)| *has) {
                let (stored, first, all) = match is_fused {
                    true => (fused.clone(), first, q_rows + 2 * kv),
                    false => (format!("{from}attn_{name}.{part}"), 0, rows),
                };
                let piece = match part {
                    "bias" => Piece::vector(first, rows),
                    _ => Piece::matrix(first, rows, m.hidden),
                };
                self.put(format!("{to}{name}_proj.{part}"), &stored, &dims(all), piece.order(order));
            }
        }
        self.matrix(&format!("{to}o_proj.weight"), &format!("{from}attn_output.weight"), m.hidden, q);
        let bias = format!("{from}attn_output.bias");
        if self.parts.has(&bias) {
            self.put(format!("{to}o_proj.bias"), &bias, &[m.hidden], Piece::vector(0, m.hidden));
        }
        let head_norms = match m.architecture {
            Llama | Qwen2 | Qwen2Moe | Qwen2Vl | Gemma2 | GptOss | Phi3 | Granite | SmolLm3 | Glm4 | Mistral3 => None,
            SeedOss | Ernie45 | Ernie45Moe | GraniteMoe | GraniteHybrid | NemotronH | NemotronHMoe => None,
            Glm4Moe if !m.head_norms => None,
            // One norm over all heads.
            Olmo2 | Olmoe | MiniMaxM2 => Some([q, kv]),
            _ => Some([head_dim; 2]),
        };
        let published = match m.architecture {
            HunYuanDense | HunYuanMoe => ["query_layernorm", "key_layernorm"],
            _ => ["q_norm", "k_norm"],
        };
        let names = published.into_iter().zip(["q_norm", "k_norm"]).take(if own { 2 } else { 1 });
        for ((name, stored), rows) in names.zip(head_norms.into_iter().flatten()) {
            self.norm(&format!("{to}{name}.weight"), &format!("{from}attn_{stored}.weight"), rows);
        }
        if m.architecture == GptOss {
            let sinks = format!("{from}attn_sinks.weight");
            self.put(format!("{to}sinks"), &sinks, &[m.heads], Piece::vector(0, m.heads));
        }
    }

    fn gated_delta(&mut self, to: &str, from: &str, delta: Delta) {
        let m = self.model;
        let Delta { key_heads, value_heads, key_dim, value_dim, conv_kernel } = delta;
        let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
        let channels = 2 * keys + values;
        let per_key = value_heads / key_heads;
        let grouped = m.architecture == Qwen3Next;
        // Qwen3-Next keeps the value heads grouped by their key heads. With one value head for each key head both
        // orders are the same.
        let tiled = |lead: u64, head_rows: u64| match grouped || per_key == 1 || key_heads == 1 {
            true => RowOrder::Same,
            false => RowOrder::TiledHeads { lead, key_heads, per_key, head_rows },
        };
        let name = |part: &str| format!("{to}{part}");
        let stored = |part: &str| format!("{from}{part}");
        let rows = |rows: u64, order: RowOrder| Piece::matrix(0, rows, m.hidden).order(order);

        if grouped && self.parts.has(&stored("ssm_in.weight")) {
            // Older files keep q, k, v and z in one tensor, as released checkpoints do.
            let all = channels + values;
            self.matrix(&name("in_proj_qkvz.weight"), &stored("ssm_in.weight"), all, m.hidden);
        } else {
            let qkv = rows(channels, tiled(2 * keys, value_dim));
            self.put(name("in_proj_qkv.weight"), &stored("attn_qkv.weight"), &[m.hidden, channels], qkv);
            let z = rows(values, tiled(0, value_dim));
            self.put(name("in_proj_z.weight"), &stored("attn_gate.weight"), &[m.hidden, values], z);
        }
        if grouped {
            let (ba, dims) = (stored("ssm_ba.weight"), [m.hidden, 2 * value_heads]);
            self.matrix(&name("in_proj_ba.weight"), &ba, 2 * value_heads, m.hidden);
            // For each key head, the rows of b of its value heads, then those of a.
            let groups = RowOrder::Groups { rows: per_key, stride: 2 * per_key };
            for (part, first) in [("in_proj_b.weight", 0), ("in_proj_a.weight", per_key)] {
                self.put(name(part), &ba, &dims, Piece { first, ..rows(value_heads, groups) });
            }
        } else {
            for (part, from) in [("in_proj_b.weight", "ssm_beta.weight"), ("in_proj_a.weight", "ssm_alpha.weight")] {
                self.put(name(part), &stored(from), &[m.hidden, value_heads], rows(value_heads, tiled(0, 1)));
            }
        }
        let conv = Piece::matrix(0, channels, conv_kernel).order(tiled(2 * keys, value_dim));
        let conv = Piece { shape: vec![channels, 1, conv_kernel], ..conv };
        self.put(name("conv1d.weight"), &stored("ssm_conv1d.weight"), &[conv_kernel, channels], conv);
        let of_heads = || Piece::vector(0, value_heads).order(tiled(0, 1));
        let a_log = Piece { change: StoredAs::NegativeExp, ..of_heads() };
        self.put(name("A_log"), &stored("ssm_a"), &[value_heads], a_log);
        self.put(name("dt_bias"), &stored("ssm_dt.bias"), &[value_heads], of_heads());
        // The only norm of a hybrid that is stored as it is.
        self.put(name("norm.weight"), &stored("ssm_norm.weight"), &[value_dim], Piece::vector(0, value_dim));
        let columns = match tiled(0, value_dim) {
            RowOrder::Same => ColumnOrder::Same,
            _ => ColumnOrder::TiledHeads { key_heads, per_key, head_cols: value_dim },
        };
        let out = Piece { columns, ..Piece::matrix(0, m.hidden, values) };
        self.put(name("out_proj.weight"), &stored("ssm_out.weight"), &[values, m.hidden], out);
    }

    fn state_space(&mut self, to: &str, from: &str, space: GgufSpace) {
        let hidden = self.model.hidden;
        let GgufSpace { dims: Delta { key_heads, value_heads, key_dim, value_dim, conv_kernel }, conv_bias } = space;
        let (inner, groups) = (value_heads * value_dim, key_heads);
        let channels = inner + 2 * groups * key_dim;
        let (name, stored) = (|part: &str| format!("{to}{part}"), |part: &str| format!("{from}ssm_{part}"));
        self.matrix(&name("in_proj.weight"), &stored("in.weight"), inner + channels + value_heads, hidden);
        let conv = Piece { shape: vec![channels, 1, conv_kernel], ..Piece::matrix(0, channels, conv_kernel) };
        self.put(name("conv1d.weight"), &stored("conv1d.weight"), &[conv_kernel, channels], conv);
        if conv_bias {
            self.vector(&name("conv1d.bias"), &stored("conv1d.bias"), channels);
        }
        let a_log = Piece { change: StoredAs::NegativeExp, ..Piece::vector(0, value_heads) };
        self.put(name("A_log"), &stored("a"), &[1, value_heads], a_log);
        self.put(name("D"), &stored("d"), &[1, value_heads], Piece::vector(0, value_heads));
        self.vector(&name("dt_bias"), &stored("dt.bias"), value_heads);
        self.put(name("norm.weight"), &stored("norm.weight"), &[inner / groups, groups], Piece::vector(0, inner));
        self.matrix(&name("out_proj.weight"), &stored("out.weight"), hidden, inner);
    }

    fn short_conv(&mut self, to: &str, from: &str, taps: u64) {
        let hidden = self.model.hidden;
        self.matrix(&format!("{to}in_proj.weight"), &format!("{from}shortconv.in_proj.weight"), 3 * hidden, hidden);
        self.matrix(&format!("{to}out_proj.weight"), &format!("{from}shortconv.out_proj.weight"), hidden, hidden);
        let conv = Piece { shape: vec![hidden, 1, taps], ..Piece::matrix(0, hidden, taps) };
        self.put(format!("{to}conv.weight"), &format!("{from}shortconv.conv.weight"), &[taps, hidden], conv);
    }

    fn dense(&mut self, to: &str, from: &str, inner: Option<u64>) {
        let m = self.model;
        let gated = !m.architecture.has_single_blocks();
        let Some(inner) = inner else {
            let first = if gated { "gate" } else { "up" };
            self.problems.push(TensorProblem::Missing { tensor: format!("{from}ffn_{first}.weight") });
            return;
        };
        // The rows of gate and then those of up.
        let fused = matches!(m.architecture, Phi3 | Glm4) && !self.parts.has(&format!("{from}ffn_gate.weight"));
        let parts = [("gate", inner, m.hidden), ("up", inner, m.hidden), ("down", m.hidden, inner)];
        for (part, rows, cols) in parts.into_iter().skip(usize::from(!gated)) {
            let name = format!("{to}{part}_proj.weight");
            match (fused, part) {
                (true, "gate" | "up") => {
                    let piece = Piece::matrix(if part == "gate" { 0 } else { inner }, inner, cols);
                    self.put(name, &format!("{from}ffn_up.weight"), &[cols, 2 * inner], piece);
                }
                _ => self.matrix(&name, &format!("{from}ffn_{part}.weight"), rows, cols),
            }
            let bias = format!("{from}ffn_{part}.bias");
            if m.mlp_bias {
                self.put(format!("{to}{part}_proj.bias"), &bias, &[rows], Piece::vector(0, rows));
            }
        }
    }

    fn experts(&mut self, to: &str, from: &str, experts: GgufExperts) {
        let m = self.model;
        let GgufExperts { count, inner, shared_inner, routing, .. } = experts;
        let router = match m.architecture {
            GptOss => "router",
            Gemma4 => "router.proj",
            _ => "gate",
        };
        self.matrix(&format!("{to}{router}.weight"), &format!("{from}ffn_gate_inp.weight"), count, m.hidden);
        if m.architecture == Gemma4 {
            self.vector(&format!("{to}router.scale"), &format!("{from}ffn_gate_inp.scale"), m.hidden);
            self.vector(&format!("{to}router.per_expert_scale"), &format!("{from}ffn_down_exps.scale"), count);
        }
        if routing.is_some_and(|routing| routing.biased) {
            let bias = format!("{to}{router}.e_score_correction_bias");
            self.vector(&bias, &format!("{from}{CHOICE_BIAS}"), count);
        }
        if m.architecture == GptOss {
            let bias = format!("{from}ffn_gate_inp.bias");
            self.put(format!("{to}{router}.bias"), &bias, &[count], Piece::vector(0, count));
            for (part, rows) in [("gate", inner), ("up", inner), ("down", m.hidden)] {
                let (name, stored) = (format!("{to}experts.{part}_proj_bias"), format!("{from}ffn_{part}_exps.bias"));
                // Each expert's is a row.
                if let Some((at, scale)) = self.resolve(&stored, &[rows, count], false) {
                    self.insert(name, at, scale, Piece::matrix(0, count, rows));
                }
            }
        }
        // Without gate projections, the first part is left out.
        let left_out = usize::from(m.architecture.has_single_blocks());
        let fused = format!("{from}ffn_gate_up_exps.weight");
        let is_fused = left_out == 0 && self.parts.has(&fused);
        let tensors = [
            ("gate", inner, m.hidden, is_fused.then_some(0)),
            ("up", inner, m.hidden, is_fused.then_some(inner)),
            ("down", m.hidden, inner, None),
        ];
        for (part, rows, cols, within) in tensors.into_iter().skip(left_out) {
            let (stored, of_expert) = match within {
                Some(_) => (fused.clone(), 2 * inner),
                None => (format!("{from}ffn_{part}_exps.weight"), rows),
            };
            let dims = [cols, of_expert, count];
            // Reported once, not for each expert.
            let Some((at, scale)) = self.resolve(&stored, &dims, true) else { continue };
            for expert in 0..count {
                let first = expert * of_expert + within.unwrap_or(0);
                let piece = Piece { expert: Some(expert), ..Piece::matrix(first, rows, cols) };
                self.insert(format!("{to}experts.{expert}.{part}_proj.weight"), at, scale, piece);
            }
        }
        if let Some(inner) = shared_inner {
            let gated = routing.is_none() && !m.architecture.adds_shared_expert();
            let shared = if gated { "shared_expert" } else { "shared_experts" };
            if gated {
                let gate = Piece::matrix(0, 1, m.hidden);
                let stored = format!("{from}ffn_gate_inp_shexp.weight");
                self.put(format!("{to}shared_expert_gate.weight"), &stored, &[m.hidden], gate);
            }
            let parts = [("gate", inner, m.hidden), ("up", inner, m.hidden), ("down", m.hidden, inner)];
            for (part, rows, cols) in parts.into_iter().skip(left_out) {
                let stored = format!("{from}ffn_{part}_shexp.weight");
                self.matrix(&format!("{to}{shared}.{part}_proj.weight"), &stored, rows, cols);
            }
        }
    }

    fn matrix(&mut self, name: &str, stored: &str, rows: u64, cols: u64) {
        self.put(name.to_owned(), stored, &[cols, rows], Piece::matrix(0, rows, cols));
    }

    /// Adds a vector that is stored as it is.
    fn vector(&mut self, name: &str, stored: &str, rows: u64) {
        self.put(name.to_owned(), stored, &[rows], Piece::vector(0, rows));
    }

    /// Adds a norm, whose weights some families store with 1 added.
    fn norm(&mut self, name: &str, stored: &str, rows: u64) {
        let shifted = self.model.architecture.has_shifted_norms();
        let change = if shifted { StoredAs::PlusOne } else { StoredAs::None };
        self.put(name.to_owned(), stored, &[rows], Piece { change, ..Piece::vector(0, rows) });
    }

    /// Adds a piece of the GGUF tensor `stored`, which must have the dimensions `dims`.
    fn put(&mut self, name: String, stored: &str, dims: &[u64], piece: Piece) {
        if let Some((at, scale)) = self.resolve(stored, dims, piece.shape.len() > 1) {
            self.insert(name, at, scale, piece);
        }
    }

    fn insert(&mut self, name: String, at: TensorRef, scale: Option<TensorRef>, piece: Piece) {
        let Piece { shape, first, rows, order, columns, change, expert } = piece;
        let cols = if shape.len() == 1 { 1 } else { shape[shape.len() - 1] };
        let source = Source { at, shape, rows, cols, first, order, columns, change, scale, expert };
        self.sources.insert(name, source);
    }

    /// Finds a tensor and checks its dimensions. Problems are recorded once for a tensor.
    fn resolve(&mut self, stored: &str, dims: &[u64], matrix: bool) -> Option<(TensorRef, Option<TensorRef>)> {
        let Some(at) = self.parts.find(stored) else {
            return self.problem(TensorProblem::Missing { tensor: stored.to_owned() });
        };
        self.used.insert(stored.to_owned());
        let info = self.parts.at(at);
        // Trailing dimensions of size 1 may be written or not.
        let trimmed =
            |dims: &[u64]| dims.iter().rposition(|n| *n != 1).map_or(Vec::new(), |last| dims[..=last].to_vec());
        if trimmed(&info.dims) != trimmed(dims) {
            let (tensor, dims, expected) = (stored.to_owned(), info.dims.clone(), dims.to_owned());
            return self.problem(TensorProblem::Shape { tensor, dims, expected });
        }
        if !matrix && info.kind.is_quantised() {
            let (tensor, kind) = (stored.to_owned(), info.kind.name());
            return self.problem(TensorProblem::QuantisedVector { tensor, kind });
        }
        // Gemma 4 has factors of the router's inputs and of the experts' outputs under such names.
        let own = self.model.architecture == Gemma4 && OWN_SCALES.iter().any(|name| stored.ends_with(name));
        let base = stored.strip_suffix(".weight").filter(|_| !own);
        let scale = base.and_then(|base| self.parts.find(&format!("{base}.scale")));
        let Some(scale) = scale else { return Some((at, None)) };
        // One factor, or one for each expert.
        let factors = self.parts.at(scale);
        let experts = dims.get(2).copied().unwrap_or(1);
        let fits = [1, experts].iter().any(|count| trimmed(&factors.dims) == trimmed(&[*count]));
        if !fits || factors.kind != TensorType::F32 {
            let (tensor, found) = (factors.name.clone(), factors.dims.clone());
            let problem = match fits {
                true => TensorProblem::Factors { tensor, kind: factors.kind.name() },
                false => TensorProblem::Shape { tensor, dims: found, expected: vec![experts] },
            };
            return self.problem(problem);
        }
        Some((at, Some(scale)))
    }

    fn problem<T>(&mut self, problem: TensorProblem) -> Option<T> {
        if self.problems.last() != Some(&problem) {
            self.problems.push(problem);
        }
        None
    }
}

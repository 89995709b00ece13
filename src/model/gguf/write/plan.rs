//! The plan of a GGUF file: for each of its tensors, the rows of the checkpoint's tensors that make it up. The list of
//! the file's tensors is defined here; the sources of their rows are the inverse of the reader's map.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;

use super::super::GgufError;
use super::super::config::{GgufArchitecture, GgufModel, GgufRope, ROPE_FACTORS};
use super::super::container::{DEFAULT_ALIGNMENT, GgufTensor, Header, TensorType};
use super::super::split::{GgufFile, GgufFiles};
use super::super::tensors::{ColumnOrder, RowRun, Source, StoredAs, map};
use super::WriteError;
use super::metadata::model;

/// The element types of a checkpoint that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
}

impl SourceType {
    /// Returns the type that safetensors files spell this way, if it is supported.
    pub fn of(name: &str) -> Option<SourceType> {
        match name {
            "F32" => Some(SourceType::F32),
            "F16" => Some(SourceType::F16),
            "BF16" => Some(SourceType::BF16),
            _ => None,
        }
    }

    /// Returns the number of bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            SourceType::F32 => 4,
            SourceType::F16 | SourceType::BF16 => 2,
        }
    }
}

/// A run of rows of a checkpoint's tensor: row `row + i` becomes row `stored + i * stored_step` of the GGUF tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The name of the tensor in the checkpoint.
    pub tensor: String,
    /// The first row. All dimensions of the tensor but the last count as one; a vector has rows of one element.
    pub row: u64,
    /// The row of the GGUF tensor to which the first row is written.
    pub stored: u64,
    /// The distance between the rows of the GGUF tensor.
    pub stored_step: u64,
    /// The number of rows.
    pub rows: u64,
}

/// A tensor of the file to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedTensor {
    /// The name in the file.
    pub name: String,
    /// The dimensions in the file, the contiguous one first.
    pub dims: Vec<u64>,
    /// The index of its block, if it belongs to one.
    pub layer: Option<u64>,
    /// The number of elements of a row; 1 for a vector.
    pub cols: u64,
    /// The runs of rows that make up the tensor. They fill each row once.
    pub sources: Vec<Run>,
    /// The order of the columns, as a reader sees it: column `c` of the checkpoint's tensor stands where
    /// [`ColumnOrder::stored_column`] says.
    pub columns: ColumnOrder,
    /// The change of the values that a reader has to undo: with [`StoredAs::PlusOne`], the file stores `w + 1`.
    pub change: StoredAs,
    /// The values of a tensor that the checkpoint does not have; it then has no sources.
    pub values: Option<Vec<f32>>,
}

impl PlannedTensor {
    /// Returns the number of rows of `cols` elements.
    pub fn rows(&self) -> u64 {
        self.dims.iter().product::<u64>() / self.cols
    }

    /// Returns the stored value for a value of the checkpoint.
    pub fn value(&self, value: f32) -> f32 {
        match self.change {
            StoredAs::None => value,
            StoredAs::PlusOne => value + 1.0,
            StoredAs::NegativeExp => -value.exp(),
        }
    }
}

/// Plans the tensors of the file for a checkpoint with this config.json, given the shape and the element type, as
/// safetensors files spell it, of each of its tensors by name. GgufFiles of the checkpoint that are not the text model's
/// are left out, as is a multi-token-prediction block that config.json states but that has no tensors.
///
/// # Errors The first problem found.
pub fn tensors(config: &Json, names: &BTreeMap<String, (Vec<u64>, String)>) -> Result<Vec<PlannedTensor>, WriteError> {
    let mut model = model(config)?;
    let checkpoint = Checkpoint::new(names);
    if !checkpoint.has_mtp() {
        model.mtp_layers = 0;
    }
    let list = List::of(&model, &checkpoint);

    // A file that has these tensors, as its reader would see it.
    let info = |(name, dims, _): &Entry| {
        let (name, dims) = (name.clone(), dims.clone());
        GgufTensor { name, dims, kind: TensorType::F32, offset: 0, bytes: 0 }
    };
    let header = Header {
        version: 3,
        alignment: DEFAULT_ALIGNMENT,
        metadata: BTreeMap::new(),
        tensors: list.iter().map(info).collect(),
        data_start: 0,
    };
    let unreadable = |error: GgufError| WriteError::Unreadable(Box::new(error));
    let parts = GgufFiles::new(vec![GgufFile { path: "model.gguf".into(), bytes: 0, header }])
        .map_err(|error| unreadable(error.into()))?;
    let map = map(&model, &parts).map_err(|problems| unreadable(GgufError::Tensors(problems)))?;

    let plan = |(name, dims, layer): Entry| {
        let (cols, sources, columns, change) = (1, Vec::new(), ColumnOrder::Same, StoredAs::None);
        PlannedTensor { name, dims, layer, cols, sources, columns, change, values: None }
    };
    let mut planned: Vec<PlannedTensor> = list.into_iter().map(plan).collect();
    let mut used = BTreeSet::new();
    let fused_ba = |name: &str| {
        let base = name.strip_suffix("in_proj_b.weight").or_else(|| name.strip_suffix("in_proj_a.weight"));
        base.is_some_and(|base| checkpoint.has(&format!("{base}in_proj_ba.weight")))
    };
    for (name, source) in &map {
        // The reader offers both forms of this tensor; released checkpoints have one.
        if fused_ba(name) || name.ends_with("in_proj_ba.weight") && !checkpoint.has(name) {
            continue;
        }
        let tensor = &mut planned[source.at.index];
        tensor.cols = source.cols;
        tensor.columns = source.columns;
        tensor.change = source.change;
        let (origin, segments) = checkpoint.find(name, source, &model)?;
        for run in source.runs() {
            tensor.sources.extend(segments.iter().filter_map(|segment| segment.cut(&run, origin)));
        }
        used.insert(origin);
    }
    for tensor in &mut planned {
        if let (ROPE_FACTORS, GgufRope::Llama3(scaling)) = (tensor.name.as_str(), &model.rope_scaling) {
            let divisor = |pair: u64| {
                let power = 2.0 * pair as f64 / model.rotary_dim as f64;
                scaling.divisor(std::f64::consts::TAU * model.rope_theta.powf(power)) as f32
            };
            tensor.values = Some((0..model.rotary_dim / 2).map(divisor).collect());
            continue;
        }
        tensor.sources.sort_by_key(|run| run.stored);
        let (has, expected) = (tensor.sources.iter().map(|run| run.rows).sum::<u64>(), tensor.rows());
        if has != expected {
            return Err(WriteError::SourceRows { tensor: tensor.name.clone(), has, expected });
        }
    }
    let unused = checkpoint
        .names
        .iter()
        .find(|(name, (actual, ..))| !(used.contains(actual) || model.tied && name.as_str() == "lm_head.weight"));
    match unused {
        Some((_, (actual, ..))) => Err(WriteError::Unused((*actual).to_owned())),
        None => Ok(planned),
    }
}

/// A part of a tensor: rows `from` to `from + rows` are the rows from `at` on of a tensor of the checkpoint.
struct Segment {
    from: u64,
    at: u64,
    rows: u64,
}

impl Segment {
    /// Returns the part of a run that is in the segment.
    fn cut(&self, run: &RowRun, tensor: &str) -> Option<Run> {
        let begin = run.row.max(self.from);
        let end = (run.row + run.rows).min(self.from + self.rows);
        (begin < end).then(|| Run {
            tensor: tensor.to_owned(),
            row: self.at + (begin - self.from),
            stored: run.stored + (begin - run.row) * run.stored_step,
            stored_step: run.stored_step,
            rows: end - begin,
        })
    }
}

/// The tensors of the checkpoint.
struct Checkpoint<'a> {
    /// Name, shape and element type in the checkpoint, by the name in a checkpoint of the text model alone.
    names: BTreeMap<String, (&'a str, &'a [u64], &'a str)>,
}

impl<'a> Checkpoint<'a> {
    fn new(names: &'a BTreeMap<String, (Vec<u64>, String)>) -> Checkpoint<'a> {
        let plain = |name: &str| {
            let inner = ["model.language_model.", "language_model.model."];
            match inner.iter().find_map(|prefix| name.strip_prefix(prefix)) {
                Some(rest) => format!("model.{rest}"),
                None => name.strip_prefix("language_model.").unwrap_or(name).to_owned(),
            }
        };
        // Not parameters of the text model, or not parameters at all.
        let foreign = |name: &str| {
            ["model.visual.", "visual.", "model.vision_tower.", "vision_tower."].iter().any(|p| name.starts_with(p))
                || name.ends_with("rotary_emb.inv_freq")
        };
        let entries = names.iter().filter(|(name, _)| !foreign(name));
        let names = entries.map(|(name, (shape, dtype))| (plain(name), (name.as_str(), &shape[..], dtype.as_str())));
        Checkpoint { names: names.collect() }
    }

    fn has(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    fn has_mtp(&self) -> bool {
        self.names.keys().any(|name| name.starts_with("mtp."))
    }

    /// Finds the rows of a tensor of the reader's names: the tensor's name in the checkpoint, and the parts of it.
    fn find(&self, name: &str, source: &Source, model: &GgufModel) -> Result<(&'a str, Vec<Segment>), WriteError> {
        let whole = |from: u64, at: u64, rows: u64| vec![Segment { from, at, rows }];
        if self.has(name) {
            let origin = self.checked(name, &source.shape)?;
            return Ok((origin, whole(0, 0, source.rows)));
        }
        let missing = || WriteError::MissingTensor(name.to_owned());
        if let (Some(expert), Some(experts)) = (source.expert, model.experts) {
            let (base, part) = name.split_once(&format!(".experts.{expert}.")).ok_or_else(missing)?;
            let (fused, first, of_expert) = match part {
                "gate_proj.weight" => ("gate_up_proj", 0, 2 * source.rows),
                "up_proj.weight" => ("gate_up_proj", source.rows, 2 * source.rows),
                _ => ("down_proj", 0, source.rows),
            };
            let fused = format!("{base}.experts.{fused}");
            if self.has(&fused) {
                let origin = self.checked(&fused, &[experts.count, of_expert, source.cols])?;
                return Ok((origin, whole(0, expert * of_expert + first, source.rows)));
            }
        }
        if let (Some(delta), Some(at)) = (model.delta, name.find("in_proj_")) {
            let fused = format!("{}in_proj_qkvz.weight", &name[..at]);
            let (keys, values) = (delta.key_dim, delta.value_heads / delta.key_heads * delta.value_dim);
            let group = 2 * keys + 2 * values;
            let all = delta.key_heads * keys;
            // Each key head has its rows of q and k, then those of v and z of its value heads.
            let parts: &[(u64, u64, u64)] = match &name[at..] {
                "in_proj_qkv.weight" => &[(0, 0, keys), (all, keys, keys), (2 * all, 2 * keys, values)],
                "in_proj_z.weight" => &[(0, 2 * keys + values, values)],
                _ => &[],
            };
            if self.has(&fused) && !parts.is_empty() {
                let origin = self.checked(&fused, &[delta.key_heads * group, source.cols])?;
                let of_head = |head: u64| {
                    let segment = move |(from, at, rows): &(u64, u64, u64)| Segment {
                        from: from + head * rows,
                        at: head * group + at,
                        rows: *rows,
                    };
                    parts.iter().map(segment)
                };
                return Ok((origin, (0..delta.key_heads).flat_map(of_head).collect()));
            }
        }
        Err(missing())
    }

    /// Returns the name in the checkpoint, if shape and element type are as expected.
    fn checked(&self, name: &str, expected: &[u64]) -> Result<&'a str, WriteError> {
        let missing = || WriteError::MissingTensor(name.to_owned());
        let &(actual, has, dtype) = self.names.get(name).ok_or_else(missing)?;
        if has != expected {
            return Err(WriteError::Shape { tensor: actual.into(), has: has.into(), expected: expected.into() });
        }
        match SourceType::of(dtype) {
            Some(_) => Ok(actual),
            None => Err(WriteError::Dtype { tensor: actual.to_owned(), dtype: dtype.to_owned() }),
        }
    }
}

/// A tensor of the file: name, dimensions and block.
type Entry = (String, Vec<u64>, Option<u64>);

/// Collects the tensors of the file in their order.
struct List<'a> {
    model: &'a GgufModel,
    checkpoint: &'a Checkpoint<'a>,
    layer: Option<u64>,
    entries: Vec<Entry>,
}

impl List<'_> {
    fn of(model: &GgufModel, checkpoint: &Checkpoint<'_>) -> Vec<Entry> {
        let mut list = List { model, checkpoint, layer: None, entries: Vec::new() };
        let m = model;
        list.put("token_embd.weight", &[m.hidden, m.vocab]);
        list.put("output_norm.weight", &[m.hidden]);
        if !m.tied {
            list.put("output.weight", &[m.hidden, m.vocab]);
        }
        if let GgufRope::Llama3(_) = m.rope_scaling {
            list.put(ROPE_FACTORS, &[m.rotary_dim / 2]);
        }
        for (layer, full) in (0..).zip(&m.full_attention) {
            list.layer = Some(layer);
            list.block(&format!("model.layers.{layer}."), *full);
        }
        if m.mtp_layers > 0 {
            list.layer = Some(m.layers);
            list.put("nextn.eh_proj.weight", &[2 * m.hidden, m.hidden]);
            for norm in ["enorm", "hnorm", "shared_head_norm"] {
                list.put(&format!("nextn.{norm}.weight"), &[m.hidden]);
            }
            list.block("mtp.layers.0.", true);
        }
        list.entries
    }

    /// Adds a tensor of the present block, or of the model.
    fn put(&mut self, name: &str, dims: &[u64]) {
        let name = self.layer.map_or(name.to_owned(), |layer| format!("blk.{layer}.{name}"));
        self.entries.push((name, dims.to_owned(), self.layer));
    }

    /// Adds a layer, which has the prefix `from` in the checkpoint.
    fn block(&mut self, from: &str, full_attention: bool) {
        let m = self.model;
        let hybrid = m.architecture.is_hybrid();
        self.put("attn_norm.weight", &[m.hidden]);
        self.put(if hybrid { "post_attention_norm.weight" } else { "ffn_norm.weight" }, &[m.hidden]);
        match (full_attention, m.delta) {
            (false, Some(_)) => self.gated_delta(),
            _ => self.attention(from),
        }
        if let Some(experts) = m.experts {
            self.put("ffn_gate_inp.weight", &[m.hidden, experts.count]);
            self.put("ffn_gate_exps.weight", &[m.hidden, experts.inner, experts.count]);
            self.put("ffn_up_exps.weight", &[m.hidden, experts.inner, experts.count]);
            self.put("ffn_down_exps.weight", &[experts.inner, m.hidden, experts.count]);
            if let Some(inner) = experts.shared_inner {
                self.put("ffn_gate_inp_shexp.weight", &[m.hidden]);
                self.put("ffn_gate_shexp.weight", &[m.hidden, inner]);
                self.put("ffn_up_shexp.weight", &[m.hidden, inner]);
                self.put("ffn_down_shexp.weight", &[inner, m.hidden]);
            }
        } else if let Some(inner) = m.intermediate {
            for (part, cols, rows) in [("gate", m.hidden, inner), ("up", m.hidden, inner), ("down", inner, m.hidden)] {
                self.put(&format!("ffn_{part}.weight"), &[cols, rows]);
                if m.mlp_bias {
                    self.put(&format!("ffn_{part}.bias"), &[rows]);
                }
            }
        }
    }

    fn attention(&mut self, from: &str) {
        let m = self.model;
        let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
        let q_rows = if m.architecture.is_hybrid() { 2 * q } else { q };
        for (part, rows) in [("q", q_rows), ("k", kv), ("v", kv)] {
            self.put(&format!("attn_{part}.weight"), &[m.hidden, rows]);
            if m.attention_bias {
                self.put(&format!("attn_{part}.bias"), &[rows]);
            }
        }
        self.put("attn_output.weight", &[q, m.hidden]);
        if self.checkpoint.has(&format!("{from}self_attn.o_proj.bias")) {
            self.put("attn_output.bias", &[m.hidden]);
        }
        if !matches!(m.architecture, GgufArchitecture::Llama | GgufArchitecture::Qwen2) {
            self.put("attn_q_norm.weight", &[m.head_dim]);
            self.put("attn_k_norm.weight", &[m.head_dim]);
        }
    }

    fn gated_delta(&mut self) {
        let m = self.model;
        let Some(delta) = m.delta else { return };
        let values = delta.value_heads * delta.value_dim;
        let channels = 2 * delta.key_heads * delta.key_dim + values;
        self.put("attn_qkv.weight", &[m.hidden, channels]);
        self.put("attn_gate.weight", &[m.hidden, values]);
        if m.architecture == GgufArchitecture::Qwen3Next {
            self.put("ssm_ba.weight", &[m.hidden, 2 * delta.value_heads]);
        } else {
            self.put("ssm_beta.weight", &[m.hidden, delta.value_heads]);
            self.put("ssm_alpha.weight", &[m.hidden, delta.value_heads]);
        }
        self.put("ssm_conv1d.weight", &[delta.conv_kernel, channels]);
        self.put("ssm_a", &[delta.value_heads]);
        self.put("ssm_dt.bias", &[delta.value_heads]);
        self.put("ssm_norm.weight", &[delta.value_dim]);
        self.put("ssm_out.weight", &[values, m.hidden]);
    }
}

//! The quantised weights of a safetensors checkpoint: which tensors form a weight, and how they are to be read. The
//! tensors decide whether a module is quantised, the configuration how.
//!
//! Not here: the configuration (`config::quantization`), and reading the tensors' data, except for the groups of columns
//! that are not adjacent, which say how a weight can be used.

use std::sync::Arc;

use super::headers::Headers;
use super::place::TensorPlace;
use super::quant_state::{ModuleTensors, QuantState};
use super::{CheckpointProblem, TensorInfo};
use crate::model::config::quantization::{Mxfp4Names, Quantization, Scheme, Strategy};
use crate::quant::Codes;
use crate::quant::safetensors::{Description, ScaleShape, Storage, TensorDtype, TensorHead, TensorRole};

/// A quantised weight of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantisedWeight {
    /// How the weight is stored, with the headers of its tensors.
    pub description: Arc<Description>,
    /// The places of the description's tensors.
    pub places: Vec<TensorPlace>,
    /// The format of decoded rows: the meaning of codes, scales and minimums.
    pub codes: Codes,
    /// The order of the columns in decoded rows, if it is not that of the checkpoint (act-order): position j is column
    /// `order[j]`.
    pub order: Option<Arc<[u32]>>,
}

/// Rows of a quantised weight.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixRef {
    /// The weight.
    pub matrix: Arc<QuantisedWeight>,
    /// The row of the weight that is the source's row 0.
    pub first: u32,
}

/// The tensors' names that a module's weight may have instead of numbers.
pub(super) struct Names {
    /// The tensor of numbers: `….weight`, or the name of fused experts.
    numbers: String,
    /// The module's name, which its other tensors begin with.
    module: String,
    /// The separator between the module's name and the names of its tensors: `.`, or `_` for fused experts.
    joint: &'static str,
}

impl Names {
    pub(super) fn new(tensor: &str) -> Names {
        let (module, joint) = match tensor.strip_suffix(".weight") {
            Some(module) => (module, "."),
            None => (tensor, "_"),
        };
        Names { numbers: tensor.to_owned(), module: module.to_owned(), joint }
    }

    fn of(&self, part: &str) -> String {
        // The scales of fused experts are not called after a `weight`.
        let part = if self.joint == "_" { part.strip_prefix("weight_").unwrap_or(part) } else { part };
        format!("{}{}{part}", self.module, self.joint)
    }

    /// The names of the tensors that hold the codes, other than that of numbers.
    pub(super) fn codes(&self) -> [String; 3] {
        ["qweight", "weight_packed", "blocks"].map(|part| self.of(part))
    }
}

/// The parts of tensors' names that belong to quantised weights.
const SCALES: [&str; 7] =
    ["weight_scale_inv", "weight_scale", "scales", "weight_scale_2", "weight_global_scale", "weight.absmax", "SCB"];

/// Returns the name of a scale that stands beside a tensor of numbers, which then may not be the weight itself.
pub(super) fn scale_beside(headers: &Headers, tensor: &str) -> Option<String> {
    let names = Names::new(tensor);
    SCALES.into_iter().find_map(|part| headers.find(&names.of(part)).map(|(name, _)| name.to_owned()))
}

/// Whether a tensor has codes of 4 bits of bitsandbytes, whatever its element type: they are stored in one of any type.
pub(super) fn has_quant_state(headers: &Headers, tensor: &str) -> bool {
    let names = Names::new(tensor);
    of_module(headers, &names, |tensors| tensors.state()).is_some()
}

/// Gives the tensors of a module to a function.
fn of_module<R>(headers: &Headers, names: &Names, read: impl Fn(ModuleTensors<'_>) -> R) -> R {
    let name = |part: &str| names.of(part);
    let find = |part: &str| headers.find(&name(part)).map(|(name, info)| (name.to_owned(), headers.place(info)));
    read(ModuleTensors { name: &name, find: &find })
}

/// A tensor that was found.
type Found<'a> = (&'a str, &'a TensorInfo, TensorDtype);

/// Finds the tensors of one weight.
struct Finder<'a> {
    headers: &'a Headers,
    quantization: &'a Quantization,
    names: Names,
    tensors: Vec<TensorHead>,
    places: Vec<TensorPlace>,
}

/// Returns the quantised weight that is stored instead of the numbers of tensor `name`, which would have this shape;
/// `None` if the tensor is not stored as a quantised weight.
pub(super) fn find<'a>(
    headers: &'a Headers,
    quantization: Option<&'a Quantization>,
    name: &str,
    shape: &[u64],
) -> Option<Result<QuantisedWeight, CheckpointProblem>> {
    let names = Names::new(name);
    let [packed_gptq, packed, blocks] = names.codes();
    let found = [&names.numbers, &packed_gptq, &packed, &blocks].into_iter().find_map(|name| headers.find(name))?;
    let (codes, info) = found;
    let Some(dtype) = TensorDtype::from_name(&info.dtype) else {
        let (tensor, dtype) = (codes.to_owned(), info.dtype.clone());
        return Some(Err(CheckpointProblem::UnsupportedDtype { tensor, dtype }));
    };
    let Some(quantization) = quantization else {
        let (tensor, dtype) = (codes.to_owned(), info.dtype.clone());
        return Some(Err(CheckpointProblem::NoQuantization { tensor, dtype }));
    };
    // Patterns and lists may use the file's name of the module, or its name in the text model.
    let module = names.module.clone();
    let known_as = codes.len().checked_sub(codes.rsplit('.').next().map_or(0, str::len) + 1).map(|end| &codes[..end]);
    let in_file = known_as.unwrap_or(&module);
    let is_embedding = ["embed_tokens", "embeddings"].iter().any(|name| module.ends_with(name));
    let class = if is_embedding { "Embedding" } else { "Linear" };
    let Some(scheme) = quantization.scheme(&[in_file, &module], class) else {
        return Some(Err(CheckpointProblem::NotQuantised { tensor: codes.to_owned(), module: in_file.to_owned() }));
    };
    let mut finder = Finder { headers, quantization, names, tensors: Vec::new(), places: Vec::new() };
    finder.add(TensorRole::Codes, (codes, info, dtype));
    Some(finder.weight(scheme, shape))
}

impl<'a> Finder<'a> {
    fn add(&mut self, role: TensorRole, (name, info, dtype): Found<'a>) {
        self.tensors.push(TensorHead { role, name: name.to_owned(), dtype, shape: info.shape.clone() });
        let path = Arc::clone(&self.headers.files[info.file].path);
        self.places.push(TensorPlace { path, offset: info.offset, bytes: info.bytes });
    }

    /// Adds the tensor with the first of these names that exists.
    fn need(&mut self, role: TensorRole, parts: &[&str]) -> Result<(), CheckpointProblem> {
        let all: Vec<String> = parts.iter().map(|part| self.names.of(part)).collect();
        match self.optional(role, parts)? {
            true => Ok(()),
            // A file that could not be read was reported before.
            false => Err(CheckpointProblem::MissingTensor { tensor: all.join(" or ") }),
        }
    }

    /// Adds the tensor with the first of these names that exists, and returns whether one does.
    fn optional(&mut self, role: TensorRole, parts: &[&str]) -> Result<bool, CheckpointProblem> {
        let headers = self.headers;
        let found = parts.iter().find_map(|part| headers.find(&self.names.of(part)));
        let Some((name, info)) = found else { return Ok(false) };
        let Some(dtype) = TensorDtype::from_name(&info.dtype) else {
            return Err(CheckpointProblem::UnsupportedDtype { tensor: name.to_owned(), dtype: info.dtype.clone() });
        };
        self.add(role, (name, info, dtype));
        Ok(true)
    }

    /// Reads the state that bitsandbytes has beside codes of 4 bits, and the codes as bytes.
    fn quant_state(&mut self) -> Result<QuantState, CheckpointProblem> {
        let state = of_module(self.headers, &self.names, |tensors| tensors.read())?;
        let codes = &mut self.tensors[0];
        (codes.dtype, codes.shape) = (TensorDtype::U8, vec![self.places[0].bytes]);
        Ok(state)
    }

    /// Refuses 8-bit codes of bitsandbytes whose rows are not in their order: those of a kernel's tiles.
    fn are_rows(&self) -> Result<(), CheckpointProblem> {
        let Some((name, info)) = self.headers.find(&self.names.of("weight_format")) else { return Ok(()) };
        let bytes = self.headers.place(info).read()?;
        match bytes.iter().all(|byte| *byte == 0) {
            true => Ok(()),
            false => Err(CheckpointProblem::QuantState {
                tensor: name.to_owned(),
                reason: format!("the format is {}, must be 0 (rows)", bytes[0]),
            }),
        }
    }

    /// Refuses codes in a tensor that the configuration's format does not have.
    fn codes_are(&self, ends: &[&str]) -> Result<(), CheckpointProblem> {
        let tensor = &self.tensors[0].name;
        if ends.iter().any(|end| tensor.ends_with(end)) {
            return Ok(());
        }
        let expected: Vec<String> = ends.iter().map(|end| format!("{}{end}", self.names.module)).collect();
        Err(CheckpointProblem::OtherFormat { tensor: tensor.clone(), expected: expected.join(" or ") })
    }

    /// Refuses gpt-oss's codes of experts whose first dimensions are not those of the experts' matrices.
    fn are_blocks(&self, shape: &[u64]) -> Result<(), CheckpointProblem> {
        let TensorHead { name, shape: found, .. } = &self.tensors[0];
        match (shape.split_last(), found.split_last_chunk::<2>()) {
            (Some((cols, front)), Some((of, _))) if of != front => {
                let expected = [front, &[cols / 32, 16]].concat();
                Err(CheckpointProblem::Shape { tensor: name.clone(), shape: found.clone(), expected })
            }
            _ => Ok(()),
        }
    }

    /// Refuses a weight whose inputs must be scaled before it multiplies them, as ModelOpt's AWQ and SmoothQuant have it.
    fn takes_inputs_as_they_are(&self) -> Result<(), CheckpointProblem> {
        match self.headers.find(&self.names.of("pre_quant_scale")) {
            None => Ok(()),
            Some(_) => {
                let (tensor, what) = (self.tensors[0].name.clone(), "scales of its inputs (pre_quant_scale)");
                Err(CheckpointProblem::Stored { tensor, what })
            }
        }
    }

    fn weight(mut self, scheme: Scheme, shape: &[u64]) -> Result<QuantisedWeight, CheckpointProblem> {
        self.takes_inputs_as_they_are()?;
        let fused = self.names.joint == "_";
        let numbers = if fused { "_proj" } else { ".weight" };
        // Of three dimensions, those of experts and of their rows are one.
        let (cols, rows) = match *shape {
            [rows, cols] => (cols, rows),
            [experts, rows, cols] => (cols, experts.saturating_mul(rows)),
            _ => (0, 0),
        };
        let storage = match scheme {
            Scheme::Fp8 { block } => {
                self.codes_are(&[numbers])?;
                self.need(TensorRole::Scale, &["weight_scale_inv", "weight_scale"])?;
                let scale_shape = match block {
                    Some([rows, cols]) => ScaleShape::Block { rows, cols },
                    None => self.scale_shape(),
                };
                Storage::Fp8 { scale_shape: self.flatten(shape, scale_shape)? }
            }
            Scheme::Floats { strategy } => {
                self.codes_are(&[numbers])?;
                self.need(TensorRole::Scale, &["weight_scale"])?;
                Storage::Fp8 { scale_shape: self.flatten(shape, scale_shape(strategy))? }
            }
            Scheme::Gptq { layout, version } => {
                self.codes_are(&[".qweight"])?;
                self.need(TensorRole::Zero, &["qzeros"])?;
                self.need(TensorRole::Scale, &["scales"])?;
                self.optional(TensorRole::GroupIndex, &["g_idx"])?;
                Storage::Gptq { bits: layout.bits, group: layout.group, symmetric: layout.symmetric, version }
            }
            Scheme::Awq { group, zeros } => {
                self.codes_are(&[".qweight"])?;
                match zeros {
                    true => self.need(TensorRole::Zero, &["qzeros"])?,
                    false => drop(self.optional(TensorRole::Zero, &["qzeros"])?),
                }
                self.need(TensorRole::Scale, &["scales"])?;
                Storage::Awq { group }
            }
            Scheme::PackedInts { bits, strategy, symmetric } => {
                self.codes_are(&[".weight_packed"])?;
                self.need(TensorRole::Scale, &["weight_scale"])?;
                if !symmetric {
                    self.need(TensorRole::Zero, &["weight_zero_point"])?;
                }
                Storage::PackedInts { bits, scale_shape: scale_shape(strategy), shape: [rows, cols] }
            }
            Scheme::Int8 { strategy, symmetric } => {
                self.codes_are(&[numbers])?;
                self.need(TensorRole::Scale, &["weight_scale"])?;
                if !symmetric {
                    self.need(TensorRole::Zero, &["weight_zero_point"])?;
                }
                Storage::Int8 { scale_shape: scale_shape(strategy), largest: false }
            }
            Scheme::BitsAndBytes { bits: 8 } => {
                self.codes_are(&[numbers])?;
                self.are_rows()?;
                self.need(TensorRole::Scale, &["SCB"])?;
                Storage::Int8 { scale_shape: ScaleShape::Row, largest: true }
            }
            Scheme::BitsAndBytes { .. } => {
                self.codes_are(&[numbers])?;
                let QuantState { table, block, shape, nested } = self.quant_state()?;
                self.need(TensorRole::Scale, &["weight.absmax"])?;
                if nested.is_some() {
                    self.need(TensorRole::ScaleNumbers, &["weight.nested_quant_map"])?;
                    self.need(TensorRole::ScaleOfScales, &["weight.nested_absmax"])?;
                }
                Storage::Table { table, block, shape, nested }
            }
            Scheme::Nvfp4 { compressed } => {
                self.codes_are(&[if compressed { ".weight_packed" } else { ".weight" }])?;
                self.need(TensorRole::Scale, &["weight_scale"])?;
                self.need(TensorRole::Global, &[if compressed { "weight_global_scale" } else { "weight_scale_2" }])?;
                Storage::Nvfp4 { global_divides: compressed }
            }
            Scheme::Mxfp4 { names } => {
                let (codes, scales) = match names {
                    Mxfp4Names::Compressed => (".weight_packed", "weight_scale"),
                    Mxfp4Names::Blocks => ("_blocks", "scales"),
                    Mxfp4Names::Plain => (".weight", "weight_scale"),
                };
                self.codes_are(&[codes])?;
                self.need(TensorRole::Scale, &[scales])?;
                if names == Mxfp4Names::Blocks {
                    self.are_blocks(shape)?;
                }
                Storage::Mxfp4
            }
        };
        if matches!(self.quantization, Quantization::CompressedTensors { .. }) {
            self.optional(TensorRole::GroupIndex, &["weight_g_idx"])?;
        }
        let description = Description { storage, tensors: self.tensors };
        let checked = description.check().map_err(CheckpointProblem::Weight)?;
        let (found, codes) = ((u64::from(checked.rows()), u64::from(checked.cols())), checked.codes());
        if found != (rows, cols) {
            let tensor = description.tensors[0].name.clone();
            let (found, expected) = ([found.0, found.1], [rows, cols]);
            return Err(CheckpointProblem::QuantisedShape { tensor, found, expected });
        }
        let order = match description.group_index() {
            None => None,
            Some(index) => {
                let bytes = self.places[index].read()?;
                description.order(&bytes).map_err(CheckpointProblem::Weight)?.map(Arc::from)
            }
        };
        Ok(QuantisedWeight { description: Arc::new(description), places: self.places, codes, order })
    }

    /// The shape of scales that are not blocks: one, or one a row.
    fn scale_shape(&self) -> ScaleShape {
        let elements = |shape: &[u64]| shape.iter().fold(1u64, |product, n| product.saturating_mul(*n));
        match self.tensors.last() {
            Some(scale) if elements(&scale.shape) > 1 => ScaleShape::Row,
            _ => ScaleShape::Tensor,
        }
    }

    /// Joins the dimensions of experts and of their rows in the headers of fused experts. Returns the scales' shape.
    fn flatten(&mut self, shape: &[u64], scale_shape: ScaleShape) -> Result<ScaleShape, CheckpointProblem> {
        let &[experts, rows, cols] = shape else { return Ok(scale_shape) };
        let per_expert = match scale_shape {
            // One scale an expert.
            ScaleShape::Tensor => Some((1, ScaleShape::Block { rows: rows as u32, cols: cols as u32 })),
            ScaleShape::Row => Some(match self.tensors.last().map(|scale| scale.shape.as_slice()) {
                Some([n] | [n, 1] | [n, 1, 1]) if *n == experts => {
                    (1, ScaleShape::Block { rows: rows as u32, cols: cols as u32 })
                }
                _ => (rows, ScaleShape::Row),
            }),
            ScaleShape::Group(_) => Some((rows, scale_shape)),
            ScaleShape::Block { rows: height, .. } if rows.is_multiple_of(u64::from(height)) => {
                Some((rows / u64::from(height), scale_shape))
            }
            ScaleShape::Block { .. } => None,
        };
        for tensor in &mut self.tensors {
            let (name, found) = (tensor.name.clone(), tensor.shape.clone());
            let of_one = if tensor.role == TensorRole::Codes { Some(rows) } else { per_expert.map(|(rows, _)| rows) };
            let expected = || CheckpointProblem::Shape { tensor: name, shape: found, expected: shape.to_vec() };
            match (&tensor.shape[..], of_one) {
                (&[first, second, third], Some(rows)) if (first, second) == (experts, rows) => {
                    tensor.shape = vec![first * second, third];
                }
                (&[first] | &[first, 1], Some(1)) if first == experts => tensor.shape = vec![first, 1],
                _ => return Err(expected()),
            }
        }
        Ok(per_expert.map_or(scale_shape, |(_, shape)| shape))
    }
}

fn scale_shape(strategy: Strategy) -> ScaleShape {
    match strategy {
        Strategy::Tensor => ScaleShape::Tensor,
        Strategy::Channel => ScaleShape::Row,
        Strategy::Group(group) => ScaleShape::Group(group),
        Strategy::Block([rows, cols]) => ScaleShape::Block { rows, cols },
    }
}

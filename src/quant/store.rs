//! Quantises matrices into the tensors of safetensors formats, by rounding to nearest: the inverse of
//! [`super::safetensors`]. Not here: names of modules, files, and better ways to choose codes.

use super::number::{e8m0, to_e2m1, to_e4m3};
use super::table::TableType;
use half::{bf16, f16};

/// The columns of a group of integers; the last group of a row may be shorter.
pub const GROUP: usize = 128;
/// The rows and columns of a block of [`StoredType::Fp8Block`].
pub const BLOCK: usize = 128;
/// The elements of a block of [`StoredType::Nf4`].
const NF4_BLOCK: usize = 64;

/// A format of a quantised matrix in several tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    /// FP8 (e4m3) with a scale for the tensor.
    Fp8,
    /// compressed-tensors `float-quantized`: FP8 with a scale a row.
    Fp8Channel,
    /// FP8 with a scale for each 128 × 128 block.
    Fp8Block,
    /// GPTQ, 4 bits without zeros.
    Gptq4,
    /// GPTQ, 8 bits without zeros.
    Gptq8,
    /// GPTQ, 4 bits without zeros, with act-order: the columns of a group are not adjacent.
    Gptq4Order,
    /// AWQ, version gemm, 4 bits with zeros.
    Awq,
    /// compressed-tensors `pack-quantized`, 4 bits without zeros.
    Int4,
    /// compressed-tensors `int-quantized`, 8 bits with a scale a row.
    Int8,
    /// compressed-tensors `nvfp4-pack-quantized`.
    Nvfp4,
    /// compressed-tensors `mxfp4-pack-quantized`.
    Mxfp4,
    /// bitsandbytes nf4, with scales in f32.
    Nf4,
    /// bitsandbytes, 8 bits with a scale a row.
    BitsAndBytes8,
}

/// A tensor of a quantised matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// The part of the tensor's name after that of the module.
    pub part: &'static str,
    /// The element type as headers spell it.
    pub dtype: &'static str,
    /// The size of each dimension.
    pub shape: Vec<u64>,
    /// The size in bytes.
    pub bytes: u64,
}

impl StoredType {
    /// All types.
    pub const ALL: [StoredType; 13] = [
        StoredType::Fp8,
        StoredType::Fp8Channel,
        StoredType::Fp8Block,
        StoredType::Gptq4,
        StoredType::Gptq8,
        StoredType::Gptq4Order,
        StoredType::Awq,
        StoredType::Int4,
        StoredType::Int8,
        StoredType::Nvfp4,
        StoredType::Mxfp4,
        StoredType::Nf4,
        StoredType::BitsAndBytes8,
    ];

    /// The type's name, for example `fp8-block`.
    pub const fn name(self) -> &'static str {
        match self {
            StoredType::Fp8 => "fp8",
            StoredType::Fp8Channel => "fp8-channel",
            StoredType::Fp8Block => "fp8-block",
            StoredType::Gptq4 => "gptq4",
            StoredType::Gptq8 => "gptq8",
            StoredType::Gptq4Order => "gptq4-actorder",
            StoredType::Awq => "awq",
            StoredType::Int4 => "ct-int4",
            StoredType::Int8 => "ct-int8",
            StoredType::Nvfp4 => "nvfp4",
            StoredType::Mxfp4 => "mxfp4",
            StoredType::Nf4 => "bnb-nf4",
            StoredType::BitsAndBytes8 => "bnb-int8",
        }
    }

    /// Returns the type with this name.
    pub fn from_name(name: &str) -> Option<StoredType> {
        StoredType::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether a matrix of this size can be stored: packed words are whole.
    pub const fn fits(self, rows: usize, cols: usize) -> bool {
        let (row_multiple, col_multiple) = match self {
            StoredType::Fp8
            | StoredType::Fp8Channel
            | StoredType::Fp8Block
            | StoredType::Int8
            | StoredType::BitsAndBytes8 => (1, 1),
            StoredType::Gptq4 | StoredType::Gptq4Order | StoredType::Awq => (8, 8),
            StoredType::Gptq8 => (4, 4),
            StoredType::Int4 => (1, 8),
            StoredType::Nvfp4 | StoredType::Nf4 => (1, 16),
            StoredType::Mxfp4 => (1, 32),
        };
        rows > 0 && cols > 0 && rows.is_multiple_of(row_multiple) && cols.is_multiple_of(col_multiple)
    }

    /// Returns the tensors of a matrix of `rows` × `cols`, which fits.
    pub fn tensors(self, rows: usize, cols: usize) -> Vec<StoredTensor> {
        let groups = cols.div_ceil(GROUP);
        let tensor = |part, dtype: &'static str, shape: &[usize]| {
            let size = match dtype {
                "I64" => 8,
                "F32" | "I32" => 4,
                "F16" | "BF16" => 2,
                _ => 1,
            };
            let bytes = shape.iter().product::<usize>() as u64 * size;
            StoredTensor { part, dtype, shape: shape.iter().map(|n| *n as u64).collect(), bytes }
        };
        let gptq = |bits: usize| {
            vec![
                tensor("qweight", "I32", &[cols * bits / 32, rows]),
                tensor("qzeros", "I32", &[groups, rows * bits / 32]),
                tensor("scales", "F16", &[groups, rows]),
                tensor("g_idx", "I32", &[cols]),
            ]
        };
        match self {
            StoredType::Fp8 => {
                vec![tensor("weight", "F8_E4M3", &[rows, cols]), tensor("weight_scale", "F32", &[])]
            }
            StoredType::Fp8Channel => {
                vec![tensor("weight", "F8_E4M3", &[rows, cols]), tensor("weight_scale", "BF16", &[rows, 1])]
            }
            StoredType::Fp8Block => {
                let blocks = [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
                vec![tensor("weight", "F8_E4M3", &[rows, cols]), tensor("weight_scale_inv", "F32", &blocks)]
            }
            StoredType::Gptq4 | StoredType::Gptq4Order => gptq(4),
            StoredType::Gptq8 => gptq(8),
            StoredType::Awq => vec![
                tensor("qweight", "I32", &[cols, rows / 8]),
                tensor("qzeros", "I32", &[groups, rows / 8]),
                tensor("scales", "F16", &[groups, rows]),
            ],
            StoredType::Int4 => vec![
                tensor("weight_packed", "I32", &[rows, cols / 8]),
                tensor("weight_scale", "BF16", &[rows, groups]),
                tensor("weight_shape", "I64", &[2]),
            ],
            StoredType::Int8 => vec![tensor("weight", "I8", &[rows, cols]), tensor("weight_scale", "BF16", &[rows, 1])],
            StoredType::Nvfp4 => vec![
                tensor("weight_packed", "U8", &[rows, cols / 2]),
                tensor("weight_scale", "F8_E4M3", &[rows, cols / 16]),
                tensor("weight_global_scale", "F32", &[1]),
            ],
            StoredType::Mxfp4 => {
                vec![tensor("weight_packed", "U8", &[rows, cols / 2]), tensor("weight_scale", "U8", &[rows, cols / 32])]
            }
            StoredType::Nf4 => vec![
                tensor("weight", "U8", &[rows * cols / 2, 1]),
                tensor("weight.absmax", "F32", &[(rows * cols).div_ceil(NF4_BLOCK)]),
                tensor("weight.quant_map", "F32", &[16]),
                tensor("weight.quant_state.bitsandbytes__nf4", "U8", &[nf4_state(rows, cols).len()]),
            ],
            StoredType::BitsAndBytes8 => vec![
                tensor("weight", "I8", &[rows, cols]),
                tensor("SCB", "F32", &[rows]),
                tensor("weight_format", "U8", &[]),
            ],
        }
    }

    /// Returns the bytes of the tensors of a matrix, in the order of [`StoredType::tensors`]. Numbers must be finite.
    ///
    /// # Panics
    /// If the matrix does not fit or `numbers` is not `rows` × `cols`: a bug of the caller.
    pub fn quantise(self, rows: usize, cols: usize, numbers: &[f32]) -> Vec<Vec<u8>> {
        assert!(self.fits(rows, cols) && numbers.len() == rows * cols, "{} of {rows} x {cols}", self.name());
        match self {
            StoredType::Fp8 => {
                let scale = largest(numbers) / 448.0;
                vec![numbers.iter().map(|x| to_e4m3(x / above_zero(scale))).collect(), scale_bytes(scale)]
            }
            StoredType::Fp8Channel => {
                let scales: Vec<bf16> =
                    numbers.chunks(cols).map(|row| bf16::from_f32(above_zero(largest(row) / 448.0))).collect();
                let code = |(i, x): (usize, &f32)| to_e4m3(x / scales[i / cols].to_f32());
                vec![numbers.iter().enumerate().map(code).collect(), bf16_bytes(&scales)]
            }
            StoredType::Fp8Block => fp8_blocks(rows, cols, numbers),
            StoredType::Gptq4 => gptq(rows, cols, numbers, 4, false),
            StoredType::Gptq8 => gptq(rows, cols, numbers, 8, false),
            StoredType::Gptq4Order => gptq(rows, cols, numbers, 4, true),
            StoredType::Awq => awq(rows, cols, numbers),
            StoredType::Int4 => {
                let Ints { codes, scales, .. } =
                    integers(cols, numbers, 4, None, |column| column / GROUP, |x| bf16::from_f32(x).to_f32());
                let words = codes.as_chunks::<8>().0.iter().flat_map(|codes| word(codes.iter(), 4).to_le_bytes());
                let scales: Vec<bf16> = scales.iter().map(|x| bf16::from_f32(*x)).collect();
                let shape = [rows, cols].into_iter().flat_map(|n| (n as i64).to_le_bytes()).collect();
                vec![words.collect(), bf16_bytes(&scales), shape]
            }
            StoredType::Int8 => {
                let scales: Vec<bf16> =
                    numbers.chunks(cols).map(|row| bf16::from_f32(above_zero(largest(row) / 127.0))).collect();
                let code =
                    |(i, x): (usize, &f32)| (x / scales[i / cols].to_f32()).round().clamp(-128.0, 127.0) as i8 as u8;
                vec![numbers.iter().enumerate().map(code).collect(), bf16_bytes(&scales)]
            }
            StoredType::Nvfp4 => {
                let global = 448.0 * 6.0 / above_zero(largest(numbers));
                let scale = |part: &[f32]| to_e4m3(largest(part) / 6.0 * global).max(1);
                let scales: Vec<u8> = numbers.chunks(16).map(scale).collect();
                let code = |(i, x): (usize, &f32)| to_e2m1(x / (super::number::e4m3(scales[i / 16]) / global));
                let codes: Vec<u8> = numbers.iter().enumerate().map(code).collect();
                vec![nibbles(&codes), scales, scale_bytes(global)]
            }
            StoredType::Mxfp4 => {
                // The exponent for which the largest number lies between 4 and 8.
                let scale = |part: &[f32]| ((largest(part).to_bits() >> 23) as i32 - 2).clamp(0, 254) as u8;
                let scales: Vec<u8> = numbers.chunks(32).map(scale).collect();
                let code = |(i, x): (usize, &f32)| to_e2m1(x / e8m0(scales[i / 32]));
                let codes: Vec<u8> = numbers.iter().enumerate().map(code).collect();
                vec![nibbles(&codes), scales]
            }
            StoredType::Nf4 => {
                let most: Vec<f32> = numbers.chunks(NF4_BLOCK).map(|part| above_zero(largest(part))).collect();
                let code = |(i, x): (usize, &f32)| TableType::Nf4.nearest(x / most[i / NF4_BLOCK]);
                let codes: Vec<u8> = numbers.iter().enumerate().map(code).collect();
                let packed = codes.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect();
                vec![packed, f32_bytes(&most), f32_bytes(TableType::Nf4.numbers()), nf4_state(rows, cols).into_bytes()]
            }
            StoredType::BitsAndBytes8 => {
                let most: Vec<f32> = numbers.chunks(cols).map(|row| above_zero(largest(row))).collect();
                let code = |(i, x): (usize, &f32)| (x * 127.0 / most[i / cols]).round() as i8 as u8;
                vec![numbers.iter().enumerate().map(code).collect(), f32_bytes(&most), vec![0]]
            }
        }
    }
}

/// The state that bitsandbytes stores beside a matrix, without its scales.
fn nf4_state(rows: usize, cols: usize) -> String {
    let table = TableType::Nf4.name();
    format!(r#"{{"quant_type": "{table}", "blocksize": {NF4_BLOCK}, "dtype": "bfloat16", "shape": [{rows}, {cols}]}}"#)
}

fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// Clamps a scale to at least 2^-24, so that it can be a divisor.
fn above_zero(scale: f32) -> f32 {
    scale.max(2f32.powi(-24))
}

fn scale_bytes(scale: f32) -> Vec<u8> {
    above_zero(scale).to_le_bytes().to_vec()
}

fn f32_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn bf16_bytes(numbers: &[bf16]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Two codes of 4 bits in a byte, the first in the low bits.
fn nibbles(codes: &[u8]) -> Vec<u8> {
    codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect()
}

/// Packs codes into a word, the first in the low bits.
fn word<'a>(codes: impl Iterator<Item = &'a u8>, bits: usize) -> u32 {
    codes.zip(0..).fold(0, |word, (code, i)| word | u32::from(*code) << (i * bits))
}

/// Integers of a matrix: codes by row, and scales and zeros by row and group.
struct Ints {
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

/// Rounds numbers to integers of `bits` bits. `group_of` gives a column's group and `round` rounds a scale to a format
/// of 16 bits. The zero is the middle code, or at least `least_zero` where that is given.
fn integers(
    cols: usize,
    numbers: &[f32],
    bits: usize,
    least_zero: Option<u8>,
    group_of: impl Fn(usize) -> usize,
    round: impl Fn(f32) -> f32,
) -> Ints {
    let (top, groups) = ((1u32 << bits) as f32 - 1.0, cols.div_ceil(GROUP));
    let mut ints = Ints { codes: Vec::with_capacity(numbers.len()), scales: Vec::new(), zeros: Vec::new() };
    let group_of: Vec<usize> = (0..cols).map(group_of).collect();
    for row in numbers.chunks(cols) {
        let mut ends = vec![(0f32, 0f32); groups];
        for (x, group) in row.iter().zip(&group_of) {
            let (low, high) = &mut ends[*group];
            (*low, *high) = (low.min(*x), high.max(*x));
        }
        let first = ints.scales.len();
        for (low, high) in ends {
            let (scale, zero) = match least_zero {
                None => (high.max(-low) / (top / 2.0), (top + 1.0) / 2.0),
                Some(_) => ((high - low) / top, 0.0),
            };
            let scale = round(above_zero(scale));
            let zero = least_zero.map_or(zero, |least| (-low / scale).round().clamp(f32::from(least), top));
            ints.scales.push(scale);
            ints.zeros.push(zero as u8);
        }
        for (x, group) in row.iter().zip(&group_of) {
            let (scale, zero) = (ints.scales[first + group], f32::from(ints.zeros[first + group]));
            ints.codes.push((x / scale + zero).round().clamp(0.0, top) as u8);
        }
    }
    ints
}

fn fp8_blocks(rows: usize, cols: usize, numbers: &[f32]) -> Vec<Vec<u8>> {
    let (down, across) = (rows.div_ceil(BLOCK), cols.div_ceil(BLOCK));
    let mut scales = vec![0f32; down * across];
    for (row, numbers) in numbers.chunks(cols).enumerate() {
        for (block, part) in numbers.chunks(BLOCK).enumerate() {
            let scale = &mut scales[row / BLOCK * across + block];
            *scale = scale.max(largest(part) / 448.0);
        }
    }
    scales.iter_mut().for_each(|scale| *scale = above_zero(*scale));
    let scale_of = |i: usize| scales[i / cols / BLOCK * across + i % cols / BLOCK];
    let codes = numbers.iter().enumerate().map(|(i, x)| to_e4m3(x / scale_of(i))).collect();
    vec![codes, f32_bytes(&scales)]
}

/// Transposes numbers by row and group, as f16.
fn transposed(rows: usize, groups: usize, scales: &[f32]) -> Vec<u8> {
    let at = |i: usize| f16::from_f32(scales[i % rows * groups + i / rows]).to_le_bytes();
    (0..rows * groups).flat_map(at).collect()
}

fn gptq(rows: usize, cols: usize, numbers: &[f32], bits: usize, ordered: bool) -> Vec<Vec<u8>> {
    let step = if ordered { step_of(cols) } else { 1 };
    let group_of = |column: usize| column * step % cols / GROUP;
    let Ints { codes, scales, zeros } = integers(cols, numbers, bits, None, group_of, |x| f16::from_f32(x).to_f32());
    let (each, groups) = (32 / bits, cols.div_ceil(GROUP));
    let mut words = Vec::with_capacity(codes.len() * bits / 8);
    for first in (0..cols).step_by(each) {
        for row in 0..rows {
            words.extend(word(codes[row * cols + first..][..each].iter(), bits).to_le_bytes());
        }
    }
    let mut zero_words = Vec::new();
    for group in 0..groups {
        for first in (0..rows).step_by(each) {
            // Version 1: one less than the zero.
            let zeros: Vec<u8> = (first..first + each).map(|row| zeros[row * groups + group] - 1).collect();
            zero_words.extend(word(zeros.iter(), bits).to_le_bytes());
        }
    }
    let g_idx = (0..cols).flat_map(|column| (group_of(column) as i32).to_le_bytes()).collect();
    vec![words, zero_words, transposed(rows, groups, &scales), g_idx]
}

/// Returns a number without a common divisor with `cols`, so that column × number mod `cols` is an order of the columns.
fn step_of(cols: usize) -> usize {
    let divides = |a: usize, b: usize| {
        let (mut a, mut b) = (a, b);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a > 1
    };
    (cols * 5 / 8 + 1..).find(|step| !divides(*step, cols)).unwrap_or(1)
}

fn awq(rows: usize, cols: usize, numbers: &[f32]) -> Vec<Vec<u8>> {
    /// The row, of eight, in each nibble of a word.
    const ROWS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let Ints { codes, scales, zeros } =
        integers(cols, numbers, 4, Some(0), |column| column / GROUP, |x| f16::from_f32(x).to_f32());
    let groups = cols.div_ceil(GROUP);
    let pack = |of: &[u8], width: usize| {
        let mut words = Vec::with_capacity(of.len() / 2);
        for column in 0..width {
            for first in (0..rows).step_by(8) {
                let codes = ROWS.map(|row| of[(first + row) * width + column]);
                words.extend(word(codes.iter(), 4).to_le_bytes());
            }
        }
        words
    };
    vec![pack(&codes, cols), pack(&zeros, groups), transposed(rows, groups, &scales)]
}

#[cfg(test)]
mod tests {
    use super::super::safetensors::{
        Description, GptqVersion, ScaleShape, Storage, TensorDtype, TensorHead, TensorRole, WeightError,
    };
    use super::*;

    /// How a stored matrix is read, and the largest error in parts of the largest number of a group.
    fn storage(kind: StoredType, shape: [u64; 2]) -> (Storage, f32) {
        let gptq = |bits| Storage::Gptq { bits, group: Some(128), symmetric: true, version: GptqVersion::V1 };
        let fp8 = |scale_shape| Storage::Fp8 { scale_shape };
        match kind {
            StoredType::Fp8 => (fp8(ScaleShape::Tensor), 0.04),
            StoredType::Fp8Channel => (fp8(ScaleShape::Row), 0.04),
            StoredType::Fp8Block => (fp8(ScaleShape::Block { rows: 128, cols: 128 }), 0.04),
            StoredType::Gptq4 | StoredType::Gptq4Order => (gptq(4), 0.075),
            StoredType::Gptq8 => (gptq(8), 0.005),
            StoredType::Awq => (Storage::Awq { group: Some(128) }, 0.075),
            StoredType::Int4 => (Storage::PackedInts { bits: 4, scale_shape: ScaleShape::Group(128), shape }, 0.075),
            StoredType::Int8 => (Storage::Int8 { scale_shape: ScaleShape::Row, largest: false }, 0.005),
            StoredType::BitsAndBytes8 => (Storage::Int8 { scale_shape: ScaleShape::Row, largest: true }, 0.005),
            // Half of the largest step, and what the codes are off.
            StoredType::Nf4 => (Storage::Table { table: TableType::Nf4, block: 64, shape, nested: None }, 0.156),
            StoredType::Nvfp4 => (Storage::Nvfp4 { global_divides: true }, 0.18),
            StoredType::Mxfp4 => (Storage::Mxfp4, 0.26),
        }
    }

    fn role(part: &str) -> Option<TensorRole> {
        match part {
            "weight" | "qweight" | "weight_packed" => Some(TensorRole::Codes),
            "qzeros" => Some(TensorRole::Zero),
            "g_idx" => Some(TensorRole::GroupIndex),
            "weight_global_scale" => Some(TensorRole::Global),
            "weight_shape" | "weight_format" | "weight.quant_map" | "weight.quant_state.bitsandbytes__nf4" => None,
            _ => Some(TensorRole::Scale),
        }
    }

    fn stored(kind: StoredType, rows: usize, cols: usize, numbers: &[f32]) -> (Description, Vec<Vec<u8>>) {
        let data = kind.quantise(rows, cols, numbers);
        let (mut tensors, mut bytes) = (Vec::new(), Vec::new());
        for (tensor, data) in kind.tensors(rows, cols).into_iter().zip(data) {
            assert_eq!(data.len() as u64, tensor.bytes, "{kind:?} {}", tensor.part);
            let Some(role) = role(tensor.part) else { continue };
            let dtype = TensorDtype::from_name(tensor.dtype).expect("a type of the format");
            tensors.push(TensorHead { role, name: tensor.part.to_owned(), dtype, shape: tensor.shape });
            bytes.push(data);
        }
        let (storage, _) = storage(kind, [rows as u64, cols as u64]);
        (Description { storage, tensors }, bytes)
    }

    fn numbers(count: usize) -> Vec<f32> {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|i| next() * 2f32.powi((i / 512) as i32 % 3)).collect()
    }

    /// Decodes all rows, in the checkpoint's order of columns.
    fn decode(description: &Description, bytes: &[Vec<u8>]) -> Result<Vec<f32>, WeightError> {
        let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        let matrix = description.open(&bytes)?;
        let (rows, cols, groups) = (matrix.rows() as usize, matrix.cols() as usize, matrix.groups());
        let (mut codes, mut scales, mut minimums) =
            (vec![0; rows * cols], vec![0.0; rows * groups], vec![0.0; rows * groups]);
        matrix.decode(0, rows as u32, &mut codes, &mut scales, &mut minimums)?;
        let mut out = vec![0.0; rows * cols];
        for row in 0..rows {
            let (columns, numbers) = (row * cols..(row + 1) * cols, row * groups..(row + 1) * groups);
            let mut decoded = vec![0.0; cols];
            matrix.codes().dequantize(
                &codes[columns.clone()],
                &scales[numbers.clone()],
                &minimums[numbers],
                &mut decoded,
            );
            match matrix.order() {
                None => out[columns].copy_from_slice(&decoded),
                Some(order) => order.iter().zip(decoded).for_each(|(column, x)| out[row * cols + *column as usize] = x),
            }
        }
        Ok(out)
    }

    #[test]
    fn every_type_is_read_back_within_its_step() {
        for kind in StoredType::ALL {
            for (rows, cols) in [(16, 512), (136, 288), (8, 64)] {
                let numbers = numbers(rows * cols);
                let (description, bytes) = stored(kind, rows, cols, &numbers);
                let found = decode(&description, &bytes).unwrap();
                let most = largest(&numbers) * storage(kind, [0, 0]).1;
                for (at, (found, wanted)) in found.iter().zip(&numbers).enumerate() {
                    assert!((found - wanted).abs() <= most, "{kind:?} {rows}x{cols} at {at}: {found}, {wanted}");
                }
                let apart = found.iter().zip(&numbers).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
                let size = numbers.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>();
                assert!((apart / size).sqrt() < 0.2, "{kind:?} {rows}x{cols}: {}", (apart / size).sqrt());
            }
        }
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        for kind in StoredType::ALL {
            assert_eq!(StoredType::from_name(kind.name()), Some(kind));
        }
        assert_eq!(StoredType::from_name("int3"), None);
    }

    /// Every kind of damage is an error with the tensor's name and both numbers.
    #[test]
    fn damaged_tensors_are_refused() {
        let (rows, cols) = (16, 256);
        let numbers = numbers(rows * cols);
        let message = |kind: StoredType, change: &dyn Fn(&mut Description, &mut Vec<Vec<u8>>)| {
            let (mut description, mut bytes) = stored(kind, rows, cols, &numbers);
            change(&mut description, &mut bytes);
            decode(&description, &bytes).unwrap_err().to_string()
        };
        let shape = |part: usize, shape: &'static [u64]| {
            move |description: &mut Description, bytes: &mut Vec<Vec<u8>>| {
                let old: u64 = description.tensors[part].shape.iter().product();
                let each = bytes[part].len() / old.max(1) as usize;
                description.tensors[part].shape = shape.to_vec();
                bytes[part] = vec![0; shape.iter().product::<u64>() as usize * each];
            }
        };
        let found = |text: String, parts: &[&str]| parts.iter().for_each(|part| assert!(text.contains(part), "{text}"));
        found(message(StoredType::Gptq4, &shape(1, &[3, 2])), &["qzeros", "[3, 2]", "[2, 2]"]);
        found(message(StoredType::Gptq4, &shape(2, &[2, 15])), &["scales", "[2, 15]", "[2, 16]"]);
        found(message(StoredType::Awq, &shape(2, &[1, 16])), &["scales", "[1, 16]", "[2, 16]"]);
        found(message(StoredType::Fp8Block, &shape(1, &[2, 2])), &["weight_scale_inv", "[2, 2]", "[1, 2]"]);
        found(message(StoredType::Int4, &shape(0, &[16, 31])), &["weight_packed", "[16, 31]", "[16, 32]"]);
        found(message(StoredType::Nvfp4, &shape(1, &[16, 15])), &["weight_scale", "[16, 15]", "[16, 16]"]);
        found(message(StoredType::Nf4, &shape(1, &[65])), &["weight.absmax", "[65]", "[64]"]);
        found(message(StoredType::Nf4, &shape(0, &[2047, 1])), &["weight", "[2047, 1]", "[2048]"]);
        found(message(StoredType::BitsAndBytes8, &shape(1, &[15])), &["SCB", "[15]", "[16, 1]"]);
        let columns = |description: &mut Description, _: &mut Vec<Vec<u8>>| {
            let nested = None;
            description.storage = Storage::Table { table: TableType::Nf4, block: 64, shape: [512, 8], nested };
        };
        found(message(StoredType::Nf4, &columns), &["weight", "8 columns", "blocks of 64", "multiple of 16"]);
        let nan = |part: usize, at: usize, bits: &'static [u8]| {
            move |_: &mut Description, bytes: &mut Vec<Vec<u8>>| bytes[part][at..at + bits.len()].copy_from_slice(bits)
        };
        found(message(StoredType::Gptq4, &nan(2, 10, &[0, 0x7e])), &["scales", "NaN", "row 5, group 0"]);
        found(message(StoredType::Awq, &nan(2, 32, &[0, 0x7c])), &["scales", "inf", "row 0, group 1"]);
        found(message(StoredType::Fp8, &nan(1, 0, &[0, 0, 0x80, 0x7f])), &["weight_scale", "inf"]);
        found(message(StoredType::Fp8, &nan(0, 300, &[0x7f])), &["weight", "0x7f", "row 1, column 44"]);
        found(message(StoredType::Mxfp4, &nan(1, 9, &[0xff])), &["weight_scale", "NaN", "row 1"]);
        found(message(StoredType::Nf4, &nan(1, 20, &[0, 0, 0x80, 0x7f])), &["weight.absmax", "inf", "row 1, group 1"]);
        found(message(StoredType::Nvfp4, &nan(2, 0, &[0, 0, 0, 0])), &["weight_global_scale", "scale 0"]);
        found(message(StoredType::Gptq4, &nan(1, 0, &[0])), &["qzeros", "zero 1", "expected 8"]);
        found(message(StoredType::Gptq4, &nan(3, 4, &[9])), &["g_idx", "column 1", "group 9 of 2"]);
        let short = |_: &mut Description, bytes: &mut Vec<Vec<u8>>| bytes[0].truncate(100);
        found(message(StoredType::Int8, &short), &["weight", "100 bytes", "4096"]);
        let alone = |description: &mut Description, _: &mut Vec<Vec<u8>>| description.tensors.truncate(1);
        found(message(StoredType::Fp8, &alone), &["weight", "Scale"]);
    }
}

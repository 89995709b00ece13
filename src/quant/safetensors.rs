//! The quantised weights of safetensors checkpoints: FP8, GPTQ, AWQ, compressed-tensors, MXFP4, NVFP4 and bitsandbytes.
//! Each format is a description of its tensors; opening it checks their shapes and gives a [`CodeMatrix`], whose rows are
//! decoded into canonical codes, scales and minimums. Not here: reading configurations and files, and which tensor is what.

use super::number::{self, Number};
use super::table::TableType;
use super::wide::wide;
use super::{Codes, Minimum, largest};
use std::fmt;
use std::ops::Range;

// ---- Input ----

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float with 4 bits of exponent (`F8_E4M3`).
    E4m3,
    /// 8-bit float with 5 bits of exponent (`F8_E5M2`).
    E5m2,
    /// A power of two (`F8_E8M0`).
    E8m0,
    /// Signed byte.
    I8,
    /// Byte. As a scale, it is a power of two like [`TensorDtype::E8m0`].
    U8,
    /// Signed 32-bit integer.
    I32,
}

impl TensorDtype {
    /// Every type with its name in a header.
    const NAMES: [(TensorDtype, &'static str); 9] = [
        (TensorDtype::F32, "F32"),
        (TensorDtype::F16, "F16"),
        (TensorDtype::Bf16, "BF16"),
        (TensorDtype::E4m3, "F8_E4M3"),
        (TensorDtype::E5m2, "F8_E5M2"),
        (TensorDtype::E8m0, "F8_E8M0"),
        (TensorDtype::I8, "I8"),
        (TensorDtype::U8, "U8"),
        (TensorDtype::I32, "I32"),
    ];

    /// Returns the type that a header calls `name`.
    pub fn from_name(name: &str) -> Option<TensorDtype> {
        TensorDtype::NAMES.into_iter().find(|(_, known)| *known == name).map(|(dtype, _)| dtype)
    }

    /// The type's name in a header.
    pub fn name(self) -> &'static str {
        TensorDtype::NAMES.into_iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    /// The size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            TensorDtype::F32 | TensorDtype::I32 => 4,
            TensorDtype::F16 | TensorDtype::Bf16 => 2,
            TensorDtype::E4m3 | TensorDtype::E5m2 | TensorDtype::E8m0 | TensorDtype::I8 | TensorDtype::U8 => 1,
        }
    }
}

/// A tensor of a safetensors file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The tensor's name, for errors.
    pub name: &'a str,
    /// The element type.
    pub dtype: TensorDtype,
    /// The size of each dimension, outermost first.
    pub shape: &'a [u64],
    /// The elements, little endian, with any alignment; `None` where only the header is checked.
    pub bytes: Option<&'a [u8]>,
}

impl<'a> Tensor<'a> {
    /// Checks the element type and that the bytes are as many as the shape requires.
    fn check(&self, allowed: &[TensorDtype]) -> Result<(), WeightError> {
        if !allowed.contains(&self.dtype) {
            let expected = allowed.iter().map(|d| format!("{d:?}")).collect::<Vec<_>>().join(" or ");
            return Err(WeightError::TensorDtype { tensor: self.name.into(), found: self.dtype, expected });
        }
        let elements = self.shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
        let expected = elements.and_then(|n| n.checked_mul(self.dtype.bytes() as u64)).unwrap_or(u64::MAX);
        match self.bytes {
            Some(bytes) if bytes.len() as u64 != expected => {
                Err(WeightError::Bytes { tensor: self.name.into(), found: bytes.len() as u64, expected })
            }
            _ => Ok(()),
        }
    }

    /// The elements' bytes; none if only the header is known.
    #[inline(always)]
    fn data(&self) -> &'a [u8] {
        self.bytes.unwrap_or_default()
    }

    /// Checks element type and shape; a dimension of 1 may be missing at the end.
    fn expect(&self, allowed: &[TensorDtype], shape: &[u64]) -> Result<(), WeightError> {
        let trimmed = |shape: &[u64]| shape.iter().rposition(|n| *n != 1).map_or(0, |last| last + 1);
        if self.shape[..trimmed(self.shape)] != shape[..trimmed(shape)] {
            return Err(self.shape_error(shape));
        }
        self.check(allowed)
    }

    fn shape_error(&self, expected: &[u64]) -> WeightError {
        WeightError::Shape { tensor: self.name.into(), found: self.shape.into(), expected: expected.into() }
    }

    /// The two dimensions of a matrix.
    fn two_dimensions(&self) -> Result<(u32, u32), WeightError> {
        match self.shape {
            [a, b] => Ok((self.dimension(*a)?, self.dimension(*b)?)),
            _ => Err(WeightError::Dimensions { tensor: self.name.into(), found: self.shape.len(), expected: 2 }),
        }
    }

    /// A dimension of at most 2^31 - 1.
    fn dimension(&self, size: u64) -> Result<u32, WeightError> {
        match u32::try_from(size) {
            Ok(size) if size <= i32::MAX as u32 => Ok(size),
            _ => Err(WeightError::Size { tensor: self.name.into(), found: size, most: i32::MAX as u64 }),
        }
    }

    /// Element `index` as a number; only for floating-point types and powers of two.
    #[inline(always)]
    fn number(&self, index: usize) -> f32 {
        match self.dtype {
            TensorDtype::F32 => f32::from_le_bytes(self.array(4 * index)),
            TensorDtype::F16 => number::f16(u16::from_le_bytes(self.array(2 * index))),
            TensorDtype::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes(self.array(2 * index))) << 16),
            TensorDtype::E4m3 => number::e4m3(self.data()[index]),
            TensorDtype::E5m2 => number::e5m2(self.data()[index]),
            TensorDtype::E8m0 | TensorDtype::U8 => number::e8m0(self.data()[index]),
            TensorDtype::I8 => f32::from(self.data()[index] as i8),
            TensorDtype::I32 => i32::from_le_bytes(self.array(4 * index)) as f32,
        }
    }

    /// Elements from `index` on, as [`Tensor::number`] gives them.
    #[inline(always)]
    fn numbers(&self, index: usize, out: &mut [f32]) {
        match self.dtype {
            TensorDtype::F16 => {
                for (x, bytes) in out.iter_mut().zip(self.data()[2 * index..].as_chunks::<2>().0) {
                    *x = number::f16(u16::from_le_bytes(*bytes));
                }
            }
            _ => out.iter_mut().enumerate().for_each(|(i, x)| *x = self.number(index + i)),
        }
    }

    /// Element `index` of a tensor of 32-bit integers.
    #[inline(always)]
    fn word(&self, index: usize) -> u32 {
        u32::from_le_bytes(self.array(4 * index))
    }

    #[inline(always)]
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        *self.data()[at..].first_chunk().expect("an element of the tensor")
    }
}

/// The granularity of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleShape {
    /// One scale: shape `[]`, `[1]` or `[1, 1]`.
    Tensor,
    /// One scale a row: shape `[rows]` or `[rows, 1]`.
    Row,
    /// One scale for this many columns of a row: shape `[rows, ⌈cols / n⌉]`.
    Group(u32),
    /// One scale for a block: shape `[⌈rows / rows of a block⌉, ⌈cols / columns of a block⌉]`.
    Block {
        /// The rows of a block.
        rows: u32,
        /// The columns of a block.
        cols: u32,
    },
}

/// Floating-point types of a scale.
const SCALES: &[TensorDtype] =
    &[TensorDtype::F32, TensorDtype::F16, TensorDtype::Bf16, TensorDtype::E8m0, TensorDtype::U8];

// ---- Formats ----

/// FP8: `quant_method` fp8, compressed-tensors `float-quantized` and `mxfp8`. Value = weight × scale, also where the
/// tensor is called `weight_scale_inv`.
#[derive(Clone, Copy, Debug)]
pub struct Fp8<'a> {
    /// e4m3 or e5m2, shape `[rows, cols]`.
    pub weight: Tensor<'a>,
    /// The scales.
    pub scale: Tensor<'a>,
    /// The scales' shape.
    pub scale_shape: ScaleShape,
}

/// Two versions of GPTQ's zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GptqVersion {
    /// The zero is the stored number plus 1: `checkpoint_format` gptq, or absent. For 2, 4 and 8 bits, 1 was taken from each of a
    /// 32-bit word's numbers in one subtraction, so that a zero of 0 has borrowed from the number above it; for 3 bits, from each
    /// by itself, as GPTQModel's present versions do.
    V1,
    /// The zero is the stored number: `checkpoint_format` gptq_v2.
    V2,
}

/// GPTQ: codes packed along the columns. Value = (code − zero) × scale of the column's group.
#[derive(Clone, Copy, Debug)]
pub struct Gptq<'a> {
    /// i32, shape `[cols × bits / 32, rows]`.
    pub qweight: Tensor<'a>,
    /// i32, shape `[groups, rows × bits / 32]`.
    pub qzeros: Tensor<'a>,
    /// Shape `[groups, rows]`.
    pub scales: Tensor<'a>,
    /// i32, shape `[cols]`: the group of each column; absent if that is column / group size.
    pub g_idx: Option<Tensor<'a>>,
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// The columns of a group; `None` (−1 in the configuration) for a whole row.
    pub group: Option<u32>,
    /// Whether every zero is 2 to the power of `bits` − 1; a zero that is not is an error.
    pub symmetric: bool,
    /// The version of the zeros.
    pub version: GptqVersion,
}

/// AWQ, version gemm, 4 bits: codes packed along the rows. Value = (code − zero) × scale.
#[derive(Clone, Copy, Debug)]
pub struct Awq<'a> {
    /// i32, shape `[cols, rows / 8]`.
    pub qweight: Tensor<'a>,
    /// i32, shape `[groups, rows / 8]`; absent where every zero is 8.
    pub qzeros: Option<Tensor<'a>>,
    /// Shape `[groups, rows]`.
    pub scales: Tensor<'a>,
    /// The columns of a group; `None` (−1 in the configuration) for a whole row.
    pub group: Option<u32>,
}

/// compressed-tensors `pack-quantized`: integers in 32-bit words along the columns. Value = (code − zero) × scale.
///
/// Words are read as dense if the width is ⌈cols × bits / 32⌉, and as words of ⌊32 / bits⌋ codes if it is what that
/// requires (before version 0.17). Small matrices in which both widths are the same are read as dense.
#[derive(Clone, Copy, Debug)]
pub struct PackedInts<'a> {
    /// i32, shape `[rows, words]`.
    pub packed: Tensor<'a>,
    /// The scales; not by blocks.
    pub scale: Tensor<'a>,
    /// The scales' shape.
    pub scale_shape: ScaleShape,
    /// i32, shape `[words for the rows, groups]`, packed along the rows; absent if symmetric.
    pub zero_point: Option<Tensor<'a>>,
    /// i32, shape `[cols]`: the group of each column; absent if that is column / group size.
    pub g_idx: Option<Tensor<'a>>,
    /// The rows and columns (the tensor `weight_shape`).
    pub shape: [u64; 2],
    /// 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
}

/// 8-bit integers, a byte each: compressed-tensors `int-quantized` and bitsandbytes. Value = (weight − zero) × scale.
#[derive(Clone, Copy, Debug)]
pub struct Int8<'a> {
    /// i8, shape `[rows, cols]`.
    pub weight: Tensor<'a>,
    /// The scales; not by blocks.
    pub scale: Tensor<'a>,
    /// The scales' shape.
    pub scale_shape: ScaleShape,
    /// i8, of the scales' shape; absent if symmetric.
    pub zero_point: Option<Tensor<'a>>,
    /// Whether the scales' tensor has largest absolute values, 127 scales each (bitsandbytes' `SCB`).
    pub largest: bool,
}

/// bitsandbytes, 4 bits: blocks of all elements one after the other, which may begin inside of a row. Value = number ×
/// largest absolute value of the element's block.
#[derive(Clone, Copy, Debug)]
pub struct TableCodes<'a> {
    /// u8, shape `[rows × cols / 2, 1]`: the even column is in the high nibble.
    pub packed: Tensor<'a>,
    /// The largest absolute values, shape `[⌈rows × cols / block⌉]`: f32, or u8 where they are quantised themselves.
    pub largest: Tensor<'a>,
    /// How quantised largest values are read.
    pub nested: Option<Nested<'a>>,
    /// The numbers.
    pub table: TableType,
    /// The elements of a block.
    pub block: u32,
    /// The rows and columns.
    pub shape: [u64; 2],
}

/// Scales that are quantised themselves. Scale = number of the byte × largest absolute value of its block + offset.
#[derive(Clone, Copy, Debug)]
pub struct Nested<'a> {
    /// f32, shape `[256]`: the numbers.
    pub numbers: Tensor<'a>,
    /// f32, shape `[⌈scales / block⌉]`.
    pub largest: Tensor<'a>,
    /// The scales of a block.
    pub block: u32,
    /// What is added.
    pub offset: f32,
}

/// NVFP4: compressed-tensors `nvfp4-pack-quantized` and ModelOpt. Value = e2m1 × scale ÷ or × the tensor's scale.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4<'a> {
    /// u8, shape `[rows, cols / 2]`: the even column is in the low nibble.
    pub packed: Tensor<'a>,
    /// e4m3, shape `[rows, cols / 16]`.
    pub scale: Tensor<'a>,
    /// f32, one element.
    pub global: Tensor<'a>,
    /// Whether `global` divides (compressed-tensors' `weight_global_scale`) or multiplies (ModelOpt's
    /// `weight_scale_2`).
    pub global_divides: bool,
}

/// MXFP4: compressed-tensors `mxfp4-pack-quantized`, and gpt-oss, whose tensors have dimensions of experts in front and
/// the columns in blocks of 16 bytes. Value = e2m1 × 2^(scale − 127).
#[derive(Clone, Copy, Debug)]
pub struct Mxfp4<'a> {
    /// u8, shape `[…, cols / 2]` or `[…, cols / 32, 16]`: the even column is in the low nibble.
    pub packed: Tensor<'a>,
    /// u8 or e8m0, shape `[…, cols / 32]`.
    pub scale: Tensor<'a>,
}

/// The columns of a source group that is a whole row.
const WHOLE_ROW: u32 = u32::MAX;

/// The largest canonical group that divides a source's group.
fn canonical_group(tensor: &Tensor<'_>, group: Option<u32>) -> Result<u32, WeightError> {
    let Some(group) = group else { return Ok(128) };
    let fits = |n: &u32| group != 0 && group.is_multiple_of(*n);
    [128, 64, 32, 16].into_iter().find(fits).ok_or(WeightError::Group { tensor: tensor.name.into(), group, least: 16 })
}

impl<'a> Fp8<'a> {
    /// Checks the tensors and gives their matrix.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let (rows, cols) = self.weight.two_dimensions()?;
        self.weight.check(&[TensorDtype::E4m3, TensorDtype::E5m2])?;
        let number = if self.weight.dtype == TensorDtype::E4m3 { Number::E4m3 } else { Number::E5m2 };
        let (scales, group) = Scales::open(self.scale, self.scale_shape, rows, cols)?;
        Ok(CodeMatrix {
            rows,
            cols,
            codes: Codes { bits: 8, group, number, minimum: Minimum::Zero { halves: 0 } },
            weight: self.weight,
            packing: Packing::Bytes { flip: 0 },
            scales,
            zeros: Zeros::Constant,
            order: None,
        })
    }
}

impl<'a> Gptq<'a> {
    /// Checks the tensors and gives their matrix.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let Gptq { qweight, qzeros, scales, bits, .. } = self;
        check_bits(&qweight, bits, &[2, 3, 4, 8])?;
        let (words, rows) = qweight.two_dimensions()?;
        let cols = qweight.dimension(u64::from(words) * 32 / u64::from(bits))?;
        if bits == 3 && !words.is_multiple_of(3) {
            return Err(qweight.shape_error(&[u64::from(words.next_multiple_of(3)), u64::from(rows)]));
        }
        qweight.check(&[TensorDtype::I32])?;
        let group = canonical_group(&qweight, self.group)?;
        let source_group = self.group.unwrap_or(WHOLE_ROW);
        let groups = cols.div_ceil(source_group);
        qzeros.expect(&[TensorDtype::I32], &[u64::from(groups), (u64::from(rows) * u64::from(bits)).div_ceil(32)])?;
        scales.expect(SCALES, &[u64::from(groups), u64::from(rows)])?;
        Ok(CodeMatrix {
            rows,
            cols,
            codes: affine(bits, group, self.symmetric),
            weight: qweight,
            packing: Packing::Down,
            scales: Scales::transposed(scales, rows, source_group),
            zeros: Zeros::Gptq {
                tensor: qzeros,
                plus: u32::from(self.version == GptqVersion::V1),
                only: self.symmetric.then_some(1 << (bits - 1)),
            },
            order: order(self.g_idx, cols, source_group)?,
        })
    }
}

impl<'a> Awq<'a> {
    /// Checks the tensors and gives their matrix.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let Awq { qweight, qzeros, scales, .. } = self;
        let (cols, words) = qweight.two_dimensions()?;
        let rows = qweight.dimension(u64::from(words) * 8)?;
        qweight.check(&[TensorDtype::I32])?;
        let group = canonical_group(&qweight, self.group)?;
        let source_group = self.group.unwrap_or(WHOLE_ROW);
        let groups = cols.div_ceil(source_group);
        if let Some(qzeros) = qzeros {
            qzeros.expect(&[TensorDtype::I32], &[u64::from(groups), u64::from(words)])?;
        }
        scales.expect(SCALES, &[u64::from(groups), u64::from(rows)])?;
        Ok(CodeMatrix {
            rows,
            cols,
            codes: affine(4, group, qzeros.is_none()),
            weight: qweight,
            packing: Packing::Awq,
            scales: Scales::transposed(scales, rows, source_group),
            zeros: qzeros.map_or(Zeros::Constant, |tensor| Zeros::Awq { tensor }),
            order: None,
        })
    }
}

impl<'a> PackedInts<'a> {
    /// Checks the tensors and gives their matrix.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let PackedInts { packed, bits, .. } = self;
        check_bits(&packed, bits, &[2, 3, 4, 5, 6, 8])?;
        let (rows, cols) = (packed.dimension(self.shape[0])?, packed.dimension(self.shape[1])?);
        let (found_rows, words) = packed.two_dimensions()?;
        let dense = (u64::from(cols) * u64::from(bits)).div_ceil(32);
        let is_dense = is_dense(&packed, cols, words, bits, true, &[u64::from(rows), dense])?;
        if found_rows != rows {
            return Err(packed.shape_error(&[u64::from(rows), dense]));
        }
        packed.check(&[TensorDtype::I32])?;
        let (scales, group) = Scales::open(self.scale, self.scale_shape, rows, cols)?;
        let zeros = match self.zero_point {
            None => Zeros::Constant,
            Some(tensor) => {
                let expected = [(u64::from(rows) * u64::from(bits)).div_ceil(32), scales.groups as u64];
                let words = tensor.dimension(tensor.shape.first().copied().unwrap_or(1))?;
                let is_dense = self::is_dense(&tensor, rows, words, bits, is_dense, &expected)?;
                tensor.expect(&[TensorDtype::I32], &[u64::from(words), expected[1]])?;
                Zeros::Down { tensor, dense: is_dense }
            }
        };
        let order = order(self.g_idx, cols, scales.group)?;
        Ok(CodeMatrix {
            rows,
            cols,
            codes: affine(bits, group, self.zero_point.is_none()),
            weight: packed,
            packing: Packing::Along { words: words as usize, dense: is_dense },
            scales,
            zeros,
            order,
        })
    }
}

impl<'a> Int8<'a> {
    /// Checks the tensors and gives their matrix.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let (rows, cols) = self.weight.two_dimensions()?;
        self.weight.check(&[TensorDtype::I8])?;
        let (mut scales, group) = Scales::open(self.scale, self.scale_shape, rows, cols)?;
        if self.largest {
            (scales.factor, scales.divides) = (127.0, true);
        }
        if let Some(zero_point) = self.zero_point {
            zero_point.expect(&[TensorDtype::I8], self.scale.shape)?;
        }
        Ok(CodeMatrix {
            rows,
            cols,
            codes: affine(8, group, self.zero_point.is_none()),
            weight: self.weight,
            packing: Packing::Bytes { flip: 0x80 },
            scales,
            zeros: self.zero_point.map_or(Zeros::Constant, |tensor| Zeros::Bytes { tensor }),
            order: None,
        })
    }
}

impl<'a> TableCodes<'a> {
    /// Checks the tensors and gives their matrix.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let TableCodes { packed, largest, table, block, .. } = self;
        let (rows, cols) = (packed.dimension(self.shape[0])?, packed.dimension(self.shape[1])?);
        let elements = u64::from(rows) * u64::from(cols);
        packed.expect(&[TensorDtype::U8], &[elements.div_ceil(2)])?;
        // Groups that neither a block nor a row ends within.
        let whole = canonical_group(&packed, Some(block))?;
        let fits = |n: &u32| *n <= whole && cols.is_multiple_of(*n);
        let Some(group) = [128, 64, 32, 16].into_iter().find(fits) else {
            return Err(WeightError::Columns { tensor: packed.name.into(), cols, block, least: 16 });
        };
        let blocks = elements.div_ceil(u64::from(block));
        let dtype = if self.nested.is_some() { TensorDtype::U8 } else { TensorDtype::F32 };
        largest.expect(&[dtype], &[blocks])?;
        if let Some(Nested { numbers, largest, block, .. }) = self.nested {
            numbers.expect(&[TensorDtype::F32], &[256])?;
            if block == 0 {
                return Err(WeightError::Group { tensor: largest.name.into(), group: 0, least: 1 });
            }
            largest.expect(&[TensorDtype::F32], &[blocks.div_ceil(u64::from(block))])?;
        }
        let scales = match cols.is_multiple_of(block) {
            true => Scales::grouped(largest, cols, block),
            false => {
                let rows = Scales::grouped(largest, cols, group);
                Scales { row_stride: cols as usize, group_stride: group as usize, each: block as usize, ..rows }
            }
        };
        let (number, halves) = table.meaning();
        Ok(CodeMatrix {
            rows,
            cols,
            codes: Codes { bits: 8, group, number, minimum: Minimum::Zero { halves } },
            weight: packed,
            packing: Packing::Table { codes: table.codes() },
            scales: Scales { factor: table.parts(), divides: true, nested: self.nested, ..scales },
            zeros: Zeros::Constant,
            order: None,
        })
    }
}

impl<'a> Nvfp4<'a> {
    /// Checks the tensors and gives their matrix.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let (rows, half) = self.packed.two_dimensions()?;
        let cols = self.packed.dimension(u64::from(half) * 2)?;
        self.packed.check(&[TensorDtype::U8])?;
        self.scale.expect(&[TensorDtype::E4m3], &[u64::from(rows), u64::from(cols.div_ceil(16))])?;
        self.global.expect(&[TensorDtype::F32], &[1])?;
        let global = if self.global.bytes.is_some() { self.global.number(0) } else { 1.0 };
        if !global.is_finite() || global == 0.0 {
            return Err(WeightError::Scale { tensor: self.global.name.into(), row: 0, group: 0, scale: global });
        }
        let mut scales = Scales::grouped(self.scale, cols, 16);
        (scales.factor, scales.divides) = (global, self.global_divides);
        Ok(CodeMatrix {
            rows,
            cols,
            codes: Codes { bits: 4, group: 16, number: Number::E2m1, minimum: Minimum::Zero { halves: 0 } },
            weight: self.packed,
            packing: Packing::Nibbles,
            scales,
            zeros: Zeros::Constant,
            order: None,
        })
    }
}

impl<'a> Mxfp4<'a> {
    /// Checks the tensors and gives their matrix, in which the rows of all dimensions in front follow each other.
    pub fn open(self) -> Result<CodeMatrix<'a>, WeightError> {
        let Mxfp4 { packed, scale } = self;
        packed.check(&[TensorDtype::U8])?;
        scale.check(&[TensorDtype::U8, TensorDtype::E8m0])?;
        let Some((blocks, front)) = scale.shape.split_last() else {
            return Err(WeightError::Dimensions { tensor: scale.name.into(), found: 0, expected: 2 });
        };
        let cols = scale.dimension(blocks.saturating_mul(32))?;
        let rows = scale.dimension(front.iter().fold(1, |rows: u64, n| rows.saturating_mul(*n)))?;
        let in_blocks = [front, &[*blocks, 16]].concat();
        let in_rows = [front, &[*blocks * 16]].concat();
        if packed.shape != in_blocks && packed.shape != in_rows {
            return Err(packed.shape_error(if packed.shape.len() == in_blocks.len() { &in_blocks } else { &in_rows }));
        }
        Ok(CodeMatrix {
            rows,
            cols,
            codes: Codes { bits: 4, group: 32, number: Number::E2m1, minimum: Minimum::Zero { halves: 0 } },
            weight: packed,
            packing: Packing::Nibbles,
            scales: Scales::grouped(scale, cols, 32),
            zeros: Zeros::Constant,
            order: None,
        })
    }
}

/// The codes of integers.
fn affine(bits: u32, group: u32, symmetric: bool) -> Codes {
    let minimum = if symmetric { Minimum::Zero { halves: 1 << bits } } else { Minimum::Stored };
    Codes { bits, group, number: Number::Affine, minimum }
}

fn check_bits(tensor: &Tensor<'_>, bits: u32, allowed: &'static [u32]) -> Result<(), WeightError> {
    if allowed.contains(&bits) {
        return Ok(());
    }
    Err(WeightError::Bits { tensor: tensor.name.into(), bits, allowed })
}

/// Whether `numbers` codes in `words` words are dense; an error if they are neither dense nor words of whole codes.
/// `usual` is the answer where both have the same number of words, as only small matrices do.
fn is_dense(
    tensor: &Tensor<'_>,
    numbers: u32,
    words: u32,
    bits: u32,
    usual: bool,
    expected: &[u64],
) -> Result<bool, WeightError> {
    let dense = u64::from(words) == (u64::from(numbers) * u64::from(bits)).div_ceil(32);
    let whole = words == numbers.div_ceil(32 / bits);
    match (dense, whole) {
        (true, true) => Ok(usual),
        (false, false) => Err(tensor.shape_error(expected)),
        _ => Ok(dense),
    }
}

/// The order of the columns by group, if it is not their own: position j of a canonical row is column `order[j]`.
fn order(g_idx: Option<Tensor<'_>>, cols: u32, group: u32) -> Result<Option<Vec<u32>>, WeightError> {
    let Some(g_idx) = g_idx else { return Ok(None) };
    g_idx.expect(&[TensorDtype::I32], &[u64::from(cols)])?;
    if g_idx.bytes.is_none() {
        return Ok(None);
    }
    let groups = cols.div_ceil(group);
    let group_of = |col: u32| g_idx.word(col as usize);
    // compressed-tensors writes -1 where groups are of adjacent columns.
    let adjacent = (0..cols).all(|col| group_of(col) == col / group);
    if adjacent || (0..cols).all(|col| group_of(col) == u32::MAX) {
        return Ok(None);
    }
    // Where each group's next column goes.
    let mut next: Vec<u32> = (0..groups).map(|g| g * group).collect();
    let mut order = vec![0; cols as usize];
    for col in 0..cols {
        let found = group_of(col);
        let tensor = g_idx.name;
        let Some(place) = next.get_mut(found as usize) else {
            return Err(WeightError::GroupIndex { tensor: tensor.into(), col, found: found as i32, groups });
        };
        if *place == cols.min((found + 1) * group) {
            return Err(WeightError::GroupColumns {
                tensor: tensor.into(),
                group: found,
                most: *place - found * group,
            });
        }
        order[*place as usize] = col;
        *place += 1;
    }
    Ok(Some(order))
}

// ---- Descriptions ----

/// The role of a tensor in a quantised weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorRole {
    /// The codes.
    Codes,
    /// The scales of groups.
    Scale,
    /// The zeros of groups.
    Zero,
    /// The group of each column (`g_idx`).
    GroupIndex,
    /// A scale of the whole tensor.
    Global,
    /// The numbers that scales of one byte stand for.
    ScaleNumbers,
    /// The scales of scales.
    ScaleOfScales,
}

/// How a weight is stored in several tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// [`Fp8`].
    Fp8 {
        /// The scales' shape.
        scale_shape: ScaleShape,
    },
    /// [`Gptq`].
    Gptq {
        /// The number of bits.
        bits: u32,
        /// The columns of a group; `None` for a whole row.
        group: Option<u32>,
        /// Whether every zero is the middle code.
        symmetric: bool,
        /// The version of the zeros.
        version: GptqVersion,
    },
    /// [`Awq`].
    Awq {
        /// The columns of a group; `None` for a whole row.
        group: Option<u32>,
    },
    /// [`PackedInts`].
    PackedInts {
        /// The number of bits.
        bits: u32,
        /// The scales' shape.
        scale_shape: ScaleShape,
        /// The rows and columns.
        shape: [u64; 2],
    },
    /// [`Int8`].
    Int8 {
        /// The scales' shape.
        scale_shape: ScaleShape,
        /// Whether the scales' tensor has largest absolute values.
        largest: bool,
    },
    /// [`TableCodes`].
    Table {
        /// The numbers.
        table: TableType,
        /// The elements of a block.
        block: u32,
        /// The rows and columns.
        shape: [u64; 2],
        /// Scales that are quantised themselves.
        nested: Option<NestedStorage>,
    },
    /// [`Nvfp4`].
    Nvfp4 {
        /// Whether the tensor's scale divides instead of multiplying.
        global_divides: bool,
    },
    /// [`Mxfp4`].
    Mxfp4,
}

/// The numbers of [`Nested`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedStorage {
    /// The scales of a block.
    pub block: u32,
    /// The bits of what is added, in f32.
    pub offset_bits: u32,
}

/// Writes the format's name in checkpoints, such as `GPTQ of 4 bits` or `bitsandbytes nf4`.
impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Storage::Fp8 { .. } => f.write_str("FP8"),
            Storage::Gptq { bits, .. } => write!(f, "GPTQ of {bits} bits"),
            Storage::Awq { .. } => f.write_str("AWQ"),
            Storage::PackedInts { bits, .. } => write!(f, "packed integers of {bits} bits"),
            Storage::Int8 { largest: false, .. } => f.write_str("integers of 8 bits"),
            Storage::Int8 { largest: true, .. } => f.write_str("bitsandbytes int8"),
            Storage::Table { table, nested: None, .. } => write!(f, "bitsandbytes {}", table.name()),
            Storage::Table { table, .. } => write!(f, "bitsandbytes {} with quantised scales", table.name()),
            Storage::Nvfp4 { .. } => f.write_str("NVFP4"),
            Storage::Mxfp4 => f.write_str("MXFP4"),
        }
    }
}

/// A tensor's header.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorHead {
    /// The role of the tensor.
    pub role: TensorRole,
    /// The tensor's name, for errors.
    pub name: String,
    /// The element type.
    pub dtype: TensorDtype,
    /// The size of each dimension, outermost first.
    pub shape: Vec<u64>,
}

/// A quantised weight without its data: how it is stored, and the headers of its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// How the weight is stored.
    pub storage: Storage,
    /// The tensors, each role at most once; the codes are first.
    pub tensors: Vec<TensorHead>,
}

impl Description {
    /// Checks the headers. Returns a matrix with its size and format, which must not be decoded.
    pub fn check(&self) -> Result<CodeMatrix<'_>, WeightError> {
        self.matrix(|_| None)
    }

    /// The index of the tensor with the groups of the columns, if there is one.
    pub fn group_index(&self) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.role == TensorRole::GroupIndex)
    }

    /// Returns the order in which the columns are decoded, as [`CodeMatrix::order`] does, given the bytes of the tensor
    /// with the columns' groups.
    pub fn order(&self, bytes: &[u8]) -> Result<Option<Vec<u32>>, WeightError> {
        let Some(index) = self.group_index() else { return Ok(None) };
        let matrix = self.check()?;
        let TensorHead { name, dtype, shape, .. } = &self.tensors[index];
        let g_idx = Tensor { name, dtype: *dtype, shape, bytes: Some(bytes) };
        order(Some(g_idx), matrix.cols, matrix.scales.group)
    }

    /// Gives the matrix of the tensors with these bytes, in the order of [`Description::tensors`].
    ///
    /// # Panics
    /// If there are fewer bytes than tensors.
    pub fn open<'a>(&'a self, bytes: &[&'a [u8]]) -> Result<CodeMatrix<'a>, WeightError> {
        self.matrix(|index| Some(bytes[index]))
    }

    fn matrix<'a>(&'a self, bytes: impl Fn(usize) -> Option<&'a [u8]>) -> Result<CodeMatrix<'a>, WeightError> {
        let find = |role: TensorRole| {
            let at = self.tensors.iter().position(|tensor| tensor.role == role)?;
            let TensorHead { name, dtype, shape, .. } = &self.tensors[at];
            Some(Tensor { name, dtype: *dtype, shape, bytes: bytes(at) })
        };
        let need = |role: TensorRole| {
            find(role).ok_or_else(|| {
                let tensor = self.tensors.first().map_or_else(String::new, |tensor| tensor.name.clone());
                WeightError::Missing { tensor, role }
            })
        };
        let weight = need(TensorRole::Codes)?;
        let mut matrix = match self.storage {
            Storage::Fp8 { scale_shape } => Fp8 { weight, scale: need(TensorRole::Scale)?, scale_shape }.open(),
            Storage::Gptq { bits, group, symmetric, version } => Gptq {
                qweight: weight,
                qzeros: need(TensorRole::Zero)?,
                scales: need(TensorRole::Scale)?,
                g_idx: find(TensorRole::GroupIndex),
                bits,
                group,
                symmetric,
                version,
            }
            .open(),
            Storage::Awq { group } => {
                Awq { qweight: weight, qzeros: find(TensorRole::Zero), scales: need(TensorRole::Scale)?, group }.open()
            }
            Storage::PackedInts { bits, scale_shape, shape } => PackedInts {
                packed: weight,
                scale: need(TensorRole::Scale)?,
                scale_shape,
                zero_point: find(TensorRole::Zero),
                g_idx: find(TensorRole::GroupIndex),
                shape,
                bits,
            }
            .open(),
            Storage::Int8 { scale_shape, largest } => {
                let (scale, zero_point) = (need(TensorRole::Scale)?, find(TensorRole::Zero));
                Int8 { weight, scale, scale_shape, zero_point, largest }.open()
            }
            Storage::Table { table, block, shape, nested } => {
                let nested = match nested {
                    None => None,
                    Some(NestedStorage { block, offset_bits }) => Some(Nested {
                        numbers: need(TensorRole::ScaleNumbers)?,
                        largest: need(TensorRole::ScaleOfScales)?,
                        block,
                        offset: f32::from_bits(offset_bits),
                    }),
                };
                TableCodes { packed: weight, largest: need(TensorRole::Scale)?, nested, table, block, shape }.open()
            }
            Storage::Nvfp4 { global_divides } => {
                let (scale, global) = (need(TensorRole::Scale)?, need(TensorRole::Global)?);
                Nvfp4 { packed: weight, scale, global, global_divides }.open()
            }
            Storage::Mxfp4 => Mxfp4 { packed: weight, scale: need(TensorRole::Scale)? }.open(),
        }?;
        if matrix.order.is_none() {
            matrix.order = order(find(TensorRole::GroupIndex), matrix.cols, matrix.scales.group)?;
        }
        Ok(matrix)
    }
}

// ---- Parts ----

/// Runs of a tensor's bytes: `count` runs of `bytes` bytes, each `stride` bytes after the one before; the first begins at
/// `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// The first byte.
    pub first: u64,
    /// The bytes of a run.
    pub bytes: u64,
    /// The distance between the beginnings of two runs.
    pub stride: u64,
    /// The number of runs.
    pub count: u64,
}

impl Runs {
    /// Adjacent bytes.
    fn one(first: u64, bytes: u64) -> Runs {
        Runs { first, bytes, stride: bytes, count: 1 }
    }

    /// The bytes of all runs.
    pub fn total(&self) -> u64 {
        self.bytes * self.count
    }
}

/// Some rows of a quantised weight, as a weight of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightPart {
    /// The part's description, with the tensors of the weight in the same order.
    pub description: Description,
    /// The bytes of each tensor that belong to the part.
    pub tensors: Vec<Runs>,
    /// The weight's row that is the part's row 0.
    pub first: u32,
}

/// Returns the greatest common divisor of two numbers.
fn common_divisor(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    x
}

/// Returns the least common multiple of two numbers above zero.
fn common_multiple(a: u64, b: u64) -> u64 {
    a / common_divisor(a, b) * b
}

impl Description {
    /// Returns the smallest part of the weight that has these rows and whose tensors are whole bytes and blocks of the
    /// weight's tensors.
    pub fn part(&self, rows: Range<u32>) -> Result<WeightPart, WeightError> {
        let matrix = self.check()?;
        let all = u64::from(matrix.rows);
        let mut step = common_multiple(32, matrix.scales.rows as u64);
        if let Zeros::Down { dense: false, .. } = matrix.zeros {
            step = common_multiple(step, u64::from(32 / matrix.codes.bits));
        }
        if let Storage::Table { block, nested, .. } = self.storage {
            // Blocks of scales, or of elements, end with a row.
            let block = u64::from(block) * nested.map_or(1, |nested| u64::from(nested.block));
            step = common_multiple(step, block / common_divisor(block, u64::from(matrix.cols)));
        }
        let first = u64::from(rows.start) / step * step;
        let end = u64::from(rows.end).next_multiple_of(step).min(all);
        let (mut tensors, mut heads) = (Vec::new(), Vec::new());
        for head in &self.tensors {
            let (runs, shape) = self.part_of(&matrix, head, first..end);
            tensors.push(runs);
            heads.push(TensorHead { shape, ..head.clone() });
        }
        let storage = match self.storage {
            Storage::PackedInts { bits, scale_shape, shape: [_, cols] } => {
                Storage::PackedInts { bits, scale_shape, shape: [end - first, cols] }
            }
            Storage::Table { table, block, shape: [_, cols], nested } => {
                Storage::Table { table, block, shape: [end - first, cols], nested }
            }
            other => other,
        };
        Ok(WeightPart { description: Description { storage, tensors: heads }, tensors, first: first as u32 })
    }

    /// Returns the bytes and the shape of the part of a tensor that `rows` of the weight need.
    fn part_of(&self, matrix: &CodeMatrix<'_>, head: &TensorHead, rows: Range<u64>) -> (Runs, Vec<u64>) {
        let (all, cols, bits) = (u64::from(matrix.rows), u64::from(matrix.cols), u64::from(matrix.codes.bits));
        let size = head.dtype.bytes() as u64;
        // A dimension of 1 may be missing.
        let height = head.shape.first().copied().unwrap_or(1);
        let whole = || {
            let elements: u64 = head.shape.iter().product();
            (Runs::one(0, elements * size), head.shape.clone())
        };
        // Lines of elements, each with `per` elements for a row or for several.
        let lines = |lines: u64, of: Range<u64>, width: u64| {
            let here = of.end - of.start;
            let runs = Runs { first: of.start * size, bytes: here * size, stride: width * size, count: lines };
            (runs, vec![lines, here])
        };
        let row_major = |of: Range<u64>, width: u64| {
            let here = of.end - of.start;
            (Runs::one(of.start * width * size, here * width * size), vec![here, width])
        };
        let words = |bits: u64| rows.start * bits / 32..(rows.end * bits).div_ceil(32);
        let is_transposed = matches!(self.storage, Storage::Gptq { .. } | Storage::Awq { .. });
        // One element for each `per` elements of the weight, which are whole blocks but at its end.
        let flat = |per: u64| {
            let (first, end) = (rows.start * cols / per, (rows.end * cols).div_ceil(per));
            (Runs::one(first * size, (end - first) * size), vec![end - first])
        };
        if let Storage::Table { block, nested, .. } = self.storage {
            let block = u64::from(block);
            return match head.role {
                TensorRole::Codes => flat(2),
                TensorRole::Scale => flat(block),
                TensorRole::ScaleOfScales => flat(block * nested.map_or(1, |nested| u64::from(nested.block))),
                _ => whole(),
            };
        }
        match head.role {
            TensorRole::GroupIndex | TensorRole::Global | TensorRole::ScaleNumbers | TensorRole::ScaleOfScales => {
                whole()
            }
            TensorRole::Codes => match matrix.packing {
                Packing::Bytes { .. } => row_major(rows, cols),
                Packing::Nibbles | Packing::Table { .. } => row_major(rows, cols / 2),
                Packing::Along { words, .. } => row_major(rows, words as u64),
                Packing::Down => lines(height, rows, all),
                Packing::Awq => lines(height, rows.start / 8..rows.end / 8, all / 8),
            },
            TensorRole::Scale if is_transposed => lines(height, rows, all),
            TensorRole::Zero if is_transposed => lines(height, words(bits), (all * bits).div_ceil(32)),
            TensorRole::Zero if matches!(matrix.zeros, Zeros::Down { .. }) => {
                let of = match matrix.zeros {
                    Zeros::Down { dense: false, .. } => {
                        let each = 32 / bits;
                        rows.start / each..rows.end.div_ceil(each)
                    }
                    _ => words(bits),
                };
                row_major(of, matrix.scales.groups as u64)
            }
            // Scales, and zeros of their shape.
            TensorRole::Scale | TensorRole::Zero if matrix.scales.row_stride == 0 => whole(),
            TensorRole::Scale | TensorRole::Zero => {
                let each = matrix.scales.rows as u64;
                row_major(rows.start / each..rows.end.div_ceil(each), matrix.scales.row_stride as u64)
            }
        }
    }
}

// ---- Rows ----

/// The quantised weights of one matrix; any of its rows can be decoded.
#[derive(Clone, Debug)]
pub struct CodeMatrix<'a> {
    rows: u32,
    cols: u32,
    codes: Codes,
    /// The tensor with the codes.
    weight: Tensor<'a>,
    packing: Packing,
    scales: Scales<'a>,
    zeros: Zeros<'a>,
    order: Option<Vec<u32>>,
}

/// How codes lie in the weight's tensor.
#[derive(Clone, Copy, Debug)]
enum Packing {
    /// A byte each, row-major; the code is the byte with these bits inverted.
    Bytes { flip: u8 },
    /// Two codes in a byte, row-major, the even column in the low bits.
    Nibbles,
    /// Two values of 4 bits in a byte, row-major, the even column in the high bits; each stands for one of these codes.
    Table { codes: &'static [u8; 16] },
    /// Codes in words along the columns, row-major.
    Along { words: usize, dense: bool },
    /// Codes in words along the columns, `[words][rows]`, dense.
    Down,
    /// Codes in words along the rows, `[cols][rows / 8]`, nibbles in the order of [`AWQ_NIBBLES`].
    Awq,
}

/// The scales of a matrix: that of row r and source group g is element `(r / rows * row_stride + g * group_stride) / each`.
#[derive(Clone, Copy, Debug)]
struct Scales<'a> {
    tensor: Tensor<'a>,
    rows: usize,
    row_stride: usize,
    group_stride: usize,
    /// 1, or the elements of a block where strides count elements of the weight.
    each: usize,
    /// Source groups of a row.
    groups: usize,
    /// Columns of a source group.
    group: u32,
    /// A number that multiplies or divides every scale.
    factor: f32,
    divides: bool,
    /// How the tensor is read if it is quantised itself.
    nested: Option<Nested<'a>>,
}

impl<'a> Scales<'a> {
    /// Checks the shape of scales and returns them with the canonical group.
    fn open(tensor: Tensor<'a>, shape: ScaleShape, rows: u32, cols: u32) -> Result<(Scales<'a>, u32), WeightError> {
        let whole = Scales::grouped(tensor, 1, WHOLE_ROW);
        let (scales, group, expected) = match shape {
            ScaleShape::Tensor => (Scales { row_stride: 0, ..whole }, None, [1, 1]),
            ScaleShape::Row => (whole, None, [u64::from(rows), 1]),
            ScaleShape::Group(group) => {
                canonical_group(&tensor, Some(group))?;
                let scales = Scales::grouped(tensor, cols, group);
                (scales, Some(group), [u64::from(rows), scales.groups as u64])
            }
            ScaleShape::Block { rows: height, cols: width } => {
                canonical_group(&tensor, Some(width))?;
                if height == 0 {
                    return Err(WeightError::Group { tensor: tensor.name.into(), group: 0, least: 1 });
                }
                let scales = Scales { rows: height as usize, ..Scales::grouped(tensor, cols, width) };
                (scales, Some(width), [u64::from(rows.div_ceil(height)), scales.groups as u64])
            }
        };
        tensor.expect(SCALES, &expected)?;
        Ok((scales, canonical_group(&tensor, group)?))
    }

    /// Scales of shape `[rows, ⌈cols / group⌉]`.
    fn grouped(tensor: Tensor<'a>, cols: u32, group: u32) -> Scales<'a> {
        let groups = cols.div_ceil(group) as usize;
        Scales {
            tensor,
            rows: 1,
            row_stride: groups,
            group_stride: 1,
            each: 1,
            groups,
            group,
            factor: 1.0,
            divides: false,
            nested: None,
        }
    }

    /// Scales of shape `[groups, rows]`.
    fn transposed(tensor: Tensor<'a>, rows: u32, group: u32) -> Scales<'a> {
        Scales { row_stride: 1, group_stride: rows as usize, groups: 0, ..Scales::grouped(tensor, 1, group) }
    }

    /// The index of the scale of a row and source group.
    #[inline(always)]
    fn index(&self, row: u32, group: usize) -> usize {
        (row as usize / self.rows * self.row_stride + group * self.group_stride) / self.each
    }

    /// Element `index` of the scales' tensor as a number.
    #[inline(always)]
    fn number(&self, index: usize) -> f32 {
        match &self.nested {
            None => self.tensor.number(index),
            Some(Nested { numbers, largest, block, offset }) => {
                let number = numbers.number(usize::from(self.tensor.data()[index]));
                number * largest.number(index / *block as usize) + offset
            }
        }
    }

    /// Reads adjacent scales from that of a row and source group on: those of further rows, if they are adjacent, else those
    /// of further groups.
    fn read(&self, row: u32, group: usize, scales: &mut [f32]) {
        wide(
            #[inline(always)]
            || {
                match (self.each, self.nested) {
                    (1, None) => self.tensor.numbers(self.index(row, group), scales),
                    _ => {
                        // Scales of several rows are not read together then.
                        let all = scales.iter_mut().zip(group..);
                        all.for_each(|(scale, group)| *scale = self.number(self.index(row, group)));
                    }
                }
                match self.divides {
                    true => scales.iter_mut().for_each(|scale| *scale /= self.factor),
                    false => scales.iter_mut().for_each(|scale| *scale *= self.factor),
                }
            },
        );
    }

    #[inline(always)]
    fn get(&self, row: u32, group: usize) -> f32 {
        let scale = self.number(self.index(row, group));
        if self.divides { scale / self.factor } else { scale * self.factor }
    }
}

/// The zeros of a matrix, in codes.
#[derive(Clone, Copy, Debug)]
enum Zeros<'a> {
    /// The minimum of the canonical codes.
    Constant,
    /// `[groups][words]`, packed densely along the rows; `plus`, 0 or 1, is added; `only` is the one allowed.
    Gptq { tensor: Tensor<'a>, plus: u32, only: Option<u32> },
    /// `[groups][rows / 8]`, nibbles in the order of [`AWQ_NIBBLES`].
    Awq { tensor: Tensor<'a> },
    /// `[words][groups]`, packed along the rows.
    Down { tensor: Tensor<'a>, dense: bool },
    /// Signed bytes at the scales' indices.
    Bytes { tensor: Tensor<'a> },
}

/// The nibble of a word that holds each of 8 rows.
const AWQ_NIBBLES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The bytes that are read at a time from each line of a weight whose rows are not contiguous.
const LINE: usize = 512;

/// Code `index` of packed words.
#[inline(always)]
fn packed(word: impl Fn(usize) -> u32, index: usize, bits: u32, dense: bool) -> u32 {
    let mask = (1u32 << bits) - 1;
    if !dense {
        let codes = (32 / bits) as usize;
        return word(index / codes) >> (index % codes * bits as usize) & mask;
    }
    let bit = index * bits as usize;
    let (at, shift) = (bit / 32, (bit % 32) as u32);
    let low = word(at) >> shift;
    let high = if shift + bits > 32 { word(at + 1) << (32 - shift) } else { 0 };
    (low | high) & mask
}

/// Returns a word of zeros of `bits` bits with `plus` added to each of them, as `GptqVersion::V1` stores them; those of 3 bits,
/// which words divide, are left as they are.
#[inline(always)]
fn plus_each(word: u32, bits: u32, plus: u32) -> u32 {
    let each = match bits {
        2 => 0x5555_5555,
        4 => 0x1111_1111,
        8 => 0x0101_0101,
        _ => 0,
    };
    word.wrapping_add(each * plus)
}

impl<'a> CodeMatrix<'a> {
    /// The number of rows (outputs).
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The number of columns (inputs).
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// The format of decoded rows: the meaning of codes, scales and minimums.
    pub fn codes(&self) -> Codes {
        self.codes
    }

    /// The number of groups in a row.
    pub fn groups(&self) -> usize {
        self.codes.groups(self.cols as usize)
    }

    /// The order of the columns, if rows are not decoded in the checkpoint's own: position j of a decoded row is column
    /// `order[j]`, so the input must be gathered as `x[order[j]]`. Only for act-order checkpoints.
    pub fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    /// The number of rows to decode in one call, so that runs of bytes are read which are longer than a cache line; calls
    /// should begin at a multiple of it.
    pub fn rows_together(&self) -> u32 {
        match self.packing {
            Packing::Bytes { .. } | Packing::Nibbles | Packing::Table { .. } | Packing::Along { .. } => 1,
            // [`LINE`] bytes.
            Packing::Down => 128,
            // Two cache lines: more rows of usual widths would not stay in a core's cache.
            Packing::Awq => 256,
        }
    }

    /// A number of which all scales are multiples by numbers of few bits: a scale of the whole tensor; else 1.
    pub fn unit(&self) -> f32 {
        if self.scales.divides { self.scales.factor.recip() } else { self.scales.factor }
    }

    /// Returns the bytes of the codes' tensor that hold these rows, if they are contiguous.
    pub fn bytes_of(&self, rows: Range<u32>) -> Option<Range<u64>> {
        let row_bytes = match self.packing {
            Packing::Bytes { .. } => u64::from(self.cols),
            Packing::Nibbles | Packing::Table { .. } => u64::from(self.cols / 2),
            Packing::Along { words, .. } => words as u64 * 4,
            Packing::Down | Packing::Awq => return None,
        };
        Some(u64::from(rows.start) * row_bytes..u64::from(rows.end) * row_bytes)
    }

    /// Decodes `count` rows from `first` on, one after the other: `cols` codes a row, and `groups` scales and minimums.
    /// `minimums` may be empty if the codes have a constant zero.
    ///
    /// Returns an error, with any content in the slices, if a scale is not finite or so large that a value may
    /// overflow, if a weight is not a number, or if a zero is not the one of a symmetric matrix. Act-order allocates a
    /// copy of the codes.
    ///
    /// # Panics
    /// If a row is outside the matrix or a slice has another length: bugs of the caller.
    pub fn decode(
        &self,
        first: u32,
        count: u32,
        codes: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
    ) -> Result<(), WeightError> {
        let (cols, groups) = (self.cols as usize, self.groups());
        assert!(
            first.checked_add(count).is_some_and(|end| end <= self.rows),
            "rows {first} + {count} of {}",
            self.rows
        );
        assert_eq!(
            (codes.len(), scales.len()),
            (count as usize * cols, count as usize * groups),
            "codes and scales of {count} rows"
        );
        assert!(
            minimums.len() == scales.len() || self.codes.zero().is_some() && minimums.is_empty(),
            "minimums of {count} rows"
        );
        if cols == 0 {
            return Ok(());
        }
        let bytes = self.codes.code_bytes(cols);
        let mut rows = vec![0; count as usize * bytes];
        self.write_codes(first, &mut rows, bytes)?;
        for (bytes, codes) in rows.chunks_exact(bytes).zip(codes.chunks_exact_mut(cols)) {
            self.codes.split(bytes, codes);
        }
        self.each_scale(first, count, |row, at, scale, minimum| {
            let at = row * groups + at.start..row * groups + at.end;
            scales[at.clone()].fill(scale);
            if let Some(minimums) = minimums.get_mut(at) {
                minimums.fill(minimum);
            }
        })
    }

    /// Decodes `count` rows from `first` on into canonical rows ([`Codes::canonical_bytes`]), one after the other. Returns
    /// the errors of [`CodeMatrix::decode`].
    ///
    /// # Panics
    /// If a row is outside the matrix or `out` has another length: bugs of the caller.
    pub fn decode_canonical(&self, first: u32, count: u32, out: &mut [u8]) -> Result<(), WeightError> {
        let (cols, groups) = (self.cols as usize, self.groups());
        let row_bytes = self.codes.canonical_bytes(cols);
        let is_inside = first.checked_add(count).is_some_and(|end| end <= self.rows);
        assert!(is_inside, "rows {first} + {count} of {}", self.rows);
        assert_eq!(out.len(), count as usize * row_bytes, "bytes of {count} canonical rows");
        let unit = self.unit().to_le_bytes();
        out.chunks_exact_mut(row_bytes).for_each(|row| row[row_bytes - 4..].copy_from_slice(&unit));
        if cols == 0 {
            return Ok(());
        }
        self.write_codes(first, out, row_bytes)?;
        let numbers = self.codes.code_bytes(cols);
        let stored = self.codes.minimum == Minimum::Stored;
        self.each_scale(first, count, |row, at, scale, minimum| {
            let numbers = &mut out[row * row_bytes + numbers..];
            for at in at {
                numbers[4 * at..][..4].copy_from_slice(&scale.to_le_bytes());
                if stored {
                    numbers[4 * (groups + at)..][..4].copy_from_slice(&minimum.to_le_bytes());
                }
            }
        })
    }

    /// Writes the codes of rows from `first` on as canonical rows have them; a row begins every `row_bytes` bytes.
    fn write_codes(&self, first: u32, out: &mut [u8], row_bytes: usize) -> Result<(), WeightError> {
        let (cols, bytes) = (self.cols as usize, self.codes.code_bytes(self.cols as usize));
        self.decode_codes(first as usize, out, row_bytes);
        if let Some(order) = &self.order {
            let (mut natural, mut codes) = (vec![0; cols], vec![0; cols]);
            for row in out.chunks_exact_mut(row_bytes) {
                self.codes.split(&row[..bytes], &mut natural);
                codes.iter_mut().zip(order).for_each(|(code, col)| *code = natural[*col as usize]);
                self.codes.join(&codes, &mut row[..bytes]);
            }
        }
        // The least size that is not a finite number.
        let number = self.codes.number;
        let Some(limit) = (0..0x80).find(|code| !number.is_finite(*code)) else { return Ok(()) };
        for (row, codes) in (first..).zip(out.chunks_exact(row_bytes)) {
            let codes = &codes[..bytes];
            let most = wide(
                #[inline(always)]
                || codes.iter().fold(0, |most, code| most.max(code & 0x7f)),
            );
            if most >= limit {
                let col = codes.iter().position(|code| !number.is_finite(*code)).expect("found just now");
                let (tensor, code) = (self.weight.name.into(), codes[col]);
                return Err(WeightError::NotFinite { tensor, row, col: col as u32, code });
            }
        }
        Ok(())
    }

    /// Calls `put` with the row, counted from `first`, the canonical groups, the scale and the minimum of each source group
    /// of `count` rows.
    #[inline(always)]
    fn each_scale(
        &self,
        first: u32,
        count: u32,
        mut put: impl FnMut(usize, Range<usize>, f32, f32),
    ) -> Result<(), WeightError> {
        let groups = self.groups();
        // Canonical groups of a source group.
        let repeat = ((self.scales.group / self.codes.group) as usize).min(groups);
        let sources = groups.div_ceil(repeat);
        // Adjacent scales are read together.
        const MOST: usize = 64;
        let (mut scales, mut minimums) = ([0.0; MOST], [0.0; MOST]);
        let mut are_good = true;
        let mut read = |row: usize, source: usize, rows: usize, sources: usize| {
            let count = rows.max(sources);
            let (scales, minimums) = (&mut scales[..count], &mut minimums[..count]);
            self.scales.read(first + row as u32, source, scales);
            self.read_zeros(first + row as u32, source, rows, minimums);
            are_good &= wide(
                #[inline(always)]
                || {
                    minimums.iter_mut().zip(&*scales).for_each(|(minimum, scale)| *minimum *= *scale);
                    // The bound of the largest numbers is the largest bound.
                    self.codes.bound(largest(scales), largest(minimums)).is_finite()
                },
            );
            for (i, (scale, minimum)) in scales.iter().zip(&*minimums).enumerate() {
                let (row, source) = if rows > 1 { (row + i, source) } else { (row, source + i) };
                put(row, source * repeat..groups.min((source + 1) * repeat), *scale, *minimum);
            }
        };
        let rows = count as usize;
        if self.scales.row_stride == 1 && self.scales.rows == 1 && self.scales.nested.is_none() {
            for source in 0..sources {
                (0..rows).step_by(MOST).for_each(|row| read(row, source, (rows - row).min(MOST), 1));
            }
        } else {
            for row in 0..rows {
                (0..sources).step_by(MOST).for_each(|source| read(row, source, 1, (sources - source).min(MOST)));
            }
        }
        if are_good { Ok(()) } else { self.bad_scale(first..first + count) }
    }

    /// Reads the zeros of as many groups as `zeros` has from a row and source group on: those of `rows` rows, or of further
    /// groups of one row. A wrong one is not a number.
    #[inline(always)]
    fn read_zeros(&self, row: u32, source: usize, rows: usize, zeros: &mut [f32]) {
        let nibbles = match self.zeros {
            Zeros::Constant => return zeros.fill(self.codes.zero().unwrap_or(0.0)),
            Zeros::Awq { tensor } => Some((tensor, AWQ_NIBBLES, 0, None)),
            Zeros::Gptq { tensor, plus, only } if self.codes.bits == 4 => {
                Some((tensor, [0, 1, 2, 3, 4, 5, 6, 7], plus, only))
            }
            _ => None,
        };
        match nibbles {
            Some((tensor, nibbles, plus, only)) if rows > 1 => {
                let (at, words) = (row as usize, (self.rows as usize).div_ceil(8));
                for (at, to) in (at..).zip(zeros) {
                    let word = plus_each(tensor.word(source * words + at / 8), 4, plus);
                    let zero = word >> (4 * nibbles[at % 8]) & 15;
                    *to = if only.unwrap_or(zero) == zero { zero as f32 } else { f32::NAN };
                }
            }
            _ => {
                for (i, to) in (0..).zip(zeros) {
                    let (row, source) = if rows > 1 { (row + i, source) } else { (row, source + i as usize) };
                    *to = self.zero(row, source).map_or(f32::NAN, |zero| zero.unwrap_or(0.0));
                }
            }
        }
    }

    /// Returns the error of the first source group in rows that is not finite or has a wrong zero.
    #[cold]
    fn bad_scale(&self, rows: Range<u32>) -> Result<(), WeightError> {
        let repeat = ((self.scales.group / self.codes.group) as usize).min(self.groups());
        for (row, source) in rows.flat_map(|row| (0..self.groups().div_ceil(repeat)).map(move |source| (row, source))) {
            let scale = self.scales.get(row, source);
            let zero = self.zero(row, source)?.or(self.codes.zero()).unwrap_or(0.0);
            if !self.codes.bound(scale, scale * zero).is_finite() {
                let tensor = self.scales.tensor.name.into();
                return Err(WeightError::Scale { tensor, row, group: source, scale });
            }
        }
        Ok(())
    }

    /// The zero of a row and source group; `None` if it is the constant one.
    #[inline(always)]
    fn zero(&self, row: u32, group: usize) -> Result<Option<f32>, WeightError> {
        let (at, bits) = (row as usize, self.codes.bits);
        let zero = match self.zeros {
            Zeros::Constant => return Ok(None),
            Zeros::Gptq { tensor, plus, only } => {
                let words = (self.rows as usize * bits as usize).div_ceil(32);
                let zero = packed(|k| plus_each(tensor.word(group * words + k), bits, plus), at, bits, true);
                let zero = if bits == 3 { (zero + plus) & 7 } else { zero };
                if let Some(expected) = only
                    && zero != expected
                {
                    return Err(WeightError::Zero { tensor: tensor.name.into(), row, group, found: zero, expected });
                }
                zero
            }
            Zeros::Awq { tensor } => {
                let word = tensor.word(group * (self.rows as usize / 8) + at / 8);
                word >> (4 * AWQ_NIBBLES[at % 8]) & 15
            }
            Zeros::Down { tensor, dense } => packed(|k| tensor.word(k * self.scales.groups + group), at, bits, dense),
            Zeros::Bytes { tensor } => u32::from(tensor.data()[self.scales.index(row, group)] ^ 0x80),
        };
        Ok(Some(zero as f32))
    }

    /// Writes the codes of rows from `first` on as canonical rows have them, but in the checkpoint's order of columns; a row
    /// begins every `row_bytes` bytes.
    fn decode_codes(&self, first: usize, out: &mut [u8], row_bytes: usize) {
        let cols = self.cols as usize;
        let weight = self.weight.data();
        let lines = |bytes: usize| weight[first * bytes..].chunks_exact(bytes);
        let rows = out.chunks_exact_mut(row_bytes);
        match self.packing {
            Packing::Bytes { flip } => {
                for (row, line) in rows.zip(lines(cols)) {
                    wide(
                        #[inline(always)]
                        || row.iter_mut().zip(line).for_each(|(code, byte)| *code = byte ^ flip),
                    );
                }
            }
            Packing::Nibbles => {
                rows.zip(lines(cols / 2)).for_each(|(row, line)| row[..line.len()].copy_from_slice(line))
            }
            Packing::Table { codes } => {
                for (row, line) in rows.zip(lines(cols / 2)) {
                    let pairs = row.as_chunks_mut::<2>().0.iter_mut().zip(line);
                    pairs.for_each(|(pair, byte)| *pair = [byte >> 4, byte & 15].map(|code| codes[usize::from(code)]));
                }
            }
            Packing::Along { words, dense } => {
                let bytes = self.codes.code_bytes(cols);
                for (row, line) in rows.zip(lines(words * 4)) {
                    unpack_row(line, self.codes.bits, dense, &mut row[..bytes]);
                }
            }
            Packing::Down => match self.codes.bits {
                2 => self.down::<1, 16>(first, out, row_bytes, |[word]| {
                    let halves = [spread_2(word as u16), spread_2((word >> 16) as u16)].map(u64::to_le_bytes);
                    *halves.as_flattened().first_chunk().expect("16 codes")
                }),
                3 => self.down::<3, 32>(first, out, row_bytes, spread_3),
                _ => self.down_words(first, out, row_bytes),
            },
            Packing::Awq => self.awq(first, out, row_bytes),
        }
    }

    /// Decodes rows whose codes are packed along the columns in `[words][rows]`: `UNIT` words become `BYTES` bytes of a row.
    /// Writes at least 64 bytes of a row at a time, while the lines of these codes are still in the nearest cache.
    #[inline(always)]
    fn down<const UNIT: usize, const BYTES: usize>(
        &self,
        first: usize,
        out: &mut [u8],
        row_bytes: usize,
        spread: impl Fn([u32; UNIT]) -> [u8; BYTES],
    ) {
        let rows = self.rows as usize;
        let step = (64 / BYTES).max(1);
        let units = self.codes.code_bytes(self.cols as usize) / BYTES;
        for start in (0..units).step_by(step) {
            let end = units.min(start + step);
            for (r, row) in out.chunks_exact_mut(row_bytes).enumerate() {
                let row = row[start * BYTES..end * BYTES].as_chunks_mut::<BYTES>().0;
                for (unit, bytes) in (start..end).zip(row) {
                    let words = std::array::from_fn(|k| self.weight.word((unit * UNIT + k) * rows + first + r));
                    *bytes = spread(words);
                }
            }
        }
    }

    /// Like [`CodeMatrix::down`], for words that are as in canonical rows.
    fn down_words(&self, first: usize, out: &mut [u8], row_bytes: usize) {
        let units = self.codes.code_bytes(self.cols as usize) / 4;
        let mut lines = [[0; LINE]; 16];
        for (r, out) in (first..).step_by(LINE / 4).zip(out.chunks_mut(LINE / 4 * row_bytes)) {
            for start in (0..units).step_by(16) {
                let count = (units - start).min(16);
                self.gather(
                    start * self.rows as usize + r,
                    self.rows as usize,
                    out.len() / row_bytes,
                    &mut lines[..count],
                );
                for (i, out) in out.chunks_mut(4 * row_bytes).enumerate() {
                    for (k, lines) in lines[..count].chunks(4).enumerate() {
                        let at = 4 * start + 16 * k;
                        match lines {
                            [a, b, c, d] if out.len() == 4 * row_bytes => {
                                let line = |line: &[u8; LINE]| words(&line[16 * i..]);
                                write_turned([line(a), line(b), line(c), line(d)], out, row_bytes, at);
                            }
                            _ => {
                                for (r, row) in out.chunks_exact_mut(row_bytes).enumerate() {
                                    let words = row[at..].as_chunks_mut::<4>().0.iter_mut().zip(lines);
                                    words.for_each(|(word, line)| word.copy_from_slice(&line[16 * i + 4 * r..][..4]));
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// Copies `count` words of the weight to each of several lines: those of the first one begin at word `first`, and those
    /// of the next one `stride` words after it. All lines are copied before they are used, because the processor fetches
    /// independent ones at the same time.
    #[inline(always)]
    fn gather(&self, first: usize, stride: usize, count: usize, lines: &mut [[u8; LINE]]) {
        for (line, at) in lines.iter_mut().zip((first..).step_by(stride)) {
            line[..4 * count].copy_from_slice(&self.weight.data()[4 * at..][..4 * count]);
        }
    }

    /// Decodes AWQ's rows, 32 columns and the words of a line at a time.
    fn awq(&self, first: usize, out: &mut [u8], row_bytes: usize) {
        const WORDS: usize = LINE / 4;
        let (cols, all) = (self.cols as usize, self.rows as usize / 8);
        let end = first + out.len() / row_bytes;
        let mut lines = [[0; LINE]; 32];
        for word in (first / 8..end.div_ceil(8)).step_by(WORDS) {
            let here = (end.div_ceil(8) - word).min(WORDS);
            for start in (0..cols).step_by(32) {
                let count = (cols - start).min(32);
                self.gather(start * all + word, all, here, &mut lines[..count]);
                let width = count.div_ceil(2);
                for k in (0..here).step_by(4) {
                    // Of each eight columns, four words of each nibble.
                    let tile = |eight: usize| {
                        let line = |i: usize| words(&lines[8 * eight + i][4 * k..]);
                        transpose([line(0), line(1), line(2), line(3), line(4), line(5), line(6), line(7)])
                    };
                    let tiles = [tile(0), tile(1), tile(2), tile(3)];
                    for (i, nibble) in AWQ_NIBBLES.into_iter().enumerate() {
                        let line = |eight: usize| tiles[eight][nibble as usize];
                        let lines = [line(0), line(1), line(2), line(3)];
                        let row = 8 * (word + k) + i;
                        if row >= first && row + 24 < end && width == 16 {
                            write_turned(lines, &mut out[(row - first) * row_bytes..], 8 * row_bytes, start / 2);
                            continue;
                        }
                        for (words, row) in turned(lines).iter().zip((row..).step_by(8)) {
                            // The first or last word may go beyond the rows.
                            let at = row.checked_sub(first).map(|row| row * row_bytes + start / 2);
                            if let Some(out) = at.and_then(|at| out.get_mut(at..at + width)) {
                                out.copy_from_slice(&words.map(u32::to_le_bytes).as_flattened()[..width]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Four words.
#[inline(always)]
fn words(bytes: &[u8]) -> [u32; 4] {
    let [a, b, c, d] = *bytes.as_chunks::<4>().0.first_chunk().expect("four words");
    [u32::from_le_bytes(a), u32::from_le_bytes(b), u32::from_le_bytes(c), u32::from_le_bytes(d)]
}

/// Transposes four lines of four words.
#[inline(always)]
fn turned([a, b, c, d]: [[u32; 4]; 4]) -> [[u32; 4]; 4] {
    let column = |i: usize| [a[i], b[i], c[i], d[i]];
    [column(0), column(1), column(2), column(3)]
}

/// Writes word i of four lines to the row i, at byte `at`; a row begins every `stride` bytes.
#[inline(always)]
fn write_turned(lines: [[u32; 4]; 4], out: &mut [u8], stride: usize, at: usize) {
    for (i, [a, b, c, d]) in turned(lines).into_iter().enumerate() {
        let bytes = [a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes(), d.to_le_bytes()];
        out[i * stride + at..][..16].copy_from_slice(bytes.as_flattened());
    }
}

/// Writes a row of codes from its words, as canonical rows have them.
fn unpack_row(line: &[u8], bits: u32, dense: bool, out: &mut [u8]) {
    match bits {
        4 | 8 => out.copy_from_slice(&line[..out.len()]),
        _ => {
            let word = |k: usize| u32::from_le_bytes(*line[4 * k..].first_chunk().expect("a word of the row"));
            for (i, code) in out.iter_mut().enumerate() {
                *code = packed(word, i, bits, dense) as u8;
            }
        }
    }
}

/// The 8 numbers of 2 bits as bytes.
#[inline(always)]
fn spread_2(word: u16) -> u64 {
    let x = u64::from(word);
    let x = (x | x << 24) & 0x0000_00ff_0000_00ff;
    let x = (x | x << 12) & 0x000f_000f_000f_000f;
    (x | x << 6) & 0x0303_0303_0303_0303
}

/// The 32 numbers of 3 bits as bytes.
#[inline(always)]
fn spread_3(words: [u32; 3]) -> [u8; 32] {
    let [a, b, c] = words.map(u64::from);
    // The first 21 numbers, and the others.
    let (low, high) = (a | b << 32, (b | c << 32) >> 31);
    std::array::from_fn(|i| (if i < 21 { low >> (3 * i) } else { high >> (3 * (i - 21)) } & 7) as u8)
}

/// Transposes 8 × 8 nibbles, in each of four words: nibble n of word i becomes nibble i of word n.
#[inline(always)]
fn transpose(mut tile: [[u32; 4]; 8]) -> [[u32; 4]; 8] {
    let mut swap = |distance: usize, bits: u32, mask: u32| {
        for i in 0..8 {
            if i & distance == 0 {
                let (front, back) = tile.split_at_mut(i + distance);
                for (a, b) in front[i].iter_mut().zip(&mut back[0]) {
                    let difference = (*a >> bits ^ *b) & mask;
                    *b ^= difference;
                    *a ^= difference << bits;
                }
            }
        }
    };
    swap(4, 16, 0x0000_ffff);
    swap(2, 8, 0x00ff_00ff);
    swap(1, 4, 0x0f0f_0f0f);
    tile
}

// ---- Errors ----

/// Why tensors do not form a matrix, or a row cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightError {
    /// A tensor of the weight is missing.
    Missing {
        /// The name of the codes' tensor.
        tensor: String,
        /// The role of the missing tensor.
        role: TensorRole,
    },
    /// The element type is not one that the format has.
    TensorDtype {
        /// The tensor's name.
        tensor: String,
        /// Its element type.
        found: TensorDtype,
        /// The possible ones.
        expected: String,
    },
    /// The tensor has more or fewer dimensions than a matrix.
    Dimensions {
        /// The tensor's name.
        tensor: String,
        /// How many it has.
        found: usize,
        /// How many it should have.
        expected: usize,
    },
    /// A dimension is too large.
    Size {
        /// The tensor's name.
        tensor: String,
        /// The dimension.
        found: u64,
        /// The largest possible.
        most: u64,
    },
    /// The shape does not agree with the weight or the description.
    Shape {
        /// The tensor's name.
        tensor: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape it should have.
        expected: Vec<u64>,
    },
    /// The tensor has not the bytes that its shape requires.
    Bytes {
        /// The tensor's name.
        tensor: String,
        /// Its bytes.
        found: u64,
        /// The bytes it should have.
        expected: u64,
    },
    /// The format has no codes of this many bits.
    Bits {
        /// The tensor's name.
        tensor: String,
        /// The number of bits.
        bits: u32,
        /// The possible ones.
        allowed: &'static [u32],
    },
    /// The group size is 0 or not a multiple of 16.
    Group {
        /// The tensor's name.
        tensor: String,
        /// The columns of a group, or rows of a block.
        group: u32,
        /// The required divisor.
        least: u32,
    },
    /// A row has columns that no groups within blocks of all elements divide.
    Columns {
        /// The tensor's name.
        tensor: String,
        /// The columns.
        cols: u32,
        /// The elements of a block.
        block: u32,
        /// The required divisor.
        least: u32,
    },
    /// A column belongs to a group that does not exist.
    GroupIndex {
        /// The tensor's name.
        tensor: String,
        /// The column.
        col: u32,
        /// Its group.
        found: i32,
        /// The number of groups.
        groups: u32,
    },
    /// A group has more columns than the group size.
    GroupColumns {
        /// The tensor's name.
        tensor: String,
        /// The group.
        group: u32,
        /// The columns that it should have.
        most: u32,
    },
    /// A scale is not finite, or so large that a value may overflow.
    Scale {
        /// The tensor's name.
        tensor: String,
        /// The row of the weight.
        row: u32,
        /// The group in the row.
        group: usize,
        /// The scale.
        scale: f32,
    },
    /// A zero differs from that of a symmetric matrix.
    Zero {
        /// The tensor's name.
        tensor: String,
        /// The row of the weight.
        row: u32,
        /// The group in the row.
        group: usize,
        /// The zero.
        found: u32,
        /// The one it should be.
        expected: u32,
    },
    /// A weight is infinite or not a number.
    NotFinite {
        /// The tensor's name.
        tensor: String,
        /// The row.
        row: u32,
        /// The position in the decoded row.
        col: u32,
        /// The code.
        code: u8,
    },
}

impl WeightError {
    /// Converts the error of a part of a weight to an error of the weight; `first` is the weight's row that is the
    /// part's row 0.
    pub fn in_part_from(mut self, first: u32) -> WeightError {
        match &mut self {
            WeightError::Scale { row, .. } | WeightError::Zero { row, .. } | WeightError::NotFinite { row, .. } => {
                *row += first;
            }
            _ => {}
        }
        self
    }
}

impl fmt::Display for WeightError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightError::Missing { tensor, role } => write!(f, "tensor {tensor} has no tensor of {role:?} beside it"),
            WeightError::TensorDtype { tensor, found, expected } => {
                write!(f, "tensor {tensor} has elements of type {found:?}, expected {expected}")
            }
            WeightError::Dimensions { tensor, found, expected } => {
                write!(f, "tensor {tensor} has {found} dimensions, expected {expected}")
            }
            WeightError::Size { tensor, found, most } => {
                write!(f, "tensor {tensor} has a dimension of {found}, at most {most} is supported")
            }
            WeightError::Shape { tensor, found, expected } => {
                write!(f, "tensor {tensor} has shape {found:?}, expected {expected:?}")
            }
            WeightError::Bytes { tensor, found, expected } => {
                write!(f, "tensor {tensor} has {found} bytes, expected {expected}")
            }
            WeightError::Bits { tensor, bits, allowed } => {
                write!(f, "tensor {tensor} has codes of {bits} bits, supported are {allowed:?}")
            }
            WeightError::Group { tensor, group, least } => {
                write!(f, "tensor {tensor} has groups of {group}, expected a positive multiple of {least}")
            }
            WeightError::Columns { tensor, cols, block, least } => write!(
                f,
                "tensor {tensor} has rows of {cols} columns in blocks of {block} that do not end with rows: expected a \
                 multiple of {least} columns"
            ),
            WeightError::GroupIndex { tensor, col, found, groups } => {
                write!(f, "tensor {tensor} puts column {col} in group {found} of {groups}")
            }
            WeightError::GroupColumns { tensor, group, most } => {
                write!(f, "tensor {tensor} puts more than {most} columns in group {group}")
            }
            WeightError::Scale { tensor, row, group, scale } => {
                write!(f, "tensor {tensor} has scale {scale} in row {row}, group {group}: values are not finite")
            }
            WeightError::Zero { tensor, row, group, found, expected } => {
                write!(f, "tensor {tensor} has zero {found} in row {row}, group {group}, expected {expected}")
            }
            WeightError::NotFinite { tensor, row, col, code } => {
                write!(
                    f,
                    "tensor {tensor} has code {code:#04x} in row {row}, column {col}, which is not a finite number"
                )
            }
        }
    }
}

impl std::error::Error for WeightError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(count: usize, seed: u32) -> Vec<u8> {
        (0..count as u32).map(|i| (i.wrapping_add(seed).wrapping_mul(0x9e37_79b1) >> 23) as u8).collect()
    }

    /// Goal: every zero of version 1 is read, also 0. Method: words are packed as GPTQModel does before it saves: all numbers of
    /// a word, less 1 each in one subtraction; 3 bits each by itself.
    #[test]
    fn zeros_of_version_1_are_read_although_they_borrow() {
        let ones = [(2u32, 0x5555_5555u32), (4, 0x1111_1111), (8, 0x0101_0101)];
        for (bits, each) in ones {
            let count = 32 / bits as usize;
            let zeros: Vec<u32> =
                (0..count).map(|i| [0, (1 << bits) - 1, 0, 0, 1, 2][i % 6] & ((1 << bits) - 1)).collect();
            let word = zeros.iter().zip(0..).fold(0u32, |word, (zero, i)| word | zero << (bits * i));
            let stored = word.wrapping_sub(each);
            let read = |i: usize| packed(|_| plus_each(stored, bits, 1), i, bits, true);
            assert_eq!((0..count).map(read).collect::<Vec<_>>(), zeros, "{bits} bits");
            assert_eq!(plus_each(word, bits, 0), word);
        }
        assert_eq!(plus_each(0xffff_ffff, 3, 1), 0xffff_ffff);
    }

    /// Any rows of matrices whose words lie across the rows are those of the definition, as bytes and as canonical rows.
    #[test]
    fn any_rows_have_their_codes() {
        for (rows, cols) in [(8u32, 40u32), (304, 200), (1064, 72)] {
            let (groups, words) = (u64::from(cols.div_ceil(32)), random((rows * cols / 2) as usize, rows));
            let zeros = random((groups * u64::from(rows) / 2) as usize, 7);
            let scales: Vec<u8> =
                (0..groups as u32 * rows).flat_map(|i| (0x3000 + i as u16 % 512).to_le_bytes()).collect();
            let (r, c) = (u64::from(rows), u64::from(cols));
            let tensor = |dtype, shape, bytes| Tensor { name: "", dtype, shape, bytes: Some(bytes) };
            let (down, across, by_group, numbers) = ([c / 8, r], [c, r / 8], [groups, r / 8], [groups, r]);
            let scales = tensor(TensorDtype::F16, &numbers, &scales);
            let qzeros = tensor(TensorDtype::I32, &by_group, &zeros);
            let gptq = Gptq {
                qweight: tensor(TensorDtype::I32, &down, &words),
                qzeros,
                scales,
                g_idx: None,
                bits: 4,
                group: Some(32),
                symmetric: false,
                version: GptqVersion::V1,
            };
            let qweight = tensor(TensorDtype::I32, &across, &words);
            let awq = Awq { qweight, qzeros: Some(qzeros), scales, group: Some(32) };
            let nibble = |at: u32, index: u32| words[(4 * at + index / 2) as usize] >> (4 * (index % 2)) & 15;
            let of_gptq = |row: u32, col: u32| nibble(col / 8 * rows + row, col % 8);
            let of_awq = |row: u32, col: u32| nibble(col * (rows / 8) + row / 8, AWQ_NIBBLES[row as usize % 8]);
            let (gptq, awq) = (gptq.open().expect("a matrix"), awq.open().expect("a matrix"));
            for (matrix, code) in [(gptq, &of_gptq as &dyn Fn(u32, u32) -> u8), (awq, &of_awq)] {
                for (first, count) in [(0, rows), (0, 8), (rows / 2, rows / 2), (3, 5), (rows - 7, 6), (1, rows - 2)] {
                    let (n, groups) = (count as usize, matrix.groups());
                    let (mut codes, mut scales) = (vec![0; n * cols as usize], vec![0.0; n * groups]);
                    let mut minimums = scales.clone();
                    matrix.decode(first, count, &mut codes, &mut scales, &mut minimums).expect("finite values");
                    let wanted: Vec<u8> =
                        (first..first + count).flat_map(|row| (0..cols).map(move |col| code(row, col))).collect();
                    assert!(codes == wanted, "{rows} {cols} {first} {count}");
                    let row_bytes = matrix.codes().canonical_bytes(cols as usize);
                    let mut found = vec![0; n * row_bytes];
                    matrix.decode_canonical(first, count, &mut found).expect("finite values");
                    for (row, found) in found.chunks_exact(row_bytes).enumerate() {
                        let (at, groups) =
                            (row * cols as usize..(row + 1) * cols as usize, row * groups..(row + 1) * groups);
                        let mut wanted = vec![0; row_bytes];
                        let (scales, minimums) = (&scales[groups.clone()], &minimums[groups]);
                        matrix.codes().write_canonical(&codes[at], scales, minimums, 1.0, &mut wanted);
                        assert!(found == wanted, "{rows} {cols} {first} {count}: row {row}");
                    }
                }
            }
        }
    }
}

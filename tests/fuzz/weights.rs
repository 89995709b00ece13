//! Quantised weights from bytes: which format, its parameters, and the shapes, types and contents of its tensors. Mostly
//! these agree with each other, so that inputs come as far as decoding.

use ostinato::quant::blocks::BlockType;
use ostinato::quant::safetensors::{
    Awq, CodeMatrix, Fp8, Gptq, GptqVersion, Int8, Mxfp4, Nested, Nvfp4, PackedInts, ScaleShape, TableCodes, Tensor,
    TensorDtype, WeightError,
};
use ostinato::quant::table::TableType;

/// The most bytes of a tensor that is made.
const MOST: u64 = 1 << 16;

/// Reads numbers from the front of the input; zeros behind its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u32 {
        u32::from(self.byte()) | u32::from(self.byte()) << 8
    }

    fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }
}

/// A tensor that owns its shape and content.
struct Made {
    dtype: TensorDtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

impl Made {
    /// A tensor of this type and shape, unless the input says otherwise. Its content is the rest of the input, repeated.
    fn new(input: &mut Input<'_>, mut dtype: TensorDtype, shape: &[u64]) -> Made {
        use TensorDtype::{Bf16, E4m3, E5m2, E8m0, F16, F32, I8, I32, U8};
        let mut shape = shape.to_vec();
        let change = input.byte();
        match change {
            0xff => shape.push(1),
            0xfe => drop(shape.pop()),
            0xfd => shape.iter_mut().for_each(|n| *n = u64::MAX),
            0xf0..0xfd if !shape.is_empty() => {
                let at = usize::from(change) % shape.len();
                shape[at] = input.choose(&[0, 1, 3, 1 << 31, 1 << 32, 1 << 63, u64::MAX]);
            }
            0xe0..0xf0 => dtype = input.choose(&[F32, F16, Bf16, E4m3, E5m2, E8m0, I8, U8, I32]),
            _ => {}
        }
        let bytes = shape.iter().try_fold(dtype.bytes() as u64, |n, dim| n.checked_mul(*dim)).unwrap_or(u64::MAX);
        let short = u64::from(change == 0xdf);
        let content = if input.0.is_empty() { &[0x11][..] } else { input.0 };
        let bytes = content.iter().copied().cycle().take(bytes.min(MOST).saturating_sub(short) as usize).collect();
        Made { dtype, shape, bytes }
    }

    fn tensor(&self, name: &'static str) -> Tensor<'_> {
        Tensor { name, dtype: self.dtype, shape: &self.shape, bytes: Some(&self.bytes) }
    }
}

/// Decodes all rows. What a matrix gives must be what it promises: codes of its bits, and finite values.
fn decode(opened: Result<CodeMatrix<'_>, WeightError>, together: u32) {
    let matrix = match opened {
        Ok(matrix) => matrix,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let (rows, cols, groups) = (matrix.rows(), matrix.cols() as usize, matrix.groups());
    if u64::from(rows) * cols as u64 > 1 << 18 {
        return;
    }
    if let Some(order) = matrix.order() {
        let mut seen = vec![false; cols];
        order.iter().for_each(|col| assert!(!std::mem::replace(&mut seen[*col as usize], true), "column {col} twice"));
        assert_eq!(order.len(), cols);
    }
    let meaning = matrix.codes();
    let mut first = 0;
    while first < rows {
        let count = together.clamp(1, rows - first);
        let (elements, scales) = (count as usize * cols, count as usize * groups);
        let (mut codes, mut scales, mut minimums) = (vec![0; elements], vec![0.0; scales], vec![0.0; scales]);
        match matrix.decode(first, count, &mut codes, &mut scales, &mut minimums) {
            Ok(()) if cols > 0 => {
                assert!(meaning.bits == 8 || codes.iter().all(|code| *code < 1 << meaning.bits));
                let mut values = vec![f32::NAN; cols];
                let rows = codes.chunks_exact(cols).zip(scales.chunks_exact(groups)).zip(minimums.chunks_exact(groups));
                for ((codes, scales), minimums) in rows {
                    meaning.dequantize(codes, scales, minimums, &mut values);
                    assert!(values.iter().all(|value| value.is_finite()), "{meaning:?}");
                }
            }
            Ok(()) => {}
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        first += count;
    }
}

/// A matrix of one of the formats of safetensors checkpoints, or blocks of a GGUF type.
pub fn weights(bytes: &[u8]) {
    use TensorDtype::{Bf16, E4m3, E5m2, E8m0, F16, F32, I8, I32, U8};
    let input = &mut Input(bytes);
    let format = input.byte() % 9;
    if format == 7 {
        return blocks(input);
    }
    let bits = input.choose(&[4, 8, 2, 3, 5, 6, 0, 1, 7, 32]);
    let group = input.choose(&[32, 64, 128, 16, 48, 0, 8, 1, 4096, u32::MAX]);
    let flags = input.byte();
    let together = input.word();
    let (rows, cols) = (u64::from(input.word() % 300), u64::from(input.word() % 1000));
    let per_row = flags & 1 != 0;
    let groups = if per_row { 1 } else { cols.div_ceil(u64::from(group.max(1))) };
    let scale_type = input.choose(&[F16, F32, Bf16, U8, E8m0]);
    let packed = |n: u64| (n * u64::from(bits)).div_ceil(32);
    let shape = if per_row { ScaleShape::Row } else { ScaleShape::Group(group) };
    match format {
        0 => {
            let weight_type = input.choose(&[E4m3, E5m2]);
            let weight = Made::new(input, weight_type, &[rows, cols]);
            let (scale_shape, sizes) = match flags >> 1 & 3 {
                0 => (ScaleShape::Tensor, vec![]),
                1 => (shape, vec![rows, groups]),
                _ => {
                    let height = input.word();
                    let sizes = vec![rows.div_ceil(u64::from(height.max(1))), groups];
                    (ScaleShape::Block { rows: height, cols: group }, sizes)
                }
            };
            let scale = Made::new(input, scale_type, &sizes);
            decode(Fp8 { weight: weight.tensor("weight"), scale: scale.tensor("scale"), scale_shape }.open(), together);
        }
        1 => {
            let qweight = Made::new(input, I32, &[packed(cols), rows]);
            let qzeros = Made::new(input, I32, &[groups, packed(rows)]);
            let scales = Made::new(input, scale_type, &[groups, rows]);
            let g_idx = Made::new(input, I32, &[cols]);
            let gptq = Gptq {
                qweight: qweight.tensor("qweight"),
                qzeros: qzeros.tensor("qzeros"),
                scales: scales.tensor("scales"),
                g_idx: (flags & 2 != 0).then(|| g_idx.tensor("g_idx")),
                bits,
                group: (!per_row).then_some(group),
                symmetric: flags & 4 != 0,
                version: if flags & 8 != 0 { GptqVersion::V1 } else { GptqVersion::V2 },
            };
            decode(gptq.open(), together);
        }
        2 => {
            let qweight = Made::new(input, I32, &[cols, rows / 8]);
            let qzeros = Made::new(input, I32, &[groups, rows / 8]);
            let scales = Made::new(input, scale_type, &[groups, rows / 8 * 8]);
            let awq = Awq {
                qweight: qweight.tensor("qweight"),
                qzeros: (flags & 2 != 0).then(|| qzeros.tensor("qzeros")),
                scales: scales.tensor("scales"),
                group: (!per_row).then_some(group),
            };
            decode(awq.open(), together);
        }
        3 => {
            let whole = |n: u64| if flags & 8 != 0 { n.div_ceil(u64::from(32 / bits.clamp(1, 32))) } else { packed(n) };
            let codes = Made::new(input, I32, &[rows, whole(cols)]);
            let scale = Made::new(input, scale_type, &[rows, groups]);
            let zero_point = Made::new(input, I32, &[whole(rows), groups]);
            let g_idx = Made::new(input, I32, &[cols]);
            let ints = PackedInts {
                packed: codes.tensor("weight_packed"),
                scale: scale.tensor("weight_scale"),
                scale_shape: shape,
                zero_point: (flags & 2 != 0).then(|| zero_point.tensor("weight_zero_point")),
                g_idx: (flags & 4 != 0).then(|| g_idx.tensor("weight_g_idx")),
                shape: if flags & 16 != 0 { [rows, u64::MAX] } else { [rows, cols] },
                bits,
            };
            decode(ints.open(), together);
        }
        4 => {
            let weight = Made::new(input, I8, &[rows, cols]);
            let scale = Made::new(input, scale_type, &[rows, groups]);
            let zero_point = Made::new(input, I8, &[rows, groups]);
            let int8 = Int8 {
                weight: weight.tensor("weight"),
                scale: scale.tensor("weight_scale"),
                scale_shape: shape,
                zero_point: (flags & 2 != 0).then(|| zero_point.tensor("weight_zero_point")),
                largest: flags & 8 != 0,
            };
            decode(int8.open(), together);
        }
        5 => {
            let codes = Made::new(input, U8, &[rows, cols / 2]);
            let scale = Made::new(input, E4m3, &[rows, cols.div_ceil(16)]);
            let global = Made::new(input, F32, &[1]);
            let nvfp4 = Nvfp4 {
                packed: codes.tensor("weight_packed"),
                scale: scale.tensor("weight_scale"),
                global: global.tensor("weight_global_scale"),
                global_divides: flags & 2 != 0,
            };
            decode(nvfp4.open(), together);
        }
        8 => {
            let table = TableType::ALL[usize::from(flags & 1)];
            let elements = rows * cols;
            let scales = elements.div_ceil(u64::from(group.max(1)));
            let codes = Made::new(input, U8, &[elements.div_ceil(2), 1]);
            let largest = Made::new(input, if flags & 2 != 0 { U8 } else { F32 }, &[scales]);
            let block = input.word();
            let numbers = Made::new(input, F32, &[256]);
            let outer = Made::new(input, F32, &[scales.div_ceil(u64::from(block.max(1)))]);
            let nested = Nested {
                numbers: numbers.tensor("nested_quant_map"),
                largest: outer.tensor("nested_absmax"),
                block,
                offset: if flags & 4 != 0 { f32::INFINITY } else { 0.5 },
            };
            let table = TableCodes {
                packed: codes.tensor("weight"),
                largest: largest.tensor("absmax"),
                nested: (flags & 2 != 0).then_some(nested),
                table,
                block: group,
                shape: if flags & 16 != 0 { [rows, u64::MAX] } else { [rows, cols] },
            };
            decode(table.open(), together);
        }
        _ => {
            let blocks = cols / 32;
            let sizes = if flags & 2 != 0 { vec![2, rows / 2, blocks, 16] } else { vec![rows, blocks * 16] };
            let codes = Made::new(input, U8, &sizes);
            let sizes = if flags & 2 != 0 { vec![2, rows / 2, blocks] } else { vec![rows, blocks] };
            let scale = Made::new(input, U8, &sizes);
            decode(Mxfp4 { packed: codes.tensor("blocks"), scale: scale.tensor("scales") }.open(), together);
        }
    }
}

/// Whole blocks of a type: those whose scales and minimums pass the check have finite values.
fn blocks(input: &mut Input<'_>) {
    let kind = input.choose(&BlockType::ALL);
    let meaning = kind.codes();
    for block in input.0.chunks_exact(kind.bytes()) {
        let groups = kind.elements() / meaning.group as usize;
        let (mut codes, mut scales, mut minimums) = (vec![0; kind.elements()], vec![0.0; groups], vec![0.0; groups]);
        kind.decode(block, &mut codes, &mut scales, &mut minimums);
        assert!(meaning.bits == 8 || codes.iter().all(|code| *code < 1 << meaning.bits));
        let mut values = vec![f32::NAN; kind.elements()];
        kind.dequantize(block, &mut values);
        match kind.finite(&scales, &minimums) {
            Ok(()) => assert!(values.iter().all(|value| value.is_finite()), "{kind}"),
            Err(bad) => assert!(!bad.to_string().is_empty()),
        }
    }
}

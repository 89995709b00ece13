//! Products of a weight matrix with rows of activations: `gemv` for few rows, on row-major weights (many rows: `matmul`;
//! codes by integer dot products: `gemv_dots`);
//! and `take_last`, the row gather between a prompt step and the LM head. Also the
//! common types and references of all product kernels. Not here: weights in fragment order (`skinny`, `panel`,
//! `tiled`, `wgmma`).

pub mod codes;
pub mod codes_ptx;
pub mod fragment_layout;
pub mod gemv_dots;
pub mod matmul;
pub mod order;
pub mod panel;
pub mod skinny;
pub mod tiled;
pub mod wgmma;

use super::{Format, codes_word, fold, format_of};
use crate::kernels::host_memory::{HostMemory, PackedMatrix};
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{GemvArgs, GemvConstants, SkinnyCodesConstants, TakeLastArgs, TakeLastConstants};
use crate::kernels::tags::tagged;

/// The operation on a product before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// `y = v`
    Store,
    /// `y += v`
    Residual,
    /// The rows of W alternate gate and up: `y[i] = glu(v[2i], v[2i + 1])`.
    Gated(Glu),
    /// Squared ReLU: `y = max(v, 0)²`.
    SquaredRelu,
}

/// The number of [`Epilogue::SquaredRelu`] in kernels (`glu.glsl`).
pub(super) const SQUARED_RELU: u32 = 5;

/// A gated linear unit (`glu.glsl`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Glu {
    /// SwiGLU: `gate * sigmoid(gate) * up`.
    Silu,
    /// GeGLU: `gelu(gate) * up`, with GELU's approximation by tanh.
    GeluTanh,
    /// `g * sigmoid(1.702 g) * (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`.
    Clamped {
        /// The bits of the limit, an f32 whose lower eight bits are zero.
        limit: u32,
    },
}

impl Glu {
    /// Returns its number in kernels, which is at least 2.
    pub(super) fn code(self) -> u32 {
        match self {
            Glu::Silu => 2,
            Glu::GeluTanh => 3,
            Glu::Clamped { limit } => {
                assert_eq!(limit & 0xff, 0, "a limit of {}", f32::from_bits(limit));
                limit | 4
            }
        }
    }
}

impl Epilogue {
    /// Returns its number in kernels.
    pub(super) fn code(self) -> u32 {
        match self {
            Epilogue::Store => 0,
            Epilogue::Residual => 1,
            Epilogue::Gated(glu) => glu.code(),
            Epilogue::SquaredRelu => SQUARED_RELU,
        }
    }

    /// Returns the epilogue with a number in kernels.
    pub(super) fn of_code(code: u32) -> Epilogue {
        match code {
            0 => Epilogue::Store,
            1 => Epilogue::Residual,
            3 => Epilogue::Gated(Glu::GeluTanh),
            SQUARED_RELU => Epilogue::SquaredRelu,
            clamped if clamped & 0xff == 4 => Epilogue::Gated(Glu::Clamped { limit: clamped & !0xff }),
            _ => Epilogue::Gated(Glu::Silu),
        }
    }

    /// Returns the outputs that are made of sums only; those of [`Epilogue::Residual`] before y is added.
    pub(super) fn of_sums(self, v: &[f64]) -> Vec<f64> {
        match self {
            Epilogue::Store | Epilogue::Residual => v.to_vec(),
            Epilogue::Gated(unit) => v.chunks_exact(2).map(|pair| glu(unit.code(), pair[0], pair[1])).collect(),
            Epilogue::SquaredRelu => v.iter().map(|v| v.max(0.0).powi(2)).collect(),
        }
    }

    /// Whether results of the product are multiplied by each other, and with them their errors.
    pub fn multiplies(self) -> bool {
        matches!(self, Epilogue::Gated(_) | Epilogue::SquaredRelu)
    }

    /// Whether one output is made of two rows of W.
    pub fn halves(self) -> bool {
        matches!(self, Epilogue::Gated(_))
    }
}

/// A weight matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The numbers: row-major `[rows][cols padded to 8]`, or in fragment order for the kernels that require it. Codes:
    /// see [`crate::memory::pack::codes`].
    pub range: Range,
    /// The format of the numbers.
    pub format: Format,
    /// The number of output features.
    pub rows: u32,
    /// The number of input features, without padding.
    pub cols: u32,
}

/// Returns the bytes of a weight matrix that a call multiplies by: of a matrix whose columns are divided among several calls, each
/// has its part. `None` for calls that multiply by none; products of experts do not count.
pub fn weight_bytes(call: &Call) -> Option<u64> {
    let kernels = ["gemv", "skinny", "panel", "tiled", "matmul", "wgmma"];
    kernels.iter().find(|kernel| call.kernel.starts_with(**kernel))?;
    let matrix = call.args[0].range().bytes;
    if !call.kernel.starts_with("skinny_codes") {
        return Some(matrix);
    }
    let c = SkinnyCodesConstants::from_values(&call.constants);
    Some(matrix / u64::from(c.units.div_ceil(c.own_units * c.column_parts)))
}

/// Activations: `[rows][stride]` f32, where the stride is a multiple of 8. Kernels include the padding in their sums:
/// it must be finite, and zero where a norm is computed.
#[derive(Clone, Copy, Debug)]
pub struct Activations {
    /// The memory.
    pub range: Range,
    /// The number of floats from a row to the next.
    pub stride: u32,
}

/// The workgroups of `gemv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemvConfig {
    /// The number of invocations, a power of two.
    pub threads: u32,
    /// The number of rows of W that a workgroup computes, an even number.
    pub weight_rows: u32,
    /// The number of rows of x that a workgroup computes.
    pub batch: u32,
}

/// A product `y = epilogue(W · prologue(x))`, where the prologue is an optional RMSNorm.
#[derive(Clone, Debug)]
pub struct Product {
    /// The name of the call's span.
    pub label: String,
    /// The weight matrix W.
    pub weight: Matrix,
    /// The input x.
    pub x: Activations,
    /// RMSNorm of x before the product: the norm's weight and epsilon.
    pub norm: Option<(Range, f32)>,
    /// The bias that is added to the product.
    pub bias: Option<Range>,
    /// The operation on the product.
    pub epilogue: Epilogue,
    /// The output y.
    pub y: Activations,
}

impl Product {
    pub(super) fn touched(&self) -> (Range, Range, f32) {
        let (norm, epsilon) = self.norm.unwrap_or((self.x.range.none(), 0.0));
        (norm, self.bias.unwrap_or(self.x.range.none()), epsilon)
    }

    /// Returns the arguments of `gemv` and `gemv_dots` for `rows` rows of x.
    fn gemv_args(&self, rows: u32) -> GemvArgs {
        let (norm, bias, epsilon) = self.touched();
        GemvArgs {
            weight: self.weight.range,
            x: self.x.range,
            norm,
            bias,
            y: self.y.range,
            n: self.weight.rows,
            k: self.weight.cols,
            chunks: self.weight.cols.div_ceil(8),
            x_stride: self.x.stride,
            y_stride: self.y.stride,
            epsilon,
            rows,
        }
    }

    /// Returns the call for a few rows of x.
    ///
    /// # Panics
    /// If a workgroup computes more pairs of rows of W than it has invocations.
    pub fn gemv(&self, rows: u32, GemvConfig { threads, weight_rows, batch }: GemvConfig) -> Call {
        assert!(weight_rows / 2 * batch <= threads, "{weight_rows} rows of W, {batch} of x by {threads} threads");
        let constants = GemvConstants {
            threads,
            norm: u32::from(self.norm.is_some()),
            bias: u32::from(self.bias.is_some()),
            epilogue: self.epilogue.code(),
            rows: weight_rows,
            batch,
            lanes: threads,
            codes: codes_word(self.weight.format),
        };
        Call {
            kernel: match self.weight.format {
                Format::Bf16 => "gemv.bf16",
                Format::F16 => "gemv.f16",
                Format::F32 => "gemv.f32",
                Format::Codes(_) => "gemv.codes",
            },
            label: self.label.clone(),
            constants: constants.into_values(),
            args: self.gemv_args(rows).into_args(),
            groups: fold(self.weight.rows.div_ceil(weight_rows) * rows.div_ceil(batch), 1),
        }
    }
}

/// Returns the call that copies the last rows of a step's prompts, at most `rows`, and their row descriptors to the LM
/// head's input.
pub fn take_last(label: String, rows: u32, args: TakeLastArgs) -> Call {
    let threads = 64;
    Call {
        kernel: "take_last",
        label,
        constants: TakeLastConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [args.x_stride.div_ceil(threads), rows, 1],
    }
}

/// The operands of a product, as its reference reads them.
pub(super) struct Shape {
    pub(super) weight: Range,
    pub(super) x: Range,
    pub(super) norm: Option<Range>,
    pub(super) bias: Option<Range>,
    pub(super) y: Range,
    pub(super) n: u32,
    pub(super) k: u32,
    /// The columns of W.
    pub(super) cols: u32,
    /// The column of W that the first column of x belongs to.
    pub(super) first_col: u32,
    /// Whether W is in fragment order.
    pub(super) fragments: bool,
    pub(super) x_stride: u32,
    pub(super) y_stride: u32,
    pub(super) epsilon: f32,
    pub(super) epilogue: u32,
    /// The tag of y, if y is tagged.
    pub(super) tag: Option<u32>,
}

/// The reference of a product. It sums in f64, so that any difference to a device's result is the device's. It does not
/// read the padding; a kernel may read it, but its result must not depend on it.
pub(super) fn product(memory: &mut HostMemory, format: Format, rows: u32, s: &Shape) {
    let matrix = PackedMatrix { range: s.weight, format, fragments: s.fragments, cols: s.cols };
    let row_of_x = |row: u32| {
        let x: Vec<f64> = (0..s.k).map(|i| f64::from(memory.f32(s.x, row * s.x_stride + i))).collect();
        match s.norm {
            Some(norm) => normed(memory, x, norm, s.epsilon),
            None => x,
        }
    };
    let xs: Vec<Vec<f64>> = (0..rows).map(row_of_x).collect();
    let mut results = vec![Vec::with_capacity(s.n as usize); rows as usize];
    for r in 0..s.n {
        let weights: Vec<f64> = (0..s.k).map(|i| f64::from(memory.element(&matrix, r, s.first_col + i))).collect();
        let bias = s.bias.map_or(0.0, |b| f64::from(memory.f32(b, r)));
        for (x, v) in xs.iter().zip(&mut results) {
            let dot: f64 = x.iter().zip(&weights).map(|(x, weight)| x * weight).sum();
            v.push(dot + bias);
        }
    }
    for (row, v) in (0..).zip(&results) {
        finish(memory, s.epilogue, (s.y, s.tag), row * s.y_stride, v);
    }
}

/// Returns one row after RMSNorm.
pub(super) fn normed(memory: &HostMemory, x: Vec<f64>, norm: Range, epsilon: f32) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
    x.iter().enumerate().map(|(i, v)| v * scale * f64::from(memory.f32(norm, i as u32))).collect()
}

/// Returns the gated linear unit with number `kind`.
pub(super) fn glu(kind: u32, gate: f64, up: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match kind {
        3 => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        clamped if clamped & 0xff == 4 => {
            let limit = f64::from(f32::from_bits(clamped & !0xff));
            let gate = gate.min(limit);
            gate * sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1.0)
        }
        _ => gate * sigmoid(gate) * up,
    }
}

/// Applies the epilogue to one row of products and writes the floats of y from `first` on, with the tag if there is
/// one.
pub(super) fn finish(memory: &mut HostMemory, epilogue: u32, (y, tag): (Range, Option<u32>), first: u32, v: &[f64]) {
    let epilogue = Epilogue::of_code(epilogue);
    for (at, value) in (first..).zip(epilogue.of_sums(v)) {
        let old = if epilogue == Epilogue::Residual { f64::from(memory.f32(y, at)) } else { 0.0 };
        let value = old + value;
        match tag {
            Some(tag) => memory.set_u32(y, at, tagged(value as f32, tag)),
            None => memory.set_f32(y, at, value as f32),
        }
    }
}

pub(crate) fn reference_gemv(call: &Call, memory: &mut HostMemory) {
    let c = GemvConstants::from_values(&call.constants);
    row_major_product(call, memory, format_of(call.kernel, c.codes), [c.norm, c.bias, c.epilogue]);
}

/// The reference of `gemv` and `gemv_dots`, with their constants NORM, BIAS and EPILOGUE.
fn row_major_product(call: &Call, memory: &mut HostMemory, format: Format, [norm, bias, epilogue]: [u32; 3]) {
    let args = GemvArgs::from_args(&call.args);
    let shape = Shape {
        weight: args.weight,
        x: args.x,
        norm: (norm == 1).then_some(args.norm),
        bias: (bias == 1).then_some(args.bias),
        y: args.y,
        n: args.n,
        k: args.k,
        cols: args.k,
        first_col: 0,
        fragments: false,
        x_stride: args.x_stride,
        y_stride: args.y_stride,
        epsilon: args.epsilon,
        epilogue,
        tag: None,
    };
    product(memory, format, args.rows, &shape);
}

pub(crate) fn reference_take_last(call: &Call, memory: &mut HostMemory) {
    let a = TakeLastArgs::from_args(&call.args);
    for head in 0..call.groups[1] {
        let row = (head < memory.u32(a.chunk, 1)).then(|| memory.u32(a.chunk, a.last_at + head));
        for i in 0..a.x_stride {
            let value = row.map_or(0, |row| memory.u32(a.x, row * a.x_stride + i));
            memory.set_u32(a.head_x, head * a.x_stride + i, value);
        }
        for i in 0..4 {
            let nobody = if i == 2 { u32::MAX } else { 0 };
            let value = row.map_or(nobody, |row| memory.u32(a.rows, row * 4 + i));
            memory.set_u32(a.head_rows, head * 4 + i, value);
        }
    }
}

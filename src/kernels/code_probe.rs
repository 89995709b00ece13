//! Probes of the kernels that read quantised weights, or f16 in fragments: for a call of a model's recording, a small
//! recording that runs the same pipeline (the same kernel and constants) on a few rows of weights in which every code occurs,
//! the memory that it starts from, and the comparison of a device's results with the reference's. They show at start that a
//! driver's compiler has translated a format's kernels correctly.
//!
//! Not here: running a probe on a device (`gpu::build`).

use super::embed::rows_bytes;
use super::gemm::Epilogue;
use super::gemm::codes::expanded_bytes;
use super::gemm::codes_ptx;
use super::gemm::matmul;
use super::gemm::tiled::token_index;
use super::host_memory::{HostMemory, PackedMatrix};
use super::moe::NOBODY;
use super::recording::{Call, Op, Range, Recording};
use super::shaders::{
    self, EmbedRowsArgs, EmbedRowsConstants, ExpandCodesArgs, ExpandCodesConstants, ExpertGemvArgs,
    ExpertGemvConstants, ExpertSkinnyArgs, ExpertSkinnyConstants, GemvArgs, GemvConstants, GemvDotsConstants,
    MatmulArgs, MatmulConstants, PanelArgs, PanelConstants, SkinnyArgs, SkinnyCodesArgs, SkinnyCodesConstants,
    SkinnyConstants,
};
use super::tags::tagged;
use super::{Format, fold, format_of, format_of_word, format_word, interpreter, state};
use crate::memory::pack::codes::{sample, unit_cols};
use crate::memory::pack::{FRAGMENT_COLS, FRAGMENT_ROWS, Layout, Packing};
use half::{bf16, f16};

/// The name of the buffer of a probe's weights.
pub const WEIGHTS: &str = "probe.weight";
/// The name of the buffer of the results of a probe of `skinny_codes`.
pub const RESULTS: &str = "probe.y";
/// The number of values of a row of x that are not zero; they are adjacent. The fewer there are, the more one wrong
/// weight changes a result.
const VALUES: u32 = 64;
/// The maximum relative error of a row of results: the length of the difference over the length of the row, or over the
/// root mean square of all rows' lengths if that is more. Terms may cancel in a row, whose rounding error is large beside
/// what is left: all weights of some formats are near one number, so that rows of x which sum to zero give little. Products
/// on matrix units round x and the weights to f16, 2⁻¹¹ each, and SwiGLU multiplies two of them. One code in sixteen that
/// is read wrongly changes a row by more than 0.1.
const TOLERANCE: f64 = 2e-2;
/// The maximum number of rows of x for kernels that take any number.
const ROWS: u32 = 3;
const ROW_MAJOR: Layout = Layout::RowMajor { columns_multiple: 8 };

/// A recording of one call, the memory that it starts from, and where its results are.
#[derive(Clone, Debug)]
pub struct CodeProbe {
    /// The call, and its buffers.
    pub recording: Recording,
    /// The contents of the buffers before the call.
    pub memory: HostMemory,
    /// The results, and the number of values of a row of them.
    results: (Range, u32),
    /// Whether the results are bfloat16 values; otherwise they are floats.
    bfloat16: bool,
    /// Rows of results that are multiples of their x, by which they are divided before rows are compared.
    scaled: Vec<(u32, f64)>,
}

/// A call that reads quantised weights, or f16 in fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CodeKernel {
    /// The variant's name.
    pub kernel: &'static str,
    /// The format of its weights ([`super::format_word`]).
    pub format: u32,
    /// Other settings that change how the kernel reads weights: for experts, the stage, whether they are a part of all, and
    /// the format of the shared expert; for `gemv`, whether it computes one row of x; for `gemv_dots`, in one word the
    /// numbers of turns of a part and of groups, and in the other the numbers of rows of x and of blocks of rows of W of a
    /// workgroup, and whether there is a norm; for `panel` and `matmul`, whether it has experts, and a part of them, and for
    /// `panel` whether it multiplies in f16; otherwise zeros.
    pub variant: [u32; 2],
}

/// Returns the kernel and format of a call that reads quantised weights or f16 in fragments, and the number of rows of x for
/// which it is specialized (0 for any number); `None` for other calls.
pub fn code_kernel(call: &Call) -> Option<(CodeKernel, u32)> {
    let mut variant = [0; 2];
    let (codes, rows) = match base(call.kernel) {
        "skinny" => {
            let c = SkinnyConstants::from_values(&call.constants);
            // Whether x has values beyond f16.
            variant = [u32::from(c.norm == 1 || c.epilogue < 2), 0];
            (0, c.rows)
        }
        "skinny_codes" => {
            let c = SkinnyCodesConstants::from_values(&call.constants);
            (c.codes, c.rows)
        }
        "panel" => {
            let c = PanelConstants::from_values(&call.constants);
            let extremes = extremes(&c, format_of(call.kernel, c.codes));
            variant = [c.experts + u32::from(c.part_experts > 0), c.in_f16 + u32::from(extremes)];
            (c.codes, 16 * c.blocks)
        }
        "expand_codes" => (ExpandCodesConstants::from_values(&call.constants).codes, 0),
        "gemv" => {
            let c = GemvConstants::from_values(&call.constants);
            // One row of x has more codes in flight.
            variant = [u32::from(c.batch == 1), 0];
            (c.codes, 0)
        }
        "gemv_dots" => {
            let c = GemvDotsConstants::from_values(&call.constants);
            variant = [((c.part / c.spans) << 16) | (c.threads / c.spans), (c.batch << 16) | (c.blocks << 1) | c.norm];
            (c.codes, 0)
        }
        "matmul" => {
            let c = MatmulConstants::from_values(&call.constants);
            variant = [c.experts + u32::from(c.part_experts > 0), 0];
            (c.codes, 0)
        }
        "expert_skinny" => {
            let c = ExpertSkinnyConstants::from_values(&call.constants);
            variant = [c.stage + 2 * u32::from(c.part_experts > 0), 0];
            (c.codes, c.rows)
        }
        "embed_rows" => (EmbedRowsConstants::from_values(&call.constants).codes, 0),
        "expert_gemv" => {
            let c = ExpertGemvConstants::from_values(&call.constants);
            variant = [c.stage + 2 * u32::from(c.part_experts > 0), c.shared_codes];
            (c.codes, c.used)
        }
        _ => return None,
    };
    let format = if codes != 0 { format_of_word(codes) } else { format_of(call.kernel, 0) };
    let fragments =
        ["skinny", "panel", "expert_skinny"].contains(&base(call.kernel)) || call.kernel.ends_with(".fragments");
    let probed = match format {
        Format::Codes(_) => true,
        Format::F16 => fragments,
        Format::Bf16 | Format::F32 => false,
    };
    probed.then_some((CodeKernel { kernel: call.kernel, format: format_word(format), variant }, rows))
}

/// Returns the number of columns of a unit of a format in fragments.
fn unit_of(format: Format) -> u32 {
    format.codes().map_or(FRAGMENT_COLS, unit_cols)
}

/// Whether the probe of a call of `panel` has rows of numbers that lane groups multiply in bfloat16 although others multiply in
/// f16: if y is a multiple of x, and each of three rows can be in the columns of a lane group of its own.
fn extremes(c: &PanelConstants, format: Format) -> bool {
    let apart = c.threads >= 96 && c.chunks * FRAGMENT_COLS >= 3 * unit_of(format);
    c.in_f16 == 1 && c.epilogue < 2 && apart
}

/// Returns the number of the experts of a part (with 0, of all) among `chosen` ones that begin with its first.
fn experts_of(part: u32, chosen: u32) -> u32 {
    if part == 0 { chosen } else { part.min(chosen) }
}

/// Returns the number of outputs that the first product of experts makes of `n` rows of W; `code`: its epilogue's number.
fn outputs_of(n: u32, code: u32) -> u32 {
    if Epilogue::of_code(code).halves() { n / 2 } else { n }
}

/// The name of a kernel without its variant.
fn base(kernel: &str) -> &str {
    kernel.split('.').next().unwrap_or(kernel)
}

/// Returns the probe of a call that reads quantised weights or f16 in fragments; `None` for other calls.
pub fn probe(call: &Call) -> Option<CodeProbe> {
    let (CodeKernel { format, .. }, _) = code_kernel(call)?;
    let mut operands = Operands { recording: Recording::new("probe"), words: Vec::new(), scaled: Vec::new(), state: 1 };
    let format = format_of_word(format);
    let (call, results, bfloat16) = match base(call.kernel) {
        "skinny" => operands.skinny(call, format),
        "skinny_codes" => operands.skinny_codes(call, format),
        "panel" => operands.panel(call, format),
        "expand_codes" => operands.expand(call, format),
        "gemv" => operands.gemv(call, format),
        "gemv_dots" => operands.gemv_dots(call, format),
        "matmul" => operands.matmul(call, format),
        "embed_rows" => operands.embed(call, format),
        "expert_skinny" => operands.few_experts(call, format),
        _ => operands.experts(call, format),
    };
    let Operands { mut recording, words: buffers, scaled, .. } = operands;
    recording.name = format!("probe.{}", call.kernel);
    recording.call(call);
    Some(CodeProbe { recording, memory: HostMemory { buffers }, results, bfloat16, scaled })
}

impl CodeProbe {
    /// Returns a description of the first row of results in which `found`, the memory after the call on a device,
    /// differs from the reference; `None` if they agree.
    pub fn difference(&self, found: &HostMemory) -> Option<String> {
        let mut wanted = self.memory.clone();
        interpreter::run(&self.recording, &mut wanted);
        let (range, width) = self.results;
        let values = |memory: &HostMemory, row: u32| -> Vec<f64> {
            let value = |i: u32| match self.bfloat16 {
                true => memory.weight(Format::Bf16, range, i),
                false => memory.f32(range, i),
            };
            let scale = self.scaled.iter().find(|(of, _)| *of == row).map_or(1.0, |(_, scale)| *scale);
            (row * width..(row + 1) * width).map(|i| f64::from(value(i)) / scale).collect()
        };
        let each = if self.bfloat16 { 2 } else { 4 };
        let rows = (range.bytes / each) as u32 / width;
        let length = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let used: Vec<f64> =
            (0..rows).map(|row| length(&mut values(&wanted, row).into_iter())).filter(|l| *l > 0.0).collect();
        let typical = length(&mut used.iter().copied()) / (used.len().max(1) as f64).sqrt();
        (0..rows).find_map(|row| {
            let (wanted, found) = (values(&wanted, row), values(found, row));
            let size = length(&mut wanted.iter().copied()).max(typical);
            let error = length(&mut wanted.iter().zip(&found).map(|(a, b)| a - b));
            (error.is_nan() || error > TOLERANCE * size).then(|| {
                let call = self.recording.ops.first().map_or("", |op| if let Op::Call(c) = op { c.kernel } else { "" });
                format!("row {row} of {call} differs by {:.1e} of its size", error / size)
            })
        })
    }
}

/// The buffers of a probe under construction.
struct Operands {
    recording: Recording,
    words: Vec<Vec<u32>>,
    /// See [`CodeProbe::scaled`].
    scaled: Vec<(u32, f64)>,
    /// The state of the random number generator.
    state: u64,
}

type Built = (Call, (Range, u32), bool);

impl Operands {
    /// Returns the next pseudo-random number between -1 and 1.
    fn random(&mut self) -> f32 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn buffer(&mut self, name: &str, words: Vec<u32>) -> Range {
        let words = if words.is_empty() { vec![0] } else { words };
        let range = self.recording.buffer(&format!("probe.{name}"), words.len() as u64 * 4);
        self.words.push(words);
        range
    }

    /// Random numbers, as words of a generation of tagged ones or plain.
    fn floats(&mut self, name: &str, count: u32, tag: Option<u32>) -> Range {
        let word = |value: f32| tag.map_or(value.to_bits(), |tag| tagged(value, tag));
        let words = (0..count).map(|_| word(self.random())).collect();
        self.buffer(name, words)
    }

    fn zeros(&mut self, name: &str, words: u32) -> Range {
        self.buffer(name, vec![0; words as usize])
    }

    /// A matrix in which every code of a format occurs, or of random numbers.
    fn weight(&mut self, name: &str, format: Format, layout: Layout, rows: u32, cols: u32) -> Range {
        match format {
            Format::Codes(codes) => self.buffer(name, sample(codes, layout, rows, cols)),
            _ => {
                let bytes = Packing { rows, cols, layout, format }.bytes();
                self.numbers(name, format, (bytes / format.bytes() as u64) as u32)
            }
        }
    }

    /// Random numbers in a format, packed as rows of a multiple of eight.
    fn numbers(&mut self, name: &str, format: Format, count: u32) -> Range {
        let values: Vec<f32> = (0..count).map(|_| self.random() * 0.1).collect();
        let pair = |bits: &dyn Fn(f32) -> u16| {
            values.chunks_exact(2).map(|p| u32::from(bits(p[0])) | u32::from(bits(p[1])) << 16).collect()
        };
        let words = match format {
            Format::Bf16 => pair(&|v| bf16::from_f32(v).to_bits()),
            Format::F16 => pair(&|v| f16::from_f32(v).to_bits()),
            Format::F32 | Format::Codes(_) => values.iter().map(|v| v.to_bits()).collect(),
        };
        self.buffer(name, words)
    }

    /// Adds rows of x in which `values` adjacent values are random and the others zero. `tag` is the tag of the words.
    fn rows(&mut self, values: u32, [rows, cols, stride]: [u32; 3], tag: Option<u32>) -> Range {
        let first = |row| row * values % cols.saturating_sub(values).max(1);
        self.rows_from(first, values, [rows, cols, stride], tag)
    }

    /// Like [`Operands::rows`], with `values` numbers of each row from column `first` on.
    fn rows_from(
        &mut self,
        first: impl Fn(u32) -> u32,
        values: u32,
        [rows, cols, stride]: [u32; 3],
        tag: Option<u32>,
    ) -> Range {
        let mut words = vec![0; (rows * stride) as usize];
        for row in 0..rows {
            let first = first(row);
            for col in 0..stride {
                let used = col >= first && col < (first + values).min(cols);
                // Parts of a row differ in size, so that a part with the factor of another one is noticed.
                let value = if used { self.random() * [1.0, 0.25, 0.5][((col / 32 + row) % 3) as usize] } else { 0.0 };
                words[(row * stride + col) as usize] = tag.map_or(value.to_bits(), |tag| tagged(value, tag));
            }
        }
        self.buffer("x", words)
    }

    /// Multiplies the first row of the last buffer, of `stride` words, by a power of two, which leaves the tags of its numbers.
    fn enlarge(&mut self, stride: u32, scale: f32) {
        for word in self.words.last_mut().into_iter().flat_map(|words| words.iter_mut().take(stride as usize)) {
            // A zero with a tag is a subnormal number.
            let value = f32::from_bits(*word);
            *word = if value.is_normal() { (value * scale).to_bits() } else { *word };
        }
    }

    /// The weights of a norm over `values` columns, if there is one: values near 1.
    fn norm(&mut self, used: bool, values: u32) -> Range {
        self.scaled_norm(used, values, 1.0)
    }

    /// Like [`Operands::norm`], with values near `scale`.
    fn scaled_norm(&mut self, used: bool, values: u32, scale: f32) -> Range {
        let values = if used { values } else { 1 };
        let words = (0..values).map(|_| ((1.0 + 0.1 * self.random()) * scale).to_bits()).collect();
        self.buffer("norm", words)
    }

    /// Returns the factor of a product with a matrix of `[rows, cols]` codes whose results go through the activation `glu`. Large
    /// products hide their errors in it: one with a limit cuts them off, and the sigmoid of a large negative gate is zero. Small ones
    /// show their rounding beside terms that cancel. The factor makes the largest of them about 1; without an activation it is 1.
    fn unit_scale(&self, glu: u32, range: Range, format: Format, layout: Layout, [rows, cols]: [u32; 2]) -> f32 {
        match glu {
            0 | 1 => 1.0,
            _ => 1.0 / (8.0 * self.largest(range, format, layout == Layout::Fragments, rows, cols)),
        }
    }

    /// Returns the largest magnitude of a matrix.
    fn largest(&self, range: Range, format: Format, fragments: bool, rows: u32, cols: u32) -> f32 {
        let memory = HostMemory { buffers: self.words.clone() };
        let matrix = PackedMatrix { range, format, fragments, cols };
        let all = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
        all.map(|(row, col)| memory.element(&matrix, row, col).abs()).fold(f32::MIN_POSITIVE, f32::max)
    }

    /// A bias that is small beside the products, so that it does not hide their errors.
    fn bias(&mut self, rows: u32) -> Range {
        let words = (0..rows).map(|_| (1e-3 * self.random()).to_bits()).collect();
        self.buffer("bias", words)
    }

    fn skinny(&mut self, call: &Call, format: Format) -> Built {
        let c = SkinnyConstants::from_values(&call.constants);
        let a = SkinnyArgs::from_args(&call.args);
        let (n, width) = (FRAGMENT_ROWS * c.tiles * 2, FRAGMENT_ROWS * c.tiles * 2);
        let tag = |bit: u32, tag: u32| (c.tagged & bit != 0).then_some(tag);
        // A first row of values beyond f16, if y is a multiple of x or x is normed.
        let large = c.norm == 1 || c.epilogue < 2;
        let scale = if large { 2f32.powi(20) } else { 1.0 };
        let x = self.rows(VALUES, [c.rows, a.k, a.x_stride], tag(1, a.x_tag));
        self.enlarge(a.x_stride, scale);
        if large && c.norm == 0 {
            self.scaled = vec![(0, f64::from(scale))];
        }
        let old = tag(2, a.old_tag).map_or(0, |tag| tagged(0.0, tag));
        let y = self.buffer("y", vec![old; (c.rows * width) as usize]);
        let args = SkinnyArgs {
            weight: self.weight("weight", format, Layout::Fragments, n, c.chunks * FRAGMENT_COLS),
            x,
            norm: self.norm(c.norm == 1, a.x_stride),
            bias: self.bias(n),
            y,
            fault: self.zeros("fault", 2),
            n,
            y_stride: width,
            ..a
        };
        let call = Call { args: args.into_args(), groups: [2, 1, 1], ..call.clone() };
        (call, (y, width), false)
    }

    fn skinny_codes(&mut self, call: &Call, format: Format) -> Built {
        let c = SkinnyCodesConstants::from_values(&call.constants);
        let a = SkinnyCodesArgs::from_args(&call.args);
        // One workgroup computes all tiles of a part of the columns, one after the other. The program in PTX has groups of lanes
        // with other columns each, and uses a place of sums again from the fifth block on, if it may have so many.
        let (values, blocks) = match shaders::find(call.kernel).is_ptx() {
            true => (a.k, codes_ptx::most_blocks(&call.constants).min(6)),
            false => (VALUES, 3),
        };
        let n = FRAGMENT_ROWS * c.tiles * blocks;
        let tag = |bit: u32, tag: u32| (c.tagged & bit != 0).then_some(tag);
        let x = self.rows(values, [c.rows, a.k, a.x_stride], tag(1, a.x_tag));
        let width = n;
        let old = tag(2, a.old_tag).map_or(0, |tag| tagged(0.0, tag));
        let y = self.buffer("y", vec![old; (c.rows * width) as usize]);
        let args = SkinnyCodesArgs {
            weight: self.weight("weight", format, Layout::Fragments, n, c.units * unit_of(format)),
            x,
            norm: self.norm(c.norm == 1, a.x_stride),
            bias: self.bias(n),
            y,
            partials: self.zeros("partials", (c.column_parts - 1) * c.rows * n),
            fault: self.zeros("fault", 2),
            n,
            y_stride: width,
            ..a
        };
        let call = Call { args: args.into_args(), groups: [c.column_parts, 1, 1], ..call.clone() };
        (call, (y, width), false)
    }

    fn panel(&mut self, call: &Call, format: Format) -> Built {
        let c = PanelConstants::from_values(&call.constants);
        let a = PanelArgs::from_args(&call.args);
        let (cols, n) = (c.chunks * FRAGMENT_COLS, 2 * FRAGMENT_ROWS * c.tiles);
        // Rows sorted by expert fill whole tiles.
        let tile = FRAGMENT_ROWS * c.blocks;
        let rows = if c.experts == 1 { tile } else { ROWS };
        let packed_rows = rows.next_multiple_of(FRAGMENT_ROWS);
        let padded = cols.next_multiple_of(unit_of(format));
        // Two experts, or one if a part has no more.
        let experts = if c.part_experts == 1 { 1 } else { 2 };
        let weight = self.weight("weight", format, Layout::Fragments, experts * n, padded);
        let scale = self.unit_scale(c.epilogue, weight, format, Layout::Fragments, [experts * n, padded]);
        let mut x = vec![0u32; (packed_rows * cols / 2) as usize];
        let extremes = extremes(&c, format);
        let step = if extremes { unit_of(format) } else { VALUES };
        if extremes {
            // Too small, too large.
            self.scaled = vec![(1, f64::from(2f32.powi(-20))), (2, f64::from(2f32.powi(20)))];
        }
        for row in 0..ROWS {
            let scale = self.scaled.iter().find(|(of, _)| *of == row).map_or(scale, |(_, scale)| *scale as f32);
            let first = row * step % (cols - VALUES.min(cols - 1));
            for col in first..(first + VALUES).min(a.k) {
                let at = token_index(row, col, cols);
                x[at / 2] |= u32::from(bf16::from_f32(self.random() * scale).to_bits()) << (16 * (at % 2));
            }
        }
        let x = self.buffer("x", x);
        // Packed rows of y are blocks of 16 rows and 32 columns.
        let chunks = (n / 2).div_ceil(FRAGMENT_COLS);
        let (y_words, y_stride, width) = match c.packed {
            0 => (ROWS * n, n, n),
            _ => (packed_rows * chunks * FRAGMENT_COLS / 2, chunks, FRAGMENT_ROWS * FRAGMENT_COLS),
        };
        // One tile of the last of them.
        let expert = if c.experts == 1 { c.first_expert + experts - 1 } else { 0 };
        let biases = (c.first_expert + experts) * n;
        let slots = (0..tile).map(|slot| if slot < ROWS { slot } else { NOBODY }).collect();
        let y = self.zeros("y", y_words);
        let squares = match c.fold {
            1 => vec![1f32.to_bits(); (FRAGMENT_ROWS * c.parts) as usize],
            _ => vec![0; (FRAGMENT_ROWS * n / 16) as usize],
        };
        let args = PanelArgs {
            weight,
            x,
            bias: if extremes { self.zeros("bias", biases) } else { self.bias(biases) },
            y,
            squares: self.buffer("squares", squares),
            norm: self.norm(c.fold == 2, n),
            next: self.zeros("next", FRAGMENT_ROWS * n / 2),
            tiles: self.buffer("tiles", vec![expert]),
            slots: self.buffer("slots", slots),
            n,
            rows,
            y_stride,
            ..a
        };
        let call = Call { args: args.into_args(), groups: [2, 1, 1], ..call.clone() };
        (call, (y, width), c.packed == 1)
    }

    fn expand(&mut self, call: &Call, format: Format) -> Built {
        let c = ExpandCodesConstants::from_values(&call.constants);
        let a = ExpandCodesArgs::from_args(&call.args);
        let (rows, cols) = (2 * FRAGMENT_ROWS, a.chunks * FRAGMENT_COLS);
        let y = self.zeros("y", expanded_bytes(rows, cols) as u32 / 4);
        let weight = self.weight("weight", format, Layout::Fragments, rows, c.units * unit_of(format));
        let args = ExpandCodesArgs { weight, y, row_blocks: 2, ..a };
        let groups = fold((2 * c.units).div_ceil(c.threads / 32), 1);
        // A fragment is 16 rows of 32 columns.
        (Call { args: args.into_args(), groups, ..call.clone() }, (y, FRAGMENT_ROWS * FRAGMENT_COLS), true)
    }

    fn gemv(&mut self, call: &Call, format: Format) -> Built {
        let c = GemvConstants::from_values(&call.constants);
        self.row_major(call, format, c.norm == 1, 16 * c.rows, fold(16 * ROWS.div_ceil(c.batch), 1))
    }

    fn gemv_dots(&mut self, call: &Call, format: Format) -> Built {
        let c = GemvDotsConstants::from_values(&call.constants);
        // Fewer blocks than a workgroup may have: the reference takes time.
        let each = c.rows * (c.threads / c.spans) * c.blocks.min(4);
        let n = each.next_multiple_of(16);
        self.row_major(call, format, c.norm == 1, n, fold(n.div_ceil(each) * ROWS.div_ceil(c.batch), 1))
    }

    /// Returns the probe of `gemv` or `gemv_dots` for `n` rows of W and `ROWS` rows of x, whose numbers are in the first, the
    /// middle and the last columns.
    fn row_major(&mut self, call: &Call, format: Format, norm: bool, n: u32, groups: [u32; 3]) -> Built {
        let a = GemvArgs::from_args(&call.args);
        let y = self.zeros("y", ROWS * n);
        let args = GemvArgs {
            weight: self.weight("weight", format, ROW_MAJOR, n, a.k),
            x: self.rows_from(|row| row * (a.k - VALUES.min(a.k)) / (ROWS - 1), VALUES, [ROWS, a.k, a.x_stride], None),
            norm: self.norm(norm, a.x_stride),
            bias: self.bias(n),
            y,
            n,
            y_stride: n,
            rows: ROWS,
            ..a
        };
        (Call { args: args.into_args(), groups, ..call.clone() }, (y, n), false)
    }

    fn matmul(&mut self, call: &Call, format: Format) -> Built {
        let c = MatmulConstants::from_values(&call.constants);
        let a = MatmulArgs::from_args(&call.args);
        let order = matmul::order_of(call.kernel);
        // A tile of one expert, if the rows are sorted by expert; its rows keep their order.
        let (n, k) = (c.features, a.chunks * 8);
        let rows = if a.rows == 0 { ROWS } else { a.rows };
        let used = if c.experts == 1 { c.tokens } else { rows };
        let cols = k.next_multiple_of(32);
        let padded = rows.next_multiple_of(8);
        let mut values = vec![0f32; (padded * cols) as usize];
        for row in 0..used {
            let first = row * VALUES % k.saturating_sub(VALUES).max(1);
            for col in first..(first + VALUES).min(k) {
                values[matmul::blocked_index(order, row, col, cols) as usize] = self.random();
            }
        }
        let x = match order {
            0 => values.iter().map(|v| v.to_bits()).collect(),
            _ => {
                let half = |v: f32| u32::from(f16::from_f32(v).to_bits());
                values.chunks_exact(2).map(|pair| half(pair[0]) | half(pair[1]) << 16).collect()
            }
        };
        let weight = self.weight("weight", format, ROW_MAJOR, n, k);
        let scale = self.unit_scale(c.epilogue, weight, format, ROW_MAJOR, [n, k]);
        let y = self.zeros("y", used * n);
        let tiles = rows.div_ceil(c.tokens);
        let slots = (0..rows).map(|row| if row < used { row } else { NOBODY }).collect();
        let expert = |tile: u32| if tile == 0 { c.first_expert } else { NOBODY };
        let args = MatmulArgs {
            weight,
            x: self.buffer("x", x),
            scales: self.buffer("scales", vec![scale.to_bits(); padded as usize]),
            bias: self.bias((c.first_expert + 1) * n),
            y,
            count: self.buffer("count", vec![0, 0, rows, 0]),
            tiles: self.buffer("tiles", (0..tiles).map(expert).collect()),
            slots: self.buffer("slots", slots),
            partials: self.zeros("partials", tiles * c.splits * c.tokens * c.features),
            counters: self.zeros("counters", tiles),
            n,
            y_stride: n,
            ..a
        };
        let groups = [tiles, 1, c.splits];
        (Call { args: args.into_args(), groups, ..call.clone() }, (y, n), false)
    }

    fn embed(&mut self, call: &Call, format: Format) -> Built {
        let c = EmbedRowsConstants::from_values(&call.constants);
        let a = EmbedRowsArgs::from_args(&call.args);
        let layout = if call.kernel.ends_with(".fragments") { Layout::Fragments } else { ROW_MAJOR };
        let (rows, vocabulary) = (FRAGMENT_ROWS, 2 * FRAGMENT_ROWS);
        let token = |row: u32| (row * 5 + 3) % vocabulary;
        // The descriptor of one prompt in slot 0, or a slot for each row.
        let mut chunk = vec![0; (a.tokens_at + rows).max(8) as usize];
        chunk[..3].copy_from_slice(&[1, 0, rows]);
        let mut slots = vec![0; (rows * state::SLOT_WORDS) as usize];
        for row in 0..rows {
            chunk[(a.tokens_at + row) as usize] = token(row);
            let at = (row * state::SLOT_WORDS) as usize;
            slots[at + state::SLOT_ACTIVE as usize] = state::ACTIVE_RUNNING;
            slots[at + state::SLOT_TOKEN as usize] = token(row);
        }
        let width = a.x_stride;
        let x = self.zeros("x", rows * width);
        let args = EmbedRowsArgs {
            embedding: self.weight("weight", format, layout, vocabulary, a.chunks * 8),
            slots: self.buffer("slots", slots),
            batch: self.buffer("batch", (0..rows).collect()),
            chunk: if c.prefill == 1 { self.buffer("chunk", chunk) } else { self.zeros("chunk", 1) },
            x,
            rows: self.zeros("rows", rows_bytes(rows) as u32 / 4),
            part_first: 0,
            part_rows: vocabulary,
            ..a
        };
        let groups = [call.groups[0], rows, 1];
        (Call { args: args.into_args(), groups, ..call.clone() }, (x, width), false)
    }

    fn few_experts(&mut self, call: &Call, format: Format) -> Built {
        let c = ExpertSkinnyConstants::from_values(&call.constants);
        let a = ExpertSkinnyArgs::from_args(&call.args);
        // Two tiles of each expert, or, for the second stage of the program in PTX, more than its places of sums, if it may have so
        // many. Each row chooses one expert later than the row before; the first row begins with those of the part. Only they have
        // weights.
        let tiles = match shaders::find(call.kernel).is_ptx() && c.stage == 1 {
            true => codes_ptx::most_expert_blocks(&call.constants).min(6),
            false => 2,
        };
        let n = tiles * FRAGMENT_ROWS * c.tiles;
        let shift = |row: u32| row.min(c.count - c.chosen);
        let own = experts_of(c.part_experts, c.chosen + shift(c.rows - 1));
        let word = |value: f32, tag: u32| if c.tagged == 1 { tagged(value, tag) } else { value.to_bits() };
        // An expert's place, counted from the part's first.
        let place = |id: u32| (id + c.count - c.first_expert) % c.count;
        let logit = |row: u32, id: u32| match id < c.count && (shift(row)..shift(row) + c.chosen).contains(&place(id)) {
            true => -0.1 * place(id) as f32,
            // The shared expert's gate.
            false if id == c.count => 0.0,
            false => -50.0,
        };
        let logits = (0..c.rows * a.logits_stride)
            .map(|i| word(logit(i / a.logits_stride, i % a.logits_stride), a.logits_tag))
            .collect();
        let weight = self.weight("weight", format, Layout::Fragments, own * n, c.columns);
        let glu = if c.stage == 0 { c.glu } else { 0 };
        let norm = self.unit_scale(glu, weight, format, Layout::Fragments, [own * n, c.columns]);
        // Groups of lanes of the program in PTX have columns of their own.
        let values = if shaders::find(call.kernel).is_ptx() { c.columns } else { VALUES };
        let (values, x_cols) = if c.stage == 0 { (values, c.columns) } else { (a.x_stride, a.x_stride) };
        let tag = (c.tagged == 1).then_some(a.x_tag);
        // In the first stage, a row of y is the parts of all choices.
        let width = match c.stage {
            0 => (c.chosen + c.shared) * outputs_of(n, c.glu).next_multiple_of(FRAGMENT_COLS),
            _ => n,
        };
        let y = self.buffer("y", vec![word(0.0, a.old_tag); (c.rows * width) as usize]);
        let shared_cols = if c.stage == 0 { c.columns } else { c.shared_columns };
        let shared_weight = match c.shared {
            0 => self.zeros("shared_weight", 1),
            // The shared expert's output.
            2 => self.floats("shared_output", c.rows * width, (c.tagged == 1).then_some(a.shared_tag)),
            _ => self.weight("shared_weight", format, Layout::Fragments, n, shared_cols),
        };
        let x = self.rows(values, [c.rows, x_cols, a.x_stride], tag);
        if c.stage == 0 && format == Format::F16 {
            // Values beyond f16 in a row that is normed.
            self.enlarge(a.x_stride, 2f32.powi(20));
        }
        let args = ExpertSkinnyArgs {
            weight,
            shared_weight,
            x,
            norm: self.scaled_norm(c.stage == 0, a.x_stride, norm),
            logits: self.buffer("logits", logits),
            y,
            fault: self.zeros("fault", 2),
            bias: self.bias(c.count * n),
            choice_bias: self.zeros("choice_bias", c.count),
            expert_scales: self.buffer("expert_scales", vec![1f32.to_bits(); c.count as usize]),
            n,
            shared_n: c.shared * n,
            y_stride: width,
            ..a
        };
        let groups = match shaders::find(call.kernel).is_ptx() {
            // Workgroups of the program in PTX have several blocks.
            true => [if c.stage == 0 { 3 } else { 1 }, 1, 1],
            false => fold(if c.stage == 0 { 2 * (own.max(c.chosen) + c.shared) } else { 2 }, 1),
        };
        (Call { args: args.into_args(), groups, ..call.clone() }, (y, width), false)
    }

    fn experts(&mut self, call: &Call, format: Format) -> Built {
        let c = ExpertGemvConstants::from_values(&call.constants);
        let a = ExpertGemvArgs::from_args(&call.args);
        let (rows, choices) = (if c.used == 0 { ROWS } else { c.used }, c.chosen + c.shared);
        // Each row chooses the same experts, the first of the part, which are the only ones with weights; and others if the part
        // has fewer.
        let n = 4 * c.rows;
        let own = experts_of(c.part_experts, c.chosen);
        let choice = |j: u32| {
            let id = if j < c.chosen { c.first_expert + j } else { 0 };
            [id, (0.5 + 0.1 * j as f32).to_bits()]
        };
        let chosen = (0..rows).flat_map(|_| (0..choices).flat_map(choice)).collect();
        // The first part's call computes the shared expert.
        let shared = a.shared_chunks > 0;
        let shared_n = if shared { n } else { 0 };
        let shared_cols = if c.stage == 0 { a.k } else { a.shared_chunks * 8 };
        let weight = self.weight("weight", format, ROW_MAJOR, own * n, a.k);
        let shared_weight = match shared {
            true => match format_of_word(c.shared_codes) {
                format @ Format::Codes(_) => self.weight("shared_weight", format, ROW_MAJOR, n, shared_cols),
                format => self.numbers("shared_weight", format, n * shared_cols.next_multiple_of(8)),
            },
            false => self.zeros("shared_weight", 1),
        };
        let glu = if c.stage == 0 { c.glu } else { 0 };
        let norm = self.unit_scale(glu, weight, format, ROW_MAJOR, [own * n, a.k]);
        // In the second stage, a row of x is the parts of all choices.
        let (values, x_cols) = if c.stage == 0 { (VALUES, a.k) } else { (a.x_stride, a.x_stride) };
        let y = self.zeros("y", rows * a.y_stride);
        let args = ExpertGemvArgs {
            weight,
            shared_weight,
            x: self.rows(values, [rows, x_cols, a.x_stride], None),
            norm: self.scaled_norm(c.stage == 0, a.x_stride, norm),
            choices: self.buffer("choices", chosen),
            count: self.buffer("count", vec![0, 0, rows, 0]),
            y,
            bias: self.bias((c.first_expert + own) * n),
            n,
            shared_n,
            part: if c.stage == 0 { outputs_of(n, c.glu).next_multiple_of(FRAGMENT_COLS) } else { a.part },
            ..a
        };
        let heights = if c.stage == 0 { rows * choices } else { rows };
        let groups = fold(n.div_ceil(c.rows), heights);
        (Call { args: args.into_args(), groups, ..call.clone() }, (y, a.y_stride), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::gemm::codes::{CodesConfig, ProductColumns, expand_codes, skinny_codes, units};
    use crate::kernels::gemm::gemv_dots::{self, DotsConfig};
    use crate::kernels::gemm::matmul::{Arithmetic, Blocked, MatmulConfig, MatmulRows, Scratch};
    use crate::kernels::gemm::panel::{Fold, PanelConfig, panel};
    use crate::kernels::gemm::skinny::{self, Matrices, SkinnyConfig};
    use crate::kernels::gemm::tiled::{Output, Packed, PackedOrder, Tiled};
    use crate::kernels::gemm::{Activations, GemvConfig, Glu, Matrix, Product};
    use crate::kernels::moe::{ExpertsShape, FewRows, GemvRows, Grouped, Mlp, Sorted, Stack, Used};
    use crate::kernels::tags::Flow;
    use crate::quant::blocks::BlockType;

    fn calls(format: Format) -> Vec<Call> {
        let mut r = Recording::new("calls");
        let (rows, cols) = (512, 768);
        let weight = Matrix { range: r.buffer("weight", 1 << 20), format, rows, cols };
        let biased = r.buffer("bias", 4 * u64::from(rows));
        let product = |epilogue, norm| Product {
            label: "product".to_owned(),
            weight,
            x: Activations { range: weight.range, stride: cols },
            norm,
            bias: None,
            epilogue,
            y: Activations { range: weight.range, stride: rows },
        };
        let config = CodesConfig { threads: 64, tiles: 2, ahead: 1, workgroups: 8 };
        let flow = Flow { input_carried: true, input: 3, old: 127, output: Some(64) };
        let skinny = |product: &Product, rows, flow| {
            let all = 0..units(&product.weight);
            skinny_codes(product, rows, Matrices::Emulated, config, ProductColumns::Of(all), flow, weight.range)
        };
        let norm = Some((weight.range, 1e-5));
        let config = MatmulConfig { tokens: 16, features: 32, words: 1, each: 4, splits: 2 };
        let scratch = Scratch { partials: weight.range, counters: weight.range };
        let many = |arithmetic| {
            let x = Blocked { range: weight.range, scales: weight.range, cols, arithmetic };
            product(Epilogue::Residual, None).matmul(x, MatmulRows::All(16), 0, config, scratch)
        };
        let packed = Packed { range: weight.range, cols, order: PackedOrder::Fragments };
        let panels_by = |matrices, epilogue, y| {
            let config = PanelConfig { threads: 128, tiles: 2, ahead: 1, blocks: 1, in_f16: true };
            let product = Tiled { label: "panel".to_owned(), weight, x: packed, bias: None, epilogue, y };
            panel(&product, 16, matrices, config, Fold::None)
        };
        let panels = |epilogue, y| panels_by(Matrices::Emulated, epilogue, y);
        let y = Output::Rows(Activations { range: weight.range, stride: rows });
        let dots = DotsConfig {
            groups: 2,
            lanes: 8,
            weight_rows: 4,
            batch: 3,
            workgroups: 20,
            subgroup: 4,
            shared_bytes: 16 << 10,
        };
        let mut calls = vec![
            product(Epilogue::Store, None).gemv(1, GemvConfig { threads: 64, weight_rows: 2, batch: 1 }),
            product(Epilogue::Gated(Glu::Silu), norm).gemv(5, GemvConfig { threads: 64, weight_rows: 4, batch: 4 }),
            many(Arithmetic::F32),
            many(Arithmetic::F16),
            skinny(&product(Epilogue::Store, norm), 1, Flow::NONE),
            skinny(&product(Epilogue::Gated(Glu::Silu), norm), 4, flow),
            skinny(&product(Epilogue::Residual, None), 16, flow),
            skinny(&Product { bias: Some(biased), ..product(Epilogue::Store, None) }, 4, Flow::NONE),
            skinny(
                &Product { y: Activations { range: biased, stride: 16 }, ..product(Epilogue::Store, None) },
                2,
                flow,
            ),
            Product { bias: Some(biased), ..product(Epilogue::Store, None) }
                .gemv(1, GemvConfig { threads: 64, weight_rows: 2, batch: 1 }),
            expand_codes("expand".to_owned(), &weight, (0, rows), Matrices::Emulated, weight.range),
            panels(Epilogue::Store, y),
            // In f16, with rows of numbers beyond it.
            panels_by(Matrices::Cooperative, Epilogue::Residual, y),
            panels(Epilogue::Gated(Glu::Silu), Output::Packed(Packed { cols: rows / 2, ..packed })),
        ];
        if gemv_dots::serves(format) {
            calls.push(product(Epilogue::Gated(Glu::Silu), norm).gemv_dots(5, dots));
        }
        calls
    }

    /// Goal: the comparison passes for right results, and fails if all weights with one code are read as their neighbor
    /// of the other sign. Method: the reference itself, on the probe's weights and on weights with that code replaced.
    #[test]
    fn a_wrong_code_is_a_difference() {
        for blocks in [BlockType::Q4_K, BlockType::Q6_K, BlockType::Q8_0, BlockType::Q5_K, BlockType::MXFP4] {
            for call in calls(Format::Codes(blocks.codes())) {
                let (kernel, _) = code_kernel(&call).expect("a kernel of codes");
                assert_eq!(format_of_word(kernel.format), Format::Codes(blocks.codes()));
                let probe = probe(&call).expect("a probe");
                let mut right = probe.memory.clone();
                interpreter::run(&probe.recording, &mut right);
                assert_eq!(probe.difference(&right), None, "{blocks:?} {}", call.kernel);

                let at = probe.recording.buffers.iter().position(|b| b.name == WEIGHTS).expect("weights");
                let mut wrong = probe.memory.clone();
                for word in &mut wrong.buffers[at][64..] {
                    *word ^= 0x8888_8888;
                }
                interpreter::run(&probe.recording, &mut wrong);
                assert!(probe.difference(&wrong).is_some(), "{blocks:?} {}", call.kernel);
            }
        }
    }

    /// Goal: as above, for weights in f16 in fragments. Method: bits of the weights are changed.
    #[test]
    fn wrong_bits_of_f16_are_a_difference() {
        let mut r = Recording::new("calls");
        let (rows, cols) = (256, 768);
        let weight = Matrix { range: r.buffer("weight", 1 << 20), format: Format::F16, rows, cols };
        let range = weight.range;
        let floats = |stride| Activations { range, stride };
        let flow = Flow { input_carried: true, input: 3, old: 127, output: Some(64) };
        let config = SkinnyConfig { threads: 64, tiles: 2, ahead: 2 };
        let skinny = |epilogue, norm, rows_of_x, flow| {
            let label = "product".to_owned();
            let product = Product { label, weight, x: floats(cols), norm, bias: None, epilogue, y: floats(rows) };
            skinny::skinny(&product, rows_of_x, Matrices::Emulated, config, flow, range)
        };
        let norm = Some((range, 1e-5));
        let mut calls = vec![
            skinny(Epilogue::Store, None, 1, Flow::NONE),
            skinny(Epilogue::Gated(Glu::Silu), norm, 5, flow),
            skinny(Epilogue::Residual, None, 2, flow),
        ];
        for matrices in [Matrices::Emulated, Matrices::Cooperative] {
            let x = Packed { range, cols, order: PackedOrder::Fragments };
            let (label, y) = ("panel".to_owned(), Output::Rows(floats(rows)));
            let product = Tiled { label, weight, x, bias: None, epilogue: Epilogue::Residual, y };
            let config = PanelConfig { threads: 128, tiles: 2, ahead: 1, blocks: 1, in_f16: false };
            calls.push(panel(&product, 16, matrices, config, Fold::None));
        }
        for epilogue in EPILOGUES {
            let of_experts = expert_calls(Format::F16, &[8], epilogue).into_iter();
            calls.extend(of_experts.filter(|call| code_kernel(call).is_some()));
        }
        assert_eq!(calls.len(), 13);
        for call in calls {
            let probe = probe(&call).expect("a probe");
            let mut right = probe.memory.clone();
            interpreter::run(&probe.recording, &mut right);
            assert_eq!(probe.difference(&right), None, "{}", call.kernel);

            let at = probe.recording.buffers.iter().position(|b| b.name == WEIGHTS).expect("weights");
            let mut wrong = probe.memory.clone();
            wrong.buffers[at].iter_mut().for_each(|word| *word ^= 0x8888_8888);
            interpreter::run(&probe.recording, &mut wrong);
            assert!(probe.difference(&wrong).is_some(), "{}", call.kernel);
        }
    }

    /// Those of experts with a gate and without one.
    const EPILOGUES: [Epilogue; 2] = [Epilogue::Gated(Glu::Silu), Epilogue::SquaredRelu];

    /// Returns the calls of experts of codes that are divided among buffers of these numbers of experts, in all ways.
    fn expert_calls(format: Format, sizes: &[u32], epilogue: Epilogue) -> Vec<Call> {
        let mut r = Recording::new("calls");
        let shape = ExpertsShape {
            count: sizes.iter().sum(),
            chosen: 4,
            inner: 256,
            hidden: 256,
            shared_inner: None,
            normalise: true,
            epilogue,
            gated: false,
        };
        let (rows, bytes) = (4, 1 << 20);
        let range = r.buffer("weight", bytes);
        let stacks = |each: u32, cols: u32| -> Vec<Stack> {
            let firsts = sizes.iter().scan(0, |next, own| Some(std::mem::replace(next, *next + own)));
            let matrix = |own: &u32| Matrix { range, format, rows: own * each, cols };
            sizes.iter().zip(firsts).map(|(own, first)| Stack { matrix: matrix(own), first }).collect()
        };
        let floats = |stride: u32| Activations { range, stride };
        let mlp = Mlp {
            label: "layers.0.".to_owned(),
            shape,
            gate_up: stacks(shape.first_rows(shape.inner), shape.hidden),
            down: stacks(shape.hidden, shape.inner),
            shared: None,
            biases: [Some(range), Some(range)],
            x: floats(shape.hidden),
            y: floats(shape.hidden),
            adds: true,
            routing: None,
            norm: (range, 1e-5),
            logits: floats(shape.count.next_multiple_of(4)),
        };
        let middle = floats(shape.middle_stride());
        let config = SkinnyConfig { threads: 64, tiles: 1, ahead: 8 };
        let (flow, logits, matrices) = (Flow::NONE, Flow::NONE, Matrices::Emulated);
        let few = FewRows { middle, rows, matrices, config, ptx: None, flow, logits, fault: range, shared: None };
        let gemv = GemvRows { used: Used { rows, count: None }, choices: range, threads: 64 };
        let panel = PanelConfig { threads: 64, tiles: 1, ahead: 1, blocks: 1, in_f16: false };
        let panel = Grouped::Panel(matrices, [panel; 2]);
        let sorted = Sorted::new(&shape, rows, 16, range, range);
        let packed = Packed { range, cols: 256, order: PackedOrder::Fragments };
        let x = Blocked { range, scales: range, cols: 256, arithmetic: Arithmetic::F32 };
        let config = MatmulConfig { tokens: 16, features: 32, words: 1, each: 4, splits: 1 };
        let mut calls = Vec::new();
        for stack in &mlp.gate_up {
            calls.push(mlp.few_gate_up(stack, few));
            calls.push(mlp.gemv_gate_up(stack, gemv, middle));
            let y = if shape.packs_middle(packed.order) { Output::Packed(packed) } else { Output::Rows(middle) };
            calls.push(mlp.sorted_gate_up(stack, packed, y, &sorted, panel));
            calls.push(mlp.matmul_gate_up(stack, x, middle, &sorted, config));
        }
        for stack in &mlp.down {
            calls.push(mlp.few_down(stack, few));
            calls.push(mlp.gemv_down(stack, gemv, middle));
            calls.push(mlp.sorted_down(stack, packed, middle, &sorted, panel));
            calls.push(mlp.matmul_down(stack, x, middle, &sorted, config));
        }
        calls
    }

    /// Goal: the probes of experts that are divided among buffers read the weights of their part. Method: as above, with parts
    /// of more experts than a row chooses, of fewer, and of one; kernels for parts have probes of their own.
    #[test]
    fn a_wrong_code_of_experts_in_several_buffers_is_a_difference() {
        let format = Format::Codes(BlockType::Q8_0.codes());
        let whole: Vec<CodeKernel> =
            expert_calls(format, &[8], EPILOGUES[0]).iter().filter_map(code_kernel).map(|(kernel, _)| kernel).collect();
        assert_eq!(whole.len(), 8);
        for call in EPILOGUES.into_iter().flat_map(|epilogue| expert_calls(format, &[5, 2, 1], epilogue)) {
            let (kernel, _) = code_kernel(&call).expect("a kernel of codes");
            assert!(!whole.contains(&kernel), "{kernel:?}");
            let probe = probe(&call).expect("a probe");
            let mut right = probe.memory.clone();
            interpreter::run(&probe.recording, &mut right);
            assert_eq!(probe.difference(&right), None, "{} {:?}", call.kernel, call.constants);

            let at = probe.recording.buffers.iter().position(|b| b.name == WEIGHTS).expect("weights");
            let mut wrong = probe.memory.clone();
            for word in &mut wrong.buffers[at][64..] {
                *word ^= 0x8888_8888;
            }
            interpreter::run(&probe.recording, &mut wrong);
            assert!(probe.difference(&wrong).is_some(), "{} {:?}", call.kernel, call.constants);
        }
    }

    /// Goal: rounding is no difference, also in rows whose terms cancel. Method: products of many rows with SwiGLU, whose x
    /// is changed by up to a thousandth of each value, as if it were rounded to f16 with sums in f16.
    #[test]
    fn rounding_is_no_difference_where_terms_cancel() {
        for blocks in [BlockType::Q4_K, BlockType::Q5_K, BlockType::Q4_1, BlockType::Q8_0] {
            let mut r = Recording::new("calls");
            let (rows, cols, tokens) = (512, 4096, 256u32);
            let weight =
                Matrix { range: r.buffer("weight", 1 << 23), format: Format::Codes(blocks.codes()), rows, cols };
            let range = weight.range;
            let product = Product {
                label: "product".to_owned(),
                weight,
                x: Activations { range, stride: cols },
                norm: None,
                bias: None,
                epilogue: Epilogue::Gated(Glu::Silu),
                y: Activations { range, stride: rows / 2 },
            };
            let config = MatmulConfig { tokens: 64, features: 64, words: 2, each: 4, splits: 1 };
            let x = Blocked { range, scales: range, cols, arithmetic: Arithmetic::F32 };
            let scratch = Scratch { partials: range, counters: range };
            let call = product.matmul(x, MatmulRows::All(tokens), 0, config, scratch);
            let probe = probe(&call).expect("a probe");
            let at = probe.recording.buffers.iter().position(|b| b.name == "probe.x").expect("x");
            let mut rounded = probe.memory.clone();
            for (index, word) in rounded.buffers[at].iter_mut().enumerate() {
                let error = [1.001, 0.999, 1.0][index % 3];
                *word = (f32::from_bits(*word) * error).to_bits();
            }
            interpreter::run(&probe.recording, &mut rounded);
            assert_eq!(probe.difference(&rounded), None, "{blocks:?}");
        }
    }
}

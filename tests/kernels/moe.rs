//! Goal: the kernels of a mixture of experts match their `reference()`, and every path through them matches the
//! formula: few rows and many rows on weights in fragment order, and any number of rows on row-major weights. Method:
//! as in `kernels.rs` and `tiled.rs`, seeded shapes including awkward ones, a device and the interpreter starting from
//! the same memory. The weights of experts that no row chooses are NaN, and so is everything next to readable values.
//! The router's logits are given, not computed: ties, rows of NaN, all rows with the same expert.
//!
//! Tolerances: 2e-5 for rows of floats, as in `kernels.rs`. 1e-4 where each value is split into two parts of 16 bits,
//! which cuts off up to 2^-16 of it in each of two successive products. Where rows are packed in 16 bits, a value may
//! be rounded to the other neighbor, which changes the results: 1e-2, as in `tiled.rs`. A wrong expert or row changes a
//! value by about 1.

use crate::assembler::Assembler;
use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, every_case, round, ways};
use crate::ptx;
use ostinato::kernels::code_probe;
use ostinato::kernels::codes_word;
use ostinato::kernels::gemm::codes_ptx::{self, CodesPtxConfig};
use ostinato::kernels::gemm::matmul::{Arithmetic, Blocked, MatmulConfig, MatmulRows, block_rows};
use ostinato::kernels::gemm::panel;
use ostinato::kernels::gemm::skinny::{Matrices, SkinnyConfig};
use ostinato::kernels::gemm::tiled::{Output, Packed, PackedOrder, TILE_TOKENS, Tile, pack_sorted};
use ostinato::kernels::gemm::{Activations, Epilogue, Glu, Matrix};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::moe::{ExpertsShape, FewRows, GemvRows, Grouped, Mlp, Route, Sorted, Stack, Used};
use ostinato::kernels::recording::{BufferId, Op, Range};
use ostinato::kernels::shaders::ExpertSkinnyConstants;
use ostinato::kernels::tags::{CALL_SHIFT, Flow, tagged};
use ostinato::memory::pack::codes::unit_cols;
use ostinato::memory::pack::{self, Format, Layout, Packing, RowMap, SourceFormat};
use ostinato::quant::blocks::BlockType;
use ostinato::quant::number::Number;
use ostinato::quant::quantize::{INT4, INT8};
use ostinato::quant::{Codes, Minimum};
use std::cell::Cell;

const EPSILON: f32 = 1e-3;
/// Tolerances, explained at the top of the file.
const SUMS: f32 = 2e-5;
const SPLIT: f32 = 1e-4;
const ROUNDED: f32 = 1e-2;
const TAGS: [u32; 4] = [5, 127, 1, 64];

fn check(vulkan: &Vulkan, cases: &Cases, reference: &HostMemory) {
    for driver in Driver::all() {
        cases.check(&Bench::new(vulkan, *driver), reference);
    }
}
/// The router's logits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Logits {
    /// Random values.
    Random,
    /// Three different values, so that there are many ties.
    Ties,
    /// One expert has the largest logit in every row.
    Same,
    /// Random values, with NaN in the middle row.
    NotNumbers,
}

/// A layer with unpacked values.
struct Layer {
    shape: ExpertsShape,
    rows: u32,
    format: Format,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    shared: Option<(Vec<f32>, Vec<f32>)>,
    /// The shared expert's output, `[rows][hidden]`, if the last stage adds it instead of computing it.
    output: Option<Vec<f32>>,
    x: Vec<f32>,
    norm: Vec<f32>,
    /// `[rows][shape.logits()]`
    logits: Vec<f32>,
    /// The biases of the experts' two products; only with [`CLAMPED`].
    biases: Option<[Vec<f32>; 2]>,
    /// The numbers of experts in the buffers of their two matrices.
    stacks: Stacks,
}

/// Numbers of experts in the buffers of gate and up, and in those of down.
type Stacks = [&'static [u32]; 2];
/// All experts are in one buffer.
const WHOLE: Stacks = [&[], &[]];

/// With a limit that many values reach.
const CLAMPED: Epilogue = Epilogue::Gated(Glu::Clamped { limit: 2.5f32.to_bits() });

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Layer {
    fn new(random: &mut Random, shape: ExpertsShape, rows: u32, format: Format, logits: Logits) -> Layer {
        let width = shape.logits();
        let favourite = random.below(shape.count);
        let values: Vec<f32> = (0..rows * width)
            .map(|i| match logits {
                Logits::Ties => random.below(3) as f32 - 1.0,
                Logits::Same if i % width == favourite => 9.0,
                Logits::NotNumbers if i / width == rows / 2 => f32::NAN,
                _ => 3.0 * random.float(),
            })
            .collect();
        let matrix = |random: &mut Random, rows: u32, cols: u32| -> Vec<f32> {
            let size = 3.0 / (cols as f32).sqrt();
            (0..rows * cols).map(|_| round(format, random.float() * size)).collect()
        };
        let mut layer = Layer {
            shape,
            rows,
            format,
            gate_up: matrix(random, shape.count * shape.first_rows(shape.inner), shape.hidden),
            down: matrix(random, shape.count * shape.hidden, shape.inner),
            shared: shape.shared_inner.map(|inner| {
                (matrix(random, shape.first_rows(inner), shape.hidden), matrix(random, shape.hidden, inner))
            }),
            output: None,
            // Parts of a row differ in size.
            x: (0..rows * shape.hidden)
                .map(|i| random.float() * 2f32.powi(-((i % shape.hidden / 32 * 7 + i / shape.hidden) as i32 % 5)))
                .collect(),
            norm: random.floats(shape.hidden as usize),
            logits: values,
            stacks: WHOLE,
            biases: (shape.epilogue == CLAMPED)
                .then(|| [2 * shape.inner, shape.hidden].map(|rows| random.floats((shape.count * rows) as usize))),
        };
        // The weights of experts that no row chooses must not be read.
        let chosen: Vec<u32> = (0..rows).flat_map(|row| layer.chosen(row)).map(|(id, _)| id).collect();
        for id in (0..shape.count).filter(|id| !chosen.contains(id)) {
            let size = (shape.inner * shape.hidden) as usize;
            let first = (shape.first_rows(shape.inner) * shape.hidden) as usize;
            layer.gate_up[id as usize * first..][..first].fill(f32::NAN);
            layer.down[id as usize * size..][..size].fill(f32::NAN);
            for biases in layer.biases.iter_mut().flatten() {
                let rows = biases.len() / shape.count as usize;
                biases[id as usize * rows..][..rows].fill(f32::NAN);
            }
        }
        layer
    }

    /// Returns the experts of a row with their shares, as the formula defines them.
    fn chosen(&self, row: u32) -> Vec<(u32, f64)> {
        let width = self.shape.logits() as usize;
        let logits: Vec<f64> = self.logits[row as usize * width..][..self.shape.count as usize]
            .iter()
            .map(|l| if l.is_nan() { f64::NEG_INFINITY } else { f64::from(*l) })
            .collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|l| (l - most).exp()).sum();
        let mut left: Vec<u32> = (0..self.shape.count).collect();
        let mut chosen: Vec<(u32, f64)> = Vec::new();
        for _ in 0..self.shape.chosen {
            let best = left.iter().copied().reduce(|a, b| if logits[b as usize] > logits[a as usize] { b } else { a });
            let best = best.expect("enough experts");
            left.retain(|id| *id != best);
            chosen.push((best, (logits[best as usize] - most).exp() / total));
        }
        if self.shape.normalise {
            let sum: f64 = chosen.iter().map(|(_, share)| share).sum();
            chosen.iter_mut().for_each(|(_, share)| *share /= sum);
        }
        chosen
    }

    /// Returns the layer's output for a row.
    fn wanted(&self, row: u32) -> Vec<f64> {
        let hidden = self.shape.hidden as usize;
        let x: Vec<f64> = self.x[row as usize * hidden..][..hidden].iter().map(|v| f64::from(*v)).collect();
        let scale = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / hidden as f64 + f64::from(EPSILON)).sqrt();
        let m: Vec<f64> = x.iter().zip(&self.norm).map(|(v, w)| v * scale * f64::from(*w)).collect();
        let times = |w: &[f32], x: &[f64]| -> f64 { w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum() };
        let mut y = x;
        let glu = |gate: f64, up: f64| match self.shape.epilogue {
            CLAMPED => {
                let gate = gate.min(2.5);
                gate * sigmoid(1.702 * gate) * (up.clamp(-2.5, 2.5) + 1.0)
            }
            _ => gate * sigmoid(gate) * up,
        };
        let bias = |stage: usize, id: Option<u32>, row: usize| match (&self.biases, id) {
            (Some(biases), Some(id)) => {
                let rows = biases[stage].len() / self.shape.count as usize;
                f64::from(biases[stage][id as usize * rows + row])
            }
            _ => 0.0,
        };
        let mut add = |gate_up: &[f32], down: &[f32], inner: usize, id: Option<u32>, share: f64| {
            let middle: Vec<f64> = (0..inner)
                .map(|i| {
                    let sum = |r: usize| times(&gate_up[r * hidden..][..hidden], &m) + bias(0, id, r);
                    match self.shape.epilogue {
                        Epilogue::SquaredRelu => sum(i).max(0.0).powi(2),
                        _ => glu(sum(2 * i), sum(2 * i + 1)),
                    }
                })
                .collect();
            for (r, y) in y.iter_mut().enumerate() {
                *y += share * (times(&down[r * inner..][..inner], &middle) + bias(1, id, r));
            }
        };
        let inner = self.shape.inner as usize;
        for (id, share) in self.chosen(row) {
            let at = id as usize * inner * hidden;
            let first = self.shape.first_rows(self.shape.inner) as usize * hidden;
            let (gate_up, down) = (&self.gate_up[id as usize * first..][..first], &self.down[at..][..inner * hidden]);
            add(gate_up, down, inner, Some(id), share);
        }
        if let Some((gate_up, down)) = &self.shared {
            let gate = self.logits[(row * self.shape.logits() + self.shape.count) as usize];
            let gate = sigmoid(f64::from(gate));
            match &self.output {
                None => add(gate_up, down, down.len() / hidden, None, gate),
                Some(output) => {
                    let own = &output[row as usize * hidden..][..hidden];
                    y.iter_mut().zip(own).for_each(|(y, own)| *y += gate * f64::from(*own));
                }
            }
        }
        y
    }

    fn matrix(&self, cases: &mut Cases, name: &str, values: &[f32], cols: u32, fragments: bool) -> Matrix {
        let rows = values.len() as u32 / cols;
        let layout = if fragments { Layout::Fragments } else { Layout::RowMajor { columns_multiple: 8 } };
        let bytes: Vec<u8> = values.iter().flat_map(|w| w.to_le_bytes()).collect();
        // Packs from f32, which represents every value of the other formats exactly.
        let map = RowMap::whole(SourceFormat::Numbers(Format::F32), rows, cols);
        let source = pack::Rows { bytes: &bytes, map };
        let packing = Packing { rows, cols, layout, format: self.format };
        let mut words = vec![0u32; packing.bytes() as usize / 4];
        pack::pack(&packing, &[source], 0..packing.bytes(), bytemuck::cast_slice_mut(&mut words))
            .expect("finite values");
        Matrix { range: cases.words(name, &words), format: self.format, rows, cols }
    }

    /// Adds the buffers of the experts' matrices, of `values`, for one of the two products.
    fn experts(&self, cases: &mut Cases, name: &str, stage: usize, cols: u32, fragments: bool) -> Vec<Stack> {
        let (values, count) = ([&self.gate_up, &self.down][stage], self.shape.count);
        let sizes = if self.stacks[stage].is_empty() { &[count][..] } else { self.stacks[stage] };
        assert_eq!(sizes.iter().sum::<u32>(), count, "{:?}", self.stacks);
        let each = values.len() / count as usize;
        let mut first = 0;
        let stack = |own: &u32| {
            let values = &values[first as usize * each..][..*own as usize * each];
            let matrix = self.matrix(cases, &format!("{name}.from{first}"), values, cols, fragments);
            first += own;
            Stack { matrix, first: first - own }
        };
        sizes.iter().map(stack).collect()
    }

    /// Adds a buffer of `rows` rows of `width` floats, with poison between the rows and after the rows in use.
    fn activations(
        cases: &mut Cases,
        name: &str,
        values: &[f32],
        width: u32,
        rows: u32,
        tag: Option<u32>,
    ) -> Activations {
        let stride = width.next_multiple_of(4) + 4;
        let mut words = vec![POISON; (rows * stride) as usize];
        for (line, values) in words.chunks_exact_mut(stride as usize).zip(values.chunks_exact(width as usize)) {
            for (word, value) in line.iter_mut().zip(values) {
                *word = tag.map_or(value.to_bits(), |tag| tagged(*value, tag));
            }
        }
        Activations { range: cases.words(name, &words), stride }
    }

    /// Adds the layer's buffers for `most` rows, of which the layer's rows are in use.
    fn mlp(&self, cases: &mut Cases, most: u32, fragments: bool, tags: Option<[u32; 2]>) -> Mlp {
        let shape = self.shape;
        let hidden = shape.hidden;
        let gate_up = self.experts(cases, "gate_up", 0, hidden, fragments);
        let down = self.experts(cases, "down", 1, shape.inner, fragments);
        let shared = self.shared.as_ref().map(|(gate_up, down)| {
            let gate_up = self.matrix(cases, "shared.gate_up", gate_up, hidden, fragments);
            (gate_up, self.matrix(cases, "shared.down", down, shape.shared_inner.unwrap_or(0), fragments))
        });
        let x = Self::activations(cases, "x", &self.x, hidden, most, tags.map(|t| t[0]));
        let logits = Self::activations(cases, "logits", &self.logits, shape.logits(), most, tags.map(|t| t[1]));
        let norm = (cases.floats("norm", &self.norm), EPSILON);
        let biases = match &self.biases {
            None => [None, None],
            Some([gate_up, down]) => {
                [Some(cases.floats("gate_up.bias", gate_up)), Some(cases.floats("down.bias", down))]
            }
        };
        let label = "layers.0.".to_owned();
        Mlp { label, shape, gate_up, down, shared, biases, x, y: x, adds: true, routing: None, norm, logits }
    }

    /// Packs the experts' weights as codes.
    fn quantise(&mut self, format: Format) {
        // Only finite numbers can be quantised.
        let numbers = self.gate_up.iter_mut().chain(&mut self.down).filter(|value| value.is_nan());
        numbers.for_each(|value| *value = 1e3);
        self.format = format;
    }

    /// Like [`Layer::quantise`] to int8, of numbers that are exact in it and in f16: whole multiples of a power of two, of
    /// which each group has the largest one.
    fn quantise_exactly(&mut self) {
        const STEP: f32 = 1.0 / 512.0;
        self.quantise(Format::Codes(INT8));
        let (hidden, inner) = (self.shape.hidden as usize, self.shape.inner as usize);
        let rows = self.gate_up.chunks_exact_mut(hidden).chain(self.down.chunks_exact_mut(inner));
        for group in rows.flat_map(|row| row.chunks_mut(INT8.group as usize)) {
            group.iter_mut().for_each(|value| *value = (*value / STEP).round().clamp(-127.0, 127.0) * STEP);
            group[0] = 127.0 * STEP;
        }
    }

    /// Compares the values that the reference left in x with the formula.
    fn check_reference(&self, memory: &HostMemory, x: Activations, limit: f64, what: &str) {
        for row in 0..self.rows {
            for (i, wanted) in (0..).zip(self.wanted(row)) {
                let found = memory.f32(x.range, row * x.stride + i);
                let near = (f64::from(found) - wanted).abs() <= limit * (1.0 + wanted.abs());
                assert!(
                    near || (found.is_nan() && wanted.is_nan()),
                    "the reference says {found:e}, the formula {wanted:e}: {what}, row {row}, column {i}"
                );
            }
        }
    }
}

fn shape(sizes: [u32; 4], shared_inner: Option<u32>, normalise: bool) -> ExpertsShape {
    let [count, chosen, inner, hidden] = sizes;
    // Without a shared expert, as in gpt-oss: with biases, and its gated linear unit. Without a gate if the sizes allow it.
    let squared = count == 16 && shared_inner.is_none_or(|inner| inner % 16 == 0) && inner % 16 == 0;
    let epilogue = match shared_inner {
        _ if squared => Epilogue::SquaredRelu,
        None => CLAMPED,
        Some(_) => Epilogue::Gated(Glu::Silu),
    };
    ExpertsShape { count, chosen, inner, hidden, shared_inner, normalise, epilogue, gated: true }
}

/// Returns a selection from all experts, with factors of logits and of shares.
fn route(sigmoid: bool, bias: Option<Range>, scales: Option<Range>) -> Route {
    let (factor, logit_scale) = (1.5, 0.75);
    Route { sigmoid, bias, groups: 1, kept: 1, best: 1, sum_offset: 0.25, factor, logit_scale, scales }
}

/// Records both stages of a few rows.
fn few_stages(cases: &mut Cases, mlp: &Mlp, few: FewRows) {
    mlp.gate_up.iter().for_each(|stack| cases.recording.call(mlp.few_gate_up(stack, few)));
    mlp.down.iter().for_each(|stack| cases.recording.call(mlp.few_down(stack, few)));
}

/// Returns sizes, rows, the router's logits, and tiles of W per workgroup.
fn few() -> Vec<(ExpertsShape, u32, Logits, u32)> {
    vec![
        (shape([4, 1, 8, 16], None, false), 1, Logits::Random, 1),
        (shape([4, 2, 24, 48], Some(40), true), 2, Logits::Ties, 2),
        (shape([16, 8, 32, 64], Some(32), true), 7, Logits::Random, 1),
        (shape([8, 2, 40, 80], Some(8), false), 8, Logits::Same, 2),
        (shape([16, 8, 64, 96], None, true), 8, Logits::NotNumbers, 1),
        (shape([128, 8, 16, 32], Some(16), true), 1, Logits::Random, 1),
        (shape([37, 3, 16, 48], None, false), 16, Logits::Ties, 1),
        (shape([8, 8, 24, 544], Some(72), false), 1, Logits::Ties, 2),
    ]
}

/// Like [`few`], for experts of codes.
fn few_coded() -> Vec<(ExpertsShape, u32, Logits, u32)> {
    vec![
        (shape([4, 1, 8, 16], None, false), 1, Logits::Random, 1),
        (shape([4, 2, 24, 48], None, true), 2, Logits::Ties, 2),
        (shape([16, 8, 64, 96], None, true), 4, Logits::NotNumbers, 1),
        (shape([37, 3, 16, 48], None, false), 3, Logits::Ties, 1),
        (shape([8, 8, 24, 544], None, false), 1, Logits::Random, 2),
        (shape([8, 2, 272, 80], None, true), 4, Logits::Same, 2),
        (shape([16, 4, 32, 64], Some(40), true), 3, Logits::Random, 1),
        (shape([8, 2, 40, 80], Some(32), false), 1, Logits::Ties, 1),
    ]
}

/// Goal: workgroups for a few rows of experts of codes need no more shared memory than every device has.
#[test]
fn workgroups_of_a_few_rows_fit_in_shared_memory() {
    const LIMIT: u32 = 32 << 10;
    let matrix =
        |format, rows, cols| Matrix { range: Range { buffer: BufferId(0), offset: 0, bytes: 0 }, format, rows, cols };
    for bits in [2, 3, 4, 5, 6, 8] {
        for (shape, rows, matrices) in [(128, 8, 768, 2048), (32, 4, 2880, 2880), (512, 10, 512, 4096)]
            .into_iter()
            .map(|(count, chosen, inner, hidden)| shape([count, chosen, inner, hidden], None, true))
            .flat_map(|shape| (1..=4).map(move |rows| (shape, rows)))
            .flat_map(|(shape, rows)| [Matrices::Emulated, Matrices::Cooperative].map(|way| (shape, rows, way)))
        {
            let format = Format::Codes(Codes { bits, group: 32, number: Number::Affine, minimum: Minimum::Stored });
            let nothing = Activations { range: matrix(format, 0, 0).range, stride: 0 };
            let whole = |rows, cols| vec![Stack { matrix: matrix(format, rows * shape.count, cols), first: 0 }];
            let mlp = Mlp {
                label: String::new(),
                shape,
                gate_up: whole(2 * shape.inner, shape.hidden),
                down: whole(shape.hidden, shape.inner),
                shared: None,
                biases: [None, None],
                x: nothing,
                y: nothing,
                adds: true,
                routing: None,
                norm: (nothing.range, EPSILON),
                logits: nothing,
            };
            for config in mlp.few_configs(rows, matrices, LIMIT) {
                let bytes = mlp.few_shared_bytes(rows, matrices, config);
                assert!(
                    bytes <= LIMIT,
                    "{bytes} bytes: {bits} bits, {rows} rows of {shape:?}, {matrices:?}, {config:?}"
                );
                assert!(config.threads >= rows * shape.chosen && config.threads.is_multiple_of(32), "{config:?}");
            }
        }
    }
}

/// Checks both stages of a few rows of each case: sizes, rows, the router's logits, tiles of W per workgroup, and the buffers of
/// the experts. `largest`: whether the first row's values are beyond f16.
fn check_few(
    vulkan: &Vulkan,
    name: &str,
    (matrices, format): (Matrices, Format),
    largest: bool,
    list: Vec<(ExpertsShape, u32, Logits, u32, Stacks)>,
) {
    let mut cases = Cases::new(&format!("{name}.{matrices:?}.{format:?}"));
    let mut random = Random(81);
    let mut made = Vec::new();
    let coded = format.codes().is_some();
    // Weights of codes are rounded to f16, if they are not exact in it.
    let (near, limit) = match format {
        Format::Codes(INT8) => (SUMS, 2e-6),
        Format::Codes(_) => (ROUNDED, 0.5),
        Format::F16 => (SUMS, 2e-6),
        _ => (SPLIT, 2e-6),
    };
    let numbers = if coded { Format::Bf16 } else { format };
    for (shape, rows, logits, tiles, stacks) in list {
        let name = format!("{shape:?}x{rows}.{logits:?}.{stacks:?}");
        cases.case(name.clone());
        let mut layer = Layer::new(&mut random, shape, rows, numbers, logits);
        if largest {
            // Beyond f16 in the first row, times the norm's weights, which are up to 1.
            layer.x[..shape.hidden as usize].iter_mut().for_each(|x| *x *= 1e6);
        }
        layer.stacks = stacks;
        match format {
            Format::Codes(INT8) => layer.quantise_exactly(),
            Format::Codes(_) => layer.quantise(format),
            _ => {}
        }
        let mlp = layer.mlp(&mut cases, rows, true, None);
        cases.expect(mlp.x.range, Expect::Floats(near));
        let stride = shape.middle_stride();
        let middle = cases.output("middle", (rows * stride) as usize, Expect::Floats(near));
        let middle = Activations { range: middle, stride };
        // Beside experts of codes, products of its own compute the shared expert.
        layer.output = (coded && shape.shared_inner.is_some()).then(|| random.floats((rows * shape.hidden) as usize));
        let output = layer.output.as_ref();
        let output = output.map(|o| Layer::activations(&mut cases, "shared.output", o, shape.hidden, rows, None));
        let shared = output.map(|output| (output, Flow::NONE));
        let (threads, ahead) = if coded { (64, 4 * tiles) } else { (128, 2) };
        let config = SkinnyConfig { threads, tiles, ahead };
        let fault = cases.words("fault", &[0, 0]);
        let (flow, logits) = (Flow::NONE, Flow::NONE);
        few_stages(
            &mut cases,
            &mlp,
            FewRows { middle, rows, matrices, config, ptx: None, flow, logits, fault, shared },
        );
        made.push((layer, mlp, name));
    }
    let reference = cases.reference();
    for (layer, mlp, name) in made {
        layer.check_reference(&reference, mlp.x, limit, &name);
    }
    check(vulkan, &cases, &reference);
}

#[test]
fn a_few_rows_choose_and_run_their_experts() {
    let vulkan = Vulkan::new();
    let formats = [Format::Bf16, Format::F16, Format::Codes(INT8), Format::Codes(INT4)];
    for (matrices, format) in ways().iter().flat_map(|way| formats.map(|format| (*way, format))) {
        // Each case is two pipelines, which a CPU driver takes seconds to compile: the formats of codes take turns.
        let coded = format.codes().is_some();
        let mut list = if coded { few_coded() } else { few() };
        if format != Format::Bf16 && !every_case() {
            list = list.into_iter().skip(usize::from(format == Format::Codes(INT4))).step_by(2).collect();
        }
        let list = list.into_iter().map(|(shape, rows, logits, tiles)| (shape, rows, logits, tiles, WHOLE));
        let list: Vec<_> = list.collect();
        if format == Format::F16 {
            check_few(&vulkan, "few.large", (matrices, format), true, list[..1].to_vec());
        }
        check_few(&vulkan, "few", (matrices, format), false, list);
    }
}

/// Goal: a few rows run experts that are divided among buffers, where rows choose experts of all of them, of some, or of none.
/// Every buffer but the last has NaN behind it in the order of the experts, as all that no row chooses.
#[test]
fn a_few_rows_run_experts_of_several_buffers() {
    let vulkan = Vulkan::new();
    for matrices in ways() {
        let numbers = vec![
            (shape([4, 1, 8, 16], None, false), 1, Logits::Random, 1, [&[1, 1, 2], &[2, 2]] as Stacks),
            (shape([16, 8, 32, 64], Some(32), true), 7, Logits::Ties, 1, [&[7, 9], &[10, 2, 4]]),
        ];
        let codes = vec![
            (shape([4, 1, 8, 16], None, false), 1, Logits::Random, 1, [&[3, 1], &[1, 1, 2]] as Stacks),
            (shape([16, 8, 64, 96], None, true), 4, Logits::NotNumbers, 1, [&[5, 11], &[8, 8]]),
        ];
        check_few(&vulkan, "divided", (*matrices, Format::Bf16), false, numbers);
        check_few(&vulkan, "divided", (*matrices, Format::Codes(INT8)), false, codes);
    }
}

/// Goal: few rows select their experts as `expert_route` does, and the last stage may replace its output. Method: softmax
/// with factors of logits, of shares and of experts (Gemma 4), and sigmoids with a bias and a shared expert without a gate
/// (GLM-4.5); the reference's selection is compared with the formula elsewhere.
#[test]
fn a_few_rows_are_routed_by_scores() {
    let vulkan = Vulkan::new();
    for matrices in ways() {
        let mut cases = Cases::new(&format!("routed.{matrices:?}"));
        let mut random = Random(87);
        let list = [
            (shape([16, 4, 32, 64], None, true), 1, Format::Bf16, false, false, WHOLE),
            (shape([9, 2, 24, 48], Some(40), false), 3, Format::Bf16, true, false, WHOLE),
            (shape([37, 3, 16, 48], Some(16), true), 2, Format::Bf16, true, true, WHOLE),
            (shape([8, 2, 32, 64], None, false), 1, Format::Bf16, false, true, WHOLE),
            (shape([16, 8, 64, 96], None, true), 2, Format::Codes(INT8), true, true, WHOLE),
            // Experts of several buffers, of which the first call replaces y.
            (shape([16, 4, 32, 64], None, true), 1, Format::Bf16, false, false, [&[9, 7], &[8, 8]]),
        ];
        for (sizes, rows, format, sigmoid, biased, stacks) in list {
            cases.case(format!("{sizes:?}x{rows}.{format:?}.sigmoid={sigmoid}.biased={biased}.{stacks:?}"));
            let sizes = ExpertsShape { gated: !sigmoid, ..sizes };
            let mut layer = Layer::new(&mut random, sizes, rows, Format::Bf16, Logits::Random);
            layer.stacks = stacks;
            // The layer's own selection is by the greatest logits; the bias chooses others.
            let biases = layer.biases.iter_mut().flatten().flatten();
            let all = layer.gate_up.iter_mut().chain(&mut layer.down).chain(biases);
            all.filter(|value| value.is_nan()).for_each(|value| *value = round(Format::Bf16, random.float() * 0.3));
            if format != Format::Bf16 {
                layer.quantise_exactly();
            }
            let mlp = layer.mlp(&mut cases, rows, true, None);
            let count = sizes.count as usize;
            let bias: Vec<f32> = random.floats(count);
            let scales: Vec<f32> = (0..count).map(|_| 1.0 + random.float() / 2.0).collect();
            let bias = (sigmoid && biased).then(|| cases.floats("choice_bias", &bias));
            let routing = route(sigmoid, bias, (!sigmoid).then(|| cases.floats("scales", &scales)));
            let mlp = Mlp { routing: Some(routing), adds: biased, ..mlp };
            let near = if format == Format::Bf16 { SPLIT } else { SUMS };
            cases.expect(mlp.x.range, Expect::Floats(near));
            let stride = sizes.middle_stride();
            let middle = cases.output("middle", (rows * stride) as usize, Expect::Floats(near));
            let middle = Activations { range: middle, stride };
            let config = if format == Format::Bf16 { (128, 1, 2) } else { (64, 1, 4) };
            let config = SkinnyConfig { threads: config.0, tiles: config.1, ahead: config.2 };
            let fault = cases.words("fault", &[0, 0]);
            let (matrices, flow, logits) = (*matrices, Flow::NONE, Flow::NONE);
            few_stages(
                &mut cases,
                &mlp,
                FewRows { middle, rows, matrices, config, ptx: None, flow, logits, fault, shared: None },
            );
        }
        let reference = cases.reference();
        check(&vulkan, &cases, &reference);
    }
}

/// Goal: few rows work with tagged words. Each stage runs separately with tagged inputs that are already complete,
/// because a driver that runs workgroups one after another cannot wait for words of a later one.
#[test]
fn a_few_rows_read_and_write_tagged_words() {
    let vulkan = Vulkan::new();
    let shapes = [
        (shape([16, 8, 32, 64], Some(32), true), 1, WHOLE),
        (shape([8, 2, 32, 96], None, false), 8, WHOLE),
        (shape([16, 8, 32, 64], Some(32), true), 1, [&[9, 7], &[4, 12]]),
        // Codes, with the output of a shared expert.
        (shape([8, 2, 32, 64], Some(64), true), 2, [&[3, 5], &[3, 5]]),
    ];
    let (read, carried) = (Flow { input_carried: true, ..Flow::NONE }, TAGS);
    for matrices in ways() {
        let mut cases = Cases::new(&format!("tagged.{matrices:?}"));
        let mut random = Random(82);
        for (shape, rows, stacks) in shapes {
            for down in [false, true] {
                cases.case(format!("{shape:?}x{rows}.{down}.{stacks:?}"));
                let mut layer = Layer::new(&mut random, shape, rows, Format::Bf16, Logits::Random);
                layer.stacks = stacks;
                let coded = stacks == [&[3u32, 5][..]; 2];
                if coded {
                    layer.quantise_exactly();
                }
                let mlp = layer.mlp(&mut cases, rows, true, Some([carried[0], carried[1]]));
                let output = random.floats((rows * shape.hidden) as usize);
                let shared = coded.then(|| {
                    let tag = Some(carried[1]);
                    let output = Layer::activations(&mut cases, "shared.output", &output, shape.hidden, rows, tag);
                    (output, Flow { input: carried[1], ..read })
                });
                let (stride, fault) = (shape.middle_stride(), cases.words("fault", &[0, 0]));
                let words: Vec<u32> =
                    (0..rows * stride).map(|_| tagged(random.float(), carried[if down { 2 } else { 3 }])).collect();
                let middle = Activations { range: cases.words("middle", &words), stride };
                let config = SkinnyConfig { threads: 128, tiles: 1, ahead: if coded { 4 } else { 2 } };
                let logits = Flow { input: carried[1], ..read };
                let few = |flow| FewRows {
                    middle,
                    rows,
                    matrices: *matrices,
                    config,
                    ptx: None,
                    flow,
                    logits,
                    fault,
                    shared,
                };
                if down {
                    cases.expect(mlp.x.range, Expect::Tagged(SPLIT));
                    let mut old = carried[0];
                    for (stack, output) in mlp.down.iter().zip([carried[3], 77]) {
                        let flow = Flow { input: carried[2], old, output: Some(output), ..read };
                        cases.recording.call(mlp.few_down(stack, few(flow)));
                        old = output;
                    }
                } else {
                    cases.expect(middle.range, Expect::Tagged(SPLIT));
                    let flow = Flow { input: carried[0], old: carried[3], output: Some(carried[2]), ..read };
                    mlp.gate_up.iter().for_each(|stack| cases.recording.call(mlp.few_gate_up(stack, few(flow))));
                }
            }
        }
        let reference = cases.reference();
        check(&vulkan, &cases, &reference);
    }
}

/// Goal: a wait for words that are never written ends and sets the fault word. Method: numbers, and codes without and with the output
/// of a shared expert, which is the last that a call waits for.
#[test]
fn a_wait_for_words_that_never_come_ends() {
    let vulkan = Vulkan::new();
    let kinds = [(Format::Bf16, None, true), (Format::Codes(INT8), None, true)];
    let last = [(Format::Codes(INT8), Some(32), true), (Format::Codes(INT8), Some(32), false)];
    for ((format, shared, late), matrices) in
        kinds.into_iter().chain(last).flat_map(|kind| ways().iter().map(move |m| (kind, m)))
    {
        let mut cases = Cases::new(&format!("stale.{matrices:?}.{format:?}.{shared:?}"));
        let mut random = Random(83);
        cases.case("stale".to_owned());
        let shape = shape([8, 2, 32, 16], shared, false);
        let mut layer = Layer::new(&mut random, shape, 1, Format::Bf16, Logits::Random);
        if format != Format::Bf16 {
            layer.quantise_exactly();
        }
        let mlp = layer.mlp(&mut cases, 1, true, Some([TAGS[0], TAGS[1]]));
        let fault = cases.words("fault", &[0, 0]);
        let stride = shape.middle_stride();
        let middle = Activations { range: cases.words("middle", &vec![TAGS[3]; stride as usize]), stride };
        let carried = |input| Flow { input_carried: true, input, ..Flow::NONE };
        let input = if late { TAGS[2] } else { TAGS[3] };
        let flow = Flow { old: TAGS[0], output: Some(TAGS[1]), ..carried(input) };
        let output = Layer::activations(&mut cases, "shared.output", &[0.0; 16], 16, 1, Some(TAGS[0]));
        let config = SkinnyConfig { threads: 128, tiles: 1, ahead: 4 };
        let few = FewRows {
            middle,
            rows: 1,
            matrices: *matrices,
            config,
            ptx: None,
            flow,
            logits: carried(TAGS[1]),
            fault,
            shared: shared.map(|_| (output, carried(TAGS[2]))),
        };
        cases.recording.call(mlp.few_down(&mlp.down[0], few));
        let before = cases.before();
        for driver in Driver::all() {
            let after = Bench::new(&vulkan, *driver).run(&cases.recording, &before);
            assert_eq!(after.u32(fault, 0), 1, "{driver:?}, {format:?}, {shared:?}, {late}");
        }
    }
}

/// Returns the row table of a decode step in which row `nobody` is not valid. Its other words are poison.
fn valid_rows(cases: &mut Cases, rows: u32, nobody: u32) -> Range {
    let words: Vec<u32> = (0..rows).flat_map(|row| [POISON, POISON, POISON, u32::from(row != nobody)]).collect();
    cases.words("rows", &words)
}

#[test]
fn rows_run_their_experts_on_weights_row_after_row() {
    let vulkan = Vulkan::new();
    let list = [
        (shape([4, 2, 24, 48], Some(40), true), 1, 1, Logits::Random, WHOLE),
        (shape([16, 8, 8, 32], None, false), 7, 7, Logits::Ties, WHOLE),
        (shape([6, 1, 40, 16], Some(8), false), 64, 17, Logits::Same, WHOLE),
        // Experts of several buffers.
        (shape([16, 8, 8, 32], None, false), 7, 7, Logits::Ties, [&[5, 10, 1], &[8, 8]]),
        (shape([6, 1, 40, 16], Some(8), false), 64, 17, Logits::Random, [&[2, 4], &[3, 2, 1]]),
    ];
    let mut cases = Cases::new("row_major");
    let mut random = Random(84);
    let mut made = Vec::new();
    for format in [Format::Bf16, Format::F16, Format::F32] {
        for (shape, most, used, logits, stacks) in list {
            let name = format!("{format:?}.{shape:?}x{used}of{most}.{logits:?}.{stacks:?}");
            cases.case(name.clone());
            let mut layer = Layer::new(&mut random, shape, used, format, logits);
            layer.stacks = stacks;
            let mlp = layer.mlp(&mut cases, most, false, None);
            cases.expect(mlp.x.range, Expect::Floats(SUMS));
            let count = (used != most).then(|| cases.words("chunk", &[POISON, POISON, used, POISON]));
            let rows = Used { rows: most, count };
            let choices = cases.output("choices", shape.choices_bytes(most) as usize / 4, Expect::Floats(SUMS));
            let stride = shape.middle_stride();
            let middle = cases.output("middle", (most * stride) as usize, Expect::Floats(SUMS));
            let middle = Activations { range: middle, stride };
            cases.recording.call(mlp.choose(rows, None, choices));
            let rows = GemvRows { used: rows, choices, threads: 64 };
            mlp.gate_up.iter().for_each(|stack| cases.recording.call(mlp.gemv_gate_up(stack, rows, middle)));
            mlp.down.iter().for_each(|stack| cases.recording.call(mlp.gemv_down(stack, rows, middle)));
            made.push((layer, mlp, name));
        }
    }
    let reference = cases.reference();
    for (layer, mlp, name) in made {
        layer.check_reference(&reference, mlp.x, 2e-6, &name);
    }
    check(&vulkan, &cases, &reference);
}

/// A selection by scores: the sizes, the routing without its bias, and what the formula needs besides.
struct Routed {
    shape: ExpertsShape,
    route: Route,
    logits: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Routed {
    /// Returns the experts of a row with their shares, as the formula defines them.
    fn chosen(&self, row: u32) -> Vec<(u32, f64)> {
        let (shape, route) = (&self.shape, &self.route);
        let (count, width) = (shape.count as usize, shape.logits() as usize);
        let logits = &self.logits[row as usize * width..][..count];
        let number = |logit: f32| if logit.is_nan() { f64::NEG_INFINITY } else { f64::from(logit) };
        let most = logits.iter().map(|l| number(*l)).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|l| (number(*l) - most).exp()).sum();
        let scores: Vec<f64> = match route.sigmoid {
            true => logits.iter().map(|l| sigmoid(f64::from(*l))).collect(),
            false => logits.iter().map(|l| (number(*l) - most).exp() / total).collect(),
        };
        // A NaN counts as less than every number.
        let by: Vec<f64> = (0..count)
            .map(|id| scores[id] + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[id])))
            .map(|c| if c.is_nan() { f64::NEG_INFINITY } else { c })
            .collect();
        // The greatest of some ids, the lowest first among equals.
        let greatest = |ids: &[usize], values: &[f64], number: u32| -> Vec<usize> {
            let mut left = ids.to_vec();
            let mut best = Vec::new();
            for _ in 0..number {
                let first = left.iter().copied().reduce(|a, b| if values[b] > values[a] { b } else { a }).unwrap();
                left.retain(|id| *id != first);
                best.push(first);
            }
            best
        };
        let each = count / route.groups as usize;
        let members = |group: usize| (group * each..(group + 1) * each).collect::<Vec<usize>>();
        let sums: Vec<f64> = (0..route.groups as usize)
            .map(|group| greatest(&members(group), &by, route.best).iter().map(|id| by[*id]).sum())
            .collect();
        let kept = greatest(&(0..route.groups as usize).collect::<Vec<_>>(), &sums, route.kept);
        let ids: Vec<usize> = (0..count).filter(|id| kept.contains(&(id / each))).collect();
        let chosen = greatest(&ids, &by, shape.chosen);
        let sum: f64 = chosen.iter().map(|id| scores[*id]).sum();
        let divisor = if shape.normalise { sum + f64::from(route.sum_offset) } else { 1.0 };
        chosen.iter().map(|id| (*id as u32, scores[*id] / divisor * f64::from(route.factor))).collect()
    }
}

/// Goal: the selection by scores, groups and a bias is that of the formula, on devices and in the reference. Logits are
/// eighths, so that many are equal; one is NaN; all of one row are equal.
#[test]
fn experts_are_chosen_by_scores_in_groups() {
    let sizes = |[count, chosen]: [u32; 2], normalise, gated: bool| ExpertsShape {
        gated,
        ..shape([count, chosen, 8, 16], gated.then_some(8), normalise)
    };
    let list = [
        (sizes([160, 6], false, false), [1, 1, 1], false, false),
        (sizes([96, 8], true, true), [3, 2, 2], true, true),
        (sizes([160, 8], true, false), [8, 4, 2], true, true),
        (sizes([96, 4], false, true), [3, 1, 1], false, false),
        (sizes([64, 6], true, false), [4, 3, 3], false, true),
    ];
    let (rows, used, nobody) = (7u32, 6u32, 4u32);
    let mut cases = Cases::new("route");
    let mut random = Random(86);
    let mut made = Vec::new();
    for (shape, [groups, kept, best], sigmoid, biased) in list {
        cases.case(format!("{shape:?}.groups={groups}.kept={kept}.best={best}.sigmoid={sigmoid}.bias={biased}"));
        let width = shape.logits();
        let logits: Vec<f32> = (0..rows * width)
            .map(|i| match (i / width, i % width) {
                (1, _) => 0.5,
                (2, 3) => f32::NAN,
                _ => random.below(49) as f32 / 8.0 - 3.0,
            })
            .collect();
        let bias: Option<Vec<f32>> = biased.then(|| (0..shape.count).map(|_| random.below(5) as f32 / 16.0).collect());
        let layer = Layer::new(&mut random, shape, 1, Format::Bf16, Logits::Random);
        let mut mlp = layer.mlp(&mut cases, rows, false, None);
        mlp.logits = Activations { range: cases.floats("scored", &logits), stride: width };
        let range = bias.as_ref().map(|bias| cases.floats("choice_bias", bias));
        let (factor, logit_scale, scales) = (2.5, 1.0, None);
        let sum_offset = if sigmoid { 0.125 } else { 1e-20 };
        let route = Route { sigmoid, bias: range, groups, kept, best, sum_offset, factor, logit_scale, scales };
        let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
        let choices = cases.output("choices", shape.choices_bytes(rows) as usize / 4, Expect::Pairs(SUMS));
        let valid = valid_rows(&mut cases, rows, nobody);
        mlp.routing = Some(route);
        cases.recording.call(mlp.choose(Used { rows, count: Some(count) }, Some(valid), choices));
        made.push((Routed { shape, route, logits, bias }, choices));
    }
    let reference = cases.reference();
    for (routed, choices) in made {
        let each = routed.shape.choices_bytes(1) as u32 / 8;
        for row in 0..used {
            let found = |j: u32| {
                let at = (row * each + j) * 2;
                (reference.u32(choices, at), f64::from(reference.f32(choices, at + 1)))
            };
            if row == nobody {
                assert!((0..each).all(|j| found(j).0 == u32::MAX), "row {row} of {:?} chose experts", routed.shape);
                continue;
            }
            for (j, (id, share)) in (0..).zip(routed.chosen(row)) {
                let (expert, part) = found(j);
                let what = format!("choice {j} of row {row} of {:?}, {:?}", routed.shape, routed.route);
                assert_eq!(expert, id, "{what}");
                assert!((part - share).abs() <= 1e-5 * (1.0 + share), "{part} instead of {share}: {what}");
            }
        }
    }
    check(&Vulkan::new(), &cases, &reference);
}

/// Returns the ways in which grouped rows are multiplied, with the rows of a tile: 16 and 32 by `panel`, 64 by `tiled`.
fn groupings(matrices: Matrices) -> Vec<(u32, Grouped)> {
    let panel = |blocks: u32, tiles| {
        (
            16 * blocks,
            Grouped::Panel(matrices, [panel::PanelConfig { threads: 64, tiles, ahead: 1, blocks, in_f16: false }; 2]),
        )
    };
    let tiles: &[Tile] = match matrices {
        Matrices::Emulated => &[Tile::Plain],
        Matrices::Cooperative => &[Tile::Square, Tile::Half, Tile::Wide],
    };
    let orders = [PackedOrder::Fragments, PackedOrder::HalfFragments];
    let tiled = tiles.iter().flat_map(|tile| orders.map(|order| (TILE_TOKENS, Grouped::Tiled(*tile, order))));
    [panel(1, 1), panel(2, 2)].into_iter().chain(tiled).collect()
}

/// The calls between the plan of sorted rows and their combination: adds their buffers, and writes `parts`.
type Between<'a> = &'a dyn Fn(&mut Cases, &Mlp, &Sorted, Activations);

/// Sizes, the maximum number of rows and those in use, the router's logits, and the buffers of the experts.
type SortedCase = (ExpertsShape, u32, u32, Logits, Stacks);

fn whole_cases() -> Vec<SortedCase> {
    vec![
        (shape([4, 1, 8, 16], None, false), 17, 17, Logits::Random, WHOLE),
        (shape([16, 8, 32, 64], Some(32), true), 64, 41, Logits::Ties, WHOLE),
        (shape([5, 2, 40, 48], Some(24), false), 128, 97, Logits::Same, WHOLE),
        (shape([128, 8, 16, 32], None, true), 64, 64, Logits::NotNumbers, WHOLE),
    ]
}

/// Experts of several buffers.
fn divided_cases() -> Vec<SortedCase> {
    vec![
        (shape([4, 1, 8, 16], None, false), 17, 17, Logits::Random, [&[1, 3], &[2, 1, 1]]),
        (shape([16, 8, 32, 64], None, true), 64, 41, Logits::Ties, [&[7, 7, 2], &[10, 6]]),
    ]
}

/// Records the stages of many rows for several sizes, and compares their reference with the formula.
fn sorted_cases(
    name: &str,
    tile: u32,
    (format, fragments): (Format, bool),
    list: Vec<SortedCase>,
    stages: Between<'_>,
) -> (Cases, HostMemory) {
    let mut cases = Cases::new(name);
    let mut random = Random(85);
    let mut made = Vec::new();
    for (shape, most, used, logits, stacks) in list {
        let name = format!("{shape:?}x{used}of{most}.{logits:?}.{stacks:?}");
        cases.case(name.clone());
        let numbers = if format == Format::F16 { format } else { Format::Bf16 };
        let mut layer = Layer::new(&mut random, shape, used, numbers, logits);
        layer.stacks = stacks;
        if format.codes().is_some() {
            layer.quantise(format);
        }
        let mlp = layer.mlp(&mut cases, most, fragments, None);
        // A square has twice the relative error of its root.
        let rounded = if shape.epilogue == Epilogue::SquaredRelu { 2.0 * ROUNDED } else { ROUNDED };
        cases.expect(mlp.x.range, Expect::Floats(rounded));
        let count = (used != most).then(|| cases.words("chunk", &[POISON, POISON, used, POISON]));
        let rows = Used { rows: most, count };
        // A row that is not valid chooses no expert.
        let nobody = (used == 17).then_some(5);
        let valid = nobody.map(|row| valid_rows(&mut cases, most, row));
        let choices = cases.output("choices", shape.choices_bytes(most) as usize / 4, Expect::Floats(SUMS));
        let [tiles, slots] = Sorted::bytes(&shape, most, tile);
        let tiles = cases.output("tiles", tiles as usize / 4, Expect::Exact);
        let slots = cases.output("slots", slots as usize / 4, Expect::Exact);
        let sorted = Sorted::new(&shape, most, tile, tiles, slots);
        let stride = shape.hidden.next_multiple_of(32) + 4;
        let parts = cases.output("parts", shape.parts_bytes(most, stride) as usize / 4, Expect::Floats(rounded));
        let parts = Activations { range: parts, stride };
        cases.recording.call(mlp.choose(rows, valid, choices));
        cases.recording.call(mlp.plan(rows, choices, &sorted));
        stages(&mut cases, &mlp, &sorted, parts);
        // The output of the shared expert comes from another product; here it is given.
        let shared = layer.shared.as_ref().map(|_| {
            let values = random.floats((used * shape.hidden) as usize);
            let of = Layer::activations(&mut cases, "shared", &values, shape.hidden, most, None);
            (of, values)
        });
        cases.recording.call(mlp.combine(rows, choices, parts, shared.as_ref().map(|s| s.0)));
        made.push((layer, mlp, name, nobody, shared.map(|s| s.1)));
    }
    let reference = cases.reference();
    for (mut layer, mlp, name, nobody, shared) in made {
        // The formula is evaluated without the shared expert, and the given output is added.
        layer.shared = None;
        for row in 0..layer.rows {
            let gate = layer.logits[(row * layer.shape.logits() + layer.shape.logits() - 1) as usize];
            for (i, wanted) in (0..).zip(layer.wanted(row)) {
                let at = (row * layer.shape.hidden + i) as usize;
                let added = shared.as_ref().map_or(0.0, |s| sigmoid(f64::from(gate)) * f64::from(s[at]));
                let wanted = if nobody == Some(row) { f64::from(layer.x[at]) } else { wanted + added };
                let found = f64::from(reference.f32(mlp.x.range, row * mlp.x.stride + i));
                let near = (found - wanted).abs() <= 3e-2 * (1.0 + wanted.abs());
                assert!(
                    near || (found.is_nan() && wanted.is_nan()),
                    "the reference says {found:e}, the formula {wanted:e}: {name}, row {row}, column {i}"
                );
            }
        }
    }
    (cases, reference)
}

#[test]
fn many_rows_are_sorted_by_expert_and_put_together_again() {
    let vulkan = Vulkan::new();
    for matrices in ways() {
        let formats = |how| match how {
            Grouped::Panel(_, configs) if configs[0].blocks == 1 => vec![Format::Bf16, Format::Codes(INT8)],
            Grouped::Panel(..) => vec![Format::Bf16, Format::F16, Format::Codes(INT8)],
            Grouped::Tiled(..) | Grouped::Wgmma(..) => vec![how.order().format()],
        };
        let all = groupings(*matrices).into_iter();
        for (tile, how, format) in all.flat_map(|(tile, how)| formats(how).into_iter().map(move |f| (tile, how, f))) {
            let stages = |cases: &mut Cases, mlp: &Mlp, sorted: &Sorted, parts: Activations| {
                let (hidden, inner, order) = (mlp.shape.hidden, mlp.shape.inner, how.order());
                let words = |cols| sorted.packed_bytes(order, cols) as usize / 4;
                let near = |limit: f32, cols: u32| match order.has_scales() {
                    true => Expect::HalfRows { numbers: order.scales_at(sorted.slot_count(), cols) as u32 / 4, limit },
                    false => Expect::Bfloats(limit),
                };
                let packed = cases.output("packed", words(hidden), near(2f32.powi(-7), hidden));
                let packed = Packed { range: packed, cols: hidden, order };
                // `panel` does not write padded columns.
                let middle = cases.words("middle", &vec![0; words(inner)]);
                cases.expect(middle, near(ROUNDED, inner));
                let middle = Packed { range: middle, cols: inner, order };
                cases.recording.call(pack_sorted("pack".to_owned(), mlp.x, Some(mlp.norm), packed, sorted));
                let hidden = (!mlp.shape.packs_middle(order)).then(|| {
                    let choices = mlp.shape.chosen * sorted.slot_count();
                    let range = cases.words("hidden", &vec![POISON; (choices * inner) as usize]);
                    cases.expect(range, Expect::Any);
                    Activations { range, stride: inner }
                });
                for stack in &mlp.gate_up {
                    let y = hidden.map_or(Output::Packed(middle), Output::Rows);
                    cases.recording.call(mlp.sorted_gate_up(stack, packed, y, sorted, how));
                }
                if let Some(hidden) = hidden {
                    let each = Sorted { chosen: 1, ..*sorted };
                    cases.recording.call(pack_sorted("hidden_pack".to_owned(), hidden, None, middle, &each));
                }
                for stack in &mlp.down {
                    cases.recording.call(mlp.sorted_down(stack, middle, parts, sorted, how));
                }
            };
            for (name, list) in [("many", whole_cases()), ("divided", divided_cases())] {
                let name = format!("{name}.{how:?}.{format:?}");
                let (cases, reference) = sorted_cases(&name, tile, (format, true), list, &stages);
                check(&vulkan, &cases, &reference);
            }
        }
    }
}

#[test]
fn many_rows_on_weights_row_after_row_are_sorted_by_expert() {
    let vulkan = Vulkan::new();
    let config = |tokens, features, words, each| MatmulConfig { tokens, features, words, each, splits: 1 };
    let ways = [
        (Arithmetic::F32, config(16, 32, 1, 4)),
        (Arithmetic::F32, config(64, 64, 1, 4)),
        (Arithmetic::F16, config(32, 32, 1, 4)),
    ];
    for (arithmetic, config) in ways {
        let stages = |cases: &mut Cases, mlp: &Mlp, sorted: &Sorted, parts: Activations| {
            let rows = sorted.slot_count();
            let mut blocked = |name: &str, cols: u32| {
                // Tiles without an expert are left as they are. Their contents depend on the rounding of what is blocked.
                let range = cases.words(name, &vec![0; Blocked::bytes(arithmetic, rows, cols) as usize / 4]);
                cases.expect(range, Expect::Any);
                let scales = cases.words(&format!("{name}.scales"), &vec![0; Blocked::scale_bytes(rows) as usize / 4]);
                cases.expect(scales, Expect::Any);
                Blocked { range, scales, cols, arithmetic }
            };
            let (x, middle) = (blocked("x.blocked", mlp.shape.hidden), blocked("middle.blocked", mlp.shape.inner));
            let stride = mlp.shape.inner.next_multiple_of(8) + 8;
            let between = cases.output("middle", (rows * stride) as usize, Expect::Floats(ROUNDED));
            let between = Activations { range: between, stride };
            let norm = Some(mlp.norm);
            cases.recording.call(block_rows("block".to_owned(), mlp.x, norm, x, MatmulRows::Sorted(sorted)));
            for stack in &mlp.gate_up {
                cases.recording.call(mlp.matmul_gate_up(stack, x, between, sorted, config));
            }
            cases.recording.call(block_rows("again".to_owned(), between, None, middle, MatmulRows::Slots(sorted)));
            for stack in &mlp.down {
                cases.recording.call(mlp.matmul_down(stack, middle, parts, sorted, config));
            }
        };
        for (name, list) in [("rows", whole_cases()), ("divided", divided_cases())] {
            let name = format!("{name}.{config:?}");
            let (cases, reference) = sorted_cases(&name, config.tokens, (Format::Bf16, false), list, &stages);
            for driver in Driver::all() {
                let bench = Bench::new(&vulkan, *driver);
                if arithmetic == Arithmetic::F32 || bench.device.adapter().capabilities.float16 {
                    cases.check(&bench, &reference);
                }
            }
        }
    }
}

/// Goal: the selection with scores chooses the experts of the formula and gives them its shares: softmax with factors of
/// logits and of experts (Gemma 4), and sigmoids with a bias and groups (DeepSeek-V3).
#[test]
fn experts_are_chosen_by_scores() {
    let vulkan = Vulkan::new();
    let mut cases = Cases::new("route");
    let mut random = Random(85);
    let mut made = Vec::new();
    for (count, chosen, groups, sigmoid) in [(8, 2, 1, false), (128, 8, 1, false), (16, 4, 4, true), (9, 3, 3, false)] {
        let sizes = ExpertsShape { gated: false, ..shape([count, chosen, 8, 16], None, !sigmoid) };
        let rows = 5;
        cases.case(format!("{chosen} of {count} in {groups} groups, sigmoid {sigmoid}"));
        let layer = Layer::new(&mut random, sizes, rows, Format::F32, Logits::Random);
        let mlp = layer.mlp(&mut cases, rows, false, None);
        let (bias, scales) = (random.floats(count as usize), random.floats(count as usize));
        let route = Route {
            sigmoid,
            bias: sigmoid.then(|| cases.floats("bias", &bias)),
            groups,
            kept: groups.min(2),
            best: if sigmoid { 2 } else { 1 },
            sum_offset: 1e-20,
            factor: 1.5,
            logit_scale: 3.0,
            scales: (!sigmoid).then(|| cases.floats("scales", &scales)),
        };
        let choices = cases.output("choices", sizes.choices_bytes(rows) as usize / 4, Expect::Pairs(SUMS));
        let mlp = Mlp { routing: Some(route), ..mlp };
        cases.recording.call(mlp.choose(Used { rows, count: None }, None, choices));
        made.push((layer, route, bias, scales, choices));
    }
    let reference = cases.reference();
    for (layer, route, bias, scales, choices) in made {
        let ExpertsShape { count, chosen, normalise, .. } = layer.shape;
        for row in 0..layer.rows {
            let logits = &layer.logits[(row * count) as usize..][..count as usize];
            let z: Vec<f64> = logits.iter().map(|z| f64::from(*z) * 3.0).collect();
            let total: f64 = z.iter().map(|z| z.exp()).sum();
            let score = |z: f64| if route.sigmoid { 1.0 / (1.0 + (-z).exp()) } else { z.exp() / total };
            let scores: Vec<f64> = z.iter().map(|z| score(*z)).collect();
            let wish = |id: usize| scores[id] + if route.sigmoid { f64::from(bias[id]) } else { 0.0 };
            let by_wish = |ids: &mut Vec<usize>| ids.sort_by(|a, b| wish(*b).total_cmp(&wish(*a)));
            let each = (count / route.groups) as usize;
            let of_group = |group: usize| -> f64 {
                let mut ids: Vec<usize> = (group * each..(group + 1) * each).collect();
                by_wish(&mut ids);
                ids[..route.best as usize].iter().map(|id| wish(*id)).sum()
            };
            let mut kept: Vec<usize> = (0..route.groups as usize).collect();
            kept.sort_by(|a, b| of_group(*b).total_cmp(&of_group(*a)));
            kept.truncate(route.kept as usize);
            let mut ids: Vec<usize> = (0..count as usize).filter(|id| kept.contains(&(id / each))).collect();
            by_wish(&mut ids);
            ids.truncate(chosen as usize);
            let sum: f64 = if normalise { ids.iter().map(|id| scores[*id]).sum() } else { 1.0 };
            for (j, id) in ids.into_iter().enumerate() {
                let at = (row * chosen + j as u32) * 2;
                let own = if route.sigmoid { 1.0 } else { f64::from(scales[id]) };
                let (found, wanted) = (f64::from(reference.f32(choices, at + 1)), scores[id] / sum * 1.5 * own);
                assert_eq!(reference.u32(choices, at), id as u32, "choice {j} of row {row} of {count}");
                assert!((found - wanted).abs() <= 1e-5, "share {j} of row {row} of {count}: {found}, not {wanted}");
            }
        }
    }
    check(&vulkan, &cases, &reference);
}

/// Experts of codes by `expert_skinny.codes.ptx`: numbers of experts, choices and rows of all kinds, with other numbers of groups, slots and
/// workgroups. `tagged`: each stage alone, with tagged words that are complete; otherwise both, one after the other.
fn ptx_cases(name: &str, tagged_words: bool) -> Cases {
    let mut cases = Cases::new(name);
    let mut random = Random(88);
    let int8 = Format::Codes(INT8);
    let int4 = Format::Codes(INT4);
    let silu =
        |sizes, normalise| ExpertsShape { epilogue: Epilogue::Gated(Glu::Silu), ..shape(sizes, None, normalise) };
    // Groups, slots and workgroups of both stages.
    let list = [
        (silu([4, 1, 8, 16], false), 1, int8, Logits::Random, WHOLE, [[1, 1, 1], [1, 2, 1]]),
        (silu([8, 2, 32, 544], true), 1, int8, Logits::Ties, WHOLE, [[2, 2, 3], [2, 2, 2]]),
        // Several units of an expert, by several groups; more blocks than places of sums.
        (silu([8, 2, 544, 96], true), 1, int4, Logits::Random, WHOLE, [[1, 3, 7], [4, 2, 1]]),
        (silu([16, 4, 288, 1280], true), 1, int4, Logits::Random, WHOLE, [[8, 2, 5], [8, 2, 40]]),
        // More experts than groups: sections, with blocks that take all places.
        (silu([16, 8, 32, 64], true), 1, int8, Logits::Random, WHOLE, [[1, 2, 2], [3, 1, 1]]),
        (silu([16, 8, 32, 64], true), 4, int8, Logits::Random, WHOLE, [[4, 2, 3], [8, 2, 4]]),
        (silu([37, 3, 48, 48], false), 3, int4, Logits::NotNumbers, WHOLE, [[3, 1, 2], [3, 2, 3]]),
        (silu([8, 2, 272, 640], true), 4, int4, Logits::Same, WHOLE, [[5, 2, 9], [6, 3, 12]]),
        (shape([16, 8, 32, 64], None, true), 2, int4, Logits::Ties, WHOLE, [[2, 2, 3], [8, 2, 4]]),
        (shape([16, 4, 32, 64], Some(40), true), 3, int8, Logits::Random, WHOLE, [[3, 2, 3], [4, 2, 4]]),
        (shape([8, 2, 40, 80], Some(32), false), 1, int4, Logits::Ties, WHOLE, [[1, 2, 3], [2, 2, 5]]),
        (shape([8, 2, 32, 80], Some(32), false), 1, int4, Logits::Random, WHOLE, [[1, 2, 3], [2, 2, 5]]),
        (shape([8, 2, 32, 80], Some(64), true), 3, int4, Logits::Random, WHOLE, [[3, 2, 3], [4, 2, 5]]),
        // Experts of several buffers, of which some may be chosen by no row.
        (silu([16, 2, 32, 64], true), 1, int8, Logits::Random, [&[5, 10, 1], &[8, 8]], [[2, 2, 3], [2, 2, 3]]),
        (silu([16, 8, 64, 96], true), 4, int4, Logits::Random, [&[5, 11], &[8, 8]], [[4, 2, 3], [8, 2, 4]]),
        // With biases.
        (shape([8, 2, 32, 544], None, true), 1, int8, Logits::Ties, WHOLE, [[2, 2, 3], [2, 2, 2]]),
        (shape([8, 4, 64, 96], None, false), 3, int4, Logits::Random, WHOLE, [[3, 1, 2], [4, 2, 6]]),
        (shape([8, 4, 64, 96], None, true), 4, int8, Logits::Random, [&[3, 5], &[4, 4]], [[4, 1, 2], [4, 2, 6]]),
        // More than four rows, or 32 choices of all: experts with several entries, and with none.
        (silu([40, 8, 32, 64], true), 8, int8, Logits::Random, WHOLE, [[8, 2, 3], [8, 2, 1]]),
        (silu([8, 4, 288, 640], true), 8, int4, Logits::Random, WHOLE, [[8, 2, 5], [8, 2, 12]]),
        (silu([16, 4, 64, 1024], true), 4, int4, Logits::Random, WHOLE, [[8, 2, 3], [8, 2, 16]]),
        (silu([16, 2, 32, 64], false), 5, int8, Logits::Same, WHOLE, [[5, 1, 2], [8, 2, 2]]),
        (silu([37, 16, 48, 48], true), 3, int4, Logits::Ties, WHOLE, [[3, 1, 2], [4, 2, 3]]),
        (silu([37, 3, 48, 48], false), 7, int4, Logits::NotNumbers, WHOLE, [[7, 1, 2], [9, 2, 3]]),
        (silu([16, 8, 64, 96], true), 6, int8, Logits::Random, [&[5, 11], &[8, 8]], [[6, 2, 3], [8, 2, 4]]),
        (shape([16, 4, 32, 64], Some(64), true), 8, int8, Logits::Random, WHOLE, [[8, 2, 3], [8, 2, 4]]),
        (shape([8, 4, 64, 96], None, true), 6, int8, Logits::Random, [&[3, 5], &[4, 4]], [[6, 1, 2], [8, 2, 6]]),
    ];
    // Rows of tagged words have no padding.
    let list = list.into_iter().filter(|(shape, ..)| !tagged_words || shape.middle_is_whole());
    for (index, (shape, rows, format, logits, stacks, configs)) in (0..).zip(list) {
        for down in if tagged_words { &[false, true][..] } else { &[false] } {
            cases.case(format!("{shape:?}x{rows}.{format:?}.{logits:?}.{stacks:?}.{configs:?}.{down}"));
            let mut layer = Layer::new(&mut random, shape, rows, Format::Bf16, logits);
            layer.stacks = stacks;
            // A bias chooses other experts than the layer's own selection.
            let biases = layer.biases.iter_mut().flatten().flatten();
            biases.filter(|value| value.is_nan()).for_each(|value| *value = random.float());
            for (values, cols) in [(&mut layer.gate_up, shape.hidden), (&mut layer.down, shape.inner)] {
                let size = 3.0 / (cols as f32).sqrt();
                values.iter_mut().filter(|value| value.is_nan()).for_each(|value| *value = random.float() * size);
            }
            match format == int8 {
                true => layer.quantise_exactly(),
                false => layer.quantise(format),
            }
            let mlp = layer.mlp(&mut cases, rows, true, tagged_words.then_some([TAGS[0], TAGS[1]]));
            let output = random.floats((rows * shape.hidden) as usize);
            let carried = Flow { input_carried: tagged_words, ..Flow::NONE };
            let shared = shape.shared_inner.map(|_| {
                let tag = tagged_words.then_some(TAGS[1]);
                let output = Layer::activations(&mut cases, "shared.output", &output, shape.hidden, rows, tag);
                (output, Flow { input: tag.unwrap_or(0), ..carried })
            });
            // All selections take turns, with sigmoids and a bias among them.
            let count = shape.count as usize;
            let routing = match index % 4 {
                0 => None,
                of => {
                    let bias = (of == 3).then(|| cases.floats("choice_bias", &random.floats(count)));
                    let scales = (of == 1).then(|| {
                        let scales: Vec<f32> = (0..count).map(|_| 1.0 + random.float() / 2.0).collect();
                        cases.floats("scales", &scales)
                    });
                    Some(route(of > 1, bias, scales))
                }
            };
            // A selection by a bias chooses experts that have no weights in the layer.
            let mlp =
                Mlp { routing: routing.filter(|_| index % 4 != 3 || format != int8), adds: index % 2 == 0, ..mlp };
            let (stride, fault) = (shape.middle_stride(), cases.words("fault", &[0, 0]));
            // x is rounded by up to 2^-16 of the largest of a group before each product.
            let near = 5e-4;
            let middle = match (tagged_words, *down) {
                (false, _) => cases.output("middle", (rows * stride) as usize, Expect::Floats(near)),
                (true, down) => {
                    let tag = TAGS[if down { 2 } else { 3 }];
                    let words: Vec<u32> = (0..rows * stride).map(|_| tagged(random.float(), tag)).collect();
                    cases.words("middle", &words)
                }
            };
            let middle = Activations { range: middle, stride };
            let config = SkinnyConfig { threads: 64, tiles: 1, ahead: 4 };
            let ptx = configs.map(|[groups, slots, workgroups]| Some(CodesPtxConfig { groups, slots, workgroups }));
            let few = |stage: usize, flow| FewRows {
                middle,
                rows,
                matrices: Matrices::Cooperative,
                config,
                ptx: ptx[stage],
                flow,
                logits: Flow { input: if tagged_words { TAGS[1] } else { 0 }, ..carried },
                fault,
                shared,
            };
            let first = Flow { input: TAGS[0], old: TAGS[3], output: Some(TAGS[2]), ..carried };
            let first = if tagged_words { first } else { Flow::NONE };
            let mut calls = Vec::new();
            if !down {
                calls.extend(mlp.gate_up.iter().map(|stack| mlp.few_gate_up(stack, few(0, first))));
            }
            if *down || !tagged_words {
                let mut old = TAGS[0];
                for (stack, output) in mlp.down.iter().zip([TAGS[3], 77]) {
                    let flow = Flow { input: TAGS[2], old, output: Some(output), ..carried };
                    calls.push(mlp.few_down(stack, few(1, if tagged_words { flow } else { Flow::NONE })));
                    old = output;
                }
            }
            let expect = if tagged_words { Expect::Tagged(near) } else { Expect::Floats(near) };
            cases.expect(if *down || !tagged_words { mlp.x.range } else { middle.range }, expect);
            for call in calls {
                assert_eq!(call.kernel, "expert_skinny.codes.ptx", "{shape:?}, {rows} rows");
                cases.recording.call(call);
            }
        }
    }
    cases
}

#[test]
fn experts_of_codes_on_a_simulated_processor() {
    ptx::agree(&ptx_cases("plain", false), str::to_owned);
    ptx::agree(&ptx_cases("tagged", true), str::to_owned);
}

/// Goal: the simulation notices what is read or overwritten too early. Method: programs that wait less than they must.
#[test]
fn the_simulated_processor_notices_a_missing_wait_of_experts() {
    let cases = ptx_cases("waits", true);
    ptx::notices(
        &cases,
        &[
            // A unit is multiplied before its copy has come.
            ("mbarrier.try_wait.parity.shared::cta.b64 %p0, [%barrier_at], %phase;", "setp.lt.u32 %p0, %lane, 32;"),
            // A block's sums are handed over with each section.
            ("setp.eq.and.u32 %p1, %section, %last_section, %lead;", "and.pred %p1, %lead, %lead;"),
            // The next unit is copied over one whose loads may be on their way.
            ("fence.proxy.async.shared::cta;\nsetp", "setp"),
            // The factors are those of the first block.
            ("setp.eq.u32 %p0, %left, %of_section;\nshr", "setp.eq.u32 %p0, %turn, 0;\nshr"),
        ],
    );
}

/// The formats that `expert_skinny.codes.ptx` serves, and a second kind of each.
fn ptx_formats() -> Vec<Format> {
    use BlockType::{MXFP4, Q3_K, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let blocks = [Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, Q3_K, MXFP4];
    let nvfp4 = Codes { bits: 4, group: 16, number: Number::E2m1, minimum: Minimum::Zero { halves: 0 } };
    let long = |bits, number, minimum| Codes { bits, group: 128, number, minimum };
    let e4m3 = long(8, Number::E4m3, Minimum::Zero { halves: 0 });
    let all = blocks.into_iter().map(BlockType::codes).chain([
        INT4,
        INT8,
        e4m3,
        nvfp4,
        long(4, Number::Affine, Minimum::Stored),
    ]);
    all.map(Format::Codes).filter(|format| codes_ptx::serves(*format)).collect()
}

/// Goal: the test at start accepts the programs for experts of every format, and notices a wrong choice, a wrong expert, a wrong unit and
/// a wrong factor. Method: its probes on the simulated processor, with programs that differ in one place.
#[test]
fn the_test_at_start_of_experts_covers_both_stages() {
    let formats = ptx_formats();
    assert!(formats.len() >= 11, "{formats:?}");
    for (index, format) in (0..).zip(formats) {
        let unit = format.codes().map_or(32, unit_cols);
        let (rows, chosen) = ([1, 4, 5][index as usize % 3], [3, 2, 8][index as usize % 3]);
        let sizes = [if index % 2 == 0 { 8u32 } else { 16 }, chosen, 4 * unit, rows.max(4) * 2 * unit];
        let shape = ExpertsShape { epilogue: Epilogue::Gated(Glu::Silu), ..shape(sizes, Some(32), true) };
        let range = Range { buffer: BufferId(0), offset: 0, bytes: 0 };
        let floats = |stride: u32| Activations { range, stride };
        let stack = |rows, cols| vec![Stack { matrix: Matrix { range, format, rows, cols }, first: 0 }];
        let matrix = |rows, cols| Matrix { range, format, rows, cols };
        let mlp = Mlp {
            label: "layers.0.".to_owned(),
            shape,
            gate_up: stack(shape.count * 2 * shape.inner, shape.hidden),
            down: stack(shape.count * shape.hidden, shape.inner),
            shared: Some((matrix(64, shape.hidden), matrix(shape.hidden, 32))),
            biases: [None, None],
            x: floats(shape.hidden),
            y: floats(shape.hidden),
            adds: true,
            routing: None,
            norm: (range, 1e-5),
            logits: floats(shape.logits().next_multiple_of(4)),
        };
        let tag = |input| Flow { input_carried: true, input, ..Flow::NONE };
        let few = |groups, flow| FewRows {
            middle: floats(shape.middle_stride()),
            rows,
            matrices: Matrices::Cooperative,
            config: SkinnyConfig { threads: 64, tiles: 1, ahead: 8 },
            ptx: Some(CodesPtxConfig { groups, slots: 2, workgroups: 64 }),
            flow,
            logits: tag(TAGS[1]),
            fault: range,
            shared: Some((floats(shape.hidden), tag(TAGS[3]))),
        };
        let flow = Flow { input_carried: true, input: TAGS[0], old: TAGS[2], output: Some(TAGS[3]) };
        let calls = [
            mlp.few_gate_up(&mlp.gate_up[0], few(rows.max(4), flow)),
            mlp.few_down(&mlp.down[0], few(chosen * 2, flow)),
        ];
        for (stage, call) in calls.into_iter().enumerate() {
            assert_eq!(call.kernel, "expert_skinny.codes.ptx", "{format:?}");
            let probe = code_probe::probe(&call).expect("it reads codes");
            let Op::Call(call) = &probe.recording.ops[0] else { panic!("a probe is one call") };
            let found = Cell::new(false);
            let difference = |right: &str, wrong: &str| {
                let change = |text: &str| {
                    found.set(found.get() || text.contains(right));
                    text.replace(right, wrong)
                };
                probe.difference(&ptx::simulate(call, &probe.memory, change))
            };
            assert_eq!(difference("", ""), None, "{format:?}, stage {stage}");
            for (right, wrong) in [
                ("setp.gt.u32 %p0, %key0, %e2;", "setp.lt.u32 %p0, %key0, %e2;"),
                (
                    "sub.u32 %copies, %copies, 1;\nadd.u64 %from, %from, ",
                    "sub.u32 %copies, %copies, 1;\nadd.u64 %from, %from, 0; //",
                ),
                match stage {
                    0 => ("mad.lo.u32 %e2, %e2, %expert_blocks, %copy_block;", "mov.u32 %e2, %copy_block;"),
                    _ => ("mad.lo.u32 %e2, %e2, %expert_blocks, %e1;", "mov.u32 %e2, %e1;"),
                },
                match stage {
                    0 => ("ld.global.nc.f32 %factor, [%l0];", "mov.f32 %factor, 0f3f800000;"),
                    _ => ("ld.shared.f32 %factor_v, [", "ld.shared.f32 %factor_v, [4+"),
                },
            ] {
                found.set(false);
                // A wrong expert may have no weights in the probe, which ends the simulation.
                let noticed =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| difference(right, wrong).is_some()));
                assert!(noticed.unwrap_or(true), "{format:?}, stage {stage}: {wrong} is not noticed");
                assert!(found.get(), "the text has no {right}");
            }
        }
    }
}

/// Goal: a wait for words that never come ends, and says which call waited. Method: logits, x, old values of y and the shared
/// expert's output of an earlier generation.
#[test]
fn experts_that_wait_in_vain_set_the_fault_word() {
    for (number, wait) in (5..).zip(["logits", "x", "old", "shared"]) {
        let mut cases = Cases::new("stale");
        let mut random = Random(89);
        cases.case(wait.to_owned());
        let shape = shape([8, 2, 32, 16], Some(32), true);
        let mut layer = Layer::new(&mut random, shape, 1, Format::Bf16, Logits::Random);
        layer.quantise_exactly();
        let mlp = layer.mlp(&mut cases, 1, true, Some([TAGS[0], TAGS[1]]));
        let stride = shape.middle_stride();
        let words: Vec<u32> = (0..stride).map(|_| tagged(random.float(), TAGS[2])).collect();
        let middle = Activations { range: cases.words("middle", &words), stride };
        let fault = cases.words("fault", &[0, 0]);
        let output = Layer::activations(&mut cases, "shared.output", &layer.x.clone(), 16, 1, Some(TAGS[3]));
        let tag = |right: u32, of: &str| (if of == wait { 99 } else { right }) | number << CALL_SHIFT;
        let carried = |input| Flow { input_carried: true, input, ..Flow::NONE };
        let few = FewRows {
            middle,
            rows: 1,
            matrices: Matrices::Cooperative,
            config: SkinnyConfig { threads: 64, tiles: 1, ahead: 4 },
            ptx: Some(CodesPtxConfig { groups: 2, slots: 2, workgroups: 1 }),
            flow: Flow { old: tag(TAGS[0], "old"), output: Some(77), ..carried(tag(TAGS[2], "x")) },
            logits: carried(tag(TAGS[1], "logits")),
            fault,
            shared: Some((output, carried(tag(TAGS[3], "shared")))),
        };
        let call = mlp.few_down(&mlp.down[0], few);
        let after = ptx::simulate(&call, &cases.before(), str::to_owned);
        assert_eq!(after.u32(fault, 0), number, "{wait}");
    }
}

#[test]
fn programs_of_experts_are_assembled_without_spilling() {
    let assembler = Assembler::new();
    for (index, format) in (0..).zip(ptx_formats()) {
        // Rows, stage, experts, choices, columns, the code of the selection, tags, whether the shared expert is added or, with 1,
        // biases are, groups.
        for [rows, stage, count, chosen, columns, routed, tagged, shared, groups] in [
            [1, 0, 32, 4, 2880, 0, 1, 1, 24],
            [4, 1, 128, 4, 2880, 0, 1, 1, 20],
            [1, 0, 512, 10, 3072, 2, 1, 0, 24],
            [3, 0, 512, 10, 3072, 2, 1, 0, 24],
            [1, 0, 128, 8, 2048, 0, 1, 0, 16],
            [1, 1, 128, 8, 768, 0, 1, 0, 16],
            [4, 0, 512, 8, 4096, 2, 1, 0, 16],
            [4, 1, 512, 8, 768, 2, 1, 2, 16],
            [2, 1, 72, 10, 512, 1, 0, 2, 20],
            [3, 0, 8, 2, 4096, 1, 0, 0, 16],
            [1, 1, 8, 2, 14_336, 0, 1, 0, 20],
            [8, 0, 512, 10, 4096, 2, 1, 0, 24],
            [8, 1, 512, 10, 768, 2, 1, 2, 20],
            [8, 0, 128, 8, 2048, 0, 1, 0, 16],
            [6, 1, 128, 4, 2880, 0, 1, 1, 20],
        ] {
            if index % 3 > 0 && rows % 2 == 0 && !every_case() {
                continue;
            }
            let config = CodesPtxConfig { groups, slots: 3, workgroups: 132 };
            let threads = codes_ptx::expert_threads(config, stage == 1);
            let constants = ExpertSkinnyConstants {
                threads,
                lanes: threads,
                stage,
                count,
                chosen,
                normalise: u32::from(routed != 1),
                shared: if shared == 2 { 2 } else { 0 },
                tiles: 1,
                ahead: 3,
                rows,
                columns,
                shared_columns: 32,
                tagged,
                glu: if routed == 1 { 5 } else { 2 },
                bias: u32::from(shared == 1),
                add: 1,
                routed,
                choice_bias: u32::from(routed == 2),
                expert_scales: u32::from(routed == 1),
                gated: 1,
                devices: 0,
                first_expert: 0,
                part_experts: if rows == 3 { 4 } else { 0 },
                sum_offset: 0,
                codes: codes_word(format),
                logit_scale: 1f32.to_bits(),
            };
            assert!(codes_ptx::serves_experts(format, &constants), "{format:?}, {constants:?}");
            let config = config.of_experts(2048, &constants).expect("a slot fits");
            let constants = ExpertSkinnyConstants { ahead: config.slots, ..constants };
            let program = codes_ptx::program("expert_skinny.codes.ptx", &constants.into_values());
            assembler.require(&format!("{format:?}, {constants:?}"), &program.text);
        }
    }
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn experts_of_codes_by_a_program_in_ptx() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::Gpu);
    bench.device.takes_ptx().expect("programs in PTX");
    for tagged_words in [false, true] {
        let cases = ptx_cases(if tagged_words { "tagged" } else { "plain" }, tagged_words);
        cases.check(&bench, &cases.reference());
    }
}

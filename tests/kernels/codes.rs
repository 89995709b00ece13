//! Goal: the kernels that read quantised weights match their references on both CPU drivers, for every type of block of
//! GGUF files, the codes of safetensors formats, and both formats of quantising at load, in both layouts. The references read weights through
//! `memory::pack::codes::element`, which unit tests compare with the blocks' values. Method: as in `forward.rs`.
//!
//! Tolerances: of sums as in `forward.rs`. `skinny_codes` multiplies x and the weights in f16 with sums in f32. Each of
//! up to 512 terms of about 0.2 (after a norm) has a relative error of up to 2^-10 with a random sign, together about
//! 2e-3; SwiGLU multiplies it by a few. A code in a wrong place changes most sums by more than 0.1.

use crate::assembler::Assembler;
use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, every_case};
use crate::ptx;
use half::bf16;
use ostinato::kernels::code_probe::probe;
use ostinato::kernels::codes_word;
use ostinato::kernels::embed::{RowsFrom, Table, embed_rows};
use ostinato::kernels::gemm::codes::{
    CodesConfig, ProductColumns, expand_codes, expanded_bytes, partial_bytes, skinny_codes, units,
};
use ostinato::kernels::gemm::codes_ptx::{self, CodesPtxConfig, skinny_codes_ptx};
use ostinato::kernels::gemm::gemv_dots::{self, DotsConfig};
use ostinato::kernels::gemm::matmul::{Arithmetic, Blocked, MatmulConfig, MatmulRows, Scratch, block_rows};
use ostinato::kernels::gemm::panel::{Fold, PanelConfig, panel};
use ostinato::kernels::gemm::skinny::Matrices;
use ostinato::kernels::gemm::tiled::{Output, Packed, PackedOrder, Tiled, token_index};
use ostinato::kernels::gemm::{Activations, Epilogue, GemvConfig, Glu, Matrix, Product};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::moe::{ExpertsShape, GemvRows, Mlp, Stack, Used};
use ostinato::kernels::recording::{Op, Range};
use ostinato::kernels::shaders::{EmbedRowsArgs, SkinnyCodesConstants};
use ostinato::kernels::state;
use ostinato::kernels::tags::{CALL_SHIFT, Flow, tagged};
use ostinato::memory::pack::codes::{element, unit_cols};
use ostinato::memory::pack::{self, Format, Layout, Packing, RowMap, SourceFormat};
use ostinato::model::decoder::stride;
use ostinato::quant::blocks::BlockType;
use ostinato::quant::number::Number;
use ostinato::quant::quantize::{INT4, INT8};
use ostinato::quant::{Codes, Minimum};
use std::collections::HashSet;

/// Tolerance of sums in f32.
const SUMS: f32 = 2e-5;
/// Tolerance of products in f16, and of two of them multiplied by SwiGLU.
const HALF: f32 = 1.2e-2;
const HALF_SWIGLU: f32 = 4e-2;
/// Of one row by `skinny_codes.ptx`, which rounds x to 16 bits or more.
const INTEGERS: f32 = 6e-4;

/// A way to quantise a matrix.
#[derive(Clone, Copy, Debug)]
enum Way {
    Blocks(BlockType),
    /// Canonical rows, as the loader makes them of safetensors formats.
    Canonical(Codes),
    Load(Format),
}

/// AWQ, and GPTQ with four bits and zeros.
const AWQ: Codes = Codes { bits: 4, group: 128, number: Number::Affine, minimum: Minimum::Stored };

/// The codes of safetensors formats that no type of block has.
const CANONICAL: [Codes; 10] = {
    const fn codes(bits: u32, group: u32, number: Number, halves: u16) -> Codes {
        Codes { bits, group, number, minimum: Minimum::Zero { halves } }
    }
    [
        codes(8, 128, Number::E4m3, 0),
        codes(8, 64, Number::E4m3, 0),
        codes(8, 32, Number::E4m3, 0),
        codes(8, 128, Number::E5m2, 0),
        codes(4, 16, Number::E2m1, 0),
        codes(8, 64, Number::Affine, 256),
        codes(4, 128, Number::Affine, 16),
        codes(3, 64, Number::Affine, 8),
        codes(2, 128, Number::Affine, 4),
        AWQ,
    ]
};

fn ways() -> Vec<Way> {
    let blocks = BlockType::ALL.into_iter().map(Way::Blocks);
    let canonical = CANONICAL.into_iter().map(Way::Canonical);
    blocks.chain(canonical).chain([INT8, INT4].map(|codes| Way::Load(Format::Codes(codes)))).collect()
}

impl Way {
    fn format(self) -> Format {
        match self {
            Way::Blocks(blocks) => Format::Codes(blocks.codes()),
            Way::Canonical(codes) => Format::Codes(codes),
            Way::Load(format) => format,
        }
    }

    /// The columns of a row are a multiple of this.
    fn columns(self) -> u32 {
        match self {
            Way::Blocks(blocks) => blocks.elements() as u32,
            Way::Canonical(_) | Way::Load(_) => 8,
        }
    }

    /// Returns the words of a packed matrix of random weights below 1.
    fn matrix(self, random: &mut Random, rows: u32, cols: u32, layout: Layout) -> Vec<u32> {
        let numbers = random.floats((rows * cols) as usize);
        let (bytes, format) = match self {
            Way::Blocks(blocks) => {
                let mut bytes = vec![0; numbers.len() / blocks.elements() * blocks.bytes()];
                blocks.quantize(&numbers, &mut bytes);
                (bytes, SourceFormat::Blocks(blocks))
            }
            Way::Canonical(codes) => {
                let rows = numbers.chunks(cols as usize).flat_map(|row| canonical(codes, row)).collect();
                (rows, SourceFormat::Canonical(codes))
            }
            Way::Load(_) => {
                let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
                (bytes, SourceFormat::Numbers(Format::F32))
            }
        };
        let packing = Packing { rows, cols, layout, format: self.format() };
        let source = pack::Rows { bytes: &bytes, map: RowMap::whole(format, rows, cols) };
        let mut words = vec![0u32; packing.bytes() as usize / 4];
        pack::pack(&packing, &[source], 0..packing.bytes(), bytemuck::cast_slice_mut(&mut words))
            .expect("finite values");
        words
    }
}

/// Returns a canonical row of the codes nearest to numbers below 1.
fn canonical(codes: Codes, row: &[f32]) -> Vec<u8> {
    let table = &codes.number.table()[..1 << codes.bits];
    let finite = |code: &u8| codes.number.is_finite(*code);
    let middle = codes.zero().unwrap_or((1 << (codes.bits - 1)) as f32);
    let (mut numbers, mut scales, mut minimums) = (Vec::new(), Vec::new(), Vec::new());
    for (group, part) in row.chunks(codes.group as usize).enumerate() {
        // Floats reach from -1 to 1; scales differ, and zeros where each group has its own.
        let reach = if codes.number == Number::E2m1 { 6.0 } else { 1.0 };
        let size = if codes.number == Number::Affine { (1 << (codes.bits - 1)) as f32 } else { reach };
        let scale = (1.0 + group as f32 / 7.0) / size;
        let zero = if codes.zero().is_none() { middle + (group % 3) as f32 - 1.0 } else { middle };
        let nearest = |x: &f32| {
            let apart = |code: u8| (scale * (table[usize::from(code)] - zero) - x).abs();
            let all = (0..table.len()).map(|code| code as u8).filter(finite);
            all.min_by(|a, b| apart(*a).total_cmp(&apart(*b))).expect("a code")
        };
        numbers.extend(part.iter().map(nearest));
        scales.push(scale);
        if codes.zero().is_none() {
            minimums.push(scale * zero);
        }
    }
    let mut out = vec![0; SourceFormat::Canonical(codes).row_bytes(row.len() as u32) as usize];
    codes.write_canonical(&numbers, &scales, &minimums, 1.0, &mut out);
    out
}

const ROW_MAJOR: Layout = Layout::RowMajor { columns_multiple: 8 };

fn check(cases: &Cases) {
    let reference = cases.reference();
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

/// Like [`check`], for calls whose workgroups wait for earlier ones of the same call: a CPU driver must run them one after the
/// other, because its threads can be stopped for longer than a kernel polls.
fn check_in_order(cases: &Cases) {
    if std::env::var("LP_NUM_THREADS").as_deref() != Ok("0") {
        println!("\"{}\" needs LP_NUM_THREADS=0, as tests/run.py sets it", cases.recording.name);
        return;
    }
    cases.check(&Bench::new(&Vulkan::new(), Driver::Lavapipe), &cases.reference());
}

/// The shape and options of a product.
#[derive(Clone, Copy, Debug)]
struct Case {
    way: Way,
    rows: u32,
    n: u32,
    k: u32,
    norm: bool,
    bias: bool,
    epilogue: Epilogue,
    flow: Flow,
}

impl Case {
    /// Adds the operands. The values after x's columns and after the norm are poison.
    fn product(&self, cases: &mut Cases, random: &mut Random, layout: Layout, limit: f32) -> Product {
        let Case { way, rows, n, k, flow, .. } = *self;
        let outputs = if self.epilogue.halves() { n / 2 } else { n };
        let (x_stride, y_stride) = (stride(k), stride(outputs));
        let weight = cases.words("weight", &way.matrix(random, n, k, layout));
        let word = |tag: Option<u32>| move |v: f32| tag.map_or(v.to_bits(), |tag| tagged(v, tag));
        // Rows of x that differ in size, and so do their parts; the largest values are below 1, for which the tolerances are.
        let size = |row: u32, col: u32| 2f32.powi(row as i32 % 3 * 4 - 8 - (col / 32 * 7 + row) as i32 % 5);
        let x: Vec<u32> = (0..rows)
            .flat_map(|row| (0..x_stride).map(move |col| (row, col)))
            .map(|(row, col)| if col < k { random.float() * size(row, col) } else { 0.0 })
            .map(word(flow.input_carried.then_some(flow.input)))
            .collect();
        let x = cases.words("x", &x);
        let norm = self.norm.then(|| {
            let mut norm = random.floats(k as usize);
            norm.resize(x_stride as usize, 0.0);
            norm.resize(norm.len() + 64, f32::from_bits(POISON));
            (cases.floats("norm", &norm), 1e-5)
        });
        let bias = self.bias.then(|| cases.floats("bias", &random.floats(n as usize)));
        let expect = if flow.output.is_some() { Expect::Tagged(limit) } else { Expect::Floats(limit) };
        let y = if self.epilogue == Epilogue::Residual {
            let old = flow.output.map(|_| flow.old);
            let words: Vec<u32> = (0..rows * y_stride).map(|_| random.float()).map(word(old)).collect();
            cases.words("y", &words)
        } else {
            cases.output("y", (rows * y_stride) as usize, expect)
        };
        cases.expect(y, expect);
        Product {
            label: "product".to_owned(),
            weight: Matrix { range: weight, format: way.format(), rows: n, cols: k },
            x: Activations { range: x, stride: x_stride },
            norm,
            bias,
            epilogue: self.epilogue,
            y: Activations { range: y, stride: y_stride },
        }
    }
}

/// A product of each format, with several widths and epilogues.
fn products(rows: &[u32], flow: Flow) -> Vec<Case> {
    let epilogues = [Epilogue::Store, Epilogue::Gated(Glu::Silu), Epilogue::Residual, Epilogue::SquaredRelu];
    let each = ways().into_iter().enumerate().flat_map(|(index, way)| rows.iter().map(move |rows| (index, way, *rows)));
    each.map(|(index, way, rows)| {
        let k = [256, 512, 280, 96][index % 4];
        Case {
            way,
            rows,
            n: [32, 50, 72][index % 3],
            k: k.max(way.columns()).next_multiple_of(way.columns()),
            norm: index % 2 == 0,
            bias: index % 3 == 1,
            epilogue: epilogues[(index / 2 + rows as usize) % 4],
            flow,
        }
    })
    .collect()
}

#[test]
fn row_major_products_of_every_format() {
    let mut cases = Cases::new("gemv.codes");
    let mut random = Random(91);
    for (index, case) in products(&[1, 5], Flow::NONE).into_iter().enumerate() {
        cases.case(format!("{case:?}"));
        let product = case.product(&mut cases, &mut random, ROW_MAJOR, SUMS * 16.0);
        if case.rows == 1 {
            // 16 invocations take more than one turn for 32 chunks of eight columns, and a part of one for 36.
            let (threads, weight_rows) = if index % 4 < 2 { (16, 4) } else { (64, 2) };
            cases.recording.call(product.gemv(1, GemvConfig { threads, weight_rows, batch: 1 }));
        } else {
            cases.recording.call(product.gemv(case.rows, GemvConfig { threads: 64, weight_rows: 2, batch: 4 }));
        }
    }
    check(&cases);
}

/// Goal: integer dot products are exact but for the rounding of x to 16 bits. A gated unit multiplies the error of one product
/// by the other, of which the largest here is about 20. Rounding to 8 bits would be 256 times as far off.
/// Method: widths that are no multiple of 32 columns, groups that take several parts of a row and such that are wider than one,
/// and numbers of rows of W that are no multiple of a workgroup's.
#[test]
fn row_major_products_by_integer_dot_products() {
    let mut cases = Cases::new("gemv_dots");
    let mut random = Random(96);
    let mut seen = HashSet::new();
    for (index, case) in products(&[1, 5], Flow::NONE).into_iter().enumerate() {
        // Each format once, with one row of x or with five.
        let (format, one) = (case.way.format(), case.rows == 1);
        if !gemv_dots::serves(format) || one != (index % 4 < 2) || !seen.insert(codes_word(format)) {
            continue;
        }
        cases.case(format!("{case:?}"));
        let limit = if case.epilogue.multiplies() { SUMS * 128.0 } else { SUMS * 16.0 };
        let product = case.product(&mut cases, &mut random, ROW_MAJOR, limit);
        // Subgroups of CPU drivers have four or eight invocations. A group of lanes has whole subgroups.
        let (times, subgroup) = if Driver::first() == Driver::Gpu { (4, 32) } else { (1, 4) };
        let (groups, lanes, weight_rows, batch) = match case.rows {
            1 if index % 8 == 0 => (1, 8, 8, 1),
            1 => (4, 16, 4, 1),
            _ if index % 8 < 4 => (2, 8, 6, 2),
            _ => (4, 8, 4, 8),
        };
        // With little shared memory, a row of x is in several parts.
        let (workgroups, shared_bytes) = (1 + index as u32 % 3, [1600, 6000, 12_000, 24_000][index % 4]);
        let lanes = times * lanes;
        let config = DotsConfig { groups, lanes, weight_rows, batch, workgroups, subgroup, shared_bytes };
        cases.recording.call(product.gemv_dots(case.rows, config));
    }
    check(&cases);
}

/// Records the products of many rows on row-major weights.
fn many_rows(name: &str, arithmetic: Arithmetic, limit: f32) -> Cases {
    let mut cases = Cases::new(name);
    let mut random = Random(93);
    // Codes are read by the same functions for both kinds of arithmetic, and a CPU driver takes seconds to compile a product
    // in f16.
    let every = if arithmetic == Arithmetic::F16 && !every_case() { 4 } else { 1 };
    for (index, case) in products(&[5], Flow::NONE).into_iter().enumerate().step_by(every) {
        cases.case(format!("{case:?}"));
        let product = case.product(&mut cases, &mut random, ROW_MAJOR, limit);
        let splits = 1 + index as u32 % 2;
        let config = MatmulConfig { tokens: 16, features: 32, words: 1, each: 4, splits };
        let words = |bytes: u64| vec![0; bytes.div_ceil(4).max(1) as usize];
        let range = cases.words("blocked", &words(Blocked::bytes(arithmetic, case.rows, case.k)));
        let scales = cases.words("scales", &words(Blocked::scale_bytes(case.rows)));
        cases.expect(scales, Expect::Floats(1e-6));
        let x = Blocked { range, scales, cols: case.k, arithmetic };
        let [partials, counters] = config.scratch_bytes(case.rows, case.n);
        let partials = cases.words("partials", &words(partials));
        cases.expect(partials, Expect::Any);
        let counters = cases.words("counters", &words(counters));
        let rows = MatmulRows::All(case.rows);
        cases.recording.call(block_rows("block".to_owned(), product.x, product.norm, x, rows));
        cases.recording.call(product.matmul(x, rows, 0, config, Scratch { partials, counters }));
    }
    cases
}

#[test]
fn many_rows_of_every_format() {
    check(&many_rows("matmul.codes", Arithmetic::F32, SUMS * 16.0));
}

#[test]
fn many_rows_of_some_formats_in_f16() {
    let cases = many_rows("matmul.codes.half", Arithmetic::F16, HALF_SWIGLU);
    let (vulkan, reference) = (Vulkan::new(), cases.reference());
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        if bench.device.adapter().capabilities.float16 {
            cases.check(&bench, &reference);
        }
    }
}

/// Products by `skinny_codes`, whose workgroups divide the columns into `parts` parts, if there are as many units.
fn skinny_cases(name: &str, list: Vec<Case>, parts: u32) {
    skinny_cases_by(name, list, parts, Matrices::Emulated, &|case, index| {
        let threads = if case.rows > 8 { 32 } else { [32, 64, 128][index as usize % 3] };
        CodesConfig { threads, tiles: 1 + index % 2, ahead: 1 + index / 2 % 2, workgroups: 1 + index % 3 }
    });
}

/// The shared memory of a workgroup on GPUs with cooperative matrices.
const MOST_SHARED: u32 = 48 << 10;

/// Like [`skinny_cases`], with workgroups for the number of a case.
fn skinny_cases_by(
    name: &str,
    list: Vec<Case>,
    parts: u32,
    matrices: Matrices,
    workgroups: &dyn Fn(&Case, u32) -> CodesConfig,
) {
    let mut cases = Cases::new(name);
    let mut random = Random(92);
    for (index, case) in (0..).zip(list) {
        let config = workgroups(&case, index);
        let shared = config.shared_bytes(case.way.format(), case.k, case.rows, matrices);
        let most = if matrices == Matrices::Emulated { 32 << 10 } else { MOST_SHARED };
        assert!(shared <= most, "{config:?} of {} rows: {shared}", case.rows);
        cases.case(format!("{case:?}.{config:?}"));
        let limit = if case.epilogue.multiplies() { HALF_SWIGLU } else { HALF };
        let product = case.product(&mut cases, &mut random, Layout::Fragments, limit);
        let fault = cases.words("fault", &[0, 0]);
        let units = units(&product.weight);
        let columns = match parts.min(units) {
            1 => ProductColumns::Of(0..units),
            parts => {
                let count = units.div_ceil(units.div_ceil(parts));
                let words = partial_bytes(count, case.rows, case.n) / 4;
                let partials = cases.words("partials", &vec![tagged(0.0, case.flow.old); words as usize]);
                cases.expect(partials, Expect::Any);
                ProductColumns::Parts { count, partials }
            }
        };
        cases.recording.call(skinny_codes(&product, case.rows, matrices, config, columns, case.flow, fault));
    }
    match parts {
        _ if matrices == Matrices::Cooperative => {
            cases.check(&Bench::new(&Vulkan::new(), Driver::Gpu), &cases.reference())
        }
        1 => check(&cases),
        _ => check_in_order(&cases),
    }
}

/// Goal: on matrix units, numbers of lane groups that share few units or many give right sums, where parts of rows differ in size.
#[test]
#[ignore = "needs a GPU with cooperative matrices (OSTINATO_TEST_GPU)"]
fn few_rows_by_fragments_on_matrix_units() {
    let tags = Flow { input_carried: true, input: 3, old: 127, output: Some(64) };
    let formats = |way: &Way| match way {
        Way::Blocks(of) => matches!(of, BlockType::Q4_K | BlockType::Q6_K | BlockType::Q8_0 | BlockType::Q3_K),
        Way::Canonical(codes) => [CANONICAL[0], CANONICAL[6], AWQ].contains(codes),
        Way::Load(_) => false,
    };
    for flow in [Flow::NONE, tags] {
        for (k, groups) in [(256u32, 2), (256, 8), (512, 1), (512, 4), (512, 8), (1024, 8), (1024, 16), (1536, 12)] {
            let config = |case: &Case| {
                let units = k.div_ceil(case.way.format().codes().map_or(128, unit_cols));
                CodesConfig { threads: groups * 32, tiles: 1, ahead: units.div_ceil(groups).min(2), workgroups: 5 }
            };
            let epilogue = Epilogue::Residual;
            let case = |way, rows| Case { way, rows, n: 144, k, norm: k == 1024, bias: false, epilogue, flow };
            let all = ways().into_iter().filter(formats).flat_map(|way| [1, 3, 4, 8].map(|rows| case(way, rows)));
            let fits = |case: &Case| {
                let config = config(case);
                config.shared_bytes(case.way.format(), k, case.rows, Matrices::Cooperative) <= MOST_SHARED
            };
            let name = format!("{k}.{groups}");
            skinny_cases_by(&name, all.filter(fits).collect(), 1, Matrices::Cooperative, &|case, _| config(case));
        }
    }
}

/// Numbers of rows of x for `skinny_codes.ptx`: those that it multiplies, and two of which it stores fewer.
const ROWS_IN_PTX: [u32; 6] = [1, 2, 3, 4, 6, 8];

/// Products by `skinny_codes.ptx` of every format that it serves and every number of rows, with other numbers of groups, slots and
/// workgroups.
fn ptx_cases(name: &str, flow: Flow) -> Cases {
    let mut cases = Cases::new(name);
    let mut random = Random(94);
    let served = products(&ROWS_IN_PTX, flow).into_iter().filter(|case| codes_ptx::serves(case.way.format()));
    // Groups with more columns than they poll for together, from another than the first column on; one without any; and
    // more blocks than two turns of the places of sums.
    let wide = |rows, way, n, k, norm| Case { way, rows, n, k, norm, bias: false, epilogue: Epilogue::Residual, flow };
    let blocks = |of| Way::Blocks(of);
    let e4m3 = Way::Canonical(CANONICAL[0]);
    let further = [
        (wide(1, blocks(BlockType::Q4_K), 160, 2048, false), CodesPtxConfig { groups: 2, slots: 3, workgroups: 1 }),
        (wide(1, blocks(BlockType::Q6_K), 32, 1280, true), CodesPtxConfig { groups: 2, slots: 2, workgroups: 2 }),
        (wide(1, blocks(BlockType::Q8_0), 50, 128, false), CodesPtxConfig { groups: 3, slots: 2, workgroups: 1 }),
        (wide(1, Way::Canonical(AWQ), 32, 1920, true), CodesPtxConfig { groups: 2, slots: 3, workgroups: 1 }),
        (wide(4, blocks(BlockType::Q4_K), 160, 1024, true), CodesPtxConfig { groups: 2, slots: 2, workgroups: 1 }),
        (wide(2, blocks(BlockType::Q6_K), 50, 1280, false), CodesPtxConfig { groups: 3, slots: 2, workgroups: 2 }),
        (wide(4, blocks(BlockType::Q6_K), 50, 512, false), CodesPtxConfig { groups: 3, slots: 3, workgroups: 1 }),
        (wide(8, blocks(BlockType::Q4_K), 160, 1024, true), CodesPtxConfig { groups: 3, slots: 2, workgroups: 2 }),
        // x in two sections.
        (wide(8, blocks(BlockType::Q4_K), 40, 13_056, false), CodesPtxConfig { groups: 4, slots: 2, workgroups: 1 }),
        (wide(8, Way::Canonical(AWQ), 24, 13_696, true), CodesPtxConfig { groups: 6, slots: 3, workgroups: 2 }),
        // In three, with four blocks.
        (wide(8, blocks(BlockType::Q6_K), 64, 6144, true), CodesPtxConfig { groups: 6, slots: 16, workgroups: 1 }),
        (wide(8, e4m3, 50, 6400, false), CodesPtxConfig { groups: 5, slots: 16, workgroups: 1 }),
        (wide(4, e4m3, 50, 1280, true), CodesPtxConfig { groups: 3, slots: 2, workgroups: 2 }),
        // The last pass of the last group has one row.
        (wide(3, blocks(BlockType::Q4_K), 50, 1024, true), CodesPtxConfig { groups: 3, slots: 2, workgroups: 2 }),
        (wide(5, Way::Canonical(AWQ), 40, 1280, true), CodesPtxConfig { groups: 3, slots: 2, workgroups: 1 }),
        (wide(7, e4m3, 40, 640, false), CodesPtxConfig { groups: 2, slots: 2, workgroups: 2 }),
        (wide(8, e4m3, 50, 1280, true), CodesPtxConfig { groups: 3, slots: 2, workgroups: 2 }),
    ];
    let served = served.enumerate().map(|(index, case)| {
        let groups = [1, 2, 3, 7, 16][index % 5];
        let index = index as u32;
        (case, CodesPtxConfig { groups, slots: 1 + index % 3, workgroups: 1 + index % 4 })
    });
    for (index, (case, config)) in (0..).zip(served.chain(further)) {
        let epilogue = match case.epilogue {
            Epilogue::Gated(_) => {
                Epilogue::Gated([Glu::Silu, Glu::GeluTanh, Glu::Clamped { limit: 7f32.to_bits() }][index as usize % 3])
            }
            other => other,
        };
        let case = Case { epilogue, ..case };
        cases.case(format!("{case:?}.{config:?}"));
        // Later rows have larger numbers, whose products have larger errors; `rows_together_are_what_each_is_alone`.
        let limit = if case.rows == 1 { INTEGERS } else { HALF };
        let product = case.product(&mut cases, &mut random, Layout::Fragments, limit);
        let fault = cases.words("fault", &[0, 0]);
        let call = skinny_codes_ptx(&product, case.rows, config, flow, fault);
        let in_sections = case.k > 6000;
        assert_eq!(codes_ptx::most_blocks(&call.constants) < u32::MAX, in_sections, "{case:?}");
        cases.recording.call(call);
    }
    cases
}

const TAGGED: Flow = Flow { input_carried: true, input: 9, old: 8, output: Some(10) };

#[test]
fn few_rows_on_a_simulated_processor() {
    for (name, flow) in [("plain", Flow::NONE), ("tagged", TAGGED), ("input", Flow { output: None, ..TAGGED })] {
        ptx::agree(&ptx_cases(name, flow), str::to_owned);
    }
}

/// Goal: the simulation notices what is read or overwritten too early. Method: programs that wait less than they must.
#[test]
fn the_simulated_processor_notices_a_missing_wait_of_few_rows() {
    let cases = ptx_cases("waits", Flow::NONE);
    ptx::agree(&cases, str::to_owned);
    ptx::notices(
        &cases,
        &[
            // A unit is multiplied before its copy has come.
            ("mbarrier.try_wait.parity.shared::cta.b64 %p0, [%barrier_at], %phase;", "setp.lt.u32 %p0, %lane, 32;"),
            // Sums are added up before all groups have stored theirs.
            ("mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r1], %r2;", "setp.lt.u32 %p0, %lane, 32;"),
            // A block's sums are handed over with each section.
            ("setp.eq.and.u32 %p1, %section, 1, %lead;", "and.pred %p1, %lead, %lead;"),
            // The next unit is copied over one whose loads may be on their way.
            ("fence.proxy.async.shared::cta;\nmbarrier.arrive", "mbarrier.arrive"),
            // The next unit is copied over one that is not multiplied.
            ("L2::cache_hint [%slot_at], [%from]", "L2::cache_hint [%slots], [%from]"),
        ],
    );
}

/// Goal: the test at start accepts the programs, and notices groups of lanes, slots and places that are wrong. Method: its probes
/// on the simulated processor, with programs that differ in one place.
#[test]
fn the_test_at_start_of_few_rows_covers_all_groups() {
    let mut cases = Cases::new("start");
    let fault = cases.words("fault", &[0, 0]);
    let [awq, e4m3] = [AWQ, CANONICAL[0]].map(Way::Canonical);
    let [q4, q6] = [BlockType::Q4_K, BlockType::Q6_K].map(Way::Blocks);
    for (way, rows) in
        [(q4, 1), (q6, 1), (awq, 1), (e4m3, 1), (q4, 2), (q6, 4), (awq, 4), (e4m3, 4), (q4, 8), (e4m3, 8)]
    {
        let (norm, bias, epilogue) = (false, false, Epilogue::Residual);
        let case = Case { way, rows, n: 16, k: 1280, norm, bias, epilogue, flow: TAGGED };
        cases.case(format!("{case:?}"));
        let product = case.product(&mut cases, &mut Random(96), Layout::Fragments, INTEGERS);
        let config = CodesPtxConfig { groups: 4, slots: 2, workgroups: 1 };
        let probe = probe(&skinny_codes_ptx(&product, case.rows, config, TAGGED, fault)).expect("it reads codes");
        let Op::Call(call) = &probe.recording.ops[0] else { panic!("a probe is one call") };
        let difference = |right: &str, wrong: &str| {
            let change = |text: &str| {
                assert!(text.contains(right), "the text has no {right}");
                text.replace(right, wrong)
            };
            probe.difference(&ptx::simulate(call, &probe.memory, change))
        };
        assert_eq!(difference("", ""), None, "{case:?}");
        for (right, wrong) in [
            // The last group has the columns of another; a slot is another one's; a place is not the next one.
            (
                "sub.u32 %own, %own, %first_unit;",
                "sub.u32 %own, %own, %first_unit;\nmin.u32 %first_unit, %first_unit, 6;",
            ),
            (
                "sub.u32 %copies, %copies, 1;\nadd.u64 %from, %from, ",
                "sub.u32 %copies, %copies, 1;\nadd.u64 %from, %from, 0; //",
            ),
            ("mad.lo.u32 %r4, %r0, ", "mad.lo.u32 %r4, 0, "),
        ] {
            assert!(difference(right, wrong).is_some(), "{case:?}: {wrong} is not noticed");
        }
    }
}

/// Goal: a wait for words that never come ends, and says which call waited. Method: x, and then old values of y, of an earlier
/// generation.
#[test]
fn rows_that_wait_in_vain_set_the_fault_word() {
    let (input, old) = ((5, Flow { input: 11, ..TAGGED }), (6, Flow { old: 7, ..TAGGED }));
    for ((number, flow), rows) in [(input, 1), (old, 1), (input, 4), (old, 4)] {
        let mut cases = Cases::new("stale");
        let way = Way::Blocks(BlockType::Q4_0);
        let epilogue = Epilogue::Residual;
        let case = Case { way, rows, n: 16, k: 128, norm: false, bias: false, epilogue, flow: TAGGED };
        cases.case("stale".to_owned());
        let product = case.product(&mut cases, &mut Random(95), Layout::Fragments, INTEGERS);
        let fault = cases.words("fault", &[0, 0]);
        let [input, old] = [flow.input, flow.old].map(|tag| tag | number << CALL_SHIFT);
        let config = CodesPtxConfig { groups: 1, slots: 2, workgroups: 1 };
        let call = skinny_codes_ptx(&product, case.rows, config, Flow { input, old, ..flow }, fault);
        let after = ptx::simulate(&call, &cases.before(), str::to_owned);
        assert_eq!(after.u32(fault, 0), number, "{flow:?}");
    }
}

/// Goal: numbers that are not finite stay in their row. Method: one infinite number, or one that is none, in one of several rows.
#[test]
fn a_row_that_is_not_finite_changes_no_other() {
    let [awq, e4m3] = [AWQ, CANONICAL[0]].map(Way::Canonical);
    let [q4, q6] = [BlockType::Q4_K, BlockType::Q6_K].map(Way::Blocks);
    for (way, rows) in [(q4, 2), (q6, 8), (awq, 4), (e4m3, 2), (e4m3, 4), (e4m3, 8)] {
        for value in [f32::INFINITY, f32::NAN] {
            let mut cases = Cases::new("not finite");
            let (norm, bias, epilogue) = (false, false, Epilogue::Store);
            let case = Case { way, rows, n: 16, k: 256, norm, bias, epilogue, flow: Flow::NONE };
            cases.case(format!("{case:?}"));
            let product = case.product(&mut cases, &mut Random(97), Layout::Fragments, INTEGERS);
            let fault = cases.words("fault", &[0, 0]);
            let config = CodesPtxConfig { groups: 2, slots: 2, workgroups: 1 };
            let call = skinny_codes_ptx(&product, rows, config, Flow::NONE, fault);
            let results = |memory: &HostMemory, row: u32| -> Vec<u32> {
                let result = |i| memory.u32(product.y.range, row * product.y.stride + i);
                (0..case.n).map(result).collect()
            };
            let before = cases.before();
            let finite = ptx::simulate(&call, &before, str::to_owned);
            let mut changed = before.clone();
            changed.set_f32(product.x.range, product.x.stride + 3, value);
            let found = ptx::simulate(&call, &changed, str::to_owned);
            for row in 0..rows {
                match row {
                    1 => assert!(results(&found, row).iter().all(|word| !f32::from_bits(*word).is_finite())),
                    _ => assert_eq!(results(&found, row), results(&finite, row), "{case:?}, row {row}"),
                }
            }
        }
    }
}

/// Goal: rows together are what each is alone, but for the order of sums. Method: numbers of rows of all formats, beside the program
/// of one row.
#[test]
fn rows_together_are_what_each_is_alone() {
    let served = |case: &Case| case.rows > 1 && codes_ptx::serves(case.way.format());
    for case in products(&ROWS_IN_PTX, Flow::NONE).into_iter().filter(served) {
        let floats = case.way.format().codes().is_some_and(|codes| codes.number == Number::E4m3);
        let case = Case { norm: false, bias: false, k: case.k.max(512), epilogue: Epilogue::Store, ..case };
        let mut cases = Cases::new("together");
        cases.case(format!("{case:?}"));
        let product = case.product(&mut cases, &mut Random(98), Layout::Fragments, INTEGERS);
        let fault = cases.words("fault", &[0, 0]);
        let config = CodesPtxConfig { groups: 2, slots: 2, workgroups: 2 };
        let run = |product: &Product, rows| {
            let call = skinny_codes_ptx(product, rows, config, Flow::NONE, fault);
            ptx::simulate(&call, &cases.before(), str::to_owned)
        };
        let together = run(&product, case.rows);
        for row in 0..case.rows {
            let of_row = |of: Activations| {
                let skipped = u64::from(row * of.stride) * 4;
                Activations { range: of.range.part(skipped, of.range.bytes - skipped), ..of }
            };
            let one = Product { x: of_row(product.x), y: of_row(product.y), ..product.clone() };
            let alone = run(&one, 1);
            let largest = (0..case.n).map(|i| alone.f32(one.y.range, i).abs()).fold(0.0, f32::max);
            // Four and more rows of floats are f16.
            let limit = largest * if floats && case.rows > 2 { 1e-3 } else { SUMS };
            for i in 0..case.n {
                let [a, b] = [&together, &alone].map(|memory| memory.f32(one.y.range, i));
                assert!((a - b).abs() <= limit, "{case:?}: row {row}, {i}: {a} instead of {b}");
            }
        }
    }
}

#[test]
fn programs_of_few_rows_are_assembled_without_spilling() {
    let assembler = Assembler::new();
    let formats = ways().into_iter().map(Way::format).filter(|format| codes_ptx::serves(*format));
    let (mut seen, mut assembled) = (Vec::new(), HashSet::new());
    for (index, format) in (0..).zip(formats) {
        let new = !seen.contains(&format);
        seen.push(format);
        // Rows, norm, bias, epilogue, tags, exchanges with other devices, groups and units.
        for [rows, norm, bias, epilogue, tagged, devices, groups, units] in [
            [1, 1, 0, 2, 3, 0, 16, 32],
            [1, 0, 0, 1, 3, 0, 16, 96],
            [1, 1, 0, 0, 1, 0, 16, 32],
            [1, 1, 1, 3, 3, 1, 20, 40],
            [1, 0, 1, 1, 0, 1, 16, 224],
            [1, 0, 0, 4 | 0x40e0_0000, 3, 0, 31, 64],
            [2, 1, 0, 2, 3, 0, 16, 32],
            [4, 1, 1, 2, 3, 0, 16, 32],
            [3, 0, 0, 1, 3, 0, 16, 96],
            [7, 1, 0, 2, 3, 0, 16, 32],
            [4, 0, 0, 1, 3, 1, 20, 80],
            [8, 1, 0, 2, 3, 0, 16, 32],
            [8, 0, 1, 1, 3, 0, 16, 96],
            [4, 0, 0, 1, 3, 0, 20, 256],
            [1, 1, 0, 2, 3, 0, 24, 24],
            [8, 1, 1, 2, 3, 0, 24, 24],
            [8, 0, 0, 1, 3, 1, 14, 148],
            [2, 0, 1, 1, 3, 0, 12, 12],
        ] {
            if !new && !every_case() || index > 2 && groups != 16 && !every_case() {
                continue;
            }
            let config = CodesPtxConfig { groups, slots: 3, workgroups: 1 };
            let codes = format.codes().expect("the program serves codes");
            if !config.fits(codes, (16, units), rows) {
                continue;
            }
            let constants = SkinnyCodesConstants {
                threads: (groups + 1) * 32,
                lanes: (groups + 1) * 32,
                norm,
                bias,
                epilogue,
                tiles: 1,
                ahead: 3,
                rows,
                units,
                tagged,
                codes: codes_word(format),
                first_unit: 0,
                own_units: units,
                devices,
                column_parts: 1,
            };
            let constants = constants.into_values();
            assembled.insert((rows, codes_ptx::most_blocks(&constants) < u32::MAX));
            assembler.require(
                &format!("{format:?}, {constants:?}"),
                &codes_ptx::program("skinny_codes.ptx", &constants).text,
            );
        }
    }
    for of in [(1, false), (2, false), (3, false), (4, false), (7, false), (8, false), (4, true), (8, true)] {
        assert!(assembled.contains(&of), "rows and whether x is in sections: {of:?}");
    }
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn few_rows_by_a_program_in_ptx() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::Gpu);
    bench.device.takes_ptx().expect("programs in PTX");
    for (name, flow) in [("plain", Flow::NONE), ("tagged", TAGGED), ("input", Flow { output: None, ..TAGGED })] {
        let cases = ptx_cases(name, flow);
        cases.check(&bench, &cases.reference());
    }
}

#[test]
fn one_row_by_fragments_of_every_format() {
    // Types of blocks with the same codes are one format for the kernel.
    let mut seen = Vec::new();
    let new = |case: &Case| {
        !seen.contains(&case.way.format()) && {
            seen.push(case.way.format());
            true
        }
    };
    skinny_cases("skinny_codes.1", products(&[1], Flow::NONE).into_iter().filter(new).collect(), 1);
}

#[test]
#[ignore = "takes minutes on CPU drivers: make test-full"]
fn several_rows_by_fragments_of_some_formats() {
    let some = |case: &Case| {
        use BlockType::{Q4_K, Q5_K, Q6_K};
        matches!(case.way, Way::Blocks(Q4_K | Q5_K | Q6_K) | Way::Load(_))
    };
    skinny_cases("skinny_codes", products(&[3, 11, 16], Flow::NONE).into_iter().filter(some).collect(), 1);
}

#[test]
fn tagged_rows_by_fragments() {
    let flow = Flow { input_carried: true, input: 3, old: 127, output: Some(64) };
    let some = |case: &Case| matches!(case.way, Way::Blocks(BlockType::Q4_K | BlockType::Q6_K) | Way::Load(_));
    let fits = |case: Case| Case { n: 48, ..case };
    skinny_cases("skinny_codes.tagged", products(&[1, 4, 8], flow).into_iter().filter(some).map(fits).collect(), 1);
}

/// Goal: sums that pass from workgroups with one part of the columns to those with the next are added up, once for each row,
/// and bias, residual and gated unit apply to the whole sum. Method: two and three parts, of which the last may be shorter;
/// several blocks of rows of W for each workgroup.
#[test]
fn parts_of_the_columns_by_workgroups_of_one_call() {
    let flow = Flow { input_carried: true, input: 3, old: 127, output: Some(64) };
    let some = |case: &Case| matches!(case.way, Way::Blocks(BlockType::Q4_K | BlockType::Q6_K) | Way::Load(_));
    let list = || products(&[1, 4], flow).into_iter().filter(some).map(|case| Case { norm: false, n: 72, ..case });
    for parts in [2u32, 3] {
        let wide = list().map(|case| Case { k: (128 * parts + 128).next_multiple_of(case.way.columns()), ..case });
        skinny_cases(&format!("skinny_codes.parts.{parts}"), wide.collect(), parts);
    }
}

/// Goal: `panel` dequantises codes of every format for packed rows, with every epilogue, also into packed rows.
#[test]
fn packed_rows_by_fragments_of_every_format() {
    let mut cases = Cases::new("panel.codes");
    let mut random = Random(95);
    let mut seen = Vec::new();
    for (index, case) in products(&[11], Flow::NONE).into_iter().enumerate() {
        if seen.contains(&case.way.format()) {
            continue;
        }
        seen.push(case.way.format());
        let rows = [11u32, 3, 20][index % 3];
        let n = case.n.next_multiple_of(4);
        let Case { way, k, .. } = case;
        let index = index as u32;
        let config = PanelConfig {
            threads: 64,
            tiles: 1 + index % 2,
            ahead: 1 + index / 2 % 2,
            blocks: rows.div_ceil(16),
            in_f16: false,
        };
        cases.case(format!("{case:?}.{rows}.{config:?}"));
        let weight = cases.words("weight", &way.matrix(&mut random, n, k, Layout::Fragments));
        let chunks = k.next_multiple_of(32);
        let mut x = vec![0u32; (rows.next_multiple_of(16) * chunks / 2) as usize];
        for (row, col) in (0..rows).flat_map(|row| (0..k).map(move |col| (row, col))) {
            let at = token_index(row, col, chunks);
            x[at / 2] |= u32::from(bf16::from_f32(random.float()).to_bits()) << (16 * (at % 2));
        }
        let x = Packed { range: cases.words("x", &x), cols: k, order: PackedOrder::Fragments };
        // Sums of up to 512 terms of about 0.3 with a relative error of 2^-9 each and a random sign; rounding to bfloat16
        // adds 2^-8 of the result.
        let gated = case.epilogue.multiplies();
        let y = match (case.epilogue, index % 2) {
            (Epilogue::Gated(_), 0) => {
                let to = Packed { cols: n / 2, ..x };
                let words = Packed::bytes(rows, n / 2) as usize / 4;
                // Rows and columns beyond the last ones may be left as they are.
                Output::Packed(Packed { range: cases.words("y", &vec![0; words]), ..to })
            }
            (Epilogue::Residual, _) => {
                let y = cases.floats("y", &random.floats((rows * stride(n)) as usize));
                Output::Rows(Activations { range: y, stride: stride(n) })
            }
            _ => {
                let words = (rows * stride(n)) as usize;
                let y = cases.output("y", words, Expect::Floats(if gated { 0.5 } else { 6e-2 }));
                Output::Rows(Activations { range: y, stride: stride(n) })
            }
        };
        match y {
            Output::Packed(y) => cases.expect(y.range, Expect::Bfloats(0.5)),
            Output::Rows(y) => cases.expect(y.range, Expect::Floats(if gated { 0.5 } else { 6e-2 })),
        }
        let product = Tiled {
            label: "panel".to_owned(),
            weight: Matrix { range: weight, format: way.format(), rows: n, cols: k },
            x,
            bias: None,
            epilogue: case.epilogue,
            y,
        };
        cases.recording.call(panel(&product, rows, Matrices::Emulated, config, Fold::None));
    }
    check(&cases);
}

/// Goal: products in f16 are right for codes of every format and all shapes of workgroups, also where numbers of x are
/// infinite in f16, small or zero. Method: each kind of rows by itself, beside rows of usual numbers and of zeros.
#[test]
#[ignore = "needs OSTINATO_TEST_GPU"]
fn packed_rows_in_f16_of_every_format() {
    let mut cases = Cases::new("panel.codes in f16");
    let mut random = Random(97);
    let shapes = [(64, 2, 1, 1), (128, 4, 1, 1), (512, 1, 2, 1), (128, 4, 1, 2)];
    let kinds = ["usual", "infinite", "small"];
    for (index, way) in ways().into_iter().enumerate() {
        for (shape, kind) in shapes.into_iter().flat_map(|shape| kinds.map(|kind| (shape, kind))) {
            let (threads, tiles, ahead, blocks) = shape;
            let (rows, n) = (16 * blocks - 5, 76);
            let k = [648u32, 1024][index % 2].next_multiple_of(way.columns());
            let config = PanelConfig { threads, tiles, ahead, blocks, in_f16: true };
            cases.case(format!("{way:?}.{config:?}.{kind}"));
            let weight = cases.words("weight", &way.matrix(&mut random, n, k, Layout::Fragments));
            let chunks = k.next_multiple_of(32);
            let mut x = vec![0u32; (rows.next_multiple_of(16) * chunks / 2) as usize];
            for (row, col) in (0..rows).flat_map(|row| (0..k).map(move |col| (row, col))) {
                let usual = random.float() / 8.0;
                let value = match (row % 3, kind) {
                    (1, "infinite") if col == row * 37 % k => 3e5,
                    (1, "small") => usual * 2f32.powi(-9),
                    (2, _) => 0.0,
                    _ => usual,
                };
                let at = token_index(row, col, chunks);
                x[at / 2] |= u32::from(bf16::from_f32(value).to_bits()) << (16 * (at % 2));
            }
            let x = cases.words("x", &x);
            // Sums of up to 1,024 terms of about 0.04, whose rounding is that of f16 if no row is done again. A zero point
            // between two codes is rounded too.
            let between = codes_word(way.format()) >> 16 & 1 == 1;
            let limit = if kind == "usual" && !between { 2e-3 } else { 1e-2 };
            let y = cases.output("y", (rows * stride(n)) as usize, Expect::Floats(limit));
            let product = Tiled {
                label: "panel".to_owned(),
                weight: Matrix { range: weight, format: way.format(), rows: n, cols: k },
                x: Packed { range: x, cols: k, order: PackedOrder::Fragments },
                bias: None,
                epilogue: Epilogue::Store,
                y: Output::Rows(Activations { range: y, stride: stride(n) }),
            };
            cases.recording.call(panel(&product, rows, Matrices::Cooperative, config, Fold::None));
        }
    }
    check(&cases);
}

#[test]
fn rows_are_expanded_to_bfloat16() {
    let mut cases = Cases::new("expand_codes");
    let mut random = Random(93);
    for (index, way) in ways().into_iter().enumerate() {
        let (rows, cols) = (48, [256u32, 288, 96][index % 3].max(way.columns()).next_multiple_of(way.columns()));
        cases.case(format!("{way:?}.{cols}"));
        let weight = cases.words("weight", &way.matrix(&mut random, rows, cols, Layout::Fragments));
        let weight = Matrix { range: weight, format: way.format(), rows, cols };
        // A value near the middle of two bfloat16 values may be rounded the other way.
        let y = cases.output("y", expanded_bytes(32, cols) as usize / 4, Expect::Bfloats(2f32.powi(-7)));
        cases.recording.call(expand_codes("expand".to_owned(), &weight, (16, 32), Matrices::Emulated, y));
    }
    check(&cases);
}

#[test]
fn embeddings_of_every_format_in_both_layouts() {
    let mut cases = Cases::new("embed_rows.codes");
    let mut random = Random(94);
    let (rows, vocabulary) = (9u32, 37u32);
    for (index, way) in ways().into_iter().enumerate() {
        for layout in [ROW_MAJOR, Layout::Fragments] {
            let hidden = [256u32, 104][index % 2].max(way.columns()).next_multiple_of(way.columns());
            cases.case(format!("{way:?}.{layout:?}"));
            let words = way.matrix(&mut random, vocabulary, hidden, layout);
            let embedding = cases.words("embedding", &words);
            let mut slots = vec![0; (rows * state::SLOT_WORDS) as usize];
            for row in 0..rows {
                let at = (row * state::SLOT_WORDS) as usize;
                slots[at + state::SLOT_ACTIVE as usize] = state::ACTIVE_RUNNING;
                slots[at + state::SLOT_TOKEN as usize] = (row * 5 + 36) % vocabulary;
            }
            let slots = cases.words("slots", &slots);
            let batch: Vec<u32> = (0..rows).collect();
            let batch = cases.words("batch", &batch);
            let x = cases.output("x", (rows * hidden) as usize, Expect::Floats(1e-6));
            let none = Range::none(x);
            let args = EmbedRowsArgs {
                embedding,
                slots,
                batch,
                chunk: none,
                x,
                rows: cases.output("rows", rows as usize * 4, Expect::Exact),
                chunks: hidden / 8,
                x_stride: hidden,
                part_first: 0,
                part_rows: vocabulary,
                x_tag: 0,
                tokens_at: 0,
                scale: 1.0,
            };
            let table = Table { format: way.format(), fragments: layout == Layout::Fragments };
            cases.recording.call(embed_rows(
                "embed".to_owned(),
                table,
                RowsFrom::Batch,
                rows,
                hidden,
                Flow::NONE,
                args,
            ));
            // The reference gives the embedding of the token.
            let packing = Packing { rows: vocabulary, cols: hidden, layout, format: way.format() };
            let codes = way.format().codes().expect("codes");
            let reference = cases.reference();
            for row in 0..rows {
                let token = (row * 5 + 36) % vocabulary;
                let read = |word: u64| words[word as usize];
                let wanted = element(codes, layout, packing.padded_cols(), (token, 17), read);
                assert_eq!(reference.f32(x, row * hidden + 17), wanted, "{way:?} {layout:?} row {row}");
            }
        }
    }
    check(&cases);
}

/// Goal: the experts and the shared expert may be of different types, as in files of mixed types. Each order of types is
/// tested, so that a kernel that read both as one of them would fail.
#[test]
fn experts_beside_a_shared_expert_of_another_type() {
    let mut cases = Cases::new("expert_gemv.codes");
    let mut random = Random(95);
    let types = [BlockType::Q4_K, BlockType::Q6_K, BlockType::Q8_0, BlockType::Q3_K, BlockType::MXFP4];
    let beside = types.iter().cycle().skip(1).map(|blocks| Way::Blocks(*blocks)).zip(types);
    // A shared expert of numbers, as checkpoints of quantised experts often have it.
    let numbers = [Format::Bf16, Format::F16, Format::F32].map(|format| (Way::Load(format), BlockType::Q4_K));
    for ((other, blocks), number) in beside.chain(numbers).zip(0..) {
        let routed = Way::Blocks(blocks);
        let (count, chosen, inner, hidden, shared_inner, rows) = (4u32, 2u32, 256u32, 256u32, 512u32, 3u32);
        let shape = ExpertsShape {
            count,
            chosen,
            inner,
            hidden,
            shared_inner: Some(shared_inner),
            normalise: true,
            epilogue: if number % 3 == 2 { Epilogue::SquaredRelu } else { Epilogue::Gated(Glu::Silu) },
            gated: true,
        };
        // The experts of every second case are divided among calls, differently for both products.
        let divided = number % 2 == 1;
        cases.case(format!("{routed:?}.{other:?}.{divided}"));
        let mut matrix = |cases: &mut Cases, name: &str, way: Way, rows: u32, cols: u32| {
            let range = cases.words(name, &way.matrix(&mut random, rows, cols, ROW_MAJOR));
            Matrix { range, format: way.format(), rows, cols }
        };
        let gate_up = matrix(&mut cases, "gate_up", routed, count * shape.first_rows(inner), hidden);
        let (down, shared_down) = if other.format().codes().is_some() { (other, routed) } else { (routed, other) };
        let down = matrix(&mut cases, "down", down, count * hidden, inner);
        let shared = (
            matrix(&mut cases, "shared.gate_up", other, shape.first_rows(shared_inner), hidden),
            matrix(&mut cases, "shared.down", shared_down, hidden, shared_inner),
        );
        let floats = |cases: &mut Cases, random: &mut Random, name: &str, width: u32| Activations {
            range: cases.floats(name, &random.floats((rows * width) as usize)),
            stride: width,
        };
        let x = floats(&mut cases, &mut random, "x", hidden);
        let logits = floats(&mut cases, &mut random, "logits", shape.logits().next_multiple_of(4));
        let norm = (cases.floats("norm", &random.floats(hidden as usize)), 1e-5);
        let stacks = |matrix: Matrix, bounds: &[u32]| -> Vec<Stack> {
            let bounds = if divided { bounds } else { &[0, count] };
            let stack = |ends: &[u32]| {
                let (each, own) = (matrix.range.bytes / u64::from(count), ends[1] - ends[0]);
                let range = matrix.range.part(u64::from(ends[0]) * each, u64::from(own) * each);
                Stack { matrix: Matrix { range, rows: matrix.rows / count * own, ..matrix }, first: ends[0] }
            };
            bounds.windows(2).map(stack).collect()
        };
        let mlp = Mlp {
            adds: true,
            routing: None,
            label: "layers.0.".to_owned(),
            shape,
            gate_up: stacks(gate_up, &[0, 3, 4]),
            down: stacks(down, &[0, 1, 2, 4]),
            shared: Some(shared),
            biases: [None, None],
            x,
            y: x,
            norm,
            logits,
        };
        cases.expect(x.range, Expect::Floats(SUMS * 16.0));
        let used = Used { rows, count: None };
        let choices = cases.output("choices", shape.choices_bytes(rows) as usize / 4, Expect::Floats(SUMS));
        let stride = shape.middle_stride();
        let middle = cases.output("middle", (rows * stride) as usize, Expect::Floats(SUMS * 16.0));
        let middle = Activations { range: middle, stride };
        cases.recording.call(mlp.choose(used, None, choices));
        let rows = GemvRows { used, choices, threads: 64 };
        mlp.gate_up.iter().for_each(|stack| cases.recording.call(mlp.gemv_gate_up(stack, rows, middle)));
        mlp.down.iter().for_each(|stack| cases.recording.call(mlp.gemv_down(stack, rows, middle)));
    }
    check(&cases);
}

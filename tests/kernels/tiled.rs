//! Goal: `pack_rows`, `order_rows`, `order_packed` and `tiled` match their `reference()`, and the references match the
//! formula. Method: as in `kernels.rs`, with awkward shapes. The CPU drivers run the variant without matrix units. A GPU
//! (`OSTINATO_TEST_GPU`) runs every variant, also at the shapes of real models, where a sample of the outputs is compared.
//!
//! Tolerances: both sides multiply the same 16-bit numbers, whose products are exact in f32. They differ in the order
//! of sums of up to 1,024 terms, by a few units in the last place (2^-24 ≈ 6e-8) of sums of about 1, and in `exp`:
//! 2e-5, as in `kernels.rs`. A missing term of these inputs changes a sum by more than 1e-3. Sums of 4,096 terms on
//! matrix units, which may truncate each partial sum instead of rounding it: 256 steps of 2^-23 of the largest sum,
//! about 4, are 1.2e-4. A result that is rounded to 16 bits may be rounded either way: one unit in the last place, 2^-7
//! (bfloat16) or 2^-10 (half) of the value.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, round, ways};
use half::{bf16, f16};
use ostinato::kernels::gemm::panel::{Fold, PanelConfig, Unscaled, panel};
use ostinato::kernels::gemm::tiled::{Output, Packed, PackedOrder, Tile, Tiled, pack_rows, token_index};
use ostinato::kernels::gemm::{Activations, Epilogue, Glu, Matrix, order};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::recording::Range;
use ostinato::memory::pack::{Format, fragment_index};

const FORMATS: [Format; 2] = [Format::Bf16, Format::F16];

/// Returns the order of rows that `tiled` multiplies with weights in a format.
fn order_of(format: Format) -> PackedOrder {
    if format == Format::F16 { PackedOrder::HalfFragments } else { PackedOrder::Fragments }
}

/// The scale of a row in f16.
fn scale(row: u32) -> f32 {
    2f32.powi((row % 7) as i32 - 12)
}

/// The size of packed rows in words.
fn packed_words(order: PackedOrder, rows: u32, cols: u32) -> usize {
    order.bytes(Packed::padded_rows(rows), cols) as usize / 4
}
const EPSILON: f32 = 1e-3;
/// Tolerances, explained at the top of the file.
const SUMS: f32 = 2e-5;
const LONG_SUMS: f32 = 1.2e-4;

/// Returns the variants of `tiled` that the selected drivers support.
fn tiles() -> &'static [Tile] {
    match Driver::first() {
        Driver::Gpu => &[Tile::Plain, Tile::Square, Tile::Half, Tile::Wide],
        _ => &[Tile::Plain],
    }
}

fn rounded(format: Format) -> Expect {
    if format == Format::F16 { Expect::Halves(2f32.powi(-10)) } else { Expect::Bfloats(2f32.powi(-7)) }
}

fn check(cases: &Cases, reference: &HostMemory) {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), reference);
    }
}

/// Compares the reference of products with their formula, and the drivers with the reference.
fn check_products(cases: &Cases, made: &[(Logical, Tiled)]) {
    let reference = cases.reference();
    for (logical, product) in made {
        let range = product.weight.range;
        logical.check_reference(&reference, product.y, &cases.recording.decl(range.buffer).name);
    }
    check(cases, &reference);
}

fn bits(format: Format, value: f32) -> u16 {
    if format == Format::F16 { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() }
}

/// Packs `rows × cols` values at `index(row, col)` into the words of the padded matrix. Padded columns are zero. Padded
/// rows are NaN, because they must not affect any result.
fn packed(
    format: Format,
    values: &[f32],
    (rows, cols): (u32, u32),
    rows_multiple: u32,
    index: fn(u32, u32, u32) -> usize,
) -> Vec<u32> {
    let (padded_rows, padded_cols) = (rows.next_multiple_of(rows_multiple), cols.next_multiple_of(32));
    let mut numbers = vec![0u16; (padded_rows * padded_cols) as usize];
    for row in 0..padded_rows {
        for col in 0..padded_cols {
            let value = match (row < rows, col < cols) {
                (false, _) => f32::NAN,
                (true, true) => values[(row * cols + col) as usize],
                (true, false) => 0.0,
            };
            numbers[index(row, col, padded_cols)] = bits(format, value);
        }
    }
    numbers.chunks_exact(2).map(|p| u32::from(p[0]) | u32::from(p[1]) << 16).collect()
}

/// Returns the scale of a row of `rows` packed rows.
fn scale_of(memory: &HostMemory, packed: Packed, row: u32, rows: u32) -> f32 {
    if packed.order.has_scales() { memory.f32(packed.scales(Packed::padded_rows(rows)), row) } else { 1.0 }
}

fn number(memory: &HostMemory, format: Format, range: Range, i: usize) -> f32 {
    memory.weight(format, range, i as u32)
}

/// Checks the reference against a formula in f64, with a much smaller tolerance than that of devices.
fn near(found: f32, wanted: f64, what: &str) {
    let difference = (f64::from(found) - wanted).abs();
    assert!(difference <= 2e-6 * (1.0 + wanted.abs()), "the reference says {found:e}, the formula {wanted:e}: {what}");
}

fn silu(gate: f64) -> f64 {
    gate / (1.0 + (-gate).exp())
}

/// Returns an order of `count` columns.
fn shuffled(random: &mut Random, count: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    (1..count).rev().for_each(|i| order.swap(i as usize, random.below(i + 1) as usize));
    order
}

#[test]
fn order_rows_norms_and_orders() {
    let mut cases = Cases::new("order_rows");
    let mut random = Random(61);
    let mut made = Vec::new();
    for (k, rows) in [(8u32, 1u32), (40, 3), (145, 16), (1024, 2), (2120, 5), (12_288, 1)] {
        for norm in [false, true] {
            cases.case(format!("{k}.norm={norm}.{rows}"));
            let (stride, y_stride) = (k.next_multiple_of(8) + 8, k.next_multiple_of(32));
            let values = random.floats((rows * k) as usize);
            let mut x = vec![f32::from_bits(POISON); (rows * stride) as usize];
            for (line, x) in values.chunks_exact(k as usize).zip(x.chunks_exact_mut(stride as usize)) {
                x[..k as usize].copy_from_slice(line);
            }
            let (weight, order) = (random.floats(k as usize), shuffled(&mut random, k));
            let x = Activations { range: cases.floats("x", &x), stride };
            let weights = norm.then(|| (cases.floats("norm", &weight), EPSILON));
            let expect = if norm { Expect::Floats(1e-6) } else { Expect::Exact };
            let table = cases.words("order", &order::table(&order));
            let y = Activations { range: cases.output("y", (rows * y_stride) as usize, expect), stride: y_stride };
            cases.recording.call(order::order_rows("order".to_owned(), x, weights, table, y, (rows, k)));
            made.push((y, k, values, norm.then_some(weight), order));
        }
    }
    let reference = cases.reference();
    for (y, k, values, weight, order) in made {
        for (row, line) in (0..).zip(values.chunks_exact(k as usize)) {
            let mean = line.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / f64::from(k);
            for j in 0..y.stride {
                let wanted = order.get(j as usize).map_or(0.0, |from| {
                    let (x, from) = (f64::from(line[*from as usize]), *from as usize);
                    weight.as_ref().map_or(x, |w| x * f64::from(w[from]) / (mean + f64::from(EPSILON)).sqrt())
                });
                let found = f64::from(reference.f32(y.range, row * y.stride + j));
                assert!((found - wanted).abs() <= 1e-6 * wanted.abs(), "row {row}, column {j} of {k}");
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn order_packed_orders() {
    let mut cases = Cases::new("order_packed");
    let mut random = Random(62);
    let mut made = Vec::new();
    for (k, rows) in [(32u32, 1u32), (40, 64), (145, 65), (1024, 17), (2120, 3)] {
        cases.case(format!("{k}.{rows}"));
        let words = Packed::bytes(rows, k) as usize / 4;
        let numbers: Vec<u32> = (0..words).map(|_| random.below(u32::MAX)).collect();
        let order = shuffled(&mut random, k);
        let x = Packed { range: cases.words("x", &numbers), cols: k, order: PackedOrder::Fragments };
        let table = cases.words("order", &order::table(&order));
        let y = cases.output("y", words, Expect::Exact);
        cases.recording.call(order::order_packed("order".to_owned(), x, table, y, rows));
        made.push((y, k, rows, numbers, order));
    }
    let reference = cases.reference();
    for (y, k, rows, numbers, order) in made {
        let padded = k.next_multiple_of(32);
        let half = |word: u32, at: usize| word >> (16 * (at % 2)) & 0xffff;
        for row in 0..rows.next_multiple_of(64) {
            for col in 0..padded {
                let from = order.get(col as usize).map_or(col, |from| *from);
                let [from, to] = [from, col].map(|col| token_index(row, col, padded));
                let found = half(reference.u32(y, to as u32 / 2), to);
                assert_eq!(found, half(numbers[from / 2], from), "row {row}, column {col} of {k}");
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn pack_rows_norms_rounds_and_pads() {
    let mut cases = Cases::new("pack_rows");
    let mut random = Random(21);
    let mut made = Vec::new();
    let counts = [(64, 64), (16, 7), (64, 9), (128, 65), (192, 64), (64, 1)];
    for format in FORMATS {
        for (index, k) in [8u32, 40, 72, 145, 1024, 96, 2120].into_iter().enumerate() {
            for norm in [false, true] {
                let (rows, used) = counts[(index + usize::from(norm)) % counts.len()];
                cases.case(format!("{format:?}.{k}.norm={norm}.{used}of{rows}"));
                let stride = k.next_multiple_of(8) + 8;
                let values = random.floats((used * k) as usize);
                let mut x = vec![f32::from_bits(POISON); (rows * stride) as usize];
                for (row, line) in values.chunks_exact(k as usize).enumerate() {
                    x[row * stride as usize..][..k as usize].copy_from_slice(line);
                    x[row * stride as usize + k as usize..(row + 1) * stride as usize].fill(0.0);
                }
                let weight = random.floats(k as usize);
                let x = Activations { range: cases.floats("x", &x), stride };
                let padding = vec![1.0e3; (k.next_multiple_of(8) - k) as usize];
                let norm = norm.then(|| (cases.floats("norm", &[weight.clone(), padding].concat()), EPSILON));
                let order = order_of(format);
                let (words, numbers) = (packed_words(order, rows, k), Packed::bytes(rows, k) as u32 / 4);
                let expect = match (norm, format) {
                    (None, _) => Expect::Exact,
                    (Some(_), Format::Bf16) => rounded(format),
                    (Some(_), _) => Expect::HalfRows { numbers, limit: 2f32.powi(-10) },
                };
                let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
                let packed = Packed { range: cases.output("packed", words, expect), cols: k, order };
                cases.recording.call(pack_rows("pack".to_owned(), x, norm, packed, rows, Some(count)));
                made.push((packed, values, weight, norm.is_some(), rows));
            }
        }
    }
    let reference = cases.reference();
    for (packed, values, weight, norm, rows) in made {
        let k = packed.cols as usize;
        for row in 0..rows.next_multiple_of(64) as usize {
            let line = values.get(row * k..(row + 1) * k);
            let mean = line.map_or(0.0, |l| l.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()) / k as f64;
            for col in 0..k.next_multiple_of(32) {
                let at = token_index(row as u32, col as u32, packed.cols.next_multiple_of(32));
                let scale = scale_of(&reference, packed, row as u32, rows);
                let found = number(&reference, packed.order.format(), packed.range, at) * scale;
                let wanted = match line.and_then(|l| l.get(col)) {
                    Some(v) if norm => {
                        (f64::from(*v) / (mean + f64::from(EPSILON)).sqrt()
                            * f64::from(weight.get(col).copied().unwrap_or(0.0))) as f32
                    }
                    Some(v) => *v,
                    None => 0.0,
                };
                let exact = round(packed.order.format(), wanted / scale) * scale;
                // The last bit of the formula's f32 value may decide the direction of rounding.
                let near = norm && (found - exact).abs() <= exact.abs() * 2f32.powi(-7);
                assert!(found == exact || near, "row {row}, column {col} of {k}: {found:e}, not {exact:e}");
            }
        }
    }
    check(&cases, &reference);
}

/// A matrix product with unpacked values.
struct Logical {
    format: Format,
    /// The order of x.
    order: PackedOrder,
    n: u32,
    k: u32,
    used: u32,
    bias: bool,
    epilogue: Epilogue,
    w: Vec<f32>,
    x: Vec<f32>,
    old: Vec<f32>,
    bias_values: Vec<f32>,
}

impl Logical {
    fn new(
        random: &mut Random,
        format: Format,
        (n, k): (u32, u32),
        used: u32,
        bias: bool,
        epilogue: Epilogue,
    ) -> Logical {
        // Outputs are about 1, where silu is nonlinear and a missing term is visible.
        let size = 3.0 / (k as f32).sqrt();
        Logical {
            format,
            order: order_of(format),
            n,
            k,
            used,
            bias,
            epilogue,
            w: (0..n * k).map(|_| round(format, random.float() * size)).collect(),
            x: (0..used * k).map(|_| round(format, random.float())).collect(),
            old: random.floats((used * n) as usize),
            bias_values: random.floats(n as usize),
        }
    }

    /// Like [`Logical::new`], with x in bfloat16, as `panel` takes it.
    fn in_bfloat(
        random: &mut Random,
        format: Format,
        shape: (u32, u32),
        used: u32,
        bias: bool,
        epilogue: Epilogue,
    ) -> Logical {
        let logical = Logical::new(random, format, shape, used, bias, epilogue);
        let x = logical.x.iter().map(|x| round(Format::Bf16, *x)).collect();
        Logical { x, order: PackedOrder::Fragments, ..logical }
    }

    fn outputs(&self) -> u32 {
        if self.epilogue == Epilogue::Gated(Glu::Silu) { self.n / 2 } else { self.n }
    }

    /// Adds the buffers, with poison wherever nothing may be read, and returns the product.
    fn product(&self, cases: &mut Cases, rows: u32, into_packed: bool, sums: f32) -> Tiled {
        let Logical { format, order, n, k, .. } = *self;
        let weight = cases.words("weight", &packed(format, &self.w, (n, k), 16, fragment_index));
        let scaled = |(at, x): (u32, &f32)| if order.has_scales() { x / scale(at / k) } else { *x };
        let values: Vec<f32> = (0..).zip(&self.x).map(scaled).collect();
        let mut x = packed(order.format(), &values, (self.used, k), 64, token_index);
        x.resize(Packed::bytes(rows, k) as usize / 4, POISON);
        let scales = order.has_scales().then(|| (0..Packed::padded_rows(rows)).map(|row| scale(row).to_bits()));
        x.extend(scales.into_iter().flatten());
        let x = cases.words("x", &x);
        let bias = self.bias.then(|| cases.floats("bias", &self.bias_values));
        let y = if into_packed {
            let words = Packed::bytes(rows, n / 2) as usize / 4;
            Output::Packed(Packed {
                range: cases.output("y", words, rounded(Format::Bf16)),
                cols: n / 2,
                order: PackedOrder::Fragments,
            })
        } else {
            // The stride is larger than the outputs need, so that writes after a row's end are detected.
            let stride = self.outputs().next_multiple_of(8) + 8;
            let mut y = vec![f32::from_bits(POISON); (rows * stride) as usize];
            if self.epilogue == Epilogue::Residual {
                for (line, old) in y.chunks_exact_mut(stride as usize).zip(self.old.chunks_exact(n as usize)) {
                    line[..n as usize].copy_from_slice(old);
                }
            }
            let range = cases.floats("y", &y);
            cases.expect(range, Expect::Floats(sums));
            Output::Rows(Activations { range, stride })
        };
        Tiled {
            label: "product".to_owned(),
            weight: Matrix { range: weight, format, rows: n, cols: k },
            x: Packed { range: x, cols: k, order },
            bias,
            epilogue: self.epilogue,
            y,
        }
    }

    /// Returns output `i` of a row by the formula.
    fn wanted(&self, row: usize, i: usize) -> f64 {
        let (n, k) = (self.n as usize, self.k as usize);
        let x = &self.x[row * k..(row + 1) * k];
        let v = |r: usize| {
            let w = &self.w[r * k..(r + 1) * k];
            let dot: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            if self.bias { dot + f64::from(self.bias_values[r]) } else { dot }
        };
        match self.epilogue {
            Epilogue::Store => v(i),
            Epilogue::Residual => f64::from(self.old[row * n + i]) + v(i),
            Epilogue::Gated(_) => silu(v(2 * i)) * v(2 * i + 1),
            Epilogue::SquaredRelu => v(i).max(0.0).powi(2),
        }
    }

    /// Compares the values that the reference left in y with the formula.
    fn check_reference(&self, memory: &HostMemory, y: Output, what: &str) {
        for row in 0..self.used as usize {
            for i in 0..self.outputs() as usize {
                let wanted = self.wanted(row, i);
                let what = format!("{what}, row {row}, output {i}");
                match y {
                    Output::Rows(y) => near(memory.f32(y.range, row as u32 * y.stride + i as u32), wanted, &what),
                    Output::Packed(y) => {
                        let at = token_index(row as u32, i as u32, y.cols.next_multiple_of(32));
                        let found = number(memory, Format::Bf16, y.range, at);
                        let part = (f64::from(found) - wanted).abs() / (1e-6 + wanted.abs());
                        assert!(part <= 2f64.powi(-8) + 1e-6, "{found:e} instead of {wanted:e}: {what}");
                    }
                }
            }
        }
    }
}

#[test]
fn tiled_multiplies_the_rows_of_a_chunk() {
    let shapes = [(2, 8), (146, 40), (64, 72), (130, 145), (66, 200), (16, 32), (62, 40), (256, 128), (320, 96)];
    let odd = [(1, 8), (145, 145), (65, 40), (63, 200)];
    let counts = [(16, 16), (64, 1), (16, 7), (64, 63), (128, 64), (128, 65), (64, 17)];
    let epilogues = [
        (Epilogue::Store, false),
        (Epilogue::Residual, false),
        (Epilogue::Gated(Glu::Silu), false),
        (Epilogue::Gated(Glu::Silu), true),
        (Epilogue::SquaredRelu, false),
    ];
    for tile in tiles() {
        let mut cases = Cases::new(&format!("tiled.{tile:?}"));
        let mut random = Random(22);
        let mut made = Vec::new();
        let mut at = 0;
        for format in FORMATS {
            for (epilogue, into_packed) in epilogues {
                // Rows in f16 are packed by `pack_rows` only.
                let into_packed = into_packed && format == Format::Bf16;
                for bias in [false, true] {
                    for turn in 0..4 {
                        let shape = match (epilogue, turn) {
                            (Epilogue::Store | Epilogue::Residual, 3) => odd[at / 4 % odd.len()],
                            _ => shapes[at % shapes.len()],
                        };
                        let (rows, used) = counts[(at * 3 + turn) % counts.len()];
                        at += 1;
                        cases.case(format!(
                            "{format:?}.bias={bias}.{epilogue:?}.packed={into_packed}.{shape:?}x{used}of{rows}.{at}"
                        ));
                        let logical = Logical::new(&mut random, format, shape, used, bias, epilogue);
                        let product = logical.product(&mut cases, rows, into_packed, SUMS);
                        let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
                        cases.recording.call(product.call(*tile, rows, count));
                        made.push((logical, product));
                    }
                }
            }
        }
        // More tiles of x than are multiplied with one tile of W at a time.
        cases.case("many".to_owned());
        let logical = Logical::new(&mut random, Format::Bf16, (90, 32), 600, true, Epilogue::Store);
        let product = logical.product(&mut cases, 704, false, SUMS);
        let count = cases.words("chunk", &[POISON, POISON, 600, POISON]);
        cases.recording.call(product.call(*tile, 704, count));
        made.push((logical, product));

        check_products(&cases, &made);
    }
}

/// Goal: `panel` multiplies the rows of larger decode batches (all rows in use), with several panels and workgroup
/// shapes.
#[test]
fn panel_multiplies_the_rows_of_a_batch() {
    let shapes = [(2, 8), (146, 40), (64, 72), (130, 145), (66, 200), (16, 32), (62, 40), (256, 128), (320, 96)];
    let batches = [9, 17, 70];
    let configs = [(64, 1, 1), (32, 2, 1)];
    let epilogues = [
        (Epilogue::Store, false),
        (Epilogue::Residual, false),
        (Epilogue::Gated(Glu::Silu), false),
        (Epilogue::Gated(Glu::Silu), true),
        (Epilogue::SquaredRelu, false),
    ];
    for matrices in ways() {
        let mut cases = Cases::new(&format!("panel.{matrices:?}"));
        let mut random = Random(24);
        let mut made = Vec::new();
        for (at, rows) in batches.iter().cycle().take(16).enumerate() {
            let format = if at < 8 { Format::Bf16 } else { Format::F16 };
            let (epilogue, into_packed) = epilogues[at % epilogues.len()];
            let (threads, tiles, ahead) = configs[at / 4 % configs.len()];
            let (shape, bias) = (shapes[at % shapes.len()], at % 3 == 0);
            cases.case(format!("{format:?}.bias={bias}.{epilogue:?}.packed={into_packed}.{shape:?}x{rows}.{at}"));
            let logical = Logical::in_bfloat(&mut random, format, shape, *rows, bias, epilogue);
            let product = logical.product(&mut cases, *rows, into_packed, SUMS);
            cases.recording.call(panel(
                &product,
                *rows,
                *matrices,
                PanelConfig { threads, tiles, ahead, blocks: rows.div_ceil(16).min(4), in_f16: false },
                Fold::None,
            ));
            made.push((logical, product));
        }
        check_products(&cases, &made);
    }
}

/// Goal: the tile variants for batches are correct where all rows are in use.
#[test]
#[ignore = "needs OSTINATO_TEST_GPU"]
fn tiled_multiplies_the_rows_of_a_batch() {
    assert_eq!(Driver::first(), Driver::Gpu, "OSTINATO_TEST_GPU selects no GPU");
    for tile in [Tile::Square, Tile::Half, Tile::Wide] {
        let mut cases = Cases::new(&format!("batch.{tile:?}"));
        let mut random = Random(26);
        let mut made = Vec::new();
        let epilogues = [
            (Epilogue::Store, false),
            (Epilogue::Residual, false),
            (Epilogue::Gated(Glu::Silu), false),
            (Epilogue::Gated(Glu::Silu), true),
            (Epilogue::SquaredRelu, false),
        ];
        for (at, (epilogue, into_packed)) in epilogues.into_iter().enumerate() {
            for (shape, rows) in [((192, 96), 128), ((400, 160), 256), ((66, 200), 128)] {
                cases.case(format!("{epilogue:?}.packed={into_packed}.{shape:?}x{rows}"));
                let logical = Logical::new(&mut random, Format::Bf16, shape, rows, at % 2 == 0, epilogue);
                let product = logical.product(&mut cases, rows, into_packed, SUMS);
                cases.recording.call(product.batch(tile, rows));
                made.push((logical, product));
            }
        }
        check_products(&cases, &made);
    }
}

/// Goal: a norm can be folded into the products around it: attention's output projection, residual, norm, gate and up,
/// SwiGLU.
#[test]
fn panels_fold_the_norm_between_them() {
    for matrices in ways() {
        let mut cases = Cases::new(&format!("fold.{matrices:?}"));
        let mut random = Random(25);
        let list = [
            (Format::Bf16, 9, 64, 72, 40, 1, 1),
            (Format::Bf16, 33, 96, 40, 64, 2, 2),
            (Format::Bf16, 32, 544, 32, 32, 1, 2),
            (Format::F16, 33, 96, 40, 64, 2, 2),
        ];
        for (format, rows, hidden, inner, width, tiles, blocks) in list {
            cases.case(format!("{format:?}.{rows}x{hidden}.before"));
            let logical = Logical::in_bfloat(&mut random, format, (hidden, width), rows, false, Epilogue::Residual);
            let first = logical.product(&mut cases, rows, false, SUMS);
            let norm: Vec<f32> = (0..hidden).map(|_| random.float()).collect();
            let norm = cases.floats("norm", &norm);
            let unscaled = Unscaled {
                rows: Packed {
                    range: cases.output("unscaled", Packed::bytes(rows, hidden) as usize / 4, rounded(Format::Bf16)),
                    cols: hidden,
                    order: PackedOrder::Fragments,
                },
                squares: cases.output(
                    "squares",
                    Unscaled::square_bytes(PackedOrder::Fragments, rows, hidden) as usize / 4,
                    Expect::Floats(SUMS),
                ),
            };
            let config = PanelConfig { threads: 64, tiles, ahead: 1, blocks, in_f16: false };
            cases.recording.call(panel(&first, rows, *matrices, config, Fold::Next(unscaled, norm)));
            cases.case(format!("{format:?}.{rows}x{hidden}.behind"));
            let gated = Epilogue::Gated(Glu::Silu);
            let logical = Logical::in_bfloat(&mut random, format, (inner * 2, hidden), rows, false, gated);
            // A value of x that is rounded the other way changes the results that depend on it.
            let second = logical.product(&mut cases, rows, false, 1e-2);
            let second = Tiled { x: unscaled.rows, ..second };
            cases.recording.call(panel(&second, rows, *matrices, config, Fold::Scale(unscaled, EPSILON)));
        }
        let reference = cases.reference();
        check(&cases, &reference);
    }
}

/// Goal: the layouts of the three kernels of a feed-forward block fit together: norm, gate and up with SwiGLU, down
/// with residual.
#[test]
fn a_feed_forward_block_runs_on_packed_rows() {
    let (hidden, inner, rows, used) = (72u32, 104u32, 128u32, 77u32);
    for tile in tiles() {
        for format in FORMATS {
            let mut cases = Cases::new(&format!("feed_forward.{tile:?}.{format:?}"));
            let mut random = Random(23);
            cases.case("block".to_owned());
            let weight = |cases: &mut Cases, random: &mut Random, name: &str, n: u32, k: u32| {
                let w: Vec<f32> = (0..n * k).map(|_| random.float() * 3.0 / (k as f32).sqrt()).collect();
                let range = cases.words(name, &packed(format, &w, (n, k), 16, fragment_index));
                Matrix { range, format, rows: n, cols: k }
            };
            let x = random.floats((rows * hidden) as usize);
            let norm = random.floats(hidden as usize);
            let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
            let residual = Activations { range: cases.floats("x", &x), stride: hidden };
            let norm = cases.floats("norm", &norm);
            // A value that is rounded the other way changes the results that depend on it; a wrong position changes
            // them by about 1.
            cases.expect(residual.range, Expect::Floats(1e-2));
            let order = order_of(format);
            let spaces = [("packed", hidden), ("middle", inner)].map(|(name, cols)| {
                let words = packed_words(order, rows, cols);
                Packed { range: cases.output(name, words, Expect::Any), cols, order }
            });
            let unpacked =
                Activations { range: cases.output("unpacked", (rows * inner) as usize, Expect::Any), stride: inner };
            let gate_up = weight(&mut cases, &mut random, "gate_up", inner * 2, hidden);
            let down = weight(&mut cases, &mut random, "down", hidden, inner);
            cases.recording.call(pack_rows(
                "norm".to_owned(),
                residual,
                Some((norm, EPSILON)),
                spaces[0],
                rows,
                Some(count),
            ));
            // Rows in f16 are packed by a call of their own.
            let between = order.has_scales().then_some(unpacked);
            let gated = between.map_or(Output::Packed(spaces[1]), Output::Rows);
            let products = [
                (gate_up, spaces[0], Epilogue::Gated(Glu::Silu), gated),
                (down, spaces[1], Epilogue::Residual, Output::Rows(residual)),
            ];
            for (index, (weight, x, epilogue, y)) in products.into_iter().enumerate() {
                let product = Tiled { label: "product".to_owned(), weight, x, bias: None, epilogue, y };
                cases.recording.call(product.call(*tile, rows, count));
                if let Some(unpacked) = between.filter(|_| index == 0) {
                    let label = "down_pack".to_owned();
                    cases.recording.call(pack_rows(label, unpacked, None, spaces[1], rows, Some(count)));
                }
            }
            let reference = cases.reference();
            check(&cases, &reference);
        }
    }
}

/// The interpreter would take minutes for these shapes, so only a sample of the outputs is compared.
#[test]
#[ignore = "needs OSTINATO_TEST_GPU"]
fn tiled_at_the_shapes_of_models() {
    assert_eq!(Driver::first(), Driver::Gpu, "OSTINATO_TEST_GPU selects no GPU");
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let mut random = Random(24);
    let calls = [
        ((4096, 4096), 512, Epilogue::Residual, false),
        ((6144, 2560), 300, Epilogue::Store, false),
        ((8192, 4096), 129, Epilogue::Gated(Glu::Silu), true),
    ];
    for (shape, used, epilogue, into_packed) in calls {
        for format in FORMATS {
            let logical = Logical::new(&mut random, format, shape, used, false, epilogue);
            for tile in [Tile::Square, Tile::Half, Tile::Wide] {
                let mut cases = Cases::new(&format!("{tile:?}.{format:?}.{shape:?}x{used}"));
                cases.case("real".to_owned());
                let into_packed = into_packed && format == Format::Bf16;
                let product = logical.product(&mut cases, 512, into_packed, LONG_SUMS);
                let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
                cases.recording.call(product.call(tile, 512, count));
                let after = bench.run(&cases.recording, &cases.before());
                // Every row and every output at least once.
                for sample in 0..2 * logical.outputs().max(used) {
                    let (row, i) = (sample % used, (sample * 7 + sample / used) % logical.outputs());
                    let wanted = logical.wanted(row as usize, i as usize) as f32;
                    let (found, limit) = match product.y {
                        Output::Rows(y) => (after.f32(y.range, row * y.stride + i), LONG_SUMS * (1.0 + wanted.abs())),
                        Output::Packed(y) => (
                            number(&after, Format::Bf16, y.range, token_index(row, i, y.cols.next_multiple_of(32))),
                            LONG_SUMS * (1.0 + wanted.abs()) + wanted.abs() * 2f32.powi(-8),
                        ),
                    };
                    let what = format!("{}: row {row}, output {i}", cases.recording.name);
                    assert!((found - wanted).abs() <= limit, "{what}: {found:e} instead of {wanted:e}");
                }
            }
        }
    }
}

//! Goal: every kernel of the forward pass matches its `reference()` on both CPU drivers and for awkward shapes, and the
//! reference matches the formula. Method: one recording of many calls, each with seeded inputs and with outputs
//! poisoned with NaN. The device and the interpreter run it from the same memory. A word that the reference does not
//! write must not change, and NaN stands wherever a kernel must not read. In addition, each reference is compared with
//! a formula in f64 over the unpacked values.
//!
//! Tolerances: sums of up to 1,024 products in a different order differ by a few units in the last place (2^-24 ≈ 6e-8)
//! of their largest terms, which are about 1; `exp` and `inversesqrt` of the drivers add a few more. 2e-5 leaves room
//! for that; a missing or doubled term of these inputs changes a sum by more than 1e-3. Where nothing is summed, bits
//! must be equal.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, descriptor, every_case, round, ways};
use crate::pages::{Pages, head_at, round_head, spread, stored};
use crate::scores::{self, first_visible, last_visible, query_scale, scored, sink_of};
use ostinato::config::KvFormat;
use ostinato::kernels::attention::flash_decode::{
    self, FlashDecodeShape, Split, Spread, SpreadBy, flash_decode, plan_splits,
};
use ostinato::kernels::attention::{self, AttentionShape, HeadNorm, Heads, Scores};
use ostinato::kernels::embed::{ChunkLayout, PromptRows, RowsFrom, Table, embed_rows};
use ostinato::kernels::gemm::matmul::{
    Arithmetic, Blocked, MatmulConfig, MatmulRows, MatrixUnits, Scratch, block_rows,
};
use ostinato::kernels::gemm::skinny::{Matrices, SkinnyConfig, skinny};
use ostinato::kernels::gemm::tiled::{Packed, PackedOrder};
use ostinato::kernels::gemm::{Activations, Epilogue, GemvConfig, Glu, Matrix, Product, take_last};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::recording::Range;
use ostinato::kernels::shaders::{AppendArgs, AttentionArgs, EmbedRowsArgs, TakeLastArgs};
use ostinato::kernels::state;
use ostinato::kernels::tags::{Flow, TAG_BITS, tagged};
use ostinato::memory::pack::{self, Format, Layout, Packing, RowMap, SourceFormat};
use ostinato::model::decoder;

const FORMATS: [Format; 3] = [Format::Bf16, Format::F16, Format::F32];
/// Tolerance of sums, explained at the top of the file.
const SUMS: f32 = 2e-5;

/// Compares with the reference on every driver, with validation.
fn check(cases: &Cases, reference: &HostMemory) {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), reference);
    }
}

fn padded(n: u32) -> u32 {
    n.next_multiple_of(8)
}

/// Returns rows of `width` values at a distance of `stride`, with `padding` between them.
fn strided(values: &[f32], width: u32, stride: u32, padding: f32) -> Vec<f32> {
    let mut out = Vec::new();
    for row in values.chunks_exact(width as usize) {
        out.extend_from_slice(row);
        out.resize(out.len() + (stride - width) as usize, padding);
    }
    out
}

/// Returns values packed in a format in fragment order.
fn fragments(format: Format, values: &[f32], rows: u32, cols: u32) -> Vec<u32> {
    let bytes: Vec<u8> = values.iter().flat_map(|w| w.to_le_bytes()).collect();
    let packing = Packing { rows, cols, layout: Layout::Fragments, format };
    let format = SourceFormat::Numbers(Format::F32);
    let source = pack::Rows { bytes: &bytes, map: RowMap::whole(format, rows, cols) };
    let mut words = vec![0u32; packing.bytes() as usize / 4];
    pack::pack(&packing, &[source], 0..packing.bytes(), bytemuck::cast_slice_mut(&mut words)).expect("finite values");
    words
}

fn floats(memory: &HostMemory, range: Range) -> Vec<f32> {
    memory.floats(range)
}

/// Checks the reference against a formula in f64, with a much smaller tolerance than that of devices.
fn near(found: f32, wanted: f64, what: &str) {
    let difference = (f64::from(found) - wanted).abs();
    assert!(difference <= 2e-6 * (1.0 + wanted.abs()), "the reference says {found:e}, the formula {wanted:e}: {what}");
}

// ---------------------------------------------------------------- embed_rows, take_last

#[test]
fn embed_rows_of_a_batch_and_of_a_chunk_from_whole_and_split_tables() {
    let mut cases = Cases::new("embed_rows");
    let mut random = Random(1);
    let vocabulary = 37u32;
    let mut outputs = Vec::new();
    for (index, (format, hidden)) in
        FORMATS.into_iter().flat_map(|f| [8, 40, 72, 145, 1024].map(|h| (f, h))).enumerate()
    {
        for (from, split) in
            [(RowsFrom::Batch, false), (RowsFrom::Chunk, false), (RowsFrom::Batch, true), (RowsFrom::Chunk, true)]
        {
            cases.case(format!("{format:?}.{hidden}.{from:?}.{split}"));
            let stride = padded(hidden);
            let table = random.floats((vocabulary * hidden) as usize);
            let packed = strided(&table, hidden, stride, 0.0);
            // Slots 0 to 9 run; of the last two one is idle and one has finished.
            let slots = 12u32;
            let tokens: Vec<u32> = (0..slots).map(|_| random.below(vocabulary)).collect();
            let positions: Vec<u32> = (0..slots).map(|_| random.below(300)).collect();
            let mut words = vec![POISON; (slots * state::SLOT_WORDS) as usize];
            for slot in 0..slots as usize {
                let at = slot * state::SLOT_WORDS as usize;
                words[at + state::SLOT_ACTIVE as usize] =
                    [state::ACTIVE_RUNNING, state::ACTIVE_IDLE, state::ACTIVE_DONE]
                        [if slot < 10 { 0 } else { slot - 9 }];
                words[at + state::SLOT_TOKEN as usize] = tokens[slot];
                words[at + state::SLOT_POSITION as usize] = positions[slot];
            }
            // The last row of the vocabulary occurs in every case.
            words[(3 * state::SLOT_WORDS + state::SLOT_TOKEN) as usize] = vocabulary - 1;
            let mut batch = random.permutation(slots);
            batch[5] = u32::MAX;
            batch.extend([3, u32::MAX, 3]);
            let (start, count, rows) = (index as u32 * 7, 9u32, batch.len() as u32);
            // Three prompts, one of them with a single token.
            let mut chunk_tokens: Vec<u32> = (0..count).map(|i| (i * 5 + 36) % vocabulary).collect();
            // These tokens are next to the boundary between two parts of the table.
            chunk_tokens[2] = 16;
            chunk_tokens[3] = 15;
            let (first, rest) = chunk_tokens.split_at(4);
            let (second, third) = rest.split_at(1);
            let prompts = [(7, start, first), (2, 90, second), (9, 5, third)].map(|(slot, start, tokens)| PromptRows {
                slot,
                start,
                tokens,
                last: false,
                next: None,
                from: None,
                keeps: &[],
            });
            let of_chunk: Vec<[u32; 4]> = prompts
                .iter()
                .flat_map(|p| {
                    let rows = (p.start..).zip(p.tokens).zip((1..=p.tokens.len() as u32).rev());
                    rows.map(|((position, token), left)| [*token, position, p.slot, left])
                })
                .collect();
            let layout = ChunkLayout { prompts: 5, cells: true };
            // The words after a chunk's tokens are leftovers of an earlier chunk.
            let mut chunk = descriptor(layout, &prompts);
            chunk.extend((count..rows).map(|i| u32::MAX - i));

            // The parts are processed in descending order, so that a part that writes rows of a later one is detected.
            let table_parts: Vec<(u32, u32)> =
                if split { vec![(36, 1), (16, 20), (0, 16)] } else { vec![(0, vocabulary)] };
            let slots_range = cases.words("slots", &words);
            let batch_range = cases.words("batch", &batch);
            let chunk_range = cases.words("chunk", &chunk);
            let x = cases.output("x", (rows * stride) as usize, Expect::Exact);
            let rows_range = cases.output("rows", rows as usize * 4, Expect::Exact);
            for (first, count) in table_parts {
                let part = &packed[(first * stride) as usize..((first + count) * stride) as usize];
                let embedding = cases.weights(&format!("embedding.{first}"), format, part);
                let args = EmbedRowsArgs {
                    embedding,
                    slots: if from == RowsFrom::Batch { slots_range } else { slots_range.none() },
                    batch: if from == RowsFrom::Batch { batch_range } else { batch_range.none() },
                    chunk: if from == RowsFrom::Batch { chunk_range.none() } else { chunk_range },
                    x,
                    rows: rows_range,
                    chunks: stride / 8,
                    x_stride: stride,
                    part_first: first,
                    part_rows: count,
                    x_tag: 0,
                    tokens_at: layout.token(0),
                    scale: 1.0,
                };
                let table = Table { format, fragments: false };
                cases.recording.call(embed_rows("embed".to_owned(), table, from, rows, hidden, Flow::NONE, args));
            }
            // {token, position, slot, number of rows up to its prompt's last or 0} of each row.
            let wanted: Vec<[u32; 4]> = (0..rows as usize)
                .map(|row| match from {
                    RowsFrom::Chunk if (row as u32) < count => of_chunk[row],
                    RowsFrom::Chunk => [0, row as u32, 9, 0],
                    RowsFrom::Batch if batch[row] == u32::MAX => [0, 0, u32::MAX, 0],
                    RowsFrom::Batch => {
                        let slot = batch[row];
                        let token = words[(slot * state::SLOT_WORDS + state::SLOT_TOKEN) as usize];
                        if slot < 10 {
                            [token, positions[slot as usize], slot, 1]
                        } else {
                            [0, positions[slot as usize], slot, 0]
                        }
                    }
                })
                .collect();
            outputs.push((x, rows_range, wanted, table, hidden, stride, format));
        }
    }
    let reference = cases.reference();
    for (x, rows, wanted, table, hidden, stride, format) in outputs {
        let found = floats(&reference, x);
        for (row, info) in wanted.into_iter().enumerate() {
            let name = &cases.recording.decl(x.buffer).name;
            let row_info: [u32; 4] = std::array::from_fn(|i| reference.u32(rows, row as u32 * 4 + i as u32));
            assert_eq!(row_info, info, "row {row} of {name}");
            for i in 0..stride as usize {
                let value =
                    if i < hidden as usize { round(format, table[(info[0] * hidden) as usize + i]) } else { 0.0 };
                assert_eq!(found[row * stride as usize + i], value, "row {row}, value {i} of {name}");
            }
        }
    }
    check(&cases, &reference);
}

/// Method: a table with ragged numbers of rows and columns in fragment order, whole and split, tagged and untagged.
#[test]
fn embed_rows_from_fragments_and_with_tags() {
    let mut cases = Cases::new("embed_rows.fragments");
    let mut random = Random(42);
    let vocabulary = 37u32;
    let mut outputs = Vec::new();
    for (hidden, format) in [8, 40, 96, 1024].into_iter().flat_map(|h| [Format::Bf16, Format::F16].map(|f| (h, f))) {
        for (tag, split) in [(None, false), (None, true), (Some(TAGS[1]), false), (Some(TAGS[1]), true)] {
            cases.case(format!("{format:?}.{hidden}.{tag:?}.{split}"));
            let table: Vec<f32> =
                random.floats((vocabulary * hidden) as usize).into_iter().map(|v| round(format, v)).collect();
            let tokens = [36, 0, 15, 16, 31, 32, 5, 22];
            let rows = tokens.len() as u32;
            let prompt =
                PromptRows { slot: 7, start: 3, tokens: &tokens, last: false, next: None, from: None, keeps: &[] };
            let layout = ChunkLayout { prompts: 1, cells: false };
            let chunk = descriptor(layout, &[prompt]);
            let stride = decoder::stride(hidden);
            let chunk = cases.words("chunk", &chunk);
            let x = cases.output("x", (rows * stride) as usize, Expect::Exact);
            let rows_range = cases.output("rows", rows as usize * 4, Expect::Exact);
            let flow = Flow { output: tag, ..Flow::NONE };
            let parts = if split { vec![(32, 5), (16, 16), (0, 16)] } else { vec![(0, vocabulary)] };
            for (first, count) in parts {
                let part = &table[(first * hidden) as usize..((first + count) * hidden) as usize];
                let args = EmbedRowsArgs {
                    embedding: cases.words(&format!("embedding.{first}"), &fragments(format, part, count, hidden)),
                    slots: chunk.none(),
                    batch: chunk.none(),
                    chunk,
                    x,
                    rows: rows_range,
                    chunks: hidden / 8,
                    x_stride: stride,
                    part_first: first,
                    part_rows: count,
                    x_tag: 0,
                    tokens_at: layout.token(0),
                    scale: 1.5,
                };
                let table = Table { format, fragments: true };
                let from = RowsFrom::Chunk;
                cases.recording.call(embed_rows("embed".to_owned(), table, from, rows, hidden, flow, args));
            }
            outputs.push((x, tokens, table, hidden, stride, tag));
        }
    }
    let reference = cases.reference();
    for (x, tokens, table, hidden, stride, tag) in outputs {
        for (row, token) in (0..).zip(tokens) {
            for i in 0..hidden {
                let value = 1.5 * table[(token * hidden + i) as usize];
                let wanted = tag.map_or(value.to_bits(), |tag| tagged(value, tag));
                assert_eq!(reference.u32(x, row * stride + i), wanted, "token {token}, value {i} of {hidden}");
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn take_last_copies_the_last_rows_of_the_prompts_that_end() {
    let mut cases = Cases::new("take_last");
    let mut random = Random(2);
    let mut outputs = Vec::new();
    // Rows; of each prompt its rows and whether it ends; rows of the dispatch; floats per row.
    type Shape<'a> = (usize, &'a [(usize, bool)], u32, usize);
    let shapes: [Shape<'_>; 5] = [
        (1, &[(1, true)], 1, 8),
        (16, &[(1, false), (3, true), (1, true), (2, false)], 2, 40),
        (16, &[(15, true)], 4, 152),
        (16, &[(9, true), (7, true)], 2, 64),
        (64, &[(33, true), (1, true), (5, true)], 8, 1024),
    ];
    for (rows, prompts, heads, stride) in shapes {
        cases.case(format!("{rows}.{prompts:?}.{stride}"));
        let x = random.floats(rows * stride);
        let infos: Vec<u32> = (0..rows as u32 * 4).map(|_| random.below(1 << 30)).collect();
        let tokens = vec![0; rows];
        let parts: Vec<PromptRows<'_>> = prompts
            .iter()
            .map(|&(length, last)| PromptRows {
                slot: 0,
                start: 0,
                tokens: &tokens[..length],
                last,
                next: None,
                from: None,
                keeps: &[],
            })
            .collect();
        let layout = ChunkLayout { prompts: 8, cells: false };
        let mut wanted = Vec::new();
        let mut end = 0;
        for &(length, last) in prompts {
            end += length;
            if last {
                wanted.push((x[(end - 1) * stride..end * stride].to_vec(), infos[(end - 1) * 4..end * 4].to_vec()));
            }
        }
        wanted.resize(heads as usize, (vec![0.0; stride], vec![0, 0, u32::MAX, 0]));
        let args = TakeLastArgs {
            x: cases.floats("x", &x),
            rows: cases.words("rows", &infos),
            chunk: cases.words("chunk", &descriptor(layout, &parts)),
            head_x: cases.output("head_x", heads as usize * stride, Expect::Exact),
            head_rows: cases.output("head_rows", heads as usize * 4, Expect::Exact),
            x_stride: stride as u32,
            last_at: layout.last(0),
        };
        cases.recording.call(take_last("take_last".to_owned(), heads, args));
        outputs.push((args, wanted));
    }
    let reference = cases.reference();
    for (args, wanted) in outputs {
        let (x, infos): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        assert_eq!(floats(&reference, args.head_x), x.concat());
        let infos = infos.concat();
        assert_eq!((0..infos.len() as u32).map(|i| reference.u32(args.head_rows, i)).collect::<Vec<_>>(), infos);
    }
    check(&cases, &reference);
}

// ---------------------------------------------------------------- gemv, matmul

/// A matrix product with unpacked values.
struct Logical {
    format: Format,
    n: u32,
    k: u32,
    /// The number of rows of x in memory, and the number of those that are used.
    rows: u32,
    used: u32,
    norm: bool,
    bias: bool,
    epilogue: Epilogue,
    w: Vec<f32>,
    x: Vec<f32>,
    old: Vec<f32>,
    norm_weight: Vec<f32>,
    bias_values: Vec<f32>,
}

const EPSILON: f32 = 1e-3;

impl Logical {
    fn new(
        random: &mut Random,
        format: Format,
        (n, k): (u32, u32),
        (rows, used): (u32, u32),
        norm: bool,
        bias: bool,
        epilogue: Epilogue,
    ) -> Logical {
        // Outputs are about 1, where silu is nonlinear and a missing term is visible.
        let size = 3.0 / (k as f32).sqrt();
        let w = (0..n * k).map(|_| round(format, random.float() * size)).collect();
        Logical {
            format,
            n,
            k,
            rows,
            used,
            norm,
            bias,
            epilogue,
            w,
            x: random.floats((used * k) as usize),
            old: random.floats((rows * n) as usize),
            norm_weight: random.floats(k as usize),
            bias_values: random.floats(n as usize),
        }
    }

    fn outputs(&self) -> u32 {
        if self.epilogue == Epilogue::Gated(Glu::Silu) { self.n / 2 } else { self.n }
    }

    /// Adds the buffers, with poison wherever nothing may be read, and returns the product.
    fn product(&self, cases: &mut Cases) -> Product {
        let k_stride = padded(self.k);
        // The stride is larger than the outputs need, so that writes after a row's end are detected.
        let y_stride = padded(self.outputs()) + 8;
        let weight = cases.weights("weight", self.format, &strided(&self.w, self.k, k_stride, 0.0));
        // A norm also sums the padding, so it must be zero there. A product multiplies it by zeros of W.
        let mut x = strided(&self.x, self.k, k_stride, if self.norm { 0.0 } else { 1.0e3 });
        x.resize((self.rows * k_stride) as usize, f32::from_bits(POISON));
        let x = cases.floats("x", &x);
        let norm = self.norm.then(|| {
            let padding = vec![1.0e3; (k_stride - self.k) as usize];
            (cases.floats("norm", &[self.norm_weight.clone(), padding].concat()), EPSILON)
        });
        let bias = self.bias.then(|| cases.floats("bias", &self.bias_values));
        let y = if self.epilogue == Epilogue::Residual {
            let y = cases.floats("y", &strided(&self.old, self.n, y_stride, f32::from_bits(POISON)));
            cases.expect(y, Expect::Floats(SUMS));
            y
        } else {
            cases.output("y", (self.rows * y_stride) as usize, Expect::Floats(SUMS))
        };
        Product {
            label: "product".to_owned(),
            weight: Matrix { range: weight, format: self.format, rows: self.n, cols: self.k },
            x: Activations { range: x, stride: k_stride },
            norm,
            bias,
            epilogue: self.epilogue,
            y: Activations { range: y, stride: y_stride },
        }
    }

    /// Compares the values that the reference left in y with the formula.
    fn check_reference(&self, memory: &HostMemory, y: Activations, what: &str) {
        let (n, k) = (self.n as usize, self.k as usize);
        for row in 0..self.used as usize {
            let x: Vec<f64> = self.x[row * k..(row + 1) * k].iter().map(|v| f64::from(*v)).collect();
            let x: Vec<f64> = match self.norm {
                true => {
                    let rms = (x.iter().map(|v| v * v).sum::<f64>() / k as f64 + f64::from(EPSILON)).sqrt();
                    x.iter().zip(&self.norm_weight).map(|(v, w)| v / rms * f64::from(*w)).collect()
                }
                false => x,
            };
            let v = |r: usize| {
                let dot: f64 = self.w[r * k..(r + 1) * k].iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum();
                if self.bias { dot + f64::from(self.bias_values[r]) } else { dot }
            };
            for i in 0..self.outputs() as usize {
                let wanted = match self.epilogue {
                    Epilogue::Store => v(i),
                    Epilogue::Residual => f64::from(self.old[row * n + i]) + v(i),
                    Epilogue::Gated(_) => {
                        let gate = v(2 * i);
                        gate / (1.0 + (-gate).exp()) * v(2 * i + 1)
                    }
                    Epilogue::SquaredRelu => v(i).max(0.0).powi(2),
                };
                near(
                    memory.f32(y.range, row as u32 * y.stride + i as u32),
                    wanted,
                    &format!("{what}, row {row}, output {i}"),
                );
            }
        }
    }
}

fn variants() -> Vec<(Format, bool, bool, Epilogue)> {
    let epilogues = [Epilogue::Store, Epilogue::Residual, Epilogue::Gated(Glu::Silu), Epilogue::SquaredRelu];
    let options = epilogues
        .into_iter()
        .flat_map(|e| [(false, false), (true, false), (false, true), (true, true)].map(|(n, b)| (n, b, e)));
    options.flat_map(|(norm, bias, epilogue)| FORMATS.map(|format| (format, norm, bias, epilogue))).collect()
}

#[test]
fn gemv_multiplies_a_few_rows() {
    let mut cases = Cases::new("gemv");
    let mut random = Random(3);
    let shapes = [(2, 8), (146, 40), (64, 72), (130, 145), (34, 200), (18, 1024), (508, 72), (2, 1024)];
    let odd = [(1, 8), (145, 145), (257, 40), (33, 200)];
    let mut made = Vec::new();
    for (index, (format, norm, bias, epilogue)) in variants().into_iter().enumerate() {
        for turn in 0..3 {
            let at = index * 3 + turn;
            let shape = if epilogue != Epilogue::Gated(Glu::Silu) && turn == 2 {
                odd[at % odd.len()]
            } else {
                shapes[at % shapes.len()]
            };
            let rows = at as u32 % 17 + 1;
            // The fewest are those of CPU drivers.
            let threads: u32 = [4, 8, 32, 64, 128][(index / 3 + index % 3 * 2) % 5];
            let weight_rows = [2, 4, 8][at % 3];
            let batch = [1, 2, 3, 8][at % 4].min(threads / (weight_rows / 2));
            cases.case(format!("{format:?}.norm={norm}.bias={bias}.{epilogue:?}.{shape:?}x{rows}.threads={threads}.weight_rows={weight_rows}.batch={batch}"));
            let logical = Logical::new(&mut random, format, shape, (rows, rows), norm, bias, epilogue);
            let product = logical.product(&mut cases);
            cases.recording.call(product.gemv(rows, GemvConfig { threads, weight_rows, batch }));
            made.push((logical, product.y));
        }
    }
    let reference = cases.reference();
    for (logical, y) in made {
        logical.check_reference(&reference, y, &cases.recording.decl(y.range.buffer).name);
    }
    check(&cases, &reference);
}

/// Goal: a matrix with more rows than one dispatch dimension allows is supported. A dimension is limited to 65,535
/// workgroups, which a vocabulary of 256 k rows exceeds.
#[test]
fn gemv_folds_more_rows_than_one_dimension_of_a_dispatch_holds() {
    let mut cases = Cases::new("gemv.folded");
    cases.case("tall".to_owned());
    let mut random = Random(4);
    let logical = Logical::new(&mut random, Format::Bf16, (131_073, 8), (2, 2), false, true, Epilogue::Store);
    let product = logical.product(&mut cases);
    let call = product.gemv(2, GemvConfig { threads: 32, weight_rows: 2, batch: 1 });
    assert!(call.groups[2] > 1, "folded: {:?}", call.groups);
    cases.recording.call(call);
    let reference = cases.reference();
    logical.check_reference(&reference, product.y, "folded");
    check(&cases, &reference);
}

/// Adds the buffers of prepared rows and of partial sums, and records the product for many rows.
fn record_many(
    cases: &mut Cases,
    product: &Product,
    rows: MatmulRows<'_>,
    arithmetic: Arithmetic,
    config: MatmulConfig,
) {
    let (most, cols) = (rows.most(), product.weight.cols);
    let arithmetic = arithmetic.of(product.weight.format);
    let words = |bytes: u64| vec![POISON; bytes.div_ceil(4) as usize];
    let range = cases.words("blocked", &words(Blocked::bytes(arithmetic, most, cols)));
    let scales = cases.words("scales", &words(Blocked::scale_bytes(most)));
    cases.expect(scales, Expect::Floats(1e-6));
    let x = Blocked { range, scales, cols, arithmetic };
    cases.recording.call(block_rows("block".to_owned(), product.x, product.norm, x, rows));
    let [partials, counters] = config.scratch_bytes(most, product.weight.rows);
    let partials = cases.words("partials", &words(partials.max(4)));
    cases.expect(partials, Expect::Any);
    let counters = cases.words("counters", &vec![0; counters.div_ceil(4).max(1) as usize]);
    cases.recording.call(product.matmul(x, rows, 0, config, Scratch { partials, counters }));
}

/// Tolerance of products in f16: x and W are rounded to 11 bits, and up to 32 products are summed in f16, each sum with an
/// error of 2^-11 of it; the sums here are below 6, and what they are multiplied with in SwiGLU below 3. Errors of 1,024
/// columns are independent: a thousandth is rarely exceeded. A missing or doubled term changes a sum by more than 1e-2.
const HALF_SUMS: f32 = 8e-3;

fn matmul_cases(name: &str, arithmetic: Arithmetic, configs: &[MatmulConfig], limit: f32) -> Cases {
    let mut cases = Cases::new(name);
    let mut random = Random(5);
    let shapes = [(2, 8), (146, 40), (64, 72), (130, 145), (66, 200), (2, 1024), (62, 40)];
    let odd = [(1, 8), (145, 145), (65, 40), (63, 200)];
    let counts = [(16, 16), (64, 1), (16, 7), (64, 63), (128, 64), (128, 65), (64, 17)];
    let mut made = Vec::new();
    for (index, (format, norm, bias, epilogue)) in variants().into_iter().enumerate() {
        if arithmetic.of(format) != arithmetic {
            continue;
        }
        // Every variant once, every shape several times.
        let turn = index % 2;
        let at = index * 2 + turn;
        let shape = if epilogue != Epilogue::Gated(Glu::Silu) && turn == 1 {
            odd[at / 2 % odd.len()]
        } else {
            shapes[at % shapes.len()]
        };
        let (rows, used) = counts[(at * 3 + turn) % counts.len()];
        let config = configs[at % configs.len()];
        cases.case(format!("{format:?}.norm={norm}.bias={bias}.{epilogue:?}.{shape:?}x{used}of{rows}.{config:?}"));
        let logical = Logical::new(&mut random, format, shape, (rows, used), norm, bias, epilogue);
        let product = logical.product(&mut cases);
        cases.expect(product.y.range, Expect::Floats(limit));
        let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
        // Rows beyond those in use hold poison, so a step that uses all of its rows has as many as that.
        let rows = if at % 3 == 0 { MatmulRows::All(used) } else { MatmulRows::Counted(rows, count) };
        record_many(&mut cases, &product, rows, arithmetic, config);
        made.push((logical, product.y));
    }
    let reference = cases.reference();
    // The reference rounds x to f16 as the kernel does, which is no part of the formula.
    if arithmetic == Arithmetic::F32 {
        for (logical, y) in made {
            logical.check_reference(&reference, y, &cases.recording.decl(y.range.buffer).name);
        }
    }
    cases
}

#[test]
fn matmul_multiplies_the_rows_of_a_chunk() {
    let config = |tokens, features, words, each, splits| MatmulConfig { tokens, features, words, each, splits };
    let configs = [config(64, 64, 1, 4, 1), config(16, 64, 1, 4, 3), config(32, 32, 2, 2, 2), config(16, 32, 1, 8, 1)];
    let cases = matmul_cases("matmul", Arithmetic::F32, &configs, SUMS);
    check(&cases, &cases.reference());
}

#[test]
fn matmul_multiplies_in_pairs_of_f16() {
    let config = |tokens, features, words, each, splits| MatmulConfig { tokens, features, words, each, splits };
    let configs = [config(64, 64, 1, 4, 1), config(16, 64, 1, 8, 3), config(32, 32, 2, 2, 2), config(64, 128, 1, 8, 1)];
    let cases = matmul_cases("matmul.half", Arithmetic::F16, &configs, HALF_SUMS);
    let (vulkan, reference) = (Vulkan::new(), cases.reference());
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        if bench.device.adapter().capabilities.float16 {
            cases.check(&bench, &reference);
        } else {
            println!("{driver:?} has no arithmetic in f16");
        }
    }
}

/// On every driver with cooperative matrices of f16: no CPU driver of Debian 12 has them, lavapipe 26 has 8 × 8 × 8.
#[test]
fn matmul_multiplies_on_matrix_units() {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        let Some(units) = MatrixUnits::of(&bench.device.adapter().capabilities) else {
            println!("{driver:?} has no matrices of f16");
            continue;
        };
        let config = |tokens, features, words, each, splits| MatmulConfig {
            tokens: tokens * units.m,
            features: features * units.n,
            words,
            each,
            splits,
        };
        let configs = [config(4, 8, 2, 4, 1), config(2, 4, 2, 2, 3), config(8, 8, 4, 4, 2), config(1, 2, 1, 2, 1)];
        let cases = matmul_cases("matmul.matrix", Arithmetic::Matrices(units), &configs, HALF_SUMS);
        cases.check(&bench, &cases.reference());
    }
}

/// Goal: rows of x of any size are multiplied in f16 without overflow, and rows of zeros stay zero.
#[test]
fn rows_are_scaled_to_fit_f16() {
    let mut cases = Cases::new("scaled");
    let mut random = Random(8);
    let (n, k, rows) = (34, 72, 9u32);
    let sizes = [0.0, 1.0, 1e-30, 1e30, 65504.0, 3e-5, 1e-10, 1e10, 300.0f32];
    cases.case("sizes".to_owned());
    let w: Vec<f32> = (0..n * k).map(|_| round(Format::F16, random.float() * 0.1)).collect();
    let x: Vec<f32> =
        (0..rows).flat_map(|row| random.floats(k as usize).into_iter().map(move |v| v * sizes[row as usize])).collect();
    let product = Product {
        label: "scaled".to_owned(),
        weight: Matrix { range: cases.weights("weight", Format::F16, &w), format: Format::F16, rows: n, cols: k },
        x: Activations { range: cases.floats("x", &x), stride: k },
        norm: None,
        bias: None,
        epilogue: Epilogue::Store,
        y: Activations { range: cases.output("y", (rows * 40) as usize, Expect::Any), stride: 40 },
    };
    let config = MatmulConfig { tokens: 16, features: 32, words: 1, each: 4, splits: 2 };
    record_many(&mut cases, &product, MatmulRows::All(rows), Arithmetic::F16, config);
    let reference = cases.reference();
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        if !bench.device.adapter().capabilities.float16 {
            continue;
        }
        let found = bench.run(&cases.recording, &cases.before());
        for row in 0..rows {
            for i in 0..n {
                let exact: f64 =
                    (0..k).map(|c| f64::from(w[(i * k + c) as usize]) * f64::from(x[(row * k + c) as usize])).sum();
                for memory in [&reference, &found] {
                    let value = f64::from(memory.f32(product.y.range, row * 40 + i));
                    let size = f64::from(sizes[row as usize]);
                    assert!(
                        (value - exact).abs() <= 4e-3 * size,
                        "{driver:?} row {row} of size {size:e}: {value:e}, {exact:e}"
                    );
                }
            }
        }
    }
}

/// Goal: every bit of a weight is used. Method: a product with a unit vector returns a column of W.
#[test]
fn unit_vectors_read_weights_back_exactly() {
    let mut cases = Cases::new("unit");
    let (n, k) = (64u32, 16u32);
    let mut outputs = Vec::new();
    for format in FORMATS {
        cases.case(format!("{format:?}"));
        // Normal numbers of every exponent that the format and the sum can represent.
        let (low, high) = if format == Format::F16 { (-14, 15) } else { (-100, 100) };
        let mut random = Random(6);
        let w: Vec<f32> = (0..n * k)
            .map(|i| {
                let exponent = low + (i as i32) % (high - low + 1);
                let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
                round(format, sign * (1.0 + random.float().abs() * 0.999) * 2f32.powi(exponent))
                    .clamp(-65504.0 * 2f32.powi(high), 65504.0 * 2f32.powi(high))
            })
            .collect();
        let weight = cases.weights("weight", format, &w);
        let unit: Vec<f32> = (0..k * k).map(|i| if i % k == i / k { 1.0 } else { 0.0 }).collect();
        let x = cases.floats("x", &unit);
        let chunk = cases.words("chunk", &[0, 0, k, 0]);
        for many in [false, true] {
            let y = cases.output(if many { "y.matmul" } else { "y.gemv" }, (n * k) as usize, Expect::Exact);
            let product = Product {
                label: "unit".to_owned(),
                weight: Matrix { range: weight, format, rows: n, cols: k },
                x: Activations { range: x, stride: k },
                norm: None,
                bias: None,
                epilogue: Epilogue::Store,
                y: Activations { range: y, stride: n },
            };
            if many {
                let config = MatmulConfig { tokens: 16, features: 32, words: 1, each: 4, splits: 1 };
                cases.case(format!("{format:?}.many"));
                record_many(&mut cases, &product, MatmulRows::Counted(k, chunk), Arithmetic::F32, config);
            } else {
                cases.recording.call(product.gemv(k, GemvConfig { threads: 32, weight_rows: 2, batch: 2 }));
            }
            outputs.push((y, w.clone()));
        }
    }
    let reference = cases.reference();
    for (y, w) in outputs {
        let found = floats(&reference, y);
        for row in 0..n as usize {
            for col in 0..k as usize {
                assert_eq!(found[col * n as usize + row], w[row * k as usize + col]);
            }
        }
    }
    check(&cases, &reference);
}

// ---------------------------------------------------------------- skinny

/// Tolerance of `skinny`, which splits x into two parts of 8 bits. The error is at most 2^-15 of each of up to 1,024
/// terms of W · x, which all become smaller; with independent errors it would be 1e-5 of these sums. A missing or
/// doubled term changes a sum by more than 1e-3. A tag adds half a step of 2^-16 on each side. With weights in f16, x has
/// 22 bits, and the tolerance without tags is [`SUMS`].
const CUT: f32 = 2e-4;
/// Tags for operands. They differ from the tag of every other operand and from that of poison.
const TAGS: [u32; 3] = [3, 127, 64];

impl Logical {
    /// Like `product`, with W in fragment order and tagged operands. Everything after the readable values is poison.
    fn fragments(&self, cases: &mut Cases, flow: Flow) -> Product {
        let word = |tag: Option<u32>| move |v: f32| tag.map_or(v.to_bits(), |tag| tagged(v, tag));
        let words = |values: Vec<f32>, tag: Option<u32>| values.into_iter().map(word(tag)).collect::<Vec<u32>>();
        let (k_stride, y_stride) = (decoder::stride(self.k), decoder::stride(self.outputs()) + 32);
        let weight = cases.words("weight", &fragments(self.format, &self.w, self.n, self.k));
        let x = strided(&self.x, self.k, k_stride, if self.norm { 0.0 } else { 1.0e3 });
        let x = cases.words("x", &words(x, flow.input_carried.then_some(flow.input)));
        let norm = self.norm.then(|| {
            let mut norm = self.norm_weight.clone();
            norm.resize(k_stride as usize, 0.0);
            norm.resize(norm.len() + 64, f32::from_bits(POISON));
            (cases.floats("norm", &norm), EPSILON)
        });
        let bias = self.bias.then(|| cases.floats("bias", &self.bias_values));
        let old = flow.output.map(|_| flow.old);
        let y = if self.epilogue == Epilogue::Residual {
            let mut y = words(strided(&self.old, self.n, y_stride, 0.0), old);
            for row in y.chunks_exact_mut(y_stride as usize) {
                row[self.n as usize..].fill(POISON);
            }
            cases.words("y", &y)
        } else {
            cases.output("y", (self.rows * y_stride) as usize, Expect::Exact)
        };
        let tagged = flow.output.is_some() || flow.input_carried;
        let near = if self.format == Format::F16 && !tagged { SUMS } else { CUT };
        cases.expect(y, if flow.output.is_some() { Expect::Tagged(near) } else { Expect::Floats(near) });
        Product {
            label: "product".to_owned(),
            weight: Matrix { range: weight, format: self.format, rows: self.n, cols: self.k },
            x: Activations { range: x, stride: k_stride },
            norm,
            bias,
            epilogue: self.epilogue,
            y: Activations { range: y, stride: y_stride },
        }
    }
}

type Skinny = (u32, (u32, u32), (bool, bool), Epilogue, [u32; 3]);

/// `largest` is the largest value of x, in its first row; those of the other rows are 1. Products without a norm are as large,
/// and so are their errors.
fn skinny_cases(name: &str, (format, largest): (Format, f32), list: &[Skinny], flow: impl Fn(usize) -> Flow) {
    let mut cases = Cases::new(&format!("{name}.{format:?}.{largest:e}"));
    let mut random = Random(41);
    let mut made = Vec::new();
    for (index, &(rows, shape, (norm, bias), epilogue, [threads, tiles, ahead])) in list.iter().enumerate() {
        let (config, flow) = (SkinnyConfig { threads, tiles, ahead }, flow(index));
        assert!(config.shared_bytes(rows, Matrices::Emulated) <= 32 << 10, "{config:?} of {rows} rows");
        cases.case(format!("{index}.{shape:?}x{rows}.norm={norm}.bias={bias}.{epilogue:?}.{config:?}"));
        let mut logical = Logical::new(&mut random, format, shape, (rows, rows), norm, bias, epilogue);
        logical.x[..shape.1 as usize].iter_mut().for_each(|x| *x *= largest);
        let product = logical.fragments(&mut cases, flow);
        if largest != 1.0 && !norm {
            // Values below 2^-18 have fewer bits.
            let size = if largest < 1.0 { largest * 100.0 } else { largest };
            cases.expect(product.y.range, Expect::Floats(SUMS * size));
        }
        let fault = cases.words("fault", &[0, 0]);
        cases.recording.call(skinny(&product, rows, Matrices::Emulated, config, flow, fault));
        made.push((logical, product, flow));
    }
    let reference = cases.reference();
    for (logical, product, flow) in made {
        let what = &cases.recording.decl(product.y.range.buffer).name;
        // The formula uses untagged inputs.
        if !flow.input_carried {
            logical.check_reference(&reference, product.y, what);
        }
        for row in 0..logical.rows {
            let words = (0..logical.outputs()).map(|i| reference.u32(product.y.range, row * product.y.stride + i));
            if let Some(tag) = flow.output {
                assert!(words.into_iter().all(|word| word % (1 << TAG_BITS) == tag), "row {row} of {what}");
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn skinny_multiplies_a_few_rows_by_fragments() {
    use Epilogue::{Residual, Store};
    const GATED: Epilogue = Epilogue::Gated(Glu::Silu);
    let list: [Skinny; 14] = [
        (1, (16, 8), (false, false), Store, [32, 1, 1]),
        (1, (146, 40), (true, true), GATED, [64, 2, 2]),
        (1, (70, 1024), (true, false), Store, [256, 1, 4]),
        (1, (3, 33), (false, true), Residual, [32, 1, 3]),
        (1, (131, 200), (false, false), Store, [64, 3, 2]),
        (2, (50, 145), (true, true), Residual, [128, 1, 2]),
        (3, (34, 200), (false, true), GATED, [64, 2, 1]),
        (5, (145, 72), (true, false), Store, [32, 3, 1]),
        (8, (62, 96), (true, false), GATED, [128, 1, 2]),
        (8, (33, 1024), (false, false), Residual, [256, 1, 2]),
        (9, (18, 200), (true, true), Residual, [64, 1, 2]),
        (12, (37, 72), (false, true), Store, [128, 2, 1]),
        (16, (48, 145), (true, false), GATED, [64, 1, 1]),
        (33, (22, 40), (true, true), Residual, [32, 1, 1]),
    ];
    skinny_cases("skinny", (Format::Bf16, 1.0), &list, |_| Flow::NONE);
    // Each case is a pipeline, which a CPU driver takes a second to compile.
    let every_other: Vec<Skinny> = list.into_iter().step_by(2).collect();
    skinny_cases("skinny", (Format::F16, 1.0), &every_other, |_| Flow::NONE);
}

/// Goal: values of x beyond f16 are multiplied with weights in f16 as well as others are, and in the rows beside them too; and
/// so are values below its normal numbers.
#[test]
fn skinny_multiplies_values_of_any_size_with_weights_in_f16() {
    use Epilogue::{Residual, Store};
    let list: [Skinny; 5] = [
        (1, (70, 1024), (false, false), Store, [256, 1, 4]),
        (1, (131, 200), (true, true), Store, [64, 3, 2]),
        (2, (50, 145), (true, true), Residual, [128, 1, 2]),
        (5, (145, 72), (true, false), Store, [32, 3, 1]),
        (9, (18, 200), (true, true), Residual, [64, 1, 2]),
    ];
    for largest in [3e4, 1e6] {
        skinny_cases("skinny.sizes", (Format::F16, largest), &list, |_| Flow::NONE);
    }
    for largest in [1e30, 1e-7] {
        skinny_cases("skinny.sizes", (Format::F16, largest), &list[..1], |_| Flow::NONE);
    }
}

/// Method: x, and y before a residual addition, carry tags for which the kernel waits. The widths of such a y are
/// multiples of 4, as those of rows padded to 32 are. The output carries a third tag; in the last case it carries none.
#[test]
fn skinny_reads_and_writes_tagged_rows() {
    use Epilogue::{Residual, Store};
    const GATED: Epilogue = Epilogue::Gated(Glu::Silu);
    let list: [Skinny; 7] = [
        (1, (48, 96), (true, true), Store, [64, 1, 2]),
        (1, (36, 1024), (false, false), Residual, [256, 1, 4]),
        (1, (98, 32), (true, false), GATED, [32, 3, 1]),
        (2, (40, 64), (true, false), Residual, [128, 1, 1]),
        (5, (50, 160), (false, true), GATED, [64, 2, 1]),
        (8, (32, 96), (true, false), Store, [32, 1, 2]),
        (3, (19, 64), (true, false), Store, [64, 1, 1]),
    ];
    let last = list.len() - 1;
    let [input, old, output] = TAGS;
    for format in [Format::Bf16, Format::F16] {
        skinny_cases("skinny.tagged", (format, 1.0), &list, |index| Flow {
            input_carried: true,
            input,
            old,
            output: (index != last).then_some(output),
        });
    }
}

// ---------------------------------------------------------------- append, attention

/// Returns the number of tokens behind that of a row in its prompt, if rows see them.
fn later(heads: Heads, row: usize) -> u32 {
    if heads.scores.both { [40, 0, 5, 150][row % 4] } else { 0 }
}

/// Unpacked keys, values and queries of several sequences.
struct Context {
    heads: Heads,
    /// The position of each row; `None` for a row that is not valid. Of sequences with several rows, those of their last ones.
    rows: Vec<Option<u32>>,
    /// The number of rows of each sequence, whose tokens follow each other.
    each: u32,
    max_pages: u32,
    /// The pages of each row's sequence.
    pages: Vec<Vec<u32>>,
    /// Cached keys by row, and within it by token and KV head.
    keys: Vec<Vec<Vec<f32>>>,
    values: Vec<Vec<Vec<f32>>>,
    /// By row: query heads, key heads, value heads, gates.
    qkv: Vec<Vec<f32>>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    rope: Vec<f32>,
    stride: u32,
}

const LONGEST: u32 = 301;

impl Context {
    /// Creates one slot per row. The rows are not in the order of the slots.
    fn new(random: &mut Random, heads: Heads, rows: &[Option<u32>]) -> Context {
        let Heads { q, kv, dim, rot, kv_format, .. } = heads;
        let max_pages = LONGEST.div_ceil(16);
        let ends: Vec<Option<u32>> = rows.iter().enumerate().map(|(row, p)| p.map(|p| p + later(heads, row))).collect();
        let max_pages = max_pages.max(ends.iter().flatten().max().map_or(0, |end| end / 16 + 1));
        let total: u32 = ends.iter().map(|p| p.map_or(0, |p| p / 16 + 1)).sum();
        let mut free = random.permutation(total + 3).into_iter();
        let pages = ends.iter().map(|p| free.by_ref().take(p.map_or(0, |p| p as usize / 16 + 1)).collect()).collect();
        let cached = |random: &mut Random, end: &Option<u32>| {
            let tokens = end.map_or(0, |end| end + 1);
            let head = |random: &mut Random| (0..dim).map(|_| random.float() * 2.0).collect::<Vec<f32>>();
            (0..tokens * kv).map(|_| round_head(kv_format, &head(random))).collect()
        };
        let width = (q + 2 * kv + if heads.gated { q } else { 0 }) * dim;
        Context {
            heads,
            rows: rows.to_vec(),
            each: 1,
            max_pages,
            pages,
            keys: ends.iter().map(|end| cached(random, end)).collect(),
            values: ends.iter().map(|end| cached(random, end)).collect(),
            // The range of the queries makes some tokens weigh much more than others.
            qkv: rows
                .iter()
                .map(|_| (0..width).map(|i| random.float() * if i < q * dim { 3.0 } else { 1.5 }).collect())
                .collect(),
            q_norm: (0..dim).map(|_| 1.0 + random.float()).collect(),
            k_norm: (0..dim).map(|_| 1.0 + random.float()).collect(),
            rope: (0..LONGEST)
                .flat_map(|p| {
                    (0..rot / 2).flat_map(move |j| {
                        [(p as f32 * 0.7 / (1 + j) as f32).cos(), (p as f32 * 0.7 / (1 + j) as f32).sin()]
                    })
                })
                .chain((0..if heads.scores.query_scales.is_some() { LONGEST } else { 0 }).map(query_scale))
                // Without rotated dimensions there is no table; a buffer has at least one value.
                .chain((rot == 0).then_some(f32::NAN))
                .collect(),
            stride: width + 8,
        }
    }

    /// Creates one slot per sequence, with `each` rows, the last of which is at the given position.
    fn of_sequences(random: &mut Random, heads: Heads, ends: &[Option<u32>], each: u32) -> Context {
        let single = Context::new(random, heads, ends);
        let more = (1..each).flat_map(|_| Context::new(random, heads, &vec![None; ends.len()]).qkv);
        let qkv = single.qkv.clone().into_iter().chain(more.collect::<Vec<_>>()).collect();
        Context { each, qkv, ..single }
    }

    /// Returns the slot of a row, which differs from the row's number.
    fn slot(&self, row: usize) -> usize {
        (row + 1) % self.rows.len()
    }

    fn row_words(&self) -> Vec<u32> {
        let words = |(row, back, position): (usize, u32, &Option<u32>)| match position {
            Some(position) => [5, position - back, self.slot(row) as u32, 1 + back + later(self.heads, row)],
            // Of an invalid row only the last word, the valid flag, may matter.
            None => [0, 0, u32::MAX, 0],
        };
        let sequences = self.rows.iter().enumerate();
        let rows = sequences.flat_map(|(row, position)| (0..self.each).rev().map(move |back| (row, back, position)));
        rows.flat_map(words).collect()
    }

    fn page_words(&self) -> Vec<u32> {
        let mut words = vec![POISON; self.rows.len() * self.max_pages as usize];
        for (row, pages) in self.pages.iter().enumerate() {
            let at = self.slot(row) * self.max_pages as usize;
            words[at..at + pages.len()].copy_from_slice(pages);
        }
        words
    }

    /// Returns where the key and value of a token and KV head are: page, token in the page, head.
    fn place(&self, row: usize, token: u32, head: u32) -> (u32, u32, u32) {
        (self.pages[row][token as usize / 16], token % 16, head)
    }

    /// Returns the words of the K and V pages with the first `tokens(position)` tokens of each row; everything else is
    /// poison.
    fn cache(&self, tokens: impl Fn(u32) -> u32) -> (Vec<u32>, Vec<u32>) {
        let pages: u32 = self.pages.iter().map(|p| p.len() as u32).sum::<u32>() + 3;
        let [mut k, mut v] = [true, false].map(|keys| Pages::new(self.heads, keys, pages));
        for (row, position) in self.rows.iter().enumerate() {
            // Tokens before the window may hold anything.
            let first = position.map_or(0, |position| first_visible(self.heads.scores, position + 1 - self.each));
            for token in first..position.map_or(0, |position| tokens(position) + self.seen_later(row)) {
                for head in 0..self.heads.kv {
                    let at = (token * self.heads.kv + head) as usize;
                    let (page, in_page, head) = self.place(row, token, head);
                    k.put(page, in_page, head, &self.keys[row][at]);
                    v.put(page, in_page, head, &self.values[row][at]);
                }
            }
        }
        (k.words, v.words)
    }

    /// Returns the number of later tokens that a row sees.
    fn seen_later(&self, row: usize) -> u32 {
        let position = self.rows[row].unwrap_or(0);
        last_visible(self.heads.scores, position, position + later(self.heads, row)) - position
    }

    fn qkv_words(&self) -> Vec<f32> {
        strided(&self.qkv.concat(), self.stride - 8, self.stride, f32::from_bits(POISON))
    }

    fn head(&self, row: usize, head: u32) -> Vec<f64> {
        let at = (head * self.heads.dim) as usize;
        self.qkv[row][at..at + self.heads.dim as usize].iter().map(|v| f64::from(*v)).collect()
    }

    /// Returns a head of values after its norm.
    fn value(&self, row: usize, head: u32) -> Vec<f64> {
        let values = self.head(row, head);
        let square = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
        let rms = if self.heads.v_norm { (square + f64::from(EPSILON)).sqrt() } else { 1.0 };
        values.into_iter().map(|value| value / rms).collect()
    }

    /// Returns a head after its norm and rotary embedding; with codes, times the Hadamard matrix.
    fn prepared(&self, row: usize, head: u32, norm: &[f32]) -> Vec<f64> {
        let mut values = self.head(row, head);
        let normalize = |values: &mut [f64]| {
            let rms = (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64 + f64::from(EPSILON)).sqrt();
            for (value, weight) in values.iter_mut().zip(norm) {
                *value = *value / rms * f64::from(*weight);
            }
        };
        if self.heads.qk_norm == BEFORE {
            normalize(&mut values);
        }
        let half = self.heads.rot as usize / 2;
        let table = &self.rope[self.rows[row].expect("a valid row") as usize * half * 2..];
        let old = values.clone();
        for j in 0..half {
            let (c, s) = (f64::from(table[2 * j]), f64::from(table[2 * j + 1]));
            values[j] = old[j] * c - old[j + half] * s;
            values[j + half] = old[j + half] * c + old[j] * s;
        }
        if self.heads.qk_norm == AFTER {
            normalize(&mut values);
        }
        if head < self.heads.q && self.heads.scores.query_scales.is_some() {
            let position = self.rows[row].expect("a valid row");
            values.iter_mut().for_each(|value| *value *= f64::from(query_scale(position)));
        }
        spread(self.heads.kv_format, values)
    }

    /// Returns softmax(q · Kᵀ / sqrt(D)) · V of query head `h`. `new` is the key and value of the row's own token, if it is
    /// not in the cache.
    fn attend(&self, row: usize, h: u32, query: &[f64], new: Option<(&[f64], &[f64])>) -> Vec<f64> {
        let kv_head = h / self.heads.group();
        let position = self.rows[row].expect("a valid row");
        let cached = |of: &[Vec<f32>], token: u32| -> Vec<f64> {
            of[(token * self.heads.kv + kv_head) as usize].iter().map(|v| f64::from(*v)).collect()
        };
        let token = |token: u32| match new {
            Some((k, v)) if token == position => (k.to_vec(), v.to_vec()),
            _ => (cached(&self.keys[row], token), cached(&self.values[row], token)),
        };
        let kv: Vec<_> =
            (first_visible(self.heads.scores, position)..=position + self.seen_later(row)).map(token).collect();
        let dot = |k: &[f64]| k.iter().zip(query).map(|(k, q)| k * q).sum::<f64>();
        let scores: Vec<f64> = kv.iter().map(|(k, _)| scored(self.heads.scores, self.heads.dim, dot(k))).collect();
        let sink = if self.heads.scores.sinks { f64::from(sink_of(h)) } else { f64::NEG_INFINITY };
        let top = scores.iter().copied().fold(sink, f64::max);
        let total: f64 = scores.iter().map(|s| (s - top).exp()).sum::<f64>() + (sink - top).exp();
        (0..query.len())
            .map(|i| scores.iter().zip(&kv).map(|(s, (_, v))| (s - top).exp() / total * v[i]).sum())
            .collect()
    }

    /// Returns the output of a query head multiplied by its gate, if the heads are gated.
    fn gated(&self, row: usize, h: u32, output: Vec<f64>) -> Vec<f64> {
        let Heads { q, kv, gated, .. } = self.heads;
        if !gated {
            return output;
        }
        let gates = self.head(row, q + 2 * kv + h);
        output.into_iter().zip(gates).map(|(o, gate)| o / (1.0 + (-gate).exp())).collect()
    }
}

const NO: HeadNorm = HeadNorm::None;
const BEFORE: HeadNorm = HeadNorm::Before;
const AFTER: HeadNorm = HeadNorm::After;

/// Returns head counts and sizes that cover what a model can have: GQA of 1, 3, 7 and 8.
fn all_heads() -> Vec<Heads> {
    let make = |(q, kv, dim, rot, qk_norm, kv_format)| Heads {
        q,
        kv,
        dim,
        rot,
        qk_norm,
        v_norm: dim == 512 || rot < dim,
        gated: dim == 80 || rot < dim,
        scores: Scores::default(),
        kv_format,
    };
    let plain: [Heads; 15] = [
        (1, 1, 8, 8, NO, KvFormat::F32),
        (7, 1, 8, 4, BEFORE, KvFormat::F16),
        (6, 2, 64, 64, BEFORE, KvFormat::F32),
        (7, 1, 64, 32, AFTER, KvFormat::F16),
        (8, 1, 80, 80, AFTER, KvFormat::F16),
        (3, 3, 80, 32, BEFORE, KvFormat::F32),
        (8, 1, 128, 128, BEFORE, KvFormat::F32),
        (6, 2, 128, 64, BEFORE, KvFormat::F16),
        (2, 2, 128, 128, NO, KvFormat::F16),
        (7, 1, 8, 4, BEFORE, KvFormat::Int8),
        (6, 2, 64, 64, BEFORE, KvFormat::Int8),
        (7, 1, 64, 32, AFTER, KvFormat::Int8),
        (3, 3, 80, 32, BEFORE, KvFormat::Int8),
        (5, 1, 96, 96, BEFORE, KvFormat::Int8),
        (6, 2, 128, 64, BEFORE, KvFormat::Int8),
    ]
    .map(make);
    let varied = [
        make((4, 2, 64, 64, NO, KvFormat::F32)),
        make((3, 1, 64, 0, NO, KvFormat::F16)),
        make((2, 1, 512, 512, BEFORE, KvFormat::F32)),
        make((4, 2, 64, 64, NO, KvFormat::Int8)),
        make((3, 1, 64, 0, NO, KvFormat::Int8)),
        make((2, 1, 512, 512, BEFORE, KvFormat::Int8)),
        make((2, 1, 512, 256, BEFORE, KvFormat::F16)),
        make((2, 2, 288, 288, NO, KvFormat::F16)),
    ];
    plain.into_iter().chain(with_scores(&varied)).collect()
}

/// Returns each of the heads with a variant of the scores.
fn with_scores(heads: &[Heads]) -> Vec<Heads> {
    let of = |(at, heads): (usize, &Heads)| {
        let variants = scores::variants();
        let scores = variants[at % variants.len()];
        // The factors of queries follow the rotary table.
        let query_scales = (at % 3 == 0).then_some(LONGEST * heads.rot);
        Heads { scores: Scores { query_scales, ..scores }, ..*heads }
    };
    heads.iter().enumerate().map(of).collect()
}

const POSITIONS: [u32; 10] = [0, 1, 15, 16, 17, 31, 32, 127, 128, 300];

/// Returns all positions and one invalid row between them.
fn all_rows() -> Vec<Option<u32>> {
    let mut rows: Vec<Option<u32>> = POSITIONS.into_iter().map(Some).collect();
    rows.insert(4, None);
    rows
}

/// The precision of values that are only rounded.
fn stored_values(heads: Heads) -> Expect {
    let exact = heads.kv_format == KvFormat::F32 && !heads.v_norm;
    if exact { Expect::Exact } else { stored(heads, SUMS) }
}

#[test]
fn append_normalises_rotates_and_fills_pages() {
    let mut cases = Cases::new("append");
    let mut random = Random(7);
    let mut made = Vec::new();
    for heads in all_heads() {
        let context = Context::new(&mut random, heads, &all_rows());
        cases.case(format!("{heads:?}"));
        let (k, v) = context.cache(|position| position);
        let args = AppendArgs {
            qkv: cases.floats("qkv", &context.qkv_words()),
            rows: cases.words("rows", &context.row_words()),
            q_norm: cases.floats("q_norm", &context.q_norm),
            k_norm: cases.floats("k_norm", &context.k_norm),
            rope: cases.floats("rope", &context.rope),
            pages: cases.words("pages", &context.page_words()),
            k: cases.words("k", &k),
            v: cases.words("v", &v),
            stride: context.stride,
            max_pages: context.max_pages,
            epsilon: EPSILON,
        };
        cases.expect(args.qkv, Expect::Floats(SUMS));
        cases.expect(args.k, stored(heads, SUMS));
        cases.expect(args.v, stored_values(heads));
        cases.recording.call(attention::append("append".to_owned(), heads, context.rows.len() as u32, true, args));
        made.push((context, args));
    }
    let reference = cases.reference();
    for (context, args) in made {
        let Heads { q, kv, dim, kv_format, .. } = context.heads;
        let what = &cases.recording.decl(args.qkv.buffer).name;
        for (row, position) in context.rows.iter().enumerate() {
            let Some(position) = *position else { continue };
            for h in 0..q {
                let wanted = context.prepared(row, h, &context.q_norm);
                for i in 0..dim {
                    near(reference.f32(args.qkv, row as u32 * context.stride + h * dim + i), wanted[i as usize], what);
                }
            }
            for h in 0..kv {
                let (key, value) = (context.prepared(row, q + h, &context.k_norm), context.value(row, q + kv + h));
                let at = context.place(row, position, h);
                for (keys, range, wanted) in [(true, args.k, key), (false, args.v, value)] {
                    let found = head_at(&reference, range, context.heads, keys, at);
                    let top = wanted.iter().fold(0.0, |top: f64, value| top.max(value.abs()));
                    for (found, wanted) in found.into_iter().zip(wanted) {
                        let limit = match kv_format {
                            // Half a unit in the last place of f16 is 2^-11 of the value.
                            KvFormat::F16 => 5e-4 * (wanted.abs() + 0.01),
                            KvFormat::F32 => 5e-6 * (1.0 + wanted.abs()),
                            // Half a code.
                            KvFormat::Int8 => 0.501 * top / 127.0,
                        };
                        assert!((found - wanted).abs() <= limit, "{what}: {found} instead of {wanted}");
                    }
                }
            }
        }
    }
    check(&cases, &reference);
}

impl Context {
    /// Adds the operands of the attention of all rows, with up to `splits` splits, and returns its arguments, but for the output,
    /// whose rows are 8 floats apart. `fused`: whether the kernel prepares and appends the rows. `put` gives the words of qkv.
    fn args(&self, cases: &mut Cases, fused: bool, splits: u32, put: impl Fn(f32) -> u32) -> AttentionArgs {
        let (heads, count) = (self.heads, self.qkv.len() as u32);
        let (k, v) = self.cache(|position| position + 1 - if fused { self.each } else { 0 });
        let q_norm = cases.floats("q_norm", &self.q_norm);
        let k_norm = cases.floats("k_norm", &self.k_norm);
        let rope = cases.floats("rope", &self.rope);
        let rows = cases.words("rows", &self.row_words());
        AttentionArgs {
            qkv: cases.words("qkv", &self.qkv_words().into_iter().map(put).collect::<Vec<u32>>()),
            rows,
            q_norm: if fused { q_norm } else { q_norm.none() },
            k_norm: if fused { k_norm } else { k_norm.none() },
            rope: if fused { rope } else { rope.none() },
            pages: cases.words("pages", &self.page_words()),
            k: cases.words("k", &k),
            v: cases.words("v", &v),
            partials: cases.output("partials", heads.partial_floats(splits) as usize * count as usize, Expect::Any),
            counters: cases.words("counters", &vec![0; (heads.q * count) as usize]),
            o: rows.none(),
            fault: cases.words("fault", &[0, 0]),
            sinks: cases.floats("sinks", &(0..heads.q).map(sink_of).collect::<Vec<f32>>()),
            stride: self.stride,
            output_stride: heads.q * heads.dim + 8,
            max_pages: self.max_pages,
            epsilon: EPSILON,
            qkv_tag: 0,
            o_tag: 0,
        }
    }
}

/// Returns heads that `flash_decode` supports: groups that leave lanes idle, and head sizes that the lanes do not
/// divide evenly.
fn flash_heads(kv_format: KvFormat) -> Vec<Heads> {
    let make = |(q, kv, dim, rot, qk_norm)| Heads {
        q,
        kv,
        dim,
        rot,
        qk_norm,
        v_norm: rot < dim || q == 3,
        gated: rot < dim,
        scores: Scores::default(),
        kv_format,
    };
    let plain = [
        (7, 1, 64, 32, AFTER),
        (6, 2, 128, 64, BEFORE),
        (3, 1, 32, 32, BEFORE),
        (8, 1, 32, 16, AFTER),
        (5, 1, 96, 96, BEFORE),
        // Two workgroups share the query heads of a KV head.
        (24, 2, 32, 32, BEFORE),
    ];
    let varied = [(4, 2, 64, 64, NO), (3, 1, 32, 32, BEFORE), (2, 2, 96, 0, NO)].map(make);
    plain.map(make).into_iter().chain(with_scores(&varied)).collect()
}

/// Returns the size of a workgroup of `flash_decode`: another one for each case, within the shared memory of every device.
fn flash_threads(heads: Heads, case: usize, new_tokens: u32, matrices: Matrices) -> u32 {
    let mut threads = [32, 64, 128, 256][case % 4];
    while threads > 32 && flash_decode::shared_bytes(heads, threads, new_tokens, matrices) > 32 << 10 {
        threads /= 2;
    }
    threads
}

/// How `flash_decode` splits its rows and writes its output.
#[derive(Clone, Copy, PartialEq)]
enum Batch {
    /// Split evenly; writes rows of floats.
    Even,
    /// Split by a plan; writes rows of floats.
    Planned,
    /// Split by a plan; the output is packed for the next product, in this order.
    Packed(PackedOrder),
}

/// Returns the precision of a decode step's output. Unrounded keys differ only by the error of sums. A new key that is
/// rounded to the other neighbor changes its score by up to 2^-11 of its terms in f16, and by up to a code of one
/// dimension otherwise.
fn fused_limit(kv_format: KvFormat) -> f32 {
    match kv_format {
        KvFormat::F32 => SUMS,
        KvFormat::F16 => 1e-3,
        KvFormat::Int8 => 6e-3,
    }
}

/// Method, in addition to that of the file: each case runs twice in a row with the same counters, which must be zero
/// again after each run. The numbers of splits cover a single workgroup, several of which the last to arrive combines
/// the results, and splits without work.
fn attention_cases(fused: bool, flash: Option<(Matrices, Batch, KvFormat)>, tags: bool) {
    let mut cases = Cases::new(if flash.is_some() {
        "flash_decode"
    } else if fused {
        "attention.fused"
    } else {
        "attention"
    });
    let mut random = Random(if fused { 8 } else { 9 });
    let mut made = Vec::new();
    let all = match flash {
        Some((_, _, kv_format)) => flash_heads(kv_format),
        None => all_heads(),
    };
    // Rows without a sequence write zeros, and all words carry their tag. Some of the shapes are enough to show that.
    // The same holds for plans, because the other cases cover the computation of a unit, and for `attention` without
    // FUSED. Each shape is a pipeline, which a CPU driver takes seconds to compile.
    let planned = flash.is_some_and(|(_, batch, _)| batch != Batch::Even);
    let every = match (flash.is_some(), fused, tags || planned) {
        _ if every_case() => 1,
        (true, _, false) | (false, true, false) => 1,
        _ => 3,
    };
    let both = |(scores, kv_format)| Heads {
        q: 6,
        kv: 2,
        dim: 64,
        rot: 64,
        qk_norm: BEFORE,
        v_norm: false,
        gated: false,
        scores,
        kv_format,
    };
    let formats = [KvFormat::F32, KvFormat::F16, KvFormat::Int8];
    let both = scores::variants_of_both_sides().into_iter().zip(formats).map(both).filter(|_| !fused);
    let all = all.into_iter().step_by(every).chain(both);
    let flow = match tags {
        true => Flow { input_carried: true, input: TAGS[0], old: 0, output: Some(TAGS[2]) },
        false => Flow::NONE,
    };
    let order = match flash {
        Some((_, Batch::Packed(order), _)) => Some(order),
        _ => None,
    };
    let put = |v: f32| if tags { tagged(v, flow.input) } else { v.to_bits() };
    for (index, heads) in all.enumerate() {
        let rows = all_rows();
        let count = rows.len() as u32;
        let context = Context::new(&mut random, heads, &rows);
        let least = (heads.dim / 2).next_power_of_two().max(32);
        let threads = if index % 2 == 0 { least } else { least.max(64) };
        let mut last = None;
        for splits in [1, 3, 16] {
            cases.case(format!("{heads:?}.splits={splits}.threads={threads}"));
            let limit = if fused { fused_limit(heads.kv_format) } else { SUMS };
            let near_words = |limit| if tags { Expect::Tagged(limit + 2e-5) } else { Expect::Floats(limit) };
            let packs = order.is_some();
            let width = heads.q * heads.dim;
            // Rows of whole blocks of 64 columns can be swizzled.
            if order == Some(PackedOrder::Swizzled) && !width.is_multiple_of(64) {
                continue;
            }
            let outputs = ["o", "o.again"].map(|name| match packs {
                // A value may be rounded to the other neighbor.
                true => {
                    cases.output(name, Packed::bytes(count, width) as usize / 4, Expect::Bfloats(2f32.powi(-7) + limit))
                }
                false => cases.output(name, (count * (width + 8)) as usize, near_words(limit)),
            });
            let mut args = context.args(&mut cases, fused, splits, put);
            args.output_stride = order.map_or(args.output_stride, |order| order.stride(count, width));
            cases.expect(args.k, stored(heads, SUMS));
            cases.expect(args.v, stored_values(heads));
            for (turn, o) in outputs.into_iter().enumerate() {
                args.o = o;
                let label = "attention".to_owned();
                let call = match flash {
                    Some((matrices, Batch::Even, _)) => {
                        let threads = flash_threads(heads, index, 1, matrices);
                        let split = Split::Evenly { rows: count, splits };
                        let shape = FlashDecodeShape { split, threads, new_tokens: 1, packed: None, matrices };
                        flash_decode(label, heads, shape, flow, args)
                    }
                    Some((matrices, ..)) => {
                        let threads = flash_threads(heads, index, 1, matrices);
                        // As many units as there is room for partial results.
                        let spread = Spread {
                            units: (splits - 1) * count,
                            least: 1 + index as u32 % 2,
                            combiners: index as u32 % 3,
                            by: match index % 2 {
                                0 => SpreadBy::Shares,
                                _ => SpreadBy::Turns { turn: 1 + 5 * splits, groups: 1 + index as u32 % 3 },
                            },
                        };
                        let work =
                            cases.output(&format!("work.{turn}"), spread.bytes(count) as usize / 4, Expect::Exact);
                        let window = heads.scores.window;
                        let plan = plan_splits("plan".to_owned(), count, spread, window, args.rows, work);
                        cases.recording.call(plan);
                        // Combining workgroups wait, which needs tags and a GPU: here the plan has them, and the call does not.
                        let split = Split::Planned { rows: count, spread: Spread { combiners: 0, ..spread } };
                        let args = AttentionArgs { rows: work, ..args };
                        let shape = FlashDecodeShape { split, threads, new_tokens: 1, packed: order, matrices };
                        flash_decode(label, heads, shape, flow, args)
                    }
                    None => {
                        // With three splits, several workgroups share the query heads of a KV head.
                        let group = heads.group();
                        let parts = (2..=group).find(|parts| splits == 3 && group.is_multiple_of(*parts)).unwrap_or(1);
                        let shape = AttentionShape { rows: count, splits, threads, parts, fused };
                        attention::attention(label, heads, shape, flow, args)
                    }
                };
                cases.recording.call(call);
            }
            last = Some((args, outputs));
        }
        // The formula is checked for one number of splits only, because the reference does not depend on it.
        let Some((args, outputs)) = last else { continue };
        made.push((context, args, outputs));
    }
    let reference = cases.reference();
    for (context, args, outputs) in made {
        let Heads { q, kv, dim, kv_format, .. } = context.heads;
        let what = &cases.recording.decl(args.o.buffer).name;
        for row in 0..context.rows.len() {
            if context.rows[row].is_none() {
                if order.is_some() {
                    continue;
                }
                let words = (0..q * dim).map(|i| reference.u32(args.o, row as u32 * args.output_stride + i));
                let wanted = if tags { TAGS[2] } else { POISON };
                assert!(words.into_iter().all(|word| word == wanted), "{what}, row {row} without a sequence");
                continue;
            }
            for h in 0..q {
                let kv_head = h / (q / kv);
                let round_all = |values: Vec<f64>| -> Vec<f64> {
                    let values: Vec<f32> = values.into_iter().map(|v| v as f32).collect();
                    round_head(kv_format, &values).into_iter().map(f64::from).collect()
                };
                let new = fused.then(|| {
                    (
                        round_all(context.prepared(row, q + kv_head, &context.k_norm)),
                        round_all(context.value(row, q + kv + kv_head)),
                    )
                });
                let query = if fused { context.prepared(row, h, &context.q_norm) } else { context.head(row, h) };
                let wanted = context.attend(row, h, &query, new.as_ref().map(|(k, v)| (&k[..], &v[..])));
                let wanted = context.gated(row, h, wanted);
                for i in 0..dim {
                    for o in outputs {
                        let (r, column) = (row as u32, h * dim + i);
                        let found = match order {
                            Some(order) => {
                                reference.weight(Format::Bf16, o, order.index(r, column, args.output_stride) as u32)
                            }
                            None => reference.f32(o, row as u32 * args.output_stride + h * dim + i),
                        };
                        let limit =
                            if fused && kv_format != KvFormat::F32 { fused_limit(kv_format).into() } else { 5e-6 };
                        let limit =
                            if order.is_some() { limit + wanted[i as usize].abs() * 2f64.powi(-8) } else { limit };
                        // Tags change the values that are read and written by up to 2^-17 of themselves.
                        let limit = if tags { limit + 1e-3 } else { limit };
                        let difference = (f64::from(found) - wanted[i as usize]).abs();
                        assert!(
                            difference <= limit,
                            "{what}, row {row}, head {h}: {found} instead of {}",
                            wanted[i as usize]
                        );
                    }
                }
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn attention_of_a_decode_step_normalises_rotates_appends_and_attends() {
    attention_cases(true, None, false);
}

#[test]
fn attention_of_a_chunk_attends() {
    attention_cases(false, None, false);
}

#[test]
fn flash_decode_means_what_attention_of_a_decode_step_does() {
    for matrices in ways() {
        attention_cases(true, Some((*matrices, Batch::Even, KvFormat::F16)), false);
    }
}

#[test]
fn attention_of_a_decode_step_reads_and_writes_tagged_rows() {
    attention_cases(true, None, true);
}

#[test]
fn flash_decode_reads_and_writes_tagged_rows() {
    for matrices in ways() {
        attention_cases(true, Some((*matrices, Batch::Even, KvFormat::F16)), true);
    }
}

/// Goal: a step without barriers has the same bits as the same step with barriers, where the last workgroup to arrive combines
/// the splits instead of one that waits for the others: the test at start compares both. Method: up to 16 splits, more than are
/// combined at a time, and heads whose output takes further workgroups to combine. CPU drivers, on which no workgroup waits in
/// operation, run workgroups in order too. Combining workgroups need matrix units.
#[test]
fn flash_decode_has_the_same_bits_with_and_without_waiting() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::first());
    let flow = Flow { input_carried: true, input: TAGS[0], old: 0, output: Some(TAGS[2]) };
    let mut random = Random(10);
    for matrices in ways() {
        let gpu = *matrices == Matrices::Cooperative;
        let shapes = [(6, 2, 128, 32), (8, 1, 32, 64), (8, 1, 256, 96)];
        for (case, (q, kv, dim, threads)) in (0u32..).zip(shapes).filter(|(_, shape)| gpu || shape.2 < 256) {
            let scores = Scores::default();
            let of = |kv_format| Heads {
                q,
                kv,
                dim,
                rot: dim,
                qk_norm: BEFORE,
                v_norm: false,
                gated: false,
                scores,
                kv_format,
            };
            for kv_format in [KvFormat::F16, KvFormat::Int8] {
                let heads = of(kv_format);
                // Rows of sequences of their own, or of two, three and four new tokens.
                let new_tokens = if kv_format == KvFormat::F16 { 1 } else { 2 + case };
                let ends: Vec<_> =
                    all_rows().into_iter().map(|end| end.map(|p| (p + new_tokens - 1).min(LONGEST - 1))).collect();
                let (context, splits) = (Context::of_sequences(&mut random, heads, &ends, new_tokens), 16);
                let rows = ends.len() as u32 * new_tokens;
                let mut cases = Cases::new("flash_decode.waits");
                cases.case(format!("{heads:?}"));
                let mut args = context.args(&mut cases, true, splits, |v| tagged(v, flow.input));
                args.o = cases.output("o", (rows * args.output_stride) as usize, Expect::Any);
                let split = Split::Evenly { rows, splits };
                let shape = FlashDecodeShape { split, threads, new_tokens, packed: None, matrices: *matrices };
                let mut call = flash_decode("attention".to_owned(), heads, shape, flow, args);
                let names = ostinato::kernels::shaders::find(call.kernel).constants;
                for (value, (_, name)) in call.constants.iter_mut().zip(names) {
                    if *name == "waits" {
                        *value = 1;
                    }
                }
                cases.recording.call(call);
                let before = cases.before();
                let output = |recording| bench.run(recording, &before).buffers[args.o.buffer.0 as usize].clone();
                let (waiting, counting) = (output(&cases.recording), output(&cases.recording.with_barriers()));
                let differ = waiting.iter().zip(&counting).filter(|(a, b)| a != b).count();
                assert_eq!(differ, 0, "{heads:?} {matrices:?}: words of {}", waiting.len());
            }
        }
    }
}

#[test]
fn flash_decode_shares_its_workgroups_out_by_a_plan() {
    for matrices in ways() {
        attention_cases(true, Some((*matrices, Batch::Planned, KvFormat::F16)), false);
        attention_cases(true, Some((*matrices, Batch::Planned, KvFormat::F16)), true);
    }
}

/// Goal: rows with the next tokens of one sequence mean the same as one step for each. Method: the reference takes the rows in
/// turn, so that a row reads the keys and values that those before it have appended; the pages hold poison there. Sequences begin
/// at, before and behind borders of pages and windows.
#[test]
fn flash_decode_attends_to_the_new_tokens_of_a_sequence_in_the_rows_before() {
    let flow = Flow { input_carried: true, input: TAGS[0], old: 0, output: Some(TAGS[2]) };
    let mut random = Random(11);
    for matrices in ways() {
        for kv_format in [KvFormat::F16, KvFormat::Int8] {
            let mut cases = Cases::new("flash_decode.new_tokens");
            let all = flash_heads(kv_format);
            let every = if every_case() { 1 } else { 2 };
            for (index, heads) in
                all.into_iter().enumerate().skip(usize::from(kv_format == KvFormat::Int8)).step_by(every)
            {
                let each = 2 + index as u32 % 3;
                let mut ends: Vec<Option<u32>> =
                    POSITIONS.into_iter().map(|p| Some((p + each - 1).min(LONGEST - 1))).collect();
                ends.insert(3, None);
                let context = Context::of_sequences(&mut random, heads, &ends, each);
                let count = ends.len() as u32 * each;
                cases.case(format!("{heads:?}.each={each}"));
                let limit = fused_limit(kv_format) + 2e-5;
                let (splits, put) = (1 + 2 * (index as u32 % 3), |v: f32| tagged(v, flow.input));
                let threads = flash_threads(heads, index, each, *matrices);
                let mut args = context.args(&mut cases, true, splits, put);
                cases.expect(args.k, stored(heads, SUMS));
                cases.expect(args.v, stored_values(heads));
                args.o = cases.output("o", (count * args.output_stride) as usize, Expect::Tagged(limit));
                let by = SpreadBy::Turns { turn: 2 * count, groups: 1 };
                let spread = Spread { units: (splits - 1) * count, least: 1, by, combiners: 0 };
                let split = match index / 2 % 2 {
                    0 => Split::Evenly { rows: count, splits },
                    _ => Split::Planned { rows: count, spread },
                };
                if let Split::Planned { .. } = split {
                    let work = cases.output("work", spread.bytes(count) as usize / 4, Expect::Exact);
                    let window = heads.scores.window;
                    cases.recording.call(plan_splits("plan".to_owned(), count, spread, window, args.rows, work));
                    args.rows = work;
                }
                let shape = FlashDecodeShape { split, threads, new_tokens: each, packed: None, matrices: *matrices };
                cases.recording.call(flash_decode("attention".to_owned(), heads, shape, flow, args));
            }
            let reference = cases.reference();
            check(&cases, &reference);
        }
    }
}

#[test]
fn flash_decode_packs_its_output_for_the_next_product() {
    for matrices in ways() {
        for order in [PackedOrder::Fragments, PackedOrder::Swizzled] {
            attention_cases(true, Some((*matrices, Batch::Packed(order), KvFormat::F16)), false);
        }
    }
}

#[test]
fn flash_decode_reads_and_writes_codes() {
    for matrices in ways() {
        attention_cases(true, Some((*matrices, Batch::Even, KvFormat::Int8)), false);
    }
}

#[test]
fn flash_decode_with_codes_reads_and_writes_tagged_rows_and_follows_a_plan() {
    for matrices in ways() {
        attention_cases(true, Some((*matrices, Batch::Even, KvFormat::Int8)), true);
        attention_cases(true, Some((*matrices, Batch::Planned, KvFormat::Int8)), true);
        attention_cases(true, Some((*matrices, Batch::Packed(PackedOrder::Fragments), KvFormat::Int8)), false);
    }
}

//! Goal: `flash`, `flash_f32` and `flash_matrix` match their `reference()`, with plain multiplication on both CPU drivers and also on
//! matrix units on a device that has them (a GPU; lavapipe 26 for `flash_matrix`); `flash_wgmma` does on a simulated processor
//! (`ptx`) and on a GPU of compute capability 9.0; and the reference matches the formula.
//! Method: chunks of awkward lengths after prefixes of
//! awkward lengths, with scattered pages. Tokens that no chunk has written, rows that are not in use and everything
//! else that a kernel must not read hold NaN; words that it must not write must stay unchanged. On a GPU also whole
//! chunks with the heads of a large model, compared with the formula on sampled rows.
//!
//! Tolerances: q and the softmax weights are rounded to f16, by at most e = 2^-11 of each value. A score changes by at
//! most e · Σ|q·k| / sqrt(D), which for these inputs (uniform up to 3 and 2) is about e · 1.5 · sqrt(D), 8e-3 for 128
//! dimensions. The output changes by at most twice that times the largest value, 2, plus e times the largest value for
//! the weights: 4e-2 if all roundings had the same sign. They are independent: their root mean square is 2e-4 of each
//! value, the error of a score is 4e-4, and that of an output is smaller, because it is an average of errors. The limit
//! of 3e-3 is more than seven times that. A token that is missed or seen too early changes the outputs of rows in which
//! it has a large weight, as one of every few dozen tokens does, by 1e-2 and more. `flash_f32` rounds nothing to f16: sums of up
//! to a few hundred terms in f32 differ by less than 5e-5.

use crate::assembler::Assembler;
use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, descriptor, every_case};
use crate::pages::{Pages, round_head};
use crate::ptx;
use crate::scores::{first_visible, last_visible, scored, sink_of, variants, variants_of_both_sides};
use ostinato::config::KvFormat;
use ostinato::device::{Component, MatrixShape};
use ostinato::kernels::attention::flash::{
    FlashF32Shape, FlashShape, FlashWay, SHARING_PROMPTS, counters_bytes, flash, partials_bytes, parts,
};
use ostinato::kernels::attention::{HeadNorm, Heads, Scores};
use ostinato::kernels::embed::{ChunkLayout, PromptRows};
use ostinato::kernels::gemm::matmul::MatrixUnits;
use ostinato::kernels::gemm::skinny::Matrices;
use ostinato::kernels::gemm::tiled::Packed;
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::programs;
use ostinato::kernels::recording::{Op, Range};
use ostinato::kernels::shaders::FlashArgs;

/// Tolerance, explained at the top of the file.
const ROUNDED: f32 = 3e-3;
const IN_F32: f32 = 5e-5;
const SLOTS: u32 = 6;
const SLOT: u32 = 1;

fn heads(group: u32, kv: u32, dim: u32) -> Heads {
    Heads {
        q: group * kv,
        kv,
        dim,
        rot: dim,
        qk_norm: HeadNorm::None,
        v_norm: false,
        gated: group.is_multiple_of(2),
        scores: Scores::default(),
        kv_format: KvFormat::F16,
    }
}

/// Returns the ways to multiply that a device supports. The matrices of `flash_matrix` are the device's; the other fields of
/// its shape, and the shape of `flash_f32`, are not used.
fn ways(bench: &Bench) -> Vec<FlashWay> {
    let capabilities = &bench.device.adapter().capabilities;
    let shape = MatrixShape { m: 16, n: 16, k: 16, input: Component::F16, accumulator: Component::F32 };
    let fragments = FlashWay::Fragments(Matrices::Cooperative);
    let known = capabilities.matrix_shapes.contains(&shape)
        && fragments.serves(heads(1, 1, 128), capabilities.max_shared_bytes);
    let units = MatrixUnits::of(capabilities);
    let loads =
        units.map(|units| FlashWay::Loads(FlashShape { units, subgroups: 1, block: 16, held: true, alike: true }));
    let [in_f32, _] = FlashF32Shape::ALL.map(FlashWay::F32);
    [FlashWay::Fragments(Matrices::Emulated), in_f32]
        .into_iter()
        .chain(known.then_some(fragments))
        .chain(loads)
        .collect()
}

/// The number of shapes of `flash_matrix` that take turns.
const SHAPES: usize = 4;

/// Returns the way for the heads of a case. The shapes of `flash_matrix` and `flash_f32` take turns: the rule's, and others.
fn way_of(way: FlashWay, heads: Heads, case: usize) -> FlashWay {
    if let FlashWay::F32(_) = way {
        let chosen = FlashF32Shape::choose(heads, 32 * 1024).expect("it serves these heads");
        return FlashWay::F32(if case.is_multiple_of(2) { chosen } else { FlashF32Shape::ALL[1] });
    }
    let FlashWay::Loads(FlashShape { units, .. }) = way else { return way };
    let chosen = FlashShape::largest(heads, units, 32 * 1024).expect("it serves these heads");
    let few = (16 / units.m).max(1);
    FlashWay::Loads(match case % SHAPES {
        0 | 1 => chosen,
        2 => FlashShape { subgroups: few, block: 16, held: false, alike: false, ..chosen },
        _ => FlashShape { subgroups: 2 * few, block: if heads.dim <= 96 { 48 } else { 16 }, held: true, ..chosen },
    })
}

/// A prompt chunk of one sequence, as plain values.
struct Chunk {
    heads: Heads,
    start: u32,
    length: u32,
    /// Rows of the dispatch; rows from `length` on are not valid.
    rows: u32,
    pages: Vec<u32>,
    max_pages: u32,
    /// `[token][kv head][dim]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[row][q head][dim]`.
    queries: Vec<f32>,
    /// `[row][q head][dim]`, read only if the heads are gated.
    gates: Vec<f32>,
    /// Whether the prompt has a slot. The rows of one without are not in use.
    slot: bool,
}

impl Chunk {
    fn new(random: &mut Random, heads: Heads, start: u32, length: u32, rows: u32) -> Chunk {
        let tokens = start + length;
        let pages = tokens.div_ceil(16);
        let mut cached = || -> Vec<f32> {
            let head = |random: &mut Random| (0..heads.dim).map(|_| random.float() * 2.0).collect::<Vec<f32>>();
            (0..tokens * heads.kv).flat_map(|_| round_head(heads.kv_format, &head(random))).collect()
        };
        let (keys, values) = (cached(), cached());
        Chunk {
            heads,
            start,
            length,
            rows,
            pages: random.permutation(pages + 2)[..pages as usize].to_vec(),
            max_pages: pages + 3,
            keys,
            values,
            // The range of the values makes some tokens weigh much more than others.
            queries: (0..length * heads.q * heads.dim).map(|_| random.float() * 3.0).collect(),
            gates: (0..length * heads.q * heads.dim).map(|_| random.float() * 3.0).collect(),
            slot: true,
        }
    }

    fn output_stride(&self) -> u32 {
        self.heads.q * self.heads.dim + 8
    }

    /// Returns softmax(q · Kᵀ / sqrt(D)) · V of one row and head, multiplied by the gate if the heads are gated.
    fn attend(&self, row: u32, head: u32) -> Vec<f64> {
        let Heads { kv, dim, .. } = self.heads;
        let of = |all: &[f32], index: u32| -> Vec<f64> {
            all[(index * dim) as usize..((index + 1) * dim) as usize].iter().map(|v| f64::from(*v)).collect()
        };
        let query = of(&self.queries, row * self.heads.q + head);
        let at = |token: u32| token * kv + head / self.heads.group();
        let score = |token: u32| {
            let dot: f64 = of(&self.keys, at(token)).iter().zip(&query).map(|(k, q)| k * q).sum();
            scored(self.heads.scores, dim, dot)
        };
        let first = first_visible(self.heads.scores, self.start + row);
        let last = last_visible(self.heads.scores, self.start + row, self.start + self.length - 1);
        let scores: Vec<f64> = (first..=last).map(score).collect();
        let sink = if self.heads.scores.sinks { f64::from(sink_of(head)) } else { f64::NEG_INFINITY };
        let top = scores.iter().copied().fold(sink, f64::max);
        let mut sums = vec![0.0; dim as usize];
        let mut total = (sink - top).exp();
        for (token, score) in (first..).zip(scores) {
            let weight = (score - top).exp();
            total += weight;
            for (sum, value) in sums.iter_mut().zip(of(&self.values, at(token))) {
                *sum += weight * value;
            }
        }
        let gates = of(&self.gates, row * self.heads.q + head);
        let gate = |i: usize| if self.heads.gated { 1.0 + (-gates[i]).exp() } else { 1.0 };
        sums.into_iter().enumerate().map(|(i, sum)| sum / total / gate(i)).collect()
    }

    /// Compares one row and head with the formula. The chunk's rows begin at row `first` of the step.
    fn check(&self, memory: &HostMemory, o: Range, first: u32, row: u32, head: u32, limit: f64) {
        for (i, wanted) in (0..).zip(self.attend(row, head)) {
            let at = (first + row) * self.output_stride() + head * self.heads.dim + i;
            let found = f64::from(memory.f32(o, at));
            assert!(
                (found - wanted).abs() <= limit * (1.0 + wanted.abs()),
                "{:?}, {} rows from {} on: row {row}, head {head}, dim {i}: {found} instead of {wanted}",
                self.heads,
                self.length,
                self.start
            );
        }
    }
}

/// Adds the buffers of a step with chunks of several sequences, and its call.
fn call(chunks: &[Chunk], splits: u32, limit: f32, cases: &mut Cases, way: FlashWay) -> FlashArgs {
    let heads = chunks[0].heads;
    let Heads { q, kv, dim, .. } = heads;
    let stride = (2 * q + 2 * kv) * dim + 8;
    // There are rows after the last one in use, and pages that no page table contains.
    let used: u32 = chunks.iter().map(|chunk| chunk.length).sum();
    let rows = used + chunks.iter().map(|chunk| chunk.rows - chunk.length).max().unwrap_or(0);
    let max_pages = chunks.iter().map(|chunk| chunk.max_pages).max().unwrap_or(0);
    let all_pages: usize = chunks.iter().map(|chunk| chunk.pages.len() + 2).sum();
    let mut qkv = vec![f32::NAN; (rows * stride) as usize];
    let slots = SLOTS.max(chunks.len() as u32);
    let mut table = vec![POISON; (slots * max_pages) as usize];
    let [mut k, mut v] = [true, false].map(|keys| Pages::new(heads, keys, all_pages as u32));
    let (mut first_row, mut first_page) = (0, 0);
    let tokens = vec![5; used as usize];
    let mut prompts = Vec::new();
    for (index, chunk) in (0..).zip(chunks) {
        let slot = (SLOT + index) % slots;
        for (row, query) in chunk.queries.chunks_exact((q * dim) as usize).enumerate() {
            let at = (first_row as usize + row) * stride as usize;
            qkv[at..at + query.len()].copy_from_slice(query);
            if heads.gated {
                let gates = &chunk.gates[row * query.len()..][..query.len()];
                qkv[at + ((q + 2 * kv) * dim) as usize..][..gates.len()].copy_from_slice(gates);
            }
        }
        for (at, page) in chunk.pages.iter().enumerate() {
            table[(slot * max_pages) as usize + at] = first_page + page;
        }
        // Tokens that no row sees may hold anything.
        for token in first_visible(heads.scores, chunk.start)..chunk.start + chunk.length {
            let page = first_page + chunk.pages[token as usize / 16];
            for head in 0..kv {
                let from = ((token * kv + head) * dim) as usize;
                k.put(page, token % 16, head, &chunk.keys[from..from + dim as usize]);
                v.put(page, token % 16, head, &chunk.values[from..from + dim as usize]);
            }
        }
        let tokens = &tokens[..chunk.length as usize];
        let slot = if chunk.slot { slot } else { u32::MAX };
        prompts.push(PromptRows { slot, start: chunk.start, tokens, last: false, next: None, from: None, keeps: &[] });
        first_row += chunk.length;
        first_page += chunk.pages.len() as u32 + 2;
    }
    let most = chunks.len() as u32 + 1;
    let descriptor = descriptor(ChunkLayout { prompts: most, cells: false }, &prompts);
    let packed = way == FlashWay::Wgmma { packed: true };
    let (output_stride, words, expect) = match packed {
        // Rounding to bfloat16 changes values of up to 2 by 2^-8.
        true => (Packed::padded_rows(rows), Packed::bytes(rows, q * dim) / 4, Expect::Bfloats(limit + 2f32.powi(-8))),
        false => {
            let stride = chunks[0].output_stride();
            (stride, u64::from(rows * stride), Expect::Floats(limit))
        }
    };
    let args = FlashArgs {
        qkv: cases.floats("qkv", &qkv),
        chunk: cases.words("chunk", &descriptor),
        pages: cases.words("pages", &table),
        k: cases.words("k", &k.words),
        v: cases.words("v", &v.words),
        o: cases.output("o", words as usize, expect),
        stride,
        output_stride,
        partials: cases.output("partials", partials_bytes(heads) as usize / 4, Expect::Any),
        counters: cases.words("counters", &vec![0; counters_bytes(heads) as usize / 4]),
        sinks: cases.floats("sinks", &(0..q).map(sink_of).collect::<Vec<f32>>()),
        max_pages,
        parts: parts(heads),
    };
    cases.recording.call(flash("flash".to_owned(), heads, (rows, most, splits), way, args));
    args
}

/// Runs each chunk as a step of one recording, on every driver with every implementation that it supports.
fn check(name: &str, chunks: Vec<Chunk>) {
    check_steps(Driver::all(), name, 1, &chunks.into_iter().map(|chunk| vec![chunk]).collect::<Vec<_>>());
}

/// Runs steps with chunks of several sequences. Up to `splits` workgroups share the tokens of a tile.
fn check_steps(drivers: &[Driver], name: &str, splits: u32, steps: &[Vec<Chunk>]) {
    check_within(ROUNDED, drivers, name, splits, steps);
}

fn check_within(limit: f32, drivers: &[Driver], name: &str, splits: u32, steps: &[Vec<Chunk>]) {
    let vulkan = Vulkan::new();
    let benches: Vec<Bench> = drivers.iter().map(|driver| Bench::new(&vulkan, *driver)).collect();
    let mut all: Vec<FlashWay> = Vec::new();
    for way in benches.iter().flat_map(ways) {
        if !all.contains(&way) {
            all.push(way);
        }
    }
    for way in all {
        let benches: Vec<&Bench> = benches.iter().filter(|bench| ways(bench).contains(&way)).collect();
        let own = if matches!(way, FlashWay::F32(_)) { limit.min(IN_F32) } else { limit };
        // A CPU driver compiles a pipeline of `flash_matrix` in seconds; of the first steps, each has another shape.
        let by_loads = matches!(way, FlashWay::Loads(_)) && std::env::var_os("OSTINATO_TEST_GPU").is_none();
        // Heads of other sizes and several prompts, with variants of scores, are those of other tests too.
        if by_loads && !every_case() && ["several", "heads"].contains(&name) {
            continue;
        }
        let steps = if by_loads && !every_case() { &steps[..steps.len().min(SHAPES)] } else { steps };
        let mut cases = Cases::new(&format!("{name} {way:?}"));
        cases.alone = drivers.len() == 1;
        let mut outputs = Vec::new();
        for (index, chunks) in steps.iter().enumerate() {
            let parts: Vec<String> = chunks.iter().map(|chunk| format!("{}+{}", chunk.start, chunk.length)).collect();
            cases.case(format!("{index}.{:?}.{}", chunks[0].heads, parts.join(",")));
            let way = way_of(way, chunks[0].heads, index);
            outputs.push(call(chunks, splits, own, &mut cases, way).o);
        }
        let reference = cases.reference();
        for (chunks, o) in steps.iter().zip(outputs) {
            let mut first = 0;
            for chunk in chunks {
                let rows = [0, chunk.length / 2, chunk.length - 1];
                for row in rows.into_iter().filter(|_| chunk.slot) {
                    chunk.check(&reference, o, first, row, row % chunk.heads.q, f64::from(limit) / 3e3);
                }
                first += chunk.length;
            }
        }
        for bench in benches {
            cases.check(bench, &reference);
        }
    }
}

#[test]
fn chunks_of_awkward_lengths_behind_awkward_prefixes() {
    let mut random = Random(31);
    let mut chunks = Vec::new();
    for length in [1, 15, 16, 17, 63, 65, 130] {
        for start in [0, 5, 16, 100] {
            let index = chunks.len();
            // Each combination is a pipeline, which a CPU driver takes up to ten seconds to compile.
            let (group, kv, dim) = [(1, 2, 32), (2, 1, 64), (7, 1, 128)][index % 3];
            let heads = heads(group, kv, dim);
            // Some chunks have rows that are not in use; in one of four chunks, whole workgroups have no row in use.
            let spare = [1, 0, 1, 70][index % 4];
            chunks.push(Chunk::new(&mut random, heads, start, length, length + spare));
        }
    }
    check("lengths", chunks);
}

#[test]
fn chunks_of_several_sequences_in_one_step() {
    let mut random = Random(35);
    let mut steps = Vec::new();
    // Start and length of each chunk: tiles end inside a prompt or at its end, or contain all of one.
    let shapes: [&[(u32, u32)]; 4] =
        [&[(0, 1), (30, 1), (0, 1)], &[(16, 33), (0, 5)], &[(3, 16), (0, 32), (100, 17)], &[(0, 70), (64, 2), (7, 64)]];
    for (index, shape) in shapes.into_iter().enumerate() {
        let (group, kv, dim) = [(4, 1, 64), (3, 2, 128)][index % 2];
        let heads = heads(group, kv, dim);
        let chunk = |&(start, length): &(u32, u32)| Chunk::new(&mut random, heads, start, length, length + 1);
        steps.push(shape.iter().map(chunk).collect());
    }
    check_steps(Driver::all(), "several", 2, &steps);
}

/// Goal: results are correct where several workgroups share a context, also if some rows see no token of a share.
#[test]
fn ends_of_long_prompts_are_shared() {
    let mut random = Random(36);
    let mut steps = Vec::new();
    for (index, shape) in
        [&[(400, 3)][..], &[(1, 300)], &[(700, 20), (0, 5), (260, 1)], &[(511, 17)]].into_iter().enumerate()
    {
        let (group, kv, dim) = [(4, 1, 64), (1, 2, 32)][index % 2];
        let heads = heads(group, kv, dim);
        let chunk = |&(start, length): &(u32, u32)| Chunk::new(&mut random, heads, start, length, length + 1);
        steps.push(shape.iter().map(chunk).collect());
        steps.push(vec![Chunk::new(&mut random, heads, 900, 2, 2)]);
    }
    // A prompt beside rows of a batch, of which one has no slot: each tile is shared by as many as its tokens are worth.
    let mut mixed: Vec<Chunk> = [(300, 33), (620, 1), (17, 1), (640, 1), (0, 2)]
        .map(|(start, length)| Chunk::new(&mut random, heads(4, 1, 64), start, length, length + 1))
        .into();
    mixed[2].slot = false;
    steps.insert(1, mixed);
    // More sequences than share tiles: each has a workgroup of its own.
    let many = (0..SHARING_PROMPTS + 3)
        .map(|index| (if index == 40 { 600 } else { index % 37 }, if index == 0 { 35 } else { 1 }));
    let many = many.map(|(start, length)| Chunk::new(&mut random, heads(4, 1, 64), start, length, length + 1));
    steps.insert(2, many.collect());
    check_steps(Driver::all(), "shared", 5, &steps);
}

/// Goal: windows, sinks and bounds of scores, alone and with workgroups that share a context of which some rows see
/// nothing.
#[test]
fn variants_of_scores_agree() {
    let mut random = Random(37);
    let mut steps = Vec::new();
    for (index, scores) in variants().into_iter().enumerate() {
        let heads = Heads { scores, ..heads([4, 1, 3][index], 1 + index as u32 % 2, [64, 32, 64][index]) };
        for shape in [&[(0, 70), (3, 16)][..], &[(300, 33)], &[(0, 1), (500, 2), (31, 40)]] {
            let chunk = |&(start, length): &(u32, u32)| Chunk::new(&mut random, heads, start, length, length + 1);
            steps.push(shape.iter().map(chunk).collect());
        }
    }
    check_steps(Driver::all(), "scores", 3, &steps);
}

/// Goal: rows see the later tokens of their own prompt and of no other, with codes too, and where several workgroups share
/// a context of which some rows see nothing. Window, sinks and bounds count as for rows that see earlier tokens only.
#[test]
fn rows_see_later_tokens_of_their_prompt() {
    let mut random = Random(39);
    let mut steps = Vec::new();
    for (index, scores) in variants_of_both_sides().into_iter().enumerate() {
        // Each is a pipeline, which a CPU driver takes up to a minute to compile.
        let formats: &[KvFormat] = if index == 2 { &[KvFormat::F16, KvFormat::Int8] } else { &[KvFormat::F16] };
        for &kv_format in formats {
            let shape = heads([3, 1, 4][index], 1 + index as u32 % 2, [64, 32, 64][index]);
            let heads = Heads { scores, kv_format, ..shape };
            for shape in [&[(0, 70), (0, 1), (3, 16)][..], &[(0, 33), (0, 5)], &[(0, 300)]] {
                let chunk = |&(start, length): &(u32, u32)| Chunk::new(&mut random, heads, start, length, length + 1);
                steps.push(shape.iter().map(chunk).collect::<Vec<_>>());
            }
        }
    }
    check_steps(Driver::all(), "both sides", 3, &steps);
    // Lavapipe takes long to compile wide heads.
    let one = Driver::all().last().map_or(&[][..], std::slice::from_ref);
    let wide = Heads { scores: Scores { window: Some(9), both: true, ..Scores::default() }, ..heads(3, 1, 256) };
    check_steps(one, "wide both sides", 1, &[vec![Chunk::new(&mut random, wide, 0, 45, 46)]]);
}

#[test]
fn heads_of_other_sizes_and_large_groups() {
    let mut random = Random(32);
    let mut chunks = |shapes: &[(u32, u32, u32)]| -> Vec<Vec<Chunk>> {
        let of = |&(group, kv, dim): &(u32, u32, u32)| {
            [(21, 20, 21), (0, 3, 3)]
                .map(|(start, length, rows)| vec![Chunk::new(&mut random, heads(group, kv, dim), start, length, rows)])
        };
        shapes.iter().flat_map(of).collect()
    };
    check_steps(Driver::all(), "heads", 1, &chunks(&[(1, 1, 96), (71, 1, 64), (8, 3, 32), (64, 1, 32)]));
    // Lavapipe takes up to a minute to compile each of these, so only the last driver runs them.
    let one = Driver::all().last().map_or(&[][..], std::slice::from_ref);
    check_steps(one, "wide heads", 1, &chunks(&[(2, 1, 160), (5, 1, 192), (3, 2, 256)]));
}

/// Goal: pages of codes, with heads of every size class, prompts beside each other, variants of scores and workgroups that
/// share a context. Values of one prompt are so small that their scales would vanish in f16.
#[test]
fn codes_agree_in_all_shapes() {
    let mut random = Random(38);
    let coded = |heads: Heads| Heads { kv_format: KvFormat::Int8, ..heads };
    let mut steps = Vec::new();
    for (index, (group, kv, dim)) in [(1, 2, 32), (4, 1, 64), (3, 2, 128), (2, 1, 96)].into_iter().enumerate() {
        let scores = variants().get(index).copied().unwrap_or_default();
        for scores in [Scores::default(), scores] {
            let heads = coded(Heads { scores, ..heads(group, kv, dim) });
            for shape in [&[(0, 1), (5, 65), (100, 17)][..], &[(400, 3), (31, 16)]] {
                let chunk = |&(start, length): &(u32, u32)| Chunk::new(&mut random, heads, start, length, length + 1);
                steps.push(shape.iter().map(chunk).collect::<Vec<_>>());
            }
        }
    }
    let mut small = Chunk::new(&mut random, coded(heads(2, 1, 64)), 40, 30, 31);
    small.values.iter_mut().for_each(|value| *value *= 1e-7);
    check_steps(Driver::all(), "codes", 3, &steps);
    check_within(ROUNDED * 1e-7, Driver::all(), "small codes", 1, &[vec![small]]);
    let one = Driver::all().last().map_or(&[][..], std::slice::from_ref);
    check_steps(one, "wide codes", 1, &[vec![Chunk::new(&mut random, coded(heads(3, 2, 256)), 21, 20, 21)]]);
}

#[test]
fn large_scores_and_weights_that_vanish() {
    let mut random = Random(33);
    let mut chunks = Vec::new();
    // With starts 30 and 62 the first row ends one token before the end of a block.
    for (start, sign) in [(0, 1.0), (40, -1.0), (30, 1.0), (62, 1.0)] {
        let mut chunk = Chunk::new(&mut random, heads(2, 1, 64), start, 70, 71);
        // Scores grow or fall with the token, so that the maximum moves with each block or never after the first. All
        // queries are rounded by the same factor, and so are the differences between scores.
        let tokens = (start + chunk.length) as usize;
        for (i, key) in chunk.keys.iter_mut().enumerate() {
            *key = sign * (i / 64) as f32 / if i % 64 == 0 { 8.0 } else { 64.0 };
        }
        for (i, query) in chunk.queries.iter_mut().enumerate() {
            *query = if i % 64 == 0 { 16.0 } else { 2.0 };
        }
        assert_eq!(chunk.keys.len(), tokens * 64);
        chunks.push(chunk);
    }
    check("scores", chunks);
}

#[test]
#[ignore = "needs OSTINATO_TEST_GPU"]
fn chunks_of_a_large_model_on_a_gpu() {
    assert_eq!(Driver::first(), Driver::Gpu, "OSTINATO_TEST_GPU selects no GPU");
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::Gpu);
    let mut random = Random(34);
    for (start, length) in [(0, 512), (1000, 512), (1000, 500)] {
        let chunk = Chunk::new(&mut random, heads(4, 8, 128), start, length, 512);
        for way in ways(&bench) {
            let mut cases = Cases::new("large");
            cases.case(format!("{way:?}"));
            let way = way_of(way, chunk.heads, 0);
            let args = call(std::slice::from_ref(&chunk), 1, ROUNDED, &mut cases, way);
            let memory = bench.run(&cases.recording, &cases.before());
            for row in 0..length {
                chunk.check(&memory, args.o, 0, row, random.below(chunk.heads.q), ROUNDED.into());
            }
            for row in 0..512 {
                for i in 0..chunk.output_stride() {
                    let written = row < length && i < chunk.heads.q * chunk.heads.dim;
                    let word = memory.u32(args.o, row * chunk.output_stride() + i);
                    if written {
                        assert!(f32::from_bits(word).is_finite(), "{way:?}: row {row}, word {i}: {word:#010x}");
                    } else {
                        assert_eq!(word, POISON, "{way:?}: row {row}, word {i} was not to be written");
                    }
                }
            }
        }
    }
}

/// Steps for `flash_wgmma`: heads of each size, prompts beside each other, several blocks of tokens, variants of scores.
fn wgmma_steps() -> Vec<Vec<Chunk>> {
    let mut random = Random(39);
    let mut steps = Vec::new();
    let windows = variants().into_iter().filter(|scores| scores.soft_cap.is_none());
    let scores: Vec<Scores> = [Scores::default()].into_iter().chain(windows).collect();
    let sizes = [(1, 2, 64), (4, 1, 128), (3, 2, 256), (5, 1, 64), (64, 1, 128), (2, 1, 256)];
    let shapes: [&[(u32, u32)]; 4] =
        [&[(0, 70), (3, 16), (0, 1)], &[(300, 33)], &[(0, 150)], &[(120, 9), (128, 130), (0, 5)]];
    for (index, (group, kv, dim)) in sizes.into_iter().enumerate() {
        for (shape, scores) in [
            (shapes[index % 4], scores[index % scores.len()]),
            (shapes[(index + 1) % 4], scores[(index + 1) % scores.len()]),
        ] {
            let heads = Heads { scores, ..heads(group, kv, dim) };
            let chunk = |&(start, length): &(u32, u32)| Chunk::new(&mut random, heads, start, length, length + 1);
            steps.push(shape.iter().map(chunk).collect());
        }
    }
    // More blocks than places, twice as many and more.
    for (group, dim) in [(2, 64), (4, 128), (2, 256)] {
        let heads = Heads { scores: Scores { sinks: dim == 128, ..Scores::default() }, ..heads(group, 2, dim) };
        let mut prompts: Vec<Chunk> = [(700, 40), (0, 20), (9, 17), (33, 2), (0, 1)]
            .map(|(start, length)| Chunk::new(&mut random, heads, start, length, length + 1))
            .into();
        prompts[1].slot = false;
        steps.push(prompts);
    }
    steps
}

/// Returns the cases of [`wgmma_steps`].
fn wgmma_cases() -> Cases {
    let mut cases = Cases::new("flash_wgmma");
    for (index, chunks) in wgmma_steps().into_iter().enumerate() {
        let parts: Vec<String> = chunks.iter().map(|chunk| format!("{}+{}", chunk.start, chunk.length)).collect();
        let packed = if every_case() { &[false, true][..] } else { &[index % 2 == 1] };
        for &packed in packed {
            cases.case(format!("{index}.{packed}.{:?}.{}", chunks[0].heads, parts.join(",")));
            call(&chunks, 1, ROUNDED, &mut cases, FlashWay::Wgmma { packed });
        }
    }
    cases
}

#[test]
fn wgmma_matches_its_reference_on_a_simulated_processor() {
    let cases = wgmma_cases();
    let reference = cases.reference();
    let mut memory = cases.before();
    for op in &cases.recording.ops {
        let Op::Call(call) = op else { panic!("{op:?} is no call") };
        memory = ptx::simulate(call, &memory, str::to_owned);
    }
    cases.compare(&cases.recording, &reference, &memory, "the simulated processor");
}

/// Goal: the simulation notices what is read or overwritten too early. Method: programs that wait less than they must; each
/// change is made where the text has it for the given time.
#[test]
fn the_simulated_processor_notices_a_missing_wait_of_wgmma() {
    let mut random = Random(40);
    let chunk = Chunk::new(&mut random, heads(2, 1, 64), 700, 40, 41);
    let mut cases = Cases::new("flash_wgmma");
    cases.case("wait".to_owned());
    call(&[chunk], 1, ROUNDED, &mut cases, FlashWay::Wgmma { packed: false });
    let Op::Call(call) = &cases.recording.ops[0] else { panic!("a call") };
    let reference = cases.reference();
    let run = |change: &dyn Fn(&str) -> String| {
        let found = ptx::simulate(call, &cases.before(), change);
        cases.compare(&cases.recording, &reference, &found, "a changed program");
    };
    run(&str::to_owned);
    for (at, right, wrong) in [
        // Scores are read before they are complete.
        (0, "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;"),
        // Weights are replaced before they are multiplied.
        (1, "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        // Keys are said to be there before they are.
        (0, "cp.async.wait_group 0;", "cp.async.wait_group 2;"),
        // Keys and values are overwritten before they are multiplied.
        (0, "xor.b32 %r0, %phase, 1;", "mov.u32 %r0, 1;"),
        (1, "xor.b32 %r0, %phase, 1;", "mov.u32 %r0, 1;"),
        // The descriptor is that of the dimensions before.
        (0, "add.u64 %l1, %l0, 256;", "add.u64 %l1, %l0, 0;"),
    ] {
        let change = |text: &str| {
            let (place, _) = text.match_indices(right).nth(at).unwrap_or_else(|| panic!("the text has no {right}"));
            format!("{}{wrong}{}", &text[..place], &text[place + right.len()..])
        };
        // A panic is the processor's own complaint, or a difference.
        let run = std::panic::AssertUnwindSafe(|| run(&change));
        assert!(std::panic::catch_unwind(run).is_err(), "{wrong} in place of number {at} is not noticed");
    }
}

/// Goal: what generic copies and stores put into shared memory is visible to the matrix units, which the simulation cannot
/// see. Method: the text has the fences.
#[test]
fn programs_of_wgmma_have_the_fences_between_copies_and_products() {
    for op in &wgmma_cases().recording.ops {
        let Op::Call(call) = op else { panic!("{op:?} is no call") };
        let text = programs::program(call.kernel, &call.constants).text;
        let fences = text.matches("fence.proxy.async;\n").count();
        // Before each of three signals of the copying threads, and behind queries in shared memory.
        assert_eq!(fences, 3 + usize::from(text.contains("st.shared")), "{:?}", call.constants);
        for (at, _) in text.match_indices("cp.async.wait_group") {
            let mut rest = text[at..].lines().skip(1);
            assert_eq!(rest.next(), Some("fence.proxy.async;"), "{:?}", call.constants);
        }
    }
}

#[test]
fn programs_of_wgmma_are_assembled_without_spilling() {
    let assembler = Assembler::new();
    for op in &wgmma_cases().recording.ops {
        let Op::Call(call) = op else { panic!("{op:?} is no call") };
        let program = programs::program(call.kernel, &call.constants);
        assembler.require(&format!("{:?}", call.constants), &program.text);
    }
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn wgmma_matches_its_reference() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::Gpu);
    bench.device.takes_ptx().expect("programs in PTX");
    let cases = wgmma_cases();
    cases.check(&bench, &cases.reference());
}

#[test]
fn heads_that_are_served() {
    let fragments = |heads| FlashWay::Fragments(Matrices::Emulated).serves(heads, 0);
    let units = MatrixUnits { m: 16, n: 16, k: 16, subgroup: 64 };
    let loads = |heads| FlashShape::choose(heads, units, 32 * 1024);
    let in_f32 = |heads| FlashF32Shape::choose(heads, 32 * 1024);
    for dim in [32, 64, 96, 128, 160, 192, 224, 256] {
        assert!(fragments(heads(1, 1, dim)), "{dim}");
        assert!(loads(heads(1, 1, dim)).is_some(), "{dim}");
        let codes = Heads { kv_format: KvFormat::Int8, ..heads(1, 1, dim) };
        assert!(in_f32(heads(1, 1, dim)).is_some() && in_f32(codes).is_some(), "{dim}");
    }
    for dim in [8, 16, 80, 120, 288, 512] {
        assert!(!fragments(heads(1, 1, dim)), "{dim}");
        let served = matches!(dim, 16 | 80);
        assert_eq!([loads(heads(1, 1, dim)).is_some(), in_f32(heads(1, 1, dim)).is_some()], [served; 2], "{dim}");
    }
    let exact = Heads { kv_format: KvFormat::F32, ..heads(1, 1, 128) };
    assert!(!fragments(exact) && loads(exact).is_none() && in_f32(exact).is_none());
    // As much shared memory as Vulkan promises suffices for smaller tiles of narrow heads.
    assert_eq!(FlashF32Shape::choose(heads(1, 1, 128), 16 * 1024), Some(FlashF32Shape::ALL[1]));
    assert_eq!(FlashF32Shape::choose(heads(1, 1, 256), 16 * 1024), None);
}

/// Goal: the shape of `flash_matrix` uses what a device has, and no more than that.
#[test]
fn shapes_of_matrices_fit_shared_memory_and_workgroups() {
    for (m, n, k, subgroup) in [(16, 16, 16, 32), (16, 16, 16, 64), (8, 16, 16, 16), (8, 8, 16, 8), (8, 8, 8, 64)] {
        let units = MatrixUnits { m, n, k, subgroup };
        for (dim, format) in [(64, KvFormat::F16), (128, KvFormat::Int8), (256, KvFormat::F16)] {
            let heads = Heads { kv_format: format, ..heads(4, 2, dim) };
            for shared in [16, 32, 48, 64] {
                let Some(shape) = FlashShape::choose(heads, units, shared * 1024) else {
                    let narrow = subgroup < 32 && m * dim / subgroup > 64;
                    assert!(shared == 16 || narrow, "{heads:?} has no shape for {shared} KiB and {units:?}");
                    continue;
                };
                assert!(shape.shared_bytes(heads) <= shared * 1024, "{shape:?}");
                assert!(shape.subgroups * subgroup <= 256 && shape.subgroups * m <= 64, "{shape:?}");
            }
        }
    }
}

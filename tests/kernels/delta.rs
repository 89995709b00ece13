//! Goal: the kernels of the gated delta rule match their `reference()`, with plain multiplication on both CPU drivers
//! and also on matrix units on a device that has them (a GPU; by loads also lavapipe 26); the reference matches the recurrence evaluated token by token; and
//! a prompt processed in blocks leaves the same state as its tokens processed one by one. Method: seeded inputs with
//! awkward shapes. States, convolution windows, rows and outputs hold NaN wherever a kernel must not read, and words
//! that a kernel must not write must stay unchanged. The recurrence is computed here in f64 from the inputs.
//!
//! Tolerances: sums have up to 128 products, and outputs are scaled to a root mean square near 1. Single tokens may
//! differ by 2e-5, as for the other kernels. The rows of a prompt pass through matrices that are inverted and
//! multiplied. Without matrix units 1e-4 is allowed, which is more than twenty times the largest difference found. On
//! matrix units each operand is a pair of bfloat16 values, with a relative error of 2^-17 instead of 2^-24, and the
//! largest differences grow in proportion: to 1.4e-4 with usual gates, and to 3.6e-4 where nothing ever decays and the
//! outputs are small differences of large terms. The root mean squares are 3.3e-6 and 2.2e-5. The limits are 6e-4 and
//! 5e-5. By loads, operands are pairs of f16, with a relative error of 2^-22, and the limit is that of f32: on lavapipe the
//! largest difference is 7.5e-6, as without matrix units. A missing block or a decay that is not applied changes outputs by 1e-2
//! and more.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, descriptor, descriptor_mixed, every_case};
use ostinato::device::{Component, MatrixShape};
use ostinato::kernels::delta::{
    DecodingRows, DeltaHeads, DeltaRule, DeltaShape, DeltaWay, MOST_PENDING, PromptOperands, RING, delta_prompts,
    delta_serves, delta_step, delta_verify, scratch_bytes,
};
use ostinato::kernels::delta_probe;
use ostinato::kernels::embed::{BLOCK_ROWS, ChunkLayout, PromptRows};
use ostinato::kernels::gemm::matmul::MatrixUnits;
use ostinato::kernels::gemm::skinny::Matrices;
use ostinato::kernels::gemm::tiled::{Packed, PackedOrder};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::interpreter;
use ostinato::kernels::recording::Range;
use ostinato::kernels::shaders::DeltaStepArgs;
use ostinato::kernels::state::{SLOT_SETTLED, SLOT_WORDS};
use ostinato::kernels::tags::{Flow, TAG_BITS, tagged};
use ostinato::memory::pack::Format;

/// Tolerances, explained at the top of the file.
const STEP: f32 = 2e-5;
const PROMPT: f32 = 1e-4;
const PARTS: f32 = 6e-4;
const PARTS_MEAN: f64 = 5e-5;
const EPSILON: f32 = 1e-6;
const CELLS: u32 = 7;

fn heads(key: u32, value: u32, key_dim: u32, value_dim: u32) -> DeltaHeads {
    DeltaHeads { key, value, key_dim, value_dim, tiled: false, rule: DeltaRule::Delta }
}

/// Returns heads of a state space.
fn space(key: u32, value: u32, key_dim: u32, value_dim: u32, conv_bias: bool) -> DeltaHeads {
    DeltaHeads { rule: DeltaRule::StateSpace { conv_bias }, ..heads(key, value, key_dim, value_dim) }
}

/// Returns heads whose key heads take turns.
fn tiled(key: u32, value: u32, key_dim: u32, value_dim: u32) -> DeltaHeads {
    DeltaHeads { tiled: true, ..heads(key, value, key_dim, value_dim) }
}

/// Returns head shapes that cover each kind of dimension and of grouping. Each shape needs several pipelines, which
/// take SwiftShader seconds to compile.
fn shapes() -> [DeltaHeads; 7] {
    [
        heads(1, 1, 16, 16),
        tiled(2, 4, 32, 16),
        heads(1, 3, 48, 32),
        heads(1, 2, 128, 128),
        heads(2, 4, 16, 48),
        space(1, 3, 48, 32, true),
        space(2, 4, 16, 16, false),
    ]
}

/// Returns the ways to multiply that a device supports. Those by loads have a workgroup for each 16 value columns.
fn ways(bench: &Bench) -> Vec<DeltaWay> {
    let capabilities = &bench.device.adapter().capabilities;
    let shape = MatrixShape { m: 16, n: 16, k: 16, input: Component::Bf16, accumulator: Component::F32 };
    let known = capabilities.matrix_shapes.contains(&shape);
    let loads = MatrixUnits::of(capabilities).map(|units| DeltaWay::Loads(DeltaShape { units, together: 1 }));
    let fragments = known.then_some(DeltaWay::Fragments(Matrices::Cooperative));
    [DeltaWay::Fragments(Matrices::Emulated)].into_iter().chain(fragments).chain(loads).collect()
}

/// Returns the way for the heads of a case: where value columns and shared memory allow it, every other case by loads has a
/// workgroup for 32 columns.
fn way_of(way: DeltaWay, heads: DeltaHeads, case: usize) -> DeltaWay {
    match way {
        // In f16, with k and q of length 1.
        DeltaWay::Loads(_) if heads.rule != DeltaRule::Delta => DeltaWay::Fragments(Matrices::Emulated),
        DeltaWay::Loads(shape) if case.is_multiple_of(2) && heads.value_dim.is_multiple_of(32) => {
            let wide = DeltaShape { together: 2, ..shape };
            DeltaWay::Loads(if wide.shared_bytes(heads) <= 32 * 1024 { wide } else { shape })
        }
        way => way,
    }
}

/// Returns the tolerance for a prompt's outputs and states.
fn limit(way: DeltaWay) -> f32 {
    if way == DeltaWay::Fragments(Matrices::Cooperative) { PARTS } else { PROMPT }
}

/// How strongly tokens decay the state and write to it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gates {
    /// Moderate values of α and β.
    Usual,
    /// α = 0, and α = 1 for one head and token in eight.
    Strong,
    /// α = 1, β = 1.
    None,
    /// β = 0.
    Closed,
}

/// Whether the convolution has biases.
fn biased(heads: DeltaHeads) -> bool {
    heads.rule == DeltaRule::StateSpace { conv_bias: true }
}

/// The weights of a layer.
struct Layer {
    heads: DeltaHeads,
    stride: u32,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl Layer {
    fn new(random: &mut Random, heads: DeltaHeads) -> Layer {
        let value = heads.value as usize;
        let factors = if heads.rule == DeltaRule::Delta { heads.value_dim } else { heads.value };
        Layer {
            heads,
            stride: heads.projected().next_multiple_of(4) + 8,
            conv: random.floats(heads.channels() as usize * if biased(heads) { 5 } else { 4 }),
            a_log: random.floats(value).into_iter().map(|v| 1.5 * v - 0.5).collect(),
            dt_bias: random.floats(value),
            norm: random.floats(factors as usize).into_iter().map(|v| v + 1.5).collect(),
        }
    }

    /// Returns a token's row of the input projection.
    fn token(&self, random: &mut Random, gates: Gates) -> Vec<f32> {
        let h = self.heads;
        let without_gates = h.channels() + h.output();
        let mut row: Vec<f32> = random.floats(without_gates as usize).iter().map(|v| 2.0 * v).collect();
        let (b, a) = match gates {
            Gates::Usual => (0.0, -2.0),
            Gates::Strong => (0.0, if random.below(8) == 0 { -60.0 } else { 60.0 }),
            Gates::None => (60.0, -120.0),
            Gates::Closed => (-120.0, -2.0),
        };
        let gates: &[f32] = if h.rule == DeltaRule::Delta { &[b, a] } else { &[a] };
        for offset in gates {
            row.extend(random.floats(h.value as usize).iter().map(|v| offset + 3.0 * v));
        }
        row
    }

    fn tokens(&self, random: &mut Random, gates: Gates, count: u32) -> Vec<Vec<f32>> {
        (0..count).map(|_| self.token(random, gates)).collect()
    }

    /// Returns the rows as they lie in memory, each padded with poison to the stride.
    fn rows(&self, tokens: &[Vec<f32>]) -> Vec<f32> {
        let mut out = Vec::new();
        for token in tokens {
            out.extend_from_slice(token);
            out.resize(out.len() + self.stride as usize - token.len(), f32::from_bits(POISON));
        }
        out
    }
}

/// A sequence's state as the recurrence defines it.
#[derive(Clone)]
struct Sequence {
    /// The recurrent state, `[value head][key dim][value dim]`.
    state: Vec<f64>,
    /// The convolution's input u of every token so far.
    past: Vec<Vec<f32>>,
}

impl Sequence {
    fn new(heads: DeltaHeads) -> Sequence {
        Sequence { state: vec![0.0; (heads.value * heads.key_dim * heads.value_dim) as usize], past: Vec::new() }
    }

    fn silu(x: f64) -> f64 {
        x / (1.0 + (-x).exp())
    }

    /// Processes one token and returns its output, `[value head][value dim]`.
    fn step(&mut self, layer: &Layer, row: &[f32]) -> Vec<f64> {
        let DeltaHeads { key, value, key_dim, value_dim, tiled, rule } = layer.heads;
        let (channels, plain) = (layer.heads.channels() as usize, rule != DeltaRule::Delta);
        self.past.push(row[..channels].to_vec());
        let mixed: Vec<f64> = (0..channels)
            .map(|channel| {
                let tap = |j: usize| match (self.past.len() + j).checked_sub(4) {
                    Some(at) => f64::from(self.past[at][channel]),
                    None => 0.0,
                };
                let bias = if biased(layer.heads) { f64::from(layer.conv[channels * 4 + channel]) } else { 0.0 };
                Sequence::silu(bias + (0..4).map(|j| f64::from(layer.conv[channel * 4 + j]) * tap(j)).sum::<f64>())
            })
            .collect();
        let unit = |first: u32, scale: f64| -> Vec<f64> {
            let part = &mixed[first as usize..(first + key_dim) as usize];
            let length = (part.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
            part.iter().map(|v| if plain { *v } else { v / length * scale }).collect()
        };
        let mut y = Vec::new();
        for h in 0..value {
            let kh = if tiled { h % key } else { h / (value / key) };
            let (q, k) = (unit(kh * key_dim, f64::from(key_dim).sqrt().recip()), unit((key + kh) * key_dim, 1.0));
            let v_at = (2 * key * key_dim + h * value_dim) as usize;
            let gates = channels + (value * value_dim + h) as usize;
            let decay = if plain { gates } else { gates + value as usize };
            let a = f64::from(row[decay]) + f64::from(layer.dt_bias[h as usize]);
            let time = (1.0 + a.exp()).ln();
            let beta = if plain { time } else { 1.0 / (1.0 + (-f64::from(row[gates])).exp()) };
            let alpha = (-f64::from(layer.a_log[h as usize]).exp() * time).exp();
            let o: Vec<f64> = (0..value_dim as usize)
                .map(|i| {
                    let at = |d: usize| ((h * key_dim) as usize + d) * value_dim as usize + i;
                    let mut dot = 0.0;
                    for (d, k) in k.iter().enumerate() {
                        self.state[at(d)] *= alpha;
                        dot += self.state[at(d)] * k;
                    }
                    let (correction, skip) = if plain { (0.0, f64::from(layer.norm[h as usize])) } else { (dot, 0.0) };
                    let delta = beta * (mixed[v_at + i] - correction);
                    k.iter().enumerate().for_each(|(d, k)| self.state[at(d)] += k * delta);
                    q.iter().enumerate().map(|(d, q)| self.state[at(d)] * q).sum::<f64>() + skip * mixed[v_at + i]
                })
                .collect();
            let scale = (o.iter().map(|v| v * v).sum::<f64>() / f64::from(value_dim) + f64::from(EPSILON)).sqrt();
            for (i, o) in o.into_iter().enumerate() {
                let z = f64::from(row[channels + (h * value_dim) as usize + i]);
                let normed = if plain { o } else { o / scale * f64::from(layer.norm[i]) };
                y.push(normed * Sequence::silu(z));
            }
        }
        y
    }
}

/// The memory of all cells: recurrent states and convolution windows.
struct Cells {
    heads: DeltaHeads,
    state: Vec<f32>,
    window: Vec<f32>,
}

impl Cells {
    /// Returns cells that contain only poison.
    fn new(heads: DeltaHeads) -> Cells {
        let poison = |bytes: u64| vec![f32::from_bits(POISON); bytes as usize / 4];
        Cells { heads, state: poison(heads.state_bytes(CELLS)), window: poison(heads.window_bytes(CELLS)) }
    }

    /// Writes a sequence's state and its last three convolution inputs into a cell, and nothing else.
    fn put(&mut self, cell: u32, sequence: &Sequence) {
        let (size, channels) = (sequence.state.len(), self.heads.channels() as usize);
        if sequence.past.is_empty() {
            return;
        }
        for (to, from) in self.state[cell as usize * size..].iter_mut().zip(&sequence.state) {
            *to = *from as f32;
        }
        for (position, u) in sequence.past.iter().enumerate().rev().take(3) {
            let at = (cell as usize * RING as usize + position % RING as usize) * channels;
            self.window[at..at + channels].copy_from_slice(u);
        }
    }

    /// Checks that a cell holds a sequence's state and its last three convolution inputs.
    fn check(&self, memory: &HostMemory, (state, window): (Range, Range), cell: u32, sequence: &Sequence, limit: f64) {
        let size = sequence.state.len();
        for (i, wanted) in sequence.state.iter().enumerate() {
            let found = f64::from(memory.f32(state, (cell as usize * size + i) as u32));
            assert!((found - wanted).abs() <= limit * (1.0 + wanted.abs()), "cell {cell}, {i}: {found}, not {wanted}");
        }
        for (position, u) in sequence.past.iter().enumerate().rev().take(3) {
            let at = (cell as usize * RING as usize + position % RING as usize) * u.len();
            for (i, wanted) in u.iter().enumerate() {
                assert_eq!(memory.f32(window, (at + i) as u32), *wanted, "window of {cell}: {position}, channel {i}");
            }
        }
    }
}

/// How a step reads and writes its rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Rows,
    Packed(PackedOrder),
    Tagged,
}

impl Form {
    /// Returns the order of packed outputs.
    fn order(self) -> Option<PackedOrder> {
        match self {
            Form::Packed(order) => Some(order),
            Form::Rows | Form::Tagged => None,
        }
    }
}

/// The tags of input and output. They differ from the tag of every other operand and from that of poison.
const TAGS: [u32; 2] = [3, 77];

fn step_args(
    cases: &mut Cases,
    layer: &Layer,
    rows: &[[u32; 4]],
    x: &[u32],
    cells: &Cells,
    y: Range,
    form: Form,
) -> DeltaStepArgs {
    let width = layer.heads.output();
    let pending = cases.output("pending", layer.heads.pending_bytes(CELLS, 1) as usize / 4, Expect::Floats(STEP));
    // No tokens are pending.
    let mut settled = vec![POISON; (CELLS * SLOT_WORDS) as usize];
    for row in rows.iter().filter(|row| row[3] == 1) {
        settled[(row[2] * SLOT_WORDS + SLOT_SETTLED) as usize] = row[1];
    }
    let x = cases.words("x", x);
    DeltaStepArgs {
        x,
        rows: cases.words("rows", &rows.concat()),
        conv: cases.floats("conv", &layer.conv),
        a_log: cases.floats("a_log", &layer.a_log),
        dt_bias: cases.floats("dt_bias", &layer.dt_bias),
        norm: cases.floats("norm", &layer.norm),
        state: cases.floats("state", &cells.state),
        window: cases.floats("window", &cells.window),
        pending,
        slots: cases.words("slots", &settled),
        y,
        fault: cases.words("fault", &[0, 0]),
        chunk: x.none(),
        stride: layer.stride,
        y_stride: form.order().map_or(width + 4, |order| order.stride(rows.len() as u32, width)),
        epsilon: EPSILON,
        x_tag: 0,
        y_tag: 0,
    }
}

/// Adds a cell's pending token to its state, as the next step does.
fn add_pending(memory: &mut HostMemory, heads: DeltaHeads, args: &DeltaStepArgs, cell: u32) {
    let DeltaHeads { value, key_dim, value_dim, .. } = heads;
    for h in (0..value).map(|h| cell * value + h) {
        let pending = |i: u32| memory.f32(args.pending, h * (key_dim + value_dim + 4) + i);
        let alpha = pending(key_dim + value_dim);
        let values: Vec<f32> = (0..key_dim * value_dim)
            .map(|i| {
                let product = f64::from(pending(i / value_dim)) * f64::from(pending(key_dim + i % value_dim));
                let old = memory.f32(args.state, h * key_dim * value_dim + i);
                (f64::from(alpha) * f64::from(old) + product) as f32
            })
            .collect();
        for (i, value) in (0..).zip(values) {
            memory.set_f32(args.state, h * key_dim * value_dim + i, value);
        }
    }
}

/// Tests one step with rows of several sequences at several positions, and with rows without a sequence between them.
fn step_cases(form: Form) {
    let mut cases = Cases::new(&format!("delta_step {form:?}"));
    let mut random = Random(61);
    let mut made = Vec::new();
    let flow = match form {
        Form::Tagged => Flow { input_carried: true, input: TAGS[0], old: 0, output: Some(TAGS[1]) },
        _ => Flow::NONE,
    };
    let all = [Gates::Usual, Gates::Strong, Gates::None, Gates::Closed];
    let list = shapes().into_iter().flat_map(|heads| all.map(|gates| (heads, gates)));
    for (index, (heads, gates)) in list.enumerate() {
        if form.order().is_some_and(|order| !heads.output().is_multiple_of(order.block_cols())) {
            continue;
        }
        cases.case(format!("{heads:?}.{gates:?}"));
        let layer = Layer::new(&mut random, heads);
        let mut cells = Cells::new(heads);
        let (mut rows, mut tokens, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        for (slot, position) in (0..).zip([0, 1, 2, 3, 21 + index as u32]) {
            let cell = (slot * 3 + 2) % CELLS;
            let mut sequence = Sequence::new(heads);
            for token in layer.tokens(&mut random, gates, position) {
                sequence.step(&layer, &token);
            }
            cells.put(cell, &sequence);
            rows.push([9, position, cell, 1]);
            tokens.push(layer.token(&mut random, gates));
            sequences.push(Some(sequence));
            if slot == 1 || slot == 4 {
                rows.push([9, 5, cell, 0]);
                tokens.push(layer.token(&mut random, gates));
                sequences.push(None);
            }
        }
        // The cell holds the state rounded to f32, so the recurrence starts from the rounded state.
        for (sequence, row) in sequences.iter_mut().zip(&rows) {
            if let Some(sequence) = sequence
                && row[1] > 0
            {
                let size = sequence.state.len();
                let words = &cells.state[row[2] as usize * size..][..size];
                sequence.state = words.iter().map(|v| f64::from(*v)).collect();
            }
        }
        let put = |v: &f32| if form == Form::Tagged { tagged(*v, flow.input) } else { v.to_bits() };
        let x: Vec<u32> = layer.rows(&tokens).iter().map(put).collect();
        let (count, width) = (rows.len() as u32, heads.output());
        let y = match form {
            Form::Packed(_) => {
                // A value near the middle of two bfloat16 values may be rounded the other way.
                cases.output("y", Packed::bytes(count, width) as usize / 4, Expect::Bfloats(2f32.powi(-7)))
            }
            Form::Rows => cases.output("y", (count * (width + 4)) as usize, Expect::Floats(STEP)),
            Form::Tagged => cases.output("y", (count * (width + 4)) as usize, Expect::Tagged(2.0 * STEP)),
        };
        let args = step_args(&mut cases, &layer, &rows, &x, &cells, y, form);
        cases.expect(args.state, Expect::Floats(STEP));
        cases.recording.call(delta_step("delta".to_owned(), heads, (count, 1), form.order(), flow, args));
        made.push((layer, cells, rows, tokens, sequences, args));
    }
    let reference = cases.reference();
    let mut after = reference.clone();
    for (layer, cells, rows, tokens, sequences, args) in made {
        let what = format!("{:?}", layer.heads);
        for (row, sequence) in sequences.into_iter().enumerate() {
            let word = |i: u32| reference.u32(args.y, row as u32 * args.y_stride + i);
            let Some(mut sequence) = sequence else {
                for i in 0..layer.heads.output() {
                    match form {
                        Form::Packed(_) => {}
                        Form::Rows => assert_eq!(word(i), POISON, "{what}, row {row} without a sequence"),
                        Form::Tagged => assert_eq!(word(i), TAGS[1], "{what}, row {row} without a sequence"),
                    }
                }
                continue;
            };
            // The recurrence gets the same input values as the kernel, including the change made by the tag.
            let token: Vec<f32> = match form {
                Form::Tagged => tokens[row].iter().map(|v| f32::from_bits(tagged(*v, TAGS[0]))).collect(),
                _ => tokens[row].clone(),
            };
            let wanted = sequence.step(&layer, &token);
            for (i, wanted) in (0..).zip(wanted) {
                let (found, limit) = match form {
                    Form::Packed(order) => {
                        let at = order.index(row as u32, i, args.y_stride) as u32;
                        (reference.weight(Format::Bf16, args.y, at), 2f64.powi(-8))
                    }
                    Form::Rows => (f32::from_bits(word(i)), 2e-6),
                    Form::Tagged => {
                        assert_eq!(word(i) % (1 << TAG_BITS), TAGS[1], "{what}, row {row}");
                        (f32::from_bits(word(i)), 1e-5)
                    }
                };
                let near = (f64::from(found) - wanted).abs() <= limit * (1.0 + wanted.abs());
                assert!(near, "{what}, row {row}, {i}: {found} instead of {wanted}");
            }
            add_pending(&mut after, layer.heads, &args, rows[row][2]);
            cells.check(&after, (args.state, args.window), rows[row][2], &sequence, 2e-6);
        }
    }
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

#[test]
fn a_token_of_each_row() {
    step_cases(Form::Rows);
}

#[test]
fn a_token_of_each_row_packed_for_the_next_product() {
    for order in [PackedOrder::Fragments, PackedOrder::Swizzled] {
        step_cases(Form::Packed(order));
    }
}

#[test]
fn a_token_of_each_row_with_tagged_words() {
    step_cases(Form::Tagged);
}

/// Goal: rejected draft tokens leave no trace in the state, and accepted ones are added exactly once. Method: one
/// recording of three steps with four sequences each. The steps have 3, 4 and 1 tokens per sequence; of those of the
/// first step two are accepted, of those of the second one. One sequence starts at position 0, one continues at 21, one
/// has only two valid rows per step, and the rows of the last belong to no sequence.
#[test]
fn tokens_that_may_be_taken_back() {
    let mut cases = Cases::new("delta_verify");
    let mut random = Random(67);
    let mut made = Vec::new();
    let shapes = [
        (heads(1, 2, 128, 128), false),
        (heads(2, 4, 32, 16), true),
        (heads(1, 3, 48, 32), false),
        (space(1, 3, 48, 32, true), true),
        (space(2, 4, 16, 16, false), false),
    ];
    for (heads, tags) in shapes {
        let layer = Layer::new(&mut random, heads);
        let mut cells = Cells::new(heads);
        let mut sequences: Vec<Sequence> = Vec::new();
        for (cell, start) in (0..).zip([0, 21, 2]) {
            let mut sequence = Sequence::new(heads);
            for token in layer.tokens(&mut random, Gates::Usual, start) {
                sequence.step(&layer, &token);
            }
            sequence.state.iter_mut().for_each(|v| *v = f64::from(*v as f32));
            cells.put(cell, &sequence);
            sequences.push(sequence);
        }
        cases.case(format!("{heads:?}"));
        let flow = match tags {
            true => Flow { input_carried: true, input: TAGS[0], old: 0, output: Some(TAGS[1]) },
            false => Flow::NONE,
        };
        let width = heads.output();
        let pending = cases.output(
            "several.pending",
            heads.pending_bytes(CELLS, MOST_PENDING) as usize / 4,
            Expect::Floats(STEP),
        );
        let mut weights: Option<DeltaStepArgs> = None;
        // The number of tokens in the step, and how many tokens of the step before are accepted.
        for (step, (tokens, accepted)) in [(3u32, 0usize), (4, 2), (1, 1)].into_iter().enumerate() {
            cases.case(format!("{heads:?}.{step}"));
            let (mut rows, mut inputs, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
            for (cell, sequence) in (0..).zip(&mut sequences) {
                let position = sequence.past.len() as u32;
                let mut tried = sequence.clone();
                for n in 0..tokens {
                    let valid = cell != 2 || n < 2;
                    let token: Vec<f32> = layer
                        .token(&mut random, Gates::Usual)
                        .into_iter()
                        .map(|v| if tags { f32::from_bits(tagged(v, flow.input)) } else { v })
                        .collect();
                    rows.push([9, position + n, cell, u32::from(valid)]);
                    wanted.push(valid.then(|| tried.step(&layer, &token)));
                    // The reference sequence keeps only the tokens that the next step accepts.
                    if n < [2, 1, 0][step] {
                        sequence.step(&layer, &token);
                    }
                    inputs.push(token);
                }
            }
            for _ in 0..tokens {
                rows.push([9, 3, 4, 0]);
                wanted.push(None);
                inputs.push(
                    layer
                        .token(&mut random, Gates::Usual)
                        .iter()
                        .map(|v| f32::from_bits(tagged(*v, flow.input)))
                        .collect(),
                );
            }
            let words: Vec<u32> = layer.rows(&inputs).iter().map(|v| v.to_bits()).collect();
            let expect = if tags { Expect::Tagged(3.0 * STEP) } else { Expect::Floats(STEP) };
            let y = cases.output("y", rows.len() * (width + 4) as usize, expect);
            let first = step_args(&mut cases, &layer, &rows, &words, &cells, y, Form::Rows);
            // All steps use the state and the window of the first.
            let base = *weights.get_or_insert(first);
            // The settled position is that of a sequence's first row minus the number of accepted pending tokens.
            let mut settled = vec![POISON; (CELLS * SLOT_WORDS) as usize];
            for row in rows.iter().step_by(tokens as usize) {
                settled[(row[2] * SLOT_WORDS + SLOT_SETTLED) as usize] = row[1] - accepted as u32;
            }
            let slots = cases.words("several.slots", &settled);
            let args = DeltaStepArgs { state: base.state, window: base.window, pending, slots, ..first };
            cases.expect(args.state, Expect::Floats(STEP));
            let label = "delta".to_owned();
            cases.recording.call(match tokens {
                1 => delta_step(label, heads, (4, MOST_PENDING), None, flow, args),
                _ => delta_verify(label, heads, (4, tokens, MOST_PENDING), None, flow, args),
            });
            made.push((heads, flow, args, wanted));
        }
        let base = weights.expect("there are steps");
        made.push((heads, flow, base, Vec::new()));
        let reference = cases.reference();
        for (cell, sequence) in (0..).zip(&sequences) {
            cells.check(&reference, (base.state, base.window), cell, sequence, 2e-6);
        }
    }
    let reference = cases.reference();
    for (heads, flow, args, wanted) in made {
        for (row, wanted) in wanted.into_iter().enumerate() {
            for i in 0..heads.output() {
                let word = reference.u32(args.y, row as u32 * args.y_stride + i);
                match (&wanted, flow.output) {
                    (Some(wanted), tag) => {
                        let (found, limit) = (f64::from(f32::from_bits(word)), if tag.is_some() { 1e-5 } else { 3e-6 });
                        let wanted = wanted[i as usize];
                        let near = (found - wanted).abs() <= limit * (1.0 + wanted.abs());
                        assert!(near, "{heads:?}, row {row}, {i}: {found} instead of {wanted}");
                    }
                    (None, Some(tag)) => assert_eq!(word, tag, "{heads:?}, row {row} without a sequence"),
                    (None, None) => assert_eq!(word, POISON, "{heads:?}, row {row} without a sequence"),
                }
            }
        }
    }
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

/// One prompt's part of a step, or that of a slot that decodes in it.
struct Part {
    slot: u32,
    /// The sequence that the prompt continues, and the cell from which its state is read.
    before: Sequence,
    from: Option<u32>,
    /// Whether the slot decodes; then the part is behind those of all prompts and has one token.
    decodes: bool,
    /// The tokens that steps before have left pending.
    pending: Vec<Vec<f32>>,
    tokens: Vec<Vec<f32>>,
    keeps: [(u32, u32); 2],
}

/// Adds the buffers and calls of a step and returns its operands.
fn prompt_step(
    cases: &mut Cases,
    layer: &Layer,
    parts: &[Part],
    order: Option<PackedOrder>,
    way: DeltaWay,
) -> PromptOperands {
    let heads = layer.heads;
    let mut cells = Cells::new(heads);
    for part in parts {
        if let Some(from) = part.from {
            cells.put(from, &part.before);
        }
    }
    let (decoding, prompts): (Vec<&Part>, Vec<&Part>) = parts.iter().partition(|part| part.decodes);
    let ids = vec![5; prompts.iter().map(|part| part.tokens.len()).sum()];
    let prompts: Vec<PromptRows<'_>> = prompts
        .into_iter()
        .map(|part| PromptRows {
            slot: part.slot,
            start: part.before.past.len() as u32,
            tokens: &ids[..part.tokens.len()],
            last: false,
            next: None,
            from: part.from,
            keeps: &part.keeps,
        })
        .collect();
    let most = parts.len() as u32 + 1;
    let used = (ids.len() + decoding.len()) as u32;
    // Rows after the last one in use, to show that they are neither read nor written.
    let rows = used + 3;
    let mut tokens: Vec<Vec<f32>> = parts.iter().flat_map(|part| part.tokens.clone()).collect();
    tokens.resize(rows as usize, vec![f32::from_bits(POISON); heads.projected() as usize]);
    let width = heads.output();
    let scratch = scratch_bytes(heads, rows, most, way) as usize / 4;
    let layout = ChunkLayout { prompts: most, cells: true };
    let decoding_slots: Vec<u32> = decoding.iter().map(|part| part.slot).collect();
    let mut words = descriptor_mixed(layout, &prompts, &decoding_slots);
    for (index, part) in (prompts.len() as u32..).zip(&decoding) {
        // What `decode_rows` does: an ended sequence has no slot.
        let [slot, position, ..] = part.row();
        words[layout.prompt(index) as usize..][..2].copy_from_slice(&[slot, position]);
    }
    let chunk = cases.words("chunk", &words);
    let cells_at = u64::from(layout.cells(0)) * 4;
    let operands = PromptOperands {
        x: cases.floats("x", &layer.rows(&tokens)),
        stride: layer.stride,
        chunk,
        cells: chunk.part(cells_at, u64::from(layout.last(0)) * 4 - cells_at),
        conv: cases.floats("conv", &layer.conv),
        a_log: cases.floats("a_log", &layer.a_log),
        dt_bias: cases.floats("dt_bias", &layer.dt_bias),
        norm: cases.floats("norm", &layer.norm),
        epsilon: EPSILON,
        state: cases.floats("state", &cells.state),
        window: cases.floats("window", &cells.window),
        scratch: cases.output("scratch", scratch, Expect::Any),
        y: match order {
            Some(_) => cases.output("y", Packed::bytes(rows, width) as usize / 4, Expect::Bfloats(2f32.powi(-7))),
            None => cases.output("y", (rows * (width + 4)) as usize, Expect::Floats(limit(way))),
        },
        y_stride: order.map_or(width + 4, |order| order.stride(rows, width)),
    };
    cases.expect(operands.state, Expect::Floats(limit(way)));
    let decoding = (!decoding.is_empty()).then(|| decoding_rows(cases, layer, &operands, ids.len(), &decoding));
    for call in delta_prompts("delta", heads, (rows, most), order, way, operands, decoding) {
        cases.recording.call(call);
    }
    operands
}

/// Adds the steps that leave tokens pending for slots that decode in a prompt step behind `prompt_rows` rows. Returns the
/// slots' operands.
fn decoding_rows(
    cases: &mut Cases,
    layer: &Layer,
    o: &PromptOperands,
    prompt_rows: usize,
    parts: &[&Part],
) -> DecodingRows {
    let heads = layer.heads;
    let pending_words = heads.pending_bytes(CELLS, MOST_PENDING) as usize / 4;
    let pending = cases.output("pending", pending_words, Expect::Floats(STEP));
    let mut settled = vec![POISON; (CELLS * SLOT_WORDS) as usize];
    for part in parts {
        settled[(part.slot * SLOT_WORDS + SLOT_SETTLED) as usize] = part.before.past.len() as u32;
    }
    let table: Vec<[u32; 4]> =
        vec![[POISON; 4]; prompt_rows].into_iter().chain(parts.iter().map(|part| part.row())).collect();
    let (slots, rows) = (cases.words("slots", &settled), cases.words("rows", &table.concat()));
    for part in parts.iter().filter(|part| !part.pending.is_empty()) {
        let (name, each) = (part.slot, part.pending.len() as u32);
        let table = (part.before.past.len() as u32..).map(|position| [5, position, part.slot, 1]);
        let table: Vec<[u32; 4]> = table.take(each as usize).collect();
        let args = DeltaStepArgs {
            x: cases.floats(&format!("{name}.x"), &layer.rows(&part.pending)),
            rows: cases.words(&format!("{name}.rows"), &table.concat()),
            conv: o.conv,
            a_log: o.a_log,
            dt_bias: o.dt_bias,
            norm: o.norm,
            state: o.state,
            window: o.window,
            pending,
            slots,
            y: cases.output(&format!("{name}.y"), (each * heads.output()) as usize, Expect::Floats(STEP)),
            fault: cases.words(&format!("{name}.fault"), &[0, 0]),
            chunk: o.chunk.none(),
            stride: layer.stride,
            y_stride: heads.output(),
            epsilon: EPSILON,
            x_tag: 0,
            y_tag: 0,
        };
        let label = format!("step.{name}");
        cases.recording.call(match each {
            1 => delta_step(label, heads, (1, MOST_PENDING), None, Flow::NONE, args),
            _ => delta_verify(label, heads, (1, each, MOST_PENDING), None, Flow::NONE, args),
        });
    }
    DecodingRows { most: parts.len() as u32 + 1, rows, slots, pending, entries: MOST_PENDING }
}

/// Compares the reference with the recurrence, then each driver with the reference.
fn check_prompts(name: &str, order: Option<PackedOrder>, steps: &[(Layer, Vec<Part>)]) {
    let vulkan = Vulkan::new();
    let benches: Vec<Bench> = Driver::all().iter().map(|driver| Bench::new(&vulkan, *driver)).collect();
    let mut all: Vec<DeltaWay> = Vec::new();
    for way in benches.iter().flat_map(ways) {
        if !all.contains(&way) {
            all.push(way);
        }
    }
    for way in all {
        let benches: Vec<&Bench> = benches.iter().filter(|bench| ways(bench).contains(&way)).collect();
        // A CPU driver compiles the pipelines of a shape by loads in seconds: there are two in a test.
        let by_loads = matches!(way, DeltaWay::Loads(_)) && std::env::var_os("OSTINATO_TEST_GPU").is_none();
        let tested = |index: usize| match name {
            _ if !by_loads || every_case() => true,
            "lengths" => [0, 1].contains(&(index % shapes().len())),
            "several" => [2, 4].contains(&index),
            "gates" => [0, 1].contains(&index),
            "beside" => [1, 3].contains(&index),
            _ => false,
        };
        let steps: Vec<_> = steps.iter().enumerate().filter(|(index, _)| tested(*index)).collect();
        if steps.is_empty() {
            continue;
        }
        let mut cases = Cases::new(&format!("{name} {way:?}"));
        let mut made = Vec::new();
        for (index, (layer, parts)) in &steps {
            let index = *index;
            cases.case(format!("{index}.{:?}", layer.heads));
            made.push(prompt_step(&mut cases, layer, parts, order, way_of(way, layer.heads, index)));
        }
        let reference = cases.reference();
        for ((_, (layer, parts)), operands) in steps.iter().zip(made) {
            let (cells, at) = (Cells::new(layer.heads), (operands.state, operands.window));
            let mut row = 0;
            for part in parts {
                if part.ended() {
                    row += 1;
                    continue;
                }
                let mut sequence = part.before.clone();
                sequence.state.iter_mut().for_each(|v| *v = f64::from(*v as f32));
                for token in &part.pending {
                    sequence.step(layer, token);
                }
                for (index, token) in (1..).zip(&part.tokens) {
                    let wanted = sequence.step(layer, token);
                    for (i, wanted) in (0..).zip(wanted) {
                        let (found, limit) = match order {
                            Some(order) => {
                                let at = order.index(row, i, operands.y_stride) as u32;
                                (reference.weight(Format::Bf16, operands.y, at), 2f64.powi(-8))
                            }
                            None => (reference.f32(operands.y, row * operands.y_stride + i), 1e-5),
                        };
                        let near = (f64::from(found) - wanted).abs() <= limit * (1.0 + wanted.abs());
                        assert!(near, "{:?}, row {row}, {i}: {found} instead of {wanted}", layer.heads);
                    }
                    for (_, cell) in part.keeps.iter().filter(|(at, _)| *at == index) {
                        cells.check(&reference, at, *cell, &sequence, 1e-6);
                    }
                    row += 1;
                }
                cells.check(&reference, at, part.slot, &sequence, 1e-6);
            }
        }
        for bench in benches {
            cases.check(bench, &reference);
        }
    }
}

/// Returns a prompt of `length` tokens that continues a sequence of `start` tokens.
fn part(random: &mut Random, layer: &Layer, gates: Gates, start: u32, length: u32, slot: u32) -> Part {
    let mut before = Sequence::new(layer.heads);
    for token in layer.tokens(random, gates, start) {
        before.step(layer, &token);
    }
    let tokens = layer.tokens(random, gates, length);
    let from = (start > 0).then_some(slot);
    Part { slot, before, from, decodes: false, pending: Vec::new(), tokens, keeps: [(0, 0); 2] }
}

impl Part {
    /// Whether the sequence of a slot that decodes has ended, so that nothing is known of it.
    fn ended(&self) -> bool {
        self.decodes && self.before.past.is_empty()
    }

    /// Returns the row table's entry of a slot that decodes.
    fn row(&self) -> [u32; 4] {
        match self.ended() {
            true => [0, 0, u32::MAX, 0],
            false => [5, (self.before.past.len() + self.pending.len()) as u32, self.slot, 1],
        }
    }
}

/// Goal: slots that decode in a prompt step get what decode steps give them, whether their last tokens are pending or not, and
/// so do the prompts beside them; the cell of a slot whose sequence has ended stays as it is.
#[test]
fn rows_that_decode_beside_prompts() {
    let mut random = Random(70);
    let mut steps = Vec::new();
    for heads in shapes() {
        let layer = Layer::new(&mut random, heads);
        let row = |random: &mut Random, slot: u32, before: u32, pending: u32| {
            let part = part(random, &layer, Gates::Usual, before, 1, slot);
            Part { decodes: true, pending: layer.tokens(random, Gates::Usual, pending), ..part }
        };
        let parts = vec![
            part(&mut random, &layer, Gates::Usual, 0, 70, 0),
            part(&mut random, &layer, Gates::Usual, 10, 3, 1),
            row(&mut random, 2, 1, 0),
            row(&mut random, 6, 0, 0),
            row(&mut random, 3, 8, 1),
            row(&mut random, 4, 9, 3),
            row(&mut random, 5, 21, 0),
        ];
        steps.push((layer, parts));
    }
    check_prompts("beside", None, &steps);
}

#[test]
fn prompts_of_awkward_lengths() {
    let mut random = Random(62);
    let mut steps = Vec::new();
    for length in [1, 3, 7, 63, 64, 65, 200] {
        for start in [0, 1, 2, 10] {
            let layer = Layer::new(&mut random, shapes()[steps.len() % shapes().len()]);
            let part = part(&mut random, &layer, Gates::Usual, start, length, steps.len() as u32 % CELLS);
            steps.push((layer, vec![part]));
        }
    }
    check_prompts("lengths", None, &steps);
}

#[test]
fn several_prompts_in_one_step_that_keep_and_continue() {
    let mut random = Random(63);
    let mut steps = Vec::new();
    for (index, heads) in shapes().into_iter().enumerate() {
        let layer = Layer::new(&mut random, heads);
        let mut parts = vec![
            part(&mut random, &layer, Gates::Usual, 3, 2, 0),
            part(&mut random, &layer, Gates::Usual, 0, [130, 64, 128, 192, 129, 129, 130][index], 1),
            part(&mut random, &layer, Gates::Usual, 17, 65, 2),
        ];
        // One part starts from a snapshot's cell, one keeps snapshots (also at its very end), and in the last case two
        // parts keep one each.
        parts[0].from = Some(4);
        parts[1].keeps = [(64, 5), ([128, 0, 128, 192, 64, 128, 128][index], 6)];
        parts[2].from = Some(if index % 2 == 0 { 3 } else { 2 });
        if index == 4 {
            parts[1].keeps = [(0, 0), (128, 6)];
            parts[2].keeps = [(64, 5), (0, 0)];
        }
        steps.push((layer, parts));
    }
    check_prompts("several", None, &steps);
}

#[test]
fn prompts_packed_for_the_next_product() {
    for order in [PackedOrder::Fragments, PackedOrder::Swizzled] {
        let mut random = Random(64);
        let mut steps = Vec::new();
        for (index, heads) in
            shapes().into_iter().filter(|heads| heads.output().is_multiple_of(order.block_cols())).enumerate()
        {
            let layer = Layer::new(&mut random, heads);
            let lengths = [[5, 70], [59, 5], [16, 17]][index % 3];
            let parts = (0..)
                .zip(lengths)
                .map(|(slot, length)| part(&mut random, &layer, Gates::Usual, 4 * slot, length, slot));
            let parts = parts.collect();
            steps.push((layer, parts));
        }
        check_prompts("packed", Some(order), &steps);
    }
}

#[test]
fn strong_decay_none_and_closed_gates() {
    let mut random = Random(65);
    let mut steps = Vec::new();
    for (index, gates) in [Gates::Strong, Gates::None, Gates::Closed, Gates::Strong].into_iter().enumerate() {
        let layer = Layer::new(&mut random, shapes()[index]);
        let parts = vec![part(&mut random, &layer, gates, 0, 140, 0), part(&mut random, &layer, gates, 9, 66, 1)];
        steps.push((layer, parts));
    }
    check_prompts("gates", None, &steps);
}

/// Goal: values and states of any size are as accurate as others: by loads, operands are f16, which ends at 65,504. Method: values
/// of 1e12 behind a state of about 1, and values of 1e-12 without one. Elements of a state are differences of values of that
/// size, so they are compared with the largest of them; the outputs' norms hide the size of the former.
#[test]
fn values_of_any_size() {
    let vulkan = Vulkan::new();
    let mut random = Random(68);
    for (scale, start) in [(1e12, 7), (1e-12, 0)] {
        let heads = tiled(2, 4, 32, 16);
        let layer = Layer::new(&mut random, heads);
        let mut part = part(&mut random, &layer, Gates::Usual, start, 140, 0);
        let values = (2 * heads.key * heads.key_dim) as usize..heads.channels() as usize;
        for token in &mut part.tokens {
            token[values.clone()].iter_mut().for_each(|value| *value *= scale);
        }
        for driver in Driver::all() {
            let bench = Bench::new(&vulkan, *driver);
            for way in ways(&bench) {
                let mut cases = Cases::new("sizes");
                cases.case(format!("{scale}"));
                let o = prompt_step(&mut cases, &layer, std::slice::from_ref(&part), None, way);
                let (wanted, found) = (cases.reference(), bench.run(&cases.recording, &cases.before()));
                for i in 0..part.tokens.len() as u32 * o.y_stride {
                    let (wanted, found) = (wanted.f32(o.y, i), found.f32(o.y, i));
                    let near = (found - wanted).abs() <= limit(way) * (1.0 + wanted.abs());
                    assert!(near || i % o.y_stride >= heads.output(), "{way:?}, {scale}, {i}: {found}, not {wanted}");
                }
                let size = (heads.state_bytes(1) / 4) as usize;
                let (wanted, found) = (wanted.floats(o.state), found.floats(o.state));
                let largest = wanted[..size].iter().map(|v| v.abs()).fold(0.0, f32::max);
                let error = wanted[..size].iter().zip(&found).map(|(w, f)| (w - f).abs()).fold(0.0, f32::max);
                println!("{way:?} on {driver:?}: {scale}, states up to {largest:.1e}, error {error:.1e}");
                assert!(
                    largest > 0.1 * scale && error <= limit(way) * largest,
                    "{way:?}: {error:.1e} of {largest:.1e}"
                );
            }
        }
    }
}

/// Goal: a device that processes a prompt in blocks gets the same outputs and state as token by token, and the next
/// token gives the same output after either.
#[test]
fn blocks_do_what_tokens_one_by_one_do() {
    let vulkan = Vulkan::new();
    let mut random = Random(66);
    for (index, (heads, gates)) in
        [(heads(1, 2, 128, 128), Gates::Usual), (heads(2, 4, 32, 16), Gates::None)].into_iter().enumerate()
    {
        let layer = Layer::new(&mut random, heads);
        let prompt = part(&mut random, &layer, gates, 0, 150, 0);
        for driver in Driver::all() {
            let bench = Bench::new(&vulkan, *driver);
            for way in ways(&bench) {
                let mut cases = Cases::new("both");
                cases.case(format!("{index}"));
                let o = prompt_step(&mut cases, &layer, std::slice::from_ref(&prompt), None, way);
                // After the prompt in cell 0 comes one further token. Cell 1 gets all tokens one by one.
                let next = layer.token(&mut random, gates);
                let length = prompt.tokens.len() as u32;
                let width = heads.output() + 4;
                let all: Vec<Vec<f32>> = prompt.tokens.iter().chain([&next]).cloned().collect();
                let words: Vec<u32> = layer.rows(&all).iter().map(|v| v.to_bits()).collect();
                cases.case(format!("{index}.tokens"));
                let x = cases.words("x", &words);
                let mut table: Vec<[u32; 4]> = (0..=length).map(|position| [5, position, 1, 1]).collect();
                table.push([5, length, 0, 1]);
                let rows = cases.words("rows", &table.concat());
                let fault = cases.words("fault", &[0, 0]);
                let y = cases.output("y", ((length + 2) * width) as usize, Expect::Any);
                let pending = cases.output("pending", heads.pending_bytes(CELLS, 1) as usize / 4, Expect::Any);
                // Cell 0 contains the prompt; in cell 1, every token but the first has one pending before it.
                let mut settled = vec![0; (CELLS * SLOT_WORDS) as usize];
                settled[SLOT_SETTLED as usize] = length;
                let slots = cases.words("slots", &settled);
                for row in 0..length + 2 {
                    let (x_bytes, y_bytes) = (u64::from(layer.stride) * 4, u64::from(width) * 4);
                    let args = DeltaStepArgs {
                        x: x.part(u64::from(row.min(length)) * x_bytes, x_bytes),
                        rows: rows.part(u64::from(row) * 16, 16),
                        conv: o.conv,
                        a_log: o.a_log,
                        dt_bias: o.dt_bias,
                        norm: o.norm,
                        state: o.state,
                        window: o.window,
                        pending,
                        slots,
                        y: y.part(u64::from(row) * y_bytes, y_bytes),
                        fault,
                        chunk: x.none(),
                        stride: layer.stride,
                        y_stride: width,
                        epsilon: EPSILON,
                        x_tag: 0,
                        y_tag: 0,
                    };
                    cases.recording.call(delta_step(format!("token.{row}"), heads, (1, 1), None, Flow::NONE, args));
                }
                let memory = bench.run(&cases.recording, &cases.before());
                let (mut worst, mut what, mut squares, mut count) = (0.0f64, String::new(), 0.0, 0.0);
                let mut near = |found: f32, wanted: f32, place: String| {
                    let part = f64::from((found - wanted).abs()) / (1.0 + f64::from(wanted.abs()));
                    (squares, count) = (squares + part * part, count + 1.0);
                    assert!(part <= f64::from(limit(way)), "{way:?}, {place}: {found} in blocks, {wanted} by tokens");
                    if part > worst {
                        (worst, what) = (part, place);
                    }
                };
                for i in 0..heads.output() {
                    for row in 0..length {
                        near(
                            memory.f32(o.y, row * width + i),
                            memory.f32(y, row * width + i),
                            format!("row {row}, {i}"),
                        );
                    }
                    let row = (length + 1) * width + i;
                    near(memory.f32(y, row), memory.f32(y, row - width), format!("the next token, {i}"));
                }
                let size = (heads.state_bytes(1) / 4) as u32;
                for i in 0..size {
                    near(memory.f32(o.state, i), memory.f32(o.state, size + i), format!("state {i}"));
                }
                let mean = f64::sqrt(squares / count);
                println!("{heads:?}, {gates:?}, {way:?} on {driver:?}: {mean:.1e}, {worst:.1e} at {what}");
                assert!(mean <= PARTS_MEAN, "{heads:?}, {way:?}: {mean:.1e}");
            }
        }
    }
}

/// Goal: the probe that tests a device at start passes on one that computes as documented, and sees results that are not: those
/// of a state that is a hundredth larger.
#[test]
fn the_probe_at_start() {
    let vulkan = Vulkan::new();
    let heads = heads(1, 2, 32, 32);
    for driver in Driver::all() {
        let bench = Bench::new(&vulkan, *driver);
        for way in ways(&bench).into_iter().filter(|way| matches!(way, DeltaWay::Loads(_))) {
            let probe = delta_probe::probe(heads, 131, way);
            let found = bench.run(&probe.recording, &probe.memory).floats(probe.results);
            let results = |mut memory: HostMemory| {
                interpreter::run(&probe.recording, &mut memory);
                memory.floats(probe.results)
            };
            let wanted = results(probe.memory.clone());
            let largest = |found: &[f32]| {
                wanted.iter().zip(found).map(|(wanted, found)| (wanted - found).abs()).fold(0.0, f32::max)
            };
            let mut larger = probe.memory.clone();
            let state = probe.results.part(probe.results.bytes - heads.state_bytes(1), heads.state_bytes(1));
            for (i, value) in (0..).zip(probe.memory.floats(state)) {
                larger.set_f32(state, i, 1.01 * value);
            }
            let (error, other) = (largest(&found), largest(&results(larger)));
            println!("{way:?}: {error:.1e}, with another state {other:.1e}");
            assert!(error <= delta_probe::LIMIT / 20.0 && other > delta_probe::LIMIT, "{error:.1e}, {other:.1e}");
        }
    }
}

/// Goal: the shape by loads follows from what a device has, and devices with few registers for it keep the other kernels.
#[test]
fn shapes_by_loads() {
    let units = |m, n, k, subgroup| MatrixUnits { m, n, k, subgroup };
    let wide = heads(16, 32, 128, 128);
    for (units, serves) in [
        (units(16, 16, 16, 32), true),
        (units(16, 16, 16, 64), true),
        (units(16, 8, 16, 32), true),
        (units(8, 16, 16, 16), true),
        // Too many sums for the registers of such devices, and too many invocations for 64 rows.
        (units(8, 8, 16, 8), false),
        (units(16, 16, 16, 16), false),
        (units(8, 8, 16, 64), false),
    ] {
        let shape = DeltaShape::choose(wide, units, 32 * 1024);
        assert_eq!(shape, serves.then_some(DeltaShape { units, together: 1 }), "{units:?}");
        assert!(shape.is_none_or(|shape| DeltaShape::choose(wide, units, shape.shared_bytes(wide) - 1).is_none()));
    }
    assert_eq!(DeltaShape::choose(heads(1, 1, 8, 16), units(16, 16, 16, 32), 32 * 1024), None);
}

#[test]
fn heads_that_are_served() {
    assert!(shapes().into_iter().chain([heads(16, 32, 128, 128), heads(16, 48, 128, 128)]).all(delta_serves));
    for other in
        [heads(0, 0, 16, 16), heads(2, 3, 16, 16), heads(1, 1, 8, 16), heads(1, 1, 16, 144), heads(4, 2, 16, 16)]
    {
        assert!(!delta_serves(other), "{other:?}");
    }
}

#[test]
fn cells_are_laid_out_by_blocks() {
    let layout = ChunkLayout { prompts: 4, cells: true };
    let tokens = [5; BLOCK_ROWS as usize + 1];
    let prompt = |rows: u32, next, from, keeps| PromptRows {
        slot: 0,
        start: 0,
        tokens: &tokens[..rows as usize],
        last: false,
        next,
        from,
        keeps,
    };
    let words = descriptor(
        layout,
        &[
            prompt(1, None, None, &[]),
            prompt(BLOCK_ROWS + 1, Some(77), Some(9), &[(64, 3)]),
            prompt(BLOCK_ROWS, None, Some(0), &[(0, 0), (64, 4)]),
        ],
    );
    let none = u32::MAX;
    let wanted = [[none, 0, none, 0, none, 0, 0, 0], [9, 64, 3, 0, none, 1, 77, 0], [0, 0, 0, 64, 4, 3, 0, 0]];
    assert_eq!(words[layout.cells(0) as usize..][..24], wanted.concat());
}

//! Goal: the kernels of short convolutions match their `reference()` on both CPU drivers, and the reference matches the
//! convolution evaluated token by token. Method: seeded inputs with awkward shapes. Windows, rows and outputs hold NaN
//! wherever a kernel must not read, and words that a kernel must not write must stay unchanged. The convolution is computed
//! here in f64 from the inputs; its own inputs, which are stored, must be equal to the last bit.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, descriptor_mixed};
use ostinato::kernels::delta::RING;
use ostinato::kernels::embed::{BLOCK_ROWS, ChunkLayout, PromptRows};
use ostinato::kernels::gemm::tiled::{Packed, PackedOrder};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::recording::Range;
use ostinato::kernels::shaders::{ShortConvPromptsArgs, ShortConvStepArgs};
use ostinato::kernels::short_conv::{ConvShape, MOST_TOKENS, TAPS, short_conv_prompts, short_conv_step};
use ostinato::kernels::tags::{Flow, TAG_BITS, tagged};
use ostinato::memory::pack::Format;

/// Sums have up to five products.
const NEAR: f32 = 2e-6;
const CELLS: u32 = 9;

fn shape(channels: u32, taps: u32, bias: bool) -> ConvShape {
    ConvShape { channels, taps, bias }
}

/// Shapes that cover each number of taps, one quad of channels, and several workgroups.
fn shapes() -> [ConvShape; 6] {
    [
        shape(4, 3, false),
        shape(36, 3, true),
        shape(64, 4, true),
        shape(128, 3, false),
        shape(260, 2, true),
        shape(320, 5, false),
    ]
}

/// The weights of a layer.
struct Layer {
    shape: ConvShape,
    stride: u32,
    conv: Vec<f32>,
    bias: Vec<f32>,
}

impl Layer {
    fn new(random: &mut Random, shape: ConvShape) -> Layer {
        let channels = shape.channels as usize;
        Layer {
            shape,
            stride: 3 * shape.channels + 8,
            conv: random.floats(channels * shape.taps as usize),
            bias: random.floats(channels),
        }
    }

    fn tokens(&self, random: &mut Random, count: u32) -> Vec<Vec<f32>> {
        (0..count).map(|_| random.floats(3 * self.shape.channels as usize)).collect()
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

    /// Adds the weights to a case.
    fn weights(&self, cases: &mut Cases) -> (Range, Range) {
        let conv = cases.floats("conv", &self.conv);
        let bias = if self.shape.bias { cases.floats("bias", &self.bias) } else { conv.none() };
        (conv, bias)
    }
}

/// The convolution's input u of every token of a sequence so far.
#[derive(Clone, Default)]
struct Sequence {
    past: Vec<Vec<f32>>,
}

impl Sequence {
    fn of(layer: &Layer, tokens: &[Vec<f32>]) -> Sequence {
        let mut sequence = Sequence::default();
        tokens.iter().for_each(|token| {
            sequence.step(layer, token);
        });
        sequence
    }

    /// Processes one token and returns its output.
    fn step(&mut self, layer: &Layer, row: &[f32]) -> Vec<f64> {
        let ConvShape { channels, taps, bias } = layer.shape;
        let (channels, taps) = (channels as usize, taps as usize);
        self.past.push((0..channels).map(|channel| row[channel] * row[2 * channels + channel]).collect());
        let value = |channel: usize| {
            let tap = |j: usize| match (self.past.len() + j).checked_sub(taps) {
                Some(at) => f64::from(layer.conv[channel * taps + j]) * f64::from(self.past[at][channel]),
                None => 0.0,
            };
            let offset = if bias { f64::from(layer.bias[channel]) } else { 0.0 };
            f64::from(row[channels + channel]) * ((0..taps).map(tap).sum::<f64>() + offset)
        };
        (0..channels).map(value).collect()
    }
}

/// Returns windows that contain only poison.
fn windows(shape: ConvShape) -> Vec<f32> {
    vec![f32::from_bits(POISON); shape.window_bytes(CELLS) as usize / 4]
}

/// Writes the inputs that a step needs of a sequence into a cell, and nothing else.
fn put(window: &mut [f32], shape: ConvShape, cell: u32, sequence: &Sequence) {
    for (position, u) in sequence.past.iter().enumerate().rev().take(shape.taps as usize - 1) {
        let at = (cell as usize * RING as usize + position % RING as usize) * u.len();
        window[at..at + u.len()].copy_from_slice(u);
    }
}

/// Checks that a cell holds a sequence's last inputs.
fn check_window(memory: &HostMemory, window: Range, shape: ConvShape, cell: u32, sequence: &Sequence) {
    for (position, u) in sequence.past.iter().enumerate().rev().take(shape.taps as usize - 1) {
        let at = (cell * RING + position as u32 % RING) * shape.channels;
        for (channel, wanted) in (0..).zip(u) {
            let found = memory.f32(window, at + channel);
            assert_eq!(found, *wanted, "{shape:?}, window of {cell}: position {position}, channel {channel}");
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
    fn order(self) -> Option<PackedOrder> {
        match self {
            Form::Packed(order) => Some(order),
            Form::Rows | Form::Tagged => None,
        }
    }

    fn serves(self, shape: ConvShape) -> bool {
        match self {
            Form::Packed(order) => shape.channels.is_multiple_of(order.block_cols()),
            Form::Tagged => shape.channels.is_multiple_of(4),
            Form::Rows => true,
        }
    }

    /// Adds the output of rows to a case. Returns it and its stride.
    fn output(self, cases: &mut Cases, rows: u32, width: u32) -> (Range, u32) {
        match self {
            Form::Packed(order) => {
                // A value near the middle of two bfloat16 values may be rounded the other way.
                let expect = Expect::Bfloats(2f32.powi(-7));
                (cases.output("y", Packed::bytes(rows, width) as usize / 4, expect), order.stride(rows, width))
            }
            Form::Rows => (cases.output("y", (rows * (width + 4)) as usize, Expect::Floats(NEAR)), width + 4),
            Form::Tagged => (cases.output("y", (rows * (width + 4)) as usize, Expect::Tagged(2e-5)), width + 4),
        }
    }

    /// Returns a value of a row's output, and how much it may differ from an exact one.
    fn value(self, memory: &HostMemory, (y, stride): (Range, u32), row: u32, column: u32) -> (f64, f64) {
        match self {
            Form::Packed(order) => {
                let at = order.index(row, column, stride) as u32;
                (memory.weight(Format::Bf16, y, at).into(), 2f64.powi(-8))
            }
            Form::Rows => (memory.f32(y, row * stride + column).into(), 1e-6),
            Form::Tagged => (memory.f32(y, row * stride + column).into(), 1e-5),
        }
    }

    fn check(self, memory: &HostMemory, y: (Range, u32), row: u32, wanted: &[f64], what: &str) {
        for (column, wanted) in (0..).zip(wanted) {
            let (found, limit) = self.value(memory, y, row, column);
            let near = (found - wanted).abs() <= limit * (1.0 + wanted.abs());
            assert!(near, "{what}, row {row}, column {column}: {found} instead of {wanted}");
        }
    }
}

/// The tags of input and output. They differ from the tag of every other operand and from that of poison.
const TAGS: [u32; 2] = [3, 77];

fn check_drivers(cases: &Cases, reference: &HostMemory) {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), reference);
    }
}

/// Tests steps of sequences at several positions, with rows without a sequence, in which draft tokens are rejected. Each case
/// has three steps: of `tokens` tokens for each sequence, of which a part is accepted, of as many again, and of one. A step is
/// then run once more, which must change nothing.
fn step_cases(form: Form) {
    let mut cases = Cases::new(&format!("short_conv_step {form:?}"));
    let mut random = Random(161);
    let (mut made, mut ends) = (Vec::new(), Vec::new());
    let flow = match form {
        Form::Tagged => Flow { input_carried: true, input: TAGS[0], old: 0, output: Some(TAGS[1]) },
        _ => Flow::NONE,
    };
    for (index, shape) in shapes().into_iter().filter(|shape| form.serves(*shape)).enumerate() {
        let layer = Layer::new(&mut random, shape);
        let mut window = windows(shape);
        let mut sequences: Vec<(u32, Sequence)> = (0..)
            .zip([0, 1, 2, 3, 4, 21 + index as u32])
            .map(|(slot, position)| {
                let sequence = Sequence::of(&layer, &layer.tokens(&mut random, position));
                put(&mut window, shape, (slot * 2 + 2) % CELLS, &sequence);
                ((slot * 2 + 2) % CELLS, sequence)
            })
            .collect();
        cases.case(format!("{shape:?}"));
        let window = cases.floats("window", &window);
        let (conv, bias) = layer.weights(&mut cases);
        let tokens = [1, 2, 3, MOST_TOKENS][index % 4];
        for (step, (tokens, accepted)) in [(tokens, tokens.div_ceil(2)), (tokens, 1), (1, 1)].into_iter().enumerate() {
            let (mut rows, mut inputs, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
            for (cell, sequence) in &mut sequences {
                let mut tried = sequence.clone();
                // One sequence has a token less than the step has room for.
                let valid = if tokens > 1 && *cell == 4 { tokens - 1 } else { tokens };
                for n in 0..tokens {
                    let token = layer.tokens(&mut random, 1).remove(0);
                    // The convolution gets the same input values as the kernel, including the change made by the tag.
                    let token: Vec<f32> = match form {
                        Form::Tagged => token.iter().map(|v| f32::from_bits(tagged(*v, TAGS[0]))).collect(),
                        _ => token,
                    };
                    rows.push([9, sequence.past.len() as u32 + n, *cell, u32::from(n < valid)]);
                    wanted.push((n < valid).then(|| tried.step(&layer, &token)));
                    inputs.push(token);
                }
                tried.past.truncate(sequence.past.len() + accepted.min(valid) as usize);
                *sequence = tried;
            }
            for n in 0..tokens {
                rows.push([0, n, u32::MAX, 0]);
                inputs.push(layer.tokens(&mut random, 1).remove(0));
                wanted.push(None);
            }
            let put = |v: &f32| if form == Form::Tagged { tagged(*v, flow.input) } else { v.to_bits() };
            let x: Vec<u32> = layer.rows(&inputs).iter().map(put).collect();
            for again in [false, true] {
                cases.case(format!("{shape:?}.{step}.{again}"));
                let count = rows.len() as u32;
                let (y, y_stride) = form.output(&mut cases, count, shape.channels);
                let args = ShortConvStepArgs {
                    x: cases.words("x", &x),
                    rows: cases.words("rows", &rows.concat()),
                    conv,
                    bias,
                    window,
                    y,
                    fault: cases.words("fault", &[0, 0]),
                    stride: layer.stride,
                    y_stride,
                    x_tag: 0,
                    y_tag: 0,
                };
                let of = (count / tokens, tokens);
                cases.recording.call(short_conv_step("step".to_owned(), shape, of, form.order(), flow, args));
                made.push((shape, (y, y_stride), wanted.clone()));
            }
        }
        ends.push((shape, window, sequences));
    }
    let reference = cases.reference();
    for (shape, y, wanted) in &made {
        for (row, wanted) in (0..).zip(wanted) {
            let what = format!("{shape:?}, {form:?}");
            match wanted {
                Some(wanted) => form.check(&reference, *y, row, wanted, &what),
                None => {
                    for column in 0..shape.channels {
                        let word = || reference.u32(y.0, row * y.1 + column);
                        match form {
                            Form::Packed(_) => {}
                            Form::Rows => assert_eq!(word(), POISON, "{what}, row {row} without a token"),
                            Form::Tagged => assert_eq!(word(), TAGS[1], "{what}, row {row} without a token"),
                        }
                    }
                }
            }
            if let (Form::Tagged, Some(_)) = (form, wanted) {
                assert_eq!(reference.u32(y.0, row * y.1) % (1 << TAG_BITS), TAGS[1], "{what}, row {row}");
            }
        }
    }
    for (shape, window, sequences) in ends {
        sequences.iter().for_each(|(cell, sequence)| check_window(&reference, window, shape, *cell, sequence));
    }
    check_drivers(&cases, &reference);
}

#[test]
fn tokens_of_each_row() {
    step_cases(Form::Rows);
}

#[test]
fn tokens_of_each_row_packed_for_the_next_product() {
    for order in [PackedOrder::Fragments, PackedOrder::Swizzled] {
        step_cases(Form::Packed(order));
    }
}

#[test]
fn tokens_of_each_row_with_tagged_words() {
    step_cases(Form::Tagged);
}

/// A prompt's chunk in a step, or a slot that decodes in it.
struct Part {
    slot: u32,
    before: Sequence,
    /// The cell of what precedes the chunk.
    from: Option<u32>,
    decodes: bool,
    tokens: Vec<Vec<f32>>,
    keeps: [(u32, u32); 2],
}

impl Part {
    /// Returns a prompt of `length` tokens that continues a sequence of `start` tokens.
    fn new(random: &mut Random, layer: &Layer, start: u32, length: u32, slot: u32) -> Part {
        let before = Sequence::of(layer, &layer.tokens(random, start));
        let (from, tokens) = ((start > 0).then_some(slot), layer.tokens(random, length));
        Part { slot, before, from, decodes: false, tokens, keeps: [(0, 0); 2] }
    }

    /// Returns a slot that decodes at a position; at position 0 its sequence has ended.
    fn decoding(random: &mut Random, layer: &Layer, position: u32, slot: u32) -> Part {
        Part { decodes: true, ..Part::new(random, layer, position, 1, slot) }
    }

    fn ended(&self) -> bool {
        self.decodes && self.before.past.is_empty()
    }
}

/// Adds the buffers and the call of a step. Returns its windows, and its output with the stride.
fn prompt_step(cases: &mut Cases, layer: &Layer, parts: &[Part], form: Form) -> (Range, (Range, u32)) {
    let shape = layer.shape;
    let mut window = windows(shape);
    for part in parts {
        if let Some(from) = part.from {
            put(&mut window, shape, from, &part.before);
        }
    }
    let (decoding, prompts): (Vec<&Part>, Vec<&Part>) = parts.iter().partition(|part| part.decodes);
    let ids = vec![5; prompts.iter().map(|part| part.tokens.len()).sum()];
    let rows_of = |part: &&'_ Part| part.tokens.len();
    let prompts: Vec<PromptRows<'_>> = prompts
        .iter()
        .map(|part| PromptRows {
            slot: part.slot,
            start: part.before.past.len() as u32,
            tokens: &ids[..rows_of(part)],
            last: false,
            next: None,
            from: part.from,
            keeps: &part.keeps,
        })
        .collect();
    let layout = ChunkLayout { prompts: parts.len() as u32 + 1, cells: true };
    let slots: Vec<u32> = decoding.iter().map(|part| part.slot).collect();
    let mut words = descriptor_mixed(layout, &prompts, &slots);
    for (index, part) in (prompts.len() as u32..).zip(&decoding) {
        // What `decode_rows` does: an ended sequence has no slot.
        let slot = if part.ended() { u32::MAX } else { part.slot };
        words[layout.prompt(index) as usize..][..2].copy_from_slice(&[slot, part.before.past.len() as u32]);
    }
    // Rows after the last one in use, to show that they are neither read nor written.
    let rows = (ids.len() + decoding.len()) as u32 + 3;
    let mut tokens: Vec<Vec<f32>> = parts.iter().flat_map(|part| part.tokens.clone()).collect();
    tokens.resize(rows as usize, vec![f32::from_bits(POISON); 3 * shape.channels as usize]);
    let chunk = cases.words("chunk", &words);
    let cells_at = u64::from(layout.cells(0)) * 4;
    let (conv, bias) = layer.weights(cases);
    let window = cases.floats("window", &window);
    let (y, y_stride) = form.output(cases, rows, shape.channels);
    let args = ShortConvPromptsArgs {
        x: cases.floats("x", &layer.rows(&tokens)),
        chunk,
        cells: chunk.part(cells_at, u64::from(layout.last(0)) * 4 - cells_at),
        conv,
        bias,
        window,
        y,
        stride: layer.stride,
        y_stride,
    };
    cases.recording.call(short_conv_prompts("prompts".to_owned(), shape, rows, form.order(), args));
    (window, (y, y_stride))
}

/// Compares the reference with the convolution, then each driver with the reference.
fn check_prompts(name: &str, form: Form, steps: &[(Layer, Vec<Part>)]) {
    let mut cases = Cases::new(name);
    let mut made = Vec::new();
    for (index, (layer, parts)) in steps.iter().enumerate() {
        cases.case(format!("{index}.{:?}", layer.shape));
        made.push(prompt_step(&mut cases, layer, parts, form));
    }
    let reference = cases.reference();
    for ((layer, parts), (window, y)) in steps.iter().zip(made) {
        let mut row = 0;
        for part in parts {
            let mut sequence = part.before.clone();
            for (index, token) in (1..).zip(&part.tokens) {
                let wanted = sequence.step(layer, token);
                if !part.ended() {
                    form.check(&reference, y, row, &wanted, &format!("{:?} in {name}", layer.shape));
                }
                for (_, cell) in part.keeps.iter().filter(|(at, _)| *at == index) {
                    check_window(&reference, window, layer.shape, *cell, &sequence);
                }
                row += 1;
            }
            if !part.ended() {
                check_window(&reference, window, layer.shape, part.slot, &sequence);
            }
        }
    }
    check_drivers(&cases, &reference);
}

#[test]
fn prompts_of_awkward_lengths() {
    let mut random = Random(162);
    let mut steps = Vec::new();
    for length in [1, 2, 3, 4, 7, 15, 16, 17, 63, 65, 130] {
        for start in [0, 1, 2, 5, 10] {
            let layer = Layer::new(&mut random, shapes()[steps.len() % shapes().len()]);
            let part = Part::new(&mut random, &layer, start, length, steps.len() as u32 % CELLS);
            steps.push((layer, vec![part]));
        }
    }
    check_prompts("lengths", Form::Rows, &steps);
}

/// Goal: prompts that begin anywhere in a block of rows, of a few rows and of many, get what they get alone; snapshots are kept
/// and continued; slots that decode beside them get the next token, and the cell of one whose sequence has ended stays as it
/// is.
#[test]
fn several_prompts_and_slots_that_decode() {
    let mut random = Random(163);
    let mut steps = Vec::new();
    for (index, shape) in shapes().into_iter().enumerate() {
        let layer = Layer::new(&mut random, shape);
        let mut parts = vec![
            Part::new(&mut random, &layer, 3, 13 + index as u32, 0),
            Part::new(&mut random, &layer, 9, 2, 1),
            Part::new(&mut random, &layer, 0, [BLOCK_ROWS, 66, 128, 130, 65, 129][index], 2),
            Part::new(&mut random, &layer, 6, 1, 3),
        ];
        // The second part starts from a snapshot's cell, the third one keeps snapshots, also at its very end.
        parts[1].from = Some(7);
        parts[2].keeps = [(64, 5), ([0, 0, 128, 128, 0, 128][index], 6)];
        if index % 2 == 0 {
            parts.push(Part::decoding(&mut random, &layer, 12, 4));
            parts.push(Part::decoding(&mut random, &layer, 0, 8));
            let other = Part::decoding(&mut random, &layer, 1, 8);
            parts.push(other);
        }
        steps.push((layer, parts));
    }
    check_prompts("several", Form::Rows, &steps);
}

#[test]
fn prompts_packed_for_the_next_product() {
    for order in [PackedOrder::Fragments, PackedOrder::Swizzled] {
        let form = Form::Packed(order);
        let mut random = Random(164);
        let mut steps = Vec::new();
        for (index, shape) in shapes().into_iter().filter(|shape| form.serves(*shape)).enumerate() {
            let layer = Layer::new(&mut random, shape);
            let lengths = [[5, 70], [59, 5], [15, 18]][index % 3];
            let parts = (0..).zip(lengths);
            let parts = parts.map(|(slot, length)| Part::new(&mut random, &layer, 4 * slot, length, slot)).collect();
            steps.push((layer, parts));
        }
        assert!(!steps.is_empty(), "no shape is packed in {order:?}");
        check_prompts("packed", form, &steps);
    }
}

/// Goal: a window holds what a step of [`MOST_TOKENS`] tokens reads, and what it reads when it is run again.
#[test]
fn taps_that_are_served() {
    assert_eq!((*TAPS.start(), TAPS.end() - 1 + MOST_TOKENS), (2, RING));
}

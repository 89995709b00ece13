//! The exchange between the devices of a replica with tensor parallelism: `all_reduce`, which sums the parts of a product
//! that the devices have computed, and `all_gather`, which collects its columns. Not here: how words pass from one device to
//! another (`actors::proxy`), and which products are in parts (`model::decoder`).

use super::gemm::Activations;
use super::host_memory::HostMemory;
use super::recording::{Call, Range};
use super::shaders::{
    AllGatherArgs, AllGatherConstants, AllReduceArgs, AllReduceConstants, AwaitGateArgs, AwaitGateConstants,
};
use super::tags::{Flow, tagged};
use half::bf16;
use std::ops;

/// The number of floats in a word that passes between devices. A word has 16 bytes: the floats and a check.
const WORD_FLOATS: u32 = 3;
/// The size of a word in bytes.
pub const WORD_BYTES: u64 = 16;
/// The fault word after an exchange that did not end; no call has this number.
pub const EXCHANGE_FAULT: u32 = 0xff_fffe;

/// In the words that a device sends whose fault word is set.
const FAILED: u32 = 0x5bd1_e995;

/// The number of slots of an outbox, and of those for each other device in an inbox. Exchanges use them in turn. At most two
/// exchanges of sums are on the way at a time, one of each microbatch of a prompt step. So a device sends the words of exchange
/// n + 4 only after it has got all of n + 2; the others have sent those after they had got all of n, whose slot is free then.
/// An exchange of logits that does not take place leaves its slot free.
pub const SLOTS: u32 = 4;

/// The number of invocations of a workgroup.
const THREADS: u32 = 128;

/// The maximum number of 16-byte words of a block, which a workgroup sends at once: four for each invocation.
pub const BLOCK_WORDS: u32 = 4 * THREADS;
/// The number of words of a block's place: those of a block, then a cache line of the host's that begins with the header.
const BLOCK_PLACE_WORDS: u32 = BLOCK_WORDS + 4;
/// The number of floats, rounded to bfloat16, in a word of a block.
const BLOCK_WORD_FLOATS: u32 = 8;

/// A device among those that compute a model together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// The device's index.
    pub index: u32,
    /// The number of devices; at least 2.
    pub of: u32,
}

/// The division of the columns of a product (rows of W) among devices, in whole units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The number of columns.
    pub count: u32,
    /// The number of columns of a unit; the last unit may have fewer.
    pub unit: u32,
}

impl Columns {
    /// Returns the columns of a device.
    pub fn part(self, rank: Rank) -> ops::Range<u32> {
        let first = |index: u32| (self.units() * index / rank.of * self.unit).min(self.count);
        first(rank.index)..first(rank.index + 1)
    }

    /// Returns the maximum number of columns of one of `of` devices.
    pub fn most(self, of: u32) -> u32 {
        self.units().div_ceil(of) * self.unit
    }

    /// Returns the number of units.
    pub fn units(self) -> u32 {
        self.count.div_ceil(self.unit)
    }

    /// Returns the number of words in which a device sends its columns of `rows` rows to the others, with the first word, which
    /// tells the number of the others.
    pub fn words(self, rows: u32, of: u32) -> u64 {
        1 + u64::from(rows) * u64::from(self.most(of).div_ceil(WORD_FLOATS))
    }
}

/// The buffers of a device's exchanges.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeBuffers {
    /// The words that the host copies to the other devices; [`outbox_bytes`] long, and behind them `best_words` words.
    pub outbox: Range,
    /// The words that came from the other devices, and the host's word that it has given up; [`inbox_bytes`] long, and behind
    /// them `best_words` words of each other device.
    pub inbox: Range,
    /// One word: the number of the step's first exchange of sums, of scored rows or of the rows that draw, as the call needs.
    pub number: Range,
    /// The fault word.
    pub fault: Range,
    /// The number of words of each of the [`SLOTS`] slots of outbox and inbox.
    pub slot_words: u32,
    /// The number of words at the end of each slot that are for [`Blocks`]. Other words are before them.
    pub block_words: u32,
    /// The number of words of the slot for the best tokens of a step's rows.
    pub best_words: u32,
}

impl ExchangeBuffers {
    /// Returns the number of words at the beginning of each slot that are for words with checks.
    fn checked_words(self) -> u32 {
        self.slot_words - self.block_words
    }
}

/// How a device runs exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeShape {
    /// The device.
    pub rank: Rank,
    /// The maximum number of workgroups: no more than the device runs at once.
    pub workgroups: u32,
    /// The maximum number of polls for a word, about; a host that is well ends a wait earlier.
    pub most_polls: u32,
}

/// The part of an exchange that a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The call sends, and waits for the words of the others.
    Both,
    /// The call only sends.
    Send,
    /// The call receives words. It polls for those that have not come, at most `most_polls` times.
    Receive,
}

impl Phase {
    /// Returns the phase of a call; `None` if it is no exchange.
    pub fn of(call: &Call) -> Option<Phase> {
        let phase = match call.kernel {
            "all_reduce" => AllReduceConstants::from_values(&call.constants).phase,
            "all_gather" => AllGatherConstants::from_values(&call.constants).phase,
            _ => return None,
        };
        Some(match phase {
            0 => Phase::Both,
            1 => Phase::Send,
            _ => Phase::Receive,
        })
    }

    fn code(self) -> u32 {
        match self {
            Phase::Both => 0,
            Phase::Send => 1,
            Phase::Receive => 2,
        }
    }
}

/// Returns the number of words that carry `floats` floats.
pub fn words_of(floats: u64) -> u64 {
    floats.div_ceil(WORD_FLOATS.into())
}

/// The floats of a sum that pass in blocks: rounded to bfloat16, eight in a word without a check. Each block has a place at
/// the slot's end, the first one the last: its words, and behind them the header, a word with their sums and a check. A
/// block is whole if its words have the header's sums. No word with a check is ever stored where a block's words are, nor
/// the reverse: numbers that a model computes would have the right check once in 2^32 words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The number of words of all blocks.
    pub words: u32,
}

impl Blocks {
    /// Returns the blocks that carry `floats` floats.
    pub fn of(floats: u32) -> Blocks {
        Blocks { words: floats.div_ceil(BLOCK_WORD_FLOATS) }
    }

    /// Returns the number of blocks.
    pub fn count(self) -> u32 {
        self.words.div_ceil(BLOCK_WORDS)
    }

    /// Returns the words of a block among those of all blocks.
    fn part(self, block: u32) -> ops::Range<u32> {
        BLOCK_WORDS * block..(BLOCK_WORDS * (block + 1)).min(self.words)
    }

    /// Returns the index of float `i` of word `word` of a block among all floats: neighbouring words have neighbouring ones.
    pub fn float(self, block: u32, word: u32, i: u32) -> u32 {
        let part = self.part(block);
        BLOCK_WORD_FLOATS * part.start + i * part.len() as u32 + word
    }

    /// Returns the places of a block's words, counted from the beginning of a slot of `slot_words` words.
    pub fn places(self, block: u32, slot_words: u32) -> ops::Range<u32> {
        let first = slot_words - BLOCK_PLACE_WORDS * (block + 1);
        first..first + self.part(block).len() as u32
    }

    /// Returns the place of a block's header, the same whatever the number of its words.
    pub fn header(self, block: u32, slot_words: u32) -> u32 {
        slot_words - BLOCK_PLACE_WORDS * block - (BLOCK_PLACE_WORDS - BLOCK_WORDS)
    }

    /// Returns the number of words at a slot's end that the places of all blocks take.
    pub fn slot_words(self) -> u32 {
        BLOCK_PLACE_WORDS * self.count()
    }
}

/// The sums of a block's words, as its header has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockSums([u32; 4]);

impl BlockSums {
    /// Adds words to the sums.
    #[inline]
    pub fn add(&mut self, words: &[[u32; 4]]) {
        for word in words {
            self.0.iter_mut().zip(word).for_each(|(sum, bits)| *sum = sum.wrapping_add(*bits));
        }
    }

    /// Returns the header's data.
    pub fn bits(self) -> [u32; 3] {
        let [a, b, c, d] = self.0;
        [a ^ d.rotate_left(11), b ^ d.rotate_left(22), c]
    }
}

/// Returns the size of a device's outbox in bytes.
pub fn outbox_bytes(slot_words: u32) -> u64 {
    u64::from(SLOTS) * u64::from(slot_words) * WORD_BYTES
}

/// Returns the size of the inbox of one of `of` devices in bytes.
pub fn inbox_bytes(slot_words: u32, of: u32) -> u64 {
    u64::from(of - 1) * outbox_bytes(slot_words) + WORD_BYTES
}

/// Returns the offset in bytes of the word in an inbox that the host sets when it has given up.
pub fn stop_offset(slot_words: u32, of: u32) -> u64 {
    u64::from(of - 1) * outbox_bytes(slot_words)
}

/// Returns the check of a word with these floats in exchange `number`.
pub fn check_of(bits: [u32; 3], number: u32) -> u32 {
    number.wrapping_mul(0x9e37_79b1) ^ bits[0] ^ bits[1].rotate_left(11) ^ bits[2].rotate_left(22)
}

/// Whether a word is complete and of exchange `number`.
pub fn is_complete(word: [u32; 4], number: u32) -> bool {
    word[3] == check_of([word[0], word[1], word[2]], number)
}

/// Returns the fault word of the device that sent a word, if that is set and the word is of exchange `number` or a later
/// one: such a device waits for no other, so it may be ahead.
pub fn sent_fault(word: [u32; 4], number: u32) -> Option<u32> {
    let [_, of, fault, _] = word;
    let bits = [FAILED, of, fault];
    let sent = [bits[0], bits[1], bits[2], check_of(bits, of) ^ FAILED];
    (word == sent && of.wrapping_sub(number) < 1 << 31).then_some(fault)
}

/// The rows that are summed over all devices.
#[derive(Clone, Copy, Debug)]
pub struct Summed {
    /// The number of rows.
    pub rows: u32,
    /// The descriptor of a prompt step, which may have fewer rows.
    pub count: Option<Range>,
    /// The device's part.
    pub x: Activations,
    /// The sum; the same stride.
    pub y: Activations,
    /// Whether the sum is added to y.
    pub adds: bool,
    /// Whether the parts are rounded to bfloat16 and pass in [`Blocks`]. Tagged parts do not.
    pub halves: bool,
    /// The tags of x and y.
    pub flow: Flow,
}

/// Returns the call that sums rows over all devices, exchange `index` of its step.
///
/// # Panics
/// If x and y differ in their strides, or rounded rows are not whole words.
pub fn all_reduce(
    label: String,
    summed: Summed,
    (shape, phase): (ExchangeShape, Phase),
    index: u32,
    buffers: ExchangeBuffers,
) -> Call {
    let Summed { rows, count, x, y, adds, halves, flow } = summed;
    assert!(!halves || flow == Flow::NONE, "\"{label}\": tagged parts are not rounded");
    assert_eq!(x.stride, y.stride, "\"{label}\": the strides of the sum and of the parts");
    let floats = rows * y.stride;
    assert!(!halves || y.stride.is_multiple_of(BLOCK_WORD_FLOATS), "\"{label}\": rows of {} floats", y.stride);
    let (words, room, tasks) = match halves {
        true => (Blocks::of(floats).slot_words(), buffers.block_words, Blocks::of(floats).count()),
        false => (words_of(floats.into()) as u32, buffers.checked_words(), floats.div_ceil(WORD_FLOATS * THREADS)),
    };
    assert!(words <= room, "\"{label}\": {words} words in slots of {room}");
    let args = AllReduceArgs {
        x: x.range,
        y: y.range,
        // Empty ranges, so that no barrier is derived: no word is overwritten before it was read, as the shader explains.
        outbox: buffers.outbox.none(),
        inbox: buffers.inbox.none(),
        number: buffers.number,
        count: count.unwrap_or(buffers.number.none()),
        // An empty range, so that no barrier is derived: calls may set and read the fault word in any order.
        fault: buffers.fault.none(),
        row_count: rows,
        stride: y.stride,
        slot_words: buffers.slot_words,
        index,
        x_tag: flow.input,
        old_tag: flow.old,
        y_tag: flow.output.unwrap_or(0),
    };
    let constants = AllReduceConstants {
        threads: THREADS,
        ranks: shape.rank.of,
        rank: shape.rank.index,
        add: adds.into(),
        counted: count.is_some().into(),
        exchange_polls: shape.most_polls,
        phase: phase.code(),
        tagged: flow.code(),
        halves: halves.into(),
        devices: 0,
    };
    let workgroups = tasks.min(shape.workgroups).max(1);
    let (constants, args) = (constants.into_values(), args.into_args());
    let call = Call { kernel: "all_reduce", label, constants, args, groups: [workgroups, 1, 1] };
    flow.mark(call, x.range, y.range)
}

/// # Panics
/// If a word of another device is missing: the interpreter cannot wait for it.
pub(crate) fn reference_all_reduce(call: &Call, memory: &mut HostMemory) {
    let mut a = AllReduceArgs::from_args(&call.args);
    let c = AllReduceConstants::from_values(&call.constants);
    // They are empty ranges in the call.
    a.outbox.bytes = outbox_bytes(a.slot_words);
    a.inbox.bytes = inbox_bytes(a.slot_words, c.ranks);
    let rows = if c.counted == 1 { memory.u32(a.count, 2).min(a.row_count) } else { a.row_count };
    let floats = rows * a.stride;
    let number = memory.u32(a.number, 0).wrapping_add(a.index);
    let slot = number % SLOTS * a.slot_words;
    if c.halves == 1 {
        return reference_blocks(&a, &c, memory, (floats, number, slot));
    }
    for word in 0..floats.div_ceil(WORD_FLOATS) {
        let here = |i: u32| (WORD_FLOATS * word + i < floats).then_some(WORD_FLOATS * word + i);
        let own: [u32; 3] = std::array::from_fn(|i| here(i as u32).map_or(0, |at| memory.u32(a.x, at)));
        if c.phase != 2 {
            for (i, value) in (0..).zip(own.into_iter().chain([check_of(own, number)])) {
                memory.set_u32(a.outbox, 4 * (slot + word) + i, value);
            }
        }
        if c.phase == 1 {
            continue;
        }
        let mut sum = [0f32; WORD_FLOATS as usize];
        for rank in 0..c.ranks {
            let part = if rank == c.rank {
                own
            } else {
                let got = received(&a, &c, memory, rank, slot + word);
                assert!(is_complete(got, number), "word {word} of exchange {number} has not come from device {rank}");
                [got[0], got[1], got[2]]
            };
            sum.iter_mut().zip(part).for_each(|(sum, bits)| *sum += f32::from_bits(bits));
        }
        for (i, sum) in (0..).zip(sum) {
            let Some(at) = here(i) else { continue };
            let value = if c.add == 1 { memory.f32(a.y, at) + sum } else { sum };
            match c.tagged {
                3 => memory.set_u32(a.y, at, tagged(value, a.y_tag)),
                _ => memory.set_f32(a.y, at, value),
            }
        }
    }
}

/// Returns a word that came from device `rank`.
fn received(a: &AllReduceArgs, c: &AllReduceConstants, memory: &HostMemory, rank: u32, word: u32) -> [u32; 4] {
    let at = 4 * ((rank - u32::from(rank > c.rank)) * SLOTS * a.slot_words + word);
    std::array::from_fn(|i| memory.u32(a.inbox, at + i as u32))
}

/// Computes a call with HALVES 1.
fn reference_blocks(
    a: &AllReduceArgs,
    c: &AllReduceConstants,
    memory: &mut HostMemory,
    (floats, number, slot): (u32, u32, u32),
) {
    let blocks = Blocks::of(floats);
    let half = |memory: &HostMemory, at: u32| u32::from(bf16::from_f32(memory.f32(a.x, at)).to_bits());
    for block in 0..blocks.count() {
        let header = blocks.header(block, a.slot_words);
        let float = |word: u32, i: usize| blocks.float(block, word, i as u32);
        let own: Vec<[u32; 4]> = (0..blocks.part(block).len() as u32)
            .map(|word| {
                let half = |i: usize| half(memory, float(word, i));
                std::array::from_fn(|i| half(2 * i) | half(2 * i + 1) << 16)
            })
            .collect();
        if c.phase != 2 {
            let mut sums = BlockSums::default();
            sums.add(&own);
            let [x, y, z] = sums.bits();
            let of_header = [([x, y, z, check_of([x, y, z], number)], header)];
            let words = own.iter().copied().zip(blocks.places(block, a.slot_words)).chain(of_header);
            for (word, at) in words {
                (0..).zip(word).for_each(|(i, bits)| memory.set_u32(a.outbox, 4 * (slot + at) + i, bits));
            }
        }
        if c.phase == 1 {
            continue;
        }
        let mut sum = vec![0f32; own.len() * BLOCK_WORD_FLOATS as usize];
        for rank in 0..c.ranks {
            let mut part = own.clone();
            if rank != c.rank {
                let places = blocks.places(block, a.slot_words);
                part = places.map(|word| received(a, c, memory, rank, slot + word)).collect();
                let mut sums = BlockSums::default();
                sums.add(&part);
                let [x, y, z, check] = received(a, c, memory, rank, slot + header);
                let whole = is_complete([x, y, z, check], number) && [x, y, z] == sums.bits();
                assert!(whole, "block {block} of exchange {number} has not come from device {rank}");
            }
            let bits = part.as_flattened().iter().flat_map(|pair| [*pair as u16, (*pair >> 16) as u16]);
            sum.iter_mut().zip(bits).for_each(|(sum, bits)| *sum += bf16::from_bits(bits).to_f32());
        }
        for (i, sum) in sum.into_iter().enumerate() {
            let each = BLOCK_WORD_FLOATS as usize;
            let at = float((i / each) as u32, i % each);
            let value = if c.add == 1 { memory.f32(a.y, at) + sum } else { sum };
            memory.set_f32(a.y, at, value);
        }
    }
}

/// The number of calls of [`await_gate`] that may be queued at a time.
pub const AWAITED_TURNS: u32 = 256;

/// The gate that a call of [`await_gate`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateOf {
    /// That of the messages from the stage before.
    Messages,
    /// That of the changes of slots from the last stage.
    Returns,
}

impl GateOf {
    /// Returns the offset of the gate's number in the buffer of [`await_gate`].
    pub fn offset(self) -> u64 {
        match self {
            GateOf::Messages => 0,
            GateOf::Returns => 4,
        }
    }
}

/// The size in bytes of the buffer of [`await_gate`]: the numbers up to which the host has opened both gates, the number of calls
/// so far, and the numbers that calls wait for, one call after the other.
pub const AWAITED_BYTES: u64 = awaited_offset(AWAITED_TURNS - 1) + 4;

/// Returns the offset in that buffer of the number that call `turn` waits for, counted from 0.
pub const fn awaited_offset(turn: u32) -> u64 {
    32 + 4 * (turn % AWAITED_TURNS) as u64
}

/// Returns the call that keeps a device busy until the host has opened a gate up to the number that the call waits for, or for
/// `polls` polls. `numbers` are [`AWAITED_BYTES`] bytes.
pub fn await_gate(label: String, gate: GateOf, numbers: Range, polls: u32) -> Call {
    let constants = AwaitGateConstants { threads: 1, turns: AWAITED_TURNS }.into_values();
    let (word, turns) = (numbers.part(gate.offset(), 4), numbers.part(16, AWAITED_BYTES - 16));
    let args = AwaitGateArgs { word, turns, polls }.into_args();
    Call { kernel: "await_gate", label, constants, args, groups: [1, 1, 1] }
}

pub(crate) fn reference_await_gate(call: &Call, memory: &mut HostMemory) {
    let args = AwaitGateArgs::from_args(&call.args);
    let calls = memory.u32(args.turns, 0);
    memory.set_u32(args.turns, 0, calls.wrapping_add(1));
}

/// Rows whose columns are collected from all devices.
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    /// The number of rows; the most, if they are listed.
    pub rows: u32,
    /// All columns. The device has those of its rank.
    pub columns: Columns,
    /// The device's columns, and the number of words from a row to the next.
    pub x: (Range, u32),
    /// All columns, the same; `None` if this device does not keep them.
    pub y: Option<(Range, u32)>,
    /// Whether x is in its place in y.
    pub in_place: bool,
    /// The rows.
    pub from: GatheredRows,
    /// The index of the exchange, from the number on that the buffers name.
    pub index: u32,
}

/// The rows of [`Gathered`], and where their words pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatheredRows {
    /// The rows of a list, if it lists any.
    List(Range),
    /// All rows, through the slot for the best tokens; exchanges of listed rows follow if the first word of the list says so.
    BeforeList(Range),
    /// All rows, in an exchange of each repetition of a region; the word counts the repetitions.
    Turn(Range),
}

/// Returns the call that collects the columns of rows from all devices.
pub fn all_gather(
    label: String,
    gathered: Gathered,
    (shape, phase): (ExchangeShape, Phase),
    buffers: ExchangeBuffers,
) -> Call {
    let Gathered { rows, columns, x, y, in_place, from, index } = gathered;
    let ExchangeShape { rank, workgroups, most_polls } = shape;
    let words = columns.words(rows, rank.of);
    let best = matches!(from, GatheredRows::BeforeList(_));
    let room = if best { buffers.best_words } else { buffers.checked_words() };
    assert!(words <= room.into(), "\"{label}\": {words} words in slots of {room}");
    let none = buffers.number.none();
    let (list, turn) = match from {
        GatheredRows::List(list) | GatheredRows::BeforeList(list) => (list, none),
        // Nobody looks at what the exchange says of the next one.
        GatheredRows::Turn(turn) => (buffers.number, turn),
    };
    let args = AllGatherArgs {
        x: x.0,
        y: y.map_or(x.0.none(), |(range, _)| range),
        // Empty ranges, as for `all_reduce`.
        outbox: buffers.outbox.none(),
        inbox: buffers.inbox.none(),
        number: buffers.number,
        turn,
        list,
        fault: buffers.fault.none(),
        row_count: rows,
        columns: columns.count,
        units: columns.units(),
        unit: columns.unit,
        x_stride: x.1,
        y_stride: y.map_or(0, |(_, stride)| stride),
        slot_words: buffers.slot_words,
        best_words: buffers.best_words,
        index,
    };
    let constants = AllGatherConstants {
        threads: THREADS,
        ranks: rank.of,
        rank: rank.index,
        listed: matches!(from, GatheredRows::List(_)).into(),
        turned: matches!(from, GatheredRows::Turn(_)).into(),
        exchange_polls: most_polls,
        phase: phase.code(),
        keeps: match (y, in_place) {
            (None, _) => 0,
            (Some(_), true) => 1,
            (Some(_), false) => 2,
        },
        best: best.into(),
    };
    let workgroups = (words as u32).div_ceil(THREADS).min(workgroups).max(1);
    let (constants, args) = (constants.into_values(), args.into_args());
    Call { kernel: "all_gather", label, constants, args, groups: [workgroups, 1, 1] }
}

/// # Panics
/// If a word of another device is missing: the interpreter cannot wait for it.
pub(crate) fn reference_all_gather(call: &Call, memory: &mut HostMemory) {
    let mut a = AllGatherArgs::from_args(&call.args);
    let c = AllGatherConstants::from_values(&call.constants);
    let stop = u64::from(c.ranks - 1) * outbox_bytes(a.slot_words) / WORD_BYTES;
    // They are empty ranges in the call.
    a.outbox.bytes = outbox_bytes(a.slot_words) + u64::from(a.best_words) * WORD_BYTES;
    a.inbox.bytes = inbox_bytes(a.slot_words, c.ranks) + u64::from((c.ranks - 1) * a.best_words) * WORD_BYTES;
    if c.listed == 1 && memory.u32(a.list, 0) == 0 {
        return;
    }
    let count = if c.listed == 1 { memory.u32(a.list, 1).min(a.row_count) } else { a.row_count };
    let rows: Vec<u32> = (0..count).map(|at| if c.listed == 1 { memory.u32(a.list, 2 + at) } else { at }).collect();
    let turn = if c.turned == 1 { memory.u32(a.turn, 0) } else { 0 };
    let number = memory.u32(a.number, 0).wrapping_add(a.index).wrapping_add(turn);
    let columns = Columns { count: a.columns, unit: a.unit };
    let part_of = |index: u32| columns.part(Rank { index, of: c.ranks });
    let each = columns.most(c.ranks).div_ceil(WORD_FLOATS);
    let slot = if c.best == 1 { SLOTS * a.slot_words } else { number % SLOTS * a.slot_words };
    let mut sent = vec![[count * each, memory.u32(a.list, 0), 0]];
    for (row, word) in rows.iter().flat_map(|row| (0..each).map(move |word| (*row, word))) {
        let load = |i: u32| (i < part_of(c.rank).len() as u32).then(|| memory.u32(a.x, row * a.x_stride + i));
        sent.push(std::array::from_fn(|i| load(WORD_FLOATS * word + i as u32).unwrap_or(0)));
    }
    for (word, bits) in (0..).zip(sent.iter().filter(|_| c.phase != 2)) {
        for (i, value) in (0..).zip(bits.iter().copied().chain([check_of(*bits, number)])) {
            memory.set_u32(a.outbox, 4 * (slot + word) + i, value);
        }
    }
    for rank in (0..c.ranks).filter(|_| c.phase != 1) {
        let place = rank - u32::from(rank > c.rank);
        let at = if c.best == 1 { stop as u32 + 1 + place * a.best_words } else { place * SLOTS * a.slot_words + slot };
        let part = part_of(rank);
        for (word, own) in (0..).zip(&sent) {
            let mut bits = *own;
            if rank != c.rank {
                let got: [u32; 4] = std::array::from_fn(|i| memory.u32(a.inbox, 4 * (at + word) + i as u32));
                assert!(is_complete(got, number), "word {word} of exchange {number} has not come from device {rank}");
                bits = [got[0], got[1], got[2]];
            }
            let keeps = if rank == c.rank { c.keeps == 2 } else { c.keeps != 0 };
            let Some(index) = u32::checked_sub(word, 1).filter(|_| keeps) else { continue };
            let (row, first) = (rows[(index / each) as usize], index % each * WORD_FLOATS);
            for (i, value) in (first..).zip(bits).filter(|(i, _)| *i < part.len() as u32) {
                memory.set_u32(a.y, row * a.y_stride + part.start + i, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: headers are where no exchange has words of blocks, however many floats each has, and both are at the slot's end.
    #[test]
    fn headers_of_blocks_have_places_of_their_own() {
        let exchanges = [8, 4096, 8 * BLOCK_WORDS + 8, 16 * BLOCK_WORDS, 24 * BLOCK_WORDS - 8].map(Blocks::of);
        let most = exchanges.iter().map(|blocks| blocks.slot_words()).max().expect("there are exchanges");
        let slot_words = most + 40;
        let each = |blocks: &Blocks| (0..blocks.count()).map(|block| (*blocks, block)).collect::<Vec<_>>();
        let all = || exchanges.iter().flat_map(each);
        let headers: Vec<u32> = all().map(|(blocks, block)| blocks.header(block, slot_words)).collect();
        for (blocks, block) in all() {
            let places = blocks.places(block, slot_words);
            assert!(headers.iter().all(|header| !places.contains(header) && (40..slot_words).contains(header)));
            assert!(places.start >= 40 && places.start % 4 == 0, "{blocks:?} {block}: {places:?}");
            let mut others = (0..blocks.count()).filter(|other| *other != block);
            let apart = |other: u32| {
                let of_other = blocks.places(other, slot_words);
                places.end <= of_other.start || of_other.end <= places.start
            };
            assert!(others.all(apart), "{blocks:?} {block}: {places:?}");
        }
    }

    /// Goal: words that are still those of memory of zeros do not have the sums of words of equal floats.
    #[test]
    fn blocks_that_lack_words_have_other_sums() {
        for value in [1.0, -1.0, 2.0, 0.5, -0.0, 448.0] {
            let bits = u32::from(bf16::from_f32(value).to_bits());
            let mut sums = BlockSums::default();
            let whole: Vec<[u32; 3]> = (0..=BLOCK_WORDS)
                .map(|_| {
                    let of_those_before = sums.bits();
                    sums.add(&[[bits << 16 | bits; 4]]);
                    of_those_before
                })
                .collect();
            for words in [1, 2, 7, BLOCK_WORDS] {
                let same = whole[..words as usize].iter().filter(|sums| **sums == whole[words as usize]).count();
                assert_eq!(same, 0, "{words} words of {value}");
            }
        }
    }

    #[test]
    fn words_of_other_exchanges_torn_words_and_memory_of_zeros_are_not_complete() {
        let word = |floats: [f32; 3], number: u32| {
            let bits = floats.map(f32::to_bits);
            [bits[0], bits[1], bits[2], check_of(bits, number)]
        };
        let (old, new) = (word([1.0, -2.5, 3.25], 7), word([1.0, -2.5, 3.5], 9));
        assert!(is_complete(old, 7) && is_complete(new, 9));
        assert!(!is_complete(old, 9) && !is_complete([0; 4], 9));
        let failed = |of: u32, fault: u32| {
            let bits = [FAILED, of, fault];
            [FAILED, of, fault, check_of(bits, of) ^ FAILED]
        };
        for (of, number) in [(9, 9), (11, 9), (1, u32::MAX)] {
            assert_eq!(sent_fault(failed(of, 5), number), Some(5));
        }
        assert!([failed(7, 5), new, [0; 4]].into_iter().all(|word| sent_fault(word, 9).is_none()));
        assert!((0..1000).all(|of| !is_complete(failed(of, 3), of) && sent_fault(word([0.0; 3], of), 9).is_none()));
        for mixed in 1..15u32 {
            let torn: [u32; 4] = std::array::from_fn(|i| if mixed >> i & 1 == 1 { new[i] } else { old[i] });
            // A word whose differing parts are all new is the new word.
            let whole = torn == new;
            assert_eq!(is_complete(torn, 9), whole, "{mixed:b}");
        }
    }
}

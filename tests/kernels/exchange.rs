//! Goal: `all_reduce` sends a device's part, and sums the parts of all devices in their order, bit for bit as its
//! reference does. Method: 2 to 4 devices, each in every place, awkward widths, padding, prompt steps with fewer rows
//! than their regions, all slots, parts rounded to bfloat16, and both phases of an exchange alone; on both CPU
//! drivers. A part that never comes must end the call with the fault word set, and a device with the fault word set
//! must tell the others. The same of `all_gather`, which collects columns, with lists of rows and columns that are not
//! divided equally.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, POISON, Random};
use half::bf16;
use ostinato::kernels::exchange::{
    AWAITED_BYTES, AWAITED_TURNS, BlockSums, Blocks, Columns, EXCHANGE_FAULT, ExchangeBuffers, ExchangeShape, GateOf,
    Gathered, GatheredRows, Phase, Rank, SLOTS, Summed, WORD_BYTES, all_gather, all_reduce, await_gate, awaited_offset,
    check_of, inbox_bytes, is_complete, outbox_bytes, sent_fault, words_of,
};
use ostinato::kernels::gemm::Activations;
use ostinato::kernels::recording::Range;
use ostinato::kernels::tags::Flow;

/// An exchange of a test.
struct Exchange {
    rank: Rank,
    rows: u32,
    stride: u32,
    /// The number of rows of a prompt step.
    used: Option<u32>,
    number: u32,
    phase: Phase,
    adds: bool,
    halves: bool,
}

/// Returns the number of words of a slot for exchanges of so many floats, in words with checks or in blocks.
fn slot_words(floats: u32) -> u32 {
    words_of(floats.into()) as u32 + 5 + Blocks::of(floats).slot_words()
}

/// Records an exchange with random parts. Returns the sum's and the outbox's ranges, and the parts of all devices.
fn record(cases: &mut Cases, random: &mut Random, of: &Exchange, comes: bool) -> (Range, Range, Range, Vec<Vec<f32>>) {
    let floats = of.rows * of.stride;
    let used = of.used.unwrap_or(of.rows) * of.stride;
    let slot_words = slot_words(floats);
    let parts: Vec<Vec<f32>> = (0..of.rank.of).map(|_| (0..floats).map(|_| random.float() * 3.0).collect()).collect();
    let mut inbox = vec![POISON; (inbox_bytes(slot_words, of.rank.of) / 4) as usize];
    let stop = inbox.len() - 4;
    inbox[stop..].fill(0);
    let others = parts.iter().zip(0..).filter(|(_, rank)| *rank != of.rank.index);
    for (place, (part, _)) in (0u32..).zip(others).filter(|_| comes) {
        let first = (place * SLOTS + of.number % SLOTS) * slot_words;
        let mut put = |word: u32, bits: [u32; 4]| {
            let at = (first + word) as usize * 4;
            inbox[at..at + 4].copy_from_slice(&bits);
        };
        let checked = |[x, y, z]: [u32; 3]| [x, y, z, check_of([x, y, z], of.number)];
        let part = &part[..used as usize];
        if !of.halves {
            for (word, floats) in (0..).zip(part.chunks(3)) {
                put(word, checked(std::array::from_fn(|i| floats.get(i).map_or(0, |x| x.to_bits()))));
            }
            continue;
        }
        let half = |x: f32| u32::from(bf16::from_f32(x).to_bits());
        let blocks = Blocks::of(used);
        for block in 0..blocks.count() {
            let mut sums = BlockSums::default();
            for (word, at) in (0..).zip(blocks.places(block, slot_words)) {
                let half = |i: usize| half(part[blocks.float(block, word, i as u32) as usize]);
                let bits = std::array::from_fn(|i| half(2 * i) | half(2 * i + 1) << 16);
                sums.add(&[bits]);
                put(at, bits);
            }
            put(blocks.header(block, slot_words), checked(sums.bits()));
        }
    }
    let x: Vec<f32> = (0..floats).map(|_| random.float()).collect();
    let (x, y) = (cases.floats("x", &parts[of.rank.index as usize]), cases.floats("y", &x));
    let (index, first) = (3, of.number - 3);
    let buffers = ExchangeBuffers {
        outbox: cases.words("outbox", &vec![POISON; (outbox_bytes(slot_words) / 4) as usize]),
        inbox: cases.words("inbox", &inbox),
        number: cases.words("number", &[first]),
        fault: cases.words("fault", &[0, 0]),
        slot_words,
        block_words: Blocks::of(floats).slot_words(),
        best_words: 0,
    };
    let count = of.used.map(|used| cases.words("chunk", &[1, 0, used, 0]));
    let [part, sum] = [x, y].map(|range| Activations { range, stride: of.stride });
    let shape = (ExchangeShape { rank: of.rank, workgroups: 3, most_polls: 64 }, of.phase);
    let summed = Summed { rows: of.rows, count, x: part, y: sum, adds: of.adds, halves: of.halves, flow: Flow::NONE };
    cases.recording.call(all_reduce("sum".to_owned(), summed, shape, index, buffers));
    (y, buffers.outbox, buffers.fault, parts)
}

#[test]
fn parts_of_all_devices_are_summed_in_their_order() {
    let mut cases = Cases::new("all_reduce");
    let mut random = Random(91);
    let mut made = Vec::new();
    let mut number = 3;
    for of in 2..=4 {
        for index in 0..of {
            // Several blocks in the last two.
            let sizes =
                [(1, 32, None), (1, 1024, None), (3, 64, None), (8, 96, Some(5)), (9, 1024, None), (5, 2048, Some(3))];
            for ((rows, stride, used), halves) in sizes.into_iter().flat_map(|size| [(size, false), (size, true)]) {
                number += 1;
                let phase = [Phase::Both, Phase::Receive, Phase::Send][(number / 2) as usize % 3];
                let adds = number / 3 % 2 == 0;
                let of = Exchange { rank: Rank { index, of }, rows, stride, used, number, phase, adds, halves };
                cases.case(format!("{index} of {} {rows} x {stride} {phase:?} {number}", of.rank.of));
                let made_of = record(&mut cases, &mut random, &of, true);
                made.push((made_of, of));
            }
        }
    }
    let (before, reference) = (cases.before(), cases.reference());
    for ((x, outbox, _, parts), of) in made {
        let used = of.used.unwrap_or(of.rows) * of.stride;
        for i in 0..of.rows * of.stride {
            let sent = |x: f32| if of.halves { bf16::from_f32(x).to_f32() } else { x };
            let sum = parts.iter().fold(0f32, |sum, part| sum + sent(part[i as usize]));
            let old = before.f32(x, i);
            let wanted = match () {
                () if of.phase == Phase::Send || i >= used => old,
                () if of.adds => old + sum,
                () => sum,
            };
            assert_eq!(reference.f32(x, i).to_bits(), wanted.to_bits(), "float {i}");
        }
        let sent = of.phase != Phase::Receive;
        let own = &parts[of.rank.index as usize];
        let slot_words = slot_words(of.rows * of.stride);
        let place = if of.halves { Blocks::of(used).places(0, slot_words).start } else { 0 };
        let first = |slot: u32| reference.u32(outbox, (slot * slot_words + place) * 4);
        let low = |word: u32| if of.halves { word & 0xffff } else { word };
        let wanted = if of.halves { bf16::from_f32(own[0]).to_bits().into() } else { own[0].to_bits() };
        assert_eq!(first(of.number % SLOTS) != POISON && low(first(of.number % SLOTS)) == wanted, sent);
        let mut others = (0..SLOTS).filter(|slot| *slot != of.number % SLOTS);
        assert!(others.all(|slot| first(slot) == POISON), "the other slots");
    }
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

#[test]
fn a_part_that_never_comes_ends_the_call_with_a_fault() {
    let vulkan = Vulkan::new();
    for (driver, halves) in Driver::all().iter().flat_map(|driver| [(driver, false), (driver, true)]) {
        let mut cases = Cases::new("all_reduce");
        let mut random = Random(92);
        cases.case("missing".to_owned());
        let rank = Rank { index: 0, of: 2 };
        let of = Exchange { rank, rows: 1, stride: 96, used: None, number: 8, phase: Phase::Both, adds: true, halves };
        let (x, outbox, fault, _) = record(&mut cases, &mut random, &of, false);
        let before = cases.before();
        let after = Bench::new(&vulkan, *driver).run(&cases.recording, &before);
        assert_eq!(after.u32(fault, 0), EXCHANGE_FAULT);
        assert_eq!(after.floats(x), before.floats(x), "the stream keeps its values");

        // With the fault word set, the device sends words that no device takes for sums.
        let mut before = cases.before();
        before.set_u32(fault, 0, 7);
        let after = Bench::new(&vulkan, *driver).run(&cases.recording, &before);
        let header = Blocks::of(96).header(0, slot_words(96));
        for word in if halves { header..header + 1 } else { 0..32 } {
            let sent: [u32; 4] = std::array::from_fn(|i| after.u32(outbox, word * 4 + i as u32));
            assert_eq!(sent_fault(sent, 8), Some(7), "{sent:x?}");
        }
    }
}

/// Goal: a block that has not the sums of its header ends the call with a fault, and is not added. Method: its last word is
/// lost.
#[test]
fn a_block_that_stays_torn_ends_the_call_with_a_fault() {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let mut cases = Cases::new("all_reduce");
        let mut random = Random(94);
        cases.case("torn".to_owned());
        let rank = Rank { index: 1, of: 2 };
        let (rows, stride) = (5, 1024);
        let of = Exchange { rank, rows, stride, used: None, number: 9, phase: Phase::Both, adds: true, halves: true };
        let (x, _, fault, _) = record(&mut cases, &mut random, &of, true);
        let inbox = cases.recording.buffers.iter().position(|decl| decl.name.ends_with("inbox")).expect("there is one");
        let (floats, slot_words) = (rows * stride, slot_words(rows * stride));
        let blocks = Blocks::of(floats);
        assert!(blocks.count() > 1);
        let second = blocks.places(1, slot_words);
        let lost = ((slot_words + second.end - 1) * 4) as usize;
        let mut before = cases.before();
        before.buffers[inbox][lost..lost + 4].fill(0);
        let after = Bench::new(&vulkan, *driver).run(&cases.recording, &before);
        assert_eq!(after.u32(fault, 0), EXCHANGE_FAULT);
        let kept = blocks.float(1, 0, 0) as usize;
        let (had, has) = (before.floats(x), after.floats(x));
        assert_eq!(had[kept..], has[kept..], "the stream keeps its values");
        assert_ne!(had[..kept], has[..kept], "the first block is whole");
    }
}

/// Goal: the wait for a gate ends when the host has written a number that is high enough, also beyond the numbers' end, and by
/// itself otherwise; each call waits for the number of its turn. Method: a call that took another turn's number would poll for
/// longer than the test may take, except those that end after their polls.
#[test]
fn a_wait_for_a_gate_ends() {
    let vulkan = Vulkan::new();
    let turns = [0, 5, AWAITED_TURNS - 1, AWAITED_TURNS, 3 * AWAITED_TURNS + 7];
    for driver in Driver::all() {
        let mut cases = Cases::new("await_gate");
        for (open, wanted, polls) in
            [(7, 7, u32::MAX), (9, 7, u32::MAX), (1, u32::MAX, u32::MAX), (6, 7, 50), (0, 1, 0)]
        {
            for turn in turns {
                cases.case(format!("{open} {wanted} {turn}"));
                // Another turn's number never comes.
                let mut numbers = vec![open + 1000; (AWAITED_BYTES / 4) as usize];
                // The other gate is not open.
                let gate = [GateOf::Messages, GateOf::Returns][turn as usize % 2];
                let at = (gate.offset() / 4) as usize;
                (numbers[at], numbers[1 - at], numbers[4]) = (open, wanted.wrapping_sub(1), turn);
                numbers[(awaited_offset(turn) / 4) as usize] = wanted;
                let numbers = cases.words("numbers", &numbers);
                cases.recording.call(await_gate("await_gate".to_owned(), gate, numbers, polls));
            }
        }
        let reference = cases.reference();
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

/// Rows whose columns are collected in a test.
#[derive(Clone, Copy, Debug)]
struct Columned {
    rank: Rank,
    columns: Columns,
    rows: u32,
    /// The listed rows; `None` for all rows.
    listed: Option<&'static [u32]>,
    /// Whether the exchange is that of the best tokens.
    best: bool,
    /// The number of repetitions before.
    turn: Option<u32>,
    phase: Phase,
    keeps: bool,
    in_place: bool,
}

/// The number of the exchanges below.
const NUMBER: u32 = 41;

/// The values of all columns of the rows.
fn values(of: &Columned, random: &mut Random) -> Vec<f32> {
    (0..of.rows * of.columns.count).map(|_| random.float()).collect()
}

/// Records the collection of columns. Returns the ranges of all columns, the outbox and the fault word.
fn record_gather(cases: &mut Cases, of: &Columned, all: &[f32], comes: bool) -> (Range, Range, Range) {
    let (Columns { count, .. }, own) = (of.columns, of.columns.part(of.rank));
    let words = of.columns.words(of.rows, of.rank.of) as u32;
    let (slot_words, best_words) = (words + 3, if of.best { words } else { 0 });
    let rows: Vec<u32> = of.listed.map_or((0..of.rows).collect(), <[u32]>::to_vec);
    let number = NUMBER + of.turn.unwrap_or(0);
    let behind = (of.rank.of - 1) * best_words * 4;
    let mut inbox = vec![POISON; (inbox_bytes(slot_words, of.rank.of) / 4) as usize + behind as usize];
    let stop = (of.rank.of - 1) * SLOTS * slot_words;
    inbox[stop as usize * 4..][..4].fill(0);
    let others = (0..of.rank.of).filter(|rank| *rank != of.rank.index);
    for (place, rank) in (0u32..).zip(others).filter(|_| comes) {
        let first = match of.best {
            true => stop + 1 + place * best_words,
            false => (place * SLOTS + number % SLOTS) * slot_words,
        };
        let part = of.columns.part(Rank { index: rank, ..of.rank });
        let each = of.columns.most(of.rank.of).div_ceil(3);
        let mut sent = vec![[rows.len() as u32 * each, 1, 0]];
        for (row, word) in rows.iter().flat_map(|row| (0..each).map(move |word| (*row, word))) {
            let at = |i: usize| part.start + word * 3 + i as u32;
            let value = |i: usize| all[(row * count + at(i)) as usize].to_bits();
            sent.push(std::array::from_fn(|i| if at(i) < part.end { value(i) } else { 0 }));
        }
        for (word, bits) in (first as usize..).zip(sent) {
            inbox[word * 4..][..3].copy_from_slice(&bits);
            inbox[word * 4 + 3] = check_of(bits, number);
        }
    }
    let (x_stride, y_stride) = (own.len() as u32 + 2, count + 4);
    let mut y = vec![POISON; (of.rows * y_stride) as usize];
    let mut x = vec![POISON; (of.rows * x_stride) as usize];
    for row in 0..of.rows {
        for (i, column) in (0..).zip(own.clone()) {
            let bits = all[(row * count + column) as usize].to_bits();
            x[(row * x_stride + i) as usize] = bits;
            if of.in_place {
                y[(row * y_stride + column) as usize] = bits;
            }
        }
    }
    let y = cases.words("y", &y);
    let x = match of.in_place {
        true => (y.part(u64::from(own.start) * 4, y.bytes - u64::from(own.start) * 4), y_stride),
        false => (cases.words("x", &x), x_stride),
    };
    let list: Vec<u32> = [1, rows.len() as u32].into_iter().chain(rows).collect();
    let list = cases.words("list", &list);
    let outbox = vec![POISON; (outbox_bytes(slot_words) / 4) as usize + 4 * best_words as usize];
    let buffers = ExchangeBuffers {
        outbox: cases.words("outbox", &outbox),
        inbox: cases.words("inbox", &inbox),
        number: cases.words("number", &[NUMBER - 2]),
        fault: cases.words("fault", &[0, 0]),
        slot_words,
        block_words: 0,
        best_words,
    };
    let from = match of.turn {
        Some(turn) => GatheredRows::Turn(cases.words("turn", &[turn])),
        None if of.best => GatheredRows::BeforeList(list),
        None => GatheredRows::List(list),
    };
    let gathered = Gathered {
        rows: of.rows,
        columns: of.columns,
        x,
        y: of.keeps.then_some((y, y_stride)),
        in_place: of.in_place,
        from,
        index: 2,
    };
    let shape = ExchangeShape { rank: of.rank, workgroups: 2, most_polls: 64 };
    cases.recording.call(all_gather("gather".to_owned(), gathered, (shape, of.phase), buffers));
    (y, buffers.outbox, buffers.fault)
}

#[test]
fn columns_of_all_devices_are_collected() {
    let (mut cases, mut random, mut made) = (Cases::new("all_gather"), Random(93), Vec::new());
    for of in 2..=4u32 {
        for index in 0..of {
            for (count, unit) in [(16 * of, 16), (509, 16), (8 * of - 3, 8)] {
                for kind in 0..4u32 {
                    let phase = [Phase::Both, Phase::Receive, Phase::Send][(kind + index + count) as usize % 3];
                    let of = Columned {
                        rank: Rank { index, of },
                        columns: Columns { count, unit },
                        rows: 5,
                        listed: match kind {
                            0 => Some(&[1, 2, 4]),
                            1 => Some(&[]),
                            _ => None,
                        },
                        best: kind == 2,
                        turn: (kind == 3).then_some(index),
                        phase,
                        keeps: index + 1 == of || kind == 2,
                        in_place: kind != 2 && index + 1 == of,
                    };
                    cases.case(format!("{index} of {} {count} {kind} {phase:?}", of.rank.of));
                    let all = values(&of, &mut random);
                    made.push((of, record_gather(&mut cases, &of, &all, true), all));
                }
            }
        }
    }
    let (before, reference) = (cases.before(), cases.reference());
    for (of, (y, outbox, _), all) in made {
        let (count, own) = (of.columns.count, of.columns.part(of.rank));
        for (row, column) in (0..of.rows).flat_map(|row| (0..count).map(move |column| (row, column))) {
            let listed = of.listed.is_none_or(|listed| listed.contains(&row));
            let gets = of.keeps && listed && of.phase != Phase::Send && !(of.in_place && own.contains(&column));
            let at = row * (count + 4) + column;
            let wanted = if gets { all[(row * count + column) as usize].to_bits() } else { before.u32(y, at) };
            assert_eq!(reference.u32(y, at), wanted, "{of:?}: row {row}, column {column}");
        }
        let number = NUMBER + of.turn.unwrap_or(0);
        let slot_words = of.columns.words(of.rows, of.rank.of) as u32 + 3;
        let first = if of.best { SLOTS * slot_words } else { number % SLOTS * slot_words };
        let header: [u32; 4] = std::array::from_fn(|i| reference.u32(outbox, first * 4 + i as u32));
        let rows = of.listed.map_or(of.rows, |listed| listed.len() as u32);
        let wanted = rows * of.columns.most(of.rank.of).div_ceil(3);
        match of.phase {
            Phase::Receive => assert_eq!(header[0], POISON),
            _ => assert!(header[0] == wanted && is_complete(header, number), "{of:?}: {header:?}"),
        }
        assert_eq!(outbox.bytes / WORD_BYTES, u64::from(SLOTS * slot_words + if of.best { slot_words - 3 } else { 0 }));
    }
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

/// Goal: nothing is sent or awaited if the list says that all rows are greedy, and columns that never come end the call with a
/// fault.
#[test]
fn columns_that_never_come_end_the_call_with_a_fault() {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let (mut cases, mut random) = (Cases::new("all_gather"), Random(94));
        cases.case("missing".to_owned());
        let of = Columned {
            rank: Rank { index: 1, of: 2 },
            columns: Columns { count: 200, unit: 16 },
            rows: 2,
            listed: Some(&[0, 1]),
            best: false,
            turn: None,
            phase: Phase::Both,
            keeps: true,
            in_place: false,
        };
        let all = values(&of, &mut random);
        let (y, outbox, fault) = record_gather(&mut cases, &of, &all, false);
        let before = cases.before();
        let bench = Bench::new(&vulkan, *driver);
        let after = bench.run(&cases.recording, &before);
        assert_eq!(after.u32(fault, 0), EXCHANGE_FAULT);
        for column in of.columns.part(Rank { index: 0, of: 2 }) {
            assert_eq!(after.u32(y, column), POISON, "column {column}");
        }
        let slot = NUMBER % SLOTS * (of.columns.words(of.rows, 2) as u32 + 3);
        let list = cases.recording.buffers.iter().position(|decl| decl.name.ends_with("list")).expect("there is one");
        let mut before = cases.before();
        before.buffers[list][0] = 0;
        let after = bench.run(&cases.recording, &before);
        assert_eq!((after.u32(fault, 0), after.u32(outbox, slot * 4)), (0, POISON));

        // With the fault word set, the device sends words that no device takes for its columns.
        let mut before = cases.before();
        before.set_u32(fault, 0, 7);
        let after = bench.run(&cases.recording, &before);
        let sent: [u32; 4] = std::array::from_fn(|i| after.u32(outbox, slot * 4 + i as u32));
        assert_eq!(sent_fault(sent, NUMBER), Some(7), "{sent:x?}");
    }
}

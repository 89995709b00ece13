//! Goal: `all_reduce` sends a device's part, and sums the parts of all devices in their order, bit for bit as its
//! reference does. Method: 2 to 4 devices, each in every place, awkward widths, padding, prompt steps with fewer rows
//! than their regions, both slots, parts rounded to bfloat16, and both phases of an exchange alone; on both CPU
//! drivers. A part that never comes must end the call with the fault word set, and a device with the fault word set
//! must tell the others.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, POISON, Random};
use half::bf16;
use ostinato::kernels::exchange::{
    EXCHANGE_FAULT, ExchangeBuffers, ExchangeShape, Phase, Rank, Summed, all_reduce, check_of, has_failed, inbox_bytes,
    outbox_bytes, words_of,
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

/// Records an exchange with random parts. Returns the sum's and the outbox's ranges, and the parts of all devices.
fn record(cases: &mut Cases, random: &mut Random, of: &Exchange, comes: bool) -> (Range, Range, Range, Vec<Vec<f32>>) {
    let floats = of.rows * of.stride;
    let used = of.used.unwrap_or(of.rows) * of.stride;
    let slot_words = words_of(u64::from(floats), false) as u32 + 5;
    let parts: Vec<Vec<f32>> = (0..of.rank.of).map(|_| (0..floats).map(|_| random.float() * 3.0).collect()).collect();
    let mut inbox = vec![POISON; (inbox_bytes(slot_words, of.rank.of) / 4) as usize];
    let stop = inbox.len() - 4;
    inbox[stop..].fill(0);
    let others = parts.iter().zip(0..).filter(|(_, rank)| *rank != of.rank.index);
    for (place, (part, _)) in (0u32..).zip(others).filter(|_| comes) {
        let first = (place * 2 + of.number % 2) * slot_words;
        let half = |x: Option<&f32>| u32::from(bf16::from_f32(x.copied().unwrap_or(0.0)).to_bits());
        for (word, floats) in part[..used as usize].chunks(if of.halves { 6 } else { 3 }).enumerate() {
            let bits: [u32; 3] = std::array::from_fn(|i| match of.halves {
                true => half(floats.get(2 * i)) | half(floats.get(2 * i + 1)) << 16,
                false => floats.get(i).map_or(0, |x| x.to_bits()),
            });
            let at = (first as usize + word) * 4;
            inbox[at..at + 3].copy_from_slice(&bits);
            inbox[at + 3] = check_of(bits, of.number);
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
            for (rows, stride, used) in [(1, 32, None), (1, 1024, None), (3, 64, None), (8, 96, Some(5))] {
                number += 1;
                let phase = [Phase::Both, Phase::Receive, Phase::Send][number as usize % 3];
                let adds = number % 2 == 0;
                // One of five, so that it occurs with every phase and number of devices.
                let halves = number % 5 == 0;
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
        let slot_words = words_of(u64::from(of.rows * of.stride), false) as u32 + 5;
        let first = |slot: u32| reference.u32(outbox, slot * slot_words * 4);
        let low = |word: u32| if of.halves { word & 0xffff } else { word };
        let wanted = if of.halves { bf16::from_f32(own[0]).to_bits().into() } else { own[0].to_bits() };
        assert_eq!(first(of.number % 2) != POISON && low(first(of.number % 2)) == wanted, sent);
        assert_eq!(first(1 - of.number % 2), POISON, "the other slot");
    }
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

#[test]
fn a_part_that_never_comes_ends_the_call_with_a_fault() {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        let mut cases = Cases::new("all_reduce");
        let mut random = Random(92);
        cases.case("missing".to_owned());
        let rank = Rank { index: 0, of: 2 };
        let of = Exchange {
            rank,
            rows: 1,
            stride: 96,
            used: None,
            number: 8,
            phase: Phase::Both,
            adds: true,
            halves: false,
        };
        let (x, outbox, fault, _) = record(&mut cases, &mut random, &of, false);
        let before = cases.before();
        let after = Bench::new(&vulkan, *driver).run(&cases.recording, &before);
        assert_eq!(after.u32(fault, 0), EXCHANGE_FAULT);
        assert_eq!(after.floats(x), before.floats(x), "the stream keeps its values");

        // With the fault word set, the device sends words that no device takes for sums.
        let mut before = cases.before();
        before.set_u32(fault, 0, 7);
        let after = Bench::new(&vulkan, *driver).run(&cases.recording, &before);
        for word in 0..32 {
            let sent: [u32; 4] = std::array::from_fn(|i| after.u32(outbox, word * 4 + i as u32));
            assert!(has_failed(sent, 8), "{sent:x?}");
        }
    }
}

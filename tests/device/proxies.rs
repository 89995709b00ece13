//! Goal: the words of an exchange pass from each device to the others whole, in whatever pieces, order and time they come,
//! and a device that waits for them goes on when it has all of them, not earlier. Method: the proxies over the memory of a
//! CPU driver (or of the selected GPU), in which threads of the test take the part of three devices: they store each word in
//! four pieces, words and pieces in random order, and one device is late. Not here: kernels (`kernels::exchange`) and
//! models (`model::tensor`).

use crate::common::{Driver, Vulkan};
use crate::harness::Random;
use ostinato::actors::proxy::{ExchangeMemory, Exchanges, Proxies};
use ostinato::device::Gate;
use ostinato::kernels::exchange::{
    BLOCK_WORDS, BlockSums, Blocks, SLOTS, WORD_BYTES, check_of, inbox_bytes, outbox_bytes, stop_offset,
};
use ostinato::memory::{Arena, Buffer, Place};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEVICES: usize = 3;
/// More than a thread carries, so that several threads share an exchange where there are enough cores.
const WORDS: u32 = 700;
/// The words of a slot: those, and two blocks behind them.
const SLOT: u32 = WORDS + 2 * (BLOCK_WORDS + 4);
/// The steps, and the exchanges of each.
const STEPS: u64 = 3;
const EACH: u32 = 6;
/// How late the second device is in the first exchange of the last step.
const LATE: Duration = Duration::from_millis(300);
/// Time limit, longer than any wait here takes on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// The number of words of the slot for best tokens.
const BEST: u32 = 8;

/// Starts the proxies of devices whose memory is that of one driver, with buffers of zeros and, if `gated`, a gate for each.
fn start(vulkan: &Vulkan, gated: bool) -> (Arena, ExchangeMemory, Proxies) {
    let device = vulkan.device(Driver::first());
    let arena = Arena::new(&device).expect("an arena");
    let buffer = |name: &str, bytes: u64| -> Arc<Buffer> {
        let buffer = arena.buffer(name, bytes, Place::Readback).expect("memory");
        buffer.write(0, &vec![0; bytes as usize]);
        buffer
    };
    let memory = ExchangeMemory {
        outboxes: (0..DEVICES)
            .map(|at| buffer(&format!("outbox.{at}"), outbox_bytes(SLOT) + u64::from(BEST) * WORD_BYTES))
            .collect(),
        inboxes: (0..DEVICES)
            .map(|at| {
                let best = (DEVICES as u64 - 1) * u64::from(BEST) * WORD_BYTES;
                buffer(&format!("inbox.{at}"), inbox_bytes(SLOT, DEVICES as u32) + best)
            })
            .collect(),
        gates: (0..DEVICES).filter(|_| gated).map(|_| Arc::new(Gate::new(&device).expect("a gate"))).collect(),
        slot_words: SLOT,
        best_words: BEST,
        // Without gates, threads spin as for GPUs, so that some are off their cores for whole steps.
        on_cpu: gated,
    };
    // More threads than a machine with few cores would have.
    let proxies = if gated { Proxies::spawn(memory.clone()) } else { Proxies::spawn_each(memory.clone(), 3) };
    let proxies = proxies.expect("threads");
    (arena, memory, proxies)
}

/// Returns a device's word of an exchange. All of its pieces differ from those of the exchange before in the same place.
fn word(device: usize, number: u64, at: u32) -> [u32; 4] {
    let number = number as u32;
    let bits = [number << 16 | at, number * 31 + at, number << 8 | device as u32];
    [bits[0], bits[1], bits[2], check_of(bits, number)]
}

fn until(what: &str, reached: impl Fn() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
}

/// Returns the number of words of an exchange: a few less in every second one.
fn words_in(number: u64) -> u32 {
    WORDS - 90 * ((number - 1) % 2) as u32
}

/// Takes the part of a device: sends its words of each exchange, and checks those of the others when its gate has opened. In every
/// second step, two exchanges are on the way: it sends the next one before it waits.
fn device(memory: &ExchangeMemory, own: usize) {
    let mut random = Random(own as u64);
    let slot = |number: u64| number % u64::from(SLOTS) * u64::from(SLOT);
    let others = || (0..DEVICES).filter(|other| *other != own).map(|other| memory.gates[other].opened());
    for number in 1..=STEPS * u64::from(EACH) {
        if own == 1 && number == (STEPS - 1) * u64::from(EACH) + 1 {
            std::thread::sleep(LATE);
            assert!(others().max() < Some(number), "no device goes on without the words of all");
        }
        // The device pauses once before it has sent all pieces.
        let words = words_in(number);
        let last = random.below(words * 4 - 1);
        for (sent, place) in (0..).zip(random.permutation(words * 4)) {
            let (at, piece) = (place / 4, place % 4);
            let to = (slot(number) + u64::from(at)) * WORD_BYTES + u64::from(piece) * 4;
            memory.outboxes[own].store_u32(to, word(own, number, at)[piece as usize]);
            if sent == last {
                std::thread::sleep(Duration::from_millis(2));
                assert!(others().max() < Some(number), "exchange {number} of {own}");
            }
        }
        let (step, last) = ((number - 1) / u64::from(EACH), number.is_multiple_of(u64::from(EACH)));
        let overlaps = step % 2 == 1;
        let begins = number % u64::from(EACH) == 1;
        let received = match (overlaps, begins, last) {
            (false, ..) => number..number + 1,
            (true, true, _) => 0..0,
            (true, false, false) => number - 1..number,
            (true, false, true) => number - 1..number + 1,
        };
        for number in received {
            until("the words of the others", || memory.gates[own].opened() >= number);
            for other in (0..DEVICES).filter(|other| *other != own) {
                let index = (other - usize::from(other > own)) as u64;
                let first = (index * u64::from(SLOTS) * u64::from(SLOT) + slot(number)) * WORD_BYTES;
                let words = words_in(number);
                let mut found = vec![[0; 4]; words as usize];
                memory.inboxes[own].load_quads(first, &mut found);
                let wanted: Vec<[u32; 4]> = (0..words).map(|at| word(other, number, at)).collect();
                assert!(found == wanted, "exchange {number}, from device {other} to {own}");
            }
        }
    }
}

#[test]
fn words_that_come_late_and_in_pieces_pass_whole() {
    let vulkan = Vulkan::new();
    let (_arena, memory, proxies) = start(&vulkan, true);
    for step in 0..STEPS {
        proxies.carry(Exchanges {
            first: 1 + step * u64::from(EACH),
            count: EACH,
            floats: [1, 2].map(|number| 3 * words_in(number)),
            halves: false,
            turns: 0,
            of_head: 0,
        });
    }
    std::thread::scope(|scope| {
        for own in 0..DEVICES {
            let memory = &memory;
            scope.spawn(move || device(memory, own));
        }
    });
    assert!(proxies.have_carried(STEPS * u64::from(EACH)) && !proxies.has_stopped());
}

/// Goal: devices that wait go on when exchanges are ended, now and in later steps, and nothing counts as carried.
#[test]
fn exchanges_that_are_ended_keep_no_device_waiting() {
    let vulkan = Vulkan::new();
    let (_arena, memory, proxies) = start(&vulkan, true);
    proxies.carry(Exchanges { first: 1, count: EACH, floats: [3 * WORDS; 2], halves: false, turns: 0, of_head: 0 });
    // One device has sent nothing.
    for own in [0, 2] {
        for at in 0..WORDS {
            memory.outboxes[own].store_quads((u64::from(SLOT) + u64::from(at)) * WORD_BYTES, &[word(own, 1, at)]);
        }
    }
    until("device 1 has the words of the others", || memory.gates[1].opened() == 1);
    assert_eq!([0, 2].map(|own| memory.gates[own].opened()), [0, 0]);
    proxies.stop();
    assert!(proxies.has_stopped() && !proxies.have_carried(1));
    for later in [EACH, 2 * EACH] {
        assert_eq!(memory.gates.iter().map(|gate| gate.opened()).collect::<Vec<_>>(), [u64::from(later); DEVICES]);
        proxies.carry(Exchanges {
            first: u64::from(later) + 1,
            count: EACH,
            floats: [3 * WORDS; 2],
            halves: false,
            turns: 0,
            of_head: 0,
        });
    }
    for inbox in &memory.inboxes {
        assert_eq!(inbox.load_u32(stop_offset(SLOT, DEVICES as u32)), 1, "kernels are told");
    }
}

/// Takes the part of a device without gates that draws tokens: each step has a sum, best tokens and, in every third step,
/// many words of logits. It goes on as soon as it has the words of the others, whatever the proxies' threads do, and later
/// writes over its own.
fn drawing_device(memory: &ExchangeMemory, own: usize) {
    let stop = stop_offset(SLOT, DEVICES as u32) / WORD_BYTES;
    // The words of an exchange of a device: of logits, the first one counts the others.
    let words = |device: usize, number: u64, count: u32, follows: Option<bool>| -> Vec<[u32; 4]> {
        let first = follows.map(|follows| {
            let bits = [count, u32::from(follows), device as u32];
            [bits[0], bits[1], bits[2], check_of(bits, number as u32)]
        });
        first.into_iter().chain((0..count).map(|at| word(device, number, at))).collect()
    };
    for step in 0..DRAWN {
        let sum = 1 + 3 * step;
        let follows = step % 3 == 0;
        let logits = (sum + 2, false, WORDS - 1, Some(false));
        let exchanges = [(sum, false, SUM, None), (sum + 1, true, 3, Some(follows))];
        for (number, best, count, tells) in exchanges.into_iter().chain(follows.then_some(logits)) {
            let slot =
                if best { u64::from(SLOTS) * u64::from(SLOT) } else { number % u64::from(SLOTS) * u64::from(SLOT) };
            // The first word is the last that is stored.
            for (at, word) in words(own, number, count, tells).iter().enumerate().rev() {
                memory.outboxes[own].store_quads((slot + at as u64) * WORD_BYTES, &[*word]);
            }
            for other in (0..DEVICES).filter(|other| *other != own) {
                let index = (other - usize::from(other > own)) as u64;
                let from = match best {
                    true => stop + 1 + index * u64::from(BEST),
                    false => index * u64::from(SLOTS) * u64::from(SLOT) + slot,
                };
                let wanted = words(other, number, count, tells);
                until("the words of the others", || {
                    let mut found = vec![[0; 4]; wanted.len()];
                    memory.inboxes[own].load_quads(from * WORD_BYTES, &mut found);
                    found == wanted
                });
            }
        }
    }
}

/// The words of a step's sum.
const SUM: u32 = 4;
/// The steps of devices that send logits.
const DRAWN: u64 = 100;

/// Goal: threads without words of their own in an exchange of logits miss none, although devices do not wait for them. Method:
/// several threads for each device on whatever cores there are, and devices that go on at once.
#[test]
fn logits_pass_whatever_threads_without_words_do() {
    let vulkan = Vulkan::new();
    let (_arena, memory, proxies) = start(&vulkan, false);
    for step in 0..DRAWN {
        proxies.carry(Exchanges {
            first: 1 + 3 * step,
            count: 1,
            floats: [3 * SUM; 2],
            halves: false,
            turns: 0,
            of_head: 2,
        });
    }
    std::thread::scope(|scope| {
        for own in 0..DEVICES {
            let memory = &memory;
            scope.spawn(move || drawing_device(memory, own));
        }
    });
    assert!(proxies.have_carried(3 * DRAWN) && !proxies.has_stopped());
}

/// The floats of a sum that passes in blocks: two blocks, the second one not full.
const BLOCK_FLOATS: u32 = 8 * (BLOCK_WORDS + 88);

/// Returns the words of a device's slot in an exchange in blocks, each with its place. Each word of a block would be a complete
/// word of the next exchange in the same slot.
fn block_words(device: usize, number: u64) -> Vec<(u32, [u32; 4])> {
    let blocks = Blocks::of(BLOCK_FLOATS);
    let mut words = Vec::new();
    for block in 0..blocks.count() {
        let mut sums = BlockSums::default();
        for at in blocks.places(block, SLOT) {
            let [x, y, z, _] = word(device, number, at);
            let data = [x, y, z, check_of([x, y, z], number as u32 + SLOTS)];
            sums.add(&[data]);
            words.push((at, data));
        }
        let [x, y, z] = sums.bits();
        words.push((blocks.header(block, SLOT), [x, y, z, check_of([x, y, z], number as u32)]));
    }
    words
}

/// Goal: blocks pass whole, though headers come before words of their blocks, and no word of a block is taken for one of a later
/// exchange. Method: exchanges in blocks and in words with checks follow each other in the same slots; devices store words
/// and headers in random order and pause before the last one, which leaves a word of an earlier exchange in its place.
#[test]
fn blocks_whose_words_come_after_their_headers_pass_whole() {
    let vulkan = Vulkan::new();
    let (_arena, memory, proxies) = start(&vulkan, true);
    const EXCHANGES: u64 = 16;
    let in_blocks = |number: u64| (number / u64::from(SLOTS)).is_multiple_of(2);
    let words = |device: usize, number: u64| match in_blocks(number) {
        true => block_words(device, number),
        false => (0..WORDS).map(|at| (at, word(device, number, at))).collect(),
    };
    for number in 1..=EXCHANGES {
        let halves = in_blocks(number);
        let floats = if halves { BLOCK_FLOATS } else { 3 * WORDS };
        proxies.carry(Exchanges { first: number, count: 1, floats: [floats; 2], halves, turns: 0, of_head: 0 });
    }
    std::thread::scope(|scope| {
        for own in 0..DEVICES {
            let memory = &memory;
            scope.spawn(move || {
                let mut random = Random(own as u64);
                for number in 1..=EXCHANGES {
                    let slot = number % u64::from(SLOTS) * u64::from(SLOT);
                    let sent = words(own, number);
                    let order = random.permutation(sent.len() as u32);
                    for (before, place) in order.iter().enumerate() {
                        if before + 1 == order.len() {
                            std::thread::sleep(Duration::from_millis(2));
                            let others = (0..DEVICES).filter(|other| *other != own);
                            let opened = others.map(|other| memory.gates[other].opened()).max();
                            assert!(opened < Some(number), "exchange {number} of {own}");
                        }
                        let (at, word) = sent[*place as usize];
                        memory.outboxes[own].store_quads((slot + u64::from(at)) * WORD_BYTES, &[word]);
                    }
                    until("the words of the others", || memory.gates[own].opened() >= number);
                    for other in (0..DEVICES).filter(|other| *other != own) {
                        let index = (other - usize::from(other > own)) as u64;
                        for (at, wanted) in words(other, number) {
                            let mut found = [[0; 4]];
                            let at = index * u64::from(SLOTS) * u64::from(SLOT) + slot + u64::from(at);
                            memory.inboxes[own].load_quads(at * WORD_BYTES, &mut found);
                            assert_eq!(found, [wanted], "exchange {number}, from device {other} to {own}");
                        }
                    }
                }
            });
        }
    });
    assert!(proxies.have_carried(EXCHANGES) && !proxies.has_stopped());
}

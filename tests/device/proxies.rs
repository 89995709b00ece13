//! Goal: the words of an exchange pass from each device to the others whole, in whatever pieces, order and time they come,
//! and a device that waits for them goes on when it has all of them, not earlier. Method: the proxies over the memory of a
//! CPU driver (or of the selected GPU), in which threads of the test take the part of three devices: they store each word in
//! four pieces, words and pieces in random order, and one device is late. Not here: kernels (`kernels::exchange`) and
//! models (`model::tensor`).

use crate::common::{Driver, Vulkan};
use crate::harness::Random;
use ostinato::actors::proxy::{ExchangeMemory, Exchanges, Proxies};
use ostinato::device::Gate;
use ostinato::kernels::exchange::{WORD_BYTES, check_of, inbox_bytes, outbox_bytes, stop_offset};
use ostinato::memory::{Arena, Buffer, Place};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEVICES: usize = 3;
/// More than a thread carries, so that several threads share an exchange where there are enough cores.
const WORDS: u32 = 700;
/// The steps, and the exchanges of each.
const STEPS: u64 = 3;
const EACH: u32 = 4;
/// How late the second device is in the first exchange of the last step.
const LATE: Duration = Duration::from_millis(300);
/// Time limit, longer than any wait here takes on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// Starts the proxies of devices whose memory is that of one driver, with buffers of zeros.
fn start(vulkan: &Vulkan) -> (Arena, ExchangeMemory, Proxies) {
    let device = vulkan.device(Driver::first());
    let arena = Arena::new(&device).expect("an arena");
    let buffer = |name: &str, bytes: u64| -> Arc<Buffer> {
        let buffer = arena.buffer(name, bytes, Place::Readback).expect("memory");
        buffer.write(0, &vec![0; bytes as usize]);
        buffer
    };
    let memory = ExchangeMemory {
        outboxes: (0..DEVICES).map(|at| buffer(&format!("outbox.{at}"), outbox_bytes(WORDS))).collect(),
        inboxes: (0..DEVICES).map(|at| buffer(&format!("inbox.{at}"), inbox_bytes(WORDS, DEVICES as u32))).collect(),
        gates: (0..DEVICES).map(|_| Arc::new(Gate::new(&device).expect("a gate"))).collect(),
        slot_words: WORDS,
        on_cpu: true,
    };
    let proxies = Proxies::spawn(memory.clone()).expect("threads");
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

/// Takes the part of a device: sends its words of each exchange, and checks those of the others when its gate has opened.
fn device(memory: &ExchangeMemory, own: usize) {
    let mut random = Random(own as u64);
    let slot = |number: u64| (number & 1) * u64::from(WORDS);
    let others = || (0..DEVICES).filter(|other| *other != own).map(|other| memory.gates[other].opened());
    for number in 1..=STEPS * u64::from(EACH) {
        if own == 1 && number == (STEPS - 1) * u64::from(EACH) + 1 {
            std::thread::sleep(LATE);
            assert!(others().max() < Some(number), "no device goes on without the words of all");
        }
        // The device pauses once before it has sent all pieces.
        let last = random.below(WORDS * 4 - 1);
        for (sent, place) in (0..).zip(random.permutation(WORDS * 4)) {
            let (at, piece) = (place / 4, place % 4);
            let to = (slot(number) + u64::from(at)) * WORD_BYTES + u64::from(piece) * 4;
            memory.outboxes[own].store_u32(to, word(own, number, at)[piece as usize]);
            if sent == last {
                std::thread::sleep(Duration::from_millis(2));
                assert!(others().max() < Some(number), "exchange {number} of {own}");
            }
        }
        until("the words of the others", || memory.gates[own].opened() >= number);
        for other in (0..DEVICES).filter(|other| *other != own) {
            let index = (other - usize::from(other > own)) as u64;
            let first = (index * 2 * u64::from(WORDS) + slot(number)) * WORD_BYTES;
            let mut found = vec![[0; 4]; WORDS as usize];
            memory.inboxes[own].load_quads(first, &mut found);
            let wanted: Vec<[u32; 4]> = (0..WORDS).map(|at| word(other, number, at)).collect();
            assert!(found == wanted, "exchange {number}, from device {other} to {own}");
        }
    }
}

#[test]
fn words_that_come_late_and_in_pieces_pass_whole() {
    let vulkan = Vulkan::new();
    let (_arena, memory, proxies) = start(&vulkan);
    for step in 0..STEPS {
        proxies.carry(Exchanges { first: 1 + step * u64::from(EACH), count: EACH, words: WORDS });
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
    let (_arena, memory, proxies) = start(&vulkan);
    proxies.carry(Exchanges { first: 1, count: EACH, words: WORDS });
    // One device has sent nothing.
    for own in [0, 2] {
        for at in 0..WORDS {
            memory.outboxes[own].store_quads((u64::from(WORDS) + u64::from(at)) * WORD_BYTES, &[word(own, 1, at)]);
        }
    }
    until("device 1 has the words of the others", || memory.gates[1].opened() == 1);
    assert_eq!([0, 2].map(|own| memory.gates[own].opened()), [0, 0]);
    proxies.stop();
    assert!(proxies.has_stopped() && !proxies.have_carried(1));
    for later in [EACH, 2 * EACH] {
        assert_eq!(memory.gates.iter().map(|gate| gate.opened()).collect::<Vec<_>>(), [u64::from(later); DEVICES]);
        proxies.carry(Exchanges { first: u64::from(later) + 1, count: EACH, words: WORDS });
    }
    for inbox in &memory.inboxes {
        assert_eq!(inbox.load_u32(stop_offset(WORDS, DEVICES as u32)), 1, "kernels are told");
    }
}

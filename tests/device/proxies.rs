//! Goal: the words of an exchange pass from each device to the others whole, in whatever pieces, order and time they come,
//! and a device that waits for them goes on when it has all of them, not earlier. Method: the proxies over the memory of a
//! CPU driver (or of the selected GPU), in which threads of the test take the part of three devices: they store each word in
//! four pieces, words and pieces in random order, and one device is late. Not here: kernels (`kernels::exchange`) and
//! models (`model::tensor`).

use crate::common::{Driver, Vulkan};
use ostinato::actors::proxy::{ExchangeMemory, Exchanges, Proxies};
use ostinato::device::{Device, Gate};
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

fn memory(device: &Arc<Device>, arena: &Arena) -> ExchangeMemory {
    let buffer = |name: &str, bytes: u64| -> Arc<Buffer> {
        let buffer = arena.buffer(name, bytes, Place::Readback).expect("memory");
        buffer.write(0, &vec![0; bytes as usize]);
        buffer
    };
    ExchangeMemory {
        outboxes: (0..DEVICES).map(|at| buffer(&format!("outbox.{at}"), outbox_bytes(WORDS))).collect(),
        inboxes: (0..DEVICES).map(|at| buffer(&format!("inbox.{at}"), inbox_bytes(WORDS, DEVICES as u32))).collect(),
        gates: (0..DEVICES).map(|_| Arc::new(Gate::new(device).expect("a gate"))).collect(),
        slot_words: WORDS,
        on_cpu: true,
    }
}

/// Returns a device's word of an exchange. All of its pieces differ from those of the exchange before in the same place.
fn word(device: usize, number: u64, at: u32) -> [u32; 4] {
    let number = number as u32;
    let bits = [number << 16 | at, number * 31 + at, number << 8 | device as u32];
    [bits[0], bits[1], bits[2], check_of(bits, number)]
}

/// Numbers that look random and are the same in each run (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (((mixed ^ mixed >> 27) >> 16) % most as u64) as usize
    }

    fn shuffled<T>(&mut self, mut all: Vec<T>) -> Vec<T> {
        for at in (1..all.len()).rev() {
            all.swap(at, self.below(at + 1));
        }
        all
    }
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
        let pieces = (0..WORDS).flat_map(|at| (0..4).map(move |piece| (at, piece))).collect();
        let last = random.below(WORDS as usize * 4);
        for (sent, (at, piece)) in random.shuffled(pieces).into_iter().enumerate() {
            let place = (slot(number) + u64::from(at)) * WORD_BYTES + piece as u64 * 4;
            memory.outboxes[own].store_u32(place, word(own, number, at)[piece]);
            if sent == last {
                std::thread::sleep(Duration::from_millis(2));
                assert!(sent + 1 == 4 * WORDS as usize || others().max() < Some(number), "exchange {number} of {own}");
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
    let device_of = vulkan.device(Driver::first());
    let arena = Arena::new(&device_of).expect("an arena");
    let memory = memory(&device_of, &arena);
    let proxies = Proxies::spawn(memory.clone()).expect("threads");
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
    let device_of = vulkan.device(Driver::first());
    let arena = Arena::new(&device_of).expect("an arena");
    let memory = memory(&device_of, &arena);
    let proxies = Proxies::spawn(memory.clone()).expect("threads");
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

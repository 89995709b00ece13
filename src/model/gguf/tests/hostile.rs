//! Damaged and malicious files: whatever the bytes are, the module answers with an error or a result.

use super::super::config::RopeFactors;
use super::super::container::{Array, Header, Value};
use super::super::split::{GgufFile, GgufFiles};
use super::super::{Gguf, fuzz};
use super::tensors::{hybrid, single_blocks};
use super::{Random, small_model};

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let bytes = small_model().bytes();
    assert!(Header::parse(&bytes, bytes.len() as u64).is_ok());
    for end in 0..bytes.len() {
        assert!(Header::parse(&bytes[..end], end as u64).is_err(), "{end} bytes");
        // The length that the caller states may also be wrong.
        let read = Header::parse(&bytes[..end], bytes.len() as u64);
        assert!(read.is_ok() == (end >= small_model().header().len()), "{end} bytes");
        fuzz(&bytes[..end]);
    }
}

#[test]
fn changed_bytes_do_no_harm() {
    let bytes = small_model().bytes();
    let seed = 20_261_123;
    println!("seed {seed}");
    let mut random = Random(seed);
    let header = small_model().header().len();
    let (mut headers, mut models) = (0, 0);
    for _ in 0..100_000 {
        let mut changed = bytes.clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(header);
            changed[at] = match random.below(4) {
                0 => changed[at] ^ (1 << random.below(8)),
                1 => 0xff,
                2 => 0,
                _ => random.next() as u8,
            };
        }
        fuzz(&changed);
        if let Ok(header) = Header::parse(&changed, changed.len() as u64) {
            headers += 1;
            let part = GgufFile { path: "m.gguf".into(), bytes: changed.len() as u64, header };
            models += u32::from(
                GgufFiles::new(vec![part]).is_ok_and(|parts| Gguf::new(parts, &RopeFactors::default()).is_ok()),
            );
        }
    }
    println!("{headers} headers are valid, {models} models");
    assert!(headers > 1000 && models > 100);
}

#[test]
fn random_bytes_behind_the_magic_number_do_no_harm() {
    let mut random = Random(7);
    for _ in 0..20_000 {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        for _ in 0..random.below(300) {
            bytes.push(if random.below(3) > 0 { 0 } else { random.next() as u8 });
        }
        fuzz(&bytes);
    }
}

#[test]
fn sizes_near_the_ends_of_64_bits_do_no_harm() {
    let bytes = small_model().bytes();
    for at in 0..small_model().header().len() - 8 {
        for value in [u64::MAX, 1 << 63, (1 << 63) - 1, u64::MAX - 31, 1 << 32, 1 << 31, (1 << 30) + 1] {
            let mut changed = bytes.clone();
            changed[at..at + 8].copy_from_slice(&value.to_le_bytes());
            fuzz(&changed);
        }
    }
}

#[test]
fn numbers_in_the_metadata_do_no_harm() {
    let numbers = [0, 1, 3, 4, 5, 4096, 4097, 1 << 30, (1 << 30) + 1, u64::MAX / 2, u64::MAX];
    let models = [
        small_model(),
        hybrid("qwen35", false, true),
        hybrid("qwen35moe", true, true),
        hybrid("qwen3next", true, false),
        single_blocks(false, false),
        single_blocks(true, true),
    ];
    for model in models {
        for pair in 1..model.pairs.len() {
            for number in numbers {
                for value in [Value::U64(number), Value::Array(Array::U64(vec![number; 5])), Value::F64(number as f64)]
                {
                    let mut file = model.clone();
                    file.pairs[pair].1 = value;
                    fuzz(&file.bytes());
                }
            }
        }
        // All sizes at once.
        for number in numbers {
            let mut file = model.clone();
            for (_, value) in file.pairs.iter_mut().filter(|(_, value)| matches!(value, Value::U32(_))) {
                *value = Value::U64(number);
            }
            fuzz(&file.bytes());
        }
    }
}

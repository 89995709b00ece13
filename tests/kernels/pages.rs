//! Pages of keys and values as the header of `kv.glsl` defines them, independent of the kernels' own references.

use crate::harness::{Expect, POISON, round};
use half::f16;
use ostinato::config::KvFormat;
use ostinato::kernels::attention::Heads;
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::recording::Range;
use ostinato::memory::pack::Format;

/// Returns a key or a value as pages hold it. Keys must already be spread.
pub fn round_head(format: KvFormat, head: &[f32]) -> Vec<f32> {
    match format {
        KvFormat::F16 => head.iter().map(|value| round(Format::F16, *value)).collect(),
        KvFormat::F32 => head.to_vec(),
        KvFormat::Int8 => {
            let scale = scale_of(head);
            head.iter().map(|value| f32::from(code_of(*value, scale)) * scale).collect()
        }
    }
}

fn scale_of(head: &[f32]) -> f32 {
    head.iter().fold(0.0, |top: f32, value| top.max(value.abs())) / 127.0
}

fn code_of(value: f32, scale: f32) -> i8 {
    if scale > 0.0 { (value / scale).round_ties_even() as i8 } else { 0 }
}

/// Returns a key or a query as its product with the other is computed: with codes, times the Hadamard matrix.
pub fn spread(format: KvFormat, head: Vec<f64>) -> Vec<f64> {
    if format != KvFormat::Int8 {
        return head;
    }
    let block = (head.len() & head.len().wrapping_neg()).min(128);
    let entry = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let row = |part: &[f64], i: usize| part.iter().enumerate().map(|(j, value)| entry(i, j) * value).sum::<f64>();
    let of = |part: &[f64]| (0..block).map(|i| row(part, i) / (block as f64).sqrt()).collect::<Vec<f64>>();
    head.chunks_exact(block).flat_map(of).collect()
}

/// Pages of keys, or of values.
pub struct Pages {
    heads: Heads,
    keys: bool,
    /// The words of all pages. Numbers that are not set are NaN; codes are anything, and their scales NaN.
    pub words: Vec<u32>,
}

impl Pages {
    pub fn new(heads: Heads, keys: bool, count: u32) -> Pages {
        let nothing = if heads.kv_format == KvFormat::F16 { 0x7e00_7e00 } else { POISON };
        Pages { heads, keys, words: vec![nothing; (count * page_words(heads)) as usize] }
    }

    /// Stores a key or value that [`round_head`] has rounded.
    pub fn put(&mut self, page: u32, token: u32, head: u32, values: &[f32]) {
        let format = self.heads.kv_format;
        let scale = scale_of(values);
        for (i, value) in (0..).zip(values) {
            let (word, shift) = place(self.heads, self.keys, page, token, head, i);
            let word = &mut self.words[word as usize];
            let (mask, bits) = match format {
                KvFormat::F16 => (0xffff, u32::from(f16::from_f32(*value).to_bits())),
                KvFormat::F32 => (u32::MAX, value.to_bits()),
                KvFormat::Int8 => (0xff, u32::from(code_of(*value, scale) as u8)),
            };
            *word = *word & !(mask << shift) | bits << shift;
        }
        if format == KvFormat::Int8 {
            self.words[scale_word(self.heads, page, token, head) as usize] = scale.to_bits();
        }
    }
}

fn page_words(heads: Heads) -> u32 {
    let Heads { kv, dim, .. } = heads;
    match heads.kv_format {
        KvFormat::F16 => kv * 16 * dim / 2,
        KvFormat::F32 => kv * 16 * dim,
        KvFormat::Int8 => kv * 16 * dim / 4 + kv * 16,
    }
}

/// Returns the word of a number and its first bit in the word.
fn place(heads: Heads, keys: bool, page: u32, token: u32, head: u32, i: u32) -> (u32, u32) {
    let Heads { kv, dim, kv_format, .. } = heads;
    let eights = dim / 8;
    let number = match (kv_format, keys) {
        // [pages][kv heads][D / 8][16 tokens][8]
        (KvFormat::F16 | KvFormat::F32, true) => (((page * kv + head) * eights + i / 8) * 16 + token) * 8 + i % 8,
        // [pages][kv heads][16 tokens][D]
        (KvFormat::F16 | KvFormat::F32, false) => ((page * kv + head) * 16 + token) * dim + i,
        // [kv heads][D / 8][8][2][8], [kv heads][8][D / 8][2][8]
        (KvFormat::Int8, true) => (((head * eights + i / 8) * 8 + token % 8) * 2 + token / 8) * 8 + i % 8,
        (KvFormat::Int8, false) => (((head * 8 + token % 8) * eights + i / 8) * 2 + token / 8) * 8 + i % 8,
    };
    match kv_format {
        KvFormat::F16 => (number / 2, number % 2 * 16),
        KvFormat::F32 => (number, 0),
        KvFormat::Int8 => (page * page_words(heads) + number / 4, [0, 16, 8, 24][number as usize % 4]),
    }
}

fn scale_word(heads: Heads, page: u32, token: u32, head: u32) -> u32 {
    let order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];
    let at = order.iter().position(|of| *of == token).expect("a token of a page");
    (page + 1) * page_words(heads) - heads.kv * 16 + head * 16 + at as u32
}

/// Returns a key or value in the pages of a run.
pub fn head_at(memory: &HostMemory, range: Range, heads: Heads, keys: bool, at: (u32, u32, u32)) -> Vec<f64> {
    let (page, token, head) = at;
    let number = |i| {
        let (word, shift) = place(heads, keys, page, token, head, i);
        let bits = memory.u32(range, word) >> shift;
        match heads.kv_format {
            KvFormat::F16 => f64::from(f16::from_bits(bits as u16).to_f32()),
            KvFormat::F32 => f64::from(f32::from_bits(bits)),
            KvFormat::Int8 => {
                let scale = f32::from_bits(memory.u32(range, scale_word(heads, page, token, head)));
                f64::from(bits as u8 as i8) * f64::from(scale)
            }
        }
    };
    (0..heads.dim).map(number).collect()
}

/// The precision of pages in which a kernel has stored keys or values, whose numbers differ by at most `near`, in f32.
/// f16 may be rounded to either neighbor (2^-10 of its value), and a code may be the next one.
pub fn stored(heads: Heads, near: f32) -> Expect {
    match heads.kv_format {
        KvFormat::F16 => Expect::Halves(near + 1.1e-3),
        KvFormat::F32 => Expect::Floats(near),
        KvFormat::Int8 => {
            Expect::CodePages { words: page_words(heads), codes: page_words(heads) - heads.kv * 16, limit: near }
        }
    }
}

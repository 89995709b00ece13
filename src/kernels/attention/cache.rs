//! The pages of keys and values as the references read and write them: where each number lies in each format, codes with
//! their scales, and the Hadamard matrix that keys and queries are multiplied by. Not here: which pages a sequence has.

use crate::config::KvFormat;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::Range;

/// The number of tokens in a page.
pub const TOKENS: u32 = 16;
/// The largest code, which stands for the largest magnitude in a head.
const CODE_LIMIT: f64 = 127.0;
/// A head with no larger value is stored as zeros.
const LEAST_VALUE: f64 = 1e-30;
/// The largest block of the Hadamard matrix.
const MOST_HADAMARD: u32 = 128;

/// Returns the format of keys and values in the name of a kernel's variant, for example `flash_decode.int8.plain`. Names
/// without one mean f16.
pub(crate) fn kv_format_of(kernel: &str) -> KvFormat {
    match kernel.split('.').nth(1) {
        Some("f32") => KvFormat::F32,
        Some("int8") => KvFormat::Int8,
        _ => KvFormat::F16,
    }
}

/// Multiplies a key or a query by the block-diagonal Hadamard matrix of `kv.glsl`, whose blocks are orthonormal and are
/// their own inverse: the largest power of two that divides the number of dimensions, at most 128.
pub fn hadamard(head: &mut [f64]) {
    let block = (1 << head.len().trailing_zeros()).min(MOST_HADAMARD as usize);
    for part in head.chunks_exact_mut(block) {
        let mut distance = 1;
        while distance < block {
            for first in (0..block).filter(|i| i & distance == 0) {
                let (a, b) = (part[first], part[first + distance]);
                (part[first], part[first + distance]) = (a + b, a - b);
            }
            distance *= 2;
        }
        part.iter_mut().for_each(|value| *value /= (block as f64).sqrt());
    }
}

/// Returns the codes of a head and their scale: value = code · scale, to the nearest, ties to even. A head whose largest
/// magnitude is infinite or NaN has that as its scale, and any codes.
pub fn quantise_head(head: &[f64]) -> (Vec<i8>, f32) {
    let top = head.iter().fold(0.0, |top: f64, value| match value.is_nan() || top.is_nan() {
        true => f64::NAN,
        false => top.max(value.abs()),
    });
    let scale = if top < LEAST_VALUE { 0.0 } else { (top / CODE_LIMIT) as f32 };
    let inverse = if scale > 0.0 { 1.0 / f64::from(scale) } else { 0.0 };
    let code = |value: &f64| (value * inverse).round_ties_even().clamp(-CODE_LIMIT, CODE_LIMIT) as i8;
    (head.iter().map(code).collect(), scale)
}

/// The pages of a layer's keys, or of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePages {
    /// The format of the numbers.
    pub format: KvFormat,
    /// The number of KV heads.
    pub kv_heads: u32,
    /// The number of dimensions of a head.
    pub dim: u32,
}

/// Whether pages hold keys or values, which lie in different orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

/// A token and KV head in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPlace {
    /// The page.
    pub page: u32,
    /// The KV head.
    pub head: u32,
    /// The token in the page, below 16.
    pub token: u32,
}

impl CachePages {
    /// Returns the size of a page in bytes.
    pub fn page_bytes(self) -> u64 {
        u64::from(TOKENS) * u64::from(self.kv_heads) * u64::from(self.format.head_bytes(self.dim))
    }

    /// Returns the index of dimension `i` of a head, in numbers or, with codes, in bytes.
    pub fn index(self, half: Half, at: TokenPlace, i: u32) -> u32 {
        let CachePages { format, kv_heads, dim } = self;
        let TokenPlace { page, head, token } = at;
        if format != KvFormat::Int8 {
            let first = (page * kv_heads + head) * TOKENS * dim;
            return match half {
                Half::Keys => first + (i / 8) * 128 + token * 8 + i % 8,
                Half::Values => first + token * dim + i,
            };
        }
        let eight = match half {
            Half::Keys => (i / 8 * 8 + token % 8) * 2 + token / 8,
            Half::Values => (token % 8 * (dim / 8) + i / 8) * 2 + token / 8,
        };
        // The bytes of a word are dimensions 0, 2, 1, 3.
        let byte = [0, 2, 1, 3][i as usize % 4] + i % 8 / 4 * 4;
        page * self.page_bytes() as u32 + head * TOKENS * dim + eight * 8 + byte
    }

    /// Returns the index of the scale of a head's codes, in words.
    pub fn scale_index(self, at: TokenPlace) -> u32 {
        let TokenPlace { page, head, token } = at;
        let order = token % 8 / 2 * 4 + token / 8 * 2 + token % 2;
        (page * self.page_bytes() as u32 + self.kv_heads * TOKENS * self.dim) / 4 + head * TOKENS + order
    }

    /// Returns a head of a token.
    pub fn head(self, memory: &HostMemory, range: Range, half: Half, at: TokenPlace) -> Vec<f64> {
        let number = |i| {
            let index = self.index(half, at, i);
            match self.format {
                KvFormat::F16 => f64::from(memory.f16(range, index)),
                KvFormat::F32 => f64::from(memory.f32(range, index)),
                KvFormat::Int8 => {
                    let code = (memory.u32(range, index / 4) >> (index % 4 * 8)) as i8;
                    f64::from(code) * f64::from(memory.f32(range, self.scale_index(at)))
                }
            }
        };
        (0..self.dim).map(number).collect()
    }

    /// Stores a head of a token. With codes, keys must already be multiplied by the Hadamard matrix.
    pub fn set_head(self, memory: &mut HostMemory, range: Range, half: Half, at: TokenPlace, head: &[f64]) {
        let place = |i| self.index(half, at, i);
        match self.format {
            KvFormat::F16 => (0..).zip(head).for_each(|(i, value)| memory.set_f16(range, place(i), *value as f32)),
            KvFormat::F32 => (0..).zip(head).for_each(|(i, value)| memory.set_f32(range, place(i), *value as f32)),
            KvFormat::Int8 => {
                let (codes, scale) = quantise_head(head);
                for (i, code) in (0..).zip(codes) {
                    let (index, shift) = (place(i) / 4, place(i) % 4 * 8);
                    let word = memory.u32(range, index) & !(255 << shift);
                    memory.set_u32(range, index, word | u32::from(code as u8) << shift);
                }
                memory.set_f32(range, self.scale_index(at), scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each number of a page has a place of its own, and together with the scales they fill it.
    #[test]
    fn numbers_and_scales_fill_a_page() {
        for (format, dim) in [(KvFormat::F16, 80), (KvFormat::F32, 8), (KvFormat::Int8, 96), (KvFormat::Int8, 8)] {
            let pages = CachePages { format, kv_heads: 3, dim };
            for half in [Half::Keys, Half::Values] {
                let bytes = if format == KvFormat::Int8 { 1 } else { pages.page_bytes() as u32 / (3 * TOKENS * dim) };
                let mut taken = vec![false; 2 * pages.page_bytes() as usize];
                let mut take = |first: u32, bytes: u32| {
                    for at in first..first + bytes {
                        assert!(
                            !std::mem::replace(&mut taken[at as usize], true),
                            "{pages:?} {half:?}: byte {at} twice"
                        );
                    }
                };
                let places = (0..2).flat_map(|page| (0..3).map(move |head| (page, head)));
                for (page, head) in places {
                    for at in (0..16).map(|token| TokenPlace { page, head, token }) {
                        (0..dim).for_each(|i| take(pages.index(half, at, i) * bytes, bytes));
                        if format == KvFormat::Int8 {
                            take(pages.scale_index(at) * 4, 4);
                        }
                    }
                }
                assert!(taken.iter().all(|taken| *taken), "{pages:?} {half:?}");
            }
        }
    }

    #[test]
    fn the_hadamard_matrix_is_its_own_inverse_and_spreads_a_large_value() {
        for (dim, block) in [(8, 8), (80, 16), (96, 32), (128, 128), (256, 128)] {
            let mut head = vec![0.0; dim];
            head[5] = 1.0;
            hadamard(&mut head);
            for (i, value) in head.iter().enumerate() {
                let wanted = if i < block { 1.0 / (block as f64).sqrt() } else { 0.0 };
                let sign = if (i & 5).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                assert!((value - sign * wanted).abs() < 1e-12, "{dim}, {i}: {value}");
            }
            hadamard(&mut head);
            assert!(head.iter().enumerate().all(|(i, v)| (v - f64::from(u8::from(i == 5))).abs() < 1e-12), "{dim}");
        }
    }

    #[test]
    fn codes_take_about_half_of_the_bytes_of_f16() {
        let bytes = |format, dim| CachePages { format, kv_heads: 8, dim }.page_bytes();
        assert_eq!((bytes(KvFormat::F16, 128), bytes(KvFormat::Int8, 128)), (32_768, 16_896));
        assert_eq!((bytes(KvFormat::F16, 64), bytes(KvFormat::Int8, 64)), (16_384, 8_704));
    }

    /// Keys in which every 32nd dimension is 20 times the others: with the Hadamard matrix, the error of their products
    /// with queries is less than a third.
    #[test]
    fn the_hadamard_matrix_keeps_products_with_large_dimensions() {
        let mut state = 1u32;
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state >> 8) / f64::from(1 << 23) - 1.0
        };
        let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() / 2.0;
        let coded = |key: &[f64]| -> Vec<f64> {
            let (codes, scale) = quantise_head(key);
            codes.into_iter().map(|code| f64::from(code) * f64::from(scale)).collect()
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (mut plain, mut spread) = (0.0, 0.0);
        for _ in 0..100 {
            let mut key: Vec<f64> = (0..128).map(|i| normal() * if i % 32 == 5 { 20.0 } else { 1.0 }).collect();
            let mut query: Vec<f64> = (0..128).map(|_| normal()).collect();
            let wanted = dot(&key, &query);
            plain += (dot(&coded(&key), &query) - wanted).powi(2);
            hadamard(&mut key);
            hadamard(&mut query);
            spread += (dot(&coded(&key), &query) - wanted).powi(2);
        }
        assert!(9.0 * spread < plain, "{spread} instead of {plain}");
    }

    #[test]
    fn codes_are_within_half_a_scale_and_bad_values_stay_visible() {
        let head: Vec<f64> = (0..128).map(|i| f64::from(i * i % 97) - 48.5).collect();
        let (codes, scale) = quantise_head(&head);
        assert!(codes.iter().any(|code| code.unsigned_abs() == 127));
        for (code, value) in codes.iter().zip(&head) {
            assert!((f64::from(*code) * f64::from(scale) - value).abs() <= 0.501 * f64::from(scale));
        }
        assert_eq!(quantise_head(&[0.0, 1e-31]), (vec![0, 0], 0.0));
        assert!(quantise_head(&[1.0, f64::NAN, 2.0]).1.is_nan());
        assert_eq!(quantise_head(&[1.0, f64::NEG_INFINITY]).1, f32::INFINITY);
    }
}

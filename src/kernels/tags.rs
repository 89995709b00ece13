//! Activations that carry their own readiness, the host half of `tags.glsl`: the generations of a
//! recording's buffers, and which operands of a call are tagged.
//! Deliberately absent: where barriers then stand (`barriers`).

use super::recording::{BufferId, Call, Range};
use std::collections::HashMap;

/// Low bits of a word that are its tag.
pub const TAG_BITS: u32 = 7;
const TAG_MASK: u32 = (1 << TAG_BITS) - 1;

/// The word of generation `tag` that is nearest to a value.
pub fn tagged(value: f32, tag: u32) -> u32 {
    let bits = value.to_bits();
    let mut magnitude = bits & 0x7fff_ffff;
    if magnitude < 0x7f80_0000 {
        magnitude = (magnitude + (1 << (TAG_BITS - 1))).max(tag) - tag;
    }
    bits & 0x8000_0000 | magnitude & !TAG_MASK | tag
}

/// Counts how often a recording has written each of its tagged buffers.
#[derive(Clone, Debug, Default)]
pub struct Generations {
    written: HashMap<BufferId, u32>,
}

impl Generations {
    /// The tag of what the buffer of `range` holds now; 0, which no write has, before the first.
    pub fn now(&self, range: Range) -> u32 {
        self.written.get(&range.buffer).map_or(0, |count| tag_of(*count))
    }

    /// The tag of the next write to the buffer of `range`.
    pub fn next(&mut self, range: Range) -> u32 {
        let count = self.written.entry(range.buffer).or_default();
        *count += 1;
        tag_of(*count)
    }
}

/// Tag 1 is the first write's alone, so that a step's first words differ from the last of the step before,
/// whatever their number, if there are two or more.
fn tag_of(count: u32) -> u32 {
    if count == 1 { 1 } else { 2 + (count - 2) % (TAG_MASK - 1) }
}

/// Which operands of a call are tagged, and with what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Whether the input is; its tag.
    pub input_carried: bool,
    /// Tag of the input.
    pub input: u32,
    /// Tag of the output before the call.
    pub old: u32,
    /// Tag of the output, if it is tagged; then the input is too, if the kernel has one.
    pub output: Option<u32>,
}

impl Flow {
    /// Nothing is tagged.
    pub const NONE: Flow = Flow { input_carried: false, input: 0, old: 0, output: None };

    /// The constant TAGGED of a kernel.
    pub fn code(&self) -> u32 {
        match (self.input_carried, self.output) {
            (_, Some(_)) => 3,
            (true, None) => 1,
            (false, None) => 0,
        }
    }

    /// Marks a call's accesses to its input and output.
    pub fn mark(&self, mut call: Call, input: Range, output: Range) -> Call {
        if self.input_carried {
            call = call.carry(input);
        }
        if self.output.is_some() {
            call = call.carry(output);
        }
        call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tagged_word_is_near_its_value_and_has_its_tag() {
        for bits in (0..=u32::MAX).step_by(65_537) {
            let value = f32::from_bits(bits);
            for tag in [0, 1, 63, 64, 127] {
                let word = tagged(value, tag);
                assert_eq!(word & TAG_MASK, tag);
                let near = f32::from_bits(word);
                if value.is_finite() && value.abs() < 1e38 {
                    let limit = f64::from(value.abs()) * 2f64.powi(-17) + 2e-43;
                    assert!((f64::from(near) - f64::from(value)).abs() <= limit, "{value:e} became {near:e}");
                } else if value.is_nan() {
                    assert!(near.is_nan() || near.is_infinite());
                }
            }
        }
    }

    #[test]
    fn consecutive_writes_differ_also_from_one_step_to_the_next() {
        for writes in 2..600 {
            let tags: Vec<u32> = (1..=writes).map(tag_of).collect();
            assert!(tags.iter().all(|tag| (1..=TAG_MASK).contains(tag)));
            assert!(tags.windows(2).all(|pair| pair[0] != pair[1]));
            assert_ne!(tags.last(), tags.first(), "{writes} writes a step");
        }
    }
}

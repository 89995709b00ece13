//! SplitMix64, the generator of seeds: fast, with one word of state.
//! Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

/// The step of the state: 2^64 divided by the golden ratio, made odd. Consecutive multiples modulo 2^64 are far apart.
pub const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64: flipping any input bit changes half of the output bits on average.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// SplitMix64: advances the state and returns a well-mixed value.
pub fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(GAMMA);
    mix(*state)
}

/// Returns the number that [`split_mix`] gives in its call number `index`, counted from 1, if the state begins with
/// `seed`.
pub fn nth(seed: u64, index: u32) -> u64 {
    split_mix(&mut seed.wrapping_add(u64::from(index - 1).wrapping_mul(GAMMA)))
}

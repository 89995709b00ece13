//! The gated delta rule over tokens that may be rejected again: `delta_verify`, and what it leaves for whoever comes next.
//! Deliberately absent: which tokens those are (`draft`), and the rule itself (`delta`).

use super::delta::{DeltaHeads, RING, check, gated, head_rows, log_decay, put, sigmoid, step_groups};
use super::host_memory::HostMemory;
use super::recording::{Call, Range};
use super::shaders::{DeltaVerifyArgs, DeltaVerifyConstants};
use super::state::{SLOT_SETTLED, SLOT_WORDS};

/// Tokens of a cell that its state may have to take in still.
pub const MOST_PENDING: u32 = 4;

impl DeltaHeads {
    /// Floats of a token of a value head that its state has to take in still: k̂, δ, and α with padding.
    fn pending_floats(self) -> u32 {
        self.key_dim + self.value_dim + 4
    }

    /// Bytes of what as many cells' states have to take in still.
    pub fn pending_bytes(self, cells: u32) -> u64 {
        4 * u64::from(cells) * u64::from(self.value * MOST_PENDING * self.pending_floats())
    }
}

/// `each` consecutive tokens of each of `sequences` sequences. With `packed` the output is packed for the next product, and
/// its stride counts blocks of 32 columns; only rows with a sequence are written.
///
/// # Panics
/// If the heads are not served, strides do not fit them, or there are more tokens than can be pending.
pub fn delta_verify(
    label: String,
    heads: DeltaHeads,
    (sequences, each): (u32, u32),
    packed: bool,
    args: DeltaVerifyArgs,
) -> Call {
    check(heads, packed, args.stride, args.y_stride);
    assert!((1..=MOST_PENDING).contains(&each), "{each} tokens of a sequence");
    let groups = step_groups(heads);
    let constants = DeltaVerifyConstants {
        threads: groups * heads.value_dim / 4,
        key_heads: heads.key,
        value_heads: heads.value,
        key_dim: heads.key_dim,
        value_dim: heads.value_dim,
        groups,
        each,
        packed: u32::from(packed),
    };
    Call {
        kernel: "delta_verify",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [heads.value, sequences, 1],
    }
}

/// Where token `index` of a cell's value head lies in `pending`, in floats.
fn pending_at(heads: DeltaHeads, cell: u32, h: u32, index: u32) -> u32 {
    ((cell * heads.value + h) * MOST_PENDING + index) * heads.pending_floats()
}

/// What a token does to the state of a value head: `s ← α s + k̂ δᵀ`.
pub(super) fn take_in(memory: &HostMemory, heads: DeltaHeads, pending: Range, (cell, h, index): (u32, u32, u32), s: &mut [f64]) {
    let at = pending_at(heads, cell, h, index);
    let value = |i: u32| f64::from(memory.f32(pending, at + i));
    let alpha = value(heads.key_dim + heads.value_dim);
    for d in 0..heads.key_dim {
        for column in 0..heads.value_dim {
            let state = &mut s[(d * heads.value_dim + column) as usize];
            *state = alpha * *state + value(d) * value(heads.key_dim + column);
        }
    }
}

/// Tokens that a cell's state has to take in still, before position `position`.
pub(super) fn accepted(memory: &HostMemory, slots: Range, cell: u32, position: u32) -> u32 {
    let settled = memory.u32(slots, cell * SLOT_WORDS + SLOT_SETTLED);
    position.wrapping_sub(settled).min(MOST_PENDING)
}

/// In f64, nothing rounded but what is stored.
pub(super) fn reference_delta_verify(call: &Call, memory: &mut HostMemory) {
    let a = DeltaVerifyArgs::from_args(&call.args);
    let c = DeltaVerifyConstants::from_values(&call.constants);
    let heads = DeltaHeads { key: c.key_heads, value: c.value_heads, key_dim: c.key_dim, value_dim: c.value_dim };
    let (channels, numbers) = (heads.channels(), heads.key_dim * heads.value_dim);
    for sequence in 0..call.groups[1] {
        let first = sequence * c.each;
        let [_, position, cell, valid] = std::array::from_fn(|i| memory.u32(a.rows, first * 4 + i as u32));
        if valid == 0 {
            continue;
        }
        let taken = accepted(memory, a.slots, cell, position);
        let fresh = memory.u32(a.slots, cell * SLOT_WORDS + SLOT_SETTLED) == 0;
        let ring = |position: u32, channel: u32| (cell * RING + position % RING) * channels + channel;
        for t in 0..c.each {
            for channel in 0..channels {
                let u = memory.u32(a.x, (first + t) * a.stride + channel);
                memory.set_u32(a.window, ring(position + t, channel), u);
            }
        }
        for h in 0..heads.value {
            let base = (cell * heads.value + h) * numbers;
            let mut s: Vec<f64> = (0..numbers)
                .map(|i| if fresh { 0.0 } else { f64::from(memory.f32(a.state, base + i)) })
                .collect();
            for index in 0..taken {
                take_in(memory, heads, a.pending, (cell, h, index), &mut s);
            }
            if taken > 0 {
                (0..).zip(&s).for_each(|(i, value)| memory.set_f32(a.state, base + i, *value as f32));
            }
            for t in 0..c.each {
                let row = first + t;
                let gates = channels + heads.output() + h;
                let beta = sigmoid(memory.f32(a.x, row * a.stride + gates));
                let decay = memory.f32(a.x, row * a.stride + gates + heads.value);
                let alpha = log_decay(decay, memory.f32(a.a_log, h), memory.f32(a.dt_bias, h)).exp();
                let [q, k, v] = head_rows(memory, heads, a.conv, h, &|channel| {
                    std::array::from_fn(|j| match (position + t + j as u32).checked_sub(3) {
                        Some(past) => f64::from(memory.f32(a.window, ring(past, channel))),
                        None => 0.0,
                    })
                });
                let width = heads.value_dim as usize;
                let (mut o, mut deltas) = (Vec::new(), Vec::new());
                for (column, v) in v.iter().enumerate() {
                    let old: f64 = k.iter().enumerate().map(|(d, k)| alpha * s[d * width + column] * k).sum();
                    let delta = beta * (v - old);
                    for (d, k) in k.iter().enumerate() {
                        s[d * width + column] = alpha * s[d * width + column] + k * delta;
                    }
                    o.push(q.iter().enumerate().map(|(d, q)| s[d * width + column] * q).sum());
                    deltas.push(delta);
                }
                let at = pending_at(heads, cell, h, t);
                for (i, value) in (0..).zip(k.iter().chain(&deltas).chain(&[alpha, 0.0, 0.0, 0.0])) {
                    memory.set_f32(a.pending, at + i, *value as f32);
                }
                let z = |i: u32| memory.f32(a.x, row * a.stride + channels + h * heads.value_dim + i);
                for (i, value) in (0..).zip(gated(memory, &o, a.norm, a.epsilon, &z)) {
                    put(memory, a.y, c.packed, (row, h * heads.value_dim + i, a.y_stride), value);
                }
            }
        }
    }
}

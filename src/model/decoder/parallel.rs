//! Tensor parallelism: the exchanges of a step with the other devices that compute parts of the same layers.
//!
//! Not here: which part of each weight a device has (`checkpoint::shard`).

use super::{Decoder, Step, StepShape, stride};
use crate::kernels::exchange::{self, ExchangeBuffers, ExchangeShape, Phase, Summed};
use crate::kernels::gemm::Activations;
use crate::kernels::recording::{Op, Recording};

/// The buffer with the parts of sums for the other devices.
pub const OUTBOX: &str = "exchange.send_parts";
/// The buffer with the parts of sums of the other devices.
pub const INBOX: &str = "exchange.receive_parts";

impl Decoder<'_> {
    /// Returns the number of words of each slot of the exchange's buffers: those of the rows of any step.
    pub fn exchange_words(&self) -> u32 {
        let rows = self.state.chunk.max(self.state.rows).max(self.ring.rows);
        exchange::words_of(u64::from(rows) * u64::from(stride(self.config.hidden)), false) as u32
    }

    /// Records the sum over all devices of `x`, into it or onto the residual stream.
    pub(super) fn all_reduce(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        name: &str,
        (x, y): (Activations, Activations),
    ) {
        let rank = self.stage.rank.expect("a device with a part of every layer");
        let (index, slot_words) = (exchanges(r), self.exchange_words());
        let buffers = ExchangeBuffers {
            outbox: r.buffer(OUTBOX, exchange::outbox_bytes(slot_words)),
            inbox: r.buffer(INBOX, exchange::inbox_bytes(slot_words, rank.of)),
            number: self.state.exchange(r),
            fault: step.fault,
            slot_words,
        };
        // In a divided step, no workgroup waits for another one.
        let divided = self.tuning.exchange_polls == 0;
        let workgroups = if divided { u32::MAX } else { self.tuning.exchange_workgroups };
        let exchange_shape = ExchangeShape { rank, workgroups, most_polls: self.tuning.exchange_polls.max(1) };
        // Without polls, the step is divided there, and the host lets the rest begin.
        let phases: &[Phase] = match self.tuning.exchange_polls {
            0 => &[Phase::Send, Phase::Receive],
            _ => &[Phase::Both],
        };
        let count = matches!(shape, StepShape::Prefill { .. }).then_some(step.chunk);
        let summed = Summed {
            rows: shape.rows(),
            count,
            x,
            y,
            adds: y.range.buffer == step.x.range.buffer,
            halves: count.is_some() && self.tuning.exchange_halves,
            flow: step.flow(Some(x.range), Some(y.range)),
        };
        for phase in phases {
            let label = format!("{name}_{}", if *phase == Phase::Send { "send" } else { "sum" });
            r.call(exchange::all_reduce(label, summed, (exchange_shape, *phase), index, buffers));
        }
    }
}

/// Returns the number of exchanges of a step.
pub fn exchanges(recording: &Recording) -> u32 {
    phases(recording).filter(|(_, phase)| *phase != Phase::Send).count() as u32
}

/// Returns a step in the parts between which the host carries sums; the whole step, if it waits for them itself.
pub fn pieces(recording: &Recording) -> Vec<Recording> {
    let ends = phases(recording).filter(|(_, phase)| *phase == Phase::Send).map(|(index, _)| index + 1);
    recording.cut(&ends.collect::<Vec<_>>())
}

/// Returns the exchanges of a recording: the index of the operation, and the part of the exchange that it does.
fn phases(recording: &Recording) -> impl Iterator<Item = (usize, Phase)> {
    recording.ops.iter().enumerate().filter_map(|(index, op)| match op {
        Op::Call(call) => Some((index, Phase::of(call)?)),
        Op::Copy { .. } | Op::Fill { .. } => None,
    })
}

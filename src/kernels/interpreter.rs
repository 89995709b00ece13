//! Runs a recording in plain Rust, call by call through each kernel's `reference()`.
//! Slow and exact in meaning: tests compare every named buffer with the device's.

use super::host_memory::HostMemory;
use super::recording::{Op, Recording};

/// Runs all operations in order.
pub fn run(recording: &Recording, memory: &mut HostMemory) {
    for op in &recording.ops {
        match op {
            Op::Call(call) => super::reference(call.kernel)(call, memory),
            Op::Copy { from, to } => {
                for i in 0..(from.bytes / 4) as u32 {
                    let word = memory.u32(*from, i);
                    memory.set_u32(*to, i, word);
                }
            }
            Op::Fill { to, word } => {
                for i in 0..(to.bytes / 4) as u32 {
                    memory.set_u32(*to, i, *word);
                }
            }
        }
    }
}

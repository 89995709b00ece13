//! The interpreter: runs a recording in plain Rust, calling each kernel's reference. It is slow, and it defines the
//! result: tests compare every named buffer with the device's. Not here: anything of a GPU.

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

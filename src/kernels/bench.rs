//! `read_bandwidth`: the memory bandwidth benchmark of `ostinato bench`. Not here: anything that a model uses.

use super::fold;
use super::host_memory::HostMemory;
use super::recording::{Call, Range, Recording};
use super::shaders::{ReadBandwidthArgs, ReadBandwidthConstants};

/// The number of 16-byte loads that an invocation has in flight.
const LOADS: u64 = 16;

/// The number of bytes that one workgroup reads.
pub fn tile_bytes(threads: u32) -> u64 {
    LOADS * 16 * u64::from(threads)
}

/// Returns a recording that reads `data` once. The length of `data` is `bytes`, rounded down to a multiple of
/// [`tile_bytes`].
pub fn read_bandwidth(bytes: u64, threads: u32) -> Recording {
    let mut recording = Recording::new("read_bandwidth");
    let tiles = bytes / tile_bytes(threads);
    let data: Range = recording.buffer("read_bandwidth.data", tiles * tile_bytes(threads));
    let total = recording.buffer("read_bandwidth.total", 4);
    recording.call(Call {
        kernel: "read_bandwidth",
        label: "read_bandwidth".to_owned(),
        constants: ReadBandwidthConstants { threads }.into_values(),
        args: ReadBandwidthArgs { data, total }.into_args(),
        groups: fold(u32::try_from(tiles).unwrap_or(u32::MAX), 1),
    });
    recording
}

/// Reference of `read_bandwidth`: writes nothing, because the sum never equals the constant that the shader compares it
/// with.
pub(super) fn reference_read_bandwidth(_: &Call, _: &mut HostMemory) {}

//! `latent_rows` and `latent_values`, the products around the attention of latent vectors (MLA): queries are projected
//! into the latent space, and values are computed from the attention's weighted sum of latent vectors. Not here: the
//! attention itself, which has one key head (`attention`).

use crate::kernels::gemm::Activations;
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{LatentRowsArgs, LatentRowsConstants, LatentValuesArgs, LatentValuesConstants};

/// The number of invocations of a workgroup.
const THREADS: u32 = 128;

/// The dimensions of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// The number of query heads.
    pub heads: u32,
    /// The rotated dimensions of a query and of the key.
    pub rope: u32,
    /// The other dimensions of a query.
    pub nope: u32,
    /// The dimensions of the latent vector.
    pub rank: u32,
    /// The dimensions of a head's value.
    pub values: u32,
}

/// Returns the call that writes `rows` rows of queries, key and value to `y`: `heads + 2` heads of `rope + rank` floats. `q`
/// has the queries, `heads` of `rope + nope`; `k` the key from float `k_first` on, `rope` floats and the latent vector.
/// `weights`: `[heads][nope][rank]`.
pub fn latent_rows(
    label: String,
    shape: LatentShape,
    rows: u32,
    q: Activations,
    (k, k_first): (Activations, u32),
    weights: Range,
    y: Activations,
) -> Call {
    let LatentShape { heads, rope, nope, rank, .. } = shape;
    let constants = LatentRowsConstants { threads: THREADS, heads, rope, nope, rank };
    let args = LatentRowsArgs {
        q: q.range,
        k: k.range,
        w: weights,
        y: y.range,
        q_stride: q.stride,
        k_stride: k.stride,
        k_first,
        y_stride: y.stride,
    };
    Call {
        kernel: "latent_rows",
        label,
        constants: constants.into_values(),
        args: args.into_args(),
        groups: [heads + 1, rows, 1],
    }
}

/// Returns the call that writes the values of `rows` rows to `y`, `heads` of `values` floats, from attention's output `x`.
/// `weights`: `[heads][values][rank]`.
pub fn latent_values(
    label: String,
    shape: LatentShape,
    rows: u32,
    x: Activations,
    weights: Range,
    y: Activations,
) -> Call {
    let LatentShape { heads, rope, rank, values, .. } = shape;
    let args = LatentValuesArgs { x: x.range, w: weights, y: y.range, x_stride: x.stride, y_stride: y.stride };
    Call {
        kernel: "latent_values",
        label,
        constants: LatentValuesConstants { threads: THREADS, rope, rank, values }.into_values(),
        args: args.into_args(),
        groups: [heads, rows, 1],
    }
}

pub(crate) fn reference_latent_rows(call: &Call, memory: &mut HostMemory) {
    let a = LatentRowsArgs::from_args(&call.args);
    let c = LatentRowsConstants::from_values(&call.constants);
    let dim = c.rope + c.rank;
    for row in 0..call.groups[1] {
        for h in 0..c.heads {
            let (from, to) = (row * a.q_stride + h * (c.rope + c.nope), row * a.y_stride + h * dim);
            for i in 0..c.rope {
                let value = memory.f32(a.q, from + i);
                memory.set_f32(a.y, to + i, value);
            }
            for j in 0..c.rank {
                let term = |i: u32| {
                    let weight = memory.f32(a.w, (h * c.nope + i) * c.rank + j);
                    f64::from(weight) * f64::from(memory.f32(a.q, from + c.rope + i))
                };
                let sum: f64 = (0..c.nope).map(term).sum();
                memory.set_f32(a.y, to + c.rope + j, sum as f32);
            }
        }
        for (i, part) in (0..dim).flat_map(|i| [(i, 0), (i, 1)]) {
            let value = memory.f32(a.k, row * a.k_stride + a.k_first + i);
            memory.set_f32(a.y, row * a.y_stride + (c.heads + part) * dim + i, value);
        }
    }
}

pub(crate) fn reference_latent_values(call: &Call, memory: &mut HostMemory) {
    let a = LatentValuesArgs::from_args(&call.args);
    let c = LatentValuesConstants::from_values(&call.constants);
    for (row, h) in (0..call.groups[1]).flat_map(|row| (0..call.groups[0]).map(move |h| (row, h))) {
        let from = row * a.x_stride + h * (c.rope + c.rank) + c.rope;
        for r in 0..c.values {
            let term = |i: u32| {
                let weight = memory.f32(a.w, (h * c.values + r) * c.rank + i);
                f64::from(weight) * f64::from(memory.f32(a.x, from + i))
            };
            let sum: f64 = (0..c.rank).map(term).sum();
            memory.set_f32(a.y, row * a.y_stride + h * c.values + r, sum as f32);
        }
    }
}

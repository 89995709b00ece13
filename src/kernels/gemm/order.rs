//! `order_rows` and `order_packed`, which give a product its input in another order of columns. Not here: where the order
//! comes from (`quant`).

use super::tiled::{Packed, token_index};
use super::{Activations, fold, normed};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{OrderPackedArgs, OrderPackedConstants, OrderRowsArgs, OrderRowsConstants};
use crate::memory::pack::FRAGMENT_COLS;

/// Returns the table of an order: `order`, followed by the identity up to the length of padded rows, which kernels read.
pub fn table(order: &[u32]) -> Vec<u32> {
    let cols = order.len() as u32;
    order.iter().copied().chain(cols..table_words(cols)).collect()
}

/// Returns the number of words of the table of an order of `cols` columns.
pub fn table_words(cols: u32) -> u32 {
    cols.next_multiple_of(FRAGMENT_COLS)
}

/// Returns the call that writes columns `order` of `rows` rows of x to y, after an optional RMSNorm with the given weight
/// and epsilon. Both rows have `cols` columns.
pub fn order_rows(
    label: String,
    x: Activations,
    norm: Option<(Range, f32)>,
    order: Range,
    y: Activations,
    (rows, cols): (u32, u32),
) -> Call {
    assert!(y.stride <= table_words(cols), "rows of {} floats have a table of {cols} columns", y.stride);
    let threads = y.stride.next_power_of_two().clamp(32, 256);
    let (weight, epsilon) = norm.unwrap_or((x.range.none(), 0.0));
    let args = OrderRowsArgs {
        x: x.range,
        norm: weight,
        order,
        y: y.range,
        k: cols,
        x_stride: x.stride,
        y_stride: y.stride,
        epsilon,
    };
    Call {
        kernel: "order_rows",
        label,
        constants: OrderRowsConstants { threads, norm: u32::from(norm.is_some()) }.into_values(),
        args: args.into_args(),
        groups: [rows, 1, 1],
    }
}

/// Returns the call that writes columns `order` of `rows` packed rows x to y, which has the format and columns of x.
pub fn order_packed(label: String, x: Packed, order: Range, y: Range, rows: u32) -> Call {
    let bytes = Packed::bytes(rows, x.cols);
    let (chunks, words, threads) = (x.cols.div_ceil(FRAGMENT_COLS), (bytes / 4) as u32, 256);
    let args = OrderPackedArgs { x: x.range.part(0, bytes), order, y: y.part(0, bytes), chunks, words };
    Call {
        kernel: "order_packed",
        label,
        constants: OrderPackedConstants { threads }.into_values(),
        args: args.into_args(),
        groups: fold(words.div_ceil(threads), 1),
    }
}

pub(crate) fn reference_order_rows(call: &Call, memory: &mut HostMemory) {
    let a = OrderRowsArgs::from_args(&call.args);
    let constants = OrderRowsConstants::from_values(&call.constants);
    for row in 0..call.groups[0] {
        let x: Vec<f64> = (0..a.k).map(|i| f64::from(memory.f32(a.x, row * a.x_stride + i))).collect();
        let x = if constants.norm == 1 { normed(memory, x, a.norm, a.epsilon) } else { x };
        for j in 0..a.y_stride {
            let value = if j < a.k { x[memory.u32(a.order, j) as usize] as f32 } else { 0.0 };
            memory.set_u32(a.y, row * a.y_stride + j, value.to_bits());
        }
    }
}

pub(crate) fn reference_order_packed(call: &Call, memory: &mut HostMemory) {
    let a = OrderPackedArgs::from_args(&call.args);
    let padded = a.chunks * FRAGMENT_COLS;
    for row in 0..a.words * 2 / padded {
        for col in (0..padded).step_by(2) {
            let number = |col: u32| {
                let at = token_index(row, memory.u32(a.order, col), padded) as u32;
                memory.u32(a.x, at / 2) >> (16 * (at % 2)) & 0xffff
            };
            let word = number(col) | number(col + 1) << 16;
            memory.set_u32(a.y, token_index(row, col, padded) as u32 / 2, word);
        }
    }
}

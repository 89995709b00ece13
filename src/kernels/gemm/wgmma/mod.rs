//! `wgmma`, the GEMM of many rows on the matrix units of NVIDIA's compute capability 9.0, which only PTX reaches: products
//! of a fragment-packed weight matrix with packed rows in [`PackedOrder::Swizzled`]. Its program is a text that
//! [`text`](mod@text) makes for the constants of a call. Not here: other devices (`tiled`, `panel`).

pub mod probe;
pub mod text;

pub use text::{WgmmaTile, WgmmaVariant};

use super::Format;
use crate::kernels::gemm::tiled::{Output, Packed, PackedOrder, SWIZZLED_COLS, Tiled, swizzled_index};
use crate::kernels::gemm::{self, Epilogue};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::{Access, Arg, Call, Range};
use crate::kernels::shaders::WGMMA;
use crate::memory::pack::fragment_index;

/// Returns what the program of a call with these constants is made for.
pub fn variant_of(constants: &[u32]) -> WgmmaVariant {
    let &[groups, blocks, tokens, stages, bias, epilogue, packed] = constants else {
        panic!("{} has other constants than {constants:?}", WGMMA.name)
    };
    WgmmaVariant { tile: WgmmaTile { groups, blocks, tokens, stages }, epilogue, bias: bias == 1, packed: packed == 1 }
}

/// Whether the kernel multiplies with a weight matrix of `n` rows and `k` columns.
pub fn serves(format: Format, n: u32, k: u32) -> bool {
    format == Format::Bf16 && n.is_multiple_of(16) && k.is_multiple_of(SWIZZLED_COLS)
}

/// Whether the kernel can write the gated outputs of `n` rows of W as packed rows for the next product.
pub fn packs(n: u32) -> bool {
    n.is_multiple_of(2 * SWIZZLED_COLS)
}

/// Returns the tile with which a device of `processors` processors probably finishes `rows` rows of x by `n` rows and `k`
/// columns of W first.
pub fn choose(rows: u32, n: u32, processors: u32) -> WgmmaTile {
    let tile = |groups, blocks, tokens, stages| WgmmaTile { groups, blocks, tokens, stages };
    // Largest first: of equal costs the first is chosen. A processor computes one tile at a time.
    let tiles = [
        tile(2, 1, 256, 4),
        tile(2, 2, 128, 4),
        tile(3, 1, 128, 5),
        tile(2, 1, 128, 6),
        tile(1, 1, 128, 8),
        tile(3, 1, 64, 6),
        tile(2, 1, 64, 8),
        tile(1, 1, 64, 12),
    ];
    // The cycles of a step of 64 columns: the matrix units take 2 for a row of x and 64 of W, a copy from the L2 cache
    // takes one for 56 bytes, and some are lost.
    let cost = |tile: &WgmmaTile| {
        let (w, x) = (tile.weight_rows(), tile.tokens.min(rows.next_multiple_of(8)));
        let work = w / 64 * tile.tokens * 2;
        let copies = (w + x) * 128 / 56;
        let tiles = u64::from(rows.div_ceil(tile.tokens)) * u64::from(n.div_ceil(w));
        tiles.div_ceil(u64::from(processors.max(1))) * u64::from(work.max(copies) + 80)
    };
    // No tile has a half without rows.
    let fits = |tile: &WgmmaTile| tile.tokens <= rows.next_multiple_of(64);
    tiles.into_iter().filter(fits).min_by_key(cost).unwrap_or(tiles[tiles.len() - 1])
}

/// Returns the call of a product for at most `rows` rows of x: the chunk descriptor `count` holds the number of rows in
/// use; without, all are. `processors` is the number of workgroups that run at once.
///
/// # Panics
/// If the kernel does not serve the weight ([`serves`]), rows are packed in another order or with other columns, or y is
/// packed without a gated linear unit: bugs of the caller.
pub fn wgmma(product: &Tiled, tile: WgmmaTile, rows: u32, count: Option<Range>, processors: u32) -> Call {
    let (weight, n, k) = (product.weight.range, product.weight.rows, product.weight.cols);
    let label = &product.label;
    assert!(serves(product.weight.format, n, k), "{n} × {k} of \"{label}\"");
    assert_eq!((product.x.order, product.x.cols), (PackedOrder::Swizzled, k), "x of \"{label}\"");
    let padded = Packed::padded_rows(rows);
    let (y, y_stride, y_rows) = match product.y {
        Output::Rows(y) => (y.range, y.stride, 0),
        Output::Packed(y) => {
            let made = (product.epilogue.halves(), packs(n), y.order, y.cols);
            assert_eq!(made, (true, true, PackedOrder::Swizzled, n / 2), "packed y of \"{label}\"");
            (y.range.part(0, Packed::bytes(rows, y.cols)), 0, padded)
        }
    };
    let constants = vec![
        tile.groups,
        tile.blocks,
        tile.tokens,
        tile.stages,
        u32::from(product.bias.is_some()),
        product.epilogue.code(),
        u32::from(matches!(product.y, Output::Packed(_))),
    ];
    // Gated outputs are not read before they are written, but a call may leave some of them as they are.
    let access = if product.epilogue == Epilogue::Residual { Access::ReadWrite } else { Access::Write };
    let args = vec![
        Arg::Buffer(weight, Access::Read),
        Arg::Buffer(product.x.range.part(0, Packed::bytes(rows, k)), Access::Read),
        Arg::Buffer(product.bias.unwrap_or(weight.none()), Access::Read),
        Arg::Buffer(y, access),
        Arg::Buffer(count.unwrap_or(weight.none()), Access::Read),
        Arg::U32(n),
        Arg::U32(k),
        Arg::U32(if count.is_some() { 0 } else { rows }),
        Arg::U32(padded),
        Arg::U32(y_stride),
        Arg::U32(y_rows),
    ];
    let tiles = rows.div_ceil(tile.tokens) * n.div_ceil(tile.weight_rows());
    Call { kernel: WGMMA.name, label: label.clone(), constants, args, groups: [tiles.min(processors.max(1)), 1, 1] }
}

/// Sums in f64, like the references of the other products. Rows beyond the rows in use are left unchanged.
pub(crate) fn reference_wgmma(call: &Call, memory: &mut HostMemory) {
    let variant = variant_of(&call.constants);
    let [weight, x, bias, y, count, values @ ..] = &call.args[..] else { panic!("arguments of {}", WGMMA.name) };
    let (weight, x, bias, y) = (weight.range(), x.range(), bias.range(), y.range());
    let values: Vec<u32> = values.iter().map(|value| value.u32()).collect();
    let &[n, k, rows, x_rows, y_stride, y_rows] = &values[..] else { panic!("arguments of {}", WGMMA.name) };
    let rows = if rows == 0 { memory.u32(count.range(), 2) } else { rows };
    let number = |memory: &HostMemory, range, at: usize| f64::from(memory.weight(Format::Bf16, range, at as u32));
    let weights: Vec<f64> = (0..n)
        .flat_map(|r| (0..k).map(move |col| (r, col)))
        .map(|(r, col)| number(memory, weight, fragment_index(r, col, k)))
        .collect();
    for row in 0..rows {
        let x: Vec<f64> = (0..k).map(|col| number(memory, x, swizzled_index(row, col, x_rows))).collect();
        let v: Vec<f64> = (0..n)
            .zip(weights.chunks_exact(k as usize))
            .map(|(r, w)| {
                let dot: f64 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
                dot + if variant.bias { f64::from(memory.f32(bias, r)) } else { 0.0 }
            })
            .collect();
        if !variant.packed {
            gemm::finish(memory, variant.epilogue, (y, None), row * y_stride, &v);
            continue;
        }
        for (col, pair) in (0..).zip(v.chunks_exact(2)) {
            let value = gemm::glu(variant.epilogue, pair[0], pair[1]) as f32;
            memory.set_number(Format::Bf16, y, swizzled_index(row, col, y_rows) as u32, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_get_smaller_where_large_ones_leave_processors_idle() {
        let chosen = |rows, n| {
            let tile = choose(rows, n, 132);
            (tile.weight_rows(), tile.tokens)
        };
        assert_eq!([64, 128, 256].map(|rows| chosen(rows, 24_576)), [(192, 64), (192, 128), (192, 128)]);
        assert_eq!([64, 128, 256, 512].map(|rows| chosen(rows, 4096)), [(64, 64), (64, 64), (64, 128), (128, 128)]);
        assert_eq!([2048, 4096].map(|rows| chosen(rows, 6144)), [(128, 256); 2]);
    }

    #[test]
    fn tiles_fit_the_device_and_its_registers() {
        for rows in [64, 65, 128, 192, 256, 384, 512, 1024, 2048, 4096] {
            for n in [16, 1024, 4096, 6144, 24_576, 151_936] {
                let tile = choose(rows, n, 132);
                assert!(tile.is_possible(), "{tile:?}");
            }
        }
    }
}

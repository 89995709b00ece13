//! `gemv_dots`, the product of row-major quantised weights with one or a few rows of activations by integer dot products: the
//! result of `gemv`, with x rounded to integers of 16 bits. Not here: other weights, and weights in fragment order.

use super::{Product, row_major_product};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::Call;
use crate::kernels::shaders::GemvDotsConstants;
use crate::kernels::{Format, codes_word, fold, format_of};
use crate::quant::number::Number;

/// The number of columns that an invocation multiplies at a time.
const SPAN: u32 = 32;

/// The most planes of bits that affine codes have: those of 3, 5 and 6 bits.
const MOST_PLANES: u32 = 2;

/// The maximum number of rows of W of a group, and of rows of x of a workgroup.
const MOST_ROWS: u32 = 16;

/// The workgroups of `gemv_dots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DotsConfig {
    /// The number of groups of invocations, each of which computes [`DotsConfig::weight_rows`] rows of W at a time.
    pub groups: u32,
    /// The number of invocations of a group, a multiple of the size of a subgroup.
    pub lanes: u32,
    /// The number of rows of W of a group, an even number.
    pub weight_rows: u32,
    /// The number of rows of x of a workgroup.
    pub batch: u32,
    /// The number of workgroups among which the rows of W are divided, if there are enough; more where the sums of so many rows
    /// do not fit in shared memory.
    pub workgroups: u32,
    /// The size of the smallest subgroups.
    pub subgroup: u32,
    /// The maximum shared memory of a workgroup in bytes; fewer rows of x, down to one, are computed by a workgroup if it does
    /// not suffice.
    pub shared_bytes: u32,
}

/// How a workgroup divides a product, for [`DotsConfig::shape`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    batch: u32,
    /// The number of times that a workgroup computes rows of W.
    blocks: u32,
    /// The number of spans of columns of x in shared memory, a multiple of a group's invocations.
    part: u32,
}

impl DotsConfig {
    /// Whether the kernel can be specialized for these workgroups; devices may not run them all.
    pub fn is_possible(self) -> bool {
        let DotsConfig { groups, lanes, weight_rows, batch, workgroups, .. } = self;
        groups.is_power_of_two()
            && lanes.is_power_of_two()
            && (1..=1024).contains(&groups.saturating_mul(lanes))
            && weight_rows.is_multiple_of(2)
            && [weight_rows, batch].iter().all(|n| (1..=MOST_ROWS).contains(n))
            && workgroups > 0
    }

    /// Returns the maximum number of subgroups of a workgroup.
    fn subgroups(self) -> u32 {
        (self.groups * self.lanes).div_ceil(self.subgroup)
    }

    /// Whether shared memory holds one turn of a group's columns for codes of any number of bits, and the sums of one block.
    pub fn fits(self) -> bool {
        self.turn_bytes(MOST_PLANES) <= self.shared_bytes - self.most_sum_bytes()
            && self.sum_bytes(1) <= self.most_sum_bytes()
    }

    /// The size of the columns of one row of x that a group multiplies in a turn: 16 words for each plane of codes and each
    /// invocation, and five more.
    fn turn_bytes(self, planes: u32) -> u32 {
        4 * self.lanes * (16 * planes + 5)
    }

    /// The size of a workgroup's sums for one row of x.
    fn sum_bytes(self, blocks: u32) -> u32 {
        4 * self.subgroups() * (blocks * self.weight_rows + 1)
    }

    /// The maximum size of these sums.
    fn most_sum_bytes(self) -> u32 {
        self.shared_bytes / 4
    }

    /// Returns how workgroups divide a product of `n` rows of W with `k` columns of `bits` bits: in few parts of equal lengths.
    fn shape(self, n: u32, k: u32, bits: u32) -> Shape {
        let most_blocks = (self.most_sum_bytes() / (4 * self.subgroups())).saturating_sub(1) / self.weight_rows;
        let blocks = n.div_ceil(self.groups * self.weight_rows).div_ceil(self.workgroups).min(most_blocks).max(1);
        let turns = k.div_ceil(SPAN * self.lanes);
        let (turn, sums) = (self.turn_bytes(bits.count_ones()), self.sum_bytes(blocks));
        let mut batch = self.batch;
        let most = loop {
            let most = self.shared_bytes.saturating_sub(batch * sums) / (batch * turn);
            if most > 0 || batch == 1 {
                break most.max(1);
            }
            batch -= 1;
        };
        let parts = turns.div_ceil(most);
        Shape { batch, blocks, part: turns.div_ceil(parts) * self.lanes }
    }
}

/// Whether weights of a format are multiplied by integer dot products: affine codes.
pub fn serves(format: Format) -> bool {
    format.codes().is_some_and(|codes| codes.number == Number::Affine)
}

impl Product {
    /// Returns the call for a few rows of x.
    ///
    /// # Panics
    /// If the weights are no affine codes.
    pub fn gemv_dots(&self, rows: u32, config: DotsConfig) -> Call {
        let DotsConfig { groups, lanes, weight_rows, .. } = config;
        let codes = self.weight.format.codes().filter(|_| serves(self.weight.format));
        let Some(codes) = codes else { panic!("integer dot products of {:?}", self.weight.format) };
        let Shape { batch, blocks, part } = config.shape(self.weight.rows, self.weight.cols, codes.bits);
        let threads = groups * lanes;
        let constants = GemvDotsConstants {
            threads,
            norm: u32::from(self.norm.is_some()),
            bias: u32::from(self.bias.is_some()),
            epilogue: self.epilogue.code(),
            rows: weight_rows,
            lanes: threads,
            spans: lanes,
            codes: codes_word(self.weight.format),
            batch,
            blocks,
            part,
            subgroups: config.subgroups(),
        };
        let workgroups = self.weight.rows.div_ceil(groups * weight_rows * blocks);
        Call {
            kernel: "gemv_dots",
            label: self.label.clone(),
            constants: constants.into_values(),
            args: self.gemv_args(rows).into_args(),
            groups: fold(workgroups * rows.div_ceil(batch), 1),
        }
    }
}

pub(crate) fn reference_gemv_dots(call: &Call, memory: &mut HostMemory) {
    let c = GemvDotsConstants::from_values(&call.constants);
    row_major_product(call, memory, format_of("codes", c.codes), [c.norm, c.bias, c.epilogue]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a workgroup's shared memory holds its part of x and its sums, also where few workgroups divide the many rows of an
    /// LM head, and shapes of the measured products stay as they are.
    #[test]
    fn sums_and_columns_fit_in_shared_memory() {
        let rule = DotsConfig {
            groups: 8,
            lanes: 32,
            weight_rows: 2,
            batch: 2,
            workgroups: 264,
            subgroup: 32,
            shared_bytes: 32 << 10,
        };
        assert_eq!(rule.shape(151_936, 4096, 4), Shape { batch: 2, blocks: 36, part: 128 });
        for (groups, lanes, workgroups, subgroup) in [(8, 32, 264, 32), (8, 32, 16, 8), (4, 64, 8, 32), (1, 64, 2, 4)] {
            let config = DotsConfig { groups, lanes, workgroups, subgroup, ..rule };
            assert!(config.fits(), "{config:?}");
            for (n, k, bits) in [(151_936, 4096, 4), (256, 12_288, 6), (24_576, 4096, 8), (3, 32, 5)] {
                let Shape { batch, blocks, part } = config.shape(n, k, bits);
                let columns = 4 * batch * part * (16 * bits.count_ones() + 5);
                let bytes = columns + batch * config.sum_bytes(blocks);
                assert!(blocks > 0 && part >= lanes && bytes <= config.shared_bytes, "{config:?}: {n}x{k}, {bytes}");
            }
        }
        assert!(!DotsConfig { lanes: 256, ..rule }.fits());
        assert!(!DotsConfig { weight_rows: 1024, ..rule }.fits());
    }
}
